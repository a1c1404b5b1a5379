//! Timing of attention, checked first.
//!
//! A case runs on random operands that are columns of one fused matrix, as in a model. Its results
//! are compared with those of the f32 vector form on the same operands widened (which the
//! conformance tests hold to the f64 oracle); only then it is timed. FLOPs are those of the
//! unmasked pairs alone, so that skipping masked blocks is not counted as work.

use crate::cpu::attention::{
    AttentionError, AttentionSpec, Rows, RowsMut, backward, flops_backward, flops_forward, forward,
};
use crate::cpu::peak::Peaks;
use crate::cpu::{Cpu, Isa};
use crate::dtype::{DType, Element};
use std::time::Instant;
use trainyard_base::median;

/// One shape to time.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name of the model that the shape is from.
    pub name: &'static str,
    /// The attention function.
    pub spec: AttentionSpec,
    /// Segment bounds.
    pub cu_seqlens: Vec<i32>,
}

impl Case {
    /// `segments` segments of `len` tokens each, causal.
    pub fn causal(
        name: &'static str,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        segments: usize,
        len: usize,
    ) -> Case {
        let cu_seqlens = (0..=segments).map(|segment| (segment * len) as i32).collect();
        Case { name, spec: AttentionSpec::causal(heads, kv_heads, head_dim), cu_seqlens }
    }

    /// The shapes that the project measures: the small recipe, GPT-2, Llama-like groups, and long
    /// sequences.
    pub fn all() -> Vec<Case> {
        vec![
            Case::causal("shakespeare 12x64", 4, 4, 32, 12, 64),
            Case::causal("gpt2-124m 4x512", 12, 12, 64, 4, 512),
            Case::causal("gpt2-124m 2x1024", 12, 12, 64, 2, 1024),
            Case::causal("llama-1b 1x2048", 32, 8, 64, 1, 2048),
            Case::causal("long 1x4096", 12, 12, 64, 1, 4096),
            Case::causal("long 1x16384", 4, 4, 64, 1, 16384),
            Case::causal("head 128 1x4096", 8, 2, 128, 1, 4096),
        ]
    }
}

/// The measurements of one case.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The case's name.
    pub name: &'static str,
    /// Element type of the operands.
    pub dtype: DType,
    /// The rung that was allowed.
    pub isa: Isa,
    /// Threads.
    pub threads: usize,
    /// Floating-point operations of forward and of backward.
    pub flops: [u64; 2],
    /// Median seconds of forward and of backward.
    pub seconds: [f64; 2],
    /// The peak of the operands' type, operations a second, sampled in turn with forward and with
    /// backward: medians.
    pub peaks: [f64; 2],
    /// Distance of the output and of the gradients from the f32 form's, relative in the 2-norm.
    pub errors: [f64; 2],
}

impl Measured {
    /// FLOP/s of forward and of backward, in units of 10^12.
    pub fn tflops(&self) -> [f64; 2] {
        [0, 1].map(|i| self.flops[i] as f64 / self.seconds[i] * 1e-12)
    }

    /// The same in parts of the peak.
    pub fn peak_shares(&self) -> [f64; 2] {
        [0, 1].map(|i| self.flops[i] as f64 / self.seconds[i] / self.peaks[i])
    }
}

/// Why there is no measurement.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The kernel refused its operands.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// The kernel is wrong.
    #[error("{name}: {what} is {error:.2e} from the f32 form's in the 2-norm, more than {bound:.2e}: not timed")]
    Wrong {
        /// The case.
        name: &'static str,
        /// Output or gradients.
        what: &'static str,
        /// The relative distance.
        error: f64,
        /// Largest error that rounding explains.
        bound: f64,
    },
}

struct Operands<T> {
    qkv: Vec<T>,
    dout: Vec<T>,
    out: Vec<T>,
    lse: Vec<f32>,
    dqkv: Vec<T>,
}

impl<T: Element> Operands<T> {
    fn new(spec: &AttentionSpec, tokens: usize, values: &[f32]) -> Self {
        let fused = spec.q_cols() + 2 * spec.kv_cols();
        let (qkv, dout) = values.split_at(tokens * fused);
        let rounded = |x: &[f32]| x.iter().map(|x| T::from_f32(*x)).collect::<Vec<T>>();
        Operands {
            qkv: rounded(qkv),
            dout: rounded(dout),
            out: vec![T::default(); tokens * spec.q_cols()],
            lse: vec![0.0; tokens * spec.heads],
            dqkv: vec![T::default(); tokens * fused],
        }
    }

    fn views<'a>(qkv: &'a [T], spec: &AttentionSpec, tokens: usize) -> Result<[Rows<'a, T>; 3], AttentionError> {
        let (nq, nkv) = (spec.q_cols(), spec.kv_cols());
        let rows = Rows::dense(qkv, tokens, nq + 2 * nkv)?;
        Ok([rows.columns(0..nq), rows.columns(nq..nq + nkv), rows.columns(nq + nkv..nq + 2 * nkv)])
    }

    fn forward(&mut self, cpu: &Cpu, case: &Case, tokens: usize) -> Result<(), AttentionError> {
        let [q, k, v] = Self::views(&self.qkv, &case.spec, tokens)?;
        let out = RowsMut::dense(&mut self.out, tokens, case.spec.q_cols())?;
        forward(cpu, &case.spec, q, k, v, &case.cu_seqlens, out, &mut self.lse)
    }

    fn backward(&mut self, cpu: &Cpu, case: &Case, tokens: usize) -> Result<(), AttentionError> {
        let (nq, nkv) = (case.spec.q_cols(), case.spec.kv_cols());
        let [q, k, v] = Self::views(&self.qkv, &case.spec, tokens)?;
        let (out, dout) = (Rows::dense(&self.out, tokens, nq)?, Rows::dense(&self.dout, tokens, nq)?);
        let (dq, rest) = RowsMut::dense(&mut self.dqkv, tokens, nq + 2 * nkv)?.split_columns(nq);
        let (dk, dv) = rest.split_columns(nkv);
        backward(cpu, &case.spec, q, k, v, out, &self.lse, dout, &case.cu_seqlens, dq, dk, dv)
    }
}

fn distance<T: Element>(got: &[T], want: &[f32]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (got, want) in got.iter().zip(want) {
        error += (got.to_f32() as f64 - *want as f64).powi(2);
        norm += (*want as f64).powi(2);
    }
    (error / norm.max(f64::MIN_POSITIVE)).sqrt()
}

/// Medians of the seconds that `run` takes and of the peaks that `sample` finds, in turn.
fn time(
    mut run: impl FnMut() -> Result<(), AttentionError>,
    sample: impl Fn() -> f64,
    seconds: f64,
) -> Result<(f64, f64), AttentionError> {
    let (mut times, mut samples) = (Vec::new(), Vec::new());
    let begin = Instant::now();
    while times.len() < 5 || begin.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed().as_secs_f64());
        samples.push(sample());
    }
    Ok((median(times).expect("there are rounds"), median(samples).expect("there are rounds")))
}

/// Checks and times `case` on operands of type `T`, forward and backward for about `seconds` each.
pub fn measure<T: Element>(cpu: &Cpu, peaks: &Peaks, case: &Case, seconds: f64) -> Result<Measured, BenchError> {
    let spec = &case.spec;
    let tokens = case.cu_seqlens.last().map_or(0, |tokens| *tokens as usize);
    let mut state = 1u64;
    let values: Vec<f32> = (0..tokens * 2 * (spec.q_cols() + spec.kv_cols()))
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            T::from_f32((state >> 40) as f32 / (1u64 << 22) as f32 - 2.0).to_f32()
        })
        .collect();
    let mut exact = Operands::<f32>::new(spec, tokens, &values);
    exact.forward(cpu, case, tokens)?;
    exact.backward(cpu, case, tokens)?;
    let mut operands = Operands::<T>::new(spec, tokens, &values);
    operands.forward(cpu, case, tokens)?;
    operands.backward(cpu, case, tokens)?;
    let errors = [distance(&operands.out, &exact.out), distance(&operands.dqkv, &exact.dqkv)];
    // One rounding of probabilities and one of results for the output, two more (dS, delta) for
    // gradients; the 2-norm of independent roundings is well below their number times the roundoff.
    let roundoff = match T::DTYPE {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 1e-5,
    };
    for (what, error, bound) in [("output", errors[0], 2.0 * roundoff), ("gradients", errors[1], 4.0 * roundoff)] {
        if error.is_nan() || error > bound {
            return Err(BenchError::Wrong { name: case.name, what, error, bound });
        }
    }
    drop(exact);
    let sample = || peaks.sample(cpu, T::DTYPE);
    let forward = time(|| operands.forward(cpu, case, tokens), sample, seconds)?;
    let backward = time(|| operands.backward(cpu, case, tokens), sample, seconds)?;
    Ok(Measured {
        name: case.name,
        dtype: T::DTYPE,
        isa: cpu.isa,
        threads: cpu.threads.count(),
        flops: [flops_forward(spec, &case.cu_seqlens), flops_backward(spec, &case.cu_seqlens)],
        seconds: [forward.0, backward.0],
        peaks: [forward.1, backward.1],
        errors,
    })
}

#[cfg(test)]
mod tests {
    use super::super::UNBEATEN;
    use super::*;
    use crate::dtype::bf16;

    #[test]
    fn a_measurement_counts_its_flops_and_errs_by_rounding_alone() {
        let case = Case::causal("small", 2, 1, 16, 2, 40);
        let measured = measure::<bf16>(&Cpu::new(Isa::detect(), 1), &UNBEATEN, &case, 0.0).unwrap();
        assert_eq!(measured.flops, [4 * 2 * 16 * 2 * 820, 10 * 2 * 16 * 2 * 820]);
        assert!(measured.errors.iter().all(|error| *error > 0.0));
        assert!(measured.tflops().iter().all(|tflops| *tflops > 0.0));
    }
}
