//! The kernels compiled by the host's C++ compiler against `emulation/cuda.h`, for a
//! [`Fake`](crate::fake::Fake) that should compute. Only tests use this: a kernel runs block by
//! block and thread by thread, about a thousand times slower than on a GPU.

use crate::fake::Kernels;
use crate::kernels::{Argument, File, Float, Launch};
use libloading::Library;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use trainyard_base::lock;
use xxhash_rust::xxh3::xxh3_64;

const FLAGS: [&str; 8] = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-w", "-x", "c++"];

/// A module, once it is loaded: threads that ask for the same one wait for the first, others
/// compile beside it.
type Slot = Arc<Mutex<Option<Arc<Library>>>>;

/// Kernels as shared objects in a folder, compiled when they are first launched and found again by
/// the hash of their sources.
pub struct Emulated {
    folder: PathBuf,
    compiler: String,
    modules: Mutex<BTreeMap<(File, Float), Slot>>,
}

impl Emulated {
    /// Keeps shared objects in `folder`. None when there is no C++ compiler (`$CXX`, `c++`, `g++`,
    /// `clang++`).
    pub fn new(folder: &Path) -> Option<Emulated> {
        let given = std::env::var("CXX").ok();
        let mut names = given.into_iter().chain(["c++", "g++", "clang++"].map(str::to_owned));
        let answers = |name: &String| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success());
        let compiler = names.find(answers)?;
        Some(Emulated { folder: folder.to_owned(), compiler, modules: Mutex::default() })
    }

    /// The module of `file` for `float`, compiled when it is first asked for.
    ///
    /// # Errors
    /// The message of the compiler or the loader.
    pub fn module(&self, file: File, float: Float) -> Result<Arc<Library>, String> {
        let slot = lock(&self.modules).entry((file, float)).or_default().clone();
        let mut slot = lock(&slot);
        if let Some(module) = &*slot {
            return Ok(Arc::clone(module));
        }
        let name = format!("{}-{}", file.name().trim_end_matches(".cu"), float.name());
        let kernels: Vec<&str> = file.kernels().map(|kernel| kernel.name).collect();
        let module = Arc::new(self.load(&name, &file.source(float), &kernels)?);
        Ok(Arc::clone(slot.insert(module)))
    }

    /// Compiles and loads any source, with launchers for these of its kernels.
    ///
    /// # Errors
    /// As [`Emulated::module`].
    pub fn load(&self, name: &str, text: &str, kernels: &[&str]) -> Result<Library, String> {
        let path = self.compiled(name, text, kernels)?;
        // SAFETY: what was compiled from this repository's sources has no initialisers beyond those
        // of the C library.
        unsafe { Library::new(&path) }.map_err(|error| format!("{}: {error}", path.display()))
    }

    fn compiled(&self, name: &str, text: &str, kernels: &[&str]) -> Result<PathBuf, String> {
        let emulation = Path::new(env!("CARGO_MANIFEST_DIR")).join("emulation");
        let header = emulation.join("cuda.h");
        let header = std::fs::read_to_string(&header).map_err(|error| format!("{}: {error}", header.display()))?;
        let mut source = format!("#include \"cuda.h\"\n{text}\n");
        for kernel in kernels {
            source.push_str(&format!("EMULATION_LAUNCHER({kernel})\n"));
        }
        let made_of = [&source, &header, &self.compiler, &FLAGS.concat()].map(|part| part.as_bytes()).concat();
        let name = format!("{name}-{:016x}", xxh3_64(&made_of));
        let library = self.folder.join(format!("{name}.so"));
        if library.exists() {
            return Ok(library);
        }
        let io = |error: std::io::Error| format!("{}: {error}", self.folder.display());
        std::fs::create_dir_all(&self.folder).map_err(io)?;
        // Others may be at the same, in this process or another: each writes files of its own, and
        // the last rename stands.
        static COMPILED: AtomicU32 = AtomicU32::new(0);
        let number = COMPILED.fetch_add(1, Ordering::Relaxed);
        let own = self.folder.join(format!("{name}-{}-{number}", std::process::id()));
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

thread_local! {
    static FALLING: Cell<bool> = const { Cell::new(false) };
}

/// Sets the order in which kernels of this host thread run the threads of a block: falling if true,
/// rising (the default) if false.
pub fn set_falling(falling: bool) {
    FALLING.set(falling);
}

/// Runs a kernel of a loaded module.
///
/// # Errors
/// The module has no launcher of this kernel.
///
/// # Safety
/// The arguments must be those of the kernel, and what they point to as large as it takes it to be.
pub unsafe fn launch(library: &Library, kernel: &str, size: Launch, arguments: &[Argument]) -> Result<(), String> {
    type Order = extern "C" fn(i32);
    type Launcher = unsafe extern "C" fn(*const u32, u32, u32, *mut *const std::ffi::c_void);
    let mut addresses: Vec<_> = arguments.iter().map(Argument::address).collect();
    let symbol = format!("launch_{kernel}");
    // SAFETY: every module has the header's `emulation_order`; the launcher was generated for the
    // kernel of this name; the rest is the caller's promise.
    unsafe {
        let order = library.get::<Order>(b"emulation_order").map_err(|error| error.to_string())?;
        order(i32::from(FALLING.get()));
        let launcher = library.get::<Launcher>(symbol.as_bytes()).map_err(|error| error.to_string())?;
        launcher(size.grid.as_ptr(), size.block, size.shared, addresses.as_mut_ptr());
    }
    Ok(())
}

impl Kernels for &'static Emulated {
    fn run(&self, file: File, float: Float, name: &str, size: Launch, arguments: &[Argument]) -> Result<(), String> {
        let library = self.module(file, float)?;
        // SAFETY: the device compared the arguments with the table's parameters. What they point to
        // is the memory of the fake, whose extents it has checked.
        unsafe { launch(&library, name, size, arguments) }
    }
}
