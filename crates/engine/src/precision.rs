//! Dynamic loss scaling for f16 (Micikevicius et al. 2018).
//!
//! The loss is multiplied by a power of two before backward so that small gradients do not vanish
//! in f16; updates divide it out. A step whose gradients overflow is skipped and the scale halved;
//! after `window` good steps in a row it is doubled.

use serde::{Deserialize, Serialize};

/// The scale and its history; part of a checkpoint.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct LossScaler {
    scale: f64,
    /// Good steps between doublings; None: the scale is fixed at 1.
    window: Option<u64>,
    good_steps: u64,
}

impl LossScaler {
    /// No scaling, for f32 and bf16.
    pub fn none() -> LossScaler {
        LossScaler { scale: 1.0, window: None, good_steps: 0 }
    }

    /// Starts at `initial`, doubled after `window` good steps.
    pub fn dynamic(initial: f64, window: u64) -> LossScaler {
        LossScaler { scale: initial, window: Some(window), good_steps: 0 }
    }

    /// The current factor of the loss.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The scaler of a resumed run with `settings`. If both are dynamic, it keeps this scaler's
    /// scale and takes the window of `settings`. Otherwise the precision was changed, and it is
    /// `settings`.
    pub fn continued(self, settings: LossScaler) -> LossScaler {
        match (self.window, settings.window) {
            (Some(_), Some(_)) => LossScaler { window: settings.window, ..self },
            _ => settings,
        }
    }

    /// True if an overflow lowers the scale, and so is no sign of divergence by itself.
    pub fn is_dynamic(&self) -> bool {
        self.window.is_some() && self.scale > 1.0
    }

    /// Adjusts the scale after a step. `finite`: the step's gradients were finite.
    pub fn update(&mut self, finite: bool) {
        let Some(window) = self.window else { return };
        if !finite {
            self.scale = (self.scale / 2.0).max(1.0);
            self.good_steps = 0;
        } else {
            self.good_steps += 1;
            if self.good_steps >= window {
                // 2^24: beyond it the smallest normal f16 would already be a loss of over 1000.
                self.scale = (self.scale * 2.0).min(16_777_216.0);
                self.good_steps = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_goes_on_in_f16_after_bf16_scales_its_loss() {
        let fresh = LossScaler::dynamic(65536.0, 1000);
        assert_eq!(LossScaler::none().continued(fresh), fresh);
        assert_eq!(fresh.continued(LossScaler::none()), LossScaler::none());
        let mut found = fresh;
        found.update(false);
        assert_eq!(found.continued(fresh).scale(), 32768.0);
        assert_eq!(found.continued(LossScaler::dynamic(65536.0, 1)), LossScaler { window: Some(1), ..found });
    }

    #[test]
    fn the_scale_halves_on_overflow_and_doubles_after_the_window() {
        let mut scaler = LossScaler::dynamic(1024.0, 3);
        scaler.update(false);
        assert_eq!(scaler.scale(), 512.0);
        for expected in [512.0, 512.0, 1024.0, 1024.0] {
            scaler.update(true);
            assert_eq!(scaler.scale(), expected);
        }
        for _ in 0..40 {
            scaler.update(false);
        }
        assert_eq!(scaler.scale(), 1.0);
        assert!(!scaler.is_dynamic());
        let mut fixed = LossScaler::none();
        fixed.update(false);
        assert_eq!(fixed.scale(), 1.0);
    }
}
