//! The timeline of a run's instructions, as a Chrome trace that Perfetto opens: one track per lane,
//! and one for copies from a GPU to its host.
//!
//! A trace has the first and the last steps of a sitting, because viewers and disks have limits.
//! The first steps are written as they end. The last ones are kept in memory until the sitting
//! ends, so a killed process loses them.
//!
//! The array form of the format is used. Viewers accept it without its closing bracket, so a killed
//! run leaves a valid trace too.

use crate::lanes::Span;
use crate::{EngineError, Result};
use serde_json::json;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use trainyard_program::{Lane, Program, Streams};

/// Writer of a rank's `trace/rank-N.json`.
pub struct TraceWriter {
    out: BufWriter<File>,
    path: PathBuf,
    rank: usize,
    origin: Instant,
    /// Number of steps of each window, at the start and the end.
    window: u64,
    /// Number of steps so far.
    steps: u64,
    /// Events of the last steps after the first window, oldest first.
    last: VecDeque<Vec<u8>>,
}

impl TraceWriter {
    /// Begins a trace of `rank` in the run's `folder`, with the first and the last `window` steps.
    /// It replaces the trace of an earlier sitting.
    pub fn create(folder: &Path, rank: usize, window: u64) -> Result<TraceWriter> {
        let path = folder.join("trace").join(format!("rank-{rank}.json"));
        let error = |source| EngineError::File { what: "cannot write", path: path.display().to_string(), source };
        std::fs::create_dir_all(folder.join("trace")).map_err(error)?;
        let mut out = BufWriter::new(File::create(&path).map_err(error)?);
        out.write_all(b"[\n").map_err(error)?;
        for (track, name) in Lane::ALL.map(Lane::name).into_iter().chain(["to_host"]).enumerate() {
            let track = Lane::FIRST_TRACK + track;
            let name = json!({"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}});
            writeln!(out, "{name},").map_err(error)?;
        }
        Ok(TraceWriter { out, path, rank, origin: Instant::now(), window, steps: 0, last: VecDeque::new() })
    }

    /// Adds the instructions of the step that has just ended.
    pub fn step(&mut self, step: u64, program: &Program, spans: &[Span]) -> Result<()> {
        let length = spans.iter().map(|span| span.end).max().unwrap_or_default();
        let began = self.origin.elapsed().saturating_sub(length);
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let streams = Streams::new(program);
        self.steps += 1;
        let is_first = self.steps <= self.window;
        // The newest step reuses the memory of the oldest.
        let full = self.last.len() as u64 == self.window;
        let mut events = self.last.pop_front_if(|_| full).unwrap_or_default();
        events.clear();
        for (number, (span, instruction)) in spans.iter().zip(&program.instructions).enumerate() {
            let event = json!({
                "name": program.name_of(instruction),
                "cat": instruction.action.lane().name(),
                "ph": "X",
                "ts": micros(began + span.start),
                "dur": micros(span.end - span.start),
                "pid": program.rank,
                "tid": Lane::FIRST_TRACK + streams.of(number),
                "args": {"step": step, "waited_us": micros(span.waited), "bytes": instruction.bytes},
            });
            writeln!(events, "{event},").expect("memory can be written to");
        }
        if !is_first {
            self.last.push_back(events);
            return Ok(());
        }
        self.out.write_all(&events).and_then(|()| self.out.flush()).map_err(|source| self.error(source))
    }

    fn error(&self, source: std::io::Error) -> EngineError {
        EngineError::File { what: "cannot write", path: self.path.display().to_string(), source }
    }
}

impl Drop for TraceWriter {
    fn drop(&mut self) {
        // The last event has no comma after it. Errors are ignored: an unclosed trace can still be
        // viewed.
        let name = json!({"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": format!("rank {}", self.rank)}});
        let last = self.last.iter().try_for_each(|events| self.out.write_all(events));
        let _ = last.and_then(|()| writeln!(self.out, "{name}\n]")).and_then(|()| self.out.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_program::{Mesh, ModelShape, Offload, Strategy, Tier, UnitShape, lower_rank};

    #[test]
    fn a_trace_is_json_once_it_is_closed_and_has_every_instruction() {
        let folder = tempfile::tempdir().unwrap();
        let unit = UnitShape { name: "head".into(), flat_elements: 1, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit], ..ModelShape::default() };
        let offload = Offload { optimizer: Some(Tier::Host), ..Offload::default() };
        let strategy = Strategy { offload, ..Strategy::new(1) };
        let program = lower_rank(&model, &Mesh::default(), &strategy, 0).unwrap();
        let mut trace = TraceWriter::create(folder.path(), 0, 200).unwrap();
        let spans = vec![Span { end: Duration::from_micros(5), ..Span::default() }; program.instructions.len()];
        trace.step(3, &program, &spans).unwrap();
        let read = || std::fs::read_to_string(folder.path().join("trace/rank-0.json")).unwrap();
        let of_a_killed_run = read();
        drop(trace);
        let text = read();
        assert!(text.starts_with(&of_a_killed_run));
        let events: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
        let spans: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(spans.len(), program.instructions.len());
        assert!(spans.iter().any(|e| e["name"] == "backward head" && e["dur"] == 5.0 && e["args"]["step"] == 3));
        // Gradients go to the host, and updated copies come from it.
        for (name, track) in [("fetch head", "to_host"), ("evict head", "host_io")] {
            let named = events.iter().find(|e| e["name"] == "thread_name" && e["args"]["name"] == track).unwrap();
            assert!(spans.iter().any(|e| e["name"] == name && e["tid"] == named["tid"]), "{name}");
        }
    }

    #[test]
    fn a_trace_has_the_first_and_the_last_steps_however_long_a_run_is() {
        let unit = UnitShape { name: "head".into(), flat_elements: 1, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit], ..ModelShape::default() };
        let program = lower_rank(&model, &Mesh::default(), &Strategy::new(1), 0).unwrap();
        let spans = vec![Span::default(); program.instructions.len()];
        for (steps, expected) in [(4, vec![1, 2, 3, 4]), (1000, vec![1, 2, 3, 998, 999, 1000])] {
            let folder = tempfile::tempdir().unwrap();
            let mut trace = TraceWriter::create(folder.path(), 0, 3).unwrap();
            (1..=steps).for_each(|step| trace.step(step, &program, &spans).unwrap());
            assert!(trace.last.len() <= 3);
            drop(trace);
            let text = std::fs::read_to_string(folder.path().join("trace/rank-0.json")).unwrap();
            let events: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
            let mut found: Vec<u64> = events.iter().filter_map(|event| event["args"]["step"].as_u64()).collect();
            found.dedup();
            assert_eq!(found, expected);
        }
    }
}
