//! The words that processes exchange while they come together: a greeting that proves the job's
//! secret on each side, then JSON behind its length.
//!
//! | bytes | from the caller | from the listener |
//! |---|---|---|
//! | 4 + 32 | [`MARK`], random number | the same |
//! | 32 | its proof | |
//! | 1 + 32 | | [`WELCOME`] and its proof, or [`UNKNOWN`] and the end |
//! | 4 + n | length, [`Word`] | the same |

use super::elastic::{HostCard, Order, Report};
use super::secret::{End, JobSecret, NONCE_BYTES, Nonce, Purpose, nonce};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

/// Begins every connection; its last byte is the version of these words.
pub(super) const MARK: [u8; 4] = *b"TYR2";
/// Bytes of a greeting.
pub(super) const GREETING_BYTES: usize = MARK.len() + NONCE_BYTES;
/// The listener's answer to a right proof and to a wrong one.
pub(super) const WELCOME: u8 = 1;
pub(super) const UNKNOWN: u8 = 0;
/// Longest word from a process that is not yet part of the world.
pub(super) const FIRST_WORD_BYTES_MAX: u32 = 4 << 10;
/// A table of ten thousand ranks is shorter.
const WORD_BYTES_MAX: u32 = 4 << 20;
/// Characters of another process's text that are kept.
const TEXT_CHARACTERS_MAX: usize = 2_000;

/// A process as it introduces itself.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Card {
    pub version: String,
    pub rank: u32,
    pub world: u32,
    pub host: String,
    pub pid: u32,
    /// The address where it listens for its peers; none: the one that this connection comes from.
    pub ip: Option<IpAddr>,
    /// The port of that address.
    pub port: u16,
}

/// The address where a rank listens.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Address {
    pub host: String,
    /// None: on the host of rank 0, at whatever address that is reached by.
    pub ip: Option<IpAddr>,
    pub port: u16,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Word {
    /// To rank 0: here I am.
    Here(Card),
    /// From rank 0, when all have come. The session keeps connections of other worlds away.
    Table { session: u64, addresses: Vec<Address> },
    /// To rank 0: I am connected with everybody.
    Connected,
    /// To rank 0: the reason why I am not.
    Trouble(String),
    /// From rank 0: begin.
    Begin,
    /// From rank 0: the reason why there is no world, or why this process is no part of it.
    Refused(String),
    /// To another rank: this connection is ours.
    Peer { session: u64, rank: u32 },
    /// To the keeper of a roster: a host comes. The keeper's own host knows the token.
    Host { card: HostCard, token: Option<u64> },
    /// To the keeper of a roster.
    Report(Report),
    /// From the keeper of a roster.
    Order(Order),
}

fn strange(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Text of another process as it may be shown: control characters and invisible ones are escaped,
/// and what is too long is cut.
pub(crate) fn printable(text: &str) -> String {
    let escaped = text.chars().flat_map(|c| {
        let plain = matches!(c, '"' | '\'' | '\\').then_some(c);
        plain.into_iter().chain(plain.is_none().then(|| c.escape_debug()).into_iter().flatten())
    });
    let mut shown: String = escaped.take(TEXT_CHARACTERS_MAX + 1).collect();
    if let Some((end, _)) = shown.char_indices().nth(TEXT_CHARACTERS_MAX) {
        shown.replace_range(end.., "...");
    }
    shown
}

impl Card {
    fn printable(self) -> Self {
        Self { version: printable(&self.version), host: printable(&self.host), ..self }
    }
}

impl Word {
    /// Reads a word, with its text made fit to be shown.
    pub fn of_json(text: &[u8]) -> io::Result<Word> {
        Ok(match of_json(text)? {
            Word::Here(card) => Word::Here(card.printable()),
            Word::Trouble(why) => Word::Trouble(printable(&why)),
            Word::Refused(why) => Word::Refused(printable(&why)),
            Word::Table { session, mut addresses } => {
                addresses.iter_mut().for_each(|address| address.host = printable(&address.host));
                Word::Table { session, addresses }
            }
            Word::Host { card, token } => {
                let card = HostCard { version: printable(&card.version), host: printable(&card.host), ..card };
                Word::Host { card, token }
            }
            // The keeper's orders carry the names of hosts, which it has made printable.
            word @ (Word::Connected | Word::Begin | Word::Peer { .. } | Word::Report(_) | Word::Order(_)) => word,
        })
    }
}

fn of_json<T: DeserializeOwned>(text: &[u8]) -> io::Result<T> {
    // The error may quote the text.
    let why = |error: serde_json::Error| printable(&error.to_string());
    serde_json::from_slice(text).map_err(|error| strange(format!("it says what makes no sense: {}", why(error))))
}

/// The greeting of this end.
pub(super) fn greeting(nonce: &Nonce) -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[..MARK.len()].copy_from_slice(&MARK);
    greeting[MARK.len()..].copy_from_slice(nonce);
    greeting
}

/// Checks as much of a greeting as has come.
pub(super) fn check_mark(greeting: &[u8]) -> io::Result<()> {
    let known = greeting.len().min(MARK.len() - 1);
    if greeting[..known] != MARK[..known] {
        return Err(strange("it does not speak trainyard's protocol"));
    }
    match greeting.get(MARK.len() - 1) {
        Some(&version) if version != MARK[MARK.len() - 1] => Err(strange(format!(
            "it speaks version {} of trainyard's protocol instead of {}: start the same program everywhere",
            version.escape_ascii(),
            MARK[MARK.len() - 1].escape_ascii()
        ))),
        _ => Ok(()),
    }
}

/// The connecting end's part of the greeting, which has to be over within `patience`.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if the other end speaks another protocol,
/// [`io::ErrorKind::PermissionDenied`] if the ends have different secrets; else the connection's.
pub(super) fn greet(stream: &TcpStream, secret: &JobSecret, purpose: Purpose, patience: Duration) -> io::Result<()> {
    let end = Instant::now() + patience;
    let ours = nonce()?;
    write(stream, &greeting(&ours), end)?;
    let mut theirs = [0; GREETING_BYTES];
    let (mark, rest) = theirs.split_at_mut(MARK.len());
    read(stream, mark, end)?;
    check_mark(mark)?;
    read(stream, rest, end)?;
    let theirs: Nonce = rest.try_into().expect("the rest of a greeting is the random number");
    write(stream, &secret.prove(End::Caller, purpose, &ours, &theirs), end)?;
    let mut answer = [0];
    read(stream, &mut answer, end)?;
    let mut proof = [0; 32];
    let is_welcome = answer[0] == WELCOME && {
        read(stream, &mut proof, end)?;
        secret.accepts(&proof, End::Listener, purpose, &ours, &theirs)
    };
    if !is_welcome {
        let what = format!(
            "it has another job's secret; here the secret is from {}, and it has to be the same for all ranks",
            secret.source()
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    Ok(())
}

/// Sends a word, which has to be taken within `patience`.
pub(super) fn say(stream: &TcpStream, word: &Word, patience: Duration) -> io::Result<()> {
    let text = serde_json::to_vec(word).map_err(io::Error::other)?;
    let frame = [&(text.len() as u32).to_le_bytes()[..], &text].concat();
    write(stream, &frame, Instant::now() + patience)
}

/// The next word, which has to come within `patience`.
pub(super) fn hear(stream: &TcpStream, patience: Duration) -> io::Result<Word> {
    let end = Instant::now() + patience;
    let mut head = [0; 4];
    read(stream, &mut head, end)?;
    let mut text = vec![0; word_bytes(head, WORD_BYTES_MAX)?];
    read(stream, &mut text, end)?;
    Word::of_json(&text)
}

/// The length of the word behind `head`, which may be `bytes_max`.
pub(super) fn word_bytes(head: [u8; 4], bytes_max: u32) -> io::Result<usize> {
    let bytes = u32::from_le_bytes(head);
    if bytes > bytes_max {
        return Err(strange(format!("it announces a word of {bytes} bytes, and {bytes_max} are the most")));
    }
    Ok(bytes as usize)
}

/// The time left until `end`; an error when there is none.
fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn read(mut stream: &TcpStream, bytes: &mut [u8], end: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        stream.set_read_timeout(Some(left(end)?))?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn write(mut stream: &TcpStream, bytes: &[u8], end: Instant) -> io::Result<()> {
    let mut written = 0;
    while written < bytes.len() {
        stream.set_write_timeout(Some(left(end)?))?;
        match stream.write(&bytes[written..]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => written += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// True for an error that says that nothing came in time.
pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_other_processes_cannot_move_the_cursor() {
        assert_eq!(printable("node-7.site \"a\\b\" äß"), "node-7.site \"a\\b\" äß");
        assert_eq!(printable("a\x1b[2Jb\r\n\u{202e}c"), "a\\u{1b}[2Jb\\r\\n\\u{202e}c");
        let long = printable(&"x".repeat(3 * TEXT_CHARACTERS_MAX));
        assert!(long.len() == TEXT_CHARACTERS_MAX + 3 && long.ends_with("x..."));
        let card = br#"{"Here":{"version":"0\u001b","rank":1,"world":2,"host":"\u0007","pid":3,"ip":null,"port":4}}"#;
        let Word::Here(card) = Word::of_json(card).unwrap() else { panic!("a card") };
        assert_eq!((card.version.as_str(), card.host.as_str()), ("0\\u{1b}", "\\u{7}"));
    }

    #[test]
    fn an_unknown_word_cannot_move_the_cursor() {
        let error = Word::of_json(br#"{"\u001b[2J":{}}"#).err().unwrap().to_string();
        assert!(error.contains("\\u{1b}[2J") && !error.contains('\x1b'), "{error:?}");
    }

    #[test]
    fn lengths_are_bounded_before_anything_is_allocated() {
        assert_eq!(word_bytes(7u32.to_le_bytes(), 8).unwrap(), 7);
        let error = word_bytes(u32::MAX.to_le_bytes(), FIRST_WORD_BYTES_MAX).unwrap_err().to_string();
        assert!(error.contains("a word of 4294967295 bytes, and 4096 are the most"), "{error}");
    }

    #[test]
    fn other_protocols_are_told_from_other_versions() {
        assert!(["", "T", "TYR", "TYR2", "TYR2x"].iter().all(|text| check_mark(text.as_bytes()).is_ok()));
        let says = |text: &str| check_mark(text.as_bytes()).unwrap_err().to_string();
        assert!(says("G").contains("does not speak") && says("GET / HTTP/1.1").contains("does not speak"));
        assert!(says("TYR1").contains("version 1 of trainyard's protocol instead of 2"));
    }
}
