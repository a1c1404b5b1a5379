//! From files to token files: the bytes do not depend on the workers; results are divided,
//! described and reused.

use std::fs;
use std::path::{Path, PathBuf};

use trainyard_data::indexed::{bin_path, idx_path};
use trainyard_data::{
    Corpus, CorpusOptions, DataError, IndexedTokens, PrepareOptions, Prepared, Sidecar, Tokenizer, prepare, text_bytes,
};

/// A folder of `n` small documents in two files, and one of text.
fn corpus(folder: &Path, n: usize) -> Corpus {
    let text = folder.join("text");
    fs::create_dir_all(&text).unwrap();
    let line = |i: usize| {
        let story = format!("Document {i} goes from the yard to the sea.\n").repeat(i % 7 + 1);
        serde_json::json!({ "text": story }).to_string() + "\n"
    };
    fs::write(text.join("a.jsonl"), (0..n / 2).map(line).collect::<String>()).unwrap();
    fs::write(text.join("b.jsonl"), (n / 2..n).map(line).collect::<String>()).unwrap();
    Corpus::open(&[text], CorpusOptions::default()).unwrap()
}

fn run(corpus: &Corpus, tokenizer: &Tokenizer, options: &PrepareOptions) -> Prepared {
    prepare(corpus, tokenizer, options, |_| ()).unwrap()
}

fn all_tokens(prefix: &Path) -> Vec<u32> {
    let tokens = IndexedTokens::open(prefix).unwrap();
    let mut all = Vec::new();
    tokens.read_into(0..tokens.tokens(), u32::MAX, &mut all).unwrap();
    all.into_iter().map(|t| t as u32).collect()
}

#[test]
fn workers_change_no_byte() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = corpus(folder.path(), 3000);
    let tokenizer = Tokenizer::train_bpe(corpus.texts(1 << 20), 300, |_| ()).unwrap();
    let files = |workers: usize| -> Vec<Vec<u8>> {
        let out = folder.path().join(format!("out-{workers}"));
        let options = PrepareOptions { workers, validation_fraction: 0.1, ..PrepareOptions::new(out) };
        let done = run(&corpus, &tokenizer, &options);
        let prefixes = [done.train, done.validation.unwrap()];
        prefixes.iter().flat_map(|p| [bin_path(p), idx_path(p)]).map(|p| fs::read(p).unwrap()).collect()
    };
    let expected = files(1);
    assert!(expected.iter().all(|file| file.len() > 100));
    assert_eq!(files(2), expected);
    assert_eq!(files(5), expected);
}

#[test]
fn documents_are_divided_by_hash_and_none_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = corpus(folder.path(), 2000);
    let options = PrepareOptions { validation_fraction: 0.1, ..PrepareOptions::new(folder.path().join("out")) };
    let mut last = None;
    let tokenizer = Tokenizer::bytes();
    let done = prepare(&corpus, &tokenizer, &options, |progress| last = Some(progress)).unwrap();
    let (train, validation) = (&done.sidecar.train, done.sidecar.validation.as_ref().unwrap());
    assert_eq!(train.documents + validation.documents, 2000);
    assert!((140..260).contains(&validation.documents), "{}", validation.documents);
    assert_eq!(done.sidecar.split.by, "document");
    let bytes: u64 = corpus.documents().map(|d| d.unwrap().text.len() as u64).sum();
    assert_eq!(train.text_bytes + validation.text_bytes, bytes);
    let last = last.unwrap();
    assert_eq!((last.documents, last.text_bytes, last.tokens), (2000, bytes, train.tokens + validation.tokens));
    assert_eq!(train.tokens, train.text_bytes + train.documents, "an end-of-text token for each");

    // The same documents, each with its end, on whichever side.
    let decode = |prefix: &Path| tokenizer.decode(&all_tokens(prefix));
    let both = decode(&done.train) + &decode(&done.validation.clone().unwrap());
    let mut found: Vec<&str> = both.split_terminator("<|endoftext|>").collect();
    let mut expected: Vec<String> = corpus.documents().map(|d| d.unwrap().text).collect();
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected);

    // The description agrees with the decoded tokens.
    let tokens = IndexedTokens::open(&done.validation.unwrap()).unwrap();
    assert_eq!(text_bytes(&tokens, &tokenizer).unwrap(), validation.text_bytes);
    let other_seed = PrepareOptions { seed: 1, ..options };
    assert_ne!(run(&corpus, &tokenizer, &other_seed).sidecar.validation.unwrap().bin_xxh3, validation.bin_xxh3);
}

#[test]
fn one_document_is_divided_by_position() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("input.txt");
    let text: String = ('a'..='z').cycle().take(1005).chain("é\n".chars().cycle().take(200)).collect();
    fs::write(&path, &text).unwrap();
    let corpus = Corpus::open(&[&path], CorpusOptions::default()).unwrap();
    let tokenizer = Tokenizer::characters_from(&text).unwrap();
    let options = PrepareOptions { validation_fraction: 0.1, ..PrepareOptions::new(folder.path().join("out")) };
    let done = run(&corpus, &tokenizer, &options);
    assert_eq!((done.sidecar.split.by.as_str(), done.sidecar.documents()), ("position", 1));
    let (train, validation) = (all_tokens(&done.train), all_tokens(&done.validation.unwrap()));
    assert_eq!(train.len(), (1205.0 * 0.9) as usize);
    assert_eq!(tokenizer.decode(&[train, validation].concat()), text);

    let none = PrepareOptions { validation_fraction: 0.0, ..options };
    let done = run(&corpus, &tokenizer, &none);
    assert!(done.validation.is_none() && !done.reused && done.sidecar.documents() == 1);
    assert_eq!(tokenizer.decode(&all_tokens(&done.train)), text);
}

#[test]
fn a_small_corpus_fills_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = corpus(folder.path(), 5);
    for (validation_fraction, validating) in [(1e-6, 1), (0.999_999, 4)] {
        let out = folder.path().join(format!("out-{validation_fraction}"));
        let options = PrepareOptions { validation_fraction, ..PrepareOptions::new(out) };
        let sidecar = run(&corpus, &Tokenizer::bytes(), &options).sidecar;
        assert_eq!(sidecar.documents(), 5);
        assert_eq!(sidecar.validation.unwrap().documents, validating);
        assert_eq!(sidecar.train.documents, 5 - validating);
    }
}

/// None of three books validates whole for a hundredth of the text.
#[test]
fn a_few_books_give_their_share_to_validation_and_no_whole_book() {
    let folder = tempfile::tempdir().unwrap();
    let book = |n: usize| (0..3000).map(|i| format!("{} ", (i * n) % 997)).collect::<String>();
    let paths: Vec<_> = (1..=3)
        .map(|n| {
            let path = folder.path().join(format!("book-{n}.txt"));
            fs::write(&path, book(n)).unwrap();
            path
        })
        .collect();
    let bytes: usize = (1..=3).map(|n| book(n).len()).sum();
    let corpus = Corpus::open(&paths, CorpusOptions::default()).unwrap();
    let options = PrepareOptions { validation_fraction: 0.01, ..PrepareOptions::new(folder.path().join("out")) };
    let done = run(&corpus, &Tokenizer::bytes(), &options);
    let (train, validation) = (&done.sidecar.train, done.sidecar.validation.as_ref().unwrap());
    assert_eq!((train.documents, validation.documents), (3, 1));
    assert_eq!((done.sidecar.documents(), done.sidecar.split.divided_documents), (3, 1), "a divided book counts once");
    assert_eq!(train.text_bytes + validation.text_bytes, bytes as u64);
    assert!(validation.text_bytes.abs_diff(bytes as u64 / 100) <= 1, "{} of {bytes}", validation.text_bytes);
    // One book's beginning and end make up the whole book.
    let (train, validation) = (all_tokens(&done.train), all_tokens(&done.validation.unwrap()));
    let tokenizer = Tokenizer::bytes();
    let (train, end) = (tokenizer.decode(&train), tokenizer.decode(&validation));
    assert!((1..=3).any(|n| book(n).ends_with(end.trim_end_matches(|c| c != ' '))), "{end}");
    assert!((1..=3).filter(|n| train.contains(&book(*n))).count() == 2);
    // For every seed, and hence for each of the books.
    for seed in 0..24 {
        let options = PrepareOptions { seed, validation_fraction: 0.1, ..options.clone() };
        let validation = run(&corpus, &Tokenizer::bytes(), &options).sidecar.validation.unwrap();
        let share = validation.text_bytes as f64 / bytes as f64;
        assert!((0.05..0.25).contains(&share), "{share} with seed {seed}");
    }
}

#[test]
fn an_earlier_result_is_kept_until_something_changes() {
    let folder = tempfile::tempdir().unwrap();
    let options = PrepareOptions { validation_fraction: 0.2, ..PrepareOptions::new(folder.path().join("my.data")) };
    let files = corpus(folder.path(), 40);
    let bytes = Tokenizer::bytes();
    let first = run(&files, &bytes, &options);
    assert!(!first.reused && first.reason.contains("no earlier result"), "{}", first.reason);
    let second = run(&files, &bytes, &options);
    assert!(second.reused);
    assert_eq!(second.sidecar, first.sidecar);
    assert!(run(&files, &bytes, &PrepareOptions { workers: 3, ..options.clone() }).reused);

    let rebuilt = |corpus: &Corpus, tokenizer: &Tokenizer, options: &PrepareOptions| {
        let done = run(corpus, tokenizer, options);
        assert!(!done.reused);
        done.reason
    };
    assert!(rebuilt(&files, &bytes, &PrepareOptions { reuse: false, ..options.clone() }).contains("switched off"));
    assert!(rebuilt(&files, &bytes, &PrepareOptions { seed: 9, ..options.clone() }).contains("changed"));
    let other = Tokenizer::characters_from_texts(files.texts(u64::MAX)).unwrap();
    assert!(rebuilt(&files, &other, &options).contains("changed"));
    assert!(rebuilt(&corpus(folder.path(), 41), &other, &options).contains("changed"));

    // Damage is noticed and repaired.
    let files = corpus(folder.path(), 41);
    run(&files, &bytes, &options);
    let bin = bin_path(&folder.path().join("my.data.train"));
    let whole = fs::read(&bin).unwrap();
    fs::write(&bin, &whole[..whole.len() - 1]).unwrap();
    assert!(rebuilt(&files, &bytes, &options).contains("damaged"));
    assert_eq!(fs::read(&bin).unwrap(), whole);
    fs::write(Sidecar::path(&options.out), "{}").unwrap();
    assert!(rebuilt(&files, &bytes, &options).contains("cannot be used"));
}

#[test]
fn a_long_document_is_cut_for_the_workers_without_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.txt");
    let text = "The yard holds forty trains.\nThey leave at dawn\nand come back; \n\n  at night.\n".repeat(9000);
    fs::write(&path, &text).unwrap();
    let corpus = Corpus::open(&[&path], CorpusOptions::default()).unwrap();
    let tokenizer = Tokenizer::train_bpe(corpus.texts(u64::MAX), 300, |_| ()).unwrap();
    let options = PrepareOptions { validation_fraction: 0.0, ..PrepareOptions::new(folder.path().join("out")) };
    let mut pieces = 0;
    let done = prepare(&corpus, &tokenizer, &options, |_| pieces += 1).unwrap();
    assert!(pieces > 2, "{pieces}");
    assert_eq!(done.sidecar.train.documents, 1);
    let mut expected = tokenizer.encode(&text).unwrap();
    expected.extend(tokenizer.eos());
    assert_eq!(all_tokens(&done.train), expected);
}

#[test]
fn an_error_in_the_middle_ends_every_thread_and_keeps_the_old_files() {
    let folder = tempfile::tempdir().unwrap();
    let options = PrepareOptions { workers: 2, ..PrepareOptions::new(folder.path().join("out")) };
    let tokenizer = Tokenizer::characters_from("Document goes from the yard to the sea.\n0123456789").unwrap();
    let files = corpus(folder.path(), 3000);
    run(&files, &tokenizer, &options);
    let kept = |p: &Path| fs::read(bin_path(p)).unwrap();
    let train = folder.path().join("out.train");
    let before = kept(&train);

    let broken = folder.path().join("text/c.jsonl");
    fs::write(&broken, "{\"text\": \"sea ☃\"}\n").unwrap();
    let files = Corpus::open(&[folder.path().join("text")], CorpusOptions::default()).unwrap();
    let error = prepare(&files, &tokenizer, &options, |_| ()).unwrap_err();
    assert!(matches!(error, DataError::Vocabulary { .. }), "{error}");
    assert!(error.to_string().contains("c.jsonl") && error.to_string().contains("U+2603"), "{error}");

    fs::write(&broken, "{\"text\": 3}\n").unwrap();
    let error = prepare(&files, &tokenizer, &options, |_| ()).unwrap_err();
    assert!(error.to_string().contains("c.jsonl:1"), "{error}");
    assert_eq!(kept(&train), before);
    let names: Vec<PathBuf> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(names.len(), 1 + 6, "the texts, two pairs, a description and the lock: {names:?}");
}

/// Documents are tokenized as transformers tokenizes a text; what was prepared otherwise is not
/// kept.
#[test]
fn documents_begin_with_the_bos_token_that_the_tokenizer_asks_for() {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers");
    let file = folder.path().join("text.jsonl");
    std::fs::write(&file, "{\"text\": \"a cat\"}\n{\"text\": \"mat\"}\n").unwrap();
    let corpus = Corpus::open(&[file], CorpusOptions::default()).unwrap();
    let options = PrepareOptions { validation_fraction: 0.0, ..PrepareOptions::new(folder.path().join("out")) };
    let tokens = |name: &str, add_bos: Option<bool>| {
        let tokenizer = Tokenizer::load(&golden.join(name)).unwrap().with_bos(add_bos).unwrap();
        let made = run(&corpus, &tokenizer, &options);
        assert!(!made.reused, "{name} {add_bos:?}");
        let texts = IndexedTokens::open(&made.train).unwrap();
        assert_eq!(text_bytes(&texts, &tokenizer).unwrap(), 8);
        assert_eq!(made.sidecar.tokenizer.before, tokenizer.before());
        all_tokens(&made.train)
    };
    assert_eq!(tokens("template_begin", None), [1, 5, 7, 2, 1, 10, 2]);
    assert_eq!(tokens("template_begin", Some(false)), [5, 7, 2, 10, 2]);
    assert_eq!(tokens("template_begin", None), [1, 5, 7, 2, 1, 10, 2], "the other was kept");
    // The end-of-text token of its own is the separator, and comes once.
    assert_eq!(tokens("template_both", None), [1, 5, 7, 2, 1, 10, 2]);
    assert_eq!(tokens("none", Some(true)), [1, 5, 7, 2, 1, 10, 2]);
}

/// One in ten of two runs that began together once found a file gone that the other was replacing.
#[test]
fn several_at_once_prepare_the_same_text_and_all_can_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = &corpus(folder.path(), 40);
    for round in 0..20 {
        let out = &folder.path().join(format!("out-{round}"));
        let together = &std::sync::Barrier::new(4);
        let made: Vec<bool> = std::thread::scope(|scope| {
            let runs = (0..4).map(|_| {
                scope.spawn(move || {
                    together.wait();
                    let prepared = run(corpus, &Tokenizer::bytes(), &PrepareOptions::new(out));
                    IndexedTokens::open(&prepared.train).unwrap();
                    IndexedTokens::open(prepared.validation.as_ref().unwrap()).unwrap();
                    !prepared.reused
                })
            });
            runs.collect::<Vec<_>>().into_iter().map(|run| run.join().unwrap()).collect()
        });
        assert_eq!(made.iter().filter(|made| **made).count(), 1, "round {round}: one writes, the others find");
    }
}
