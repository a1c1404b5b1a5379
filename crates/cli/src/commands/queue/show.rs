//! `trainyard queue list` and `show`: the jobs, their plans and what they cost.

use super::{Place, at, cores, now};
use crate::commands::runs::table;
use crate::output::print;
use anyhow::Result;
use serde_json::{Value, json};
use std::fmt::Write as _;
use trainyard_base::format_count;
use trainyard_queue::daemon::{curves, running};
use trainyard_queue::decide::{JobPlan, decide};
use trainyard_queue::job::{Job, State, Unit};
use trainyard_queue::machine::Machine;
use trainyard_queue::process::Files;
use trainyard_queue::progress;
use trainyard_queue::time::{DAY_S, rfc3339};

/// List the jobs: their state, how far they are, and when they are expected to be done.
#[derive(clap::Args)]
pub struct ListArgs {
    /// Show also jobs that were over more than a day ago.
    #[arg(long)]
    all: bool,
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Place,
}

/// Show a job: what was asked, its plan over the coming hours with its cost, and the end of its
/// log.
#[derive(clap::Args)]
pub struct ShowArgs {
    /// The number of a job, or the name of its run.
    #[arg(value_name = "JOB")]
    job: String,
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Place,
}

/// Lines of the log that are shown.
const LOG_LINES: usize = 20;
/// Stretches of a plan that are shown.
const STRETCHES: usize = 20;

/// The plans of the jobs, if others leave the machine alone.
fn plans(jobs: &[Job]) -> Vec<JobPlan> {
    let machine = Machine { cores: cores(), others: Some(0.0), pressure: Default::default() };
    decide(now(), jobs, &curves(jobs), &machine).plans
}

/// Lists the jobs.
pub fn list(args: &ListArgs) -> Result<()> {
    let jobs = args.place.store()?.jobs()?;
    let plans = plans(&jobs);
    let since = now() - DAY_S;
    let shown = |job: &&Job| args.all || !job.state.is_over() || job.since >= since;
    let shown: Vec<&Job> = jobs.iter().filter(shown).collect();
    let plan = |job: &Job| plans.iter().find(|plan| plan.job == job.id);
    if args.json {
        let all: Vec<Value> = shown.iter().map(|job| to_json(job, plan(job))).collect();
        return print(format_args!("{:#}\n", Value::Array(all)));
    }
    if shown.is_empty() {
        return print("no jobs: `trainyard queue add c.toml` adds one\n");
    }
    let rows = shown.iter().map(|job| {
        let cores = job.shape.filter(|_| job.state.may_run()).map_or("-".to_owned(), |shape| {
            job.request.shapes.get(shape).map_or("-".to_owned(), |shape| shape.cores.to_string())
        });
        vec![
            job.id.to_string(),
            job.request.name.clone(),
            state(job).to_owned(),
            done(job),
            cores,
            job.request.priority.to_string(),
            job.request.deadline.map_or("-".to_owned(), at),
            remark(job, plan(job)),
        ]
    });
    let heads = ["job", "run", "state", "done", "cores", "priority", "deadline", "remark"].map(str::to_owned);
    print(table(&heads, &rows.collect::<Vec<_>>()))?;
    match running(&args.place.folder()?) {
        Some(_) => Ok(()),
        None if jobs.iter().any(|job| !job.state.is_over()) => {
            print("nothing runs the queue: `trainyard queue run` does, and `trainyard queue run --once` from cron\n")
        }
        None => Ok(()),
    }
}

/// The state as users see it.
fn state(job: &Job) -> &'static str {
    if job.state == State::Waiting && job.is_paused { "paused" } else { job.state.name() }
}

/// `120/1,000`, or `90/600 s`
fn done(job: &Job) -> String {
    let unit = if job.request.unit == Unit::Seconds { " s" } else { "" };
    match job.request.work {
        Some(work) => format!("{}/{}{unit}", format_count(job.done), format_count(work)),
        None => format!("{}{unit}", format_count(job.done)),
    }
}

/// The end that is expected, or why it does not run.
fn remark(job: &Job, plan: Option<&JobPlan>) -> String {
    let Some(plan) = plan.filter(|_| !job.is_paused && !job.is_cancelled) else { return job.why.clone() };
    if let Some(note) = plan.notes.iter().find(|note| note.starts_with("it ")) {
        return note.clone();
    }
    match (plan.slots.first(), plan.ends) {
        (Some((from, ..)), Some(ends)) if job.state == State::Waiting && *from > now() => {
            format!("from {}, ends {}", at(*from), at(ends))
        }
        (_, Some(ends)) => format!("ends {}", at(ends)),
        (_, None) => plan.notes.first().cloned().unwrap_or_else(|| job.why.clone()),
    }
}

/// Shows one job.
pub fn show(args: &ShowArgs) -> Result<()> {
    let store = args.place.store()?;
    let id = store.find(&args.job)?;
    let (job, jobs) = (store.job(id)?, store.jobs()?);
    let plans = plans(&jobs);
    let plan = plans.iter().find(|plan| plan.job == id);
    if args.json {
        return print(format_args!("{:#}\n", to_json(&job, plan)));
    }
    let request = &job.request;
    let files = Files::new(&args.place.folder()?, id);
    // Writing to a String cannot fail.
    let mut text = String::new();
    let mut line = |what: &str, value: String| {
        let _ = writeln!(text, "{what:<10} {value}");
    };
    line("job", format!("{id} ({}), added {}", request.name, at(job.added)));
    line("state", format!("{} since {}: {}", state(&job), at(job.since), job.why));
    line("done", format!("{}; started {} times", done(&job), job.starts));
    line("run", request.run.display().to_string());
    line("log", files.log.display().to_string());
    line("priority", request.priority.to_string());
    if let Some(deadline) = request.deadline {
        line("deadline", at(deadline));
    }
    for (what, path) in [("price", &request.price), ("carbon", &request.carbon)] {
        if let Some(path) = path {
            line(what, path.display().to_string());
        }
    }
    if let Some(percent) = request.idle_below {
        line("idle", format!("while others use at most {percent} % of the cores"));
    }
    let speeds = job.speeds();
    for (index, shape) in request.shapes.iter().enumerate() {
        let speed = speeds.as_ref().map_or(String::new(), |speeds| match request.unit {
            Unit::Steps => format!(": {:.2} ms a step", 1e3 / speeds[index].rate),
            Unit::Seconds => String::new(),
        });
        let measured = if job.measured.iter().any(|(shape, _)| *shape == index) { ", measured" } else { "" };
        line(if index == 0 { "shapes" } else { "" }, format!("{}{speed}{measured}", shape.words));
    }
    if let Some(plan) = plan {
        for (index, (from, to, shape)) in plan.slots.iter().take(STRETCHES).enumerate() {
            let cores = request.shapes[*shape].cores;
            let cores = format!("{cores} core{}", if cores == 1 { "" } else { "s" });
            line(if index == 0 { "plan" } else { "" }, format!("{} to {} on {cores}", at(*from), at(*to)));
        }
        if plan.slots.len() > STRETCHES {
            line("", format!("and {} later stretches", plan.slots.len() - STRETCHES));
        }
        if let Some(ends) = plan.ends {
            line("ends", at(ends));
        }
        if let (Some(cost), Some(at_once)) = (plan.cost, plan.cost_at_once) {
            let least = plan.cost_least.map_or(String::new(), |least| format!(", {least:.4} at least by any schedule"));
            line("cost", format!("{cost:.4} (unit of the file x core-hours); {at_once:.4} if it ran at once{least}"));
        }
        plan.notes.iter().for_each(|note| line("note", note.clone()));
    }
    let log = progress::last_lines(&files.log, LOG_LINES);
    if !log.is_empty() {
        text += &format!("\n{}\n", log.join("\n"));
    }
    print(text)
}

fn to_json(job: &Job, plan: Option<&JobPlan>) -> Value {
    let request = &job.request;
    let stretch = |(from, to, shape): &(i64, i64, usize)| json!({ "from": rfc3339(*from), "to": rfc3339(*to), "cores": request.shapes[*shape].cores });
    json!({
        "job": job.id,
        "name": request.name,
        "run": request.run,
        "folder": request.folder,
        "state": job.state.name(),
        "since": rfc3339(job.since),
        "why": job.why,
        "is_paused": job.is_paused,
        "pid": job.process.map(|process| process.pid),
        "priority": request.priority,
        "deadline": request.deadline.map(rfc3339),
        "price": request.price,
        "carbon": request.carbon,
        "idle_below": request.idle_below,
        "unit": if request.unit == Unit::Steps { "steps" } else { "seconds" },
        "work": request.work,
        "done": job.done,
        "starts": job.starts,
        "cores": job.shape.filter(|_| job.state.may_run()).map(|shape| request.shapes[shape].cores),
        "shapes": request.shapes,
        "start_s": job.start_s(),
        "plan": plan.map(|plan| plan.slots.iter().map(stretch).collect::<Vec<_>>()),
        "ends": plan.and_then(|plan| plan.ends).map(rfc3339),
        "cost": plan.and_then(|plan| plan.cost),
        "cost_at_once": plan.and_then(|plan| plan.cost_at_once),
        "cost_least": plan.and_then(|plan| plan.cost_least),
        "notes": plan.map(|plan| plan.notes.clone()),
    })
}
