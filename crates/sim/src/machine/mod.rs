//! The hardware profile of one machine: the measurements of `trainyard calibrate`, their place on
//! disk, and the check that they belong to this machine.
//!
//! A datasheet does not say how ranks that are threads or processes share a host's cores. A CPU run
//! is therefore priced from measurements alone: seconds of every kernel at many shapes
//! ([`KernelCurve`]), of collectives at many sizes ([`CollectiveCurve`]), and the overheads on top
//! of both. Speeds drift, so every measurement keeps the machine's [`Speeds`] of its moment, and a
//! prediction is made for the speeds of its own moment.

mod curve;
mod identity;

pub use curve::{CollectiveCurve, Fitted, KernelCurve, Point};
pub use identity::{Gpu, Machine, Processes};

use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use trainyard_base::median;

/// The version of the file's format.
pub const FORMAT: u32 = 1;
/// The environment variable that names the file of the processor's profile, instead of the default.
pub const PROFILE_VARIABLE: &str = "TRAINYARD_PROFILE";
/// The same for the profile of processes that a launcher starts together.
pub const PROCESSES_PROFILE_VARIABLE: &str = "TRAINYARD_PROCESSES_PROFILE";
/// The same for the profile of a GPU.
pub const GPU_PROFILE_VARIABLE: &str = "TRAINYARD_GPU_PROFILE";
/// The same for the profile of GPUs of several hosts.
pub const GPU_PROCESSES_PROFILE_VARIABLE: &str = "TRAINYARD_GPU_PROCESSES_PROFILE";

/// The kind of a profile. Each kind has a file of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProfileKind {
    /// A host's cores, whose ranks are threads of one process.
    Cpu,
    /// The cores of one host or several, whose ranks are processes.
    Processes,
    /// A GPU, one for each rank, on one host.
    Gpu,
    /// A GPU, one for each of the processes on several hosts.
    GpuProcesses,
}

impl ProfileKind {
    const fn variable(self) -> &'static str {
        match self {
            ProfileKind::Cpu => PROFILE_VARIABLE,
            ProfileKind::Processes => PROCESSES_PROFILE_VARIABLE,
            ProfileKind::Gpu => GPU_PROFILE_VARIABLE,
            ProfileKind::GpuProcesses => GPU_PROCESSES_PROFILE_VARIABLE,
        }
    }

    const fn file(self) -> &'static str {
        match self {
            ProfileKind::Cpu => "machine.toml",
            ProfileKind::Processes => "processes.toml",
            ProfileKind::Gpu => "gpu.toml",
            ProfileKind::GpuProcesses => "gpu-processes.toml",
        }
    }
}

/// The measurements of one machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineProfile {
    /// Version of the format: [`FORMAT`].
    pub format: u32,
    /// Time of the measurement, UTC.
    pub measured: String,
    /// Method of the measurement, for readers of the file.
    pub method: String,
    /// The machine.
    pub machine: Machine,
    /// Medians of all samples of speeds.
    pub speeds: Speeds,
    /// Overheads of the engine outside of kernels.
    pub overheads: Overheads,
    /// Slowdown of lanes that run at the same time.
    pub interference: Interference,
    /// The disk of the folder that was measured.
    pub disk: Disk,
    /// Copies between the host's memory and the GPU's. A profile of a host's own cores has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfers: Option<Transfers>,
    /// Collectives between ranks: threads, processes or GPUs.
    #[serde(rename = "collective")]
    pub collectives: Vec<CollectiveCurve>,
    /// Seconds of kernels.
    #[serde(rename = "kernel")]
    pub kernels: Vec<KernelCurve>,
}

/// The speeds of all cores together at a moment, or those of one of several processes while the
/// others do the same. They are the units of a kernel's arithmetic and of its traffic.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speeds {
    /// Operations per second of a product of middling size in f32.
    pub f32_flops: f64,
    /// The same in bf16.
    pub bf16_flops: f64,
    /// Bytes read plus written per second by a plain copy beyond the L2 caches.
    pub copy_bytes_per_s: f64,
}

impl Speeds {
    /// The speed of products on operands of `dtype` (`bf16`; anything else counts as f32).
    pub fn flops(&self, dtype: &str) -> f64 {
        if dtype == "bf16" { self.bf16_flops } else { self.f32_flops }
    }

    /// The median of each speed over the samples; None if there are none.
    pub fn median(samples: &[Speeds]) -> Option<Speeds> {
        let of = |field: fn(&Speeds) -> f64| median(samples.iter().map(field));
        Some(Speeds {
            f32_flops: of(|s| s.f32_flops)?,
            bf16_flops: of(|s| s.bf16_flops)?,
            copy_bytes_per_s: of(|s| s.copy_bytes_per_s)?,
        })
    }
}

/// Seconds that an engine spends outside of kernels.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overheads {
    /// Seconds of a kernel's launch beyond its own time: the allocation of its result, the tape.
    pub launch_s: f64,
    /// Seconds of an instruction on the compute lane.
    pub instruction_s: f64,
    /// Seconds of an instruction that waits for another lane: waking a thread.
    pub handover_s: f64,
    /// Seconds of a step: starting and joining lanes.
    pub step_s: f64,
}

/// The slowdown of lanes beside each other, beyond their shares of the cores.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interference {
    /// Compute beside communication: its seconds over those that the shares of the cores predict.
    pub compute: f64,
    /// Communication beside compute: the same ratio.
    pub communication: f64,
    /// Seconds that a collective beside compute waits for a core, if there are more threads than
    /// cores.
    pub start_s: f64,
}

/// The speed of a disk.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Bytes per second written and synchronised.
    pub write_bytes_per_s: f64,
    /// Bytes per second read back, possibly from the page cache.
    pub read_bytes_per_s: f64,
}

/// The speed of the host beside a GPU: copies between its pinned memory and the GPU's, and updates.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transfers {
    /// Bytes per second to the GPU.
    pub to_device_bytes_per_s: f64,
    /// Bytes per second from the GPU.
    pub to_host_bytes_per_s: f64,
    /// Bytes per second that an update on the host reads and writes, with all its cores.
    pub host_update_bytes_per_s: f64,
}

/// The reason why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// No environment variable gives a place to keep the profile.
    #[error("there is no place for the machine's profile: set {}, XDG_CACHE_HOME or HOME", .0.variable())]
    NoPlace(ProfileKind),
    /// The file cannot be read or written.
    #[error("cannot {what} the machine's profile {path}: {source}")]
    File {
        /// `read` or `write`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The file does not have the format of profiles.
    #[error("{path} is no profile of a machine that this version reads ({problem}): run `trainyard calibrate` again")]
    Parse {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// The profile was measured on another machine.
    #[error(
        "{path} was measured on another machine ({there}; this is {here}): run `trainyard calibrate` {}",
        how(here)
    )]
    OtherMachine {
        /// The file.
        path: PathBuf,
        /// The machine that was measured.
        there: Box<Machine>,
        /// This machine.
        here: Box<Machine>,
    },
}

/// The path of this machine's profile: `$TRAINYARD_PROFILE`, else `trainyard/machine.toml` below
/// `$XDG_CACHE_HOME`, else the same below `~/.cache`. A profile of processes has
/// `$TRAINYARD_PROCESSES_PROFILE` and `processes.toml`, one of a GPU `$TRAINYARD_GPU_PROFILE` and
/// `gpu.toml`, and one of the GPUs of several hosts `$TRAINYARD_GPU_PROCESSES_PROFILE` and
/// `gpu-processes.toml`.
///
/// # Errors
///
/// None of these variables is set.
pub fn local_profile_path(of: ProfileKind) -> Result<PathBuf, MachineError> {
    profile_path(of, |name| std::env::var_os(name)).ok_or(MachineError::NoPlace(of))
}

fn profile_path(of: ProfileKind, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = || set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    set(of.variable()).or_else(|| Some(cache()?.join("trainyard").join(of.file())))
}

/// Loads the profile of `here` or of its GPUs; None if it has not been calibrated. The kind of GPU
/// is not compared, so that a host without one can plan for hosts that have it.
///
/// # Errors
///
/// A file that cannot be read or does not parse, a profile of another machine, and a file that the
/// variable names and that does not exist.
pub fn load_local_profile(of: ProfileKind, here: &Machine) -> Result<Option<MachineProfile>, MachineError> {
    let path = local_profile_path(of)?;
    let named = std::env::var_os(of.variable()).is_some_and(|value| !value.is_empty());
    let found = match of {
        ProfileKind::Cpu | ProfileKind::Processes => MachineProfile::load(&path, here),
        ProfileKind::Gpu => MachineProfile::read(&path),
        ProfileKind::GpuProcesses => MachineProfile::read(&path).and_then(|profile| profile.of_processes(&path, here)),
    };
    match found {
        Err(MachineError::File { source, .. }) if !named && source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Words for the place and manner in which a profile of `here` is measured.
fn how(here: &Machine) -> &'static str {
    if here.processes.is_some() { "under this launcher" } else { "here" }
}

impl MachineProfile {
    /// Returns the profile, which was read from the file `path`, if its GPUs lie on hosts as the
    /// processes of `here` do.
    fn of_processes(self, path: &Path, here: &Machine) -> Result<MachineProfile, MachineError> {
        let dealt = |machine: &Machine| machine.processes.as_ref().map(|processes| (processes.count, processes.hosts));
        if self.machine.gpu.is_some() && dealt(&self.machine) == dealt(here) {
            return Ok(self);
        }
        let (there, here) = (Box::new(self.machine), Box::new(here.clone()));
        Err(MachineError::OtherMachine { path: path.to_owned(), there, here })
    }

    /// Loads the profile in the file `path`, which must be of the machine `here`.
    ///
    /// # Errors
    ///
    /// As [`load_local_profile`].
    pub fn load(path: &Path, here: &Machine) -> Result<MachineProfile, MachineError> {
        let profile = MachineProfile::read(path)?;
        if profile.machine.is(here) {
            return Ok(profile);
        }
        let (there, here) = (Box::new(profile.machine), Box::new(here.clone()));
        Err(MachineError::OtherMachine { path: path.to_owned(), there, here })
    }

    /// Reads the profile in the file `path`, of whatever machine.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or does not parse.
    pub fn read(path: &Path) -> Result<MachineProfile, MachineError> {
        let text = std::fs::read_to_string(path).map_err(|source| MachineError::File {
            what: "read",
            path: path.to_owned(),
            source,
        })?;
        MachineProfile::parse(&text).map_err(|problem| MachineError::Parse { path: path.to_owned(), problem })
    }

    /// Parses a profile.
    ///
    /// # Errors
    ///
    /// The fault, in words.
    pub fn parse(text: &str) -> Result<MachineProfile, String> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let version: Version = toml::from_str(text).map_err(|error| error.to_string())?;
        if version.format != FORMAT {
            return Err(format!("format {}, not {FORMAT}", version.format));
        }
        let profile: MachineProfile = toml::from_str(text).map_err(|error| error.to_string())?;
        profile.check()?;
        Ok(profile)
    }

    /// Checks that a machine can have every number.
    fn check(&self) -> Result<(), String> {
        let Speeds { f32_flops, bf16_flops, copy_bytes_per_s } = self.speeds;
        let rates = [
            ("speeds.f32_flops", f32_flops),
            ("speeds.bf16_flops", bf16_flops),
            ("speeds.copy_bytes_per_s", copy_bytes_per_s),
            ("interference.compute", self.interference.compute),
            ("interference.communication", self.interference.communication),
            ("disk.write_bytes_per_s", self.disk.write_bytes_per_s),
            ("disk.read_bytes_per_s", self.disk.read_bytes_per_s),
        ];
        let transfers = self.transfers.iter().flat_map(|transfers| {
            [
                ("transfers.to_device_bytes_per_s", transfers.to_device_bytes_per_s),
                ("transfers.to_host_bytes_per_s", transfers.to_host_bytes_per_s),
                ("transfers.host_update_bytes_per_s", transfers.host_update_bytes_per_s),
            ]
        });
        if let Some((name, value)) =
            rates.into_iter().chain(transfers).find(|(_, value)| !(*value > 0.0 && value.is_finite()))
        {
            return Err(format!("{name} is {value}, and must be positive"));
        }
        if let Some(Processes { count, hosts, .. }) = self.machine.processes
            && (count == 0 || hosts == 0 || !count.is_multiple_of(hosts))
        {
            return Err(format!("machine.processes are {count} on {hosts} hosts, and must be as many on each"));
        }
        self.kernels.iter().try_for_each(KernelCurve::check)?;
        self.collectives.iter().try_for_each(CollectiveCurve::check)
    }

    /// The text of the file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a profile is plain data")
    }

    /// Writes the profile to `path`, whole or not at all, and creates missing folders.
    ///
    /// # Errors
    ///
    /// A folder or file that cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), MachineError> {
        let fail = |source| MachineError::File { what: "write", path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(fail)?;
        }
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        std::fs::write(&temporary, self.to_toml()).map_err(fail)?;
        std::fs::rename(&temporary, path).map_err(fail)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A profile of a machine with two cores: one streaming kernel, one collective.
    pub(crate) fn small() -> MachineProfile {
        let speeds = Speeds { f32_flops: 2e11, bf16_flops: 4e12, copy_bytes_per_s: 3e10 };
        let point = |elements: f64| Point {
            dims: vec![elements],
            flops: elements,
            bytes: 8.0 * elements,
            seconds: 1e-6 + elements * 1e-9,
            product_flops: speeds.f32_flops,
            copy_bytes_per_s: speeds.copy_bytes_per_s,
        };
        MachineProfile {
            format: FORMAT,
            measured: "2026-11-22T00:00:00Z".into(),
            method: "by hand".into(),
            machine: Machine {
                cpu: "Test CPU".into(),
                cores: 2,
                threads: 2,
                isa: "avx2".into(),
                processes: None,
                gpu: None,
            },
            speeds,
            overheads: Overheads { launch_s: 1e-6, instruction_s: 1e-6, handover_s: 1e-5, step_s: 1e-4 },
            interference: Interference { compute: 1.0, communication: 1.0, start_s: 0.0 },
            disk: Disk { write_bytes_per_s: 1e9, read_bytes_per_s: 2e9 },
            transfers: None,
            collectives: vec![CollectiveCurve {
                operation: "all_reduce".into(),
                ranks: 2,
                hosts: 1,
                alpha_s: 1e-5,
                beta_s_per_byte: 1e-10,
                points: vec![[1e3, 1e-5], [1e6, 2e-4]],
            }],
            kernels: vec![KernelCurve {
                kernel: "add".into(),
                dtype: "f32".into(),
                ranks: 1,
                threads: 2,
                points: [1e3, 1e4, 1e5, 1e6].map(point).into(),
            }],
        }
    }

    #[test]
    fn the_place_is_the_variables_else_the_caches_else_homes() {
        let place = |set: &[(&str, &str)]| {
            let found = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value));
            profile_path(ProfileKind::Cpu, found).map(|path| path.display().to_string())
        };
        let (own, cache, home) = (("TRAINYARD_PROFILE", "/p.toml"), ("XDG_CACHE_HOME", "/cache"), ("HOME", "/h"));
        assert_eq!(place(&[own, cache, home]).unwrap(), "/p.toml");
        assert_eq!(place(&[cache, home]).unwrap(), "/cache/trainyard/machine.toml");
        assert_eq!(place(&[("XDG_CACHE_HOME", ""), home]).unwrap(), "/h/.cache/trainyard/machine.toml");
        assert_eq!(place(&[]), None);
        let home = |name: &str| (name == "HOME").then(|| OsString::from("/h"));
        for (kind, file) in [
            (ProfileKind::Gpu, "gpu.toml"),
            (ProfileKind::Processes, "processes.toml"),
            (ProfileKind::GpuProcesses, "gpu-processes.toml"),
        ] {
            assert_eq!(profile_path(kind, home).unwrap(), Path::new("/h/.cache/trainyard").join(file));
        }
    }

    fn h200() -> Gpu {
        Gpu {
            name: "NVIDIA H200".into(),
            architecture: "sm_90a".into(),
            multiprocessors: 132,
            memory_bytes: 141 << 30,
            count: 1,
        }
    }

    #[test]
    fn gpus_of_several_hosts_are_those_that_are_dealt_to_them_alike() {
        let dealt = |backend: &str, count, hosts| {
            let processes = Some(Processes { backend: backend.into(), count, hosts });
            Machine { processes, ..small().machine }
        };
        let measured = |gpu| MachineProfile { machine: Machine { gpu, ..dealt("nccl", 16, 2) }, ..small() };
        let path = Path::new("gpu-processes.toml");
        let fits = |gpu, here: &Machine| measured(gpu).of_processes(path, here).is_ok();
        // Neither the launcher nor the processor matters.
        assert!(fits(Some(h200()), &Machine { cpu: "another".into(), ..dealt("tcp", 16, 2) }));
        for other in [dealt("tcp", 16, 4), dealt("tcp", 8, 2), small().machine] {
            assert!(!fits(Some(h200()), &other), "{other}");
        }
        assert!(!fits(None, &dealt("tcp", 16, 2)), "a profile of processors");
        let error = measured(Some(h200())).of_processes(path, &dealt("tcp", 8, 2)).unwrap_err().to_string();
        assert!(error.contains("16 x NVIDIA H200, sm_90a, on 2 hosts") && error.contains("8 processes"), "{error}");
    }

    #[test]
    fn a_gpus_profile_keeps_what_a_processors_has_not() {
        let machine = Machine { gpu: Some(h200()), ..small().machine };
        let transfers =
            Some(Transfers { to_device_bytes_per_s: 5e10, to_host_bytes_per_s: 4e10, host_update_bytes_per_s: 2e11 });
        let profile = MachineProfile { machine, transfers, ..small() };
        assert_eq!(MachineProfile::parse(&profile.to_toml()).unwrap(), profile);
        let bad = profile.to_toml().replace("to_host_bytes_per_s = 40000000000.0", "to_host_bytes_per_s = -1.0");
        assert!(MachineProfile::parse(&bad).unwrap_err().contains("transfers.to_host_bytes_per_s is -1"));
        assert!(!small().to_toml().contains("gpu"), "a processor's profile is as it was");
    }

    #[test]
    fn a_profile_of_processes_keeps_their_hosts_and_is_refused_where_they_are_not_dealt_equally() {
        let processes = Some(Processes { backend: "mpi".into(), count: 4, hosts: 2 });
        let machine = Machine { processes, ..small().machine };
        let across = CollectiveCurve { ranks: 4, hosts: 2, ..small().collectives.remove(0) };
        let profile = MachineProfile { machine, collectives: vec![across], ..small() };
        let text = profile.to_toml();
        assert_eq!(MachineProfile::parse(&text).unwrap(), profile);
        assert!(!small().to_toml().contains("hosts"), "a profile of threads is as it was");
        for (good, bad, says) in [
            ("count = 4", "count = 3", "3 on 2 hosts"),
            ("count = 4", "count = 0", "0 on 2 hosts"),
            ("ranks = 4\nhosts = 2", "ranks = 4\nhosts = 0", "4 ranks on 0 hosts"),
        ] {
            assert!(text.contains(good), "{text}");
            let error = MachineProfile::parse(&text.replace(good, bad)).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_profile_is_read_as_it_was_written_and_only_where_it_was_measured() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/machine.toml");
        let profile = small();
        profile.save(&path).unwrap();
        assert_eq!(MachineProfile::load(&path, &profile.machine).unwrap(), profile);
        let other = Machine { cores: 64, ..profile.machine.clone() };
        let error = MachineProfile::load(&path, &other).unwrap_err().to_string();
        assert!(error.contains("another machine") && error.contains("64 cores"), "{error}");
    }

    #[test]
    fn bad_files_are_refused_in_words() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.toml");
        let good = small().to_toml();
        for (text, says) in [
            ("format = 1", "missing field"),
            ("nothing", "is no profile"),
            (good.replace("format = 1", "format = 99").as_str(), "format 99"),
            (good.replace("f32_flops = 200000000000.0", "f32_flops = 0.0").as_str(), "speeds.f32_flops is 0"),
            (good.replace("points = ", "punkte = ").as_str(), "is no profile"),
        ] {
            std::fs::write(&path, text).unwrap();
            let result = MachineProfile::load(&path, &small().machine);
            let error = result.unwrap_err().to_string();
            assert!(error.contains(says), "{error} does not say {says}");
        }
        let missing = MachineProfile::load(&folder.path().join("none"), &small().machine).unwrap_err();
        assert!(missing.to_string().contains("cannot read"), "{missing}");
    }
}
