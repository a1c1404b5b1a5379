//! Large operations between processes, as streams whose limits depend on each other.
//!
//! | operation | first streams | then |
//! |---|---|---|
//! | all_reduce | share `j` of the input to rank `j` | sums of the own share to everybody, chunk by chunk as they are made |
//! | reduce_scatter | part `j` of the input to rank `j` | sums into the output |
//! | all_gather, gather, all_to_all | parts to whom they belong | |
//! | broadcast | share `j` of the root's data to rank `j` | every rank passes its share on, so the root sends all data about once |
//!
//! Each rank sends and receives `2 (n-1)/n` of an all-reduce's bytes, the least possible (Patarasu
//! and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"), and sums
//! arrive in the order of the tree.

use super::envelope::Envelope;
use super::flight::{CHUNK_BYTES, Crash, Flight, Stream, WINDOW};
use super::member::{Member, TAG_GATHER, TAG_SCATTER, Turn};
use super::transport::Transport;
use crate::backend::{Call, Operation, Signature, Terms};
use crate::error::{ErrorKind, Result};
use crate::number::sum_into;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Runs a large operation on whose signature all members agree.
///
/// # Safety
/// As `Backend::collective`.
pub(super) unsafe fn run<T: Transport>(
    member: &Member<T>,
    turn: &mut Turn,
    call: &Call,
    terms: &Terms,
    envelopes: &[Envelope],
) -> Result<()> {
    // SAFETY: the caller's promise.
    let result = unsafe {
        match call.signature.operation {
            Operation::AllReduce | Operation::ReduceScatter | Operation::ReduceScatterSums => {
                reduce(member, turn, call, terms, envelopes)
            }
            Operation::Broadcast => broadcast(member, call, terms, envelopes),
            _ => move_parts(member, call, terms, envelopes),
        }
    };
    result.map_err(|crash| member.crash(crash, call.signature.operation, terms))
}

fn corrupt<T: Transport>(member: &Member<T>, of: usize) -> Crash {
    Crash::New(ErrorKind::Corrupt, vec![member.members[of] as usize])
}

/// Flies without anything to do in between.
///
/// # Safety
/// As [`Flight::run`].
unsafe fn fly<T: Transport>(
    member: &Member<T>,
    call: &Call,
    terms: &Terms,
    streams: Vec<Stream>,
    advance: impl FnMut(&mut [Stream]) -> std::result::Result<(), Crash>,
) -> std::result::Result<(), Crash> {
    let blame = |crash| member.crash(crash, call.signature.operation, terms);
    // Everybody has come, so nobody has left.
    // SAFETY: the caller's promise.
    unsafe { Flight::new(member.process(), streams).run(terms.deadline, |_| false, blame, advance) }
        .map_err(Crash::Failed)
}

/// # Safety
/// As [`run`].
unsafe fn copy_own(from: *const u8, to: *mut u8, bytes: usize) {
    if !std::ptr::eq(from, to) {
        // SAFETY: the caller's promise: one part of the input, one of the output, which are apart
        // unless the same.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
}

/// All-gather, gather, all-to-all.
///
/// # Safety
/// As [`run`].
unsafe fn move_parts<T: Transport>(
    member: &Member<T>,
    call: &Call,
    terms: &Terms,
    envelopes: &[Envelope],
) -> std::result::Result<(), Crash> {
    let Signature { operation, root, .. } = call.signature;
    let part = call.signature.part_bytes();
    let scatters = operation == Operation::AllToAll;
    let receives = operation != Operation::Gather || member.rank == root;
    let sends_to = |to: usize| operation != Operation::Gather || to == root;
    // SAFETY: parts lie within the buffers by `Signature::extent`, and only receivers' outputs are
    // used.
    let (outgoing, incoming) = (
        |to: usize| unsafe { call.input.add(if scatters { to * part } else { 0 }).cast_mut() },
        |from: usize| unsafe { call.output.add(from * part) },
    );
    let mut streams = Vec::new();
    for other in member.others() {
        if receives {
            streams.push(member.stream(false, other, TAG_SCATTER, incoming(other), part));
        }
        if sends_to(other) {
            streams.push(member.stream(true, other, TAG_SCATTER, outgoing(other), part));
        }
    }
    if receives {
        // SAFETY: the own part, see above.
        unsafe { copy_own(outgoing(member.rank), incoming(member.rank), part) };
    }
    // SAFETY: the caller's promise.
    unsafe { fly(member, call, terms, streams, |_| Ok(())) }?;
    for other in member.others().filter(|_| receives) {
        let sums = &envelopes[other].sums;
        let expected = if sums.len() == 1 { sums.first() } else { sums.get(member.rank) };
        // SAFETY: the part has arrived.
        let arrived = unsafe { std::slice::from_raw_parts(incoming(other), part) };
        if expected.is_some_and(|&sum| sum != xxh3_64(arrived)) {
            return Err(corrupt(member, other));
        }
    }
    Ok(())
}

/// # Safety
/// As [`run`].
unsafe fn broadcast<T: Transport>(
    member: &Member<T>,
    call: &Call,
    terms: &Terms,
    envelopes: &[Envelope],
) -> std::result::Result<(), Crash> {
    let (size, rank, root) = (member.size(), member.rank, call.signature.root);
    let share = |of: usize| call.signature.read_by(size, of);
    // SAFETY: shares lie within the data.
    let at = |base: *mut u8, of: usize| unsafe { base.add(share(of).0) };
    let mut streams = Vec::new();
    if rank == root {
        let input = call.input.cast_mut();
        for other in member.others() {
            streams.push(member.stream(true, other, TAG_SCATTER, at(input, other), share(other).1));
            streams.push(member.stream(true, other, TAG_GATHER, at(input, root), share(root).1));
        }
        // SAFETY: the caller's promise.
        unsafe {
            copy_own(call.input, call.output, call.signature.part_bytes());
            return fly(member, call, terms, streams, |_| Ok(()));
        }
    }
    streams.push(member.stream(false, root, TAG_SCATTER, at(call.output, rank), share(rank).1));
    for other in member.others() {
        streams.push(member.stream(false, other, TAG_GATHER, at(call.output, other), share(other).1));
        if other != root {
            let mut onward = member.stream(true, other, TAG_GATHER, at(call.output, rank), share(rank).1);
            onward.limit = 0;
            streams.push(onward);
        }
    }
    let pass_on = |streams: &mut [Stream]| {
        let arrived = streams[0].done;
        streams.iter_mut().filter(|stream| stream.sending).for_each(|stream| stream.limit = arrived);
        Ok(())
    };
    // SAFETY: the caller's promise; chunks of the own share are sent only after they have arrived.
    unsafe { fly(member, call, terms, streams, pass_on) }?;
    for (of, &sum) in envelopes[root].sums.iter().enumerate() {
        let (offset, bytes) = share(of);
        // SAFETY: all data has arrived.
        let arrived = unsafe { std::slice::from_raw_parts(call.output.add(offset), bytes) };
        if xxh3_64(arrived) != sum {
            return Err(corrupt(member, root));
        }
    }
    Ok(())
}

/// The sum of the own share or part, made chunk by chunk.
struct Summing<'a, T: Transport> {
    member: &'a Member<T>,
    call: &'a Call,
    /// The own share in the own input.
    own: *const u8,
    output: *mut u8,
    bytes: usize,
    /// Chunks summed.
    summed: usize,
    /// For each other member in order: its stream's index, and the hash of what came.
    sources: Vec<(usize, Xxh3)>,
    verify: bool,
}

impl<T: Transport> Summing<'_, T> {
    /// Sums the chunks that have come from everybody.
    ///
    /// # Safety
    /// The streams' chunks below `done` are complete and nobody touches them.
    unsafe fn advance(&mut self, streams: &mut [Stream]) {
        let Signature { operation, dtype, .. } = self.call.signature;
        let wide = operation == Operation::ReduceScatterSums;
        let rank = self.member.rank;
        let chunks = self.bytes.div_ceil(CHUNK_BYTES);
        let ready = self.sources.iter().map(|(stream, _)| streams[*stream].done).min().unwrap_or(chunks);
        while self.summed < ready {
            let start = self.summed * CHUNK_BYTES;
            let bytes = CHUNK_BYTES.min(self.bytes - start);
            let elements = bytes / dtype.size();
            let mut inputs: Vec<*const u8> = Vec::with_capacity(self.member.size());
            for (stream, hash) in &mut self.sources {
                let (data, _) = streams[*stream].chunk(self.summed);
                if self.verify {
                    // SAFETY: a complete chunk.
                    hash.update(unsafe { std::slice::from_raw_parts(data, bytes) });
                }
                inputs.push(data.cast_const());
            }
            let written = if wide { start / dtype.size() * dtype.sum().size() } else { start };
            // SAFETY: the own input and output hold this chunk too; an output in place is the own
            // input, chunk for chunk.
            unsafe {
                inputs.insert(rank, self.own.add(start));
                sum_into(dtype, wide, &inputs, &[self.output.add(written)], elements);
            }
            self.summed += 1;
        }
        for (stream, _) in &self.sources {
            streams[*stream].limit = self.summed + WINDOW;
        }
    }

    /// The member whose data did not have its checksum, if there is one.
    fn spoiled(&self, envelopes: &[Envelope]) -> Option<usize> {
        let others = (0..self.member.size()).filter(|&other| other != self.member.rank);
        let differs = |(other, (_, hash)): (usize, &(usize, Xxh3))| {
            let sum = envelopes[other].sums.get(self.member.rank)?;
            (*sum != hash.digest()).then_some(other)
        };
        others.zip(&self.sources).find_map(differs)
    }
}

/// All-reduce and both reduce-scatters.
///
/// # Safety
/// As [`run`].
unsafe fn reduce<T: Transport>(
    member: &Member<T>,
    turn: &mut Turn,
    call: &Call,
    terms: &Terms,
    envelopes: &[Envelope],
) -> std::result::Result<(), Crash> {
    let (size, rank) = (member.size(), member.rank);
    let all = call.signature.operation == Operation::AllReduce;
    let share = |of: usize| call.signature.read_by(size, of);
    let (own_offset, own_bytes) = share(rank);
    // SAFETY: shares lie within the input; those of an all-reduce within the output too.
    let (input_of, output_of) = (
        |of: usize| unsafe { call.input.add(share(of).0) },
        |of: usize| unsafe { call.output.add(if all { share(of).0 } else { 0 }) },
    );
    let ring_bytes = WINDOW * CHUNK_BYTES;
    turn.scratch.resize((size - 1) * ring_bytes / 8, 0);
    let scratch: *mut u8 = turn.scratch.as_mut_ptr().cast();

    // Receives in order of the members, then sends of what others sum, then the sums in both
    // directions.
    let mut streams = Vec::new();
    let mut sources = Vec::new();
    for (index, other) in (0..size).filter(|&other| other != rank).enumerate() {
        // SAFETY: a ring for each other member.
        let ring = unsafe { scratch.add(index * ring_bytes) };
        let mut arriving = member.stream(false, other, TAG_SCATTER, ring, own_bytes);
        (arriving.ring, arriving.limit) = (WINDOW, WINDOW);
        sources.push((streams.len(), Xxh3::new()));
        streams.push(arriving);
    }
    let mut returns = Vec::new();
    let mut results = Vec::new();
    for other in member.others() {
        let leaving = streams.len();
        streams.push(member.stream(true, other, TAG_SCATTER, input_of(other).cast_mut(), share(other).1));
        if all {
            let mut coming = member.stream(false, other, TAG_GATHER, output_of(other), share(other).1);
            let mut result = member.stream(true, other, TAG_GATHER, output_of(rank), own_bytes);
            (coming.limit, result.limit) = (0, 0);
            returns.push((leaving, streams.len()));
            streams.push(coming);
            results.push(streams.len());
            streams.push(result);
        }
    }
    let verify = envelopes.iter().any(|envelope| !envelope.sums.is_empty());
    let output = if all { output_of(rank) } else { call.output };
    let own = input_of(rank);
    let _ = own_offset;
    let mut summing = Summing { member, call, own, output, bytes: own_bytes, summed: 0, sources, verify };
    let advance = |streams: &mut [Stream]| {
        // SAFETY: chunks below `done` have arrived; the next ones go to other places of the ring
        // until the limit is raised.
        unsafe { summing.advance(streams) };
        let done = summing.bytes.div_ceil(CHUNK_BYTES) == summing.summed;
        if verify
            && done
            && let Some(other) = summing.spoiled(envelopes)
        {
            return Err(corrupt(member, other));
        }
        // Nobody gets a sum of data that was not verified.
        let limit = if verify && !done { 0 } else { summing.summed };
        for &result in &results {
            streams[result].limit = limit;
        }
        // A result arrives where the own contribution lay, which must have left.
        for &(leaving, coming) in &returns {
            streams[coming].limit = streams[leaving].done;
        }
        Ok(())
    };
    // SAFETY: the caller's promise, and the order that `advance` keeps.
    unsafe { fly(member, call, terms, streams, advance) }
}
