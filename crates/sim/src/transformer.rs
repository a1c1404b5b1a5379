//! Transformers as units of kernels: what forward and backward of each unit launch, keep and hold,
//! under tensor and context parallelism.
//!
//! The kinds of unit are an embedding, a block of an encoder or decoder, and a head. Blocks of one
//! kind are described once, however many there are. Symbols follow Korthikanti et al. 2022 (arXiv
//! 2205.05198), whose activation table this implements: s sequence, b micro-batch, d width, a
//! heads, t tensor-parallel degree.

use crate::constants::AttentionKind;
use crate::kernel::Kernel;
use crate::stack::{Selective, Stack};
use serde::Deserialize;
use std::ops::Range;
use trainyard_model::EncoderSpec;

/// A model's shape.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct Architecture {
    /// Width of the residual stream, d.
    pub dim: u32,
    /// Number of blocks; in an encoder-decoder model, those of the decoder.
    pub layers: u32,
    /// Number of blocks of an encoder before them.
    #[serde(default)]
    pub encoder_layers: u32,
    /// True if the positions of a sequence are the encoder's and then the decoder's, in the parts
    /// of [`EncoderSpec::usual_positions`]. Otherwise both have as many as a sequence.
    #[serde(default)]
    pub divided: bool,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Inner width of the MLP, or of one expert.
    pub ffn: u32,
    /// Rows of the token table.
    pub vocab: u32,
    /// True if the MLP has a gate (SwiGLU).
    pub gated: bool,
    /// True if the head multiplies by the token table.
    pub tied: bool,
    /// Rows of a learned position table; 0: rotary positions.
    #[serde(default)]
    pub positions: u32,
    /// Numbers of a patch of an image; 0: tokens. A model of images attends to all positions, and
    /// its head has one row for each image.
    #[serde(default)]
    pub patch_len: u32,
    /// True if blocks hand on the values of the first, and mix theirs with them.
    #[serde(default)]
    pub value_residual: bool,
    /// Experts, if MLPs are mixtures.
    #[serde(default)]
    pub experts: Option<Experts>,
    /// Widths of the projections through which queries, keys and values are made; None: each is
    /// made by one product.
    #[serde(default)]
    pub latent: Option<Latent>,
}

/// Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): queries, keys and values are
/// made from narrow vectors.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
pub struct Latent {
    /// Width of the vector that queries are made of.
    pub q: u32,
    /// Width of the vector that keys and values are made of.
    pub kv: u32,
    /// Width that queries and keys have beyond `head_dim`, for rotary positions.
    pub rotary: u32,
}

/// A mixture of experts in every block.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Number of experts.
    pub count: u32,
    /// Number of experts that a token goes to.
    pub per_token: u32,
    /// Inner width of the MLP that every token goes through beside the experts; 0: none.
    #[serde(default)]
    pub shared_ffn: u32,
    /// Tokens of the busiest rank over those of the average one.
    #[serde(default = "natural_imbalance")]
    pub imbalance: f64,
}

/// The imbalance of a trained router, relative to one that distributes tokens evenly. Source: Qwen3
/// 30B in Megatron-Bridge is 30 % slower with a trained router, and experts take somewhat more than
/// half of its time.
fn natural_imbalance() -> f64 {
    Experts::NATURAL
}

impl Experts {
    /// The imbalance where nothing is known of the routing.
    pub const NATURAL: f64 = 1.4;
}

/// One rank's micro-batch, and the way a unit is split.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Workload {
    /// Number of tokens of a sequence.
    pub sequence: u32,
    /// Number of sequences of a micro-batch.
    pub micro_batch: u32,
    /// Number of ranks that share every product.
    pub tensor: u32,
    /// Number of ranks that share a sequence.
    pub context: u32,
    /// Number of ranks that share the experts.
    pub expert: u32,
    /// Bytes of a product's operand, as its input is kept for the weight's gradient.
    pub operand_bytes: f64,
}

/// A unit on one rank: kernels and bytes.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct UnitWork {
    /// Kernels of the forward.
    pub forward: Vec<Kernel>,
    /// Kernels of the input's gradient, including memory-bound work.
    pub backward_input: Vec<Kernel>,
    /// Kernels of the weights' gradients.
    pub backward_weights: Vec<Kernel>,
    /// Kernels of selective recomputation, before backward.
    pub selective: Vec<Kernel>,
    /// Launches of forward and backward beyond those of the listed kernels: eager frameworks launch
    /// more for views, casts and splits.
    pub extra_launches: [f64; 2],
    /// Bytes kept for backward, by [`Keep`](trainyard_program::Keep).
    pub saved: [f64; 3],
    /// Bytes held while forward and while backward run, beyond the bytes kept.
    pub working: [f64; 2],
    /// Bytes of logits and their gradients that the loss writes and reads.
    pub loss_traffic: f64,
    /// Bytes of the whole output, which crosses a pipeline cut and which tensor parallelism
    /// exchanges.
    pub output: f64,
    /// Number of exchanges of the output inside forward under tensor parallelism, and as many
    /// inside backward.
    pub exchanges: u32,
    /// Bytes of all keys and values.
    pub kv: f64,
    /// Elements of all parameters.
    pub elements: f64,
    /// Launches of a mixture's forward and backward that are not in the kernels.
    pub mixture_launches: f64,
    /// Number of parameter tensors.
    pub tensors: u32,
    /// Elements of the parameters of experts.
    pub expert_elements: f64,
    /// Bytes that a rank sends to experts on other ranks.
    pub expert_bytes: f64,
    /// Number of experts that each token is sent to.
    pub expert_copies: f64,
    /// The trained part of the unit; None: all of it.
    pub tuned: Option<TunedWork>,
}

/// The difference that fine-tuning makes to a unit.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct TunedWork {
    /// Elements of its frozen parameters.
    pub frozen_elements: u64,
    /// The elements of each frozen matrix that may lie encoded.
    pub encodable: Vec<u64>,
    /// Products of weights' gradients, as a share of those of all weights.
    pub gradients: f64,
    /// Products with adapters in forward and in the input's gradient, as a share of the others.
    pub adapters: f64,
}

/// A model's units: kinds, and the kind of each unit in order.
#[derive(Clone, PartialEq, Debug)]
pub struct Units {
    /// Distinct units.
    pub kinds: Vec<UnitWork>,
    /// Per unit, its kind and its name.
    pub order: Vec<(usize, String)>,
}

impl Architecture {
    /// Elements of all parameters.
    pub fn parameters(&self) -> f64 {
        let block = |cross: bool| self.attention_elements() * if cross { 2.0 } else { 1.0 } + self.mlp_elements();
        let blocks =
            f64::from(self.layers) * block(self.encoder_layers > 0) + f64::from(self.encoder_layers) * block(false);
        let table = f64::from(self.vocab) * f64::from(self.dim);
        blocks + table * if self.tied { 1.0 } else { 2.0 } + f64::from(self.positions) * f64::from(self.dim)
    }

    /// Elements of a decoder block.
    pub fn block_elements(&self) -> f64 {
        self.attention_elements() + self.mlp_elements()
    }

    fn attention_elements(&self) -> f64 {
        let d = f64::from(self.dim);
        let made: f64 = self.projections().iter().map(|(n, k)| n * k).sum();
        made + self.q() * d + 2.0 * d
    }

    fn mlp_elements(&self) -> f64 {
        let matrices = if self.gated { 3.0 } else { 2.0 };
        let one = matrices * f64::from(self.dim) * f64::from(self.ffn);
        match self.experts {
            None => one,
            Some(experts) => {
                let shared = matrices * f64::from(self.dim) * f64::from(experts.shared_ffn);
                one * f64::from(experts.count) + shared + f64::from(self.dim) * f64::from(experts.count)
            }
        }
    }

    /// The products that make queries, keys and values: columns and inner length.
    fn projections(&self) -> Vec<(f64, f64)> {
        let d = f64::from(self.dim);
        match self.latent {
            None => vec![(self.qkv(), d)],
            Some(latent) => {
                let [q, kv, rotary] = [latent.q, latent.kv, latent.rotary].map(f64::from);
                let heads = f64::from(self.heads);
                vec![(q + kv + rotary, d), (self.q() + heads * rotary, q), (2.0 * self.q(), kv)]
            }
        }
    }

    fn q(&self) -> f64 {
        f64::from(self.heads) * f64::from(self.head_dim)
    }

    fn qkv(&self) -> f64 {
        self.q() + 2.0 * f64::from(self.kv_heads) * f64::from(self.head_dim)
    }

    /// The model's units on one rank.
    pub fn units(&self, work: &Workload, stack: &Stack) -> Units {
        let length = work.sequence as usize;
        let read = if self.divided { EncoderSpec::usual_positions(length) as u32 } else { work.sequence };
        let said = if self.divided { work.sequence - read } else { work.sequence };
        let [of_encoder, of_decoder] = [read, said].map(|sequence| Workload { sequence, ..*work });
        let on = |work| Builder { model: self, work, stack, read };
        let builder = on(work);
        let mut kinds = vec![builder.embedding()];
        let mut order = vec![(0, "embedding".to_owned())];
        let mut push = |unit: UnitWork, layers: Range<u32>, name: &str, order: &mut Vec<(usize, String)>| {
            kinds.push(unit);
            order.extend(layers.map(|layer| (kinds.len() - 1, format!("{name}.{layer}"))));
        };
        if self.encoder_layers > 0 {
            push(on(&of_encoder).block(false, false), 0..self.encoder_layers, "encoder", &mut order);
        }
        let block = on(&of_decoder).block(self.patch_len == 0, self.encoder_layers > 0);
        if self.value_residual {
            let last = self.layers.max(1) - 1;
            for layers in [0..1, 1..last, last..self.layers].into_iter().filter(|layers| !layers.is_empty()) {
                let (reads, hands_on) = (layers.start > 0, layers.end < self.layers);
                let mut unit = block.clone();
                builder.value_residual(&mut unit, reads, hands_on);
                push(unit, layers, "block", &mut order);
            }
        } else {
            push(block, 0..self.layers, "block", &mut order);
        }
        push(on(&of_decoder).head(), 0..1, "head", &mut order);
        // The positions of both sides cross every cut.
        let stream = builder.tokens() * builder.dim() * HALF;
        let blocks = 1..kinds.len() - 1;
        if self.divided {
            kinds[blocks].iter_mut().for_each(|unit| unit.output = stream);
        }
        order.last_mut().expect("a head").1 = "head".to_owned();
        Units { kinds, order }
    }
}

/// Launches of a mixture's router, permutations and exchanges in forward and backward, in
/// frameworks that launch them one by one, and of each expert on the rank; with operands of 8 bits
/// each expert has casts besides. (From the time per layer of runs whose host was the bottleneck:
/// Qwen3 30B with 8 and 16 experts on a rank, DeepSeek-V3 with 32.)
const MIXTURE_LAUNCHES: f64 = 110.0;
const EXPERT_LAUNCHES: f64 = 6.0;
const EXPERT_LAUNCHES_CAST: f64 = 11.0;

/// Bytes of an activation.
const HALF: f64 = 2.0;

struct Builder<'a> {
    model: &'a Architecture,
    work: &'a Workload,
    stack: &'a Stack,
    /// Positions of a sequence that cross-attention reads.
    read: u32,
}

impl Builder<'_> {
    /// Number of tokens of one rank's micro-batch.
    fn tokens(&self) -> f64 {
        f64::from(self.work.micro_batch) * f64::from(self.work.sequence) / f64::from(self.work.context)
    }

    fn dim(&self) -> f64 {
        f64::from(self.model.dim)
    }

    fn split(&self) -> f64 {
        f64::from(self.work.tensor)
    }

    /// The divisor of norms and residuals.
    fn sequence_split(&self) -> f64 {
        if self.stack.sequence_parallel { self.split() } else { 1.0 }
    }

    fn embedding(&self) -> UnitWork {
        let stream = self.tokens() * self.dim() * HALF;
        if self.model.patch_len > 0 {
            return self.patches(stream);
        }
        UnitWork {
            forward: vec![Kernel::Stream { bytes: 2.0 * stream, launches: 2.0 }],
            backward_weights: vec![Kernel::Stream { bytes: 4.0 * stream, launches: 2.0 }],
            saved: [if self.stack.dropout { stream / 2.0 } else { 0.0 }; 3],
            working: [stream, stream],
            output: stream,
            exchanges: 1,
            elements: f64::from(self.model.vocab + self.model.positions) * self.dim(),
            tensors: if self.model.positions > 0 { 2 } else { 1 },
            ..UnitWork::default()
        }
    }

    /// The embedding of patches: a product, to which the class token or a bias is added, and a
    /// position. Pixels have no gradient.
    fn patches(&self, stream: f64) -> UnitWork {
        let (m, d, k) = (self.tokens(), self.dim(), f64::from(self.model.patch_len));
        // Patches are f32 and are cast.
        let patches = m * k * HALF;
        UnitWork {
            forward: vec![
                Kernel::Stream { bytes: 3.0 * patches, launches: 1.0 },
                Kernel::Product { m, n: d, k },
                Kernel::Stream { bytes: 3.0 * stream, launches: 1.0 },
            ],
            backward_weights: vec![
                Kernel::Product { m: d, n: k, k: m },
                Kernel::Stream { bytes: 4.0 * stream, launches: 2.0 },
            ],
            saved: [patches; 3],
            working: [stream, stream],
            output: stream,
            exchanges: 1,
            elements: (k + 2.0 + f64::from(self.model.positions)) * d,
            tensors: 3,
            ..UnitWork::default()
        }
    }

    fn block(&self, causal: bool, cross: bool) -> UnitWork {
        let mut unit = UnitWork::default();
        self.attention(&mut unit, causal, self.work.sequence);
        if cross {
            self.attention(&mut unit, false, self.read);
        }
        self.mlp(&mut unit);
        unit.output = self.tokens() * self.dim() * HALF;
        unit.exchanges = if cross { 3 } else { 2 };
        // Gated: q, k, v, o, gate, up, down and the weights of two norms. Otherwise four matrices
        // and two norms, each with a bias.
        unit.tensors = if self.model.gated { 9 } else { 12 } + if cross { 6 } else { 0 };
        unit.kv = 2.0 * self.tokens() * f64::from(self.model.kv_heads * self.model.head_dim) * HALF;
        if self.stack.keeps_gathered && self.stack.sequence_parallel {
            let gathered = 2.0 * unit.output * (1.0 - 1.0 / self.split());
            unit.saved[0] += gathered;
            unit.saved[1] += gathered;
        }
        // The input always stays for backward.
        unit.saved[2] = unit.output / self.sequence_split();
        let launches = self.stack.block_launches();
        let mixture = unit.mixture_launches;
        unit.extra_launches = [launches + mixture / 3.0, 1.7 * launches + mixture * 2.0 / 3.0];
        unit
    }

    /// Adds value residuals to a block that reads the first block's values, hands them on, or both:
    /// a copy of what is handed on, and, where they are read, the mixture and the joined gradient.
    fn value_residual(&self, unit: &mut UnitWork, reads: bool, hands_on: bool) {
        let stream = unit.output;
        let below = unit.kv / 2.0;
        let moves = |bytes: f64| Kernel::Stream { bytes, launches: 1.0 };
        if reads {
            unit.forward.push(moves(4.0 * below));
            unit.backward_input.extend([moves(5.0 * below), moves(2.0 * (stream + below))]);
            unit.saved.iter_mut().for_each(|saved| *saved += below);
            unit.saved[..2].iter_mut().for_each(|saved| *saved += below);
            unit.tensors += 1;
        } else {
            unit.forward.push(moves(2.0 * below));
            unit.backward_input.push(moves(2.0 * below));
        }
        if hands_on {
            unit.forward.push(moves(2.0 * (stream + below)));
            unit.output += below;
        }
    }

    /// Adds a product's forward and the two halves of its backward.
    fn product(&self, unit: &mut UnitWork, m: f64, n: f64, k: f64) {
        unit.forward.push(Kernel::Product { m, n, k });
        unit.backward_input.push(Kernel::Product { m, n: k, k: n });
        unit.backward_weights.push(Kernel::Product { m: n, n: k, k: m });
        self.casts(unit, m, n, k);
        if self.stack.selective == Selective::PerOp {
            // Every other product is repeated, which is half of each on average.
            unit.selective.push(Kernel::Product { m: m / 2.0, n, k });
        }
    }

    /// Adds the casts of a product's operands to 8 or 4 bits: its input and its result's gradient
    /// are read in 16 bits and written twice, along rows and along columns. Weights are cast once a
    /// step, which costs little.
    fn casts(&self, unit: &mut UnitWork, m: f64, n: f64, k: f64) {
        if self.work.operand_bytes >= HALF {
            return;
        }
        let cast =
            |elements: f64| Kernel::Stream { bytes: (HALF + 2.0 * self.work.operand_bytes) * elements, launches: 1.0 };
        unit.forward.push(cast(m * k));
        unit.backward_input.push(cast(m * n));
    }

    /// Adds memory-bound work: `bytes` in forward and 1.7 times that in backward, which also reads
    /// the gradient.
    fn stream(&self, unit: &mut UnitWork, bytes: f64, launches: f64) {
        // Layer norms and GELU are one kernel each everywhere. Root-mean-square norms, rotations
        // and gates are chains of operations unless somebody wrote kernels for them.
        let chain = self.model.gated && !self.stack.fused && !self.stack.fused_norms;
        let kernel = |bytes| match chain {
            false => Kernel::Stream { bytes, launches },
            true => Kernel::Unfused { bytes, launches },
        };
        unit.forward.push(kernel(bytes));
        unit.backward_input.push(kernel(1.7 * bytes));
        if self.stack.selective == Selective::PerOp {
            unit.selective.push(Kernel::Stream { bytes, launches });
        }
    }

    /// Adds norms and gates that read and write `bytes`. They are repeated if selective
    /// recomputation covers them.
    fn recomputed(&self, unit: &mut UnitWork, bytes: f64, launches: f64) {
        if self.stack.selective == Selective::NormsAndGates {
            unit.selective.push(Kernel::Stream { bytes, launches });
        }
    }

    /// Adds norm, products, scores and residual of one attention over `keys` positions of each
    /// sequence.
    fn attention(&self, unit: &mut UnitWork, causal: bool, keys: u32) {
        let (m, t, d) = (self.tokens(), self.split(), self.dim());
        let (q, qkv) = (self.model.q() / t, self.model.qkv() / t);
        let kv = (qkv - q) / 2.0;
        let stream = m * d * HALF / self.sequence_split();
        let start = unit.forward.len();
        // Keys and values of another number of positions are a product of their own.
        let others = (keys != self.work.sequence && self.model.latent.is_none())
            .then(|| m / f64::from(self.work.sequence) * f64::from(keys));
        if let Some(others) = others {
            self.product(unit, m, q, d);
            self.product(unit, others, 2.0 * kv, d);
        }
        let projections = if others.is_some() { Vec::new() } else { self.model.projections() };
        for (index, (n, k)) in projections.into_iter().enumerate() {
            // Narrow vectors are made on every rank.
            let split = if self.model.latent.is_some() && index == 0 { self.sequence_split() } else { 1.0 };
            let n = if split > 1.0 || self.model.latent.is_some() && index == 0 { n } else { n / t };
            self.product(unit, m / split, n, k);
        }
        if self.stack.selective == Selective::UpProjections {
            let again = if self.model.latent.is_some() { start + 1 } else { start };
            let again: Vec<Kernel> = unit.forward[again..].to_vec();
            unit.selective.extend(again);
        }
        self.scores(unit, causal, keys);
        self.product(unit, m, d, q);
        unit.elements += self.model.attention_elements();
        // Norm: read, write. Residual: two reads, a write. Dropout: its mask, and another pass if
        // it is a kernel of its own.
        let dropout = if self.stack.dropout { 1.5 } else { 0.0 };
        let rotation = if self.model.positions == 0 { 2.0 * m * (q + kv) * HALF } else { 0.0 };
        self.stream(unit, (5.0 + dropout) * stream + rotation, 2.0);
        // The norm's input, the product's input, q, k, v, attention's output, and a mask of one
        // byte.
        let operand = self.work.operand_bytes.min(HALF) / HALF;
        // With latent attention, queries and keys also have their rotary part, and the narrow
        // vectors are kept.
        let latent = self.model.latent.map_or(0.0, |latent| {
            let heads = f64::from(self.model.heads) / t;
            2.0 * heads * f64::from(latent.rotary) + f64::from(latent.q + latent.kv + latent.rotary)
        });
        let whole = (1.0 + operand) * stream
            + m * (2.0 * q + 2.0 * kv + latent) * HALF
            + if self.stack.dropout { stream / 2.0 } else { 0.0 };
        // Rotated copies of q and k, if rotation is a kernel of its own.
        let eager = if self.stack.fused || self.model.positions > 0 { 0.0 } else { m * (q + kv) * HALF };
        let scores = self.score_bytes();
        unit.saved[0] += whole + eager + scores;
        unit.saved[1] += match self.stack.selective {
            Selective::CoreAttention => whole + eager,
            Selective::Mlp => whole + eager + scores,
            // The narrow vectors and the result.
            Selective::UpProjections => match self.model.latent {
                Some(latent) => 2.0 * stream + m * (f64::from(latent.q + latent.kv + latent.rotary) + q) * HALF,
                None => whole + eager + scores,
            },
            // Inputs of norms, attention's operands and result.
            Selective::PerOp => stream + m * (2.0 * q + 2.0 * kv) * HALF,
            // Everything but the norm's result.
            Selective::NormsAndGates => whole + eager + scores - stream,
        };
        self.recomputed(unit, 2.0 * stream, 1.0);
        // With unfused scores, forward holds one more form and backward two gradients.
        let pairs = if scores > 0.0 { self.score_pairs() * HALF } else { 0.0 };
        unit.working[0] = unit.working[0].max(pairs + stream);
        unit.working[1] = unit.working[1].max(2.0 * pairs + 2.0 * stream + m * qkv * HALF);
    }

    /// Number of sequences times heads of a rank.
    fn score_heads(&self) -> f64 {
        f64::from(self.work.micro_batch) * f64::from(self.model.heads) / self.split()
    }

    /// Bytes that unfused attention keeps per block: softmax, and the mask and result of its
    /// dropout.
    fn score_bytes(&self) -> f64 {
        if self.stack.attention != AttentionKind::Unfused {
            return 0.0;
        }
        let pairs = self.score_pairs();
        let masked = if self.stack.fused { 0.0 } else { 2.0 };
        pairs * (if self.stack.dropout { 5.0 } else { 2.0 } + masked)
    }

    fn score_pairs(&self) -> f64 {
        let s = f64::from(self.work.sequence);
        self.score_heads() * s * s / f64::from(self.work.context)
    }

    fn scores(&self, unit: &mut UnitWork, causal: bool, keys: u32) {
        let (s, c) = (f64::from(self.work.sequence), f64::from(self.model.head_dim));
        let keys = f64::from(keys);
        let heads = self.score_heads();
        // Without balance, the last rank of a context group sees nearly all keys.
        let cp = f64::from(self.work.context);
        let most = if causal && !self.stack.balanced_context { 2.0 - 1.0 / cp } else { 1.0 };
        let queries = s / cp * most;
        let kind = self.stack.attention;
        if kind != AttentionKind::Unfused {
            let attention = |backward| Kernel::Attention { kind, heads, queries, keys, head_dim: c, causal, backward };
            unit.forward.push(attention(false));
            unit.backward_input.push(attention(true));
            if self.stack.selective == Selective::CoreAttention {
                unit.selective.push(attention(false));
            }
            return;
        }
        let batched = |m, n, k| Kernel::Batched { batch: heads, m, n, k, head_dim: c };
        let bytes = heads * queries * keys * HALF;
        let (up, down) = (batched(queries, keys, c), batched(queries, c, keys));
        // Scale, mask and softmax in one kernel: read, write; dropout: read, write, mask. Eager:
        // separate kernels, with softmax in f32.
        let passes = 2.0 + if self.stack.dropout { 2.5 } else { 0.0 } + if self.stack.fused { 0.0 } else { 5.0 };
        let forward = [up, Kernel::Stream { bytes: passes * bytes, launches: 2.0 }, down];
        unit.forward.extend(forward);
        unit.backward_input.extend([up, down, down, down]);
        unit.backward_input.push(Kernel::Stream { bytes: (passes + 1.0) * bytes, launches: 2.0 });
        if self.stack.selective == Selective::CoreAttention {
            unit.selective.extend(forward);
        }
    }

    /// Adds norm, products, activation and residual of one MLP.
    fn mlp(&self, unit: &mut UnitWork) {
        let (m, t, d) = (self.tokens(), self.split(), self.dim());
        let stream = m * d * HALF / self.sequence_split();
        let f = f64::from(self.model.ffn) / t;
        let up = if self.model.gated { 2.0 } else { 1.0 };
        unit.elements += self.model.mlp_elements();
        let start = unit.forward.len();
        let saved = unit.saved[1];
        let mut inner = m * f;
        match self.model.experts {
            None => {
                self.product(unit, m, up * f, d);
                self.product(unit, m, d, f);
            }
            Some(experts) => inner = self.experts(unit, experts, up),
        }
        let dropout = if self.stack.dropout { 1.5 } else { 0.0 };
        // Gate: two reads, a write; otherwise a read, a write and the bias.
        let activation = if self.model.gated { 3.0 } else { 2.5 } * inner * HALF;
        self.stream(unit, (5.0 + dropout) * stream + activation, 2.0);
        // The norm's input, the product's input, the activation's inputs and its result, and one
        // more if the gate is a kernel of its own.
        let gate = self.model.gated;
        let extra = if gate && !self.stack.fused { 1.0 } else { 0.0 };
        let mask = if self.stack.dropout { stream / 2.0 } else { 0.0 };
        let operand = self.work.operand_bytes.min(HALF) / HALF;
        let whole = (1.0 + operand) * stream + mask + (up + operand + extra) * inner * HALF;
        unit.saved[0] += whole;
        unit.saved[1] += match self.stack.selective {
            Selective::CoreAttention | Selective::UpProjections => whole,
            Selective::Mlp => stream,
            Selective::PerOp => stream + 0.5 * up * inner * HALF,
            // Everything but the results of norm and gate.
            Selective::NormsAndGates => whole - operand * (stream + if gate { inner * HALF } else { 0.0 }),
        };
        if self.stack.selective == Selective::Mlp {
            // What experts keep is dropped with the rest.
            unit.saved[1] = saved + stream;
            let again: Vec<Kernel> = unit.forward[start..].to_vec();
            unit.selective.extend(again);
        }
        self.recomputed(unit, 2.0 * stream + if gate { activation } else { 0.0 }, if gate { 2.0 } else { 1.0 });
        unit.working[0] = unit.working[0].max((up + 1.0) * inner * HALF);
        unit.working[1] = unit.working[1].max(2.0 * stream + (up + 1.0) * inner * HALF);
    }

    /// Adds a mixture of experts that sends every token to `per_token` experts, evenly. Returns
    /// elements of the inner activations.
    fn experts(&self, unit: &mut UnitWork, experts: Experts, up: f64) -> f64 {
        let (m, t, d) = (self.tokens(), self.split(), self.dim());
        let f = f64::from(self.model.ffn);
        let routed = m / t * f64::from(experts.per_token) * experts.imbalance;
        // For the rank's experts, each product becomes several smaller ones.
        // The ranks of a tensor group have other experts, too, if experts are dealt to ranks at
        // all.
        let ranks = if self.work.expert > 1 { f64::from(self.work.expert) * t } else { 1.0 };
        let local = (f64::from(experts.count) / ranks).max(1.0);
        let rows = routed / local;
        // A grouped product fills the device as one product of all its rows would, but tiles end
        // with each expert's rows.
        let filled = (rows / 128.0).ceil() * 128.0 * local;
        for (n, k) in [(up * f, d), (d, f)] {
            unit.forward.push(Kernel::Product { m: filled, n, k });
            unit.backward_input.push(Kernel::Product { m: filled, n: k, k: n });
            unit.backward_weights.push(Kernel::Product { m: n * local, n: k, k: rows });
            self.casts(unit, routed, n, k);
        }
        if experts.shared_ffn > 0 {
            let shared = f64::from(experts.shared_ffn) / t;
            self.product(unit, m, up * shared, d);
            self.product(unit, m, d, shared);
        }
        // Router, permutation to experts and back.
        self.stream(unit, 6.0 * routed * d * HALF, 6.0);
        // The experts' input, in the format of products, and their result.
        let kept = (1.0 + self.work.operand_bytes.min(HALF) / HALF) * routed * d * HALF;
        unit.saved[0] += kept;
        unit.saved[1] += kept;
        unit.expert_elements += self.model.mlp_elements();
        unit.expert_bytes = routed * d * HALF;
        unit.expert_copies = f64::from(experts.per_token);
        // Router, permutation and exchange launch kernels, and each expert's products, casts and
        // gradients are kernels of their own.
        let each = if self.work.operand_bytes < HALF { EXPERT_LAUNCHES_CAST } else { EXPERT_LAUNCHES };
        unit.mixture_launches = MIXTURE_LAUNCHES + each * local;
        routed * f + m * f64::from(experts.shared_ffn) / t
    }

    /// Rows that the head multiplies: those of all tokens, or one for each image.
    fn rows_of_head(&self) -> f64 {
        if self.model.patch_len > 0 { f64::from(self.work.micro_batch) } else { self.tokens() }
    }

    fn head(&self) -> UnitWork {
        let (m, t, d) = (self.rows_of_head(), self.split(), self.dim());
        let v = f64::from(self.model.vocab) / t;
        let mut unit = UnitWork::default();
        self.product(&mut unit, m, v, d);
        unit.selective.clear();
        unit.loss_traffic =
            2.0 * m * v * (self.stack.logits.kept + self.stack.logits.forward + self.stack.logits.backward);
        let stream = m * d * HALF / self.sequence_split();
        unit.forward.push(Kernel::Stream { bytes: 2.0 * stream, launches: 4.0 });
        unit.backward_input.push(Kernel::Stream { bytes: 3.0 * stream, launches: 3.0 });
        let per_logit = self.stack.logits;
        unit.saved = [m * v * per_logit.kept + 2.0 * stream; 3];
        unit.working = [m * v * per_logit.forward, m * v * per_logit.backward];
        unit.extra_launches = [4.0, 4.0];
        unit.tensors = if self.model.tied { 1 } else { 2 };
        unit.elements = if self.model.tied { d } else { f64::from(self.model.vocab) * d };
        unit.exchanges = 1;
        unit
    }
}
