//! Sets up a run before training: folder, tokenizer, data, model, programs, prediction, device and
//! rank. [`Session::create`] begins a new run, [`Session::resume`] an existing one.

use crate::checkpoint::{self, Checkpoint, CheckpointStore, Choice, Retention};
use crate::collectives;
use crate::config::{Config, CudaGraphs, DeviceKind, Inputs, ModelSource, Pretrained, Resolved};
use crate::consolidation;
use crate::corpora::Corpora;
use crate::distill;
use crate::early_stopping::EarlyStopping;
use crate::images::{HeldBack, ImageCorpora};
use crate::limit::{self, Copies};
use crate::links::Links;
use crate::measured::Measured;
use crate::peaks::Peaks;
use crate::periods::{self, Period};
use crate::predict::{StepNeeds, TimePrediction};
use crate::pretrained;
use crate::rank::{self, Rank, RankSettings};
use crate::resume::{self, GoingOn};
use crate::room;
use crate::rounds::Round;
use crate::same_on_all_ranks;
use crate::shape::{self, model_spec};
use crate::snapshot::{self, RunState};
use crate::state::{Holding, does_not_fit};
use crate::tier::Tiers;
use crate::trained::{find_checkpoint, load_weights, spec_text};
use crate::warning::warning;
use crate::world::{first_then_others, from_first, patient, ranks_here};
use crate::{EngineError, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use trainyard_comm::Communicator;
use trainyard_data::{IndexedTokens, Position, Samples, Tokenizer};
use trainyard_model::{Model, ModelSpec};
use trainyard_program::{Program, StepKind};
use trainyard_record::programs::Predicted;
use trainyard_tensor::cpu::{Cpu, Isa};
use trainyard_tensor::{DType, Device};

/// Names of files in a run's folder.
pub mod files {
    /// The configuration, usable as one again.
    pub const CONFIG: &str = "config.toml";
    /// The tokenizer.
    pub const TOKENIZER: &str = "tokenizer.json";
    /// Unchanged copy of the pretrained model's generation settings.
    pub const GENERATION: &str = "generation_config.json";
    /// The model's description.
    pub const MODEL: &str = "model.json";
    /// The step program's summary and its price.
    pub const PLAN: &str = "plan.json";
    /// The folder of offloaded state, while the run lasts.
    pub const OFFLOAD: &str = "offload";
}

/// A run that is ready to train.
pub struct Session {
    /// The run's folder.
    pub folder: PathBuf,
    /// The configuration.
    pub resolved: Resolved,
    /// The tokenizer; None for images.
    pub tokenizer: Option<Tokenizer>,
    /// Training samples.
    pub dataset: Samples,
    /// Validation text.
    pub validation: Vec<IndexedTokens>,
    /// Validation images.
    pub held_back: Vec<HeldBack>,
    /// The names of the validation texts or of the sets of images.
    pub validation_names: Vec<String>,
    /// Communicator of all ranks of the run, for exchanges outside of steps.
    pub world: Communicator,
    /// This rank, which trains.
    pub rank: Rank,
    /// The programs of a step: without and with a snapshot at its end. Where replicas train apart,
    /// these are the programs of an inner step, and those of an outer step follow. Where the codec
    /// of gradients has a warm-up, the programs of its steps follow in the same order. With a
    /// schedule of freezing there are two for each period. Those of the stages of a batch warm-up
    /// follow all of these, in the same order each.
    pub programs: Vec<Program>,
    /// The periods of a schedule of freezing; one without.
    pub periods: Vec<Period>,
    /// Predicted memory and cost of a step.
    pub prediction: StepNeeds,
    /// True if checkpoints are written from a copy while training goes on.
    pub copies_state: bool,
    /// Measured peaks of this host on the threads of all its ranks, or of rank 0's GPU. Known on
    /// rank 0 only.
    pub peaks: Option<Peaks>,
    /// Predicted time of a step, or the reason why there is no prediction.
    pub time: std::result::Result<TimePrediction, String>,
    /// Progress of the run.
    pub state: RunState,
    /// Seconds of an inner step of each replica, in place of measured ones. For tests.
    pub inner_step_s: Option<Vec<f64>>,
    /// The step after which a sitting ends with a checkpoint and an evaluation, before the run's
    /// own limit. The schedule stays that of the whole run.
    pub until: Option<u64>,
}

impl Session {
    /// Begins a new run in a new folder. `note` receives messages for the user. All ranks of
    /// `world` call this together, like all functions here.
    pub fn create(config: &Config, world: Communicator, mut note: impl FnMut(&str)) -> Result<Session> {
        same_on_all_ranks::check(config, &world)?;
        let (resolved, data) = first_then_others(&world, || resolve(config, &world, &mut note))?;
        let folder = from_first(&world, || Ok(new_folder(&resolved)?.into_os_string().into_encoded_bytes()))?;
        let folder =
            PathBuf::from(String::from_utf8(folder).map_err(|_| does_not_fit("the run's folder is not UTF-8"))?);
        let is_first = world.rank() == 0;
        let make = || {
            let mut session = Session::build(folder.clone(), resolved, data, world, &mut note)?;
            session.load_pretrained(&mut note)?;
            session.check_room(&mut note)?;
            if session.is_first() {
                session.write_files()?;
            }
            Ok(session)
        };
        make().inspect_err(|_| {
            if is_first {
                // Nothing has begun, so the folder is removed if it is empty.
                let _ = std::fs::remove_dir(&folder);
            }
        })
    }

    /// The configuration of a resumed run, overrides included.
    ///
    /// # Errors
    /// If the folder is not that of a run, an override has no effect on a resumed run, or the model
    /// is not the run's.
    pub fn configuration(going_on: &GoingOn<'_>) -> Result<Config> {
        resume::configuration(going_on)
    }

    /// Resumes a run from one of its checkpoints, which any number of ranks may have written.
    /// Everything is checked and loaded before anything in the folder changes.
    ///
    /// # Errors
    /// Those of [`Session::configuration`] and [`Session::create`]; a checkpoint that is missing,
    /// does not fit, or lies behind the requested end.
    pub fn resume(going_on: &GoingOn<'_>, world: Communicator, mut note: impl FnMut(&str)) -> Result<Session> {
        let folder = going_on.folder;
        let config = Session::configuration(going_on)?;
        same_on_all_ranks::check(&config, &world)?;
        let (resolved, data) = first_then_others(&world, || resolve(&config, &world, &mut note))?;
        let mut session = Session::build(folder.to_owned(), resolved, data, world, &mut note)?;
        let from = from_first(&session.world, || {
            // Opening removes the remains of a crash, and restores a checkpoint whose replacement
            // was interrupted.
            let (_store, repairs) = session.open_store()?;
            repairs.iter().for_each(|line| note(line));
            let found = find_checkpoint(folder, going_on.checkpoint, &mut note)?;
            if let Some(found) = &found {
                resume::check_end(&session.resolved, &snapshot::read_state(&found.checkpoint)?)?;
            }
            Ok(found.map_or_else(Vec::new, |found| found.step.to_le_bytes().to_vec()))
        })?;
        match from.try_into().ok().map(u64::from_le_bytes) {
            // Rank 0 has verified it.
            Some(step) => {
                if session.rank.model().has_frozen() {
                    // Checkpoints do not have what is not trained.
                    session.load_pretrained(&mut note)?;
                }
                session.restore(&checkpoint::open_step(folder, step)?, &mut note)?;
                note(&format!("resumed at step {}", session.state.step));
            }
            None => {
                note("no checkpoint yet: starting from the beginning");
                session.load_pretrained(&mut note)?;
            }
        }
        session.check_room(&mut note)?;
        let nothing_left = resume::nothing_left(&session.resolved, &session.state);
        nothing_left.iter().for_each(|why| note(&warning(why)));
        from_first(&session.world, || {
            let (mut store, _) = session.open_store()?;
            if going_on.checkpoint != Choice::Latest {
                resume::set_aside(folder, session.state.step, &mut store, &mut note)?;
            }
            if let Some(best) = store.forget_best_after(session.state.step)? {
                note(&format!(
                    "the best so far, loss {:.4} at step {}, lies behind and is forgotten",
                    best.loss, best.step
                ));
            }
            if nothing_left.is_none() {
                let model = session.rank.model().spec().expect("a run's model is of a built-in family");
                resume::keep(going_on, &session.resolved, model, &mut note)?;
            }
            Ok(Vec::new())
        })?;
        Ok(session)
    }

    /// Opens the run's checkpoints for writing. Returns a line for each repair.
    pub(crate) fn open_store(&self) -> Result<(CheckpointStore, Vec<String>)> {
        let checkpoint = &self.resolved.config.checkpoint;
        let keep_best = checkpoint.keep_best.unwrap_or(self.resolved.validation);
        Ok(CheckpointStore::open(&self.folder, Retention { keep_last: checkpoint.keep_last, keep_best })?)
    }

    fn build(
        folder: PathBuf,
        resolved: Resolved,
        data: Data,
        world: Communicator,
        note: &mut impl FnMut(&str),
    ) -> Result<Session> {
        if resolved.parallel.ranks != world.size() {
            return Err(does_not_fit(format!(
                "parallel.ranks is {}, but {} ranks were started",
                resolved.parallel.ranks,
                world.size()
            )));
        }
        let spec = model_spec(&resolved)?;
        crate::shape::model_notes(&resolved, &spec).iter().for_each(|line| note(line));
        let Opened { tokenizer, dataset, validation, held_back, validation_names } = data.opened(&resolved, &spec)?;
        let own = world.rank() as u32;
        let model = shape::model_of(&resolved, spec.clone(), own)?;
        let batch = shape::batch_shape(&resolved, &model);
        let (lowered, mut programs) = periods::step_programs(&resolved, &spec, &model, own)?;
        for stage in &resolved.batch_stages {
            programs.extend(periods::step_programs(&resolved.with_batch(stage.batch), &spec, &model, own)?.1);
        }
        let choice = collectives::choose(&resolved, &world)?;
        let settings = RankSettings { way: choice.way, ..shape::rank_settings(&resolved) };
        let prediction = lowered.predict(shape::model_of(&resolved, spec.clone(), own)?, &batch, &settings)?;
        limit::check(&resolved, &spec, world.rank() as u32, &prediction)?;
        if let Some(doubt) =
            limit::check_machine(&resolved, &spec, world.rank() as u32, &prediction, ranks_here(&world))?
        {
            note(&warning(doubt));
        }
        if let Some(doubt) =
            crate::device::crowding(&resolved, if world.backend() == "local" { world.size() } else { 1 })
        {
            note(&warning(doubt));
        }

        let device = crate::device::open(&resolved, Some(&world), Some(&prediction))?;
        crate::device::check_host(&prediction, ranks_here(&world))?;
        if let Some(doubt) = device.as_cuda().and_then(|cuda| crate::device::untried(cuda, world.size())) {
            note(&warning(doubt));
        }
        if let Some(line) = crate::device::attention(&device) {
            note(&line);
        }
        if let Some(why) = choice.why {
            note(&why);
        }
        if let Some(line) = fp8(&resolved, &model) {
            note(&line);
        }
        if let Some(line) = int8(&resolved, &model) {
            note(&line);
        }
        if let Some(line) = graphs(&resolved, lowered.priced(), &model)? {
            note(&line);
        }
        let copies = limit::copies(&resolved, &prediction, ranks_here(&world));
        if let Copies::No(why) = &copies {
            note(why);
        }
        // All ranks copy or none does, because a rank that waits for its checkpoint holds up the
        // others.
        let mut fit = vec![0; world.size()];
        world.all_gather(&[u32::from(copies == Copies::Fit)], &mut fit)?;
        let copies_state = fit.iter().all(|fit| *fit == 1);
        if prediction.host_memory.peak_total() > 0 {
            note(&format!("offloaded to the host: {}", crate::device::pinned(&prediction)));
        }
        let peaks = measure_peaks(&world, &resolved, &device)?;
        periods::notes(&model, &lowered.periods).iter().for_each(|line| note(line));
        if !model.adapters().is_empty()
            && !matches!(resolved.model, ModelSource::HuggingFace { load_weights: true, .. })
        {
            note(&warning("adapters on weights that nobody has trained: name a Hugging Face folder as model.path"));
        }
        if resolved.config.parallel.hierarchical_sums {
            world.sum_by_nodes()?;
        }
        let links = Links::by(choice.way, &world, lowered.whole(), &device)?;
        let tiers = tiers(&resolved, lowered.whole(), &device, &folder)?;
        let mut rank = Rank::with_tiers(&device, model, Holding::of(lowered.whole()), tiers, links, &settings)?;
        distill::load(&rank, &resolved.config.distillation, note)?;
        consolidation::load(&mut rank, &resolved.config.consolidation, note)?;
        if !rank.tiers_are_direct() {
            note(&warning(
                "no direct I/O where offloaded state lies: it passes through the page cache, which is memory that no limit counts",
            ));
        }
        let state = RunState {
            step: 0,
            updates: 0,
            averaged: 0,
            period_updates: Vec::new(),
            skipped_in_a_row: 0,
            skipped: 0,
            samples: 0,
            tokens: 0,
            seconds: 0.0,
            schedule_steps: resolved.schedule.steps,
            schedule_seconds: None,
            learning_rate_next: None,
            scaler: settings.scaler,
            amax_history: None,
            early_stopping: EarlyStopping::default(),
            history: Default::default(),
            round: resolved
                .apart
                .and_then(|apart| Round::first(0, &resolved.config.update.inner_steps, apart.every, rank.replica().1)),
            dataset: dataset.fingerprint(),
            tokenizer: tokenizer.as_ref().map_or_else(String::new, |tokenizer| tokenizer.fingerprint().to_owned()),
        };
        Ok(Session {
            folder,
            resolved,
            tokenizer,
            dataset,
            validation,
            held_back,
            validation_names,
            world,
            rank,
            programs,
            periods: lowered.periods,
            prediction,
            copies_state,
            peaks,
            time: Err("no profile of this machine: run `trainyard calibrate`".to_owned()),
            state,
            inner_step_s: None,
            until: None,
        })
    }

    /// The place in [`Session::programs`] of the program of step `step`, from 0: number `outer` of
    /// [`shape::outer_strategies`], or the common one, with or without a snapshot at its end.
    pub(crate) fn program_place(&self, step: u64, outer: Option<usize>, snapshot: bool) -> usize {
        let place = 2 * (periods::at(&self.periods, step) + outer.map_or(0, |number| 1 + number));
        let place = place + usize::from(snapshot);
        let batches = self.resolved.batches();
        let of_batch = self.programs.len() / batches.all().count();
        let warms_up = step < self.resolved.compression.warmup_steps;
        let batch = batches.stage(step).map_or(0, |stage| 1 + stage);
        place + if warms_up { of_batch / 2 } else { 0 } + batch * of_batch
    }

    /// The place of the program by which steps are priced: of the period that computes the most.
    pub fn priced(&self) -> usize {
        2 * periods::dearest(&self.periods)
    }

    fn check_room(&self, note: &mut impl FnMut(&str)) -> Result<()> {
        if self.is_first()
            && let Some(doubt) = room::check(self)?
        {
            note(&warning(doubt));
        }
        Ok(())
    }

    fn load_pretrained(&mut self, note: &mut impl FnMut(&str)) -> Result<()> {
        if let ModelSource::HuggingFace { path, load_weights: true } = &self.resolved.model {
            let adapter = self.resolved.config.fine_tuning.from.as_deref();
            for line in load_weights(&mut self.rank, path, adapter)? {
                note(&line);
            }
            note(&format!("weights loaded from {}", path.display()));
        }
        Ok(())
    }

    /// The step of the run's newest checkpoint, the same on every rank; None if there is none. What
    /// is being written must have been written.
    pub(crate) fn last_checkpoint(&self, note: &mut impl FnMut(&str)) -> Result<Option<u64>> {
        let found = from_first(&self.world, || {
            let found = find_checkpoint(&self.folder, Choice::Latest, note)?;
            Ok(found.map_or_else(Vec::new, |found| found.step.to_le_bytes().to_vec()))
        })?;
        Ok(found.try_into().ok().map(u64::from_le_bytes))
    }

    /// Goes back to the checkpoint of `step`. The samples that follow are those after the ones
    /// consumed by now.
    pub(crate) fn go_back(&mut self, step: u64, note: &mut impl FnMut(&str)) -> Result<()> {
        let samples = self.state.samples;
        self.restore(&checkpoint::open_step(&self.folder, step)?, note)?;
        self.state.samples = samples;
        Ok(())
    }

    fn restore(&mut self, checkpoint: &Checkpoint, note: &mut impl FnMut(&str)) -> Result<()> {
        let state = snapshot::restore(&mut self.rank, checkpoint)?;
        snapshot::left_behind(&self.rank, checkpoint).iter().for_each(|line| note(&warning(line)));
        for (what, then, now) in
            [("data", &state.dataset, &self.state.dataset), ("tokenizer", &state.tokenizer, &self.state.tokenizer)]
        {
            if then != now {
                note(&warning(format_args!(
                    "the {what} changed since the checkpoint: the run goes on, but not as it would have"
                )));
            }
        }
        // A requested length of the schedule takes precedence. A length found from a time limit is
        // kept as long as that limit is unchanged.
        let found = state.schedule_steps.filter(|_| state.schedule_seconds == self.resolved.limits.seconds);
        let schedule_steps = self.resolved.schedule.steps.or(found);
        let round = match &self.resolved.apart {
            Some(apart) => {
                let asked = (apart, &self.resolved.config.update.inner_steps);
                let (is_in_round, (_, replicas)) = (self.rank.is_in_round(), self.rank.replica());
                let (round, is_anew) = Round::resumed(state.round, state.step, is_in_round, asked, replicas);
                if is_anew {
                    note(&warning(
                        "the numbers of inner steps of the round under way were those of other replicas or another update.every: they begin anew",
                    ));
                }
                round
            }
            None => None,
        };
        // Resuming resets the count of skipped steps, because a user has intervened.
        let dataset = self.state.dataset.clone();
        self.state = RunState { dataset, schedule_steps, skipped_in_a_row: 0, round, ..state };
        if self.rank.measures_fp8() {
            note("fp8: the checkpoint knows no largest values: the next step is computed in bf16 to find them");
        }
        Ok(())
    }

    /// True on rank 0, which records metrics, shows progress and commits checkpoints.
    pub fn is_first(&self) -> bool {
        self.world.rank() == 0
    }

    /// Peak of all ranks together in `dtype`, in FLOP/s, assuming that every host and GPU equals
    /// rank 0's.
    pub fn peak_flops(&self, dtype: DType) -> Option<f64> {
        let hosts = self.world.size() as f64 / ranks_here(&self.world) as f64;
        let devices = match self.resolved.config.compute.device {
            DeviceKind::Cuda(None) => self.world.size() as f64,
            // With a GPU number given, the ranks of a host share that GPU.
            DeviceKind::Cuda(Some(_)) | DeviceKind::Cpu => hosts,
        };
        self.peaks.as_ref().map(|peaks| peaks.flops(dtype) * devices)
    }

    /// Measures this host's peaks, or this GPU's, again.
    pub(crate) fn measure_peaks_again(&self) -> Result<Peaks> {
        match self.rank.device().as_cuda() {
            Some(_) => Peaks::of(self.rank.device()),
            None => Ok(Peaks::of_cpu(&Cpu::new(self.resolved.isa, self.resolved.threads * ranks_here(&self.world)))),
        }
    }

    /// The position in the data at which the loader starts.
    pub fn position(&self) -> Position {
        Position { samples: self.state.samples }
    }

    /// True if there is something to validate on.
    pub fn validates(&self) -> bool {
        !(self.validation.is_empty() && self.held_back.is_empty())
    }

    /// Number of passes over each corpus of the training data so far.
    pub fn epochs(&self) -> Vec<f64> {
        let position = self.position();
        match &self.dataset {
            Samples::Text(text) => (0..text.corpora().len()).map(|corpus| text.epochs(corpus, position)).collect(),
            Samples::Images(images) => vec![images.passes(position)],
        }
    }

    fn write(&self, name: &str, text: String) -> Result<()> {
        let path = self.folder.join(name);
        std::fs::write(&path, text).map_err(|source| EngineError::File {
            what: "cannot write",
            path: path.display().to_string(),
            source,
        })
    }

    /// Stores the predicted time of a step, or the reason why there is none, and writes it into
    /// `plan.json`.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn keep_time(&mut self, time: std::result::Result<TimePrediction, String>) -> Result<()> {
        self.time = time;
        if let (Ok(time), true) = (&self.time, self.resolved.config.metrics.record) {
            let TimePrediction { step_s, basis, stages, .. } = time.clone();
            Predicted { step_s, basis, stages }.write(&self.folder)?;
        }
        self.write_plan(None)
    }

    /// Writes `plan.json`: the program, its prediction, and the measurement once it has run.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn write_plan(&self, measured: Option<&Measured>) -> Result<()> {
        let purposes: serde_json::Map<String, serde_json::Value> =
            self.prediction.purposes().into_iter().map(|(p, bytes)| (p.name().to_owned(), bytes.into())).collect();
        let mut plan = json!({
            "program": self.programs[self.priced()],
            "predicted": {
                "flops": self.prediction.cost.flops,
                "bytes": self.prediction.cost.bytes,
                "mem_peak_bytes": self.prediction.memory.peak_total(),
                "mem_peak": purposes,
                "checkpoint_copy_bytes": if self.copies_state { self.prediction.copy } else { 0 },
                "time": match &self.time {
                    Ok(time) => json!(time),
                    Err(why) => json!({"not_predicted": why}),
                },
            },
        });
        if let Some(outer) = self.programs.iter().find(|program| program.kind == StepKind::Outer) {
            plan["outer_program"] = json!(outer);
        }
        if let Some(measured) = measured {
            plan["measured"] = json!(measured);
        }
        self.write(files::PLAN, serde_json::to_string_pretty(&plan).expect("plain data is JSON"))
    }

    /// Copies `generation_config.json` of the pretrained model into the run's folder, unless the
    /// run has another tokenizer. The file names tokens.
    fn keep_generation(&self) -> Result<()> {
        let ModelSource::HuggingFace { path, .. } = &self.resolved.model else { return Ok(()) };
        let has_its_tokens = self.resolved.requested.tokenizer.path.as_ref().is_none_or(|own| own.starts_with(path));
        let from = pretrained::companion(path, files::GENERATION);
        if !has_its_tokens || !from.is_file() {
            return Ok(());
        }
        let text = std::fs::read_to_string(&from).map_err(|source| EngineError::File {
            what: "cannot read",
            path: from.display().to_string(),
            source,
        })?;
        self.write(files::GENERATION, text)
    }

    fn write_files(&self) -> Result<()> {
        if let Some(tokenizer) = &self.tokenizer {
            tokenizer.save(&self.folder.join(files::TOKENIZER))?;
        }
        self.keep_generation()?;
        let spec = self.rank.model().spec().expect("a run's model is of a built-in family");
        self.write(files::MODEL, spec_text(spec))?;
        self.write_plan(None)?;
        // The configuration is written last, because it makes the folder a run.
        self.write(files::CONFIG, self.resolved.to_toml())
    }
}

/// A note on the effect of `precision.fp8` on this run, if it is on.
fn fp8(resolved: &Resolved, model: &Model) -> Option<String> {
    let settings = shape::fp8(resolved)?;
    let layers = crate::fp8::layers(model).len();
    let where_from = match resolved.config.compute.device {
        DeviceKind::Cpu => {
            "; a processor has no such products: it rounds the operands and multiplies them in bf16, which takes longer than bf16 alone"
        }
        DeviceKind::Cuda(_) => "",
    };
    Some(format!(
        "fp8: the {layers} linear layers of the blocks multiply E4M3 (gradients: E5M2), scaled by the largest values of up to {} earlier steps; a run's first step is computed in bf16 to find them{where_from}",
        settings.history
    ))
}

/// A note on the effect of `precision.int8` on this run, if it is on.
fn int8(resolved: &Resolved, model: &Model) -> Option<String> {
    let layers = crate::fp8::layers(model).len();
    let without = match trainyard_tensor::cpu::gemm::Rung::choose(resolved.isa, DType::U8).name_of_codes() {
        Some(instruction) => format!(" by {instruction}"),
        None => {
            "; this processor has no instruction for them and multiplies them as f32, which takes longer than without"
                .to_owned()
        }
    };
    shape::int8(resolved).then(|| {
        format!(
            "int8: the {layers} linear layers of the blocks multiply 8-bit integers forward and for gradients of inputs, with a \
             scale for each row{without}; validation and generation do without"
        )
    })
}

/// A note on the effect of `training.cuda_graphs`, unless it is off.
///
/// # Errors
/// If it is `on` and a step cannot be captured.
fn graphs(resolved: &Resolved, program: &Program, model: &Model) -> Result<Option<String>> {
    let (asked, device) = (resolved.config.training.cuda_graphs, resolved.config.compute.device);
    if asked == CudaGraphs::Off {
        return Ok(None);
    }
    let found = match device {
        DeviceKind::Cpu => Err("it runs on the processor".to_owned()),
        DeviceKind::Cuda(_) => rank::stretch(program, model),
    };
    match found {
        Ok(stretch) => Ok(Some(format!(
            "{} of a step's {} instructions are captured as a CUDA graph once two steps in a row have the same shapes",
            stretch.len(),
            program.instructions.len()
        ))),
        Err(why) if asked == CudaGraphs::On => {
            let message = format!("training.cuda_graphs = \"on\", and a step cannot be captured: {why}");
            Err(does_not_fit(message))
        }
        Err(why) => Ok(Some(format!("no CUDA graph of a step: {why}"))),
    }
}

/// Measures the peaks on rank 0 while all other ranks wait, so that none disturbs it. Only rank 0
/// gets a result.
fn measure_peaks(world: &Communicator, resolved: &Resolved, device: &Device) -> Result<Option<Peaks>> {
    /// Peaks measured in earlier sessions of this process, by instruction set and threads.
    static MEASURED: Mutex<Vec<((Isa, usize), Peaks)>> = Mutex::new(Vec::new());
    let key = (resolved.isa, resolved.threads * ranks_here(world));
    let measure = || {
        if device.as_cuda().is_some() {
            return Peaks::of(device);
        }
        let mut measured = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = measured.iter().find(|(known, _)| *known == key) {
            return Ok(known.clone());
        }
        let peaks = Peaks::of_cpu(&Cpu::new(key.0, key.1));
        measured.push((key, peaks.clone()));
        Ok(peaks)
    };
    let waiting = patient(world)?;
    let peaks = (world.rank() == 0).then(measure);
    waiting.barrier()?;
    peaks.transpose()
}

/// The tiers of a run in `folder`. Disk tiers lie in the configured directory, or else in the run's
/// folder.
pub(crate) fn tiers(resolved: &Resolved, program: &Program, device: &Device, folder: &Path) -> Result<Tiers> {
    match &resolved.config.offload.directory {
        Some(directory) => Tiers::create(program, device, directory),
        None => Tiers::create(program, device, &folder.join(files::OFFLOAD)),
    }
}

/// Resolves the configuration in two passes: once to open the data and tokenizer, and again with
/// the tokenizer's vocabulary and the data's size.
fn resolve(config: &Config, world: &Communicator, note: &mut impl FnMut(&str)) -> Result<(Resolved, Data)> {
    let mut inputs = inputs_for(config, crate::world::inputs(world))?;
    let first = config.resolve(&inputs)?;
    crate::device::check(&first, world)?;
    if first.images.is_some() {
        let labels = inputs.pretrained.as_ref().and_then(|pretrained| Some(pretrained.image.as_ref()?.labels.clone()));
        let images = ImageCorpora::open(&first, labels)?;
        images.notes.iter().for_each(|line| note(line));
        inputs.classes = Some(images.classes().to_vec());
        inputs.sequences_per_epoch = Some(images.images_per_epoch());
        return Ok((config.resolve(&inputs)?, Data::Images(images)));
    }
    let corpora = Corpora::open(&first, &mut *note)?;
    inputs.knows(&corpora.tokenizer);
    inputs.sequences_per_epoch = Some(corpora.sequences_per_epoch(&first)?);
    Ok((config.resolve(&inputs)?, Data::Text(corpora)))
}

/// The data of a run, found or made, but not yet opened for a model.
enum Data {
    Text(Corpora),
    Images(ImageCorpora),
}

/// The data of a run, opened.
struct Opened {
    tokenizer: Option<Tokenizer>,
    dataset: Samples,
    validation: Vec<IndexedTokens>,
    held_back: Vec<HeldBack>,
    validation_names: Vec<String>,
}

impl Data {
    /// Opens the data for a model of this description.
    fn opened(self, resolved: &Resolved, spec: &ModelSpec) -> Result<Opened> {
        let corpora = match self {
            Data::Text(corpora) => corpora,
            Data::Images(images) => {
                let (dataset, held_back) = images.into_sets(resolved)?;
                let validation_names = held_back.iter().map(|set| set.name.clone()).collect();
                let (tokenizer, dataset, validation) = (None, dataset.into(), Vec::new());
                return Ok(Opened { tokenizer, dataset, validation, held_back, validation_names });
            }
        };
        if let Some(teacher) = &resolved.config.distillation.teacher {
            distill::check_tokenizer(teacher, &corpora.tokenizer)?;
        }
        if corpora.tokenizer.vocab_size() > spec.vocab_size {
            return Err(does_not_fit(format!(
                "the tokenizer has {} tokens, but the model's vocabulary is {}: they belong to different models",
                corpora.tokenizer.vocab_size(),
                spec.vocab_size
            )));
        }
        let dataset = corpora.dataset(resolved, spec.vocab_size)?.into();
        let (validation, validation_names) = (corpora.validation()?, corpora.validation_names());
        let (tokenizer, held_back) = (Some(corpora.tokenizer), Vec::new());
        Ok(Opened { tokenizer, dataset, validation, held_back, validation_names })
    }
}

/// Adds the properties of the model folder that `config` names to the inputs.
pub fn inputs_for(config: &Config, inputs: Inputs) -> Result<Inputs> {
    // A folder that does not exist is reported with the other problems of the configuration.
    let folder = config.model.path.as_deref().filter(|path| path.exists());
    let pretrained = folder.map(read_pretrained).transpose()?;
    Ok(Inputs { pretrained, ..inputs })
}

/// The properties of the Hugging Face folder `path` that a configuration is checked against.
pub fn read_pretrained(path: &Path) -> Result<Pretrained> {
    let file = path.join("config.json");
    if path.join(files::MODEL).is_file() && !file.is_file() {
        return Err(does_not_fit(format!(
            "model.path = {path:?} is the folder of a run: go on with it by `train --resume`, or begin from its weights by `trainyard export {} --out DIR` \
             and model.path = DIR",
            path.display()
        )));
    }
    let ModelSpec { vocab_size, max_positions: max_sequence_length, layers, image, encoder, .. } =
        pretrained::description(path)?.spec;
    Ok(Pretrained { vocab_size, max_sequence_length, layers, image, paired: encoder.is_some() })
}

/// Creates the run's folder: `DIRECTORY/NAME`, or without a name the first free one of `run-001`,
/// `run-002`, ….
fn new_folder(resolved: &Resolved) -> Result<PathBuf> {
    let run = &resolved.config.run;
    let error = |path: &Path| {
        let path = path.display().to_string();
        move |source| EngineError::File { what: "cannot create", path, source }
    };
    std::fs::create_dir_all(&run.directory).map_err(error(&run.directory))?;
    if let Some(name) = &run.name {
        let folder = run.directory.join(name);
        if folder.join(files::CONFIG).exists() {
            return Err(does_not_fit(format!(
                "{} is a run already: give run.name another name, or go on with it by `train --resume {}`",
                folder.display(),
                folder.display()
            )));
        }
        std::fs::create_dir_all(&folder).map_err(error(&folder))?;
        return Ok(folder);
    }
    for number in 1.. {
        let folder = run.directory.join(format!("run-{number:03}"));
        match std::fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(error(&folder)(e)),
        }
    }
    unreachable!("numbers do not end")
}
