//! A device without a GPU, for tests: host memory, streams that are run late and in any order that their events allow, and a check of that order.
//!
//! Work is only queued until somebody waits for it. Then heads of streams are taken by a seeded choice, so that what was not ordered by an event
//! runs in the wrong order for some seed. Beside that every access is checked as it is queued: memory must lie inside an allocation, and what
//! conflicts with an earlier access of another stream must come after it by events (vector clocks, Lamport 1978, Mattern 1989). Products are computed;
//! kernels are computed by what [`Options::kernels`] gives, else only recorded.

mod order;
mod product;

use crate::driver::{Address, Call, Driver, Event, Function, Operands, Product, Properties, Region, Stream};
use crate::error::{CudaError, Result};
use crate::kernels::{Argument, File, Float, Launch};
use order::{Clock, Order};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Runs kernels on the host, with host addresses as those of the device.
pub trait Kernels: Send + Sync {
    /// Runs one to its end.
    fn run(&self, file: File, float: Float, name: &str, launch: Launch, arguments: &[Argument]) -> Result<(), String>;
}

/// What a fake device has and does.
pub struct Options {
    /// Bytes of its memory.
    pub memory: usize,
    /// Of the choice among streams.
    pub seed: u64,
    /// What computes kernels; None: they are recorded and compute nothing.
    pub kernels: Option<Box<dyn Kernels>>,
    /// The kernel or `"product"` that cannot be launched.
    pub failing: Option<&'static str>,
}

impl Default for Options {
    fn default() -> Options {
        Options { memory: 1 << 30, seed: 0, kernels: None, failing: None }
    }
}

/// Something that was put on a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Where.
    pub stream: Stream,
    /// A kernel's name, or `product`, `upload`, `download`, `copy`, `zero`.
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
    kernels: Option<Box<dyn Kernels>>,
    failing: Option<&'static str>,
    state: Mutex<State>,
}

struct State {
    random: u64,
    /// Allocations by address; 16-byte units for alignment.
    memory: BTreeMap<Address, Allocation>,
    used: usize,
    used_max: usize,
    pinned: BTreeMap<usize, Box<[Chunk]>>,
    streams: Vec<VecDeque<(Work, f64)>>,
    /// Seconds that each stream has been at work, on a clock of its own.
    times: Vec<f64>,
    events: Vec<Mark>,
    functions: Vec<(File, Float, &'static str)>,
    order: Order,
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
    _memory: Box<[Chunk]>,
}

#[derive(Default)]
struct Mark {
    /// How often it was recorded, and how often passed.
    recorded: u64,
    passed: u64,
    clock: Clock,
    time: f64,
}

enum Work {
    Upload { to: Region, data: Vec<u8> },
    Download { to: usize, from: Region },
    Copy { to: Region, from: Region },
    Zero { to: Region },
    Kernel { function: Function, launch: Launch, arguments: Vec<Argument> },
    Product { form: Product, operands: Operands },
    Record { event: usize, generation: u64 },
    Wait { event: usize, generation: u64 },
}

/// What every piece of work takes on the fake's clocks, and what each byte of its regions and each operation of a product adds: round numbers, so that times are
/// the same everywhere and grow with the work, and mean nothing else.
const SECONDS_OF_WORK: f64 = 1e-6;
const SECONDS_OF_BYTE: f64 = 1e-9;
const SECONDS_OF_OPERATION: f64 = 1e-9;

/// Seconds of what is recorded: of a product its operations alone, because its scratch is no measure of it.
fn seconds_of(record: &Record) -> f64 {
    let bytes: usize = record.regions.iter().map(|region| region.bytes).sum();
    SECONDS_OF_WORK
        + match record.product {
            Some(form) => 2.0 * (form.batch * form.m * form.n * form.k) as f64 * SECONDS_OF_OPERATION,
            None => bytes as f64 * SECONDS_OF_BYTE,
        }
}

impl Fake {
    /// A device.
    pub fn new(options: Options) -> Fake {
        let properties = Properties {
            name: "fake".into(),
            ordinal: 0,
            capability: (9, 0),
            multiprocessors: 132,
            shared_max: 227 << 10,
            memory: options.memory,
            driver_version: 12080,
        };
        let state = State {
            random: options.seed ^ 0x9e37_79b9_7f4a_7c15,
            memory: BTreeMap::new(),
            used: 0,
            used_max: 0,
            pinned: BTreeMap::new(),
            streams: Vec::new(),
            times: Vec::new(),
            events: Vec::new(),
            functions: Vec::new(),
            order: Order::default(),
            records: Vec::new(),
            problems: Vec::new(),
            failure: None,
        };
        Fake { properties, kernels: options.kernels, failing: options.failing, state: Mutex::new(state) }
    }

    /// What was put on streams since this was last asked, in the order of the host's calls.
    pub fn take_records(&self) -> Vec<Record> {
        std::mem::take(&mut self.lock().records)
    }

    /// What was wrong so far: accesses outside of memory, and those that no event orders.
    pub fn problems(&self) -> Vec<String> {
        self.lock().problems.clone()
    }

    /// Bytes allocated now, and the most at once.
    pub fn used(&self) -> (usize, usize) {
        let state = self.lock();
        (state.used, state.used_max)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks and queues; `describe` is what the record says beside name and regions.
    fn queue(&self, stream: Stream, record: Record, work: Work) -> Result<()> {
        if self.failing == Some(record.name) {
            let code = "CUDA_ERROR_LAUNCH_FAILED".to_owned();
            return Err(CudaError::Call { call: record.name, code, hint: ": asked for by the test" });
        }
        let state = &mut *self.lock();
        state.order.advance(stream.0);
        for region in &record.regions {
            if let Err(problem) = state.check(stream, region) {
                state.problems.push(format!("{} on stream {}: {problem}", record.name, stream.0));
            }
        }
        let seconds = seconds_of(&record);
        state.records.push(record);
        state.streams[stream.0].push_back((work, seconds));
        Ok(())
    }
}

/// A record of something that is no kernel.
fn plain(stream: Stream, name: &'static str, regions: &[Region]) -> Record {
    Record { stream, name, float: None, launch: None, product: None, regions: regions.to_vec() }
}

impl State {
    fn check(&mut self, stream: Stream, region: &Region) -> Result<(), String> {
        if region.address == 0 || region.bytes == 0 {
            return Ok(());
        }
        let (start, end) = (region.address, region.address + region.bytes as u64);
        let inside = self.memory.range(..=start).next_back().filter(|(at, a)| end <= **at + a.bytes as u64);
        let Some((base, _)) = inside else {
            return Err(format!("{} bytes at {start:#x} lie in no allocation", region.bytes));
        };
        self.order.access(*base, start..end, region.written, stream.0)
    }

    /// Runs what can be run until `done`.
    fn run(&mut self, kernels: Option<&dyn Kernels>, done: impl Fn(&State) -> bool) -> Result<()> {
        while !done(self) {
            let ready: Vec<usize> = (0..self.streams.len()).filter(|s| self.can_run(*s)).collect();
            if ready.is_empty() {
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
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn can_run(&self, stream: usize) -> bool {
        match self.streams[stream].front() {
            None => false,
            Some((Work::Wait { event, generation }, _)) => self.events[*event].passed >= *generation,
            Some(_) => true,
        }
    }

    fn perform(&mut self, stream: usize, work: Work, kernels: Option<&dyn Kernels>) -> Result<()> {
        match work {
            Work::Upload { to, data } => bytes_mut(&to).copy_from_slice(&data),
            Work::Download { to, from } => {
                // SAFETY: the caller of `download` keeps the memory for itself until it has synchronised.
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
            Work::Record { event, generation } => {
                self.events[event].passed = generation;
                self.events[event].time = self.times[stream];
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
    // SAFETY: a region that was queued lies in an allocation of this fake, which is freed only when its streams are empty, and one
    // piece of work runs at a time; tests look at `problems` first.
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
        let free = self.properties.memory - state.used;
        if bytes > free {
            return Err(CudaError::OutOfMemory { bytes, free, total: self.properties.memory });
        }
        // What a device hands out is not zero; as a float of any type this is a small number.
        let memory = vec![Chunk([0x2b; 256]); bytes.div_ceil(256).max(1)].into_boxed_slice();
        let address = memory.as_ptr() as Address;
        state.used += bytes;
        state.used_max = state.used_max.max(state.used);
        state.memory.insert(address, Allocation { bytes, _memory: memory });
        Ok(address)
    }

    fn free(&self, address: Address) {
        let state = &mut *self.lock();
        // Memory goes back when all work is done.
        let all = |state: &State| state.streams.iter().all(VecDeque::is_empty);
        if let Err(error) = state.run(self.kernels.as_deref(), all) {
            state.problems.push(format!("free: {error}"));
        }
        state.order.forget(address);
        match state.memory.remove(&address) {
            Some(allocation) => state.used -= allocation.bytes,
            None => state.problems.push(format!("free of {address:#x}, which was not allocated")),
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        let mut memory = vec![Chunk([0xcd; 256]); bytes.div_ceil(256).max(1)].into_boxed_slice();
        let data = memory.as_mut_ptr().cast::<u8>();
        self.lock().pinned.insert(data as usize, memory);
        Ok(data)
    }

    unsafe fn free_pinned(&self, data: *mut u8) {
        self.lock().pinned.remove(&(data as usize));
    }

    fn stream(&self) -> Result<Stream> {
        let state = &mut *self.lock();
        state.streams.push(VecDeque::new());
        state.times.push(0.0);
        Ok(Stream(state.streams.len() - 1))
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        let state = &mut *self.lock();
        state.run(self.kernels.as_deref(), |state| state.streams[stream.0].is_empty())?;
        state.order.host_waits(stream.0);
        Ok(())
    }

    fn event(&self) -> Result<Event> {
        let state = &mut *self.lock();
        state.events.push(Mark::default());
        Ok(Event(state.events.len() - 1))
    }

    fn destroy(&self, _: Event) {}

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        let state = &mut *self.lock();
        let clock = state.order.now(stream.0);
        let mark = &mut state.events[event.0];
        mark.recorded += 1;
        mark.clock = clock;
        let generation = mark.recorded;
        state.streams[stream.0].push_back((Work::Record { event: event.0, generation }, 0.0));
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        let state = &mut *self.lock();
        let generation = state.events[event.0].recorded;
        // As on a device, waiting for an event that was not recorded is no waiting.
        state.order.wait(stream.0, &state.events[event.0].clock);
        state.streams[stream.0].push_back((Work::Wait { event: event.0, generation }, 0.0));
        Ok(())
    }

    fn seconds_between(&self, start: Event, end: Event) -> Result<f64> {
        let state = self.lock();
        let [start, end] = [start, end].map(|event| &state.events[event.0]);
        if [start, end].iter().any(|mark| mark.recorded == 0 || mark.passed < mark.recorded) {
            let code = "CUDA_ERROR_NOT_READY".to_owned();
            return Err(CudaError::Call { call: "cuEventElapsedTime", code, hint: "" });
        }
        Ok(end.time - start.time)
    }

    unsafe fn upload(&self, stream: Stream, to: Region, from: *const u8) -> Result<()> {
        // SAFETY: the caller's promise.
        let data = unsafe { std::slice::from_raw_parts(from, to.bytes) }.to_vec();
        self.queue(stream, plain(stream, "upload", &[to]), Work::Upload { to, data })
    }

    unsafe fn download(&self, stream: Stream, to: *mut u8, from: Region) -> Result<()> {
        self.queue(stream, plain(stream, "download", &[from]), Work::Download { to: to as usize, from })
    }

    fn copy(&self, stream: Stream, to: Region, from: Region) -> Result<()> {
        self.queue(stream, plain(stream, "copy", &[to, from]), Work::Copy { to, from })
    }

    fn zero(&self, stream: Stream, to: Region) -> Result<()> {
        self.queue(stream, plain(stream, "zero", &[to]), Work::Zero { to })
    }

    fn load(&self, file: File, float: Float) -> Result<Vec<Function>> {
        let state = &mut *self.lock();
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
        let record = Record { product: Some(*form), ..plain(stream, "product", &operands.all()) };
        self.queue(stream, record, Work::Product { form: *form, operands: *operands })
    }
}

#[cfg(test)]
mod tests;
