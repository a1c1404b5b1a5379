//! Published measurements, and the question that each one poses to the simulator.
//!
//! `data/measurements.csv` has one run per line: model, cluster, degrees, batch, precision,
//! recomputation, software, and the measured figures. `data/sources.toml` says where each prefix of
//! an id was read and how its figures count. [`Row::case`] turns a row into the question that a
//! user would ask: an architecture, a mesh, a strategy, a cluster. No answer is looked up by row or
//! by source.

use crate::cluster::Cluster;
use crate::profile::{Format, ProfileError, Profiles};
use crate::stack::{Partition, Selective, Stack};
use crate::transformer::{Architecture, Experts, Latent, Workload};
use serde::Deserialize;
use trainyard_program::{ExpertRanks, Keep, Mesh, PipelineSchedule, ReduceSchedule, Reshard, Schedule, Strategy, Tier};

/// The bytes that a memory figure counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryFigure {
    /// Bytes of tensors.
    Allocated,
    /// Bytes of the allocator.
    Reserved,
    /// All bytes in use on the device (nvidia-smi).
    Device,
}

/// The kinds of runs whose errors are shown apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Class {
    /// Dense models whose products have operands of at least 16 bits.
    Dense,
    /// Mixtures of experts.
    Mixture,
    /// Dense models with operands of 8 or 4 bits.
    Narrow,
    /// Sequences of at least [`LONG_SEQUENCE`] tokens.
    Long,
}

/// Number of tokens from which a sequence counts as long.
pub const LONG_SEQUENCE: u32 = 32_768;

impl Class {
    /// Every class.
    pub const ALL: [Class; 4] = [Class::Dense, Class::Mixture, Class::Narrow, Class::Long];

    /// The class of a model's runs.
    pub fn of(model: &Architecture, format: Format, sequence: u32) -> Class {
        match (model.experts, format.bytes() < 2.0) {
            _ if sequence >= LONG_SEQUENCE => Class::Long,
            (Some(_), _) => Class::Mixture,
            (None, true) => Class::Narrow,
            (None, false) => Class::Dense,
        }
    }

    /// The words for it.
    pub fn words(self) -> &'static str {
        match self {
            Class::Dense => "dense models in 16 bits",
            Class::Mixture => "mixtures of experts",
            Class::Narrow => "dense models in 8 and 4 bits",
            Class::Long => "sequences of 32,768 tokens and more",
        }
    }
}

/// One published run.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// `PREFIX-NUMBER`.
    pub id: String,
    /// `gpt`, `llama`, `qwen-moe`, `deepseek-v3`.
    pub family: String,
    /// The model; experts by family.
    pub model: Architecture,
    /// Number of tokens of a sequence.
    pub sequence: u32,
    /// Name of the device's profile.
    pub device: String,
    /// Name of the network's profile.
    pub network: String,
    /// Number of devices.
    pub devices: u32,
    /// Devices per node.
    pub devices_per_node: u32,
    /// Tensor-parallel degree.
    pub tp: u32,
    /// Number of pipeline stages.
    pub pp: u32,
    /// Number of stretches of layers per stage.
    pub chunks: u32,
    /// Context-parallel degree.
    pub cp: u32,
    /// Expert-parallel degree.
    pub ep: u32,
    /// Data-parallel degree.
    pub dp: u32,
    /// Number of data-parallel ranks that share the state: `dp`, or fewer in hybrid sharding.
    pub shards: u32,
    /// ZeRO stage.
    pub zero: u8,
    /// Number of sequences of a micro-batch.
    pub micro_batch: u32,
    /// Number of sequences of a step.
    pub global_batch: u32,
    /// Number format of products.
    pub format: Format,
    /// `none`, `selective` as the stack does it, `mlp`, `norms` or `up_projections` instead,
    /// `alternate` (every second layer full), `full`, or the share of layers of which only the
    /// input is kept.
    pub recompute: String,
    /// Number of layers whose activations lie on the host between forward and backward.
    pub offloaded: u32,
    /// Number of units gathered ahead, if the source says so.
    pub prefetch: Option<u32>,
    /// Name of the software stack.
    pub stack: String,
    /// Measured tokens per second and device.
    pub tokens_per_s: Option<f64>,
    /// Measured memory of the fullest device, 1e9 bytes.
    pub memory_gb: Option<f64>,
    /// The bytes that `memory_gb` counts.
    pub memory_figure: Option<MemoryFigure>,
    /// True if the run was out of memory.
    pub out_of_memory: bool,
    /// `A`: fully specified; `B`: up to three fields missing.
    pub grade: String,
    /// True if the source shows that the run was slowed by something beside its configuration: it
    /// is 2 to 30 times slower than its neighbours in the source's chart, or the source names the
    /// fault.
    pub disturbed: bool,
    /// The source's remarks that explain the figure.
    pub remark: String,
}

/// The question that a row poses to the simulator.
#[derive(Clone, PartialEq, Debug)]
pub struct Case {
    /// The model.
    pub model: Architecture,
    /// A rank's micro-batch and the way units are split.
    pub work: Workload,
    /// The numbering of ranks.
    pub mesh: Mesh,
    /// The strategy of the step.
    pub strategy: Strategy,
    /// The cluster.
    pub cluster: Cluster,
    /// The software.
    pub stack: Stack,
    /// The number format of products.
    pub format: Format,
}

/// The reason why a row is not a valid question.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum RowError {
    /// The columns or the numbers are wrong.
    #[error("measurements, line {line}: {problem}")]
    Parse {
        /// Line number, counted from 1.
        line: usize,
        /// The fault.
        problem: String,
    },
    /// A profile does not exist.
    #[error("{id}: {error}")]
    Profile {
        /// Id of the row.
        id: String,
        /// The missing profile.
        error: ProfileError,
    },
    /// A stack does not exist, or degrees do not divide evenly.
    #[error("{id}: {problem}")]
    Shape {
        /// Id of the row.
        id: String,
        /// The contradiction.
        problem: String,
    },
}

/// A source of measurements, and the way its figures count.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Prefix of row ids.
    pub prefix: String,
    /// Author, year, title, table.
    pub citation: String,
    /// The kind of its speed figures.
    pub speed: String,
    /// The bytes that its memory figures count.
    pub memory: String,
}

#[derive(Deserialize)]
struct Sources {
    source: Vec<Source>,
}

/// All sources.
pub fn sources() -> Vec<Source> {
    let file: Sources = toml::from_str(include_str!("../data/sources.toml")).expect("built-in sources are tested");
    file.source
}

/// All rows.
///
/// # Errors
///
/// A line that does not parse.
pub fn rows() -> Result<Vec<Row>, RowError> {
    parse(include_str!("../data/measurements.csv"))
}

/// Rows of a file with the columns of `data/measurements.csv`.
///
/// # Errors
///
/// A line that does not parse.
pub fn parse(text: &str) -> Result<Vec<Row>, RowError> {
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let Some((_, header)) = lines.next() else { return Ok(Vec::new()) };
    let columns: Vec<&str> = header.split(',').collect();
    lines
        .map(|(number, line)| {
            let values: Vec<&str> = line.split(',').collect();
            let fail = |problem: String| RowError::Parse { line: number + 1, problem };
            if values.len() != columns.len() {
                return Err(fail(format!("{} columns where the header has {}", values.len(), columns.len())));
            }
            Fields { columns: &columns, values: &values }.row().map_err(fail)
        })
        .collect()
}

struct Fields<'a> {
    columns: &'a [&'a str],
    values: &'a [&'a str],
}

impl Fields<'_> {
    fn text(&self, name: &str) -> Result<&str, String> {
        let column = self.columns.iter().position(|column| *column == name);
        column.map(|at| self.values[at].trim()).ok_or_else(|| format!("there is no column `{name}`"))
    }

    fn number(&self, name: &str) -> Result<u32, String> {
        let text = self.text(name)?;
        text.parse().map_err(|_| format!("`{name}` is `{text}`, and must be a whole number"))
    }

    fn maybe(&self, name: &str) -> Result<Option<f64>, String> {
        let text = self.text(name)?;
        if text.is_empty() {
            return Ok(None);
        }
        text.parse().map(Some).map_err(|_| format!("`{name}` is `{text}`, and must be a number"))
    }

    fn row(&self) -> Result<Row, String> {
        let family = self.text("family")?.to_owned();
        let gated = family != "gpt";
        // Benchmarks deal tokens evenly unless they say so.
        let natural = self.text("remark")?.contains("natural routing");
        let imbalance = if natural { Experts::NATURAL } else { 1.0 };
        let experts = match family.as_str() {
            "qwen-moe" => Some(Experts { count: 128, per_token: 8, shared_ffn: 0, imbalance }),
            "deepseek-v3" => Some(Experts { count: 256, per_token: 8, shared_ffn: 2048, imbalance }),
            _ => None,
        };
        let sequence = self.number("sequence")?;
        let model = Architecture {
            dim: self.number("hidden")?,
            layers: self.number("layers")?,
            encoder_layers: 0,
            divided: false,
            heads: self.number("heads")?,
            kv_heads: self.number("kv_heads")?,
            head_dim: self.number("head_dim")?,
            ffn: self.number("ffn")?,
            vocab: self.number("vocab")?,
            gated,
            tied: self.text("tied")? == "y",
            positions: if gated { 0 } else { sequence },
            experts,
            patch_len: 0,
            value_residual: false,
            latent: (family == "deepseek-v3").then_some(Latent { q: 1536, kv: 512, rotary: 64 }),
        };
        let format = match self.text("precision")? {
            "bf16" => Format::Bf16,
            "fp16" => Format::Fp16,
            "fp32" => Format::Fp32,
            "tf32" => Format::Tf32,
            "fp8" | "mxfp8" => Format::Fp8,
            "fp4" => Format::Fp4,
            other => return Err(format!("`precision` is `{other}`")),
        };
        let memory_figure = match self.text("memory_kind")? {
            "" => None,
            "allocated" => Some(MemoryFigure::Allocated),
            "reserved" => Some(MemoryFigure::Reserved),
            "device" => Some(MemoryFigure::Device),
            other => return Err(format!("`memory_kind` is `{other}`")),
        };
        Ok(Row {
            id: self.text("id")?.to_owned(),
            family,
            model,
            sequence,
            device: self.text("device")?.to_owned(),
            network: self.text("network")?.to_owned(),
            devices: self.number("devices")?,
            devices_per_node: self.number("devices_per_node")?,
            tp: self.number("tp")?,
            pp: self.number("pp")?,
            chunks: self.number("chunks")?,
            cp: self.number("cp")?,
            ep: self.number("ep")?,
            dp: self.number("dp")?,
            shards: self.number("shards")?,
            zero: self.number("zero")? as u8,
            micro_batch: self.number("micro_batch")?,
            global_batch: self.number("global_batch")?,
            format,
            recompute: self.text("recompute")?.to_owned(),
            offloaded: self.maybe("offloaded")?.map_or(0, |layers| layers as u32),
            prefetch: self.maybe("prefetch")?.map(|units| units as u32),
            stack: self.text("stack")?.to_owned(),
            tokens_per_s: self.maybe("tokens_per_s")?,
            memory_gb: self.maybe("memory_gb")?,
            memory_figure,
            out_of_memory: self.text("out_of_memory")? == "y",
            grade: self.text("grade")?.to_owned(),
            disturbed: self.text("disturbed")? == "y",
            remark: self.text("remark")?.to_owned(),
        })
    }
}

impl Row {
    /// The prefix of the id, which identifies the source.
    pub fn source(&self) -> &str {
        self.id.split('-').next().unwrap_or_default()
    }

    /// The device and the source.
    pub(crate) fn device_and_source(&self) -> (String, String) {
        (self.device.clone(), self.source().to_owned())
    }

    /// The kind of run.
    pub fn class(&self) -> Class {
        Class::of(&self.model, self.format, self.sequence)
    }

    /// The question that the row poses to the simulator.
    ///
    /// # Errors
    ///
    /// Names that no profile has; a global batch that micro-batches do not divide.
    pub fn case(&self, profiles: &Profiles) -> Result<Case, RowError> {
        let shape = |problem: String| RowError::Shape { id: self.id.clone(), problem };
        let profile = |error: ProfileError| RowError::Profile { id: self.id.clone(), error };
        let device = profiles.device(&self.device).map_err(profile)?.clone();
        let network = profiles.network(&self.network).map_err(profile)?.clone();
        let nodes = self.devices.div_ceil(self.devices_per_node);
        let mut cluster = Cluster { device, devices_per_node: self.devices_per_node, nodes, network };
        if self.offloaded > 0 {
            // The simulator sends the activations of all layers. As many seconds pass as if only
            // those of the offloaded ones were sent.
            cluster.device.host_gb_s *= f64::from(self.model.layers) / f64::from(self.offloaded);
        }
        let mut stack = Stack::named(&self.stack).map_err(shape)?;
        stack.prefetch = self.prefetch.unwrap_or(stack.prefetch);
        stack.selective = match self.recompute.as_str() {
            "mlp" => Selective::Mlp,
            "norms" => Selective::NormsAndGates,
            "up_projections" => Selective::UpProjections,
            _ => stack.selective,
        };
        let work = Workload {
            sequence: self.sequence,
            micro_batch: self.micro_batch,
            tensor: self.tp,
            context: self.cp,
            expert: self.ep,
            operand_bytes: self.format.bytes(),
        };
        let sharded = self.zero > 0;
        let mesh = Mesh {
            pp: self.pp,
            dp_replicate: if sharded { self.dp / self.shards } else { self.dp },
            dp_shard: if sharded { self.shards } else { 1 },
            cp: self.cp,
            tp: self.tp,
            // Experts are dealt to the ranks of a tensor group first.
            ep: if self.ep > 1 { (self.ep / self.tp).max(1) } else { 1 },
            expert_ranks: ExpertRanks::Shards,
        };
        let micro_batches = self.global_batch as f64 / f64::from(self.dp * self.micro_batch);
        if micro_batches < 1.0 {
            return Err(shape(format!("{} sequences on {} ranks", self.global_batch, self.dp)));
        }
        let strategy = self.strategy(&stack, micro_batches.round() as u32);
        Ok(Case { model: self.model.clone(), work, mesh, strategy, cluster, stack, format: self.format })
    }

    fn strategy(&self, stack: &Stack, accumulation_steps: u32) -> Strategy {
        let units = self.model.layers as usize + 2;
        let share: f64 = self.recompute.parse().unwrap_or(0.0);
        let keep = |unit: usize| match self.recompute.as_str() {
            "full" => Keep::InputOnly,
            "selective" | "mlp" | "norms" | "up_projections" => Keep::Selective,
            "alternate" if unit.is_multiple_of(2) => Keep::InputOnly,
            // As often as the share says, evenly spread.
            _ if ((unit + 1) as f64 * share).floor() > (unit as f64 * share).floor() => Keep::InputOnly,
            _ => Keep::Everything,
        };
        let mut strategy = Strategy::new(units);
        strategy.accumulation_steps = accumulation_steps;
        strategy.keep = (0..units).map(keep).collect();
        strategy.keep[0] = Keep::Everything;
        if self.offloaded > 0 {
            strategy.offload.activations = Some(Tier::Host);
        }
        // FSDP's SHARD_GRAD_OP also shards parameters, and keeps them gathered from forward to
        // backward.
        let fully = self.zero >= 2;
        strategy.zero_stage = if fully { 3 } else { self.zero };
        // In a pipeline the parameters stay gathered for all micro-batches.
        let stays = self.zero == 2 || self.pp > 1;
        strategy.reshard_after_forward = if stays { Reshard::Never } else { Reshard::Always };
        // FSDP reduces after every micro-batch, and in a pipeline after the last.
        let per_micro_batch = fully && self.pp == 1;
        strategy.reduce_schedule =
            if per_micro_batch { ReduceSchedule::PerMicroBatch } else { ReduceSchedule::PerStep };
        strategy.prefetch = stack.prefetch;
        strategy.bytes = stack.state;
        strategy.sequence_parallel = stack.sequence_parallel;
        strategy.pipeline = if self.chunks > 1 {
            Schedule::from(PipelineSchedule::Interleaved { chunks: self.chunks })
        } else {
            Schedule::default()
        };
        strategy
    }
}

impl Case {
    /// Number of tokens of a step per device.
    pub fn tokens_per_device(&self) -> f64 {
        let sequences = self.mesh.data_parallel() * self.strategy.accumulation_steps * self.work.micro_batch;
        f64::from(sequences) * f64::from(self.work.sequence) / f64::from(self.mesh.ranks())
    }

    /// The division of units among stages.
    pub fn partition(&self) -> Partition {
        self.stack.partition
    }
}
