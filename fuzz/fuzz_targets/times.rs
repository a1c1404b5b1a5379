#![no_main]
//! The times that people write: an accepted instant is written in a form that is read as the same
//! second, and an accepted deadline is in the future.

use libfuzzer_sys::fuzz_target;
use trainyard_queue::time::{deadline, instant, rfc3339};

/// Friday 2026-11-27, 07:33:20 UTC.
const NOW: i64 = 1_795_764_800;
/// The beginnings of two years.
const YEAR_1: i64 = -62_135_596_800;
const YEAR_9999: i64 = 253_370_764_800;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let offset = |_| 3600;
    // Its own form has four digits for a year, which an offset from UTC can leave.
    if let Some(at) = instant(text, &offset).filter(|at| (YEAR_1..YEAR_9999).contains(at)) {
        let written = rfc3339(at);
        assert_eq!(instant(&written, &offset), Some(at), "{text:?} is {written}");
    }
    if let Ok(at) = deadline(text, NOW, &offset) {
        assert!(at > NOW, "{text:?} is {at}");
    }
});
