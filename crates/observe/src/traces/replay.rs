//! Replays a recorded step without one cause of lost time.
//!
//! A recording becomes a graph: calls of the host one after the other, work of the device in the
//! order of its streams, each piece after the call that launched it, and calls that wait for the
//! device after the work that they waited for. Distances that the graph does not explain stay as
//! they were measured, so a replay that removes nothing gives the measured times back. A replay
//! that removes the input wait moves the host's later calls forward, and the device follows as far
//! as its own work lets it.
//!
//! Threads of the host count as one sequence. That holds for training, where the main thread waits
//! while another one runs the backward pass.

use super::breakdown::{KERNEL_WAIT_NS, seconds};
use super::kineto::{Call, CallClass, Op, Trace};
use super::window::Window;
use crate::span::Kind;
use crate::verdict::SavedStep;
use std::collections::HashMap;

/// The causes that a replay removes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Removed {
    /// Nothing: the replay gives the measurement.
    Nothing,
    /// Waiting for batches takes no time.
    InputWait,
    /// Communication kernels take no time.
    Communication,
    /// The host takes no time at all: neither between its calls nor for batches.
    HostTime,
    /// Neither the host nor communication takes time.
    HostTimeAndCommunication,
}

impl Removed {
    /// True if time of the host counts; `for_input` says that it waits for a batch.
    fn host_counts(self, for_input: bool) -> bool {
        match self {
            Removed::Nothing | Removed::Communication => true,
            Removed::InputWait => !for_input,
            Removed::HostTime | Removed::HostTimeAndCommunication => false,
        }
    }

    fn communication_counts(self) -> bool {
        !matches!(self, Removed::Communication | Removed::HostTimeAndCommunication)
    }
}

/// An event of the sweep through a recording, in the order in which events at one time count.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    InputEnd,
    CallStart(u32),
    OpStart(u32),
    CallEnd(u32),
    StepStart(u32),
    InputStart,
}

/// A constraint: not before `of` ended, plus `lag_ns`.
#[derive(Clone, Copy, Debug)]
struct After {
    of: u32,
    lag_ns: i64,
}

/// The constraints on one piece of the device's work.
#[derive(Clone, Copy, Debug)]
struct Node {
    length_ns: i64,
    communicates: bool,
    /// The call that launched it, by its index in the recording.
    launch: Option<After>,
    /// The piece before it on its stream.
    stream: Option<After>,
    /// A piece on another stream.
    other: Option<After>,
    /// Begin in the measurement, where no constraint is known.
    start_ns: i64,
}

/// A call that waits for a piece of work.
#[derive(Clone, Copy, Debug)]
struct Wait {
    after: After,
    /// Length of the call if it need not wait.
    own_ns: i64,
}

/// A recording as a graph that can be replayed.
pub struct Replay {
    events: Vec<(i64, Event)>,
    nodes: Vec<Node>,
    /// The whole step of each node.
    node_steps: Vec<Option<usize>>,
    waits: HashMap<u32, Wait>,
    calls: usize,
    /// Number of whole steps; one event `StepStart` more than that says where the last ends.
    steps: usize,
}

impl Replay {
    /// The graph of the window. Needs at least one whole step.
    pub fn of(window: &Window) -> Replay {
        let trace = window.trace;
        let ops = &trace.ops;
        let by_end = ByEnd::of(trace);
        let nodes = nodes(window, &by_end);
        let waits = waits(window, &by_end);
        let mut events = Vec::new();
        for (index, call) in trace.calls.iter().enumerate() {
            let span = trace.call_span(call);
            events.push((span.start_ns, Event::CallStart(index as u32)));
            if waits.contains_key(&(index as u32)) {
                events.push((span.end_ns, Event::CallEnd(index as u32)));
            }
        }
        for (index, op) in ops.iter().enumerate() {
            events.push((trace.op_span(op).start_ns, Event::OpStart(index as u32)));
        }
        for span in trace.timeline.spans.iter().filter(|span| span.kind == Kind::Input) {
            if window.steps.first().is_some_and(|step| step.lane == span.lane) {
                events.push((span.start_ns, Event::InputStart));
                events.push((span.end_ns, Event::InputEnd));
            }
        }
        let steps = window.steps.len();
        for (index, step) in window.steps.iter().enumerate() {
            events.push((step.start_ns, Event::StepStart(index as u32)));
        }
        if steps > 0 {
            events.push((window.step_end_ns(steps - 1), Event::StepStart(steps as u32)));
        }
        events.sort_unstable();
        let node_steps = ops.iter().map(|op| window.step_of(trace.op_span(op).step)).collect();
        Replay { events, nodes, node_steps, waits, calls: trace.calls.len(), steps }
    }

    /// Every step as measured, and as measured less what `removed` saves beyond what `first` saves.
    /// A step lasts from the completion of the step before it, on host and device.
    pub fn beyond(&self, first: Removed, removed: Removed) -> Vec<SavedStep> {
        let measured = self.step_lengths(Removed::Nothing);
        let (first, removed) = (self.step_lengths(first), self.step_lengths(removed));
        let step = |((measured, first), removed): ((i64, i64), i64)| SavedStep {
            measured_seconds: seconds(measured),
            replayed_seconds: seconds(measured - (first - removed)),
        };
        let steps: Vec<SavedStep> = measured.into_iter().zip(first).zip(removed).map(step).collect();
        // The first step begins with an idle device, which later ones do not.
        if steps.len() >= 3 { steps[1..].to_vec() } else { steps }
    }

    /// The length of every step: from the completion of the one before, on host and device.
    fn step_lengths(&self, removed: Removed) -> Vec<i64> {
        let mut host_ns = self.events.first().map_or(0, |event| event.0);
        let mut now_ns = host_ns;
        let mut inputs_open = 0i64;
        let mut call_starts = vec![0i64; self.calls];
        let mut call_started = vec![false; self.calls];
        let mut ends: Vec<Option<i64>> = vec![None; self.nodes.len()];
        let mut host_at_steps = Vec::with_capacity(self.steps + 1);
        let mut device_ends = vec![i64::MIN; self.steps];
        for (at_ns, event) in &self.events {
            if removed.host_counts(inputs_open > 0) {
                host_ns += at_ns - now_ns;
            }
            now_ns = *at_ns;
            match *event {
                Event::InputStart => inputs_open += 1,
                Event::InputEnd => inputs_open -= 1,
                Event::CallStart(call) => {
                    call_starts[call as usize] = host_ns;
                    call_started[call as usize] = true;
                }
                Event::CallEnd(call) => {
                    let wait = &self.waits[&call];
                    let own_ns = if removed.host_counts(false) { wait.own_ns } else { 0 };
                    let ready_ns = ends[wait.after.of as usize].map(|end| end + wait.after.lag_ns);
                    host_ns = (call_starts[call as usize] + own_ns).max(ready_ns.unwrap_or(i64::MIN));
                }
                Event::OpStart(op) => {
                    let node = &self.nodes[op as usize];
                    let launched = node.launch.filter(|after| call_started[after.of as usize]);
                    let launched_ns = launched.map(|after| call_starts[after.of as usize] + after.lag_ns);
                    let after =
                        |after: Option<After>| after.and_then(|after| Some(ends[after.of as usize]? + after.lag_ns));
                    let constraints = [launched_ns, after(node.stream), after(node.other)];
                    let start_ns = constraints.into_iter().flatten().max().unwrap_or(node.start_ns);
                    let free = node.communicates && !removed.communication_counts();
                    let end_ns = start_ns + if free { 0 } else { node.length_ns };
                    ends[op as usize] = Some(end_ns);
                    if let Some(step) = self.node_steps[op as usize] {
                        device_ends[step] = device_ends[step].max(end_ns);
                    }
                }
                Event::StepStart(_) => host_at_steps.push(host_ns),
            }
        }
        let Some(&first) = host_at_steps.first() else { return Vec::new() };
        let mut complete = first;
        let lengths = host_at_steps[1..].iter().zip(&device_ends).map(|(host, device)| {
            let before = complete;
            complete = complete.max(*host).max(*device);
            complete - before
        });
        lengths.collect()
    }
}

/// Typical times of a device: from a launch to its work, and between two kernels.
struct Typical {
    latency_ns: i64,
    gap_ns: i64,
}

fn typical(window: &Window) -> Typical {
    let trace = window.trace;
    let (mut latencies, mut gaps) = (Vec::new(), Vec::new());
    let mut busy_until: HashMap<u32, i64> = HashMap::new();
    for op in &trace.ops {
        let span = trace.op_span(op);
        let (Some(until), Some(launch_ns)) = (busy_until.insert(span.lane, span.end_ns), trace.launch_ns(op)) else {
            continue;
        };
        if launch_ns > until && span.start_ns >= launch_ns {
            latencies.push(span.start_ns - launch_ns);
        } else if launch_ns < until && (0..KERNEL_WAIT_NS).contains(&(span.start_ns - until)) {
            gaps.push(span.start_ns - until);
        }
    }
    // Latencies have a long tail, of calls that the host was interrupted in.
    latencies.sort_unstable();
    gaps.sort_unstable();
    Typical {
        latency_ns: latencies.get(latencies.len() / 4).copied().unwrap_or(10_000),
        gap_ns: gaps.get(gaps.len() / 2).copied().unwrap_or(1_000),
    }
}

/// Pieces of work by their ends, to find the one that something waited for.
struct ByEnd {
    ops: Vec<u32>,
    ends: Vec<i64>,
}

impl ByEnd {
    fn of(trace: &Trace) -> ByEnd {
        let end_ns = |op: &u32| trace.op_span(&trace.ops[*op as usize]).end_ns;
        let mut ops: Vec<u32> = (0..trace.ops.len() as u32).collect();
        ops.sort_by_key(end_ns);
        let ends = ops.iter().map(end_ns).collect();
        ByEnd { ops, ends }
    }

    /// The pieces that ended by `at_ns`, the last to end first, each with its end.
    fn ended_by(&self, at_ns: i64) -> impl Iterator<Item = (u32, i64)> {
        let count = self.ends.partition_point(|end| *end <= at_ns);
        self.ops[..count].iter().copied().zip(self.ends[..count].iter().copied()).rev()
    }
}

/// The constraints on every piece of work, from the reason for which it began when it did.
fn nodes(window: &Window, by_end: &ByEnd) -> Vec<Node> {
    let trace = window.trace;
    let typical = typical(window);
    let mut last_on: HashMap<u32, u32> = HashMap::new();
    let mut nodes = Vec::with_capacity(trace.ops.len());
    for (index, op) in trace.ops.iter().enumerate() {
        let span = *trace.op_span(op);
        let start_ns = span.start_ns;
        let before = last_on.insert(span.lane, index as u32);
        let until = before.map(|before| trace.op_span(&trace.ops[before as usize]).end_ns);
        // Clocks of host and device may disagree by some microseconds.
        let launch_ns = trace.launch_ns(op).filter(|at| *at <= start_ns);
        let ready_ns = until.into_iter().chain(launch_ns).max();
        let latency_ns = launch_ns.map(|at| start_ns - at);
        let launched_late = launch_ns.is_some_and(|at| until.is_none_or(|until| at > until));
        let prompt = launched_late && latency_ns.is_some_and(|latency| latency <= 3 * typical.latency_ns);
        let last = by_end.ended_by(start_ns).next().filter(|(of, _)| {
            let on_other_stream = trace.op_span(&trace.ops[*of as usize]).lane != span.lane;
            on_other_stream && (*of as usize) < index
        });
        let explains = |end_ns: i64| {
            !prompt && ready_ns.is_none_or(|ready| end_ns > ready) && start_ns - end_ns < 2 * KERNEL_WAIT_NS
        };
        let waited_for_other = last.is_some_and(|(_, end_ns)| explains(end_ns));
        let bound_by_launch = launched_late && !waited_for_other;
        let other = last.filter(|_| waited_for_other || bound_by_launch).map(|(of, end_ns)| {
            let gap_ns = start_ns - end_ns;
            // Work that was launched late may depend on what had ended on other streams by then. A
            // replay keeps that order, and so rather saves too little.
            After { of, lag_ns: if waited_for_other { gap_ns } else { gap_ns.min(typical.gap_ns) } }
        });
        let launch = op.call.zip(latency_ns).map(|(of, latency_ns)| After {
            of,
            lag_ns: if bound_by_launch { latency_ns } else { latency_ns.min(typical.latency_ns) },
        });
        let stream = before.zip(until).map(|(of, until)| {
            let gap_ns = start_ns - until;
            After { of, lag_ns: if bound_by_launch || waited_for_other { gap_ns.min(typical.gap_ns) } else { gap_ns } }
        });
        nodes.push(Node {
            length_ns: span.duration_ns(),
            communicates: span.kind == Kind::Communication,
            launch,
            stream,
            other,
            start_ns,
        });
    }
    nodes
}

/// The calls that wait for the device, and for what.
fn waits(window: &Window, by_end: &ByEnd) -> HashMap<u32, Wait> {
    let trace = window.trace;
    let mut own_op: HashMap<u32, u32> = HashMap::new();
    for (index, op) in trace.ops.iter().enumerate() {
        if let Some(call) = op.call {
            own_op.insert(call, index as u32);
        }
    }
    // A call that need not wait takes as long as the shortest of its name.
    let mut shortest: HashMap<u32, i64> = HashMap::new();
    for call in &trace.calls {
        let span = trace.call_span(call);
        let least = shortest.entry(span.name.0).or_insert(i64::MAX);
        *least = (*least).min(span.duration_ns());
    }
    let mut waits = HashMap::new();
    for (index, call) in trace.calls.iter().enumerate() {
        let span = trace.call_span(call);
        let of = match call.class {
            CallClass::Synchronise => last_launched_before(window, call, by_end),
            CallClass::Copy => own_op.get(&(index as u32)).copied().filter(|op| copy_waits(window, call, *op)),
            CallClass::Launch | CallClass::GraphLaunch | CallClass::Other => None,
        };
        if let Some(of) = of {
            let end_ns = trace.op_span(&trace.ops[of as usize]).end_ns;
            let waited = end_ns > span.start_ns;
            let least_ns = shortest[&span.name.0].min(span.duration_ns());
            let (lag_ns, own_ns) =
                if waited { (span.end_ns - end_ns, least_ns) } else { (least_ns, span.duration_ns()) };
            // A lag longer than the call itself would move its end.
            let lag_ns = lag_ns.min(span.end_ns - end_ns);
            waits.insert(index as u32, Wait { after: After { of, lag_ns }, own_ns });
        }
    }
    waits
}

/// The piece of work that a synchronising call waited for: of those launched before it, the last to
/// end before it returned.
fn last_launched_before(window: &Window, call: &Call, by_end: &ByEnd) -> Option<u32> {
    let trace = window.trace;
    let span = trace.call_span(call);
    let launched_before = |op: &Op| trace.launch_ns(op).is_none_or(|at| at <= span.start_ns);
    let ended = by_end.ended_by(span.end_ns).take(64);
    ended.map(|(op, _)| op).find(|op| launched_before(&trace.ops[*op as usize]))
}

/// True if a copying call returned when its copy was done: copies from and to pageable memory.
fn copy_waits(window: &Window, call: &Call, op: u32) -> bool {
    let trace = window.trace;
    let (call, op) = (trace.call_span(call), trace.op_span(&trace.ops[op as usize]));
    let name = trace.timeline.name(op);
    if name.contains("DtoD") || name.contains("Pinned") || name.starts_with("Memset") {
        return false;
    }
    // The last part of a copy may still be under way in the driver's own buffers.
    let slack_ns = op.duration_ns() / 5 + 20_000;
    op.start_ns < call.end_ns && op.end_ns <= call.end_ns + slack_ns
}
