//! The last unit of a model of images: the final norm and the scores of classes, with the loss.

use super::norm::Norm;
use crate::Result;
use crate::families::Parameters;
use crate::parameter::ParameterSpec;
use crate::spec::ModelSpec;
use crate::unit::{Forward, Output, Unit, require_input};
use crate::{Batch, ModelError};
use trainyard_autograd::functions::LinearOptions;
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_tensor::ops::plain::Reduction;
use trainyard_tensor::{DType, Tensor};

/// Final norm and classifier, on the rows of class tokens alone. Patches have no loss, so nothing
/// is computed for them.
#[derive(Debug)]
pub struct ClassHead {
    parameters: Vec<ParameterSpec>,
    norm: Norm,
    weight: ParamId,
    bias: Option<ParamId>,
}

impl ClassHead {
    /// The head of `spec` as unit number `unit`.
    pub fn new(spec: &ModelSpec, unit: u32) -> ClassHead {
        let mut parameters = Parameters::new(spec, unit, 0);
        let norm = Norm::new(&mut parameters, "norm");
        let weight = parameters.readout("class.weight", [spec.vocab_size, spec.dim]);
        let bias = parameters.bias(true, "class.bias", spec.vocab_size);
        ClassHead { parameters: parameters.finish(), norm, weight, bias }
    }

    /// `scale` times the sum of the images' losses. A mixed image has two classes, whose losses
    /// count by their weights (Zhang et al. 2018, Yun et al. 2019).
    fn loss(&self, tape: &mut Tape<'_>, batch: &Batch, logits: &Var, scale: f32) -> Result<Var> {
        let images = batch.images.as_ref().ok_or_else(no_images)?;
        let classes = images.classes.as_ref().ok_or_else(|| ModelError::Batch("a loss needs classes".into()))?;
        let sum = match &images.mixed {
            None => tape.cross_entropy(logits, classes, Reduction::Sum)?,
            Some(mixed) => {
                let logits = tape.cast(logits, DType::F32)?;
                let log_probabilities = tape.log_softmax(&logits)?;
                let of_pair = tape.gather(&log_probabilities, &mixed.pairs)?;
                let weights = tape.constant(mixed.weights.clone());
                let weighted = tape.mul(&of_pair, &weights)?;
                let sum = tape.sum(&weighted, ..)?;
                return Ok(tape.scale(&sum, -scale)?);
            }
        };
        Ok(tape.scale(&sum, scale)?)
    }
}

impl Unit for ClassHead {
    fn name(&self) -> &str {
        "head"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var> {
        let x = require_input("head", input)?;
        let images = cx.batch.images.as_ref().ok_or_else(no_images)?;
        let rows = tape.index_select(x, 0, &images.rows)?;
        let h = self.norm.forward(tape, &rows)?;
        if cx.output == Output::Hidden {
            return Ok(h);
        }
        let options = LinearOptions { bias: self.bias, ..LinearOptions::default() };
        let logits = tape.linear(&h, self.weight, options)?;
        match cx.output {
            Output::Loss { scale } => {
                if let (Some(hits), Some(classes)) = (cx.hits.as_deref_mut(), &images.classes) {
                    hits.add(logits.tensor(), classes)?;
                }
                self.loss(tape, cx.batch, &logits, scale)
            }
            _ => Ok(logits),
        }
    }
}

fn no_images() -> ModelError {
    ModelError::Batch("a model of images takes patches, and this batch has tokens".into())
}

/// The number of images whose class is among the highest scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Images that have a class.
    pub counted: u64,
    /// Those whose class has the highest score.
    pub top1: u64,
    /// Those whose class is among the five highest scores.
    pub top5: u64,
}

impl Hits {
    /// Adds the images with logits [n, v] of `classes`, i32 [n]. Of equal scores the lower class
    /// comes first. A device without data adds nothing.
    ///
    /// # Errors
    /// Refusals of the device.
    pub fn add(&mut self, logits: &Tensor, classes: &Tensor) -> Result<()> {
        if logits.device().is_meta() {
            return Ok(());
        }
        let (scores, classes, width) = (logits.to_f32_vec()?, classes.to_vec::<i32>()?, logits.last_dim());
        for (row, class) in scores.chunks_exact(width).zip(classes) {
            let Ok(class) = usize::try_from(class) else { continue };
            let own = row[class];
            // A score that is no number is above nothing, so an image that has one is no hit.
            let above =
                row.iter().enumerate().filter(|(other, score)| !(**score < own || (**score == own && *other >= class)));
            let above = above.count();
            self.counted += 1;
            self.top1 += u64::from(above == 0);
            self.top5 += u64::from(above < 5);
        }
        Ok(())
    }
}
