//! Starts the program under Open MPI's `mpirun`, in a test's folder.

#![allow(dead_code, reason = "every test binary uses a part of it")]

use crate::common::{Folder, Ran};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A start of the program under `mpirun`.
pub struct Mpirun<'a> {
    folder: &'a Folder,
    ranks: usize,
    faults: String,
}

impl<'a> Mpirun<'a> {
    /// Starts `ranks` processes.
    pub fn new(folder: &'a Folder, ranks: usize) -> Mpirun<'a> {
        Mpirun { folder, ranks, faults: String::new() }
    }

    /// Sets faults in the environment.
    pub fn faults(self, faults: &str) -> Mpirun<'a> {
        Mpirun { faults: faults.to_owned(), ..self }
    }

    /// The launcher and its flags, up to the program. Lines of its output begin with
    /// `[1,RANK]<stderr>:`. Launchers on one host that share a session folder remove each other's
    /// files, so each gets a folder of its own in `folder`.
    pub fn launcher(folder: &Folder, ranks: usize) -> Vec<String> {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let own = folder.join(&format!("mpirun-{}", STARTED.fetch_add(1, Ordering::Relaxed)));
        std::fs::create_dir(&own).expect("a folder for the launcher");
        let flags = "mpirun --allow-run-as-root --oversubscribe --bind-to none --tag-output";
        // With recovery the launcher does not end the other ranks before they have named the
        // missing one. It then always ends with 0. The limit is for what hangs: measuring takes two
        // minutes on slow processors.
        let flags = format!("{flags} --mca orte_enable_recovery 1 --timeout 400 -np {ranks} --mca orte_tmpdir_base");
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

    /// Runs the command to its end.
    pub fn run(&self, arguments: &[String]) -> Ran {
        Ran::new(self.command(arguments).output().expect("mpirun can be started"))
    }
}
