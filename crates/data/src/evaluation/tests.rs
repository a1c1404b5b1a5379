//! Tests: every token is seen once, and bytes are counted right.

use super::*;
use crate::dataset::IGNORE;
use crate::indexed::{IndexedWriter, TokenType};
use proptest::prelude::*;

proptest! {
    #[test]
    fn every_token_is_a_target_once(documents in proptest::collection::vec(1usize..30, 1..8), length in 1usize..12, rows in 1usize..4, respect: bool, most in proptest::option::of(0u64..200)) {
        let total: usize = documents.iter().sum();
        prop_assume!(total > 1);
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("tokens");
        let mut writer = IndexedWriter::create(&prefix, TokenType::U16).unwrap();
        let mut next = 0;
        let mut starts = Vec::new();
        for &length in &documents {
            starts.push(next);
            let tokens: Vec<u32> = (next as u32..(next + length) as u32).collect();
            writer.push_document(&tokens).unwrap();
            next += length;
        }
        writer.finish().unwrap();
        let tokens = IndexedTokens::open(&prefix).unwrap();
        let options = EvalOptions { sequence_length: length, rows, vocab_size: 1000, respect_document_boundaries: respect, tokens_max: most, spans: None };
        let batches = eval_batches(&tokens, options).unwrap();
        let expected_batches = batches.batches() as usize;
        let batches: Vec<MicroBatch> = batches.map(Result::unwrap).collect();
        prop_assert_eq!(batches.len(), expected_batches);
        prop_assert!(batches.iter().rev().skip(1).all(|b| b.rows == rows));
        prop_assert!(batches.iter().all(|b| b.tokens.len() == b.rows * length && b.targets.len() == b.rows * length));
        let targets: Vec<i32> = batches.iter().flat_map(|b| b.targets.clone()).filter(|&t| t != IGNORE).collect();
        let expected: Vec<i32> = (1..total.min(most.map_or(total, |most| most as usize + 1))).filter(|t| !respect || !starts.contains(t)).map(|t| t as i32).collect();
        prop_assert_eq!(targets, expected);
        // What is passed over is not read, and nothing else changes.
        for skipped in 0..=batches.len() {
            let mut others = eval_batches(&tokens, options).unwrap();
            let found = others.nth(skipped).map(Result::unwrap);
            prop_assert_eq!(found.map(|b| b.targets), batches.get(skipped).map(|b| b.targets.clone()));
            prop_assert_eq!(others.count(), batches.len().saturating_sub(skipped + 1));
        }
    }
}

#[test]
fn bytes_are_counted_by_decoding_where_nothing_says_them() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("foreign");
    let mut writer = IndexedWriter::create(&prefix, TokenType::U16).unwrap();
    for text in ["héllo", "world"] {
        let mut tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        tokens.push(256);
        writer.push_document(&tokens).unwrap();
    }
    writer.finish().unwrap();
    let tokens = IndexedTokens::open(&prefix).unwrap();
    assert_eq!(text_bytes(&tokens, &Tokenizer::bytes()).unwrap(), 11);
}
