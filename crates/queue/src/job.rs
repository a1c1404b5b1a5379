//! Jobs: a training run, the ways to run it, and how far it is.

use crate::schedule::Speed;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A job's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It is not running: it was never started, or it was stopped and goes on later.
    Waiting,
    /// The daemon was about to start it. A daemon that ended there leaves this state.
    Starting,
    /// Its process is alive.
    Running,
    /// Its process was asked to stop at a step boundary.
    Stopping,
    /// It has done its work.
    Done,
    /// It ended with an error that would come again.
    Failed,
    /// It was given up by its user; its run stays.
    Cancelled,
}

impl State {
    /// All states.
    pub const ALL: [State; 7] = [
        State::Waiting,
        State::Starting,
        State::Running,
        State::Stopping,
        State::Done,
        State::Failed,
        State::Cancelled,
    ];

    /// The state's name, in the store and in lists.
    pub fn name(self) -> &'static str {
        match self {
            State::Waiting => "waiting",
            State::Starting => "starting",
            State::Running => "running",
            State::Stopping => "stopping",
            State::Done => "done",
            State::Failed => "failed",
            State::Cancelled => "cancelled",
        }
    }

    /// True if a process of the job may be alive.
    pub fn may_run(self) -> bool {
        matches!(self, State::Starting | State::Running | State::Stopping)
    }

    /// True if nothing is left to do.
    pub fn is_over(self) -> bool {
        matches!(self, State::Done | State::Failed | State::Cancelled)
    }
}

/// A way to run a job: settings over its configuration, and what they mean.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Shape {
    /// Cores that it uses.
    pub cores: u32,
    /// Settings, as `--set` takes them.
    pub sets: Vec<String>,
    /// The shape in words.
    pub words: String,
    /// Predicted units of work per second. None before anything is measured.
    pub rate: Option<f64>,
}

/// A process, in a form that tells it from a later one with the same number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its start, in clock ticks since the machine's start.
    pub started: u64,
}

/// The unit of a job's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// Optimizer steps.
    Steps,
    /// Seconds of training.
    Seconds,
}

/// The request for a new job.
#[derive(Clone, PartialEq, Debug)]
pub struct Request {
    /// The name of the run.
    pub name: String,
    /// The working folder.
    pub folder: PathBuf,
    /// The folder of the run.
    pub run: PathBuf,
    /// The configuration's text, as it was when the job was added.
    pub config: String,
    /// Settings over it.
    pub sets: Vec<String>,
    /// Larger ones first.
    pub priority: i64,
    /// The time by which it is to be done.
    pub deadline: Option<i64>,
    /// The file of prices.
    pub price: Option<PathBuf>,
    /// The file of carbon intensities.
    pub carbon: Option<PathBuf>,
    /// Run only while others use at most this percentage of the cores.
    pub idle_below: Option<f64>,
    /// Its work in all. None if the configuration does not say.
    pub work: Option<f64>,
    /// The unit of `work`.
    pub unit: Unit,
    /// The ways to run it, at least one.
    pub shapes: Vec<Shape>,
}

/// A job.
#[derive(Clone, PartialEq, Debug)]
pub struct Job {
    /// Its number.
    pub id: i64,
    /// The request.
    pub request: Request,
    /// Time at which it was added.
    pub added: i64,
    /// Its state.
    pub state: State,
    /// The time of its last change of state.
    pub since: i64,
    /// The reason of the state, in words.
    pub why: String,
    /// True if it must not run until it is resumed.
    pub is_paused: bool,
    /// True if it is to end at its next step, for good.
    pub is_cancelled: bool,
    /// The shape in which it was last started.
    pub shape: Option<usize>,
    /// Its process.
    pub process: Option<Process>,
    /// Work that is done: what the run has recorded while it runs, else its newest checkpoint.
    pub done: f64,
    /// `done` at the last start.
    pub done_at_start: f64,
    /// The shapes that were measured, the newest last, each with its units of work per second.
    pub measured: Vec<(usize, f64)>,
    /// Measured seconds of work that a start loses.
    pub start_s: Option<f64>,
    /// Number of its starts.
    pub starts: u32,
    /// Number of crashes in a row without progress.
    pub crashes: u32,
    /// It is not started before this time.
    pub not_before: i64,
}

/// Assumed seconds of work that a start loses, until one is measured.
pub const START_S: f64 = 20.0;

impl Job {
    /// The work that is left. None if the work is not known.
    pub fn left(&self) -> Option<f64> {
        self.request.work.map(|work| (work - self.done).max(0.0))
    }

    /// Seconds of work that a start loses.
    pub fn start_s(&self) -> f64 {
        self.start_s.unwrap_or(START_S)
    }

    /// The work per second of every shape: what was measured, else what was predicted, scaled as
    /// the newest measurement is to its prediction. None before anything is predicted or measured.
    pub fn speeds(&self) -> Option<Vec<Speed>> {
        let shapes = &self.request.shapes;
        let scale = self.measured.last().and_then(|(shape, rate)| Some(rate / shapes.get(*shape)?.rate?));
        let rate = |index: usize| {
            let measured = self.measured.iter().find(|(shape, _)| *shape == index).map(|(_, rate)| *rate);
            measured.or_else(|| Some(scale.unwrap_or(1.0) * shapes[index].rate?))
        };
        (0..shapes.len()).map(|index| Some(Speed { cores: shapes[index].cores, rate: rate(index)? })).collect()
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A waiting job of 3,600 steps.
    pub(crate) fn job(id: i64, shapes: Vec<Shape>) -> Job {
        Job {
            id,
            request: request(&format!("run-{id}"), shapes),
            added: 0,
            state: State::Waiting,
            since: 0,
            why: "added".to_owned(),
            is_paused: false,
            is_cancelled: false,
            shape: None,
            process: None,
            done: 0.0,
            done_at_start: 0.0,
            measured: Vec::new(),
            start_s: Some(0.0),
            starts: 0,
            crashes: 0,
            not_before: 0,
        }
    }

    /// A request of 3,600 steps.
    pub(crate) fn request(name: &str, shapes: Vec<Shape>) -> Request {
        Request {
            name: name.to_owned(),
            folder: "/jobs".into(),
            run: PathBuf::from("/jobs/runs").join(name),
            config: "[training]\nsteps = 3600\n".to_owned(),
            sets: vec!["training.seed=2".to_owned()],
            priority: 0,
            deadline: None,
            price: None,
            carbon: None,
            idle_below: None,
            work: Some(3600.0),
            unit: Unit::Steps,
            shapes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::job;
    use super::*;

    #[test]
    fn measured_shapes_scale_those_that_were_not() {
        let shape = |cores: u32, rate: Option<f64>| Shape { cores, sets: Vec::new(), words: String::new(), rate };
        let mut predicted = job(1, vec![shape(1, Some(10.0)), shape(2, Some(18.0))]);
        let rates = |job: &Job| job.speeds().map(|speeds| speeds.iter().map(|speed| speed.rate).collect::<Vec<_>>());
        assert_eq!(rates(&predicted), Some(vec![10.0, 18.0]));
        predicted.measured = vec![(1, 9.0)];
        assert_eq!(rates(&predicted), Some(vec![5.0, 9.0]));
        predicted.measured = vec![(1, 9.0), (0, 6.0)];
        assert_eq!(rates(&predicted), Some(vec![6.0, 9.0]));
        let mut unknown = job(2, vec![shape(2, None)]);
        assert_eq!(rates(&unknown), None);
        unknown.measured = vec![(0, 4.0)];
        assert_eq!(rates(&unknown), Some(vec![4.0]));
        (unknown.done, unknown.start_s) = (3000.0, None);
        assert_eq!((unknown.left(), unknown.start_s()), (Some(600.0), START_S));
    }
}
