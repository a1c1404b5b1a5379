//! Settings of other trainers: writes a plan as the arguments or the configuration of a trainer,
//! and reads such settings, so that a present run can be priced.
//!
//! Each trainer's form is a module with two functions. `write` returns the text, and a list of the
//! parts of the plan for which the trainer has no setting; none is dropped silently. `read` returns
//! [`Settings`]: degrees, batch, precision, recomputation, and the facts about the software that
//! differ from the profile's. Keys that would change the price and are not understood are named.

mod accelerate;
mod deepspeed;
mod megatron;
mod nemo;
mod shell;
mod take;
mod torchtitan;

use crate::space::divisors;
use crate::stacks::StackProfile;
use crate::table::heading;
use crate::{Candidate, Checkpointing, Plan, Request};
use serde::Deserialize;
use std::path::Path;
use trainyard_base::format_bytes;
use trainyard_program::{Mesh, Offload, PipelineSchedule, ReduceSchedule, Reshard, Tier};
use trainyard_sim::{Format, Stack};

/// The form of a trainer's settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// Arguments of Megatron-LM, in a shell script.
    Megatron,
    /// Keys of a NeMo 2.0 recipe, as `nemo llm pretrain` takes them.
    Nemo,
    /// torchtitan's TOML.
    Torchtitan,
    /// DeepSpeed's JSON.
    Deepspeed,
    /// Accelerate's YAML.
    Accelerate,
}

impl Dialect {
    /// Every form.
    pub const ALL: [Dialect; 5] =
        [Dialect::Megatron, Dialect::Nemo, Dialect::Torchtitan, Dialect::Deepspeed, Dialect::Accelerate];

    /// The name, as for `--export`.
    pub const fn name(self) -> &'static str {
        match self {
            Dialect::Megatron => "megatron",
            Dialect::Nemo => "nemo",
            Dialect::Torchtitan => "torchtitan",
            Dialect::Deepspeed => "deepspeed",
            Dialect::Accelerate => "accelerate",
        }
    }

    /// The name of the built-in stack that reads it.
    pub const fn stack(self) -> &'static str {
        match self {
            Dialect::Accelerate => "fsdp2",
            other => other.name(),
        }
    }

    /// The form of a file, by its text. The name of the file decides only what is read as shell.
    pub fn of(name: &Path, text: &str) -> Result<Dialect, SettingsError> {
        let unknown = || {
            SettingsError(
                "not settings of a known trainer: known are DeepSpeed's JSON, torchtitan's TOML, Accelerate's YAML, \
                 and scripts with arguments of Megatron-LM or keys of NeMo"
                    .to_owned(),
            )
        };
        let extension = name.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let trimmed = text.trim_start();
        if extension == "json" || trimmed.starts_with('{') {
            return Ok(if text.contains("\"distributed_type\"") { Dialect::Accelerate } else { Dialect::Deepspeed });
        }
        if text.contains("trainer.strategy.") || text.contains("nemo llm") {
            return Ok(Dialect::Nemo);
        }
        if text.lines().any(|line| line.trim_start().starts_with("distributed_type:")) {
            return Ok(Dialect::Accelerate);
        }
        if extension == "toml" || text.contains("[parallelism]") {
            return Ok(Dialect::Torchtitan);
        }
        match text.contains("--micro-batch-size") || text.contains("-model-parallel-size") {
            true => Ok(Dialect::Megatron),
            false => Err(unknown()),
        }
    }
}

/// Settings that cannot be read, or that describe no run.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(pub String);

/// A plan as a trainer's settings.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Exported {
    /// The text of the file.
    pub text: String,
    /// Choices of the plan that the text does not say, in words.
    pub unsaid: Vec<String>,
}

/// Writes `plan` in the form `dialect`. `software` is the software as which it was priced.
pub fn export(dialect: Dialect, request: &Request, plan: &Plan, software: &Stack) -> Exported {
    let job = Job { request, plan, software };
    match dialect {
        Dialect::Megatron => megatron::write(&job),
        Dialect::Nemo => nemo::write(&job),
        Dialect::Torchtitan => torchtitan::write(&job),
        Dialect::Deepspeed => deepspeed::write(&job),
        Dialect::Accelerate => accelerate::write(&job),
    }
}

/// Reads settings in the form `dialect`.
///
/// # Errors
///
/// Text that is not of the form, or values that are not those of a run.
pub fn read(dialect: Dialect, text: &str) -> Result<Settings, SettingsError> {
    let read = match dialect {
        Dialect::Megatron => megatron::read(text),
        Dialect::Nemo => nemo::read(text),
        Dialect::Torchtitan => torchtitan::read(text),
        Dialect::Deepspeed => deepspeed::read(text),
        Dialect::Accelerate => accelerate::read(text),
    };
    read.map_err(|SettingsError(problem)| SettingsError(format!("as settings of {}: {problem}", dialect.name())))
}

/// The plan that is written.
struct Job<'a> {
    request: &'a Request,
    plan: &'a Plan,
    software: &'a Stack,
}

impl Job<'_> {
    fn candidate(&self) -> &Candidate {
        &self.plan.candidate
    }

    fn mesh(&self) -> &Mesh {
        &self.plan.candidate.mesh
    }

    fn blocks(&self) -> u32 {
        self.request.model.layers + self.request.model.encoder_layers
    }

    /// Number of stretches of blocks that stages are dealt.
    fn stretches(&self) -> u32 {
        self.mesh().pp * self.candidate().chunks()
    }

    /// The stretches of units: embedding, blocks, head.
    fn stretch_units(&self) -> Vec<std::ops::Range<u32>> {
        let starts = std::iter::once(0).chain(self.plan.cuts.iter().copied());
        let ends = self.plan.cuts.iter().copied().chain([self.blocks() + 2]);
        starts.zip(ends).map(|(start, end)| start..end).collect()
    }

    /// True if every stretch has equally many blocks.
    fn has_equal_stretches(&self) -> bool {
        let blocks = |units: &std::ops::Range<u32>| units.clone().filter(|u| (1..=self.blocks()).contains(u)).count();
        let counts: Vec<usize> = self.stretch_units().iter().map(blocks).collect();
        counts.iter().all(|count| *count == counts[0])
    }

    /// The lines that head every file: the request and the prediction.
    fn header(&self) -> Vec<String> {
        let plan = self.plan;
        vec![
            heading(self.request).trim_end().to_owned(),
            format!(
                "{}; micro-batch {} x {}",
                plan.layout,
                self.candidate().micro_batch,
                self.candidate().accumulation
            ),
            format!(
                "predicted as {} runs it: {:.3} s a step, {:.1} % MFU, {} on the fullest device",
                self.software.name,
                plan.step_s,
                100.0 * plan.mfu,
                format_bytes(plan.memory.total)
            ),
        ]
    }

    /// The devices that are used, as nodes and devices of a node.
    fn nodes(&self) -> (u32, u32) {
        let each = self.request.cluster.devices_per_node.min(self.mesh().ranks());
        (self.mesh().ranks().div_ceil(each), each)
    }

    /// The choices that no form but Trainyard's own has.
    fn unsaid_everywhere(&self) -> Vec<String> {
        let mut unsaid = Vec::new();
        if self.candidate().format == Format::Tf32 {
            unsaid.push("products in TF32: set NVIDIA_TF32_OVERRIDE=1, or torch.backends.cuda.matmul".to_owned());
        }
        let Offload { optimizer, parameters, activations, gradients } = self.candidate().offload;
        if [optimizer, parameters, activations, gradients].contains(&Some(Tier::Disk)) {
            unsaid.push("state on a disk".to_owned());
        }
        unsaid
    }
}

/// A trainer's settings, as far as they were understood.
#[derive(Clone, PartialEq, Debug)]
pub struct Settings {
    /// The form that was read.
    pub dialect: Dialect,
    /// The name of the stack that runs it.
    pub stack: &'static str,
    /// Tensor-parallel degree.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Context-parallel degree.
    pub cp: u32,
    /// Expert-parallel degree.
    pub ep: u32,
    /// Number of replicas of the sharded state; None: one, or all ranks if nothing is sharded.
    pub dp_replicate: Option<u32>,
    /// Number of ranks that share a state; None: the remaining ones.
    pub dp_shard: Option<u32>,
    /// The ZeRO stage.
    pub zero_stage: u8,
    /// Stage 3: the time at which gathered parameters are released.
    pub reshard: Reshard,
    /// Stage 3: number of units gathered ahead.
    pub prefetch: u32,
    /// The time at which gradients of several micro-batches are summed.
    pub reduce_schedule: ReduceSchedule,
    /// Sequences of a micro-batch.
    pub micro_batch: Option<u32>,
    /// Micro-batches of a rank.
    pub accumulation: Option<u32>,
    /// Sequences of a step.
    pub global_batch: Option<u64>,
    /// Tokens of a sequence.
    pub sequence_length: Option<u64>,
    /// Number of devices.
    pub devices: Option<u32>,
    /// Number format of products.
    pub format: Option<Format>,
    /// Recomputed activations.
    pub recompute: Recompute,
    /// Pipeline schedule.
    pub schedule: PipelineSchedule,
    /// State on the host.
    pub offload: Offload,
    /// Facts about the software that differ from the profile's, by the keys of its `[price]`.
    pub software: toml::Table,
    /// Assumptions about what the settings leave open, in words.
    pub assumed: Vec<String>,
    /// Keys that change speed or memory, or may, and are not priced.
    pub unpriced: Vec<String>,
}

/// Recomputed activations, as trainers say it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Recompute {
    /// None.
    #[default]
    None,
    /// Cheap functions of every block.
    Selective,
    /// Every block.
    Full,
    /// So many blocks of every stretch.
    SomeOfStretch(u32),
    /// Every nth block.
    EveryNth(u32),
}

impl Settings {
    fn new(dialect: Dialect) -> Settings {
        Settings {
            dialect,
            stack: dialect.stack(),
            tp: 1,
            pp: 1,
            cp: 1,
            ep: 1,
            dp_replicate: None,
            dp_shard: None,
            zero_stage: 0,
            reshard: Reshard::Always,
            prefetch: 1,
            reduce_schedule: ReduceSchedule::PerStep,
            micro_batch: None,
            accumulation: None,
            global_batch: None,
            sequence_length: None,
            devices: None,
            format: None,
            recompute: Recompute::None,
            schedule: PipelineSchedule::OneForwardOneBackward,
            offload: Offload::default(),
            software: toml::Table::new(),
            assumed: Vec::new(),
            unpriced: Vec::new(),
        }
    }

    /// The software as which the settings run: `profile`'s, with what they change.
    ///
    /// # Errors
    ///
    /// A fact that the simulator does not have.
    pub fn software(&self, profile: &StackProfile) -> Result<Stack, SettingsError> {
        profile.changed(&self.software).map_err(SettingsError)
    }

    /// Sequences of a step on `devices` devices, if the settings say them.
    pub fn batch(&self, devices: u32) -> Option<u64> {
        let made = || {
            let model = self.model_ranks()?.max(1);
            Some(u64::from(devices / model) * u64::from(self.micro_batch?) * u64::from(self.accumulation?))
        };
        self.global_batch.or_else(made)
    }

    /// The candidates that the settings describe on the devices of `request`: one, or one for each
    /// micro-batch where they do not say it.
    ///
    /// # Errors
    ///
    /// Degrees that do not divide the devices, or a batch that does not divide.
    pub fn candidates(&self, request: &Request) -> Result<Vec<Candidate>, SettingsError> {
        let mesh = self.mesh(request)?;
        let (global, dp) = (request.global_batch, u64::from(mesh.data_parallel()));
        let fail = |problem: String| Err(SettingsError(problem));
        if !global.is_multiple_of(dp) {
            return fail(format!("{dp} data-parallel ranks do not divide the global batch of {global}"));
        }
        let sequences = global / dp;
        let micro_batch = request.fixed.micro_batch.or(self.micro_batch);
        let accumulation = request.fixed.accumulation.or(self.accumulation);
        let of = |micro_batch: u32, accumulation: u32| self.candidate(mesh, micro_batch, accumulation, request);
        match (micro_batch.map(u64::from), accumulation.map(u64::from)) {
            (Some(micro), Some(steps)) if micro * steps != sequences => fail(format!(
                "a micro-batch of {micro} x {steps} on {dp} data-parallel ranks makes {} sequences a step, and the \
                 global batch is {global}",
                micro * steps * dp
            )),
            (Some(each), None) | (None, Some(each)) if each == 0 || !sequences.is_multiple_of(each) => fail(format!(
                "{each} does not divide the {sequences} sequences of a rank: the global batch is {global} on {dp} \
                 data-parallel ranks"
            )),
            (Some(micro), _) => Ok(vec![of(micro as u32, (sequences / micro) as u32)]),
            (None, Some(steps)) => Ok(vec![of((sequences / steps) as u32, steps as u32)]),
            (None, None) => {
                // Products with more rows than this are no faster.
                let most = ((1 << 16) / request.sequence_length).max(1);
                Ok(divisors(sequences, most).map(|micro| of(micro as u32, (sequences / micro) as u32)).collect())
            }
        }
    }

    /// Number of ranks that hold a model together, before any data parallelism; None if there is no
    /// such number of ranks.
    fn model_ranks(&self) -> Option<u32> {
        self.tp.checked_mul(self.pp)?.checked_mul(self.cp)
    }

    fn mesh(&self, request: &Request) -> Result<Mesh, SettingsError> {
        let Settings { tp, pp, cp, ep, .. } = *self;
        let fail = |problem: String| Err(SettingsError(problem));
        let devices = request.cluster.devices().min(request.limits.devices.unwrap_or(u32::MAX));
        if let Some(given) = self.devices.filter(|given| *given != devices) {
            return fail(format!(
                "they are for {given} devices, and {devices} are planned for: say another --cluster, or --max-gpus {given}"
            ));
        }
        let divides = |model: &u32| *model > 0 && devices.is_multiple_of(*model);
        let Some(model) = self.model_ranks().filter(divides) else {
            return fail(format!("tp {tp} x pp {pp} x cp {cp} does not divide {devices} devices"));
        };
        let dp = devices / model;
        let shard = match (self.zero_stage, self.dp_shard, self.dp_replicate) {
            (0, ..) => 1,
            (_, Some(shard), _) => shard,
            (_, None, replicate) => dp / replicate.unwrap_or(1).max(1),
        };
        let replicate = if self.zero_stage == 0 { dp } else { self.dp_replicate.unwrap_or(dp / shard.max(1)) };
        if shard == 0 || u64::from(replicate) * u64::from(shard) != u64::from(dp) {
            return fail(format!(
                "{replicate} replicas of {shard} shards are not the {dp} data-parallel ranks of {devices} devices"
            ));
        }
        if ep == 0 || !(shard * cp).is_multiple_of(ep) {
            return fail(format!("expert parallelism of degree {ep} does not divide a shard group of {}", shard * cp));
        }
        let heads = &request.model;
        if !heads.heads.is_multiple_of(tp) || !heads.kv_heads.is_multiple_of(tp) {
            return fail(format!(
                "tensor parallelism of degree {tp} does not divide {} heads ({} of keys and values)",
                heads.heads, heads.kv_heads
            ));
        }
        let stretches = u64::from(pp) * u64::from(self.schedule.facts().chunks);
        let blocks = heads.layers + heads.encoder_layers;
        if pp > 1 && stretches > u64::from(blocks) {
            return fail(format!("{stretches} pipeline stretches for {blocks} blocks"));
        }
        Ok(Mesh { pp, dp_replicate: replicate, dp_shard: shard, cp, tp, ep, ..Mesh::default() })
    }

    fn candidate(&self, mesh: Mesh, micro_batch: u32, accumulation: u32, request: &Request) -> Candidate {
        let blocks = request.model.layers + request.model.encoder_layers;
        let pipeline = if mesh.pp > 1 { self.schedule } else { PipelineSchedule::OneForwardOneBackward };
        let full = match self.recompute {
            Recompute::None | Recompute::Selective => 0,
            Recompute::Full => blocks,
            Recompute::SomeOfStretch(each) => each.saturating_mul(mesh.pp * pipeline.facts().chunks).min(blocks),
            Recompute::EveryNth(n) => blocks / n.max(1),
        };
        let selective = if self.recompute == Recompute::Selective { blocks } else { 0 };
        // Choices without effect have their usual values.
        let zero_stage = if mesh.shard_degree() > 1 { self.zero_stage } else { 0 };
        let summed_often = zero_stage >= 2 && accumulation > 1;
        Candidate {
            zero_stage,
            reshard: if zero_stage == 3 { self.reshard } else { Reshard::Always },
            prefetch: self.prefetch,
            reduce_schedule: if summed_often { self.reduce_schedule } else { ReduceSchedule::PerStep },
            checkpointing: Checkpointing { full, selective },
            offload: self.offload,
            pipeline,
            ..Candidate::plain(mesh, micro_batch, accumulation, self.format.unwrap_or(request.formats[0]))
        }
    }
}

#[cfg(test)]
mod tests;
