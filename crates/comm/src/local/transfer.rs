//! What each rank does once everybody's buffers are known: its own share, disjoint from all others'.

use super::group::Slot;
use crate::backend::{Call, Operation, Signature};
use crate::number::{Dtype, sum_into};

/// Ranks' shares of an all-reduce are cut at cache lines, so that no line is written by two ranks.
const LINE_BYTES: usize = 64;

/// The elements of an all-reduce that `rank` of `size` sums: start and length.
fn share(elements: usize, dtype: Dtype, size: usize, rank: usize) -> (usize, usize) {
    let quantum = (LINE_BYTES / dtype.size()).max(1);
    let lines = elements.div_ceil(quantum);
    let edge = |rank: usize| (lines * rank / size * quantum).min(elements);
    (edge(rank), edge(rank + 1) - edge(rank))
}

/// Copies unless source and destination are the same place, as they are for operations in place.
///
/// # Safety
/// Both are valid for `bytes` and overlap entirely or not at all; nobody else writes them.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 && !std::ptr::eq(from, to) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
}

/// Does this rank's share of a large operation, straight between the buffers of the ranks.
///
/// # Safety
/// All slots have one signature, and their pointers are valid for its extents until the ranks have met again.
pub(super) unsafe fn in_place(slots: &[&Slot], rank: usize) {
    let call = slots[rank].call;
    let Signature { operation, dtype, elements, root } = call.signature;
    let part = call.signature.part_bytes();
    let inputs = |offset: usize| -> Vec<*const u8> {
        // SAFETY: `offset` lies within every input, by the callers below.
        slots.iter().map(|slot| unsafe { slot.call.input.add(offset) }).collect()
    };
    // SAFETY: offsets follow the layout of `Signature::extent`. Per operation, what this rank writes is its own output or its own
    // share of an all-reduce, and nobody reads that but this rank.
    unsafe {
        match operation {
            Operation::AllReduce => {
                let (start, count) = share(elements, dtype, slots.len(), rank);
                let offset = start * dtype.size();
                let outputs: Vec<*mut u8> = slots.iter().map(|slot| slot.call.output.add(offset)).collect();
                sum_into(dtype, false, &inputs(offset), &outputs, count);
            }
            Operation::ReduceScatter | Operation::ReduceScatterSums => {
                let wide = operation == Operation::ReduceScatterSums;
                sum_into(dtype, wide, &inputs(rank * part), &[call.output], elements);
            }
            Operation::AllGather => {
                // Beginning with the neighbour spreads the ranks over the sources.
                for step in 0..slots.len() {
                    let from = (rank + step) % slots.len();
                    copy(slots[from].call.input, call.output.add(from * part), part);
                }
            }
            Operation::Broadcast => copy(slots[root].call.input, call.output, part),
            Operation::Gather if rank == root => {
                for (from, slot) in slots.iter().enumerate() {
                    copy(slot.call.input, call.output.add(from * part), part);
                }
            }
            Operation::AllToAll => {
                for step in 0..slots.len() {
                    let from = (rank + step) % slots.len();
                    copy(slots[from].call.input.add(rank * part), call.output.add(from * part), part);
                }
            }
            Operation::Gather | Operation::Barrier | Operation::Split | Operation::Send | Operation::Receive => {}
        }
    }
}

/// Computes this rank's whole result from inputs that lie in the slots.
///
/// # Safety
/// All slots have the signature of `call` and hold its input; the output of `call` is valid for its extent.
pub(super) unsafe fn inline(slots: &[&Slot], rank: usize, call: &Call) {
    let Signature { operation, dtype, elements, root } = call.signature;
    let part = call.signature.part_bytes();
    let inputs = |offset: usize| -> Vec<*const u8> {
        // SAFETY: inputs lie within the inline bytes, and `offset` within the input.
        slots.iter().map(|slot| unsafe { slot.inline.0.as_ptr().add(offset) }).collect()
    };
    // SAFETY: slots are only read, the output is this rank's alone.
    unsafe {
        match operation {
            Operation::AllReduce => sum_into(dtype, false, &inputs(0), &[call.output], elements),
            Operation::ReduceScatter => sum_into(dtype, false, &inputs(rank * part), &[call.output], elements),
            Operation::ReduceScatterSums => sum_into(dtype, true, &inputs(rank * part), &[call.output], elements),
            Operation::AllGather => gather(&inputs(0), call.output, part),
            Operation::Gather if rank == root => gather(&inputs(0), call.output, part),
            Operation::AllToAll => gather(&inputs(rank * part), call.output, part),
            Operation::Broadcast => copy(slots[root].inline.0.as_ptr(), call.output, part),
            Operation::Gather | Operation::Barrier | Operation::Split | Operation::Send | Operation::Receive => {}
        }
    }
}

/// # Safety
/// Inputs are valid for `part` bytes, the output for as many parts.
unsafe fn gather(inputs: &[*const u8], output: *mut u8, part: usize) {
    for (from, &input) in inputs.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { copy(input, output.add(from * part), part) };
    }
}
