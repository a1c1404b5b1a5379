//! The connections of a process as a [`Transport`].

use super::link::{Inbox, Link, Notices, lock};
use super::request::Slot;
use crate::processes::{GRACE, Transport, envelope_bytes_max};
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages up to this are copied, and so are all envelopes.
const COPIED_BYTES: usize = 16 << 10;
/// The longest sleep of a waiting thread before it looks whether the world has failed.
const SLEEP: Duration = Duration::from_millis(5);
/// The longest time for which a process that ends waits until its last messages are sent.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A process and its connections.
pub(crate) struct Tcp {
    rank: usize,
    /// By rank; none to itself.
    links: Vec<Option<Arc<Link>>>,
    /// Messages to itself.
    own: Inbox,
    notices: Notices,
    copied_bytes: usize,
}

impl Tcp {
    /// A process with a connection to every other one, by rank.
    pub fn start(rank: usize, streams: Vec<Option<TcpStream>>) -> io::Result<Self> {
        let notices = Notices::default();
        let copied_bytes = COPIED_BYTES.max(envelope_bytes_max(streams.len()).next_multiple_of(8));
        let start = |(peer, stream): (usize, Option<TcpStream>)| {
            stream.map(|stream| Link::start(peer, stream, notices.clone(), copied_bytes)).transpose()
        };
        let links = streams.into_iter().enumerate().map(start).collect::<io::Result<_>>()?;
        Ok(Self { rank, links, own: Inbox::default(), notices, copied_bytes })
    }

    fn link(&self, peer: usize) -> Option<&Arc<Link>> {
        self.links.get(peer).and_then(Option::as_ref)
    }

    fn every_link(&self, holds: impl Fn(&Link) -> bool) -> bool {
        self.links.iter().flatten().all(|link| holds(link))
    }
}

impl Transport for Tcp {
    type Request = Arc<Slot>;
    const NAME: &'static str = "tcp";

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.links.len()
    }

    fn tag_max(&self) -> u32 {
        i32::MAX as u32
    }

    unsafe fn send(&self, data: *const u8, bytes: usize, to: usize, tag: i32) -> Result<Arc<Slot>, String> {
        let tag = tag as u32;
        let link = self.link(to);
        if let Some(link) = link.filter(|_| bytes > self.copied_bytes) {
            // SAFETY: the caller's promise; a link only reads what is lent to it.
            let slot = Arc::new(unsafe { Slot::new(to, data.cast_mut(), bytes) });
            link.lend(tag, Arc::clone(&slot));
            return Ok(slot);
        }
        // SAFETY: the caller's promise.
        let message = unsafe { std::slice::from_raw_parts(data, bytes) };
        let slot = Arc::new(Slot::copied(to));
        match link {
            Some(link) => link.send_copy(tag, message, Arc::clone(&slot)),
            None => {
                self.own.deliver(tag, message.to_vec());
                slot.fill(&[]);
            }
        }
        Ok(slot)
    }

    unsafe fn receive(&self, data: *mut u8, bytes: usize, from: usize, tag: i32) -> Result<Arc<Slot>, String> {
        let tag = tag as u32;
        // SAFETY: the caller's promise.
        let slot = Arc::new(unsafe { Slot::new(from, data, bytes) });
        match self.link(from) {
            Some(link) if bytes > self.copied_bytes => link.borrow(tag, Arc::clone(&slot)),
            Some(link) => link.inbox.expect(tag, Arc::clone(&slot)),
            None => self.own.expect(tag, Arc::clone(&slot)),
        }
        Ok(slot)
    }

    fn test(&self, requests: &mut [Arc<Slot>], done: &mut Vec<usize>) -> Result<(), String> {
        done.clear();
        done.extend(requests.iter().enumerate().filter(|(_, slot)| slot.is_done()).map(|(index, _)| index));
        Ok(())
    }

    /// Takes them back. Where a thread is in the middle of one and does not come to its end,
    /// because the peer neither takes nor gives, that connection is closed.
    fn abandon(&self, requests: Vec<(Arc<Slot>, bool)>) {
        requests.iter().for_each(|(slot, _)| slot.take_back());
        let moving = || requests.iter().map(|(slot, _)| slot).filter(|slot| slot.is_moving());
        let start = Instant::now();
        while moving().next().is_some() && start.elapsed() < GRACE {
            std::thread::sleep(Duration::from_micros(200));
        }
        moving().filter_map(|slot| self.link(slot.peer)).for_each(|link| link.close());
        // A closed socket lets go at once.
        while moving().next().is_some() {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn pause(&self, _: u32) {
        std::thread::park_timeout(SLEEP);
    }

    fn tell(&self, to: usize, notice: &[u8]) {
        if let Some(link) = self.link(to) {
            link.tell(notice);
        }
    }

    fn has_told(&self) -> bool {
        self.every_link(Link::has_told)
    }

    fn hear(&self) -> Result<Option<(usize, Vec<u8>)>, String> {
        Ok(lock(&self.notices).pop_front())
    }

    fn lost(&self, rank: usize) -> Option<String> {
        self.link(rank)?.lost()
    }

    /// Copied messages may still be on their way to the socket.
    fn finish(&self) {
        let start = Instant::now();
        while !self.every_link(Link::is_idle) && start.elapsed() < LAST_WORDS {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.links.iter().flatten().for_each(|link| link.close());
    }
}
