//! The tensors that a run hands on for elastic weight consolidation ([`crate::consolidation`]), in
//! files like those of a checkpoint: the parts have the names and shapes of the part `model`.

use super::load_behind;
use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::consolidation::{FISHER, WEIGHTS};
use crate::optimizer::Behind;
use crate::rank::Rank;

/// Loads the Fisher information and the weights that `rank` is held to.
///
/// # Errors
/// A tensor of the model that is missing or has another shape.
pub(crate) fn load_consolidation(rank: &mut Rank, checkpoint: &Checkpoint) -> Result<()> {
    load_behind(rank, Behind::Fisher, checkpoint, FISHER)?;
    load_behind(rank, Behind::HeldWeights, checkpoint, WEIGHTS)
}
