//! The envelope that ranks exchange before data moves: the operation, the rank's position,
//! checksums, and the data itself if it is small.

use crate::backend::{Operation, Signature};
use crate::number::Dtype;
use crate::place::Position;
use bytemuck::{Pod, Zeroable};

/// The largest input that travels in its envelope: a small message costs one exchange, and nothing
/// sends so few bytes by rendezvous.
pub(super) const INLINE_BYTES: usize = 2048;
const WHAT_BYTES: usize = 64;

const OPERATIONS: [Operation; 11] = [
    Operation::AllReduce,
    Operation::ReduceScatter,
    Operation::ReduceScatterSums,
    Operation::AllGather,
    Operation::Broadcast,
    Operation::Gather,
    Operation::AllToAll,
    Operation::Barrier,
    Operation::Split,
    Operation::Send,
    Operation::Receive,
];
const NUMBERS: [Dtype; 5] = [Dtype::F32, Dtype::Bf16, Dtype::I32, Dtype::F64, Dtype::U64];

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Header {
    elements: u64,
    step: u64,
    operation: u32,
    dtype: u32,
    root: u32,
    instruction: u32,
    /// 1 if a position follows.
    posted: u32,
    what_bytes: u32,
    sums: u32,
    inline_bytes: u32,
    what: [u8; WHAT_BYTES],
}

/// An envelope as it is read.
pub(super) struct Envelope {
    pub signature: Signature,
    pub position: Option<Position>,
    pub sums: Vec<u64>,
    /// Where the inline data begins and how long it is.
    pub inline: (usize, usize),
}

/// The longest envelope in a group of `size`; inline data begins at a multiple of 8.
pub(crate) fn bytes_max(size: usize) -> usize {
    size_of::<Header>() + 8 * size + INLINE_BYTES
}

/// Writes an envelope to `to`, replacing what was there.
pub(super) fn write(signature: &Signature, position: Option<&Position>, sums: &[u64], inline: &[u8], to: &mut Vec<u8>) {
    let code = NUMBERS.iter().position(|dtype| *dtype == signature.dtype);
    let mut header = Header {
        elements: signature.elements as u64,
        step: position.map_or(0, |p| p.step),
        operation: OPERATIONS.iter().position(|o| *o == signature.operation).unwrap_or(0) as u32,
        dtype: code.unwrap_or(NUMBERS.len() + signature.dtype.size()) as u32,
        root: signature.root as u32,
        instruction: position.map_or(0, |p| p.instruction),
        posted: position.is_some().into(),
        what_bytes: 0,
        sums: sums.len() as u32,
        inline_bytes: inline.len() as u32,
        what: [0; WHAT_BYTES],
    };
    let what = position.map_or(&[][..], |p| p.what.as_bytes());
    let kept = what.len().min(WHAT_BYTES);
    header.what[..kept].copy_from_slice(&what[..kept]);
    header.what_bytes = kept as u32;
    to.clear();
    to.extend_from_slice(bytemuck::bytes_of(&header));
    to.extend_from_slice(bytemuck::cast_slice(sums));
    to.extend_from_slice(inline);
}

/// Reads an envelope; what makes no sense becomes a mismatch with whatever is expected.
pub(super) fn read(from: &[u8]) -> Envelope {
    let header: Header = bytemuck::pod_read_unaligned(&from[..size_of::<Header>()]);
    let dtype = match NUMBERS.get(header.dtype as usize) {
        Some(dtype) => *dtype,
        None => Dtype::Plain(header.dtype - NUMBERS.len() as u32),
    };
    let what = &header.what[..(header.what_bytes as usize).min(WHAT_BYTES)];
    let position = (header.posted != 0).then(|| Position {
        step: header.step,
        instruction: header.instruction,
        what: String::from_utf8_lossy(what).into_owned(),
    });
    let start = size_of::<Header>();
    let room = from.len() - start;
    let sums = (header.sums as usize).min(room / 8);
    let inline_start = start + 8 * sums;
    Envelope {
        signature: Signature {
            operation: OPERATIONS.get(header.operation as usize).copied().unwrap_or(Operation::Barrier),
            dtype,
            elements: header.elements as usize,
            root: header.root as usize,
        },
        position,
        sums: from[start..inline_start].chunks_exact(8).map(bytemuck::pod_read_unaligned).collect(),
        inline: (inline_start, (header.inline_bytes as usize).min(from.len() - inline_start)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_read_what_they_write() {
        let position = Position { step: 9, instruction: 4, what: "Gather block 11".into() };
        for operation in OPERATIONS {
            for dtype in NUMBERS.into_iter().chain([Dtype::Plain(1), Dtype::Plain(24)]) {
                let signature = Signature { operation, dtype, elements: 77, root: 3 };
                let mut bytes = Vec::new();
                write(&signature, Some(&position), &[5, 6], b"data", &mut bytes);
                bytes.resize(bytes_max(4), 0);
                let read = read(&bytes);
                assert_eq!(
                    (read.signature, read.position.as_ref(), &read.sums[..]),
                    (signature, Some(&position), &[5, 6][..])
                );
                assert_eq!(&bytes[read.inline.0..read.inline.0 + read.inline.1], b"data");
                assert_eq!(read.inline.0 % 8, 0);
            }
        }
    }
}
