//! The page and its data over HTTP, for reading only.
//!
//! One thread answers all requests. A request names a run by the name of its folder, which is
//! looked up in the list of runs. So no text of a request becomes a part of a path. Without a token
//! the server answers only this machine: it listens on the loopback, and refuses other host names,
//! to which the script of a foreign page could have redirected a browser (DNS rebinding).

mod api;
mod events;
mod guard;
mod prometheus;

pub use api::{ApiError, curves_json, details_json, runs_json};

use crate::store::Store;
use crate::timeline::Timelines;
use events::Hub;
use guard::{Guard, Verdict};
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The port that is tried first: "TRAI" on a telephone's keys.
pub const PORT: u16 = 8724;
/// Ports that are tried if that one is taken.
const PORTS: u16 = 20;
/// Connections at once; further ones are closed.
const CONNECTIONS_MAX: usize = 1024;
/// A request's head must arrive within this time.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest head of a request.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// A connection that takes nothing for this long is closed.
const STALL: Duration = Duration::from_secs(60);

/// The body of an answer: bytes, or events for as long as somebody watches.
type Body = Either<Full<Bytes>, events::Events>;

/// An error before the server answers.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The runs folder cannot be read.
    #[error("cannot read the runs folder {path}: {source}")]
    Runs {
        /// The folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The address is taken or does not exist.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// The reason.
        source: io::Error,
    },
    /// The operating system refuses.
    #[error("cannot start the server: {0}")]
    Start(io::Error),
    /// A token that does not protect.
    #[error("a token has at least {} letters or digits", guard::TOKEN_LEN_MIN)]
    Token,
}

/// The address and the token.
#[derive(Clone, Debug)]
pub struct Options {
    /// The address; only this machine reaches the loopback.
    pub host: IpAddr,
    /// The port; None: the first free one from [`PORT`] on.
    pub port: Option<u16>,
    /// The token that requests must have. Addresses other than the loopback get one in any case.
    pub token: Option<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options { host: IpAddr::V4(Ipv4Addr::LOCALHOST), port: None, token: None }
    }
}

/// A server that listens.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    store: Arc<Store>,
    timelines: Timelines,
    hub: Arc<Hub>,
    guard: Guard,
    connections: AtomicUsize,
}

impl Server {
    /// Listens for requests about the runs in the folder `root`.
    ///
    /// # Errors
    ///
    /// The folder cannot be read, or the address cannot be used.
    pub fn bind(root: &Path, options: &Options) -> Result<Server, ServeError> {
        let runs_error = |source| ServeError::Runs { path: root.to_owned(), source };
        let store = Arc::new(Store::open(root).map_err(runs_error)?);
        store.scan().map_err(runs_error)?;
        let guard = Guard::new(options.host, options.token.as_deref())?;
        let ports = match options.port {
            Some(port) => port..=port,
            None => PORT..=PORT + PORTS,
        };
        let mut result = Err(io::Error::from(io::ErrorKind::AddrInUse));
        for port in ports.clone() {
            result = TcpListener::bind((options.host, port));
            if !matches!(&result, Err(error) if error.kind() == io::ErrorKind::AddrInUse) {
                break;
            }
        }
        let listener = result.map_err(|source| ServeError::Listen {
            address: SocketAddr::from((options.host, *ports.start())).to_string(),
            source,
        })?;
        listener.set_nonblocking(true).map_err(ServeError::Start)?;
        let address = listener.local_addr().map_err(ServeError::Start)?;
        let hub = Hub::start(Arc::clone(&store)).map_err(ServeError::Start)?;
        let shared = Shared { store, timelines: Timelines::default(), hub, guard, connections: AtomicUsize::new(0) };
        Ok(Server { listener, address, shared: Arc::new(shared) })
    }

    /// The address of the page, with the token if there is one.
    pub fn url(&self) -> String {
        let token = self.shared.guard.token().map_or(String::new(), |token| format!("?token={token}"));
        format!("http://{}/{token}", self.address)
    }

    /// The address that is listened on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests for ever.
    ///
    /// # Errors
    ///
    /// The operating system refuses.
    pub fn run(self) -> Result<(), ServeError> {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_io().enable_time().max_blocking_threads(2);
        runtime.build().map_err(ServeError::Start)?.block_on(self.accept())
    }

    /// Answers requests on a thread of its own, until the process ends.
    ///
    /// # Errors
    ///
    /// The thread cannot start.
    pub fn spawn(self) -> Result<(), ServeError> {
        let thread = std::thread::Builder::new().name("dashboard".to_owned());
        // An error of the server must not end the training beside it.
        thread.spawn(move || drop(self.run())).map(drop).map_err(ServeError::Start)
    }

    async fn accept(self) -> Result<(), ServeError> {
        let listener = tokio::net::TcpListener::from_std(self.listener).map_err(ServeError::Start)?;
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                // The process has no file descriptor left, for example.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let shared = Arc::clone(&self.shared);
            if shared.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                shared.connections.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            tokio::spawn(async move {
                serve(stream, &shared).await;
                shared.connections.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }
}

/// The last time at which a connection took something.
struct Pulse {
    start: Instant,
    beat_ms: AtomicU64,
}

impl Pulse {
    fn beat(&self) {
        self.beat_ms.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn is_stalled(&self) -> bool {
        self.start.elapsed() > STALL + Duration::from_millis(self.beat_ms.load(Ordering::Relaxed))
    }
}

async fn serve(stream: tokio::net::TcpStream, shared: &Arc<Shared>) {
    // Events are small and must not wait for each other. Without it they are only later.
    let _ = stream.set_nodelay(true);
    let pulse = Arc::new(Pulse { start: Instant::now(), beat_ms: AtomicU64::new(0) });
    let service = service_fn(|request| {
        let (shared, pulse) = (Arc::clone(shared), Arc::clone(&pulse));
        async move { Ok::<_, Infallible>(respond(request, &shared, pulse).await) }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    let builder = builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(HEAD_BYTES_MAX);
    // A client may end its side after its request, and still waits for the answer.
    let builder = builder.half_close(true);
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    // A client that breaks the protocol, or leaves, ends its connection and nothing else.
    while tokio::time::timeout(STALL / 4, connection.as_mut()).await.is_err() {
        if pulse.is_stalled() {
            return;
        }
    }
}

async fn respond(request: Request<Incoming>, shared: &Arc<Shared>, pulse: Arc<Pulse>) -> Response<Body> {
    pulse.beat();
    let mut response = match shared.guard.check(&request) {
        Verdict::Allowed => route(&request, shared, pulse).await,
        Verdict::SignIn(cookie) => {
            let mut response = text(StatusCode::SEE_OTHER, "text/plain", String::new());
            response.headers_mut().insert(header::LOCATION, HeaderValue::from_static("/"));
            response.headers_mut().insert(header::SET_COOKIE, cookie);
            response
        }
        Verdict::Refused(status, why) => text(status, "text/plain; charset=utf-8", why.to_owned()),
    };
    for (name, value) in guard::HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn route(request: &Request<Incoming>, shared: &Arc<Shared>, pulse: Arc<Pulse>) -> Response<Body> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "text/plain", "runs can only be read here".to_owned());
    }
    let path = request.uri().path().to_owned();
    if let Some((kind, content)) = crate::page::asset(&path) {
        return text(StatusCode::OK, kind, content.into_owned());
    }
    if path == "/events" {
        let mut response = Response::new(Either::Right(shared.hub.watch(move || pulse.beat())));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        return response;
    }
    let query = request.uri().query().unwrap_or("").to_owned();
    let shared = Arc::clone(shared);
    // Files are read elsewhere, so that a large one makes nobody else wait.
    let answer =
        tokio::task::spawn_blocking(move || api::answer(&path, &query, &shared.store, &shared.timelines)).await;
    match answer {
        Ok(Ok(answer)) => text(StatusCode::OK, answer.kind, answer.text),
        Ok(Err(error)) => text(error.status(), "text/plain; charset=utf-8", error.to_string()),
        Err(_) => text(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", "the request failed".to_owned()),
    }
}

fn text(status: StatusCode, kind: &'static str, content: String) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::new(Bytes::from(content))));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
