//! DeepSpeed's JSON (0.19: `deepspeed/runtime/config.py`, `runtime/zero/config.py`).

use super::take::Keys;
use super::{Dialect, Exported, Job, Recompute, Settings, SettingsError};
use serde_json::{Value, json};
use trainyard_program::{Mesh, Offload, PipelineSchedule, ReduceSchedule, Reshard, Tier};
use trainyard_sim::Format;

/// Writes the configuration. JSON has no comments, so everything else goes into what is unsaid.
pub(super) fn write(job: &Job<'_>) -> Exported {
    let mut unsaid = job.unsaid_everywhere();
    let candidate = job.candidate();
    let Mesh { pp, dp_replicate, dp_shard, cp, tp, ep, .. } = *job.mesh();
    let stage = candidate.layout().zero_stage;
    for (axis, degree) in [("pipeline", pp), ("context", cp), ("expert", ep)] {
        if degree > 1 {
            unsaid
                .push(format!("{axis} parallelism of degree {degree}: it stands in the model's code, not in the JSON"));
        }
    }
    if pp > 1 && candidate.pipeline != PipelineSchedule::OneForwardOneBackward {
        unsaid.push(format!("the schedule {}: DeepSpeed's pipeline runs 1F1B", candidate.pipeline));
    }
    if stage > 0 && dp_replicate > 1 {
        unsaid.push(format!("{dp_replicate} replicas of {dp_shard} shards: DeepSpeed shards over all ranks"));
    }
    if tp > 1 && job.software.sequence_parallel {
        unsaid.push("norms split with tensor parallelism".to_owned());
    }
    let mut zero = json!({
        "stage": stage,
        "overlap_comm": job.software.overlap_reduce,
        "contiguous_gradients": true,
        "reduce_scatter": true,
    });
    match candidate.reshard {
        Reshard::To(ranks) if stage == 3 => zero["zero_hpz_partition_size"] = json!(ranks),
        Reshard::Never if stage == 3 => {
            unsaid.push("parameters that stay gathered from forward to backward".to_owned())
        }
        _ => {}
    }
    if stage >= 2 && candidate.accumulation > 1 && candidate.reduce_schedule == ReduceSchedule::PerStep {
        unsaid.push("gradients summed once a step: these stages sum them after every micro-batch".to_owned());
    }
    let Offload { optimizer, parameters, activations, gradients } = candidate.offload;
    let cpu = || json!({"device": "cpu", "pin_memory": true});
    if optimizer == Some(Tier::Host) {
        zero["offload_optimizer"] = cpu();
        if gradients.is_none() && stage >= 2 {
            unsaid
                .push("gradients on the device: with offload_optimizer these stages keep them on the host".to_owned());
        }
    }
    if parameters == Some(Tier::Host) {
        zero["offload_param"] = cpu();
    }
    if activations.is_some() {
        unsaid.push("activations on the host".to_owned());
    }
    let mut root = json!({
        "train_batch_size": job.request.global_batch,
        "train_micro_batch_size_per_gpu": candidate.micro_batch,
        "gradient_accumulation_steps": candidate.accumulation,
        "bf16": {"enabled": matches!(candidate.format, Format::Bf16 | Format::Fp8 | Format::Fp4)},
        "fp16": {"enabled": candidate.format == Format::Fp16},
        "zero_optimization": zero,
    });
    if matches!(candidate.format, Format::Fp8 | Format::Fp4) {
        unsaid
            .push(format!("products in {}: they stand in the model's code; bf16 is written", candidate.format.name()));
    }
    if tp > 1 {
        root["tensor_parallel"] = json!({"autotp_size": tp});
    }
    let (full, selective) = (candidate.checkpointing.full, candidate.checkpointing.selective);
    if full > 0 {
        root["activation_checkpointing"] = json!({
            "partition_activations": false,
            "cpu_checkpointing": false,
            "contiguous_memory_optimization": false,
            "number_checkpoints": job.blocks(),
        });
        unsaid.push("recomputation is switched on in the script: gradient_checkpointing=True".to_owned());
        if full < job.blocks() {
            unsaid.push(format!("recomputation of only {full} of {} blocks", job.blocks()));
        }
    }
    if selective > 0 {
        unsaid.push(format!("selective recomputation of {selective} blocks"));
    }
    unsaid.push(format!("{} tokens a sequence: they stand in the script", job.request.sequence_length));
    let text = format!("{root:#}\n");
    Exported { text, unsaid }
}

/// Keys that change neither speed nor memory, by their beginning.
const HARMLESS: &[&str] = &[
    "optimizer",
    "scheduler",
    "steps_per_print",
    "wall_clock_breakdown",
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "dump_state",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "monitor",
    "comms_logger",
    "checkpoint",
    "data_types",
    "elasticity",
    "memory_breakdown",
    "zero_allow_untested_optimizer",
    "fp16.",
    "bf16.",
    "amp",
    "seed",
    "autotuning",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization.stage3_gather_",
    "zero_optimization.round_robin",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.ignore_unused",
    "zero_optimization.load_from",
    "zero_optimization.elastic",
    "zero_optimization.reduce_scatter",
    "zero_optimization.allgather_partitions",
    "communication_data_type",
];

/// Reads a configuration.
pub(super) fn read(text: &str) -> Result<Settings, SettingsError> {
    let value: Value = serde_json::from_str(text).map_err(|error| SettingsError(error.to_string()))?;
    if !value.is_object() {
        return Err(SettingsError("it is no JSON object".to_owned()));
    }
    let mut settings = Settings::new(Dialect::Deepspeed);
    read_value(&value, &mut settings)?;
    Ok(settings)
}

/// Reads the JSON, or the part of Accelerate's YAML with the same meaning, into `settings`.
pub(super) fn read_value(value: &Value, settings: &mut Settings) -> Result<(), SettingsError> {
    let mut keys = Keys::of(value);
    settings.stack = Dialect::Deepspeed.stack();
    let automatic = keys.automatic();
    if !automatic.is_empty() {
        let names = automatic.join(", ");
        settings.assumed.push(format!(
            "{names}: auto, which the training arguments fill in; taken from --precision, --global-batch and --fix, or \
             as DeepSpeed's defaults"
        ));
    }
    settings.global_batch = keys.degree("train_batch_size")?.map(u64::from);
    settings.micro_batch = keys.degree("train_micro_batch_size_per_gpu")?;
    settings.accumulation = keys.degree("gradient_accumulation_steps")?;
    if settings.accumulation.is_none() && !automatic.iter().any(|key| key == "gradient_accumulation_steps") {
        // DeepSpeed derives the third from the other two, and takes 1 if only one is given.
        let both = settings.micro_batch.is_some() && settings.global_batch.is_some();
        settings.accumulation = if both { None } else { Some(1) };
    }
    let (bf16, fp16) = (keys.flag("bf16.enabled")?, keys.flag("fp16.enabled")?);
    let unsaid = automatic.iter().any(|key| key.ends_with("16.enabled"));
    settings.format = match (bf16, fp16) {
        (Some(true), _) => Some(Format::Bf16),
        (_, Some(true)) => Some(Format::Fp16),
        _ if unsaid => None,
        _ => Some(Format::Fp32),
    };
    zero(&mut keys, settings)?;
    settings.tp = keys.degree("tensor_parallel.autotp_size")?.unwrap_or(1);
    keys.drop_all(&["tensor_parallel."]);
    if let Some(sp) = keys.degree("sequence_parallel_size")?.filter(|sp| *sp > 1) {
        settings.cp = sp;
        settings.unpriced.push(format!("Ulysses exchanges over {sp} ranks (priced as context parallelism)"));
    }
    if keys.has("activation_checkpointing.") {
        settings.recompute = Recompute::Full;
        settings
            .assumed
            .push("every block recomputes its forward, because there is a section activation_checkpointing".to_owned());
        if keys.flag("activation_checkpointing.cpu_checkpointing")?.unwrap_or(false) {
            settings.offload.activations = Some(Tier::Host);
        }
        if keys.flag("activation_checkpointing.partition_activations")?.unwrap_or(false) {
            settings.unpriced.push("activation_checkpointing.partition_activations".to_owned());
        }
        keys.drop_all(&["activation_checkpointing."]);
    } else {
        settings.assumed.push(
            "nothing is recomputed: say --fix checkpointing=full if the script sets gradient_checkpointing".to_owned(),
        );
    }
    keys.drop_all(HARMLESS);
    settings.unpriced.extend(keys.rest());
    Ok(())
}

fn zero(keys: &mut Keys, settings: &mut Settings) -> Result<(), SettingsError> {
    let key = |name: &str| format!("zero_optimization.{name}");
    let stage: u32 = keys.number(&key("stage"))?.unwrap_or(0);
    if stage > 3 {
        return Err(SettingsError(format!("`zero_optimization.stage` is {stage}, and the last one is 3")));
    }
    settings.zero_stage = stage as u8;
    if stage >= 2 {
        settings.reduce_schedule = ReduceSchedule::PerMicroBatch;
    }
    // Stage 3 overlaps unless told otherwise; the others do not.
    let overlap = keys.flag(&key("overlap_comm"))?.unwrap_or(stage == 3);
    settings.software.insert("overlap_reduce".to_owned(), overlap.into());
    if let Some(ranks) = keys.degree(&key("zero_hpz_partition_size"))?.filter(|ranks| *ranks > 1) {
        settings.reshard = Reshard::To(ranks);
        settings.prefetch = 2;
    }
    if let Some(ranks) = keys.degree(&key("mics_shard_size"))? {
        settings.dp_shard = Some(ranks);
        settings.assumed.push(format!("MiCS groups of {ranks} ranks, which DeepSpeed had until 0.18"));
    }
    let mut device = |name: &str| {
        let device = keys.text(&key(&format!("{name}.device")));
        keys.drop_all(&[&key(&format!("{name}."))]);
        device.filter(|device| device != "none")
    };
    let (optimizer, parameters) = (device("offload_optimizer"), device("offload_param"));
    for (device, name) in [(&optimizer, "offload_optimizer"), (&parameters, "offload_param")] {
        if device.as_deref() == Some("nvme") {
            settings.unpriced.push(format!("{name} to NVMe (priced as the host's memory)"));
        }
    }
    if optimizer.is_some() {
        settings.offload.optimizer = Some(Tier::Host);
        settings.offload.gradients = (stage >= 2).then_some(Tier::Host);
    }
    settings.offload.parameters = parameters.map(|_| Tier::Host);
    let (reduce, gather): (Option<f64>, Option<f64>) = (
        keys.number::<u64>(&key("reduce_bucket_size"))?.map(|n| n as f64),
        keys.number::<u64>(&key("allgather_bucket_size"))?.map(|n| n as f64),
    );
    if let (Some(elements), _) | (None, Some(elements)) = (reduce, gather) {
        // Two buffers of 16-bit elements.
        settings.software.insert("buckets_gb".to_owned(), (4.0 * elements / 1e9).into());
    }
    keys.drop_all(&[
        &key("stage3_prefetch_bucket_size"),
        &key("stage3_param_persistence_threshold"),
        &key("stage3_max_live_parameters"),
        &key("stage3_max_reuse_distance"),
        &key("sub_group_size"),
        &key("stage3_"),
    ]);
    Ok(())
}
