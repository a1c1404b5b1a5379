//! torchtitan's TOML (0.2.2, the last release that reads it).

use super::take::Keys;
use super::{Dialect, Exported, Job, Recompute, Settings, SettingsError};
use crate::Candidate;
use std::fmt::Write as _;
use trainyard_program::{Mesh, Offload, PipelineSchedule, ReduceSchedule, Reshard, Tier};
use trainyard_sim::Format;

/// torchtitan's names of models by width, blocks and vocabulary.
const FLAVORS: [(u32, u32, u32, &str, &str); 9] = [
    (4096, 32, 128_256, "llama3", "8B"),
    (8192, 80, 128_256, "llama3", "70B"),
    (16384, 126, 128_256, "llama3", "405B"),
    (1024, 28, 151_936, "qwen3", "0.6B"),
    (2048, 28, 151_936, "qwen3", "1.7B"),
    (2560, 36, 151_936, "qwen3", "4B"),
    (4096, 36, 151_936, "qwen3", "8B"),
    (5120, 64, 151_936, "qwen3", "32B"),
    (2048, 48, 151_936, "qwen3", "30B-A3B"),
];

/// Writes the configuration.
pub(super) fn write(job: &Job<'_>) -> Exported {
    let mut unsaid = job.unsaid_everywhere();
    let candidate = job.candidate();
    let (nodes, each) = job.nodes();
    let mut text = String::new();
    for line in job.header() {
        let _ = writeln!(text, "# {line}");
    }
    let _ =
        writeln!(text, "# Run on {nodes} nodes of {each} devices. Data, optimizer and learning rate are yours to add.");
    model(job, &mut text, &mut unsaid);
    let pp = job.mesh().pp;
    // A pipeline's micro-batches are parts of the local batch.
    let local = if pp > 1 { candidate.micro_batch * candidate.accumulation } else { candidate.micro_batch };
    let dtype = match candidate.format {
        Format::Fp32 | Format::Tf32 => "float32",
        _ => "bfloat16",
    };
    match candidate.format {
        Format::Fp16 => unsaid.push("products in fp16: torchtitan has bf16, which is written instead".to_owned()),
        Format::Fp4 => unsaid.push("products in fp4".to_owned()),
        _ => {}
    }
    let offload = candidate.offload;
    let everything = Offload { activations: None, ..offload };
    let host = Some(Tier::Host);
    let all = Offload { optimizer: host, gradients: host, parameters: host, activations: None };
    if everything != Offload::default() && everything != all {
        unsaid.push("optimizer or gradients alone on the host: enable_cpu_offload moves parameters too".to_owned());
    }
    if offload.activations.is_some() {
        unsaid.push("activations on the host".to_owned());
    }
    let _ = write!(
        text,
        "\n[training]\nlocal_batch_size = {local}\nglobal_batch_size = {}\nseq_len = {}\nmixed_precision_param = \"{dtype}\"\n\
         mixed_precision_reduce = \"float32\"\nenable_cpu_offload = {}\n",
        job.request.global_batch,
        job.request.sequence_length,
        everything != Offload::default(),
    );
    parallelism(job, &mut text, &mut unsaid);
    checkpoint(job, &mut text, &mut unsaid);
    let compiled = job.software.dispatch == trainyard_sim::Dispatch::Compiled;
    let _ = write!(text, "\n[compile]\nenable = {compiled}\n");
    if candidate.format == Format::Fp8 {
        text += "\n[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\nprecompute_float8_dynamic_scale_for_fsdp = true\n";
    }
    Exported { text, unsaid }
}

fn model(job: &Job<'_>, text: &mut String, unsaid: &mut Vec<String>) {
    let model = &job.request.model;
    let known = FLAVORS
        .iter()
        .find(|(dim, layers, vocab, ..)| (*dim, *layers, *vocab) == (model.dim, model.layers, model.vocab));
    match known {
        Some((.., name, flavor)) => {
            let _ = write!(text, "\n[model]\nname = \"{name}\"\nflavor = \"{flavor}\"\n");
        }
        None => {
            unsaid
                .push("the model: torchtitan has no flavor of these sizes; set model.name and model.flavor".to_owned());
            text.push_str("\n[model]\n");
        }
    }
    if job.candidate().format == Format::Fp8 {
        text.push_str("converters = [\"float8\"]\n");
    }
}

fn parallelism(job: &Job<'_>, text: &mut String, unsaid: &mut Vec<String>) {
    let candidate = job.candidate();
    let Mesh { pp, dp_replicate, dp_shard, cp, tp, ep, .. } = *job.mesh();
    let stage = candidate.layout().zero_stage;
    let reshard = match candidate.reshard {
        _ if pp > 1 || stage < 3 => "never",
        Reshard::Always => "always",
        Reshard::Never => "never",
        Reshard::To(n) => {
            unsaid.push(format!("resharding to {n} ranks: torchtitan reshards to all, which is written instead"));
            "always"
        }
    };
    if stage == 1 || stage == 2 {
        unsaid.push(format!(
            "ZeRO-{stage}: torchtitan shards parameters too; FSDP2 that keeps them gathered is written instead"
        ));
    }
    if stage == 3 && pp > 1 && candidate.reshard != Reshard::Never {
        unsaid.push("parameters released after every pass of a pipeline".to_owned());
    }
    if tp > 1 && !job.software.sequence_parallel {
        unsaid.push("tensor parallelism without split norms: torchtitan splits them".to_owned());
    }
    sums(candidate, unsaid);
    let _ = write!(
        text,
        "\n[parallelism]\ndata_parallel_replicate_degree = {dp_replicate}\ndata_parallel_shard_degree = {dp_shard}\n\
         fsdp_reshard_after_forward = \"{reshard}\"\ntensor_parallel_degree = {tp}\ncontext_parallel_degree = {cp}\n\
         pipeline_parallel_degree = {pp}\n",
    );
    if ep > 1 {
        let _ = writeln!(text, "expert_parallel_degree = {ep}\nexpert_tensor_parallel_degree = {tp}");
    }
    if pp > 1 {
        let schedule = match candidate.pipeline {
            PipelineSchedule::GPipe => "GPipe",
            PipelineSchedule::OneForwardOneBackward => "1F1B",
            PipelineSchedule::Interleaved { .. } => "Interleaved1F1B",
            PipelineSchedule::ZeroBubbleV => "ZBVZeroBubble",
            PipelineSchedule::DualPipeV => "DualPipeV",
            PipelineSchedule::ZeroBubble => {
                unsaid.push("the schedule ZB-H1: 1F1B is written instead".to_owned());
                "1F1B"
            }
        };
        let _ = writeln!(text, "pipeline_parallel_schedule = \"{schedule}\"");
        let _ = writeln!(text, "pipeline_parallel_microbatch_size = {}", candidate.micro_batch);
        let blocks = job.blocks();
        let name = |unit: u32| match unit {
            0 => vec!["tok_embeddings".to_owned()],
            unit if unit > blocks => vec!["norm".to_owned(), "output".to_owned()],
            unit => vec![format!("layers.{}", unit - 1)],
        };
        let _ = writeln!(text, "module_fqns_per_model_part = [");
        for units in job.stretch_units() {
            let names: Vec<String> = units.flat_map(name).map(|name| format!("\"{name}\"")).collect();
            let _ = writeln!(text, "  [{}],", names.join(", "));
        }
        text.push_str("]\n");
    }
}

/// Says where gradients are summed at other times than the plan's.
fn sums(candidate: &Candidate, unsaid: &mut Vec<String>) {
    let many = candidate.accumulation > 1 && candidate.layout().zero_stage >= 2;
    let per_step = candidate.reduce_schedule == ReduceSchedule::PerStep;
    if many && candidate.mesh.pp == 1 && per_step {
        unsaid.push("gradients summed once a step: torchtitan sums them after every micro-batch".to_owned());
    }
    if many && candidate.mesh.pp > 1 && !per_step {
        unsaid.push("gradients summed after every micro-batch: in a pipeline torchtitan sums them once".to_owned());
    }
}

fn checkpoint(job: &Job<'_>, text: &mut String, unsaid: &mut Vec<String>) {
    let (full, selective) = (job.candidate().checkpointing.full, job.candidate().checkpointing.selective);
    let blocks = job.blocks();
    text.push_str("\n[activation_checkpoint]\n");
    match (full, selective) {
        (0, 0) => text.push_str("mode = \"none\"\n"),
        (0, _) => text.push_str("mode = \"selective\"\nselective_ac_option = \"op\"\n"),
        (full, _) if full == blocks => text.push_str("mode = \"full\"\n"),
        (full, selective) => {
            let n = (2..=blocks).find(|n| blocks / n <= full).unwrap_or(2);
            let _ = write!(text, "mode = \"selective\"\nselective_ac_option = \"{n}\"\n");
            if selective > 0 || blocks / n != full {
                unsaid.push(format!(
                    "full recomputation of {full} blocks and selective of {selective}: every {n}th block is written instead"
                ));
            }
        }
    }
}

/// Keys that change neither speed nor memory, by their beginning.
const HARMLESS: &[&str] = &[
    "job.",
    "profiling.",
    "metrics.",
    "checkpoint.",
    "optimizer.",
    "lr_scheduler.",
    "validation.",
    "comm.",
    "debug.",
    "experimental.",
    "fault_tolerance.",
    "memory_estimation.",
    "model.hf_assets_path",
    "model.tokenizer_path",
    "model.print_after",
    "model.name",
    "model.flavor",
    "model.norm_type",
    "training.dataset",
    "training.max_norm",
    "training.steps",
    "training.gc_",
    "training.seed",
    "training.deterministic",
    "training.dataloader",
    "training.warmup",
    "parallelism.context_parallel_load_balancer",
    "parallelism.pipeline_parallel_split_points",
    "training.data_parallel",
    "activation_checkpoint.per_op",
];

/// Reads a configuration.
pub(super) fn read(text: &str) -> Result<Settings, SettingsError> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| SettingsError(error.to_string()))?;
    let value = serde_json::to_value(&table).map_err(|error| SettingsError(error.to_string()))?;
    let mut keys = Keys::of(&value);
    if !["parallelism.", "training.", "model."].iter().any(|section| keys.has(section)) {
        return Err(SettingsError("it has none of the sections [model], [training] and [parallelism]".to_owned()));
    }
    let mut settings = Settings::new(Dialect::Torchtitan);
    parallel(&mut keys, &mut settings)?;
    batch(&mut keys, &mut settings)?;
    let compiled = keys.flag("compile.enable")?.or(keys.flag("training.compile")?).unwrap_or(false);
    let dispatch = if compiled { "compiled" } else { "eager" };
    settings.software.insert("dispatch".to_owned(), dispatch.into());
    settings.software.insert("fused".to_owned(), compiled.into());
    keys.drop_all(&["compile."]);
    let mode = keys.text("activation_checkpoint.mode").unwrap_or_else(|| "selective".to_owned());
    let option = keys.text("activation_checkpoint.selective_ac_option").unwrap_or_else(|| "2".to_owned());
    settings.recompute = match (mode.as_str(), option.as_str()) {
        ("none", _) => Recompute::None,
        ("full", _) => Recompute::Full,
        ("selective", "op") => Recompute::Selective,
        ("selective", n) => match n.parse() {
            Ok(1) => Recompute::Full,
            Ok(n) if n > 1 => Recompute::EveryNth(n),
            _ => return Err(SettingsError(format!("`selective_ac_option` is {n}: op, or a number from 1"))),
        },
        ("memory_budget", _) => {
            settings.unpriced.push("activation_checkpoint.mode = memory_budget (priced as selective)".to_owned());
            Recompute::Selective
        }
        (other, _) => return Err(SettingsError(format!("`activation_checkpoint.mode` is {other}"))),
    };
    keys.drop_all(HARMLESS);
    settings.unpriced.extend(keys.rest());
    Ok(settings)
}

fn parallel(keys: &mut Keys, settings: &mut Settings) -> Result<(), SettingsError> {
    let mut degree = |name: &str| keys.degree(&format!("parallelism.{name}"));
    settings.tp = degree("tensor_parallel_degree")?.unwrap_or(1);
    settings.pp = degree("pipeline_parallel_degree")?.unwrap_or(1);
    settings.cp = degree("context_parallel_degree")?.unwrap_or(1);
    settings.ep = degree("expert_parallel_degree")?.unwrap_or(1);
    let replicate = degree("data_parallel_replicate_degree")?;
    let shard = degree("data_parallel_shard_degree")?;
    settings.dp_replicate = replicate;
    settings.dp_shard = shard;
    // A shard degree of 1 leaves replicas, unless a sequence is split, which shards too.
    settings.zero_stage = if shard == Some(1) && settings.cp == 1 { 0 } else { 3 };
    let reshard = keys.text("parallelism.fsdp_reshard_after_forward").unwrap_or_else(|| "default".to_owned());
    settings.reshard = match reshard.as_str() {
        "always" => Reshard::Always,
        "never" => Reshard::Never,
        "default" if settings.pp > 1 => Reshard::Never,
        "default" => Reshard::Always,
        other => {
            return Err(SettingsError(format!("`fsdp_reshard_after_forward` is {other}: default, always or never")));
        }
    };
    let once = settings.pp > 1;
    settings.reduce_schedule = if once { ReduceSchedule::PerStep } else { ReduceSchedule::PerMicroBatch };
    let schedule = keys.text("parallelism.pipeline_parallel_schedule").unwrap_or_else(|| "1F1B".to_owned());
    let parts = keys.text("parallelism.module_fqns_per_model_part");
    let layers: Option<u32> = keys.degree("parallelism.pipeline_parallel_layers_per_stage")?;
    let chunks = match &parts {
        Some(parts) => (parts.matches('[').count() as u32).saturating_sub(1) / settings.pp,
        None => 2,
    };
    settings.schedule = match schedule.to_lowercase().as_str() {
        "1f1b" => PipelineSchedule::OneForwardOneBackward,
        "gpipe" => PipelineSchedule::GPipe,
        "interleaved1f1b" => PipelineSchedule::Interleaved { chunks: chunks.max(2) },
        "zbvzerobubble" => PipelineSchedule::ZeroBubbleV,
        "dualpipev" => PipelineSchedule::DualPipeV,
        other => return Err(SettingsError(format!("the pipeline schedule {other} is not known here"))),
    };
    if settings.pp > 1 && parts.is_none() {
        settings.software.insert("partition".to_owned(), "units".into());
        if let Some(layers) = layers.filter(|_| matches!(settings.schedule, PipelineSchedule::Interleaved { .. })) {
            settings
                .assumed
                .push(format!("two chunks a stage, whatever `pipeline_parallel_layers_per_stage` = {layers} makes"));
        }
    }
    keys.drop_all(&[
        "parallelism.pipeline_parallel_first_stage",
        "parallelism.pipeline_parallel_last_stage",
        "parallelism.expert_tensor_parallel_degree",
        "parallelism.context_parallel_rotate_method",
    ]);
    Ok(())
}

fn batch(keys: &mut Keys, settings: &mut Settings) -> Result<(), SettingsError> {
    let local: u32 = match keys.degree("training.local_batch_size")?.or(keys.degree("training.batch_size")?) {
        Some(local) => local,
        None => {
            settings.assumed.push("local_batch_size is torchtitan's default, 8".to_owned());
            8
        }
    };
    let micro: u32 = keys.degree("parallelism.pipeline_parallel_microbatch_size")?.unwrap_or(1);
    settings.micro_batch = Some(if settings.pp > 1 { micro } else { local });
    settings.global_batch = keys.degree("training.global_batch_size")?.map(u64::from);
    if settings.global_batch.is_none() {
        settings.accumulation = Some(if settings.pp > 1 { local / micro.max(1) } else { 1 });
        settings
            .assumed
            .push("no global_batch_size: torchtitan takes one local batch per data-parallel rank".to_owned());
    }
    settings.sequence_length = Some(keys.number("training.seq_len")?.unwrap_or(2048));
    let param = keys.text("training.mixed_precision_param").unwrap_or_else(|| "bfloat16".to_owned());
    let dtype = keys.text("training.dtype");
    keys.drop_all(&["training.mixed_precision_reduce"]);
    let converters = keys.text("model.converters").unwrap_or_default();
    settings.format = Some(match (converters.contains("float8"), converters.contains("mx"), param.as_str()) {
        (true, ..) | (_, true, _) => Format::Fp8,
        (.., "bfloat16") => Format::Bf16,
        (.., "float32") => Format::Fp32,
        (.., other) => return Err(SettingsError(format!("`mixed_precision_param` is {other}"))),
    });
    if settings.format == Some(Format::Fp8) {
        keys.drop_all(&["quantize.", "float8."]);
    }
    if dtype.as_deref() == Some("bfloat16") {
        settings.unpriced.push("training.dtype = bfloat16 (state is priced in f32)".to_owned());
    }
    if keys.flag("training.enable_cpu_offload")?.unwrap_or(false) {
        let host = Some(Tier::Host);
        settings.offload = Offload { optimizer: host, gradients: host, parameters: host, activations: None };
    }
    Ok(())
}
