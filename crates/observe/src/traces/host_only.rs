//! Traces without a device: the host does the work itself.

use super::breakdown::{Breakdown, Busy, Communication, communication, seconds};
use super::intervals::Intervals;
use super::kernels::Kernel;
use super::steps::StepRow;
use super::window::Window;
use crate::span::{Kind, NameId};
use crate::verdict::SavedStep;
use std::collections::HashMap;

/// The times of the host by kind.
pub struct HostTimes {
    input: Intervals,
    /// Operators ran.
    pub compute: Intervals,
    communication: Intervals,
    /// Operators with their own time, without that of operators inside of them.
    pub operators: Vec<Kernel>,
}

/// A cause that a step can be had without. The host does one thing at a time, so removing a wait
/// removes its length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostCause {
    /// Waiting for batches.
    Input,
    /// Communication while no operator ran.
    Communication,
    /// Time in which no operator, batch or message was under way.
    Overhead,
}

impl HostTimes {
    /// The times in the whole steps of the window.
    pub fn of(window: &Window) -> HostTimes {
        let trace = window.trace;
        let spans = &trace.timeline.spans;
        let lane = window.steps.first().map(|step| step.lane);
        let input = spans.iter().filter(|span| span.kind == Kind::Input && Some(span.lane) == lane);
        let input = Intervals::union(input.map(|span| (span.start_ns, span.end_ns)));
        let messages = spans.iter().filter(|span| span.kind == Kind::Communication);
        let communication = Intervals::union(messages.map(|span| (span.start_ns, span.end_ns)));
        // Operators that prepare a batch are no compute.
        let is_compute = |index: &&u32| {
            let span = &spans[**index as usize];
            span.kind == Kind::Host && window.step_of(span.step).is_some()
        };
        let operators = trace.operators.iter().filter(is_compute);
        let compute = Intervals::union(operators.map(|index| {
            let span = &spans[*index as usize];
            (span.start_ns, span.end_ns)
        }));
        let preparing = compute.and(&input);
        HostTimes {
            compute: compute.without(&preparing),
            communication: communication.without(&input),
            input,
            operators: own_times(window),
        }
    }

    /// Each whole step.
    pub fn steps(&self, window: &Window) -> Vec<StepRow> {
        let row = |(index, step): (usize, &super::kineto::Step)| {
            let (start, end) = (step.start_ns, window.step_end_ns(index));
            let communication = self.communication.within(start, end);
            let hidden = communication.and(&self.compute).length_ns();
            StepRow {
                number: step.number,
                start_seconds: seconds(start - window.trace.origin_ns()),
                seconds: seconds(end - start),
                input_seconds: seconds(self.input.within(start, end).length_ns()),
                compute_seconds: seconds(self.compute.within(start, end).length_ns()),
                communication_seconds: seconds(communication.length_ns()),
                exposed_communication_seconds: seconds(communication.length_ns() - hidden),
                launches: 0,
            }
        };
        window.steps.iter().enumerate().map(row).collect()
    }

    /// The breakdown of the whole steps.
    pub fn breakdown(&self, steps: &[StepRow]) -> Breakdown {
        let sum = |part: fn(&StepRow) -> f64| steps.iter().map(part).sum::<f64>();
        let total_seconds = sum(|step| step.seconds);
        let compute_seconds = sum(|step| step.compute_seconds);
        let non_compute_seconds = sum(|step| step.exposed_communication_seconds);
        let idle_seconds = (total_seconds - compute_seconds - non_compute_seconds).max(0.0);
        Breakdown { total_seconds, compute_seconds, non_compute_seconds, idle_seconds }
    }

    /// Communication in the recording.
    pub fn communication(&self) -> Option<Communication> {
        communication(&Busy {
            all: Intervals::default(),
            compute: self.compute.clone(),
            communication: self.communication.clone(),
        })
    }

    /// The whole steps without a cause.
    pub fn without(&self, cause: HostCause, steps: &[StepRow]) -> Vec<SavedStep> {
        let saved = |step: &StepRow| match cause {
            HostCause::Input => step.input_seconds,
            HostCause::Communication => step.exposed_communication_seconds,
            HostCause::Overhead => {
                let busy = step.compute_seconds + step.input_seconds + step.exposed_communication_seconds;
                (step.seconds - busy).max(0.0)
            }
        };
        let step =
            |step: &StepRow| SavedStep { measured_seconds: step.seconds, replayed_seconds: step.seconds - saved(step) };
        steps.iter().map(step).collect()
    }
}

/// Operators by their own time, the most expensive first.
fn own_times(window: &Window) -> Vec<Kernel> {
    let trace = window.trace;
    let spans = &trace.timeline.spans;
    let mut open: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut own: HashMap<u32, i64> = HashMap::new();
    for index in &trace.operators {
        let span = &spans[*index as usize];
        if window.step_of(span.step).is_none() || span.kind != Kind::Host {
            continue;
        }
        let stack = open.entry(span.lane).or_default();
        while stack.last().is_some_and(|outer| spans[*outer as usize].end_ns <= span.start_ns) {
            stack.pop();
        }
        if let Some(outer) = stack.last() {
            *own.entry(*outer).or_default() -= span.duration_ns();
        }
        *own.entry(*index).or_default() += span.duration_ns();
        stack.push(*index);
    }
    let mut rows: HashMap<NameId, (usize, f64, f64)> = HashMap::new();
    for (index, own_ns) in own {
        let length = seconds(own_ns.max(0));
        let row = rows.entry(spans[index as usize].name).or_default();
        *row = (row.0 + 1, row.1 + length, row.2.max(length));
    }
    let total: f64 = rows.values().map(|row| row.1).sum();
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by(|a, b| b.1.1.total_cmp(&a.1.1).then(a.0.cmp(&b.0)));
    let kernel = |(id, (count, sum, longest_seconds)): (NameId, (usize, f64, f64))| Kernel {
        name: trace.timeline.names.text(id).to_owned(),
        kind: Kind::Compute,
        count,
        seconds: sum,
        longest_seconds,
        share: if total > 0.0 { sum / total } else { 0.0 },
    };
    rows.into_iter().map(kernel).collect()
}
