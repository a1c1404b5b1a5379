//! The peer: PyTorch in its own Python environment, with the allocator that makes it fastest.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

pub const PYTHON_VARIABLE: &str = "TRAINYARD_PEERS_PYTHON";
const PACKAGES: [&str; 4] = ["torch", "numpy", "transformers", "torchvision"];
/// Folders in which distributions put gperftools' allocator.
const ALLOCATOR_FOLDERS: [&str; 5] =
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib"];
const ALLOCATORS: [&str; 2] = ["libtcmalloc.so.4", "libtcmalloc_minimal.so.4"];

/// A Python that has the peer's packages.
pub struct Peers {
    python: PathBuf,
    scripts: PathBuf,
    allocator: Option<PathBuf>,
}

impl Peers {
    /// `TRAINYARD_PEERS_PYTHON` when it is set, else an environment in `target/peers-venv`, which
    /// is made on first use.
    pub fn find(root: &Path, target: &Path) -> Result<Self> {
        let python = match std::env::var_os(PYTHON_VARIABLE) {
            Some(python) => PathBuf::from(python),
            None => environment(&target.join("peers-venv"), &PACKAGES, PYTHON_VARIABLE)?,
        };
        let allocator = ALLOCATORS
            .iter()
            .flat_map(|name| ALLOCATOR_FOLDERS.map(|folder| Path::new(folder).join(name)))
            .find(|p| p.exists());
        match &allocator {
            Some(path) => println!("peer: {} with {}", python.display(), path.display()),
            None => println!(
                "peer: {} WITHOUT tcmalloc, which makes it up to 1.5 times faster: install libgoogle-perftools4 for a fair comparison",
                python.display()
            ),
        }
        Ok(Self { python, scripts: root.join("scripts/peers"), allocator })
    }

    /// The command of `script` in `scripts/peers` with `arguments`.
    pub fn command(&self, script: &str, arguments: &[String]) -> Command {
        let mut command = Command::new(&self.python);
        command.arg(self.scripts.join(script)).args(arguments).env("PYTHONDONTWRITEBYTECODE", "1");
        if let Some(allocator) = &self.allocator {
            command.env("LD_PRELOAD", allocator);
        }
        command
    }

    /// The allocator, for the record.
    pub fn allocator(&self) -> String {
        self.allocator.as_ref().map_or("system".into(), |path| path.display().to_string())
    }
}

/// The Python of a virtual environment in `folder`, which is created with `packages` if missing.
/// `choice` is the variable or the option by which a user names another Python.
pub fn environment(folder: &Path, packages: &[&str], choice: &str) -> Result<PathBuf> {
    let python = folder.join("bin/python");
    // Written last, so that an interrupted installation is repeated.
    let complete = folder.join("complete");
    if complete.exists() {
        return Ok(python);
    }
    let packages_in_words = packages.join(", ");
    println!("installing {packages_in_words} into {} ({choice} names another Python)", folder.display());
    let hint = format!("name by {choice} a Python that has {packages_in_words}");
    step(Command::new("python3").args(["-m", "venv"]).arg(folder), &hint)?;
    step(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(packages), &hint)?;
    std::fs::write(&complete, "").with_context(|| format!("cannot write {}", complete.display()))?;
    Ok(python)
}

fn step(command: &mut Command, hint: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed; {hint}");
    }
    Ok(())
}
