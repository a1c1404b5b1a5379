//! Safetensors and GGUF files, in and out.

mod common;

use common::*;
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use trainyard_model::gguf::GgufOptions;
use trainyard_model::weights::{
    Encoding, ExportOptions, StoredDType, StoredTensor, TensorFile, WeightReader, WeightsError, export,
};
use trainyard_model::{
    Model, ModelError, ModelSpec, ParameterSpec, Piece, Split, TensorSplit, gguf, hf, initialise, preset,
};
use trainyard_tensor::DType;
use trainyard_tensor::cpu::{Cpu, Isa};

fn open(folder: &Path) -> Result<(Model, WeightReader), WeightsError> {
    let model = Model::new(read_config(folder, "config.json")).unwrap();
    let reader = WeightReader::open(folder, &model)?;
    Ok((model, reader))
}

fn read_all(model: &Model, reader: &WeightReader) -> Vec<Vec<f32>> {
    let read = |unit| {
        let mut flat = vec![f32::NAN; model.layout(unit, 1).elements()];
        reader.read_unit(model, unit, &mut flat).unwrap();
        flat
    };
    (0..model.units().len()).map(read).collect()
}

fn write_all(folder: &Path, model: &Model, dtype: DType, max_shard_bytes: u64, units: &[Vec<f32>]) {
    let options = ExportOptions { dtype, max_shard_bytes, generation: None };
    export(folder, model, options, |unit, out| {
        out.copy_from_slice(&units[unit]);
        Ok::<_, std::io::Error>(())
    })
    .unwrap();
}

/// A file of transformers that is read and written again is the same to the last byte.
#[test]
fn reading_and_writing_a_transformers_file_gives_the_same_bytes() {
    for name in GOLDENS {
        let (model, reader) = open(&golden(name)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        write_all(folder.path(), &model, DType::F32, u64::MAX, &read_all(&model, &reader));
        let ours = fs::read(folder.path().join("model.safetensors")).unwrap();
        let theirs = fs::read(golden(name).join("model.safetensors")).unwrap();
        assert!(ours == theirs, "{name}");
        assert_eq!(read_config(folder.path(), "config.json"), *model.spec().unwrap());
        assert!(folder.path().join("generation_config.json").exists());
        assert!(fs::read_dir(folder.path()).unwrap().all(|f| !f.unwrap().path().ends_with("partial")));
    }
}

#[test]
fn shards_hold_what_one_file_holds() {
    let (model, reader) = open(&golden("qwen3")).unwrap();
    let units = read_all(&model, &reader);
    // Transformers' shards.
    let sharded = WeightReader::open(&golden("qwen3/sharded"), &model).unwrap();
    assert_eq!(read_all(&model, &sharded), units);
    // Ours, in every dtype, over an older single file that must not shadow them.
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let folder = tempfile::tempdir().unwrap();
        write_all(folder.path(), &model, dtype, u64::MAX, &units);
        write_all(folder.path(), &model, dtype, 10_000, &units);
        assert!(!folder.path().join("model.safetensors").exists());
        let index: Value =
            serde_json::from_slice(&fs::read(folder.path().join("model.safetensors.index.json")).unwrap()).unwrap();
        let elements = model.parameter_count() * dtype.size();
        assert_eq!(index["metadata"]["total_size"], json!(elements));
        let files: std::collections::BTreeSet<_> =
            index["weight_map"].as_object().unwrap().values().map(|file| file.as_str().unwrap()).collect();
        assert!(files.len() > 3, "{files:?}");
        for file in files {
            let bytes = fs::read(folder.path().join(file)).unwrap();
            // Only a tensor that is larger by itself makes a file larger.
            let tensors = SafeTensors::deserialize(&bytes).unwrap();
            let size: usize = tensors.iter().map(|(_, tensor)| tensor.data().len()).sum();
            assert!(size <= 10_000 || tensors.len() == 1, "{file}: {size}");
        }
        let reader = WeightReader::open(folder.path(), &model).unwrap();
        let back = read_all(&model, &reader);
        for (a, b) in back.iter().flatten().zip(units.iter().flatten()) {
            let tolerance = match dtype {
                DType::F32 => 0.0,
                DType::BF16 => b.abs() / 256.0,
                _ => b.abs() / 2048.0 + 1e-7,
            };
            assert!((a - b).abs() <= tolerance, "{dtype}: {a} and {b}");
        }
        // Values that were rounded once stay exact.
        let again = tempfile::tempdir().unwrap();
        write_all(again.path(), &model, dtype, 10_000, &back);
        assert_eq!(read_all(&model, &WeightReader::open(again.path(), &model).unwrap()), back);
    }
}

/// The rank that holds the second and the last of four uneven stretches along `dim`, or the first
/// if there is only one row.
fn part_of(parameter: &ParameterSpec, dim: usize) -> ParameterSpec {
    let size = parameter.shape[dim];
    let first = if size < 4 { 0..1 } else { size / 5..size / 2 };
    let last = if size < 4 { size..size } else { size - size / 4..size };
    let stretches = [first, last];
    let mut part = parameter.clone();
    part.shape[dim] = stretches.iter().map(Range::len).sum();
    let mut start = 0;
    let pieces = stretches.into_iter().map(|whole| {
        let local = start..start + whole.len();
        start = local.end;
        Piece { local, whole, holders: 1, owned: true }
    });
    part.split =
        Some(Split { whole: parameter.shape.clone(), dim, outer: 0, pieces: pieces.collect(), shared: Vec::new() });
    part
}

/// Every golden model, by rows and by columns, transposed and fused sources included, whole or as
/// ranges that begin and end inside rows.
#[test]
fn a_rank_reads_the_rows_and_columns_of_its_part() {
    for name in GOLDENS {
        let (model, reader) = open(&golden(name)).unwrap();
        for (id, parameter) in model.parameters() {
            let mut all = vec![f32::NAN; parameter.elements()];
            reader.read_slot(&model, id, &mut all).unwrap();
            let parts = (0..parameter.shape.len()).map(|dim| part_of(parameter, dim));
            for part in [parameter.clone()].into_iter().chain(parts) {
                let n = part.elements();
                for range in [0..n, n / 3..n - n / 7, n / 2..n / 2 + 1, n / 4..n / 4] {
                    let mut got = vec![f32::NAN; range.len()];
                    reader.read_part(&part, range.clone(), &mut got).unwrap();
                    let runs = part.whole_runs(range.clone());
                    let want: Vec<_> = runs.into_iter().flat_map(|(run, at)| &all[at..at + run.len()]).collect();
                    assert!(got.iter().eq(want), "{name} {} {:?} {range:?}", part.name, part.split);
                }
            }
            let error = reader.read_part(parameter, 0..1, &mut [0.0; 2]).unwrap_err().to_string();
            assert!(error.contains("2 elements are no room for 0..1"), "{error}");
        }
    }
}

#[test]
fn a_gpt2_without_biases_is_exported_with_zeros_and_read_back_either_way() {
    let spec = ModelSpec {
        vocab_size: 31,
        dim: 16,
        head_dim: 4,
        ffn_dim: 64,
        layers: 2,
        ..preset("shakespeare-char").unwrap()
    };
    let model = Model::new(spec).unwrap();
    let cpu = Cpu::new(Isa::detect(), 1);
    let mut units: Vec<Vec<f32>> = Vec::new();
    for (unit, u) in model.units().iter().enumerate() {
        let layout = model.layout(unit, 1);
        let mut flat = vec![0.0; layout.elements()];
        for (index, parameter) in u.parameters().iter().enumerate() {
            let id = trainyard_autograd::ParamId::new(unit as u32, index as u32);
            initialise(&cpu, 1, id, parameter, 0, &mut flat[layout.range(index)]);
        }
        units.push(flat);
    }
    let folder = tempfile::tempdir().unwrap();
    write_all(folder.path(), &model, DType::F32, u64::MAX, &units);
    assert_eq!(read_all(&model, &WeightReader::open(folder.path(), &model).unwrap()), units);
    let (with_biases, reader) = open(folder.path()).unwrap();
    assert_eq!(with_biases.parameter_count(), model.parameter_count() + 2 * (2 * 16 + 48 + 16 + 64 + 16) + 16);
    let total = |units: &[Vec<f32>]| units.iter().flatten().map(|x| f64::from(*x)).sum::<f64>();
    assert!((total(&read_all(&with_biases, &reader)) - total(&units)).abs() < 1e-9);
}

/// A safetensors file as its two parts, to be spoiled.
struct Parts {
    header: Value,
    data: Vec<u8>,
}

impl Parts {
    fn read(path: &Path) -> Parts {
        let bytes = fs::read(path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Parts { header: serde_json::from_slice(&bytes[8..8 + length]).unwrap(), data: bytes[8 + length..].to_vec() }
    }

    fn bytes(&self) -> Vec<u8> {
        with_header(&self.header.to_string(), &self.data)
    }

    fn remove(&mut self, name: &str) {
        let entry = self.header.as_object_mut().unwrap().shift_remove(name).unwrap();
        let [start, end] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap());
        self.data.drain(start as usize..end as usize);
        for other in self.header.as_object_mut().unwrap().values_mut() {
            for i in 0..2 {
                if let Some(at) = other["data_offsets"].get(i).and_then(Value::as_u64).filter(|at| *at >= end) {
                    other["data_offsets"][i] = json!(at - (end - start));
                }
            }
        }
    }

    fn add(&mut self, name: &str, dtype: &str, shape: &[usize], data: &[u8]) {
        let start = self.data.len();
        self.data.extend(data);
        self.header[name] = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, self.data.len()]});
    }
}

fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";

/// Spoils the weights of a golden model and expects an error that says so.
fn check_spoilt(name: &str, expect: &[&str], spoil: impl FnOnce(&mut Parts) -> Option<Vec<u8>>) {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden(name).join("config.json"), folder.path().join("config.json")).unwrap();
    let mut parts = Parts::read(&golden(name).join("model.safetensors"));
    let bytes = spoil(&mut parts).unwrap_or_else(|| parts.bytes());
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let error = open(folder.path()).map(|_| ()).expect_err(expect[0]).to_string();
    for expect in expect {
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    }
}

#[test]
fn damaged_and_lying_files_are_errors_that_say_what_is_wrong() {
    let raw = |bytes: Vec<u8>| move |_: &mut Parts| Some(bytes);
    check_spoilt("llama", &["0 bytes are too few"], raw(vec![]));
    check_spoilt("llama", &["5 bytes are too few"], raw(b"12345".to_vec()));
    check_spoilt("llama", &["claims a header of"], raw(b"not a safetensors file at all".to_vec()));
    check_spoilt("llama", &["claims a header of 18446744073709551615"], raw(vec![0xff; 64]));
    check_spoilt("llama", &["header is not as specified"], raw(with_header("{\"a\":", &[])));
    check_spoilt("llama", &["header is not as specified"], raw(with_header("[1, 2]", &[])));
    check_spoilt("llama", &["header is not as specified"], raw(with_header("\u{0}\u{1}", &[])));
    check_spoilt("llama", &["header is not as specified", "dtype"], raw(with_header(r#"{"a": {"shape": [1]}}"#, &[])));
    let entry = |text: &str| with_header(&format!("{{\"a\": {text}}}"), &[0; 8]);
    check_spoilt("llama", &["unknown dtype `F31`"], raw(entry(r#"{"dtype":"F31","shape":[2],"data_offsets":[0,8]}"#)));
    check_spoilt(
        "llama",
        &["needs 12 bytes and claims 0..8"],
        raw(entry(r#"{"dtype":"F32","shape":[3],"data_offsets":[0,8]}"#)),
    );
    check_spoilt("llama", &["claims 8..0"], raw(entry(r#"{"dtype":"F32","shape":[2],"data_offsets":[8,0]}"#)));
    check_spoilt(
        "llama",
        &["ends at byte 16", "cut short"],
        raw(entry(r#"{"dtype":"F32","shape":[4],"data_offsets":[0,16]}"#)),
    );
    check_spoilt("llama", &["leaves a gap"], raw(entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#)));
    check_spoilt(
        "llama",
        &["4 bytes after the last"],
        raw(entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#)),
    );
    check_spoilt(
        "llama",
        &["impossible shape"],
        raw(entry(r#"{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,8]}"#)),
    );
    check_spoilt(
        "llama",
        &["header is not as specified"],
        raw(entry(r#"{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}"#)),
    );
    let two = |a: &str, b: &str| {
        let e = |o: &str| format!(r#"{{"dtype":"F32","shape":[1],"data_offsets":{o}}}"#);
        with_header(&format!("{{\"a\":{},\"{b}\":{}}}", e("[0,4]"), e(a)), &[0; 8])
    };
    check_spoilt("llama", &["`b` at 0..4 overlaps"], raw(two("[0,4]", "b")));
    check_spoilt("llama", &["`a` is there twice"], raw(two("[4,8]", "a")));
    check_spoilt("llama", &["cut short"], |parts| {
        let mut bytes = parts.bytes();
        bytes.truncate(bytes.len() - 100);
        Some(bytes)
    });
    check_spoilt("llama", &["7 bytes after the last tensor"], |parts| Some([parts.bytes(), vec![0; 7]].concat()));
}

#[test]
fn weights_of_another_model_are_errors_that_list_the_differences() {
    check_spoilt("llama", &["`model.norm.weight` [32] is missing"], |parts| {
        parts.remove(NORM);
        None
    });
    check_spoilt("llama", &["`lm_head.weight` [97, 32] is missing"], |parts| {
        parts.remove("lm_head.weight");
        None
    });
    check_spoilt("llama", &["`model.extra` [3] is no part of it"], |parts| {
        parts.add("model.extra", "F32", &[3], &[0; 12]);
        None
    });
    check_spoilt("llama", &["`model.norm.weight` is [4, 8] and should be [32]"], |parts| {
        parts.header[NORM]["shape"] = json!([4, 8]);
        None
    });
    check_spoilt("gpt2", &["c_attn.weight` is [96, 32] and should be [32, 96]"], |parts| {
        parts.header["transformer.h.0.attn.c_attn.weight"]["shape"] = json!([96, 32]);
        None
    });
    check_spoilt("llama", &["`model.norm.weight` has dtype I32"], |parts| {
        parts.header[NORM]["dtype"] = json!("I32");
        None
    });
    check_spoilt("smollm", &["`lm_head.weight` differs from the token table", "tie_word_embeddings"], |parts| {
        let size = 97 * 32 * 4;
        parts.add("lm_head.weight", "F32", &[97, 32], &vec![7; size]);
        None
    });
    check_spoilt("llama", &["and 14 more"], |parts| {
        for name in parts.header.as_object().unwrap().keys().cloned().collect::<Vec<_>>() {
            if name != "__metadata__" && name != EMBEDDING {
                parts.remove(&name);
            }
        }
        None
    });
}

#[test]
fn what_is_harmless_is_accepted() {
    let open_with = |name: &str, change: &dyn Fn(&mut Parts)| {
        let folder = tempfile::tempdir().unwrap();
        fs::copy(golden(name).join("config.json"), folder.path().join("config.json")).unwrap();
        let mut parts = Parts::read(&golden(name).join("model.safetensors"));
        change(&mut parts);
        fs::write(folder.path().join("model.safetensors"), parts.bytes()).unwrap();
        let (model, reader) = open(folder.path()).unwrap();
        let (_, expected) = open(&golden(name)).unwrap();
        assert_eq!(read_all(&model, &reader), read_all(&model, &expected), "{name}");
        reader.notes().to_vec()
    };
    // A tied head that is stored as well.
    open_with("smollm", &|parts| {
        let [start, end] = [0, 1].map(|i| parts.header[EMBEDDING]["data_offsets"][i].as_u64().unwrap() as usize);
        let table = parts.data[start..end].to_vec();
        parts.add("lm_head.weight", "F32", &[97, 32], &table);
    });
    // Old files: masks of GPT-2, names of the bare decoder.
    let notes = open_with("gpt2", &|parts| {
        parts.add("transformer.h.0.attn.bias", "U8", &[1, 1, 4, 4], &[1; 16]);
        parts.add("transformer.h.0.attn.masked_bias", "F32", &[], &[0; 4]);
        let header = std::mem::take(parts.header.as_object_mut().unwrap());
        let bare = header.into_iter().map(|(k, v)| (k.trim_start_matches("transformer.").to_string(), v));
        parts.header = Value::Object(bare.collect());
    });
    assert!(notes[0].starts_with("2 stored tensors are masks"), "{notes:?}");
}

#[test]
fn bad_indexes_are_errors() {
    let check = |expect: &str, change: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(golden("qwen3/sharded")).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
        change(folder.path());
        let error = open(folder.path()).map(|_| ()).expect_err(expect).to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    };
    const INDEX: &str = "model.safetensors.index.json";
    const FIRST: &str = "model-00001-of-00004.safetensors";
    let edit = |folder: &Path, change: &dyn Fn(&mut Value)| {
        let mut index: Value = serde_json::from_slice(&fs::read(folder.join(INDEX)).unwrap()).unwrap();
        change(&mut index["weight_map"]);
        fs::write(folder.join(INDEX), index.to_string()).unwrap();
    };
    check("holds neither", &|folder| fs::remove_file(folder.join(INDEX)).unwrap());
    check("not an index", &|folder| fs::write(folder.join(INDEX), "{}").unwrap());
    check("which is missing", &|folder| fs::remove_file(folder.join(FIRST)).unwrap());
    check("not the name of a file beside it", &|folder| {
        edit(folder, &|map| map[EMBEDDING] = json!("../x.safetensors"))
    });
    check("which does not hold it", &|folder| edit(folder, &|map| map["ghost"] = json!(FIRST)));
    check("holds one too", &|folder| edit(folder, &|map| map[EMBEDDING] = json!("model-00002-of-00004.safetensors")));
    check("which it does not list", &|folder| {
        edit(folder, &|map| drop(map.as_object_mut().unwrap().shift_remove(EMBEDDING)));
    });
    check("cut short", &|folder| {
        let bytes = fs::read(folder.join(FIRST)).unwrap();
        fs::write(folder.join(FIRST), &bytes[..bytes.len() - 1]).unwrap();
    });
}

#[test]
fn export_errors_name_the_unit_or_the_file() {
    let (model, _) = open(&golden("llama")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let error = export(folder.path(), &model, ExportOptions::default(), |unit, _| {
        if unit == 2 { Err(std::io::Error::other("disk gone")) } else { Ok(()) }
    })
    .unwrap_err();
    assert!(error.to_string().contains("unit `block.1` for export: disk gone"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "a failed export leaves nothing");
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = export(&file, &model, ExportOptions::default(), |_, _| Ok::<_, std::io::Error>(())).unwrap_err();
    assert!(error.to_string().starts_with("creating "), "{error}");
    let options = ExportOptions { dtype: DType::I32, ..ExportOptions::default() };
    let error = export(folder.path(), &model, options, |_, _| Ok::<_, std::io::Error>(())).unwrap_err();
    assert!(error.to_string().contains("choose f32, bf16 or f16"), "{error}");
}

/// The GGUF files of `scripts/golden/make_gguf.py`.
const GGUFS: [&str; 8] = ["llama", "llama3_rope", "qwen2", "qwen3", "gpt2", "gemma3", "olmo2", "phi3"];

fn gguf_file(name: &str) -> PathBuf {
    golden("gguf").join(format!("{name}.gguf"))
}

/// The model of a GGUF file, whole or in parts, and a reader of its weights.
fn open_gguf(path: &Path, split: TensorSplit) -> Result<(Model, WeightReader), WeightsError> {
    let imported = hf::from_config_json(&gguf::config_json(path)?).unwrap();
    assert_eq!(imported.notes, [] as [String; 0], "{path:?}");
    // Files have whole models' parameters, in parts too.
    let reader = WeightReader::open(path, &Model::new(imported.spec.clone()).unwrap())?;
    Ok((Model::split(imported.spec, split).unwrap(), reader))
}

#[test]
fn models_in_gguf_files_compute_what_transformers_does() {
    let device = cpu();
    for name in GGUFS {
        let (model, reader) = open_gguf(&gguf_file(name), TensorSplit::WHOLE).unwrap();
        assert!(reader.notes().len() == usize::from(name != "llama3_rope"), "{name}: {:?}", reader.notes());
        let store = reader.read_store(&model, &device).unwrap();
        let bytes = fs::read(golden("gguf").join(format!("{name}.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| file.tensor(name).unwrap().data().chunks_exact(4);
        let ids: Vec<i32> = words("input_ids").map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
        let expected: Vec<f32> = words("logits").map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let got = logits(&model, &store, &device, &batch(&model, &device, 2, &ids, None));
        let error = relative_error(&got, &expected);
        assert!(error <= 1e-4, "{name}: logits differ by {error:e}");
    }
}

/// Writes a model as a GGUF file.
fn write_gguf(path: &Path, model: &Model, reader: &WeightReader, encoding: Encoding) -> Result<(), ModelError> {
    let options = GgufOptions { encoding, name: "tiny", tokenizer: None };
    let written = gguf::export_gguf(path, model, &options, |unit, out| reader.read_unit(model, unit, out))?;
    assert_eq!(written.0.files, [path]);
    Ok(())
}

/// The tables of names and keys read backwards: the keys, names, shapes and weights of the files of
/// the package `gguf`, to the bit where they are written in the same encoding.
#[test]
fn written_gguf_files_are_those_of_the_package_gguf() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("again.gguf");
    let f32 = Encoding::Float(StoredDType::F32);
    for name in GGUFS {
        let (theirs, their_tensors) = gguf::open(&gguf_file(name)).unwrap();
        let matrix = their_tensors.tensors().values().find(|tensor| tensor.shape.len() == 2).unwrap();
        for encoding in [f32, matrix.encoding().unwrap()] {
            let (model, reader) = open_gguf(&gguf_file(name), TensorSplit::WHOLE).unwrap();
            write_gguf(&path, &model, &reader, encoding).unwrap();
            let (again, read) = open_gguf(&path, TensorSplit::WHOLE).unwrap();
            assert_eq!(again.spec(), model.spec(), "{name}");
            for unit in 0..model.units().len() {
                let values = |reader: &WeightReader| {
                    let mut values = vec![0.0; model.layout(unit, 1).elements()];
                    reader.read_unit(&model, unit, &mut values).unwrap();
                    values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                assert!(values(&read) == values(&reader), "{name}, unit {unit}, {encoding:?}");
            }
            let (ours, our_tensors) = gguf::open(&path).unwrap();
            let architecture = format!("{}.", theirs.text("general.architecture").unwrap());
            for (key, value) in theirs.0.iter().filter(|(key, _)| key.starts_with(&architecture)) {
                assert_eq!(ours.0.get(key), Some(value), "{name}: {key}");
            }
            let shapes = |file: &TensorFile| -> Vec<_> {
                file.tensors().iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone())).collect()
            };
            assert_eq!(shapes(&our_tensors), shapes(&their_tensors), "{name}");
            for (tensor, theirs) in their_tensors.tensors().iter().filter(|_| encoding != f32) {
                let ours = &our_tensors.tensors()[tensor];
                let bytes = |file: &TensorFile, tensor: &StoredTensor| {
                    let mut bytes = vec![0; (tensor.range.end - tensor.range.start) as usize];
                    file.read(tensor, 0, &mut bytes).unwrap();
                    bytes
                };
                // Learned positions are f32 here, as llama.cpp converts them, and factors of
                // wavelengths are rounded once more there.
                if !(tensor.starts_with("position_embd") || tensor.starts_with("rope_freqs")) {
                    assert_eq!(ours.dtype, theirs.dtype, "{name}: {tensor}");
                    assert!(bytes(&our_tensors, ours) == bytes(&their_tensors, theirs), "{name}: {tensor}");
                }
            }
        }
    }
}

#[test]
fn models_that_gguf_cannot_say_are_refused_before_anything_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let refused = |spec: ModelSpec, encoding: Encoding| {
        let model = Model::new(spec).unwrap();
        let options = GgufOptions { encoding, name: "m", tokenizer: None };
        let zeros = |_: usize, _: &mut [f32]| Ok::<_, std::io::Error>(());
        let error = gguf::export_gguf(&path, &model, &options, zeros).unwrap_err().to_string();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{error}");
        error
    };
    let f32 = Encoding::Float(StoredDType::F32);
    let llama = ModelSpec::llama(64, 32, 2, 2, 64, 32);
    let gpt2 = ModelSpec::gpt2(64, 32, 2, 2, 32);
    let of =
        |name: &str| hf::from_config_json(&fs::read_to_string(golden(name).join("config.json")).unwrap()).unwrap().spec;
    let windows = ModelSpec { sliding_layers: Some(vec![0]), attention_scalar: None, ..of("gemma3") };
    for (spec, encoding, words) in [
        (of("mixtral"), f32, "GGUF files of `mixtral` are not written; written are"),
        (of("vit"), f32, "GGUF files of `vit` are not written"),
        (llama, Encoding::Blocks(gguf::Quantisation::Q4K), "Q4_K is read and not written"),
        (
            ModelSpec { qkv_bias: false, ..gpt2 },
            f32,
            "would lose qkv_bias: it would say true where the model has false",
        ),
        (windows, f32, "would lose sliding_layers"),
    ] {
        let error = refused(spec, encoding);
        assert!(error.contains(words), "{error:?} does not say {words:?}");
    }
    // Rows of 40 numbers are no blocks of 32.
    let model = Model::new(ModelSpec { head_dim: 10, ..ModelSpec::llama(64, 40, 1, 4, 64, 32) }).unwrap();
    let options = GgufOptions { encoding: Encoding::Blocks(gguf::Quantisation::Q8_0), name: "m", tokenizer: None };
    let (_, note) = gguf::export_gguf(&path, &model, &options, |_, out| {
        out.fill(0.5);
        Ok::<_, std::io::Error>(())
    })
    .unwrap();
    assert!(note.unwrap().contains("matrices have rows that do not divide into blocks: they are f16"));
    let (_, file) = gguf::open(&path).unwrap();
    assert_eq!(
        (&*file.tensors()["token_embd.weight"].dtype, &*file.tensors()["blk.0.ffn_down.weight"].dtype),
        ("F16", "Q8_0")
    );
}

/// Blocks and rows that are ordered otherwise are read in any pieces.
#[test]
fn parts_of_tensors_in_gguf_files_are_those_of_the_whole() {
    for name in ["llama", "qwen2", "gpt2", "gemma3"] {
        let (whole, reader) = open_gguf(&gguf_file(name), TensorSplit::WHOLE).unwrap();
        for rank in 0..2 {
            let (model, _) = open_gguf(&gguf_file(name), TensorSplit { rank, ranks: 2, sequence: false }).unwrap();
            for (id, part) in model.parameters() {
                let mut all = vec![0.0; whole.find(id).unwrap().elements()];
                reader.read_slot(&whole, id, &mut all).unwrap();
                let count = part.elements();
                for local in [0..count, count / 3..count - count / 5, count - 1..count] {
                    let mut got = vec![f32::NAN; local.len()];
                    reader.read_part(part, local.clone(), &mut got).unwrap();
                    for (run, first) in part.whole_runs(local.clone()) {
                        let place = run.start - local.start;
                        assert!(got[place..][..run.len()] == all[first..][..run.len()], "{name} {id} {local:?}");
                    }
                }
            }
        }
    }
}

/// A GGUF file of one text in the metadata and one tensor, [256] of type `kind`.
fn little_gguf(key: &str, value: &str, tensor: &str, kind: u32) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut bytes = [&b"GGUF"[..], &3u32.to_le_bytes(), &1u64.to_le_bytes(), &1u64.to_le_bytes()].concat();
    bytes.extend([text(key), 8u32.to_le_bytes().into(), text(value)].concat());
    bytes.extend([text(tensor), 1u32.to_le_bytes().into(), 256u64.to_le_bytes().into()].concat());
    bytes.extend([&kind.to_le_bytes()[..], &0u64.to_le_bytes()].concat());
    bytes.resize(bytes.len().next_multiple_of(32) + 1024, 0);
    bytes
}

#[test]
fn gguf_files_that_cannot_be_read_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let architecture = "general.architecture";
    let good = || little_gguf(architecture, "llama", "token_embd.weight", 0);
    let mut version = good();
    version[4] = 1;
    let mut huge = good();
    huge[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    let cases = [
        (good(), "it has neither llama.attention.key_length nor widths"),
        (good()[..good().len() - 1].to_vec(), "it is cut short"),
        (good()[..60].to_vec(), "it ends within its header"),
        (b"GGML".repeat(20), "it does not begin with `GGUF`"),
        (version, "it has version 1; versions 2 and 3"),
        (huge, "it claims 18446744073709551615 tensors"),
        (little_gguf(architecture, "mamba", "token_embd.weight", 0), "its architecture `mamba` is not supported"),
        (little_gguf(architecture, "llama", "token_embd.weight", 10), "`token_embd.weight` is Q2_K, which is not read"),
        (little_gguf(architecture, "llama", "token_embd.weight", 99), "`token_embd.weight` is type 99"),
        (little_gguf("general.name", "llama", "token_embd.weight", 0), "does not name its general.architecture"),
        (little_gguf(architecture, "llama", "x", 0), "it has no tensor `token_embd.weight`"),
    ];
    for (bytes, expect) in cases {
        fs::write(&path, bytes).unwrap();
        let error = gguf::config_json(&path).unwrap_err().to_string();
        assert!(error.contains(expect) && error.contains("m.gguf"), "{error:?} does not say {expect:?}");
    }
    // A file of another model.
    let spec = hf::from_config_json(&gguf::config_json(&gguf_file("qwen2")).unwrap()).unwrap().spec;
    let error = WeightReader::open(&gguf_file("qwen3"), &Model::new(spec).unwrap()).unwrap_err().to_string();
    assert!(error.contains("`model.layers.0.self_attn.q_proj.weight` is [64, 32] and should be [32, 32]"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever happens to a file's bytes, opening it is an answer and not a panic; what opens can
    /// be read.
    #[test]
    fn spoilt_bytes_never_panic(
        changes in prop::collection::vec((0usize..3000, any::<u8>()), 1..4), cut in 0usize..200_000,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = fs::read(golden("llama").join("model.safetensors")).unwrap();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        bytes.truncate(cut);
        fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        let model = Model::new(read_config(&golden("llama"), "config.json")).unwrap();
        if let Ok(reader) = WeightReader::open(folder.path(), &model) {
            read_all(&model, &reader);
        }
    }

    /// The same of the headers of GGUF files.
    #[test]
    fn spoilt_gguf_files_never_panic(
        changes in prop::collection::vec((0usize..1200, any::<u8>()), 1..4), cut in 0usize..30_000,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let mut bytes = fs::read(gguf_file("qwen2")).unwrap();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        bytes.truncate(bytes.len().saturating_sub(cut / 1000));
        fs::write(&path, bytes).unwrap();
        let spec = gguf::config_json(&path).ok().and_then(|text| hf::from_config_json(&text).ok()).map(|read| read.spec);
        // Building allocates per layer; what is absurd is not built here.
        if let Some(spec) = spec.filter(|spec| spec.layers < 100 && spec.dim < 1000 && spec.ffn_dim < 1000) {
            let model = Model::new(spec).unwrap();
            if let Ok(reader) = WeightReader::open(&path, &model) {
                read_all(&model, &reader);
            }
        }
        let _ = gguf::tokenizer_json(&path);
    }

    /// The same of configs whose values were swapped for others.
    #[test]
    fn spoilt_configs_never_panic(name in prop::sample::select(GOLDENS.to_vec()), key in 0usize..40, value in spoilt_value()) {
        let text = fs::read_to_string(golden(name).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        let map = config.as_object_mut().unwrap();
        let key = map.keys().nth(key % map.len()).unwrap().clone();
        map[&key] = value;
        if let Ok(imported) = hf::from_config_json(&config.to_string()) {
            // Building allocates per layer; what is absurd is not built here.
            if imported.spec.layers < 100 {
                prop_assert!(Model::new(imported.spec).is_ok());
            }
        }
    }
}

fn spoilt_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-3i64..200).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z_]{0,8}".prop_map(Value::from),
        prop::collection::vec(any::<i32>(), 0..3).prop_map(Value::from),
        Just(json!({"rope_type": "yarn", "factor": 1e308, "rope_theta": 1.0000001})),
        Just(json!({"rope_type": "llama3", "factor": -1, "low_freq_factor": 1, "high_freq_factor": 1})),
    ]
}
