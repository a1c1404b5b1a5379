//! `trainyard bench collectives`: latency and bandwidth between ranks, in percent of plain copies
//! measured in the same run.

use crate::output::{note, print};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::thread;
use trainyard_comm::bench::{Line, OPERATIONS, Timing, fit, measure};
use trainyard_comm::{Communicator, DEADLINE_DEFAULT, Environment, Operation, local};

/// Arguments of `bench collectives`.
#[derive(clap::Args)]
pub struct CollectivesArgs {
    /// Group sizes, for ranks that are threads; of processes (`trainyard launch`, mpirun) the group
    /// is their world.
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    ranks: Vec<usize>,
    /// Message sizes in bytes (suffixes KiB, MiB, GiB).
    #[arg(long, value_delimiter = ',', default_value = "8,512,4KiB,64KiB,1MiB,8MiB,64MiB", value_parser = bytes)]
    sizes: Vec<usize>,
    /// Operations: all_reduce, reduce_scatter, all_gather, broadcast, all_to_all.
    #[arg(long, value_delimiter = ',', default_value = "all_reduce,reduce_scatter,all_gather,broadcast,all_to_all", value_parser = operation)]
    operations: Vec<Operation>,
    /// Seconds for each case, which runs at least nine times.
    #[arg(long, default_value_t = 0.2)]
    seconds: f64,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

fn operation(text: &str) -> Result<Operation, String> {
    let known = OPERATIONS.into_iter().find(|operation| operation.name() == text);
    let names: Vec<&str> = OPERATIONS.iter().map(|operation| operation.name()).collect();
    known.ok_or_else(|| format!("is none of {}", names.join(", ")))
}

fn bytes(text: &str) -> Result<usize, String> {
    let units = [("KiB", 1usize << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let (digits, unit) =
        units.iter().find_map(|(name, unit)| text.strip_suffix(name).map(|d| (d, *unit))).unwrap_or((text, 1));
    let number: usize = digits.trim().parse().map_err(|_| "is no number of bytes such as 4096 or 64MiB".to_owned())?;
    number.checked_mul(unit).ok_or_else(|| "is more than this machine can address".to_owned())
}

/// The figures of one group.
struct Group {
    backend: &'static str,
    ranks: usize,
    timings: Vec<Timing>,
}

/// Runs the command.
pub fn run(args: &CollectivesArgs) -> Result<()> {
    if !(0.0..=60.0).contains(&args.seconds) {
        bail!("--seconds {} must be from 0 to 60", args.seconds);
    }
    if args.ranks.iter().any(|ranks| !(2..=1024).contains(ranks)) {
        bail!("--ranks must be from 2 to 1024: one rank has nobody to exchange with");
    }
    let mut groups = Vec::new();
    match Environment::detect()?.connect(DEADLINE_DEFAULT, note)? {
        Some(world) => {
            let timings = measure(&world, &args.operations, &args.sizes, args.seconds)?;
            // All ranks have the same figures.
            if world.rank() == 0 {
                groups.push(Group { backend: world.backend(), ranks: world.size(), timings });
            }
        }
        None => {
            for &ranks in &args.ranks {
                note(&format!("{ranks} ranks"));
                groups.push(Group { backend: "local", ranks, timings: on_threads(ranks, args)? });
            }
        }
    }
    if args.json && !groups.is_empty() {
        return print(format_args!("{}\n", json(&groups)));
    }
    groups.iter().try_for_each(table)
}

fn on_threads(ranks: usize, args: &CollectivesArgs) -> Result<Vec<Timing>> {
    let run = |comm: Communicator| measure(&comm, &args.operations, &args.sizes, args.seconds);
    let run = &run;
    let results: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = local::World::new(ranks).into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
    });
    let mut last = None;
    for result in results {
        last = Some(result.map_err(|_| anyhow::anyhow!("a rank panicked"))??);
    }
    last.context("a group without ranks")
}

fn lines(group: &Group) -> Vec<(Operation, Line)> {
    let points = |operation| {
        let its = group.timings.iter().filter(|timing| timing.operation == operation);
        its.map(|timing| (timing.bytes as f64, timing.seconds)).collect::<Vec<_>>()
    };
    OPERATIONS.into_iter().filter_map(|operation| fit(&points(operation)).map(|line| (operation, line))).collect()
}

fn table(group: &Group) -> Result<()> {
    print(format_args!("{} ranks, {}\n\n", group.ranks, group.backend))?;
    print("operation              bytes        us      GB/s   of a copy\n")?;
    for timing in &group.timings {
        print(format_args!(
            "{:<16} {:>11} {:>9.1} {:>9.3} {:>9.1} %",
            timing.operation.name(),
            timing.bytes,
            1e6 * timing.seconds,
            timing.bandwidth() / 1e9,
            100.0 * timing.share_of_copy()
        ))?;
        match timing.native_seconds {
            Some(native) => {
                print(format_args!("   {:.2} x MPI_Allreduce ({:.1} us)\n", native / timing.seconds, 1e6 * native))?;
            }
            None => print("\n")?,
        }
    }
    print("\nfit of t = alpha + beta bytes   alpha us    GB/s   worst error\n")?;
    for (operation, line) in lines(group) {
        print(format_args!(
            "  {:<28} {:>9.2} {:>7.2} {:>11.0} %\n",
            operation.name(),
            1e6 * line.alpha,
            1e-9 / line.beta,
            100.0 * line.worst
        ))?;
    }
    print("\n")
}

fn json(groups: &[Group]) -> serde_json::Value {
    let mut cases = Vec::new();
    let mut fits = Vec::new();
    for group in groups {
        for timing in &group.timings {
            cases.push(json!({
                "backend": group.backend,
                "ranks": group.ranks,
                "operation": timing.operation.name(),
                "bytes": timing.bytes,
                "seconds": timing.seconds,
                "bytes_per_s": timing.bandwidth(),
                "copy_bytes_per_s": timing.copy_rate,
                "copy_share": timing.share_of_copy(),
                "mpi_seconds": timing.native_seconds,
            }));
        }
        for (operation, line) in lines(group) {
            fits.push(json!({
                "backend": group.backend,
                "ranks": group.ranks,
                "operation": operation.name(),
                "alpha_s": line.alpha,
                "beta_s_per_byte": line.beta,
                "worst_relative_error": line.worst,
            }));
        }
    }
    json!({"cases": cases, "fits": fits})
}
