//! Rounding to the grid of quantised weights: every step is rounded as defined, so the oracle's
//! bits are wanted, and those of the scalar form that `trainyard quantize` uses.

use super::{dtypes, on_every_cpu, values};
use crate::DType;
use crate::cpu::grid::round_to_grid;
use crate::grid::Grid;
use crate::reference::grid as oracle;

fn bits_of<T: crate::Element>(values: &[T]) -> Vec<u32> {
    values.iter().map(|value| value.to_f32().to_bits()).collect()
}

dtypes! {
    fn rounding_to_a_grid_is_the_oracles<T>() {
        let storage = match T::DTYPE {
            DType::F32 => (32, false),
            DType::BF16 => (16, true),
            _ => (16, false),
        };
        for bits in [2u8, 3, 4, 8] {
            // Groups below, of and above a vector, with ragged ends, and many of them.
            for (group, groups) in [(1, 3), (7, 5), (16, 9), (32, 4), (100, 3), (128, 301)] {
                let mut weights = values::<f32>(u64::from(bits) + group as u64, group * groups);
                // A group of zeros, one whose scale vanishes, ties, and both ends of the codes.
                weights[..group].fill(0.0);
                weights[group..2 * group].iter_mut().for_each(|w| *w *= 1e-44);
                let grid = Grid { bits, dtype: T::DTYPE };
                for (place, w) in weights[2 * group..3 * group].iter_mut().enumerate() {
                    *w = [1.5, -1.5, 0.5, -0.5, -0.0, grid.steps(), -grid.steps(), 2.5][place % 8];
                }
                let want: Vec<u32> = weights.chunks(group)
                    .flat_map(|of| oracle::group(u32::from(bits), storage, of)).map(f32::to_bits).collect();
                let scalar: Vec<u32> = weights.chunks(group)
                    .flat_map(|of| {
                        let scale = grid.scale(of);
                        of.iter().map(move |w| grid.value(grid.code(*w, scale), scale).to_bits())
                    })
                    .collect();
                assert_eq!(scalar, want, "{bits} bits, groups of {group}: the scalar form");
                on_every_cpu(
                    |cpu| {
                        let mut got = vec![T::from_f32(f32::NAN); weights.len()];
                        round_to_grid(cpu, bits, group, &weights, &mut got);
                        bits_of(&got)
                    },
                    |isa, got| assert_eq!(*got, want, "{isa}: {bits} bits, groups of {group}"),
                );
            }
        }
    }
}

#[test]
fn a_weight_that_is_no_number_stays_one_and_spoils_no_other() {
    let mut weights = values::<f32>(9, 96);
    let clean = weights.clone();
    weights[40] = f32::NAN;
    on_every_cpu(
        |cpu| {
            let (mut got, mut want) = (vec![0.0f32; 96], vec![0.0f32; 96]);
            round_to_grid(cpu, 4, 32, &weights, &mut got);
            round_to_grid(cpu, 4, 32, &clean, &mut want);
            let others = (0..96).filter(|at| !(32..64).contains(at)).all(|at| got[at] == want[at]);
            (got.iter().map(|value| value.is_nan()).collect::<Vec<_>>(), others)
        },
        |isa, (nan, others)| {
            assert!(nan.iter().enumerate().all(|(at, nan)| *nan == (at == 40)), "{isa}: {nan:?}");
            assert!(others, "{isa}");
        },
    );
}
