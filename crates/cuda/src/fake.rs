//! A device without a GPU, for tests: host memory, streams that run late and in any order that
//! their events allow, and a check of that order.
//!
//! Work is only queued until something waits for it. A seeded choice then picks which stream runs
//! next, so that work without an ordering event runs in the wrong order for some seed. In addition,
//! every access is checked when it is queued. Memory must lie inside an allocation, and an access
//! that conflicts with an earlier one on another stream must be ordered after it by events (vector
//! clocks, Lamport 1978, Mattern 1989).
//!
//! Products are computed. Kernels are computed by [`Options::kernels`] if given, otherwise only
//! recorded. Devices of one [`Network`] exchange data. Captures follow the driver's rules, and a
//! launched graph is queued and checked like the work that was captured.

mod capture;
mod network;
mod order;
mod product;

pub use network::{Fault, FaultKind, Network};

use crate::driver::{Address, Call, Driver, Event, Function, Graph, Operands, Product, Properties, Region, Stream};
use crate::error::{CudaError, Result};
use crate::kernels::{Argument, File, Float, Launch};
use crate::nccl::{Comm, Exchange, Nccl, UniqueId};
use order::{Clock, Order};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use trainyard_base::lock;

/// Runs kernels on the host, with host addresses as those of the device.
pub trait Kernels: Send + Sync {
    /// Runs one to its end.
    fn run(&self, file: File, float: Float, name: &str, launch: Launch, arguments: &[Argument]) -> Result<(), String>;
}

/// The properties and equipment of a fake device.
pub struct Options {
    /// Bytes of its memory.
    pub memory: usize,
    /// Of the choice among streams.
    pub seed: u64,
    /// The implementation of kernels; None: they are recorded and compute nothing.
    pub kernels: Option<Box<dyn Kernels>>,
    /// The kernel or `"product"` that cannot be launched; `"capture"`: no capture succeeds.
    pub failing: Option<&'static str>,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// The network to other devices; None: the device has no NCCL.
    pub network: Option<Arc<Network>>,
}

impl Default for Options {
    fn default() -> Options {
        Options { memory: 1 << 30, seed: 0, kernels: None, failing: None, capability: (9, 0), network: None }
    }
}

/// Something that was put on a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Where.
    pub stream: Stream,
    /// A kernel's name, or `product`, `upload`, `download`, `copy`, `zero`, `nccl`, or `graph` for
    /// the launch of a whole graph.
    pub name: &'static str,
    /// The float type of a kernel's module.
    pub float: Option<Float>,
    /// The launch of a kernel.
    pub launch: Option<Launch>,
    /// The form of a product.
    pub product: Option<Product>,
    /// The memory that it reads and writes.
    pub regions: Vec<Region>,
}

/// See the module.
pub struct Fake {
    properties: Properties,
    failing: Option<&'static str>,
    /// The network with this device's number there.
    network: Option<(Arc<Network>, usize)>,
    device: Arc<State>,
}

/// The part of the device that is shared with its queues.
struct State {
    kernels: Option<Box<dyn Kernels>>,
    network: Option<Arc<Network>>,
    queues: Mutex<Queues>,
}

struct Queues {
    random: u64,
    /// Allocations by address; 16-byte units for alignment.
    memory: BTreeMap<Address, Allocation>,
    used: usize,
    used_max: usize,
    allocated: u64,
    pinned: BTreeMap<usize, Box<[Chunk]>>,
    streams: Vec<VecDeque<(Work, f64)>>,
    /// Seconds that each stream has been at work, on a clock of its own.
    times: Vec<f64>,
    events: Vec<Mark>,
    functions: Vec<(File, Float, &'static str)>,
    order: Order,
    captures: capture::Captures,
    records: Vec<Record>,
    problems: Vec<String>,
    /// Of work that failed as it ran.
    failure: Option<CudaError>,
}

/// Memory comes aligned like the device's.
#[repr(C, align(256))]
#[derive(Clone, Copy)]
struct Chunk([u8; 256]);

struct Allocation {
    bytes: usize,
    /// Tells it from others that had the same address at another time.
    serial: u64,
    _memory: Box<[Chunk]>,
}

#[derive(Default)]
struct Mark {
    /// Number of times it was recorded.
    recorded: u64,
    /// The recordings that have not passed yet. An event that is recorded again on another stream
    /// may pass there first.
    coming: BTreeSet<u64>,
    clock: Clock,
    time: f64,
    /// The capture in which it was recorded last, if it was in one.
    captured: Option<u64>,
}

#[derive(Clone)]
enum Work {
    Upload {
        to: Region,
        data: Vec<u8>,
    },
    /// From pinned memory, which is read when its turn comes.
    UploadPinned {
        to: Region,
        from: Region,
    },
    Download {
        to: usize,
        from: Region,
    },
    Copy {
        to: Region,
        from: Region,
    },
    Zero {
        to: Region,
    },
    Kernel {
        function: Function,
        launch: Launch,
        arguments: Vec<Argument>,
    },
    Product {
        form: Product,
        operands: Box<Operands>,
    },
    Exchange(network::Group),
    Record {
        event: usize,
        generation: u64,
    },
    Wait {
        event: usize,
        generation: u64,
    },
}

/// Seconds of every piece of work on the fake's clocks, and additions for each byte of its regions,
/// each byte to or from the host, and each operation of a product. They are round numbers, so that
/// times are the same everywhere and grow with the work; they mean nothing else. The host's bytes
/// take little time, so that small models hide them.
const SECONDS_OF_WORK: f64 = 1e-6;
const SECONDS_OF_BYTE: f64 = 1e-9;
const SECONDS_OF_HOST_BYTE: f64 = 1e-10;
const SECONDS_OF_OPERATION: f64 = 1e-9;

/// Seconds of what is recorded: of a product its operations alone, because its scratch is no
/// measure of it.
fn seconds_of(record: &Record) -> f64 {
    let bytes: usize = record.regions.iter().map(|region| region.bytes).sum();
    SECONDS_OF_WORK
        + match record.product {
            Some(form) => 2.0 * (form.batch * form.m * form.n * form.k) as f64 * SECONDS_OF_OPERATION,
            None if matches!(record.name, "upload" | "download") => bytes as f64 * SECONDS_OF_HOST_BYTE,
            None => bytes as f64 * SECONDS_OF_BYTE,
        }
}

impl Fake {
    /// A device.
    pub fn new(options: Options) -> Fake {
        let properties = Properties {
            name: "fake".into(),
            ordinal: 0,
            capability: options.capability,
            multiprocessors: 132,
            shared_max: 227 << 10,
            memory: options.memory,
            driver_version: 12080,
        };
        let queues = Queues {
            random: options.seed ^ 0x9e37_79b9_7f4a_7c15,
            memory: BTreeMap::new(),
            used: 0,
            used_max: 0,
            allocated: 0,
            pinned: BTreeMap::new(),
            streams: Vec::new(),
            times: Vec::new(),
            events: Vec::new(),
            functions: Vec::new(),
            order: Order::default(),
            captures: capture::Captures::default(),
            records: Vec::new(),
            problems: Vec::new(),
            failure: None,
        };
        let (kernels, network) = (options.kernels, options.network);
        let device = Arc::new(State { kernels, network: network.clone(), queues: Mutex::new(queues) });
        let network = network.map(|network| {
            let number = network.join(Arc::downgrade(&device));
            (network, number)
        });
        Fake { properties, failing: options.failing, network, device }
    }

    /// The records of work put on streams since the last call, in the order of the host's calls.
    pub fn take_records(&self) -> Vec<Record> {
        std::mem::take(&mut self.lock().records)
    }

    /// The problems so far: accesses outside of memory, and accesses that no event orders.
    pub fn problems(&self) -> Vec<String> {
        self.lock().problems.clone()
    }

    /// Bytes allocated now, and the most at once.
    pub fn used(&self) -> (usize, usize) {
        let state = self.lock();
        (state.used, state.used_max)
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.device.lock()
    }

    /// Checks and queues; `describe` is what the record says beside name and regions.
    fn queue(&self, stream: Stream, record: Record, work: Work) -> Result<()> {
        if self.failing == Some(record.name) {
            let code = "CUDA_ERROR_LAUNCH_FAILED".to_owned();
            return Err(CudaError::Call { call: record.name, code, hint: ": asked for by the test" });
        }
        let state = &mut *self.lock();
        if state.is_capturing(stream) {
            return state.capture(stream, record, work);
        }
        state.put(stream, &record, work);
        state.records.push(record);
        Ok(())
    }
}

/// A record of something that is no kernel.
fn plain(stream: Stream, name: &'static str, regions: &[Region]) -> Record {
    Record { stream, name, float: None, launch: None, product: None, regions: regions.to_vec() }
}

impl Work {
    /// The host memory that it copies from or to.
    fn host(&self) -> Option<Address> {
        match self {
            Work::UploadPinned { from, .. } => Some(from.address),
            Work::Download { to, .. } => Some(*to as Address),
            _ => None,
        }
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        lock(&self.queues)
    }

    /// Runs what can be run until `done`, waiting for other devices where streams do.
    fn run(&self, done: impl Fn(&Queues) -> bool) -> Result<()> {
        loop {
            if self.lock().run(self.kernels.as_deref(), self.network.as_deref(), &done)? {
                return Ok(());
            }
            self.network.as_ref().expect("who waits for others is on a network").wait();
        }
    }

    /// Runs what can be run now, unless somebody is at it.
    fn advance(&self) {
        if let Ok(mut queues) = self.queues.try_lock() {
            // What fails is told to who waits for it.
            queues.run(self.kernels.as_deref(), self.network.as_deref(), &|_| false).ok();
        }
    }
}

impl Queues {
    /// Puts work on a stream and checks what it does.
    fn put(&mut self, stream: Stream, record: &Record, work: Work) {
        self.order.advance(stream.0);
        for region in &record.regions {
            if let Err(problem) = self.check(stream, region) {
                self.problems.push(format!("{} on stream {}: {problem}", record.name, stream.0));
            }
        }
        self.streams[stream.0].push_back((work, seconds_of(record)));
    }

    fn new_stream(&mut self) -> Stream {
        self.streams.push(VecDeque::new());
        self.times.push(0.0);
        Stream(self.streams.len() - 1)
    }

    fn new_event(&mut self) -> Event {
        self.events.push(Mark::default());
        Event(self.events.len() - 1)
    }

    fn record(&mut self, event: Event, stream: Stream) {
        let clock = self.order.now(stream.0);
        let mark = &mut self.events[event.0];
        mark.recorded += 1;
        (mark.clock, mark.captured) = (clock, None);
        let generation = mark.recorded;
        mark.coming.insert(generation);
        self.streams[stream.0].push_back((Work::Record { event: event.0, generation }, 0.0));
    }

    fn wait(&mut self, stream: Stream, event: Event) {
        let generation = self.events[event.0].recorded;
        // As on a device, waiting for an event that was not recorded is no waiting.
        self.order.wait(stream.0, &self.events[event.0].clock);
        self.streams[stream.0].push_back((Work::Wait { event: event.0, generation }, 0.0));
    }

    fn check(&mut self, stream: Stream, region: &Region) -> Result<(), String> {
        if region.address == 0 || region.bytes == 0 {
            return Ok(());
        }
        let (start, end) = (region.address, region.address + region.bytes as u64);
        let inside = self.memory.range(..=start).next_back().filter(|(at, a)| end <= **at + a.bytes as u64);
        let base = inside.map(|(base, _)| *base).or_else(|| self.pinned_base(start, region.bytes));
        let Some(base) = base else {
            return Err(format!("{} bytes at {start:#x} lie in no allocation", region.bytes));
        };
        self.order.access(base, start..end, region.written, stream.0)
    }

    /// The pinned allocation in which so many bytes lie.
    fn pinned_base(&self, start: Address, bytes: usize) -> Option<Address> {
        let (base, memory) = self.pinned.range(..=start as usize).next_back()?;
        (start as usize + bytes <= base + size_of_val::<[Chunk]>(memory)).then_some(*base as Address)
    }

    /// Host memory as a region, where it is pinned: only then does a copy take part in the order of
    /// streams.
    fn pinned_region(&self, data: *const u8, bytes: usize, written: bool) -> Option<Region> {
        let region = Region { address: data as Address, bytes, written };
        self.pinned_base(region.address, bytes).map(|_| region)
    }

    /// Runs what can be run until `done`; whether that was reached, or streams wait for other
    /// devices.
    fn run(
        &mut self,
        kernels: Option<&dyn Kernels>,
        network: Option<&Network>,
        done: &dyn Fn(&Queues) -> bool,
    ) -> Result<bool> {
        while !done(self) {
            let ready: Vec<usize> = (0..self.streams.len()).filter(|s| self.can_run(*s, network)).collect();
            if ready.is_empty() {
                let exchanges = |stream: &VecDeque<(Work, f64)>| matches!(stream.front(), Some((Work::Exchange(_), _)));
                if self.streams.iter().any(exchanges) {
                    return Ok(false);
                }
                let what = "every stream waits for an event that nothing will pass".to_owned();
                return Err(CudaError::Launch { kernel: "synchronize".into(), what });
            }
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let stream = ready[(self.random >> 33) as usize % ready.len()];
            let (work, seconds) = self.streams[stream].pop_front().expect("it can run");
            self.times[stream] += seconds;
            if let Err(error) = self.perform(stream, work, kernels) {
                self.failure.get_or_insert(error);
            }
        }
        self.failure.clone().map_or(Ok(true), Err)
    }

    fn can_run(&self, stream: usize, network: Option<&Network>) -> bool {
        match self.streams[stream].front() {
            None => false,
            Some((Work::Exchange(group), _)) => network.is_some_and(|network| network.came(group)),
            Some((Work::Wait { event, generation }, _)) => !self.events[*event].coming.contains(generation),
            Some(_) => true,
        }
    }

    fn perform(&mut self, stream: usize, work: Work, kernels: Option<&dyn Kernels>) -> Result<()> {
        match work {
            Work::Upload { to, data } => bytes_mut(&to).copy_from_slice(&data),
            Work::UploadPinned { to, from } => bytes_mut(&to).copy_from_slice(bytes(&from)),
            Work::Download { to, from } => {
                // SAFETY: the caller of `download` keeps the memory for itself until it has
                // synchronised.
                let to = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, from.bytes) };
                to.copy_from_slice(bytes(&from));
            }
            Work::Copy { to, from } => bytes_mut(&to).copy_from_slice(&bytes(&from).to_vec()[..to.bytes]),
            Work::Zero { to } => bytes_mut(&to).fill(0),
            Work::Kernel { function, launch, arguments } => {
                let (file, float, name) = self.functions[function.0];
                if let Some(kernels) = kernels {
                    let run = kernels.run(file, float, name, launch, &arguments);
                    run.map_err(|what| CudaError::Launch { kernel: name.to_owned(), what })?;
                }
            }
            Work::Product { form, operands } => product::run(&form, &operands),
            // The network has done it.
            Work::Exchange(_) => {}
            Work::Record { event, generation } => {
                let (time, mark) = (self.times[stream], &mut self.events[event]);
                mark.coming.remove(&generation);
                if generation == mark.recorded {
                    mark.time = time;
                }
            }
            Work::Wait { event, .. } => self.times[stream] = self.times[stream].max(self.events[event].time),
        }
        Ok(())
    }
}

fn bytes(region: &Region) -> &[u8] {
    if region.bytes == 0 {
        return &[];
    }
    // SAFETY: a region that was queued lies in an allocation of this fake, which is freed only when
    // its streams are empty, and one piece of work runs at a time; tests look at `problems` first.
    unsafe { std::slice::from_raw_parts(region.address as *const u8, region.bytes) }
}

#[allow(clippy::mut_from_ref)]
fn bytes_mut(region: &Region) -> &mut [u8] {
    if region.bytes == 0 {
        return &mut [];
    }
    // SAFETY: as in `bytes`.
    unsafe { std::slice::from_raw_parts_mut(region.address as *mut u8, region.bytes) }
}

impl Driver for Fake {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn memory(&self) -> Result<(usize, usize)> {
        Ok((self.properties.memory - self.lock().used, self.properties.memory))
    }

    fn allocate(&self, bytes: usize) -> Result<Address> {
        let state = &mut *self.lock();
        state.refuse_by_this_thread("cuMemAlloc")?;
        let free = self.properties.memory - state.used;
        if bytes > free {
            return Err(CudaError::OutOfMemory { bytes, free, total: self.properties.memory });
        }
        // What a device hands out is not zero; as a float of any type this is a small number.
        let memory = vec![Chunk([0x2b; 256]); bytes.div_ceil(256).max(1)].into_boxed_slice();
        let address = memory.as_ptr() as Address;
        state.used += bytes;
        state.used_max = state.used_max.max(state.used);
        state.allocated += 1;
        state.memory.insert(address, Allocation { bytes, serial: state.allocated, _memory: memory });
        Ok(address)
    }

    fn free(&self, address: Address) {
        self.lock().frees(&format!("free of {address:#x}"));
        // Memory goes back when all work is done.
        let done = self.device.run(|queues| queues.streams.iter().all(VecDeque::is_empty));
        let state = &mut *self.lock();
        if let Err(error) = done {
            state.problems.push(format!("free: {error}"));
        }
        state.order.forget(address);
        match state.memory.remove(&address) {
            Some(allocation) => state.used -= allocation.bytes,
            None => state.problems.push(format!("free of {address:#x}, which was not allocated")),
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        self.lock().refuse_by_this_thread("cuMemHostAlloc")?;
        let mut memory = vec![Chunk([0xcd; 256]); bytes.div_ceil(256).max(1)].into_boxed_slice();
        let data = memory.as_mut_ptr().cast::<u8>();
        self.lock().pinned.insert(data as usize, memory);
        Ok(data)
    }

    unsafe fn free_pinned(&self, data: *mut u8) {
        let state = &mut *self.lock();
        state.frees(&format!("free of pinned memory at {data:?}"));
        let bytes = state.pinned.get(&(data as usize)).map_or(0, |memory| size_of_val::<[Chunk]>(memory));
        let range = data as Address..data as Address + bytes as u64;
        let waiting = state.streams.iter().flatten().any(|(work, _)| work.host().is_some_and(|at| range.contains(&at)));
        if waiting {
            state.problems.push(format!("free of pinned memory at {data:?}, with which a stream is not done"));
        }
        state.order.forget(data as Address);
        state.pinned.remove(&(data as usize));
    }

    fn stream(&self) -> Result<Stream> {
        Ok(self.lock().new_stream())
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.lock().refuse_on(stream, "cuStreamSynchronize")?;
        self.device.run(|queues| queues.streams[stream.0].is_empty())?;
        self.lock().order.host_waits(stream.0);
        Ok(())
    }

    fn event(&self) -> Result<Event> {
        Ok(self.lock().new_event())
    }

    fn destroy(&self, _: Event) {}

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        let state = &mut *self.lock();
        if state.is_capturing(stream) {
            return state.capture_record(event, stream);
        }
        state.record(event, stream);
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        let state = &mut *self.lock();
        if state.is_capturing(stream) || state.events[event.0].captured.is_some() {
            return state.capture_wait(stream, event);
        }
        state.wait(stream, event);
        Ok(())
    }

    fn begin_capture(&self, stream: Stream) -> Result<()> {
        self.lock().begin_capture(stream)
    }

    fn end_capture(&self, stream: Stream) -> Result<Graph> {
        let failing = self.failing == Some("capture");
        self.lock().end_capture(stream, failing)
    }

    fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<()> {
        self.lock().launch_graph(stream, graph)
    }

    fn destroy_graph(&self, graph: Graph) {
        self.lock().destroy_graph(graph);
    }

    fn record_in_graph(&self, event: Event, stream: Stream) -> Result<()> {
        self.lock().record_in_graph(event, stream)
    }

    fn is_passed(&self, event: Event) -> Result<bool> {
        let state = self.lock();
        state.refuse_captured(event, "cuEventQuery")?;
        let mark = &state.events[event.0];
        Ok(!mark.coming.contains(&mark.recorded))
    }

    fn wait_on_host(&self, event: Event) -> Result<()> {
        self.lock().refuse_captured(event, "cuEventSynchronize")?;
        let generation = self.lock().events[event.0].recorded;
        self.device.run(|queues| !queues.events[event.0].coming.contains(&generation))?;
        let state = &mut *self.lock();
        let clock = state.events[event.0].clock.clone();
        state.order.host_joins(&clock);
        Ok(())
    }

    fn seconds_between(&self, start: Event, end: Event) -> Result<f64> {
        let state = self.lock();
        [start, end].into_iter().try_for_each(|event| state.refuse_captured(event, "cuEventElapsedTime"))?;
        let [start, end] = [start, end].map(|event| &state.events[event.0]);
        if [start, end].iter().any(|mark| mark.recorded == 0 || mark.coming.contains(&mark.recorded)) {
            let code = "CUDA_ERROR_NOT_READY".to_owned();
            return Err(CudaError::Call { call: "cuEventElapsedTime", code, hint: "" });
        }
        Ok(end.time - start.time)
    }

    unsafe fn upload(&self, stream: Stream, to: Region, from: *const u8) -> Result<()> {
        let pinned = self.lock().pinned_region(from, to.bytes, false);
        if let Some(from) = pinned {
            return self.queue(stream, plain(stream, "upload", &[to, from]), Work::UploadPinned { to, from });
        }
        self.lock().refuse_on(stream, "cuMemcpyHtoDAsync of memory that is not pinned")?;
        // SAFETY: the caller's promise.
        let data = unsafe { std::slice::from_raw_parts(from, to.bytes) }.to_vec();
        self.queue(stream, plain(stream, "upload", &[to]), Work::Upload { to, data })
    }

    unsafe fn download(&self, stream: Stream, to: *mut u8, from: Region) -> Result<()> {
        let pinned = self.lock().pinned_region(to, from.bytes, true);
        if pinned.is_none() {
            self.lock().refuse_on(stream, "cuMemcpyDtoHAsync to memory that is not pinned")?;
        }
        let regions: Vec<Region> = [from].into_iter().chain(pinned).collect();
        self.queue(stream, plain(stream, "download", &regions), Work::Download { to: to as usize, from })
    }

    fn copy(&self, stream: Stream, to: Region, from: Region) -> Result<()> {
        self.queue(stream, plain(stream, "copy", &[to, from]), Work::Copy { to, from })
    }

    fn zero(&self, stream: Stream, to: Region) -> Result<()> {
        self.queue(stream, plain(stream, "zero", &[to]), Work::Zero { to })
    }

    fn load(&self, file: File, float: Float) -> Result<Vec<Function>> {
        let state = &mut *self.lock();
        state.refuse_by_this_thread("cuModuleLoadData")?;
        let load = |kernel: &'static crate::kernels::Kernel| {
            state.functions.push((file, float, kernel.name));
            Function(state.functions.len() - 1)
        };
        Ok(file.kernels().map(load).collect())
    }

    unsafe fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<()> {
        if call.launch.shared > self.properties.shared_max {
            let what = format!("{} bytes of shared memory", call.launch.shared);
            return Err(CudaError::Launch { kernel: call.name.to_owned(), what });
        }
        let (_, float, _) = self.lock().functions[call.function.0];
        let record = Record { float: Some(float), launch: Some(call.launch), ..plain(stream, call.name, call.regions) };
        let arguments = call.arguments.to_vec();
        self.queue(stream, record, Work::Kernel { function: call.function, launch: call.launch, arguments })
    }

    unsafe fn product(&self, stream: Stream, form: &Product, operands: &Operands) -> Result<()> {
        if let Some(what) = form.refused(self.properties.capability).or_else(|| operands.refused()) {
            return Err(CudaError::Product { product: format!("{form:?}"), what });
        }
        let record = Record { product: Some(*form), ..plain(stream, "product", &operands.all()) };
        self.queue(stream, record, Work::Product { form: *form, operands: Box::new(*operands) })
    }

    fn nccl(&self) -> Result<&dyn Nccl> {
        let missing = CudaError::NoLibrary { library: "NCCL", looked: "no network".into(), package: "", shipped: "" };
        self.network.as_ref().map(|_| self as &dyn Nccl).ok_or(missing)
    }
}

impl Fake {
    fn joined(&self) -> &(Arc<Network>, usize) {
        self.network.as_ref().expect("`Driver::nccl` gives this out on a network alone")
    }
}

impl Nccl for Fake {
    fn version(&self) -> u32 {
        22_703
    }

    fn unique_id(&self) -> Result<UniqueId> {
        Ok(self.joined().0.unique_id())
    }

    fn init(&self, id: &UniqueId, rank: usize, size: usize) -> Result<Comm> {
        let (network, device) = self.joined();
        network.init(*device, id, rank, size)
    }

    fn state(&self, comm: Comm) -> Result<crate::nccl::State> {
        let network = &self.joined().0;
        if network.is_ending(comm) {
            self.device.advance();
            let is_of_it = |(work, _): &(Work, f64)| matches!(work, Work::Exchange(group) if group.is_of(comm));
            if self.lock().streams.iter().flatten().any(is_of_it) {
                return Ok(crate::nccl::State::Busy);
            }
        }
        Ok(network.state(comm))
    }

    fn enqueue(&self, comm: Comm, stream: Stream, exchanges: &[Exchange]) -> Result<()> {
        let (network, device) = self.joined();
        let regions: Vec<Region> = exchanges
            .iter()
            .flat_map(|exchange| {
                let [from, to] = exchange.regions();
                [Region { written: false, ..from }, Region { written: true, ..to }]
            })
            .filter(|region| region.bytes > 0)
            .collect();
        self.lock().refuse_on(stream, "ncclGroupEnd (exchanges are not captured here)")?;
        let group = network.number(*device, comm, exchanges);
        self.queue(stream, plain(stream, "nccl", &regions), Work::Exchange(group))
    }

    fn finalize(&self, comm: Comm) -> Result<()> {
        self.joined().0.finalize(comm);
        Ok(())
    }

    fn destroy(&self, comm: Comm) {
        self.abort(comm);
    }

    fn abort(&self, comm: Comm) {
        self.joined().0.abort(comm);
    }
}

#[cfg(test)]
mod capture_tests;
#[cfg(test)]
mod tests;
