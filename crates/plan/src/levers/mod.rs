//! The levers: everything that can be done to train a model in less time or memory, each priced for
//! one configuration on one machine or cluster.
//!
//! A [`Lever`] is a row of [`table::LEVERS`]: its name, the setups that it offers, and what it
//! costs in quality. A [`Setup`] is priced by a [`Bench`], which makes its program and simulates
//! it, as the planner does. A lever that is more than another layout is an [`Edit`] of the program:
//! messages, memory and kernels change, and the simulation is the same. A lever without a price has
//! a reason instead.
//!
//! [`advise`] prices the table. The commands of the cli show it.

mod advice;
pub(crate) mod bars;
mod bottleneck;
mod cluster;
mod edit;
mod options;
mod report;
mod setup;
pub mod table;

pub use advice::{Advice, Combination, Outcome, Row, advise};
pub use cluster::ClusterBench;
pub use edit::{Code, Edit, is_exchange, local_steps};
pub use report::{Heading, json, quoted, text};
pub use setup::{Optimizer, Place, ReduceFormat, Setup, Switch};

use crate::Breakdown;

/// A way to use scarce compute better.
#[derive(Clone, Copy)]
pub struct Lever {
    /// The name, in the field's words.
    pub name: &'static str,
    /// The setups that it offers beside the present one.
    pub offers: fn(&Setup, &Place) -> Offers,
    /// True if training gives the same result, up to the order of sums.
    pub is_exact: bool,
    /// The price in quality.
    pub quality: &'static str,
    /// The source of that statement.
    pub source: &'static str,
}

/// The offer of a lever.
#[derive(Clone, PartialEq, Debug)]
pub enum Offers {
    /// Setups to price.
    Choices(Vec<Choice>),
    /// The lever is in use already, and how.
    InUse(&'static str),
    /// The lever has no use here, and the reason.
    NoUse(&'static str),
    /// The lever has no price, and the reason.
    NotPriced(&'static str),
}

/// A setup that a lever offers.
#[derive(Clone, PartialEq, Debug)]
pub struct Choice {
    /// The change in words.
    pub words: String,
    /// The setup with it.
    pub setup: Setup,
}

/// The price of a setup.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Price {
    /// Seconds of a step.
    pub step_s: f64,
    /// Peak bytes of the fullest device.
    pub bytes: u64,
    /// Bytes of a device that may be used, if there is a limit.
    pub bytes_max: Option<u64>,
    /// The parts of the step's time.
    pub breakdown: Breakdown,
    /// Remarks on the price, e.g. kernels that the profile does not have.
    pub remarks: Vec<String>,
}

impl Price {
    /// True if the step fits in memory.
    pub fn fits(&self) -> bool {
        self.bytes_max.is_none_or(|most| self.bytes <= most)
    }
}

/// Prices setups on one machine or cluster.
pub trait Bench {
    /// The price of `setup`.
    ///
    /// # Errors
    ///
    /// The reason, in words, why it cannot be run or priced.
    fn price(&self, setup: &Setup) -> Result<Price, String>;

    /// True if the engine runs `setup`.
    fn runs(&self, setup: &Setup) -> bool;
}
