//! `cargo xtask tidy`: checks the rules of the project that no compiler checks.
//!
//! Each rule is a function from the sources to complaints. A complaint names a file, a line and
//! what to do. A test runs the rules on this repository, and each rule has tests that show it
//! failing, because a rule that cannot fail protects nothing. There is no list of exceptions: a
//! rule that needs one is changed here, visible in review.

mod manifests;
mod prose;
mod sources;
mod texts;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::lexer;

/// A file of the repository.
pub struct Source {
    /// Relative to the root, with `/`.
    pub path: String,
    /// Its contents; empty if it is not text.
    pub text: String,
    /// For `.rs` files, the text divided by the lexer.
    pub lines: Vec<lexer::Line>,
}

impl Source {
    fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        let (path, text) = (path.into(), text.into());
        let lines = if path.ends_with(".rs") { lexer::lines(&text) } else { Vec::new() };
        Self { path, text, lines }
    }

    /// `crates/NAME/...` gives `NAME`.
    pub fn crate_name(&self) -> Option<&str> {
        self.path.strip_prefix("crates/")?.split('/').next()
    }
}

/// A violation: the fault, its place, and what to do.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Complaint {
    path: String,
    line: usize,
    what: String,
}

impl Complaint {
    /// `line` counts from 1; 0 means the whole file.
    pub fn new(source: &Source, line: usize, what: impl Into<String>) -> Self {
        Self { path: source.path.clone(), line, what: what.into() }
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.what),
            line => write!(f, "{}:{line}: {}", self.path, self.what),
        }
    }
}

/// Prints the complaints. Returns true if there are none.
pub fn run(root: &Path) -> Result<bool> {
    let sources = read_all(root)?;
    let complaints = check(&sources);
    for complaint in &complaints {
        println!("{complaint}");
    }
    println!("tidy: {} files, {} complaints", sources.len(), complaints.len());
    Ok(complaints.is_empty())
}

fn check(sources: &[Source]) -> Vec<Complaint> {
    let rules = [sources::check, manifests::check, texts::check, prose::check];
    let mut complaints: Vec<Complaint> = rules.iter().flat_map(|rule| rule(sources)).collect();
    complaints.sort();
    complaints
}

/// Folders at the root that hold the results of building and running, as in `.gitignore`.
const NOT_SOURCES: [&str; 3] = ["target", "runs", "data"];
/// Folders of inputs that fuzzing leaves behind.
const FUZZING: [&str; 3] = ["fuzz/corpus", "fuzz/artifacts", "fuzz/coverage"];
/// Hidden folders that hold sources.
const HIDDEN_SOURCES: [&str; 3] = [".ci", ".cargo", ".github"];
/// Extensions of files that the rules read. Files without one (licences, `.ci/run`) are read as
/// well. Of other files only the path is known, so that links to them resolve.
const TEXT: [&str; 14] =
    ["rs", "toml", "md", "py", "sh", "txt", "json", "yml", "yaml", "html", "css", "js", "lock", "cu"];

/// Every file below `root`, in the order of the paths.
fn read_all(root: &Path) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    let mut folders: Vec<PathBuf> = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let at_root = folder == root;
            if entry.file_type()?.is_dir() {
                let hidden = name.starts_with('.') && !HIDDEN_SOURCES.contains(&name.as_ref());
                let fuzzing = FUZZING.iter().any(|folder| entry.path() == root.join(folder));
                let left_behind = name == "target" || fuzzing || at_root && NOT_SOURCES.contains(&name.as_ref());
                if !hidden && !left_behind {
                    folders.push(entry.path());
                }
                continue;
            }
            let path = entry.path();
            let extension = path.extension().map(|e| e.to_string_lossy().into_owned());
            if name == ".git" {
                continue;
            }
            let text = if extension.is_none_or(|e| TEXT.contains(&e.as_str())) {
                let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
                // A test's bad input may not be UTF-8, and has nothing for the rules.
                String::from_utf8(bytes).unwrap_or_default()
            } else {
                String::new()
            };
            let relative = path.strip_prefix(root).expect("found below it").to_string_lossy().replace('\\', "/");
            sources.push(Source::new(relative, text));
        }
    }
    if sources.is_empty() {
        bail!("no source below {}", root.display());
    }
    sources.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(sources)
}

/// Runs one rule on made-up files and compares the complaints, `path:line: first words`.
#[cfg(test)]
fn expect(rule: fn(&[Source]) -> Vec<Complaint>, files: &[(&str, &str)], expected: &[&str]) {
    let sources: Vec<Source> = files.iter().map(|(path, text)| Source::new(*path, *text)).collect();
    let mut complaints = rule(&sources);
    complaints.sort();
    let got: Vec<String> = complaints.iter().map(Complaint::to_string).collect();
    assert_eq!(got.len(), expected.len(), "{got:#?}");
    for (got, expected) in got.iter().zip(expected) {
        assert!(got.starts_with(expected), "{got:?} does not start with {expected:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_repository_is_tidy() {
        let complaints = check(&read_all(&crate::workspace_root()).unwrap());
        let list: Vec<String> = complaints.iter().map(Complaint::to_string).collect();
        assert!(list.is_empty(), "{}", list.join("\n"));
    }

    #[test]
    fn what_building_leaves_behind_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        for path in [
            "a.rs",
            "target/b.rs",
            "runs/c.rs",
            ".git/d.rs",
            "fuzz/corpus/e",
            ".ci/run",
            "crates/x/src/data/e.rs",
            "f.png",
        ] {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "//! Text.\n").unwrap();
        }
        let paths: Vec<String> = read_all(folder.path()).unwrap().into_iter().map(|s| s.path).collect();
        assert_eq!(paths, [".ci/run", "a.rs", "crates/x/src/data/e.rs", "f.png"]);
    }
}
