//! Rotary position embedding (Su et al. 2021) in the "rotate half" layout of Hugging Face models.
//!
//! Column `j` of the first half of a head's rotary columns and column `j` of the second half are
//! one pair, turned by `position * frequency[j]`. The rotation is applied in place to the query and
//! key columns of the fused projection; its backward is the rotation by the opposite angle. Columns
//! beyond the rotary ones (partial rotary) are left alone. Traffic: the head columns once in and
//! out, 6 FLOPs a pair.
//!
//! Angles are made in `f32` (`position as f32 * frequency as f32`), as transformers does, because
//! published weights were trained with those roundings; cosine and sine of that angle are taken in
//! `f64`. Frequencies scaled by sequence length at run time (`dynamic`, `longrope`) are not
//! offered: a table is made once.

use crate::cpu::Cpu;
use crate::cpu::embedding::{IndexError, check_indices};
use crate::cpu::norm::HeadColumns;
use crate::cpu::rows::{for_rows, load_at, store_at};
use crate::cpu::threads::Shares;
use crate::cuda::OnDevice;
use crate::dtype::Element;
use crate::simd_fn;
use std::f64::consts::PI;

/// The rule that derives the frequencies of a longer context (`rope_type` in Hugging Face configs).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// `default`: as trained.
    None,
    /// `linear`: positions divided by `factor`.
    Linear {
        /// New context over old.
        factor: f64,
    },
    /// `llama3`: long wavelengths divided by `factor`, short ones kept, a linear blend between.
    Llama3 {
        /// New context over old.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are scaled fully.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of pre-training.
        original_context: usize,
    },
    /// `yarn` (Peng et al. 2023): a blend by number of turns over the original context, and cosine
    /// and sine scaled.
    Yarn {
        /// New context over old.
        factor: f64,
        /// Turns above which a frequency is kept (32).
        beta_fast: f64,
        /// Turns below which a frequency is scaled fully (1).
        beta_slow: f64,
        /// Context length of pre-training.
        original_context: usize,
        /// Factor on cosine and sine; derived from `factor` and the two `mscale`s when `None`.
        attention_factor: Option<f64>,
        /// `mscale` of the config.
        mscale: Option<f64>,
        /// `mscale_all_dim` of the config.
        mscale_all_dim: Option<f64>,
        /// True if the blend's ends are rounded outwards to whole columns (the default in configs).
        truncate: bool,
    },
}

/// Why a rotary table cannot be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RopeError {
    /// The rotary columns do not form pairs.
    #[error(
        "rotary embedding needs an even, positive number of columns, not {0}: check head_dim and partial_rotary_factor"
    )]
    OddDim(usize),
    /// A number that must be positive and finite is not.
    #[error("rotary embedding: `{name}` is {value}, it must be positive and finite")]
    NotPositive {
        /// The config key.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// `llama3` needs its two factors in order.
    #[error("rotary embedding: high_freq_factor ({high}) must be greater than low_freq_factor ({low})")]
    Factors {
        /// `low_freq_factor`
        low: f64,
        /// `high_freq_factor`
        high: f64,
    },
}

/// Cosines and sines `[positions, dim / 2]` of a rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Rotary columns of a head; even, at most `head_dim`.
    pub dim: usize,
    /// Positions that the table holds.
    pub positions: usize,
    /// `cos[position * dim / 2 + pair]`
    pub cos: Vec<f32>,
    /// `sin[position * dim / 2 + pair]`
    pub sin: Vec<f32>,
    /// Both on a GPU that has used them.
    pub(crate) on_device: OnDevice,
}

/// Inverse frequencies, `dim / 2` of them in radians a position, and the factor on cosine and sine.
///
/// `dim` is `head_dim * partial_rotary_factor`, `theta` the base (`rope_theta`).
pub fn rope_frequencies(dim: usize, theta: f64, scaling: RopeScaling) -> Result<(Vec<f64>, f64), RopeError> {
    if dim == 0 || !dim.is_multiple_of(2) {
        return Err(RopeError::OddDim(dim));
    }
    let positive = |name: &'static str, value: f64| {
        if value.is_finite() && value > 0.0 { Ok(()) } else { Err(RopeError::NotPositive { name, value }) }
    };
    positive("rope_theta", theta)?;
    let plain: Vec<f64> = (0..dim / 2).map(|pair| theta.powf(-((2 * pair) as f64) / dim as f64)).collect();
    match scaling {
        RopeScaling::None => Ok((plain, 1.0)),
        RopeScaling::Linear { factor } => {
            positive("factor", factor)?;
            Ok((plain.iter().map(|f| f / factor).collect(), 1.0))
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            positive("factor", factor)?;
            positive("low_freq_factor", low_freq_factor)?;
            positive("original_max_position_embeddings", original_context as f64)?;
            let (low, high) = (low_freq_factor, high_freq_factor);
            if !high.is_finite() || high <= low {
                return Err(RopeError::Factors { low, high });
            }
            let scaled = plain.iter().map(|f| {
                let turns = original_context as f64 * f / (2.0 * PI);
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                keep * f + (1.0 - keep) * f / factor
            });
            Ok((scaled.collect(), 1.0))
        }
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_context,
            attention_factor,
            mscale,
            mscale_all_dim,
            truncate,
        } => {
            positive("factor", factor)?;
            positive("beta_fast", beta_fast)?;
            positive("beta_slow", beta_slow)?;
            positive("original_max_position_embeddings", original_context as f64)?;
            let magnitude = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
            let attention = attention_factor.unwrap_or_else(|| match (mscale, mscale_all_dim) {
                (Some(a), Some(b)) if a != 0.0 && b != 0.0 => magnitude(a) / magnitude(b),
                _ => magnitude(1.0),
            });
            positive("attention_factor", attention)?;
            // The pair whose frequency makes `turns` turns over the original context.
            let pair_of =
                |turns: f64| dim as f64 * (original_context as f64 / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
            let (first, last) = (pair_of(beta_fast), pair_of(beta_slow));
            let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
            let (first, last) = (first.max(0.0), last.min((dim - 1) as f64));
            let width = if first == last { 0.001 } else { last - first };
            let scaled = plain.iter().enumerate().map(|(pair, f)| {
                let scale = ((pair as f64 - first) / width).clamp(0.0, 1.0);
                f / factor * scale + f * (1.0 - scale)
            });
            Ok((scaled.collect(), attention))
        }
    }
}

impl RopeTable {
    /// The table for positions `0..positions`; arguments as [`rope_frequencies`].
    pub fn new(dim: usize, theta: f64, scaling: RopeScaling, positions: usize) -> Result<RopeTable, RopeError> {
        let (frequencies, factor) = rope_frequencies(dim, theta, scaling)?;
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        cos.reserve_exact(positions * dim / 2);
        sin.reserve_exact(positions * dim / 2);
        for position in 0..positions {
            for frequency in &frequencies {
                let angle = f64::from(position as f32 * *frequency as f32);
                cos.push((angle.cos() * factor) as f32);
                sin.push((angle.sin() * factor) as f32);
            }
        }
        Ok(RopeTable { dim, positions, cos, sin, on_device: OnDevice::default() })
    }
}

/// The direction in which [`rope`] turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// By the position's angle.
    Forward,
    /// By the opposite angle, with the same scale: turns gradients of rotated columns into
    /// gradients of the plain ones.
    Backward,
}

/// Turns the head columns of `x` in place, row `t` by `positions[t]`; query and key heads are one
/// range of `columns`.
///
/// # Errors
/// When a position is not in the table.
///
/// # Panics
/// When the lengths disagree.
pub fn rope<T: Element>(
    cpu: &Cpu,
    rotation: Rotation,
    columns: HeadColumns,
    table: &RopeTable,
    positions: &[i32],
    x: &mut [T],
) -> Result<(), IndexError> {
    let rows = columns.rows(x.len());
    assert_eq!(positions.len(), rows, "one position a row");
    assert!(table.dim <= columns.head_dim, "{} rotary columns in heads of {}", table.dim, columns.head_dim);
    check_indices("position", positions, table.positions)?;
    let x = Shares::new(x);
    for_rows(cpu, rows, 2 * columns.heads * table.dim * size_of::<T>(), |range| {
        let span = range.start * columns.row_stride..range.end * columns.row_stride;
        // SAFETY: the ranges of a region do not overlap.
        let x = unsafe { x.part(span) };
        rope_rows(cpu.isa, rotation, columns, table, &positions[range], x);
    });
    Ok(())
}

simd_fn! {
    fn rope_rows[T: Element](s: S, rotation: Rotation, columns: HeadColumns, table: &RopeTable, positions: &[i32], x: &mut [T]) {
        let half = table.dim / 2;
        for (position, row) in positions.iter().zip(x.chunks_exact_mut(columns.row_stride)) {
            let at = *position as usize * half;
            let (cos, sin) = (&table.cos[at..at + half], &table.sin[at..at + half]);
            let heads = &mut row[columns.first..columns.first + columns.heads * columns.head_dim];
            for head in heads.chunks_exact_mut(columns.head_dim) {
                let (low, high) = head[..table.dim].split_at_mut(half);
                let mut i = 0;
                while i < half {
                    let (a, b) = (load_at(s, low, i, 0.0), load_at(s, high, i, 0.0));
                    let (c, n) = (load_at(s, cos, i, 0.0), load_at(s, sin, i, 0.0));
                    let n = if rotation == Rotation::Forward { n } else { s.neg(n) };
                    store_at(s, s.sub(s.mul(a, c), s.mul(b, n)), low, i);
                    store_at(s, s.fma(a, n, s.mul(b, c)), high, i);
                    i += S::LANES;
                }
            }
        }
    }
}
