//! Strided row views: the columns of a fused matrix that one operand of attention occupies.
//!
//! A fused projection writes `[tokens, (heads + 2 kv_heads) * head_dim]`; queries, keys and values
//! are column ranges of it, and so are their gradients. [`Rows`] reads such a range, [`RowsMut`]
//! writes one. Three writers of one matrix are made by cutting it along columns, which keeps them
//! disjoint without an unsafe word at the caller.

use super::AttentionError;
use crate::dtype::Scalar;
use std::marker::PhantomData;
use std::ops::Range;

/// Number of rows by which a walk fetches ahead. Rows of a fused matrix lie on different pages,
/// where no hardware prefetcher follows.
const AHEAD: usize = 8;

/// Asks for the cache lines of `len` elements from `first` on; any address is harmless.
#[inline(always)]
fn prefetch<T>(first: *const T, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let mut line = 0;
        while line < len * size_of::<T>() {
            // SAFETY: a hint, which faults nowhere; SSE is part of x86-64.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(first.cast::<i8>().wrapping_add(line)) };
            line += 64;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, len);
}

/// Rows of `cols` elements, `stride` elements apart, for reading.
#[derive(Debug)]
pub struct Rows<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Rows<'_, T> {}

/// Elements from the first of row 0 to the last of row `rows - 1`, or `None` when the view makes no
/// sense.
fn span(rows: usize, cols: usize, stride: usize) -> Option<usize> {
    if rows == 0 || cols == 0 {
        return Some(0);
    }
    if stride < cols && rows > 1 {
        return None;
    }
    (rows - 1).checked_mul(stride)?.checked_add(cols)
}

impl<'a, T> Rows<'a, T> {
    /// `rows` rows of `cols` elements of which row `r` starts at `data[r * stride]`.
    pub fn new(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Result<Self, AttentionError> {
        match span(rows, cols, stride) {
            Some(need) if need <= data.len() => Ok(Rows { data, rows, cols, stride }),
            _ => Err(AttentionError::View { rows, cols, stride, len: data.len() }),
        }
    }

    /// `rows` rows of `cols` elements without gaps.
    pub fn dense(data: &'a [T], rows: usize, cols: usize) -> Result<Self, AttentionError> {
        Rows::new(data, rows, cols, cols)
    }

    /// The columns of `range` of the same rows; panics when the range is outside.
    pub fn columns(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
        let data = if self.rows == 0 { self.data } else { &self.data[range.start..] };
        Rows { data, rows: self.rows, cols: range.end - range.start, stride: self.stride }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row's start to the next one's.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The same elements as the same type by another name; panics when the types differ.
    pub(super) fn cast<U: Scalar>(self) -> Rows<'a, U>
    where
        T: Scalar,
    {
        assert_eq!(T::DTYPE, U::DTYPE);
        Rows { data: bytemuck::cast_slice(self.data), rows: self.rows, cols: self.cols, stride: self.stride }
    }

    /// The first `rows` rows.
    pub(super) fn first_rows(self, rows: usize) -> Self {
        assert!(rows <= self.rows);
        Rows { rows, ..self }
    }

    /// The columns `cols` of each of the rows `rows` in turn, fetching ahead; panics when they are
    /// outside.
    #[inline(always)]
    pub(super) fn walk(&self, rows: Range<usize>, cols: Range<usize>) -> impl Iterator<Item = &'a [T]> + use<'a, T> {
        assert!(rows.end <= self.rows && cols.start <= cols.end && cols.end <= self.cols);
        let (len, stride) = (cols.len(), self.stride);
        let mut at = self.data.as_ptr().wrapping_add(rows.start * stride + cols.start);
        rows.map(
            #[inline(always)]
            move |_| {
                prefetch(at.wrapping_add(AHEAD * stride), len);
                // SAFETY: row and columns are inside by the assertion, and with them, by the
                // constructor, the data.
                let row = unsafe { std::slice::from_raw_parts(at, len) };
                at = at.wrapping_add(stride);
                row
            },
        )
    }

    /// The element at the first of the rows `rows` and the first of the columns `cols`; panics when
    /// they are outside.
    #[inline(always)]
    pub(super) fn block(&self, rows: &Range<usize>, cols: &Range<usize>) -> *const T {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        assert!(cols.start <= cols.end && cols.end <= self.cols, "columns {cols:?} of {}", self.cols);
        self.data.as_ptr().wrapping_add(rows.start * self.stride + cols.start)
    }

    /// Row `row`.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &'a [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &self.data[row * self.stride..][..self.cols]
    }
}

/// Rows of `cols` elements, `stride` elements apart, for writing.
#[derive(Debug)]
pub struct RowsMut<'a, T> {
    data: *mut T,
    rows: usize,
    cols: usize,
    stride: usize,
    _slice: PhantomData<&'a mut [T]>,
}

// SAFETY: a `RowsMut` is the only way to its elements, as the `&mut [T]` that it was made of was.
unsafe impl<T: Send> Send for RowsMut<'_, T> {}
// SAFETY: through a shared reference elements are reached only by the unsafe `part`, whose contract
// is disjointness.
unsafe impl<T: Send> Sync for RowsMut<'_, T> {}

impl<'a, T> RowsMut<'a, T> {
    /// `rows` rows of `cols` elements of which row `r` starts at `data[r * stride]`.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize, stride: usize) -> Result<Self, AttentionError> {
        match span(rows, cols, stride) {
            Some(need) if need <= data.len() => {
                Ok(RowsMut { data: data.as_mut_ptr(), rows, cols, stride, _slice: PhantomData })
            }
            _ => Err(AttentionError::View { rows, cols, stride, len: data.len() }),
        }
    }

    /// `rows` rows of `cols` elements without gaps.
    pub fn dense(data: &'a mut [T], rows: usize, cols: usize) -> Result<Self, AttentionError> {
        RowsMut::new(data, rows, cols, cols)
    }

    /// Columns `0..at` and `at..` of the same rows; panics when there are fewer.
    pub fn split_columns(self, at: usize) -> (Self, Self) {
        assert!(at <= self.cols, "column {at} of {}", self.cols);
        // With no rows there may be no element to point past.
        let right = if self.rows == 0 { self.data } else { self.data.wrapping_add(at) };
        (RowsMut { cols: at, ..self }, RowsMut { data: right, cols: self.cols - at, ..self })
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row's start to the next one's.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The address of the first of the rows `rows` and the first of the columns `cols`; panics when
    /// they are outside.
    #[inline(always)]
    pub(super) fn block(&self, rows: &Range<usize>, cols: &Range<usize>) -> *const T {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        assert!(cols.start <= cols.end && cols.end <= self.cols, "columns {cols:?} of {}", self.cols);
        self.data.wrapping_add(rows.start * self.stride + cols.start).cast_const()
    }

    /// The columns `cols` of each of the rows `rows` in turn, fetching ahead; panics when they are
    /// outside.
    ///
    /// # Safety
    /// Nobody else may use these elements meanwhile.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn walk(&self, rows: Range<usize>, cols: Range<usize>) -> impl Iterator<Item = &mut [T]> {
        assert!(rows.end <= self.rows && cols.start <= cols.end && cols.end <= self.cols);
        let (len, stride) = (cols.len(), self.stride);
        let mut at = self.data.wrapping_add(rows.start * stride + cols.start);
        rows.map(
            #[inline(always)]
            move |_| {
                prefetch(at.wrapping_add(AHEAD * stride).cast_const(), len);
                // SAFETY: inside by the assertion and the constructor; alone by the contract.
                let row = unsafe { std::slice::from_raw_parts_mut(at, len) };
                at = at.wrapping_add(stride);
                row
            },
        )
    }

    /// The columns `cols` of row `row`, for writing.
    ///
    /// # Safety
    /// No two parts that live at the same time may overlap.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn part(&self, row: usize, cols: Range<usize>) -> &mut [T] {
        assert!(row < self.rows && cols.start <= cols.end && cols.end <= self.cols, "row {row}, columns {cols:?}");
        // SAFETY: in bounds by the assertion and the constructor's check; disjoint by this
        // function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride + cols.start), cols.len()) }
    }
}
