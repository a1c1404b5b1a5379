//! Sums of gradients, and of the changes of outer steps, as low-rank factors (PowerSGD, Vogels et
//! al. 2019), and their state.
//!
//! Each rank has the whole local gradient of a unit. For every matrix M of it, all ranks sum
//! `P = M Q`, make its columns orthonormal, and sum `Q = Mᵀ P`. The sum of the matrices is then
//! `P Qᵀ`, of which each rank computes only the elements that it owns. Q is where the next sum
//! begins. What a rank leaves out is `M - P Qᵀ` with its own Q (algorithm 2 of the paper).
//!
//! Vectors, and matrices whose factors would be no smaller, travel as they are beside P.
//!
//! In outer steps the ranks of a shard group hold parts of the changes. Each takes the elements of
//! the others as zeros, and the products are summed over the shard group first. So the factors are
//! those of whole matrices, and a rank keeps what is left out of its own elements.
//!
//! If a gradient is not finite anywhere, the sum is NaN on every rank, and the state stays as it
//! was.

use crate::Result;
use crate::encoded::{Residual, ResidualOf};
use crate::exchange::Link;
use crate::state::{does_not_fit, overlap};
use std::ops::Range;
use std::sync::Mutex;
use trainyard_base::lock;
use trainyard_comm::codec::low_rank::{self, COLUMNS};
use trainyard_model::{Model, UnitLayout};
use trainyard_program::PowerSgd;
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// Elements of M that a thread multiplies at a time, in whole rows.
const GRAIN: usize = 1 << 15;

/// The matrices of a unit's trained parameters: their elements in its flat buffer, and columns. A
/// vector is one row, and each expert is a matrix.
pub(crate) fn matrices(model: &Model, unit: usize, layout: &UnitLayout) -> Vec<(Range<usize>, usize)> {
    let parameters = model.units()[unit].parameters();
    let experts = model.spec().and_then(|spec| {
        let layer = unit.checked_sub(1).filter(|layer| *layer < spec.layers)?;
        spec.experts_of(layer).map(|experts| experts.experts)
    });
    let mut all = Vec::new();
    for (index, range) in layout.trained() {
        let spec = &parameters[index];
        let columns = if spec.shape.len() > 1 { spec.row_elements() } else { spec.elements() };
        let stacked = if spec.name.starts_with("mlp.experts.") { experts.unwrap_or(1) } else { 1 };
        let each = spec.elements() / stacked;
        for start in (0..stacked).map(|expert| range.start + expert * each) {
            all.push((start..start + each, columns));
        }
    }
    all
}

/// A matrix that is sent as factors.
struct Factored {
    /// Its elements in the unit's flat buffer.
    at: Range<usize>,
    columns: usize,
    /// The elements of its factors, among those of all matrices of the unit.
    p: Range<usize>,
    q: Range<usize>,
}

#[derive(Default)]
struct Unit {
    factored: Vec<Factored>,
    /// The elements that are sent as they are, with their places in the first message.
    plain: Vec<(Range<usize>, usize)>,
    /// Elements of P and of what is sent as it is; elements of Q.
    lengths: [usize; 2],
    /// Q of the last sum, the same on all ranks. None: no matrix has factors.
    q: Option<Tensor>,
    /// Elements of its flat buffer.
    elements: usize,
    /// Those of them that this rank contributes to sums.
    held: Range<usize>,
    /// The part of `held` that sums left out. None without error feedback.
    residual: Option<Tensor>,
}

/// Buffers and state of sums as low-rank factors, for every unit of a rank.
pub(crate) struct LowRankSums {
    rank: usize,
    seed: u64,
    units: Vec<Unit>,
    /// The messages, for the largest unit.
    first: Option<Tensor>,
    second: Option<Tensor>,
    /// The largest unit's flat buffer, if this rank holds parts of units.
    whole: Option<Tensor>,
}

impl LowRankSums {
    /// Allocates state and buffers for the units of `model`, whose flat buffers have these layouts.
    /// This rank contributes the elements `held` of a unit.
    pub(crate) fn new(
        device: &Device,
        model: &Model,
        layouts: &[UnitLayout],
        codec: PowerSgd,
        feedback: bool,
        seed: u64,
        held: impl Fn(usize) -> Range<usize>,
    ) -> Result<LowRankSums> {
        if device.as_cuda().is_some() {
            return Err(does_not_fit("messages are encoded on processors only, and this rank computes on a GPU"));
        }
        let rank = codec.rank as usize;
        let zeros = |elements: usize| match elements {
            0 => Ok(None),
            _ => device.zeros([elements], DType::F32, Purpose::Comm).map(Some),
        };
        let unit = |(number, layout): (usize, &UnitLayout)| -> Result<Unit> {
            let mut unit = Unit::default();
            let mut plain = Vec::new();
            let [mut p, mut q] = [0, 0];
            for (at, columns) in matrices(model, number, layout) {
                let rows = at.len() / columns.max(1);
                if codec.factors([rows as u64, columns as u64]) {
                    let (of_p, of_q) = (p..p + rank * rows, q..q + rank * columns);
                    (p, q) = (of_p.end, of_q.end);
                    unit.factored.push(Factored { at, columns, p: of_p, q: of_q });
                } else {
                    plain.push(at);
                }
            }
            for at in plain {
                let end = p + at.len();
                unit.plain.push((at, p));
                p = end;
            }
            let (elements, held) = (layout.trained_elements(), held(number));
            let residual = zeros(if feedback { held.len() } else { 0 })?;
            Ok(Unit { lengths: [p, q], q: zeros(q)?, elements, held, residual, ..unit })
        };
        let units = layouts.iter().enumerate().map(unit).collect::<Result<Vec<_>>>()?;
        let largest = |of: usize| units.iter().map(|unit| unit.lengths[of]).max().unwrap_or(0);
        let (first, second) = (zeros(largest(0))?, zeros(largest(1))?);
        let in_parts = units.iter().filter(|unit| unit.held.len() < unit.elements);
        let whole = zeros(in_parts.map(|unit| unit.elements).max().unwrap_or(0))?;
        Ok(LowRankSums { rank, seed, units, first, second, whole })
    }

    /// Sums `part`, the elements of a unit that this rank holds, over the ranks of `across`. The
    /// ranks of `within` hold the other elements, unless this rank holds all.
    pub(crate) fn sum_in_parts(
        &mut self,
        number: usize,
        part: &mut Tensor,
        within: &Link,
        across: &Link,
    ) -> Result<()> {
        let Unit { elements, held, .. } = &self.units[number];
        let (elements, held) = (*elements, held.clone());
        if held.len() == elements {
            return self.sum(number, part, 0..elements, &Link::default(), across);
        }
        let whole = self.whole.as_ref().expect("allocated for the largest unit");
        let mut whole = whole.view(0, [elements])?;
        whole.fill_zero()?;
        let mut own = whole.view(held.start, [held.len()])?;
        own.copy_from(part)?;
        self.sum(number, &mut whole, held, within, across)?;
        Ok(part.copy_from(&own)?)
    }

    /// Sums `flat`, the trained region of a unit, over the ranks of `across`. Those of `within`
    /// contribute to the same matrices, each the elements that it holds; the others are zero. The
    /// elements `own` of the sum are written to their place in `flat`; the rest is arbitrary.
    pub(crate) fn sum(
        &mut self,
        number: usize,
        flat: &mut Tensor,
        own: Range<usize>,
        within: &Link,
        across: &Link,
    ) -> Result<()> {
        let device = flat.device().clone();
        let Some(cpu) = device.as_cpu() else { return Ok(()) };
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let (rank, unit) = (self.rank, &mut self.units[number]);
        let message = |buffer: &Option<Tensor>, elements: usize| -> Result<Option<Tensor>> {
            Ok(buffer.as_ref().filter(|_| elements > 0).map(|buffer| buffer.view(0, [elements])).transpose()?)
        };
        let Some(mut first) = message(&self.first, unit.lengths[0])? else { return Ok(()) };
        let second = message(&self.second, unit.lengths[1])?;

        if let Some(residual) = &unit.residual {
            let mut held = flat.view(unit.held.start, [unit.held.len()])?;
            trainyard_tensor::ops::accumulate(residual, &mut held, false)?;
        }
        let Unit { factored, plain, q, residual, held, .. } = unit;
        if let Some(q) = q.as_mut() {
            q.with_data_mut(|q: &mut [f32]| {
                for (matrix, of) in factored.iter().enumerate() {
                    low_rank::begin(&mut q[of.q.clone()], of.columns, key, [number as u32, matrix as u32]);
                }
            })?;
        }
        let start = q.as_ref();
        with(start, |q| {
            flat.with_data(|m: &[f32]| {
                first.overwrite(|p: &mut [f32]| {
                    for (at, place) in plain.iter() {
                        p[*place..*place + at.len()].copy_from_slice(&m[at.clone()]);
                    }
                    times_q(cpu, factored, rank, m, q, p);
                })
            })
        })???;
        within.sum(&mut first)?;
        across.sum(&mut first)?;
        let is_finite = first.with_data(|sums: &[f32]| sums.iter().all(|sum| sum.is_finite()))?;
        if !is_finite {
            return Ok(flat.view(own.start, [own.len()])?.overwrite(|sum: &mut [f32]| sum.fill(f32::NAN))?);
        }
        if let (Some(mut second), Some(q)) = (second, q.as_mut()) {
            first.with_data_mut(|p: &mut [f32]| orthogonalise(cpu, factored, rank, p))?;
            first.with_data(|p: &[f32]| {
                flat.with_data(|m: &[f32]| second.overwrite(|q: &mut [f32]| times_p(cpu, factored, rank, m, p, q)))
            })???;
            within.sum(&mut second)?;
            if let Some(residual) = residual {
                residual.copy_from(&flat.view(held.start, [held.len()])?)?;
                first.with_data(|p: &[f32]| {
                    second.with_data(|q: &[f32]| {
                        residual.with_data_mut(|left: &mut [f32]| {
                            for at in plain.iter().map(|(at, _)| overlap(at, held)).filter(|at| !at.is_empty()) {
                                left[at.start - held.start..at.end - held.start].fill(0.0);
                            }
                            products(cpu, factored, p, q, left, held, |left, sent| *left -= sent);
                        })
                    })
                })???;
            }
            across.sum(&mut second)?;
            q.copy_from(&second)?;
        }
        let mut sum = flat.view(own.start, [own.len()])?;
        with(q.as_ref(), |q| {
            first.with_data(|p: &[f32]| {
                sum.overwrite(|sum: &mut [f32]| {
                    sum.fill(0.0);
                    for (at, place) in plain.iter() {
                        let range = at.start.max(own.start)..at.end.min(own.end);
                        if range.start < range.end {
                            let from = place + range.start - at.start;
                            sum[range.start - own.start..range.end - own.start]
                                .copy_from_slice(&p[from..from + range.len()]);
                        }
                    }
                    products(cpu, factored, p, q, sum, &own, |sum, sent| *sum = sent);
                })
            })
        })???;
        Ok(())
    }

    /// The residuals, each of the kind `of`.
    pub(crate) fn residuals(&self, of: ResidualOf) -> impl Iterator<Item = Residual> {
        let residual = move |(number, unit): (usize, &Unit)| {
            let (within, values) = (unit.held.clone(), unit.residual.clone()?);
            Some(Residual { of, unit: number, within, values })
        };
        self.units.iter().enumerate().filter_map(residual)
    }

    /// The factors Q with which the next sums begin, by unit. All ranks of a sum have the same.
    pub(crate) fn starts(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.units.iter().enumerate().filter_map(|(number, unit)| Some((number, unit.q.as_ref()?)))
    }
}

/// Lets `f` read a tensor, or nothing.
fn with<R>(tensor: Option<&Tensor>, f: impl FnOnce(&[f32]) -> R) -> trainyard_tensor::Result<R> {
    match tensor {
        Some(tensor) => tensor.with_data(f),
        None => Ok(f(&[])),
    }
}

/// Rows of a matrix that a thread takes.
fn rows_of(columns: usize) -> usize {
    (GRAIN / columns).max(1)
}

/// `P = M Q` of all matrices.
fn times_q(cpu: &Cpu, factored: &[Factored], rank: usize, m: &[f32], q: &[f32], p: &mut [f32]) {
    let mut tasks = Vec::new();
    let mut rest = p;
    for of in factored {
        let (p, next) = rest.split_at_mut(of.p.len());
        let rows = rows_of(of.columns);
        let m = m[of.at.clone()].chunks(rows * of.columns);
        tasks.extend(m.zip(p.chunks_mut(rows * rank)).map(|(m, p)| Mutex::new((of, m, p))));
        rest = next;
    }
    cpu.threads.for_each(tasks.len(), |task| {
        let (of, m, p) = &mut *lock(&tasks[task]);
        low_rank::times_q(m, of.columns, &q[of.q.clone()], p);
    });
}

fn orthogonalise(cpu: &Cpu, factored: &[Factored], rank: usize, p: &mut [f32]) {
    let mut tasks = Vec::new();
    let mut rest = p;
    for of in factored {
        let (p, next) = rest.split_at_mut(of.p.len());
        tasks.push(Mutex::new(p));
        rest = next;
    }
    cpu.threads.for_each(tasks.len(), |task| low_rank::orthogonalise(&mut lock(&tasks[task]), rank));
}

/// `Q = Mᵀ P` of all matrices.
fn times_p(cpu: &Cpu, factored: &[Factored], rank: usize, m: &[f32], p: &[f32], q: &mut [f32]) {
    let mut tasks = Vec::new();
    let mut rest = q;
    for of in factored {
        let (q, next) = rest.split_at_mut(of.q.len());
        tasks.extend(q.chunks_mut(COLUMNS * rank).enumerate().map(|(block, q)| Mutex::new((of, block, q))));
        rest = next;
    }
    cpu.threads.for_each(tasks.len(), |task| {
        let (of, block, q) = &mut *lock(&tasks[task]);
        low_rank::times_p(&m[of.at.clone()], of.columns, &p[of.p.clone()], *block, q);
    });
}

/// Calls `put` with each element of `values`, the elements `range` of the flat buffer, and the
/// element of `P Qᵀ` there, where the range has matrices.
fn products(
    cpu: &Cpu,
    factored: &[Factored],
    p: &[f32],
    q: &[f32],
    values: &mut [f32],
    range: &Range<usize>,
    put: impl Fn(&mut f32, f32) + Sync,
) {
    let mut tasks = Vec::new();
    let (mut rest, mut at) = (values, range.start);
    for of in factored {
        let part = of.at.start.max(range.start)..of.at.end.min(range.end);
        if part.start >= part.end {
            continue;
        }
        let (_, next) = rest.split_at_mut(part.start - at);
        let (values, next) = next.split_at_mut(part.len());
        let chunks = values.chunks_mut(GRAIN).enumerate();
        tasks.extend(chunks.map(|(n, values)| Mutex::new((of, part.start - of.at.start + n * GRAIN, values))));
        (rest, at) = (next, part.end);
    }
    cpu.threads.for_each(tasks.len(), |task| {
        let (of, first, values) = &mut *lock(&tasks[task]);
        let mut sent = [0.0; COLUMNS];
        for (n, values) in values.chunks_mut(COLUMNS).enumerate() {
            let sent = &mut sent[..values.len()];
            low_rank::product(&p[of.p.clone()], &q[of.q.clone()], of.columns, *first + n * COLUMNS, sent);
            values.iter_mut().zip(sent).for_each(|(value, sent)| put(value, *sent));
        }
    });
}
