//! Deduplication, filters and mixtures, on files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use trainyard_data::clean::{
    DedupOptions, FilterOptions, Language, Method, MixOptions, Report, Rule, Shape, dedup, filter, mix, shingles,
};
use trainyard_data::{Corpus, CorpusOptions, DataError};

fn random(state: &mut u64, below: usize) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state % below as u64) as usize
}

fn write(folder: &Path, name: &str, texts: &[String]) -> PathBuf {
    let path = folder.join(name);
    let lines: String = texts.iter().map(|text| format!("{}\n", serde_json::json!({ "text": text }))).collect();
    fs::write(&path, lines).unwrap();
    path
}

fn open(path: &Path) -> Corpus {
    Corpus::open(&[path], CorpusOptions::default()).unwrap()
}

fn records(path: &Path) -> Vec<serde_json::Value> {
    let bytes = zstd::decode_all(fs::File::open(path).unwrap()).unwrap();
    serde_json::Deserializer::from_slice(&bytes).into_iter().map(Result::unwrap).collect()
}

/// Families of documents that differ in more and more words, between unrelated ones.
fn families(families: usize, state: &mut u64) -> Vec<String> {
    let mut texts = Vec::new();
    for _ in 0..families {
        let length = 20 + random(state, 400);
        let original: Vec<String> = (0..length).map(|_| format!("w{}", random(state, 5000))).collect();
        for copy in 0..6 {
            let mut words = original.clone();
            // A changed word changes five n-grams: these copies are from 1 down to about 0.5.
            for _ in 0..length * copy / 100 {
                let at = random(state, length);
                words[at] = format!("x{}", random(state, 5000));
            }
            texts.push(words.join(" "));
        }
    }
    // So that copies do not stand side by side.
    for at in (1..texts.len()).rev() {
        texts.swap(at, random(state, at + 1));
    }
    texts
}

#[test]
fn near_duplicates_are_found_and_others_stay() {
    let folder = tempfile::tempdir().unwrap();
    let mut state = 0x1234_5678_9abc_def1;
    let texts = families(120, &mut state);
    let corpus = open(&write(folder.path(), "a.jsonl", &texts));
    let out = folder.path().join("out");
    let options = DedupOptions { memory_bytes: 32 << 20, ..DedupOptions::new(&out) };
    let report = dedup(&corpus, &options, |_| ()).unwrap();
    assert_eq!(report.documents, texts.len() as u64);
    assert_eq!(report.kept + report.dropped_documents(), report.documents);
    let mut cluster: Vec<usize> = (0..texts.len()).collect();
    for record in records(&folder.path().join("out.dropped")) {
        let number = record["number"].as_u64().unwrap() as usize;
        cluster[number] = record["duplicate_of"].as_u64().unwrap() as usize;
        assert!(cluster[number] < number, "the first is kept");
        assert_eq!(record["text"], texts[number]);
        let is_copy = record["reason"] == "exact duplicate";
        assert_eq!(is_copy, texts[..number].contains(&texts[number]), "{record}");
    }
    for record in records(&folder.path().join("out.jsonl.zst")) {
        let number = record["number"].as_u64().unwrap() as usize;
        assert_eq!(cluster[number], number);
    }
    let sets: Vec<BTreeSet<u64>> = texts.iter().map(|text| shingles(text, 5).into_iter().collect()).collect();
    let (mut similar, mut found, mut unlike, mut joined) = (0, 0, 0, 0);
    for a in 0..texts.len() {
        for b in 0..a {
            let is_joined = usize::from(cluster[a] == cluster[b]);
            let common = sets[a].intersection(&sets[b]).count();
            let similarity = common as f64 / (sets[a].len() + sets[b].len() - common) as f64;
            if similarity >= 0.8 {
                (similar, found) = (similar + 1, found + is_joined);
            }
            if similarity < 0.01 {
                (unlike, joined) = (unlike + 1, joined + is_joined);
            }
        }
    }
    assert!(similar > 300, "{similar}");
    assert!(found as f64 >= 0.95 * similar as f64, "{found} of {similar}");
    assert_eq!(joined, 0, "of {unlike}");
}

#[test]
fn workers_and_memory_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let texts = families(30, &mut 77);
    let corpus = open(&write(folder.path(), "a.jsonl", &texts));
    let mut expected: Option<(Report, Vec<serde_json::Value>)> = None;
    for (workers, memory_bytes) in [(1, 1 << 30), (3, 17 << 20)] {
        let out = folder.path().join(format!("out{workers}"));
        let options = DedupOptions { workers, memory_bytes, ..DedupOptions::new(&out) };
        let report = dedup(&corpus, &options, |_| ()).unwrap();
        let found = (report, records(&folder.path().join(format!("out{workers}.jsonl.zst"))));
        assert_eq!(expected.get_or_insert(found.clone()), &found);
    }
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("spill")), "{left:?}");
}

#[test]
fn exact_duplicates_alone_leave_similar_ones() {
    let folder = tempfile::tempdir().unwrap();
    let texts = ["a b c d e f g", "a b c d e f g.", "a b c d e f g", "other"].map(String::from);
    let corpus = open(&write(folder.path(), "a.jsonl", &texts));
    let out = folder.path().join("out");
    let options = DedupOptions { method: Method::Exact, ..DedupOptions::new(&out) };
    let report = dedup(&corpus, &options, |_| ()).unwrap();
    assert_eq!((report.kept, report.dropped["exact duplicate"].documents), (3, 1));
    let near = dedup(&corpus, &DedupOptions::new(&out), |_| ()).unwrap();
    assert_eq!((near.kept, near.dropped["near duplicate"].documents), (2, 1));
}

#[test]
fn a_filter_counts_and_keeps_what_it_drops() {
    let folder = tempfile::tempdir().unwrap();
    let english = "This is the text of a letter that was written to the people of the town with the old bridge.";
    let texts = [
        english.to_owned(),
        "Dies ist ein Brief, der an alle Leute in der Stadt mit der alten Brücke geschrieben wurde.".to_owned(),
        "12345 67890".to_owned(),
        format!("{english} Write to jane@example.net from 8.8.4.4, please."),
    ];
    let corpus = open(&write(folder.path(), "a.jsonl", &texts));
    let options = FilterOptions {
        out: folder.path().join("out"),
        rules: Vec::new(),
        languages: vec![Language::of_code("en").unwrap()],
        confidence_min: 0.3,
        mask_pii: true,
        workers: 2,
    };
    let report = filter(&corpus, &options).unwrap();
    let dropped: BTreeMap<&str, u64> =
        report.dropped.iter().map(|(reason, n)| (reason.as_str(), n.documents)).collect();
    assert_eq!(dropped, BTreeMap::from([("language: deu", 1), ("language: none found", 1)]));
    assert_eq!((report.documents, report.kept), (4, 2));
    assert_eq!(report.changed.values().sum::<u64>(), 2);
    let kept = records(&folder.path().join("out.jsonl.zst"));
    assert_eq!(kept[1]["text"], format!("{english} Write to email@example.com from 192.0.2.1, please."));
    let reasons = records(&folder.path().join("out.dropped"));
    assert_eq!(reasons[0]["reason"], "language: deu");
    assert_eq!(reasons[0]["line"], 2);
    // What was kept is a corpus again, and what was dropped too.
    assert_eq!(open(&folder.path().join("out.jsonl.zst")).documents().count(), 2);
    let gopher = FilterOptions { rules: vec![Rule::GopherQuality], languages: Vec::new(), ..options };
    let report = filter(&corpus, &gopher).unwrap();
    assert_eq!(report.dropped["gopher: fewer than 50 words"].documents, 4);
}

#[test]
fn a_mixture_keeps_its_shares_of_the_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, bytes: usize, count: usize| {
        open(&write(folder.path(), name, &vec![name[..1].repeat(bytes); count]))
    };
    let corpora = [of("a.jsonl", 100, 3000), of("b.jsonl", 333, 100)];
    let options = MixOptions { out: folder.path().join("out"), weights: vec![3.0, 1.0], bytes: None };
    let mixed = mix(&corpora, &options).unwrap();
    // The second ends: all its bytes, and three times as many of the first.
    assert_eq!((mixed.shares[1].documents, mixed.shares[1].passes), (100, 1));
    assert!(mixed.shares[0].bytes.abs_diff(3 * 33_300) <= 333 * 3 + 100, "{mixed:?}");
    let longer = mix(&corpora, &MixOptions { bytes: Some(1_000_000), ..options }).unwrap();
    assert!(longer.report.kept_bytes.abs_diff(1_000_000) <= 333);
    assert!(longer.shares[1].passes >= 7 && longer.shares[1].bytes.abs_diff(250_000) < 1000, "{longer:?}");
}

#[test]
fn settings_that_mean_nothing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "a.jsonl", &["text".to_owned()]);
    let corpus = open(&path);
    let out = folder.path().join("out");
    let near = |ngram, bands, rows| Method::Near(Shape { ngram, bands, rows });
    let deduplicate = |method, memory_bytes| {
        let options = DedupOptions { method, memory_bytes, ..DedupOptions::new(&out) };
        dedup(&corpus, &options, |_| ()).unwrap_err()
    };
    let filtering = |confidence_min, mask_pii| {
        let options =
            FilterOptions { out: out.clone(), rules: vec![], languages: vec![], confidence_min, mask_pii, workers: 1 };
        filter(&corpus, &options).unwrap_err()
    };
    let mixing = |weights: Vec<f64>, bytes| {
        mix(std::slice::from_ref(&corpus), &MixOptions { out: out.clone(), weights, bytes }).unwrap_err()
    };
    let onto_itself = DedupOptions::new(folder.path().join("b"));
    fs::write(folder.path().join("b.jsonl.zst"), zstd::encode_all(&b"{\"text\":\"x\"}\n"[..], 1).unwrap()).unwrap();
    let read_and_written = dedup(&open(&folder.path().join("b.jsonl.zst")), &onto_itself, |_| ()).unwrap_err();
    let cases: Vec<(DataError, &str)> = vec![
        (deduplicate(near(0, 20, 8), 1 << 30), "ngram: is 0"),
        (deduplicate(near(5, 0, 8), 1 << 30), "bands: is 0"),
        (deduplicate(near(5, 257, 8), 1 << 30), "bands: is 257"),
        (deduplicate(near(5, 20, 65), 1 << 30), "rows: is 65"),
        (deduplicate(Method::Exact, 1000), "memory: 1000 bytes are too few"),
        (filtering(2.0, true), "language_confidence: is 2"),
        (filtering(f64::NAN, true), "language_confidence"),
        (filtering(0.5, false), "nothing is asked for"),
        (mixing(vec![], None), "0 weights for 1 corpora"),
        (mixing(vec![-1.0], None), "-1 is not a positive number"),
        (mixing(vec![f64::INFINITY], None), "not a positive number"),
        (mixing(vec![1.0], Some(0)), "bytes: is 0"),
        (read_and_written, "would be read and written"),
    ];
    for (error, words) in cases {
        assert!(matches!(error, DataError::Setting { .. }) && error.to_string().contains(words), "{error}\n{words}");
    }
    assert!(!out.with_extension("jsonl.zst").exists() && fs::read(&path).unwrap().ends_with(b"\"text\"}\n"));
}
