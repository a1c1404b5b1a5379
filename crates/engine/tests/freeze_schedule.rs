//! Freezing by schedule: a period trains what a run that freezes the same trains, what rests keeps
//! every bit, and runs resume in the middle of a period and at its ends.

#[path = "common/layouts.rs"]
mod layouts;
#[path = "common/runs.rs"]
mod runs;
#[path = "common/small.rs"]
mod small;
#[path = "common/tensors.rs"]
mod tensors;

use layouts::*;
use small::{config, go_on, run, start};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use tensors::tensors;
use trainyard_engine::checkpoint::{Choice, find};
use trainyard_engine::config::Config;
use trainyard_engine::metrics::StepMetrics;
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::trained::{Runtime, open_trained};
use trainyard_model::Model;
use trainyard_model::weights::{ExportOptions, export};
use trainyard_program::Action;
use trainyard_tensor::DType;

const STEPS: u64 = 7;
/// The first step of the second and of the third period.
const ENDS: [u64; 2] = [2, 5];
/// From above, one unit more in each period.
const UNFREEZE: [&str; 3] = ["['embedding.*','block.*']", "['embedding.*','block.0.*']", "[]"];
/// Each period trains what no other does, parts of units too.
const APART: [&str; 3] = [
    "['embedding.*','head.*','block.0.*','block.1.attn.*']",
    "['embedding.*','block.1.*','block.0.mlp.*','block.0.norm*']",
    "['head.*','block.1.*','block.0.attn.*']",
];
const F32: &str = "precision.compute=f32";
const KEPT: &[&str] = &["checkpoint.interval_steps=1", "checkpoint.keep_last=100", RATE];

type Tensors = BTreeMap<String, Vec<u8>>;

fn schedule(frozen: [&str; 3]) -> String {
    let [a, b, c] = frozen;
    let [first, second] = ENDS;
    format!(
        "fine_tuning.freeze_schedule=[{{from_step=0,frozen={a}}},{{from_step={first},frozen={b}}},{{from_step={second},frozen={c}}}]"
    )
}

fn scheduled(folder: &Path, name: &str, frozen: [&str; 3], sets: &[&str]) -> Tensors {
    let (schedule, steps) = (schedule(frozen), format!("training.steps={STEPS}"));
    start(folder, name, &[sets, KEPT, &[&schedule, &steps]].concat())
}

fn at(run: &Path, step: u64) -> Tensors {
    tensors(&find(run, Choice::Step(step)).unwrap().unwrap().checkpoint)
}

/// Writes the weights of a run's checkpoint as a Hugging Face folder in f32, without rounding.
fn weights_of(run: &Path, step: u64, to: &Path) {
    let trained = open_trained(run, Choice::Step(step), &Runtime::of_this_machine(), |_| ()).unwrap();
    let options = ExportOptions { dtype: DType::F32, ..ExportOptions::default() };
    let model = Model::new(trained.spec.clone()).unwrap();
    export(to, &model, options, |unit, out| trained.merged_unit(unit, out)).unwrap();
    trained.tokenizer.as_ref().unwrap().save_hugging_face(to, 16).unwrap();
}

/// A new run from the weights of `run` at step `from` to `to`, on the samples that come there, with
/// `frozen` from its beginning to its end.
fn by_hand(folder: &Path, run_name: &str, [from, to]: [u64; 2], frozen: &str, sets: &[&str]) -> Tensors {
    let (name, base) = (format!("{run_name}-by-hand-{from}"), folder.join(format!("{run_name}-{from}")));
    weights_of(&folder.join(run_name), from, &base);
    let own = [
        format!("model.path='{}'", base.display()),
        format!("training.steps={to}"),
        format!("fine_tuning.freeze={frozen}"),
    ];
    let auto = ["model.dim=auto", "model.layers=auto", "model.heads=auto", "tokenizer.kind=auto"];
    let sets: Vec<&str> = [sets, KEPT, &auto].concat().into_iter().chain(own.iter().map(String::as_str)).collect();
    let config = config(folder, &name, &sets);
    run(&folder.join(&name), &config, |world| {
        let mut session = Session::create(&config, world, |_| ())?;
        session.state.step = from;
        session.state.samples = 4 * from;
        Ok(session)
    })
}

/// Checks every period of a schedule against runs by hand. Those have new moments.
fn check_periods(folder: &Path, name: &str, frozen: [&str; 3], sets: &[&str]) {
    scheduled(folder, name, frozen, sets);
    for (period, range) in [[0, ENDS[0]], [ENDS[0], ENDS[1]], [ENDS[1], STEPS]].into_iter().enumerate() {
        let begin = if range[0] == 0 { None } else { Some(at(&folder.join(name), range[0])) };
        let end = at(&folder.join(name), range[1]);
        let hand = match begin {
            // The first weights are those of the seed.
            None => {
                let freeze = format!("fine_tuning.freeze={}", frozen[0]);
                let steps = format!("training.steps={}", range[1]);
                start(folder, &format!("{name}-first"), &[sets, KEPT, &[&freeze, &steps]].concat())
            }
            Some(_) => by_hand(folder, name, range, frozen[period], sets),
        };
        assert!(hand.keys().any(|key| key.starts_with("model ")));
        for (key, value) in &hand {
            assert!(end[key] == *value, "{name}: {key} of period {period}");
        }
        // The others rest: neither decay nor moments move them.
        let Some(begin) = begin else { continue };
        let (mut rest, mut moved) = (0, 0);
        for (key, value) in &end {
            if hand.contains_key(key) {
                moved += usize::from(begin[key] != *value);
            } else {
                assert!(begin[key] == *value, "{name}: {key} does not rest in period {period}");
                rest += 1;
            }
        }
        assert!(moved > 3 && (rest > 3 || frozen[period] == "[]"), "{name}: {moved} {rest}");
    }
}

#[test]
fn a_period_trains_the_bits_of_a_run_that_freezes_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Without state, so that runs by hand go on with all of it. Units are whole, so that norms are
    // summed alike.
    let plain = [F32, "optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0.1"];
    check_periods(folder, "plain", UNFREEZE, &plain);
    check_periods(folder, "plain-shards", UNFREEZE, &[&plain[..], STAGE_3].concat());
    // Moments begin in the period that trains their parameter, corrected for its updates alone.
    for optimizer in ["adamw", "lion", "muon", "adafactor", "lamb"] {
        let name = format!("optimizer.name={optimizer}");
        check_periods(folder, optimizer, APART, &[F32, &name, "optimizer.clip_norm=0"]);
    }
    let bits = ["precision.compute=bf16", "optimizer.state_bits=8", "optimizer.clip_norm=0"];
    check_periods(folder, "bits", APART, &[&bits, STAGE_2].concat());
}

#[test]
fn a_run_resumes_in_the_middle_of_a_period_and_at_its_ends() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (name, frozen) in [("unfreeze", UNFREEZE), ("apart", APART)] {
        let whole = scheduled(folder, name, frozen, STAGE_2);
        for (step, layout) in [(1, STAGE_2), (2, STAGE_3), (3, DDP), (4, HYBRID), (5, STAGE_1), (6, STAGE_3)] {
            let continued = go_on(folder, name, &format!("{name}-from-{step}"), step, layout);
            assert!(continued == whole, "{name} from step {step} on {layout:?}");
        }
    }
}

#[test]
fn metrics_and_notes_say_what_is_trained_and_lower_units_have_no_backward() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let said = Mutex::new(Vec::new());
    let schedule = schedule(UNFREEZE);
    let steps = format!("training.steps={STEPS}");
    let made = config(folder, "run", &[&schedule, &steps, RATE]);
    run(&folder.join("run"), &made, |world| {
        let session = Session::create(&made, world, |line| said.lock().unwrap().push(line.to_owned()))?;
        let backwards = |place: usize| {
            let program = &session.programs[place];
            program.instructions.iter().filter(|one| matches!(one.action, Action::Backward { .. })).count()
        };
        // Per micro-batch: head; head and block; all units.
        assert_eq!([0, 2, 4].map(backwards), [4, 8, 16]);
        assert_eq!([0, 2, 4].map(|place| session.programs[place].lowest), [3, 2, 0]);
        assert_eq!((session.programs.len(), session.priced()), (6, 4));
        // What rests has its state.
        assert!(session.programs.iter().all(|program| program.resident == session.programs[0].resident));
        Ok(session)
    });
    let text = std::fs::read_to_string(folder.join("run/metrics.jsonl")).unwrap();
    let metrics: Vec<StepMetrics> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let trained: Vec<u64> = metrics.iter().map(|step| step.trained_parameters.unwrap()).collect();
    assert!(trained[..2].iter().all(|n| *n == trained[0]) && trained[2..5].iter().all(|n| *n == trained[2]));
    assert!(trained[0] < trained[2] && trained[2] < trained[5] && trained[5] == trained[6]);
    let said = said.into_inner().unwrap().join("\n");
    for (from, step) in [(0, 0), (2, 2), (5, 5)] {
        assert!(said.contains(&format!("from step {from}: trained: {} of", trained[step])), "{said}");
    }
    assert!(said.contains("that of steps from step 5"), "{said}");
    for step in &metrics {
        assert!(step.predicted_mem_peak_bytes.is_some());
    }
    assert_eq!(metrics.last().unwrap().mem_peak_bytes, metrics[0].predicted_mem_peak_bytes.unwrap());
}

fn refused(folder: &Path, schedule: &str, sets: &[&str]) -> String {
    let schedule = format!("fine_tuning.freeze_schedule={schedule}");
    let made = config(folder, "refused", &[&["training.steps=7", &schedule], sets].concat());
    let outcome = trainyard_engine::world::on_threads(1, |world| Session::create(&made, world, |_| ()).map(|_| ()));
    outcome.err().unwrap_or_else(|| panic!("{schedule} {sets:?} is accepted")).to_string()
}

#[test]
fn schedules_that_cannot_run_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (schedule, words) in [
        ("[{from_step=3,frozen='head.*'},{from_step=3,frozen=[]}]", "entries are in ascending order"),
        ("[{from_step=7,frozen='head.*'}]", "the run ends after step 6"),
        ("[{from_step=0,frozen='head.*'}]", "use fine_tuning.freeze"),
        ("[{from_step=2,frozen=[]}]", "freezes the same in every step"),
        ("[{from_step=2,frozen='blok.*'}]", "`blok.*`"),
        ("[{from_step=2,frozen='*'}]", "period 2 trains nothing"),
    ] {
        let error = refused(folder, schedule, &[]);
        assert!(error.contains(words), "{schedule}: {error}");
    }
    let schedule = "[{from_step=2,frozen='block.0.*'}]";
    for (sets, words) in [
        (&["averaging.kind=ema"][..], "averaging.kind = \"off\""),
        (&["compression.gradients=one_bit", "parallel.ranks=2"], "compression.gradients"),
        (&["quantization.aware=4"], "quantization.aware"),
        (&["pruning.sparsity=0.5"], "pruning.sparsity"),
        (&["precision.fp8=hybrid", "model.dim=64"], "precision.fp8"),
        (&["update.rule=diloco", "parallel.ranks=2"], "update.rule"),
    ] {
        let error = refused(folder, schedule, sets);
        assert!(error.contains("fine_tuning.freeze_schedule needs") && error.contains(words), "{sets:?}: {error}");
    }
    let parse = |schedule: &str| {
        let set = format!("fine_tuning.freeze_schedule={schedule}");
        Config::parse("c.toml".as_ref(), "", &[set]).unwrap_err().to_string()
    };
    for (schedule, words) in [
        ("3", "a list of `{ from_step, frozen }`"),
        ("[{from=3,frozen=[]}]", "unknown key `from`"),
        ("[{from_step=3}]", "lacks `from_step` or `frozen`"),
        ("[{from_step=-3,frozen=[]}]", "`from_step` takes a whole number, not -3"),
        ("[{from_step=3,frozen=[4]}]", "`frozen` takes a name"),
    ] {
        let error = parse(schedule);
        assert!(error.contains(words), "{schedule}: {error}");
    }
    // What is trained when is decided when a run begins.
    scheduled(folder, "run", UNFREEZE, &[]);
    let sets = [format!("fine_tuning.freeze_schedule={schedule}")];
    let error = Session::configuration(&GoingOn::new(&folder.join("run"), &sets)).unwrap_err().to_string();
    assert!(error.contains("fine_tuning.freeze_schedule has no effect on a run that goes on"), "{error}");
}
