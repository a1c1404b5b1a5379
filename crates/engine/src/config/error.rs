//! Problems of a configuration, each with the place where the value was written. All problems are
//! collected and shown together.

use serde::Serialize;
use std::fmt;
use std::path::PathBuf;

/// The place where a value was written.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub enum Origin {
    /// Nowhere: a default.
    Default,
    /// The preset of this name.
    Preset(String),
    /// A line of a file; lines count from 1.
    File {
        /// The file.
        path: PathBuf,
        /// The line.
        line: usize,
    },
    /// An argument of `--set`, as typed.
    Set(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::Preset(name) => write!(f, "preset {name}"),
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::Set(argument) => write!(f, "--set {argument}"),
        }
    }
}

/// One thing that is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// The place; `Origin::Default` when no single place is to blame.
    pub origin: Origin,
    /// One sentence: the problem and what to do about it.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::Default => f.write_str(&self.message),
            origin => write!(f, "{origin}: {}", self.message),
        }
    }
}

/// A configuration that cannot be used: every problem found, in the order found.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub struct ConfigError {
    /// At least one.
    pub problems: Vec<Problem>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.as_slice() {
            [one] => write!(f, "configuration: {one}"),
            many => {
                write!(f, "configuration: {} problems", many.len())?;
                many.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

/// Collects problems.
#[derive(Default, Debug)]
pub(super) struct Problems(pub Vec<Problem>);

impl Problems {
    pub fn add(&mut self, origin: Origin, message: impl Into<String>) {
        self.0.push(Problem { origin, message: message.into() });
    }

    pub fn into_result<T>(self, value: T) -> Result<T, ConfigError> {
        if self.0.is_empty() { Ok(value) } else { Err(ConfigError { problems: self.0 }) }
    }
}
