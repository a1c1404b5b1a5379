//! From a configuration to the setup that levers change, and from a changed setup to settings.

use crate::commands::plan::{here, keys::schedule};
use anyhow::Result;
use trainyard_engine::config::{
    CheckpointMode, Compute, Config, DeviceKind, Fp8Recipe, OptimizerName, PipelineSchedule as ConfigSchedule,
    ReduceDtype, Resolved,
};
use trainyard_engine::shape::{mesh, model_spec, strategy};
use trainyard_plan::levers::{Code, Edit, Optimizer, ReduceFormat, Setup};
use trainyard_plan::{Candidate, Checkpointing};
use trainyard_program::{PipelineSchedule, ReduceSchedule, Reshard, Tier};
use trainyard_sim::Format;

/// The number format of a configuration's products.
pub fn format(resolved: &Resolved) -> Format {
    let precision = &resolved.config.precision;
    match precision.compute {
        Compute::Bf16 if precision.fp8 == Fp8Recipe::Hybrid => Format::Fp8,
        Compute::F32 if precision.tf32 && resolved.config.compute.device != DeviceKind::Cpu => Format::Tf32,
        Compute::F32 => Format::Fp32,
        Compute::Bf16 => Format::Bf16,
        Compute::F16 => Format::Fp16,
    }
}

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
        format: format(resolved),
    };
    Ok(Setup {
        candidate,
        sequence_length: resolved.sequence_length as u64,
        reduce: match resolved.config.parallel.reduce_dtype {
            ReduceDtype::F32 => ReduceFormat::F32,
            ReduceDtype::Bf16 => ReduceFormat::Bf16,
        },
        optimizer: match resolved.optimizer.name {
            OptimizerName::AdamW => Optimizer::AdamW,
            OptimizerName::Lion => Optimizer::Lion,
            OptimizerName::Adafactor => Optimizer::Adafactor,
            OptimizerName::Sgd | OptimizerName::Muon => Optimizer::Other,
        },
        layers: spec.layers as u32,
        ffn: spec.ffn_dim as u32,
        edits: Vec::new(),
    })
}

/// The settings that make a configuration of `base` one of `setup`: those that differ.
pub fn settings(base: &Setup, setup: &Setup) -> Vec<String> {
    let before = all(base);
    let key = |set: &str| set.split('=').next().map(str::to_owned);
    let is_unset = |set: &str| DEFAULTS.contains(&set) && before.iter().all(|other| key(other) != key(set));
    let is_new = |set: &String| !before.contains(set) && !is_unset(set);
    all(setup).into_iter().filter(is_new).collect()
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
        _ => None,
    }
}

/// True if a configuration made by `load` accepts the settings of all edits of `setup`.
pub fn knows(base: &Setup, setup: &Setup, load: &dyn Fn(&[String]) -> Result<Config>) -> bool {
    setup.edits.iter().all(|edit| of_edit(edit).is_some()) && load(&settings(base, setup)).is_ok()
}

/// Settings that only some setups have, with the values that they have if unset.
const DEFAULTS: [&str; 3] = ["parallel.reduce_dtype=f32", "parallel.reshard_after_forward=true", "parallel.prefetch=1"];

/// Every setting of a setup.
fn all(setup: &Setup) -> Vec<String> {
    let Candidate { mesh, micro_batch, accumulation, offload, .. } = setup.candidate;
    let mut sets = vec![
        format!("training.global_batch_size={}", setup.global_batch()),
        // Numbers that stay are said too where one of the three changes, because the configuration
        // may have given another two.
        format!("training.micro_batch_size={micro_batch}"),
        format!("training.accumulation_steps={accumulation}"),
        format!("training.sequence_length={}", setup.sequence_length),
        format!("parallel.ranks={}", mesh.ranks()),
        format!("parallel.data_parallel_replicate_degree={}", mesh.dp_replicate),
        format!("parallel.data_parallel_shard_degree={}", mesh.dp_shard),
        format!("parallel.zero_stage={}", setup.candidate.layout().zero_stage),
        format!("parallel.tensor_parallel_degree={}", mesh.tp),
        format!("parallel.pipeline_parallel_degree={}", mesh.pp),
        format!("model.layers={}", setup.layers),
        format!("model.ffn_dim={}", setup.ffn),
    ];
    if mesh.tp > 1 {
        // Rows that do not divide evenly stay whole.
        let rows = (u64::from(micro_batch) * setup.sequence_length).is_multiple_of(u64::from(mesh.tp));
        sets.push(format!("parallel.sequence_parallel={rows}"));
    }
    if mesh.cp > 1 {
        sets.push(format!("parallel.context_parallel_degree={}", mesh.cp));
    }
    if mesh.pp > 1 {
        sets.extend(schedule(setup.candidate.pipeline));
    }
    if setup.candidate.layout().zero_stage == 3 {
        let reshard = match setup.candidate.reshard {
            Reshard::Always => "true".to_owned(),
            Reshard::Never => "false".to_owned(),
            Reshard::To(ranks) => ranks.to_string(),
        };
        sets.push(format!("parallel.reshard_after_forward={reshard}"));
        sets.push(format!("parallel.prefetch={}", setup.candidate.prefetch));
    }
    let each = if setup.candidate.reduce_schedule == ReduceSchedule::PerMicroBatch { "micro_batch" } else { "step" };
    sets.push(format!("parallel.reduce_schedule={each}"));
    if mesh.data_parallel() > 1 {
        let dtype = if setup.reduce == ReduceFormat::Bf16 { "bf16" } else { "f32" };
        sets.push(format!("parallel.reduce_dtype={dtype}"));
    }
    let Checkpointing { full, selective } = setup.candidate.checkpointing;
    let mode = match (full, selective) {
        (0, 0) => Some("none"),
        (full, 0) if full == setup.layers => Some("full"),
        (0, selective) if selective == setup.layers => Some("selective"),
        // A mixture is the configuration's own, which no lever makes.
        _ => None,
    };
    sets.extend(mode.map(|mode| format!("activation_checkpointing.mode={mode}")));
    for (part, tier) in [
        ("optimizer", offload.optimizer),
        ("gradients", offload.gradients),
        ("parameters", offload.parameters),
        ("activations", offload.activations),
    ] {
        let tier = match tier {
            Some(Tier::Host) => "host",
            Some(Tier::Disk) => "disk",
            None => "none",
        };
        sets.push(format!("memory.offload.{part}={tier}"));
    }
    // Every format that levers choose has settings.
    sets.extend(here::precision(&[setup.candidate.format]).unwrap_or_default());
    sets.extend(setup.optimizer.name().map(|name| format!("optimizer.name={name}")));
    sets.extend(setup.edits.iter().filter_map(of_edit).flatten());
    sets
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use trainyard_engine::config::Inputs;
    use trainyard_plan::levers::table::LEVERS;
    use trainyard_plan::levers::{Offers, Place};

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
            experts: 1,
            dim: 64,
            tiers: vec![Tier::Disk],
            formats: vec![Format::Fp32, Format::Bf16],
        };
        for more in [&[][..], &["parallel.ranks=4".to_owned(), "parallel.zero_stage=3".to_owned()]] {
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
