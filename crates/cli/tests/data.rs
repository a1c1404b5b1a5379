//! `data dedup`, `filter`, `mix`, `bench` and `warm` from text to training, and their refusals.

mod common;

use common::Folder;
use serde_json::Value;
use std::fs;

/// Texts with copies, near copies, another language and an address.
fn corpus(folder: &Folder) {
    let words =
        ["the", "rank", "gathers", "and", "reduces", "of", "each", "shard", "that", "we", "have", "with", "loss"];
    let text = |seed: usize| -> String {
        let mut state = seed as u64 + 1;
        let mut word = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            words[(state >> 33) as usize % words.len()]
        };
        (0..90).map(&mut word).collect::<Vec<_>>().join(" ") + "."
    };
    let mut lines = String::new();
    for document in 0..40 {
        let body = match document {
            7 => text(3),
            9 => text(4).replace("loss.", "losses.") + " Yes.",
            11 => "Dies ist ein deutscher Satz über alle Züge, die am Abend aus der Stadt fahren.".to_owned(),
            13 => text(13) + " Write to jane@example.net.",
            _ => text(document),
        };
        lines += &format!("{}\n", serde_json::json!({ "text": body, "id": document }));
    }
    folder.write("web.jsonl", lines);
    folder.write("code.txt", "fn main() { println!(\"hello\"); }\n".repeat(40));
}

#[test]
fn text_is_cleaned_mixed_prepared_and_trained_on() {
    let folder = Folder::new();
    corpus(&folder);
    let shown = folder.run(&["data", "dedup", "web.jsonl", "--out", "d/unique"]).ok().stdout;
    assert!(shown.contains("dropped: exact duplicate") && shown.contains("text: d/unique.jsonl.zst"), "{shown}");
    let shown = folder.run(&["data", "inspect", "d/unique.dropped"]).ok().stdout;
    assert!(shown.contains("dropped: exact duplicate") && shown.contains("document 0: d/unique.dropped"), "{shown}");
    let filter =
        ["data", "filter", "d/unique.jsonl.zst", "--language", "en", "--language-confidence", "0.1", "--mask-pii"];
    let shown = folder.run(&[&filter[..], &["--out", "d/english"]].concat()).ok().stdout;
    assert!(shown.contains("dropped: language: deu") && shown.contains("e-mail addresses masked"), "{shown}");
    let mix = ["data", "mix", "d/english.jsonl.zst=3", "code.txt=1", "--bytes", "20KB", "--out", "d/mixed"];
    let shown = folder.run(&mix).ok().stdout;
    assert!(shown.contains("code.txt") && shown.contains("% of the text"), "{shown}");
    let shown = folder.run(&["data", "inspect", "d/mixed.jsonl.zst", "--sample", "1", "--json"]).ok().stdout;
    assert!(serde_json::from_str::<serde_json::Value>(&shown).unwrap()["sample"]["text"].is_string());

    // A pattern, quoted as in a shell.
    let prepare = ["data", "prepare", "--tokenizer", "bytes", "--out", "d/tokens", "d/m*.jsonl.zst"];
    folder.run(&prepare).ok();
    let shown = folder.run(&["data", "warm", "d/tokens"]).ok().stdout;
    assert!(shown.contains("d/tokens.train: ") && shown.contains("read in"), "{shown}");
    let bench = ["data", "bench", "d/tokens", "--seconds", "0.05", "--sequence-length", "32"];
    let shown = folder.run(&bench).ok().stdout;
    assert!(shown.contains("tokens/s a core") && shown.contains("best_fit"), "{shown}");
    let shown = folder.run(&[&bench[..], &["--json"]].concat()).ok().stdout;
    let figures: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert!(figures[3]["packing"]["padded"].as_u64().is_some(), "{figures}");
    folder
        .run(&[
            "train",
            "tiny.toml",
            "--set",
            "data.train=d/tokens",
            "--set",
            "data.sampling=best_fit",
            "--set",
            "data.warm=true",
            "--set",
            "data.token_noise=0.01",
            "--set",
            "data.curriculum_start=8",
            "--set",
            "data.curriculum_steps=6",
            "--set",
            "tokenizer.kind=bytes",
            "--set",
            "data.validation_fraction=0.01",
            "--set",
            "training.steps=8",
        ])
        .ok();
    let shown = folder.run(&["data", "inspect", "runs/tiny"]).ok().stdout;
    assert!(shown.contains("whole documents by best fit"), "{shown}");
}

#[test]
fn wrong_input_is_said_clearly() {
    let folder = Folder::new();
    corpus(&folder);
    folder.write("empty.jsonl", "");
    folder.write("bad.jsonl", "{\"text\": \"good\"}\n{\"text\": 3}\n");
    folder.write("bad.parquet", "PAR1");
    folder.write("bad.tar", [7; 1024]);
    folder.write("bad.mds", [255; 16]);
    folder.write("llm.bin", [&20_240_520u32.to_le_bytes()[..], &[0; 40]].concat());
    folder.run(&["data", "prepare", "--tokenizer", "bytes", "--out", "t", "text.txt"]).ok();
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&["dedup", "--out", "o"], 2, &["<TEXT>"]),
        (&["dedup", "web.jsonl"], 2, &["--out"]),
        (&["dedup", "gone.jsonl", "--out", "o"], 1, &["gone.jsonl", "looked for at"]),
        (&["dedup", "gone/*.tar", "--out", "o"], 1, &["gone/*.tar", "matches no file", "quote it"]),
        (&["dedup", "empty.jsonl", "--out", "o"], 1, &["empty.jsonl", "is empty"]),
        (&["dedup", "bad.jsonl", "--out", "o"], 1, &["bad.jsonl:2", "not a string"]),
        (&["dedup", "bad.parquet", "--out", "o"], 1, &["bad.parquet", "not a Parquet file"]),
        (&["dedup", "bad.tar", "--out", "o"], 1, &["bad.tar", "not a tar file"]),
        (&["dedup", "bad.mds", "--out", "o"], 1, &["bad.mds", "not an MDS shard"]),
        (&["dedup", "web.jsonl", "--out", "o", "--text-field", "body"], 1, &["no field \"body\" (fields: text, id)"]),
        (&["dedup", "web.jsonl", "--out", "o", "--memory", "lots"], 2, &["a size such as"]),
        (&["dedup", "web.jsonl", "--out", "o", "--memory", "1MiB"], 1, &["memory", "too few"]),
        (&["dedup", "web.jsonl", "--out", "o", "--bands", "0"], 1, &["bands: is 0; take 1 to 256"]),
        (&["dedup", "web.jsonl", "--out", "o", "--exact", "--rows", "3"], 2, &["cannot be used with"]),
        (&["dedup", "web.jsonl", "--out", "text.txt/o"], 1, &["cannot create text.txt"]),
        (&["filter", "web.jsonl", "--out", "o"], 1, &["nothing is asked for"]),
        (&["filter", "web.jsonl", "--out", "o", "--rules", "gofer"], 1, &["no rule \"gofer\"", "gopher-quality"]),
        (&["filter", "web.jsonl", "--out", "o", "--language", "xx"], 1, &["--language", "no known language"]),
        (
            &["filter", "web.jsonl", "--out", "o", "--language", "en", "--language-confidence", "-1"],
            1,
            &["language_confidence: is -1"],
        ),
        (&["filter", "web.jsonl", "--out", "o", "--language-confidence", "0.5"], 2, &["--language"]),
        (&["mix", "web.jsonl", "--out", "o"], 1, &["\"web.jsonl\" has no weight", "TEXT=WEIGHT"]),
        (&["mix", "web.jsonl=much", "--out", "o"], 1, &["\"much\" is not a number"]),
        (&["mix", "web.jsonl=0", "--out", "o"], 1, &["0 is not a positive number"]),
        (&["mix", "web.jsonl=1", "--out", "o", "--bytes", "0"], 2, &["0 bytes hold nothing"]),
        (&["mix", "gone.jsonl=1", "--out", "o"], 1, &["gone.jsonl"]),
        (&["bench", "text.txt"], 1, &["text.txt names no token files", "data prepare"]),
        (&["bench", "t", "--seconds", "0"], 1, &["--seconds 0 is not between"]),
        (&["bench", "t", "--sequence-length", "100000000"], 1, &["sequence_length"]),
        (&["bench", "t", "--micro-batch-size", "0"], 1, &["micro_batch_size"]),
        (&["bench", "llm.bin"], 1, &["llm.bin", "header of 1024 bytes"]),
        (&["warm", "gone"], 1, &["gone names no token files"]),
        (&["inspect", "web.jsonl", "--sample", "99"], 1, &["--sample 99 does not exist", "40 documents"]),
        (&["inspect", "bad.tar"], 1, &["not a tar file"]),
        (&["inspect", "web.jsonl", "--set", "training.seed=1"], 1, &["--set changes a configuration", "is text"]),
        (&["inspect", "web.jsonl", "--tokenizer", "t"], 1, &["--tokenizer is for token files", "is text"]),
        (&["inspect", "t", "--text-field", "body"], 1, &["--text-field is for text", "names token files"]),
        (&["inspect", "tiny.toml", "--text-field", "body"], 1, &["--text-field is for text", "data.text_field"]),
    ];
    let mut wrong = Vec::new();
    for (arguments, code, says) in cases {
        let ran = folder.run(&[&["data"], *arguments].concat());
        let missing: Vec<_> = says.iter().filter(|part| !ran.stderr.contains(**part)).collect();
        if ran.code != Some(*code) || !missing.is_empty() || ran.stderr.contains("panicked") {
            wrong.push(format!("{arguments:?}: exit code {:?}, without {missing:?}\n{}", ran.code, ran.stderr));
        }
    }
    for (sets, says) in [
        (&["data.sampling=best_fit", "data.shuffle=false"][..], "data.shuffle has no effect"),
        (&["data.fim_rate=0.5"], "no tokens for it"),
        (&["data.fim_rate=2"], "data.fim_rate = 2 is out of range"),
        (&["data.token_noise=-1"], "data.token_noise = -1 is out of range"),
        (&["data.curriculum_start=8"], "needs data.curriculum_steps"),
        (&["data.curriculum_steps=8"], "there is no data.curriculum_start"),
        (&["data.curriculum_start=64", "data.curriculum_steps=8"], "curriculum_start: is 64"),
        (&["data.train=gone/*.jsonl"], "gone/*.jsonl"),
        (&["data.train=[{ path = '*.idx', weight = 1 }]"], "cannot share a weight"),
        (&["data.train=*t*"], "matches token files and others, such as "),
        (&["data.train=t.*.bin", "data.validation_fraction=0.5"], "cannot be had of t.train"),
        (&["data.train=t.*.bin", "data.validation_fraction=0.01"], "t.validation, which was held back to validate"),
    ] {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let ran = folder.run(&[&["train", "tiny.toml"], &sets[..]].concat());
        if ran.code != Some(1) || !ran.stderr.contains(says) {
            wrong.push(format!("{sets:?}: exit code {:?}, without {says:?}\n{}", ran.code, ran.stderr));
        }
    }
    assert!(wrong.is_empty(), "{} complaints\n\n{}", wrong.len(), wrong.join("\n"));
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("o.")), "refusals leave no files: {left:?}");
}

#[test]
fn every_validation_text_has_a_loss_of_its_own() {
    let folder = Folder::new();
    folder.write("one.txt", "the rank of a shard is a batch\n".repeat(40));
    folder.write("two.txt", "1234567890 0987654321\n".repeat(90));
    let sets =
        ["data.validation=['one.txt', 'two.txt']", "data.validation_fraction=auto", "evaluation.tokens_max=auto"];
    let sets = sets.iter().flat_map(|set| ["--set", set]).chain(["--set", "evaluation.interval_steps=6"]);
    let ran = folder.run(&["train", "tiny.toml"].into_iter().chain(sets).collect::<Vec<_>>()).ok();
    assert!(ran.stderr.contains("(one "), "{}", ran.stderr);
    let lines = fs::read_to_string(folder.join("runs/tiny/evaluations.jsonl")).unwrap();
    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let [one, two] = [0, 1].map(|place| &last["texts"][place]);
    assert_eq!((&one["name"], &two["name"]), (&"one".into(), &"two".into()));
    let tokens = [one, two].map(|text| number(&text["tokens"]));
    let mean = (number(&one["loss"]) * tokens[0] + number(&two["loss"]) * tokens[1]) / (tokens[0] + tokens[1]);
    assert_eq!(tokens[0] + tokens[1], number(&last["tokens"]));
    assert!((mean - number(&last["loss"])).abs() < 1e-9 && one["loss"] != two["loss"], "{last}");

    // `eval` says the same of each file, together and by itself.
    let eval = |files: &[&str]| -> Value {
        let found = folder.run(&[&["eval", "runs/tiny", "--json", "--data"], files].concat()).ok().stdout;
        serde_json::from_str(&found).unwrap()
    };
    let both = eval(&["one.txt", "two.txt"]);
    for (place, file) in ["one.txt", "two.txt"].into_iter().enumerate() {
        let alone = eval(&[file]);
        assert_eq!(alone["texts"], Value::Array(Vec::new()));
        assert_eq!((&both["texts"][place]["name"], &both["texts"][place]["loss"]), (&file.into(), &alone["loss"]));
        assert!((number(&alone["loss"]) - number(&last["texts"][place]["loss"])).abs() < 1e-6, "{alone} {last}");
    }
}

/// Two classes of small files, from the numbers that decoding is compared with.
fn images(folder: &Folder) {
    let golden: Value = serde_json::from_str(include_str!("../../data/tests/golden/images.json")).unwrap();
    for (number, file) in golden["files"].as_array().unwrap().iter().enumerate() {
        let (name, hex) = (file["name"].as_str().unwrap(), file["bytes"].as_str().unwrap());
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        let class = ["cat", "dog"][number % 2];
        fs::create_dir_all(folder.join(&format!("photos/{class}"))).unwrap();
        folder.write(&format!("photos/{class}/{name}"), bytes);
    }
}

#[test]
fn images_are_inspected_and_their_loader_is_measured() {
    let folder = Folder::new();
    images(&folder);
    let inspect = ["data", "inspect", "--images", "photos"];
    let shown = folder.run(&inspect).ok().stdout;
    assert!(shown.contains("images       22 in 2 classes"), "{shown}");
    assert!(shown.contains("width 4 to 18, height 4 to 18 pixels (of 22 decoded)"), "{shown}");
    assert!(shown.contains("class        cat: 11 images") && !shown.contains("invalid"), "{shown}");
    let bench = ["data", "bench", "--images", "photos", "--image-size", "32", "--seconds", "0.1", "--json"];
    let figures: Value = serde_json::from_str(&folder.run(&bench).ok().stdout).unwrap();
    assert!(figures["images_per_second"].as_f64().unwrap() > 0.0, "{figures}");
    folder.write("photos/cat/bad.jpg", "no image");
    let shown = folder.run(&inspect).ok().stdout;
    assert!(shown.contains("invalid      photos/cat/bad.jpg: is neither JPEG, PNG nor WebP; repair"), "{shown}");
    let refused = folder.run(&["data", "bench", "--images", "photos", "--patch-size", "15"]);
    assert_ne!(refused.code, Some(0));
    assert!(refused.stderr.contains("does not divide the image size 224"), "{}", refused.stderr);
}
