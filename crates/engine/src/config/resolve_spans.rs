//! Resolves span corruption, and refuses what does not go with a model that has an encoder.

use super::error::Origin;
use super::resolve::{Inputs, Resolver, usual_sequence_length};
use super::resolve_parallel::Parallel;
use super::sections::*;
use super::sections_chat::DataFormat;
use serde::Serialize;
use trainyard_data::{SpanLengths, SpanShape};
use trainyard_model::families::{self, Input};

/// The length of sequences of a model with an encoder, unless another is asked for: that of the
/// published pre-training, 512 positions of the encoder and 114 of the decoder.
pub const PAIRED_LENGTH: usize = 626;

/// The span corruption of a run.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct SpanSettings {
    /// The share of tokens, and the mean length of spans.
    pub shape: SpanShape,
    /// The lengths of a sequence.
    pub lengths: SpanLengths,
    /// True if an encoder reads the text and a decoder says the spans.
    pub paired: bool,
}

impl Resolver {
    /// Span corruption, if the run has it: that of every model with an encoder, and of others where
    /// it is asked for.
    pub(super) fn spans(&mut self, inputs: &Inputs) -> Option<SpanSettings> {
        let family = self.config.model.family.unwrap_or(families::LLAMA);
        let paired = match (&self.config.model.path, &inputs.pretrained) {
            (None, _) => family.form().input == Input::Pairs,
            (Some(_), pretrained) => pretrained.as_ref().is_some_and(|pretrained| pretrained.paired),
        };
        let data = self.config.data.clone();
        let rate = match data.span_corruption_rate {
            None if !paired => {
                self.unused("data.span_length", &data.span_length, "there is no data.span_corruption_rate");
                return None;
            }
            given => self.settle("data.span_corruption_rate", &given, SpanShape::T5.rate, "the usual for an encoder"),
        };
        self.within("data.span_corruption_rate", rate, 0.001, 0.999);
        let mean_length = self.settle("data.span_length", &data.span_length, SpanShape::T5.mean_length, "the usual");
        self.within("data.span_length", mean_length, 1.0, 1e6);
        self.alone(&data);
        let longest = match &inputs.pretrained {
            Some(pretrained) => Some(pretrained.max_sequence_length),
            None => self.config.model.max_sequence_length,
        };
        let key = "training.sequence_length";
        let usual = longest.map_or(PAIRED_LENGTH, |longest| longest.min(PAIRED_LENGTH));
        let length = match self.config.training.sequence_length {
            None if paired => self.settle(key, &None, usual, "the usual for an encoder and a decoder"),
            None => usual_sequence_length(longest.unwrap_or(PAIRED_LENGTH)),
            Some(given) => given,
        };
        let shape = SpanShape { rate, mean_length };
        let Some(lengths) = shape.lengths(length) else {
            let message = format!("{key} = {length} has no room for a text with a span taken out; make it longer");
            self.problem(key, message);
            return None;
        };
        Some(SpanSettings { shape, lengths, paired })
    }

    /// Reports the keys that do not go with span corruption.
    fn alone(&mut self, data: &DataSection) {
        let because = "data.span_corruption_rate makes every sequence of one stretch of text";
        let asked = |key: &str| self.config.origin(key) != Origin::Default;
        let boundaries = asked("data.respect_document_boundaries") && data.respect_document_boundaries;
        self.unused("data.respect_document_boundaries", &boundaries.then_some(()), because);
        self.fill("data.respect_document_boundaries", &false, because);
        self.unused("data.fim_rate", &(data.fim_rate > 0.0).then_some(()), because);
        self.unused("data.token_noise", &(data.token_noise > 0.0).then_some(()), because);
        self.unused("data.curriculum_start", &data.curriculum_start, because);
        if data.sampling == Sampling::BestFit {
            self.problem("data.sampling", format!("data.sampling = \"best_fit\": {because}; take packed or random"));
        }
        if data.format == DataFormat::Chat {
            self.problem("data.format", format!("data.format = \"chat\": {because}; leave one of them out"));
        }
    }

    /// Rejects what a model with an encoder does not have.
    pub(super) fn paired_divisions(&mut self, parallel: &Parallel) {
        for (key, degree) in [
            ("parallel.tensor_parallel_degree", parallel.tensor),
            ("parallel.context_parallel_degree", parallel.context),
        ] {
            if degree > 1 {
                let message = format!(
                    "{key} = {degree}: a model with an encoder is not divided so; use data ranks, parallel.zero_stage or \
                     parallel.pipeline_parallel_degree"
                );
                self.problem(key, message);
            }
        }
        let teacher = self.config.distillation.teacher.clone();
        self.unused("distillation.teacher", &teacher, "a model with an encoder learns from its text alone");
    }

    /// The encoder's blocks of a shape.
    pub(super) fn encoder_layers(&mut self, family: families::Family, layers: usize) -> Option<usize> {
        let given = self.config.model.encoder_layers;
        if family.form().input != Input::Pairs {
            self.unused("model.encoder_layers", &given, &format!("family {family} has no encoder; t5 has one"));
            return None;
        }
        let encoder = self.settle("model.encoder_layers", &given, (layers / 2).max(1), "half of model.layers");
        if !(1..layers).contains(&encoder) {
            let message = format!(
                "model.encoder_layers = {encoder} of model.layers = {layers}: the encoder and the decoder need a block \
                 each"
            );
            self.problem("model.encoder_layers", message);
        }
        Some(encoder)
    }
}
