//! Turns `config.json` into a [`ModelSpec`].
//!
//! Absent keys take the defaults of transformers' configuration classes, on which published files
//! rely.

use super::{ConfigError, Keys};
use crate::families::Family;
use crate::spec::ModelSpec;
use crate::weights::PackedFormat;
use serde_json::Value;

/// A translated configuration.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The model.
    pub spec: ModelSpec,
    /// Notes for the user: keys that were not used.
    pub notes: Vec<String>,
    /// The form of the matrices of its blocks, if they have few bits.
    pub packed: Option<PackedFormat>,
}

/// Translates the text of a `config.json`.
pub fn from_config_json(text: &str) -> Result<Imported, ConfigError> {
    let mut keys = Keys::of(text)?;
    let model_type = keys.text("model_type")?.ok_or(ConfigError::Missing { key: "model_type" })?;
    let Some(family) = Family::of_model_type(&model_type) else {
        return Err(ConfigError::ModelType { found: model_type });
    };
    let mut spec = family.read_config(&mut keys, &model_type)?;
    keys.special_tokens(&mut spec)?;
    let packed = keys.take("quantization_config").filter(|value| !value.is_null());
    let packed = packed.as_ref().map(PackedFormat::of_config).transpose()?;
    if spec.encoder.is_some() {
        keys.take("is_encoder_decoder");
    }
    keys.refuse("add_cross_attention", &[Value::Bool(false)], "decoders without an encoder only")?;
    keys.refuse("is_encoder_decoder", &[Value::Bool(false)], "decoders without an encoder only")?;
    keys.refuse("tie_encoder_decoder", &[Value::Bool(false)], "decoders without an encoder only")?;
    let mut notes = keys.finish();
    notes.extend(packed.map(|format| {
        format!(
            "the matrices of its blocks have {} bits (compressed-tensors) and are decoded when they are read{}",
            format.bits,
            if format.codes_inputs {
                "; evaluation and generation round their inputs to 8 bits, training does not"
            } else {
                ""
            }
        )
    }));
    spec.validate().map_err(|error| ConfigError::Invalid(Box::new(error)))?;
    spec.model_type = super::export::usual(&spec).is_none_or(|usual| usual != model_type).then_some(model_type);
    Ok(Imported { spec, notes, packed })
}
