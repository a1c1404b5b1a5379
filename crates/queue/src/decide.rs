//! Decides what is to be done now: a pure function of the time, the jobs, their curves and the
//! machine.
//!
//! Jobs are planned one after the other, by priority, then by deadline, then by age. Each takes
//! from the cores that those before it have left in each slot of time:
//!
//! - A job with a price or carbon curve gets the [cheapest](schedule::cheapest) slots before its
//!   deadline. Without a deadline it has a week from the time that it was added.
//! - A job without a curve, one that is late, or one whose speed is not known yet, runs [as soon as
//!   possible](schedule::soonest).
//!
//! Then the first slot of every plan is compared with what runs. Plans are made anew at each
//! decision, so errors of predictions are corrected as long as there is time left.

use crate::curve::Curve;
use crate::job::{Job, State};
use crate::machine::Machine;
use crate::schedule::{self, Demand, Plan, Slot, Speed};
use crate::time::{WEEK_S, rfc3339};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The curves of the jobs by file; a text says why a file cannot be used.
pub type Curves = BTreeMap<PathBuf, Result<Curve, String>>;

/// Something to do.
#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// Start the job, or let it go on, in a shape.
    Start {
        /// The job.
        job: i64,
        /// The index of the shape.
        shape: usize,
        /// The reason, in words.
        why: String,
    },
    /// Ask the job's process to stop at its next step boundary.
    Interrupt {
        /// The job.
        job: i64,
        /// The reason, in words.
        why: String,
    },
}

/// The plan of one job.
#[derive(Clone, PartialEq, Debug)]
pub struct JobPlan {
    /// The job.
    pub job: i64,
    /// Its slots in order, those side by side with the same shape joined: begin, end, shape.
    pub slots: Vec<(i64, i64, usize)>,
    /// The time at which it is expected to be done.
    pub ends: Option<i64>,
    /// Its predicted cost from now on, in the curve's unit times core-hours. None without a curve.
    pub cost: Option<f64>,
    /// The cost if it ran at once, as fast as possible.
    pub cost_at_once: Option<f64>,
    /// A bound below the cost of every schedule that keeps the deadline.
    pub cost_least: Option<f64>,
    /// Sentences for the user.
    pub notes: Vec<String>,
}

/// A decision.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Decision {
    /// Actions for now.
    pub actions: Vec<Action>,
    /// The plans of all jobs that are not over, in the order in which they were made.
    pub plans: Vec<JobPlan>,
}

/// The share by which the work that is left is taken for more than it is, so that errors of
/// predictions do not break a deadline.
const MARGIN: f64 = 0.05;
/// Seconds before a deadline at which a job is planned to be done: a kill and a start then do not
/// break it.
const SLACK_S: i64 = 900;
/// Upper limit for the slots of a plan.
const SLOTS_MAX: i64 = 1500;
/// Bounds of a slot's length in seconds, if the curves have other ones.
const SLOT_S: (i64, i64) = (300, 3600);
/// Time after which a process that was asked to stop and has not is asked again, which ends it at
/// once. Longer than a step and a checkpoint may take.
const STOP_PATIENCE_S: i64 = 1800;
/// Work per second that stands for an unknown one.
const UNKNOWN_RATE: f64 = 1.0;

/// Decides.
pub fn decide(now: i64, jobs: &[Job], curves: &Curves, machine: &Machine) -> Decision {
    let mut order: Vec<&Job> = jobs.iter().filter(|job| !job.state.is_over()).collect();
    order.sort_by_key(|job| (-job.request.priority, job.request.deadline.unwrap_or(i64::MAX), job.id));
    let grid = grid(now, &order, curves);
    let mut used = vec![0u32; grid.len()];
    // Cores of processes that are alive, until they are seen to have ended.
    let mut busy: u32 = order.iter().filter(|job| job.state.may_run()).map(|job| cores(job)).sum();
    let mut decision = Decision::default();
    for job in order {
        let planner = Planner { now, job, curves, machine, grid: &grid };
        let (plan, mut notes) = planner.plan(&used);
        for (used, shape) in used.iter_mut().zip(&plan.shapes) {
            *used += shape.map_or(0, |shape| job.request.shapes[shape].cores);
        }
        let wanted = plan.shapes.first().copied().flatten();
        let action = match (job.state, wanted) {
            (State::Waiting, Some(shape)) => {
                let needed = job.request.shapes[shape].cores;
                if busy == 0 || busy + needed <= machine.cores {
                    busy += needed;
                    Some(Action::Start { job: job.id, shape, why: planner.start_reason(shape) })
                } else {
                    notes.push("waits for cores that a job is about to leave".to_owned());
                    None
                }
            }
            (State::Running, wanted) if wanted != job.shape => {
                Some(Action::Interrupt { job: job.id, why: planner.stop_reason(&plan, wanted) })
            }
            (State::Stopping, _) if now - job.since > STOP_PATIENCE_S => {
                let why = format!("it has not stopped for {} minutes", (now - job.since) / 60);
                Some(Action::Interrupt { job: job.id, why })
            }
            _ => None,
        };
        decision.actions.extend(action);
        decision.plans.push(planner.shown(&plan, notes));
    }
    decision
}

/// The words for a job that its user holds back.
fn held(job: &Job) -> Option<&'static str> {
    match (job.is_cancelled, job.is_paused) {
        (true, _) => Some("it is cancelled"),
        (false, true) => Some("it is paused"),
        (false, false) => None,
    }
}

/// The cores of the job's process.
fn cores(job: &Job) -> u32 {
    let shape = job.shape.and_then(|shape| job.request.shapes.get(shape));
    shape.map_or(0, |shape| shape.cores)
}

/// The time by which a job with a curve is planned to be done: some time before its deadline.
fn horizon(job: &Job) -> i64 {
    job.request.deadline.map_or(job.added + WEEK_S, |deadline| deadline - SLACK_S)
}

/// Begins and ends of the slots from `now` until every deadline is over.
fn grid(now: i64, jobs: &[&Job], curves: &Curves) -> Vec<(i64, i64)> {
    let files = jobs.iter().flat_map(|job| job.request.price.iter().chain(&job.request.carbon));
    let resolutions = files.filter_map(|file| curves.get(file)?.as_ref().ok()).map(Curve::resolution_s);
    let finest = resolutions.min().unwrap_or(SLOT_S.1).clamp(SLOT_S.0, SLOT_S.1);
    let horizons = jobs.iter().map(|job| horizon(job));
    let until = horizons.max().unwrap_or(now).clamp(now + WEEK_S / 7, now + 8 * WEEK_S);
    let length = finest.max((until - now) / SLOTS_MAX);
    // Slots begin at whole multiples, as the curves' values do.
    let mut slots = Vec::new();
    let mut at = now;
    while at < until {
        let next = ((at.div_euclid(length) + 1) * length).min(until);
        slots.push((at, next));
        at = next;
    }
    // A deadline inside a slot divides it.
    for end in jobs.iter().filter(|job| job.request.deadline.is_some()).map(|job| horizon(job)) {
        if let Some(index) = slots.iter().position(|(from, to)| *from < end && end < *to) {
            let (from, to) = slots[index];
            slots[index] = (from, end);
            slots.insert(index + 1, (end, to));
        }
    }
    slots
}

struct Planner<'a> {
    now: i64,
    job: &'a Job,
    curves: &'a Curves,
    machine: &'a Machine,
    grid: &'a [(i64, i64)],
}

/// The cost of a core-second in each slot, and notes.
type Costs = (Vec<f64>, Vec<String>);

impl Planner<'_> {
    /// The curve of a file.
    fn curve(&self, file: &Path) -> Result<&Curve, String> {
        let Some(curve) = self.curves.get(file) else { return Err(format!("{} was not read", file.display())) };
        curve.as_ref().map_err(Clone::clone)
    }

    /// The cost of a core-second in each slot, and notes. With two curves each is divided by its
    /// mean, and both count the same. None without a curve.
    fn costs(&self) -> Result<Option<Costs>, String> {
        let request = &self.job.request;
        let mut notes = Vec::new();
        let mut costs: Option<Vec<f64>> = None;
        let both = request.price.is_some() && request.carbon.is_some();
        for file in request.price.iter().chain(&request.carbon) {
            let curve = self.curve(file)?;
            let until = horizon(self.job);
            if until > curve.end() {
                let by = if curve.period_s() == WEEK_S { "week" } else { "day" };
                notes.push(format!(
                    "{} ends {}; later hours are taken from the same hour of its last {by}",
                    file.display(),
                    rfc3339(curve.end())
                ));
            }
            let own: Vec<f64> = self.grid.iter().map(|(from, to)| curve.mean(*from, *to) / 3600.0).collect();
            let mean = own.iter().map(|cost| cost.abs()).sum::<f64>() / own.len().max(1) as f64;
            let scale = if both && mean > 0.0 { 1.0 / (3600.0 * mean) } else { 1.0 };
            let sum = costs.get_or_insert_with(|| vec![0.0; own.len()]);
            sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += scale * own);
        }
        Ok(costs.map(|costs| (costs, notes)))
    }

    /// The reason for which the job cannot run in the present slot; None if it can.
    fn blocked(&self) -> Option<String> {
        let job = self.job;
        if self.now < job.not_before {
            return Some(format!("it crashed and is started again after {}", rfc3339(job.not_before)));
        }
        let bound = job.request.idle_below?;
        self.machine.is_busy(bound, job.state == State::Running)
    }

    /// The plan, with what `used` leaves of the cores.
    fn plan(&self, used: &[u32]) -> (Plan, Vec<String>) {
        let job = self.job;
        let nothing = Plan { shapes: vec![None; self.grid.len()], ..Plan::default() };
        if let Some(why) = held(job) {
            return (nothing, vec![why.to_owned()]);
        }
        let (costs, mut notes, broken) = match self.costs() {
            Ok(Some((costs, notes))) => (Some(costs), notes, None),
            Ok(None) => (None, Vec::new(), None),
            Err(why) => (None, Vec::new(), Some(why)),
        };
        let blocked = self.blocked();
        let known = job.left().zip(job.speeds());
        let until = if costs.is_some() { horizon(job) } else { i64::MAX };
        let slots = |until: i64| -> Vec<Slot> {
            let slot = |(index, (from, to)): (usize, &(i64, i64))| {
                let is_blocked = index == 0 && blocked.is_some() || *to > until;
                // A job that needs more cores than there are runs alone.
                let total = self.machine.cores.max(self.fewest());
                Slot {
                    start: *from,
                    seconds: (to - from) as f64,
                    cost: costs.as_ref().map_or(0.0, |costs| costs[index]),
                    cores: if is_blocked { 0 } else { total.saturating_sub(used[index]) },
                }
            };
            self.grid.iter().enumerate().map(slot).collect()
        };
        if let Some(why) = &blocked {
            notes.push(why.clone());
        }
        let running = job.shape.filter(|_| job.state == State::Running);
        // A file of prices may be gone for a moment, so a job that runs is not stopped for that.
        let waits = |ends: Option<i64>| {
            let is_pressed = job.request.deadline.is_some() && ends.is_none_or(|ends| ends >= horizon(job));
            let why = broken.as_ref().filter(|_| running.is_none() && !is_pressed)?;
            Some((nothing.clone(), vec![format!("it waits, because a curve cannot be used: {why}")]))
        };
        if let Some(why) = &broken {
            notes.push(format!("a curve cannot be used, so costs do not count: {why}"));
        }
        let Some((left, speeds)) = known else {
            if let Some(waiting) = waits(None) {
                return waiting;
            }
            let unknown = if job.left().is_none() { "the number of its steps" } else { "its speed" };
            notes.push(format!("{unknown} is not known yet, so it runs as soon as it can"));
            let shapes = &job.request.shapes;
            let speeds: Vec<Speed> =
                shapes.iter().map(|shape| Speed { cores: shape.cores, rate: UNKNOWN_RATE }).collect();
            let demand = Demand { work: f64::INFINITY, start_s: job.start_s(), running };
            return (schedule::soonest(&slots(i64::MAX), &speeds, demand), notes);
        };
        // What is left is never nothing before the process says so by its end.
        let work = (left * (1.0 + MARGIN)).max(speeds[0].rate);
        let demand = Demand { work, start_s: job.start_s(), running };
        if costs.is_some() && until > self.now {
            let plan = schedule::cheapest(&slots(until), &speeds, demand);
            if plan.ends.is_some() {
                return (plan, notes);
            }
        }
        let plan = schedule::soonest(&slots(i64::MAX), &speeds, demand);
        if let Some(waiting) = waits(plan.ends) {
            return waiting;
        }
        if let Some(deadline) = job.request.deadline.filter(|deadline| plan.ends.is_none_or(|ends| ends > *deadline)) {
            let ends = plan.ends.map_or("later than planned for".to_owned(), rfc3339);
            notes.push(format!("it cannot be done by {}: it is expected to end {ends}", rfc3339(deadline)));
        }
        (plan, notes)
    }

    fn fewest(&self) -> u32 {
        self.job.request.shapes.iter().map(|shape| shape.cores).min().unwrap_or(1)
    }

    fn start_reason(&self, shape: usize) -> String {
        let words = &self.job.request.shapes[shape].words;
        if self.job.starts == 0 { format!("starts on {words}") } else { format!("continues on {words}") }
    }

    fn stop_reason(&self, plan: &Plan, wanted: Option<usize>) -> String {
        if let Some(why) = held(self.job) {
            return why.to_owned();
        }
        if let Some(shape) = wanted {
            return format!("it continues on {}", self.job.request.shapes[shape].words);
        }
        if let Some(why) = self.blocked() {
            return why;
        }
        let next = self.grid.iter().zip(&plan.shapes).find(|(_, shape)| shape.is_some());
        next.map_or("other jobs come first".to_owned(), |((from, _), _)| format!("it goes on {}", rfc3339(*from)))
    }

    fn shown(&self, plan: &Plan, notes: Vec<String>) -> JobPlan {
        let mut slots: Vec<(i64, i64, usize)> = Vec::new();
        for ((from, to), shape) in self.grid.iter().zip(&plan.shapes) {
            let Some(shape) = *shape else { continue };
            match slots.last_mut() {
                Some(last) if last.1 == *from && last.2 == shape => last.1 = *to,
                _ => slots.push((*from, *to, shape)),
            }
        }
        if let (Some(ends), Some(last)) = (plan.ends, slots.last_mut()) {
            last.1 = last.1.min(ends);
        }
        let costs = self.costs().ok().flatten().filter(|_| plan.ends.is_some());
        let compared = costs.zip(self.job.left().zip(self.job.speeds())).map(|((costs, _), (left, speeds))| {
            let cores = self.machine.cores.max(self.fewest());
            let slot = |((from, to), cost): (&(i64, i64), f64)| Slot {
                start: *from,
                seconds: (to - from) as f64,
                cost,
                cores,
            };
            let slots: Vec<Slot> = self.grid.iter().zip(costs).map(slot).collect();
            let running = self.job.shape.filter(|_| self.job.state == State::Running);
            let work = (left * (1.0 + MARGIN)).max(speeds[0].rate);
            let at_once =
                schedule::soonest(&slots, &speeds, Demand { work, start_s: self.job.start_s(), running }).cost;
            let until = horizon(self.job);
            let in_time: Vec<Slot> = slots.into_iter().filter(|slot| slot.start < until).collect();
            (at_once, schedule::least_cost(&in_time, &speeds, work))
        });
        JobPlan {
            job: self.job.id,
            slots,
            ends: plan.ends,
            cost: compared.map(|_| plan.cost),
            cost_at_once: compared.map(|(at_once, _)| at_once),
            cost_least: compared.and_then(|(_, least)| least),
            notes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::testing::job;
    use crate::job::{Process, Shape};
    use std::collections::BTreeMap;

    /// 2026-11-25 00:00 UTC.
    const MIDNIGHT: i64 = 1_795_564_800;
    const HOUR: i64 = 3600;

    fn machine(cores: u32) -> Machine {
        Machine { cores, others: Some(0.0), pressure: BTreeMap::new() }
    }

    fn shapes(rates: &[(u32, f64)]) -> Vec<Shape> {
        let shape = |(cores, rate): &(u32, f64)| Shape {
            cores: *cores,
            sets: Vec::new(),
            words: format!("{cores} ranks"),
            rate: Some(*rate),
        };
        rates.iter().map(shape).collect()
    }

    fn running(job: &mut Job, shape: usize) {
        job.state = State::Running;
        job.shape = Some(shape);
        job.process = Some(Process { pid: 7, started: 1 });
    }

    /// A day that is cheap from 3 to 5 in the morning.
    fn night() -> Curves {
        let line = |hour: i64| {
            let price = if (3..5).contains(&(hour % 24)) { 1.0 } else { 9.0 };
            format!("{},{price}\n", rfc3339(MIDNIGHT + HOUR * hour))
        };
        let text: String = (0..48).map(line).collect();
        let curve = Curve::parse(&text, Path::new("prices.csv"), &|_| 0).map_err(|error| error.to_string());
        Curves::from([(PathBuf::from("prices.csv"), curve)])
    }

    fn starts(decision: &Decision) -> Vec<(i64, usize)> {
        let start = |action: &Action| match action {
            Action::Start { job, shape, .. } => Some((*job, *shape)),
            Action::Interrupt { .. } => None,
        };
        decision.actions.iter().filter_map(start).collect()
    }

    fn interrupts(decision: &Decision) -> Vec<i64> {
        let interrupt = |action: &Action| match action {
            Action::Interrupt { job, .. } => Some(*job),
            Action::Start { .. } => None,
        };
        decision.actions.iter().filter_map(interrupt).collect()
    }

    #[test]
    fn jobs_without_a_curve_run_at_once_and_share_the_cores() {
        let mut first = job(1, shapes(&[(1, 1.0), (2, 1.9)]));
        let second = job(2, shapes(&[(1, 1.0)]));
        let both = decide(MIDNIGHT, &[first.clone(), second.clone()], &Curves::new(), &machine(3));
        assert_eq!(starts(&both), [(1, 1), (2, 0)]);
        let first_only = decide(MIDNIGHT, &[first.clone(), second.clone()], &Curves::new(), &machine(2));
        assert_eq!(starts(&first_only), [(1, 1)]);
        // The second one comes first by its priority, and the first one makes room for it.
        running(&mut first, 1);
        let mut urgent = second;
        urgent.request.priority = 5;
        let decision = decide(MIDNIGHT, &[first.clone(), urgent.clone()], &Curves::new(), &machine(2));
        assert_eq!((interrupts(&decision), starts(&decision)), (vec![1], vec![]));
        assert!(decision.plans[0].notes[0].contains("waits for cores"), "{decision:?}");
        // Once it has stopped both run, on a core each.
        first.state = State::Waiting;
        let decision = decide(MIDNIGHT, &[first, urgent], &Curves::new(), &machine(2));
        assert_eq!(starts(&decision), [(2, 0), (1, 0)]);
    }

    #[test]
    fn a_job_with_prices_waits_for_the_night_unless_its_deadline_presses() {
        let mut job = job(1, shapes(&[(1, 1.0)]));
        (job.request.price, job.request.work) = (Some("prices.csv".into()), Some(1800.0));
        job.added = MIDNIGHT;
        let decision = decide(MIDNIGHT, &[job.clone()], &night(), &machine(1));
        assert_eq!(starts(&decision), []);
        let plan = &decision.plans[0];
        assert_eq!(plan.slots[0].0, MIDNIGHT + 3 * HOUR, "{plan:?}");
        assert!(plan.cost.unwrap() < 0.2 * plan.cost_at_once.unwrap(), "{plan:?}");
        assert!(plan.cost_least.unwrap() <= plan.cost.unwrap(), "{plan:?}");
        let night_time = decide(MIDNIGHT + 3 * HOUR, &[job.clone()], &night(), &machine(1));
        assert_eq!(starts(&night_time), [(1, 0)]);
        // A job that runs at a dear hour stops.
        running(&mut job, 0);
        let dear = decide(MIDNIGHT + 8 * HOUR, &[job.clone()], &night(), &machine(1));
        assert_eq!(interrupts(&dear), [1]);
        job.state = State::Waiting;
        job.request.deadline = Some(MIDNIGHT + HOUR);
        assert_eq!(starts(&decide(MIDNIGHT + 600, &[job.clone()], &night(), &machine(1))), [(1, 0)]);
        // Too late is said, and it runs at once.
        job.request.work = Some(7200.0);
        let late = decide(MIDNIGHT, &[job.clone()], &night(), &machine(1));
        assert_eq!(starts(&late), [(1, 0)]);
        assert!(late.plans[0].notes[0].starts_with("it cannot be done by 2026-11-25T01:00:00Z"), "{late:?}");
    }

    #[test]
    fn a_curve_that_cannot_be_read_starts_nothing_early_and_stops_nothing() {
        let mut job = job(1, shapes(&[(1, 1.0)]));
        (job.request.price, job.request.work) = (Some("gone.csv".into()), Some(7200.0));
        let decision = decide(MIDNIGHT, &[job.clone()], &night(), &machine(1));
        assert!(starts(&decision).is_empty(), "{decision:?}");
        let note = &decision.plans[0].notes[0];
        assert!(note.starts_with("it waits, because") && note.contains("gone.csv was not read"), "{note}");
        // It starts in time for its deadline.
        job.request.deadline = Some(MIDNIGHT + 4 * HOUR);
        assert_eq!(starts(&decide(MIDNIGHT + HOUR, &[job.clone()], &night(), &machine(1))), []);
        let pressed = decide(MIDNIGHT + 2 * HOUR, &[job.clone()], &night(), &machine(1));
        assert_eq!(starts(&pressed), [(1, 0)]);
        running(&mut job, 0);
        let decision = decide(MIDNIGHT, &[job], &night(), &machine(1));
        assert!(
            decision.actions.is_empty() && decision.plans[0].notes[0].contains("costs do not count"),
            "{decision:?}"
        );
    }

    #[test]
    fn unknown_speeds_are_measured_first() {
        let mut job = job(1, shapes(&[(2, 1.0)]));
        job.request.shapes[0].rate = None;
        (job.request.price, job.added) = (Some("prices.csv".into()), MIDNIGHT);
        let decision = decide(MIDNIGHT, &[job.clone()], &night(), &machine(2));
        assert_eq!(starts(&decision), [(1, 0)]);
        let note = decision.plans[0].notes.last().unwrap();
        assert!(note.contains("its speed is not known yet"), "{note}");
        running(&mut job, 0);
        job.measured = vec![(0, 1.0)];
        assert_eq!(interrupts(&decide(MIDNIGHT, &[job], &night(), &machine(2))), [1]);
    }

    #[test]
    fn what_is_held_back_stops_and_what_does_not_stop_is_asked_again() {
        let mut job = job(1, shapes(&[(1, 1.0)]));
        running(&mut job, 0);
        (job.request.idle_below, job.since) = (Some(20.0), MIDNIGHT);
        let ask = |job: &Job, now: i64, machine: &Machine| {
            interrupts(&decide(now, std::slice::from_ref(job), &Curves::new(), machine))
        };
        assert_eq!(ask(&job, MIDNIGHT, &machine(1)), Vec::<i64>::new());
        assert_eq!(ask(&job, MIDNIGHT, &Machine { others: Some(30.0), ..machine(1) }), [1]);
        job.request.idle_below = None;
        for held in [Job { is_paused: true, ..job.clone() }, Job { is_cancelled: true, ..job.clone() }] {
            assert_eq!(ask(&held, MIDNIGHT, &machine(1)), [1]);
            let waits = Job { state: State::Waiting, ..held };
            assert!(decide(MIDNIGHT, &[waits], &Curves::new(), &machine(1)).actions.is_empty());
        }
        job.state = State::Stopping;
        assert_eq!(ask(&job, MIDNIGHT + STOP_PATIENCE_S, &machine(1)), Vec::<i64>::new());
        assert_eq!(ask(&job, MIDNIGHT + STOP_PATIENCE_S + 1, &machine(1)), [1]);
    }

    #[test]
    fn a_job_larger_than_the_machine_runs_alone() {
        let large = job(1, shapes(&[(8, 1.0)]));
        let small = job(2, shapes(&[(1, 1.0)]));
        assert_eq!(starts(&decide(MIDNIGHT, &[large, small], &Curves::new(), &machine(2))), [(1, 0)]);
    }
}
