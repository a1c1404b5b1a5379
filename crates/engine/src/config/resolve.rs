//! Completes a requested [`Config`] to a [`Resolved`]. Every derived value gets a derivation;
//! everything impossible is reported as a problem.

use super::error::Problems;
use super::mistaken::{hub_dataset, hub_model};
use super::resolve_images::ImageSettings;
use super::resolve_model::ModelShape;
use super::resolve_spans::SpanSettings;
use super::sections::*;
use super::value::ConfigValue;
use super::{Apart, Batch, BatchStage, Batches, Config, ConfigError, DeviceKind, Origin, Parallel, ServerRule};
use crate::averaging::Averaging;
use crate::consolidation::Consolidation;
use crate::constraints::WeightConstraints;
use crate::schedule::{Schedule, usual_warmup};
use crate::spans::sentinels;
use serde::Serialize;
use std::path::PathBuf;
use trainyard_data::Tokenizer;
use trainyard_model::ImageSpec;
use trainyard_tensor::cpu::Isa;

/// Upper limit for the tokens of a micro-batch on a rank.
const TOKENS_MAX: usize = 1 << 24;
/// Upper limit for the micro-batches of a rank's step. The program of a step has several
/// instructions for each micro-batch and unit.
const ACCUMULATION_MAX: usize = 1 << 14;

/// The longest sequence that is derived. Longer ones must be requested, because activations grow
/// with them.
const SEQUENCE_LENGTH_DERIVED_MAX: usize = 2048;

/// The default of `training.sequence_length` for a model that takes at most `longest` tokens.
pub(crate) fn usual_sequence_length(longest: usize) -> usize {
    longest.min(SEQUENCE_LENGTH_DERIVED_MAX)
}

/// Facts that a configuration depends on and does not contain.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Cores that this process may use.
    pub cores: usize,
    /// The origin of `cores` in words, e.g. `cores that this process may use`.
    pub cores_because: String,
    /// Number of processes that were started together, one per rank. None for a single process,
    /// whose ranks are threads.
    pub processes: Option<usize>,
    /// Number of those processes that share these cores, this one included.
    pub sharing: usize,
    /// Tokens in the tokenizer's vocabulary, once it is known.
    pub tokenizer_vocabulary: Option<usize>,
    /// Tokens for the spans that span corruption takes out, which the tokenizer has; 0 while it is
    /// not known.
    pub sentinels: usize,
    /// The names of the classes of images, once the data is opened.
    pub classes: Option<Vec<String>>,
    /// Facts from the `config.json` in `model.path`, once it is read.
    pub pretrained: Option<Pretrained>,
    /// Sequences of one pass over the training data, once they are opened.
    pub sequences_per_epoch: Option<u64>,
    /// True if the caller supplies batches (benchmarks), so that `[data]` may be empty.
    pub batches_supplied: bool,
}

/// Facts about a Hugging Face model that the other sections are checked against.
#[derive(Clone, PartialEq, Debug)]
pub struct Pretrained {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// The longest sequence.
    pub max_sequence_length: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Its images; None for a model of text.
    pub image: Option<ImageSpec>,
    /// True if it has an encoder beside its decoder.
    pub paired: bool,
}

/// The threads of one process, from `OMP_NUM_THREADS`.
pub(crate) fn omp_num_threads() -> Option<usize> {
    std::env::var("OMP_NUM_THREADS").ok()?.trim().parse().ok().filter(|threads| *threads > 0)
}

impl Inputs {
    /// Notes what depends on the tokenizer.
    pub fn knows(&mut self, tokenizer: &Tokenizer) {
        self.tokenizer_vocabulary = Some(tokenizer.vocab_size());
        self.sentinels = sentinels(tokenizer);
    }

    /// Inputs of one rank on this machine; `OMP_NUM_THREADS` is respected.
    pub fn of_this_machine() -> Inputs {
        let available = std::thread::available_parallelism().map_or(1, |n| n.get());
        let (cores, because) = match omp_num_threads() {
            Some(threads) => (threads, "OMP_NUM_THREADS".to_owned()),
            None => (available, "cores that this process may use".to_owned()),
        };
        Inputs {
            cores,
            cores_because: because,
            processes: None,
            sharing: 1,
            tokenizer_vocabulary: None,
            sentinels: 0,
            classes: None,
            pretrained: None,
            sequences_per_epoch: None,
            batches_supplied: false,
        }
    }
}

/// A derived value and the reason for it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Derivation {
    /// `section.key`.
    pub key: String,
    /// The value as TOML.
    pub value: String,
    /// The reason, one phrase.
    pub because: String,
}

/// The model to train.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub enum ModelSource {
    /// A shape.
    Shape(Box<ModelShape>),
    /// A Hugging Face folder or a GGUF file.
    HuggingFace {
        /// Its place.
        path: PathBuf,
        /// True if training starts from its weights.
        load_weights: bool,
    },
}

/// Rotary positions: base and scaling. `factor` and the fields after it are read only by the
/// scalings that use them.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[allow(missing_docs, reason = "each field is a rope_ key of [model] and documented there")]
pub struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
    pub factor: f64,
    pub original_length: usize,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
}

/// Limits of a training. The first to be reached ends it. At least one is set.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Limits {
    /// Optimizer steps.
    pub steps: Option<u64>,
    /// Seconds of training.
    pub seconds: Option<f64>,
}

/// The update rule with all its numbers. Numbers that the rule does not use have their defaults.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[allow(missing_docs, reason = "each field is a key of [optimizer] and documented there")]
pub struct OptimizerSettings {
    pub name: OptimizerName,
    pub learning_rate: f64,
    /// Peak learning rate of matrices under Muon; for other rules, of all parameters.
    pub matrix_learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// Bits of an element of AdamW's moments: 32, or 8 in blocks with a scale.
    pub state_bits: usize,
    /// The update after which AdamW's second moment stays as it is; `None`: it never does.
    pub variance_steps: Option<u64>,
    pub weight_decay: f64,
    pub momentum: f64,
    pub nesterov: bool,
    /// `None`: no clipping.
    pub clip_norm: Option<f64>,
    pub muon_scale: MuonScale,
    pub newton_schulz_steps: usize,
    pub factored_decay: f64,
    pub update_clip: f64,
    pub relative_step: bool,
    /// The average of the weights that is kept beside the state; None if there is none.
    pub averaging: Option<Averaging>,
    /// The penalty on changes of weights that an earlier run needs; None if there is none.
    pub consolidation: Option<Consolidation>,
}

/// A complete configuration: see [`Config::resolve`].
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Resolved {
    /// The requested configuration.
    pub requested: Config,
    /// The configuration with every derived key filled in.
    pub config: Config,
    /// The model.
    pub model: ModelSource,
    /// The batch; of a run with a warm-up of it, that after the warm-up.
    pub batch: Batch,
    /// The steps with smaller batches, in order.
    pub batch_stages: Vec<BatchStage>,
    /// Tokens of a sequence; of images, the positions of one.
    pub sequence_length: usize,
    /// The images; None for text.
    pub images: Option<ImageSettings>,
    /// The span corruption; None if there is none.
    pub spans: Option<SpanSettings>,
    /// The limits of the training.
    pub limits: Limits,
    /// The update rule.
    pub optimizer: OptimizerSettings,
    /// The values that weights may have during training.
    pub constraints: WeightConstraints,
    /// The learning rate over the steps.
    pub schedule: Schedule,
    /// The ranks and the state that each of them keeps.
    pub parallel: Parallel,
    /// The rule of replicas that train apart; None for synchronous steps.
    pub apart: Option<Apart>,
    /// The rule of workers with a parameter server; None for other rules.
    pub server: Option<ServerRule>,
    /// The form of messages between ranks.
    pub compression: crate::rank::Compression,
    /// Kernel threads of one rank.
    pub threads: usize,
    /// The rung of the kernel ladder.
    #[serde(serialize_with = "isa_name")]
    pub isa: Isa,
    /// True if there is validation data.
    pub validation: bool,
    /// The derived values, in the order of the sections.
    pub derivations: Vec<Derivation>,
}

fn isa_name<S: serde::Serializer>(isa: &Isa, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(isa.name())
}

impl Resolved {
    /// The most steps between steps after which all ranks agree on what comes next: a round of
    /// replicas that train apart or of workers with a server, else 1.
    pub fn round_steps(&self) -> u64 {
        self.apart.map(|apart| apart.every).or(self.server.map(|server| server.every)).unwrap_or(1)
    }

    /// Tokens of one optimizer step, over all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        self.batch.global as u64 * self.sequence_length as u64
    }

    /// The schedule of a run of `steps` with these settings.
    pub fn schedule_over(&self, steps: u64) -> Schedule {
        let warmup_steps = match (self.requested.schedule.warmup_steps, self.limits.steps) {
            (None, Some(_)) => usual_warmup(steps),
            _ => self.schedule.warmup_steps,
        };
        Schedule { steps: Some(steps), warmup_steps, ..self.schedule.clone() }
    }

    /// The checkpointing mode of block `block`: the tensors it keeps from forward for backward.
    pub fn checkpoint_mode(&self, block: usize) -> CheckpointMode {
        let section = &self.config.activation_checkpointing;
        let range = section.overrides.0.iter().rev().find(|o| (o.first..=o.last).contains(&block));
        range.map_or(section.mode, |o| o.mode)
    }
}

impl Config {
    /// Derives unset keys and checks that the whole is possible. The only access outside is a check
    /// that the named paths exist.
    ///
    /// # Errors
    ///
    /// Every problem found, not only the first.
    pub fn resolve(&self, inputs: &Inputs) -> Result<Resolved, ConfigError> {
        let mut requested = self.clone();
        // Zero threads is another way to say unset.
        requested.compute.threads = requested.compute.threads.filter(|threads| *threads > 0);
        let mut r = Resolver::new(requested.clone());
        r.run();
        r.images = r.images(inputs);
        r.spans = if r.images.is_none() { r.spans(inputs) } else { None };
        let model = r.model(inputs);
        r.fine_tuning();
        match r.images {
            None => r.tokenizer(),
            Some(_) => r.only_for_text(),
        }
        let validation = r.data(inputs);
        let sequence_length = r.sequence_length(inputs);
        let parallel = r.parallel(inputs);
        r.distillation(&parallel);
        let batch = r.batch(parallel.data_degree());
        let batch_stages = r.batch_stages(batch);
        r.extent(batch, sequence_length);
        r.elastic(&parallel, batch);
        let (apart, server, compression) = r.exchanges(&parallel, batch);
        let batches = Batches { whole: batch, stages: &batch_stages };
        for batch in batches.all() {
            r.divisions(&parallel, batch, sequence_length, &model);
        }
        let limits = r.limits(inputs, batches, sequence_length);
        r.freeze_schedule(limits);
        let optimizer = r.optimizer();
        r.averaging_extent(optimizer.averaging, limits);
        let schedule = r.schedule(optimizer.learning_rate, batches, limits.steps);
        r.precision();
        let (grid, grid_begin) = r.quantization(limits).unzip();
        let pruning = r.pruning(limits, optimizer.averaging);
        let constraints = WeightConstraints { grid, grid_begin: grid_begin.unwrap_or(0), pruning };
        r.activation_checkpointing(inputs);
        let (isa, threads) = r.compute(inputs, &parallel);
        if r.images.is_some() {
            r.image_divisions(&parallel);
            r.image_workers(inputs, &parallel, threads);
        }
        if r.spans.is_some_and(|spans| spans.paired) {
            r.paired_divisions(&parallel);
        }
        if matches!(&model, ModelSource::Shape(shape) if shape.value_residual) {
            r.value_residual_divisions(&parallel);
        }
        r.memory();
        r.rest(validation);
        r.path_exists("model.path", self.model.path.as_ref());
        r.path_exists("tokenizer.path", self.tokenizer.path.as_ref());

        let order: Vec<_> = self.sections().iter().map(|section| section.name()).collect();
        r.derivations.sort_by_key(|d| {
            order.iter().position(|name| d.key.rsplit_once('.').map(|(section, _)| section) == Some(name))
        });
        let resolved = Resolved {
            requested,
            config: r.config,
            model,
            batch,
            batch_stages,
            sequence_length,
            images: r.images,
            spans: r.spans,
            limits,
            optimizer,
            constraints,
            schedule,
            parallel,
            apart,
            server,
            compression,
            threads,
            isa,
            validation,
            derivations: r.derivations,
        };
        r.problems.into_result(resolved)
    }

    /// As [`Config::resolve`], for `[model]` alone.
    ///
    /// # Errors
    ///
    /// Every problem of the model.
    pub fn resolve_model(&self, inputs: &Inputs) -> Result<ModelSource, ConfigError> {
        let mut r = Resolver::new(self.clone());
        r.images = r.images(inputs);
        r.spans = if r.images.is_none() { r.spans(inputs) } else { None };
        let model = r.model(inputs);
        r.problems.into_result(model)
    }
}

/// The configuration during completion. After a problem, methods continue with a harmless value, so
/// that one mistake does not hide the next.
pub(super) struct Resolver {
    pub(super) config: Config,
    derivations: Vec<Derivation>,
    pub(super) problems: Problems,
    /// The images, once they are resolved; None for text.
    pub(super) images: Option<ImageSettings>,
    /// The span corruption, once it is resolved; None if there is none.
    pub(super) spans: Option<SpanSettings>,
}

impl Resolver {
    pub(super) fn new(config: Config) -> Resolver {
        Resolver { config, derivations: Vec::new(), problems: Problems::default(), images: None, spans: None }
    }

    /// Reports a problem of `key`, shown with the place where the key was set.
    pub(super) fn problem(&mut self, key: &str, message: impl Into<String>) {
        let origin = self.config.origin(key);
        self.problems.add(origin, message);
    }

    /// Fills in a derived value and records its derivation.
    pub(super) fn fill<T: ConfigValue>(&mut self, key: &str, value: &T, because: impl Into<String>) {
        let Some(toml) = value.to_value() else { return };
        if let Some((section, name)) = key.split_once('.')
            && let Some(section) = self.config.section_mut(section)
            && let Err(why) = section.set(name, &toml)
        {
            self.problem(key, format!("{key} {why}"));
        }
        self.derivations.push(Derivation { key: key.to_owned(), value: toml.to_string(), because: because.into() });
    }

    /// The given value, or the derived one with its derivation.
    pub(super) fn settle<T: ConfigValue + Clone>(
        &mut self,
        key: &str,
        given: &Option<T>,
        default: T,
        because: impl Into<String>,
    ) -> T {
        given.clone().unwrap_or_else(|| {
            self.fill(key, &default, because);
            default
        })
    }

    /// Rejects a key that nothing would read.
    pub(super) fn unused<T>(&mut self, key: &str, given: &Option<T>, because: &str) {
        if given.is_some() {
            self.problem(key, format!("{key} has no effect: {because}; remove it"));
        }
    }

    /// Rejects numbers outside `[low, high]`.
    pub(super) fn within(&mut self, key: &str, value: f64, low: f64, high: f64) {
        if !(low..=high).contains(&value) {
            // A bound that excludes 0 or 1 is the floating-point number next to it.
            let range = match (low == f64::MIN_POSITIVE, high == 1.0 - f64::EPSILON / 2.0) {
                (false, false) => format!("from {low} to {high}"),
                (true, false) => format!("above 0 and at most {high}"),
                (false, true) => format!("at least {low} and below 1"),
                (true, true) => "above 0 and below 1".to_owned(),
            };
            self.problem(key, format!("{key} = {value} is out of range: it must be {range}"));
        }
    }

    /// Rejects counts outside `[low, high]`.
    pub(super) fn count(&mut self, key: &str, value: Option<u64>, low: u64, high: u64) {
        let Some(value) = value else { return };
        if value < low {
            self.problem(key, format!("{key} = {value} is too small: it must be at least {low}"));
        } else if value > high {
            self.problem(key, format!("{key} = {value} is too large: it must be at most {high}"));
        }
    }

    pub(super) fn positive(&mut self, key: &str, value: Option<f64>) {
        if let Some(value) = value.filter(|value| *value <= 0.0 || !value.is_finite()) {
            self.problem(key, format!("{key} = {value} must be greater than 0"));
        }
    }

    /// Rejects times below a millisecond or above 10^9 seconds.
    pub(super) fn seconds(&mut self, key: &str, value: Option<f64>) {
        if let Some(value) = value {
            self.within(key, value, 1e-3, 1e9);
        }
    }

    /// Reports a problem if `path`, the value of `key`, does not exist. The message says where it
    /// was looked for.
    pub(super) fn path_exists(&mut self, key: &str, path: Option<&PathBuf>) {
        let Some(path) = path.filter(|path| !path.exists()) else { return };
        let mut message = format!("{key} names {}, which does not exist", path.display());
        if let (true, Ok(absolute)) = (path.is_relative(), std::path::absolute(path)) {
            message += &format!(
                ": {} was looked for, because paths in a configuration start in the folder where the command runs",
                absolute.display()
            );
        }
        if let Origin::File { path: file, .. } = self.config.origin(key)
            && let Some(beside) = file.parent().map(|folder| folder.join(path)).filter(|beside| beside.exists())
        {
            message += &format!("; beside the configuration there is one: give {key} = {beside:?}");
        }
        let hub = |name: &str| match key.starts_with("data.") {
            true => hub_dataset(name, &format!("the text or JSONL files in it as {key}")),
            false => hub_model(name, &format!("{key} = \"DIR\"")),
        };
        match path.to_str() {
            Some(text) if text.contains(',') => message += "; a list is written [\"A\", \"B\"]",
            Some(text) => message.extend(hub(text).map(|hint| format!("; {hint}"))),
            None => {}
        }
        self.problem(key, message);
    }

    fn run(&mut self) {
        let Some(name) = self.config.run.name.clone() else { return };
        let plain = !name.is_empty() && !name.starts_with('.') && name.len() <= 200;
        if !plain || name.chars().any(|c| c.is_control() || c == '/' || c == '\\') {
            let message =
                format!("run.name = {name:?} cannot be a folder: no slashes, no dot in front, 1 to 200 bytes");
            self.problem("run.name", message);
        }
    }

    fn sequence_length(&mut self, inputs: &Inputs) -> usize {
        let given = self.config.training.sequence_length;
        if let Some(positions) = self.images.as_ref().map(ImageSettings::positions) {
            return self.of_patches("training.sequence_length", given, positions);
        }
        let longest = match &inputs.pretrained {
            Some(pretrained) => Some((pretrained.max_sequence_length, "config.json's longest")),
            None => self.config.model.max_sequence_length.map(|n| (n, "model.max_sequence_length")),
        };
        let key = "training.sequence_length";
        let length = match (given, longest) {
            (Some(given), _) => given,
            (None, Some((longest, what))) => {
                let because = format!("{what}, {longest}, at most {SEQUENCE_LENGTH_DERIVED_MAX}");
                self.settle(key, &None, usual_sequence_length(longest), because)
            }
            (None, None) if self.config.model.path.is_some() => SEQUENCE_LENGTH_DERIVED_MAX,
            (None, None) => {
                self.problem(
                    key,
                    "training.sequence_length is not set, and no model.max_sequence_length to take it from",
                );
                1
            }
        };
        self.count(key, Some(length as u64), 1, 1 << 24);
        if let Some((longest, what)) = longest.filter(|(longest, _)| length > *longest) {
            self.problem(
                key,
                format!("training.sequence_length = {length} is longer than the model takes: {what} is {longest}"),
            );
        }
        length
    }

    fn batch(&mut self, degree: usize) -> Batch {
        let t = &self.config.training;
        let (micro, global, steps) = (t.micro_batch_size, t.global_batch_size, t.accumulation_steps);
        match Batch::resolve(micro, global, steps, degree) {
            Ok((batch, because)) => {
                for (key, value, because) in because {
                    self.fill(&format!("training.{key}"), &value, because);
                }
                batch
            }
            Err(error) => {
                let blamed =
                    [("global_batch_size", global), ("micro_batch_size", micro), ("accumulation_steps", steps)];
                let zero = blamed.iter().find(|(_, value)| *value == Some(0));
                let given = || blamed.iter().find(|(_, value)| value.is_some());
                let key = zero.or_else(given).map_or("global_batch_size", |(key, _)| key);
                self.problem(&format!("training.{key}"), error.to_string());
                Batch { micro: 1, accumulation: 1, data_parallel_degree: degree.max(1), global: degree.max(1) }
            }
        }
    }

    /// Rejects steps too large to be lowered to a program and predicted.
    fn extent(&mut self, batch: Batch, sequence_length: usize) {
        let Batch { micro, accumulation, .. } = batch;
        let tokens = micro.saturating_mul(sequence_length);
        if tokens > TOKENS_MAX {
            let message = format!(
                "a micro-batch of {micro} sequences of {sequence_length} tokens is {tokens} tokens on each rank, and {TOKENS_MAX} are the most: a smaller \
                 training.micro_batch_size, with more training.accumulation_steps for the same training.global_batch_size"
            );
            self.problem("training.micro_batch_size", message);
        }
        if accumulation > ACCUMULATION_MAX {
            let message = format!(
                "{accumulation} micro-batches in a step of each rank, each of which has its instructions in the step's program, and {ACCUMULATION_MAX} are the most: a \
                 larger training.micro_batch_size, a smaller training.global_batch_size, or more ranks"
            );
            self.problem("training.accumulation_steps", message);
        }
    }

    fn limits(&mut self, inputs: &Inputs, batches: Batches<'_>, sequence_length: usize) -> Limits {
        let TrainingSection { steps, epochs, tokens, seconds, skipped_steps_max, .. } = self.config.training;
        self.count("training.skipped_steps_max", Some(skipped_steps_max), 1, u64::MAX);
        self.count("training.steps", steps, 1, u64::MAX);
        self.count("training.tokens", tokens, 1, u64::MAX);
        self.positive("training.epochs", epochs);
        self.seconds("training.seconds", seconds);
        if steps.is_none() && epochs.is_none() && tokens.is_none() && seconds.is_none() {
            let message =
                "nothing ends the training: give training.steps, training.epochs, training.tokens or training.seconds";
            self.problem("training.steps", message);
        }
        let global = batches.whole.global;
        let warmup = if batches.stages.is_empty() { "" } else { " and the smaller batches of batch_warmup" };
        let by_tokens = tokens.map(|tokens| {
            let because = format!(
                "{tokens} tokens / (global_batch_size {global} x sequence_length {sequence_length}){warmup}, rounded up"
            );
            (batches.steps(tokens.div_ceil(sequence_length.max(1) as u64)), because)
        });
        let by_epochs = epochs.zip(inputs.sequences_per_epoch).map(|(epochs, sequences)| {
            let because = format!(
                "{epochs} epochs x {sequences} sequences of the data / global_batch_size {global}{warmup}, rounded up"
            );
            // The cast saturates: a float that is too large becomes the largest count.
            (batches.steps((epochs * sequences as f64).ceil() as u64).max(1), because)
        });
        let derived = [by_tokens, by_epochs].into_iter().flatten().min_by_key(|(steps, _)| *steps);
        if let (None, Some((derived, because))) = (steps, &derived) {
            self.fill("training.steps", derived, because.clone());
        }
        let steps = steps.into_iter().chain(derived.map(|(steps, _)| steps)).min();
        // Where replicas leave out steps, the samples of a run are not known before it.
        let is_even = self.config.update.inner_steps == super::InnerSteps::Equal;
        if let (None, Some(steps), Some(sequences), true) = (epochs, steps, inputs.sequences_per_epoch, is_even) {
            let passes = batches.sequences(steps) as f64 / sequences.max(1) as f64;
            let because =
                format!("{steps} steps x global_batch_size {global}{warmup} / {sequences} sequences of the data");
            // Four digits after the point are enough for a reader.
            self.fill("training.epochs", &((passes * 1e4).round() / 1e4), because);
        }
        Limits { steps, seconds }
    }

    fn schedule(&mut self, peak: f64, batches: Batches<'_>, steps: Option<u64>) -> Schedule {
        let section = self.config.schedule.clone();
        let ScheduleSection { kind, .. } = section;
        let (default, because) = match steps {
            Some(steps) => (usual_warmup(steps), format!("2 % of {steps} steps, at most 2000")),
            None => (20, "the number of steps is not known yet".to_owned()),
        };
        let warmup_steps = self.settle("schedule.warmup_steps", &section.warmup_steps, default, because);
        if let Some(steps) = steps.filter(|steps| warmup_steps > *steps) {
            let message = format!("schedule.warmup_steps = {warmup_steps} is more than the {steps} steps of the run");
            self.problem("schedule.warmup_steps", message);
        }
        if kind == ScheduleKind::Constant {
            let because = "a constant schedule does not decay";
            self.unused("schedule.decay_steps", &section.decay_steps, because);
            self.unused("schedule.min_ratio", &section.min_ratio, because);
        }
        let mut min_ratio = 1.0;
        if kind != ScheduleKind::Constant {
            min_ratio = self.settle("schedule.min_ratio", &section.min_ratio, 0.1, "the usual");
            self.within("schedule.min_ratio", min_ratio, 0.0, 1.0);
            self.count("schedule.decay_steps", section.decay_steps, 1, u64::MAX);
        }
        let mut decay_shape = DecayShape::Linear;
        if kind == ScheduleKind::Wsd {
            decay_shape = self.settle("schedule.decay_shape", &section.decay_shape, DecayShape::Linear, "the usual");
        } else {
            self.unused("schedule.decay_shape", &section.decay_shape, "only wsd has decays of several shapes");
        }
        let decay_steps = section.decay_steps;
        let stages = self.batch_warmup_rates(batches, steps);
        let schedule = Schedule { kind, peak, min_ratio, warmup_steps, decay_steps, decay_shape, steps, stages };
        if let (Some(steps), Some(decay)) = (steps, decay_steps) {
            if warmup_steps.saturating_add(decay) > steps && warmup_steps <= steps {
                let message = format!(
                    "schedule.warmup_steps = {warmup_steps} and schedule.decay_steps = {decay} do not fit into {steps} steps"
                );
                self.problem("schedule.decay_steps", message);
            }
        } else if let (Some(steps), Some((start, end))) = (steps, schedule.decay()) {
            let because = match kind {
                ScheduleKind::Wsd => format!("the last fifth of {steps} steps"),
                _ => format!("{steps} steps - warmup_steps {warmup_steps}"),
            };
            self.fill("schedule.decay_steps", &(end - start), because);
        }
        schedule
    }

    fn activation_checkpointing(&mut self, inputs: &Inputs) {
        let key = "activation_checkpointing.overrides";
        let layers = inputs.pretrained.as_ref().map(|pretrained| pretrained.layers).or(self.config.model.layers);
        let Some(layers) = layers else { return };
        for range in self.config.activation_checkpointing.overrides.0.clone() {
            if range.last >= layers {
                let message = format!(
                    "{key} names block {}, but the last of {layers} blocks is {}",
                    range.last,
                    layers.saturating_sub(1)
                );
                self.problem(key, message);
            }
        }
    }

    fn compute(&mut self, inputs: &Inputs, parallel: &Parallel) -> (Isa, usize) {
        let attention = self.config.compute.attention;
        if attention != AttentionKernels::Auto && self.config.compute.device == DeviceKind::Cpu {
            let message = format!(
                "compute.attention = \"{attention}\" chooses among a GPU's kernels, and compute.device is \"cpu\": set compute.device = \"cuda\", or leave it at \"auto\""
            );
            self.problem("compute.attention", message);
        }
        let best = Isa::detect();
        let isa = match self.config.compute.isa.clone() {
            None => {
                self.fill("compute.isa", &best.name().to_owned(), "the best of this machine");
                best
            }
            Some(name) => Isa::choose(&name).unwrap_or_else(|error| {
                self.problem("compute.isa", format!("compute.isa: {error}"));
                best
            }),
        };
        let asked = self.config.compute.threads;
        let (ranks, who) = match inputs.processes {
            Some(_) => (inputs.sharing, "processes that share them"),
            None => (parallel.ranks, "ranks on this host"),
        };
        let (share, because) = match ranks {
            0 | 1 => (inputs.cores, inputs.cores_because.clone()),
            n => (inputs.cores / n, format!("{} {} / {n} {who}", inputs.cores, inputs.cores_because)),
        };
        let threads = self.settle("compute.threads", &asked, share.max(1), because);
        self.count("compute.threads", Some(threads as u64), 1, 1024);
        (isa, threads)
    }

    /// `[memory]` and `[memory.offload]`.
    fn memory(&mut self) {
        self.count("memory.limit", self.config.memory.limit.map(|limit| limit.0), 1 << 20, u64::MAX);
        let offload = self.config.offload.clone();
        self.count("memory.offload.chunk_elements", Some(offload.chunk_elements as u64), 1, 1 << 40);
        let tiers = [
            ("optimizer", offload.optimizer),
            ("parameters", offload.parameters),
            ("activations", offload.activations),
            ("gradients", offload.gradients),
        ];
        for (name, tier) in tiers {
            if tier == OffloadTier::Host && self.config.compute.device == DeviceKind::Cpu {
                let key = format!("memory.offload.{name}");
                let message = format!(
                    "{key} = \"host\": compute.device is \"cpu\", whose memory is the host's already; use \"disk\""
                );
                self.problem(&key, message);
            }
        }
        if offload.gradients != OffloadTier::None && offload.gradients != offload.optimizer {
            let (gradients, optimizer) = (offload.gradients, offload.optimizer);
            let message = format!(
                "memory.offload.gradients = \"{gradients}\" with memory.offload.optimizer = \"{optimizer}\": gradients lie where the optimizer's state does; set \
                 both to \"{gradients}\", or leave gradients out"
            );
            self.problem("memory.offload.gradients", message);
        }
        if tiers.iter().all(|(_, tier)| *tier != OffloadTier::Disk) {
            self.unused("memory.offload.directory", &offload.directory, "nothing lies on disk");
        }
    }

    /// `[checkpoint]`, `[evaluation]`, `[metrics]`.
    fn rest(&mut self, validation: bool) {
        self.count("metrics.interval_steps", self.config.metrics.interval_steps, 1, u64::MAX);
        self.count("metrics.profile_steps", Some(self.config.metrics.profile_steps), 1, 100_000);
        let CheckpointSection { interval_steps, interval_seconds, keep_last, keep_best } = self.config.checkpoint;
        self.count("checkpoint.interval_steps", interval_steps, 1, u64::MAX);
        self.seconds("checkpoint.interval_seconds", interval_seconds);
        if interval_steps.is_none() && interval_seconds.is_none() {
            self.fill("checkpoint.interval_seconds", &600.0, "checkpoint.interval_steps is unset too");
        }
        if keep_last == 0 {
            let message = "checkpoint.keep_last = 0 would keep nothing to resume from: it must be at least 1";
            self.problem("checkpoint.keep_last", message);
        }
        let because = if validation { "there is validation data" } else { "there is no validation data" };
        let keep_best = self.settle("checkpoint.keep_best", &keep_best, validation, because);
        if keep_best && !validation {
            let why = "checkpoint.keep_best needs validation data: give data.validation or data.validation_fraction";
            self.problem("checkpoint.keep_best", why);
        }
        self.evaluation(validation);
    }
}

impl Resolver {
    /// The place where `key` was set.
    pub(super) fn origin(&self, key: &str) -> Origin {
        self.config.origin(key)
    }
}
