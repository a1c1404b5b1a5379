//! A server of objects with scripted faults, which speaks as much HTTP and S3 as readers need.
//!
//! It is shared by the tests of the crates that read objects.

#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A fault of the answer to one request for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The connection is closed after this many bytes of the body, or before its last byte: an
    /// answer that came whole would be no fault.
    Reset(usize),
    /// An answer without the object.
    Status(u16),
    /// The same, and the client is asked to wait for a second.
    RetryAfter(u16),
    /// A Content-Length that is this much too long, and then the end.
    TooLong(usize),
    /// A shorter part than was asked for, by this many bytes, in an answer that is consistent.
    Short(usize),
    /// As many bytes as [`Fault::Reset`] has, and then silence until the client is gone.
    Silence(usize),
    /// The object has another ETag from now on.
    Changed,
}

/// The state of a server.
#[derive(Default)]
pub struct State {
    /// Bodies by path, such as `/bucket/key`.
    pub objects: BTreeMap<String, Vec<u8>>,
    /// Faults of the next requests for bytes; requests after them succeed.
    pub faults: VecDeque<Fault>,
    /// True for a server that answers a request for a range by the whole.
    pub without_ranges: bool,
    /// True to refuse requests without a signature.
    pub wants_signature: bool,
    /// Redirections by path.
    pub moved: BTreeMap<String, String>,
    /// First lines and ranges of all requests.
    pub requests: Vec<String>,
    /// Part of every ETag.
    pub version: u32,
}

/// A server on this machine, until the process ends.
#[derive(Clone)]
pub struct Server {
    pub state: Arc<Mutex<State>>,
    pub url: String,
}

impl Server {
    pub fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = shared.clone();
                // Heads and bodies are written apart, and must not wait for each other.
                stream.set_nodelay(true).expect("a socket");
                std::thread::spawn(move || while answer(&stream, &shared).is_some() {});
            }
        });
        Server { state, url }
    }

    pub fn put(&self, path: &str, body: impl Into<Vec<u8>>) {
        self.state.lock().unwrap().objects.insert(path.into(), body.into());
    }

    pub fn fail(&self, faults: &[Fault]) {
        self.state.lock().unwrap().faults.extend(faults);
    }

    /// The requests since the last call.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }
}

/// Answers one request; None when the connection is over.
fn answer(mut stream: &TcpStream, shared: &Mutex<State>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|&bytes| bytes > 0)?;
    let mut headers = BTreeMap::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let Some((name, value)) = header.trim().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let range = headers.get("range").map(|range| range.trim_start_matches("bytes=").to_owned());
    let is_probe = method == "HEAD" || range.as_deref() == Some("0-0");

    let mut state = shared.lock().unwrap();
    state.requests.push(format!("{method} {path} {}", range.as_deref().unwrap_or("-")));
    let head = |status: u16, more: &str, length: usize| {
        format!(
            "HTTP/1.1 {status} Status\r\nContent-Length: {length}\r\n\
             Last-Modified: Thu, 26 Nov 2026 20:00:00 GMT\r\n{more}\r\n"
        )
    };
    if state.wants_signature && !headers.contains_key("authorization") {
        let body = "<Error><Code>AccessDenied</Code></Error>";
        stream.write_all((head(403, "", body.len()) + body).as_bytes()).ok()?;
        return Some(());
    }
    if let Some(place) = state.moved.get(path) {
        stream.write_all(head(302, &format!("Location: {place}\r\n"), 0).as_bytes()).ok()?;
        return Some(());
    }
    if query.contains("list-type=2") {
        let body = listing(&state, path, query);
        stream.write_all((head(200, "Content-Type: application/xml\r\n", body.len()) + &body).as_bytes()).ok()?;
        return Some(());
    }
    let Some(body) = state.objects.get(path).cloned() else {
        stream.write_all(head(404, "", 0).as_bytes()).ok()?;
        return Some(());
    };
    let fault = if is_probe { None } else { state.faults.pop_front() };
    if fault == Some(Fault::Changed) {
        state.version += 1;
    }
    let (version, without_ranges) = (state.version, state.without_ranges);
    drop(state);
    if let Some(Fault::Status(status) | Fault::RetryAfter(status)) = fault {
        let more = if matches!(fault, Some(Fault::RetryAfter(_))) { "Retry-After: 1\r\n" } else { "" };
        stream.write_all(head(status, more, 0).as_bytes()).ok()?;
        return Some(());
    }
    let etag = format!("\"{version}-{}\"", body.len());
    if headers.get("if-match").is_some_and(|wanted| *wanted != etag) {
        stream.write_all(head(412, "", 0).as_bytes()).ok()?;
        return Some(());
    }
    let (first, mut end) = match range.as_deref().filter(|_| !without_ranges).and_then(|range| range.split_once('-')) {
        Some((first, last)) => (first.parse().ok()?, (last.parse::<usize>().ok()? + 1).min(body.len())),
        None => (0, body.len()),
    };
    let is_part = range.is_some() && !without_ranges;
    if is_part && first >= body.len() {
        let more = format!("Content-Range: bytes */{}\r\nETag: {etag}\r\n", body.len());
        stream.write_all(head(416, &more, 0).as_bytes()).ok()?;
        return Some(());
    }
    if let Some(Fault::Short(by)) = fault {
        end = end.saturating_sub(by).max(first + 1);
    }
    let part = &body[first..end];
    let mut more = format!("ETag: {etag}\r\n");
    if is_part {
        more += &format!("Content-Range: bytes {first}-{}/{}\r\n", end - 1, body.len());
    }
    let length = part.len() + if let Some(Fault::TooLong(by)) = fault { by } else { 0 };
    stream.write_all(head(if is_part { 206 } else { 200 }, &more, length).as_bytes()).ok()?;
    if method == "HEAD" {
        return Some(());
    }
    match fault {
        Some(Fault::Reset(bytes)) => {
            stream.write_all(&part[..bytes.min(part.len().saturating_sub(1))]).ok()?;
            stream.shutdown(std::net::Shutdown::Both).ok()?;
            None
        }
        Some(Fault::TooLong(_)) => {
            stream.write_all(part).ok()?;
            stream.shutdown(std::net::Shutdown::Both).ok()?;
            None
        }
        Some(Fault::Silence(bytes)) => {
            stream.write_all(&part[..bytes.min(part.len().saturating_sub(1))]).ok()?;
            // Until the client hangs up.
            stream.set_read_timeout(Some(Duration::from_secs(60))).ok()?;
            let _ = reader.read(&mut [0]);
            None
        }
        _ => stream.write_all(part).ok(),
    }
}

/// An answer to ListObjectsV2, all in one page.
fn listing(state: &State, bucket: &str, query: &str) -> String {
    let value = |name: &str| {
        let found = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        found.unwrap_or("").replace("%2F", "/")
    };
    let (prefix, delimiter) = (value("prefix"), value("delimiter"));
    let root = format!("{}/", bucket.trim_end_matches('/'));
    let mut items = String::new();
    for (path, body) in &state.objects {
        let Some(key) = path.strip_prefix(&root).filter(|key| key.starts_with(&prefix)) else { continue };
        if !delimiter.is_empty() && key[prefix.len()..].contains(&delimiter) {
            continue;
        }
        items += &format!(
            "<Contents><Key>{key}</Key><LastModified>2026-11-26T20:00:00.000Z</LastModified>\
             <ETag>&quot;{}-{}&quot;</ETag><Size>{}</Size></Contents>",
            state.version,
            body.len(),
            body.len()
        );
    }
    format!(
        "<?xml version=\"1.0\"?><ListBucketResult><Name>b</Name><Prefix>{prefix}</Prefix><KeyCount>1</KeyCount>\
         <MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
    )
}
