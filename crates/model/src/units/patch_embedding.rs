//! The first unit of a model of images: patches to rows of the residual stream.

use crate::families::{Parameters, normal};
use crate::parameter::{Init, ParameterKind, ParameterSpec};
use crate::spec::{ImageSpec, ModelSpec};
use crate::unit::{Forward, Unit};
use crate::{ModelError, Result};
use trainyard_autograd::functions::LinearOptions;
use trainyard_autograd::{ParamId, Tape, Var};

/// The projection of patches, the class token, and learned positions, plus dropout.
///
/// A batch has a row of zeros in the place of each class token ([`ImageBatch`](crate::ImageBatch)),
/// so that one product projects all rows. What a row gets besides is a row of a table of two: the
/// class token, or the bias of the projection.
#[derive(Debug)]
pub struct PatchEmbedding {
    parameters: Vec<ParameterSpec>,
    projection: ParamId,
    class_and_bias: ParamId,
    positions: ParamId,
    dropout: f32,
}

impl PatchEmbedding {
    /// The row of the table for a class token.
    pub const CLASS: i32 = 0;
    /// The row of the table for a patch.
    pub const PATCH: i32 = 1;

    /// The embedding of `spec`, unit 0, of such images.
    pub fn new(spec: &ModelSpec, image: &ImageSpec) -> PatchEmbedding {
        let mut parameters = Parameters::new(spec, 0, 0);
        // Its number of inputs does not grow with the model's width, so muP does not scale it.
        let shape = [spec.dim, image.patch_len()];
        let projection = parameters.add("patches.weight", &shape, normal(spec.init_std), ParameterKind::Matrix);
        // Addends, which do not decay.
        let class_and_bias = parameters.add("class_and_bias.weight", &[2, spec.dim], Init::Zeros, ParameterKind::Bias);
        let positions = parameters.table("positions.weight", spec.max_positions);
        let dropout = spec.dropout as f32;
        PatchEmbedding { parameters: parameters.finish(), projection, class_and_bias, positions, dropout }
    }
}

impl Unit for PatchEmbedding {
    fn name(&self) -> &str {
        "embedding"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, _input: Option<&Var>) -> Result<Var> {
        let missing = || ModelError::Batch("a model of images takes patches, and this batch has tokens".into());
        let images = cx.batch.images.as_ref().ok_or_else(missing)?;
        let positions = Some((&cx.batch.positions, self.positions));
        let added = tape.embedding(&cx.batch.tokens, self.class_and_bias, positions)?;
        let patches = tape.constant(images.patches.clone());
        let patches = tape.cast(&patches, added.tensor().dtype())?;
        let options = LinearOptions { residual: Some(&added), ..LinearOptions::default() };
        let x = tape.linear(&patches, self.projection, options)?;
        Ok(tape.dropout(&x, self.dropout, cx.training)?)
    }
}
