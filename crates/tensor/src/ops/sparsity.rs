//! Masks of weights that training keeps at zero. On the CPU only.

use crate::cpu::sparsity as kernels;
use crate::error::{Result, TensorError};
use crate::{Cost, DType, Tensor, by_float, ensure_shape};

pub use kernels::mask_bytes;

/// The weights that a mask marks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Masked {
    /// Those that are zero.
    Zeros,
    /// So many of least magnitude; of equal ones the first.
    Lowest(usize),
    /// So many of least magnitude among each so many neighbours; of equal ones the first.
    OfNeighbours {
        /// The number that is masked.
        count: usize,
        /// The number of neighbours.
        of: usize,
    },
}

/// Writes to `mask` (u8, a bit for each of the f32 `weights`) the weights that `masked` says.
///
/// # Errors
/// Other dtypes, another number of bytes, more than there are, groups that do not divide the
/// weights, and a GPU.
pub fn mask(masked: Masked, weights: &Tensor, mask: &mut Tensor) -> Result<()> {
    const OP: &str = "mask";
    check(OP, weights, mask)?;
    let elements = weights.elements();
    let passes = match masked {
        Masked::Zeros => 1,
        Masked::Lowest(count) => {
            ensure_shape!(count <= elements, OP, "{count} of {weights:?}");
            6
        }
        Masked::OfNeighbours { count, of } => {
            let divides = of > 0 && of <= crate::sparsity::NEIGHBOURS_MAX && elements.is_multiple_of(of);
            ensure_shape!(divides && count <= of, OP, "{count} of {of} neighbours of {weights:?}");
            1
        }
    };
    let cost = Cost::new(2 * passes * elements, passes * weights.bytes() + mask.bytes()).on(DType::F32, [elements]);
    weights.device().launch(OP, cost, |cpu| {
        let (weights, mask) = (weights.get::<f32>(), mask.get_mut::<u8>());
        match masked {
            Masked::Zeros => kernels::mask_zeros(cpu, weights, mask),
            Masked::Lowest(count) => kernels::mask_lowest(cpu, count, weights, mask),
            Masked::OfNeighbours { count, of } => kernels::mask_lowest_of_neighbours(cpu, count, of, weights, mask),
        }
        Ok(())
    })
}

/// Sets the f32 `weights` that `mask` marks to zero, and their copy where there is one. Returns
/// their number; 0 on meta.
///
/// # Errors
/// Other dtypes, other lengths, and a GPU.
pub fn clear(mask: &Tensor, weights: &mut Tensor, copy: Option<&mut Tensor>) -> Result<usize> {
    const OP: &str = "clear";
    check(OP, weights, mask)?;
    let elements = weights.elements();
    let copied = copy.as_ref().map_or(0, |copy| copy.bytes());
    if let Some(copy) = &copy {
        ensure_shape!(copy.elements() == elements, OP, "copy {copy:?} of {weights:?}");
    }
    let dtype = copy.as_ref().map_or(DType::F32, |copy| copy.dtype());
    let cost = Cost::new(elements, mask.bytes() + 2 * weights.bytes() + 2 * copied).on(dtype, [elements]);
    let (device, mut cleared) = (weights.device().clone(), 0);
    by_float!(OP, dtype, T => device.launch(OP, cost, |cpu| {
        cleared = kernels::clear(cpu, mask.get::<u8>(), weights.get_mut::<f32>(), copy.map(|copy| copy.get_mut::<T>()));
        Ok(())
    })?);
    Ok(cleared)
}

fn check(op: &'static str, weights: &Tensor, mask: &Tensor) -> Result<()> {
    for (tensor, expected, dtype) in [(weights, "f32", DType::F32), (mask, "u8", DType::U8)] {
        if tensor.dtype() != dtype {
            return Err(TensorError::DType { op, expected, got: tensor.dtype() });
        }
    }
    ensure_shape!(mask.elements() == mask_bytes(weights.elements()), op, "{mask:?} of {weights:?}");
    Ok(())
}
