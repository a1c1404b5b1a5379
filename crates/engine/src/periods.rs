//! Freezing by schedule (`fine_tuning.freeze_schedule`): the periods of a run, and a program for
//! each of them.
//!
//! All periods work on the same state: parameters that any of them trains have gradients, masters
//! and moments from the first step to the last. A period's program lacks the backward of the units
//! below the lowest that it trains, and the reductions and updates of those that it does not train.
//! A parameter that rests beside trained ones of its unit has a gradient of zero, and no update.

use crate::Result;
use crate::config::{Config, Resolved};
use crate::predict::{StepNeeds, predict_all};
use crate::rank::RankSettings;
use crate::shape;
use trainyard_model::{BatchShape, Model, ModelSpec, Tuning};
use trainyard_program::{ModelShape, Program, SplitShape, Strategy, UnitShape};

/// A stretch of steps in which the same parameters are trained.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Period {
    /// Its first step, from 0.
    pub from_step: u64,
    /// Number of parameters that are trained in it.
    pub trained_parameters: u64,
    /// Model FLOPs per token, forward and backward.
    pub flops_per_token: f64,
}

/// The periods of a run with the programs of a rank.
pub struct Lowered {
    /// The periods; one if there is no schedule.
    pub periods: Vec<Period>,
    /// Per period, the programs of its steps: without and with a snapshot at the end.
    pub programs: Vec<[Program; 2]>,
    /// The model of a step that trains what any period trains.
    pub shape: ModelShape,
    /// The program of such a step; None if there is one period.
    whole: Option<Program>,
}

/// The first step of each period; one if there is no schedule.
pub fn first_steps(config: &Config) -> Vec<u64> {
    let schedule = &config.fine_tuning.freeze_schedule.0;
    let implied = schedule.first().is_none_or(|first| first.from_step > 0);
    implied.then_some(0).into_iter().chain(schedule.iter().map(|entry| entry.from_step)).collect()
}

/// Per period, the patterns of what is frozen in it beside; empty if there is no schedule.
pub(crate) fn patterns(config: &Config) -> Vec<Vec<String>> {
    let schedule = &config.fine_tuning.freeze_schedule.0;
    let implied = schedule.first().is_some_and(|first| first.from_step > 0);
    let entries = schedule.iter().map(|entry| entry.frozen.0.clone());
    implied.then(Vec::new).into_iter().chain(entries).collect()
}

/// The number of the period of step `step`, from 0.
pub fn at(periods: &[Period], step: u64) -> usize {
    periods.partition_point(|period| period.from_step <= step).saturating_sub(1)
}

/// The period whose steps compute the most, by which steps are priced: the first of them.
pub fn dearest(periods: &[Period]) -> usize {
    let most = periods.iter().map(|period| period.flops_per_token).fold(0.0, f64::max);
    periods.iter().position(|period| period.flops_per_token == most).unwrap_or(0)
}

/// Lowers the steps of `model`, which is `spec` on rank `rank`, under `strategy`.
///
/// # Errors
/// A strategy that does not fit the model or the mesh; a period that trains nothing.
pub fn lower(resolved: &Resolved, spec: &ModelSpec, model: &Model, strategy: &Strategy, rank: u32) -> Result<Lowered> {
    let (batch, dtype, mesh) =
        (shape::batch_shape(resolved, model), shape::compute_dtype(resolved), shape::mesh(resolved));
    let whole = shape::model_shape(model, &batch, dtype)?;
    let programs =
        |shape: &ModelShape, period| shape::programs(shape, &mesh, &Strategy { period, ..strategy.clone() }, rank);
    let period = |from_step, model: &Model| Period {
        from_step,
        trained_parameters: trained_parameters(model),
        flops_per_token: model.flops_per_token(resolved.sequence_length).unwrap_or_default(),
    };
    let tuning: &Tuning = model.tuning();
    if tuning.freeze_schedule.is_empty() {
        let [plain, last] = programs(&whole, None)?;
        return Ok(Lowered {
            periods: vec![period(0, model)],
            programs: vec![[plain, last]],
            shape: whole,
            whole: None,
        });
    }
    let (mut periods, mut all) = (Vec::new(), Vec::new());
    for (number, from_step) in first_steps(&resolved.config).into_iter().enumerate() {
        let own = shape::tuned_model(resolved, spec.clone(), rank, &tuning.of_period(number))?;
        let units = shape::model_shape(&own, &batch, dtype)?.units;
        let units = units.into_iter().zip(&whole.units).map(|(own, whole)| in_period(own, whole)).collect();
        all.push(programs(&ModelShape { units, ..whole.clone() }, Some(number as u32))?);
        periods.push(period(from_step, &own));
    }
    let [program, _] = programs(&whole, None)?;
    Ok(Lowered { periods, programs: all, shape: whole, whole: Some(program) })
}

/// A rank's programs of a step of one batch, in the order of
/// [`Session::programs`](crate::session::Session::programs).
///
/// # Errors
/// As [`lower`].
pub fn step_programs(
    resolved: &Resolved,
    spec: &ModelSpec,
    model: &Model,
    rank: u32,
) -> Result<(Lowered, Vec<Program>)> {
    let strategy = shape::strategy(resolved, model.units().len())?;
    let lowered = lower(resolved, spec, model, &strategy, rank)?;
    let mut others = shape::outer_strategies(resolved, &strategy);
    if resolved.compression.warmup_steps > 0 {
        let warm = |strategy: &Strategy| Strategy { warms_up: true, ..strategy.clone() };
        let all: Vec<Strategy> = std::iter::once(&strategy).chain(&others).map(warm).collect();
        others.extend(all);
    }
    let mut programs = lowered.programs.concat();
    for strategy in &others {
        programs.extend(shape::programs(&lowered.shape, &shape::mesh(resolved), strategy, rank)?);
    }
    Ok((lowered, programs))
}

/// A unit as a period runs it, which is `own` by itself, with the state that it has as `whole`.
/// Pipeline stages are cut alike in all periods, by the work of a step that trains everything.
fn in_period(own: UnitShape, whole: &UnitShape) -> UnitShape {
    let rests = own.has_no_state() && !whole.has_no_state();
    let shared = whole.split.as_ref().map_or(0, |split| split.shared_gradient_elements);
    let split = own.split.map(|split| SplitShape { shared_gradient_elements: shared, ..split });
    UnitShape { saved_bytes: own.saved_bytes, split, rests, ..whole.clone() }
}

impl Lowered {
    /// The program from which the state of the rank is made: it trains what any period trains.
    pub fn whole(&self) -> &Program {
        self.whole.as_ref().unwrap_or(&self.programs[0][0])
    }

    /// The program without a snapshot of the period that steps are priced by.
    pub fn priced(&self) -> &Program {
        &self.programs[dearest(&self.periods)][0]
    }

    /// The needs of a run: its memory over all periods, and the cost of a step of the dearest.
    ///
    /// # Errors
    /// A model that does not fit.
    pub fn predict(&self, model: Model, batch: &BatchShape, settings: &RankSettings) -> Result<StepNeeds> {
        let plain: Vec<&Program> = self.programs.iter().map(|[plain, _]| plain).collect();
        predict_all(model, self.whole(), &plain, dearest(&self.periods), batch, settings)
    }
}

/// The program of a step of rank `rank` by which steps are priced, and the needs of the run.
///
/// # Errors
/// A model that does not fit.
pub fn forecast(resolved: &Resolved, rank: u32) -> Result<(Program, StepNeeds)> {
    let spec = shape::model_spec(resolved)?;
    let model = shape::model_of(resolved, spec.clone(), rank)?;
    let (batch, strategy) = (shape::batch_shape(resolved, &model), shape::strategy(resolved, model.units().len())?);
    let lowered = lower(resolved, &spec, &model, &strategy, rank)?;
    let needs = lowered.predict(model, &batch, &shape::rank_settings(resolved))?;
    Ok((lowered.priced().clone(), needs))
}

/// Lines about how much of the model is trained, and when; none if all of it always is.
pub(crate) fn notes(model: &Model, periods: &[Period]) -> Vec<String> {
    if model.tuning().trains_all() {
        return Vec::new();
    }
    let all: usize = model.parameters().map(|(_, spec)| spec.whole_shape().iter().product::<usize>()).sum();
    let line = |period: &Period| {
        let trained = period.trained_parameters;
        let share = format!("trained: {trained} of {all} parameters ({:.2} %)", 100.0 * trained as f64 / all as f64);
        if periods.len() == 1 { share } else { format!("from step {}: {share}", period.from_step) }
    };
    let priced = (periods.len() > 1).then(|| {
        let from = periods[dearest(periods)].from_step;
        format!(
            "the predicted time is that of steps from step {from}, which compute the most; memory is the most of all"
        )
    });
    periods.iter().map(line).chain(priced).collect()
}

/// Number of parameters of `model` that are trained.
fn trained_parameters(model: &Model) -> u64 {
    let trained = model.parameters().filter(|(_, spec)| spec.trained);
    trained.map(|(_, spec)| spec.whole_shape().iter().product::<usize>() as u64).sum()
}
