//! Reading and adding by indices. The host waits for the check of the indices, before anything
//! reads by them.

use super::launch::args;
use super::{Cuda, part};
use crate::cpu::embedding::IndexError;
use crate::error::Result;
use crate::{DType, Tensor};
use std::sync::Arc;
use trainyard_cuda::driver::Region;
use trainyard_cuda::kernels as k;

/// Fails unless every index is in `0..limit`; `found` is the scratch of [`check`], None where the
/// host knows it.
fn check_unknown(gpu: &Arc<Cuda>, indices: &Tensor, limit: usize, found: Option<&Tensor>) -> Result<()> {
    found.map_or(Ok(()), |found| check(gpu, "index", indices, limit, false, found))
}

/// Fails unless every index, i32 or the bits of u32, is in `0..limit`, or -100 where that stands
/// for none. `found`: scratch of one float.
pub(super) fn check(
    gpu: &Arc<Cuda>,
    what: &'static str,
    indices: &Tensor,
    limit: usize,
    or_none: bool,
    found: &Tensor,
) -> Result<()> {
    let (n, limit) = (indices.elements(), limit.min(i32::MAX as usize));
    gpu.launch(&k::FILL_U32, DType::F32, [1, 1, 1], args![found, 1usize, u32::MAX])?;
    let args = args![indices, found, n, limit, i32::from(or_none)];
    gpu.launch(&k::CHECK_INDICES, DType::F32, [n, 1, 1], args)?;
    let word = |region: Region| {
        let mut bytes = [0; 4];
        gpu.download(region, &mut bytes)?;
        Ok::<_, crate::TensorError>(u32::from_le_bytes(bytes))
    };
    let entry = match word(part(found.region(false), 0, 4))? {
        u32::MAX => return Ok(()),
        entry => entry as usize,
    };
    let index = word(part(indices.region(false), 4 * entry, 4))? as i32;
    Err(IndexError { what, index, entry, limit }.into())
}

/// The scratch of operations that add by indices.
pub(crate) struct Sums<'a> {
    /// Where to: f32, of the result's elements.
    pub sums: &'a Tensor,
    /// As many floats as the dimension has positions.
    pub first: &'a Tensor,
    /// One float, if indices are to be checked.
    pub found: Option<&'a Tensor>,
}

pub(crate) fn index_select(
    gpu: &Arc<Cuda>,
    x: &Tensor,
    [outer, n, inner]: [usize; 3],
    indices: &Tensor,
    y: &Tensor,
    found: Option<&Tensor>,
) -> Result<()> {
    check_unknown(gpu, indices, n, found)?;
    let args = args![x, indices, y, outer, n, indices.elements(), inner];
    gpu.launch(&k::INDEX_SELECT, x.dtype(), [y.elements(), 1, 1], args)
}

pub(crate) fn index_add(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    [outer, n, inner]: [usize; 3],
    indices: &Tensor,
    Sums { sums, first, found }: Sums<'_>,
) -> Result<()> {
    check_unknown(gpu, indices, n, found)?;
    zero(gpu, sums)?;
    let count = indices.elements();
    gpu.launch(&k::FILL_U32, DType::F32, [n, 1, 1], args![first, n, i32::MAX as u32])?;
    gpu.launch(&k::FIRST_USE, DType::F32, [count, 1, 1], args![indices, first, count, 0usize, n])?;
    let args = args![dy, indices, first, sums, outer, 0usize, n, count, inner];
    gpu.launch(&k::INDEX_ADD, dy.dtype(), [outer, count, inner], args)
}

pub(crate) fn gather(gpu: &Arc<Cuda>, x: &Tensor, indices: &Tensor, y: &Tensor, found: &Tensor) -> Result<()> {
    let (n, count) = (x.last_dim(), indices.last_dim());
    check(gpu, "index", indices, n, false, found)?;
    let args = args![x, indices, y, indices.elements() / count.max(1), n, count];
    gpu.launch(&k::GATHER, x.dtype(), [y.elements(), 1, 1], args)
}

/// Rows of `n` sums.
pub(crate) fn scatter_add(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    n: usize,
    indices: &Tensor,
    Sums { sums, found, .. }: Sums<'_>,
) -> Result<()> {
    check_unknown(gpu, indices, n, found)?;
    zero(gpu, sums)?;
    let rows = sums.elements() / n.max(1);
    gpu.launch(&k::SCATTER_ADD, dy.dtype(), [rows, n, 1], args![dy, indices, sums, rows, n, indices.last_dim()])
}

pub(crate) fn one_hot(gpu: &Arc<Cuda>, indices: &Tensor, classes: usize, y: &Tensor, found: &Tensor) -> Result<()> {
    check(gpu, "index", indices, classes, false, found)?;
    gpu.launch(&k::ONE_HOT, y.dtype(), [y.elements(), 1, 1], args![indices, y, indices.elements(), classes])
}

fn zero(gpu: &Cuda, sums: &Tensor) -> Result<()> {
    if sums.bytes() == 0 { Ok(()) } else { gpu.zero(sums.region(true)) }
}
