//! What may be set over the configuration of a run that goes on, and keeping it: the run's folder
//! says how it is trained, so that going on needs no flag.

use crate::Result;
use crate::config::{Config, Origin, Resolved};
use crate::session::files;
use crate::snapshot::RunState;
use crate::state::does_not_fit;
use std::fs;
use std::path::Path;

/// Keys that decide about a run once, and why.
const DECIDED: [(&str, &str); 5] = [
    ("run.name", "its folder is the one to resume; rename that"),
    ("run.directory", "its folder is the one to resume; move that, and set data.cache for where token files are kept"),
    ("tokenizer.path", "it keeps its tokenizer; start a new run for another"),
    ("tokenizer.kind", "it keeps its tokenizer; start a new run for another"),
    ("tokenizer.vocab_size", "it keeps its tokenizer; start a new run for another"),
];

/// An error for a setting that a run which goes on would not follow.
pub(crate) fn check(config: &Config) -> Result<()> {
    for (key, why) in DECIDED {
        if let origin @ Origin::Set(_) = config.origin(key) {
            return Err(does_not_fit(format!("{origin}: {key} has no effect on a run that goes on: {why}")));
        }
    }
    Ok(())
}

/// Writes the configuration that `sets` made into the run's `folder`, whole or not at all; says so
/// where it changed.
pub(crate) fn keep(folder: &Path, sets: &[String], resolved: &Resolved, note: &mut impl FnMut(&str)) -> Result<()> {
    let file = folder.join(files::CONFIG);
    let mut kept = resolved.clone();
    // As it was asked for, not where the run has it.
    kept.requested.tokenizer = Config::load(Some(&file), sets)?.tokenizer;
    let text = kept.to_toml();
    if sets.is_empty() || fs::read_to_string(&file).is_ok_and(|before| before == text) {
        return Ok(());
    }
    trainyard_data::write_atomically(&file, text.as_bytes())?;
    note(&format!("{} now has {}", file.display(), sets.join(", ")));
    Ok(())
}

/// Why nothing will be trained, where the run has come to its end already.
pub(crate) fn nothing_left(resolved: &Resolved, state: &RunState) -> Option<String> {
    let limits = resolved.limits;
    let by_steps = limits.steps.filter(|steps| *steps <= state.step);
    let by_seconds = limits.seconds.filter(|seconds| *seconds <= state.seconds);
    let (key, limit, next) = match (by_steps, by_seconds) {
        (Some(steps), _) => ("steps", steps.to_string(), (2 * state.step).to_string()),
        (None, Some(seconds)) => ("seconds", seconds.to_string(), (2.0 * state.seconds).ceil().to_string()),
        (None, None) => return None,
    };
    Some(format!(
        "nothing is left to train: {} steps are done in {:.0} s, and training.{key} is {limit}; go on with --set training.{key}={next}",
        state.step, state.seconds
    ))
}
