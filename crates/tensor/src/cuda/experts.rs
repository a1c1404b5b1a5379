//! Mixtures of experts. Everything is launched with sizes that do not depend on the routing.

use super::Cuda;
use super::launch::args;
use super::linear::{operands, plain};
use crate::cpu::experts::{BalanceFactors, Gate, Router};
use crate::error::Result;
use crate::ops::experts::{Groups, Routes};
use crate::{DType, Tensor, ensure_shape};
use std::sync::Arc;
use trainyard_cuda::driver::Product;
use trainyard_cuda::kernels as k;

fn gate(router: &Router) -> i32 {
    match router.gate {
        Gate::Softmax => 0,
        Gate::Sigmoid => 1,
    }
}

/// The logits y (f32) of a router.
pub(crate) fn router_logits(gpu: &Arc<Cuda>, x: &Tensor, w: &Tensor, y: &Tensor, workspace: &Tensor) -> Result<()> {
    let dims = [x.rows(), w.rows(), x.last_dim()];
    let form = Product { b_transposed: true, ..plain("router_logits", dims, x.dtype(), DType::F32)? };
    gpu.product(&form, &operands(x.region(false), w.region(false), y.region(true), workspace))
}

/// Fills `routes`.
pub(crate) fn route(
    gpu: &Arc<Cuda>,
    logits: &Tensor,
    bias: Option<&Tensor>,
    router: &Router,
    capacity: Option<usize>,
    routes: &Routes,
) -> Result<()> {
    let Router { experts: count, top_k, normalise, scale, .. } = *router;
    ensure_shape!(count <= k::EXPERTS_MAX, "route", "{count} experts, and a GPU takes at most {}", k::EXPERTS_MAX);
    let (tokens, choices) = (logits.rows(), routes.experts.elements());
    let Routes { weights, experts, places, tokens: order, bounds, counts } = routes;
    let (gate, normalise) = (gate(router), i32::from(normalise));
    let choose = args![logits, bias, experts, weights, tokens, count, top_k, gate, normalise, scale];
    gpu.launch(&k::ROUTE_CHOOSE, bias.map_or(DType::F32, Tensor::dtype), [tokens, 1, 1], choose)?;
    gpu.launch(&k::EXPERT_COUNTS, DType::F32, [1, count, 1], args![experts, counts, choices])?;
    let capacity = capacity.unwrap_or(choices).min(choices);
    let place = args![experts, counts, places, order, bounds, choices, count, top_k, capacity];
    gpu.launch(&k::EXPERT_PLACES, DType::F32, [1, count, 1], place)
}

pub(crate) fn route_backward(
    gpu: &Arc<Cuda>,
    logits: &Tensor,
    [experts, counts]: [&Tensor; 2],
    dweights: Option<&Tensor>,
    router: &Router,
    factors: BalanceFactors,
    dlogits: &Tensor,
) -> Result<()> {
    let Router { experts: count, top_k, normalise, scale, .. } = *router;
    let (tokens, normalise) = (logits.rows(), i32::from(normalise));
    let BalanceFactors { auxiliary, z } = factors;
    let sizes = [tokens, 1, 1];
    let args = args![
        logits,
        experts,
        counts,
        dweights,
        dlogits,
        tokens,
        count,
        top_k,
        gate(router),
        normalise,
        scale,
        auxiliary,
        z
    ];
    gpu.launch(&k::ROUTE_BACKWARD, DType::F32, sizes, args)
}

/// `terms`: scratch of two floats a token.
pub(crate) fn balance_sums(
    gpu: &Arc<Cuda>,
    router: &Router,
    logits: &Tensor,
    counts: &Tensor,
    sums: &Tensor,
    terms: &Tensor,
) -> Result<()> {
    let tokens = logits.rows();
    let args = args![logits, counts, terms, tokens, router.experts, gate(router)];
    gpu.launch(&k::BALANCE_TERMS, DType::F32, [tokens, 1, 1], args)?;
    super::plain::reduce_rows(gpu, terms, [2, tokens], Some(1.0), sums)
}

pub(crate) fn expert_excess(
    gpu: &Arc<Cuda>,
    counts: &Tensor,
    excess: &Tensor,
    unit: f32,
    overwrite: bool,
) -> Result<()> {
    let args = args![counts, excess, counts.elements(), unit, i32::from(!overwrite)];
    gpu.launch(&k::EXPERT_EXCESS, DType::F32, [1, 1, 1], args)
}

pub(crate) fn combine_rows(
    gpu: &Arc<Cuda>,
    rows: &Tensor,
    places: &Tensor,
    weights: Option<&Tensor>,
    residual: Option<&Tensor>,
    y: &Tensor,
) -> Result<()> {
    let (tokens, top_k, dim) = (places.rows(), places.last_dim(), rows.last_dim());
    let args = args![rows, places, weights, residual, y, tokens, top_k, dim];
    gpu.launch(&k::COMBINE_ROWS, rows.dtype(), [tokens, dim, 1], args)
}

pub(crate) fn combine_rows_backward(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    rows: &Tensor,
    places: &Tensor,
    weights: &Tensor,
    [drows, dweights]: [&Tensor; 2],
) -> Result<()> {
    let (tokens, top_k, dim) = (places.rows(), places.last_dim(), rows.last_dim());
    // The rows that are nobody's place.
    gpu.zero(drows.region(true))?;
    let args = args![dy, rows, places, weights, drows, dweights, tokens, top_k, dim];
    gpu.launch(&k::COMBINE_ROWS_BACKWARD, rows.dtype(), [tokens, dim, 1], args)
}

/// `y = x w[e]ᵀ` for `weights` weights.
pub(crate) fn ragged_linear(
    gpu: &Arc<Cuda>,
    x: &Tensor,
    w: &Tensor,
    groups: &Groups,
    weights: usize,
    y: &Tensor,
) -> Result<()> {
    let (rows, n, depth, count) = (x.rows(), y.last_dim(), x.last_dim(), groups.sources * weights);
    let args = args![x, w, &groups.bounds, y, rows, n, depth, count, weights];
    gpu.launch(&k::RAGGED_LINEAR, x.dtype(), [rows, n, count], args)
}

/// `dx = dy w[e]` for `weights` weights.
pub(crate) fn ragged_input_gradient(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    w: &Tensor,
    groups: &Groups,
    weights: usize,
    dx: &Tensor,
) -> Result<()> {
    let (rows, depth, n, count) = (dy.rows(), dy.last_dim(), dx.last_dim(), groups.sources * weights);
    let args = args![dy, w, &groups.bounds, dx, rows, depth, n, count, weights];
    gpu.launch(&k::RAGGED_INPUT_GRADIENT, dy.dtype(), [rows, n, count], args)
}

/// `dw[e] (+)= dyᵀ x` over the rows of source `source`.
pub(crate) fn ragged_weight_gradient(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    x: &Tensor,
    groups: &Groups,
    [source, weights]: [usize; 2],
    dw: &Tensor,
    overwrite: bool,
) -> Result<()> {
    let (n, depth) = (dy.last_dim(), x.last_dim());
    let bounds = super::launch::Arg::Part(&groups.bounds, 4 * source * weights, 4 * (weights + 1));
    let args = args![dy, x, bounds, dw, n, depth, weights, i32::from(!overwrite)];
    gpu.launch(&k::RAGGED_WEIGHT_GRADIENT, dy.dtype(), [n, depth, weights], args)
}
