//! The head's loss of a student that learns from a teacher: cross-entropy with the targets, mixed
//! with a divergence between the two models' distributions of the next token.
//!
//! With student logits z, teacher logits t, temperature T and weight a, a row's loss is
//!
//! ```text
//! (1 - a) (lse(z) - z[target]) + a T² D(p, q),   p = softmax(t / T),  q = softmax(z / T)
//! ```
//!
//! T² keeps the size of the gradient as T grows (Hinton et al. 2015, section 2.1). The divergences
//! and their gradients by z, with m = b p + (1 - b) q:
//!
//! ```text
//! forward KL      D = sum p log(p / q)                 T dD/dz = q - p
//! reverse KL      D = sum q log(q / p)                 T dD/dz = q (log(q / p) - D)
//! Jensen-Shannon  D = b KL(p | m) + (1 - b) KL(q | m) T dD/dz = (1 - b) q (log(q / m) - KL(q | m))
//! ```
//!
//! The last is the generalised form of Agarwal et al. 2024 (GKD, equation 1).
//!
//! As in [`cpu::head`](crate::cpu::head), logits exist for one chunk of rows at a time, here those
//! of both models, and the gradient is written over the student's. A row is passed over three
//! times; each pass exponentiates once or twice an element.

use crate::cpu::Cpu;
use crate::cpu::embedding::IndexError;
use crate::cpu::gemm::{Epilogue, MatMut, MatRef, Weight, forward};
use crate::cpu::head::{HeadGradients, HeadLoss, losses_in_chunks, losses_of_rows, stride};
use crate::cpu::loss::{IGNORE, max_and_lse_at};
use crate::cpu::rows::{load_at, store_at};
use crate::cpu::simd::Simd;
use crate::dtype::Element;
use crate::simd_fn;

/// A measure of how far the student's distribution q is from the teacher's p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Divergence {
    /// KL(p | q): the student covers all that the teacher thinks possible.
    ForwardKl,
    /// KL(q | p): the student keeps to what the teacher thinks likely.
    ReverseKl,
    /// Between the two: how far both are from a mixture of them.
    JensenShannon {
        /// The teacher's share of the mixture, between 0 and 1.
        beta: f32,
    },
}

/// The loss of a student beside its teacher.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distillation {
    /// The share of the divergence in the loss, 0 to 1. The rest is cross-entropy with the targets.
    pub weight: f32,
    /// The divisor of both models' logits, above 0. Higher ones show more of a teacher's unlikely
    /// tokens.
    pub temperature: f32,
    /// The distance between the distributions.
    pub divergence: Divergence,
}

/// The teacher's side of [`distillation_loss`].
#[derive(Debug)]
pub struct TeacherLogits<'a, T> {
    /// The teacher's final hidden states, `[tokens, its dim]`.
    pub x: MatRef<'a, T>,
    /// The teacher's matrix of the vocabulary, `[vocab, its dim]`.
    pub w: Weight<'a, T>,
    /// The loss.
    pub distillation: Distillation,
    /// Room for as many rows of logits as the student's workspace.
    pub workspace: &'a mut [T],
}

/// The loss of a student's logits `x wᵀ` against `targets` and against a teacher's logits, and its
/// gradients; arguments as for [`linear_cross_entropy`](crate::cpu::head::linear_cross_entropy).
/// FLOPs: `2 tokens vocab (dim + the teacher's dim)`, and `2 tokens vocab dim` for each gradient.
///
/// # Errors
/// When a target is neither a token nor [`IGNORE`]; nothing is written then.
///
/// # Panics
/// When the shapes disagree or a workspace holds no row.
pub fn distillation_loss<T: Element>(
    cpu: &Cpu,
    x: MatRef<'_, T>,
    w: Weight<'_, T>,
    lesson: TeacherLogits<'_, T>,
    targets: &[i32],
    gradients: Option<HeadGradients<'_, T>>,
    losses: &mut [f32],
    workspace: &mut [T],
) -> Result<HeadLoss, IndexError> {
    let (tokens, vocab) = (x.rows(), w.plain.rows());
    assert_eq!((lesson.x.rows(), lesson.w.plain.rows()), (tokens, vocab), "the teacher's tokens and vocabulary");
    assert!(lesson.workspace.len() >= workspace.len(), "the teacher's workspace is the shorter one");
    let (stride, room) = (stride(vocab), lesson.workspace);
    losses_in_chunks(cpu, x, w, targets, gradients, losses, workspace, |chunk, logits, scale, losses| {
        let taught = &mut room[..chunk.len() * stride];
        let to = MatMut::with_stride(&mut *taught, chunk.len(), vocab, stride);
        forward(cpu, lesson.x.row_range(chunk.clone()), lesson.w, Epilogue::default(), to);
        let taught = &*taught;
        losses_of_rows(cpu, vocab, 6, logits, losses, |row, z| {
            let t = &taught[row * stride..row * stride + vocab];
            taught_row(cpu.isa, z, t, targets[chunk.start + row], lesson.distillation, scale)
        })
    })
}

/// The logit of what lies beyond the end of a row: its probability is 0, and its quotients with
/// temperatures are finite.
const BEYOND: f32 = -1e30;

/// Two models' log-probabilities at some lanes: log q and log p.
#[derive(Clone, Copy)]
struct Pair<F> {
    q: F,
    p: F,
}

/// Both rows of logits and what makes log-probabilities of them.
struct Rows<'a, T> {
    z: &'a [T],
    t: &'a [T],
    inverse: f32,
    lse_z: f32,
    lse_t: f32,
}

impl<T: Element> Rows<'_, T> {
    /// The log-probabilities from element `i` on; far below any beyond the end.
    #[inline(always)]
    fn at<S: Simd>(&self, s: S, i: usize) -> Pair<S::F> {
        let inverse = s.splat(self.inverse);
        let of = |x: &[T], lse: f32| s.sub(s.mul(load_at(s, x, i, BEYOND), inverse), s.splat(lse));
        Pair { q: of(self.z, self.lse_z), p: of(self.t, self.lse_t) }
    }
}

/// `log(b p + (1 - b) q)` of the logarithms, by the larger of the two summands.
#[inline(always)]
fn log_mixture<S: Simd>(s: S, Pair { q, p }: Pair<S::F>, beta: f32) -> S::F {
    let (p, q) = (s.add(p, s.splat(beta.ln())), s.add(q, s.splat((1.0 - beta).ln())));
    let (high, low) = (s.max(p, q), s.min(p, q));
    s.add(high, s.ln(s.add(s.splat(1.0), s.exp_nonpositive(s.sub(low, high)))))
}

/// The divergence of a row, and the mean of `log(q / .)` under q that its gradient subtracts.
#[inline(always)]
fn divergence_of<S: Simd, T: Element>(s: S, rows: &Rows<'_, T>, divergence: Divergence) -> (f32, f32) {
    let zeros = s.splat(0.0);
    let mut sums = [zeros; 2];
    let mut i = 0;
    while i < rows.z.len() {
        let pair = rows.at(s, i);
        match divergence {
            Divergence::ForwardKl => sums[0] = s.fma(s.exp(pair.p), s.sub(pair.p, pair.q), sums[0]),
            Divergence::ReverseKl => sums[1] = s.fma(s.exp(pair.q), s.sub(pair.q, pair.p), sums[1]),
            Divergence::JensenShannon { beta } => {
                let mixed = log_mixture(s, pair, beta);
                sums[0] = s.fma(s.exp(pair.p), s.sub(pair.p, mixed), sums[0]);
                sums[1] = s.fma(s.exp(pair.q), s.sub(pair.q, mixed), sums[1]);
            }
        }
        i += S::LANES;
    }
    let [of_p, of_q] = sums.map(|sum| s.reduce_sum(sum));
    match divergence {
        Divergence::ForwardKl => (of_p, 0.0),
        Divergence::ReverseKl => (of_q, of_q),
        Divergence::JensenShannon { beta } => (beta * of_p + (1.0 - beta) * of_q, of_q),
    }
}

simd_fn! {
    /// One row's loss and whether no logit is above the target's; with a `scale`, the row `z`
    /// turned into its gradient.
    fn taught_row[T: Element](
        s: S, z: &mut [T], t: &[T], target: i32, distillation: Distillation, scale: Option<f32>
    ) -> (f32, bool) {
        if target == IGNORE {
            if scale.is_some() {
                z.fill(T::default());
            }
            return (0.0, false);
        }
        let Distillation { weight, temperature, divergence } = distillation;
        let inverse = 1.0 / temperature;
        let (max, lse) = max_and_lse_at(s, z, 1.0);
        let lse_z = if temperature == 1.0 { lse } else { max_and_lse_at(s, z, inverse).1 };
        let lse_t = max_and_lse_at(s, t, inverse).1;
        let logit = z[target as usize].to_f32();
        let (distance, mean) = divergence_of(s, &Rows { z, t, inverse, lse_z, lse_t }, divergence);
        let loss = (1.0 - weight) * (lse - logit) + weight * temperature * temperature * distance;
        let Some(scale) = scale else { return (loss, logit >= max) };
        let hard = (1.0 - weight) * scale;
        let soft = weight * temperature * scale;
        let mut i = 0;
        while i < z.len() {
            let pair = Rows { z, t, inverse, lse_z, lse_t }.at(s, i);
            let q = s.exp(pair.q);
            let slope = match divergence {
                Divergence::ForwardKl => s.sub(q, s.exp(pair.p)),
                Divergence::ReverseKl => s.mul(q, s.sub(s.sub(pair.q, pair.p), s.splat(mean))),
                Divergence::JensenShannon { beta } => {
                    let above = s.sub(s.sub(pair.q, log_mixture(s, pair, beta)), s.splat(mean));
                    s.mul(s.mul(q, s.splat(1.0 - beta)), above)
                }
            };
            let likely = match temperature {
                1.0 => q,
                _ => s.exp(s.sub(load_at(s, z, i, 0.0), s.splat(lse))),
            };
            let mut gradient = s.fma(likely, s.splat(hard), s.mul(slope, s.splat(soft)));
            // Before the sum is rounded to T: 1 is taken off in the target's lane alone.
            if (i..i + S::LANES).contains(&(target as usize)) {
                gradient = s.sub(gradient, lane_of(s, target as usize - i, hard));
            }
            store_at(s, gradient, z, i);
            i += S::LANES;
        }
        (loss, logit >= max)
    }
}

/// `value` in one lane, 0 in the others.
#[inline(always)]
fn lane_of<S: Simd>(s: S, lane: usize, value: f32) -> S::F {
    let mut lanes = [0.0f32; 16];
    lanes[lane] = value;
    load_at(s, &lanes[..], 0, 0.0)
}
