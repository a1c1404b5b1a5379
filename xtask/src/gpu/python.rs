//! Finds a Python with a PyTorch that has CUDA.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

use crate::bench::PYTHON_VARIABLE;

/// A Python whose PyTorch sees a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Python {
    pub path: PathBuf,
    /// Versions, from `torch.__version__` and `torch.version.cuda`.
    pub torch: String,
}

const ASKS: &str = "import sys, torch\nassert torch.cuda.is_available(), 'its PyTorch sees no GPU'\n\
                    print(sys.executable)\nprint(torch.__version__, 'with CUDA', torch.version.cuda)";

impl Python {
    /// Finds the Python of `TRAINYARD_PEERS_PYTHON`, else the `python3` on the path.
    ///
    /// # Errors
    /// The reason why there is none, in a few words.
    pub fn find() -> Result<Python, String> {
        let name = std::env::var_os(PYTHON_VARIABLE).unwrap_or_else(|| "python3".into());
        let said = Command::new(&name).args(["-c", ASKS]).output();
        let said = said.map_err(|error| format!("{}: {error}", name.to_string_lossy()))?;
        if said.status.success() {
            return parse(&String::from_utf8_lossy(&said.stdout)).ok_or_else(|| "it prints no version".to_owned());
        }
        let error = String::from_utf8_lossy(&said.stderr);
        Err(error.trim().lines().last().unwrap_or("it failed").to_owned())
    }

    /// The command of a script of `scripts/peers` with arguments.
    pub fn command(&self, root: &Path, script: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.path);
        command.arg(root.join("scripts/peers").join(script)).args(arguments).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }
}

fn parse(said: &str) -> Option<Python> {
    let mut lines = said.lines().map(str::trim).filter(|line| !line.is_empty());
    let (path, torch) = (lines.next()?, lines.next()?);
    Some(Python { path: path.into(), torch: torch.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_python_says_of_itself_is_read() {
        let python = parse("/opt/venv/bin/python3\n2.11.0+cu130 with CUDA 13.0\n").unwrap();
        assert_eq!(python.torch, "2.11.0+cu130 with CUDA 13.0");
        assert_eq!(python.path, Path::new("/opt/venv/bin/python3"));
        assert_eq!(parse("only one line\n"), None);
    }
}
