//! Hosts that come and go while a run lasts.
//!
//! One host keeps the roster ([`Meeting`]). Every host, the keeper too, is a [`Member`]: it
//! connects to the meeting, starts the ranks that it is told to, and reports how they ended. The
//! decisions are those of a state machine without sockets, threads or clocks ([`Roster`]).
//!
//! Ranks live for one *generation*: a set of hosts, numbered in the order in which they came. When
//! a host comes or leaves, all ranks stop with a checkpoint and the next generation goes on from
//! it. When a host dies, the others go on from the newest checkpoint that there is.

mod meeting;
mod member;
mod roster;

pub use meeting::{Keeper, Meeting};
pub use member::{Heard, Member};
pub use roster::{Limits, Order, Outcome, Report, Roster, Start};

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The interval at which both ends of a connection say that they live.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// A host of which nothing is heard for this time is lost.
pub(super) const SILENCE: Duration = Duration::from_secs(10);

/// A host as it introduces itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostCard {
    /// The program's version, which is the same on all hosts.
    pub version: String,
    /// The host's name.
    pub host: String,
    /// The process that starts the ranks.
    pub pid: u32,
    /// Ranks that it starts.
    pub ranks: u32,
    /// The folder of the run, if it has taken part in it under an earlier keeper.
    pub run: Option<String>,
}
