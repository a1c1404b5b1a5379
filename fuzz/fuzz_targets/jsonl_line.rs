#![no_main]
//! An accepted line must have the value that `serde_json` reads from it.

use libfuzzer_sys::fuzz_target;
use trainyard_data::parse_jsonl_line;

fuzz_target!(|line: &[u8]| {
    let ours = parse_jsonl_line(line, "text");
    let theirs = serde_json::from_slice::<serde_json::Value>(line);
    let theirs = theirs.as_ref().ok().and_then(|value| value.as_object()?.get("text")?.as_str());
    // A skipped field is checked less than one that is built into a value (a number out of range,
    // for example). This parser may therefore accept more lines, but never other text.
    if let (Ok(ours), Some(theirs)) = (&ours, theirs) {
        assert_eq!(ours, theirs);
    }
    assert!(ours.is_ok() || theirs.is_none(), "{ours:?}");
});
