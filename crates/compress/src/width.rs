//! A model with fewer channels of its MLPs, fewer heads and a narrower residual stream
//! (Muralidharan et al. 2024, Minitron), alone or together with fewer blocks.
//!
//! [`Widths`] says how many of each are kept. [`Widths::choose`] takes the most important ones by a
//! [`Survey`]: channels of the MLP and heads in each block by themselves, channels of the residual
//! stream in all blocks together. A family's table of parameters says how each lies on these
//! dimensions ([`Cut`]), so this file knows no family.
//!
//! Query heads share key/value heads in groups, and every block keeps one shape: k of its groups
//! and m queries of each. Of the pairs (k, m) with k m = N, the one is taken that keeps the largest
//! share of the importance of heads, averaged over blocks.
//!
//! An RMS norm divides by the root of the mean square of its d channels. Without the weak ones that
//! mean grows, and what follows shrinks. So gains of the norms of d' channels are multiplied by
//! `sqrt(s d / d')`, where s is the share of the square that these have in calibration. A model
//! whose dropped channels were zero computes what it did.

use crate::depth::{highest, kept, shortened};
use crate::error::refuse;
use crate::source::Source;
use crate::survey::{BlockSurvey, NormSurvey, Survey};
use crate::{CompressError, Result};
use std::collections::BTreeMap;
use trainyard_model::families::{EmbeddingScale, Gains, HeadsKind};
use trainyard_model::hf::config_json;
use trainyard_model::split::Cut;
use trainyard_model::{Model, ModelSpec, ParameterSpec};
use trainyard_tensor::DType;

/// The numbers to keep; None keeps all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Widths {
    /// Blocks.
    pub layers: Option<usize>,
    /// Channels of each MLP.
    pub ffn: Option<usize>,
    /// Query heads.
    pub heads: Option<usize>,
    /// Channels of the residual stream.
    pub hidden: Option<usize>,
}

/// The parts of a model that are kept. Numbers are those of the source, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Blocks.
    pub layers: Vec<usize>,
    /// Channels of the MLP of each of these blocks.
    pub ffn: Vec<Vec<usize>>,
    /// Query heads of each of these blocks.
    pub heads: Vec<Vec<usize>>,
    /// Key/value heads of each of these blocks.
    pub kv_heads: Vec<Vec<usize>>,
    /// Channels of the residual stream.
    pub hidden: Vec<usize>,
}

impl Widths {
    /// Checks that `spec` can be made so narrow and written, before anything runs.
    ///
    /// # Errors
    /// Numbers that are none of its sizes, or that its files cannot hold.
    pub fn check(&self, spec: &ModelSpec) -> Result<()> {
        if let Some(count) = self.layers {
            kept(&vec![0.0; spec.layers], count)?;
        }
        for (option, count, all, what) in [
            ("--ffn", self.ffn, spec.ffn_dim, "channels in each MLP"),
            ("--heads", self.heads, spec.heads, "query heads"),
            ("--hidden", self.hidden, spec.dim, "channels of the residual stream"),
        ] {
            match count {
                Some(count) if count == 0 || count > all => {
                    return refuse(format!("{option} {count} of a model with {all} {what}: keep from 1 to {all}"));
                }
                _ => {}
            }
        }
        self.head_shapes(spec).map(drop)
    }

    /// The numbers of key/value heads, and of query heads of each, that the kept model may have.
    fn head_shapes(&self, spec: &ModelSpec) -> Result<Vec<[usize; 2]>> {
        let count = self.heads.unwrap_or(spec.heads);
        let shapes = shapes(spec, count);
        let (able, why): (Vec<_>, Vec<_>) = shapes.iter().partition(|shape| self.fits(spec, **shape).is_ok());
        if !able.is_empty() {
            return Ok(able);
        }
        let head_dim = spec.head_dim;
        if spec.family.form().heads == HeadsKind::Plain {
            return refuse(format!(
                "heads of family {} are hidden / heads channels wide, {head_dim} here, so --heads N goes with --hidden \
                 {head_dim}N alone, such as --heads 1 --hidden {head_dim}; or prune --ffn or --layers only",
                spec.family
            ));
        }
        let fits = |count: &usize| self::shapes(spec, *count).iter().any(|shape| self.fits(spec, *shape).is_ok());
        let possible: Vec<String> = (1..=spec.heads).filter(fits).map(|count| count.to_string()).collect();
        let possible = match possible.is_empty() {
            true => "take another --hidden".to_owned(),
            false => format!("possible for --heads are {}", possible.join(", ")),
        };
        match why.first().map(|shape| self.fits(spec, *shape)) {
            Some(Err(why)) => {
                let hidden = self.hidden.map_or(String::new(), |hidden| format!(" with --hidden {hidden}"));
                refuse(format!("{count} query heads{hidden} cannot be written: {why}; {possible}"))
            }
            _ => refuse(format!(
                "--heads {count} of a model with {} query heads, {} on each of {} key/value heads: every one of these \
                 that is kept keeps the same number; {possible}",
                spec.heads,
                spec.heads / spec.kv_heads,
                spec.kv_heads
            )),
        }
    }

    /// Checks that a model with these heads can be built, and said by a `config.json`.
    fn fits(&self, spec: &ModelSpec, [kv_heads, queries]: [usize; 2]) -> Result<()> {
        let narrow = ModelSpec {
            kv_heads,
            heads: kv_heads * queries,
            ffn_dim: self.ffn.unwrap_or(spec.ffn_dim),
            dim: self.hidden.unwrap_or(spec.dim),
            ..spec.clone()
        };
        narrow.validate()?;
        config_json(&narrow, DType::F32).map(drop).map_err(|error| CompressError::Model(error.into()))
    }

    /// The most important parts of a model.
    ///
    /// # Errors
    /// As [`Widths::check`].
    pub fn choose(&self, spec: &ModelSpec, survey: &Survey) -> Result<Kept> {
        self.check(spec)?;
        let layers = match self.layers {
            Some(count) => kept(&survey.blocks.iter().map(|block| block.influence).collect::<Vec<_>>(), count)?,
            None => (0..spec.layers).collect(),
        };
        let blocks: Vec<_> = layers.iter().map(|layer| &survey.blocks[*layer]).collect();
        let mut stream = survey.head.sizes.clone();
        for block in &blocks {
            stream.iter_mut().zip(&block.stream).for_each(|(sum, size)| *sum += size);
        }
        let hidden = highest(&stream, self.hidden.unwrap_or(spec.dim));
        let ffn = blocks.iter().map(|block| highest(&block.ffn, self.ffn.unwrap_or(spec.ffn_dim))).collect();
        let all = spec.heads / spec.kv_heads;
        let of_shape = |shape: [usize; 2]| -> (f64, Vec<[Vec<usize>; 2]>) {
            let chosen: Vec<_> = blocks.iter().map(|block| groups(&block.heads, all, shape)).collect();
            let share = |(block, [heads, _]): (&&BlockSurvey, &[Vec<usize>; 2])| {
                let kept: f64 = heads.iter().map(|head| block.heads[*head]).sum();
                kept / block.heads.iter().sum::<f64>().max(f64::MIN_POSITIVE)
            };
            (blocks.iter().zip(&chosen).map(share).sum(), chosen)
        };
        let mut best: Option<(f64, Vec<[Vec<usize>; 2]>)> = None;
        for shape in self.head_shapes(spec)? {
            let found = of_shape(shape);
            if best.as_ref().is_none_or(|best| found.0 > best.0) {
                best = Some(found);
            }
        }
        let chosen = best.map_or(Vec::new(), |(_, chosen)| chosen);
        let (heads, kv_heads) = chosen.into_iter().map(|[heads, kv_heads]| (heads, kv_heads)).unzip();
        Ok(Kept { layers, ffn, heads, kv_heads, hidden })
    }
}

/// The pairs of groups and of queries of each that give `count` query heads, most groups first.
fn shapes(spec: &ModelSpec, count: usize) -> Vec<[usize; 2]> {
    let queries = spec.heads / spec.kv_heads;
    let groups = (1..=spec.kv_heads).rev().filter(|groups| count.is_multiple_of(*groups));
    groups.map(|groups| [groups, count / groups]).filter(|[_, each]| (1..=queries).contains(each)).collect()
}

/// The most important `queries` heads of each group of `all`, of the `count` most important groups:
/// query heads, and the groups.
fn groups(heads: &[f64], all: usize, [count, queries]: [usize; 2]) -> [Vec<usize>; 2] {
    let of_group = |group: &[f64]| highest(group, queries);
    let chosen: Vec<Vec<usize>> = heads.chunks_exact(all).map(of_group).collect();
    let sum = |(group, chosen): (&[f64], &Vec<usize>)| chosen.iter().map(|head| group[*head]).sum::<f64>();
    let sums: Vec<f64> = heads.chunks_exact(all).zip(&chosen).map(sum).collect();
    let kv_heads = highest(&sums, count);
    let queries = kv_heads.iter().flat_map(|group| chosen[*group].iter().map(move |head| group * all + head)).collect();
    [queries, kv_heads]
}

impl Kept {
    /// The description of the kept part of a model.
    ///
    /// # Errors
    /// Blocks that the model does not have.
    pub fn spec(&self, spec: &ModelSpec) -> Result<ModelSpec> {
        let first = |all: &[Vec<usize>], whole: usize| all.first().map_or(whole, Vec::len);
        Ok(ModelSpec {
            ffn_dim: first(&self.ffn, spec.ffn_dim),
            heads: first(&self.heads, spec.heads),
            kv_heads: first(&self.kv_heads, spec.kv_heads),
            dim: self.hidden.len(),
            ..shortened(spec, &self.layers)?
        })
    }
}

/// The kept part of a model, unit by unit.
pub struct Smaller<'a> {
    source: &'a Source,
    model: Model,
    kept: Kept,
    /// The factors of the gains of norms, by unit of this model and name.
    gains: BTreeMap<(usize, String), f64>,
}

impl<'a> Smaller<'a> {
    /// The part `kept` of `source`, which was measured by `survey`.
    ///
    /// # Errors
    /// Blocks that the model does not have; a model that cannot be built.
    pub fn new(source: &'a Source, survey: &Survey, kept: Kept) -> Result<Smaller<'a>> {
        let spec = source.spec();
        let model = Model::new(kept.spec(spec)?)?;
        let mut gains = BTreeMap::new();
        if kept.hidden.len() < spec.dim {
            let factor = |norm: &NormSurvey| {
                let (all, part): (f64, f64) =
                    (norm.shares.iter().sum(), kept.hidden.iter().map(|channel| norm.shares[*channel]).sum());
                let share = if all > 0.0 { part / all } else { 1.0 };
                (share * spec.dim as f64 / kept.hidden.len() as f64).sqrt()
            };
            for (block, layer) in kept.layers.iter().enumerate() {
                let norms = survey.blocks[*layer].norms.iter();
                gains.extend(norms.map(|(name, norm)| ((block + 1, format!("{name}.weight")), factor(norm))));
            }
            // A table that is scaled up where it is looked up and read by the head as it is.
            let head = if spec.tie_embeddings { 1.0 / table_factor(spec, &kept) } else { 1.0 };
            gains.insert((kept.layers.len() + 1, "norm.weight".to_owned()), head * factor(&survey.head));
        }
        Ok(Smaller { source, model, kept, gains })
    }

    /// Its units.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The kept parts.
    pub fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Fills in the values of unit `unit`, laid out for one shard.
    ///
    /// # Errors
    /// Files that cannot be read; parameters that do not lie on the dimensions of a decoder.
    pub fn read(&self, unit: usize, flat: &mut [f32]) -> Result<()> {
        let (kept, whole) = (&self.kept, self.source.model());
        let from = match unit {
            0 => 0,
            block if block <= kept.layers.len() => kept.layers[block - 1] + 1,
            _ => whole.units().len() - 1,
        };
        let values = self.source.unit(from)?;
        let (old, new) = (whole.layout(from, 1), self.model.layout(unit, 1));
        for (index, spec) in whole.units()[from].parameters().iter().enumerate() {
            let Some([rows, columns]) = self.places(unit, spec) else {
                return refuse(format!(
                    "{} cannot be made narrower yet: leave out --ffn, --heads and --hidden",
                    spec.name
                ));
            };
            let to = &mut flat[new.range(index)];
            if to.len() != rows.len() * columns.len() {
                return refuse(format!("{} has another shape than the part of it that is kept", spec.name));
            }
            let (width, from) = (spec.row_elements(), &values[old.range(index)]);
            for (to, row) in to.chunks_exact_mut(columns.len()).zip(rows) {
                let row = &from[row * width..][..width];
                match columns.len() == width {
                    true => to.copy_from_slice(row),
                    false => to.iter_mut().zip(&columns).for_each(|(to, column)| *to = row[*column]),
                }
            }
            self.scale(unit, &spec.name, &mut flat[new.range(index)]);
        }
        Ok(())
    }

    /// The rows and columns of a parameter of unit `unit` that are kept; None of one that does not
    /// lie on the dimensions of a decoder without experts. One dimension has rows alone.
    fn places(&self, unit: usize, parameter: &ParameterSpec) -> Option<[Vec<usize>; 2]> {
        let (spec, kept) = (self.source.spec(), &self.kept);
        let block = unit.checked_sub(1).filter(|block| *block < kept.layers.len());
        let of = |all: &[Vec<usize>]| block.map_or(Vec::new(), |block| all[block].clone());
        let [queries, keys] = [&kept.heads, &kept.kv_heads].map(|heads| channels(&of(heads), spec.head_dim));
        let (ffn, hidden) = (of(&kept.ffn), kept.hidden.clone());
        let (rows, columns) = (parameter.shape[0], parameter.row_elements());
        let is_matrix = parameter.shape.len() > 1;
        let every = |count: usize| (0..count).collect::<Vec<usize>>();
        let across = if is_matrix { hidden.clone() } else { every(1) };
        let below = |parts: &[(usize, &[usize])]| -> Vec<usize> {
            parts.iter().flat_map(|(first, rows)| rows.iter().map(move |row| first + row)).collect()
        };
        Some(match spec.family.row(&parameter.name)?.cut {
            Cut::VocabularyRows => [every(rows), across],
            Cut::Residual if is_matrix => [every(rows), across],
            Cut::Residual => [hidden, across],
            Cut::EachHead => [every(rows), every(columns)],
            Cut::HeadRows => {
                let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
                [below(&[(0, &queries), (q, &keys), (q + kv, &keys)]), across]
            }
            Cut::AllHeads if parameter.name == "attn.k_norm.weight" => [keys, across],
            Cut::AllHeads => [queries, across],
            Cut::HeadColumns => [hidden, queries],
            Cut::GateUpRows if spec.gates() => [below(&[(0, &ffn), (spec.ffn_dim, &ffn)]), across],
            Cut::GateUpRows | Cut::FfnRows => [ffn, across],
            Cut::FfnColumns => [hidden, ffn],
            _ => return None,
        })
    }

    /// Makes up for the channels that a norm or the token table has lost.
    fn scale(&self, unit: usize, name: &str, values: &mut [f32]) {
        let spec = self.source.spec();
        let table = table_factor(spec, &self.kept);
        if name == "tokens.weight" && table != 1.0 {
            values.iter_mut().for_each(|value| *value = (f64::from(*value) * table) as f32);
        }
        let Some(factor) = self.gains.get(&(unit, name.to_owned())) else { return };
        let one = match spec.family.form().gains {
            Gains::Weight => 0.0,
            Gains::OnePlusWeight => 1.0,
        };
        values.iter_mut().for_each(|value| *value = ((one + f64::from(*value)) * factor - one) as f32);
    }
}

/// The factor of the token table where what is looked up is multiplied by the root of the width.
fn table_factor(spec: &ModelSpec, kept: &Kept) -> f64 {
    match spec.family.form().embedding {
        EmbeddingScale::One => 1.0,
        EmbeddingScale::SqrtDim => (spec.dim as f64 / kept.hidden.len() as f64).sqrt(),
    }
}

/// The channels of heads of `width` each.
fn channels(heads: &[usize], width: usize) -> Vec<usize> {
    heads.iter().flat_map(|head| head * width..(head + 1) * width).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_model::families::{self, Sizes};

    #[test]
    fn groups_keep_one_shape_and_their_best_heads() {
        let heads = [1.0, 5.0, 2.0, 3.0, 9.0, 0.0];
        assert_eq!(groups(&heads, 2, [3, 1]), [vec![1, 3, 4], vec![0, 1, 2]]);
        assert_eq!(groups(&heads, 2, [2, 1]), [vec![1, 4], vec![0, 2]]);
        assert_eq!(groups(&heads, 2, [2, 2]), [vec![0, 1, 4, 5], vec![0, 2]]);
        assert_eq!(groups(&heads, 1, [2, 1]), [vec![1, 4], vec![1, 4]]);
        let spec = ModelSpec { kv_heads: 4, ..ModelSpec::llama(8, 24, 1, 12, 8, 8) };
        assert_eq!(shapes(&spec, 6), [[3, 2], [2, 3]]);
        assert_eq!(shapes(&spec, 4), [[4, 1], [2, 2]]);
        assert!(shapes(&spec, 7).is_empty() && shapes(&spec, 0).is_empty());
    }

    #[test]
    fn numbers_that_cannot_be_kept_are_refused() {
        let sizes = Sizes { vocab_size: 50, dim: 48, layers: 2, heads: 12, max_positions: 16 };
        let usual = |family: families::Family, kv_heads: usize| ModelSpec { kv_heads, ..family.usual(&sizes) };
        let said = |widths: Widths, spec: &ModelSpec| match widths.check(spec) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        };
        let (llama, gpt2, gemma) = (usual(families::LLAMA, 4), usual(families::GPT2, 12), usual(families::GEMMA3, 12));
        let none = Widths::default();
        for (widths, spec, says) in [
            (Widths { ffn: Some(0), ..none }, &llama, "--ffn 0 of a model with 128 channels in each MLP"),
            (Widths { ffn: Some(129), ..none }, &llama, "keep from 1 to 128"),
            (Widths { hidden: Some(49), ..none }, &llama, "keep from 1 to 48"),
            (Widths { heads: Some(13), ..none }, &llama, "keep from 1 to 12"),
            (Widths { heads: Some(7), ..none }, &llama, "possible for --heads are 1, 2, 3, 4, 6, 8, 9, 12"),
            (Widths { layers: Some(2), ..none }, &llama, "--layers 2 of a model with 2 blocks"),
            (Widths { heads: Some(6), ..none }, &gpt2, "such as --heads 1 --hidden 4"),
            (Widths { hidden: Some(24), ..none }, &gpt2, "--heads N goes with --hidden 4N"),
            (Widths { heads: Some(5), ..none }, &gemma, "possible for --heads are 1, 2, 3, 4, 6, 8, 12"),
            (Widths { hidden: Some(25), ..none }, &gemma, "with --hidden 25 cannot be written"),
        ] {
            let found = said(widths, spec);
            assert!(found.contains(says), "{widths:?}: {found}");
        }
        for (widths, spec) in [
            (Widths { heads: Some(6), hidden: Some(24), ffn: Some(3), layers: Some(1) }, &gpt2),
            (Widths { heads: Some(5), ..none }, &usual(families::LLAMA, 12)),
            (Widths { heads: Some(12), hidden: Some(48), ffn: Some(128), layers: None }, &llama),
        ] {
            assert_eq!(said(widths, spec), "", "{widths:?}");
        }
    }
}
