//! Tests of one rank that executes programs: equal results of strategies, predicted against
//! measured memory, faults, update rules.

use std::collections::{BTreeMap, VecDeque};
use trainyard_engine::config::{Config, Inputs, OptimizerSettings, Resolved};
use trainyard_engine::fp8::Fp8Settings;
use trainyard_engine::links::Links;
use trainyard_engine::precision::LossScaler;
use trainyard_engine::predict::predict;
use trainyard_engine::rank::{Rank, RankSettings, StepOutcome, StepSettings};
use trainyard_engine::shape;
use trainyard_engine::state::Holding;
use trainyard_model::{Batch, BatchShape, BatchSlices, Model, ModelSpec};
use trainyard_program::{Action, Instruction, Keep, Mesh, Strategy};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::{DType, Device, Purpose};

const LENGTH: usize = 16;

fn resolved(sets: &[&str]) -> Resolved {
    let tiny = trainyard_testing::tiny_llama(3)
        + "[training]\nsteps = 100\nsequence_length = 16\nmicro_batch_size = 4\n\
                [optimizer]\nlearning_rate = 0.01\n";
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    Config::parse("test.toml".as_ref(), &tiny, &sets).unwrap().resolve(&inputs).unwrap()
}

fn spec(sets: &[&str]) -> ModelSpec {
    shape::model_spec(&resolved(sets)).unwrap()
}

/// The kind of training text.
#[derive(Clone, Copy, PartialEq)]
enum Text {
    /// Each token is a function of the one before: learnable to a loss of zero.
    Regular,
    /// Every other token is random, so that the loss has a floor, as on real text.
    Noisy,
}

/// The text of row `row` of step `step`.
fn row(spec: &ModelSpec, text: Text, step: u64, row: usize) -> Vec<i32> {
    let vocab = spec.vocab_size as u64;
    let mut token = (step * 31 + row as u64 * 7 + 3) % vocab;
    (0..=LENGTH as u64)
        .map(|place| {
            token = (token * 5 + 11) % vocab;
            if text == Text::Noisy && place % 2 == 0 {
                let mixed = (step * 1_000_003 + row as u64 * 10_007 + place).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                token = (mixed >> 33) % vocab;
            }
            token as i32
        })
        .collect()
}

fn batch(device: &Device, model: &Model, text: Text, step: u64, rows: std::ops::Range<usize>) -> Batch {
    let spec = model.spec().unwrap();
    let texts: Vec<Vec<i32>> = rows.clone().map(|r| row(spec, text, step, r)).collect();
    let tokens: Vec<i32> = texts.iter().flat_map(|t| t[..LENGTH].to_vec()).collect();
    let targets: Vec<i32> = texts.iter().flat_map(|t| t[1..].to_vec()).collect();
    let positions: Vec<i32> = rows.clone().flat_map(|_| 0..LENGTH as i32).collect();
    let cu_seqlens: Vec<i32> = (0..=rows.len()).map(|r| (r * LENGTH) as i32).collect();
    let slices = BatchSlices::of_text(&tokens, Some(&targets), &positions, &cu_seqlens);
    model.batch(device, &slices).unwrap()
}

struct Trial {
    spec: ModelSpec,
    dtype: DType,
    fp8: Option<Fp8Settings>,
    int8: bool,
    optimizer: OptimizerSettings,
    keep: Keep,
    accumulation: u32,
    threads: usize,
    scaler: LossScaler,
    text: Text,
}

impl Trial {
    fn new(sets: &[&str]) -> Trial {
        let resolved = resolved(sets);
        Trial {
            spec: shape::model_spec(&resolved).unwrap(),
            dtype: shape::compute_dtype(&resolved),
            fp8: shape::fp8(&resolved),
            int8: shape::int8(&resolved),
            optimizer: resolved.optimizer,
            keep: Keep::Everything,
            accumulation: 1,
            threads: 2,
            scaler: LossScaler::none(),
            text: Text::Regular,
        }
    }

    /// Trains on four rows a step and returns the outcomes and all weights.
    fn run(&self, steps: u64) -> (Vec<StepOutcome>, Vec<f32>, Device) {
        let device = Device::cpu(Isa::detect(), self.threads, None);
        let model = Model::new(self.spec.clone()).unwrap();
        let rows = 4 / self.accumulation as usize;
        let [program, _] = self.programs(&model, rows);
        let mut rank =
            Rank::new(&device, model, Holding::of(&program), Links::default(), &self.rank_settings()).unwrap();
        let mut outcomes = Vec::new();
        for step in 0..steps {
            let settings = StepSettings { step, rate_factor: 1.0, clip_norm: Some(1.0) };
            let mut micro_batch = 0;
            let outcome = rank.execute(
                &program,
                settings,
                |device, model| {
                    micro_batch += 1;
                    Ok(batch(device, model, self.text, step, (micro_batch - 1) * rows..micro_batch * rows))
                },
                |_, _| Ok(()),
            );
            outcomes.push(outcome.unwrap());
        }
        let weights = weights(&rank);
        (outcomes, weights, device)
    }

    fn programs(&self, model: &Model, rows: usize) -> [trainyard_program::Program; 2] {
        let batch = BatchShape::uniform(rows, LENGTH);
        let shape = shape::model_shape(model, &batch, self.dtype).unwrap();
        let units = model.units().len();
        let (accumulation_steps, keep) = (self.accumulation, vec![self.keep; units]);
        let strategy = Strategy { accumulation_steps, keep, ..Strategy::new(units) };
        shape::programs(&shape, &Mesh::default(), &strategy, 0).unwrap()
    }

    fn rank_settings(&self) -> RankSettings {
        let Trial { dtype: compute, optimizer, scaler, .. } = *self;
        RankSettings { compute, fp8: self.fp8, int8: self.int8, scaler, ..RankSettings::new(optimizer, 7) }
    }
}

fn weights(rank: &Rank) -> Vec<f32> {
    let parameters = rank.model().parameters();
    parameters.flat_map(|(id, spec)| rank.parameters.master(id, &spec.shape).unwrap().to_f32_vec().unwrap()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn relative_difference(a: &[f32], b: &[f32]) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b))) / norm(&mut b.iter().map(|b| f64::from(*b)))
}

#[test]
fn checkpointing_and_threads_change_no_bit() {
    for sets in [
        &["precision.compute='f32'"][..],
        &["precision.compute='bf16'"],
        &["precision.compute='bf16'", "model.dropout=0.1", "model.family='gpt2'", "model.kv_heads=4"],
        &["precision.fp8='hybrid'"],
        &["precision.fp8='hybrid'", "model.dropout=0.1", "model.family='gpt2'", "model.kv_heads=4"],
        &["precision.int8='switchback'", "model.dropout=0.1", "model.family='gpt2'", "model.kv_heads=4"],
        &["precision.int8='switchback'", "precision.compute='f32'"],
    ] {
        let base = Trial::new(sets);
        let (outcomes, reference, _) = base.run(6);
        for keep in [Keep::Everything, Keep::Selective, Keep::InputOnly] {
            for threads in [1, 2, 3] {
                let trial = Trial { keep, threads, ..Trial::new(sets) };
                let (other, weights, device) = trial.run(6);
                assert_eq!(bits(&weights), bits(&reference), "{sets:?} {keep:?} {threads} threads");
                assert_eq!(other.last().unwrap().loss, outcomes.last().unwrap().loss);
                assert_eq!(device.pool().usage().live_total(), 0, "something leaked");
            }
        }
    }
}

#[test]
fn accumulation_gives_what_the_large_batch_gives() {
    let sets = &["precision.compute='f32'"];
    let (whole, reference, _) = Trial::new(sets).run(5);
    for accumulation in [2, 4] {
        let (parts, weights, _) = Trial { accumulation, ..Trial::new(sets) }.run(5);
        let difference = relative_difference(&weights, &reference);
        assert!(difference < 1e-5, "{accumulation} micro-batches: weights differ by {difference}");
        for (a, b) in parts.iter().zip(&whole) {
            assert!((a.loss - b.loss).abs() < 1e-5 * b.loss && (a.targets, a.tokens) == (b.targets, b.tokens));
            assert!((a.gradient_norm - b.gradient_norm).abs() < 1e-4 * b.gradient_norm);
        }
    }
}

/// Three models, two of them also with 8-bit products, floats or integers, in three checkpointing
/// modes. Meta predicts every purpose's peak to the byte, and full checkpointing keeps at most a
/// fifth of the activations.
#[test]
fn memory_is_what_meta_predicts() {
    let models: [&[&str]; 6] = [
        &[],
        &["precision.fp8='hybrid'"],
        &["precision.fp8='hybrid'", "model.family='gpt2'", "model.kv_heads=4", "model.dim=48", "model.layers=5"],
        &["model.family='gpt2'", "model.kv_heads=4", "model.dim=48", "model.layers=5"],
        &["precision.int8='switchback'", "model.ffn_dim=96"],
        &["model.qk_norm=true", "model.tie_embeddings=true", "model.layers=8", "model.ffn_dim=96"],
    ];
    for sets in models {
        let mut kept = Vec::new();
        for keep in [Keep::Everything, Keep::Selective, Keep::InputOnly] {
            let trial = Trial { keep, accumulation: 2, ..Trial::new(sets) };
            let model = Model::new(trial.spec.clone()).unwrap();
            let [program, _] = trial.programs(&model, 2);
            let last = model.units().len() as u32 - 1;
            let of_a_block = |i: &&Instruction| matches!(i.action, Action::Forward { unit, micro_batch: 0, .. } if unit > 0 && unit < last);
            let blocks = program.instructions.iter().filter(of_a_block);
            let saved: i64 = blocks.flat_map(|i| i.effects.iter().map(|e| e.bytes)).sum();
            kept.push(saved);
            let shape = BatchShape::uniform(2, LENGTH);
            let predicted =
                predict(Model::new(trial.spec.clone()).unwrap(), &program, &shape, &trial.rank_settings()).unwrap();
            let (_, _, device) = trial.run(2);
            let measured = device.pool().usage();
            for purpose in Purpose::ALL {
                let (p, m) = (predicted.memory.peak(purpose), measured.peak(purpose));
                assert_eq!(p, m, "{sets:?} {keep:?} {purpose}: predicted {p}, measured {m}");
            }
            assert_eq!(predicted.memory.peak_total(), measured.peak_total());
        }
        assert!(kept[0] > kept[1] && kept[1] > kept[2], "{kept:?}");
        assert!(kept[0] >= 5 * kept[2], "full keeps {} of {} bytes", kept[2], kept[0]);
    }
}

#[test]
fn every_optimizer_learns() {
    for (name, rate) in
        [("adamw", 0.01), ("sgd", 0.5), ("lion", 0.003), ("muon", 0.02), ("adafactor", 0.02), ("lamb", 0.05)]
    {
        let name_set = format!("optimizer.name='{name}'");
        let rate_set = format!("optimizer.learning_rate={rate}");
        let (outcomes, _, _) = Trial::new(&[&name_set, &rate_set]).run(60);
        let (first, last) = (outcomes[0].loss, outcomes[59].loss);
        assert!(last < 0.7 * first, "{name}: loss {first} -> {last}");
    }
}

#[test]
fn bf16_follows_f32_within_one_percent_for_200_steps() {
    let curve = |dtype: &str| -> Vec<f64> {
        let set = format!("precision.compute='{dtype}'");
        let sets = &[set.as_str(), "optimizer.learning_rate=0.001"];
        let (outcomes, _, _) = Trial { text: Text::Noisy, ..Trial::new(sets) }.run(200);
        outcomes.iter().map(|o| o.loss).collect()
    };
    let (exact, rounded) = (curve("f32"), curve("bf16"));
    for (step, (a, b)) in exact.iter().zip(&rounded).enumerate() {
        assert!((a - b).abs() <= 0.01 * a, "step {step}: f32 {a}, bf16 {b}");
    }
    assert!(exact[199] < 0.95 * exact[0], "nothing was learnt: {} -> {}", exact[0], exact[199]);
}

#[test]
fn a_step_that_is_not_finite_is_skipped_and_changes_nothing() {
    let trial = Trial::new(&[]);
    let device = Device::cpu(Isa::detect(), 2, None);
    let model = Model::new(trial.spec.clone()).unwrap();
    let [program, _] = trial.programs(&model, 4);
    let mut rank = Rank::new(&device, model, Holding::of(&program), Links::default(), &trial.rank_settings()).unwrap();
    let (id, shape) = rank.model().parameters().next().map(|(id, spec)| (id, spec.shape.clone())).unwrap();
    let mut master = rank.parameters.master(id, &shape).unwrap();
    let good = master.data::<f32>().unwrap()[0];
    master.data_mut::<f32>().unwrap()[0] = f32::NAN;
    rank.refresh_copies().unwrap();
    let before = weights(&rank);
    let step = |rank: &mut Rank, step| {
        let settings = StepSettings { step, rate_factor: 1.0, clip_norm: Some(1.0) };
        rank.execute(&program, settings, |d, m| Ok(batch(d, m, Text::Regular, 0, 0..4)), |_, _| Ok(())).unwrap()
    };
    let outcome = step(&mut rank, 0);
    assert!(outcome.skipped && rank.updates() == 0);
    assert_eq!(bits(&weights(&rank)), bits(&before));
    rank.parameters.master(id, &shape).unwrap().data_mut::<f32>().unwrap()[0] = good;
    rank.refresh_copies().unwrap();
    let outcome = step(&mut rank, 1);
    assert!(!outcome.skipped && rank.updates() == 1 && outcome.loss.is_finite());
}

#[test]
fn f16_halves_its_scale_until_gradients_are_finite_and_then_learns() {
    let sets = &["precision.compute='f16'", "optimizer.learning_rate=0.003"];
    let trial = Trial { scaler: LossScaler::dynamic(2f64.powi(24), 1000), ..Trial::new(sets) };
    let (outcomes, _, _) = trial.run(60);
    let skipped = outcomes.iter().take_while(|o| o.skipped).count();
    assert!((1..20).contains(&skipped), "{skipped} steps skipped at first");
    assert!(outcomes[skipped..].iter().all(|o| !o.skipped));
    assert!(outcomes[59].loss < 0.8 * outcomes[skipped].loss);
}

#[test]
fn the_loss_of_a_fresh_model_is_that_of_guessing() {
    let (outcomes, _, _) = Trial::new(&["precision.compute='f32'"]).run(1);
    let guessing = (spec(&[]).vocab_size as f64).ln();
    assert!((outcomes[0].loss - guessing).abs() < 0.1, "{} against {guessing}", outcomes[0].loss);
}

/// The relative rounding error is up to 2^-4 for E4M3, 2^-3 for E5M2 and 2^-9 for bf16. Errors of
/// single numbers are independent and average out in a product, so losses stay near. Micikevicius
/// et al. (2022, figure 1 and table 3) report losses of language models within 0.3 % to 1 % of
/// those in 16 bits. The bound here is that between bf16 and f32 above: 1 % at every step, and half
/// of it at the end.
///
/// A row of 8-bit integers has steps of 1/127 of its largest number, and numbers of a row are
/// mostly within a quarter of that: errors are like those of E4M3. Wortsman et al. (2023, figure 1)
/// find SwitchBack's accuracy within 0.1 points of bf16's.
#[test]
fn eight_bits_follow_bf16_for_150_steps() {
    for (recipe, family) in [
        ("precision.fp8='hybrid'", &[][..]),
        ("precision.fp8='hybrid'", &["model.family='gpt2'", "model.kv_heads=4"]),
        ("precision.int8='switchback'", &[]),
        ("precision.int8='switchback'", &["model.family='gpt2'", "model.kv_heads=4"]),
    ] {
        let curve = |set: &str| -> Vec<f64> {
            let sets = [family, &[set, "optimizer.learning_rate=0.001"]].concat();
            let (outcomes, _, _) = Trial { text: Text::Noisy, ..Trial::new(&sets) }.run(150);
            assert!(outcomes.iter().all(|outcome| !outcome.skipped));
            outcomes.iter().map(|o| o.loss).collect()
        };
        let (wide, rounded) = (curve("precision.fp8='off'"), curve(recipe));
        let off = |(a, b): (&f64, &f64)| (a - b).abs() / a;
        let each: Vec<f64> = wide.iter().zip(&rounded).map(off).collect();
        let most = each.iter().copied().fold(0.0, f64::max);
        let last = |curve: &[f64]| curve[130..].iter().sum::<f64>() / 20.0;
        let end = off((&last(&wide), &last(&rounded)));
        println!(
            "{recipe} {family:?}: at most {most:.5} off, {end:.5} over the last 20 steps; loss {} -> {}",
            wide[0],
            last(&wide)
        );
        // The first step with fp8 is computed in bf16; the others are not.
        assert!(
            (each[0] == 0.0) == recipe.contains("fp8") && each[1..].iter().filter(|off| **off > 0.0).count() > 140,
            "{each:?}"
        );
        assert!(most <= 0.01 && end <= 0.005, "{recipe} {family:?}: at most {most} off, {end} at the end");
        assert!(last(&rounded) < 0.95 * rounded[0], "nothing was learnt: {rounded:?}");
    }
}

#[test]
fn a_skipped_step_leaves_no_trace_in_the_scales_and_history_is_forgotten_in_time() {
    let trial = Trial::new(&["precision.fp8='hybrid'", "precision.fp8_amax_history=3"]);
    let run = |bad: Option<u64>| {
        let device = Device::cpu(Isa::detect(), 2, None);
        let model = Model::new(trial.spec.clone()).unwrap();
        let [program, _] = trial.programs(&model, 4);
        let mut rank =
            Rank::new(&device, model, Holding::of(&program), Links::default(), &trial.rank_settings()).unwrap();
        let (id, spec) = rank.model().parameters().find(|(id, _)| id.unit == 1).unwrap();
        let (id, shape) = (id, spec.shape.clone());
        let mut histories = Vec::new();
        let step = |rank: &mut Rank, number| {
            let settings = StepSettings { step: number, rate_factor: 1.0, clip_norm: Some(1.0) };
            let load = |d: &Device, m: &Model| Ok(batch(d, m, Text::Regular, number, 0..4));
            rank.execute(&program, settings, load, |_, _| Ok(())).unwrap()
        };
        for number in 0..6 {
            if bad == Some(number) {
                // A gain is made infinite. Rounding to 8 bits alone would turn the infinite results
                // into large finite numbers.
                let mut master = rank.parameters.master(id, &shape).unwrap();
                let good = std::mem::replace(&mut master.data_mut::<f32>().unwrap()[0], f32::INFINITY);
                rank.refresh_copies().unwrap();
                assert!(step(&mut rank, number).skipped && rank.measures_fp8() == (number == 0));
                master.data_mut::<f32>().unwrap()[0] = good;
                rank.refresh_copies().unwrap();
            }
            assert!(rank.measures_fp8() == (number == 0));
            assert!(!step(&mut rank, number).skipped);
            histories.push(rank.amax_history().unwrap());
        }
        (weights(&rank), histories)
    };
    let (plain, histories) = run(None);
    for bad in [0, 1, 4] {
        let (weights, others) = run(Some(bad));
        assert!(bits(&weights) == bits(&plain) && others == histories, "a skipped step {bad} left something");
    }
    // Three blocks of four layers of three tensors.
    let steps = |number: usize| Vec::from(VecDeque::clone(&histories[number].steps));
    assert!(
        histories.iter().flat_map(|h| &h.steps).all(|step| step.len() == 36 && step.iter().all(|most| *most > 0.0))
    );
    assert_eq!((steps(0).len(), steps(1).len(), steps(5).len()), (1, 2, 3));
    assert_eq!(steps(5)[..2], steps(4)[1..], "oldest first");
}

#[test]
fn sizes_that_products_of_eight_bits_do_not_take_are_said() {
    let error = shape::model_spec(&resolved(&[
        "precision.fp8='hybrid'",
        "model.ffn_dim=72",
        "training.micro_batch_size=3",
        "training.sequence_length=5",
    ]))
    .unwrap_err()
    .to_string();
    for part in ["multiples of 16", "model.ffn_dim = 72", "a rank's tokens of a micro-batch = 15"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!error.contains("model.dim"), "{error}");
    assert!(shape::model_spec(&resolved(&["model.ffn_dim=72"])).is_ok());
}

#[test]
fn units_that_get_no_gradient_are_counted() {
    let trial = Trial::new(&["precision.compute='f32'"]);
    let device = Device::cpu(Isa::detect(), 2, None);
    let model = Model::new(trial.spec.clone()).unwrap();
    let [program, _] = trial.programs(&model, 4);
    let mut rank = Rank::new(&device, model, Holding::of(&program), Links::default(), &trial.rank_settings()).unwrap();
    // Two units of the second block get nothing through either of their rows, so their activation
    // and their gradient are zero.
    let (up, shape) = rank
        .model()
        .parameters()
        .filter(|(_, spec)| spec.name == "mlp.up.weight")
        .map(|(id, spec)| (id, spec.shape.clone()))
        .nth(1)
        .unwrap();
    let all: Vec<_> = rank.model().parameters().map(|(id, _)| id).collect();
    let mut values: BTreeMap<_, _> = all.into_iter().map(|id| (id, rank.read_masters(id).unwrap())).collect();
    let units = shape[0] / 2;
    for row in [3, units - 1, units + 3, 2 * units - 1] {
        values.get_mut(&up).unwrap()[row * shape[1]..(row + 1) * shape[1]].fill(0.0);
    }
    rank.set_masters(|id, range, to| Ok(to.overwrite::<f32, _>(|to| to.copy_from_slice(&values[&id][range]))?))
        .unwrap();
    let mut dead = Vec::new();
    for step in 0..140 {
        let settings = StepSettings { step, rate_factor: 1.0, clip_norm: Some(1.0) };
        let load = |device: &Device, model: &Model| Ok(batch(device, model, Text::Noisy, step, 0..4));
        rank.execute(&program, settings, load, |_, _| Ok(())).unwrap();
        dead.push(rank.dead_rows().unwrap()[up.unit as usize]);
    }
    let rows = shape[0] as u64;
    assert_eq!((dead[0], dead[139]), ([4, rows], [4, rows]));
    let elsewhere: u64 = rank.dead_rows().unwrap().iter().map(|[dead, _]| dead).sum();
    assert_eq!(elsewhere, 4);
}
