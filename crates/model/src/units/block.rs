//! A transformer block (Vaswani et al. 2017): `x + attention(norm(x))`, then `x + mlp(norm(x))`. In
//! some families a norm comes after each half, instead of the one before it or besides it.

use super::experts::Experts;
use super::norm::Norm;
use super::value_residual::ValueResidual;
use crate::families::{AttentionKind, Gains, NormPlaces, Parameters, QkNormKind};
use crate::parameter::ParameterSpec;
use crate::rope::RopeTables;
use crate::spec::{self, ModelSpec};
use crate::split::{ContextExchange, ContextSplit, Division, ExpertSplit, TensorSplit};
use crate::unit::{Forward, Segments, Unit, Value, in_segments, no_segment, require_input, without_segments};
use crate::{ModelError, Result};
use std::ops::Range;
use std::sync::Arc;
use trainyard_autograd::functions::LinearOptions;
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_program::Layout;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::ops::{ContextSegments, HeadLayout};

/// One block.
#[derive(Debug)]
pub struct Block {
    name: String,
    layer: usize,
    parameters: Vec<ParameterSpec>,
    /// The norms before attention and before the MLP.
    norm: [Option<Norm>; 2],
    /// The norms after them.
    post_norm: [Option<Norm>; 2],
    qkv: Linear,
    qk_norm: Option<QkNorm>,
    rope: Option<Arc<RopeTables>>,
    value_residual: Option<ValueResidual>,
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
    segments: Segments,
    /// The computation of each segment.
    parts: &'static [Part],
}

/// A weight [out, in] with, perhaps, a bias.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    pub weight: ParamId,
    pub bias: Option<ParamId>,
}

/// The norms of queries and keys.
#[derive(Clone, Copy, Debug)]
struct QkNorm {
    /// Weights of the query norm and of the key norm.
    weights: [ParamId; 2],
    eps: f32,
    gains: Gains,
    kind: QkNormKind,
}

/// The second half of a block.
#[derive(Debug)]
enum Mlp {
    /// An MLP.
    Dense(Dense),
    /// A mixture of experts.
    Experts(Experts),
}

/// An MLP.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dense {
    /// Gated, it gives [m, 2 f], gate first; plain, [m, f].
    pub up: Linear,
    pub gated: bool,
    /// Applies to the gate, or to all of a plain product.
    pub activation: Activation,
    pub down: Linear,
}

impl Block {
    /// Block `layer` of `spec`, unit `layer + 1`. `rope` are the tables that blocks share.
    pub fn new(spec: &ModelSpec, layer: usize, rope: Option<Arc<RopeTables>>) -> Block {
        let mut parameters = Parameters::new(spec, layer as u32 + 1, layer);
        let ModelSpec { dim, ffn_dim, head_dim, .. } = *spec;
        let (q, kv) = (spec.heads * head_dim, spec.kv_heads * head_dim);

        let form = spec.family.form();
        let before = matches!(form.norms, NormPlaces::Before | NormPlaces::Both);
        let after = matches!(form.norms, NormPlaces::After | NormPlaces::Both);
        let norm1 = before.then(|| Norm::new(&mut parameters, "norm1"));
        let qkv = Linear {
            weight: parameters.matrix("attn.qkv.weight", [q + 2 * kv, dim]),
            bias: parameters.bias(spec.qkv_bias, "attn.qkv.bias", q + 2 * kv),
        };
        let qk_norm = spec.qk_norm.then(|| {
            let sizes = match form.qk_norm {
                QkNormKind::EachHead => [head_dim; 2],
                QkNormKind::Whole => [q, kv],
            };
            let names = ["attn.q_norm.weight", "attn.k_norm.weight"];
            let weights = [0, 1].map(|i| parameters.gain(names[i], sizes[i]));
            QkNorm { weights, eps: spec.norm_eps as f32, gains: form.gains, kind: form.qk_norm }
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
        let norm2 = before.then(|| Norm::new(&mut parameters, "norm2"));
        let post_norm = ["post_norm1", "post_norm2"].map(|name| after.then(|| Norm::new(&mut parameters, name)));
        let attention = AttentionSpec {
            causal: form.attention == AttentionKind::Causal,
            ..AttentionSpec::causal(spec.heads, spec.kv_heads, head_dim)
        };
        let scale = spec.attention_scalar.map_or(attention.scale, |scalar| scalar.sqrt().recip() as f32);
        let mlp = match (experts, down) {
            (Some(experts), _) => Mlp::Experts(Experts::new(&mut parameters, experts)),
            (None, Some(down)) => {
                let gated = spec.gates();
                let rows = if gated { 2 * ffn_dim } else { ffn_dim };
                let weight = parameters.matrix("mlp.up.weight", [rows, dim]);
                let up = Linear { weight, bias: parameters.bias(spec.mlp_bias, "mlp.up.bias", rows) };
                Mlp::Dense(Dense { up, gated, activation: activation(spec.activation), down })
            }
            (None, None) => unreachable!("a block without experts has its MLP"),
        };
        let value_residual = ValueResidual::new(spec, layer, &mut parameters);

        Block {
            name: format!("block.{layer}"),
            layer,
            parameters: parameters.finish(),
            norm: [norm1, norm2],
            post_norm,
            qkv,
            qk_norm,
            rope,
            value_residual,
            heads: HeadLayout { heads: spec.heads, kv_heads: spec.kv_heads, head_dim },
            attention: AttentionSpec { window: spec.window(layer), scale, ..attention },
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
        self.split = Some(SplitBlock { place, segments: segments(place.residual()), parts: PARTS_OF_TENSOR });
        division.cut(&self.name, &mut self.parameters)?;
        self.heads = division.heads();
        let HeadLayout { heads, kv_heads, .. } = self.heads;
        self.attention = AttentionSpec { heads, kv_heads, ..self.attention };
        if let Mlp::Experts(experts) = &mut self.mlp {
            experts.split(place.ranks);
        }
        Ok(self)
    }

    /// The block with the experts of one rank of an expert-parallel group. A block without experts
    /// stays whole.
    pub fn spread(mut self, split: ExpertSplit) -> Block {
        if let Mlp::Experts(experts) = &mut self.mlp {
            experts.spread(split, &mut self.parameters);
        }
        self
    }

    /// The same on the rows of one rank of a context-parallel group.
    ///
    /// # Errors
    /// Heads that the group's ranks cannot divide, where they exchange rows for heads.
    pub fn on_rows(mut self, context: ContextSplit) -> Result<Block> {
        let (place, is_whole) = match &self.split {
            None => (TensorSplit::WHOLE, true),
            Some(split) => (split.place, false),
        };
        let residual = (!is_whole).then(|| place.residual());
        let overlaps = self.attention.window.is_none();
        let (segments, parts) = match (context.exchange, is_whole) {
            (ContextExchange::Overlapped(_), true) if overlaps => (segments_apart(residual), PARTS_APART),
            (ContextExchange::Overlapped(_), false) if overlaps => (segments_apart(residual), PARTS_OF_BOTH_APART),
            (ContextExchange::Keys(_) | ContextExchange::Overlapped(_), true) => {
                (segments_on_rows(residual), PARTS_OF_CONTEXT)
            }
            (ContextExchange::Keys(_) | ContextExchange::Overlapped(_), false) => {
                (segments_on_rows(residual), PARTS_OF_BOTH)
            }
            (ContextExchange::Heads, true) => (segments_by_heads(residual), PARTS_BY_HEADS),
            (ContextExchange::Heads, false) => (segments_by_heads(residual), PARTS_OF_BOTH_BY_HEADS),
        };
        if context.exchange == ContextExchange::Heads {
            let HeadLayout { heads, kv_heads, .. } = self.heads;
            let ranks = context.ranks;
            if !heads.is_multiple_of(ranks) || !kv_heads.is_multiple_of(ranks) {
                return Err(ModelError::Split(format!(
                    "{heads} query heads and {kv_heads} key/value heads cannot be divided among {ranks} ranks of a \
                     context-parallel group: gather keys and values (all_gather), or take a degree that divides both"
                )));
            }
            let (heads, kv_heads) = (heads / ranks, kv_heads / ranks);
            self.attention = AttentionSpec { heads, kv_heads, ..self.attention };
        }
        self.split = Some(SplitBlock { place, segments, parts });
        Ok(self)
    }

    /// The ranks that exchange rows for heads.
    fn ranks_of_heads(&self) -> usize {
        self.heads.heads / self.attention.heads
    }

    /// Queries, keys and values of the normed input, the heads of each rank of the context-parallel
    /// group after those of the one before: [r m, (h + 2 h_kv) / r c].
    fn project_by_heads(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, h: Var) -> Result<Var> {
        let qkv = self.queries_and_keys(tape, cx, h)?;
        let HeadLayout { heads, kv_heads, head_dim } = self.heads;
        let (ranks, rows) = (self.ranks_of_heads(), qkv.tensor().rows());
        let parts = tape.split(&qkv, &[heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)?;
        drop(qkv);
        let by_rank = |tape: &mut Tape<'_>, part: Var| {
            let columns = part.tensor().last_dim() / ranks;
            tape.reshape(&part, &[rows, ranks, columns])
        };
        let parts = parts.into_iter().map(|part| by_rank(tape, part)).collect::<Result<Vec<Var>, _>>()?;
        let all = tape.cat(&parts.iter().collect::<Vec<_>>(), 2)?;
        drop(parts);
        let columns = all.tensor().last_dim();
        let all = tape.permute(&all, &[1, 0, 2])?;
        Ok(tape.reshape(&all, &[ranks * rows, columns])?)
    }

    /// Attention of this rank's heads over all rows, which come and go rank after rank:
    /// [r m, h / r c].
    fn attend_by_heads(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, qkv: &Var) -> Result<Var> {
        let Some(part) = &cx.batch.part else { return Err(without_part()) };
        // A rank has two chunks of each sequence, its first of every sequence before its second.
        let sequences = part.rows.len() / 2;
        let chunks = 2 * self.ranks_of_heads();
        let qkv = exchanged_blocks(tape, qkv, [chunks, sequences])?;
        let out = tape.attention(&qkv, self.attention, &cx.batch.segments)?;
        drop(qkv);
        exchanged_blocks(tape, &out, [sequences, chunks])
    }

    /// The columns of all heads side by side: [m, h c] of [r m, h / r c].
    fn join_heads(&self, tape: &mut Tape<'_>, heads: &Var) -> Result<Var> {
        let ranks = self.ranks_of_heads();
        let (rows, columns) = (heads.tensor().rows() / ranks, heads.tensor().last_dim());
        let heads = tape.reshape(heads, &[ranks, rows, columns])?;
        let heads = tape.permute(&heads, &[1, 0, 2])?;
        Ok(tape.reshape(&heads, &[rows, ranks * columns])?)
    }

    /// The queries of the normed input, and its keys and values side by side: [m, h c],
    /// [m, 2 h_kv c].
    fn project(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, h: Var) -> Result<[Var; 2]> {
        let qkv = self.queries_and_keys(tape, cx, h)?;
        Ok(tape.split_at(&qkv, -1, self.heads.heads * self.heads.head_dim)?)
    }

    /// Attention of this rank's queries over the gathered keys and values: [m, h c].
    fn attend_to(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, q: &Var, kv: &Var) -> Result<Var> {
        let keys = cx.batch.part.as_ref().and_then(|part| part.keys.as_ref()).ok_or_else(without_part)?;
        Ok(tape.context_attention(q, kv, self.attention, keys)?)
    }

    /// Attention of this rank's queries over its own keys and values: [m, h c], and the log-sum-exp
    /// of scores, [m, h].
    fn attend_to_own(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, q: &Var, kv: &Var) -> Result<[Var; 2]> {
        let [own, _] = apart(cx)?;
        Ok(tape.context_attention_part(q, kv, self.attention, own)?)
    }

    /// Attention over all keys, of which [`Block::attend_to_own`] has given a part: [m, h c].
    fn attend_to_rest(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, [q, kv, own, lse]: [&Var; 4]) -> Result<Var> {
        let [_, rest] = apart(cx)?;
        Ok(tape.context_attention_rest(q, kv, [own, lse], self.attention, rest)?)
    }

    /// Queries, keys and values of the normed input, rotated: [m, (h + 2 h_kv) c].
    fn queries_and_keys(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, h: Var) -> Result<Var> {
        let mut qkv = self.qkv.forward(tape, &h, Activation::None, None)?;
        drop(h);
        if let Some(norm) = &self.qk_norm {
            qkv = norm.forward(tape, &qkv, self.heads)?;
        }
        if let Some(rope) = &self.rope {
            let table = rope.reaching(cx.batch.positions_end)?;
            qkv = tape.rope(qkv, self.heads, &table, &cx.batch.positions)?;
        }
        Ok(qkv)
    }

    /// Attention over the normed input, before the product that ends it: [m, h c].
    fn attend(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, h: Var) -> Result<Var> {
        let qkv = self.queries_and_keys(tape, cx, h)?;
        self.attend_over(tape, cx, qkv)
    }

    /// Attention of these queries over these keys and values: [m, h c].
    fn attend_over(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, qkv: Var) -> Result<Var> {
        match cx.cache.as_deref_mut() {
            None => Ok(tape.attention(&qkv, self.attention, &cx.batch.segments)?),
            Some(cache) => {
                let out = cache.attend(self.layer, qkv.tensor(), &self.attention)?;
                Ok(tape.constant(out))
            }
        }
    }

    /// The norm before a half, 0 or 1.
    fn enter(&self, half: usize, tape: &mut Tape<'_>, x: &Var) -> Result<Var> {
        self.norm[half].as_ref().map_or_else(|| Ok(x.clone()), |norm| norm.forward(tape, x))
    }

    /// The second half of the block on whole products: `x + mlp(norm(x))`.
    fn end(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, x: &Var) -> Result<Var> {
        let h = self.enter(1, tape, x)?;
        match &self.mlp {
            Mlp::Dense(dense) => {
                let h = dense.widen(tape, h)?;
                self.rejoin(1, dense.down, tape, cx, &h, x)
            }
            Mlp::Experts(experts) if self.joins_at_once(1, cx) => experts.forward(tape, cx, &h, Some(x)),
            Mlp::Experts(experts) => {
                let y = experts.forward(tape, cx, &h, None)?;
                drop(h);
                self.join(1, tape, cx, y, x)
            }
        }
    }

    /// The bias of the product that ends a half, where it has one.
    fn bias(&self, half: usize) -> Option<ParamId> {
        match &self.mlp {
            _ if half == 0 => self.out.bias,
            Mlp::Dense(dense) => dense.down.bias,
            Mlp::Experts(_) => None,
        }
    }

    /// True if nothing comes between the end of a half and the sum with the residual stream.
    fn joins_at_once(&self, half: usize, cx: &Forward<'_>) -> bool {
        (self.dropout == 0.0 || !cx.training) && self.post_norm[half].is_none()
    }

    /// `x + dropout(norm(linear(h)))`, of the linear layer and the norm that end a half.
    fn rejoin(
        &self,
        half: usize,
        linear: Linear,
        tape: &mut Tape<'_>,
        cx: &Forward<'_>,
        h: &Var,
        x: &Var,
    ) -> Result<Var> {
        if self.joins_at_once(half, cx) {
            return linear.forward(tape, h, Activation::None, Some(x));
        }
        let y = linear.forward(tape, h, Activation::None, None)?;
        self.join(half, tape, cx, y, x)
    }

    /// `x + dropout(norm(y))`
    fn join(&self, half: usize, tape: &mut Tape<'_>, cx: &Forward<'_>, mut y: Var, x: &Var) -> Result<Var> {
        if let Some(norm) = &self.post_norm[half] {
            y = norm.forward(tape, &y)?;
        }
        if self.dropout != 0.0 && cx.training {
            y = self.drop(tape, cx, &y, 0..cx.batch.len())?;
        }
        Ok(tape.add(x, &y)?)
    }

    /// Dropout of rows `here` of this rank's rows of the micro-batch.
    fn drop(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, y: &Var, here: Range<usize>) -> Result<Var> {
        let dim = y.tensor().last_dim();
        let rows = cx.batch.rows_of(&here).into_iter();
        let parts: Vec<Range<usize>> = rows.map(|rows| rows.start * dim..rows.end * dim).collect();
        Ok(tape.dropout_of(y, self.dropout, cx.training, &parts)?)
    }

    /// `x + dropout(norm(y + bias))`, where y is the sum of all ranks' products.
    fn rejoin_sum(&self, half: usize, tape: &mut Tape<'_>, cx: &Forward<'_>, y: &Var, x: &Var) -> Result<Var> {
        let mut y = y.clone();
        if let Some(bias) = self.bias(half) {
            y = tape.add_bias(&y, bias)?;
        }
        if let Some(norm) = &self.post_norm[half] {
            y = norm.forward(tape, &y)?;
        }
        if let Some(split) = &self.split {
            y = self.drop(tape, cx, &y, split.place.rows(cx.batch.len())?)?;
        }
        Ok(tape.add(x, &y)?)
    }
}

impl QkNorm {
    /// Normalises the queries and keys of [m, (h + 2 h_kv) c].
    fn forward(&self, tape: &mut Tape<'_>, qkv: &Var, heads: HeadLayout) -> Result<Var> {
        let QkNorm { weights, eps, gains, kind } = *self;
        let (q, kv) = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim);
        match kind {
            QkNormKind::EachHead => Ok(tape.qk_norm_with(qkv, heads, weights, eps, gains)?),
            // All heads as one, where queries and keys are equally many.
            QkNormKind::Whole if q == kv => {
                let one = HeadLayout { heads: 1, kv_heads: 1, head_dim: q };
                Ok(tape.qk_norm_with(qkv, one, weights, eps, gains)?)
            }
            QkNormKind::Whole => {
                let parts = tape.split(qkv, &[q, kv, kv], 1)?;
                let q = tape.rms_norm_with(&parts[0], weights[0], eps, gains)?;
                let k = tape.rms_norm_with(&parts[1], weights[1], eps, gains)?;
                Ok(tape.cat(&[&q, &k, &parts[2]], 1)?)
            }
        }
    }
}

/// A part of a block's segments, as [`Segments::named`] takes it: values, segments, exchanges.
type Middle<'a> = (&'a [&'static str], &'a [(&'static str, &'a str, &'a str)], &'a [(&'a str, &'a str)]);

/// The segments of a block of which a rank has parts of products, on a residual stream of this
/// layout. `attention` leads from the normed input `h'` to the rank's summand `a` of the result.
fn segments_of_parts(residual: Layout, attention: Middle<'_>) -> Segments {
    let of = |layout: Layout, names: &[&'static str]| names.iter().map(|name| Value::new(name, layout)).collect();
    let (inner, segments, exchanges) = attention;
    let values: [Vec<Value>; 8] = [
        of(residual, &["x", "h"]),
        of(Layout::Replicated, &["h'"]),
        of(Layout::Split, inner),
        of(Layout::Partial, &["a"]),
        of(residual, &["a'", "x2", "h2"]),
        of(Layout::Replicated, &["h2'"]),
        of(Layout::Partial, &["b"]),
        of(residual, &["b'", "y"]),
    ];
    let end = [("rejoin", "x a'", "x2 h2"), ("mlp", "h2'", "b"), ("output", "x2 b'", "y")];
    Segments::named(
        values.concat(),
        &[&[("norm", "x", "x h")], segments, &end].concat(),
        &[&[("h", "h'")], exchanges, &[("a", "a'"), ("h2", "h2'"), ("b", "b'")]].concat(),
    )
}

/// The segments of a block of which a rank has parts of products.
fn segments(residual: Layout) -> Segments {
    segments_of_parts(residual, (&[], &[("attention", "h'", "a")], &[]))
}

/// The segments of a block on the rows of a rank that gathers keys and values; `residual` is that
/// over the tensor-parallel group, None if products are whole.
fn segments_on_rows(residual: Option<Layout>) -> Segments {
    let gather = [("kv", "kv'")];
    let segments = match residual {
        None => Segments::named(
            ["x", "q", "kv", "kv'", "y"].map(|name| Value::new(name, Layout::Invariant)).into(),
            &[("project", "x", "x q kv"), ("attend", "x q kv'", "y")],
            &gather,
        ),
        Some(residual) => {
            let attention = [("project", "h'", "q kv"), ("attend", "q kv'", "a")];
            segments_of_parts(residual, (&["q", "kv", "kv'"], &attention, &gather))
        }
    };
    segments.on_rows().over_context(&["kv'"], Layout::Replicated)
}

/// The same for a rank that attends to its own keys while the others are gathered. Its keys and
/// values stand twice: as what travels, and as what is read meanwhile.
fn segments_apart(residual: Option<Layout>) -> Segments {
    let gather = [("kv", "kv'")];
    let own = ("own", "q own", "q o l");
    let segments = match residual {
        None => Segments::named(
            ["x", "q", "own", "kv", "kv'", "o", "l", "y"].map(|name| Value::new(name, Layout::Invariant)).into(),
            &[("project", "x", "x q own kv"), own, ("rest", "x q kv' o l", "y")],
            &gather,
        ),
        Some(residual) => {
            let attention = [("project", "h'", "q own kv"), own, ("rest", "q kv' o l", "a")];
            segments_of_parts(residual, (&["q", "own", "kv", "kv'", "o", "l"], &attention, &gather))
        }
    };
    segments.on_rows().over_context(&["kv'"], Layout::Replicated)
}

/// The same for a rank that exchanges rows for heads.
fn segments_by_heads(residual: Option<Layout>) -> Segments {
    let exchanges = [("qkv", "qkv'"), ("heads", "heads'")];
    let attend = ("attend", "qkv'", "heads");
    let segments = match residual {
        None => Segments::named(
            ["x", "qkv", "qkv'", "heads", "heads'", "y"].map(|name| Value::new(name, Layout::Invariant)).into(),
            &[("project", "x", "x qkv"), attend, ("end", "x heads'", "y")],
            &exchanges,
        ),
        Some(residual) => {
            let attention = [("project", "h'", "qkv"), attend, ("join", "heads'", "a")];
            segments_of_parts(residual, (&["qkv", "qkv'", "heads", "heads'"], &attention, &exchanges))
        }
    };
    segments.on_rows().over_context(&["qkv'", "heads"], Layout::Heads)
}

/// The rows of `x` as `outer` groups of `inner` blocks, with the two exchanged.
fn exchanged_blocks(tape: &mut Tape<'_>, x: &Var, [outer, inner]: [usize; 2]) -> Result<Var> {
    if outer == 1 || inner == 1 {
        return Ok(x.clone());
    }
    let (rows, columns) = (x.tensor().rows(), x.tensor().last_dim());
    let blocks = tape.reshape(x, &[outer, inner, rows / outer / inner * columns])?;
    let blocks = tape.permute(&blocks, &[1, 0, 2])?;
    Ok(tape.reshape(&blocks, &[rows, columns])?)
}

/// The error of a rank of a context-parallel group that is given a whole micro-batch, or one for
/// another exchange.
fn without_part() -> ModelError {
    ModelError::Batch("a context-parallel rank takes its part of a micro-batch".into())
}

/// The keys of a rank that attends to its own first: these, and all others.
fn apart<'a>(cx: &'a Forward<'_>) -> Result<&'a [ContextSegments; 2]> {
    cx.batch.part.as_ref().and_then(|part| part.apart.as_ref()).ok_or_else(without_part)
}

/// The work of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Norm,
    Attention,
    Project,
    Attend,
    /// Attention over gathered keys and values and all that follows, on whole products.
    AttendAndEnd,
    /// The norm, then as [`Part::Project`].
    NormAndProject,
    /// As [`Part::Project`], with keys and values twice.
    ProjectTwice,
    /// The norm, then as [`Part::ProjectTwice`].
    NormAndProjectTwice,
    AttendToOwn,
    AttendToRest,
    /// The same and all that follows, on whole products.
    AttendToRestAndEnd,
    ProjectByHeads,
    /// The norm, then as [`Part::ProjectByHeads`].
    NormAndProjectByHeads,
    AttendByHeads,
    /// The product that ends attention, over the heads of all ranks.
    JoinHeads,
    /// The same and all that follows, on whole products.
    JoinHeadsAndEnd,
    Rejoin,
    Mlp,
    Output,
}

const PARTS_OF_TENSOR: &[Part] = &[Part::Norm, Part::Attention, Part::Rejoin, Part::Mlp, Part::Output];
const PARTS_OF_CONTEXT: &[Part] = &[Part::NormAndProject, Part::AttendAndEnd];
const PARTS_APART: &[Part] = &[Part::NormAndProjectTwice, Part::AttendToOwn, Part::AttendToRestAndEnd];
const PARTS_OF_BOTH_APART: &[Part] =
    &[Part::Norm, Part::ProjectTwice, Part::AttendToOwn, Part::AttendToRest, Part::Rejoin, Part::Mlp, Part::Output];
const PARTS_BY_HEADS: &[Part] = &[Part::NormAndProjectByHeads, Part::AttendByHeads, Part::JoinHeadsAndEnd];
const PARTS_OF_BOTH_BY_HEADS: &[Part] =
    &[Part::Norm, Part::ProjectByHeads, Part::AttendByHeads, Part::JoinHeads, Part::Rejoin, Part::Mlp, Part::Output];
const PARTS_OF_BOTH: &[Part] = &[Part::Norm, Part::Project, Part::Attend, Part::Rejoin, Part::Mlp, Part::Output];

impl Dense {
    /// The MLP over the normed input, before the product that ends it: [m, f].
    pub fn widen(&self, tape: &mut Tape<'_>, h: Var) -> Result<Var> {
        if !self.gated {
            return self.up.forward(tape, &h, self.activation, None);
        }
        let gate_up = self.up.forward(tape, &h, Activation::None, None)?;
        drop(h);
        Ok(tape.glu(&gate_up, self.activation)?)
    }
}

impl Linear {
    pub fn forward(&self, tape: &mut Tape<'_>, x: &Var, activation: Activation, residual: Option<&Var>) -> Result<Var> {
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
        let split = self.split.as_ref().ok_or_else(|| without_segments(&self.name))?;
        let unknown = || no_segment(&self.name, segment, takes.len());
        match (*split.parts.get(segment).ok_or_else(unknown)?, takes) {
            (Part::Norm, [x]) => Ok(vec![x.clone(), self.enter(0, tape, x)?]),
            (Part::NormAndProject, [x]) => {
                let h = self.enter(0, tape, x)?;
                let [q, kv] = self.project(tape, cx, h)?;
                Ok(vec![x.clone(), q, kv])
            }
            (Part::Project, [h]) => Ok(self.project(tape, cx, h.clone())?.into()),
            (Part::Attention, [h]) => {
                let heads = self.attend(tape, cx, h.clone())?;
                Ok(vec![self.out.product(tape, &heads)?])
            }
            (Part::Attend, [q, kv]) => {
                let heads = self.attend_to(tape, cx, q, kv)?;
                Ok(vec![self.out.product(tape, &heads)?])
            }
            (Part::AttendAndEnd, [x, q, kv]) => {
                let h = self.attend_to(tape, cx, q, kv)?;
                let x = self.rejoin(0, self.out, tape, cx, &h, x)?;
                drop(h);
                Ok(vec![self.end(tape, cx, &x)?])
            }
            (Part::NormAndProjectTwice, [x]) => {
                let h = self.enter(0, tape, x)?;
                let [q, kv] = self.project(tape, cx, h)?;
                Ok(vec![x.clone(), q, kv.clone(), kv])
            }
            (Part::ProjectTwice, [h]) => {
                let [q, kv] = self.project(tape, cx, h.clone())?;
                Ok(vec![q, kv.clone(), kv])
            }
            (Part::AttendToOwn, [q, own]) => {
                let [out, lse] = self.attend_to_own(tape, cx, q, own)?;
                Ok(vec![q.clone(), out, lse])
            }
            (Part::AttendToRest, [q, kv, own, lse]) => {
                let heads = self.attend_to_rest(tape, cx, [q, kv, own, lse])?;
                Ok(vec![self.out.product(tape, &heads)?])
            }
            (Part::AttendToRestAndEnd, [x, q, kv, own, lse]) => {
                let h = self.attend_to_rest(tape, cx, [q, kv, own, lse])?;
                let x = self.rejoin(0, self.out, tape, cx, &h, x)?;
                drop(h);
                Ok(vec![self.end(tape, cx, &x)?])
            }
            (Part::NormAndProjectByHeads, [x]) => {
                let h = self.enter(0, tape, x)?;
                Ok(vec![x.clone(), self.project_by_heads(tape, cx, h)?])
            }
            (Part::ProjectByHeads, [h]) => Ok(vec![self.project_by_heads(tape, cx, h.clone())?]),
            (Part::AttendByHeads, [qkv]) => Ok(vec![self.attend_by_heads(tape, cx, qkv)?]),
            (Part::JoinHeads, [heads]) => {
                let heads = self.join_heads(tape, heads)?;
                Ok(vec![self.out.product(tape, &heads)?])
            }
            (Part::JoinHeadsAndEnd, [x, heads]) => {
                let h = self.join_heads(tape, heads)?;
                let x = self.rejoin(0, self.out, tape, cx, &h, x)?;
                drop(h);
                Ok(vec![self.end(tape, cx, &x)?])
            }
            (Part::Rejoin, [x, sum]) => {
                let x = self.rejoin_sum(0, tape, cx, sum, x)?;
                let h = self.enter(1, tape, &x)?;
                Ok(vec![x, h])
            }
            (Part::Mlp, [h]) => {
                let y = match &self.mlp {
                    Mlp::Dense(dense) => {
                        let wide = dense.widen(tape, h.clone())?;
                        dense.down.product(tape, &wide)?
                    }
                    Mlp::Experts(experts) => experts.forward(tape, cx, h, None)?,
                };
                Ok(vec![y])
            }
            (Part::Output, [x, sum]) => Ok(vec![self.rejoin_sum(1, tape, cx, sum, x)?]),
            _ => Err(unknown()),
        }
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var> {
        if self.split.is_some() {
            return Err(in_segments(&self.name));
        }
        let x = require_input(&self.name, input)?;
        let Some(value_residual) = &self.value_residual else {
            let x = {
                let h = self.enter(0, tape, x)?;
                let h = self.attend(tape, cx, h)?;
                self.rejoin(0, self.out, tape, cx, &h, x)?
            };
            return self.end(tape, cx, &x);
        };
        let (x, carried) = value_residual.enter(tape, x, cx.batch.len())?;
        let h = self.enter(0, tape, &x)?;
        let qkv = self.queries_and_keys(tape, cx, h)?;
        let (qkv, carried) = value_residual.mix(tape, qkv, carried)?;
        let x = {
            let h = self.attend_over(tape, cx, qkv)?;
            self.rejoin(0, self.out, tape, cx, &h, &x)?
        };
        let y = self.end(tape, cx, &x)?;
        drop(x);
        value_residual.leave(tape, y, carried)
    }
}

pub(super) fn activation(activation: spec::Activation) -> Activation {
    match activation {
        spec::Activation::Silu => Activation::Silu,
        spec::Activation::Gelu => Activation::GeluExact,
        spec::Activation::GeluTanh => Activation::GeluTanh,
        spec::Activation::Relu => Activation::Relu,
        spec::Activation::ReluSquared => Activation::ReluSquared,
    }
}
