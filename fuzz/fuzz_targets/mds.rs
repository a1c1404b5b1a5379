#![no_main]
//! An accepted MDS shard must be safe to use: every text lies inside the shard.

use libfuzzer_sys::fuzz_target;
use trainyard_data::parse_mds;

fuzz_target!(|shard: &[u8]| {
    let Ok(layout) = parse_mds(shard, "text") else { return };
    for sample in 0..layout.samples {
        if let Ok(text) = layout.text(shard, sample) {
            assert!(text.len() <= shard.len());
        }
    }
});
