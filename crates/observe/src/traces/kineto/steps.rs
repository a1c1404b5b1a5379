//! Finds the steps of a trace.

use super::{Step, StepOrigin};
use crate::span::{Span, Timeline};
use std::collections::BTreeMap;

/// The steps of a timeline whose spans are sorted, and where they come from.
pub fn find(timeline: &Timeline) -> (Vec<Step>, StepOrigin) {
    let annotated = profiler_steps(timeline);
    if !annotated.is_empty() {
        return (annotated, StepOrigin::Profiler);
    }
    let between = optimizer_steps(timeline);
    let origin = if between.is_empty() { StepOrigin::None } else { StepOrigin::Optimizer };
    (between, origin)
}

/// Spans on threads of the host whose name begins with `prefix`, by thread.
fn by_lane<'a>(timeline: &'a Timeline, prefix: &str) -> BTreeMap<u32, Vec<&'a Span>> {
    let mut lanes: BTreeMap<u32, Vec<&Span>> = BTreeMap::new();
    // Names are few and spans many.
    let wanted: Vec<bool> = timeline.names.iter().map(|name| name.starts_with(prefix)).collect();
    for span in &timeline.spans {
        if wanted[span.name.0 as usize] && !timeline.lanes[span.lane as usize].on_device {
            lanes.entry(span.lane).or_default().push(span);
        }
    }
    lanes
}

/// The thread with the most such spans; of equals, the first.
fn longest(lanes: BTreeMap<u32, Vec<&Span>>) -> Vec<&Span> {
    lanes.into_values().rev().max_by_key(Vec::len).unwrap_or_default()
}

fn profiler_steps(timeline: &Timeline) -> Vec<Step> {
    let spans = longest(by_lane(timeline, "ProfilerStep"));
    let mut steps: Vec<Step> = Vec::new();
    for span in spans {
        // A step inside of another one is of a second profiler, or of a step that was begun twice.
        if steps.last().is_some_and(|last| span.start_ns < last.end_ns) {
            continue;
        }
        let number = timeline.name(span).chars().skip_while(|c| !c.is_ascii_digit()).collect::<String>();
        let number = number.trim().parse().unwrap_or(steps.len() as u64);
        steps.push(Step { number, start_ns: span.start_ns, end_ns: span.end_ns, lane: span.lane });
    }
    steps
}

/// A step from the end of an optimizer's update to the end of the next. What comes before the first
/// update's end is no whole step.
fn optimizer_steps(timeline: &Timeline) -> Vec<Step> {
    let mut ends: Vec<(i64, u32)> = Vec::new();
    let mut last_start = i64::MIN;
    for span in longest(by_lane(timeline, "Optimizer.step#")) {
        // Optimizers may call each other; the outermost comes first.
        match ends.last() {
            Some((end, _)) if span.start_ns < *end => continue,
            _ => {}
        }
        // Several optimizers that follow at once on each other are one update.
        if let Some((end, _)) = ends.last_mut()
            && span.start_ns - *end < (*end - last_start) / 2
        {
            *end = span.end_ns;
            continue;
        }
        last_start = span.start_ns;
        ends.push((span.end_ns, span.lane));
    }
    ends.windows(2)
        .enumerate()
        .map(|(number, pair)| Step { number: number as u64, start_ns: pair[0].0, end_ns: pair[1].0, lane: pair[0].1 })
        .collect()
}
