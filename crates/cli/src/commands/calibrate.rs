//! `trainyard calibrate`: measures this machine, so that runs on it can be predicted, and compares
//! predictions with runs.

use crate::output::{chain, note, print};
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trainyard_calibrate::check::{self, BARS, Pair, Row};
use trainyard_calibrate::probe_group::{self, ProbeGroup};
use trainyard_calibrate::{Thoroughness, calibrate, gpu};
use trainyard_comm::{Communicator, DEADLINE_DEFAULT, Environment};
use trainyard_engine::config::DeviceKind;
use trainyard_engine::{device, world};
use trainyard_sim::machine::Machine;
use trainyard_sim::{MachineProfile, ProfileKind, local_profile_path};
use trainyard_tensor::cuda::Cuda;

/// Measure this machine and write a hardware profile, from which runs on it are predicted.
///
/// Trains small models on all cores, shared among ranks in all layouts, and records every kernel;
/// then collectives between ranks, computing and exchanges that overlap, the disk. Takes up to two
/// minutes, during which nothing else should run. The profile goes to $TRAINYARD_PROFILE, else to
/// trainyard/machine.toml below $XDG_CACHE_HOME or ~/.cache; it is refused on another machine.
///
/// Without a launcher it measures ranks that are threads. Started by `trainyard launch`, mpirun or
/// srun it measures the processes together, on one host or several: the speed of each while the
/// others compute too, and collectives between neighbours, between hosts and among all, over MPI or
/// TCP. That profile goes to $TRAINYARD_PROCESSES_PROFILE, else to processes.toml at the same place
/// on rank 0's host. A launcher with one process counts as none.
///
/// With --device cuda one process measures all GPUs of its host, without a launcher. On several
/// hosts the launcher's processes, one a GPU, measure theirs together, and NCCL between them; that
/// profile goes to $TRAINYARD_GPU_PROCESSES_PROFILE, else to gpu-processes.toml.
#[derive(clap::Args)]
pub struct Args {
    /// The device to measure: cpu, or a GPU, cuda or cuda:1. A GPU's profile is a separate file:
    /// $TRAINYARD_GPU_PROFILE, else trainyard/gpu.toml at the same place.
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = device)]
    device: DeviceKind,
    /// Write the profile here instead.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Measure a third of the shapes, once.
    #[arg(long)]
    quick: bool,
    /// Measure no profile: train about fifty configurations for a few steps each, and compare them
    /// with the predictions of the existing profile. Takes some minutes. With two or four
    /// processes: the configurations with that many ranks.
    #[arg(long, conflicts_with_all = ["quick", "compare"])]
    check: bool,
    /// With --check: train only every N-th configuration.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "check", value_parser = clap::value_parser!(u16).range(1..))]
    every: u16,
    /// With --check: for this many of the worst configurations, show the instructions and kernels
    /// whose predictions are wrong.
    #[arg(long, value_name = "ROWS", default_value_t = 0, requires = "check")]
    explain: usize,
    /// With --check: print one JSON line.
    #[arg(long, requires = "check")]
    json: bool,
    /// Measure no profile: compare the predictions of the existing profile (at --out, if given)
    /// with those of FILE.
    #[arg(long, value_name = "FILE", conflicts_with = "quick")]
    compare: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    match Environment::detect()?.connect(DEADLINE_DEFAULT, note)? {
        Some(world) => {
            let alarm = world.duplicate("alarm")?;
            // The other ranks would wait for a rank that has failed.
            run_together(args, world).inspect_err(|error| drop(alarm.abort(chain(error))))
        }
        None => run_alone(args),
    }
}

/// Calibrates as one of several processes. Only rank 0 prints and writes the profile.
fn run_together(args: &Args, world: Communicator) -> Result<()> {
    if let DeviceKind::Cuda(ordinal) = args.device {
        return run_on_gpus(args, &world, ordinal);
    }
    if args.compare.is_some() {
        bail!("--compare runs nothing: start it without a launcher, with --out for the profile of the processes");
    }
    let path = profile_path(args, ProfileKind::Processes)?;
    let group = ProbeGroup::of(world.duplicate("measurement")?)?;
    if !args.check {
        return measure(args, &group, &path);
    }
    if check::cases_on(group.machine()).is_empty() {
        bail!("--check has configurations of two and of four ranks, and there are {} processes", world.size());
    }
    let text = if group.is_first() {
        let profile = MachineProfile::load(&path, group.machine());
        let profile = profile.context("a profile is needed first: `trainyard calibrate` under this launcher")?;
        profile.to_toml().into_bytes()
    } else {
        Vec::new()
    };
    let text = world::from_first(&world, || Ok(text))?;
    let profile = MachineProfile::parse(&String::from_utf8_lossy(&text)).map_err(anyhow::Error::msg)?;
    let rows = rows_on(args, &group, &path, &profile)?;
    if group.is_first() { show_check(args, &rows) } else { Ok(()) }
}

/// Calibrates as one of several processes, on several hosts, with a GPU each.
fn run_on_gpus(args: &Args, world: &Communicator, ordinal: Option<usize>) -> Result<()> {
    let machine = probe_group::machine(world)?;
    let processes = machine.processes.context("processes that a launcher started")?;
    if processes.hosts == 1 {
        bail!(
            "the GPUs of one host are measured by one process: start `trainyard calibrate --device cuda` without a launcher"
        );
    }
    if args.check || args.compare.is_some() {
        bail!("--check and --compare are for one GPU or for processors: leave the launcher, or --device, out");
    }
    if ordinal.is_some() {
        bail!("each process takes the GPU of its place on its host: say --device cuda");
    }
    let path = profile_path(args, ProfileKind::GpuProcesses)?;
    let is_first = world.rank() == 0;
    let cuda = Arc::new(Cuda::open(device::place(Some(world))?, 1).context("there is no GPU to measure")?);
    // All GPUs must be of the same kind, because one is measured for all.
    let kind = cuda.properties().name.clone();
    let first = world::from_first(world, || Ok(kind.clone().into_bytes()))?;
    if first != kind.as_bytes() {
        bail!("this is a {kind}, and rank 0 has a {}: GPUs of one kind are measured", String::from_utf8_lossy(&first));
    }
    if is_first {
        note(&format!("measuring {cuda:?} on {} ranks; nothing else should run meanwhile", processes.count));
    }
    let sizes = if args.quick { gpu::Sizes::quick() } else { gpu::Sizes::of_a_gpu() };
    let bar = is_first.then(bar);
    let progress = &mut |done: f64, what: &str| bar.iter().for_each(|bar| show(bar, done, what));
    let profile = gpu::calibrate_together(world, &processes, &cuda, &sizes, folder(&path), progress)?;
    bar.iter().for_each(ProgressBar::finish_and_clear);
    if is_first { keep(&profile, &path) } else { Ok(()) }
}

fn run_alone(args: &Args) -> Result<()> {
    let kind = match args.device {
        DeviceKind::Cpu => ProfileKind::Cpu,
        DeviceKind::Cuda(_) => ProfileKind::Gpu,
    };
    let path = profile_path(args, kind)?;
    if kind == ProfileKind::Gpu && args.compare.is_some() {
        bail!("--compare prices configurations of the processor: leave --device out");
    }
    if args.check {
        let rows = match args.device {
            DeviceKind::Cpu => rows_on(args, &ProbeGroup::alone(), &path, &load(&path)?)?,
            DeviceKind::Cuda(ordinal) => rows_on_gpu(ordinal.unwrap_or(0), &path)?,
        };
        return show_check(args, &rows);
    }
    if let Some(other) = &args.compare {
        return run_compare(&path, other);
    }
    match args.device {
        DeviceKind::Cpu => measure(args, &ProbeGroup::alone(), &path),
        DeviceKind::Cuda(ordinal) => measure_gpu(args, ordinal.unwrap_or(0), &path),
    }
}

fn profile_path(args: &Args, kind: ProfileKind) -> Result<PathBuf> {
    Ok(match &args.out {
        Some(path) => path.clone(),
        None => local_profile_path(kind)?,
    })
}

/// Measures the machine of `group` and writes the profile to `path`.
fn measure(args: &Args, group: &ProbeGroup, path: &Path) -> Result<()> {
    let how = if args.quick { Thoroughness::QUICK } else { Thoroughness::FULL };
    let bar = group.is_first().then(bar);
    if group.is_first() {
        note(&format!("measuring {}; nothing else should run meanwhile", group.machine()));
    }
    let progress = &mut |done: f64, what: &str| bar.iter().for_each(|bar| show(bar, done, what));
    let Some(profile) = calibrate(group, how, folder(path), progress)? else { return Ok(()) };
    bar.iter().for_each(ProgressBar::finish_and_clear);
    keep(&profile, path)
}

/// Measures GPU number `ordinal`, with the GPUs of the same kind on this host, and writes the
/// profile to `path`.
fn measure_gpu(args: &Args, ordinal: usize, path: &Path) -> Result<()> {
    let cuda = Arc::new(Cuda::open(ordinal, 1).context("there is no GPU to measure")?);
    note(&format!("measuring {cuda:?}; nothing else should run there meanwhile"));
    let sizes = if args.quick { gpu::Sizes::quick() } else { gpu::Sizes::of_a_gpu() };
    let gpus = with_its_like(cuda, ordinal);
    let bar = bar();
    let profile = gpu::calibrate(&gpus, &sizes, folder(path), &mut |done, what| show(&bar, done, what))?;
    bar.finish_and_clear();
    keep(&profile, path)
}

/// The folder of a profile, whose disk is measured for offloading.
fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn keep(profile: &MachineProfile, path: &Path) -> Result<()> {
    profile.save(path)?;
    print(format_args!("{}wrote {}\n", measured(profile), path.display()))
}

/// GPU number `ordinal`, and the GPUs of the same kind on this host, with which it exchanges.
fn with_its_like(cuda: Arc<Cuda>, ordinal: usize) -> Vec<Arc<Cuda>> {
    let kind = cuda.properties().name.clone();
    let mut gpus = vec![cuda];
    for other in (0..Cuda::count()).filter(|other| *other != ordinal) {
        match Cuda::open(other, 1) {
            Ok(found) if found.properties().name == kind => gpus.push(Arc::new(found)),
            Ok(found) => note(&format!("GPU {other} is left out: it is no {kind} but {}", found.properties().name)),
            Err(error) => note(&format!("GPU {other} is left out: {error}")),
        }
    }
    gpus
}

/// Parses `cpu`, `cuda` or `cuda:1`, as in a configuration.
fn device(text: &str) -> Result<DeviceKind, String> {
    let number = match text {
        "cpu" => return Ok(DeviceKind::Cpu),
        "cuda" => return Ok(DeviceKind::Cuda(None)),
        other => other.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
    };
    number.map(|ordinal| DeviceKind::Cuda(Some(ordinal))).ok_or_else(|| "it is cpu, cuda or cuda:N".to_owned())
}

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{percent:>3} % {elapsed} {wide_msg}").expect("a valid template");
    ProgressBar::new(1000).with_style(style)
}

fn show(bar: &ProgressBar, done: f64, what: &str) {
    bar.set_position((1000.0 * done) as u64);
    bar.set_message(what.to_owned());
}

/// A profile in a few lines.
fn measured(profile: &MachineProfile) -> String {
    let speeds = &profile.speeds;
    let mut text = format!(
        "speeds           products {:.3} TFLOP/s in f32, {:.3} in bf16; copies {:.1} GB/s\n",
        speeds.f32_flops / 1e12,
        speeds.bf16_flops / 1e12,
        speeds.copy_bytes_per_s / 1e9
    );
    let points: usize = profile.kernels.iter().map(|curve| curve.points.len()).sum();
    let overheads = &profile.overheads;
    let _ = writeln!(text, "kernels          {} curves through {points} shapes", profile.kernels.len());
    let _ = writeln!(
        text,
        "beside kernels   {:.1} us a launch, {:.1} an instruction, {:.1} to wake a thread, {:.1} a step",
        1e6 * overheads.launch_s,
        1e6 * overheads.instruction_s,
        1e6 * overheads.handover_s,
        1e6 * overheads.step_s
    );
    for curve in &profile.collectives {
        let _ = writeln!(
            text,
            "{:<16} {} ranks{}: {:.1} us + {:.1} GB/s of its buffer",
            curve.operation,
            curve.ranks,
            if curve.hosts > 1 { format!(" on {} hosts", curve.hosts) } else { String::new() },
            1e6 * curve.alpha_s,
            1e-9 / curve.beta_s_per_byte.max(1e-18)
        );
    }
    let (interference, disk) = (&profile.interference, &profile.disk);
    let _ = writeln!(
        text,
        "interference     compute {:.2} times as long beside communication as its share of the cores says, communication {:.2}",
        interference.compute, interference.communication
    );
    if let Some(transfers) = &profile.transfers {
        let _ = writeln!(
            text,
            "pinned memory    {:.1} GB/s to the GPU, {:.1} from it, {:.1} read and written by an update on the host",
            transfers.to_device_bytes_per_s / 1e9,
            transfers.to_host_bytes_per_s / 1e9,
            transfers.host_update_bytes_per_s / 1e9
        );
    }
    let _ = writeln!(
        text,
        "disk             {:.2} GB/s written, {:.2} read",
        disk.write_bytes_per_s / 1e9,
        disk.read_bytes_per_s / 1e9
    );
    text
}

fn load(path: &Path) -> Result<MachineProfile> {
    MachineProfile::load(path, &Machine::here()).context("a profile is needed first: `trainyard calibrate`")
}

/// A profile to compare: of this machine, or of any processes.
fn comparable(path: &Path) -> Result<MachineProfile> {
    match MachineProfile::read(path) {
        Ok(profile) if profile.machine.processes.is_some() => Ok(profile),
        _ => load(path),
    }
}

/// Trains configurations on the machine of `group`, and compares them with the predictions of
/// `profile`, whose file is `path`.
fn rows_on(args: &Args, group: &ProbeGroup, path: &Path, profile: &MachineProfile) -> Result<Vec<Row>> {
    let bar = group.is_first().then(bar);
    if group.is_first() {
        note(&format!("{}: measured {}", path.display(), profile.measured));
    }
    let progress = &mut |done: f64, what: &str| bar.iter().for_each(|bar| show(bar, done, what));
    let rows = check::rows(group, profile, usize::from(args.every), progress)?;
    bar.iter().for_each(ProgressBar::finish_and_clear);
    Ok(rows)
}

/// As [`rows_on`], on GPU number `ordinal`.
fn rows_on_gpu(ordinal: usize, path: &Path) -> Result<Vec<Row>> {
    let cuda = Arc::new(Cuda::open(ordinal, 1).context("there is no GPU to measure")?);
    let needed = "a profile is needed first: `trainyard calibrate --device cuda`";
    let profile = MachineProfile::read(path).context(needed)?;
    let name = &cuda.properties().name;
    match &profile.machine.gpu {
        Some(gpu) if gpu.name == *name => {}
        _ => bail!("{} is of {}, and this is {name}: {needed}", path.display(), profile.machine),
    }
    note(&format!("{}: measured {}", path.display(), profile.measured));
    let bar = bar();
    let rows = gpu::check(&cuda, &profile, &gpu::Sizes::of_a_gpu(), &mut |done, what| show(&bar, done, what))?;
    bar.finish_and_clear();
    Ok(rows)
}

fn show_check(args: &Args, rows: &[Row]) -> Result<()> {
    if args.json {
        let summary = check::summary(rows).context("no configuration was trained")?;
        let row =
            |row: &Row| json!({"name": row.name, "step_s": row.step_s.measured, "predicted_s": row.step_s.predicted});
        let line = json!({
            "configurations": rows.len(),
            "step_error_median": summary.step.0,
            "step_error_p90": summary.step.1,
            "memory_error_purpose": summary.memory.0,
            "memory_error_total": summary.memory.1,
            "cases": rows.iter().map(row).collect::<Vec<_>>(),
        });
        return print(format_args!("{line}\n"));
    }
    let mut text = format!(
        "{:<62} {:>9} {:>9} {:>8}   memory: worst purpose, total\n",
        "configuration", "ms", "predicted", "error"
    );
    for row in rows {
        text += &line(row);
    }
    let mut worst: Vec<&Row> = rows.iter().collect();
    worst.sort_by(|a, b| b.step_s.error().abs().total_cmp(&a.step_s.error().abs()));
    for row in worst.into_iter().take(args.explain) {
        text += &explanation(row);
    }
    let summary = check::summary(rows).context("no configuration was trained")?;
    let found = [summary.step.0, summary.step.1, summary.memory.0, summary.memory.1];
    let names = [
        "step time, median error",
        "step time, 90th percentile",
        "memory of a purpose, worst",
        "memory in total, worst",
    ];
    for ((name, found), bar) in names.iter().zip(found).zip(BARS) {
        let verdict = if found <= bar { "met" } else { "MISSED" };
        let _ = writeln!(text, "{name:<28} {:5.1} %, bar {:.0} %: {verdict}", 100.0 * found, 100.0 * bar);
    }
    print(text)
}

fn line(row: &Row) -> String {
    let purpose = row.memory.iter().max_by(|a, b| a.1.error().abs().total_cmp(&b.1.error().abs()));
    let (purpose, error) = purpose.map_or(("none", 0.0), |(purpose, pair)| (*purpose, pair.error()));
    let mut text = format!(
        "{:<62} {:9.2} {:9.2} {:+7.1} %   {purpose} {:+.1} %, {:+.1} %",
        row.name,
        1e3 * row.step_s.measured,
        1e3 * row.step_s.predicted,
        100.0 * row.step_s.error(),
        100.0 * error,
        100.0 * row.memory_total.error()
    );
    if !row.unpriced.is_empty() {
        let _ = write!(text, "; without a curve: {}", row.unpriced.join(", "));
    }
    text.push('\n');
    text
}

/// The parts of a row's error by instruction and kernel, the largest first.
fn explanation(row: &Row) -> String {
    let mut text = format!("\n{}\n", row.name);
    let mut part = |what: &str, pairs: Vec<(&str, Pair)>| {
        let mut pairs = pairs;
        pairs.sort_by(|a, b| (b.1.predicted - b.1.measured).abs().total_cmp(&(a.1.predicted - a.1.measured).abs()));
        for (name, pair) in pairs.into_iter().take(6) {
            let _ = writeln!(
                text,
                "  {what:<12} {name:<42} {:9.3} ms, predicted {:9.3}",
                1e3 * pair.measured,
                1e3 * pair.predicted
            );
        }
    };
    part("instruction", row.instructions.iter().map(|(name, pair)| (*name, *pair)).collect());
    part("kernel", row.kernels.iter().map(|(name, pair)| (name.as_str(), *pair)).collect());
    text
}

fn run_compare(path: &Path, other: &Path) -> Result<()> {
    let (first, second) = (comparable(path)?, comparable(other)?);
    if !first.machine.is(&second.machine) {
        bail!("{} is of {}, and {} of {}", path.display(), first.machine, other.display(), second.machine);
    }
    if check::cases_on(&first.machine).is_empty() {
        bail!("configurations of two and of four ranks are compared, and {} is of {}", path.display(), first.machine);
    }
    let mut all = check::difference(&first, &second)?;
    all.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    let mut text = String::new();
    for (name, difference) in &all {
        let _ = writeln!(text, "{name:<62} {:+6.1} %", 100.0 * difference);
    }
    let (worst, middle) = (all[0].1.abs(), all[all.len() / 2].1.abs());
    let _ =
        writeln!(text, "predictions differ by {:.1} % in the median, {:.1} % at most", 100.0 * middle, 100.0 * worst);
    print(text)
}
