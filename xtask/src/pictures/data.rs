//! Documents on their way into rows of fixed length.

use trainyard_plan::canvas::Canvas;

/// Lengths of documents, in tokens.
const DOCUMENTS: [usize; 6] = [9, 5, 14, 3, 7, 10];
const ROW: usize = 16;
const CELL: f64 = 26.0;

pub fn picture() -> String {
    let mut canvas =
        Canvas::new(760.0, 300.0, "Documents become one run of tokens, and rows of sequence_length + 1 of it");
    let colours = ["parameters", "gather", "pipeline", "exchange", "update", "reduce"];
    let run: Vec<(usize, bool)> = DOCUMENTS
        .iter()
        .enumerate()
        .flat_map(|(document, length)| (0..*length).map(move |at| (document, at + 1 == *length)))
        .collect();
    canvas.text(10.0, 52.0, "small faded", "documents, each with its end-of-text token (dark)");
    for (at, (document, ends)) in run.iter().enumerate() {
        let x = 10.0 + 15.0 * at as f64;
        canvas.rect((x, 60.0), (14.0, 22.0), if *ends { "backward" } else { colours[*document] });
    }
    canvas.text(10.0, 112.0, "small faded", "rows of 16 tokens; the last token of a row is also the first of the next");
    for (number, start) in (0..run.len().saturating_sub(ROW)).step_by(ROW - 1).enumerate() {
        let y = 122.0 + 54.0 * number as f64;
        canvas.text(10.0, y + 16.0, "", &format!("row {number}"));
        for (column, (document, ends)) in run[start..(start + ROW).min(run.len())].iter().enumerate() {
            let x = 70.0 + CELL * column as f64;
            canvas.rect((x, y), (CELL - 2.0, 22.0), if *ends { "backward" } else { colours[*document] });
            if column + 1 < ROW {
                canvas.centred(x + 12.0, y + 36.0, "small faded", if *ends { "-" } else { "t" });
            }
        }
        canvas.text(70.0 + CELL * ROW as f64 + 8.0, y + 16.0, "small", &segments(&run, start));
    }
    canvas.text(
        10.0,
        288.0,
        "small",
        "t: the token has a target, the one after it. -: a document ends, so there is none. A document attends only to itself.",
    );
    canvas.finish()
}

/// The lengths of the stretches of a row that belong to one document.
fn segments(run: &[(usize, bool)], start: usize) -> String {
    let row = &run[start..(start + ROW).min(run.len()) - 1];
    let lengths: Vec<String> = row.chunk_by(|a, b| a.0 == b.0).map(|segment| segment.len().to_string()).collect();
    format!("segments of {}", lengths.join(", "))
}
