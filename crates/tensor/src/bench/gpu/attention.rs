//! Attention, causal, forward and backward.

use super::{Result, Sizes, Timing, near, near_sums, places, time, tolerance};
use crate::cpu::attention::{AttentionSpec, flops_backward, flops_forward};
use crate::cuda::peak::{Peaks, random};
use crate::ops::{self, Segments};
use crate::{DType, Device};

/// Rows whose results are checked.
const CHECKED: usize = 6;

/// Times attention of every size in `dtype`, forward and backward, each for about `seconds`.
///
/// # Errors
/// Results that are wrong, and those of the device.
pub fn attention(device: &Device, peaks: &Peaks, sizes: &Sizes, dtype: DType, seconds: f64) -> Result<Vec<Timing>> {
    let mut timings = Vec::new();
    for &[head_dim, heads, kv_heads, length] in &sizes.attention {
        let spec = AttentionSpec::causal(heads, kv_heads, head_dim);
        let batch = (sizes.tokens / length).max(1);
        let bounds: Vec<i32> = (0..=batch).map(|sequence| (sequence * length) as i32).collect();
        let segments = Segments::new(&bounds)?;
        let qkv = random(device, &[batch * length, spec.q_cols() + 2 * spec.kv_cols()], dtype, 5)?;
        let dout = random(device, &[batch * length, spec.q_cols()], dtype, 6)?;
        let (out, lse) = ops::attention(&qkv, &spec, &segments)?;
        let dqkv = ops::attention_backward(&dout, &qkv, &out, &lse, &spec, &segments)?;
        let name = format!("head {head_dim}, {heads} over {kv_heads} heads, {batch} x {length}");
        Check {
            name: &name,
            spec: &spec,
            length,
            qkv: qkv.to_f32_vec()?,
            dout: dout.to_f32_vec()?,
            out: out.to_f32_vec()?,
            dqkv: dqkv.to_f32_vec()?,
            tolerance: 2.0 * tolerance(dtype),
        }
        .run()?;
        drop(dqkv);
        let timed = |form: &'static str, flops: u64, seconds: f64| Timing {
            name: format!("attention, {name}, {form}, {}", dtype.name()),
            kind: "attention",
            form,
            dtype,
            sizes: vec![
                ("batch", batch),
                ("seq", length),
                ("heads", heads),
                ("kv_heads", kv_heads),
                ("head_dim", head_dim),
            ],
            flops: flops as f64,
            bytes: 0.0,
            seconds,
            peak_share: 0.0,
        };
        let forward = time(device, seconds, || ops::attention(&qkv, &spec, &segments).map(drop))?;
        timings.push(timed("forward", flops_forward(&spec, &bounds), forward).of_products(peaks));
        let call = || ops::attention_backward(&dout, &qkv, &out, &lse, &spec, &segments).map(drop);
        let backward = time(device, seconds, call)?;
        timings.push(timed("backward", flops_backward(&spec, &bounds), backward).of_products(peaks));
    }
    Ok(timings)
}

/// Rows of one head of the last sequence, recomputed in f64.
struct Check<'a> {
    name: &'a str,
    spec: &'a AttentionSpec,
    length: usize,
    qkv: Vec<f32>,
    dout: Vec<f32>,
    out: Vec<f32>,
    dqkv: Vec<f32>,
    tolerance: f64,
}

impl Check<'_> {
    fn run(&self) -> Result<()> {
        let (head, d) = (self.spec.heads - 1, self.spec.head_dim);
        let kv_head = head / self.spec.group();
        let (q_at, k_at) = (head * d, self.spec.q_cols() + kv_head * d);
        let v_at = k_at + self.spec.kv_cols();
        for row in places(self.length, CHECKED) {
            let probabilities = self.probabilities(head, row);
            let mut wanted = vec![0.0; d];
            for (key, p) in probabilities.iter().enumerate() {
                add(&mut wanted, *p, &self.columns(&self.qkv, key, v_at));
            }
            let what = |part: &str| format!("{part} of row {row} of attention, {}", self.name);
            near(|| what("the result"), &self.columns(&self.out, row, q_at), &wanted, self.tolerance)?;
            let (mut dq, mut terms) = (vec![0.0; d], 0.0);
            for (key, (ds, of)) in self.score_gradients(head, row, &probabilities).into_iter().enumerate() {
                let k = self.columns(&self.qkv, key, k_at);
                add(&mut dq, ds, &k);
                terms += of * dot(&k, &k).sqrt();
            }
            near_sums(|| what("dq"), &self.columns(&self.dqkv, row, q_at), &dq, 2.0 * self.tolerance, terms)?;
        }
        // Of keys and values a late row, which few queries see: their probabilities are cheap.
        let key = self.length - self.length.min(CHECKED);
        let (mut dk, mut dv, mut terms) = (vec![0.0; d], vec![0.0; d], 0.0);
        for head in kv_head * self.spec.group()..(kv_head + 1) * self.spec.group() {
            for row in key..self.length {
                let probabilities = self.probabilities(head, row);
                add(&mut dv, probabilities[key], &self.columns(&self.dout, row, head * d));
                let (ds, of) = self.score_gradients(head, row, &probabilities)[key];
                let q = self.columns(&self.qkv, row, head * d);
                add(&mut dk, ds, &q);
                terms += of * dot(&q, &q).sqrt();
            }
        }
        let what = |part: &str| format!("{part} of row {key} of attention, {}", self.name);
        near_sums(|| what("dk"), &self.columns(&self.dqkv, key, k_at), &dk, 4.0 * self.tolerance, terms)?;
        near(|| what("dv"), &self.columns(&self.dqkv, key, v_at), &dv, 2.0 * self.tolerance)
    }

    /// `head_dim` columns from `at` of a row of the last sequence.
    fn columns(&self, matrix: &[f32], row: usize, at: usize) -> Vec<f64> {
        let rows = self.qkv.len() / (self.spec.q_cols() + 2 * self.spec.kv_cols());
        let width = matrix.len() / rows;
        let start = (rows - self.length + row) * width + at;
        matrix[start..start + self.spec.head_dim].iter().map(|x| f64::from(*x)).collect()
    }

    fn probabilities(&self, head: usize, row: usize) -> Vec<f64> {
        let k_at = self.spec.q_cols() + head / self.spec.group() * self.spec.head_dim;
        let q = self.columns(&self.qkv, row, head * self.spec.head_dim);
        let scale = f64::from(self.spec.scale);
        let scores: Vec<f64> = (0..=row).map(|key| scale * dot(&q, &self.columns(&self.qkv, key, k_at))).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
        scores.iter().map(|score| (score - most).exp() / sum).collect()
    }

    /// Of the scores before they are scaled: `p (dp - sum p dp) scale`, and the same with both
    /// terms' absolute values added.
    fn score_gradients(&self, head: usize, row: usize, probabilities: &[f64]) -> Vec<(f64, f64)> {
        let (d, group) = (self.spec.head_dim, self.spec.group());
        let v_at = self.spec.q_cols() + self.spec.kv_cols() + head / group * d;
        let dout = self.columns(&self.dout, row, head * d);
        let dp: Vec<f64> = (0..=row).map(|key| dot(&dout, &self.columns(&self.qkv, key, v_at))).collect();
        let delta = dot(probabilities, &dp);
        let scale = f64::from(self.spec.scale);
        let gradient = |(p, dp): (&f64, &f64)| (p * (dp - delta) * scale, p * (dp.abs() + delta.abs()) * scale.abs());
        probabilities.iter().zip(&dp).map(gradient).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(sum: &mut [f64], factor: f64, x: &[f64]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += factor * x);
}
