//! Compares predictions with the engine: configurations are trained for a few steps and predicted
//! in the same run.
//!
//! The table of [`cases`] covers both families, four sizes that no probe has, several
//! micro-batches, one to four ranks, ZeRO 0 to 3, the modes of checkpointing, and both dtypes. Each
//! step is predicted for the speeds that were sampled around it, and a row holds the median error
//! of its steps. Memory is compared per purpose. To locate errors, a row also keeps seconds by kind
//! of instruction and, from one more step with recorded calls, seconds by kernel.

use crate::forecast::{Forecast, forecast};
use crate::probe_group::{ProbeGroup, inputs};
use crate::ranks::{Ranks, resolve};
use crate::{CalibrateError, Sampler, sample};
use std::collections::BTreeMap;
use std::time::Instant;
use trainyard_base::median;
use trainyard_engine::EngineError;
use trainyard_engine::bench::Timed;
use trainyard_engine::config::Resolved;
use trainyard_sim::MachineProfile;
use trainyard_sim::host::HostPrices;
use trainyard_sim::machine::{Machine, Speeds};
use trainyard_tensor::Purpose;

/// A configuration to train.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Case {
    /// Description of the configuration.
    pub name: String,
    /// Its configuration keys.
    pub sets: Vec<String>,
    /// Number of ranks.
    pub ranks: u32,
}

/// A measured and a predicted value.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Pair {
    /// The measured value.
    pub measured: f64,
    /// The predicted value.
    pub predicted: f64,
}

impl Pair {
    /// The error of the prediction relative to the measurement; 0 if both are zero.
    pub fn error(&self) -> f64 {
        if self.measured == self.predicted { 0.0 } else { self.predicted / self.measured - 1.0 }
    }
}

/// A configuration, trained and predicted.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// Name of the configuration.
    pub name: String,
    /// Seconds of a step. The measurement is the median; the prediction is the median times the
    /// median ratio of prediction to measurement over single steps.
    pub step_s: Pair,
    /// Peak bytes of rank 0, by purpose.
    pub memory: Vec<(&'static str, Pair)>,
    /// Peak bytes of rank 0 in all.
    pub memory_total: Pair,
    /// Seconds of rank 0 by kind of instruction.
    pub instructions: BTreeMap<&'static str, Pair>,
    /// Seconds of rank 0 by kernel, in one more step.
    pub kernels: BTreeMap<String, Pair>,
    /// Kernels for which the profile has no curve.
    pub unpriced: Vec<String>,
}

/// The errors over all rows, which the bars limit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Summary {
    /// Median and 90th percentile of the absolute errors of step times.
    pub step: (f64, f64),
    /// The largest absolute error of a purpose's peak, and of a total.
    pub memory: (f64, f64),
}

/// The bars: median and 90th percentile of step times, memory per purpose and in total.
pub const BARS: [f64; 4] = [0.05, 0.12, 0.02, 0.03];

/// Width, blocks, heads, vocabulary.
const SIZES: [(u32, u32, u32, u32); 4] = [(96, 3, 3, 1000), (192, 4, 6, 4000), (384, 4, 6, 6000), (640, 2, 10, 12000)];

/// One family and size: dtype, sequences, their length, ranks, (replicas), ZeRO stage,
/// checkpointing, accumulation.
type Variation = (&'static str, u32, u32, u32, u32, u32, &'static str, u32);

const VARIATIONS: [Variation; 12] = [
    ("bf16", 4, 128, 1, 1, 0, "none", 1),
    ("f32", 2, 128, 1, 1, 0, "none", 1),
    ("bf16", 2, 512, 1, 1, 0, "full", 1),
    ("f32", 4, 64, 1, 1, 0, "selective", 2),
    ("bf16", 8, 96, 1, 1, 0, "selective", 2),
    ("f32", 2, 96, 2, 2, 0, "none", 1),
    ("bf16", 4, 128, 2, 1, 1, "none", 1),
    ("bf16", 2, 192, 2, 1, 2, "full", 2),
    ("f32", 1, 256, 2, 1, 3, "none", 1),
    ("bf16", 4, 96, 4, 1, 3, "none", 1),
    ("f32", 1, 128, 4, 4, 0, "selective", 1),
    ("bf16", 2, 128, 4, 2, 3, "full", 1),
];

/// All configurations. Each family and size runs half of the variations; the other family runs the
/// other half.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (size, shape) in SIZES.into_iter().enumerate() {
        for (number, variation) in VARIATIONS.into_iter().enumerate() {
            let family = if (size + number) % 2 == 0 { "gpt2" } else { "llama" };
            cases.push(case(family, shape, variation));
        }
    }
    cases
}

fn case(family: &str, (dim, layers, heads, vocab): (u32, u32, u32, u32), variation: Variation) -> Case {
    let (dtype, rows, length, ranks, replicas, stage, checkpointing, accumulation) = variation;
    let sets = vec![
        format!("model.family='{family}'"),
        format!("model.dim={dim}"),
        format!("model.layers={layers}"),
        format!("model.heads={heads}"),
        format!("model.vocab_size={vocab}"),
        format!("model.max_sequence_length={length}"),
        format!("training.micro_batch_size={rows}"),
        format!("training.accumulation_steps={accumulation}"),
        "training.steps=1".to_owned(),
        format!("precision.compute='{dtype}'"),
        format!("activation_checkpointing.mode='{checkpointing}'"),
        format!("parallel.ranks={ranks}"),
        format!("parallel.data_parallel_replicate_degree={replicas}"),
        format!("parallel.data_parallel_shard_degree={}", ranks / replicas),
        format!("parallel.zero_stage={stage}"),
    ];
    let name = format!(
        "{family} {dim}x{layers} {dtype} {rows}x{length}x{accumulation} ranks {ranks} zero {stage} keep {checkpointing}"
    );
    Case { name, sets, ranks }
}

/// The cases that `machine` can run: all of them, or, if its profile is of processes, those with as
/// many ranks.
pub fn cases_on(machine: &Machine) -> Vec<Case> {
    let processes = machine.processes.as_ref().map(|processes| processes.count);
    cases().into_iter().filter(|case| processes.is_none_or(|count| case.ranks == count)).collect()
}

/// Trains and predicts every `every`th of the [cases](cases_on) that the group can run.
///
/// # Errors
///
/// A configuration that cannot be trained.
pub fn rows(
    group: &ProbeGroup,
    profile: &MachineProfile,
    every: usize,
    progress: &mut dyn FnMut(f64, &str),
) -> Result<Vec<Row>, CalibrateError> {
    let sampler = Sampler::new(group)?;
    let cases: Vec<Case> = cases_on(group.machine()).into_iter().step_by(every.max(1)).collect();
    let mut rows = Vec::with_capacity(cases.len());
    for (number, case) in cases.iter().enumerate() {
        progress(number as f64 / cases.len() as f64, &case.name);
        let failed = |source: EngineError| CalibrateError::Probe { probe: case.name.clone(), source };
        let resolved = group.resolve(&case.sets).map_err(failed)?;
        rows.push(row(group, &case.name, &resolved, profile, &sampler, &failed)?);
    }
    Ok(rows)
}

/// Number of steps of a case: at least and at most.
const STEPS: std::ops::RangeInclusive<usize> = 5..=25;
/// Seconds of a case. It ends after the first number if enough of its steps were steady, and after
/// the second in any case.
const CASE_S: std::ops::RangeInclusive<f64> = 1.2..=4.0;
/// Largest factor by which a speed may change during a steady step. A step that began on a faster
/// machine than it ended on measures neither. Unsteady steps count only if there are too few steady
/// ones.
const CHANGE_MAX: f64 = 1.1;
/// Largest factor by which the speeds of a steady step may differ from the profile's, which
/// describes the undisturbed machine.
const OFF_MAX: f64 = 1.3;

fn row(
    group: &ProbeGroup,
    name: &str,
    resolved: &Resolved,
    profile: &MachineProfile,
    sampler: &Sampler,
    failed: &dyn Fn(EngineError) -> CalibrateError,
) -> Result<Row, CalibrateError> {
    let forecast = forecast(resolved, group.machine()).map_err(failed)?;
    let mut ranks = group.ranks(resolved).map_err(failed)?;
    ranks.step().map_err(failed)?;
    let mut steps: Vec<TimedStep> = Vec::new();
    let mut before = sampler.sample()?;
    let began = Instant::now();
    loop {
        let elapsed = began.elapsed().as_secs_f64();
        let steady = steps.iter().filter(|step| step.unsteadiness <= 1.0).count();
        let enough = steady >= *STEPS.end() || elapsed >= *CASE_S.start() && steady >= *STEPS.start();
        if group.agree(steps.len() >= *STEPS.start() && (enough || elapsed >= *CASE_S.end()))? {
            break;
        }
        group.meet()?;
        let timed = ranks.step().map_err(failed)?;
        let after = sampler.sample()?;
        let speeds = sample::between(before, after);
        let (change, off) = (sample::factor(&before, &after), sample::factor(&speeds, &profile.speeds));
        let unsteadiness = (change / CHANGE_MAX).max(off / OFF_MAX);
        let seconds = group.most(timed.iter().map(|rank| rank.seconds).fold(0.0, f64::max))?;
        let predicted_s = forecast.step(profile, &speeds).simulated.step_s;
        steps.push(TimedStep { timed, speeds, unsteadiness, seconds, predicted_s });
        before = after;
    }
    let steps = steady(steps);
    let usage = ranks.members()[0].device.pool().usage();
    let middle = |value: &dyn Fn(&TimedStep) -> f64| median(steps.iter().map(value)).unwrap_or(f64::NAN);
    // Each step is compared with its own prediction, because speeds change from one step to the
    // next.
    let measured = middle(&|step| step.seconds);
    let step_s = Pair { measured, predicted: measured * middle(&|step| step.predicted_s / step.seconds) };
    let speeds = Speeds::median(&steps.iter().map(|step| step.speeds).collect::<Vec<_>>()).expect("steps were made");
    let spans: Vec<&Timed> = steps.iter().map(|step| &step.timed[0]).collect();
    let instructions = instructions(&forecast, &spans, profile, &speeds);
    let kernels = kernels(&forecast, &mut ranks, profile, &before).map_err(failed)?;
    let needs = &forecast.first().1.memory;
    let pair = |measured: usize, predicted: usize| Pair { measured: measured as f64, predicted: predicted as f64 };
    let memory = Purpose::ALL.map(|purpose| (purpose.name(), pair(usage.peak(purpose), needs.peak(purpose))));
    Ok(Row {
        name: name.to_owned(),
        step_s,
        memory: memory.into_iter().filter(|(_, pair)| pair.measured + pair.predicted > 0.0).collect(),
        memory_total: pair(usage.peak_total(), needs.peak_total()),
        instructions,
        kernels,
        unpriced: forecast.step(profile, &speeds).unpriced.into_keys().collect(),
    })
}

/// A measured step.
struct TimedStep {
    /// Measurements of each rank.
    timed: Vec<Timed>,
    /// The machine's speeds during the step.
    speeds: Speeds,
    /// At most 1 if the machine was as steady as required.
    unsteadiness: f64,
    /// Seconds of the slowest rank.
    seconds: f64,
    /// Seconds predicted for these speeds.
    predicted_s: f64,
}

/// The steady steps, if there are enough; otherwise the steadiest ones.
fn steady(mut steps: Vec<TimedStep>) -> Vec<TimedStep> {
    steps.sort_by(|a, b| a.unsteadiness.total_cmp(&b.unsteadiness));
    let steady = steps.iter().filter(|step| step.unsteadiness <= 1.0).count();
    steps.truncate(steady.max(*STEPS.start()));
    steps
}

/// Seconds by kind of instruction: the sum of each instruction's median over the steps.
fn instructions(
    forecast: &Forecast,
    steps: &[&Timed],
    profile: &MachineProfile,
    speeds: &Speeds,
) -> BTreeMap<&'static str, Pair> {
    let mut kinds: BTreeMap<&'static str, Pair> = BTreeMap::new();
    let predicted = forecast.step(profile, speeds).simulated.ranks.remove(0).spans;
    for (number, instruction) in forecast.first().0.instructions.iter().enumerate() {
        let measured = steps.iter().map(|timed| {
            let span = &timed.spans[number];
            span.end.saturating_sub(span.start).as_secs_f64()
        });
        let kind = kinds.entry(instruction.action.name()).or_default();
        kind.measured += median(measured).unwrap_or(0.0);
        kind.predicted += predicted[number].end_s - predicted[number].start_s;
    }
    kinds
}

/// Seconds by kernel in one more step: each call beside its price.
fn kernels(
    forecast: &Forecast,
    ranks: &mut Ranks,
    profile: &MachineProfile,
    speeds: &Speeds,
) -> Result<BTreeMap<String, Pair>, EngineError> {
    let prices = HostPrices::new(profile, forecast.layout, *speeds);
    let device = ranks.members()[0].device.clone();
    device.set_recording(true);
    ranks.step()?;
    let mut kernels: BTreeMap<String, Pair> = BTreeMap::new();
    for call in device.take_calls() {
        let pair = kernels.entry(call.kernel.to_owned()).or_default();
        pair.measured += call.seconds;
        pair.predicted += prices.call_s(&call);
    }
    device.set_recording(false);
    Ok(kernels)
}

/// Summarises the rows; None if there are none.
pub fn summary(rows: &[Row]) -> Option<Summary> {
    let mut steps: Vec<f64> = rows.iter().map(|row| row.step_s.error().abs()).collect();
    steps.sort_by(f64::total_cmp);
    let last = steps.len().checked_sub(1)?;
    let most = |errors: &mut dyn Iterator<Item = f64>| errors.map(f64::abs).fold(0.0, f64::max);
    Some(Summary {
        step: (median(steps.iter().copied())?, steps[(0.9 * last as f64).ceil() as usize]),
        memory: (
            most(&mut rows.iter().flat_map(|row| row.memory.iter().map(|(_, pair)| pair.error()))),
            most(&mut rows.iter().map(|row| row.memory_total.error())),
        ),
    })
}

/// Returns the relative difference of two profiles' predictions for every case that the first
/// profile's machine can run, at the speeds in the first profile.
///
/// # Errors
///
/// A model that does not fit.
pub fn difference(first: &MachineProfile, second: &MachineProfile) -> Result<Vec<(String, f64)>, CalibrateError> {
    let of = |case: &Case| {
        let failed = |source: EngineError| CalibrateError::Probe { probe: case.name.clone(), source };
        let resolved = resolve(&case.sets, inputs(first)).map_err(failed)?;
        let forecast = forecast(&resolved, &first.machine).map_err(failed)?;
        let step = |profile| forecast.step(profile, &first.speeds).simulated.step_s;
        Ok((case.name.clone(), step(second) / step(first) - 1.0))
    };
    cases_on(&first.machine).iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use trainyard_engine::config::Inputs;
    use trainyard_sim::machine::Processes;

    #[test]
    fn the_cases_cover_what_they_are_to_cover_and_are_configurations() {
        let cases = cases();
        assert!(cases.len() >= 40);
        let names: BTreeSet<&String> = cases.iter().map(|case| &case.name).collect();
        assert_eq!(names.len(), cases.len());
        let mut shards = BTreeSet::new();
        for case in &cases {
            let resolved =
                resolve(&case.sets, Inputs::of_this_machine()).unwrap_or_else(|error| panic!("{}: {error}", case.name));
            shards.insert((resolved.parallel.ranks, resolved.parallel.zero_stage));
        }
        assert!([(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (4, 0), (4, 3)].iter().all(|pair| shards.contains(pair)));
        let of_processes = |count| {
            let processes = Some(Processes { backend: "tcp".to_owned(), count, hosts: 1 });
            let machine = Machine { processes, ..Machine::here() };
            for case in cases_on(&machine) {
                let processes = Some(count as usize);
                let inputs = Inputs { processes, ..Inputs::of_this_machine() };
                let resolved = resolve(&case.sets, inputs).unwrap();
                assert_eq!(resolved.parallel.ranks as u32, count, "{}", case.name);
            }
            cases_on(&machine).len()
        };
        assert_eq!([2, 3, 4].map(of_processes), [16, 0, 12]);
    }

    #[test]
    fn steps_of_an_unsteady_machine_count_only_where_there_are_too_few_others() {
        let of = |unsteadiness: &[f64]| -> Vec<f64> {
            let speeds = Speeds { f32_flops: 1.0, bf16_flops: 1.0, copy_bytes_per_s: 1.0 };
            let timed = Vec::new();
            let step = |&unsteadiness: &f64| TimedStep {
                timed: timed.clone(),
                speeds,
                unsteadiness,
                seconds: 1.0,
                predicted_s: 1.0,
            };
            steady(unsteadiness.iter().map(step).collect()).iter().map(|step| step.unsteadiness).collect()
        };
        assert_eq!(of(&[0.9, 3.0, 0.8, 0.7, 1.0, 0.6, 1.1, 0.5]), [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]);
        assert_eq!(of(&[2.0, 0.5, 4.0, 3.0, 1.5, 6.0, 5.0]), [0.5, 1.5, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn errors_are_relative_and_the_summary_takes_median_and_tail() {
        let row = |measured: f64| Row {
            name: String::new(),
            step_s: Pair { measured, predicted: 1.0 },
            memory: vec![("params", Pair { measured: 100.0, predicted: 99.0 })],
            memory_total: Pair { measured: 200.0, predicted: 210.0 },
            instructions: BTreeMap::new(),
            kernels: BTreeMap::new(),
            unpriced: Vec::new(),
        };
        let rows: Vec<Row> = [1.0, 0.5, 0.8, 1.25, 1.0].map(row).into();
        let summary = summary(&rows).unwrap();
        assert!((summary.step.0 - 0.2).abs() < 1e-9 && (summary.step.1 - 1.0).abs() < 1e-9, "{summary:?}");
        assert!((summary.memory.0 - 0.01).abs() < 1e-9 && (summary.memory.1 - 0.05).abs() < 1e-9);
        assert_eq!(super::summary(&[]), None);
    }
}
