//! The average of the weights over steps in checkpoints: a part with the names and shapes of the
//! part `model`.

use super::{Writes, held_parameters, load_behind, load_from, name_of, read_state, region};
use crate::Result;
use crate::checkpoint::{Checkpoint, Region};
use crate::optimizer::Behind;
use crate::rank::Rank;
use crate::state::does_not_fit;

/// The name of the part.
pub(super) const PART: &str = "averages";

/// The averages that this rank writes.
pub(super) fn regions(rank: &Rank, writes: &Writes, copies: bool) -> Result<Vec<Region<'static>>> {
    let mut all = Vec::new();
    for (id, spec) in held_parameters(rank) {
        let pieces = writes.pieces(id.unit as usize, spec, &rank.parameters.master_part_range(id));
        if !pieces.is_empty() {
            let shape = spec.whole_shape().to_vec();
            all.push(region(name_of(rank, id), shape, pieces, &rank.averages(id)?, copies)?);
        }
    }
    Ok(all)
}

fn has_averages(checkpoint: &Checkpoint) -> bool {
    checkpoint.names(PART).next().is_some()
}

/// Restores the average, which has taken `averaged` weights. Returns that number; 0 if the rank
/// keeps no average or the checkpoint has none, so that it begins anew.
pub(super) fn restore(rank: &mut Rank, checkpoint: &Checkpoint, averaged: u64) -> Result<u64> {
    if !rank.has_averages() || !has_averages(checkpoint) {
        return Ok(0);
    }
    load_behind(rank, Behind::Average, checkpoint, PART)?;
    Ok(averaged)
}

/// A message if the run goes on without the checkpoint's average.
pub(super) fn left_behind(rank: &Rank, checkpoint: &Checkpoint) -> Option<String> {
    (has_averages(checkpoint) && !rank.has_averages())
        .then(|| "the average of the weights is dropped, because averaging.kind is \"off\" now".to_owned())
}

/// Loads the average of the weights in the place of the weights, for evaluation, generation and
/// export.
///
/// # Errors
/// If the checkpoint has no average, or one that has taken no weights yet; and those of
/// [`load_parameters`](super::load_parameters).
pub fn load_averages(rank: &mut Rank, checkpoint: &Checkpoint) -> Result<()> {
    let path = checkpoint.path().display();
    if !has_averages(checkpoint) {
        return Err(does_not_fit(format!(
            "{path} has no average of the weights: train with averaging.kind = \"ema\" or \"uniform\", or leave out --averaged"
        )));
    }
    if read_state(checkpoint)?.averaged == 0 {
        return Err(does_not_fit(format!(
            "the average of the weights in {path} has taken none yet, because averaging.start_step is later: train on, or leave \
             out --averaged"
        )));
    }
    load_from(PART, rank, checkpoint)
}
