//! The table of benchmarks: the commands of both sides, and the bars.
//!
//! A program prints one JSON object on a line; the last such line counts. Both sides use the same
//! keys, so that figures are compared by name.
//!
//! - **kernels**: `cases`, each with `name` (unique), `kind` (`product`, `attention`), `form`
//!   (`forward`, `input-gradient`, `weight-gradient`, `backward`), `dtype` (`bf16`, `f32`),
//!   `flops`, `tflops`, `peak_share` (of the peak sampled in turn with it, at most 1) and sizes.
//!   The sizes (`tokens`, `inputs`, `outputs`; `batch`, `heads`, `kv_heads`, `seq`, `head_dim`)
//!   tell the peer which cases to run.
//! - **train, startup**: `step_s` (median), `tokens_per_s`, `tflops`, `mfu`, `first_step_s` (since
//!   process start), `data_wait_s` (per step), `peak_rss_bytes`; on our side also
//!   `first_step_system_s` (processor time in the system until then).
//! - **ddp, zero3**: `step_s` of the global batch; the peer's `tokens_per_s`.
//! - **bubbles**: `cases`, each with `name`, `schedule` and `error` (of the simulator, relative).
//! - **layouts**: `cases`, each with `name` (its settings), `step_s`, `tokens_per_s` and
//!   `speed_ratio` (to the first case, the median over turns).
//! - **tp, pp**: the same with one case; the peer's `tokens_per_s`.
//! - **images**: `images_per_second`.
//! - **memory**: `cases`, each with `name`, `kind` (`peak`, `cut`), `error` (of the prediction,
//!   relative, the worst purpose) or `cut` (activations without / with full checkpointing).
//!
//! A benchmark that trains ([`Ours::Trains`]) takes the way of a user instead: `trainyard train`
//! with a config file. Its figures come from the run's `metrics.jsonl`.

use anyhow::Result;

use super::measure::{Measured, Row, geometric_mean, utilisation};

/// The way in which our side runs.
pub enum Ours {
    /// A command that prints a JSON line.
    Prints(&'static [&'static str]),
    /// `trainyard train` with these arguments; `runs/RUN/metrics.jsonl` is read.
    Trains { run: &'static str, arguments: &'static [&'static str] },
}

impl Ours {
    /// Arguments of the program.
    pub fn arguments(&self) -> &'static [&'static str] {
        match self {
            Ours::Prints(arguments) | Ours::Trains { arguments, .. } => arguments,
        }
    }
}

/// One variant of the peer.
pub struct Peer {
    /// Label for the record.
    pub label: &'static str,
    /// Script in `scripts/peers`.
    pub script: &'static str,
    /// Arguments. `{text}` and `{images}` are paths as on our side, `{ours}` is a file with the
    /// output of our side.
    pub arguments: &'static [&'static str],
}

/// One benchmark.
pub struct Benchmark {
    /// Name on the command line.
    pub name: &'static str,
    /// One line of description.
    pub about: &'static str,
    /// Files to put into the folder that it runs in.
    pub files: &'static [(&'static str, &'static str)],
    /// The command of our side. `{text}` is the text's path, `{images}` a folder of JPEG files.
    pub ours: Ours,
    /// Variants of the peer, of which the fastest is compared.
    pub peers: &'static [Peer],
    /// JSON pointer to the figure by which the fastest variant is chosen; larger is better.
    pub peer_speed: &'static str,
    /// Figures and bars.
    pub rows: fn(&Measured) -> Result<Vec<Row>>,
}

impl Benchmark {
    /// True if it needs the text that the caller gives.
    pub fn needs_text(&self) -> bool {
        let peers = self.peers.iter().flat_map(|peer| peer.arguments);
        self.ours.arguments().iter().chain(peers).any(|argument| argument.contains("{text}"))
    }

    /// True if it needs the images that a script of the peer makes.
    pub fn needs_images(&self) -> bool {
        self.ours.arguments().contains(&"{images}")
    }
}

macro_rules! torch_train {
    ($label:literal, $($argument:literal),*) => {
        Peer { label: concat!("PyTorch, ", $label), script: "torch_train.py", arguments: &["--steps", "5", $($argument),*] }
    };
}

/// The character-level recipe of `scripts/peers/torch_shakespeare.py` as a configuration.
const SHAKESPEARE: &str = include_str!("shakespeare.toml");

/// GPT-2 124M as a configuration, on two ranks of one thread; the text is arbitrary.
const PARALLEL: &str = include_str!("parallel.toml");

macro_rules! parallel {
    ($name:literal, $about:literal, $stage:literal, $strategy:literal) => {
        Benchmark {
            name: $name,
            about: concat!("GPT-2 124M, 4 x 512 tokens, bf16, 2 ranks x 1 thread, ", $about),
            files: &[("parallel.toml", PARALLEL), ("text.txt", include_str!("table.rs"))],
            ours: Ours::Trains { run: "parallel", arguments: &["train", "parallel.toml", "--set", $stage] },
            peers: &[Peer {
                label: concat!("PyTorch over gloo, ", $strategy),
                script: "torch_parallel.py",
                arguments: &["--ranks", "2", "--threads", "1", "--strategy", $strategy],
            }],
            peer_speed: "",
            rows: parallel,
        }
    };
}

macro_rules! layouts {
    ($name:literal, $dtype:literal) => {
        Benchmark {
            name: $name,
            about: concat!("GPT-2 124M, 8 x 256 tokens, ", $dtype, ": 2 ranks x 1 thread against 1 rank x 2 threads"),
            files: &[],
            ours: Ours::Prints(&[
                "bench",
                "layouts",
                "--rows",
                "1",
                "--accumulation",
                "8",
                "--length",
                "256",
                "--dtype",
                $dtype,
                "--json",
            ]),
            peers: &[],
            peer_speed: "",
            rows: layouts,
        }
    };
}

/// The layouts that are compared with PyTorch's.
const TP: &str = "parallel.ranks=2 parallel.tensor_parallel_degree=2";
const PP: &str = "parallel.ranks=2 parallel.pipeline_parallel_degree=2 parallel.pipeline_schedule='zero_bubble'";

macro_rules! split {
    ($name:literal, $dtype:literal, $about:literal, $rows:literal, $micro_batches:literal, $layout:expr, [$(($strategy:literal, $schedule:literal)),*]) => {
        Benchmark {
            name: $name,
            about: concat!("GPT-2 124M, 8 x 256 tokens, ", $dtype, ", 2 ranks x 1 thread, ", $about),
            files: &[],
            ours: Ours::Prints(&[
                "bench", "layouts", "--rows", $rows, "--accumulation", $micro_batches, "--length", "256", "--dtype", $dtype,
                "--steps", "3", "--layout", $layout, "--json",
            ]),
            peers: &[$(Peer {
                label: concat!("PyTorch over gloo, ", $strategy, ", ", $schedule),
                script: "torch_split.py",
                arguments: &[
                    "--ranks", "2", "--threads", "1", "--strategy", $strategy, "--schedule", $schedule, "--dtype", $dtype,
                ],
            }),*],
            peer_speed: "/tokens_per_s",
            rows: split,
        }
    };
}

/// All of them, in the order in which they run.
pub const BENCHMARKS: &[Benchmark] = &[
    Benchmark {
        name: "kernels",
        about: "matrix products in the three forms of training, and attention, against the measured peak and PyTorch",
        files: &[],
        ours: Ours::Prints(&["bench", "kernels", "--json"]),
        peers: &[Peer { label: "PyTorch, eager", script: "torch_kernels.py", arguments: &["{ours}"] }],
        peer_speed: "",
        rows: kernels,
    },
    Benchmark {
        name: "train-bf16",
        about: "GPT-2 124M, 4 x 512 tokens, bf16, AdamW: the whole step",
        files: &[],
        ours: Ours::Prints(&["bench", "train", "--precision", "bf16", "--json"]),
        peers: &[
            torch_train!("bf16, eager", "--dtype", "bf16", "--mode", "eager"),
            torch_train!("bf16, compiled", "--dtype", "bf16", "--mode", "compile"),
            torch_train!("bf16, max-autotune", "--dtype", "bf16", "--mode", "max-autotune"),
            // Without bf16 tiles PyTorch is faster in f32, and that is then the figure to beat.
            torch_train!("f32, compiled", "--dtype", "f32", "--mode", "compile"),
        ],
        peer_speed: "/tokens_per_s",
        rows: |m| train(m, 2.5),
    },
    Benchmark {
        name: "train-f32",
        about: "GPT-2 124M, 4 x 512 tokens, f32, AdamW: the whole step",
        files: &[],
        ours: Ours::Prints(&["bench", "train", "--precision", "f32", "--json"]),
        peers: &[
            torch_train!("f32, eager", "--dtype", "f32", "--mode", "eager"),
            torch_train!("f32, compiled", "--dtype", "f32", "--mode", "compile"),
        ],
        peer_speed: "/tokens_per_s",
        rows: |m| train(m, 1.25),
    },
    Benchmark {
        name: "startup",
        about: "from process start to the end of the first step, GPT-2 124M",
        files: &[],
        ours: Ours::Prints(&["bench", "train", "--precision", "bf16", "--steps", "2", "--json"]),
        peers: &[Peer {
            label: "PyTorch, f32, eager",
            script: "torch_train.py",
            arguments: &["--dtype", "f32", "--mode", "eager", "--warmup", "1", "--steps", "1"],
        }],
        peer_speed: "",
        rows: startup,
    },
    Benchmark {
        name: "shakespeare",
        about: "character-level recipe, 2,000 steps: time per step and loss over the whole validation split",
        files: &[("shakespeare.toml", SHAKESPEARE)],
        ours: Ours::Trains {
            run: "shakespeare",
            arguments: &["train", "shakespeare.toml", "--set", "data.train=[\"{text}\"]"],
        },
        peers: &[Peer { label: "PyTorch, f32, eager", script: "torch_shakespeare.py", arguments: &["{text}"] }],
        peer_speed: "",
        rows: shakespeare,
    },
    Benchmark {
        name: "memory",
        about: "measured peak bytes against the meta device's prediction: three models, three checkpointing modes",
        files: &[],
        ours: Ours::Prints(&["bench", "memory", "--json"]),
        peers: &[],
        peer_speed: "",
        rows: memory,
    },
    Benchmark {
        name: "images",
        about: "JPEG files of 500 x 400: decoding, random crops to 224 x 224, flips, normalisation; 2 threads",
        files: &[],
        ours: Ours::Prints(&["data", "bench", "--images", "{images}", "--workers", "2", "--json"]),
        peers: &[Peer {
            label: "PyTorch's DataLoader with torchvision, 2 workers",
            script: "torch_images.py",
            arguments: &["run", "{images}", "--workers", "2"],
        }],
        peer_speed: "/images_per_second",
        rows: images,
    },
    Benchmark {
        name: "bubbles",
        about: "paced steps of six pipeline schedules on 2, 4 and 8 ranks, against the simulator",
        files: &[],
        ours: Ours::Prints(&["bench", "bubbles", "--json"]),
        peers: &[],
        peer_speed: "",
        rows: bubbles,
    },
    layouts!("layouts-f32", "f32"),
    layouts!("layouts-bf16", "bf16"),
    split!("tp-f32", "f32", "tensor parallelism", "8", "1", TP, [("tp", "1f1b")]),
    split!("tp-bf16", "bf16", "tensor parallelism", "8", "1", TP, [("tp", "1f1b")]),
    split!("pp-f32", "f32", "a pipeline of 8 micro-batches", "1", "8", PP, [("pp", "1f1b"), ("pp", "zbv")]),
    split!("pp-bf16", "bf16", "a pipeline of 8 micro-batches", "1", "8", PP, [("pp", "1f1b"), ("pp", "zbv")]),
    parallel!("ddp", "everything replicated", "parallel.zero_stage=0", "ddp"),
    parallel!("zero3", "everything sharded", "parallel.zero_stage=3", "fsdp"),
];

fn parallel(m: &Measured) -> Result<Vec<Row>> {
    const TOKENS: f64 = 2048.0;
    let ours = TOKENS / m.ours("/step_s")?;
    Ok(vec![Row::new("speed", "tokens/s", ours).against(m.theirs("/tokens_per_s")?).ratio_at_least(3.0)])
}

/// The farthest case of each schedule from the simulator.
fn bubbles(m: &Measured) -> Result<Vec<Row>> {
    const SCHEDULES: [&str; 6] = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dual_pipe_v"];
    let farthest = |schedule| -> Result<Row> {
        let cases = m.cases(&[("schedule", schedule)], "error")?;
        let error = cases.iter().map(|case| case.ours.abs()).fold(0.0, f64::max);
        Ok(Row::new(format!("{schedule}, farthest step from the simulator"), "", error).at_most(0.05))
    };
    SCHEDULES.into_iter().map(farthest).collect()
}

fn layouts(m: &Measured) -> Result<Vec<Row>> {
    let cases = m.cases(&[], "speed_ratio")?;
    let row = |case: &super::measure::Case| {
        let row = Row::new(format!("{}, speed", case.name), "x", case.ours);
        match case.name.as_str() {
            TP => row.at_least(0.85),
            PP => row.at_least(0.9),
            _ => row,
        }
    };
    Ok(cases.iter().map(row).collect())
}

fn split(m: &Measured) -> Result<Vec<Row>> {
    let ours = m.ours("/cases/0/tokens_per_s")?;
    Ok(vec![Row::new("speed", "tokens/s", ours).against(m.theirs("/tokens_per_s")?).ratio_at_least(1.3)])
}

fn kernels(m: &Measured) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (dtype, share_bar, ratio_bar) in [("bf16", 0.45, Some(1.3)), ("f32", 0.80, None)] {
        let only = [("kind", "product"), ("dtype", dtype)];
        let shares = m.cases(&only, "peak_share")?;
        let shares = shares.iter().map(|case| utilisation(&case.name, case.ours)).collect::<Result<Vec<_>>>()?;
        let cases = m.cases(&only, "tflops")?;
        let ours = geometric_mean(cases.iter().map(|c| c.ours))?;
        let theirs: Option<Vec<f64>> = cases.iter().map(|c| c.theirs).collect();
        let theirs = theirs.map(geometric_mean).transpose()?;
        rows.push(
            Row::new(format!("{dtype} products, share of the peak"), "", geometric_mean(shares)?).at_least(share_bar),
        );
        let against = Row::new(format!("{dtype} products, geometric mean"), "TFLOP/s", ours).against(theirs);
        rows.push(match ratio_bar {
            Some(bar) => against.ratio_at_least(bar),
            None => against,
        });
    }
    for dtype in ["bf16", "f32"] {
        let cases = m.cases(&[("kind", "attention"), ("dtype", dtype)], "tflops")?;
        let theirs: Option<Vec<f64>> = cases.iter().map(|c| c.theirs).collect();
        let ours = geometric_mean(cases.iter().map(|c| c.ours))?;
        let theirs = theirs.map(geometric_mean).transpose()?;
        rows.push(Row::new(format!("{dtype} attention, geometric mean"), "TFLOP/s", ours).against(theirs));
    }
    Ok(rows)
}

fn train(m: &Measured, bar: f64) -> Result<Vec<Row>> {
    let mfu = utilisation("the step", m.ours("/mfu")?)?;
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    Ok(vec![
        Row::new("speed", "tokens/s", m.ours("/tokens_per_s")?).against(m.theirs("/tokens_per_s")?).ratio_at_least(bar),
        Row::new("model FLOPs", "TFLOP/s", m.ours("/tflops")?).against(m.theirs("/tflops")?),
        Row::new("utilisation of the measured peak", "", mfu),
        Row::new("peak memory", "GiB", gib(m.ours("/peak_rss_bytes")?))
            .against(m.theirs("/peak_rss_bytes")?.map(gib))
            .ratio_at_most(1.0),
        Row::new("waiting for data, share of the step", "", m.ours("/data_wait_s")? / m.ours("/step_s")?).at_most(0.01),
    ])
}

fn startup(m: &Measured) -> Result<Vec<Row>> {
    let theirs = match (m.theirs("/first_step_s")?, m.theirs("/step_s")?) {
        (Some(first), Some(step)) => Some(first - step),
        _ => None,
    };
    let ours = m.ours("/first_step_s")? - m.ours("/step_s")?;
    Ok(vec![
        Row::new("first step done, beyond a step's time", "s", ours).against(theirs).at_most(1.0),
        // On machines whose hypervisor takes free memory back, getting it again is most of the
        // first step's cost.
        Row::new("until then in the system, over all threads", "s", m.ours("/first_step_system_s")?),
    ])
}

fn shakespeare(m: &Measured) -> Result<Vec<Row>> {
    let ms = |s: f64| s * 1e3;
    Ok(vec![
        Row::new("time per step", "ms", ms(m.ours("/step_s")?))
            .against(m.theirs("/step_s")?.map(ms))
            .ratio_at_most(0.2),
        Row::new("validation loss", "nats", m.ours("/val_loss")?).against(m.theirs("/val_loss")?).at_most(1.90),
        Row::new("waiting for data, share of the step", "", m.ours("/data_wait_share")?).at_most(0.01),
    ])
}

fn images(m: &Measured) -> Result<Vec<Row>> {
    let speed = m.ours("/images_per_second")?;
    Ok(vec![Row::new("speed", "images/s", speed).against(m.theirs("/images_per_second")?).ratio_at_least(1.3)])
}

fn memory(m: &Measured) -> Result<Vec<Row>> {
    let peaks = m.cases(&[("kind", "peak")], "error")?.into_iter();
    let cuts = m.cases(&[("kind", "cut")], "cut")?.into_iter();
    let peaks =
        peaks.map(|c| Row::new(format!("{}, worst error of a purpose", c.name), "", c.ours.abs()).at_most(0.02));
    let cuts =
        cuts.map(|c| Row::new(format!("{}, activations cut by full checkpointing", c.name), "x", c.ours).at_least(5.0));
    Ok(peaks.chain(cuts).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn verdicts(
        rows: fn(&Measured) -> Result<Vec<Row>>,
        ours: serde_json::Value,
        theirs: Option<serde_json::Value>,
    ) -> Vec<Option<bool>> {
        rows(&Measured { ours: vec![ours], theirs: theirs.into_iter().collect() })
            .unwrap()
            .iter()
            .map(Row::passed)
            .collect()
    }

    #[test]
    fn kernels_are_judged_by_share_and_ratio() {
        let case = |kind: &str, dtype: &str, tflops: f64| json!({"name": format!("{kind} {dtype}"), "kind": kind, "dtype": dtype, "tflops": tflops, "peak_share": tflops / 2.0});
        let cases = |products: f64| {
            json!({"cases": [
                case("product", "bf16", 1.0), case("product", "f32", products), case("attention", "bf16", 0.5), case("attention", "f32", 0.2)]})
        };
        let expected = [Some(true), Some(false), Some(true), None, None, None];
        assert_eq!(verdicts(kernels, cases(1.7), Some(cases(0.3))), expected);
        let impossible = kernels(&Measured { ours: vec![cases(2.2)], theirs: vec![] }).unwrap_err().to_string();
        assert!(impossible.contains("110.0 % of the measured peak"), "{impossible}");
    }

    #[test]
    fn steps_are_judged() {
        let run = |speed: f64, memory: f64, wait: f64| json!({"tokens_per_s": speed, "tflops": 0.5, "mfu": 0.4, "peak_rss_bytes": memory, "data_wait_s": wait, "step_s": 1.0, "first_step_s": 1.5, "first_step_system_s": 0.4});
        assert_eq!(
            verdicts(|m| train(m, 2.5), run(500.0, 3e9, 0.001), Some(run(200.0, 4e9, 0.0))),
            [Some(true), None, None, Some(true), Some(true)]
        );
        assert_eq!(
            verdicts(|m| train(m, 2.5), run(400.0, 5e9, 0.1), Some(run(200.0, 4e9, 0.0))),
            [Some(false), None, None, Some(false), Some(false)]
        );
        assert_eq!(verdicts(startup, run(1.0, 1.0, 0.0), None), [Some(true), None]);
    }

    #[test]
    fn layouts_and_bubbles_are_judged() {
        let case = |name: &str, speed: f64| json!({"name": name, "speed_ratio": speed, "tokens_per_s": 260.0});
        let ours = |tp: f64| json!({"cases": [case("parallel.ranks=1", 1.0), case(TP, tp), case(PP, 0.95)]});
        assert_eq!(verdicts(layouts, ours(0.8), None), [None, Some(false), Some(true)]);
        let theirs = json!({"tokens_per_s": 200.0});
        assert_eq!(verdicts(split, ours(0.9), Some(theirs)), [Some(true)]);
        let of = |schedule: &str, m: u32, error: f64| json!({"name": format!("{schedule} {m}"), "schedule": schedule, "error": error});
        let schedules = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dual_pipe_v"];
        let cases: Vec<_> = schedules
            .iter()
            .flat_map(|name| [of(name, 4, 0.02), of(name, 8, if *name == "1f1b" { -0.06 } else { 0.01 })])
            .collect();
        let judged = [Some(true), Some(false), Some(true), Some(true), Some(true), Some(true)];
        assert_eq!(verdicts(bubbles, json!({"cases": cases}), None), judged);
    }

    #[test]
    fn memory_has_a_row_for_each_case() {
        let ours = json!({"cases": [
            {"name": "gpt2 none", "kind": "peak", "error": -0.03}, {"name": "gpt2 full", "kind": "peak", "error": 0.01},
            {"name": "gpt2", "kind": "cut", "cut": 6.0}]});
        assert_eq!(verdicts(memory, ours, None), [Some(false), Some(true), Some(true)]);
    }
}
