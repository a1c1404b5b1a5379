//! Measures collectives between ranks (threads or processes), and how much compute and
//! communication slow each other down.

use crate::CalibrateError;
use crate::probe_group::ProbeGroup;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use trainyard_base::median;
use trainyard_comm::bench::{fit, time};
use trainyard_comm::{Communicator, Result, local};
use trainyard_sim::machine::{CollectiveCurve, Interference, Processes};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// Sizes of the buffers, in bytes.
const SIZES: [usize; 7] = [64, 4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20, 24 << 20];
/// Seconds per case. A case runs at least nine times.
const CASE_S: f64 = 0.02;
/// Number of rounds over all cases.
const ROUNDS: usize = 2;

/// The collectives, by the names that the engine uses.
pub(crate) const OPERATIONS: [&str; 3] = ["all_gather", "reduce_scatter", "all_reduce"];

/// A group of ranks that exchange with each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Group {
    pub ranks: u32,
    /// Difference between the numbers of neighbouring ranks.
    pub stride: u32,
    /// Number of hosts of the group.
    pub hosts: u32,
}

/// The curves of all groups that the ranks can form.
pub fn collectives(probers: &ProbeGroup) -> Result<Vec<CollectiveCurve>, CalibrateError> {
    let mut curves = Vec::new();
    let groups = match &probers.machine().processes {
        Some(processes) => groups(processes),
        None => groups_of_threads(probers.machine().cores),
    };
    for group in groups {
        let round = || -> Result<Vec<Vec<f64>>, CalibrateError> {
            match probers.world() {
                Some(world) => {
                    let comm = members(world, group)?;
                    // All groups begin a case together, and the slowest one counts.
                    cases(group.ranks, |operation, bytes| {
                        probers.meet()?;
                        probers.most(once(&comm, operation, bytes)?)
                    })
                }
                None => Ok(on_threads(group.ranks)?),
            }
        };
        let rounds = (0..ROUNDS).map(|_| round()).collect::<Result<Vec<_>, _>>()?;
        for (at, operation) in OPERATIONS.into_iter().enumerate() {
            let seconds = |size: usize| median(rounds.iter().map(|round| round[at][size])).unwrap_or(f64::NAN);
            let points: Vec<[f64; 2]> =
                (0..SIZES.len()).map(|size| [bytes(size, group.ranks) as f64, seconds(size)]).collect();
            curves.push(CollectiveCurve { hosts: group.hosts, ..curve(operation, group.ranks, points) });
        }
    }
    Ok(curves)
}

/// Groups of two ranks, of four, and of one rank per core.
fn groups_of_threads(cores: u32) -> Vec<Group> {
    let sizes = [2, 4].into_iter().chain((cores > 4).then_some(cores));
    sizes.map(|ranks| Group { ranks, stride: 1, hosts: 1 }).collect()
}

/// Two kinds of groups. Neighbours: powers of two, one host, all processes. Strided: the ranks with
/// the same index on every host. Every group belongs to a partition of all ranks, because all
/// groups exchange at once.
pub(crate) fn groups(processes: &Processes) -> Vec<Group> {
    let (count, here) = (processes.count, processes.on_a_host());
    let powers = (1..31).map(|power| 1 << power).filter(|ranks| *ranks < count && count.is_multiple_of(*ranks));
    let mut sizes: Vec<u32> = powers.chain([here, count]).filter(|ranks| *ranks > 1).collect();
    sizes.sort_unstable();
    sizes.dedup();
    // Groups that would lie on their hosts in unequal parts are not measured.
    let neighbours = sizes.into_iter().filter(|ranks| ranks.is_multiple_of(here) || here.is_multiple_of(*ranks));
    let neighbours = neighbours.map(|ranks| Group { ranks, stride: 1, hosts: (ranks / here).max(1) });
    let across = Group { ranks: processes.hosts, stride: here, hosts: processes.hosts };
    neighbours.chain((processes.hosts > 1 && here > 1).then_some(across)).collect()
}

/// The communicator of the group that this process belongs to.
pub(crate) fn members(world: &Communicator, group: Group) -> Result<Communicator> {
    let (rank, Group { ranks, stride, .. }) = (world.rank() as u32, group);
    // Groups of neighbours follow each other; groups with a stride are interleaved.
    let color = rank / (ranks * stride) * stride + rank % stride;
    world.split(color, rank, format!("{ranks} ranks"))
}

/// A curve through `points` of bytes and seconds on one host, with a straight line for human
/// readers.
pub(crate) fn curve(operation: &str, ranks: u32, points: Vec<[f64; 2]>) -> CollectiveCurve {
    let line = fit(&points.iter().map(|point| (point[0], point[1])).collect::<Vec<_>>());
    let (alpha_s, beta_s_per_byte) = line.map_or((0.0, 0.0), |line| (line.alpha, line.beta));
    CollectiveCurve { operation: operation.to_owned(), ranks, hosts: 1, alpha_s, beta_s_per_byte, points }
}

/// A size rounded to whole f32 elements for every rank.
fn bytes(size: usize, ranks: u32) -> usize {
    SIZES[size].next_multiple_of(4 * ranks as usize)
}

/// Seconds by operation and size of groups of `ranks`.
fn cases<E>(ranks: u32, once: impl Fn(&str, usize) -> Result<f64, E>) -> Result<Vec<Vec<f64>>, E> {
    let case = |operation: &&str| (0..SIZES.len()).map(|size| once(operation, bytes(size, ranks))).collect();
    OPERATIONS.iter().map(case).collect()
}

/// The same for ranks that are threads of this process.
fn on_threads(ranks: u32) -> Result<Vec<Vec<f64>>> {
    std::thread::scope(|scope| {
        let worlds = local::World::new(ranks as usize);
        let measure = |comm: Communicator| cases(ranks, |operation, bytes| once(&comm, operation, bytes));
        let threads: Vec<_> = worlds.into_iter().map(|comm| scope.spawn(move || measure(comm))).collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect();
        results.into_iter().next().expect("a group has ranks")
    })
}

/// Bytes of the buffers that a case uses in turn, so that no exchange finds its last data in the
/// caches. There are at most [`IN_TURN`] buffers.
const IN_TURN_BYTES: usize = 24 << 20;
const IN_TURN: usize = 12;

/// A buffer allocated the way the engine allocates what it exchanges. Large buffers lie on huge
/// pages, which decides how fast a transport copies them.
fn buffer(elements: usize) -> Tensor {
    let device = Device::cpu(Isa::detect(), 1, None);
    device.zeros([elements], DType::F32, Purpose::Comm).expect("memory without a limit")
}

fn data(buffer: &mut Tensor) -> &mut [f32] {
    buffer.data_mut().expect("a tensor of f32 on the host")
}

/// Seconds of one `operation` on a buffer of `bytes`.
fn once(comm: &Communicator, operation: &str, bytes: usize) -> Result<f64> {
    let count = (IN_TURN_BYTES / bytes.max(1)).clamp(1, IN_TURN);
    let numbers = |elements: usize| -> Vec<Tensor> { (0..count).map(|_| buffer(elements)).collect() };
    let (mut wholes, mut parts) = (numbers(bytes / 4), numbers(bytes / 4 / comm.size()));
    let mut next = 0;
    let mut run = |exchanges: bool| {
        time(comm, CASE_S, || {
            next = (next + 1) % count;
            // The owner has just written the data, as an update writes parameters and a backward
            // writes gradients.
            let (part, whole) = (data(&mut parts[next]), data(&mut wholes[next]));
            let gathers = operation == "all_gather";
            if gathers {
                part.fill(1e-30)
            } else {
                whole.fill(1e-30)
            }
            std::hint::black_box((&part, &whole));
            match operation {
                _ if !exchanges => Ok(()),
                "all_gather" => comm.all_gather(part, whole),
                "reduce_scatter" => comm.reduce_scatter_in_place(whole),
                _ => comm.all_reduce(whole),
            }
        })
    };
    let (both, written) = (run(true)?, run(false)?);
    Ok((both - written).max(0.1 * both))
}

/// Duration of each part of the measurement of interference.
const PART: Duration = Duration::from_millis(250);
/// Elements of a rank's buffer in two kinds of exchange: one dominated by its start, and one
/// dominated by its bytes. Smaller exchanges go through MPI without a handshake and do not wait for
/// one.
const SMALL: usize = 64 << 10;
const LARGE: usize = 2 << 20;
/// Largest credible slowdown of compute beyond its share of the cores. Anything above comes from an
/// exchange that hardly ran.
const COMPUTE_MAX: f64 = 2.0;

/// The work of ranks in one part of the measurement.
#[derive(Clone, Copy)]
struct Doing {
    multiplies: bool,
    /// Elements of the exchanges, if there are any.
    exchanges: Option<usize>,
}

/// Measures the interference of compute and communication on ranks that share all cores: products
/// alone, exchanges alone, and both at once.
pub fn interference(probers: &ProbeGroup) -> Result<Interference> {
    let cores = probers.machine().cores;
    let (ranks, threads) = match &probers.machine().processes {
        Some(processes) => (processes.on_a_host(), probers.threads()),
        None => (cores.clamp(2, 4), (cores / cores.clamp(2, 4)).max(1)),
    };
    let run = |multiplies, exchanges| {
        let comms = match probers.world() {
            Some(world) => vec![world.duplicate("interference")?],
            None => local::World::new(ranks as usize),
        };
        during(Doing { multiplies, exchanges }, comms, threads)
    };
    let multiply = || run(true, None).map(|(products, _)| products);
    // The first product finds caches and memory in whatever state the previous work left them.
    let products = [multiply()?, multiply()?, multiply()?];
    let alone = |elements| run(false, Some(elements)).map(|(_, exchanges)| 1.0 / exchanges);
    let (small_alone_s, large_alone_s) = (alone(SMALL)?, alone(LARGE)?);
    let small_s = 1.0 / run(true, Some(SMALL))?.1;
    let (products_beside, exchanges) = run(true, Some(LARGE))?;
    let seen = Seen {
        products_left: products_beside / median(products).expect("three"),
        small_s: [small_alone_s, small_s],
        large_s: [large_alone_s, 1.0 / exchanges],
    };
    // Fair shares of the cores: among all threads that want to run, and among those of the exchange
    // alone.
    let share = |threads: u32| (f64::from(cores) / f64::from(threads)).min(1.0);
    let fair = share(ranks * threads + ranks);
    Ok(seen.explained(fair / share(ranks * threads), fair / share(ranks)))
}

/// Measurements of ranks that multiplied and exchanged at once.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Speed of products beside large exchanges, over their speed alone.
    products_left: f64,
    /// Seconds of a small exchange alone, and beside products.
    small_s: [f64; 2],
    /// Seconds of a large exchange alone, and beside products.
    large_s: [f64; 2],
}

impl Seen {
    /// The interference beyond fair shares of the cores. The arguments are the shares that are left
    /// for compute and for exchanges.
    fn explained(&self, compute_share: f64, exchange_share: f64) -> Interference {
        let ([small_alone, small], [large_alone, large]) = (self.small_s, self.large_s);
        // The extra time of a small exchange, beyond its share of the cores, is waking threads on
        // busy cores, once or for every handshake. A large exchange pays it too.
        let start_s = (small - small_alone / exchange_share).clamp(0.0, 0.9 * large);
        let communication = (large - start_s) / large_alone * exchange_share;
        // Compute loses speed only while the exchange works, not while it waits for a core.
        let lost = (1.0 - self.products_left) * large / (large - start_s);
        let compute = compute_share / (1.0 - lost).max(compute_share / COMPUTE_MAX);
        // A negative loss is noise.
        Interference { compute: compute.max(1.0), communication: communication.max(1.0), start_s }
    }
}

/// Products and exchanges per second of each rank of this process. Ranks exchange with those of
/// other processes over `comms`.
fn during(doing: Doing, comms: Vec<Communicator>, threads: u32) -> Result<(f64, f64)> {
    // Processes start together here; threads do so anyway.
    if let [comm] = &comms[..] {
        comm.barrier()?;
    }
    let (stop, products, exchanged) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let (stop, products, exchanged) = (&stop, &products, &exchanged);
    let ranks = comms.len() as f64;
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in comms.iter().filter(|_| doing.multiplies) {
            scope.spawn(move || {
                let device = Device::cpu(Isa::detect(), threads as usize, None);
                let matrix = || device.zeros([256, 512], DType::F32, Purpose::Workspace).expect("half a megabyte");
                let (x, w): (Tensor, Tensor) = (matrix(), matrix());
                while !stop.load(Ordering::Relaxed) {
                    ops::linear(&x, &w, None, Activation::None, None, false).expect("a product of two matrices");
                    products.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let exchange = move |comm: Communicator, elements: usize| -> Result<()> {
            let mut buffer = buffer(elements);
            let data = data(&mut buffer);
            data.fill(1e-30);
            let mut goes_on = [1u32];
            // All ranks end together when rank 0 says so.
            while goes_on[0] == 1 {
                comm.all_reduce(data)?;
                exchanged.fetch_add(1, Ordering::Relaxed);
                goes_on[0] = u32::from(!stop.load(Ordering::Relaxed));
                comm.broadcast(&mut goes_on, 0)?;
            }
            Ok(())
        };
        let exchanging: Vec<_> = match doing.exchanges {
            Some(elements) => comms.into_iter().map(|comm| scope.spawn(move || exchange(comm, elements))).collect(),
            None => Vec::new(),
        };
        std::thread::sleep(PART);
        stop.store(true, Ordering::Relaxed);
        exchanging.into_iter().try_for_each(|thread| thread.join().expect("a rank does not panic"))
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let each = |count: &AtomicU64| count.load(Ordering::Relaxed) as f64 / ranks / seconds;
    Ok((each(products), each(exchanged)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_beside_each_other_are_no_faster_than_alone() {
        let found = interference(&ProbeGroup::alone()).unwrap();
        assert!((1.0..=COMPUTE_MAX).contains(&found.compute) && found.start_s >= 0.0, "{found:?}");
        assert!(found.communication >= 1.0 && found.communication.is_finite(), "{found:?}");
    }

    #[test]
    fn what_is_seen_is_taken_apart_into_shares_waits_and_losses() {
        let near = |found: Interference, [compute, communication, start_s]: [f64; 3]| {
            let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
            assert!(
                close(found.compute, compute)
                    && close(found.communication, communication)
                    && close(found.start_s, start_s),
                "{found:?}"
            );
        };
        // Two ranks on two cores get half of the cores each. This is fair sharing without
        // interference.
        let fair = Seen { products_left: 0.5, small_s: [1e-5, 2e-5], large_s: [1e-3, 2e-3] };
        near(fair.explained(0.5, 0.5), [1.0, 1.0, 0.0]);
        // Both lose more than their fair share.
        let dear = Seen { products_left: 0.4, large_s: [1e-3, 3e-3], ..fair };
        near(dear.explained(0.5, 0.5), [1.25, 1.5, 0.0]);
        // Every exchange waits 10 ms for a core, during which products lose nothing. Of its 12 ms,
        // products lose half of the other two.
        let waiting = Seen { products_left: 1.0 - 1.0 / 12.0, small_s: [1e-5, 1.002e-2], large_s: [1e-3, 1.2e-2] };
        near(waiting.explained(0.5, 0.5), [1.0, 1.0, 1e-2]);
        // Noise: exchanges faster than alone, and products that vanish.
        let lucky = Seen { products_left: 1.1, small_s: [1e-5, 1e-5], large_s: [1e-3, 1e-3] };
        near(lucky.explained(0.5, 0.5), [1.0, 1.0, 0.0]);
        near(Seen { products_left: 0.0, ..fair }.explained(0.5, 0.5), [COMPUTE_MAX, 1.0, 0.0]);
    }

    #[test]
    fn processes_exchange_with_neighbours_with_all_and_across_hosts() {
        let of = |count, hosts| {
            let groups = groups(&Processes { backend: "tcp".to_owned(), count, hosts });
            groups.iter().map(|group| (group.ranks, group.stride, group.hosts)).collect::<Vec<_>>()
        };
        assert_eq!(of(1, 1), []);
        assert_eq!(of(2, 1), [(2, 1, 1)]);
        assert_eq!(of(6, 1), [(2, 1, 1), (6, 1, 1)]);
        assert_eq!(of(2, 2), [(2, 1, 2)]);
        assert_eq!(of(8, 2), [(2, 1, 1), (4, 1, 1), (8, 1, 2), (2, 4, 2)]);
        // Groups of four would lie on two hosts in unequal parts.
        assert_eq!(of(12, 2), [(2, 1, 1), (6, 1, 1), (12, 1, 2), (2, 6, 2)]);
    }

    #[test]
    fn everybody_is_in_one_group_and_neighbours_or_places_make_it() {
        let members_of = |group: Group| {
            std::thread::scope(|scope| {
                let worlds = local::World::new(8).into_iter();
                let ranks: Vec<_> = worlds
                    .map(|world| {
                        scope.spawn(move || {
                            let comm = members(&world, group).unwrap();
                            let mut all = vec![0u32; comm.size()];
                            comm.all_gather(&[world.rank() as u32], &mut all).unwrap();
                            all
                        })
                    })
                    .collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
            })
        };
        let pairs = members_of(Group { ranks: 2, stride: 1, hosts: 1 });
        assert_eq!((&pairs[0], &pairs[5]), (&vec![0, 1], &vec![4, 5]));
        let across = members_of(Group { ranks: 2, stride: 4, hosts: 2 });
        assert_eq!((&across[0], &across[7]), (&vec![0, 4], &vec![3, 7]));
    }
}
