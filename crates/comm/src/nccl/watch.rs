//! The thread that watches what is under way on a rank's device.

use super::{backend, trouble};
use crate::backend::Operation;
use crate::communicator::Communicator;
use crate::error::{CommError, ErrorKind, Result};
use crate::place::Position;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
pub(super) use trainyard_base::lock;
use trainyard_cuda::driver::{Driver, Event};
use trainyard_cuda::nccl::{Comm, Nccl, State};

/// The pause between two looks of a thread that waits for NCCL itself.
const SLICE: Duration = Duration::from_micros(200);
/// The time in which ranks that are asked for their positions have to answer.
const ANSWER: Duration = Duration::from_millis(300);

/// One communicator of NCCL on this rank.
pub(super) struct Member {
    pub host: Communicator,
    /// None once it was given back.
    comm: Mutex<Option<Comm>>,
    /// The position that the next exchanges are posted with.
    pub position: Mutex<Option<Position>>,
    /// Exchanges so far.
    pub count: Mutex<u64>,
}

/// An exchange under way.
pub(super) struct Flight {
    pub member: Arc<Member>,
    pub operation: Operation,
    pub number: u64,
    pub position: Option<Position>,
    /// Before it and after it on its stream.
    pub begun: Event,
    pub ended: Event,
    /// When the device was seen to have begun.
    pub since: Option<Instant>,
}

impl Member {
    pub fn new(host: Communicator, comm: Comm) -> Member {
        Member { host, comm: Mutex::new(Some(comm)), position: Mutex::default(), count: Mutex::new(0) }
    }

    /// Calls NCCL, unless the communicator was given back; then the world's failure is why.
    pub fn call<T>(&self, call: impl FnOnce(Comm) -> trainyard_cuda::Result<T>) -> Result<T> {
        let comm = lock(&self.comm);
        match *comm {
            Some(comm) => call(comm).map_err(|error| self.host.accuse(backend(error.to_string()), &[], None)),
            None => Err(self.gone()),
        }
    }

    fn gone(&self) -> CommError {
        let what = || self.host.accuse(backend("NCCL's communicator was given back".to_owned()), &[], None);
        self.host.failure().unwrap_or_else(what)
    }

    /// Waits until NCCL has done what it was asked for, for the deadline at most: it connects ranks
    /// when they first exchange something.
    pub fn settle(&self, nccl: &dyn Nccl, at: Option<(Operation, u64)>) -> Result<()> {
        let start = Instant::now();
        let mut posted = at.is_none();
        loop {
            match self.call(|comm| nccl.state(comm))? {
                State::Ready => return Ok(()),
                State::Failed(what) => return Err(self.host.accuse(backend(what), &[], at)),
                State::Busy => {}
            }
            if !std::mem::replace(&mut posted, true)
                && let Some(position) = lock(&self.position).clone()
            {
                self.host.post(position);
            }
            if let Some(failure) = self.host.failure().or_else(|| self.host.bury(at)) {
                return Err(failure);
            }
            let waited = self.host.deadline();
            if start.elapsed() > waited {
                let position = lock(&self.position).clone();
                return Err(self.overdue(waited, position.as_ref(), at));
            }
            std::thread::sleep(SLICE);
        }
    }

    /// The failure of an exchange that has not ended in time.
    pub fn overdue(&self, waited: Duration, at: Option<&Position>, operation: Option<(Operation, u64)>) -> CommError {
        let late = self.late(at);
        if late.is_empty() {
            let what = format!(
                "no end within {:.1} s although every rank has come to it: NCCL or what it runs over is stuck; \
                 NCCL_DEBUG=INFO says more",
                waited.as_secs_f64()
            );
            return self.host.accuse(backend(what), &[], operation);
        }
        self.host.accuse(ErrorKind::Deadline { waited }, &late, operation)
    }

    /// Members that are not known to have come to a position; without one, all others.
    fn late(&self, at: Option<&Position>) -> Vec<usize> {
        let others: Vec<usize> = (0..self.host.size()).filter(|member| *member != self.host.rank()).collect();
        let has_come = |member: &usize| {
            let its = self.host.position(*member).map(|(its, _)| (its.step, its.instruction));
            at.is_some_and(|at| its >= Some((at.step, at.instruction)))
        };
        if self.host.ask(&others) {
            let asked = Instant::now();
            while asked.elapsed() < ANSWER && !others.iter().all(has_come) {
                std::thread::sleep(SLICE);
            }
        }
        others.into_iter().filter(|member| !has_come(member)).collect()
    }

    /// Lets streams go on that wait in this communicator, and gives it back.
    pub fn abort(&self, nccl: &dyn Nccl) {
        if let Some(comm) = lock(&self.comm).take() {
            nccl.abort(comm);
        }
    }

    /// Gives it back once all ranks have, for which it waits a little.
    pub fn end(&self, nccl: &dyn Nccl, patience: Duration) {
        let start = Instant::now();
        let ends = self.host.failure().is_none() && self.call(|comm| nccl.finalize(comm)).is_ok();
        while ends && start.elapsed() < patience && self.host.failure().is_none() {
            match self.call(|comm| nccl.state(comm)) {
                Ok(State::Busy) => std::thread::sleep(SLICE),
                Ok(State::Ready) => {
                    if let Some(comm) = lock(&self.comm).take() {
                        nccl.destroy(comm);
                    }
                    return;
                }
                Ok(State::Failed(_)) | Err(_) => break,
            }
        }
        self.abort(nccl);
    }
}

/// Keeps the thread running as long as somebody uses NCCL.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    driver: Arc<dyn Driver>,
    world: Communicator,
    waiting: Box<dyn Fn() + Send + Sync>,
    members: Mutex<Vec<Weak<Member>>>,
    flights: Mutex<VecDeque<Flight>>,
    /// Events that can be used again.
    events: Mutex<Vec<Event>>,
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Keeper {
    pub fn start(driver: Arc<dyn Driver>, world: Communicator, waiting: Box<dyn Fn() + Send + Sync>) -> Keeper {
        let shared = Arc::new(Shared {
            driver,
            world,
            waiting,
            members: Mutex::default(),
            flights: Mutex::default(),
            events: Mutex::default(),
            ended: Mutex::new(false),
            changed: Condvar::new(),
        });
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("nccl".to_owned()).spawn(move || watched.watch());
        Keeper { shared, thread: Some(thread.expect("threads can be started")) }
    }

    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    pub fn add(&self, member: &Arc<Member>) {
        let mut members = lock(&self.shared.members);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(member));
    }

    pub fn event(&self) -> trainyard_cuda::Result<Event> {
        let free = lock(&self.shared.events).pop();
        free.map_or_else(|| self.shared.driver.event(), Ok)
    }

    /// Watches an exchange from now on.
    pub fn launched(&self, flight: Flight) {
        lock(&self.shared.flights).push_back(flight);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        *lock(&self.shared.ended) = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic there has told itself.
            let _ = thread.join();
        }
        let events = std::mem::take(&mut *lock(&self.shared.events));
        let flights = std::mem::take(&mut *lock(&self.shared.flights));
        let under_way = flights.iter().flat_map(|flight| [flight.begun, flight.ended]);
        events.into_iter().chain(under_way).for_each(|event| self.shared.driver.destroy(event));
    }
}

impl Shared {
    fn watch(&self) {
        loop {
            let interval = (self.world.deadline() / 40).clamp(Duration::from_millis(2), Duration::from_millis(50));
            let ended = lock(&self.ended);
            if *ended || *self.changed.wait_timeout(ended, interval).unwrap_or_else(PoisonError::into_inner).0 {
                return;
            }
            if self.look().is_some() {
                let Ok(nccl) = self.driver.nccl() else { return };
                lock(&self.members).iter().filter_map(Weak::upgrade).for_each(|member| member.abort(nccl));
            }
        }
    }

    /// Looks at everything once: the world's failure, if it has failed.
    fn look(&self) -> Option<CommError> {
        let failure = self.world.failure();
        if failure.is_some() {
            return failure;
        }
        let nccl = self.driver.nccl().ok()?;
        let members: Vec<Arc<Member>> = lock(&self.members).iter().filter_map(Weak::upgrade).collect();
        for member in members {
            // Under the lock, because nobody gives it back meanwhile.
            let state = lock(&member.comm).map(|comm| nccl.state(comm));
            if let Some(what) = state.and_then(trouble) {
                return Some(self.failed(&member, what));
            }
        }
        self.flights()
    }

    /// NCCL says that a communicator has failed: with whoever has not come to what is under way in
    /// it.
    fn failed(&self, member: &Arc<Member>, what: String) -> CommError {
        let (position, at) = {
            let flights = lock(&self.flights);
            let oldest = flights.iter().find(|flight| Arc::ptr_eq(&flight.member, member));
            (oldest.and_then(|flight| flight.position.clone()), oldest.map(|flight| (flight.operation, flight.number)))
        };
        let late = position.map(|position| member.late(Some(&position))).unwrap_or_default();
        member.host.accuse(backend(what), &late, at)
    }

    /// Exchanges that have ended are forgotten, those that have begun are told, and those that take
    /// too long fail the world.
    fn flights(&self) -> Option<CommError> {
        let mut overdue = None;
        let mut waiting = Vec::new();
        let mut busy: Vec<*const Member> = Vec::new();
        let passed = |event| self.driver.is_passed(event);
        lock(&self.flights).retain_mut(|flight| {
            let member = Arc::as_ptr(&flight.member);
            // Those of one communicator end one after the other.
            if overdue.is_some() || busy.contains(&member) {
                return true;
            }
            // An error of the device itself goes to the threads that wait for it.
            if passed(flight.ended).unwrap_or(true) {
                lock(&self.events).extend([flight.begun, flight.ended]);
                return false;
            }
            busy.push(member);
            if flight.since.is_none() && passed(flight.begun).unwrap_or(false) {
                flight.since = Some(Instant::now());
                if let Some(position) = &flight.position {
                    flight.member.host.post(position.clone());
                }
            }
            if let Some(since) = flight.since {
                let at = (flight.operation, flight.number);
                waiting.push((Arc::clone(&flight.member), at));
                let deadline = flight.member.host.deadline();
                if since.elapsed() > deadline {
                    overdue = Some((Arc::clone(&flight.member), deadline, flight.position.clone(), at));
                }
            }
            true
        });
        if !waiting.is_empty() {
            (self.waiting)();
        }
        // NCCL may not notice: what it waits for within a host is memory.
        if let Some(failure) = waiting.iter().find_map(|(member, at)| member.host.bury(Some(*at))) {
            return Some(failure);
        }
        overdue.map(|(member, waited, position, at)| member.overdue(waited, position.as_ref(), Some(at)))
    }
}
