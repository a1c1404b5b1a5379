//! One adapter of several on one base, layer by layer.
//!
//! The adapters add `s_i B_i A_i` to a weight. With weights `w_i`, the merged one adds
//!
//! | method | product | rank |
//! |---|---|---|
//! | cat | `Σ w_i s_i B_i A_i`, exactly: the matrices stand side by side | the sum of the ranks |
//! | linear | `(Σ √(w_i s_i) B_i) (Σ √(w_i s_i) A_i)` | that of each |
//! | svd | the best approximation of the sum of a given rank (Eckart & Young 1936) | as asked for |
//!
//! They are those of PEFT's `add_weighted_adapter` (Mangrulkar et al. 2022). The result has the
//! scale 1. A layer that an adapter does not have counts as zeros.

use crate::Result;
use crate::error::refuse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trainyard_engine::pretrained::{adapted, config_text};
use trainyard_model::weights::{export_adapter, read_adapter};
use trainyard_model::{AdapterSpec, Model, ModelError, ModelSpec, Tuning, hf};

/// The way in which adapters become one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AdapterMethod {
    /// Side by side.
    Cat,
    /// Sums of the matrices.
    Linear,
    /// The sum of the products, cut to a rank.
    Svd,
}

/// The numbers of a merge of adapters.
#[derive(Clone, PartialEq, Debug)]
pub struct AdapterMerge {
    /// The way.
    pub method: AdapterMethod,
    /// A weight for each adapter.
    pub weights: Vec<f64>,
    /// The rank of the result of `svd`; None: the largest of the adapters'.
    pub rank: Option<usize>,
}

/// The result of a merge of adapters.
#[derive(Clone, PartialEq, Debug)]
pub struct MergedAdapter {
    /// The files.
    pub files: Vec<PathBuf>,
    /// The rank.
    pub rank: usize,
    /// The norm of what `svd` left out, over all layers, as a share of the norm of the sums.
    pub left_out: f64,
}

/// A matrix, row by row.
#[derive(Clone)]
struct Matrix {
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn zeros(rows: usize, columns: usize) -> Matrix {
        Matrix { columns, values: vec![0.0; rows * columns] }
    }

    fn rows(&self) -> usize {
        self.values.len() / self.columns.max(1)
    }

    fn add(&mut self, factor: f64, other: &Matrix) {
        self.values.iter_mut().zip(&other.values).for_each(|(own, other)| *own += factor * other);
    }

    /// Column after column.
    fn by_columns(&self) -> Vec<Vec<f64>> {
        let column = |number| self.values.iter().skip(number).step_by(self.columns).copied().collect();
        (0..self.columns).map(column).collect()
    }

    fn by_rows(&self) -> Vec<Vec<f64>> {
        self.values.chunks(self.columns.max(1)).map(<[f64]>::to_vec).collect()
    }

    fn of_columns(columns: &[Vec<f64>]) -> Matrix {
        let rows = columns.first().map_or(0, Vec::len);
        let values = (0..rows).flat_map(|row| columns.iter().map(move |column| column[row])).collect();
        Matrix { columns: columns.len(), values }
    }

    fn of_rows(rows: &[Vec<f64>]) -> Matrix {
        Matrix { columns: rows.first().map_or(0, Vec::len), values: rows.concat() }
    }
}

/// The two matrices of a layer, `down` [rank, in] and `up` [out, rank].
#[derive(Clone)]
struct Pair {
    down: Matrix,
    up: Matrix,
}

/// An adapter that was read.
struct Adapter {
    spec: AdapterSpec,
    layers: BTreeMap<String, Pair>,
}

/// Merges the PEFT adapters in `folders` into one, which is written to `out`.
///
/// # Errors
/// Numbers out of range; folders without adapters; adapters of different models, or with
/// magnitudes (DoRA); errors of reading and writing.
pub fn merge_adapters(folders: &[PathBuf], settings: &AdapterMerge, out: &Path) -> Result<MergedAdapter> {
    settings.check(folders.len())?;
    let mut base: Option<(PathBuf, ModelSpec)> = None;
    let mut adapters = Vec::with_capacity(folders.len());
    for folder in folders {
        let shown = folder.display();
        let Some((own_base, spec)) = adapted(folder)? else {
            return refuse(format!(
                "{shown} is no PEFT adapter: cat, linear and svd merge folders with an adapter_config.json, as `trainyard export \
                 RUN --adapter` writes them"
            ));
        };
        if spec.magnitudes {
            return refuse(format!(
                "{shown} is an adapter of kind DoRA: its magnitudes do not add up; export it merged, and merge models"
            ));
        }
        let (path, model) = match base.take() {
            None => {
                let text = config_text(&own_base)?;
                (own_base, hf::from_config_json(&text).map_err(ModelError::from)?.spec)
            }
            Some((path, model)) if same_place(&path, &own_base) => (path, model),
            Some((path, _)) => {
                return refuse(format!(
                    "{shown} adapts {}, and {} adapts {}: adapters of one model can be merged",
                    own_base.display(),
                    folders[0].display(),
                    path.display()
                ));
            }
        };
        adapters.push(read(folder, &model, spec)?);
        base = Some((path, model));
    }
    let Some((base, model)) = base else { return refuse("a merge takes two adapters or more") };
    let rank = settings.rank_of(&adapters)?;
    let tuned = |targets| -> Result<Model> {
        let adapter = AdapterSpec { rank, alpha: rank as f64, rank_stabilised: false, magnitudes: false, targets };
        Ok(Model::new(model.clone())?.tuned(&Tuning { adapter: Some(adapter), ..Tuning::default() })?)
    };
    let mut targets: Vec<String> = adapters.iter().flat_map(|adapter| adapter.spec.targets.clone()).collect();
    targets.sort();
    targets.dedup();
    if adapters.iter().any(|adapter| adapter.spec.targets.is_empty()) {
        targets.clear();
    }
    let merged = tuned(targets)?;
    let (mut layers, mut squares) = (BTreeMap::new(), [0.0; 2]);
    for name in adapters.iter().flat_map(|adapter| adapter.layers.keys()).collect::<std::collections::BTreeSet<_>>() {
        let summands = adapters.iter().zip(&settings.weights);
        let summands = summands
            .filter_map(|(adapter, weight)| adapter.layers.get(name).map(|pair| (weight * adapter.spec.scale(), pair)));
        let (pair, [left, all]) = settings.merge_layer(&summands.collect::<Vec<_>>(), rank);
        squares = [squares[0] + left, squares[1] + all];
        layers.insert(name.clone(), pair);
    }
    let values = |id| -> Result<Vec<f32>> {
        let Some(parameter) = merged.find(id) else { return refuse(format!("the model has no parameter {id}")) };
        let mut all = Vec::with_capacity(parameter.elements());
        for source in &parameter.sources {
            let (layer, is_down) = layer_of(&source.hf_name);
            let Some(pair) = layers.get(layer) else { return refuse(format!("no adapter has the layer {layer}")) };
            let matrix = if is_down { &pair.down } else { &pair.up };
            all.extend(matrix.values.iter().map(|value| *value as f32));
        }
        Ok(all)
    };
    let files = export_adapter(out, &merged, &base.display().to_string(), values)?;
    let left_out = if squares[1] > 0.0 { (squares[0] / squares[1]).sqrt() } else { 0.0 };
    Ok(MergedAdapter { files, rank, left_out })
}

/// True if two paths name one folder or file.
fn same_place(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    place(one) == place(other)
}

/// The layer to which a tensor of an adapter belongs, and true if it is its first matrix.
fn layer_of(name: &str) -> (&str, bool) {
    match name.strip_suffix(".lora_A.weight") {
        Some(layer) => (layer, true),
        None => (name.strip_suffix(".lora_B.weight").unwrap_or(name), false),
    }
}

fn read(folder: &Path, model: &ModelSpec, spec: AdapterSpec) -> Result<Adapter> {
    let mut layers: BTreeMap<String, Pair> = BTreeMap::new();
    for (name, (columns, values)) in read_adapter(folder, model, &spec)? {
        let matrix = Matrix { columns, values: values.iter().map(|value| f64::from(*value)).collect() };
        let (layer, is_down) = layer_of(&name);
        let empty = || Pair { down: Matrix::zeros(0, 0), up: Matrix::zeros(0, 0) };
        let pair = layers.entry(layer.to_owned()).or_insert_with(empty);
        *if is_down { &mut pair.down } else { &mut pair.up } = matrix;
    }
    Ok(Adapter { spec, layers })
}

impl AdapterMerge {
    fn check(&self, adapters: usize) -> Result<()> {
        if adapters < 2 {
            return refuse("a merge takes two adapters or more");
        }
        if self.weights.len() != adapters {
            return refuse(format!("{} weights for {adapters} adapters: give one for each", self.weights.len()));
        }
        if self.weights.iter().any(|weight| !weight.is_finite()) {
            return refuse("a weight is not finite");
        }
        if self.method == AdapterMethod::Linear && self.weights.iter().any(|weight| *weight < 0.0) {
            return refuse("linear takes the roots of weights: give numbers of 0 or more, or take cat or svd");
        }
        if self.method != AdapterMethod::Svd && self.rank.is_some() {
            return refuse("a rank is for svd: the others have the rank that their adapters give them");
        }
        Ok(())
    }

    /// The rank of the result.
    fn rank_of(&self, adapters: &[Adapter]) -> Result<usize> {
        let ranks = || adapters.iter().map(|adapter| adapter.spec.rank);
        let (sum, largest) = (ranks().sum::<usize>(), ranks().max().unwrap_or(0));
        match self.method {
            AdapterMethod::Cat => Ok(sum),
            AdapterMethod::Linear if ranks().any(|rank| rank != largest) => {
                let ranks: Vec<String> = ranks().map(|rank| rank.to_string()).collect();
                refuse(format!(
                    "linear adds matrices of one rank, and these have {}: take cat or svd",
                    ranks.join(", ")
                ))
            }
            AdapterMethod::Linear => Ok(largest),
            AdapterMethod::Svd => match self.rank.unwrap_or(largest) {
                rank if (1..=sum).contains(&rank) => Ok(rank),
                rank => refuse(format!("a rank of {rank}: the sum of these adapters has rank {sum}; take 1 to {sum}")),
            },
        }
    }

    /// The matrices of a layer from those of its adapters, each with the factor of its product; and
    /// the squared norms of what is left out and of the sum, where they are known.
    fn merge_layer(&self, summands: &[(f64, &Pair)], rank: usize) -> (Pair, [f64; 2]) {
        let (columns, rows) = summands.first().map_or((0, 0), |(_, pair)| (pair.down.columns, pair.up.rows()));
        let side_by_side = || {
            let (mut down, mut up) = (Vec::new(), Vec::new());
            for (factor, pair) in summands {
                down.extend(pair.down.by_rows());
                let scaled = |column: Vec<f64>| column.into_iter().map(|value| factor * value).collect();
                up.extend(pair.up.by_columns().into_iter().map(scaled));
            }
            (down, up)
        };
        match self.method {
            AdapterMethod::Cat => {
                let (mut down, mut up): (Vec<Vec<f64>>, Vec<Vec<f64>>) = side_by_side();
                down.resize(rank, vec![0.0; columns]);
                up.resize(rank, vec![0.0; rows]);
                (Pair { down: Matrix::of_rows(&down), up: Matrix::of_columns(&up) }, [0.0; 2])
            }
            AdapterMethod::Linear => {
                let mut sum = Pair { down: Matrix::zeros(rank, columns), up: Matrix::zeros(rows, rank) };
                for (factor, pair) in summands {
                    sum.down.add(factor.sqrt(), &pair.down);
                    sum.up.add(factor.sqrt(), &pair.up);
                }
                (sum, [0.0; 2])
            }
            AdapterMethod::Svd => {
                let (down, up) = side_by_side();
                cut(down, up, rank)
            }
        }
    }
}

/// The best approximation of rank `rank` of the product of `up`, by columns, and `down`, by rows;
/// and the squared norms of what it leaves out and of the product.
///
/// With `downᵀ = P D Vᵀ` and `up V D = U S Wᵀ`, where P, U, V and W have orthonormal columns, the
/// product is `U S (P W)ᵀ`: its singular value decomposition.
fn cut(mut down: Vec<Vec<f64>>, up: Vec<Vec<f64>>, rank: usize) -> (Pair, [f64; 2]) {
    let right = orthogonalise(&mut down);
    let lengths: Vec<f64> = down.iter().map(|column| norm(column)).collect();
    let mut left = combined(&up, &right);
    left.iter_mut().zip(&lengths).for_each(|(column, length)| scale(column, *length));
    let turned = orthogonalise(&mut left);
    // Columns of length zero have no direction, and their part of the product is zero.
    down.iter_mut().zip(&lengths).filter(|(_, length)| **length > 0.0).for_each(|(p, length)| scale(p, 1.0 / length));
    let across = combined(&down, &turned);
    let mut order: Vec<(usize, f64)> = left.iter().map(|column| norm(column)).enumerate().collect();
    order.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let square = |part: &[(usize, f64)]| part.iter().map(|(_, value)| value * value).sum::<f64>();
    let squares = [square(&order[rank.min(order.len())..]), square(&order)];
    let kept = |of: &[Vec<f64>]| -> Vec<Vec<f64>> {
        let mut kept: Vec<Vec<f64>> = order.iter().take(rank).map(|(number, _)| of[*number].clone()).collect();
        kept.resize(rank, vec![0.0; of.first().map_or(0, Vec::len)]);
        kept
    };
    (Pair { down: Matrix::of_rows(&kept(&across)), up: Matrix::of_columns(&kept(&left)) }, squares)
}

fn norm(column: &[f64]) -> f64 {
    column.iter().map(|value| value * value).sum::<f64>().sqrt()
}

fn scale(column: &mut [f64], factor: f64) {
    column.iter_mut().for_each(|value| *value *= factor);
}

/// The columns `Σ_k of[k] factors[j][k]` for each j.
fn combined(of: &[Vec<f64>], factors: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let rows = of.first().map_or(0, Vec::len);
    let column = |factors: &Vec<f64>| {
        let mut sum = vec![0.0; rows];
        for (column, factor) in of.iter().zip(factors) {
            sum.iter_mut().zip(column).for_each(|(sum, value)| *sum += factor * value);
        }
        sum
    };
    factors.iter().map(column).collect()
}

/// Passes over all pairs of columns; they converge quadratically, in about ten.
const SWEEPS_MAX: usize = 60;

/// Turns columns until they are orthogonal to each other (Hestenes 1958, one-sided Jacobi). Returns
/// the columns of the rotation V: after is before times V.
fn orthogonalise(columns: &mut [Vec<f64>]) -> Vec<Vec<f64>> {
    let count = columns.len();
    let unit = |at: usize| (0..count).map(|place| f64::from(u8::from(place == at))).collect();
    let mut rotation: Vec<Vec<f64>> = (0..count).map(unit).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for _ in 0..SWEEPS_MAX {
        let mut is_done = true;
        for first in 0..count {
            for second in first + 1..count {
                let [alpha, beta] = [first, second].map(|at| dot(&columns[at], &columns[at]));
                let gamma = dot(&columns[first], &columns[second]);
                if gamma.abs() <= f64::EPSILON * (alpha * beta).sqrt() {
                    continue;
                }
                is_done = false;
                let zeta = (beta - alpha) / (2.0 * gamma);
                let tangent = zeta.signum() / (zeta.abs() + (1.0 + zeta * zeta).sqrt());
                let cosine = 1.0 / (1.0 + tangent * tangent).sqrt();
                let sine = cosine * tangent;
                for matrix in [&mut *columns, &mut rotation] {
                    let (before, after) = matrix.split_at_mut(second);
                    for (a, b) in before[first].iter_mut().zip(&mut after[0]) {
                        (*a, *b) = (cosine * *a - sine * *b, sine * *a + cosine * *b);
                    }
                }
            }
        }
        if is_done {
            break;
        }
    }
    rotation
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(place: usize) -> f64 {
        ((place * 7919 + 13) % 101) as f64 / 50.0 - 1.0
    }

    fn matrix(rows: usize, columns: usize, seed: usize) -> Matrix {
        Matrix { columns, values: (0..rows * columns).map(|place| number(place * 31 + seed)).collect() }
    }

    fn product(pair: &Pair) -> Vec<f64> {
        let (up, down) = (pair.up.by_rows(), pair.down.by_columns());
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        up.iter().flat_map(|row| down.iter().map(move |column| dot(row, column))).collect()
    }

    fn distance(one: &[f64], other: &[f64]) -> f64 {
        one.iter().zip(other).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
    }

    fn merge(method: AdapterMethod, summands: &[(f64, &Pair)], rank: usize) -> (Pair, [f64; 2]) {
        AdapterMerge { method, weights: Vec::new(), rank: None }.merge_layer(summands, rank)
    }

    #[test]
    fn a_sum_side_by_side_is_exact_and_a_cut_is_the_best_of_its_rank() {
        let pair = |rank, seed| Pair { down: matrix(rank, 9, seed), up: matrix(11, rank, seed + 5) };
        let (one, other) = (pair(3, 1), pair(2, 17));
        let summands = [(0.7, &one), (-1.5, &other)];
        let [a, b] = [&one, &other].map(product);
        let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| 0.7 * a - 1.5 * b).collect();
        let length = norm(&want);
        assert!(distance(&product(&merge(AdapterMethod::Cat, &summands, 5).0), &want) < 1e-12 * length);
        let (whole, squares) = merge(AdapterMethod::Svd, &summands, 5);
        assert!(distance(&product(&whole), &want) < 1e-12 * length && squares[0] < 1e-20 * squares[1]);
        assert!((squares[1].sqrt() / length - 1.0).abs() < 1e-12);
        let mut before = 0.0;
        for rank in (1..5).rev() {
            let (cut, squares) = merge(AdapterMethod::Svd, &summands, rank);
            let rest: Vec<f64> = want.iter().zip(product(&cut)).map(|(want, got)| want - got).collect();
            assert!((norm(&rest).powi(2) / squares[0] - 1.0).abs() < 1e-9, "rank {rank}");
            // What is left out is orthogonal to what is kept, on both sides.
            let rest = Matrix { columns: 9, values: rest };
            for (across, kept) in [(rest.by_columns(), cut.up.by_columns()), (rest.by_rows(), cut.down.by_rows())] {
                for (a, b) in across.iter().flat_map(|a| kept.iter().map(move |b| (a, b))) {
                    let dot: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                    assert!(dot.abs() < 1e-10 * length * length, "rank {rank}: {dot}");
                }
            }
            assert!(squares[0] > before, "a smaller rank leaves out more");
            before = squares[0];
        }
    }

    #[test]
    fn adapters_that_add_nothing_merge_to_one_that_adds_nothing() {
        let fresh = Pair { down: matrix(2, 4, 3), up: Matrix::zeros(5, 2) };
        for method in [AdapterMethod::Cat, AdapterMethod::Linear, AdapterMethod::Svd] {
            let rank = if method == AdapterMethod::Cat { 4 } else { 2 };
            let (pair, _) = merge(method, &[(1.0, &fresh), (2.0, &fresh)], rank);
            assert!(product(&pair).iter().all(|value| *value == 0.0), "{method:?}");
            assert_eq!((pair.down.rows(), pair.up.columns), (rank, rank), "{method:?}");
        }
    }
}
