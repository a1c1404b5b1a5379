//! `[pruning]`: weights that become zero during training.

use super::section::section;

section! {
    /// Gradual magnitude pruning (Zhu & Gupta 2017): the smallest weights of the matrices of blocks
    /// become zero during training, more of them every so many updates. A weight that is zero stays
    /// zero. See docs/compression.md.
    PruningSection = "pruning" {
        /// The share of the weights of each matrix that is zero at the end. Unset: none.
        #[elsewhere("final_sparsity", "target_sparsity", "prune_ratio", "pruning_ratio", "pruning_amount")]
        sparsity: Option<f64> = None;
        /// In place of `sparsity`: "2:4" keeps 2 of each 4 neighbours of a row; any N:M up to 64.
        #[elsewhere("sparsity_pattern", "prune_n_m", "mask_pattern", "nm_pattern")]
        pattern: Option<String> = None;
        /// The share of the steps after which pruning begins. Unset: 0.1.
        #[elsewhere("pruning_begin", "begin_step", "initial_prune_step", "prune_warmup")]
        begin: Option<f64> = None;
        /// The share of the steps after which no weight becomes zero any more. Unset: 0.6.
        #[elsewhere("pruning_end", "end_step", "final_prune_step")]
        end: Option<f64> = None;
        /// Updates from one choice of weights to the next. Unset: a hundredth of the steps.
        #[elsewhere("pruning_frequency", "prune_frequency", "pruning_interval", "mask_update_freq")]
        interval_steps: Option<u64> = None;
    }
}
