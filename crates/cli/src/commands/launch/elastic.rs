//! `launch --nnodes MIN:MAX`: hosts come and go while a run lasts.
//!
//! The first host keeps the roster; each host starts the ranks of a generation when the keeper says
//! so ([`trainyard_comm::tcp::elastic`]). A generation that ends because hosts come or leave stops
//! with a checkpoint, as after SIGTERM. The next one goes on from the newest checkpoint, as a
//! restart does.

use super::ranks::{self, Ranks, Signals};
use super::{Args, PORT_DEFAULT, Place, free_port, identity};
use crate::commands::supervise::{EXIT_INTERRUPTED, RunFile};
use crate::commands::train;
use crate::output::note;
use anyhow::{Context, Result, bail};
use signal_hook::consts::SIGTERM;
use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use trainyard_comm::Environment;
use trainyard_comm::tcp::elastic::{Heard, Keeper, Limits, Member, Order, Outcome, Report, Start};
use trainyard_engine::faults::VARIABLE;

/// Interval of the checks for orders, ended ranks and signals.
const LOOK: Duration = Duration::from_millis(20);

/// Runs this host's part, with `(min, max)` hosts.
pub fn run(args: &Args, (min, max): (u32, u32), environment: Environment, program: &Path) -> Result<ExitCode> {
    let get = |name: &str| std::env::var(name).ok();
    let environment = environment.with_terms(get)?;
    let slurm = super::slurm(&environment, &get)?;
    if args.standalone {
        bail!(
            "--standalone is a run of this host alone, and --nnodes {min}:{max} one of several: leave one of them out"
        );
    }
    let known = environment.master.as_ref().filter(|_| slurm.is_some());
    let Some(host) = args.master_addr.clone().or(known.map(|master| master.host.clone())) else {
        bail!("--nnodes {min}:{max} needs --master-addr, the name or address of the first host as all hosts know it");
    };
    let port = args.master_port.or(known.map(|master| master.port)).unwrap_or(PORT_DEFAULT);
    let keeper = Keeper {
        host: &host,
        port,
        listen: environment.listen,
        secret: &environment.secret,
        limits: Limits {
            hosts_min: min,
            hosts_max: max,
            restarts_max: args.max_restarts,
            patience: environment.patience,
        },
        note: |text| note(text),
    };
    let ip = environment.listen.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
    // If no port is free, rank 0 says so.
    let port_of_ranks = move || free_port(ip).unwrap_or(0);
    let node = args.node_rank.or(slurm.map(|(_, node)| node));
    let meeting = match node {
        Some(0) => Some(keeper.open(port_of_ranks)),
        Some(_) => None,
        None => keeper.open_if_named(port_of_ranks).transpose(),
    };
    let meeting = meeting.transpose().with_context(|| {
        format!(
            "cannot listen at port {port} for hosts: does another host or program have it? --master-port takes another"
        )
    })?;
    let run_file = RunFile::shared(&format!("{host}-{port}"), meeting.is_some());
    let mut here = Here {
        program,
        command: &args.command,
        ranks_here: args.nproc_per_node,
        identity: identity(false, &environment, get)?,
        host: &host,
        run_file,
        run: None,
        ranks: None,
        has_told_folder: false,
        signals: Signals::new()?,
        is_leaving: false,
    };
    if meeting.is_some() {
        note(&format!("launch: this host keeps the roster, at {host} port {port}; {min} to {max} hosts train"));
    }
    loop {
        let patience = environment.patience;
        let (ranks, run, secret) = (args.nproc_per_node, here.run.clone(), &environment.secret);
        let member = match &meeting {
            Some(meeting) => meeting.join(ranks, run, secret, patience),
            None => Member::join((&host, port), None, ranks, run, secret, patience),
        };
        let member = member.with_context(|| {
            format!("no roster is kept at {host} port {port}: is `launch --nnodes {min}:{max}` started on that host?")
        })?;
        if let Some(outcome) = here.take_part(member)? {
            if let Some(why) = &outcome.why {
                note(&format!("launch: {why}"));
            }
            // A meeting that is dropped waits until all hosts know the end.
            return Ok(ExitCode::from(outcome.code));
        }
    }
}

/// This host.
struct Here<'a> {
    program: &'a Path,
    command: &'a [OsString],
    ranks_here: u32,
    identity: Option<(&'static str, String)>,
    /// The keeper's host.
    host: &'a str,
    run_file: RunFile,
    /// The run's folder, once the keeper has told it.
    run: Option<String>,
    /// The ranks of the current generation.
    ranks: Option<Ranks>,
    /// True if the keeper knows the run's folder.
    has_told_folder: bool,
    signals: Signals,
    is_leaving: bool,
}

impl Here<'_> {
    /// Follows the keeper's orders to the end. None if the keeper is lost, and another one may
    /// come.
    fn take_part(&mut self, mut member: Member) -> Result<Option<Outcome>> {
        loop {
            match member.listen() {
                Heard::Nothing => std::thread::sleep(LOOK),
                Heard::Order(Order::Alive) => {}
                Heard::Order(Order::Run(folder)) => self.run = Some(folder),
                Heard::Order(Order::Wait(why)) => note(&format!("launch: {why}")),
                Heard::Order(Order::Start(start)) => self.start(&start)?,
                Heard::Order(Order::Stop(why)) => {
                    note(&format!("launch: {why}: the ranks stop with a checkpoint"));
                    self.ranks.iter_mut().try_for_each(|ranks| ranks.signal(SIGTERM))?;
                }
                Heard::Order(Order::Abort(why)) => {
                    note(&format!("launch: {why}: the ranks end, and go on from the newest checkpoint"));
                    self.ranks.iter_mut().try_for_each(Ranks::kill)?;
                }
                Heard::Order(Order::End(outcome)) => {
                    self.end_ranks()?;
                    return Ok(Some(outcome));
                }
                Heard::Refused(why) => {
                    self.end_ranks()?;
                    bail!("the keeper of the roster turned this host away: {why}");
                }
                Heard::Lost(why) => {
                    self.end_ranks()?;
                    if self.is_leaving {
                        return Ok(Some(Outcome { code: EXIT_INTERRUPTED, why: None }));
                    }
                    note(&format!(
                        "launch: the keeper of the roster is lost ({why}); this host waits for it to return"
                    ));
                    return Ok(None);
                }
            }
            for _ in 0..self.signals.pending().count() {
                if std::mem::replace(&mut self.is_leaving, true) {
                    self.end_ranks()?;
                    return Ok(Some(Outcome { code: EXIT_INTERRUPTED, why: None }));
                }
                // A keeper that is lost is seen by the next `listen`.
                let _ = member.report(Report::Leaving);
            }
            let Some(ranks) = &mut self.ranks else { continue };
            let folder = self.run_file.folder().filter(|_| !self.has_told_folder);
            if let Some(folder) = folder {
                self.has_told_folder = true;
                // As above.
                let _ = member.report(Report::Run(folder.display().to_string()));
            }
            if let Some(code) = ranks.poll()? {
                self.ranks = None;
                // As above.
                let _ = member.report(Report::Ended(code));
            }
        }
    }

    /// Starts the ranks of a generation.
    fn start(&mut self, start: &Start) -> Result<()> {
        let Start { generation, node, hosts, first, world, port, run } = start;
        let mut arguments = self.command.to_vec();
        if let Some(run) = run {
            arguments.extend([train::RESTART.into(), run.into()]);
        }
        if *first == 0 {
            self.run_file.begin_attempt(0)?;
            arguments.extend([train::RUN_FILE.into(), self.run_file.path().into()]);
            let how = if run.is_some() { "the run goes on" } else { "the run begins" };
            note(&format!("launch: {how} with {world} ranks on {} hosts: {}", hosts.len(), hosts.join(", ")));
        }
        self.has_told_folder = *first != 0;
        let place = Place { node: *node, first: *first, world: *world, here: self.ranks_here };
        let identity = self.identity.clone();
        let variables = |rank: u32| place.variables(rank, self.host, *port, identity.clone());
        // Injected faults are for the first generation.
        let without = (*generation > 0).then_some(VARIABLE);
        let numbers = place.numbers();
        let start =
            ranks::Start { program: self.program, arguments: &arguments, numbers, variables: &variables, without };
        self.ranks = Some(Ranks::start(start)?);
        Ok(())
    }

    /// Kills ranks that run, and waits for their ends.
    fn end_ranks(&mut self) -> Result<()> {
        if let Some(mut ranks) = self.ranks.take() {
            ranks.kill()?;
            while ranks.poll()?.is_none() {
                std::thread::sleep(LOOK);
            }
        }
        Ok(())
    }
}
