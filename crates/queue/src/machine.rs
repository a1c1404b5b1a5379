//! The machine: its cores, and how much others use of it.
//!
//! Others' share of the cores is what `/proc/stat` counts as busy, less the time of the queue's own
//! processes. Pressure stall information (`/proc/pressure`) is the share of time in which tasks
//! wait for a core, memory or the disk (Linux, "PSI - Pressure Stall Information").

use procfs::{CpuPressure, Current, CurrentSI, IoPressure, MemoryPressure};
use std::collections::BTreeMap;

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
    /// The reason for which a job that asks for others below `bound` percent must not run now; None
    /// if it may.
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

impl Ticks {
    /// The ticks up to now. None where the kernel does not tell.
    pub fn now() -> Option<Ticks> {
        let cpu = procfs::KernelStats::current().ok()?.total;
        // Guest time is counted in user and nice.
        let served: u64 = [cpu.irq, cpu.softirq, cpu.steal].into_iter().flatten().sum();
        let busy = cpu.user + cpu.nice + cpu.system + served;
        Some(Ticks { busy, all: busy + cpu.idle + cpu.iowait.unwrap_or(0) })
    }
}

/// The pressure of this machine.
pub fn pressures() -> BTreeMap<&'static str, f64> {
    let some = [
        ("cpu", CpuPressure::current().map(|pressure| pressure.some)),
        ("memory", MemoryPressure::current().map(|pressure| pressure.some)),
        ("io", IoPressure::current().map(|pressure| pressure.some)),
    ];
    some.into_iter().filter_map(|(what, record)| Some((what, f64::from(record.ok()?.avg10)))).collect()
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
    fn this_machine_is_read() {
        let ticks = Ticks::now().unwrap();
        assert!(0 < ticks.busy && ticks.busy < ticks.all, "{ticks:?}");
        assert!(pressures().values().all(|share| (0.0..=100.0).contains(share)));
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
