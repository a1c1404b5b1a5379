//! Configuration: TOML with sections, `--set section.key=value` over it, and the arithmetic that
//! completes it.
//!
//! There are two forms, kept apart. A [`Config`] is what was asked for: defaults, the file and the
//! settings, in that order, with unset keys unset. [`Config::resolve`] makes a [`Resolved`] of it:
//! everything derived, each derivation stated, and nothing impossible left; it runs before anything
//! is allocated, and reports all problems at once. Parts of the engine are handed the section or
//! the resolved part that concerns them, never the whole.
//!
//! [`Resolved::to_toml`] prints the configuration so that it can be used as a file again: what was
//! asked for as settings, what was derived as comments with their derivation. Running it again, or
//! with other settings over it, derives the rest anew, so a derived number never outlives its
//! reason.
//!
//! What this module does not do: read model folders, tokenizers or corpora. What it must know of
//! them comes in through [`Inputs`].

mod batch;
mod device;
mod error;
mod json;
mod load;
mod mistaken;
mod nearest;
mod presets;
mod print;
mod resolve;
mod resolve_data;
mod resolve_model;
mod resolve_parallel;
mod section;
mod sections;
#[cfg(test)]
mod tests;
mod value;

pub use batch::{Batch, BatchError};
pub use device::DeviceKind;
pub use error::{ConfigError, Origin, Problem};
pub use mistaken::hub_model;
pub use nearest::nearest;
pub use presets::PRESETS;
pub use print::documentation;
pub use resolve::{Derivation, Inputs, Limits, ModelShape, ModelSource, OptimizerSettings, Pretrained, Resolved, Rope};
pub(crate) use resolve::{omp_num_threads, usual_sequence_length};
pub use resolve_parallel::Parallel;
pub use section::{Key, Section};
pub use sections::*;
pub use value::{ByteSize, ConfigValue, Override, Overrides, Reshard, Source, Sources};

use serde::Serialize;
use std::collections::BTreeMap;

macro_rules! config {
    ($($(#[doc = $doc:literal])* $name:ident: $type:ty,)+) => {
        /// What was asked for: one struct a section.
        #[derive(Clone, Debug, Default, Serialize)]
        pub struct Config {
            $($(#[doc = $doc])* pub $name: $type,)+
            /// Where each key that was set came from, by `section.key`.
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
            /// By values; where they were written does not matter.
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
    /// Text to tokens.
    tokenizer: TokenizerSection,
    /// Corpora.
    data: DataSection,
    /// How much, and the batch.
    training: TrainingSection,
    /// The update rule.
    optimizer: OptimizerSection,
    /// The learning rate over the steps.
    schedule: ScheduleSection,
    /// Arithmetic.
    precision: PrecisionSection,
    /// Recomputation.
    activation_checkpointing: ActivationCheckpointingSection,
    /// Where it runs.
    compute: ComputeSection,
    /// Ranks.
    parallel: ParallelSection,
    /// Limits on memory.
    memory: MemorySection,
    /// What lies below the device's memory.
    offload: OffloadSection,
    /// When state is written.
    checkpoint: CheckpointSection,
    /// Validation.
    evaluation: EvaluationSection,
    /// Records.
    metrics: MetricsSection,
}

impl Config {
    /// Where the key `section.key` was set.
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).cloned().unwrap_or(Origin::Default)
    }
}
