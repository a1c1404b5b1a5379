//! Streams of chunks between this rank and others, and the loop that drives them.
//!
//! A [`Stream`] is one buffer to or from one rank, cut into chunks. A bounded number of its chunks
//! is in flight. Its `limit` is the number of chunks that may start; the operation raises it as
//! other streams progress, which orders sums, forwards and reuse of memory. Chunks of one stream
//! start in order, as matching by tags needs. They may complete in any order, so `done` counts the
//! completed prefix.

use super::process::Process;
use super::transport::Transport;
use crate::error::{CommError, ErrorKind};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Bytes of a chunk: it and its sum stay in the second cache level. Chosen by measurement
/// (docs/LOG.md).
pub(crate) const CHUNK_BYTES: usize = 512 << 10;
/// Chunks of a stream under way.
pub(crate) const WINDOW: usize = 8;
/// The pause between two looks of a waiting rank whether its peers still live.
const LOOK: Duration = Duration::from_millis(50);
/// The share of the deadline after which a peer that does not answer counts as dead. It is less
/// than the whole because of chains: rank A may wait in another group for rank B, which waits for
/// the silent rank. Their deadlines began at the same time. B must name the silent rank before A's
/// deadline passes and A names B.
const SILENCE: f64 = 0.9;

/// One direction of data between this rank and another.
pub(super) struct Stream {
    /// Rank of the peer in the world.
    pub peer: usize,
    pub tag: i32,
    pub sending: bool,
    pub base: *mut u8,
    pub bytes: usize,
    /// Memory holds this many chunks, used in turn; all of them if there are as many.
    pub ring: usize,
    /// Chunks that may start.
    pub limit: usize,
    /// Chunks started.
    started: usize,
    /// Chunks `0..done` have completed.
    pub done: usize,
    /// Completions beyond `done`.
    ahead: VecDeque<bool>,
}

impl Stream {
    pub fn new(sending: bool, peer: usize, tag: i32, base: *mut u8, bytes: usize) -> Self {
        let chunks = bytes.div_ceil(CHUNK_BYTES);
        Self {
            peer,
            tag,
            sending,
            base,
            bytes,
            ring: chunks,
            limit: chunks,
            started: 0,
            done: 0,
            ahead: VecDeque::new(),
        }
    }

    pub fn chunks(&self) -> usize {
        self.bytes.div_ceil(CHUNK_BYTES)
    }

    pub fn finished(&self) -> bool {
        self.done == self.chunks()
    }

    /// Where chunk `index` lies, and its length.
    pub fn chunk(&self, index: usize) -> (*mut u8, usize) {
        let place = index % self.ring.max(1) * CHUNK_BYTES;
        // SAFETY: `base` holds `ring` chunks, or all bytes where the ring is all of them.
        (unsafe { self.base.add(place) }, CHUNK_BYTES.min(self.bytes - index * CHUNK_BYTES))
    }

    fn complete(&mut self, index: usize) {
        self.ahead[index - self.done] = true;
        while self.ahead.front() == Some(&true) {
            self.ahead.pop_front();
            self.done += 1;
        }
    }
}

/// Messages under way and what they belong to.
pub(super) struct Flight<'a, T: Transport> {
    process: &'a Process<T>,
    streams: Vec<Stream>,
    requests: Vec<T::Request>,
    /// For each request: stream and chunk.
    labels: Vec<(usize, usize)>,
    ready: Vec<usize>,
}

/// The reason why a flight ended early: the world's failure, or a new one with the world ranks of
/// its culprits.
pub(super) enum Crash {
    Failed(CommError),
    New(ErrorKind, Vec<usize>),
}

impl<'a, T: Transport> Flight<'a, T> {
    pub fn new(process: &'a Process<T>, streams: Vec<Stream>) -> Self {
        Self { process, streams, requests: Vec::new(), labels: Vec::new(), ready: Vec::new() }
    }

    /// Runs until every stream has finished; `advance` is called after completions, to compute and
    /// to raise limits.
    ///
    /// `gone` tells whether a peer has left for good, and `blame` fails the world. On an error the
    /// world has failed, and nothing writes the streams' memory any more.
    ///
    /// # Safety
    /// The memory of all streams is valid until this returns, and nobody else touches it but
    /// `advance`, which keeps to chunks that have completed.
    pub unsafe fn run(
        mut self,
        deadline: Duration,
        gone: impl Fn(usize) -> bool,
        blame: impl Fn(Crash) -> CommError,
        mut advance: impl FnMut(&mut [Stream]) -> Result<(), Crash>,
    ) -> Result<(), CommError> {
        // SAFETY: the caller's promise.
        unsafe { self.drive(deadline, &gone, &mut advance) }.map_err(|crash| {
            // The others first: ending requests may take a while, and the connections to ranks that
            // do not take part.
            let error = blame(crash);
            let sending = self.labels.iter().map(|(stream, _)| self.streams[*stream].sending);
            self.process.transport.abandon(self.requests.drain(..).zip(sending).collect());
            error
        })
    }

    /// # Safety
    /// As [`Flight::run`].
    unsafe fn drive(
        &mut self,
        deadline: Duration,
        gone: &impl Fn(usize) -> bool,
        advance: &mut impl FnMut(&mut [Stream]) -> Result<(), Crash>,
    ) -> Result<(), Crash> {
        let mut polls = 0;
        let mut progress = Instant::now();
        let mut looked = progress;
        let mut asked = false;
        loop {
            // SAFETY: the caller's promise.
            unsafe { self.start() }.map_err(|what| self.broken(what))?;
            if self.requests.is_empty() {
                advance(&mut self.streams)?;
                if self.streams.iter().all(Stream::finished) {
                    return Ok(());
                }
                continue;
            }
            self.process.transport.test(&mut self.requests, &mut self.ready).map_err(|what| self.broken(what))?;
            if !self.ready.is_empty() {
                for index in self.ready.drain(..).rev() {
                    self.requests.swap_remove(index);
                    let (stream, chunk) = self.labels.swap_remove(index);
                    self.streams[stream].complete(chunk);
                }
                advance(&mut self.streams)?;
                progress = Instant::now();
                asked = false;
                polls = 0;
                continue;
            }
            if let Some(failure) = self.process.failure() {
                return Err(Crash::Failed(failure));
            }
            let waited = progress.elapsed();
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                let late = self.late();
                let mut dead = late.iter().filter_map(|&peer| Some((peer, self.process.death_of(peer)?)));
                if let Some((first, evidence)) = dead.next() {
                    let dead = std::iter::once(first).chain(dead.map(|(peer, _)| peer)).collect();
                    return Err(Crash::New(ErrorKind::Died { evidence }, dead));
                }
                let left: Vec<usize> = late.iter().copied().filter(|&peer| gone(peer)).collect();
                if !left.is_empty() {
                    return Err(Crash::New(ErrorKind::Left, left));
                }
                if !asked && waited >= deadline / 2 {
                    asked = true;
                    self.process.ask(&late);
                }
                if asked
                    && waited >= deadline.mul_f64(SILENCE)
                    && let Some(crash) = self.silent(deadline, waited)
                {
                    return Err(crash);
                }
            }
            if waited >= deadline {
                let late = || Crash::New(ErrorKind::Deadline { waited: deadline }, self.late());
                let silent = if asked { self.silent(deadline, waited) } else { None };
                return Err(silent.unwrap_or_else(late));
            }
            polls += 1;
            self.process.transport.pause(polls);
        }
    }

    /// Starts what the limits allow.
    ///
    /// # Safety
    /// As [`Flight::run`].
    unsafe fn start(&mut self) -> Result<(), String> {
        for (index, stream) in self.streams.iter_mut().enumerate() {
            while stream.started < stream.limit.min(stream.chunks()) && stream.started - stream.done < WINDOW {
                let (data, bytes) = stream.chunk(stream.started);
                let transport = &self.process.transport;
                // SAFETY: the caller's promise.
                let request = unsafe {
                    if stream.sending {
                        transport.send(data, bytes, stream.peer, stream.tag)
                    } else {
                        transport.receive(data, bytes, stream.peer, stream.tag)
                    }
                }?;
                self.requests.push(request);
                self.labels.push((index, stream.started));
                stream.ahead.push_back(false);
                stream.started += 1;
            }
        }
        Ok(())
    }

    /// Peers that have not done their part, each once: senders whose data has not come, or, if
    /// there are none, receivers that have not taken theirs.
    fn late(&self) -> Vec<usize> {
        let waiting = |sending: bool| {
            let open = self.streams.iter().filter(|s| s.sending == sending && s.started > s.done);
            let mut peers: Vec<usize> = open.map(|stream| stream.peer).collect();
            peers.sort_unstable();
            peers.dedup();
            peers
        };
        let senders = waiting(false);
        if senders.is_empty() { waiting(true) } else { senders }
    }

    /// Late peers that have not answered since they were asked, if there are any.
    fn silent(&self, deadline: Duration, waited: Duration) -> Option<Crash> {
        let mut silent = self.late();
        silent.retain(|&peer| !self.process.answered(peer));
        if silent.is_empty() {
            return None;
        }
        let (waited, asked) = (waited.as_secs_f64(), (waited - deadline / 2).as_secs_f64());
        let evidence = format!("it did not come within {waited:.1} s and its process answers nothing for {asked:.1} s");
        Some(Crash::New(ErrorKind::Died { evidence }, silent))
    }

    fn broken(&self, what: String) -> Crash {
        match self.process.failure() {
            Some(failure) => Crash::Failed(failure),
            None => Crash::New(ErrorKind::Backend { what }, self.late()),
        }
    }
}
