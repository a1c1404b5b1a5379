//! Matrices of few bits, as compressed-tensors packs them (format `pack-quantized`).
//!
//! A matrix `X.weight` [n, k] of b bits is three tensors: `X.weight_packed`, I32 [n, ceil(k b /
//! 32)]; `X.weight_scale`, [n, groups], f32, bf16 or f16; `X.weight_shape`, I64 [2] = (n, k). A row
//! of codes is a string of bits, least significant first, in which each code stands with `2^(b-1)`
//! added. A value is its code times the scale of its group, rounded to the dtype of the scales.
//!
//! In the format `int-quantized` a code of 8 bits is a byte of `X.weight`, I8 [n, k], beside
//! `X.weight_scale`, [n, 1]. It says that inputs of layers are rounded to 8 bits as well, each row
//! with a scale of its own.

use super::{Places, StoredTensor, TensorFile, WeightsError};
use crate::hf::ConfigError;
use crate::{Model, ParameterKind};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use trainyard_autograd::ParamId;

/// The widths of codes that are read and written.
pub const PACKED_BITS: [u8; 4] = [2, 3, 4, 8];

/// The form of packed matrices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct PackedFormat {
    /// Bits of a code.
    pub bits: u8,
    /// Neighbouring elements of a row that share a scale; None: all of a row.
    pub group: Option<usize>,
    /// True if the rows of inputs are rounded to 8 bits, too. Weights have 8 bits then, and a scale
    /// per row.
    pub codes_inputs: bool,
}

/// The codes of one matrix.
#[derive(Clone, PartialEq, Debug)]
pub struct PackedMatrix {
    /// Row-major, [n, k], from `-2^(b-1)` to `2^(b-1) - 1`.
    pub codes: Vec<i8>,
    /// Row-major, [n, groups].
    pub scales: Vec<f32>,
}

/// The parts of a packed matrix in files, beside the codes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PackedParts {
    pub(super) format: PackedFormat,
    /// The file and entry of the scales.
    pub(super) scales: (usize, StoredTensor),
}

impl PackedFormat {
    /// Scales of a row of `columns` elements.
    pub fn groups(&self, columns: usize) -> usize {
        self.group.map_or(1, |group| columns.div_ceil(group))
    }

    /// Elements that share a scale in a row of `columns`.
    pub fn group_in(&self, columns: usize) -> usize {
        self.group.unwrap_or(columns)
    }

    /// Bytes of a packed row of `columns` elements.
    pub fn row_bytes(&self, columns: usize) -> usize {
        if self.codes_inputs {
            return columns;
        }
        4 * (columns * usize::from(self.bits)).div_ceil(32)
    }

    /// Appends a row of codes.
    fn pack(&self, codes: &[i8], out: &mut Vec<u8>) {
        if self.codes_inputs {
            return out.extend(codes.iter().map(|code| code.cast_unsigned()));
        }
        let offset = 1i32 << (self.bits - 1);
        let (mut word, mut filled, end) = (0u64, 0u32, out.len() + self.row_bytes(codes.len()));
        for code in codes {
            word |= ((i32::from(*code) + offset) as u64) << filled;
            filled += u32::from(self.bits);
            if filled >= 32 {
                out.extend((word as u32).to_le_bytes());
                word >>= 32;
                filled -= 32;
            }
        }
        if out.len() < end {
            out.extend((word as u32).to_le_bytes());
        }
    }

    /// The codes of a row.
    pub(super) fn unpack(&self, bytes: &[u8], codes: &mut [i8]) {
        if self.codes_inputs {
            return codes.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte.cast_signed());
        }
        let (offset, mask) = (1i32 << (self.bits - 1), (1u64 << self.bits) - 1);
        let mut words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let (mut word, mut filled) = (0u64, 0u32);
        for code in codes {
            if filled < u32::from(self.bits) {
                word |= u64::from(words.next().unwrap_or(0)) << filled;
                filled += 32;
            }
            *code = ((word & mask) as i32 - offset) as i8;
            word >>= self.bits;
            filled -= u32::from(self.bits);
        }
    }

    /// The packed rows of a matrix of `columns`.
    pub(super) fn pack_rows(&self, codes: &[i8], columns: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(codes.len() / columns.max(1) * self.row_bytes(columns));
        codes.chunks_exact(columns).for_each(|row| self.pack(row, &mut out));
        out
    }

    /// The value of `quantization_config` in a `config.json`.
    pub fn config(&self) -> Value {
        let inputs = json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "dynamic": true});
        json!({
            "quant_method": "compressed-tensors",
            "format": if self.codes_inputs { BYTES } else { WORDS },
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": self.bits,
                        "type": "int",
                        "symmetric": true,
                        "strategy": if self.group.is_some() { "group" } else { "channel" },
                        "group_size": self.group,
                        "dynamic": false,
                    },
                    "input_activations": if self.codes_inputs { inputs } else { Value::Null },
                    "output_activations": null,
                }
            },
            "ignore": ["lm_head"],
            "kv_cache_scheme": null,
        })
    }

    /// Reads a `quantization_config`.
    ///
    /// # Errors
    /// A method or a form that is not read.
    pub fn of_config(value: &Value) -> Result<PackedFormat, ConfigError> {
        let refuse = |key: &str, value: &Value, why| {
            let key = format!("quantization_config{key}");
            Err(ConfigError::Unsupported { key, value: value.to_string(), why })
        };
        if value["quant_method"] != "compressed-tensors" {
            return refuse("", value, "only weights packed by compressed-tensors are read: use the unquantised model");
        }
        let codes_inputs = value["format"] == BYTES;
        if value["format"] != WORDS && !codes_inputs {
            return refuse(".format", &value["format"], "only `pack-quantized` and `int-quantized` are read");
        }
        let groups: Vec<&Value> = value["config_groups"].as_object().into_iter().flat_map(|map| map.values()).collect();
        let [group] = groups[..] else {
            return refuse(".config_groups", &value["config_groups"], "one group of layers is read");
        };
        let inputs = &group["input_activations"];
        if !codes_inputs && !inputs.is_null() {
            return refuse(".input_activations", inputs, "only `int-quantized` is read with rounded inputs");
        }
        let by_row = inputs["num_bits"] == 8 && inputs["type"] == "int" && inputs["symmetric"] == true;
        if codes_inputs && !(by_row && inputs["dynamic"] == true && inputs["strategy"] == "token") {
            let why = "symmetric integers of 8 bits are read, whose scales are found for each row (dynamic, token)";
            return refuse(".input_activations", inputs, why);
        }
        let weights = &group["weights"];
        let whole = weights["type"] == "int" && weights["symmetric"] == true && !weights["actorder"].is_string();
        let bits =
            weights["num_bits"].as_u64().and_then(|bits| PACKED_BITS.into_iter().find(|b| u64::from(*b) == bits));
        let size = weights["group_size"].as_u64().filter(|size| *size > 0).map(|size| size as usize);
        let format = match (weights["strategy"].as_str(), size) {
            (Some("group"), Some(size)) => Some(Some(size)),
            (Some("channel"), None) => Some(None),
            _ => None,
        };
        match (whole, bits, format) {
            (true, Some(bits), Some(group)) if !codes_inputs || (bits, group) == (8, None) => {
                Ok(PackedFormat { bits, group, codes_inputs })
            }
            _ => refuse(
                ".weights",
                weights,
                "symmetric integers of 2, 3, 4 or 8 bits are read, with a scale per group or per row; where inputs are rounded, 8 \
                 bits with a scale per row",
            ),
        }
    }
}

/// True for the parameters that are packed: the matrices of blocks.
pub fn is_packed(model: &Model, id: ParamId) -> bool {
    let inside = id.unit > 0 && (id.unit as usize) + 1 < model.units().len();
    inside && model.find(id).is_some_and(|spec| spec.kind == ParameterKind::Matrix && spec.shape.len() == 2)
}

const PACKED: &str = ".weight_packed";
const SCALES: &str = ".weight_scale";
/// The formats of the files.
const WORDS: &str = "pack-quantized";
const BYTES: &str = "int-quantized";

/// Puts each packed matrix of a folder together to the one tensor that a model looks for.
pub(super) fn join(folder: &Path, files: &[TensorFile], places: &mut Places) -> Result<(), WeightsError> {
    let of = |suffix: &str| -> Vec<String> {
        places.keys().filter_map(|name| name.strip_suffix(suffix)).map(str::to_owned).collect()
    };
    let (layers, of_bytes) = (of(PACKED), of(SCALES));
    if layers.is_empty() && of_bytes.is_empty() {
        return Ok(());
    }
    let path = folder.join("config.json");
    let bad = |problem: String| WeightsError::Format { path: path.clone(), problem };
    let text = std::fs::read(&path).map_err(WeightsError::io("reading", &path))?;
    let config: Value = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
    let format = PackedFormat::of_config(&config["quantization_config"]).map_err(|error| bad(error.to_string()))?;
    if format.codes_inputs {
        return join_bytes(&of_bytes, places, format, bad);
    }
    for layer in layers {
        let mut take = |suffix: &str| {
            let missing = || bad(format!("`{layer}{PACKED}` is there without `{layer}{suffix}`"));
            places.remove(&format!("{layer}{suffix}")).ok_or_else(missing)
        };
        let (file, codes) = take(PACKED)?;
        let scales = take(".weight_scale")?;
        let (of_shape, shape) = take(".weight_shape")?;
        let mut bytes = [0; 16];
        if shape.dtype != "I64" || shape.shape != [2] {
            return Err(bad(format!("`{layer}.weight_shape` is {} {:?}, not I64 [2]", shape.dtype, shape.shape)));
        }
        files[of_shape].read(&shape, 0, &mut bytes)?;
        let side = |at: usize| {
            let mut side = [0; 8];
            side.copy_from_slice(&bytes[at..at + 8]);
            usize::try_from(i64::from_le_bytes(side)).ok().filter(|side| (1..1 << 31).contains(side))
        };
        let wrong = |what: &str, found: &StoredTensor| {
            bad(format!("`{layer}{what}` is {} {:?}, which no {format:?} has", found.dtype, found.shape))
        };
        let (Some(rows), Some(columns)) = (side(0), side(8)) else { return Err(wrong(".weight_shape", &shape)) };
        if codes.dtype != "I32" || codes.shape != [rows, format.row_bytes(columns) / 4] {
            return Err(wrong(PACKED, &codes));
        }
        if scales.1.encoding().is_none() || scales.1.shape != [rows, format.groups(columns)] {
            return Err(wrong(".weight_scale", &scales.1));
        }
        let dtype = scales.1.dtype.clone();
        let packed = Some(Arc::new(PackedParts { format, scales }));
        places.insert(
            format!("{layer}.weight"),
            (file, StoredTensor { dtype, shape: vec![rows, columns], packed, ..codes }),
        );
    }
    Ok(())
}

/// Puts the matrices of bytes together with their scales.
fn join_bytes(
    layers: &[String],
    places: &mut Places,
    format: PackedFormat,
    bad: impl Fn(String) -> WeightsError,
) -> Result<(), WeightsError> {
    for layer in layers {
        let scales = places.remove(&format!("{layer}{SCALES}")).expect("layers are named by it");
        let name = format!("{layer}.weight");
        let Some((_, codes)) = places.get_mut(&name) else {
            return Err(bad(format!("`{layer}{SCALES}` is there without `{name}`")));
        };
        let fits = codes.dtype == "I8" && codes.shape.len() == 2 && scales.1.encoding().is_some();
        if !fits || scales.1.shape != [codes.shape[0], 1] {
            let (codes, scales) = ((&codes.dtype, &codes.shape), (&scales.1.dtype, &scales.1.shape));
            return Err(bad(format!("`{name}` is {codes:?} with scales {scales:?}, which no {format:?} has")));
        }
        codes.dtype = scales.1.dtype.clone();
        codes.packed = Some(Arc::new(PackedParts { format, scales }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_codes_are_strings_of_bits() {
        for bits in PACKED_BITS {
            let format = PackedFormat { bits, group: None, codes_inputs: false };
            for columns in [1, 5, 8, 31, 32, 33, 70] {
                let (low, values) = (-(1i32 << (bits - 1)), 1i32 << bits);
                let codes: Vec<i8> = (0..columns).map(|i| (low + (7 * i as i32) % values) as i8).collect();
                let mut bytes = Vec::new();
                format.pack(&codes, &mut bytes);
                assert_eq!(bytes.len(), format.row_bytes(columns), "{bits} {columns}");
                let mut again = vec![0; columns];
                format.unpack(&bytes, &mut again);
                assert_eq!(again, codes, "{bits} {columns}");
            }
        }
        // The first code stands lowest, with 8 added.
        let mut bytes = Vec::new();
        PackedFormat { bits: 4, group: None, codes_inputs: false }.pack(&[-8, -7, 7, 0], &mut bytes);
        assert_eq!(bytes, [0x10, 0x8f, 0, 0]);
    }

    /// Words of compressed-tensors, as `scripts/golden/make_compression.py` prints them.
    #[test]
    fn words_are_those_of_compressed_tensors() {
        let second_row: [(u8, &[u32]); 3] = [
            (2, &[0x6c6c6c6c, 0x6c6c6c6c, 0x00006c6c]),
            (3, &[0xb829cbb8, 0xcbb829cb, 0x29cbb829, 0x0029cbb8]),
            (4, &[0x92b4d6f8, 0x1a3c5e70, 0x92b4d6f8, 0x1a3c5e70, 0x92b4d6f8]),
        ];
        for (bits, words) in second_row {
            let code = |at: i32| (at * 7 % (1 << bits) - (1 << (bits - 1))) as i8;
            let codes: Vec<i8> = (40..80).map(code).collect();
            let mut bytes = Vec::new();
            PackedFormat { bits, group: None, codes_inputs: false }.pack(&codes, &mut bytes);
            let found: Vec<u32> = bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
            assert_eq!(found, words, "{bits} bits");
        }
    }

    #[test]
    fn a_config_is_read_as_it_is_written_and_others_are_refused() {
        for group in [None, Some(32)] {
            let format = PackedFormat { bits: 4, group, codes_inputs: false };
            assert_eq!(PackedFormat::of_config(&format.config()).unwrap(), format);
        }
        let refused = |change: &dyn Fn(&mut Value)| {
            let mut config = PackedFormat { bits: 4, group: Some(128), codes_inputs: false }.config();
            change(&mut config);
            PackedFormat::of_config(&config).unwrap_err().to_string()
        };
        assert!(refused(&|c| c["quant_method"] = json!("gptq")).contains("packed by compressed-tensors"));
        assert!(refused(&|c| c["format"] = json!("float-quantized")).contains("`pack-quantized`"));
        assert!(
            refused(&|c| c["config_groups"]["group_0"]["weights"]["symmetric"] = json!(false)).contains("symmetric")
        );
        assert!(refused(&|c| c["config_groups"]["group_0"]["weights"]["num_bits"] = json!(5)).contains("2, 3, 4 or 8"));
        assert!(refused(&|c| c["config_groups"]["group_1"] = json!({})).contains("one group of layers"));
    }
}
