//! Resolves `[consolidation]`.

use super::DeviceKind;
use super::resolve::Resolver;
use super::sections_consolidation::*;
use super::sections_parallel::UpdateRule;
use crate::consolidation::Consolidation;

impl Resolver {
    /// Resolves `[consolidation]`; None if there is no penalty.
    pub(super) fn consolidation(&mut self) -> Option<Consolidation> {
        let ConsolidationSection { from, weight } = self.config.consolidation.clone();
        if from.is_none() {
            self.unused("consolidation.weight", &weight, "consolidation.from is unset");
            return None;
        }
        self.path_exists("consolidation.from", from.as_ref());
        let weight =
            self.settle("consolidation.weight", &weight, 1.0, "a token of the old text counts as one of the new");
        self.within("consolidation.weight", weight, 0.0, 1e12);
        if matches!(self.config.compute.device, DeviceKind::Cuda(_)) {
            let message = "weights are consolidated on processors only: with compute.device = \"cuda\" remove \
                           consolidation.from, and mix old text into data.train instead";
            self.problem("consolidation.from", message);
        }
        if self.config.update.rule != UpdateRule::Synchronous {
            let message = format!(
                "consolidation.from holds one set of weights, and with update.rule = \"{}\" ranks have different ones: use \
                 update.rule = \"synchronous\", or remove consolidation.from",
                self.config.update.rule
            );
            self.problem("consolidation.from", message);
        }
        Some(Consolidation { weight })
    }
}
