//! Masks of small weights against a sort of all of them.

use super::{dtypes, on_every_cpu, values};
use crate::cpu::sparsity::*;

/// The places of the `count` weights of least magnitude, by a stable sort.
fn lowest(count: usize, weights: &[f32]) -> Vec<bool> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| weights[*a].abs().total_cmp(&weights[*b].abs()));
    let mut marks = vec![false; weights.len()];
    order[..count].iter().for_each(|place| marks[*place] = true);
    marks
}

fn marks(len: usize, mask: &[u8]) -> Vec<bool> {
    let unused = (len..8 * mask.len()).all(|place| mask[place / 8] >> (place % 8) & 1 == 0);
    assert!(unused, "bits behind the last weight");
    (0..len).map(|place| mask[place / 8] >> (place % 8) & 1 == 1).collect()
}

/// Weights with ties at every magnitude, zeros of both signs and all sizes of exponents.
fn weights(len: usize) -> Vec<f32> {
    let mut weights = values::<f32>(len as u64, len);
    for (place, weight) in weights.iter_mut().enumerate() {
        match place % 5 {
            0 => *weight = (*weight * 8.0).round() / 8.0,
            1 => *weight *= 2f32.powi(place as i32 % 60 - 30),
            2 if place % 3 == 0 => *weight = -0.0,
            _ => {}
        }
    }
    weights
}

#[test]
fn the_smallest_weights_are_masked() {
    for len in [0, 1, 9, 4096, 100_003] {
        let weights = weights(len);
        for count in [0, 1, len / 3, len / 2, len.saturating_sub(1), len] {
            let count = count.min(len);
            on_every_cpu(
                |cpu| {
                    let mut mask = vec![0xff; mask_bytes(len)];
                    mask_lowest(cpu, count, &weights, &mut mask);
                    mask
                },
                |isa, mask| assert!(marks(len, mask) == lowest(count, &weights), "{isa}: {count} of {len}"),
            );
        }
        on_every_cpu(
            |cpu| {
                let mut mask = vec![0xff; mask_bytes(len)];
                mask_zeros(cpu, &weights, &mut mask);
                mask
            },
            |isa, mask| {
                let want: Vec<bool> = weights.iter().map(|weight| *weight == 0.0).collect();
                assert!(marks(len, mask) == want, "{isa}: zeros of {len}");
            },
        );
    }
}

#[test]
fn the_smallest_neighbours_are_masked() {
    for (count, of) in [(2, 4), (0, 4), (4, 4), (1, 3), (7, 64), (33, 63)] {
        let len = of * (70_000 / of);
        let weights = weights(len);
        let want: Vec<bool> = weights.chunks(of).flat_map(|group| lowest(count, group)).collect();
        on_every_cpu(
            |cpu| {
                let mut mask = vec![0xff; mask_bytes(len)];
                mask_lowest_of_neighbours(cpu, count, of, &weights, &mut mask);
                mask
            },
            |isa, mask| assert!(marks(len, mask) == want, "{isa}: {count} of {of}"),
        );
    }
}

dtypes! {
    fn masked_weights_and_their_copies_are_cleared<T>() {
        for len in [0, 1, 13, 50_001] {
            let weights: Vec<f32> = weights(len).iter().map(|weight| weight + 3.0).collect();
            let copies: Vec<T> = weights.iter().map(|weight| T::from_f32(*weight)).collect();
            let mut mask = vec![0; mask_bytes(len)];
            let masked = |place: usize| place.is_multiple_of(3) || place % 7 == 1;
            (0..len).filter(|place| masked(*place)).for_each(|place| mask[place / 8] |= 1 << (place % 8));
            on_every_cpu(
                |cpu| {
                    let (mut weights, mut copy, mut alone) = (weights.clone(), copies.clone(), weights.clone());
                    let cleared = clear(cpu, &mask, &mut weights, Some(&mut copy));
                    assert_eq!(clear::<T>(cpu, &mask, &mut alone, None), cleared);
                    assert_eq!(alone, weights);
                    (weights, copy, cleared)
                },
                |isa, (got, copy, cleared)| {
                    assert_eq!(*cleared, (0..len).filter(|place| masked(*place)).count(), "{isa}");
                    for place in 0..len {
                        let kept = if masked(place) { (0.0, T::default()) } else { (weights[place], copies[place]) };
                        assert_eq!((got[place], copy[place]), kept, "{isa} {place}");
                    }
                },
            );
        }
    }
}
