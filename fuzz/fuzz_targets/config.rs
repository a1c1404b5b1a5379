#![no_main]
//! A configuration is rejected with reasons or resolved. The printed form of a resolved one must
//! resolve to itself.
//!
//! The text is the file. `--set` overrides, one per line, may follow behind the first byte 0x1e.

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use trainyard_engine::config::{Config, ConfigError, Inputs, Resolved};

fn resolve(file: &str, sets: &[String]) -> Result<Resolved, ConfigError> {
    let inputs = Inputs {
        cores: 2,
        cores_because: "the fuzzer says so".into(),
        sequences_per_epoch: None,
        processes: None,
        sharing: 1,
        sentinels: 0,
        tokenizer_vocabulary: Some(97),
        classes: Some(vec!["cat".into(), "dog".into()]),
        pretrained: None,
        batches_supplied: true,
    };
    Config::parse(Path::new("fuzz.toml"), file, sets)?.resolve(&inputs)
}

fuzz_target!(|text: &str| {
    let (file, sets) = text.split_once('\u{1e}').unwrap_or((text, ""));
    let sets: Vec<String> = sets.lines().map(String::from).collect();
    match resolve(file, &sets) {
        Ok(resolved) => {
            assert!(resolved.tokens_per_step() > 0);
            let printed = resolved.to_toml();
            let again = resolve(&printed, &[]).unwrap_or_else(|error| panic!("{error}\nin\n{printed}"));
            assert_eq!(again.to_toml(), printed);
        }
        Err(error) => assert!(!error.problems.is_empty()),
    }
});
