//! Tensors: a contiguous row-major region of a pooled buffer, with a shape and a dtype.
//!
//! A tensor is a handle: clones and views share the buffer, and the memory goes back to the pool
//! with the last of them. There are no strides: kernels that profit from strided operands
//! (attention on a fused qkv matrix) take them explicitly, everything else is contiguous, and
//! `transpose` moves data.
//!
//! **Aliasing.** Views of one buffer may overlap (a unit's flat parameters and each parameter in
//! them). Operations that write take `&mut Tensor`, and check that what they write does not overlap
//! what they read unless they work in place. Memory of a GPU is worked on by kernels alone;
//! [`crate::host`] has what the host reads and writes, on every device. Between threads, order is
//! the business of the step program, whose dependencies say which instruction writes what.

use crate::device::Device;
use crate::error::{Result, TensorError};
use crate::pool::{Buffer, Purpose};
use crate::{DType, Scalar, Shape, ensure_shape};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use trainyard_cuda::driver::Region;

/// A contiguous array on a device.
#[derive(Clone)]
pub struct Tensor {
    device: Device,
    buffer: Arc<Buffer>,
    /// First byte in the buffer.
    offset: usize,
    shape: Shape,
    dtype: DType,
}

impl Tensor {
    pub(crate) fn allocate(device: &Device, shape: Shape, dtype: DType, purpose: Purpose) -> Result<Tensor> {
        let buffer = device.pool().allocate(shape.elements() * dtype.size(), purpose)?;
        Ok(Tensor { device: device.clone(), buffer: Arc::new(buffer), offset: 0, shape, dtype })
    }

    /// A tensor of zeros. Pages that are fresh from the operating system are zero and stay
    /// untouched until they are first used, by as many threads as then work on them.
    pub(crate) fn allocate_zeros(device: &Device, shape: Shape, dtype: DType, purpose: Purpose) -> Result<Tensor> {
        let mut tensor = Tensor::allocate(device, shape, dtype, purpose)?;
        if !tensor.buffer.was_zero() {
            tensor.fill_zero()?;
        }
        Ok(tensor)
    }

    /// Its dimensions.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where it lives.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The purpose that its memory is counted under.
    pub fn purpose(&self) -> Purpose {
        self.buffer.purpose()
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.elements()
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// Rows when all but the last dimension are folded.
    pub fn rows(&self) -> usize {
        self.shape.rows()
    }

    /// The last dimension.
    pub fn last_dim(&self) -> usize {
        self.shape.last_dim()
    }

    /// True if no other handle refers to the buffer, so that an operation may work in place
    /// unnoticed.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1
    }

    /// An address that identifies the buffer, for counting shared memory once.
    pub fn buffer_id(&self) -> usize {
        Arc::as_ptr(&self.buffer) as usize
    }

    /// Bytes that the whole buffer takes in the pool.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer.capacity()
    }

    /// An uninitialised tensor on the same device for activations.
    pub fn empty_like(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        self.device.empty(shape, dtype, Purpose::Activations)
    }

    /// The same elements in another shape.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        ensure_shape!(
            shape.elements() == self.elements(),
            "reshape",
            "{} has {} elements, {shape} has {}",
            self.shape,
            self.elements(),
            shape.elements()
        );
        Ok(Tensor { shape, ..self.clone() })
    }

    /// The elements `start .. start + shape.elements()` of the flattened tensor, as a tensor of
    /// `shape`.
    pub fn view(&self, start: usize, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        ensure_shape!(
            start + shape.elements() <= self.elements(),
            "view",
            "elements {start}..{} of a tensor of {}",
            start + shape.elements(),
            self.elements()
        );
        Ok(Tensor { shape, offset: self.offset + start * self.dtype.size(), ..self.clone() })
    }

    /// Rows `range` of the first dimension.
    pub fn narrow(&self, range: Range<usize>) -> Result<Tensor> {
        let first = self.shape.first().copied().unwrap_or(0);
        ensure_shape!(
            range.start <= range.end && range.end <= first,
            "narrow",
            "rows {range:?} of a tensor of shape {}",
            self.shape
        );
        let inner: usize = self.shape[1..].iter().product();
        let mut dims = self.shape.to_vec();
        dims[0] = range.len();
        self.view(range.start * inner, &dims)
    }

    /// The elements.
    pub fn data<T: Scalar>(&self) -> Result<&[T]> {
        if T::DTYPE != self.dtype {
            return Err(TensorError::DType { op: "data", expected: T::DTYPE.name(), got: self.dtype });
        }
        let base = self.buffer.data().ok_or_else(|| self.no_host_data("reading"))?;
        // SAFETY: the region lies in the buffer (every constructor checks it), is aligned for `T`
        // (blocks to 64 bytes, offsets to whole elements), every bit pattern is a `T`, and the
        // buffer lives as long as the borrow.
        Ok(unsafe { std::slice::from_raw_parts(base.as_ptr().add(self.offset).cast::<T>(), self.elements()) })
    }

    /// The elements, for writing. See the module's words on aliasing.
    pub fn data_mut<T: Scalar>(&mut self) -> Result<&mut [T]> {
        if T::DTYPE != self.dtype {
            return Err(TensorError::DType { op: "data_mut", expected: T::DTYPE.name(), got: self.dtype });
        }
        let base = self.buffer.data().ok_or_else(|| self.no_host_data("writing"))?;
        // SAFETY: as in `data`; that no overlapping region is read meanwhile is the callers'
        // contract (module docs).
        Ok(unsafe { std::slice::from_raw_parts_mut(base.as_ptr().add(self.offset).cast::<T>(), self.elements()) })
    }

    /// For kernel calls inside `launch`, where dtype and device are known to be right.
    #[track_caller]
    pub(crate) fn get<T: Scalar>(&self) -> &[T] {
        self.data().expect("a launched kernel has data of the checked dtype")
    }

    /// As [`Tensor::get`], for writing.
    #[track_caller]
    pub(crate) fn get_mut<T: Scalar>(&mut self) -> &mut [T] {
        self.data_mut().expect("a launched kernel has data of the checked dtype")
    }

    /// Why the host cannot work on its memory.
    pub(crate) fn no_host_data(&self, what: &'static str) -> TensorError {
        match self.device.as_cuda() {
            Some(_) => TensorError::NotOnHost { what, shape: self.shape },
            None => TensorError::NoData { what, shape: self.shape },
        }
    }

    /// True if a GPU can copy its memory by itself.
    pub(crate) fn is_pinned(&self) -> bool {
        self.buffer.is_pinned()
    }

    /// Its memory on a GPU, on which this thread's lane is about to work.
    ///
    /// # Panics
    /// On other devices.
    #[track_caller]
    pub(crate) fn region(&self, written: bool) -> Region {
        let base = self.buffer.address().expect("a kernel launched on cuda has tensors there");
        if let Some(cuda) = self.device.as_cuda() {
            cuda.capturing().refers_to(&self.buffer);
        }
        Region { address: base + self.offset as u64, bytes: self.bytes(), written }
    }

    /// The elements as raw bytes, little-endian as in memory.
    pub fn as_bytes(&self) -> Result<&[u8]> {
        let base = self.buffer.data().ok_or_else(|| self.no_host_data("reading"))?;
        // SAFETY: the region lies in the buffer, and any memory is bytes.
        Ok(unsafe { std::slice::from_raw_parts(base.as_ptr().add(self.offset), self.bytes()) })
    }

    /// The elements as raw bytes, for writing.
    pub fn as_bytes_mut(&mut self) -> Result<&mut [u8]> {
        let base = self.buffer.data().ok_or_else(|| self.no_host_data("writing"))?;
        // SAFETY: as in `as_bytes`; every byte pattern is a value of each dtype.
        Ok(unsafe { std::slice::from_raw_parts_mut(base.as_ptr().add(self.offset), self.bytes()) })
    }

    /// True if the two are the same bytes, whatever their shapes.
    pub fn is_same_region(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer) && self.offset == other.offset && self.bytes() == other.bytes()
    }

    /// True if the two regions share a byte.
    pub fn overlaps(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer)
            && self.offset < other.offset + other.bytes()
            && other.offset < self.offset + self.bytes()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {} on {}, {})", self.dtype, self.shape, self.device.name(), self.purpose())
    }
}

/// Runs an expression with `T` bound to the Rust type of a float dtype.
#[macro_export]
macro_rules! by_float {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::BF16 => {
                type $T = $crate::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $T = $crate::f16;
                $body
            }
            got => return Err($crate::TensorError::DType { op: $op, expected: "f32, bf16 or f16", got }),
        }
    };
}
