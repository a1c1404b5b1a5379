//! Finds the checkpoint of a run that a user names: the latest, the best, or that of a step.

use super::store::{Found, best_in, folder_of, latest_in, steps};
use super::{Checkpoint, CheckpointError};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// The name of one of a run's checkpoints: `latest`, `best`, or a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// The newest whole checkpoint.
    #[default]
    Latest,
    /// The checkpoint with the lowest evaluation loss.
    Best,
    /// The checkpoint after this many completed steps.
    Step(u64),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Choice, String> {
        match text {
            "latest" => Ok(Choice::Latest),
            "best" => Ok(Choice::Best),
            number => number.parse().map(Choice::Step).map_err(|_| "it is latest, best, or a step such as 1000".into()),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Latest => f.write_str("latest"),
            Choice::Best => f.write_str("best"),
            Choice::Step(step) => write!(f, "{step}"),
        }
    }
}

/// Returns the checkpoint of `run` that `choice` names, with every checksum verified. `None` if the
/// latest is wanted and there are no checkpoints. Takes no lock and changes nothing, so it may be
/// used while a training runs.
///
/// # Errors
///
/// The named checkpoint is missing or damaged; or the latest is wanted, and there are checkpoints
/// but none is whole.
pub fn find(run: &Path, choice: Choice) -> Result<Option<Found>, CheckpointError> {
    let folder = run.join("checkpoints");
    let step = match choice {
        Choice::Latest => return latest_in(&folder),
        Choice::Step(step) => step,
        Choice::Best => match best_in(&folder)? {
            Some(best) => best.step,
            None => return Err(CheckpointError::NoBest { path: folder }),
        },
    };
    let path = folder_of(&folder, step);
    if !path.is_dir() {
        return Err(CheckpointError::NoStep { step, there: steps(&folder)?, path: folder });
    }
    let checkpoint = Checkpoint::open(&path)?;
    checkpoint.verify()?;
    if checkpoint.step() != step {
        return Err(CheckpointError::damaged(&path, format!("its manifest is of step {}", checkpoint.step())));
    }
    Ok(Some(Found { step, checkpoint, skipped: Vec::new() }))
}
