//! A listening socket that lets in the processes of its job and nobody else.
//!
//! A thread takes all connections and reads from each what has come, without waiting for any of
//! them: a caller that is slow or silent keeps nobody else waiting. A caller that has proved the
//! job's secret ([`super::secret`]) and said one word is handed over. Every other one is a
//! stranger: its connection is closed, it is counted, and the first few are named in notes.
//! Nothing that a stranger sends ends the start. The callers that are held are bounded, with and
//! without a proof, and so are those that nobody has taken in yet: without a secret strangers can
//! prove what the processes of the job prove.

use super::rendezvous::LOOK;
use super::secret::{End, JobSecret, Nonce, Proof, Purpose, nonce};
use super::words::{self, FIRST_WORD_BYTES_MAX, GREETING_BYTES, UNKNOWN, WELCOME, Word};
use crate::{Note, warning};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time in which a caller has to prove the secret and say its word.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Callers without a proof that are waited for at once. When one more comes, the one that has
/// waited longest has to go: a process of the job needs two round trips, and tries again. Callers
/// with a proof are bounded by this many more than the processes of the world, and so are visitors
/// that nobody has taken in.
const CALLERS_MAX: usize = 128;
/// The pause while nobody calls is [`LOOK`], and this one while somebody is listened to.
const LISTEN: Duration = Duration::from_millis(1);
/// Strangers that are named; the others are counted.
const NAMED_MAX: usize = 3;

/// A process of the job that has come in.
pub(super) struct Visitor {
    pub word: Word,
    pub stream: TcpStream,
    /// The address that it comes from.
    pub ip: IpAddr,
}

/// A listening socket and its thread. Dropping it closes the socket.
pub(super) struct Door {
    address: SocketAddr,
    visitors: Receiver<Visitor>,
    strangers: Arc<Strangers>,
    is_closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Connections that were turned away.
pub(super) struct Strangers {
    /// The rank that listens.
    rank: u32,
    note: Note,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    count: usize,
    /// The first of them, in words.
    named: Vec<String>,
}

impl Strangers {
    /// Counts a connection from `ip` that was turned away because of `why`, and names the first.
    pub fn add(&self, ip: IpAddr, why: &str) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.count += 1;
        if seen.named.len() < NAMED_MAX {
            let stranger = format!("one from {}: {why}", ip.to_canonical());
            (self.note)(&warning(format_args!("rank {} turned a connection away, {stranger}", self.rank)));
            seen.named.push(stranger);
        }
    }

    /// `; 5 connections were turned away: one from ...`, or nothing.
    pub fn summary(&self) -> String {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let more = match seen.count - seen.named.len() {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        match seen.count {
            0 => String::new(),
            1 => format!("; a connection was turned away, {}", seen.named[0]),
            count => format!("; {count} connections were turned away: {}{more}", seen.named.join("; ")),
        }
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        let seen = self.seen.get_mut().unwrap_or_else(PoisonError::into_inner);
        let more = seen.count - seen.named.len();
        if more > 0 {
            (self.note)(&warning(format_args!("rank {} turned {more} more connections away", self.rank)));
        }
    }
}

impl Door {
    /// Listens at `port` (0: any that is free) of `ip`, or of all addresses of this host, for
    /// callers that know `secret` and come for `purpose`. Up to `world` processes may come at once.
    pub fn open(
        rank: u32,
        world: u32,
        ip: Option<IpAddr>,
        port: u16,
        secret: &JobSecret,
        purpose: Purpose,
        note: Note,
    ) -> io::Result<Door> {
        let listener = listen(ip, port)?;
        let address = listener.local_addr()?;
        let proved_max = CALLERS_MAX + world as usize;
        let (sender, visitors) = sync_channel(proved_max);
        let strangers = Arc::new(Strangers { rank, note, seen: Mutex::default() });
        let is_closing = Arc::new(AtomicBool::new(false));
        let mut porter = Porter {
            listener,
            secret: secret.clone(),
            purpose,
            callers: VecDeque::new(),
            proved_max,
            visitors: sender,
            strangers: Arc::clone(&strangers),
        };
        let closing = Arc::clone(&is_closing);
        let thread = std::thread::Builder::new().name("comm-door".to_owned()).spawn(move || {
            while !closing.load(Ordering::Relaxed) {
                porter.look();
                std::thread::sleep(if porter.callers.is_empty() { LOOK } else { LISTEN });
            }
        })?;
        Ok(Door { address, visitors, strangers, is_closing, thread: Some(thread) })
    }

    /// The port that it listens at.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// The address that it listens at, unless that is all of them.
    pub fn ip(&self) -> Option<IpAddr> {
        Some(self.address.ip()).filter(|ip| !ip.is_unspecified())
    }

    /// The next process of the job that comes within `patience`.
    pub fn next(&self, patience: Duration) -> Option<Visitor> {
        self.visitors.recv_timeout(patience).ok()
    }

    /// The connections that it turned away.
    pub fn strangers(&self) -> &Strangers {
        &self.strangers
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.is_closing.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic there has told itself.
            let _ = thread.join();
        }
    }
}

/// Listens at an address of this host, or at all of them.
fn listen(at: Option<IpAddr>, port: u16) -> io::Result<TcpListener> {
    // Where there is IPv6, its unspecified address means IPv4 too.
    let everywhere = || match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        bound => bound,
    };
    let listener = at.map_or_else(everywhere, |ip| TcpListener::bind((ip, port)))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The part of a door that its thread owns.
struct Porter {
    listener: TcpListener,
    secret: JobSecret,
    purpose: Purpose,
    /// In the order in which they came.
    callers: VecDeque<Caller>,
    /// Most callers with a proof, and most visitors that nobody has taken in.
    proved_max: usize,
    visitors: SyncSender<Visitor>,
    strangers: Arc<Strangers>,
}

/// A connection that has not said all that it has to say.
struct Caller {
    stream: TcpStream,
    ip: IpAddr,
    since: Instant,
    nonce: Nonce,
    stage: Stage,
    /// The bytes of this stage that have come.
    come: Vec<u8>,
}

/// The bytes that a caller has to send next.
#[derive(Clone, Copy)]
enum Stage {
    Greeting,
    Proof { caller: Nonce },
    WordLength,
    Word { bytes: usize },
}

impl Stage {
    fn bytes(self) -> usize {
        match self {
            Stage::Greeting => GREETING_BYTES,
            Stage::Proof { .. } => size_of::<Proof>(),
            Stage::WordLength => 4,
            Stage::Word { bytes } => bytes,
        }
    }
}

impl Porter {
    /// Takes the connections that have come, and reads what callers have sent.
    fn look(&mut self) {
        // As many as are held at most: those who are held must be read from in between.
        for _ in 0..CALLERS_MAX {
            match self.accept() {
                Ok(true) => {}
                Ok(false) => break,
                // The process may have no more sockets: whoever has waited longest gives one back.
                Err(error) => {
                    let why = format!("this process can take no more connections: {error}");
                    if !self.drop_oldest(Caller::is_unproved, &why) {
                        self.drop_oldest(Caller::has_proved, &why);
                    }
                    break;
                }
            }
        }
        for _ in 0..self.callers.len() {
            let Some(mut caller) = self.callers.pop_front() else { break };
            match caller.listen(&self.secret, self.purpose) {
                Ok(None) if caller.since.elapsed() < PATIENCE => self.callers.push_back(caller),
                Ok(None) => {
                    let why = format!("it did not say who it is within {} s", PATIENCE.as_secs());
                    self.strangers.add(caller.ip, &why);
                }
                Ok(Some(word)) => match caller.stream.set_nonblocking(false) {
                    Ok(()) => {
                        let visitor = Visitor { word, stream: caller.stream, ip: caller.ip };
                        // Nobody waits for visitors while the door is being closed.
                        if let Err(TrySendError::Full(visitor)) = self.visitors.try_send(visitor) {
                            self.strangers.add(visitor.ip, "it came while too many others waited to be taken in");
                        }
                    }
                    Err(error) => self.strangers.add(caller.ip, &error.to_string()),
                },
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    self.strangers.add(caller.ip, "it left before it had said who it is");
                }
                Err(error) => self.strangers.add(caller.ip, &error.to_string()),
            }
        }
    }

    /// Takes one connection, if one has come.
    fn accept(&mut self) -> io::Result<bool> {
        let (mut stream, address) = match self.listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            // A caller that left before it was let in.
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        let why = "it did not say who it is before many others came";
        let proved = self.callers.iter().filter(|caller| caller.has_proved()).count();
        if self.callers.len() - proved >= CALLERS_MAX {
            self.drop_oldest(Caller::is_unproved, why);
        }
        for _ in self.proved_max..proved {
            self.drop_oldest(Caller::has_proved, why);
        }
        let nonce = nonce()?;
        let greeted = stream
            .set_nonblocking(true)
            .and_then(|()| stream.set_nodelay(true))
            // The buffer of a new connection has room for it.
            .and_then(|()| stream.write_all(&words::greeting(&nonce)));
        let (ip, since) = (address.ip(), Instant::now());
        match greeted {
            Ok(()) => {
                self.callers.push_back(Caller { stream, ip, since, nonce, stage: Stage::Greeting, come: Vec::new() });
            }
            Err(error) => self.strangers.add(ip, &error.to_string()),
        }
        Ok(true)
    }

    /// Lets the caller of a `kind` go that has waited longest. Returns false if there is none.
    fn drop_oldest(&mut self, kind: fn(&Caller) -> bool, why: &str) -> bool {
        let oldest = self.callers.iter().position(kind).and_then(|oldest| self.callers.remove(oldest));
        if let Some(caller) = &oldest {
            self.strangers.add(caller.ip, why);
        }
        oldest.is_some()
    }
}

impl Caller {
    fn has_proved(&self) -> bool {
        matches!(self.stage, Stage::WordLength | Stage::Word { .. })
    }

    fn is_unproved(&self) -> bool {
        !self.has_proved()
    }

    /// Reads what has come; the caller's word, when it is complete.
    ///
    /// # Errors
    /// When it is a stranger.
    fn listen(&mut self, secret: &JobSecret, purpose: Purpose) -> io::Result<Option<Word>> {
        loop {
            let bytes = self.stage.bytes();
            let have = self.come.len();
            if have < bytes {
                // Stages are short: their lengths are bounded before this.
                self.come.resize(bytes, 0);
                let read = self.stream.read(&mut self.come[have..]);
                self.come.truncate(have + *read.as_ref().unwrap_or(&0));
                match read {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
                if matches!(self.stage, Stage::Greeting) {
                    words::check_mark(&self.come)?;
                }
                continue;
            }
            if let Some(word) = self.advance(secret, purpose)? {
                return Ok(Some(word));
            }
            self.come.clear();
        }
    }

    /// Takes in a complete stage.
    fn advance(&mut self, secret: &JobSecret, purpose: Purpose) -> io::Result<Option<Word>> {
        self.stage = match self.stage {
            Stage::Greeting => {
                let (_, caller) = self.come.split_at(words::MARK.len());
                Stage::Proof { caller: caller.try_into().expect("the rest of a greeting is the random number") }
            }
            Stage::Proof { caller } => {
                if !secret.accepts(&self.come, End::Caller, purpose, &caller, &self.nonce) {
                    // A caller that does not take the answer learns the same from the end.
                    let _ = self.stream.write(&[UNKNOWN]);
                    return Err(io::Error::other("it does not know this job's secret"));
                }
                let proof = secret.prove(End::Listener, purpose, &caller, &self.nonce);
                self.stream.write_all(&[&[WELCOME], &proof[..]].concat())?;
                Stage::WordLength
            }
            Stage::WordLength => {
                let head = [self.come[0], self.come[1], self.come[2], self.come[3]];
                Stage::Word { bytes: words::word_bytes(head, FIRST_WORD_BYTES_MAX)? }
            }
            Stage::Word { .. } => return Word::of_json(&self.come).map(Some),
        };
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOME: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn quiet(_: &str) {}

    #[test]
    fn strangers_are_told_in_warnings() {
        static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let note: Note = |text| TOLD.lock().unwrap().push(text.to_owned());
        let strangers = Strangers { rank: 0, note, seen: Mutex::default() };
        (0..NAMED_MAX + 2).for_each(|_| strangers.add(HOME, "it is strange"));
        drop(strangers);
        let told = TOLD.lock().unwrap();
        assert_eq!(told[0], "warning: rank 0 turned a connection away, one from 127.0.0.1: it is strange");
        assert_eq!(told[NAMED_MAX], "warning: rank 0 turned 2 more connections away");
    }

    fn door(secret: &JobSecret) -> Door {
        Door::open(0, 2, Some(HOME), 0, secret, Purpose::Meeting, quiet).unwrap()
    }

    fn secret() -> JobSecret {
        JobSecret::of_variable(&JobSecret::random().unwrap()).unwrap()
    }

    fn call(door: &Door) -> TcpStream {
        TcpStream::connect((HOME, door.port())).unwrap()
    }

    /// Greets as a process of the job and says a word.
    fn come(door: &Door, secret: &JobSecret, rank: u32) -> io::Result<TcpStream> {
        let stream = call(door);
        words::greet(&stream, secret, Purpose::Meeting, PATIENCE)?;
        words::say(&stream, &Word::Peer { session: 1, rank }, PATIENCE)?;
        Ok(stream)
    }

    fn came(door: &Door) -> u32 {
        match door.next(PATIENCE).expect("a process of the job").word {
            Word::Peer { rank, .. } => rank,
            _ => panic!("another word"),
        }
    }

    #[test]
    fn silent_callers_keep_nobody_waiting() {
        let secret = secret();
        let door = door(&secret);
        // More than are held: the oldest have to go.
        let silent: Vec<TcpStream> = (0..CALLERS_MAX + 20).map(|_| call(&door)).collect();
        let _stream = come(&door, &secret, 3).unwrap();
        assert_eq!(came(&door), 3);
        assert!(door.strangers().summary().contains("before many others came"), "{}", door.strangers().summary());
        drop(silent);
    }

    /// Waits until the door's account of strangers holds `part`.
    fn says(door: &Door, part: &str) {
        let begin = Instant::now();
        while !door.strangers().summary().contains(part) {
            assert!(begin.elapsed() < PATIENCE, "{part}: {}", door.strangers().summary());
            std::thread::yield_now();
        }
    }

    #[test]
    fn visitors_that_nobody_takes_in_are_bounded() {
        let nothing = JobSecret::nothing();
        let door = door(&nothing);
        let _streams: Vec<TcpStream> = (0..CALLERS_MAX as u32 + 5).map(|i| come(&door, &nothing, i).unwrap()).collect();
        says(&door, "3 connections were turned away");
        says(&door, "too many others waited to be taken in");
        assert_eq!(std::iter::from_fn(|| door.next(Duration::ZERO)).count(), CALLERS_MAX + 2);
    }

    #[test]
    fn callers_that_prove_and_are_silent_are_bounded() {
        let nothing = JobSecret::nothing();
        let door = door(&nothing);
        let prove = || {
            let stream = call(&door);
            words::greet(&stream, &nothing, Purpose::Meeting, PATIENCE).unwrap();
            stream
        };
        let _silent: Vec<TcpStream> = (0..CALLERS_MAX + 10).map(|_| prove()).collect();
        says(&door, "before many others came");
        let _stream = come(&door, &nothing, 1).unwrap();
        assert_eq!(came(&door), 1);
    }

    #[test]
    fn strangers_are_counted_and_named() {
        let (secret, other) = (secret(), secret());
        let door = door(&secret);
        let refused = come(&door, &other, 1).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(refused.to_string().contains("TRAINYARD_JOB_SECRET"), "{refused}");
        call(&door).write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        call(&door).write_all(b"TYR1\x01\0\0\0{}").unwrap();
        // A word that is too long, from a process that knows the secret.
        let mut long = call(&door);
        words::greet(&long, &secret, Purpose::Meeting, PATIENCE).unwrap();
        long.write_all(&u32::MAX.to_le_bytes()).unwrap();
        // A proof for another purpose.
        let link = words::greet(&call(&door), &secret, Purpose::Link, PATIENCE).unwrap_err();
        assert_eq!(link.kind(), io::ErrorKind::PermissionDenied);
        let _stream = come(&door, &secret, 2).unwrap();
        assert_eq!(came(&door), 2);
        says(&door, "5 connections were turned away");
        let said = door.strangers().summary();
        assert!(said.contains("does not know this job's secret") && said.contains("and 2 more"), "{said}");
    }
}
