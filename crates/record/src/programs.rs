//! The programs that recorded steps ran, with the work of their instructions, and the prediction.

use crate::{RecordError, trace_folder};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::path::{Path, PathBuf};
use trainyard_program::Program;

/// `trace/rank-N.program.json`: the programs of one rank.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Programs {
    /// The programs. The priced one ends without a snapshot; the others are it with more
    /// instructions, or with fewer where a schedule freezes more.
    pub programs: Vec<Program>,
    /// The place of the priced one.
    #[serde(default)]
    pub priced: usize,
    /// The work of every instruction of the priced program.
    pub work: Vec<Work>,
    /// Threads of the rank's kernels.
    pub threads: u32,
    /// The measured peak of all ranks together, in FLOP/s of products in the run's number format.
    /// Known on rank 0.
    pub peak_flops: Option<f64>,
}

/// The work of one instruction.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Work {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes that its kernels read and write.
    pub bytes: f64,
    /// Number of kernels.
    pub kernels: u32,
}

/// The predicted times of a step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Predicted {
    /// Seconds of the step.
    pub step_s: f64,
    /// The basis of the prediction, in words.
    pub basis: String,
    /// Per pipeline stage, start and end of each instruction of its priced program.
    pub stages: Vec<Vec<[f64; 2]>>,
}

impl Programs {
    /// The program whose work and time are predicted.
    pub fn priced(&self) -> &Program {
        self.programs.get(self.priced).unwrap_or(&self.programs[0])
    }

    /// The path of the file of `rank`.
    pub fn path(run: &Path, rank: u32) -> PathBuf {
        trace_folder(run).join(format!("rank-{rank}.program.json"))
    }

    /// Writes the file.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, run: &Path) -> Result<(), RecordError> {
        write(&Programs::path(run, self.programs[0].rank), self)
    }

    /// The file of `rank`; None if there is none.
    ///
    /// # Errors
    /// A file that cannot be read, or that is something else.
    pub fn read(run: &Path, rank: u32) -> Result<Option<Programs>, RecordError> {
        read(&Programs::path(run, rank))
    }
}

impl Predicted {
    fn path(run: &Path) -> PathBuf {
        trace_folder(run).join("predicted.json")
    }

    /// Writes `trace/predicted.json`.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, run: &Path) -> Result<(), RecordError> {
        write(&Predicted::path(run), self)
    }

    /// Reads `trace/predicted.json`; None if there is none.
    ///
    /// # Errors
    /// A file that cannot be read, or that is something else.
    pub fn read(run: &Path) -> Result<Option<Predicted>, RecordError> {
        read(&Predicted::path(run))
    }
}

fn write<T: Serialize>(path: &Path, value: &T) -> Result<(), RecordError> {
    let folder = path.parent().expect("a file of a run lies in a folder");
    std::fs::create_dir_all(folder).map_err(RecordError::io("write", folder))?;
    // A reader sees the old file or the new one.
    let temporary = path.with_extension("json.new");
    let text = serde_json::to_vec(value).expect("plain data is JSON");
    std::fs::write(&temporary, text).map_err(RecordError::io("write", &temporary))?;
    std::fs::rename(&temporary, path).map_err(RecordError::io("write", path))
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, RecordError> {
    match std::fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|error| RecordError::format(path, error)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(RecordError::io("read", path)(error)),
    }
}
