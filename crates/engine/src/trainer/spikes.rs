//! Reactions to losses and norms that jump: said, written, and where asked for, a return to the
//! last checkpoint. Data that is repeated often is said here too.
//!
//! After a return the run goes on with the samples that follow those of the spike, so it does not
//! meet the same batches again (Chowdhery et al. 2022, section 5.1). Steps are counted from the
//! checkpoint on, and the records of the steps that are taken back are removed, as when a run is
//! resumed. `health.jsonl` keeps what happened.

use super::{Run, loader, no_record, report};
use crate::Result;
use crate::config::OnSpike;
use crate::health::Suspicion;
use crate::metrics::Recorder;
use crate::recording::Recording;
use crate::session::Session;
use crate::warning::warning;
use std::time::Instant;
use trainyard_data::{Position, Samples};
use trainyard_record::health::{HealthEvent, Symptom};

/// Returns to one checkpoint after which the next spike ends the run: the cause is not the data.
const RETURNS_MAX: u32 = 3;
/// Passes over a corpus up to which repeated tokens are nearly as good as new ones; from 16 on they
/// teach nothing (Muennighoff et al. 2023, section 6).
const PASSES: f64 = 4.0;

impl Run<'_> {
    /// Says and writes what is suspicious about the step that has just run, and notes whether the
    /// run ends or goes back.
    pub(super) fn react(&mut self, step: u64, suspicion: Suspicion) -> Result<()> {
        let Suspicion { symptom, value, usual } = suspicion;
        let on_spike = self.session.resolved.config.health.on_spike;
        let is_spike = matches!(symptom, Symptom::LossSpike | Symptom::NormSpike);
        self.is_stopped_by_spike |= is_spike && on_spike == OnSpike::Stop;
        self.goes_back |= is_spike && on_spike == OnSpike::RollBack;
        let reaction = match (is_spike, symptom, on_spike) {
            (_, Symptom::NotFinite, _) | (true, _, OnSpike::Skip) => "the update was skipped",
            (true, _, OnSpike::Stop) => "the update was skipped and the run ends",
            (true, _, OnSpike::RollBack) => {
                "the update was skipped, and the run goes back to its last checkpoint if it has one"
            }
            _ => "training goes on",
        };
        let count = self.taken;
        let first = self.session.state.samples - count;
        if symptom != Symptom::NotFinite {
            // What is not finite has a note of its own.
            self.progress.note(&warning(format_args!(
                "step {step}: {}: {value:.4}, usually {usual:.4} (samples {first} to {}); {reaction}",
                symptom.in_words(),
                first + count - 1
            )));
        }
        let finite = |number: f64| number.is_finite().then_some(number);
        let reaction = reaction.to_owned();
        let (value, usual) = (finite(value), finite(usual));
        self.write(&HealthEvent { step, symptom, value, usual, samples: [first, count], reaction })
    }

    /// Says and writes that the step that has just run ended the fourth pass over a corpus.
    pub(super) fn say_repetition(&mut self, step: u64) -> Result<()> {
        let Session { dataset, state, .. } = &*self.session;
        // Many passes are usual over images, which change from pass to pass.
        let Samples::Text(dataset) = dataset else { return Ok(()) };
        let count = self.taken;
        let first = state.samples - count;
        let ended = |corpus: &usize| {
            let passes = |samples| dataset.epochs(*corpus, Position { samples });
            passes(first) < PASSES && passes(state.samples) >= PASSES
        };
        let corpora = dataset.corpora().len();
        let Some(corpus) = (0..corpora).find(ended) else { return Ok(()) };
        let which = if corpora > 1 { format!("corpus {} of data.train", corpus + 1) } else { "data.train".to_owned() };
        self.progress.note(&warning(format_args!(
            "step {step}: {which} has been passed over {PASSES} times: from here on its tokens teach less with each \
             pass, and from 16 passes on nothing; give it more text, or fewer steps"
        )));
        let (value, usual) = (Some(PASSES), None);
        let reaction = "training goes on".to_owned();
        self.write(&HealthEvent {
            step,
            symptom: Symptom::RepeatedData,
            value,
            usual,
            samples: [first, count],
            reaction,
        })
    }

    pub(super) fn write(&self, event: &HealthEvent) -> Result<()> {
        if !self.session.is_first() {
            return Ok(());
        }
        Ok(trainyard_record::health::append(&self.session.folder, event)?)
    }

    /// Goes back to the last checkpoint, and on with the samples that follow. Returns false if the
    /// run goes on where it is: there is no checkpoint yet, or the run ends, because a spike came
    /// again after every return to this one.
    pub(super) fn go_back(&mut self) -> Result<bool> {
        self.goes_back = false;
        report(self.writer.wait_for_it()?, self.progress);
        let (from, samples) = (self.session.state.step, self.session.state.samples);
        let progress = &mut *self.progress;
        let Some(step) = self.session.last_checkpoint(&mut |line| progress.note(line))? else {
            self.progress.note("there is no checkpoint to go back to yet: training goes on");
            return Ok(false);
        };
        let count = if self.returns.0 == step { self.returns.1 } else { 0 };
        if count == RETURNS_MAX {
            self.progress.note(&warning(format_args!(
                "a spike came again after each of {RETURNS_MAX} returns to step {step}, with other samples each time: the run ends; \
                 go on with a lower optimizer.learning_rate"
            )));
            self.is_stopped_by_spike = true;
            return Ok(false);
        }
        self.returns = (step, count + 1);
        let progress = &mut *self.progress;
        self.session.go_back(step, &mut |line| progress.note(line))?;
        // What was compared after this step was undone.
        self.agreed_replicas = self.agreed_replicas.min(step);
        let session = &mut *self.session;
        self.loader = loader(session)?;
        if let Some(recorder) = &mut self.recorder {
            recorder.end()?;
            let (opened, notes) = Recorder::open(&session.folder, &session.resolved.config.metrics, step)?;
            notes.iter().for_each(|line| self.progress.note(line));
            *recorder = opened;
        }
        if self.recording.take().is_some() {
            match Recording::open(session) {
                Ok(recording) => self.recording = Some(recording),
                Err(error) => self.progress.note(&warning(no_record(&error))),
            }
        }
        self.evaluated = self.evaluated.filter(|evaluated| *evaluated <= step);
        (self.saved, self.owed, self.round_end) = ((step, Instant::now()), false, step);
        self.clock.last_step_end = Instant::now();
        self.progress.note(&format!("went back from step {from} to step {step}; the next sample is {samples}"));
        Ok(true)
    }
}
