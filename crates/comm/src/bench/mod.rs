//! Latency and bandwidth of collectives, in percent of a plain copy measured in the same run.
//!
//! **The bytes that count.** A collective on messages of `S` bytes over `n` ranks must at least
//! read every input once and write every output once. The memory traffic of that minimum, reads
//! plus writes over all ranks, is ([`traffic`])
//!
//! | operation | `S` is | reads | writes |
//! |---|---|---|---|
//! | all_reduce | each rank's data | `n S` | `n S` |
//! | reduce_scatter | each rank's input | `n S` | `S` |
//! | all_gather | each rank's output, own part in place | `(n-1) S` | `(n-1) S` |
//! | broadcast | the data | `(n-1) S` | `(n-1) S` |
//! | all_to_all | each rank's input | `n S` | `n S` |
//!
//! A plain copy of `B` bytes reads `B` and writes `B`. It is measured with all ranks copying
//! buffers of `S` bytes of their own at once, so that it meets the same caches, cores and memory;
//! its rate is `2 n S` over the time of the slowest rank. A collective's share is its traffic over
//! its time, over that rate. 100 % means that adding and meeting cost nothing beyond moving the
//! bytes.
//!
//! **Times** are those of the slowest rank, medians over rounds that begin with a barrier and hold
//! enough operations to make the clock and the barrier small. The fit is `t = alpha + beta S`, by
//! least squares on the relative error, because sizes span seven decades.

mod fit;

pub use fit::{Line, fit};

use crate::backend::Operation;
use crate::communicator::Communicator;
use crate::error::Result;
use std::time::Instant;

/// The operations that are measured.
pub const OPERATIONS: [Operation; 5] =
    [Operation::AllReduce, Operation::ReduceScatter, Operation::AllGather, Operation::Broadcast, Operation::AllToAll];

/// One operation at one size.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The operation.
    pub operation: Operation,
    /// Ranks.
    pub ranks: usize,
    /// Message bytes `S`; f32 elements.
    pub bytes: usize,
    /// Seconds of one operation, slowest rank, median.
    pub seconds: f64,
    /// Bytes read and written at the least, over all ranks.
    pub traffic: f64,
    /// Traffic per second that plain copies of as many bytes reached.
    pub copy_rate: f64,
    /// MPI's own all-reduce of the same bytes, where the backend is MPI.
    pub native_seconds: Option<f64>,
}

impl Timing {
    /// Message bytes per second.
    pub fn bandwidth(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    /// Traffic relative to that of plain copies: 1 is the speed of copying.
    pub fn share_of_copy(&self) -> f64 {
        self.traffic / self.seconds / self.copy_rate
    }
}

/// Bytes that all ranks together read and write at the least; the module's table.
pub fn traffic(operation: Operation, ranks: usize, bytes: usize) -> f64 {
    let (n, s) = (ranks as f64, bytes as f64);
    match operation {
        Operation::AllReduce | Operation::AllToAll => 2.0 * n * s,
        Operation::ReduceScatter | Operation::ReduceScatterSums => (n + 1.0) * s,
        Operation::AllGather | Operation::Broadcast | Operation::Gather => 2.0 * (n - 1.0) * s,
        _ => 0.0,
    }
}

/// Measures `operations` at `sizes` in bytes, `seconds` for each case. Every rank of `comm` calls
/// it and gets the same figures.
///
/// Sizes are rounded up to whole f32 elements in equal parts.
pub fn measure(comm: &Communicator, operations: &[Operation], sizes: &[usize], seconds: f64) -> Result<Vec<Timing>> {
    let quantum = 4 * comm.size();
    let mut timings = Vec::new();
    for &size in sizes {
        let bytes = size.max(1).next_multiple_of(quantum);
        let mut buffers = Buffers::new(bytes);
        let copy_s = time(comm, seconds, || {
            buffers.copy();
            Ok(())
        })?;
        let copy_rate = 2.0 * (comm.size() * bytes) as f64 / copy_s;
        for &operation in operations {
            let once = time(comm, seconds, || buffers.run(comm, operation))?;
            let native_seconds = match operation {
                Operation::AllReduce => native(comm, &mut buffers, seconds)?,
                _ => None,
            };
            timings.push(Timing {
                operation,
                ranks: comm.size(),
                bytes,
                seconds: once,
                traffic: traffic(operation, comm.size(), bytes),
                copy_rate,
                native_seconds,
            });
        }
    }
    Ok(timings)
}

#[cfg(feature = "mpi")]
fn native(comm: &Communicator, buffers: &mut Buffers, seconds: f64) -> Result<Option<f64>> {
    if comm.backend() != "mpi" {
        return Ok(None);
    }
    time(comm, seconds, || crate::mpi::native_all_reduce(comm, &buffers.input, &mut buffers.output)).map(Some)
}

#[cfg(not(feature = "mpi"))]
fn native(_: &Communicator, _: &mut Buffers, _: f64) -> Result<Option<f64>> {
    Ok(None)
}

/// A rank's memory: two buffers of the message's size.
struct Buffers {
    input: Vec<f32>,
    output: Vec<f32>,
}

impl Buffers {
    fn new(bytes: usize) -> Self {
        // Values that stay what they are under repeated sums.
        Self { input: vec![0.0; bytes / 4].iter().map(|x: &f32| x + 0.0).collect(), output: vec![1e-30; bytes / 4] }
    }

    fn copy(&mut self) {
        self.output.copy_from_slice(std::hint::black_box(&self.input));
        std::hint::black_box(&mut self.output);
    }

    fn run(&mut self, comm: &Communicator, operation: Operation) -> Result<()> {
        let part = self.input.len() / comm.size();
        match operation {
            Operation::AllReduce => comm.all_reduce(&mut self.input),
            Operation::ReduceScatter => comm.reduce_scatter(&self.input, &mut self.output[..part]),
            Operation::AllGather => comm.all_gather_in_place(&mut self.output),
            Operation::Broadcast => comm.broadcast(&mut self.input, 0),
            Operation::AllToAll => comm.all_to_all(&self.input, &mut self.output),
            _ => comm.barrier(),
        }
    }
}

/// Seconds of one `body`, the slowest rank's, median over rounds. All ranks do the same number.
pub fn time(comm: &Communicator, seconds: f64, mut body: impl FnMut() -> Result<()>) -> Result<f64> {
    const ROUNDS: usize = 9;
    let mut round = |count: usize| -> Result<f64> {
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..count {
            body()?;
        }
        let mut times = vec![0.0; comm.size()];
        times[comm.rank()] = start.elapsed().as_secs_f64() / count as f64;
        comm.all_gather_in_place(&mut times)?;
        Ok(times.into_iter().fold(0.0, f64::max))
    };
    // The first round touches memory and wakes threads; the second says how many operations fill a
    // round.
    round(1)?;
    let once = round(2)?;
    let count = ((seconds / ROUNDS as f64 / once.max(1e-9)) as usize).clamp(1, 10_000);
    let mut times = (0..ROUNDS).map(|_| round(count)).collect::<Result<Vec<f64>>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local;

    #[test]
    fn every_rank_gets_the_same_figures() {
        let run = |comm: Communicator| measure(&comm, &OPERATIONS, &[4, 10_000], 0.002).unwrap();
        let all: Vec<Vec<Timing>> = std::thread::scope(|scope| {
            let threads: Vec<_> = local::World::new(3).into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(all[0].len(), 2 * OPERATIONS.len());
        for (a, b) in all[0].iter().zip(&all[2]) {
            assert_eq!((a.operation, a.bytes, a.seconds), (b.operation, b.bytes, b.seconds));
            assert!(a.seconds > 0.0 && a.copy_rate > 0.0 && a.bytes % 12 == 0);
        }
    }
}
