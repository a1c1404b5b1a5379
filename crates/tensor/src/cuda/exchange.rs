//! The access that another library needs to exchange tensors' memory with other devices: its
//! address, and its stream.

use super::Cuda;
use crate::Tensor;
use crate::error::Result;
use std::sync::Arc;
use trainyard_cuda::driver::{Driver, Region, Stream};

impl Cuda {
    /// The driver of the device.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// The identity of GPU `ordinal`, which is the same for every process of the host.
    ///
    /// # Errors
    /// The missing part of the machine, in a sentence.
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
