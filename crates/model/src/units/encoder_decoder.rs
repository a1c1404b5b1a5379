//! The blocks of an encoder and of a decoder that reads what the encoder made (Raffel et al. 2020):
//! T5's.
//!
//! The units of a model are one chain, so both sides travel in one matrix: the rows of all
//! encoders' sequences, then those of all decoders' ([`Sides`]). A block works on the rows of its
//! side and hands the others on as they are. What the last block of the encoder leaves stays until
//! the head, and every block of the decoder reads it.
//!
//! Positions enter by a number for each head and bucket of distances, which is added to scores of
//! self-attention. All blocks of a side have the same numbers: they are parameters of the
//! embedding, which blocks borrow.

use super::block::{Dense, Linear, activation};
use super::embedding::Embedding;
use super::norm::Norm;
use crate::batch::Sides;
use crate::families::{Parameters, normal};
use crate::parameter::{Init, ParameterKind, ParameterSpec};
use crate::spec::{EncoderSpec, ModelSpec};
use crate::unit::{Forward, Unit, require_input};
use crate::{ModelError, Result};
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_tensor::DType;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::ops::plain::Indices;

/// A block of the encoder or of the decoder.
#[derive(Debug)]
pub struct SideBlock {
    name: String,
    parameters: Vec<ParameterSpec>,
    /// The table of distances, which it borrows.
    bias: [ParamId; 1],
    buckets: Buckets,
    norm1: Norm,
    qkv: Linear,
    out: Linear,
    attention: AttentionSpec,
    /// None in the encoder.
    cross: Option<Cross>,
    norm2: Norm,
    mlp: Dense,
    /// The norm of what the encoder made, on its last block.
    last_norm: Option<Norm>,
    dropout: f32,
    /// The number of the block in its side.
    layer: usize,
}

/// Attention over what the encoder made.
#[derive(Debug)]
struct Cross {
    norm: Norm,
    q: Linear,
    /// Keys, then values.
    kv: Linear,
    out: Linear,
}

/// The buckets of distances.
#[derive(Clone, Copy, Debug)]
struct Buckets {
    count: usize,
    max_distance: usize,
    /// True if keys behind the query have buckets of their own; otherwise it does not see them.
    both_ways: bool,
}

impl Buckets {
    /// The bucket of a key `ahead` positions behind the query, before it if negative. Half of the
    /// buckets of a direction are single distances, the others grow with the logarithm up to
    /// `max_distance` (Raffel et al. 2020, section 2.1). The arithmetic is that of f32, in which
    /// the published models were trained.
    fn of(&self, ahead: isize) -> i32 {
        let (count, first, distance) = match self.both_ways {
            true => (self.count / 2, if ahead > 0 { self.count / 2 } else { 0 }, ahead.unsigned_abs()),
            false => (self.count, 0, (-ahead).max(0) as usize),
        };
        let exact = count / 2;
        if distance < exact {
            return (first + distance) as i32;
        }
        let share = (distance as f32 / exact as f32).ln() / (self.max_distance as f64 / exact as f64).ln() as f32;
        let grown = exact + (share * (count - exact) as f32) as usize;
        (first + grown.min(count - 1)) as i32
    }

    /// The buckets of distances `reach - 1` before the query to as many behind it, in the order of
    /// [`Tape::biased_attention`].
    fn of_all(&self, reach: usize) -> Vec<i32> {
        let reach = reach as isize;
        (1 - reach..reach).map(|distance| self.of(-distance)).collect()
    }
}

impl SideBlock {
    /// Block `layer` of `spec`, unit `layer + 1`.
    pub fn new(spec: &ModelSpec, encoder: &EncoderSpec, layer: usize) -> SideBlock {
        let decodes = layer >= encoder.layers;
        let of_side = if decodes { layer - encoder.layers } else { layer };
        let mut parameters = Parameters::new(spec, layer as u32 + 1, of_side);
        let side = if decodes { "decoder." } else { "" };
        let ModelSpec { dim, ffn_dim, heads, head_dim, .. } = *spec;
        let width = heads * head_dim;
        let root = |width: usize| spec.init_std / (width as f64).sqrt();
        // Scores are not divided by the root of the width of heads, so queries begin smaller.
        let queries = root(dim * head_dim) as f32;
        let qkv_init = Init::NormalRows { first: width, stds: [queries, root(dim) as f32] };
        let mut matrix = |name: &str, shape: [usize; 2], init: Init| Linear {
            weight: parameters.add(name, &shape, init, ParameterKind::Matrix),
            bias: None,
        };
        let qkv = matrix(&format!("{side}attn.qkv.weight"), [3 * width, dim], qkv_init);
        let out = matrix(&format!("{side}attn.out.weight"), [dim, width], normal(root(width)));
        let cross = decodes.then(|| {
            [
                matrix("cross.q.weight", [width, dim], Init::Normal { std: queries }),
                matrix("cross.kv.weight", [2 * width, dim], normal(root(dim))),
                matrix("cross.out.weight", [dim, width], normal(root(width))),
            ]
        });
        let gated = spec.gates();
        let (up, rows) = if gated { ("mlp.gate_up.weight", 2 * ffn_dim) } else { ("mlp.up.weight", ffn_dim) };
        let up = matrix(&format!("{side}{up}"), [rows, dim], normal(root(dim)));
        let down = matrix(&format!("{side}mlp.down.weight"), [dim, ffn_dim], normal(root(ffn_dim)));
        let norm1 = Norm::new(&mut parameters, &format!("{side}norm1"));
        let cross = cross.map(|[q, kv, out]| Cross { norm: Norm::new(&mut parameters, "cross.norm"), q, kv, out });
        let norm2 = Norm::new(&mut parameters, &format!("{side}norm2"));
        let last_norm = (layer + 1 == encoder.layers).then(|| Norm::new(&mut parameters, "last_norm"));
        SideBlock {
            name: format!("block.{layer}"),
            parameters: parameters.finish(),
            bias: [if decodes { Embedding::DECODER_BIAS } else { Embedding::ENCODER_BIAS }],
            buckets: Buckets { count: encoder.buckets, max_distance: encoder.max_distance, both_ways: !decodes },
            norm1,
            qkv,
            out,
            attention: AttentionSpec {
                causal: decodes,
                scale: spec.attention_scalar.map_or(1.0, |scalar| scalar.sqrt().recip() as f32),
                ..AttentionSpec::causal(heads, heads, head_dim)
            },
            cross,
            norm2,
            mlp: Dense { up, gated, activation: activation(spec.activation), down },
            last_norm,
            dropout: spec.dropout as f32,
            layer: of_side,
        }
    }

    /// The numbers of distances up to `reach` for each head: f32 [h, 2 reach - 1].
    fn distances(&self, tape: &mut Tape<'_>, reach: usize) -> Result<Var> {
        let buckets = Indices::of_host(tape.device(), &self.buckets.of_all(reach), self.buckets.count)?;
        let table = tape.param(self.bias[0])?;
        let table = tape.cast(&table, DType::F32)?;
        Ok(tape.index_select(&table, 1, &buckets)?)
    }

    /// `x + dropout(linear(h))`
    fn rejoin(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, linear: Linear, h: &Var, x: &Var) -> Result<Var> {
        if self.dropout == 0.0 || !cx.training {
            return linear.forward(tape, h, Activation::None, Some(x));
        }
        let y = linear.forward(tape, h, Activation::None, None)?;
        let y = tape.dropout(&y, self.dropout, true)?;
        Ok(tape.add(x, &y)?)
    }

    /// `x + attention(norm(x))` of the rows of this side.
    fn attend(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, sides: &Sides, x: &Var) -> Result<Var> {
        let h = self.norm1.forward(tape, x)?;
        let qkv = self.qkv.forward(tape, &h, Activation::None, None)?;
        drop(h);
        let cached = cx.cache.as_deref_mut().filter(|_| self.cross.is_some());
        let heads = if let Some(cache) = cached {
            let bias = self.distances(tape, cache.len() + qkv.tensor().rows())?;
            let out = cache.attend_biased(self.layer, qkv.tensor(), bias.tensor(), &self.attention)?;
            tape.constant(out)
        } else {
            let segments = if self.cross.is_some() { &sides.decoder } else { &sides.encoder };
            let bias = self.distances(tape, segments.longest())?;
            tape.biased_attention(&qkv, &bias, self.attention, segments)?
        };
        drop(qkv);
        self.rejoin(tape, cx, self.out, &heads, x)
    }

    /// `x + attention(norm(x), what the encoder made)`
    fn read(
        &self,
        tape: &mut Tape<'_>,
        cx: &mut Forward<'_>,
        cross: &Cross,
        sides: &Sides,
        [encoded, x]: [&Var; 2],
    ) -> Result<Var> {
        let h = cross.norm.forward(tape, x)?;
        let q = cross.q.forward(tape, &h, Activation::None, None)?;
        drop(h);
        let spec = AttentionSpec { causal: false, ..self.attention };
        let cached = cx.cache.as_deref_mut();
        let (kv, segments) = match cached {
            Some(cache) => {
                if sides.encoder_rows > 0 {
                    let kv = cross.kv.forward(tape, encoded, Activation::None, None)?;
                    cache.remember(self.layer, kv.into_tensor());
                }
                let kv = cache.remembered(self.layer)?.clone();
                let segments = sides.over(kv.rows())?;
                (tape.constant(kv), segments)
            }
            None => (cross.kv.forward(tape, encoded, Activation::None, None)?, sides.cross.clone()),
        };
        let heads = tape.cross_attention(&q, &kv, spec, &segments)?;
        drop((q, kv));
        self.rejoin(tape, cx, cross.out, &heads, x)
    }
}

impl Unit for SideBlock {
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn borrowed(&self) -> &[ParamId] {
        &self.bias
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var> {
        let input = require_input(&self.name, input)?;
        let sides = cx.batch.sides()?;
        let (rows, all) = (sides.encoder_rows, input.tensor().rows());
        if self.cross.is_none() && rows == 0 {
            // Generation goes on after the encoder has run.
            return Ok(input.clone());
        }
        // Generation after its first token has rows of the decoder alone.
        let encoded = if rows > 0 { Some(tape.narrow(input, 0, 0, rows)?) } else { None };
        let decoded = tape.narrow(input, 0, rows, all - rows)?;
        let x = match (&self.cross, &encoded) {
            (None, Some(encoded)) => self.attend(tape, cx, sides, encoded)?,
            (None, None) => return Err(ModelError::Batch("a block of the encoder without its rows".into())),
            (Some(cross), _) => {
                let x = self.attend(tape, cx, sides, &decoded)?;
                self.read(tape, cx, cross, sides, [encoded.as_ref().unwrap_or(&x), &x])?
            }
        };
        let h = self.norm2.forward(tape, &x)?;
        let h = self.mlp.widen(tape, h)?;
        let mut y = self.rejoin(tape, cx, self.mlp.down, &h, &x)?;
        drop((h, x));
        if let Some(norm) = &self.last_norm {
            y = norm.forward(tape, &y)?;
        }
        Ok(match (&self.cross, &encoded) {
            (None, _) => tape.cat(&[&y, &decoded], 0)?,
            (Some(_), Some(encoded)) => tape.cat(&[encoded, &y], 0)?,
            (Some(_), None) => y,
        })
    }
}

#[cfg(test)]
mod tests {
    //! Buckets against those of transformers 5.24, `T5Attention._relative_position_bucket` in f32.
    use super::*;

    #[test]
    fn buckets_are_those_of_the_published_models() {
        let encoder = Buckets { count: 32, max_distance: 128, both_ways: true };
        let found: Vec<i32> = [0, 1, 7, 8, 11, 12, 16, 23, 32, 64, 91, 127, 128, 500].map(|d| encoder.of(-d)).into();
        assert_eq!(found, [0, 1, 7, 8, 8, 9, 10, 11, 12, 14, 15, 15, 15, 15]);
        let behind: Vec<i32> = [1, 8, 128].map(|d| encoder.of(d)).into();
        assert_eq!(behind, [17, 24, 31]);
        let decoder = Buckets { both_ways: false, ..encoder };
        let found: Vec<i32> = [-3, 0, 1, 15, 16, 20, 32, 64, 127, 128, 900].map(|d| decoder.of(-d)).into();
        assert_eq!(found, [0, 0, 1, 15, 16, 17, 21, 26, 31, 31, 31]);
    }
}
