//! The outer step of replicas that train apart, and its state.
//!
//! Between outer steps each replica changes its own masters. An outer step takes the change of each
//! since the last one, averages it over replicas, and applies it as a gradient to the parameters
//! from then, with momentum (Douillard et al. 2023, DiLoCo). All replicas go on from the result.
//!
//! In streaming DiLoCo (Douillard et al. 2025) the units are divided into fragments, each with
//! outer steps at times of its own. The changes of a fragment may travel *beside* a step, from
//! before its forward: the result is mixed into what the step's update makes.
//!
//! State between steps: the parameters of the last outer step, and their momentum. Every replica
//! has the same of both.

use crate::Result;
use crate::encoded::{EncodedSums, Moment};
use crate::links::ReduceLinks;
use crate::optimizer::swap;
use crate::power_sgd::LowRankSums;
use crate::state::{Holding, ParameterState};
use serde::Serialize;
use std::ops::Range;
use trainyard_model::{Model, UnitLayout};
use trainyard_tensor::ops::optim::{Decay, OptimizerOperands, Sgd, chunk_sums_of_squares_of, sgd};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// The rule of an outer step.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct OuterSettings {
    /// Learning rate; 1 without momentum gives the mean of the replicas.
    pub learning_rate: f64,
    /// Nesterov momentum; 0: none.
    pub momentum: f64,
    /// For outer steps that run beside a step: the share of a replica's own parameters in those
    /// with which it goes on. None: outer steps follow a step, and replicas go on from the result.
    pub mixing: Option<f64>,
}

/// The state of outer steps on one rank.
pub(crate) struct OuterStep {
    settings: OuterSettings,
    /// By unit; None for units that the rank does not hold.
    units: Vec<Option<OuterUnit>>,
    pub(crate) sums: OuterSums,
    /// True if masters may differ from the parameters of the last outer step.
    pub(crate) is_in_round: bool,
    /// The weight of this replica's change. The mean over replicas is 1.
    pub(crate) weight: f64,
    /// Memory for the change of one unit, to compare it with the mean.
    own: Tensor,
    /// Memory for a change that travels beside a step.
    beside: Option<Tensor>,
    /// Sums of squares over the units so far: of the distance between this replica's change and the
    /// mean change, and of the mean change.
    squares: [f64; 2],
}

/// The sums over replicas of changes: in the form of one codec, or as they are.
#[derive(Default)]
pub(crate) struct OuterSums {
    /// Blocks of the elements that the masters hold.
    pub(crate) encoded: Option<EncodedSums>,
    /// Factors of whole matrices.
    pub(crate) low_rank: Option<LowRankSums>,
}

/// One unit: the elements that the masters hold.
pub(crate) struct OuterUnit {
    range: Range<usize>,
    /// The parameters of the last outer step.
    parameters: Tensor,
    /// None without momentum.
    momentum: Option<Tensor>,
}

impl OuterStep {
    /// Allocates the state for the masters that `holding` places on this rank.
    pub(crate) fn new(
        device: &Device,
        model: &Model,
        holding: &Holding,
        settings: OuterSettings,
        sums: OuterSums,
    ) -> Result<OuterStep> {
        let unit = |unit: usize| -> Result<Option<OuterUnit>> {
            let range = master_range(model, holding, unit);
            if range.is_empty() {
                return Ok(None);
            }
            let zeros = || device.zeros([range.len()], DType::F32, Purpose::Optimizer);
            let momentum = (settings.momentum != 0.0).then(zeros).transpose()?;
            Ok(Some(OuterUnit { parameters: zeros()?, momentum, range }))
        };
        let units = (0..model.units().len()).map(unit).collect::<Result<Vec<_>>>()?;
        let largest = units.iter().flatten().map(|unit| unit.range.len()).max().unwrap_or(0);
        let own = device.empty([largest], DType::F32, Purpose::Comm)?;
        let beside = || device.empty([largest], DType::F32, Purpose::Comm);
        let beside = settings.mixing.map(|_| beside()).transpose()?;
        Ok(OuterStep { settings, units, sums, is_in_round: false, weight: 1.0, own, beside, squares: [0.0; 2] })
    }

    /// Takes the masters as the parameters of an outer step.
    pub(crate) fn begin_from(&mut self, parameters: &ParameterState) -> Result<()> {
        self.is_in_round = false;
        for (number, unit) in self.units.iter_mut().enumerate() {
            if let Some(unit) = unit {
                unit.parameters.copy_from(&parameters.unit(number).master_range(unit.range.clone())?)?;
            }
        }
        Ok(())
    }

    /// The outer step of `unit`, after its update. All replicas call this together.
    pub(crate) fn step(
        &mut self,
        number: usize,
        parameters: &ParameterState,
        links: &ReduceLinks,
        at: Moment,
    ) -> Result<()> {
        let Some(unit) = &self.units[number] else { return Ok(()) };
        let (held, range) = (parameters.unit(number), unit.range.clone());
        // The masters become the change.
        let mut change = held.master_range(range.clone())?;
        self.average(number, &mut change, links, at)?;
        change.copy_from(&self.unit(number).parameters)?;
        held.write_copy(range, &change)
    }

    /// The outer step of `unit` beside a step: it takes the change of the masters before the
    /// update, and leaves them as they are. All replicas call this together.
    pub(crate) fn step_beside(
        &mut self,
        number: usize,
        parameters: &ParameterState,
        links: &ReduceLinks,
        at: Moment,
    ) -> Result<()> {
        let Some(unit) = &self.units[number] else { return Ok(()) };
        let masters = parameters.unit(number).master_range(unit.range.clone())?;
        let beside = self.beside.as_ref().expect("memory for changes that travel beside steps");
        let mut change = beside.view(0, [masters.elements()])?;
        change.copy_from(&masters)?;
        self.average(number, &mut change, links, at)
    }

    /// Mixes the parameters of the outer step into the masters: they become `mixing` times
    /// themselves, and the rest of the outer parameters (Douillard et al. 2025, Equation 2).
    pub(crate) fn merge(&mut self, number: usize, parameters: &ParameterState) -> Result<()> {
        let Some(unit) = &self.units[number] else { return Ok(()) };
        let held = parameters.unit(number);
        let mut masters = held.master_range(unit.range.clone())?;
        let mixing = self.settings.mixing.expect("a share of mixing where outer steps run beside steps");
        if mixing == 0.0 {
            masters.copy_from(&unit.parameters)?;
        } else {
            let mut distance = self.own.view(0, [masters.elements()])?;
            distance.copy_from(&masters)?;
            subtract(&mut distance, &unit.parameters, 1.0)?;
            subtract(&mut masters, &distance, (1.0 - mixing) as f32)?;
        }
        held.write_copy(unit.range.clone(), &masters)
    }

    /// Takes `change`, which holds masters, and makes it their change; averages it over replicas by
    /// their weights, and applies the outer rule to the parameters of the last outer step.
    fn average(&mut self, number: usize, change: &mut Tensor, links: &ReduceLinks, at: Moment) -> Result<()> {
        let unit = self.units[number].as_mut().expect("asked for units that the rank holds");
        let replicas = &links.replicate;
        // masters - parameters, which is minus the gradient.
        subtract(change, &unit.parameters, 1.0)?;
        let mut own = self.own.view(0, [change.elements()])?;
        own.copy_from(change)?;
        if self.weight != 1.0 {
            subtract(change, &own, (1.0 - self.weight) as f32)?;
        }
        match &mut self.sums {
            OuterSums { low_rank: Some(sums), .. } if replicas.size() > 1 => {
                sums.sum_in_parts(number, change, &links.shard, replicas)?;
            }
            OuterSums { encoded: Some(sums), .. } if replicas.size() > 1 => {
                sums.all_reduce(number, change, replicas, at)?;
            }
            _ => replicas.all_reduce(change, &links.staging)?,
        }
        let share = 1.0 / replicas.size() as f64;
        self.squares[1] += share * share * sum_of_squares(change)?;
        subtract(&mut own, change, share as f32)?;
        self.squares[0] += sum_of_squares(&own)?;
        let OuterSettings { learning_rate, momentum, .. } = self.settings;
        let rule = Sgd { lr: learning_rate as f32, momentum: momentum as f32, nesterov: momentum != 0.0, ..PLAIN };
        let operands = OptimizerOperands {
            master: &mut unit.parameters,
            gradient: change,
            gradient_scale: -share as f32,
            copy: None,
        };
        Ok(sgd(rule, operands, unit.momentum.as_mut())?)
    }

    /// Exchanges the masters with the parameters of the last outer step. A second call restores
    /// every bit.
    pub(crate) fn swap(&self, number: usize, parameters: &ParameterState) -> Result<()> {
        let Some(unit) = &self.units[number] else { return Ok(()) };
        let held = parameters.unit(number);
        let masters = held.master_range(unit.range.clone())?;
        swap(&masters, &unit.parameters)?;
        held.write_copy(unit.range.clone(), &masters)
    }

    /// Ends the outer step of all units, or of a fragment. Returns the drift between replicas: the
    /// root mean square distance of their changes from the mean change, as a share of its length.
    /// All replicas call this together.
    pub(crate) fn end(&mut self, links: &ReduceLinks, is_whole: bool) -> Result<f64> {
        self.is_in_round &= !is_whole;
        let squares = std::mem::take(&mut self.squares);
        let sum = |numbers: Vec<f64>| -> [f64; 2] {
            numbers.chunks(2).fold([0.0; 2], |sum, pair| [sum[0] + pair[0], sum[1] + pair[1]])
        };
        // Shards hold different elements; replicas have the same mean.
        let of_replica = sum(links.shard.all_gather_numbers(&squares)?);
        let of_all = sum(links.replicate.all_gather_numbers(&of_replica)?);
        let [distance, mean] = of_all;
        Ok(if mean > 0.0 { (distance / mean).sqrt() } else { 0.0 })
    }

    /// Elements `range` of a unit's flat buffer of the parameters of the last outer step.
    pub(crate) fn parameters(&self, unit: usize, range: &Range<usize>) -> Result<Tensor> {
        let unit = self.unit(unit);
        Ok(unit.parameters.view(range.start - unit.range.start, [range.len()])?)
    }

    /// Elements `range` of a unit's flat buffer of the outer momentum; None without momentum.
    pub(crate) fn momentum(&self, unit: usize, range: &Range<usize>) -> Result<Option<Tensor>> {
        let unit = self.unit(unit);
        let view = |momentum: &Tensor| momentum.view(range.start - unit.range.start, [range.len()]);
        Ok(unit.momentum.as_ref().map(view).transpose()?)
    }

    pub(crate) fn has_momentum(&self) -> bool {
        self.settings.momentum != 0.0
    }

    fn unit(&self, unit: usize) -> &OuterUnit {
        self.units[unit].as_ref().expect("asked for units that the rank holds")
    }
}

/// The elements of a unit's flat buffer whose masters the rank holds.
pub(crate) fn master_range(model: &Model, holding: &Holding, unit: usize) -> Range<usize> {
    let layout = UnitLayout::new(holding.parameters(model, unit), holding.shards);
    holding.range(holding.placement.masters, &layout)
}

/// A step of SGD that subtracts its gradient.
const PLAIN: Sgd = Sgd { lr: 1.0, momentum: 0.0, nesterov: false, weight_decay: 0.0, decay: Decay::Decoupled };

/// `from -= share * what`
fn subtract(from: &mut Tensor, what: &Tensor, share: f32) -> Result<()> {
    let operands = OptimizerOperands { master: from, gradient: what, gradient_scale: share, copy: None };
    Ok(sgd(PLAIN, operands, None)?)
}

fn sum_of_squares(values: &Tensor) -> Result<f64> {
    let chunks = chunk_sums_of_squares_of(std::slice::from_ref(values), UnitLayout::QUANTUM)?;
    Ok(chunks.iter().flatten().sum())
}
