//! The conformance suite and the failures over TCP. Each test starts this very program several
//! times, where `worker` plays one rank.

mod conformance;
mod departures;
mod processes;

use processes::{CASE, FAULTS, check_reports, report};
use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};
use trainyard_comm::Communicator;
use trainyard_comm::tcp::Rendezvous;

/// A worker that needs longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time for which a rank may outlive the others.
const GRACE: Duration = Duration::from_secs(2);

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts `ranks` workers; the output of each, and true if it succeeded. A worker that does not end
/// when the others have is killed.
fn start(ranks: usize, case: &str) -> Vec<(String, bool)> {
    let port = free_port().to_string();
    let spawn = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["worker", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(CASE, case).env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut workers: Vec<Child> = (0..ranks).map(spawn).collect();
    let mut alone_since = None;
    let began = Instant::now();
    loop {
        let left = workers.iter_mut().filter_map(|worker| worker.try_wait().unwrap().is_none().then_some(worker));
        let mut left: Vec<&mut Child> = left.collect();
        match (left.len(), alone_since) {
            (0, _) => break,
            (1, Some(since)) if Instant::now() >= since + GRACE => left[0].kill().unwrap(),
            (1, None) if ranks > 1 => alone_since = Some(Instant::now()),
            _ => {}
        }
        if began.elapsed() > PATIENCE {
            left.iter_mut().for_each(|worker| worker.kill().unwrap());
        }
        thread::sleep(Duration::from_millis(10));
    }
    let outcome = |worker: Child| {
        let output = worker.wait_with_output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (String::from_utf8_lossy(&said).into_owned(), output.status.success())
    };
    workers.into_iter().map(outcome).collect()
}

/// Runs a case that succeeds on every rank.
fn succeeds(ranks: usize, case: &str) {
    for (rank, (said, success)) in start(ranks, case).into_iter().enumerate() {
        assert!(success && said.contains("worker done"), "rank {rank} of {ranks}: {said}");
    }
}

#[test]
fn the_suite_holds_over_tcp() {
    for ranks in 1..=4 {
        succeeds(ranks, "suite");
    }
}

#[test]
fn any_sequence_over_tcp() {
    succeeds(3, "sequences");
}

#[test]
fn hierarchies_hold_over_tcp() {
    succeeds(4, "hierarchy");
}

#[test]
fn failures_over_tcp_name_their_culprit() {
    // Few at once: most of their time is waiting for deadlines, which busy cores would make others
    // miss.
    let cases: Vec<_> = FAULTS.into_iter().flat_map(|fault| [(fault, 10), (fault, 300_000)]).collect();
    let cases = Mutex::new(cases.into_iter());
    let next = || cases.lock().unwrap().next();
    thread::scope(|scope| {
        let run = || {
            while let Some(((fault, what, survivors), elements)) = next() {
                let said = start(3, &format!("fault/{elements}/{fault}"));
                let reports: Vec<_> = (0..3).map(|rank| report(&said[rank].0, rank)).collect();
                check_reports(fault, what, survivors, &reports);
            }
        };
        scope.spawn(run);
        scope.spawn(run);
    });
}

/// A rank's part, which the tests above start.
#[test]
#[ignore = "started by other tests"]
fn worker() {
    processes::worker("tcp", || Rendezvous::new("127.0.0.1", free_port(), 0, 1).join().unwrap());
}

/// Runs `body` on every rank of a world whose processes are one; what each returned, `None` for
/// those that panicked.
fn outcomes<R: Send>(ranks: u32, body: impl Fn(&Communicator) -> R + Sync) -> Vec<Option<R>> {
    let (body, port) = (&body, free_port());
    let run = |rank| {
        let comm = Rendezvous::new("localhost", port, rank, ranks).join().unwrap();
        catch_unwind(AssertUnwindSafe(move || body(&comm))).ok()
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_panic_an_abort_and_a_departure_are_told_at_once() {
    departures::are_told_at_once(|body| outcomes(3, body), PATIENCE);
}

#[test]
fn lanes_do_not_wait_for_each_other() {
    // One lane's large message waits for a receiver that comes only after the other lane's
    // exchange.
    let results = outcomes(2, |comm| {
        let (first, second) = (comm.duplicate("first").unwrap(), comm.duplicate("second").unwrap());
        let peer = 1 - comm.rank();
        let data = vec![comm.rank() as f32; 2_000_000];
        if comm.rank() == 0 {
            let sent = first.start(data.clone(), move |comm, data| comm.send(data, peer));
            let mut other = vec![0f32; 2_000_000];
            second.recv(&mut other, peer).unwrap();
            sent.wait().unwrap();
            other
        } else {
            second.send(&data, peer).unwrap();
            let mut other = vec![9f32; 2_000_000];
            first.recv(&mut other, peer).unwrap();
            other
        }
    });
    for (rank, result) in results.into_iter().enumerate() {
        assert!(result.unwrap().iter().all(|&value| value == (1 - rank) as f32));
    }
}
