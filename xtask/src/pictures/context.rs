//! A sequence on four ranks that share it: who has which chunk, and who computes which part of the
//! causal attention.

use anyhow::Result;
use trainyard_model::{Chunks, ContextSplit};
use trainyard_plan::canvas::Canvas;

const RANKS: usize = 4;
/// Tokens of the sequence: one cell a chunk.
const LENGTH: usize = 2 * RANKS;
const CELL: f64 = 26.0;
const COLOURS: [&str; RANKS] = ["parameters", "gather", "pipeline", "reduce"];

/// The division that runs and the naive one, side by side.
pub fn picture() -> Result<String> {
    let mut canvas = Canvas::new(760.0, 380.0, "A sequence in eight chunks, context_parallel_degree = 4");
    let ranks: Vec<String> = (0..RANKS).map(|rank| format!("rank {rank}")).collect();
    let key: Vec<(&str, &str)> = COLOURS.iter().zip(&ranks).map(|(colour, rank)| (*colour, rank.as_str())).collect();
    canvas.key(44.0, &key);
    division(&mut canvas, 20.0, Chunks::Zigzag, "zigzag: an early and a late chunk each")?;
    division(&mut canvas, 400.0, Chunks::Contiguous, "contiguous: two neighbours each")?;
    canvas.text(
        10.0,
        368.0,
        "small",
        "Rows are queries, columns keys. Each rank computes the rows of its chunks, after the keys of all ranks are gathered.",
    );
    Ok(canvas.finish())
}

fn division(canvas: &mut Canvas, left: f64, chunks: Chunks, title: &str) -> Result<()> {
    let top = 92.0;
    canvas.text(left, top - 12.0, "", title);
    let mut pairs = [0.0; RANKS];
    for rank in 0..RANKS {
        let split = ContextSplit { rank, ranks: RANKS, length: LENGTH, chunks };
        for query in split.rows_of(rank, LENGTH)?.into_iter().flatten() {
            let y = top + CELL * query as f64;
            canvas.text(left, y + 17.0, "small faded", &query.to_string());
            for key in 0..=query {
                let x = left + 20.0 + CELL * key as f64;
                canvas.rect((x, y), (CELL - 2.0, CELL - 2.0), COLOURS[rank]);
                // Half of the pairs of a chunk with itself are masked.
                pairs[rank] += if key == query { 0.5 } else { 1.0 };
            }
        }
    }
    let below = top + CELL * LENGTH as f64 + 14.0;
    let most = pairs.iter().copied().fold(0.0, f64::max);
    for (rank, pairs) in pairs.iter().enumerate() {
        let y = below + 12.0 * rank as f64;
        canvas.rect((left + 20.0, y), (CELL * LENGTH as f64 * pairs / (LENGTH as f64 * 2.0), 9.0), COLOURS[rank]);
    }
    canvas.text(left + 250.0, below + 9.0, "small", "work of each rank;");
    canvas.text(left + 250.0, below + 23.0, "small", &format!("all wait for {most} chunks"));
    Ok(())
}
