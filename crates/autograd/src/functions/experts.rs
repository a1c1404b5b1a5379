//! A mixture of experts: the router, the way of tokens to experts and back, and the products of
//! ragged groups of rows. See [`trainyard_tensor::ops::experts`].

use super::prelude::*;
use trainyard_tensor::ops::experts::{self, BalanceFactors, Router, Routes};

/// Logits of a router; inputs are x, w.
#[derive(Clone, Debug)]
pub struct RouterLogits;

/// Choices and their weights; inputs are logits, and the bias where present.
#[derive(Clone, Debug)]
pub struct Route {
    router: Router,
    factors: BalanceFactors,
}

/// Rows sorted by expert; the input is x.
#[derive(Clone, Debug)]
pub struct Dispatch {
    tokens: Tensor,
    places: Tensor,
}

/// The products of groups of rows; inputs are x, w.
#[derive(Clone, Debug)]
pub struct RaggedLinear {
    bounds: Tensor,
}

/// Weighted sums of experts' rows; inputs are rows, weights, and the residual where present.
#[derive(Clone, Debug)]
pub struct Combine {
    places: Tensor,
}

impl Tape<'_> {
    /// A router's logits in f32: x [m, d], w [E, d], result [m, E].
    pub fn router_logits(&mut self, x: &Var, w: ParamId) -> Result<Var> {
        let weight = self.parameter(w)?;
        let y = experts::router_logits(x.tensor(), &weight.value)?;
        self.record_one(RouterLogits, &[x.into(), w.into()], y, |tape| vec![tape.save(x)])
    }

    /// The ways of tokens to experts, and the weights of their choices [m, k] in f32, through which
    /// gradients flow to `logits` [m, E]. The balance losses, which are no value of the graph, add
    /// their gradients times `factors`.
    ///
    /// `bias` [E] is added to scores where experts are chosen. It has no derivative: what is summed
    /// in the place of its gradient is by how many choices each expert is ahead of the mean.
    pub fn route(
        &mut self,
        logits: &Var,
        bias: Option<ParamId>,
        router: Router,
        capacity: Option<usize>,
        factors: BalanceFactors,
    ) -> Result<(Var, Routes)> {
        let mut inputs = vec![Operand::from(logits)];
        inputs.extend(bias.map(Operand::from));
        let bias = bias.map(|id| self.parameter(id)).transpose()?;
        let routes = experts::route(logits.tensor(), bias.as_ref().map(|b| &b.value), &router, capacity)?;
        let saved = [logits.tensor(), &routes.experts, &routes.counts].map(|t| Saved::Tensor(t.clone()));
        let function = Route { router, factors };
        let weights = self.record_one(function, &inputs, routes.weights.clone(), |_| saved.into())?;
        Ok((weights, routes))
    }

    /// The rows of x [m, d] in the order of experts: [m k, d].
    pub fn dispatch(&mut self, x: &Var, routes: &Routes) -> Result<Var> {
        let y = experts::gather_rows(x.tensor(), &routes.tokens)?;
        let function = Dispatch { tokens: routes.tokens.clone(), places: routes.places.clone() };
        self.record_one(function, &[x.into()], y, |tape| vec![tape.save(x)])
    }

    /// `x w[e]ᵀ` for the rows of each expert e: x [r, k], w [E n, k], bounds i32 [E + 1], result
    /// [r, n].
    pub fn ragged_linear(&mut self, x: &Var, w: ParamId, bounds: &Tensor) -> Result<Var> {
        let weight = self.parameter(w)?;
        let y = experts::ragged_linear(x.tensor(), &weight.value, bounds)?;
        let function = RaggedLinear { bounds: bounds.clone() };
        self.record_one(function, &[x.into(), w.into()], y, |tape| vec![tape.save(x)])
    }

    /// `residual[t] + Σ_j weights[t, j] rows[places[t, j]]`: rows [r, d], weights [m, k] in f32,
    /// residual and result [m, d].
    pub fn combine(&mut self, rows: &Var, weights: &Var, places: &Tensor, residual: Option<&Var>) -> Result<Var> {
        let y = experts::combine_rows(rows.tensor(), places, Some(weights.tensor()), residual.map(Var::tensor))?;
        let mut inputs = vec![Operand::from(rows), weights.into()];
        inputs.extend(residual.map(Operand::from));
        let function = Combine { places: places.clone() };
        self.record_one(function, &inputs, y, |tape| vec![tape.save(rows), tape.save(weights)])
    }
}

impl Differentiable for RouterLogits {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(mut dy) = cx.output_gradient(0) else { return Ok(()) };
        if !cx.has_left() {
            let dtype = cx.parameter(1)?.value.dtype();
            if dy.dtype() != dtype {
                dy = ops::cast(&dy, dtype)?;
            }
            cx.leave(Some(&dy), &[0]);
        }
        if let Some(mut dw) = cx.gradient_target(1)? {
            let x = cx.saved(0)?;
            ops::linear_weight_gradient(&dy, &x, Some((&mut dw.tensor, dw.overwrite)), None)?;
        }
        if cx.wants(0)? {
            let weight = cx.parameter(1)?;
            cx.add_gradient(0, ops::linear_input_gradient(&dy, &weight.value)?)?;
        }
        Ok(())
    }
}

impl Differentiable for Route {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let dweights = cx.output_gradient(0);
        let counts = cx.saved(2)?;
        if cx.wants(0)? {
            let (logits, chosen) = (cx.saved(0)?, cx.saved(1)?);
            let dweights = dweights.as_ref();
            let dlogits =
                experts::route_backward(&logits, &chosen, &counts, dweights, &self.router, self.factors)?;
            cx.add_gradient(0, dlogits)?;
        }
        if cx.inputs() > 1
            && let Some(mut excess) = cx.gradient_target(1)?
        {
            experts::expert_excess(&counts, &mut excess.tensor, excess.overwrite)?;
        }
        Ok(())
    }
}

impl Differentiable for Dispatch {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = experts::combine_rows(&dy, &self.places, None, None)?;
        cx.add_gradient(0, dx)
    }

    fn recompute(&self, cx: &mut Backward<'_>) -> Result<Tensor> {
        Ok(experts::gather_rows(&cx.saved(0)?, &self.tokens)?)
    }
}

impl Differentiable for RaggedLinear {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        cx.leave(Some(&dy), &[0]);
        if let Some(mut dw) = cx.gradient_target(1)? {
            let x = cx.saved(0)?;
            experts::ragged_weight_gradient(&dy, &x, &self.bounds, (&mut dw.tensor, dw.overwrite))?;
        }
        if cx.wants(0)? {
            let weight = cx.parameter(1)?;
            cx.add_gradient(0, experts::ragged_input_gradient(&dy, &weight.value, &self.bounds)?)?;
        }
        Ok(())
    }
}

impl Differentiable for Combine {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        if cx.inputs() > 2 {
            cx.add_gradient(2, dy.clone())?;
        }
        if cx.wants(0)? || cx.wants(1)? {
            let (rows, weights) = (cx.saved(0)?, cx.saved(1)?);
            let (drows, dweights) = experts::combine_rows_backward(&dy, &rows, &self.places, &weights)?;
            cx.add_gradient(0, drows)?;
            cx.add_gradient(1, dweights)?;
        }
        Ok(())
    }
}
