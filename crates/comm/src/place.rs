//! Where a rank runs and what it is doing: what reports name it by.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Where a rank runs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, Default)]
pub struct Place {
    /// Ranks with the same node share memory; nodes are numbered in the order of their first rank.
    pub node: u32,
    /// The device of the node that the rank computes on.
    pub device: u32,
    /// Host name.
    pub host: String,
    /// Process number on that host.
    pub pid: u32,
}

impl Place {
    /// This process: the host name that the kernel gives, node 0, `device`.
    pub fn here(device: u32) -> Self {
        Self { node: 0, device, host: host_name(), pid: std::process::id() }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host {}, process {}, node {}, device {}", self.host, self.pid, self.node, self.device)
    }
}

/// The kernel's host name, or `localhost` where it tells none.
fn host_name() -> String {
    let named = |text: String| Some(text.trim().to_owned()).filter(|name| !name.is_empty());
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .and_then(named)
        .or_else(|| std::env::var("HOSTNAME").ok().and_then(named))
        .unwrap_or_else(|| "localhost".to_owned())
}

/// A rank's position in its program, posted before it enters an operation so that others can name
/// it when it does not come.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, Default)]
pub struct Position {
    /// Training step.
    pub step: u64,
    /// Index of the instruction in the rank's program.
    pub instruction: u32,
    /// The instruction in words, e.g. `Reduce block 3`.
    pub what: String,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, instruction {} ({})", self.step, self.instruction, self.what)
    }
}
