//! The codecs as their definition, one element at a time. The fast kernels are tested against
//! these, and must give the same bytes.

use super::{NF4, NF4_GROUP, Rounding, nf4_middles, round_up, scale_of, uniforms};
use half::bf16;
use trainyard_program::BlockCodec;

/// Blocks whose largest magnitude is below this are sent as zeros: the inverse of their scale might
/// not be finite.
pub(super) const SMALLEST: f32 = 1e-30;

/// As [`encode`](super::encode).
pub fn encode(
    codec: BlockCodec,
    values: &[f32],
    mut residual: Option<&mut [f32]>,
    rounding: Rounding,
    message: &mut [u8],
) {
    let (block, each) = (codec.block_elements(), codec.block_bytes());
    for (number, (values, message)) in values.chunks(block).zip(message.chunks_mut(each)).enumerate() {
        let at = number * block..(number + 1) * block;
        let kept = residual.as_deref().map(|residual| &residual[at.clone()]);
        let input: Vec<f32> = (0..block).map(|i| values[i] + kept.map_or(0.0, |kept| kept[i])).collect();
        if input.iter().any(|value| !value.is_finite()) {
            nan_block(codec, message);
            continue;
        }
        let uniform = |i: usize| match rounding {
            Rounding::Nearest => None,
            Rounding::Stochastic { key, first } => {
                let place = first + (number * block + i) as u64;
                Some(uniforms(key, place / 4)[(place % 4) as usize])
            }
        };
        let sent = encode_block(codec, &input, uniform, message);
        if let Some(residual) = residual.as_deref_mut() {
            for i in 0..block {
                residual[at.start + i] = input[i] - sent[i];
            }
        }
    }
}

/// Encodes finite values. Returns what is sent.
fn encode_block(
    codec: BlockCodec,
    input: &[f32],
    uniform: impl Fn(usize) -> Option<f32>,
    message: &mut [u8],
) -> Vec<f32> {
    match codec {
        BlockCodec::Bf16 => {
            for (value, bytes) in input.iter().zip(message.chunks_mut(2)) {
                bytes.copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
            }
        }
        BlockCodec::Int8 | BlockCodec::Int4 => {
            let most = if codec == BlockCodec::Int8 { 127.0 } else { 7.0 };
            let largest = input.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            let scale = if largest < SMALLEST { 0.0 } else { round_up(largest / most) };
            message[..2].copy_from_slice(&bf16::from_f32(scale).to_le_bytes());
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            let code = |i: usize| -> i8 {
                let place = input[i] * inverse;
                match uniform(i) {
                    Some(uniform) => (place + uniform).floor().clamp(-most, most) as i8,
                    None => {
                        let code = place.round_ties_even();
                        // The difference to what is sent must be exact.
                        if input[i].abs() < 0.5 * (code * scale).abs() { 0 } else { code as i8 }
                    }
                }
            };
            match codec {
                BlockCodec::Int8 => (0..256).for_each(|i| message[2 + i] = code(i) as u8),
                _ => (0..128).for_each(|i| message[2 + i] = (code(i) as u8 & 15) | (code(i + 128) as u8) << 4),
            }
        }
        BlockCodec::Nf4 => {
            let mut codes = [0u8; 256];
            for (group, values) in input.chunks(NF4_GROUP).enumerate() {
                let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                let scale = if largest < SMALLEST { bf16::ZERO } else { bf16::from_f32(largest) };
                // The largest f32 round to an infinite bf16.
                let scale = if scale.is_finite() { scale } else { bf16::MAX };
                message[2 * group..2 * group + 2].copy_from_slice(&scale.to_le_bytes());
                let inverse = if scale == bf16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
                for (i, value) in values.iter().enumerate() {
                    let place = value * inverse;
                    codes[group * NF4_GROUP + i] = nf4_middles().iter().filter(|middle| place > **middle).count() as u8;
                }
            }
            (0..128).for_each(|i| message[8 + i] = codes[i] | codes[i + 128] << 4);
        }
        BlockCodec::OneBit => {
            // The sum has sixteen parts, as vectors have it.
            let mut parts = [0.0f32; 16];
            input.chunks(16).for_each(|values| (0..16).for_each(|i| parts[i] += values[i].abs() / 256.0));
            let mean = bf16::from_f32(parts.iter().sum::<f32>());
            message[..2].copy_from_slice(&mean.to_le_bytes());
            for j in 0..32 {
                message[2 + j] = (0..8).map(|k| u8::from(input[j + 32 * k].is_sign_negative()) << k).sum();
            }
        }
        BlockCodec::TopK { kept } => {
            let kept = kept as usize;
            let mut order: Vec<usize> = (0..input.len()).collect();
            order.sort_by_key(|i| (std::cmp::Reverse(input[*i].abs().to_bits()), *i));
            order.truncate(kept);
            order.sort_unstable();
            for (number, i) in order.into_iter().enumerate() {
                message[2 * number..2 * number + 2].copy_from_slice(&(i as u16).to_le_bytes());
                let at = 2 * (kept + number);
                message[at..at + 2].copy_from_slice(&bf16::from_f32(input[i]).to_le_bytes());
            }
        }
    }
    let mut sent = vec![0.0; input.len()];
    decode(codec, message, &mut sent);
    sent
}

/// A block that decodes to NaN.
pub(super) fn nan_block(codec: BlockCodec, message: &mut [u8]) {
    let nan = bf16::NAN.to_le_bytes();
    match codec {
        BlockCodec::Bf16 => message.chunks_mut(2).for_each(|bytes| bytes.copy_from_slice(&nan)),
        BlockCodec::TopK { kept } => {
            let (places, values) = message.split_at_mut(2 * kept as usize);
            let places = places.chunks_mut(2).enumerate();
            places.for_each(|(number, bytes)| bytes.copy_from_slice(&(number as u16).to_le_bytes()));
            values.chunks_mut(2).for_each(|bytes| bytes.copy_from_slice(&nan));
        }
        BlockCodec::Nf4 => {
            message.fill(0);
            message[..8].chunks_mut(2).for_each(|bytes| bytes.copy_from_slice(&nan));
        }
        _ => {
            message.fill(0);
            message[..2].copy_from_slice(&nan);
        }
    }
}

/// As [`decode`](super::decode).
pub fn decode(codec: BlockCodec, message: &[u8], values: &mut [f32]) {
    let (block, each) = (codec.block_elements(), codec.block_bytes());
    for (message, values) in message.chunks(each).zip(values.chunks_mut(block)) {
        let value_at = |at: usize| bf16::from_le_bytes([message[at], message[at + 1]]).to_f32();
        match codec {
            BlockCodec::Bf16 => values.iter_mut().enumerate().for_each(|(i, value)| *value = value_at(2 * i)),
            BlockCodec::Int8 => {
                for (i, value) in values.iter_mut().enumerate() {
                    *value = f32::from(message[2 + i] as i8) * scale_of(message);
                }
            }
            BlockCodec::Int4 => {
                for (i, value) in values.iter_mut().enumerate() {
                    let byte = message[2 + i % 128] as i8;
                    let code = if i < 128 { (byte << 4) >> 4 } else { byte >> 4 };
                    *value = f32::from(code) * scale_of(message);
                }
            }
            BlockCodec::Nf4 => {
                for (i, value) in values.iter_mut().enumerate() {
                    let code = message[8 + i % 128] >> (i / 128 * 4) & 15;
                    *value = NF4[code as usize] * value_at(2 * (i / NF4_GROUP));
                }
            }
            BlockCodec::OneBit => {
                for (i, value) in values.iter_mut().enumerate() {
                    let negative = message[2 + i % 32] >> (i / 32) & 1 == 1;
                    *value = if negative { -scale_of(message) } else { scale_of(message) };
                }
            }
            BlockCodec::TopK { kept } => {
                values.fill(0.0);
                for number in 0..kept as usize {
                    let place = u16::from_le_bytes([message[2 * number], message[2 * number + 1]]);
                    // A place beyond the block would be damage on the way, which checksums find.
                    if let Some(value) = values.get_mut(place as usize) {
                        *value = value_at(2 * (kept as usize + number));
                    }
                }
            }
        }
    }
}
