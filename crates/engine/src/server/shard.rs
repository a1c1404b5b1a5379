//! A server: its part of the masters and of the optimizer state, the gradients that workers have
//! pushed, and the update that takes them.

use super::{Clocks, Commit, Version};
use crate::Result;
use crate::optimizer::{Optimizer, Rates};
use crate::rank::in_order;
use crate::state::{ParameterState, does_not_fit, lock};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};
use trainyard_comm::number::left_span;
use trainyard_comm::{CommError, Communicator};
use trainyard_model::UnitLayout;
use trainyard_program::ParameterServer;
use trainyard_tensor::ops::optim::ChunkSums;
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// The pause between two looks of a waiting thread whether the world has failed.
const SLICE: Duration = Duration::from_millis(10);

/// One server.
pub(crate) struct Server {
    optimizer: Arc<Optimizer>,
    /// The units of which the server owns something, ascending.
    units: Vec<Owned>,
    staleness: u64,
    backups: usize,
    workers: usize,
    /// By worker, and by clock modulo `staleness + 1`: the gradients of all units.
    gradients: Vec<Vec<Tensor>>,
    /// For each other worker, memory for the part of a unit that it is sent.
    copies: Mutex<Vec<Tensor>>,
    squares: Mutex<ChunkSums>,
    clocks: Mutex<Clocks>,
    /// Woken by commits, versions and the end.
    changed: Condvar,
    /// The version of the masters. An update holds it for writing, and a pull for reading.
    published: RwLock<Version>,
    /// Per number of clocks, the pulls of all workers whose parameters lacked that many updates,
    /// since they were last asked for.
    staleness_of_pulls: Mutex<Vec<u64>>,
    /// The pushes that updates were made without, since they were last asked for.
    dropped: AtomicU64,
    closed: Mutex<bool>,
}

/// The part of a unit that a server owns.
struct Owned {
    unit: usize,
    masters: Tensor,
    /// Place of its gradient in the gradients of a clock.
    at: usize,
}

impl Owned {
    fn elements(&self) -> usize {
        self.masters.elements()
    }
}

impl Server {
    /// Makes the server of a rank; None if the rank hosts none. Its masters and optimizer state are
    /// those of the rank.
    pub fn new(
        device: &Device,
        parameters: &ParameterState,
        optimizer: &Arc<Optimizer>,
        settings: ParameterServer,
    ) -> Result<Option<Server>> {
        let holding = parameters.holding();
        if holding.shard >= holding.owners() {
            return Ok(None);
        }
        let mut at = 0;
        let mut units = Vec::new();
        for unit in (0..parameters.units()).filter(|unit| holding.holds(*unit)) {
            if let Some((masters, _)) = parameters.unit(unit).held_apart() {
                units.push(Owned { unit, at, masters });
                at += units.last().map_or(0, Owned::elements);
            }
        }
        let (workers, staleness) = (holding.shards, u64::from(settings.staleness));
        let backups = settings.backups as usize;
        let of_clock = |_| device.zeros([at], DType::F32, Purpose::Comm);
        let of_worker = |_| (0..=staleness).map(of_clock).collect::<std::result::Result<Vec<_>, _>>();
        let gradients = (0..workers).map(of_worker).collect::<std::result::Result<_, _>>()?;
        let largest = units.iter().map(Owned::elements).max().unwrap_or(0);
        let copy = |_| device.empty([largest], parameters.compute(), Purpose::Comm);
        let copies = (1..workers).map(copy).collect::<std::result::Result<_, _>>()?;
        let elements: Vec<usize> = units.iter().map(Owned::elements).collect();
        Ok(Some(Server {
            optimizer: Arc::clone(optimizer),
            units,
            staleness,
            backups,
            workers,
            gradients,
            copies: Mutex::new(copies),
            squares: Mutex::new(ChunkSums::new(device, &elements, UnitLayout::QUANTUM)?),
            clocks: Mutex::new(Clocks::new(workers, staleness, backups)),
            changed: Condvar::new(),
            published: RwLock::default(),
            staleness_of_pulls: Mutex::new(vec![0; staleness as usize + 1]),
            dropped: AtomicU64::new(0),
            closed: Mutex::new(false),
        }))
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.workers
    }

    fn owned(&self, unit: usize) -> Result<&Owned> {
        let found = self.units.binary_search_by_key(&unit, |owned| owned.unit);
        let unknown = |_| does_not_fit(format!("a parameter server has nothing of unit {unit}"));
        found.map(|index| &self.units[index]).map_err(unknown)
    }

    /// Memory for the copies of one worker's pulls. Each worker's thread takes one.
    pub fn take_copy(&self) -> Tensor {
        lock(&self.copies).pop().expect("there is one for each other worker")
    }

    /// Memory for the gradient of a unit that `worker` pushes in `clock`.
    ///
    /// # Errors
    /// A unit or a clock that is not the worker's to push.
    pub fn place(&self, worker: usize, clock: u64, unit: usize) -> Result<Tensor> {
        lock(&self.clocks).check_push(worker, clock).map_err(does_not_fit)?;
        let owned = self.owned(unit)?;
        let of_clock = &self.gradients[worker][(clock % (self.staleness + 1)) as usize];
        Ok(of_clock.view(owned.at, [owned.elements()])?)
    }

    /// Records that all gradients of `worker` for a clock are in their places.
    ///
    /// # Errors
    /// A clock that is not the worker's to commit.
    pub fn commit(&self, worker: usize, commit: Commit) -> Result<()> {
        lock(&self.clocks).commit(worker, commit).map_err(does_not_fit)?;
        self.changed.notify_all();
        Ok(())
    }

    /// Lets `take` read the server's part of a unit for `clock`, in a version that is no older than
    /// `oldest`, and returns the version. Waits for it until the deadline of `comm`.
    ///
    /// # Errors
    /// An `oldest` beyond the bound of staleness. The world's failure; after the deadline it is
    /// that of the workers that have not committed.
    pub fn pull(
        &self,
        unit: usize,
        clock: u64,
        oldest: u64,
        comm: Option<&Communicator>,
        take: impl FnOnce(&Tensor) -> Result<()>,
    ) -> Result<Version> {
        if oldest < Clocks::oldest(clock, self.staleness) {
            let bound = self.staleness;
            return Err(does_not_fit(format!("a pull for clock {clock} takes version {oldest}: the bound is {bound}")));
        }
        self.wait_for(oldest, comm)?;
        let masters = &self.owned(unit)?.masters;
        let published = self.published.read().unwrap_or_else(PoisonError::into_inner);
        take(masters)?;
        let lacks = clock.saturating_sub(published.number) as usize;
        lock(&self.staleness_of_pulls)[lacks] += 1;
        Ok(*published)
    }

    fn wait_for(&self, oldest: u64, comm: Option<&Communicator>) -> Result<(), CommError> {
        let began = Instant::now();
        let mut clocks = lock(&self.clocks);
        while clocks.version() < oldest {
            let Some(comm) = comm else { return Ok(()) };
            if let Some(failure) = comm.failure() {
                return Err(failure);
            }
            if began.elapsed() >= comm.deadline() {
                let missing = clocks.missing();
                return Err(match missing.is_empty() {
                    true => comm.abort("its parameter server makes no update, though all workers have committed"),
                    false => comm.accuse_late(&missing),
                });
            }
            clocks = self.changed.wait_timeout(clocks, SLICE).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Waits for the commits of the next clock: those of all workers, or of all but the back-up
    /// workers. All of `servers` take those of the same workers, which the first one chooses. None
    /// once the server is closed.
    ///
    /// # Errors
    /// The failure of the world.
    pub fn next_commits(&self, servers: &Communicator) -> Result<Option<Vec<(usize, Commit)>>> {
        let Some(mut workers) = self.wait_until(|clocks| clocks.due()) else { return Ok(None) };
        if self.backups > 0 && servers.size() > 1 {
            let mut chosen = vec![0u64; self.workers];
            workers.iter().for_each(|worker| chosen[*worker] = 1);
            servers.broadcast(&mut chosen, 0)?;
            workers = (0..self.workers).filter(|worker| chosen[*worker] != 0).collect();
        }
        let has_failed = || servers.failure().map(|failure| Err(failure.into()));
        let found = |clocks: &Clocks| clocks.commits_of(&workers).map(Ok).or_else(has_failed);
        self.wait_until(found).transpose()
    }

    /// Waits until `find` finds something in the clocks; None once the server is closed.
    fn wait_until<T>(&self, find: impl Fn(&Clocks) -> Option<T>) -> Option<T> {
        let mut clocks = lock(&self.clocks);
        loop {
            if let Some(found) = find(&clocks) {
                return Some(found);
            }
            if *lock(&self.closed) {
                return None;
            }
            clocks = self.changed.wait_timeout(clocks, SLICE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends [`Server::next_commits`] for ever.
    pub fn close(&self) {
        *lock(&self.closed) = true;
        self.changed.notify_all();
    }

    /// The pulls since the last call, by the number of updates that their parameters lacked.
    pub fn take_staleness(&self) -> Vec<u64> {
        let mut pulls = lock(&self.staleness_of_pulls);
        let fresh = vec![0; pulls.len()];
        std::mem::replace(&mut pulls, fresh)
    }

    /// The pushes since the last call that came too late for their update, or never came; None
    /// without back-up workers.
    pub fn take_dropped(&self) -> Option<u64> {
        (self.backups > 0).then(|| self.dropped.swap(0, Ordering::Relaxed))
    }

    /// Sums the gradients of a clock over the workers of `commits`, takes the norm with the other
    /// `servers`, and makes the update, unless the loss or the norm is not finite. All servers call
    /// this together; None is for a prediction.
    pub fn apply(&self, commits: &[(usize, Commit)], servers: Option<&Communicator>) -> Result<()> {
        let (first, Commit { clock, rate_factor, clip_norm, updates_before, .. }) = commits[0].clone();
        let targets: u64 = commits.iter().map(|(_, commit)| commit.targets).sum();
        self.dropped.fetch_add((self.workers - commits.len()) as u64, Ordering::Relaxed);
        // Workers that do not wait for each other divide by the number of targets that all would
        // have if each had as many. Where that is right, no bit changes.
        let weight = |commit: &Commit| commit.divisor as f64 / targets.max(1) as f64;
        let slot = (clock % (self.staleness + 1)) as usize;
        for (worker, commit) in commits.iter().filter(|(_, commit)| commit.divisor != targets.max(1)) {
            scale(&self.gradients[*worker][slot], weight(commit) as f32)?;
        }
        let chunks = {
            let mut squares = lock(&self.squares);
            for (index, owned) in self.units.iter().enumerate() {
                let of_worker =
                    |(worker, _): &(usize, Commit)| self.gradients[*worker][slot].view(owned.at, [owned.elements()]);
                let of_workers = commits.iter().map(of_worker).collect::<std::result::Result<Vec<_>, _>>()?;
                squares.add_up(index, sum_by_tree(&of_workers)?)?;
            }
            squares.read()?
        };
        let chunks = match servers {
            Some(servers) => {
                let own = chunks.concat();
                let mut all = vec![0.0; own.len() * servers.size()];
                servers.all_gather(&own, &mut all)?;
                in_order(&chunks, &all)
            }
            None => chunks,
        };
        let gradient_norm = chunks.iter().flatten().sum::<f64>().sqrt();
        let losses = commits.iter().flat_map(|(_, commit)| commit.losses.iter().map(move |loss| loss * weight(commit)));
        let loss = losses.sum::<f64>();
        let updates = gradient_norm.is_finite() && loss.is_finite();
        let mut published = self.published.write().unwrap_or_else(PoisonError::into_inner);
        let made = published.updates + u64::from(updates);
        if updates {
            let clip = match clip_norm {
                Some(limit) if gradient_norm > limit => limit / gradient_norm,
                _ => 1.0,
            };
            let update = updates_before + made;
            let rates = Rates { factor: rate_factor, gradient_scale: clip as f32, update, average: None };
            for owned in &self.units {
                let gradient = self.gradients[first][slot].view(owned.at, [owned.elements()])?;
                self.optimizer.update_masters(owned.unit, &owned.masters, &gradient, rates)?;
            }
        }
        *published = Version {
            number: published.number + 1,
            updates: made,
            skipped_in_a_row: if updates { 0 } else { published.skipped_in_a_row + 1 },
            loss,
            gradient_norm,
            targets,
        };
        drop(published);
        lock(&self.clocks).advance();
        self.changed.notify_all();
        Ok(())
    }
}

/// Sums gradients into the first of them, along the tree in which ranks are summed. Returns it.
fn sum_by_tree(gradients: &[Tensor]) -> Result<&Tensor> {
    if gradients.len() > 1 {
        let (left, right) = gradients.split_at(left_span(gradients.len()));
        let (left, right) = (sum_by_tree(left)?, sum_by_tree(right)?);
        ops::accumulate(right, &mut left.clone(), false)?;
    }
    Ok(&gradients[0])
}

fn scale(gradients: &Tensor, factor: f32) -> Result<()> {
    if gradients.device().is_meta() {
        return Ok(());
    }
    let scale = |gradients: &mut [f32]| gradients.iter_mut().for_each(|gradient| *gradient *= factor);
    Ok(gradients.clone().with_data_mut(scale)?)
}
