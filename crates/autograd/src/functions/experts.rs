//! A mixture of experts: the router, the way of tokens to experts and back, and the products of
//! ragged groups of rows. See [`trainyard_tensor::ops::experts`].

use super::prelude::*;
use crate::AutogradError;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// The begin of the way of rows between the ranks that share experts; the input is x. Backward
/// waits for the gradient's way back.
#[derive(Clone, Debug)]
pub struct SendRows {
    way: Way,
}

/// The end of it; the input is what was sent. Backward begins the gradient's way back.
#[derive(Clone, Debug)]
pub struct ReceiveRows {
    way: Way,
}

/// The products of groups of rows; inputs are x, w.
#[derive(Clone, Debug)]
pub struct RaggedLinear {
    groups: Groups,
    weight_gradient: WeightGradient,
}

/// The time at which backward computes the gradient of the weights of ragged products.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WeightGradient {
    /// Before that of the rows.
    AtOnce,
    /// After that of the rows, while it is on its way to other ranks ([`Tape::receive_rows`]).
    BesideExchange,
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

    /// Begins to send the next `sends[j]` rows of `from` to each rank j, and to receive
    /// `receives[j]` rows from it into the next rows of `to`. Rows of both behind these are left
    /// alone. The result waits for the end; before, `from` must not be changed and `to` not be
    /// used. The exchange holds neither of them after it.
    ///
    /// # Errors
    /// The exchange failed, now or at its end.
    fn rows(&self, from: &Tensor, sends: &[usize], to: &Tensor, receives: &[usize]) -> Result<InFlight>;
}

/// Waits for the end of an exchange that has begun.
pub type InFlight = Box<dyn FnOnce() -> Result<()> + Send>;

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

    /// Begins to bring the rows of `from` to the other side. Rows that nobody sends are zeros.
    fn begin(&self, from: &Tensor, to: Direction) -> Result<(Tensor, Option<InFlight>)> {
        let (rows, sends, receives) = match to {
            Direction::Experts => (self.rows[1], &self.sends, &self.receives),
            Direction::Tokens => (self.rows[0], &self.receives, &self.sends),
        };
        let device: &Device = from.device();
        let arrived = device.empty([rows, from.last_dim()], from.dtype(), Purpose::Activations)?;
        let Some(exchange) = &self.exchange else { return Ok((arrived, None)) };
        let end: usize = receives.iter().sum();
        if end < rows {
            arrived.narrow(end..rows)?.fill_zero()?;
        }
        let in_flight = exchange.rows(from, sends, &arrived, receives)?;
        Ok((arrived, Some(in_flight)))
    }
}

/// One way of rows of a micro-batch, and of their gradient back. At most one of the two is under
/// way.
#[derive(Clone)]
struct Way {
    traffic: Traffic,
    to: Direction,
    under_way: Arc<Mutex<Option<UnderWay>>>,
}

/// An exchange that has begun. It keeps what is sent, so that memory does not depend on how fast
/// it travels.
struct UnderWay {
    _sent: Tensor,
    in_flight: Option<InFlight>,
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.traffic, self.to)
    }
}

impl Way {
    fn begin(&self, from: &Tensor, to: Direction) -> Result<Tensor> {
        let (arriving, in_flight) = self.traffic.begin(from, to)?;
        *self.slot() = Some(UnderWay { _sent: from.clone(), in_flight });
        Ok(arriving)
    }

    fn end(&self) -> Result<()> {
        let under_way = self.slot().take();
        under_way.and_then(|under_way| under_way.in_flight).map_or(Ok(()), |wait| wait())
    }

    fn slot(&self) -> MutexGuard<'_, Option<UnderWay>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn back(&self) -> Direction {
        match self.to {
            Direction::Experts => Direction::Tokens,
            Direction::Tokens => Direction::Experts,
        }
    }
}

/// Rows on their way to other ranks, for [`Tape::receive_rows`].
pub struct SentRows {
    /// The memory in which they arrive.
    arriving: Var,
    way: Way,
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

    /// Begins to bring rows to the other side. What is recorded until [`Tape::receive_rows`] runs
    /// while they travel, and so do their gradients in backward.
    pub fn send_rows(&mut self, x: &Var, traffic: &Traffic, to: Direction) -> Result<SentRows> {
        let way = Way { traffic: traffic.clone(), to, under_way: Arc::default() };
        let arriving = way.begin(x.tensor(), to)?;
        let arriving = self.record_one(SendRows { way: way.clone() }, &[x.into()], arriving, |_| Vec::new())?;
        Ok(SentRows { arriving, way })
    }

    /// Waits for rows: [r, d] on the side of experts, [m k, d] on that of tokens. Rows that nobody
    /// sent are zeros.
    pub fn receive_rows(&mut self, SentRows { arriving, way }: SentRows) -> Result<Var> {
        way.end()?;
        let arrived = arriving.tensor().clone();
        self.record_one(ReceiveRows { way }, &[(&arriving).into()], arrived, |_| Vec::new())
    }

    /// `x w[e]ᵀ` for the rows of each expert e: x [r, k], w [E n, k], result [r, n].
    pub fn ragged_linear(
        &mut self,
        x: &Var,
        w: ParamId,
        groups: &Groups,
        weight_gradient: WeightGradient,
    ) -> Result<Var> {
        let weight = self.parameter(w)?;
        let y = experts::ragged_linear(x.tensor(), &weight.value, groups)?;
        let function = RaggedLinear { groups: groups.clone(), weight_gradient };
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

impl Differentiable for SendRows {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        self.way.end()?;
        cx.add_gradient(0, dy)
    }
}

impl Differentiable for ReceiveRows {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        // All ranks come here, whatever gradients they want.
        let dx = self.way.begin(&dy, self.way.back())?;
        match cx.wants(0)? {
            true => cx.add_gradient(0, dx),
            // Backward does not come to the begin.
            false => self.way.end(),
        }
    }
}

impl RaggedLinear {
    pub(super) fn waits(&self) -> bool {
        self.weight_gradient == WeightGradient::BesideExchange
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
