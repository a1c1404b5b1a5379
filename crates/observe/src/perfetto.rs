//! Recorded steps as a Chrome trace that Perfetto opens: a process per rank, a track per lane, all
//! on one clock, and arrows from sends to receives. Below a rank's lanes stand those of its
//! predicted step.

use crate::measured::{Measured, work};
use crate::run::Run;
use serde_json::{Value, json};
use std::io::Write;
use std::ops::RangeInclusive;
use trainyard_program::{Action, Lane, Phase, Program};
use trainyard_sim::Span;

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
    for step in &chosen {
        let begin = step.began_s - origin;
        for (rank, program) in step.replay.programs().iter().enumerate() {
            instructions(&mut events, run, step, rank, program, begin);
            between(&mut events, step, program, begin);
            predicted(&mut events, run, step, rank, begin);
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

fn micros(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
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
                (lane as usize, lane.name().to_owned()),
                (PREDICTED + lane as usize, format!("{} predicted", lane.name())),
            ] {
                events
                    .push(json!({"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}));
                events.push(json!({"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": track, "args": {"sort_index": track}}));
            }
        }
    }
    events
}

fn instructions(events: &mut Vec<Value>, run: &Run, step: &Measured<'_>, rank: usize, program: &Program, begin: f64) {
    for (number, instruction) in program.instructions.iter().enumerate() {
        let span = step.spans[rank][number];
        let lane = instruction.action.lane();
        let done = work(run, rank, number, instruction);
        let own = step.replay.own[rank][number];
        events.push(json!({
            "name": program.name_of(instruction),
            "cat": lane.name(),
            "ph": "X",
            "ts": micros(begin + span.start_s),
            "dur": micros(span.end_s - span.start_s),
            "pid": program.rank,
            "tid": lane as usize,
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
        if let Some((id, phase, at)) = flow(step, program, instruction.action, span) {
            events.push(json!({
                "name": "message", "cat": "message", "ph": phase, "id": id, "bp": "e",
                "ts": micros(begin + at), "pid": program.rank, "tid": lane as usize,
            }));
        }
    }
}

/// The end of an arrow at a send or a receive: its id, phase and time.
fn flow(step: &Measured<'_>, program: &Program, action: Action, span: Span) -> Option<(String, &'static str, f64)> {
    let id = |from: u32, to: u32, unit: u32, micro_batch: u32, phase: Phase| {
        format!("{}-{from}-{to}-{unit}-{micro_batch}-{phase:?}", step.step)
    };
    match action {
        Action::Send { to, unit, micro_batch, phase } => {
            Some((id(program.rank, to, unit, micro_batch, phase), "s", span.start_s))
        }
        Action::Recv { from, unit, micro_batch, phase } => {
            // An arrow ends inside of the receive.
            let at = span.start_s.max(span.end_s - 1e-6);
            Some((id(from, program.rank, unit, micro_batch, phase), "f", at))
        }
        _ => None,
    }
}

/// The time between this step and the one before.
fn between(events: &mut Vec<Value>, step: &Measured<'_>, program: &Program, begin: f64) {
    if step.before_s > 0.0 {
        events.push(json!({
            "name": "between steps", "cat": "between", "ph": "X",
            "ts": micros(begin - step.before_s), "dur": micros(step.before_s),
            "pid": program.rank, "tid": Lane::Compute as usize,
            "args": {"step": step.step, "agreed_us": micros(step.agreed_s)},
        }));
    }
}

/// The predicted step, which is one of the first program, begun when the measured one began.
fn predicted(events: &mut Vec<Value>, run: &Run, step: &Measured<'_>, rank: usize, begin: f64) {
    let program = &run.ranks[rank].programs.programs[0];
    let Some(spans) = run.predicted.as_ref().and_then(|p| p.stages.get(program.stage() as usize)) else { return };
    for (instruction, [start, end]) in program.instructions.iter().zip(spans) {
        events.push(json!({
            "name": program.name_of(instruction),
            "cat": "predicted",
            "ph": "X",
            "ts": micros(begin + start),
            "dur": micros(end - start),
            "pid": program.rank,
            "tid": PREDICTED + instruction.action.lane() as usize,
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
