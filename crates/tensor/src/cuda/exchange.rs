//! What another library needs to exchange tensors' memory with other devices: where it lies, and on
//! which stream.

use super::Cuda;
use crate::Tensor;
use crate::error::Result;
use std::sync::Arc;
use trainyard_cuda::driver::{Driver, Region, Stream};

impl Cuda {
    /// What the device is asked through.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Which GPU `ordinal` is, the same for every process of the host.
    ///
    /// # Errors
    /// What the machine or this build lacks for it, in a sentence.
    pub fn identity(ordinal: usize) -> Result<[u8; 16]> {
        Ok(trainyard_cuda::identity(ordinal)?)
    }
}

impl Tensor {
    /// The tensor's memory, for work that is put on this thread's stream; None on devices without
    /// streams. Counts as a use by this thread's lane, so that the memory is given to nobody else
    /// before.
    pub fn on_stream(&self) -> Result<Option<(Region, Stream)>> {
        match self.device().as_cuda() {
            Some(cuda) => Ok(Some((self.region(true), cuda.stream()?))),
            None => Ok(None),
        }
    }
}
