//! Attention of a rank of a context-parallel group. Log-sum-exps of whole attention are not
//! compared: each device has them in an order of its own.

use super::{SPEC, check};
use std::ops::Range;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::ops::{self, ContextSegments};

/// Documents in two sequences of twelve tokens.
const DOCUMENTS: &[i32] = &[0, 5, 12, 13, 24];

/// The rows of one of two ranks, which have an early and a late chunk of each sequence, and the
/// rows of both in the order in which they are gathered.
fn chunks(rank: usize) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
    let of = |rank: usize| {
        [rank, 3 - rank].into_iter().flat_map(|chunk| [0, 12].map(|start| start + 3 * chunk..start + 3 * chunk + 3))
    };
    (of(rank).collect(), (0..2).flat_map(of).collect())
}

#[test]
fn attention_of_a_part_of_sequences_is_that_of_the_cpu() {
    check(&[
        ("attention of a rank's part of two sequences", |o| {
            let mut found = Vec::new();
            for (rank, window) in [(0, None), (1, None), (1, Some(3))] {
                let (rows, gathered) = chunks(rank);
                let segments = ContextSegments::new(DOCUMENTS, &rows, gathered)?;
                let spec = AttentionSpec { window, ..SPEC };
                let (q, kv, dout) = (o.floats(1, &[12, 32]), o.floats(2, &[24, 32]), o.floats(3, &[12, 32]));
                let (out, lse) = ops::context_attention(&q, &kv, &spec, &segments)?;
                let (dq, dkv) = ops::context_attention_backward(&dout, &q, &kv, &out, &lse, &spec, &segments)?;
                found.extend([out, dq, dkv]);
            }
            Ok(found)
        }),
        ("attention of a rank's part over its own keys, and over all others", |o| {
            let mut found = Vec::new();
            for rank in [0, 1] {
                let (rows, gathered) = chunks(rank);
                let [own, rest] = ContextSegments::apart(DOCUMENTS, &rows, gathered)?;
                let (q, kv, dout) = (o.floats(1, &[12, 32]), o.floats(2, &[24, 32]), o.floats(3, &[12, 32]));
                let own_kv = kv.narrow(rank * 12..rank * 12 + 12)?;
                let (part, part_lse) = ops::context_attention_part(&q, &own_kv, &SPEC, &own)?;
                let parts = [&part, &part_lse];
                let (out, lse) = ops::context_attention_rest(&q, &kv, parts, &SPEC, &rest)?;
                let [dq_rest, dkv_rest, down, dlse] =
                    ops::context_attention_rest_backward(&dout, &q, &kv, parts, [&out, &lse], &SPEC, &rest)?;
                let given = [&down, &dlse];
                let (dq, dkv) =
                    ops::context_attention_part_backward(given, &q, &own_kv, &part, &part_lse, &SPEC, &own)?;
                found.extend([part, part_lse, out, lse, dq_rest, dkv_rest, down, dlse, dq, dkv]);
            }
            Ok(found)
        }),
    ]);
}
