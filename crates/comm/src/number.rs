//! The types that can be sent and added, and the order in which numbers are added.
//!
//! The order is a binary tree over the ranks of a group that pairs neighbours level by level:
//! `((0+1)+(2+3))+((4+5)+6)` for seven. Equivalently, a span of ranks is split after the largest
//! power of two below its length. bf16 is added in f32 and rounded once, at the root; integers
//! wrap.
//!
//! Blocks of [`BLOCK`] elements go through the whole tree in a scratch that stays in the first
//! cache level, so every input is read once and every output written once. A single large output
//! that is no input gets the tree's last addition straight from registers, a cache line at a time
//! and past the caches.

use crate::stream::{self, STREAM_BYTES};
use bytemuck::Pod;
use half::bf16;
use serde::{Deserialize, Serialize};
use std::any::TypeId;
use std::fmt;

/// Plain data: any bytes are a value, and it has no padding.
pub trait Scalar: Pod + Send + Sync {}
impl<T: Pod + Send + Sync> Scalar for T {}

/// Element type of a message, as the backends and error messages know it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// Upper half of a binary32.
    Bf16,
    /// 32-bit signed integer.
    I32,
    /// IEEE 754 binary64.
    F64,
    /// 64-bit unsigned integer.
    U64,
    /// Anything else of so many bytes.
    Plain(u32),
}

impl Dtype {
    /// The dtype of a Rust type.
    pub fn of<T: Scalar>() -> Self {
        let id = TypeId::of::<T>();
        let numbers: [(TypeId, Dtype); 5] = [
            (TypeId::of::<f32>(), Dtype::F32),
            (TypeId::of::<bf16>(), Dtype::Bf16),
            (TypeId::of::<i32>(), Dtype::I32),
            (TypeId::of::<f64>(), Dtype::F64),
            (TypeId::of::<u64>(), Dtype::U64),
        ];
        let plain = Dtype::Plain(size_of::<T>() as u32);
        numbers.iter().find(|(number, _)| *number == id).map_or(plain, |(_, dtype)| *dtype)
    }

    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::Bf16 => 2,
            Dtype::F64 | Dtype::U64 => 8,
            Dtype::Plain(bytes) => bytes as usize,
        }
    }

    /// The type in which sums of it are kept.
    pub const fn sum(self) -> Self {
        match self {
            Dtype::Bf16 => Dtype::F32,
            other => other,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dtype::F32 => f.write_str("f32"),
            Dtype::Bf16 => f.write_str("bf16"),
            Dtype::I32 => f.write_str("i32"),
            Dtype::F64 => f.write_str("f64"),
            Dtype::U64 => f.write_str("u64"),
            Dtype::Plain(bytes) => write!(f, "elements of {bytes} bytes"),
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// The numbers that reductions can add: f32, bf16, i32, f64 and u64.
pub trait Number: Scalar + Default + PartialEq + fmt::Debug + sealed::Sealed {
    /// The type in which it is added.
    type Sum: Number<Sum = Self::Sum>;
    /// To the type of sums, exactly.
    fn widen(self) -> Self::Sum;
    /// To nearest, ties to even.
    fn round(sum: Self::Sum) -> Self;
    /// Addition; integers wrap.
    fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
}

macro_rules! numbers {
    ($($type:ty, $add:expr;)*) => {$(
        impl sealed::Sealed for $type {}
        impl Number for $type {
            type Sum = $type;
            #[inline(always)]
            fn widen(self) -> $type {
                self
            }
            #[inline(always)]
            fn round(sum: $type) -> $type {
                sum
            }
            #[inline(always)]
            fn add(a: $type, b: $type) -> $type {
                $add(a, b)
            }
        }
    )*};
}

numbers! {
    f32, |a: f32, b: f32| a + b;
    f64, |a: f64, b: f64| a + b;
    i32, i32::wrapping_add;
    u64, u64::wrapping_add;
}

impl sealed::Sealed for bf16 {}
impl Number for bf16 {
    type Sum = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// The same bits as `bf16::from_f32`, written without branches so that it becomes vector code.
    #[inline(always)]
    fn round(sum: f32) -> bf16 {
        let bits = sum.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // A NaN keeps its sign and upper bits and becomes quiet; rounding could carry it into
        // infinity.
        let quiet = (bits >> 16) | 0x0040;
        bf16::from_bits(if sum.is_nan() { quiet } else { rounded } as u16)
    }
    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        a + b
    }
}

/// Elements that go through the tree together: 2 KiB of f32, so that a scratch of all levels stays
/// in the first cache level.
const BLOCK: usize = 512;

/// The scalar definition of the order: the sum of one element over all ranks, unrounded. What every
/// backend is tested against.
pub fn tree_sum<T: Number>(values: &[T]) -> T::Sum {
    match values {
        [] => T::Sum::default(),
        [value] => value.widen(),
        _ => {
            let (left, right) = values.split_at(left_span(values.len()));
            T::add(tree_sum(left), tree_sum(right))
        }
    }
}

/// Ranks of the left half of the tree: the largest power of two below `ranks`, which is at least 2.
pub fn left_span(ranks: usize) -> usize {
    ranks.next_power_of_two() / 2
}

/// Adds `inputs` along the tree and stores the sum, rounded, to each of `outputs`; both are
/// pointers to `elements` of `dtype`.
///
/// With `wide`, outputs are of [`Dtype::sum`] and nothing is rounded.
///
/// # Safety
/// All pointers are valid for `elements` and aligned; an output is either one of the inputs or
/// overlaps none; no other thread writes the inputs or touches the outputs meanwhile. `dtype` is a
/// number, not [`Dtype::Plain`].
pub(crate) unsafe fn sum_into(dtype: Dtype, wide: bool, inputs: &[*const u8], outputs: &[*mut u8], elements: usize) {
    // SAFETY: the caller's promise, with the pointers cast to what `dtype` says they are.
    unsafe {
        match (dtype, wide) {
            (Dtype::F32, _) => dispatch::<f32, f32>(inputs, outputs, elements),
            (Dtype::F64, _) => dispatch::<f64, f64>(inputs, outputs, elements),
            (Dtype::I32, _) => dispatch::<i32, i32>(inputs, outputs, elements),
            (Dtype::U64, _) => dispatch::<u64, u64>(inputs, outputs, elements),
            (Dtype::Bf16, false) => dispatch::<bf16, bf16>(inputs, outputs, elements),
            (Dtype::Bf16, true) => dispatch::<bf16, f32>(inputs, outputs, elements),
            (Dtype::Plain(_), _) => unreachable!("reductions take numbers only"),
        }
    }
}

/// Runs [`sum_blocks`] compiled for the widest vectors of this machine; the additions and their
/// order are the same in all.
///
/// # Safety
/// As [`sum_into`].
unsafe fn dispatch<T: Number, O: Number<Sum = T::Sum>>(inputs: &[*const u8], outputs: &[*mut u8], elements: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        /// # Safety
        /// As [`sum_into`], and the machine has AVX2.
        #[target_feature(enable = "avx2")]
        unsafe fn avx2<T: Number, O: Number<Sum = T::Sum>>(inputs: &[*const u8], outputs: &[*mut u8], elements: usize) {
            // SAFETY: the caller's promise.
            unsafe { sum_blocks::<T, O>(inputs, outputs, elements) }
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the caller's promise, and AVX2 was found.
            return unsafe { avx2::<T, O>(inputs, outputs, elements) };
        }
    }
    // SAFETY: the caller's promise.
    unsafe { sum_blocks::<T, O>(inputs, outputs, elements) }
}

/// # Safety
/// As [`sum_into`].
#[inline(always)]
unsafe fn sum_blocks<T: Number, O: Number<Sum = T::Sum>>(inputs: &[*const u8], outputs: &[*mut u8], elements: usize) {
    // An output that is also an input is in the caches already.
    if let [output] = outputs
        && inputs.len() >= 2
        && elements * size_of::<O>() >= STREAM_BYTES
        && !inputs.contains(&output.cast_const())
    {
        // SAFETY: the caller's promise.
        return unsafe { sum_streamed::<T, O>(inputs, output.cast(), elements) };
    }
    let block = elements.min(BLOCK);
    let mut scratch = vec![T::Sum::default(); levels(inputs.len()) * block];
    for start in (0..elements).step_by(BLOCK) {
        let count = BLOCK.min(elements - start);
        // SAFETY: `start + count <= elements`, for which the caller promises all pointers.
        unsafe {
            sum_block::<T>(inputs, start, count, &mut scratch, block);
            let sums = &scratch[..count];
            for &output in outputs {
                let output = std::slice::from_raw_parts_mut(output.cast::<O>().add(start), count);
                output.iter_mut().zip(sums).for_each(|(to, &sum)| *to = O::round(sum));
            }
        }
    }
}

/// [`sum_blocks`] for two or more inputs and one large output that is none of them: the tree's last
/// addition goes from registers past the caches.
///
/// # Safety
/// As [`sum_into`].
#[inline(always)]
unsafe fn sum_streamed<T: Number, O: Number<Sum = T::Sum>>(inputs: &[*const u8], output: *mut O, elements: usize) {
    let (left, right) = inputs.split_at(left_span(inputs.len()));
    let mut scratch = [left, right].map(|half| vec![T::Sum::default(); levels(half.len()) * BLOCK]);
    // The first block ends where a line of the output begins, so that all others begin there.
    let head = output.align_offset(stream::LINE).min(elements);
    let mut start = 0;
    while start < elements {
        let count = if start < head { head } else { BLOCK.min(elements - start) };
        // SAFETY: `start + count <= elements`, for which the caller promises all pointers.
        unsafe {
            let output = output.add(start);
            let of = |input: *const u8| read::<T>(input, start, count);
            let add = |a: &[T], b: &[T], i: usize| T::add(a[i].widen(), b[i].widen());
            if let ([a], [b]) = (left, right) {
                let (a, b) = (of(*a), of(*b));
                stream::store(output, count, |i| O::round(add(a, b, i)));
            } else if let ([a, b], [c, d]) = (left, right) {
                let (a, b, c, d) = (of(*a), of(*b), of(*c), of(*d));
                stream::store(output, count, |i| O::round(T::add(add(a, b, i), add(c, d, i))));
            } else {
                let [in_left, in_right] = &mut scratch;
                sum_block::<T>(left, start, count, in_left, BLOCK);
                sum_block::<T>(right, start, count, in_right, BLOCK);
                let (left, right) = (&in_left[..count], &in_right[..count]);
                stream::store(output, count, |i| O::round(T::add(left[i], right[i])));
            }
        }
        start += count;
    }
    stream::fence();
}

/// Levels of scratch: one for each level of the tree, and one for the result.
fn levels(inputs: usize) -> usize {
    inputs.next_power_of_two().trailing_zeros() as usize + 1
}

/// A block of one input.
///
/// # Safety
/// As [`sum_into`], for the elements named; the slice lives no longer than the pass over the block,
/// during which nobody writes the input.
#[inline(always)]
unsafe fn read<'a, T: Number>(input: *const u8, start: usize, count: usize) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(input.cast::<T>().add(start), count) }
}

/// Sums elements `start..start + count` of all inputs into the first level of `scratch`.
///
/// Levels of scratch are a stack of subtrees. Pairs of ranks are pushed in order, and after the
/// `k`-th pair as many subtrees join as `k` has trailing zero bits, like the carries of a binary
/// counter; what is left joins at the end from the right.
///
/// # Safety
/// As [`sum_into`], for the elements named.
#[inline(always)]
unsafe fn sum_block<T: Number>(inputs: &[*const u8], start: usize, count: usize, scratch: &mut [T::Sum], block: usize) {
    let mut depth = 0;
    for (pair, ranks) in inputs.chunks(2).enumerate() {
        let sums = &mut scratch[depth * block..][..count];
        // SAFETY: the caller's promise.
        let left = unsafe { read::<T>(ranks[0], start, count) };
        match ranks.get(1) {
            None => sums.iter_mut().zip(left).for_each(|(sum, &a)| *sum = a.widen()),
            Some(&right) => {
                // SAFETY: the caller's promise.
                let right = unsafe { read::<T>(right, start, count) };
                let both = left.iter().zip(right);
                sums.iter_mut().zip(both).for_each(|(sum, (&a, &b))| *sum = T::add(a.widen(), b.widen()));
            }
        }
        depth += 1;
        for _ in 0..(pair + 1).trailing_zeros() {
            join::<T>(scratch, block, count, &mut depth);
        }
    }
    while depth > 1 {
        join::<T>(scratch, block, count, &mut depth);
    }
}

/// Adds the last subtree of the stack to the one before it.
#[inline(always)]
fn join<T: Number>(scratch: &mut [T::Sum], block: usize, count: usize, depth: &mut usize) {
    *depth -= 1;
    let (before, last) = scratch.split_at_mut(*depth * block);
    let sums = &mut before[(*depth - 1) * block..][..count];
    sums.iter_mut().zip(&last[..count]).for_each(|(sum, &other)| *sum = T::add(*sum, other));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_pairs_neighbours_level_by_level() {
        // Powers that f32 cannot hold together show the order: 1 is lost beside 2^24 unless a
        // neighbour joins it first.
        let big = 16_777_216.0f32;
        assert_eq!(tree_sum(&[big, 1.0, 1.0, -big]), (big + 1.0) + (1.0 - big));
        assert_eq!(tree_sum(&[1.0, big, 1.0]), (1.0 + big) + 1.0);
        assert_eq!(
            tree_sum(&[0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
            ((0.1 + 0.2) + (0.3 + 0.4)) + ((0.5 + 0.6) + 0.7f32)
        );
    }

    #[test]
    fn blocks_give_the_bits_of_the_definition() {
        for ranks in 1..=9usize {
            for elements in [0usize, 1, 511, 512, 513, 1500] {
                let inputs: Vec<Vec<f32>> = (0..ranks)
                    .map(|r| (0..elements).map(|i| ((r * 7919 + i * 104_729) % 10_007) as f32 * 1.1e-3 - 5.0).collect())
                    .collect();
                let mut output = vec![0f32; elements];
                let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
                // SAFETY: vectors of `elements` f32 that nobody else uses.
                unsafe { sum_into(Dtype::F32, false, &pointers, &[output.as_mut_ptr().cast()], elements) };
                for i in 0..elements {
                    let column: Vec<f32> = inputs.iter().map(|input| input[i]).collect();
                    assert_eq!(output[i].to_bits(), tree_sum(&column).to_bits(), "{ranks} ranks, element {i}");
                }
            }
        }
    }

    #[test]
    fn streamed_sums_give_the_bits_of_the_definition() {
        let elements = STREAM_BYTES / 4 + 77;
        let whole: Vec<Vec<bf16>> = (0..5)
            .map(|r| (0..elements).map(|i| bf16::from_f32(((r * 7919 + i * 104_729) % 10_007) as f32 * 1e-3)).collect())
            .collect();
        for (ranks, offset) in [(2, 0), (3, 1), (4, 5), (5, 31)] {
            // Outputs that begin anywhere in a line, rounded and not.
            let inputs: Vec<*const u8> = whole[..ranks].iter().map(|input| input.as_ptr().cast()).collect();
            let mut wide = vec![0f32; elements + offset];
            let mut rounded = vec![bf16::ZERO; 2 * elements + offset];
            let double: Vec<Vec<bf16>> = whole[..ranks].iter().map(|input| [&input[..], input].concat()).collect();
            let doubles: Vec<*const u8> = double.iter().map(|input| input.as_ptr().cast()).collect();
            // SAFETY: all vectors hold as many elements from there on, and nobody else uses them.
            unsafe {
                sum_into(Dtype::Bf16, true, &inputs, &[wide.as_mut_ptr().add(offset).cast()], elements);
                sum_into(Dtype::Bf16, false, &doubles, &[rounded.as_mut_ptr().add(offset).cast()], 2 * elements);
            }
            for i in 0..elements {
                let column: Vec<bf16> = whole[..ranks].iter().map(|input| input[i]).collect();
                let sum = tree_sum(&column);
                assert_eq!(wide[offset + i].to_bits(), sum.to_bits(), "{ranks} ranks, element {i}");
                for place in [i, elements + i] {
                    assert_eq!(rounded[offset + place], <bf16 as Number>::round(sum), "{ranks} ranks, element {place}");
                }
            }
            assert!(wide[..offset].iter().all(|&value| value == 0.0));
            assert!(rounded[..offset].iter().all(|&value| value == bf16::ZERO));
        }
    }

    #[test]
    fn bf16_rounds_like_the_half_crate() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(<bf16 as Number>::round(value).to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
            }
        }
    }
}
