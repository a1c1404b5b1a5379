//! The strategies that the engine can run, among those that can be lowered.

use crate::Mesh;
use std::fmt;

/// The answer to whether a strategy can be run or only priced. `Display` gives it in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Runnable {
    /// The engine runs it.
    Yes,
    /// The lowering exists and the checker accepts it, but the engine lacks something.
    PricedOnly {
        /// The missing features, in words.
        lacks: Vec<String>,
    },
}

impl Runnable {
    /// True if the engine runs it.
    pub fn is_yes(&self) -> bool {
        *self == Runnable::Yes
    }
}

/// The answer for `mesh`: runnable, or the things that the engine lacks. A mesh that does not
/// divide the model, for example its heads, is refused by the model instead.
pub fn runnable(mesh: &Mesh) -> Runnable {
    // Experts are divided among replicas.
    if mesh.ep == 1 || mesh.experts_of_replicas() {
        return Runnable::Yes;
    }
    Runnable::PricedOnly { lacks: vec![format!("expert parallelism inside a shard group (degree {})", mesh.ep)] }
}

impl fmt::Display for Runnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Runnable::Yes => f.write_str("runnable"),
            Runnable::PricedOnly { lacks } => {
                write!(f, "priced, not runnable yet: the engine has no {}", lacks.join(", no "))
            }
        }
    }
}
