//! The normalisation before each half of a block and before the head.

use crate::Result;
use crate::families::{Gains, NormKind, Parameters};
use trainyard_autograd::{ParamId, Tape, Var};

#[derive(Clone, Copy, Debug)]
pub(super) enum Norm {
    Layer { weight: ParamId, bias: Option<ParamId>, eps: f32 },
    Rms { weight: ParamId, eps: f32, gains: Gains },
}

impl Norm {
    /// The norm `name` of the residual stream.
    pub fn new(parameters: &mut Parameters<'_>, name: &str) -> Norm {
        let spec = parameters.spec();
        let weight = parameters.gain(&format!("{name}.weight"), spec.dim);
        let (eps, form) = (spec.norm_eps as f32, spec.family.form());
        match form.norm {
            NormKind::Rms => Norm::Rms { weight, eps, gains: form.gains },
            NormKind::Layer => {
                let bias = parameters.bias(spec.norm_bias, &format!("{name}.bias"), spec.dim);
                Norm::Layer { weight, bias, eps }
            }
        }
    }

    pub fn forward(&self, tape: &mut Tape<'_>, x: &Var) -> Result<Var> {
        Ok(match *self {
            Norm::Layer { weight, bias, eps } => tape.layer_norm(x, weight, bias, eps)?,
            Norm::Rms { weight, eps, gains } => tape.rms_norm_with(x, weight, eps, gains)?,
        })
    }
}
