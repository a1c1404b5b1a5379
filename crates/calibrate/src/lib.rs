//! Measures this machine, predicts runs on it, and compares the two.
//!
//! There are no kernel benchmarks here. [`calibrate`] trains small models with the engine
//! ([`probes`]), with one rank on all cores or several on a part each. It records every kernel call
//! with its shape and time, in the order, the memory and the caches of a real step. The time of an
//! instruction beyond its kernels is the engine's overhead. Collectives, their interference with
//! compute, and the disk are measured separately. The result is a
//! [`MachineProfile`](trainyard_sim::MachineProfile).
//!
//! The machine's speed drifts while it is measured. Several rounds therefore run over all probes,
//! in turn with samples of the speeds ([`Sampler`]). Every time is kept with the speeds of its
//! moment, and a curve is made of medians.
//!
//! [`forecast`] predicts a configuration's step from a profile. [`check`] trains configurations and
//! compares.

#![forbid(unsafe_code)]

pub mod check;
mod collect;
mod disk;
mod exchange;
mod forecast;
pub mod gpu;
mod gpu_exchange;
pub mod probe_group;
pub mod probes;
mod ranks;
mod sample;

pub use forecast::{Forecast, forecast, layout};
pub use ranks::Ranks;
pub use sample::Sampler;

use collect::Collector;
use probe_group::ProbeGroup;
use probes::Probe;
use std::path::Path;
use std::time::{Instant, SystemTime};
use trainyard_comm::CommError;
use trainyard_engine::EngineError;
use trainyard_sim::machine::{FORMAT, Speeds};
use trainyard_sim::{MachineError, MachineProfile};
use trainyard_tensor::TensorError;

/// The thoroughness of a calibration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Thoroughness {
    /// Number of rounds over all probes. A curve is the median of the rounds.
    pub rounds: u32,
    /// Runs every `every`th probe.
    pub every: usize,
    /// No further round begins after this many seconds.
    pub rounds_s_max: u32,
}

impl Thoroughness {
    /// The setting of `trainyard calibrate`.
    pub const FULL: Thoroughness = Thoroughness { rounds: 3, every: 1, rounds_s_max: 45 };
    /// A third of the shapes, in one round.
    pub const QUICK: Thoroughness = Thoroughness { rounds: 1, every: 3, rounds_s_max: 45 };
}

/// The reason why a calibration failed.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// A probe could not be trained.
    #[error("cannot train the probe {probe}: {source}")]
    Probe {
        /// Name of the probe.
        probe: String,
        /// Cause.
        source: EngineError,
    },
    /// Ranks could not communicate, or another process has failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Kernels refused their operands.
    #[error("the machine's speed cannot be sampled: {0}")]
    Sample(#[from] TensorError),
    /// The disk could not be measured.
    #[error("the disk cannot be measured in {folder}: {source}")]
    Disk {
        /// The folder.
        folder: String,
        /// Cause.
        source: std::io::Error,
    },
    /// The profile is invalid.
    #[error(transparent)]
    Profile(#[from] MachineError),
    /// Processes lie on hosts in a way that profiles cannot describe.
    #[error(
        "ranks must be dealt to hosts in order, and as many to each: these are on {hosts} (`mpirun --map-by slot` and `trainyard launch` deal them so)"
    )]
    Hosts {
        /// The host of every rank.
        hosts: String,
    },
}

/// Measures the machine of `group`, with the disk in `folder`. Calls `progress` with the fraction
/// that is done and a description of the next part. If the group consists of processes, they all
/// measure together. Rank 0 gets the profile, in which its kernels stand for those of all ranks;
/// the others get None.
///
/// # Errors
///
/// Any failure of the engine, the communicators or the disk.
pub fn calibrate(
    group: &ProbeGroup,
    how: Thoroughness,
    folder: &Path,
    progress: &mut dyn FnMut(f64, &str),
) -> Result<Option<MachineProfile>, CalibrateError> {
    progress(0.0, "speeds");
    let sampler = Sampler::new(group)?;
    // One process at a time: ranks share the disk, and predictions divide it among them.
    let disk = group.is_first().then(|| disk::measure(folder)).transpose();
    let disk = disk.map_err(|source| CalibrateError::Disk { folder: folder.display().to_string(), source })?;
    let layouts = group.layouts();
    let probes: Vec<Probe> = layouts.iter().flat_map(|layout| probes::all(*layout, how.every)).collect();
    let mut collector = Collector::default();
    let began = Instant::now();
    let mut rounds = 0;
    while rounds < how.rounds && group.agree(rounds == 0 || began.elapsed().as_secs() < u64::from(how.rounds_s_max))? {
        for at in 0..probes.len() {
            // Every other round goes backwards, so that drift does not look like a dependence on
            // shape.
            let probe = &probes[if rounds % 2 == 0 { at } else { probes.len() - 1 - at }];
            let done = (rounds as usize * probes.len() + at) as f64 / (how.rounds as usize * probes.len()) as f64;
            progress(0.9 * done, &format!("round {} of {}: {}", rounds + 1, how.rounds, probe.name()));
            probe.run(group, &sampler, &mut collector)?;
        }
        rounds += 1;
    }
    progress(0.9, "collectives");
    let collectives = exchange::collectives(group)?;
    progress(0.95, "computing and exchanges that overlap");
    let interference = exchange::interference(group)?;
    let speeds = Speeds::median(collector.speeds()).expect("every probe samples the speeds");
    let Some(disk) = disk else { return Ok(None) };
    Ok(Some(MachineProfile {
        format: FORMAT,
        measured: utc(SystemTime::now()),
        method: format!(
            "medians of {rounds} interleaved rounds over {} probes; each point keeps the speeds (of a reference product and a copy) that were sampled beside it, and predictions scale with those of their own moment",
            probes.len()
        ),
        machine: group.machine().clone(),
        speeds,
        overheads: collector.overheads(),
        interference,
        disk,
        transfers: None,
        collectives,
        kernels: collector.curves(),
    }))
}

/// `2026-11-22T00:05:09Z`
fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Civil from days: eras of 400 years that begin on the first of March (Hinnant,
    // "chrono-compatible low-level date algorithms").
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let day_of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let date = |seconds| utc(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(date(1_795_306_309), "2026-11-22T00:11:49Z");
    }
}
