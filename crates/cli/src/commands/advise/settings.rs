//! From a configuration to the setup that levers change, and from a changed setup to settings.

use crate::commands::plan::{here, keys};
use anyhow::Result;
use trainyard_engine::config::{
    CheckpointMode, Config, OptimizerName, PipelineSchedule as ConfigSchedule, ReduceDtype, Resolved,
};
use trainyard_engine::shape::{mesh, model_spec, strategy};
use trainyard_plan::levers::{Code, Edit, Optimizer, ReduceFormat, Setup};
use trainyard_plan::{Candidate, Checkpointing};
use trainyard_program::PipelineSchedule;

/// The setup that a configuration describes.
pub fn setup(resolved: &Resolved) -> Result<Setup> {
    let spec = model_spec(resolved)?;
    let strategy = strategy(resolved, spec.layers + 2)?;
    let modes = (0..spec.layers).map(|block| resolved.checkpoint_mode(block));
    let count = |wanted: CheckpointMode| modes.clone().filter(|mode| *mode == wanted).count() as u32;
    let chunks = resolved.parallel.chunks as u32;
    let candidate = Candidate {
        mesh: mesh(resolved),
        micro_batch: resolved.batch.micro as u32,
        accumulation: resolved.batch.accumulation as u32,
        zero_stage: strategy.zero_stage,
        reshard: strategy.reshard_after_forward,
        prefetch: strategy.prefetch,
        reduce_schedule: strategy.reduce_schedule,
        checkpointing: Checkpointing { full: count(CheckpointMode::Full), selective: count(CheckpointMode::Selective) },
        offload: strategy.offload,
        pipeline: match resolved.parallel.schedule {
            ConfigSchedule::Gpipe => PipelineSchedule::GPipe,
            ConfigSchedule::OneForwardOneBackward => PipelineSchedule::OneForwardOneBackward,
            ConfigSchedule::Interleaved => PipelineSchedule::Interleaved { chunks },
            ConfigSchedule::ZeroBubble => PipelineSchedule::ZeroBubble,
            ConfigSchedule::ZeroBubbleV => PipelineSchedule::ZeroBubbleV,
            ConfigSchedule::DualPipeV => PipelineSchedule::DualPipeV,
        },
        format: keys::format(resolved),
    };
    Ok(Setup {
        candidate,
        sequence_length: resolved.sequence_length as u64,
        reduce: match resolved.config.parallel.reduce_dtype {
            ReduceDtype::F32 => ReduceFormat::F32,
            ReduceDtype::Bf16 => ReduceFormat::Bf16,
        },
        optimizer: match resolved.optimizer.name {
            OptimizerName::AdamW if resolved.optimizer.state_bits == 8 => Optimizer::AdamW8,
            OptimizerName::AdamW => Optimizer::AdamW,
            OptimizerName::Lion => Optimizer::Lion,
            OptimizerName::Adafactor => Optimizer::Adafactor,
            OptimizerName::Sgd | OptimizerName::Muon | OptimizerName::Lamb => Optimizer::Other,
        },
        layers: spec.layers as u32,
        ffn: spec.ffn_dim as u32,
        edits: Vec::new(),
    })
}

/// The settings that make a configuration of `base` one of `setup`: those that differ.
pub fn settings(base: &Setup, setup: &Setup) -> Vec<String> {
    let (before, after) = (all(base), all(setup));
    // There are several ways to say that blocks differ, so whatever replaces it is said in full.
    let of_blocks = |set: &String| set.starts_with("activation_checkpointing.");
    let blocks_differ = !before.contains(&"activation_checkpointing.overrides=[]".to_owned());
    let replaced =
        blocks_differ && !before.iter().filter(|set| of_blocks(set)).eq(after.iter().filter(|set| of_blocks(set)));
    let key = |set: &str| set.split('=').next().map(str::to_owned);
    let is_unset = |set: &str| DEFAULTS.contains(&set) && before.iter().all(|other| key(other) != key(set));
    let is_new = |set: &String| !before.contains(set) && !is_unset(set) || replaced && of_blocks(set);
    after.iter().filter(|set| is_new(set)).cloned().collect()
}

/// The settings of an edit; None if the engine has no keys for it. A key that the configuration
/// refuses marks a lever that cannot be run yet.
fn of_edit(edit: &Edit) -> Option<Vec<String>> {
    match edit {
        Edit::LocalSteps { every } => Some(vec!["update.rule=diloco".to_owned(), format!("update.every={every}")]),
        Edit::Codec { code: Code::Int8, .. } => {
            Some(vec!["compression.gradients=int8".to_owned(), "compression.error_feedback=true".to_owned()])
        }
        Edit::Codec { code: Code::TopK, .. } => Some(vec!["compression.gradients=top_k".to_owned()]),
        Edit::Codec { code: Code::LowRank, .. } => Some(vec!["compression.gradients=power_sgd".to_owned()]),
        Edit::OptimizerBytes { .. } => Some(vec!["optimizer.state_bits=8".to_owned()]),
        Edit::Integers => Some(vec!["precision.int8=switchback".to_owned()]),
        Edit::FakeQuantisation => Some(vec!["quantization.aware=4".to_owned()]),
        Edit::Adapters { .. } => Some(vec!["fine_tuning.adapter=lora".to_owned()]),
        Edit::Freeze { blocks } => {
            let patterns: Vec<String> = (0..*blocks).map(|block| format!("'block.{block}.*'")).collect();
            Some(vec![format!("fine_tuning.freeze=['embedding.*', {}]", patterns.join(", "))])
        }
        // Of adapters, whose edit stands beside it.
        Edit::ParameterBytes { .. } => Some(vec!["fine_tuning.base_dtype=nf4".to_owned()]),
        _ => None,
    }
}

/// True if the engine has keys for an edit.
pub fn has_settings(edit: &Edit) -> bool {
    of_edit(edit).is_some()
}

/// True if a configuration made by `load` accepts the settings of all edits of `setup`.
pub fn knows(base: &Setup, setup: &Setup, load: &dyn Fn(&[String]) -> Result<Config>) -> bool {
    setup.edits.iter().all(has_settings) && load(&settings(base, setup)).is_ok()
}

/// Settings that only some setups have, with the values that they have if unset.
const DEFAULTS: [&str; 4] = [
    "parallel.reduce_dtype=f32",
    "parallel.reshard_after_forward=true",
    "parallel.prefetch=1",
    "optimizer.state_bits=32",
];

/// Every setting of a setup.
fn all(setup: &Setup) -> Vec<String> {
    let mut sets = keys::all(&setup.candidate, setup.sequence_length, setup.layers as usize, &[]);
    sets.push(format!("model.layers={}", setup.layers));
    sets.push(format!("model.ffn_dim={}", setup.ffn));
    if setup.candidate.mesh.data_parallel() > 1 {
        let dtype = if setup.reduce == ReduceFormat::Bf16 { "bf16" } else { "f32" };
        sets.push(format!("parallel.reduce_dtype={dtype}"));
    }
    // Every format that levers choose has settings.
    sets.extend(here::precision(&[setup.candidate.format]).unwrap_or_default());
    sets.extend(setup.optimizer.name().map(|name| format!("optimizer.name={name}")));
    let state_bits = if setup.optimizer == Optimizer::AdamW8 { 8 } else { 32 };
    sets.push(format!("optimizer.state_bits={state_bits}"));
    sets.extend(setup.edits.iter().filter_map(of_edit).flatten());
    sets
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use trainyard_engine::config::Inputs;
    use trainyard_plan::levers::table::LEVERS;
    use trainyard_plan::levers::{Offers, Place, Switch};
    use trainyard_program::Tier;
    use trainyard_sim::Format;

    fn resolve(sets: &[String]) -> Result<Resolved> {
        let base = [
            "model.family='llama'",
            "model.dim=64",
            "model.layers=4",
            "model.heads=4",
            "model.vocab_size=256",
            "training.steps=1",
            "training.sequence_length=128",
            "training.micro_batch_size=2",
            "training.accumulation_steps=4",
        ];
        let sets: Vec<String> = base.map(str::to_owned).into_iter().chain(sets.iter().cloned()).collect();
        let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
        Ok(Config::parse(Path::new("test"), "", &sets)?.resolve(&inputs)?)
    }

    /// The settings that are printed make the setup that was priced.
    #[test]
    fn settings_make_the_setups_of_all_levers() {
        let place = Place {
            devices: 4,
            devices_per_node: 4,
            all_devices: false,
            heads: 4,
            kv_heads: 4,
            pretrained: true,
            experts: 1,
            dim: 64,
            tiers: vec![Tier::Disk],
            formats: vec![Format::Fp32, Format::Bf16],
            integers: Switch::Off,
            image_cache: Switch::None,
        };
        let sharded = ["parallel.ranks=4", "parallel.zero_stage=3"].map(str::to_owned);
        // Regression: these overrides stayed when a lever chose one mode for all blocks.
        let mixed = [
            "activation_checkpointing.mode=full",
            "activation_checkpointing.overrides=[{ blocks = '0-1', mode = 'none' }]",
        ]
        .map(str::to_owned);
        for more in [&[][..], &sharded, &mixed] {
            let base = setup(&resolve(more).unwrap()).unwrap();
            assert_eq!(settings(&base, &base), Vec::<String>::new());
            let mut tried = 0;
            for lever in LEVERS {
                let Offers::Choices(choices) = (lever.offers)(&base, &place) else { continue };
                for choice in choices.into_iter().filter(|choice| choice.setup.edits.is_empty()) {
                    let sets = [more, &settings(&base, &choice.setup)].concat();
                    let resolved =
                        resolve(&sets).unwrap_or_else(|error| panic!("{}: {sets:?}: {error:#}", choice.words));
                    let mut made = setup(&resolved).unwrap();
                    // What has no effect on one mesh is left as it was on another.
                    made.candidate.pipeline = choice.setup.candidate.pipeline;
                    (made.candidate.reshard, made.candidate.prefetch) =
                        (choice.setup.candidate.reshard, choice.setup.candidate.prefetch);
                    assert_eq!(made, choice.setup, "{}: {sets:?}", choice.words);
                    tried += 1;
                }
            }
            assert!(tried > 15, "{tried}");
        }
    }
}
