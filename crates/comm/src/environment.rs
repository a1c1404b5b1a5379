//! The launcher of this process, and its rank among how many: the variables of Open MPI, of PMI
//! (MPICH, Intel MPI, Cray), of torchrun and of Slurm.
//!
//! They are read in that order, because an MPI launcher also decides how messages travel: over MPI
//! where this build has it, else over TCP, for which the host of rank 0 must be known. Nothing is
//! guessed: a rank without a world, or text that should be a number, is an error that names the
//! variable.

use crate::communicator::Communicator;
use crate::tcp::{
    JobSecret, LISTEN_VARIABLE, RENDEZVOUS_DEFAULT, Rendezvous, RendezvousError, SECRET_VARIABLE, SecretSource,
};
use crate::{Note, slurm, warning};
use std::ffi::OsStr;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// torchrun's own default port.
const PORT_DEFAULT: u16 = 29_400;
/// The variable of the time in which ranks have to come together over TCP, in seconds.
const RENDEZVOUS_VARIABLE: &str = "TRAINYARD_RENDEZVOUS_SECONDS";

/// The program that started this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Launcher {
    /// No launcher that says so: one process, whose ranks are threads.
    Alone,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// A launcher that speaks PMI: MPICH's `mpiexec`, or `srun --mpi=pmi2`.
    Pmi,
    /// `torchrun` or anything that sets its variables.
    Torchrun,
    /// Slurm's `srun` without MPI.
    Slurm,
}

/// This process among those started with it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Environment {
    /// The program that started it.
    pub launcher: Launcher,
    /// Rank of the process in the world.
    pub rank: u32,
    /// Processes of the world.
    pub world: u32,
    /// Rank of the process on its host, where that is known.
    pub local_rank: Option<u32>,
    /// Processes on this host, where that is known.
    pub local_world: Option<u32>,
    /// Where the ranks meet if they talk over TCP, where that is known.
    pub master: Option<Master>,
    /// True if the launcher speaks a protocol by which MPI can start.
    pub has_mpi: bool,
    /// Time in which ranks have to come together over TCP.
    pub patience: Duration,
    /// The key by which the processes of the job know each other over TCP.
    pub secret: JobSecret,
    /// The address to listen at over TCP, where one is chosen.
    pub listen: Option<IpAddr>,
    /// Number of restarts of this world (torchrun).
    pub restarts: u32,
    /// The variables that said so, for printing.
    pub derivation: String,
}

/// Where rank 0 is met.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Master {
    /// Name or address of its host.
    pub host: String,
    /// Port at which it listens.
    pub port: u16,
    /// Where both are from.
    pub derivation: String,
}

/// Variables that make no sense, or a launch that this build cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable is missing beside another one, or is no number.
    #[error("environment variable {name}: {what}")]
    Variable {
        /// The variable.
        name: String,
        /// The fault in it.
        what: String,
    },
    /// Several processes that do not know where to meet.
    #[error(
        "this is process {rank} of {world} started by {launcher} ({derivation}), and nothing says where rank 0 is: set MASTER_ADDR to its host, and MASTER_PORT to a free port \
         of it, for all processes{}", other_ways(*launcher)
    )]
    NoMaster {
        /// Rank of the process.
        rank: u32,
        /// Processes.
        world: u32,
        /// The program that started them.
        launcher: Launcher,
        /// The variables that said so.
        derivation: String,
    },
    /// The ranks did not come together over TCP.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// MPI's world is another than the launcher's.
    #[error(
        "{launcher} started {world} processes ({derivation}), but MPI sees {mpi}: start them with the mpirun (or srun --mpi) of the MPI that trainyard was built with"
    )]
    OtherWorld {
        /// The program that started them.
        launcher: Launcher,
        /// Processes by the variables.
        world: u32,
        /// Processes by MPI.
        mpi: u32,
        /// The variables that said so.
        derivation: String,
    },
    /// MPI did not start.
    #[error("MPI did not start: {what}")]
    Mpi {
        /// Its message.
        what: String,
    },
}

/// Other ways to start the processes, for the user of this launcher.
fn other_ways(launcher: Launcher) -> &'static str {
    match launcher {
        Launcher::OpenMpi | Launcher::Pmi => {
            "; or build trainyard with MPI (`cargo build --release --features mpi`), or start the ranks of this host by `trainyard launch`"
        }
        _ => "; or start the ranks of one host by `trainyard launch`",
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Alone => "nobody",
            Launcher::OpenMpi => "Open MPI's mpirun",
            Launcher::Pmi => "a PMI launcher (MPICH's mpiexec or srun)",
            Launcher::Torchrun => "torchrun",
            Launcher::Slurm => "Slurm's srun",
        })
    }
}

/// The variables of one launcher.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_world: &'static str,
}

const NAMES: [Names; 4] = [
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Names {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world: "MPI_LOCALNRANKS",
    },
    Names {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world: "LOCAL_WORLD_SIZE",
    },
    // `sbatch` sets SLURM_PROCID and SLURM_NTASKS for its script too, which is one process; only a
    // step of `srun` has its own number of tasks.
    Names {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        world: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        local_world: "SLURM_NTASKS_PER_NODE",
    },
];

impl Environment {
    /// Reads this process's variables.
    pub fn detect() -> Result<Self, EnvironmentError> {
        check_secret(std::env::var_os(SECRET_VARIABLE).as_deref())?;
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// As [`Environment::detect`], from anywhere.
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self, EnvironmentError> {
        let named = NAMES.iter().find(|names| get(names.world).is_some() && Self::is_whole(names, &get));
        let Some(names) = named else { return Ok(Self::alone()) };
        let number = |name: &str| number(name, get(name));
        let world = number(names.world)?.unwrap_or(0);
        let rank = number(names.rank)?.ok_or_else(|| EnvironmentError::Variable {
            name: names.rank.to_owned(),
            what: format!("is not set, though {}={world} is", names.world),
        })?;
        if rank >= world {
            let what = format!("{rank} is no rank of a world of {}={world}", names.world);
            return Err(EnvironmentError::Variable { name: names.rank.to_owned(), what });
        }
        let torchrun = names.launcher == Launcher::Torchrun;
        let local_world = number(names.local_world)?;
        let is_one_host = match names.launcher {
            Launcher::Slurm => get("SLURM_STEP_NUM_NODES").is_some_and(|hosts| hosts.trim() == "1"),
            // Under Slurm, mpirun starts a daemon on each host by steps of srun of their own. The
            // ranks inherit the variables of such a step, which say nothing of the other hosts.
            _ => local_world == Some(world),
        };
        let listen = listen(get(LISTEN_VARIABLE))?;
        Ok(Self {
            launcher: names.launcher,
            rank,
            world,
            local_rank: number(names.local_rank)?,
            local_world,
            master: master(names.launcher, &get)?
                .map(|master| if is_one_host || master.is_loopback() { master.on_this_host(listen) } else { master }),
            has_mpi: match names.launcher {
                Launcher::OpenMpi | Launcher::Pmi => true,
                Launcher::Slurm => get("PMIX_RANK").is_some(),
                Launcher::Alone | Launcher::Torchrun => false,
            },
            patience: patience(get(RENDEZVOUS_VARIABLE))?,
            secret: secret(names.launcher, &get)?,
            listen,
            restarts: if torchrun { number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0) } else { 0 },
            derivation: format!("{}={rank}, {}={world}", names.rank, names.world),
        })
    }

    /// With the terms on which processes meet over TCP as variables set them, launcher or not:
    /// patience, secret and address.
    ///
    /// # Errors
    /// If one of them has no meaning.
    pub fn with_terms(self, get: impl Fn(&str) -> Option<String>) -> Result<Self, EnvironmentError> {
        let (patience, listen) = (patience(get(RENDEZVOUS_VARIABLE))?, listen(get(LISTEN_VARIABLE))?);
        Ok(Self { patience, listen, secret: secret(self.launcher, &get)?, ..self })
    }

    /// The variables by which launchers give a process its rank and world. A program that starts
    /// ranks of its own removes them from their environment.
    pub fn variables() -> impl Iterator<Item = &'static str> {
        let whole = NAMES.iter().flat_map(|names| [names.rank, names.world, names.local_rank, names.local_world]);
        whole.chain(["TORCHELASTIC_USE_AGENT_STORE"])
    }

    /// A Slurm job step that runs one task is the same as no launcher; so are batch scripts.
    fn is_whole(names: &Names, get: &impl Fn(&str) -> Option<String>) -> bool {
        names.launcher != Launcher::Slurm || get("SLURM_STEP_ID").is_some()
    }

    fn alone() -> Self {
        Self {
            launcher: Launcher::Alone,
            rank: 0,
            world: 1,
            local_rank: None,
            local_world: None,
            master: None,
            has_mpi: false,
            patience: RENDEZVOUS_DEFAULT,
            secret: JobSecret::nothing(),
            listen: None,
            restarts: 0,
            derivation: "no launcher's variables are set".to_owned(),
        }
    }

    /// The world of the processes that were started together, or `None` for a process alone, whose
    /// ranks are to be threads ([`crate::local::World`]). A rank that has come and is silent for
    /// `silence` ends the start; `note` is told of what does not end it.
    ///
    /// # Errors
    /// When there are several processes and this build or MPI cannot join them: they never run as
    /// so many worlds of one.
    pub fn connect(&self, silence: Duration, note: Note) -> Result<Option<Communicator>, EnvironmentError> {
        if self.world <= 1 {
            return Ok(None);
        }
        self.join(silence, note).map(Some)
    }

    fn join(&self, silence: Duration, note: Note) -> Result<Communicator, EnvironmentError> {
        #[cfg(feature = "mpi")]
        if self.has_mpi {
            return self.join_mpi();
        }
        self.join_tcp(silence, note)
    }

    fn join_tcp(&self, silence: Duration, note: Note) -> Result<Communicator, EnvironmentError> {
        let Some(Master { host, port, .. }) = &self.master else {
            return Err(EnvironmentError::NoMaster {
                rank: self.rank,
                world: self.world,
                launcher: self.launcher,
                derivation: self.derivation.clone(),
            });
        };
        if self.rank == 0 && *self.secret.source() != SecretSource::Variable {
            note(&warning(format_args!(
                "processes of this run know each other by {}: whoever reaches its ports can take part; {SECRET_VARIABLE}, the same random text for all of them, keeps others out",
                self.secret.source()
            )));
        }
        let rendezvous = Rendezvous {
            patience: self.patience,
            silence,
            secret: self.secret.clone(),
            listen: self.listen,
            note,
            ..Rendezvous::new(host, *port, self.rank, self.world)
        };
        Ok(rendezvous.join()?)
    }

    #[cfg(feature = "mpi")]
    fn join_mpi(&self) -> Result<Communicator, EnvironmentError> {
        let world = crate::mpi::init().map_err(|error| EnvironmentError::Mpi { what: error.to_string() })?;
        if world.size() == self.world as usize {
            return Ok(world);
        }
        Err(EnvironmentError::OtherWorld {
            launcher: self.launcher,
            world: self.world,
            mpi: world.size() as u32,
            derivation: self.derivation.clone(),
        })
    }
}

impl Master {
    /// True if the host's name says that all ranks are on it.
    fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
    }

    /// The same for ranks that are all on one host: they meet at the address that was chosen to
    /// `listen` at, else at loopback, where no other host comes.
    fn on_this_host(self, listen: Option<IpAddr>) -> Self {
        if let Some(ip) = listen.filter(|ip| !ip.is_unspecified()) {
            let derivation =
                format!("all ranks are on this host, which listens at {LISTEN_VARIABLE}; {}", self.derivation);
            return Self { host: ip.to_string(), derivation, ..self };
        }
        if self.is_loopback() {
            return self;
        }
        let derivation = format!("all ranks are on this host, so {} is not asked; {}", self.host, self.derivation);
        Self { host: Ipv4Addr::LOCALHOST.to_string(), derivation, ..self }
    }
}

/// The job's secret where the user or `launch` set one, else the launcher's name for the job.
fn secret(launcher: Launcher, get: &impl Fn(&str) -> Option<String>) -> Result<JobSecret, EnvironmentError> {
    if let Some(secret) = get(SECRET_VARIABLE) {
        let secret = JobSecret::of_variable(&secret);
        return secret.map_err(|what| EnvironmentError::Variable { name: SECRET_VARIABLE.to_owned(), what });
    }
    let named = |what: &str, name: &str| get(name).map(|value| format!("{what} {}", value.trim()));
    let name = match launcher {
        Launcher::Alone => None,
        Launcher::Torchrun => named("torchrun's run", "TORCHELASTIC_RUN_ID"),
        Launcher::OpenMpi => named("MPI's job", "PMIX_NAMESPACE"),
        Launcher::Slurm | Launcher::Pmi => named("Slurm's job", "SLURM_JOB_ID")
            .and_then(|job| Some(format!("{job}, {}", named("step", "SLURM_STEP_ID")?))),
    };
    Ok(name.map_or_else(JobSecret::nothing, JobSecret::of_job_name))
}

/// Refuses a secret that is no text, which would pass for none.
fn check_secret(value: Option<&OsStr>) -> Result<(), EnvironmentError> {
    if value.is_none_or(|value| value.to_str().is_some()) {
        return Ok(());
    }
    Err(EnvironmentError::Variable {
        name: SECRET_VARIABLE.to_owned(),
        what: "is no text (UTF-8): set it to text, e.g. in hexadecimal digits, the output of `openssl rand -hex 32`, the same for all ranks".to_owned(),
    })
}

fn listen(value: Option<String>) -> Result<Option<IpAddr>, EnvironmentError> {
    let Some(value) = value.filter(|value| !value.trim().is_empty()) else { return Ok(None) };
    value.trim().parse().map(Some).map_err(|_| EnvironmentError::Variable {
        name: LISTEN_VARIABLE.to_owned(),
        what: format!("`{value}` is no address of this host, such as 10.0.0.7 (0.0.0.0: all of them)"),
    })
}

/// Where rank 0 is met: `MASTER_ADDR` and `MASTER_PORT`, else what Slurm says of its first host.
fn master(launcher: Launcher, get: &impl Fn(&str) -> Option<String>) -> Result<Option<Master>, EnvironmentError> {
    let whole = |name: &str| number(name, get(name)).map(|number| number.map(u64::from));
    let given = match whole("MASTER_PORT")? {
        None => None,
        Some(port) => Some(u16::try_from(port).ok().filter(|&port| port > 0).ok_or_else(|| {
            EnvironmentError::Variable { name: "MASTER_PORT".to_owned(), what: format!("{port} is no port") }
        })?),
    };
    // Only steps of srun know which hosts are theirs.
    let in_step = matches!(launcher, Launcher::Slurm | Launcher::Pmi) && get("SLURM_STEP_ID").is_some();
    let step_port = match in_step {
        true => Some(slurm::port(whole("SLURM_JOB_ID")?.unwrap_or(0), whole("SLURM_STEP_ID")?.unwrap_or(0))),
        false => None,
    };
    let (host, of_host) = match get("MASTER_ADDR").filter(|host| !host.trim().is_empty()) {
        Some(host) => (host.trim().to_owned(), "MASTER_ADDR"),
        None => {
            let list = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].iter().find_map(|name| get(name));
            match list.filter(|_| in_step).and_then(|list| slurm::first_host(&list)) {
                Some(host) => (host, "the first host of the Slurm step"),
                None => return Ok(None),
            }
        }
    };
    let (port, of_port) = match (given, step_port) {
        // The agent of torchrun listens at its port itself.
        (Some(port), _) if get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|uses| uses == "True") => (
            if port < u16::MAX { port + 1 } else { port - 1 },
            "the one beside MASTER_PORT, where torchrun listens itself",
        ),
        (Some(port), _) => (port, "MASTER_PORT"),
        (None, Some(port)) => (port, "made of the numbers of the Slurm job and step"),
        (None, None) => (PORT_DEFAULT, "unless MASTER_PORT is set"),
    };
    Ok(Some(Master { host, port, derivation: format!("host: {of_host}; port: {of_port}") }))
}

fn patience(value: Option<String>) -> Result<Duration, EnvironmentError> {
    let Some(value) = value else { return Ok(RENDEZVOUS_DEFAULT) };
    let seconds = value.trim().parse().ok().filter(|seconds| (0.001..=1e6).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| EnvironmentError::Variable {
        name: RENDEZVOUS_VARIABLE.to_owned(),
        what: format!("`{value}` is no number of seconds from 0.001 to 1,000,000"),
    })
}

fn number(name: &str, value: Option<String>) -> Result<Option<u32>, EnvironmentError> {
    let Some(value) = value else { return Ok(None) };
    value
        .trim()
        .parse()
        .map(Some)
        .map_err(|_| EnvironmentError::Variable { name: name.to_owned(), what: format!("`{value}` is no number") })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Variables<'a> = &'a [(&'a str, &'a str)];

    fn detect(variables: Variables) -> Result<Environment, EnvironmentError> {
        let get = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Environment::from_variables(get)
    }

    #[test]
    fn launchers_are_told_apart() {
        let open_mpi =
            [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")];
        let pmi = [("PMI_RANK", "2"), ("PMI_SIZE", "3"), ("SLURM_PROCID", "2"), ("SLURM_STEP_NUM_TASKS", "3")];
        let torchrun = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "1234"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
        ];
        let slurm =
            [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_ID", "0"), ("SLURM_LOCALID", "0")];
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7")];
        let cases: [(Variables, Launcher, u32, u32); 6] = [
            (&open_mpi, Launcher::OpenMpi, 1, 4),
            (&pmi, Launcher::Pmi, 2, 3),
            (&torchrun, Launcher::Torchrun, 5, 8),
            (&slurm, Launcher::Slurm, 0, 2),
            (&batch, Launcher::Alone, 0, 1),
            (&[], Launcher::Alone, 0, 1),
        ];
        for (variables, launcher, rank, world) in cases {
            let found = detect(variables).unwrap();
            assert_eq!((found.launcher, found.rank, found.world), (launcher, rank, world), "{variables:?}");
        }
        let found = detect(&torchrun).unwrap();
        let master = found.master.unwrap();
        assert_eq!((master.host.as_str(), master.port), ("node0", 1234));
        assert_eq!((found.local_rank, found.local_world, found.restarts), (Some(1), Some(4), 2));
    }

    #[test]
    fn bad_variables_are_named() {
        let cases: [(Variables, &str); 5] = [
            (&[("WORLD_SIZE", "4")], "RANK: is not set, though WORLD_SIZE=4 is"),
            (&[("RANK", "one"), ("WORLD_SIZE", "4")], "RANK: `one` is no number"),
            (&[("RANK", "4"), ("WORLD_SIZE", "4")], "RANK: 4 is no rank of a world of WORLD_SIZE=4"),
            (&[("PMI_RANK", "0"), ("PMI_SIZE", "-1")], "PMI_SIZE: `-1` is no number"),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "99999")],
                "MASTER_PORT: 99999 is no port",
            ),
        ];
        for (variables, expected) in cases {
            let error = detect(variables).unwrap_err().to_string();
            assert!(error.ends_with(expected), "{error}");
        }
    }

    /// The place of rank 0 by the variables, as `host:port`, and true if MPI can start.
    fn meeting(variables: Variables) -> (Option<String>, bool) {
        let found = detect(variables).unwrap();
        (found.master.map(|master| format!("{}:{}", master.host, master.port)), found.has_mpi)
    }

    #[test]
    fn ranks_meet_where_the_variables_say() {
        let world = [("RANK", "0"), ("WORLD_SIZE", "2")];
        let with = |more: Variables<'static>| [&world[..], more].concat();
        let met = |host: &str| Some(host.to_owned());
        assert_eq!(meeting(&world), (None, false));
        assert_eq!(meeting(&with(&[("MASTER_ADDR", "a")])), (met("a:29400"), false));
        let agent = with(&[("MASTER_ADDR", "a"), ("MASTER_PORT", "7"), ("TORCHELASTIC_USE_AGENT_STORE", "True")]);
        assert_eq!(meeting(&agent), (met("a:8"), false));
        let step = [
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_STEP_ID", "1"),
            ("SLURM_JOB_ID", "20005"),
            ("SLURM_STEP_NODELIST", "node[07-08]"),
        ];
        assert_eq!(meeting(&step), (met("node07:11014"), false));
        assert_eq!(meeting(&step[..4]), (None, false), "no list of hosts");
        let own = [&step[..], &[("MASTER_ADDR", "node08"), ("MASTER_PORT", "9")]].concat();
        assert_eq!(meeting(&own), (met("node08:9"), false));
        assert_eq!(meeting(&[&step[..], &[("PMIX_RANK", "1")]].concat()), (met("node07:11014"), true));
        let mpirun = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4"), ("SLURM_JOB_NODELIST", "n[1-2]")];
        assert_eq!(meeting(&mpirun), (None, true), "mpirun numbers hosts itself");
    }

    #[test]
    fn ranks_of_one_host_meet_at_loopback() {
        let torchrun =
            |address, here| [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", here), ("MASTER_ADDR", address)];
        let host = |variables: Variables| detect(variables).unwrap().master.unwrap().host;
        assert_eq!(host(&torchrun("node0", "4")), "127.0.0.1");
        assert_eq!(host(&torchrun("node0", "2")), "node0");
        assert_eq!(host(&torchrun("::1", "4")), "::1");
        let step = [
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_STEP_ID", "1"),
            ("SLURM_JOB_ID", "5"),
            ("SLURM_STEP_NODELIST", "node7"),
            ("SLURM_STEP_NUM_NODES", "1"),
        ];
        assert_eq!(host(&step), "127.0.0.1");
        assert_eq!(host(&step[..5]), "node7");
    }

    #[test]
    fn ranks_of_one_host_meet_where_rank_0_was_told_to_listen() {
        let host = |address, here, listen| {
            let variables = [
                ("RANK", "1"),
                ("WORLD_SIZE", "4"),
                ("LOCAL_WORLD_SIZE", here),
                ("MASTER_ADDR", address),
                (LISTEN_VARIABLE, listen),
            ];
            detect(&variables).unwrap().master.unwrap().host
        };
        assert_eq!(host("127.0.0.1", "4", "10.0.0.7"), "10.0.0.7");
        assert_eq!(host("node0", "4", "10.0.0.7"), "10.0.0.7");
        assert_eq!(host("localhost", "2", "10.0.0.7"), "10.0.0.7", "loopback is one host");
        assert_eq!(host("node0", "2", "10.0.0.7"), "node0");
        assert_eq!(host("node0", "4", "0.0.0.0"), "127.0.0.1");
        assert_eq!(host("::1", "4", "::"), "::1");
    }

    #[test]
    fn the_step_of_mpiruns_daemon_is_not_taken_for_that_of_the_ranks() {
        let step = [("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_NODES", "1"), ("MASTER_ADDR", "node0")];
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")];
        let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "4")];
        let host = |variables: &[Variables]| detect(&variables.concat()).unwrap().master.unwrap().host;
        assert_eq!(host(&[&open_mpi, &step]), "node0");
        assert_eq!(host(&[&pmi, &step]), "node0");
        assert_eq!(host(&[&open_mpi, &step, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]]), "node0");
        assert_eq!(host(&[&open_mpi, &step, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "4")]]), "127.0.0.1");
    }

    #[cfg(unix)]
    #[test]
    fn a_secret_that_is_no_text_is_not_taken_for_none() {
        use std::os::unix::ffi::OsStrExt;
        assert!(check_secret(None).is_ok() && check_secret(Some(OsStr::new("0123456789abcdef"))).is_ok());
        let error = check_secret(Some(OsStr::from_bytes(&[0xff; 32]))).unwrap_err().to_string();
        assert!(error.contains("TRAINYARD_JOB_SECRET: is no text") && error.contains("-hex 32"), "{error}");
    }

    #[test]
    fn a_job_id_is_not_taken_for_a_secret() {
        let world = [("RANK", "0"), ("WORLD_SIZE", "2")];
        let source = |more: Variables| {
            detect(&[&world[..], more].concat()).map(|found| found.secret.source().clone()).map_err(|e| e.to_string())
        };
        assert_eq!(source(&[]), Ok(SecretSource::Nothing));
        let run = source(&[("TORCHELASTIC_RUN_ID", "7")]).unwrap();
        assert_eq!(run, SecretSource::JobName("torchrun's run 7".into()));
        assert!(run.to_string().contains("is no secret"));
        let secret = ("TRAINYARD_JOB_SECRET", "0123456789abcdef");
        assert_eq!(source(&[("TORCHELASTIC_RUN_ID", "7"), secret]), Ok(SecretSource::Variable));
        let short = source(&[("TRAINYARD_JOB_SECRET", "sesame")]).unwrap_err();
        assert!(short.contains("TRAINYARD_JOB_SECRET: has fewer than 16 characters"), "{short}");
        let step =
            [("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_STEP_ID", "1"), ("SLURM_JOB_ID", "5")];
        let found = detect(&step).unwrap().secret;
        assert_eq!(*found.source(), SecretSource::JobName("Slurm's job 5, step 1".into()));
    }

    #[test]
    fn the_address_to_listen_at_is_an_address() {
        assert_eq!(listen(Some("10.0.0.7".into())).unwrap(), Some(IpAddr::from([10, 0, 0, 7])));
        assert_eq!(listen(Some(" ".into())).unwrap(), None);
        let error = listen(Some("eth0".into())).unwrap_err().to_string();
        assert!(error.contains("TRAINYARD_LISTEN_ADDRESS: `eth0` is no address"), "{error}");
    }

    #[test]
    fn patience_is_a_number_of_seconds() {
        assert_eq!(patience(Some("2.5".into())).unwrap(), Duration::from_millis(2500));
        for bad in ["soon", "0", "-1", "NaN", "1e9"] {
            assert!(patience(Some(bad.into())).unwrap_err().to_string().contains(bad));
        }
    }

    #[test]
    fn processes_that_know_no_meeting_place_are_an_error() {
        let torchrun = detect(&[("RANK", "1"), ("WORLD_SIZE", "4")]).unwrap();
        let error = torchrun.connect(RENDEZVOUS_DEFAULT, |_| {}).err().unwrap().to_string();
        assert!(error.contains("process 1 of 4") && error.contains("set MASTER_ADDR"), "{error}");
        assert!(detect(&[]).unwrap().connect(RENDEZVOUS_DEFAULT, |_| {}).unwrap().is_none());
    }

    #[test]
    fn several_processes_of_mpirun_need_mpi_or_a_meeting_place() {
        let found = detect(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")]).unwrap();
        let error = found.join_tcp(RENDEZVOUS_DEFAULT, |_| {}).err().unwrap().to_string();
        assert!(error.contains("--features mpi") && error.contains("set MASTER_ADDR"), "{error}");
    }
}
