//! The threads of a server: one for each other worker, which receives its pushes and answers its
//! pulls, and one that makes updates.

use super::wire::{Commit, Request};
use super::{Server, ServerLinks};
use crate::Result;
use crate::error::EngineError;
use crate::state::does_not_fit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use trainyard_tensor::{Tensor, ops};

/// The work of a thread of a server.
type Body = Box<dyn FnOnce(&Server, &ServerLinks) -> Result<()> + Send>;

/// The running threads of a server. Dropping it waits until every other worker has left, or the
/// world has failed.
pub(super) struct Service {
    server: Arc<Server>,
    connections: Vec<JoinHandle<()>>,
    updates: Option<JoinHandle<()>>,
}

impl Service {
    /// Starts the threads of `server`, which the worker with index `own` hosts.
    ///
    /// # Errors
    /// The operating system starts no thread.
    pub fn start(server: &Arc<Server>, links: &Arc<ServerLinks>, own: usize) -> Result<Service> {
        let start = |name: String, body: Body| {
            let (server, links) = (Arc::clone(server), Arc::clone(links));
            let guarded = move || {
                let done = catch_unwind(AssertUnwindSafe(|| body(&server, &links)));
                fail_with(&links, done.unwrap_or_else(|_| Err(does_not_fit("a thread of it panicked"))));
            };
            let fail = |error| does_not_fit(format!("cannot start a thread of the parameter server: {error}"));
            std::thread::Builder::new().name(name).spawn(guarded).map_err(fail)
        };
        let mut service = Service { server: Arc::clone(server), connections: Vec::new(), updates: None };
        let make_updates = |server: &Server, links: &ServerLinks| {
            while let Some(commits) = server.next_commits(&links.servers)? {
                server.apply(&commits, Some(&links.servers))?;
            }
            Ok(())
        };
        service.updates = Some(start("server updates".to_owned(), Box::new(make_updates))?);
        for worker in (0..server.workers()).filter(|worker| *worker != own) {
            let copy = server.take_copy();
            let serve = move |server: &Server, links: &ServerLinks| serve(server, links, worker, copy);
            service.connections.push(start(format!("server of {worker}"), Box::new(serve))?);
        }
        Ok(service)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // A panic of a thread has failed the world already.
        for thread in self.connections.drain(..) {
            let _ = thread.join();
        }
        self.server.close();
        if let Some(thread) = self.updates.take() {
            let _ = thread.join();
        }
    }
}

/// Fails the world with the error of a thread, unless that is a failure of the world itself.
fn fail_with(links: &ServerLinks, ended: Result<()>) {
    if let Err(error) = ended
        && !matches!(error, EngineError::Comm(_))
    {
        links.requests.abort(format!("its parameter server: {error}"));
    }
}

/// Serves one worker until it leaves. Pulled parts of units pass through `copy`.
fn serve(server: &Server, links: &ServerLinks, worker: usize, copy: Tensor) -> Result<()> {
    let ServerLinks { requests, answers, .. } = links;
    loop {
        let mut words = [0; 4];
        requests.recv_request(&mut words, worker)?;
        match Request::decode(words)? {
            Request::Push { clock, unit } => {
                let mut place = server.place(worker, clock, unit)?;
                place.overwrite_bytes(|bytes| requests.recv(bytes, worker))??;
            }
            Request::Commit { clock, numbers } => {
                let mut values = vec![0f64; numbers];
                requests.recv(&mut values, worker)?;
                server.commit(worker, Commit::from_numbers(clock, &values)?)?;
            }
            Request::Pull { clock, unit, oldest } => {
                let mut part = copy.clone();
                let version = server.pull(unit, clock, oldest, Some(answers), |masters| {
                    part = copy.view(0, [masters.elements()])?;
                    Ok(ops::cast_into(masters, &mut part)?)
                })?;
                answers.send(&version.encode(), worker)?;
                part.with_bytes(|bytes| answers.send(bytes, worker))??;
            }
            Request::Leave => return Ok(()),
        }
    }
}
