//! Captures with the driver's rules, and graphs that are queued again.
//!
//! The rules are those of the CUDA driver API's documentation of `cuStreamBeginCapture`,
//! `cuThreadExchangeStreamCaptureMode` (mode `THREAD_LOCAL`) and the `CUDA_ERROR_STREAM_CAPTURE_*`
//! errors. A violation fails with the driver's error and invalidates the capture. Where the
//! documentation leaves something open, the fake refuses it.
//!
//! A launch puts the captured work on the launching stream. Work of other streams of the capture
//! goes to streams of the graph's own, ordered by its events alone. All of it passes the same
//! checks as other work.

use super::{Clock, Order, Queues, Record, Region, Work, plain};
use crate::driver::{Address, Event, Graph, Stream};
use crate::error::{CudaError, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::ThreadId;

/// The captures in progress, and the captured graphs.
#[derive(Default)]
pub(super) struct Captures {
    begun: u64,
    open: Vec<Capture>,
    graphs: Vec<Option<Captured>>,
}

/// One that goes on.
struct Capture {
    number: u64,
    thread: ThreadId,
    /// The one that it began on, then those that joined.
    streams: Vec<Stream>,
    nodes: Vec<Node>,
    /// The order of its work. Streams are identified by their index in this capture.
    order: Order,
    events: BTreeMap<usize, Clock>,
    /// The reason why it is invalid.
    broken: Option<String>,
}

/// A piece of a graph, on one of its streams.
struct Node {
    stream: usize,
    does: Does,
}

enum Does {
    Work(Box<Piece>),
    Record(Event),
    Wait(Event),
    /// Records an event for the outside.
    Time(Event),
}

/// Work with the allocations in which its regions lay.
struct Piece {
    record: Record,
    work: Work,
    memory: Vec<Option<u64>>,
}

/// A graph.
#[derive(Clone)]
struct Captured {
    nodes: Arc<Vec<Node>>,
    /// For each of its streams after the first.
    streams: Vec<Stream>,
    /// The event that its streams wait for at first.
    began: Event,
    /// Its own, for those of the capture.
    events: BTreeMap<usize, Event>,
}

fn error(call: &'static str, code: &str) -> CudaError {
    CudaError::Call { call, code: code.to_owned(), hint: "" }
}

impl Capture {
    fn place(&self, stream: Stream) -> Option<usize> {
        self.streams.iter().position(|one| *one == stream)
    }

    /// It has become invalid; the error for what did it.
    fn breaks(&mut self, call: &'static str, code: &str) -> CudaError {
        self.broken.get_or_insert_with(|| call.to_owned());
        error(call, code)
    }

    fn add(&mut self, stream: Stream, does: Does) {
        let stream = self.place(stream).expect("the stream is in the capture");
        self.order.advance(stream);
        self.nodes.push(Node { stream, does });
    }
}

impl Queues {
    fn capture_of(&mut self, stream: Stream) -> Option<&mut Capture> {
        self.captures.open.iter_mut().find(|capture| capture.place(stream).is_some())
    }

    pub(super) fn is_capturing(&mut self, stream: Stream) -> bool {
        self.capture_of(stream).is_some()
    }

    /// The capture that the stream is in, while it is valid.
    fn valid(&mut self, stream: Stream, call: &'static str) -> Result<&mut Capture> {
        let capture = self.capture_of(stream).ok_or_else(|| error(call, "CUDA_ERROR_ILLEGAL_STATE"))?;
        match &capture.broken {
            Some(why) => Err(error(call, &format!("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED by {why}"))),
            None => Ok(capture),
        }
    }

    /// Fails when the stream is captured, for a call that may not be made there.
    pub(super) fn refuse_on(&mut self, stream: Stream, call: &'static str) -> Result<()> {
        match self.capture_of(stream) {
            Some(capture) => Err(capture.breaks(call, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")),
            None => Ok(()),
        }
    }

    /// Fails when this thread captures, for a call that no graph would repeat.
    pub(super) fn refuse_by_this_thread(&mut self, call: &'static str) -> Result<()> {
        let thread = std::thread::current().id();
        match self.captures.open.iter_mut().find(|capture| capture.thread == thread) {
            Some(capture) => Err(capture.breaks(call, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")),
            None => Ok(()),
        }
    }

    /// Fails for events whose last mark is in a graph.
    pub(super) fn refuse_captured(&self, event: Event, call: &'static str) -> Result<()> {
        match self.events[event.0].captured {
            Some(_) => Err(error(call, "CUDA_ERROR_CAPTURED_EVENT")),
            None => Ok(()),
        }
    }

    /// Something is freed, which waits for all streams and so may not be while one is captured.
    pub(super) fn frees(&mut self, what: &str) {
        for capture in &mut self.captures.open {
            capture.broken.get_or_insert_with(|| what.to_owned());
            self.problems.push(format!("{what} while stream {} is captured", capture.streams[0].0));
        }
    }

    pub(super) fn begin_capture(&mut self, stream: Stream) -> Result<()> {
        const CALL: &str = "cuStreamBeginCapture";
        if self.is_capturing(stream) {
            return Err(error(CALL, "CUDA_ERROR_ILLEGAL_STATE"));
        }
        self.captures.begun += 1;
        self.captures.open.push(Capture {
            number: self.captures.begun,
            thread: std::thread::current().id(),
            streams: vec![stream],
            nodes: Vec::new(),
            order: Order::default(),
            events: BTreeMap::new(),
            broken: None,
        });
        Ok(())
    }

    pub(super) fn end_capture(&mut self, stream: Stream, failing: bool) -> Result<Graph> {
        const CALL: &str = "cuStreamEndCapture";
        let begun_there = |capture: &Capture| capture.streams[0] == stream;
        let at = self.captures.open.iter().position(begun_there);
        let at = at.ok_or_else(|| error(CALL, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"))?;
        if self.captures.open[at].thread != std::thread::current().id() {
            return Err(error(CALL, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"));
        }
        let mut capture = self.captures.open.swap_remove(at);
        if let Some(why) = &capture.broken {
            return Err(error(CALL, &format!("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED by {why}")));
        }
        if (1..capture.streams.len()).any(|other| !capture.order.includes(0, other)) {
            return Err(error(CALL, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"));
        }
        if failing {
            return Err(error(CALL, "CUDA_ERROR_UNKNOWN, asked for by the test"));
        }
        let streams = capture.streams[1..].iter().map(|_| self.new_stream()).collect();
        let began = self.new_event();
        let events = capture.events.keys().map(|event| (*event, self.new_event())).collect();
        self.captures.graphs.push(Some(Captured { nodes: Arc::new(capture.nodes), streams, began, events }));
        Ok(Graph(self.captures.graphs.len() - 1))
    }

    /// The allocation in which a region lies.
    fn serial(&self, region: &Region) -> Option<u64> {
        let (start, end) = (region.address, region.address + region.bytes as Address);
        let (base, allocation) = self.memory.range(..=start).next_back()?;
        (end <= *base + allocation.bytes as Address).then_some(allocation.serial)
    }

    pub(super) fn capture(&mut self, stream: Stream, record: Record, work: Work) -> Result<()> {
        let memory = record.regions.iter().map(|region| self.serial(region)).collect();
        let capture = self.valid(stream, record.name)?;
        capture.add(stream, Does::Work(Box::new(Piece { record, work, memory })));
        Ok(())
    }

    pub(super) fn capture_record(&mut self, event: Event, stream: Stream) -> Result<()> {
        let capture = self.valid(stream, "cuEventRecord")?;
        capture.add(stream, Does::Record(event));
        let place = capture.place(stream).expect("the stream is in the capture");
        let (now, number) = (capture.order.now(place), capture.number);
        capture.events.insert(event.0, now);
        self.events[event.0].captured = Some(number);
        Ok(())
    }

    pub(super) fn record_in_graph(&mut self, event: Event, stream: Stream) -> Result<()> {
        self.valid(stream, "cuEventRecordWithFlags")?.add(stream, Does::Time(event));
        Ok(())
    }

    /// A stream of a capture waits, or one that joins it.
    pub(super) fn capture_wait(&mut self, stream: Stream, event: Event) -> Result<()> {
        const CALL: &str = "cuStreamWaitEvent";
        let recorded_in = self.events[event.0].captured;
        if self.is_capturing(stream) {
            let capture = self.valid(stream, CALL)?;
            if recorded_in != Some(capture.number) {
                let code = if recorded_in.is_some() { "MERGE" } else { "ISOLATION" };
                return Err(capture.breaks(CALL, &format!("CUDA_ERROR_STREAM_CAPTURE_{code}")));
            }
        }
        let capture = self.captures.open.iter_mut().find(|capture| Some(capture.number) == recorded_in);
        let capture = capture.ok_or_else(|| error(CALL, "CUDA_ERROR_CAPTURED_EVENT"))?;
        if capture.place(stream).is_none() {
            capture.streams.push(stream);
        }
        let place = capture.place(stream).expect("just made sure of");
        capture.order.wait(place, &capture.events[&event.0]);
        capture.add(stream, Does::Wait(event));
        Ok(())
    }

    pub(super) fn launch_graph(&mut self, stream: Stream, graph: Graph) -> Result<()> {
        const CALL: &str = "cuGraphLaunch";
        self.refuse_on(stream, CALL)?;
        let found = self.captures.graphs.get(graph.0).cloned().flatten();
        let Captured { nodes, streams, began, events } =
            found.ok_or_else(|| error(CALL, "CUDA_ERROR_INVALID_HANDLE"))?;
        self.record(began, stream);
        streams.iter().for_each(|other| self.wait(*other, began));
        let on = |place: usize| if place == 0 { stream } else { streams[place - 1] };
        for node in nodes.iter() {
            match &node.does {
                Does::Work(piece) => {
                    let Piece { record, work, memory } = &**piece;
                    let now = record.regions.iter().map(|region| self.serial(region));
                    if !now.eq(memory.iter().copied()) {
                        let what = "works on memory that was freed since it was captured";
                        self.problems.push(format!("{} of graph {} {what}", record.name, graph.0));
                        continue;
                    }
                    self.put(on(node.stream), record, work.clone());
                }
                Does::Record(event) => self.record(events[&event.0], on(node.stream)),
                Does::Wait(event) => self.wait(on(node.stream), events[&event.0]),
                Does::Time(event) => self.record(*event, on(node.stream)),
            }
        }
        self.records.push(plain(stream, "graph", &[]));
        Ok(())
    }

    pub(super) fn destroy_graph(&mut self, graph: Graph) {
        match self.captures.graphs.get_mut(graph.0) {
            Some(kept) if kept.is_some() => *kept = None,
            _ => self.problems.push(format!("graph {} is given back, and there is none", graph.0)),
        }
    }
}
