//! Blocks of device memory, as the pool keeps them.

use super::{Cuda, LANES, lane};
use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use trainyard_cuda::driver::Address;

/// A block, and the lanes that have used it since it was last handed over.
///
/// The pool gives out a block again as soon as its last handle is dropped, when work on it may only have been launched. On the same lane
/// that is right, because a stream keeps its order. A lane that takes over a block of others first waits, on the device, for what those have launched.
pub(crate) struct DeviceBlock {
    cuda: Arc<Cuda>,
    address: Address,
    lanes: AtomicU32,
}

const _: () = assert!(LANES <= 32);

impl DeviceBlock {
    /// New memory.
    pub fn new(cuda: &Arc<Cuda>, bytes: usize) -> Result<DeviceBlock> {
        let address = cuda.driver.allocate(bytes)?;
        Ok(DeviceBlock { cuda: Arc::clone(cuda), address, lanes: AtomicU32::new(0) })
    }

    /// Its first byte; this thread's lane works on it.
    pub fn used(&self) -> Address {
        self.lanes.fetch_or(1 << lane(), Ordering::Relaxed);
        self.address
    }

    /// Whether no other lane has used it than this thread's.
    pub fn is_own(&self) -> bool {
        self.lanes.load(Ordering::Relaxed) & !(1 << lane()) == 0
    }

    /// Takes it over for this thread's lane.
    pub fn take_over(&self) -> Result<()> {
        let own = 1 << lane();
        let others = self.lanes.swap(own, Ordering::Relaxed) & !own;
        (0..LANES).filter(|other| others & (1 << other) != 0).try_for_each(|other| self.cuda.wait_for_lane(other))
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        self.cuda.driver.free(self.address);
    }
}
