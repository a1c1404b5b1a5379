//! Recorded steps as a Chrome trace that Perfetto opens: a process per rank, a track per lane, all
//! on one clock, and arrows from sends to receives. Below a rank's lanes stand those of its
//! predicted step.

use crate::measured::{Measured, work};
use crate::run::Run;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::ops::RangeInclusive;
use trainyard_program::{Action, Lane, Phase, Program};

/// Tracks of the prediction are numbered from here.
const PREDICTED: usize = 100;

/// Number of steps written by [`write`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Written {
    /// Steps.
    pub steps: usize,
    /// Events.
    pub events: usize,
}

/// Writes those of `steps` whose number is in `range`.
///
/// # Errors
/// Of the writer.
pub fn write(
    out: &mut dyn Write,
    run: &Run,
    steps: &[Measured<'_>],
    range: RangeInclusive<u64>,
) -> std::io::Result<Written> {
    let chosen: Vec<&Measured<'_>> = steps.iter().filter(|step| range.contains(&step.step)).collect();
    let mut events = names(run);
    let origin = chosen.first().map_or(0.0, |step| step.began_s - step.before_s);
    let mut flows = Flows::default();
    // The ends of each rank's last instructions on the compute lane.
    let mut ends = vec![0.0; run.ranks.len()];
    for step in &chosen {
        let begin = step.began_s - origin;
        flows.note_sends(step);
        for (rank, program) in step.replay.programs().iter().enumerate() {
            between(&mut events, step, program, begin, ends[rank]);
            instructions(&mut events, run, step, rank, program, begin, &mut flows);
            predicted(&mut events, run, step, rank, begin);
            let computes = |number: &usize| program.instructions[*number].action.lane() == Lane::Compute;
            let last = (0..program.instructions.len()).filter(computes).map(|number| step.spans[rank][number].end_s);
            ends[rank] = begin + last.fold(0.0, f64::max);
        }
        counters(&mut events, step, begin);
    }
    let (steps, count) = (chosen.len(), events.len());
    out.write_all(b"[\n")?;
    for (index, event) in events.iter().enumerate() {
        writeln!(out, "{event}{}", if index + 1 < count { "," } else { "" })?;
    }
    out.write_all(b"]\n")?;
    Ok(Written { steps, events: count })
}

/// The arrows. Perfetto drops one whose id is no number, and lets each begin at the slice that
/// starts first. A receive often starts before its send, so the arrow ends at a slice inside of it,
/// which begins with the send.
#[derive(Default)]
struct Flows {
    numbers: BTreeMap<Message, usize>,
    /// Starts of the sends of the step at hand, as spans have them.
    sends: BTreeMap<Message, f64>,
}

/// A message between two ranks: step, sender, receiver, unit, micro-batch, phase.
type Message = (u64, u32, u32, u32, u32, Phase);

/// The message that an action of `rank` sends or receives.
fn message_of(step: u64, rank: u32, action: Action) -> Option<Message> {
    match action {
        Action::Send { to, unit, micro_batch, phase } => Some((step, rank, to, unit, micro_batch, phase)),
        Action::Recv { from, unit, micro_batch, phase } => Some((step, from, rank, unit, micro_batch, phase)),
        _ => None,
    }
}

impl Flows {
    fn number(&mut self, message: Message) -> usize {
        let next = self.numbers.len() + 1;
        *self.numbers.entry(message).or_insert(next)
    }

    fn note_sends(&mut self, step: &Measured<'_>) {
        self.sends.clear();
        for (rank, program) in step.replay.programs().iter().enumerate() {
            for (instruction, span) in program.instructions.iter().zip(&step.spans[rank]) {
                let is_send = matches!(instruction.action, Action::Send { .. });
                let message = message_of(step.step, program.rank, instruction.action).filter(|_| is_send);
                self.sends.extend(message.map(|message| (message, span.start_s)));
            }
        }
    }
}

fn micros(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}

/// The time and the duration of a slice. The end is rounded and not the duration, so that it never
/// reaches into the next slice of its track; Perfetto drops slices that overlap.
fn slice(start_s: f64, end_s: f64) -> [f64; 2] {
    let nanos = |seconds: f64| (seconds * 1e9).round();
    [nanos(start_s) / 1e3, (nanos(end_s) - nanos(start_s)).max(0.0) / 1e3]
}

/// Names of processes and tracks.
fn names(run: &Run) -> Vec<Value> {
    let mut events = Vec::new();
    for record in &run.ranks {
        let rank = record.rank;
        let host = if record.host.is_empty() { String::new() } else { format!(" on {}", record.host) };
        events.push(
            json!({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": format!("rank {rank}{host}")}}),
        );
        for lane in Lane::ALL {
            for (track, name) in [
                (lane.track(), lane.name().to_owned()),
                (PREDICTED + lane.track(), format!("{} predicted", lane.name())),
            ] {
                events
                    .push(json!({"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}));
                events.push(json!({"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": track, "args": {"sort_index": track}}));
            }
        }
    }
    events
}

fn instructions(
    events: &mut Vec<Value>,
    run: &Run,
    step: &Measured<'_>,
    rank: usize,
    program: &Program,
    begin: f64,
    flows: &mut Flows,
) {
    for (number, instruction) in program.instructions.iter().enumerate() {
        let span = step.spans[rank][number];
        let lane = instruction.action.lane();
        let done = work(run, rank, number, instruction);
        let own = step.replay.own[rank][number];
        let [ts, dur] = slice(begin + span.start_s, begin + span.end_s);
        events.push(json!({
            "name": program.name_of(instruction),
            "cat": lane.name(),
            "ph": "X",
            "ts": ts,
            "dur": dur,
            "pid": program.rank,
            "tid": lane.track(),
            "args": {
                "step": step.step,
                "instruction": number,
                "micro_batch": instruction.action.micro_batch(),
                "waited_us": micros(step.waited_s[rank][number]),
                "own_us": micros(own.took_s),
                "bytes": instruction.bytes,
                "flops": done.flops,
                "kernel_bytes": done.bytes,
                "kernels": done.kernels,
            },
        }));
        let Some(message) = message_of(step.step, program.rank, instruction.action) else { continue };
        let (phase, at) = match instruction.action {
            Action::Send { .. } => ("s", ts),
            _ => {
                // An end that is not after its begin counts for nothing.
                let sent = flows.sends.get(&message).map_or(span.start_s, |sent| sent + 1e-9);
                let [arrives, dur] = slice(begin + sent.clamp(span.start_s, span.end_s), begin + span.end_s);
                events.push(json!({
                    "name": "arrives", "cat": "message", "ph": "X", "ts": arrives, "dur": dur,
                    "pid": program.rank, "tid": lane.track(), "args": {"step": step.step},
                }));
                ("f", arrives)
            }
        };
        events.push(json!({
            "name": "message", "cat": "message", "ph": phase, "id": flows.number(message), "bp": "e", "ts": at,
            "pid": program.rank, "tid": lane.track(),
        }));
    }
}

/// The time between this step and the one before. It begins when the rank's compute lane was free
/// (`ended`), which may be later than on the first rank.
fn between(events: &mut Vec<Value>, step: &Measured<'_>, program: &Program, begin: f64, ended: f64) {
    let [ts, dur] = slice((begin - step.before_s).max(ended), begin);
    if dur > 0.0 {
        events.push(json!({
            "name": "between steps", "cat": "between", "ph": "X", "ts": ts, "dur": dur,
            "pid": program.rank, "tid": Lane::Compute.track(),
            "args": {"step": step.step, "agreed_us": micros(step.agreed_s)},
        }));
    }
}

/// The predicted step, which is one of the priced program, begun when the measured one began.
fn predicted(events: &mut Vec<Value>, run: &Run, step: &Measured<'_>, rank: usize, begin: f64) {
    let program = run.ranks[rank].programs.priced();
    let Some(spans) = run.predicted.as_ref().and_then(|p| p.stages.get(program.stage() as usize)) else { return };
    for (instruction, [start, end]) in program.instructions.iter().zip(spans) {
        let [ts, dur] = slice(begin + start, begin + end);
        events.push(json!({
            "name": program.name_of(instruction),
            "cat": "predicted",
            "ph": "X",
            "ts": ts,
            "dur": dur,
            "pid": program.rank,
            "tid": PREDICTED + instruction.action.lane().track(),
            "args": {"step": step.step},
        }));
    }
}

/// The machine during the step, as counters of rank 0.
fn counters(events: &mut Vec<Value>, step: &Measured<'_>, begin: f64) {
    let Some(sample) = step.sample else { return };
    let ts = micros(begin);
    events.push(json!({"name": "cores", "ph": "C", "pid": 0, "ts": ts, "args": {
        "run": sample.cpu.process, "others": sample.cpu.others, "steal": sample.cpu.steal}}));
    let pool: serde_json::Map<String, Value> =
        sample.memory.pool_bytes.iter().map(|(name, bytes)| (name.clone(), json!(bytes))).collect();
    events.push(json!({"name": "pool bytes", "ph": "C", "pid": 0, "ts": ts, "args": pool}));
    events.push(json!({"name": "disk bytes/s", "ph": "C", "pid": 0, "ts": ts, "args": {
        "read": sample.disk.read, "write": sample.disk.write}}));
    events.push(json!({"name": "network bytes/s", "ph": "C", "pid": 0, "ts": ts, "args": {
        "received": sample.network.received, "sent": sample.network.sent, "loopback": sample.network.loopback}}));
}
