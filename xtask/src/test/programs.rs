//! The test programs of the workspace: built by cargo, listed test by test.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A test program that cargo built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The options with which `cargo test` runs it alone: `-p trainyard-engine --test faults`.
    pub name: String,
    /// The executable.
    pub path: PathBuf,
    /// The folder of its package, where its tests run.
    pub folder: PathBuf,
}

/// Builds every test of the workspace with `features`; None when that fails, which cargo has said.
pub fn build(cargo: &mut Command, features: &[&str]) -> Result<Option<Vec<Program>>> {
    cargo.args(["--workspace", "--locked", "--no-run", "--quiet", "--message-format=json-render-diagnostics"]);
    if !features.is_empty() {
        cargo.arg("--features").arg(features.join(","));
    }
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot run cargo test")?;
    if !output.status.success() {
        return Ok(None);
    }
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut programs: Vec<Program> = lines.lines().filter_map(program).collect();
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    if programs.is_empty() {
        bail!("cargo built no test");
    }
    Ok(Some(programs))
}

/// The test program of one line of cargo's messages.
fn program(line: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(line).ok()?;
    let path = message["executable"].as_str()?;
    if message["profile"]["test"] != Value::Bool(true) {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    // `path+file:///crates/engine#trainyard-engine@0.1.0`, or `path+file:///xtask#0.1.0`.
    let (place, version) = message["package_id"].as_str()?.rsplit_once('#')?;
    let package = version.split_once('@').map_or_else(|| place.rsplit('/').next(), |(name, _)| Some(name))?;
    let target = message["target"]["name"].as_str()?;
    let kind = match message["target"]["kind"][0].as_str()? {
        "test" => format!(" --test {target}"),
        "bin" => format!(" --bin {target}"),
        "example" => format!(" --example {target}"),
        "bench" => format!(" --bench {target}"),
        _ => " --lib".to_owned(),
    };
    Some(Program { name: format!("-p {package}{kind}"), path: path.into(), folder: folder.into() })
}

impl Program {
    /// Its tests by name, ignored ones too.
    pub fn tests(&self) -> Result<Vec<String>> {
        let mut command = Command::new(&self.path);
        let output = command.args(["--list", "--format", "terse"]).current_dir(&self.folder).output();
        let output = output.with_context(|| format!("cannot run {}", self.path.display()))?;
        if !output.status.success() {
            bail!("{} cannot list its tests:\n{}", self.name, String::from_utf8_lossy(&output.stderr));
        }
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_cargo_name_test_programs() {
        let line = |id: &str, kind: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"{id}","manifest_path":"/w/crates/engine/Cargo.toml",
                "target":{{"kind":["{kind}"],"name":"faults"}},"profile":{{"test":{test}}},"executable":"/t/faults-1"}}"#
            )
        };
        let id = "path+file:///w/crates/engine#trainyard-engine@0.1.0";
        let found = program(&line(id, "test", true)).unwrap();
        let expected = Program {
            name: "-p trainyard-engine --test faults".into(),
            path: "/t/faults-1".into(),
            folder: "/w/crates/engine".into(),
        };
        assert_eq!(found, expected);
        assert_eq!(program(&line("path+file:///w/xtask#0.1.0", "bin", true)).unwrap().name, "-p xtask --bin faults");
        assert_eq!(program(&line(id, "bin", false)), None);
        assert_eq!(program(r#"{"reason":"build-finished","success":true}"#), None);
    }
}
