//! Resolves `[pruning]`.

use super::resolve::{Limits, Resolver};
use super::sections_pruning::*;
use crate::averaging::Averaging;
use crate::constraints::Pruning;
use trainyard_tensor::sparsity::Pattern;

impl Resolver {
    /// Resolves `[pruning]`; None if no weight becomes zero.
    pub(super) fn pruning(&mut self, limits: Limits, averaging: Option<Averaging>) -> Option<Pruning> {
        let PruningSection { sparsity, pattern, begin, end, interval_steps } = self.config.pruning.clone();
        let (key, pattern) = match (sparsity, pattern) {
            (None, None) => {
                let because = "pruning.sparsity and pruning.pattern are unset";
                self.unused("pruning.begin", &begin, because);
                self.unused("pruning.end", &end, because);
                self.unused("pruning.interval_steps", &interval_steps, because);
                return None;
            }
            (Some(share), text) => {
                let because = "pruning.sparsity says how many weights become zero";
                self.unused("pruning.pattern", &text, because);
                ("pruning.sparsity", Pattern::share(share))
            }
            (None, Some(text)) => ("pruning.pattern", text.parse()),
        };
        let begin = self.settle("pruning.begin", &begin, 0.1, "the first weights have settled");
        let end = self.settle("pruning.end", &end, 0.6, "the weights that are left make up for the others");
        self.within("pruning.begin", begin, 0.0, 1.0);
        self.within("pruning.end", end, 0.0, 1.0);
        if begin > end {
            self.problem("pruning.end", format!("pruning.end = {end} is before pruning.begin = {begin}"));
        }
        let Some(steps) = limits.steps else {
            let message = format!(
                "{key} needs the number of steps, of which pruning.begin and pruning.end are shares: set training.steps"
            );
            self.problem(key, message);
            return None;
        };
        let usual = (steps / 100).max(1);
        let interval = self.settle("pruning.interval_steps", &interval_steps, usual, "a hundredth of the steps");
        self.count("pruning.interval_steps", Some(interval), 1, u64::MAX);
        self.on_processors_only(key, "weights are pruned in training");
        if averaging.is_some() {
            let message = format!(
                "{key} keeps weights at zero, and an average over earlier steps is not zero: set averaging.kind = \"off\""
            );
            self.problem(key, message);
        }
        let at = |share: f64| (share * steps as f64).round() as u64;
        match pattern {
            Ok(pattern) => {
                let end = at(end).clamp(1, steps.max(1));
                Some(Pruning { pattern, begin: at(begin).min(end), end, interval: interval.max(1) })
            }
            Err(error) => {
                self.problem(key, format!("{key}: {error}"));
                None
            }
        }
    }
}
