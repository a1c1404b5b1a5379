//! Routing of a mixture of experts: which experts a token goes to, in which order their rows lie,
//! and how rows come together again.
//!
//! Scores are computed in `f32` whatever the storage type. A token's choices are its `top_k`
//! largest scores, the lower expert first where scores are equal. Rows are sorted by expert and
//! stay in the order of tokens inside an expert, so that the rows of an expert depend on nothing
//! but the tokens that chose it. Sums over a token's choices are made in `f32`, in the order of the
//! choices.

use crate::cpu::Cpu;
use crate::cpu::rows::{for_rows, load_at, store_at};
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;
use std::ops::Range;

/// The function from logits to scores.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Gate {
    /// `e^l / Σ e^l` over all experts (Shazeer et al. 2017; Mixtral, Qwen3-MoE, DeepSeek-MoE).
    #[default]
    Softmax,
    /// `1 / (1 + e^-l)` of each (DeepSeek-V3).
    Sigmoid,
}

/// The rule of a router.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Router {
    /// Experts to choose from.
    pub experts: usize,
    /// Experts that a token goes to.
    pub top_k: usize,
    /// From logits to scores.
    pub gate: Gate,
    /// True if a token's weights are its scores divided by their sum.
    pub normalise: bool,
    /// Factor of all weights.
    pub scale: f32,
}

/// Factors of the losses that balance experts, for the gradient of the logits.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct BalanceFactors {
    /// Of `E Σ_e f_e P_e` (Fedus et al. 2021, equation 4): `f_e` is the number of choices of expert
    /// `e` for each token, `P_e` the mean of its share of the scores.
    pub auxiliary: f32,
    /// Of the mean of `(log Σ_e e^l)²` (Zoph et al. 2022, equation 5).
    pub z: f32,
}

/// A choice that was dropped has no place.
pub const DROPPED: i32 = -1;

impl Router {
    /// The scores of one token.
    fn scores(&self, logits: &[f32], scores: &mut [f32]) {
        match self.gate {
            Gate::Softmax => softmax(logits, scores),
            Gate::Sigmoid => scores.iter_mut().zip(logits).for_each(|(s, l)| *s = 1.0 / (1.0 + (-l).exp())),
        }
    }

    /// The weights of a token's choices, of which `chosen` are the scores.
    fn weights(&self, chosen: &[f32], weights: &mut [f32]) {
        let sum: f32 = if self.normalise { chosen.iter().sum() } else { 1.0 };
        weights.iter_mut().zip(chosen).for_each(|(w, s)| *w = self.scale * s / sum);
    }
}

fn softmax(logits: &[f32], out: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for (out, logit) in out.iter_mut().zip(logits) {
        *out = (logit - max).exp();
        sum += *out;
    }
    out.iter_mut().for_each(|out| *out /= sum);
}

/// `log Σ e^l`
fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    max + logits.iter().map(|logit| (logit - max).exp()).sum::<f32>().ln()
}

/// The results of [`choose`], each `[m, top_k]`.
pub struct Choices<'a> {
    /// Experts, in falling order of their scores.
    pub experts: &'a mut [i32],
    /// Their weights.
    pub weights: &'a mut [f32],
}

/// Chooses each token's experts by `score + bias`; the bias (`[experts]`) changes the choice and
/// not
/// the weights (Wang et al. 2024). `logits` is `[m, experts]`.
///
/// # Panics
/// When the lengths disagree, here and below.
pub fn choose(cpu: &Cpu, router: &Router, logits: &[f32], bias: Option<&[f32]>, choices: Choices<'_>) {
    let Router { experts: count, top_k, .. } = *router;
    let tokens = logits.len() / count;
    assert_eq!((choices.experts.len(), choices.weights.len()), (tokens * top_k, tokens * top_k), "lengths of choices");
    let (experts, weights) = (Shares::new(choices.experts), Shares::new(choices.weights));
    for_rows(cpu, tokens, 32 * count, |range| {
        let (mut scores, mut ranks, mut chosen) = (vec![0.0; count], vec![0.0; count], vec![0.0; top_k]);
        for token in range {
            router.scores(&logits[token * count..(token + 1) * count], &mut scores);
            ranks.copy_from_slice(&scores);
            if let Some(bias) = bias {
                ranks.iter_mut().zip(bias).for_each(|(rank, bias)| *rank += bias);
            }
            let span = token * top_k..(token + 1) * top_k;
            // SAFETY: every token belongs to one range.
            let (experts, weights) = unsafe { (experts.part(span.clone()), weights.part(span)) };
            for (choice, expert) in experts.iter_mut().enumerate() {
                let mut best = 0;
                for e in 1..count {
                    // What is no number is never larger.
                    if ranks[e] > ranks[best] || ranks[best].is_nan() && !ranks[e].is_nan() {
                        best = e;
                    }
                }
                (*expert, chosen[choice]) = (best as i32, scores[best]);
                ranks[best] = f32::NAN;
            }
            distinct(experts, count);
            router.weights(&chosen, weights);
        }
    });
}

/// Makes a token's choices distinct where its scores were no numbers, so that each is a place of
/// its own.
fn distinct(experts: &mut [i32], count: usize) {
    for choice in 1..experts.len() {
        if experts[..choice].contains(&experts[choice]) {
            let free = (0..count as i32).find(|e| !experts[..choice].contains(e));
            experts[choice] = free.unwrap_or(0);
        }
    }
}

/// Sums over tokens of what balances experts.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct BalanceLosses {
    /// `E Σ_e f_e P_e`, at least `top_k` where the two agree.
    pub auxiliary: f32,
    /// The mean of `(log Σ_e e^l)²`.
    pub z: f32,
}

/// The balance losses of `logits`, of whose experts `counts` choices were made each.
pub fn balance_losses(router: &Router, logits: &[f32], counts: &[i32]) -> BalanceLosses {
    let count = router.experts;
    let tokens = (logits.len() / count).max(1) as f64;
    let (mut shares, mut scores, mut squares) = (vec![0.0f64; count], vec![0.0; count], 0.0f64);
    for logits in logits.chunks_exact(count) {
        router.scores(logits, &mut scores);
        let sum: f32 = if router.gate == Gate::Softmax { 1.0 } else { scores.iter().sum() };
        shares.iter_mut().zip(&scores).for_each(|(share, score)| *share += f64::from(score / sum));
        squares += f64::from(log_sum_exp(logits)).powi(2);
    }
    let agreement: f64 = shares.iter().zip(counts).map(|(share, n)| share / tokens * f64::from(*n) / tokens).sum();
    BalanceLosses { auxiliary: (count as f64 * agreement) as f32, z: (squares / tokens) as f32 }
}

/// The gradient of the logits: `dlogits` `[m, experts]` from `dweights` `[m, top_k]` and the
/// balance
/// losses' factors. `counts` are the choices of each expert.
pub fn choose_backward(
    cpu: &Cpu,
    router: &Router,
    logits: &[f32],
    experts: &[i32],
    counts: &[i32],
    dweights: Option<&[f32]>,
    factors: BalanceFactors,
    dlogits: &mut [f32],
) {
    let Router { experts: count, top_k, .. } = *router;
    let tokens = logits.len() / count;
    assert_eq!((experts.len(), dlogits.len(), counts.len()), (tokens * top_k, logits.len(), count), "lengths");
    let per_token = 1.0 / tokens.max(1) as f32;
    // The loss' derivative by a token's share of the scores.
    let of_share: Vec<f32> =
        counts.iter().map(|n| factors.auxiliary * count as f32 * (*n as f32 * per_token) * per_token).collect();
    let dlogits = Shares::new(dlogits);
    for_rows(cpu, tokens, 40 * count, |range| {
        let (mut scores, mut dscores, mut plain) = (vec![0.0; count], vec![0.0f32; count], vec![0.0; count]);
        for token in range {
            let logits = &logits[token * count..(token + 1) * count];
            // SAFETY: every token belongs to one range.
            let dlogits = unsafe { dlogits.part(token * count..(token + 1) * count) };
            let chosen = &experts[token * top_k..(token + 1) * top_k];
            router.scores(logits, &mut scores);
            dscores.fill(0.0);
            if factors.auxiliary != 0.0 {
                match router.gate {
                    Gate::Softmax => dscores.copy_from_slice(&of_share),
                    Gate::Sigmoid => {
                        let sum: f32 = scores.iter().sum();
                        let mean = scores.iter().zip(&of_share).map(|(s, d)| s / sum * d).sum::<f32>();
                        dscores.iter_mut().zip(&of_share).for_each(|(ds, d)| *ds = (d - mean) / sum);
                    }
                }
            }
            if let Some(dweights) = dweights {
                let dweights = &dweights[token * top_k..(token + 1) * top_k];
                let score = |expert: &i32| scores[*expert as usize];
                let sum: f32 = if router.normalise { chosen.iter().map(score).sum() } else { 1.0 };
                let mean: f32 = if router.normalise {
                    chosen.iter().zip(dweights).map(|(expert, dw)| score(expert) / sum * dw).sum()
                } else {
                    0.0
                };
                for (expert, dw) in chosen.iter().zip(dweights) {
                    dscores[*expert as usize] += router.scale * (dw - mean) / sum;
                }
            }
            match router.gate {
                Gate::Softmax => {
                    let mean: f32 = scores.iter().zip(&dscores).map(|(s, ds)| s * ds).sum();
                    for (dlogit, (s, ds)) in dlogits.iter_mut().zip(scores.iter().zip(&dscores)) {
                        *dlogit = s * (ds - mean);
                    }
                }
                Gate::Sigmoid => {
                    for (dlogit, (s, ds)) in dlogits.iter_mut().zip(scores.iter().zip(&dscores)) {
                        *dlogit = ds * s * (1.0 - s);
                    }
                }
            }
            if factors.z != 0.0 {
                softmax(logits, &mut plain);
                let factor = 2.0 * factors.z * per_token * log_sum_exp(logits);
                dlogits.iter_mut().zip(&plain).for_each(|(dlogit, p)| *dlogit += factor * p);
            }
        }
    });
}

/// The results of [`sort`].
pub struct Order<'a> {
    /// The row of each choice, or [`DROPPED`]: `[m, top_k]`.
    pub places: &'a mut [i32],
    /// The token of each row, or [`DROPPED`] behind the last: `[m top_k]`.
    pub tokens: &'a mut [i32],
    /// Where the rows of each expert begin, and where the last one's end: `[experts + 1]`.
    pub bounds: &'a mut [i32],
    /// The choices of each expert, dropped ones included: `[experts]`.
    pub counts: &'a mut [i32],
}

/// Sorts choices by expert, those of one expert in the order of tokens. With a `capacity` an expert
/// keeps so many of its first choices and the others are dropped (Lepikhin et al. 2020).
pub fn sort(experts: &[i32], top_k: usize, capacity: Option<usize>, order: Order<'_>) {
    let Order { places, tokens, bounds, counts } = order;
    assert_eq!((places.len(), tokens.len(), bounds.len()), (experts.len(), experts.len(), counts.len() + 1));
    counts.fill(0);
    experts.iter().for_each(|expert| counts[*expert as usize] += 1);
    let capacity = capacity.map_or(i32::MAX, |capacity| i32::try_from(capacity).unwrap_or(i32::MAX));
    bounds[0] = 0;
    for expert in 0..counts.len() {
        bounds[expert + 1] = bounds[expert] + counts[expert].min(capacity);
    }
    let mut next: Vec<i32> = bounds[..counts.len()].to_vec();
    tokens.fill(DROPPED);
    for (choice, expert) in experts.iter().enumerate() {
        let expert = *expert as usize;
        places[choice] = if next[expert] < bounds[expert + 1] {
            let place = next[expert];
            next[expert] += 1;
            tokens[place as usize] = (choice / top_k) as i32;
            place
        } else {
            DROPPED
        };
    }
}

/// `rows[i] = x[tokens[i]]`, zeros where there is no token: `x` is `[m, dim]`, `rows` `[r, dim]`.
pub fn gather_rows<T: Element>(cpu: &Cpu, dim: usize, x: &[T], tokens: &[i32], rows: &mut [T]) {
    assert_eq!(rows.len(), tokens.len() * dim, "length of rows");
    let rows = Shares::new(rows);
    for_rows(cpu, tokens.len(), 2 * dim * size_of::<T>(), |range| {
        for row in range {
            // SAFETY: every row belongs to one range.
            let to = unsafe { rows.part(row * dim..(row + 1) * dim) };
            match usize::try_from(tokens[row]) {
                Ok(token) => to.copy_from_slice(&x[token * dim..(token + 1) * dim]),
                Err(_) => to.fill(T::default()),
            }
        }
    });
}

/// `y[t] = residual[t] + Σ_j weights[t, j] rows[places[t, j]]`: `rows` is `[r, dim]`, `weights` and
/// `places` are `[m, top_k]`, the others `[m, dim]`. All weights are 1 where none are given.
pub fn combine<T: Element>(
    cpu: &Cpu,
    dim: usize,
    rows: &[T],
    places: &[i32],
    weights: Option<&[f32]>,
    residual: Option<&[T]>,
    y: &mut [T],
) {
    let tokens = y.len() / dim.max(1);
    let top_k = places.len() / tokens.max(1);
    assert!(places.len() == tokens * top_k && y.len() == tokens * dim, "{} places of {tokens} tokens", places.len());
    assert!(weights.is_none_or(|weights| weights.len() == places.len()), "weights of other places");
    let y = Shares::new(y);
    for_rows(cpu, tokens, (top_k + 2) * dim * size_of::<T>(), |range| {
        // SAFETY: every token belongs to one range.
        let y = unsafe { y.part(range.start * dim..range.end * dim) };
        combine_range(cpu.isa, dim, top_k, range, rows, places, weights, residual, y);
    });
}

simd_fn! {
    fn combine_range[T: Element](
        s: S, dim: usize, top_k: usize, range: Range<usize>, rows: &[T], places: &[i32], weights: Option<&[f32]>,
        residual: Option<&[T]>, y: &mut [T],
    ) {
        for (token, y) in range.zip(y.chunks_exact_mut(dim)) {
            let span = token * top_k..(token + 1) * top_k;
            let places = &places[span.clone()];
            let weights = weights.map(|weights| &weights[span]);
            let residual = residual.map(|residual| &residual[token * dim..(token + 1) * dim]);
            let mut i = 0;
            while i < dim {
                let mut sum = s.splat(0.0);
                for (choice, place) in places.iter().enumerate() {
                    let Ok(place) = usize::try_from(*place) else { continue };
                    let row = load_at(s, &rows[place * dim..(place + 1) * dim], i, 0.0);
                    sum = match weights {
                        Some(weights) => s.fma(s.splat(weights[choice]), row, sum),
                        None => s.add(row, sum),
                    };
                }
                if let Some(residual) = residual {
                    sum = s.add(load_at(s, residual, i, 0.0), sum);
                }
                store_at(s, sum, y, i);
                i += S::LANES;
            }
        }
    }
}

/// The backward of [`combine`] from `dy` `[m, dim]`: `drows[places[t, j]] = weights[t, j] dy[t]`
/// and
/// `dweights[t, j] = dy[t] · rows[places[t, j]]`, zero for dropped choices. Rows of `drows` that
/// are
/// nobody's place stay as they are.
pub fn combine_backward<T: Element>(
    cpu: &Cpu,
    dim: usize,
    dy: &[T],
    rows: &[T],
    places: &[i32],
    weights: &[f32],
    drows: &mut [T],
    dweights: &mut [f32],
) {
    let tokens = dy.len() / dim.max(1);
    let top_k = places.len() / tokens.max(1);
    assert_eq!((weights.len(), dweights.len(), drows.len()), (places.len(), places.len(), rows.len()), "lengths");
    let (drows, dweights) = (Shares::new(drows), Shares::new(dweights));
    for_rows(cpu, tokens, (2 * top_k + 1) * dim * size_of::<T>(), |range| {
        for choice in range.start * top_k..range.end * top_k {
            let dy = &dy[choice / top_k * dim..][..dim];
            // SAFETY: every token belongs to one range.
            let dweight = unsafe { &mut dweights.part(choice..choice + 1)[0] };
            let Ok(place) = usize::try_from(places[choice]) else {
                *dweight = 0.0;
                continue;
            };
            // SAFETY: places are distinct.
            let drow = unsafe { drows.part(place * dim..(place + 1) * dim) };
            *dweight = scaled_and_dot(cpu.isa, weights[choice], dy, &rows[place * dim..(place + 1) * dim], drow);
        }
    });
}

simd_fn! {
    /// `drow = weight dy`; returns `dy · row`.
    fn scaled_and_dot[T: Element](s: S, weight: f32, dy: &[T], row: &[T], drow: &mut [T]) -> f32 {
        let (mut sum, weight) = (s.splat(0.0), s.splat(weight));
        let mut i = 0;
        while i < dy.len() {
            let d = load_at(s, dy, i, 0.0);
            sum = s.fma(d, load_at(s, row, i, 0.0), sum);
            store_at(s, s.mul(weight, d), drow, i);
            i += S::LANES;
        }
        s.reduce_sum(sum)
    }
}
