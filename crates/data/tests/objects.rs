//! Every format read from a server, in ranges from 64 bytes on and through faults, gives the
//! documents, or the error, of the same file on disk.

#[path = "../../store/tests/common/mod.rs"]
mod server;

use std::fs;
use std::path::Path;
use std::time::Duration;

use server::{Fault, Server};
use trainyard_data::corpus::StoreOptions;
use trainyard_data::{Corpus, CorpusOptions};

#[test]
fn objects_give_the_documents_of_files_whatever_the_size_of_ranges() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/sources");
    let server = Server::start();
    let names = [
        "gzip.parquet",
        "none.parquet",
        "nulls.parquet",
        "snappy.parquet",
        "zstd.parquet",
        "packed.tar.gz",
        "packed.tar.zst",
        "plain.tar",
        "mds/index.json",
        "mds_gz/index.json",
        "mds_zstd/index.json",
    ];
    for name in names {
        match name.split_once('/') {
            None => server.put(&format!("/{name}"), fs::read(golden.join(name)).unwrap()),
            Some((folder, _)) => {
                for entry in fs::read_dir(golden.join(folder)).unwrap() {
                    let path = entry.unwrap().path();
                    let name = path.file_name().unwrap().to_str().unwrap();
                    server.put(&format!("/{folder}/{name}"), fs::read(&path).unwrap());
                }
            }
        }
    }
    for block_bytes in [64, 1000, 8 << 20] {
        let store = StoreOptions { block_bytes, backoff: Duration::from_millis(1), ..StoreOptions::default() };
        let read = |root: &str, name: &str| -> Result<Vec<(String, u64)>, String> {
            let options = CorpusOptions { store: store.clone(), ..CorpusOptions::default() };
            let corpus = Corpus::open(&[format!("{root}/{name}")], options).map_err(|error| error.to_string())?;
            let documents = corpus.documents().map(|found| found.map(|document| (document.text, document.line)));
            documents.collect::<Result<_, _>>().map_err(|error| error.to_string().replace(root, ""))
        };
        for name in names {
            server.fail(&[Fault::Reset(10), Fault::Status(500), Fault::Short(5)]);
            let of_object = read(&server.url, name);
            assert_eq!(of_object, read(golden.to_str().unwrap(), name), "{name} in ranges of {block_bytes}");
            assert!(server.state.lock().unwrap().faults.is_empty(), "{name}: the faults were played");
        }
    }
}
