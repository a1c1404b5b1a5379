//! The HTTP client below every store: HTTP/1.1, TLS by rustls, the system's root certificates.
//!
//! `object_store` signs requests and reads listings; it sends them through this client. The client
//! notes the status of each answer and its `Retry-After`, which the errors of `object_store` drop.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::http::uri::Scheme;
use hyper::{HeaderMap, StatusCode};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector as Connector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};

use crate::Counters;

/// Time for a connection to be made.
const CONNECT: Duration = Duration::from_secs(10);

/// The same for a cloud's service of credentials, which is near or not there.
const CONNECT_METADATA: Duration = Duration::from_secs(2);

/// Hosts at which machines of a cloud ask for credentials.
const METADATA_HOSTS: &[&str] = &["169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata"];

/// A pause that a server asks for is obeyed up to this.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// Notes on the requests of one attempt.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    /// Status of the last answer.
    pub(crate) status: Option<StatusCode>,
    /// The pause that it asked for.
    pub(crate) retry_after: Option<Duration>,
    /// True if a cloud's service of credentials was asked and is not there.
    pub(crate) no_credentials: bool,
    /// True if a request was not sent because it would not be encrypted.
    pub(crate) plain_refused: bool,
}

tokio::task_local! {
    /// Notes on the attempt that runs in this task.
    pub(crate) static SEEN: RefCell<Seen>;
}

fn note(change: impl FnOnce(&mut Seen)) {
    // Outside of an attempt nobody reads notes.
    let _ = SEEN.try_with(|seen| change(&mut seen.borrow_mut()));
}

type Pooled = Pool<HttpsConnector<HttpConnector>, HttpRequestBody>;

#[derive(Debug, Clone)]
pub(crate) struct Client {
    plain: Pool<HttpConnector, HttpRequestBody>,
    /// Made when first needed: the root certificates take a moment to read.
    encrypted: Arc<OnceLock<Result<Pooled, String>>>,
    counters: Arc<Counters>,
}

impl Client {
    pub(crate) fn new(counters: Arc<Counters>) -> Self {
        let plain = Pool::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(tcp());
        Self { plain, encrypted: Arc::default(), counters }
    }

    /// Sends a request, encrypted if its URL begins with `https`.
    pub(crate) async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        Counters::add(&self.counters.requests, 1);
        let is_metadata = request.uri().host().is_some_and(|host| METADATA_HOSTS.contains(&host));
        let sent = async {
            match request.uri().scheme() == Some(&Scheme::HTTPS) {
                true => {
                    let pool = self.encrypted.get_or_init(encrypted).as_ref();
                    let pool = pool.map_err(|reason| {
                        HttpError::new(HttpErrorKind::Unknown, std::io::Error::other(reason.clone()))
                    })?;
                    pool.request(request).await.map_err(failed)
                }
                false => self.plain.request(request).await.map_err(failed),
            }
        };
        let answer = match is_metadata {
            true => tokio::time::timeout(CONNECT_METADATA, sent)
                .await
                .unwrap_or_else(|elapsed| Err(HttpError::new(HttpErrorKind::Connect, elapsed))),
            false => sent.await,
        };
        if is_metadata && answer.as_ref().map_or(true, |answer| !answer.status().is_success()) {
            note(|seen| seen.no_credentials = true);
        }
        let answer = answer?;
        note(|seen| {
            seen.status = Some(answer.status());
            seen.retry_after = retry_after(answer.headers(), SystemTime::now());
        });
        Ok(answer
            .map(|body| HttpResponseBody::new(body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error)))))
    }
}

fn tcp() -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_connect_timeout(Some(CONNECT));
    connector.set_nodelay(true);
    connector.set_keepalive(Some(Duration::from_secs(30)));
    connector.enforce_http(false);
    connector
}

fn encrypted() -> Result<Pooled, String> {
    let provider = rustls::crypto::ring::default_provider();
    let builder = HttpsConnectorBuilder::new().with_provider_and_native_roots(provider).map_err(|error| {
        format!("the root certificates of this machine cannot be read ({error}); set SSL_CERT_FILE to a file of them")
    })?;
    let connector = builder.https_only().enable_http1().wrap_connector(tcp());
    Ok(Pool::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector))
}

fn failed(error: hyper_util::client::legacy::Error) -> HttpError {
    let kind = if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Request };
    HttpError::new(kind, error)
}

/// The pause that an answer asks for, in seconds or as a date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(hyper::header::RETRY_AFTER)?.to_str().ok()?.trim();
    let pause = match text.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default(),
    };
    Some(pause.min(RETRY_AFTER_MAX))
}

/// The body of an answer, piece by piece.
pub(crate) async fn next_piece(body: &mut HttpResponseBody) -> Option<Result<Bytes, HttpError>> {
    loop {
        match body.frame().await? {
            Ok(frame) => match frame.into_data() {
                Ok(data) => return Some(Ok(data)),
                Err(_trailers) => continue,
            },
            Err(error) => return Some(Err(error)),
        }
    }
}

/// The client as `object_store` uses it: only encrypted, unless the user allows other.
#[derive(Debug)]
struct Service {
    client: Client,
    allows_plain: bool,
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if request.uri().scheme() != Some(&Scheme::HTTPS) && !self.allows_plain {
            note(|seen| seen.plain_refused = true);
            return Err(HttpError::new(HttpErrorKind::Unknown, std::io::Error::other("plain HTTP is not allowed")));
        }
        self.client.send(request).await
    }
}

impl Connector for Client {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_plain = options.get_config_value(&ClientConfigKey::AllowHttp).is_some_and(|value| value == "true");
        Ok(HttpClient::new(Service { client: self.clone(), allows_plain }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_asks_for_a_pause_by_seconds_or_by_date() {
        let now = httpdate::parse_http_date("Thu, 26 Nov 2026 20:00:00 GMT").unwrap();
        let asked = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("retry-after", value.parse().unwrap());
            retry_after(&headers, now)
        };
        assert_eq!(asked("7"), Some(Duration::from_secs(7)));
        assert_eq!(asked("Thu, 26 Nov 2026 20:00:05 GMT"), Some(Duration::from_secs(5)));
        assert_eq!(asked("Thu, 26 Nov 2026 19:00:00 GMT"), Some(Duration::ZERO));
        assert_eq!(asked("999999"), Some(RETRY_AFTER_MAX));
        assert_eq!(asked("soon"), None);
    }
}
