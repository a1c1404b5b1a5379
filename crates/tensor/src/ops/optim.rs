//! Optimizer steps on flat tensors: masters, gradients and states in f32, and the compute copy that
//! the next forward reads.
//!
//! The tensors of one call have the same number of elements: a unit's whole flat buffer, a run of
//! parameters in it, or one parameter.

use crate::cpu::optim as kernels;
use crate::cpu::reduce;
use crate::error::{Result, TensorError};
use crate::{Computes, Cost, DType, Device, Element, On, Tensor, bf16, cuda, ensure_shape, f16};

pub use crate::cpu::moments8::{self, Moment};
pub use crate::cpu::muon::{Muon, MuonScale};
pub use kernels::{Adafactor, AdamW, Decay, Lion, Sgd, StepSize};

/// A parameter range in its two forms, and its gradient.
pub struct OptimizerOperands<'a> {
    /// f32, updated.
    pub master: &'a mut Tensor,
    /// f32, read.
    pub gradient: &'a Tensor,
    /// Multiplies the gradient as it is read.
    pub gradient_scale: f32,
    /// Written with the new values in its dtype; None when forward reads the master.
    pub copy: Option<&'a mut Tensor>,
}

impl OptimizerOperands<'_> {
    fn check(&self, op: &'static str, states: &[&Tensor]) -> Result<Cost> {
        let elements = self.master.elements();
        let mut bytes = self.gradient.bytes() + 2 * self.master.bytes();
        for tensor in [&*self.master, self.gradient].into_iter().chain(states.iter().copied()) {
            if tensor.dtype() != DType::F32 {
                return Err(TensorError::DType { op, expected: "f32", got: tensor.dtype() });
            }
        }
        ensure_shape!(self.gradient.elements() == elements, op, "{:?} for {:?}", self.gradient, self.master);
        for state in states {
            bytes += 2 * state.bytes();
        }
        if let Some(copy) = &self.copy {
            ensure_shape!(copy.elements() == elements, op, "copy {copy:?} of {:?}", self.master);
            bytes += copy.bytes();
        }
        Ok(Cost::new(12 * elements, bytes))
    }
}

/// Calls a kernel with the copy's Rust type, or the GPU's.
macro_rules! with_copy {
    (
        $op:expr, $operands:ident, $cost:expr, cuda: |$gpu:ident| $launch:expr,
        cpu: |$cpu:ident, $master:ident, $gradient:ident, $copy:ident| $call:expr
    ) => {{
        let device = $operands.gradient.device();
        let dtype = $operands.copy.as_ref().map_or(DType::F32, |copy| copy.dtype());
        let work = $cost.on(dtype, [$operands.gradient.elements()]);
        device.launch_on($op, work, |on| {
            let $cpu = match on {
                On::Cpu(cpu) => cpu,
                On::Cuda($gpu) => return $launch,
            };
            let OptimizerOperands { master, gradient, copy, .. } = $operands;
            let ($master, $gradient) = (master.get_mut::<f32>(), gradient.get::<f32>());
            match dtype {
                DType::BF16 => {
                    let $copy = copy.map(|c| c.get_mut::<bf16>());
                    $call
                }
                DType::F16 => {
                    let $copy = copy.map(|c| c.get_mut::<f16>());
                    $call
                }
                _ => {
                    let $copy = copy.map(|c| c.get_mut::<f32>());
                    $call
                }
            }
            Ok(())
        })
    }};
}

/// One AdamW step, the `step`-th from 1.
pub fn adamw(
    hyper: AdamW,
    step: u64,
    operands: OptimizerOperands<'_>,
    first: &mut Tensor,
    second: &mut Tensor,
) -> Result<()> {
    const OP: &str = "adamw";
    let cost = operands.check(OP, &[first, second])?;
    let scale = operands.gradient_scale;
    with_copy!(OP, operands, cost, cuda: |gpu| cuda::adamw(gpu, hyper, step, &operands, first, second), cpu: |cpu, master, gradient, copy| {
        let (first, second) = (first.get_mut::<f32>(), second.get_mut::<f32>());
        kernels::adamw(cpu, hyper, step, scale, master, gradient, first, second, copy)
    })
}

/// As [`adamw`], with moments of eight bits: `first` and `second` have [`moments8::words`]
/// elements. On the CPU only.
pub fn adamw8(
    hyper: AdamW,
    step: u64,
    operands: OptimizerOperands<'_>,
    first: &mut Tensor,
    second: &mut Tensor,
) -> Result<()> {
    const OP: &str = "adamw8";
    let cost = operands.check(OP, &[first, second])?;
    let words = moments8::words(operands.master.elements());
    for moment in [&*first, &*second] {
        ensure_shape!(moment.elements() == words, OP, "{moment:?} of {:?}", operands.master);
    }
    let scale = operands.gradient_scale;
    let not_there = || TensorError::NotImplemented { device: "cuda", op: OP };
    with_copy!(OP, operands, cost, cuda: |_gpu| Err(not_there()), cpu: |cpu, master, gradient, copy| {
        let (first, second) = (first.get_mut::<f32>(), second.get_mut::<f32>());
        moments8::adamw8(cpu, hyper, step, scale, master, gradient, first, second, copy)
    })
}

/// Encodes the f32 `values` of a moment into `blocks`, of [`moments8::words`] elements. On the CPU
/// only.
///
/// # Errors
/// Other dtypes, other numbers of elements, and a GPU.
pub fn encode_moment(moment: Moment, values: &Tensor, blocks: &mut Tensor) -> Result<()> {
    const OP: &str = "encode_moment";
    for tensor in [values, &*blocks] {
        if tensor.dtype() != DType::F32 {
            return Err(TensorError::DType { op: OP, expected: "f32", got: tensor.dtype() });
        }
    }
    let elements = values.elements();
    ensure_shape!(blocks.elements() == moments8::words(elements), OP, "{blocks:?} of {values:?}");
    let cost = Cost::new(4 * elements, values.bytes() + blocks.bytes()).on(DType::F32, [elements]);
    values.device().launch(OP, cost, |cpu| {
        moments8::encode(cpu.isa, moment, values.get::<f32>(), blocks.get_mut::<f32>());
        Ok(())
    })
}

/// One step of LAMB, the `step`-th from 1, on one tensor. On the CPU only.
pub fn lamb(
    hyper: AdamW,
    step: u64,
    operands: OptimizerOperands<'_>,
    first: &mut Tensor,
    second: &mut Tensor,
) -> Result<()> {
    const OP: &str = "lamb";
    let cost = operands.check(OP, &[first, second])?;
    let scale = operands.gradient_scale;
    let not_there = || TensorError::NotImplemented { device: "cuda", op: OP };
    with_copy!(OP, operands, cost, cuda: |_gpu| Err(not_there()), cpu: |cpu, master, gradient, copy| {
        let (first, second) = (first.get_mut::<f32>(), second.get_mut::<f32>());
        kernels::lamb(cpu, hyper, step, scale, master, gradient, first, second, copy)
    })
}

/// One step of SGD; `momentum` is its state where it has one.
pub fn sgd(hyper: Sgd, operands: OptimizerOperands<'_>, momentum: Option<&mut Tensor>) -> Result<()> {
    const OP: &str = "sgd";
    let cost = operands.check(OP, &momentum.as_deref().into_iter().collect::<Vec<_>>())?;
    let scale = operands.gradient_scale;
    with_copy!(OP, operands, cost, cuda: |gpu| cuda::sgd(gpu, hyper, &operands, momentum.as_deref()), cpu: |cpu, master, gradient, copy| {
        kernels::sgd(cpu, hyper, scale, master, gradient, momentum.map(|m| m.get_mut::<f32>()), copy)
    })
}

/// One Lion step.
pub fn lion(hyper: Lion, operands: OptimizerOperands<'_>, momentum: &mut Tensor) -> Result<()> {
    const OP: &str = "lion";
    let cost = operands.check(OP, &[momentum])?;
    let scale = operands.gradient_scale;
    with_copy!(OP, operands, cost, cuda: |gpu| cuda::lion(gpu, hyper, &operands, momentum), cpu: |cpu, master, gradient, copy| {
        kernels::lion(cpu, hyper, scale, master, gradient, momentum.get_mut::<f32>(), copy)
    })
}

/// `master -= rate sign(gradient)`: the step of a bias that balances experts (Wang et al. 2024). A
/// gradient of 0 moves nothing.
pub fn sign_step(rate: f32, operands: OptimizerOperands<'_>) -> Result<()> {
    const OP: &str = "sign_step";
    let cost = operands.check(OP, &[])?;
    with_copy!(OP, operands, cost, cuda: |gpu| cuda::sign_step(gpu, rate, &operands), cpu: |_cpu, master, gradient, copy| {
        for (master, gradient) in master.iter_mut().zip(gradient) {
            if *gradient != 0.0 {
                *master -= rate * gradient.signum();
            }
        }
        if let Some(copy) = copy {
            copy.iter_mut().zip(master.iter()).for_each(|(copy, master)| *copy = Element::from_f32(*master));
        }
    })
}

/// `average += share (weights - average)`, both f32: takes `weights` into their average over
/// steps, of which they are a `share` in [0, 1] afterwards. A share of 1 copies the bits of the
/// weights. On the CPU only.
///
/// # Errors
/// Other dtypes, other numbers of elements, and a GPU.
pub fn average(share: f32, weights: &Tensor, average: &mut Tensor) -> Result<()> {
    const OP: &str = "average";
    for tensor in [weights, &*average] {
        if tensor.dtype() != DType::F32 {
            return Err(TensorError::DType { op: OP, expected: "f32", got: tensor.dtype() });
        }
    }
    let elements = weights.elements();
    ensure_shape!(average.elements() == elements, OP, "{average:?} of {weights:?}");
    let cost = Cost::new(3 * elements, weights.bytes() + 2 * average.bytes()).on(DType::F32, [elements]);
    weights.device().launch(OP, cost, |cpu| {
        kernels::average(cpu, share, weights.get::<f32>(), average.get_mut::<f32>());
        Ok(())
    })
}

/// `gradient += weight fisher (weights - held)`, all f32: adds the gradient of the penalty of
/// elastic weight consolidation (Kirkpatrick et al. 2017, equation 3). Returns the sum of
/// `fisher (weights - held)^2` over each `chunk` elements; zeros on meta. On the CPU only.
///
/// # Errors
/// Other dtypes, other numbers of elements, and a GPU.
pub fn consolidate(
    weight: f32,
    chunk: usize,
    weights: &Tensor,
    fisher: &Tensor,
    held: &Tensor,
    gradient: &mut Tensor,
) -> Result<Vec<f64>> {
    const OP: &str = "consolidate";
    let elements = weights.elements();
    for tensor in [weights, fisher, held, &*gradient] {
        if tensor.dtype() != DType::F32 {
            return Err(TensorError::DType { op: OP, expected: "f32", got: tensor.dtype() });
        }
        ensure_shape!(tensor.elements() == elements, OP, "{tensor:?} for {weights:?}");
    }
    let mut sums = vec![0.0; elements.div_ceil(chunk)];
    let cost = Cost::new(5 * elements, 5 * weights.bytes()).on(DType::F32, [elements]);
    weights.device().launch(OP, cost, |cpu| {
        let (params, fisher, held) = (weights.get::<f32>(), fisher.get::<f32>(), held.get::<f32>());
        kernels::consolidate(cpu, chunk, weight, params, fisher, held, gradient.get_mut::<f32>(), &mut sums);
        Ok(())
    })?;
    Ok(sums)
}

/// One Adafactor step of a matrix [rows, columns], with its factored second moment: `row_moment`
/// [rows], `column_moment` [columns].
pub fn adafactor_matrix(
    hyper: Adafactor,
    step: u64,
    operands: OptimizerOperands<'_>,
    row_moment: &mut Tensor,
    column_moment: &mut Tensor,
) -> Result<()> {
    const OP: &str = "adafactor";
    let cost = operands.check(OP, &[row_moment, column_moment])?;
    let (rows, columns, device) = (row_moment.elements(), column_moment.elements(), operands.gradient.device());
    let on_cuda = device.computes() == Computes::Cuda;
    let factored = on_cuda.then(|| cuda::Factored::new(device, rows, columns)).transpose()?;
    let floats = if on_cuda { 0 } else { kernels::adafactor_workspace(rows, columns) };
    let mut scratch = super::workspace(device, floats)?;
    let scale = operands.gradient_scale;
    with_copy!(OP, operands, cost, cuda: |gpu| {
        let factored = factored.as_ref().expect("made on cuda");
        cuda::adafactor_matrix(gpu, hyper, step, &operands, [row_moment, column_moment], factored)
    }, cpu: |cpu, master, gradient, copy| {
        let (rows, columns) = (row_moment.get_mut::<f32>(), column_moment.get_mut::<f32>());
        let scratch = scratch.get_mut::<f32>();
        kernels::adafactor_matrix(cpu, hyper, step, scale, master, gradient, rows, columns, copy, scratch)
    })
}

/// One Adafactor step of a parameter that is no matrix.
pub fn adafactor_vector(
    hyper: Adafactor,
    step: u64,
    operands: OptimizerOperands<'_>,
    moment: &mut Tensor,
) -> Result<()> {
    const OP: &str = "adafactor";
    let cost = operands.check(OP, &[moment])?;
    let (scale, device) = (operands.gradient_scale, operands.gradient.device());
    let on_cuda = device.computes() == Computes::Cuda;
    let lengths = on_cuda.then(|| cuda::Lengths::of_vector(device, moment.elements())).transpose()?;
    with_copy!(OP, operands, cost, cuda: |gpu| {
        cuda::adafactor_vector(gpu, hyper, step, &operands, moment, lengths.as_ref().expect("made on cuda"))
    }, cpu: |cpu, master, gradient, copy| {
        kernels::adafactor_vector(cpu, hyper, step, scale, master, gradient, moment.get_mut::<f32>(), copy)
    })
}

/// Scratch for the sums of `chunks` chunks, in f64, on a GPU.
fn sums_on_cuda(device: &Device, chunks: usize) -> Result<Option<Tensor>> {
    (device.computes() == Computes::Cuda).then(|| super::workspace(device, 2 * chunks)).transpose()
}

/// The sum of squares in a fixed order; not finite exactly when an element is not. 0 on meta.
pub fn sum_of_squares(x: &Tensor) -> Result<f64> {
    let mut sum = 0.0;
    let cost = Cost::streaming(2, &[x]).on(x.dtype(), [x.elements()]);
    let scratch = sums_on_cuda(x.device(), x.elements().div_ceil(cuda::SQUARES_CHUNK))?;
    crate::by_float!("sum_of_squares", x.dtype(), T => x.device().launch_on("sum_of_squares", cost, |on| {
        sum = match on {
            On::Cpu(cpu) => reduce::sum_of_squares(cpu, x.get::<T>()),
            On::Cuda(gpu) => cuda::sum_of_squares(gpu, x, super::given(&scratch))?,
        };
        Ok(())
    })?);
    Ok(sum)
}

/// The sum of squares of each `chunk` of a flat tensor, each in a fixed order of its own; not
/// finite exactly when an element is not. Zeros on meta.
pub fn chunk_sums_of_squares(x: &Tensor, chunk: usize) -> Result<Vec<f64>> {
    Ok(chunk_sums_of_squares_of(std::slice::from_ref(x), chunk)?.swap_remove(0))
}

/// As [`chunk_sums_of_squares`], of several tensors of one device: a GPU is waited for once.
pub fn chunk_sums_of_squares_of(tensors: &[Tensor], chunk: usize) -> Result<Vec<Vec<f64>>> {
    let Some(first) = tensors.first() else { return Ok(Vec::new()) };
    let elements: Vec<usize> = tensors.iter().map(Tensor::elements).collect();
    let mut sums = ChunkSums::new(first.device(), &elements, chunk)?;
    tensors.iter().enumerate().try_for_each(|(index, x)| sums.add_up(index, x))?;
    sums.read()
}

/// The sums of squares of the chunks of several tensors of one device, which need not be there at
/// once: added up one tensor after the other, and read together, so that a GPU is waited for once.
pub struct ChunkSums {
    chunk: usize,
    device: Device,
    /// Per tensor; on a GPU they are in `on_device` until they are read.
    sums: Vec<Vec<f64>>,
    on_device: Option<Tensor>,
}

impl ChunkSums {
    /// For tensors of so many elements on `device`; zeros until they are added up.
    ///
    /// # Errors
    /// Of the device, when there is no memory.
    pub fn new(device: &Device, elements: &[usize], chunk: usize) -> Result<ChunkSums> {
        let sums: Vec<Vec<f64>> = elements.iter().map(|elements| vec![0.0; elements.div_ceil(chunk)]).collect();
        let on_device = sums_on_cuda(device, sums.iter().map(Vec::len).sum())?;
        Ok(ChunkSums { chunk, device: device.clone(), sums, on_device })
    }

    /// Those of the `index`-th tensor, each in a fixed order of its own; not finite exactly when an
    /// element is not. Zeros on meta.
    ///
    /// # Errors
    /// A dtype without squares, and those of the device.
    pub fn add_up(&mut self, index: usize, x: &Tensor) -> Result<()> {
        let before = self.sums[..index].iter().map(Vec::len).sum();
        let (chunk, sums, on_device) = (self.chunk, &mut self.sums[index], &self.on_device);
        let cost = Cost::streaming(2, &[x]).on(x.dtype(), [x.elements()]);
        crate::by_float!("sum_of_squares", x.dtype(), T => x.device().launch_on("sum_of_squares", cost, |on| {
            match on {
                On::Cpu(cpu) => reduce::chunk_sums_of_squares(cpu, chunk, x.get::<T>(), sums),
                On::Cuda(gpu) => cuda::chunk_squares(gpu, x, chunk, super::given(on_device), before)?,
            }
            Ok(())
        })?);
        Ok(())
    }

    /// All of them, tensor by tensor. Waits for a GPU.
    ///
    /// # Errors
    /// Those of the device.
    pub fn read(&mut self) -> Result<Vec<Vec<f64>>> {
        if let (Some(gpu), Some(on_device)) = (self.device.as_cuda(), &self.on_device) {
            cuda::read_sums(gpu, on_device, &mut self.sums)?;
        }
        Ok(self.sums.clone())
    }
}

/// A Muon step of a matrix.
pub struct MuonUpdate<'a> {
    /// Settings of the step.
    pub hyper: Muon,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Its weights and gradient.
    pub operands: OptimizerOperands<'a>,
    /// Its averaged gradient, updated.
    pub momentum: &'a mut Tensor,
}

impl MuonUpdate<'_> {
    /// The dtype of the compute copy, or of the masters where forward reads those.
    fn compute(&self) -> DType {
        self.operands.copy.as_ref().map_or(DType::F32, |copy| copy.dtype())
    }

    /// The dtype of the iteration.
    fn dtype(&self) -> DType {
        if self.compute() == DType::BF16 { DType::BF16 } else { DType::F32 }
    }

    /// Elements of workspace on the CPU.
    fn workspace(&self) -> usize {
        crate::cpu::muon::workspace(self.shape[0], self.shape[1])
    }
}

/// The most workspace of matrices that the CPU updates together; a larger matrix is alone. It holds
/// a block of width 512, whose matrices then go to threads whole.
const MUON_BATCH_BYTES: usize = 16 << 20;

/// A Muon step of each matrix, all of one device and dtype. The iteration runs in bf16 where
/// forward does, else in f32.
///
/// # Errors
/// Operands that do not fit, and those of the device.
pub fn muon(updates: &mut [MuonUpdate<'_>]) -> Result<()> {
    let Some(first) = updates.first() else { return Ok(()) };
    if first.operands.gradient.device().computes() == Computes::Cuda {
        return updates.iter_mut().try_for_each(muon_on_cuda);
    }
    let compute = first.compute();
    let mut rest = updates;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |update: &&MuonUpdate<'_>| {
            bytes += update.workspace() * update.dtype().size();
            bytes <= MUON_BATCH_BYTES
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let (batch, after) = rest.split_at_mut(count);
        match compute {
            DType::BF16 => muon_batch::<bf16, bf16>(batch)?,
            DType::F16 => muon_batch::<f32, f16>(batch)?,
            _ => muon_batch::<f32, f32>(batch)?,
        }
        rest = after;
    }
    Ok(())
}

/// A step of each of `updates` on the CPU, in the dtype `W`, with copies in `T`.
fn muon_batch<W: Element, T: Element>(updates: &mut [MuonUpdate<'_>]) -> Result<()> {
    const OP: &str = "muon";
    let device = updates[0].operands.gradient.device().clone();
    let (mut cost, mut elements) = (Cost::default(), 0);
    let mut scratch = Vec::with_capacity(updates.len());
    for update in &*updates {
        cost += update.operands.check(OP, &[&*update.momentum])?;
        cost.flops += crate::cpu::muon::flops(update.shape, update.hyper.iterations);
        elements += update.operands.gradient.elements();
        scratch.push(device.empty([update.workspace()], W::DTYPE, crate::Purpose::Workspace)?);
    }
    device.launch(OP, cost.on(T::DTYPE, [elements]), |cpu| {
        let mut matrices = Vec::with_capacity(updates.len());
        for (update, scratch) in updates.iter_mut().zip(&mut scratch) {
            matrices.push(crate::cpu::muon::Matrix {
                hyper: update.hyper,
                shape: update.shape,
                gradient_scale: update.operands.gradient_scale,
                params: update.operands.master.get_mut::<f32>(),
                gradients: update.operands.gradient.get::<f32>(),
                momentum: update.momentum.get_mut::<f32>(),
                copy: update.operands.copy.as_mut().map(|copy| copy.get_mut::<T>()),
                workspace: scratch.get_mut::<W>(),
            });
        }
        crate::cpu::muon::muon(cpu, &mut matrices);
        Ok(())
    })
}

fn muon_on_cuda(update: &mut MuonUpdate<'_>) -> Result<()> {
    const OP: &str = "muon";
    let (dtype, compute) = (update.dtype(), update.compute());
    let MuonUpdate { hyper, shape, operands, momentum } = update;
    let mut cost = operands.check(OP, &[momentum])?;
    // Each iteration: X Xᵀ and its square on the short side, then a product with X.
    let (short, long) = (shape[0].min(shape[1]), shape[0].max(shape[1]));
    cost.flops += u64::from(hyper.iterations) * (4 * short * short * long + 2 * short.pow(3)) as u64;
    let device = operands.gradient.device();
    let scratch = cuda::MuonScratch::new(device, *shape, dtype)?;
    device.launch_on(OP, cost.on(compute, [operands.gradient.elements()]), |on| match on {
        On::Cpu(_) => unreachable!("a GPU's matrix"),
        On::Cuda(gpu) => cuda::muon(gpu, *hyper, *shape, operands, momentum, &scratch),
    })
}
