//! Collectives between ranks that are threads, and what compute and communication cost each other when they run at once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use trainyard_comm::bench::{fit, time};
use trainyard_comm::{Communicator, Result, local};
use trainyard_sim::machine::{CollectiveCurve, Interference, median};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// Buffers, bytes.
const SIZES: [usize; 7] = [64, 4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20, 24 << 20];
/// Seconds of a case, which runs at least nine times.
const CASE_S: f64 = 0.02;
/// Rounds over all cases.
const ROUNDS: usize = 2;

/// The collectives as the engine calls them.
pub(crate) const OPERATIONS: [&str; 3] = ["all_gather", "reduce_scatter", "all_reduce"];

/// Curves of groups of two and four ranks, and of one on each core.
pub fn collectives(cores: u32) -> Result<Vec<CollectiveCurve>> {
    let mut groups = vec![2, 4];
    if cores > 4 {
        groups.push(cores);
    }
    let mut curves = Vec::new();
    for ranks in groups {
        let rounds = (0..ROUNDS).map(|_| on_threads(ranks)).collect::<Result<Vec<_>>>()?;
        for (at, operation) in OPERATIONS.into_iter().enumerate() {
            let seconds = |size: usize| median(rounds.iter().map(|round| round[at][size])).unwrap_or(f64::NAN);
            let points: Vec<[f64; 2]> =
                (0..SIZES.len()).map(|size| [bytes(size, ranks) as f64, seconds(size)]).collect();
            curves.push(curve(operation, ranks, points));
        }
    }
    Ok(curves)
}

/// A curve through `points` of bytes and seconds, with the straight line that people read.
pub(crate) fn curve(operation: &str, ranks: u32, points: Vec<[f64; 2]>) -> CollectiveCurve {
    let line = fit(&points.iter().map(|point| (point[0], point[1])).collect::<Vec<_>>());
    let (alpha_s, beta_s_per_byte) = line.map_or((0.0, 0.0), |line| (line.alpha, line.beta));
    CollectiveCurve { operation: operation.to_owned(), ranks, alpha_s, beta_s_per_byte, points }
}

/// A size in whole f32 elements of every rank.
fn bytes(size: usize, ranks: u32) -> usize {
    SIZES[size].next_multiple_of(4 * ranks as usize)
}

/// Seconds by operation and size, the same on every rank.
fn on_threads(ranks: u32) -> Result<Vec<Vec<f64>>> {
    let run = |comm: Communicator| -> Result<Vec<Vec<f64>>> {
        let case = |operation: &&str| (0..SIZES.len()).map(|size| once(&comm, operation, bytes(size, ranks))).collect();
        OPERATIONS.iter().map(case).collect()
    };
    std::thread::scope(|scope| {
        let worlds = local::World::new(ranks as usize);
        let threads: Vec<_> = worlds.into_iter().map(|comm| scope.spawn(|| run(comm))).collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect();
        results.into_iter().next().expect("a group has ranks")
    })
}

/// Bytes of the buffers that a case uses in turn, so that no exchange finds in its caches what it exchanged last; at most [`IN_TURN`] of them.
const IN_TURN_BYTES: usize = 24 << 20;
const IN_TURN: usize = 12;

/// Seconds of one `operation` on a buffer of `bytes`.
fn once(comm: &Communicator, operation: &str, bytes: usize) -> Result<f64> {
    let count = (IN_TURN_BYTES / bytes.max(1)).clamp(1, IN_TURN);
    let numbers = |elements: usize| vec![vec![1e-30f32; elements]; count];
    let (mut wholes, mut parts) = (numbers(bytes / 4), numbers(bytes / 4 / comm.size()));
    let mut next = 0;
    let mut run = |exchanges: bool| {
        time(comm, CASE_S, || {
            next = (next + 1) % count;
            // What is exchanged was just written by its owner, as parameters by an update and gradients by a backward.
            let (part, whole) = (&mut parts[next], &mut wholes[next]);
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

/// Seconds that each part of the measurement of interference lasts.
const PART: Duration = Duration::from_millis(250);

/// Ranks that share all cores multiply and exchange: alone, and both at once.
pub fn interference(cores: u32) -> Result<Interference> {
    let ranks = cores.clamp(2, 4);
    let threads = (cores / ranks).max(1);
    let run = |computes, exchanges, elements| beside(ranks, threads, computes, exchanges, elements);
    let compute_alone = run(true, false, LARGE)?.0;
    let exchange_alone = run(false, true, LARGE)?.1;
    let (compute, exchange) = run(true, true, LARGE)?;
    // What an exchange of nothing takes longer is waking threads on busy cores. A large one takes that too.
    let small = 1.0 / run(true, true, 1)?.1 - 1.0 / run(false, true, 1)?.1;
    let start_s = small.max(0.0);
    let exchange = 1.0 / (1.0 / exchange - start_s).max(0.1 / exchange);
    // What fair shares of the cores would leave of each: all threads that want to run, and those of the exchange alone.
    let cores = f64::from(cores);
    let share = |threads: u32| (cores / f64::from(threads)).min(1.0);
    let both = share(ranks * threads + ranks);
    let compute = compute_alone / compute * both / share(ranks * threads);
    let communication = exchange_alone / exchange * both / share(ranks);
    // Less than nothing is chance.
    Ok(Interference { compute: compute.max(1.0), communication: communication.max(1.0), start_s })
}

/// Elements of a rank's buffer in a large exchange.
const LARGE: usize = 1 << 20;

/// Products and exchanges of `elements` per second of all ranks together.
fn beside(ranks: u32, threads: u32, computes: bool, exchanges: bool, elements: usize) -> Result<(f64, f64)> {
    let (stop, products, exchanged) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let (stop, products, exchanged) = (&stop, &products, &exchanged);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..if computes { ranks } else { 0 } {
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
        let talk = move |comm: Communicator| -> Result<()> {
            let mut data = vec![1e-30f32; elements];
            let mut goes_on = [1u32];
            // All end together: rank 0's word counts.
            while goes_on[0] == 1 {
                comm.all_reduce(&mut data)?;
                exchanged.fetch_add(1, Ordering::Relaxed);
                goes_on[0] = u32::from(!stop.load(Ordering::Relaxed));
                comm.broadcast(&mut goes_on, 0)?;
            }
            Ok(())
        };
        let worlds = if exchanges { local::World::new(ranks as usize) } else { Vec::new() };
        let talking: Vec<_> = worlds.into_iter().map(|comm| scope.spawn(move || talk(comm))).collect();
        std::thread::sleep(PART);
        stop.store(true, Ordering::Relaxed);
        talking.into_iter().try_for_each(|thread| thread.join().expect("a rank does not panic"))
    })?;
    let seconds = start.elapsed().as_secs_f64();
    Ok((products.load(Ordering::Relaxed) as f64 / seconds, exchanged.load(Ordering::Relaxed) as f64 / seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_beside_each_other_are_no_faster_than_alone() {
        let found = interference(2).unwrap();
        assert!(found.compute >= 1.0 && found.communication >= 1.0 && found.compute.is_finite(), "{found:?}");
    }
}
