//! Corpora that other people's libraries wrote (scripts/golden/make_sources.py) are read byte for
//! byte, and damaged ones are refused.

use std::fs;
use std::path::{Path, PathBuf};

use trainyard_data::{Corpus, CorpusOptions, DataError, IndexedTokens, OnInvalid};

/// Texts in plain.tar, as make_sources.py has it too.
const PLAIN_TEXTS: usize = 7;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/sources").join(name)
}

fn texts() -> Vec<String> {
    serde_json::from_slice(&fs::read(golden("texts.json")).unwrap()).unwrap()
}

fn read(path: &Path, options: CorpusOptions) -> Result<Vec<String>, DataError> {
    let corpus = Corpus::open(&[path], options)?;
    corpus.documents().map(|document| document.map(|document| document.text)).collect()
}

fn error_of(path: &Path, options: CorpusOptions) -> String {
    match read(path, options) {
        Ok(texts) => panic!("{} must be refused and gave {} texts", path.display(), texts.len()),
        Err(error) => error.to_string(),
    }
}

fn field(name: &str) -> CorpusOptions {
    CorpusOptions { field: name.into(), ..CorpusOptions::default() }
}

#[test]
fn every_format_gives_the_texts_that_its_library_wrote() {
    for name in [
        "snappy.parquet",
        "zstd.parquet",
        "gzip.parquet",
        "none.parquet",
        "packed.tar.gz",
        "packed.tar.zst",
        "mds",
        "mds_zstd",
        "mds_gz",
        "mds/index.json",
        "mds/*.mds",
    ] {
        let found = read(&golden(name), CorpusOptions::default()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(found, texts(), "{name}");
    }
    assert_eq!(read(&golden("plain.tar"), CorpusOptions::default()).unwrap(), texts()[..PLAIN_TEXTS]);
    // A column of a structure, and another column.
    let sources: Vec<String> = (0..texts().len()).map(|i| format!("source {i}")).collect();
    assert_eq!(read(&golden("mds"), field("source")).unwrap(), sources);
    let languages = read(&golden("zstd.parquet"), field("meta.lang")).unwrap();
    assert!(languages.len() == texts().len() && languages.iter().all(|language| language == "en"));
}

#[test]
fn records_without_text_are_skipped_where_that_is_asked_for() {
    let options = CorpusOptions { on_invalid: OnInvalid::Skip, ..CorpusOptions::default() };
    assert_eq!(read(&golden("nulls.parquet"), options.clone()).unwrap(), ["a", "b"]);
    let error = error_of(&golden("nulls.parquet"), CorpusOptions::default());
    assert!(error.contains("row 2 has no value in column \"text\""), "{error}");
}

#[test]
fn llm_c_token_files_are_read_with_their_documents() {
    let documents: Vec<Vec<i32>> = serde_json::from_slice(&fs::read(golden("llm_c.json")).unwrap()).unwrap();
    for (name, eot, shift) in [("gpt2.bin", 50256, 0), ("llama3.bin", 128_000, 60_000)] {
        let tokens = IndexedTokens::open(&golden(name)).unwrap();
        assert_eq!(tokens.documents(), documents.len(), "{name}");
        for (number, document) in documents.iter().enumerate() {
            let mut found = Vec::new();
            tokens.read_into(tokens.document(number), 128_256, &mut found).unwrap();
            let expected: Vec<i32> = [eot].into_iter().chain(document.iter().map(|token| token + shift)).collect();
            assert_eq!(found, expected, "{name}");
        }
    }
}

/// A damaged or unusable file, and words of its error.
fn refused(folder: &Path) -> Vec<(PathBuf, CorpusOptions, &'static str)> {
    let cut = |name: &str, bytes: usize, as_name: &str| {
        let path = folder.join(as_name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let whole = fs::read(golden(name)).unwrap();
        fs::write(&path, &whole[..whole.len() - bytes]).unwrap();
        path
    };
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    };
    let flipped = |name: &str, at: usize, as_name: &str| {
        let mut bytes = fs::read(golden(name)).unwrap();
        bytes[at] ^= 0x40;
        write(as_name, &bytes)
    };
    let index = fs::read_to_string(golden("mds/index.json")).unwrap();
    let whole = CorpusOptions::default;
    let short = CorpusOptions { document_bytes_max: 10, ..whole() };
    let shard = fs::read(golden("mds/shard.00000.mds")).unwrap();
    let dataset = |name: &str, index: &str, shard: &[u8]| {
        let path = write(&format!("{name}/index.json"), index.as_bytes());
        for number in 0..9 {
            let file = format!("shard.0000{number}.mds");
            if golden("mds").join(&file).is_file() {
                let bytes = fs::read(golden("mds").join(&file)).unwrap();
                write(&format!("{name}/{file}"), if number == 0 { shard } else { &bytes });
            }
        }
        path
    };
    let mut damaged = shard.clone();
    *damaged.last_mut().unwrap() ^= 1;
    vec![
        (cut("snappy.parquet", 1, "a.parquet"), whole(), "not a Parquet file"),
        (write("text.parquet", b"no parquet"), whole(), "not a Parquet file"),
        (write("empty.parquet", b""), whole(), "not a Parquet file"),
        (golden("brotli.parquet"), whole(), "write it again with zstd"),
        (golden("zstd.parquet"), field("body"), "has no column \"body\" (columns: id, text"),
        (golden("zstd.parquet"), field("id"), "column \"id\" is INT64, not text"),
        (golden("zstd.parquet"), field("words.list.element"), "is a list, not text"),
        (golden("zstd.parquet"), short.clone(), "row 1 is longer than 10 bytes"),
        (write("a.parquet.gz", b"x"), whole(), "compressed Parquet"),
        (cut("plain.tar", 10_500, "cut.tar"), whole(), "ends inside a member"),
        (cut("packed.tar.gz", 10, "cut.tar.gz"), whole(), "gzip stream is damaged or cut off"),
        (cut("packed.tar.zst", 10, "cut.tar.zst"), whole(), "zstd stream is damaged or cut off"),
        (write("text.tar", &[b'x'; 2000]), whole(), "wrong checksum at byte 512"),
        (write("short.tar", b"x"), whole(), "ends inside a block"),
        (write("empty.tar", b""), whole(), "holds no samples"),
        (flipped("plain.tar", 3, "flipped.tar"), whole(), "wrong checksum"),
        (golden("plain.tar"), field("body"), "folder/sample0000.json has no field \"body\""),
        (golden("plain.tar"), short.clone(), "longer than 10 bytes"),
        (write("a.mds", b"xy"), whole(), "not an MDS shard"),
        (write("b.mds", &[255; 64]), whole(), "not an MDS shard: its header says 4294967295 samples"),
        (cut("mds/shard.00000.mds", 1, "c.mds"), whole(), "not an MDS shard: sample"),
        (golden("mds"), field("body"), "has no column \"body\" (columns: id, source, text)"),
        (golden("mds"), field("id"), "column \"id\" is encoded as int"),
        (golden("mds"), short, "sample 0 is longer than 10 bytes"),
        (dataset("hash", &index, &damaged), whole(), "and its index says"),
        (dataset("size", &index, &shard[1..]), whole(), "bytes of its index"),
        (dataset("up", &index.replace("shard.00000.mds", "../a.mds"), &shard), whole(), "which is no file name"),
        (dataset("gone", &index.replace("shard.00000.mds", "shard.mds"), &shard), whole(), "cannot open"),
        (
            write("br/index.json", index.replace("\"compression\": null", "\"compression\": \"br:3\"").as_bytes()),
            whole(),
            "compressed by \"br\"",
        ),
        (write("half/index.json", index.replace("raw_data", "raw").as_bytes()), whole(), "damaged index of MDS"),
        (write("other/index.json", b"{}"), whole(), "is not the index of an MDS dataset"),
        (folder.join("none/*.tar"), whole(), "matches no file"),
        (folder.join("a***b"), whole(), "is not a pattern of paths"),
    ]
}

#[test]
fn damaged_files_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    for (path, options, words) in refused(folder.path()) {
        let error = error_of(&path, options);
        assert!(error.contains(words), "{}: {error}\nwithout {words:?}", path.display());
        assert!(error.contains("; "), "without advice: {error}");
    }
}

#[test]
fn damaged_llm_c_files_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let whole = fs::read(golden("gpt2.bin")).unwrap();
    let with = |at: usize, value: u32| {
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    for (bytes, words) in [
        (whole[..whole.len() - 2].to_vec(), "where its header counts"),
        (whole[..1000].to_vec(), "header of 1024 bytes"),
        (with(4, 9), "version 9"),
        (with(8, u32::MAX), "where its header counts"),
    ] {
        let path = folder.path().join("a.bin");
        fs::write(&path, bytes).unwrap();
        let error = IndexedTokens::open(&path).expect_err("must be refused").to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Bytes that differ from a good file at some place give documents or an error, and no panic.
#[test]
fn no_damage_makes_a_reader_panic() {
    let folder = tempfile::tempdir().unwrap();
    let mut state = 88_172_645_463_325_252u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    for name in ["snappy.parquet", "zstd.parquet", "gzip.parquet", "none.parquet", "plain.tar", "mds/shard.00001.mds"] {
        let whole = fs::read(golden(name)).unwrap();
        let path = folder.path().join(Path::new(name).file_name().unwrap());
        for _ in 0..120 {
            let mut bytes = whole.clone();
            for _ in 0..1 + random(3) {
                // Headers and footers are where it hurts.
                let at =
                    if random(2) == 0 { random(bytes.len()) } else { bytes.len() - 1 - random(bytes.len().min(900)) };
                bytes[at] = random(256) as u8;
            }
            if random(8) == 0 {
                bytes.truncate(random(bytes.len()));
            }
            fs::write(&path, bytes).unwrap();
            let _ = read(&path, CorpusOptions::default());
        }
    }
}
