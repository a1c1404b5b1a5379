//! Resolves `[distillation]`.

use super::DeviceKind;
use super::resolve::Resolver;
use super::resolve_parallel::Parallel;
use super::sections_distillation::*;

impl Resolver {
    /// Resolves `[distillation]`.
    pub(super) fn distillation(&mut self, parallel: &Parallel) {
        let section = self.config.distillation.clone();
        let DistillationSection { teacher, weight, temperature, divergence, beta, hidden_weight, cache } = section;
        if teacher.is_none() {
            let because = "distillation.teacher is unset";
            self.unused("distillation.weight", &weight, because);
            self.unused("distillation.temperature", &temperature, because);
            self.unused("distillation.divergence", &divergence, because);
            self.unused("distillation.beta", &beta, because);
            self.unused("distillation.cache", &cache, because);
            self.unused("distillation.hidden_weight", &(hidden_weight != 0.0).then_some(()), because);
            return;
        }
        self.path_exists("distillation.teacher", teacher.as_ref());
        let weight = self.settle("distillation.weight", &weight, 0.5, "half of the loss");
        self.within("distillation.weight", weight, f64::MIN_POSITIVE, 1.0);
        let temperature = self.settle("distillation.temperature", &temperature, 1.0, "the distributions as they are");
        self.within("distillation.temperature", temperature, 0.01, 100.0);
        self.within("distillation.hidden_weight", hidden_weight, 0.0, 1e6);
        let usual = DivergenceKind::ForwardKl;
        let divergence = self.settle("distillation.divergence", &divergence, usual, "the usual one");
        if divergence == DivergenceKind::JensenShannon {
            let beta = self.settle("distillation.beta", &beta, 0.5, "both models alike");
            self.within("distillation.beta", beta, 1e-6, 1.0 - 1e-6);
        } else {
            self.unused("distillation.beta", &beta, "distillation.divergence is not \"jensen_shannon\"");
        }
        for (key, degree) in [
            ("parallel.tensor_parallel_degree", parallel.tensor),
            ("parallel.context_parallel_degree", parallel.context),
        ] {
            if degree > 1 {
                let message = format!(
                    "distillation.teacher is set and {key} = {degree}: a teacher needs whole rows of logits; set {key} = 1, \
                     and use parallel.zero_stage or parallel.pipeline_parallel_degree to save memory"
                );
                self.problem("distillation.teacher", message);
            }
        }
        if matches!(self.config.compute.device, DeviceKind::Cuda(_)) {
            let message = "distillation.teacher is set and compute.device = \"cuda\": the loss of a student has no kernel \
                           for GPUs yet; set compute.device = \"cpu\"";
            self.problem("distillation.teacher", message);
        }
    }
}
