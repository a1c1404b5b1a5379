//! Generates text from a model, token by token, with a cache of keys and values.

use crate::Result;
use crate::rank::Rank;
use crate::state::does_not_fit;
use trainyard_data::rng::Stream;
use trainyard_model::{BatchSlices, Forward, KvCache};

/// Settings for the choice of the next token.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the most likely token.
    pub temperature: f64,
    /// Choose among the k most likely tokens; None: among all.
    pub top_k: Option<usize>,
    /// Choose among the fewest most likely tokens whose probabilities add up to this (Holtzman et
    /// al. 2020); None: among all.
    pub top_p: Option<f64>,
    /// Seed of the random choices.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.8, top_k: Some(50), top_p: Some(0.95), seed: 0 }
    }
}

impl Sampling {
    /// Checks the ranges of the settings.
    pub fn check(&self) -> Result<()> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(does_not_fit(format!("temperature {} must be 0 or above", self.temperature)));
        }
        if self.top_k == Some(0) {
            return Err(does_not_fit("top-k 0 leaves no token to choose: take at least 1"));
        }
        if self.top_p.is_some_and(|p| !(p > 0.0 && p <= 1.0)) {
            return Err(does_not_fit("top-p must be above 0 and at most 1"));
        }
        Ok(())
    }

    /// Chooses the next token from its logits; `uniform` is a random number in `[0, 1)`.
    pub fn choose(&self, logits: &[f32], uniform: f64) -> u32 {
        let by_logit = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let mut order: Vec<usize> = (0..logits.len()).collect();
        if self.temperature == 0.0 {
            return order.into_iter().min_by(|a, b| by_logit(a, b)).unwrap_or(0) as u32;
        }
        order.sort_unstable_by(by_logit);
        order.truncate(self.top_k.unwrap_or(usize::MAX).max(1));
        let top = f64::from(logits[order[0]]);
        let mut weights: Vec<f64> =
            order.iter().map(|i| ((f64::from(logits[*i]) - top) / self.temperature).exp()).collect();
        let mut total: f64 = weights.iter().sum();
        if let Some(p) = self.top_p {
            let mut sum = 0.0;
            let kept = weights.iter().position(|w| {
                sum += w;
                sum >= p * total
            });
            weights.truncate(kept.map_or(weights.len(), |last| last + 1));
            total = weights.iter().sum();
        }
        let mut left = uniform * total;
        for (place, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return order[place] as u32;
            }
        }
        order[weights.len() - 1] as u32
    }
}

/// Continues `prompt` by up to `tokens_max` tokens. `each` receives every token and returns true to
/// go on. Generation stops after a token of `stop`. When the context is full, the cache is rebuilt
/// from its second half. Of a model with an encoder, the encoder reads all of `prompt` but the last
/// token, with which the decoder begins.
pub fn generate(
    rank: &Rank,
    prompt: &[u32],
    tokens_max: usize,
    sampling: Sampling,
    stop: &[u32],
    mut each: impl FnMut(u32) -> bool,
) -> Result<()> {
    sampling.check()?;
    let spec = rank.model().spec().ok_or_else(|| does_not_fit("only built-in families generate text"))?;
    // A decoder beside an encoder begins anew, and its positions have no bound.
    let context = if spec.encoder.is_some() { tokens_max.max(1) + 1 } else { spec.max_positions };
    let mut history: Vec<u32> = prompt.to_vec();
    if history.is_empty() {
        return Err(does_not_fit("the prompt has no tokens: give at least one character"));
    }
    if spec.encoder.is_some() {
        return answer(rank, prompt, tokens_max, sampling, stop, context, each);
    }
    let first = history.len().saturating_sub(context);
    let mut pending: Vec<u32> = history[first..].to_vec();
    let mut cache = rank.inference_model().cache(rank.device(), context, rank.parameters.compute())?;
    let random = Stream::new(sampling.seed, 0);
    for draw in 0..tokens_max as u64 {
        if cache.len() + pending.len() > context {
            cache.truncate(0);
            pending = history[history.len() - (context / 2).max(1)..].to_vec();
        }
        let logits = next_logits(rank, &pending, &mut cache)?;
        let token = sampled(&logits, sampling, &random, draw)?;
        history.push(token);
        if stop.contains(&token) || !each(token) {
            break;
        }
        pending = vec![token];
    }
    Ok(())
}

/// Lets an encoder read `prompt`, all but its last token, with which the decoder begins; and lets
/// the decoder answer.
fn answer(
    rank: &Rank,
    prompt: &[u32],
    tokens_max: usize,
    sampling: Sampling,
    stop: &[u32],
    context: usize,
    mut each: impl FnMut(u32) -> bool,
) -> Result<()> {
    let Some((start, read)) = prompt.split_last().filter(|(_, read)| !read.is_empty()) else {
        return Err(does_not_fit("the encoder's text has no tokens: give at least one character"));
    };
    let mut cache = rank.inference_model().cache(rank.device(), context, rank.parameters.compute())?;
    let random = Stream::new(sampling.seed, 0);
    let mut pending = *start;
    for draw in 0..tokens_max as u64 {
        let tokens: Vec<i32> = match draw {
            0 => prompt.iter().map(|token| *token as i32).collect(),
            _ => vec![pending as i32],
        };
        let (first, bounds) = match draw {
            0 => (0..read.len() as i32, vec![0, read.len() as i32, tokens.len() as i32]),
            _ => (0..0, vec![0, 1]),
        };
        let positions: Vec<i32> = first.chain([draw as i32]).collect();
        let slices = BatchSlices::of_text(&tokens, None, &positions, &bounds);
        let logits = logits_after(rank, &slices, &mut cache)?;
        pending = sampled(&logits, sampling, &random, draw)?;
        if stop.contains(&pending) || !each(pending) {
            break;
        }
    }
    Ok(())
}

/// The token of draw number `draw`.
fn sampled(logits: &[f32], sampling: Sampling, random: &Stream, draw: u64) -> Result<u32> {
    if logits.iter().any(|logit| logit.is_nan()) {
        return Err(does_not_fit("the model's logits are not numbers: its weights hold NaN or infinities"));
    }
    let uniform = random.below(draw, 1 << 53) as f64 / (1u64 << 53) as f64;
    Ok(sampling.choose(logits, uniform))
}

fn next_logits(rank: &Rank, pending: &[u32], cache: &mut KvCache) -> Result<Vec<f32>> {
    let tokens: Vec<i32> = pending.iter().map(|token| *token as i32).collect();
    let start = cache.len() as i32;
    let positions: Vec<i32> = (start..start + tokens.len() as i32).collect();
    let cu_seqlens = [0, tokens.len() as i32];
    let slices = BatchSlices::of_text(&tokens, None, &positions, &cu_seqlens);
    logits_after(rank, &slices, cache)
}

/// The logits of the token after the last one of `slices`, which continues `cache`.
fn logits_after(rank: &Rank, slices: &BatchSlices<'_>, cache: &mut KvCache) -> Result<Vec<f32>> {
    let batch = rank.inference_model().batch(rank.device(), slices)?;
    let mut tape = rank.inference_tape();
    let mut cx = Forward::generation(&batch, cache);
    let own = match rank.forward(&mut tape, &mut cx)? {
        Some(logits) => logits.tensor().to_f32_vec()?,
        // Another stage of the pipeline has them.
        None => Vec::new(),
    };
    if rank.needs_others() { rank.gather_logits(&own) } else { Ok(own) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, -1.0, 3.0];

    #[test]
    fn greedy_takes_the_first_of_the_most_likely() {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(greedy.choose(&LOGITS, 0.9), 1);
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let draw = |sampling: Sampling| -> Vec<u32> {
            let mut seen: Vec<u32> = (0..1000).map(|i| sampling.choose(&LOGITS, f64::from(i) / 1000.0)).collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        let all = Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 0 };
        assert_eq!(draw(all), [0, 1, 2, 3, 4]);
        assert_eq!(draw(Sampling { top_k: Some(3), ..all }), [1, 2, 4]);
        assert_eq!(draw(Sampling { top_p: Some(0.5), ..all }), [1, 4]);
        assert_eq!(draw(Sampling { top_p: Some(1e-9), ..all }), [1]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let all = Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 0 };
        let total: f64 = LOGITS.iter().map(|l| f64::from(*l).exp()).sum();
        let hits = (0..10_000).filter(|i| all.choose(&LOGITS, f64::from(*i) / 10_000.0) == 2).count();
        assert!((hits as f64 / 10_000.0 - 2f64.exp() / total).abs() < 1e-3);
    }

    #[test]
    fn impossible_settings_are_refused() {
        for sampling in [
            Sampling { temperature: -1.0, ..Sampling::default() },
            Sampling { temperature: f64::NAN, ..Sampling::default() },
            Sampling { top_k: Some(0), ..Sampling::default() },
            Sampling { top_p: Some(0.0), ..Sampling::default() },
            Sampling { top_p: Some(1.5), ..Sampling::default() },
        ] {
            assert!(sampling.check().is_err(), "{sampling:?}");
        }
    }
}
