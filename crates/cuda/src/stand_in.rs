//! A stand-in for NVIDIA's driver and libraries, which the loader finds in their place. Programs
//! under test take it for GPUs. `emulation/standin/standin.h` describes it, its checks, and the
//! variables that choose its GPUs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use xxhash_rust::xxh3::xxh3_64;

const SOURCES: [&str; 5] = ["driver.cc", "nvrtc.cc", "cublaslt.cc", "nccl.cc", "nvml.cc"];
const HEADERS: [&str; 2] = ["standin.h", "numbers.h"];
const FLAGS: [&str; 6] = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-w"];
/// The names under which the loader, and the search for libraries, find it.
const NAMES: [&str; 5] = ["libcuda.so.1", "libnvrtc.so.12", "libcublasLt.so.12", "libnccl.so.2", "libnvidia-ml.so.1"];

/// The libraries, built.
#[derive(Clone, Debug)]
pub struct StandIn {
    libraries: PathBuf,
    folder: PathBuf,
}

impl StandIn {
    /// Builds them below `folder`, where they are found again by the hash of their sources, once in
    /// a process.
    ///
    /// # Errors
    /// There is no C++ compiler called `c++`, or what it says.
    pub fn new(folder: &Path) -> Result<StandIn, String> {
        static BUILT: OnceLock<Result<StandIn, String>> = OnceLock::new();
        BUILT.get_or_init(|| build(folder)).clone()
    }

    /// Variables for a program that is to find them: of the loader, where kernels and their cache
    /// go, and the folder `meetings` for its ranks.
    pub fn variables(&self, meetings: &Path) -> [(&'static str, OsString); 4] {
        [
            ("LD_LIBRARY_PATH", self.libraries.clone().into()),
            ("STANDIN_FOLDER", self.folder.clone().into()),
            ("STANDIN_MEETINGS", meetings.into()),
            ("TRAINYARD_CUDA_CACHE", self.libraries.join("cache").into()),
        ]
    }
}

fn build(folder: &Path) -> Result<StandIn, String> {
    let emulation = Path::new(env!("CARGO_MANIFEST_DIR")).join("emulation");
    let source = |name: &&str| emulation.join("standin").join(name);
    let say = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let mut texts = FLAGS.concat().into_bytes();
    for path in SOURCES.iter().chain(&HEADERS).map(source).chain([emulation.join("cuda.h")]) {
        texts.extend(std::fs::read(&path).map_err(|error| say(&path, error))?);
    }
    let libraries = folder.join(format!("stand-in-{:016x}", xxh3_64(&texts)));
    let done = StandIn { libraries: libraries.clone(), folder: folder.to_owned() };
    if libraries.exists() {
        return Ok(done);
    }
    // Other processes may be at the same: each makes a folder of its own, and the first to rename
    // its own stands.
    let own = folder.join(format!("stand-in-{}", std::process::id()));
    std::fs::create_dir_all(&own).map_err(|error| say(&own, error))?;
    let mut command = Command::new("c++");
    command.args(FLAGS).arg(format!("-DEMULATION=\"{}\"", emulation.display()));
    command.args(SOURCES.iter().map(source)).arg("-o").arg(own.join(NAMES[0]));
    let output = command.output().map_err(|error| format!("c++: {error} (on Debian: apt-get install g++)"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    for name in &NAMES[1..] {
        std::os::unix::fs::symlink(NAMES[0], own.join(name)).map_err(|error| say(&own, error))?;
    }
    if std::fs::rename(&own, &libraries).is_err() {
        std::fs::remove_dir_all(&own).map_err(|error| say(&own, error))?;
    }
    Ok(done)
}
