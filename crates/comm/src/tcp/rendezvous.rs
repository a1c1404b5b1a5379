//! The start of a world: processes that know one address find each other.
//!
//! Rank 0 listens at the master's address ([`super::door`]) and collects everybody's card: rank,
//! world size, version, host, and the address where it listens for its peers. When all have come it
//! hands out the table of addresses, everybody connects ([`super::mesh`]) and says so, and rank 0
//! lets them begin. A process that does not fit is told why and turned away; the start goes on.
//! Other errors rank 0 tells all who have come or come soon after, so that every process ends with
//! the same sentence.
//!
//! Two times bound the start. `patience` is for ranks that have not come: they may be started by
//! hand. `silence` is for ranks that have come: from then on they are bound as in any exchange.

use super::door::{self, Door, Visitor};
use super::mesh::{self, Mesh};
use super::secret::{JobSecret, Purpose};
use super::transport::Tcp;
use super::words::{Address, Card, Word, greet, hear, is_timeout, say};
use crate::Note;
use crate::communicator::{Communicator, DEADLINE_DEFAULT};
use crate::error::CommError;
use crate::place::Place;
use crate::processes;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time in which ranks have to come, unless told otherwise.
pub const RENDEZVOUS_DEFAULT: Duration = DEADLINE_DEFAULT;
/// The environment variable that names the address at which a process listens.
pub const LISTEN_VARIABLE: &str = "TRAINYARD_LISTEN_ADDRESS";
/// The time for which rank 0 stays after a failed start, to tell ranks that come late.
const LINGER: Duration = Duration::from_secs(2);
/// The time for which a name may be unknown.
const LOOKUP: Duration = Duration::from_secs(20);
/// The time that one attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Other ranks wait for rank 0 this much longer than rank 0 waits for them.
const MARGIN: Duration = Duration::from_secs(5);
/// The pause between two looks or attempts.
pub(super) const LOOK: Duration = Duration::from_millis(10);

/// The place of a process in a world, and the terms on which it joins.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    /// Name or address of rank 0's host.
    pub host: String,
    /// Port at which rank 0 listens until all have come.
    pub port: u16,
    /// Rank of this process.
    pub rank: u32,
    /// Processes of the world.
    pub world: u32,
    /// Time in which ranks have to come.
    pub patience: Duration,
    /// Time for which a rank that has come may be silent.
    pub silence: Duration,
    /// The program's version, which has to be the same in all processes.
    pub version: String,
    /// The key that proves a connection to be of this job.
    pub secret: JobSecret,
    /// The address of this host to listen at; none: that of the route to rank 0's host, or
    /// loopback where `host` is a loopback address.
    pub listen: Option<IpAddr>,
    /// Called, also from other threads, with what is worth knowing of a start that goes on, such as
    /// connections that were turned away.
    pub note: Note,
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
        /// Time that it looked for.
        waited: Duration,
        /// The error of the last attempt.
        why: String,
    },
    /// Ranks did not come.
    #[error("{} of a world of {world} did not come to {host}:{port} within {:.1} s: see what they say, and whether their hosts reach this one{strangers}", ranks(missing), waited.as_secs_f64())]
    Missing {
        /// The ranks.
        missing: Box<[u32]>,
        /// Processes of the world.
        world: u32,
        /// Where they should have come.
        host: Box<str>,
        /// Port of it.
        port: u16,
        /// Time that was waited.
        waited: Duration,
        /// The connections that were turned away meanwhile, in words.
        strangers: Box<str>,
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

/// A rank that has come to rank 0.
struct Guest {
    card: Card,
    stream: TcpStream,
    /// Where it listens, as seen from here; none on this host.
    ip: Option<IpAddr>,
}

impl Rendezvous {
    /// `rank` of `world` at rank 0's `host` and `port`, with this program's version, no secret and
    /// no notes.
    pub fn new(host: impl Into<String>, port: u16, rank: u32, world: u32) -> Self {
        Self {
            host: host.into(),
            port,
            rank,
            world,
            patience: RENDEZVOUS_DEFAULT,
            silence: DEADLINE_DEFAULT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            secret: JobSecret::nothing(),
            listen: None,
            note: |_| {},
        }
    }

    /// Joins the world: returns when every rank is connected with every other one.
    ///
    /// # Errors
    /// When somebody does not come or does not fit.
    pub fn join(&self) -> Result<Communicator, RendezvousError> {
        let streams = if self.rank == 0 { self.invite() } else { self.visit() }?;
        let tcp = Tcp::start(self.rank as usize, streams)?;
        Ok(processes::world(Arc::new(tcp), self.silence)?)
    }

    fn card(&self, ip: Option<IpAddr>, port: u16) -> Card {
        let here = Place::here(0);
        let (version, rank, world) = (self.version.clone(), self.rank, self.world);
        Card { version, rank, world, host: here.host, pid: here.pid, ip, port }
    }

    /// The loopback address that the master's name means, if it says that all ranks are on this
    /// host. (A host's own name may be a loopback address as well, for that host alone.)
    fn loopback(&self) -> Option<IpAddr> {
        if self.host == "localhost" {
            let mut addresses = (self.host.as_str(), self.port).to_socket_addrs().ok()?;
            return addresses.next().map(|address| address.ip()).filter(IpAddr::is_loopback);
        }
        self.host.parse().ok().filter(IpAddr::is_loopback)
    }

    fn open(&self, ip: Option<IpAddr>, port: u16, purpose: Purpose) -> io::Result<Door> {
        Door::open(self.rank, self.world, ip, port, &self.secret, purpose, self.note)
    }

    /// Listens where the other ranks look for rank 0: at the address that was chosen, at loopback,
    /// else at the address of this host that the master's name means.
    fn open_master(&self) -> Result<Door, RendezvousError> {
        let open = |ip| self.open(ip, self.port, Purpose::Meeting);
        let error = |source| RendezvousError::Listen { port: self.port, source };
        if let Some(ip) = self.listen.or_else(|| self.loopback()) {
            return open(Some(ip)).map_err(error);
        }
        let named = (self.host.as_str(), self.port).to_socket_addrs().into_iter().flatten().map(|address| address.ip());
        for ip in named.filter(|ip| !ip.is_loopback()) {
            match open(Some(ip)) {
                Err(missing) if missing.kind() == io::ErrorKind::AddrNotAvailable => {}
                opened => return opened.map_err(error),
            }
        }
        (self.note)(&format!(
            "rank 0 listens at all addresses of its host until the ranks have come, because `{}` means none of them here; {LISTEN_VARIABLE} chooses one",
            self.host
        ));
        open(None).map_err(error)
    }

    /// Rank 0's part.
    fn invite(&self) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
        let door = self.open_master()?;
        let mut guests = Vec::new();
        let result = self.gather(&door, &mut guests).and_then(|()| self.connect(&door, &guests));
        if let Err(error) = &result {
            let refusal = Word::Refused(error.to_string());
            for guest in &guests {
                // A guest that is gone needs no answer.
                let _ = say(&guest.stream, &refusal, MARGIN);
            }
            let end = Instant::now() + LINGER;
            while let Some(late) = door.next(end.saturating_duration_since(Instant::now())) {
                // As above.
                let _ = say(&late.stream, &refusal, MARGIN);
            }
        }
        result
    }

    /// Waits for everybody.
    fn gather(&self, door: &Door, guests: &mut Vec<Guest>) -> Result<(), RendezvousError> {
        let own = self.card(None, 0);
        let start = Instant::now();
        while guests.len() + 1 < self.world as usize {
            let left = self.patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                let has_come = |rank: &u32| guests.iter().any(|guest| guest.card.rank == *rank);
                return Err(RendezvousError::Missing {
                    missing: (1..self.world).filter(|rank| !has_come(rank)).collect(),
                    world: self.world,
                    host: self.host.as_str().into(),
                    port: self.port,
                    waited: start.elapsed(),
                    strangers: door.strangers().summary().into(),
                });
            }
            let Some(Visitor { word, stream, ip }) = door.next(left) else { continue };
            let Word::Here(card) = word else {
                door.strangers().add(ip, "it says what it should not");
                continue;
            };
            // A process that has ended makes room for another one with its rank.
            guests.retain(|guest| {
                let stays = guest.card.rank != card.rank || !is_gone(&guest.stream);
                if !stays {
                    (self.note)(&format!("{} came and is gone; its place is free again", guest.card.who()));
                }
                stays
            });
            if let Some(why) = misfit(&own, &card, guests) {
                door.strangers().add(ip, &why);
                // A process that is gone needs no answer.
                let _ = say(&stream, &Word::Refused(why), MARGIN);
                continue;
            }
            let ip = card.ip.unwrap_or(ip).to_canonical();
            guests.push(Guest { card, stream, ip: Some(ip).filter(|ip| !ip.is_loopback()) });
        }
        Ok(())
    }

    /// Hands out the table, connects, and lets everybody begin.
    fn connect(&self, door: &Door, guests: &[Guest]) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
        let ears = self.open(door.ip(), 0, Purpose::Link)?;
        let own = Address { host: Place::here(0).host, ip: None, port: ears.port() };
        let mut addresses = vec![own; self.world as usize];
        for Guest { card, ip, .. } in guests {
            // Misfits are no guests, so the rank is one of the world.
            addresses[card.rank as usize] = Address { host: card.host.clone(), ip: *ip, port: card.port };
        }
        let session = RandomState::new().hash_one(std::process::id());
        let table = Word::Table { session, addresses: addresses.clone() };
        let lost = |guest: &Guest, error: io::Error| {
            let who = guest.card.who();
            RendezvousError::Refused(match is_timeout(&error) {
                true => format!("{who} came and then said nothing for {:.1} s", self.silence.as_secs_f64()),
                false => format!("{who} was lost while the ranks were connected: {error}"),
            })
        };
        let end = Instant::now() + self.silence;
        for guest in guests {
            say(&guest.stream, &table, self.silence).map_err(|error| lost(guest, error))?;
        }
        let master = Ipv4Addr::LOCALHOST.into();
        let mesh = Mesh { rank: 0, session, addresses: &addresses, master, secret: &self.secret };
        let streams = mesh.connect(&ears, self.silence).map_err(RendezvousError::Refused)?;
        for guest in guests {
            // Each rank waits as long for the others as this one did.
            let left = end.saturating_duration_since(Instant::now()) + MARGIN.min(self.silence);
            match hear(&guest.stream, left).map_err(|error| lost(guest, error))? {
                Word::Connected => {}
                Word::Trouble(why) => return Err(RendezvousError::Refused(why)),
                _ => return Err(RendezvousError::Refused(format!("{} says what it should not", guest.card.who()))),
            }
        }
        for guest in guests {
            say(&guest.stream, &Word::Begin, self.silence).map_err(|error| lost(guest, error))?;
        }
        Ok(streams)
    }

    /// Every other rank's part.
    fn visit(&self) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
        let master = self.find_master()?;
        let ip = master.peer_addr()?.ip();
        // The interface of the route to rank 0 is the one by which other ranks come. The name of a
        // host may be a loopback address there: the ranks of other hosts then come by another one.
        let route = match self.loopback() {
            Some(_) => Some(ip),
            None => Some(master.local_addr()?.ip()).filter(|ip| !ip.is_loopback()),
        };
        let ears = self.open(self.listen.or(route), 0, Purpose::Link)?;
        let chosen = self.listen.and_then(|_| ears.ip());
        say(&master, &Word::Here(self.card(chosen, ears.port())), self.silence)?;
        let table = self.ask(&master, self.patience.saturating_add(MARGIN))?;
        let Word::Table { session, addresses } = table else {
            return Err(RendezvousError::Refused("rank 0 says what it should not".to_owned()));
        };
        if addresses.len() != self.world as usize {
            let (count, world) = (addresses.len(), self.world);
            return Err(RendezvousError::Refused(format!(
                "rank 0 handed out the addresses of {count} ranks, and the world has {world}"
            )));
        }
        let (rank, secret) = (self.rank as usize, &self.secret);
        let mesh = Mesh { rank, session, addresses: &addresses, master: ip, secret };
        let streams = mesh.connect(&ears, self.silence);
        let word = match &streams {
            Ok(_) => Word::Connected,
            Err(why) => Word::Trouble(why.clone()),
        };
        say(&master, &word, self.silence)?;
        let begun = self.ask(&master, self.silence.saturating_add(MARGIN));
        // Its own trouble is nearer than what rank 0 makes of it.
        let streams = streams.map_err(RendezvousError::Refused)?;
        match begun? {
            Word::Begin => Ok(streams),
            _ => Err(RendezvousError::Refused("rank 0 says what it should not".to_owned())),
        }
    }

    /// Rank 0's next word.
    fn ask(&self, master: &TcpStream, patience: Duration) -> Result<Word, RendezvousError> {
        match hear(master, patience) {
            Ok(Word::Refused(why)) => Err(RendezvousError::Refused(why)),
            Ok(word) => Ok(word),
            Err(error) => Err(self.no_master(patience, error_in_words(&error))),
        }
    }

    fn no_master(&self, waited: Duration, why: String) -> RendezvousError {
        let (rank, host, port) = (self.rank, self.host.clone(), self.port);
        RendezvousError::NoMaster { rank, host, port, waited, why }
    }

    /// Tries until rank 0 listens and knows this job's secret.
    fn find_master(&self) -> Result<TcpStream, RendezvousError> {
        let start = Instant::now();
        loop {
            let left = self.patience.saturating_sub(start.elapsed());
            let why = match (self.host.as_str(), self.port).to_socket_addrs() {
                Err(error) if start.elapsed() >= LOOKUP.min(self.patience) => {
                    return Err(
                        self.no_master(start.elapsed(), format!("the name `{}` is not known: {error}", self.host))
                    );
                }
                Err(error) => error.to_string(),
                Ok(addresses) => {
                    let found = mesh::reach(addresses, ATTEMPT.min(left.max(LOOK))).and_then(|stream| {
                        greet(&stream, &self.secret, Purpose::Meeting, door::PATIENCE.min(left.max(LOOK)))?;
                        Ok(stream)
                    });
                    match found {
                        Ok(stream) => return Ok(stream),
                        // Another program, another version or another job: waiting changes nothing.
                        Err(error)
                            if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::PermissionDenied) =>
                        {
                            return Err(self.no_master(start.elapsed(), error.to_string()));
                        }
                        Err(error) => error_in_words(&error),
                    }
                }
            };
            if left.is_zero() {
                return Err(self.no_master(self.patience, why));
            }
            std::thread::sleep(LOOK);
        }
    }
}

fn error_in_words(error: &io::Error) -> String {
    match error.kind() {
        _ if is_timeout(error) => "what is there says nothing".to_owned(),
        io::ErrorKind::UnexpectedEof => "what is there ended without a word".to_owned(),
        _ => error.to_string(),
    }
}

/// True if the other end has closed or lost the connection.
fn is_gone(stream: &TcpStream) -> bool {
    let looked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let is_open = match looked {
        Ok(bytes) => bytes > 0,
        Err(error) => matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
    };
    // A socket that cannot be set back is of no more use.
    stream.set_nonblocking(false).is_err() || !is_open
}

/// The reason why a process cannot be part of rank 0's world, if there is one.
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
    if card.rank >= own.world {
        return Some(format!("{who} is no rank of a world of {}: RANK counts from 0", own.world));
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const PATIENCE: Duration = Duration::from_secs(30);
    const SILENCE: Duration = Duration::from_millis(300);

    /// A rank's place at a port of this host that `door` holds or that was free before.
    fn rendezvous(port: u16, rank: u32, world: u32) -> Rendezvous {
        Rendezvous { patience: PATIENCE, silence: SILENCE, ..Rendezvous::new("127.0.0.1", port, rank, world) }
    }

    #[test]
    fn a_wrong_table_of_a_false_master_is_an_error() {
        let wrong = |count: usize| {
            let door = rendezvous(0, 0, 3).open(Some(Ipv4Addr::LOCALHOST.into()), 0, Purpose::Meeting).unwrap();
            let port = door.port();
            let joined = thread::spawn(move || rendezvous(port, 2, 3).join().err().unwrap().to_string());
            let visitor = door.next(PATIENCE).unwrap();
            let address = Address { host: "x".into(), ip: None, port: 1 };
            let table = Word::Table { session: 1, addresses: vec![address; count] };
            say(&visitor.stream, &table, PATIENCE).unwrap();
            joined.join().unwrap()
        };
        for count in [0, 1, 2, 4, 1000] {
            let error = wrong(count);
            let says = format!("rank 0 handed out the addresses of {count} ranks, and the world has 3");
            assert!(error.contains(&says), "{error}");
        }
    }

    #[test]
    fn a_rank_that_came_and_died_makes_room_for_its_replacement() {
        let door = rendezvous(0, 0, 3).open(Some(Ipv4Addr::LOCALHOST.into()), 0, Purpose::Meeting).unwrap();
        let port = door.port();
        let come = |rank: u32| {
            let guest = rendezvous(port, rank, 3);
            let stream = guest.find_master().unwrap();
            say(&stream, &Word::Here(guest.card(None, 1)), PATIENCE).unwrap();
            stream
        };
        drop(come(1));
        let _streams = [come(1), come(2)];
        let mut guests = Vec::new();
        rendezvous(port, 0, 3).gather(&door, &mut guests).unwrap();
        assert_eq!(guests.iter().map(|guest| guest.card.rank).collect::<Vec<_>>(), [1, 2]);
        assert!(guests.iter().all(|guest| !is_gone(&guest.stream)));
    }

    #[test]
    fn a_rank_that_comes_and_is_silent_obeys_the_deadline() {
        // A port that is free now.
        let port = rendezvous(0, 0, 2).open(Some(Ipv4Addr::LOCALHOST.into()), 0, Purpose::Meeting).unwrap().port();
        let master = thread::spawn(move || rendezvous(port, 0, 2).join().err().unwrap().to_string());
        let silent = rendezvous(port, 1, 2);
        let stream = silent.find_master().unwrap();
        say(&stream, &Word::Here(silent.card(None, 1)), PATIENCE).unwrap();
        // Rank 0 gives up on it, though it would wait for ranks that have not come.
        let error = master.join().unwrap();
        assert!(error.contains("rank 1 (host") && error.contains("did not connect to rank 0"), "{error}");
        assert!(error.contains("within 0.3 s"), "{error}");
    }
}
