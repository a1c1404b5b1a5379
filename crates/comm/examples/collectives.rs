//! Prints what all-reduces reach, alone between threads or under `mpirun` between processes
//! (feature `mpi`): `cargo run --release -p trainyard-comm --example collectives`.

use trainyard_comm::bench::{OPERATIONS, Timing, measure};
use trainyard_comm::{Communicator, DEADLINE_DEFAULT, Environment, local};

const SIZES: [usize; 6] = [8, 4096, 65_536, 1 << 20, 8 << 20, 64 << 20];

fn print(timings: &[Timing]) {
    for timing in timings {
        println!(
            "{:<14} {} ranks {:>9} B {:>9.1} us {:>6.2} GB/s, {:>5.1} % of copies at {:.1} GB/s{}",
            timing.operation.name(),
            timing.ranks,
            timing.bytes,
            1e6 * timing.seconds,
            timing.bandwidth() / 1e9,
            100.0 * timing.share_of_copy(),
            timing.copy_rate / 1e9,
            timing
                .native_seconds
                .map_or(String::new(), |native| format!(", {:.2} x MPI_Allreduce", native / timing.seconds))
        );
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Some(world) = Environment::detect()?.connect(DEADLINE_DEFAULT, |note| eprintln!("{note}"))? {
        let timings = measure(&world, &OPERATIONS, &SIZES, 0.3)?;
        if world.rank() == 0 {
            print(&timings);
        }
        return Ok(());
    }
    for ranks in [2, 4] {
        let run = |comm: Communicator| measure(&comm, &OPERATIONS, &SIZES, 0.3);
        let timings = std::thread::scope(|scope| {
            let world = local::World::new(ranks);
            let threads: Vec<_> = world.into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics")).next_back()
        });
        print(&timings.expect("at least one rank")?);
    }
    Ok(())
}
