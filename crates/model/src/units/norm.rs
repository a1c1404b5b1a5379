//! The normalisation before each half of a block and before the head.

use crate::parameter::{Init, ParameterKind, ParameterSpec};
use crate::spec::{Family, ModelSpec};
use crate::unit::Slots;
use crate::{Result, units};
use trainyard_autograd::{ParamId, Tape, Var};

#[derive(Clone, Copy, Debug)]
pub(super) enum Norm {
    Layer { weight: ParamId, bias: Option<ParamId>, eps: f32 },
    Rms { weight: ParamId, eps: f32 },
}

impl Norm {
    /// The norm `name`, called `hf_name` in files.
    pub fn new(spec: &ModelSpec, slots: &mut Slots, name: &str, hf_name: &str) -> Norm {
        let weight = slots.add(ParameterSpec::new(
            &format!("{name}.weight"),
            &[spec.dim],
            Init::Ones,
            ParameterKind::Norm,
            format!("{hf_name}.weight"),
        ));
        let eps = spec.norm_eps as f32;
        match spec.family {
            Family::Llama => Norm::Rms { weight, eps },
            Family::Gpt2 => {
                let bias = spec
                    .norm_bias
                    .then(|| slots.add(units::bias(&format!("{name}.bias"), spec.dim, format!("{hf_name}.bias"))));
                Norm::Layer { weight, bias, eps }
            }
        }
    }

    pub fn forward(&self, tape: &mut Tape<'_>, x: &Var) -> Result<Var> {
        Ok(match *self {
            Norm::Layer { weight, bias, eps } => tape.layer_norm(x, weight, bias, eps)?,
            Norm::Rms { weight, eps } => tape.rms_norm(x, weight, eps)?,
        })
    }
}
