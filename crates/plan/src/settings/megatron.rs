//! Arguments of Megatron-LM (Megatron Core 0.16, `megatron/training/arguments.py`), as an array in
//! a shell script.

use super::take::Keys;
use super::{Dialect, Exported, Job, Recompute, Settings, SettingsError, shell};
use std::fmt::Write as _;
use trainyard_program::{Mesh, Offload, PipelineSchedule, ReduceSchedule, Reshard, Tier, even_cuts};
use trainyard_sim::Format;

/// Writes the arguments.
pub(super) fn write(job: &Job<'_>) -> Exported {
    let mut unsaid = job.unsaid_everywhere();
    let mut text = String::new();
    for line in job.header() {
        let _ = writeln!(text, "# {line}");
    }
    let (nodes, each) = job.nodes();
    let _ = writeln!(text, "# source this file, then run on every one of {nodes} nodes:");
    let _ = writeln!(
        text,
        "#   torchrun --nnodes {nodes} --nproc-per-node {each} ... pretrain_gpt.py \"${{PLAN_ARGS[@]}}\" ..."
    );
    text += "# Data, tokenizer, optimizer and learning rate are yours to add.\n";
    let _ = writeln!(text, "PLAN_ARGS=(");
    for (title, options) in [
        ("the model", model(job)),
        ("batch and precision", batch(job)),
        ("parallelism", parallelism(job, &mut unsaid)),
        ("memory", memory(job, &mut unsaid)),
    ] {
        if !options.is_empty() {
            let _ = writeln!(text, "  # {title}");
        }
        for option in options {
            let _ = writeln!(text, "  {option}");
        }
    }
    text += ")\n";
    Exported { text, unsaid }
}

fn model(job: &Job<'_>) -> Vec<String> {
    let model = &job.request.model;
    let mut all = vec![
        format!("--num-layers {}", job.blocks()),
        format!("--hidden-size {}", model.dim),
        format!("--ffn-hidden-size {}", model.ffn),
        format!("--num-attention-heads {}", model.heads),
    ];
    if model.kv_heads != model.heads {
        all.push("--group-query-attention".to_owned());
        all.push(format!("--num-query-groups {}", model.kv_heads));
    }
    if model.head_dim * model.heads != model.dim {
        all.push(format!("--kv-channels {}", model.head_dim));
    }
    let length = job.request.sequence_length;
    all.push(format!("--seq-length {length}"));
    all.push(format!("--max-position-embeddings {}", length.max(u64::from(model.positions))));
    all.push(format!("--vocab-size {}", model.vocab));
    if model.gated {
        all.extend(["--swiglu", "--normalization RMSNorm", "--disable-bias-linear"].map(str::to_owned));
    }
    if model.positions == 0 {
        all.push("--position-embedding-type rope".to_owned());
    }
    if !model.tied {
        all.push("--untie-embeddings-and-output-weights".to_owned());
    }
    if let Some(experts) = model.experts {
        all.push(format!("--num-experts {}", experts.count));
        all.push(format!("--moe-router-topk {}", experts.per_token));
        all.push(format!("--moe-ffn-hidden-size {}", model.ffn));
        if experts.shared_ffn > 0 {
            all.push(format!("--moe-shared-expert-intermediate-size {}", experts.shared_ffn));
        }
        all.push("--moe-token-dispatcher-type alltoall".to_owned());
        all.push("--moe-grouped-gemm".to_owned());
    }
    all
}

fn batch(job: &Job<'_>) -> Vec<String> {
    let candidate = job.candidate();
    let mut all = vec![
        format!("--micro-batch-size {}", candidate.micro_batch),
        format!("--global-batch-size {}", job.request.global_batch),
    ];
    let precision: &[&str] = match candidate.format {
        Format::Fp32 | Format::Tf32 => &[],
        Format::Fp16 => &["--fp16"],
        Format::Bf16 => &["--bf16"],
        Format::Fp8 => &["--bf16", "--fp8-format hybrid"],
        Format::Fp4 => &["--bf16", "--fp4-format e2m1"],
    };
    all.extend(precision.iter().map(|option| (*option).to_owned()));
    match job.software.state.reduce {
        // f16 is reduced in f16 unless told otherwise, and bf16 in f32.
        2 if !precision.is_empty() && candidate.format != Format::Fp16 => all.push("--grad-reduce-in-bf16".to_owned()),
        4 if candidate.format == Format::Fp16 => all.push("--accumulate-allreduce-grads-in-fp32".to_owned()),
        _ => {}
    }
    all
}

fn parallelism(job: &Job<'_>, unsaid: &mut Vec<String>) -> Vec<String> {
    let candidate = job.candidate();
    let Mesh { pp, dp_replicate, cp, tp, ep, .. } = *job.mesh();
    let mut all = vec![
        format!("--tensor-model-parallel-size {tp}"),
        format!("--pipeline-model-parallel-size {pp}"),
        format!("--context-parallel-size {cp}"),
    ];
    if tp > 1 && job.software.sequence_parallel {
        all.push("--sequence-parallel".to_owned());
    }
    if ep > 1 {
        all.push(format!("--expert-model-parallel-size {ep}"));
        if tp > 1 {
            all.push(format!("--expert-tensor-parallel-size {tp}"));
        }
    }
    all.extend(pipeline(job, unsaid));
    all.push("--overlap-grad-reduce".to_owned());
    let stage = candidate.layout().zero_stage;
    if stage > 0 {
        all.extend(["--use-distributed-optimizer", "--overlap-param-gather"].map(str::to_owned));
    }
    if stage > 0 && dp_replicate > 1 {
        all.push(format!("--num-distributed-optimizer-instances {dp_replicate}"));
    }
    if stage >= 2 {
        let strategy = if stage == 2 { "optim_grads" } else { "optim_grads_params" };
        all.push("--use-megatron-fsdp".to_owned());
        all.push(format!("--data-parallel-sharding-strategy {strategy}"));
        all.extend(["--ckpt-format fsdp_dtensor", "--no-gradient-accumulation-fusion"].map(str::to_owned));
        if candidate.reshard != Reshard::Always && stage == 3 {
            unsaid.push("gathered parameters that stay: Megatron FSDP releases them after every forward".to_owned());
        }
        if candidate.reduce_schedule == ReduceSchedule::PerStep && candidate.accumulation > 1 {
            unsaid.push("gradients summed once a step: Megatron FSDP sums them after every micro-batch".to_owned());
        }
    }
    all
}

/// The options of the pipeline's schedule, and of the division of blocks where it is not equal.
fn pipeline(job: &Job<'_>, unsaid: &mut Vec<String>) -> Vec<String> {
    let schedule = job.candidate().pipeline;
    if job.mesh().pp == 1 {
        return Vec::new();
    }
    match schedule {
        PipelineSchedule::OneForwardOneBackward => {}
        PipelineSchedule::Interleaved { chunks } if job.has_equal_stretches() => {
            return vec![format!("--num-virtual-stages-per-pipeline-rank {chunks}")];
        }
        PipelineSchedule::Interleaved { .. } => {}
        other => {
            unsaid.push(format!("the schedule {other}: Megatron has 1F1B and interleaved 1F1B"));
            let equal = job.blocks().is_multiple_of(job.mesh().pp);
            return if equal { Vec::new() } else { vec![layout_option(&even_ranges(job))] };
        }
    }
    if job.has_equal_stretches() { Vec::new() } else { vec![layout_option(&layout(job))] }
}

fn even_ranges(job: &Job<'_>) -> Vec<String> {
    let units = job.blocks() + 2;
    let cuts = even_cuts(units, job.mesh().pp);
    let starts = std::iter::once(0).chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain([units]);
    starts.zip(ends).map(|(start, end)| stretch(start..end, job.blocks())).collect()
}

fn layout(job: &Job<'_>) -> Vec<String> {
    job.stretch_units().into_iter().map(|units| stretch(units, job.blocks())).collect()
}

/// `Et*3`: a stretch in the words of `--pipeline-model-parallel-layout`.
fn stretch(units: std::ops::Range<u32>, blocks: u32) -> String {
    let count = units.clone().filter(|unit| (1..=blocks).contains(unit)).count();
    let embedding = if units.contains(&0) { "E" } else { "" };
    let loss = if units.contains(&(blocks + 1)) { "L" } else { "" };
    format!("{embedding}{}{loss}", "t".repeat(count))
}

fn layout_option(stretches: &[String]) -> String {
    format!("--pipeline-model-parallel-layout \"{}\"", stretches.join("|"))
}

fn memory(job: &Job<'_>, unsaid: &mut Vec<String>) -> Vec<String> {
    let candidate = job.candidate();
    let (full, selective) = (candidate.checkpointing.full, candidate.checkpointing.selective);
    let mut all = Vec::new();
    match (full, selective) {
        (0, 0) => {}
        (0, _) => all.push("--recompute-granularity selective".to_owned()),
        (full, _) if full == job.blocks() => all.extend(
            ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
                .map(str::to_owned),
        ),
        (full, selective) => {
            let each = full.div_ceil(job.stretches());
            all.extend(["--recompute-granularity full", "--recompute-method block"].map(str::to_owned));
            all.push(format!("--recompute-num-layers {each}"));
            if selective > 0 {
                unsaid.push(format!(
                    "selective recomputation of the other {selective} blocks: Megatron recomputes one kind at a time"
                ));
            }
        }
    }
    let Offload { optimizer, parameters, activations, gradients } = candidate.offload;
    if optimizer == Some(Tier::Host) {
        let offload =
            ["--optimizer-cpu-offload", "--optimizer-offload-fraction 1.0", "--use-precision-aware-optimizer"];
        all.extend(offload.map(str::to_owned));
    }
    for (what, tier) in [("parameters", parameters), ("activations", activations), ("gradients", gradients)] {
        if tier.is_some() {
            unsaid.push(format!("{what} on the host"));
        }
    }
    all
}

/// Options that change neither speed nor memory as they are priced, by their beginning.
const HARMLESS: &[&str] = &[
    "adam-",
    "adlr",
    "attention-dropout",
    "attention-softmax-in-fp32",
    "blend",
    "ckpt-",
    "clip-grad",
    "ckpt_",
    "cpu-affinity",
    "data-",
    "dataloader-type",
    "decay",
    "distributed-backend",
    "distributed-timeout",
    "eod-mask",
    "eval-",
    "exit-",
    "finetune",
    "hidden-dropout",
    "init-method",
    "initial-loss-scale",
    "iterations",
    "layernorm-",
    "load",
    "local-rank",
    "log-",
    "loss-scale",
    "lr",
    "make-vocab",
    "manual-gc",
    "mask-",
    "merge-file",
    "min-loss-scale",
    "min-lr",
    "mock-data",
    "no-create",
    "no-load",
    "no-mmap",
    "no-save",
    "norm-epsilon",
    "normalization",
    "num-dataset",
    "num-workers",
    "one-logger",
    "onnx",
    "optimizer",
    "override-opt",
    "per-split",
    "position-embedding",
    "profile",
    "rampup",
    "reset-",
    "rotary-",
    "save",
    "seed",
    "sgd-",
    "split",
    "start-weight",
    "end-weight",
    "tensorboard",
    "test-data",
    "timing",
    "tiktoken",
    "tokenizer",
    "train-data",
    "train-iters",
    "train-samples",
    "use-checkpoint",
    "use-mcore",
    "use-rope",
    "use-rotary",
    "use-legacy",
    "valid-data",
    "vocab-",
    "wandb",
    "weight-decay",
    "bert-",
    "group-query",
    "add-qkv",
    "disable-bias",
    "no-position",
    "qk-layernorm",
    "apply-",
    "no-bias-",
    "no-masked",
    "no-rope",
    "attention-backend",
    "transformer-impl",
    "cross-entropy",
];

/// Options of launchers, in the same command.
const LAUNCHERS: &[&str] = &[
    "nproc",
    "nnodes",
    "node-rank",
    "node_rank",
    "master",
    "rdzv",
    "standalone",
    "max-restarts",
    "local-ranks",
    "role",
];

/// Options that describe the model, which --model gives.
const MODEL: &[&str] = &[
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "num-query-groups",
    "kv-channels",
    "max-position-embeddings",
    "swiglu",
    "untie-embeddings",
    "num-experts",
    "moe-router",
    "moe-ffn",
    "moe-shared",
    "moe-aux",
    "moe-token-dispatcher",
    "moe-grouped-gemm",
    "moe-z-loss",
    "moe-layer-freq",
    "squared-relu",
    "openai-gelu",
    "quick-geglu",
    "window-size",
];

/// Reads the arguments of a script.
pub(super) fn read(text: &str) -> Result<Settings, SettingsError> {
    let mut keys = Keys::of_pairs(shell::options(text).into_iter().map(|(key, value)| {
        // A value is the first word; others are the next command's, such as the script's name.
        let first = value.split_whitespace().next().unwrap_or_default().to_owned();
        (key, first)
    }));
    let mut settings = Settings::new(Dialect::Megatron);
    degrees(&mut keys, &mut settings)?;
    sharding(&mut keys, &mut settings)?;
    settings.micro_batch = keys.degree("micro-batch-size")?;
    settings.global_batch = keys.number("global-batch-size")?;
    settings.sequence_length = keys.number("seq-length")?;
    if settings.micro_batch.is_none() {
        return Err(SettingsError("--micro-batch-size is missing, and Megatron requires it".to_owned()));
    }
    if settings.global_batch.is_none() {
        settings.accumulation = Some(1);
        settings.assumed.push("no --global-batch-size: Megatron takes one micro-batch per rank".to_owned());
    }
    precision(&mut keys, &mut settings)?;
    recomputation(&mut keys, &mut settings)?;
    if keys.flag("optimizer-cpu-offload")?.is_some() {
        settings.offload.optimizer = Some(Tier::Host);
        let fraction = keys.text("optimizer-offload-fraction");
        if fraction.as_deref().is_some_and(|fraction| fraction.parse::<f64>() != Ok(1.0)) {
            settings.assumed.push("the optimizer is taken to lie on the host as a whole".to_owned());
        }
        keys.drop_all(&["use-precision-aware-optimizer"]);
    }
    keys.drop_all(MODEL);
    keys.drop_all(HARMLESS);
    keys.drop_all(LAUNCHERS);
    settings.unpriced.extend(keys.rest().into_iter().map(|key| format!("--{key}")));
    Ok(settings)
}

fn degrees(keys: &mut Keys, settings: &mut Settings) -> Result<(), SettingsError> {
    settings.tp = keys.degree("tensor-model-parallel-size")?.unwrap_or(1);
    settings.pp = keys.degree("pipeline-model-parallel-size")?.unwrap_or(1);
    settings.cp = keys.degree("context-parallel-size")?.unwrap_or(1);
    settings.ep = keys.degree("expert-model-parallel-size")?.unwrap_or(1);
    let expert_tensor: Option<u32> = keys.degree("expert-tensor-parallel-size")?;
    if expert_tensor.is_some_and(|degree| degree != settings.tp) {
        settings.assumed.push("experts are split over tensor ranks as everything else".to_owned());
    }
    let sequence = keys.flag("sequence-parallel")?.unwrap_or(false);
    settings.software.insert("sequence_parallel".to_owned(), sequence.into());
    let layers: Option<u32> = keys.degree("num-layers")?;
    let chunks = match (
        keys.degree("num-virtual-stages-per-pipeline-rank")?,
        keys.degree("num-layers-per-virtual-pipeline-stage")?,
    ) {
        (Some(chunks), _) => chunks,
        (None, Some(each)) => match layers {
            Some(layers) => (layers / settings.pp / each).max(1),
            None => return Err(SettingsError("--num-layers-per-virtual-pipeline-stage needs --num-layers".to_owned())),
        },
        (None, None) => 1,
    };
    let layout = keys.text("pipeline-model-parallel-layout");
    let stretches = layout.as_ref().map(|layout| layout.matches('|').count() as u32 + 1);
    let chunks = stretches.map_or(chunks, |stretches| (stretches / settings.pp).max(1));
    if chunks > 1 {
        settings.schedule = PipelineSchedule::Interleaved { chunks };
    }
    let counted = keys.flag("account-for-embedding-in-pipeline-split")?.unwrap_or(false)
        && keys.flag("account-for-loss-in-pipeline-split")?.unwrap_or(false);
    if layout.is_none() {
        let partition = if counted { "units" } else { "layers" };
        settings.software.insert("partition".to_owned(), partition.into());
    } else {
        settings.assumed.push("the layout of layers is taken to give stages equal work".to_owned());
    }
    Ok(())
}

fn sharding(keys: &mut Keys, settings: &mut Settings) -> Result<(), SettingsError> {
    let distributed = keys.flag("use-distributed-optimizer")?.unwrap_or(false);
    let fsdp = ["use-megatron-fsdp", "use-custom-fsdp"];
    let mut sharded = false;
    for name in fsdp {
        sharded |= keys.flag(name)?.unwrap_or(false);
    }
    let torch = keys.flag("use-torch-fsdp2")?.unwrap_or(false);
    let strategy = keys.text("data-parallel-sharding-strategy");
    settings.zero_stage = match strategy.as_deref() {
        _ if torch => 3,
        Some("no_shard") if sharded => 0,
        Some("optim") if sharded => 1,
        Some("optim_grads") if sharded => 2,
        Some("optim_grads_params") | None if sharded => 3,
        Some(other) if sharded => {
            return Err(SettingsError(format!("--data-parallel-sharding-strategy {other} is none that Megatron has")));
        }
        _ => u8::from(distributed),
    };
    if settings.zero_stage >= 2 {
        settings.reduce_schedule = ReduceSchedule::PerMicroBatch;
    }
    settings.dp_replicate = keys.degree("num-distributed-optimizer-instances")?;
    let overlap = keys.flag("overlap-grad-reduce")?.unwrap_or(false);
    settings.software.insert("overlap_reduce".to_owned(), overlap.into());
    let gathers = keys.flag("overlap-param-gather")?.unwrap_or(false);
    if settings.zero_stage == 1 && !gathers {
        settings.unpriced.push("parameters gathered after the update without overlap".to_owned());
    }
    keys.drop_all(&["no-gradient-accumulation-fusion", "ddp-bucket-size", "overlap-p2p", "no-overlap-p2p"]);
    Ok(())
}

fn precision(keys: &mut Keys, settings: &mut Settings) -> Result<(), SettingsError> {
    let (bf16, fp16) = (keys.flag("bf16")?.unwrap_or(false), keys.flag("fp16")?.unwrap_or(false));
    let (fp8, fp4) = (keys.text("fp8-format"), keys.text("fp4-format"));
    settings.format = Some(match (fp8, fp4) {
        (Some(_), _) => Format::Fp8,
        (_, Some(_)) => Format::Fp4,
        _ if bf16 => Format::Bf16,
        _ if fp16 => Format::Fp16,
        _ => Format::Fp32,
    });
    let in_16_bits = keys.flag("grad-reduce-in-bf16")?.unwrap_or(false);
    let in_32_bits = keys.flag("accumulate-allreduce-grads-in-fp32")?.unwrap_or(false);
    keys.drop_all(&["fp8-", "main-grads-dtype"]);
    let bytes = if in_16_bits || fp16 && !bf16 && !in_32_bits { 2 } else { 4 };
    let state = [("parameter", 2), ("master", 4), ("gradient", bytes), ("optimizer", 8), ("reduce", bytes)];
    let state: toml::Table = state.into_iter().map(|(key, n)| (key.to_owned(), toml::Value::Integer(n))).collect();
    settings.software.insert("state".to_owned(), state.into());
    Ok(())
}

fn recomputation(keys: &mut Keys, settings: &mut Settings) -> Result<(), SettingsError> {
    let granularity = match keys.flag("recompute-activations")? {
        Some(true) => Some("selective".to_owned()),
        _ => keys.text("recompute-granularity"),
    };
    let (method, layers) = (keys.text("recompute-method"), keys.degree("recompute-num-layers")?);
    settings.recompute = match (granularity.as_deref(), method.as_deref()) {
        (None, _) => Recompute::None,
        (Some("selective"), _) => Recompute::Selective,
        (Some("full"), Some("block")) => Recompute::SomeOfStretch(layers.unwrap_or(1)),
        (Some("full"), _) => {
            if layers.is_some_and(|layers| layers > 1) {
                settings.assumed.push("recomputation in groups of layers is taken to be layer by layer".to_owned());
            }
            Recompute::Full
        }
        (Some(other), _) => return Err(SettingsError(format!("--recompute-granularity {other}: full or selective"))),
    };
    Ok(())
}
