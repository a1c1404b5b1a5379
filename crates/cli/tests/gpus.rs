//! The program on emulated GPUs. The stand-in replaces the driver and the libraries that the
//! program loads. It runs the GPU's kernels, compiled by the host's compiler. So everything that
//! runs on a GPU is tested, except for the GPU itself.

mod common;

use common::{Folder, Ran, TINY, images, tensors};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use trainyard_tensor::cuda::stand_in::StandIn;

/// The program with `arguments` on `gpus` GPUs, with more variables.
fn command(folder: &Folder, gpus: u32, arguments: &[&str], more: &[(&str, &str)]) -> Command {
    let stand_in = StandIn::new(Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap_or_else(|problem| panic!("{problem}"));
    let mut command = folder.command(arguments);
    command.envs(stand_in.variables(folder.path())).env("STANDIN_GPUS", gpus.to_string());
    command.envs(more.iter().copied());
    command
}

fn run(folder: &Folder, gpus: u32, arguments: &[&str], more: &[(&str, &str)]) -> Ran {
    Ran::new(command(folder, gpus, arguments, more).output().expect("the program starts"))
}

/// Trains the tiny model for six steps as the run `name`, with `sets`.
fn train(folder: &Folder, gpus: u32, name: &str, sets: &[&str]) -> Ran {
    let name = format!("run.name={name}");
    let mut arguments = vec!["train", "tiny.toml", "--verbose", "--set", "training.steps=6", "--set", &name];
    arguments.extend(sets.iter().flat_map(|set| ["--set", set]));
    run(folder, gpus, &arguments, &[])
}

/// One metric of every step of a run.
fn metrics(folder: &Folder, name: &str, key: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(folder.join(&format!("runs/{name}/metrics.jsonl"))).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line["loss"].as_f64().and(line[key].as_f64())).collect()
}

fn expect_near(found: &[f64], expected: &[f64], within: f64) {
    assert!(!expected.is_empty() && found.len() == expected.len(), "{found:?} {expected:?}");
    let far = |(a, b): (&f64, &f64)| (a - b).abs() > within * b.abs();
    assert!(!found.iter().zip(expected).any(far), "{found:?} against {expected:?}");
}

/// Every purpose takes the predicted memory, including the workspace of products.
fn expect_memory_as_predicted(ran: &Ran) {
    let table = ran.stdout.split("memory by purpose  measured   predicted").nth(1).unwrap();
    let purposes = table.lines().skip(1).take_while(|line| line.starts_with("  "));
    assert!(purposes.clone().count() >= 5 && purposes.clone().all(|line| line.ends_with("+0.0 %")), "{table}");
}

#[test]
fn a_gpu_trains_evaluates_generates_and_goes_on_like_the_processor() {
    let folder = Folder::new();
    train(&folder, 1, "cpu", &[]).ok();
    let ran = train(&folder, 1, "gpu", &["device=cuda"]).ok();
    assert!(ran.stdout.contains("kernels      Stand-in GPU, sm_90a; "), "{}", ran.stdout);
    for key in ["loss", "grad_norm"] {
        expect_near(&metrics(&folder, "gpu", key), &metrics(&folder, "cpu", key), 1e-4);
    }
    // NVIDIA's management library tells of the GPU, and the driver's reasons for a low clock are a
    // verdict.
    let slowed = [("STANDIN_SLOWED", "4")];
    let slow = ["train", "tiny.toml", "--set", "run.name=slow", "--set", "device=cuda", "--set", "training.steps=40"];
    run(&folder, 1, &slow, &slowed).ok();
    let samples = std::fs::read_to_string(folder.join("runs/slow/monitor.jsonl")).unwrap();
    let sample: Value = serde_json::from_str(samples.lines().last().unwrap()).unwrap();
    let gpu = &sample["gpus"][0];
    assert_eq!((gpu["name"].as_str(), gpu["temperature_c"].as_f64()), (Some("Stand-in"), Some(60.0)), "{sample}");
    assert_eq!((gpu["mhz"].as_f64(), &gpu["slowed"][0]), (Some(1200.0), &Value::from("power limit")), "{sample}");
    expect_memory_as_predicted(&ran);

    let say = |device: &str| {
        let asked =
            ["generate", "runs/gpu", "--prompt", "rank", "--tokens", "8", "--temperature", "0", "--device", device];
        let said = run(&folder, 1, &asked, &[]).ok();
        let judged =
            run(&folder, 1, &["eval", "runs/gpu", "--data", "text.txt", "--device", device, "--json"], &[]).ok();
        let judged: Value = serde_json::from_str(&judged.stdout).unwrap();
        (said.stdout, judged["loss"].as_f64().unwrap())
    };
    let ((words, loss), (same_words, near)) = (say("cpu"), say("cuda"));
    assert_eq!(words, same_words);
    expect_near(&[near], &[loss], 1e-4);

    // A run that is stopped after five steps and resumed has the bytes of one that was not.
    train(&folder, 1, "parts", &["device=cuda", "training.steps=5", "schedule.kind=constant"]).ok();
    train(&folder, 1, "whole", &["device=cuda", "schedule.kind=constant"]).ok();
    run(&folder, 1, &["train", "--resume", "runs/parts", "--set", "training.steps=6"], &[]).ok();
    assert_eq!(tensors(&folder.join("runs/parts")), tensors(&folder.join("runs/whole")));
}

#[test]
fn every_precision_and_every_place_of_the_state_trains_on_a_gpu() {
    let folder = Folder::new();
    train(&folder, 1, "plain", &["device=cuda"]).ok();
    let losses = metrics(&folder, "plain", "loss");
    let precisions = [("fp8", "bf16", "hybrid"), ("f16", "f16", "off"), ("bf16", "bf16", "off")];
    let taken = trainyard_testing::cases("precisions", 1, precisions.len() as u64) as usize;
    for (name, compute, fp8) in precisions.into_iter().take(taken) {
        let (compute, fp8) = (format!("precision.compute={compute}"), format!("precision.fp8={fp8}"));
        let ran = train(&folder, 1, name, &["device=cuda", &compute, &fp8]).ok();
        assert!(
            ran.stderr.contains("by wgmma (tried, within") || ran.stdout.contains("by wgmma (tried, within"),
            "{}",
            ran.stderr
        );
        expect_near(&metrics(&folder, name, "loss"), &losses, 1e-2);
    }
    // Offloading and CUDA graphs change no bit.
    let bits = tensors(&folder.join("runs/plain"));
    let all = |tier: &str| {
        ["optimizer", "gradients", "parameters", "activations"].map(|part| format!("memory.offload.{part}={tier}"))
    };
    let (host, disk) = (all("host"), all("disk"));
    let graphs = ["training.cuda_graphs=on".to_owned()];
    let places = [("graphs", &graphs[..]), ("disk", &disk), ("host", &host)];
    let taken = trainyard_testing::cases("places of the state", 1, places.len() as u64) as usize;
    for (name, sets) in places.into_iter().take(taken) {
        let sets: Vec<&str> = sets.iter().map(String::as_str).chain(["device=cuda"]).collect();
        let ran = train(&folder, 1, name, &sets).ok();
        assert_eq!(tensors(&folder.join(&format!("runs/{name}"))), bits, "{name}");
        let says = "are launched as one CUDA graph from here on";
        assert_eq!(
            ran.stderr.contains(says) || ran.stdout.contains(says),
            name == "graphs",
            "{}{}",
            ran.stdout,
            ran.stderr
        );
    }
}

#[test]
fn a_mixture_trains_and_generates_on_gpus_like_on_the_processor() {
    let folder = Folder::new();
    let mixture = ["model.family=mixtral", "experts.count=4", "experts.auxiliary_loss=0.01", "parallel.ranks=2"];
    let on_gpus = ["device=cuda", "training.cuda_graphs=auto", "parallel.zero_stage=3"];
    train(&folder, 2, "cpu", &mixture).ok();
    let ran = train(&folder, 2, "gpu", &[&mixture[..], &on_gpus].concat()).ok();
    assert!(ran.stderr.contains("no CUDA graph of a step"), "{}", ran.stderr);
    for key in ["loss", "grad_norm"] {
        expect_near(&metrics(&folder, "gpu", key), &metrics(&folder, "cpu", key), 1e-4);
    }
    let balance = |name: &str| -> Vec<f64> {
        let text = std::fs::read_to_string(folder.join(&format!("runs/{name}/metrics.jsonl"))).unwrap();
        let of_line = |line: &str| serde_json::from_str::<Value>(line).unwrap()["experts"]["auxiliary_loss"].as_f64();
        text.lines().filter_map(of_line).collect()
    };
    expect_near(&balance("gpu"), &balance("cpu"), 1e-4);
    let say = |device: &str| {
        let asked = ["--prompt", "rank", "--tokens", "8", "--temperature", "0", "--device", device];
        run(&folder, 1, &[&["generate", "runs/gpu"], &asked[..]].concat(), &[]).ok().stdout
    };
    assert_eq!(say("cuda"), say("cpu"));
    // Rows go to the GPU of their expert and back by NCCL, or through the host.
    for (name, collectives) in [("divided", "nccl"), ("through-host", "host")] {
        let collectives = format!("parallel.collectives={collectives}");
        let divided = ["device=cuda", "parallel.expert_parallel_degree=2", &collectives];
        train(&folder, 2, name, &[&mixture[..], &divided].concat()).ok();
        for key in ["loss", "grad_norm"] {
            expect_near(&metrics(&folder, name, key), &metrics(&folder, "cpu", key), 1e-4);
        }
    }
    let [divided, through_host] = ["divided", "through-host"].map(|name| metrics(&folder, name, "loss"));
    assert_eq!(divided, through_host);
}

#[test]
fn parts_of_sequences_train_on_gpus_like_on_the_processor() {
    let folder = Folder::new();
    let of_two = ["parallel.context_parallel_degree=2", "parallel.ranks=2", "training.cuda_graphs=auto"];
    train(&folder, 2, "cpu", &of_two).ok();
    let exchanges = [("gather", "all_gather", "nccl"), ("overlapped", "all_gather_overlapped", "nccl")];
    let exchanges = exchanges.into_iter().chain([("heads", "all_to_all", "nccl"), ("host", "all_to_all", "host")]);
    for (name, exchange, collectives) in exchanges {
        let exchange = format!("parallel.context_parallel_exchange={exchange}");
        let collectives = format!("parallel.collectives={collectives}");
        let ran = train(&folder, 2, name, &[&of_two[..], &["device=cuda", &exchange, &collectives]].concat()).ok();
        for key in ["loss", "grad_norm"] {
            expect_near(&metrics(&folder, name, key), &metrics(&folder, "cpu", key), 1e-4);
        }
        expect_memory_as_predicted(&ran);
    }
    let [heads, host] = ["heads", "host"].map(|name| metrics(&folder, name, "loss"));
    assert_eq!(heads, host);
}

/// A T5 evaluates, generates, goes on and is divided among two GPUs.
#[test]
fn an_encoder_and_its_decoder_train_on_gpus_like_on_the_processor() {
    let folder = Folder::new();
    let config = TINY.replace("family = 'llama'", "family = 't5'").replace("layers = 2", "layers = 4");
    folder.write("tiny.toml", config.replace("max_sequence_length = 32\n", ""));
    let graphs = "training.cuda_graphs=auto";
    for (kind, sets) in [("plain", &["model.activation=relu"][..]), ("gated", &["model.activation=gelu_tanh"])] {
        let [cpu, gpu] = ["cpu", "gpu"].map(|device| format!("{kind}-{device}"));
        train(&folder, 1, &cpu, sets).ok();
        let ran = train(&folder, 1, &gpu, &[sets, &["device=cuda", graphs]].concat()).ok();
        assert!(ran.stderr.contains("no CUDA graph of a step: each block brings the distances"), "{}", ran.stderr);
        for key in ["loss", "grad_norm"] {
            expect_near(&metrics(&folder, &gpu, key), &metrics(&folder, &cpu, key), 1e-4);
        }
        expect_memory_as_predicted(&ran);
    }
    let say = |device: &str| {
        let asked = ["--prompt", "rank", "--tokens", "8", "--temperature", "0", "--device", device];
        let said = run(&folder, 1, &[&["generate", "runs/gated-gpu"], &asked[..]].concat(), &[]).ok().stdout;
        let judged = ["eval", "runs/gated-gpu", "--data", "text.txt", "--length", "32", "--json", "--device", device];
        let judged: Value = serde_json::from_str(&run(&folder, 1, &judged, &[]).ok().stdout).unwrap();
        (said, judged["loss"].as_f64().unwrap())
    };
    let ((words, loss), (same_words, near)) = (say("cpu"), say("cuda"));
    assert_eq!(words, same_words);
    expect_near(&[near], &[loss], 1e-4);

    let constant = ["device=cuda", "schedule.kind=constant", "model.dropout=0.1"];
    train(&folder, 1, "parts", &[&constant[..], &["training.steps=5"]].concat()).ok();
    train(&folder, 1, "whole", &constant).ok();
    run(&folder, 1, &["train", "--resume", "runs/parts", "--set", "training.steps=6"], &[]).ok();
    assert_eq!(tensors(&folder.join("runs/parts")), tensors(&folder.join("runs/whole")));

    let of_two = ["parallel.ranks=2", "training.global_batch_size=8"];
    train(&folder, 1, "two", &of_two).ok();
    for (name, more) in [("zero2", "parallel.zero_stage=2"), ("zero3", "parallel.zero_stage=3")] {
        let ran = train(&folder, 2, name, &[&of_two[..], &["device=cuda", more]].concat()).ok();
        assert!(ran.stderr.contains("from GPU to GPU by NCCL"), "{}", ran.stderr);
        expect_near(&metrics(&folder, name, "loss"), &metrics(&folder, "two", "loss"), 1e-4);
        expect_memory_as_predicted(&ran);
    }
    let stages = ["device=cuda", "parallel.pipeline_parallel_degree=2"];
    train(&folder, 2, "stages", &[&of_two[..], &stages].concat()).ok();
    expect_near(&metrics(&folder, "stages", "loss"), &metrics(&folder, "two", "loss"), 1e-4);
}

#[test]
fn images_train_on_gpus_like_on_the_processor() {
    let folder = images::folder();
    folder.write("tiny.toml", images::VIT);
    let mixed = ["augmentation.mixup=0.2", "augmentation.cutmix=1.0"];
    for (name, sets) in [("mixed", &mixed[..]), ("plain", &[])] {
        train(&folder, 1, &format!("{name}-cpu"), sets).ok();
        let on_gpu = [sets, &["device=cuda", "training.cuda_graphs=auto"]].concat();
        let ran = train(&folder, 1, name, &on_gpu).ok();
        assert!(ran.stderr.contains("no CUDA graph of a step: the host waits for a check"), "{}", ran.stderr);
        for key in ["loss", "grad_norm"] {
            expect_near(&metrics(&folder, name, key), &metrics(&folder, &format!("{name}-cpu"), key), 1e-4);
        }
        expect_memory_as_predicted(&ran);
    }
    let judge = |device: &str| -> Value {
        let judged =
            run(&folder, 1, &["eval", "runs/plain", "--data", "shapes", "--json", "--device", device], &[]).ok();
        serde_json::from_str(&judged.stdout).unwrap()
    };
    let (on_gpu, on_cpu) = (judge("cuda"), judge("cpu"));
    assert_eq!(on_gpu["top1"], on_cpu["top1"], "{on_gpu} {on_cpu}");
    expect_near(&[on_gpu["loss"].as_f64().unwrap()], &[on_cpu["loss"].as_f64().unwrap()], 1e-4);

    train(&folder, 2, "two", &["parallel.ranks=2"]).ok();
    let shards = ["parallel.ranks=2", "device=cuda", "parallel.zero_stage=3"];
    let ran = train(&folder, 2, "shards", &shards).ok();
    expect_near(&metrics(&folder, "shards", "loss"), &metrics(&folder, "two", "loss"), 1e-4);
    expect_memory_as_predicted(&ran);
}

#[test]
fn gpus_exchange_by_nccl_between_threads_and_between_processes() {
    let folder = Folder::new();
    train(&folder, 2, "cpu", &["parallel.ranks=2"]).ok();
    let losses = metrics(&folder, "cpu", "loss");
    let of_two = ["device=cuda", "parallel.ranks=2"];
    for (name, more) in [("ddp", "parallel.zero_stage=0"), ("shards", "parallel.zero_stage=3")] {
        let ran = train(&folder, 2, name, &[&of_two[..], &[more]].concat()).ok();
        assert!(ran.stderr.contains("from GPU to GPU by NCCL 2.27.3"), "{}", ran.stderr);
        expect_near(&metrics(&folder, name, "loss"), &losses, 1e-4);
    }
    // The fixed order gives the bits of the exchange through the host, and processes give those of
    // threads.
    let sharded = [&of_two[..], &["parallel.zero_stage=2"]].concat();
    train(&folder, 2, "host", &[&sharded[..], &["parallel.collectives=host"]].concat()).ok();
    train(&folder, 2, "fixed", &[&sharded[..], &["training.deterministic=true"]].concat()).ok();
    let launched =
        ["launch", "--nproc-per-node", "2", "train", "tiny.toml", "--set", "training.steps=6", "--set", "device=cuda"];
    let sets =
        ["--set", "parallel.zero_stage=2", "--set", "training.deterministic=true", "--set", "run.name=processes"];
    let ran = run(&folder, 2, &[&launched[..], &sets].concat(), &[]).ok();
    assert!(ran.stderr.contains("NCCL moves the parts and each rank adds its own"), "{}", ran.stderr);
    let bits = ["host", "fixed", "processes"].map(|name| tensors(&folder.join(&format!("runs/{name}"))));
    assert!(bits[0] == bits[1] && bits[0] == bits[2]);
}

/// The other ranks once waited for the deadline of ten minutes, because only exchanges through the
/// host checked that their peers are alive.
#[test]
fn a_rank_that_dies_is_named_though_nccl_says_nothing() {
    let folder = Folder::new();
    let arguments =
        ["launch", "--nproc-per-node", "2", "train", "tiny.toml", "--set", "device=cuda", "--set", "run.name=killed"];
    let ran = run(&folder, 2, &arguments, &[("TRAINYARD_FAULTS", "kill rank=1 step=4 instruction=6")]);
    assert_eq!(ran.code, Some(70), "{}\n{}", ran.stdout, ran.stderr);
    for part in ["error: rank 0 in step 4", "died: its process no longer exists", "where the ranks were"] {
        assert!(ran.stderr.contains(part), "no {part:?} in {}", ran.stderr);
    }
}

#[test]
fn what_a_machine_with_gpus_lacks_is_a_sentence() {
    let folder = Folder::new();
    let asked = ["train", "tiny.toml", "--set", "device=cuda", "--set", "training.steps=2"];
    for (variable, value, code, says) in [
        ("STANDIN_DRIVER", "11080", 1, "supports CUDA 11.8, and 12.0 is the least"),
        ("STANDIN_CAPABILITY", "75", 1, "compute capability 7.5, and the kernels need at least 8.0"),
        (
            "STANDIN_MEMORY",
            "20000000",
            1,
            "of GPU memory, and 20 of the 20 MiB of cuda:0 (Stand-in GPU, sm_90a) are free",
        ),
        ("STANDIN_GPUS", "0", 1, "no GPU is visible to this process"),
        ("STANDIN_FAILS", "adamw", 70, "rank 0 on cuda:0 (Stand-in GPU, sm_90a): "),
    ] {
        let ran = run(&folder, 1, &asked, &[(variable, value)]);
        assert_eq!(ran.code, Some(code), "{variable}: {}", ran.stderr);
        assert!(ran.stderr.contains(says), "{variable}: {}", ran.stderr);
    }
    let second = run(&folder, 1, &[&asked[..3], &["device=cuda:1"]].concat(), &[]);
    assert!(second.stderr.contains("there is no GPU 1: 1 GPU is visible"), "{}", second.stderr);
    let three = run(&folder, 2, &[&asked[..], &["--set", "parallel.ranks=3"]].concat(), &[]);
    assert!(
        three.code == Some(1) && three.stderr.contains("there is no GPU 2: 2 GPUs are visible"),
        "{}",
        three.stderr
    );

    // Of two ranks that train together, the failed one is named.
    let of_two = ["--set", "parallel.ranks=2", "--set", "run.name=two"];
    let failed = run(&folder, 2, &[&asked[..], &of_two].concat(), &[("STANDIN_FAILS", "adamw@1")]);
    let says = "a kernel that was launched before failed; CUDA_LAUNCH_BLOCKING=1 shows which";
    assert!(failed.code == Some(70) && failed.stderr.contains(says), "{}", failed.stderr);
    assert!(failed.stderr.contains("rank 1 on cuda:1 (Stand-in GPU, sm_90a): "), "{}", failed.stderr);

    // A driver without any of the libraries.
    let stand_in = StandIn::new(Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
    let libraries = stand_in.variables(folder.path())[0].1.clone();
    std::fs::create_dir(folder.join("lib")).unwrap();
    for (number, name) in ["libcuda.so.1", "libnvrtc.so.12"].into_iter().enumerate() {
        let path = folder.join("lib").join(name);
        let run_name = format!("run.name=lacks-{number}");
        let asked = [&asked[..], &["--set", &run_name]].concat();
        std::fs::copy(Path::new(&libraries).join("libcuda.so.1"), path).unwrap();
        let ran = Ran::new(
            command(&folder, 1, &asked, &[])
                .env("LD_LIBRARY_PATH", folder.join("lib"))
                .env("PATH", OsStr::new(""))
                .env_remove("CUDA_HOME")
                .output()
                .expect("the program starts"),
        );
        let missing = if name == "libcuda.so.1" { "NVRTC is not found" } else { "cuBLASLt is not found" };
        assert!(ran.code == Some(1) && ran.stderr.contains(missing), "{}", ran.stderr);
    }
}

/// The peak was once measured beside the largest step that fits, and found no memory.
#[test]
fn the_largest_model_is_trained_in_all_of_a_gpus_memory() {
    let folder = Folder::new();
    let shape =
        ["--preset", "shakespeare-char", "--rows", "1", "--length", "16", "--vocab-size", "64", "--dtype", "f32"];
    let arguments = [&["bench", "largest"][..], &shape, &["--steps", "1", "--set", "device=cuda", "--json"]].concat();
    let ran = run(&folder, 1, &arguments, &[("STANDIN_MEMORY", "48000000")]).ok();
    let found: Value = serde_json::from_str(&ran.stdout).unwrap();
    let bytes = |key: &str| found[key].as_u64().unwrap();
    assert!(found["layers"].as_u64() > Some(1) && found["loss"].as_f64() > Some(1.0), "{found}");
    assert_eq!(bytes("mem_peak_bytes"), bytes("mem_predicted_bytes"));
    let room = found["room"]["device_bytes"].as_u64().unwrap();
    assert!(bytes("mem_peak_bytes") <= room && room < 48_000_000, "{found}");
    // A layer more is too large.
    let layer = bytes("mem_peak_bytes") / found["layers"].as_u64().unwrap();
    assert!(bytes("mem_peak_bytes") + layer > room, "{found}");
}
