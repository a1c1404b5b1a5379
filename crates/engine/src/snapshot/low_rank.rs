//! The factors with which the next low-rank sums begin, in checkpoints.

use super::bytes;
use crate::Result;
use crate::checkpoint::{Checkpoint, Region, Runs};
use crate::rank::Rank;
use crate::tier::Stored;
use std::collections::BTreeSet;
use trainyard_tensor::DType;

/// Name of the part of a checkpoint.
pub(super) const PART: &str = "low_rank";

/// The names of the factors.
pub(super) fn names(rank: &Rank) -> BTreeSet<String> {
    rank.low_rank_starts().into_iter().map(|(name, _)| name).collect()
}

/// The factors that this rank writes. All ranks have the same, and the first writes them.
pub(super) fn regions(rank: &Rank, copies: bool) -> Result<Vec<Region<'static>>> {
    let mut all = Vec::new();
    if rank.parameters.holding().data.0 == 0 {
        for (name, q) in rank.low_rank_starts() {
            let elements = q.elements();
            let bytes = bytes(&[(Stored::Here(q), elements)], std::iter::once(0..elements), copies)?;
            let runs = vec![Runs::from(0..elements)];
            all.push(Region { name, dtype: DType::F32, shape: vec![elements], runs, bytes });
        }
    }
    Ok(all)
}

/// Restores the factors. Those of another rank do not fit: the next sums begin as the first ones
/// did.
pub(super) fn restore(rank: &Rank, checkpoint: &Checkpoint) -> Result<()> {
    for (name, mut q) in rank.low_rank_starts() {
        if checkpoint.entry(PART, &name).is_ok_and(|entry| entry.elements() == q.elements()) {
            let all = 0..q.elements();
            q.overwrite_bytes(|bytes| checkpoint.read(PART, &name, all, bytes))??;
        }
    }
    Ok(())
}
