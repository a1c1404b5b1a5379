//! Predicts the cost of a step before it runs.
//!
//! The simulator reads the programs that the engine runs; there is no second estimator. A
//! [`Program`](trainyard_program::Program) says which instructions run in which order. [`Costs`]
//! give the seconds of each instruction: from the kernels of its unit ([`transformer`]) and a
//! hardware profile ([`Profiles`], [`Cluster`]), through efficiency curves ([`kernel`]) and the
//! costs of collectives ([`collective`]). [`simulate`] plays the programs of those ranks that
//! differ against each other, with lanes, dependencies, messages, interference, and memory over
//! time.
//!
//! Facts lie in `data/`, each with its source. The few fitted [`Constants`] are the same for every
//! model, device and source.

#![forbid(unsafe_code)]

mod cluster;
pub mod collective;
mod constants;
mod costs;
mod encoding;
mod equal;
pub mod errors;
pub mod host;
mod interval;
pub mod kernel;
pub mod machine;
pub mod measurement;
mod models;
mod network;
mod own;
mod predict;
mod profile;
pub mod replay;
mod segments;
mod simulate;
mod stack;
pub mod transformer;
pub mod validate;

pub use cluster::{Cluster, ClusterError, Placed, usual_network};
pub use constants::{AttentionKind, Constants};
pub use costs::{Costs, UnitCost};
pub use equal::{equal_times, paced_times};
pub use errors::{ClassErrors, Correction, Errors};
pub use interval::{COVERAGE, Interval};
pub use machine::{MachineError, MachineProfile, ProfileKind, load_local_profile, local_profile_path};
pub use models::{model, models, usual_name};
pub use network::{NetworkError, NetworkLink};
pub use own::OwnModel;
pub use predict::{Lowered, PredictError, Prediction, predict};
pub use profile::{Device, Format, Generation, Network, ProfileError, Profiles};
pub use simulate::{MemoryUse, RankTime, SimulateError, Simulated, Span, memory, simulate, waiting};
pub use stack::{Bundle, Dispatch, Partition, Selective, Stack};
