//! Text in object stores through the program: the token files are those of the same text on disk.

mod common;
#[path = "../../store/tests/common/mod.rs"]
mod server;

use common::{Folder, Ran};
use server::{Fault, Server};
use std::fs;
use std::path::Path;

/// Files of each format, in `local` and in the bucket `b` of a server.
fn sources(folder: &Folder) -> Server {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/golden/sources");
    let server = Server::start();
    fs::create_dir(folder.join("local")).unwrap();
    let put = |name: &str, bytes: Vec<u8>| {
        folder.write(&format!("local/{name}"), &bytes);
        server.put(&format!("/b/text/{name}"), bytes);
    };
    for name in ["packed.tar.gz", "packed.tar.zst", "snappy.parquet", "zstd.parquet"] {
        put(name, fs::read(golden.join(name)).unwrap());
    }
    let line = |i: usize| format!("{}\n", serde_json::json!({ "text": format!("line {i} of many") }));
    put("lines.jsonl", (0..200).map(line).collect::<String>().into_bytes());
    put("plain.txt", fs::read(folder.join("text.txt")).unwrap());
    // Not text: a folder passes over it.
    server.put("/b/text/picture.png", b"no text".to_vec());
    server.put("/b/text/.hidden.txt", b"hidden".to_vec());
    server
}

fn prepare(folder: &Folder, server: &Server, out: &str, more: &[&str]) -> Ran {
    let base = ["data", "prepare", "--tokenizer", "bytes", "--out", out];
    Ran::new(command(folder, server, &[&base[..], more].concat()).output().expect("the program starts"))
}

fn command(folder: &Folder, server: &Server, arguments: &[&str]) -> std::process::Command {
    let mut command = folder.command(arguments);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
        command.env_remove(name);
    }
    command.env("AWS_ENDPOINT_URL", &server.url).env("AWS_ALLOW_HTTP", "true").env("HOME", folder.path());
    command.env("AWS_ACCESS_KEY_ID", "known").env("AWS_SECRET_ACCESS_KEY", "very-secret");
    command
}

/// The token files of `out`, but for their description, which names the sources.
fn tokens(folder: &Folder, out: &str) -> Vec<Vec<u8>> {
    let parts = ["train.bin", "train.idx", "validation.bin", "validation.idx"];
    parts.iter().map(|part| fs::read(folder.join(&format!("{out}.{part}"))).unwrap()).collect()
}

#[test]
fn token_files_of_objects_are_those_of_files_through_every_fault() {
    let folder = Folder::new();
    let server = sources(&folder);
    prepare(&folder, &server, "d/local", &["local"]).ok();
    server.state.lock().unwrap().wants_signature = true;
    let scripts: &[&[Fault]] = &[
        &[],
        &[Fault::Reset(100), Fault::Status(500), Fault::Status(503), Fault::TooLong(3), Fault::Short(5)],
        &[Fault::Reset(0), Fault::Reset(1), Fault::Status(429), Fault::Reset(50)],
    ];
    for (number, script) in scripts.iter().enumerate() {
        server.fail(script);
        let out = format!("d/s3-{number}");
        let ran = prepare(&folder, &server, &out, &["s3://b/text/"]).ok();
        assert!(tokens(&folder, &out) == tokens(&folder, "d/local"), "{script:?}");
        assert!(ran.stderr.contains("objects: ") && ran.stderr.contains("from the network"), "{}", ran.stderr);
        let retries = format!(", {} retries", script.len());
        assert!(ran.stderr.contains(&retries) || script.contains(&Fault::TooLong(3)), "{}", ran.stderr);
    }
    // The same objects by name, from a server without signatures, pattern by pattern.
    server.state.lock().unwrap().wants_signature = false;
    let named = ["lines.jsonl", "packed.tar.gz", "packed.tar.zst", "plain.txt", "snappy.parquet", "zstd.parquet"];
    let local: Vec<String> = named.iter().map(|name| format!("local/{name}")).collect();
    prepare(&folder, &server, "d/named", &local.iter().map(String::as_str).collect::<Vec<_>>()).ok();
    server.fail(&[Fault::Reset(7), Fault::Status(500), Fault::Status(500)]);
    let list = format!("{}/b/text/{{{}}}", server.url, named.join(","));
    prepare(&folder, &server, "d/http", &[&list]).ok();
    assert!(tokens(&folder, "d/http") == tokens(&folder, "d/named"));
    let patterns = ["s3://b/text/*.jsonl", "s3://b/t*/packed.*", "s3://b/**/plain.txt", "s3://b/text/*.parquet"];
    prepare(&folder, &server, "d/patterns", &patterns).ok();
    assert!(tokens(&folder, "d/patterns") == tokens(&folder, "d/named"));
}

#[test]
fn parts_of_a_corpus_share_its_files_and_a_cache_serves_the_second_reading() {
    let folder = Folder::new();
    let server = sources(&folder);
    let all = ["s3://b/text/", "--validation-fraction", "0", "--object-cache", "cache", "--object-cache-size", "64MB"];
    prepare(&folder, &server, "d/all", &all).ok();
    let mut documents = 0;
    let mut bytes = 0;
    for part in ["1/3", "2/3", "3/3"] {
        let out = format!("d/{}", &part[..1]);
        let ran = prepare(&folder, &server, &out, &[&all[..], &["--part", part]].concat()).ok();
        assert!(ran.stderr.contains("objects: 0 B from the network"), "{}", ran.stderr);
        let about: serde_json::Value =
            serde_json::from_slice(&fs::read(folder.join(&format!("{out}.json"))).unwrap()).unwrap();
        documents += about["train"]["documents"].as_u64().unwrap();
        bytes += fs::metadata(folder.join(&format!("{out}.train.bin"))).unwrap().len();
    }
    let about: serde_json::Value = serde_json::from_slice(&fs::read(folder.join("d/all.json")).unwrap()).unwrap();
    assert_eq!(documents, about["train"]["documents"].as_u64().unwrap());
    assert_eq!(bytes, fs::metadata(folder.join("d/all.train.bin")).unwrap().len());
    let refused = prepare(&folder, &server, "d/x", &["local/plain.txt", "--part", "2/2"]);
    assert!(
        refused.code != Some(0) && refused.stderr.contains("1 files cannot be dealt to 2 parts"),
        "{}",
        refused.stderr
    );
    let refused = prepare(&folder, &server, "d/x", &["local", "--part", "3/2"]);
    assert!(refused.stderr.contains("write K/N with K from 1 to N"), "{}", refused.stderr);
}

#[test]
fn a_run_inspect_and_dedup_read_objects() {
    let folder = Folder::new();
    let server = sources(&folder);
    let run = |arguments: &[&str]| Ran::new(command(&folder, &server, arguments).output().unwrap());
    let train = ["train", "tiny.toml", "--set", "training.steps=1", "--set"];
    run(&[&train[..], &["run.name=files", "--set", "data.train=local/plain.txt"]].concat()).ok();
    let set = ["run.name=objects", "--set", "data.train=s3://b/text/plain.txt", "--set", "data.object_cache=cache"];
    run(&[&train[..], &set].concat()).ok();
    let loss = |name: &str| {
        let text = fs::read_to_string(folder.join(&format!("runs/{name}/metrics.jsonl"))).unwrap();
        serde_json::from_str::<serde_json::Value>(text.lines().next().unwrap()).unwrap()["loss"].clone()
    };
    assert_eq!(loss("files"), loss("objects"));
    assert!(folder.join("cache").read_dir().unwrap().count() > 0);
    let shown = run(&["data", "inspect", "s3://b/text/lines.jsonl", "--sample", "3"]).ok();
    assert!(shown.stdout.contains("line 3 of many") && shown.stderr.contains("from the network"), "{shown:?}");
    run(&["data", "dedup", "--exact", "--out", "d/unique", "s3://b/text/*.jsonl"]).ok();
}

#[test]
fn what_is_refused_names_the_object_and_the_remedy_and_no_secret() {
    let folder = Folder::new();
    let server = sources(&folder);
    let refused = |sources: &str, expected: &[&str]| {
        let ran = prepare(&folder, &server, "d/x", &[sources]);
        assert_ne!(ran.code, Some(0), "{sources}");
        for part in expected {
            assert!(ran.stderr.contains(part), "{sources}: {part:?} in {}", ran.stderr);
        }
        assert!(!ran.stderr.contains("very-secret"), "{}", ran.stderr);
    };
    refused("s3://b/text/none.txt", &["s3://b/text/none.txt: the server answers 404", "check the bucket and the name"]);
    refused("s3://b/none/*.txt", &["matches no object"]);
    refused("ftp://b/x.txt", &["\"ftp\" is not a kind of source"]);
    refused(&format!("{}/x.txt?sig=very-secret", server.url), &["/x.txt: the server answers 404"]);
    refused(&format!("{}/b/*.txt", server.url), &["cannot be asked for a list of files"]);
    server.put("/b/tokens.bin", vec![0; 100]);
    refused("s3://b/tokens.bin", &["copy them to a folder of this machine"]);
    // A Parquet file of a server without ranges, and one that breaks off for good.
    server.state.lock().unwrap().without_ranges = true;
    refused(&format!("{}/b/text/zstd.parquet", server.url), &["its server gives no parts of files"]);
    server.state.lock().unwrap().without_ranges = false;
    server.fail(&[Fault::Status(403)]);
    refused("s3://b/text/plain.txt", &["the server answers 403", "AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"]);
    server.fail(&[Fault::Changed]);
    refused("s3://b/text/packed.tar.zst", &["packed.tar.zst: changed while it was read"]);
    // Plain HTTP with credentials, unless it is allowed.
    let mut plain = command(&folder, &server, &["data", "inspect", "s3://b/text/plain.txt"]);
    let ran = Ran::new(plain.env_remove("AWS_ALLOW_HTTP").output().unwrap());
    assert!(
        ran.stderr.contains("the endpoint is plain HTTP") && ran.stderr.contains("AWS_ALLOW_HTTP=true"),
        "{}",
        ran.stderr
    );
}
