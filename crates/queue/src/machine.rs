//! The machine: its cores, and how much others use of it.
//!
//! Others' share of the cores is what `/proc/stat` counts as busy, less the time of the queue's own
//! processes. Pressure stall information (`/proc/pressure`) is the share of time in which tasks
//! wait for a core, memory or the disk (Linux, "PSI - Pressure Stall Information").

use std::collections::BTreeMap;
use std::path::Path;

/// Pressure above this percentage keeps an idle job from starting.
pub const PRESSURE_MAX: f64 = 10.0;

/// The machine at a time.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Machine {
    /// Cores that jobs may use.
    pub cores: u32,
    /// The percentage of all cores that others than the queue's jobs use. None if unknown.
    pub others: Option<f64>,
    /// The percentages of the last ten seconds in which some task waited: for cpu, memory, io.
    /// Empty where the kernel does not say.
    pub pressure: BTreeMap<&'static str, f64>,
}

impl Machine {
    /// Why a job must not run now that asks for others below `bound` percent; None if it may.
    ///
    /// A job that is to start needs others below half of the bound, so that it is not stopped at
    /// once. Its own threads and writes make pressure, so for one that runs only memory counts.
    pub fn is_busy(&self, bound: f64, is_running: bool) -> Option<String> {
        let Some(others) = self.others else {
            return Some("it waits for an idle machine, and /proc/stat does not tell how busy this one is".to_owned());
        };
        let limit = if is_running { bound } else { bound / 2.0 };
        if others > limit {
            return Some(format!("others use {others:.0} % of the cores, and {limit:.0} % is allowed"));
        }
        let counts = |what: &str| !is_running || what == "memory";
        let high = self.pressure.iter().find(|(what, share)| counts(what) && **share > PRESSURE_MAX);
        high.map(|(what, share)| format!("tasks wait for {what} {share:.0} % of the time"))
    }
}

/// Busy and all clock ticks of the machine's cores since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ticks {
    /// Ticks of work.
    pub busy: u64,
    /// All ticks.
    pub all: u64,
}

/// The ticks of `/proc/stat`.
pub fn ticks(stat: &str) -> Option<Ticks> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    // user nice system idle iowait irq softirq steal; guest time is counted in user and nice.
    let fields: Vec<u64> = line.split_whitespace().take(8).map(|field| field.parse().ok()).collect::<Option<_>>()?;
    let [user, nice, system, idle, iowait, irq, softirq, steal] = fields[..] else { return None };
    let busy = user + nice + system + irq + softirq + steal;
    Some(Ticks { busy, all: busy + idle + iowait })
}

/// Fields of `/proc/PID/stat` that matter here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessStat {
    /// Its state: `R`, `S`, `Z` and others.
    pub state: char,
    /// Its process group.
    pub group: u32,
    /// Ticks that it and the children that it waited for have used.
    pub ticks: u64,
    /// Its start, in ticks since the machine's start.
    pub started: u64,
}

/// Reads `/proc/PID/stat`.
pub fn process_stat(text: &str) -> Option<ProcessStat> {
    // The second field is the command in parentheses, which may hold spaces and parentheses.
    let rest = &text[text.rfind(')')? + 1..];
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let signed = |index: usize| fields.get(index)?.parse::<i64>().ok();
    // Counted from the state, which is field 3.
    let children = (signed(13)?.max(0) + signed(14)?.max(0)) as u64;
    Some(ProcessStat {
        state: fields.first()?.chars().next()?,
        group: u32::try_from(number(2)?).ok()?,
        ticks: number(11)? + number(12)? + children,
        started: number(19)?,
    })
}

/// The percentage of `some avg10` in a file of `/proc/pressure`.
pub fn pressure(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with("some "))?;
    line.split_whitespace().find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
}

/// The pressure of this machine.
pub fn pressures() -> BTreeMap<&'static str, f64> {
    let read = |what: &str| pressure(&std::fs::read_to_string(Path::new("/proc/pressure").join(what)).ok()?);
    ["cpu", "memory", "io"].into_iter().filter_map(|what| Some((what, read(what)?))).collect()
}

/// The percentage of all cores that others used between two looks, of which `own` ticks were the
/// queue's.
pub fn others(before: Ticks, after: Ticks, own: u64) -> Option<f64> {
    let all = after.all.checked_sub(before.all).filter(|all| *all > 0)?;
    let busy = after.busy.saturating_sub(before.busy);
    Some(100.0 * busy.saturating_sub(own) as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read() {
        let stat = "cpu  100 5 50 800 20 3 2 1 7 0\ncpu0 1 2 3\n";
        assert_eq!(ticks(stat), Some(Ticks { busy: 161, all: 981 }));
        assert_eq!(ticks("cpux"), None);
        let text = "77 (a) b (c)) S 1 70 70 0 -1 4194560 1 2 3 4 11 12 13 14 20 0 3 0 4242 1 2 3";
        let expected = ProcessStat { state: 'S', group: 70, ticks: 50, started: 4242 };
        assert_eq!(process_stat(text), Some(expected));
        assert_eq!(process_stat("77 (a"), None);
        let text = "some avg10=1.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=9.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(pressure(text), Some(1.5));
        let own = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert!(process_stat(&own).unwrap().started > 0);
    }

    #[test]
    fn others_are_what_is_not_ours() {
        let (before, after) = (Ticks { busy: 100, all: 1000 }, Ticks { busy: 180, all: 1200 });
        assert_eq!(others(before, after, 60), Some(10.0));
        assert_eq!(others(before, after, 90), Some(0.0));
        assert_eq!(others(before, before, 0), None);
    }

    #[test]
    fn an_idle_machine_has_few_others_and_little_pressure() {
        let machine = |others: f64, what: &'static str, share: f64| Machine {
            cores: 2,
            others: Some(others),
            pressure: BTreeMap::from([(what, share)]),
        };
        assert_eq!(machine(9.0, "cpu", 0.0).is_busy(20.0, false), None);
        let why = machine(15.0, "cpu", 0.0).is_busy(20.0, false).unwrap();
        assert_eq!(why, "others use 15 % of the cores, and 10 % is allowed");
        assert_eq!(machine(15.0, "cpu", 0.0).is_busy(20.0, true), None);
        assert!(machine(25.0, "cpu", 0.0).is_busy(20.0, true).is_some());
        // A running job makes pressure itself.
        assert_eq!(machine(5.0, "cpu", 60.0).is_busy(20.0, true), None);
        assert_eq!(machine(5.0, "io", 60.0).is_busy(20.0, false).unwrap(), "tasks wait for io 60 % of the time");
        assert!(machine(5.0, "memory", 60.0).is_busy(20.0, true).is_some());
        assert!(Machine::default().is_busy(20.0, false).unwrap().contains("/proc/stat"));
    }
}
