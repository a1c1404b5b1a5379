//! The Sobol sequence with the direction numbers of Joe & Kuo (2008), shifted by the seed.
//!
//! The shift is digital: all points are combined with one random number per dimension by exclusive
//! or. The points keep their even spread, and a seed has points of its own.

use crate::random::Stream;

/// The most dimensions.
pub const DIMENSIONS_MAX: usize = ROWS.len() + 1;

const PURPOSE: u32 = 0x736f_626f;
const BITS: u32 = 32;

/// `new-joe-kuo-6.21201`, dimensions 2 to 21: the polynomial's degree is the length of the list,
/// its inner coefficients are `a`, and the list is the initial numbers m.
const ROWS: [(u32, &[u32]); 20] = [
    (0, &[1]),
    (1, &[1, 3]),
    (1, &[1, 3, 1]),
    (2, &[1, 1, 1]),
    (1, &[1, 1, 3, 3]),
    (4, &[1, 3, 5, 13]),
    (2, &[1, 1, 5, 5, 17]),
    (4, &[1, 1, 5, 5, 5]),
    (7, &[1, 1, 7, 11, 19]),
    (11, &[1, 1, 5, 1, 1]),
    (13, &[1, 1, 1, 3, 11]),
    (14, &[1, 3, 5, 5, 31]),
    (1, &[1, 3, 3, 9, 7, 49]),
    (13, &[1, 1, 1, 15, 21, 21]),
    (16, &[1, 3, 1, 13, 27, 49]),
    (19, &[1, 1, 1, 15, 7, 5]),
    (22, &[1, 3, 1, 15, 13, 25]),
    (25, &[1, 1, 5, 5, 19, 61]),
    (1, &[1, 3, 7, 11, 23, 15, 103]),
    (4, &[1, 3, 7, 13, 13, 15, 69]),
];

/// Point `number` of the sequence in `dimensions` dimensions, shifted by `seed`.
///
/// # Panics
/// More than [`DIMENSIONS_MAX`] dimensions.
pub fn place(dimensions: usize, seed: u64, number: usize) -> Vec<f64> {
    let mut stream = Stream::new(seed, PURPOSE, 0);
    (0..dimensions)
        .map(|dimension| {
            let bits = unshifted(dimension, number) ^ (stream.bits() >> 32) as u32;
            // The middle of the cell, so that no place is 0.
            (f64::from(bits) + 0.5) / 2f64.powi(BITS as i32)
        })
        .collect()
}

/// The bits of a coordinate: the direction numbers of the bits of `number`'s Gray code, combined.
fn unshifted(dimension: usize, number: usize) -> u32 {
    let gray = (number ^ (number >> 1)) as u32;
    let directions = directions(dimension);
    (0..BITS).filter(|bit| gray >> bit & 1 == 1).fold(0, |sum, bit| sum ^ directions[bit as usize])
}

fn directions(dimension: usize) -> [u32; BITS as usize] {
    let mut v = [0u32; BITS as usize];
    let Some(row) = dimension.checked_sub(1) else {
        v.iter_mut().enumerate().for_each(|(k, v)| *v = 1 << (BITS - 1 - k as u32));
        return v;
    };
    let (a, m) = ROWS[row];
    let degree = m.len();
    for k in 0..BITS as usize {
        v[k] = match k < degree {
            true => m[k] << (BITS - 1 - k as u32),
            // Joe & Kuo, equation 2.
            false => {
                let inner = (1..degree).filter(|i| a >> (degree - 1 - i) & 1 == 1).fold(0, |sum, i| sum ^ v[k - i]);
                v[k - degree] ^ (v[k - degree] >> degree) ^ inner
            }
        };
    }
    v
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points of PyTorch's `SobolEngine(21)`, which has the same direction numbers
    /// (scripts/golden/tune.py).
    #[test]
    fn points_are_those_of_joe_and_kuo() {
        let golden: serde_json::Value = serde_json::from_str(include_str!("../../tests/golden/tune.json")).unwrap();
        let points = golden["sobol"].as_array().unwrap();
        assert!(points.len() >= 32 && points[0].as_array().unwrap().len() == DIMENSIONS_MAX);
        for (number, point) in points.iter().enumerate() {
            for (dimension, want) in point.as_array().unwrap().iter().enumerate() {
                let got = f64::from(unshifted(dimension, number)) / 2f64.powi(32);
                let want = want.as_f64().unwrap();
                assert!((got - want).abs() < 1e-6, "point {number}, dimension {dimension}: {got} against {want}");
            }
        }
    }

    #[test]
    fn every_cell_of_a_power_of_two_is_met_once_under_any_shift() {
        for seed in 0..3 {
            for dimension in 0..DIMENSIONS_MAX {
                let mut cells: Vec<usize> =
                    (0..64).map(|number| (place(DIMENSIONS_MAX, seed, number)[dimension] * 64.0) as usize).collect();
                cells.sort_unstable();
                assert!(cells.iter().copied().eq(0..64), "seed {seed}, dimension {dimension}");
            }
        }
        assert_ne!(place(2, 0, 5), place(2, 1, 5));
    }
}
