//! Numbers that a run found suspicious when they happened: `health.jsonl`, one event a line.

use crate::{RecordError, read_lines};
use serde::{Deserialize, Serialize};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The kind of a suspicious number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Symptom {
    /// The loss, or a gradient, is not finite.
    NotFinite,
    /// The loss is far above that of the steps before.
    LossSpike,
    /// The gradient norm is far above that of the steps before.
    NormSpike,
    /// The gradient norm has grown over many steps.
    NormDrift,
    /// A corpus has been passed over many times.
    RepeatedData,
    /// Ranks that must hold the same parameters hold different bits.
    ReplicasDiffer,
    /// Units of a feed-forward layer have got no gradient for long.
    DeadUnits,
}

impl Symptom {
    /// The name in words.
    pub fn in_words(self) -> &'static str {
        match self {
            Symptom::NotFinite => "a number that is not finite",
            Symptom::LossSpike => "a loss spike",
            Symptom::NormSpike => "a spike of the gradient norm",
            Symptom::NormDrift => "a gradient norm that grows",
            Symptom::RepeatedData => "data that is repeated",
            Symptom::ReplicasDiffer => "parameters that differ between ranks",
            Symptom::DeadUnits => "units that learn nothing any more",
        }
    }
}

/// One suspicious number.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct HealthEvent {
    /// The step, from 1.
    pub step: u64,
    /// The kind.
    pub symptom: Symptom,
    /// The number; None if it is not finite.
    pub value: Option<f64>,
    /// The number that was usual before.
    pub usual: Option<f64>,
    /// The first sample of the step's global batch, counted over the whole run, and their number.
    pub samples: [u64; 2],
    /// The reaction, in words.
    pub reaction: String,
}

/// The path of the file.
pub fn path(run: &Path) -> PathBuf {
    run.join("health.jsonl")
}

/// Appends an event.
///
/// # Errors
/// A file that cannot be written.
pub fn append(run: &Path, event: &HealthEvent) -> Result<(), RecordError> {
    let path = path(run);
    let mut line = serde_json::to_vec(event).expect("plain data is JSON");
    line.push(b'\n');
    let file = OpenOptions::new().create(true).append(true).open(&path);
    file.and_then(|mut file| file.write_all(&line)).map_err(RecordError::io("write", &path))
}

/// The events of a run, oldest first. A step has at most one. A step that was repeated after a
/// resume has that of its last execution.
///
/// # Errors
/// A file that cannot be read.
pub fn read(run: &Path) -> Result<Vec<HealthEvent>, RecordError> {
    let mut kept: Vec<HealthEvent> = Vec::new();
    for event in read_lines::<HealthEvent>(&path(run))? {
        while kept.last().is_some_and(|last| last.step >= event.step) {
            kept.pop();
        }
        kept.push(event);
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_repeated_steps_replace_those_before() {
        let folder = tempfile::tempdir().unwrap();
        let event = |step| HealthEvent {
            step,
            symptom: Symptom::LossSpike,
            value: Some(9.0),
            usual: Some(2.0),
            samples: [8 * step, 8],
            reaction: "said".into(),
        };
        assert_eq!(read(folder.path()).unwrap(), []);
        [3, 5, 7, 9, 5].iter().for_each(|step| append(folder.path(), &event(*step)).unwrap());
        assert_eq!(read(folder.path()).unwrap(), [event(3), event(5)]);
    }
}
