//! Accelerate's YAML (1.15: `commands/config/config_args.py`, `parallelism_config.py`).
//!
//! The YAML says nothing about the batch. What stands in the training script is written as comments
//! of the form `# --per_device_train_batch_size 2`, which `read` reads as well.

use super::take::Keys;
use super::{Dialect, Exported, Job, Recompute, Settings, SettingsError, deepspeed, shell};
use serde_json::{Map, Value};
use std::fmt::Write as _;
use trainyard_program::{Mesh, Offload, ReduceSchedule, Reshard, Tier};
use trainyard_sim::Format;
use yaml_rust2::{Yaml, YamlLoader};

/// Writes the configuration.
pub(super) fn write(job: &Job<'_>) -> Exported {
    let mut unsaid = job.unsaid_everywhere();
    let candidate = job.candidate();
    let Mesh { pp, dp_replicate, dp_shard, cp, tp, ep, .. } = *job.mesh();
    let (nodes, _) = job.nodes();
    let stage = candidate.layout().zero_stage;
    let mut text = String::new();
    for line in job.header() {
        let _ = writeln!(text, "# {line}");
    }
    let _ = write!(
        text,
        "# These stand in the training script, as Hugging Face's TrainingArguments call them:\n\
         # --per_device_train_batch_size {}\n# --gradient_accumulation_steps {}\n# --max_length {}\n",
        candidate.micro_batch, candidate.accumulation, job.request.sequence_length
    );
    for (axis, degree) in [("pipeline", pp), ("expert", ep)] {
        if degree > 1 {
            unsaid.push(format!("{axis} parallelism of degree {degree}"));
        }
    }
    let sharded = stage > 0 || tp > 1 || cp > 1;
    let precision = match candidate.format {
        Format::Fp32 | Format::Tf32 => "\"no\"",
        Format::Fp16 => "fp16",
        Format::Bf16 => "bf16",
        Format::Fp8 => "fp8",
        Format::Fp4 => {
            unsaid.push("products in fp4: bf16 is written instead".to_owned());
            "bf16"
        }
    };
    let kind = if sharded {
        "FSDP"
    } else if job.mesh().ranks() > 1 {
        "MULTI_GPU"
    } else {
        "\"NO\""
    };
    let _ = write!(
        text,
        "compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nmixed_precision: {precision}\nnum_machines: {nodes}\n\
         machine_rank: 0\nnum_processes: {}\nrdzv_backend: c10d\n",
        job.mesh().ranks()
    );
    if stage == 1 || stage == 2 {
        unsaid.push(format!("ZeRO-{stage}: FSDP2 shards parameters too; it is written with parameters kept gathered"));
    }
    let (full, selective) = (candidate.checkpointing.full, candidate.checkpointing.selective);
    if selective > 0 {
        unsaid.push(format!("selective recomputation of {selective} blocks"));
    }
    if full > 0 && full < job.blocks() {
        unsaid.push(format!("recomputation of only {full} of {} blocks: all recompute", job.blocks()));
    }
    let Offload { optimizer, parameters, activations, gradients } = candidate.offload;
    let offloaded = optimizer.is_some() || parameters.is_some() || gradients.is_some();
    if offloaded && (optimizer.is_none() || parameters.is_none()) {
        unsaid.push("optimizer or gradients alone on the host: fsdp_offload_params moves parameters too".to_owned());
    }
    if activations.is_some() {
        unsaid.push("activations on the host".to_owned());
    }
    if sharded {
        let always = stage == 3 && candidate.reshard != Reshard::Never;
        if let Reshard::To(ranks) = candidate.reshard
            && stage == 3
        {
            unsaid.push(format!("resharding to {ranks} ranks: FSDP2 reshards to all, which is written instead"));
        }
        if stage >= 2 && candidate.accumulation > 1 && candidate.reduce_schedule == ReduceSchedule::PerMicroBatch {
            unsaid.push(
                "gradients summed after every micro-batch: accumulate() sums them once, but for sync_each_batch"
                    .to_owned(),
            );
        }
        let _ = write!(
            text,
            "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: {always}\n  \
             fsdp_activation_checkpointing: {}\n  fsdp_offload_params: {offloaded}\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n  \
             fsdp_cpu_ram_efficient_loading: true\n",
            full > 0
        );
        let replicas = if dp_replicate > 1 && dp_shard == 1 && stage == 0 {
            unsaid.push(
                "replicas beside tensor parallelism: accelerate wants them sharded, and so they are written".to_owned(),
            );
            (1, dp_replicate)
        } else {
            (dp_replicate, dp_shard)
        };
        let _ = write!(
            text,
            "parallelism_config:\n  parallelism_config_dp_replicate_size: {}\n  parallelism_config_dp_shard_size: {}\n  \
             parallelism_config_tp_size: {tp}\n  parallelism_config_cp_size: {cp}\n",
            replicas.0, replicas.1
        );
    } else if full > 0 {
        let _ = writeln!(text, "# --gradient_checkpointing true");
    }
    Exported { text, unsaid }
}

/// Keys that change neither speed nor memory, by their beginning.
const HARMLESS: &[&str] = &[
    "compute_environment",
    "debug",
    "downcast_bf16",
    "enable_cpu_affinity",
    "gpu_ids",
    "machine_rank",
    "main_",
    "num_machines",
    "rdzv_backend",
    "same_network",
    "tpu_",
    "use_cpu",
    "fsdp_config.fsdp_auto_wrap_policy",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    "fsdp_config.fsdp_state_dict_type",
    "fsdp_config.fsdp_use_orig_params",
    "fsdp_config.fsdp_sync_module_states",
    "fsdp_config.fsdp_cpu_ram_efficient_loading",
    "fsdp_config.fsdp_min_num_params",
    "fsdp_config.fsdp_version",
    "fsdp_config.fsdp_backward_prefetch",
    "fsdp_config.fsdp_forward_prefetch",
    "command",
    "tpu_env",
    "mpirun_config",
    "megatron_lm_config.megatron_lm_gradient_clipping",
    "parallelism_config.parallelism_config_cp_comm",
    "parallelism_config.parallelism_config_cp_backend",
    "fp8_config",
    "main_training_function",
    "use_parallelism_config",
];

/// Reads a configuration, in YAML or JSON.
pub(super) fn read(text: &str) -> Result<Settings, SettingsError> {
    let value = yaml(text)?;
    let mut settings = Settings::new(Dialect::Accelerate);
    let mut keys = Keys::of(&value);
    let Some(kind) = keys.text("distributed_type") else {
        return Err(SettingsError("it has no `distributed_type`".to_owned()));
    };
    script(text, &mut settings)?;
    settings.devices = keys.degree("num_processes")?;
    settings.format = match keys.text("mixed_precision").as_deref() {
        Some("bf16") => Some(Format::Bf16),
        Some("fp16") => Some(Format::Fp16),
        Some("fp8") => Some(Format::Fp8),
        Some("no") | Some("false") => Some(Format::Fp32),
        Some(other) => return Err(SettingsError(format!("`mixed_precision` is {other}: no, fp16, bf16 or fp8"))),
        None => None,
    };
    match kind.as_str() {
        "FSDP" => fsdp(&mut keys, &mut settings)?,
        "DEEPSPEED" => return through_deepspeed(&value, settings),
        "MEGATRON_LM" => megatron(&mut keys, &mut settings)?,
        "MULTI_GPU" | "NO" | "no" => {}
        other => return Err(SettingsError(format!("`distributed_type` is {other}, which is not planned for"))),
    }
    if let Some(backend) =
        keys.text("dynamo_config.dynamo_backend").filter(|backend| !backend.eq_ignore_ascii_case("no"))
    {
        settings.software.insert("dispatch".to_owned(), "compiled".into());
        settings.software.insert("fused".to_owned(), true.into());
        settings.assumed.push(format!("torch.compile with {backend} fuses what torchtitan's does"));
    }
    keys.drop_all(&["dynamo_config."]);
    keys.drop_all(HARMLESS);
    settings.unpriced.extend(keys.rest());
    Ok(settings)
}

/// Reads what comments say about the training script.
fn script(text: &str, settings: &mut Settings) -> Result<(), SettingsError> {
    let comments = text.lines().filter_map(|line| line.trim_start().strip_prefix('#')).map(str::trim);
    let options: Vec<&str> = comments.filter(|comment| comment.starts_with("--")).collect();
    let mut keys = Keys::of_pairs(shell::options(&options.join(" ")));
    settings.micro_batch = keys.degree("per_device_train_batch_size")?;
    settings.accumulation = keys.degree("gradient_accumulation_steps")?;
    settings.sequence_length = keys.number("max_length")?.or(keys.number("max_seq_length")?);
    if keys.flag("gradient_checkpointing")?.unwrap_or(false) {
        settings.recompute = Recompute::Full;
    }
    settings.unpriced.extend(keys.rest().into_iter().map(|key| format!("--{key}")));
    Ok(())
}

fn fsdp(keys: &mut Keys, settings: &mut Settings) -> Result<(), SettingsError> {
    let key = |name: &str| format!("fsdp_config.fsdp_{name}");
    settings.zero_stage = 3;
    let strategy = keys.text(&key("sharding_strategy"));
    let reshard = keys.text(&key("reshard_after_forward"));
    let word = reshard.or(strategy).unwrap_or_else(|| "FULL_SHARD".to_owned());
    let (stage, reshard, hybrid) = match word.to_uppercase().as_str() {
        "TRUE" | "FULL_SHARD" | "1" => (3, Reshard::Always, false),
        "FALSE" | "SHARD_GRAD_OP" | "2" => (3, Reshard::Never, false),
        "NO_SHARD" | "3" => (0, Reshard::Always, false),
        "HYBRID_SHARD" | "4" => (3, Reshard::Always, true),
        "HYBRID_SHARD_ZERO2" | "5" => (3, Reshard::Never, true),
        other => return Err(SettingsError(format!("`fsdp_reshard_after_forward` is {other}"))),
    };
    (settings.zero_stage, settings.reshard) = (stage, reshard);
    if keys.flag(&key("activation_checkpointing"))?.unwrap_or(false) {
        settings.recompute = Recompute::Full;
    }
    if keys.flag(&key("offload_params"))?.unwrap_or(false) {
        let host = Some(Tier::Host);
        settings.offload = Offload { optimizer: host, gradients: host, parameters: host, activations: None };
    }
    let mut degree = |name: &str| keys.degree(&format!("parallelism_config.parallelism_config_{name}_size"));
    settings.dp_replicate = degree("dp_replicate")?;
    settings.dp_shard = degree("dp_shard")?;
    settings.tp = degree("tp")?.unwrap_or(1);
    settings.cp = degree("cp")?.unwrap_or(1);
    if let Some(sp) = degree("sp")?.filter(|sp| *sp > 1) {
        settings.cp = sp;
        settings.unpriced.push(format!("Ulysses exchanges over {sp} ranks (priced as context parallelism)"));
    }
    let processes = settings.devices.unwrap_or(1);
    let divides = settings.model_ranks().is_some_and(|ranks| processes.is_multiple_of(ranks));
    if hybrid && settings.dp_shard.is_none() {
        settings.dp_shard = Some(8.min(processes));
        settings.assumed.push("hybrid sharding: a node of 8 devices shares a state".to_owned());
    }
    if settings.dp_shard.is_none() && settings.dp_replicate.is_none() && divides {
        settings.dp_replicate = Some(1);
    }
    Ok(())
}

fn megatron(keys: &mut Keys, settings: &mut Settings) -> Result<(), SettingsError> {
    let key = |name: &str| format!("megatron_lm_config.megatron_lm_{name}");
    settings.stack = Dialect::Megatron.stack();
    settings.tp = keys.degree(&key("tp_degree"))?.unwrap_or(1);
    settings.pp = keys.degree(&key("pp_degree"))?.unwrap_or(1);
    settings.accumulation = keys.degree(&key("num_micro_batches"))?.or(settings.accumulation);
    settings.zero_stage = u8::from(keys.flag(&key("use_distributed_optimizer"))?.unwrap_or(false));
    let split = keys.flag(&key("sequence_parallelism"))?.unwrap_or(false);
    settings.software.insert("sequence_parallel".to_owned(), split.into());
    settings.software.insert("partition".to_owned(), "layers".into());
    if keys.flag(&key("recompute_activations"))?.unwrap_or(false) {
        settings.recompute = Recompute::Selective;
    }
    Ok(())
}

/// Reads the section `deepspeed_config`, whose keys are DeepSpeed's with other names.
fn through_deepspeed(value: &Value, settings: Settings) -> Result<Settings, SettingsError> {
    let empty = Value::Object(Map::new());
    let section = value.get("deepspeed_config").unwrap_or(&empty);
    let text = |key: &str| section.get(key).cloned().unwrap_or(Value::Null);
    let mut json = serde_json::json!({
        "gradient_accumulation_steps": text("gradient_accumulation_steps"),
        "zero_optimization": {
            "stage": text("zero_stage"),
            "offload_optimizer": {"device": text("offload_optimizer_device")},
            "offload_param": {"device": text("offload_param_device")},
        },
    });
    if let Some(file) = section.get("deepspeed_config_file") {
        return Err(SettingsError(format!("its settings stand in {file}: give that file to --from")));
    }
    match settings.format {
        Some(Format::Bf16) => json["bf16"] = serde_json::json!({"enabled": true}),
        Some(Format::Fp16) => json["fp16"] = serde_json::json!({"enabled": true}),
        _ => {}
    }
    if let Some(micro) = settings.micro_batch {
        json["train_micro_batch_size_per_gpu"] = micro.into();
    }
    let mut read = Settings { dialect: Dialect::Accelerate, ..settings };
    deepspeed::read_value(&json, &mut read)?;
    read.format = read.format.filter(|_| settings_say_precision(value));
    if read.micro_batch.is_none() {
        // The script's batch is not known, so its accumulation says nothing alone.
        read.assumed.push("per_device_train_batch_size stands in the script".to_owned());
    }
    Ok(read)
}

fn settings_say_precision(value: &Value) -> bool {
    value.get("mixed_precision").is_some()
}

/// The YAML as JSON.
fn yaml(text: &str) -> Result<Value, SettingsError> {
    fn convert(yaml: &Yaml) -> Value {
        match yaml {
            Yaml::Real(text) | Yaml::String(text) => Value::String(text.clone()),
            Yaml::Integer(number) => (*number).into(),
            Yaml::Boolean(value) => (*value).into(),
            Yaml::Array(items) => items.iter().map(convert).collect(),
            Yaml::Hash(entries) => {
                let key = |key: &Yaml| key.as_str().map(str::to_owned).unwrap_or_default();
                Value::Object(entries.iter().map(|(name, value)| (key(name), convert(value))).collect())
            }
            Yaml::Alias(_) | Yaml::Null | Yaml::BadValue => Value::Null,
        }
    }
    let documents = YamlLoader::load_from_str(text).map_err(|error| SettingsError(error.to_string()))?;
    match documents.first().map(convert) {
        Some(value) if value.is_object() => Ok(value),
        _ => Err(SettingsError("it is no mapping of keys".to_owned())),
    }
}
