//! One small layer, and small tensors, compressed and merged here and by PyTorch
//! (`scripts/golden/make_compression.py`).

use serde_json::Value;
use trainyard_compress::awq::best_scales;
use trainyard_compress::factor::inverse_factor;
use trainyard_compress::inputs::{Inputs, Needs};
use trainyard_compress::merge::{MergeMethod, MergeSettings, merge_tensor};
use trainyard_compress::prune::{Pattern, PruneMethod, prune};
use trainyard_compress::quantise::{GroupedGrid, QuantiseMethod, quantise};
use trainyard_compress::smooth;
use trainyard_model::weights::PackedFormat;
use trainyard_tensor::cpu::{Cpu, Isa};
use trainyard_tensor::grid::Grid;
use trainyard_tensor::{DType, Device, Purpose, Tensor};

const ROWS: usize = 5;
const COLUMNS: usize = 160;
const SAMPLES: usize = 480;

fn golden() -> Value {
    serde_json::from_str(include_str!("golden/layer.json")).unwrap()
}

fn weights() -> Vec<f32> {
    let weight = |i: usize, j: usize| {
        ((i * 7919 + j * 104_729 + i * j * 31) % 2003) as f32 / 1001.5 - 1.0
            + ((i * 37 + j * 11) % 97) as f32 / 300_000.0
    };
    (0..ROWS * COLUMNS).map(|at| weight(at / COLUMNS, at % COLUMNS)).collect()
}

fn inputs(device: &Device) -> Tensor {
    let raw = |i: usize, j: usize| ((i * i * 31 + j * j * 17 + i * j * 7) % 1009) as f32 / 504.5 - 1.0;
    let input = |i: usize, j: usize| {
        let mixed = if j == 0 { raw(i, 0) } else { raw(i, j) + 0.5 * raw(i, j - 1) };
        mixed * (0.1 + (j % 7) as f32 / 4.0)
    };
    let values: Vec<f32> = (0..SAMPLES * COLUMNS).map(|at| input(at / COLUMNS, at % COLUMNS)).collect();
    device.tensor([SAMPLES, COLUMNS], &values, Purpose::Activations).unwrap()
}

/// The statistics of the inputs, seen in two parts.
fn statistics(cpu: &Cpu, device: &Device, needs: Needs) -> Inputs {
    let (all, mut sums) = (inputs(device), Inputs::new(COLUMNS, needs));
    sums.add(cpu, &all.narrow(0..200).unwrap()).unwrap();
    sums.add(cpu, &all.narrow(200..SAMPLES).unwrap()).unwrap();
    assert_eq!(sums.rows(), SAMPLES);
    sums
}

fn pruned(threads: usize, method: PruneMethod, pattern: Pattern) -> Vec<f32> {
    let device = Device::cpu(Isa::detect(), threads, None);
    let cpu = device.as_cpu().unwrap();
    let mut w = weights();
    prune(cpu, "layer", &mut w, &statistics(cpu, &device, method.needs()), method, pattern).unwrap();
    w
}

const HALF: Pattern = Pattern::Share(0.5);
const TWO_OF_FOUR: Pattern = Pattern::Neighbours { kept: 2, of: 4 };

#[test]
fn the_weights_that_are_kept_are_those_of_the_published_programs() {
    let golden = golden();
    for (name, method, pattern) in [
        ("wanda_half", PruneMethod::Wanda, HALF),
        ("wanda_2_4", PruneMethod::Wanda, TWO_OF_FOUR),
        ("magnitude_half", PruneMethod::Magnitude, HALF),
    ] {
        let (before, after) = (weights(), pruned(2, method, pattern));
        for (row, line) in golden[name].as_array().unwrap().iter().enumerate() {
            let at = row * COLUMNS..(row + 1) * COLUMNS;
            let kept: String = after[at.clone()].iter().map(|w| if *w == 0.0 { '0' } else { '1' }).collect();
            assert_eq!(kept, line.as_str().unwrap(), "{name}, row {row}");
            for (now, then) in after[at.clone()].iter().zip(&before[at]) {
                assert!(*now == 0.0 || now == then, "{name}");
            }
        }
    }
}

fn error(found: &[f32], golden: &Value) -> f64 {
    let expected: Vec<f64> = golden
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|row| row.as_array().unwrap())
        .map(|x| x.as_f64().unwrap())
        .collect();
    assert_eq!(found.len(), expected.len());
    let square: f64 = found.iter().zip(&expected).map(|(x, y)| (f64::from(*x) - y).powi(2)).sum();
    (square / expected.iter().map(|y| y * y).sum::<f64>()).sqrt()
}

#[test]
fn sparsegpt_moves_the_weights_as_its_program_does() {
    let golden = golden();
    for (name, pattern) in [("sparsegpt_half", HALF), ("sparsegpt_2_4", TWO_OF_FOUR)] {
        let found = pruned(2, PruneMethod::SparseGpt, pattern);
        let error = error(&found, &golden[name]);
        assert!(error < 1e-5, "{name}: {error:e}");
        let zeros = found.iter().filter(|w| **w == 0.0).count();
        assert_eq!(zeros, ROWS * COLUMNS / 2, "{name}");
        assert_eq!(found, pruned(3, PruneMethod::SparseGpt, pattern), "{name}: threads");
    }
}

/// The squared error of the layer's outputs.
fn output_error(found: &[f32]) -> f64 {
    let device = Device::cpu(Isa::detect(), 1, None);
    let x = inputs(&device);
    let before = weights();
    let row_error = |x: &[f32], row: usize| {
        let at = row * COLUMNS..(row + 1) * COLUMNS;
        let moves = found[at.clone()].iter().zip(&before[at]).map(|(a, b)| f64::from(a - b));
        moves.zip(x).map(|(w, x)| w * f64::from(*x)).sum::<f64>().powi(2)
    };
    x.data::<f32>().unwrap().chunks_exact(COLUMNS).flat_map(|x| (0..ROWS).map(move |row| row_error(x, row))).sum()
}

#[test]
fn methods_that_look_at_inputs_change_outputs_less() {
    let errors = [PruneMethod::Magnitude, PruneMethod::Wanda, PruneMethod::SparseGpt]
        .map(|method| output_error(&pruned(2, method, HALF)));
    assert!(errors[0] > errors[1] && errors[1] > errors[2], "{errors:?}");
    let grid =
        GroupedGrid { format: PackedFormat { bits: 3, group: Some(32), codes_inputs: false }, dtype: DType::F32 };
    let errors = [QuantiseMethod::Nearest, QuantiseMethod::Gptq].map(|method| output_error(&quantised(method, grid).0));
    assert!(errors[0] > 1.3 * errors[1], "{errors:?}");
}

/// The values, codes and scales of the layer.
fn quantised(method: QuantiseMethod, grid: GroupedGrid) -> (Vec<f32>, Vec<i8>, Vec<f32>) {
    let device = Device::cpu(Isa::detect(), 2, None);
    let cpu = device.as_cpu().unwrap();
    let mut w = weights();
    let packed = quantise(cpu, "layer", &mut w, &statistics(cpu, &device, method.needs()), method, grid).unwrap();
    (w, packed.codes, packed.scales)
}

#[test]
fn codes_and_scales_are_those_of_the_published_programs() {
    let golden = golden();
    for (name, method) in [("gptq", QuantiseMethod::Gptq), ("nearest", QuantiseMethod::Nearest)] {
        for case in golden[name].as_array().unwrap() {
            let (bits, group) = (case["bits"].as_u64().unwrap() as u8, case["group"].as_u64().unwrap() as usize);
            let format =
                PackedFormat { bits, group: Some(group).filter(|group| *group < COLUMNS), codes_inputs: false };
            let (values, codes, scales) = quantised(method, GroupedGrid { format, dtype: DType::F32 });
            let expected = case["codes"].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap());
            let expected: Vec<i8> = expected.map(|code| code.as_i64().unwrap() as i8).collect();
            let wrong = codes.iter().zip(&expected).filter(|(a, b)| a != b).count();
            assert_eq!(wrong, 0, "{name} of {bits} bits, groups of {group}");
            let error = error(&scales, &case["scales"]);
            assert!(error < 1e-6, "{name}: {error:e}");
            let groups = format.groups(COLUMNS);
            for (at, value) in values.iter().enumerate() {
                let scale = scales[at / COLUMNS * groups + at % COLUMNS / group];
                assert_eq!(*value, f32::from(codes[at]) * scale);
            }
        }
    }
}

/// The exponent with the least error of outputs, and the scales that it gives.
#[test]
fn scales_of_columns_are_those_with_the_least_error() {
    let device = Device::cpu(Isa::detect(), 2, None);
    let cpu = device.as_cpu().unwrap();
    let inputs = statistics(cpu, &device, Needs::Products);
    for case in golden()["awq"].as_array().unwrap() {
        let (bits, group) = (case["bits"].as_u64().unwrap() as u8, case["group"].as_u64().unwrap() as usize);
        let format = PackedFormat { bits, group: Some(group).filter(|group| *group < COLUMNS), codes_inputs: false };
        let found = best_scales(cpu, "layer", &weights(), &inputs, GroupedGrid { format, dtype: DType::F32 }).unwrap();
        assert!(case["exponent"].as_f64().unwrap() > 0.0, "{case}");
        let row = serde_json::json!([case["scales"]]);
        let error = error(&found, &row);
        assert!(error < 1e-5, "{bits} bits, groups of {group}: {error:e}");
    }
}

/// Equation 4 of the paper, on the largest inputs over all that were seen.
#[test]
fn scales_that_make_inputs_easier_to_round_are_the_published_ones() {
    let device = Device::cpu(Isa::detect(), 2, None);
    let inputs = statistics(device.as_cpu().unwrap(), &device, Needs::Largest);
    for case in golden()["smooth"].as_array().unwrap() {
        let found = smooth::scales(&weights(), inputs.largest(), case["exponent"].as_f64().unwrap() as f32);
        let error = error(&found, &serde_json::json!([case["scales"]]));
        assert!(error < 1e-6, "{case}: {error:e}");
    }
}

/// A column of inputs that is a hundred times the others leaves them one code each. Scaled, they
/// have ten.
#[test]
fn smoothing_keeps_what_a_column_of_large_inputs_drowns() {
    let device = Device::cpu(Isa::detect(), 2, None);
    let mut x = inputs(&device).to_f32_vec().unwrap();
    x.iter_mut().skip(3).step_by(COLUMNS).for_each(|x| *x *= 100.0);
    let largest = |j: usize| x.iter().skip(j).step_by(COLUMNS).fold(0.0f32, |most, x| most.max(x.abs()));
    let largest: Vec<f32> = (0..COLUMNS).map(largest).collect();
    // The relative error of outputs with inputs divided and weights multiplied by scales, both in 8
    // bits.
    let error = |scales: &[f32]| {
        let grid = Grid { bits: 8, dtype: DType::F32 };
        let coded = |row: Vec<f32>| -> Vec<f64> {
            let scale = grid.scale(&row);
            row.iter().map(|x| f64::from(grid.value(grid.code(*x, scale), scale))).collect()
        };
        let scaled =
            |row: &[f32], by: &dyn Fn(f32, f32) -> f32| row.iter().zip(scales).map(|(x, s)| by(*x, *s)).collect();
        let w: Vec<Vec<f64>> = weights().chunks(COLUMNS).map(|row| coded(scaled(row, &|w, s| w * s))).collect();
        let (mut off, mut size) = (0.0, 0.0);
        for row in x.chunks(COLUMNS) {
            let rounded = coded(scaled(row, &|x, s| x / s));
            for (w, whole) in w.iter().zip(weights().chunks(COLUMNS)) {
                let exact: f64 = row.iter().zip(whole).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                let found: f64 = rounded.iter().zip(w).map(|(x, w)| x * w).sum();
                (off, size) = (off + (found - exact).powi(2), size + exact.powi(2));
            }
        }
        (off / size).sqrt()
    };
    let plain = error(&[1.0; COLUMNS]);
    let smoothed = error(&smooth::scales(&weights(), &largest, smooth::EXPONENT));
    assert!(smoothed < 0.5 * plain, "{smoothed} with scales, {plain} without");
}

/// A reader multiplies in the dtype of the scales, and a weight has that value already.
#[test]
fn values_are_those_that_a_reader_of_the_files_has() {
    let format = PackedFormat { bits: 4, group: Some(32), codes_inputs: false };
    let (values, codes, scales) = quantised(QuantiseMethod::Gptq, GroupedGrid { format, dtype: DType::BF16 });
    let is_bf16 = |x: f32| x.to_bits() & 0xffff == 0;
    assert!(values.iter().chain(&scales).all(|x| is_bf16(*x)));
    assert!(codes.iter().all(|code| (-8..8).contains(code)));
}

#[test]
fn a_factor_for_inputs_that_say_nothing_is_that_of_the_identity() {
    let r = inverse_factor("layer", &[0.0; 9], 3, 1).unwrap();
    assert_eq!(r, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]);
}

fn merging(method: MergeMethod, weights: &[f64]) -> MergeSettings {
    MergeSettings { method, weights: weights.to_vec(), density: 0.5, scale: 1.0, seed: 7 }
}

/// The tensors of `scripts/golden/make_compression.py`: a base and three models.
fn tensors() -> [Vec<f32>; 4] {
    let value =
        |model: usize, i: usize| ((i * 7919 + model * 2713 + i * model * 311 + i * i * 17) % 1013) as f32 / 506.5 - 1.0;
    let of = |model: usize| (0..40).map(move |i| value(0, i) + if model > 0 { 0.3 * value(model, i) } else { 0.0 });
    [0, 1, 2, 3].map(|model| of(model).collect())
}

fn merged(settings: &MergeSettings, models: usize) -> Vec<f32> {
    let [base, rest @ ..] = tensors();
    let tensors: Vec<&[f32]> = rest[..models].iter().map(Vec::as_slice).collect();
    let mut out = vec![f32::NAN; 40];
    let base = settings.method.needs_base().then_some(&base[..]);
    settings.check(models, base.is_some()).unwrap();
    merge_tensor(settings, &tensors, base, [1, 2], &mut out);
    out
}

#[test]
fn tensors_are_those_of_the_published_formulas() {
    let golden: Value = serde_json::from_str(include_str!("golden/layer.json")).unwrap();
    let ties = MergeSettings { density: 0.4, scale: 0.8, ..merging(MergeMethod::Ties, &[1.0, 1.0, 0.5]) };
    let task = MergeSettings { scale: 0.7, ..merging(MergeMethod::Task, &[1.0, 1.0, 0.5]) };
    for (name, settings, models) in [
        ("soup", merging(MergeMethod::Soup, &[1.0, 2.0, 1.0]), 3),
        ("slerp", merging(MergeMethod::Slerp, &[0.7, 0.3]), 2),
        ("task", task, 3),
        ("ties", ties, 3),
    ] {
        let expected = golden["merge"][name].as_array().unwrap();
        for (found, expected) in merged(&settings, models).iter().zip(expected) {
            let expected = expected.as_f64().unwrap();
            assert!((f64::from(*found) - expected).abs() < 2e-6, "{name}: {found} {expected}");
        }
    }
}

#[test]
fn dare_drops_a_share_and_keeps_the_mean() {
    let (base, model) = (vec![0.0; 10_000], vec![1.0; 10_000]);
    let dare = MergeSettings { density: 0.25, ..merging(MergeMethod::Dare, &[1.0]) };
    let run = |dare: &MergeSettings, key| {
        let mut out = vec![0.0; 10_000];
        merge_tensor(dare, &[&model], Some(&base), key, &mut out);
        out
    };
    let out = run(&dare, [0, 0]);
    assert!(out.iter().all(|x| *x == 0.0 || *x == 4.0));
    let kept = out.iter().filter(|x| **x != 0.0).count();
    assert!((2300..2700).contains(&kept), "{kept}");
    assert_eq!(out, run(&dare, [0, 0]));
    assert!(out != run(&dare, [0, 1]) && out != run(&MergeSettings { seed: 8, ..dare.clone() }, [0, 0]));
    // All changes kept: task arithmetic.
    let all = MergeSettings { density: 1.0, ..dare };
    assert_eq!(run(&all, [0, 0]), model);
}

#[test]
fn tensors_that_point_the_same_way_are_interpolated_in_a_straight_line() {
    let mut out = [0.0; 2];
    for (b, expected) in [([2.0f32, 4.0], [1.5, 3.0]), ([-1.0, -2.0], [0.0, 0.0]), ([0.0, 0.0], [0.5, 1.0])] {
        merge_tensor(&merging(MergeMethod::Slerp, &[1.0, 1.0]), &[&[1.0, 2.0], &b], None, [0, 0], &mut out);
        assert_eq!(out, expected);
    }
    // A quarter of the circle, half of the arc.
    merge_tensor(&merging(MergeMethod::Slerp, &[1.0, 1.0]), &[&[1.0, 0.0], &[0.0, 1.0]], None, [0, 0], &mut out);
    assert!(out.iter().all(|x| (x - 0.5f32.sqrt()).abs() < 1e-6), "{out:?}");
}
