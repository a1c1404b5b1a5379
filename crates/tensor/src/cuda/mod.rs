//! The CUDA device: streams for lanes, memory for the pool, and the operations' way to kernels and
//! products.
//!
//! A thread works for one lane ([`crate::device::enter_lane`]), and what it launches goes onto that
//! lane's stream. Lanes are ordered by [`Mark`]s; a block that changes lanes on its way through the
//! pool is ordered by [`memory::DeviceBlock`]. No launch waits for the device: only reading values
//! on the host does. The files beside this one have for each operation of [`crate::ops`] what it
//! launches; shapes were checked there.
//!
//! Every driver call goes through [`Driver`], so that all of this runs on
//! [`trainyard_cuda::fake::Fake`] in tests.

mod attention;
mod exchange;
pub(crate) mod experts;
pub(crate) mod fp8;
pub mod graph;
pub(crate) mod index;
mod lanes;
mod launch;
mod linear;
pub mod link;
mod loss;
mod matrix_optim;
pub(crate) mod memory;
mod norm;
mod optim;
pub mod peak;
pub(crate) mod plain;
mod pointwise;
mod staging;

pub use attention::AttentionChoice;
pub use lanes::Mark;
pub(crate) use lanes::{LANES, enter_lane, lane};
pub use trainyard_cuda::kernels::AttentionForm;
pub use trainyard_cuda::{CudaError, driver, fake, nccl, nccl_version, stand_in, tested};

pub(crate) use attention::{
    Distances, Heads, Seen, attention, attention_backward, attention_decode, attention_over, attention_over_backward,
    bias_scratch, biased_attention, biased_attention_backward, delta_of, join, join_backward, rope, rope_table,
    rows_of_segments,
};
pub(crate) use linear::{linear, linear_input_gradient, linear_weight_gradient, matmul};
pub(crate) use loss::{
    HeadGradients, HeadScratch, chunk_rows, cross_entropy, cross_entropy_backward, head, merge_statistics, mse_loss,
    mse_loss_backward, part_gradients, summary, vocabulary_statistics,
};
pub(crate) use matrix_optim::{Factored, Lengths, MuonScratch, adafactor_matrix, adafactor_vector, muon};
pub(crate) use norm::{
    layer_norm, layer_norm_backward, qk_norm, qk_norm_backward, rms_norm, rms_norm_backward, row_blocks,
};
pub(crate) use optim::{SQUARES_CHUNK, adamw, chunk_squares, lion, read_sums, sgd, sign_step, sum_of_squares};
pub(crate) use pointwise::{
    accumulate, activate, activation_backward, add, cast, copy, dropout, embedding, embedding_backward, glu,
    glu_backward, one, swiglu, swiglu_backward,
};

use crate::cpu::{Cpu, Isa};
use crate::error::{Result, TensorError};
use crate::{DType, Tensor};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use trainyard_base::lock;
use trainyard_cuda::driver::{Driver, Event, Precision, Properties, Region, Stream};
use trainyard_cuda::kernels::{File, Float};

/// Scratch for the algorithms of products: what NVIDIA recommends for Hopper.
pub(crate) const PRODUCT_WORKSPACE: usize = 32 << 20;

/// A device as its tensors see it.
pub struct Cuda {
    driver: Arc<dyn Driver>,
    streams: [OnceLock<Stream>; LANES],
    modules: Mutex<BTreeMap<(File, Float), Arc<launch::Module>>>,
    histories: [Mutex<lanes::History>; LANES],
    events: Mutex<Vec<Event>>,
    pinned: Mutex<Vec<staging::Pinned>>,
    capturing: graph::Capturing,
    /// Precision of products of f32.
    precision: Precision,
    /// The form of attention on tensor cores, once chosen.
    attention: OnceLock<AttentionChoice>,
    /// For what the host makes: initial values.
    host: Cpu,
}

impl Cuda {
    /// Checks without opening it that GPU `ordinal` exists.
    ///
    /// # Errors
    /// The missing part of the machine, in a sentence.
    pub fn check(ordinal: usize) -> Result<()> {
        Ok(trainyard_cuda::check(ordinal)?)
    }

    /// GPUs that the process sees.
    pub fn count() -> usize {
        trainyard_cuda::count()
    }

    /// GPU `ordinal` of those that the process sees, with `threads` threads for what the host does
    /// for it.
    ///
    /// # Errors
    /// The thing that the machine or this build lacks for it, in a sentence.
    pub fn open(ordinal: usize, threads: usize) -> Result<Cuda> {
        Ok(Cuda::new(trainyard_cuda::open(ordinal)?, threads))
    }

    /// A device behind a driver, with `threads` threads for what the host does for it.
    pub fn new(driver: Arc<dyn Driver>, threads: usize) -> Cuda {
        Cuda {
            driver,
            streams: [const { OnceLock::new() }; LANES],
            modules: Mutex::default(),
            histories: [const { Mutex::new(lanes::History::NEW) }; LANES],
            events: Mutex::default(),
            pinned: Mutex::default(),
            capturing: graph::Capturing::default(),
            precision: Precision::Full,
            attention: OnceLock::new(),
            host: Cpu::new(Isa::detect(), threads),
        }
    }

    /// The same, with operands of f32 products rounded to TF32 or not.
    pub fn with_tf32(mut self, yes: bool) -> Cuda {
        self.precision = if yes { Precision::Tf32 } else { Precision::Full };
        self
    }

    /// The properties of the GPU.
    pub fn properties(&self) -> &Properties {
        self.driver.properties()
    }

    /// Bytes free and in all, for all processes.
    pub fn memory(&self) -> Result<(usize, usize)> {
        Ok(self.driver.memory()?)
    }

    pub(crate) fn host(&self) -> &Cpu {
        &self.host
    }

    /// The stream of this thread's lane.
    pub(crate) fn stream(&self) -> Result<Stream> {
        self.stream_of(lane())
    }

    fn stream_of(&self, lane: usize) -> Result<Stream> {
        if let Some(stream) = self.streams[lane].get() {
            return Ok(*stream);
        }
        let stream = self.driver.stream()?;
        Ok(*self.streams[lane].get_or_init(|| stream))
    }

    /// Waits for everything that this thread's lane has launched.
    pub(crate) fn synchronize(&self) -> Result<()> {
        Ok(self.driver.synchronize(self.stream()?)?)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        for event in lock(&self.events).drain(..) {
            self.driver.destroy(event);
        }
        for pinned in lock(&self.pinned).drain(..) {
            pinned.free(&*self.driver);
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let properties = self.properties();
        write!(f, "cuda:{} ({}, {})", properties.ordinal, properties.name, properties.architecture())
    }
}

/// The module that computes on a dtype.
fn float(op: &'static str, dtype: DType) -> Result<Float> {
    match dtype {
        DType::F32 => Ok(Float::F32),
        DType::BF16 => Ok(Float::Bf16),
        DType::F16 => Ok(Float::F16),
        got => Err(TensorError::DType { op, expected: "f32, bf16 or f16", got }),
    }
}

/// Copies of host data on a device, each made at its first use there: kept beside the data, and no
/// part of its value.
#[derive(Default)]
pub(crate) struct OnDevice(Mutex<Vec<(usize, Tensor)>>);

impl OnDevice {
    /// The copy on `device`; `make` makes it.
    pub fn get(&self, device: &crate::Device, make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        self.get_of(0, device, make)
    }

    /// As [`OnDevice::get`], of the copy with a number: data of which there are several forms.
    pub fn get_of(
        &self,
        number: usize,
        device: &crate::Device,
        make: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut copies = lock(&self.0);
        copies.retain(|(_, copy)| copy.device().same(device));
        if let Some((_, copy)) = copies.iter().find(|(of, _)| *of == number) {
            return Ok(copy.clone());
        }
        let copy = make()?;
        copies.push((number, copy.clone()));
        Ok(copy)
    }
}

impl Clone for OnDevice {
    fn clone(&self) -> OnDevice {
        OnDevice::default()
    }
}

impl PartialEq for OnDevice {
    fn eq(&self, _: &OnDevice) -> bool {
        true
    }
}

impl Eq for OnDevice {}

impl fmt::Debug for OnDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}

/// `offset ..` of a region, `bytes` long.
fn part(region: Region, offset: usize, bytes: usize) -> Region {
    debug_assert!(offset + bytes <= region.bytes);
    Region { address: region.address + offset as u64, bytes, ..region }
}
