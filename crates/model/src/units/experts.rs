//! A mixture of experts in the place of a block's MLP (Shazeer et al. 2017; Jiang et al. 2024).
//!
//! A router scores all experts for each token and the token goes to the best few. Tokens are
//! sorted by expert, the products of all experts run over contiguous groups of rows, and the
//! weighted sum of a token's results comes back to it. No token is dropped unless there is a
//! capacity. Shared experts see every token (Dai et al. 2024).
//!
//! Where ranks divide the experts, rows go to the rank of their expert before the products, and
//! come back after them. The shared experts compute while they travel, one product for each way. In
//! backward the gradients of rows travel beside the same products, and beside the weight gradients
//! of the experts' first product.

use crate::Result;
use crate::families::Parameters;
use crate::parameter::{Init, ParameterKind, ParameterSpec};
use crate::spec::{ExpertsSpec, Gate};
use crate::split::ExpertSplit;
use crate::unit::{Forward, Output};
use trainyard_autograd::functions::{Direction, LinearOptions, Traffic, WeightGradient};
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_tensor::ops::experts::{self, BalanceFactors, Groups, Router, Routes};

/// The experts of one block.
#[derive(Debug)]
pub(super) struct Experts {
    layer: usize,
    router: Router,
    router_weight: ParamId,
    /// Added to scores where experts are chosen.
    bias: Option<ParamId>,
    /// [E 2 f, d], for each expert the gate first.
    up: ParamId,
    /// [E d, f]
    down: ParamId,
    /// The shared experts' [2 f, d] and [d, f].
    shared: Option<[ParamId; 2]>,
    capacity_factor: Option<f64>,
    factors: BalanceFactors,
    /// The experts that this rank has.
    held: ExpertSplit,
}

impl Experts {
    pub fn new(parameters: &mut Parameters<'_>, experts: &ExpertsSpec) -> Experts {
        let (dim, layer) = (parameters.spec().dim, parameters.layer());
        let ExpertsSpec { experts: count, top_k, ffn_dim, shared_ffn_dim, .. } = *experts;
        let router_weight = parameters.readout("mlp.router.weight", [count, dim]);
        let bias = experts
            .selection_bias
            .then(|| parameters.add("mlp.router.bias", &[count], Init::Zeros, ParameterKind::Balance));
        let up = parameters.matrix("mlp.experts.up.weight", [count * 2 * ffn_dim, dim]);
        let down = parameters.residual_matrix("mlp.experts.down.weight", [count * dim, ffn_dim]);
        let shared = (shared_ffn_dim > 0).then(|| {
            let up = parameters.matrix("mlp.shared.up.weight", [2 * shared_ffn_dim, dim]);
            [up, parameters.residual_matrix("mlp.shared.down.weight", [dim, shared_ffn_dim])]
        });
        let gate = match experts.gate {
            Gate::Softmax => experts::Gate::Softmax,
            Gate::Sigmoid => experts::Gate::Sigmoid,
        };
        Experts {
            layer,
            router: Router { experts: count, top_k, gate, normalise: experts.normalise, scale: experts.scale as f32 },
            router_weight,
            bias,
            up,
            down,
            shared,
            capacity_factor: experts.capacity_factor,
            factors: BalanceFactors { auxiliary: experts.auxiliary_loss as f32, z: experts.z_loss as f32 },
            held: ExpertSplit::WHOLE,
        }
    }

    /// Makes these the experts of one rank of an expert-parallel group. Its `parameters` are those
    /// of the block.
    pub fn spread(&mut self, split: ExpertSplit, parameters: &mut [ParameterSpec]) {
        self.held = split;
        for id in [self.up, self.down] {
            split.cut(&mut parameters[id.index as usize]);
        }
    }

    /// Makes these the experts of one of `ranks` ranks of a tensor-parallel group. Each rank routes
    /// all tokens, and the gradients of the router are summed over ranks.
    pub fn split(&mut self, ranks: usize) {
        self.factors.auxiliary /= ranks as f32;
        self.factors.z /= ranks as f32;
    }

    /// `residual + experts(h)`: h and the result [m, d].
    pub fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, h: &Var, residual: Option<&Var>) -> Result<Var> {
        let (weights, routes) = self.route(tape, cx, h)?;
        let rows = tape.dispatch(h, &routes)?;
        let widen = |tape: &mut Tape<'_>| self.shared.map(|[up, _]| shared_experts(tape, up, h)).transpose();
        let narrow = |tape: &mut Tape<'_>, wide: Option<Var>| match (self.shared, wide) {
            (Some([_, down]), Some(wide)) => {
                Ok(Some(tape.linear(&wide, down, LinearOptions { residual, ..LinearOptions::default() })?))
            }
            _ => Ok::<_, crate::ModelError>(None),
        };
        // The order is that of ranks that exchange rows, so sums of gradients have their bits.
        let (rows, shared) = if self.held.ranks == 1 {
            let wide = widen(tape)?;
            let rows = self.products(tape, rows, &Groups::of_one_source(&routes.bounds), WeightGradient::AtOnce)?;
            (rows, narrow(tape, wide)?)
        } else {
            let (exchange, ranks) = (cx.experts.as_ref(), self.held.ranks);
            let (traffic, groups) = Traffic::announce(&routes.bounds, rows.tensor().rows(), exchange, ranks)?;
            let sent = tape.send_rows(&rows, &traffic, Direction::Experts)?;
            drop(rows);
            let wide = widen(tape)?;
            let arrived = tape.receive_rows(sent)?;
            let rows = self.products(tape, arrived, &groups, WeightGradient::BesideExchange)?;
            let sent = tape.send_rows(&rows, &traffic, Direction::Tokens)?;
            drop(rows);
            let shared = narrow(tape, wide)?;
            (tape.receive_rows(sent)?, shared)
        };
        Ok(tape.combine(&rows, &weights, &routes.places, shared.as_ref().or(residual))?)
    }

    /// The experts on rows in `groups`.
    fn products(&self, tape: &mut Tape<'_>, rows: Var, groups: &Groups, of_up: WeightGradient) -> Result<Var> {
        let wide = tape.ragged_linear(&rows, self.up, groups, of_up)?;
        drop(rows);
        let wide = tape.swiglu(&wide)?;
        Ok(tape.ragged_linear(&wide, self.down, groups, WeightGradient::AtOnce)?)
    }

    /// The ways of the tokens of the micro-batch.
    fn route(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, h: &Var) -> Result<(Var, Routes)> {
        let tokens = h.tensor().rows();
        let logits = tape.router_logits(h, self.router_weight)?;
        // A micro-batch counts in the step's balance losses by its tokens, as it does in the loss.
        let part = match cx.output {
            Output::Loss { scale } if cx.training => scale * tokens as f32,
            _ => 0.0,
        };
        let factors = BalanceFactors { auxiliary: part * self.factors.auxiliary, z: part * self.factors.z };
        let capacity = self.capacity_factor.filter(|_| cx.training).map(|factor| {
            let even = (tokens * self.router.top_k) as f64 / self.router.experts as f64;
            (factor * even).ceil() as usize
        });
        let (weights, routes) = tape.route(&logits, self.bias, self.router, capacity, factors)?;
        if let Some(record) = cx.routing.as_deref_mut() {
            let losses = self.factors != BalanceFactors::default();
            record.add(self.layer, &self.router, capacity, logits.tensor(), &routes, losses)?;
        }
        Ok((weights, routes))
    }
}

/// `swiglu(up(h))`
fn shared_experts(tape: &mut Tape<'_>, up: ParamId, h: &Var) -> Result<Var> {
    let wide = tape.linear(h, up, LinearOptions::default())?;
    Ok(tape.swiglu(&wide)?)
}
