//! Faults that last: instructions that are slow, or leave memory behind, in many steps. They plant
//! causes whose diagnosis is known, for tests and for the table in docs/finding-bottlenecks.md.
//!
//! `slow:MS rank=R what=ACTION` makes every such instruction of a rank take so many milliseconds
//! more; they may have a fraction. `leak:KIB rank=R what=ACTION` lets it keep so many KiB for
//! ever. `unit=NAME` restricts either to one unit, and `every=N` to each N-th step.

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::time::Duration;
use trainyard_base::lock;
use trainyard_comm::Position;

/// A fault in many steps.
#[derive(Debug)]
pub struct LastingFault {
    harm: Harm,
    /// The rank that suffers it.
    pub rank: u32,
    /// Name of the action, e.g. `forward`.
    what: String,
    unit: Option<String>,
    every: u64,
    kept: Mutex<Vec<Vec<u8>>>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Harm {
    Slow(Duration),
    Leak(usize),
}

impl LastingFault {
    /// Does its harm if the instruction of `rank` at this position is one of its own.
    pub fn strike(&self, rank: u32, at: &Position) {
        let (what, unit) = at.what.split_once(' ').unwrap_or((&at.what, ""));
        let is_unit = self.unit.as_ref().is_none_or(|own| own == unit);
        if rank != self.rank || what != self.what || !is_unit || !at.step.is_multiple_of(self.every) {
            return;
        }
        match self.harm {
            Harm::Slow(time) => std::thread::sleep(time),
            // Written to, so that the memory is resident.
            Harm::Leak(bytes) => lock(&self.kept).push(vec![1; bytes]),
        }
    }

    /// True if `text` is meant to be such a fault.
    pub fn is_one(text: &str) -> bool {
        text.starts_with("slow:") || text.starts_with("leak:")
    }
}

impl fmt::Display for LastingFault {
    /// The form that [`LastingFault::from_str`] reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.harm {
            Harm::Slow(time) => write!(f, "slow:{}", time.as_secs_f64() * 1e3)?,
            Harm::Leak(bytes) => write!(f, "leak:{}", bytes as f64 / 1024.0)?,
        }
        write!(f, " rank={} what={}", self.rank, self.what)?;
        self.unit.iter().try_for_each(|unit| write!(f, " unit={unit}"))?;
        if self.every > 1 { write!(f, " every={}", self.every) } else { Ok(()) }
    }
}

impl FromStr for LastingFault {
    type Err = String;

    fn from_str(text: &str) -> Result<LastingFault, String> {
        let wrong = |why: &str| format!("`{text}` is no fault: {why}; e.g. `slow:5 rank=1 what=forward`");
        let mut words = text.split_whitespace();
        let (kind, amount) =
            words.next().and_then(|word| word.split_once(':')).ok_or_else(|| wrong("it says no amount"))?;
        let amount: f64 = amount.parse().map_err(|_| wrong("its amount is no number"))?;
        if !(0.0..1e9).contains(&amount) {
            return Err(wrong("its amount is out of range"));
        }
        let harm = match kind {
            "slow" => Harm::Slow(Duration::from_secs_f64(amount / 1e3)),
            "leak" => Harm::Leak((1024.0 * amount) as usize),
            _ => return Err(wrong("it is neither `slow` nor `leak`")),
        };
        let (mut rank, mut what, mut unit, mut every) = (None, None, None, 1);
        for word in words {
            match word.split_once('=') {
                Some(("rank", value)) => rank = Some(value.parse().map_err(|_| wrong("rank is no number"))?),
                Some(("what", value)) => what = Some(value.to_owned()),
                Some(("unit", value)) => unit = Some(value.to_owned()),
                Some(("every", value)) => {
                    every = value.parse().ok().filter(|every| *every > 0).ok_or_else(|| wrong("every is no number"))?;
                }
                _ => return Err(wrong("it knows rank=, what=, unit= and every=")),
            }
        }
        let rank = rank.ok_or_else(|| wrong("rank=N is missing"))?;
        let what = what.ok_or_else(|| wrong("what=ACTION is missing"))?;
        Ok(LastingFault { harm, rank, what, unit, every, kept: Mutex::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64, what: &str) -> Position {
        Position { step, instruction: 0, what: what.to_owned() }
    }

    #[test]
    fn faults_read_what_they_write_and_bad_ones_say_why() {
        for text in ["slow:2.5 rank=1 what=forward unit=block.3 every=4", "leak:64 rank=0 what=load"] {
            assert_eq!(text.parse::<LastingFault>().unwrap().to_string(), text);
        }
        for (text, why) in [
            ("slow rank=1 what=load", "says no amount"),
            ("slow:much rank=1 what=load", "amount is no number"),
            ("fast:1 rank=1 what=load", "neither `slow` nor `leak`"),
            ("slow:1 what=load", "rank=N is missing"),
            ("slow:1 rank=0", "what=ACTION is missing"),
            ("slow:1 rank=0 what=load every=0", "every is no number"),
            ("slow:1 rank=0 what=load step=3", "it knows"),
        ] {
            let error = text.parse::<LastingFault>().unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn it_strikes_its_own_instructions_only() {
        let fault: LastingFault = "leak:1 rank=1 what=forward unit=head every=2".parse().unwrap();
        let kept = || lock(&fault.kept).len();
        [at(1, "forward head"), at(2, "forward block.0"), at(2, "backward head")]
            .iter()
            .for_each(|at| fault.strike(1, at));
        fault.strike(0, &at(2, "forward head"));
        assert_eq!(kept(), 0);
        fault.strike(1, &at(2, "forward head"));
        assert_eq!(kept(), 1);
    }
}
