//! The part of a trace that was recorded whole.
//!
//! Profilers stop inside of their last step: what it launched may be missing, and its end is the
//! profiler's own work. So the last step is left out wherever there are two or more. A recording
//! without steps counts as one.

use super::kineto::{CallClass, Op, Step, StepOrigin, Trace};
use std::collections::HashMap;

/// The steps and the device's work that analyses use.
#[derive(Debug)]
pub struct Window<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// The whole steps; the whole recording where the trace has none.
    pub steps: Vec<Step>,
    /// The device's work that was launched before the last step, or all of it where there are fewer
    /// than two steps.
    pub ops: Vec<Op>,
    /// Begin of the step that was left out.
    cut_ns: Option<i64>,
}

impl<'a> Window<'a> {
    /// The whole part of `trace`.
    pub fn of(trace: &'a Trace) -> Window<'a> {
        if trace.steps.is_empty() {
            return Window {
                trace,
                steps: recording(trace).into_iter().collect(),
                ops: trace.ops.clone(),
                cut_ns: None,
            };
        }
        // Steps between updates of an optimizer end within the recording.
        let cut = trace.step_origin == StepOrigin::Profiler && trace.steps.len() >= 2;
        if !cut {
            return Window { trace, steps: trace.steps.clone(), ops: trace.ops.clone(), cut_ns: None };
        }
        let mut steps = trace.steps.clone();
        let cut_ns = steps.pop().map(|last| last.start_ns);
        let launched_before = |op: &&Op| trace.launch_ns(op).zip(cut_ns).is_some_and(|(at, cut)| at < cut);
        let ops = trace.ops.iter().filter(launched_before).copied().collect();
        Window { trace, steps, ops, cut_ns }
    }

    /// True if the trace has no steps, and the whole recording stands for one.
    pub fn is_whole_recording(&self) -> bool {
        self.trace.steps.is_empty()
    }

    /// The end of a whole step: the begin of the next step, or its own end if it is the last.
    pub fn step_end_ns(&self, index: usize) -> i64 {
        match self.steps.get(index + 1) {
            Some(next) => next.start_ns,
            None => self.cut_ns.unwrap_or(self.steps[index].end_ns),
        }
    }

    /// The index of the whole step that a span with this mark belongs to.
    pub fn step_of(&self, mark: Option<u32>) -> Option<usize> {
        if self.is_whole_recording() {
            return (!self.steps.is_empty()).then_some(0);
        }
        mark.map(|step| step as usize).filter(|step| *step < self.steps.len())
    }

    /// Launches in whole steps, and how many of them have no work on a device.
    pub fn launches(&self) -> Launches {
        let trace = self.trace;
        let mut has_work = vec![false; trace.calls.len()];
        for call in trace.ops.iter().filter_map(|op| op.call) {
            has_work[call as usize] = true;
        }
        let mut launches = Launches::default();
        for (call, has_work) in trace.calls.iter().zip(has_work) {
            let counts = matches!(call.class, CallClass::Launch | CallClass::GraphLaunch);
            if counts && self.step_of(trace.call_span(call).step).is_some() {
                launches.total += 1;
                launches.without_work += usize::from(!has_work);
            }
        }
        launches
    }
}

/// The whole recording as a step, on the thread that calls the device most, or else does most.
fn recording(trace: &Trace) -> Option<Step> {
    let spans = &trace.timeline.spans;
    let start_ns = spans.first()?.start_ns;
    let end_ns = spans.iter().map(|span| span.end_ns).max()?;
    let mut counts: HashMap<u32, usize> = HashMap::new();
    let called = trace.calls.iter().map(|call| call.span);
    let operated = trace.operators.iter().copied();
    let weigh = |spans: &mut dyn Iterator<Item = u32>, weight: usize, counts: &mut HashMap<u32, usize>| {
        for index in spans {
            *counts.entry(trace.timeline.spans[index as usize].lane).or_default() += weight;
        }
    };
    // A single call outweighs operators, which exist on threads that prepare data too.
    weigh(&mut { called }, trace.operators.len() + 1, &mut counts);
    weigh(&mut { operated }, 1, &mut counts);
    let lane =
        counts.into_iter().max_by_key(|(lane, count)| (*count, std::cmp::Reverse(*lane))).map_or(0, |most| most.0);
    Some(Step { number: 0, start_ns, end_ns, lane })
}

/// Launches that were counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Launches {
    /// All launches of kernels and graphs.
    pub total: usize,
    /// Launches without a record of what they launched.
    pub without_work: usize,
}
