//! The rows of experts on their way between the ranks that share them. On processors a thread
//! beside the compute lane carries them, and the forward or backward that needs them waits for
//! them. On GPUs they travel on the compute lane: by NCCL, or through host memory.

use crate::links::Link;
use crate::state::{does_not_fit, lock};
use crate::{EngineError, Result};
use std::fmt;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trainyard_autograd::AutogradError;
use trainyard_autograd::functions::{InFlight, RowExchange};
use trainyard_comm::Position;
use trainyard_tensor::Tensor;

/// The ranks that share the experts of every layer, seen from one of them.
pub(crate) struct ExpertExchange {
    link: Link,
    state: Arc<Mutex<State>>,
    /// The thread that carries rows of processors. None before the first.
    carrier: Mutex<Option<Sender<Exchange>>>,
}

/// An exchange of rows, for the thread that carries them.
type Exchange = Box<dyn FnOnce() + Send>;

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
    /// Time of waiting for exchanges, in which this rank computed nothing.
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
        ExpertExchange { link, state: Arc::default(), carrier: Mutex::default() }
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

    /// Hands an exchange to the thread that carries rows.
    fn carry(&self, exchange: Exchange) -> Result<()> {
        let mut carrier = lock(&self.carrier);
        if carrier.is_none() {
            let (sender, exchanges) = channel::<Exchange>();
            let carry = move || exchanges.iter().for_each(|exchange| exchange());
            let spawned = std::thread::Builder::new().name("experts' rows".to_owned()).spawn(carry);
            spawned.map_err(|error| does_not_fit(format!("no thread for the rows of experts: {error}")))?;
            *carrier = Some(sender);
        }
        let ended = || does_not_fit("the thread that carries the rows of experts has ended");
        carrier.as_ref().ok_or_else(ended)?.send(exchange).map_err(|_| ended())
    }
}

/// Waits for `done`, and keeps the time and the failure.
fn wait<T>(state: &Mutex<State>, done: impl FnOnce() -> Result<T>) -> Result<T, AutogradError> {
    let began = Instant::now();
    let done = done();
    let mut state = lock(state);
    state.traffic.time += began.elapsed();
    done.map_err(|error| {
        let words = error.to_string();
        state.failure = Some(error);
        AutogradError::Exchange(words)
    })
}

impl RowExchange for ExpertExchange {
    fn ranks(&self) -> usize {
        self.link.size()
    }

    fn counts(&self, own: &[i32]) -> Result<Vec<i32>, AutogradError> {
        wait(&self.state, || self.link.all_to_all_numbers(own))
    }

    fn rows(&self, from: &Tensor, sends: &[usize], to: &Tensor, receives: &[usize]) -> Result<InFlight, AutogradError> {
        let stays = sends.get(self.link.index()).copied().unwrap_or(0);
        let row = from.last_dim() * from.dtype().size();
        lock(&self.state).traffic.sent_bytes += ((sends.iter().sum::<usize>() - stays) * row) as u64;
        let on_gpu = from.device().as_cuda().is_some();
        let (link, from, to) = (self.link.clone(), from.clone(), to.clone());
        let (sends, receives) = (sends.to_vec(), receives.to_vec());
        // It is called once, and drops the tensors when it ends.
        let exchange = move || {
            let mut to = to;
            link.all_to_all_rows(&from, &sends, &mut to, &receives)
        };
        if on_gpu {
            // The stream that made the rows sends them.
            wait(&self.state, exchange)?;
            return Ok(Box::new(|| Ok(())));
        }
        let (done, landed) = sync_channel(1);
        // The exchange, and with it the tensors, is gone when the result is there.
        let carried = move || drop(done.send(exchange()));
        wait(&self.state, || self.carry(Box::new(carried)))?;
        let state = Arc::clone(&self.state);
        Ok(Box::new(move || {
            let ended = || does_not_fit("the exchange of experts' rows ended without a result");
            wait(&state, || landed.recv().map_err(|_| ended())?)
        }))
    }
}
