//! `trainyard plan` from the command line.

mod common;

use common::{Folder, TINY};

const SMALL: [&str; 9] =
    ["plan", "--model", "gpt2-124m", "--cluster", "1x4xA100-80GB", "--global-batch", "32", "--sequence-length", "1024"];

#[test]
fn a_small_plan_says_what_it_is() {
    let one =
        ["--fix", "tp=1,pp=1,cp=1,dp_shard=4,zero=1,micro_batch=8,checkpointing=none,offload=false", "--show", "1"];
    let ran = Folder::new().run(&[&SMALL[..], &one].concat()).ok();
    assert_eq!(ran.stderr, "");
    for part in [
        "124M parameters; 32 sequences of 1,024 tokens a step; 1 x 4 A100-80GB",
        "layout",
        "dp 4, ZeRO-1",
        "rests on ",
        "why  It is bound by",
        "plan 1: dp 4, ZeRO-1",
        "activations",
        "model TFLOP/s per device",
        "priced",
    ] {
        assert!(ran.stdout.contains(part) != (part == "priced"), "{part}: {}", ran.stdout);
    }
}

#[test]
fn files_and_json_hold_the_plan() {
    let folder = Folder::new();
    let files =
        ["--timeline", "step.json", "--html", "plan.html", "--json", "--what-if", "interconnect=2x", "--top", "3"];
    let ran = folder.run(&[&SMALL[..], &files].concat()).ok();
    let answer: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let best = &answer["plans"][0];
    assert!(best["step_s"].as_f64().unwrap() > 0.0 && best["memory_by_purpose"]["activations"].as_u64().unwrap() > 0);
    assert!(answer["search"]["considered"].as_u64().unwrap() > 500);
    assert!(answer["what_if"][0]["best"]["step_s"].as_f64() <= best["step_s"].as_f64());
    let trace: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("step.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().iter().any(|event| event["ph"] == "C"));
    let page = std::fs::read_to_string(folder.join("plan.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.matches("<svg").count() >= 2);
    assert!(!page.contains("http://") && !page.contains("https://") && !page.contains("<script"), "self-contained");
}

#[test]
fn a_configuration_is_planned_for_this_machine() {
    let folder = Folder::new();
    folder.write("c.toml", TINY);
    let ran = folder.run(&["plan", "c.toml"]).ok();
    assert!(ran.stdout.contains("dp 1") && ran.stdout.contains("why"), "{}", ran.stdout);
    assert!(!ran.stdout.contains("not runnable"), "{}", ran.stdout);
}

/// Its settings train on processors, as there is no GPU here.
#[test]
fn long_sequences_over_gpus_are_planned_and_can_be_run() {
    let folder = Folder::new();
    folder.write("c.toml", TINY);
    let plan = ["plan", "c.toml", "--cluster", "1x4xA100-80GB", "--global-batch", "4"];
    let long = ["--sequence-length", "2048", "--set", "model.max_sequence_length=2048"];
    let plan = [&plan[..], &long].concat();
    let ran = folder.run(&[&plan[..], &["--fix", "cp=2"]].concat()).ok();
    assert!(ran.stdout.contains("cp 2, ") && !ran.stdout.contains("not runnable"), "{}", ran.stdout);
    let answer = folder.run(&[&plan[..], &["--fix", "cp=2", "--json"]].concat()).ok().stdout;
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    let sets = answer["plans"][0]["sets"].as_array().unwrap();
    assert!(sets.iter().any(|set| set == "parallel.context_parallel_degree=2"), "{sets:?}");
    let here = sets.iter().filter_map(|set| set.as_str()).filter(|set| *set != "compute.device=cuda");
    let train = ["train", "c.toml", "--set", "model.max_sequence_length=2048", "--set", "training.steps=1"];
    let ran = folder.run(&train.into_iter().chain(here.flat_map(|set| ["--set", set])).collect::<Vec<_>>()).ok();
    assert!(ran.stdout.contains("done: 1 step"), "{}", ran.stdout);
}

#[test]
fn offload_to_the_host_of_gpus_is_planned_and_can_be_run() {
    let folder = Folder::new();
    let ran = folder.run(&[&SMALL[..], &["--fix", "offload=true"]].concat()).ok();
    assert!(ran.stdout.contains("on host") && !ran.stdout.contains("not runnable"), "{}", ran.stdout);
}

#[test]
fn bad_requests_are_refused_with_what_would_do() {
    let folder = Folder::new();
    let cases: [(&[&str], &str); 19] = [
        (&["plan"], "--model"),
        (&["plan", "--model", "llama-70", "--cluster", "1x1xH100"], "did you mean `llama-7"),
        (&["plan", "--model", "llama-71b", "--cluster", "1x1xH100"], "did you mean `llama-70b`"),
        (&["plan", "."], "for a model's folder say --model ."),
        (&["plan", "--model", "gpt2-124m", "--cluster", "1x1xH100"], "--global-batch is needed"),
        (&[&SMALL[..], &["--what-if", "sequence_length=2048"]].concat(), "the model has learned 1024 positions"),
        (&[&SMALL[..], &["--fix", "tp=0"]].concat(), "tp is a number from 1"),
        (&[&SMALL[..], &["--fix", "tpp=2"]].concat(), "one of tp, pp"),
        (&[&SMALL[..], &["--what-if", "gpus=many"]].concat(), "a number of devices"),
        (&[&SMALL[..], &["--memory-limit", "100MiB"]].concat(), "the nearest that would"),
        (&[&SMALL[..], &["--show", "99"]].concat(), "the table has plans 1 to"),
        (&[&SMALL[..], &["--precision", "int8"]].concat(), "one of fp32"),
        (&[&SMALL[..], &["--budget-seconds", "0"]].concat(), "more than 0"),
        (&[&SMALL[..], &["--fix", "tp=5"]].concat(), "leave tp open"),
        (&[&SMALL[..], &["--fix", "tp=2,pp=4"]].concat(), "leave tp open, or leave pp open"),
        (&[&SMALL[..], &["--fix", "micro_batch=64"]].concat(), "leave micro_batch open, or take a global batch of 64"),
        (&[&SMALL[..], &["--fix", "zero=3,dp_shard=1"]].concat(), "leave dp_shard open, or leave zero open"),
        (&[&SMALL[..], &["--max-gpus", "0"]].concat(), "nothing to plan with"),
        (&[&SMALL[..], &["--max-cost-per-hour", "0.1"]].concat(), "do not pay for one A100-80GB"),
    ];
    let clusters = [
        ("8xH100", "write NODESxDEVICESxDEVICE"),
        ("0x8xH100", "write NODESxDEVICESxDEVICE"),
        ("1x8xH1000", "known: V100-16GB"),
        ("1x8xH100:token-ring", "known: hdr-8"),
        ("65536x65536xH100", "more than 1048576 devices"),
        ("1x1xL4", "x1xL4"),
    ];
    let asked = |cluster: &str| {
        let model = if cluster.contains("L4") { "llama2-70b" } else { "gpt2-124m" };
        let batch = ["--global-batch", "8", "--sequence-length", "2048"];
        [&["plan", "--model", model, "--cluster", cluster], &batch[..]]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect()
    };
    let clusters = clusters.map(|(cluster, says)| -> (Vec<String>, &str) { (asked(cluster), says) });
    let clusters: Vec<(Vec<&str>, &str)> =
        clusters.iter().map(|(arguments, says)| (arguments.iter().map(String::as_str).collect(), *says)).collect();
    let clusters = clusters.iter().map(|(arguments, says)| (&arguments[..], *says));
    for (arguments, says) in cases.into_iter().chain(clusters) {
        let ran = folder.run(arguments);
        assert_eq!(ran.code, Some(1), "{arguments:?}: {}", ran.stdout);
        assert!(ran.stderr.contains(says), "{arguments:?}: {} does not say {says}", ran.stderr);
    }
}

#[test]
fn a_runnable_plan_of_a_cluster_says_how_to_run_it() {
    let folder = Folder::new();
    folder.write("c.toml", TINY);
    let asked = ["plan", "c.toml", "--set", "training.global_batch_size=8", "--cluster", "1x2xA100-80GB"];
    let fixed = ["--fix", "zero=3,dp_shard=2,micro_batch=2,checkpointing=full", "--precision", "bf16"];
    let shown = folder.run(&[&asked[..], &fixed, &["--show", "1"]].concat()).ok();
    assert!(shown.stdout.contains("to run it on 2 ranks:\n  --set parallel.ranks=2\n"), "{}", shown.stdout);
    let json = folder.run(&[&asked[..], &fixed, &["--json"]].concat()).ok();
    let plans: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    let sets = plans["plans"][0]["sets"].as_array().unwrap();
    let sets: Vec<&str> = sets.iter().map(|set| set.as_str().unwrap()).collect();
    assert!(sets.contains(&"parallel.zero_stage=3") && sets.contains(&"compute.device=cuda"), "{sets:?}");
    // The same configuration on processors, as there is no GPU here.
    let here = sets.iter().filter(|set| **set != "compute.device=cuda").flat_map(|set| ["--set", *set]);
    let ran = folder
        .run(&["train", "c.toml"].into_iter().chain(here).chain(["--set", "training.steps=1"]).collect::<Vec<_>>());
    ran.ok();
}

/// The settings of the first plan with these choices on four GPUs.
fn sets_of_a_plan(folder: &Folder, fixed: &str) -> Vec<String> {
    let asked = ["plan", "c.toml", "--cluster", "1x4xA100-80GB", "--json", "--fix", fixed];
    let layers = ["--set", "training.global_batch_size=8", "--set", "model.layers=6"];
    let answer = folder.run(&[&asked[..], &layers].concat()).ok();
    let answer: serde_json::Value = serde_json::from_str(&answer.stdout).unwrap();
    let plan = &answer["plans"][0];
    assert_eq!(plan["runnable"], true, "{plan}");
    plan["sets"].as_array().unwrap().iter().map(|set| set.as_str().unwrap().to_owned()).collect()
}

#[test]
fn plans_with_stages_and_split_products_run_with_the_settings_that_they_print() {
    let folder = Folder::new();
    folder.write("c.toml", TINY);
    for (fixed, keys) in [
        ("tp=2,pp=2,accumulation=4", ["parallel.tensor_parallel_degree=2", "parallel.pipeline_parallel_degree=2"]),
        ("tp=2,dp_shard=2,zero=3,accumulation=2", ["parallel.sequence_parallel=true", "parallel.zero_stage=3"]),
        ("pp=2,dp_replicate=2,accumulation=4", ["parallel.pipeline_cuts=[", "parallel.pipeline_schedule="]),
    ] {
        let sets = sets_of_a_plan(&folder, fixed);
        for key in keys {
            assert!(sets.iter().any(|set| set.starts_with(key)), "{fixed}: no {key} in {sets:?}");
        }
        let name = format!("run.name='{}'", fixed.replace([',', '='], "-"));
        // On processors, as there is no GPU here.
        let here = sets.iter().filter(|set| *set != "compute.device=cuda").flat_map(|set| ["--set", set]);
        let more = ["--set", "training.steps=1", "--set", "model.layers=6", "--set", &name];
        let arguments: Vec<&str> = ["train", "c.toml"].into_iter().chain(here).chain(more).collect();
        let ran = folder.run(&arguments).ok();
        assert!(ran.stdout.contains("done: 1 step"), "{fixed}: {}", ran.stdout);
    }
}

#[test]
fn a_runnable_plan_of_a_mixture_divides_its_experts_among_replicas() {
    let folder = Folder::new();
    folder.write("c.toml", TINY);
    let mixture = ["--set", "model.family=mixtral", "--set", "experts.count=4"];
    let asked = ["plan", "c.toml", "--cluster", "1x4xA100-80GB", "--json", "--set", "training.global_batch_size=8"];
    let answer = |more: &[&str]| -> serde_json::Value {
        serde_json::from_str(&folder.run(&[&asked[..], &mixture, more].concat()).ok().stdout).unwrap()
    };
    let plan = &answer(&["--fix", "ep=2,tp=2,dp_replicate=2"])["plans"][0];
    assert_eq!(plan["runnable"], true, "{plan}");
    let sets: Vec<&str> = plan["sets"].as_array().unwrap().iter().map(|set| set.as_str().unwrap()).collect();
    assert!(sets.contains(&"parallel.expert_parallel_degree=2"), "{sets:?}");
    // On processors, as there is no GPU here.
    let here = sets.iter().filter(|set| **set != "compute.device=cuda").flat_map(|set| ["--set", *set]);
    let train = ["train", "c.toml", "--set", "training.steps=1"];
    let ran = folder.run(&train.into_iter().chain(mixture).chain(here).collect::<Vec<_>>()).ok();
    assert!(ran.stdout.contains("done: 1 step"), "{}", ran.stdout);
    assert_eq!(answer(&["--fix", "ep=2,tp=2,dp_replicate=2"])["plans"][0]["runnable"], true);
    let refused = folder.run(&[&asked[..], &mixture, &["--fix", "ep=2,dp_shard=4"]].concat());
    assert!(refused.stderr.contains("ep=2 does not divide the experts of 1 replica"), "{}", refused.stderr);
}

/// The planner of clusters once ignored the configuration's memory limit, and silently priced any
/// optimizer as AdamW.
#[test]
fn a_configurations_limit_counts_on_clusters_and_another_optimizer_is_said() {
    let folder = Folder::new();
    folder.write("c.toml", TINY);
    let asked = ["plan", "c.toml", "--cluster", "1x2xA100-80GB"];
    let limited = folder.run(&[&asked[..], &["--set", "memory.limit=1MiB"]].concat());
    assert!(limited.code == Some(1) && limited.stderr.contains("1.0 MiB may be used"), "{}", limited.stderr);
    let lion = folder.run(&[&asked[..], &["--set", "optimizer.name=lion"]].concat()).ok();
    assert!(lion.stderr.contains("not those of lion"), "{}", lion.stderr);
    assert_eq!(folder.run(&asked).ok().stderr, "");
}

/// The planner of clusters once planned every fine-tuning as training all of the model.
#[test]
fn fine_tuning_is_planned_with_the_state_that_its_run_holds() {
    let folder = Folder::new();
    folder.write("c.toml", TINY);
    let sized = ["--set", "model.layers=3", "--set", "model.dim=64", "--set", "training.global_batch_size=8"];
    let lora = "fine_tuning.adapter=lora";
    let cases: [(&str, &[&str]); 4] = [
        ("1x2xA100-80GB", &[lora]),
        ("1x2xA100-80GB", &["fine_tuning.freeze=['embedding.*','block.0.*']"]),
        ("1x2xCPU-AVX512-32", &[lora, "fine_tuning.base_dtype=nf4"]),
        ("1x2xCPU-AVX512-32", &[lora, "fine_tuning.base_dtype=int8"]),
    ];
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    for (cluster, tuned) in cases {
        let sets: Vec<&str> = sized.into_iter().chain(tuned.iter().flat_map(|set| ["--set", *set])).collect();
        for (zero, degrees) in [(0, "dp_shard=1,dp_replicate=2"), (3, "dp_shard=2,dp_replicate=1")] {
            let fix = format!("zero={zero},{degrees},micro_batch=4,checkpointing=none");
            let options = ["--cluster", cluster, "--precision", "bf16", "--fix", &fix, "--json"];
            let planned = folder.run(&[&["plan", "c.toml"], &sets[..], &options].concat()).ok();
            assert!(planned.stderr.contains("parameters are trained"), "{}", planned.stderr);
            let zero = format!("parallel.zero_stage={zero}");
            let ranks = ["--set", "parallel.ranks=2", "--set", &zero, "--set", "precision.compute=bf16", "--json"];
            let run = json(&folder.run(&[&["program", "c.toml"], &sets[..], &ranks].concat()).ok().stdout);
            let memory = &json(&planned.stdout)["plans"][0]["memory_by_purpose"];
            let held = run["memory"]["at_peak"].as_array().unwrap();
            for purpose in ["parameters", "masters", "optimizer"] {
                let of_run = held.iter().find(|memory| memory["kind"] == purpose).unwrap();
                assert_eq!(memory[purpose], of_run["bytes"], "{purpose} of {tuned:?} with {zero}: {memory}");
            }
        }
    }
    let plan =
        |more: &[&str]| folder.run(&[&["plan", "c.toml", "--cluster", "1x2xA100-80GB"], &sized[..], more].concat());
    let coded = plan(&["--set", lora, "--set", "fine_tuning.base_dtype=nf4"]);
    assert!(coded.code == Some(1) && coded.stderr.contains("base_dtype runs on processors only"), "{}", coded.stderr);
    let other = plan(&["--set", lora, "--stack", "torchtitan"]).ok();
    assert!(other.stderr.contains("without [fine_tuning]"), "{}", other.stderr);
}
