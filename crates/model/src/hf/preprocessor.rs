//! `preprocessor_config.json`: how pixels become a model's input.

use super::ConfigError;
use super::export::pretty;
use crate::spec::{ImageSpec, ModelSpec};
use serde_json::{Map, Value, json};

/// The text of a `preprocessor_config.json`, by which transformers makes a model's input of an
/// image: the shorter side is resized, the centre cut out, and channels are normalised. None for
/// models of text.
pub fn preprocessor_config_json(spec: &ModelSpec) -> Option<String> {
    let image = spec.image.as_ref()?;
    Some(pretty(json!({
        // The processor of ViT squeezes images to a square; this one cuts their centre out.
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": image.channels == 3,
        "do_resize": true,
        "size": {"shortest_edge": image.resize},
        "resample": BILINEAR,
        "do_center_crop": true,
        "crop_size": {"height": image.size, "width": image.size},
        "do_rescale": true,
        "rescale_factor": 1.0 / 255.0,
        "do_normalize": true,
        "image_mean": image.mean,
        "image_std": image.std,
    })))
}

/// Pillow's number of bilinear interpolation.
const BILINEAR: u64 = 2;

/// Takes the normalisation of `text`, a `preprocessor_config.json`, into `image`. Returns notes on
/// keys that are not followed.
///
/// # Errors
/// It is no JSON object, or asks for pixels of another size or scale than the model has.
pub fn read_preprocessor(text: &str, image: &mut ImageSpec) -> Result<Vec<String>, ConfigError> {
    let map: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| ConfigError::Preprocessor(error.to_string()))?;
    let flag = |key: &str| map.get(key).and_then(Value::as_bool);
    let refuse = |key: &str, why: &str| {
        let value = map.get(key).cloned().unwrap_or_default();
        Err(ConfigError::Preprocessor(format!("`{key}` = {value}: {why}")))
    };
    let mut notes = Vec::new();
    match map.get("rescale_factor").and_then(Value::as_f64) {
        Some(factor) if (factor * 255.0 - 1.0).abs() > 1e-3 => {
            return refuse("rescale_factor", "values of pixels are always divided by 255");
        }
        _ if flag("do_rescale") == Some(false) => return refuse("do_rescale", "pixels are always divided by 255"),
        _ => {}
    }
    let channels = image.channels;
    let list = |key: &str, default: f64| -> Result<Vec<f64>, ConfigError> {
        let wrong = |found: &Value| {
            ConfigError::Preprocessor(format!("`{key}` is {found}, expected a number for each of {channels} channels"))
        };
        match map.get(key) {
            None | Some(Value::Null) => Ok(vec![default; channels]),
            Some(Value::Number(one)) => Ok(vec![one.as_f64().unwrap_or(default); channels]),
            Some(value) => {
                let numbers = value.as_array().map(|list| list.iter().filter_map(Value::as_f64).collect::<Vec<_>>());
                numbers.filter(|numbers| numbers.len() == channels).ok_or_else(|| wrong(value))
            }
        }
    };
    (image.mean, image.std) = match flag("do_normalize") {
        Some(false) => (vec![0.0; channels], vec![1.0; channels]),
        _ => (list("image_mean", 0.5)?, list("image_std", 0.5)?),
    };
    let side = |key: &str| match map.get(key)? {
        Value::Number(side) => side.as_u64(),
        size => ["height", "shortest_edge"].iter().find_map(|key| size.get(key)).and_then(Value::as_u64),
    };
    let crops = flag("do_center_crop") == Some(true);
    let key = if crops { "crop_size" } else { "size" };
    if let Some(side) = side(key).filter(|side| *side != image.size as u64) {
        return refuse(key, &format!("{side} pixels, and config.json has images of {}", image.size));
    }
    image.resize = side("size").filter(|_| crops).map_or(image.size, |side| side as usize);
    if !crops && map.contains_key("size") {
        notes.push(
            "images are not squeezed to a square: their shorter side is resized, and their centre cut out".into(),
        );
    }
    if let Some(other) = map.get("resample").and_then(Value::as_u64).filter(|number| *number != BILINEAR) {
        notes.push(format!("`resample` = {other} is not followed: images are resized bilinearly"));
    }
    Ok(notes)
}
