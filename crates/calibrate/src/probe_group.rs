//! The ranks that measure together: threads of this process, or processes started by a launcher,
//! each of them one rank.
//!
//! Processes do everything at the same time, as the ranks of a run do. They meet before each step,
//! and rank 0 decides when a loop ends.

use crate::CalibrateError;
use crate::probes::Layout;
use crate::ranks::{Ranks, resolve};
use trainyard_comm::Communicator;
use trainyard_engine::config::{Inputs, Resolved};
use trainyard_engine::{Result, world};
use trainyard_sim::MachineProfile;
use trainyard_sim::machine::{Machine, Processes};

/// A group of ranks that measure together.
pub struct ProbeGroup {
    world: Option<Communicator>,
    machine: Machine,
    /// Number of threads of this process's kernels.
    threads: u32,
}

impl ProbeGroup {
    /// The group of this process alone.
    pub fn alone() -> ProbeGroup {
        let machine = Machine::here();
        ProbeGroup { world: None, threads: Inputs::of_this_machine().cores as u32, machine }
    }

    /// The group of the processes of `world`.
    ///
    /// # Errors
    ///
    /// Processes that do not lie on hosts in order and in equal numbers.
    pub fn of(world: Communicator) -> Result<ProbeGroup, CalibrateError> {
        let inputs = world::inputs(&world);
        let machine = machine(&world)?;
        // As runs sum unless they are told otherwise.
        world.sum_by_nodes()?;
        let threads = (inputs.cores / inputs.sharing.max(1)).max(1) as u32;
        Ok(ProbeGroup { world: Some(world), machine, threads })
    }

    /// The machine of the group.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// True if this process keeps the results.
    pub fn is_first(&self) -> bool {
        self.world.as_ref().is_none_or(|world| world.rank() == 0)
    }

    pub(crate) fn world(&self) -> Option<&Communicator> {
        self.world.as_ref()
    }

    /// Number of threads that this process may keep busy.
    pub(crate) fn threads(&self) -> u32 {
        self.threads
    }

    /// The layouts of ranks on a host's cores: one for processes, several for threads.
    pub(crate) fn layouts(&self) -> Vec<Layout> {
        match &self.machine.processes {
            Some(processes) => vec![Layout { ranks: processes.on_a_host(), threads: self.threads }],
            None => Layout::of(self.machine.cores),
        }
    }

    /// The number of a layout's ranks that are in this process.
    pub(crate) fn own(&self, layout: Layout) -> u32 {
        if self.world.is_some() { 1 } else { layout.ranks }
    }

    /// Returns once all processes have called it.
    pub(crate) fn meet(&self) -> Result<(), CalibrateError> {
        Ok(self.world.as_ref().map_or(Ok(()), Communicator::barrier)?)
    }

    /// Rank 0's value of `own`, on every process.
    pub(crate) fn agree(&self, own: bool) -> Result<bool, CalibrateError> {
        let mut word = [u32::from(own)];
        self.world.as_ref().map_or(Ok(()), |world| world.broadcast(&mut word, 0))?;
        Ok(word[0] == 1)
    }

    /// The largest `own` of all processes.
    pub(crate) fn most(&self, own: f64) -> Result<f64, CalibrateError> {
        let Some(world) = &self.world else { return Ok(own) };
        let mut all = vec![0.0; world.size()];
        world.all_gather(&[own], &mut all)?;
        Ok(all.into_iter().fold(own, f64::max))
    }

    /// Resolves the configuration with the keys `sets` on random tokens. Each process is one of its
    /// ranks.
    pub(crate) fn resolve(&self, sets: &[String]) -> Result<Resolved> {
        resolve(sets, self.world.as_ref().map_or_else(Inputs::of_this_machine, world::inputs))
    }

    /// The ranks of a run of `resolved` that are in this process.
    pub(crate) fn ranks(&self, resolved: &Resolved) -> Result<Ranks> {
        match &self.world {
            Some(world) => Ranks::one_of(resolved, world.duplicate("probe")?),
            None => Ranks::together(resolved),
        }
    }
}

/// The machine of the processes of `world`.
///
/// # Errors
///
/// Processes that do not lie on hosts in order and in equal numbers.
pub fn machine(world: &Communicator) -> Result<Machine, CalibrateError> {
    let hosts: Vec<String> = (0..world.size()).map(|rank| world.place(rank).host).collect();
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let processes = processes(world.backend(), &hosts)?;
    Ok(Machine { cores: world::cores_here(world) as u32, processes: Some(processes), ..Machine::here() })
}

/// The inputs of a configuration whose ranks run where `profile` was measured: on this machine, or
/// on as many processes as the profile has.
pub fn inputs(profile: &MachineProfile) -> Inputs {
    let here = Inputs::of_this_machine();
    let Some(processes) = &profile.machine.processes else { return here };
    let all = Some(processes.count as usize);
    if profile.machine.gpu.is_some() {
        return Inputs { processes: all, ..here };
    }
    Inputs {
        cores: profile.kernels.first().map_or(1, |curve| curve.threads as usize),
        cores_because: "threads that each process was measured with".to_owned(),
        processes: all,
        ..here
    }
}

/// Describes processes that communicate over `backend`; `hosts` has the host of each rank.
fn processes(backend: &str, hosts: &[&str]) -> Result<Processes, CalibrateError> {
    let here = hosts.iter().take_while(|host| **host == hosts[0]).count();
    let in_order = hosts.chunks(here).all(|chunk| chunk.len() == here && chunk.iter().all(|host| *host == chunk[0]));
    let mut different: Vec<&str> = hosts.chunks(here).map(|chunk| chunk[0]).collect();
    different.sort_unstable();
    different.dedup();
    let count = hosts.len();
    if !in_order || different.len() * here != count {
        return Err(CalibrateError::Hosts { hosts: hosts.join(", ") });
    }
    Ok(Processes { backend: backend.to_owned(), count: count as u32, hosts: different.len() as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_dealt_to_hosts_in_order_and_equally_or_refused() {
        let of = |hosts: &[&str]| processes("tcp", hosts).map(|p| (p.count, p.hosts));
        assert_eq!(of(&["a"]).unwrap(), (1, 1));
        assert_eq!(of(&["a", "a"]).unwrap(), (2, 1));
        assert_eq!(of(&["b", "b", "a", "a"]).unwrap(), (4, 2));
        for hosts in [&["a", "b", "a", "b"][..], &["a", "a", "b"], &["a", "b", "b"]] {
            let error = of(hosts).unwrap_err().to_string();
            assert!(error.contains(&hosts.join(", ")), "{error}");
        }
    }

    #[test]
    fn who_is_alone_measures_every_layout_and_agrees_with_itself() {
        let group = ProbeGroup::alone();
        assert_eq!(group.layouts(), Layout::of(Machine::here().cores));
        let layout = *group.layouts().last().unwrap();
        assert_eq!(group.own(layout), layout.ranks);
        assert!(group.is_first() && group.agree(true).unwrap() && !group.agree(false).unwrap());
        assert_eq!(group.most(1.5).unwrap(), 1.5);
        group.meet().unwrap();
    }
}
