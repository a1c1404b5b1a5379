//! Fine-tuning of a Hugging Face folder: texts begin as its tokenizer asks, and an export has all
//! files of the original.

mod common;

use common::Folder;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A folder `hf` of a tiny model, trained for two steps.
fn with_model() -> Folder {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml", "--set", "training.steps=2"]).ok();
    let exported = folder.run(&["export", "runs/tiny", "--out", "hf"]).ok();
    assert!(exported.stdout.contains("of weights in f32, as the run computes,"), "{}", exported.stdout);
    folder
}

fn edit(folder: &Folder, file: &str, change: impl FnOnce(&mut Value)) {
    let path = folder.join(file);
    let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

fn fine_tune(folder: &Folder, name: &str, more: &[&str]) -> common::Ran {
    let config = common::TINY.split_once("[data]").unwrap().1;
    folder.write("tune.toml", format!("[run]\nname = '{name}'\n[model]\npath = 'hf'\n[data]\n{config}"));
    folder.run(&[&["train", "tune.toml", "--set", "training.steps=2"], more].concat())
}

#[test]
fn an_exported_fine_tune_keeps_what_it_came_with() {
    let folder = with_model();
    edit(&folder, "hf/tokenizer_config.json", |config| {
        config["chat_template"] = json!("{% for m in messages %}{{ m.content }}{% endfor %}");
        config["pad_token"] = json!("a");
    });
    folder.write("hf/chat_template.jinja", "{{ messages }}\n");
    folder.write("hf/special_tokens_map.json", "{\"pad_token\": \"a\"}\n");
    let every_token: Vec<u32> = (0..=256).collect();
    let generation = json!({ "eos_token_id": every_token, "temperature": 0.6, "top_p": 0.9, "pad_token_id": 97 });
    folder.write("hf/generation_config.json", generation.to_string());
    edit(&folder, "hf/config.json", |config| {
        config["eos_token_id"] = json!([256, 10]);
        config["pad_token_id"] = json!(97);
    });
    fine_tune(&folder, "tuned", &[]).ok();
    folder.run(&["export", "runs/tuned", "--out", "out"]).ok();
    let names = ["chat_template.jinja", "special_tokens_map.json", "generation_config.json", "tokenizer_config.json"];
    for name in names.into_iter().chain(["tokenizer.json"]) {
        let [came, out] = ["hf", "out"].map(|of| fs::read_to_string(folder.join(of).join(name)).unwrap());
        assert_eq!(came, out, "{name}");
    }
    let config: Value = serde_json::from_slice(&fs::read(folder.join("out/config.json")).unwrap()).unwrap();
    assert_eq!((&config["eos_token_id"], &config["pad_token_id"]), (&json!([256, 10]), &json!(97)));
    // Every end token in generation_config.json ends a text; here all tokens are end tokens.
    let generate = ["generate", "out", "--prompt", "the ", "--tokens", "9"];
    assert_eq!(folder.run(&generate).ok().stdout, "the \n");
    assert!(folder.run(&[&generate[..], &["--ignore-eos"]].concat()).ok().stdout.len() > 5);
    // With another tokenizer the end tokens of the original do not apply.
    fs::copy(folder.join("hf/tokenizer.json"), folder.join("other.json")).unwrap();
    fine_tune(&folder, "other", &["--set", "tokenizer.path=other.json"]).ok();
    assert!(!folder.join("runs/other/generation_config.json").exists());
}

#[test]
fn texts_begin_with_the_bos_token_that_the_tokenizer_asks_for() {
    let folder = with_model();
    edit(&folder, "hf/tokenizer.json", |tokenizer| {
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<|endoftext|>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<|endoftext|>": { "id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"] } },
        });
    });
    let says = "the tokenizer begins each text with <|endoftext|> (256)";
    let eval = |model: &str, more: &[&str]| {
        let ran = folder.run(&[&["eval", model, "--data", "text.txt", "--json"], more].concat()).ok();
        let line: Value = serde_json::from_str(&ran.stdout).unwrap();
        (line["tokens"].as_u64().unwrap(), ran.stderr.contains(says))
    };
    let (with, said) = eval("hf", &[]);
    assert!(said);
    assert_eq!(eval("hf", &["--add-bos", "false"]), (with - 1, false));
    let generate = |more: &[&str]| {
        let arguments = ["generate", "hf", "--prompt", "the ", "--tokens", "30", "--temperature", "0", "--ignore-eos"];
        folder.run(&[&arguments[..], more].concat()).ok()
    };
    assert!(generate(&[]).stderr.contains(says));
    assert!(!generate(&["--add-bos", "false"]).stderr.contains(says));

    // Training texts begin with the same token unless the run is told otherwise, and eval follows
    // the run.
    let tokens = |name: &str, more: &[&str]| {
        let ran = fine_tune(&folder, name, more).ok();
        let line = ran.stderr.lines().chain(ran.stdout.lines()).find(|line| line.contains("tokens for training"));
        let words: Vec<&str> = line.unwrap_or_else(|| panic!("{}", ran.stderr)).split_whitespace().collect();
        let count: u64 = words[words.iter().position(|word| *word == "tokens").unwrap() - 1].parse().unwrap();
        (count, ran.stderr.contains(says))
    };
    let (begun, said) = tokens("begun", &[]);
    assert!(said);
    assert_eq!(tokens("bare", &["--set", "tokenizer.add_bos=false"]), (begun - 1, false));
    assert_eq!(eval("runs/begun", &["--length", "32"]), (with, true));
    assert_eq!(eval("runs/bare", &["--length", "32"]), (with - 1, false));
    assert_eq!(eval("runs/bare", &["--length", "32", "--add-bos", "true"]), (with, true));

    // Token files cannot change, so a key that contradicts them is refused.
    let prepare = ["data", "prepare", "--tokenizer", "hf", "--add-bos", "false", "--out", "data/bare", "text.txt"];
    folder.run(&prepare).ok();
    let data = ["--set", "data.train=['data/bare']", "--set", "data.validation_fraction=auto"];
    let noted = fine_tune(&folder, "noted", &data).ok();
    assert!(noted.stderr.contains("prepare the files again to have the same"), "{}", noted.stderr);
    let refused = fine_tune(&folder, "refused", &[&data[..], &["--set", "tokenizer.add_bos=true"]].concat());
    assert!(refused.code == Some(1) && refused.stderr.contains("tokenizer.add_bos = true, but"), "{}", refused.stderr);
}

#[test]
fn shapes_that_cannot_be_exported_are_named_before_training() {
    let folder = Folder::new();
    let sets = ["--set", "model.qk_norm=true", "--set", "model.mlp_bias=true", "--set", "training.steps=2"];
    let says = "`trainyard export` will refuse it: no supported Hugging Face model has query/key norms together with";
    let checked = folder.run(&[&["config", "check", "tiny.toml"], &sets[..]].concat()).ok();
    assert!(checked.stdout.contains(says), "{}", checked.stdout);
    let trained = folder.run(&[&["train", "tiny.toml"], &sets[..]].concat()).ok();
    assert!(trained.stderr.contains(says), "{}", trained.stderr);
    let refused = folder.run(&["export", "runs/tiny", "--out", "hf"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("query/key norms together with"), "{}", refused.stderr);
}

/// Folders that transformers wrote, of families whose blocks differ from Llama's: they train, and
/// what is exported computes and generates what the run does.
#[test]
fn folders_of_every_family_train_are_exported_and_generate() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/golden");
    let config = common::TINY.split_once("[data]").unwrap().1;
    for (family, model_type) in [("gemma3", "gemma3_text"), ("olmo2", "olmo2"), ("phi3", "phi3")] {
        let folder = Folder::new();
        let path = goldens.join(family).display().to_string();
        let head =
            format!("[run]\nname = 'tuned'\n[model]\npath = '{path}'\n[tokenizer]\nkind = 'characters'\n[data]\n");
        folder.write("tune.toml", head + config);
        folder.run(&["train", "tune.toml", "--set", "training.steps=8"]).ok();
        let metrics = fs::read_to_string(folder.join("runs/tuned/metrics.jsonl")).unwrap();
        let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let losses: Vec<f64> = lines.filter_map(|line| line["loss"].as_f64()).collect();
        assert!(losses.len() >= 2 && losses[losses.len() - 1] < 0.8 * losses[0], "{family}: {losses:?}");

        folder.run(&["export", "runs/tuned", "--out", "hf"]).ok();
        let [came, out] = [Path::new(&path).to_owned(), folder.join("hf")].map(|folder| {
            let config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
            ["model_type", "architectures", "rope_parameters", "layer_types"].map(|key| config[key].clone())
        });
        assert_eq!(came[0], json!(model_type));
        assert_eq!(came, out, "{family}");

        let of = |model: &str| {
            let eval = ["eval", model, "--data", "text.txt", "--length", "32", "--dtype", "f32", "--json"];
            let line: Value = serde_json::from_str(&folder.run(&eval).ok().stdout).unwrap();
            let generate = ["generate", model, "--prompt", "the ", "--tokens", "20", "--temperature", "0"];
            let generated = folder.run(&[&generate[..], &["--dtype", "f32", "--ignore-eos"]].concat()).ok();
            (line["loss"].as_f64().unwrap(), generated.stdout)
        };
        let (run, exported) = (of("runs/tuned"), of("hf"));
        assert_eq!(run, exported, "{family}");
        assert!(run.1.len() > "the \n".len(), "{family}: {run:?}");
    }
}

/// A GGUF file instead of a folder: it trains, is evaluated and generates, and a tokenizer beside
/// it is its own.
#[test]
fn a_gguf_file_trains_is_evaluated_exported_and_generates() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/golden/gguf/gemma3.gguf");
    let folder = Folder::new();
    fs::create_dir(folder.join("m")).unwrap();
    fs::copy(golden, folder.join("m/gemma3.gguf")).unwrap();
    let config = common::TINY.split_once("[data]").unwrap().1;
    let head = "[run]\nname = 'tuned'\n[model]\npath = 'm/gemma3.gguf'\n[data]\n";
    folder.write("tune.toml", format!("{head}{config}"));
    let refused = folder.run(&["train", "tune.toml", "--set", "training.steps=4"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("tokenizer"), "{}", refused.stderr);
    let sets = ["--set", "training.steps=8", "--set", "tokenizer.kind=characters"];
    let trained = folder.run(&[&["train", "tune.toml"], &sets[..]].concat()).ok();
    assert!(trained.stderr.contains("tensors are quantised and were decoded to f32"), "{}", trained.stderr);
    fs::copy(folder.join("runs/tuned/tokenizer.json"), folder.join("m/tokenizer.json")).unwrap();

    let loss = |model: &str| {
        let eval = ["eval", model, "--data", "text.txt", "--length", "32", "--dtype", "f32", "--json"];
        let line: Value = serde_json::from_str(&folder.run(&eval).ok().stdout).unwrap();
        line["loss"].as_f64().unwrap()
    };
    let (before, after) = (loss("m/gemma3.gguf"), loss("runs/tuned"));
    assert!(after < 0.8 * before, "{before} {after}");
    let generate = |model: &str| {
        let generate = ["generate", model, "--prompt", "the ", "--tokens", "20", "--temperature", "0", "--ignore-eos"];
        folder.run(&generate).ok().stdout
    };
    assert!(generate("m/gemma3.gguf").len() > "the \n".len());
    // The file as a Hugging Face folder is the same model.
    folder.run(&["export", "m/gemma3.gguf", "--out", "hf"]).ok();
    assert_eq!(loss("hf"), before);
    let plan =
        ["plan", "--model", "m/gemma3.gguf", "--global-batch", "4", "--sequence-length", "32", "--cluster", "1x8xH100"];
    folder.run(&plan).ok();
    let misplaced = folder.run(&["train", "m/gemma3.gguf"]);
    assert!(misplaced.stderr.contains("is a GGUF model"), "{}", misplaced.stderr);
}

/// A run as a GGUF file, with its tokenizer inside: the same loss and the same text; and what is
/// refused.
#[test]
fn a_run_is_exported_as_a_gguf_file() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml", "--set", "run.name=one"]).ok();
    let loss = |model: &str| {
        let eval = ["eval", model, "--data", "text.txt", "--length", "16", "--dtype", "f32", "--json"];
        let line: Value = serde_json::from_str(&folder.run(&eval).ok().stdout).unwrap();
        line["loss"].as_f64().unwrap()
    };
    let generate = |model: &str| {
        let generate = ["generate", model, "--prompt", "the ", "--tokens", "20", "--temperature", "0", "--ignore-eos"];
        folder.run(&generate).ok().stdout
    };
    let export = |arguments: &[&str]| folder.run(&[&["export", "runs/one", "--out"], arguments].concat());
    let written = export(&["one.gguf", "--dtype", "f32"]).ok().stdout;
    assert!(written.contains("of weights in F32, tokenizer in one.gguf"), "{written}");
    assert_eq!((loss("one.gguf"), generate("one.gguf")), (loss("runs/one"), generate("runs/one")));
    // Its tokenizer serves for other texts.
    for tokenizer in ["one.gguf", "runs/one/tokenizer.json"] {
        folder.run(&["data", "prepare", "--tokenizer", tokenizer, "--out", tokenizer, "text.txt"]).ok();
    }
    let tokens = ["one.gguf", "runs/one/tokenizer.json"].map(|of| fs::read(folder.join(&format!("{of}.train.bin"))));
    assert_eq!(tokens[0].as_ref().unwrap(), tokens[1].as_ref().unwrap());
    let written = export(&["eight.gguf", "--quantize", "q8_0"]).ok().stdout;
    assert!(written.contains("of weights in Q8_0"), "{written}");
    let (eight, whole) = (loss("eight.gguf"), loss("one.gguf"));
    assert!(eight != whole && (eight / whole - 1.0).abs() < 0.01, "{eight} {whole}");
    // Written over, and from a file to a file.
    export(&["one.gguf", "--format", "gguf", "--dtype", "f32", "--no-tokenizer"]).ok();
    let without = folder.run(&["generate", "one.gguf", "--prompt", "the "]);
    assert!(without.code != Some(0) && without.stderr.contains("tokenizer"), "{}", without.stderr);
    folder.run(&["export", "eight.gguf", "--out", "again.gguf", "--dtype", "f32"]).ok();
    assert_eq!(loss("again.gguf"), eight);
    fs::create_dir(folder.join("folder.gguf")).unwrap();
    for (arguments, words) in [
        (&["one.bin", "--format", "gguf"][..], "one.bin does not end with .gguf"),
        (&["folder.gguf"], "folder.gguf is a folder, and a GGUF file is one file"),
        (&["hf", "--quantize", "q8_0"], "--quantize rounds to the blocks of GGUF files: give --format gguf"),
        (&["hf", "--no-tokenizer"], "--no-tokenizer is of GGUF files"),
        (&["x.gguf", "--quantize", "q3_k"], "[possible values: q8_0, q5_1, q5_0, q4_1, q4_0]"),
        (&["x.gguf", "--quantize", "q8_0", "--dtype", "f32"], "cannot be used with"),
        (&["x.gguf", "--adapter"], "--adapter writes a PEFT folder"),
        (&["none/x.gguf"], "creating none/x"),
    ] {
        let ran = export(arguments);
        assert!(ran.code != Some(0) && ran.stderr.contains(words), "{arguments:?}: {}", ran.stderr);
    }
    // Characters have no form in the file.
    folder.run(&["train", "tiny.toml", "--set", "run.name=two", "--set", "tokenizer.kind=characters"]).ok();
    let refused = folder.run(&["export", "runs/two", "--out", "two.gguf"]);
    assert!(refused.stderr.contains("byte-level BPE is written") && !folder.join("two.gguf").exists(), "{refused:?}");
    folder.run(&["export", "runs/two", "--out", "two.gguf", "--no-tokenizer"]).ok();
}

/// Adapters of different ranks and layers on one base: each computes what it does by itself, and
/// their sum is one adapter.
#[test]
fn adapters_of_one_base_take_turns_and_become_one() {
    let folder = with_model();
    for (name, rank, targets) in [("a", 2, "['q_proj','v_proj']"), ("b", 4, "['v_proj','down_proj']")] {
        let sets = ["fine_tuning.adapter=lora", "training.steps=4", "optimizer.learning_rate=0.05"].map(str::to_owned);
        let own = [format!("fine_tuning.rank={rank}"), format!("fine_tuning.targets={targets}")];
        let own =
            own.into_iter().chain([format!("training.seed={rank}"), format!("fine_tuning.alpha={}", 3 * rank + 1)]);
        let sets: Vec<String> = sets.into_iter().chain(own).flat_map(|set| ["--set".to_owned(), set]).collect();
        fine_tune(&folder, name, &sets.iter().map(String::as_str).collect::<Vec<_>>()).ok();
        folder.run(&["export", &format!("runs/{name}"), "--out", name, "--adapter"]).ok();
    }
    let eval = |arguments: &[&str]| -> Value {
        let more = ["--data", "text.txt", "--length", "16", "--json"];
        serde_json::from_str(&folder.run(&[&["eval"], arguments, &more].concat()).ok().stdout).unwrap()
    };
    let alone = ["hf", "a", "b"].map(|model| eval(&[model])["loss"].as_f64().unwrap());
    assert!(alone[1] != alone[0] && alone[2] != alone[1], "{alone:?}");
    let close = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-6, "{got} {want}");
    let table = eval(&["hf", "--adapter", "a", "--adapter", "b"]);
    assert_eq!(["a", "b"].map(|name| json!(name)), [1, 2].map(|row| table["adapters"][row]["adapter"].clone()));
    alone.iter().enumerate().for_each(|(row, want)| close(table["adapters"][row]["loss"].as_f64().unwrap(), *want));
    let shown = folder.run(&["eval", "hf", "--adapter", "b", "--data", "text.txt", "--length", "16"]).ok().stdout;
    assert!(shown.contains("no adapter") && shown.contains(&format!("{:.4}", alone[2])), "{shown}");
    let generate = |arguments: &[&str]| {
        let more = ["--prompt", "the ", "--tokens", "12", "--temperature", "0", "--ignore-eos"];
        folder.run(&[&["generate"], arguments, &more].concat()).ok().stdout
    };
    let want = format!("b:\n{}a:\n{}", generate(&["b"]), generate(&["a"]));
    assert_eq!(generate(&["hf", "--adapter", "b", "--adapter", "a"]), want);

    let merge = |arguments: &[&str]| folder.run(&[&["merge", "a", "b"], arguments].concat());
    let said = merge(&["--method", "cat", "--weights", "1,0", "--out", "only-a"]).ok().stdout;
    assert!(said.contains("cat of 2 adapters: rank 6, in only-a"), "{said}");
    close(eval(&["only-a"])["loss"].as_f64().unwrap(), alone[1]);
    merge(&["--method", "cat", "--weights", "0.5,0.5", "--out", "both"]).ok();
    let said = merge(&["--method", "svd", "--weights", "0.5,0.5", "--rank", "6", "--out", "again"]).ok().stdout;
    assert!(said.contains("rank 6, without 0.00 % of the norm"), "{said}");
    let [both, again] = ["both", "again"].map(|name| eval(&[name])["loss"].as_f64().unwrap());
    close(again, both);
    assert!(both != alone[1] && both != alone[2]);
    for (arguments, words) in [
        (&["eval", "hf", "--adapter", "hf", "--data", "text.txt"][..], "hf is no PEFT adapter"),
        (&["eval", "runs/a", "--adapter", "a", "--data", "text.txt"], "runs/a is a run"),
        (&["eval", "hf", "a", "--adapter", "a", "--data", "text.txt"], "adapters are of one"),
        (&["eval", "hf", "--adapter", "a", "--checkpoint", "2", "--data", "text.txt"], "has no checkpoints"),
        (&["generate", "hf", "--adapter", "none", "--prompt", "x"], "none is no PEFT adapter"),
        (&["merge", "a", "b", "--method", "linear", "--out", "x"], "these have 2, 4: take cat or svd"),
        (&["merge", "a", "hf", "--method", "cat", "--out", "x"], "hf is no PEFT adapter"),
        (&["merge", "hf", "hf", "--rank", "3", "--out", "x"], "--rank is that of an adapter"),
        (&["merge", "a", "b", "--method", "svd", "--dtype", "f32", "--out", "x"], "--base and --dtype are of models"),
        (&["merge", "a", "b", "--method", "cat", "--out", "hf"], "exists already"),
    ] {
        let ran = folder.run(arguments);
        assert!(ran.code == Some(1) && ran.stderr.contains(words), "{arguments:?}: {:?} {}", ran.code, ran.stderr);
    }
    assert!(!folder.join("x").exists());
}

/// LoRA and DoRA on a base in 4 and 8 bits: a resumed run ends as one that was not interrupted, the
/// merged model computes what the run does, adapters are written and read, and what does not go
/// together is refused.
#[test]
fn a_base_in_few_bits_is_trained_resumed_merged_and_checked() {
    let folder = with_model();
    let loss = |model: &str| {
        let eval = ["eval", model, "--data", "text.txt", "--length", "16", "--dtype", "f32", "--json"];
        let line: Value = serde_json::from_str(&folder.run(&eval).ok().stdout).unwrap();
        line["loss"].as_f64().unwrap()
    };
    for (name, base) in [("lora", "nf4"), ("dora", "int8")] {
        let [adapter, base] = [format!("fine_tuning.adapter={name}"), format!("fine_tuning.base_dtype={base}")];
        let sets = ["--set", &adapter, "--set", &base, "--set", "training.steps=6"];
        let keep = ["--set", "checkpoint.interval_steps=3"];
        let trained = fine_tune(&folder, name, &[&sets[..], &keep].concat()).ok();
        assert!(trained.stderr.contains("trained:"), "{}", trained.stderr);
        let run = format!("runs/{name}");
        let whole = loss(&run);
        folder.run(&["train", "--resume", &run, "--checkpoint", "3"]).ok();
        assert_eq!(loss(&run), whole, "{name}");
        let changed = folder.run(&["train", "--resume", &run, "--set", "fine_tuning.base_dtype=compute"]);
        assert!(changed.stderr.contains("what it trains was decided when it began"), "{}", changed.stderr);
        folder.run(&["export", &run, "--out", &format!("{name}-merged"), "--dtype", "f32"]).ok();
        let merged = loss(&format!("{name}-merged"));
        assert!((merged / whole - 1.0).abs() < 1e-6, "{name}: {merged} {whole}");
        let adapters = format!("{name}-adapter");
        folder.run(&["export", &run, "--out", &adapters, "--adapter"]).ok();
        let from = format!("fine_tuning.from={adapters}");
        let again = format!("{name}-again");
        let rate = ["--set", &from, "--set", "optimizer.learning_rate=1e-30", "--set", "training.steps=1"];
        fine_tune(&folder, &again, &[&sets[..], &rate].concat()).ok();
        let continued = loss(&format!("runs/{again}"));
        assert!((continued / whole - 1.0).abs() < 1e-6, "{name}: {continued} {whole}");
    }
    let lora = ["--set", "fine_tuning.adapter=lora", "--set", "fine_tuning.base_dtype=nf4"];
    let stage = ["--set", "parallel.ranks=2", "--set", "parallel.zero_stage=3"];
    let twice = [&lora[..], &stage, &["--set", "compression.parameters=int8"]].concat();
    for (sets, words) in [
        (&lora[2..], "needs something frozen"),
        (&twice[..], "compression.parameters = \"none\""),
        (
            &[&lora[..], &["--set", "memory.offload.parameters=disk"]].concat()[..],
            "memory.offload.parameters = \"none\"",
        ),
        (&["--set", "fine_tuning.adapter=lora", "--set", "fine_tuning.from=dora-adapter"][..], "of kind \"dora\""),
    ] {
        let refused = fine_tune(&folder, "refused", sets);
        assert!(refused.code != Some(0) && refused.stderr.contains(words), "{sets:?}: {}", refused.stderr);
    }
}

/// A base in few bits in shards: a run on one rank goes on with two and with four shards, from its
/// checkpoint, and ends with the same adapters.
#[test]
fn a_base_in_few_bits_goes_on_with_another_number_of_shards() {
    let folder = with_model();
    for (name, base) in [("lora", "nf4"), ("dora", "int8")] {
        let sets = [
            format!("fine_tuning.adapter={name}"),
            format!("fine_tuning.base_dtype={base}"),
            "training.elastic_bits=true".to_owned(),
            "training.global_batch_size=4".to_owned(),
            "training.micro_batch_size=1".to_owned(),
            "training.steps=6".to_owned(),
            "checkpoint.interval_steps=3".to_owned(),
        ];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        fine_tune(&folder, name, &sets).ok();
        let run = format!("runs/{name}");
        let adapter = |out: &str| {
            folder.run(&["export", &run, "--out", out, "--adapter"]).ok();
            fs::read(folder.join(out).join("adapter_model.safetensors")).unwrap()
        };
        let whole = adapter(&format!("{name}-1"));
        for ranks in ["2", "4"] {
            let ranks_set = format!("parallel.ranks={ranks}");
            let stage = ["--set", "parallel.zero_stage=3", "--set", &ranks_set];
            folder.run(&[&["train", "--resume", &run, "--checkpoint", "3"], &stage[..]].concat()).ok();
            assert!(adapter(&format!("{name}-{ranks}")) == whole, "{name} on {ranks} ranks");
        }
    }
}

/// Magnitudes on ranks that share products: the adapters are those of one rank but for rounding, in
/// a run that goes on with another division too.
#[test]
fn magnitudes_train_on_parts_of_products() {
    let folder = with_model();
    let dora = ["--set", "fine_tuning.adapter=dora", "--set", "training.steps=6", "--set", "precision.compute=f32"];
    let tensor = ["--set", "parallel.ranks=2", "--set", "parallel.tensor_parallel_degree=2"];
    let keep = ["--set", "checkpoint.interval_steps=3"];
    fine_tune(&folder, "one", &[&dora[..], &keep].concat()).ok();
    fine_tune(&folder, "two", &[&dora[..], &keep, &tensor].concat()).ok();
    let adapter = |run: &str, out: &str| {
        folder.run(&["export", &format!("runs/{run}"), "--out", out, "--adapter"]).ok();
        let bytes = fs::read(folder.join(out).join("adapter_model.safetensors")).unwrap();
        let head = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let values = bytes[head..].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        values.collect::<Vec<f32>>()
    };
    let one = adapter("one", "one-adapter");
    let close = |two: &[f32]| {
        let apart = one.iter().zip(two).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
        assert!(one.len() == two.len() && apart < 2e-3, "{apart}");
    };
    close(&adapter("two", "two-adapter"));
    folder.run(&[&["train", "--resume", "runs/one", "--checkpoint", "3"], &tensor[..]].concat()).ok();
    close(&adapter("one", "one-on-two"));
}

/// A PEFT folder instead of a model: it is evaluated, generates and is exported with the model that
/// it was made for.
#[test]
fn a_peft_folder_is_evaluated_generates_and_is_merged() {
    let folder = with_model();
    fine_tune(&folder, "lora", &["--set", "fine_tuning.adapter=dora", "--set", "training.steps=4"]).ok();
    folder.run(&["export", "runs/lora", "--out", "adapter", "--adapter"]).ok();
    let loss = |model: &str| {
        let eval = ["eval", model, "--data", "text.txt", "--length", "16", "--dtype", "f32", "--json"];
        let line: Value = serde_json::from_str(&folder.run(&eval).ok().stdout).unwrap();
        line["loss"].as_f64().unwrap()
    };
    let generate = |model: &str| {
        let generate = ["generate", model, "--prompt", "the ", "--tokens", "20", "--temperature", "0"];
        folder.run(&[&generate[..], &["--ignore-eos", "--dtype", "f32"]].concat()).ok().stdout
    };
    assert_eq!((loss("adapter"), generate("adapter")), (loss("runs/lora"), generate("runs/lora")));
    assert_ne!(loss("adapter"), loss("hf"));
    folder.run(&["export", "adapter", "--out", "merged", "--dtype", "f32"]).ok();
    assert!((loss("merged") / loss("adapter") - 1.0).abs() < 1e-6);
    folder.run(&["export", "adapter", "--out", "again", "--adapter"]).ok();
    assert_eq!(loss("again"), loss("adapter"));
    edit(&folder, "adapter/adapter_config.json", |config| config["base_model_name_or_path"] = json!("org/model"));
    let refused = folder.run(&["eval", "adapter", "--data", "text.txt"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("adapts the model `org/model`"), "{}", refused.stderr);
}
