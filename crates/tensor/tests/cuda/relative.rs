//! Attention with numbers by distance, and of one batch over another: T5's.

use super::{SPEC, check, device};
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::ops::{self, CrossSegments, Segments};
use trainyard_tensor::{DType, Purpose};

const BOTH_WAYS: AttentionSpec = AttentionSpec { causal: false, ..SPEC };

#[test]
fn attention_with_numbers_by_distance_is_that_of_the_cpu() {
    check(&[
        ("attention with numbers by distance", |o| {
            let (qkv, dout) = (o.floats(1, &[19, 64]), o.floats(2, &[19, 32]));
            let segments = Segments::new(&[0, 4, 4, 19])?;
            let mut found = Vec::new();
            // The second reaches further than the longest segment.
            for (spec, reach) in [(SPEC, 15), (BOTH_WAYS, 21)] {
                let bias = o.wide(3, &[4, 2 * reach - 1])?;
                let (out, lse) = ops::biased_attention(&qkv, &bias, &spec, &segments)?;
                let (dqkv, dbias) = ops::biased_attention_backward(&dout, &qkv, &bias, &out, &lse, &spec, &segments)?;
                found.extend([out, lse, dqkv, dbias]);
            }
            Ok(found)
        }),
        ("decoding with numbers by distance", |o| {
            let (qkv, bias) = (o.floats(1, &[2, 64]), o.wide(4, &[4, 2 * 6 - 1])?);
            let (mut keys, mut values) = (o.floats(2, &[6, 16]), o.floats(3, &[6, 16]));
            let out = ops::attention_decode_biased(&qkv, &bias, &SPEC, &mut keys, &mut values, 3)?;
            Ok(vec![out, keys, values])
        }),
        ("attention of a decoder over its encoder", |o| {
            let mut found = Vec::new();
            for (queries, keys) in [(&[0, 3, 9][..], &[0, 8, 12][..]), (&[0, 6, 6, 9], &[0, 2, 7, 12])] {
                let segments = CrossSegments::new(Segments::new(queries)?, Segments::new(keys)?)?;
                let (q, kv, dout) = (o.floats(1, &[9, 32]), o.floats(2, &[12, 32]), o.floats(3, &[9, 32]));
                let (out, lse) = ops::cross_attention(&q, &kv, &BOTH_WAYS, &segments)?;
                let (dq, dkv) = ops::cross_attention_backward(&dout, &q, &kv, &out, &lse, &BOTH_WAYS, &segments)?;
                found.extend([out, lse, dq, dkv]);
            }
            Ok(found)
        }),
        ("attention in both directions", |o| {
            let (qkv, dout) = (o.floats(1, &[9, 64]), o.floats(2, &[9, 32]));
            let segments = Segments::new(&[0, 5, 9])?;
            let (out, lse) = ops::attention(&qkv, &BOTH_WAYS, &segments)?;
            let dqkv = ops::attention_backward(&dout, &qkv, &out, &lse, &BOTH_WAYS, &segments)?;
            Ok(vec![out, lse, dqkv])
        }),
    ]);
}

#[test]
fn a_sequence_that_its_numbers_do_not_reach_is_refused() {
    let (_tested, device) = device();
    let zeros = |shape: &[usize]| device.zeros(shape, DType::F32, Purpose::Activations).unwrap();
    let (qkv, bias) = (zeros(&[2, 64]), zeros(&[4, 7]));
    let (mut keys, mut values) = (zeros(&[8, 16]), zeros(&[8, 16]));
    let error = ops::attention_decode_biased(&qkv, &bias, &SPEC, &mut keys, &mut values, 3).unwrap_err();
    assert!(error.to_string().contains("a sequence of 5 tokens, and the bias reaches 4"), "{error}");
    let error = ops::biased_attention(&zeros(&[5, 64]), &bias, &SPEC, &Segments::uniform(1, 5)).unwrap_err();
    assert!(error.to_string().contains("a segment of 5 tokens, and the bias reaches 4"), "{error}");
}
