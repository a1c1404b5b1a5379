//! Philox4x32-10 and the order in which elements take its words, one element at a time.

use crate::cpu::philox::RandomKey;
use trainyard_base::philox4x32;

/// The four words of counter `counter` of a site.
pub fn words(key: RandomKey, counter: u64) -> [u32; 4] {
    let seed = [key.seed as u32, (key.seed >> 32) as u32];
    philox4x32([counter as u32, (counter >> 32) as u32, key.site, key.step], seed)
}

/// The 16 bits that decide whether dropout keeps an element.
pub fn dropout_bits(key: RandomKey, element: u64) -> u32 {
    let (group, within) = (element / 128, element % 128);
    let half = within / 16;
    let word = words(key, group * 16 + within % 16)[half as usize / 2];
    if half % 2 == 0 { word & 0xffff } else { word >> 16 }
}

/// An element of a uniform fill of `[0, 1)`.
pub fn uniform(key: RandomKey, element: u64) -> f64 {
    let (group, within) = (element / 64, element % 64);
    f64::from(words(key, group * 16 + within % 16)[within as usize / 16] >> 8) / 16_777_216.0
}

/// An element of a standard normal fill (Box & Muller 1958).
pub fn normal(key: RandomKey, element: u64) -> f64 {
    let (group, within) = (element / 64, element % 64);
    let words = words(key, group * 16 + within % 16);
    let word = within as usize / 16;
    let unit = |word: u32| f64::from(word >> 8) / 16_777_216.0;
    let (radius, turns) = (unit(words[word / 2 * 2]), unit(words[word / 2 * 2 + 1]));
    let (sin, cos) = (turns * std::f64::consts::TAU).sin_cos();
    (-2.0 * (1.0 - radius).ln()).sqrt() * if word.is_multiple_of(2) { cos } else { sin }
}
