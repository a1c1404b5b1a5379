//! The kernels compiled by the host's C++ compiler against `emulation/cuda.h`, for a [`Fake`](crate::fake::Fake) that is to compute. Tests alone use this: a
//! kernel runs block by block, thread by thread, some thousand times slower than on a GPU.

use crate::fake::Kernels;
use crate::kernels::{Argument, File, Float, Launch};
use libloading::Library;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use xxhash_rust::xxh3::xxh3_64;

const FLAGS: [&str; 8] = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-w", "-x", "c++"];

/// Kernels as shared objects in a folder, compiled when they are first launched and found again by the hash of their sources.
pub struct Emulated {
    folder: PathBuf,
    compiler: String,
    modules: Mutex<BTreeMap<(File, Float), Arc<Library>>>,
}

impl Emulated {
    /// Keeps shared objects in `folder`. None when there is no C++ compiler (`$CXX`, `c++`, `g++`, `clang++`).
    pub fn new(folder: &Path) -> Option<Emulated> {
        let given = std::env::var("CXX").ok();
        let mut names = given.into_iter().chain(["c++", "g++", "clang++"].map(str::to_owned));
        let answers = |name: &String| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success());
        let compiler = names.find(answers)?;
        Some(Emulated { folder: folder.to_owned(), compiler, modules: Mutex::default() })
    }

    fn module(&self, file: File, float: Float) -> Result<Arc<Library>, String> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&(file, float)) {
            return Ok(Arc::clone(module));
        }
        let path = self.compiled(file, float)?;
        // SAFETY: what was compiled from this repository's sources has no initialisers beyond those of the C library.
        let library = unsafe { Library::new(&path) }.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Arc::clone(modules.entry((file, float)).or_insert(Arc::new(library))))
    }

    fn compiled(&self, file: File, float: Float) -> Result<PathBuf, String> {
        let emulation = Path::new(env!("CARGO_MANIFEST_DIR")).join("emulation");
        let read = |path: &Path| std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()));
        let header = read(&emulation.join("cuda.h"))?;
        let mut source = format!("#include \"cuda.h\"\n{}", file.source(float));
        for kernel in file.kernels() {
            source.push_str(&format!("EMULATION_LAUNCHER({})\n", kernel.name));
        }
        let hash = xxh3_64([source.as_bytes(), header.as_bytes(), FLAGS.concat().as_bytes()].concat().as_slice());
        let name = format!("{}-{}-{hash:016x}", file.name().trim_end_matches(".cu"), float.name());
        let library = self.folder.join(format!("{name}.so"));
        if library.exists() {
            return Ok(library);
        }
        let io = |error: std::io::Error| format!("{}: {error}", self.folder.display());
        std::fs::create_dir_all(&self.folder).map_err(io)?;
        // Another process may be at the same: each writes files of its own, and the last rename stands.
        let own = self.folder.join(format!("{name}.{}", std::process::id()));
        let (text, object) = (own.with_extension("cc"), own.with_extension("so"));
        std::fs::write(&text, source).map_err(io)?;
        let mut command = Command::new(&self.compiler);
        command.args(FLAGS).arg("-I").arg(&emulation).arg(&text).arg("-o").arg(&object);
        let output = command.output().map_err(io)?;
        if !output.status.success() {
            return Err(format!("{name}: {}", String::from_utf8_lossy(&output.stderr)));
        }
        std::fs::rename(&object, &library).map_err(io)?;
        std::fs::remove_file(&text).map_err(io)?;
        Ok(library)
    }
}

impl Kernels for Emulated {
    fn run(&self, file: File, float: Float, name: &str, launch: Launch, arguments: &[Argument]) -> Result<(), String> {
        let library = self.module(file, float)?;
        let mut addresses: Vec<_> = arguments.iter().map(Argument::address).collect();
        let symbol = format!("launch_{name}");
        // SAFETY: the launcher was generated for the kernel of this name, whose parameters the arguments fit: the device compared them with the table.
        // What they point to is the memory of the fake, whose extents it has checked.
        unsafe {
            type Launcher = unsafe extern "C" fn(*const u32, u32, u32, *mut *const std::ffi::c_void);
            let launcher = library.get::<Launcher>(symbol.as_bytes()).map_err(|error| error.to_string())?;
            launcher(launch.grid.as_ptr(), launch.block, launch.shared, addresses.as_mut_ptr());
        }
        Ok(())
    }
}
