//! Resolves `[quantization]`.

use super::resolve::{Limits, Resolver};
use super::sections_fine_tuning::AdapterMethod;
use super::sections_parallel::UpdateRule;
use super::sections_precision::{Fp8Recipe, Int8Recipe};
use super::sections_quantization::*;
use super::{DeviceKind, OffloadTier};
use trainyard_model::weights::{PACKED_BITS, PackedFormat};

impl Resolver {
    /// Resolves `[quantization]`: the grid, and the first update whose result is rounded; None if
    /// weights are not rounded.
    pub(super) fn quantization(&mut self, limits: Limits) -> Option<(PackedFormat, u64)> {
        let QuantizationSection { aware, group, begin } = self.config.quantization.clone();
        let Some(bits) = aware else {
            self.unused("quantization.group", &group, "quantization.aware is unset");
            self.unused("quantization.begin", &begin, "quantization.aware is unset");
            return None;
        };
        let begin = begin.unwrap_or(0.0);
        self.within("quantization.begin", begin, 0.0, 1.0);
        let begin = match limits.steps {
            Some(steps) => (begin * steps as f64).round() as u64,
            None if begin > 0.0 => {
                let message = "quantization.begin is a share of the steps: set training.steps";
                self.problem("quantization.begin", message);
                0
            }
            None => 0,
        };
        if !PACKED_BITS.contains(&bits) {
            let message = format!("quantization.aware = {bits}: weights have 2, 3, 4 or 8 bits");
            self.problem("quantization.aware", message);
            return None;
        }
        let group = self.settle("quantization.group", &group, 128, "as `trainyard quantize` has it");
        self.on_processors_only("quantization.aware", "weights are rounded in training");
        let precision = &self.config.precision;
        let rounds = [("fp8", precision.fp8 != Fp8Recipe::Off), ("int8", precision.int8 != Int8Recipe::Off)];
        for (recipe, _) in rounds.into_iter().filter(|(_, rounds)| *rounds) {
            let message = format!(
                "quantization.aware rounds weights to a grid, and precision.{recipe} would round them once more: set \
                 precision.{recipe} = \"off\""
            );
            self.problem("quantization.aware", message);
        }
        Some((PackedFormat { bits, group: Some(group).filter(|group| *group > 0), codes_inputs: false }, begin))
    }

    /// Refuses what constraints on weights during training do not go with. `what` says in words
    /// what `key` asks for.
    pub(super) fn on_processors_only(&mut self, key: &str, what: &str) {
        if matches!(self.config.compute.device, DeviceKind::Cuda(_)) {
            self.problem(key, format!("{what} on processors only: set compute.device = \"cpu\", or remove {key}"));
        }
        if self.config.offload.optimizer == OffloadTier::Host {
            let message = format!(
                "{what} where the device updates them: set memory.offload.optimizer to another tier than \"host\", or remove {key}"
            );
            self.problem(key, message);
        }
        if self.config.fine_tuning.adapter != AdapterMethod::None {
            let message = format!(
                "{what}, and with fine_tuning.adapter = \"{}\" they are frozen: set fine_tuning.adapter = \"none\", or remove {key}",
                self.config.fine_tuning.adapter
            );
            self.problem(key, message);
        }
        if self.config.update.rule != UpdateRule::Synchronous {
            let message = format!(
                "{what} in one set of weights, and with update.rule = \"{}\" every replica has its own: use update.rule = \
                 \"synchronous\", or remove {key}",
                self.config.update.rule
            );
            self.problem(key, message);
        }
    }
}
