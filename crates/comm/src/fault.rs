//! Faults on purpose: a rank is killed, hung, delayed, corrupted or refused at a chosen operation
//! or program position.
//!
//! A [`FaultPlan`] is given to a communicator ([`crate::Communicator::inject`]) and inherited by
//! those derived from it. Each fault strikes once per plan, so a plan that outlives a restart in
//! the same process does not strike again. Without a plan nothing here runs.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The harm that a fault does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// The rank ends: its thread panics, or its process aborts where ranks are processes.
    Kill,
    /// The rank does nothing until the world has failed.
    Hang,
    /// The rank comes late.
    Delay(Duration),
    /// One bit of what the rank sends changes on the way, after its checksum was taken.
    Corrupt,
    /// The operation returns an error.
    Refuse,
}

/// The place where a fault strikes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum At {
    /// At the `number`-th operation (from 0) of the communicator called `group`.
    Operation {
        /// Name of the communicator.
        group: String,
        /// Count of its operations.
        number: u64,
    },
    /// At the first operation after this position was posted on the same communicator.
    Position {
        /// Training step.
        step: u64,
        /// Index of the instruction.
        instruction: u32,
    },
}

/// One fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// World rank that suffers it.
    pub rank: u32,
    /// The place where it strikes.
    pub at: At,
    /// The harm that it does.
    pub action: Action,
}

/// Faults to come.
#[derive(Debug, Default)]
pub struct FaultPlan {
    faults: Vec<(Fault, AtomicBool)>,
}

impl FaultPlan {
    /// These faults.
    pub fn new(faults: impl IntoIterator<Item = Fault>) -> Self {
        Self { faults: faults.into_iter().map(|fault| (fault, AtomicBool::new(false))).collect() }
    }

    /// The faults in order.
    pub fn faults(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter().map(|(fault, _)| fault)
    }

    /// Those that have not struck yet, in order.
    pub fn to_come(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter().filter(|(_, struck)| !struck.load(Ordering::Relaxed)).map(|(fault, _)| fault)
    }

    /// The fault that strikes `rank` now, if one does; it will not strike again.
    pub(crate) fn strike(&self, rank: u32, group: &str, number: u64, posted: Option<(u64, u32)>) -> Option<Action> {
        let here = |at: &At| match at {
            At::Operation { group: name, number: count } => name == group && *count == number,
            At::Position { step, instruction } => posted == Some((*step, *instruction)),
        };
        let due = self
            .faults
            .iter()
            .find(|(fault, struck)| fault.rank == rank && here(&fault.at) && !struck.swap(true, Ordering::Relaxed));
        due.map(|(fault, _)| fault.action)
    }
}

impl Fault {
    /// A fault drawn from `seed`: any rank of `ranks`, any operation below `operations` of the
    /// communicator `group`, any action but long delays.
    ///
    /// # Panics
    /// If there are no ranks or no operations.
    pub fn seeded(seed: u64, ranks: u32, group: &str, operations: u64) -> Self {
        // Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators": the
        // finaliser of SplitMix64.
        let draw = |stream: u64, below: u64| {
            let mut x = seed.wrapping_mul(4).wrapping_add(stream).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (x ^ (x >> 31)) % below
        };
        let actions =
            [Action::Kill, Action::Hang, Action::Delay(Duration::from_millis(20)), Action::Corrupt, Action::Refuse];
        Self {
            rank: draw(0, ranks.into()) as u32,
            at: At::Operation { group: group.to_owned(), number: draw(1, operations) },
            action: actions[draw(2, actions.len() as u64) as usize],
        }
    }
}

impl fmt::Display for Fault {
    /// The form that [`Fault::from_str`] reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.action {
            Action::Kill => f.write_str("kill")?,
            Action::Hang => f.write_str("hang")?,
            Action::Delay(delay) => write!(f, "delay:{}", delay.as_millis())?,
            Action::Corrupt => f.write_str("corrupt")?,
            Action::Refuse => f.write_str("refuse")?,
        }
        write!(f, " rank={} ", self.rank)?;
        match &self.at {
            At::Operation { group, number } => write!(f, "operation={number} group={group}"),
            At::Position { step, instruction } => write!(f, "step={step} instruction={instruction}"),
        }
    }
}

/// Text that describes no fault.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "`{text}` is no fault: {why}; e.g. `kill rank=1 step=3 instruction=7` or `delay:250 rank=0 operation=12 group=world`"
)]
pub struct FaultError {
    text: String,
    why: String,
}

impl FromStr for Fault {
    type Err = FaultError;

    /// `ACTION rank=R step=S instruction=I` or `ACTION rank=R operation=N group=NAME`, where
    /// `ACTION` is `kill`, `hang`, `delay:MILLISECONDS`, `corrupt` or `refuse`.
    fn from_str(text: &str) -> Result<Self, FaultError> {
        let wrong = |why: String| FaultError { text: text.to_owned(), why };
        let (action, mut rest) = text.trim().split_once(' ').ok_or_else(|| wrong("it names no place".into()))?;
        let action = match (action, action.strip_prefix("delay:")) {
            ("kill", _) => Action::Kill,
            ("hang", _) => Action::Hang,
            ("corrupt", _) => Action::Corrupt,
            ("refuse", _) => Action::Refuse,
            (_, Some(ms)) => {
                let ms = ms.parse().map_err(|_| wrong(format!("`{ms}` is no number of milliseconds")))?;
                Action::Delay(Duration::from_millis(ms))
            }
            _ => return Err(wrong(format!("`{action}` is none of kill, hang, delay:MILLISECONDS, corrupt, refuse"))),
        };
        // A group's name may hold spaces, so it comes last.
        let group = rest.split_once("group=").map(|(before, name)| {
            rest = before;
            name.trim().to_owned()
        });
        let mut numbers = [("rank", None), ("operation", None), ("step", None), ("instruction", None)];
        for word in rest.split_whitespace() {
            let (key, value) = word.split_once('=').ok_or_else(|| wrong(format!("`{word}` is not KEY=NUMBER")))?;
            let slot = numbers.iter_mut().find(|(name, _)| *name == key);
            let (_, number) =
                slot.ok_or_else(|| wrong(format!("`{key}` is none of rank, operation, step, instruction, group")))?;
            *number = Some(value.parse::<u64>().map_err(|_| wrong(format!("`{value}` is no number")))?);
        }
        let small =
            |what: &str, value: u64| u32::try_from(value).map_err(|_| wrong(format!("{what} {value} is too large")));
        let [(_, rank), (_, operation), (_, step), (_, instruction)] = numbers;
        let rank = small("rank", rank.ok_or_else(|| wrong("rank=N is missing".into()))?)?;
        let at = match (operation, group, step, instruction) {
            (Some(number), Some(group), None, None) => At::Operation { group, number },
            (None, None, Some(step), Some(instruction)) => {
                At::Position { step, instruction: small("instruction", instruction)? }
            }
            _ => return Err(wrong("it needs either step and instruction, or operation and group".into())),
        };
        Ok(Self { rank, at, action })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_read_what_they_write() {
        for seed in 0..200 {
            let fault = Fault::seeded(seed, 4, "dp shard", 50);
            assert_eq!(fault.to_string().parse::<Fault>().unwrap(), fault);
        }
        let text = "delay:250 rank=3 step=17 instruction=9";
        assert_eq!(text.parse::<Fault>().unwrap().to_string(), text);
    }

    #[test]
    fn bad_faults_say_why() {
        for (text, why) in [
            ("kill", "names no place"),
            ("explode rank=1 step=1 instruction=1", "`explode` is none of"),
            ("delay:soon rank=1 step=1 instruction=1", "`soon` is no number"),
            ("kill step=1 instruction=1", "rank=N is missing"),
            ("kill rank=1 step=1", "needs either"),
            ("kill rank=1 place=1", "`place` is none of"),
            ("kill rank=99999999999 step=1 instruction=1", "too large"),
        ] {
            let error = text.parse::<Fault>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn seeds_draw_every_action_and_rank() {
        let drawn: Vec<Fault> = (0..100).map(|seed| Fault::seeded(seed, 3, "g", 10)).collect();
        assert!((0..3).all(|rank| drawn.iter().any(|fault| fault.rank == rank)));
        for action in [Action::Kill, Action::Hang, Action::Corrupt, Action::Refuse] {
            assert!(drawn.iter().any(|fault| fault.action == action));
        }
    }
}
