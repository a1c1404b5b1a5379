//! One connection: a thread that reads from a peer, and a thread that writes to it.
//!
//! On the wire is a head of 16 bytes, little-endian (kind, tag, length), and then its body:
//!
//! | kind | tag | then |
//! |---|---|---|
//! | copied | of the message | a small message |
//! | ready | of a message | nothing: its receiver waits for it, with memory |
//! | lent | of the message | a large message, whose receiver has said ready |
//! | notice | 0 | a notice, beside all messages |
//!
//! "Ready" and notices overtake messages that wait to be written. The reader waits for its socket
//! alone. So a peer that lives always reads, and a writer never waits for it for long.

use super::request::Slot;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
pub(super) use trainyard_base::lock;

const HEAD_BYTES: usize = 16;
/// Bytes read at once, except for a large message, which is read into its place.
const READ_BYTES: usize = 16 << 10;
/// The longest notice: positions of some ten thousand communicators.
const NOTICE_BYTES_MAX: u64 = 4 << 20;
/// Bytes of a thread's stack.
const STACK_BYTES: usize = 256 << 10;

const COPIED: u32 = 1;
const READY: u32 = 2;
const LENT: u32 = 3;
const NOTICE: u32 = 4;

/// Notices that have come, and from whom.
pub(super) type Notices = Arc<Mutex<VecDeque<(usize, Vec<u8>)>>>;
/// By tag; in order of arrival.
type Queues<V> = BTreeMap<u32, VecDeque<V>>;

/// Takes the oldest of a tag.
fn pop<V>(queues: &mut Queues<V>, tag: u32) -> Option<V> {
    let queue = queues.get_mut(&tag)?;
    let oldest = queue.pop_front();
    if queue.is_empty() {
        queues.remove(&tag);
    }
    oldest
}

/// Messages from one rank.
#[derive(Default)]
pub(super) struct Inbox(Mutex<Messages>);

#[derive(Default)]
struct Messages {
    /// Those that came before they were asked for.
    early: Queues<Vec<u8>>,
    /// Requests for small messages that came before them.
    expected: Queues<Arc<Slot>>,
    /// Requests for large messages. Apart, because a message that is copied may overtake one with
    /// its tag that is lent: lengths tell which request is whose.
    loans: Queues<Arc<Slot>>,
}

impl Inbox {
    /// A small message has come.
    pub fn deliver(&self, tag: u32, message: Vec<u8>) {
        let mut messages = lock(&self.0);
        match pop(&mut messages.expected, tag) {
            Some(slot) => slot.fill(&message),
            None => messages.early.entry(tag).or_default().push_back(message),
        }
    }

    /// Asks for the next small message of a tag.
    pub fn expect(&self, tag: u32, slot: Arc<Slot>) {
        let mut messages = lock(&self.0);
        match pop(&mut messages.early, tag) {
            Some(message) => slot.fill(&message),
            None => messages.expected.entry(tag).or_default().push_back(slot),
        }
    }

    /// Asks for the next large message of a tag.
    fn expect_loan(&self, tag: u32, slot: Arc<Slot>) {
        lock(&self.0).loans.entry(tag).or_default().push_back(slot);
    }

    fn next_loan(&self, tag: u32) -> Option<Arc<Slot>> {
        pop(&mut lock(&self.0).loans, tag)
    }
}

/// The frames that wait to be written.
#[derive(Default)]
struct Outbox {
    /// Whole frames that go first: "ready" and notices.
    urgent: VecDeque<Vec<u8>>,
    messages: VecDeque<Message>,
    /// Receivers that wait, by tag, and messages whose receivers do not yet.
    granted: BTreeMap<u32, usize>,
    ungranted: Queues<Arc<Slot>>,
    is_writing: bool,
    is_closed: bool,
}

enum Message {
    /// A whole frame, and the slot that is done when it has been written.
    Copied(Vec<u8>, Option<Arc<Slot>>),
    Lent(u32, Arc<Slot>),
}

/// The connection to one rank.
pub(super) struct Link {
    peer: usize,
    stream: TcpStream,
    pub inbox: Inbox,
    outbox: Mutex<Outbox>,
    filled: Condvar,
    notices: Notices,
    /// The longest message that is copied; a longer one is of another protocol.
    copied_bytes_max: u64,
    /// The reason why it ended.
    lost: OnceLock<String>,
}

fn head(kind: u32, tag: u32, bytes: usize) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&kind.to_le_bytes());
    head[4..8].copy_from_slice(&tag.to_le_bytes());
    head[8..].copy_from_slice(&(bytes as u64).to_le_bytes());
    head
}

fn frame(kind: u32, tag: u32, body: &[u8]) -> Vec<u8> {
    [&head(kind, tag, body.len())[..], body].concat()
}

/// Reads what a head has announced, whose length is bounded.
fn body(reader: &mut impl Read, bytes: u64) -> io::Result<Vec<u8>> {
    let mut body = vec![0; bytes as usize];
    reader.read_exact(&mut body)?;
    Ok(body)
}

fn nonsense(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Link {
    /// Starts the threads of a connection, over which messages up to `copied_bytes_max` are copied.
    pub fn start(peer: usize, stream: TcpStream, notices: Notices, copied_bytes_max: usize) -> io::Result<Arc<Self>> {
        let link = Arc::new(Self {
            peer,
            stream,
            inbox: Inbox::default(),
            outbox: Mutex::default(),
            filled: Condvar::new(),
            notices,
            copied_bytes_max: copied_bytes_max as u64,
            lost: OnceLock::new(),
        });
        let spawn = |name: &str, run: fn(&Link) -> io::Result<()>| {
            let link = Arc::clone(&link);
            let thread = std::thread::Builder::new().name(format!("{name}-{peer}")).stack_size(STACK_BYTES);
            thread.spawn(move || link.end(run(&link)))
        };
        spawn("comm-read", Link::read)?;
        spawn("comm-write", Link::write)?;
        Ok(link)
    }

    /// Why the connection has ended.
    pub fn lost(&self) -> Option<String> {
        self.lost.get().cloned()
    }

    /// Ends the connection, and the work of its threads.
    pub fn close(&self) {
        let mut outbox = lock(&self.outbox);
        outbox.is_closed = true;
        outbox.messages.clear();
        outbox.urgent.clear();
        self.filled.notify_all();
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// True when everything was handed to the operating system, or never will be.
    pub fn is_idle(&self) -> bool {
        let outbox = lock(&self.outbox);
        outbox.is_closed || !outbox.is_writing && outbox.urgent.is_empty() && outbox.messages.is_empty()
    }

    /// True when all notices were handed to the operating system, or never will be.
    pub fn has_told(&self) -> bool {
        let outbox = lock(&self.outbox);
        outbox.is_closed || !outbox.is_writing && outbox.urgent.is_empty()
    }

    pub fn tell(&self, notice: &[u8]) {
        self.push(|outbox| outbox.urgent.push_back(frame(NOTICE, 0, notice)));
    }

    /// Sends a copy; the slot is done when the operating system has it, so that a rank which dies
    /// after an operation has given its part.
    pub fn send_copy(&self, tag: u32, message: &[u8], written: Arc<Slot>) {
        self.push(|outbox| outbox.messages.push_back(Message::Copied(frame(COPIED, tag, message), Some(written))));
    }

    /// Sends the slot's memory once the peer is ready for it.
    pub fn lend(&self, tag: u32, slot: Arc<Slot>) {
        self.push(|outbox| {
            let granted = outbox.granted.entry(tag).or_default();
            if *granted > 0 {
                *granted -= 1;
                outbox.messages.push_back(Message::Lent(tag, slot));
            } else {
                outbox.granted.remove(&tag);
                outbox.ungranted.entry(tag).or_default().push_back(slot);
            }
        });
    }

    /// Asks for a large message.
    pub fn borrow(&self, tag: u32, slot: Arc<Slot>) {
        self.inbox.expect_loan(tag, slot);
        self.push(|outbox| outbox.urgent.push_back(frame(READY, tag, &[])));
    }

    fn push(&self, change: impl FnOnce(&mut Outbox)) {
        let mut outbox = lock(&self.outbox);
        if !outbox.is_closed {
            change(&mut outbox);
            self.filled.notify_one();
        }
    }

    /// The peer is ready for a message.
    fn grant(&self, tag: u32) {
        self.push(|outbox| match pop(&mut outbox.ungranted, tag) {
            Some(slot) => outbox.messages.push_back(Message::Lent(tag, slot)),
            None => *outbox.granted.entry(tag).or_default() += 1,
        });
    }

    /// A thread has come to its end.
    fn end(&self, result: io::Result<()>) {
        let why = match result {
            Ok(()) => "its connection was closed here".to_owned(),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => "it closed its connection".to_owned(),
            Err(error) => format!("its connection broke: {error}"),
        };
        // The first to know knows best.
        let _ = self.lost.set(why);
        self.close();
    }

    fn read(&self) -> io::Result<()> {
        let mut reader = BufReader::with_capacity(READ_BYTES, &self.stream);
        let mut head = [0; HEAD_BYTES];
        loop {
            reader.read_exact(&mut head)?;
            let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
            let (kind, tag) = (word(0), word(4));
            let bytes = u64::from(word(8)) | u64::from(word(12)) << 32;
            match kind {
                COPIED if bytes <= self.copied_bytes_max => self.inbox.deliver(tag, body(&mut reader, bytes)?),
                NOTICE if bytes <= NOTICE_BYTES_MAX => {
                    let body = body(&mut reader, bytes)?;
                    lock(&self.notices).push_back((self.peer, body));
                }
                READY => self.grant(tag),
                LENT => self.read_lent(&mut reader, tag, bytes)?,
                _ => return Err(nonsense(format!("it sent a message of kind {kind} and {bytes} bytes"))),
            }
        }
    }

    fn read_lent(&self, reader: &mut impl Read, tag: u32, bytes: u64) -> io::Result<()> {
        let slot = self.inbox.next_loan(tag).ok_or_else(|| nonsense(format!("nobody asked for message {tag}")))?;
        if slot.bytes() as u64 != bytes {
            return Err(nonsense(format!("message {tag} has {bytes} bytes instead of {}", slot.bytes())));
        }
        if !slot.begin() {
            // Taken back after a failure.
            return io::copy(&mut reader.take(bytes), &mut io::sink()).map(drop);
        }
        // SAFETY: just begun, and ended after the last use.
        let result = reader.read_exact(unsafe { slot.target() });
        slot.end(result.is_ok());
        result
    }

    fn write(&self) -> io::Result<()> {
        while let Some(next) = self.next_to_write() {
            match next {
                Message::Copied(frame, written) => {
                    (&self.stream).write_all(&frame)?;
                    if let Some(written) = written.filter(|slot| slot.begin()) {
                        written.end(true);
                    }
                }
                Message::Lent(tag, slot) => {
                    // Not begun when it was taken back after a failure.
                    if slot.begin() {
                        // SAFETY: just begun, and ended after the last use.
                        let body = unsafe { slot.source() };
                        let result = (&self.stream)
                            .write_all(&head(LENT, tag, body.len()))
                            .and_then(|()| (&self.stream).write_all(body));
                        slot.end(result.is_ok());
                        result?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits for something to write; nothing comes after the connection is closed.
    fn next_to_write(&self) -> Option<Message> {
        let mut outbox = lock(&self.outbox);
        outbox.is_writing = false;
        loop {
            if outbox.is_closed {
                return None;
            }
            let next = match outbox.urgent.pop_front() {
                Some(frame) => Some(Message::Copied(frame, None)),
                None => outbox.messages.pop_front(),
            };
            if next.is_some() {
                outbox.is_writing = true;
                return next;
            }
            outbox = self.filled.wait(outbox).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
