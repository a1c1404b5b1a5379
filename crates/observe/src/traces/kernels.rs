//! The kernels that take the most time, and the cost of launching.

use super::breakdown::seconds;
use super::kineto::{CallClass, short_name};
use super::window::Window;
use crate::span::{Kind, NameId};
use serde::Serialize;
use std::collections::HashMap;

/// One kernel, copy or fill with all its runs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Kernel {
    /// The name in the trace.
    pub name: String,
    /// The kind of work.
    pub kind: Kind,
    /// Number of runs.
    pub count: usize,
    /// Sum of their lengths.
    pub seconds: f64,
    /// The longest run.
    pub longest_seconds: f64,
    /// Share of the sum of all lengths, from 0 to 1.
    pub share: f64,
}

impl Kernel {
    /// The name, short enough for a table.
    pub fn short_name(&self) -> String {
        short_name(&self.name)
    }
}

/// All kernels of the window, the most expensive first.
pub fn kernels(window: &Window) -> Vec<Kernel> {
    let trace = window.trace;
    let mut rows: HashMap<(NameId, Kind), (usize, f64, f64)> = HashMap::new();
    for op in &window.ops {
        let span = trace.op_span(op);
        let length = seconds(span.duration_ns());
        let row = rows.entry((span.name, span.kind)).or_default();
        *row = (row.0 + 1, row.1 + length, row.2.max(length));
    }
    let total: f64 = rows.values().map(|row| row.1).sum();
    let mut kernels: Vec<(NameId, Kernel)> = rows
        .into_iter()
        .map(|((id, kind), (count, sum, longest_seconds))| {
            let share = if total > 0.0 { sum / total } else { 0.0 };
            let name = trace.timeline.names.text(id).to_owned();
            (id, Kernel { name, kind, count, seconds: sum, longest_seconds, share })
        })
        .collect();
    kernels.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds).then(a.0.cmp(&b.0)));
    kernels.into_iter().map(|(_, kernel)| kernel).collect()
}

/// The cost of launching work.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct LaunchCost {
    /// Launches of kernels, graphs, copies and fills that have work on the device.
    pub count: usize,
    /// Median length of such a call on the host.
    pub call_seconds: f64,
    /// Median time from a call's begin to the begin of its work, where the device was waiting for
    /// it.
    pub latency_seconds: Option<f64>,
    /// Share of the pieces of work that are shorter than the call that launched them.
    pub shorter_than_launch: f64,
    /// Share of the pieces of work for which the device was waiting.
    pub waited_for: f64,
    /// Calls per step that wait for the device.
    pub synchronisations: usize,
}

/// The cost of launches in the window; None without launches.
pub fn launch_cost(window: &Window) -> Option<LaunchCost> {
    let trace = window.trace;
    let (mut calls, mut latencies) = (Vec::new(), Vec::new());
    let (mut count, mut shorter) = (0usize, 0usize);
    let mut busy_until: HashMap<u32, i64> = HashMap::new();
    for op in &window.ops {
        let span = trace.op_span(op);
        let before = busy_until.insert(span.lane, span.end_ns);
        let Some(call) = op.call.map(|call| trace.call_span(&trace.calls[call as usize])) else { continue };
        count += 1;
        calls.push(seconds(call.duration_ns()));
        shorter += usize::from(span.duration_ns() < call.duration_ns());
        if before.is_none_or(|until| call.start_ns > until) && span.start_ns >= call.start_ns {
            latencies.push(seconds(span.start_ns - call.start_ns));
        }
    }
    let synchronisations = trace
        .calls
        .iter()
        .filter(|call| call.class == CallClass::Synchronise)
        .filter(|call| window.step_of(trace.call_span(call).step).is_some())
        .count();
    let waited_for = latencies.len();
    Some(LaunchCost {
        count,
        call_seconds: trainyard_base::median(calls)?,
        latency_seconds: trainyard_base::median(latencies),
        shorter_than_launch: shorter as f64 / count as f64,
        waited_for: waited_for as f64 / count as f64,
        synchronisations: synchronisations / window.steps.len().max(1),
    })
}
