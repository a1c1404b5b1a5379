//! Bad input as users hand it in. Each case must give an error of the right kind that names the
//! object and says what to do.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use trainyard_data::indexed::{TokenType, bin_path, idx_path};
use trainyard_data::prepare::Sidecar;
use trainyard_data::{
    Corpus, CorpusOptions, DataError, Dataset, DatasetSpec, EvalOptions, IndexedTokens, IndexedWriter, Loader,
    LoaderConfig, Position, PrepareOptions, Sampling, Source, Tokenizer, Transforms, eval_batches, prepare,
};

/// A case: an operation in a fresh folder, the expected kind of error, and words that its message
/// must contain.
struct Case {
    name: &'static str,
    run: fn(&Path) -> DataError,
    kind: fn(&DataError) -> bool,
    words: &'static [&'static str],
}

macro_rules! kind {
    ($variant:ident) => {
        |error| matches!(error, DataError::$variant { .. })
    };
}

/// The error of reading `bytes` as a corpus file called `name`.
fn reading(folder: &Path, name: &str, bytes: &[u8]) -> DataError {
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    let corpus = Corpus::open(&[path], CorpusOptions { document_bytes_max: 1000, ..CorpusOptions::default() });
    let corpus = match corpus {
        Ok(corpus) => corpus,
        Err(error) => return error,
    };
    corpus.documents().find_map(Result::err).expect("must be refused")
}

fn opening(paths: &[PathBuf]) -> DataError {
    Corpus::open(paths, CorpusOptions::default()).expect_err("must be refused")
}

fn loading(folder: &Path, bytes: &[u8]) -> DataError {
    let path = folder.join("tokenizer.json");
    fs::write(&path, bytes).unwrap();
    Tokenizer::load(&path).expect_err("must be refused")
}

/// A small valid pair of token files.
fn tokens(folder: &Path) -> PathBuf {
    let prefix = folder.join("tokens");
    let mut writer = IndexedWriter::create(&prefix, TokenType::U16).unwrap();
    writer.push_document(&(0..50).collect::<Vec<u32>>()).unwrap();
    writer.finish().unwrap();
    prefix
}

fn damaged(folder: &Path, damage: fn(&Path)) -> DataError {
    let prefix = tokens(folder);
    damage(&prefix);
    IndexedTokens::open(&prefix).expect_err("must be refused")
}

fn spec(prefix: PathBuf) -> DatasetSpec {
    DatasetSpec {
        sources: vec![Source { prefix, weight: 1.0 }],
        sequence_length: 8,
        vocab_size: 100,
        respect_document_boundaries: true,
        sampling: Sampling::Packed,
        seed: 0,
        transforms: Transforms::default(),
    }
}

fn dataset(folder: &Path, change: fn(&mut DatasetSpec)) -> DataError {
    let mut spec = spec(tokens(folder));
    change(&mut spec);
    Dataset::open(spec).expect_err("must be refused")
}

fn loader(folder: &Path, change: fn(&mut LoaderConfig)) -> DataError {
    let dataset = Arc::new(Dataset::open(spec(tokens(folder))).unwrap());
    let mut config = LoaderConfig::new(2);
    change(&mut config);
    Loader::new(dataset, config, Position::default()).expect_err("must be refused")
}

fn preparing(folder: &Path, text: &str, change: impl Fn(&mut PrepareOptions)) -> DataError {
    let path = folder.join("input.txt");
    fs::write(&path, text).unwrap();
    let corpus = Corpus::open(&[path], CorpusOptions::default()).unwrap();
    let mut options = PrepareOptions::new(folder.join("out"));
    change(&mut options);
    prepare(&corpus, &Tokenizer::bytes(), &options, |_| ()).expect_err("must be refused")
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

const BPE: &str = r#"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,
    "decoder":null,"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a b"]}}"#;

const CASES: &[Case] = &[
    // Corpora.
    Case {
        name: "missing file",
        run: |f| opening(&[f.join("nowhere.txt")]),
        kind: kind!(Io),
        words: &["nowhere.txt", "check the path"],
    },
    Case {
        name: "empty folder",
        run: |f| opening(&[f.to_path_buf()]),
        kind: kind!(TooLittle),
        words: &["no text found"],
    },
    Case { name: "no paths", run: |_| opening(&[]), kind: kind!(TooLittle), words: &["no text found"] },
    Case { name: "empty file", run: |f| reading(f, "a.txt", b""), kind: kind!(Input), words: &["a.txt", "is empty"] },
    Case {
        name: "empty JSONL",
        run: |f| reading(f, "a.jsonl", b""),
        kind: kind!(Input),
        words: &["a.jsonl", "is empty"],
    },
    Case {
        name: "Latin-1 text",
        run: |f| reading(f, "a.txt", b"one\ntwo\ncaf\xE9"),
        kind: kind!(Input),
        words: &["a.txt:3", "not UTF-8", "iconv"],
    },
    Case {
        name: "UTF-16 text",
        run: |f| reading(f, "a.txt", b"\xFF\xFEa\0b\0"),
        kind: kind!(Input),
        words: &["a.txt:1", "UTF-16"],
    },
    Case {
        name: "a damaged Parquet file",
        run: |f| reading(f, "a.parquet", b"PAR1"),
        kind: kind!(Input),
        words: &["a.parquet", "is damaged, or not a Parquet file"],
    },
    Case {
        name: "JSON array named",
        run: |f| reading(f, "a.json", b"[]"),
        kind: kind!(Input),
        words: &["a.json", ".jsonl"],
    },
    Case {
        name: "broken JSON line",
        run: |f| reading(f, "a.jsonl", b"{\"text\": \"x\"}\n{\"text\": \n"),
        kind: kind!(Input),
        words: &["a.jsonl:2", "not valid JSON"],
    },
    Case {
        name: "JSON line without field",
        run: |f| reading(f, "a.jsonl", b"\n{\"content\": \"x\"}\n"),
        kind: kind!(Input),
        words: &["a.jsonl:2", "\"text\"", "content"],
    },
    Case {
        name: "JSON field is a number",
        run: |f| reading(f, "a.jsonl", b"{\"text\": 5}"),
        kind: kind!(Input),
        words: &["a.jsonl:1", "not a string"],
    },
    Case {
        name: "JSON line is an array",
        run: |f| reading(f, "a.jsonl", b"[1]"),
        kind: kind!(Input),
        words: &["a.jsonl:1", "object"],
    },
    Case {
        name: "non-UTF-8 JSON line",
        run: |f| reading(f, "a.jsonl", b"{\"text\": \"\xE9\"}"),
        kind: kind!(Input),
        words: &["a.jsonl:1", "UTF-8"],
    },
    Case {
        name: "document too long",
        run: |f| reading(f, "a.txt", &[b'x'; 1001]),
        kind: kind!(Input),
        words: &["a.txt:1", "1000", "separator"],
    },
    Case {
        name: "zstd bomb",
        run: |f| reading(f, "a.txt.zst", &zstd::encode_all(&vec![0u8; 1 << 24][..], 3).unwrap()),
        kind: kind!(Input),
        words: &["a.txt.zst", "1000"],
    },
    Case {
        name: "truncated gzip",
        run: |f| reading(f, "a.txt.gz", &gzip(&[b'x'; 500])[..15]),
        kind: kind!(Input),
        words: &["a.txt.gz", "cut off"],
    },
    Case {
        name: "gzip that is not",
        run: |f| reading(f, "a.jsonl.gz", b"{\"text\": \"x\"}"),
        kind: kind!(Input),
        words: &["a.jsonl.gz", "gzip"],
    },
    Case {
        name: "zstd with a window that is too large",
        // A frame by hand (RFC 8878): magic, no content size, a window of 2^28 bytes, one raw
        // block.
        run: |f| reading(f, "a.txt.zst", b"\x28\xb5\x2f\xfd\x00\x90\x19\x00\x00abc"),
        kind: kind!(Input),
        words: &["a.txt.zst", "a window of more than 128 MiB", "zstd -d --long=31"],
    },
    Case {
        name: "a device as text",
        run: |_| opening(&["/dev/zero".into()]),
        kind: kind!(Input),
        words: &["/dev/zero", "neither a file nor a folder", "write what it gives to a file"],
    },
    Case {
        name: "a pipe as text",
        run: |f| {
            let pipe = f.join("pipe");
            assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
            opening(&[pipe])
        },
        kind: kind!(Input),
        words: &["pipe", "neither a file nor a folder"],
    },
    Case {
        name: "truncated zstd",
        run: |f| reading(f, "a.txt.zst", &zstd::encode_all(&b"some text"[..], 3).unwrap()[..10]),
        kind: kind!(Input),
        words: &["a.txt.zst", "cut off"],
    },
    Case {
        name: "zstd that is not",
        run: |f| reading(f, "a.txt.zst", b"plain text"),
        kind: kind!(Input),
        words: &["a.txt.zst", "zstd"],
    },
    Case {
        name: "empty separator",
        run: |f| {
            let options = CorpusOptions { document_separator: Some(String::new()), ..CorpusOptions::default() };
            Corpus::open(&[f], options).unwrap_err()
        },
        kind: kind!(Setting),
        words: &["document_separator"],
    },
    // Tokenizers.
    Case {
        name: "missing tokenizer",
        run: |f| Tokenizer::load(&f.join("nowhere.json")).unwrap_err(),
        kind: kind!(Io),
        words: &["nowhere.json"],
    },
    Case {
        name: "empty tokenizer",
        run: |f| loading(f, b""),
        kind: kind!(Tokenizer),
        words: &["tokenizer.json", "is empty"],
    },
    Case {
        name: "truncated tokenizer",
        run: |f| loading(f, &BPE.as_bytes()[..BPE.len() / 2]),
        kind: kind!(Tokenizer),
        words: &["tokenizer.json", "not valid JSON"],
    },
    Case {
        name: "non-UTF-8 tokenizer",
        run: |f| loading(f, b"{\"\xFF\": 1}"),
        kind: kind!(Tokenizer),
        words: &["not UTF-8"],
    },
    Case {
        name: "config instead of tokenizer",
        run: |f| loading(f, b"{\"model_type\": \"gpt2\"}"),
        kind: kind!(Tokenizer),
        words: &["neither"],
    },
    Case {
        name: "unknown model",
        run: |f| loading(f, BPE.replace("\"BPE\"", "\"Magic\"").replace("\"a b\"", "").as_bytes()),
        kind: kind!(Tokenizer),
        words: &["not a valid tokenizer"],
    },
    Case {
        name: "merge outside the vocabulary",
        run: |f| loading(f, BPE.as_bytes()),
        kind: kind!(Tokenizer),
        words: &["merge 0", "\"ab\""],
    },
    Case {
        name: "merge of three",
        run: |f| loading(f, BPE.replace("[\"a b\"]", "[[\"a\",\"b\",\"a\"]]").as_bytes()),
        kind: kind!(Tokenizer),
        words: &["merge 0", "pair"],
    },
    Case {
        name: "empty vocabulary",
        run: |f| loading(f, BPE.replace("\"a\":0,\"b\":1", "").replace("\"a b\"", "").as_bytes()),
        kind: kind!(Tokenizer),
        words: &["no tokens"],
    },
    Case {
        name: "own tokenizer of the future",
        run: |f| loading(f, b"{\"trainyard_tokenizer\": 7, \"kind\": \"bytes\"}"),
        kind: kind!(Tokenizer),
        words: &["version 7"],
    },
    Case {
        name: "own tokenizer of unknown kind",
        run: |f| loading(f, b"{\"trainyard_tokenizer\": 1, \"kind\": \"runes\"}"),
        kind: kind!(Tokenizer),
        words: &["runes"],
    },
    Case {
        name: "characters out of order",
        run: |f| loading(f, b"{\"trainyard_tokenizer\": 1, \"kind\": \"characters\", \"characters\": \"ba\"}"),
        kind: kind!(Tokenizer),
        words: &["order"],
    },
    Case {
        name: "no characters",
        run: |f| loading(f, b"{\"trainyard_tokenizer\": 1, \"kind\": \"characters\", \"characters\": \"\"}"),
        kind: kind!(Tokenizer),
        words: &["no characters"],
    },
    Case {
        name: "character outside the vocabulary",
        run: |_| Tokenizer::characters_from("abc").unwrap().encode("abd").unwrap_err(),
        kind: kind!(Vocabulary),
        words: &["'d'", "U+0064"],
    },
    Case {
        name: "vocabulary below the bytes",
        run: |_| Tokenizer::train_bpe(std::iter::empty(), 100, |_| ()).unwrap_err(),
        kind: kind!(Setting),
        words: &["vocab_size", "257"],
    },
    Case {
        name: "nothing to train on",
        run: |_| Tokenizer::train_bpe(std::iter::empty(), 300, |_| ()).unwrap_err(),
        kind: kind!(TooLittle),
        words: &["no text"],
    },
    // Token files.
    Case {
        name: "missing token files",
        run: |f| IndexedTokens::open(&f.join("nowhere")).unwrap_err(),
        kind: kind!(Io),
        words: &["nowhere.idx"],
    },
    Case {
        name: "idx is a folder",
        run: |f| {
            damaged(f, |p| {
                fs::remove_file(idx_path(p)).unwrap();
                fs::create_dir(idx_path(p)).unwrap()
            })
        },
        kind: kind!(Io),
        words: &["tokens.idx", "regular file"],
    },
    Case {
        name: "empty idx",
        run: |f| damaged(f, |p| fs::write(idx_path(p), b"").unwrap()),
        kind: kind!(TokenFile),
        words: &["tokens.idx", "header", "prepare"],
    },
    Case {
        name: "idx of another format",
        run: |f| damaged(f, |p| fs::write(idx_path(p), b"TNTIDX\0\0 and more that is long enough").unwrap()),
        kind: kind!(TokenFile),
        words: &["MMIDIDX"],
    },
    Case {
        name: "truncated idx",
        run: |f| {
            damaged(f, |p| {
                let b = fs::read(idx_path(p)).unwrap();
                fs::write(idx_path(p), &b[..b.len() - 5]).unwrap()
            })
        },
        kind: kind!(TokenFile),
        words: &["tokens.idx", "bytes"],
    },
    Case {
        name: "truncated bin",
        run: |f| damaged(f, |p| fs::write(bin_path(p), [0; 99]).unwrap()),
        kind: kind!(TokenFile),
        words: &["tokens.bin", "99", "100"],
    },
    Case {
        name: "missing bin",
        run: |f| damaged(f, |p| fs::remove_file(bin_path(p)).unwrap()),
        kind: kind!(Io),
        words: &["tokens.bin"],
    },
    Case {
        name: "lying count",
        run: |f| {
            damaged(f, |p| {
                let mut b = fs::read(idx_path(p)).unwrap();
                b[18..26].fill(0xFF);
                fs::write(idx_path(p), b).unwrap()
            })
        },
        kind: kind!(TokenFile),
        words: &["claims"],
    },
    Case {
        name: "token outside the vocabulary",
        run: |f| IndexedTokens::open(&tokens(f)).unwrap().check_tokens(49).unwrap_err(),
        kind: kind!(Vocabulary),
        words: &["tokens.bin", "token 49", "vocabulary of 49"],
    },
    Case {
        name: "description is no JSON",
        run: |f| {
            fs::write(f.join("x.json"), "{").unwrap();
            Sidecar::read(&f.join("x")).unwrap_err()
        },
        kind: kind!(TokenFile),
        words: &["x.json"],
    },
    // Datasets, loaders, evaluation.
    Case { name: "no sources", run: |f| dataset(f, |s| s.sources.clear()), kind: kind!(Setting), words: &["sources"] },
    Case {
        name: "sequence of nothing",
        run: |f| dataset(f, |s| s.sequence_length = 0),
        kind: kind!(Setting),
        words: &["sequence_length"],
    },
    Case {
        name: "sequence longer than the data",
        run: |f| dataset(f, |s| s.sequence_length = 50),
        kind: kind!(TooLittle),
        words: &["50 tokens", "51"],
    },
    Case {
        name: "negative weight",
        run: |f| dataset(f, |s| s.sources[0].weight = -1.0),
        kind: kind!(Setting),
        words: &["weight", "-1"],
    },
    Case {
        name: "no vocabulary",
        run: |f| dataset(f, |s| s.vocab_size = 0),
        kind: kind!(Setting),
        words: &["vocab_size"],
    },
    Case {
        name: "data of a larger vocabulary",
        run: |f| {
            let path = f.join("input.txt");
            fs::write(&path, "some text that is long enough for both parts of it").unwrap();
            let corpus = Corpus::open(&[path], CorpusOptions::default()).unwrap();
            let options = PrepareOptions { validation_fraction: 0.1, ..PrepareOptions::new(f.join("out")) };
            let done = prepare(&corpus, &Tokenizer::bytes(), &options, |_| ()).unwrap();
            Dataset::open(DatasetSpec { vocab_size: 256, ..spec(done.train) }).unwrap_err()
        },
        kind: kind!(Vocabulary),
        words: &["257", "256", "tokenizer"],
    },
    Case {
        name: "rank beyond the world",
        run: |f| loader(f, |c| c.rank = 1),
        kind: kind!(Setting),
        words: &["rank", "1 of 1"],
    },
    Case {
        name: "batch of nothing",
        run: |f| loader(f, |c| c.micro_batch_size = 0),
        kind: kind!(Setting),
        words: &["micro_batch_size"],
    },
    Case {
        name: "a million workers",
        run: |f| loader(f, |c| c.workers = 1_000_000),
        kind: kind!(Setting),
        words: &["workers"],
    },
    Case {
        name: "nothing to evaluate",
        run: |f| {
            let prefix = f.join("one");
            let mut writer = IndexedWriter::create(&prefix, TokenType::U16).unwrap();
            writer.push_document(&[1]).unwrap();
            writer.finish().unwrap();
            let options = EvalOptions {
                sequence_length: 4,
                rows: 1,
                vocab_size: 9,
                respect_document_boundaries: true,
                tokens_max: None,
                spans: None,
            };
            eval_batches(&IndexedTokens::open(&prefix).unwrap(), options).unwrap_err()
        },
        kind: kind!(TooLittle),
        words: &["1 tokens"],
    },
    // Preparing.
    Case {
        name: "validation of everything",
        run: |f| preparing(f, "text", |o| o.validation_fraction = 1.0),
        kind: kind!(Setting),
        words: &["validation_fraction"],
    },
    Case {
        name: "validation of NaN",
        run: |f| preparing(f, "text", |o| o.validation_fraction = f64::NAN),
        kind: kind!(Setting),
        words: &["validation_fraction"],
    },
    Case {
        name: "too short to divide",
        run: |f| preparing(f, "x", |_| ()),
        kind: kind!(TooLittle),
        words: &["1 characters"],
    },
    Case {
        name: "only blank lines",
        run: |f| {
            fs::write(f.join("a.jsonl"), "\n\n").unwrap();
            let c = Corpus::open(&[f], CorpusOptions::default()).unwrap();
            prepare(&c, &Tokenizer::bytes(), &PrepareOptions::new(f.join("out")), |_| ()).unwrap_err()
        },
        kind: kind!(TooLittle),
        words: &["no usable document"],
    },
    Case {
        name: "output below a file",
        run: |f| {
            let out = f.join("input.txt/out");
            preparing(f, "text", |o| o.out = out.clone())
        },
        kind: kind!(Io),
        words: &["input.txt"],
    },
    Case {
        name: "output without a name",
        run: |f| preparing(f, "text", |o| o.out = PathBuf::from("/")),
        kind: kind!(Setting),
        words: &["out"],
    },
];

#[test]
fn every_case_is_a_clear_error() {
    let mut wrong = Vec::new();
    for case in CASES {
        let folder = tempfile::tempdir().unwrap();
        let error = (case.run)(folder.path());
        let message = error.to_string();
        let missing: Vec<_> = case.words.iter().filter(|word| !message.contains(**word)).collect();
        if !(case.kind)(&error) || !missing.is_empty() {
            wrong.push(format!("{}: {message:?} ({error:?}) lacks {missing:?}", case.name));
        }
        if message.trim_end().ends_with(';') || message.contains("  ") {
            wrong.push(format!("{}: {message:?} is badly put", case.name));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(CASES.len() >= 25);
}

/// The system's own refusal, from a device that is always full, gets the matching advice.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_said() {
    let reason = fs::write("/dev/full", b"x").expect_err("/dev/full takes nothing");
    let error = DataError::Io { action: "write", path: "/dev/full".into(), reason };
    assert!(error.to_string().contains("free some space"), "{error}");
}

#[test]
#[cfg(unix)]
fn an_unwritable_folder_is_said_before_anything_is_read() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let locked = folder.path().join("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(locked.join("probe"), b"").is_ok() {
        return trainyard_testing::skip("this user may write into any folder");
    }
    let error = preparing(folder.path(), "some text", |o| o.out = folder.path().join("locked/out"));
    assert!(matches!(error, DataError::Io { .. }) && error.to_string().contains("permissions"), "{error}");
}
