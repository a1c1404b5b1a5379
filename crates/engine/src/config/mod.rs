//! Configuration: TOML with sections, `--set section.key=value` over it, and the arithmetic that
//! completes it.
//!
//! There are two forms. A [`Config`] is the request: defaults, the file and the settings, in that
//! order, with unset keys left unset. [`Config::resolve`] completes it to a [`Resolved`]: every key
//! has a value, each derived value has a derivation, and nothing impossible is left. Resolving
//! allocates nothing and reports all problems at once. Parts of the engine receive only the section
//! or the resolved part that concerns them.
//!
//! [`Resolved::to_toml`] prints the configuration as a file that can be used again. Requested
//! values are settings; derived values are comments with their derivation. A later run derives them
//! anew, so a derived number never outlives its reason.
//!
//! This module does not read model folders, tokenizers or corpora. Facts about them come in through
//! [`Inputs`].

mod batch;
mod batch_warmup;
mod device;
mod error;
mod freeze_schedule;
mod inner_steps;
mod json;
mod load;
mod mistaken;
mod nearest;
mod presets;
mod print;
pub mod recipes;
mod resolve;
mod resolve_averaging;
mod resolve_consolidation;
mod resolve_data;
mod resolve_distillation;
mod resolve_fine_tuning;
mod resolve_images;
mod resolve_model;
mod resolve_parallel;
mod resolve_precision;
mod resolve_pruning;
mod resolve_quantization;
mod resolve_server;
mod resolve_spans;
mod resolve_update;
mod section;
mod sections;
mod sections_averaging;
mod sections_chat;
mod sections_consolidation;
mod sections_distillation;
mod sections_experts;
mod sections_fine_tuning;
mod sections_images;
mod sections_parallel;
mod sections_precision;
mod sections_pruning;
mod sections_quantization;
#[cfg(test)]
mod tests;
mod value;

pub use batch::{Batch, BatchError};
pub use batch_warmup::{BatchStage, BatchWarmup, BatchWarmupRate, Batches};
pub use device::DeviceKind;
pub use error::{ConfigError, Origin, Problem};
pub use freeze_schedule::{FreezeFrom, FreezeSchedule};
pub use inner_steps::InnerSteps;
pub use mistaken::hub_model;
pub use nearest::nearest;
pub use presets::PRESETS;
pub use print::documentation;
pub use resolve::{Derivation, Inputs, Limits, ModelSource, OptimizerSettings, Pretrained, Resolved, Rope};
pub(crate) use resolve::{omp_num_threads, usual_sequence_length};
pub use resolve_images::ImageSettings;
pub use resolve_model::ModelShape;
pub use resolve_parallel::Parallel;
pub use resolve_server::ServerRule;
pub use resolve_spans::{PAIRED_LENGTH, SpanSettings};
pub use resolve_update::Apart;
pub use section::{Key, Section};
pub use sections::*;
pub use sections_averaging::*;
pub use sections_chat::*;
pub use sections_consolidation::*;
pub use sections_distillation::*;
pub use sections_experts::*;
pub use sections_fine_tuning::*;
pub use sections_images::*;
pub use sections_parallel::*;
pub use sections_precision::*;
pub use sections_pruning::*;
pub use sections_quantization::*;
pub use value::{ByteSize, Channels, ConfigValue, Cuts, Names, Override, Overrides, Reshard, Source, Sources};

use serde::Serialize;
use std::collections::BTreeMap;

macro_rules! config {
    ($($(#[doc = $doc:literal])* $name:ident: $type:ty,)+) => {
        /// The requested configuration: one struct per section.
        #[derive(Clone, Debug, Default, Serialize)]
        pub struct Config {
            $($(#[doc = $doc])* pub $name: $type,)+
            /// The origin of each key that was set, by `section.key`.
            #[serde(skip)]
            origins: BTreeMap<String, Origin>,
        }

        impl Config {
            /// Every section, in the order of the documentation.
            pub fn sections(&self) -> Vec<&dyn Section> {
                vec![$(&self.$name),+]
            }

            /// The section of this name.
            pub fn section(&self, name: &str) -> Option<&dyn Section> {
                match name {
                    $(_ if name == Section::name(&self.$name) => Some(&self.$name),)+
                    _ => None,
                }
            }

            /// The section of this name.
            pub fn section_mut(&mut self, name: &str) -> Option<&mut dyn Section> {
                match name {
                    $(_ if name == Section::name(&self.$name) => Some(&mut self.$name),)+
                    _ => None,
                }
            }
        }

        impl PartialEq for Config {
            /// Compares values; their origins do not matter.
            fn eq(&self, other: &Config) -> bool {
                $(self.$name == other.$name)&&+
            }
        }
    };
}

config! {
    /// The run and its folder.
    run: RunSection,
    /// The model.
    model: ModelSection,
    /// The trained part of the model, and adapters.
    fine_tuning: FineTuningSection,
    /// A teacher to learn from.
    distillation: DistillationSection,
    /// Experts in the place of MLPs.
    experts: ExpertsSection,
    /// The tokenizer.
    tokenizer: TokenizerSection,
    /// Corpora.
    data: DataSection,
    /// The images of a model of images.
    images: ImagesSection,
    /// Random changes to images.
    augmentation: AugmentationSection,
    /// The limits of a run, and its batch.
    training: TrainingSection,
    /// The update rule.
    optimizer: OptimizerSection,
    /// The learning rate over the steps.
    schedule: ScheduleSection,
    /// An average of the weights over the steps.
    averaging: AveragingSection,
    /// A penalty on changes of weights that an earlier run needs.
    consolidation: ConsolidationSection,
    /// The number formats of the arithmetic.
    precision: PrecisionSection,
    /// Training that knows of the rounding of weights.
    quantization: QuantizationSection,
    /// Weights that become zero during training.
    pruning: PruningSection,
    /// Recomputation.
    activation_checkpointing: ActivationCheckpointingSection,
    /// The device and its threads.
    compute: ComputeSection,
    /// The ranks and the state that each of them keeps.
    parallel: ParallelSection,
    /// The rule by which replicas come to one set of parameters.
    update: UpdateSection,
    /// The form of messages between ranks.
    compression: CompressionSection,
    /// Limits on memory.
    memory: MemorySection,
    /// The tiers below the device's memory: host and disk.
    offload: OffloadSection,
    /// The times at which the state is written.
    checkpoint: CheckpointSection,
    /// Validation.
    evaluation: EvaluationSection,
    /// The reaction to suspicious numbers.
    health: HealthSection,
    /// The records that a run leaves.
    metrics: MetricsSection,
}

impl Config {
    /// The place where the key `section.key` was set.
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).cloned().unwrap_or(Origin::Default)
    }
}
