//! Tests of training on CUDA without a GPU. A fake driver checks the order of streams and every
//! access. Kernels are emulated on the host, so a small model really trains. With
//! `TRAINYARD_TEST_DEVICE` set, the tests run on a GPU.

mod graphs;
mod on_host;
mod sides_and_images;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use trainyard_autograd::{Policy, Tape};
use trainyard_data::{IndexedTokens, PrepareOptions, prepare};
use trainyard_engine::EngineError;
use trainyard_engine::checkpoint::Choice;
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_engine::corpora::open_text;
use trainyard_engine::evaluate::{EvaluationSettings, evaluate};
use trainyard_engine::generate::{Sampling, generate};
use trainyard_engine::lanes::Span;
use trainyard_engine::largest::{Room, largest};
use trainyard_engine::links::Links;
use trainyard_engine::metrics::Quiet;
use trainyard_engine::periods;
use trainyard_engine::predict::predict;
use trainyard_engine::rank::{Launches, Rank, RankSettings, StepOutcome, StepSettings, stretch};
use trainyard_engine::session::Session;
use trainyard_engine::shape;
use trainyard_engine::state::Holding;
use trainyard_engine::tier::Tiers;
use trainyard_engine::trained::open_trained_on;
use trainyard_engine::trainer::{Control, train};
use trainyard_engine::world;
use trainyard_model::{Batch, BatchShape, BatchSlices, Forward, LayerRouting, Model, ModelSpec, Output, TensorSplit};
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

/// Both balance losses, a bias of the router, a capacity that drops choices, an MLP in the first
/// block and a shared expert.
const MIXTURE: &str = "[experts]\ncount = 5\ntop_k = 2\nffn_dim = 40\nshared_ffn_dim = 24\ndense_layers = 1\n\
                       auxiliary_loss = 0.05\nz_loss = 0.01\nbias_update_rate = 0.01\ncapacity_factor = 1.1\n\
                       [model]\nfamily = 'dots1'\ndim = 32\nlayers = 2\nheads = 4\nkv_heads = 2\nffn_dim = 64\n\
                       vocab_size = 61\nmax_sequence_length = 64\n";

/// Settings that offload each kind of state to the host.
const OPTIMIZER: &str = "memory.offload.optimizer=host";
const PARAMETERS: &str = "memory.offload.parameters=host";
const ACTIVATIONS: &str = "memory.offload.activations=host";
const GRADIENTS: &str = "memory.offload.gradients=host";

fn resolved(model: &str, sets: &[&str]) -> Resolved {
    let text = format!(
        "{model}[training]\nsteps = 10\nsequence_length = {LENGTH}\nmicro_batch_size = {ROWS}\n[optimizer]\n\
         learning_rate = 0.01\n"
    );
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    Config::parse("test.toml".as_ref(), &text, &sets).unwrap().resolve(&inputs).unwrap()
}

/// Settings of a run of a small model.
struct Trial {
    spec: ModelSpec,
    shape: BatchShape,
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
        let batch = shape::batch_shape(&resolved, &model);
        let model_shape = shape::model_shape(&model, &batch, dtype).unwrap();
        let strategy = Strategy { snapshot, ..shape::strategy(&resolved, model.units().len()).unwrap() };
        let program = lower_rank(&model_shape, &Mesh::default(), &strategy, 0).unwrap();
        check(&program).unwrap();
        Trial { spec, shape: batch, settings: shape::rank_settings(&resolved), program }
    }

    fn model(&self) -> Model {
        Model::new(self.spec.clone()).unwrap()
    }

    /// Two rows in which each token is a function of the one before; or pairs or images.
    fn batch(&self, device: &Device, model: &Model, number: usize) -> Batch {
        if self.shape.paired || self.shape.patch_len.is_some() {
            return sides_and_images::batch(self, device, model, number);
        }
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
        // No state lies in files here.
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
    let mixture = &["adamw", "sign_step"];
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
        (MIXTURE, &["precision.compute=bf16", "training.accumulation_steps=2"], mixture),
        (MIXTURE, &["precision.compute=f32", "activation_checkpointing.mode=full"], mixture),
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

/// The device under test. Without a C++ compiler, the tests fail with a message.
fn device(seed: u64) -> (Tested, Device) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let tested = Tested::new(&folder, seed).unwrap_or_else(|problem| panic!("{problem}"));
    let device = Device::cuda(Arc::new(Cuda::new(tested.driver.clone(), 1)), None);
    (tested, device)
}

/// True if the device has 8-bit products, as the emulation does.
fn has_fp8(gpu: &Device) -> bool {
    gpu.as_cuda().unwrap().properties().capability >= Product::FP8_CAPABILITY
}

#[test]
fn emulated_kernels_train_like_the_cpu() {
    let trials = [
        (LLAMA, &["precision.compute=f32"][..], 1e-4),
        (GPT2, &["precision.compute=bf16", "training.accumulation_steps=2"], 2e-2),
        // The first step is computed in bf16. Later, a value that bf16 rounds differently may fall
        // on the other side of an 8-bit rounding, which enlarges the difference. At ten times this
        // rate the norm jumps: attention's probabilities are bf16 here and f32 on CPUs without
        // tiles, and after four steps that makes 6 %.
        (LLAMA, &["precision.fp8=hybrid", "activation_checkpointing.mode=full", "optimizer.learning_rate=0.001"], 2e-2),
        (GPT2, &["precision.compute=f32", "model.dropout=0.1"], 1e-4),
        (MIXTURE, &["precision.compute=f32", "training.accumulation_steps=2"], 1e-4),
        (MIXTURE, &["precision.compute=bf16", "activation_checkpointing.mode=full"], 2e-2),
        (GPT2, &["precision.compute=bf16", "optimizer.name=muon"], 2e-2),
        // Gradients of GPT-2's key biases are rounding errors only, and Adafactor scales them to
        // steps of full length. The CPU's own kernels differ by 2e-4 there.
        (LLAMA, &["precision.compute=f32", "optimizer.name=adafactor"], 1e-4),
        (LLAMA, &["precision.compute=bf16", "activation_checkpointing.mode=full"], 2e-2),
        (GPT2, &["precision.fp8=hybrid", "training.accumulation_steps=2", "optimizer.learning_rate=0.001"], 2e-2),
        (LLAMA, &["precision.compute=f32", "optimizer.name=muon"], 1e-4),
        (LLAMA, &["precision.compute=bf16", "optimizer.name=adafactor"], 2e-2),
    ];
    let taken = trainyard_testing::cases("settings of kernels", 7, trials.len() as u64) as usize;
    for (model, sets, tolerance) in trials.into_iter().take(taken) {
        let trial = Trial::new(model, sets);
        if trial.settings.fp8.is_some() && !has_fp8(&device(0).1) {
            trainyard_testing::skip_part("the GPU has no products of eight bits");
            continue;
        }
        for outcomes in train_like_the_cpu(&trial, sets, tolerance) {
            assert!(outcomes[3].loss < outcomes[0].loss, "{sets:?}: nothing was learnt");
        }
    }
}

/// Trains four steps in each form of attention, and checks them against the CPU's. The bits are the
/// same in whatever order the fake driver runs the streams. Returns the steps of each form.
fn train_like_the_cpu(trial: &Trial, sets: &[&str], tolerance: f64) -> Vec<Vec<StepOutcome>> {
    let (expected, _) = trial.run(&Device::cpu(Isa::detect(), 1, None), 4);
    let in_form = |form| {
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
            // A step of bf16 may tip a token to another expert.
            if trial.settings.compute == DType::F32 {
                check_routing(got, want);
            }
        }
        assert!(on(7).1 == weights, "{sets:?}");
        outcomes
    };
    forms(trial).into_iter().map(in_form).collect()
}

/// Checks that tokens went the same ways, to the balance losses' rounding.
fn check_routing(got: &StepOutcome, want: &StepOutcome) {
    let layers = |outcome: &StepOutcome| -> Vec<(usize, LayerRouting)> {
        let record = outcome.routing.iter().flat_map(|record| record.layers());
        record.map(|(layer, routing)| (layer, routing.clone())).collect()
    };
    let (got, want) = (layers(got), layers(want));
    assert_eq!(got.len(), want.len());
    for ((_, got), (_, want)) in got.into_iter().zip(want) {
        assert_eq!((&got.counts, got.dropped, got.tokens), (&want.counts, want.dropped, want.tokens));
        assert!(want.tokens > 0.0 && want.auxiliary > 0.0 && want.z > 0.0, "{want:?}");
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-4 * b.abs();
        assert!(near(got.auxiliary, want.auxiliary) && near(got.z, want.z), "{got:?} and {want:?}");
    }
}

/// The tensor-core instructions that attention of a trial can use, if any.
fn forms(trial: &Trial) -> Vec<AttentionForm> {
    let gpu = device(0).1;
    let mut forms = vec![AttentionForm::Warps];
    if trial.settings.compute != DType::F32 && gpu.as_cuda().unwrap().has_attention(AttentionForm::Warpgroups) {
        forms.push(AttentionForm::Warpgroups);
    }
    forms
}

/// A model trained on some text, on the CPU.
fn trained(folder: &Path, model: &str) {
    std::fs::write(folder.join("text.txt"), trainyard_testing::text(600)).unwrap();
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
            let trained =
                open_trained_on(device, &folder.path().join("run"), Choice::Latest, Some(dtype), |_| ()).unwrap();
            let corpus = open_text(&[folder.path().join("text.txt")], "text", false).unwrap();
            let out = folder.path().join("tokens");
            let options = PrepareOptions { validation_fraction: 0.0, reuse: true, ..PrepareOptions::new(out) };
            let made = prepare(&corpus, trained.tokenizer.as_ref().unwrap(), &options, |_| ()).unwrap();
            let texts = [IndexedTokens::open(&made.train).unwrap()];
            let settings = EvaluationSettings {
                sequence_length: 32,
                rows: 3,
                respect_document_boundaries: true,
                tokens_max: Some(9 * 32),
                spans: None,
            };
            let loss = evaluate(&trained.rank, &texts, trained.tokenizer.as_ref().unwrap(), settings).unwrap();
            let prompt = trained.tokenizer.as_ref().unwrap().encode("17 42").unwrap();
            // The text is longer than the context, so the context slides.
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
/// A language in which every token is followed by one of two tokens at random. Its loss falls to ln
/// 2 rather than 0, so that loss curves can be compared to the end.
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
    /// Number of steps whose mean loss is compared. Single steps of two runs differ by rounding.
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
    let small = resolved(LLAMA, &["precision.compute=bf16", "compute.device=cuda"]);
    let (tested, gpu) = device(0);
    let report = trainyard_engine::bench::steps_on(&gpu, &small, 1, std::time::Instant::now()).unwrap();
    assert_eq!(report.isa, gpu.as_cuda().unwrap().properties().architecture());
    assert!(
        report.step_s > 0.0 && report.mfu.is_none_or(|mfu| mfu > 0.0 && mfu <= 1.0) && report.peak_tflops > 0.0,
        "{report:?}"
    );
    let off = report.mem_peak_bytes as f64 / report.mem_predicted_bytes as f64 - 1.0;
    assert!(off.abs() <= 0.02, "{off}: {:?}", report.memory);
    assert!(report.kernels.iter().any(|kernel| kernel.name == "attention_backward" && kernel.seconds > 0.0));
    assert_eq!(tested.problems(), [""; 0]);

    // Also with state on the host. Blocks are added as long as they fit.
    let sets = ["compute.device=cuda", "activation_checkpointing.mode=full", OPTIMIZER, GRADIENTS];
    let room = Room { device: 256 << 20, host: 1 << 20, disk: 0 };
    let blocks = |layers: usize| {
        Ok::<_, EngineError>(resolved(&LLAMA.replace("layers = 2", &format!("layers = {layers}")), &sets))
    };
    let found = largest(&room, blocks).unwrap().unwrap();
    let report = trainyard_engine::bench::steps_on(&gpu, &found.resolved, 1, std::time::Instant::now()).unwrap();
    assert_eq!(report.parameters, found.parameters);
    assert_eq!(report.host_peak_bytes, found.prediction.host_memory.peak_total() as u64);
    assert!(report.host_peak_bytes > 1 << 19 && report.host_peak_bytes <= 1 << 20, "{}", report.host_peak_bytes);
    assert_eq!(tested.problems(), [""; 0]);
}
