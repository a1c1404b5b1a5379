//! Resolves `[fine_tuning]`.

use super::resolve::{Limits, Resolver};
use super::sections_fine_tuning::*;
use super::value::Names;
use super::{AveragingKind, CompressionCodec, DeviceKind, Fp8Recipe, OffloadTier, UpdateRule};
use crate::periods::patterns;
use crate::shape::{ADAPTER_RANK as RANK, adapter_alpha};
use trainyard_model::Periods;

impl Resolver {
    /// Resolves `[fine_tuning]`.
    pub(super) fn fine_tuning(&mut self) {
        let section = self.config.fine_tuning.clone();
        let FineTuningSection {
            adapter,
            rank,
            alpha,
            rank_stabilised,
            targets,
            from,
            base_dtype,
            freeze,
            train,
            layer_rate_decay,
            freeze_schedule: _,
        } = section;
        self.base(base_dtype, adapter == AdapterMethod::None && freeze.0.is_empty());
        if let Some(decay) = layer_rate_decay {
            self.within("fine_tuning.layer_rate_decay", decay, f64::MIN_POSITIVE, 1.0);
            if adapter != AdapterMethod::None {
                let message = "fine_tuning.layer_rate_decay is for the model's own parameters, which adapters freeze: leave one of them out";
                self.problem("fine_tuning.layer_rate_decay", message);
            }
        }
        if adapter == AdapterMethod::None {
            let because = "fine_tuning.adapter is \"none\"";
            self.unused("fine_tuning.rank", &rank, because);
            self.unused("fine_tuning.alpha", &alpha, because);
            self.unused("fine_tuning.rank_stabilised", &rank_stabilised, because);
            self.unused("fine_tuning.targets", &targets, because);
            self.unused("fine_tuning.from", &from, because);
            let nothing_frozen = !train.0.is_empty() && freeze.0.is_empty();
            self.unused("fine_tuning.train", &nothing_frozen.then_some(()), "nothing is frozen");
        } else {
            let frozen = (!freeze.0.is_empty()).then_some(());
            self.unused("fine_tuning.freeze", &frozen, "adapters freeze the model");
            let rank = self.settle("fine_tuning.rank", &rank, RANK, "the usual width");
            self.count("fine_tuning.rank", Some(rank as u64), 1, 1 << 14);
            let alpha = self.settle("fine_tuning.alpha", &alpha, adapter_alpha(rank), "twice the rank");
            self.positive("fine_tuning.alpha", Some(alpha));
            self.settle("fine_tuning.rank_stabilised", &rank_stabilised, false, "as LoRA was published");
            let everything = Names(Vec::new());
            self.settle("fine_tuning.targets", &targets, everything, "all linear layers of the blocks");
            self.path_exists("fine_tuning.from", from.as_ref());
        }
    }
    /// Checks `fine_tuning.freeze_schedule` for a run that ends after `limits`.
    pub(super) fn freeze_schedule(&mut self, limits: Limits) {
        const KEY: &str = "fine_tuning.freeze_schedule";
        let config = &self.config;
        let schedule = &config.fine_tuning.freeze_schedule.0;
        if schedule.is_empty() {
            return;
        }
        let mut problems = Vec::new();
        for pair in schedule.windows(2) {
            let [before, after] = [&pair[0], &pair[1]].map(|entry| entry.from_step);
            if after <= before {
                problems.push(format!("{KEY}: from_step = {after} follows {before}: entries are in ascending order"));
            }
        }
        let last = schedule.last().map_or(0, |entry| entry.from_step);
        if let Some(steps) = limits.steps.filter(|steps| last >= *steps) {
            problems.push(format!(
                "{KEY}: from_step = {last}, and the run ends after step {}, counted from 0: train longer, or take the \
                 entry out",
                steps.saturating_sub(1)
            ));
        }
        let periods = patterns(config);
        if periods.len() > Periods::MAX {
            problems.push(format!("{KEY} makes {} periods: there may be {}", periods.len(), Periods::MAX));
        }
        if periods.windows(2).all(|pair| pair[0] == pair[1]) {
            problems.push(format!("{KEY} freezes the same in every step: use fine_tuning.freeze for that"));
        }
        let codec = config.compression.gradients;
        let pruned = config.pruning.sparsity.is_some() || config.pruning.pattern.is_some();
        let lacks = [
            (config.update.rule != UpdateRule::Synchronous, "update.rule = \"synchronous\""),
            (
                config.precision.fp8 != Fp8Recipe::Off,
                "precision.fp8 = \"off\", because the scales of gradients come from earlier steps",
            ),
            (
                !matches!(codec, CompressionCodec::None | CompressionCodec::Bf16),
                "compression.gradients = \"bf16\" or \"none\", because others keep what earlier steps left out",
            ),
            (config.averaging.kind != AveragingKind::Off, "averaging.kind = \"off\""),
            (config.quantization.aware.is_some(), "quantization.aware unset, which rounds all weights of blocks"),
            (pruned, "pruning.sparsity and pruning.pattern unset, which change all weights of blocks"),
            (config.consolidation.from.is_some(), "consolidation.from unset"),
        ];
        let lacks: Vec<&str> = lacks.iter().filter(|(asked, _)| *asked).map(|(_, need)| *need).collect();
        if !lacks.is_empty() {
            problems.push(format!("{KEY} needs {}", lacks.join("; ")));
        }
        problems.into_iter().for_each(|problem| self.problem(KEY, problem));
    }

    /// Checks that frozen matrices can lie in memory as `base`.
    fn base(&mut self, base: BaseDtype, nothing_frozen: bool) {
        if base == BaseDtype::Compute {
            return;
        }
        let config = &self.config;
        let lacks = [
            (nothing_frozen, "something frozen: fine_tuning.adapter = \"lora\", or patterns in fine_tuning.freeze"),
            (matches!(config.compute.device, DeviceKind::Cuda(_)), "compute.device = \"cpu\""),
            (config.offload.parameters != OffloadTier::None, "memory.offload.parameters = \"none\""),
            (
                config.compression.parameters != CompressionCodec::None,
                "compression.parameters = \"none\", because the base travels in its codes",
            ),
            (config.update.rule != UpdateRule::Synchronous, "update.rule = \"synchronous\""),
        ];
        let lacks: Vec<&str> = lacks.iter().filter(|(asked, _)| *asked).map(|(_, need)| *need).collect();
        if !lacks.is_empty() {
            let message = format!("fine_tuning.base_dtype = \"{base}\" needs {}", lacks.join("; "));
            self.problem("fine_tuning.base_dtype", message);
        }
    }
}
