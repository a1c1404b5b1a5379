//! The keeper's end: a thread that connects the roster with the hosts.

use super::member::Member;
use super::roster::{KEEPER, Limits, Order, Report, Roster};
use super::{HEARTBEAT, HostCard, SILENCE};
use crate::Note;
use crate::tcp::door::{Door, Visitor};
use crate::tcp::secret::{JobSecret, Purpose};
use crate::tcp::words::{Word, hear, say};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The interval at which the thread looks for hosts, reports and deadlines.
const LOOK: Duration = Duration::from_millis(10);
/// The time for which the meeting stays after the run, for hosts that have not read its end.
const LINGER: Duration = Duration::from_secs(5);
/// The time that a host may take to accept a word.
const SENDING: Duration = Duration::from_secs(2);

/// The host that keeps the roster, before it does.
pub struct Keeper<'a> {
    /// Name or address of the keeper's host, as all hosts know it.
    pub host: &'a str,
    /// The port at which hosts come.
    pub port: u16,
    /// The address to listen at; None: the one of this host that `host` means.
    pub listen: Option<IpAddr>,
    /// The key of the job.
    pub secret: &'a JobSecret,
    /// The bounds of the run.
    pub limits: Limits,
    /// Called with what is worth knowing.
    pub note: Note,
}

/// A running roster. Dropping it waits until all hosts know the end.
pub struct Meeting {
    ip: IpAddr,
    port: u16,
    /// Tells the keeper's own host from others.
    token: u64,
    thread: Option<JoinHandle<()>>,
}

impl Keeper<'_> {
    /// Opens the meeting if `host` means this host, and nobody keeps a roster there yet; else
    /// returns None. `free_port` gives ports for the ranks to meet at.
    ///
    /// # Errors
    /// If the port cannot be listened at for another reason than that somebody does.
    pub fn open_if_named(&self, free_port: impl FnMut() -> u16 + Send + 'static) -> io::Result<Option<Meeting>> {
        match self.door_at_name() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            door => Ok(door?.map(|door| self.start(door, free_port))),
        }
    }

    /// Opens the meeting on this host, whatever `host` means here.
    ///
    /// # Errors
    /// If the port cannot be listened at.
    pub fn open(&self, free_port: impl FnMut() -> u16 + Send + 'static) -> io::Result<Meeting> {
        let door = match self.listen {
            Some(ip) => self.door(Some(ip))?,
            None => self.door_at_name()?.map_or_else(|| self.door(None), Ok)?,
        };
        Ok(self.start(door, free_port))
    }

    fn door(&self, ip: Option<IpAddr>) -> io::Result<Door> {
        Door::open(0, 0, ip, self.port, self.secret, Purpose::Hosts, self.note)
    }

    /// The door at the first address of this host that `host` means, if it means one.
    fn door_at_name(&self) -> io::Result<Option<Door>> {
        let is_loopback = self.host == "localhost" || self.host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        // A name that is not known here is not this host's.
        for address in (self.host, self.port).to_socket_addrs().into_iter().flatten() {
            // A host's own name may mean loopback there; other hosts come by another address.
            let is_own_name = address.ip().is_loopback() && !is_loopback;
            match self.door(Some(address.ip()).filter(|_| !is_own_name)) {
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {}
                opened => return opened.map(Some),
            }
        }
        Ok(None)
    }

    fn start(&self, door: Door, free_port: impl FnMut() -> u16 + Send + 'static) -> Meeting {
        let token = RandomState::new().hash_one(std::process::id());
        let (ip, port) = (door.ip().unwrap_or(Ipv4Addr::LOCALHOST.into()), door.port());
        let (reports, heard) = channel();
        let roster = Roster::new(self.limits);
        let began = Instant::now();
        let mut table = Table {
            token,
            roster,
            began,
            guests: BTreeMap::new(),
            early: Vec::new(),
            next: KEEPER + 1,
            reports,
            heard,
            free_port: Box::new(free_port),
        };
        let thread = std::thread::spawn(move || table.keep(&door));
        Meeting { ip, port, token, thread: Some(thread) }
    }
}

impl Meeting {
    /// The keeper's own host joins with `ranks`.
    ///
    /// # Errors
    /// As [`Member::join`].
    pub fn join(&self, ranks: u32, run: Option<String>, secret: &JobSecret, patience: Duration) -> io::Result<Member> {
        Member::join((&self.ip.to_string(), self.port), Some(self.token), ranks, run, secret, patience)
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic there has told itself.
            let _ = thread.join();
        }
    }
}

/// The part of a meeting that its thread owns.
struct Table {
    token: u64,
    roster: Roster,
    began: Instant,
    guests: BTreeMap<u64, Guest>,
    /// Hosts that came before the keeper's own.
    early: Vec<Guest>,
    /// Number of the next host.
    next: u64,
    reports: Sender<(u64, Option<Report>)>,
    heard: Receiver<(u64, Option<Report>)>,
    free_port: Box<dyn FnMut() -> u16 + Send>,
}

struct Guest {
    card: HostCard,
    stream: TcpStream,
    /// When it was last heard of.
    heard: Instant,
}

impl Table {
    /// Keeps the roster until the run is over.
    fn keep(&mut self, door: &Door) {
        let mut beat = Instant::now();
        let mut over: Option<Instant> = None;
        loop {
            if let Some(visitor) = door.next(LOOK) {
                self.receive(visitor, door);
            }
            while let Ok((id, report)) = self.heard.try_recv() {
                match (report, self.guests.get_mut(&id)) {
                    (Some(report), Some(guest)) => {
                        guest.heard = Instant::now();
                        let orders = self.roster.report(id, report, self.began.elapsed());
                        self.send(orders);
                    }
                    (None, Some(_)) => self.lose(id),
                    (_, None) => {}
                }
            }
            let silent = self.guests.iter().find(|(_, guest)| guest.heard.elapsed() > SILENCE).map(|(id, _)| *id);
            silent.into_iter().for_each(|id| self.lose(id));
            if beat.elapsed() >= HEARTBEAT {
                beat = Instant::now();
                self.send(self.guests.keys().map(|id| (*id, Order::Alive)).collect());
            }
            let orders = self.roster.decide(self.began.elapsed(), &mut *self.free_port);
            self.send(orders);
            if self.roster.is_over() {
                let since = over.get_or_insert_with(Instant::now);
                if self.guests.is_empty() || since.elapsed() > LINGER {
                    break;
                }
            }
        }
    }

    /// Takes a process in that has proved the secret.
    fn receive(&mut self, Visitor { word, stream, ip }: Visitor, door: &Door) {
        let Word::Host { card, token } = word else {
            door.strangers().add(ip, "it says what it should not");
            return;
        };
        let own = env!("CARGO_PKG_VERSION");
        if card.version != own {
            let why = format!("it has version {} of trainyard, and the run has {own}", card.version);
            door.strangers().add(ip, &why);
            // A process that is gone needs no answer.
            let _ = say(&stream, &Word::Refused(why), SENDING);
            return;
        }
        let guest = Guest { card, stream, heard: Instant::now() };
        if token == Some(self.token) {
            self.seat(KEEPER, guest);
            std::mem::take(&mut self.early).into_iter().for_each(|guest| self.seat_next(guest));
        } else if self.guests.contains_key(&KEEPER) || self.roster.is_over() {
            self.seat_next(guest);
        } else {
            self.early.push(guest);
        }
    }

    fn seat_next(&mut self, guest: Guest) {
        let id = self.next;
        self.next += 1;
        self.seat(id, guest);
    }

    fn seat(&mut self, id: u64, guest: Guest) {
        let listened = guest.stream.try_clone();
        let card = guest.card.clone();
        self.guests.insert(id, Guest { heard: Instant::now(), ..guest });
        let Ok(stream) = listened else { return self.lose(id) };
        let reports = self.reports.clone();
        std::thread::spawn(move || {
            while let Ok(Word::Report(report)) = hear(&stream, SILENCE) {
                if reports.send((id, Some(report))).is_err() {
                    return;
                }
            }
            // The meeting may be over.
            let _ = reports.send((id, None));
        });
        let orders = self.roster.join(id, card, self.began.elapsed());
        self.send(orders);
    }

    fn lose(&mut self, id: u64) {
        self.guests.remove(&id);
        let orders = self.roster.lose(id, self.began.elapsed());
        self.send(orders);
    }

    /// Sends orders. A host that takes none is lost.
    fn send(&mut self, orders: Vec<(u64, Order)>) {
        for (id, order) in orders {
            let Some(guest) = self.guests.get(&id) else { continue };
            if say(&guest.stream, &Word::Order(order), SENDING).is_err() {
                self.lose(id);
            }
        }
    }
}
