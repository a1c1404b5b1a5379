//! Tests of `trainyard advise`.

mod common;

use common::{Folder, TINY};
use serde_json::Value;

#[test]
fn levers_of_a_cluster_have_prices_settings_and_sources() {
    let folder = Folder::new();
    folder.write("c.toml", TINY);
    let ran = folder.run(&["advise", "c.toml", "--cluster", "1x2xA100-80GB", "--json"]).ok();
    let answer: Value = serde_json::from_str(&ran.stdout).unwrap();
    let levers = answer["levers"].as_array().unwrap();
    assert!(answer["bottleneck"].as_str().unwrap().starts_with("A step takes"));
    for lever in levers {
        let name = lever["lever"].as_str().unwrap();
        let is_priced = lever["step_s"].as_f64().is_some_and(|seconds| seconds > 0.0);
        assert!(is_priced != lever["not_priced"].is_string(), "{name}: {lever}");
        assert!(!lever["source"].as_str().unwrap().is_empty(), "{name}");
        // Every setting that is named is one that a configuration accepts.
        if lever["runnable"] == true {
            let sets: Vec<&str> = lever["sets"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
            assert!(sets.len() >= 2, "{name}: {sets:?}");
            let mut check = vec!["config", "print", "c.toml"];
            sets.iter().for_each(|set| check.extend(["--set", *set]));
            folder.run(&check).ok();
        }
    }
    let text = folder.run(&["advise", "c.toml", "--cluster", "1x2xA100-80GB"]).ok().stdout;
    for part in ["can be run", "not by settings alone", "without a price", "to switch on", "sources of what is said"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn what_is_missing_is_said() {
    let folder = Folder::new();
    folder.write("c.toml", TINY);
    let refused = |arguments: &[&str], why: &str| {
        let ran = folder.run(&[&["advise", "c.toml"], arguments].concat());
        let stderr = ran.stderr;
        assert_eq!(ran.code, Some(1), "{stderr}");
        assert!(stderr.contains(why), "{arguments:?}: {stderr}");
    };
    refused(&["--cluster", "1x2xA1000"], "A1000");
    refused(&["--profile", "none.toml"], "none.toml");
    refused(&["--cluster", "1x3xH100", "--set", "training.global_batch_size=4"], "3 ranks");
}
