//! Tests of reading: order, compression, separators, skipping, and malformed lines.

use std::fs;
use std::io::Write;

use flate2::write::GzEncoder;
use proptest::prelude::*;

use super::*;

fn texts(corpus: &Corpus) -> Vec<String> {
    corpus.documents().map(|d| d.unwrap().text).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn folders_are_read_in_name_order_through_every_compression() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("b")).unwrap();
    fs::write(at("b/two.rs"), "fn two() {}").unwrap();
    fs::write(at("a.txt"), "\u{FEFF}one").unwrap();
    fs::write(at("c.jsonl"), "{\"id\": 1, \"text\": \"three\\n\"}\r\n\n{\"text\": \"\"}\n{\"text\": \"four\"}")
        .unwrap();
    fs::write(at("d.txt.gz"), [gzip(b"fi"), gzip(b"ve")].concat()).unwrap();
    fs::write(at("e.jsonl.zst"), zstd::encode_all(&b"{\"text\": \"six\"}\n"[..], 3).unwrap()).unwrap();
    fs::write(at("empty.txt"), "").unwrap();
    fs::write(at("picture.png"), [0xFF, 0xFE]).unwrap();
    fs::write(at(".hidden.txt"), "hidden").unwrap();
    let corpus = Corpus::open(&[folder.path()], CorpusOptions::default()).unwrap();
    assert_eq!(texts(&corpus), ["one", "fn two() {}", "three\n", "four", "five", "six"]);
    let mut documents = corpus.documents();
    let lines: Vec<u64> = documents.by_ref().map(|d| d.unwrap().line).collect();
    assert_eq!(lines, [0, 0, 1, 4, 0, 1]);
    assert_eq!(documents.skipped(), Skipped { empty: 2, invalid: 0 });
    assert_eq!(documents.files_done(), corpus.files().len());
    assert!(corpus.is_compressed());
}

#[test]
fn a_separator_cuts_a_text_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stories");
    fs::write(&path, "one<|e|>two <|e| not yet<|e|><|e|>three<|e|>\n").unwrap();
    let options = CorpusOptions { document_separator: Some("<|e|>".into()), ..CorpusOptions::default() };
    assert_eq!(texts(&Corpus::open(&[&path], options).unwrap()), ["one", "two <|e| not yet", "three", "\n"]);
    assert_eq!(texts(&Corpus::open(&[&path], CorpusOptions::default()).unwrap()).len(), 1);
}

#[test]
fn invalid_documents_can_be_skipped_and_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("a.jsonl"),
        b"{\"text\": 1}\n{\"text\": \"good\"}\nnot json\n\"string\"\n{\"text\": \"\xFF\"}\n",
    )
    .unwrap();
    fs::write(folder.path().join("b.txt"), b"ab\xFF").unwrap();
    let options = CorpusOptions { on_invalid: OnInvalid::Skip, ..CorpusOptions::default() };
    let corpus = Corpus::open(&[folder.path()], options).unwrap();
    let mut documents = corpus.documents();
    assert_eq!(documents.by_ref().map(|d| d.unwrap().text).collect::<Vec<_>>(), ["good"]);
    assert_eq!(documents.skipped(), Skipped { empty: 0, invalid: 5 });
}

#[test]
fn the_rust_sources_are_a_sample_in_a_fixed_order() {
    let home = tempfile::tempdir().unwrap();
    let package = home.path().join("registry/src/one.example-1/left-1.0.0/src");
    fs::create_dir_all(&package).unwrap();
    for name in ["a.rs", "b.rs", "c.rs", "d.toml"] {
        fs::write(package.join(name), format!("// {name}")).unwrap();
    }
    fs::write(package.join("generated.rs"), "x".repeat(300 << 10)).unwrap();
    let names = |bytes_max| -> Vec<String> {
        let corpus = list::rust_sources_in(home.path(), bytes_max).unwrap();
        corpus.files().iter().map(|f| f.path.file_name().unwrap().to_string_lossy().into_owned()).collect()
    };
    let all = names(1 << 20);
    assert_eq!(all.len(), 3);
    assert_eq!(names(14), all[..2], "a cap takes the first of the same order");
    // Another registry with the same package changes nothing.
    let other = home.path().join("registry/src/other.example-2/left-1.0.0/src");
    fs::create_dir_all(&other).unwrap();
    fs::write(other.join("a.rs"), "// a.rs").unwrap();
    assert_eq!(names(1 << 20), all);
    assert!(list::rust_sources_in(&home.path().join("nowhere"), 1 << 20).is_none());
}

#[test]
fn texts_stop_at_a_budget() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.txt", "b.txt", "c.txt"] {
        fs::write(folder.path().join(name), "12345").unwrap();
    }
    let corpus = Corpus::open(&[folder.path()], CorpusOptions::default()).unwrap();
    assert_eq!(corpus.texts(6).count(), 2);
    assert_eq!(corpus.texts(u64::MAX).count(), 3);
}

#[test]
fn a_line_gives_its_field_or_a_reason() {
    let parse = |line: &str| parse_jsonl_line(line.as_bytes(), "text");
    assert_eq!(parse(r#"{"meta": {"text": "no"}, "text": "\u00e9\ud83d\ude82"}"#).unwrap(), "é🚂");
    assert_eq!(parse(r#"{"text": "first", "text": "last"}"#).unwrap(), "last");
    assert!(matches!(parse(r#"{"text": null}"#), Err(LineFault::NotString { .. })));
    assert!(matches!(parse(r#"{"text": "\ud83d"}"#), Err(LineFault::Json(_))));
    assert!(matches!(parse(r#"{"content": "x"}"#), Err(LineFault::Missing { found, .. }) if found == "content"));
    assert!(matches!(parse(r#"["text"]"#), Err(LineFault::NotObject)));
    assert!(matches!(parse(r#"{"text": "x"} {"text": "y"}"#), Err(LineFault::Json(_))));
    assert!(matches!(parse(&"[".repeat(100_000)), Err(LineFault::Json(_))));
    assert!(matches!(parse_jsonl_line(b"{\"text\": \"\xFF\"}", "text"), Err(LineFault::NotUtf8(10))));
}

proptest! {
    #[test]
    fn any_line_is_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_jsonl_line(&bytes, "text");
    }

    #[test]
    fn any_text_in_json_comes_back(text in "\\PC{0,50}", other in "\\PC{0,10}") {
        let line = serde_json::json!({ "other": other, "text": text }).to_string();
        prop_assert_eq!(parse_jsonl_line(line.as_bytes(), "text").unwrap(), text);
    }

    #[test]
    fn any_bytes_in_a_file_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 1..300), which in 0usize..6) {
        let folder = tempfile::tempdir().unwrap();
        let name = ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.zst", "a", "a.zst"][which];
        let path = folder.path().join(name);
        std::fs::write(&path, &bytes).unwrap();
        let corpus = Corpus::open(&[&path], CorpusOptions::default()).unwrap();
        for document in corpus.documents() {
            match document {
                Ok(document) => prop_assert!(!document.text.is_empty()),
                Err(error) => prop_assert!(error.to_string().contains(name)),
            }
        }
    }
}

#[test]
fn parts_are_nearly_equal_disjoint_and_complete() {
    let folder = tempfile::tempdir().unwrap();
    for (number, bytes) in [90, 10, 40, 50, 1, 0, 30, 60].into_iter().enumerate() {
        fs::write(folder.path().join(format!("{number}.txt")), "x".repeat(bytes)).unwrap();
    }
    let open = || Corpus::open(&[folder.path()], CorpusOptions::default()).unwrap();
    for parts in 1..=8 {
        let dealt: Vec<Corpus> = (1..=parts).map(|part| open().part(part, parts).unwrap()).collect();
        let mut all: Vec<_> = dealt.iter().flat_map(|corpus| corpus.files().to_vec()).collect();
        assert!(dealt.iter().all(|corpus| corpus.files().is_sorted_by(|a, b| a.path < b.path)), "{parts}");
        assert!(dealt.iter().all(|corpus| !corpus.files().is_empty()), "{parts}");
        all.sort_by(|a, b| a.path.cmp(&b.path));
        assert_eq!(all, open().files(), "{parts}");
        // No part exceeds the mean by more than the largest file.
        assert!(dealt.iter().all(|corpus| corpus.bytes() <= 281 / parts as u64 + 90), "{parts}");
    }
    let two: Vec<u64> = (1..=2).map(|part| open().part(part, 2).unwrap().bytes()).collect();
    assert_eq!(two, [141, 140]);
    assert!(open().part(0, 2).is_err() && open().part(3, 2).is_err() && open().part(1, 9).is_err());
}
