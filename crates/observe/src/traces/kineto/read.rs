//! From a file to a [`Trace`].

use super::event::{Event, mend};
use super::names::{Category, call_class, host_kind, kernel_kind};
use super::values::{Value, Values};
use super::{Call, Op, ReadError, Skipped, Step, Trace, steps};
use crate::span::{Kind, Lane, Span, Timeline};
use flate2::read::MultiGzDecoder;
use serde::Deserialize;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Cursor, Read};
use std::path::Path;
use std::sync::mpsc;

/// The first bytes of gzip, which decide instead of the file's name.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Reads the trace in a file.
pub fn read_file(path: &Path) -> Result<Trace, ReadError> {
    let mut file = File::open(path).map_err(ReadError::Io)?;
    let mut first = Vec::new();
    (&mut file).take(GZIP.len() as u64).read_to_end(&mut first).map_err(ReadError::Io)?;
    let zipped = first == GZIP;
    let input = Cursor::new(first).chain(file);
    if !zipped {
        return parse(input, path);
    }
    std::thread::scope(|scope| {
        // Inflating and parsing take about the same time, so they take turns on two cores.
        let (sender, receiver) = mpsc::sync_channel(PIECES_AHEAD);
        scope.spawn(move || inflate(MultiGzDecoder::new(BufReader::new(input)), &sender));
        parse(Pieces { receiver, piece: Cursor::new(Vec::new()) }, path)
    })
}

/// Reads a trace from memory, plain or gzip.
pub fn read_bytes(bytes: &[u8], path: &Path) -> Result<Trace, ReadError> {
    if bytes.starts_with(&GZIP) { parse(MultiGzDecoder::new(bytes), path) } else { parse(bytes, path) }
}

/// An event longer than a hundred days is none.
const LENGTH_NS_MAX: i64 = 100 * 24 * 3600 * 1_000_000_000;

/// Bytes of a piece that goes from the inflating to the parsing thread, and pieces under way.
const PIECE_BYTES: usize = 256 * 1024;
const PIECES_AHEAD: usize = 4;

fn inflate(mut input: impl Read, sender: &mpsc::SyncSender<std::io::Result<Vec<u8>>>) {
    loop {
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        let read = (&mut input).take(PIECE_BYTES as u64).read_to_end(&mut piece);
        // The bytes before an error are whole, and say where it is. The parser may have given up.
        if !piece.is_empty() && sender.send(Ok(piece)).is_err() {
            return;
        }
        match read {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                let _ = sender.send(Err(error));
                return;
            }
        }
    }
}

/// The pieces of a channel as one stream.
struct Pieces {
    receiver: mpsc::Receiver<std::io::Result<Vec<u8>>>,
    piece: Cursor<Vec<u8>>,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        loop {
            let count = self.piece.read(buffer)?;
            if count > 0 {
                return Ok(count);
            }
            match self.receiver.recv() {
                Ok(piece) => self.piece = Cursor::new(piece?),
                Err(mpsc::RecvError) => return Ok(0),
            }
        }
    }
}

/// The job's part of a trace.
#[derive(Deserialize)]
struct DistributedInfo {
    rank: Option<u32>,
    world_size: Option<u32>,
}

/// One device.
#[derive(Deserialize)]
struct DeviceProperties {
    name: Option<String>,
}

fn parse(input: impl Read, path: &Path) -> Result<Trace, ReadError> {
    let mut values = Values::new(input);
    values.skip_byte_order_mark()?;
    let mut builder = Builder::default();
    match values.peek()? {
        None => return Err(ReadError::Empty),
        Some(b'[') => {
            values.take();
            // Chrome's own array of events may lack its last bracket.
            builder.events(&mut values, Ending::MayLackBracket)?;
        }
        Some(b'{') => {
            values.take();
            document(&mut values, &mut builder)?;
        }
        Some(byte) => return Err(not_json(&values, byte)),
    }
    Ok(builder.finish(path))
}

fn not_json<R: Read>(values: &Values<R>, byte: u8) -> ReadError {
    let found = if byte.is_ascii_graphic() { format!("`{}`", byte as char) } else { format!("0x{byte:02x}") };
    ReadError::NotJson { position: values.position(), found }
}

/// Reads the members of the outermost object.
fn document<R: Read>(values: &mut Values<R>, builder: &mut Builder) -> Result<(), ReadError> {
    let mut keys = Vec::new();
    let mut has_events = false;
    loop {
        match values.peek()? {
            Some(b'"') => {}
            Some(b',') => {
                values.take();
                continue;
            }
            Some(b'}') => break,
            None => return Err(ReadError::Truncated { position: values.position() }),
            Some(byte) => return Err(not_json(values, byte)),
        }
        let key = match values.value()? {
            Value::Bytes(bytes) => String::from_utf8_lossy(bytes).trim_matches('"').to_owned(),
            Value::TooLong => String::new(),
        };
        match values.peek()? {
            Some(b':') => values.take(),
            None => return Err(ReadError::Truncated { position: values.position() }),
            Some(byte) => return Err(not_json(values, byte)),
        }
        let next = values.peek()?;
        if key == "traceEvents" && next == Some(b'[') {
            values.take();
            builder.events(values, Ending::Bracket)?;
            has_events = true;
            continue;
        }
        if let Value::Bytes(bytes) = values.value()? {
            builder.member(&key, bytes);
        }
        if keys.len() < 5 {
            keys.push(key);
        }
    }
    if has_events {
        return Ok(());
    }
    let found = if keys.is_empty() {
        "the file holds an empty object".to_owned()
    } else {
        format!("the file is JSON with the keys {}", keys.join(", "))
    };
    Err(ReadError::NotATrace { found })
}

/// The ways in which an array of events may end.
#[derive(Clone, Copy, PartialEq)]
enum Ending {
    Bracket,
    MayLackBracket,
}

/// The lane of an event: a thread of the host or a stream of a device.
#[derive(PartialEq, Eq, Hash)]
enum LaneKey {
    Thread { pid: Box<str>, tid: Box<str> },
    Stream { device: i64, stream: i64 },
}

/// A span with what links it.
struct Item {
    span: Span,
    category: Category,
    correlation: Option<i64>,
}

#[derive(Default)]
struct Builder {
    timeline: Timeline,
    lanes: HashMap<LaneKey, u32>,
    items: Vec<Item>,
    rank: Option<u32>,
    world_size: Option<u32>,
    devices: Vec<String>,
    skipped: Skipped,
    events: u64,
}

impl Builder {
    /// Reads events up to the end of their array.
    fn events<R: Read>(&mut self, values: &mut Values<R>, ending: Ending) -> Result<(), ReadError> {
        loop {
            match values.peek()? {
                Some(b']') => {
                    values.take();
                    return Ok(());
                }
                Some(b',') => {
                    values.take();
                    continue;
                }
                None if ending == Ending::MayLackBracket => return Ok(()),
                None => return Err(ReadError::Truncated { position: values.position() }),
                Some(b'{') => {}
                // An array of other things is no trace; later such elements are counted as
                // unreadable.
                Some(byte) if self.events == 0 || matches!(byte, b'}' | b':') => return Err(not_json(values, byte)),
                Some(_) => {}
            }
            self.events += 1;
            match values.value()? {
                Value::TooLong => self.skipped.unreadable += 1,
                Value::Bytes(bytes) => self.event(bytes),
            }
        }
    }

    /// Takes what is of use from a member of the outermost object.
    fn member(&mut self, key: &str, bytes: &[u8]) {
        match key {
            "distributedInfo" => {
                if let Ok(info) = serde_json::from_slice::<DistributedInfo>(bytes) {
                    (self.rank, self.world_size) = (info.rank, info.world_size);
                }
            }
            "deviceProperties" => {
                let devices = serde_json::from_slice::<Vec<DeviceProperties>>(bytes).unwrap_or_default();
                for name in devices.into_iter().filter_map(|device| device.name) {
                    if !self.devices.contains(&name) {
                        self.devices.push(name);
                    }
                }
            }
            _ => {}
        }
    }

    fn event(&mut self, bytes: &[u8]) {
        if let Ok(event) = serde_json::from_slice::<Event>(bytes) {
            return self.add(&event);
        }
        match serde_json::from_slice::<Event>(&mend(bytes)) {
            Ok(event) => {
                self.skipped.mended += 1;
                self.add(&event);
            }
            Err(_) => self.skipped.unreadable += 1,
        }
    }

    fn add(&mut self, event: &Event) {
        if event.ph.0 != "X" {
            return;
        }
        let mut category = Category::of(&event.cat.0);
        match category {
            Category::Other => return,
            Category::PythonFrame => {
                self.skipped.python_frames += 1;
                return;
            }
            _ => {}
        }
        let (Some(start_ns), Some(length_ns)) = (event.ts.microseconds_as_ns(), event.dur.microseconds_as_ns()) else {
            self.skipped.without_time += 1;
            return;
        };
        if !(0..=LENGTH_NS_MAX).contains(&length_ns) {
            self.skipped.without_time += 1;
            return;
        }
        let name = event.name.0.as_ref();
        let on_device = matches!(category, Category::Kernel | Category::DeviceCopy);
        let kind = match category {
            Category::Kernel => kernel_kind(name),
            Category::DeviceCopy => Kind::Copy,
            _ => host_kind(name),
        };
        // The first versions wrote annotations as operators.
        if category == Category::Operator && (name.starts_with("ProfilerStep") || kind != Kind::Host) {
            category = Category::Annotation;
        }
        let lane = self.lane(event, on_device);
        let name = self.timeline.names.intern(name);
        let span = Span { start_ns, end_ns: start_ns + length_ns, name, lane, step: None, kind };
        self.items.push(Item { span, category, correlation: event.args.correlation.whole().filter(|n| *n >= 0) });
    }

    fn lane(&mut self, event: &Event, on_device: bool) -> u32 {
        let key = if on_device {
            // Some versions write `stream 7` as the thread.
            let of_tid = || event.tid.0.trim_start_matches("stream ").parse().ok();
            let device = event.args.device.whole().or_else(|| event.pid.0.parse().ok());
            LaneKey::Stream {
                device: device.unwrap_or(0),
                stream: event.args.stream.whole().or_else(of_tid).unwrap_or(0),
            }
        } else {
            LaneKey::Thread { pid: event.pid.0.as_ref().into(), tid: event.tid.0.as_ref().into() }
        };
        if let Some(lane) = self.lanes.get(&key) {
            return *lane;
        }
        let name = match &key {
            LaneKey::Stream { device, stream } => format!("device {device} stream {stream}"),
            LaneKey::Thread { tid, .. } => format!("thread {tid}"),
        };
        let lane = self.timeline.lanes.len() as u32;
        self.timeline.lanes.push(Lane { name, on_device });
        self.lanes.insert(key, lane);
        lane
    }

    fn finish(mut self, path: &Path) -> Trace {
        self.items.sort_by_key(|item| (item.span.start_ns, std::cmp::Reverse(item.span.end_ns)));
        let mut calls = Vec::new();
        let mut by_correlation = HashMap::new();
        for (index, item) in self.items.iter().enumerate().filter(|(_, item)| item.category == Category::Call) {
            let class = call_class(self.timeline.names.text(item.span.name));
            if let Some(correlation) = item.correlation {
                by_correlation.insert(correlation, calls.len() as u32);
            }
            calls.push(Call { span: index as u32, class, correlation: item.correlation });
        }
        let mut ops = Vec::new();
        for (index, item) in self.items.iter().enumerate() {
            if matches!(item.category, Category::Kernel | Category::DeviceCopy) {
                let call = item.correlation.and_then(|correlation| by_correlation.get(&correlation).copied());
                ops.push(Op { span: index as u32, call });
            }
        }
        let is_operator = |(_, item): &(usize, &Item)| item.category == Category::Operator;
        let operators = self.items.iter().enumerate().filter(is_operator).map(|(index, _)| index as u32).collect();
        let mut timeline = self.timeline;
        timeline.rank = self.rank.unwrap_or(0);
        timeline.spans = self.items.into_iter().map(|item| item.span).collect();
        let (steps, step_origin) = steps::find(&timeline);
        mark_steps(&mut timeline, &calls, &ops, &steps);
        drop_loops_from_input(&mut timeline, &steps);
        Trace {
            path: path.to_owned(),
            world_size: self.world_size,
            rank_is_known: self.rank.is_some(),
            devices: self.devices,
            timeline,
            calls,
            ops,
            operators,
            steps,
            step_origin,
            skipped: self.skipped,
            events: self.events,
        }
    }
}

/// A region with `dataloader` in its name that goes on over the begin of a step is the training
/// loop, not a wait.
fn drop_loops_from_input(timeline: &mut Timeline, steps: &[Step]) {
    for span in timeline.spans.iter_mut().filter(|span| span.kind == Kind::Input) {
        let next = steps.partition_point(|step| step.start_ns <= span.start_ns);
        if steps.get(next).is_some_and(|step| step.start_ns < span.end_ns) {
            span.kind = Kind::Host;
        }
    }
}

/// Gives every span the index of its step: that of its begin on the host; on a device that of the
/// call that launched it.
fn mark_steps(timeline: &mut Timeline, calls: &[Call], ops: &[Op], steps: &[Step]) {
    let step_at = |at_ns: i64| {
        let after = steps.partition_point(|step| step.start_ns <= at_ns);
        let index = after.checked_sub(1)?;
        // The time between two steps belongs to the first.
        (at_ns < steps[index].end_ns || after < steps.len()).then_some(index as u32)
    };
    for index in 0..timeline.spans.len() {
        let span = timeline.spans[index];
        if !timeline.lanes[span.lane as usize].on_device {
            timeline.spans[index].step = step_at(span.start_ns);
        }
    }
    for op in ops {
        let at_ns = match op.call {
            Some(call) => timeline.spans[calls[call as usize].span as usize].start_ns,
            None => timeline.spans[op.span as usize].start_ns,
        };
        timeline.spans[op.span as usize].step = step_at(at_ns);
    }
}
