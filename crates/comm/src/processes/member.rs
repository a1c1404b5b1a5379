//! A rank in a group of processes: meetings, transfers, splits.

use super::envelope::{self, Envelope, INLINE_BYTES};
use super::flight::{Crash, Flight, Stream};
use super::process::{Handle, Process};
use super::transfer;
use super::transport::Transport;
use crate::backend::{Backend, Call, Operation, Signature, Terms, intact, members_of_split};
use crate::communicator::Communicator;
use crate::error::{CommError, ErrorKind, Failure, Result};
use crate::inline;
use crate::number::Dtype;
use crate::place::{Place, Position};
use crate::tcp::printable;
use bytemuck::{Pod, Zeroable};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Tags of one context.
const TAGS: u32 = 8;
const TAG_ENVELOPE: i32 = 0;
pub(super) const TAG_SCATTER: i32 = 1;
pub(super) const TAG_GATHER: i32 = 2;
const TAG_MESSAGE: i32 = 3;
const TAG_MESSAGE_DATA: i32 = 4;
/// Of the last meeting, in context 0.
const TAG_END: i32 = 5;
/// The longest time for which ranks wait for each other at the very end.
const END_DEADLINE: Duration = Duration::from_secs(30);

/// Ends the transport when the last group goes.
struct World<T: Transport> {
    handle: Mutex<Handle<T>>,
    process: Arc<Process<T>>,
}

/// One rank's view of a group.
pub(super) struct Member<T: Transport> {
    world: Arc<World<T>>,
    pub context: u32,
    pub members: Vec<u32>,
    pub rank: usize,
    turn: Mutex<Turn>,
}

/// Held for the length of an operation.
#[derive(Default)]
pub(super) struct Turn {
    operations: u64,
    /// The envelope that goes out.
    out: Vec<u8>,
    /// Those that come in, each [`envelope::bytes_max`] long, as words for alignment.
    arrived: Vec<u64>,
    /// Chunks on their way into a sum.
    pub scratch: Vec<u64>,
}

/// The error of a world that cannot begin.
pub(crate) fn broken(what: String) -> CommError {
    let kind = ErrorKind::Backend { what };
    Failure { kind, group: "world".to_owned(), operation: None, noticed_by: 0, culprits: Vec::new() }.into()
}

/// Makes the world's communicator; the other ranks may be silent for `deadline` meanwhile.
pub(crate) fn world<T: Transport>(transport: Arc<T>, deadline: Duration) -> Result<Communicator> {
    let (rank, size) = (transport.rank(), transport.size());
    let process = Arc::new(Process::new(transport));
    let handle =
        Handle::new(process.clone()).map_err(|error| broken(format!("no thread for the listener: {error}")))?;
    let world = Arc::new(World { handle: Mutex::new(handle), process });
    let member = Member::new(world.clone(), 0, (0..size as u32).collect(), rank);
    world.process.set_places(places(&member, deadline)?);
    Ok(Communicator::new(Arc::new(member), "world".to_owned()))
}

/// A place as it travels.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Card {
    pid: u32,
    host_bytes: u32,
    host: [u8; 64],
}

/// Everybody's place: hosts are nodes, and ranks of one host have its devices in turn.
fn places<T: Transport>(member: &Member<T>, deadline: Duration) -> Result<Vec<Place>> {
    let here = Place::here(0);
    let bytes = here.host.len().min(64);
    let mut host = [0; 64];
    host[..bytes].copy_from_slice(&here.host.as_bytes()[..bytes]);
    let card = Card { pid: here.pid, host_bytes: bytes as u32, host };
    let cards = member.all_gather(card, &Terms { deadline, number: 0, group: "world", sums: &[] })?;
    let mut hosts: Vec<String> = Vec::new();
    let mut devices: Vec<u32> = Vec::new();
    let place = |card: Card| {
        let host = printable(&String::from_utf8_lossy(&card.host[..(card.host_bytes as usize).min(64)]));
        let node = hosts.iter().position(|known| *known == host).unwrap_or_else(|| {
            hosts.push(host.clone());
            devices.push(0);
            hosts.len() - 1
        });
        devices[node] += 1;
        Place { node: node as u32, device: devices[node] - 1, host, pid: card.pid }
    };
    Ok(cards.into_iter().map(place).collect())
}

impl<T: Transport> Drop for World<T> {
    fn drop(&mut self) {
        let (rank, size) = (self.process.rank(), self.process.transport.size());
        let tag = TAG_END;
        let mut bytes = vec![0u8; size];
        let base = bytes.as_mut_ptr();
        let mut streams = Vec::new();
        for peer in (0..size).filter(|&peer| peer != rank) {
            // SAFETY: a byte for every rank.
            let (own, theirs) = unsafe { (base.add(rank), base.add(peer)) };
            streams.push(Stream::new(true, peer, tag, own, 1));
            streams.push(Stream::new(false, peer, tag, theirs, 1));
        }
        let met = self.process.failure().is_none() && {
            let flight = Flight::new(&self.process, streams);
            // SAFETY: `bytes` outlives the flight.
            unsafe { flight.run(END_DEADLINE, |_| false, |crash| self.unmet(crash), |_| Ok(())) }.is_ok()
        };
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).end(met);
    }
}

impl<T: Transport> World<T> {
    /// A meeting at the end that did not come about: nobody is left to be told.
    fn unmet(&self, crash: Crash) -> CommError {
        match crash {
            Crash::Failed(error) => error,
            Crash::New(kind, _) => broken(format!("the ranks did not end together: {kind:?}")),
        }
    }
}

/// True if inputs travel in envelopes; the same on all ranks, as it depends on the signature alone.
fn fits_inline(signature: &Signature, size: usize) -> bool {
    signature.extent(size, signature.root).input <= INLINE_BYTES
}

impl<T: Transport> Member<T> {
    fn new(world: Arc<World<T>>, context: u32, members: Vec<u32>, rank: usize) -> Self {
        Self { world, context, members, rank, turn: Mutex::default() }
    }

    pub fn process(&self) -> &Process<T> {
        &self.world.process
    }

    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// Members but this one.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<T> {
        let rank = self.rank;
        // Beginning with the neighbour spreads the load.
        (1..self.members.len()).map(move |step| step + rank).map({
            let size = self.members.len();
            move |member| member % size
        })
    }

    pub fn stream(&self, sending: bool, member: usize, tag: i32, base: *mut u8, bytes: usize) -> Stream {
        Stream::new(sending, self.members[member] as usize, (self.context * TAGS) as i32 + tag, base, bytes)
    }

    pub fn crash(&self, crash: Crash, operation: Operation, terms: &Terms) -> CommError {
        match crash {
            Crash::Failed(error) => error,
            Crash::New(kind, peers) => {
                let index = |peer: &usize| self.members.iter().position(|&member| member as usize == *peer);
                let culprits: Vec<usize> = peers.iter().filter_map(index).collect();
                self.blame(kind, &culprits, operation, terms)
            }
        }
    }

    fn blame(&self, kind: ErrorKind, culprits: &[usize], operation: Operation, terms: &Terms) -> CommError {
        self.fail_with(kind, culprits, Some((operation, terms.number)), terms.group)
    }

    pub fn corrupt(&self, member: usize, call: &Call, terms: &Terms) -> CommError {
        self.blame(ErrorKind::Corrupt, &[member], call.signature.operation, terms)
    }

    /// Exchanges envelopes with everybody; theirs, by member, with this rank's own in its place.
    ///
    /// # Safety
    /// `call.input` is readable for its extent.
    unsafe fn meet(&self, turn: &mut Turn, call: &Call, terms: &Terms) -> Result<Vec<Envelope>> {
        let words = envelope::bytes_max(self.size()).div_ceil(8);
        let position = self.process().position_of(self.context, self.process().rank());
        let input: &[u8] = match call.signature.extent(self.size(), self.rank).input {
            0 => &[],
            _ if !fits_inline(&call.signature, self.size()) => &[],
            // SAFETY: the caller's promise.
            bytes => unsafe { std::slice::from_raw_parts(call.input, bytes) },
        };
        envelope::write(
            &call.signature,
            position.as_ref().map(|(position, _)| position),
            terms.sums,
            input,
            &mut turn.out,
        );
        turn.arrived.resize(words * self.size(), 0);
        let arrived: *mut u8 = turn.arrived.as_mut_ptr().cast();
        let mut streams = Vec::with_capacity(2 * self.size());
        for member in self.others() {
            // SAFETY: there is room for an envelope of each member.
            let theirs = unsafe { arrived.add(8 * words * member) };
            streams.push(self.stream(false, member, TAG_ENVELOPE, theirs, 8 * words));
            streams.push(self.stream(true, member, TAG_ENVELOPE, turn.out.as_mut_ptr(), turn.out.len()));
        }
        let number = turn.operations;
        let gone = |peer: usize| self.process().left_before(self.context, peer, number);
        let blame = |crash| self.crash(crash, call.signature.operation, terms);
        // SAFETY: both buffers belong to the turn, which this thread holds.
        unsafe { Flight::new(self.process(), streams).run(terms.deadline, gone, blame, |_| Ok(())) }?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut turn.arrived);
        let own = 8 * words * self.rank;
        bytes[own..own + turn.out.len()].copy_from_slice(&turn.out);
        let envelopes: Vec<Envelope> = bytes.chunks_exact(8 * words).map(envelope::read).collect();
        for member in self.others() {
            if let Some(position) = envelopes[member].position.clone() {
                self.process().post(self.context, self.members[member] as usize, position);
            }
        }
        Ok(envelopes)
    }

    /// # Safety
    /// As [`Backend::collective`].
    unsafe fn run(&self, turn: &mut Turn, call: &Call, terms: &Terms) -> Result<()> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        // SAFETY: the caller's promise.
        let envelopes = unsafe { self.meet(turn, call, terms) }?;
        let calls: Vec<Signature> = envelopes.iter().map(|envelope| envelope.signature).collect();
        self.agree(&calls, terms)?;
        let is_whole = |member: usize| {
            let Envelope { sums, inline: (_, length), .. } = &envelopes[member];
            let input = call.signature.extent(self.size(), member).input;
            sums.len() <= self.size() && (*length == input || !fits_inline(&call.signature, self.size()))
        };
        if let Some(member) = (0..self.size()).find(|&member| !is_whole(member)) {
            return Err(self.corrupt(member, call, terms));
        }
        if !fits_inline(&call.signature, self.size()) {
            // SAFETY: the caller's promise, and all members agree.
            return unsafe { transfer::run(self, turn, call, terms, &envelopes) };
        }
        let stride = 8 * envelope::bytes_max(self.size()).div_ceil(8);
        let bytes: &[u8] = bytemuck::cast_slice(&turn.arrived);
        let data = |member: usize| {
            let (start, length) = envelopes[member].inline;
            &bytes[member * stride + start..][..length]
        };
        for member in 0..self.size() {
            let (signature, sums) = (&envelopes[member].signature, &envelopes[member].sums);
            let whole = |reader| {
                let (offset, length) = signature.read_by(self.size(), reader);
                intact(sums, reader, &data(member)[offset..offset + length])
            };
            if !(0..sums.len()).all(whole) {
                return Err(self.corrupt(member, call, terms));
            }
        }
        let inputs: Vec<*const u8> = (0..self.size()).map(|member| data(member).as_ptr()).collect();
        // SAFETY: envelopes agree and are whole, so each holds an input of this call's size, at a
        // multiple of 8;
        // the output is the caller's.
        unsafe { inline::compute(&inputs, self.rank, call) };
        Ok(())
    }

    /// One value of each member.
    fn all_gather<V: Pod + Send + Sync>(&self, value: V, terms: &Terms) -> Result<Vec<V>> {
        let mut all = vec![value; self.size()];
        let signature = Signature { operation: Operation::AllGather, dtype: Dtype::of::<V>(), elements: 1, root: 0 };
        let call = Call { signature, input: (&raw const value).cast(), output: all.as_mut_ptr().cast() };
        // SAFETY: one element in, one for each member out, both ours.
        unsafe { self.collective(&call, terms) }.map(|()| all)
    }

    /// Contexts for the groups of a split that no member uses yet: the first of them.
    fn new_contexts(&self, count: u32, terms: &Terms) -> Result<u32> {
        let limit = self.process().transport.tag_max() / TAGS;
        let mut least = 0;
        loop {
            let first = self.all_gather(u64::from(self.process().next_context().max(least)), terms)?;
            let first = first.into_iter().max().unwrap_or(0) as u32;
            if first.saturating_add(count) > limit {
                let what = format!("there are tags for {limit} communicators, and all are used: make fewer");
                return Err(self.blame(ErrorKind::Backend { what }, &[], Operation::Split, terms));
            }
            // Splits of other groups at the same time may want the same; then all try again above.
            let claimed = self.process().claim(first, count);
            if self.all_gather(u64::from(claimed), terms)?.into_iter().all(|claimed| claimed == 1) {
                return Ok(first);
            }
            if claimed {
                self.process().unclaim(first, count);
            }
            least = first + count;
        }
    }

    /// Sends and receives the envelopes of messages, then what did not fit.
    fn messages(&self, send: Option<(usize, &[u8])>, receive: Option<(usize, &mut [u8])>, terms: &Terms) -> Result<()> {
        let operation = if receive.is_some() { Operation::Receive } else { Operation::Send };
        let side = |operation, elements| Signature { operation, dtype: Dtype::Plain(1), elements, root: 0 };
        let blame = |crash| self.crash(crash, operation, terms);
        let fly = |streams| {
            // SAFETY: all streams are over buffers that live to the end of this function.
            unsafe { Flight::new(self.process(), streams).run(terms.deadline, |_| false, blame, |_| Ok(())) }
        };
        let (mut out, mut arrived) = (Vec::new(), vec![0u8; envelope::bytes_max(1)]);
        let mut streams = Vec::new();
        if let Some((to, data)) = send {
            let inline = if data.len() <= INLINE_BYTES { data } else { &[] };
            let position = self.process().position_of(self.context, self.process().rank());
            let position = position.as_ref().map(|(position, _)| position);
            envelope::write(&side(Operation::Send, data.len()), position, terms.sums, inline, &mut out);
            streams.push(self.stream(true, to, TAG_MESSAGE, out.as_mut_ptr(), out.len()));
        }
        if let Some((from, _)) = &receive {
            streams.push(self.stream(false, *from, TAG_MESSAGE, arrived.as_mut_ptr(), arrived.len()));
        }
        fly(streams)?;
        let mut streams = Vec::new();
        if let Some((to, data)) = send.filter(|(_, data)| data.len() > INLINE_BYTES) {
            // A stream that sends only reads.
            streams.push(self.stream(true, to, TAG_MESSAGE_DATA, data.as_ptr().cast_mut(), data.len()));
        }
        let Some((from, into)) = receive else { return fly(streams) };
        let envelope = envelope::read(&arrived);
        if envelope.signature.elements != into.len() {
            let kind = ErrorKind::Mismatch { ours: side(Operation::Receive, into.len()), theirs: envelope.signature };
            return Err(self.blame(kind, &[from], operation, terms));
        }
        if into.len() <= INLINE_BYTES {
            if envelope.inline.1 != into.len() {
                return Err(self.blame(ErrorKind::Corrupt, &[from], operation, terms));
            }
            into.copy_from_slice(&arrived[envelope.inline.0..][..envelope.inline.1]);
        } else {
            streams.push(self.stream(false, from, TAG_MESSAGE_DATA, into.as_mut_ptr(), into.len()));
        }
        fly(streams)?;
        if intact(&envelope.sums, 0, into) {
            Ok(())
        } else {
            Err(self.blame(ErrorKind::Corrupt, &[from], operation, terms))
        }
    }
}

impl<T: Transport> Backend for Member<T> {
    fn kind(&self) -> &'static str {
        T::NAME
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[u32] {
        &self.members
    }

    fn place(&self, world_rank: u32) -> Place {
        self.process().place(world_rank)
    }

    fn position_of(&self, member: usize) -> Option<(Position, Duration)> {
        self.process().position_of(self.context, self.members[member] as usize)
    }

    fn ask(&self, members: &[usize]) -> bool {
        let ranks: Vec<usize> = members.iter().map(|&member| self.members[member] as usize).collect();
        self.process().ask(&ranks);
        true
    }

    fn dead(&self) -> Option<(Vec<usize>, String)> {
        let death = |member| Some((member, self.process().death_of(self.members[member] as usize)?));
        let mut dead = self.others().filter_map(death);
        let (first, evidence) = dead.next()?;
        Some((std::iter::once(first).chain(dead.map(|(member, _)| member)).collect(), evidence))
    }

    fn post(&self, position: Position) {
        self.process().post(self.context, self.process().rank(), position);
    }

    unsafe fn collective(&self, call: &Call, terms: &Terms) -> Result<()> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise.
        let result = unsafe { self.run(&mut turn, call, terms) };
        turn.operations += 1;
        result
    }

    fn exchange(&self, send: Option<(usize, &[u8])>, receive: Option<(usize, &mut [u8])>, terms: &Terms) -> Result<()> {
        self.messages(send, receive, terms)
    }

    fn split(&self, keys: &[(u32, u32)], terms: &Terms) -> Result<Arc<dyn Backend>> {
        let mut colors: Vec<u32> = keys.iter().map(|(color, _)| *color).collect();
        colors.sort_unstable();
        colors.dedup();
        let first = self.new_contexts(colors.len() as u32, terms)?;
        let color = colors.partition_point(|&color| color < keys[self.rank].0);
        let members = members_of_split(keys, self.rank);
        let rank = members.iter().position(|&member| member == self.rank).expect("a member of its own color");
        let ranks = members.iter().map(|&member| self.members[member]).collect();
        Ok(Arc::new(Member::new(self.world.clone(), first + color as u32, ranks, rank)))
    }

    fn request_stop(&self) {
        self.process().request_stop();
    }

    fn stop_requested(&self) -> Option<u32> {
        self.process().stop_requested()
    }

    fn failure(&self) -> Option<CommError> {
        self.process().failure()
    }

    fn fail(&self, failure: Failure) -> CommError {
        self.process().fail(failure)
    }

    fn leave(&self) {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let others: Vec<usize> = self.others().map(|member| self.members[member] as usize).collect();
        self.process().tell_left(&others, self.context, turn.operations);
    }
}
