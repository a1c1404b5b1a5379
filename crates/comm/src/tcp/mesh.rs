//! Connections between any two ranks: everybody connects to those of lower rank, and is connected
//! to by the others.

use super::rendezvous::LOOK;
use super::words::{Address, Word, hear, say};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long one attempt to connect may take, and a peer to say who it is.
const ATTEMPT: Duration = Duration::from_secs(10);

/// What a rank knows when it connects.
pub(super) struct Mesh<'a> {
    pub rank: usize,
    pub session: u64,
    pub addresses: &'a [Address],
    /// Where rank 0's host is reached from here.
    pub master: IpAddr,
}

/// Listens at an address of this host, or at all of them.
pub(super) fn listen(at: Option<IpAddr>, port: u16) -> io::Result<TcpListener> {
    // Where there is IPv6, its unspecified address means IPv4 too.
    let everywhere = || match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        bound => bound,
    };
    let listener = at.map_or_else(everywhere, |ip| TcpListener::bind((ip, port)))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// A connection that has come in.
pub(super) fn accept(listener: &TcpListener) -> io::Result<Option<TcpStream>> {
    match listener.accept() {
        Ok((stream, _)) => {
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            Ok(Some(stream))
        }
        // Nobody, or one who left again before it was let in.
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(error) => Err(error),
    }
}

/// Connects to the first of several addresses that answers.
pub(super) fn reach(addresses: impl Iterator<Item = SocketAddr>, patience: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, patience) {
            // Who knocks at a port of its own host where nobody listens may be given that very
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

impl Mesh<'_> {
    /// A connection to every other rank, or what is in the way.
    pub fn connect(&self, ears: &TcpListener, deadline: Duration) -> Result<Vec<Option<TcpStream>>, String> {
        let mut streams: Vec<Option<TcpStream>> = self.addresses.iter().map(|_| None).collect();
        for (peer, stream) in streams.iter_mut().enumerate().take(self.rank) {
            *stream = Some(self.call(peer)?);
        }
        let start = Instant::now();
        while let Some(missing) = (self.rank + 1..streams.len()).find(|&peer| streams[peer].is_none()) {
            if start.elapsed() >= deadline {
                let waited = deadline.as_secs_f64();
                return Err(format!(
                    "{} did not connect to {} within {waited:.1} s: is a firewall between their hosts?",
                    self.who(missing),
                    self.who(self.rank)
                ));
            }
            let stream =
                accept(ears).map_err(|error| format!("{} cannot be connected to: {error}", self.who(self.rank)))?;
            match stream.and_then(|stream| self.is_peer(stream)) {
                Some((peer, stream)) => streams[peer] = Some(stream),
                None => std::thread::sleep(LOOK / 10),
            }
        }
        for stream in streams.iter().flatten() {
            stream.set_read_timeout(None).map_err(|error| format!("a socket cannot be set up: {error}"))?;
        }
        Ok(streams)
    }

    fn who(&self, rank: usize) -> String {
        format!("rank {rank} (host {})", self.addresses[rank].host)
    }

    fn call(&self, peer: usize) -> Result<TcpStream, String> {
        let Address { ip, port, .. } = &self.addresses[peer];
        let address = SocketAddr::new(ip.unwrap_or(self.master), *port);
        let word = Word::Peer { session: self.session, rank: self.rank as u32 };
        let called = reach(std::iter::once(address), ATTEMPT).and_then(|stream| say(&stream, &word).map(|()| stream));
        called.map_err(|error| {
            format!(
                "{} cannot reach {} at {address}: {error}; is a firewall between their hosts?",
                self.who(self.rank),
                self.who(peer)
            )
        })
    }

    /// Which peer a connection is of; connections of others are let go.
    fn is_peer(&self, stream: TcpStream) -> Option<(usize, TcpStream)> {
        match hear(&stream, ATTEMPT) {
            Ok(Word::Peer { session, rank }) if session == self.session => {
                let rank = rank as usize;
                (rank > self.rank && rank < self.addresses.len()).then_some((rank, stream))
            }
            _ => None,
        }
    }
}
