//! Collectives by NCCL. Communicators are non-blocking: a call only begins its operation, and the
//! communicator's state says when it is done. The caller can therefore apply deadlines of its own.

use super::library::Loaded;
use super::{Nvidia, called};
use crate::driver::Stream;
use crate::error::{CudaError, Result};
use crate::find::{NCCL, Places};
use crate::nccl::{Comm, Element, Exchange, Nccl, State, UniqueId};
use cudarc::driver::{result as cuda, sys};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// The least version: from 2.18 on the layout of [`Config`] is as here, and later versions take it
/// as it is.
const LEAST: u32 = 21_800;

type Status = c_int;
type Handle = *mut c_void;
type Queue = sys::CUstream;

// Of nccl.h.
const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;
const INT8: c_int = 0;
const FLOAT32: c_int = 7;
const BFLOAT16: c_int = 9;
const SUM: c_int = 0;
const MAGIC: c_uint = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;

/// `ncclConfig_t` of [`LEAST`].
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    ctas_min: c_int,
    ctas_max: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    fn non_blocking() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: LEAST,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            ctas_min: UNDEFINED,
            ctas_max: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; 128]);

type ToAndFrom = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, Queue) -> Status;
type Reduction = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Queue) -> Status;
type OfComm = unsafe extern "C" fn(Handle) -> Status;
type OfGroup = unsafe extern "C" fn() -> Status;

struct Functions {
    unique_id: unsafe extern "C" fn(*mut Id) -> Status,
    init: unsafe extern "C" fn(*mut Handle, c_int, Id, c_int, *mut Config) -> Status,
    async_error: unsafe extern "C" fn(Handle, *mut Status) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
    finalize: OfComm,
    destroy: OfComm,
    abort: OfComm,
    group_start: OfGroup,
    group_end: OfGroup,
    all_reduce: Reduction,
    reduce_scatter: Reduction,
    all_gather: ToAndFrom,
    broadcast: Reduction,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Queue) -> Status,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Queue) -> Status,
}

/// NCCL, loaded.
pub struct Library {
    functions: Functions,
    version: u32,
    /// Keeps the functions where they are.
    _library: Loaded,
}

impl Library {
    /// Finds and loads it.
    pub fn open(places: &Places) -> Result<Library> {
        Library::of(Loaded::open(&NCCL, places, u32::MAX)?)
    }

    /// The functions of a library that was loaded.
    fn of(library: Loaded) -> Result<Library> {
        let mut version: c_int = 0;
        // SAFETY: the types are those of nccl.h, the same in every version from LEAST on.
        unsafe {
            let get: unsafe extern "C" fn(*mut c_int) -> Status = library.function("ncclGetVersion")?;
            get(&mut version);
            let version = version as u32;
            if version < LEAST {
                let (found, needed) = (text(version), text(LEAST));
                return Err(CudaError::OldLibrary { library: NCCL.name, path: library.path(), found, needed });
            }
            let functions = Functions {
                unique_id: library.function("ncclGetUniqueId")?,
                init: library.function("ncclCommInitRankConfig")?,
                async_error: library.function("ncclCommGetAsyncError")?,
                error_string: library.function("ncclGetErrorString")?,
                last_error: library.function("ncclGetLastError")?,
                finalize: library.function("ncclCommFinalize")?,
                destroy: library.function("ncclCommDestroy")?,
                abort: library.function("ncclCommAbort")?,
                group_start: library.function("ncclGroupStart")?,
                group_end: library.function("ncclGroupEnd")?,
                all_reduce: library.function("ncclAllReduce")?,
                reduce_scatter: library.function("ncclReduceScatter")?,
                all_gather: library.function("ncclAllGather")?,
                broadcast: library.function("ncclBroadcast")?,
                send: library.function("ncclSend")?,
                receive: library.function("ncclRecv")?,
            };
            Ok(Library { functions, version, _library: library })
        }
    }

    /// 10000 major + 100 minor + patch.
    pub fn version(&self) -> u32 {
        self.version
    }

    fn called(&self, call: &'static str, status: Status) -> Result<()> {
        match status {
            SUCCESS | IN_PROGRESS => Ok(()),
            status => Err(CudaError::Call { call, code: self.words(status), hint: "" }),
        }
    }

    fn words(&self, status: Status) -> String {
        // SAFETY: the library's own text, which lives as long as it, for every number.
        let words = unsafe { CStr::from_ptr((self.functions.error_string)(status)) };
        words.to_string_lossy().into_owned()
    }

    /// Its last message; empty if there was none.
    fn said_last(&self, comm: Handle) -> String {
        // SAFETY: a communicator, and a text of the library's own.
        let said = unsafe { (self.functions.last_error)(comm) };
        if said.is_null() {
            return String::new();
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(said) }.to_string_lossy().trim().to_owned()
    }
}

/// `2.18.0`
fn text(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// NCCL on one GPU.
pub struct OnDevice {
    library: Library,
    context: sys::CUcontext,
}

// SAFETY: contexts may be used from any thread; calls on one communicator are made one at a time,
// as the trait asks.
unsafe impl Send for OnDevice {}
// SAFETY: as above.
unsafe impl Sync for OnDevice {}

impl Nvidia {
    /// NCCL in this GPU's context.
    pub(super) fn load_nccl(&self) -> Result<OnDevice> {
        Ok(OnDevice { library: Library::open(&Places::of_this_process())?, context: self.context })
    }
}

impl OnDevice {
    fn enter(&self) -> Result<()> {
        // SAFETY: the driver that owns this keeps the context.
        called("cuCtxSetCurrent", unsafe { cuda::ctx::set_current(self.context) })
    }

    fn put(&self, comm: Handle, stream: Queue, exchange: &Exchange) -> Result<()> {
        let f = &self.library.functions;
        let dtype = |element| match element {
            Element::F32 => FLOAT32,
            Element::Bf16 => BFLOAT16,
        };
        let pointer = |address: u64| address as *mut c_void;
        // SAFETY: regions of tensors, which lie in the device's memory and are as long as the call
        // takes them to be.
        let (call, status) = unsafe {
            match *exchange {
                Exchange::AllReduce { from, to, element } => {
                    let (from, count) = (pointer(from.address), to.bytes / element.size());
                    let status = (f.all_reduce)(from, pointer(to.address), count, dtype(element), SUM, comm, stream);
                    ("ncclAllReduce", status)
                }
                Exchange::ReduceScatter { from, to, element } => {
                    let (from, count) = (pointer(from.address), to.bytes / element.size());
                    let status =
                        (f.reduce_scatter)(from, pointer(to.address), count, dtype(element), SUM, comm, stream);
                    ("ncclReduceScatter", status)
                }
                Exchange::AllGather { from, to } => {
                    let status =
                        (f.all_gather)(pointer(from.address), pointer(to.address), from.bytes, INT8, comm, stream);
                    ("ncclAllGather", status)
                }
                Exchange::Broadcast { from, to, root } => {
                    let (from, root) = (pointer(from.address), root as c_int);
                    ("ncclBroadcast", (f.broadcast)(from, pointer(to.address), to.bytes, INT8, root, comm, stream))
                }
                Exchange::Send { from, peer } => {
                    ("ncclSend", (f.send)(pointer(from.address), from.bytes, INT8, peer as c_int, comm, stream))
                }
                Exchange::Receive { to, peer } => {
                    ("ncclRecv", (f.receive)(pointer(to.address), to.bytes, INT8, peer as c_int, comm, stream))
                }
            }
        };
        self.library.called(call, status)
    }
}

fn handle(comm: Comm) -> Handle {
    comm.0 as Handle
}

impl Nccl for OnDevice {
    fn version(&self) -> u32 {
        self.library.version
    }

    fn unique_id(&self) -> Result<UniqueId> {
        let mut id = Id([0; 128]);
        // SAFETY: writes one.
        self.library.called("ncclGetUniqueId", unsafe { (self.library.functions.unique_id)(&mut id) })?;
        Ok(UniqueId(id.0))
    }

    fn init(&self, id: &UniqueId, rank: usize, size: usize) -> Result<Comm> {
        self.enter()?;
        let (mut comm, mut config): (Handle, _) = (std::ptr::null_mut(), Config::non_blocking());
        let (size, rank) = (size as c_int, rank as c_int);
        // SAFETY: the configuration is read before the call returns, and the handle is written
        // before it does.
        let status = unsafe { (self.library.functions.init)(&mut comm, size, Id(id.0), rank, &mut config) };
        self.library.called("ncclCommInitRankConfig", status)?;
        Ok(Comm(comm as usize))
    }

    fn state(&self, comm: Comm) -> Result<State> {
        let mut state = SUCCESS;
        // SAFETY: a communicator that was not given back.
        let status = unsafe { (self.library.functions.async_error)(handle(comm), &mut state) };
        self.library.called("ncclCommGetAsyncError", status)?;
        Ok(match state {
            SUCCESS => State::Ready,
            IN_PROGRESS => State::Busy,
            failed => {
                let said = self.library.said_last(handle(comm));
                let colon = if said.is_empty() { "" } else { ": " };
                State::Failed(format!("NCCL reports: {}{colon}{said}", self.library.words(failed)))
            }
        })
    }

    fn enqueue(&self, comm: Comm, stream: Stream, exchanges: &[Exchange]) -> Result<()> {
        self.enter()?;
        // SAFETY: groups belong to the thread; this one ends below, whatever was put into it.
        self.library.called("ncclGroupStart", unsafe { (self.library.functions.group_start)() })?;
        let stream = stream.0 as Queue;
        let put = exchanges.iter().try_for_each(|exchange| self.put(handle(comm), stream, exchange));
        // SAFETY: as above.
        let ended = self.library.called("ncclGroupEnd", unsafe { (self.library.functions.group_end)() });
        put.and(ended)
    }

    fn finalize(&self, comm: Comm) -> Result<()> {
        self.enter()?;
        // SAFETY: a communicator that was not given back.
        self.library.called("ncclCommFinalize", unsafe { (self.library.functions.finalize)(handle(comm)) })
    }

    fn destroy(&self, comm: Comm) {
        if self.enter().is_ok() {
            // SAFETY: as above, and nobody uses it from here on.
            unsafe { (self.library.functions.destroy)(handle(comm)) };
        }
    }

    fn abort(&self, comm: Comm) {
        if self.enter().is_ok() {
            // SAFETY: as above.
            unsafe { (self.library.functions.abort)(handle(comm)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_laid_out_like_the_headers() {
        use std::mem::offset_of;
        let places = [offset_of!(Config, magic), offset_of!(Config, blocking), offset_of!(Config, net_name)];
        assert_eq!((places, offset_of!(Config, split_share), size_of::<Config>()), ([8, 16, 32], 40, 48));
        assert_eq!((Config::non_blocking().blocking, text(21_805)), (0, "2.18.5".to_owned()));
    }

    #[test]
    fn a_missing_library_says_where_it_was_looked_for_and_whose_it_is() {
        let nowhere = crate::find::Library { stem: "trainyard-is-no-such-library", ..NCCL };
        let error = Loaded::open(&nowhere, &Places::default(), 12).err().expect("no such library").to_string();
        assert!(error.starts_with("NCCL is not found; it was looked for in no CUDA_HOME"), "{error}");
        assert!(error.contains("libnccl2") && error.contains("nvidia-nccl-cu12"), "{error}");
    }

    #[test]
    fn every_function_of_the_table_is_in_the_library_where_there_is_one() {
        // NCCL loads without a driver, and tells its version.
        match Library::open(&Places::of_this_process()) {
            Ok(library) => {
                assert!(library.version() >= LEAST);
                assert!(library.words(6).to_lowercase().contains("remote"), "{}", library.words(6));
            }
            Err(error @ (CudaError::NoLibrary { .. } | CudaError::OldLibrary { .. })) => {
                assert!(error.to_string().contains("NCCL"), "{error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
