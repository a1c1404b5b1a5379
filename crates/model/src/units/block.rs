//! A transformer block (Vaswani et al. 2017) with the norms before its halves:
//! `x + attention(norm(x))`, then `x + mlp(norm(x))`.

use super::experts::Experts;
use super::norm::Norm;
use crate::Result;
use crate::families::{MlpKind, Parameters};
use crate::parameter::{Init, ParameterKind, ParameterSpec};
use crate::rope::RopeTables;
use crate::spec::{self, ModelSpec};
use crate::split::{Division, TensorSplit};
use crate::unit::{
    Exchange, Forward, Segment, Segments, Unit, Value, in_segments, no_segment, require_input, without_segments,
};
use std::sync::Arc;
use trainyard_autograd::functions::LinearOptions;
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_program::Layout;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::ops::HeadLayout;

/// One block.
#[derive(Debug)]
pub struct Block {
    name: String,
    layer: usize,
    parameters: Vec<ParameterSpec>,
    norm: [Norm; 2],
    qkv: Linear,
    /// Gains of the query and of the key norm, and their epsilon.
    qk_norm: Option<(ParamId, ParamId, f32)>,
    rope: Option<Arc<RopeTables>>,
    heads: HeadLayout,
    attention: AttentionSpec,
    out: Linear,
    mlp: Mlp,
    dropout: f32,
    split: Option<SplitBlock>,
}

/// The part of a block that is one rank's.
#[derive(Debug)]
struct SplitBlock {
    place: TensorSplit,
    dim: usize,
    segments: Segments,
}

/// A weight [out, in] with, perhaps, a bias.
#[derive(Clone, Copy, Debug)]
struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
}

#[derive(Debug)]
enum Mlp {
    /// Without an activation `up` gives [m, 2 f], gate first; with one it gives [m, f] and applies
    /// it.
    Dense { up: Linear, activation: Option<Activation>, down: Linear },
    /// A mixture of experts.
    Experts(Experts),
}

impl Block {
    /// Block `layer` of `spec`, unit `layer + 1`. `rope` are the tables that blocks share.
    pub fn new(spec: &ModelSpec, layer: usize, rope: Option<Arc<RopeTables>>) -> Block {
        let mut parameters = Parameters::new(spec, layer as u32 + 1, layer);
        let ModelSpec { dim, ffn_dim, head_dim, .. } = *spec;
        let (q, kv) = (spec.heads * head_dim, spec.kv_heads * head_dim);

        let norm1 = Norm::new(&mut parameters, "norm1");
        let qkv = Linear {
            weight: parameters.matrix("attn.qkv.weight", [q + 2 * kv, dim]),
            bias: parameters.bias(spec.qkv_bias, "attn.qkv.bias", q + 2 * kv),
        };
        let qk_norm = spec.qk_norm.then(|| {
            let mut gain = |name: &str| parameters.add(name, &[head_dim], Init::Ones, ParameterKind::Norm);
            (gain("attn.q_norm.weight"), gain("attn.k_norm.weight"), spec.norm_eps as f32)
        });
        let out = Linear {
            weight: parameters.residual_matrix("attn.out.weight", [dim, q]),
            bias: parameters.bias(spec.o_bias, "attn.out.bias", dim),
        };
        let experts = spec.experts_of(layer);
        let down = experts.is_none().then(|| Linear {
            weight: parameters.residual_matrix("mlp.down.weight", [dim, ffn_dim]),
            bias: parameters.bias(spec.mlp_bias, "mlp.down.bias", dim),
        });
        let norm2 = Norm::new(&mut parameters, "norm2");
        let (activation, rows) = match spec.family.form().mlp {
            MlpKind::Gated => (None, 2 * ffn_dim),
            MlpKind::Plain => (Some(activation(spec.activation)), ffn_dim),
        };
        let mlp = match (experts, down) {
            (Some(experts), _) => Mlp::Experts(Experts::new(&mut parameters, experts)),
            (None, Some(down)) => {
                let weight = parameters.matrix("mlp.up.weight", [rows, dim]);
                let up = Linear { weight, bias: parameters.bias(spec.mlp_bias, "mlp.up.bias", rows) };
                Mlp::Dense { up, activation, down }
            }
            (None, None) => unreachable!("a block without experts has its MLP"),
        };

        Block {
            name: format!("block.{layer}"),
            layer,
            parameters: parameters.finish(),
            norm: [norm1, norm2],
            qkv,
            qk_norm,
            rope,
            heads: HeadLayout { heads: spec.heads, kv_heads: spec.kv_heads, head_dim },
            attention: AttentionSpec {
                window: spec.window(layer),
                ..AttentionSpec::causal(spec.heads, spec.kv_heads, head_dim)
            },
            out,
            mlp,
            dropout: spec.dropout as f32,
            split: None,
        }
    }

    /// The part of one rank of a tensor-parallel group. A rank computes its heads and its columns
    /// of the MLP; the products that end these give summands of the residual stream.
    pub fn split(mut self, division: &Division) -> Result<Block> {
        let place = division.split();
        self.split = Some(SplitBlock { place, dim: self.parameters[0].shape[0], segments: segments(place.residual()) });
        division.cut(&self.name, &mut self.parameters)?;
        self.heads = division.heads();
        let HeadLayout { heads, kv_heads, .. } = self.heads;
        self.attention = AttentionSpec { heads, kv_heads, ..self.attention };
        if let Mlp::Experts(experts) = &mut self.mlp {
            experts.split(place.ranks);
        }
        Ok(self)
    }

    /// Attention over the normed input, before the product that ends it: [m, h c].
    fn attend(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, h: Var) -> Result<Var> {
        let mut qkv = self.qkv.forward(tape, &h, Activation::None, None)?;
        drop(h);
        if let Some((query, key, eps)) = self.qk_norm {
            qkv = tape.qk_norm(&qkv, self.heads, query, key, eps)?;
        }
        if let Some(rope) = &self.rope {
            let table = rope.reaching(cx.batch.positions_end)?;
            qkv = tape.rope(qkv, self.heads, &table, &cx.batch.positions)?;
        }
        match cx.cache.as_deref_mut() {
            None => Ok(tape.attention(&qkv, self.attention, &cx.batch.segments)?),
            Some(cache) => {
                let out = cache.attend(self.layer, qkv.tensor(), &self.attention)?;
                Ok(tape.constant(out))
            }
        }
    }

    /// The MLP over the normed input, with the residual stream added: [m, d].
    fn mlp(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, h: Var, x: &Var) -> Result<Var> {
        match &self.mlp {
            Mlp::Dense { down, .. } => {
                let h = self.mlp.widen(tape, h)?;
                self.rejoin(tape, cx, *down, &h, x)
            }
            Mlp::Experts(experts) if self.dropout == 0.0 || !cx.training => experts.forward(tape, cx, &h, Some(x)),
            Mlp::Experts(experts) => {
                let y = experts.forward(tape, cx, &h, None)?;
                drop(h);
                let y = tape.dropout(&y, self.dropout, true)?;
                Ok(tape.add(x, &y)?)
            }
        }
    }

    /// `x + dropout(linear(h))`.
    fn rejoin(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, linear: Linear, h: &Var, x: &Var) -> Result<Var> {
        if self.dropout == 0.0 || !cx.training {
            return linear.forward(tape, h, Activation::None, Some(x));
        }
        let y = linear.forward(tape, h, Activation::None, None)?;
        let y = tape.dropout(&y, self.dropout, true)?;
        Ok(tape.add(x, &y)?)
    }

    /// `x + dropout(y + bias)`, where y is the sum of all ranks' products.
    fn rejoin_sum(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, bias: Option<ParamId>, y: &Var, x: &Var) -> Result<Var> {
        let mut y = y.clone();
        if let Some(bias) = bias {
            y = tape.add_bias(&y, bias)?;
        }
        if let Some(split) = &self.split {
            let first = split.place.rows(cx.batch.len())?.start * split.dim;
            y = tape.dropout_from(&y, self.dropout, cx.training, first)?;
        }
        Ok(tape.add(x, &y)?)
    }
}

/// The segments of a split block on a residual stream of this layout.
fn segments(residual: Layout) -> Segments {
    let value = |name, layout| Value { name, layout };
    let segment = |name, takes, gives| Segment { name, takes, gives, differentiable: true };
    Segments {
        values: vec![
            value("x", residual),
            value("h", residual),
            value("h'", Layout::Replicated),
            value("a", Layout::Partial),
            value("a'", residual),
            value("x2", residual),
            value("h2", residual),
            value("h2'", Layout::Replicated),
            value("b", Layout::Partial),
            value("b'", residual),
            value("y", residual),
        ],
        input: Some(0),
        segments: vec![
            segment("norm", vec![0], vec![0, 1]),
            segment("attention", vec![2], vec![3]),
            segment("rejoin", vec![0, 4], vec![5, 6]),
            segment("mlp", vec![7], vec![8]),
            segment("output", vec![5, 9], vec![10]),
        ],
        exchanges: [(1, 2), (3, 4), (6, 7), (8, 9)].map(|(from, to)| Exchange { from, to }).into(),
    }
}

impl Mlp {
    /// A dense MLP before the product that ends it: [m, f].
    fn widen(&self, tape: &mut Tape<'_>, h: Var) -> Result<Var> {
        let Mlp::Dense { up, activation, .. } = self else { return Ok(h) };
        let wide = up.forward(tape, &h, activation.unwrap_or_default(), None)?;
        drop(h);
        if activation.is_some() { Ok(wide) } else { Ok(tape.swiglu(&wide)?) }
    }
}

impl Linear {
    fn forward(&self, tape: &mut Tape<'_>, x: &Var, activation: Activation, residual: Option<&Var>) -> Result<Var> {
        Ok(tape.linear(x, self.weight, LinearOptions { bias: self.bias, activation, residual })?)
    }

    /// The product alone.
    fn product(&self, tape: &mut Tape<'_>, x: &Var) -> Result<Var> {
        Ok(tape.linear(x, self.weight, LinearOptions::default())?)
    }
}

impl Unit for Block {
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn segments(&self) -> Option<&Segments> {
        self.split.as_ref().map(|split| &split.segments)
    }

    fn forward_segment(
        &self,
        segment: usize,
        tape: &mut Tape<'_>,
        cx: &mut Forward<'_>,
        takes: &[Var],
    ) -> Result<Vec<Var>> {
        if self.split.is_none() {
            return Err(without_segments(&self.name));
        }
        match (segment, takes) {
            (0, [x]) => Ok(vec![x.clone(), self.norm[0].forward(tape, x)?]),
            (1, [h]) => {
                let heads = self.attend(tape, cx, h.clone())?;
                Ok(vec![self.out.product(tape, &heads)?])
            }
            (2, [x, sum]) => {
                let x = self.rejoin_sum(tape, cx, self.out.bias, sum, x)?;
                let h = self.norm[1].forward(tape, &x)?;
                Ok(vec![x, h])
            }
            (3, [h]) => {
                let y = match &self.mlp {
                    Mlp::Dense { down, .. } => {
                        let wide = self.mlp.widen(tape, h.clone())?;
                        down.product(tape, &wide)?
                    }
                    Mlp::Experts(experts) => experts.forward(tape, cx, h, None)?,
                };
                Ok(vec![y])
            }
            (4, [x, sum]) => {
                let bias = match &self.mlp {
                    Mlp::Dense { down, .. } => down.bias,
                    Mlp::Experts(_) => None,
                };
                Ok(vec![self.rejoin_sum(tape, cx, bias, sum, x)?])
            }
            _ => Err(no_segment(&self.name, segment, takes.len())),
        }
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var> {
        if self.split.is_some() {
            return Err(in_segments(&self.name));
        }
        let x = require_input(&self.name, input)?;
        let x = {
            let h = self.norm[0].forward(tape, x)?;
            let h = self.attend(tape, cx, h)?;
            self.rejoin(tape, cx, self.out, &h, x)?
        };
        let h = self.norm[1].forward(tape, &x)?;
        self.mlp(tape, cx, h, &x)
    }
}

fn activation(activation: spec::Activation) -> Activation {
    match activation {
        spec::Activation::Silu => Activation::Silu,
        spec::Activation::Gelu => Activation::GeluExact,
        spec::Activation::GeluTanh => Activation::GeluTanh,
        spec::Activation::Relu => Activation::Relu,
    }
}
