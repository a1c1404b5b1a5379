//! One way through a model that measures how much each of its parts does on calibration sequences:
//! blocks, channels of MLPs, heads, channels of the residual stream. [`crate::depth`] and
//! [`crate::width`] choose by these measures what to keep.
//!
//! The importance of a channel of an MLP is the norm of its values over all tokens, and that of a
//! channel of the residual stream the norm of its values behind each norm, summed over norms
//! (Muralidharan et al. 2024, section 2.2, the L2 norm over batch and sequence). A channel of an
//! MLP that the down projection reads with zeros has none. The importance of a head is the size of
//! what it adds to the output: the root of the sum over its channels of the square of the norm of
//! their values times the norm of the output projection's column (the measure of Sun et al. 2023
//! for weights, over columns). All are measured in the model as it came. `docs/LOG.md` compares
//! these with each other.

use crate::Result;
use crate::awq::ranges;
use crate::depth::cosine;
use crate::inputs::{Inputs, Needs};
use crate::pass::cpu_of;
use crate::source::{Source, store};
use crate::text::Sequences;
use std::ops::Range;
use trainyard_autograd::ParamId;
use trainyard_model::ParameterSpec;
use trainyard_model::families::{Gains, NormKind};
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::cpu::gemm::{Epilogue, MatMut, MatRef, forward};
use trainyard_tensor::{Device, Tensor};

/// The measures of a model.
#[derive(Clone, Debug)]
pub struct Survey {
    /// Those of each block.
    pub blocks: Vec<BlockSurvey>,
    /// Behind the last norm, which the head reads.
    pub(crate) head: NormSurvey,
}

/// The measures of a block.
#[derive(Clone, Debug)]
pub struct BlockSurvey {
    /// `1 - cos(x, y)` of its input and output, averaged over tokens.
    pub influence: f64,
    /// The importance of each channel of its MLP.
    pub ffn: Vec<f64>,
    /// That of each query head.
    pub heads: Vec<f64>,
    /// Its norms of the residual stream, by their names.
    pub(crate) norms: Vec<(&'static str, NormSurvey)>,
    /// The importance of each channel of the residual stream to it.
    pub(crate) stream: Vec<f64>,
}

/// The measures of a norm of the residual stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct NormSurvey {
    /// The norm of each channel behind it.
    pub sizes: Vec<f64>,
    /// The share of each channel in the square of the normed vector, averaged over tokens.
    pub shares: Vec<f64>,
}

/// The parts of a block: the norm in front of a product, the product, and the norm behind it.
const PRODUCTS: [(Option<&str>, &str, Option<&str>); 4] = [
    (Some("norm1"), "attn.qkv", None),
    (None, "attn.out", Some("post_norm1")),
    (Some("norm2"), "mlp.up", None),
    (None, "mlp.down", Some("post_norm2")),
];

impl Survey {
    /// Measures `source` on `sequences`.
    ///
    /// # Errors
    /// Errors of reading and of the units.
    pub fn of(source: &Source, device: &Device, sequences: &mut Sequences) -> Result<Survey> {
        let model = source.model();
        let last = model.units().len() - 1;
        let mut blocks = Vec::new();
        for unit in 0..last {
            let flat = source.unit(unit)?;
            let store = store(device, model, unit, &flat, |unit| source.unit(unit))?;
            if unit > 0 {
                let mut sums = BlockSums::new(source, unit, &flat, cpu_of(device)?);
                let (mut turned, mut rows, mut failed) = (0.0, 0usize, None);
                let each = |x: &Tensor, y: &Tensor| -> Result<()> {
                    let width = x.last_dim();
                    for (x, y) in x.data::<f32>()?.chunks_exact(width).zip(y.data::<f32>()?.chunks_exact(width)) {
                        turned += 1.0 - cosine(x, y);
                        rows += 1;
                    }
                    Ok(())
                };
                let mut observe = |id: ParamId, input: &Tensor| {
                    if id.unit as usize == unit {
                        failed = failed.take().or(sums.add(id.index as usize, input).err());
                    }
                    Ok(())
                };
                sequences.look(model, unit, &store, &mut observe, each)?;
                failed.map_or(Ok(()), Err)?;
                blocks.push(sums.finish(turned / rows.max(1) as f64));
            }
            sequences.advance(model, unit, &store)?;
        }
        Ok(Survey { blocks, head: head(source, last, sequences)? })
    }
}

/// The sums over the inputs and outputs of the products of a block.
struct BlockSums<'a> {
    source: &'a Source,
    unit: usize,
    flat: &'a [f32],
    ranges: Vec<Range<usize>>,
    cpu: &'a Cpu,
    /// Those of the inputs of [`PRODUCTS`].
    inputs: Vec<Inputs>,
    /// The sums of the shares of channels of the norms in front of them and behind them.
    shares: Vec<Vec<f64>>,
}

impl<'a> BlockSums<'a> {
    fn new(source: &'a Source, unit: usize, flat: &'a [f32], cpu: &'a Cpu) -> BlockSums<'a> {
        let ranges = ranges(source.model(), unit);
        let mut sums = BlockSums { source, unit, flat, ranges, cpu, inputs: Vec::new(), shares: Vec::new() };
        for (_, product, _) in PRODUCTS {
            let columns = sums.named(&format!("{product}.weight")).map_or(0, |(spec, _)| spec.row_elements());
            sums.inputs.push(Inputs::new(columns, Needs::Norms));
        }
        sums.shares = vec![vec![0.0; source.spec().dim]; PRODUCTS.len()];
        sums
    }

    fn parameters(&self) -> &'a [ParameterSpec] {
        self.source.model().units()[self.unit].parameters()
    }

    /// A parameter and its values, if the block has it.
    fn named(&self, name: &str) -> Option<(&'a ParameterSpec, &'a [f32])> {
        let index = self.parameters().iter().position(|parameter| parameter.name == name)?;
        Some((&self.parameters()[index], &self.flat[self.ranges[index].clone()]))
    }

    /// Adds the input of the product with the weight `index`.
    fn add(&mut self, index: usize, input: &Tensor) -> Result<()> {
        let name = self.parameters()[index].name.strip_suffix(".weight");
        let Some(place) = PRODUCTS.iter().position(|(_, product, _)| Some(*product) == name) else { return Ok(()) };
        let (before, product, after) = PRODUCTS[place];
        self.inputs[place].add(self.cpu, input)?;
        let values = input.data::<f32>()?;
        if let Some((gain, bias)) = before.and_then(|norm| self.gain(norm)) {
            let normed = |channel: usize, x: f32| match gain[channel] {
                0.0 => 0.0,
                gain => (f64::from(x) - bias.map_or(0.0, |bias| f64::from(bias[channel]))) / gain,
            };
            add_shares(&mut self.shares[place], values, normed);
        }
        let (Some(_), Some((spec, weight))) =
            (after.and_then(|norm| self.gain(norm)), self.named(&format!("{product}.weight")))
        else {
            return Ok(());
        };
        let (rows, width, columns) = (input.rows(), spec.shape[0], spec.row_elements());
        let mut output = vec![0.0f32; rows * width];
        let (x, w) = (MatRef::new(values, rows, columns), MatRef::new(weight, width, columns));
        forward(self.cpu, x, w.into(), Epilogue::<f32>::default(), MatMut::new(&mut output, rows, width));
        let bias = self.named(&format!("{product}.bias"));
        let whole = |channel: usize, y: f32| f64::from(y + bias.map_or(0.0, |(_, bias)| bias[channel]));
        add_shares(&mut self.shares[place], &output, whole);
        Ok(())
    }

    /// The gains of the norm called `name`, if the block has it, and its bias, if that has one.
    fn gain(&self, name: &str) -> Option<(Vec<f64>, Option<&'a [f32]>)> {
        let (_, weight) = self.named(&format!("{name}.weight"))?;
        let gains = gains(self.source, weight);
        Some((gains, self.named(&format!("{name}.bias")).map(|(_, bias)| bias)))
    }

    fn finish(self, influence: f64) -> BlockSurvey {
        // The norms of the inputs of a product, and of the columns that read them.
        let norms_of = |place: usize| -> Vec<(f64, f64)> {
            let (_, product, _) = PRODUCTS[place];
            let Some((spec, weight)) = self.named(&format!("{product}.weight")) else { return Vec::new() };
            self.inputs[place].norms().into_iter().zip(column_norms(weight, spec.row_elements())).collect()
        };
        let of_head = |channels: &[(f64, f64)]| {
            channels.iter().map(|(input, column)| (input * column).powi(2)).sum::<f64>().sqrt()
        };
        let heads = norms_of(1).chunks_exact(self.source.spec().head_dim).map(of_head).collect();
        let of_channel = |(input, column)| if column > 0.0 { input } else { 0.0 };
        let ffn = norms_of(3).into_iter().map(of_channel).collect();
        let mut stream = vec![0.0; self.source.spec().dim];
        let mut norms = Vec::new();
        for (place, (before, _, after)) in PRODUCTS.into_iter().enumerate() {
            let sizes = self.inputs[place].norms();
            // What attention and the MLP read of the stream, behind a norm or as it is.
            if after.is_none() {
                stream.iter_mut().zip(&sizes).for_each(|(sum, size)| *sum += size);
            }
            if let Some(name) = before.or(after).filter(|norm| self.named(&format!("{norm}.weight")).is_some()) {
                norms.push((name, NormSurvey { sizes, shares: self.shares[place].clone() }));
            }
        }
        BlockSurvey { influence, ffn, heads, norms, stream }
    }
}

/// The measures of the norm of the head, unit `unit`.
fn head(source: &Source, unit: usize, sequences: &Sequences) -> Result<NormSurvey> {
    let (spec, flat) = (source.spec(), source.unit(unit)?);
    let named = |name: &str| source.model().units()[unit].parameters().iter().position(|p| p.name == name);
    let ranges = ranges(source.model(), unit);
    let weight = named("norm.weight").map_or(Vec::new(), |index| gains(source, &flat[ranges[index].clone()]));
    let (mut squares, mut shares) = (vec![0.0; spec.dim], vec![0.0; spec.dim]);
    for hidden in sequences.hidden() {
        let mut rows = hidden.data::<f32>()?.to_vec();
        if spec.family.form().norm == NormKind::Layer {
            for row in rows.chunks_exact_mut(spec.dim) {
                let mean = row.iter().sum::<f32>() / spec.dim as f32;
                row.iter_mut().for_each(|x| *x -= mean);
            }
        }
        add_shares(&mut shares, &rows, |_, x| f64::from(x));
    }
    // The square of a normed vector is its length.
    for ((square, share), gain) in squares.iter_mut().zip(&shares).zip(weight) {
        *square = share * spec.dim as f64 * gain * gain;
    }
    Ok(NormSurvey { sizes: squares.into_iter().map(f64::sqrt).collect(), shares })
}

/// The gains of a norm with these weights.
fn gains(source: &Source, weight: &[f32]) -> Vec<f64> {
    let one = match source.spec().family.form().gains {
        Gains::Weight => 0.0,
        Gains::OnePlusWeight => 1.0,
    };
    weight.iter().map(|weight| one + f64::from(*weight)).collect()
}

/// Adds the share of each channel in the square of each row of `of(channel, value)`.
fn add_shares(shares: &mut [f64], values: &[f32], of: impl Fn(usize, f32) -> f64) {
    let mut squares = vec![0.0; shares.len()];
    for row in values.chunks_exact(shares.len()) {
        squares.iter_mut().zip(row).enumerate().for_each(|(j, (square, x))| *square = of(j, *x).powi(2));
        let all: f64 = squares.iter().sum();
        if all > 0.0 {
            shares.iter_mut().zip(&squares).for_each(|(share, square)| *share += square / all);
        }
    }
}

/// The norms of the columns of a matrix of rows of `width`.
fn column_norms(weights: &[f32], width: usize) -> Vec<f64> {
    let mut squares = vec![0.0; width];
    for row in weights.chunks_exact(width) {
        squares.iter_mut().zip(row).for_each(|(sum, w)| *sum += f64::from(*w).powi(2));
    }
    squares.into_iter().map(f64::sqrt).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_rows_and_norms_of_columns() {
        let mut shares = vec![0.0; 2];
        add_shares(&mut shares, &[3.0, 4.0, 0.0, 0.0, 1.0, 0.0], |_, x| f64::from(x));
        assert!((shares[0] - 1.36).abs() < 1e-12 && (shares[1] - 0.64).abs() < 1e-12, "{shares:?}");
        assert_eq!(column_norms(&[3.0, 1.0, 4.0, 0.0], 2), [5.0, 1.0]);
    }
}
