//! Objects read through every fault of a server are byte-equal to the originals, or are refused.

mod common;

use common::{Fault, Server};
use std::io::Read;
use std::time::Duration;
use trainyard_store::{CacheOptions, Store, StoreOptions};

/// Small blocks and short pauses.
fn options() -> StoreOptions {
    StoreOptions {
        block_bytes: 1000,
        in_flight: 3,
        attempts: 4,
        backoff: Duration::from_millis(1),
        inactivity: Duration::from_millis(300),
        ..StoreOptions::default()
    }
}

fn body(bytes: usize) -> Vec<u8> {
    let mut state = 7u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..bytes).map(|_| byte()).collect()
}

fn read(store: &Store, url: &str) -> Result<Vec<u8>, String> {
    let [object] = &store.find(url).map_err(|error| error.to_string())?[..] else { panic!("{url} is one object") };
    let mut all = Vec::new();
    object.read().read_to_end(&mut all).map_err(|error| error.to_string())?;
    Ok(all)
}

#[test]
fn every_passing_fault_is_survived_and_no_byte_is_lost_or_repeated() {
    let server = Server::start();
    let whole = body(4321);
    server.put("/a.txt", whole.clone());
    let url = format!("{}/a.txt", server.url);
    let faults: &[&[Fault]] = &[
        &[],
        &[Fault::Reset(0)],
        &[Fault::Reset(1), Fault::Reset(333), Fault::Reset(999)],
        &[Fault::Status(500), Fault::Status(500)],
        &[Fault::Status(503), Fault::Reset(10), Fault::Status(429)],
        &[Fault::TooLong(5)],
        &[Fault::Short(300), Fault::Short(1)],
        &[Fault::Silence(0)],
        &[Fault::Silence(17), Fault::Reset(3)],
    ];
    for without_ranges in [false, true] {
        server.state.lock().unwrap().without_ranges = without_ranges;
        for script in faults {
            // A server without ranges has no parts that could be too short.
            if without_ranges && matches!(script.first(), Some(Fault::Short(_))) {
                continue;
            }
            server.fail(script);
            let store = Store::new(options()).unwrap();
            assert!(read(&store, &url).unwrap() == whole, "{script:?}, without ranges: {without_ranges}");
            assert!(server.state.lock().unwrap().faults.is_empty(), "{script:?} was played");
            let traffic = store.traffic();
            // The end of an answer that promised more may come after its last byte.
            let least = script.iter().filter(|fault| !matches!(fault, Fault::TooLong(_))).count() as u64;
            assert!(traffic.retries >= least, "{script:?}: {traffic:?}");
            assert!(traffic.network_bytes >= whole.len() as u64, "{script:?}: {traffic:?}");
        }
    }
}

#[test]
fn a_server_is_asked_to_go_on_at_the_byte_that_was_reached() {
    let server = Server::start();
    server.put("/a", body(1000));
    server.fail(&[Fault::Reset(400), Fault::Short(100)]);
    let store = Store::new(options()).unwrap();
    assert!(read(&store, &format!("{}/a", server.url)).unwrap() == body(1000));
    assert_eq!(server.requests(), ["GET /a 0-0", "GET /a 0-999", "GET /a 400-999", "GET /a 900-999"]);
}

#[test]
fn a_server_is_not_asked_again_before_it_wants_to_be() {
    let server = Server::start();
    server.put("/a", body(10));
    server.fail(&[Fault::RetryAfter(503)]);
    let began = std::time::Instant::now();
    assert!(read(&Store::new(options()).unwrap(), &format!("{}/a", server.url)).unwrap() == body(10));
    assert!(began.elapsed() >= Duration::from_secs(1));
}

#[test]
fn what_cannot_be_read_is_refused_with_the_reason() {
    let store = || Store::new(options()).unwrap();
    let refused = |faults: &[Fault]| {
        // A server of its own: requests of a reading that was given up may still arrive, and would
        // take the faults of the next one.
        let server = Server::start();
        server.put("/a", body(2500));
        server.fail(faults);
        let error = read(&store(), &format!("{}/a?signature=secret", server.url)).unwrap_err();
        assert!(error.starts_with(&format!("{}/a: ", server.url)) && !error.contains("secret"), "{error}");
        error
    };
    assert!(refused(&[Fault::Status(500); 12]).contains("cannot be read after 4 requests (the server answers 500"));
    assert!(refused(&[Fault::Reset(0); 12]).contains("cannot be read after 4 requests"));
    assert!(refused(&[Fault::Silence(0); 12]).contains("after 4 requests (nothing came for 0.3 s)"));
    assert!(refused(&[Fault::Status(403)]).contains("403 Forbidden; give a URL that needs no login"));
    assert!(refused(&[Fault::Status(404)]).contains("404 Not Found; check the URL"));
    assert!(refused(&[Fault::Changed]).contains("changed while it was read; run the command again"));

    let server = Server::start();
    server.put("/a", body(10));
    let error = |url: &str| store().find(url).unwrap_err().to_string();
    assert!(error(&format!("{}/none", server.url)).contains("404"));
    assert!(error(&format!("{}/*.txt", server.url)).contains("cannot be asked for a list"));
    // A refusal is no fault that may pass: one request, no pause.
    server.requests();
    error(&format!("{}/none", server.url));
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn the_cache_serves_the_second_reading_and_never_another_version() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CacheOptions { folder: folder.path().join("cache"), bytes_max: 1 << 20 };
    let options = StoreOptions { cache: Some(cache), ..options() };
    let server = Server::start();
    server.put("/a", body(4321));
    let url = format!("{}/a", server.url);
    let traffic = |expected: &[u8]| {
        // A new store each time, as in another process.
        let store = Store::new(options.clone()).unwrap();
        assert!(read(&store, &url).unwrap() == expected);
        (store.traffic().network_bytes, store.traffic().cache_bytes)
    };
    assert_eq!(traffic(&body(4321)), (4321, 0));
    assert_eq!(traffic(&body(4321)), (0, 4321));
    // A damaged entry is fetched again.
    let entry = std::fs::read_dir(&options.cache.as_ref().unwrap().folder).unwrap().next().unwrap().unwrap().path();
    let mut damaged = std::fs::read(&entry).unwrap();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    std::fs::write(&entry, damaged).unwrap();
    let (network, cached) = traffic(&body(4321));
    assert!(network > 0 && network <= 1000 && network + cached == 4321, "{network} {cached}");
    // The object changes, and has the same length.
    let other: Vec<u8> = body(4321).iter().map(|byte| !byte).collect();
    server.put("/a", other.clone());
    server.state.lock().unwrap().version += 1;
    assert_eq!(traffic(&other), (4321, 0));
}

#[test]
fn redirections_lead_to_the_object() {
    let server = Server::start();
    server.put("/there", body(2000));
    server.state.lock().unwrap().moved.insert("/here".into(), "/there".into());
    server.state.lock().unwrap().moved.insert("/round".into(), "/round".into());
    let store = Store::new(options()).unwrap();
    assert!(read(&store, &format!("{}/here", server.url)).unwrap() == body(2000));
    assert!(read(&store, &format!("{}/round", server.url)).unwrap_err().contains("more than 10 times"));
}

#[test]
fn empty_objects_and_several_names() {
    let server = Server::start();
    for number in 8..=11 {
        server.put(&format!("/s-{number:03}"), vec![number as u8; number]);
    }
    server.put("/empty", Vec::new());
    let store = Store::new(options()).unwrap();
    let found = store.find(&format!("{}/s-{{008..011}}", server.url)).unwrap();
    assert_eq!(found.iter().map(|object| object.bytes()).collect::<Vec<_>>(), [8, 9, 10, 11]);
    assert!(read(&store, &format!("{}/empty", server.url)).unwrap().is_empty());
}
