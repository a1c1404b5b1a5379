//! Groups of parameters: those that share a weight decay and a factor of the learning rate.

use trainyard_model::{ParameterSpec, Periods};

/// The factors that neighbours must share to be updated by one call.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Group {
    /// Factor of the learning rate.
    rate: f64,
    /// Factor of the weight decay; 0 for what does not decay.
    decay: f64,
    /// The periods of a schedule of freezing in which it rests.
    pub(super) rests_in: Periods,
}

impl Group {
    /// The group of a parameter.
    pub(super) fn of(spec: &ParameterSpec) -> Group {
        let decay = if spec.kind.decays() { spec.decay } else { 0.0 };
        Group { rate: spec.rate, decay, rests_in: spec.rests_in }
    }

    /// The learning rate of the group, where that of the optimizer is `rate`.
    pub(super) fn rate(self, rate: f64) -> f32 {
        (rate * self.rate) as f32
    }

    /// The weight decay of the group, where that of the optimizer is `decay`.
    pub(super) fn weight_decay(self, decay: f64) -> f32 {
        (decay * self.decay) as f32
    }
}
