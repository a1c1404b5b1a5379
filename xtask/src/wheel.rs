//! `cargo xtask wheel`: builds the wheel for Python, installs it into an empty environment, and
//! runs there the tests of the module and the code of docs/python.md.
//!
//! maturin from PyPI builds it. The tests in `crates/cli/tests/docs.rs` run the same code without a
//! wheel; here the program and the module are those that the wheel installed.

use crate::bench::{environment, target_folder};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::path::Path;
use std::process::Command;

/// Packages that build and test the wheel.
const PACKAGES: [&str; 1] = ["maturin>=1.7,<2"];
/// Names the Python that has maturin.
const PYTHON_VARIABLE: &str = "TRAINYARD_WHEEL_PYTHON";

/// Options of the chore.
#[derive(Args)]
pub struct Options {
    /// The profile of the program in the wheel.
    #[arg(long, default_value = "release")]
    profile: String,
}

/// Builds, installs and tests the wheel. True if all of it succeeded.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let target = target_folder(root);
    let maturin = match std::env::var_os(PYTHON_VARIABLE) {
        Some(python) => python.into(),
        None => environment(&target.join("wheel-venv"), &PACKAGES, PYTHON_VARIABLE)?,
    };
    let wheels = target.join("wheels");
    std::fs::remove_dir_all(&wheels).or_else(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })?;
    let mut build = Command::new(&maturin);
    build.args(["-m", "maturin", "build", "--profile", &options.profile, "--out"]).arg(&wheels);
    succeed(build.current_dir(root.join("python")))?;
    let wheel = std::fs::read_dir(&wheels)?.next().context("maturin wrote no wheel")??.path();
    println!("{}: {:.1} MB", wheel.display(), std::fs::metadata(&wheel)?.len() as f64 / 1e6);

    let home = wheels.join("environment");
    succeed(Command::new("python3").args(["-m", "venv"]).arg(&home))?;
    let python = home.join("bin/python");
    succeed(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--no-index"]).arg(&wheel))?;
    succeed(Command::new(home.join("bin/trainyard")).arg("--version"))?;
    let installed = |arguments: &[&str]| {
        let mut command = Command::new(&python);
        command.args(arguments).current_dir(&home).env_remove("PYTHONPATH").env_remove("TRAINYARD");
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command
    };
    succeed(installed(&["-m", "unittest", "discover", "-s"]).arg(root.join("python/tests")))?;
    let page = std::fs::read_to_string(root.join("docs/python.md"))?;
    let blocks = page.split("```python\n").skip(1).filter_map(|rest| rest.split("```").next());
    succeed(&mut installed(&["-c", &blocks.collect::<Vec<_>>().join("\n")]))?;
    println!("the wheel is installed into an empty environment, its tests pass, and docs/python.md runs");
    Ok(true)
}

fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed");
    }
    Ok(())
}
