#![no_main]
//! A trace that is read must give a report whose numbers are finite and in their ranges.

use libfuzzer_sys::fuzz_target;
use std::path::Path;
use trainyard_observe::traces::diagnose::{diagnose, examine};
use trainyard_observe::traces::kineto::read_bytes;

fuzz_target!(|bytes: &[u8]| {
    let Ok(trace) = read_bytes(bytes, Path::new("trace.json")) else { return };
    let report = diagnose(vec![examine(&trace, 0), examine(&trace, 1)]);
    for rank in &report.ranks {
        if let Some(b) = &rank.breakdown {
            let sum = b.compute_seconds + b.non_compute_seconds + b.idle_seconds;
            assert!(b.compute_seconds >= 0.0 && b.non_compute_seconds >= 0.0 && b.idle_seconds >= 0.0, "{b:?}");
            assert!(sum <= b.total_seconds * 1.0001 + 1e-6, "{b:?}");
        }
    }
    for saving in report.diagnosis.verdicts.iter().filter_map(|verdict| verdict.saving) {
        assert!(saving.seconds.is_finite() && saving.seconds <= saving.step_seconds * 1.0001 + 1e-6, "{saving:?}");
    }
    assert!(!report.to_text().contains("NaN"));
    serde_json::to_string(&report).expect("a report is JSON");
});
