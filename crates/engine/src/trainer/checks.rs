//! Checks between steps: parameters that must be the same on several ranks, and units that learn
//! nothing any more.

use super::{Run, report};
use crate::warning::warning;
use crate::{EngineError, Result};
use trainyard_program::StepKind;
use trainyard_record::health::{HealthEvent, Symptom};

/// The share of dead units that is said.
const DEAD_MIN: f64 = 0.01;

impl Run<'_> {
    /// Compares the parameters of ranks that must hold the same ones, at the configured interval.
    ///
    /// # Errors
    /// They differ. The checkpoints since they were last the same are set aside.
    pub(super) fn compare_replicas(&mut self, kind: StepKind) -> Result<()> {
        let session = &*self.session;
        let (step, interval) = (session.state.step, session.resolved.config.health.compare_interval_steps);
        let are_same = matches!(kind, StepKind::Synchronous | StepKind::Drained);
        if !are_same || session.world.size() == 1 || interval == 0 || !step.is_multiple_of(interval) {
            return Ok(());
        }
        let Some(difference) = session.rank.compare_replicas(&session.world)? else {
            self.agreed_replicas = step;
            return Ok(());
        };
        let what = difference.in_words();
        report(self.writer.wait_for_it()?, self.progress);
        self.write(&self.event(Symptom::ReplicasDiffer, None, format!("{what}; the run ends")))?;
        let kept = match self.session.is_first() {
            true => crate::checkpoint::set_aside(&self.session.folder, self.agreed_replicas + 1)?.to_string(),
            false => String::new(),
        };
        // No rank ends before the checkpoints are set aside.
        self.session.world.barrier()?;
        Err(EngineError::ReplicasDiffer { step, what, kept })
    }

    /// Says how many units of feed-forward layers have got no gradient for long, when they become
    /// many.
    pub(super) fn look_for_dead_units(&mut self, kind: StepKind) -> Result<()> {
        let session = &*self.session;
        let (step, interval) = (session.state.step, session.resolved.config.health.dead_units_interval_steps);
        let is_updated = matches!(kind, StepKind::Synchronous | StepKind::Drained);
        if !is_updated || interval == 0 || !step.is_multiple_of(interval) {
            return Ok(());
        }
        let own: Vec<u64> = session.rank.dead_rows()?.concat();
        let mut all = vec![0; own.len() * session.world.size()];
        session.world.all_gather(&own, &mut all)?;
        let of = |column: usize| -> Vec<u64> {
            let unit = |unit: usize| all.chunks(own.len()).map(|rank| rank[2 * unit + column]).sum();
            (0..own.len() / 2).map(unit).collect()
        };
        let (dead, looked_at) = (of(0), of(1));
        let share = |unit: &usize| dead[*unit] as f64 / looked_at[*unit].max(1) as f64;
        let total = dead.iter().sum::<u64>() as f64 / looked_at.iter().sum::<u64>().max(1) as f64;
        if total < DEAD_MIN.max(2.0 * self.dead_units_said) {
            return Ok(());
        }
        self.dead_units_said = total;
        let worst = (0..dead.len()).max_by(|a, b| share(a).total_cmp(&share(b))).expect("a model has units");
        let name = session.rank.model().units()[worst].name();
        let most = 1e2 * share(&worst);
        self.progress.note(&warning(format_args!(
            "step {step}: {:.1} % of the units of feed-forward layers have got no gradient for long (most in `{name}`: \
             {most:.1} %): they learn nothing any more; lower optimizer.learning_rate, or lengthen schedule.warmup_steps",
            1e2 * total
        )));
        self.write(&self.event(Symptom::DeadUnits, Some(total), "training goes on".to_owned()))
    }

    /// An event of the step that has just run.
    fn event(&self, symptom: Symptom, value: Option<f64>, reaction: String) -> HealthEvent {
        let count = self.taken;
        let samples = [self.session.state.samples - count, count];
        HealthEvent { step: self.session.state.step, symptom, value, usual: None, samples, reaction }
    }
}
