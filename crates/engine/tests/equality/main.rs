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

use common::{check_memory, check_state, documents, gradients, losses, train_on, weights};
use layouts::{ENCODER, Layout, MIXTURE, Model, SCHEDULES, models, of_eight, of_experts, of_four};
use std::collections::BTreeMap;

/// Largest relative difference of the loss, the norm and every gradient in the first step.
const FIRST_MAX: f64 = 1e-5;
/// Largest relative difference of a loss in any step.
const LOSS_MAX: f64 = 1e-4;

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
        match layout.experts {
            1 => ends.iter().for_each(|end| check_memory(end, &sets)),
            // Routing decides how many rows come to a rank.
            _ => ends.iter().for_each(|end| check_state(end, &sets)),
        }
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

/// The comparison of a layout with others, for one model or the worst of several.
#[derive(Clone, serde::Serialize)]
struct Compared {
    layout: String,
    /// The schedule of the pipeline; empty without one.
    schedule: &'static str,
    ranks: usize,
    /// The largest differences from one rank.
    differences: Differences,
    /// True if all bits are those of the layout without its pipeline, for untied models; None
    /// without a pipeline, and where every model is tied.
    untied_same: Option<bool>,
    /// The same for tied models.
    tied_same: Option<bool>,
    /// The largest differences of tied models from the layout without its pipeline.
    tied: Differences,
    /// The largest peak of a rank, in bytes.
    peak: usize,
    #[serde(skip)]
    failures: Vec<String>,
}

impl Compared {
    fn with(mut self, other: Compared) -> Compared {
        let both = |a: Option<bool>, b: Option<bool>| a.map_or(b, |a| Some(a && b.unwrap_or(true)));
        self.failures.extend(other.failures);
        Compared {
            differences: self.differences.with(other.differences),
            untied_same: both(self.untied_same, other.untied_same),
            tied_same: both(self.tied_same, other.tied_same),
            tied: self.tied.with(other.tied),
            peak: self.peak.max(other.peak),
            ..self
        }
    }
}

/// The trainings of one model.
struct Trainings {
    model: Model,
    steps: u64,
    /// Layouts that others are compared with.
    done: BTreeMap<Layout, Trained>,
    /// By layout without its pipeline, the first training whose embedding and head are on different
    /// stages. All of these have the same bits.
    apart: BTreeMap<Layout, Trained>,
}

impl Trainings {
    fn of(&mut self, layout: Layout) -> &Trained {
        self.done.entry(layout).or_insert_with(|| Trained::new(&self.model, &layout, self.steps))
    }

    fn compare(&mut self, layout: &Layout) -> Compared {
        let model = self.model;
        let many = Trained::new(&model, layout, self.steps);
        let is_pipeline = layout.pipeline > 1;
        let mut compared = Compared {
            layout: layout.to_string(),
            schedule: if is_pipeline { layout.schedule } else { "" },
            ranks: layout.ranks(),
            differences: Differences::new(&many, self.of(Layout::ONE)),
            untied_same: None,
            tied_same: None,
            tied: Differences::default(),
            peak: many.peak,
            failures: Vec::new(),
        };
        let mut failures = Vec::new();
        let mut check = |holds: bool, what: &str| {
            if !holds {
                failures.push(format!("{model}: {layout}: {what}"));
            }
        };
        check(compared.differences.is_within_bounds(), &format!("{:?}", compared.differences));
        if is_pipeline {
            let without = self.of(layout.without_pipeline()).clone();
            let same = many.has_bits_of(&without);
            if model.shares() {
                compared.tied_same = Some(same);
                compared.tied = Differences::new(&many, &without);
                check(compared.tied.is_within_bounds(), &format!("without pipeline {:?}", compared.tied));
                // The blocks of a side share a table, so every division into stages has sums of its
                // own.
                if !layout.joins_ends() && model.family != "t5" {
                    let key = layout.without_pipeline();
                    let other = self.apart.entry(key).or_insert_with(|| many.clone());
                    check(many.has_bits_of(other), "bits differ from those of another pipeline");
                }
            } else {
                compared.untied_same = Some(same);
                check(same, "bits differ from those without pipeline");
            }
        }
        compared.failures = failures;
        compared
    }
}

/// Compares each of `layouts` for all models at once. Leaves the results for the page as `name`.
fn compare(name: &str, models: &[Model], layouts: &[Layout], steps: u64) {
    let of_model = |model: Model| {
        let mut trainings = Trainings { model, steps, done: BTreeMap::new(), apart: BTreeMap::new() };
        layouts.iter().map(|layout| trainings.compare(layout)).collect::<Vec<_>>()
    };
    let rows: Vec<Compared> = std::thread::scope(|scope| {
        let models = models.iter().map(|model| scope.spawn(|| of_model(*model)));
        let models: Vec<_> = models.collect();
        let rows = models.into_iter().map(|model| model.join().unwrap());
        rows.reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| a.with(b)).collect()).unwrap()
    });
    record(name, &rows);
    let failures: Vec<&str> = rows.iter().flat_map(|row| &row.failures).map(String::as_str).collect();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// Leaves the results of a test for the page.
fn record(name: &str, results: &impl serde::Serialize) {
    trainyard_testing::record(name, &serde_json::to_string_pretty(results).unwrap()).unwrap();
}

fn all_layouts() -> Vec<Layout> {
    of_four().into_iter().chain(of_eight()).collect()
}

#[test]
fn the_page_shows_every_layout() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/equality.md");
    let page = std::fs::read_to_string(page).unwrap();
    let shown = all_layouts().into_iter().chain(of_experts());
    let missing: Vec<String> =
        shown.map(|layout| layout.to_string()).filter(|layout| !page.contains(&format!("| {layout} |"))).collect();
    assert!(missing.is_empty(), "run `cargo xtask equality`: docs/equality.md has no row for {missing:#?}");
}

#[test]
fn every_layout_trains_as_one_rank() {
    let (models, layouts) = (models(), all_layouts());
    let models = &models[..trainyard_testing::cases("models", 2, models.len() as u64) as usize];
    let layouts = &layouts[..trainyard_testing::cases("layouts", 20, layouts.len() as u64) as usize];
    compare("layouts", models, layouts, trainyard_testing::cases("steps", 3, 100));
}

#[test]
fn a_mixture_trains_as_on_one_rank() {
    let layouts = of_experts();
    let layouts = &layouts[..trainyard_testing::cases("layouts of a mixture", 6, layouts.len() as u64) as usize];
    compare("experts", &[MIXTURE], layouts, trainyard_testing::cases("steps", 3, 100));
}

/// Every layout without parts of products and of sequences, of which it has none.
#[test]
fn an_encoder_and_a_decoder_train_as_on_one_rank() {
    let fits = |layout: &Layout| layout.tensor == 1 && layout.context == 1;
    let layouts: Vec<Layout> = all_layouts().into_iter().rev().filter(fits).collect();
    let layouts = &layouts[..trainyard_testing::cases("layouts of an encoder", 8, layouts.len() as u64) as usize];
    compare("encoders", &ENCODER, layouts, trainyard_testing::cases("steps", 3, 100));
}

#[test]
fn every_schedule_trains_the_bits_of_no_pipeline() {
    let pipelines: Vec<Layout> = of_four().into_iter().rev().filter(|layout| layout.pipeline > 1).collect();
    let kept = trainyard_testing::cases("layouts", 3, pipelines.len() as u64) as usize;
    let with_all = |layout: &Layout| SCHEDULES.map(|schedule| Layout { schedule, ..*layout });
    let layouts: Vec<Layout> = pipelines[..kept].iter().flat_map(with_all).collect();
    compare("schedules", &models(), &layouts, trainyard_testing::cases("steps", 3, 20));
}
