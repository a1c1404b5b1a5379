//! Values that change their layout between two segments of a unit.
//!
//! As for messages between stages, the compute lane allocates and frees their memory, and the inner
//! lane only exchanges. A sum over all ranks is formed in place; everything else comes in a buffer
//! of its own.

use super::cannot;
use crate::Result;
use crate::links::Link;
use crate::state::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;
use trainyard_program::{Action, Axis, Change, Collective, Phase};
use trainyard_tensor::{DType, Purpose, Tensor, ops};

/// A border of a unit on a micro-batch, in forward or backward: phase, unit, border, micro-batch.
pub(super) type Crossing = (Phase, u32, u32, u32);

/// The values of a step at borders.
#[derive(Default)]
pub(super) struct Exchanges(Mutex<BTreeMap<Crossing, State>>);

#[derive(Clone, Default)]
struct State {
    /// The value before the exchange; None once it is forgotten.
    from: Option<Tensor>,
    /// The value after it; None before memory is taken and after it was read.
    to: Option<Tensor>,
    /// The value before a sum in f32, where its own type cannot be summed.
    wide: Option<Tensor>,
}

/// The border that an instruction exchanges a value at.
pub(super) fn crossing_of(action: Action) -> Option<(Crossing, Collective)> {
    match action {
        Action::Exchange { collective, unit, micro_batch, phase, border, .. } => {
            Some(((phase, unit, border, micro_batch), collective))
        }
        _ => None,
    }
}

/// The value in another layout, outside of steps.
pub(super) fn change(from: &Tensor, change: Option<Change>, link: &Link) -> Result<Tensor> {
    let one = Exchanges::default();
    let (at, axis) = ((Phase::Forward, 0, 0, 0), Axis::Tensor);
    match change {
        Some(Change::By(collective)) => {
            let (phase, unit, border, micro_batch) = at;
            let action = Action::Exchange { collective, axis, unit, micro_batch, phase, border, times: 1 };
            // The tape may hold the value, so a sum is formed in a copy.
            let copy = match collective {
                Collective::AllReduce => {
                    let mut copy = from.device().empty(*from.shape(), from.dtype(), Purpose::Activations)?;
                    copy.copy_from(from)?;
                    copy
                }
                _ => from.clone(),
            };
            one.offer(at, copy);
            one.take(action, link.size())?;
            one.run(action, link)?;
            Ok(one.arrived(at).expect("the exchange has run"))
        }
        Some(Change::TakePart) => part_of(from, link.index(), link.size()),
        _ => Ok(from.clone()),
    }
}

/// The rows of a value that rank `index` of `ranks` has when it is split.
pub(super) fn part_of(from: &Tensor, index: usize, ranks: usize) -> Result<Tensor> {
    let rows = from.rows() / ranks;
    Ok(from.narrow(index * rows..(index + 1) * rows)?)
}

impl Exchanges {
    /// Hands over a value to be exchanged.
    pub fn offer(&self, at: Crossing, from: Tensor) {
        lock(&self.0).insert(at, State { from: Some(from), ..State::default() });
    }

    /// Allocates memory for the result of an exchange between `ranks` ranks.
    pub fn take(&self, action: Action, ranks: usize) -> Result<()> {
        let (at, collective) = crossing_of(action).ok_or_else(|| cannot(action))?;
        let mut states = lock(&self.0);
        let state = states.get_mut(&at).expect("a value is offered before it is exchanged");
        let from = state.from.as_ref().expect("a value is offered before it is exchanged");
        let (rows, columns) = (from.rows(), from.elements() / from.rows().max(1));
        let device = from.device();
        let to = match collective {
            Collective::AllReduce => from.clone(),
            Collective::AllGather => device.empty([rows * ranks, columns], from.dtype(), Purpose::Activations)?,
            Collective::ReduceScatter => device.empty([rows / ranks, columns], from.dtype(), Purpose::Activations)?,
            Collective::AllToAll => device.empty([rows, columns], from.dtype(), Purpose::Activations)?,
            _ => return Err(cannot(action)),
        };
        let sums = matches!(collective, Collective::AllReduce | Collective::ReduceScatter);
        if from.dtype() == DType::F16 && sums {
            state.wide = Some(device.empty([rows, columns], DType::F32, Purpose::Activations)?);
        }
        state.to = Some(to);
        Ok(())
    }

    /// The value after its exchange; None if it has none.
    pub fn arrived(&self, at: Crossing) -> Option<Tensor> {
        lock(&self.0).get_mut(&at).and_then(|state| state.to.take())
    }

    /// Frees the value before its exchange, which has finished.
    pub fn forget(&self, action: Action) {
        if let Some((at, _)) = crossing_of(action)
            && let Some(state) = lock(&self.0).get_mut(&at)
        {
            (state.from, state.wide) = (None, None);
        }
    }

    /// Runs an exchange.
    pub fn run(&self, action: Action, link: &Link) -> Result<()> {
        let (at, collective) = crossing_of(action).ok_or_else(|| cannot(action))?;
        let State { from, to, wide } = lock(&self.0)[&at].clone();
        let (Some(from), Some(mut to)) = (from, to) else { return Err(cannot(action)) };
        match (collective, wide) {
            (Collective::AllGather, _) => link.all_gather(&from, &mut to),
            (Collective::AllToAll, _) => link.all_to_all(&from, &mut to),
            (Collective::AllReduce, None) => link.sum(&mut to),
            (_, None) => link.sum_to_parts(&from, &mut to),
            (_, Some(mut wide)) => {
                ops::cast_into(&from, &mut wide)?;
                link.sum(&mut wide)?;
                let part = match collective {
                    Collective::AllReduce => wide,
                    _ => wide.narrow(link.index() * to.rows()..(link.index() + 1) * to.rows())?,
                };
                Ok(ops::cast_into(&part, &mut to)?)
            }
        }
    }
}
