//! Copies between host and device, through pinned memory where the host works on what it gets.

use super::{Cuda, lock};
use crate::Tensor;
use crate::error::Result;
use trainyard_cuda::driver::{Driver, Region};

/// Host memory that the device copies from and to by itself.
pub(super) struct Pinned {
    data: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner at a time.
unsafe impl Send for Pinned {}

impl Pinned {
    pub fn data(&self) -> *mut u8 {
        self.data
    }

    pub fn free(self, driver: &dyn Driver) {
        // SAFETY: it came from this driver, and whoever used it has waited for its stream.
        unsafe { driver.free_pinned(self.data) }
    }
}

/// Staging buffers come in powers of two from here.
const LEAST: usize = 64 << 10;

impl Cuda {
    /// Copies host data in. It is read before this returns, unless it is pinned: then once this
    /// lane is done.
    pub fn upload(&self, to: Region, data: &[u8]) -> Result<()> {
        assert_eq!(to.bytes, data.len(), "bytes of both sides");
        // SAFETY: as many bytes, just checked; that pinned ones stay as they are is the caller's
        // business.
        Ok(unsafe { self.driver.upload(self.stream()?, to, data.as_ptr()) }?)
    }

    /// Sets every byte to zero.
    pub fn zero(&self, to: Region) -> Result<()> {
        Ok(self.driver.zero(self.stream()?, to)?)
    }

    /// Copies out, waiting for what this lane has launched.
    pub fn download(&self, from: Region, out: &mut [u8]) -> Result<()> {
        assert_eq!(from.bytes, out.len(), "bytes of both sides");
        let stream = self.stream()?;
        // SAFETY: as many bytes, just checked, which this call borrows until the stream is done.
        unsafe { self.driver.download(stream, out.as_mut_ptr(), from) }?;
        Ok(self.driver.synchronize(stream)?)
    }

    /// Lets `f` work on a copy in host memory: `reads` what the device has, and `writes` back what
    /// `f` leaves.
    pub fn staged<R>(
        &self,
        region: Region,
        (reads, writes): (bool, bool),
        f: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R> {
        let pinned = self.take_pinned(region.bytes)?;
        let stream = self.stream()?;
        // SAFETY: the buffer is this call's alone, and has at least as many bytes, all initialised
        // when it was new.
        let data = unsafe { std::slice::from_raw_parts_mut(pinned.data, region.bytes) };
        if reads {
            // SAFETY: the stream is waited for before anybody looks.
            unsafe { self.driver.download(stream, pinned.data, Region { written: false, ..region }) }?;
            self.driver.synchronize(stream)?;
        }
        let result = f(data);
        if writes {
            // SAFETY: the stream is waited for before the buffer is used again.
            unsafe { self.driver.upload(stream, Region { written: true, ..region }, pinned.data) }?;
            self.driver.synchronize(stream)?;
        }
        self.give_pinned(pinned);
        Ok(result)
    }

    /// Copies out into memory of the host beside this device, which is complete once this lane is
    /// done; nobody may use it until then.
    pub fn fetch_into(&self, to: &mut Tensor, from: Region) -> Result<()> {
        let to = to.as_bytes_mut()?;
        assert_eq!(from.bytes, to.len(), "bytes of both sides");
        // SAFETY: as many bytes, just checked; the caller keeps them for itself until the stream is
        // done.
        Ok(unsafe { self.driver.download(self.stream()?, to.as_mut_ptr(), from) }?)
    }

    /// Gives a buffer back, on which nothing works any more.
    pub(super) fn give_pinned(&self, pinned: Pinned) {
        lock(&self.pinned).push(pinned);
    }

    pub(super) fn take_pinned(&self, bytes: usize) -> Result<Pinned> {
        let mut free = lock(&self.pinned);
        let fits = (0..free.len()).filter(|at| free[*at].bytes >= bytes).min_by_key(|at| free[*at].bytes);
        if let Some(at) = fits {
            return Ok(free.swap_remove(at));
        }
        // A larger one replaces a smaller one.
        let smaller = free.pop();
        drop(free);
        if let Some(smaller) = smaller {
            smaller.free(&*self.driver);
        }
        let bytes = bytes.max(LEAST).next_power_of_two();
        let data = self.driver.allocate_pinned(bytes)?;
        // SAFETY: just allocated with that many bytes; from here on they are initialised.
        unsafe { std::ptr::write_bytes(data, 0, bytes) };
        Ok(Pinned { data, bytes })
    }
}
