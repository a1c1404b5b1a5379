//! `trainyard launch`: starts the ranks of a run as processes of this host, connected over TCP,
//! like torchrun.
//!
//! It sets the same variables as torchrun, so that a rank cannot tell the two apart, and supervises
//! its ranks ([`ranks`]). On several hosts it is started once on each. For restarts, the supervisor
//! ([`super::supervise`]) starts this command again, without `--max-restarts`.

mod elastic;
mod elsewhere;
mod ranks;

use super::supervise::{self, RunFile, Supervised};
use anyhow::{Context, Result, bail};
use elsewhere::Hosts;
use ranks::{Ranks, Signals};
use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;
use trainyard_comm::tcp::{JobSecret, LISTEN_VARIABLE, SECRET_VARIABLE, SecretSource};
use trainyard_comm::{Environment, Launcher};

/// torchrun's own default port.
const PORT_DEFAULT: u16 = 29_400;
/// Ports that are tried for a run of this host: above those of services, below the ephemeral ports
/// of operating systems.
const PORTS: std::ops::Range<u32> = 20_000..32_000;
/// Distance between the first ports that processes with neighbouring ids try.
const PORT_STRIDE: u32 = 37;
const MAX_RESTARTS: &str = "--max-restarts";

/// Start the ranks of a run on this host, one process each, over TCP.
#[derive(clap::Args)]
pub struct Args {
    /// Number of ranks to start on this host.
    #[arg(long, alias = "nproc_per_node", value_name = "N", default_value_t = 1, value_parser = elsewhere::ranks_here)]
    nproc_per_node: u32,
    /// Number of hosts of the run; this command is started once on each. Unset: from Slurm, else 1.
    /// MIN:MAX: hosts come and go while the run lasts, and it goes on with those that are there.
    #[arg(long, value_name = "N|MIN:MAX")]
    nnodes: Option<Hosts>,
    /// Run on this host alone, even under Slurm: `--nnodes 1`, at a free port.
    #[arg(long)]
    standalone: bool,
    /// Number of this host, from 0. Unset: from Slurm. With --nnodes MIN:MAX: 0 on the host that
    /// keeps the roster, another number on all others.
    #[arg(long, alias = "node_rank", value_name = "R")]
    node_rank: Option<u32>,
    /// Name or address of host 0, as all hosts know it. Unset: from Slurm; on one host, 127.0.0.1.
    #[arg(long, alias = "master_addr", value_name = "HOST")]
    master_addr: Option<String>,
    /// Free port of host 0 at which the ranks connect. Unset: on one host a free one, on several
    /// derived from Slurm's job, else 29400.
    #[arg(long, alias = "master_port", value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// When a rank fails, restart all ranks from the newest checkpoint, up to N times. Give the
    /// same N on every host.
    #[arg(long, alias = "max_restarts", value_name = "N", default_value_t = 0)]
    max_restarts: u32,
    #[command(flatten)]
    elsewhere: elsewhere::Args,
    /// The command of every rank: `train`, `calibrate` or `bench collectives`, with its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// The ranks to start here, and the address at which all ranks connect.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Layout {
    nodes: u32,
    node: u32,
    ranks_here: u32,
    host: String,
    /// The port; None: a free one of this host.
    port: Option<u16>,
}

impl Layout {
    fn world(&self) -> u32 {
        self.nodes * self.ranks_here
    }

    fn first(&self) -> u32 {
        self.node * self.ranks_here
    }
}

/// Runs the command. `check_usage` receives the arguments of a rank, with this program's name
/// first. It ends the process if they are wrong, so that the error is printed once, not by every
/// rank.
pub fn run(args: &Args, check_usage: impl FnOnce(&[OsString])) -> Result<ExitCode> {
    let is_training = check(&args.command)?;
    check_usage(&[&["trainyard".into()], &args.command[..]].concat());
    let environment = Environment::detect()?;
    let program = std::env::current_exe().context("this program's path")?;
    if let Some(Hosts::Between(min, max)) = args.nnodes {
        if !is_training {
            bail!("--nnodes {min}:{max} is for training: nothing else has checkpoints to go on from with other hosts");
        }
        return elastic::run(args, (min, max), environment, &program);
    }
    let layout = layout(args, &environment, |name| std::env::var(name).ok())?;
    if args.max_restarts > 0 {
        if !is_training {
            bail!("{MAX_RESTARTS} is for training: nothing else has checkpoints to go on from");
        }
        return restarting(args, &layout, &program);
    }
    let port = match layout.port {
        Some(port) => port,
        None => {
            let ip = listen_address(std::env::var(LISTEN_VARIABLE).ok());
            free_port(ip).with_context(|| format!("no port of {ip} is free"))?
        }
    };
    let signals = Signals::new()?;
    let identity = identity(layout.nodes == 1, &environment, |name| std::env::var(name).ok())?;
    let place = Place { node: layout.node, first: layout.first(), world: layout.world(), here: layout.ranks_here };
    let variables = |rank: u32| place.variables(rank, &layout.host, port, identity.clone());
    let start = ranks::Start {
        program: &program,
        arguments: &args.command,
        numbers: place.numbers(),
        variables: &variables,
        without: None,
    };
    Ranks::start(start)?.wait(signals)
}

/// The place of a host's ranks in the world.
struct Place {
    node: u32,
    first: u32,
    world: u32,
    here: u32,
}

impl Place {
    fn numbers(&self) -> Range<u32> {
        self.first..self.first + self.here
    }

    /// The environment variables of a rank: those of torchrun.
    fn variables(
        &self,
        rank: u32,
        host: &str,
        port: u16,
        identity: Option<(&'static str, String)>,
    ) -> Vec<(&'static str, String)> {
        let numbers = [
            ("RANK", rank),
            ("LOCAL_RANK", rank - self.first),
            ("WORLD_SIZE", self.world),
            ("LOCAL_WORLD_SIZE", self.here),
            ("GROUP_RANK", self.node),
            ("MASTER_PORT", port.into()),
        ];
        let numbers = numbers.map(|(name, value)| (name, value.to_string())).into_iter();
        numbers.chain([("MASTER_ADDR", host.to_owned())]).chain(identity).collect()
    }
}

/// The environment variable by which the ranks recognise each other, unless they inherit a secret.
/// It is a new secret if all ranks are on this host, else Slurm's name of the job.
fn identity(
    is_one_host: bool,
    environment: &Environment,
    get: impl Fn(&str) -> Option<String>,
) -> Result<Option<(&'static str, String)>> {
    if let Some(secret) = get(SECRET_VARIABLE) {
        JobSecret::of_variable(&secret).map_err(|why| anyhow::anyhow!("{SECRET_VARIABLE}: {why}"))?;
        return Ok(None);
    }
    if is_one_host {
        return Ok(Some((SECRET_VARIABLE, JobSecret::random().context("a secret for the ranks")?)));
    }
    Ok(match environment.secret.source() {
        SecretSource::JobName(name) => Some(("TORCHELASTIC_RUN_ID", name.clone())),
        SecretSource::Variable | SecretSource::Nothing => None,
    })
}

/// Refuses a command that ranks cannot run. Returns true if it trains.
fn check(command: &[OsString]) -> Result<bool> {
    let words: Vec<&OsStr> = command.iter().map(OsString::as_os_str).collect();
    let is_training = words[0] == "train" || words[0] == "distill";
    let is_bench = words.len() > 1 && words[0] == "bench" && words[1] == "collectives";
    if words[0].as_encoded_bytes().starts_with(b"-") {
        bail!(
            "`{}` is no option of launch: `trainyard launch --help` lists them; those of the command stand behind it, e.g. `trainyard launch --nproc-per-node 8 train c.toml --set training.steps=100`",
            words[0].display()
        );
    }
    if !is_training && !is_bench && words[0] != "calibrate" {
        bail!(
            "`{}` is nothing that ranks do together: launch `train`, `distill`, `calibrate` or `bench collectives`, e.g. `trainyard launch --nproc-per-node 8 train c.toml`",
            words[0].display()
        );
    }
    let misplaced = |word: &&OsStr| word.to_string_lossy().split('=').next() == Some(MAX_RESTARTS);
    if words.iter().any(misplaced) {
        bail!("a rank cannot be restarted alone: write {MAX_RESTARTS} before `train`, as an option of `launch`");
    }
    Ok(is_training)
}

/// The layout from the options and Slurm's variables.
fn layout(args: &Args, environment: &Environment, get: impl Fn(&str) -> Option<String>) -> Result<Layout> {
    let slurm = slurm(environment, &get)?;
    let fixed = args.nnodes.and_then(|hosts| match hosts {
        Hosts::Fixed(count) => Some(count),
        Hosts::Between(..) => None,
    });
    if let (true, Some(nodes @ 2..)) = (args.standalone, fixed) {
        bail!("--standalone is a run of this host alone, and --nnodes {nodes} one of several: leave one of them out");
    }
    let slurm = slurm.filter(|_| !args.standalone);
    let nodes = fixed.or(slurm.map(|(nodes, _)| nodes)).unwrap_or(1);
    let node = args.node_rank.or(slurm.map(|(_, node)| node));
    let ranks_here = args.nproc_per_node;
    if nodes == 1 {
        if node.is_some_and(|node| node > 0) {
            bail!("--node-rank {} of --nnodes 1: hosts are numbered from 0", node.unwrap_or(0));
        }
        let host = args.master_addr.clone().unwrap_or_else(|| "127.0.0.1".to_owned());
        return Ok(Layout { nodes, node: 0, ranks_here, host, port: args.master_port });
    }
    let Some(node) = node else { bail!("--nnodes {nodes} needs --node-rank, from 0 to {}, on each host", nodes - 1) };
    if node >= nodes {
        bail!("--node-rank {node} of --nnodes {nodes}: hosts are numbered from 0 to {}", nodes - 1);
    }
    let known = environment.master.as_ref().filter(|_| slurm.is_some());
    let Some(host) = args.master_addr.clone().or(known.map(|master| master.host.clone())) else {
        bail!("--nnodes {nodes} needs --master-addr, the name or address of host 0 as all hosts know it");
    };
    let port = args.master_port.or(known.map(|master| master.port)).unwrap_or(PORT_DEFAULT);
    Ok(Layout { nodes, node, ranks_here, host, port: Some(port) })
}

/// The number of hosts and this host's number, from Slurm's step, if it started one process on
/// each. An error if this process already is a rank.
fn slurm(environment: &Environment, get: &impl Fn(&str) -> Option<String>) -> Result<Option<(u32, u32)>> {
    let number = |name: &str| get(name).and_then(|text| text.trim().parse::<u32>().ok());
    let Environment { launcher, rank, world, derivation, .. } = environment;
    let is_step = get("SLURM_STEP_ID").is_some() && matches!(launcher, Launcher::Slurm | Launcher::Pmi);
    let hosts = number("SLURM_STEP_NUM_NODES").filter(|_| is_step);
    match hosts {
        Some(hosts) if hosts == *world => Ok(Some((hosts, number("SLURM_NODEID").unwrap_or(*rank)))),
        _ if *world <= 1 => Ok(None),
        Some(hosts) => bail!(
            "srun started {world} tasks on {hosts} hosts ({derivation}): start `trainyard launch` once on each (srun --ntasks-per-node=1), or `srun trainyard train` with a \
             task for each rank"
        ),
        None => bail!(
            "this process is rank {rank} of {world} already ({derivation}), started by {launcher}: run `trainyard train` here, or `trainyard launch` without {launcher}"
        ),
    }
}

/// Runs this command under the supervisor.
fn restarting(args: &Args, layout: &Layout, program: &Path) -> Result<ExitCode> {
    let mut command: Vec<OsString> = vec![program.into(), "launch".into()];
    let mut option = |name: &str, value: String| command.extend([name.into(), value.into()]);
    option("--nproc-per-node", layout.ranks_here.to_string());
    option("--nnodes", layout.nodes.to_string());
    option("--node-rank", layout.node.to_string());
    option("--master-addr", layout.host.clone());
    // On one host each attempt finds a port of its own.
    layout.port.iter().for_each(|port| option("--master-port", port.to_string()));
    command.extend(args.command.iter().cloned());
    let run = match (layout.nodes, layout.port) {
        (1, _) | (_, None) => RunFile::own(),
        (_, Some(port)) => RunFile::shared(&format!("{}-{port}", layout.host), layout.node == 0),
    };
    supervise::supervise(Supervised { command: &command, max_restarts: args.max_restarts, run, is_honest: true })
}

/// The address at which rank 0 listens when all ranks are on this host. Rank 0 reports a `value` of
/// [`LISTEN_VARIABLE`] that is no address of this host.
fn listen_address(value: Option<String>) -> IpAddr {
    let ip = value.and_then(|value| value.trim().parse().ok());
    ip.filter(|ip| TcpListener::bind((*ip, 0)).is_ok()).unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// A port of `ip` at which nobody listens. Another program may still take it before rank 0 does,
/// which then reports an error.
fn free_port(ip: IpAddr) -> Option<u16> {
    let count = PORTS.end - PORTS.start;
    let begin = std::process::id().wrapping_mul(PORT_STRIDE);
    let ports = (0..count).map(|step| (PORTS.start + begin.wrapping_add(step) % count) as u16);
    let mut free = ports.filter(|port| TcpListener::bind((ip, *port)).is_ok());
    free.next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    type Variables<'a> = &'a [(&'a str, &'a str)];

    fn laid_out(options: &str, variables: Variables) -> Result<Layout> {
        let get = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let line = format!("launch {options} train c.toml --set a.b=1");
        let args = Line::try_parse_from(line.split_whitespace())?.args;
        assert_eq!(args.command, ["train", "c.toml", "--set", "a.b=1"]);
        layout(&args, &Environment::from_variables(get)?, get)
    }

    const STEP: [(&str, &str); 7] = [
        ("SLURM_PROCID", "1"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_JOB_ID", "5"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_STEP_NUM_NODES", "2"),
        ("SLURM_STEP_NODELIST", "node[3-4]"),
    ];

    #[test]
    fn options_and_slurm_make_a_layout() {
        let layout =
            |nodes, node, ranks_here, host: &str, port| Layout { nodes, node, ranks_here, host: host.into(), port };
        let cases: [(&str, Variables, Layout); 7] = [
            ("--standalone --nnodes=1 --nproc_per_node=2", &[], layout(1, 0, 2, "127.0.0.1", None)),
            ("--standalone --nproc-per-node 8", &STEP, layout(1, 0, 8, "127.0.0.1", None)),
            ("--nproc-per-node 4", &[], layout(1, 0, 4, "127.0.0.1", None)),
            ("--nproc_per_node=2 --master_port 77", &[], layout(1, 0, 2, "127.0.0.1", Some(77))),
            (
                "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr node3",
                &[],
                layout(2, 1, 8, "node3", Some(29_400)),
            ),
            ("--nproc-per-node 8", &STEP, layout(2, 1, 8, "node3", Some(10_005))),
            ("--nproc-per-node 8", &[("RANK", "0"), ("WORLD_SIZE", "1")], layout(1, 0, 8, "127.0.0.1", None)),
        ];
        for (options, variables, expected) in cases {
            assert_eq!(laid_out(options, variables).unwrap(), expected, "{options}");
        }
    }

    #[test]
    fn ranks_of_one_host_get_a_secret_of_their_own() {
        let of = |nodes, variables: Variables| {
            let get = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            identity(nodes == 1, &Environment::from_variables(get).unwrap(), get)
        };
        let (name, secret) = of(1, &[]).unwrap().unwrap();
        assert!(name == SECRET_VARIABLE && secret.len() == 64 && JobSecret::of_variable(&secret).is_ok());
        assert_ne!(of(1, &[]).unwrap().unwrap().1, secret);
        // Several hosts cannot create the same secret.
        assert_eq!(of(2, &[]).unwrap(), None);
        assert_eq!(of(2, &STEP).unwrap(), Some(("TORCHELASTIC_RUN_ID", "Slurm's job 5, step 0".to_owned())));
        assert_eq!(of(1, &[(SECRET_VARIABLE, "0123456789abcdef")]).unwrap(), None, "ranks inherit it");
        let error = of(1, &[(SECRET_VARIABLE, "short")]).unwrap_err().to_string();
        assert!(error.contains("TRAINYARD_JOB_SECRET: has fewer than 16 characters"), "{error}");
    }

    #[test]
    fn what_cannot_be_started_says_why() {
        let two_each: Vec<(&str, &str)> = STEP
            .iter()
            .map(|&(name, value)| (name, if name == "SLURM_STEP_NUM_TASKS" { "4" } else { value }))
            .collect();
        let cases: [(&str, Variables, &str); 8] = [
            ("--standalone --nnodes 2", &[], "--standalone is a run of this host alone"),
            ("--nnodes 2", &[], "--nnodes 2 needs --node-rank, from 0 to 1"),
            ("--nnodes 2 --node-rank 2", &[], "numbered from 0 to 1"),
            ("--nnodes 2 --node-rank 0", &[], "needs --master-addr"),
            ("--node-rank 1", &[], "--node-rank 1 of --nnodes 1"),
            (
                "",
                &[("RANK", "1"), ("WORLD_SIZE", "4")],
                "rank 1 of 4 already (RANK=1, WORLD_SIZE=4), started by torchrun",
            ),
            ("", &[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")], "rank 1 of 4 already"),
            ("", &two_each, "srun started 4 tasks on 2 hosts"),
        ];
        for (options, variables, why) in cases {
            let error = laid_out(options, variables).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn only_what_ranks_do_together_is_started() {
        let check = |words: &[&str]| check(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert!(check(&["train", "c.toml"]).unwrap());
        assert!(!check(&["bench", "collectives"]).unwrap() && !check(&["calibrate", "--quick"]).unwrap());
        for bad in [
            &["plan"][..],
            &["--tee", "3", "train"],
            &["bench", "kernels"],
            &["train", "--max-restarts", "2"],
            &["train", "--max-restarts=2"],
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_free_port_can_be_listened_at() {
        let port = free_port(listen_address(None)).unwrap();
        assert!(PORTS.contains(&port.into()) && TcpListener::bind(("127.0.0.1", port)).is_ok());
    }

    #[test]
    fn the_free_port_is_one_of_the_address_to_listen_at() {
        let at = |value: &str| listen_address(Some(value.to_owned())).to_string();
        assert_eq!(at(" 0.0.0.0 "), "0.0.0.0");
        // Rank 0 says what is wrong with these.
        assert_eq!((at("eth0").as_str(), at("203.0.113.1").as_str()), ("127.0.0.1", "127.0.0.1"));
    }
}
