#![no_main]
//! An accepted tokenizer must turn text into tokens inside its vocabulary and back without a panic.

use libfuzzer_sys::fuzz_target;
use trainyard_data::Tokenizer;

fuzz_target!(|bytes: &[u8]| {
    let Ok(tokenizer) = Tokenizer::from_json(bytes, "fuzz") else { return };
    for text in ["", "Hello, world!\n", "naïve 😀 \u{0}\t<|endoftext|>"] {
        if let Ok(tokens) = tokenizer.encode(text) {
            assert!(tokens.iter().all(|&token| (token as usize) < tokenizer.vocab_size()));
            tokenizer.decode(&tokens);
        }
    }
    tokenizer.decode(&[0, 1, u32::MAX]);
    tokenizer.fingerprint();
});
