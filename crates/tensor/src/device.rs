//! Where tensors live and kernels run, chosen at run time at the grain of whole kernels.
//!
//! `cpu`, `cuda`, and `meta`, which has shapes and no data. Every operation states its [`Cost`] and
//! passes the kernel as a closure to [`Device::launch_on`]: a device with data runs it, meta only
//! adds up the cost. All allocate through the same pool code, so running a model on meta gives its
//! FLOPs, bytes and memory exactly as the run will have them; of kernels' scratch a meta device
//! takes what the device takes that it stands for ([`Computes`]).

use crate::cpu::{Cpu, Isa, LentThreads};
use crate::cuda::{self, Cuda, Mark};
use crate::error::{Result, TensorError};
use crate::pool::{MemoryPool, Purpose};
use crate::tensor::Tensor;
use crate::{DType, Scalar, Shape};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use trainyard_base::lock;

/// The work of one kernel call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Cost {
    /// Multiplications and additions, each counted as one.
    pub flops: u64,
    /// Bytes that must move between memory and core: each operand once.
    pub bytes: u64,
}

/// The shape of a kernel call: up to five dimensions, as the operation lists them.
pub type Dims = [u32; 5];

/// A kernel call as it is launched: what it does, and on what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Its work.
    pub cost: Cost,
    /// The part of its form that changes its time beside the shape: an activation in the epilogue,
    /// for example. Empty for the plain form.
    pub variant: &'static str,
    /// Of its operands.
    pub dtype: DType,
    /// Its shape; dimensions that it does not have are 0.
    pub dims: Dims,
}

impl From<Cost> for Work {
    /// A call that is known by its bytes alone.
    fn from(cost: Cost) -> Work {
        cost.on(DType::F32, [cost.bytes as usize])
    }
}

impl Work {
    /// The same in another form.
    pub fn variant(self, variant: &'static str) -> Work {
        Work { variant, ..self }
    }
}

/// A kernel call that was recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// The kernel.
    pub kernel: &'static str,
    /// Its work.
    pub work: Work,
    /// Wall time; zero on meta.
    pub seconds: f64,
    /// The tag that [`tag_calls`] set on the launching thread: the number of an instruction.
    pub tag: u32,
    /// The device that ran it, or would.
    pub computes: Computes,
}

thread_local! {
    static TAG: Cell<u32> = const { Cell::new(0) };
}

/// Marks the calls that this thread launches from now on.
pub fn tag_calls(tag: u32) {
    TAG.set(tag);
}

/// Says which lane this thread works for from now on: on a GPU, what it launches goes onto that
/// lane's stream. Threads begin on lane 0.
pub fn enter_lane(lane: usize) {
    cuda::enter_lane(lane);
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.flops += other.flops;
        self.bytes += other.bytes;
    }
}

impl Cost {
    /// `flops` operations on `bytes` bytes.
    pub fn new(flops: usize, bytes: usize) -> Cost {
        Cost { flops: flops as u64, bytes: bytes as u64 }
    }

    /// Of a call on operands of `dtype` with these dimensions, at most five.
    pub fn on<const N: usize>(self, dtype: DType, dims: [usize; N]) -> Work {
        let mut all = [0; 5];
        all[..N].copy_from_slice(&dims.map(|dim| u32::try_from(dim).unwrap_or(u32::MAX)));
        Work { cost: self, variant: "", dtype, dims: all }
    }

    /// No arithmetic worth counting beyond `flops_per_element` on the elements of the first tensor;
    /// every tensor moved once.
    pub fn streaming(flops_per_element: usize, tensors: &[&Tensor]) -> Cost {
        let elements = tensors.first().map_or(0, |t| t.elements());
        Cost::new(flops_per_element * elements, tensors.iter().map(|t| t.bytes()).sum())
    }
}

/// The launches, by kernel name.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Calls, cost and (on a real device) seconds of each kernel.
    pub kernels: BTreeMap<&'static str, KernelProfile>,
}

/// One kernel's part of a [`Profile`].
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelProfile {
    /// Number of launches.
    pub calls: u64,
    /// Summed cost.
    pub cost: Cost,
    /// Summed wall time; zero on meta.
    pub seconds: f64,
}

impl Profile {
    /// The cost of everything launched.
    pub fn total(&self) -> Cost {
        let mut total = Cost::default();
        for kernel in self.kernels.values() {
            total += kernel.cost;
        }
        total
    }
}

/// A device; cheap to clone, all clones are one device with one pool.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    kind: Kind,
    pool: MemoryPool,
    profiling: AtomicBool,
    profile: Mutex<Profile>,
    /// Calls one by one, while they are asked for.
    calls: Mutex<Option<Vec<Call>>>,
    recording: AtomicBool,
}

enum Kind {
    Cpu(Cpu),
    Cuda(Arc<Cuda>),
    Meta(Computes),
}

/// The processor that computes, or would. The scratch of kernels depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Computes {
    /// The kernels of [`crate::cpu`].
    Cpu,
    /// Those of [`crate::cuda`].
    Cuda,
}

/// The device on which a kernel runs.
#[derive(Clone, Copy)]
pub enum On<'d> {
    /// The processor.
    Cpu(&'d Cpu),
    /// A GPU.
    Cuda(&'d Arc<Cuda>),
}

impl Device {
    /// The CPU with `threads` threads on the rung `isa`; at most `limit` live bytes.
    pub fn cpu(isa: Isa, threads: usize, limit: Option<usize>) -> Device {
        Device::new(Kind::Cpu(Cpu::new(isa, threads)), MemoryPool::new(true, limit))
    }

    /// As [`Device::cpu`], for a rank that lends its threads to others.
    pub fn cpu_lending_threads(isa: Isa, threads: usize, limit: Option<usize>, lent: &Arc<LentThreads>) -> Device {
        Device::new(Kind::Cpu(Cpu::lending(isa, threads, lent)), MemoryPool::new(true, limit))
    }

    /// True if this device lends its threads, so that it may [help](Device::lend) others.
    pub fn lends_threads(&self) -> bool {
        matches!(&self.0.kind, Kind::Cpu(cpu) if cpu.threads.lent().is_some())
    }

    /// Does a task of another rank on this thread, which has to wait anyway; false when
    /// there is none.
    pub fn lend(&self) -> bool {
        matches!(&self.0.kind, Kind::Cpu(cpu) if cpu.threads.lent().is_some_and(|lent| lent.lend()))
    }

    /// A GPU; at most `limit` live bytes of its memory.
    pub fn cuda(cuda: Arc<Cuda>, limit: Option<usize>) -> Device {
        let pool = MemoryPool::on_device(Arc::clone(&cuda), limit);
        Device::new(Kind::Cuda(cuda), pool)
    }

    /// The host as a device of its own, with a pool of its own: what leaves this device lies and is
    /// worked on there. Beside a GPU its memory is pinned, so that the GPU copies by itself; beside
    /// meta it is meta with the CPU's kernels.
    pub fn beside(&self) -> Device {
        match &self.0.kind {
            Kind::Cpu(cpu) => Device::cpu(cpu.isa, cpu.threads.count(), None),
            Kind::Cuda(cuda) => {
                let host = Cpu::new(cuda.host().isa, cuda.host().threads.count());
                Device::new(Kind::Cpu(host), MemoryPool::pinned(Arc::clone(cuda)))
            }
            Kind::Meta(_) => Device::meta_for(Computes::Cpu),
        }
    }

    /// Shapes only, with the scratch of the CPU's kernels.
    pub fn meta() -> Device {
        Device::meta_for(Computes::Cpu)
    }

    /// Shapes only, with the scratch of the kernels of `computes`.
    pub fn meta_for(computes: Computes) -> Device {
        let device = Device::new(Kind::Meta(computes), MemoryPool::new(false, None));
        device.set_profiling(true);
        device
    }

    fn new(kind: Kind, pool: MemoryPool) -> Device {
        let (profiling, recording) = (AtomicBool::new(false), AtomicBool::new(false));
        Device(Arc::new(Inner { kind, pool, profiling, profile: Mutex::default(), calls: Mutex::default(), recording }))
    }

    /// True if tensors here have no data.
    pub fn is_meta(&self) -> bool {
        matches!(self.0.kind, Kind::Meta(_))
    }

    /// `cpu`, `cuda` or `meta`.
    pub fn name(&self) -> &'static str {
        match &self.0.kind {
            Kind::Cpu(_) => "cpu",
            Kind::Cuda(_) => "cuda",
            Kind::Meta(_) => "meta",
        }
    }

    /// The processor whose kernels compute here, or are counted.
    pub fn computes(&self) -> Computes {
        match &self.0.kind {
            Kind::Cpu(_) => Computes::Cpu,
            Kind::Cuda(_) => Computes::Cuda,
            Kind::Meta(computes) => *computes,
        }
    }

    /// The CPU context; None on the other devices.
    pub fn as_cpu(&self) -> Option<&Cpu> {
        match &self.0.kind {
            Kind::Cpu(cpu) => Some(cpu),
            _ => None,
        }
    }

    /// The GPU; None on the other devices.
    pub fn as_cuda(&self) -> Option<&Arc<Cuda>> {
        match &self.0.kind {
            Kind::Cuda(cuda) => Some(cuda),
            _ => None,
        }
    }

    /// The CPU on which the host makes values for this device; None on meta.
    pub fn host(&self) -> Option<&Cpu> {
        match &self.0.kind {
            Kind::Cpu(cpu) => Some(cpu),
            Kind::Cuda(cuda) => Some(cuda.host()),
            Kind::Meta(_) => None,
        }
    }

    /// The pool behind every tensor of this device.
    pub fn pool(&self) -> &MemoryPool {
        &self.0.pool
    }

    /// True if the two are one device.
    pub fn same(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// As [`Device::launch_on`], for a kernel that only the CPU has.
    ///
    /// # Errors
    /// On a GPU.
    pub fn launch(
        &self,
        kernel: &'static str,
        work: impl Into<Work>,
        run: impl FnOnce(&Cpu) -> Result<()>,
    ) -> Result<()> {
        self.launch_on(kernel, work, |on| match on {
            On::Cpu(cpu) => run(cpu),
            On::Cuda(_) => Err(TensorError::NotImplemented { device: "cuda", op: kernel }),
        })
    }

    /// Runs a kernel, or on meta counts it. With profiling on, its cost and time are added to the
    /// profile; with recording on, the call is recorded. On a GPU, where a kernel is only launched,
    /// either makes the host wait for it, which is the time that is measured.
    pub fn launch_on(
        &self,
        kernel: &'static str,
        work: impl Into<Work>,
        run: impl FnOnce(On<'_>) -> Result<()>,
    ) -> Result<()> {
        let profiling = self.0.profiling.load(Ordering::Relaxed);
        let recording = self.0.recording.load(Ordering::Relaxed);
        let timed = (profiling || recording) && !self.is_meta();
        let began = if timed { self.mark()? } else { Mark::default() };
        let started = timed.then(Instant::now);
        match &self.0.kind {
            Kind::Cpu(cpu) => run(On::Cpu(cpu))?,
            Kind::Cuda(cuda) => run(On::Cuda(cuda))?,
            Kind::Meta(_) => {}
        }
        if !profiling && !recording {
            return Ok(());
        }
        let seconds = match (&self.0.kind, started) {
            (Kind::Cuda(cuda), _) => {
                let ended = self.mark()?;
                cuda.synchronize()?;
                began.seconds_to(&ended)?
            }
            (_, started) => started.map_or(0.0, |started| started.elapsed().as_secs_f64()),
        };
        let work = work.into();
        if profiling {
            let mut profile = lock(&self.0.profile);
            let entry = profile.kernels.entry(kernel).or_default();
            entry.calls += 1;
            entry.cost += work.cost;
            entry.seconds += seconds;
        }
        if recording && let Some(calls) = &mut *lock(&self.0.calls) {
            calls.push(Call { kernel, work, seconds, tag: TAG.get(), computes: self.computes() });
        }
        Ok(())
    }

    /// Sets whether calls are recorded one by one; off by default. Earlier records are dropped.
    pub fn set_recording(&self, on: bool) {
        *lock(&self.0.calls) = on.then(Vec::new);
        self.0.recording.store(on, Ordering::Relaxed);
    }

    /// The calls recorded since they were last taken, each lane's in order.
    pub fn take_calls(&self) -> Vec<Call> {
        let mut calls = lock(&self.0.calls);
        calls.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Sets whether launches are profiled; always on for meta, off by default on the CPU.
    pub fn set_profiling(&self, on: bool) {
        self.0.profiling.store(on || self.is_meta(), Ordering::Relaxed);
    }

    /// The profile since it was last taken.
    pub fn take_profile(&self) -> Profile {
        std::mem::take(&mut lock(&self.0.profile))
    }

    /// A tensor with arbitrary contents.
    pub fn empty(&self, shape: impl Into<Shape>, dtype: DType, purpose: Purpose) -> Result<Tensor> {
        Tensor::allocate(self, shape.into(), dtype, purpose)
    }

    /// A tensor of zeros.
    pub fn zeros(&self, shape: impl Into<Shape>, dtype: DType, purpose: Purpose) -> Result<Tensor> {
        Tensor::allocate_zeros(self, shape.into(), dtype, purpose)
    }

    /// A scalar 1 in f32.
    pub fn one(&self, purpose: Purpose) -> Result<Tensor> {
        match &self.0.kind {
            Kind::Cuda(cuda) => {
                let one = self.empty([], DType::F32, purpose)?;
                cuda::one(cuda, &one)?;
                Ok(one)
            }
            _ => self.tensor([], &[1.0f32], purpose),
        }
    }

    /// True if calls are timed, one by one.
    pub fn times_calls(&self) -> bool {
        self.0.profiling.load(Ordering::Relaxed) || self.0.recording.load(Ordering::Relaxed)
    }

    /// A tensor with the values of `data`, row-major.
    pub fn tensor<T: Scalar>(&self, shape: impl Into<Shape>, data: &[T], purpose: Purpose) -> Result<Tensor> {
        let mut tensor = self.empty(shape, T::DTYPE, purpose)?;
        if !self.is_meta() {
            tensor.write(data)?;
        }
        Ok(tensor)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.kind {
            Kind::Cpu(cpu) => write!(f, "cpu({}, {} threads)", cpu.isa, cpu.threads.count()),
            Kind::Cuda(cuda) => write!(f, "{cuda:?}"),
            Kind::Meta(_) => write!(f, "meta"),
        }
    }
}

impl Device {
    /// Fails unless the device has data.
    pub fn require_data(&self, what: &'static str, shape: &Shape) -> Result<&Cpu> {
        self.as_cpu().ok_or(TensorError::NoData { what, shape: *shape })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;

    #[test]
    fn calls_are_recorded_with_shape_and_tag_only_while_asked_for() {
        let cpu = Device::cpu(Isa::detect(), 1, None);
        let meta = Device::meta();
        let recorded = [&cpu, &meta].map(|device| {
            let tensor = |shape: [usize; 2]| device.zeros(shape, DType::F32, Purpose::Activations).unwrap();
            let (x, w) = (tensor([3, 5]), tensor([4, 5]));
            ops::linear(&x, &w, None, crate::cpu::gemm::Activation::None, None, false).unwrap();
            device.set_recording(true);
            tag_calls(7);
            let (y, _) = ops::linear(&x, &w, None, crate::cpu::gemm::Activation::GeluTanh, None, true).unwrap();
            tag_calls(8);
            ops::linear_input_gradient(&y, &w).unwrap();
            let calls = device.take_calls();
            assert!(calls.iter().all(|call| (call.seconds > 0.0) != device.is_meta()));
            device.set_recording(false);
            ops::linear_input_gradient(&y, &w).unwrap();
            assert!(device.take_calls().is_empty());
            calls.into_iter().map(|call| (call.kernel, call.work, call.tag)).collect::<Vec<_>>()
        });
        assert_eq!(recorded[0], recorded[1]);
        let [(first, work, 7), (second, _, 8)] = recorded[0][..] else { panic!("{recorded:?}") };
        assert_eq!((first, second, work.variant), ("linear", "linear_input_gradient", "gelu_tanh"));
        assert_eq!((work.dims, work.cost.flops), ([3, 4, 5, 0, 0], 120));
    }
}
