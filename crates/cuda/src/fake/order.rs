//! The order of accesses, by the events that order streams.

use crate::driver::Address;
use std::collections::BTreeMap;
use std::ops::Range;

/// Per stream, the number of pieces of work that come before.
#[derive(Clone, Default, Debug, PartialEq)]
pub struct Clock(Vec<u64>);

impl Clock {
    fn at(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    fn raise(&mut self, stream: usize, to: u64) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = self.0[stream].max(to);
    }

    fn join(&mut self, other: &Clock) {
        for (stream, ticks) in other.0.iter().enumerate() {
            self.raise(stream, *ticks);
        }
    }
}

struct Access {
    range: Range<Address>,
    written: bool,
    stream: usize,
    tick: u64,
}

/// The clocks of streams and host, and the accesses that later ones may conflict with.
#[derive(Default)]
pub struct Order {
    streams: Vec<Clock>,
    /// Work that the host has waited for. It comes before everything that is queued afterwards.
    host: Clock,
    accesses: BTreeMap<Address, Vec<Access>>,
}

impl Order {
    fn clock(&mut self, stream: usize) -> &mut Clock {
        if self.streams.len() <= stream {
            self.streams.resize(stream + 1, Clock::default());
        }
        self.streams[stream].join(&self.host);
        &mut self.streams[stream]
    }

    /// One more piece of work on a stream.
    pub fn advance(&mut self, stream: usize) {
        let clock = self.clock(stream);
        let next = clock.at(stream) + 1;
        clock.raise(stream, next);
    }

    /// The work that comes before anything that waits for an event recorded now.
    pub fn now(&mut self, stream: usize) -> Clock {
        self.clock(stream).clone()
    }

    /// The stream waits for an event.
    pub fn wait(&mut self, stream: usize, event: &Clock) {
        self.clock(stream).join(event);
    }

    /// True if all work of `other` so far comes before the next work of `stream`.
    pub fn includes(&mut self, stream: usize, other: usize) -> bool {
        let last = self.clock(other).at(other);
        self.clock(stream).at(other) >= last
    }

    /// The host waits for a stream.
    pub fn host_waits(&mut self, stream: usize) {
        let clock = self.clock(stream).clone();
        self.host.join(&clock);
    }

    /// The host waits for an event.
    pub fn host_joins(&mut self, event: &Clock) {
        self.host.join(event);
    }

    /// An access by the newest work of a stream to memory of the allocation `base`.
    pub fn access(&mut self, base: Address, range: Range<Address>, written: bool, stream: usize) -> Result<(), String> {
        let clock = self.clock(stream).clone();
        let accesses = self.accesses.entry(base).or_default();
        let touches = |other: &Access| other.range.start < range.end && range.start < other.range.end;
        let conflicts = |other: &&Access| touches(other) && (written || other.written);
        let after = |other: &Access| clock.at(other.stream) >= other.tick;
        let bad = accesses.iter().filter(conflicts).find(|other| !after(other)).map(|other| {
            let verb = |written| if written { "writes" } else { "reads" };
            format!(
                "{} {range:#x?}, which stream {} {} and no event comes between",
                verb(written),
                other.stream,
                verb(other.written)
            )
        });
        // What lies inside and comes before this write, or is an earlier read of this stream, says
        // nothing more.
        accesses.retain(|other| {
            let inside = range.start <= other.range.start && other.range.end <= range.end;
            let superseded = written || (other.stream == stream && !other.written);
            !(inside && superseded && after(other))
        });
        accesses.push(Access { range, written, stream, tick: clock.at(stream) });
        bad.map_or(Ok(()), Err)
    }

    /// The allocation is no more.
    pub fn forget(&mut self, base: Address) {
        self.accesses.remove(&base);
    }
}
