//! The sizes of the outputs of a model's units: one half of a coordinate check (Yang et al. 2022,
//! appendix D.1), which compares them over models of different widths.

use crate::source::{Source, store};
use crate::{Result, error::refuse};
use trainyard_autograd::{Policy, Tape};
use trainyard_model::{Forward, Output};
use trainyard_tensor::cpu::philox::RandomKey;
use trainyard_tensor::{Device, Tensor};

/// The root mean square of the output of each unit, of the last one of its logits, for one sequence
/// of `tokens`.
///
/// # Errors
/// No token, or more than the model has positions for; tokens that it does not have; errors of
/// reading and of the units.
pub fn output_sizes(source: &Source, device: &Device, tokens: &[i32]) -> Result<Vec<(String, f64)>> {
    let model = source.model();
    let positions = source.spec().max_positions;
    if tokens.is_empty() || tokens.len() > positions {
        return refuse(format!("a sequence of {} tokens, and the model takes 1 to {positions}", tokens.len()));
    }
    let batch = model.rows(device, tokens.len(), tokens, None)?;
    let mut hidden: Option<Tensor> = None;
    let mut sizes = Vec::new();
    for (number, unit) in model.units().iter().enumerate() {
        let store = store(device, model, number, &source.unit(number)?, |unit| source.unit(unit))?;
        let mut tape = Tape::new(device, &store, Policy::Nothing, RandomKey::default());
        let input = hidden.take().map(|hidden| tape.constant(hidden));
        let mut forward = Forward::evaluation(&batch, Output::Logits);
        let output = unit.forward(&mut tape, &mut forward, input.as_ref())?.into_tensor();
        sizes.push((unit.name().to_owned(), root_mean_square(&output)?));
        hidden = Some(output);
    }
    Ok(sizes)
}

fn root_mean_square(x: &Tensor) -> Result<f64> {
    let values = x.data::<f32>()?;
    let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    Ok((squares / values.len().max(1) as f64).sqrt())
}
