//! Codes of eight bits, with a scale for each row: `x ≈ code scale`, code -127 to 127.
//!
//! `scale = max |x| / 127` over the row, and a code is `x (127 / max |x|)` in `f32`, rounded to
//! nearest, ties to even ("vector-wise" quantization; Dettmers et al. 2022, section 2.2). A row
//! whose largest magnitude is below 2^-119 becomes zeros. One with a NaN or an infinity gets a
//! scale that is none, so that no product with it is finite.
//!
//! A matrix is coded as it lies, or transposed, with scales for its columns: products sum along
//! rows of codes, and a weight is summed along either side. Traffic: an element read twice, the
//! second time from the cache, and a byte written.

use crate::cpu::Cpu;
use crate::cpu::rows::for_rows;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;

/// A matrix in codes.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// The codes of one row after another.
    pub codes: &'a [i8],
    /// The scale of each row.
    pub scales: &'a [f32],
    /// The sum of each row's codes.
    pub sums: &'a [i32],
}

impl Codes<'_> {
    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.scales.len()
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.codes.len() / self.scales.len().max(1)
    }
}

/// A matrix of codes to write to; see [`Codes`].
#[derive(Debug)]
pub struct CodesMut<'a> {
    /// The codes of one row after another.
    pub codes: &'a mut [i8],
    /// The scale of each row.
    pub scales: &'a mut [f32],
    /// The sum of each row's codes.
    pub sums: &'a mut [i32],
}

/// Codes the rows of `x [M, K]`.
///
/// # Panics
/// When the lengths disagree.
pub fn encode<T: Element>(cpu: &Cpu, x: &[T], m: usize, k: usize, to: CodesMut) {
    to.check(x.len(), m, k);
    let (codes, scales, sums) = (Shares::new(to.codes), Shares::new(to.scales), Shares::new(to.sums));
    for_rows(cpu, m, k * (size_of::<T>() + 1), |rows| {
        let elements = rows.start * k..rows.end * k;
        // SAFETY: the ranges of a region do not overlap.
        let (codes, scales, sums) =
            unsafe { (codes.part(elements.clone()), scales.part(rows.clone()), sums.part(rows)) };
        encode_rows(cpu.isa, &x[elements], k, codes, scales, sums);
    });
}

/// Codes the columns of `x [N, K]`, as rows of `to [K, N]`.
///
/// # Panics
/// When the lengths disagree.
pub fn encode_transposed<T: Element>(cpu: &Cpu, x: &[T], n: usize, k: usize, to: CodesMut) {
    to.check(x.len(), k, n);
    let (codes, scales, sums) = (Shares::new(to.codes), Shares::new(to.scales), Shares::new(to.sums));
    cpu.threads.for_ranges(k, COLUMNS, |columns| {
        let elements = columns.start * n..columns.end * n;
        // SAFETY: the ranges of a region do not overlap.
        let (codes, scales, sums) =
            unsafe { (codes.part(elements), scales.part(columns.clone()), sums.part(columns.clone())) };
        encode_columns(cpu.isa, x, k, columns.start, codes, scales, sums);
    });
}

impl CodesMut<'_> {
    #[track_caller]
    fn check(&self, elements: usize, rows: usize, cols: usize) {
        let found = (elements, self.codes.len(), self.scales.len(), self.sums.len());
        let wanted = (rows * cols, rows * cols, rows, rows);
        assert!(found == wanted, "elements, codes, scales and sums: {found:?}, not {wanted:?}");
    }
}

/// Columns of a task of [`encode_transposed`]: a few cache lines of each row.
const COLUMNS: usize = 64;
/// Rows that it transposes at once.
const ROWS: usize = 64;
/// Adding this rounds a number of magnitude up to 2^22 to an integer, which is then its low bits.
const ROUNDER: f32 = 12_582_912.0;
/// Below it, `127 / max |x|` could be infinite.
const LEAST: f32 = 1.504_632_8e-36;

/// The scale of numbers with the largest magnitude `most`, and what they are multiplied by.
#[inline(always)]
fn scale(most: u32) -> (f32, f32) {
    let most = f32::from_bits(most);
    if most < LEAST { (0.0, 0.0) } else { (most / 127.0, 127.0 / most) }
}

#[inline(always)]
fn magnitude<T: Element>(x: T) -> u32 {
    x.to_f32().to_bits() & 0x7fff_ffff
}

#[inline(always)]
fn code<T: Element>(x: T, inverse: f32) -> i8 {
    (x.to_f32() * inverse + ROUNDER).to_bits() as i8
}

// Plain loops, of which the compiler makes vectors of each rung. Magnitudes are compared as
// integers: their order is that of the numbers, with infinity and NaN above all.
simd_fn! {
    fn encode_rows[T: Element](_s: S, x: &[T], k: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
        for (row, (out, total)) in scales.iter_mut().zip(sums).enumerate() {
            let (x, codes) = (&x[row * k..(row + 1) * k], &mut codes[row * k..(row + 1) * k]);
            let inverse;
            (*out, inverse) = scale(x.iter().fold(0, |most, x| most.max(magnitude(*x))));
            let mut sum = 0i32;
            for (x, to) in x.iter().zip(codes) {
                *to = code(*x, inverse);
                sum += i32::from(*to);
            }
            *total = sum;
        }
    }
}

simd_fn! {
    /// The columns of `x` from `first` on, as many as there are scales.
    fn encode_columns[T: Element](
        _s: S, x: &[T], k: usize, first: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32],
    ) {
        let width = scales.len();
        let n = codes.len() / width.max(1);
        let mut most = [0u32; COLUMNS];
        for row in x.chunks_exact(k) {
            for (most, x) in most.iter_mut().zip(&row[first..first + width]) {
                *most = (*most).max(magnitude(*x));
            }
        }
        let (mut inverses, mut totals) = ([0f32; COLUMNS], [0i32; COLUMNS]);
        for (j, out) in scales.iter_mut().enumerate() {
            (*out, inverses[j]) = scale(most[j]);
        }
        let mut block = [[0i8; COLUMNS]; ROWS];
        for start in (0..n).step_by(ROWS) {
            let rows = ROWS.min(n - start);
            for (row, block) in x[start * k..(start + rows) * k].chunks_exact(k).zip(&mut block) {
                let row = &row[first..first + width];
                for (((to, x), inverse), total) in block.iter_mut().zip(row).zip(&inverses).zip(&mut totals) {
                    *to = code(*x, *inverse);
                    *total += i32::from(*to);
                }
            }
            for j in 0..width {
                let to = &mut codes[j * n + start..j * n + start + rows];
                for (to, row) in to.iter_mut().zip(&block) {
                    *to = row[j];
                }
            }
        }
        sums.copy_from_slice(&totals[..width]);
    }
}
