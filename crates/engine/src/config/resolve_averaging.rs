//! Resolves `[averaging]`.

use super::DeviceKind;
use super::resolve::{Limits, Resolver};
use super::sections_averaging::*;
use super::sections_parallel::UpdateRule;
use crate::averaging::{Averaging, AveragingRule};

impl Resolver {
    /// Resolves `[averaging]`; None if no average is kept.
    pub(super) fn averaging(&mut self) -> Option<Averaging> {
        let section = self.config.averaging.clone();
        let AveragingSection { kind, decay, decay_warmup, start_step, interval_steps, evaluate } = section;
        if kind == AveragingKind::Off {
            let because = "averaging.kind is \"off\"";
            self.unused("averaging.start_step", &start_step, because);
            self.unused("averaging.interval_steps", &interval_steps, because);
            self.unused("averaging.evaluate", &evaluate, because);
        }
        let rule = if kind == AveragingKind::Ema {
            let decay = self.settle("averaging.decay", &decay, 0.999, "the usual");
            self.within("averaging.decay", decay, 0.0, 1.0 - f64::EPSILON / 2.0);
            let warmup = self.settle("averaging.decay_warmup", &decay_warmup, true, "the first weights fade soon");
            AveragingRule::Exponential { decay, warmup }
        } else {
            let because = "it belongs to averaging.kind = \"ema\"";
            self.unused("averaging.decay", &decay, because);
            self.unused("averaging.decay_warmup", &decay_warmup, because);
            AveragingRule::Uniform
        };
        if kind == AveragingKind::Off {
            return None;
        }
        let start = self.settle("averaging.start_step", &start_step, 1, "from the beginning");
        let interval = self.settle("averaging.interval_steps", &interval_steps, 1, "after every update");
        self.count("averaging.start_step", Some(start), 1, u64::MAX);
        self.count("averaging.interval_steps", Some(interval), 1, u64::MAX);
        self.settle("averaging.evaluate", &evaluate, true, "an average is kept");
        if matches!(self.config.compute.device, DeviceKind::Cuda(_)) {
            let message = "weights are averaged on processors only: with compute.device = \"cuda\" set averaging.kind to \"off\", and \
                           merge checkpoints with `trainyard merge` instead";
            self.problem("averaging.kind", message);
        }
        if self.config.update.rule != UpdateRule::Synchronous {
            let message = format!(
                "averaging.kind averages one set of weights, and with update.rule = \"{}\" ranks have different ones: use \
                 update.rule = \"synchronous\", or set averaging.kind to \"off\"",
                self.config.update.rule
            );
            self.problem("averaging.kind", message);
        }
        // Problems were reported; nothing divides by an interval of 0.
        Some(Averaging { rule, start: start.max(1), interval: interval.max(1) })
    }

    /// Checks that an average begins before the end of the run.
    pub(super) fn averaging_extent(&mut self, averaging: Option<Averaging>, limits: Limits) {
        let (Some(Averaging { start, .. }), Some(steps)) = (averaging, limits.steps) else { return };
        if start > steps {
            let message = format!(
                "averaging.start_step = {start}, and the run ends after {steps} steps: nothing would be averaged; begin earlier"
            );
            self.problem("averaging.start_step", message);
        }
    }
}
