//! The bars: runs `trainyard bench` on the GPU and PyTorch on the same one, in turn.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::python::Python;
use super::suites::Executables;
use crate::bench::measure::{self, Case, Measured, Row, geometric_mean};
use crate::bench::target_folder;

/// The training of both sides: a preset, number of sequences, their length, rows of the embedding.
struct Training {
    name: &'static str,
    preset: &'static str,
    rows: &'static str,
    length: &'static str,
    vocabulary: &'static str,
}

const TRAININGS: [Training; 2] = [
    Training { name: "GPT-2 124M", preset: "gpt2-124m", rows: "64", length: "1024", vocabulary: "50304" },
    Training { name: "Llama 1B", preset: "llama-1b", rows: "8", length: "4096", vocabulary: "128256" },
];
/// Number of timed steps of a run.
const STEPS: &str = "10";

/// The largest model: the preset of its blocks, as in `torch_largest.py`, and its training.
const LARGEST: [&str; 15] = [
    "bench",
    "largest",
    "--preset",
    "llama-8b",
    "--rows",
    "1",
    "--length",
    "2048",
    "--vocab-size",
    "32768",
    "--checkpointing",
    "full",
    "--steps",
    "1",
    "--json",
];
/// Choices of state that lies on the host in the largest model. The one that trains most counts.
const OFFLOADS: [&[&str]; 4] =
    [&[], &["optimizer"], &["optimizer", "gradients"], &["optimizer", "gradients", "parameters", "activations"]];

/// The measurements.
#[derive(Serialize)]
pub struct Bars {
    rows: Vec<Named>,
    /// The figures that could not be measured, and why; wrong results are among them.
    pub failures: Vec<String>,
    /// The heading of the peer's column, or the reason why it is empty.
    peer: String,
    /// The figures for which the peer failed.
    alone: Vec<String>,
    /// Everything that both sides printed.
    printed: Vec<Printed>,
}

struct Named(&'static str, Row);

impl Serialize for Named {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.0, &self.1).serialize(serializer)
    }
}

#[derive(Serialize)]
struct Printed {
    what: &'static str,
    ours: Vec<Value>,
    theirs: Vec<Value>,
}

impl Bars {
    /// The table and the notes below it, as Markdown.
    pub fn text(&self) -> String {
        let rows: Vec<(&str, &Row)> = self.rows.iter().map(|Named(name, row)| (*name, row)).collect();
        let missed: Vec<String> =
            rows.iter().filter(|(_, row)| row.passed() == Some(false)).map(|r| r.1.name()).collect();
        let met = rows.iter().filter(|(_, row)| row.passed() == Some(true)).count();
        let mut text = format!("{}\n{}\n{met} bars met", measure::print(&rows), self.peer);
        text += &if missed.is_empty() {
            "\n".to_owned()
        } else {
            format!(", {} missed: {}\n", missed.len(), missed.join("; "))
        };
        for failure in &self.alone {
            text += &format!("PyTorch failed: {failure}\n");
        }
        for failure in &self.failures {
            text += &format!("NOT MEASURED: {failure}\n");
        }
        text
    }
}

/// Measures everything, `pairs` times in turn with PyTorch if there is one.
pub fn run(root: &Path, executables: &Executables, python: Option<&Python>, pairs: usize) -> Bars {
    println!("\n== bars");
    let peer = python.map_or("no PyTorch found: ratios are not judged".to_owned(), |python| {
        format!("PyTorch {}: compiled, bf16, fused AdamW, the fastest backend of its attention", python.torch)
    });
    let mut bars = Bars { rows: Vec::new(), failures: Vec::new(), peer, alone: Vec::new(), printed: Vec::new() };
    let folder = target_folder(root).join("bench");
    let program = std::fs::create_dir_all(&folder).context("no folder for what is measured");
    let program = program.and_then(|()| executables.program(root));
    let program = match program {
        Ok(program) => program,
        Err(error) => {
            bars.failures.push(format!("{error:#}"));
            return bars;
        }
    };
    let bench = Bench { root, program, python, pairs, folder };
    bars.add("kernels", || bench.kernels(), kernels);
    bars.add("mma.sync", || bench.attention_of_warps(), attention_of_warps);
    bars.add("fp8", || bench.eight_bits(), eight_bits);
    for training in &TRAININGS {
        bars.add(training.name, || bench.training(training), self::training);
    }
    bars.add("largest", || bench.largest(), largest);
    bars.add("planner", || bench.planner(), planner);
    bars
}

impl Bars {
    fn add(
        &mut self,
        what: &'static str,
        measured: impl FnOnce() -> Result<(Measured, Option<String>)>,
        rows: impl FnOnce(&Measured) -> Result<Vec<Row>>,
    ) {
        println!("{what}");
        let result = measured().and_then(|(measured, problem)| Ok((rows(&measured)?, measured, problem)));
        match result {
            Ok((rows, Measured { ours, theirs }, problem)) => {
                self.alone.extend(problem.map(|problem| format!("{what}: {problem}")));
                // Printed at once: the rest may take minutes.
                print!("{}", measure::print(&rows.iter().map(|row| (what, row)).collect::<Vec<_>>()));
                self.rows.extend(rows.into_iter().map(|row| Named(what, row)));
                self.printed.push(Printed { what, ours, theirs });
            }
            Err(error) => self.failures.push(format!("{what}: {error:#}")),
        }
    }
}

struct Bench<'a> {
    root: &'a Path,
    program: PathBuf,
    python: Option<&'a Python>,
    pairs: usize,
    folder: PathBuf,
}

impl Bench<'_> {
    fn ours(&self, log: &str, arguments: &[&str]) -> Result<Value> {
        let mut command = std::process::Command::new(&self.program);
        measure::last_json_line(command.args(arguments), &self.folder.join(format!("{log}.ours.log")))
    }

    /// Runs both sides in turn. Once the peer has failed, runs our side alone and returns the
    /// peer's message.
    fn pairs(&self, log: &str, ours: &[&str], theirs: &[&str]) -> Result<(Measured, Option<String>)> {
        self.turns(self.pairs, log, ours, ("torch_gpu.py", theirs))
    }

    fn turns(
        &self,
        pairs: usize,
        log: &str,
        ours: &[&str],
        (script, theirs): (&str, &[&str]),
    ) -> Result<(Measured, Option<String>)> {
        let mut measured = Measured { ours: Vec::new(), theirs: Vec::new() };
        let (mut peer, mut problem) = (self.python, None);
        for pair in 1..=pairs {
            measured.ours.push(self.ours(log, ours)?);
            if let Some(python) = peer {
                // The cases that our side ran, for the peer to repeat.
                let file = self.folder.join(format!("{log}.ours.json"));
                std::fs::write(&file, measured.ours[0].to_string())
                    .with_context(|| format!("cannot write {}", file.display()))?;
                let mut command = python.command(self.root, script, theirs);
                let log = self.folder.join(format!("{log}.peer.log"));
                match measure::last_json_line(command.current_dir(&self.folder), &log) {
                    Ok(printed) => measured.theirs.push(printed),
                    Err(error) => {
                        problem = Some(format!("{error:#}"));
                        peer = None;
                        measured.theirs.clear();
                    }
                }
            }
            println!("  pair {pair} of {pairs}");
        }
        Ok((measured, problem))
    }

    fn kernels(&self) -> Result<(Measured, Option<String>)> {
        self.pairs("gpu-kernels", &["bench", "gpu", "--json"], &["kernels", "gpu-kernels.ours.json"])
    }

    /// Attention without `wgmma`: the form for every GPU but Hopper, to show the gain of Hopper's
    /// form.
    fn attention_of_warps(&self) -> Result<(Measured, Option<String>)> {
        self.alone("gpu-mma", &["bench", "gpu", "--only", "attention", "--attention", "mma", "--json"])
    }

    fn eight_bits(&self) -> Result<(Measured, Option<String>)> {
        self.alone("gpu-fp8", &["bench", "gpu", "--only", "fp8", "--json"])
    }

    /// Runs our side as often as in pairs.
    fn alone(&self, log: &str, arguments: &[&str]) -> Result<(Measured, Option<String>)> {
        let ours = (0..self.pairs).map(|_| self.ours(log, arguments)).collect::<Result<_>>()?;
        Ok((Measured { ours, theirs: Vec::new() }, None))
    }

    fn training(&self, training: &Training) -> Result<(Measured, Option<String>)> {
        let Training { preset, rows, length, vocabulary, .. } = *training;
        let shape =
            ["--preset", preset, "--rows", rows, "--length", length, "--vocab-size", vocabulary, "--steps", STEPS];
        let ours = [&["bench", "train", "--set", "compute.device=cuda", "--json"][..], &shape].concat();
        self.pairs(&format!("gpu-{preset}"), &ours, &[&["train"][..], &shape].concat())
    }
}

impl Bench<'_> {
    /// The largest model that our side trains, and then the largest that PyTorch's FSDP trains.
    /// Each runs once, because it takes minutes.
    fn largest(&self) -> Result<(Measured, Option<String>)> {
        let mut best: Option<(f64, Vec<String>)> = None;
        for offload in OFFLOADS {
            let mut arguments = LARGEST.map(str::to_owned).to_vec();
            let sets = offload.iter().map(|what| format!("memory.offload.{what}=host"));
            let sets = [String::from("compute.device=cuda")].into_iter().chain(sets);
            arguments.extend(sets.flat_map(|set| ["--set".to_owned(), set]));
            let predicted: Vec<&str> = arguments.iter().map(String::as_str).chain(["--predict"]).collect();
            let parameters = measure::figure(&self.ours("gpu-largest-predicted", &predicted)?, "/parameters")?;
            if best.as_ref().is_none_or(|(most, _)| parameters > *most) {
                best = Some((parameters, arguments));
            }
        }
        let (_, arguments) = best.context("nothing was tried")?;
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        self.turns(1, "gpu-largest", &arguments, ("torch_largest.py", &["search", "gpu-largest.ours.json"]))
    }

    /// Calibrates, then trains configurations and compares them with the predictions.
    fn planner(&self) -> Result<(Measured, Option<String>)> {
        let profile = self.folder.join("gpu-profile.toml");
        let out = profile.to_str().context("the target folder is not UTF-8")?;
        let calibrate = ["calibrate", "--device", "cuda", "--out", out];
        let mut command = std::process::Command::new(&self.program);
        measure::output(command.args(calibrate), &self.folder.join("gpu-calibrate.log"))?;
        let checked = self.ours("gpu-check", &[&calibrate[..], &["--check", "--json"]].concat())?;
        Ok((Measured { ours: vec![checked], theirs: Vec::new() }, None))
    }
}

fn planner(m: &Measured) -> Result<Vec<Row>> {
    Ok(vec![
        Row::new("configurations", "", m.ours("/configurations")?),
        Row::new("step time after calibrate, median error", "", m.ours("/step_error_median")?).at_most(0.05),
        Row::new("the same, 90th percentile", "", m.ours("/step_error_p90")?),
        Row::new("peak memory, the worst total", "", m.ours("/memory_error_total")?).at_most(0.02),
    ])
}

/// Each case is a row: attention against PyTorch, streaming kernels against a copy. Products give
/// the mean and the worst.
fn kernels(m: &Measured) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let peaks = [
        ("measured peak of bf16 products", "/bf16_tflops", "TFLOP/s"),
        ("measured peak of f32 products", "/f32_tflops", "TFLOP/s"),
        ("measured bandwidth of a copy", "/copy_gb_per_s", "GB/s"),
    ];
    for (what, pointer, unit) in peaks {
        rows.push(Row::new(what, unit, m.ours(pointer)?));
    }
    let products = m.cases(&[("kind", "product")], "tflops")?;
    let ours = geometric_mean(products.iter().map(|case| case.ours))?;
    let theirs: Option<Vec<f64>> = products.iter().map(|case| case.theirs).collect();
    rows.push(Row::new("products, geometric mean", "TFLOP/s", ours).against(theirs.map(geometric_mean).transpose()?));
    let shares = m.cases(&[("kind", "product")], "peak_share")?;
    rows.push(Row::new("products, mean share of the peak", "", geometric_mean(shares.iter().map(|case| case.ours))?));
    if let Some(worst) = shares.iter().min_by(|a, b| a.ours.total_cmp(&b.ours)) {
        rows.push(Row::new(format!("the worst of them: {}", worst.name), "", worst.ours));
    }
    for case in m.cases(&[("kind", "attention")], "tflops")? {
        rows.push(Row::new(case.name, "TFLOP/s", case.ours).against(case.theirs).ratio_at_least(0.8));
    }
    for case in m.cases(&[("kind", "streaming")], "peak_share")? {
        rows.push(Row::new(case.name, "of a copy", case.ours).against(case.theirs).at_least(0.8));
    }
    Ok(rows)
}

fn attention_of_warps(m: &Measured) -> Result<Vec<Row>> {
    let cases = m.cases(&[("kind", "attention")], "tflops")?;
    Ok(cases.into_iter().map(|case| Row::new(case.name, "TFLOP/s", case.ours)).collect())
}

/// Products by their rate, rounding by its share of a copy.
fn eight_bits(m: &Measured) -> Result<Vec<Row>> {
    let shares = m.cases(&[("kind", "fp8")], "peak_share")?;
    let rates = m.cases(&[("kind", "fp8")], "tflops")?;
    let row = |(rate, share): (Case, Case)| match rate.ours > 0.0 {
        true => Row::new(rate.name, "TFLOP/s", rate.ours),
        false => Row::new(share.name, "of a copy", share.ours),
    };
    Ok(rates.into_iter().zip(shares).map(row).collect())
}

fn training(m: &Measured) -> Result<Vec<Row>> {
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    let (peak, predicted) = (m.ours("/mem_peak_bytes")?, m.ours("/mem_predicted_bytes")?);
    Ok(vec![
        Row::new("speed", "tokens/s", m.ours("/tokens_per_s")?).against(m.theirs("/tokens_per_s")?).ratio_at_least(1.0),
        Row::new("utilisation of the measured bf16 peak", "", m.ours("/mfu")?).at_least(0.55),
        Row::new("peak memory", "GiB", gib(peak)).against(m.theirs("/peak_bytes")?.map(gib)),
        Row::new("memory held above the peak", "", m.ours("/mem_reserved_bytes")? / peak - 1.0),
        Row::new("peak memory, off the prediction", "", (peak / predicted - 1.0).abs()).at_most(0.02),
    ])
}

fn largest(m: &Measured) -> Result<Vec<Row>> {
    let off = |measured: &str, predicted: &str| -> Result<f64> {
        let predicted = m.ours(predicted)?;
        Ok(if predicted > 0.0 { (m.ours(measured)? / predicted - 1.0).abs() } else { 0.0 })
    };
    let theirs = m.theirs("/parameters")?.map(|parameters| parameters / 1e9);
    Ok(vec![
        Row::new("parameters of the largest model", "1e9", m.ours("/parameters")? / 1e9)
            .against(theirs)
            .ratio_at_least(1.0),
        Row::new("its step", "s", m.ours("/step_s")?).against(m.theirs("/step_s")?),
        Row::new("its peak memory, off the prediction", "", off("/mem_peak_bytes", "/mem_predicted_bytes")?)
            .at_most(0.02),
        Row::new("on the host, off the prediction", "", off("/host_peak_bytes", "/host_predicted_bytes")?)
            .at_most(0.02),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn kernels_printed(attention: f64, share: f64) -> Value {
        let case = |name: &str, kind: &str, tflops: f64, share: f64| json!({"name": name, "kind": kind, "tflops": tflops, "peak_share": share});
        json!({"bf16_tflops": 790.0, "f32_tflops": 51.0, "copy_gb_per_s": 4300.0, "cases": [
            case("p", "product", 700.0, 0.9), case("q", "product", 600.0, 0.7),
            case("a", "attention", attention, 0.5), case("rms_norm", "streaming", 0.0, share)]})
    }

    #[test]
    fn bars_are_judged_by_name() {
        let measured = Measured { ours: vec![kernels_printed(300.0, 0.7)], theirs: vec![kernels_printed(400.0, 0.9)] };
        let rows = kernels(&measured).unwrap();
        let verdicts: Vec<(String, Option<bool>)> = rows.iter().map(|row| (row.name(), row.passed())).collect();
        assert_eq!(verdicts.iter().filter(|(_, passed)| passed.is_none()).count(), 6);
        assert_eq!(verdicts[6..], [("a".to_owned(), Some(false)), ("rms_norm".to_owned(), Some(false))]);
        let alone = kernels(&Measured { ours: vec![kernels_printed(300.0, 0.85)], theirs: vec![] }).unwrap();
        assert_eq!((alone[6].passed(), alone[7].passed()), (None, Some(true)));

        let rows = attention_of_warps(&Measured { ours: vec![kernels_printed(300.0, 0.7)], theirs: vec![] }).unwrap();
        assert_eq!(rows.iter().map(|row| (row.name(), row.passed())).collect::<Vec<_>>(), [("a".to_owned(), None)]);

        let case = |name: &str, tflops: f64, share: f64| json!({"name": name, "kind": "fp8", "tflops": tflops, "peak_share": share});
        let printed = json!({"cases": [case("p", 1200.0, 0.9), case("rounding", 0.0, 0.7)]});
        let rows = eight_bits(&Measured { ours: vec![printed], theirs: vec![] }).unwrap();
        let rows = serde_json::to_value(&rows).unwrap();
        assert_eq!((&rows[0]["unit"], &rows[1]["unit"]), (&json!("TFLOP/s"), &json!("of a copy")));

        let run = json!({"tokens_per_s": 900.0, "mfu": 0.5, "mem_peak_bytes": 101e9, "mem_predicted_bytes": 100e9, "mem_reserved_bytes": 102e9});
        let checked =
            json!({"configurations": 12, "step_error_median": 0.06, "step_error_p90": 0.1, "memory_error_total": 0.0});
        let rows = planner(&Measured { ours: vec![checked], theirs: vec![] }).unwrap();
        assert_eq!(rows.iter().map(Row::passed).collect::<Vec<_>>(), [None, Some(false), None, Some(true)]);
        let run_largest = json!({"parameters": 9.5e9, "step_s": 6.0, "mem_peak_bytes": 101e9, "mem_predicted_bytes": 100e9, "host_peak_bytes": 103e9, "host_predicted_bytes": 100e9});
        let fsdp = json!({"parameters": 8.0e9, "step_s": 9.0});
        let rows = largest(&Measured { ours: vec![run_largest], theirs: vec![fsdp] }).unwrap();
        assert_eq!(rows.iter().map(Row::passed).collect::<Vec<_>>(), [Some(true), None, Some(true), Some(false)]);

        let peer = json!({"tokens_per_s": 800.0, "peak_bytes": 90e9});
        let rows = training(&Measured { ours: vec![run], theirs: vec![peer] }).unwrap();
        assert_eq!(rows.iter().map(Row::passed).collect::<Vec<_>>(), [Some(true), Some(false), None, None, Some(true)]);
    }

    #[test]
    fn the_text_says_what_is_missed_and_what_was_not_measured() {
        let mut bars = Bars {
            rows: Vec::new(),
            failures: Vec::new(),
            peer: "no PyTorch found".into(),
            alone: Vec::new(),
            printed: Vec::new(),
        };
        let measured = || Ok((Measured { ours: vec![json!({"x": 1.0})], theirs: vec![] }, None));
        bars.add("one", measured, |m| Ok(vec![Row::new("speed", "1/s", m.ours("/x")?).at_least(2.0)]));
        bars.add("two", measured, |m| Ok(vec![Row::new("speed", "1/s", m.ours("/y")?)]));
        bars.add("three", measured, |m| Ok(vec![Row::new("share", "", m.ours("/x")?).at_least(1.0)]));
        let text = bars.text();
        assert!(text.contains("no PyTorch found\n1 bars met, 1 missed: speed\nNOT MEASURED: two: no `/y`"), "{text}");
        let json = serde_json::to_value(&bars).unwrap();
        assert_eq!((&json["rows"][0][0], &json["rows"][1][1]["passed"]), (&json!("one"), &json!(true)));
        assert_eq!(json["printed"].as_array().unwrap().len(), 2);
    }
}
