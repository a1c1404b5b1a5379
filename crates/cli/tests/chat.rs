//! Conversations as training data, from the command line.

mod common;

use common::Folder;
use serde_json::{Value, json};
use std::fs;

/// A folder with 120 conversations, of which each answer follows from its question.
fn with_talks() -> Folder {
    let folder = Folder::new();
    let talk = |i: usize| {
        let word = ["red", "green", "blue", "black"][i % 4];
        let say = |role: &str, content: String| json!({ "role": role, "content": content });
        let messages = [
            say("user", format!("say {word} {i}")),
            say("assistant", word.to_owned()),
            say("user", "again".to_owned()),
            say("assistant", format!("{word} {word}")),
        ];
        json!({ "messages": messages }).to_string() + "\n"
    };
    folder.write("talks.jsonl", (0..120).map(talk).collect::<String>());
    let sections =
        "\n[data]\ntrain = ['talks.jsonl']\nformat = 'chat'\nchat_template = 'chatml'\nvalidation_fraction = 0.1\n";
    let (before, rest) = common::TINY.split_once("\n[data]\n").unwrap();
    let after = &rest[rest.find("\n[training]").unwrap()..];
    let text = format!("{before}{sections}{after}").replace("length = 32", "length = 256");
    folder.write("chat.toml", text.replace("name = 'tiny'", "name = 'chat'"));
    folder
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text.trim()).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn a_run_learns_the_answers_alone() {
    let folder = with_talks();
    let ran = folder.run(&["train", "chat.toml"]).ok();
    assert!(ran.stderr.contains(" of them learned),"), "{}", ran.stderr);
    let resolved = fs::read_to_string(folder.join("runs/chat/config.toml")).unwrap();
    assert!(resolved.contains("\"best_fit\"") && resolved.contains("so that conversations stay whole"), "{resolved}");
    // The targets that count are the bytes of the answers, with what ends a turn.
    let shown = folder.run(&["data", "inspect", "chat.toml", "--json"]).ok();
    let sample = &json_of(&shown.stdout)["sample"];
    let targets = sample["targets"].as_array().unwrap().iter().filter_map(Value::as_u64);
    let text = String::from_utf8(targets.map(|byte| byte as u8).collect()).unwrap();
    assert!(text.contains("<|im_end|>\n") && !text.contains("say") && !text.contains("again"), "{text}");
    let words: String = text.replace("<|im_end|>\n", " ");
    assert!(words.split_whitespace().all(|word| ["red", "green", "blue", "black"].contains(&word)), "{text}");
    // The number of learned tokens is that of the bytes.
    let bytes: usize =
        (0..120).map(|i| 3 * ["red", "green", "blue", "black"][i % 4].len() + 1 + 2 * "<|im_end|>\n".len()).sum();
    let sidecar = fs::read_dir(folder.join("runs/data-cache")).unwrap().map(|entry| entry.unwrap().path());
    let sidecar = sidecar.filter(|path| path.extension().is_some_and(|end| end == "json")).find_map(|path| {
        let value = json_of(&fs::read_to_string(path).unwrap());
        value["train"]["learned"].is_u64().then_some(value)
    });
    let sidecar = sidecar.expect("a description of conversations");
    let [train, validation] = ["train", "validation"].map(|part| sidecar[part]["learned"].as_u64().unwrap());
    assert_eq!((train + validation) as usize, bytes);
    // All of the conversations is another run.
    let all = ["train", "chat.toml", "--quiet", "--set", "run.name=all", "--set", "data.loss_on=all"];
    folder.run(&all).ok();
    let first_loss = |name: &str| {
        let text = fs::read_to_string(folder.join(&format!("runs/{name}/metrics.jsonl"))).unwrap();
        json_of(text.lines().next().unwrap())["loss"].as_f64().unwrap()
    };
    assert!(first_loss("all") != first_loss("chat"));
}

#[test]
fn prepared_conversations_are_those_of_a_run() {
    let folder = with_talks();
    let prepare = ["data", "prepare", "--tokenizer", "bytes", "--chat", "--chat-template", "chatml"];
    let more = ["--validation-fraction", "0.1", "--out", "data/talks", "talks.jsonl"];
    let made = folder.run(&[&prepare[..], &more].concat()).ok();
    assert!(made.stdout.contains(" of them learned)"), "{}", made.stdout);
    // The same seed divides the conversations alike.
    folder.run(&["train", "chat.toml", "--quiet", "--set", "training.seed=0"]).ok();
    let tokens = [
        "--set",
        "data.train=['data/talks']",
        "--set",
        "data.format=text",
        "--set",
        "data.chat_template=auto",
        "--set",
        "data.validation_fraction=auto",
        "--set",
        "training.seed=0",
        "--set",
        "run.name=prepared",
    ];
    folder.run(&[&["train", "chat.toml", "--quiet"], &tokens[..]].concat()).ok();
    let losses = |name: &str| {
        let text = fs::read_to_string(folder.join(&format!("runs/{name}/metrics.jsonl"))).unwrap();
        text.lines().map(|line| json_of(line)["loss"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(losses("chat"), losses("prepared"));
    // Files without their mask would be trained on as a whole.
    fs::remove_file(folder.join("data/talks.train.mask")).unwrap();
    let refused = folder.run(&[&["train", "chat.toml", "--quiet", "--set", "run.name=x"], &tokens[..10]].concat());
    assert!(refused.code == Some(1) && refused.stderr.contains("has no .mask file"), "{}", refused.stderr);
    // So would a validation text without its own.
    folder.run(&[&prepare[..], &more, &["--again"]].concat()).ok();
    fs::remove_file(folder.join("data/talks.validation.mask")).unwrap();
    let judged = folder.run(&["eval", "runs/prepared", "--data", "data/talks", "--json"]);
    assert!(judged.code == Some(1) && judged.stderr.contains("has no .mask file"), "{}", judged.stderr);
    // Equal conversations cannot be divided.
    let one = fs::read_to_string(folder.join("talks.jsonl")).unwrap().lines().next().unwrap().to_owned() + "\n";
    folder.write("equal.jsonl", one.repeat(20));
    let equal =
        folder.run(&[&prepare[..], &["--validation-fraction", "0.1", "--out", "data/e", "equal.jsonl"]].concat());
    assert!(equal.code == Some(1) && equal.stderr.contains("all conversations went to validation"), "{}", equal.stderr);
    // Text under the same name leaves no mask behind.
    let text = ["data", "prepare", "--tokenizer", "bytes", "--out", "data/talks", "text.txt"];
    folder.run(&text).ok();
    assert!(!folder.join("data/talks.train.mask").exists() && !folder.join("data/talks.validation.mask").exists());
}

/// A model with a chat template of its own is asked, answers and ends its turn.
#[test]
fn a_fine_tuned_model_answers() {
    let folder = with_talks();
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/golden/chats");
    fs::create_dir(folder.join("model")).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden.join(name), folder.join(&format!("model/{name}"))).unwrap();
    }
    let sets = [
        "--set",
        "tokenizer.kind=auto",
        "--set",
        "tokenizer.path=model/tokenizer.json",
        "--set",
        "training.steps=150",
        "--set",
        "evaluation.tokens_max=auto",
    ];
    folder.run(&[&["train", "chat.toml", "--quiet"], &sets[..]].concat()).ok();
    folder.run(&["export", "runs/chat", "--out", "out"]).ok();
    assert!(fs::read_to_string(folder.join("out/chat_template.jinja")).unwrap().contains("<|im_start|>"));
    for model in ["runs/chat", "out"] {
        let ask = ["generate", model, "--chat", "--prompt", "say blue 7", "--temperature", "0", "--tokens", "40"];
        let said = folder.run(&ask).ok().stdout;
        assert!(said.contains("<|im_end|>") || said.trim().len() < 40, "{said}");
        let judge = |more: &[&str]| {
            let ran =
                folder.run(&[&["eval", model, "--data", "talks.jsonl", "--length", "256", "--json"], more].concat());
            json_of(&ran.ok().stdout)
        };
        let answers = judge(&["--chat"]);
        assert!(answers["loss"].as_f64().unwrap() < 0.5, "{answers}");
    }
}

#[test]
fn conversations_that_cannot_be_read_are_refused_with_their_line() {
    let folder = with_talks();
    let refused = |arguments: &[&str], words: &str| {
        let ran = folder.run(arguments);
        assert!(ran.code == Some(1) && ran.stderr.contains(words), "{words}: {}", ran.stderr);
    };
    let train = |set: &'static str| ["train", "chat.toml", "--set", set];
    refused(&train("data.chat_template=auto"), "talks.jsonl:1: has messages, and the tokenizer has no chat template");
    refused(&train("data.chat_template=none.jinja"), "data.chat_template names none.jinja, which does not exist");
    refused(&train("data.format=text"), "data.chat_template has no effect: data.format is \"text\"");
    refused(&train("data.train=['text.txt']"), "is no JSONL file");
    refused(&train("data.fim_rate=0.5"), "data.fim_rate moves the tokens");
    refused(&train("tokenizer.kind=bpe"), "no tokenizer is made of conversations");
    refused(&train("data.loss_on=questions"), "answers");
    folder.write("bad.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n{\"text\": \"b\"}\n");
    refused(&train("data.train=['bad.jsonl']"), "bad.jsonl:1: has no answer");
    folder.write("bad.jinja", "{% for %}");
    refused(&train("data.chat_template=bad.jinja"), "its chat template cannot be read: line 1");
    let talks = fs::read_to_string(folder.join("talks.jsonl")).unwrap();
    folder.write("mixed.jsonl", format!("{{\"text\": \"b\"}}\n{talks}"));
    let prepare = ["data", "prepare", "--tokenizer", "bytes", "--chat", "--chat-template", "chatml", "--out", "data/m"];
    refused(&[&prepare[..], &["mixed.jsonl"]].concat(), "mixed.jsonl:1: has no conversation");
    let skipped = folder.run(&[&prepare[..], &["mixed.jsonl", "--skip-invalid"]].concat()).ok();
    assert!(skipped.stdout.contains("1 invalid"), "{}", skipped.stdout);
    refused(&["generate", "out", "--chat", "--prompt", "x"], "cannot open the model out");
}
