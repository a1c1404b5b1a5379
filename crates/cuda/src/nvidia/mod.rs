//! NVIDIA's driver, through cudarc, which loads it on first use; and its libraries, which are found
//! and loaded here.
//!
//! Run on one H100 so far: see `docs/gpu.md`.

mod algorithms;
mod graph;
mod library;
mod lt;
mod nccl;
mod nvrtc;

pub use nvrtc::{Compiled, Nvrtc};

use crate::cache::Cache;
use crate::driver::{Address, Call, Driver, Event, Function, Graph, Operands, Product, Properties, Region, Stream};
use crate::error::{CudaError, Result};
use crate::find::Places;
use crate::kernels::{Argument, File, Float};
use crate::nccl::Nccl;
use cudarc::driver::result::{self as cuda, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUfunction_attribute_enum as FunctionAttribute};
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// The least version of CUDA that the driver must support.
const DRIVER_LEAST: u32 = 12000;
/// The least compute capability: the kernels use asynchronous copies and bf16 tensor cores.
const CAPABILITY_LEAST: (u32, u32) = (8, 0);

/// A GPU.
pub struct Nvidia {
    properties: Properties,
    context: sys::CUcontext,
    nvrtc: Nvrtc,
    lt: lt::Lt,
    /// Loaded when it is first asked for.
    nccl: OnceLock<Result<nccl::OnDevice>>,
    cache: Cache,
    /// Compiles one module at a time.
    loading: Mutex<()>,
}

// SAFETY: contexts, streams, events and functions of the driver may be used from any thread; the
// library's plans stand behind a lock.
unsafe impl Send for Nvidia {}
// SAFETY: as above.
unsafe impl Sync for Nvidia {}

/// A call's status as an error.
fn called<T>(call: &'static str, result: Result<T, DriverError>) -> Result<T> {
    result.map_err(|error| {
        let hint = match error.0 {
            sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS | sys::CUresult::CUDA_ERROR_LAUNCH_FAILED => {
                ": a kernel that was launched before failed; CUDA_LAUNCH_BLOCKING=1 shows which"
            }
            sys::CUresult::CUDA_ERROR_NO_DEVICE => ": no GPU is visible to this process",
            sys::CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
                ": the driver's library and its kernel module differ in version; restart the machine after an update"
            }
            _ => "",
        };
        CudaError::Call { call, code: format!("{:?}", error.0), hint }
    })
}

fn version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

impl Nvidia {
    /// GPU `ordinal` of those that the process sees, not opened yet.
    ///
    /// # Errors
    /// The thing that is lacking, in a sentence: the driver, the GPU, or a newer one.
    pub fn find(ordinal: usize) -> Result<(sys::CUdevice, Properties)> {
        // SAFETY: only asks the loader.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        called("cuInit", cuda::init())?;
        let mut driver_version = 0;
        // SAFETY: writes one int.
        called("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut driver_version) }.result())?;
        let driver_version = driver_version as u32;
        if driver_version < DRIVER_LEAST {
            return Err(CudaError::OldDriver { found: version(driver_version), needed: version(DRIVER_LEAST) });
        }
        let count = called("cuDeviceGetCount", cuda::device::get_count())? as usize;
        if ordinal >= count {
            let present = if count == 1 { "1 GPU is".to_owned() } else { format!("{count} GPUs are") };
            let visible = std::env::var("CUDA_VISIBLE_DEVICES");
            let visible = visible.map_or(String::new(), |value| format!(" (CUDA_VISIBLE_DEVICES is {value:?})"));
            return Err(CudaError::NoDevice { asked: ordinal, present, visible });
        }
        let device = called("cuDeviceGet", cuda::device::get(ordinal as i32))?;
        let properties = properties(device, ordinal, driver_version)?;
        if properties.capability < CAPABILITY_LEAST {
            let text = |(major, minor)| format!("{major}.{minor}");
            let (found, needed) = (text(properties.capability), text(CAPABILITY_LEAST));
            return Err(CudaError::OldDevice { device: properties.name, found, needed });
        }
        Ok((device, properties))
    }

    /// The UUID of GPU `ordinal`.
    ///
    /// # Errors
    /// As [`Nvidia::find`].
    pub fn identity(ordinal: usize) -> Result<[u8; 16]> {
        let (device, _) = Nvidia::find(ordinal)?;
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the device exists; writes one.
        called("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) }.result())?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// GPUs that the process sees; 0 where there is no driver, or one that does not start.
    pub fn count() -> usize {
        // SAFETY: only asks the loader.
        let present = unsafe { sys::is_culib_present() };
        let count = || cuda::init().and_then(|()| cuda::device::get_count());
        if present { count().map_or(0, |count| count as usize) } else { 0 }
    }

    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// As [`Nvidia::find`], and NVRTC or cuBLASLt that are not found.
    pub fn open(ordinal: usize) -> Result<Nvidia> {
        let (device, properties) = Nvidia::find(ordinal)?;
        let driver_version = properties.driver_version;
        let (places, major) = (Places::of_this_process(), driver_version / 1000);
        let nvrtc = Nvrtc::open(&places, major)?;
        // SAFETY: the device exists; the context is kept for the life of the process.
        let context = called("cuDevicePrimaryCtxRetain", unsafe { cuda::primary_ctx::retain(device) })?;
        // SAFETY: just retained.
        called("cuCtxSetCurrent", unsafe { cuda::ctx::set_current(context) })?;
        let cache = Cache::of_this_process();
        let lt = lt::Lt::open(&places, major, properties.name.clone(), cache.clone())?;
        Ok(Nvidia { properties, context, nvrtc, lt, nccl: OnceLock::new(), cache, loading: Mutex::new(()) })
    }

    /// The libraries that were loaded, with their versions.
    pub fn libraries(&self) -> Vec<(&'static str, String)> {
        vec![("NVRTC", self.nvrtc.version()), ("cuBLASLt", self.lt.version())]
    }

    /// Compiles every module for this GPU on all cores of the host, so that nothing waits for it
    /// later; how many were not in the cache yet.
    ///
    /// # Errors
    /// A module that does not compile.
    pub fn precompile(&self) -> Result<usize> {
        let modules = File::ALL.into_iter().flat_map(|file| Float::ALL.map(|float| (file, float)));
        let architecture = self.properties.architecture();
        let here = |(file, float): &(File, Float)| file.supports(*float) && file.runs_on(&architecture);
        let modules: Vec<(File, Float)> = modules.filter(here).collect();
        let (next, missing) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || -> Result<()> {
            while let Some((file, float)) = modules.get(next.fetch_add(1, Ordering::Relaxed)) {
                if self.cache.get(&self.key(*file, *float)).is_none() {
                    missing.fetch_add(1, Ordering::Relaxed);
                    self.image(*file, *float)?;
                }
            }
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().expect("compiling does not panic")).collect()
        });
        results.into_iter().collect::<Result<()>>()?;
        Ok(missing.into_inner())
    }

    /// The key of a module's machine code: everything that it depends on.
    fn key(&self, file: File, float: Float) -> String {
        let (architecture, source) = (self.properties.architecture(), file.source(float));
        format!("{architecture} {} {} {source}", self.nvrtc.version(), self.properties.driver_version)
    }

    /// Makes the context that of this thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained as long as this lives.
        called("cuCtxSetCurrent", unsafe { cuda::ctx::set_current(self.context) })
    }

    /// Machine code of a module.
    fn image(&self, file: File, float: Float) -> Result<Vec<u8>> {
        let key = self.key(file, float);
        if let Some(image) = self.cache.get(&key) {
            return Ok(image);
        }
        let architecture = self.properties.architecture();
        let image = self.nvrtc.compile(file.name(), &file.source(float), &architecture)?.image;
        // What cannot be kept is compiled again next time.
        self.cache.put(&key, &image).ok();
        Ok(image)
    }
}

/// The version of NCCL that would be loaded.
///
/// # Errors
/// That it is not found or too old.
pub fn nccl_version() -> Result<u32> {
    nccl::Library::open(&Places::of_this_process()).map(|library| library.version())
}

fn properties(device: sys::CUdevice, ordinal: usize, driver_version: u32) -> Result<Properties> {
    let attribute = |attribute| -> Result<u32> {
        // SAFETY: the device exists.
        Ok(called("cuDeviceGetAttribute", unsafe { cuda::device::get_attribute(device, attribute) })? as u32)
    };
    Ok(Properties {
        name: called("cuDeviceGetName", cuda::device::get_name(device))?,
        ordinal,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_max: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        // SAFETY: the device exists.
        memory: called("cuDeviceTotalMem", unsafe { cuda::device::total_mem(device) })?,
        driver_version,
    })
}

/// Handles are numbers here: the driver's own.
fn stream_of(stream: Stream) -> sys::CUstream {
    stream.0 as sys::CUstream
}

fn event_of(event: Event) -> sys::CUevent {
    event.0 as sys::CUevent
}

impl Driver for Nvidia {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        called("cuMemGetInfo", cuda::mem_get_info())
    }

    fn allocate(&self, bytes: usize) -> Result<Address> {
        self.enter()?;
        // SAFETY: a size, in the context of this thread.
        match unsafe { cuda::malloc_sync(bytes) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let (free, total) = self.memory()?;
                Err(CudaError::OutOfMemory { bytes, free, total })
            }
            other => called("cuMemAlloc", other),
        }
    }

    fn free(&self, address: Address) {
        // Freeing waits for the device; an error here is one of work before, which its own waiting
        // tells.
        if self.enter().is_ok() && cuda::ctx::synchronize().is_ok() {
            // SAFETY: it was allocated here, and nothing works on it any more.
            unsafe { cuda::free_sync(address) }.ok();
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        self.enter()?;
        // SAFETY: a size, in the context of this thread.
        Ok(called("cuMemHostAlloc", unsafe { cuda::malloc_host(bytes, 0) })?.cast())
    }

    unsafe fn free_pinned(&self, data: *mut u8) {
        if self.enter().is_ok() {
            // SAFETY: the caller's promise.
            unsafe { cuda::free_host(data.cast::<c_void>()) }.ok();
        }
    }

    fn stream(&self) -> Result<Stream> {
        self.enter()?;
        let stream = called("cuStreamCreate", cuda::stream::create(cuda::stream::StreamKind::NonBlocking))?;
        Ok(Stream(stream as usize))
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.enter()?;
        // SAFETY: streams live as long as the device.
        called("cuStreamSynchronize", unsafe { cuda::stream::synchronize(stream_of(stream)) })
    }

    fn event(&self) -> Result<Event> {
        self.enter()?;
        let event = called("cuEventCreate", cuda::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        Ok(Event(event as usize))
    }

    fn destroy(&self, event: Event) {
        if self.enter().is_ok() {
            // SAFETY: it was created here and is given back once.
            unsafe { cuda::event::destroy(event_of(event)) }.ok();
        }
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        self.enter()?;
        // SAFETY: both exist.
        called("cuEventRecord", unsafe { cuda::event::record(event_of(event), stream_of(stream)) })
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both exist.
        called("cuStreamWaitEvent", unsafe { cuda::stream::wait_event(stream_of(stream), event_of(event), flags) })
    }

    fn begin_capture(&self, stream: Stream) -> Result<()> {
        self.enter()?;
        graph::begin(stream)
    }

    fn end_capture(&self, stream: Stream) -> Result<Graph> {
        self.enter()?;
        graph::end(stream)
    }

    fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<()> {
        self.enter()?;
        graph::launch(stream, graph)
    }

    fn destroy_graph(&self, graph: Graph) {
        if self.enter().is_ok() {
            graph::destroy(graph);
        }
    }

    fn record_in_graph(&self, event: Event, stream: Stream) -> Result<()> {
        self.enter()?;
        graph::record(event, stream)
    }

    fn is_passed(&self, event: Event) -> Result<bool> {
        self.enter()?;
        // SAFETY: it exists.
        match unsafe { cuda::event::query(event_of(event)) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            other => called("cuEventQuery", other).map(|()| true),
        }
    }

    fn wait_on_host(&self, event: Event) -> Result<()> {
        self.enter()?;
        // SAFETY: the event exists.
        called("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event_of(event)) }.result())
    }

    fn seconds_between(&self, start: Event, end: Event) -> Result<f64> {
        self.enter()?;
        // SAFETY: both exist.
        let milliseconds = unsafe { cuda::event::elapsed(event_of(start), event_of(end)) };
        Ok(f64::from(called("cuEventElapsedTime", milliseconds)?) / 1e3)
    }

    unsafe fn upload(&self, stream: Stream, to: Region, from: *const u8) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller's promise. Memory that is not pinned has been read when the call
        // returns.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to.address, from.cast(), to.bytes, stream_of(stream)) };
        called("cuMemcpyHtoDAsync", copied.result())
    }

    unsafe fn download(&self, stream: Stream, to: *mut u8, from: Region) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller's promise.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from.address, from.bytes, stream_of(stream)) };
        called("cuMemcpyDtoHAsync", copied.result())
    }

    fn copy(&self, stream: Stream, to: Region, from: Region) -> Result<()> {
        self.enter()?;
        // SAFETY: regions of tensors, which lie in the device's memory.
        let copied = unsafe { cuda::memcpy_dtod_async(to.address, from.address, to.bytes, stream_of(stream)) };
        called("cuMemcpyDtoDAsync", copied)
    }

    fn zero(&self, stream: Stream, to: Region) -> Result<()> {
        if to.bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: as above.
        called("cuMemsetD8Async", unsafe { cuda::memset_d8_async(to.address, 0, to.bytes, stream_of(stream)) })
    }

    fn load(&self, file: File, float: Float) -> Result<Vec<Function>> {
        let _one_at_a_time = self.loading.lock();
        self.enter()?;
        let image = self.image(file, float)?;
        // SAFETY: machine code of NVRTC for this device; modules stay loaded.
        let module = called("cuModuleLoadData", unsafe { cuda::module::load_data(image.as_ptr().cast()) })?;
        let load = |name: &str| -> Result<Function> {
            let symbol = CString::new(name).expect("names of kernels have no NUL");
            // SAFETY: the module is loaded.
            let function = called("cuModuleGetFunction", unsafe { cuda::module::get_function(module, symbol) })?;
            let shared = FunctionAttribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            let fixed =
                called("cuFuncGetAttribute", unsafe { cuda::function::get_function_attribute(function, shared) })?;
            let dynamic = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let most = self.properties.shared_max as i32 - fixed;
            // SAFETY: as above.
            let set = unsafe { cuda::function::set_function_attribute(function, dynamic, most) };
            called("cuFuncSetAttribute", set)?;
            Ok(Function(function as usize))
        };
        file.kernels().map(|kernel| load(kernel.name)).collect()
    }

    unsafe fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<()> {
        self.enter()?;
        let [x, y, z] = call.launch.grid;
        if y > 65_535 || z > 65_535 {
            let what = format!("a grid of {x} x {y} x {z} blocks; the second and third are at most 65535");
            return Err(CudaError::Launch { kernel: call.name.to_owned(), what });
        }
        let mut addresses: Vec<*mut c_void> = call.arguments.iter().map(|a| Argument::address(a).cast_mut()).collect();
        let (function, block) = (call.function.0 as sys::CUfunction, (call.launch.block, 1, 1));
        let (stream, shared) = (stream_of(stream), call.launch.shared);
        // SAFETY: the caller's promise; the driver reads the arguments before it returns.
        let launched = unsafe { cuda::launch_kernel(function, (x, y, z), block, shared, stream, &mut addresses) };
        let named = |error: CudaError| CudaError::Launch { kernel: call.name.to_owned(), what: error.to_string() };
        called("cuLaunchKernel", launched).map_err(named)
    }

    unsafe fn product(&self, stream: Stream, form: &Product, operands: &Operands) -> Result<()> {
        if let Some(what) = form.refused(self.properties.capability).or_else(|| operands.refused()) {
            return Err(CudaError::Product { product: format!("{form:?}"), what });
        }
        self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.lt.product(self, stream, form, operands) }
    }

    fn nccl(&self) -> Result<&dyn Nccl> {
        self.nccl.get_or_init(|| self.load_nccl()).as_ref().map(|nccl| nccl as &dyn Nccl).map_err(Clone::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Activation, Precision};

    /// A plain product.
    pub fn form() -> Product {
        Product {
            m: 2,
            n: 3,
            k: 4,
            a_transposed: false,
            b_transposed: true,
            operands: Float::Bf16,
            fp8: None,
            result: Float::Bf16,
            precision: Precision::Full,
            bias: false,
            activation: Activation::None,
            keeps_argument: false,
            adds: false,
            batch: 1,
            alignment: Product::ALIGNMENT,
        }
    }

    #[test]
    fn a_machine_without_a_driver_gets_a_sentence() {
        // SAFETY: only asks the loader.
        if unsafe { sys::is_culib_present() } {
            return trainyard_testing::skip("this machine has NVIDIA's driver");
        }
        let error = Nvidia::open(0).err().expect("no driver").to_string();
        assert!(error.contains("no NVIDIA driver here") && error.contains("device=cpu"), "{error}");
    }

    #[test]
    fn a_missing_library_says_where_it_was_looked_for() {
        let nowhere = crate::find::Library { stem: "trainyard-is-no-such-library", ..crate::find::CUBLASLT };
        let error = library::Loaded::open(&nowhere, &Places::default(), 12).err().expect("no such library").to_string();
        assert!(
            error.starts_with("cuBLASLt is not found; it was looked for in no CUDA_HOME; the loader's path"),
            "{error}"
        );
        assert!(error.contains("Python package nvidia-cublas"), "{error}");
    }
}
