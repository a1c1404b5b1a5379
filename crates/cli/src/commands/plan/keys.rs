//! The settings that make a configuration of this program run a plan.

use super::here;
use anyhow::{Result, bail};
use trainyard_plan::{Candidate, Plan, Request};
use trainyard_program::{Keep, PipelineSchedule, ReduceSchedule, Reshard, Tier};
use trainyard_sim::Generation;

/// The settings, as for `--set`, that make a configuration run as `plan`; or the reason why it
/// cannot run.
pub fn settings(request: &Request, plan: &Plan) -> Result<Vec<String>> {
    let candidate = &plan.candidate;
    if !candidate.runnable().is_yes() {
        bail!("{}", candidate.runnable());
    }
    let Candidate { mesh, micro_batch, accumulation, offload, .. } = *candidate;
    let mut sets = vec![
        format!("parallel.ranks={}", mesh.ranks()),
        format!("parallel.data_parallel_replicate_degree={}", mesh.dp_replicate),
        format!("parallel.data_parallel_shard_degree={}", mesh.dp_shard),
        format!("parallel.zero_stage={}", candidate.layout().zero_stage),
        format!("training.global_batch_size={}", candidate.global_batch()),
        format!("training.micro_batch_size={micro_batch}"),
        format!("training.accumulation_steps={accumulation}"),
        format!("training.sequence_length={}", request.sequence_length),
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
    if candidate.reduce_schedule == ReduceSchedule::PerMicroBatch {
        sets.push("parallel.reduce_schedule=micro_batch".to_owned());
    }
    if mesh.pp > 1 {
        sets.push(format!("parallel.pipeline_parallel_degree={}", mesh.pp));
        sets.extend(schedule(candidate.pipeline));
        let cuts: Vec<String> = plan.cuts.iter().map(u32::to_string).collect();
        sets.push(format!("parallel.pipeline_cuts=[{}]", cuts.join(", ")));
    }
    if mesh.tp > 1 {
        sets.push(format!("parallel.tensor_parallel_degree={}", mesh.tp));
        sets.push("parallel.sequence_parallel=true".to_owned());
    }
    sets.extend(checkpointing(candidate, request.model.layers as usize));
    let parts = [
        ("optimizer", offload.optimizer),
        ("gradients", offload.gradients),
        ("parameters", offload.parameters),
        ("activations", offload.activations),
    ];
    sets.extend(parts.into_iter().filter_map(|(part, tier)| {
        let tier = match tier? {
            Tier::Host => "host",
            Tier::Disk => "disk",
        };
        Some(format!("memory.offload.{part}={tier}"))
    }));
    sets.extend(here::precision(&[candidate.format])?);
    if request.cluster.device.family != Generation::Cpu {
        sets.push("compute.device=cuda".to_owned());
    }
    Ok(sets)
}

/// The settings of a pipeline's schedule.
pub fn schedule(schedule: PipelineSchedule) -> Vec<String> {
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
    let ranges: Vec<&[Keep]> = keep.chunk_by(|a, b| a == b).collect();
    match ranges[..] {
        [all] if all[0] == Keep::Everything => Vec::new(),
        [all] => vec![format!("activation_checkpointing.mode={}", mode(all[0]))],
        _ => {
            let mut from = 0;
            let mut overrides = Vec::new();
            for range in ranges {
                let to = from + range.len();
                if range[0] != Keep::Everything {
                    overrides.push(format!("{{ blocks = '{from}-{}', mode = '{}' }}", to - 1, mode(range[0])));
                }
                from = to;
            }
            vec![format!("activation_checkpointing.overrides=[{}]", overrides.join(", "))]
        }
    }
}

/// `set`, quoted as one word for a shell.
pub fn quoted(set: &str) -> String {
    if set.contains([' ', '[', '{']) { format!("\"{set}\"") } else { set.to_owned() }
}
