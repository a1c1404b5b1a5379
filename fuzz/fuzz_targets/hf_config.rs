#![no_main]
//! A `config.json` that is accepted and can be written must be read back as the same model.

use libfuzzer_sys::fuzz_target;
use trainyard_model::hf::{config_json, from_config_json};
use trainyard_tensor::DType;

fuzz_target!(|text: &str| {
    let Ok(imported) = from_config_json(text) else { return };
    let Ok(written) = config_json(&imported.spec, DType::F32) else { return };
    let again = from_config_json(&written).unwrap_or_else(|error| panic!("{error}\nin\n{written}"));
    assert_eq!(again.spec, imported.spec);
});
