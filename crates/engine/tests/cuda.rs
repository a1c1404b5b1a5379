//! Training on CUDA without a GPU: on the fake driver, which checks the order of streams and every access, and with the kernels emulated on the host,
//! so that a small model really trains. Where `TRAINYARD_TEST_DEVICE` says so it trains on a GPU.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use trainyard_autograd::{Policy, Tape};
use trainyard_data::{IndexedTokens, PrepareOptions, prepare};
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_engine::corpora::open_text;
use trainyard_engine::evaluate::{EvaluationSettings, evaluate};
use trainyard_engine::generate::{Sampling, generate};
use trainyard_engine::lanes::Span;
use trainyard_engine::links::Links;
use trainyard_engine::metrics::Quiet;
use trainyard_engine::predict::predict;
use trainyard_engine::rank::{Launches, Rank, RankSettings, StepOutcome, StepSettings, stretch};
use trainyard_engine::session::{Session, open_trained_on};
use trainyard_engine::shape;
use trainyard_engine::state::Holding;
use trainyard_engine::tier::Tiers;
use trainyard_engine::trainer::{Control, train};
use trainyard_engine::world;
use trainyard_model::{Batch, BatchShape, BatchSlices, Forward, Model, ModelSpec, Output};
use trainyard_program::{Action, Lane, Mesh, Program, State, Strategy, check, lower_rank};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::philox::RandomKey;
use trainyard_tensor::cuda::driver::Product;
use trainyard_tensor::cuda::fake::{Fake, Options, Record};
use trainyard_tensor::cuda::tested::Tested;
use trainyard_tensor::cuda::{AttentionForm, Cuda};
use trainyard_tensor::{Computes, DType, Device, Purpose};

const LENGTH: usize = 16;
const ROWS: usize = 2;

const LLAMA: &str = "[model]\nfamily = 'llama'\ndim = 32\nlayers = 2\nheads = 4\nkv_heads = 2\nffn_dim = 64\n\
                     vocab_size = 61\nmax_sequence_length = 64\n";
const GPT2: &str = "[model]\nfamily = 'gpt2'\ndim = 32\nlayers = 2\nheads = 4\nffn_dim = 64\nvocab_size = 61\n\
                    max_sequence_length = 64\n";

fn resolved(model: &str, sets: &[&str]) -> Resolved {
    let text = format!(
        "{model}[training]\nsteps = 10\nsequence_length = {LENGTH}\nmicro_batch_size = {ROWS}\n[optimizer]\n\
         learning_rate = 0.01\n"
    );
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    Config::parse("test.toml".as_ref(), &text, &sets).unwrap().resolve(&inputs).unwrap()
}

/// A run of a small model: what it is, and how its steps go.
struct Trial {
    spec: ModelSpec,
    settings: RankSettings,
    program: Program,
}

impl Trial {
    fn new(model: &str, sets: &[&str]) -> Trial {
        Trial::lowered(model, sets, false)
    }

    fn lowered(model: &str, sets: &[&str], snapshot: bool) -> Trial {
        let resolved = resolved(model, sets);
        let spec = shape::model_spec(&resolved).unwrap();
        let model = Model::new(spec.clone()).unwrap();
        let dtype = shape::compute_dtype(&resolved);
        let model_shape = shape::model_shape(&model, &BatchShape::uniform(ROWS, LENGTH), dtype).unwrap();
        let strategy = Strategy { snapshot, ..shape::strategy(&resolved, model.units().len()) };
        let program = lower_rank(&model_shape, &Mesh::default(), &strategy, 0).unwrap();
        check(&program).unwrap();
        Trial { spec, settings: shape::rank_settings(&resolved), program }
    }

    fn model(&self) -> Model {
        Model::new(self.spec.clone()).unwrap()
    }

    /// Two rows in which each token follows from the one before.
    fn batch(&self, device: &Device, model: &Model, number: usize) -> Batch {
        let vocab = self.spec.vocab_size as i32;
        let mut tokens = Vec::new();
        let mut targets = Vec::new();
        for row in 0..ROWS {
            let mut token = (number * 31 + row * 7 + 3) as i32 % vocab;
            for _ in 0..LENGTH {
                tokens.push(token);
                token = (token * 5 + 11) % vocab;
                targets.push(token);
            }
        }
        model.rows(device, LENGTH, &tokens, Some(&targets)).unwrap()
    }

    fn rank(&self, device: &Device) -> Rank {
        let (holding, links) = (Holding::of(&self.program), Links::default());
        // Nothing lies in files here.
        let tiers = Tiers::create(&self.program, device, "nowhere".as_ref()).unwrap();
        Rank::with_tiers(device, self.model(), holding, tiers, links, &self.settings).unwrap()
    }

    fn step(&self, rank: &mut Rank, step: u64) -> StepOutcome {
        self.step_with(rank, step, |_| ())
    }

    fn step_with(&self, rank: &mut Rank, step: u64, mut snapshot: impl FnMut(&Rank) + Send) -> StepOutcome {
        let settings = StepSettings { step, rate_factor: 1.0, clip_norm: Some(1.0) };
        let mut number = step as usize * self.program.micro_batches as usize;
        let load = |device: &Device, model: &Model| {
            number += 1;
            Ok(self.batch(device, model, number))
        };
        let snapshot = |rank: &Rank, _: &StepOutcome| {
            snapshot(rank);
            Ok(())
        };
        rank.execute(&self.program, settings, load, snapshot).unwrap()
    }

    fn masters(rank: &Rank) -> Vec<f32> {
        let ids: Vec<_> = rank.model().parameters().map(|(id, _)| id).collect();
        ids.into_iter().flat_map(|id| rank.read_masters(id).unwrap()).collect()
    }

    fn run(&self, device: &Device, steps: u64) -> (Vec<StepOutcome>, Vec<f32>) {
        let mut rank = self.rank(device);
        let outcomes = (0..steps).map(|step| self.step(&mut rank, step)).collect();
        (outcomes, Trial::masters(&rank))
    }
}

fn fake(options: Options) -> (Arc<Fake>, Device) {
    let fake = Arc::new(Fake::new(options));
    let device = Device::cuda(Arc::new(Cuda::new(fake.clone(), 1)), None);
    (fake, device)
}

fn names(records: &[Record]) -> Vec<&'static str> {
    records.iter().map(|record| record.name).collect()
}

#[test]
fn a_step_is_launched_in_order_and_takes_the_memory_that_meta_predicts() {
    let adamw = &["adamw"][..];
    let muon = &[
        "adamw",
        "muon_average",
        "chunk_squares",
        "sum_f64",
        "muon_normalise",
        "product",
        "muon_apply",
        "cast_to_bf16",
    ];
    let adafactor = &[
        "adafactor_rows",
        "adafactor_column_sums",
        "sum_partials",
        "adafactor_columns",
        "adafactor_row_mean",
        "adafactor_squares",
        "chunk_squares",
        "sum_f64",
        "adafactor_length",
        "adafactor_apply",
        "adafactor_vector_moment",
        "adafactor_vector_apply",
    ];
    for (model, sets, update) in [
        (LLAMA, &["precision.compute=bf16"][..], adamw),
        (
            LLAMA,
            &["precision.compute=bf16", "training.accumulation_steps=2", "activation_checkpointing.mode=full"],
            adamw,
        ),
        (GPT2, &["precision.compute=bf16", "model.dropout=0.1"], adamw),
        (GPT2, &["precision.compute=f32", "activation_checkpointing.mode=selective"], adamw),
        (LLAMA, &["precision.fp8=hybrid", "training.accumulation_steps=2"], adamw),
        (GPT2, &["precision.fp8=hybrid", "activation_checkpointing.mode=full"], adamw),
        (LLAMA, &["precision.compute=bf16", "optimizer.name=muon"], muon),
        (GPT2, &["precision.compute=bf16", "optimizer.name=adafactor", "optimizer.relative_step=true"], adafactor),
    ] {
        let trial = Trial::new(model, sets);
        let (fake, device) = fake(Options::default());
        let mut rank = trial.rank(&device);
        device.pool().reset_peaks();
        let steps = [0, 1, 2].map(|step| {
            fake.take_records();
            trial.step(&mut rank, step);
            assert_eq!(fake.problems(), [""; 0], "{sets:?}");
            names(&fake.take_records())
        });
        let shape = BatchShape::uniform(ROWS, LENGTH);
        let settings = RankSettings { computes: Computes::Cuda, ..trial.settings };
        let predicted = predict(trial.model(), &trial.program, &shape, &settings).unwrap().memory;
        let measured = device.pool().usage();
        for purpose in Purpose::ALL {
            assert_eq!(measured.peak(purpose), predicted.peak(purpose), "{purpose} of {sets:?}");
        }
        assert_eq!(measured.peak_total(), predicted.peak_total(), "{sets:?}");
        assert!(fake.used().1 <= measured.reserved().max(measured.peak_total() + measured.peak_total() / 8));

        // The first step brings tables to the device.
        let [_, second, third] = steps;
        assert_eq!(second, third, "{sets:?}");
        let first = |name| third.iter().position(|n| *n == name).unwrap_or_else(|| panic!("no {name} in {third:?}"));
        let order = ["embedding", "cross_entropy_in_place", "index_add", "chunk_squares", update[0]].map(first);
        assert!(order.is_sorted(), "{third:?}");
        assert!(third[order[4]..].iter().all(|n| update.contains(n)), "{third:?}");
        // The host reads nothing before the norm, so until then it runs ahead.
        assert!(first("download") > order[3], "{third:?}");
    }
}

#[test]
fn a_full_device_says_what_did_not_fit() {
    let trial = Trial::new(LLAMA, &["precision.compute=bf16"]);
    let (_, device) = fake(Options { memory: 40 << 20, ..Options::default() });
    let mut rank = trial.rank(&device);
    let settings = StepSettings { step: 0, rate_factor: 1.0, clip_norm: None };
    let load = |device: &Device, model: &Model| Ok(trial.batch(device, model, 0));
    let (_small, big) = (rank.execute(&trial.program, settings, load, |_, _| Ok(())), 20 << 20);
    let error = device.empty([big], trainyard_tensor::DType::F32, Purpose::Activations).unwrap_err().to_string();
    assert!(error.contains("83886080 bytes left") && error.contains("of 41943040 are free"), "{error}");
}

/// The device under test. A machine without a C++ compiler cannot run these tests, and says so.
fn device(seed: u64) -> (Tested, Device) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let tested = Tested::new(&folder, seed).unwrap_or_else(|problem| panic!("{problem}"));
    let device = Device::cuda(Arc::new(Cuda::new(tested.driver.clone(), 1)), None);
    (tested, device)
}

/// Whether the device has products of eight bits: the emulation has.
fn has_fp8(gpu: &Device) -> bool {
    let has = gpu.as_cuda().unwrap().properties().capability >= Product::FP8_CAPABILITY;
    if !has {
        println!("not run: the GPU has no products of eight bits");
    }
    has
}

#[test]
fn emulated_kernels_train_like_the_cpu() {
    for (model, sets, tolerance) in [
        (LLAMA, &["precision.compute=f32"][..], 1e-4),
        (GPT2, &["precision.compute=f32", "model.dropout=0.1"], 1e-4),
        (LLAMA, &["precision.compute=bf16", "activation_checkpointing.mode=full"], 2e-2),
        (GPT2, &["precision.compute=bf16", "training.accumulation_steps=2"], 2e-2),
        // The first step is computed in bf16; a rounding that falls the other way in eight bits is one of bf16's that does, made larger. At ten times this rate the
        // norm jumps, and four steps make 6 % of attention's probabilities in bf16 here and in f32 on processors without tiles.
        (LLAMA, &["precision.fp8=hybrid", "activation_checkpointing.mode=full", "optimizer.learning_rate=0.001"], 2e-2),
        (GPT2, &["precision.fp8=hybrid", "training.accumulation_steps=2", "optimizer.learning_rate=0.001"], 2e-2),
        (LLAMA, &["precision.compute=f32", "optimizer.name=muon"], 1e-4),
        (GPT2, &["precision.compute=bf16", "optimizer.name=muon"], 2e-2),
        // Adafactor makes steps of full length of gradients that are rounding alone, as those of GPT-2's key biases: there the CPU's own kernels differ by 2e-4.
        (LLAMA, &["precision.compute=f32", "optimizer.name=adafactor"], 1e-4),
        (LLAMA, &["precision.compute=bf16", "optimizer.name=adafactor"], 2e-2),
    ] {
        let trial = Trial::new(model, sets);
        if trial.settings.fp8.is_some() && !has_fp8(&device(0).1) {
            continue;
        }
        let (expected, _) = trial.run(&Device::cpu(Isa::detect(), 1, None), 4);
        for form in forms(&trial) {
            let on = |seed| {
                let (tested, gpu) = device(seed);
                gpu.as_cuda().unwrap().choose_attention(trial.settings.compute, Some(form)).unwrap();
                let result = trial.run(&gpu, 4);
                assert_eq!(tested.problems(), [""; 0], "{sets:?}");
                result
            };
            let (outcomes, weights) = on(0);
            for (got, want) in outcomes.iter().zip(&expected) {
                let near = |a: f64, b: f64| (a - b).abs() <= tolerance * b.abs();
                assert!(near(got.loss, want.loss), "loss {} and {} on the CPU, {sets:?}", got.loss, want.loss);
                let norms = (got.gradient_norm, want.gradient_norm);
                assert!(near(norms.0, norms.1), "gradient norm {norms:?}, {sets:?}");
            }
            // It learns, and whatever order the streams' heads are taken in, the bits are the same.
            assert!(outcomes[3].loss < outcomes[0].loss);
            assert!(on(7).1 == weights, "{sets:?}");
        }
    }
}

/// The ways in which attention of a trial can multiply on tensor cores, if it does at all.
fn forms(trial: &Trial) -> Vec<AttentionForm> {
    let gpu = device(0).1;
    let mut forms = vec![AttentionForm::Warps];
    if trial.settings.compute != DType::F32 && gpu.as_cuda().unwrap().has_attention(AttentionForm::Warpgroups) {
        forms.push(AttentionForm::Warpgroups);
    }
    forms
}

/// A model that has seen some text, trained on the processor.
fn trained(folder: &Path, model: &str) {
    let words = (0..600).map(|i| format!("{} ", (i * 7919) % 311)).collect::<String>();
    std::fs::write(folder.join("text.txt"), words).unwrap();
    let toml = format!(
        "[run]\nname = 'run'\ndirectory = '{0}'\n{model}[tokenizer]\nkind = 'bytes'\n[data]\ntrain = '{0}/text.txt'\n\
         validation_fraction = 0\n[training]\nsteps = 20\nsequence_length = 32\nmicro_batch_size = 4\n[optimizer]\n\
         learning_rate = 0.01\n[schedule]\nkind = 'constant'\nwarmup_steps = 0\n[compute]\nthreads = 1\n[metrics]\ntensorboard = false\n",
        folder.display()
    );
    let config = Config::parse("c.toml".as_ref(), &toml, &[]).unwrap();
    let (stop, process_start) = (AtomicBool::new(false), Instant::now());
    world::on_threads(1, |world| {
        let mut session = Session::create(&config, world, |_| ())?;
        let on_stuck = |what: &str| panic!("nothing here hangs for ever: {what}");
        Ok(train(&mut session, &mut Quiet, Control { stop: &stop, process_start, on_stuck })?.ending)
    })
    .unwrap();
}

#[test]
fn emulated_kernels_evaluate_and_generate_like_the_cpu() {
    for model in [
        "[model]\nfamily = 'llama'\ndim = 32\nlayers = 2\nheads = 4\nkv_heads = 2\nffn_dim = 64\nmax_sequence_length = 40\n",
        "[model]\nfamily = 'gpt2'\ndim = 32\nlayers = 2\nheads = 4\nffn_dim = 64\nmax_sequence_length = 40\n",
    ] {
        let folder = tempfile::tempdir().unwrap();
        trained(folder.path(), model);
        let run = |device: &Device, dtype| {
            let trained = open_trained_on(device, &folder.path().join("run"), Some(dtype), |_| ()).unwrap();
            let corpus = open_text(&[folder.path().join("text.txt")], "text").unwrap();
            let out = folder.path().join("tokens");
            let options = PrepareOptions { validation_fraction: 0.0, reuse: true, ..PrepareOptions::new(out) };
            let made = prepare(&corpus, &trained.tokenizer, &options, |_| ()).unwrap();
            let texts = [IndexedTokens::open(&made.train).unwrap()];
            let settings = EvaluationSettings {
                sequence_length: 32,
                rows: 3,
                respect_document_boundaries: true,
                batches_max: Some(3),
            };
            let loss = evaluate(&trained.rank, &texts, &trained.tokenizer, settings).unwrap();
            let prompt = trained.tokenizer.encode("17 42").unwrap();
            // Longer than the context, which slides.
            let samplings =
                [Sampling { temperature: 0.0, ..Sampling::default() }, Sampling { seed: 3, ..Sampling::default() }];
            let texts = samplings.map(|sampling| {
                let mut tokens = Vec::new();
                let each = |token| {
                    tokens.push(token);
                    true
                };
                generate(&trained.rank, &prompt, 50, sampling, &[], each).unwrap();
                tokens
            });
            (loss, texts)
        };
        let cpu = Device::cpu(Isa::detect(), 1, None);
        let (tested, gpu) = device(0);
        let (got, want) = (run(&gpu, DType::F32), run(&cpu, DType::F32));
        assert_eq!(tested.problems(), [""; 0]);
        assert_eq!((got.0.targets, got.0.text_bytes), (want.0.targets, want.0.text_bytes));
        assert!((got.0.loss() - want.0.loss()).abs() <= 1e-5 * want.0.loss(), "{} and {}", got.0.loss(), want.0.loss());
        assert_eq!(got.1, want.1, "of {model}");
        let (got, want) = (run(&gpu, DType::BF16).0.loss(), run(&cpu, DType::BF16).0.loss());
        assert!((got - want).abs() <= 1e-2 * want, "{got} and {want} on the CPU");
    }
}

const OPTIMIZER: &str = "memory.offload.optimizer=host";
const PARAMETERS: &str = "memory.offload.parameters=host";
const ACTIVATIONS: &str = "memory.offload.activations=host";

/// What can be offloaded, alone and together, with more chunks than one and other depths.
const WAYS: [&[&str]; 7] = [
    &[OPTIMIZER],
    &[OPTIMIZER, "memory.offload.chunk_elements=4096"],
    &[PARAMETERS],
    &[ACTIVATIONS],
    &[ACTIVATIONS, PARAMETERS, "parallel.prefetch=2"],
    &[OPTIMIZER, PARAMETERS, ACTIVATIONS, "memory.offload.chunk_elements=8192"],
    &[OPTIMIZER, PARAMETERS, "parallel.prefetch=0"],
];

#[test]
fn what_lies_on_the_host_comes_and_goes_in_order_and_takes_the_memory_that_meta_predicts() {
    let base = ["device=cuda", "training.accumulation_steps=2"];
    for (model, precision) in [(LLAMA, "precision.compute=bf16"), (GPT2, "precision.compute=f32")] {
        for way in WAYS {
            let sets = [&base[..], &[precision], way].concat();
            let trial = Trial::new(model, &sets);
            let (fake, device) = fake(Options::default());
            let mut rank = trial.rank(&device);
            for step in 0..3 {
                trial.step(&mut rank, step);
            }
            assert_eq!(fake.problems(), [""; 0], "{sets:?}");
            let shape = BatchShape::uniform(ROWS, LENGTH);
            let predicted = predict(trial.model(), &trial.program, &shape, &trial.settings).unwrap();
            for (measured, predicted) in
                [(device.pool().usage(), predicted.memory), (rank.host_memory(), predicted.host_memory)]
            {
                for purpose in Purpose::ALL {
                    assert_eq!(measured.peak(purpose), predicted.peak(purpose), "{purpose} of {sets:?}");
                }
                assert_eq!(measured.peak_total(), predicted.peak_total(), "{sets:?}");
            }
            // What lies there is not on the device as well.
            let optimizer = way.contains(&OPTIMIZER);
            assert_eq!(predicted.memory.peak(Purpose::Optimizer) == 0, optimizer, "{sets:?}");
            assert_eq!(predicted.host_memory.peak(Purpose::Optimizer) > 0, optimizer, "{sets:?}");
            assert_eq!(predicted.host_memory.peak(Purpose::Activations) > 0, way.contains(&ACTIVATIONS), "{sets:?}");
        }
    }
}

#[test]
fn what_lies_on_the_host_changes_no_bit() {
    for (model, base) in [
        (LLAMA, ["device=cuda", "precision.compute=bf16", "training.accumulation_steps=2"]),
        (GPT2, ["device=cuda", "precision.compute=f32", "activation_checkpointing.mode=full"]),
    ] {
        let reference = {
            let (_tested, gpu) = device(0);
            Trial::new(model, &base).run(&gpu, 3)
        };
        for (number, way) in WAYS.into_iter().enumerate() {
            let sets = [&base[..], way].concat();
            let (tested, gpu) = device(number as u64);
            let (outcomes, weights) = Trial::new(model, &sets).run(&gpu, 3);
            assert_eq!(tested.problems(), [""; 0], "{sets:?}");
            let losses = |outcomes: &[StepOutcome]| outcomes.iter().map(|o| o.loss).collect::<Vec<_>>();
            assert_eq!(losses(&outcomes), losses(&reference.0), "{sets:?}");
            assert!(weights == reference.1, "{sets:?}: some weight differs");
        }
    }
}

/// On the fake's clocks, on which streams run beside each other as far as their events let them: what a pass needs comes while the one before it computes, and what
/// a pass leaves goes while the next one does.
#[test]
fn what_lies_on_the_host_moves_beside_computing() {
    let model = LLAMA.replace("layers = 2", "layers = 6");
    let trial = Trial::new(&model, &["device=cuda", "precision.compute=bf16", PARAMETERS, ACTIVATIONS]);
    let (fake, device) = fake(Options::default());
    let mut rank = trial.rank(&device);
    trial.step(&mut rank, 0);
    let spans = trial.step(&mut rank, 1).spans;
    assert_eq!(fake.problems(), [""; 0]);
    let actions: Vec<Action> = trial.program.instructions.iter().map(|i| i.action).collect();
    let is_pass = |n: &usize| matches!(actions[*n], Action::Forward { .. } | Action::Backward { .. });
    let passes: Vec<usize> = trial.program.on_lane(Lane::Compute).filter(is_pass).collect();
    let (mut fetched, mut evicted) = (0, 0);
    for number in trial.program.on_lane(Lane::HostIo) {
        match actions[number] {
            Action::Fetch { unit, state } => {
                let uses = |n: &&usize| actions[**n].unit() == Some(unit) && **n > number;
                let Some(user) = passes.iter().position(|n| uses(&n)) else { continue };
                let backward = matches!(actions[passes[user]], Action::Backward { .. });
                if user == 0 || matches!(state, State::Activations { .. }) != backward {
                    continue;
                }
                let (fetch, before) = (spans[number], spans[passes[user - 1]]);
                assert!(fetch.start < before.end, "{:?}: {fetch:?} after {before:?}", actions[number]);
                fetched += 1;
            }
            Action::Evict { unit, state: State::Activations { .. }, .. } => {
                let left = passes.iter().position(|n| actions[*n].unit() == Some(unit)).unwrap();
                let (evict, next) = (spans[number], spans[passes[left + 1]]);
                if evict.start == evict.end {
                    continue; // Nothing was to be moved.
                }
                assert!(next.start < evict.end, "{:?}: {next:?} after {evict:?}", actions[number]);
                evicted += 1;
            }
            _ => {}
        }
    }
    assert!(fetched >= 10 && evicted >= 5, "{fetched} {evicted}");
}

#[test]
fn a_snapshot_has_what_was_just_moved_to_the_host() {
    for seed in 0..4 {
        let sets = ["device=cuda", "precision.compute=f32", PARAMETERS];
        let trial = Trial::lowered(LLAMA, &sets, true);
        let (tested, gpu) = device(seed);
        let mut rank = trial.rank(&gpu);
        let mut taken = Vec::new();
        trial.step_with(&mut rank, 0, |rank| taken = Trial::masters(rank));
        assert_eq!(tested.problems(), [""; 0]);
        assert!(taken == Trial::masters(&rank), "some weight of the snapshot is that of the step before");
    }
}

/// On the fake's clocks too: a link works in both directions at once.
#[test]
fn what_lies_on_the_host_comes_while_other_things_go() {
    let model = LLAMA.replace("layers = 2", "layers = 6");
    for (way, least) in [
        (&[PARAMETERS, ACTIVATIONS][..], 4),
        (&[OPTIMIZER, "memory.offload.chunk_elements=4096"], 10),
        (&[OPTIMIZER, PARAMETERS, ACTIVATIONS], 6),
    ] {
        let trial = Trial::new(&model, &[&["device=cuda", "precision.compute=bf16"], way].concat());
        let (fake, device) = fake(Options::default());
        let mut rank = trial.rank(&device);
        trial.step(&mut rank, 0);
        let spans = trial.step(&mut rank, 1).spans;
        assert_eq!(fake.problems(), [""; 0], "{way:?}");
        let (to_host, to_device): (Vec<usize>, Vec<usize>) = trial
            .program
            .on_lane(Lane::HostIo)
            .filter(|number| trial.program.instructions[*number].bytes > 0)
            .partition(|number| trial.program.leaves_device(trial.program.instructions[*number].action));
        let together = |a: &Span, b: &Span| a.start.max(b.start) < a.end.min(b.end);
        let beside = |number: &&usize| to_device.iter().any(|other| together(&spans[**number], &spans[*other]));
        let found = to_host.iter().filter(beside).count();
        assert!(found >= least, "{found} of {} copies beside one of {}: {way:?}", to_host.len(), to_device.len());
        // Those in one direction are one after the other.
        for copies in [&to_host, &to_device] {
            assert!(copies.windows(2).all(|pair| spans[pair[0]].end <= spans[pair[1]].start), "{way:?}");
        }
    }
}

/// A language in which every token is followed by one of two, as a coin falls: its loss comes down to ln 2 and not to nothing, so that curves can be compared
/// to the end.
fn coin_batch(trial: &Trial, device: &Device, model: &Model, number: usize) -> Batch {
    let vocab = trial.spec.vocab_size as i32;
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    let mut random = number as u64;
    for row in 0..ROWS {
        let mut token = (number * 31 + row * 7 + 3) as i32 % vocab;
        for _ in 0..LENGTH {
            tokens.push(token);
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            token = if random >> 63 == 0 { token * 5 + 11 } else { token * 7 + 2 } % vocab;
            targets.push(token);
        }
    }
    model.rows(device, LENGTH, &tokens, Some(&targets)).unwrap()
}

#[test]
fn bf16_loss_curves_are_those_of_the_cpu() {
    /// Steps of which the mean is compared: a single one is as far off as rounding takes two runs apart.
    const WINDOW: usize = 10;
    let trial = Trial::new(LLAMA, &["precision.compute=bf16", "optimizer.learning_rate=0.002"]);
    let losses = |device: &Device, steps: usize| -> Vec<f64> {
        let mut rank = trial.rank(device);
        let step = |step| {
            let settings = StepSettings { step: step as u64, rate_factor: 1.0, clip_norm: Some(1.0) };
            let load = |device: &Device, model: &Model| Ok(coin_batch(&trial, device, model, step));
            rank.execute(&trial.program, settings, load, |_, _| Ok(())).unwrap().loss
        };
        let losses: Vec<f64> = (0..steps).map(step).collect();
        losses.chunks_exact(WINDOW).map(|window| window.iter().sum::<f64>() / WINDOW as f64).collect()
    };
    let (tested, gpu) = device(0);
    // Emulated kernels are some thousand times slower.
    let steps = if tested.fake.is_some() { 20 } else { 200 };
    let (found, wanted) = (losses(&gpu, steps), losses(&Device::cpu(Isa::detect(), 1, None), steps));
    assert_eq!((found.len(), tested.problems().len()), (steps / WINDOW, 0));
    for (window, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
        let off = (found / wanted - 1.0).abs();
        assert!(off <= 0.01, "steps from {}: mean loss {found}, {wanted} on the CPU", WINDOW * window);
    }
    assert!(wanted[wanted.len() - 1] < wanted[0], "it does not learn: {wanted:?}");
    println!("mean losses of {WINDOW} steps each: {found:.4?}, on the CPU {wanted:.4?}");
}

#[test]
fn a_step_is_timed_and_its_utilisation_is_of_the_measured_peak() {
    let resolved = resolved(LLAMA, &["precision.compute=bf16", "compute.device=cuda"]);
    let (tested, gpu) = device(0);
    let report = trainyard_engine::bench::steps_on(&gpu, &resolved, 1, std::time::Instant::now()).unwrap();
    assert_eq!(report.isa, gpu.as_cuda().unwrap().properties().architecture());
    assert!(report.step_s > 0.0 && report.mfu > 0.0 && report.mfu <= 1.0 && report.peak_tflops > 0.0, "{report:?}");
    let off = report.mem_peak_bytes as f64 / report.mem_predicted_bytes as f64 - 1.0;
    assert!(off.abs() <= 0.02, "{off}: {:?}", report.memory);
    assert!(report.kernels.iter().any(|kernel| kernel.name == "attention_backward" && kernel.seconds > 0.0));
    assert_eq!(tested.problems(), [""; 0]);
}

const GRAPHS: &str = "training.cuda_graphs=auto";

fn launches(outcomes: &[StepOutcome]) -> Vec<Launches> {
    outcomes.iter().map(|outcome| outcome.launches).collect()
}

/// Losses, norms and weights are the same bits.
fn assert_same(got: &(Vec<StepOutcome>, Vec<f32>), want: &(Vec<StepOutcome>, Vec<f32>), what: &str) {
    let numbers = |outcomes: &[StepOutcome]| -> Vec<[u64; 2]> {
        outcomes.iter().map(|outcome| [outcome.loss, outcome.gradient_norm].map(f64::to_bits)).collect()
    };
    assert_eq!(numbers(&got.0), numbers(&want.0), "{what}");
    let bits = |weights: &[f32]| weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>();
    assert!(bits(&got.1) == bits(&want.1), "{what}: some weight differs");
}

/// With dropout, whose numbers change from step to step, with f16, whose loss scale does, and with gradients that are folded.
#[test]
fn a_graph_is_captured_once_products_of_eight_bits_have_scales() {
    use Launches::{Captured, OneByOne, Replayed};
    if !has_fp8(&device(0).1) {
        return;
    }
    let sets = &["precision.fp8=hybrid", "training.accumulation_steps=2"][..];
    let run = |graphs: bool| {
        let (tested, gpu) = device(1);
        let result = Trial::new(LLAMA, &if graphs { [sets, &[GRAPHS]].concat() } else { sets.to_vec() }).run(&gpu, 5);
        assert_eq!(tested.problems(), [""; 0]);
        result
    };
    let (plain, graphs) = (run(false), run(true));
    assert_same(&graphs, &plain, "fp8");
    assert_eq!(launches(&graphs.0), [OneByOne, OneByOne, Captured, Replayed, Replayed]);
}

#[test]
fn a_replayed_graph_trains_the_same_bits_with_fewer_launches() {
    use Launches::{Captured, OneByOne, Replayed};
    for (number, (model, sets)) in [
        (GPT2, &["precision.compute=bf16", "model.dropout=0.1", "training.accumulation_steps=2"][..]),
        (GPT2, &["precision.compute=f16", "precision.loss_scale_window=1", "precision.loss_scale_initial=1024"]),
        (
            LLAMA,
            &[
                "precision.compute=bf16",
                "training.accumulation_steps=2",
                "training.elastic_bits=true",
                "activation_checkpointing.mode=full",
            ],
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let what = format!("{sets:?}");
        let run = |seed, graphs: bool| {
            let (tested, gpu) = device(seed);
            let trial = Trial::new(model, &if graphs { [sets, &[GRAPHS]].concat() } else { sets.to_vec() });
            let result = trial.run(&gpu, 4);
            assert_eq!(tested.problems(), [""; 0], "{what}");
            result
        };
        let (plain, graphs) = (run(0, false), run(number as u64, true));
        assert_same(&graphs, &plain, &what);
        assert_eq!(launches(&plain.0), [OneByOne; 4], "{what}");
        assert_eq!(launches(&graphs.0), [OneByOne, Captured, Replayed, Replayed], "{what}");
        let note = graphs.0[1].note.as_ref().expect("a capture is said");
        assert!(note.contains("launched as one CUDA graph"), "{note}");
        assert!(graphs.0[2..].iter().chain(&plain.0).all(|outcome| outcome.note.is_none()), "{what}");
        // What each instruction took is known as before.
        assert_eq!(graphs.0[3].spans.len(), plain.0[3].spans.len());
        let trial = Trial::new(model, sets);
        let stretch = stretch(&trial.program).unwrap();
        let spans = &graphs.0[3].spans[stretch];
        assert!(
            spans.iter().all(|span| span.end > span.start) && spans.is_sorted_by_key(|span| span.start),
            "{spans:?}"
        );
    }
}

#[test]
fn a_replayed_step_is_one_launch_and_takes_the_memory_that_meta_predicts() {
    for (model, sets) in [
        (LLAMA, &["precision.compute=bf16", "training.accumulation_steps=2", GRAPHS][..]),
        (GPT2, &["precision.compute=bf16", "model.dropout=0.1", GRAPHS]),
    ] {
        let trial = Trial::new(model, sets);
        let (fake, device) = fake(Options::default());
        let mut rank = trial.rank(&device);
        let (mut used, mut alone) = (0, 0);
        for step in 0..5 {
            fake.take_records();
            device.pool().reset_peaks();
            let outcome = trial.step(&mut rank, step);
            assert_eq!(fake.problems(), [""; 0], "{sets:?}");
            let records = names(&fake.take_records());
            let graphs = records.iter().filter(|name| **name == "graph").count();
            assert_eq!(graphs, usize::from(outcome.launches != Launches::OneByOne), "{records:?}");
            let settings = RankSettings { computes: Computes::Cuda, ..trial.settings };
            let shape = BatchShape::uniform(ROWS, LENGTH);
            let predicted = predict(trial.model(), &trial.program, &shape, &settings).unwrap().memory;
            let measured = device.pool().usage();
            for purpose in Purpose::ALL {
                let (measured, predicted) = (measured.peak(purpose), predicted.peak(purpose));
                let exact = purpose != Purpose::Data;
                assert!(
                    measured == predicted || !exact && measured < predicted,
                    "{purpose}: {measured} of {predicted}"
                );
            }
            assert!(measured.peak_total() <= predicted.peak_total(), "{sets:?}");
            if outcome.launches == Launches::OneByOne {
                alone = records.len();
            }
            if outcome.launches == Launches::Replayed {
                assert!(3 * records.len() < alone, "{} of {alone}: {records:?}", records.len());
                // Batches come before it, norm and update after.
                let at = records.iter().position(|name| *name == "graph").unwrap();
                assert!(records[..at].iter().all(|name| ["upload", "copy"].contains(name)), "{records:?}");
                assert!(!records[at..].contains(&"embedding") && records[at..].contains(&"adamw"), "{records:?}");
                // The first one takes batches of its own beside the graph's; from then on nothing is taken.
                assert!(step == 2 || fake.used().0 == used, "{sets:?}");
            }
            used = fake.used().0;
        }
    }
}

/// Packed documents of these lengths.
fn documents(trial: &Trial, device: &Device, model: &Model, number: usize, lengths: &[usize]) -> Batch {
    let (vocab, mut token) = (trial.spec.vocab_size as i32, number as i32 * 7 + 3);
    let (mut tokens, mut targets, mut positions, mut cu_seqlens) = (Vec::new(), Vec::new(), Vec::new(), vec![0]);
    for length in lengths {
        for position in 0..*length as i32 {
            token = token.rem_euclid(vocab);
            tokens.push(token);
            positions.push(position);
            token = token * 5 + 11;
            targets.push(if position + 1 < *length as i32 { token.rem_euclid(vocab) } else { -100 });
        }
        cu_seqlens.push(tokens.len() as i32);
    }
    let slices =
        BatchSlices { tokens: &tokens, targets: Some(&targets), positions: &positions, cu_seqlens: &cu_seqlens };
    model.batch(device, &slices).unwrap()
}

/// Documents begin elsewhere in every step and fewer targets count, which is in the graph's memory; another number of tokens, or positions that reach further, are not.
#[test]
fn a_step_of_another_shape_gives_the_graph_up_and_says_so() {
    use Launches::{Captured, OneByOne, Replayed};
    let steps: [(&[usize], Launches, &str); 10] = [
        (&[20, 12], OneByOne, ""),
        (&[24, 8], Captured, "launched as one CUDA graph"),
        (&[4, 20, 8], Replayed, ""),
        (&[7, 18, 7], Replayed, ""),
        (&[20, 12, 8], OneByOne, "its micro-batches have [40] tokens, the graph's [32]"),
        (&[20, 12], OneByOne, ""),
        (&[20, 12], Captured, "launched as one CUDA graph"),
        (&[16, 16], OneByOne, "its positions reach up to 16, the graph's to 32"),
        (&[16, 2, 14], Captured, "launched as one CUDA graph"),
        (&[15, 1, 16], Replayed, ""),
    ];
    for (model, precision) in [(LLAMA, "precision.compute=f32"), (GPT2, "precision.compute=bf16")] {
        let run = |sets: &[&str]| {
            let (trial, (tested, gpu)) = (Trial::new(model, sets), device(3));
            let mut rank = trial.rank(&gpu);
            let mut outcomes = Vec::new();
            for (number, (lengths, ..)) in steps.iter().enumerate() {
                let settings = StepSettings { step: number as u64, rate_factor: 1.0, clip_norm: Some(1.0) };
                let load = |device: &Device, model: &Model| Ok(documents(&trial, device, model, number, lengths));
                outcomes.push(rank.execute(&trial.program, settings, load, |_, _| Ok(())).unwrap());
                // What others do with the device between steps does not touch the graph's memory.
                let batch = documents(&trial, &gpu, rank.model(), 1, &[20, 12]);
                let key = RandomKey { seed: 0, step: 0, site: 0 };
                let mut tape = Tape::new(&gpu, &rank.parameters, Policy::Nothing, key);
                rank.forward(&mut tape, &mut Forward::evaluation(&batch, Output::Logits)).unwrap();
            }
            assert_eq!(tested.problems(), [""; 0], "{sets:?}");
            let ids: Vec<_> = rank.model().parameters().map(|(id, _)| id).collect();
            (outcomes, ids.into_iter().flat_map(|id| rank.read_masters(id).unwrap()).collect::<Vec<f32>>())
        };
        let graphs = run(&[precision, GRAPHS]);
        for (outcome, (_, launches, note)) in graphs.0.iter().zip(&steps) {
            let said = outcome.note.as_deref().unwrap_or("");
            assert!(outcome.launches == *launches && said.contains(note), "{:?} {said:?}", outcome.launches);
            assert_eq!(said.is_empty(), note.is_empty(), "{said:?}");
        }
        assert_same(&graphs, &run(&[precision]), precision);
    }
}

#[test]
fn a_step_that_cannot_be_captured_is_launched_as_always_and_says_so() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let run = |sets: &[&str], failing| {
        let kernels = trainyard_tensor::cuda::tested::kernels(&folder).unwrap_or_else(|problem| panic!("{problem}"));
        let (fake, device) = fake(Options { kernels: Some(Box::new(kernels)), failing, ..Options::default() });
        let result = Trial::new(GPT2, sets).run(&device, 4);
        assert_eq!(fake.problems(), [""; 0]);
        result
    };
    let sets = ["precision.compute=bf16", "model.dropout=0.1"];
    let (plain, refused) = (run(&sets, None), run(&[sets[0], sets[1], GRAPHS], Some("capture")));
    assert_same(&refused, &plain, "after a capture that failed");
    assert_eq!(launches(&refused.0), [Launches::OneByOne; 4]);
    let notes: Vec<_> = refused.0.iter().map(|outcome| outcome.note.as_deref().unwrap_or("")).collect();
    assert!(notes[1].contains("not as a CUDA graph") && notes[1].contains("asked for by the test"), "{notes:?}");
    assert_eq!([notes[0], notes[2], notes[3]], [""; 3]);
}

#[test]
fn what_has_other_lanes_between_its_passes_is_no_graph() {
    for set in [ACTIVATIONS, PARAMETERS, OPTIMIZER] {
        let trial = Trial::new(LLAMA, &["device=cuda", GRAPHS, set]);
        let error = stretch(&trial.program).unwrap_err();
        assert!(error.contains("lane host_io has `"), "{error}");
        let (fake, device) = fake(Options::default());
        let mut rank = trial.rank(&device);
        let outcomes: Vec<_> = (0..3).map(|step| trial.step(&mut rank, step)).collect();
        assert_eq!((launches(&outcomes), fake.problems().len()), (vec![Launches::OneByOne; 3], 0));
    }
    let mesh = Mesh { dp_replicate: 2, ..Mesh::default() };
    let trial = Trial::new(LLAMA, &[]);
    let dtype = trial.settings.compute;
    let shape = shape::model_shape(&trial.model(), &BatchShape::uniform(ROWS, LENGTH), dtype).unwrap();
    let strategy = shape::strategy(&resolved(LLAMA, &[]), trial.model().units().len());
    let error = stretch(&lower_rank(&shape, &mesh, &strategy, 0).unwrap()).unwrap_err();
    assert!(error.contains("2 ranks exchange between"), "{error}");
}
