//! The models and the layouts that are compared.

use std::fmt;

/// A division of a training among ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Layout {
    pub replicate: usize,
    pub shard: usize,
    pub context: usize,
    /// True if the ranks of a sequence exchange its rows for heads, false if they gather keys.
    pub by_heads: bool,
    pub tensor: usize,
    pub pipeline: usize,
    /// Replicas that share the experts of a mixture.
    pub experts: usize,
    /// True if tensor-parallel ranks divide rows too.
    pub sequence: bool,
    pub zero_stage: usize,
    /// The schedule of the pipeline; it has no effect on one stage.
    pub schedule: &'static str,
    /// The mode of activation checkpointing.
    pub checkpointing: &'static str,
}

/// All pipeline schedules.
pub const SCHEDULES: [&str; 6] = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dual_pipe_v"];

impl Layout {
    pub const ONE: Layout = Layout {
        replicate: 1,
        shard: 1,
        context: 1,
        by_heads: false,
        tensor: 1,
        pipeline: 1,
        experts: 1,
        sequence: false,
        zero_stage: 0,
        schedule: "1f1b",
        checkpointing: "none",
    };

    pub fn ranks(&self) -> usize {
        self.replicate * self.shard * self.context * self.tensor * self.pipeline
    }

    /// The same layout on one stage.
    pub fn without_pipeline(self) -> Layout {
        Layout { pipeline: 1, schedule: Layout::ONE.schedule, ..self }
    }

    /// True if one rank runs both the embedding and the head.
    pub fn joins_ends(&self) -> bool {
        self.pipeline == 1 || matches!(self.schedule, "zero_bubble_v" | "dual_pipe_v")
    }

    /// True if both layouts sum in the same order, for a model whose embedding and head share
    /// nothing: they divide a batch among as many ranks, and sequences and products in the same
    /// way.
    pub fn shares_bits_with(&self, other: &Layout) -> bool {
        let context = |layout: &Layout| (layout.context, layout.by_heads);
        let parts =
            |layout: &Layout| (layout.replicate * layout.shard, context(layout), layout.tensor, layout.sequence);
        parts(self) == parts(other)
    }

    /// The settings of it.
    pub fn sets(&self) -> Vec<String> {
        let mut sets = vec![
            format!("parallel.ranks={}", self.ranks()),
            format!("parallel.data_parallel_replicate_degree={}", self.replicate),
            format!("parallel.data_parallel_shard_degree={}", self.shard),
            format!("parallel.context_parallel_degree={}", self.context),
            format!("parallel.tensor_parallel_degree={}", self.tensor),
            format!("parallel.pipeline_parallel_degree={}", self.pipeline),
            format!("parallel.zero_stage={}", self.zero_stage),
            format!("activation_checkpointing.mode='{}'", self.checkpointing),
        ];
        if self.by_heads {
            sets.push("parallel.context_parallel_exchange='all_to_all'".to_owned());
        }
        if self.experts > 1 {
            sets.push(format!("parallel.expert_parallel_degree={}", self.experts));
        }
        if self.tensor > 1 {
            sets.push(format!("parallel.sequence_parallel={}", self.sequence));
        }
        if self.pipeline > 1 {
            sets.push(format!("parallel.pipeline_schedule='{}'", self.schedule));
        }
        sets
    }
}

/// `dp_replicate 2 x dp_shard 2 (ZeRO-3) x tp 2 (rows too) x pp 2 (1f1b), full checkpointing`,
/// without degrees of 1.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.replicate > 1 {
            parts.push(format!("dp_replicate {}", self.replicate));
        }
        if self.shard > 1 {
            parts.push(format!("dp_shard {} (ZeRO-{})", self.shard, self.zero_stage));
        }
        if self.experts > 1 {
            parts.push(format!("ep {}", self.experts));
        }
        if self.context > 1 {
            let stage = if self.shard == 1 && self.zero_stage > 0 {
                format!(" (ZeRO-{})", self.zero_stage)
            } else {
                String::new()
            };
            let by = if self.by_heads { " by heads" } else { "" };
            parts.push(format!("cp {}{by}{stage}", self.context));
        }
        if self.tensor > 1 {
            let rows = if self.sequence { " (rows too)" } else { "" };
            parts.push(format!("tp {}{rows}", self.tensor));
        }
        if self.pipeline > 1 {
            parts.push(format!("pp {} ({})", self.pipeline, self.schedule));
        }
        let product = if parts.is_empty() { "one rank".to_owned() } else { parts.join(" x ") };
        match self.checkpointing {
            "none" => write!(f, "{product}"),
            mode => write!(f, "{product}, {mode} checkpointing"),
        }
    }
}

/// Every product `dp_replicate x dp_shard x cp x tp x pp` of four ranks, with and without divided
/// rows. Those with cp come first.
pub fn of_four() -> Vec<Layout> {
    let divisors = [1, 2, 4];
    let mut all = Vec::new();
    let outer =
        divisors.into_iter().rev().flat_map(|c| divisors.into_iter().flat_map(move |p| divisors.map(|r| (c, p, r))));
    for (context, pipeline, replicate) in outer {
        for (shard, tensor) in divisors.into_iter().flat_map(|f| divisors.map(|t| (f, t))) {
            let zero_stage = if shard > 1 { 3 } else { 0 };
            let layout = Layout { replicate, shard, context, tensor, pipeline, zero_stage, ..Layout::ONE };
            if layout.ranks() == 4 {
                all.push(layout);
                all.extend((tensor > 1).then_some(Layout { sequence: true, ..layout }));
            }
        }
    }
    all
}

/// Chosen layouts of eight ranks: every ZeRO stage, schedule and checkpointing mode, and most pairs
/// of them.
pub fn of_eight() -> Vec<Layout> {
    type Row = (usize, usize, usize, (usize, bool), (usize, &'static str), &'static str);
    type OfContext = ((usize, bool), Row);
    // Replicas, shards, ZeRO stage; parts, rows too; stages, schedule; checkpointing.
    let rows: [Row; 24] = [
        (2, 1, 0, (2, true), (2, "interleaved"), "selective"),
        (1, 2, 3, (2, false), (2, "zero_bubble"), "full"),
        (1, 2, 2, (1, false), (4, "zero_bubble_v"), "none"),
        (1, 1, 0, (2, true), (4, "dual_pipe_v"), "full"),
        (1, 8, 3, (1, false), (1, "1f1b"), "full"),
        (2, 2, 1, (2, true), (1, "1f1b"), "selective"),
        (8, 1, 0, (1, false), (1, "1f1b"), "none"),
        (1, 8, 1, (1, false), (1, "1f1b"), "none"),
        (1, 8, 2, (1, false), (1, "1f1b"), "selective"),
        (2, 4, 3, (1, false), (1, "1f1b"), "none"),
        (4, 2, 2, (1, false), (1, "1f1b"), "full"),
        (4, 1, 0, (2, false), (1, "1f1b"), "none"),
        (1, 4, 3, (2, true), (1, "1f1b"), "none"),
        (1, 4, 1, (2, false), (1, "1f1b"), "full"),
        (2, 1, 0, (4, true), (1, "1f1b"), "none"),
        (1, 2, 2, (4, false), (1, "1f1b"), "selective"),
        (4, 1, 0, (1, false), (2, "gpipe"), "selective"),
        (1, 4, 2, (1, false), (2, "zero_bubble"), "none"),
        (2, 2, 3, (1, false), (2, "1f1b"), "full"),
        (2, 1, 0, (1, false), (4, "interleaved"), "none"),
        (1, 1, 0, (1, false), (8, "1f1b"), "none"),
        (1, 1, 0, (4, true), (2, "zero_bubble_v"), "selective"),
        (1, 1, 0, (4, false), (2, "gpipe"), "full"),
        (1, 2, 1, (2, true), (2, "dual_pipe_v"), "none"),
    ];
    // Parts of sequences, and true if their ranks exchange rows for heads, before the rest.
    let of_context: [OfContext; 16] = [
        ((4, false), (1, 1, 1, (2, true), (1, "1f1b"), "none")),
        ((2, false), (2, 1, 0, (2, true), (1, "1f1b"), "full")),
        ((2, false), (1, 2, 3, (1, false), (2, "zero_bubble"), "selective")),
        ((4, false), (2, 1, 0, (1, false), (1, "1f1b"), "none")),
        ((4, false), (2, 1, 1, (1, false), (1, "1f1b"), "selective")),
        ((4, false), (1, 2, 2, (1, false), (1, "1f1b"), "full")),
        ((4, false), (1, 2, 3, (1, false), (1, "1f1b"), "none")),
        ((4, false), (1, 1, 0, (1, false), (2, "interleaved"), "none")),
        ((4, false), (1, 1, 3, (2, false), (1, "1f1b"), "full")),
        ((2, false), (4, 1, 0, (1, false), (1, "1f1b"), "selective")),
        ((2, true), (2, 2, 1, (1, false), (1, "1f1b"), "none")),
        ((2, true), (1, 4, 3, (1, false), (1, "1f1b"), "full")),
        ((2, false), (1, 1, 0, (4, false), (1, "1f1b"), "none")),
        ((2, false), (1, 2, 2, (2, false), (1, "1f1b"), "none")),
        ((2, false), (1, 1, 1, (2, true), (2, "dual_pipe_v"), "none")),
        ((2, true), (1, 1, 0, (1, false), (4, "zero_bubble_v"), "full")),
    ];
    let layout = |(context, row): OfContext| {
        let (replicate, shard, zero_stage, (tensor, sequence), (pipeline, schedule), checkpointing) = row;
        let (context, by_heads) = context;
        Layout {
            replicate,
            shard,
            context,
            by_heads,
            tensor,
            pipeline,
            sequence,
            zero_stage,
            schedule,
            checkpointing,
            ..Layout::ONE
        }
    };
    rows.into_iter().map(|row| ((1, false), row)).chain(of_context).map(layout).collect()
}

/// Layouts of eight ranks for mixtures: experts over replicas that are divided in every other way,
/// and whole experts on every axis.
pub fn of_experts() -> Vec<Layout> {
    type Row = (usize, [usize; 3], usize, (usize, bool), (usize, &'static str), &'static str);
    // Expert degree; replicas, shards, ZeRO stage; parts of sequences; parts of products, rows too;
    // stages, schedule; checkpointing.
    let rows: [Row; 30] = [
        (2, [2, 2, 3], 1, (2, true), (1, "1f1b"), "none"),
        (2, [2, 1, 0], 1, (2, false), (2, "1f1b"), "full"),
        (2, [2, 2, 3], 2, (1, false), (1, "1f1b"), "none"),
        (4, [4, 2, 2], 1, (1, false), (1, "1f1b"), "full"),
        (2, [2, 2, 1], 1, (1, false), (2, "zero_bubble"), "full"),
        (2, [2, 1, 0], 2, (1, false), (2, "dual_pipe_v"), "none"),
        (8, [8, 1, 0], 1, (1, false), (1, "1f1b"), "none"),
        (1, [1, 2, 3], 2, (2, true), (1, "1f1b"), "none"),
        (4, [8, 1, 0], 1, (1, false), (1, "1f1b"), "selective"),
        (2, [8, 1, 0], 1, (1, false), (1, "1f1b"), "full"),
        (2, [2, 4, 3], 1, (1, false), (1, "1f1b"), "none"),
        (2, [4, 2, 1], 1, (1, false), (1, "1f1b"), "selective"),
        (2, [4, 2, 3], 1, (1, false), (1, "1f1b"), "full"),
        (4, [4, 1, 0], 2, (1, false), (1, "1f1b"), "full"),
        (2, [2, 1, 1], 4, (1, false), (1, "1f1b"), "none"),
        (4, [4, 1, 0], 1, (1, false), (2, "1f1b"), "selective"),
        (2, [2, 1, 0], 1, (1, false), (4, "interleaved"), "none"),
        (2, [2, 1, 0], 1, (1, false), (4, "1f1b"), "full"),
        (1, [1, 8, 3], 1, (1, false), (1, "1f1b"), "full"),
        (1, [2, 1, 0], 1, (4, true), (1, "1f1b"), "none"),
        (1, [1, 1, 0], 1, (2, false), (4, "zero_bubble"), "none"),
        (1, [2, 2, 1], 2, (1, false), (1, "1f1b"), "none"),
        (1, [4, 1, 0], 1, (1, false), (2, "gpipe"), "selective"),
        (1, [1, 2, 2], 1, (2, true), (2, "interleaved"), "none"),
        (2, [2, 1, 0], 1, (4, true), (1, "1f1b"), "none"),
        (4, [4, 1, 0], 1, (2, false), (1, "1f1b"), "selective"),
        (2, [4, 1, 0], 1, (2, true), (1, "1f1b"), "full"),
        (2, [2, 2, 1], 1, (2, false), (1, "1f1b"), "none"),
        (2, [2, 1, 1], 2, (2, true), (1, "1f1b"), "none"),
        (2, [2, 1, 0], 1, (2, true), (2, "zero_bubble"), "selective"),
    ];
    let layout =
        |(experts, [replicate, shard, zero_stage], context, (tensor, sequence), stages, checkpointing): Row| {
            let (pipeline, schedule) = stages;
            Layout {
                replicate,
                shard,
                context,
                tensor,
                pipeline,
                experts,
                sequence,
                zero_stage,
                schedule,
                checkpointing,
                ..Layout::ONE
            }
        };
    rows.into_iter().map(layout).collect()
}

/// A small model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Model {
    pub family: &'static str,
    /// True if the head uses the embedding's weights.
    pub tied: bool,
    pub vocab: usize,
}

impl Model {
    /// True if units on several stages read one table: gradients of it are summed stage by stage.
    pub fn shares(&self) -> bool {
        self.tied || self.family == "t5"
    }

    pub fn sets(&self) -> Vec<String> {
        let of_family: &[&str] = match self.family {
            "llama" => &["model.kv_heads=2"],
            "dots1" => &[
                "model.kv_heads=2",
                "experts.count=8",
                "experts.top_k=2",
                "experts.dense_layers=1",
                "experts.bias_update_rate=0.01",
            ],
            "t5" => &["model.kv_heads=6", "model.encoder_layers=2"],
            _ => &["model.kv_heads=6", "model.dropout=0.1"],
        };
        let mut sets: Vec<String> = of_family.iter().map(|set| (*set).to_owned()).collect();
        sets.extend(["model.heads=6", "model.dim=48", "model.layers=6", "precision.compute='f32'"].map(str::to_owned));
        sets.push("training.micro_batch_size=1".to_owned());
        // At ten times this rate, steps are so long that rounding grows a thousandfold in 50 steps,
        // in data parallelism too.
        sets.push("optimizer.learning_rate=0.0003".to_owned());
        sets.push(format!("model.family='{}'", self.family));
        sets.push(format!("model.tie_embeddings={}", self.tied));
        sets.push(format!("model.vocab_size={}", self.vocab));
        sets
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = match self.family {
            "llama" => "Llama",
            "gpt2" => "GPT-2",
            "t5" => "T5",
            other => other,
        };
        write!(f, "{family}, {}, {} tokens", if self.tied { "tied" } else { "untied" }, self.vocab)
    }
}

/// A mixture with shared experts, whose first block has none, balanced by biases.
pub const MIXTURE: Model = Model { family: "dots1", tied: false, vocab: 257 };

/// An encoder of two blocks and a decoder of four.
pub const ENCODER: [Model; 2] =
    [Model { family: "t5", tied: true, vocab: 257 }, Model { family: "t5", tied: false, vocab: 1000 }];

/// Both families, tied and untied, with vocabularies that ranks do and do not divide: every pair
/// of two of these choices occurs.
pub fn models() -> Vec<Model> {
    let rows = [("llama", false, 257), ("gpt2", true, 257), ("llama", true, 1000), ("gpt2", false, 1000)];
    rows.into_iter().map(|(family, tied, vocab)| Model { family, tied, vocab }).collect()
}
