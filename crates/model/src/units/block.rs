//! A transformer block (Vaswani et al. 2017) with the norms before its halves:
//! `x + attention(norm(x))`, then `x + mlp(norm(x))`.

use super::norm::Norm;
use super::{bias, matrix};
use crate::parameter::{Init, ParameterKind, ParameterSpec};
use crate::rope::RopeTables;
use crate::spec::{self, Family, ModelSpec};
use crate::split::{Division, TensorSplit};
use crate::unit::{
    Exchange, Forward, Segment, Segments, Slots, Unit, Value, in_segments, no_segment, require_input, without_segments,
};
use crate::{Result, units};
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
    up: Linear,
    mlp: Mlp,
    down: Linear,
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

#[derive(Clone, Copy, Debug)]
enum Mlp {
    /// `up` gives [m, 2 f], gate first.
    Gated,
    /// `up` gives [m, f] and applies this.
    Plain(Activation),
}

impl Block {
    /// Block `layer` of `spec`, unit `layer + 1`. `rope` are the tables all blocks share.
    pub fn new(spec: &ModelSpec, layer: usize, rope: Option<Arc<RopeTables>>) -> Block {
        let mut slots = Slots::new(layer as u32 + 1);
        let names = Names::of(spec, layer);
        let ModelSpec { dim, ffn_dim, head_dim, .. } = *spec;
        let (q, kv) = (spec.heads * head_dim, spec.kv_heads * head_dim);

        let norm1 = Norm::new(spec, &mut slots, "norm1", &names.norm1);
        let qkv = {
            let parts = |what: &str| names.qkv(what, q, kv);
            let weight = matrix(spec, "attn.qkv.weight", [q + 2 * kv, dim], String::new()).fused(&parts("weight"));
            let weight = slots.add(names.orient(weight));
            let bias = spec
                .qkv_bias
                .then(|| slots.add(bias("attn.qkv.bias", q + 2 * kv, String::new()).fused(&parts("bias"))));
            Linear { weight, bias }
        };
        let qk_norm = spec.qk_norm.then(|| {
            let mut gain = |name: &str, hf_name: &str| {
                let hf_name = format!("{}.{hf_name}.weight", names.attention);
                slots.add(ParameterSpec::new(name, &[head_dim], Init::Ones, ParameterKind::Norm, hf_name))
            };
            (gain("attn.q_norm.weight", "q_norm"), gain("attn.k_norm.weight", "k_norm"), spec.norm_eps as f32)
        });
        let mut residual = |name: &str, inner: usize, hf_name: &str, with_bias: bool| {
            // GPT-2 makes the products that end on the residual path smaller with depth, so that
            // its variance does not grow with the number of blocks (Radford et al. 2019, section
            // 2.3).
            let mut weight = matrix(spec, &format!("{name}.weight"), [dim, inner], format!("{hf_name}.weight"));
            if spec.family == Family::Gpt2 {
                weight.init = Init::Normal { std: (spec.init_std / (2.0 * spec.layers as f64).sqrt()) as f32 };
            }
            let weight = slots.add(names.orient(weight));
            let bias = with_bias.then(|| slots.add(bias(&format!("{name}.bias"), dim, format!("{hf_name}.bias"))));
            Linear { weight, bias }
        };
        let out = residual("attn.out", q, &names.out, spec.o_bias);
        let down = residual("mlp.down", ffn_dim, &names.down, spec.mlp_bias);
        let norm2 = Norm::new(spec, &mut slots, "norm2", &names.norm2);
        let (mlp, rows) = match spec.family {
            Family::Llama => (Mlp::Gated, 2 * ffn_dim),
            Family::Gpt2 => (Mlp::Plain(activation(spec.activation)), ffn_dim),
        };
        let up = {
            let parts = |what: &str| names.up(what, ffn_dim);
            let weight = matrix(spec, "mlp.up.weight", [rows, dim], String::new()).fused(&parts("weight"));
            let weight = slots.add(names.orient(weight));
            let bias = spec.mlp_bias.then(|| slots.add(bias("mlp.up.bias", rows, String::new()).fused(&parts("bias"))));
            Linear { weight, bias }
        };

        Block {
            name: format!("block.{layer}"),
            layer,
            parameters: slots.finish(),
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
            up,
            mlp,
            down,
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

    /// The MLP over the normed input, before the product that ends it: [m, f].
    fn widen(&self, tape: &mut Tape<'_>, h: Var) -> Result<Var> {
        match self.mlp {
            Mlp::Plain(activation) => self.up.forward(tape, &h, activation, None),
            Mlp::Gated => {
                let gate_up = self.up.forward(tape, &h, Activation::None, None)?;
                drop(h);
                Ok(tape.swiglu(&gate_up)?)
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
    fn rejoin_sum(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, linear: Linear, y: &Var, x: &Var) -> Result<Var> {
        let mut y = y.clone();
        if let Some(bias) = linear.bias {
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
                let x = self.rejoin_sum(tape, cx, self.out, sum, x)?;
                let h = self.norm[1].forward(tape, &x)?;
                Ok(vec![x, h])
            }
            (3, [h]) => {
                let wide = self.widen(tape, h.clone())?;
                Ok(vec![self.down.product(tape, &wide)?])
            }
            (4, [x, sum]) => Ok(vec![self.rejoin_sum(tape, cx, self.down, sum, x)?]),
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
        let h = self.widen(tape, h)?;
        self.rejoin(tape, cx, self.down, &h, &x)
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

/// The names of a block's parameters in Hugging Face files.
struct Names {
    family: Family,
    norm1: String,
    norm2: String,
    attention: String,
    mlp: String,
    out: String,
    down: String,
}

impl Names {
    fn of(spec: &ModelSpec, layer: usize) -> Names {
        let prefix = units::prefix(spec);
        match spec.family {
            Family::Gpt2 => {
                let base = format!("{prefix}h.{layer}");
                Names {
                    family: spec.family,
                    norm1: format!("{base}.ln_1"),
                    norm2: format!("{base}.ln_2"),
                    attention: format!("{base}.attn"),
                    mlp: format!("{base}.mlp"),
                    out: format!("{base}.attn.c_proj"),
                    down: format!("{base}.mlp.c_proj"),
                }
            }
            Family::Llama => {
                let base = format!("{prefix}layers.{layer}");
                Names {
                    family: spec.family,
                    norm1: format!("{base}.input_layernorm"),
                    norm2: format!("{base}.post_attention_layernorm"),
                    attention: format!("{base}.self_attn"),
                    mlp: format!("{base}.mlp"),
                    out: format!("{base}.self_attn.o_proj"),
                    down: format!("{base}.mlp.down_proj"),
                }
            }
        }
    }

    /// GPT-2 stores its matrices as [in, out].
    fn orient(&self, weight: ParameterSpec) -> ParameterSpec {
        if self.family == Family::Gpt2 { weight.transposed() } else { weight }
    }

    fn qkv(&self, what: &str, q: usize, kv: usize) -> Vec<(String, usize)> {
        let base = &self.attention;
        match self.family {
            Family::Gpt2 => vec![(format!("{base}.c_attn.{what}"), q + 2 * kv)],
            Family::Llama => [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
                .map(|(n, rows)| (format!("{base}.{n}.{what}"), rows))
                .into(),
        }
    }

    fn up(&self, what: &str, ffn_dim: usize) -> Vec<(String, usize)> {
        let base = &self.mlp;
        match self.family {
            Family::Gpt2 => vec![(format!("{base}.c_fc.{what}"), ffn_dim)],
            Family::Llama => ["gate_proj", "up_proj"].map(|n| (format!("{base}.{n}.{what}"), ffn_dim)).into(),
        }
    }
}
