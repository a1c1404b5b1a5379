//! How processes that know nothing but one address find each other.
//!
//! Rank 0 listens at the master's address and collects everybody's card: rank, world size, version,
//! host, and the port where it listens for its peers. When all have come it hands out the table of
//! addresses, everybody connects ([`super::mesh`]) and says so, and rank 0 lets them begin. What is
//! wrong, rank 0 tells all who have come or come soon after, so that every process ends with the
//! same sentence.

use super::mesh::{self, Mesh};
use super::transport::Tcp;
use super::words::{Address, Card, Word, hear, is_timeout, say};
use crate::communicator::{Communicator, DEADLINE_DEFAULT};
use crate::error::CommError;
use crate::place::Place;
use crate::processes;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long ranks wait for each other to come, unless told otherwise.
pub const RENDEZVOUS_DEFAULT: Duration = DEADLINE_DEFAULT;
/// How long a connection may say nothing before it counts as a stranger's.
const STRANGER: Duration = Duration::from_secs(2);
/// How long rank 0 stays to tell those who come late that there is no world.
const LINGER: Duration = Duration::from_secs(2);
/// How long a name may be unknown, and one attempt to connect take.
const LOOKUP: Duration = Duration::from_secs(20);
const ATTEMPT: Duration = Duration::from_secs(5);
/// How much longer others wait for rank 0 than rank 0 waits for them.
const MARGIN: Duration = Duration::from_secs(5);
/// How often is looked or tried again.
pub(super) const LOOK: Duration = Duration::from_millis(10);

/// Where and as whom a process joins a world.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rendezvous {
    /// Name or address of rank 0's host.
    pub host: String,
    /// Port at which rank 0 listens until all have come.
    pub port: u16,
    /// Rank of this process.
    pub rank: u32,
    /// Processes of the world.
    pub world: u32,
    /// How long ranks may take to come.
    pub deadline: Duration,
    /// What has to be the same in all processes.
    pub version: String,
}

/// Why no world came together. Every process says the same where it can be told.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// Rank 0 cannot listen where others look for it.
    #[error(
        "rank 0 cannot listen at port {port} of this host: {source}; is another rank 0 or another program at it? Set another MASTER_PORT for all ranks"
    )]
    Listen {
        /// The port.
        port: u16,
        /// Why.
        source: io::Error,
    },
    /// Nothing that could be rank 0 answers.
    #[error("rank {rank} finds no rank 0 at {host}:{port} within {:.1} s: {why}; is rank 0 started, are MASTER_ADDR and MASTER_PORT those of its host, and may this host reach it?", waited.as_secs_f64())]
    NoMaster {
        /// This rank.
        rank: u32,
        /// Where it looked.
        host: String,
        /// Port of it.
        port: u16,
        /// How long.
        waited: Duration,
        /// What the last attempt said.
        why: String,
    },
    /// Ranks did not come.
    #[error("{} of a world of {world} did not come to {host}:{port} within {:.1} s: see what they say, and whether their hosts reach this one", ranks(missing), waited.as_secs_f64())]
    Missing {
        /// Who.
        missing: Vec<u32>,
        /// Processes of the world.
        world: u32,
        /// Where they should have come.
        host: String,
        /// Port of it.
        port: u16,
        /// How long was waited.
        waited: Duration,
    },
    /// Those who came do not fit together, or cannot reach each other.
    #[error("{0}")]
    Refused(String),
    /// A socket or thread could not be made, or the world failed at once.
    #[error("the ranks cannot be connected: {0}")]
    Io(#[from] io::Error),
    /// The world failed before it began.
    #[error(transparent)]
    World(#[from] CommError),
}

/// `rank 3`, `ranks 1, 2`
fn ranks(ranks: &[u32]) -> String {
    const NAMED_MAX: usize = 16;
    let named: Vec<String> = ranks.iter().take(NAMED_MAX).map(u32::to_string).collect();
    let more = ranks.len().saturating_sub(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, named.join(", "))
}

impl Card {
    fn who(&self) -> String {
        format!("rank {} (host {}, process {})", self.rank, self.host, self.pid)
    }
}

/// Somebody who has come to rank 0.
struct Guest {
    card: Card,
    stream: TcpStream,
    /// Where it listens, as seen from here; none on this host.
    ip: Option<IpAddr>,
}

impl Rendezvous {
    /// `rank` of `world` at rank 0's `host` and `port`, with this program's version.
    pub fn new(host: impl Into<String>, port: u16, rank: u32, world: u32) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Self { host: host.into(), port, rank, world, deadline: RENDEZVOUS_DEFAULT, version }
    }

    /// Joins the world: returns when every rank is connected with every other one.
    ///
    /// # Errors
    /// When somebody does not come or does not fit.
    pub fn join(&self) -> Result<Communicator, RendezvousError> {
        let streams = if self.rank == 0 { self.invite() } else { self.visit() }?;
        let tcp = Tcp::start(self.rank as usize, streams)?;
        Ok(processes::world(Arc::new(tcp))?)
    }

    fn card(&self, port: u16) -> Card {
        let here = Place::here(0);
        let (version, rank, world) = (self.version.clone(), self.rank, self.world);
        Card { version, rank, world, host: here.host, pid: here.pid, port }
    }

    /// The address to listen at where only this host is meant; else the master's name may be known
    /// to this host by another address than to others, so it is all of them.
    fn loopback(&self) -> Option<IpAddr> {
        if self.host == "localhost" {
            let mut addresses = (self.host.as_str(), self.port).to_socket_addrs().ok()?;
            return addresses.next().map(|address| address.ip()).filter(IpAddr::is_loopback);
        }
        self.host.parse().ok().filter(IpAddr::is_loopback)
    }

    /// Rank 0's part.
    fn invite(&self) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
        let door = mesh::listen(self.loopback(), self.port);
        let door = door.map_err(|source| RendezvousError::Listen { port: self.port, source })?;
        let mut guests = Vec::new();
        let result = self.gather(&door, &mut guests).and_then(|()| self.connect(&guests));
        if let Err(error) = &result {
            let why = error.to_string();
            for guest in &guests {
                // Who is gone needs no answer.
                let _ = say(&guest.stream, &Word::Refused(why.clone()));
            }
            self.turn_away(&door, &why);
        }
        result
    }

    /// Waits for everybody.
    fn gather(&self, door: &TcpListener, guests: &mut Vec<Guest>) -> Result<(), RendezvousError> {
        let own = self.card(0);
        let start = Instant::now();
        while guests.len() + 1 < self.world as usize {
            if start.elapsed() >= self.deadline {
                let has_come = |rank: &u32| guests.iter().any(|guest| guest.card.rank == *rank);
                return Err(RendezvousError::Missing {
                    missing: (1..self.world).filter(|rank| !has_come(rank)).collect(),
                    world: self.world,
                    host: self.host.clone(),
                    port: self.port,
                    waited: start.elapsed(),
                });
            }
            let Some(guest) = welcome(door)? else {
                std::thread::sleep(LOOK);
                continue;
            };
            let misfit = misfit(&own, &guest.card, guests);
            guests.push(guest);
            if let Some(why) = misfit {
                return Err(RendezvousError::Refused(why));
            }
        }
        Ok(())
    }

    /// Hands out the table, connects, and lets everybody begin.
    fn connect(&self, guests: &[Guest]) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
        let ears = mesh::listen(self.loopback(), 0)?;
        let own = Address { host: Place::here(0).host, ip: None, port: ears.local_addr()?.port() };
        let mut addresses = vec![own; self.world as usize];
        for Guest { card, ip, .. } in guests {
            addresses[card.rank as usize] = Address { host: card.host.clone(), ip: *ip, port: card.port };
        }
        let session = RandomState::new().hash_one(std::process::id());
        let table = Word::Table { session, addresses: addresses.clone() };
        let lost = |guest: &Guest, error: io::Error| {
            let who = guest.card.who();
            RendezvousError::Refused(format!("{who} was lost while the ranks were connected: {error}"))
        };
        for guest in guests {
            say(&guest.stream, &table).map_err(|error| lost(guest, error))?;
        }
        let mesh = Mesh { rank: 0, session, addresses: &addresses, master: Ipv4Addr::LOCALHOST.into() };
        let streams = mesh.connect(&ears, self.deadline).map_err(RendezvousError::Refused)?;
        for guest in guests {
            match hear(&guest.stream, self.deadline + MARGIN).map_err(|error| lost(guest, error))? {
                Word::Connected => {}
                Word::Trouble(why) => return Err(RendezvousError::Refused(why)),
                _ => return Err(RendezvousError::Refused(format!("{} says what it should not", guest.card.who()))),
            }
        }
        for guest in guests {
            say(&guest.stream, &Word::Begin).map_err(|error| lost(guest, error))?;
        }
        Ok(streams)
    }

    /// Tells those who come late.
    fn turn_away(&self, door: &TcpListener, why: &str) {
        let start = Instant::now();
        while start.elapsed() < LINGER {
            match welcome(door) {
                // Who is gone needs no answer.
                Ok(Some(guest)) => drop(say(&guest.stream, &Word::Refused(why.to_owned()))),
                Ok(None) => std::thread::sleep(LOOK),
                Err(_) => return,
            }
        }
    }

    /// Every other rank's part.
    fn visit(&self) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
        let master = self.find_master()?;
        let ip = master.peer_addr()?.ip();
        let ears = mesh::listen(self.loopback().map(|_| ip), 0)?;
        say(&master, &Word::Here(self.card(ears.local_addr()?.port())))?;
        let (session, addresses) = match self.ask(&master)? {
            Word::Table { session, addresses } => (session, addresses),
            _ => return Err(RendezvousError::Refused("rank 0 says what it should not".to_owned())),
        };
        let mesh = Mesh { rank: self.rank as usize, session, addresses: &addresses, master: ip };
        let streams = mesh.connect(&ears, self.deadline);
        let word = match &streams {
            Ok(_) => Word::Connected,
            Err(why) => Word::Trouble(why.clone()),
        };
        say(&master, &word)?;
        let begun = self.ask(&master);
        // Its own trouble is nearer than what rank 0 makes of it.
        let streams = streams.map_err(RendezvousError::Refused)?;
        begun.map(|_| streams)
    }

    /// Rank 0's next word.
    fn ask(&self, master: &TcpStream) -> Result<Word, RendezvousError> {
        match hear(master, self.deadline + MARGIN) {
            Ok(Word::Refused(why)) => Err(RendezvousError::Refused(why)),
            Ok(word) => Ok(word),
            Err(error) => Err(self.no_master(match error.kind() {
                _ if is_timeout(&error) => "what is there says nothing".to_owned(),
                io::ErrorKind::UnexpectedEof => "what is there ended without a word".to_owned(),
                _ => error.to_string(),
            })),
        }
    }

    fn no_master(&self, why: String) -> RendezvousError {
        let (rank, host, port, waited) = (self.rank, self.host.clone(), self.port, self.deadline);
        RendezvousError::NoMaster { rank, host, port, waited, why }
    }

    /// Tries until rank 0 listens.
    fn find_master(&self) -> Result<TcpStream, RendezvousError> {
        let start = Instant::now();
        loop {
            let left = self.deadline.saturating_sub(start.elapsed());
            let why = match (self.host.as_str(), self.port).to_socket_addrs() {
                Err(error) if start.elapsed() >= LOOKUP.min(self.deadline) => {
                    return Err(self.no_master(format!("the name `{}` is not known: {error}", self.host)));
                }
                Err(error) => error.to_string(),
                Ok(addresses) => match mesh::reach(addresses, ATTEMPT.min(left.max(LOOK))) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => error.to_string(),
                },
            };
            if left.is_zero() {
                return Err(self.no_master(why));
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// Somebody at the door, if there is one who says who it is.
fn welcome(door: &TcpListener) -> io::Result<Option<Guest>> {
    let Some(stream) = mesh::accept(door)? else { return Ok(None) };
    // Strangers may knock anywhere.
    let Ok(Word::Here(card)) = hear(&stream, STRANGER) else { return Ok(None) };
    let ip = stream.peer_addr()?.ip().to_canonical();
    Ok(Some(Guest { card, stream, ip: Some(ip).filter(|ip| !ip.is_loopback()) }))
}

/// Why somebody cannot be part of rank 0's world.
fn misfit(own: &Card, card: &Card, guests: &[Guest]) -> Option<String> {
    let who = card.who();
    if card.version != own.version {
        let (theirs, ours) = (&card.version, &own.version);
        return Some(format!(
            "{who} is trainyard {theirs}, and {} is trainyard {ours}: start the same program everywhere",
            own.who()
        ));
    }
    if card.world != own.world {
        let (theirs, ours) = (card.world, own.world);
        return Some(format!(
            "{who} was started for a world of {theirs}, and {} for one of {ours}: WORLD_SIZE has to be the same everywhere",
            own.who()
        ));
    }
    let same = std::iter::once(own).chain(guests.iter().map(|guest| &guest.card)).find(|other| other.rank == card.rank);
    let place = |card: &Card| format!("process {} on host {}", card.pid, card.host);
    same.map(|other| {
        format!(
            "two processes are rank {}: {} and {}: every process needs a RANK of its own",
            card.rank,
            place(other),
            place(card)
        )
    })
}
