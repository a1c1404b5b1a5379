//! Connections between any two ranks: every rank connects to those of lower rank, and is connected
//! to by those of higher rank.

use super::door::{self, Door, Visitor};
use super::secret::{JobSecret, Purpose};
use super::words::{Address, Word, greet, is_timeout, say};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The facts that a rank needs to connect.
pub(super) struct Mesh<'a> {
    pub rank: usize,
    pub session: u64,
    pub addresses: &'a [Address],
    /// Where rank 0's host is reached from here.
    pub master: IpAddr,
    pub secret: &'a JobSecret,
}

/// Connects to the first of several addresses that answers.
pub(super) fn reach(addresses: impl Iterator<Item = SocketAddr>, patience: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, patience) {
            // A connection to a port of the own host where nobody listens may be given that very
            // port, and find itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => last = io::ErrorKind::ConnectionRefused.into(),
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// True for an error after which another attempt may succeed: the other end may be slow, or may
/// have closed the connection to make room, while strangers called.
pub(super) fn is_worth_another_try(error: &io::Error) -> bool {
    is_timeout(error)
        || matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::BrokenPipe
        )
}

impl Mesh<'_> {
    /// A connection to every other rank, or what is in the way.
    pub fn connect(&self, ears: &Door, deadline: Duration) -> Result<Vec<Option<TcpStream>>, String> {
        let end = Instant::now() + deadline;
        let mut streams: Vec<Option<TcpStream>> = self.addresses.iter().map(|_| None).collect();
        for (peer, stream) in streams.iter_mut().enumerate().take(self.rank) {
            *stream = Some(self.call(peer, end)?);
        }
        while let Some(missing) = (self.rank + 1..streams.len()).find(|&peer| streams[peer].is_none()) {
            let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                let waited = deadline.as_secs_f64();
                return Err(format!(
                    "{} did not connect to {} within {waited:.1} s: is a firewall between their hosts?{}",
                    self.who(missing),
                    self.who(self.rank),
                    ears.strangers().summary()
                ));
            };
            let Some(Visitor { word, stream, ip }) = ears.next(left) else { continue };
            match word {
                Word::Peer { session, rank } if session == self.session => {
                    let place = streams.get_mut(rank as usize).filter(|_| rank as usize > self.rank);
                    match place {
                        Some(place @ None) => *place = Some(stream),
                        _ => ears.strangers().add(ip, &format!("it says that it is rank {rank}, which it cannot be")),
                    }
                }
                _ => ears.strangers().add(ip, "it is of another world"),
            }
        }
        for stream in streams.iter().flatten() {
            let unlimited = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(None));
            unlimited.map_err(|error| format!("a socket cannot be set up: {error}"))?;
        }
        Ok(streams)
    }

    fn who(&self, rank: usize) -> String {
        format!("rank {rank} (host {})", self.addresses[rank].host)
    }

    /// A connection to a rank of lower number, before `end`.
    fn call(&self, peer: usize, end: Instant) -> Result<TcpStream, String> {
        let Address { ip, port, .. } = &self.addresses[peer];
        let address = SocketAddr::new(ip.unwrap_or(self.master), *port);
        let word = Word::Peer { session: self.session, rank: self.rank as u32 };
        let call = || -> io::Result<TcpStream> {
            // The first attempt is made in any case.
            let patience = end.saturating_duration_since(Instant::now()).clamp(super::rendezvous::LOOK, door::PATIENCE);
            let stream = reach(std::iter::once(address), patience)?;
            greet(&stream, self.secret, Purpose::Link, patience)?;
            say(&stream, &word, patience)?;
            Ok(stream)
        };
        loop {
            match call() {
                Ok(stream) => return Ok(stream),
                Err(error) if is_worth_another_try(&error) && Instant::now() < end => {
                    std::thread::sleep(super::rendezvous::LOOK);
                }
                Err(error) => {
                    return Err(format!(
                        "{} cannot reach {} at {address}: {error}; is a firewall between their hosts?",
                        self.who(self.rank),
                        self.who(peer)
                    ));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_peer_is_called_again() {
        use io::ErrorKind::{ConnectionRefused, InvalidData, PermissionDenied, TimedOut, UnexpectedEof, WouldBlock};
        assert!([TimedOut, WouldBlock, UnexpectedEof].iter().all(|&kind| is_worth_another_try(&kind.into())));
        let final_kinds = [ConnectionRefused, InvalidData, PermissionDenied];
        assert!(!final_kinds.iter().any(|&kind| is_worth_another_try(&kind.into())));
    }
}
