//! Resolves `[tokenizer]`, `[data]` and `[evaluation]`: the training corpora and the validation
//! text.

use super::error::Origin;
use super::resolve::{Inputs, Resolver};
use super::sections::*;
use super::sections_chat::{DataFormat, LossOnPart};
use super::value::Source;
use crate::corpora::{CHATML_NAME, expanded, held_back_part, prepared_fraction, source_exists, token_source};
use trainyard_data::indexed::mask_path;
use trainyard_data::prepare::VALIDATION_FRACTION;

impl Resolver {
    /// Resolves `[tokenizer]`.
    pub(super) fn tokenizer(&mut self) {
        let TokenizerSection { path, kind, vocab_size, add_bos } = self.config.tokenizer.clone();
        let from = match (&path, &self.config.model.path) {
            (Some(_), _) => Some("tokenizer.path already names a tokenizer"),
            (None, Some(from)) if crate::pretrained::brings_tokenizer(from) => Some("model.path brings its tokenizer"),
            // Token files may still have a tokenizer beside them.
            (None, Some(_)) if kind.is_none() => Some("model.path has no tokenizer, and tokenizer.kind is unset"),
            (None, _) => None,
        };
        if let Some(from) = from {
            self.unused("tokenizer.kind", &kind, from);
            return self.unused("tokenizer.vocab_size", &vocab_size, from);
        }
        self.unused("tokenizer.add_bos", &add_bos, "a tokenizer that is made here has no beginning-of-text token");
        let kind = self.settle("tokenizer.kind", &kind, TokenizerKind::Bpe, "no tokenizer.path is given");
        if kind != TokenizerKind::Bpe {
            return self.unused("tokenizer.vocab_size", &vocab_size, "only bpe is trained to a size");
        }
        let size = self.settle("tokenizer.vocab_size", &vocab_size, 8192, "the usual for small corpora");
        // Byte-level: every byte is a token, and one more ends a document.
        self.count("tokenizer.vocab_size", Some(size as u64), 257, 1 << 24);
    }

    /// Resolves `[data]`. Returns true if there is validation data.
    pub(super) fn data(&mut self, inputs: &Inputs) -> bool {
        let data = self.config.data.clone();
        if data.train.0.is_empty() && !inputs.batches_supplied {
            self.problem("data.train", "data.train is empty: name a file or a folder to train on");
        }
        let given = [("data.train", Some(&data.train)), ("data.validation", data.validation.as_ref())];
        for (key, sources) in given.into_iter().filter_map(|(key, sources)| Some((key, &sources?.0))) {
            let weighted = sources.iter().filter(|source| source.weight.is_some()).count();
            if weighted != 0 && weighted != sources.len() {
                self.problem(key, format!("{key} has weights for some entries only; give all of them one, or none"));
            }
            for source in sources {
                if let Some(weight) = source.weight.filter(|weight| *weight <= 0.0) {
                    let message = format!("{key}: the weight {weight} of {} must be above 0", source.path.display());
                    self.problem(key, message);
                }
                if !source_exists(&source.path) {
                    self.path_exists(key, Some(&source.path));
                }
            }
        }
        let validation = match &data.validation {
            Some(sources) => {
                self.unused("data.validation_fraction", &data.validation_fraction, "data.validation is given");
                if sources.0.iter().any(|source| source.weight.is_some()) {
                    let message = "data.validation gives a weight, which has no effect: every token of it counts alike; \
                                   give paths alone";
                    self.problem("data.validation", message);
                }
                !sources.0.is_empty()
            }
            None if inputs.batches_supplied => false,
            None => self.held_back(&data),
        };
        let sampling = self.conversations(&data);
        match sampling {
            Sampling::Random => self.unused("data.shuffle", &data.shuffle, "random sampling has no order"),
            Sampling::BestFit => self.unused("data.shuffle", &data.shuffle, "rows of best fit have no order"),
            Sampling::Packed => drop(self.settle("data.shuffle", &data.shuffle, true, "the usual for training")),
        }
        if data.text_field.is_empty() {
            self.problem("data.text_field", "data.text_field is empty: name the field that holds the text");
        }
        self.within("data.fim_rate", data.fim_rate, 0.0, 1.0);
        self.within("data.fim_spm_rate", data.fim_spm_rate, 0.0, 1.0);
        self.within("data.token_noise", data.token_noise, 0.0, 1.0);
        self.count("data.curriculum_start", data.curriculum_start.map(|start| start as u64), 8, 1 << 24);
        self.count("data.curriculum_steps", data.curriculum_steps, 1, 1 << 40);
        match (data.curriculum_start, data.curriculum_steps) {
            (Some(_), None) => {
                self.problem("data.curriculum_steps", "data.curriculum_start needs data.curriculum_steps")
            }
            (None, steps) => self.unused("data.curriculum_steps", &steps, "there is no data.curriculum_start"),
            _ => {}
        }
        self.count("data.workers", Some(data.workers as u64), 1, 256);
        self.count("data.prefetch", Some(data.prefetch as u64), 1, 4096);
        let cache = self.config.run.directory.join("data-cache");
        self.settle("data.cache", &data.cache, cache, "inside run.directory");
        validation
    }

    /// Resolves the keys of conversations. Returns the way in which sequences are cut.
    fn conversations(&mut self, data: &DataSection) -> Sampling {
        if data.format != DataFormat::Chat {
            let because = format!("data.format is \"{}\"", data.format);
            let because = because.as_str();
            self.unused("data.loss_on", &data.loss_on, because);
            self.unused("data.chat_template", &data.chat_template, because);
            let is_masked =
                |source: &Source| token_source(&source.path).is_some_and(|prefix| mask_path(&prefix).is_file());
            if self.config.origin("data.sampling") == Origin::Default && data.train.0.iter().any(is_masked) {
                self.fill("data.sampling", &Sampling::BestFit, "so that conversations stay whole");
                return Sampling::BestFit;
            }
            return data.sampling;
        }
        let because = "what the assistant says, and that it then stops";
        self.settle("data.loss_on", &data.loss_on, LossOnPart::Answers, because);
        if let Some(template) = data.chat_template.as_ref().filter(|name| name.as_os_str() != CHATML_NAME) {
            self.path_exists("data.chat_template", Some(template));
        }
        if data.fim_rate > 0.0 {
            let message = "data.fim_rate moves the tokens of documents, and data.format = \"chat\" says of each whether it \
                           is learned; leave data.fim_rate at 0";
            self.problem("data.fim_rate", message);
        }
        if self.config.origin("data.sampling") != Origin::Default {
            return data.sampling;
        }
        self.fill("data.sampling", &Sampling::BestFit, "so that conversations stay whole");
        Sampling::BestFit
    }

    /// True if a part of `data.train` is held back for validation. Tokens are divided when they are
    /// prepared, text when it is tokenized.
    fn held_back(&mut self, data: &DataSection) -> bool {
        let key = "data.validation_fraction";
        let sources = match expanded(&data.train.0) {
            Ok(sources) => sources,
            Err(error) => {
                // A pattern that matches nothing was reported as a path that does not exist.
                if data.train.0.iter().all(|source| source_exists(&source.path)) {
                    self.problem("data.train", error.to_string());
                }
                return data.validation_fraction != Some(0.0);
            }
        };
        let sources = sources.iter().map(|source| source.path.as_path());
        let (tokens, texts): (Vec<_>, Vec<_>) = sources.partition(|path| token_source(path).is_some());
        let Some(fraction) = data.validation_fraction else {
            if !texts.is_empty() || tokens.is_empty() {
                self.fill(key, &VALIDATION_FRACTION, "no data.validation is given");
                return true;
            }
            return tokens.iter().any(|path| held_back_part(path).is_some());
        };
        self.within(key, fraction, 0.0, 0.5);
        for path in tokens.iter().filter(|_| fraction > 0.0) {
            match prepared_fraction(path) {
                Ok(prepared) if prepared == Some(fraction) => {}
                Ok(prepared) => {
                    let has = match prepared {
                        Some(0.0) | None => "nothing of them is held back".to_owned(),
                        Some(prepared) => format!("{prepared} of them is held back"),
                    };
                    let message = format!(
                        "{key} = {fraction} cannot be had of {}: tokens are divided when they are prepared, and {has}; leave the key unset to validate on \
                         what is held back, set it to 0 for no validation, name other text in data.validation, or run `trainyard data prepare` with \
                         --validation-fraction {fraction}",
                        path.display()
                    );
                    self.problem(key, message);
                }
                Err(error) => self.problem("data.train", error.to_string()),
            }
        }
        fraction > 0.0
    }

    /// Resolves `[evaluation]`; `validation` is true if there is validation data.
    pub(super) fn evaluation(&mut self, validation: bool) {
        let EvaluationSection { interval_steps, tokens_max, early_stopping_patience, early_stopping_min_delta } =
            self.config.evaluation;
        self.count("evaluation.interval_steps", interval_steps, 1, u64::MAX);
        self.count("evaluation.tokens_max", tokens_max, 1, u64::MAX);
        if interval_steps.is_some() && !validation {
            let message =
                "evaluation.interval_steps needs validation data: give data.validation or data.validation_fraction";
            self.problem("evaluation.interval_steps", message);
        }
        let (patience, min_delta) = ("evaluation.early_stopping_patience", "evaluation.early_stopping_min_delta");
        self.count(patience, early_stopping_patience, 1, u64::MAX);
        if early_stopping_patience.is_some() && interval_steps.is_none() {
            let message = format!("{patience} counts evaluations during training: give evaluation.interval_steps");
            self.problem(patience, message);
        }
        if early_stopping_patience.is_none() {
            return self.unused(min_delta, &early_stopping_min_delta, &format!("{patience} is unset"));
        }
        let delta = self.settle(min_delta, &early_stopping_min_delta, 0.0, "any lower loss counts");
        if delta < 0.0 || !delta.is_finite() {
            self.problem(min_delta, format!("{min_delta} = {delta} must not be negative"));
        }
    }
}
