//! Blocks of quantised numbers, as GGUF files hold them (ggml's `ggml-quants.c`).
//!
//! A tensor is a sequence of blocks of 32 or 256 elements along its rows. A block has one or two
//! scales in f16, and in the `K` kinds scales of its parts in six or eight bits:
//!
//! | kind | elements | bytes | value of an element |
//! |---|---|---|---|
//! | `Q8_0` | 32 | 34 | `d q`, q of 8 bits |
//! | `Q4_0`, `Q5_0` | 32 | 18, 22 | `d (q - 8)`, `d (q - 16)` |
//! | `Q4_1`, `Q5_1` | 32 | 20, 24 | `d q + m` |
//! | `Q4_K`, `Q5_K` | 256 | 144, 176 | `d s q - m t`, eight pairs (s, t) |
//! | `Q6_K` | 256 | 210 | `d s (q - 32)`, sixteen s |
//!
//! Arithmetic is in f32, with the same roundings as the package `gguf` has.

use trainyard_tensor::{Element, f16};

/// A kind of block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the table above")]
pub enum Quantisation {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

use Quantisation::*;

impl Quantisation {
    /// Every kind.
    pub const ALL: [Quantisation; 8] = [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q5K, Q6K];

    /// Its name in ggml.
    pub fn name(self) -> &'static str {
        match self {
            Q4_0 => "Q4_0",
            Q4_1 => "Q4_1",
            Q5_0 => "Q5_0",
            Q5_1 => "Q5_1",
            Q8_0 => "Q8_0",
            Q4K => "Q4_K",
            Q5K => "Q5_K",
            Q6K => "Q6_K",
        }
    }

    /// Elements of a block.
    pub fn elements(self) -> usize {
        match self {
            Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 => 32,
            Q4K | Q5K | Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            Q4_0 => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q8_0 => 34,
            Q4K => 144,
            Q5K => 176,
            Q6K => 210,
        }
    }

    /// True for the kinds that are written: those with blocks of 32.
    pub fn is_encoded(self) -> bool {
        self.elements() == 32
    }

    /// Rounds whole blocks to a kind that [`Self::is_encoded`]; of another kind nothing is written.
    pub(crate) fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        for x in values.chunks_exact(32).filter(|_| self.is_encoded()) {
            match self {
                Q8_0 => {
                    let d = x.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
                    put_half(out, d);
                    let inverse = inverse(d);
                    out.extend(x.iter().map(|x| (x * inverse).round() as i8 as u8));
                }
                Q4_0 => {
                    let (d, codes) = around_zero(x, 8);
                    put_half(out, d);
                    put_nibbles(out, &codes);
                }
                Q5_0 => {
                    let (d, codes) = around_zero(x, 16);
                    put_half(out, d);
                    put_fifth(out, &codes);
                    put_nibbles(out, &codes);
                }
                Q4_1 => {
                    let (d, least, codes) = from_least(x, 15);
                    put_half(out, d);
                    put_half(out, least);
                    put_nibbles(out, &codes);
                }
                _ => {
                    let (d, least, codes) = from_least(x, 31);
                    put_half(out, d);
                    put_half(out, least);
                    put_fifth(out, &codes);
                    put_nibbles(out, &codes);
                }
            }
        }
    }

    /// The values of whole blocks: `bytes` holds as many blocks as `out`.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        for (block, y) in bytes.chunks_exact(self.bytes()).zip(out.chunks_exact_mut(self.elements())) {
            match self {
                Q8_0 => q8_0(block, y),
                Q4_0 => nibbles(&block[2..], 0, y, |q| half(block, 0) * (q - 8.0)),
                Q4_1 => nibbles(&block[4..], 0, y, |q| half(block, 0) * q + half(block, 2)),
                Q5_0 => nibbles(&block[6..], word(block, 2), y, |q| half(block, 0) * (q - 16.0)),
                Q5_1 => nibbles(&block[8..], word(block, 4), y, |q| half(block, 0) * q + half(block, 2)),
                Q4K => k_pairs(block, None, &block[16..], y),
                Q5K => k_pairs(block, Some(&block[16..48]), &block[48..], y),
                Q6K => q6_k(block, y),
            }
        }
    }
}

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

fn put_half(out: &mut Vec<u8>, x: f32) {
    out.extend(f16::from_f32(x).to_le_bytes());
}

/// Codes from 0 to `2 middle - 1` with zero at `middle`, and their scale: the element of the
/// greatest size gets code 0. Rounding is in f64, as the package does it.
fn around_zero(x: &[f32], middle: u8) -> (f32, [u8; 32]) {
    let greatest = x.iter().fold(0.0f32, |most: f32, x| if x.abs() > most.abs() { *x } else { most });
    let d = greatest / -f32::from(middle);
    let (inverse, half) = (f64::from(inverse(d)), f64::from(middle) + 0.5);
    let code = |x: &f32| (f64::from(*x) * inverse + half).trunc().clamp(0.0, f64::from(2 * middle - 1)) as u8;
    (d, codes(x, code))
}

/// Codes from 0 to `most`, their scale, and the value of code 0.
fn from_least(x: &[f32], most: u8) -> (f32, f32, [u8; 32]) {
    let greatest = x.iter().copied().fold(f32::MIN, f32::max);
    let least = x.iter().copied().fold(f32::MAX, f32::min);
    let d = (greatest - least) / f32::from(most);
    let inverse = inverse(d);
    (d, least, codes(x, |x| ((x - least) * inverse + 0.5).trunc().clamp(0.0, f32::from(most)) as u8))
}

fn codes(x: &[f32], code: impl Fn(&f32) -> u8) -> [u8; 32] {
    let mut codes = [0; 32];
    codes.iter_mut().zip(x).for_each(|(to, x)| *to = code(x));
    codes
}

/// The inverse of [`nibbles`], for the low four bits.
fn put_nibbles(out: &mut Vec<u8>, codes: &[u8; 32]) {
    out.extend((0..16).map(|i| codes[i] & 15 | codes[i + 16] << 4));
}

/// The fifth bits.
fn put_fifth(out: &mut Vec<u8>, codes: &[u8; 32]) {
    let bits = codes.iter().enumerate().fold(0u32, |bits, (i, code)| bits | u32::from(code >> 4 & 1) << i);
    out.extend(bits.to_le_bytes());
}

/// The number in f16 at byte `at`.
fn half(block: &[u8], at: usize) -> f32 {
    Element::to_f32(f16::from_le_bytes([block[at], block[at + 1]]))
}

fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn q8_0(block: &[u8], y: &mut [f32]) {
    let d = half(block, 0);
    for (y, q) in y.iter_mut().zip(&block[2..]) {
        *y = d * f32::from(*q as i8);
    }
}

/// Sixteen bytes whose low halves are the first sixteen elements and whose high halves are the
/// others; bit i of `fifth` is the fifth bit of element i.
fn nibbles(bytes: &[u8], fifth: u32, y: &mut [f32], value: impl Fn(f32) -> f32) {
    let bit = |i: usize| ((fifth >> i & 1) << 4) as u8;
    for (i, byte) in bytes[..16].iter().enumerate() {
        y[i] = value(f32::from(byte & 15 | bit(i)));
        y[i + 16] = value(f32::from(byte >> 4 | bit(i + 16)));
    }
}

/// The six-bit scale and offset of part `part` of eight, packed in twelve bytes.
fn scale_and_offset(packed: &[u8], part: usize) -> (f32, f32) {
    let (scale, offset) = if part < 4 {
        (packed[part] & 63, packed[part + 4] & 63)
    } else {
        (packed[part + 4] & 15 | packed[part - 4] >> 6 << 4, packed[part + 4] >> 4 | packed[part] >> 6 << 4)
    };
    (f32::from(scale), f32::from(offset))
}

/// Eight parts of 32 elements; two neighbours share 32 bytes, one in the low halves. Bit p of byte
/// i of `fifth` is the fifth bit of element i of part p.
fn k_pairs(block: &[u8], fifth: Option<&[u8]>, quants: &[u8], y: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (part, y) in y.chunks_exact_mut(32).enumerate() {
        let (scale, offset) = scale_and_offset(&block[4..16], part);
        let (scale, offset) = (d * scale, m * offset);
        for (i, y) in y.iter_mut().enumerate() {
            let low = quants[part / 2 * 32 + i] >> (part % 2 * 4) & 15;
            let high = fifth.map_or(0, |fifth| (fifth[i] >> part & 1) << 4);
            *y = scale * f32::from(low | high) - offset;
        }
    }
}

/// Two halves of 128 elements, each of four stretches of 32. Four bits of an element lie in the
/// first 128 bytes, two in the next 64; sixteen signed scales follow, then d.
fn q6_k(block: &[u8], y: &mut [f32]) {
    let d = half(block, 208);
    for (index, y) in y.iter_mut().enumerate() {
        let (side, stretch, i) = (index / 128, index / 32 % 4, index % 32);
        let low = block[64 * side + stretch % 2 * 32 + i] >> (stretch / 2 * 4) & 15;
        let high = block[128 + 32 * side + i] >> (2 * stretch) & 3;
        let scale = block[192 + index / 16] as i8;
        *y = d * f32::from(scale) * (f32::from(low | high << 4) - 32.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::open;
    use crate::weights::TensorFile;
    use std::path::Path;

    /// Bit for bit what the package `gguf` decodes (`scripts/golden/make_gguf.py`).
    #[test]
    fn blocks_are_decoded_as_by_the_package_gguf() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf");
        let (_, file) = open(&folder.join("blocks.gguf")).unwrap();
        let expected = TensorFile::open(&folder.join("blocks.safetensors")).unwrap();
        let decode = |file: &TensorFile, name: &str| {
            let tensor = &file.tensors()[name];
            let mut bytes = vec![0; (tensor.range.end - tensor.range.start) as usize];
            file.read(tensor, 0, &mut bytes).unwrap();
            let mut values = vec![f32::NAN; tensor.shape.iter().product()];
            tensor.encoding().unwrap().decode(&bytes, &mut values);
            (tensor.shape.clone(), values.into_iter().map(f32::to_bits).collect::<Vec<u32>>())
        };
        assert_eq!(file.tensors().len(), super::Quantisation::ALL.len() + 2);
        for name in file.tensors().keys() {
            assert!(decode(&file, name) == decode(&expected, name), "{name}");
        }
    }

    /// Byte for byte what the package `gguf` rounds to.
    #[test]
    fn blocks_are_encoded_as_by_the_package_gguf() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf/encoded.safetensors");
        let file = TensorFile::open(&path).unwrap();
        let bytes = |name: &str| {
            let tensor = &file.tensors()[name];
            let mut bytes = vec![0; (tensor.range.end - tensor.range.start) as usize];
            file.read(tensor, 0, &mut bytes).unwrap();
            bytes
        };
        let values: Vec<f32> =
            bytes("x").chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
        let written: Vec<_> = super::Quantisation::ALL.into_iter().filter(|kind| kind.is_encoded()).collect();
        assert_eq!(written.len(), 5);
        for kind in written {
            let mut ours = Vec::new();
            kind.encode(&values, &mut ours);
            let theirs = bytes(kind.name());
            let place = ours.iter().zip(&theirs).position(|(a, b)| a != b);
            assert_eq!((ours.len(), place), (theirs.len(), None), "{}", kind.name());
        }
    }
}
