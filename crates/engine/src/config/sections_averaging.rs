//! `[averaging]`: an average of the weights over the steps.

use super::section::section;
use super::value::choices;

choices! {
    /// An average of the weights over the steps.
    AveragingKind {
        /// None is kept.
        Off = "off",
        /// Exponential: after an update the average moves by 1 - decay of the way to the weights
        /// (EMA; Polyak & Juditsky 1992).
        Ema = "ema",
        /// The mean of the weights after all updates that count (SWA; Izmailov et al. 2018).
        Uniform = "uniform",
    }
}

section! {
    /// An average of the weights over the steps, kept beside them during training. It often has the
    /// lower loss of weights at a lower learning rate. It takes 4 bytes per trained parameter,
    /// sharded like the optimizer's state. `eval`, `generate` and `export` use it with
    /// `--averaged`. See docs/training.md.
    AveragingSection = "averaging" {
        /// The kind.
        #[elsewhere("ema", "use_ema", "model_ema", "swa", "use_swa")]
        kind: AveragingKind = AveragingKind::Off;
        /// ema: the share of the old average in the new one. It remembers about 1 / (1 - decay)
        /// updates. Unset: 0.999.
        #[elsewhere("ema_decay", "ema_momentum", "model_ema_decay", "ema_beta")]
        decay: Option<f64> = None;
        /// ema: the n-th weights, from 0, are taken with min(decay, (1 + n) / (10 + n)), so that
        /// the first ones fade soon. Unset: true.
        #[elsewhere("model_ema_warmup", "ema_warmup")]
        decay_warmup: Option<bool> = None;
        /// The update from which on weights are averaged. Skipped steps do not count. Unset: 1.
        #[elsewhere("swa_start", "swa_start_step", "ema_start", "update_starting_at_step", "start_iter")]
        start_step: Option<u64> = None;
        /// Updates from one whose weights are averaged to the next. Unset: 1.
        #[elsewhere("swa_every", "swa_freq", "update_every_n_steps", "every_n_steps", "ema_interval")]
        interval_steps: Option<u64> = None;
        /// Every evaluation computes the loss of the average too, in as much time again. Early
        /// stopping and the best checkpoint go by the loss of the weights. Unset: true.
        #[elsewhere("eval_with_ema")]
        evaluate: Option<bool> = None;
    }
}
