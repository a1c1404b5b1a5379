//! The identity of a machine.

use serde::{Deserialize, Serialize};
use std::fmt;
use trainyard_tensor::cpu::Isa;

/// The properties of a machine that its measurements depend on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The CPU's name, as the system gives it, with family, model and stepping.
    pub cpu: String,
    /// Number of cores that the ranks on one host may use: those of this process, or of all
    /// processes that were started there together.
    pub cores: u32,
    /// Number of hardware threads that the system has online.
    pub threads: u32,
    /// The best instruction set for kernels.
    pub isa: String,
    /// The processes that are ranks, if the profile is of processes; otherwise ranks are threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<Processes>,
    /// The GPU that computes, if the profile is of one. Each rank has one, and they share nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
}

/// Processes that were started together, one per rank.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Processes {
    /// Transport between them: `mpi` or `tcp`, and `nccl` between GPUs.
    pub backend: String,
    /// Number of processes.
    pub count: u32,
    /// Number of hosts, with equally many processes.
    pub hosts: u32,
}

impl Processes {
    /// The number of processes on each host.
    pub fn on_a_host(&self) -> u32 {
        (self.count / self.hosts.max(1)).max(1)
    }
}

/// The properties of a GPU that measurements depend on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Its name, as the driver gives it.
    pub name: String,
    /// Architecture that kernels are compiled for, such as `sm_90a`.
    pub architecture: String,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Number of GPUs that the process saw.
    pub count: u32,
}

impl Machine {
    /// Describes this machine.
    pub fn here() -> Machine {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get()) as u32;
        let online = info.lines().filter(|line| line.starts_with("processor")).count() as u32;
        Machine {
            cpu: cpu_name(&info),
            cores,
            threads: online.max(cores),
            isa: Isa::detect().name().to_owned(),
            processes: None,
            gpu: None,
        }
    }

    /// True if measurements of this machine hold on `other`. For machines with GPUs, the GPUs
    /// decide.
    pub fn is(&self, other: &Machine) -> bool {
        match (&self.gpu, &other.gpu) {
            (Some(this), Some(other)) => Gpu { count: other.count, ..this.clone() } == *other,
            _ => self == other,
        }
    }

    /// The number of cores that the threads of all ranks share; GPUs are not shared.
    pub fn shared_cores(&self) -> f64 {
        if self.gpu.is_some() { f64::INFINITY } else { f64::from(self.cores) }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(Gpu { name, architecture, count, .. }) = &self.gpu {
            let (count, hosts) = self.processes.as_ref().map_or((*count, 1), |all| (all.count, all.hosts));
            let many = if count == 1 { String::new() } else { format!("{count} x ") };
            write!(f, "{many}{name}, {architecture}")?;
            return if hosts > 1 { write!(f, ", on {hosts} hosts") } else { Ok(()) };
        }
        let Machine { cpu, cores, threads, isa, .. } = self;
        write!(f, "{cpu}, {cores} cores of {threads} threads, {isa}")?;
        match &self.processes {
            Some(Processes { backend, count, hosts: 1 }) => write!(f, "; {count} processes over {backend}"),
            Some(Processes { backend, count, hosts }) => {
                write!(f, "; {count} processes on {hosts} hosts over {backend}")
            }
            None => Ok(()),
        }
    }
}

/// The CPU's name in the text of `/proc/cpuinfo`. A system without that file is named by its
/// architecture.
fn cpu_name(info: &str) -> String {
    let field = |name: &str| {
        let line = info.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let Some(name) = field("model name") else { return std::env::consts::ARCH.to_owned() };
    let numbers = ["cpu family", "model", "stepping"].map(|name| field(name).unwrap_or_else(|| "?".into()));
    format!("{name} (family {}, model {}, stepping {})", numbers[0], numbers[1], numbers[2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_found_among_others_that_begin_alike() {
        let info = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Some CPU @ 2 GHz\nstepping\t: 8\n";
        assert_eq!(cpu_name(info), "Some CPU @ 2 GHz (family 6, model 207, stepping 8)");
        assert_eq!(cpu_name(""), std::env::consts::ARCH);
    }

    #[test]
    fn a_gpu_decides_which_machine_it_is() {
        let gpu = |name: &str, count| {
            let (name, architecture) = (name.to_owned(), "sm_90a".to_owned());
            let gpu = Gpu { name, architecture, multiprocessors: 132, memory_bytes: 141 << 30, count };
            Machine { gpu: Some(gpu), ..Machine::here() }
        };
        let one = gpu("NVIDIA H200", 1);
        let elsewhere = Machine { cpu: "another".into(), cores: 1, ..gpu("NVIDIA H200", 8) };
        assert!(one.is(&elsewhere) && !one.is(&gpu("NVIDIA H100", 1)) && !one.is(&Machine::here()));
        assert_eq!(elsewhere.to_string(), "8 x NVIDIA H200, sm_90a");
        let processes = Some(Processes { backend: "nccl".into(), count: 16, hosts: 2 });
        assert_eq!(Machine { processes, ..one.clone() }.to_string(), "16 x NVIDIA H200, sm_90a, on 2 hosts");
        assert_eq!((one.shared_cores(), Machine { cores: 3, gpu: None, ..one }.shared_cores()), (f64::INFINITY, 3.0));
    }

    #[test]
    fn processes_are_no_threads_and_how_many_they_are_and_how_they_talk_decides() {
        let of = |backend: &str, count, hosts| {
            let processes = Some(Processes { backend: backend.to_owned(), count, hosts });
            Machine { processes, ..Machine::here() }
        };
        let four = of("mpi", 4, 2);
        assert!(four.is(&of("mpi", 4, 2)));
        for other in [of("mpi", 8, 2), of("tcp", 4, 2), of("mpi", 4, 1), Machine::here()] {
            assert!(!four.is(&other) && !other.is(&four), "{other}");
        }
        assert!(four.to_string().ends_with("; 4 processes on 2 hosts over mpi"), "{four}");
        assert_eq!(four.processes.unwrap().on_a_host(), 2);
    }

    #[test]
    fn this_machine_is_itself() {
        let here = Machine::here();
        assert!(here.is(&Machine::here()) && here.cores >= 1 && here.threads >= here.cores, "{here}");
    }
}
