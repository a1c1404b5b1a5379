//! The ranks of a run: starts them as threads or joins them as processes, and helps them to
//! cooperate outside of steps.
//!
//! Every rank runs the same code, as a thread or a process. Where one rank must go first (to create
//! token files or the run's folder), it is rank 0.

use crate::config::{Config, Inputs, omp_num_threads};
use crate::faults::Faults;
use crate::session::inputs_for;
use crate::{EngineError, Result};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use trainyard_comm::{Communicator, Environment, Note, local};

/// Deadline while rank 0 prepares data. Tokenizing a corpus takes hours at most.
const PREPARATION: Duration = Duration::from_secs(24 * 3600);

/// The number of ranks of a configuration.
///
/// # Errors
/// Every problem of the configuration.
pub fn ranks(config: &Config) -> Result<usize> {
    Ok(config.resolve(&inputs_for(config, Inputs::of_this_machine())?)?.parallel.ranks)
}

/// Runs `body` on every rank of `config`. If a launcher started several processes together, this
/// process is one rank; otherwise the ranks are its threads. `note` receives messages while
/// processes connect.
///
/// # Errors
/// Those of [`on_threads`]; invalid environment variables of a launcher, or a launcher that this
/// build does not support.
pub fn launch<T: Send>(config: &Config, note: Note, body: impl Fn(Communicator) -> Result<T> + Sync) -> Result<T> {
    match Environment::detect()?.connect(deadline(config), note)? {
        Some(world) => run(world, body),
        None => on_threads(ranks(config)?, body),
    }
}

/// The time that ranks wait for each other: `parallel.deadline_seconds`.
pub fn deadline(config: &Config) -> Duration {
    // 1e9 seconds are 30 years. Much larger numbers do not fit a Duration.
    Duration::from_secs_f64(config.parallel.deadline_seconds.clamp(1e-3, 1e9))
}

/// Sets the deadline and checksums of `config`, and injected faults, for `world` and all
/// communicators made from it. All ranks call this before anything else.
pub fn prepare(world: &Communicator, config: &Config, faults: Option<&Faults>) {
    world.set_deadline(deadline(config));
    world.set_verify(config.parallel.verify);
    if let Some(faults) = faults {
        faults.inject(world);
    }
}

/// Runs `body` on `ranks` ranks that are threads of this process; rank 0 is the calling thread.
/// Returns rank 0's result once all have ended.
///
/// # Errors
/// The first failure: a rank that fails wakes the others, whose errors name it. Of several original
/// errors rank 0's is returned, else that of the lowest rank.
pub fn on_threads<T: Send>(ranks: usize, body: impl Fn(Communicator) -> Result<T> + Sync) -> Result<T> {
    let mut worlds = local::World::new(ranks).into_iter();
    let first = worlds.next().expect("a world has at least one rank");
    std::thread::scope(|scope| {
        let body = &body;
        let others: Vec<_> = worlds
            .map(|world| {
                let name = format!("rank-{}", world.rank());
                let spawned = std::thread::Builder::new().name(name).spawn_scoped(scope, move || run(world, body));
                spawned.expect("the operating system starts a thread")
            })
            .collect();
        let mut result = run(first, body);
        for other in others {
            match other.join() {
                Ok(Ok(_)) => {}
                // The error of the rank that failed says more than those of ranks that were told of
                // it.
                Ok(Err(error)) => {
                    let replace = result.as_ref().map_or_else(|first| knows_more(&error, first), |_| true);
                    if replace {
                        result = Err(error);
                    }
                }
                Err(_) => unreachable!("a rank's panic is caught where it runs"),
            }
        }
        result
    })
}

/// True if `error` of one rank says more about a failure than `than` of another. An original error
/// says more than one that names another rank's failure; a panic says least.
fn knows_more(error: &EngineError, than: &EngineError) -> bool {
    let rank = |error: &EngineError| match error {
        EngineError::Panicked { .. } => 0,
        error if error.is_told() => 1,
        _ => 2,
    };
    rank(error) > rank(than)
}

/// A communicator of the same ranks with the long deadline of data preparation.
pub(crate) fn patient(world: &Communicator) -> Result<Communicator> {
    let waiting = world.duplicate("preparation")?;
    waiting.set_deadline(PREPARATION);
    Ok(waiting)
}

/// Runs one rank. If it fails or panics, the other ranks are told why.
pub fn run<T>(world: Communicator, body: impl Fn(Communicator) -> Result<T>) -> Result<T> {
    let alarm = world.duplicate("alarm")?;
    // Unwind safety: the body's state is dropped with it after a panic, so no code sees it.
    let result = catch_unwind(AssertUnwindSafe(|| body(world))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        let message = text.unwrap_or("what it said is no text").to_owned();
        Err(EngineError::Panicked { rank: alarm.rank() as u32, message })
    });
    if let Err(error) = &result
        && !error.is_told()
    {
        match error.is_fault() {
            true => alarm.abort(error.to_string()),
            false => alarm.give_up(error.to_string()),
        };
    }
    result
}

/// Runs `work` on rank 0 first, then on the others, which find the files that rank 0 made.
pub(crate) fn first_then_others<T>(world: &Communicator, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let waiting = patient(world)?;
    if world.rank() == 0 {
        let made = work()?;
        waiting.barrier()?;
        return Ok(made);
    }
    waiting.barrier()?;
    work()
}

/// Broadcasts the result of rank 0's `make` to every rank.
pub fn from_first(world: &Communicator, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    from_rank(&patient(world)?, 0, make)
}

/// Broadcasts the result of `make` of rank `root` to every rank.
pub(crate) fn from_rank(world: &Communicator, root: usize, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    let mut bytes = if world.rank() == root { make()? } else { Vec::new() };
    let mut length = [bytes.len() as u64];
    world.broadcast(&mut length, root)?;
    bytes.resize(length[0] as usize, 0);
    world.broadcast(&mut bytes, root)?;
    Ok(bytes)
}

/// Inputs of a configuration that runs on `world`. Processes share their host's cores, unless the
/// launcher bound each to its own.
pub fn inputs(world: &Communicator) -> Inputs {
    let mut inputs = Inputs::of_this_machine();
    if world.backend() != "local" {
        inputs.processes = Some(world.size());
        // `OMP_NUM_THREADS` is a number per process, so cores are not divided.
        if omp_num_threads().is_none() {
            let all = cores_of_ranks_here(world);
            inputs.sharing = sharing(&cores_of(std::process::id()), &all);
            if inputs.sharing == 1 && all.len() > 1 {
                inputs.cores_because = "cores that the launcher bound this process to".to_owned();
            }
        }
    }
    inputs
}

/// Number of cores of this host that the processes of `world` may use together.
pub fn cores_here(world: &Communicator) -> usize {
    let available = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    match cores_of(std::process::id()) {
        // `available` is smaller if a quota of CPU time applies, which all processes share.
        Some(own) if own.len() <= available => {
            cores_of_ranks_here(world).into_iter().flatten().flatten().collect::<BTreeSet<_>>().len().max(available)
        }
        _ => available,
    }
}

/// The numbers of the cores that a process may run on; None if unknown.
type Cores = Option<BTreeSet<usize>>;

/// The cores of each rank on this host.
fn cores_of_ranks_here(world: &Communicator) -> Vec<Cores> {
    let here = world.place(world.rank()).host;
    let places = (0..world.size()).map(|member| world.place(member));
    places.filter(|place| place.host == here).map(|place| cores_of(place.pid)).collect()
}

/// Number of processes in `all` that may run on a core of `own`, the process itself included. A
/// process with unknown cores may run anywhere.
fn sharing(own: &Cores, all: &[Cores]) -> usize {
    let meet = |other: &&Cores| match (own, other) {
        (Some(own), Some(other)) => !own.is_disjoint(other),
        _ => true,
    };
    all.iter().filter(meet).count().max(1)
}

/// The cores that process `pid` of this host may run on; None if the system does not say.
fn cores_of(pid: u32) -> Cores {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    numbers_of_list(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?)
}

/// The numbers in a list like `0-3,8`.
fn numbers_of_list(list: &str) -> Cores {
    let mut numbers = BTreeSet::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if first > last {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

/// Number of ranks of `world` that run on this host.
pub fn ranks_here(world: &Communicator) -> usize {
    let here = world.place(world.rank()).host;
    (0..world.size()).filter(|member| world.place(*member).host == here).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_read() {
        let of = |list| numbers_of_list(list).map(|numbers| numbers.into_iter().collect::<Vec<_>>());
        assert_eq!(of("0"), Some(vec![0]));
        assert_eq!(of("0-3,8"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(of(" 2,4-5\n"), Some(vec![2, 4, 5]));
        assert_eq!(["", "x", "3-1"].map(of), [None, None, None]);
    }

    #[test]
    fn processes_share_cores_that_they_have_in_common() {
        let lists = |lists: &[&str]| lists.iter().map(|list| numbers_of_list(list)).collect::<Vec<_>>();
        // Bound to a core each; two to a socket each; all confined to the same cores; nothing is
        // known of one.
        for (all, expected) in [
            (&["0", "1", "2"][..], 1),
            (&["0-3", "4-7", "0-3", "4-7"], 2),
            (&["0-3", "0-3", "0-3", "0-3"], 4),
            (&["0-1", "2-3", "?"], 2),
        ] {
            let all = lists(all);
            assert_eq!(sharing(&all[0], &all), expected, "{all:?}");
        }
        let this = cores_of(std::process::id());
        assert_eq!(sharing(&this, std::slice::from_ref(&this)), 1);
        assert_eq!(this.is_some(), cfg!(target_os = "linux"));
    }
}
