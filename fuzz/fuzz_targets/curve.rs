#![no_main]
//! An accepted curve of prices or carbon must be safe to use: its ends are in order, and its values
//! at any time and their means are finite.

use libfuzzer_sys::fuzz_target;
use std::path::Path;
use trainyard_queue::curve::Curve;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(curve) = Curve::parse(text, Path::new("curve.csv"), &|_| 3600) else { return };
    let (end, resolution) = (curve.end(), curve.resolution_s());
    assert!(resolution > 0 && curve.period_s() > 0);
    for at in [0, end - 1, end, end + 1, end + 1_000_000_000] {
        let value = curve.at(at);
        assert!(value.is_finite(), "{value} at {at}");
        let mean = curve.mean(at, at + 7200);
        assert!(mean.is_finite(), "{mean} from {at}");
        let _ = curve.known_until(at);
    }
});
