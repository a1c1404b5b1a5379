//! Merges of PEFT adapters: files in, files out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trainyard_autograd::ParamId;
use trainyard_compress::{AdapterMerge, AdapterMethod, CompressError, merge_adapters};
use trainyard_model::weights::{ExportOptions, export, export_adapter, read_adapter, read_adapter_config};
use trainyard_model::{AdapterSpec, Model, ModelSpec, Tuning, preset};
use trainyard_tensor::DType;

fn spec() -> ModelSpec {
    let shape = ModelSpec { layers: 2, dim: 32, heads: 4, kv_heads: 2, head_dim: 8, ..preset("llama-1b").unwrap() };
    let shape = ModelSpec { bos_token: None, eos_tokens: Vec::new(), pad_token: None, ..shape };
    ModelSpec { ffn_dim: 48, vocab_size: 64, max_positions: 32, ..shape }
}

fn value(seed: usize, place: usize) -> f32 {
    (((place + 1) * 7919 + seed * 104_729) % 1009) as f32 / 504.0 - 1.0
}

/// Writes a base into `folder`.
fn base(folder: &Path) -> PathBuf {
    let path = folder.join("base");
    let options = ExportOptions { dtype: DType::F32, ..ExportOptions::default() };
    let values = |unit: usize, out: &mut [f32]| -> Result<(), CompressError> {
        out.iter_mut().enumerate().for_each(|(place, out)| *out = value(unit, place));
        Ok(())
    };
    export(&path, &Model::new(spec()).unwrap(), options, values).unwrap();
    path
}

fn tuned(adapter: AdapterSpec) -> Model {
    Model::new(spec()).unwrap().tuned(&Tuning { adapter: Some(adapter), ..Tuning::default() }).unwrap()
}

/// Writes an adapter of `base`, whose values `seed` draws.
fn adapter(base: &Path, name: &str, rank: usize, targets: &[&str], seed: usize) -> PathBuf {
    let targets = targets.iter().map(|target| (*target).to_owned()).collect();
    let spec = AdapterSpec { rank, alpha: 6.0, rank_stabilised: false, magnitudes: false, targets };
    write(base, name, spec, seed)
}

fn write(base: &Path, name: &str, spec: AdapterSpec, seed: usize) -> PathBuf {
    let (model, path) = (tuned(spec), base.with_file_name(name));
    let values = |id: ParamId| -> Result<Vec<f32>, CompressError> {
        let elements = model.find(id).map_or(0, |spec| spec.elements());
        Ok((0..elements).map(|place| value(seed + id.index as usize + 10 * id.unit as usize, place)).collect())
    };
    export_adapter(&path, &model, &base.display().to_string(), values).unwrap();
    path
}

/// The change of each weight by the adapter in `folder`.
fn changes(folder: &Path) -> BTreeMap<String, Vec<f64>> {
    let spec = read_adapter_config(folder).unwrap();
    let (scale, tensors) = (spec.scale(), read_adapter(folder, &self::spec(), &spec).unwrap());
    let layers = tensors.iter().filter_map(|(name, down)| Some((name.strip_suffix(".lora_A.weight")?, down)));
    let change = |(layer, (columns, down)): (&str, &(usize, Vec<f32>))| {
        let (rank, up) = &tensors[&format!("{layer}.lora_B.weight")];
        let entry = |row: &[f32], column: usize| -> f64 {
            let terms = row.iter().enumerate().map(|(k, b)| f64::from(*b) * f64::from(down[k * columns + column]));
            scale * terms.sum::<f64>()
        };
        let all = up.chunks(*rank).flat_map(|row| (0..*columns).map(move |column| entry(row, column))).collect();
        (layer.to_owned(), all)
    };
    layers.map(change).collect()
}

fn merge(folders: &[PathBuf], method: AdapterMethod, weights: &[f64], rank: Option<usize>, out: &Path) -> f64 {
    let settings = AdapterMerge { method, weights: weights.to_vec(), rank };
    merge_adapters(folders, &settings, out).unwrap().left_out
}

/// The largest distance of two adapters' changes, as a share of the largest change.
fn distance(got: &BTreeMap<String, Vec<f64>>, want: &BTreeMap<String, Vec<f64>>) -> f64 {
    assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
    let largest = want.values().flatten().fold(0.0f64, |most, value| most.max(value.abs()));
    let pairs = got.iter().flat_map(|(layer, got)| got.iter().zip(&want[layer]));
    pairs.fold(0.0f64, |most, (got, want)| most.max((got - want).abs())) / largest
}

#[test]
fn merged_adapters_add_the_weighted_sum_of_the_changes() {
    let folder = tempfile::tempdir().unwrap();
    let base = base(folder.path());
    let all = [
        adapter(&base, "one", 3, &["q_proj", "v_proj", "down_proj"], 1),
        adapter(&base, "two", 2, &["q_proj", "o_proj"], 5),
    ];
    let [one, two] = [&all[0], &all[1]].map(|folder| changes(folder));
    let mut want: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (weight, changes) in [(0.75, &one), (-0.5, &two)] {
        for (layer, change) in changes {
            let sum = want.entry(layer.clone()).or_insert_with(|| vec![0.0; change.len()]);
            sum.iter_mut().zip(change).for_each(|(sum, change)| *sum += weight * change);
        }
    }
    // The files are in f32.
    let out = folder.path().join("cat");
    merge(&all, AdapterMethod::Cat, &[0.75, -0.5], None, &out);
    let found = read_adapter_config(&out).unwrap();
    assert_eq!(
        (found.rank, found.scale(), found.targets),
        (5, 1.0, ["down_proj", "o_proj", "q_proj", "v_proj"].map(str::to_owned).into())
    );
    assert!(distance(&changes(&out), &want) < 1e-6);
    let out = folder.path().join("whole");
    assert!(merge(&all, AdapterMethod::Svd, &[0.75, -0.5], Some(5), &out) < 1e-7);
    assert!(distance(&changes(&out), &want) < 1e-6);
    // A cut leaves out what it says.
    let out = folder.path().join("cut");
    let left_out = merge(&all, AdapterMethod::Svd, &[0.75, -0.5], None, &out);
    let got = changes(&out);
    let rest = got.iter().flat_map(|(layer, got)| got.iter().zip(&want[layer])).map(|(a, b)| (a - b).powi(2));
    let whole: f64 = want.values().flatten().map(|value| value * value).sum();
    assert_eq!(read_adapter_config(&out).unwrap().rank, 3);
    assert!(left_out > 0.01 && ((rest.sum::<f64>() / whole).sqrt() / left_out - 1.0).abs() < 1e-4, "{left_out}");
}

/// The sums of matrices are the sum of products where they are the same.
#[test]
fn linear_of_an_adapter_with_itself_is_that_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let base = base(folder.path());
    let one = adapter(&base, "one", 4, &[], 3);
    let out = folder.path().join("linear");
    merge(&[one.clone(), one.clone()], AdapterMethod::Linear, &[0.25, 0.25], None, &out);
    assert!(distance(&changes(&out), &changes(&one)) < 1e-6);
}

#[test]
fn adapters_that_do_not_go_together_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let base = base(folder.path());
    let [one, two] =
        [("one", 3, 1), ("two", 2, 5)].map(|(name, rank, seed)| adapter(&base, name, rank, &["q_proj"], seed));
    let magnitudes = AdapterSpec { magnitudes: true, ..read_adapter_config(&one).unwrap() };
    let dora = write(&base, "dora", magnitudes, 2);
    std::fs::create_dir(folder.path().join("other")).unwrap();
    let other_base = self::base(&folder.path().join("other"));
    let other = adapter(&other_base, "of-other", 3, &["q_proj"], 1);
    let refused = |folders: &[&PathBuf], method, weights: &[f64], rank| {
        let folders: Vec<PathBuf> = folders.iter().map(|path| (*path).clone()).collect();
        let settings = AdapterMerge { method, weights: weights.to_vec(), rank };
        let out = folder.path().join("out");
        let error = merge_adapters(&folders, &settings, &out).unwrap_err().to_string();
        assert!(!out.exists(), "{error}");
        error
    };
    use AdapterMethod::{Cat, Linear, Svd};
    for (folders, method, weights, rank, words) in [
        (&[&one][..], Cat, &[1.0][..], None, "two adapters or more"),
        (&[&one, &two], Cat, &[1.0], None, "1 weights for 2 adapters"),
        (&[&one, &two], Cat, &[1.0, f64::NAN], None, "not finite"),
        (&[&one, &two], Linear, &[1.0, -1.0], None, "roots of weights"),
        (&[&one, &two], Linear, &[1.0, 1.0], None, "these have 3, 2"),
        (&[&one, &two], Cat, &[1.0, 1.0], Some(4), "a rank is for svd"),
        (&[&one, &two], Svd, &[1.0, 1.0], Some(6), "take 1 to 5"),
        (&[&one, &two], Svd, &[1.0, 1.0], Some(0), "take 1 to 5"),
        (&[&one, &dora], Cat, &[1.0, 1.0], None, "DoRA"),
        (&[&one, &other], Cat, &[1.0, 1.0], None, "adapters of one model"),
        (&[&one, &base], Cat, &[1.0, 1.0], None, "is no PEFT adapter"),
    ] {
        let error = refused(folders, method, weights, rank);
        assert!(error.contains(words), "{error}");
    }
}
