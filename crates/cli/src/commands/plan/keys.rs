//! The settings that make a configuration of this program run a candidate.

use super::here;
use anyhow::{Result, bail};
use trainyard_engine::config::{Compute, DeviceKind, Fp8Recipe, Resolved};
use trainyard_plan::{Candidate, Plan, Request};
use trainyard_program::{Keep, PipelineSchedule, ReduceSchedule, Reshard, Tier};
use trainyard_sim::{Format, Generation};

/// Settings that a configuration has if it says nothing of them.
const UNSET: [&str; 9] = [
    "parallel.reduce_schedule=step",
    "parallel.pipeline_parallel_degree=1",
    "parallel.tensor_parallel_degree=1",
    "activation_checkpointing.mode=none",
    "activation_checkpointing.overrides=[]",
    "memory.offload.optimizer=none",
    "memory.offload.gradients=none",
    "memory.offload.parameters=none",
    "memory.offload.activations=none",
];

/// The settings, as for `--set`, that make a configuration run as `plan`; or the reason why it
/// cannot run.
pub fn settings(request: &Request, plan: &Plan) -> Result<Vec<String>> {
    let candidate = &plan.candidate;
    let runnable = candidate.runnable();
    if !runnable.is_yes() {
        bail!("{runnable}");
    }
    let blocks = request.model.layers + request.model.encoder_layers;
    let mut sets = all(candidate, request.sequence_length, blocks as usize, &plan.cuts);
    sets.retain(|set| !UNSET.contains(&set.as_str()));
    sets.extend(here::precision(&[candidate.format])?);
    if request.cluster.device.family != Generation::Cpu {
        sets.push("compute.device=cuda".to_owned());
    }
    Ok(sets)
}

/// Every setting of a candidate for a model of `blocks` blocks, except those of its number format.
/// Without `cuts`, the configuration's own division of blocks among stages stays.
pub fn all(candidate: &Candidate, sequence_length: u64, blocks: usize, cuts: &[u32]) -> Vec<String> {
    let Candidate { mesh, micro_batch, accumulation, offload, .. } = *candidate;
    let mut sets = vec![
        format!("parallel.ranks={}", mesh.ranks()),
        format!("parallel.data_parallel_replicate_degree={}", mesh.dp_replicate),
        format!("parallel.data_parallel_shard_degree={}", mesh.dp_shard),
        format!("parallel.zero_stage={}", candidate.layout().zero_stage),
        format!("training.global_batch_size={}", candidate.global_batch()),
        format!("training.micro_batch_size={micro_batch}"),
        format!("training.accumulation_steps={accumulation}"),
        format!("training.sequence_length={sequence_length}"),
    ];
    if candidate.layout().zero_stage == 3 {
        let reshard = match candidate.reshard {
            Reshard::Always => "true".to_owned(),
            Reshard::Never => "false".to_owned(),
            Reshard::To(ranks) => ranks.to_string(),
        };
        sets.push(format!("parallel.reshard_after_forward={reshard}"));
        sets.push(format!("parallel.prefetch={}", candidate.prefetch));
    }
    let each = if candidate.reduce_schedule == ReduceSchedule::PerMicroBatch { "micro_batch" } else { "step" };
    sets.push(format!("parallel.reduce_schedule={each}"));
    sets.push(format!("parallel.pipeline_parallel_degree={}", mesh.pp));
    if mesh.pp > 1 {
        sets.extend(schedule(candidate.pipeline));
        if !cuts.is_empty() {
            let cuts: Vec<String> = cuts.iter().map(u32::to_string).collect();
            sets.push(format!("parallel.pipeline_cuts=[{}]", cuts.join(", ")));
        }
    }
    sets.push(format!("parallel.tensor_parallel_degree={}", mesh.tp));
    if mesh.tp > 1 {
        // Rows that do not divide evenly stay whole.
        let rows = (u64::from(micro_batch) * sequence_length).is_multiple_of(u64::from(mesh.tp));
        sets.push(format!("parallel.sequence_parallel={rows}"));
    }
    if mesh.cp > 1 {
        sets.push(format!("parallel.context_parallel_degree={}", mesh.cp));
        // The nearest to the ring that was priced: keys travel while attention is computed.
        sets.push("parallel.context_parallel_exchange=all_gather_overlapped".to_owned());
    }
    if mesh.ep > 1 {
        sets.push(format!("parallel.expert_parallel_degree={}", mesh.ep));
    }
    sets.extend(checkpointing(candidate, blocks));
    for (part, tier) in [
        ("optimizer", offload.optimizer),
        ("gradients", offload.gradients),
        ("parameters", offload.parameters),
        ("activations", offload.activations),
    ] {
        let tier = match tier {
            Some(Tier::Host) => "host",
            Some(Tier::Disk) => "disk",
            // The configuration says in what form the base lies.
            Some(Tier::Encoded(_)) | None => "none",
        };
        sets.push(format!("memory.offload.{part}={tier}"));
    }
    sets
}

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

/// The settings of a pipeline's schedule.
fn schedule(schedule: PipelineSchedule) -> Vec<String> {
    let (name, chunks) = match schedule {
        PipelineSchedule::GPipe => ("gpipe", None),
        PipelineSchedule::OneForwardOneBackward => ("1f1b", None),
        PipelineSchedule::Interleaved { chunks } => ("interleaved", Some(chunks)),
        PipelineSchedule::ZeroBubble => ("zero_bubble", None),
        PipelineSchedule::ZeroBubbleV => ("zero_bubble_v", None),
        PipelineSchedule::DualPipeV => ("dual_pipe_v", None),
    };
    let mut sets = vec![format!("parallel.pipeline_schedule={name}")];
    sets.extend(chunks.map(|chunks| format!("parallel.pipeline_chunks={chunks}")));
    sets
}

/// The settings of what the `blocks` blocks of a model keep for backward: one mode, or the modes of
/// ranges of blocks.
fn checkpointing(candidate: &Candidate, blocks: usize) -> Vec<String> {
    let keep = candidate.checkpointing.keep(blocks + 2, candidate.mesh.pp > 1);
    let keep = &keep[1..=blocks];
    let mode = |keep: Keep| match keep {
        Keep::Everything => "none",
        Keep::Selective => "selective",
        Keep::InputOnly => "full",
    };
    let both = |mode: &str, overrides: &[String]| {
        vec![
            format!("activation_checkpointing.mode={mode}"),
            format!("activation_checkpointing.overrides=[{}]", overrides.join(", ")),
        ]
    };
    let mut overrides = Vec::new();
    let ranges: Vec<&[Keep]> = keep.chunk_by(|a, b| a == b).collect();
    if let [all] = ranges[..] {
        return both(mode(all[0]), &overrides);
    }
    let mut from = 0;
    for range in ranges {
        let to = from + range.len();
        if range[0] != Keep::Everything {
            overrides.push(format!("{{ blocks = '{from}-{}', mode = '{}' }}", to - 1, mode(range[0])));
        }
        from = to;
    }
    both(mode(Keep::Everything), &overrides)
}
