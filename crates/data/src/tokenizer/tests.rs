//! Tests of round trips, files, training, streams and pieces, for all three kinds.

use super::*;
use proptest::prelude::*;

const TEXT: &str = "The yard holds forty trains. The trains leave the yard at dawn; \"the yard\", they say, \"is empty\".\n\n\
                    Numbers: 1 22 333 4444.\n\tTabs\n   spaces   \nÜber die Brücke, 日本語, 🚂🚃!\r\nend\n";

fn trained() -> Tokenizer {
    Tokenizer::train_bpe(std::iter::once(Ok(TEXT.repeat(3))), 330, |_| ()).unwrap()
}

#[test]
fn every_kind_gives_the_text_back() {
    for tokenizer in [Tokenizer::bytes(), Tokenizer::characters_from(TEXT).unwrap(), trained()] {
        let tokens = tokenizer.encode(TEXT).unwrap();
        assert!(tokens.iter().all(|&t| (t as usize) < tokenizer.vocab_size()));
        assert_eq!(tokenizer.decode(&tokens), TEXT, "{}", tokenizer.kind());
    }
}

#[test]
fn every_kind_survives_saving_with_its_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    for tokenizer in [Tokenizer::bytes(), Tokenizer::characters_from(TEXT).unwrap(), trained()] {
        let path = folder.path().join("tokenizer.json");
        tokenizer.save(&path).unwrap();
        let loaded = Tokenizer::load(folder.path()).unwrap();
        assert_eq!(loaded.fingerprint(), tokenizer.fingerprint());
        assert_eq!((loaded.eos(), loaded.vocab_size()), (tokenizer.eos(), tokenizer.vocab_size()));
        assert_eq!(loaded.encode(TEXT).unwrap(), tokenizer.encode(TEXT).unwrap());
    }
}

#[test]
fn an_exported_tokenizer_has_the_same_ids() {
    let folder = tempfile::tempdir().unwrap();
    for tokenizer in [Tokenizer::bytes(), Tokenizer::characters_from(TEXT).unwrap(), trained()] {
        tokenizer.save_hugging_face(folder.path(), 128).unwrap();
        let exported = Tokenizer::load(folder.path()).unwrap();
        assert_eq!(exported.kind(), "tokenizer.json");
        assert_eq!(exported.vocab_size(), tokenizer.vocab_size(), "{}", tokenizer.kind());
        assert_eq!(exported.eos(), tokenizer.eos());
        assert_eq!(exported.encode(TEXT).unwrap(), tokenizer.encode(TEXT).unwrap());
        assert_eq!(exported.decode(&tokenizer.encode(TEXT).unwrap()), TEXT);
    }
}

/// scripts/golden/make_tokenizers.py: a tokenizer with every kind of post-processor.
fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers").join(name)
}

/// A text with what belongs around it.
fn whole(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    [tokenizer.before(), &tokenizer.encode(text).unwrap(), tokenizer.after()].concat()
}

#[test]
fn texts_begin_and_end_as_in_transformers() {
    let expected: Value = serde_json::from_slice(&std::fs::read(golden("expected.json")).unwrap()).unwrap();
    let texts = expected["texts"].as_array().unwrap();
    let cases = expected["ids"].as_object().unwrap();
    assert_eq!(cases.len(), 8);
    let mut with_bos = 0;
    for (name, ids) in cases {
        let tokenizer = Tokenizer::load(&golden(name)).unwrap();
        for (text, want) in texts.iter().zip(ids.as_array().unwrap()) {
            let want: Vec<u32> = want.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
            assert_eq!(whole(&tokenizer, text.as_str().unwrap()), want, "{name}: {text}");
        }
        with_bos += usize::from(!tokenizer.before().is_empty());
    }
    assert_eq!(with_bos, 5);
}

#[test]
fn a_bos_token_is_added_or_left_out_as_asked() {
    let load = |name: &str| Tokenizer::load(&golden(name)).unwrap();
    let begins = |tokenizer: Tokenizer, add| tokenizer.with_bos(add).unwrap().before().to_vec();
    assert_eq!(begins(load("template_begin"), None), [1]);
    assert_eq!(begins(load("template_begin"), Some(false)), [0u32; 0]);
    assert_eq!(begins(load("none"), Some(true)), [1], "its tokenizer_config.json names one");
    assert_eq!(load("template_both").with_bos(Some(false)).unwrap().after(), [2]);
    let words = load("template_both").around_in_words();
    assert_eq!(words.as_deref(), Some("begins each text with <s> (1) and ends each text with </s> (2)"));
    assert_eq!(load("byte_level").around_in_words(), None);
    for tokenizer in [Tokenizer::bytes(), trained(), load("byte_level")] {
        let error = tokenizer.with_bos(Some(true)).unwrap_err().to_string();
        assert!(error.contains("no beginning-of-text token"), "{error}");
    }
}

/// Where the post-processor adds nothing, `add_bos_token` counts, as in the Llama classes of
/// transformers 4.
#[test]
fn tokenizer_config_asks_for_tokens_where_the_post_processor_adds_none() {
    let folder = tempfile::tempdir().unwrap();
    let load = |config: &str| {
        std::fs::copy(golden("none").join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        Tokenizer::load(folder.path()).unwrap()
    };
    let both =
        load(r#"{"add_bos_token": true, "add_eos_token": true, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}"#);
    assert_eq!((both.before(), both.after()), (&[1][..], &[2][..]));
    let neither = load(r#"{"add_bos_token": false, "bos_token": "<s>"}"#);
    assert_eq!((neither.before(), neither.after()), (&[][..], &[][..]));
    let unknown = load(r#"{"add_bos_token": true, "bos_token": "<nowhere>"}"#);
    assert!(unknown.before().is_empty());
}

/// Files beside a tokenizer are copied with it: into a run, and from there into an export.
#[test]
fn the_files_beside_a_tokenizer_come_out_as_they_went_in() {
    let [from, run, out] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let config = r#"{"tokenizer_class": "LlamaTokenizer", "pad_token": "[SEP]", "eos_token": "</s>", "chat_template": "{{ x }}"}"#;
    let files = [
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", r#"{"pad_token": "[SEP]"}"#),
        ("chat_template.jinja", "{{ messages }}"),
        ("added_tokens.json", r#"{"[SEP]": 4}"#),
    ];
    std::fs::copy(golden("template_begin").join("tokenizer.json"), from.path().join("tokenizer.json")).unwrap();
    files.iter().for_each(|(name, text)| std::fs::write(from.path().join(name), text).unwrap());
    Tokenizer::load(from.path()).unwrap().save(&run.path().join("tokenizer.json")).unwrap();
    Tokenizer::load(run.path()).unwrap().save_hugging_face(out.path(), 128).unwrap();
    for (name, text) in files {
        assert_eq!(std::fs::read_to_string(out.path().join(name)).unwrap(), text, "{name}");
    }
    // Another end-of-text token is a change of the run's, and everything else stays.
    let changed = Tokenizer::load(run.path()).unwrap().with_eos("[SEP]").unwrap();
    changed.save_hugging_face(out.path(), 128).unwrap();
    let written: Value =
        serde_json::from_slice(&std::fs::read(out.path().join("tokenizer_config.json")).unwrap()).unwrap();
    assert_eq!((&written["eos_token"], &written["chat_template"]), (&json!("[SEP]"), &json!("{{ x }}")));
    // Beside token files of several prefixes, each has its own.
    let beside = run.path().join("a.tokenizer.json");
    Tokenizer::load(from.path()).unwrap().save(&beside).unwrap();
    assert!(run.path().join("a.chat_template.jinja").is_file());
    assert_eq!(Tokenizer::load(&beside).unwrap().eos(), Some(2));
}

#[test]
fn training_is_deterministic_and_bounded() {
    let (one, two) = (trained(), trained());
    assert_eq!(one.fingerprint(), two.fingerprint());
    assert!(one.vocab_size() > 257 && one.vocab_size() <= 330);
    assert_eq!(one.eos(), one.token_to_id(END_OF_TEXT));
    let tokens = one.encode(TEXT).unwrap();
    assert!(tokens.len() * 3 < TEXT.len() * 2, "merges must shorten: {} of {}", tokens.len(), TEXT.len());
    let Kind::HuggingFace(inner) = &*one.kind else { panic!() };
    let vocabulary = hugging_face::vocabulary(inner);
    assert!(vocabulary.iter().enumerate().all(|(place, (_, id))| place == *id as usize), "ids have no holes");
}

#[test]
fn training_reports_progress_and_passes_errors_on() {
    let seen = std::sync::Mutex::new(Vec::new());
    Tokenizer::train_bpe([Ok(TEXT.to_owned()), Ok(TEXT.to_owned())].into_iter(), 300, |p| seen.lock().unwrap().push(p))
        .unwrap();
    let bytes = TEXT.len() as u64;
    let expected = [
        TrainProgress::Counting { bytes },
        TrainProgress::Counting { bytes: 2 * bytes },
        TrainProgress::Merging { bytes: 2 * bytes },
    ];
    assert_eq!(*seen.lock().unwrap(), expected);
    let failing = [Ok("text".to_owned()), Err(DataError::Stopped)].into_iter();
    assert!(matches!(Tokenizer::train_bpe(failing, 300, |_| ()), Err(DataError::Stopped)));
    assert!(matches!(Tokenizer::train_bpe(std::iter::empty(), 300, |_| ()), Err(DataError::TooLittle { .. })));
    assert!(matches!(Tokenizer::train_bpe(std::iter::empty(), 256, |_| ()), Err(DataError::Setting { .. })));
}

#[test]
fn special_tokens_are_text_in_training_data_only() {
    let tokenizer = trained();
    let text = format!("a{END_OF_TEXT}b");
    assert!(tokenizer.encode(&text).unwrap().contains(&tokenizer.eos().unwrap()));
    let ordinary = tokenizer.encode_ordinary(&text).unwrap();
    assert!(!ordinary.contains(&tokenizer.eos().unwrap()));
    assert_eq!(tokenizer.decode(&ordinary), text);
}

#[test]
fn a_config_beside_the_file_names_the_end_of_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let chosen = trained().with_eos("!").unwrap();
    chosen.save(&path).unwrap();
    assert_eq!(Tokenizer::load(&path).unwrap().eos(), chosen.eos());
    let config = folder.path().join("tokenizer_config.json");
    std::fs::write(&config, r#"{"eos_token": {"content": "?", "special": true}}"#).unwrap();
    assert_eq!(Tokenizer::load(&path).unwrap().eos(), chosen.token_to_id("?"));
    std::fs::write(&config, r#"{"eos_token": "<nowhere>"}"#).unwrap();
    assert!(Tokenizer::load(&path).unwrap_err().to_string().contains("<nowhere>"));
    assert!(chosen.with_eos("<nowhere>").is_err());
}

#[test]
fn streams_hold_back_half_characters() {
    let tokenizer = Tokenizer::bytes();
    let mut stream = tokenizer.stream_decoder();
    let pieces: Vec<String> = "a日🚂b".bytes().map(|b| stream.push(u32::from(b))).collect();
    assert_eq!(pieces, ["a", "", "", "日", "", "", "", "🚂", "b"]);
    assert_eq!(stream.finish(), "");
    stream.push(0xE6);
    assert_eq!(stream.finish(), "\u{FFFD}");
    // Bytes that are never text do not block what follows.
    let mut stream = tokenizer.stream_decoder();
    let text: String = [0xFF, 0xFF, 0xFF, 0xFF, 0x41].iter().map(|&b| stream.push(b)).collect();
    assert!(text.ends_with('A'), "{text:?}");
}

proptest! {
    #[test]
    fn streamed_text_is_the_whole_text(text in "\\PC{0,40}") {
        for tokenizer in [Tokenizer::bytes(), trained_once()] {
            let mut stream = tokenizer.stream_decoder();
            let mut streamed: String = tokenizer.encode(&text).unwrap().iter().map(|&t| stream.push(t)).collect();
            streamed.push_str(&stream.finish());
            prop_assert_eq!(&streamed, &text);
        }
    }

    #[test]
    fn pieces_encode_to_the_tokens_of_the_whole(text in "([a-zé]{1,5}|[ \n\t]{1,3}|[0-9.,;']{1,3}|\r\n){0,60}", bytes in 1usize..40) {
        for tokenizer in [Tokenizer::bytes(), trained_once()] {
            let pieces = tokenizer.pieces(&text, bytes);
            prop_assert_eq!(pieces.concat(), &text[..]);
            let joined: Vec<u32> = pieces.iter().flat_map(|p| tokenizer.encode(p).unwrap()).collect();
            prop_assert_eq!(joined, tokenizer.encode(&text).unwrap());
        }
    }

    #[test]
    fn the_fast_encoder_gives_the_ids_of_the_library(
        text in "(the|yard|trains?| |\n|\t|[0-9]{1,3}|'s|\\PC|<\\|endoftext\\|>){0,60}",
        ignore_merges: bool,
    ) {
        let tokenizer = if ignore_merges { ignoring_merges() } else { trained_once() };
        let Kind::HuggingFace(inner) = &*tokenizer.kind else { panic!() };
        prop_assert!(inner.has_fast_path());
        prop_assert_eq!(inner.encode_ordinary(&text).unwrap(), inner.encode_ordinary_slowly(&text).unwrap());
    }

    #[test]
    fn arbitrary_bytes_are_no_tokenizer_and_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Tokenizer::from_json(&bytes, "test").is_err());
    }

    #[test]
    fn a_damaged_tokenizer_is_refused_or_works(damage in proptest::collection::vec((any::<prop::sample::Index>(), 0usize..9), 1..4)) {
        let mut value: Value = serde_json::from_str(&trained_once().json).unwrap();
        for (place, replacement) in damage {
            let pointers = pointers(&value);
            let replacements = [
                json!(null), json!(0), json!(-1), json!(1e30), json!(""), json!([]), json!({}), json!(true),
                json!({ "type": "Sequence", "pretokenizers": [], "normalizers": [], "decoders": [] }),
            ];
            let pointer: &String = place.get(&pointers);
            *value.pointer_mut(pointer).unwrap() = replacements[replacement].clone();
        }
        if let Ok(tokenizer) = Tokenizer::from_json(value.to_string().as_bytes(), "test")
            && let Ok(tokens) = tokenizer.encode(TEXT)
        {
            prop_assert!(tokens.iter().all(|&t| (t as usize) < tokenizer.vocab_size()));
            tokenizer.decode(&tokens);
        }
    }

    #[test]
    fn decoding_any_ids_never_panics(tokens in proptest::collection::vec(any::<u32>(), 0..20), low in proptest::collection::vec(0u32..400, 0..20)) {
        for tokenizer in [Tokenizer::bytes(), Tokenizer::characters_from(TEXT).unwrap(), trained_once()] {
            tokenizer.decode(&tokens);
            tokenizer.decode(&low);
            let mut stream = tokenizer.stream_decoder();
            low.iter().for_each(|&t| drop(stream.push(t)));
        }
    }
}

/// Every part of a JSON value; of long lists only the first and last few.
fn pointers(value: &Value) -> Vec<String> {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(fields) => {
            fields.iter().map(|(name, child)| (name.replace('~', "~0").replace('/', "~1"), child)).collect()
        }
        Value::Array(list) => list.iter().enumerate().map(|(place, child)| (place.to_string(), child)).collect(),
        _ => Vec::new(),
    };
    let count = children.len();
    let kept = children.into_iter().enumerate().filter(|(place, _)| *place < 12 || place + 3 > count);
    kept.flat_map(|(_, (name, child))| {
        let below = pointers(child).into_iter().map(|rest| format!("/{name}{rest}")).collect::<Vec<_>>();
        std::iter::once(format!("/{name}")).chain(below)
    })
    .collect()
}

/// As in Llama 3 and others: a word of the vocabulary is taken whole, even if merges would not make
/// it.
fn ignoring_merges() -> Tokenizer {
    static IGNORING: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
    let make = || {
        let mut value: Value = serde_json::from_str(&trained_once().json).unwrap();
        value["model"]["ignore_merges"] = json!(true);
        value["model"]["vocab"]["\u{120}trains"] = json!(330);
        Tokenizer::from_json(value.to_string().as_bytes(), "test").unwrap()
    };
    IGNORING.get_or_init(make).clone()
}

/// Long words and repeated ones, as in code and tables.
#[test]
fn the_fast_encoder_holds_on_a_long_text() {
    let tokenizer = trained_once();
    let Kind::HuggingFace(inner) = &*tokenizer.kind else { panic!() };
    let mut text = TEXT.repeat(20);
    text.push_str(&"=".repeat(500));
    text.push_str(&"the".repeat(300));
    text.push_str(&" ".repeat(300));
    text.push_str(&"日本語".repeat(200));
    assert_eq!(inner.encode_ordinary(&text).unwrap(), inner.encode_ordinary_slowly(&text).unwrap());
}

fn trained_once() -> Tokenizer {
    static TRAINED: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
    TRAINED.get_or_init(trained).clone()
}
