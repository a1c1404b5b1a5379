//! The causes: each function looks for one kind in the measured steps and returns a verdict with
//! its evidence and its size.

mod machine;
mod numbers;
mod program;
mod ranks;

pub use machine::{leak, memory_pressure, noisy_neighbour, stolen_cores, throttled};
pub use numbers::{hang, wrong_numbers};
pub use program::{bound, checkpoint_stall, communication_bound, host_overhead, input_bound, offload_bound};
pub use ranks::{bubble, imbalance, straggler};

use crate::measured::{Measured, Site, measured, work};
use crate::run::Run;
use crate::verdict::{Advice, Cause, Evidence, SavedStep, Saving, Severity, Verdict};
use trainyard_program::{Instruction, Lane};
use trainyard_record::programs::Work;
use trainyard_sim::replay::Own;

/// The smallest saving, as a share of the step, that is reported.
pub const SHARE_MIN: f64 = 0.01;

/// The material of a diagnosis.
#[derive(Debug)]
pub struct Findings<'a> {
    /// The run.
    pub run: &'a Run,
    /// Its measured steps.
    pub steps: Vec<Measured<'a>>,
}

impl<'a> Findings<'a> {
    /// The material that a run's record holds.
    pub fn of(run: &'a Run) -> Findings<'a> {
        Findings { run, steps: measured(run) }
    }

    /// The mean saving when `change` changes the own times of every step; it is given the index of
    /// the step.
    pub fn saving(&self, mut change: impl FnMut(usize, Site<'_>, &mut Own)) -> Option<Saving> {
        let one = |(index, step): (usize, &Measured<'a>)| {
            // Compared with the replay, not with the clock: the time after the last instruction is
            // not saved.
            let saved = step.replayed_s - step.without(&mut |site, own| change(index, site, own));
            SavedStep { measured_seconds: step.seconds, replayed_seconds: step.seconds - saved }
        };
        Saving::mean_of_steps(&self.steps.iter().enumerate().map(one).collect::<Vec<_>>())
    }

    /// The mean saving when everything on some lanes took no time of its own.
    fn saving_on(&self, free: impl Fn(&Instruction) -> bool) -> Option<Saving> {
        self.saving(|_, site, own| {
            if free(site.instruction) {
                own.took_s = 0.0;
            }
        })
    }

    /// Number of recorded ranks.
    fn ranks(&self) -> usize {
        self.run.ranks.len()
    }

    /// The work of an instruction.
    fn work(&self, site: Site<'_>) -> Work {
        work(self.run, site.rank, site.number, site.instruction)
    }

    /// Mean seconds a step that `value` adds up over the instructions of a rank.
    fn mean_of(&self, rank: usize, value: impl Fn(&Measured<'a>, Site<'_>, Own) -> f64) -> f64 {
        let of_step = |step: &Measured<'a>| {
            let instructions = &step.replay.programs()[rank].instructions;
            let each = instructions.iter().enumerate();
            each.map(|(number, instruction)| {
                value(step, Site { rank, number, instruction }, step.replay.own[rank][number])
            })
            .sum::<f64>()
        };
        self.steps.iter().map(of_step).sum::<f64>() / (self.steps.len() as f64).max(1.0)
    }
}

/// The lanes of collectives and messages.
const EXCHANGES: [Lane; 5] = [Lane::Gather, Lane::Reduce, Lane::Inner, Lane::Send, Lane::Receive];

/// True for collectives and messages.
fn exchanges(instruction: &Instruction) -> bool {
    EXCHANGES.contains(&instruction.action.lane())
}

/// True for instructions of the compute lane.
fn computes(instruction: &Instruction) -> bool {
    instruction.action.lane() == Lane::Compute
}

/// A verdict whose weight follows from its saving; None if it saves less than [`SHARE_MIN`] or no
/// more than chance.
fn verdict(
    cause: Cause,
    saving: Option<Saving>,
    summary: impl Into<String>,
    evidence: Vec<Evidence>,
    advice: Vec<Advice>,
) -> Option<Verdict> {
    let saving = saving.filter(|saving| saving.share() >= SHARE_MIN && saving.low_seconds > 0.0)?;
    let severity = Severity::of_share(saving.share());
    Some(Verdict { cause, severity, summary: summary.into(), evidence, saving: Some(saving), advice })
}
