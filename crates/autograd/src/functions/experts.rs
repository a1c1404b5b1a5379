//! A mixture of experts: the router, the way of tokens to experts and back, and the products of
//! ragged groups of rows. See [`trainyard_tensor::ops::experts`].

use super::prelude::*;
use crate::AutogradError;
use std::fmt;
use std::sync::Arc;
use trainyard_tensor::ops::experts::{self, BalanceFactors, Groups, Router, Routes};
use trainyard_tensor::{DType, Device, Purpose};

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

/// The way of rows between the ranks that share experts; the input is x.
#[derive(Clone, Debug)]
pub struct ExchangeRows {
    traffic: Traffic,
    to: Direction,
}

/// The products of groups of rows; inputs are x, w.
#[derive(Clone, Debug)]
pub struct RaggedLinear {
    groups: Groups,
}

/// Weighted sums of experts' rows; inputs are rows, weights, and the residual where present.
#[derive(Clone, Debug)]
pub struct Combine {
    places: Tensor,
}

/// Exchanges rows between the ranks that share the experts of a layer. All of them call the same
/// methods in the same order, in forward and in backward.
pub trait RowExchange: Send + Sync + fmt::Debug {
    /// The number of ranks.
    fn ranks(&self) -> usize;

    /// Sends equally many of `own` to each rank, in the order of the ranks, and returns the parts
    /// that the ranks sent, in the same order.
    ///
    /// # Errors
    /// The exchange failed.
    fn counts(&self, own: &[i32]) -> Result<Vec<i32>>;

    /// Sends the next `sends[j]` rows of `from` to each rank j, and receives `receives[j]` rows
    /// from it into the next rows of `to`. Rows of both behind these are left alone.
    ///
    /// # Errors
    /// The exchange failed.
    fn rows(&self, from: &Tensor, sends: &[usize], to: &mut Tensor, receives: &[usize]) -> Result<()>;
}

/// The side that rows go to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the ranks of tokens to those of experts.
    Experts,
    /// Back.
    Tokens,
}

/// The rows of a micro-batch that a rank exchanges with those that share its experts: one way
/// before the experts and the other way after them.
#[derive(Clone)]
pub struct Traffic {
    /// None on a device without data, where every rank receives as many rows as it has.
    exchange: Option<Arc<dyn RowExchange>>,
    /// Per rank, the rows that go to its experts, and those that come from it.
    sends: Vec<usize>,
    receives: Vec<usize>,
    /// The rows of buffers on the side of tokens and on that of experts.
    rows: [usize; 2],
}

impl fmt::Debug for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Traffic({:?} to {:?})", self.sends, self.receives)
    }
}

impl Traffic {
    /// Tells the other ranks how many rows come to each of their experts, and learns from them how
    /// many come here. `bounds` i32 [E + 1] are those of all E experts; rank r of R has experts
    /// `r E / R..(r + 1) E / R`. `rows` is the size of the buffer of rows that the bounds are of.
    ///
    /// Returns the groups of the rows that arrive, with the ranks as sources. Without an `exchange`
    /// there is no data, and `ranks` ranks send each other equally much.
    ///
    /// # Errors
    /// Experts that cannot be divided; data but no exchange; the exchange failed.
    pub fn announce(
        bounds: &Tensor,
        rows: usize,
        exchange: Option<&Arc<dyn RowExchange>>,
        ranks: usize,
    ) -> Result<(Traffic, Groups)> {
        let (device, experts) = (bounds.device(), bounds.elements().saturating_sub(1));
        let fits = experts.is_multiple_of(ranks.max(1)) && exchange.is_none_or(|exchange| exchange.ranks() == ranks);
        if ranks == 0 || !fits {
            return Err(AutogradError::Exchange(format!("{experts} experts over {ranks} ranks: no whole number each")));
        }
        let ints = |elements: usize| device.empty([elements], DType::I32, Purpose::Activations);
        if device.is_meta() {
            let traffic = Traffic { exchange: None, sends: Vec::new(), receives: Vec::new(), rows: [rows; 2] };
            return Ok((traffic, Groups { bounds: ints(experts + 1)?, sources: ranks }));
        }
        let Some(exchange) = exchange else {
            let what = "a rank with some of the experts runs them together with the ranks of the others".to_owned();
            return Err(AutogradError::Exchange(what));
        };
        let own: Vec<i32> = bounds.to_vec::<i32>()?.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let arriving = exchange.counts(&own)?;
        let of_rank = |counts: &[i32]| -> Vec<usize> {
            let each = counts.chunks((experts / ranks).max(1));
            each.map(|counts| counts.iter().map(|count| usize::try_from(*count).unwrap_or(0)).sum()).collect()
        };
        let (sends, receives) = (of_rank(&own), of_rank(&arriving));
        let mut ends = Vec::with_capacity(experts + 1);
        ends.push(0);
        for count in &arriving {
            ends.push(ends[ends.len() - 1] + count);
        }
        let mut bounds = ints(experts + 1)?;
        bounds.write(&ends)?;
        // A tensor has at least one row. Where none arrives, it is nobody's.
        let rows = [rows, receives.iter().sum::<usize>().max(1)];
        let traffic = Traffic { exchange: Some(Arc::clone(exchange)), sends, receives, rows };
        Ok((traffic, Groups { bounds, sources: ranks }))
    }

    /// The rows of `from` on the other side. Rows that nobody sends are zeros.
    fn run(&self, from: &Tensor, to: Direction) -> Result<Tensor> {
        let (rows, sends, receives) = match to {
            Direction::Experts => (self.rows[1], &self.sends, &self.receives),
            Direction::Tokens => (self.rows[0], &self.receives, &self.sends),
        };
        let device: &Device = from.device();
        let mut arrived = device.empty([rows, from.last_dim()], from.dtype(), Purpose::Activations)?;
        if let Some(exchange) = &self.exchange {
            let end: usize = receives.iter().sum();
            if end < rows {
                arrived.narrow(end..rows)?.fill_zero()?;
            }
            exchange.rows(from, sends, &mut arrived, receives)?;
        }
        Ok(arrived)
    }
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

    /// The rows of x [r, d] on the side of experts or of tokens: those that the ranks of `traffic`
    /// send.
    ///
    /// # Errors
    /// The exchange failed.
    pub fn exchange_rows(&mut self, x: &Var, traffic: &Traffic, to: Direction) -> Result<Var> {
        let y = traffic.run(x.tensor(), to)?;
        let function = ExchangeRows { traffic: traffic.clone(), to };
        self.record_one(function, &[x.into()], y, |_| Vec::new())
    }

    /// `x w[e]ᵀ` for the rows of each expert e: x [r, k], w [E n, k], result [r, n].
    pub fn ragged_linear(&mut self, x: &Var, w: ParamId, groups: &Groups) -> Result<Var> {
        let weight = self.parameter(w)?;
        let y = experts::ragged_linear(x.tensor(), &weight.value, groups)?;
        let function = RaggedLinear { groups: groups.clone() };
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
            let dlogits = experts::route_backward(&logits, &chosen, &counts, dweights, &self.router, self.factors)?;
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

impl Differentiable for ExchangeRows {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        // All ranks come here, whatever gradients they want.
        let to = match self.to {
            Direction::Experts => Direction::Tokens,
            Direction::Tokens => Direction::Experts,
        };
        let dx = self.traffic.run(&dy, to)?;
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for RaggedLinear {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        cx.leave(Some(&dy), &[0]);
        if let Some(mut dw) = cx.gradient_target(1)? {
            let x = cx.saved(0)?;
            experts::ragged_weight_gradient(&dy, &x, &self.groups, (&mut dw.tensor, dw.overwrite))?;
        }
        if cx.wants(0)? {
            let weight = cx.parameter(1)?;
            cx.add_gradient(0, experts::ragged_input_gradient(&dy, &weight.value, &self.groups)?)?;
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
