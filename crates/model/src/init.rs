//! Initial values as a function of (seed, slot, element of the whole parameter). A shard, or a rank
//! that holds a part of a split parameter, fills its part by itself and gets the same bits.

use crate::parameter::{Init, ParameterSpec};
use trainyard_autograd::ParamId;
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::cpu::philox::{self, RandomKey};

/// Fills `out` with the initial values of the elements `first ..` of parameter `id`, or of the part
/// of it that is held.
pub fn initialise(cpu: &Cpu, seed: u64, id: ParamId, parameter: &ParameterSpec, first: usize, out: &mut [f32]) {
    match parameter.init {
        Init::Zeros => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Constant { value } => out.fill(value),
        Init::Normal { .. } | Init::NormalRows { .. } => {
            let site = (id.unit << 12) | (id.index & 0xfff);
            let key = RandomKey { seed, step: RandomKey::INIT, site };
            for (run, whole, std) in parameter.normal_runs(first..first + out.len()) {
                philox::fill_normal(cpu, key, whole as u64, 0.0, std, &mut out[run.start - first..run.end - first]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameter::{ParameterKind, Piece, Split};
    use trainyard_tensor::cpu::Isa;

    #[test]
    fn a_shard_fills_its_part_with_the_same_bits() {
        let parameter = ParameterSpec::new("w", &[100, 50], Init::Normal { std: 0.02 }, ParameterKind::Matrix, "w");
        let fill = |id, seed, first: usize, len| {
            let mut out = vec![0.0; len];
            initialise(&Cpu::new(Isa::detect(), 2), seed, id, &parameter, first, &mut out);
            out
        };
        let id = ParamId::new(3, 1);
        let whole = fill(id, 7, 0, 5000);
        assert_eq!(fill(id, 7, 1234, 1000), whole[1234..2234]);
        let pieces = vec![Piece { local: 0..30, whole: 17..47, holders: 1, owned: true }];
        let split = Some(Split { whole: vec![100, 50], dim: 1, outer: 0, pieces, shared: Vec::new() });
        let part = ParameterSpec { shape: vec![100, 30], split, ..parameter.clone() };
        let mut out = vec![0.0; 2000];
        initialise(&Cpu::new(Isa::detect(), 2), 7, id, &part, 500, &mut out);
        let expected = (500..2500).map(|i| whole[i / 30 * 50 + 17 + i % 30]);
        assert!(out.iter().copied().eq(expected), "a rank's part differs from the whole");
        // Another deviation from row 40 on, met in the middle of a shard.
        let init = Init::NormalRows { first: 40, stds: [0.02, 0.06] };
        let rows = ParameterSpec { init, ..parameter.clone() };
        let mut out = vec![0.0; 1000];
        initialise(&Cpu::new(Isa::detect(), 2), 7, id, &rows, 1500, &mut out);
        let other = ParameterSpec { init: Init::Normal { std: 0.06 }, ..parameter.clone() };
        let mut wide = vec![0.0; 1000];
        initialise(&Cpu::new(Isa::detect(), 2), 7, id, &other, 1500, &mut wide);
        assert!(out[..500] == whole[1500..2000] && out[500..] == wide[500..], "rows have their own deviations");
        assert_ne!(fill(ParamId::new(3, 2), 7, 0, 5000), whole);
        assert_ne!(fill(id, 8, 0, 5000), whole);
        let mean = whole.iter().sum::<f32>() / 5000.0;
        let std = (whole.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 5000.0).sqrt();
        assert!(mean.abs() < 0.001 && (std - 0.02).abs() < 0.001, "mean {mean}, std {std}");
    }
}
