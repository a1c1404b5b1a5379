//! Blocks of device memory, as the pool keeps them.

use super::{Cuda, LANES, lane};
use crate::error::Result;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use trainyard_cuda::driver::Address;

/// A block, and the lanes that have used it since it was last handed over, each with where in its
/// work that was.
///
/// The pool gives out a block again as soon as its last handle is dropped, when work on it may only
/// have been launched. On the same lane that is right, because a stream keeps its order. A lane
/// that takes over a block of others first waits, on the device, for what those have launched on
/// it, and not for what they did later: a block that an eviction freed does not make computing wait
/// for the evictions after it.
pub(crate) struct DeviceBlock {
    cuda: Arc<Cuda>,
    address: Address,
    /// Per lane, one more than its position; 0: it has not used the block.
    lanes: [AtomicU64; LANES],
}

impl DeviceBlock {
    /// New memory.
    pub fn new(cuda: &Arc<Cuda>, bytes: usize) -> Result<DeviceBlock> {
        let address = cuda.driver.allocate(bytes)?;
        Ok(DeviceBlock { cuda: Arc::clone(cuda), address, lanes: [const { AtomicU64::new(0) }; LANES] })
    }

    /// Its first byte; this thread's lane works on it.
    pub fn used(&self) -> Address {
        self.lanes[lane()].store(self.cuda.position(lane()) + 1, Ordering::Relaxed);
        self.address
    }

    /// The other lanes that may be at work on it, with where they used it last.
    fn others(&self) -> impl Iterator<Item = (usize, u64)> {
        let used = self.lanes.iter().map(|used| used.load(Ordering::Relaxed)).enumerate();
        used.filter_map(|(other, used)| Some((other, used.checked_sub(1)?))).filter(|(other, _)| *other != lane())
    }

    /// True if no other lane has to be waited for.
    pub fn is_own(&self) -> bool {
        self.others().all(|(other, position)| self.cuda.is_done(other, position))
    }

    /// Takes it over for this thread's lane.
    pub fn take_over(&self) -> Result<()> {
        self.others().try_for_each(|(other, position)| self.cuda.wait_for_lane(other, position))?;
        let others = self.lanes.iter().enumerate().filter(|(other, _)| *other != lane());
        others.for_each(|(_, used)| used.store(0, Ordering::Relaxed));
        Ok(())
    }
}

/// A block of the host's memory that the device copies from and to by itself.
pub(crate) struct PinnedBlock {
    cuda: Arc<Cuda>,
    data: NonNull<u8>,
}

// SAFETY: plain memory with one owner at a time.
unsafe impl Send for PinnedBlock {}
// SAFETY: as above; access to the contents is the tensors' business.
unsafe impl Sync for PinnedBlock {}

impl PinnedBlock {
    /// New memory, all zero.
    pub fn new(cuda: &Arc<Cuda>, bytes: usize) -> Result<PinnedBlock> {
        let data = cuda.driver.allocate_pinned(bytes)?;
        // SAFETY: just allocated with that many bytes; from here on they are initialised.
        unsafe { std::ptr::write_bytes(data, 0, bytes) };
        Ok(PinnedBlock { cuda: Arc::clone(cuda), data: NonNull::new(data).expect("memory is not at address zero") })
    }

    /// Its first byte.
    pub fn data(&self) -> NonNull<u8> {
        self.data
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        // A copy may only have been launched. Where waiting fails, so did the work, and the memory
        // is better kept.
        if self.cuda.synchronize_all().is_ok() {
            // SAFETY: it came from this driver, and nothing is left to be done with it.
            unsafe { self.cuda.driver.free_pinned(self.data.as_ptr()) }
        }
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        self.cuda.driver.free(self.address);
    }
}
