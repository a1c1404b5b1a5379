//! `[consolidation]`: going on with new text without forgetting the old.

use super::section::section;
use std::path::PathBuf;

section! {
    /// Elastic weight consolidation (Kirkpatrick et al. 2017): a penalty on changes of weights on
    /// which the loss of an earlier run depends. It takes 8 bytes per trained parameter, sharded
    /// like the optimizer's state. See docs/data.md.
    ConsolidationSection = "consolidation" {
        /// The folder of the earlier run, of a model with the same parameters. `trainyard
        /// consolidate` must have been run on it. Unset: no penalty.
        #[elsewhere("fisher_path", "ewc_from")]
        from: Option<PathBuf> = None;
        /// The factor of the penalty; more forgets less and learns less. With 1 it counts like as
        /// many tokens of the old text as of the new, near the weights of the earlier run. Unset:
        /// 1.
        #[elsewhere("ewc_lambda", "ewc_weight", "lambda_ewc", "fisher_multiplier")]
        weight: Option<f64> = None;
    }
}
