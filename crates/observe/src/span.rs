//! Spans: what each lane of a rank did, and when.
//!
//! A [`Timeline`] holds the spans of one rank, from any recorder. Names are interned, because a
//! trace repeats a few hundred names a hundred thousand times. Times are nanoseconds on the clock
//! of the trace.

use serde::Serialize;
use std::collections::HashMap;

/// The kind of work that a span is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Arithmetic: a kernel, a pass through a unit, an optimizer's update.
    Compute,
    /// A collective, a send or a receive.
    Communication,
    /// A copy or a fill of memory: host to device, device to host, inside a device.
    Copy,
    /// Reading and preparing a batch.
    Input,
    /// Work of the host that is none of the others: operators, launches, Python.
    Host,
    /// Writing a checkpoint.
    Checkpoint,
    /// Waiting that the trace names: for a device, an event, another lane.
    Wait,
}

impl Kind {
    /// The kind's name in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Compute => "compute",
            Kind::Communication => "communication",
            Kind::Copy => "copy",
            Kind::Input => "input",
            Kind::Host => "host",
            Kind::Checkpoint => "checkpoint",
            Kind::Wait => "wait",
        }
    }
}

/// The index of an interned name in its [`Names`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NameId(pub u32);

/// The names of a timeline, each stored once.
#[derive(Default, Debug)]
pub struct Names {
    texts: Vec<Box<str>>,
    ids: HashMap<Box<str>, NameId>,
}

impl Names {
    /// The id of `text`, which is stored if it is new.
    pub fn intern(&mut self, text: &str) -> NameId {
        if let Some(id) = self.ids.get(text) {
            return *id;
        }
        let id = NameId(self.texts.len() as u32);
        self.texts.push(text.into());
        self.ids.insert(text.into(), id);
        id
    }

    /// The text of `id`, which must come from this table.
    pub fn text(&self, id: NameId) -> &str {
        &self.texts[id.0 as usize]
    }

    /// All names, in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.texts.iter().map(|text| text.as_ref())
    }

    /// Number of different names.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// True if nothing was interned.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }
}

/// A thread of the host, or a stream of a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Lane {
    /// `thread 1234`, `stream 7`, `compute`.
    pub name: String,
    /// True for a stream of a device.
    pub on_device: bool,
}

/// One interval of work on one lane.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Span {
    /// Begin, in nanoseconds.
    pub start_ns: i64,
    /// End, in nanoseconds; not before the begin.
    pub end_ns: i64,
    /// Name in the timeline's [`Names`].
    pub name: NameId,
    /// Index into the timeline's lanes.
    pub lane: u32,
    /// The step that the span belongs to, by its number in the recording.
    pub step: Option<u32>,
    /// The kind of work.
    pub kind: Kind,
}

impl Span {
    /// Length in nanoseconds.
    pub fn duration_ns(&self) -> i64 {
        self.end_ns - self.start_ns
    }
}

/// The spans of one rank.
#[derive(Default, Debug)]
pub struct Timeline {
    /// The rank's number in its job.
    pub rank: u32,
    /// The lanes that spans refer to.
    pub lanes: Vec<Lane>,
    /// The names that spans refer to.
    pub names: Names,
    /// The spans, by begin once [`Timeline::sort`] was called.
    pub spans: Vec<Span>,
}

impl Timeline {
    /// Orders the spans by begin; of those that begin together, the longest (the outermost) first.
    pub fn sort(&mut self) {
        self.spans.sort_by_key(|span| (span.start_ns, std::cmp::Reverse(span.end_ns)));
    }

    /// The name of a span of this timeline.
    pub fn name(&self, span: &Span) -> &str {
        self.names.text(span.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_stored_once_and_outer_spans_come_first() {
        let mut timeline = Timeline::default();
        let outer = timeline.names.intern("outer");
        let inner = timeline.names.intern("inner");
        assert_eq!(timeline.names.intern("outer"), outer);
        assert_eq!((timeline.names.len(), timeline.names.text(inner)), (2, "inner"));
        let span = |name, start_ns, end_ns| Span { start_ns, end_ns, name, lane: 0, step: None, kind: Kind::Host };
        timeline.spans = vec![span(inner, 5, 6), span(inner, 1, 2), span(outer, 1, 9)];
        timeline.sort();
        let order: Vec<_> = timeline.spans.iter().map(|span| timeline.name(span)).collect();
        assert_eq!(order, ["outer", "inner", "inner"]);
    }
}
