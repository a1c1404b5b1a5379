//! Rounds in which slower replicas make fewer inner steps: the end of one, and the beginning of the
//! next.

use super::{Run, loader};
use crate::Result;
use crate::config::{InnerSteps, Resolved};
use crate::rank::{Participation, StepOutcome};
use crate::rounds::{Round, TimedSteps};
use crate::session::Session;
use crate::snapshot::RunState;
use trainyard_comm::Communicator;
use trainyard_program::{Program, StepKind};

/// The samples and replicas of a step.
#[derive(Clone, Copy)]
pub(super) struct Taken {
    /// The part of this rank's replica; None if all replicas take part alike.
    pub(super) participation: Option<Participation>,
    /// Number of samples, of all replicas that take part.
    pub(super) samples: u64,
}

impl Taken {
    /// Those of the step that follows.
    pub(super) fn of_next(session: &Session) -> Taken {
        let global = session.resolved.batches().of(session.state.step).global as u64;
        let Some(round) = &session.state.round else { return Taken { participation: None, samples: global } };
        let (replica, replicas) = session.rank.replica();
        let of_replica = global / replicas as u64;
        let tokens = of_replica * session.resolved.sequence_length as u64;
        let participation = round.participation(replica, session.state.step, tokens);
        Taken { participation: Some(participation), samples: participation.replicas as u64 * of_replica }
    }

    /// True if this rank computes in the step.
    pub(super) fn takes_part(&self) -> bool {
        self.participation.is_none_or(|own| own.takes_part)
    }
}

/// The end of a round. All ranks come to it together.
pub(super) struct RoundEnd<'a> {
    world: &'a Communicator,
    program: &'a Program,
    /// The round that ends.
    pub(super) round: Round,
    asked: &'a InnerSteps,
    /// Steps of a round.
    every: u64,
    /// The number of steps of the run after it.
    end: u64,
}

impl<'a> RoundEnd<'a> {
    /// The end of the round of `state`, if the step after `state` ends it; None if all replicas
    /// make every step.
    pub(super) fn after(
        world: &'a Communicator,
        program: &'a Program,
        resolved: &'a Resolved,
        state: &RunState,
    ) -> Option<RoundEnd<'a>> {
        let round = state.round.clone().filter(|_| program.kind == StepKind::Outer)?;
        let asked = &resolved.config.update.inner_steps;
        Some(RoundEnd { world, program, round, asked, every: resolved.round_steps(), end: state.step + 1 })
    }

    /// The round that follows; None if all replicas make every step of it.
    pub(super) fn next(&self) -> Result<Option<Round>> {
        let step_s = match self.asked {
            InnerSteps::BySpeed => self.step_s()?,
            InnerSteps::Equal | InnerSteps::Given(_) => None,
        };
        Ok(self.round.next(self.end, self.asked, self.every, step_s.as_deref()))
    }

    /// The seconds of an inner step of each replica: those of its slowest rank. None if a rank has
    /// timed no step.
    fn step_s(&self) -> Result<Option<Vec<f64>>> {
        let mut all = vec![0; self.world.size()];
        self.world.all_gather(&[self.round.timed.mean().to_bits()], &mut all)?;
        let mesh = &self.program.mesh;
        let mut step_s = vec![0.0f64; mesh.dp_replicate as usize];
        for (rank, bits) in (0..).zip(all) {
            let own = f64::from_bits(bits);
            if !(own.is_finite() && own > 0.0) {
                return Ok(None);
            }
            let replica = mesh.coordinates(rank).dp_replicate as usize;
            step_s[replica] = step_s[replica].max(own);
        }
        Ok(Some(step_s))
    }

    /// The inner steps that each replica has made in it.
    pub(super) fn made(&self) -> Vec<u64> {
        self.round.inner_steps.within(self.end - self.round.begin).0
    }
}

impl Run<'_> {
    /// Times the inner step that has just run. The last step of a round is not timed: the numbers
    /// of the next round are agreed on before it has ended.
    pub(super) fn time_inner_step(&mut self, seconds: f64) {
        let replica = self.session.rank.replica().0;
        let given = self.session.inner_step_s.as_ref().and_then(|given| given.get(replica).copied());
        if let Some(Round { timed, .. }) = &mut self.session.state.round {
            TimedSteps::add(timed, given.unwrap_or(seconds));
        }
    }

    /// The loss and norm to record for a step: of a replica that waits, those of its last one.
    pub(super) fn shown(&self, outcome: &StepOutcome) -> [f64; 2] {
        if outcome.waits_for_round() { self.last } else { [outcome.loss, outcome.gradient_norm] }
    }

    /// Begins a stage of a batch warm-up, if the next step is its first. The loader has made
    /// batches of the old size ahead.
    pub(super) fn begin_batch(&mut self) -> Result<()> {
        let (step, batches) = (self.session.state.step, self.session.resolved.batches());
        if batches.stage(step) != batches.stage(step.saturating_sub(1)) {
            self.progress.note(&format!("from step {} on, a step has {} sequences", step + 1, batches.of(step).global));
            self.loader = loader(self.session)?;
        }
        Ok(())
    }

    /// Begins the round that follows `ended`. A loader makes batches ahead as if the numbers stayed
    /// the same; otherwise it begins anew.
    pub(super) fn begin_round(&mut self, ended: &Round, next: Option<Round>) -> Result<()> {
        let step = self.session.state.step;
        let is_whole = step - ended.begin == ended.inner_steps.longest();
        let is_same = next.as_ref().is_some_and(|next| next.inner_steps == ended.inner_steps);
        self.session.state.round = next;
        let elapsed = self.clock.elapsed();
        self.clock.speed_since.get_or_insert((step, elapsed));
        if !(is_whole && is_same) {
            self.loader = loader(self.session)?;
        }
        Ok(())
    }
}
