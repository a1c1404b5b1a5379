//! A worker: push, commit and pull.

use super::service::Service;
use super::wire::Request;
use super::{Clocks, Commit, Server, ServerLinks, Version};
use crate::Result;
use crate::state::{Holding, UnitParameters, lock};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use trainyard_comm::Position;
use trainyard_tensor::{Tensor, ops};

/// A worker, and the server that its rank may host.
pub(crate) struct Worker {
    /// None for a prediction.
    links: Option<Arc<ServerLinks>>,
    own: Option<Arc<Server>>,
    /// Number of servers: the first ranks.
    servers: usize,
    /// True if updates are made without the gradients of late workers.
    has_backups: bool,
    /// The step, counted from the start of the sitting.
    clock: AtomicU64,
    /// The newest version that an answer had.
    heard: Mutex<Version>,
    /// Number of updates that the run had made before this sitting.
    updates_before: AtomicU64,
    /// The threads of `own`.
    service: Option<Service>,
}

impl Worker {
    /// Makes the worker of the rank that holds `holding`, and starts the threads of the server
    /// that it hosts.
    pub fn new(links: Option<ServerLinks>, own: Option<Server>, holding: &Holding) -> Result<Worker> {
        let (links, own) = (links.map(Arc::new), own.map(Arc::new));
        let service = match (&own, &links) {
            (Some(server), Some(links)) => Some(Service::start(server, links, holding.shard)?),
            _ => None,
        };
        let (clock, updates_before) = (AtomicU64::new(0), AtomicU64::new(0));
        let servers = holding.owners();
        let has_backups = holding.server.is_some_and(|server| server.backups > 0);
        Ok(Worker { links, own, servers, has_backups, clock, heard: Mutex::default(), updates_before, service })
    }

    /// Begins a step. `updates` is the number of updates of the run so far.
    pub fn begin(&self, updates: u64) {
        if self.clock() == 0 {
            self.updates_before.store(updates, Ordering::Relaxed);
        }
    }

    /// True if the update of the step that the worker is in has been made without it, as far as it
    /// has heard. Its gradient would be dropped.
    pub fn is_late(&self) -> bool {
        self.has_backups && self.heard().number > self.clock()
    }

    /// Goes on to the next step without a gradient for this one.
    pub fn leave_out(&self) {
        self.clock.fetch_add(1, Ordering::Relaxed);
    }

    /// True if updates are made without the gradients of late workers.
    pub fn has_backups(&self) -> bool {
        self.has_backups
    }

    fn clock(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// The newest version that the worker has parameters of.
    pub fn heard(&self) -> Version {
        *lock(&self.heard)
    }

    /// Number of updates of the run, as far as the worker has heard.
    pub fn updates(&self) -> u64 {
        self.updates_before.load(Ordering::Relaxed) + self.heard().updates
    }

    /// Posts the instruction that a lane is about to run, for the other ranks.
    pub fn post(&self, position: &Position) {
        if let Some(links) = &self.links {
            links.requests.post(position.clone());
            links.answers.post(position.clone());
        }
    }

    /// Sends every server its part of the gradient of a unit.
    pub fn push(&self, unit: usize, gradient: &Tensor, parameters: &UnitParameters, holding: &Holding) -> Result<()> {
        let clock = self.clock();
        for server in 0..holding.owners() {
            let range = holding.owned_by(server, parameters.layout());
            let part = gradient.view(range.start, [range.len()])?;
            match (&self.own, &self.links) {
                (Some(own), _) if server == holding.shard => {
                    own.place(holding.shard, clock, unit)?.copy_from(&part)?;
                }
                (_, Some(links)) => {
                    links.requests.send(&Request::Push { clock, unit }.encode(), server)?;
                    part.with_bytes(|bytes| links.requests.send(bytes, server))??;
                }
                (_, None) => {}
            }
        }
        Ok(())
    }

    /// Tells every server that the pushes of the step are complete, and begins the next clock.
    /// `commit` gets its clock and the updates before the sitting here.
    pub fn commit(&self, commit: Commit, holding: &Holding) -> Result<()> {
        let clock = self.clock.fetch_add(1, Ordering::Relaxed);
        let commit = Commit { clock, updates_before: self.updates_before.load(Ordering::Relaxed), ..commit };
        let Some(links) = &self.links else {
            // The work of the server, for its price and its memory.
            let Some(own) = &self.own else { return Ok(()) };
            let commits: Vec<_> = (0..own.workers()).map(|worker| (worker, commit.clone())).collect();
            commits.iter().try_for_each(|(worker, commit)| own.commit(*worker, commit.clone()))?;
            return own.apply(&commits, None);
        };
        let numbers = commit.numbers();
        for server in (0..holding.owners()).filter(|server| *server != holding.shard) {
            links.requests.send(&Request::Commit { clock, numbers: numbers.len() }.encode(), server)?;
            links.requests.send(&numbers, server)?;
        }
        match &self.own {
            Some(own) => own.commit(holding.shard, commit),
            None => Ok(()),
        }
    }

    /// Brings a unit's parameters from every server into the worker's copy. They may lack the
    /// updates of `staleness` clocks.
    pub fn pull(&self, unit: usize, staleness: u32, parameters: &UnitParameters, holding: &Holding) -> Result<()> {
        let clock = self.clock();
        let oldest = Clocks::oldest(clock, u64::from(staleness));
        for server in 0..holding.owners() {
            let mut part = parameters.copy_of(holding.owned_by(server, parameters.layout()))?;
            let version = match (&self.own, &self.links) {
                (Some(own), links) if server == holding.shard => {
                    let answers = links.as_ref().map(|links| &links.answers);
                    own.pull(unit, clock, oldest, answers, |masters| Ok(ops::cast_into(masters, &mut part)?))?
                }
                (_, Some(links)) => {
                    links.requests.send(&Request::Pull { clock, unit, oldest }.encode(), server)?;
                    let mut words = [0; Version::WORDS];
                    links.answers.recv(&mut words, server)?;
                    part.overwrite_bytes(|bytes| links.answers.recv(bytes, server))??;
                    Version::decode(words)
                }
                (_, None) => continue,
            };
            let mut heard = lock(&self.heard);
            if version.number > heard.number {
                *heard = version;
            }
        }
        Ok(())
    }

    /// The pushes that this rank's server has made updates without since the last call; None if it
    /// hosts none, or there are no back-up workers.
    pub fn take_dropped(&self) -> Option<u64> {
        self.own.as_ref().and_then(|own| own.take_dropped())
    }

    /// The pulls that this rank's server has answered since the last call, by the number of updates
    /// that their parameters lacked; None if it hosts none.
    pub fn take_staleness(&self) -> Option<Vec<u64>> {
        self.own.as_ref().map(|own| own.take_staleness())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(links) = &self.links {
            for server in (0..self.servers).filter(|server| *server != links.requests.rank()) {
                // It fails only where the world has failed, and then nobody waits for it.
                let _ = links.requests.send(&Request::Leave.encode(), server);
            }
        }
        drop(self.service.take());
    }
}
