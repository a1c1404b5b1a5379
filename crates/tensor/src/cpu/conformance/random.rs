//! Philox, fills and dropout: bits, not tolerances, wherever the oracle can say them.

use super::{close, dtypes, on_every_cpu, values, wide};
use crate::cpu::dropout::{DropRate, dropout, dropout_add};
use crate::cpu::philox::{RandomKey, fill_normal, fill_truncated_normal, fill_uniform, philox};
use crate::cpu::simd::{Portable, Simd};
use crate::cpu::{Cpu, Isa};
use crate::reference::random as oracle;
use crate::simd_fn;

const KEY: RandomKey = RandomKey { seed: 0x0123_4567_89ab_cdef, step: 7, site: 3 };

#[test]
fn philox_gives_the_known_answers() {
    // Random123's kat_vectors, philox 4x32 10.
    for (counter, key, want) in [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ] {
        assert_eq!(trainyard_base::philox4x32(counter, key), want);
        let lanes = philox(Portable, key, counter.map(|word| Portable.splat_u32(word)));
        assert_eq!(lanes.map(|lanes| lanes[5]), want);
    }
}

simd_fn! {
    fn words_of(s: S, key: RandomKey, first: u64) -> Vec<[f32; 16]> {
        // Through f32 in two halves, each exact.
        let mut all = Vec::new();
        for word in key.words(s, first) {
            for half in [s.shr_u32(word, 16), s.and_u32(word, s.splat_u32(0xffff))] {
                let mut lanes = [0.0; 16];
                s.store(s.i32_to_f32(half), &mut lanes);
                all.push(lanes);
            }
        }
        all
    }
}

#[test]
fn lanes_are_consecutive_counters_on_every_rung() {
    for isa in Isa::tested(Isa::Avx512Bf16) {
        let first = (5u64 << 32) + 48;
        let got = words_of(isa, KEY, first);
        let lanes = if isa >= Isa::Avx512 { 16 } else { 8 };
        for lane in 0..lanes {
            for (w, word) in oracle::words(KEY, first + lane as u64).into_iter().enumerate() {
                let joined = (got[2 * w][lane] as u32) << 16 | got[2 * w + 1][lane] as u32;
                assert_eq!(joined, word, "{isa} lane {lane} word {w}");
            }
        }
    }
}

dtypes! {
    fn dropout_follows_its_bits_and_its_backward_is_itself<T>() {
        for (len, first) in [(0, 0), (1, 0), (127, 128), (70_001, 256), (0, 5), (3, 126), (60, 17), (50_003, 391)] {
            let (x, r) = (values::<T>(1, len), values::<T>(2, len));
            for p in [0.0, 0.1, 0.5, 0.999] {
                let rate = DropRate::new(p).unwrap();
                let (dropped, scale) = rate.exact();
                on_every_cpu(
                    |cpu| {
                        let (mut y, mut sum) = (x.clone(), x.clone());
                        dropout(cpu, KEY, first, rate, &x, &mut y);
                        dropout_add(cpu, KEY, first, rate, &x, &r, &mut sum);
                        (y, sum)
                    },
                    |isa, (y, sum)| {
                        let keep = |i: usize| oracle::dropout_bits(KEY, first + i as u64) >= (dropped * 65536.0) as u32;
                        let want: Vec<f64> = wide(&x)
                            .iter()
                            .enumerate()
                            .map(|(i, x)| if keep(i) { x * f64::from(scale) } else { 0.0 })
                            .collect();
                        // One rounding in f32 before the final one, of a number below 2 scale.
                        let slack = 2.0 * f64::from(scale) * super::ULP;
                        close(isa, "dropout", y, &want, slack);
                        let want: Vec<f64> = want.iter().zip(wide(&r)).map(|(y, r)| y + r).collect();
                        close(isa, "dropout + residual", sum, &want, 2.0 * slack);
                        if p == 0.0 {
                            assert!(*y == x, "a rate of zero changes something");
                        }
                    },
                );
            }
        }
        assert!(DropRate::new(1.0).is_err() && DropRate::new(-0.1).is_err() && DropRate::new(f32::NAN).is_err());
    }
}

#[test]
fn dropout_keeps_the_expected_share() {
    let cpu = Cpu::new(Isa::detect(), 2);
    let x = vec![1.0f32; 1 << 20];
    let mut y = x.clone();
    for p in [0.1, 0.25] {
        dropout(&cpu, KEY, 0, DropRate::new(p).unwrap(), &x, &mut y);
        let mean = y.iter().map(|y| f64::from(*y)).sum::<f64>() / y.len() as f64;
        // Standard deviation of the mean: sqrt(p / (1 - p) / 2^20) < 6e-4; five of them.
        assert!((mean - 1.0).abs() < 3e-3, "{p}: mean {mean}");
    }
    let mut other = x.clone();
    dropout(&cpu, RandomKey { step: 8, ..KEY }, 0, DropRate::new(0.25).unwrap(), &x, &mut other);
    assert!(y != other, "two steps drop the same");
}

dtypes! {
    fn fills_are_the_same_bits_on_every_rung_and_in_parts<T>() {
        let len = 20_003;
        let fill = |cpu: &Cpu| {
            let mut all = vec![T::default(); 3 * len];
            let (uniform, rest) = all.split_at_mut(len);
            let (normal, truncated) = rest.split_at_mut(len);
            fill_uniform(cpu, KEY, 0, 0.0, 1.0, uniform);
            fill_normal(cpu, KEY, 0, 0.0, 1.0, normal);
            fill_truncated_normal(cpu, KEY, 0, 0.5, 2.0, -1.5, 2.5, truncated);
            let mut part = vec![T::default(); 777];
            fill_normal(cpu, KEY, 101, 0.0, 1.0, &mut part);
            assert!(part == normal[101..101 + 777], "a part differs from the whole");
            all
        };
        let portable = fill(&Cpu::new(Isa::Portable, 1));
        on_every_cpu(fill, |isa, all| {
            assert!(*all == portable, "{isa} fills other bits than portable");
            let uniform: Vec<f64> = (0..len as u64).map(|i| oracle::uniform(KEY, i)).collect();
            close(isa, "uniform", &all[..len], &uniform, 0.0);
            // ln and the circle functions are off by 3e-7, their product by that times at most 5.8,
            // and a radius near 0 by the root of the absolute error of ln near 1, 1e-7.
            let normal: Vec<f64> = (0..len as u64).map(|i| oracle::normal(KEY, i)).collect();
            close(isa, "normal", &all[len..2 * len], &normal, 4e-6);
            let (low, high) = (T::from_f32(-1.5).to_f32(), T::from_f32(2.5).to_f32());
            assert!(all[2 * len..].iter().all(|x| (low..=high).contains(&x.to_f32())));
        });
    }
}

#[test]
fn fills_have_their_moments() {
    let cpu = Cpu::new(Isa::detect(), 2);
    let mut x = vec![0.0f32; 1 << 20];
    let moments = |x: &[f32]| {
        let n = x.len() as f64;
        let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
        let fourth = x.iter().map(|x| (f64::from(*x) - mean).powi(4)).sum::<f64>() / n / variance.powi(2);
        (mean, variance, fourth)
    };
    // Five standard deviations of each estimate of 2^20 draws: of the mean 5e-3 s, of the variance
    // 7e-3 s^2.
    fill_normal(&cpu, KEY, 0, 1.0, 2.0, &mut x);
    let (mean, variance, fourth) = moments(&x);
    assert!(
        (mean - 1.0).abs() < 1e-2 && (variance - 4.0).abs() < 2.8e-2 && (fourth - 3.0).abs() < 5e-2,
        "{mean} {variance} {fourth}"
    );
    fill_uniform(&cpu, KEY, 0, -1.0, 3.0, &mut x);
    let (mean, variance, fourth) = moments(&x);
    assert!(
        (mean - 1.0).abs() < 6e-3 && (variance - 16.0 / 12.0).abs() < 6e-3 && (fourth - 1.8).abs() < 1e-2,
        "{mean} {variance} {fourth}"
    );
    // A normal cut at two standard deviations has variance 1 - 4 p(2) / (2 P(2) - 1) = 0.77374.
    fill_truncated_normal(&cpu, KEY, 0, 0.0, 1.0, -2.0, 2.0, &mut x);
    let (mean, variance, _) = moments(&x);
    assert!(mean.abs() < 5e-3 && (variance - 0.77374).abs() < 5e-3, "{mean} {variance}");
}
