//! Fewer channels and heads of trained models, through the program.

mod common;

use common::Folder;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The f32 tensors of a safetensors file: shapes and values by name.
type Weights = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn read(path: &Path) -> Weights {
    let bytes = fs::read(path).unwrap();
    let (length, rest) = bytes.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header: Value = serde_json::from_slice(header).unwrap();
    let entries = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let tensor = |(name, entry): (&String, &Value)| {
        assert_eq!(entry["dtype"], "F32", "{name}");
        let numbers = |value: &Value| value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let at: Vec<usize> = numbers(&entry["data_offsets"]);
        let values = data[at[0]..at[1]].chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
        (name.clone(), (numbers(&entry["shape"]), values.collect()))
    };
    entries.map(tensor).collect()
}

fn write(path: &Path, weights: &Weights) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (shape, values)) in weights {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]}));
    }
    let header = Value::Object(header).to_string().into_bytes();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()).unwrap();
}

/// The elements of a tensor in these rows or these columns.
fn rows((shape, values): &mut (Vec<usize>, Vec<f32>), rows: &[usize]) {
    let width: usize = shape[1..].iter().product();
    *values = rows.iter().flat_map(|row| values[row * width..][..width].to_vec()).collect();
    shape[0] = rows.len();
}

fn columns((shape, values): &mut (Vec<usize>, Vec<f32>), columns: &[usize]) {
    *values = values.chunks(shape[1]).flat_map(|row| columns.iter().map(|column| row[*column])).collect();
    shape[1] = columns.len();
}

/// Writes the folder `to`: `from` with other weights and keys of its config.json.
fn folder_with(folder: &Folder, from: &str, to: &str, weights: &Weights, keys: Value) {
    fs::create_dir(folder.join(to)).unwrap();
    for entry in fs::read_dir(folder.join(from)).unwrap().map(|entry| entry.unwrap()) {
        fs::copy(entry.path(), folder.join(to).join(entry.file_name())).unwrap();
    }
    write(&folder.join(to).join("model.safetensors"), weights);
    let mut config = config(folder, from);
    keys.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    folder.write(&format!("{to}/config.json"), config.to_string());
}

fn config(folder: &Folder, model: &str) -> Value {
    serde_json::from_slice(&fs::read(folder.join(model).join("config.json")).unwrap()).unwrap()
}

/// A folder with a run, `runs/tiny`, and its export `hf`.
fn trained(sets: &[&str]) -> Folder {
    let folder = Folder::new();
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    folder.run(&["train", "tiny.toml", "--quiet"].into_iter().chain(sets).collect::<Vec<_>>()).ok();
    folder.run(&["export", "runs/tiny", "--out", "hf", "--dtype", "f32"]).ok();
    folder
}

const TEXTS: [&str; 6] = ["--calibration", "text.txt", "--evaluate", "text.txt", "--samples", "32"];

fn prune(folder: &Folder, model: &str, out: &str, options: &[&str]) -> Value {
    let command = [&["prune", model, "--out", out, "--json", "--dtype", "f32"], options, &TEXTS].concat();
    serde_json::from_str(&folder.run(&command).ok().stdout).unwrap()
}

fn loss(folder: &Folder, model: &str) -> f64 {
    let eval = ["eval", model, "--data", "text.txt", "--length", "32", "--dtype", "f32", "--json"];
    let line: Value = serde_json::from_str(&folder.run(&eval).ok().stdout).unwrap();
    line["loss"].as_f64().unwrap()
}

fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("{key} of {line}"))
}

/// Models that every parameter of the table of its family is in: grouped heads, biases, norms of
/// queries and keys, tied tables.
const FAMILIES: [(&str, &[&str]); 6] = [
    ("llama", &["model.heads=4", "model.kv_heads=2"]),
    ("qwen2", &["model.heads=4", "model.kv_heads=2", "model.qkv_bias=true", "model.tie_embeddings=true"]),
    ("qwen3", &["model.heads=4", "model.kv_heads=4", "model.qk_norm=true"]),
    ("gemma3", &["model.family=gemma3", "model.heads=4", "model.kv_heads=1"]),
    ("olmo2", &["model.family=olmo2", "model.heads=4"]),
    ("phi3", &["model.family=phi3", "model.heads=4", "model.kv_heads=2"]),
];

/// Every family keeps its weights when all is kept, and becomes a smaller folder that loads, gives
/// the loss that was told, generates and is trained on.
#[test]
fn families_are_made_narrower() {
    for (name, sets) in FAMILIES {
        let folder = trained(&[&["training.steps=12", "model.ffn_dim=48"], sets].concat());
        let heads = config(&folder, "hf")["num_attention_heads"].to_string();
        prune(&folder, "hf", "all", &["--ffn", "48", "--heads", &heads, "--hidden", "32"]);
        let [whole, all] = ["hf", "all"].map(|model| read(&folder.join(model).join("model.safetensors")));
        assert!(whole == all, "{name}: weights have changed");
        for (out, options, keys) in [
            ("ffn", &["--ffn", "20"][..], json!({"intermediate_size": 20})),
            ("heads", &["--heads", "2"], json!({"num_attention_heads": 2, "head_dim": 8})),
            ("hidden", &["--hidden", "24"], json!({"hidden_size": 24, "head_dim": 8})),
            (
                "both",
                &["--layers", "1", "--ffn", "32", "--heads", "2", "--hidden", "16"],
                json!({"num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2, "hidden_size": 16}),
            ),
        ] {
            let line = prune(&folder, "runs/tiny", out, options);
            let told = number(&line, "loss_after");
            assert!((told - loss(&folder, out)).abs() < 1e-5, "{name}, {out}: {line}");
            assert!((number(&line, "loss_before") - loss(&folder, "hf")).abs() < 1e-5, "{name}, {out}: {line}");
            let config = config(&folder, out);
            for (key, value) in keys.as_object().unwrap() {
                assert_eq!(&config[key], value, "{name}, {out}: {key} of {config}");
            }
        }
        let generate = ["generate", "both", "--prompt", "the ", "--tokens", "4", "--ignore-eos"];
        folder.run(&generate).ok();
        let data = common::TINY.split_once("[data]").unwrap().1.replace("steps = 12", "steps = 2");
        folder.write("more.toml", format!("[run]\nname = 'more'\n[model]\npath = 'both'\n[data]\n{data}"));
        folder.run(&["train", "more.toml", "--quiet"]).ok();
    }
}

/// Files of GPT-2 say that heads are hidden / heads wide, so both go together.
#[test]
fn gpt_2_keeps_its_width_of_heads() {
    let folder = trained(&["model.family=gpt2", "model.heads=4", "training.steps=12"]);
    prune(&folder, "hf", "all", &["--ffn", "128", "--heads", "4", "--hidden", "32"]);
    let [whole, all] = ["hf", "all"].map(|model| read(&folder.join(model).join("model.safetensors")));
    assert!(whole == all, "weights have changed");
    for (out, options, keys) in [
        ("ffn", &["--ffn", "50"][..], json!({"n_inner": 50, "n_embd": 32})),
        ("both", &["--heads", "3", "--hidden", "24"], json!({"n_head": 3, "n_embd": 24, "n_inner": 128})),
    ] {
        let line = prune(&folder, "hf", out, options);
        assert!((number(&line, "loss_after") - loss(&folder, out)).abs() < 1e-5, "{out}: {line}");
        let config = config(&folder, out);
        for (key, value) in keys.as_object().unwrap() {
            assert_eq!(&config[key], value, "{out}: {key} of {config}");
        }
    }
    for options in [["--heads", "3"], ["--hidden", "24"]] {
        let ran = folder.run(&[&["prune", "hf", "--out", "o", "--calibration", "text.txt"], &options[..]].concat());
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        assert!(ran.stderr.contains("such as --heads 1 --hidden 8; or prune --ffn"), "{}", ran.stderr);
    }
}

/// Parts that do nothing are the ones that are dropped, and nothing else changes.
#[test]
fn dead_parts_are_dropped_and_the_loss_stays() {
    for (name, sets) in [FAMILIES[0], FAMILIES[3]] {
        let folder = trained(&[&["training.steps=12", "model.ffn_dim=48"], sets].concat());
        let mut weights = read(&folder.join("hf/model.safetensors"));
        let zero = |tensor: &mut (Vec<usize>, Vec<f32>), rows: &[usize], columns: &[usize]| {
            let width = tensor.0[1];
            for (place, value) in tensor.1.iter_mut().enumerate() {
                if rows.contains(&(place / width)) || columns.contains(&(place % width)) {
                    *value = 0.0;
                }
            }
        };
        let (of_ffn, of_hidden) = ([3, 17, 40], [0, 9, 10, 31]);
        // Of four heads, the second, and with two groups its companion in the other one.
        let of_heads: Vec<usize> = if name == "llama" { (8..16).chain(24..32).collect() } else { (8..16).collect() };
        for (tensor, values) in &mut weights {
            match tensor.rsplit('.').nth(1).unwrap() {
                "o_proj" => zero(values, &of_hidden, &of_heads),
                "down_proj" => zero(values, &of_hidden, &of_ffn),
                "embed_tokens" => zero(values, &[], &of_hidden),
                _ => {}
            }
        }
        // The number that norms add to the mean square is not made smaller with the mean.
        folder_with(&folder, "hf", "dead", &weights, json!({"rms_norm_eps": 1e-12}));
        let whole = loss(&folder, "dead");
        let heads = if name == "llama" { "2" } else { "3" };
        for (out, options) in [
            ("ffn", &["--ffn", "45"][..]),
            ("heads", &["--heads", heads]),
            ("hidden", &["--hidden", "28"]),
            ("all", &["--ffn", "45", "--heads", heads, "--hidden", "28"]),
        ] {
            // Heads of Gemma 3 divide the width in its files.
            if name == "gemma3" && out != "ffn" && out != "hidden" {
                continue;
            }
            let line = prune(&folder, "dead", out, options);
            let after = number(&line, "loss_after");
            assert!((after - whole).abs() < 1e-5, "{name}, {out}: {whole}, then {after}");
            assert!((loss(&folder, out) - whole).abs() < 1e-5, "{name}, {out}");
        }
        // Of the MLP exactly the dead channels are missing.
        let living: Vec<usize> = (0..48).filter(|channel| !of_ffn.contains(channel)).collect();
        for (tensor, values) in &mut weights {
            match tensor.rsplit('.').nth(1).unwrap() {
                "gate_proj" | "up_proj" => rows(values, &living),
                "down_proj" => columns(values, &living),
                _ => {}
            }
        }
        assert!(read(&folder.join("ffn/model.safetensors")) == weights, "{name}: others were dropped");
    }
}

/// The most important channels and heads are worth more than as many drawn at random.
#[test]
fn importance_is_better_than_chance() {
    let sets = ["training.steps=150", "model.dim=64", "model.heads=4", "model.ffn_dim=128"];
    let folder = trained(&[&sets[..], &["optimizer.learning_rate=5e-3"]].concat());
    let whole = read(&folder.join("hf/model.safetensors"));
    let (ffn, heads) =
        (prune(&folder, "hf", "ffn", &["--ffn", "64"]), prune(&folder, "hf", "heads", &["--heads", "2"]));
    let (mut of_ffn, mut of_heads) = (0.0, 0.0);
    let draws = 4;
    for seed in 0..draws {
        let mut state = 12_345u64 + seed;
        let mut draw = |all: usize, count: usize| {
            let mut left: Vec<usize> = (0..all).collect();
            while left.len() > count {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                left.remove((state >> 33) as usize % left.len());
            }
            left
        };
        let (mut narrow, mut few) = (whole.clone(), whole.clone());
        for layer in 0..2 {
            let channels = draw(128, 64);
            let heads: Vec<usize> = draw(4, 2).into_iter().flat_map(|head| head * 16..(head + 1) * 16).collect();
            for (tensor, values) in &mut narrow {
                match tensor.strip_prefix(&format!("model.layers.{layer}.mlp.")).unwrap_or_default() {
                    "gate_proj.weight" | "up_proj.weight" => rows(values, &channels),
                    "down_proj.weight" => columns(values, &channels),
                    _ => {}
                }
            }
            for (tensor, values) in &mut few {
                match tensor.strip_prefix(&format!("model.layers.{layer}.self_attn.")).unwrap_or_default() {
                    "o_proj.weight" => columns(values, &heads),
                    "" => {}
                    _ => rows(values, &heads),
                }
            }
        }
        let (narrower, fewer) = (format!("narrow{seed}"), format!("few{seed}"));
        folder_with(&folder, "hf", &narrower, &narrow, json!({"intermediate_size": 64}));
        let keys = json!({"num_attention_heads": 2, "num_key_value_heads": 2});
        folder_with(&folder, "hf", &fewer, &few, keys);
        of_ffn += loss(&folder, &narrower) / draws as f64;
        of_heads += loss(&folder, &fewer) / draws as f64;
    }
    let (before, by_ffn, by_heads) =
        (number(&ffn, "loss_before"), number(&ffn, "loss_after"), number(&heads, "loss_after"));
    println!("whole {before}; --ffn {by_ffn}, at random {of_ffn}; --heads {by_heads}, at random {of_heads}");
    assert!(by_ffn < of_ffn && by_heads < of_heads, "{by_ffn} {of_ffn} {by_heads} {of_heads}");
}

#[test]
fn what_cannot_be_made_narrower_is_refused() {
    let folder = trained(&["training.steps=2", "model.heads=4", "model.kv_heads=2"]);
    folder.write("short.txt", "a few words");
    let text = ["--calibration", "text.txt"];
    let cases: &[(&[&str], i32, &str)] = &[
        (&["--ffn", "0"], 1, "--ffn 0 of a model with 128 channels in each MLP: keep from 1 to 128"),
        (&["--ffn", "129"], 1, "keep from 1 to 128"),
        (&["--ffn", "-1"], 2, "-1"),
        (&["--ffn", "half"], 2, "--ffn"),
        (&["--heads", "0"], 1, "--heads 0 of a model with 4 query heads: keep from 1 to 4"),
        (&["--heads", "5"], 1, "keep from 1 to 4"),
        (
            &["--heads", "3"],
            1,
            "every one of these that is kept keeps the same number; possible for --heads are 1, 2, 4",
        ),
        (&["--hidden", "0"], 1, "--hidden 0 of a model with 32 channels of the residual stream"),
        (&["--hidden", "33"], 1, "keep from 1 to 32"),
        (&["--ffn", "64", "--layers", "2"], 1, "--layers 2 of a model with 2 blocks"),
        (&["--ffn", "64", "--sparsity", "0.5"], 2, "cannot be used with"),
        (&["--heads", "2", "--pattern", "2:4"], 2, "cannot be used with"),
        (&["--hidden", "16", "--sparsity", "0.5"], 2, "cannot be used with"),
        (&["--ffn", "64", "--method", "sparsegpt"], 2, "cannot be used with"),
        (&["--layers", "1", "--method", "magnitude"], 2, "cannot be used with"),
        (&["--ffn", "64", "--calibration", "gone.txt"], 1, "gone.txt"),
        (&["--ffn", "64", "--calibration", "short.txt"], 1, "give more text"),
        (&["--ffn", "64", "--evaluate", "gone.txt"], 1, "gone.txt"),
    ];
    let mut wrong = Vec::new();
    let mut check = |arguments: Vec<&str>, code: i32, says: &str| {
        let ran = folder.run(&arguments);
        let once = ran.stderr.matches("error: ").count() == 1;
        if ran.code != Some(code) || !ran.stderr.contains(says) || !once || ran.stderr.contains("panicked") {
            wrong.push(format!("{arguments:?}: {:?}\n{}", ran.code, ran.stderr));
        }
    };
    for (options, code, says) in cases {
        let text = if options.contains(&"--calibration") { &[][..] } else { &text };
        check([&["prune", "hf", "--out", "o"], text, options].concat(), *code, says);
    }
    for options in [["--ffn", "64"], ["--heads", "2"], ["--hidden", "16"]] {
        let command = [&["prune", "hf", "--out", "o"], &options[..]].concat();
        check(command, 1, "give it text with --calibration FILES");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(!folder.join("o").exists(), "a folder was left");
    folder.run(&["train", "tiny.toml", "--quiet", "--set", "model.family=mixtral", "--set", "run.name=moe"]).ok();
    for options in [["--ffn", "64"], ["--heads", "1"], ["--hidden", "16"]] {
        let ran = folder.run(&[&["prune", "runs/moe", "--out", "o"], &text[..], &options].concat());
        assert!(ran.code == Some(1) && ran.stderr.contains("is a mixture of experts"), "{}", ran.stderr);
    }
}
