//! Operations of a mixture of experts.
//!
//! Shapes do not depend on routing: `m` tokens with `k` choices have `m k` rows, of which only
//! those up to the last bound are anybody's. So a meta device counts what a real one takes.

use super::linear::product_cost;
use super::{GradientSlot, accumulate_mode, check_slot, given, product_scratch, same_dtype, scratch_on_cuda};
use crate::cpu::experts::{self as kernels, Choices, Order};
use crate::cpu::gemm::{self, Epilogue, MatMut, MatRef};
use crate::cuda::experts as cuda;
use crate::error::Result;
use crate::{Cost, DType, On, Purpose, Tensor, by_float, ensure_shape};
use std::ops::Range;

pub use crate::cpu::experts::{BalanceFactors, BalanceLosses, DROPPED, Gate, Router, balance_losses};

/// The ways of the tokens of a micro-batch: m tokens, k choices each, of E experts.
#[derive(Clone, Debug)]
pub struct Routes {
    /// f32, [m, k]: the weight of each choice.
    pub weights: Tensor,
    /// i32, [m, k]: the expert of each choice.
    pub experts: Tensor,
    /// i32, [m, k]: the row of each choice, or [`DROPPED`].
    pub places: Tensor,
    /// i32, [m k]: the token of each row, or [`DROPPED`] behind the last row.
    pub tokens: Tensor,
    /// i32, [E + 1]: the rows of expert e are `bounds[e]..bounds[e + 1]`.
    pub bounds: Tensor,
    /// i32, [E]: the choices of each expert, dropped ones included.
    pub counts: Tensor,
}

/// Logits of a router in f32: x [m, d] and w [E, d] give [m, E]. Products of low precision are
/// exact, and their sums are in f32.
pub fn router_logits(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    const OP: &str = "router_logits";
    same_dtype(OP, x, w)?;
    let (m, n, k) = (x.rows(), w.rows(), x.last_dim());
    ensure_shape!(w.shape().len() == 2 && w.last_dim() == k, OP, "input {} and weight {}", x.shape(), w.shape());
    let mut y = x.empty_like([m, n], DType::F32)?;
    let work = product_cost(m, n, k, &[x, w, &y]).on(x.dtype(), [m, n, k]);
    let scratch = product_scratch(x.device())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::router_logits(gpu, x, w, &y, given(&scratch)),
        };
        let w = MatRef::new(w.get::<T>(), n, k);
        let y = MatMut::new(y.get_mut::<f32>(), m, n);
        gemm::forward(cpu, MatRef::new(x.get::<T>(), m, k), w.into(), Epilogue::<T>::default(), y);
        Ok(())
    })?);
    Ok(y)
}

/// Routes tokens by their `logits` (f32, [m, E]). `bias` [E] changes which experts are chosen and
/// no weight. With `capacity` each expert keeps so many rows, and later choices are dropped.
pub fn route(logits: &Tensor, bias: Option<&Tensor>, router: &Router, capacity: Option<usize>) -> Result<Routes> {
    const OP: &str = "route";
    let (m, count, k) = (logits.rows(), logits.last_dim(), router.top_k);
    let fits = logits.dtype() == DType::F32 && count == router.experts && (1..=count).contains(&k);
    ensure_shape!(fits, OP, "{logits:?} for the best {k} of {} experts", router.experts);
    if let Some(bias) = bias {
        ensure_shape!(bias.elements() == count, OP, "a bias of {} for {count} experts", bias.shape());
    }
    let ints = |shape: &[usize]| logits.empty_like(shape, DType::I32);
    let mut routes = Routes {
        weights: logits.empty_like([m, k], DType::F32)?,
        experts: ints(&[m, k])?,
        places: ints(&[m, k])?,
        tokens: ints(&[m * k])?,
        bounds: ints(&[count + 1])?,
        counts: ints(&[count])?,
    };
    let work = Cost::new((8 + k) * m * count, logits.bytes() + 16 * m * k).on(DType::F32, [m, count, k]);
    logits.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::route(gpu, logits, bias, router, capacity, &routes),
        };
        let bias = bias.map(values).transpose()?;
        let choices = Choices { experts: routes.experts.get_mut(), weights: routes.weights.get_mut() };
        kernels::choose(cpu, router, logits.get(), bias.as_deref(), choices);
        let order = Order {
            places: routes.places.get_mut(),
            tokens: routes.tokens.get_mut(),
            bounds: routes.bounds.get_mut(),
            counts: routes.counts.get_mut(),
        };
        kernels::sort(routes.experts.get(), k, capacity, order);
        Ok(())
    })?;
    Ok(routes)
}

/// Sums over tokens of what the balance losses are made of: f32 [2], with tokens t, experts e and
/// the choices n_e of each expert `Σ_t Σ_e share_te n_e` and `Σ_t (log Σ_e e^l)²`.
pub fn balance_sums(router: &Router, logits: &Tensor, counts: &Tensor) -> Result<Tensor> {
    const OP: &str = "balance_sums";
    let (tokens, count) = (logits.rows(), logits.last_dim());
    ensure_shape!(counts.elements() == count, OP, "{counts:?} of {logits:?}");
    let mut sums = logits.empty_like([2], DType::F32)?;
    let work = Cost::new(12 * tokens * count, logits.bytes()).on(DType::F32, [tokens, count]);
    let terms = scratch_on_cuda(logits.device(), 2 * tokens)?;
    logits.device().launch_on(OP, work, |on| {
        if let On::Cuda(gpu) = on {
            return cuda::balance_sums(gpu, router, logits, counts, &sums, given(&terms));
        }
        let BalanceLosses { auxiliary, z } = balance_losses(router, logits.get(), counts.get());
        let tokens = tokens as f32;
        sums.get_mut::<f32>().copy_from_slice(&[auxiliary * tokens * tokens / count as f32, z * tokens]);
        Ok(())
    })?;
    Ok(sums)
}

/// The values of a small tensor in f32.
fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    by_float!("values", tensor.dtype(), T => Ok(tensor.get::<T>().iter().map(|x| crate::Element::to_f32(*x)).collect()))
}

/// The gradient of a router's logits [m, E] from that of the choices' weights [m, k].
pub fn route_backward(
    logits: &Tensor,
    experts: &Tensor,
    counts: &Tensor,
    dweights: Option<&Tensor>,
    router: &Router,
    factors: BalanceFactors,
) -> Result<Tensor> {
    const OP: &str = "route_backward";
    let (m, count) = (logits.rows(), logits.last_dim());
    if let Some(dweights) = dweights {
        let fits = dweights.dtype() == DType::F32 && dweights.elements() == experts.elements();
        ensure_shape!(fits, OP, "{dweights:?} of choices {experts:?}");
    }
    let mut dlogits = logits.empty_like(*logits.shape(), DType::F32)?;
    let work = Cost::new(20 * m * count, 2 * logits.bytes() + 2 * experts.bytes()).on(DType::F32, [m, count]);
    logits.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                return cuda::route_backward(gpu, logits, [experts, counts], dweights, router, factors, &dlogits);
            }
        };
        let dweights = dweights.map(|dweights| dweights.get::<f32>());
        let (logits, experts, counts) = (logits.get(), experts.get(), counts.get());
        kernels::choose_backward(cpu, router, logits, experts, counts, dweights, factors, dlogits.get_mut());
        Ok(())
    })?;
    Ok(dlogits)
}

/// The unit of [`expert_excess`]. It stands among gradients, in whose norm it is nothing.
pub const EXCESS_UNIT: f32 = 1.0 / (1u128 << 80) as f32;

/// `excess[e] (+)= (counts[e] - mean) EXCESS_UNIT`: by how many choices each expert is ahead of the
/// mean.
pub fn expert_excess(counts: &Tensor, excess: &mut Tensor, overwrite: bool) -> Result<()> {
    const OP: &str = "expert_excess";
    let fits = excess.dtype() == DType::F32 && excess.elements() == counts.elements();
    ensure_shape!(fits, OP, "{excess:?} of counts {counts:?}");
    let work = Cost::new(2 * counts.elements(), 2 * excess.bytes() + counts.bytes());
    counts.device().launch_on(OP, work, |on| {
        if let On::Cuda(gpu) = on {
            return cuda::expert_excess(gpu, counts, excess, EXCESS_UNIT, overwrite);
        }
        let counts = counts.get::<i32>();
        let mean = counts.iter().map(|count| f64::from(*count)).sum::<f64>() / counts.len().max(1) as f64;
        for (excess, count) in excess.get_mut::<f32>().iter_mut().zip(counts) {
            let before = if overwrite { 0.0 } else { *excess };
            *excess = before + (f64::from(*count) - mean) as f32 * EXCESS_UNIT;
        }
        Ok(())
    })
}

/// Row `tokens[i]` of x [m, d] as row i, zeros for [`DROPPED`]: [r, d].
pub fn gather_rows(x: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    const OP: &str = "gather_rows";
    let (rows, dim) = (tokens.elements(), x.last_dim());
    ensure_shape!(tokens.dtype() == DType::I32, OP, "{tokens:?} of {x:?}");
    let mut y = x.empty_like([rows, dim], x.dtype())?;
    let work = Cost::new(0, 2 * y.bytes()).on(x.dtype(), [rows, dim]);
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            // Rows of a table, of which there is none at -1.
            On::Cuda(gpu) => return crate::cuda::embedding(gpu, tokens, x, 0, None, &y),
        };
        kernels::gather_rows(cpu, dim, x.get::<T>(), tokens.get(), y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// `residual[t] + Σ_j weights[t, j] rows[places[t, j]]` for m tokens: rows [r, d], places and
/// weights
/// [m, k], result [m, d]. All weights are 1 where none are given: the backward of [`gather_rows`].
pub fn combine_rows(
    rows: &Tensor,
    places: &Tensor,
    weights: Option<&Tensor>,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    const OP: &str = "combine_rows";
    let (m, k, dim) = (places.rows(), places.last_dim(), rows.last_dim());
    ensure_shape!(places.dtype() == DType::I32 && places.shape().len() == 2, OP, "{rows:?} at {places:?}");
    if let Some(weights) = weights {
        let fits = weights.dtype() == DType::F32 && weights.elements() == m * k;
        ensure_shape!(fits, OP, "{weights:?} at {places:?}");
    }
    if let Some(residual) = residual {
        same_dtype(OP, rows, residual)?;
        ensure_shape!(residual.elements() == m * dim, OP, "residual {residual:?} of {rows:?} at {places:?}");
    }
    let mut y = rows.empty_like([m, dim], rows.dtype())?;
    let adds = 1 + usize::from(weights.is_some());
    let row_bytes = dim * rows.dtype().size();
    let moved = (k + 1 + usize::from(residual.is_some())) * m * row_bytes;
    let work = Cost::new(adds * m * k * dim, moved).on(rows.dtype(), [m, k, dim]);
    by_float!(OP, rows.dtype(), T => rows.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::combine_rows(gpu, rows, places, weights, residual, &y),
        };
        let (weights, residual) = (weights.map(|w| w.get::<f32>()), residual.map(|r| r.get::<T>()));
        kernels::combine(cpu, dim, rows.get::<T>(), places.get(), weights, residual, y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// The gradients of `rows` and of `weights` (f32) from that of the result of [`combine_rows`].
pub fn combine_rows_backward(
    dy: &Tensor,
    rows: &Tensor,
    places: &Tensor,
    weights: &Tensor,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "combine_rows_backward";
    same_dtype(OP, dy, rows)?;
    let (m, k, dim) = (places.rows(), places.last_dim(), rows.last_dim());
    let fits = dy.elements() == m * dim && weights.elements() == m * k;
    ensure_shape!(fits, OP, "{dy:?} with {weights:?} at {places:?}");
    let mut drows = rows.empty_like(*rows.shape(), rows.dtype())?;
    let mut dweights = weights.empty_like(*weights.shape(), DType::F32)?;
    let work = Cost::new(3 * m * k * dim, dy.bytes() + 2 * drows.bytes()).on(rows.dtype(), [m, k, dim]);
    by_float!(OP, rows.dtype(), T => rows.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::combine_rows_backward(gpu, dy, rows, places, weights, [&drows, &dweights]),
        };
        let (places, drows) = (places.get::<i32>(), drows.get_mut::<T>());
        // Rows that are nobody's lie behind all others.
        let kept = places.iter().filter(|place| **place != DROPPED).count();
        drows[kept * dim..].fill(T::default());
        let (rows, dweights) = (rows.get::<T>(), dweights.get_mut());
        kernels::combine_backward(cpu, dim, dy.get::<T>(), rows, places, weights.get(), drows, dweights);
        Ok(())
    })?);
    Ok((drows, dweights))
}

/// The bounds of groups as numbers of rows, and the last.
fn bounds_of(bounds: &Tensor) -> (Vec<usize>, usize) {
    let bounds: Vec<usize> = bounds.get::<i32>().iter().map(|bound| usize::try_from(*bound).unwrap_or(0)).collect();
    let end = bounds.last().copied().unwrap_or(0);
    (bounds, end)
}

/// The groups of rows of ragged products: those of G weights in turn, from one source after the
/// other.
#[derive(Clone, Debug)]
pub struct Groups {
    /// i32, [S G + 1]: group `s G + e` holds the rows of weight e that came from source s, and
    /// takes rows `bounds[s G + e]..bounds[s G + e + 1]`.
    pub bounds: Tensor,
    /// The number of sources S. Rows that other ranks sent have one per rank; a rank's own have 1.
    pub sources: usize,
}

impl Groups {
    /// One group of each weight.
    pub fn of_one_source(bounds: &Tensor) -> Groups {
        Groups { bounds: bounds.clone(), sources: 1 }
    }

    /// The number of weights G, once operands with `w` rows of weights are seen to fit.
    fn weights(&self, op: &'static str, rows: &Tensor, w: Option<usize>) -> Result<usize> {
        let Groups { bounds, sources } = self;
        let groups = bounds.elements().saturating_sub(1);
        let fits = bounds.dtype() == DType::I32 && groups > 0 && *sources > 0 && groups.is_multiple_of(*sources);
        ensure_shape!(fits, op, "{rows:?} in groups {bounds:?} of {sources} sources");
        let weights = groups / sources;
        let fits = w.is_none_or(|w| w.is_multiple_of(weights));
        ensure_shape!(fits, op, "{rows:?} in groups {bounds:?} with weights of {} rows", w.unwrap_or(0));
        Ok(weights)
    }
}

/// `x w[e]ᵀ` for the rows of each group of weight e: x [r, k], w [G n, k], result [r, n]. Rows
/// behind the last bound are zeros. The cost is that of all r rows.
pub fn ragged_linear(x: &Tensor, w: &Tensor, groups: &Groups) -> Result<Tensor> {
    const OP: &str = "ragged_linear";
    same_dtype(OP, x, w)?;
    let (bounds, weights) = (&groups.bounds, groups.weights(OP, x, Some(w.rows()))?);
    let (r, n, k) = (x.rows(), w.rows() / weights, x.last_dim());
    ensure_shape!(w.last_dim() == k, OP, "input {} and weight {}", x.shape(), w.shape());
    let mut y = x.empty_like([r, n], x.dtype())?;
    let work = product_cost(r, n, k, &[x, w, &y]).on(x.dtype(), [r, n, k, weights]);
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::ragged_linear(gpu, x, w, groups, weights, &y),
        };
        let (bounds, end) = bounds_of(bounds);
        let y = y.get_mut::<T>();
        y[end * n..].fill(T::default());
        let (x, w) = (MatRef::new(x.get::<T>(), r, k), MatRef::new(w.get::<T>(), weights * n, k));
        gemm::grouped_forward(cpu, x, w, &bounds, MatMut::new(y, r, n));
        Ok(())
    })?);
    Ok(y)
}

/// `dy w[e]` for the rows of each group of weight e: dy [r, n], w [G n, k], result [r, k], zeros
/// behind the last bound.
pub fn ragged_input_gradient(dy: &Tensor, w: &Tensor, groups: &Groups) -> Result<Tensor> {
    const OP: &str = "ragged_input_gradient";
    same_dtype(OP, dy, w)?;
    let (bounds, weights) = (&groups.bounds, groups.weights(OP, dy, Some(w.rows()))?);
    let (r, n, k) = (dy.rows(), dy.last_dim(), w.last_dim());
    ensure_shape!(w.rows() == weights * n, OP, "gradient {} and weight {}", dy.shape(), w.shape());
    let mut dx = dy.empty_like([r, k], dy.dtype())?;
    let work = product_cost(r, n, k, &[dy, w, &dx]).on(dy.dtype(), [r, n, k, weights]);
    by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::ragged_input_gradient(gpu, dy, w, groups, weights, &dx),
        };
        let (bounds, end) = bounds_of(bounds);
        let dx = dx.get_mut::<T>();
        dx[end * k..].fill(T::default());
        let (dy, w) = (MatRef::new(dy.get::<T>(), r, n), MatRef::new(w.get::<T>(), weights * n, k));
        gemm::grouped_input_gradient(cpu, dy, w, &bounds, MatMut::new(dx, r, k));
        Ok(())
    })?);
    Ok(dx)
}

/// `dw[e] (+)= Σ_s dyᵀ x` over the rows of weight e from each source s, in f32: dy [r, n], x
/// [r, k], dw [G n, k].
///
/// The sources' gradients are added along the tree by which ranks add theirs, so that the bits are
/// those of an all-reduce of gradients that each source has for itself. That takes memory for at
/// most `log2 S` more of them.
pub fn ragged_weight_gradient(dy: &Tensor, x: &Tensor, groups: &Groups, dw: GradientSlot<'_>) -> Result<()> {
    const OP: &str = "ragged_weight_gradient";
    same_dtype(OP, dy, x)?;
    let (r, n, k) = (dy.rows(), dy.last_dim(), x.last_dim());
    let weights = groups.weights(OP, dy, None)?;
    ensure_shape!(x.rows() == r, OP, "gradient {} and input {}", dy.shape(), x.shape());
    let slot = Some(dw);
    check_slot(OP, &slot, weights * n * k)?;
    let Some(dw) = slot else { return Ok(()) };
    let all = SourcesGradient { dy, x, groups, weights };
    all.add_up(0..groups.sources, dw)
}

/// The gradient of weights whose rows came from several sources.
struct SourcesGradient<'a> {
    dy: &'a Tensor,
    x: &'a Tensor,
    groups: &'a Groups,
    weights: usize,
}

impl SourcesGradient<'_> {
    /// `dw (+)=` the sum of the gradients of these sources.
    fn add_up(&self, sources: Range<usize>, (dw, overwrite): GradientSlot<'_>) -> Result<()> {
        if sources.len() == 1 {
            return self.of_one(sources.start, dw, overwrite);
        }
        // The largest power of two below their number, as in the tree of ranks.
        let middle = sources.start + sources.len().next_power_of_two() / 2;
        self.add_up(sources.start..middle, (&mut *dw, overwrite))?;
        let mut right = self.dy.device().empty([dw.elements()], DType::F32, Purpose::Workspace)?;
        self.add_up(middle..sources.end, (&mut right, true))?;
        super::accumulate(&right, dw, false)
    }

    fn of_one(&self, source: usize, dw: &mut Tensor, overwrite: bool) -> Result<()> {
        const OP: &str = "ragged_weight_gradient";
        let SourcesGradient { dy, x, groups, weights } = *self;
        let (r, n, k) = (dy.rows(), dy.last_dim(), x.last_dim());
        // Of all rows, as many as of every other source, where it is not known which are whose.
        let rows = r / groups.sources;
        let bytes = (dy.bytes() + x.bytes()) / groups.sources + dw.bytes();
        let work = Cost::new(2 * rows * n * k, bytes).on(dy.dtype(), [rows, n, k, weights]);
        let work = work.variant(if overwrite { "" } else { "adding" });
        by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, work, |on| {
            let cpu = match on {
                On::Cpu(cpu) => cpu,
                On::Cuda(gpu) => {
                    return cuda::ragged_weight_gradient(gpu, dy, x, groups, [source, weights], dw, overwrite);
                }
            };
            let (bounds, _) = bounds_of(&groups.bounds);
            let bounds = &bounds[source * weights..=(source + 1) * weights];
            let (dy, x) = (MatRef::new(dy.get::<T>(), r, n), MatRef::new(x.get::<T>(), r, k));
            gemm::grouped_weight_gradient(cpu, dy, x, bounds, dw.get_mut::<f32>(), accumulate_mode(overwrite));
            Ok(())
        })?);
        Ok(())
    }
}
