//! The program under Open MPI's `mpirun`, in a test's folder.

#![allow(dead_code, reason = "every test binary uses a part of it")]

use crate::common::{Folder, Ran};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How the program is to be started.
pub struct Mpirun<'a> {
    folder: &'a Folder,
    ranks: usize,
    faults: String,
}

impl<'a> Mpirun<'a> {
    /// As so many processes.
    pub fn new(folder: &'a Folder, ranks: usize) -> Mpirun<'a> {
        Mpirun { folder, ranks, faults: String::new() }
    }

    /// With faults in its environment.
    pub fn faults(self, faults: &str) -> Mpirun<'a> {
        Mpirun { faults: faults.to_owned(), ..self }
    }

    /// The launcher and its flags, up to the program. Its output's lines begin with
    /// `[1,RANK]<stderr>:`. What several launchers of a host keep in one folder they make and
    /// remove without regard to each other, so each has a folder of its own in `folder`.
    pub fn launcher(folder: &Folder, ranks: usize) -> Vec<String> {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let own = folder.join(&format!("mpirun-{}", STARTED.fetch_add(1, Ordering::Relaxed)));
        std::fs::create_dir(&own).expect("a folder for the launcher");
        let flags = "mpirun --allow-run-as-root --oversubscribe --bind-to none --tag-output";
        // The launcher is not to end the others before they have said whom they miss. It then ends
        // with 0 whatever they end with.
        let flags = format!("{flags} --mca orte_enable_recovery 1 --timeout 150 -np {ranks} --mca orte_tmpdir_base");
        flags.split(' ').map(str::to_owned).chain([own.display().to_string()]).collect()
    }

    /// The command of `trainyard ARGUMENTS`.
    pub fn command(&self, arguments: &[String]) -> Command {
        let launcher = Mpirun::launcher(self.folder, self.ranks);
        let mut command = Command::new(&launcher[0]);
        command.args(&launcher[1..]).arg(env!("CARGO_BIN_EXE_trainyard")).args(arguments);
        self.folder.prepare(&mut command);
        command.env("TRAINYARD_FAULTS", &self.faults);
        command
    }

    /// Runs it to its end.
    pub fn run(&self, arguments: &[String]) -> Ran {
        Ran::new(self.command(arguments).output().expect("mpirun can be started"))
    }
}
