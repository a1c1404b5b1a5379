//! The interface of a device: memory, streams, events, launches, products. It is a trait, so that
//! everything above it runs in tests without a GPU: [`crate::fake`] is the other implementation
//! beside [`crate::nvidia`].
//!
//! Work on a stream runs in order; only events order streams among each other. No call here waits
//! for work except [`Driver::synchronize`] and [`Driver::wait_on_host`]. Work can be captured as a
//! graph and launched again in one call. Arguments of kernels and products say which memory they
//! read and write. The device does not need this, but a test does.

use crate::error::Result;
use crate::fp8::Fp8;
use crate::kernels::{Argument, File, Float, Launch};
use crate::nccl::Nccl;

/// Memory of the device.
pub type Address = u64;

/// A queue of work, by its number on the driver.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Stream(pub usize);

/// A mark in a stream, by its number on the driver.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Event(pub usize);

/// A kernel that was loaded, by its number on the driver.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Function(pub usize);

/// Work that was captured and can be launched as often as wanted, by its number on the driver.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Graph(pub usize);

/// The properties of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Properties {
    /// Its name, as the driver gives it.
    pub name: String,
    /// Its number among those that the process sees.
    pub ordinal: usize,
    /// Its compute capability, major and minor.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The most shared memory that a block can ask for, in bytes.
    pub shared_max: u32,
    /// Bytes of memory.
    pub memory: usize,
    /// The CUDA version that the driver supports: 1000 major + 10 minor.
    pub driver_version: u32,
}

impl Properties {
    /// The architecture that kernels are compiled for: `sm_90a` on Hopper, where the instructions
    /// of the tensor cores exist on that chip alone.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        let suffix = if major == 9 { "a" } else { "" };
        format!("sm_{major}{minor}{suffix}")
    }
}

/// A piece of memory that a launch works on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Its first byte; 0 is no memory.
    pub address: Address,
    /// Its bytes.
    pub bytes: usize,
    /// True if the region is written.
    pub written: bool,
}

impl Region {
    /// No memory: a null pointer.
    pub const NONE: Region = Region { address: 0, bytes: 0, written: false };
}

/// A kernel with all that its launch takes.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The kernel, as it was loaded.
    pub function: Function,
    /// Its name.
    pub name: &'static str,
    /// Grid, block, shared memory.
    pub launch: Launch,
    /// In the order of the kernel's parameters.
    pub arguments: &'a [Argument],
    /// The memory that the pointers among them stand for.
    pub regions: &'a [Region],
}

/// The precision of products of f32 operands.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Precision {
    /// As they are.
    #[default]
    Full,
    /// On tensor cores, rounded to 10 bits of mantissa.
    Tf32,
}

/// The function applied to a product before it is stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// `max(x, 0)`.
    Relu,
    /// GELU by its tanh formula.
    Gelu,
}

/// The form of a product: what an algorithm is chosen for. `d = act(a b + bias) + c`, row-major: a
/// is [m, k] or stored as [k, m], b is [k, n] or stored as [n, k], c and d are [m, n], bias is [n].
/// Sums are f32.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Product {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Inner length of the product.
    pub k: usize,
    /// True if a is stored as [k, m].
    pub a_transposed: bool,
    /// True if b is stored as [n, k].
    pub b_transposed: bool,
    /// Of a and b.
    pub operands: Float,
    /// Of a and b where they have eight bits, which `operands` then says nothing of: see
    /// [`Product::refused`] for what such a product can be.
    pub fp8: Option<[Fp8; 2]>,
    /// Of bias, c and d.
    pub result: Float,
    /// For operands of f32.
    pub precision: Precision,
    /// True if a bias is added.
    pub bias: bool,
    /// Function applied after the bias. It must be none if c is added.
    pub activation: Activation,
    /// True if the argument of the activation is stored too, in the form of d.
    pub keeps_argument: bool,
    /// True if c is added. It may be d.
    pub adds: bool,
    /// Number of such products that lie one after the other in every operand.
    pub batch: usize,
    /// A power of two, at most [`Product::ALIGNMENT`], of which the addresses of a, b, c and d are
    /// multiples: an algorithm may rely on it.
    pub alignment: u32,
}

impl Product {
    /// The alignment that libraries take for granted.
    pub const ALIGNMENT: u32 = 256;
    /// Sizes of products of eight bits are multiples of this, addresses of as many bytes.
    pub const FP8_MULTIPLE: usize = 16;
    /// The least compute capability that multiplies operands of eight bits.
    pub const FP8_CAPABILITY: (u32, u32) = (8, 9);

    /// Why cuBLASLt has no such product on a device of this capability, if that is so. Of operands
    /// of eight bits its documentation (`cublasLtMatmul`) asks that they lie along what is summed
    /// over, which in its words is a transposed first and a plain second one; sizes and addresses
    /// that are multiples of 16; not two of E5M2; a result of bf16 or f32. No activation is asked
    /// of it here.
    pub fn refused(&self, capability: (u32, u32)) -> Option<String> {
        let [a, b] = self.fp8?;
        let sizes = [self.m, self.n, self.k];
        if capability < Product::FP8_CAPABILITY {
            let (major, minor) = capability;
            return Some(format!("compute capability {major}.{minor} multiplies no operands of eight bits; 8.9 does"));
        }
        if self.a_transposed || !self.b_transposed {
            return Some("operands of eight bits must lie along what is summed over".to_owned());
        }
        if sizes.iter().any(|size| !size.is_multiple_of(Product::FP8_MULTIPLE)) {
            return Some(format!("sizes {sizes:?} of a product of eight bits are not multiples of 16"));
        }
        if (self.alignment as usize) < Product::FP8_MULTIPLE {
            return Some(format!(
                "operands at multiples of {} bytes, where a product of eight bits needs 16",
                self.alignment
            ));
        }
        if [a, b] == [Fp8::E5M2; 2] {
            return Some("there is no product of E5M2 with E5M2".to_owned());
        }
        let plain = self.activation == Activation::None && !self.keeps_argument && self.batch == 1;
        let bias = !self.bias || self.result == Float::Bf16;
        (self.result == Float::F16 || !plain || !bias)
            .then(|| "a product of eight bits gives bf16, perhaps with a bias, or f32, one at a time".to_owned())
    }
}

/// The memory of a product; what its form does not have is [`Region::NONE`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Operands {
    /// [m, k], or [k, m].
    pub a: Region,
    /// [k, n], or [n, k].
    pub b: Region,
    /// [n].
    pub bias: Region,
    /// [m, n].
    pub c: Region,
    /// [m, n].
    pub d: Region,
    /// The argument of the activation, [m, n].
    pub argument: Region,
    /// Scratch for the algorithm.
    pub workspace: Region,
    /// Scales of operands of eight bits, one f32 each.
    pub scales: [Region; 2],
    /// Multiplies the product of a and b.
    pub scale: f32,
    /// Multiplies c.
    pub adding: f32,
}

impl Operands {
    /// All of them.
    pub fn all(&self) -> [Region; 9] {
        let [a_scale, b_scale] = self.scales;
        [self.a, self.b, self.bias, self.c, self.d, self.argument, self.workspace, a_scale, b_scale]
    }

    /// Why cuBLASLt does not multiply these operands, if that is so: since version 13 it refuses
    /// scales that are not aligned to 16 bytes.
    pub fn refused(&self) -> Option<String> {
        let scale = self.scales.iter().find(|scale| !scale.address.is_multiple_of(Product::FP8_MULTIPLE as u64))?;
        Some(format!("a scale at {:#x}, where a product of eight bits needs a multiple of 16 bytes", scale.address))
    }

    /// The form's [`Product::alignment`] for these addresses.
    pub fn alignment(&self) -> u32 {
        // What is not there has address 0. The library looks at the bias and the argument too when
        // it proposes algorithms.
        let read = [self.a, self.b, self.c, self.d, self.bias, self.argument];
        let bits = read.iter().fold(Product::ALIGNMENT as u64, |bits, region| bits | region.address);
        1 << bits.trailing_zeros()
    }
}

/// A device. Calls can come from any thread.
pub trait Driver: Send + Sync {
    /// The properties of the device.
    fn properties(&self) -> &Properties;

    /// Bytes free and in all.
    fn memory(&self) -> Result<(usize, usize)>;

    /// Memory with arbitrary contents.
    fn allocate(&self, bytes: usize) -> Result<Address>;

    /// Gives memory back once all streams are done with what they were given so far.
    fn free(&self, address: Address);

    /// Host memory that the device can copy from and to by itself.
    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8>;

    /// Gives such memory back.
    ///
    /// # Safety
    /// It came from [`Driver::allocate_pinned`], and nothing uses it any more.
    unsafe fn free_pinned(&self, data: *mut u8);

    /// A new stream.
    fn stream(&self) -> Result<Stream>;

    /// Waits until everything on the stream is done.
    ///
    /// # Errors
    /// Also those of the work itself.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// A new event that was not recorded.
    fn event(&self) -> Result<Event>;

    /// Gives an event back, which may still be waited for.
    fn destroy(&self, event: Event);

    /// Marks the end of what is on the stream now.
    fn record(&self, event: Event, stream: Stream) -> Result<()>;

    /// Lets what is put on the stream from now on wait for the mark.
    fn wait(&self, stream: Stream, event: Event) -> Result<()>;

    /// True if all work before a recorded event is done.
    ///
    /// # Errors
    /// Also those of the work itself.
    fn is_passed(&self, event: Event) -> Result<bool>;

    /// Waits on the host until the mark is passed.
    ///
    /// # Errors
    /// Also those of the work before it.
    fn wait_on_host(&self, event: Event) -> Result<()>;

    /// Seconds from one recorded mark to another, both passed.
    fn seconds_between(&self, start: Event, end: Event) -> Result<f64>;

    /// Begins to capture: what this stream is given from now on is not done, but becomes a part of
    /// a graph, with what other streams are given after they wait for an event that was recorded in
    /// the capture. Until [`Driver::end_capture`] this thread may not allocate, free or load,
    /// nobody may wait on the host for these streams or for events recorded there, they may not
    /// wait for events from outside of the capture, and nothing may be copied from or to host
    /// memory that is not pinned. What is forbidden fails, and the capture with it. (CUDA
    /// programming guide, "Stream Capture"; mode `THREAD_LOCAL`.)
    fn begin_capture(&self, stream: Stream) -> Result<()>;

    /// Ends the capture that this thread began on the stream. Every other stream in it must have
    /// been waited for.
    ///
    /// # Errors
    /// The call that made the capture invalid; the capture is over all the same.
    fn end_capture(&self, stream: Stream) -> Result<Graph>;

    /// Puts all of a graph on a stream: on the same memory, with the same arguments.
    fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<()>;

    /// Gives a graph back, whose launches are done.
    fn destroy_graph(&self, graph: Graph);

    /// Marks, in a capture, a place in the graph: each launch records the event there, for
    /// [`Driver::seconds_between`]. Unlike one that [`Driver::record`] records in a capture it
    /// orders nothing.
    fn record_in_graph(&self, event: Event, stream: Stream) -> Result<()>;

    /// Copies host memory in. It may be changed on return, unless it is pinned: then once the
    /// stream is done.
    ///
    /// # Safety
    /// `from` has as many bytes.
    unsafe fn upload(&self, stream: Stream, to: Region, from: *const u8) -> Result<()>;

    /// Copies into host memory, which is complete once the stream is done.
    ///
    /// # Safety
    /// `to` has as many bytes, and nothing else uses them until the stream is done.
    unsafe fn download(&self, stream: Stream, to: *mut u8, from: Region) -> Result<()>;

    /// Copies as many bytes as `to` has.
    fn copy(&self, stream: Stream, to: Region, from: Region) -> Result<()>;

    /// Sets every byte to zero.
    fn zero(&self, stream: Stream, to: Region) -> Result<()>;

    /// Compiles a module, or finds it compiled, and loads its kernels, in the order of
    /// `File::kernels`.
    fn load(&self, file: File, float: Float) -> Result<Vec<Function>>;

    /// Puts a kernel on a stream.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes, and what it reads and writes lies in the
    /// regions.
    unsafe fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<()>;

    /// Puts a product on a stream.
    ///
    /// # Safety
    /// The operands have the form's sizes.
    unsafe fn product(&self, stream: Stream, form: &Product, operands: &Operands) -> Result<()>;

    /// Collectives with other devices.
    ///
    /// # Errors
    /// That there is no library for it, in a sentence.
    fn nccl(&self) -> Result<&dyn Nccl>;
}
