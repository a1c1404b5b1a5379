//! The grid of quantised weights, one weight at a time.
//!
//! A weight becomes `code x scale`. Codes of b bits lie between `-2^(b-1)` and `2^(b-1) - 1`. The
//! scale of a group of neighbours is its largest magnitude over `(2^b - 1) / 2`, rounded to the
//! dtype that it is stored in (as compressed-tensors has it). So is the product.
//!
//! [`crate::cpu::grid`] rounds whole matrices, with the same bits.

use crate::{DType, bf16, f16};

/// `x` rounded to a float dtype.
pub fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// The values that weights may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Bits of a code, 2 to 8.
    pub bits: u8,
    /// The dtype of scales and of values.
    pub dtype: DType,
}

impl Grid {
    /// The divisor that makes a scale of the largest magnitude of a group.
    pub fn steps(&self) -> f32 {
        ((1u32 << self.bits) - 1) as f32 / 2.0
    }

    /// The least code, with the opposite sign. The largest code is one less.
    pub fn end(&self) -> f32 {
        (1i32 << (self.bits - 1)) as f32
    }

    /// The scale of a group of weights.
    pub fn scale(&self, group: &[f32]) -> f32 {
        let most = group.iter().fold(0.0f32, |most, w| most.max(w.abs()));
        rounded(self.dtype, most / self.steps())
    }

    /// The code of a weight.
    pub fn code(&self, weight: f32, scale: f32) -> i8 {
        let end = self.end();
        if scale == 0.0 { 0 } else { (weight / scale).round_ties_even().clamp(-end, end - 1.0) as i8 }
    }

    /// The value of a code, as a reader of the files has it.
    pub fn value(&self, code: i8, scale: f32) -> f32 {
        rounded(self.dtype, f32::from(code) * scale)
    }
}
