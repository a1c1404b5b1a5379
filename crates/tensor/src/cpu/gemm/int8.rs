//! Products of codes of eight bits ([`crate::cpu::int8`]): the sums are integers, and a finished
//! one is multiplied by the scales of its row and column before anything else is done with it.
//!
//! With `vpdpbusd`, `tdpbssd` and AVX2's `vpmaddubsw` sums are exact. The left operand of the
//! first has no sign, so 128 is added to each left code, and 128 times the sum of its right codes
//! is taken from a finished sum. The `i32` sums travel as the bits of `f32`, between which the loop
//! nests see no difference. Without these instructions codes are widened to `f32` when packed; sums
//! are then exact up to 2^24.

use super::driver::{self, Operand, Product, Rung};
use super::epilogue::{Sink, Target};
use super::{Epilogue, GradientEpilogue, MatMut, MatRef, forward_sink, input_gradient_sink};
use crate::cpu::Cpu;
use crate::cpu::int8::Codes;
use crate::cpu::simd::Simd;
use crate::dtype::{DType, Element};

/// The longest sums: 2^17 products of 127 by 127 fit an `i32`.
pub const DEPTH_MAX: usize = 1 << 17;

/// `y = act(x wᵀ + bias) + residual`: `x [M, K]` and `w [N, K]` in codes, `y [M, N]`.
pub fn forward_int8<T: Element>(cpu: &Cpu, x: Codes, w: Codes, epilogue: Epilogue<T>, y: MatMut<T>) {
    let sink = forward_sink((x.rows(), w.rows()), epilogue, y);
    product(cpu, x, w, &sink);
}

/// `dx = (dy w) ⊙ act'(pre) [+ dx]`: `dy [M, N]` and `wᵀ [K, N]` in codes, `dx [M, K]`.
pub fn input_gradient_int8<T: Element>(
    cpu: &Cpu,
    dy: Codes,
    w_transposed: Codes,
    epilogue: GradientEpilogue<T>,
    dx: MatMut<T>,
) {
    let sink = input_gradient_sink((dy.rows(), w_transposed.rows()), epilogue, dx);
    product(cpu, dy, w_transposed, &sink);
}

/// `left rightᵀ`, handed to `sink`.
fn product<K: Sink>(cpu: &Cpu, left: Codes, right: Codes, sink: &K) {
    let depth = left.cols();
    assert!(right.cols() == depth, "codes along {depth} and along {} shared indices", right.cols());
    assert!(depth <= DEPTH_MAX, "sums of {depth} products of codes, which may be {DEPTH_MAX} long");
    match driver::rung(cpu, DType::U8) {
        // Tiles are loaded as pairs of codes.
        Rung::AmxInt8 if !depth.is_multiple_of(2) => {
            run(Rung::Avx512Vnni, cpu, left, right, Scaled::<K, OFFSET_INTEGERS> { left, right, sink })
        }
        rung @ (Rung::Avx2Int8 | Rung::AmxInt8) => {
            run(rung, cpu, left, right, Scaled::<K, INTEGERS> { left, right, sink })
        }
        rung @ Rung::Avx512Vnni => run(rung, cpu, left, right, Scaled::<K, OFFSET_INTEGERS> { left, right, sink }),
        rung => run(rung, cpu, left, right, Scaled::<K, FLOATS> { left, right, sink }),
    }
}

fn operand(codes: Codes<'_>) -> Operand<'_, i8> {
    Operand::rows(MatRef::new(codes.codes, codes.rows(), codes.cols()))
}

fn run<S: Sink>(rung: Rung, cpu: &Cpu, left: Codes, right: Codes, sink: S) {
    let shape = (left.rows(), right.rows(), left.cols());
    driver::run(rung, cpu, &[Product { shape, left: operand(left), right: operand(right), sink: &sink }]);
}

/// Sums in `f32`.
const FLOATS: u8 = 0;
/// Sums in `i32`.
const INTEGERS: u8 = 1;
/// Sums in `i32` of left codes with 128 added.
const OFFSET_INTEGERS: u8 = 2;

/// Scales `SUMS` for another sink.
struct Scaled<'a, K, const SUMS: u8> {
    left: Codes<'a>,
    right: Codes<'a>,
    sink: &'a K,
}

impl<K: Sink, const SUMS: u8> Sink for Scaled<'_, K, SUMS> {
    const INTEGER: bool = SUMS != FLOATS;

    fn target(&self, row: usize, col: usize) -> Target {
        self.sink.target(row, col)
    }

    #[inline(always)]
    unsafe fn finish_row<S: Simd>(&self, s: S, row: usize, col: usize, sums: &[f32]) {
        const CHUNK: usize = 64;
        let (left, mut scaled) = (self.left.scales[row], [0f32; CHUNK]);
        for (chunk, sums) in sums.chunks(CHUNK).enumerate() {
            let col = col + chunk * CHUNK;
            let columns = col..col + sums.len();
            let (scales, right) = (&self.right.scales[columns.clone()], &self.right.sums[columns]);
            for (((scaled, sum), scale), right) in scaled.iter_mut().zip(sums).zip(scales).zip(right) {
                let sum = match SUMS {
                    FLOATS => *sum,
                    INTEGERS => sum.to_bits().cast_signed() as f32,
                    _ => sum.to_bits().cast_signed().wrapping_sub(*right << 7) as f32,
                };
                *scaled = sum * left * scale;
            }
            // SAFETY: by contract.
            unsafe { self.sink.finish_row(s, row, col, &scaled[..sums.len()]) };
        }
    }
}
