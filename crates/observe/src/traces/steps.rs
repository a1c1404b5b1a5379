//! The steps of a trace side by side.

use super::breakdown::{Busy, seconds};
use super::intervals::Intervals;
use super::kineto::Op;
use super::window::Window;
use crate::span::Kind;
use serde::Serialize;

/// One whole step.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct StepRow {
    /// Its number in the trace.
    pub number: u64,
    /// Begin, in seconds from the begin of the trace.
    pub start_seconds: f64,
    /// From its begin to the begin of the next step.
    pub seconds: f64,
    /// Waiting for a batch, on the thread of the steps.
    pub input_seconds: f64,
    /// Compute kernels that the step launched.
    pub compute_seconds: f64,
    /// Communication kernels that the step launched.
    pub communication_seconds: f64,
    /// Communication of the step while no compute kernel ran.
    pub exposed_communication_seconds: f64,
    /// Pieces of work that the step launched.
    pub launches: usize,
}

/// The whole steps of the window; where the trace has none, one row for the whole recording.
pub fn steps(window: &Window, busy: &Busy) -> Vec<StepRow> {
    let trace = window.trace;
    let mut ops: Vec<Vec<Op>> = vec![Vec::new(); window.steps.len()];
    for op in &window.ops {
        if let Some(step) = window.step_of(trace.op_span(op).step) {
            ops[step].push(*op);
        }
    }
    let mut input: Vec<Vec<(i64, i64)>> = vec![Vec::new(); window.steps.len()];
    for span in trace.timeline.spans.iter().filter(|span| span.kind == Kind::Input) {
        if let Some(step) = window.step_of(span.step)
            && span.lane == window.steps[step].lane
        {
            input[step].push((span.start_ns, span.end_ns));
        }
    }
    let row = |(index, step): (usize, &super::kineto::Step)| {
        let of_step = Busy::of(trace, &ops[index]);
        let communication = of_step.communication.length_ns();
        StepRow {
            number: step.number,
            start_seconds: seconds(step.start_ns - trace.origin_ns()),
            seconds: seconds(window.step_end_ns(index) - step.start_ns),
            input_seconds: seconds(Intervals::union(input[index].iter().copied()).length_ns()),
            compute_seconds: seconds(of_step.compute.length_ns()),
            communication_seconds: seconds(communication),
            exposed_communication_seconds: seconds(
                communication - of_step.communication.and(&busy.compute).length_ns(),
            ),
            launches: ops[index].len(),
        }
    };
    window.steps.iter().enumerate().map(row).collect()
}
