//! Collectives on the memory of GPUs, by NCCL.
//!
//! A [`Circle`] is a rank's way to exchange device memory with the ranks of a [`Communicator`],
//! beside which it stands: that one finds the others (it broadcasts NCCL's identifier), knows where
//! they are, and carries the failure of the world. Nothing here touches data: exchanges are put on
//! streams and the host goes on.
//!
//! **No endless waiting.** A rank has one thread ([`Nccl`]) that looks at what is under way: each
//! exchange stands between two events. Once the first has passed the rank has come to the exchange
//! and says so ([`Communicator::post`]); when the second does not pass within the communicator's
//! deadline, those who have not come by then are named. What NCCL reports in between
//! ([`State::Failed`]), and a failure of the world for whatever other reason, end the same way: the
//! world has failed with one culprit, and every communicator of NCCL is aborted, which lets
//! streams, and the threads that wait for them, go on. Results are then worthless, so whoever has
//! waited for the device asks the communicator for its failure before it uses them.
//!
//! **What is not checked.** NCCL compares no calls: ranks that disagree wait for each other, and
//! are named by their positions when the deadline passes. It carries no checksums.

mod circle;
#[cfg(test)]
mod tests;
mod watch;

pub use circle::Circle;

use crate::communicator::Communicator;
use crate::error::{ErrorKind, Result};
use std::sync::Arc;
use trainyard_cuda::driver::Driver;
use trainyard_cuda::nccl::{State, UniqueId};
use watch::{Keeper, Member};

/// NCCL on one rank's device: makes circles, and watches them until the last is gone.
#[derive(Clone)]
pub struct Nccl {
    keeper: Arc<Keeper>,
}

impl Nccl {
    /// For the rank of `world` that works on this device. `waiting` is called again and again while
    /// the device waits in an exchange for other ranks.
    ///
    /// # Errors
    /// There is no NCCL, which fails the world.
    pub fn new(
        driver: Arc<dyn Driver>,
        world: &Communicator,
        waiting: impl Fn() + Send + Sync + 'static,
    ) -> Result<Nccl> {
        driver.nccl().map_err(|error| world.refuse(error.to_string()))?;
        Ok(Nccl { keeper: Arc::new(Keeper::start(driver, world.handle(), Box::new(waiting))) })
    }

    /// The version of the library, `2.27.3`.
    pub fn version(&self) -> String {
        self.keeper.driver().nccl().map_or_else(|_| String::new(), |nccl| version_text(nccl.version()))
    }

    /// A way to the ranks of `host`, all of which call this together and in the same order as for
    /// their other groups.
    ///
    /// # Errors
    /// NCCL refuses, or somebody does not come within the deadline; the world has failed then.
    pub fn circle(&self, host: &Communicator) -> Result<Circle> {
        let driver = self.keeper.driver();
        let failed = |error: trainyard_cuda::CudaError| host.accuse(backend(error.to_string()), &[], None);
        let nccl = driver.nccl().map_err(failed)?;
        let mut id = [0; 128];
        if host.rank() == 0 {
            id = nccl.unique_id().map_err(failed)?.0;
        }
        host.broadcast(&mut id, 0)?;
        let comm = nccl.init(&UniqueId(id), host.rank(), host.size()).map_err(failed)?;
        let member = Arc::new(Member::new(host.handle(), comm));
        self.keeper.add(&member);
        member.settle(nccl, None)?;
        Ok(Circle::new(member, Arc::clone(&self.keeper)))
    }
}

/// `2.27.3` of 22703.
pub fn version_text(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

fn backend(what: String) -> ErrorKind {
    ErrorKind::Backend { what }
}

/// The error that a state tells of, if it does.
fn trouble(state: trainyard_cuda::Result<State>) -> Option<String> {
    match state {
        Ok(State::Ready | State::Busy) => None,
        Ok(State::Failed(what)) => Some(what),
        Err(error) => Some(error.to_string()),
    }
}
