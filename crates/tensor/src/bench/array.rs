//! Operands of benchmarks, in memory as a training step gets it: aligned to cache lines, on huge
//! pages where they are large.

use crate::pool::{Buffer, MemoryPool, Purpose};
use bytemuck::Pod;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Elements in a buffer of a memory pool.
#[derive(Debug)]
pub(crate) struct Array<T> {
    buffer: Buffer,
    len: usize,
    _elements: PhantomData<T>,
}

impl<T: Pod + Default> Array<T> {
    /// `len` zeros.
    pub fn zeros(len: usize) -> Array<T> {
        let pool = MemoryPool::new(true, None);
        let buffer = pool.allocate(len * size_of::<T>(), Purpose::Workspace).expect("a pool without a limit");
        let mut array = Array { buffer, len, _elements: PhantomData };
        array.fill(T::default());
        array
    }

    /// The values that `values` gives in turn.
    pub fn from_fn(len: usize, mut values: impl FnMut() -> T) -> Array<T> {
        let mut array = Array::zeros(len);
        array.iter_mut().for_each(|x| *x = values());
        array
    }

    fn start(&self) -> *mut T {
        self.buffer.data().expect("the pool is backed by memory").as_ptr().cast()
    }
}

impl<T: Pod + Default> Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the buffer is aligned to 64 bytes, has room for `len` elements, and any bits are
        // an element.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }
}

impl<T: Pod + Default> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }
}
