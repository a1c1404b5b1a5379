//! `trainyard queue add`: checks a configuration, finds the shapes in which it can run here, and
//! adds it to the queue.

use super::{Place, at, cores, now};
use crate::commands::config::{load, resolve, resolve_for};
use crate::output::{chain, count, note, print};
use crate::{choose, forecast};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;
use trainyard_engine::config::{Config, DeviceKind, Inputs, Resolved};
use trainyard_queue::curve::Curve;
use trainyard_queue::daemon::running;
use trainyard_queue::job::{Request, Shape, Unit};
use trainyard_queue::store::{Store, local_offset};
use trainyard_queue::{progress, time};
use trainyard_sim::machine::Machine;
use trainyard_sim::{MachineProfile, ProfileKind};

/// Add a job: a configuration that is trained when its turn comes. It is checked now, and kept as
/// it is now.
#[derive(clap::Args)]
pub struct Args {
    /// A configuration in TOML. Paths in it are relative to the folder in which this command runs.
    config: PathBuf,
    /// Set a key over the configuration; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// The time by which it is to be done: `Fri 08:00`, `08:00`, `2026-11-27 08:00`,
    /// `2026-11-27T08:00:00Z`, or from now `+90m`, `+6h`, `+2d`.
    #[arg(long, value_name = "TIME")]
    deadline: Option<String>,
    /// Prices of electricity or of the machine over time, as CSV lines `time,price`: it runs in the
    /// hours that cost the least before its deadline, or within a week.
    #[arg(long, value_name = "CSV")]
    price: Option<PathBuf>,
    /// Carbon intensity over time, as CSV lines `time,value`. With --price too, both count the
    /// same.
    #[arg(long, value_name = "CSV")]
    carbon: Option<PathBuf>,
    /// Run only while others use at most this percentage of the cores, and begin at half of that.
    /// 20 if no number is given.
    #[arg(long, value_name = "PERCENT", num_args = 0..=1, default_missing_value = "20", require_equals = true)]
    idle: Option<f64>,
    /// Jobs of a higher priority are planned first.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    priority: i64,
    /// Use at most this many cores.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    cores: Option<u32>,
    /// Run it in the layout of the configuration only, with the same bits however often it stops.
    /// Without this option its ranks, threads and micro-batches may change between two starts, if
    /// this machine has a profile (`trainyard calibrate`).
    #[arg(long)]
    as_is: bool,
    #[command(flatten)]
    place: Place,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let config = load(Some(&args.config), &args.sets)?;
    let resolved = resolve(&config)?;
    let folder = std::env::current_dir().context("the working folder")?;
    let queue = args.place.folder()?;
    let now = now();
    let deadline = args.deadline.as_deref().map(|text| time::deadline(text, now, &local_offset));
    let deadline = deadline.transpose().context("--deadline")?;
    if let Some(percent) = args.idle.filter(|percent| !(*percent > 0.0 && *percent <= 100.0)) {
        bail!("--idle={percent}: give a percentage of the cores, above 0 and at most 100");
    }
    let file = |option: &str, path: &Option<PathBuf>| -> Result<Option<PathBuf>> {
        let Some(path) = path else { return Ok(None) };
        let path = std::path::absolute(path).with_context(|| format!("{option} {}", path.display()))?;
        Curve::read(&path, &local_offset).with_context(|| option.to_owned())?;
        Ok(Some(path))
    };
    let (price, carbon) = (file("--price", &args.price)?, file("--carbon", &args.carbon)?);
    let mut store = Store::create(&queue)?;
    let directory = folder.join(&resolved.config.run.directory);
    let name = match &resolved.config.run.name {
        Some(name) => name.clone(),
        None => free_name(&args.config, &directory, &store)?,
    };
    let run = directory.join(&name);
    if progress::has_begun(&run) {
        bail!("{} is a run already: give this one another name by --set run.name=NAME", run.display());
    }
    let (work, unit) = match (resolved.limits.steps, resolved.limits.seconds) {
        (Some(steps), _) => (Some(steps as f64), Unit::Steps),
        (None, Some(seconds)) => (Some(seconds), Unit::Seconds),
        (None, None) => (None, Unit::Steps),
    };
    let shapes = shapes(args, &resolved, unit)?;
    let request = Request {
        name,
        folder,
        run,
        config: crate::output::read(&args.config)?,
        sets: args.sets.clone(),
        priority: args.priority,
        deadline,
        price,
        carbon,
        idle_below: args.idle,
        work,
        unit,
        shapes,
    };
    let id = store.add(&request, now)?;
    print(described(id, &request))?;
    if running(&queue).is_none() {
        note("nothing runs the queue: `trainyard queue run` does, and `trainyard queue run --once` from cron");
    }
    Ok(())
}

/// A few lines about the new job.
fn described(id: i64, request: &Request) -> String {
    let mut text = format!("job {id} ({})", request.name);
    match (request.work, request.unit) {
        (Some(work), Unit::Steps) => text += &format!(": {} steps", count(work as u64)),
        (Some(work), Unit::Seconds) => text += &format!(": {work:.0} s of training"),
        (None, _) => text += ": its number of steps is known once it has run",
    }
    text += &request.deadline.map_or(String::new(), |deadline| format!(", by {}", at(deadline)));
    text.push('\n');
    for shape in &request.shapes {
        let cores = if shape.cores == 1 { "core" } else { "cores" };
        text += &format!("  {:>3} {cores:<5}  {}", shape.cores, shape.words);
        if let (Some(rate), Some(work), Unit::Steps) = (shape.rate, request.work, request.unit) {
            text += &format!(": {:.2} ms a step predicted, {} in all", 1e3 / rate, duration(work / rate));
        }
        text.push('\n');
    }
    text
}

/// `40 s`, `12 min`, `3.4 h`
fn duration(seconds: f64) -> String {
    match Duration::try_from_secs_f64(seconds).map_or(u64::MAX, |duration| duration.as_secs()) {
        0..120 => format!("{seconds:.0} s"),
        120..7200 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

/// A name after the configuration's file that no run and no job has: `c`, `c-2`, ...
fn free_name(config: &Path, directory: &Path, store: &Store) -> Result<String> {
    let stem = config.file_stem().map_or("run".into(), |stem| stem.to_string_lossy());
    let stem = stem.trim_start_matches('.');
    let jobs = store.jobs()?;
    let is_free = |name: &String| {
        let run = directory.join(name);
        !run.exists() && jobs.iter().all(|job| job.request.run != run)
    };
    let names = (1..).map(|number| if number == 1 { stem.to_owned() } else { format!("{stem}-{number}") });
    Ok(names.into_iter().find(is_free).expect("numbers do not end"))
}

/// The shapes in which the configuration can run here: the fastest plan for each number of cores,
/// or its own layout.
fn shapes(args: &Args, resolved: &Resolved, unit: Unit) -> Result<Vec<Shape>> {
    let all = cores();
    let most = args.cores.unwrap_or(all);
    if most > all {
        bail!("--cores {most}: jobs may use {all} here");
    }
    let is_gpu = matches!(resolved.config.compute.device, DeviceKind::Cuda(_));
    let own = || -> Result<Vec<Shape>> {
        let of_job = resolve_for(&load(Some(&args.config), &args.sets)?, inputs(most))?;
        // A job on GPUs has the machine for itself.
        let used = if is_gpu { all } else { used(&of_job) };
        if used > most && args.cores.is_some() {
            bail!(
                "--cores {most}: the configuration asks for {} ranks x {} threads",
                of_job.parallel.ranks,
                of_job.threads
            );
        }
        let rate = (unit == Unit::Seconds).then_some(1.0);
        let sets = if is_gpu { Vec::new() } else { vec![format!("compute.threads={}", of_job.threads)] };
        Ok(vec![Shape { cores: used, sets, words: choose::words(&of_job), rate }])
    };
    if args.as_is || is_gpu || unit == Unit::Seconds {
        return own();
    }
    let curve = forecast::profile(ProfileKind::Cpu, &Machine::here())
        .map_err(anyhow::Error::msg)
        .and_then(|profile| scaling_curve(args, resolved, &profile, most));
    match curve {
        Ok(shapes) => Ok(shapes),
        Err(why) => {
            note(&format!("only the configuration's own layout is used: {}", chain(&why)));
            own()
        }
    }
}

/// A process on this many cores.
fn inputs(cores: u32) -> Inputs {
    let cores_because = "cores that the queue gives the job".to_owned();
    Inputs { cores: cores as usize, cores_because, ..Inputs::of_this_machine() }
}

/// The cores that a configuration keeps busy.
fn used(resolved: &Resolved) -> u32 {
    (resolved.parallel.ranks * resolved.threads) as u32
}

/// The fastest plan for 1, 2, 4, ... cores and for `most`, all with the same global batch.
fn scaling_curve(args: &Args, resolved: &Resolved, profile: &MachineProfile, most: u32) -> Result<Vec<Shape>> {
    let sets_given = &args.sets;
    let load = |chosen: &[String]| -> Result<Config> { load(Some(&args.config), &[chosen, &sets_given[..]].concat()) };
    let mut shapes: Vec<Shape> = Vec::new();
    let powers = (0..32).map(|power| 1 << power).take_while(|cores| *cores < most);
    for cores in powers.chain([most]) {
        let inputs = inputs(cores);
        let ways = choose::ways(&load, profile, &inputs)?;
        for way in &ways.fitting {
            let of_way = resolve_for(&load(&way.sets)?, inputs.clone())?;
            let used = used(&of_way);
            if used > cores || of_way.batch.global != resolved.batch.global {
                continue;
            }
            let mut sets = way.sets.clone();
            sets.push(format!("compute.threads={}", of_way.threads));
            let shape = Shape { cores: used, sets, words: way.words(), rate: Some(1.0 / way.step_s) };
            match shapes.iter_mut().find(|known| known.cores == used) {
                Some(known) if known.rate >= shape.rate => {}
                Some(known) => *known = shape,
                None => shapes.push(shape),
            }
            break;
        }
    }
    if shapes.is_empty() {
        bail!("no plan fits on {most} cores");
    }
    reset_others(&mut shapes);
    Ok(shapes)
}

/// A run that goes on keeps its settings, so each shape also resets the keys that another one sets.
fn reset_others(shapes: &mut [Shape]) {
    let key = |set: &String| set.split('=').next().unwrap_or_default().to_owned();
    let all: BTreeSet<String> = shapes.iter().flat_map(|shape| &shape.sets).map(key).collect();
    for shape in shapes {
        let own: BTreeSet<String> = shape.sets.iter().map(key).collect();
        let missing = all.difference(&own).map(|key| match key.as_str() {
            key if key.ends_with("_degree") => format!("{key}=1"),
            key if key.starts_with("memory.offload.") => format!("{key}=none"),
            key => format!("{key}=auto"),
        });
        shape.sets.extend(missing.collect::<Vec<_>>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_leave_nothing_of_each_other() {
        let shape = |sets: &[&str]| Shape {
            cores: 1,
            sets: sets.iter().map(|set| (*set).to_owned()).collect(),
            words: String::new(),
            rate: None,
        };
        let mut shapes = [
            shape(&["parallel.ranks=1", "memory.offload.optimizer=disk"]),
            shape(&["parallel.ranks=2", "parallel.pipeline_parallel_degree=2", "parallel.pipeline_schedule=1f1b"]),
        ];
        reset_others(&mut shapes);
        let last = |shape: &Shape| shape.sets.last().unwrap().clone();
        assert_eq!(shapes[0].sets[2..], ["parallel.pipeline_parallel_degree=1", "parallel.pipeline_schedule=auto"]);
        assert_eq!(last(&shapes[1]), "memory.offload.optimizer=none");
    }

    #[test]
    fn durations_are_readable() {
        assert_eq!([40.0, 600.0, 9000.0, 1e300].map(duration)[..3], ["40 s", "10 min", "2.5 h"]);
    }
}
