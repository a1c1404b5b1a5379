//! The tensors that a run hands on for elastic weight consolidation ([`crate::consolidation`]), in
//! files like those of a checkpoint: the parts have the names and shapes of the part `model`.

use super::{fill, name_of, trained_parameters};
use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::consolidation::{FISHER, WEIGHTS};
use crate::optimizer::Held;
use crate::rank::Rank;
use std::collections::BTreeMap;

/// Loads the Fisher information and the weights that `rank` is held to.
///
/// # Errors
/// A tensor of the model that is missing or has another shape.
pub(crate) fn load_consolidation(rank: &mut Rank, checkpoint: &Checkpoint) -> Result<()> {
    let specs: BTreeMap<_, _> =
        trained_parameters(rank).map(|(id, spec)| (id, (name_of(rank, id), spec.clone()))).collect();
    for which in Held::ALL {
        let part = if which == Held::Fisher { FISHER } else { WEIGHTS };
        rank.set_held(which, |id, range, values| {
            let (name, spec) = &specs[&id];
            fill(checkpoint, part, name, spec.whole_shape(), spec, range, values)
        })?;
    }
    Ok(())
}
