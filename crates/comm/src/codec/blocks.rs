//! The fast kernels. They are plain loops over arrays of fixed length, compiled for the widest
//! vectors of the machine, and give the bytes of the [oracle](super::oracle).

use super::oracle::{self, SMALLEST, nan_block};
use super::{NF4, NF4_GROUP, Rounding, nf4_middles, round_up, scale_of, signed};
use half::bf16;
use trainyard_program::BlockCodec;

/// Adding and subtracting this rounds a magnitude below 2^22 to an integer, ties to even, and
/// leaves the integer in the low bits between the two.
const ROUNDS: f32 = 12_582_912.0;

/// Elements of a block of codes, and of one of `top_k`.
const BLOCK: usize = 256;
const WIDE: usize = 4096;

/// Calls `$kernel` compiled for the widest vectors of the machine. The arithmetic is the same.
macro_rules! dispatch {
    ($kernel:ident($($argument:ident: $type:ty),*)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
            fn avx512($($argument: $type),*) {
                $kernel($($argument),*)
            }
            #[target_feature(enable = "avx2")]
            fn avx2($($argument: $type),*) {
                $kernel($($argument),*)
            }
            let [f, bw] = [is_x86_feature_detected!("avx512f"), is_x86_feature_detected!("avx512bw")];
            if f && bw && is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512dq") {
                // SAFETY: the machine has these instructions.
                return unsafe { avx512($($argument),*) };
            }
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the machine has these instructions.
                return unsafe { avx2($($argument),*) };
            }
        }
        $kernel($($argument),*)
    }};
}

pub fn encode(codec: BlockCodec, values: &[f32], residual: Option<&mut [f32]>, rounding: Rounding, message: &mut [u8]) {
    let is_rounded_by_chance = matches!(codec, BlockCodec::Int8 | BlockCodec::Int4) && rounding != Rounding::Nearest;
    if is_rounded_by_chance {
        // Random numbers take most of the time, so the definition is fast enough.
        return oracle::encode(codec, values, residual, rounding, message);
    }
    dispatch!(encode_blocks(codec: BlockCodec, values: &[f32], residual: Option<&mut [f32]>, message: &mut [u8]))
}

pub fn decode(codec: BlockCodec, message: &[u8], values: &mut [f32]) {
    dispatch!(decode_blocks(codec: BlockCodec, message: &[u8], values: &mut [f32]))
}

#[inline(always)]
fn encode_blocks(codec: BlockCodec, values: &[f32], residual: Option<&mut [f32]>, message: &mut [u8]) {
    match codec {
        BlockCodec::Bf16 => each_block::<BLOCK>(codec, values, residual, message, bf16_block),
        BlockCodec::Int8 => each_block::<BLOCK>(codec, values, residual, message, int8_block),
        BlockCodec::Int4 => each_block::<BLOCK>(codec, values, residual, message, int4_block),
        BlockCodec::Nf4 => each_block::<BLOCK>(codec, values, residual, message, nf4_block),
        BlockCodec::OneBit => each_block::<BLOCK>(codec, values, residual, message, one_bit_block),
        BlockCodec::TopK { .. } => each_block::<WIDE>(codec, values, residual, message, top_k_block),
    }
}

/// Runs `kernel` on every block of finite values: it reads the first array and writes what is sent
/// to the second.
#[inline(always)]
fn each_block<const N: usize>(
    codec: BlockCodec,
    values: &[f32],
    mut residual: Option<&mut [f32]>,
    message: &mut [u8],
    kernel: impl Fn(&[f32; N], u32, &mut [f32; N], &mut [u8]),
) {
    let (mut input, mut sent) = ([0.0f32; N], [0.0f32; N]);
    for (number, (values, message)) in
        values.as_chunks::<N>().0.iter().zip(message.chunks_exact_mut(codec.block_bytes())).enumerate()
    {
        let kept = residual.as_deref_mut().map(|residual| &mut residual.as_chunks_mut::<N>().0[number]);
        match &kept {
            Some(kept) => (0..N).for_each(|i| input[i] = values[i] + kept[i]),
            None => input.copy_from_slice(values),
        }
        let largest = input.iter().fold(0u32, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff));
        if largest >= f32::INFINITY.to_bits() {
            nan_block(codec, message);
            continue;
        }
        kernel(&input, largest, &mut sent, message);
        if let Some(kept) = kept {
            (0..N).for_each(|i| kept[i] = input[i] - sent[i]);
        }
    }
}

/// bf16 of a finite value, as bits.
#[inline(always)]
fn rounded(value: f32) -> u32 {
    let bits = value.to_bits();
    (bits + 0x7fff + (bits >> 16 & 1)) >> 16
}

#[inline(always)]
fn bf16_block(input: &[f32; BLOCK], _: u32, sent: &mut [f32; BLOCK], message: &mut [u8]) {
    for i in 0..BLOCK {
        let bits = rounded(input[i]);
        sent[i] = f32::from_bits(bits << 16);
        [message[2 * i], message[2 * i + 1]] = (bits as u16).to_le_bytes();
    }
}

/// The codes of a block, at most `most` in magnitude, and its scale.
#[inline(always)]
fn codes(input: &[f32; BLOCK], largest: u32, most: f32, sent: &mut [f32; BLOCK], codes: &mut [u8; BLOCK]) -> f32 {
    let largest = f32::from_bits(largest);
    let scale = if largest < SMALLEST { 0.0 } else { round_up(largest / most) };
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    for i in 0..BLOCK {
        let moved = input[i] * inverse + ROUNDS;
        let value = (moved - ROUNDS) * scale;
        // The difference to what is sent must be exact, which it is unless a value of less than
        // half is rounded up.
        let is_kept = input[i].abs() >= 0.5 * value.abs();
        sent[i] = if is_kept { value } else { 0.0 };
        codes[i] = if is_kept { moved.to_bits() as u8 } else { 0 };
    }
    scale
}

#[inline(always)]
fn put_scale(scale: f32, message: &mut [u8]) {
    message[..2].copy_from_slice(&((scale.to_bits() >> 16) as u16).to_le_bytes());
}

#[inline(always)]
fn int8_block(input: &[f32; BLOCK], largest: u32, sent: &mut [f32; BLOCK], message: &mut [u8]) {
    let mut of_block = [0u8; BLOCK];
    let scale = codes(input, largest, 127.0, sent, &mut of_block);
    put_scale(scale, message);
    message[2..].copy_from_slice(&of_block);
}

#[inline(always)]
fn int4_block(input: &[f32; BLOCK], largest: u32, sent: &mut [f32; BLOCK], message: &mut [u8]) {
    let mut of_block = [0u8; BLOCK];
    let scale = codes(input, largest, 7.0, sent, &mut of_block);
    put_scale(scale, message);
    let (low, high) = of_block.split_at(BLOCK / 2);
    let halves = low.iter().zip(high);
    message[2..].iter_mut().zip(halves).for_each(|(byte, (low, high))| *byte = (low & 15) | high << 4);
}

#[inline(always)]
fn nf4_block(input: &[f32; BLOCK], _: u32, sent: &mut [f32; BLOCK], message: &mut [u8]) {
    const MIDDLES: [f32; 15] = nf4_middles();
    let mut codes = [0u8; BLOCK];
    for (group, values) in input.as_chunks::<NF4_GROUP>().0.iter().enumerate() {
        let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let bits = if largest < SMALLEST { 0 } else { rounded(largest).min(u32::from(bf16::MAX.to_bits())) };
        let scale = f32::from_bits(bits << 16);
        put_scale(scale, &mut message[2 * group..]);
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let first = group * NF4_GROUP;
        for i in 0..NF4_GROUP {
            let place = values[i] * inverse;
            let code = MIDDLES.iter().map(|middle| u32::from(place > *middle)).sum::<u32>();
            codes[first + i] = code as u8;
            sent[first + i] = NF4[code as usize] * scale;
        }
    }
    let (low, high) = codes.split_at(BLOCK / 2);
    let halves = low.iter().zip(high);
    message[8..].iter_mut().zip(halves).for_each(|(byte, (low, high))| *byte = low | high << 4);
}

/// The values of 64 codes, which lie in the low or the high halves of `codes`.
#[inline(always)]
fn nf4_group(codes: &[u8], shift: u32, scale: f32, values: &mut [f32]) {
    let scaled = NF4.map(|code| code * scale);
    values.iter_mut().zip(codes).for_each(|(value, byte)| *value = scaled[usize::from(byte >> shift & 15)]);
}

#[inline(always)]
fn one_bit_block(input: &[f32; BLOCK], _: u32, sent: &mut [f32; BLOCK], message: &mut [u8]) {
    let mut parts = [0.0f32; 16];
    for values in input.as_chunks::<16>().0 {
        (0..16).for_each(|i| parts[i] += values[i].abs() * (1.0 / BLOCK as f32));
    }
    let mean = bf16::from_f32(parts.iter().sum::<f32>()).to_f32();
    put_scale(mean, message);
    let mut signs = [0u8; 32];
    for (k, values) in input.as_chunks::<32>().0.iter().enumerate() {
        (0..32).for_each(|j| signs[j] |= ((values[j].to_bits() >> 31) as u8) << k);
    }
    message[2..].copy_from_slice(&signs);
    for i in 0..BLOCK {
        sent[i] = f32::from_bits(mean.to_bits() | input[i].to_bits() & 0x8000_0000);
    }
}

#[inline(always)]
fn top_k_block(input: &[f32; WIDE], largest: u32, sent: &mut [f32; WIDE], message: &mut [u8]) {
    let kept = message.len() / 4;
    let mut magnitudes = [0u32; WIDE];
    (0..WIDE).for_each(|i| magnitudes[i] = input[i].to_bits() & 0x7fff_ffff);
    let at_least = |bound: u32| magnitudes.iter().map(|value| u32::from(*value >= bound)).sum::<u32>() as usize;
    // The largest bound that at least `kept` elements reach, bisected over the bits of magnitudes.
    let (mut low, mut high) = (0u32, largest + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match at_least(middle) {
            count if count == kept => {
                low = middle;
                break;
            }
            count if count > kept => low = middle,
            _ => high = middle,
        }
    }
    // Of those that equal the bound, the first are kept.
    let mut equal = kept - at_least(low + 1).min(kept);
    let (places, values) = message.split_at_mut(2 * kept);
    let mut number = 0;
    sent.fill(0.0);
    for (first, magnitudes) in magnitudes.as_chunks::<64>().0.iter().enumerate() {
        let any = magnitudes.iter().fold(false, |any, value| any | (*value >= low));
        if !any {
            continue;
        }
        for (offset, magnitude) in magnitudes.iter().enumerate() {
            let counts = *magnitude > low || *magnitude == low && equal > 0;
            if counts && number < kept {
                equal -= usize::from(*magnitude == low && equal > 0);
                let place = 64 * first + offset;
                let bits = rounded(input[place]);
                places[2 * number..2 * number + 2].copy_from_slice(&(place as u16).to_le_bytes());
                values[2 * number..2 * number + 2].copy_from_slice(&(bits as u16).to_le_bytes());
                sent[place] = f32::from_bits(bits << 16);
                number += 1;
            }
        }
    }
}

#[inline(always)]
fn decode_blocks(codec: BlockCodec, message: &[u8], values: &mut [f32]) {
    if let BlockCodec::TopK { .. } = codec {
        return oracle::decode(codec, message, values);
    }
    let blocks = message.chunks_exact(codec.block_bytes()).zip(values.as_chunks_mut::<BLOCK>().0);
    for (message, values) in blocks {
        match codec {
            BlockCodec::Bf16 => {
                for (value, bytes) in values.iter_mut().zip(message.as_chunks::<2>().0) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
                }
            }
            BlockCodec::Int8 => {
                let scale = scale_of(message);
                let codes = signed(&message[2..]);
                values.iter_mut().zip(codes).for_each(|(value, code)| *value = f32::from(*code) * scale);
            }
            BlockCodec::Int4 => {
                let scale = scale_of(message);
                let codes = signed(&message[2..]);
                let (low, high) = values.split_at_mut(BLOCK / 2);
                low.iter_mut().zip(codes).for_each(|(value, code)| *value = f32::from((code << 4) >> 4) * scale);
                high.iter_mut().zip(codes).for_each(|(value, code)| *value = f32::from(code >> 4) * scale);
            }
            BlockCodec::Nf4 => {
                let (scales, codes) = message.split_at(8);
                for (group, values) in values.as_chunks_mut::<NF4_GROUP>().0.iter_mut().enumerate() {
                    let codes = &codes[group % 2 * NF4_GROUP..][..NF4_GROUP];
                    nf4_group(codes, group as u32 / 2 * 4, scale_of(&scales[2 * group..]), values);
                }
            }
            BlockCodec::OneBit => {
                let magnitude = scale_of(message).to_bits();
                for (k, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                    for (value, signs) in values.iter_mut().zip(&message[2..]) {
                        *value = f32::from_bits(magnitude | u32::from(signs >> k & 1) << 31);
                    }
                }
            }
            BlockCodec::TopK { .. } => unreachable!("decoded above"),
        }
    }
}
