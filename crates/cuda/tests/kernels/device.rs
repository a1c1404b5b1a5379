//! Launches kernels on the device under test ([`trainyard_cuda::tested`]): emulated blocks
//! (`emulation/cuda.h`) on the fake driver, or a GPU.
//!
//! Buffers lie between guards that a kernel must not change, and reading beyond an input gives NaN.
//! Emulated cases run twice, in both orders of threads, which must give the same bits.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use libloading::Library;
use trainyard_cuda::driver::{Address, Call, Function, Region, Stream};
use trainyard_cuda::emulated;
use trainyard_cuda::kernels::{Argument, File, Float, Kernel, Launch};
use trainyard_cuda::tested::{self, Tested};
use trainyard_tensor::{DType, Element, Scalar};

/// `T` of the sources for a Rust type; f32 for what no kernel takes as `T`.
pub fn float<T: Scalar>() -> Float {
    match T::DTYPE {
        DType::BF16 => Float::Bf16,
        DType::F16 => Float::F16,
        _ => Float::F32,
    }
}

/// Where emulated modules are compiled.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated")
}

/// The device as a test's thread has it: a stream, and the modules that it loaded.
struct OfThread {
    tested: Tested,
    stream: Stream,
    functions: RefCell<BTreeMap<(File, Float), Vec<Function>>>,
}

thread_local! {
    static DEVICE: OnceCell<OfThread> = const { OnceCell::new() };
}

impl OfThread {
    fn new(tested: Result<Tested, String>) -> OfThread {
        let tested = tested.unwrap_or_else(|problem| panic!("{problem}"));
        let stream = tested.driver.stream().unwrap();
        OfThread { tested, stream, functions: RefCell::default() }
    }

    fn function(&self, kernel: &Kernel, float: Float) -> Function {
        let mut functions = self.functions.borrow_mut();
        let load = || self.tested.driver.load(kernel.file, float).unwrap();
        let all = functions.entry((kernel.file, float)).or_insert_with(load);
        all[kernel.file.kernels().position(|other| other.name == kernel.name).expect("a kernel of its file")]
    }
}

fn on<R>(f: impl FnOnce(&OfThread) -> R) -> R {
    DEVICE.with(|device| f(device.get_or_init(|| OfThread::new(Tested::new(&folder(), 0)))))
}

/// True if the device has Hopper's instructions, as the emulation does.
pub fn on_hopper() -> bool {
    on(|device| device.tested.driver.properties().architecture() == "sm_90a")
}

/// Loads kernels that are no part of the table, to test the emulation itself, which this thread
/// uses from now on.
pub fn load(name: &str, text: &str, kernels: &[&str]) -> Library {
    DEVICE.with(|device| {
        let used = device.get_or_init(|| OfThread::new(Tested::emulated(&folder(), 0)));
        assert!(used.tested.fake.is_some(), "a GPU has no emulation to test");
    });
    tested::kernels(&folder()).unwrap().load(name, text, kernels).unwrap()
}

/// Runs a case twice, emulated with threads in rising and in falling order, asserts that both give
/// the same bits, and returns the result.
pub fn both_orders<R: PartialEq>(case: impl Fn() -> R) -> R {
    emulated::set_falling(false);
    let rising = case();
    emulated::set_falling(true);
    let falling = case();
    emulated::set_falling(false);
    assert!(
        rising == falling,
        "the order of threads changes the result: a barrier is missing, or the order of a sum is not fixed"
    );
    rising
}

/// Launches a kernel of the module for `float` on work of these sizes.
pub fn launch(kernel: &Kernel, float: Float, sizes: [usize; 3], arguments: &[Argument]) {
    kernel.check(arguments).unwrap();
    let Some(launch) = kernel.rule.launch(sizes) else { return };
    on(|device| {
        let call =
            Call { function: device.function(kernel, float), name: kernel.name, launch, arguments, regions: &[] };
        // SAFETY: `check` has compared the arguments' types with the parameters'; what the pointers
        // point to is as large as the table says, which the tests' guards watch.
        unsafe { device.tested.driver.launch(device.stream, &call) }.unwrap();
    });
}

/// Runs a kernel of a loaded module, of the emulation. The arguments are those of the kernel, and
/// what they point to is as large as it takes it to be.
pub fn run(library: &Library, kernel: &str, size: Launch, arguments: &[Argument]) {
    // What buffers hold is on its way.
    on(|device| device.tested.driver.synchronize(device.stream)).unwrap();
    // SAFETY: the tests of the emulation give what their kernels take.
    unsafe { emulated::launch(library, kernel, size, arguments) }.unwrap();
}

/// Bytes before and after each buffer.
const GUARD: usize = 256;
/// Bits of NaN in every float type.
const FILL: u8 = 0xff;

/// Memory of a kernel: elements between guards, aligned to 64 bytes and then moved on by `shift`
/// elements.
pub struct Buffer<T> {
    memory: Region,
    first: usize,
    len: usize,
    element: std::marker::PhantomData<T>,
}

impl<T: bytemuck::Pod> Buffer<T> {
    /// A copy of `data`.
    pub fn new(data: &[T]) -> Buffer<T> {
        Buffer::shifted(data, 0)
    }

    /// A copy of `data` that starts `shift` elements after a multiple of 64 bytes.
    pub fn shifted(data: &[T], shift: usize) -> Buffer<T> {
        let size = size_of_val(data);
        let mut bytes = vec![FILL; size + 2 * GUARD + 128];
        on(|device| {
            let address: Address = device.tested.driver.allocate(bytes.len()).unwrap();
            let first = (address as usize + GUARD).next_multiple_of(64) - address as usize + shift * size_of::<T>();
            bytes[first..first + size].copy_from_slice(bytemuck::cast_slice(data));
            let memory = Region { address, bytes: bytes.len(), written: true };
            // SAFETY: as many bytes, which are read before this returns.
            unsafe { device.tested.driver.upload(device.stream, memory, bytes.as_ptr()) }.unwrap();
            Buffer { memory, first, len: data.len(), element: std::marker::PhantomData }
        })
    }

    /// `len` elements of NaN.
    pub fn empty(len: usize) -> Buffer<T> {
        Buffer::new(&vec![bytemuck::pod_read_unaligned(&[FILL; 16][..size_of::<T>()]); len])
    }

    /// Its address.
    pub fn at(&self) -> Argument {
        Argument::Pointer(self.memory.address + self.first as u64)
    }

    /// The address of one of its elements.
    pub fn at_element(&self, element: usize) -> Argument {
        Argument::Pointer(self.memory.address + (self.first + element * size_of::<T>()) as u64)
    }

    /// The contents once all launched work is done, after a check of the guards.
    pub fn get(&self) -> Vec<T> {
        let mut bytes = vec![0; self.memory.bytes];
        on(|device| {
            let from = Region { written: false, ..self.memory };
            // SAFETY: as many bytes, which nobody looks at before the stream is done.
            unsafe { device.tested.driver.download(device.stream, bytes.as_mut_ptr(), from) }.unwrap();
            device.tested.driver.synchronize(device.stream).unwrap();
            assert_eq!(device.tested.problems(), [""; 0]);
        });
        let last = self.first + self.len * size_of::<T>();
        let intact = bytes[..self.first].iter().chain(&bytes[last..]).all(|byte| *byte == FILL);
        assert!(intact, "a kernel wrote beyond a buffer of {} elements", self.len);
        bytes[self.first..last].chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        on(|device| device.tested.driver.free(self.memory.address));
    }
}

/// The null pointer.
pub const NULL: Argument = Argument::Pointer(0);

/// Pseudo-random numbers in `[-1, 1)`, as `T`, from a linear congruential generator.
pub fn values<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::from_f32((state >> 40) as f32 / 8_388_608.0 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

/// As f64.
pub fn wide<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// The unit roundoff of f32.
pub const ULP: f64 = 1.0 / 16_777_216.0;

/// The unit roundoff of a dtype.
pub fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => ULP,
    }
}

/// Asserts `|got - want| <= roundoff |want| + slack`, elementwise, as the suite of the CPU does;
/// half the smallest subnormal of f16 is always allowed.
#[track_caller]
pub fn close<T: Element>(what: &str, got: &[T], want: &[f64], slack: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let u = roundoff(T::DTYPE) * 1.0001;
    let least = if T::DTYPE == DType::F16 { 3e-8 } else { 1e-38 };
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(got.to_f32()) - want).abs();
        let bound = u * want.abs() + slack + least;
        assert!(off <= bound, "{} {what}[{i}]: {got:?} against {want}, off by {off:e} of {bound:e}", T::DTYPE);
    }
}

/// Declares a test that runs its body with `T` as each float dtype.
macro_rules! dtypes {
    ($(#[$meta:meta])* fn $name:ident<$t:ident>() $body:block) => {
        $(#[$meta])*
        #[test]
        fn $name() {
            fn body<$t: trainyard_tensor::Element>() $body
            body::<f32>();
            body::<trainyard_tensor::bf16>();
            body::<trainyard_tensor::f16>();
        }
    };
}
pub(crate) use dtypes;
