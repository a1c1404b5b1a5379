//! A host's end of its connection to the meeting.

use super::roster::{Order, Report};
use super::{HEARTBEAT, HostCard, SILENCE};
use crate::Place;
use crate::tcp::door;
use crate::tcp::mesh;
use crate::tcp::secret::{JobSecret, Purpose};
use crate::tcp::words::{Word, greet, hear, say};
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

/// The pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(200);
/// The time that one attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(5);

/// A host that has come to a meeting.
pub struct Member {
    stream: TcpStream,
    heard: Receiver<io::Result<Order>>,
    /// When it last said something.
    said: Instant,
}

/// News from the meeting.
pub enum Heard {
    /// Nothing new.
    Nothing,
    /// An order.
    Order(Order),
    /// The meeting cannot be reached any more; the reason.
    Lost(String),
    /// The meeting has turned this host away, or is none: coming again changes nothing; the reason.
    Refused(String),
}

impl Member {
    /// Comes to the meeting at a host and port with `ranks`, within `patience`. `run` is the run's
    /// folder, if this host knows it from an earlier keeper.
    ///
    /// # Errors
    /// If nobody keeps a roster there in that time, or not of this job and protocol.
    pub fn join(
        place: (&str, u16),
        token: Option<u64>,
        ranks: u32,
        run: Option<String>,
        secret: &JobSecret,
        patience: Duration,
    ) -> io::Result<Member> {
        let end = Instant::now() + patience;
        let here = Place::here(0);
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let card = HostCard { version, host: here.host, pid: here.pid, ranks, run };
        let word = Word::Host { card, token };
        let attempt = || -> io::Result<TcpStream> {
            let stream = mesh::reach(place.to_socket_addrs()?, ATTEMPT)?;
            greet(&stream, secret, Purpose::Hosts, door::PATIENCE)?;
            say(&stream, &word, door::PATIENCE)?;
            Ok(stream)
        };
        let stream = loop {
            match attempt() {
                Ok(stream) => break stream,
                // Another program, another version or another job: waiting changes nothing.
                Err(error) if is_final(&error) => return Err(error),
                Err(error) if Instant::now() >= end => return Err(error),
                Err(_) => std::thread::sleep(RETRY),
            }
        };
        let (sender, heard) = channel();
        let listened = stream.try_clone()?;
        std::thread::spawn(move || {
            loop {
                let order = match hear(&listened, SILENCE) {
                    Ok(Word::Order(order)) => Ok(order),
                    Ok(Word::Refused(why)) => Err(io::Error::new(io::ErrorKind::PermissionDenied, why)),
                    Ok(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "it says what it should not")),
                    Err(error) => Err(error),
                };
                let is_last = order.is_err();
                // The member may be gone.
                if sender.send(order).is_err() || is_last {
                    break;
                }
            }
        });
        Ok(Member { stream, heard, said: Instant::now() })
    }

    /// Says something to the keeper.
    ///
    /// # Errors
    /// If the connection is lost.
    pub fn report(&mut self, report: Report) -> io::Result<()> {
        self.said = Instant::now();
        say(&self.stream, &Word::Report(report), SILENCE)
    }

    /// The next news since the last call. Says now and then that this host lives.
    pub fn listen(&mut self) -> Heard {
        let is_closed = self.said.elapsed() >= HEARTBEAT && self.report(Report::Alive).is_err();
        // What came before the end counts.
        match self.heard.try_recv() {
            Err(TryRecvError::Empty) if is_closed => Heard::Lost("its connection is closed".to_owned()),
            Ok(Ok(Order::Alive)) | Err(TryRecvError::Empty) => Heard::Nothing,
            Ok(Ok(order)) => Heard::Order(order),
            Ok(Err(error)) if is_final(&error) => Heard::Refused(error.to_string()),
            Ok(Err(error)) => Heard::Lost(error.to_string()),
            Err(TryRecvError::Disconnected) => Heard::Lost("its connection is closed".to_owned()),
        }
    }
}

/// True for an error that another attempt would meet again.
fn is_final(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::PermissionDenied)
}

impl Drop for Member {
    fn drop(&mut self) {
        // The thread that listens ends with the connection, which may be closed already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::door::Door;

    /// A host of another version came again and again, without a pause.
    #[test]
    fn a_host_that_is_turned_away_does_not_come_again() {
        let secret = JobSecret::nothing();
        let home = std::net::Ipv4Addr::LOCALHOST.into();
        for answer in [Word::Refused("another version".to_owned()), Word::Begin] {
            let door = Door::open(0, 0, Some(home), 0, &secret, Purpose::Hosts, |_| {}).unwrap();
            let mut member = Member::join(("127.0.0.1", door.port()), None, 1, None, &secret, SILENCE).unwrap();
            let visitor = door.next(SILENCE).expect("the member has come");
            say(&visitor.stream, &answer, SILENCE).unwrap();
            let end = Instant::now() + SILENCE;
            let heard = loop {
                match member.listen() {
                    Heard::Nothing if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
                    heard => break heard,
                }
            };
            assert!(matches!(heard, Heard::Refused(_)));
        }
    }
}
