//! Access to one object: through `object_store` for buckets, by plain requests for HTTP servers.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use hyper::header::{
    ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_MATCH, IF_UNMODIFIED_SINCE, LAST_MODIFIED, LOCATION,
    RANGE, USER_AGENT,
};
use hyper::{HeaderMap, Method, StatusCode, Uri};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::{HttpRequest, HttpRequestBody, HttpResponse};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig};

use crate::Store;
use crate::address::{Address, Scheme};
use crate::client::{Client, next_piece};
use crate::error::StoreError;
use crate::fetch::{Fault, changed, deepest, refusal, store_fault};
use crate::object::{About, Inner};
use crate::profile::with_profile;

/// Redirections followed in a row.
const REDIRECTIONS_MAX: usize = 10;

/// The way to an object.
#[derive(Clone)]
pub(crate) enum Remote {
    Bucket { store: Arc<dyn ObjectStore>, key: Key },
    Web { uri: Uri },
}

/// An answer with bytes of an object.
pub(crate) struct Answer {
    /// The byte of the object at which it begins.
    pub(crate) start: u64,
    pub(crate) pieces: BoxStream<'static, Result<Bytes, String>>,
}

impl Store {
    /// The client of a bucket.
    pub(crate) fn bucket(&self, address: &Address) -> Result<Arc<dyn ObjectStore>, StoreError> {
        let mut buckets = self.0.buckets.lock().expect("no thread panics with the lock");
        if let Some(store) = buckets.get(&address.bucket) {
            return Ok(store.clone());
        }
        let client = self.0.client.clone();
        // Retries are ours: they go on at the byte that was reached, whatever failed.
        let retry = RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, ..RetryConfig::default() };
        let name = address.bucket.split_once("://").map_or("", |(_, name)| name);
        let built: Result<Arc<dyn ObjectStore>, _> = match address.scheme {
            Scheme::S3 => {
                let builder = with_profile(AmazonS3Builder::from_env()).with_bucket_name(name);
                builder.with_retry(retry).with_http_connector(client).build().map(|store| Arc::new(store) as _)
            }
            Scheme::Gcs => {
                let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(name);
                builder.with_retry(retry).with_http_connector(client).build().map(|store| Arc::new(store) as _)
            }
            Scheme::Azure | Scheme::Http => {
                let builder = MicrosoftAzureBuilder::from_env().with_url(&address.bucket);
                builder.with_retry(retry).with_http_connector(client).build().map(|store| Arc::new(store) as _)
            }
        };
        let store = built.map_err(|error| {
            let what = format!("the store cannot be used ({})", deepest(&error));
            StoreError::new(address.bucket.clone(), what, advice(address.scheme))
        })?;
        buckets.insert(address.bucket.clone(), store.clone());
        Ok(store)
    }
}

/// The variables that hold credentials and places.
pub(crate) fn advice(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::S3 => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN), or AWS_PROFILE, or for a public \
             bucket AWS_SKIP_SIGNATURE=true; AWS_REGION is the bucket's region, AWS_ENDPOINT_URL another service than \
             AWS"
        }
        Scheme::Gcs => {
            "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or for a public bucket \
             GOOGLE_SKIP_SIGNATURE=true"
        }
        Scheme::Azure => {
            "set AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or for a public \
             container AZURE_SKIP_SIGNATURE=true"
        }
        Scheme::Http => "give a URL that needs no login, such as a signed one",
    }
}

/// The properties of an object of a bucket.
pub(crate) fn about(meta: &ObjectMeta) -> About {
    let nanoseconds = meta.last_modified.timestamp_nanos_opt().unwrap_or(0);
    About {
        bytes: meta.size,
        etag: meta.e_tag.clone(),
        modified: Some(meta.last_modified.to_rfc3339()),
        modified_ns: nanoseconds.max(0) as u64,
        has_ranges: true,
    }
}

/// The properties of the object at `address`.
pub(crate) async fn look(store: &Store, address: &Address) -> Result<(Remote, About), Fault> {
    let name = address.name();
    if address.scheme == Scheme::Http {
        let uri: Uri = address.url.split('#').next().unwrap_or("").parse().map_err(|error| {
            let what = format!("is no valid URL ({error})");
            Fault::Fatal(StoreError::new(&name, what, "encode special characters, a space as %20"))
        })?;
        let about = probe(&store.0.client, &name, &uri).await?;
        return Ok((Remote::Web { uri }, about));
    }
    let bucket = store.bucket(address).map_err(Fault::Fatal)?;
    let key = Key::parse(&address.key).map_err(|error| {
        Fault::Fatal(StoreError::new(&name, format!("is no valid name of an object ({error})"), "check the URL"))
    })?;
    let meta = bucket.head(&key).await.map_err(|error| store_fault(&name, address.scheme, &error))?;
    Ok((Remote::Bucket { store: bucket, key }, about(&meta)))
}

/// Asks an HTTP server for the first byte: servers refuse HEAD more often, and the answer says
/// whether ranges can be had.
async fn probe(client: &Client, name: &str, uri: &Uri) -> Result<About, Fault> {
    let mut headers = HeaderMap::new();
    headers.insert(RANGE, "bytes=0-0".parse().expect("a header"));
    let answer = get(client, name, uri, headers).await?;
    let has_ranges = match answer.status() {
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => true,
        StatusCode::OK => false,
        status => return Err(refusal(name, Scheme::Http, status, "")),
    };
    let headers = answer.headers();
    let bytes = match has_ranges {
        true => content_range(headers).map(|(_, total)| total),
        false => text(headers, CONTENT_LENGTH).and_then(|length| length.parse().ok()),
    };
    let Some(bytes) = bytes else {
        let fix = "copy the file to a disk or a store, and name that";
        return Err(Fault::Fatal(StoreError::new(name, "the server does not say how long it is", fix)));
    };
    let modified = text(headers, LAST_MODIFIED);
    let time = modified.as_deref().and_then(|date| httpdate::parse_http_date(date).ok());
    let modified_ns =
        time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |since| since.as_nanos() as u64);
    Ok(About { bytes, etag: text(headers, ETAG), modified, modified_ns, has_ranges })
}

fn text(headers: &HeaderMap, name: hyper::header::HeaderName) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// First byte and size of the whole object, of `bytes 0-9/100`; for `bytes */100` the first is 0.
fn content_range(headers: &HeaderMap) -> Option<(u64, u64)> {
    let value = text(headers, CONTENT_RANGE)?;
    let (range, total) = value.trim().strip_prefix("bytes")?.trim().split_once('/')?;
    let start = range.split_once('-').map_or(Some(0), |(start, _)| start.trim().parse().ok())?;
    Some((start, total.trim().parse().ok()?))
}

/// Sends a GET, and follows redirections, but never from an encrypted connection to a plain one.
async fn get(client: &Client, name: &str, uri: &Uri, headers: HeaderMap) -> Result<HttpResponse, Fault> {
    let mut uri = uri.clone();
    for _ in 0..=REDIRECTIONS_MAX {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = Method::GET;
        *request.uri_mut() = uri.clone();
        *request.headers_mut() = headers.clone();
        // A packed transfer would have other ranges than the object.
        request.headers_mut().insert(ACCEPT_ENCODING, "identity".parse().expect("a header"));
        request
            .headers_mut()
            .insert(USER_AGENT, concat!("trainyard/", env!("CARGO_PKG_VERSION")).parse().expect("a header"));
        let answer = client.send(request).await.map_err(|error| Fault::passing(deepest(&error)))?;
        let status = answer.status();
        let target = text(answer.headers(), LOCATION).filter(|_| status.is_redirection());
        let Some(target) = target else { return Ok(answer) };
        let refuse = |what: &str| Fault::Fatal(StoreError::new(name, what, "name the file where it is now"));
        let next = follow(&uri, &target).ok_or_else(|| refuse("the server points to a place that is no URL"))?;
        if uri.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
            return Err(refuse("the server points from an encrypted connection to a plain one"));
        }
        uri = next;
    }
    let what = format!("the server points from one place to the next more than {REDIRECTIONS_MAX} times");
    Err(Fault::Fatal(StoreError::new(name, what, "name the file where it is now")))
}

/// The place that `target` names, seen from `uri`.
fn follow(uri: &Uri, target: &str) -> Option<Uri> {
    let target = target.split('#').next()?;
    let (scheme, host) = (uri.scheme_str()?, uri.authority()?);
    let whole = if target.contains("://") {
        target.to_owned()
    } else if target.starts_with("//") {
        format!("{scheme}:{target}")
    } else if target.starts_with('/') {
        format!("{scheme}://{host}{target}")
    } else {
        let folder = uri.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{host}{folder}/{target}")
    };
    let next: Uri = whole.parse().ok()?;
    matches!(next.scheme_str(), Some("http" | "https")).then_some(next)
}

/// Asks for `range` of an object; for all of it, if the server knows no ranges.
pub(crate) async fn ask(object: &Inner, range: Range<u64>) -> Result<Answer, Fault> {
    let (name, about) = (&object.name, &object.about);
    match &object.remote {
        Remote::Bucket { store, key } => {
            let start = range.start;
            let options = GetOptions {
                range: Some(GetRange::Bounded(range)),
                if_match: about.etag.clone(),
                ..Default::default()
            };
            let found = store.get_opts(key, options).await;
            let found = found.map_err(|error| store_fault(name, object.scheme, &error))?;
            if found.meta.e_tag != about.etag {
                return Err(changed(name));
            }
            check_length(name, about, found.meta.size)?;
            let pieces = found.into_stream().map(|piece| piece.map_err(|error| deepest(&error)));
            Ok(Answer { start, pieces: pieces.boxed() })
        }
        Remote::Web { uri } => {
            let mut headers = HeaderMap::new();
            if about.has_ranges {
                let value = format!("bytes={}-{}", range.start, range.end - 1);
                headers.insert(RANGE, value.parse().expect("a header"));
            }
            // A weak ETag never matches by the rules of If-Match; it is compared below.
            let strong = about.etag.as_ref().filter(|etag| !etag.starts_with("W/"));
            let condition = match (strong, &about.etag, &about.modified) {
                (Some(etag), _, _) => Some((IF_MATCH, etag)),
                (None, None, Some(date)) => Some((IF_UNMODIFIED_SINCE, date)),
                _ => None,
            };
            if let Some((header, value)) = condition
                && let Ok(value) = value.parse()
            {
                headers.insert(header, value);
            }
            let answer = get(&object.store.0.client, name, uri, headers).await?;
            let found = answer.headers();
            let (start, total) = match answer.status() {
                StatusCode::PARTIAL_CONTENT => {
                    content_range(found).ok_or_else(|| Fault::passing("an answer without a Content-Range".into()))?
                }
                StatusCode::OK => {
                    let length = text(found, CONTENT_LENGTH).and_then(|length| length.parse().ok());
                    (0, length.unwrap_or(about.bytes))
                }
                status => return Err(refusal(name, Scheme::Http, status, "")),
            };
            // An answer that lacks a header that it had before is not taken for a change.
            let differs = |header, known: &Option<String>| {
                let found = text(found, header);
                found.is_some() && known.is_some() && found != *known
            };
            let is_changed = match about.etag {
                Some(_) => differs(ETAG, &about.etag),
                None => differs(LAST_MODIFIED, &about.modified),
            };
            if is_changed {
                return Err(changed(name));
            }
            check_length(name, about, total)?;
            if start > range.start {
                return Err(Fault::passing(format!("an answer from byte {start} instead of {}", range.start)));
            }
            let body = answer.into_body();
            let pieces = futures_util::stream::unfold(body, |mut body| async move {
                let piece = next_piece(&mut body).await?;
                Some((piece.map_err(|error| deepest(&error)), body))
            });
            Ok(Answer { start, pieces: pieces.boxed() })
        }
    }
}

/// Compares the length in an answer with the known one. If an ETag says that the object is the
/// same, the answer is wrong; else the object changed.
fn check_length(name: &str, about: &About, found: u64) -> Result<(), Fault> {
    match (found == about.bytes, &about.etag) {
        (true, _) => Ok(()),
        (false, None) => Err(changed(name)),
        (false, Some(_)) => Err(Fault::passing(format!("an answer of {found} bytes instead of {}", about.bytes))),
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A URL may hold a signature.
        f.write_str(match self {
            Remote::Bucket { .. } => "Bucket",
            Remote::Web { .. } => "Web",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirections_are_followed_as_browsers_do() {
        let from: Uri = "https://host:8/a/b.tar?x=1".parse().unwrap();
        let to = |target: &str| follow(&from, target).map(|uri| uri.to_string());
        assert_eq!(to("https://other/c").as_deref(), Some("https://other/c"));
        assert_eq!(to("//other/c").as_deref(), Some("https://other/c"));
        assert_eq!(to("/c?y=2#z").as_deref(), Some("https://host:8/c?y=2"));
        assert_eq!(to("c").as_deref(), Some("https://host:8/a/c"));
        assert_eq!(to("ftp://other/c"), None);
    }

    #[test]
    fn ranges_of_answers_are_read() {
        let read = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, value.parse().unwrap());
            content_range(&headers)
        };
        assert_eq!(read("bytes 5-9/100"), Some((5, 100)));
        assert_eq!(read("bytes */0"), Some((0, 0)));
        assert_eq!(read("bytes 5-9/*"), None);
        assert_eq!(read("lines 5-9/100"), None);
    }
}
