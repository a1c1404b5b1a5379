//! A transformer block on two ranks that share every product, with the collectives between its
//! segments.

use trainyard_plan::canvas::Canvas;
use trainyard_program::{Change, Layout};

const LEFT: f64 = 60.0;
const ROW: f64 = 46.0;
const SEGMENT: f64 = 118.0;
const BORDER: f64 = 92.0;

const STYLE: &str = "rect.norm{fill:#8d99ae}text.number{font-size:10px}";

const KEY: [(&str, &str); 3] = [
    ("forward", "products, with a part of the weights on each rank"),
    ("norm", "norms, residual sums"),
    ("exchange", "exchange between the ranks"),
];

/// The segments of a block, and for those that are divided each rank's part.
const SEGMENTS: [(&str, Option<[&str; 2]>); 5] = [
    ("norm", None),
    ("attention", Some(["heads 0 and 1", "heads 2 and 3"])),
    ("rejoin, norm", None),
    ("MLP", Some(["columns, first half", "columns, second half"])),
    ("rejoin", None),
];

/// A block with and without split sequences.
pub fn picture() -> String {
    let width = LEFT + 5.0 * SEGMENT + 4.0 * BORDER + 20.0;
    let mut canvas = Canvas::new(width, 410.0, "A block with four heads, tensor_parallel_degree = 2");
    canvas.style(STYLE);
    canvas.key(44.0, &KEY);
    block(
        &mut canvas,
        80.0,
        Layout::Split,
        "sequence_parallel = true: each rank has half of the rows between products",
    );
    block(&mut canvas, 250.0, Layout::Invariant, "sequence_parallel = false: every rank has all rows between products");
    canvas.finish()
}

/// Draws a block whose residual stream has the layout `residual`.
fn block(canvas: &mut Canvas, top: f64, residual: Layout, title: &str) {
    canvas.text(10.0, top, "", title);
    let rows = top + 34.0;
    for rank in 0..2 {
        let y = rows + ROW * rank as f64;
        canvas.text(10.0, y + 22.0, "small faded", &format!("rank {rank}"));
        for (number, (name, parts)) in SEGMENTS.iter().enumerate() {
            let x = LEFT + (SEGMENT + BORDER) * number as f64;
            let part = match (parts, residual) {
                (Some(parts), _) => parts[rank],
                (None, Layout::Split) => ["rows, first half", "rows, second half"][rank],
                (None, _) => "all rows",
            };
            canvas.rect((x, y), (SEGMENT, ROW - 8.0), if parts.is_some() { "forward" } else { "norm" });
            canvas.centred(x + SEGMENT / 2.0, y + 16.0, "on", name);
            canvas.centred(x + SEGMENT / 2.0, y + 30.0, "on number", part);
        }
    }
    // Before a product the residual stream becomes replicated; after it, partial sums are joined.
    for number in 0..SEGMENTS.len() - 1 {
        let (from, to) = match number % 2 {
            0 => (residual, Layout::Replicated),
            _ => (Layout::Partial, residual),
        };
        let [forward, backward] = [Change::between(from, to), Change::backward(from, to)].map(words);
        let middle = LEFT + (SEGMENT + BORDER) * number as f64 + SEGMENT + BORDER / 2.0;
        let class = if forward.is_some() || backward.is_some() { "exchange" } else { "plain" };
        canvas.rect((middle - 4.0, rows), (8.0, 2.0 * ROW - 8.0), class);
        canvas.centred(middle, rows - 6.0, "small", &format!("fwd: {}", forward.unwrap_or("nothing")));
        let back = format!("bwd: {}", backward.unwrap_or("nothing"));
        canvas.centred(middle, rows + 2.0 * ROW + 6.0, "small", &back);
    }
}

fn words(change: Option<Change>) -> Option<&'static str> {
    match change {
        Some(Change::By(collective)) => Some(collective.name()),
        _ => None,
    }
}
