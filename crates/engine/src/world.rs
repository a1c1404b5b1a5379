//! The ranks of a run: starting them as threads, and what they do together outside of steps.
//!
//! Every rank runs the same code, thread or process. Where one must go first (making token files,
//! the run's folder) it is rank 0.

use crate::config::{Config, Inputs, omp_num_threads};
use crate::faults::Faults;
use crate::session::inputs_for;
use crate::{EngineError, Result};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use trainyard_comm::{Communicator, Environment, Note, local};

/// How long ranks wait while rank 0 prepares data: tokenizing a corpus takes hours at most.
const PREPARATION: Duration = Duration::from_secs(24 * 3600);

/// How many ranks a configuration asks for, or every problem of it.
pub fn ranks(config: &Config) -> Result<usize> {
    Ok(config.resolve(&inputs_for(config, Inputs::of_this_machine())?)?.parallel.ranks)
}

/// Runs `body` on every rank of `config`: this process is one of them where a launcher started
/// several together, else they are its threads. `note` is told of what happens while processes come
/// together.
///
/// # Errors
/// As [`on_threads`]; and variables of a launcher that make no sense, or one that this build cannot
/// serve.
pub fn launch<T: Send>(config: &Config, note: Note, body: impl Fn(Communicator) -> Result<T> + Sync) -> Result<T> {
    match Environment::detect()?.connect(deadline(config), note)? {
        Some(world) => run(world, body),
        None => on_threads(ranks(config)?, body),
    }
}

/// How long ranks wait for each other: `parallel.deadline_seconds`.
pub fn deadline(config: &Config) -> Duration {
    // Thirty years are for ever; more is no duration.
    Duration::from_secs_f64(config.parallel.deadline_seconds.clamp(1e-3, 1e9))
}

/// Gives `world`, and the communicators that will be made of it, the deadline and the checksums
/// that `config` asks for, and faults. All ranks do this alike, before anything else.
pub fn prepare(world: &Communicator, config: &Config, faults: Option<&Faults>) {
    world.set_deadline(deadline(config));
    world.set_verify(config.parallel.verify);
    if let Some(faults) = faults {
        faults.inject(world);
    }
}

/// Runs `body` on `ranks` ranks that are threads of this process; rank 0 is the calling thread.
/// Returns what rank 0 returned, once all have ended.
///
/// # Errors
/// The first failure counts: a rank that fails wakes the others, whose errors name it. Rank 0's own
/// error comes first, then that of the lowest rank.
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
                // What another rank was told is less than what the one that failed knows.
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

/// Whether `error` of one rank says more about a failure than that of another: who fails knows more
/// than who is told, but whose thread panics knows nothing.
fn knows_more(error: &EngineError, than: &EngineError) -> bool {
    let rank = |error: &EngineError| match error {
        EngineError::Panicked { .. } => 0,
        error if error.is_told() => 1,
        _ => 2,
    };
    rank(error) > rank(than)
}

/// A communicator of the same ranks that may take its time.
pub(crate) fn patient(world: &Communicator) -> Result<Communicator> {
    let waiting = world.duplicate("preparation")?;
    waiting.set_deadline(PREPARATION);
    Ok(waiting)
}

/// Runs one rank; when it fails or panics, the others are told why.
pub fn run<T>(world: Communicator, body: impl Fn(Communicator) -> Result<T>) -> Result<T> {
    let alarm = world.duplicate("alarm")?;
    // What the body leaves behind after a panic is seen by nobody: its handles are dropped with it.
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

/// Lets rank 0 do `work` first and the others after it: what it makes, they find.
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

/// What rank 0's `make` returns, on every rank.
pub fn from_first(world: &Communicator, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    from_rank(&patient(world)?, 0, make)
}

/// What `make` of rank `root` returns, on every rank.
pub(crate) fn from_rank(world: &Communicator, root: usize, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    let mut bytes = if world.rank() == root { make()? } else { Vec::new() };
    let mut length = [bytes.len() as u64];
    world.broadcast(&mut length, root)?;
    bytes.resize(length[0] as usize, 0);
    world.broadcast(&mut bytes, root)?;
    Ok(bytes)
}

/// What a configuration depends on where it runs on `world`: processes share their host's cores,
/// unless the launcher bound each to its own.
pub fn inputs(world: &Communicator) -> Inputs {
    let mut inputs = Inputs::of_this_machine();
    if world.backend() != "local" {
        inputs.processes = Some(world.size());
        // `OMP_NUM_THREADS` is each process's own number.
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

/// Cores of this host that the processes of `world` have together.
pub fn cores_here(world: &Communicator) -> usize {
    let available = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    match cores_of(std::process::id()) {
        // A quota of time, which all share, is less than the cores that may be used.
        Some(own) if own.len() <= available => {
            cores_of_ranks_here(world).into_iter().flatten().flatten().collect::<BTreeSet<_>>().len().max(available)
        }
        _ => available,
    }
}

/// The numbers of cores, of a process.
type Cores = Option<BTreeSet<usize>>;

/// The cores that the ranks on this host may run on, by rank.
fn cores_of_ranks_here(world: &Communicator) -> Vec<Cores> {
    let here = world.place(world.rank()).host;
    let places = (0..world.size()).map(|member| world.place(member));
    places.filter(|place| place.host == here).map(|place| cores_of(place.pid)).collect()
}

/// How many of `all` may run on a core of `own`, itself among them. Of whom nothing is known it may
/// be anywhere.
fn sharing(own: &Cores, all: &[Cores]) -> usize {
    let meet = |other: &&Cores| match (own, other) {
        (Some(own), Some(other)) => !own.is_disjoint(other),
        _ => true,
    };
    all.iter().filter(meet).count().max(1)
}

/// The cores that process `pid` of this host may run on; None where the system does not say.
fn cores_of(pid: u32) -> Cores {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    numbers_of_list(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?)
}

/// The numbers that a list like `0-3,8` names.
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

/// Ranks of `world` that run on this host.
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
