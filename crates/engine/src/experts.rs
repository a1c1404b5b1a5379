//! The rows of experts on their way between the ranks that share them. They travel on the compute
//! lane, inside the forward or backward that waits for them: through host memory, or by NCCL from
//! GPU to GPU.

use crate::links::Link;
use crate::state::lock;
use crate::{EngineError, Result};
use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use trainyard_autograd::AutogradError;
use trainyard_autograd::functions::RowExchange;
use trainyard_comm::Position;
use trainyard_tensor::Tensor;

/// The ranks that share the experts of every layer, seen from one of them.
pub(crate) struct ExpertExchange {
    link: Link,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The failure of an exchange, for whoever ran the pass.
    failure: Option<EngineError>,
    traffic: Traffic,
}

/// The traffic of a rank with the ranks that have other experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// Bytes of rows sent to other ranks.
    pub sent_bytes: u64,
    /// Time in exchanges, in which this rank computed nothing.
    pub time: Duration,
}

impl fmt::Debug for ExpertExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExpertExchange({} of {})", self.link.index(), self.link.size())
    }
}

impl ExpertExchange {
    /// The exchange over `link`.
    pub fn new(link: Link) -> ExpertExchange {
        ExpertExchange { link, state: Mutex::default() }
    }

    /// Posts the pass that is about to run, for the other ranks. Counts of rows go through host
    /// memory even where rows do not.
    pub fn post(&self, position: &Position) {
        self.link.post(position);
        self.link.post_on_host(position);
    }

    /// Ends a step: what follows belongs to none of its instructions.
    pub fn forget(&self) {
        self.link.forget();
    }

    /// The traffic since this was last called.
    pub fn take_traffic(&self) -> Traffic {
        std::mem::take(&mut lock(&self.state).traffic)
    }

    /// The failure of an exchange, in the place of the error that it became on a tape.
    pub fn failed(&self, error: EngineError) -> EngineError {
        lock(&self.state).failure.take().unwrap_or(error)
    }

    /// Runs an exchange, which sends `bytes` to others.
    fn run<T>(&self, bytes: usize, exchange: impl FnOnce(&Link) -> Result<T>) -> Result<T, AutogradError> {
        let began = Instant::now();
        let done = exchange(&self.link);
        let mut state = lock(&self.state);
        state.traffic.time += began.elapsed();
        state.traffic.sent_bytes += bytes as u64;
        done.map_err(|error| {
            let words = error.to_string();
            state.failure = Some(error);
            AutogradError::Exchange(words)
        })
    }
}

impl RowExchange for ExpertExchange {
    fn ranks(&self) -> usize {
        self.link.size()
    }

    fn counts(&self, own: &[i32]) -> Result<Vec<i32>, AutogradError> {
        self.run(0, |link| link.all_to_all_numbers(own))
    }

    fn rows(&self, from: &Tensor, sends: &[usize], to: &mut Tensor, receives: &[usize]) -> Result<(), AutogradError> {
        let stays = sends.get(self.link.index()).copied().unwrap_or(0);
        let row = from.last_dim() * from.dtype().size();
        let bytes = (sends.iter().sum::<usize>() - stays) * row;
        self.run(bytes, |link| link.all_to_all_rows(from, sends, to, receives))
    }
}
