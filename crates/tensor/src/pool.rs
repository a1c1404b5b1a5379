//! The memory pool of a rank. Every byte has a purpose, live and peak bytes are counted per
//! purpose, and freed blocks are reused.
//!
//! Blocks are rounded up to size classes, eight per octave (waste below 12.5 %); blocks of model
//! state are rounded only to cache lines. A freed block serves the next request of its size. Steps
//! repeat their requests, so after the first step the operating system is no longer asked. Blocks
//! that no request of a step uses are given back if keeping them would hold more than an eighth
//! above the peak of live bytes.
//!
//! A GPU's pool is the same with blocks of its memory. Counts are of rounded sizes. The meta device
//! runs the same code without memory behind it, so its count is exactly that of the real one and
//! not an estimate.

mod arena;

pub use arena::{Arena, Held};

use crate::cuda::Cuda;
use crate::cuda::memory::{DeviceBlock, PinnedBlock};
use crate::error::{Result, TensorError};
use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use trainyard_base::lock;

/// The purpose of a byte.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Purpose {
    /// Parameters: masters, compute copies and packed forms of the rank's own shard.
    Params,
    /// Parameters gathered from other ranks for a while.
    Gathered,
    /// Gradients of parameters.
    Grads,
    /// Optimizer state.
    Optimizer,
    /// Activations kept for backward, and gradients of activations.
    Activations,
    /// Scratch memory of kernels.
    Workspace,
    /// Staging of collectives.
    Comm,
    /// Batches.
    Data,
}

impl Purpose {
    /// Every purpose, in the order of reports.
    pub const ALL: [Purpose; 8] = [
        Purpose::Params,
        Purpose::Gathered,
        Purpose::Grads,
        Purpose::Optimizer,
        Purpose::Activations,
        Purpose::Workspace,
        Purpose::Comm,
        Purpose::Data,
    ];

    /// True if the model fixes the sizes of its buffers, as for a unit's parameters. They come in
    /// few sizes, so classes would waste memory without more reuse.
    const fn is_state(self) -> bool {
        matches!(self, Purpose::Params | Purpose::Gathered | Purpose::Grads | Purpose::Optimizer)
    }

    /// The name in configs, metrics and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Purpose::Params => "params",
            Purpose::Gathered => "gathered",
            Purpose::Grads => "grads",
            Purpose::Optimizer => "optimizer",
            Purpose::Activations => "activations",
            Purpose::Workspace => "workspace",
            Purpose::Comm => "comm",
            Purpose::Data => "data",
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Live and peak bytes, per purpose and in total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    live: [usize; Purpose::ALL.len()],
    peak: [usize; Purpose::ALL.len()],
    peak_total: usize,
    reserved: usize,
    reserved_peak: usize,
    outside: usize,
}

impl Usage {
    /// Bytes in use now for `purpose`.
    pub fn live(&self, purpose: Purpose) -> usize {
        self.live[purpose as usize]
    }

    /// The most bytes ever in use at once for `purpose`.
    pub fn peak(&self, purpose: Purpose) -> usize {
        self.peak[purpose as usize]
    }

    /// Bytes in use now.
    pub fn live_total(&self) -> usize {
        self.live.iter().sum()
    }

    /// The most bytes ever in use at once; at most the sum of the purposes' peaks.
    pub fn peak_total(&self) -> usize {
        self.peak_total
    }

    /// Bytes held from the operating system: live blocks and those kept for reuse.
    pub fn reserved(&self) -> usize {
        self.reserved
    }

    /// The most bytes ever held at once: blocks, in use and kept for reuse, and what is counted
    /// outside of the pool. Above [`Usage::peak_total`] is fragmentation.
    pub fn reserved_peak(&self) -> usize {
        self.reserved_peak
    }

    fn note_reserved(&mut self) {
        self.reserved_peak = self.reserved_peak.max(self.reserved + self.outside);
    }
}

/// Hands out [`Buffer`]s; cheap to clone, all clones are one pool.
#[derive(Clone)]
pub struct MemoryPool(Arc<Inner>);

struct Inner {
    backing: Backing,
    limit: Option<usize>,
    state: Mutex<State>,
}

/// Where blocks come from.
enum Backing {
    /// Counting only: the meta device.
    Nothing,
    Host,
    Device(Arc<Cuda>),
    /// The host's, beside a GPU.
    Pinned(Arc<Cuda>),
}

#[derive(Default)]
struct State {
    usage: Usage,
    /// Free blocks by capacity.
    free: Free,
    arenas: arena::Arenas,
}

type Free = BTreeMap<usize, Vec<Block>>;

/// A piece of memory.
enum Block {
    Host(HostBlock),
    Device(DeviceBlock),
    Pinned(PinnedBlock),
}

/// A piece of memory from the operating system, zeroed when it was new.
struct HostBlock {
    data: NonNull<u8>,
    capacity: usize,
}

// SAFETY: a block is plain memory with one owner.
unsafe impl Send for HostBlock {}
// SAFETY: as above; access to the contents is the tensors' business.
unsafe impl Sync for HostBlock {}

impl MemoryPool {
    /// A pool of real memory, or (`backed` false) one that only counts. `limit`: the most live
    /// bytes.
    pub fn new(backed: bool, limit: Option<usize>) -> MemoryPool {
        MemoryPool::of(if backed { Backing::Host } else { Backing::Nothing }, limit)
    }

    /// A pool of a GPU's memory.
    pub(crate) fn on_device(cuda: Arc<Cuda>, limit: Option<usize>) -> MemoryPool {
        MemoryPool::of(Backing::Device(cuda), limit)
    }

    /// A pool of the host's memory that a GPU copies from and to by itself. Its pages are pinned
    /// when a block is new, which is once.
    pub(crate) fn pinned(cuda: Arc<Cuda>) -> MemoryPool {
        MemoryPool::of(Backing::Pinned(cuda), None)
    }

    fn of(backing: Backing, limit: Option<usize>) -> MemoryPool {
        MemoryPool(Arc::new(Inner { backing, limit, state: Mutex::default() }))
    }

    /// A buffer of at least `bytes` bytes. Its contents are arbitrary (zero or what an earlier
    /// owner left).
    pub fn allocate(&self, bytes: usize, purpose: Purpose) -> Result<Buffer> {
        let capacity = if purpose.is_state() { bytes.max(1).next_multiple_of(64) } else { size_class(bytes) };
        let mut state = self.lock();
        let would = state.usage.live_total() + capacity;
        if let Some(limit) = self.0.limit.filter(|limit| would > *limit) {
            let live = Purpose::ALL.map(|p| format!("{p} {}", state.usage.live(p))).join(", ");
            return Err(TensorError::OutOfMemory { asked: bytes, purpose, would, limit, over: would - limit, live });
        }
        state.count(purpose, capacity);
        let arena = state.arenas.entered();
        let got = match arena {
            Some(arena) => state.block_of(arena, &self.0.backing, capacity, bytes, purpose),
            None => state.block(&self.0.backing, capacity, bytes, purpose),
        };
        let (block, is_zero) = got.inspect_err(|_| state.usage.live[purpose as usize] -= capacity)?;
        drop(state);
        Ok(Buffer { pool: self.clone(), block, capacity, purpose, is_zero, arena })
    }

    /// Counts memory that is held outside the pool for good, such as the per-thread panels of
    /// kernels.
    pub fn count_static(&self, bytes: usize, purpose: Purpose) {
        let mut state = self.lock();
        state.count(purpose, bytes);
        state.usage.outside += bytes;
        state.usage.note_reserved();
    }

    /// The bytes in use now, and the peaks.
    pub fn usage(&self) -> Usage {
        self.lock().usage
    }

    /// Sets every peak to what is live now, so that the peak of one step can be read.
    pub fn reset_peaks(&self) {
        let mut state = self.lock();
        state.usage.peak = state.usage.live;
        state.usage.peak_total = state.usage.live_total();
        state.usage.reserved_peak = 0;
        state.usage.note_reserved();
    }

    /// Gives all unused blocks back to the operating system.
    pub fn trim(&self) {
        self.lock().trim(0);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        lock(&self.0.state)
    }
}

impl State {
    fn count(&mut self, purpose: Purpose, bytes: usize) {
        let usage = &mut self.usage;
        usage.live[purpose as usize] += bytes;
        usage.peak[purpose as usize] = usage.peak[purpose as usize].max(usage.live[purpose as usize]);
        usage.peak_total = usage.peak_total.max(usage.live_total());
    }

    /// A block, and whether it is all zeros.
    fn block(
        &mut self,
        backing: &Backing,
        capacity: usize,
        bytes: usize,
        purpose: Purpose,
    ) -> Result<(Option<Block>, bool)> {
        if let Backing::Nothing = backing {
            return Ok((None, false));
        }
        if let Some(block) = take_free(&mut self.free, capacity)? {
            return Ok((Some(block), false));
        }
        self.make_room(capacity);
        let block = match backing {
            Backing::Device(cuda) => Block::Device(self.device_block(cuda, capacity)?),
            Backing::Pinned(cuda) => Block::Pinned(PinnedBlock::new(cuda, capacity)?),
            _ => {
                let refused = |source| TensorError::Refused { bytes, purpose, source };
                Block::Host(HostBlock::new(capacity).map_err(refused)?)
            }
        };
        self.usage.reserved += capacity;
        self.usage.note_reserved();
        let is_zero = !matches!(block, Block::Device(_));
        Ok((Some(block), is_zero))
    }

    /// Unused blocks make room first, so that what is held stays near the peak of what is used.
    fn make_room(&mut self, capacity: usize) {
        let allowed = self.usage.peak_total + self.usage.peak_total / 8;
        if self.usage.reserved + capacity > allowed {
            self.trim(allowed.saturating_sub(capacity));
        }
    }

    /// A new block; a full device gets all unused ones back first.
    fn device_block(&mut self, cuda: &Arc<Cuda>, capacity: usize) -> Result<DeviceBlock> {
        let first = DeviceBlock::new(cuda, capacity);
        if first.is_ok() || self.free.is_empty() {
            return first;
        }
        self.trim(0);
        DeviceBlock::new(cuda, capacity)
    }

    /// Frees unused blocks, largest first, until at most `target` bytes are reserved.
    fn trim(&mut self, target: usize) {
        while self.usage.reserved > target {
            let Some(mut entry) = self.free.last_entry() else { break };
            if entry.get_mut().pop().is_some() {
                self.usage.reserved -= *entry.key();
            }
            if entry.get().is_empty() {
                entry.remove();
            }
        }
    }
}

/// A free block of that size; of a GPU's rather one that needs no waiting for other lanes.
fn take_free(free: &mut Free, capacity: usize) -> Result<Option<Block>> {
    let Some(free) = free.get_mut(&capacity) else { return Ok(None) };
    let own = free.iter().rposition(|block| matches!(block, Block::Device(block) if block.is_own()));
    let block = own.map(|at| free.swap_remove(at)).or_else(|| free.pop());
    if let Some(Block::Device(block)) = &block {
        block.take_over()?;
    }
    Ok(block)
}

/// Bytes rounded up to a class: multiples of 64 up to 512, then eight classes per octave.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(1);
    if bytes <= 512 {
        return bytes.next_multiple_of(64);
    }
    let step = bytes.next_power_of_two() / 16;
    bytes.next_multiple_of(step.max(64))
}

/// From this size on a block is mapped by itself, aligned to 2 MiB and advised to use huge pages: a
/// fault then costs per 2 MiB instead of per 4 KiB, and the optimizer's passes miss the TLB 512
/// times less.
const MAP_FROM: usize = 1 << 21;

/// Small blocks are aligned to a cache line, which is also the width of the widest vector.
const ALIGN: usize = 64;

impl HostBlock {
    fn new(capacity: usize) -> std::io::Result<HostBlock> {
        let data = if capacity >= MAP_FROM { map(capacity)? } else { Self::small(capacity)? };
        Ok(HostBlock { data, capacity })
    }

    fn small(capacity: usize) -> std::io::Result<NonNull<u8>> {
        let layout = std::alloc::Layout::from_size_align(capacity, ALIGN).expect("a class is a multiple of 64");
        // SAFETY: the layout's size is not zero.
        let data = unsafe { std::alloc::alloc_zeroed(layout) };
        NonNull::new(data).ok_or_else(|| std::io::ErrorKind::OutOfMemory.into())
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if self.capacity >= MAP_FROM {
            unmap(self.data, self.capacity);
        } else {
            let layout = std::alloc::Layout::from_size_align(self.capacity, ALIGN).expect("checked when it was made");
            // SAFETY: allocated in `small` with the same layout.
            unsafe { std::alloc::dealloc(self.data.as_ptr(), layout) }
        }
    }
}

#[cfg(unix)]
fn map(capacity: usize) -> std::io::Result<NonNull<u8>> {
    let padded = capacity + MAP_FROM;
    // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing
    // that exists.
    let base = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), padded, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if base == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    let start = (base as usize).next_multiple_of(MAP_FROM);
    let lead = start - base as usize;
    // SAFETY: both ranges lie inside the mapping just made and outside the part that is kept.
    unsafe {
        if lead > 0 {
            libc::munmap(base, lead);
        }
        let tail = page_ceil(start + capacity);
        let end = base as usize + padded;
        if end > tail {
            libc::munmap(tail as *mut _, end - tail);
        }
        #[cfg(target_os = "linux")]
        libc::madvise(start as *mut _, capacity, libc::MADV_HUGEPAGE);
    }
    Ok(NonNull::new(start as *mut u8).expect("a mapping is not at address zero"))
}

#[cfg(unix)]
fn page_ceil(address: usize) -> usize {
    address.next_multiple_of(4096)
}

#[cfg(unix)]
fn unmap(data: NonNull<u8>, capacity: usize) {
    // SAFETY: made by `map` with this capacity; nothing refers to it any more.
    unsafe { libc::munmap(data.as_ptr().cast(), page_ceil(capacity)) };
}

#[cfg(not(unix))]
fn map(capacity: usize) -> std::io::Result<NonNull<u8>> {
    HostBlock::small(capacity)
}

#[cfg(not(unix))]
fn unmap(data: NonNull<u8>, capacity: usize) {
    let layout = std::alloc::Layout::from_size_align(capacity, ALIGN).expect("checked when it was made");
    // SAFETY: made by `map` with the same layout.
    unsafe { std::alloc::dealloc(data.as_ptr(), layout) }
}

/// Memory of one purpose; goes back to its pool when dropped.
pub struct Buffer {
    pool: MemoryPool,
    /// None on the meta device.
    block: Option<Block>,
    capacity: usize,
    purpose: Purpose,
    /// Fresh from the operating system, which gives zeros.
    is_zero: bool,
    /// The arena that it came from, and goes back to while that is there.
    arena: Option<u64>,
}

impl Buffer {
    /// True if it was all zeros when it was handed out.
    pub(crate) fn was_zero(&self) -> bool {
        self.is_zero
    }

    /// The first byte, aligned to 64; None on the meta device and on GPUs.
    pub(crate) fn data(&self) -> Option<NonNull<u8>> {
        match &self.block {
            Some(Block::Host(block)) => Some(block.data),
            Some(Block::Pinned(block)) => Some(block.data()),
            _ => None,
        }
    }

    /// The first byte in the memory of a GPU, on which this thread's lane is about to work; None
    /// elsewhere.
    pub(crate) fn address(&self) -> Option<u64> {
        match &self.block {
            Some(Block::Device(block)) => Some(block.used()),
            _ => None,
        }
    }

    /// True if it came from an [`Arena`].
    pub(crate) fn is_of_arena(&self) -> bool {
        self.arena.is_some()
    }

    /// True if it is host memory that a GPU can copy by itself.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.block, Some(Block::Pinned(_)))
    }

    /// The purpose of the buffer.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Usable bytes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.usage.live[self.purpose as usize] -= self.capacity;
        if let Some(block) = self.block.take() {
            state.free_of(self.arena).entry(self.capacity).or_default().push(block);
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes for {})", self.capacity, self.purpose)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn classes_waste_less_than_an_eighth() {
        for bytes in (513..100_000).chain([1 << 20, (1 << 20) + 1, 123_456_789]) {
            let class = size_class(bytes);
            assert!(class >= bytes && class - bytes < bytes.next_power_of_two() / 16 + 64, "{bytes} -> {class}");
        }
    }

    #[test]
    fn a_repeated_step_asks_the_operating_system_once() {
        let pool = MemoryPool::new(true, None);
        let mut reserved = None;
        for _ in 0..5 {
            let _buffers: Vec<_> =
                [100, 5_000, 3 << 20, 9 << 20].map(|n| pool.allocate(n, Purpose::Activations).unwrap()).into();
            let now = pool.usage().reserved();
            assert_eq!(*reserved.get_or_insert(now), now);
        }
        assert_eq!(pool.usage().live_total(), 0);
        let most = pool.usage();
        assert_eq!((most.reserved_peak(), most.peak_total()), (reserved.unwrap(), reserved.unwrap()));
        pool.trim();
        assert_eq!(pool.usage().reserved(), 0);
        pool.reset_peaks();
        pool.count_static(640, Purpose::Workspace);
        assert_eq!(pool.usage().reserved_peak(), 640);
    }

    #[test]
    fn what_is_kept_for_reuse_is_held_above_the_peak() {
        let pool = MemoryPool::new(true, None);
        let _kept = pool.allocate(1 << 20, Purpose::Params).unwrap();
        drop(pool.allocate(1 << 16, Purpose::Activations).unwrap());
        drop(pool.allocate(3 << 14, Purpose::Activations).unwrap());
        let usage = pool.usage();
        assert_eq!(usage.reserved_peak() - usage.peak_total(), 3 << 14);
    }

    #[test]
    fn the_limit_is_an_error_that_says_by_how_much() {
        let pool = MemoryPool::new(true, Some(1 << 20));
        let _first = pool.allocate(1 << 19, Purpose::Params).unwrap();
        let error = pool.allocate(1 << 20, Purpose::Grads).unwrap_err().to_string();
        assert!(error.contains("over the limit of 1048576 by 524288") && error.contains("params 524288"), "{error}");
        assert_eq!(pool.usage().live_total(), 1 << 19);
    }

    proptest! {
        /// Whatever is allocated and freed, meta counts what real memory counts, nothing leaks, and
        /// what is held stays within an eighth of the peak.
        #[test]
        fn meta_counts_like_memory(steps in prop::collection::vec((1usize..3_000_000, 0usize..8, any::<bool>()), 1..60)) {
            let (real, meta) = (MemoryPool::new(true, None), MemoryPool::new(false, None));
            let mut held = Vec::new();
            for (bytes, purpose, free) in steps {
                let purpose = Purpose::ALL[purpose];
                held.push((real.allocate(bytes, purpose).unwrap(), meta.allocate(bytes, purpose).unwrap()));
                if free {
                    held.swap_remove(bytes % held.len());
                }
                for purpose in Purpose::ALL {
                    prop_assert_eq!(real.usage().live(purpose), meta.usage().live(purpose));
                    prop_assert_eq!(real.usage().peak(purpose), meta.usage().peak(purpose));
                }
                let usage = real.usage();
                prop_assert!(usage.reserved() <= usage.peak_total() + usage.peak_total() / 8);
                prop_assert!(usage.reserved_peak() >= usage.peak_total());
            }
            drop(held);
            prop_assert_eq!(real.usage().live_total(), 0);
        }
    }
}
