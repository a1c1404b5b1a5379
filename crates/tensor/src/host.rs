//! The host's reads and writes of tensors, on every device.
//!
//! `with_*` gives the memory itself if it is the host's, and a copy if it is a GPU's; the caller
//! need not know which. Reading waits for everything that this thread's lane has launched; writing
//! waits for nothing.

use crate::dtype::{Element, bf16, f16};
use crate::error::{Result, TensorError};
use crate::{DType, Scalar, Tensor, ensure_shape};

impl Tensor {
    /// Lets `f` read the elements as raw bytes, little-endian as in memory.
    pub fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
        match self.device().as_cuda() {
            Some(cuda) => cuda.staged(self.region(false), (true, false), |bytes| f(bytes)),
            None => Ok(f(self.as_bytes()?)),
        }
    }

    /// Lets `f` read and write the elements as raw bytes.
    pub fn with_bytes_mut<R>(&mut self, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        match self.device().as_cuda() {
            Some(cuda) => cuda.staged(self.region(true), (true, true), f),
            None => Ok(f(self.as_bytes_mut()?)),
        }
    }

    /// Lets `f` write all elements as raw bytes; what it is given is arbitrary.
    pub fn overwrite_bytes<R>(&mut self, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        match self.device().as_cuda() {
            Some(cuda) => cuda.staged(self.region(true), (false, true), f),
            None => Ok(f(self.as_bytes_mut()?)),
        }
    }

    /// Lets `f` read the elements.
    pub fn with_data<T: Scalar, R>(&self, f: impl FnOnce(&[T]) -> R) -> Result<R> {
        self.check_dtype::<T>("with_data")?;
        self.with_bytes(|bytes| f(bytemuck::cast_slice(bytes)))
    }

    /// Lets `f` read and write the elements.
    pub fn with_data_mut<T: Scalar, R>(&mut self, f: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        self.check_dtype::<T>("with_data_mut")?;
        self.with_bytes_mut(|bytes| f(bytemuck::cast_slice_mut(bytes)))
    }

    /// Lets `f` write all elements; what it is given is arbitrary.
    pub fn overwrite<T: Scalar, R>(&mut self, f: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        self.check_dtype::<T>("overwrite")?;
        self.overwrite_bytes(|bytes| f(bytemuck::cast_slice_mut(bytes)))
    }

    fn check_dtype<T: Scalar>(&self, op: &'static str) -> Result<()> {
        if T::DTYPE == self.dtype() {
            return Ok(());
        }
        Err(TensorError::DType { op, expected: T::DTYPE.name(), got: self.dtype() })
    }

    /// Copies `data` in.
    pub fn write<T: Scalar>(&mut self, data: &[T]) -> Result<()> {
        ensure_shape!(
            data.len() == self.elements(),
            "write",
            "{} values for a tensor of shape {}",
            data.len(),
            self.shape()
        );
        self.check_dtype::<T>("write")?;
        match self.device().as_cuda() {
            Some(cuda) => cuda.upload(self.region(true), bytemuck::cast_slice(data)),
            None => {
                self.data_mut::<T>()?.copy_from_slice(data);
                Ok(())
            }
        }
    }

    /// Copies the bytes of `source`, of the same device, in; nothing on meta.
    pub fn copy_from(&mut self, source: &Tensor) -> Result<()> {
        ensure_shape!(
            source.bytes() == self.bytes() && source.device().same(self.device()),
            "copy_from",
            "{source:?} into {self:?}"
        );
        if let Some(cuda) = self.device().as_cuda() {
            return crate::cuda::copy(cuda, source, self);
        }
        if !self.device().is_meta() {
            self.as_bytes_mut()?.copy_from_slice(source.as_bytes()?);
        }
        Ok(())
    }

    /// Copies the bytes of `source` in, from a device to the host beside it ([`Device::beside`]) or
    /// back. On a GPU this is only launched, on this thread's lane: until that is done, nothing
    /// else may change `source` or use this tensor on the host. Nothing on meta.
    ///
    /// # Errors
    /// Memory of the host that the GPU cannot copy from and to by itself.
    pub fn transfer_from(&mut self, source: &Tensor) -> Result<()> {
        ensure_shape!(
            source.bytes() == self.bytes() && source.dtype() == self.dtype(),
            "transfer_from",
            "{source:?} into {self:?}"
        );
        for host in [&*self, source].into_iter().filter(|tensor| tensor.device().as_cpu().is_some()) {
            ensure_shape!(
                host.is_pinned() || self.device().as_cuda().is_none() && source.device().as_cuda().is_none(),
                "transfer_from",
                "{host:?} is not pinned"
            );
        }
        match (self.device().as_cuda().cloned(), source.device().as_cuda()) {
            (Some(cuda), None) => cuda.upload(self.region(true), source.as_bytes()?),
            (None, Some(cuda)) => cuda.fetch_into(self, source.region(false)),
            _ if self.device().is_meta() => Ok(()),
            (None, None) => {
                self.as_bytes_mut()?.copy_from_slice(source.as_bytes()?);
                Ok(())
            }
            (Some(_), Some(_)) => self.copy_from(source),
        }
    }

    /// Sets every byte to zero; nothing on meta.
    pub fn fill_zero(&mut self) -> Result<()> {
        match self.device().as_cuda() {
            Some(cuda) => cuda.zero(self.region(true)),
            None if self.device().is_meta() => Ok(()),
            None => {
                self.as_bytes_mut()?.fill(0);
                Ok(())
            }
        }
    }

    /// A copy of the elements.
    pub fn to_vec<T: Scalar>(&self) -> Result<Vec<T>> {
        self.with_data(|data: &[T]| data.to_vec())
    }

    /// A floating-point tensor's values widened to `f32`.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        match self.dtype() {
            DType::F32 => self.to_vec::<f32>(),
            DType::BF16 => self.with_data(|data: &[bf16]| data.iter().map(|x| Element::to_f32(*x)).collect()),
            DType::F16 => self.with_data(|data: &[f16]| data.iter().map(|x| Element::to_f32(*x)).collect()),
            got => Err(TensorError::DType { op: "to_f32_vec", expected: "a float type", got }),
        }
    }

    /// The only element of a float tensor, as `f32`.
    pub fn to_scalar(&self) -> Result<f32> {
        ensure_shape!(self.elements() == 1, "to_scalar", "a tensor of shape {}", self.shape());
        Ok(self.to_f32_vec()?[0])
    }
}
