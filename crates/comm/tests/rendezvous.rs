//! Processes that come together over TCP, and what each of them says when they cannot. Here they
//! are threads: nothing is shared between them but the port.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};
use trainyard_comm::Environment;
use trainyard_comm::tcp::{JobSecret, LISTEN_VARIABLE, Rendezvous};

const DEADLINE: Duration = Duration::from_millis(700);
/// Longer than anything here takes to come about.
const PATIENCE: Duration = Duration::from_secs(30);

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A rank at `port` of this host that waits for `deadline`.
fn rank(port: u16, rank: u32, world: u32, deadline: Duration) -> Rendezvous {
    Rendezvous { patience: deadline, ..Rendezvous::new("127.0.0.1", port, rank, world) }
}

/// The outcome of each process: the sum of ones over the ranks, or the error.
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
                let process =
                    Rendezvous { silence: PATIENCE, patience: PATIENCE, ..Rendezvous::new(host, port, rank, 3) };
                outcomes(vec![process]).remove(0)
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
fn ranks_of_one_host_come_together_at_the_address_to_listen_at() {
    const CHOSEN: &str = "127.0.0.7";
    if TcpListener::bind((CHOSEN, 0)).is_err() {
        return trainyard_testing::skip(format!("{CHOSEN} is no address of this host"));
    }
    let port = free_port().to_string();
    let join = |rank: &str| {
        let variables = [
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
            (LISTEN_VARIABLE, CHOSEN),
            ("TRAINYARD_RENDEZVOUS_SECONDS", "30"),
        ];
        let get = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let world = Environment::from_variables(get).unwrap().connect(PATIENCE, |_| {}).unwrap().unwrap();
        let mut ones = [1f32];
        world.all_reduce(&mut ones).unwrap();
        ones[0]
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| join("1"));
        assert_eq!(join("0"), 2.0);
        assert_eq!(other.join().unwrap(), 2.0);
    });
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
    let nowhere = Rendezvous { patience: DEADLINE, ..Rendezvous::new("no..such..host", port, 1, 2) };
    all_say(outcomes(vec![nowhere]), &["the name `no..such..host` is not known"]);
}

#[test]
fn another_program_at_the_port_is_not_taken_for_rank_0() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let answering = thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        // As a server of another protocol; then silence.
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        (stream, other)
    });
    all_say(outcomes(vec![rank(port, 1, 2, PATIENCE)]), &["it does not speak trainyard's protocol"]);
    let (_stream, _other) = answering.join().unwrap();
    all_say(
        outcomes(vec![rank(port, 0, 2, PATIENCE)]),
        &["rank 0 cannot listen at port", &port.to_string(), "another program"],
    );
}

/// A rank that does not fit hears why and is turned away, and the start goes on: the others wait
/// for the right rank. If that does not come, rank 0 names the one that did.
fn is_turned_away(misfit: &Rendezvous, parts: &[&str]) {
    let port = free_port();
    let (ours, right) = (vec![rank(port, 0, 3, PATIENCE), rank(port, 1, 3, PATIENCE)], rank(port, 2, 3, PATIENCE));
    let first = Rendezvous { port, ..misfit.clone() };
    let parts_of_it = parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>();
    let others = thread::spawn(move || {
        all_say(outcomes(vec![first]), &parts_of_it.iter().map(String::as_str).collect::<Vec<_>>());
        outcomes(vec![right]).remove(0)
    });
    assert_eq!(outcomes(ours), [Ok(3.0), Ok(3.0)], "{parts:?}");
    assert_eq!(others.join().unwrap(), Ok(3.0), "{parts:?}");

    let port = free_port();
    all_say(outcomes(vec![rank(port, 0, 3, DEADLINE), Rendezvous { port, ..misfit.clone() }]), parts);
}

#[test]
fn worlds_of_different_size_do_not_mix() {
    is_turned_away(
        &rank(0, 2, 4, PATIENCE),
        &["rank 2 (host", "for a world of 4, and rank 0", "one of 3", "WORLD_SIZE"],
    );
}

#[test]
fn programs_of_different_version_do_not_mix() {
    let old = Rendezvous { version: "0.0.9".into(), ..rank(0, 1, 3, PATIENCE) };
    let ours = Rendezvous::new("", 0, 0, 3).version;
    is_turned_away(&old, &["rank 1 (host", "is trainyard 0.0.9, and rank 0", &ours]);
}

#[test]
fn a_rank_beyond_the_world_is_turned_away() {
    is_turned_away(&rank(0, 9, 3, PATIENCE), &["rank 9 (host", "is no rank of a world of 3"]);
}

#[test]
fn two_processes_with_one_number_are_named() {
    let port = free_port();
    let processes = vec![rank(port, 0, 4, DEADLINE), rank(port, 1, 4, PATIENCE), rank(port, 1, 4, PATIENCE)];
    let process = format!("process {} on host", std::process::id());
    all_say(outcomes(processes), &["two processes are rank 1", &process, "a RANK of its own"]);
}

#[test]
fn processes_of_another_secret_are_turned_away() {
    let secret = || JobSecret::of_variable(&JobSecret::random().unwrap()).unwrap();
    let ours = secret();
    let port = free_port();
    let of = |rank: u32, secret: &JobSecret, patience| Rendezvous {
        patience,
        secret: secret.clone(),
        ..Rendezvous::new("127.0.0.1", port, rank, 2)
    };
    for stranger in [secret(), JobSecret::nothing(), JobSecret::of_job_name("Slurm's job 5".into())] {
        let processes = vec![of(0, &ours, DEADLINE), of(1, &stranger, PATIENCE)];
        let said: Vec<String> = outcomes(processes).into_iter().map(Result::unwrap_err).collect();
        assert!(said[0].contains("it does not know this job's secret"), "{said:?}");
        assert!(said[1].contains("it has another job's secret"), "{said:?}");
    }
    assert_eq!(outcomes(vec![of(0, &ours, PATIENCE), of(1, &ours, PATIENCE)]), [Ok(2.0), Ok(2.0)]);
}

/// Connects to `port` as soon as somebody listens there.
fn call(port: u16) -> TcpStream {
    let end = Instant::now() + PATIENCE;
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            // A port where nobody listens may be given to the connection itself.
            Ok(stream) if stream.local_addr().unwrap() != stream.peer_addr().unwrap() => return stream,
            _ => assert!(Instant::now() < end, "nobody listens"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn strangers_at_the_door_are_let_go() {
    let port = free_port();
    let others = thread::spawn(move || {
        for garbage in [
            &b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n"[..],
            // A card of the first version of the protocol, for a rank beyond the world.
            b"TYR1\x52\0\0\0{\"Here\":{\"version\":\"0.1.0\",\"rank\":9,\"world\":2,\"host\":\"x\",\"pid\":1,\"port\":1}}",
            b"TYR2\xff\xff\xff\xff",
            b"",
        ] {
            // Rank 0 may be quicker to close it.
            let _ = call(port).write_all(garbage);
        }
        outcomes(vec![rank(port, 1, 2, PATIENCE)]).remove(0)
    });
    assert_eq!(outcomes(vec![rank(port, 0, 2, PATIENCE)]), [Ok(2.0)]);
    assert_eq!(others.join().unwrap(), Ok(2.0));
}

#[test]
fn twelve_silent_connections_do_not_hold_the_start() {
    let port = free_port();
    let start = Instant::now();
    let others = thread::spawn(move || {
        let silent: Vec<TcpStream> = (0..12).map(|_| call(port)).collect();
        (outcomes(vec![rank(port, 1, 2, PATIENCE)]).remove(0), silent)
    });
    assert_eq!(outcomes(vec![rank(port, 0, 2, PATIENCE)]), [Ok(2.0)]);
    assert_eq!(others.join().unwrap().0, Ok(2.0));
    assert!(start.elapsed() < Duration::from_secs(8), "less than one of them may take: {:?}", start.elapsed());
}
