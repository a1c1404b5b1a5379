#![no_main]
//! Any bytes in a tar file give documents or an error.

use libfuzzer_sys::fuzz_target;
use trainyard_data::{Corpus, CorpusOptions};

fuzz_target!(|bytes: &[u8]| {
    let folder = std::env::temp_dir();
    let path = folder.join(format!("trainyard-fuzz-{}.tar", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    let options = CorpusOptions { document_bytes_max: 1 << 20, ..CorpusOptions::default() };
    let Ok(corpus) = Corpus::open(&[&path], options) else { return };
    let _ = corpus.documents().map_while(Result::ok).count();
});
