//! Evaluation during a training: of the weights, and of their average if one is kept.

use super::{Run, report};
use crate::Result;
use crate::evaluate::{Evaluation, EvaluationSettings, evaluate_until};
use crate::images::evaluate_images_until;
use crate::metrics::EvaluationMetrics;
use std::time::Instant;

impl Run<'_> {
    /// Evaluates on the validation data. Returns false if it was interrupted.
    pub(super) fn evaluate(&mut self) -> Result<bool> {
        let began = Instant::now();
        let averaged = self.evaluates_averages();
        let weights = self.evaluate_common()?;
        let average = match weights {
            Some(_) if averaged => {
                self.session.rank.swap_averages()?;
                let average = self.evaluate_weights();
                self.session.rank.swap_averages()?;
                average?
            }
            _ => None,
        };
        let (Some(weights), true) = (weights, averaged == average.is_some()) else {
            self.progress.note("the evaluation was left off");
            return Ok(false);
        };
        let Evaluation { loss_sum, targets, text_bytes, texts, hits } = weights;
        let step = self.session.state.step;
        let metrics = EvaluationMetrics::new(step, loss_sum, targets, text_bytes, began.elapsed().as_secs_f64())
            .with_texts(&self.session.validation_names, &texts)
            .with_average(average.as_ref().map(Evaluation::loss))
            .with_accuracy(hits);
        if let Some(recorder) = &mut self.recorder {
            recorder.evaluation(&metrics)?;
        }
        self.progress.evaluation(&metrics);
        if self.evaluation_due() {
            let min_delta = self.session.resolved.config.evaluation.early_stopping_min_delta.unwrap_or(0.0);
            self.session.state.early_stopping.count(step, metrics.loss, min_delta);
        }
        if self.saved.0 == step {
            report(self.writer.evaluated(step, metrics.loss)?, self.progress);
        }
        self.evaluation = Some(metrics);
        self.evaluated = Some(step);
        // The evaluation does not count as time of the next step.
        self.clock.last_step_end = Instant::now();
        Ok(true)
    }

    /// True if evaluations compute the loss of the average of the weights too. It must have taken
    /// some.
    fn evaluates_averages(&self) -> bool {
        let asked = self.session.resolved.config.averaging.evaluate.unwrap_or(false);
        asked && self.session.state.averaged > 0
    }

    /// Evaluates the weights that all replicas have alike: those of the last outer step, where
    /// replicas train apart and differ now; None if it was interrupted.
    fn evaluate_common(&mut self) -> Result<Option<Evaluation>> {
        if !self.session.rank.is_in_round() {
            return self.evaluate_weights();
        }
        self.session.rank.swap_common()?;
        let weights = self.evaluate_weights();
        self.session.rank.swap_common()?;
        weights
    }

    /// Evaluates the weights that the rank computes with now; None if it was interrupted.
    fn evaluate_weights(&mut self) -> Result<Option<Evaluation>> {
        let session = &*self.session;
        let config = &session.resolved.config;
        let settings = EvaluationSettings {
            sequence_length: session.resolved.sequence_length,
            // As many tokens as a rank has in a step, and a sequence at least: ranks of a
            // context-parallel group evaluate whole sequences.
            rows: (session.resolved.batch.micro / session.resolved.parallel.context).max(1),
            respect_document_boundaries: config.data.respect_document_boundaries,
            tokens_max: config.evaluation.tokens_max,
            spans: session.dataset.span_corruption(),
        };
        let (control, progress) = (self.control, &mut *self.progress);
        // Rank 0 decides whether to stop.
        let mut stops = |done| {
            progress.evaluating(done);
            let mut word = [u64::from(control.is_asked_to_stop(&session.world))];
            session.world.broadcast(&mut word, 0)?;
            Ok(word[0] == 1)
        };
        match &session.tokenizer {
            Some(tokenizer) => evaluate_until(&session.rank, &session.validation, tokenizer, settings, &mut stops),
            None => evaluate_images_until(&session.rank, &session.held_back, settings.rows, &mut stops),
        }
    }
}
