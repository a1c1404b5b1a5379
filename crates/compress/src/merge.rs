//! One model of several that have the same shape, tensor by tensor.
//!
//! | method | a tensor of the result |
//! |---|---|
//! | soup | `Σ w x / Σ w` (Wortsman et al. 2022) |
//! | slerp | the point on the arc from one model's tensor to the other's (Shoemake 1985) |
//! | task | `b + λ Σ w (x - b)` (Ilharco et al. 2023) |
//! | ties | `b + λ` times the mean of the largest changes that agree in sign (Yadav et al. 2023) |
//! | dare | `b + λ Σ w d`, some changes dropped at random, the others enlarged (Yu et al. 2024) |
//!
//! x are the models' tensors, w their weights, b the tensor of the model that they were tuned from.
//! Each tensor of the files is merged by itself, so that one unit of each model is in memory.

use crate::Result;
use crate::error::refuse;
use crate::source::Source;
use std::path::Path;
use trainyard_base::philox4x32;
use trainyard_model::ModelSpec;
use trainyard_model::weights::{ExportOptions, Exported, export};
use trainyard_tensor::grid::rounded;

/// The way in which tensors become one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MergeMethod {
    /// The weighted mean.
    Soup,
    /// Spherical interpolation between two models.
    Slerp,
    /// The base with the weighted sum of all changes.
    Task,
    /// The base with the changes that are large and agree in sign.
    Ties,
    /// The base with a random part of the changes.
    Dare,
}

impl MergeMethod {
    /// True if changes are taken from a base.
    pub fn needs_base(self) -> bool {
        matches!(self, MergeMethod::Task | MergeMethod::Ties | MergeMethod::Dare)
    }
}

/// The numbers of a merge.
#[derive(Clone, PartialEq, Debug)]
pub struct MergeSettings {
    /// The way.
    pub method: MergeMethod,
    /// A weight for each model.
    pub weights: Vec<f64>,
    /// The share of changes that is kept, by ties and dare; above 0 and at most 1.
    pub density: f64,
    /// The factor λ of changes.
    pub scale: f64,
    /// The seed of dare.
    pub seed: u64,
}

impl MergeSettings {
    /// Checks the numbers for `models` models.
    ///
    /// # Errors
    /// The first that is out of range.
    pub fn check(&self, models: usize, has_base: bool) -> Result<()> {
        let method = self.method;
        if models < 2 && !method.needs_base() {
            return refuse("a merge takes two models or more");
        }
        if method == MergeMethod::Slerp && models != 2 {
            return refuse(format!("slerp goes from one model to another, and there are {models}: take soup for more"));
        }
        if method.needs_base() && !has_base {
            return refuse("this method adds changes to a model that all were tuned from: name it with --base MODEL");
        }
        if !method.needs_base() && has_base {
            return refuse("soup and slerp know no base: leave --base out, or take task, ties or dare");
        }
        if self.weights.len() != models {
            return refuse(format!(
                "--weights has {} weights for {models} models: give one for each",
                self.weights.len()
            ));
        }
        if self.weights.iter().any(|weight| !weight.is_finite()) {
            return refuse("a weight is not finite");
        }
        let sums = matches!(method, MergeMethod::Soup | MergeMethod::Slerp | MergeMethod::Ties);
        if sums && (self.weights.iter().any(|weight| *weight < 0.0) || self.weights.iter().sum::<f64>() <= 0.0) {
            return refuse("these weights divide a sum: give numbers of 0 or more, not all of them 0");
        }
        if !(self.density > 0.0 && self.density <= 1.0) {
            return refuse(format!("a density of {} is not above 0 and at most 1", self.density));
        }
        if !self.scale.is_finite() {
            return refuse("the scale is not finite");
        }
        Ok(())
    }
}

/// The difference between two descriptions that models of one merge must not have, if there is one.
pub fn difference(one: &ModelSpec, other: &ModelSpec) -> Option<String> {
    let sizes = |spec: &ModelSpec| {
        [
            ("vocab_size", spec.vocab_size),
            ("dim", spec.dim),
            ("layers", spec.layers),
            ("heads", spec.heads),
            ("kv_heads", spec.kv_heads),
            ("head_dim", spec.head_dim),
            ("ffn_dim", spec.ffn_dim),
        ]
    };
    if one.family != other.family {
        return Some(format!("family {} and {}", one.family, other.family));
    }
    if let Some(((name, a), (_, b))) = sizes(one).into_iter().zip(sizes(other)).find(|(a, b)| a != b) {
        return Some(format!("{name} {a} and {b}"));
    }
    // Special tokens, dropout and initial values change no function of the weights.
    let same = |spec: &ModelSpec| ModelSpec {
        dropout: 0.0,
        init_std: 1.0,
        mup_base_dim: None,
        max_positions: 1,
        bos_token: None,
        eos_tokens: Vec::new(),
        pad_token: None,
        model_type: None,
        ..spec.clone()
    };
    let learned = one.learned_positions() != other.learned_positions();
    let differs = learned || same(one) != same(other);
    differs.then(|| "biases, norms, positions, windows or activations that are not the same".to_owned())
}

/// Writes the merge of `models` to `out`, with the description of the first one.
///
/// # Errors
/// Numbers out of range; models of different shapes; errors of reading and writing.
pub fn merge(
    models: &[Source],
    base: Option<&Source>,
    settings: &MergeSettings,
    out: &Path,
    options: ExportOptions,
) -> Result<Exported> {
    settings.check(models.len(), base.is_some())?;
    let Some(first) = models.first() else { return refuse("a merge takes two models or more") };
    for (number, other) in models.iter().chain(base).enumerate().skip(1) {
        if let Some(what) = difference(first.spec(), other.spec()) {
            let name = if number < models.len() { format!("model {}", number + 1) } else { "the base".to_owned() };
            return refuse(format!("the first model and {name} have {what}: models of one shape can be merged"));
        }
    }
    let (model, dtype) = (first.model(), options.dtype);
    let merged = |unit: usize, flat: &mut [f32]| -> Result<()> {
        let values = models.iter().map(|source| source.unit(unit)).collect::<Result<Vec<_>>>()?;
        let base = base.map(|source| source.unit(unit)).transpose()?;
        let layout = model.layout(unit, 1);
        for (index, spec) in model.units()[unit].parameters().iter().enumerate() {
            let (place, width) = (layout.range(index).start, spec.row_elements());
            for (number, source) in spec.sources.iter().enumerate() {
                let range = place + source.rows.start * width..place + source.rows.end * width;
                let tensors: Vec<&[f32]> = values.iter().map(|flat| &flat[range.clone()]).collect();
                let of_base = base.as_ref().map(|flat| &flat[range.clone()]);
                let key = [unit as u32, (index << 8 | number) as u32];
                merge_tensor(settings, &tensors, of_base, key, &mut flat[range.clone()]);
            }
        }
        flat.iter_mut().for_each(|x| *x = rounded(dtype, *x));
        Ok(())
    };
    Ok(export(out, model, options, merged)?)
}

/// One tensor of the result. `key` tells its random numbers from those of other tensors.
pub fn merge_tensor(
    settings: &MergeSettings,
    tensors: &[&[f32]],
    base: Option<&[f32]>,
    key: [u32; 2],
    out: &mut [f32],
) {
    let MergeSettings { method, weights, density, scale, seed } = settings;
    let mut sums = vec![0.0f64; out.len()];
    match (method, base) {
        (MergeMethod::Slerp, _) => return slerp(tensors, weights, out),
        (MergeMethod::Ties, Some(base)) => {
            let mut shares = vec![0.0f64; out.len()];
            let changes: Vec<Vec<f64>> = tensors.iter().map(|x| trimmed(x, base, *density)).collect();
            for (changes, weight) in changes.iter().zip(weights) {
                sums.iter_mut().zip(changes).for_each(|(sum, change)| *sum += weight * change);
            }
            let elected: Vec<f64> = sums.iter().map(|sum| sum.signum() * f64::from(u8::from(*sum != 0.0))).collect();
            sums.fill(0.0);
            for (changes, weight) in changes.iter().zip(weights) {
                for (place, change) in changes.iter().enumerate().filter(|(place, x)| **x * elected[*place] > 0.0) {
                    sums[place] += weight * change;
                    shares[place] += weight;
                }
            }
            sums.iter_mut().zip(shares).for_each(|(sum, share)| *sum /= if share > 0.0 { share } else { 1.0 });
        }
        (MergeMethod::Dare | MergeMethod::Task, Some(base)) => {
            let drops = *method == MergeMethod::Dare;
            for (number, (x, weight)) in tensors.iter().zip(weights).enumerate() {
                for (place, (x, b)) in x.iter().zip(base).enumerate() {
                    let kept = !drops || uniform(*seed, [place as u32, number as u32, key[0], key[1]]) < *density;
                    let factor = if drops { weight / density } else { *weight };
                    sums[place] += if kept { factor * (f64::from(*x) - f64::from(*b)) } else { 0.0 };
                }
            }
        }
        _ => {
            let all: f64 = weights.iter().sum();
            for (x, weight) in tensors.iter().zip(weights) {
                sums.iter_mut().zip(*x).for_each(|(sum, x)| *sum += weight / all * f64::from(*x));
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum as f32);
            return;
        }
    }
    for ((out, sum), b) in out.iter_mut().zip(sums).zip(base.unwrap_or_default()) {
        *out = (f64::from(*b) + scale * sum) as f32;
    }
}

/// The largest changes from `base`, a share `density` of them; the others are 0.
fn trimmed(x: &[f32], base: &[f32], density: f64) -> Vec<f64> {
    let mut changes: Vec<f64> = x.iter().zip(base).map(|(x, b)| f64::from(*x) - f64::from(*b)).collect();
    let dropped = changes.len() - (density * changes.len() as f64).round() as usize;
    if dropped > 0 {
        let mut order: Vec<usize> = (0..changes.len()).collect();
        order
            .select_nth_unstable_by(dropped - 1, |a, b| changes[*a].abs().total_cmp(&changes[*b].abs()).then(b.cmp(a)));
        order[..dropped].iter().for_each(|place| changes[*place] = 0.0);
    }
    changes
}

/// A number in [0, 1).
fn uniform(seed: u64, place: [u32; 4]) -> f64 {
    f64::from(philox4x32(place, [seed as u32, (seed >> 32) as u32])[0]) / 4_294_967_296.0
}

/// The point on the arc between two tensors. The share of the second is its share of the weights.
/// Tensors that point the same way, or opposite ways, are interpolated in a straight line.
fn slerp(tensors: &[&[f32]], weights: &[f64], out: &mut [f32]) {
    let [a, b] = tensors[..] else { return };
    let share = weights[1] / (weights[0] + weights[1]);
    let (mut product, mut of_a, mut of_b) = (0.0, 0.0, 0.0);
    for (x, y) in a.iter().zip(b).map(|(x, y)| (f64::from(*x), f64::from(*y))) {
        product += x * y;
        of_a += x * x;
        of_b += y * y;
    }
    let cosine = product / (of_a.sqrt() * of_b.sqrt());
    // As mergekit has it: beyond this the sine is too small to divide by.
    let straight = cosine.is_nan() || cosine.abs() > 0.9995;
    let angle = cosine.clamp(-1.0, 1.0).acos();
    let [s, t] = match straight {
        true => [1.0 - share, share],
        false => [((1.0 - share) * angle).sin() / angle.sin(), (share * angle).sin() / angle.sin()],
    };
    for ((out, x), y) in out.iter_mut().zip(a).zip(b) {
        *out = (s * f64::from(*x) + t * f64::from(*y)) as f32;
    }
}
