#![no_main]
//! An accepted index must be safe to use: every range lies inside the token file, in order and
//! without gaps.

use libfuzzer_sys::fuzz_target;
use trainyard_data::parse_idx;

fuzz_target!(|bytes: &[u8]| {
    let Ok(layout) = parse_idx(bytes) else { return };
    let mut at = 0;
    for sequence in 0..layout.sequences {
        assert_eq!(layout.sequence_start(bytes, sequence), at);
        at += layout.length(bytes, sequence);
    }
    assert_eq!(at, layout.tokens);
    assert_eq!(layout.bin_bytes(), layout.tokens * layout.token_type.bytes() as u64);
    for document in 0..layout.documents {
        let range = layout.document(bytes, document);
        assert!(range.start <= range.end && range.end <= layout.tokens);
    }
});
