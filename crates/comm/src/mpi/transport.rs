//! The few calls of MPI that are made, one at a time.

use crate::processes::{CHUNK_BYTES, GRACE, Transport, WINDOW};
use mpi::ffi;
use mpi::{Threading, environment::Universe};
use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Tag of notices.
const NOTICE: i32 = 1;

/// The MPI communicator, of two, that a message travels on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Plane {
    /// Operations.
    Data,
    /// Notices.
    Control,
}

/// A message under way. Its memory must stay until it has completed.
pub(crate) struct Request(ffi::MPI_Request);

// SAFETY: a request is a handle that any thread may test; calls are serialised by `Mpi`'s lock.
unsafe impl Send for Request {}

/// Notices on their way: memory and request.
type Outgoing = Vec<(Box<[u8]>, Request)>;

/// MPI, initialised, behind a lock.
pub(crate) struct Mpi {
    /// Never dropped, only finalised.
    universe: Mutex<Option<ManuallyDrop<Universe>>>,
    data: ffi::MPI_Comm,
    control: ffi::MPI_Comm,
    lock: Mutex<()>,
    closed: AtomicBool,
    outgoing: Mutex<Outgoing>,
    rank: usize,
    size: usize,
    tag_max: i32,
}

// SAFETY: handles of MPI are process-wide; every call takes the lock.
unsafe impl Send for Mpi {}
// SAFETY: as above.
unsafe impl Sync for Mpi {}

fn check(code: c_int, call: &str) -> Result<(), String> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    // SAFETY: the buffer is as long as MPI asks for.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    Err(format!("{call}: {}", String::from_utf8_lossy(&text[..length as usize])))
}

/// Lets Open MPI's TCP send a whole chunk without being asked for it.
///
/// A message above its eager limit (64 KiB) waits until the receiver has said that it is ready, and
/// both sides say and hear that only inside MPI's calls. Between ranks that compute and poll now
/// and then this costs milliseconds a chunk, and half of a slow link's rate (docs/LOG.md). Whoever
/// sets the limits, in the environment or by `mpirun --mca`, keeps them. Other networks and other
/// MPIs do not know these names.
fn send_chunks_at_once() {
    let limit = CHUNK_BYTES + 4096;
    for (name, value) in
        [("eager_limit", limit), ("rndv_eager_limit", limit), ("max_send_size", limit), ("free_list_inc", WINDOW)]
    {
        let variable = format!("OMPI_MCA_btl_tcp_{name}");
        if std::env::var_os(&variable).is_none() {
            // SAFETY: `super::init` asks to be called before other threads use the environment, and
            // MPI has not begun.
            unsafe { std::env::set_var(variable, value.to_string()) };
        }
    }
}

impl Mpi {
    pub fn init() -> Result<Self, String> {
        send_chunks_at_once();
        let (universe, threading) =
            mpi::initialize_with_threading(Threading::Multiple).ok_or("MPI was initialised before in this process")?;
        if threading < Threading::Serialized {
            return Err(format!("MPI offers {threading:?} only, but calls come from several threads"));
        }
        let (mut rank, mut size) = (0, 0);
        let mut comms = [MaybeUninit::uninit(), MaybeUninit::uninit()];
        // SAFETY: MPI is initialised, and every pointer is to a local of the type that the call
        // fills.
        unsafe {
            for comm in &mut comms {
                check(ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, comm.as_mut_ptr()), "MPI_Comm_dup")?;
                check(
                    ffi::MPI_Comm_set_errhandler(comm.assume_init(), ffi::RSMPI_ERRORS_RETURN),
                    "MPI_Comm_set_errhandler",
                )?;
            }
            let [data, control] = comms.map(|comm| comm.assume_init());
            check(ffi::MPI_Comm_rank(data, &mut rank), "MPI_Comm_rank")?;
            check(ffi::MPI_Comm_size(data, &mut size), "MPI_Comm_size")?;
            let (mut value, mut found) = (std::ptr::null_mut::<c_int>(), 0);
            let key = ffi::MPI_TAG_UB as c_int;
            check(ffi::MPI_Comm_get_attr(data, key, (&raw mut value).cast(), &mut found), "MPI_Comm_get_attr")?;
            // The standard's least value where MPI tells none.
            let tag_max = if found != 0 && !value.is_null() { *value } else { 32_767 };
            Ok(Self {
                universe: Mutex::new(Some(ManuallyDrop::new(universe))),
                data,
                control,
                lock: Mutex::new(()),
                closed: AtomicBool::new(false),
                outgoing: Mutex::default(),
                rank: rank as usize,
                size: size as usize,
                tag_max,
            })
        }
    }

    fn comm(&self, plane: Plane) -> ffi::MPI_Comm {
        match plane {
            Plane::Data => self.data,
            Plane::Control => self.control,
        }
    }

    fn enter(&self) -> Result<MutexGuard<'_, ()>, String> {
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if self.closed.load(Ordering::Relaxed) {
            return Err("MPI is closed after a failure".to_owned());
        }
        Ok(guard)
    }

    /// No more calls from now on.
    fn close(&self) {
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Ordering::Relaxed);
    }

    /// # Safety
    /// `data` is valid for `bytes` and nobody writes it until the request has completed.
    unsafe fn start_send(
        &self,
        plane: Plane,
        data: *const u8,
        bytes: usize,
        to: usize,
        tag: i32,
    ) -> Result<Request, String> {
        let _guard = self.enter()?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller's promise; `bytes` fits because messages are chunks.
        unsafe {
            let code = ffi::MPI_Isend(
                data.cast::<c_void>(),
                bytes as c_int,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                tag,
                self.comm(plane),
                request.as_mut_ptr(),
            );
            check(code, "MPI_Isend").map(|()| Request(request.assume_init()))
        }
    }

    /// # Safety
    /// `data` is valid for `bytes` and nobody touches it until the request has completed.
    unsafe fn start_receive(
        &self,
        plane: Plane,
        data: *mut u8,
        bytes: usize,
        from: usize,
        tag: i32,
    ) -> Result<Request, String> {
        let _guard = self.enter()?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller's promise; `bytes` fits because messages are chunks.
        unsafe {
            let code = ffi::MPI_Irecv(
                data.cast::<c_void>(),
                bytes as c_int,
                ffi::RSMPI_UINT8_T,
                from as c_int,
                tag,
                self.comm(plane),
                request.as_mut_ptr(),
            );
            check(code, "MPI_Irecv").map(|()| Request(request.assume_init()))
        }
    }

    /// Asks MPI to give up a receive; it completes soon after, unless its message has begun to
    /// arrive.
    fn cancel(&self, request: &mut Request) {
        if let Ok(_guard) = self.enter() {
            // SAFETY: an active request.
            unsafe { ffi::MPI_Cancel(&mut request.0) };
        }
    }

    /// A waiting notice: its sender and length.
    fn probe(&self) -> Result<Option<(usize, usize)>, String> {
        let _guard = self.enter()?;
        let (mut flag, mut bytes) = (0, 0);
        let mut status = MaybeUninit::uninit();
        // SAFETY: pointers to locals; the status is read only if MPI filled it.
        unsafe {
            let code = ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, NOTICE, self.control, &mut flag, status.as_mut_ptr());
            check(code, "MPI_Iprobe")?;
            if flag == 0 {
                return Ok(None);
            }
            let status = status.assume_init();
            check(ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut bytes), "MPI_Get_count")?;
            Ok(Some((status.MPI_SOURCE as usize, bytes as usize)))
        }
    }

    /// MPI's own sum of f32, blocking: what ours is measured against.
    pub fn native_all_reduce(&self, input: &[f32], output: &mut [f32]) -> Result<(), String> {
        let _guard = self.enter()?;
        let count = input.len().min(output.len()) as c_int;
        // SAFETY: both slices hold `count` elements.
        let code = unsafe {
            ffi::MPI_Allreduce(
                input.as_ptr().cast(),
                output.as_mut_ptr().cast(),
                count,
                ffi::RSMPI_FLOAT,
                ffi::RSMPI_SUM,
                self.data,
            )
        };
        check(code, "MPI_Allreduce")
    }

    /// Frees notices that have been sent; whether none is left.
    fn sweep(&self) -> bool {
        let mut outgoing = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = Vec::new();
        outgoing.retain_mut(|(_, request)| {
            let tested = self.test(std::slice::from_mut(request), &mut done);
            tested.is_err() || done.is_empty()
        });
        outgoing.is_empty()
    }
}

impl Transport for Mpi {
    type Request = Request;
    const NAME: &'static str = "mpi";

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn tag_max(&self) -> u32 {
        self.tag_max as u32
    }

    unsafe fn send(&self, data: *const u8, bytes: usize, to: usize, tag: i32) -> Result<Request, String> {
        // SAFETY: the caller's promise.
        unsafe { self.start_send(Plane::Data, data, bytes, to, tag) }
    }

    unsafe fn receive(&self, data: *mut u8, bytes: usize, from: usize, tag: i32) -> Result<Request, String> {
        // SAFETY: the caller's promise.
        unsafe { self.start_receive(Plane::Data, data, bytes, from, tag) }
    }

    /// One after the other; makes progress for all.
    fn test(&self, requests: &mut [Request], done: &mut Vec<usize>) -> Result<(), String> {
        done.clear();
        let _guard = self.enter()?;
        for (index, request) in requests.iter_mut().enumerate() {
            let mut flag = 0;
            // SAFETY: an active request; the status is not asked for.
            let code = unsafe { ffi::MPI_Test(&mut request.0, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
            check(code, "MPI_Test")?;
            if flag != 0 {
                done.push(index);
            }
        }
        Ok(())
    }

    /// Ends all requests, or MPI's access to this process's memory.
    fn abandon(&self, requests: Vec<(Request, bool)>) {
        let (mut requests, mut sending): (Vec<Request>, Vec<bool>) = requests.into_iter().unzip();
        for (request, sending) in requests.iter_mut().zip(&sending) {
            if !sending {
                self.cancel(request);
            }
        }
        let start = Instant::now();
        let mut done = Vec::new();
        while !requests.is_empty() && start.elapsed() < GRACE {
            if self.test(&mut requests, &mut done).is_err() {
                break;
            }
            for index in done.drain(..).rev() {
                requests.swap_remove(index);
                sending.swap_remove(index);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        // A send that nobody takes only reads, and only while MPI is called; a receive would write.
        if sending.contains(&false) {
            self.close();
        }
    }

    /// Polling that begins eagerly and ends in sleep, because other ranks may need this core to do
    /// what is waited for.
    fn pause(&self, polls: u32) {
        const SPINS: u32 = 50;
        const YIELDS: u32 = 200;
        if polls <= SPINS {
            std::hint::spin_loop();
        } else if polls <= SPINS + YIELDS {
            std::thread::yield_now();
        } else {
            // Up to half a millisecond, which is small beside whatever took this long.
            let longer = u64::from(polls - SPINS - YIELDS).min(25);
            std::thread::sleep(Duration::from_micros(20 * longer));
        }
    }

    fn tell(&self, to: usize, notice: &[u8]) {
        let data: Box<[u8]> = notice.into();
        // SAFETY: the memory stays in `outgoing` until the request has completed, or for ever.
        if let Ok(request) = unsafe { self.start_send(Plane::Control, data.as_ptr(), data.len(), to, NOTICE) } {
            self.outgoing.lock().unwrap_or_else(PoisonError::into_inner).push((data, request));
        }
    }

    fn has_told(&self) -> bool {
        self.sweep()
    }

    fn hear(&self) -> Result<Option<(usize, Vec<u8>)>, String> {
        let Some((from, bytes)) = self.probe()? else { return Ok(None) };
        let mut data = vec![0u8; bytes];
        // SAFETY: `data` stays until the request has completed below, as the message has arrived
        // already.
        let mut request = unsafe { self.start_receive(Plane::Control, data.as_mut_ptr(), bytes, from, NOTICE) }?;
        let mut done = Vec::new();
        loop {
            if let Err(what) = self.test(std::slice::from_mut(&mut request), &mut done) {
                // The message could still be written: its memory is given up.
                std::mem::forget(data);
                return Err(what);
            }
            if !done.is_empty() {
                return Ok(Some((from, data)));
            }
            std::thread::yield_now();
        }
    }

    /// MPI itself knows of no loss that it would tell.
    fn lost(&self, _: usize) -> Option<String> {
        None
    }

    /// Ends MPI.
    fn finish(&self) {
        self.close();
        let universe = self.universe.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Dropping a universe calls `MPI_Finalize`.
        universe.map(ManuallyDrop::into_inner).into_iter().for_each(drop);
    }
}
