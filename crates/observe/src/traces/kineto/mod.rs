//! Reads traces of PyTorch's profiler (Kineto) as a stream: JSON, plain or gzip, of CUDA, ROCm, XPU
//! and CPUs, from the first versions with categories like `Operator` to those of today.
//!
//! A trace becomes a [`Trace`]: spans on lanes, calls of the device's runtime linked with the work
//! that they launched, and steps. Events of no use here (flows, counters, Python frames, call
//! stacks) are skipped while reading and take no memory.

mod event;
mod names;
mod read;
mod steps;
mod values;

pub use names::short_name;
pub use read::{read_bytes, read_file};

use crate::span::{Span, Timeline};
use std::path::PathBuf;

/// A reason why a file cannot be read as a trace.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened or read.
    #[error("cannot read the file")]
    Io(#[source] std::io::Error),
    /// The file ends inside of a value, or inside of its compressed data.
    #[error(
        "the file ends in the middle, after {position} bytes of JSON: the profiler was stopped while it wrote; record the trace again"
    )]
    Truncated {
        /// Bytes of JSON before the end.
        position: u64,
    },
    /// The compressed data are damaged.
    #[error("the compressed data are damaged after {position} bytes of JSON: copy or record the trace again")]
    Damaged {
        /// Bytes of JSON before the damage.
        position: u64,
        /// The decompressor's words.
        #[source]
        source: std::io::Error,
    },
    /// The file is empty.
    #[error("the file is empty")]
    Empty,
    /// The file is no JSON.
    #[error(
        "byte {position} is no JSON ({found}): a trace is the JSON that torch.profiler's export_chrome_trace writes, plain or gzip"
    )]
    NotJson {
        /// Position of the first byte that cannot be.
        position: u64,
        /// The byte there.
        found: String,
    },
    /// The file is JSON without events.
    #[error("{found}: a trace has an array `traceEvents`, as torch.profiler's export_chrome_trace writes it")]
    NotATrace {
        /// The document in words.
        found: String,
    },
}

impl ReadError {
    /// The error of a read: truncated and damaged compressed data have words of their own.
    fn of_input(error: std::io::Error, position: u64) -> ReadError {
        match error.kind() {
            std::io::ErrorKind::UnexpectedEof => ReadError::Truncated { position },
            std::io::ErrorKind::InvalidInput | std::io::ErrorKind::InvalidData => {
                ReadError::Damaged { position, source: error }
            }
            _ => ReadError::Io(error),
        }
    }
}

/// A call of the device's runtime or driver: a launch, a copy, a synchronisation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Call {
    /// Index of its span in the timeline.
    pub span: u32,
    /// The kind of call.
    pub class: CallClass,
    /// The number that links it with the device's work. None where the trace has none.
    pub correlation: Option<i64>,
}

/// The kinds of calls that analyses tell apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallClass {
    /// Starts one kernel.
    Launch,
    /// Starts a graph of kernels.
    GraphLaunch,
    /// Starts a copy or a fill.
    Copy,
    /// Waits for the device.
    Synchronise,
    /// Anything else.
    Other,
}

/// A piece of work of a device: a kernel, a copy, a fill.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Op {
    /// Index of its span in the timeline.
    pub span: u32,
    /// Index of the call that launched it, in [`Trace::calls`].
    pub call: Option<u32>,
}

/// A step, as an annotation of the trace delimits it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Step {
    /// Its number in the trace.
    pub number: u64,
    /// Begin in nanoseconds.
    pub start_ns: i64,
    /// End in nanoseconds.
    pub end_ns: i64,
    /// Index of the thread's lane.
    pub lane: u32,
}

/// The origin of a trace's steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepOrigin {
    /// `ProfilerStep#N`, which `profiler.step()` writes.
    Profiler,
    /// The ends of `Optimizer.step#...`, where there are no profiler steps.
    Optimizer,
    /// There are no steps.
    None,
}

/// Events that were passed over, by reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Skipped {
    /// Events that are no JSON objects, or too long to keep.
    pub unreadable: u64,
    /// Events with a begin or length that is no time, or of negative length.
    pub without_time: u64,
    /// Events that were mended before they could be read.
    pub mended: u64,
    /// Frames of Python, which `with_stack` records.
    pub python_frames: u64,
}

/// One file of the profiler: what one rank did.
#[derive(Debug)]
pub struct Trace {
    /// The file.
    pub path: PathBuf,
    /// Number of ranks of the job, if the trace says it.
    pub world_size: Option<u32>,
    /// True if the trace names its rank.
    pub rank_is_known: bool,
    /// The devices' names, without repetitions.
    pub devices: Vec<String>,
    /// All spans, by begin.
    pub timeline: Timeline,
    /// Calls of the runtime, by begin.
    pub calls: Vec<Call>,
    /// The device's work, by begin.
    pub ops: Vec<Op>,
    /// Operators of the host, as indices of their spans, by begin.
    pub operators: Vec<u32>,
    /// Steps, by begin. They do not overlap.
    pub steps: Vec<Step>,
    /// The origin of the steps.
    pub step_origin: StepOrigin,
    /// Events that were passed over.
    pub skipped: Skipped,
    /// Number of events in the file.
    pub events: u64,
}

impl Trace {
    /// The span of a piece of the device's work.
    pub fn op_span(&self, op: &Op) -> &Span {
        &self.timeline.spans[op.span as usize]
    }

    /// The span of a call.
    pub fn call_span(&self, call: &Call) -> &Span {
        &self.timeline.spans[call.span as usize]
    }

    /// The begin of the call that launched a piece of work.
    pub fn launch_ns(&self, op: &Op) -> Option<i64> {
        op.call.map(|call| self.call_span(&self.calls[call as usize]).start_ns)
    }

    /// Begin of the earliest span, the zero of places in reports.
    pub fn origin_ns(&self) -> i64 {
        self.timeline.spans.first().map_or(0, |span| span.start_ns)
    }
}
