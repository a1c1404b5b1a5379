//! The daemon's step: look at the jobs' processes, decide, act.
//!
//! A [tick](Daemon::tick) keeps nothing between calls that matters. All of it is in the store and
//! in the jobs' folders, so a daemon that is killed at any moment loses nothing: jobs that run go
//! on running, and the next daemon finds them by the locks on their logs ([`crate::process`]). The
//! order of writes around a start is: remove the old exit code, write `starting`, start, write
//! `running`. A daemon that ended in between leaves a state from which [`Daemon::look`] tells what
//! happened.
//!
//! One daemon works on a queue at a time; it holds a lock on `daemon.lock`.

use crate::curve::Curve;
use crate::decide::{Action, Curves, Decision, decide};
use crate::job::{Job, Shape, State, Unit};
use crate::machine::{Machine, Ticks, others, pressures};
use crate::process::{self, Files};
use crate::progress;
use crate::store::{Store, local_offset};
use crate::{QueueError, time};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// The exit code of a run that was asked to stop and has written a checkpoint.
const EXIT_INTERRUPTED: i32 = 130;
/// Exit codes of errors that would come again: an error, and wrong usage.
const EXIT_ERRORS: [i32; 2] = [1, 2];
/// Crashes in a row without a new checkpoint after which a job has failed.
const CRASHES_MAX: u32 = 10;
/// Upper limit for the seconds between a crash and the next start.
const BACKOFF_S_MAX: i64 = 600;
/// The shortest time over which the machine's use is measured.
const LOOK_MIN: Duration = Duration::from_millis(500);
/// Time for which a lock on the daemon's file may be that of a command that looks for a daemon.
const LOOKED_AT: Duration = Duration::from_millis(100);
/// The file that the daemon locks.
const LOCK: &str = "daemon.lock";

/// The parts from which a job's command is made.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    /// The job.
    pub job: &'a Job,
    /// The shape in which it is to run.
    pub shape: &'a Shape,
    /// Its files.
    pub files: &'a Files,
    /// True if the run has begun, so that it is resumed.
    pub has_begun: bool,
}

/// Something that happened to a job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// The job.
    pub job: i64,
    /// The name of its run.
    pub name: String,
    /// The sentence about it.
    pub what: String,
}

/// The outcome of a tick.
#[derive(Clone, PartialEq, Debug)]
pub struct Tick {
    /// The events, in order.
    pub events: Vec<Event>,
    /// The decision.
    pub decision: Decision,
    /// The jobs after it.
    pub jobs: Vec<Job>,
}

/// Makes a job's command.
pub type Launcher<'a> = &'a dyn Fn(Start<'_>) -> Command;

/// Works on the jobs of a queue.
pub struct Daemon<'a> {
    store: Store,
    folder: PathBuf,
    cores: u32,
    launcher: Launcher<'a>,
    /// The processes that this daemon has started and not yet waited for.
    children: BTreeMap<i64, Child>,
    /// The last look at the machine: ticks of all, and of the jobs.
    looked: Option<(Instant, Ticks, u64)>,
    events: Vec<Event>,
    /// The lock; held, never read.
    _lock: File,
}

/// The process number of the daemon that works on the queue in `folder`, 0 if it has not written
/// it. None if there is none.
pub fn running(folder: &Path) -> Option<u32> {
    let mut file = File::open(folder.join(LOCK)).ok()?;
    // Shared, so that two who look do not take each other for a daemon.
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => {
            let mut text = String::new();
            // Its number is only for messages.
            let _ = file.read_to_string(&mut text);
            Some(text.trim().parse().unwrap_or(0))
        }
        _ => None,
    }
}

/// The curves of the jobs that are not over.
pub fn curves(jobs: &[Job]) -> Curves {
    let files = jobs.iter().filter(|job| !job.state.is_over());
    let files = files.flat_map(|job| job.request.price.iter().chain(&job.request.carbon));
    let mut curves = Curves::new();
    for file in files {
        let read = || Curve::read(file, &local_offset).map_err(|error| error.to_string());
        curves.entry(file.clone()).or_insert_with(read);
    }
    curves
}

impl<'a> Daemon<'a> {
    /// Takes the queue in `folder`, for jobs on `cores` cores. None if another daemon has it.
    ///
    /// # Errors
    ///
    /// The folder cannot be used, or the store is of another version.
    pub fn open(folder: &Path, cores: u32, launcher: Launcher<'a>) -> Result<Option<Daemon<'a>>, QueueError> {
        let store = Store::create(folder)?;
        let path = folder.join(LOCK);
        let error = |what: &'static str| {
            let path = path.clone();
            move |source| QueueError::File { what, path, source }
        };
        let options = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let mut lock = options.map_err(error("create"))?;
        let begin = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                // A command that looks for a daemon holds the lock for a moment.
                Err(TryLockError::WouldBlock) if begin.elapsed() < LOOKED_AT => {
                    std::thread::sleep(LOOKED_AT / 20);
                }
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(source)) => return Err(error("lock")(source)),
            }
        }
        lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(error("write"))?;
        Ok(Some(Daemon {
            store,
            folder: folder.to_owned(),
            cores,
            launcher,
            children: BTreeMap::new(),
            looked: None,
            events: Vec::new(),
            _lock: lock,
        }))
    }

    /// Looks at all jobs, decides what is to be done at `now`, and does it.
    ///
    /// # Errors
    ///
    /// SQLite or the queue's folder cannot be used. Trouble with one job is an event.
    pub fn tick(&mut self, now: i64) -> Result<Tick, QueueError> {
        self.look_at_all(now)?;
        let jobs = self.store.jobs()?;
        let machine = self.machine(&jobs);
        let decision = decide(now, &jobs, &curves(&jobs), &machine);
        for action in &decision.actions {
            match action {
                Action::Start { job, shape, why } => self.start(*job, *shape, why, now)?,
                Action::Interrupt { job, why } => self.interrupt(*job, why, now)?,
            }
        }
        let jobs = self.store.jobs()?;
        Ok(Tick { events: std::mem::take(&mut self.events), decision, jobs })
    }

    /// Asks every job that runs to stop at its next step. Returns the events, and the number of
    /// jobs whose processes may still be alive.
    ///
    /// # Errors
    ///
    /// Those of [`Daemon::tick`].
    pub fn stop(&mut self, now: i64) -> Result<(Vec<Event>, usize), QueueError> {
        self.look_at_all(now)?;
        for job in self.store.jobs()?.iter().filter(|job| job.state == State::Running) {
            self.interrupt(job.id, "the queue's daemon is stopped", now)?;
        }
        let alive = self.store.jobs()?.iter().filter(|job| job.state.may_run()).count();
        Ok((std::mem::take(&mut self.events), alive))
    }

    /// Stops a job that its user has paused or cancelled, without deciding anything about others.
    ///
    /// # Errors
    ///
    /// Those of [`Daemon::tick`].
    pub fn release(&mut self, id: i64, now: i64) -> Result<Vec<Event>, QueueError> {
        self.look(id, now)?;
        let job = self.store.job(id)?;
        if job.state == State::Running && (job.is_paused || job.is_cancelled) {
            let why = if job.is_cancelled { "it is cancelled" } else { "it is paused" };
            self.interrupt(id, why, now)?;
        }
        Ok(std::mem::take(&mut self.events))
    }

    /// True if a process that this daemon started has ended since the last look.
    pub fn has_news(&mut self) -> bool {
        self.children.values_mut().any(|child| child.try_wait().is_ok_and(|status| status.is_some()))
    }

    fn say(&mut self, job: &Job, what: impl Into<String>) {
        self.events.push(Event { job: job.id, name: job.request.name.clone(), what: what.into() });
    }

    fn look_at_all(&mut self, now: i64) -> Result<(), QueueError> {
        for job in self.store.jobs()?.iter().filter(|job| job.state.may_run()) {
            self.look(job.id, now)?;
        }
        Ok(())
    }

    /// Brings the record of a job that may be alive up to date.
    fn look(&mut self, id: i64, now: i64) -> Result<(), QueueError> {
        let mut job = self.store.job(id)?;
        if !job.state.may_run() {
            return Ok(());
        }
        let files = Files::new(&self.folder, id);
        if !process::is_alive(&files.log)? {
            return self.ended(job, &files, now);
        }
        if job.state == State::Starting || job.process.is_none() {
            // The daemon that started it has ended before it could write the process down.
            job.process = process::find(&files.run_file);
            if job.process.is_none() {
                return Ok(());
            }
            if job.state == State::Starting {
                job.state = State::Running;
            }
            self.say(&job, "runs already: another daemon has started it");
        }
        measure(&mut job, now);
        self.store.update(&job)?;
        Ok(())
    }

    /// Writes down how a job's process has ended.
    fn ended(&mut self, mut job: Job, files: &Files, now: i64) -> Result<(), QueueError> {
        measure(&mut job, now);
        let status = self.children.remove(&job.id).and_then(|mut child| child.wait().ok());
        let code = progress::exit_code(&files.run_file).or_else(|| status?.code());
        let was_asked = job.state == State::Stopping;
        let run = &job.request.run;
        job.done = match job.request.unit {
            Unit::Steps => progress::checkpoint(run) as f64,
            Unit::Seconds => progress::checkpoint_seconds(run),
        };
        (job.process, job.since) = (None, now);
        let has_progressed = job.done > job.done_at_start;
        let at = position(&job);
        let what = match code {
            Some(0) => {
                job.state = State::Done;
                job.why = "its training is complete".to_owned();
                job.done = job.request.work.unwrap_or(job.done);
                "done".to_owned()
            }
            Some(code) if EXIT_ERRORS.contains(&code) && !job.is_cancelled => {
                let words = progress::last_words(&files.log).unwrap_or_else(|| format!("exit code {code}"));
                (job.state, job.why) = (State::Failed, words.clone());
                format!("failed: {words}")
            }
            _ if job.is_cancelled => {
                (job.state, job.why) = (State::Cancelled, "cancelled".to_owned());
                format!("cancelled at {at}; its run stays")
            }
            Some(EXIT_INTERRUPTED) => {
                (job.state, job.crashes) = (State::Waiting, 0);
                if !was_asked {
                    job.why = "it was stopped by a signal that the queue did not send".to_owned();
                }
                format!("stopped at {at}: {}", job.why)
            }
            _ if was_asked => {
                job.state = State::Waiting;
                format!("ended; it goes on from {at}: {}", job.why)
            }
            // The daemon ended before it started the process.
            None if job.state == State::Starting => {
                job.state = State::Waiting;
                job.starts = job.starts.saturating_sub(1);
                "was not started: the daemon had ended".to_owned()
            }
            code => {
                job.crashes = if has_progressed { 1 } else { job.crashes + 1 };
                let how = code.map_or("was killed".to_owned(), |code| format!("ended with exit code {code}"));
                let times = job.crashes;
                if times > CRASHES_MAX {
                    let words = progress::last_words(&files.log).unwrap_or_default();
                    job.why = format!("it {how}, {times} times in a row without a new checkpoint: {words}");
                    job.state = State::Failed;
                    format!("failed: {}", job.why)
                } else {
                    let pause = if times == 1 { 0 } else { (1 << (times - 1)).min(BACKOFF_S_MAX) };
                    job.not_before = now + pause;
                    (job.state, job.why) = (State::Waiting, format!("it {how}"));
                    format!("{how}; it goes on from {at}")
                }
            }
        };
        self.store.update(&job)?;
        self.say(&job, what);
        Ok(())
    }

    fn start(&mut self, id: i64, shape: usize, why: &str, now: i64) -> Result<(), QueueError> {
        let mut job = self.store.job(id)?;
        // A command may have changed it since the decision.
        if job.state != State::Waiting || job.is_paused || job.is_cancelled {
            return Ok(());
        }
        let files = Files::new(&self.folder, id);
        let error = |what: &'static str, path: &Path| {
            let path = path.to_owned();
            move |source| QueueError::File { what, path, source }
        };
        std::fs::create_dir_all(&files.folder).map_err(error("create", &files.folder))?;
        let has_begun = progress::has_begun(&job.request.run);
        if !has_begun {
            std::fs::write(&files.config, &job.request.config).map_err(error("write", &files.config))?;
        }
        match std::fs::remove_file(&files.run_file) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(error("remove", &files.run_file)(source));
            }
            _ => {}
        }
        job.done_at_start = job.done;
        (job.state, job.since, job.why) = (State::Starting, now, why.to_owned());
        (job.shape, job.process, job.starts) = (Some(shape), None, job.starts + 1);
        self.store.update(&job)?;
        let command = (self.launcher)(Start { job: &job, shape: &job.request.shapes[shape], files: &files, has_begun });
        let line = format!("--- {}: start {}, {why}", time::rfc3339(now), job.starts);
        match process::start(command, &files.log, &line) {
            Ok(Some((child, process))) => {
                (job.state, job.process) = (State::Running, Some(process));
                self.store.update(&job)?;
                self.children.insert(id, child);
                self.say(&job, why);
            }
            // The next look finds out.
            Ok(None) => self.say(&job, "runs already"),
            Err(error) => {
                (job.state, job.why, job.since) = (State::Failed, error.to_string(), now);
                self.store.update(&job)?;
                self.say(&job, format!("failed: {error}"));
            }
        }
        Ok(())
    }

    fn interrupt(&mut self, id: i64, why: &str, now: i64) -> Result<(), QueueError> {
        let mut job = self.store.job(id)?;
        let Some(process) = job.process.filter(|_| job.state.may_run()) else { return Ok(()) };
        // Written first: a daemon that is killed after the signal must not send it twice, because a
        // second one ends the process without a checkpoint.
        (job.state, job.since, job.why) = (State::Stopping, now, why.to_owned());
        self.store.update(&job)?;
        match process::interrupt(process) {
            Ok(true) => self.say(&job, format!("is asked to stop: {why}")),
            // It has ended; the next look says how.
            Ok(false) => {}
            Err(error) => self.say(&job, error.to_string()),
        }
        Ok(())
    }

    /// The machine now. What others use is measured only if a job asks for it.
    fn machine(&mut self, jobs: &[Job]) -> Machine {
        let mut machine = Machine { cores: self.cores, others: None, pressure: BTreeMap::new() };
        let asks = |job: &Job| !job.state.is_over() && job.request.idle_below.is_some();
        if !jobs.iter().any(asks) {
            self.looked = None;
            return machine;
        }
        let groups: Vec<u32> = jobs.iter().filter_map(|job| Some(job.process?.pid)).collect();
        let look = || Some((Instant::now(), Ticks::now()?, process::ticks_of(&groups)));
        let before = self.looked.filter(|(at, ..)| at.elapsed() >= LOOK_MIN).or_else(|| {
            let first = look();
            std::thread::sleep(LOOK_MIN);
            first
        });
        let now = look();
        if let (Some((_, before, own_before)), Some((_, after, own))) = (before, now) {
            machine.others = others(before, after, own.saturating_sub(own_before));
        }
        machine.pressure = pressures();
        self.looked = now;
        machine
    }
}

/// `step 120`, or `90 s`.
fn position(job: &Job) -> String {
    match job.request.unit {
        Unit::Steps => format!("step {:.0}", job.done),
        Unit::Seconds => format!("{:.0} s", job.done),
    }
}

/// Reads the progress of a job that runs, or has just ended: its work, its speed, and the price of
/// its start.
fn measure(job: &mut Job, now: i64) {
    if job.request.unit == Unit::Seconds {
        if job.state == State::Running {
            job.done = job.done_at_start.max(progress::checkpoint_seconds(&job.request.run));
        }
        return;
    }
    let Some(recorded) = progress::recorded(&job.request.run, job.done_at_start as u64) else { return };
    // Before the first step the file is that of the sitting before.
    if recorded.step as f64 <= job.done_at_start {
        return;
    }
    job.done = recorded.step as f64;
    let (Some(shape), Some(rate)) = (job.shape, recorded.rate) else { return };
    if job.start_s.is_none() && job.state == State::Running {
        let trained_s = (job.done - job.done_at_start) / rate;
        job.start_s = Some(((now - job.since) as f64 - trained_s).max(0.0));
    }
    job.measured.retain(|(known, _)| *known != shape);
    job.measured.push((shape, rate));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::testing::request;
    use crate::job::{Process, Request};

    const NOW: i64 = 1_795_564_800;
    /// Runs until SIGTERM, then leaves the exit code 130, like a run that has written a checkpoint.
    const OBEDIENT: &str = "trap 'printf \"r\\n130\\n\" > \"$1\"; exit 130' TERM; while :; do sleep 0.01; done";

    /// A launcher whose jobs are shell scripts; `$1` is the run file.
    fn script(text: &'static str) -> impl Fn(Start<'_>) -> Command {
        move |start| {
            let mut command = Command::new("sh");
            command.args(["-c", text, "sh"]).arg(&start.files.run_file);
            command
        }
    }

    fn asked(folder: &Path, name: &str) -> Request {
        let shape = Shape { cores: 1, sets: Vec::new(), words: "1 rank".to_owned(), rate: None };
        Request { run: folder.join("runs").join(name), ..request(name, vec![shape]) }
    }

    fn daemon<'a>(folder: &Path, launcher: Launcher<'a>) -> Daemon<'a> {
        Daemon::open(folder, 1, launcher).unwrap().expect("no other daemon")
    }

    /// Ticks at `now` until the job is in `state`.
    fn tick_until(daemon: &mut Daemon<'_>, now: i64, state: State) -> Job {
        for _ in 0..2000 {
            let tick = daemon.tick(now).unwrap();
            if tick.jobs[0].state == state {
                return tick.jobs[0].clone();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("it never is {state:?}: {:?}", daemon.store.jobs());
    }

    #[test]
    fn endings_are_told_apart() {
        for (text, state, why) in [
            ("printf 'r\\n0\\n' > \"$1\"", State::Done, "its training is complete"),
            ("echo error: no room; printf 'r\\n1\\n' > \"$1\"; exit 1", State::Failed, "no room"),
            ("echo usage; exit 2", State::Failed, "usage"),
            ("printf 'r\\n130\\n' > \"$1\"; exit 130", State::Waiting, "a signal that the queue did not send"),
            ("printf 'r\\n70\\n' > \"$1\"; exit 70", State::Waiting, "it ended with exit code 70"),
            ("kill -KILL $$", State::Waiting, "it was killed"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let launcher = script(text);
            let mut daemon = daemon(folder.path(), &launcher);
            let id = daemon.store.add(&asked(folder.path(), "a"), NOW).unwrap();
            daemon.tick(NOW).unwrap();
            while process::is_alive(&Files::new(folder.path(), id).log).unwrap() {
                std::thread::sleep(Duration::from_millis(1));
            }
            daemon.look_at_all(NOW).unwrap();
            let job = daemon.store.job(id).unwrap();
            assert!(job.state == state && job.why.contains(why), "{text}: {job:?}");
            assert_eq!(job.process, None);
        }
    }

    #[test]
    fn crashes_without_progress_are_spaced_and_come_to_an_end() {
        let folder = tempfile::tempdir().unwrap();
        let launcher = script("echo so it went; kill -KILL $$");
        let mut daemon = daemon(folder.path(), &launcher);
        let id = daemon.store.add(&asked(folder.path(), "a"), NOW).unwrap();
        let (mut now, mut pauses) = (NOW, Vec::new());
        loop {
            daemon.tick(now).unwrap();
            while process::is_alive(&Files::new(folder.path(), id).log).unwrap() {
                std::thread::sleep(Duration::from_millis(1));
            }
            daemon.look_at_all(now).unwrap();
            let job = daemon.store.job(id).unwrap();
            if job.state == State::Failed {
                assert!(job.why.contains("11 times in a row without a new checkpoint: so it went"), "{job:?}");
                break;
            }
            pauses.push(job.not_before.max(now) - now);
            assert!(job.not_before <= now || daemon.tick(now).unwrap().decision.actions.is_empty());
            now = job.not_before.max(now);
        }
        assert_eq!(pauses, [0, 2, 4, 8, 16, 32, 64, 128, 256, 512]);
        // With a checkpoint more than at its start it is a new beginning.
        daemon.store.pause(id, false, now).unwrap();
        std::fs::create_dir_all(folder.path().join("runs/a/checkpoints/step-00000040")).unwrap();
        daemon.tick(now).unwrap();
        while process::is_alive(&Files::new(folder.path(), id).log).unwrap() {
            std::thread::sleep(Duration::from_millis(1));
        }
        daemon.look_at_all(now).unwrap();
        let job = daemon.store.job(id).unwrap();
        assert_eq!((job.crashes, job.done, job.state), (1, 40.0, State::Waiting));
    }

    #[test]
    fn another_daemon_finds_the_job_that_runs() {
        let folder = tempfile::tempdir().unwrap();
        let launcher = script(OBEDIENT);
        let mut first = daemon(folder.path(), &launcher);
        let id = first.store.add(&asked(folder.path(), "a"), NOW).unwrap();
        let job = tick_until(&mut first, NOW, State::Running);
        assert_eq!(running(folder.path()), Some(std::process::id()));
        assert!(Daemon::open(folder.path(), 1, &launcher).unwrap().is_none(), "one daemon at a time");
        // It ends where it could not write the process down.
        let mut lost = job.clone();
        (lost.state, lost.process) = (State::Starting, None);
        first.store.update(&lost).unwrap();
        let mut children = std::mem::take(&mut first.children);
        drop(first);
        assert_eq!(running(folder.path()), None);
        let mut second = daemon(folder.path(), &launcher);
        let found = tick_until(&mut second, NOW + 5, State::Running);
        assert_eq!((found.process, found.starts), (job.process, 1));
        // A pause stops it with a checkpoint, once.
        second.store.pause(id, true, NOW + 6).unwrap();
        let events = second.release(id, NOW + 6).unwrap();
        assert!(events[0].what.contains("is asked to stop: it is paused"), "{events:?}");
        assert!(second.release(id, NOW + 6).unwrap().is_empty());
        let stopped = tick_until(&mut second, NOW + 7, State::Waiting);
        assert!(stopped.is_paused && stopped.why == "it is paused", "{stopped:?}");
        children.values_mut().for_each(|child| drop(child.wait()));
        // A daemon that ended before the process was started counts no start.
        let mut never = stopped;
        (never.state, never.starts) = (State::Starting, 2);
        std::fs::remove_file(Files::new(folder.path(), id).run_file).unwrap();
        second.store.update(&never).unwrap();
        second.tick(NOW + 8).unwrap();
        let again = second.store.job(id).unwrap();
        assert_eq!((again.state, again.starts), (State::Waiting, 1));
    }

    #[test]
    fn a_daemon_that_is_stopped_stops_its_jobs_and_cancelled_ones_end() {
        let folder = tempfile::tempdir().unwrap();
        let launcher = script(OBEDIENT);
        let mut daemon = daemon(folder.path(), &launcher);
        let id = daemon.store.add(&asked(folder.path(), "a"), NOW).unwrap();
        tick_until(&mut daemon, NOW, State::Running);
        while daemon.stop(NOW + 1).unwrap().1 > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(daemon.store.job(id).unwrap().state, State::Waiting);
        tick_until(&mut daemon, NOW + 2, State::Running);
        daemon.store.cancel(id, NOW + 3).unwrap();
        let job = tick_until(&mut daemon, NOW + 3, State::Cancelled);
        assert_eq!((job.process, job.starts), (None::<Process>, 2));
    }

    #[test]
    fn others_are_measured_where_a_job_asks_for_an_idle_machine() {
        let folder = tempfile::tempdir().unwrap();
        let launcher = script("true");
        let mut daemon = daemon(folder.path(), &launcher);
        daemon.store.add(&asked(folder.path(), "a"), NOW).unwrap();
        let jobs = daemon.store.jobs().unwrap();
        assert_eq!(daemon.machine(&jobs).others, None);
        let mut idle = jobs;
        idle[0].request.idle_below = Some(20.0);
        let others = daemon.machine(&idle).others.unwrap();
        assert!((0.0..=100.0).contains(&others), "{others}");
    }
}
