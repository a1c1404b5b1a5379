//! Element types of tensors.
//!
//! Values are stored in one of [`DType`]'s formats; arithmetic on the CPU is done in `f32`,
//! whatever the storage. [`Element`] ties a Rust type to its `DType` and to the vector loads and
//! stores that widen to and round from `f32`.

use crate::cpu::simd::Simd;
use bytemuck::Pod;
pub use half::{bf16, f16};
use std::fmt;

/// The element type of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of a binary32: 8 exponent bits, 7 mantissa bits.
    BF16,
    /// IEEE 754 binary16.
    F16,
    /// 32-bit signed integer (targets, positions, segment bounds).
    I32,
    /// 32-bit unsigned integer.
    U32,
    /// A byte: a code of eight bits ([`trainyard_cuda::fp8`]), which only products read.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::U8 => 1,
        }
    }

    /// True if values are floating point, so that they can carry a gradient.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::BF16 | DType::F16)
    }

    /// The name used in configs and messages: `f32`, `bf16`, `f16`, `i32`, `u32`, `u8`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that a tensor can hold.
pub trait Scalar: Pod + Send + Sync + 'static {
    /// Its `DType`.
    const DTYPE: DType;
}

impl Scalar for f32 {
    const DTYPE: DType = DType::F32;
}
impl Scalar for bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Scalar for f16 {
    const DTYPE: DType = DType::F16;
}
impl Scalar for i32 {
    const DTYPE: DType = DType::I32;
}
impl Scalar for u32 {
    const DTYPE: DType = DType::U32;
}
impl Scalar for u8 {
    const DTYPE: DType = DType::U8;
}

/// A floating-point storage type that kernels compute on through `f32`.
pub trait Element: Scalar + Default + PartialEq + fmt::Debug {
    /// Widens to `f32`, exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
    /// Loads the first `S::LANES` elements of `x`; panics when there are fewer.
    fn load<S: Simd>(s: S, x: &[Self]) -> S::F;
    /// Stores to the first `S::LANES` elements of `y`; panics when there are fewer.
    fn store<S: Simd>(s: S, v: S::F, y: &mut [Self]);

    /// Stores two vectors to the first `2 S::LANES` elements of `y`, whole cache lines at once
    /// where they fill one.
    #[inline(always)]
    fn store_pair<S: Simd>(s: S, v: [S::F; 2], y: &mut [Self]) {
        Self::store(s, v[0], y);
        Self::store(s, v[1], &mut y[S::LANES..]);
    }

    /// Loads up to `S::LANES` elements, the rest being `fill`: for the tails of rows.
    #[inline(always)]
    fn load_partial<S: Simd>(s: S, x: &[Self], fill: f32) -> S::F {
        s.load_tail(&x[..x.len().min(S::LANES)], fill)
    }

    /// Stores the first `min(y.len(), S::LANES)` lanes.
    #[inline(always)]
    fn store_partial<S: Simd>(s: S, v: S::F, y: &mut [Self]) {
        s.store_tail(v, y);
    }
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self]) -> S::F {
        s.load(x)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::F, y: &mut [Self]) {
        s.store(v, y)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self]) -> S::F {
        s.load_bf16(x)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::F, y: &mut [Self]) {
        s.store_bf16(v, y)
    }
    #[inline(always)]
    fn store_pair<S: Simd>(s: S, v: [S::F; 2], y: &mut [Self]) {
        s.store_bf16_pair(v, y)
    }
}

impl Element for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self]) -> S::F {
        s.load_f16(x)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::F, y: &mut [Self]) {
        s.store_f16(v, y)
    }
}
