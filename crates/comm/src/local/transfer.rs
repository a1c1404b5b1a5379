//! The work of each rank once all buffers are known: its own share, disjoint from the shares of the
//! others.

use super::group::Slot;
use crate::backend::{Operation, Signature};
use crate::number::sum_into;
use crate::stream::{self, STREAM_BYTES};

/// Copies unless source and destination are the same place, as they are for operations in place.
///
/// # Safety
/// Both are valid for `bytes` and overlap entirely or not at all; nobody else writes them.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 && !std::ptr::eq(from, to) {
        // SAFETY: the caller's promise.
        unsafe { stream::copy(from, to, bytes, bytes >= STREAM_BYTES) };
    }
}

/// Does this rank's share of a large operation, straight between the buffers of the ranks.
///
/// # Safety
/// All slots have one signature, and their pointers are valid for its extents until the ranks have
/// met again.
pub(super) unsafe fn in_place(slots: &[&Slot], rank: usize) {
    let call = slots[rank].call;
    let Signature { operation, dtype, elements, root } = call.signature;
    let part = call.signature.part_bytes();
    let inputs = |offset: usize| -> Vec<*const u8> {
        // SAFETY: `offset` lies within every input, by the callers below.
        slots.iter().map(|slot| unsafe { slot.call.input.add(offset) }).collect()
    };
    // SAFETY: offsets follow the layout of `Signature::extent`. Per operation, what this rank
    // writes is its own output or its own share of everybody's (all-reduce, broadcast), and nobody
    // reads that but this rank.
    unsafe {
        match operation {
            Operation::AllReduce => {
                let (start, count) = call.signature.share(slots.len(), rank);
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
            // Every rank, the root too, brings its share to all others: fetched once, and no core
            // idle.
            Operation::Broadcast => {
                let (start, count) = call.signature.share(slots.len(), rank);
                let (offset, bytes) = (start * dtype.size(), count * dtype.size());
                let from = slots[root].call.input.add(offset);
                for slot in slots {
                    copy(from, slot.call.output.add(offset), bytes);
                }
            }
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
    stream::fence();
}
