//! A simulated step over time: as a trace for Perfetto and chrome://tracing with memory as
//! counters, and as an SVG of lanes.

use crate::breakdown::TimeCategory;
use crate::svg::{escaped, short, ticks};
use crate::{MemorySeries, PricedStep};
use serde_json::{Value, json};
use std::fmt::Write as _;
use trainyard_program::{Action, Lane, MemoryKind, Program};
use trainyard_sim::Span;

/// The trace in Chrome's trace event format, in microseconds: a process per pipeline stage, a
/// thread per lane, a counter of memory by kind. `memory` holds the series of each program of
/// `step`.
pub fn trace(step: &PricedStep, memory: &[MemorySeries]) -> Value {
    let mut events = Vec::new();
    for (stage, (program, time)) in step.programs.iter().zip(&step.times).enumerate() {
        let name = format!("rank {} (stage {stage})", program.rank);
        events.push(json!({"ph": "M", "pid": stage, "name": "process_name", "args": {"name": name}}));
        for lane in program.lanes() {
            let args = json!({"name": lane.name()});
            events.push(json!({"ph": "M", "pid": stage, "tid": lane.track(), "name": "thread_name", "args": args}));
        }
        for (instruction, span) in program.instructions.iter().zip(&time.spans) {
            events.push(json!({
                "ph": "X",
                "pid": stage,
                "tid": instruction.action.lane().track(),
                "name": words(program, &instruction.action),
                "cat": instruction.action.name(),
                "ts": 1e6 * span.start_s,
                "dur": 1e6 * (span.end_s - span.start_s),
                "args": {"bytes": instruction.bytes},
            }));
        }
        for (at, bytes) in memory.get(stage).into_iter().flat_map(|series| &series.0) {
            let kinds = MemoryKind::ALL.iter().zip(bytes).filter(|(_, bytes)| **bytes > 0.0);
            let args: serde_json::Map<String, Value> =
                kinds.map(|(kind, bytes)| (kind.name().to_owned(), json!(bytes.round()))).collect();
            events.push(json!({"ph": "C", "pid": stage, "name": "memory", "ts": 1e6 * at, "args": args}));
        }
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

/// `forward block.3`
fn words(program: &Program, action: &Action) -> String {
    let unit = action.unit().and_then(|unit| program.units.get(unit as usize));
    let micro_batch = action.micro_batch().map_or(String::new(), |number| format!(" of {number}"));
    format!("{}{}{micro_batch}", action.name(), unit.map_or(String::new(), |unit| format!(" {unit}")))
}

/// Width of the picture.
pub(crate) const WIDTH: f64 = 1100.0;
/// The place where its time begins.
pub(crate) const LEFT: f64 = 110.0;
const ROW: f64 = 18.0;
const TOP: f64 = 8.0;
const MEMORY: f64 = 90.0;
/// Maximum number of stages that are drawn.
const STAGES_MAX: usize = 16;

/// Index of the program whose compute lane works longest.
pub(crate) fn longest(step: &PricedStep) -> Option<usize> {
    let compute = Lane::Compute as usize;
    (0..step.times.len())
        .max_by(|a, b| step.times[*a].busy_s[compute].total_cmp(&step.times[*b].busy_s[compute]).then(b.cmp(a)))
}

/// The lanes of the rank that works longest, below them the compute lanes of other stages, and the
/// rank's memory, if `memory` has it.
pub fn svg(step: &PricedStep, memory: &[MemorySeries]) -> String {
    let Some(longest) = longest(step) else { return String::new() };
    let mut rows: Vec<(String, usize, Lane)> =
        step.programs[longest].lanes().map(|lane| (lane.name().to_owned(), longest, lane)).collect();
    if step.programs.len() > 1 {
        let every = step.programs.len().div_ceil(STAGES_MAX);
        let stages = (0..step.programs.len()).step_by(every);
        rows.extend(stages.map(|stage| (format!("stage {stage}"), stage, Lane::Compute)));
    }
    let bottom = TOP + ROW * rows.len() as f64;
    let height = if memory.is_empty() { bottom + 24.0 } else { bottom + 20.0 + MEMORY + 24.0 };
    let px = |seconds: f64| LEFT + seconds / step.step_s * (WIDTH - LEFT - 10.0);
    let mut svg =
        format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"timeline of the predicted step\">\n");
    for (index, (name, stage, lane)) in rows.iter().enumerate() {
        let y = TOP + ROW * index as f64;
        let _ = writeln!(
            svg,
            "<text text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
            LEFT - 6.0,
            y + 12.0,
            escaped(name)
        );
        for (part, from, to) in blocks(&step.programs[*stage], &step.times[*stage].spans, *lane, &px) {
            let _ = writeln!(
                svg,
                "<rect class=\"{}\" x=\"{from:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{}\"/>",
                class(part),
                to - from,
                ROW - 3.0
            );
        }
    }
    let all = ticks(0.0, step.step_s);
    let (unit, scale) = if step.step_s < 1.0 { ("ms", 1e3) } else { ("s", 1.0) };
    for seconds in all.into_iter().filter(|seconds| *seconds <= step.step_s) {
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{0:.1}\" y1=\"{TOP}\" x2=\"{0:.1}\" y2=\"{1:.1}\"/>\n\
             <text text-anchor=\"middle\" x=\"{0:.1}\" y=\"{2:.1}\">{3} {unit}</text>",
            px(seconds),
            height - 20.0,
            height - 6.0,
            short(seconds * scale)
        );
    }
    if let Some(series) = memory.get(longest) {
        svg += &memory_curve(series, bottom + 20.0, &px);
    }
    svg + "</svg>\n"
}

/// The spans of a lane as stretches of one colour. A stretch narrower than a third of a pixel is
/// merged with its neighbour.
fn blocks(program: &Program, spans: &[Span], lane: Lane, px: &impl Fn(f64) -> f64) -> Vec<(TimeCategory, f64, f64)> {
    const NARROW: f64 = 0.33;
    let mut blocks: Vec<(TimeCategory, f64, f64)> = Vec::new();
    for number in program.on_lane(lane) {
        let part = TimeCategory::of(&program.instructions[number].action);
        let (from, to) = (px(spans[number].start_s), px(spans[number].end_s));
        match blocks.last_mut() {
            Some(last) if from - last.2 < NARROW && (part == last.0 || to - from < NARROW) => last.2 = last.2.max(to),
            _ if to > from => blocks.push((part, from, to.max(from + NARROW))),
            _ => {}
        }
    }
    blocks
}

/// The CSS class of a category's colour.
pub(crate) fn class(part: TimeCategory) -> &'static str {
    match part {
        TimeCategory::Forward => "forward",
        TimeCategory::Backward => "backward",
        TimeCategory::Update => "update",
        TimeCategory::Gather => "gather",
        TimeCategory::Reduce => "reduce",
        TimeCategory::Tensor | TimeCategory::Context | TimeCategory::Expert => "exchange",
        TimeCategory::Pipeline => "pipeline",
        TimeCategory::Slowed | TimeCategory::Data | TimeCategory::Host | TimeCategory::Beside => "host",
    }
}

/// Bytes held over time, as an area.
fn memory_curve(series: &MemorySeries, top: f64, px: &impl Fn(f64) -> f64) -> String {
    let total = |bytes: &[f64]| bytes.iter().sum::<f64>();
    let peak = series.0.iter().map(|(_, bytes)| total(bytes)).fold(0.0, f64::max);
    if peak <= 0.0 {
        return String::new();
    }
    let bottom = top + MEMORY;
    let py = |bytes: f64| bottom - bytes / peak * MEMORY;
    // At most one point per pixel: the largest value within it.
    let mut points: Vec<(f64, f64)> = Vec::new();
    for (at, bytes) in &series.0 {
        let (x, y) = (px(*at).round(), py(total(bytes)));
        match points.last_mut() {
            Some(last) if last.0 == x => last.1 = last.1.min(y),
            _ => points.push((x, y)),
        }
    }
    let mut path = format!("{:.0},{bottom:.1}", px(0.0));
    let mut before = bottom;
    for (x, y) in &points {
        let _ = write!(path, " {x:.0},{before:.1} {x:.0},{y:.1}");
        before = *y;
    }
    let end = WIDTH - 10.0;
    let _ = write!(path, " {end:.0},{before:.1} {end:.0},{bottom:.1}");
    format!(
        "<polygon class=\"memory\" points=\"{path}\"/>\n\
         <text text-anchor=\"end\" x=\"{0}\" y=\"{1:.1}\">memory</text>\n\
         <text text-anchor=\"end\" x=\"{0}\" y=\"{2:.1}\">{3}</text>\n",
        LEFT - 6.0,
        bottom - 4.0,
        top + 10.0,
        trainyard_base::format_bytes(peak as u64)
    )
}
