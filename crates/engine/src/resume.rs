//! Resuming a run: the settings that may override its configuration, the checkpoint to start from,
//! and the fate of later checkpoints.
//!
//! The run's folder holds its configuration, so resuming needs no flag. Overrides are stored there
//! too. Everything is checked before anything in the folder is written, moved or removed.

use crate::checkpoint::{CheckpointStore, Choice};
use crate::config::{Config, Inputs, Origin, Resolved};
use crate::schedule::Schedule;
use crate::session::{files, inputs_for};
use crate::shape::spec_of;
use crate::snapshot::RunState;
use crate::state::does_not_fit;
use crate::trained::{read_spec, spec_text};
use crate::{EngineError, Result};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use trainyard_data::Tokenizer;
use trainyard_model::ModelSpec;

/// A request to resume a run.
#[derive(Clone, Copy, Debug)]
pub struct GoingOn<'a> {
    /// Its folder.
    pub folder: &'a Path,
    /// Overrides of the form `section.key=value`. The run's configuration keeps them.
    pub sets: &'a [String],
    /// The checkpoint to resume from.
    pub checkpoint: Choice,
    /// The treatment of a changed model.
    pub model_change: ModelChange,
}

impl<'a> GoingOn<'a> {
    /// Resumes the run in `folder` from its newest checkpoint, with its own model, and with `sets`
    /// over its configuration.
    pub fn new(folder: &'a Path, sets: &'a [String]) -> GoingOn<'a> {
        GoingOn { folder, sets, checkpoint: Choice::Latest, model_change: ModelChange::Refused }
    }
}

/// The treatment of a configuration that describes another model than the run's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModelChange {
    /// Every change is an error.
    Refused,
    /// A change that leaves all tensors and their meaning as they are is made, with a note.
    OnPurpose,
}

/// The reason why what is trained cannot change when a run is resumed.
const TRAINED: &str = "what it trains was decided when it began; export it, and start a new run from that";

/// Keys that cannot change when a run is resumed, each with the reason.
const DECIDED: [(&str, &str); 15] = [
    ("run.name", "its folder is the one to resume; rename that"),
    ("run.directory", "its folder is the one to resume; move that, and set data.cache for where token files are kept"),
    ("tokenizer.path", "it keeps its tokenizer; start a new run for another"),
    ("tokenizer.kind", "it keeps its tokenizer; start a new run for another"),
    ("tokenizer.vocab_size", "it keeps its tokenizer; start a new run for another"),
    ("fine_tuning.adapter", TRAINED),
    ("fine_tuning.rank", TRAINED),
    ("fine_tuning.alpha", TRAINED),
    ("fine_tuning.rank_stabilised", TRAINED),
    ("fine_tuning.targets", TRAINED),
    ("fine_tuning.from", TRAINED),
    ("fine_tuning.base_dtype", TRAINED),
    ("fine_tuning.freeze", TRAINED),
    ("fine_tuning.train", TRAINED),
    ("fine_tuning.freeze_schedule", TRAINED),
];

/// The configuration of a resumed run, overrides included.
///
/// # Errors
/// If the folder is not that of a run, an override has no effect on a resumed run, or the model is
/// not the run's.
pub(crate) fn configuration(going_on: &GoingOn<'_>) -> Result<Config> {
    let GoingOn { folder, sets, model_change, .. } = *going_on;
    let file = folder.join(files::CONFIG);
    if !file.is_file() {
        return Err(does_not_fit(format!(
            "{} is not the folder of a run: there is no {}",
            folder.display(),
            std::path::absolute(&file).unwrap_or(file).display()
        )));
    }
    let mut config = Config::load(Some(&file), sets)?;
    forget_dependents(&mut config);
    for (key, why) in DECIDED {
        if let origin @ Origin::Set(_) = config.origin(key) {
            return Err(does_not_fit(format!("{origin}: {key} has no effect on a run that goes on: {why}")));
        }
    }
    let run = read_spec(folder)?;
    let mut inputs = Inputs::of_this_machine();
    match &run.image {
        Some(image) => inputs.classes = Some(image.labels.clone()),
        None => {
            // The run's copy of the tokenizer. The file that it came from may have changed.
            let tokenizer = folder.join(files::TOKENIZER);
            inputs.knows(&Tokenizer::load(&tokenizer)?);
            config.tokenizer.path = Some(tokenizer);
            config.tokenizer.kind = None;
            config.tokenizer.vocab_size = None;
        }
    }
    if config.model.path.is_none() && matches!(config.origin("training.sequence_length"), Origin::Set(_)) {
        // The model keeps its maximum length, though its default follows training.sequence_length.
        config.model.max_sequence_length.get_or_insert(run.max_positions);
    }
    let inputs = inputs_for(&config, inputs)?;
    let asked = spec_of(&config.resolve_model(&inputs)?, &config)?;
    check_model(folder, &run, &asked, model_change)?;
    Ok(config)
}

/// Unsets keys of the run's file that mean nothing under the degrees that overrides ask for: the
/// schedule of a pipeline that ends, the rows and sequences that no group divides any more, the
/// number of ranks
/// that was the product of other degrees. Keys that are overridden themselves stay.
fn forget_dependents(config: &mut Config) {
    let is_set = |config: &Config, key: &str| matches!(config.origin(&format!("parallel.{key}")), Origin::Set(_));
    let pipeline = is_set(config, "pipeline_parallel_degree");
    let tensor = is_set(config, "tensor_parallel_degree");
    let context = is_set(config, "context_parallel_degree");
    let data = is_set(config, "data_parallel_replicate_degree") || is_set(config, "data_parallel_shard_degree");
    if pipeline && config.parallel.pipeline_parallel_degree == 1 {
        if !is_set(config, "pipeline_schedule") {
            config.parallel.pipeline_schedule = None;
        }
        if !is_set(config, "pipeline_schedule_file") {
            config.parallel.pipeline_schedule_file = None;
        }
        if !is_set(config, "pipeline_chunks") {
            config.parallel.pipeline_chunks = None;
        }
    }
    if tensor && config.parallel.tensor_parallel_degree == 1 && !is_set(config, "sequence_parallel") {
        config.parallel.sequence_parallel = None;
    }
    if context && config.parallel.context_parallel_degree == 1 && !is_set(config, "context_parallel_load_balance") {
        config.parallel.context_parallel_load_balance = None;
    }
    if (pipeline || context || tensor || data) && !is_set(config, "ranks") {
        config.parallel.ranks = None;
    }
}

/// A key in which a model differs from the run's.
struct Difference {
    key: String,
    run: String,
    asked: String,
}

/// The keys of `[model]` in which `asked` computes another function than `run`. Dropout does not
/// count, because it belongs to training. Special tokens and the name of the class in Hugging Face
/// files do not count, because no computation uses them.
fn differences(run: &ModelSpec, asked: &ModelSpec) -> Vec<Difference> {
    const OF_NO_FUNCTION: [&str; 5] = ["dropout", "model_type", "bos_token", "eos_tokens", "pad_token"];
    let (run, asked) = (described(run), described(asked));
    let keys: BTreeSet<&String> = run.keys().chain(asked.keys()).collect();
    let value =
        |of: &BTreeMap<String, String>, key: &String| of.get(key).cloned().unwrap_or_else(|| "unset".to_owned());
    let keys =
        keys.into_iter().filter(|key| !OF_NO_FUNCTION.contains(&key.as_str()) && run.get(*key) != asked.get(*key));
    keys.map(|key| Difference { key: format!("model.{key}"), run: value(&run, key), asked: value(&asked, key) })
        .collect()
}

/// A model's description by the keys of `[model]`.
fn described(spec: &ModelSpec) -> BTreeMap<String, String> {
    fn leaves(name: String, value: Value, into: &mut BTreeMap<String, String>) {
        match value {
            Value::Object(fields) => {
                let inner = |field: &String| if name.is_empty() { field.clone() } else { format!("{name}.{field}") };
                fields.into_iter().for_each(|(field, value)| leaves(inner(&field), value, into));
            }
            value => drop(into.insert(key_of(&name), value.to_string())),
        }
    }
    let mut described = BTreeMap::new();
    leaves(String::new(), serde_json::to_value(spec).expect("plain data is JSON"), &mut described);
    described
}

/// The key of `[model]` that a field of the description comes from.
fn key_of(field: &str) -> String {
    match field {
        "max_positions" => "max_sequence_length".to_owned(),
        "o_bias" => "output_bias".to_owned(),
        "encoder.layers" => "encoder_layers".to_owned(),
        "rope.scaling.type" => "rope_scaling".to_owned(),
        "rope.scaling.original_max_positions" => "rope_original_length".to_owned(),
        field => field.replace("rope.scaling.", "rope_").replace("rope.", "rope_"),
    }
}

/// True for keys that may be changed on purpose, because all tensors keep their shape and the
/// meaning of their rows and columns.
fn keeps_tensors(key: &str, run: &ModelSpec) -> bool {
    match key.strip_prefix("model.").unwrap_or(key) {
        "max_sequence_length" => run.learned_positions().is_none(),
        "norm_eps" | "activation" | "sliding_window" | "sliding_layers" => true,
        key => key.starts_with("rope_"),
    }
}

/// Checks that the model is the run's, or a permitted change of it.
fn check_model(folder: &Path, run: &ModelSpec, asked: &ModelSpec, change: ModelChange) -> Result<()> {
    let differences = differences(run, asked);
    let (kept, other): (Vec<_>, Vec<_>) = differences.iter().partition(|d| keeps_tensors(&d.key, run));
    if differences.is_empty() || (change == ModelChange::OnPurpose && other.is_empty()) {
        return Ok(());
    }
    let named = |d: &Difference| format!("{} is {} in {}, and {} is asked for", d.key, d.run, files::MODEL, d.asked);
    let (named_ones, advice): (Vec<_>, _) = match other.is_empty() {
        true => (
            kept.into_iter().map(named).collect(),
            "leave it as it is, or say with --change-model that the trained weights are to compute another function from here on",
        ),
        false => (
            other.into_iter().map(named).collect(),
            "its tensors are made for it; leave it as it is, or begin a new run",
        ),
    };
    Err(does_not_fit(format!(
        "the model of a run that goes on is the run's: in {} {}: {advice}",
        folder.display(),
        named_ones.join("; ")
    )))
}

/// Checks that the run does not end before `state`, from which it is resumed.
pub(crate) fn check_end(resolved: &Resolved, state: &RunState) -> Result<()> {
    let Some(steps) = resolved.limits.steps.filter(|steps| *steps < state.step) else { return Ok(()) };
    let training = &resolved.requested.training;
    let asked = match (training.steps, training.epochs, training.tokens) {
        (Some(own), _, _) if own == steps => format!("training.steps = {steps}"),
        (_, Some(epochs), None) => format!("training.epochs = {epochs}, which is {steps} steps"),
        (_, None, Some(tokens)) => format!("training.tokens = {tokens}, which is {steps} steps"),
        _ => format!("training.epochs and training.tokens make {steps} steps"),
    };
    Err(does_not_fit(format!(
        "{} steps are done already, and {asked}: ask for more, or go back to an earlier checkpoint with --checkpoint STEP",
        state.step
    )))
}

/// Sets later checkpoints aside when a run is resumed from an earlier `step`. They are moved, and
/// the run's files copied, into a folder inside the run's folder. That folder is a run that can be
/// resumed itself. Notes it if there are such checkpoints.
///
/// # Errors
/// Those of the operating system. Nothing is lost then, and the same command continues the work.
pub(crate) fn set_aside(
    folder: &Path,
    step: u64,
    store: &mut CheckpointStore,
    note: &mut impl FnMut(&str),
) -> Result<()> {
    if !store.has_after(step)? {
        return Ok(());
    }
    let error = |what, path: &Path| {
        let path = path.display().to_string();
        move |source| EngineError::File { what, path, source }
    };
    let aside = (1..)
        .map(|number| folder.join(format!("set-aside-{number:03}")))
        .find_map(|path| match fs::create_dir(&path) {
            Ok(()) => Some(Ok(path)),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => None,
            Err(e) => Some(Err(error("cannot create", &path)(e))),
        })
        .expect("numbers do not end")?;
    let entries = fs::read_dir(folder).map_err(error("cannot list", folder))?;
    let mut names: Vec<_> = Vec::new();
    for entry in entries {
        let entry = entry.map_err(error("cannot list", folder))?;
        if entry.file_type().map_err(error("cannot read", &entry.path()))?.is_file() {
            names.push(entry.file_name());
        }
    }
    // The configuration is copied last, because it makes the folder a run.
    names.sort_by_key(|name| name == files::CONFIG);
    for name in names {
        let from = folder.join(&name);
        fs::copy(&from, aside.join(&name)).map_err(error("cannot copy", &from))?;
    }
    let moved = store.move_after(step, &aside.join("checkpoints"))?;
    let moved: Vec<_> = moved.iter().rev().map(u64::to_string).collect();
    note(&format!(
        "the run goes on from step {step}: its checkpoints of later steps ({}) are now in {}, with a copy of all records; it is the folder of a run itself",
        moved.join(", "),
        aside.display()
    ));
    Ok(())
}

/// Writes the resumed run's configuration, and its model if that was changed on purpose, into its
/// folder. Each file is replaced atomically. Notes what changed.
pub(crate) fn keep(
    going_on: &GoingOn<'_>,
    resolved: &Resolved,
    model: &ModelSpec,
    note: &mut impl FnMut(&str),
) -> Result<()> {
    let GoingOn { folder, sets, .. } = *going_on;
    let file = folder.join(files::CONFIG);
    let mut kept = resolved.clone();
    // The configuration records the tokenizer as requested, not the run's copy of it.
    kept.requested.tokenizer = Config::load(Some(&file), sets)?.tokenizer;
    let text = kept.to_toml();
    let run = read_spec(folder)?;
    let ModelSpec { bos_token, eos_tokens, pad_token, .. } = run.clone();
    let model = ModelSpec { bos_token, eos_tokens, pad_token, ..model.clone() };
    for Difference { key, run, asked } in differences(&run, &model) {
        note(&format!("the model is changed on purpose: {key} was {run} and is {asked}, for earlier checkpoints too"));
    }
    if run != model {
        trainyard_data::write_atomically(&folder.join(files::MODEL), spec_text(&model).as_bytes())?;
    }
    if sets.is_empty() || fs::read_to_string(&file).is_ok_and(|before| before == text) {
        return Ok(());
    }
    trainyard_data::write_atomically(&file, text.as_bytes())?;
    note(&format!("{} now has {}", file.display(), sets.join(", ")));
    Ok(())
}

/// The reason why nothing is left to train, if the run has ended already.
pub(crate) fn nothing_left(resolved: &Resolved, state: &RunState) -> Option<String> {
    let limits = resolved.limits;
    let by_steps = limits.steps.filter(|steps| *steps <= state.step);
    let by_seconds = limits.seconds.filter(|seconds| *seconds <= state.seconds);
    let limit = match (by_steps, by_seconds) {
        (Some(steps), _) => format!("{steps} steps"),
        (None, Some(seconds)) => format!("{seconds} s"),
        (None, None) => return None,
    };
    let rate = rate_change(state, &resolved.schedule_over(2 * state.step));
    Some(format!(
        "nothing is left to train: {} steps are done in {:.0} s, and the run ends after {limit}; go on with{}{}",
        state.step,
        state.seconds,
        twice_as_long(resolved).concat(),
        rate.map_or_else(String::new, |rate| format!(" ({rate})"))
    ))
}

/// The `--set` options that train a run twice as long: one for every limit that was asked for,
/// because the first to be reached ends the run.
pub fn twice_as_long(resolved: &Resolved) -> Vec<String> {
    let asked = &resolved.requested.training;
    let limits = [
        asked.steps.map(|steps| format!("training.steps={}", steps.saturating_mul(2))),
        asked.epochs.map(|epochs| format!("training.epochs={}", 2.0 * epochs)),
        asked.tokens.map(|tokens| format!("training.tokens={}", tokens.saturating_mul(2))),
        asked.seconds.map(|seconds| format!("training.seconds={}", 2.0 * seconds)),
    ];
    limits.into_iter().flatten().map(|limit| format!(" --set {limit}")).collect()
}

/// Describes the change of the learning rate when a run is resumed from `state` with `schedule`;
/// None if it does not change.
pub fn rate_change(state: &RunState, schedule: &Schedule) -> Option<String> {
    let (before, now) = (state.learning_rate_next?, schedule.learning_rate(state.step));
    if (now - before).abs() <= 1e-6 * before.abs() {
        return None;
    }
    let verb = if now > before { "rises" } else { "falls" };
    let over = schedule.steps.map_or_else(String::new, |steps| format!(" over {steps} steps"));
    Some(format!("the learning rate {verb} from {before:.2e} to {now:.2e}, as the schedule{over} has it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_model::{RopeScaling, RopeSpec};

    #[test]
    fn differences_are_named_by_the_keys_of_the_model() {
        let run = ModelSpec::llama(256, 32, 2, 4, 64, 128);
        let scaling = Some(RopeScaling::Linear { factor: 2.0 });
        let asked = ModelSpec {
            max_positions: 256,
            o_bias: true,
            rope: Some(RopeSpec { theta: 5e5, partial_factor: 1.0, scaling }),
            dropout: 0.1,
            eos_tokens: vec![7],
            ..run.clone()
        };
        let found: Vec<_> = differences(&run, &asked).into_iter().map(|d| (d.key, d.run, d.asked)).collect();
        let found: Vec<_> =
            found.iter().map(|(key, run, asked)| (key.as_str(), run.as_str(), asked.as_str())).collect();
        let want = [
            ("model.max_sequence_length", "128", "256"),
            ("model.output_bias", "false", "true"),
            ("model.rope_factor", "unset", "2.0"),
            ("model.rope_scaling", "unset", "\"linear\""),
            ("model.rope_theta", "10000.0", "500000.0"),
        ];
        assert_eq!(found, want);
        let kept = want.map(|(key, _, _)| keeps_tensors(key, &run));
        assert_eq!(kept, [true, false, true, true, true]);
        let learned = ModelSpec::gpt2(256, 32, 2, 4, 128);
        assert!(!keeps_tensors("model.max_sequence_length", &learned), "its positions are a tensor");
    }
}
