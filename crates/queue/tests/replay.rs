//! Replays a week of real prices and carbon intensities: a job runs by [`decide`]'s decisions, with
//! speeds that differ from the predicted ones, starts that cost time, and kills. Its cost is
//! compared with a bound that no schedule can beat that knows everything beforehand.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trainyard_queue::curve::Curve;
use trainyard_queue::decide::{Action, Curves, decide};
use trainyard_queue::job::{Job, Process, Request, Shape, State, Unit};
use trainyard_queue::machine::Machine;
use trainyard_queue::schedule::{Demand, Slot, Speed, least_cost, soonest};
use trainyard_queue::time::{DAY_S, WEEK_S, instant};

/// Seconds between two looks.
const TICK_S: i64 = 600;
/// Seconds of a start, in which nothing is trained.
const START_S: f64 = 90.0;
/// Seconds between checkpoints: a kill loses what is after the last one.
const CHECKPOINT_S: f64 = 600.0;
/// Looks between two kills, on average.
const TICKS_PER_KILL: u64 = 250;
/// Cores and their true work per second.
const TRUE_SPEEDS: [(u32, f64); 3] = [(1, 1.0), (2, 1.85), (4, 3.2)];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// A number from `low` to `high`.
    fn within(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.next() as f64 / (1u64 << 31) as f64
    }
}

fn read(file: &str) -> Curve {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(file);
    Curve::read(&path, &|_| 0).unwrap()
}

/// The part of the curve that is known at a time.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Known {
    /// All of it: a forecast for the whole week that comes true.
    All,
    /// Today, and from 13:00 UTC on tomorrow, as day-ahead markets publish it.
    DayAhead,
}

fn known(curve: &Curve, at: i64, what: Known) -> Curve {
    let day = at.div_euclid(DAY_S);
    let until = if at.rem_euclid(DAY_S) >= 13 * 3600 { day + 2 } else { day + 1 };
    match what {
        Known::All => curve.clone(),
        Known::DayAhead => curve.known_until(until * DAY_S).expect("there is a week of history"),
    }
}

struct Replayed {
    cost: f64,
    least: f64,
    at_once: f64,
    ends: Option<i64>,
    starts: u32,
    kills: u32,
}

/// Trains `work` from `from` until a week later.
fn replay(curve: &Curve, what: Known, from: i64, work: f64, seed: u64) -> Replayed {
    let mut random = Random(seed);
    // All speeds are predicted wrong together, and each of them a little by itself.
    let common = random.within(0.85, 1.15);
    let shapes = TRUE_SPEEDS.map(|(cores, rate)| Shape {
        cores,
        sets: Vec::new(),
        words: format!("{cores} ranks"),
        rate: Some(rate * common * random.within(0.96, 1.04)),
    });
    let deadline = from + WEEK_S;
    let file = PathBuf::from("curve.csv");
    let request = Request {
        name: "replayed".to_owned(),
        folder: "/".into(),
        run: "/runs/replayed".into(),
        config: String::new(),
        sets: Vec::new(),
        priority: 0,
        deadline: Some(deadline),
        price: Some(file.clone()),
        carbon: None,
        idle_below: None,
        work: Some(work),
        unit: Unit::Steps,
        shapes: shapes.to_vec(),
    };
    let mut job = Job {
        id: 1,
        request,
        added: from,
        state: State::Waiting,
        since: from,
        why: String::new(),
        is_paused: false,
        is_cancelled: false,
        shape: None,
        process: None,
        done: 0.0,
        done_at_start: 0.0,
        measured: Vec::new(),
        start_s: None,
        starts: 0,
        crashes: 0,
        not_before: 0,
    };
    let machine = Machine { cores: 4, others: None, pressure: BTreeMap::new() };
    let (mut cost, mut kills, mut ends) = (0.0, 0, None);
    let (mut starting_s, mut saved, mut since_saved, mut seconds_since_start) = (0.0, 0.0, 0.0, 0.0);
    let mut at = from;
    while ends.is_none() && at < deadline + 2 * DAY_S {
        let curves = Curves::from([(file.clone(), Ok(known(curve, at, what)))]);
        for action in decide(at, std::slice::from_ref(&job), &curves, &machine).actions {
            match action {
                Action::Start { shape, .. } => {
                    (job.state, job.shape, job.since, job.starts) = (State::Running, Some(shape), at, job.starts + 1);
                    (job.process, job.done_at_start) = (Some(Process { pid: 1, started: 1 }), job.done);
                    (starting_s, seconds_since_start) = (START_S, 0.0);
                }
                // It writes a checkpoint, and goes on at the next look.
                Action::Interrupt { .. } => {
                    (job.state, job.process, saved) = (State::Waiting, None, job.done);
                }
            }
        }
        if let Some(shape) = job.shape.filter(|_| job.state == State::Running) {
            let (cores, rate) = TRUE_SPEEDS[shape];
            let rate = rate * random.within(0.98, 1.02);
            let busy_s = f64::min(starting_s, TICK_S as f64);
            starting_s -= busy_s;
            let trained_s = ((work - job.done) / rate).min(TICK_S as f64 - busy_s);
            job.done += rate * trained_s;
            let used_s = busy_s + trained_s;
            cost += f64::from(cores) * used_s * curve.mean(at, at + used_s.ceil().max(1.0) as i64) / 3600.0;
            // As the daemon measures: the mean since the start.
            seconds_since_start += trained_s;
            job.measured.retain(|(known, _)| *known != shape);
            job.measured.push((shape, (job.done - job.done_at_start) / seconds_since_start));
            job.start_s = Some(START_S);
            since_saved += trained_s;
            if since_saved >= CHECKPOINT_S {
                (since_saved, saved) = (0.0, job.done);
            }
            if job.done >= work * (1.0 - 1e-12) {
                ends = Some(at + used_s as i64);
            } else if random.next().is_multiple_of(TICKS_PER_KILL) {
                kills += 1;
                (job.state, job.process, job.done) = (State::Waiting, None, saved);
            }
        }
        at += TICK_S;
    }
    // Afterwards, with the true speeds, and starts that are free.
    let slot = |hour: i64| {
        let start = from + 3600 * hour;
        Slot { start, seconds: 3600.0, cost: curve.mean(start, start + 3600) / 3600.0, cores: 4 }
    };
    let slots: Vec<Slot> = (0..WEEK_S / 3600).map(slot).collect();
    let speeds = TRUE_SPEEDS.map(|(cores, rate)| Speed { cores, rate });
    let least = least_cost(&slots, &speeds, work).expect("a week is enough");
    let at_once = soonest(&slots, &speeds, Demand { work, start_s: 0.0, running: None }).cost;
    Replayed { cost, least, at_once, ends, starts: job.starts, kills }
}

/// Replays jobs of a sixth to two thirds of the week; prints each, and gives the worst ratio to the
/// bound.
fn worst(file: &str, begin: &str, what: Known) -> f64 {
    let curve = read(file);
    let from = instant(begin, &|_| 0).unwrap();
    let most = TRUE_SPEEDS[2].1 * WEEK_S as f64;
    let mut worst: f64 = 0.0;
    let jobs = trainyard_testing::cases("jobs of a week", 2, 12);
    for job in 0..jobs {
        let share = [1.0 / 3.0, 2.0 / 3.0, 0.5, 1.0 / 6.0][job as usize % 4];
        let replayed = replay(&curve, what, from, share * most, job);
        let Replayed { cost, least, at_once, ends, starts, kills } = replayed;
        let ratio = cost / least;
        println!(
            "{file} {what:?}, {:.0} % of the week: cost {ratio:.3} x the bound, {:.3} at once; {starts} starts, {kills} kills",
            100.0 * share,
            at_once / least
        );
        let ends = ends.unwrap_or(i64::MAX);
        assert!(ends <= from + WEEK_S, "{file} {what:?}, {share}: late by {} s", ends - from - WEEK_S);
        worst = worst.max(ratio);
    }
    worst
}

/// Acceptance bar: at most 1.1 times the cost of the best schedule known afterwards, and every
/// deadline kept.
#[test]
fn a_week_of_prices_costs_little_more_than_the_best_schedule() {
    let worst = worst("austria-2022-12.csv", "2022-12-12T00:00:00Z", Known::All);
    assert!(worst <= 1.1, "{worst}");
}

#[test]
fn a_week_of_carbon_costs_little_more_than_the_best_schedule() {
    let worst = worst("great-britain-2020-06.csv", "2020-06-15T00:00:00Z", Known::All);
    assert!(worst <= 1.1, "{worst}");
}

/// With the prices of today and tomorrow only, the later days are taken to be like the last week.
#[test]
fn deadlines_are_kept_where_only_tomorrow_is_known() {
    let prices = worst("austria-2022-12.csv", "2022-12-12T00:00:00Z", Known::DayAhead);
    let carbon = worst("great-britain-2020-06.csv", "2020-06-15T00:00:00Z", Known::DayAhead);
    println!("worst: {prices:.3} of prices, {carbon:.3} of carbon");
    // 1.12 and 1.16 were measured; no schedule reaches 1.0 without knowing the week.
    assert!(prices < 1.2 && carbon < 1.2, "{prices} {carbon}");
}
