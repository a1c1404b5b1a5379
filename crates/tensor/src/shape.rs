//! Shapes: up to six dimensions, row-major, held inline.

use std::fmt;
use std::ops::Deref;

/// The most dimensions a tensor can have.
pub const RANK_MAX: usize = 6;

/// The dimensions of a tensor, outermost first. A scalar has none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Shape {
    dims: [usize; RANK_MAX],
    rank: usize,
}

impl Shape {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.iter().product()
    }

    /// The last dimension, 1 for a scalar.
    pub fn last_dim(&self) -> usize {
        self.last().copied().unwrap_or(1)
    }

    /// The number of rows when all but the last dimension are folded into one.
    pub fn rows(&self) -> usize {
        self[..self.rank.saturating_sub(1)].iter().product()
    }

    /// The same shape with another last dimension.
    pub fn with_last(&self, last: usize) -> Shape {
        let mut shape = *self;
        if shape.rank == 0 {
            return Shape::from([last]);
        }
        shape.dims[shape.rank - 1] = last;
        shape
    }
}

impl Deref for Shape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.dims[..self.rank]
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Shape {
        assert!(dims.len() <= RANK_MAX, "a shape of {} dimensions; the most is {RANK_MAX}", dims.len());
        let mut shape = Shape { rank: dims.len(), ..Shape::default() };
        shape.dims[..dims.len()].copy_from_slice(dims);
        shape
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Shape {
        Shape::from(&dims[..])
    }
}

impl From<&Vec<usize>> for Shape {
    fn from(dims: &Vec<usize>) -> Shape {
        Shape::from(&dims[..])
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}
