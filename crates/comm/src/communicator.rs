//! The handle that a rank holds on a group: checked slices in, calls to the backend out.
//!
//! Collectives return when this rank's result is complete and its buffers are its own again. All
//! ranks of a group call the same operations in the same order. Calls on one handle run one after
//! the other; what is to run side by side uses handles of its own.

use crate::backend::{Backend, Call, Operation, Signature, Terms, checksums};
use crate::error::{CommError, ErrorKind, Result};
use crate::fault::{Action, FaultPlan};
use crate::hierarchy::Hierarchy;
use crate::number::{Dtype, Number, Scalar};
use crate::pending::{Pending, Worker};
use crate::place::{Place, Position};
use std::any::TypeId;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use trainyard_base::lock;
use xxhash_rust::xxh3::xxh3_64;

/// The longest time for which ranks wait for each other unless told otherwise.
pub const DEADLINE_DEFAULT: Duration = Duration::from_secs(300);

/// Sums of fewer bytes are exchanged by all ranks at once, also where
/// [nodes](Communicator::sum_by_nodes)
/// are to be used: their time is latency, and there are three exchanges by nodes instead of one.
pub const BY_NODES_BYTES_MIN: usize = 64 << 10;

/// The time for which a server waits for a request: longer than any run.
const REQUEST_DEADLINE: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// One rank's handle on a group of ranks.
///
/// Dropping it tells the others that this rank will not come again; dropping it in a panic fails
/// the world.
pub struct Communicator {
    core: Arc<Core>,
    worker: OnceLock<Worker>,
}

/// The state that blocking calls share with the worker of asynchronous ones.
pub(crate) struct Core {
    backend: Arc<dyn Backend>,
    name: String,
    deadline_ms: AtomicU64,
    /// Operations entered so far; the number that reports give.
    operations: AtomicU64,
    verify: AtomicBool,
    faults: Mutex<Option<Arc<FaultPlan>>>,
    /// Step and instruction last posted here.
    posted: Mutex<Option<(u64, u32)>>,
    /// True if sums go by nodes, here and on derived communicators.
    by_nodes: AtomicBool,
    /// The nodes of this group, if sums go by nodes and the group has some.
    nodes: OnceLock<Hierarchy>,
}

impl Communicator {
    pub(crate) fn new(backend: Arc<dyn Backend>, name: String) -> Self {
        let core = Core {
            backend,
            name,
            deadline_ms: AtomicU64::new(DEADLINE_DEFAULT.as_millis() as u64),
            operations: AtomicU64::new(0),
            verify: AtomicBool::new(false),
            faults: Mutex::default(),
            posted: Mutex::default(),
            by_nodes: AtomicBool::new(false),
            nodes: OnceLock::new(),
        };
        Self { core: Arc::new(core), worker: OnceLock::new() }
    }

    /// This rank in the group, from 0.
    pub fn rank(&self) -> usize {
        self.core.backend.rank()
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.core.backend.members().len()
    }

    /// The name that reports use.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// World ranks of the group's members, in the group's order.
    pub fn members(&self) -> &[u32] {
        self.core.backend.members()
    }

    /// `local`, `tcp` or `mpi`.
    pub fn backend(&self) -> &'static str {
        self.core.backend.kind()
    }

    /// Where a member runs.
    ///
    /// # Panics
    /// If the group has no such member.
    pub fn place(&self, member: usize) -> Place {
        self.core.backend.place(self.members()[member])
    }

    /// Where a member is in its program: what it last posted on this communicator, else anywhere,
    /// and how long ago.
    ///
    /// # Panics
    /// If the group has no such member.
    pub fn position(&self, member: usize) -> Option<(Position, Duration)> {
        assert!(member < self.size(), "member {member} of {}", self.size());
        self.core.backend.position_of(member)
    }

    /// A value that the ranks of this world share, made by the first that asks; None where ranks
    /// are processes, which share nothing.
    pub fn common<T: Default + Send + Sync + 'static>(&self) -> Option<Arc<T>> {
        let common = self.core.backend.common()?;
        let mut common = common.lock().unwrap_or_else(PoisonError::into_inner);
        let value = common.entry(TypeId::of::<T>()).or_insert_with(|| Arc::new(T::default()));
        Some(Arc::clone(value).downcast().expect("filed under its type"))
    }

    /// Sets the longest time for which later operations wait for the other ranks. Derived
    /// communicators inherit it.
    pub fn set_deadline(&self, deadline: Duration) {
        self.core.deadline_ms.store(deadline.as_millis().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
        self.parts().for_each(|part| part.set_deadline(deadline));
    }

    /// Lets large all-reduces, here and on communicators that are split off from now on, go by
    /// nodes:
    /// a sum is scattered inside each node, then added up between nodes, then gathered inside. The
    /// bits
    /// are those of one exchange between all ranks, and the bytes between nodes are fewer by the
    /// number
    /// of ranks in a node. Groups whose nodes do not hold the same power of two of neighbouring
    /// ranks
    /// keep the single exchange. All ranks call this together.
    ///
    /// # Errors
    ///
    /// A rank that does not come.
    pub fn sum_by_nodes(&self) -> Result<()> {
        self.core.by_nodes.store(true, Ordering::Relaxed);
        if self.core.nodes.get().is_none() && self.nodes().is_some_and(|inside| inside > 1 && inside < self.size()) {
            let nodes = self.hierarchy()?;
            // Nobody else makes them: this handle's operations run one after the other.
            let _ = self.core.nodes.set(nodes);
        }
        Ok(())
    }

    /// The parts of the group that sums by nodes are exchanged in.
    fn parts(&self) -> impl Iterator<Item = &Communicator> {
        self.core.nodes.get().into_iter().flat_map(Hierarchy::parts)
    }

    /// Turns checksums of later operations on or off. With them, data that changes on its way is an
    /// error that names its sender. They cost about one more pass over the data at each end. All
    /// ranks have to set the same; derived communicators inherit it.
    pub fn set_verify(&self, verify: bool) {
        self.core.verify.store(verify, Ordering::Relaxed);
        self.parts().for_each(|part| part.set_verify(verify));
    }

    /// Lets the faults of a plan strike this rank's operations, here and on derived communicators.
    /// For tests.
    pub fn inject(&self, plan: Arc<FaultPlan>) {
        self.parts().for_each(|part| part.inject(Arc::clone(&plan)));
        *lock(&self.core.faults) = Some(plan);
    }

    /// Makes known what this rank is about to do, for the reports of others.
    pub fn post(&self, position: Position) {
        self.parts().for_each(|part| part.post(position.clone()));
        *lock(&self.core.posted) = Some((position.step, position.instruction));
        self.core.backend.post(position);
    }

    /// Fails the world: every rank's waiting and later operations return an error that names this
    /// rank and `reason`. Returns the world's first failure, which is this one unless there was one
    /// before.
    pub fn abort(&self, reason: impl Into<String>) -> CommError {
        self.core.fail(ErrorKind::Aborted { reason: reason.into(), lasting: false }, &[self.rank()], None)
    }

    /// As [`Communicator::abort`], for a reason that a restart would meet again: a full disk, a
    /// file that is wrong.
    pub fn give_up(&self, reason: impl Into<String>) -> CommError {
        self.core.fail(ErrorKind::Aborted { reason: reason.into(), lasting: true }, &[self.rank()], None)
    }

    /// Tells all ranks of the world that this one is asked to stop. It waits for nobody and ends
    /// nothing: the ranks decide together when they stop.
    pub fn request_stop(&self) {
        self.core.backend.request_stop();
    }

    /// The rank of the world that called [`Communicator::request_stop`], the first that this rank
    /// has heard of. Ranks may hear of it at different times.
    pub fn stop_requested(&self) -> Option<u32> {
        self.core.backend.stop_requested()
    }

    /// The world's first failure, if it has failed.
    pub fn failure(&self) -> Option<CommError> {
        self.core.backend.failure()
    }

    /// Sums `data` over the ranks; everybody gets the sum.
    pub fn all_reduce<T: Number>(&self, data: &mut [T]) -> Result<()> {
        self.idle();
        let is_large = size_of_val(data) >= BY_NODES_BYTES_MIN;
        match self.core.nodes.get().filter(|_| is_large && Dtype::of::<T>().sum() == Dtype::of::<T>()) {
            Some(nodes) => nodes.all_reduce_in_place(data),
            None => self.core.all_reduce(data),
        }
    }

    /// Sums `input`, which is `size` parts, over the ranks; rank `r` gets part `r` of the sum in
    /// `output`.
    pub fn reduce_scatter<T: Number>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.idle();
        self.core.scatter(Operation::ReduceScatter, input, output)
    }

    /// As [`Communicator::reduce_scatter`], leaving the sum unrounded in the type it was added in
    /// (f32 for bf16).
    ///
    /// Sums over several groups one after the other keep the bits of one sum over all only if
    /// nothing is rounded in between.
    pub fn reduce_scatter_sums<T: Number>(&self, input: &[T], output: &mut [T::Sum]) -> Result<()> {
        self.idle();
        self.core.scatter(Operation::ReduceScatterSums, input, output)
    }

    /// Sums `data`, which is `size` parts, over the ranks; afterwards the own part holds its sum,
    /// and the rest is what it was.
    pub fn reduce_scatter_in_place<T: Number>(&self, data: &mut [T]) -> Result<()> {
        self.idle();
        self.core.scatter_in_place(data)
    }

    /// Everybody's `input`, in order of the ranks, in everybody's `output` of `size` parts.
    pub fn all_gather<T: Scalar>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.idle();
        self.core.gather(Operation::AllGather, input, output, 0)
    }

    /// As [`Communicator::all_gather`] with the own part in its place in `data`.
    pub fn all_gather_in_place<T: Scalar>(&self, data: &mut [T]) -> Result<()> {
        self.idle();
        self.core.gather_in_place(data)
    }

    /// The data of `root` for everybody.
    pub fn broadcast<T: Scalar>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.idle();
        self.core.broadcast(data, root)
    }

    /// Everybody's `input`, in order of the ranks, in the `output` of `root`; the others' may be
    /// empty and is left alone.
    pub fn gather<T: Scalar>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        self.idle();
        self.core.gather(Operation::Gather, input, output, root)
    }

    /// Both are `size` parts: part `j` of rank `i`'s input becomes part `i` of rank `j`'s output.
    pub fn all_to_all<T: Scalar>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.idle();
        self.core.all_to_all(input, output)
    }

    /// As [`Communicator::all_to_all`] with parts of any length: the next `sends[j]` elements of
    /// rank `i`'s input become the next `receives[i]` elements of rank `j`'s output. A rank knows
    /// what it receives; where it does not, [`Communicator::all_to_all`] of the counts tells it.
    ///
    /// Parts travel as messages between pairs of ranks, in `size - 1` rounds: in round `i` a rank
    /// sends to the rank `i` after it and receives from the rank `i` before it. Nothing is sent for
    /// an empty part.
    ///
    /// # Errors
    /// Counts of which there is not one for each rank, or whose sums are not the lengths of the
    /// buffers; a part of another length than its receiver expects.
    pub fn all_to_all_uneven<T: Scalar>(
        &self,
        input: &[T],
        sends: &[usize],
        output: &mut [T],
        receives: &[usize],
    ) -> Result<()> {
        self.idle();
        self.core.all_to_all_uneven(input, sends, output, receives)
    }

    /// Sends to one rank, which calls [`Communicator::recv`] with the same length. May wait until
    /// it does. Messages from one rank to another arrive in the order sent.
    pub fn send<T: Scalar>(&self, data: &[T], to: usize) -> Result<()> {
        self.idle();
        self.core.exchange(Some((to, data)), None)
    }

    /// Receives from one rank.
    pub fn recv<T: Scalar>(&self, data: &mut [T], from: usize) -> Result<()> {
        self.idle();
        self.core.exchange(None, Some((from, data)))
    }

    /// As [`Communicator::recv`], but waits without a deadline: for a server, whose clients may ask
    /// nothing for long. It ends when the world fails or the other rank leaves.
    pub fn recv_request<T: Scalar>(&self, data: &mut [T], from: usize) -> Result<()> {
        self.idle();
        self.core.exchange_within(None, Some((from, data)), REQUEST_DEADLINE)
    }

    /// Fails the world in the name of `members`, which something has been waiting for longer than
    /// the deadline. Returns the world's first failure.
    pub fn accuse_late(&self, members: &[usize]) -> CommError {
        self.accuse(ErrorKind::Deadline { waited: self.deadline() }, members, None)
    }

    /// Sends to one rank and receives from another at once, as in a ring.
    pub fn exchange<T: Scalar>(&self, send: &[T], to: usize, receive: &mut [T], from: usize) -> Result<()> {
        self.idle();
        self.core.exchange(Some((to, send)), Some((from, receive)))
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.idle();
        self.core.barrier()
    }

    /// A communicator for the ranks that gave the same `color`, ordered by `key` and among equals
    /// by rank; its `name` is for reports.
    pub fn split(&self, color: u32, key: u32, name: impl Into<String>) -> Result<Communicator> {
        self.idle();
        let mut keys = vec![[0u32; 2]; self.size()];
        keys[self.rank()] = [color, key];
        self.core.gather_in_place(&mut keys)?;
        let keys: Vec<(u32, u32)> = keys.into_iter().map(|[color, key]| (color, key)).collect();
        let child = Self::new(self.core.backend.split(&keys, &self.core.terms(0, &[]))?, name.into());
        child.set_deadline(self.core.deadline());
        child.set_verify(self.core.verify.load(Ordering::Relaxed));
        lock(&child.core.faults).clone_from(&lock(&self.core.faults));
        if self.core.by_nodes.load(Ordering::Relaxed) {
            child.sum_by_nodes()?;
        }
        Ok(child)
    }

    /// A communicator of the same ranks, for a lane that runs beside this one.
    pub fn duplicate(&self, name: impl Into<String>) -> Result<Communicator> {
        self.split(0, self.rank() as u32, name)
    }

    /// Starts any of the operations on buffers that the operation owns meanwhile, e.g.
    /// `communicator.start(gradients, |c, data| c.all_reduce(data))`, and returns at once.
    ///
    /// Operations started on one communicator run in the order of the calls, and blocking calls
    /// wait for them; `buffers` comes back from [`Pending::wait`].
    pub fn start<B: Send + 'static>(
        &self,
        buffers: B,
        operation: impl FnOnce(&Communicator, &mut B) -> Result<()> + Send + 'static,
    ) -> Pending<B> {
        // The worker's handle shares the core but has no worker: inside, calls run at once.
        let worker = self.worker.get_or_init(Worker::new);
        let inner = self.handle();
        worker.submit(buffers, move |buffers| operation(&inner, buffers))
    }

    /// Another handle on the same communicator, for a thread that watches it.
    pub(crate) fn handle(&self) -> Communicator {
        Communicator { core: self.core.clone(), worker: OnceLock::new() }
    }

    /// The longest time for which operations wait.
    pub fn deadline(&self) -> Duration {
        self.core.deadline()
    }

    /// Fails the world in the name of these members; the failure that counts.
    pub(crate) fn accuse(&self, kind: ErrorKind, culprits: &[usize], operation: Option<(Operation, u64)>) -> CommError {
        self.core.backend.fail_with(kind, culprits, operation, &self.core.name)
    }

    /// Asks members where they are, if that is not known anyway; whether an answer is to come.
    pub(crate) fn ask(&self, members: &[usize]) -> bool {
        self.core.backend.ask(members)
    }

    /// Members that have died, for whom nobody need wait: the world's failure then.
    pub(crate) fn bury(&self, operation: Option<(Operation, u64)>) -> Option<CommError> {
        let (dead, evidence) = self.core.backend.dead()?;
        Some(self.accuse(ErrorKind::Died { evidence }, &dead, operation))
    }

    /// Fails the world because of something that all ranks asked for and cannot have.
    pub(crate) fn refuse(&self, what: String) -> CommError {
        self.core.fail(ErrorKind::Argument { what }, &[self.rank()], None)
    }

    /// Waits for operations that were started before.
    fn idle(&self) {
        if let Some(worker) = self.worker.get() {
            worker.drain();
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.core.fail(ErrorKind::Panicked, &[self.rank()], None);
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.backend.leave();
    }
}

impl Core {
    fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms.load(Ordering::Relaxed))
    }

    fn size(&self) -> usize {
        self.backend.members().len()
    }

    fn rank(&self) -> usize {
        self.backend.rank()
    }

    /// Counts an operation and lets the fault strike that is due; its number, and whether what it
    /// sends is to be corrupted.
    fn enter(&self, operation: Operation) -> Result<(u64, bool)> {
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        let Some(plan) = lock(&self.faults).clone() else { return Ok((number, false)) };
        let rank = self.backend.members()[self.rank()];
        match plan.strike(rank, &self.name, number, *lock(&self.posted)) {
            None => Ok((number, false)),
            Some(Action::Corrupt) => Ok((number, true)),
            Some(action) => self.suffer(action, operation).map(|()| (number, false)),
        }
    }

    fn suffer(&self, action: Action, operation: Operation) -> Result<()> {
        match action {
            Action::Kill if self.backend.kind() != "local" => std::process::abort(),
            Action::Kill => {
                panic!("rank {} killed by an injected fault at {operation} on `{}`", self.rank(), self.name)
            }
            Action::Hang => loop {
                if let Some(failure) = self.backend.failure() {
                    return Err(failure);
                }
                std::thread::sleep(Duration::from_millis(5));
            },
            Action::Delay(delay) => std::thread::sleep(delay),
            Action::Refuse => return Err(self.fail(ErrorKind::Refused, &[self.rank()], Some(operation))),
            Action::Corrupt => {}
        }
        Ok(())
    }

    fn terms<'a>(&'a self, number: u64, sums: &'a [u64]) -> Terms<'a> {
        Terms { deadline: self.deadline(), number, group: &self.name, sums }
    }

    fn fail(&self, kind: ErrorKind, culprits: &[usize], operation: Option<Operation>) -> CommError {
        let number = self.operations.load(Ordering::Relaxed);
        self.backend.fail_with(kind, culprits, operation.map(|operation| (operation, number)), &self.name)
    }

    /// An error in the caller's arguments fails the world too: the others wait for an operation
    /// that will not come.
    fn argument<T>(&self, operation: Operation, what: String) -> Result<T> {
        Err(self.fail(ErrorKind::Argument { what }, &[self.rank()], Some(operation)))
    }

    /// # Safety
    /// As [`Backend::collective`].
    unsafe fn call(&self, signature: Signature, input: *const u8, output: *mut u8) -> Result<()> {
        let (number, corrupt) = self.enter(signature.operation)?;
        let bytes = signature.extent(self.size(), self.rank()).input;
        let mut sums = Vec::new();
        if (self.verify.load(Ordering::Relaxed) || corrupt) && bytes > 0 {
            // SAFETY: the caller promises as many readable bytes, and nobody writes them before the
            // operation begins.
            let input = unsafe { std::slice::from_raw_parts(input, bytes) };
            if self.verify.load(Ordering::Relaxed) {
                sums = checksums(&signature, self.size(), input);
            }
            if corrupt {
                // The part that the next rank is sent; the own part stays where it is.
                let (start, length) = signature.read_by(self.size(), (self.rank() + 1) % self.size());
                let sent = if length > 0 { start..start + length } else { 0..bytes };
                let bad = corrupted(input, sent, number);
                let call = Call { signature, input: bad.as_ptr().cast(), output };
                // SAFETY: the caller's promise; the copy is as long as the input, aligned for every
                // number, and outlives the operation.
                return unsafe { self.backend.collective(&call, &self.terms(number, &sums)) };
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.backend.collective(&Call { signature, input, output }, &self.terms(number, &sums)) }
    }

    /// Length of a part of `whole` elements, which `size` ranks share.
    fn part(&self, operation: Operation, whole: usize) -> Result<usize> {
        let size = self.size();
        if whole.is_multiple_of(size) {
            return Ok(whole / size);
        }
        self.argument(operation, format!("{whole} elements cannot be shared by {size} ranks: pad them to a multiple"))
    }

    /// `whole` holds one part of `part` elements for each rank.
    fn parts(&self, operation: Operation, whole: usize, part: usize) -> Result<()> {
        let size = self.size();
        if whole == part * size {
            return Ok(());
        }
        self.argument(
            operation,
            format!(
                "the longer buffer has {whole} elements, but {size} ranks with parts of {part} need {}",
                part * size
            ),
        )
    }

    fn known(&self, operation: Operation, rank: usize) -> Result<()> {
        let size = self.size();
        if rank < size {
            return Ok(());
        }
        self.argument(operation, format!("rank {rank} does not exist: the group has ranks 0 to {}", size - 1))
    }

    fn all_reduce<T: Number>(&self, data: &mut [T]) -> Result<()> {
        let (dtype, elements) = (Dtype::of::<T>(), data.len());
        let signature = Signature { operation: Operation::AllReduce, dtype, elements, root: 0 };
        let data: *mut u8 = data.as_mut_ptr().cast();
        // SAFETY: `data` is ours for the call, and an all-reduce may be in place.
        unsafe { self.call(signature, data, data) }
    }

    fn scatter<T: Number, O: Number>(&self, operation: Operation, input: &[T], output: &mut [O]) -> Result<()> {
        self.parts(operation, input.len(), output.len())?;
        let signature = Signature { operation, dtype: Dtype::of::<T>(), elements: output.len(), root: 0 };
        // SAFETY: both slices are ours for the call, and their lengths fit each other.
        unsafe { self.call(signature, input.as_ptr().cast(), output.as_mut_ptr().cast()) }
    }

    fn scatter_in_place<T: Number>(&self, data: &mut [T]) -> Result<()> {
        let operation = Operation::ReduceScatter;
        let elements = self.part(operation, data.len())?;
        let signature = Signature { operation, dtype: Dtype::of::<T>(), elements, root: 0 };
        let data: *mut u8 = data.as_mut_ptr().cast();
        // SAFETY: `data` is ours for the call; the output is the own part, which no other rank
        // reads.
        unsafe { self.call(signature, data, data.add(self.rank() * signature.part_bytes())) }
    }

    fn gather<T: Scalar>(&self, operation: Operation, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        self.known(operation, root)?;
        if operation == Operation::AllGather || root == self.rank() {
            self.parts(operation, output.len(), input.len())?;
        }
        let signature = Signature { operation, dtype: Dtype::of::<T>(), elements: input.len(), root };
        // SAFETY: both slices are ours for the call, and their lengths fit each other where the
        // output is used.
        unsafe { self.call(signature, input.as_ptr().cast(), output.as_mut_ptr().cast()) }
    }

    fn gather_in_place<T: Scalar>(&self, data: &mut [T]) -> Result<()> {
        let operation = Operation::AllGather;
        let elements = self.part(operation, data.len())?;
        let signature = Signature { operation, dtype: Dtype::of::<T>(), elements, root: 0 };
        let data: *mut u8 = data.as_mut_ptr().cast();
        // SAFETY: `data` is ours for the call; the input is the own part, which the operation does
        // not write.
        unsafe { self.call(signature, data.add(self.rank() * signature.part_bytes()), data) }
    }

    fn broadcast<T: Scalar>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.known(Operation::Broadcast, root)?;
        let (dtype, elements) = (Dtype::of::<T>(), data.len());
        let signature = Signature { operation: Operation::Broadcast, dtype, elements, root };
        let data: *mut u8 = data.as_mut_ptr().cast();
        // SAFETY: `data` is ours for the call, and a broadcast may be in place.
        unsafe { self.call(signature, data, data) }
    }

    fn all_to_all<T: Scalar>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let operation = Operation::AllToAll;
        let elements = self.part(operation, input.len())?;
        self.parts(operation, output.len(), elements)?;
        let signature = Signature { operation, dtype: Dtype::of::<T>(), elements, root: 0 };
        // SAFETY: both slices are ours for the call, and of one length.
        unsafe { self.call(signature, input.as_ptr().cast(), output.as_mut_ptr().cast()) }
    }

    fn all_to_all_uneven<T: Scalar>(
        &self,
        input: &[T],
        sends: &[usize],
        output: &mut [T],
        receives: &[usize],
    ) -> Result<()> {
        let (rank, size) = (self.rank(), self.size());
        let places = |what: &str, counts: &[usize], elements: usize| -> Result<Vec<Range<usize>>> {
            let mut end = 0usize;
            let mut next = |count: &usize| {
                let start = end;
                end = end.saturating_add(*count);
                start..end
            };
            let places: Vec<Range<usize>> = counts.iter().map(&mut next).collect();
            if counts.len() == size && end == elements {
                return Ok(places);
            }
            let what = format!(
                "the {what} buffer has {elements} elements, and the counts of its parts are {counts:?}: give one for \
                 each of the {size} ranks, {elements} in all"
            );
            self.argument(Operation::AllToAll, what)
        };
        let (from, to) = (places("input", sends, input.len())?, places("output", receives, output.len())?);
        if from[rank].len() != to[rank].len() {
            let [sent, received] = [from[rank].len(), to[rank].len()];
            let what = format!("rank {rank} sends {sent} elements to itself and expects {received}");
            return self.argument(Operation::AllToAll, what);
        }
        output[to[rank].clone()].copy_from_slice(&input[from[rank].clone()]);
        for round in 1..size {
            let (next, before) = ((rank + round) % size, (rank + size - round) % size);
            let send = Some((next, &input[from[next].clone()])).filter(|(_, part)| !part.is_empty());
            let receive = Some((before, &mut output[to[before].clone()])).filter(|(_, part)| !part.is_empty());
            if send.is_some() || receive.is_some() {
                self.exchange(send, receive)?;
            }
        }
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        let signature = Signature { operation: Operation::Barrier, dtype: Dtype::Plain(1), elements: 0, root: 0 };
        // SAFETY: a barrier has no memory.
        unsafe { self.call(signature, std::ptr::null(), std::ptr::null_mut()) }
    }

    fn exchange<T: Scalar>(&self, send: Option<(usize, &[T])>, receive: Option<(usize, &mut [T])>) -> Result<()> {
        self.exchange_within(send, receive, self.deadline())
    }

    fn exchange_within<T: Scalar>(
        &self,
        send: Option<(usize, &[T])>,
        receive: Option<(usize, &mut [T])>,
        deadline: Duration,
    ) -> Result<()> {
        let rank = self.rank();
        let ends = [(Operation::Send, send.map(|s| s.0)), (Operation::Receive, receive.as_ref().map(|r| r.0))];
        for (operation, peer) in ends {
            let Some(peer) = peer else { continue };
            self.known(operation, peer)?;
            if peer == rank && ends[0].1 != ends[1].1 {
                return self.argument(operation, format!("rank {rank} cannot {operation} to or from itself alone"));
            }
        }
        if let Some(failure) = self.backend.failure() {
            return Err(failure);
        }
        let direction = if send.is_some() { Operation::Send } else { Operation::Receive };
        let (number, corrupt) = self.enter(direction)?;
        let send = send.map(|(to, data)| (to, bytemuck::cast_slice::<T, u8>(data)));
        let receive = receive.map(|(from, data)| (from, bytemuck::cast_slice_mut(data)));
        let verify = self.verify.load(Ordering::Relaxed);
        let sums: Vec<u64> = send.iter().filter(|_| verify).map(|(_, data)| xxh3_64(data)).collect();
        let Some((to, data)) = send.filter(|(_, data)| corrupt && !data.is_empty()) else {
            return self.backend.exchange(send, receive, &Terms { deadline, ..self.terms(number, &sums) });
        };
        let bad = corrupted(data, 0..data.len(), number);
        let bad = &bytemuck::cast_slice(&bad)[..data.len()];
        self.backend.exchange(Some((to, bad)), receive, &Terms { deadline, ..self.terms(number, &sums) })
    }
}

/// A copy with one bit of the bytes `sent` flipped; in words, so that it is aligned for every
/// number.
fn corrupted(input: &[u8], sent: Range<usize>, number: u64) -> Vec<u64> {
    let mut copy = vec![0u64; input.len().div_ceil(8)];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut copy);
    bytes[..input.len()].copy_from_slice(input);
    bytes[sent.start + number as usize % sent.len()] ^= 1 << (number % 8);
    copy
}
