//! Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011), and tensors filled from it.
//!
//! A number is a function of (seed, step, site, element) and of nothing else: not of threads, order
//! or sharding, so a mask can be made again in backward instead of being saved, and a shard fills
//! its part of a tensor by itself.
//!
//! One Philox call yields four words. Elements are dealt to words in groups so that no lane has to
//! move: group `g` takes counters `16 g .. 16 g + 16`, and its element `16 w + j` takes word `w` of
//! counter `16 g + j`. All rungs use this order (eight-lane ones make a group in two halves) and
//! unfused arithmetic, so the bits are the same on every rung.

use crate::cpu::Cpu;
use crate::cpu::rows::{for_elements, load_at, store_at};
use crate::cpu::simd::{Portable, Simd};
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;

/// Counters of a group: the lanes of the widest rung.
pub(crate) const GROUP: usize = 16;
/// Words, i.e. elements of a fill, in a group.
const WORDS: usize = 4 * GROUP;

/// The purpose for which a random number is drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RandomKey {
    /// The run's seed.
    pub seed: u64,
    /// The optimizer step; [`RandomKey::INIT`] for initial weights.
    pub step: u32,
    /// The place in the model: a dropout, or a parameter tensor.
    pub site: u32,
}

impl RandomKey {
    /// The `step` of initial weights.
    pub const INIT: u32 = u32::MAX;

    /// Four words for each of `S::LANES` counters from `first` on; `first` must be a multiple of
    /// `S::LANES`.
    #[inline(always)]
    pub(crate) fn words<S: Simd>(self, s: S, first: u64) -> [S::U; 4] {
        let low = s.add_u32(s.splat_u32(first as u32), s.iota_u32());
        let counter = [low, s.splat_u32((first >> 32) as u32), s.splat_u32(self.site), s.splat_u32(self.step)];
        philox(s, [self.seed as u32, (self.seed >> 32) as u32], counter)
    }
}

/// Ten rounds of Philox4x32 on each lane.
#[inline(always)]
pub(crate) fn philox<S: Simd>(s: S, key: [u32; 2], counter: [S::U; 4]) -> [S::U; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let (high0, low0) = s.mul_wide_u32(c0, s.splat_u32(0xd251_1f53));
        let (high1, low1) = s.mul_wide_u32(c2, s.splat_u32(0xcd9e_8d57));
        c0 = s.xor_u32(s.xor_u32(high1, c1), s.splat_u32(k0));
        c2 = s.xor_u32(s.xor_u32(high0, c3), s.splat_u32(k1));
        (c1, c3) = (low1, low0);
        k0 = k0.wrapping_add(0x9e37_79b9);
        k1 = k1.wrapping_add(0xbb67_ae85);
    }
    [c0, c1, c2, c3]
}

/// Turns the four words of a counter into four numbers.
trait Distribution: Copy + Send + Sync {
    fn draw<S: Simd>(self, s: S, words: [S::U; 4]) -> [S::F; 4];
}

/// The upper 24 bits of a word as a number in `[0, 1)`.
#[inline(always)]
fn unit<S: Simd>(s: S, word: S::U) -> S::F {
    s.mul(s.i32_to_f32(s.shr_u32(word, 8)), s.splat(1.0 / 16_777_216.0))
}

#[derive(Clone, Copy)]
struct Uniform {
    low: f32,
    width: f32,
}

impl Distribution for Uniform {
    #[inline(always)]
    fn draw<S: Simd>(self, s: S, words: [S::U; 4]) -> [S::F; 4] {
        let (low, width) = (s.splat(self.low), s.splat(self.width));
        let [a, b, c, d] = words;
        [
            s.add(s.mul(unit(s, a), width), low),
            s.add(s.mul(unit(s, b), width), low),
            s.add(s.mul(unit(s, c), width), low),
            s.add(s.mul(unit(s, d), width), low),
        ]
    }
}

/// Box & Muller (1958): a radius from one word, an angle from another, two numbers out. With 24
/// bits the largest magnitude is `sqrt(48 ln 2) = 5.8` standard deviations.
#[derive(Clone, Copy)]
struct Normal {
    mean: f32,
    std: f32,
}

impl Normal {
    #[inline(always)]
    fn pair<S: Simd>(self, s: S, a: S::U, b: S::U) -> (S::F, S::F) {
        // 1 - u is in (0, 1], whose logarithm is finite.
        let radius = s.sqrt(s.mul(s.splat(-2.0), s.ln(s.sub(s.splat(1.0), unit(s, a)))));
        let (cos, sin) = s.cos_sin_turns(unit(s, b));
        let (mean, std) = (s.splat(self.mean), s.splat(self.std));
        (s.add(s.mul(s.mul(radius, cos), std), mean), s.add(s.mul(s.mul(radius, sin), std), mean))
    }
}

impl Distribution for Normal {
    #[inline(always)]
    fn draw<S: Simd>(self, s: S, words: [S::U; 4]) -> [S::F; 4] {
        let [a, b, c, d] = words;
        let ((w, x), (y, z)) = (self.pair(s, a, b), self.pair(s, c, d));
        [w, x, y, z]
    }
}

/// The numbers of group `group`, drawn for the `attempt`-th time.
#[inline(always)]
fn draw_group<S: Simd, D: Distribution>(s: S, key: RandomKey, group: u64, attempt: u64, d: D) -> [f32; WORDS] {
    let mut numbers = [0.0; WORDS];
    for j in (0..GROUP).step_by(S::LANES) {
        // Attempts use the counter's top byte: 2^56 counters remain.
        let words = key.words(s, (group * GROUP as u64 + j as u64) | attempt << 56);
        for (w, lanes) in d.draw(s, words).into_iter().enumerate() {
            s.store(lanes, &mut numbers[w * GROUP + j..]);
        }
    }
    numbers
}

simd_fn! {
    fn fill_range[T: Element, D: Distribution](s: S, key: RandomKey, d: D, bounds: Option<(f32, f32)>, first: u64, y: &mut [T]) {
        let mut done = 0;
        while done < y.len() {
            let element = first + done as u64;
            let (group, skip) = (element / WORDS as u64, (element % WORDS as u64) as usize);
            let mut numbers = draw_group(s, key, group, 0, d);
            if let Some((low, high)) = bounds {
                redraw_outside(key, d, group, low, high, &mut numbers);
            }
            let count = (WORDS - skip).min(y.len() - done);
            let (from, to) = (&numbers[skip..skip + count], &mut y[done..done + count]);
            let mut i = 0;
            while i < count {
                store_at(s, load_at(s, from, i, 0.0), to, i);
                i += S::LANES;
            }
            done += count;
        }
    }
}

/// Draws numbers outside `[low, high]` again, each from its own counter, up to 255 times; what is
/// outside even then is clamped.
#[inline(never)]
fn redraw_outside<D: Distribution>(key: RandomKey, d: D, group: u64, low: f32, high: f32, numbers: &mut [f32; WORDS]) {
    for attempt in 1..256 {
        if numbers.iter().all(|x| (low..=high).contains(x)) {
            return;
        }
        let again = draw_group(Portable, key, group, attempt, d);
        for (x, again) in numbers.iter_mut().zip(again) {
            if !(low..=high).contains(x) {
                *x = again;
            }
        }
    }
    for x in numbers {
        *x = x.clamp(low, high);
    }
}

fn fill<T: Element, D: Distribution>(
    cpu: &Cpu,
    key: RandomKey,
    first: u64,
    d: D,
    bounds: Option<(f32, f32)>,
    y: &mut [T],
) {
    let len = y.len();
    let y = Shares::new(y);
    // Some four nanoseconds an element: counted as 16 bytes of traffic.
    for_elements(cpu, len, 16, |range| {
        // SAFETY: the ranges of a region do not overlap.
        let part = unsafe { y.part(range.clone()) };
        fill_range(cpu.isa, key, d, bounds, first + range.start as u64, part);
    });
}

/// Elements `first..` of the tensor `key.site`, uniform in `[low, high)` before rounding to `T`.
pub fn fill_uniform<T: Element>(cpu: &Cpu, key: RandomKey, first: u64, low: f32, high: f32, y: &mut [T]) {
    fill(cpu, key, first, Uniform { low, width: high - low }, None, y);
}

/// Elements `first..` of the tensor `key.site`, normal.
pub fn fill_normal<T: Element>(cpu: &Cpu, key: RandomKey, first: u64, mean: f32, std: f32, y: &mut [T]) {
    fill(cpu, key, first, Normal { mean, std }, None, y);
}

/// Elements `first..` of the tensor `key.site`, normal but inside `[low, high]`, by rejection.
///
/// # Panics
/// When `low < high` does not hold.
pub fn fill_truncated_normal<T: Element>(
    cpu: &Cpu,
    key: RandomKey,
    first: u64,
    mean: f32,
    std: f32,
    low: f32,
    high: f32,
    y: &mut [T],
) {
    assert!(low < high, "truncated normal between {low} and {high}");
    fill(cpu, key, first, Normal { mean, std }, Some((low, high)), y);
}
