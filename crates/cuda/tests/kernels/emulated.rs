//! Compiles modules by the host's C++ compiler, loads them, and launches kernels on emulated blocks (`emulation/cuda.h`).
//!
//! Buffers stand between guards that a kernel must leave alone, and reading beyond an input gives NaN. Every case runs in both orders of threads, which must
//! give the same bits.

use std::cell::Cell;
use std::path::Path;
use std::sync::OnceLock;

use libloading::Library;
use trainyard_cuda::emulated::{self, Emulated};
use trainyard_cuda::kernels::{Argument, Float, Kernel, Launch};
use trainyard_tensor::{DType, Element, Scalar};

/// `T` of the sources for a Rust type; f32 for what no kernel takes as `T`.
pub fn float<T: Scalar>() -> Float {
    match T::DTYPE {
        DType::BF16 => Float::Bf16,
        DType::F16 => Float::F16,
        _ => Float::F32,
    }
}

/// The modules, in the target folder.
fn emulated() -> &'static Emulated {
    static EMULATED: OnceLock<Emulated> = OnceLock::new();
    EMULATED.get_or_init(|| {
        Emulated::new(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated")).expect(
            "the kernels are tested by the host's C++ compiler, and none of $CXX, c++, g++, clang++ runs: install one (on Debian: apt-get install g++)",
        )
    })
}

/// Loads kernels that are no part of the table, to test the emulation itself.
pub fn load(name: &str, text: &str, kernels: &[&str]) -> Library {
    emulated().load(name, text, kernels).unwrap()
}

thread_local! {
    static FALLING: Cell<bool> = const { Cell::new(false) };
}

/// Runs a case with threads in rising and in falling order, asserts that both give the same bits, and returns the result.
pub fn both_orders<R: PartialEq>(case: impl Fn() -> R) -> R {
    FALLING.set(false);
    let rising = case();
    FALLING.set(true);
    let falling = case();
    FALLING.set(false);
    assert!(
        rising == falling,
        "the order of threads changes the result: a barrier is missing, or the order of a sum is not fixed"
    );
    rising
}

/// Launches a kernel of the module for `float` on work of these sizes.
pub fn launch(kernel: &Kernel, float: Float, sizes: [usize; 3], arguments: &[Argument]) {
    kernel.check(arguments).unwrap();
    let Some(size) = kernel.rule.launch(sizes) else { return };
    run(&emulated().module(kernel.file, float).unwrap(), kernel.name, size, arguments);
}

/// Runs a kernel of a loaded module. The arguments are those of the kernel, and what they point to is as large as it takes it to be.
pub fn run(library: &Library, kernel: &str, size: Launch, arguments: &[Argument]) {
    type Order = extern "C" fn(i32);
    // SAFETY: of kernels in the table `check` has compared the arguments' types with the parameters'; what the pointers point to is as large as the table
    // says, which the tests' guards watch.
    unsafe {
        library.get::<Order>(b"emulation_order").unwrap()(i32::from(FALLING.get()));
        emulated::launch(library, kernel, size, arguments).unwrap();
    }
}

/// Bytes before and after each buffer.
const GUARD: usize = 256;
/// Bits of NaN in every float type.
const FILL: u8 = 0xff;

/// Memory of a kernel: elements between guards, aligned to 64 bytes and then moved on by `shift` elements.
pub struct Buffer<T> {
    bytes: Vec<u8>,
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
        let bytes = vec![FILL; size + 2 * GUARD + 128];
        let first = (bytes.as_ptr() as usize + GUARD).next_multiple_of(64) - bytes.as_ptr() as usize;
        let mut buffer =
            Buffer { bytes, first: first + shift * size_of::<T>(), len: data.len(), element: std::marker::PhantomData };
        buffer.bytes[buffer.first..buffer.first + size].copy_from_slice(bytemuck::cast_slice(data));
        buffer
    }

    /// `len` elements of NaN.
    pub fn empty(len: usize) -> Buffer<T> {
        Buffer::new(&vec![bytemuck::pod_read_unaligned(&[FILL; 16][..size_of::<T>()]); len])
    }

    /// Its address.
    pub fn at(&self) -> Argument {
        Argument::Pointer(self.bytes.as_ptr() as u64 + self.first as u64)
    }

    /// What it holds, after a look at the guards.
    pub fn get(&self) -> Vec<T> {
        let last = self.first + self.len * size_of::<T>();
        let intact = self.bytes[..self.first].iter().chain(&self.bytes[last..]).all(|byte| *byte == FILL);
        assert!(intact, "a kernel wrote beyond a buffer of {} elements", self.len);
        self.bytes[self.first..last].chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
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

/// Asserts `|got - want| <= roundoff |want| + slack`, elementwise, as the suite of the CPU does; half the smallest subnormal of f16 is always allowed.
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
