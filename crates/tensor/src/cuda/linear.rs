//! Products, by the library of the driver; what its epilogues do not have follows in a kernel.

use super::launch::args;
use super::{Cuda, float, part, row_blocks};
use crate::cpu::gemm::Activation;
use crate::error::Result;
use crate::ops::GradientSlot;
use crate::ops::plain::product::{Matrices, Run};
use crate::{DType, Tensor};
use std::sync::Arc;
use trainyard_cuda::driver::{self, Operands, Precision, Product, Region};
use trainyard_cuda::kernels::{self as k, Float};

/// The form of a product without epilogue.
pub(super) fn plain(op: &'static str, [m, n, depth]: [usize; 3], operands: DType, result: DType) -> Result<Product> {
    Ok(Product {
        m,
        n,
        k: depth,
        a_transposed: false,
        b_transposed: false,
        operands: float(op, operands)?,
        fp8: None,
        result: float(op, result)?,
        precision: Precision::Full,
        bias: false,
        activation: driver::Activation::None,
        keeps_argument: false,
        adds: false,
        batch: 1,
        alignment: Product::ALIGNMENT,
    })
}

/// The operands of a product without epilogue; `workspace` as [`super::PRODUCT_WORKSPACE`].
pub(super) fn operands(a: Region, b: Region, d: Region, workspace: &Tensor) -> Operands {
    let none = Region::NONE;
    let workspace = workspace.region(true);
    Operands { a, b, bias: none, c: none, d, argument: none, workspace, scales: [none; 2], scale: 1.0, adding: 1.0 }
}

impl Cuda {
    /// Puts a product on this thread's stream; nothing when its result is empty.
    pub(super) fn product(&self, form: &Product, operands: &Operands) -> Result<()> {
        if form.m == 0 || form.n == 0 || form.batch == 0 {
            return Ok(());
        }
        if form.k == 0 {
            // An empty sum: the library refuses it.
            return if form.adds { Ok(()) } else { Ok(self.driver.zero(self.stream()?, operands.d)?) };
        }
        let mut form = Product { alignment: operands.alignment(), ..*form };
        if form.operands == Float::F32 {
            form.precision = self.precision;
        }
        // SAFETY: the regions are those of tensors whose shapes the operation checked against each
        // other.
        Ok(unsafe { self.driver.product(self.stream()?, &form, operands) }?)
    }
}

/// The number of an activation in the kernels.
pub(super) fn curve(activation: Activation) -> i32 {
    match activation {
        Activation::None => 0,
        Activation::Relu => 1,
        Activation::Silu => 2,
        Activation::GeluExact => 3,
        Activation::GeluTanh => 4,
        Activation::ReluSquared => 5,
    }
}

pub(crate) fn linear(
    gpu: &Arc<Cuda>,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    residual: Option<&Tensor>,
    pre: Option<&Tensor>,
    y: &Tensor,
    workspace: &Tensor,
) -> Result<()> {
    let dims = [x.rows(), w.rows(), x.last_dim()];
    let form = Product { b_transposed: true, ..plain("linear", dims, x.dtype(), y.dtype())? };
    let operands = operands(x.region(false), w.region(false), y.region(true), workspace);
    with_epilogue(gpu, form, operands, bias, activation, residual, pre, y)
}

/// A product that is followed by what a linear layer adds: in the library as far as it has it, else
/// by a kernel.
pub(super) fn with_epilogue(
    gpu: &Arc<Cuda>,
    mut form: Product,
    mut operands: Operands,
    bias: Option<&Tensor>,
    activation: Activation,
    residual: Option<&Tensor>,
    pre: Option<&Tensor>,
    y: &Tensor,
) -> Result<()> {
    let (m, n) = (form.m, form.n);
    // The library stores a GELU's argument in rows of whole 16 bytes. Of operands of eight bits it
    // is asked for no activation.
    let gelu =
        activation == Activation::GeluTanh && form.operands != Float::F32 && form.fp8.is_none() && n.is_multiple_of(8);
    let fused = (activation == Activation::None && pre.is_none()) || (gelu && residual.is_none());
    if fused {
        if let Some(bias) = bias {
            (form.bias, operands.bias) = (true, bias.region(false));
        }
        if let Some(residual) = residual {
            (form.adds, operands.c) = (true, residual.region(false));
        }
        if gelu {
            form.activation = driver::Activation::Gelu;
        }
        if let Some(pre) = pre {
            (form.keeps_argument, operands.argument) = (true, pre.region(true));
        }
        return gpu.product(&form, &operands);
    }
    gpu.product(&form, &operands)?;
    gpu.launch(&k::EPILOGUE, y.dtype(), [m * n, 1, 1], args![y, bias, residual, pre, y, m, n, curve(activation)])
}

pub(crate) fn linear_input_gradient(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    w: &Tensor,
    dx: &Tensor,
    workspace: &Tensor,
) -> Result<()> {
    let dims = [dy.rows(), w.last_dim(), dy.last_dim()];
    let form = plain("linear_input_gradient", dims, dy.dtype(), dx.dtype())?;
    gpu.product(&form, &operands(dy.region(false), w.region(false), dx.region(true), workspace))
}

/// `partials` as [`column_partials`] for the bias.
pub(crate) fn linear_weight_gradient(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    x: &Tensor,
    dw: &mut Option<GradientSlot<'_>>,
    db: &mut Option<GradientSlot<'_>>,
    [workspace, partials]: [&Tensor; 2],
) -> Result<()> {
    let (m, n) = (dy.rows(), dy.last_dim());
    if let Some((db, overwrite)) = db {
        let blocks = row_blocks(m);
        gpu.launch(&k::COLUMN_SUMS, dy.dtype(), [1, m, n], args![dy, partials, 1usize, m, n])?;
        let add = i32::from(!*overwrite);
        let args = args![partials, &**db, blocks, n, 1usize, 1.0f32, add];
        gpu.launch(&k::SUM_PARTIALS, DType::F32, [n, 1, 1], args)?;
    }
    if let Some((dw, overwrite)) = dw {
        weight_gradient(gpu, dy.region(false), x.region(false), dw, m, dy.dtype(), *overwrite, workspace)?;
    }
    Ok(())
}

/// `dw (+)= dyᵀ x` of `rows` rows.
pub(super) fn weight_gradient(
    gpu: &Cuda,
    dy: Region,
    x: Region,
    dw: &Tensor,
    rows: usize,
    dtype: DType,
    overwrite: bool,
    workspace: &Tensor,
) -> Result<()> {
    let dims = [dw.elements() / dw.last_dim().max(1), dw.last_dim(), rows];
    let mut form = Product { a_transposed: true, ..plain("linear_weight_gradient", dims, dtype, DType::F32)? };
    let mut operands = operands(dy, x, dw.region(true), workspace);
    if !overwrite {
        (form.adds, operands.c) = (true, dw.region(false));
    }
    gpu.product(&form, &operands)
}

/// Products of matrices that lie in `a` and `b`, all into `y` one after the other: as one launch
/// where both operands go on from matrix to matrix, else one by one.
pub(crate) fn matmul(
    gpu: &Cuda,
    [a, b, y]: [&Tensor; 3],
    matrices: &Matrices,
    runs: &[Run],
    workspace: &Tensor,
) -> Result<()> {
    let Matrices { m, n, k, a_transposed, b_transposed } = *matrices;
    let (dtype, size) = (y.dtype(), y.dtype().size());
    let form = Product { a_transposed, b_transposed, ..plain("matmul", [m, n, k], dtype, dtype)? };
    let mut done = 0;
    for run in runs {
        let together = run.steps == [m * k, k * n];
        let (launches, batch) = if together { (1, run.count) } else { (run.count, 1) };
        for i in 0..launches {
            let matrices =
                |tensor: &Tensor, written, first, each| part(tensor.region(written), first * size, batch * each * size);
            let a = matrices(a, false, run.first[0] + i * run.steps[0], m * k);
            let b = matrices(b, false, run.first[1] + i * run.steps[1], k * n);
            let d = matrices(y, true, done, m * n);
            gpu.product(&Product { batch, ..form }, &operands(a, b, d, workspace))?;
            done += batch * m * n;
        }
    }
    Ok(())
}
