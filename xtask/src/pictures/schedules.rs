//! Pipeline schedules beside each other.

use std::ops::Range;
use trainyard_plan::canvas::Canvas;
use trainyard_program::{BackwardPart, Phase, PipelineSchedule, Turn, TurnTimes};

const STAGES: u32 = 4;
const MICRO_BATCHES: u32 = 8;
const LEFT: f64 = 60.0;
const ROW: f64 = 18.0;
/// Width of the longest schedule.
const WIDTH: f64 = 1000.0;

const STYLE: &str = "rect.weights{fill:#7a9e3d}rect.up{opacity:.72}text.number{fill:#fff;font-size:9px}";

const KEY: [(&str, &str); 4] = [
    ("forward", "forward"),
    ("backward", "backward, or its half for the input"),
    ("weights", "half of a backward for the weights"),
    ("backward up", "second stretch of a stage: paler"),
];

/// Every known schedule on four stages and eight micro-batches, all of them with the same work.
pub fn picture() -> String {
    let height = ROW * f64::from(STAGES) + 34.0;
    let all = PipelineSchedule::ALL;
    let title = "Pipeline schedules on four stages and eight micro-batches; forward and both halves take equally long";
    let mut canvas = Canvas::new(LEFT + WIDTH + 20.0, 60.0 + height * all.len() as f64, title);
    canvas.style(STYLE);
    canvas.key(44.0, &KEY);
    // A stage holds the same work in all of them: its stretches are shorter if it has several.
    let played = all.map(|schedule| {
        let table = schedule.table(STAGES, MICRO_BATCHES);
        (schedule, table.play(TurnTimes::EQUAL), table, 1.0 / f64::from(schedule.facts().chunks))
    });
    let end = |spans: &[Vec<Range<u64>>], scale: f64| {
        spans.iter().flatten().map(|span| span.end).max().unwrap_or(0) as f64 * scale
    };
    let longest = played.iter().map(|(_, spans, _, scale)| end(spans, *scale)).fold(0.0, f64::max);
    for (number, (schedule, spans, table, scale)) in played.iter().enumerate() {
        let top = 76.0 + height * number as f64;
        let idle = 1.0 - f64::from(3 * MICRO_BATCHES) / end(spans, *scale);
        canvas.text(10.0, top - 4.0, "", &format!("{schedule}: idle {:.0} %", 100.0 * idle));
        let px = |at: u64| LEFT + at as f64 * scale / longest * WIDTH;
        for stage in 0..STAGES {
            let y = top + 4.0 + ROW * f64::from(stage);
            canvas.text(10.0, y + 11.0, "small faded", &format!("stage {stage}"));
            for (turn, span) in table.turns(stage).iter().zip(&spans[stage as usize]) {
                let (x, width) = (px(span.start), px(span.end) - px(span.start));
                let first = table.stage_of().iter().position(|of| *of == stage) == Some(turn.stretch as usize);
                let class = class(turn, first);
                canvas.box_with((x, y), (width - 0.5, ROW - 3.0), &class, &turn.to_string());
                if width > 7.0 {
                    canvas.centred(x + width / 2.0, y + 10.5, "number", &turn.micro_batch.to_string());
                }
            }
        }
    }
    canvas.finish()
}

fn class(turn: &Turn, first: bool) -> String {
    let kind = match (turn.phase, turn.part) {
        (Phase::Forward, _) => "forward",
        (_, BackwardPart::Weights) => "weights",
        _ => "backward",
    };
    if first { kind.to_owned() } else { format!("{kind} up") }
}
