//! What processes say to each other while they come together: JSON in frames that other programs
//! are unlikely to send.

use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

/// Begins every frame; its last byte is the version of these words.
const MARK: [u8; 4] = *b"TYR1";
/// A table of ten thousand ranks is shorter.
const BYTES_MAX: u32 = 4 << 20;

/// Who somebody is.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Card {
    pub version: String,
    pub rank: u32,
    pub world: u32,
    pub host: String,
    pub pid: u32,
    /// Where it listens for its peers.
    pub port: u16,
}

/// Where a rank listens.
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
    Table {
        session: u64,
        addresses: Vec<Address>,
    },
    /// To rank 0: I am connected with everybody, or what keeps me from it.
    Connected,
    Trouble(String),
    /// From rank 0: begin, or why there is no world.
    Begin,
    Refused(String),
    /// To another rank: this connection is ours.
    Peer {
        session: u64,
        rank: u32,
    },
}

fn strange(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

pub(super) fn say(mut stream: &TcpStream, word: &Word) -> io::Result<()> {
    let text = serde_json::to_vec(word).map_err(io::Error::other)?;
    stream.write_all(&[&MARK, &(text.len() as u32).to_le_bytes()[..], &text].concat())
}

/// The next word, which has to come within `patience`.
pub(super) fn hear(mut stream: &TcpStream, patience: Duration) -> io::Result<Word> {
    let end = Instant::now() + patience;
    let mut read = |bytes: &mut [u8]| -> io::Result<()> {
        let mut filled = 0;
        while filled < bytes.len() {
            // A timeout of nothing is an error.
            let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            stream.set_read_timeout(Some(left))?;
            match stream.read(&mut bytes[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if Instant::now() >= end && filled < bytes.len() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    };
    let mut head = [0; 8];
    read(&mut head)?;
    let bytes = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
    if head[..4] != MARK || bytes > BYTES_MAX {
        return Err(strange("what it says is not of trainyard, or of another version"));
    }
    let mut text = vec![0; bytes as usize];
    read(&mut text)?;
    serde_json::from_slice(&text).map_err(|error| strange(format!("what it says makes no sense: {error}")))
}

/// Whether nothing has come in time.
pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}
