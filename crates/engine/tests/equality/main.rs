//! Layouts train alike: small models on every layout of four ranks and on chosen ones of eight,
//! against one rank. `docs/equality.md` says what is compared and shows the results;
//! `cargo xtask equality` runs everything and writes them.

#[path = "../common/train.rs"]
mod common;
mod layouts;
mod resume;
#[path = "../common/runs.rs"]
mod runs;
#[path = "../common/tensors.rs"]
mod tensors;

use common::{check_memory, documents, gradients, losses, train_on, weights};
use layouts::{Layout, Model, SCHEDULES, models, of_eight, of_four};
use std::collections::BTreeMap;

/// Largest relative difference of the loss, the norm and every gradient in the first step.
const FIRST_MAX: f64 = 1e-5;
/// Largest relative difference of a loss in any step.
const LOSS_MAX: f64 = 1e-4;

/// The environment variable that names the file for results, in which `cargo xtask equality` finds
/// them.
const RESULTS: &str = "TRAINYARD_EQUALITY_RESULTS";

/// The results of one training.
#[derive(Clone)]
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    gradients: Vec<Vec<u32>>,
    weights: Vec<Vec<u32>>,
    /// The largest peak of a rank, in bytes. Every rank has the predicted peak of every purpose.
    peak: usize,
}

impl Trained {
    fn new(model: &Model, layout: &Layout, steps: u64) -> Trained {
        let sets = [model.sets(), layout.sets()].concat();
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let ends = train_on(documents, &sets, steps);
        ends.iter().for_each(|end| check_memory(end, &sets));
        Trained {
            losses: losses(&ends),
            norms: ends[0].outcomes.iter().map(|outcome| outcome.gradient_norm).collect(),
            gradients: gradients(&ends),
            weights: weights(&ends),
            peak: ends.iter().map(|end| end.memory.peak_total()).max().unwrap(),
        }
    }

    fn has_bits_of(&self, other: &Trained) -> bool {
        (&self.losses, &self.norms) == (&other.losses, &other.norms)
            && self.gradients == other.gradients
            && self.weights == other.weights
    }
}

/// The largest relative differences between two trainings.
#[derive(Clone, Copy, Default, Debug, serde::Serialize)]
struct Differences {
    /// Of the loss in the first step.
    loss: f64,
    /// Of the gradient's norm in the first step.
    norm: f64,
    /// Of a parameter's gradient in the first step: the norm of the difference, relative to the
    /// gradient's.
    gradient: f64,
    /// Of the loss in any step.
    losses: f64,
}

impl Differences {
    fn new(many: &Trained, one: &Trained) -> Differences {
        let relative = |a: f64, b: f64| if a == b { 0.0 } else { (a / b - 1.0).abs() };
        let of_gradients = many.gradients.iter().zip(&one.gradients).map(|(a, b)| {
            assert_eq!(a.len(), b.len());
            let value = |bits: &u32| f64::from(f32::from_bits(*bits));
            let size = b.iter().map(|b| value(b).powi(2)).sum::<f64>().sqrt();
            let distance = a.iter().zip(b).map(|(a, b)| (value(a) - value(b)).powi(2)).sum::<f64>().sqrt();
            assert!(size > 0.0, "a gradient that is zero compares nothing");
            distance / size
        });
        let of_losses = many.losses.iter().zip(&one.losses).map(|(a, b)| relative(*a, *b));
        Differences {
            loss: relative(many.losses[0], one.losses[0]),
            norm: relative(many.norms[0], one.norms[0]),
            // A NaN must not be lost in a maximum.
            gradient: of_gradients.max_by(f64::total_cmp).unwrap(),
            losses: of_losses.max_by(f64::total_cmp).unwrap(),
        }
    }

    fn is_within_bounds(&self) -> bool {
        self.loss <= FIRST_MAX && self.norm <= FIRST_MAX && self.gradient <= FIRST_MAX && self.losses <= LOSS_MAX
    }

    fn with(self, other: Differences) -> Differences {
        Differences {
            loss: self.loss.max(other.loss),
            norm: self.norm.max(other.norm),
            gradient: self.gradient.max(other.gradient),
            losses: self.losses.max(other.losses),
        }
    }
}

/// A row of the matrix: the largest differences over all models.
#[derive(serde::Serialize)]
struct Row {
    layout: String,
    ranks: usize,
    differences: Differences,
    /// True if all bits are those of the one rank, for every model.
    same_as_one: bool,
    /// True if all bits are those of the layout without its pipeline, for untied models; None
    /// without a pipeline.
    same_as_without_pipeline: Option<bool>,
    /// The largest peak of a rank, in bytes.
    peak: usize,
}

/// Adds `name` to the file of results, if results are wanted.
fn record(name: &str, results: &impl serde::Serialize) {
    let Some(folder) = std::env::var_os(RESULTS) else { return };
    let path = std::path::Path::new(&folder).join(format!("{name}.json"));
    std::fs::write(path, serde_json::to_string_pretty(results).unwrap()).unwrap();
}

/// Trains each layout once per model.
struct Trainings {
    steps: u64,
    done: BTreeMap<(Model, Layout), Trained>,
}

impl Trainings {
    fn of(&mut self, model: Model, layout: Layout) -> &Trained {
        self.done.entry((model, layout)).or_insert_with(|| Trained::new(&model, &layout, self.steps))
    }
}

#[test]
fn every_layout_trains_as_one_rank() {
    let models = &models()[..trainyard_testing::cases("models", 2, 8) as usize];
    let all: Vec<Layout> = of_four().into_iter().chain(of_eight()).collect();
    let layouts = &all[..trainyard_testing::cases("layouts", 20, all.len() as u64) as usize];
    let mut trainings = Trainings { steps: trainyard_testing::cases("steps", 3, 100), done: BTreeMap::new() };
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    for layout in layouts {
        let mut row = Row {
            layout: layout.to_string(),
            ranks: layout.ranks(),
            differences: Differences::default(),
            same_as_one: true,
            same_as_without_pipeline: (layout.pipeline > 1).then_some(true),
            peak: 0,
        };
        for model in models {
            let many = Trained::new(model, layout, trainings.steps);
            let one = trainings.of(*model, Layout::ONE);
            let differences = Differences::new(&many, one);
            if !differences.is_within_bounds() {
                failures.push(format!("{model}: {layout}: {differences:?}"));
            }
            row.differences = row.differences.with(differences);
            row.same_as_one &= many.has_bits_of(one);
            row.peak = row.peak.max(many.peak);
            if layout.pipeline > 1 && !model.tied {
                let same = many.has_bits_of(trainings.of(*model, layout.without_pipeline()));
                row.same_as_without_pipeline = row.same_as_without_pipeline.map(|before| before && same);
                if !same {
                    failures.push(format!("{model}: {layout}: bits differ from those without pipeline"));
                }
            }
        }
        eprintln!("{:60} {:?} {}", row.layout, row.differences, row.same_as_one);
        rows.push(row);
    }
    record("layouts", &rows);
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// A row of the table of schedules.
#[derive(serde::Serialize)]
struct ScheduleRow {
    layout: String,
    schedule: &'static str,
    /// True if all bits are those of the layout without its pipeline, for every untied model.
    untied_same: bool,
    /// The same for tied models.
    tied_same: bool,
    /// The largest differences of tied models from the layout without its pipeline.
    tied: Differences,
}

#[test]
fn every_schedule_trains_the_bits_of_no_pipeline() {
    let models = &models()[..trainyard_testing::cases("models", 3, 4) as usize];
    let pipelines: Vec<Layout> = of_four().into_iter().filter(|layout| layout.pipeline > 1).collect();
    let kept = trainyard_testing::cases("layouts", 3, pipelines.len() as u64) as usize;
    let mut trainings = Trainings { steps: trainyard_testing::cases("steps", 3, 100), done: BTreeMap::new() };
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    for layout in pipelines.into_iter().rev().take(kept) {
        // The first schedule of a tied model whose head and embedding are on two stages.
        let mut apart: BTreeMap<Model, Trained> = BTreeMap::new();
        for schedule in SCHEDULES {
            let layout = Layout { schedule, ..layout };
            let mut row = ScheduleRow {
                layout: layout.without_pipeline().to_string(),
                schedule,
                untied_same: true,
                tied_same: true,
                tied: Differences::default(),
            };
            for model in models {
                let many = Trained::new(model, &layout, trainings.steps);
                let one = trainings.of(*model, layout.without_pipeline());
                let same = many.has_bits_of(one);
                if !model.tied {
                    row.untied_same &= same;
                    if !same {
                        failures.push(format!("{model}: {layout}: bits differ from those without pipeline"));
                    }
                    continue;
                }
                let differences = Differences::new(&many, one);
                row.tied_same &= same;
                row.tied = row.tied.with(differences);
                if !differences.is_within_bounds() {
                    failures.push(format!("{model}: {layout}: {differences:?}"));
                }
                if !layout.joins_ends() && !apart.entry(*model).or_insert_with(|| many.clone()).has_bits_of(&many) {
                    failures.push(format!("{model}: {layout}: bits differ from those of another schedule"));
                }
            }
            eprintln!("{:50} {schedule:14} {} {} {:?}", row.layout, row.untied_same, row.tied_same, row.tied);
            rows.push(row);
        }
    }
    record("schedules", &rows);
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
