//! The units of the GPT-2 and Llama families.
//!
//! Both families are one chain: [`Embedding`], [`Block`]s, [`Head`]. They differ in the norm, in
//! the positions, and in the MLP. Each of these is one value inside the unit, chosen when it is
//! built.

mod block;
pub(crate) mod cuts;
mod embedding;
mod head;
mod norm;

pub use block::Block;
pub use embedding::Embedding;
pub use head::Head;

use crate::parameter::{Init, ParameterKind, ParameterSpec};
use crate::spec::{Family, ModelSpec};

/// The prefix of parameter names in Hugging Face files.
pub(crate) fn prefix(spec: &ModelSpec) -> &'static str {
    match spec.family {
        Family::Gpt2 => "transformer.",
        Family::Llama => "model.",
    }
}

fn matrix(spec: &ModelSpec, name: &str, shape: [usize; 2], hf_name: String) -> ParameterSpec {
    let init = Init::Normal { std: spec.init_std as f32 };
    ParameterSpec::new(name, &shape, init, ParameterKind::Matrix, hf_name)
}

fn bias(name: &str, size: usize, hf_name: String) -> ParameterSpec {
    ParameterSpec::new(name, &[size], Init::Zeros, ParameterKind::Bias, hf_name)
}
