//! Small operations: every rank has everybody's whole input at hand and computes its own result
//! alone.

use crate::backend::{Call, Operation, Signature};
use crate::number::sum_into;

/// Computes this rank's result from all `inputs`, in order of the ranks.
///
/// # Safety
/// Each input is aligned and valid for what the signature of `call` says, or for nothing where its
/// rank gives nothing; the output of `call` is valid for its extent. Inputs may be this rank's own
/// memory, in place as [`Call`] allows.
pub(crate) unsafe fn compute(all: &[*const u8], rank: usize, call: &Call) {
    let Signature { operation, dtype, elements, root } = call.signature;
    let part = call.signature.part_bytes();
    let inputs = |offset: usize| -> Vec<*const u8> {
        // SAFETY: `offset` lies within inputs of as many parts as there are ranks.
        all.iter().map(|input| unsafe { input.add(offset) }).collect()
    };
    // SAFETY: inputs are only read, the output is this rank's alone.
    unsafe {
        match operation {
            Operation::AllReduce => sum_into(dtype, false, all, &[call.output], elements),
            Operation::ReduceScatter => sum_into(dtype, false, &inputs(rank * part), &[call.output], elements),
            Operation::ReduceScatterSums => sum_into(dtype, true, &inputs(rank * part), &[call.output], elements),
            Operation::AllGather => gather(all, call.output, part),
            Operation::Gather if rank == root => gather(all, call.output, part),
            Operation::AllToAll => gather(&inputs(rank * part), call.output, part),
            Operation::Broadcast => copy(all[root], call.output, part),
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

/// # Safety
/// Both are valid for `bytes` and overlap entirely or not at all.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 && !std::ptr::eq(from, to) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
}
