//! Searches over settings: which trial to run next, and which to stop.
//!
//! A [`Study`] is asked for the next action ([`Study::next`]) and told what happened
//! ([`Study::apply`]). It runs nothing itself and reads no clock. Its state is a list of events,
//! and the next action is a function of that state and the seed alone. A study that is killed and
//! read again from its [`Journal`] therefore makes the same trials as one that was not, as long as
//! one trial runs at a time. With several, their order of finishing counts too.
//!
//! | part | does |
//! |---|---|
//! | [`Space`] | the keys to search over, and the set of values of each |
//! | [`samplers`] | choose the settings of a new trial from the results so far |
//! | [`Study`] | decides between a new trial, going on with one, and the end |
//! | [`Journal`] | the events of a study in a file |
//! | [`NoiseScale`] | how large a batch still pays, from norms of gradients |
//! | [`Branches`] | the same from training with several batches to one loss |
//!
//! Early stopping is asynchronous successive halving (ASHA; Li et al., "A system for massively
//! parallel hyperparameter tuning", MLSys 2020): a trial pauses at each rung, and only the best of
//! those that reached it go on. Population-based training is that of Jaderberg et al., 2017.

mod branches;
mod descent;
mod halving;
mod journal;
mod noise;
mod normal;
mod population;
mod random;
pub mod samplers;
mod space;
mod study;

pub use branches::{Branch, Branches};
pub use journal::{Journal, JournalError};
pub use noise::{NoiseScale, Norms};
pub use random::Stream;
pub use samplers::Sampler;
pub use space::{Dimension, Domain, Point, Space, SpaceError};
pub use study::{End, Event, Next, Search, Settings, SettingsError, Study, Trial};
