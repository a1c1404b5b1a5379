//! The instructions of a worker of a parameter server, and the server that its rank may host
//! ([`crate::server`]).

use super::step::{Carried, RunningStep};
use super::{Rank, ServerStep, cannot};
use crate::Result;
use crate::links::Links;
use crate::optimizer::Optimizer;
use crate::server::{Commit, Server, Worker};
use crate::state::{ParameterState, lock};
use std::sync::Arc;
use trainyard_comm::Position;
use trainyard_program::{Action, StepKind};
use trainyard_tensor::Device;

/// The worker of a rank, with the server that it hosts, if the rank's program has a parameter
/// server.
pub(super) fn worker_of(
    device: &Device,
    parameters: &ParameterState,
    optimizer: &Arc<Optimizer>,
    links: &mut Links,
) -> Result<Option<Worker>> {
    let holding = parameters.holding();
    let Some(settings) = holding.server else { return Ok(None) };
    let own = Server::new(device, parameters, optimizer, settings)?;
    Ok(Some(Worker::new(links.server.take(), own, holding)?))
}

impl Rank {
    /// Posts the instruction that a lane of the worker is about to run, for the other ranks.
    pub(super) fn post_as_worker(&self, at: &Position) {
        if let Some(worker) = &self.worker {
            worker.post(at);
        }
    }

    fn worker(&self, action: Action) -> Result<&Worker> {
        self.worker.as_ref().ok_or_else(|| cannot(action))
    }

    /// Sends a unit's gradient to the servers.
    pub(super) fn push(&self, unit: u32) -> Result<()> {
        let (worker, unit) = (self.worker(Action::Push { unit })?, unit as usize);
        worker.push(unit, &self.gradients.completed(unit)?, self.parameters.unit(unit), self.parameters.holding())
    }

    /// Tells the servers that the step's pushes are complete. The step's loss is that of this rank
    /// until the update is known.
    pub(super) fn commit(&self, step: &RunningStep<'_>, carried: &mut Carried) -> Result<()> {
        let worker = self.worker(Action::Commit)?;
        if step.is_late() {
            worker.leave_out();
            return Ok(());
        }
        self.gradients.end_backward()?;
        let losses = carried.losses.iter_mut().map(|loss| self.read_loss(loss.take())).collect::<Result<Vec<_>>>()?;
        let (targets, divisor) = (step.own_targets(), step.targets().max(1));
        lock(&step.outcome).loss = losses.iter().sum::<f64>() * divisor as f64 / targets.max(1) as f64;
        let settings = step.settings();
        let (rate_factor, clip_norm) = (settings.rate_factor, settings.clip_norm);
        let commit = Commit { clock: 0, targets, divisor, rate_factor, clip_norm, updates_before: 0, losses };
        worker.commit(commit, self.parameters.holding())
    }

    /// Brings a unit's parameters from the servers. Where they have all updates, the outcome of the
    /// step is known.
    pub(super) fn pull(&self, unit: u32, staleness: u32, step: &RunningStep<'_>) -> Result<()> {
        let worker = self.worker(Action::Pull { unit, staleness })?;
        let unit = unit as usize;
        let program = step.program();
        let (has_backups, ends_round) = (worker.has_backups(), program.kind == StepKind::Drained);
        // The next step is left out too if its update is made. Parameters come with the last one.
        if ends_round || !worker.is_late() {
            worker.pull(unit, staleness, self.parameters.unit(unit), self.parameters.holding())?;
        }
        let version = worker.heard();
        lock(&self.core).updates = worker.updates();
        let mut outcome = lock(&step.outcome);
        outcome.gradient_norm = version.gradient_norm;
        let is_drained = staleness == 0 && (ends_round || !has_backups);
        if is_drained || has_backups {
            outcome.loss = version.loss;
        }
        if is_drained {
            outcome.skipped = version.skipped_in_a_row > 0;
        }
        let bound = program.server.map_or(0, |server| server.staleness);
        let skipped_in_a_row = version.skipped_in_a_row;
        outcome.server = (bound > 0 || has_backups).then_some(ServerStep { is_drained, skipped_in_a_row });
        Ok(())
    }
}
