//! State of a rank beside parameters and optimizer: that of outer steps, and residuals of encoded
//! messages. [`crate::snapshot`] writes it to checkpoints under the names given here.

use super::{Rank, RankSettings};
use crate::Result;
use crate::encoded::{EncodedSums, Residual, ResidualOf, SumSettings, UnitExtents};
use crate::links::{Link, ReduceLinks};
use crate::outer::{OuterStep, OuterSums, master_range};
use crate::power_sgd::LowRankSums;
use crate::state::{Holding, lock, overlap};
use crate::tier::Stored;
use std::collections::BTreeSet;
use std::ops::Range;
use trainyard_autograd::ParamId;
use trainyard_model::{Model, UnitLayout};
use trainyard_program::{Codec, Encoding};
use trainyard_tensor::{Device, Tensor};

/// The part of a replica that trains apart in a step in which some replicas may leave out theirs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Participation {
    /// True if the replica takes part. Otherwise it waits for the outer step, if there is one.
    pub takes_part: bool,
    /// Number of replicas that take part.
    pub replicas: usize,
    /// Number of tokens that they have together.
    pub tokens: u64,
    /// The weight of the replica's change in an outer step after this one. The mean over replicas
    /// is 1.
    pub weight: f64,
}

/// A residual and its name behind that of a parameter.
pub(crate) struct NamedResidual {
    pub name: String,
    pub residual: Residual,
}

/// The factors with which the next low-rank sums of a unit begin.
pub(crate) struct LowRankStart {
    pub name: String,
    /// True if each replica has others. Otherwise all ranks have the same.
    pub is_of_replica: bool,
    pub q: Tensor,
}

impl Rank {
    /// True if replicas train apart.
    pub(crate) fn is_apart(&self) -> bool {
        self.outer.is_some()
    }

    /// True if replicas may have different masters now.
    pub(crate) fn is_in_round(&self) -> bool {
        self.outer.as_ref().is_some_and(|outer| lock(outer).is_in_round)
    }

    /// Sets whether replicas may have different masters.
    pub(crate) fn set_in_round(&mut self, is_in_round: bool) {
        if let Some(outer) = &self.outer {
            lock(outer).is_in_round = is_in_round;
        }
    }

    /// Sets the part of this replica in the steps that follow; None if all replicas take part in
    /// every step.
    pub fn set_participation(&mut self, participation: Option<Participation>) {
        self.participation = participation;
        if let Some(outer) = &self.outer {
            lock(outer).weight = participation.map_or(1.0, |own| own.weight);
        }
    }

    /// Exchanges the masters with the parameters of the last outer step, which all replicas have
    /// alike, and writes the copies that forward reads. A second call restores every bit.
    pub fn swap_common(&self) -> Result<()> {
        let Some(outer) = &self.outer else { return Ok(()) };
        let links = lock(&self.compute_links);
        for number in (0..self.model().units().len()).filter(|unit| self.parameters.holds(*unit)) {
            if !self.parameters.unit(number).is_frozen() {
                lock(outer).swap(number, &self.parameters)?;
                self.parameters.complete_copy(number, &links.shard)?;
            }
        }
        Ok(self.device.synchronize()?)
    }

    /// True if outer steps have momentum.
    pub(crate) fn has_outer_momentum(&self) -> bool {
        self.outer.as_ref().is_some_and(|outer| lock(outer).has_momentum())
    }

    /// The elements of a parameter that this rank holds, of the last outer step; those of the
    /// masters where replicas do not train apart.
    pub(crate) fn common_parameters(&self, id: ParamId) -> Result<Vec<(Stored, usize)>> {
        let Some(outer) = &self.outer else { return self.masters(id) };
        let range = self.held_of(id);
        Ok(vec![(Stored::Here(lock(outer).parameters(id.unit as usize, &range)?), range.len())])
    }

    /// The outer momentum of a parameter's elements that this rank holds; None without any.
    pub(crate) fn outer_momentum(&self, id: ParamId) -> Result<Option<Tensor>> {
        let Some(outer) = &self.outer else { return Ok(None) };
        lock(outer).momentum(id.unit as usize, &self.held_of(id))
    }

    /// The elements of a unit's flat buffer that belong to a parameter and whose masters the rank
    /// holds.
    fn held_of(&self, id: ParamId) -> Range<usize> {
        let unit = self.parameters.unit(id.unit as usize);
        overlap(&unit.layout().range(id.index as usize), &unit.held_masters())
    }

    /// The residuals that this rank holds, and the velocities beside them.
    pub(crate) fn residuals(&self) -> Vec<NamedResidual> {
        let links = lock(&self.reduce_links);
        let replica = links.replicate.index();
        let holding = self.parameters.holding();
        let own = |unit: usize| {
            let is_held = holding.holds(unit);
            if is_held { holding.own(self.parameters.unit(unit).layout()) } else { 0..0 }
        };
        let masters = |unit: usize| self.parameters.unit(unit).held_masters();
        let named = |prefix: &'static str| {
            move |residual: Residual| {
                let of = match residual.of {
                    ResidualOf::Group => format!("rank.{}", holding.data.0),
                    ResidualOf::Replica => format!("replica.{replica}"),
                    ResidualOf::Sum => "sum".to_owned(),
                };
                NamedResidual { name: format!("{prefix}.{of}"), residual }
            }
        };
        let mut all: Vec<NamedResidual> = Vec::new();
        if let Some(encoded) = &links.encoded {
            all.extend(encoded.residuals(replica, own).into_iter().map(named("residual")));
            all.extend(encoded.velocities(own).into_iter().map(named("velocity")));
        }
        if let Some(low_rank) = &links.low_rank {
            all.extend(low_rank.residuals(ResidualOf::Group).map(named("residual")));
        }
        if let Some(outer) = self.outer.as_ref().map(lock) {
            let of_blocks = outer.sums.encoded.iter().flat_map(|sums| sums.residuals(replica, masters));
            let low_rank = outer.sums.low_rank.iter().flat_map(|sums| sums.residuals(ResidualOf::Replica));
            all.extend(of_blocks.chain(low_rank).map(named("outer_residual")));
        }
        all
    }

    /// The factors with which the next low-rank sums begin, by unit.
    pub(crate) fn low_rank_starts(&self) -> Vec<LowRankStart> {
        let links = lock(&self.reduce_links);
        let named = |what: &'static str, is_of_replica: bool| {
            move |(unit, q): (usize, &Tensor)| {
                let name = format!("{}.{what}", self.model().units()[unit].name());
                LowRankStart { name, is_of_replica, q: q.clone() }
            }
        };
        // Replicas that train apart sum gradients apart.
        let of_gradients = links.low_rank.iter().flat_map(LowRankSums::starts);
        let mut all: Vec<LowRankStart> = of_gradients.map(named("power_sgd", self.is_apart())).collect();
        if let Some(outer) = self.outer.as_ref().map(lock) {
            let of_outer = outer.sums.low_rank.iter().flat_map(LowRankSums::starts);
            all.extend(of_outer.map(named("outer_power_sgd", false)));
        }
        all
    }

    /// The names of the residuals and velocities that all ranks hold together.
    pub(crate) fn residual_names(&self) -> BTreeSet<String> {
        let replicas = self.replica().1;
        let ranks = self.parameters.holding().data.1;
        let of_all = |named: NamedResidual| {
            let prefix = named.name.split('.').next().unwrap_or_default().to_owned();
            let (kind, count) = match named.residual.of {
                ResidualOf::Group => ("rank", ranks),
                ResidualOf::Replica => ("replica", replicas),
                ResidualOf::Sum => return vec![named.name],
            };
            (0..count).map(|index| format!("{prefix}.{kind}.{index}")).collect()
        };
        self.residuals().into_iter().flat_map(of_all).collect()
    }
}

/// The state of outer steps that `settings` ask for.
pub(super) fn outer_step(
    device: &Device,
    model: &Model,
    holding: &Holding,
    links: &ReduceLinks,
    settings: &RankSettings,
) -> Result<Option<OuterStep>> {
    let Some(outer) = settings.outer else { return Ok(None) };
    let layout = |unit: usize| UnitLayout::new(holding.parameters(model, unit), holding.shards);
    let (units, seed) = (0..model.units().len(), settings.seed);
    let mut sums = OuterSums::default();
    match settings.compression.outer {
        None => {}
        Some(encoding @ Encoding { codec: Codec::Blocks(codec), .. }) => {
            let extents = |unit: usize| UnitExtents::new(&layout(unit), 0, master_range(model, holding, unit));
            let extents: Vec<_> = units.map(extents).collect();
            let of_sums = SumSettings { rounding: settings.compression.rounding, seed, momentum: None };
            let alone = Link::default();
            let encoded = EncodedSums::new(device, extents, (encoding, codec), of_sums, &alone, &links.replicate)?;
            sums.encoded = Some(encoded);
        }
        Some(Encoding { codec: Codec::PowerSgd(codec), feedback, .. }) => {
            let layouts: Vec<_> = units.map(layout).collect();
            let held = |unit: usize| master_range(model, holding, unit);
            sums.low_rank = Some(LowRankSums::new(device, model, &layouts, codec, feedback, seed, held)?);
        }
    }
    Ok(Some(OuterStep::new(device, model, holding, outer, sums)?))
}
