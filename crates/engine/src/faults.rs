//! Injection of faults for tests. A fault strikes once, at a rank, a step and an instruction.
//!
//! The environment variable [`VARIABLE`] holds faults in the form of [`Fault`], separated by `;`,
//! e.g. `kill rank=1 step=3 instruction=7; delay:250 rank=0 step=4 instruction=2`. Without it
//! nothing here runs. A fault at a program position strikes when that instruction begins, on any
//! lane. The communicator injects faults at its operations, and every corruption.
//!
//! Beside these there are faults that [last](LastingFault): `slow:5 rank=1 what=forward`, and
//! `flip rank=1 step=20`: after 20 steps a bit of the parameters of rank 1 is another.

use crate::lasting_faults::LastingFault;
use crate::{EngineError, Result};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use trainyard_comm::fault::{Action, At, Fault, FaultPlan};
use trainyard_comm::{Communicator, Position};
use trainyard_program::Program;

/// The environment variable that holds faults.
pub const VARIABLE: &str = "TRAINYARD_FAULTS";

/// The behaviour of a hanging rank after the others have noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hang {
    /// It keeps hanging, so its process must be ended.
    ForEver,
    /// It returns the others' error, so that a test can go on in the same process.
    UntilNoticed,
}

/// The faults of a run, and whether each has struck.
#[derive(Debug)]
pub struct Faults {
    in_programs: Vec<(Fault, AtomicBool)>,
    in_exchanges: Arc<FaultPlan>,
    lasting: Vec<LastingFault>,
    flips: Vec<Flip>,
    hang: Hang,
}

/// A bit that flips in the parameters of a rank after a step, as in a bad cell of memory.
#[derive(Debug)]
struct Flip {
    rank: u32,
    /// The number of finished steps.
    step: u64,
    struck: AtomicBool,
}

impl Faults {
    /// Prepares the given faults.
    pub fn new(faults: impl IntoIterator<Item = Fault>, hang: Hang) -> Faults {
        let of_program = |fault: &Fault| matches!(fault.at, At::Position { .. }) && fault.action != Action::Corrupt;
        let (programs, exchanges): (Vec<_>, Vec<_>) = faults.into_iter().partition(of_program);
        Faults {
            in_programs: programs.into_iter().map(|fault| (fault, AtomicBool::new(false))).collect(),
            in_exchanges: Arc::new(FaultPlan::new(exchanges)),
            lasting: Vec::new(),
            flips: Vec::new(),
            hang,
        }
    }

    /// The faults in [`VARIABLE`].
    ///
    /// # Errors
    /// The variable holds something else.
    pub fn from_environment() -> Result<Option<Faults>> {
        let Ok(text) = std::env::var(VARIABLE) else { return Ok(None) };
        let texts = text.split(';').map(str::trim).filter(|text| !text.is_empty());
        let (lasting, once): (Vec<&str>, Vec<&str>) = texts.partition(|text| LastingFault::is_one(text));
        let (flips, once): (Vec<&str>, Vec<&str>) = once.into_iter().partition(|text| text.starts_with("flip "));
        let wrong = |error: String| EngineError::DoesNotFit(format!("{VARIABLE}: {error}"));
        let faults = once.into_iter().map(|text| text.parse::<Fault>().map_err(|error| wrong(error.to_string())));
        let faults = faults.collect::<Result<Vec<Fault>>>()?;
        let lasting =
            lasting.into_iter().map(|text| text.parse().map_err(wrong)).collect::<Result<Vec<LastingFault>>>()?;
        let flips = flips.into_iter().map(|text| Flip::read(text).map_err(wrong)).collect::<Result<Vec<Flip>>>()?;
        let is_empty = faults.is_empty() && lasting.is_empty() && flips.is_empty();
        Ok((!is_empty).then(|| Faults { lasting, flips, ..Faults::new(faults, Hang::ForEver) }))
    }

    /// All faults, as text.
    pub fn describe(&self) -> String {
        let once = self.all().map(Fault::to_string);
        let lasting = self.lasting.iter().map(LastingFault::to_string);
        once.chain(lasting).chain(self.flips.iter().map(Flip::to_string)).collect::<Vec<_>>().join("; ")
    }

    /// Refuses a fault of a rank that a world of `ranks` does not have.
    ///
    /// # Errors
    /// The first such fault.
    pub fn check(&self, ranks: usize) -> Result<()> {
        let once = self.all().map(|fault| (fault.rank, fault.to_string()));
        let all = once.chain(self.lasting.iter().map(|fault| (fault.rank, fault.to_string())));
        let all = all.chain(self.flips.iter().map(|flip| (flip.rank, flip.to_string())));
        match all.into_iter().find(|(rank, _)| *rank as usize >= ranks) {
            None => Ok(()),
            Some((_, fault)) => Err(EngineError::DoesNotFit(format!(
                "{VARIABLE}: `{fault}` can never strike: this run has {} (parallel.ranks, or the processes of a launcher)",
                match ranks {
                    1 => "rank 0 alone".to_owned(),
                    _ => format!("ranks 0 to {}", ranks - 1),
                }
            ))),
        }
    }

    /// The faults that have not struck yet, each with its rank and its text: of `rank`, or of all
    /// ranks if it is None.
    pub fn to_come(&self, rank: Option<u32>) -> Vec<(u32, String)> {
        let own = self.in_programs.iter().filter(|(_, struck)| !struck.load(Ordering::Relaxed));
        let once = own.map(|(fault, _)| fault).chain(self.in_exchanges.to_come());
        let once = once.map(|fault| (fault.rank, fault.to_string()));
        let flips = self.flips.iter().filter(|flip| !flip.struck.load(Ordering::Relaxed));
        let all = once.chain(flips.map(|flip| (flip.rank, flip.to_string())));
        all.filter(|(of, _)| rank.is_none_or(|rank| *of == rank)).collect()
    }

    fn all(&self) -> impl Iterator<Item = &Fault> {
        self.in_programs.iter().map(|(fault, _)| fault).chain(self.in_exchanges.faults())
    }

    /// Injects the faults in exchanges into `world` and all communicators made from it afterwards.
    pub fn inject(&self, world: &Communicator) {
        world.inject(Arc::clone(&self.in_exchanges));
    }

    /// True if a bit of the parameters of `rank` is to flip now, after `step` steps. It will not
    /// flip again.
    pub(crate) fn flips(&self, rank: u32, step: u64) -> bool {
        let due = |flip: &Flip| (flip.rank, flip.step) == (rank, step);
        self.flips.iter().any(|flip| due(flip) && !flip.struck.swap(true, Ordering::Relaxed))
    }

    /// Executes the fault of `rank` at this position, if there is one that has not struck yet.
    pub(crate) fn strike(&self, rank: u32, at: &Position, comm: Option<&Communicator>) -> Result<()> {
        self.lasting.iter().for_each(|fault| fault.strike(rank, at));
        let here = At::Position { step: at.step, instruction: at.instruction };
        let due = |fault: &Fault| fault.rank == rank && fault.at == here;
        let due = self.in_programs.iter().find(|(fault, struck)| due(fault) && !struck.swap(true, Ordering::Relaxed));
        let Some((fault, _)) = due else { return Ok(()) };
        match fault.action {
            Action::Kill if comm.is_some_and(|comm| comm.backend() != "local") => std::process::abort(),
            Action::Kill => panic!("rank {rank} killed on purpose at {at}"),
            Action::Hang => loop {
                std::thread::sleep(Duration::from_millis(5));
                if let Some(noticed) = comm.filter(|_| self.hang == Hang::UntilNoticed).and_then(Communicator::failure)
                {
                    return Err(noticed.into());
                }
            },
            Action::Delay(delay) => std::thread::sleep(delay),
            Action::Refuse => {
                return Err(EngineError::DoesNotFit(format!("rank {rank} was refused memory on purpose at {at}")));
            }
            Action::Corrupt => {}
        }
        Ok(())
    }
}

impl Flip {
    /// Reads the form that it is written in.
    fn read(text: &str) -> Result<Flip, String> {
        let wrong = || format!("`{text}` is no fault: write `flip rank=1 step=20`");
        let words: Vec<&str> = text.split_whitespace().collect();
        let [_, rank, step] = words[..] else { return Err(wrong()) };
        let number = |word: &str, key: &str| word.strip_prefix(key)?.strip_prefix('=')?.parse::<u64>().ok();
        let (rank, step) = (number(rank, "rank").ok_or_else(wrong)?, number(step, "step").ok_or_else(wrong)?);
        Ok(Flip { rank: u32::try_from(rank).map_err(|_| wrong())?, step, struck: AtomicBool::new(false) })
    }
}

impl fmt::Display for Flip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "flip rank={} step={}", self.rank, self.step)
    }
}

/// A random fault drawn from `seed`: any action at any rank, any of the first `steps` steps and any
/// instruction of that rank's program (for a corruption: any that sends). A delay lasts `delay`.
///
/// # Panics
/// If there are no programs or no steps.
pub fn seeded(seed: u64, programs: &[Program], steps: u64, delay: Duration) -> Fault {
    // Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators": the finaliser
    // of SplitMix64.
    let draw = |stream: u64, below: usize| {
        let mut x = seed.wrapping_mul(8).wrapping_add(stream).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % below as u64) as usize
    };
    let rank = draw(0, programs.len());
    let actions = [Action::Kill, Action::Hang, Action::Delay(delay), Action::Corrupt, Action::Refuse];
    let action = actions[draw(1, actions.len())];
    let sends = |index: &usize| action != Action::Corrupt || programs[rank].instructions[*index].bytes > 0;
    let choice: Vec<usize> = (0..programs[rank].instructions.len()).filter(sends).collect();
    let instruction = choice[draw(2, choice.len())] as u32;
    Fault { rank: rank as u32, at: At::Position { step: draw(3, steps as usize) as u64, instruction }, action }
}
