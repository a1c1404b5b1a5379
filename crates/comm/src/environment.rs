//! Who started this process, and as which rank of how many: the variables of Open MPI, of PMI (MPICH, Intel MPI, Cray), of torchrun and of Slurm.
//!
//! Read in that order, because an MPI launcher also decides how messages travel. Nothing is guessed: a rank without a world, or a number that is none, is an error that names the variable.

use crate::communicator::Communicator;
use std::fmt;

/// What started this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Launcher {
    /// Nobody who says so: one process, whose ranks are threads.
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
    /// What started it.
    pub launcher: Launcher,
    /// Rank of the process in the world.
    pub rank: u32,
    /// Processes of the world.
    pub world: u32,
    /// Rank of the process on its host, where that is known.
    pub local_rank: Option<u32>,
    /// Processes on this host, where that is known.
    pub local_world: Option<u32>,
    /// Host and port of rank 0 (torchrun).
    pub master: Option<(String, u16)>,
    /// How often this world was restarted (torchrun).
    pub restarts: u32,
    /// The variables that said so, for printing.
    pub derivation: String,
}

/// Variables that make no sense, or a launch that this build cannot serve.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable is missing beside another one, or is no number.
    #[error("environment variable {name}: {what}")]
    Variable {
        /// The variable.
        name: String,
        /// What is wrong with it.
        what: String,
    },
    /// Several processes without a way to talk.
    #[error(
        "this is process {rank} of {world} started by {launcher} ({derivation}), but this build of trainyard has no MPI: build it with \
         `cargo build --release --features mpi`, or start one process and let its ranks be threads (parallel.ranks)"
    )]
    NoMpi {
        /// Rank of the process.
        rank: u32,
        /// Processes.
        world: u32,
        /// Who started them.
        launcher: Launcher,
        /// The variables that said so.
        derivation: String,
    },
    /// MPI's world is another than the launcher's.
    #[error(
        "{launcher} started {world} processes ({derivation}), but MPI sees {mpi}: start them with the mpirun (or srun --mpi) of the MPI that trainyard was built with"
    )]
    OtherWorld {
        /// Who started them.
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
        /// What it said.
        what: String,
    },
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
    // `sbatch` sets SLURM_PROCID and SLURM_NTASKS for its script too, which is one process; only a step of `srun` has its own number of tasks.
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
        let port = |port: u32| {
            u16::try_from(port).map_err(|_| EnvironmentError::Variable {
                name: "MASTER_PORT".to_owned(),
                what: format!("{port} is no port"),
            })
        };
        let master = match (torchrun, get("MASTER_ADDR"), number("MASTER_PORT")?) {
            // torchrun's own default port.
            (true, Some(host), None) => Some((host, 29_400)),
            (true, Some(host), Some(number)) => Some((host, port(number)?)),
            _ => None,
        };
        Ok(Self {
            launcher: names.launcher,
            rank,
            world,
            local_rank: number(names.local_rank)?,
            local_world: number(names.local_world)?,
            master,
            restarts: if torchrun { number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0) } else { 0 },
            derivation: format!("{}={rank}, {}={world}", names.rank, names.world),
        })
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
            restarts: 0,
            derivation: "no launcher's variables are set".to_owned(),
        }
    }

    /// The world of the processes that were started together, or `None` for a process alone, whose ranks are to be threads
    /// ([`crate::local::World`]).
    ///
    /// # Errors
    /// When there are several processes and this build or MPI cannot join them: they never run as so many worlds of one.
    pub fn connect(&self) -> Result<Option<Communicator>, EnvironmentError> {
        if self.world <= 1 {
            return Ok(None);
        }
        self.join().map(Some)
    }

    #[cfg(not(feature = "mpi"))]
    fn join(&self) -> Result<Communicator, EnvironmentError> {
        Err(EnvironmentError::NoMpi {
            rank: self.rank,
            world: self.world,
            launcher: self.launcher,
            derivation: self.derivation.clone(),
        })
    }

    #[cfg(feature = "mpi")]
    fn join(&self) -> Result<Communicator, EnvironmentError> {
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
        assert_eq!(found.master, Some(("node0".to_owned(), 1234)));
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

    #[cfg(not(feature = "mpi"))]
    #[test]
    fn several_processes_without_mpi_are_an_error() {
        let found = detect(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")]).unwrap();
        let error = found.connect().err().unwrap().to_string();
        assert!(error.contains("process 1 of 4") && error.contains("--features mpi"), "{error}");
        assert!(detect(&[]).unwrap().connect().unwrap().is_none());
    }
}
