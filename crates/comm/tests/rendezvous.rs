//! Processes that come together over TCP, and what each of them says when they cannot. Here they
//! are threads: nothing is shared between them but the port.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};
use trainyard_comm::tcp::Rendezvous;

const DEADLINE: Duration = Duration::from_millis(700);

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A rank at `port` of this host that waits for `deadline`.
fn rank(port: u16, rank: u32, world: u32, deadline: Duration) -> Rendezvous {
    Rendezvous { deadline, ..Rendezvous::new("127.0.0.1", port, rank, world) }
}

/// What each process says: the sum of ones over the ranks, or why there is no world.
fn outcomes(processes: Vec<Rendezvous>) -> Vec<Result<f32, String>> {
    let join = |process: Rendezvous| {
        let world = process.join().map_err(|error| error.to_string())?;
        let mut ones = [1f32];
        world.all_reduce(&mut ones).map_err(|error| error.to_string())?;
        Ok(ones[0])
    };
    thread::scope(|scope| {
        let threads: Vec<_> = processes.into_iter().map(|process| scope.spawn(move || join(process))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Everybody's sentence holds all of `parts`.
fn all_say(outcomes: Vec<Result<f32, String>>, parts: &[&str]) {
    for outcome in outcomes {
        let said = outcome.unwrap_err();
        assert!(parts.iter().all(|part| said.contains(part)), "{parts:?}: {said}");
    }
}

#[test]
fn any_order_name_and_family_comes_together() {
    for host in ["127.0.0.1", "localhost", "::1", "127.0.0.7"] {
        if TcpListener::bind((host, 0)).is_err() {
            trainyard_testing::skip_part(format!("{host} is no address of this host"));
            continue;
        }
        let port = free_port();
        let come = Arc::new(Barrier::new(3));
        let join = |rank: u32| {
            let come = Arc::clone(&come);
            thread::spawn(move || {
                // Rank 0 comes last.
                if rank > 0 {
                    come.wait();
                }
                outcomes(vec![Rendezvous::new(host, port, rank, 3)]).remove(0)
            })
        };
        let others = [join(2), join(1)];
        come.wait();
        for process in others.into_iter().chain([join(0)]) {
            assert_eq!(process.join().unwrap(), Ok(3.0), "{host}");
        }
    }
}

#[test]
fn the_name_of_this_host_will_do() {
    let name = trainyard_comm::Place::here(0).host;
    if std::net::ToSocketAddrs::to_socket_addrs(&(name.as_str(), 0)).is_err() {
        return trainyard_testing::skip("the name of this host has no address");
    }
    let port = free_port();
    let processes = (0..3).map(|rank| Rendezvous::new(&name, port, rank, 3)).collect();
    assert_eq!(outcomes(processes), [Ok(3.0), Ok(3.0), Ok(3.0)]);
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let port = free_port();
    // Rank 0's word, which says when it gave up, ends the longer patience of the others. Without it
    // they would say that rank 0 is silent.
    let processes = vec![rank(port, 0, 5, DEADLINE), rank(port, 2, 5, 20 * DEADLINE), rank(port, 4, 5, 20 * DEADLINE)];
    all_say(outcomes(processes), &["ranks 1, 3 of a world of 5 did not come to 127.0.0.1", "within 0.7 s"]);
}

#[test]
fn without_rank_0_there_is_no_world() {
    let port = free_port();
    all_say(
        outcomes(vec![rank(port, 1, 2, DEADLINE), rank(port, 2, 3, DEADLINE)]),
        &["finds no rank 0 at 127.0.0.1", "within 0.7 s", "refused", "MASTER_PORT"],
    );
    let nowhere = Rendezvous { deadline: DEADLINE, ..Rendezvous::new("no..such..host", port, 1, 2) };
    all_say(outcomes(vec![nowhere]), &["the name `no..such..host` is not known"]);
}

#[test]
fn another_program_at_the_port_is_not_taken_for_rank_0() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let patience = Duration::from_secs(30);
    let answering = thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        // As a server of another protocol; then silence.
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        (stream, other)
    });
    all_say(outcomes(vec![rank(port, 1, 2, patience)]), &["what it says is not of trainyard"]);
    let (_stream, _other) = answering.join().unwrap();
    all_say(
        outcomes(vec![rank(port, 0, 2, patience)]),
        &["rank 0 cannot listen at port", &port.to_string(), "another program"],
    );
}

#[test]
fn worlds_of_different_size_do_not_mix() {
    let port = free_port();
    let patience = Duration::from_secs(30);
    let processes = vec![rank(port, 0, 3, patience), rank(port, 1, 3, patience), rank(port, 2, 4, patience)];
    all_say(outcomes(processes), &["rank 2 (host", "for a world of 4, and rank 0", "one of 3", "WORLD_SIZE"]);
}

#[test]
fn programs_of_different_version_do_not_mix() {
    let port = free_port();
    let patience = Duration::from_secs(30);
    let old = Rendezvous { version: "0.0.9".into(), ..rank(port, 1, 2, patience) };
    let ours = rank(port, 0, 2, patience);
    let parts = ["rank 1 (host", "is trainyard 0.0.9, and rank 0", &ours.version.clone()];
    all_say(outcomes(vec![ours, old]), &parts);
}

#[test]
fn two_processes_with_one_number_are_named() {
    let port = free_port();
    let patience = Duration::from_secs(30);
    let processes = vec![rank(port, 0, 4, patience), rank(port, 1, 4, patience), rank(port, 1, 4, patience)];
    let process = format!("process {} on host", std::process::id());
    all_say(outcomes(processes), &["two processes are rank 1", &process, "a RANK of its own"]);
}

#[test]
fn strangers_at_the_door_are_let_go() {
    let port = free_port();
    let knock = move || {
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
                // Rank 0 may be quicker to close it.
                let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n");
                return true;
            }
            thread::sleep(Duration::from_millis(5));
        }
        false
    };
    let stranger = thread::spawn(move || {
        let knocked = knock();
        thread::spawn(move || outcomes(vec![rank(port, 1, 2, Duration::from_secs(30))]).remove(0))
            .join()
            .map(|r| (knocked, r))
    });
    assert_eq!(outcomes(vec![rank(port, 0, 2, Duration::from_secs(30))]), [Ok(2.0)]);
    assert_eq!(stranger.join().unwrap().unwrap(), (true, Ok(2.0)));
}
