use super::{Circle, Nccl};
use crate::backend::Operation;
use crate::error::{CommError, ErrorKind};
use crate::{Communicator, Position, local};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use trainyard_cuda::driver::{Driver, Region, Stream};
use trainyard_cuda::fake::{Fake, Fault, FaultKind, Network, Options};
use trainyard_cuda::nccl::{Element, Exchange};

/// One rank with its device.
struct Rank {
    host: Communicator,
    device: Arc<Fake>,
    circle: Circle,
    stream: Stream,
    waited: Arc<AtomicUsize>,
}

impl Rank {
    /// Memory with these values.
    fn put(&self, values: &[f32]) -> Region {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let address = self.device.allocate(bytes.len()).unwrap();
        let region = Region { address, bytes: bytes.len(), written: true };
        // SAFETY: as many bytes, which are read before this returns.
        unsafe { self.device.upload(self.stream, region, bytes.as_ptr()) }.unwrap();
        region
    }

    /// The values there, once the stream is done.
    fn get(&self, region: Region) -> Vec<f32> {
        let mut bytes = vec![0u8; region.bytes];
        let region = Region { written: false, ..region };
        // SAFETY: as many bytes, which nobody looks at before the stream is done.
        unsafe { self.device.download(self.stream, bytes.as_mut_ptr(), region) }.unwrap();
        self.device.synchronize(self.stream).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|x| f32::from_ne_bytes(*x)).collect()
    }

    /// An all-reduce at instruction `number`, waited for; the failure of the world if it failed.
    fn exchange(&self, number: u32, elements: usize) -> Result<Vec<f32>, CommError> {
        let data = self.put(&vec![1.0; elements]);
        self.circle.post(Some(Position { step: 7, instruction: number, what: "Reduce block 3".to_owned() }));
        self.circle.all_reduce(self.stream, data, Element::F32)?;
        let values = self.get(data);
        self.host.failure().map_or(Ok(values), Err)
    }
}

/// Runs `body` on so many ranks with a device each; what it returns, and what did not fit together
/// on the network.
fn on_devices<T: Send>(
    ranks: usize,
    deadline: Duration,
    faults: &[Fault],
    body: impl Fn(&Rank) -> T + Sync,
) -> (Vec<T>, Vec<String>) {
    let network = Arc::new(Network::new(faults));
    // They join in order, because faults name them by it.
    let fake = |seed| Arc::new(Fake::new(Options { seed, network: Some(Arc::clone(&network)), ..Options::default() }));
    let devices: Vec<Arc<Fake>> = (0..ranks as u64).map(fake).collect();
    let body = &body;
    let results = std::thread::scope(|scope| {
        let ranks = local::World::new(ranks).into_iter().zip(devices).map(|(host, device)| {
            scope.spawn(move || {
                host.set_deadline(deadline);
                let waited = Arc::new(AtomicUsize::new(0));
                let seen = Arc::clone(&waited);
                let waiting = move || {
                    seen.fetch_add(1, Ordering::Relaxed);
                };
                let nccl = Nccl::new(device.clone(), &host, waiting).unwrap();
                assert_eq!(nccl.version(), "2.27.3");
                let circle = nccl.circle(&host).unwrap();
                let stream = device.stream().unwrap();
                let result = body(&Rank { host, device: Arc::clone(&device), circle, stream, waited });
                assert_eq!(device.problems(), [""; 0]);
                result
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (results, network.problems())
}

const LONG: Duration = Duration::from_secs(60);
/// Long enough for threads that take turns.
const SHORT: Duration = Duration::from_secs(1);

#[test]
fn collectives_move_what_they_say() {
    for size in [2, 3, 5] {
        let (results, problems) = on_devices(size, LONG, &[], |rank| {
            let (me, stream, circle) = (rank.host.rank(), rank.stream, &rank.circle);
            assert_eq!((circle.rank(), circle.size()), (me, size));
            let own: Vec<f32> = (0..2 * size).map(|i| (10 * me + i) as f32).collect();
            let [sum, scattered, gathered, sent] = [(); 4].map(|()| rank.put(&own));
            circle.all_reduce(stream, sum, Element::F32).unwrap();
            circle.reduce_scatter_in_place(stream, scattered, Element::F32).unwrap();
            circle.all_gather_in_place(stream, gathered).unwrap();
            circle.broadcast(stream, sent, size - 1).unwrap();
            let whole = rank.put(&vec![0.0; size]);
            circle.all_gather(stream, rank.put(&[me as f32]), whole).unwrap();
            // Messages of other lengths for each pair: rank i sends i + j numbers to rank j.
            let messages = |pair: &dyn Fn(usize) -> usize, value: &dyn Fn(usize) -> f32| -> Vec<(usize, Region)> {
                (0..size).map(|peer| (peer, rank.put(&vec![value(peer); pair(peer)]))).collect()
            };
            let sends = messages(&|peer| me + peer, &|peer| (10 * me + peer) as f32);
            let receives = messages(&|peer| me + peer, &|_| 0.0);
            circle.exchange(stream, &sends, &receives).unwrap();

            let sums: Vec<f32> = (0..2 * size).map(|i| (5 * size * (size - 1) + size * i) as f32).collect();
            assert_eq!(rank.get(sum), sums);
            assert_eq!(rank.get(scattered)[2 * me..2 * me + 2], sums[2 * me..2 * me + 2]);
            let all: Vec<f32> =
                (0..size).flat_map(|r| [10 * r + 2 * r, 10 * r + 2 * r + 1]).map(|x| x as f32).collect();
            assert_eq!(rank.get(gathered), all);
            assert_eq!(rank.get(sent)[0], (10 * (size - 1)) as f32);
            assert_eq!(rank.get(whole), (0..size).map(|r| r as f32).collect::<Vec<_>>());
            for (peer, memory) in receives {
                assert_eq!(rank.get(memory), vec![(10 * peer + me) as f32; me + peer]);
            }
        });
        assert_eq!((results.len(), problems), (size, vec![]));
    }
}

#[test]
fn the_host_runs_ahead_and_calls_of_a_group_progress_together() {
    let (results, problems) = on_devices(2, LONG, &[], |rank| {
        let me = rank.host.rank();
        let (first, second) = (rank.put(&[1.0; 4]), rank.put(&[2.0; 8]));
        let reduce = |data: Region| Exchange::AllReduce { from: data, to: data, element: Element::F32 };
        // Nobody waits for anybody here: rank 1 may be done with its calls before rank 0 has made
        // one.
        for _ in 0..3 {
            rank.circle.together(rank.stream, Operation::AllReduce, &[reduce(first), reduce(second)]).unwrap();
        }
        // Each rank sends before it receives, which only works because the two are one group.
        let other = [(1 - me, first)];
        let into = rank.put(&[0.0; 4]);
        rank.circle.exchange(rank.stream, &other, &[(1 - me, into)]).unwrap();
        assert!(rank.get(into) == [8.0; 4] && rank.get(second) == [16.0; 8]);
        let names: Vec<&str> = rank.device.take_records().iter().map(|record| record.name).collect();
        names.iter().filter(|name| **name == "nccl").count()
    });
    assert_eq!((results, problems), (vec![4, 4], vec![]));
}

#[test]
fn an_exchange_of_memory_that_no_event_orders_is_found() {
    let network = Arc::new(Network::default());
    let devices = [0, 1].map(|seed| Fake::new(Options { seed, network: Some(network.clone()), ..Options::default() }));
    let id = devices[0].nccl().unwrap().unique_id().unwrap();
    for (rank, device) in devices.iter().enumerate() {
        let comm = device.nccl().unwrap().init(&id, rank, 2).unwrap();
        let (writer, reader) = (device.stream().unwrap(), device.stream().unwrap());
        let memory = device.allocate(16).unwrap();
        let region = Region { address: memory, bytes: 16, written: true };
        device.zero(writer, region).unwrap();
        let exchange = Exchange::AllReduce { from: region, to: region, element: Element::F32 };
        device.nccl().unwrap().enqueue(comm, reader, &[exchange]).unwrap();
        assert!(device.problems()[0].contains("nccl on stream 1: reads"), "{:?}", device.problems());
    }
}

/// The failures of all ranks, which are one and the same.
fn the_failure(results: Vec<Result<Vec<f32>, CommError>>) -> CommError {
    let failures: Vec<CommError> = results.into_iter().map(|result| result.unwrap_err()).collect();
    for failure in &failures {
        assert_eq!(failure.to_string(), failures[0].to_string());
    }
    failures[0].clone()
}

#[test]
fn a_rank_that_does_not_come_is_named_with_where_it_was_and_since_when() {
    let (results, _) = on_devices(3, SHORT, &[], |rank| {
        rank.exchange(4, 8).unwrap();
        if rank.host.rank() == 1 {
            // Its host is busy with something else, until it hears that the others have given up.
            while rank.host.failure().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(rank.waited.load(Ordering::Relaxed), 0);
        }
        let result = rank.exchange(9, 8);
        assert!(rank.host.rank() == 1 || rank.waited.load(Ordering::Relaxed) > 0);
        result
    });
    let failure = the_failure(results);
    assert_eq!(failure.culprits.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [1], "{failure}");
    assert_eq!(failure.kind, ErrorKind::Deadline { waited: SHORT });
    let text = failure.to_string();
    assert!(text.starts_with("all_reduce 1 on `world`: no arrival within 1.0 s of rank 1"), "{text}");
}

#[test]
fn an_exchange_that_does_not_end_though_all_have_come_says_so() {
    for (device, call) in [(0, 0), (1, 1)] {
        let fault = Fault { device, call, kind: FaultKind::Hang };
        let (results, problems) = on_devices(2, SHORT, &[fault], |rank| {
            rank.exchange(1, 8)?;
            rank.exchange(2, 8)
        });
        let failure = the_failure(results);
        assert!(failure.to_string().contains("although every rank has come to it"), "{failure}");
        assert_eq!((failure.operation.unwrap().1, problems), (call as u64, vec![]));
    }
}

#[test]
fn sequences_that_do_not_fit_together_end_at_the_deadline_and_the_fake_knows_why() {
    let (results, problems) = on_devices(2, SHORT, &[], |rank| {
        // Another instruction, of another length.
        rank.exchange(5 - rank.host.rank() as u32, 8 + rank.host.rank())
    });
    let failure = the_failure(results);
    assert!(problems.len() == 1 && problems[0].starts_with("collective 0: rank 0 called"), "{problems:?}");
    let named = failure.culprits.iter().any(|peer| peer.rank == 1);
    assert!(named || failure.to_string().contains("although every rank has come"), "{failure}");
}

#[test]
fn what_nccl_reports_while_the_host_waits_ends_every_rank() {
    for (kind, words) in [(FaultKind::Fail, "unhandled system error"), (FaultKind::Lose, "remote process exited")] {
        let fault = Fault { device: 2, call: 1, kind };
        let (results, _) = on_devices(4, LONG, &[fault], |rank| {
            // Some may hear of it before they have seen their first exchange end.
            rank.exchange(1, 8)?;
            rank.exchange(2, 8)
        });
        let failure = the_failure(results);
        assert!(matches!(failure.kind, ErrorKind::Backend { .. }) && failure.to_string().contains(words), "{failure}");
    }
}

#[test]
fn a_failure_elsewhere_lets_streams_go_on_that_wait_for_others() {
    let (results, _) = on_devices(3, LONG, &[], |rank| {
        if rank.host.rank() == 2 {
            rank.host.abort("the loader has no more text");
        }
        rank.exchange(3, 8)
    });
    assert!(the_failure(results).to_string().contains("rank 2"), "rank 2 is named");
}

#[test]
fn no_library_is_a_sentence() {
    let world = local::World::new(1).remove(0);
    let device: Arc<dyn Driver> = Arc::new(Fake::new(Options::default()));
    let error = Nccl::new(device, &world, || {}).err().expect("there is no network").to_string();
    assert!(error.contains("NCCL is not found; it was looked for in no network"), "{error}");
}
