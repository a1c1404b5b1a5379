//! The server, by real requests.

use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use trainyard_dashboard::server::{Options, ServeError, Server};

const SECRET: &str = "the-secret-outside-of-the-runs";

/// A folder `runs` with two runs, and a file outside of it.
struct Runs(tempfile::TempDir);

impl Runs {
    fn new() -> Runs {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("secret.json"), format!("{{\"step\":1,\"x\":\"{SECRET}\"}}")).unwrap();
        let runs = Runs(folder);
        for (name, dim) in [("first", 64), ("second run", 128)] {
            let run = runs.path().join(name);
            fs::create_dir_all(run.join("trace")).unwrap();
            fs::write(run.join("config.toml"), format!("[model]\ndim = {dim}\n[training]\nsteps = 20\n")).unwrap();
            fs::write(run.join("metrics.jsonl"), (1..=10).map(record).collect::<String>()).unwrap();
            fs::write(run.join("evaluations.jsonl"), "{\"step\":10,\"loss\":3.5}\n").unwrap();
            let span = r#"{"name":"forward head","ph":"X","ts":1.0,"dur":5.0,"pid":0,"tid":2,"args":{"step":4}},"#;
            fs::write(run.join("trace/rank-0.json"), format!("[\n{span}\n")).unwrap();
        }
        runs
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("runs")
    }

    fn serve(&self, options: Options) -> SocketAddr {
        let server = Server::bind(&self.path(), &Options { port: Some(0), ..options }).unwrap();
        let address = server.address();
        server.spawn().unwrap();
        SocketAddr::from((Ipv4Addr::LOCALHOST, address.port()))
    }
}

fn record(step: u32) -> String {
    format!("{{\"step\":{step},\"loss\":{},\"tps\":1000,\"mem_peak\":{{\"grads\":7}}}}\n", 4.0 + 1.0 / f64::from(step))
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

/// Sends bytes and reads until the server closes the connection.
fn send(address: SocketAddr, request: &[u8]) -> Option<Answer> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // A server that refuses may close before everything was sent.
    let _ = stream.write_all(request);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head: head.to_owned(), body: body.to_owned() })
}

fn get_with(address: SocketAddr, path: &str, headers: &str) -> Answer {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n");
    send(address, request.as_bytes()).unwrap_or_else(|| panic!("no answer to {path}"))
}

fn get(address: SocketAddr, path: &str) -> Answer {
    get_with(address, path, "")
}

fn json(address: SocketAddr, path: &str) -> Value {
    let answer = get(address, path);
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    serde_json::from_str(&answer.body).unwrap()
}

#[test]
fn the_page_and_its_data_are_served() {
    let runs = Runs::new();
    let address = runs.serve(Options::default());
    let page = get(address, "/");
    assert!(
        page.body.contains("<title>Trainyard</title>") && page.head.contains("default-src 'none'"),
        "{}",
        page.head
    );
    for (path, part) in [("/script.js", "class Chart"), ("/style.css", "--accent"), ("/icon.svg", "<svg")] {
        assert!(get(address, path).body.contains(part), "{path}");
    }
    let list = json(address, "/api/runs");
    assert_eq!((list["runs"].as_array().unwrap().len(), &list["runs"][1]["name"]), (2, &"second run".into()));
    assert_eq!(list["differing"], serde_json::json!(["model.dim"]));
    assert_eq!(list["runs"][1]["settings"]["model.dim"], 128);
    let about = json(address, "/api/run?run=second%20run");
    assert_eq!((&about["config"]["model.dim"], &about["timeline_steps"][0]), (&128.into(), &4.into()));
    assert!(about["metrics"].as_array().unwrap().contains(&"evaluation.loss".into()));
    let path =
        "/api/curves?run=first&run=second+run&metric=loss&metric=evaluation.loss&metric=mem_peak.grads&from=3&to=5";
    let curves = json(address, path);
    assert_eq!(curves["curves"].as_array().unwrap().len(), 6);
    // One record more on each side, so that lines go on beyond the edges.
    assert_eq!(curves["curves"][0]["places"], serde_json::json!([2.0, 3.0, 4.0, 5.0, 6.0]));
    assert_eq!(json(address, "/api/timeline?run=first&step=4")["ranks"][0]["spans"][0]["name"], "forward head");
    let metrics = get(address, "/metrics").body;
    assert!(metrics.contains("# TYPE trainyard_loss gauge\ntrainyard_loss{run=\"first\"} 4.1\n"), "{metrics}");
    assert!(metrics.contains("trainyard_mem_peak_grads{run=\"second run\"} 7\n"));
}

#[test]
fn wrong_requests_are_told_what_is_wrong() {
    let runs = Runs::new();
    let address = runs.serve(Options::default());
    for (path, status, part) in [
        ("/api/run?run=none", 404, "there is no run `none`"),
        ("/api/run", 400, "the parameter `run` is missing"),
        ("/api/timeline?run=first&step=x", 400, "`step` is not a number"),
        ("/api/curves?run=first&metric=loss&scale=x", 400, "`scale` is linear or log"),
        ("/api/none", 404, "there is nothing at /api/none"),
        ("/api/curves?run=first&metric=none&bins=1e300", 200, "\"curves\":[]"),
    ] {
        let answer = get(address, path);
        assert!(answer.status == status && answer.body.contains(part), "{path}: {} {}", answer.status, answer.body);
    }
    let written = send(
        address,
        b"POST /api/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    );
    assert_eq!(written.unwrap().status, 405);
}

#[test]
fn nothing_outside_of_the_runs_is_read() {
    let runs = Runs::new();
    let outside = runs.0.path().join("secret.json");
    let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, runs.path().join(name)).unwrap();
    fs::create_dir(runs.path().join("linked")).unwrap();
    link(&outside, "linked/metrics.jsonl");
    link(&outside, "linked/config.toml");
    link(&outside, "linked/verdicts.json");
    link(runs.0.path(), "around");
    let address = runs.serve(Options::default());
    let names = ["..", "../runs/first", "first/../..", "%2e%2e", "/etc", "around", "linked", "first%00", "."];
    for name in names {
        for path in ["run?run=", "curves?metric=x&metric=step&run=", "timeline?step=1&run="] {
            let answer = get(address, &format!("/api/{path}{name}"));
            assert!(!answer.body.contains(SECRET), "{path}{name}: {}", answer.body);
            assert!(answer.status == 404 || name == "linked", "{path}{name}: {}", answer.status);
        }
    }
    // The run whose files lead outside is listed without numbers, and hides no other.
    let list = json(address, "/api/runs");
    let listed: Vec<_> = list["runs"].as_array().unwrap().iter().map(|run| (&run["name"], &run["step"])).collect();
    assert_eq!(
        listed,
        [(&"first".into(), &10.into()), (&"linked".into(), &0.into()), (&"second run".into(), &10.into())]
    );
    for path in
        ["/../secret.json", "/..%2fsecret.json", "//etc/passwd", "/runs/first/config.toml", "/first/metrics.jsonl"]
    {
        assert_eq!(get(address, path).status, 404, "{path}");
    }
}

#[test]
fn the_loopback_answers_to_its_own_names_only() {
    let runs = Runs::new();
    let address = runs.serve(Options::default());
    let asked = |host: &str| {
        send(address, format!("GET /api/runs HTTP/1.1\r\n{host}Connection: close\r\n\r\n").as_bytes()).unwrap().status
    };
    for host in ["Host: localhost\r\n", "Host: localhost:8724\r\n", "Host: 127.0.0.1:1\r\n", "Host: [::1]:8724\r\n"] {
        assert_eq!(asked(host), 200, "{host}");
    }
    for host in ["Host: evil.example\r\n", "Host: localhost.evil.example\r\n", "Host: 10.0.0.1\r\n", ""] {
        assert!([400, 403].contains(&asked(host)), "{host}");
    }
}

#[test]
fn elsewhere_a_token_is_needed() {
    let runs = Runs::new();
    let token = "a-token-of-some-length";
    let host = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let address = runs.serve(Options { host, token: Some(token.to_owned()), ..Options::default() });
    for path in
        ["/", "/api/runs", "/events", "/metrics", "/script.js", "/api/runs?token=a-token-of-some-lengtX", "/?token="]
    {
        assert_eq!(get(address, path).status, 401, "{path}");
    }
    let page = get(address, &format!("/?token={token}"));
    assert!(page.status == 303 && page.head.contains("HttpOnly; SameSite=Strict"), "{}", page.head);
    assert_eq!(get_with(address, "/api/runs", &format!("Cookie: a=b; trainyard_token={token}\r\n")).status, 200);
    assert_eq!(get_with(address, "/metrics", &format!("Authorization: Bearer {token}\r\n")).status, 200);
    assert_eq!(get(address, &format!("/api/runs?token={token}")).status, 200);

    let random = Server::bind(&runs.path(), &Options { host, port: Some(0), token: None }).unwrap().url();
    assert_eq!(random.split("token=").nth(1).unwrap().len(), 32, "{random}");
    let short = Server::bind(&runs.path(), &Options { host, port: Some(0), token: Some("short".to_owned()) });
    assert!(matches!(short, Err(ServeError::Token)));
}

/// The data of the next event.
fn event(reader: &mut impl BufRead) -> Value {
    loop {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).unwrap() > 0, "the stream ended");
        if let Some(data) = line.strip_prefix("data: ") {
            return serde_json::from_str(data).unwrap();
        }
    }
}

#[test]
fn watchers_hear_of_new_records_and_of_runs_that_resume() {
    let runs = Runs::new();
    let address = runs.serve(Options::default());
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut reader = BufReader::new(stream);
    assert_eq!(event(&mut reader)["runs"].as_array().unwrap().len(), 2);
    let path = runs.path().join("first/metrics.jsonl");
    let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    write!(file, "{}{}", record(11), record(12)).unwrap();
    let records = loop {
        let news = event(&mut reader);
        if let Some(records) = news["records"].get(0) {
            break records.clone();
        }
    };
    assert_eq!((&records["run"], &records["start"], &records["end"]), (&"first".into(), &10.into(), &12.into()));
    assert_eq!(records["places"], serde_json::json!([[11.0, 11.0], [12.0, 12.0]]));
    assert_eq!(records["values"]["mem_peak.grads"], serde_json::json!([7.0, 7.0]));
    // The run goes on from step 6: it replaces its records.
    let new = path.with_extension("new");
    fs::write(&new, (1..=7).map(record).collect::<String>()).unwrap();
    fs::rename(&new, &path).unwrap();
    let records = loop {
        let news = event(&mut reader);
        if let Some(records) = news["records"].get(0) {
            break records.clone();
        }
    };
    assert_eq!((&records["generation"], &records["start"], &records["end"]), (&1.into(), &0.into(), &7.into()));
    let curve = &json(address, "/api/curves?run=first&metric=loss")["curves"][0];
    assert_eq!((&curve["generation"], curve["places"].as_array().unwrap().len()), (&1.into(), 7));
}

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// A small generator, so that the test is the same every time.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % end as u64) as usize
    }
}

#[test]
fn requests_of_any_bytes_neither_panic_nor_leave_the_folder() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        // Panics of other tests in this program are their own.
        if std::thread::current().name().is_none_or(|name| name.starts_with("dashboard") || name.starts_with("tokio")) {
            PANICS.fetch_add(1, Ordering::Relaxed);
        }
        hook(info);
    }));
    let runs = Runs::new();
    let address = runs.serve(Options::default());
    let seeds: [&[u8]; 6] = [
        b"GET /api/curves?run=first&metric=loss&from=1&to=5&bins=3&scale=log HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /api/run?run=first HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /api/timeline?run=first&step=4 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /../../secret.json HTTP/1.1\r\nHost: localhost\r\nCookie: trainyard_token=x\r\nConnection: close\r\n\r\n",
        b"POST /api/run HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"GET /metrics HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n",
    ];
    let parts: [&[u8]; 14] = [
        b"..",
        b"%2e%2e%2f",
        b"\0",
        b"\r\n",
        b"%",
        b"&",
        b"=",
        b"1e999",
        b"-1",
        b"nan",
        b"\xff\xfe",
        b"inf",
        b"Content-Length: 99999999999999999999\r\n",
        b"18446744073709551616",
    ];
    let mut random = Random(7);
    for _ in 0..1_500 {
        let mut request = seeds[random.below(seeds.len())].to_vec();
        for _ in 0..=random.below(4) {
            let at = random.below(request.len());
            match random.below(4) {
                0 => request[at] = random.below(256) as u8,
                1 => drop(request.splice(at..at, parts[random.below(parts.len())].iter().copied())),
                2 => drop(request.drain(at..(at + random.below(12)).min(request.len()))),
                _ => {
                    let again = request[at..(at + random.below(40)).min(request.len())].to_vec();
                    drop(request.splice(at..at, again));
                }
            }
            if request.is_empty() {
                request.push(b'G');
            }
        }
        if let Some(answer) = send(address, &request) {
            assert!(!answer.body.contains(SECRET), "{}", String::from_utf8_lossy(&request));
            assert_ne!(answer.status, 500, "{}: {}", String::from_utf8_lossy(&request), answer.body);
        }
    }
    let long = [b"GET /".as_slice(), &vec![b'a'; 1 << 20], b" HTTP/1.1\r\nHost: localhost\r\n\r\n"].concat();
    assert!(send(address, &long).is_none_or(|answer| [400, 414, 431].contains(&answer.status)));
    let many = format!("GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "a: b\r\n".repeat(5_000));
    assert!(send(address, many.as_bytes()).is_none_or(|answer| [400, 431].contains(&answer.status)));
    assert_eq!((PANICS.load(Ordering::Relaxed), get(address, "/api/runs").status), (0, 200));
}

#[test]
fn slow_clients_make_nobody_wait() {
    let runs = Runs::new();
    let address = runs.serve(Options::default());
    let slow: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET /api/ru").unwrap();
            stream
        })
        .collect();
    // Watchers who read nothing.
    let deaf: Vec<TcpStream> = (0..50)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            stream
        })
        .collect();
    for _ in 0..20 {
        assert_eq!(get(address, "/api/runs").status, 200);
    }
    drop((slow, deaf));
}
