//! Sketches of documents: short lists of numbers that agree where their sets of word n-grams do.
//!
//! The similarity is Jaccard's: common n-grams over all n-grams. A sketch of k numbers agrees in
//! each of them with probability J. The method is fast similarity sketching (Dahlgaard, Knudsen and
//! Thorup, FOCS 2017): an n-gram is hashed once, not k times as in MinHash, unless the document is
//! so short that bins stay empty. Documents that agree in all `rows` numbers of any of the `bands`
//! bands count as duplicates.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// The shape of sketches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Words of an n-gram.
    pub ngram: usize,
    /// Number of bands.
    pub bands: usize,
    /// Numbers in a band.
    pub rows: usize,
}

impl Default for Shape {
    /// 5-grams, 20 bands of 8. A pair at J = 0.8 is found with probability
    /// 1 - (1 - 0.8^8)^20 = 0.975, one at 0.5 with 0.075.
    fn default() -> Self {
        Self { ngram: 5, bands: 20, rows: 8 }
    }
}

/// Multiplier of the rolling hash over words; any odd number with well spread bits.
const WORD_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// Hashes of the n-grams of a text, in order. Words are runs of letters and digits, without regard
/// to case. A text of fewer than `ngram` words is one n-gram.
pub fn shingles(text: &str, ngram: usize) -> Vec<u64> {
    let mut lower = String::new();
    let mut words = Vec::with_capacity(text.len() / 5);
    for word in text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()) {
        let is_lower = word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        if is_lower {
            words.push(xxh3_64(word.as_bytes()));
            continue;
        }
        lower.clear();
        lower.extend(word.chars().flat_map(char::to_lowercase));
        words.push(xxh3_64(lower.as_bytes()));
    }
    if words.is_empty() {
        return words;
    }
    let ngram = ngram.min(words.len());
    // hash = sum of word[i] x factor^(ngram - 1 - i): a word leaves by the highest power.
    let highest = (1..ngram).fold(1u64, |power, _| power.wrapping_mul(WORD_FACTOR));
    let mut hash = 0u64;
    let mut hashes = Vec::with_capacity(words.len() + 1 - ngram);
    for (at, word) in words.iter().enumerate() {
        if at >= ngram {
            hash = hash.wrapping_sub(words[at - ngram].wrapping_mul(highest));
        }
        hash = hash.wrapping_mul(WORD_FACTOR).wrapping_add(*word);
        if at + 1 >= ngram {
            hashes.push(mix(hash));
        }
    }
    hashes
}

/// The keys of the bands of a text; none for a text without words.
pub(super) fn band_keys(text: &str, shape: &Shape) -> Vec<u64> {
    let shingles = shingles(text, shape.ngram);
    if shingles.is_empty() {
        return Vec::new();
    }
    let sketch = sketch(&shingles, shape.bands * shape.rows);
    let key = |band: &[u64]| band.iter().fold(0u64, |key, number| mix(key.wrapping_mul(WORD_FACTOR) ^ number));
    sketch.chunks_exact(shape.rows).map(key).collect()
}

/// The sketch of a set that is not empty.
fn sketch(set: &[u64], size: usize) -> Vec<u64> {
    const EMPTY: u64 = u64::MAX;
    let mut bins = vec![EMPTY; size];
    let mut empty = size;
    // In the first `size` rounds an element falls into a bin by chance, in the others into that of
    // the round. So no bin stays empty. Numbers of an earlier round are smaller.
    for round in 0..2 * size as u64 {
        let salt = round.wrapping_mul(0xd1b5_4a32_d192_ed03);
        for element in set {
            let hash = mix(element ^ salt);
            let bin = match round < size as u64 {
                true => ((u64::from(hash as u32) * size as u64) >> 32) as usize,
                false => round as usize - size,
            };
            // Sizes are below 2^15, so rounds fit above 48 bits of the hash.
            let number = round << 48 | hash >> 16;
            empty -= usize::from(bins[bin] == EMPTY);
            bins[bin] = bins[bin].min(number);
        }
        if empty == 0 {
            break;
        }
    }
    bins
}

/// A bijection that spreads every bit (the finalizer of SplitMix64).
fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sketches_agree_as_often_as_sets_do() {
        // Sets of 30 and of 1,000 elements; 40 pairs of each similarity, 128 numbers a sketch.
        for (elements, common) in [(30u64, 24u64), (30, 12), (1000, 800), (1000, 300)] {
            let mut agreed = 0;
            for pair in 0..40u64 {
                let element = |i: u64| mix(pair << 32 | i);
                let a: Vec<u64> = (0..elements).map(element).collect();
                let b: Vec<u64> = (elements - common..2 * elements - common).map(element).collect();
                agreed += sketch(&a, 128).iter().zip(sketch(&b, 128)).filter(|(a, b)| **a == *b).count();
            }
            let expected = common as f64 / (2 * elements - common) as f64;
            let found = agreed as f64 / (40.0 * 128.0);
            assert!((found - expected).abs() < 0.03, "{elements} {common}: {found} for {expected}");
        }
    }

    #[test]
    fn case_and_punctuation_do_not_count() {
        assert_eq!(shingles("Hello, WORLD again: you", 3), shingles("hello world again you!", 3));
        assert_eq!(shingles("one two", 5).len(), 1);
        assert!(shingles("... !", 5).is_empty());
        assert_eq!(shingles("a b c d e f", 5)[0], shingles("a b c d e g", 5)[0]);
    }
}
