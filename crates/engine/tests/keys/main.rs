//! Tests that every key of the configuration has an effect or is an error. For each key, a run of a
//! tiny model with another value is compared with the run without it. A key without a row in the
//! [`table`] fails, and so does a key that no code reads.

mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use table::{ROWS, Row, Shows};
use trainyard_data::Tokenizer;
use trainyard_engine::checkpoint::Choice;
use trainyard_engine::config::Config;
use trainyard_engine::consolidation::{EstimateSettings, estimate};
use trainyard_engine::evaluate::EvaluationSettings;
use trainyard_engine::metrics::{EvaluationMetrics, Progress, Quiet, StepMetrics};
use trainyard_engine::session::{Session, files};
use trainyard_engine::trained::{Runtime, open_trained};
use trainyard_engine::trainer::{Control, train};
use trainyard_engine::{EngineError, world};
use trainyard_model::weights::{ExportOptions, export};

/// The base configuration, which rows change.
const BASE: &str = "\
[run]
name = 'tiny'
directory = '{F}/runs'

[model]
dim = 16
layers = 2
heads = 2

[tokenizer]
kind = 'bytes'

[data]
train = '{F}/text.txt'
cache = '{F}/cache'

[training]
steps = 4
sequence_length = 16
micro_batch_size = 2

[optimizer]
learning_rate = 1e-2

[precision]
compute = 'f32'

[compute]
threads = 1
";

/// The observable results of a run.
#[derive(Default)]
struct Seen {
    /// Loss and gradient norm of every step, by their bits.
    losses: Vec<[u64; 2]>,
    scales: Vec<Option<f64>>,
    /// Step, loss and loss of the average of the weights (as bits) and tokens of every evaluation.
    evaluations: Vec<(u64, u64, Option<u64>, u64)>,
    notes: Vec<String>,
    /// The largest number of threads that made batches at once.
    data_threads: usize,
    folder: PathBuf,
    /// Names of all files below the run's folder.
    files: BTreeSet<String>,
    program: String,
    /// Predicted peaks by purpose.
    memory: String,
    model: String,
    tokenizer: String,
    device: String,
    deadline: Duration,
    /// The reason of an early end.
    error: Option<String>,
}

/// Records the trainer's messages.
struct Recording<'a>(&'a mut Seen);

impl Progress for Recording<'_> {
    fn begin(&mut self, _: u64, _: Option<u64>) {}

    fn step(&mut self, metrics: &StepMetrics, _: Option<u64>, _: Option<Duration>) {
        self.0.losses.push([metrics.loss.to_bits(), metrics.grad_norm.to_bits()]);
        self.0.scales.push(metrics.loss_scale);
        self.0.data_threads = self.0.data_threads.max(threads("data-0-"));
    }

    fn evaluation(&mut self, metrics: &EvaluationMetrics) {
        let averaged = metrics.averaged_loss.map(f64::to_bits);
        self.0.evaluations.push((metrics.step, metrics.loss.to_bits(), averaged, metrics.tokens));
    }

    fn note(&mut self, text: &str) {
        self.0.notes.push(text.to_owned());
    }

    fn end(&mut self) {}
}

/// Threads of this process whose names begin with `prefix`.
fn threads(prefix: &str) -> usize {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    // A thread may end while it is looked at.
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with(prefix)).count()
}

/// Names of everything below `folder`.
fn below(folder: &Path, prefix: &str, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        // Event files are named after the time.
        let name = if name.contains("tfevents") { "tensorboard/events".to_owned() } else { name };
        if entry.path().is_dir() {
            below(&entry.path(), &format!("{name}/"), names);
        }
        names.insert(name);
    }
}

/// Runs all ranks of the configuration and returns rank 0's observations.
fn run(folder: &Path, sets: &[&str]) -> Seen {
    let at = folder.display().to_string();
    let sets: Vec<String> = sets.iter().map(|set| set.replace("{F}", &at)).collect();
    let _ = fs::remove_dir_all(folder.join("runs"));
    let seen = Mutex::new(Seen::default());
    let ended = Config::parse("keys.toml".as_ref(), &BASE.replace("{F}", &at), &sets).map_err(EngineError::from);
    let ended = ended.and_then(|config| {
        let ranks = world::ranks(&config)?;
        seen.lock().unwrap().deadline = world::deadline(&config);
        world::on_threads(ranks, |world| {
            world::prepare(&world, &config, None);
            let is_first = world.rank() == 0;
            let mut own = Seen::default();
            let session = Session::create(&config, world, |line| own.notes.push(line.to_owned()));
            let ended = session.and_then(|mut session| {
                own.folder = session.folder.clone();
                own.program = format!("{:?}", session.programs);
                own.memory = format!("{:?}", session.prediction.purposes());
                own.model = fs::read_to_string(session.folder.join(files::MODEL)).unwrap_or_default();
                own.tokenizer = session.tokenizer.as_ref().map_or_else(String::new, |own| own.fingerprint().to_owned());
                own.device = format!("{:?}", session.rank.device());
                let (stop, process_start) = (AtomicBool::new(false), Instant::now());
                let on_stuck = |what: &str| panic!("nothing here hangs for ever: {what}");
                train(&mut session, &mut Recording(&mut own), Control { stop: &stop, process_start, on_stuck })
            });
            if is_first {
                below(&own.folder.clone(), "", &mut own.files);
                let mut seen = seen.lock().unwrap();
                *seen = Seen { deadline: seen.deadline, ..own };
            }
            ended.map(drop)
        })
    });
    let mut seen = seen.into_inner().unwrap();
    seen.error = ended.err().map(|error| error.to_string());
    seen
}

/// Writes a picture of 11 x 9 pixels without a pattern.
fn write_picture(path: &Path, seed: usize) {
    let mut encoder = png::Encoder::new(fs::File::create(path).unwrap(), 11, 9);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let pixels: Vec<u8> = (0..11 * 9 * 3).map(|i| ((i * i * 7 + i * 31 + seed * 97) % 251) as u8).collect();
    encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
}

/// Makes texts, pictures, a tokenizer and a Hugging Face folder.
fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| fs::write(folder.path().join(name), text).unwrap();
    write("text.txt", (0..400).map(|i| format!("{} ", (i * 7919) % 311)).collect());
    write("other.txt", (0..300).map(|i| format!("{} and ", (i * 104_729) % 97)).collect());
    let line =
        |i: usize| format!("{{\"text\": \"line {i} of {}\", \"body\": \"{} other words\"}}\n", i * 37 % 11, i * 7);
    // Four micro-batches on two stages, all forwards first and the backwards in reverse.
    write("order.csv", "0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0\n".to_owned());
    let talk = |i: usize| {
        let (asked, answer) = (format!("say {i}"), i * 7);
        format!(
            "{{\"prompt\": [{{\"role\": \"user\", \"content\": \"{asked}\"}}], \"completion\": [{{\"role\": \"assistant\", \"content\": \"{answer}\"}}]}}\n"
        )
    };
    write("talks.jsonl", (0..80).map(talk).collect());
    write("short.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}".to_owned());
    write("lines.jsonl", (0..80).map(line).collect());
    Tokenizer::characters_from("0123456789 adnil").unwrap().save(&folder.path().join("tok.json")).unwrap();

    for (seed, class) in ["a", "b", "a", "b", "a", "b"].into_iter().enumerate() {
        fs::create_dir_all(folder.path().join("pictures").join(class)).unwrap();
        write_picture(&folder.path().join("pictures").join(class).join(format!("{seed}.png")), seed);
    }

    let config = BASE.replace("{F}", &folder.path().display().to_string());
    let config = Config::parse("keys.toml".as_ref(), &config, &["training.seed=5".to_owned()]).unwrap();
    world::on_threads(1, |world| {
        let session = Session::create(&config, world, |_| ())?;
        let parameters = &session.rank.parameters;
        let values = |unit: usize, out: &mut [f32]| -> Result<(), EngineError> {
            let masters = parameters.unit(unit).master_range(0..out.len())?;
            Ok(masters.with_data(|values: &[f32]| out.copy_from_slice(values))?)
        };
        export(&folder.path().join("hf"), session.rank.model(), ExportOptions::default(), values)?;
        session.tokenizer.as_ref().unwrap().save_hugging_face(&folder.path().join("hf"), 16)?;
        Ok(())
    })
    .unwrap();
    consolidate(folder.path());
    folder
}

/// Trains a run outside the folder of runs, and consolidates it.
fn consolidate(folder: &Path) {
    let config = BASE.replace("{F}/runs", "{F}/old").replace("{F}", &folder.display().to_string());
    let sets = ["data.validation_fraction=0.1".to_owned(), "training.seed=5".to_owned()];
    let config = Config::parse("keys.toml".as_ref(), &config, &sets).unwrap();
    world::on_threads(1, |world| {
        let mut session = Session::create(&config, world, |_| ())?;
        let (stop, process_start) = (AtomicBool::new(false), Instant::now());
        let on_stuck = |what: &str| panic!("nothing here hangs for ever: {what}");
        train(&mut session, &mut Quiet, Control { stop: &stop, process_start, on_stuck })?;
        let runtime = Runtime::of_this_machine();
        let trained = open_trained(&session.folder, Choice::Latest, &runtime, |_| ())?;
        let division = EvaluationSettings {
            sequence_length: 16,
            rows: 1,
            respect_document_boundaries: true,
            tokens_max: None,
            spans: None,
        };
        let settings = EstimateSettings { batches: 4, decay: 1.0, division };
        estimate(&session.folder, &trained, &session.validation, settings, |_| ())?;
        Ok(())
    })
    .unwrap();
}

/// Describes the failure of a row; None if its key has the expected effect.
fn trouble(folder: &Path, row: &Row, bases: &mut BTreeMap<String, Arc<Seen>>) -> Option<String> {
    let Row { key, context, sets, shows } = row;
    if let Shows::Elsewhere(file, test) = shows {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
        let text = fs::read_to_string(&path).unwrap_or_default();
        return (!text.contains(&format!("fn {test}("))).then(|| format!("{file} has no test {test}"));
    }
    if !sets.iter().any(|set| set.split('=').next() == Some(key)) {
        return Some("its row does not set it".to_owned());
    }
    let base = bases.entry(context.join(" ")).or_insert_with(|| Arc::new(run(folder, context))).clone();
    if let Some(error) = &base.error {
        return Some(format!("the run without it fails: {error}"));
    }
    let seen = run(folder, &[*context, *sets].concat());
    if let Shows::Refused(words) = shows {
        return match &seen.error {
            None => Some("it is accepted".to_owned()),
            Some(error) => (!error.contains(words)).then(|| format!("no `{words}` in: {error}")),
        };
    }
    if let Some(error) = &seen.error {
        return Some(format!("the run with it fails: {error}"));
    }
    let said = |seen: &Seen, words: &str| seen.notes.iter().any(|note| note.contains(words));
    let differs = match shows {
        Shows::Losses => seen.losses != base.losses && seen.losses.len() == base.losses.len(),
        Shows::Steps => seen.losses.len() != base.losses.len(),
        Shows::Scales => seen.scales != base.scales,
        Shows::Evaluations => seen.evaluations != base.evaluations,
        Shows::Files => seen.files != base.files,
        Shows::Folder => seen.folder != base.folder,
        Shows::Program => seen.program != base.program,
        Shows::Memory => seen.memory != base.memory,
        Shows::Model => seen.model != base.model,
        Shows::Tokenizer => seen.tokenizer != base.tokenizer,
        Shows::DataThreads => seen.data_threads != base.data_threads,
        Shows::Deadline => seen.deadline != base.deadline,
        Shows::Device(words) => seen.device.contains(words) && !base.device.contains(words),
        Shows::Note(words) => said(&seen, words) && !said(&base, words),
        Shows::Made(path) => folder.join(path).exists(),
        Shows::Refused(_) | Shows::Elsewhere(..) => unreachable!("answered above"),
    };
    (!differs).then(|| format!("{shows:?} is as without it"))
}

#[test]
fn every_key_changes_something_or_is_refused() {
    let named: Vec<&str> = ROWS.iter().map(|row| row.key).collect();
    let config = Config::default();
    let keys = config.sections().into_iter().flat_map(|section| {
        let name = section.name();
        section.keys().into_iter().map(move |key| format!("{name}.{}", key.name)).collect::<Vec<_>>()
    });
    let keys: BTreeSet<String> = keys.collect();
    let missing: Vec<_> = keys.iter().filter(|key| !named.contains(&key.as_str())).collect();
    assert!(missing.is_empty(), "keys without a row in tests/keys/table.rs: {missing:?}");
    let gone: Vec<_> = named.iter().filter(|key| !keys.contains(**key)).collect();
    assert!(gone.is_empty(), "rows of keys that do not exist: {gone:?}");

    let folder = prepared();
    let mut bases = BTreeMap::new();
    let troubles: Vec<String> = ROWS
        .iter()
        .filter_map(|row| trouble(folder.path(), row, &mut bases).map(|why| format!("{}: {why}", row.key)))
        .collect();
    assert!(troubles.is_empty(), "{} of {} rows:\n{}", troubles.len(), ROWS.len(), troubles.join("\n"));
}
