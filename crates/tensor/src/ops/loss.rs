//! The LM head fused with softmax cross-entropy; logits exist a chunk of rows at a time, in
//! workspace. Of a vocabulary whose parts lie on several ranks, each rank makes statistics of its
//! logits, and the loss follows from those of all.

use super::embedding::check_part;
use super::{
    GradientSlot, accumulate_mode, check_slot, given, product_scratch, same_dtype, scratch_on_cuda, workspace,
};
use crate::cpu::embedding::TablePart;
use crate::cpu::gemm::{MatMut, MatRef, Weight};
use crate::cpu::head::{self, HeadGradients, HeadLoss};
use crate::cpu::loss::merge_statistics as merge;
use crate::error::Result;
use crate::{Computes, Cost, DType, On, Purpose, Tensor, Work, by_float, cuda, ensure_shape};

/// Cross-entropy of each row.
#[derive(Debug)]
pub struct TokenLosses {
    /// `-log softmax(x wᵀ)[target]`, f32 [m]; 0 where there is no target.
    pub losses: Tensor,
    /// Their sum, how many rows count, and in how many of them no logit is above the target's. Zero
    /// on meta.
    pub summary: HeadLoss,
}

/// `scale` times the sum over rows of `-log softmax(x wᵀ)[target]`: x [m, d], w [v, d], targets i32
/// [m] with -100 where a row does not count. A scalar, f32.
pub fn linear_cross_entropy(x: &Tensor, w: &Tensor, targets: &Tensor, scale: f32) -> Result<Tensor> {
    let (_, loss) = run("linear_cross_entropy", x, w, targets, Some(scale), None)?;
    Ok(loss.expect("a scale was given"))
}

/// The cross-entropy of each row on its own, for evaluation.
pub fn token_losses(x: &Tensor, w: &Tensor, targets: &Tensor) -> Result<TokenLosses> {
    Ok(run("linear_cross_entropy", x, w, targets, None, None)?.0)
}

/// As [`linear_cross_entropy`], with the gradient of x; `dw` sums the weight's.
pub fn linear_cross_entropy_with_gradients(
    x: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    scale: f32,
    dw: Option<GradientSlot<'_>>,
) -> Result<(Tensor, Tensor)> {
    let mut dx = x.empty_like(*x.shape(), x.dtype())?;
    let gradients = Gradients { scale, dx: &mut dx, dw };
    let (_, loss) = run("linear_cross_entropy_with_gradients", x, w, targets, Some(scale), Some(gradients))?;
    Ok((loss.expect("a scale was given"), dx))
}

struct Gradients<'a> {
    scale: f32,
    dx: &'a mut Tensor,
    dw: Option<GradientSlot<'a>>,
}

/// With a `scale`, their sum times it as a scalar too, which on a GPU spares the host the summary.
fn run(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    scale: Option<f32>,
    mut gradients: Option<Gradients<'_>>,
) -> Result<(TokenLosses, Option<Tensor>)> {
    let [m, d, v] = checked(op, x, w, targets)?;
    let mut products = 1;
    if let Some(gradients) = &gradients {
        check_slot(op, &gradients.dw, v * d)?;
        products = if gradients.dw.is_some() { 3 } else { 2 };
    }
    let cost = product_cost(x, w, products);
    let device = x.device();
    let mut losses = device.empty([m], DType::F32, Purpose::Workspace)?;
    let mut summary = HeadLoss::default();
    let adds = gradients.as_ref().and_then(|g| g.dw.as_ref()).is_some_and(|(_, overwrite)| !overwrite);
    let work = cost.on(x.dtype(), [m, v, d]).variant(if adds { "adding" } else { "" });
    if device.computes() == Computes::Cuda {
        return run_on_cuda(op, work, [x, w, targets], scale, gradients, losses);
    }
    by_float!(op, x.dtype(), T => {
        let mut logits = logits_workspace::<T>(x, v)?;
        device.launch(op, work, |cpu| {
            let weight = Weight::from(MatRef::new(w.get::<T>(), v, d));
            let gradients = gradients.as_mut().map(|g| HeadGradients {
                scale: g.scale,
                dx: Some(MatMut::new(g.dx.get_mut::<T>(), m, d)),
                accumulate: accumulate_mode(g.dw.as_ref().is_none_or(|(_, overwrite)| *overwrite)),
                dw: g.dw.as_mut().map(|(tensor, _)| tensor.get_mut::<f32>()),
            });
            summary = head::linear_cross_entropy(
                cpu,
                MatRef::new(x.get::<T>(), m, d),
                weight,
                targets.get::<i32>(),
                gradients,
                losses.get_mut::<f32>(),
                logits.get_mut::<T>(),
            )?;
            Ok(())
        })?
    });
    let loss = scale.map(|scale| scaled(x, summary, scale)).transpose()?;
    Ok((TokenLosses { losses, summary }, loss))
}

fn run_on_cuda(
    op: &'static str,
    work: Work,
    [x, w, targets]: [&Tensor; 3],
    scale: Option<f32>,
    gradients: Option<Gradients<'_>>,
    losses: Tensor,
) -> Result<(TokenLosses, Option<Tensor>)> {
    let (device, m, v) = (x.device(), x.rows(), w.rows());
    let logits = by_float!(op, x.dtype(), T => logits_workspace::<T>(x, v)?);
    let (products, sums) = (product_scratch(device)?, scratch_on_cuda(device, 4)?);
    let lse = scratch_on_cuda(device, m)?;
    let hits = if scale.is_none() { scratch_on_cuda(device, m)? } else { None };
    let loss = scale.map(|_| device.empty([], DType::F32, Purpose::Activations)).transpose()?;
    let mut summary = HeadLoss::default();
    device.launch_on(op, work, |on| {
        let On::Cuda(gpu) = on else { unreachable!("this device computes on cuda") };
        let gradients = gradients.as_ref().map(|g| cuda::HeadGradients { scale: g.scale, dx: &*g.dx, dw: &g.dw });
        let scratch = cuda::HeadScratch { logits: &logits, lse: given(&lse), workspace: given(&products) };
        cuda::head(gpu, [x, w, targets], gradients, &losses, hits.as_ref(), scratch)?;
        summary = cuda::summary(gpu, [&losses, targets], hits.as_ref(), loss.as_ref().zip(scale), given(&sums))?;
        Ok(())
    })?;
    Ok((TokenLosses { losses, summary }, loss))
}

/// The sizes m, d, v, once the operands are seen to fit together.
pub(super) fn checked(op: &'static str, x: &Tensor, w: &Tensor, targets: &Tensor) -> Result<[usize; 3]> {
    same_dtype(op, x, w)?;
    let (m, d, v) = (x.rows(), x.last_dim(), w.rows());
    ensure_shape!(w.last_dim() == d, op, "input {} and weight {}", x.shape(), w.shape());
    ensure_shape!(
        targets.dtype() == DType::I32 && targets.elements() == m,
        op,
        "{} {} targets for {m} rows",
        targets.shape(),
        targets.dtype()
    );
    Ok([m, d, v])
}

/// The cost of so many products with logits.
pub(super) fn product_cost(x: &Tensor, w: &Tensor, products: usize) -> Cost {
    let logits = x.rows() * w.rows();
    Cost::new(2 * products * logits * x.last_dim(), x.bytes() + products * (w.bytes() + logits * x.dtype().size()))
}

/// The workspace for a chunk of logits on `device`.
pub(super) fn logits_workspace<T>(x: &Tensor, v: usize) -> Result<Tensor> {
    let (device, m) = (x.device(), x.rows());
    match device.computes() {
        Computes::Cpu => {
            let floats = head::workspace(head::chunk_rows::<T>(m, v), v);
            device.empty([floats], x.dtype(), Purpose::Workspace)
        }
        Computes::Cuda => device.empty([cuda::chunk_rows(m, v, x.dtype().size()), v], x.dtype(), Purpose::Workspace),
    }
}

/// The statistics of logits `x wᵀ` of which only `part` of the vocabulary is here: x [m, d], w [v,
/// d] the part's rows, targets i32 [m] of the whole vocabulary. f32 [m, 3]: of each row the largest
/// logit here, the sum of the exponentials of the differences from it, and the target's logit, or 0
/// if it is elsewhere. All three are 0 in rows that do not count.
pub fn vocabulary_statistics(x: &Tensor, w: &Tensor, part: TablePart, targets: &Tensor) -> Result<Tensor> {
    const OP: &str = "vocabulary_statistics";
    let [m, d, v] = checked(OP, x, w, targets)?;
    check_part(OP, part, v)?;
    let mut statistics = x.empty_like([m, 3], DType::F32)?;
    let work = product_cost(x, w, 1).on(x.dtype(), [m, v, d]);
    let products = product_scratch(x.device())?;
    by_float!(OP, x.dtype(), T => {
        let mut logits = logits_workspace::<T>(x, v)?;
        x.device().launch_on(OP, work, |on| {
            let cpu = match on {
                On::Cpu(cpu) => cpu,
                On::Cuda(gpu) => {
                    let operands = [x, w, targets];
                    return cuda::vocabulary_statistics(gpu, operands, part.first, &statistics, [&logits, given(&products)]);
                }
            };
            let (x, w) = (MatRef::new(x.get::<T>(), m, d), Weight::from(MatRef::new(w.get::<T>(), v, d)));
            let (out, space) = (statistics.get_mut::<f32>(), logits.get_mut::<T>());
            Ok(head::vocabulary_statistics(cpu, x, w, part, targets.get::<i32>(), out, space)?)
        })?
    });
    Ok(statistics)
}

/// The cross-entropy of rows whose logits lie in several parts.
#[derive(Debug)]
pub struct MergedLosses {
    /// The scale times the sum of the losses of the rows that count: a scalar, f32.
    pub loss: Tensor,
    /// The logarithm of each row's sum of exponentials, f32 [m]; 0 in rows that do not count.
    pub lse: Tensor,
}

/// `scale` times the sum over rows of `-log softmax(x wᵀ)[target]`, from the statistics of all
/// parts of the vocabulary, [parts m, 3], those of a part one below the other
/// ([`vocabulary_statistics`]). targets i32 [m].
pub fn merge_statistics(statistics: &Tensor, targets: &Tensor, scale: f32) -> Result<MergedLosses> {
    const OP: &str = "merge_statistics";
    let m = targets.elements();
    ensure_shape!(
        statistics.dtype() == DType::F32
            && statistics.last_dim() == 3
            && targets.dtype() == DType::I32
            && m > 0
            && statistics.rows().is_multiple_of(m),
        OP,
        "{statistics:?} of rows with targets {targets:?}"
    );
    let device = statistics.device();
    let mut lse = statistics.empty_like([m], DType::F32)?;
    let mut loss = device.empty([], DType::F32, Purpose::Activations)?;
    let mut losses = workspace(device, m)?;
    let sums = scratch_on_cuda(device, 4)?;
    let work = Cost::streaming(5, &[statistics, targets, &lse]).on(DType::F32, [statistics.rows()]);
    device.launch_on(OP, work, |on| match on {
        On::Cpu(_) => {
            let each = losses.get_mut::<f32>();
            merge(statistics.get::<f32>(), targets.get::<i32>(), each, lse.get_mut::<f32>());
            let sum: f64 = each.iter().map(|loss| f64::from(*loss)).sum();
            loss.get_mut::<f32>()[0] = (sum * f64::from(scale)) as f32;
            Ok(())
        }
        On::Cuda(gpu) => {
            cuda::merge_statistics(gpu, [statistics, targets], [&losses, &lse])?;
            cuda::summary(gpu, [&losses, targets], None, Some((&loss, scale)), given(&sums))?;
            Ok(())
        }
    })?;
    Ok(MergedLosses { loss, lse })
}

/// The gradients of [`merge_statistics`]' loss that come from the `part` of the vocabulary that is
/// here: x [m, d], w [v, d] the part's rows, targets i32 [m] of the whole vocabulary, lse f32 [m].
/// The result, [m, d], is a summand of the gradient of x; `dw` sums the gradient of w.
pub fn linear_cross_entropy_part_gradients(
    x: &Tensor,
    w: &Tensor,
    part: TablePart,
    targets: &Tensor,
    lse: &Tensor,
    scale: f32,
    mut dw: Option<GradientSlot<'_>>,
) -> Result<Tensor> {
    const OP: &str = "linear_cross_entropy_part_gradients";
    let [m, d, v] = checked(OP, x, w, targets)?;
    check_part(OP, part, v)?;
    check_slot(OP, &dw, v * d)?;
    ensure_shape!(lse.dtype() == DType::F32 && lse.elements() == m, OP, "{lse:?} for {m} rows");
    let mut dx = x.empty_like(*x.shape(), x.dtype())?;
    let adds = dw.as_ref().is_some_and(|(_, overwrite)| !overwrite);
    let work = product_cost(x, w, if dw.is_some() { 3 } else { 2 }).on(x.dtype(), [m, v, d]);
    let work = work.variant(if adds { "adding" } else { "" });
    let products = product_scratch(x.device())?;
    by_float!(OP, x.dtype(), T => {
        let mut logits = logits_workspace::<T>(x, v)?;
        x.device().launch_on(OP, work, |on| {
            let cpu = match on {
                On::Cpu(cpu) => cpu,
                On::Cuda(gpu) => {
                    let gradients = cuda::HeadGradients { scale, dx: &dx, dw: &dw };
                    let scratch = [&logits, given(&products)];
                    return cuda::part_gradients(gpu, [x, w, targets, lse], part.first, gradients, scratch);
                }
            };
            let gradients = HeadGradients {
                scale,
                dx: Some(MatMut::new(dx.get_mut::<T>(), m, d)),
                accumulate: accumulate_mode(!adds),
                dw: dw.as_mut().map(|(tensor, _)| tensor.get_mut::<f32>()),
            };
            let (x, w) = (MatRef::new(x.get::<T>(), m, d), Weight::from(MatRef::new(w.get::<T>(), v, d)));
            let (targets, lse, space) = (targets.get::<i32>(), lse.get::<f32>(), logits.get_mut::<T>());
            Ok(head::part_gradients(cpu, x, w, part, targets, lse, gradients, space)?)
        })?
    });
    Ok(dx)
}

pub(super) fn scaled(x: &Tensor, summary: HeadLoss, scale: f32) -> Result<Tensor> {
    let loss = (summary.loss_sum * f64::from(scale)) as f32;
    x.device().tensor([], &[loss], Purpose::Activations)
}
