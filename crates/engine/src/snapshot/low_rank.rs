//! The factors with which the next low-rank sums begin, in checkpoints.

use super::{bytes, of_replica};
use crate::Result;
use crate::checkpoint::{Checkpoint, Region, Runs};
use crate::rank::{LowRankStart, Rank};
use crate::tier::Stored;
use std::collections::BTreeSet;
use trainyard_tensor::DType;

/// Name of the part of a checkpoint.
pub(super) const PART: &str = "low_rank";

/// The names of the factors, those of other replicas included.
pub(super) fn names(rank: &Rank) -> BTreeSet<String> {
    let replicas = rank.replica().1;
    let of_all = |start: LowRankStart| {
        let count = if start.is_of_replica { replicas } else { 1 };
        (0..count).map(move |replica| name_of(&start, replica)).collect::<Vec<_>>()
    };
    rank.low_rank_starts().into_iter().flat_map(of_all).collect()
}

/// The name of the factors that `replica` has. Those of the first have the name of those that all
/// replicas have.
fn name_of(start: &LowRankStart, replica: usize) -> String {
    match replica {
        0 => start.name.clone(),
        _ => of_replica(&start.name, replica),
    }
}

/// The factors that this rank writes: the first rank those that all ranks have, and the first of
/// each replica those that it has.
pub(super) fn regions(rank: &Rank, copies: bool) -> Result<Vec<Region<'static>>> {
    let (holding, (replica, _)) = (rank.parameters.holding(), rank.replica());
    let mut all = Vec::new();
    for start in rank.low_rank_starts() {
        let writes = if start.is_of_replica { holding.is_first_of_replica() } else { holding.data.0 == 0 };
        if writes {
            let name = name_of(&start, if start.is_of_replica { replica } else { 0 });
            let (q, elements) = (start.q.clone(), start.q.elements());
            let bytes = bytes(&[(Stored::Here(q), elements)], std::iter::once(0..elements), copies)?;
            let runs = vec![Runs::from(0..elements)];
            all.push(Region { name, dtype: DType::F32, shape: vec![elements], runs, bytes });
        }
    }
    Ok(all)
}

/// Restores the factors. A replica that the checkpoint does not have takes those of the first.
/// Those of another rank do not fit: the next sums begin as the first ones did.
pub(super) fn restore(rank: &Rank, checkpoint: &Checkpoint) -> Result<()> {
    let (replica, _) = rank.replica();
    for mut start in rank.low_rank_starts() {
        let own = name_of(&start, if start.is_of_replica { replica } else { 0 });
        let name = if checkpoint.entry(PART, &own).is_ok() { own } else { start.name.clone() };
        if checkpoint.entry(PART, &name).is_ok_and(|entry| entry.elements() == start.q.elements()) {
            let all = 0..start.q.elements();
            start.q.overwrite_bytes(|bytes| checkpoint.read(PART, &name, all, bytes))??;
        }
    }
    Ok(())
}
