use super::*;

const CODECS: [BlockCodec; 7] = [
    BlockCodec::Bf16,
    BlockCodec::Int8,
    BlockCodec::Int4,
    BlockCodec::Nf4,
    BlockCodec::OneBit,
    BlockCodec::TopK { kept: 41 },
    BlockCodec::TopK { kept: 4096 },
];

/// Values of many magnitudes, with zeros and equal ones among them.
fn values(elements: usize, seed: u32) -> Vec<f32> {
    let of = |place: usize| {
        let [a, b, c, _] = philox4x32([place as u32, 0, 0, 0], [seed, 1]);
        let sign = if a & 1 == 0 { 1.0 } else { -1.0 };
        match b % 16 {
            0 => 0.0,
            1 => sign * 0.25,
            exponent => sign * (1.0 + c as f32 / u32::MAX as f32) * 2f32.powi(exponent as i32 - 12),
        }
    };
    (0..elements).map(of).collect()
}

fn encoded(codec: BlockCodec, values: &[f32], residual: Option<&mut [f32]>, rounding: Rounding) -> Vec<u8> {
    let mut message = vec![0xa5; encoded_bytes(codec, values.len())];
    encode(codec, values, residual, rounding, &mut message);
    message
}

fn decoded(codec: BlockCodec, message: &[u8], elements: usize) -> Vec<f32> {
    let mut values = vec![7.0; elements];
    decode(codec, message, &mut values);
    values
}

#[test]
fn kernels_give_the_bytes_of_the_definition() {
    let stochastic = Rounding::Stochastic { key: [3, 4], first: 1 << 33 };
    for (codec, rounding) in CODECS.into_iter().flat_map(|codec| [(codec, Rounding::Nearest), (codec, stochastic)]) {
        for seed in 0..4 {
            let input = values(3 * 4096, seed);
            let kept = values(3 * 4096, seed + 100);
            for with_residual in [false, true] {
                let [mut fast, mut plain] = [kept.clone(), kept.clone()];
                let message = encoded(codec, &input, with_residual.then_some(&mut fast[..]), rounding);
                let mut expected = vec![0; message.len()];
                oracle::encode(codec, &input, with_residual.then_some(&mut plain[..]), rounding, &mut expected);
                assert_eq!(message, expected, "{codec:?}, seed {seed}");
                assert_eq!(fast, plain, "{codec:?}, seed {seed}");
                let mut of_oracle = vec![0.0; input.len()];
                oracle::decode(codec, &expected, &mut of_oracle);
                assert_eq!(decoded(codec, &message, input.len()), of_oracle, "{codec:?}");
            }
        }
    }
}

/// The sum is formed in f64, where it is exact if the parts are right.
#[test]
fn what_is_sent_and_the_residual_are_the_input() {
    for codec in CODECS {
        for seed in 0..20 {
            let (input, mut residual) = (values(2 * 4096, seed), values(2 * 4096, seed + 50));
            let whole: Vec<f32> = input.iter().zip(&residual).map(|(a, b)| a + b).collect();
            let message = encoded(codec, &input, Some(&mut residual), Rounding::Nearest);
            let sent = decoded(codec, &message, whole.len());
            for i in 0..whole.len() {
                let (sum, whole) = (f64::from(sent[i]) + f64::from(residual[i]), f64::from(whole[i]));
                let is_rounded = matches!(codec, BlockCodec::OneBit | BlockCodec::Nf4);
                let lost = if is_rounded { 2f64.powi(-23) * f64::from(sent[i].abs()) } else { 0.0 };
                assert!((sum - whole).abs() <= lost, "{codec:?}: {sum:e} is not {whole:e}");
            }
        }
    }
}

#[test]
fn where_a_buffer_is_cut_changes_no_bit() {
    let stochastic = |first| Rounding::Stochastic { key: [9, 9], first };
    for codec in CODECS {
        let (input, block) = (values(4 * 4096, 5), codec.block_elements());
        for by_chance in [false, true] {
            let rounding = |first| if by_chance { stochastic(first) } else { Rounding::Nearest };
            let mut kept = vec![0.125; input.len()];
            let whole = encoded(codec, &input, Some(&mut kept), rounding(0));
            let (mut parts, mut residuals) = (Vec::new(), Vec::new());
            for (number, part) in input.chunks(block).enumerate() {
                let mut kept = vec![0.125; block];
                parts.extend(encoded(codec, part, Some(&mut kept), rounding((number * block) as u64)));
                residuals.extend(kept);
            }
            assert!(parts == whole && residuals == kept, "{codec:?}");
        }
    }
}

#[test]
fn rounding_by_chance_is_unbiased() {
    for (codec, most) in [(BlockCodec::Int8, 127.0), (BlockCodec::Int4, 7.0)] {
        let mut input = values(256, 1);
        input[0] = 16.0;
        let (times, mut means) = (4000, vec![0.0f64; 256]);
        for time in 0..times {
            let message = encoded(codec, &input, None, Rounding::Stochastic { key: [time, 0], first: 0 });
            let sent = decoded(codec, &message, 256);
            means.iter_mut().zip(sent).for_each(|(mean, sent)| *mean += f64::from(sent) / f64::from(times));
        }
        // The standard deviation of one draw is at most half a step.
        let bound = 4.5 * 0.5 * (16.0 / most) * 1.01 / f64::from(times).sqrt();
        for (mean, value) in means.iter().zip(&input) {
            assert!((mean - f64::from(*value)).abs() < bound, "{codec:?}: {mean} for {value}");
        }
    }
}

#[test]
fn errors_are_at_most_half_a_step() {
    for (codec, most) in [(BlockCodec::Int8, 127.0f32), (BlockCodec::Int4, 7.0)] {
        let input = values(256 * 64, 3);
        let sent = decoded(codec, &encoded(codec, &input, None, Rounding::Nearest), input.len());
        for (input, sent) in input.chunks(256).zip(sent.chunks(256)) {
            let largest = input.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            let step = largest / most * (1.0 + 1.0 / 128.0);
            input.iter().zip(sent).for_each(|(a, b)| assert!((a - b).abs() <= 0.5001 * step, "{codec:?}: {a} as {b}"));
        }
    }
}

#[test]
fn a_block_that_is_not_finite_is_seen_and_its_residual_stays() {
    for codec in CODECS {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut input = values(2 * 4096, 2);
            input[4096 + 17] = bad;
            let mut residual = vec![0.5; input.len()];
            let message = encoded(codec, &input, Some(&mut residual), Rounding::Nearest);
            let sent = decoded(codec, &message, input.len());
            let block = codec.block_elements();
            let at = (4096 + 17) / block * block;
            assert!(sent[at..at + block].iter().any(|value| value.is_nan()), "{codec:?}");
            assert!(sent[..at].iter().all(|value| value.is_finite()), "{codec:?}");
            assert!(residual[at..at + block].iter().all(|kept| *kept == 0.5), "{codec:?}");
        }
    }
}

#[test]
fn tiny_and_huge_blocks_are_sent_without_overflow() {
    for codec in CODECS.into_iter().filter(|codec| *codec != BlockCodec::Nf4) {
        for value in [0.0, f32::MIN_POSITIVE / 8.0, 1e-38, 1e-29, 3e38, -3e38] {
            let mut residual = vec![0.0; 4096];
            let message = encoded(codec, &[value; 4096], Some(&mut residual), Rounding::Nearest);
            let sent = decoded(codec, &message, 4096);
            let exact = |i: usize| f64::from(sent[i]) + f64::from(residual[i]) == f64::from(value);
            assert!((0..4096).all(exact), "{codec:?} of {value:e}: {} + {}", sent[0], residual[0]);
        }
    }
}

#[test]
fn nf4_takes_the_nearest_code_and_keeps_tiny_and_huge_blocks() {
    let input = values(256 * 16, 4);
    let sent = decoded(BlockCodec::Nf4, &encoded(BlockCodec::Nf4, &input, None, Rounding::Nearest), input.len());
    for (input, sent) in input.chunks(64).zip(sent.chunks(64)) {
        let largest = input.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let scale = half::bf16::from_f32(largest).to_f32();
        for (value, sent) in input.iter().zip(sent) {
            let nearest = NF4.iter().map(|code| (code * scale - value).abs()).fold(f32::INFINITY, f32::min);
            assert!((sent - value).abs() <= nearest + 1e-6 * scale, "{value} as {sent}");
        }
    }
    for value in [0.0, f32::MIN_POSITIVE, 1e-29, 1e-3, f32::MAX, -3e38] {
        let message = encoded(BlockCodec::Nf4, &[value; 256], None, Rounding::Nearest);
        let sent = decoded(BlockCodec::Nf4, &message, 256);
        assert!(sent.iter().all(|sent| (sent - value).abs() <= value.abs() / 256.0 + 1e-30), "{value:e}: {}", sent[0]);
    }
}

#[test]
fn sums_of_messages_follow_the_tree() {
    for codec in CODECS {
        for ranks in 1..=7 {
            let inputs: Vec<_> = (0..ranks).map(|rank| values(2 * 4096, rank)).collect();
            let messages: Vec<_> = inputs.iter().map(|input| encoded(codec, input, None, Rounding::Nearest)).collect();
            let parts: Vec<_> = messages.iter().map(|message| decoded(codec, message, 2 * 4096)).collect();
            let mut sum = vec![0.0; 2 * 4096];
            decode_sum(codec, &messages.iter().map(Vec::as_slice).collect::<Vec<_>>(), &mut sum);
            for (i, sum) in sum.iter().enumerate() {
                let column: Vec<f32> = parts.iter().map(|part| part[i]).collect();
                assert_eq!(sum.to_bits(), crate::number::tree_sum(&column).to_bits(), "{codec:?} of {ranks}");
            }
        }
    }
}
