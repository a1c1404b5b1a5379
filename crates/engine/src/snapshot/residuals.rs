//! Residuals of encoded messages and velocities of momentum correction, in checkpoints.

use super::{RESIDUALS, Writes, fill, name_of, region};
use crate::Result;
use crate::checkpoint::{Checkpoint, Region};
use crate::rank::{NamedResidual, Rank};
use crate::state::overlap;
use crate::tier::Stored;
use std::ops::Range;
use trainyard_autograd::ParamId;
use trainyard_model::ParameterSpec;
use trainyard_tensor::{DType, Purpose, Tensor, ops};

/// The residuals that this rank holds, by parameter.
pub(super) fn regions(rank: &Rank, copies: bool) -> Result<Vec<Region<'static>>> {
    let mut all = Vec::new();
    for named in rank.residuals() {
        for ResidualPart { id, spec, held, values } in of_parameters(rank, &named)? {
            let pieces = Writes::all().pieces(id.unit as usize, &spec, &held);
            let name = format!("{}.{}", name_of(rank, id), named.name);
            let stored = [(Stored::Here(values), held.len())];
            all.push(region(name, spec.whole_shape().to_vec(), pieces, &stored, copies)?);
        }
    }
    Ok(all)
}

/// The part of a residual that belongs to a parameter.
struct ResidualPart {
    id: ParamId,
    spec: ParameterSpec,
    /// The parameter's elements.
    held: Range<usize>,
    /// Their values.
    values: Tensor,
}

/// The parts of a residual that belong to parameters.
fn of_parameters(rank: &Rank, named: &NamedResidual) -> Result<Vec<ResidualPart>> {
    let NamedResidual { residual, .. } = named;
    let layout = rank.parameters.unit(residual.unit).layout();
    let mut all = Vec::new();
    for (index, spec) in rank.model().units()[residual.unit].parameters().iter().enumerate() {
        let of_parameter = layout.range(index);
        let held = overlap(&of_parameter, &residual.within);
        if !held.is_empty() {
            let id = ParamId { unit: residual.unit as u32, index: index as u32 };
            let values = residual.values.view(held.start - residual.within.start, [held.len()])?;
            let held = held.start - of_parameter.start..held.end - of_parameter.start;
            all.push(ResidualPart { id, spec: spec.clone(), held, values });
        }
    }
    Ok(all)
}

/// Restores residuals and velocities. Those of ranks that there are no more are added to those of
/// the first: what was left out is sent by whoever is there, and the sum of velocities stays.
pub(super) fn restore(rank: &mut Rank, checkpoint: &Checkpoint) -> Result<()> {
    let names = rank.residual_names();
    let first = |prefix: &str| names.iter().find(|name| name.split('.').next() == Some(prefix)).cloned();
    for named in rank.residuals() {
        let prefix = named.name.split('.').next().unwrap_or_default();
        let is_first = first(prefix).as_ref() == Some(&named.name);
        for ResidualPart { id, spec, held, mut values } in of_parameters(rank, &named)? {
            let name = name_of(rank, id);
            let read = |source: &str, values: &mut Tensor| {
                let source = format!("{name}.{source}");
                fill(checkpoint, RESIDUALS, &source, spec.whole_shape(), &spec, held.clone(), values)
            };
            if checkpoint.entry(RESIDUALS, &format!("{name}.{}", named.name)).is_ok() {
                read(&named.name, &mut values)?;
            }
            let of_parameter = format!("{name}.{prefix}.");
            let gone = checkpoint.names(RESIDUALS).filter_map(|stored| stored.strip_prefix(&of_parameter));
            for index in gone.filter(|_| is_first) {
                let source = format!("{prefix}.{index}");
                if !names.contains(&source) {
                    let mut other = rank.device().zeros([held.len()], DType::F32, Purpose::Workspace)?;
                    read(&source, &mut other)?;
                    ops::accumulate(&other, &mut values, false)?;
                }
            }
        }
    }
    Ok(())
}
