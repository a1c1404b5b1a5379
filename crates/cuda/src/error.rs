//! The errors of a CUDA device, in sentences that say what to do.

/// An error of the device, its driver or its libraries.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "no NVIDIA driver here (libcuda.so.1 is not found): run on the processor (device=cpu), or \
         install the driver of the GPU"
    )]
    NoDriver,
    /// The driver is older than the calls that are made.
    #[error("the NVIDIA driver supports CUDA {found}, and {needed} is the least that is needed: update the driver")]
    OldDriver {
        /// Version that the driver supports, `major.minor`.
        found: String,
        /// Version that is needed.
        needed: String,
    },
    /// There are fewer devices.
    #[error("there is no GPU {asked}: {present} visible to this process{visible}")]
    NoDevice {
        /// Index that was asked for, from 0.
        asked: usize,
        /// `1 GPU is` or `2 GPUs are`.
        present: String,
        /// Value of `CUDA_VISIBLE_DEVICES`, if it is set.
        visible: String,
    },
    /// The device is too old for the kernels.
    #[error("{device} has compute capability {found}, and the kernels need at least {needed} (Ampere)")]
    OldDevice {
        /// Its name.
        device: String,
        /// Its capability, `major.minor`.
        found: String,
        /// The least.
        needed: String,
    },
    /// A library is missing.
    #[error(
        "{library} is not found; it was looked for in {looked}. It comes {shipped} and with \
         the Python package {package} (activate its environment, or set VIRTUAL_ENV)"
    )]
    NoLibrary {
        /// Name of the library: `NVRTC`.
        library: &'static str,
        /// Where.
        looked: String,
        /// Its package on PyPI.
        package: &'static str,
        /// Its other sources.
        shipped: &'static str,
    },
    /// A library is older than the calls that are made.
    #[error("{path} is {library} {found}, and {needed} is the least that is needed: update it")]
    OldLibrary {
        /// Name of the library.
        library: &'static str,
        /// Where it was found.
        path: String,
        /// Its version.
        found: String,
        /// The least.
        needed: String,
    },
    /// A library lacks a function, which a newer one has.
    #[error("{path} has no function {symbol}: it is too old")]
    NoSymbol {
        /// The library.
        path: String,
        /// The function.
        symbol: String,
    },
    /// The device has not enough memory left.
    #[error("the GPU has no {bytes} bytes left: {free} of {total} are free")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes free on the device, for all processes.
        free: usize,
        /// Bytes of the device.
        total: usize,
    },
    /// A call of the driver or of a library failed.
    #[error("{call} failed: {code}{hint}")]
    Call {
        /// The call.
        call: &'static str,
        /// Its status by name.
        code: String,
        /// Explanation; may be empty.
        hint: &'static str,
    },
    /// Kernels do not compile.
    #[error("NVRTC refuses {source_name} for {architecture}:\n{log}")]
    Compile {
        /// The source file.
        source_name: String,
        /// `sm_90a`.
        architecture: String,
        /// Messages of the compiler.
        log: String,
    },
    /// A launch that the device cannot make.
    #[error("kernel {kernel}: {what}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// The fault.
        what: String,
    },
    /// A product that the library does not have.
    #[error("no algorithm for the product {product}: {what}")]
    Product {
        /// The product.
        product: String,
        /// Why.
        what: String,
    },
}

/// The result of something that a device was asked.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;
