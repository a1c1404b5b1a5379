//! Tests of a run's data: the order of the text, the held-back split, the amount of evaluation, the
//! number of passes, and early stopping.

#[path = "common/tensors.rs"]
mod tensors;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tensors::tensors;
use trainyard_autograd::{Policy, RandomKey, Tape};
use trainyard_data::{Corpus, CorpusOptions, IndexedTokens, PrepareOptions, Tokenizer, prepare};
use trainyard_engine::checkpoint::find_latest;
use trainyard_engine::config::Config;
use trainyard_engine::metrics::{EvaluationMetrics, Progress, StepMetrics};
use trainyard_engine::pretrained;
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::trainer::{Control, Ending, Summary, train};
use trainyard_engine::{Result, world};
use trainyard_model::weights::WeightReader;
use trainyard_model::{Forward, Model, Output, hf};
use trainyard_tensor::Device;
use trainyard_tensor::cpu::Isa;

fn config(folder: &Path, name: &str, sets: &[&str]) -> Config {
    let text = folder.join("text.txt");
    if !text.exists() {
        fs::write(&text, (0..3000).map(|i| format!("{} ", (i * 7919) % 311)).collect::<String>()).unwrap();
    }
    let toml = format!(
        "[run]\nname = '{name}'\ndirectory = '{0}'\n[model]\ndim = 16\nlayers = 2\nheads = 2\n[tokenizer]\nkind = 'bytes'\n\
         [data]\ntrain = '{0}/text.txt'\n[training]\nsteps = 6\nsequence_length = 16\nmicro_batch_size = 2\n\
         [precision]\ncompute = 'f32'\n[compute]\nthreads = 1\n[metrics]\ntensorboard = false\n",
        folder.display()
    );
    let at = folder.display().to_string();
    let sets: Vec<String> = sets.iter().map(|set| set.replace("{F}", &at)).collect();
    Config::parse("c.toml".as_ref(), &toml, &sets).unwrap()
}

/// Runs all ranks of `config`, as a new run or resumed in its run's folder, until step `stop_at`.
fn run(config: &Config, resume: Option<(&Path, &[String])>, stop_at: Option<u64>) -> Result<Vec<Summary>> {
    let ends = Mutex::new(Vec::new());
    world::on_threads(world::ranks(config)?, |world| {
        let stop = AtomicBool::new(false);
        let mut session = match resume {
            Some((folder, sets)) => Session::resume(&GoingOn::new(folder, sets), world, |_| ())?,
            None => Session::create(config, world, |_| ())?,
        };
        let on_stuck = |what: &str| panic!("nothing here hangs for ever: {what}");
        let mut display = Stopping { stop: &stop, at: stop_at };
        let control = Control { stop: &stop, process_start: Instant::now(), on_stuck };
        let end = train(&mut session, &mut display, control)?;
        ends.lock().unwrap().push(end);
        Ok(())
    })?;
    Ok(ends.into_inner().unwrap())
}

fn start(folder: &Path, name: &str, sets: &[&str]) -> Result<Summary> {
    Ok(run(&config(folder, name, sets), None, None)?.remove(0))
}

/// Asks the run to stop after a step.
struct Stopping<'a> {
    stop: &'a AtomicBool,
    at: Option<u64>,
}

impl Progress for Stopping<'_> {
    fn begin(&mut self, _: u64, _: Option<u64>) {}
    fn step(&mut self, metrics: &StepMetrics, _: Option<u64>, _: Option<Duration>) {
        if self.at == Some(metrics.step) {
            self.stop.store(true, Ordering::Relaxed);
        }
    }
    fn evaluation(&mut self, _: &EvaluationMetrics) {}
    fn note(&mut self, _: &str) {}
    fn end(&mut self) {}
}

/// The last checkpoint's tensors.
fn last(folder: &Path, name: &str) -> BTreeMap<String, Vec<u8>> {
    tensors(&find_latest(&folder.join(name)).unwrap().unwrap().checkpoint)
}

/// A column of `evaluations.jsonl` or `metrics.jsonl`.
fn column(folder: &Path, name: &str, file: &str, key: &str) -> Vec<f64> {
    let text = fs::read_to_string(folder.join(name).join(file)).unwrap();
    let value = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()[key].as_f64().unwrap();
    text.lines().map(value).collect()
}

#[test]
fn a_run_that_is_not_shuffled_takes_the_text_in_order_and_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let in_order = ["data.shuffle=false", "data.validation_fraction=0"];
    let asked = config(folder, "order", &in_order);
    let read = world::on_threads(1, |world| {
        let session = Session::create(&asked, world, |_| ())?;
        Ok(session.dataset.micro_batch(0, 3)?.tokens)
    });
    let text = fs::read(folder.join("text.txt")).unwrap();
    let read: Vec<u8> = read.unwrap().into_iter().map(|token| token as u8).collect();
    assert_eq!(read, text[..48], "samples one after the other");
    fs::remove_dir_all(folder.join("order")).unwrap();

    let shuffled = start(folder, "shuffled", &["data.validation_fraction=0"]).unwrap();
    let whole = start(folder, "whole", &in_order).unwrap();
    assert_ne!(whole.loss.to_bits(), shuffled.loss.to_bits());
    let stopped = run(&config(folder, "stopped", &in_order), None, Some(2)).unwrap().remove(0);
    assert_eq!((stopped.ending, stopped.steps), (Ending::Interrupted, 2));
    run(&asked, Some((&folder.join("stopped"), &[])), None).unwrap();
    assert!(last(folder, "stopped") == last(folder, "whole"), "the run that went on saw other text");
}

/// Token files with a tenth held back, without their own split, and another text.
fn token_files(folder: &Path) {
    config(folder, "none", &[]);
    let paths = [folder.join("text.txt")];
    fs::write(folder.join("other.txt"), "quite another text ".repeat(20)).unwrap();
    for (out, validation_fraction) in [("tenth", 0.1), ("whole", 0.0)] {
        let corpus = Corpus::open(&paths, CorpusOptions::default()).unwrap();
        let options = PrepareOptions { validation_fraction, ..PrepareOptions::new(folder.join(out)) };
        prepare(&corpus, &Tokenizer::bytes(), &options, |_| ()).unwrap();
    }
}

/// Number of tokens that a run validates on, or the error with which it does not begin.
fn validates_on(folder: &Path, sets: &[&str]) -> Result<u64> {
    let config = config(folder, "validates", &[&["tokenizer.kind=auto"], sets].concat());
    let tokens = world::on_threads(1, |world| {
        let session = Session::create(&config, world, |_| ())?;
        Ok(session.validation.iter().map(IndexedTokens::tokens).sum())
    });
    let _ = fs::remove_dir_all(folder.join("validates"));
    tokens
}

#[test]
fn an_explicit_validation_set_wins_over_what_token_files_hold_back() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    token_files(folder);
    let held_back = IndexedTokens::open(&folder.join("tenth.validation")).unwrap().tokens();
    assert!(held_back > 500);
    assert_eq!(validates_on(folder, &["data.train={F}/tenth"]).unwrap(), held_back);
    let other = 19 * 20 + 1;
    let explicit = ["data.train={F}/tenth", "data.validation={F}/other.txt"];
    assert_eq!(validates_on(folder, &explicit).unwrap(), other, "the text and its end");
}

#[test]
fn no_validation_fraction_means_none_of_token_files_either() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    token_files(folder);
    assert_eq!(validates_on(folder, &["data.train={F}/tenth", "data.validation_fraction=0"]).unwrap(), 0);
    // Files without a held-back part have no validation data; settings that need some are errors.
    assert_eq!(validates_on(folder, &["data.train={F}/whole"]).unwrap(), 0);
    let error = validates_on(folder, &["data.train={F}/whole", "evaluation.interval_steps=2"]).unwrap_err();
    assert!(error.to_string().contains("needs validation data"), "{error}");
}

#[test]
fn a_fraction_that_token_files_were_not_divided_by_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    token_files(folder);
    assert!(validates_on(folder, &["data.train={F}/tenth", "data.validation_fraction=0.1"]).unwrap() > 500);
    for (train, says) in [("tenth", "0.1 of them is held back"), ("whole", "nothing of them is held back")] {
        let train = format!("data.train={{F}}/{train}");
        let error = validates_on(folder, &[&train, "data.validation_fraction=0.2"]).unwrap_err().to_string();
        assert!(error.contains("data.validation_fraction = 0.2 cannot be had of") && error.contains(says), "{error}");
    }
}

#[test]
fn what_is_evaluated_depends_on_no_micro_batch_and_no_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let base = ["training.global_batch_size=8", "training.steps=2", "data.validation_fraction=0.1"];
    let mut evaluated = Vec::new();
    for (number, way) in [
        &["training.micro_batch_size=8"][..],
        &["training.micro_batch_size=2"],
        &["training.micro_batch_size=1", "parallel.ranks=2"],
        &["training.micro_batch_size=4", "parallel.ranks=2", "parallel.zero_stage=3"],
    ]
    .into_iter()
    .enumerate()
    {
        let summary =
            start(folder, &format!("way-{number}"), &[&base[..], way, &["evaluation.tokens_max=250"]].concat());
        let metrics = summary.unwrap().evaluation.unwrap();
        assert_eq!((metrics.tokens, metrics.bits_per_byte), (250, None), "{way:?}");
        evaluated.push(metrics.loss);
    }
    for loss in &evaluated {
        assert!((loss - evaluated[0]).abs() < 1e-4, "{evaluated:?}");
    }
}

#[test]
fn epochs_end_a_run_and_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("short.txt"), "one two three ".repeat(40)).unwrap();
    let sets = ["data.train={F}/short.txt", "data.validation_fraction=0", "training.steps=auto", "training.epochs=2.5"];
    let summary = start(folder, "epochs", &sets).unwrap();
    // 561 tokens are 35 sequences of 16.
    assert_eq!(summary.steps, 44, "2.5 x 35 / 2, rounded up");
    assert_eq!(summary.epochs, [88.0 / 35.0]);
    let epochs = column(folder, "epochs", "metrics.jsonl", "epoch");
    assert_eq!((epochs[0], epochs[43]), (2.0 / 35.0, 88.0 / 35.0));
}

/// Settings under which no evaluation after the first is an improvement.
const WORSE: [&str; 6] = [
    "evaluation.early_stopping_min_delta=100",
    "training.steps=30",
    "schedule.kind=constant",
    "data.validation_fraction=0.1",
    "evaluation.interval_steps=2",
    "evaluation.early_stopping_patience=3",
];

#[test]
fn early_stopping_ends_all_ranks_and_names_the_best_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (name, ranks) in
        [("one", &[][..]), ("two", &["parallel.ranks=2"]), ("three", &["parallel.ranks=2", "parallel.zero_stage=3"])]
    {
        let ends = run(&config(folder, name, &[&WORSE[..], ranks].concat()), None, None).unwrap();
        for end in &ends {
            assert_eq!((end.ending, end.steps), (Ending::Complete, ends[0].steps));
            assert!(end.steps < 30, "{}", end.steps);
            let stopped = end.stopped_early.as_ref().expect("it says why it ended");
            let losses = column(folder, name, "evaluations.jsonl", "loss");
            let lowest = (0..losses.len()).min_by(|a, b| losses[*a].total_cmp(&losses[*b])).unwrap();
            assert_eq!(stopped.evaluations, 3);
            assert_eq!(stopped.lowest, Some((2 * (lowest as u64 + 1), losses[lowest])));
            let best = folder.join(name).join(format!("checkpoints/step-{:08}", 2 * (lowest + 1)));
            assert_eq!(stopped.checkpoint, Some(best));
        }
    }
}

#[test]
fn a_run_that_is_resumed_stops_early_where_it_would_have() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let whole = start(folder, "whole", &WORSE).unwrap();
    let evaluations = column(folder, "whole", "evaluations.jsonl", "loss");
    // Stopped right after a checkpoint that lacks its evaluation, and between two checkpoints.
    for stop_at in 2..whole.steps {
        let name = format!("stopped-{stop_at}");
        run(&config(folder, &name, &WORSE), None, Some(stop_at)).unwrap();
        let resumed = run(&config(folder, &name, &WORSE), Some((&folder.join(&name), &[])), None).unwrap().remove(0);
        assert_eq!(
            (resumed.steps, &resumed.stopped_early.unwrap().lowest),
            (whole.steps, &whole.stopped_early.as_ref().unwrap().lowest)
        );
        assert_eq!(column(folder, &name, "evaluations.jsonl", "loss"), evaluations, "each once");
    }
    // The run has ended; with more patience it goes on.
    let again = run(&config(folder, "whole", &WORSE), Some((&folder.join("whole"), &[])), None).unwrap().remove(0);
    assert_eq!(again.steps, whole.steps);
    let longer = ["evaluation.early_stopping_patience=5".to_owned()];
    let longer = run(&config(folder, "whole", &WORSE), Some((&folder.join("whole"), &longer)), None).unwrap().remove(0);
    assert!(longer.steps > whole.steps, "{}", longer.steps);
}

#[test]
fn an_evaluation_tells_how_far_it_has_come() {
    struct Told(Arc<Mutex<Vec<(u64, u64)>>>);
    impl Progress for Told {
        fn begin(&mut self, _: u64, _: Option<u64>) {}
        fn step(&mut self, _: &StepMetrics, _: Option<u64>, _: Option<Duration>) {}
        fn evaluating(&mut self, progress: trainyard_engine::evaluate::EvaluationProgress) {
            self.0.lock().unwrap().push((progress.tokens, progress.of));
        }
        fn evaluation(&mut self, _: &EvaluationMetrics) {}
        fn note(&mut self, _: &str) {}
        fn end(&mut self) {}
    }
    let folder = tempfile::tempdir().unwrap();
    let sets = ["training.steps=1", "data.validation_fraction=0.1", "evaluation.tokens_max=100"];
    let config = config(folder.path(), "told", &sets);
    let told = Arc::new(Mutex::new(Vec::new()));
    world::on_threads(1, |world| {
        let mut session = Session::create(&config, world, |_| ())?;
        let (stop, process_start) = (AtomicBool::new(false), Instant::now());
        let on_stuck = |what: &str| panic!("nothing here hangs for ever: {what}");
        train(&mut session, &mut Told(Arc::clone(&told)), Control { stop: &stop, process_start, on_stuck })
    })
    .unwrap();
    // Four rounds of two rows of 16 tokens.
    assert_eq!(*told.lock().unwrap(), [(32, 100), (64, 100), (96, 100), (100, 100)]);
}

/// The tokenizers in GGUF files are those that transformers builds from them
/// (`scripts/golden/make_gguf.py`).
#[test]
fn tokenizers_in_gguf_files_are_those_of_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/golden/gguf");
    let expected = fs::read_to_string(folder.join("tokenizers.json")).unwrap();
    let expected: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&expected).unwrap();
    assert_eq!(expected.len(), 6);
    for (name, case) in &expected {
        let path = folder.join(format!("tokenizer_{name}.gguf"));
        assert!(pretrained::brings_tokenizer(&path), "{name}");
        let tokenizer = pretrained::tokenizer(&path).unwrap();
        let texts = case["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
        for (text, ids) in texts.zip(case["ids"].as_array().unwrap()) {
            let ids: Vec<u32> = serde_json::from_value(ids.clone()).unwrap();
            assert_eq!(tokenizer.encode(text).unwrap(), ids, "{name}: {text:?}");
        }
        assert_eq!(!tokenizer.before().is_empty(), case["add_bos"].as_bool().unwrap(), "{name}");
    }
    let without = pretrained::tokenizer(&folder.join("llama.gguf")).unwrap_err().to_string();
    assert!(without.contains("it has no tokenizer: set tokenizer.path"), "{without}");
}

/// A real model from a GGUF file: its tokens, logits and loss are those of transformers. The folder
/// TRAINYARD_GGUF_REFERENCE has what `scripts/golden/check_gguf.py` wrote.
#[test]
#[ignore = "needs a model of some hundred megabytes"]
fn a_real_gguf_model_computes_what_transformers_does() {
    let folder = std::env::var_os("TRAINYARD_GGUF_REFERENCE").expect("TRAINYARD_GGUF_REFERENCE names a folder");
    let folder = Path::new(&folder);
    let text = fs::read_to_string(folder.join("reference.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
    let path = Path::new(reference["gguf"].as_str().unwrap());
    let tokens: Vec<i32> = serde_json::from_value(reference["tokens"].clone()).unwrap();
    let encoded = pretrained::tokenizer(path).unwrap().encode(reference["text"].as_str().unwrap()).unwrap();
    assert!(encoded.iter().zip(&tokens).all(|(ours, theirs)| *ours as i32 == *theirs), "other tokens");

    let device = Device::cpu(Isa::detect(), 2, None);
    let spec = hf::from_config_json(&pretrained::config_text(path).unwrap()).unwrap().spec;
    let model = Model::new(spec).unwrap();
    let store = WeightReader::open(path, &model).unwrap().read_store(&model, &device).unwrap();
    let mut file = std::io::BufReader::new(fs::File::open(folder.join("logits.f32")).unwrap());
    let length = reference["length"].as_u64().unwrap() as usize;
    let (mut difference, mut norm, mut largest, mut losses, mut sequences) = (0.0, 0.0, 0.0f64, 0.0, 0.0);
    for ids in tokens.chunks(length) {
        let batch = model.rows(&device, length, ids, None).unwrap();
        let mut tape = Tape::new(&device, &store, Policy::Nothing, RandomKey { seed: 0, step: 0, site: 0 });
        let y = model.forward(&mut tape, &mut Forward::evaluation(&batch, Output::Logits)).unwrap();
        let ours = y.tensor().to_f32_vec().unwrap();
        let mut bytes = vec![0; 4 * ours.len()];
        file.read_exact(&mut bytes).unwrap();
        for (ours, theirs) in ours.iter().zip(bytes.chunks_exact(4)) {
            let theirs = f64::from(f32::from_le_bytes(theirs.try_into().unwrap()));
            let off = f64::from(*ours) - theirs;
            (difference, norm, largest) = (difference + off * off, norm + theirs * theirs, largest.max(off.abs()));
        }
        let vocabulary = ours.len() / length;
        let rows = ours.chunks(vocabulary).zip(&ids[1..]).map(|(row, target)| {
            let top = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
            let sum: f64 = row.iter().map(|x| (f64::from(*x) - top).exp()).sum();
            top + sum.ln() - f64::from(row[*target as usize])
        });
        (losses, sequences) = (losses + rows.sum::<f64>() / (length - 1) as f64, sequences + 1.0);
    }
    let error = f64::sqrt(difference / norm);
    let (ours, theirs) = ((losses / sequences).exp(), reference["loss"].as_f64().unwrap().exp());
    println!("logits differ by {error:.2e} of their norm, at most {largest:.2e}; perplexity {ours:.4} and {theirs:.4}");
    assert!(error <= 1e-3 && (ours / theirs - 1.0).abs() < 5e-5);
}
