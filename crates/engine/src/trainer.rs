//! The training loop: [`train`] runs steps until a limit is reached. It records metrics, evaluates,
//! writes checkpoints and stops a run that diverges.

mod advance;
mod checks;
mod evaluation;
mod periods;
mod rounds;
mod spikes;

use crate::checkpoint::{BackgroundWriter, Event};
use crate::clock::Clock;
use crate::config::{InnerSteps, OnSpike};
use crate::early_stopping::StoppedEarly;
use crate::evaluate::slices;
use crate::health::Suspicion;
use crate::measured::{Kinds, Measured};
use crate::metrics::above_peak::{AbovePeak, Work};
use crate::metrics::{
    EvaluationMetrics, ExpertMetrics, Progress, Recorder, Sitting, StepMetrics, Throughput, TimeLeft,
};
use crate::rank::{StepOutcome, StepSettings};
use crate::recording::{Moments, Recording};
use crate::resume::rate_change;
use crate::schedule::Schedule;
use crate::session::Session;
use crate::shape::compute_dtype;
use crate::snapshot;
use crate::trace::TraceWriter;
use crate::warning::warning;
use crate::watch::Watch;
use crate::{EngineError, Result, world};
use rounds::{RoundEnd, Taken};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use trainyard_comm::Communicator;
use trainyard_data::{Loader, LoaderConfig, Rounds, Samples};
use trainyard_program::StepKind;
use trainyard_tensor::{Purpose, TensorError};

/// The reason for the end of a sitting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// The run reached its limit of steps, tokens or seconds.
    Complete,
    /// The run reached the step of [`Session::until`], and can be resumed.
    Paused,
    /// The run was asked to stop, and can be resumed.
    Interrupted,
}

/// The results of a finished sitting (from start or resumption to its end).
#[derive(Clone, Debug)]
pub struct Summary {
    /// The reason for its end.
    pub ending: Ending,
    /// Steps done, over all sittings.
    pub steps: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Number of passes over each corpus of the training data.
    pub epochs: Vec<f64>,
    /// Set when the run ended because its validation loss no longer fell.
    pub stopped_early: Option<StoppedEarly>,
    /// The last step's loss.
    pub loss: f64,
    /// The last evaluation.
    pub evaluation: Option<EvaluationMetrics>,
    /// Number of skipped steps.
    pub skipped: u64,
    /// Seconds of training in this sitting.
    pub seconds: f64,
    /// Median seconds of a step in this sitting.
    pub step_s_median: f64,
    /// Median tokens per second.
    pub tps_median: f64,
    /// Median model utilisation.
    pub mfu_median: Option<f64>,
    /// Seconds spent waiting for data, as a share of the steps' time.
    pub data_wait_share: f64,
    /// Seconds that rank 0's lanes spent in exchanges with other ranks, as a share of the steps'
    /// time.
    pub comm_share: f64,
    /// The part of `comm_share` that the compute lane waited for.
    pub comm_exposed_share: f64,
    /// With a parameter server: the pulls of all workers from rank 0, by the number of updates that
    /// the pulled parameters lacked.
    pub staleness: Option<Vec<u64>>,
    /// With back-up workers: the pushes that updates of this sitting were made without.
    pub dropped_pushes: Option<u64>,
    /// Seconds from the start of the process to the end of the first step of this sitting.
    pub first_step_done_s: f64,
    /// Median seconds of rank 0's instructions in a step, by kind.
    pub instructions: BTreeMap<String, f64>,
    /// Peak bytes per purpose: measured, predicted.
    pub memory: Vec<(Purpose, usize, usize)>,
    /// Peak bytes in total: measured, predicted.
    pub memory_total: (usize, usize),
}

/// The caller's controls of a training.
#[derive(Clone, Copy)]
pub struct Control<'a> {
    /// Set it to make the run finish its step, write a checkpoint and end.
    pub stop: &'a AtomicBool,
    /// Time at which the process began.
    pub process_start: Instant,
    /// Called from another thread with a message, when a rank does not end after a failure and its
    /// process must be ended.
    pub on_stuck: fn(&str),
}

impl Control<'_> {
    /// True once this rank knows that any rank was asked to stop. A rank that is asked tells the
    /// others outside of all exchanges. Rank 0 decides when the run stops.
    fn is_asked_to_stop(&self, world: &Communicator) -> bool {
        let is_asked = self.stop.load(Ordering::Relaxed);
        if is_asked {
            world.request_stop();
        }
        is_asked || world.stop_requested().is_some()
    }
}

/// Trains until a limit is reached or `control` asks to stop. All ranks run this together.
///
/// A step is: load, forward, backward, clip, update, and at times snapshot (all in the step
/// program); then record, and at times evaluate. A step's checkpoint is submitted before its
/// evaluation.
///
/// Rank 0 makes all decisions that depend on a clock or on `control`. It alone records and shows.
///
/// # Errors
/// [`EngineError::Diverged`]. Every other error is an [`EngineError::Fault`], after which all ranks
/// end.
pub fn train(session: &mut Session, progress: &mut dyn Progress, control: Control<'_>) -> Result<Summary> {
    let deadline = world::deadline(&session.resolved.config);
    let positions = session.rank.positions();
    let watch = Watch::start(&session.world, positions, &session.folder, deadline, control.on_stuck)?;
    let ended = train_steps(session, progress, control);
    ended.map_err(|error| match (error, session.rank.device().as_cuda()) {
        (error @ EngineError::Diverged { .. }, _) => error,
        (EngineError::Tensor(source @ TensorError::Cuda(_)), Some(cuda)) => watch.report(EngineError::Device {
            rank: session.world.rank(),
            device: format!("{cuda:?}"),
            source: source.into(),
        }),
        (error, _) => watch.report(error),
    })
}

fn train_steps(session: &mut Session, progress: &mut dyn Progress, control: Control<'_>) -> Result<Summary> {
    let mut run = Run::open(session, progress, control)?;
    run.progress.begin(run.session.state.step, run.clock.steps);
    if run.owes_evaluation() {
        run.evaluate()?;
    }
    let ending = loop {
        let next = match run.agree()? {
            Next::Step(next) => next,
            Next::End(ending) => break ending,
        };
        let kind = run.session.programs[next.place].kind;
        let outcome = run.step(next)?;
        run.record(&outcome, next)?;
        run.guard_against_divergence(&outcome, kind)?;
        run.compare_replicas(kind)?;
        run.look_for_dead_units(kind)?;
        if run.goes_back && run.go_back()? {
            continue;
        }
        if run.evaluation_due() {
            run.evaluate()?;
        }
    };
    run.finish(ending)
}

/// The next action, the same on every rank.
enum Next {
    Step(NextStep),
    End(Ending),
}

#[derive(Clone, Copy)]
struct NextStep {
    /// Of its program, in [`Session::programs`].
    place: usize,
    /// True if the program ends in a snapshot.
    snapshot: bool,
}

struct Run<'s> {
    session: &'s mut Session,
    progress: &'s mut dyn Progress,
    control: Control<'s>,
    loader: Loader,
    writer: BackgroundWriter,
    /// On rank 0 only.
    recorder: Option<Recorder>,
    trace: Option<TraceWriter>,
    recording: Option<Recording>,
    /// Time that the ranks took to agree on the step that runs.
    agreed: Duration,
    clock: Clock,
    /// The step and time of the last snapshot.
    saved: (u64, Instant),
    /// True if a snapshot was due after a skipped step. It is taken after the next step that is not
    /// skipped.
    owed: bool,
    /// The step after which replicas that train apart meet. The ranks agree there only, so that
    /// no replica waits for another in between.
    round_end: u64,
    /// True once a user was told when a requested stop takes place.
    told_of_stop: bool,
    evaluated: Option<u64>,
    evaluation: Option<EvaluationMetrics>,
    sitting: Sitting,
    kinds: Kinds,
    above_peak: AbovePeak,
    /// The last loss of this rank, and the norm.
    last: [f64; 2],
    /// Number of samples of the step that has just run.
    taken: u64,
    /// The inner steps that each replica has made in the round that has just ended; None if all
    /// make every step.
    made: Option<Vec<u64>>,
    /// The suspicious number of the step that has just run.
    suspicion: Option<Suspicion>,
    /// True once a spike is to end the run.
    is_stopped_by_spike: bool,
    /// True if a spike is to lead back to the last checkpoint.
    goes_back: bool,
    /// The step to which spikes have led back last, and how often.
    returns: (u64, u32),
    /// The step after which the replicas' parameters were last found to be the same.
    agreed_replicas: u64,
    /// The share of dead units that was said last.
    dead_units_said: f64,
    first_step_done_s: Option<f64>,
}

impl<'s> Run<'s> {
    fn open(session: &'s mut Session, progress: &'s mut dyn Progress, control: Control<'s>) -> Result<Run<'s>> {
        let config = &session.resolved.config;
        let loader = loader(session)?;
        let mut store = None;
        if session.is_first() {
            let (opened, notes) = session.open_store()?;
            notes.iter().for_each(|line| progress.note(line));
            store = Some(opened);
        }
        let writer = match store {
            Some(store) if session.world.size() == 1 => BackgroundWriter::new(store)?,
            store => BackgroundWriter::with_others(&session.folder, store, session.world.duplicate("checkpoints")?)?,
        };
        let mut recorder = None;
        if session.is_first() {
            let (opened, notes) = Recorder::open(&session.folder, &config.metrics, session.state.step)?;
            notes.iter().for_each(|line| progress.note(line));
            recorder = Some(opened);
        }
        let rank = session.world.rank();
        let window = config.metrics.profile_steps;
        let trace = config.metrics.profile.then(|| TraceWriter::create(&session.folder, rank, window)).transpose()?;
        let recording = match config.metrics.record.then(|| Recording::open(session)).transpose() {
            Ok(recording) => recording,
            Err(error) => {
                progress.note(&warning(no_record(&error)));
                None
            }
        };
        match (&session.dataset, session.resolved.config.data.warm) {
            (Samples::Text(text), true) => text.read_ahead()?,
            _ => session.dataset.warm(),
        }
        let limits = session.resolved.limits;
        let steps = session.state.schedule_steps;
        let mut left = TimeLeft::new(limits);
        if let Some(steps) = steps {
            left.set_steps(steps);
        }
        let mut clock = Clock {
            schedule: Schedule { steps, ..session.resolved.schedule.clone() },
            steps,
            limits,
            left,
            began: Instant::now(),
            before: session.state.seconds,
            last_step_end: Instant::now(),
            speed_since: (config.update.inner_steps != InnerSteps::BySpeed).then_some((0, 0.0)),
        };
        // A resumed run with another time limit knows its speed already.
        clock.calibrate(&mut session.state);
        if let Some(change) = rate_change(&session.state, &clock.schedule) {
            progress.note(&format!("from step {} on {change}", session.state.step));
        }
        // A step that an earlier sitting evaluated and recorded is not evaluated again.
        let mut evaluated = [recorder.as_ref().and_then(Recorder::last_evaluation).unwrap_or(u64::MAX)];
        session.world.broadcast(&mut evaluated, 0)?;
        let evaluated = Some(evaluated[0]).filter(|step| *step != u64::MAX);
        let saved = (session.state.step, Instant::now());
        let round_end = session.state.step;
        Ok(Run {
            session,
            progress,
            control,
            loader,
            writer,
            recorder,
            trace,
            recording,
            agreed: Duration::ZERO,
            clock,
            saved,
            owed: false,
            round_end,
            told_of_stop: false,
            evaluated,
            evaluation: None,
            sitting: Sitting::default(),
            kinds: Kinds::default(),
            above_peak: AbovePeak::default(),
            last: [f64::NAN; 2],
            taken: 0,
            made: None,
            suspicion: None,
            is_stopped_by_spike: false,
            goes_back: false,
            returns: (0, 0),
            agreed_replicas: saved.0,
            dead_units_said: 0.0,
            first_step_done_s: None,
        })
    }

    /// Broadcasts rank 0's decisions: the next action, the length of the schedule, and the end of
    /// the round where replicas train apart.
    fn agree(&mut self) -> Result<Next> {
        let began = Instant::now();
        let is_asked_to_stop = self.control.is_asked_to_stop(&self.session.world);
        let step = self.session.state.step;
        if step < self.round_end {
            if is_asked_to_stop && !std::mem::replace(&mut self.told_of_stop, true) {
                let end = self.round_end;
                self.progress.note(&format!("asked to stop: the run ends with its round, after step {end}"));
            }
            return Ok(self.next_step(self.snapshot_due()));
        }
        const STEP: u64 = 0;
        const STEP_WITH_SNAPSHOT: u64 = 1;
        const COMPLETE: u64 = 2;
        const INTERRUPTED: u64 = 3;
        const PAUSED: u64 = 4;
        let next = if self.is_complete() {
            COMPLETE
        } else if is_asked_to_stop || self.is_stopped_by_spike {
            INTERRUPTED
        } else if self.session.until.is_some_and(|until| step >= until) {
            PAUSED
        } else if self.snapshot_due() {
            STEP_WITH_SNAPSHOT
        } else {
            STEP
        };
        let round = self.session.resolved.round_steps();
        // A run's last round may be shorter.
        let round_end = ((step / round + 1) * round).min(self.clock.steps.unwrap_or(u64::MAX)).max(step + 1);
        let mut word = [next, self.clock.steps.unwrap_or(u64::MAX), round_end];
        self.session.world.broadcast(&mut word, 0)?;
        self.agreed = began.elapsed();
        let [next, steps, round_end] = word;
        self.round_end = round_end;
        if steps != u64::MAX && self.clock.steps != Some(steps) {
            self.session.state.schedule_steps = Some(steps);
            self.session.state.schedule_seconds = self.clock.limits.seconds;
            (self.clock.schedule.steps, self.clock.steps) = (Some(steps), Some(steps));
        }
        Ok(match next {
            STEP | STEP_WITH_SNAPSHOT => self.next_step(next == STEP_WITH_SNAPSHOT),
            COMPLETE => Next::End(Ending::Complete),
            PAUSED => Next::End(Ending::Paused),
            _ => {
                if let Some(rank) = self.session.world.stop_requested().filter(|&rank| rank > 0) {
                    self.progress.note(&format!("rank {rank} was asked to stop: stopping with a checkpoint"));
                }
                Next::End(Ending::Interrupted)
            }
        })
    }

    /// The next step, with or without a snapshot at its end.
    fn next_step(&self, snapshot: bool) -> Next {
        let step = self.session.state.step + 1;
        let ends_round = step == self.round_end;
        let outer = match (&self.session.resolved.apart, self.session.programs[0].kind) {
            (Some(apart), _) => apart.outer_step(step, ends_round && Some(step) == self.clock.steps),
            (None, StepKind::Stale) => (ends_round || snapshot).then_some(0),
            _ => None,
        };
        Next::Step(NextStep { place: self.session.program_place(step - 1, outer, snapshot), snapshot })
    }

    fn is_complete(&self) -> bool {
        let step = self.session.state.step;
        // A run with only a time limit ends at the computed end of its schedule, or when the time
        // is over.
        let by_steps = self.clock.limits.steps.or(self.clock.steps).is_some_and(|steps| step >= steps);
        let by_clock = self.clock.limits.seconds.is_some_and(|seconds| self.clock.elapsed() >= seconds);
        by_steps || by_clock || self.is_stopped_early()
    }

    /// True if the validation loss has not fallen for as many evaluations as the configured
    /// patience. All ranks have the same losses.
    fn is_stopped_early(&self) -> bool {
        let patience = self.session.resolved.config.evaluation.early_stopping_patience;
        self.session.state.early_stopping.is_over(patience)
    }

    /// True if a resumed run must still evaluate the step that it starts from, for early stopping.
    /// The evaluation is missing because checkpoints are written before it.
    fn owes_evaluation(&self) -> bool {
        let state = &self.session.state;
        let counts = self.session.resolved.config.evaluation.early_stopping_patience.is_some();
        counts && state.step > 0 && self.evaluation_due() && state.early_stopping.evaluated != Some(state.step)
    }

    /// True if the next step must end in a snapshot.
    fn snapshot_due(&self) -> bool {
        let section = &self.session.resolved.config.checkpoint;
        let by_steps = section.interval_steps.is_some_and(|n| (self.session.state.step + 1).is_multiple_of(n));
        // Inside a round the ranks do not agree on a time.
        let is_agreed = self.session.state.step >= self.round_end;
        let by_time = is_agreed && section.interval_seconds.is_some_and(|s| self.saved.1.elapsed().as_secs_f64() >= s);
        // A snapshot precedes each evaluation: the evaluation takes time and may fail, and the best
        // checkpoint must exist to be kept.
        by_steps || by_time || self.owed || self.evaluates_after(self.session.state.step + 1)
    }

    fn evaluation_due(&self) -> bool {
        self.evaluates_after(self.session.state.step)
    }

    fn evaluates_after(&self, step: u64) -> bool {
        let interval = self.session.resolved.config.evaluation.interval_steps;
        self.session.validates() && interval.is_some_and(|n| step.is_multiple_of(n))
    }

    /// Executes the step program.
    fn step(&mut self, NextStep { place, snapshot }: NextStep) -> Result<StepOutcome> {
        self.begin_period();
        let session = &mut *self.session;
        let settings = StepSettings {
            step: session.state.step,
            rate_factor: self.clock.schedule.factor(session.state.step),
            clip_norm: session.resolved.optimizer.clip_norm,
        };
        let program = &session.programs[place];
        let apart = program.kind.is_apart();
        let (loader, writer, progress) = (&mut self.loader, &mut self.writer, &mut *self.progress);
        let copies = session.copies_state;
        let taken = Taken::of_next(session);
        let samples = session.state.samples + taken.samples;
        let deviations = session.resolved.config.health.spike_deviations;
        let on_spike = session.resolved.config.health.on_spike;
        let (skips, rolls_back) = (on_spike != OnSpike::Warn, on_spike == OnSpike::RollBack);
        let limits = session.state.history.limits(deviations).filter(|_| skips);
        session.rank.core(|core| core.skip_above = limits);
        let mut state = session.state.clone();
        state.seconds = self.clock.elapsed();
        let rate_next = Some(self.clock.schedule.learning_rate(state.step + 1));
        state.learning_rate_next = rate_next;
        session.rank.set_participation(taken.participation);
        let ending = RoundEnd::after(&session.world, program, &session.resolved, &state);
        let mut following = None;
        let outcome = session.rank.execute(
            program,
            settings,
            |device, model| Ok(model.batch(device, &slices(&loader.next()?))?),
            |rank, outcome| {
                state.advance(outcome, rank, samples, deviations);
                if let Some(ending) = &ending {
                    state.round = following.insert(ending.next()?).clone();
                }
                // Replicas that train apart skip steps by themselves, and write together.
                if state.skipped_in_a_row > 0 && !apart || rolls_back && outcome.spike {
                    // These weights may be the cause of skipped steps, so no good checkpoint is
                    // deleted to make room for them.
                    return Ok(());
                }
                // The previous checkpoint must be written first, so that there is never a second
                // copy of the state.
                report(writer.wait_for_it()?, &mut *progress);
                report(writer.submit(snapshot::take(rank, &state, copies)?)?, &mut *progress);
                if !copies || rank.keeps_state_in_a_tier() {
                    report(writer.wait_for_it()?, &mut *progress);
                }
                Ok(())
            },
        )?;
        self.suspicion = session.state.advance(&outcome, &session.rank, samples, deviations);
        session.state.learning_rate_next = rate_next;
        self.taken = taken.samples;
        self.made = ending.as_ref().map(RoundEnd::made);
        // The ranks have agreed on the next round in the snapshot, if there is one.
        let next_round = match &ending {
            Some(ending) if following.is_none() => Some(ending.next()?),
            _ => following,
        };
        let ended = next_round.zip(ending.map(|ending| ending.round));
        if snapshot {
            self.owed = session.state.skipped_in_a_row > 0 && !apart || rolls_back && outcome.spike;
            if !self.owed {
                self.saved = (session.state.step, Instant::now());
            }
        }
        session.rank.suffer_flip(session.world.rank(), session.state.step)?;
        match ended {
            Some((next, ended)) => self.begin_round(&ended, next)?,
            None if taken.takes_part() => self.time_inner_step(outcome.computed.as_secs_f64()),
            None => {}
        }
        self.begin_batch()?;
        Ok(outcome)
    }

    /// Computes the step's metrics, records them and shows them.
    fn record(&mut self, outcome: &StepOutcome, NextStep { place, .. }: NextStep) -> Result<()> {
        let now = Instant::now();
        let last_end = std::mem::replace(&mut self.clock.last_step_end, now);
        let step_s = (now - last_end).as_secs_f64();
        let session = &mut *self.session;
        session.state.seconds = self.clock.elapsed();
        self.first_step_done_s.get_or_insert_with(|| self.control.process_start.elapsed().as_secs_f64());
        let step = session.state.step;
        if let Some(note) = &outcome.note {
            self.progress.note(&format!("step {step}: {note}"));
        }
        match self.suspicion.take() {
            Some(suspicion) => self.react(step, suspicion)?,
            None => self.say_repetition(step)?,
        }
        let session = &mut *self.session;
        if outcome.skipped && !outcome.spike {
            let scaler = session.rank.scaler();
            let note = skip_note(step, outcome, scaler.scale());
            // A dynamic loss scale overflows now and then by design.
            self.progress.note(&if scaler.is_dynamic() { note } else { warning(note) });
        } else if !outcome.skipped && !outcome.waits_for_round() {
            self.last = [outcome.loss, outcome.gradient_norm];
        }
        let [loss, grad_norm] = self.shown(outcome);
        let session = &mut *self.session;
        let dtype = compute_dtype(&session.resolved);
        // A step that this rank left out must not look like one that was faster than the machine.
        let flops = if outcome.late { 0.0 } else { session.period(step - 1).flops_per_token * outcome.tokens as f64 };
        let tokens = if outcome.waits_for_round() { 0 } else { outcome.tokens };
        let work = Work { tokens, flops, seconds: step_s };
        let Throughput { tps, tflops, mfu } = self.throughput(work);
        let session = &mut *self.session;
        let usage = session.rank.device().pool().usage();
        let mem_peak: BTreeMap<String, u64> = Purpose::ALL
            .iter()
            .filter(|purpose| usage.peak(**purpose) > 0)
            .map(|purpose| (purpose.name().to_owned(), usage.peak(*purpose) as u64))
            .collect();
        let metrics = StepMetrics {
            step,
            loss,
            lr: session.resolved.optimizer.learning_rate * self.clock.schedule.factor(step - 1),
            grad_norm,
            tokens: session.state.tokens,
            epoch: session.dataset.passes(session.position()),
            tps,
            images_per_s: session.resolved.images.as_ref().map(|images| tps / images.positions() as f64),
            tflops,
            mfu,
            step_s,
            data_wait_s: outcome.data_wait.as_secs_f64(),
            comm_s: outcome.comm.as_secs_f64(),
            comm_exposed_s: outcome.comm_exposed.as_secs_f64(),
            mem_peak_bytes: usage.peak_total() as u64,
            mem_peak,
            mem_reserved_bytes: usage.reserved_peak() as u64,
            predicted_step_s: session.time.as_ref().ok().map(|time| time.step_s),
            predicted_mem_peak_bytes: Some(session.prediction.memory.peak_total() as u64),
            loss_scale: (dtype == trainyard_tensor::DType::F16).then(|| session.rank.scaler().scale()),
            drift: outcome.drift,
            inner_steps: self.made.clone(),
            staleness: outcome.staleness.clone(),
            dropped_pushes: outcome.dropped_pushes,
            late: outcome.late,
            sparsity: outcome.sparsity.share(),
            penalty: outcome.penalty,
            trained_parameters: session.trained_parameters(step - 1),
            experts: outcome.routing.as_ref().and_then(ExpertMetrics::new),
            skipped: outcome.skipped,
        };
        if let Some(recorder) = &mut self.recorder
            && let Some(said) = recorder.step(&metrics)?
        {
            self.progress.note(&said);
        }
        let program = &session.programs[place];
        if !outcome.late {
            self.kinds.add(program, &outcome.spans);
        }
        if let Some(trace) = &mut self.trace {
            trace.step(step, program, &outcome.spans)?;
        }
        let moments = Moments { last_end, agreed: self.agreed, end: now };
        if let Some(recording) = &mut self.recording
            && let Err(error) = recording.step(step, place, outcome, moments)
        {
            self.recording = None;
            self.progress.note(&warning(no_record(&error)));
        }
        // Others learn of a new length of the schedule when the ranks agree next.
        if session.is_first() && step >= self.round_end {
            self.clock.calibrate(&mut session.state);
        }
        let left = self.clock.left.update(step, step_s, self.clock.elapsed());
        self.progress.step(&metrics, self.clock.steps, left);
        self.sitting.add(&metrics);
        report(self.writer.poll()?, self.progress);
        Ok(())
    }

    fn throughput(&mut self, work: Work) -> Throughput {
        let dtype = compute_dtype(&self.session.resolved);
        let Run { session, progress, clock, above_peak, .. } = self;
        let peak = session.peak_flops(dtype);
        let measure = || {
            let again = session.measure_peaks_again()?;
            if session.peaks.as_ref().is_some_and(|before| again.flops(dtype) > before.flops(dtype)) {
                session.peaks = Some(again);
            }
            clock.last_step_end = Instant::now();
            Ok(session.peak_flops(dtype))
        };
        above_peak.rates(work, peak, measure, |text| progress.note(text))
    }

    /// Stops a run after too many skipped steps in a row. The checkpoint from before them stays.
    ///
    /// Replicas that train apart skip steps by themselves. They decide together when they meet: the
    /// run ends if one of them has skipped too many, or has met a spike that is to end it.
    fn guard_against_divergence(&mut self, outcome: &StepOutcome, kind: StepKind) -> Result<()> {
        let mut skipped = self.session.state.skipped_in_a_row;
        match kind {
            // The workers of a server have the same counts once they have all updates.
            StepKind::Synchronous | StepKind::Drained => {}
            StepKind::Inner | StepKind::Stale => return Ok(()),
            // Fragments have outer steps inside a round.
            StepKind::Outer if self.session.state.step < self.round_end => return Ok(()),
            StepKind::Outer => {
                let world = &self.session.world;
                let mut all = vec![0; 2 * world.size()];
                world.all_gather(&[skipped, u64::from(self.is_stopped_by_spike)], &mut all)?;
                skipped = all.iter().step_by(2).copied().max().unwrap_or(skipped);
                self.is_stopped_by_spike = all.iter().skip(1).step_by(2).any(|stops| *stops != 0);
            }
        }
        let limit = self.session.resolved.config.training.skipped_steps_max;
        if skipped < limit.max(1) {
            return Ok(());
        }
        let (step, loss) = (self.session.state.step, outcome.loss);
        self.progress.end();
        if let Some(recorder) = &mut self.recorder {
            recorder.end()?;
        }
        report(self.writer.wait_for_it()?, self.progress);
        // All steps since the last update were skipped, so the weights of that update are suspect.
        let kept = match self.session.is_first() {
            true => crate::checkpoint::set_aside(&self.session.folder, step - skipped)?.to_string(),
            false => String::new(),
        };
        Err(EngineError::Diverged { step, skipped, loss, kept })
    }

    /// Writes the last checkpoint, runs the last evaluation, and returns the sitting's summary.
    fn finish(mut self, mut ending: Ending) -> Result<Summary> {
        let step = self.session.state.step;
        if self.saved.0 != step || step == 0 {
            report(self.writer.wait_for_it()?, self.progress);
            let taken = snapshot::take(&self.session.rank, &self.session.state, self.session.copies_state)?;
            report(self.writer.submit(taken)?, self.progress);
            if !self.session.copies_state {
                report(self.writer.wait_for_it()?, self.progress);
            }
            self.saved = (step, Instant::now());
        }
        let evaluate = ending != Ending::Interrupted && self.evaluated != Some(step);
        if evaluate && self.session.validates() && !self.evaluate()? {
            ending = Ending::Interrupted;
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.end()?;
        }
        report(self.writer.finish()?, self.progress);
        self.progress.end();
        let usage = self.session.rank.device().pool().usage();
        let predicted = &self.session.prediction.memory;
        let memory = Purpose::ALL.map(|p| (p, usage.peak(p), predicted.peak(p)));
        let memory: Vec<_> = memory.into_iter().filter(|(_, measured, predicted)| measured + predicted > 0).collect();
        let step_s_median = self.sitting.step_s.median().unwrap_or(0.0);
        let measured = Measured {
            steps: self.sitting.steps,
            step_s: step_s_median,
            instructions: self.kinds.medians(),
            mem_peak_bytes: usage.peak_total(),
            mem_peak: memory.iter().map(|(purpose, measured, _)| (purpose.name().to_owned(), *measured)).collect(),
        };
        if self.session.is_first()
            && measured.steps > 0
            && let Err(error) = self.session.write_plan(Some(&measured))
        {
            // The run is done and must not fail because its measurements cannot be written.
            self.progress.note(&warning(format_args!("what was measured is not kept: {error}")));
        }
        Ok(Summary {
            ending,
            steps: step,
            tokens: self.session.state.tokens,
            epochs: self.session.epochs(),
            stopped_early: StoppedEarly::of(self.session),
            loss: self.last[0],
            evaluation: self.evaluation,
            skipped: self.session.state.skipped,
            seconds: self.clock.began.elapsed().as_secs_f64(),
            step_s_median,
            tps_median: self.sitting.tps.median().unwrap_or(0.0),
            mfu_median: self.sitting.mfu.median(),
            data_wait_share: self.sitting.data_wait_share(),
            comm_share: self.sitting.comm_share(),
            comm_exposed_share: self.sitting.comm_exposed_share(),
            staleness: self.sitting.staleness.clone(),
            dropped_pushes: self.sitting.dropped_pushes,
            first_step_done_s: self.first_step_done_s.unwrap_or(0.0),
            instructions: measured.instructions,
            memory,
            memory_total: (usage.peak_total(), predicted.peak_total()),
        })
    }
}

/// A loader of the samples that follow those consumed.
fn loader(session: &Session) -> Result<Loader> {
    let config = &session.resolved.config;
    let batch = session.resolved.batches().of(session.state.step);
    let settings = LoaderConfig {
        micro_batch_size: batch.micro,
        workers: config.data.workers,
        prefetch: config.data.prefetch,
        accumulation_steps: batch.accumulation,
        rank: session.rank.data_place().0,
        world: batch.data_parallel_degree,
    };
    Ok(match &session.state.round {
        Some(round) => {
            let rounds = Rounds { steps: round.inner_steps.clone(), done: session.state.step - round.begin };
            Loader::in_rounds(session.dataset.clone(), settings, rounds, session.position())?
        }
        None => Loader::new(session.dataset.clone(), settings, session.position())?,
    })
}

/// A sentence about a record that could not be written.
fn no_record(error: &trainyard_record::RecordError) -> String {
    format!("this run is no longer recorded for `trainyard doctor`: {error}")
}

fn skip_note(step: u64, outcome: &StepOutcome, scale: f64) -> String {
    let what = match (outcome.loss.is_finite(), outcome.gradient_norm.is_finite()) {
        (false, _) => "the loss",
        (true, false) => "a gradient",
        (true, true) => "what a product of eight bits rounds",
    };
    let scale = if scale > 1.0 { format!("; loss scale now {scale}") } else { String::new() };
    format!("step {step}: {what} is not finite, the update was skipped{scale}")
}

fn report(events: Vec<Event>, progress: &mut dyn Progress) {
    for event in events {
        match event {
            Event::Written(written) => {
                progress.note(&format!("checkpoint written: {}", written.path.display()));
                if let Err(error) = written.keep_time() {
                    progress.note(&warning(format_args!("the time of the checkpoint is not kept: {error}")));
                }
            }
            Event::Best { step, loss } => progress.note(&format!("best so far: loss {loss:.4} at step {step}")),
        }
    }
}
