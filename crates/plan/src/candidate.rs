//! A candidate: one way to run a step as a few numbers, with the mesh and the strategy that they
//! stand for.

use serde::Serialize;
use std::fmt;
use trainyard_program::{
    Keep, Mesh, Offload, PipelineSchedule, Placement, ReduceSchedule, Reshard, Runnable, StateBytes, Strategy, Tier,
};
use trainyard_sim::Format;

/// Activation checkpointing: the number of blocks that keep less than everything for backward.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize)]
pub struct Checkpointing {
    /// Blocks that keep only their input.
    pub full: u32,
    /// Blocks that keep everything but the results of cheap functions.
    pub selective: u32,
}

impl Checkpointing {
    /// The activations that each of `units` units keeps. Embedding and head (the first and the last
    /// unit) keep everything, because they have nothing worth recomputing. Without a pipeline the
    /// first blocks keep less, which a configuration can say in one line. In a pipeline these
    /// blocks are spread, so that every stage has its share.
    pub fn keep(self, units: usize, spread: bool) -> Vec<Keep> {
        let blocks = units.saturating_sub(2);
        let (full, selective) = (self.full as usize, self.selective as usize);
        let chosen = |block: usize, count: usize| match spread {
            true => (block + 1) * count / blocks.max(1) > block * count / blocks.max(1),
            false => block < count,
        };
        let mut keep = vec![Keep::Everything; units];
        for block in 0..blocks {
            if chosen(block, full) {
                keep[block + 1] = Keep::InputOnly;
            } else if chosen(block, full + selective) || spread && full + selective >= blocks {
                keep[block + 1] = Keep::Selective;
            }
        }
        keep
    }
}

/// One way to run a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    /// Degree along each axis.
    pub mesh: Mesh,
    /// Number of sequences of a micro-batch.
    pub micro_batch: u32,
    /// Number of micro-batches that a rank sums before an update.
    pub accumulation: u32,
    /// ZeRO stage: the state that is sharded.
    pub zero_stage: u8,
    /// Stage 3: the part of a gathered unit that stays after its forward.
    pub reshard: Reshard,
    /// Stage 3: number of units that are gathered ahead.
    pub prefetch: u32,
    /// The time at which gradients are summed over ranks.
    pub reduce_schedule: ReduceSchedule,
    /// Activations that blocks keep for backward.
    pub checkpointing: Checkpointing,
    /// State that lies in a lower tier.
    pub offload: Offload,
    /// The pipeline schedule.
    pub pipeline: PipelineSchedule,
    /// The number format of products.
    pub format: Format,
}

impl Candidate {
    /// The plainest candidate on `mesh`: nothing sharded, recomputed or offloaded, gradients summed
    /// once a step, 1F1B.
    pub fn plain(mesh: Mesh, micro_batch: u32, accumulation: u32, format: Format) -> Candidate {
        Candidate {
            mesh,
            micro_batch,
            accumulation,
            zero_stage: 0,
            reshard: Reshard::Always,
            prefetch: 1,
            reduce_schedule: ReduceSchedule::PerStep,
            checkpointing: Checkpointing::default(),
            offload: Offload::default(),
            pipeline: PipelineSchedule::OneForwardOneBackward,
            format,
        }
    }

    /// The strategy for a model of `units` units.
    pub fn strategy(&self, units: usize) -> Strategy {
        Strategy {
            accumulation_steps: self.accumulation,
            keep: self.checkpointing.keep(units, self.mesh.pp > 1),
            zero_stage: self.zero_stage,
            reshard_after_forward: self.reshard,
            prefetch: self.prefetch,
            reduce_schedule: self.reduce_schedule,
            offload: self.offload,
            bytes: state_bytes(self.format),
            pipeline: self.pipeline.into(),
            sequence_parallel: self.mesh.tp > 1,
            ..Strategy::new(units)
        }
    }

    /// The placement of a rank's state.
    pub fn placement(&self) -> Placement {
        // The placement does not depend on the number of units or what they keep.
        Placement::of(&self.mesh, &self.strategy(0))
    }

    /// Number of stretches of units per pipeline stage.
    pub fn chunks(&self) -> u32 {
        self.pipeline.facts().chunks
    }

    /// Number of sequences of a step over all ranks.
    pub fn global_batch(&self) -> u64 {
        u64::from(self.mesh.data_parallel()) * u64::from(self.micro_batch) * u64::from(self.accumulation)
    }

    /// The answer to whether this program can run the candidate.
    pub fn runnable(&self) -> Runnable {
        trainyard_program::runnable(&self.mesh)
    }

    /// Degrees, ZeRO stage and format. Candidates of one layout differ only in how they run on it.
    pub fn layout(&self) -> Layout {
        let sharded = self.mesh.shard_degree() > 1;
        Layout { mesh: self.mesh, zero_stage: if sharded { self.zero_stage } else { 0 }, format: self.format }
    }
}

/// Degrees, ZeRO stage and number format.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    /// Degree along each axis.
    pub mesh: Mesh,
    /// ZeRO stage: the state that is sharded.
    pub zero_stage: u8,
    /// The number format of products.
    pub format: Format,
}

/// The part of a layout by which plans differ in kind: degrees but those of data parallelism, and
/// whether nothing, the optimizer's state, or parameters too are sharded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LayoutKind {
    tp: u32,
    pp: u32,
    cp: u32,
    ep: u32,
    sharded: u8,
    devices: u32,
    format: Format,
}

impl Layout {
    /// The kind of this layout.
    pub fn kind(&self) -> LayoutKind {
        let Mesh { tp, pp, cp, ep, .. } = self.mesh;
        let sharded = if self.zero_stage == 2 { 1 } else { self.zero_stage };
        LayoutKind { tp, pp, cp, ep, sharded, devices: self.mesh.ranks(), format: self.format }
    }
}

/// Bytes per element of state: f32 masters beside a 16-bit copy, or one f32 copy.
pub fn state_bytes(format: Format) -> StateBytes {
    match format {
        Format::Fp32 | Format::Tf32 => StateBytes::F32,
        Format::Fp16 | Format::Bf16 | Format::Fp8 | Format::Fp4 => StateBytes::MIXED,
    }
}

impl fmt::Display for Layout {
    /// `tp 8, pp 4, dp 16, ZeRO-1 in groups of 8`; degrees of 1 are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mesh { pp, dp_replicate, dp_shard, cp, tp, ep, .. } = self.mesh;
        let mut parts: Vec<String> = [("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep)]
            .into_iter()
            .filter(|(_, degree)| *degree > 1)
            .map(|(name, degree)| format!("{name} {degree}"))
            .collect();
        let dp = dp_replicate * dp_shard;
        if dp > 1 || parts.is_empty() {
            parts.push(format!("dp {dp}"));
        }
        if self.zero_stage > 0 {
            parts.push(match dp_replicate {
                1 => format!("ZeRO-{}", self.zero_stage),
                _ => format!("ZeRO-{} in groups of {}", self.zero_stage, self.mesh.shard_degree()),
            });
        }
        f.write_str(&parts.join(", "))
    }
}

/// The choices that differ from the usual ones, in words.
pub fn details(candidate: &Candidate) -> Vec<String> {
    let mut parts = Vec::new();
    if candidate.layout().zero_stage == 3 {
        match candidate.reshard {
            Reshard::Always => {}
            Reshard::Never => parts.push("keep gathered".to_owned()),
            Reshard::To(n) => parts.push(format!("reshard to {n}")),
        }
        if candidate.prefetch != 1 {
            parts.push(format!("prefetch {}", candidate.prefetch));
        }
    }
    if candidate.reduce_schedule == ReduceSchedule::PerMicroBatch {
        parts.push("reduce per micro-batch".to_owned());
    }
    for (what, tier) in [
        ("optimizer", candidate.offload.optimizer),
        ("parameters", candidate.offload.parameters),
        ("activations", candidate.offload.activations),
        ("gradients", candidate.offload.gradients),
    ] {
        match tier {
            Some(Tier::Host) => parts.push(format!("{what} on host")),
            Some(Tier::Disk) => parts.push(format!("{what} on disk")),
            Some(Tier::Encoded(codec)) => parts.push(format!("frozen {what} in {codec}")),
            None => {}
        }
    }
    parts
}

/// `none`, `selective`, `full`, or counts of blocks.
pub fn checkpointing_words(checkpointing: Checkpointing, blocks: u32) -> String {
    match (checkpointing.full, checkpointing.selective) {
        (0, 0) => "none".to_owned(),
        (full, 0) if full == blocks => "full".to_owned(),
        (0, selective) if selective == blocks => "selective".to_owned(),
        (full, 0) => format!("full {full}/{blocks}"),
        (0, selective) => format!("sel. {selective}/{blocks}"),
        (full, selective) => format!("full {full} sel. {selective}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixes_of_checkpointing_count_blocks() {
        let count = |mix: Checkpointing, spread| {
            let keep = mix.keep(10, spread);
            assert_eq!((keep[0], keep[9]), (Keep::Everything, Keep::Everything));
            [Keep::InputOnly, Keep::Selective, Keep::Everything].map(|k| keep.iter().filter(|x| **x == k).count())
        };
        for spread in [false, true] {
            assert_eq!(count(Checkpointing::default(), spread), [0, 0, 10]);
            assert_eq!(count(Checkpointing { full: 8, selective: 0 }, spread), [8, 0, 2]);
            assert_eq!(count(Checkpointing { full: 0, selective: 8 }, spread), [0, 8, 2]);
            assert_eq!(count(Checkpointing { full: 4, selective: 0 }, spread), [4, 0, 6]);
            assert_eq!(count(Checkpointing { full: 2, selective: 6 }, spread), [2, 6, 2]);
        }
        let spread = Checkpointing { full: 4, selective: 0 }.keep(10, true);
        assert_eq!(spread[1..5].iter().filter(|k| **k == Keep::InputOnly).count(), 2, "half of every half");
    }

    #[test]
    fn layouts_are_said_without_what_is_one() {
        let say = |mesh, zero_stage| Layout { mesh, zero_stage, format: Format::Bf16 }.to_string();
        assert_eq!(say(Mesh::default(), 0), "dp 1");
        assert_eq!(say(Mesh { tp: 8, pp: 4, dp_shard: 16, ..Mesh::default() }, 1), "tp 8, pp 4, dp 16, ZeRO-1");
        assert_eq!(say(Mesh::data(4, 8), 3), "dp 32, ZeRO-3 in groups of 8");
    }
}
