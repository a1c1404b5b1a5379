//! Plans of a configuration for this machine, from its profile: they are shown, picked and run, and
//! the prediction is kept beside the measurement.

mod common;

use common::{Folder, Ran};
use serde_json::Value;
use trainyard_sim::MachineProfile;
use trainyard_sim::machine::{
    Disk, FORMAT, Gpu, Interference, KernelCurve, Machine, Overheads, Point, Processes, Speeds, Transfers,
};

/// A profile of this machine without a curve: every kernel is priced as a copy of its bytes.
fn profile() -> MachineProfile {
    MachineProfile {
        format: FORMAT,
        measured: "2026-11-22T00:00:00Z".into(),
        method: "by hand".into(),
        machine: Machine::here(),
        speeds: Speeds { f32_flops: 2e11, bf16_flops: 4e12, copy_bytes_per_s: 3e10 },
        overheads: Overheads { launch_s: 1e-6, instruction_s: 1e-6, handover_s: 1e-5, step_s: 1e-4 },
        interference: Interference { compute: 1.0, communication: 1.0, start_s: 0.0 },
        disk: Disk { write_bytes_per_s: 1e9, read_bytes_per_s: 2e9 },
        transfers: None,
        collectives: Vec::new(),
        kernels: Vec::new(),
    }
}

/// A folder with a tiny configuration that does not fix the number of threads.
fn folder() -> Folder {
    let folder = Folder::new();
    let free = common::TINY.replace("[compute]\nthreads = 1\n", "");
    folder.write("c.toml", free.replace("micro_batch_size = 4", "global_batch_size = 4"));
    profile().save(&folder.join("machine.toml")).unwrap();
    folder
}

fn run(folder: &Folder, arguments: &[&str]) -> Ran {
    let mut command = folder.command(arguments);
    Ran::new(command.env("TRAINYARD_PROFILE", folder.join("machine.toml")).output().expect("the program starts"))
}

fn json(folder: &Folder, file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(folder.join(file)).unwrap()).unwrap()
}

#[test]
fn what_is_shown_is_picked_and_run_and_its_prediction_kept() {
    let folder = folder();
    let shown = run(&folder, &["plan", "c.toml"]).ok();
    for part in ["1 rank x", "recompute", "runnable plans fit", "why  It computes for"] {
        assert!(shown.stdout.contains(part), "no {part:?} in:\n{}", shown.stdout);
    }
    let plans: Value = serde_json::from_str(&run(&folder, &["plan", "c.toml", "--json"]).ok().stdout).unwrap();
    let best = &plans["plans"][0];
    let all = plans["plans"].as_array().unwrap();
    assert!(all.windows(2).all(|pair| pair[0]["step_s"].as_f64() <= pair[1]["step_s"].as_f64()));
    assert!(all.iter().all(|plan| {
        let number = |key: &str| plan[key].as_u64().unwrap();
        let layout = plan["layout"].as_str().unwrap();
        let after = |name: &str| {
            let rest = layout.split_once(name).map_or("1", |(_, rest)| rest);
            rest.split([' ', ',']).next().unwrap().parse::<u64>().unwrap()
        };
        let ranks: u64 = layout.split(' ').next().unwrap().parse().unwrap();
        let data = ranks / after(", tp ") / after(", pp ");
        data * number("micro_batch_size") * number("accumulation_steps") == 4
    }));

    let trained = run(&folder, &["train", "c.toml", "--plan", "auto", "--verbose"]).ok();
    let layout = best["layout"].as_str().unwrap();
    let (micro, steps) = (&best["micro_batch_size"], &best["accumulation_steps"]);
    assert!(
        trained.stdout.contains(&format!("plan         {layout}, micro-batch {micro} x {steps}")),
        "{}",
        trained.stdout
    );
    assert!(trained.stdout.contains("time by kind       measured   predicted"), "{}", trained.stdout);
    assert!(trained.stdout.contains("  forward ") && trained.stdout.contains("  a step "), "{}", trained.stdout);
    let config = std::fs::read_to_string(folder.join("runs/tiny/config.toml")).unwrap();
    let config: toml::Table = toml::from_str(&config).unwrap();
    assert_eq!(config["training"]["micro_batch_size"].as_integer(), micro.as_i64());

    // The prediction lies beside the measurement.
    let plan = json(&folder, "runs/tiny/plan.json");
    let predicted = plan["predicted"]["time"]["step_s"].as_f64().unwrap();
    assert!(
        (predicted / best["step_s"].as_f64().unwrap() - 1.0).abs() < 0.2,
        "{predicted}: the vocabularies differ a little"
    );
    assert!(plan["predicted"]["time"]["instructions"]["forward"].as_f64().unwrap() > 0.0);
    assert!(plan["measured"]["step_s"].as_f64().unwrap() > 0.0 && plan["measured"]["steps"] == 12);
    assert!(plan["measured"]["instructions"]["backward"].as_f64().unwrap() > 0.0);
    assert_eq!(plan["measured"]["mem_peak_bytes"], plan["predicted"]["mem_peak_bytes"]);
    let metrics = std::fs::read_to_string(folder.join("runs/tiny/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    assert_eq!(last["predicted_step_s"].as_f64(), Some(predicted));
    assert_eq!(last["predicted_mem_peak_bytes"], last["mem_peak_bytes"]);
}

#[test]
fn stages_and_split_products_are_priced_and_run_on_this_machine() {
    let folder = folder();
    for (fixed, set, said) in [
        ("tp=2", "parallel.tensor_parallel_degree=2", ", tp 2"),
        ("pp=2", "parallel.pipeline_parallel_degree=2", ", pp 2 by "),
        ("cp=2", "parallel.context_parallel_degree=2", ", cp 2"),
    ] {
        let shown = run(&folder, &["plan", "c.toml", "--fix", fixed, "--show", "1"]).ok().stdout;
        assert!(shown.contains(said) && shown.contains(&format!("  --set {set}\n")), "{shown}");
        let trained = run(&folder, &["train", "c.toml", "--plan", "auto", "--trial-seconds", "0", "--set", set]).ok();
        assert!(trained.stdout.contains(said), "{}", trained.stdout);
        // The stages' memory, too, is predicted to the byte.
        let runs = std::fs::read_dir(folder.join("runs")).unwrap().map(|run| run.unwrap().path());
        let plan = runs.filter(|run| run.join("plan.json").exists()).max().unwrap().join("plan.json");
        let plan: Value = serde_json::from_str(&std::fs::read_to_string(plan).unwrap()).unwrap();
        assert_eq!(plan["measured"]["mem_peak_bytes"], plan["predicted"]["mem_peak_bytes"], "{fixed}");
        assert!(plan["predicted"]["time"]["step_s"].as_f64().unwrap() > 0.0, "{fixed}");
        std::fs::remove_dir_all(folder.join("runs")).unwrap();
    }
    let mixture = ["plan", "c.toml", "--fix", "ep=2", "--set", "model.family=mixtral", "--set", "experts.count=4"];
    let shown = run(&folder, &[&mixture[..], &["--show", "1"]].concat()).ok().stdout;
    assert!(shown.contains(", ep 2") && shown.contains("  --set parallel.expert_parallel_degree=2\n"), "{shown}");
    let refused = run(&folder, &["plan", "c.toml", "--fix", "ep=2"]);
    assert!(refused.stderr.contains("has no experts that 2 ranks could divide"), "{}", refused.stderr);
}

/// The winner depends on the machine. In any case the contenders are tried, the winner is run, and
/// both are reported.
#[test]
fn ways_that_are_predicted_to_be_close_are_tried_in_turn_and_the_winner_is_run() {
    let folder = folder();
    let ask = ["plan", "c.toml", "--json", "--trial-seconds", "2"];
    let ran = run(&folder, &ask).ok();
    assert!(
        ran.stderr.contains("trying ") && ran.stderr.contains(" plans for a few steps each, for up to 2 s"),
        "{}",
        ran.stderr
    );
    let answer: Value = serde_json::from_str(&ran.stdout).unwrap();
    let plans = answer["plans"].as_array().unwrap();
    let tried = plans.iter().take_while(|plan| plan["tried_s"].is_number()).count();
    assert!(
        (2..=10).contains(&tried) && plans[tried..].iter().all(|plan| plan["tried_s"].is_null()),
        "{tried} of {}",
        plans.len()
    );
    let predicted = |plan: &Value| plan["step_s"].as_f64().unwrap();
    let best = plans.iter().map(predicted).fold(f64::INFINITY, f64::min);
    assert!(plans[..tried].iter().all(|plan| predicted(plan) <= 1.3 * best));
    assert!(plans[tried..].windows(2).all(|pair| predicted(&pair[0]) <= predicted(&pair[1])));
    let shown = run(&folder, &["plan", "c.toml", "--trial-seconds", "2"]).ok().stdout;
    assert!(shown.contains("  tried ") && shown.contains("Tried in turn, it took "), "{shown}");

    let trained = run(&folder, &["train", "c.toml", "--plan", "auto", "--trial-seconds", "2"]).ok().stdout;
    assert!(
        trained.contains("the fastest by predictions and trials of ") && trained.contains("Tried in turn, it took "),
        "{trained}"
    );
    // 3 % of twelve steps is too little time for a trial.
    let short = run(&folder, &["train", "c.toml", "--plan", "auto", "--set", "run.name='short'"]).ok();
    assert!(short.stderr.contains("nothing is tried: 2 rounds of two plans take about"), "{}", short.stderr);

    let failed = |arguments: &[&str], part: &str| {
        let ran = failed(run(&folder, arguments));
        assert!(ran.stderr.contains(part), "no {part:?} in {}", ran.stderr);
    };
    failed(&["plan", "c.toml", "--trial-seconds=-1"], "it is a number of seconds, 0 or more");
    failed(&["plan", "c.toml", "--trial-seconds", "1", "--what-if", "gpus=2"], "neither reads --profile nor tries");
    failed(&["train", "c.toml", "--trial-seconds", "1"], "--plan");
}

#[test]
fn the_limit_of_memory_decides_and_what_cannot_be_is_said() {
    let folder = folder();
    let plans: Value = serde_json::from_str(&run(&folder, &["plan", "c.toml", "--json"]).ok().stdout).unwrap();
    let all = plans["plans"].as_array().unwrap();
    let least = all.iter().map(|plan| plan["memory_bytes"].as_u64().unwrap()).min().unwrap();
    let most = all.iter().map(|plan| plan["memory_bytes"].as_u64().unwrap()).max().unwrap();
    assert!(least < most);
    let limit = format!("{}B", (least + most) / 2);
    let fewer: Value =
        serde_json::from_str(&run(&folder, &["plan", "c.toml", "--json", "--memory-limit", &limit]).ok().stdout)
            .unwrap();
    assert!(
        fewer["plans"]
            .as_array()
            .unwrap()
            .iter()
            .all(|plan| plan["memory_bytes"].as_u64().unwrap() <= (least + most) / 2)
    );
    assert!(!fewer["too_large"].as_array().unwrap().is_empty());
    // A model whose gradients alone exceed the limit, even with all state offloaded to disk.
    let wide = std::fs::read_to_string(folder.join("c.toml")).unwrap().replace("dim = 32", "dim = 256");
    folder.write("wide.toml", &wide);
    for arguments in [
        &["plan", "wide.toml", "--memory-limit", "1MiB"][..],
        &["train", "wide.toml", "--plan", "auto", "--set", "memory.limit='1MiB'"],
    ] {
        let ran = run(&folder, arguments);
        assert_eq!(ran.code, Some(1), "{}", ran.stdout);
        assert!(
            ran.stderr.contains("nothing fits") && ran.stderr.contains("the nearest that would: memory.limit"),
            "{}",
            ran.stderr
        );
    }
    // Settings given by hand are kept.
    let held =
        ["train", "c.toml", "--plan", "auto", "--set", "parallel.ranks=1", "--set", "training.micro_batch_size=2"];
    let ran = run(&folder, &held).ok();
    assert!(ran.stdout.contains("plan         1 rank x") && ran.stdout.contains("micro-batch 2 x 2"), "{}", ran.stdout);
    let impossible = ["train", "c.toml", "--plan", "auto", "--set", "training.micro_batch_size=3"];
    let ran = run(&folder, &impossible);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("global_batch_size"), "{}", ran.stderr);
}

/// Each limit is one byte below the smallest way that is left. First ways that recompute take over,
/// and at last ways that keep state on disk. Such a run keeps its limit.
#[test]
fn a_limit_that_nothing_else_keeps_is_kept_from_disk() {
    let folder = folder();
    // Even half of it, as a pipeline stage holds, is more than the least limit that can be asked
    // for.
    let model = ["--set", "model.layers=8"];
    let plans = |limit: Option<u64>| -> Vec<Value> {
        let limit = limit.map(|limit| format!("--memory-limit={limit}B"));
        let mut arguments = vec!["plan", "c.toml", "--json"];
        arguments.extend(model);
        arguments.extend(limit.as_deref());
        let all: Value = serde_json::from_str(&run(&folder, &arguments).ok().stdout).unwrap();
        all["plans"].as_array().unwrap().clone()
    };
    let on_disk = |plan: &Value| plan["recomputation"].as_str().unwrap().contains("on disk");
    let (mut limit, mut ways) = (0, plans(None));
    while !ways.iter().any(on_disk) {
        limit = ways.iter().map(|plan| plan["memory_bytes"].as_u64().unwrap()).min().unwrap() - 1;
        ways = plans(Some(limit));
    }
    assert!(ways.iter().all(on_disk), "a disk is for what fits in no other way");
    assert!(limit > 0 && ways.iter().all(|plan| plan["memory_bytes"].as_u64().unwrap() <= limit));
    let limit = format!("memory.limit='{limit}B'");
    let train = [&["train", "c.toml", "--plan", "auto", "--set", &limit], &model[..]].concat();
    let ran = run(&folder, &train).ok();
    assert!(ran.stdout.contains("on disk"), "{}", ran.stdout);
    let plan = json(&folder, "runs/tiny/plan.json");
    assert_eq!(plan["measured"]["mem_peak_bytes"], plan["predicted"]["mem_peak_bytes"]);
    assert!(plan["predicted"]["time"]["instructions"]["fetch"].as_f64().unwrap() > 0.0);
}

#[test]
fn without_a_profile_memory_is_predicted_and_time_is_not() {
    let folder = folder();
    let run = |arguments: &[&str]| {
        let mut command = folder.command(arguments);
        command.env_remove("TRAINYARD_PROFILE").env("XDG_CACHE_HOME", folder.join("empty"));
        Ran::new(command.output().expect("the program starts"))
    };
    let trained = run(&["train", "c.toml"]).ok();
    assert!(
        trained.stdout.contains("ms a step (median); not predicted: no profile of this machine"),
        "{}",
        trained.stdout
    );
    let plan = json(&folder, "runs/tiny/plan.json");
    assert!(plan["predicted"]["time"]["not_predicted"].as_str().unwrap().contains("trainyard calibrate"));
    assert!(plan["predicted"]["mem_peak"]["activations"].as_u64().unwrap() > 0);
    let metrics = std::fs::read_to_string(folder.join("runs/tiny/metrics.jsonl")).unwrap();
    assert!(!metrics.contains("predicted_step_s") && metrics.contains("predicted_mem_peak_bytes"));
    let auto = run(&["train", "c.toml", "--plan", "auto", "--set", "run.name='b'"]);
    assert_eq!(auto.code, Some(1));
    assert!(auto.stderr.contains("run `trainyard calibrate`"), "{}", auto.stderr);
}

fn failed(ran: Ran) -> Ran {
    assert_ne!(ran.code, Some(0), "{}", ran.stdout);
    ran
}

#[test]
fn a_gpu_is_planned_for_from_its_own_profile_where_there_is_none() {
    let folder = folder();
    let gpu = Gpu {
        name: "NVIDIA H200".into(),
        architecture: "sm_90a".into(),
        multiprocessors: 132,
        memory_bytes: 141 << 30,
        count: 2,
    };
    let transfers =
        Some(Transfers { to_device_bytes_per_s: 5e10, to_host_bytes_per_s: 4e10, host_update_bytes_per_s: 2e11 });
    let elsewhere = Machine { cpu: "another".into(), gpu: Some(gpu.clone()), ..Machine::here() };
    MachineProfile { machine: elsewhere.clone(), transfers, ..profile() }.save(&folder.join("gpu.toml")).unwrap();
    let ask = |arguments: &[&str]| {
        let mut command = folder.command(&[&["plan", "c.toml", "--set", "compute.device=cuda"], arguments].concat());
        let command = command.env("TRAINYARD_PROFILE", folder.join("machine.toml"));
        Ran::new(command.env("TRAINYARD_GPU_PROFILE", folder.join("none.toml")).output().expect("the program starts"))
    };
    let shown = ask(&["--profile", "gpu.toml", "--top", "100"]).ok();
    for part in ["2 x NVIDIA H200, sm_90a", "1 GPU ", "2 GPUs", "runnable plans fit"] {
        assert!(shown.stdout.contains(part), "no {part:?} in:\n{}", shown.stdout);
    }
    let small = Gpu { memory_bytes: 1 << 20, ..gpu.clone() };
    let machine = Machine { gpu: Some(small), ..elsewhere.clone() };
    MachineProfile { machine, transfers, ..profile() }.save(&folder.join("small.toml")).unwrap();
    let full = failed(ask(&["--profile", "small.toml"]));
    assert!(full.stderr.contains("a GPU here has 1.0 MiB; the nearest that would: more GPUs"), "{}", full.stderr);
    // A profile that was measured on two hosts.
    let processes = Some(Processes { backend: "nccl".into(), count: 4, hosts: 2 });
    let machine = Machine { processes, ..elsewhere.clone() };
    MachineProfile { machine, transfers, ..profile() }.save(&folder.join("hosts.toml")).unwrap();
    let shown = ask(&["--profile", "hosts.toml"]).ok();
    for part in ["4 x NVIDIA H200, sm_90a, on 2 hosts", "  4 GPUs", "4 GPUs, 2 replicas, shard 2, ZeRO-1"] {
        assert!(shown.stdout.contains(part), "no {part:?} in:\n{}", shown.stdout);
    }
    assert!(!shown.stdout.contains(" 2 GPUs") && !shown.stdout.contains(" 1 GPU"), "{}", shown.stdout);
    let missing = failed(ask(&[]));
    assert!(missing.stderr.contains("none.toml") && missing.stderr.contains("--profile"), "{}", missing.stderr);
    let wrong = failed(ask(&["--profile", "machine.toml"]));
    assert!(wrong.stderr.contains("is of a processor"), "{}", wrong.stderr);
}

#[test]
fn a_machine_without_a_gpu_has_none_to_calibrate() {
    if trainyard_tensor::cuda::Cuda::check(0).is_ok() {
        return trainyard_testing::skip("this machine has a GPU");
    }
    let ran = failed(run(&folder(), &["calibrate", "--device", "cuda"]));
    assert!(ran.stderr.contains("there is no GPU to measure: no NVIDIA driver"), "{}", ran.stderr);
    let ran = failed(run(&folder(), &["bench", "gpu"]));
    assert!(ran.stderr.contains("there is no GPU to measure: no NVIDIA driver"), "{}", ran.stderr);
    let ran = failed(run(&folder(), &["calibrate", "--device", "gpu"]));
    assert!(ran.stderr.contains("cpu, cuda or cuda:N"), "{}", ran.stderr);
}

/// `--show`, `--fix` and `--what-if` once silently priced a calibrated machine by other numbers.
#[test]
fn what_is_asked_of_a_calibrated_machine_is_answered_from_its_profile_or_says_that_it_is_not() {
    let folder = folder();
    let shown = run(&folder, &["plan", "c.toml", "--show", "2", "--timeline", "step.json"]).ok();
    for part in ["runnable plans fit", "\nplan 2: ", "--set training.global_batch_size=4", "backward", "activations"] {
        assert!(shown.stdout.contains(part), "no {part:?} in:\n{}", shown.stdout);
    }
    let names = json(&folder, "step.json")["traceEvents"].as_array().unwrap().clone();
    assert!(names.iter().any(|event| event["cat"] == "forward" && event["dur"].as_f64() > Some(0.0)));
    let refused = run(&folder, &["plan", "c.toml", "--show", "99"]);
    assert!(failed(refused).stderr.contains("there are plans 1 to"));

    let held = ["--fix", "micro_batch=2,checkpointing=full,offload=false", "--precision", "bf16", "--json"];
    let plans: Value =
        serde_json::from_str(&run(&folder, &[&["plan", "c.toml"][..], &held].concat()).ok().stdout).unwrap();
    let plans = plans["plans"].as_array().unwrap();
    assert!(!plans.is_empty());
    assert!(plans.iter().all(|plan| plan["micro_batch_size"] == 2 && plan["recomputation"] == "full"));
    for (fixed, says) in [
        (["--fix", "offload=true"], "memory.offload.optimizer=disk"),
        (["--precision", "bf16,f32"], "one format on this machine"),
    ] {
        let ran = failed(run(&folder, &[&["plan", "c.toml"][..], &fixed].concat()));
        assert!(ran.stderr.contains(says), "{fixed:?}: {}", ran.stderr);
    }

    let asked = run(&folder, &["plan", "c.toml", "--what-if", "compute=2x"]).ok();
    assert!(asked.stdout.contains("what if compute=2x"), "{}", asked.stdout);
    assert!(asked.stderr.contains("--what-if is for the planner of clusters"), "{}", asked.stderr);
    let gpu = failed(run(&folder, &["plan", "c.toml", "--price", "2", "--set", "device=cuda"]));
    assert!(gpu.stderr.contains("--price is for the planner of clusters: name one"), "{}", gpu.stderr);
    let tried = failed(run(&folder, &["plan", "c.toml", "--price", "2", "--trial-seconds", "2"]));
    assert!(tried.stderr.contains("neither reads --profile nor tries"), "{}", tried.stderr);
}

/// A row of `advise`.
fn advised(folder: &Folder, name: &str, more: &[&str]) -> Value {
    let ran = run(folder, &[&["advise", "c.toml", "--json"], more].concat()).ok();
    let mut answer: Value = serde_json::from_str(&ran.stdout).unwrap();
    let levers = answer["levers"].as_array_mut().unwrap();
    levers.iter_mut().find(|lever| lever["lever"] == name).unwrap().take()
}

/// Regression: levers with keys of their own were said not to run.
#[test]
fn levers_with_settings_are_priced_as_the_run_that_they_make() {
    let folder = folder();
    for (name, set, more) in [
        ("gradients, low rank", "compression.gradients=power_sgd", &["--set", "parallel.ranks=2"][..]),
        ("gradients in int8", "compression.gradients=int8", &["--set", "parallel.ranks=2"]),
        ("quantisation-aware training", "quantization.aware=4", &["--set", "model.dim=128"]),
        ("8-bit optimizer state", "optimizer.state_bits=8", &[]),
    ] {
        let priced = advised(&folder, name, more);
        assert_eq!(priced["runnable"], true, "{priced}");
        let sets = priced["sets"].as_array().unwrap();
        assert!(sets.contains(&set.into()), "{priced}");
        let run_name = &format!("run.name='{}'", set.rsplit('=').next().unwrap());
        let run_sets = sets.iter().flat_map(|set| ["--set", set.as_str().unwrap()]);
        let train = ["train", "c.toml", "--set", "training.steps=1", "--set", run_name];
        let arguments: Vec<&str> = train.into_iter().chain(more.iter().copied()).chain(run_sets).collect();
        assert!(run(&folder, &arguments).ok().stdout.contains("done: 1 step"), "{arguments:?}");
    }
    let pruned = advised(&folder, "structured pruning", &[]);
    assert!(pruned["runnable"] == false && pruned["change"].as_str().unwrap().contains("trainyard prune"), "{pruned}");
}

/// Plans of a model of images know its classes and what preparing the images costs; the run that is
/// picked predicts the same, and its summary has the price.
/// Products of 8-bit integers change the result, so they are named beside the plans, and are no
/// plan of their own.
#[test]
fn what_8_bit_integers_would_gain_is_said_where_they_were_measured() {
    let folder = folder();
    let plan = |more: &[&str]| run(&folder, &[&["plan", "c.toml", "--set", "model.dim=256"], more].concat()).ok();
    assert!(!plan(&[]).stdout.contains("precision.int8"), "nothing was measured");
    let mut profile = profile();
    for kernel in ["linear_int8", "linear_int8_input_gradient", "int8_encode", "int8_encode transposed"] {
        for dtype in ["f32", "bf16"] {
            let dims = if kernel.starts_with("linear") { vec![64.0; 3] } else { vec![64.0; 2] };
            let speeds = profile.speeds;
            let point = Point {
                dims,
                flops: 5e5,
                bytes: 1e4,
                seconds: 1e-8,
                product_flops: speeds.flops(dtype),
                copy_bytes_per_s: speeds.copy_bytes_per_s,
            };
            let (kernel, dtype) = (kernel.to_owned(), dtype.to_owned());
            profile.kernels.push(KernelCurve { kernel, dtype, ranks: 1, threads: 1, points: vec![point] });
        }
    }
    let lever = |more: &[&str]| advised(&folder, "8-bit integers", &[&["--set", "model.dim=256"], more].concat());
    let unknown = lever(&[]);
    assert!(unknown["not_priced"].as_str().unwrap().contains("has not measured them"), "{unknown}");
    profile.save(&folder.join("machine.toml")).unwrap();
    let priced = lever(&[]);
    assert_eq!(priced["runnable"], true, "{priced}");
    assert!(priced["sets"].as_array().unwrap().contains(&"precision.int8=switchback".into()), "{priced}");
    let chosen = lever(&["--set", "precision.int8=switchback"]);
    assert!(chosen["not_priced"].as_str().unwrap().contains("in use"), "{chosen}");
    let shown = plan(&[]).stdout;
    assert!(
        shown.contains("more precision.int8=switchback: ") && shown.contains(" times as fast; it rounds"),
        "{shown}"
    );
    let plans: Value = serde_json::from_str(&plan(&["--json"]).stdout).unwrap();
    let [lever] = &plans["levers"].as_array().unwrap()[..] else { panic!("{plans}") };
    assert!(lever["step_s"].as_f64() < plans["plans"][0]["step_s"].as_f64() && lever["step_s"].as_f64() > Some(0.0));
    // Chosen, or ruled out by hand, it is no news.
    for set in ["precision.int8=switchback", "precision.int8=off", "parallel.tensor_parallel_degree=2"] {
        assert!(!plan(&["--set", set]).stdout.contains("more precision.int8"), "{set}");
    }
}

#[test]
fn plans_of_images_count_their_preparation() {
    let folder = folder();
    for class in ["cat", "dog"] {
        let of_class = folder.join("photos").join(class);
        std::fs::create_dir_all(&of_class).unwrap();
        for number in 0..6u8 {
            let file = std::fs::File::create(of_class.join(format!("{number}.png"))).unwrap();
            let mut encoder = png::Encoder::new(file, 200, 200);
            encoder.set_color(png::ColorType::Rgb);
            let pixels: Vec<u8> = (0..120_000u32).map(|i| ((i * u32::from(number + 1)) >> 3) as u8).collect();
            encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
        }
    }
    let vit = "[run]\nname = 'vit'\n[model]\nfamily = 'vit'\ndim = 16\nlayers = 1\nheads = 2\n[data]\nformat = 'images'\n\
               train = ['photos']\nvalidation_fraction = 0\n[images]\nsize = 32\npatch_size = 16\n[training]\nsteps = 4\n\
               micro_batch_size = 4\nglobal_batch_size = 4\n";
    folder.write("vit.toml", vit);
    let shown = run(&folder, &["plan", "vit.toml", "--show", "1"]).ok();
    // A copy of the model's few bytes is nothing beside four PNG files of 120,000 bytes.
    let share = |line: &str| line.split_whitespace().rev().nth(1).and_then(|share| share.parse::<f64>().ok());
    let load = shown.stdout.lines().find(|line| line.trim_start().starts_with("load ")).and_then(share);
    assert!(load.is_some_and(|share| share > 50.0), "{}", shown.stdout);
    let trained = run(&folder, &["train", "vit.toml", "--plan", "auto"]).ok();
    assert!(trained.stdout.contains(" ms for an image, "), "{}", trained.stdout);
    let preparing = &json(&folder, "runs/vit/plan.json")["predicted"]["time"]["preprocessing"];
    assert!(preparing["image_s"].as_f64().unwrap() > 0.0, "{preparing}");
    // Without the images nothing says how many classes there are.
    for class in ["cat", "dog"] {
        std::fs::remove_dir_all(folder.join("photos").join(class)).unwrap();
    }
    let gone = failed(run(&folder, &["plan", "vit.toml"]));
    assert!(gone.stderr.contains("the classes are those of the images of data.train"), "{}", gone.stderr);
}
