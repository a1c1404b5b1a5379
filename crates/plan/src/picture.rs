//! A step as a picture: a row per lane, a box per instruction. In a pipeline every stage has its
//! rows, forwards and backwards bear the numbers of their micro-batches, and lines are messages.

use crate::breakdown::TimeCategory;
use crate::canvas::Canvas;
use crate::svg::{short, ticks};
use crate::timeline::class;
use std::collections::HashMap;
use trainyard_program::{Action, BackwardPart, Lane, Phase, Program};
use trainyard_sim::Span;

/// The origin of a picture's times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeBasis<'a> {
    /// Equal units: no speeds are known.
    EqualUnits,
    /// Predicted seconds, from the named source.
    Predicted(&'a str),
}

/// A step to draw: programs, one per pipeline stage, with the intervals of their instructions.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepPicture<'a> {
    /// Heading.
    pub title: &'a str,
    /// The programs.
    pub programs: &'a [Program],
    /// Per program, the interval of each instruction.
    pub spans: &'a [Vec<Span>],
    /// The origin of the intervals.
    pub basis: TimeBasis<'a>,
}

const WIDTH: f64 = 1100.0;
const LEFT: f64 = 130.0;
const TOP: f64 = 78.0;
const ROW: f64 = 20.0;
/// Space between the rows of two stages.
const GAP: f64 = 6.0;
/// Width of a digit in a box. Narrower boxes have no number.
const DIGIT: f64 = 6.5;
/// Maximum number of messages that are drawn as lines.
const LINES_MAX: usize = 600;
/// Maximum number of stages that are drawn.
const STAGES_MAX: usize = 16;

const STYLE: &str = "rect.weights{fill:#7a9e3d}.message{stroke:#2a9d8f;stroke-width:.8;opacity:.6}\
text.number{fill:#fff;font-size:10px}";

/// The words of each colour. Those that a picture has are in its key.
const KEY: [(&str, &str); 9] = [
    ("forward", "forward"),
    ("backward", "backward, or its half for the input"),
    ("weights", "half for the weights"),
    ("update", "update"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("exchange", "exchange inside a unit"),
    ("pipeline", "message"),
    ("host", "data, host"),
];

/// A box: from, to, class, number in it, words for the pointer.
struct Block {
    from: f64,
    to: f64,
    class: &'static str,
    number: Option<u32>,
    words: String,
}

/// The picture as an SVG file.
pub fn svg(picture: &StepPicture<'_>) -> String {
    let StepPicture { title, programs, spans, basis } = *picture;
    let end = spans.iter().flatten().map(|span| span.end_s).fold(0.0, f64::max);
    let px = |seconds: f64| LEFT + if end > 0.0 { seconds / end * (WIDTH - LEFT - 12.0) } else { 0.0 };
    let mut rows: Vec<(usize, Lane, f64)> = Vec::new();
    let mut bottom = TOP;
    for (stage, program) in programs.iter().enumerate().take(STAGES_MAX) {
        let takes_time = |lane: Lane| program.on_lane(lane).any(|n| spans[stage][n].end_s > spans[stage][n].start_s);
        let waits = |lane: &Lane| *lane != Lane::Receive || programs.len() == 1;
        for lane in program.lanes().filter(|lane| *lane == Lane::Compute || takes_time(*lane)).filter(waits) {
            rows.push((stage, lane, bottom));
            bottom += ROW;
        }
        bottom += GAP;
    }
    let mut canvas = Canvas::new(WIDTH, bottom + 34.0, title);
    canvas.style(STYLE);
    canvas.text(10.0, 41.0, "small faded", &words(basis, programs.len()));
    let drawn: Vec<Vec<Block>> = rows
        .iter()
        .map(|(stage, lane, _)| blocks(&programs[*stage], &spans[*stage], *lane, programs.len() > 1))
        .collect();
    let lines = messages(programs, spans);
    let has = |class: &str| {
        drawn.iter().flatten().any(|block| block.class == class) || class == "pipeline" && !lines.is_empty()
    };
    canvas.key(62.0, &KEY.into_iter().filter(|(class, _)| has(class)).collect::<Vec<_>>());
    let (unit, scale) = match basis {
        TimeBasis::EqualUnits => ("", 1.0),
        TimeBasis::Predicted(_) if end < 1.0 => (" ms", 1e3),
        TimeBasis::Predicted(_) => (" s", 1.0),
    };
    for at in ticks(0.0, end).into_iter().filter(|at| *at <= end) {
        canvas.line((px(at), TOP - 4.0), (px(at), bottom), "grid");
        canvas.centred(px(at), bottom + 16.0, "small", &format!("{}{unit}", short(at * scale)));
    }
    for (&(stage, lane, y), blocks) in rows.iter().zip(&drawn) {
        let name = match programs.len() {
            1 => lane.name().to_owned(),
            _ => format!("rank {} {}", programs[stage].rank, lane.name()),
        };
        canvas.text(10.0, y + 13.0, "small", &name);
        for block in blocks {
            let (x, width) = (px(block.from), px(block.to) - px(block.from));
            // A gap of half a pixel parts neighbours, if there is room for it.
            canvas.box_with((x, y), ((width - 0.5).max(width / 2.0), ROW - 4.0), block.class, &block.words);
            let number = block.number.map(|number| number.to_string());
            if let Some(number) = number.filter(|number| DIGIT * number.len() as f64 + 2.0 < width) {
                canvas.centred(x + width / 2.0, y + 12.0, "number", &number);
            }
        }
    }
    let row_of = |stage: usize| rows.iter().find(|row| (row.0, row.1) == (stage, Lane::Compute)).map(|row| row.2);
    if lines.len() <= LINES_MAX {
        for (from, sent, to, taken) in lines {
            if let (Some(from), Some(to)) = (row_of(from), row_of(to)) {
                let (a, b) = if from < to { (from + ROW - 4.0, to) } else { (from, to + ROW - 4.0) };
                canvas.line((px(sent), a), (px(taken), b), "message");
            }
        }
    }
    canvas.finish()
}

fn words(basis: TimeBasis<'_>, stages: usize) -> String {
    let times = match basis {
        TimeBasis::EqualUnits => {
            "equal units: a forward of a unit of the model 1, each half of a backward 1, others 1/2, messages 0"
                .to_owned()
        }
        TimeBasis::Predicted(source) => format!("predicted: {source}"),
    };
    match stages {
        1 => format!("Times are {times}."),
        2..=STAGES_MAX => format!("Times are {times}. One rank of each stage."),
        _ => format!("Times are {times}. One rank of each of the first {STAGES_MAX} of {stages} stages."),
    }
}

/// The boxes of a lane. In a pipeline the passes of a turn over one stretch are one box.
fn blocks(program: &Program, spans: &[Span], lane: Lane, by_turn: bool) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut before = None;
    for number in program.on_lane(lane) {
        let (action, Span { start_s, end_s }) = (program.instructions[number].action, spans[number]);
        let stretch = |unit: u32| program.pipeline.partition_point(|stretch| stretch.units.end <= unit);
        let turn = match action {
            Action::Forward { unit, micro_batch, .. } => {
                Some((Phase::Forward, BackwardPart::Whole, stretch(unit), micro_batch))
            }
            Action::Backward { unit, micro_batch, part, .. } => {
                Some((Phase::Backward, part, stretch(unit), micro_batch))
            }
            _ => None,
        };
        match blocks.last_mut() {
            Some(block) if by_turn && turn.is_some() && turn == before && start_s - block.to < 1e-9 => {
                block.to = end_s;
            }
            _ if end_s > start_s => {
                let class = match turn {
                    Some((_, BackwardPart::Weights, ..)) => "weights",
                    _ => class(TimeCategory::of(&action)),
                };
                let (number, words) = (turn.map(|(.., number)| number), program.describe(number));
                blocks.push(Block { from: start_s, to: end_s, class, number, words });
                before = turn;
            }
            _ => {}
        }
    }
    blocks
}

/// The messages between stages: the sender's index and the end of the send, the taker's index and
/// the start of the pass that takes it.
fn messages(programs: &[Program], spans: &[Vec<Span>]) -> Vec<(usize, f64, usize, f64)> {
    let mut takes = HashMap::new();
    for (program, spans) in programs.iter().zip(spans) {
        for (instruction, span) in program.instructions.iter().zip(spans) {
            // The output that a pass reads, or the output whose gradient it reads.
            let value = match instruction.action {
                Action::Forward { unit, micro_batch, .. } if unit > 0 => (unit - 1, micro_batch, Phase::Forward),
                Action::Backward { unit, micro_batch, part, .. } if part != BackwardPart::Weights => {
                    (unit, micro_batch, Phase::Backward)
                }
                _ => continue,
            };
            takes.insert(value, span.start_s);
        }
    }
    let mut messages = Vec::new();
    for (stage, (program, spans)) in programs.iter().zip(spans).enumerate() {
        for (instruction, span) in program.instructions.iter().zip(spans) {
            if let Action::Send { to, unit, micro_batch, phase } = instruction.action
                && let Some(taken) = takes.get(&(unit, micro_batch, phase))
            {
                messages.push((stage, span.end_s, (to / program.mesh.stage_ranks()) as usize, *taken));
            }
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_program::{Mesh, ModelShape, PipelineSchedule, Strategy, UnitShape, lower_stages};
    use trainyard_sim::equal_times;

    fn drawn(pp: u32, schedule: PipelineSchedule) -> String {
        let unit = UnitShape { flat_elements: 10, output_bytes: 4, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit; 8], batch_bytes: 4 };
        let strategy = Strategy { accumulation_steps: 4, pipeline: schedule.into(), ..Strategy::new(8) };
        let programs = lower_stages(&model, &Mesh { pp, ..Mesh::default() }, &strategy).unwrap();
        let spans = equal_times(&programs).unwrap();
        svg(&StepPicture { title: "a < b", programs: &programs, spans: &spans, basis: TimeBasis::EqualUnits })
    }

    #[test]
    fn a_pipeline_has_a_row_per_stage_a_box_per_turn_and_a_line_per_message() {
        let svg = drawn(2, PipelineSchedule::ZeroBubble);
        let count = |what: &str| svg.matches(what).count();
        // Key and boxes: a forward and two halves of a backward on every micro-batch and stage.
        assert_eq!(count("rect class=\"forward\""), 1 + 2 * 4);
        assert_eq!(count("rect class=\"backward\""), 1 + 2 * 4);
        assert_eq!(count("rect class=\"weights\""), 1 + 2 * 4);
        assert_eq!(count("class=\"message\""), 2 * 4);
        assert!(svg.contains("a &lt; b") && svg.contains("equal units") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("rank 1 compute") && svg.contains(">3</text>"));
    }

    #[test]
    fn one_rank_has_a_box_per_unit() {
        let svg = drawn(1, PipelineSchedule::OneForwardOneBackward);
        assert_eq!(svg.matches("rect class=\"forward\"").count(), 1 + 4 * 8);
        assert_eq!(svg.matches("class=\"message\"").count(), 0);
    }
}
