//! The operations of a lane on a communicator of NCCL.

use super::backend;
use super::watch::{Flight, Keeper, Member, lock};
use crate::backend::Operation;
use crate::error::Result;
use crate::place::Position;
use std::sync::Arc;
use std::time::Duration;
use trainyard_cuda::driver::{Region, Stream};
use trainyard_cuda::nccl::{Element, Exchange};

/// The time that the end of a communicator may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A rank's way to exchange device memory with a group of ranks. Clones are one; exchanges are put
/// on streams in the order of the calls, which is to be the same on all ranks. Regions are of the
/// device's memory, and stay what they are until the stream has passed the exchange.
#[derive(Clone)]
pub struct Circle(Arc<Owned>);

struct Owned {
    member: Arc<Member>,
    keeper: Arc<Keeper>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        let Ok(nccl) = self.keeper.driver().nccl() else { return };
        if std::thread::panicking() {
            self.member.abort(nccl);
        } else {
            self.member.end(nccl, PATIENCE);
        }
    }
}

impl Circle {
    pub(super) fn new(member: Arc<Member>, keeper: Arc<Keeper>) -> Circle {
        Circle(Arc::new(Owned { member, keeper }))
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.0.member.host.size()
    }

    /// This rank in it.
    pub fn rank(&self) -> usize {
        self.0.member.host.rank()
    }

    /// Sets the position that this rank posts when the device comes to the exchanges that are
    /// called from now on. With None nothing is posted; when a deadline then passes, all other
    /// ranks are named with their last positions.
    pub fn post(&self, position: Option<Position>) {
        *lock(&self.0.member.position) = position;
    }

    /// Sums `data` over the ranks, in NCCL's order.
    pub fn all_reduce(&self, stream: Stream, data: Region, element: Element) -> Result<()> {
        let (from, to) = ends(data, data);
        self.put(stream, Operation::AllReduce, &[Exchange::AllReduce { from, to, element }])
    }

    /// Sums `data`, which is as many parts as there are ranks, in NCCL's order; afterwards the own
    /// part holds its sum, and the rest is arbitrary.
    pub fn reduce_scatter_in_place(&self, stream: Stream, data: Region, element: Element) -> Result<()> {
        let (from, to) = ends(data, self.part(data, self.rank()));
        self.put(stream, Operation::ReduceScatter, &[Exchange::ReduceScatter { from, to, element }])
    }

    /// Everybody's `part` in everybody's `whole`, which may hold it in its place.
    pub fn all_gather(&self, stream: Stream, part: Region, whole: Region) -> Result<()> {
        let (from, to) = ends(part, whole);
        self.put(stream, Operation::AllGather, &[Exchange::AllGather { from, to }])
    }

    /// As [`Circle::all_gather`] with the own part in its place.
    pub fn all_gather_in_place(&self, stream: Stream, whole: Region) -> Result<()> {
        self.all_gather(stream, self.part(whole, self.rank()), whole)
    }

    /// The bytes of `root` for everybody.
    pub fn broadcast(&self, stream: Stream, data: Region, root: usize) -> Result<()> {
        let (from, to) = ends(data, data);
        self.put(stream, Operation::Broadcast, &[Exchange::Broadcast { from, to, root }])
    }

    /// Sends to and receives from any ranks at once: `(rank, memory)`; empty memory is left out. A
    /// send meets the receive of the same length there, in order.
    pub fn exchange(&self, stream: Stream, sends: &[(usize, Region)], receives: &[(usize, Region)]) -> Result<()> {
        let sends = sends.iter().map(|&(peer, from)| (from, Exchange::Send { from: read(from), peer }));
        let receives = receives.iter().map(|&(peer, to)| (to, Exchange::Receive { to: written(to), peer }));
        let exchanges: Vec<Exchange> =
            sends.chain(receives).filter(|(region, _)| region.bytes > 0).map(|(_, exchange)| exchange).collect();
        if exchanges.is_empty() {
            return Ok(());
        }
        self.put(stream, Operation::AllToAll, &exchanges)
    }

    /// Several collectives as one: `exchanges` progress together.
    pub fn together(&self, stream: Stream, operation: Operation, exchanges: &[Exchange]) -> Result<()> {
        self.put(stream, operation, exchanges)
    }

    /// Part `rank` of `whole`, which is as many as there are ranks.
    fn part(&self, whole: Region, rank: usize) -> Region {
        let bytes = whole.bytes / self.size();
        Region { address: whole.address + (rank * bytes) as u64, bytes, ..whole }
    }

    fn put(&self, stream: Stream, operation: Operation, exchanges: &[Exchange]) -> Result<()> {
        let Owned { member, keeper } = &*self.0;
        if let Some(failure) = member.host.failure() {
            return Err(failure);
        }
        let failed = |error: trainyard_cuda::CudaError| member.host.accuse(backend(error.to_string()), &[], None);
        let (driver, position) = (keeper.driver(), lock(&member.position).clone());
        let nccl = driver.nccl().map_err(failed)?;
        let number = {
            let mut count = lock(&member.count);
            *count += 1;
            *count - 1
        };
        let (begun, ended) = (keeper.event().map_err(failed)?, keeper.event().map_err(failed)?);
        driver.record(begun, stream).map_err(failed)?;
        member.call(|comm| nccl.enqueue(comm, stream, exchanges))?;
        member.settle(nccl, Some((operation, number)))?;
        driver.record(ended, stream).map_err(failed)?;
        keeper.launched(Flight { member: Arc::clone(member), operation, number, position, begun, ended, since: None });
        Ok(())
    }
}

fn read(region: Region) -> Region {
    Region { written: false, ..region }
}

fn written(region: Region) -> Region {
    Region { written: true, ..region }
}

fn ends(from: Region, to: Region) -> (Region, Region) {
    (read(from), written(to))
}
