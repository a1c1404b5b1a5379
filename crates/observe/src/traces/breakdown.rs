//! The time of a device: compute, other work, idle; idle by cause; communication under compute.

use super::intervals::Intervals;
use super::kineto::{Op, Trace};
use super::window::Window;
use crate::span::Kind;
use serde::Serialize;
use std::collections::BTreeMap;

/// Gaps up to this length between two pieces of work, the second of which was launched in time, are
/// what a device needs from one to the next.
pub const KERNEL_WAIT_NS: i64 = 30_000;

/// The time of a rank's device from its first to its last piece of work, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Breakdown {
    /// From the first begin to the last end.
    pub total_seconds: f64,
    /// At least one compute kernel ran.
    pub compute_seconds: f64,
    /// Something ran, but no compute kernel: communication, copies.
    pub non_compute_seconds: f64,
    /// Nothing ran.
    pub idle_seconds: f64,
}

/// Idle time by cause, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Idle {
    /// The next piece of work was not launched yet.
    pub host_wait_seconds: f64,
    /// The next piece of work was launched, and began at once: the time between two kernels.
    pub kernel_wait_seconds: f64,
    /// The next piece of work was launched, and began late: it waited for another stream or rank.
    pub other_seconds: f64,
}

/// Idle time of one stream.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct StreamIdle {
    /// The stream's lane.
    pub stream: String,
    /// Idle time between its first and last piece of work.
    #[serde(flatten)]
    pub idle: Idle,
}

/// Communication and how much of it runs under compute.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Communication {
    /// At least one communication kernel ran.
    pub seconds: f64,
    /// The share of it during which a compute kernel ran too, from 0 to 1.
    pub overlapped: f64,
}

/// The busy times of a device by kind.
pub struct Busy {
    /// Any work.
    pub all: Intervals,
    /// Compute kernels.
    pub compute: Intervals,
    /// Communication kernels.
    pub communication: Intervals,
}

impl Busy {
    /// The busy times of these pieces of work.
    pub fn of(trace: &Trace, ops: &[Op]) -> Busy {
        let of_kind = |kind: Option<Kind>| {
            let spans = ops.iter().map(|op| trace.op_span(op));
            let wanted = spans.filter(|span| kind.is_none_or(|kind| span.kind == kind));
            Intervals::union(wanted.map(|span| (span.start_ns, span.end_ns)))
        };
        Busy {
            all: of_kind(None),
            compute: of_kind(Some(Kind::Compute)),
            communication: of_kind(Some(Kind::Communication)),
        }
    }
}

/// Seconds of nanoseconds.
pub fn seconds(ns: i64) -> f64 {
    ns as f64 / 1e9
}

/// The breakdown of busy times; None without work.
pub fn breakdown(busy: &Busy) -> Option<Breakdown> {
    let (start, end) = busy.all.extent()?;
    let (busy_ns, compute_ns) = (busy.all.length_ns(), busy.compute.length_ns());
    Some(Breakdown {
        total_seconds: seconds(end - start),
        compute_seconds: seconds(compute_ns),
        non_compute_seconds: seconds(busy_ns - compute_ns),
        idle_seconds: seconds(end - start - busy_ns),
    })
}

/// The communication among busy times; None without any.
pub fn communication(busy: &Busy) -> Option<Communication> {
    let ns = busy.communication.length_ns();
    let overlapped = busy.communication.and(&busy.compute).length_ns();
    (ns > 0).then(|| Communication { seconds: seconds(ns), overlapped: overlapped as f64 / ns as f64 })
}

/// Idle time of the whole device by cause: no stream has work.
pub fn idle(window: &Window) -> Idle {
    gaps(window.trace, window.ops.iter())
}

/// Idle time of each stream by cause.
pub fn idle_by_stream(window: &Window) -> Vec<StreamIdle> {
    let trace = window.trace;
    let mut streams: BTreeMap<u32, Vec<&Op>> = BTreeMap::new();
    for op in &window.ops {
        streams.entry(trace.op_span(op).lane).or_default().push(op);
    }
    let row = |(lane, ops): (u32, Vec<&Op>)| StreamIdle {
        stream: trace.timeline.lanes[lane as usize].name.clone(),
        idle: gaps(trace, ops.into_iter()),
    };
    streams.into_iter().map(row).collect()
}

/// Sums the gaps between pieces of work, which come by begin.
fn gaps<'a>(trace: &Trace, ops: impl Iterator<Item = &'a Op>) -> Idle {
    let mut idle = Idle::default();
    let mut busy_until: Option<i64> = None;
    for op in ops {
        let span = trace.op_span(op);
        if let Some(until) = busy_until
            && span.start_ns > until
        {
            let gap_ns = span.start_ns - until;
            let launched_late = trace.launch_ns(op).is_some_and(|at| at > until);
            let cause = match (launched_late, gap_ns < KERNEL_WAIT_NS) {
                (true, _) => &mut idle.host_wait_seconds,
                (false, true) => &mut idle.kernel_wait_seconds,
                (false, false) => &mut idle.other_seconds,
            };
            *cause += seconds(gap_ns);
        }
        busy_until = Some(busy_until.unwrap_or(i64::MIN).max(span.end_ns));
    }
    idle
}
