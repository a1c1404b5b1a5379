//! Moments of eight bits: codes against the oracle, and steps against those of f32 moments that are
//! rounded in between.

use super::{dtypes, on_every_cpu, values, wide};
use crate::cpu::moments8::{BLOCK, Moment, adamw8, decode, encode, words};
use crate::cpu::optim::{AdamW, adamw};
use crate::cpu::{Cpu, Isa};
use crate::reference::optim as oracle;
use proptest::prelude::*;

const LENGTHS: [usize; 5] = [0, 1, 32, 130, 40_003];
const MOMENTS: [Moment; 2] = [Moment::First, Moment::Second];

fn rounded(isa: Isa, moment: Moment, values: &[f32]) -> Vec<f32> {
    let (mut blocks, mut decoded) = (vec![0.0; words(values.len())], vec![0.0; values.len()]);
    encode(isa, moment, values, &mut blocks);
    decode(isa, moment, &blocks, &mut decoded);
    decoded
}

/// Values over many orders of magnitude. Those of the second moment are not negative.
fn moments(moment: Moment, seed: u64, len: usize) -> Vec<f32> {
    let exponents = values::<f32>(seed + 1, len);
    let spread = |(x, e): (f32, f32)| if e > 0.9 { 0.0 } else { x * (20.0 * e).exp2() };
    let all = values::<f32>(seed, len).into_iter().zip(exponents).map(spread);
    all.map(|x| if moment == Moment::Second { x.abs() } else { x }).collect()
}

#[test]
fn codes_are_the_nearest() {
    for isa in Isa::tested(Isa::Avx512Bf16) {
        for (moment, len) in MOMENTS.into_iter().flat_map(|moment| LENGTHS.map(|len| (moment, len))) {
            let x = moments(moment, 7, len);
            let got = rounded(isa, moment, &x);
            for (block, (x, got)) in x.chunks(BLOCK).zip(got.chunks(BLOCK)).enumerate() {
                let want = oracle::moment8(moment == Moment::First, &wide(x));
                for ((x, got), want) in x.iter().zip(got).zip(want) {
                    // The product with the scale rounds once. Two codes may be equally near.
                    let apart = |number: f64| (f64::from(*x) - number).abs();
                    let near = apart(f64::from(*got)) <= apart(want) + 1e-6 * want.abs().max(x.abs().into());
                    assert!(near, "{isa} {moment:?} block {block}: {x:e} became {got:e}, not {want:e}");
                    assert!(moment == Moment::First || (*x == 0.0) == (*got == 0.0), "{isa}: {x:e} became {got:e}");
                }
            }
        }
    }
}

proptest! {
    /// A checkpoint holds decoded moments, so that a run that resumes has the codes of one that
    /// never stopped.
    #[test]
    fn decoded_moments_encode_to_the_same_codes(bits in proptest::collection::vec(any::<u32>(), 1..70)) {
        for moment in MOMENTS {
            let number = |bits: &u32| f32::from_bits(if moment == Moment::Second { bits & 0x7fff_ffff } else { *bits });
            let x: Vec<f32> = bits.iter().map(number).filter(|x| x.is_finite()).collect();
            let isa = Isa::detect();
            let mut blocks = vec![0.0; words(x.len())];
            encode(isa, moment, &x, &mut blocks);
            let mut decoded = vec![0.0; x.len()];
            decode(isa, moment, &blocks, &mut decoded);
            let mut again = vec![1.0; words(x.len())];
            encode(isa, moment, &decoded, &mut again);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&blocks), bits(&again));
            for (x, decoded) in x.chunks(BLOCK).zip(decoded.chunks(BLOCK)) {
                let largest = |x: &[f32]| x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                prop_assert!(largest(x) < 1e-27 || largest(x) == largest(decoded));
            }
        }
    }
}

/// A gradient that is not finite is seen in the state, as it is in f32.
#[test]
fn what_is_not_finite_stays_so() {
    for (moment, bad) in MOMENTS.into_iter().flat_map(|moment| [(moment, f32::NAN), (moment, f32::INFINITY)]) {
        let mut x = vec![1.0; 2 * BLOCK];
        x[3] = bad;
        let got = rounded(Isa::detect(), moment, &x);
        assert!(!got[3].is_finite() && got[BLOCK..] == x[BLOCK..], "{moment:?} {bad}: {got:?}");
    }
}

dtypes! {
    fn adamw8_steps<T>() {
        for (len, variance_steps) in LENGTHS.into_iter().flat_map(|len| [(len, None), (len, Some(4))]) {
            let hyper = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, variance_steps };
            let start = values::<f32>(1, len);
            let gradient = |step: u64| moments(Moment::First, 100 + step, len);
            on_every_cpu(
                |cpu| {
                    let (mut p, mut c) = (start.clone(), vec![T::default(); len]);
                    let (mut m, mut v) = (vec![0.0; words(len)], vec![0.0; words(len)]);
                    for step in 1..=10 {
                        let copy = (step % 2 == 0).then_some(&mut c[..]);
                        adamw8(cpu, hyper, step, 0.25, &mut p, &gradient(step), &mut m, &mut v, copy);
                    }
                    // Codes are no numbers: their bits are compared.
                    let bits = |words: Vec<f32>| words.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                    (p, bits(m), bits(v), c)
                },
                |isa, (p, m, v, c)| {
                    let cpu = Cpu::new(isa, 1);
                    let (mut want, mut first, mut second) = (start.clone(), vec![0.0; len], vec![0.0; len]);
                    for step in 1..=10 {
                        let none = None::<&mut [f32]>;
                        adamw(&cpu, hyper, step, 0.25, &mut want, &gradient(step), &mut first, &mut second, none);
                        first = rounded(isa, Moment::First, &first);
                        second = rounded(isa, Moment::Second, &second);
                    }
                    assert!(*p == want, "{isa}: weights");
                    for (moment, got, want) in [(Moment::First, m, first), (Moment::Second, v, second)] {
                        let words: Vec<f32> = got.iter().map(|bits| f32::from_bits(*bits)).collect();
                        let mut decoded = vec![0.0; len];
                        decode(isa, moment, &words, &mut decoded);
                        assert!(decoded == want, "{isa}: {moment:?}");
                    }
                    assert!(c.iter().zip(p).all(|(c, p)| *c == T::from_f32(*p)), "{isa}: the copy is not the weights");
                },
            );
        }
    }
}
