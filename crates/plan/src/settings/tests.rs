//! Settings that are written and read again are the same run, and odd ones are refused in words.

use super::*;
use crate::space::candidates;
use crate::{Budget, Facts, Fixed, Limits, Objective, price};
use trainyard_sim::{Cluster, Constants, Profiles, model};

fn request(name: &str, cluster: &str, global_batch: u64) -> Request {
    Request {
        model: model(name).unwrap(),
        own: None,
        cluster: Cluster::parse(cluster, &Profiles::builtin()).unwrap(),
        global_batch,
        sequence_length: 4096,
        formats: vec![Format::Bf16],
        limits: Limits::default(),
        fixed: Fixed::default(),
        objective: Objective::Speed,
        shown: 1,
        threads: 1,
        budget: Budget::default(),
    }
}

fn facts(profile: &StackProfile) -> Facts {
    Facts { stack: profile.software.clone(), constants: Constants::builtin() }
}

/// Plans that `profile` can express, spread over the space.
fn plans(profile: &StackProfile, request: &Request, count: usize) -> Vec<Plan> {
    let fixed = Fixed { rules: Some(profile.rules.clone()), ..Fixed::default() };
    let all = candidates(&request.extent(request.cluster.devices()), &fixed);
    // A prime step meets every combination of choices.
    let step = (all.len() / count).max(1) | 1;
    let chosen = all.iter().step_by(step).filter(|candidate| candidate.accumulation <= 16);
    chosen.filter_map(|candidate| price(request, &facts(profile), candidate)).collect()
}

#[test]
fn what_is_written_is_read_as_the_same_run() {
    for dialect in Dialect::ALL {
        let profile = StackProfile::named(dialect.stack()).unwrap();
        for (name, formats) in
            [("llama-1b", [Format::Bf16, Format::Fp16]), ("qwen3-30b-a3b", [Format::Bf16, Format::Fp32])]
        {
            let request = Request { formats: formats.to_vec(), ..request(name, "2x4xH100", 32) };
            let plans = plans(&profile, &request, 25);
            assert!(plans.len() > 8, "{}: {}", dialect.name(), plans.len());
            for plan in &plans {
                let exported = export(dialect, &request, plan, &profile.software);
                assert_eq!(Dialect::of(Path::new("settings"), &exported.text), Ok(dialect), "{}", exported.text);
                let read = read(dialect, &exported.text).unwrap_or_else(|error| panic!("{error}: {}", exported.text));
                assert_eq!(read.unpriced, Vec::<String>::new(), "{}", exported.text);
                let again = read.candidates(&request).unwrap_or_else(|error| panic!("{error}: {}", exported.text));
                assert_eq!(again, [plan.candidate], "{} {:?}", exported.text, exported.unsaid);
                let length = if dialect == Dialect::Deepspeed { None } else { Some(4096) };
                assert_eq!(read.sequence_length, length);
                let software = read.software(&profile).unwrap();
                assert_eq!(software.state, profile.software.state, "{}", dialect.name());
                assert_eq!(software.overlap_reduce, profile.software.overlap_reduce, "{}", dialect.name());
                assert_eq!(software.dispatch, profile.software.dispatch, "{}", dialect.name());
            }
        }
    }
}

#[test]
fn what_a_form_cannot_say_is_named() {
    let request = request("llama-1b", "2x4xH100", 32);
    let software = StackProfile::named("trainyard").unwrap().software;
    let mesh = Mesh { pp: 2, dp_shard: 2, dp_replicate: 2, ..Mesh::default() };
    let candidate = Candidate {
        zero_stage: 2,
        pipeline: PipelineSchedule::ZeroBubble,
        checkpointing: Checkpointing { full: 4, selective: 12 },
        ..Candidate::plain(mesh, 1, 8, Format::Bf16)
    };
    let facts = Facts { stack: software.clone(), constants: Constants::builtin() };
    let plan = price(&request, &facts, &candidate).unwrap();
    for (dialect, words) in [
        (Dialect::Megatron, &["ZB-H1", "selective recomputation of the other 12"][..]),
        (Dialect::Nemo, &["ZB-H1", "ZeRO-2", "selective"]),
        (Dialect::Torchtitan, &["ZB-H1", "ZeRO-2", "every 4th block"]),
        (
            Dialect::Deepspeed,
            &["pipeline parallelism of degree 2", "replicas of 2 shards", "selective", "only 4 of 16"],
        ),
        (Dialect::Accelerate, &["pipeline parallelism of degree 2", "ZeRO-2", "only 4 of 16"]),
    ] {
        let unsaid = export(dialect, &request, &plan, &software).unsaid.join("; ");
        for word in words {
            assert!(unsaid.contains(word), "{}: {word}: {unsaid}", dialect.name());
        }
    }
}

/// Files as people have them, from the trainers' own documentation.
#[test]
fn files_of_others_are_understood() {
    let titan = "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[optimizer]\nname = \"AdamW\"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n\
                 [parallelism]\ndata_parallel_replicate_degree = 1\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n\
                 enable_async_tensor_parallel = true\n[activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"op\"\n";
    let read_titan = read(Dialect::Torchtitan, titan).unwrap();
    assert_eq!((read_titan.tp, read_titan.dp_shard, read_titan.recompute), (2, None, Recompute::Selective));
    assert_eq!(read_titan.unpriced, ["parallelism.enable_async_tensor_parallel = true"]);
    assert_eq!(read_titan.software["dispatch"].as_str(), Some("eager"));
    let request = request("llama-8b", "1x8xH100", 8);
    let candidate = read_titan.candidates(&Request { global_batch: 4, ..request.clone() }).unwrap()[0];
    assert_eq!((candidate.mesh.dp_shard, candidate.micro_batch, candidate.accumulation), (4, 1, 1));

    let ds = r#"{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
        "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"},
        "zero_quantized_weights": true}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}"#;
    let read_ds = read(Dialect::Deepspeed, ds).unwrap();
    assert!(read_ds.assumed[0].contains("train_batch_size") && read_ds.assumed[0].contains("auto"));
    assert_eq!(read_ds.unpriced.len(), 2, "{:?}", read_ds.unpriced);
    assert_eq!((read_ds.format, read_ds.micro_batch), (None, None));
    let candidates = read_ds.candidates(&request).unwrap();
    assert_eq!(candidates.len(), 1, "one sequence each");

    let yaml = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n  \
                fsdp_sharding_strategy: HYBRID_SHARD\n  fsdp_offload_params: false\nmixed_precision: bf16\nnum_processes: 16\n";
    let read_yaml = read(Dialect::Accelerate, yaml).unwrap();
    assert_eq!((read_yaml.zero_stage, read_yaml.dp_shard, read_yaml.devices), (3, Some(8), Some(16)));
    assert!(read_yaml.candidates(&request).unwrap_err().to_string().contains("16 devices, and 8"));
    let through = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 4\n\
                   mixed_precision: fp16\nnum_processes: 8\n";
    let read_through = read(Dialect::Accelerate, through).unwrap();
    assert_eq!((read_through.stack, read_through.zero_stage, read_through.accumulation), ("deepspeed", 2, Some(4)));

    let script = "TP=2\nARGS=(--num-layers 16 --tensor-model-parallel-size $TP --sequence-parallel --pipeline-model-parallel-size 2\n\
                  --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1 --global-batch-size 32 --seq-length 4096 --bf16\n\
                  --use-distributed-optimizer --recompute-activations --tp-comm-overlap --lr 1e-4)\ntorchrun pretrain_gpt.py \"${ARGS[@]}\"\n";
    let read_script = read(Dialect::Megatron, script).unwrap();
    assert_eq!(read_script.schedule, PipelineSchedule::Interleaved { chunks: 2 });
    assert_eq!((read_script.zero_stage, read_script.recompute), (1, Recompute::Selective));
    assert_eq!(read_script.unpriced[1..], ["--tp-comm-overlap"], "{:?}", read_script.unpriced);
    assert_eq!(read_script.software["overlap_reduce"].as_bool(), Some(false));
}

#[test]
fn what_is_no_run_is_refused_in_words() {
    let says = |dialect, text: &str, word: &str| {
        let error = read(dialect, text).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains(dialect.name()), "{text}: {error}");
    };
    says(Dialect::Deepspeed, "{", "EOF");
    says(Dialect::Deepspeed, "[]", "no JSON object");
    says(Dialect::Deepspeed, r#"{"zero_optimization": {"stage": 4}}"#, "the last one is 3");
    says(Dialect::Deepspeed, r#"{"train_batch_size": 0}"#, "a number from 1");
    says(Dialect::Torchtitan, "x = ", "TOML parse error");
    says(Dialect::Torchtitan, "[run]\nname = 1", "none of the sections");
    says(Dialect::Torchtitan, "[training]\nseq_len = -2", "a whole number");
    says(Dialect::Accelerate, "a: [", "while");
    says(Dialect::Accelerate, "num_processes: 8", "distributed_type");
    says(Dialect::Megatron, "run --bf16", "--micro-batch-size is missing");
    says(Dialect::Nemo, "trainer.plugins.precision=12", "trainer.plugins.precision");
    let error = Dialect::of(Path::new("a.txt"), "hello").unwrap_err().to_string();
    assert!(error.contains("torchtitan's TOML"), "{error}");
    let request = request("llama-1b", "2x4xH100", 32);
    let settings = Settings { tp: 16, ..Settings::new(Dialect::Megatron) };
    assert!(settings.candidates(&request).unwrap_err().to_string().contains("does not divide 8 devices"));
    // Regression: the product of degrees overflowed.
    let settings = Settings { tp: 1 << 16, pp: 1 << 16, ..Settings::new(Dialect::Megatron) };
    assert!(settings.candidates(&request).unwrap_err().to_string().contains("does not divide 8 devices"));
    assert_eq!(Settings { micro_batch: Some(1), accumulation: Some(1), ..settings }.batch(8), None);
    let settings = Settings { zero_stage: 3, dp_shard: Some(3), ..Settings::new(Dialect::Megatron) };
    assert!(settings.candidates(&request).unwrap_err().to_string().contains("2 replicas of 3 shards"));
    let settings = Settings { micro_batch: Some(3), ..Settings::new(Dialect::Megatron) };
    assert!(settings.candidates(&request).unwrap_err().to_string().contains("3 does not divide the 4 sequences"));
}
