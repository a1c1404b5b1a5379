//! Keys of a NeMo 2.0 recipe, as `nemo llm pretrain --factory RECIPE KEY=VALUE ...` takes them.

use super::take::Keys;
use super::{Dialect, Exported, Job, Recompute, Settings, SettingsError, shell};
use std::fmt::Write as _;
use trainyard_program::{Mesh, Offload, PipelineSchedule};
use trainyard_sim::Format;

/// Recipes of NeMo by width, blocks and vocabulary of the model.
const RECIPES: [(u32, u32, u32, &str); 7] = [
    (2048, 16, 128_256, "llama32_1b"),
    (3072, 28, 128_256, "llama32_3b"),
    (4096, 32, 128_256, "llama3_8b"),
    (8192, 80, 128_256, "llama3_70b"),
    (16384, 126, 128_256, "llama31_405b"),
    (4096, 32, 32_000, "mistral_7b"),
    (12288, 96, 50_257, "gpt3_175b"),
];

/// Writes the keys.
pub(super) fn write(job: &Job<'_>) -> Exported {
    let mut unsaid = job.unsaid_everywhere();
    let model = &job.request.model;
    let known = RECIPES.iter().find(|(dim, layers, vocab, _)| {
        (*dim, *layers, *vocab) == (model.dim, model.layers, model.vocab) && model.experts.is_none()
    });
    let recipe = known.map_or("RECIPE", |(.., recipe)| recipe);
    if known.is_none() {
        unsaid.push("the recipe of the model: write its name for RECIPE".to_owned());
    }
    let mut text = String::new();
    for line in job.header() {
        let _ = writeln!(text, "# {line}");
    }
    let _ = writeln!(text, "nemo llm pretrain --factory {recipe} \\");
    let keys = keys(job, &mut unsaid);
    let lines: Vec<String> = keys.iter().map(|(key, value)| format!("  {key}={value}")).collect();
    text += &lines.join(" \\\n");
    text.push('\n');
    Exported { text, unsaid }
}

fn keys(job: &Job<'_>, unsaid: &mut Vec<String>) -> Vec<(String, String)> {
    let candidate = job.candidate();
    let Mesh { pp, dp_replicate, cp, tp, ep, .. } = *job.mesh();
    let (nodes, each) = job.nodes();
    let mut all: Vec<(String, String)> = Vec::new();
    let mut add = |key: &str, value: String| all.push((key.to_owned(), value));
    add("trainer.num_nodes", nodes.to_string());
    add("trainer.devices", each.to_string());
    let strategy = |key: &str| format!("trainer.strategy.{key}");
    add(&strategy("tensor_model_parallel_size"), tp.to_string());
    add(&strategy("sequence_parallel"), (tp > 1 && job.software.sequence_parallel).to_string());
    add(&strategy("pipeline_model_parallel_size"), pp.to_string());
    match candidate.pipeline {
        PipelineSchedule::Interleaved { chunks } if pp > 1 => {
            add(&strategy("virtual_pipeline_model_parallel_size"), chunks.to_string());
        }
        other => {
            add(&strategy("virtual_pipeline_model_parallel_size"), "null".to_owned());
            if pp > 1 && other != PipelineSchedule::OneForwardOneBackward {
                unsaid.push(format!("the schedule {other}: NeMo has 1F1B and interleaved 1F1B"));
            }
        }
    }
    if pp > 1 && !job.has_equal_stretches() {
        let stretch = |units: std::ops::Range<u32>| {
            let blocks = units.clone().filter(|unit| (1..=job.blocks()).contains(unit)).count();
            let embedding = if units.contains(&0) { "E" } else { "" };
            let loss = if units.contains(&(job.blocks() + 1)) { "L" } else { "" };
            format!("{embedding}{}{loss}", "t".repeat(blocks))
        };
        let stretches: Vec<String> = job.stretch_units().into_iter().map(stretch).collect();
        add(&strategy("pipeline_model_parallel_layout"), format!("\"{}\"", stretches.join("|")));
    }
    add(&strategy("context_parallel_size"), cp.to_string());
    if ep > 1 {
        add(&strategy("expert_model_parallel_size"), ep.to_string());
    }
    let stage = candidate.layout().zero_stage;
    add("optim.config.use_distributed_optimizer", (stage > 0).to_string());
    if stage > 0 && dp_replicate > 1 {
        add(&strategy("num_distributed_optimizer_instances"), dp_replicate.to_string());
    }
    if stage > 1 {
        unsaid.push(format!("ZeRO-{stage}: NeMo shards the optimizer (ZeRO-1), which is written instead"));
    }
    add(&strategy("ddp.overlap_grad_reduce"), "true".to_owned());
    add(&strategy("ddp.overlap_param_gather"), (stage > 0).to_string());
    add("data.micro_batch_size", candidate.micro_batch.to_string());
    add("data.global_batch_size", job.request.global_batch.to_string());
    add("data.seq_length", job.request.sequence_length.to_string());
    let precision = match candidate.format {
        Format::Fp32 | Format::Tf32 => "32",
        Format::Fp16 => "16-mixed",
        Format::Bf16 | Format::Fp8 | Format::Fp4 => "bf16-mixed",
    };
    add("trainer.plugins.precision", precision.to_owned());
    match candidate.format {
        Format::Fp8 => add("trainer.plugins.fp8", "hybrid".to_owned()),
        Format::Fp4 => unsaid.push("products in fp4".to_owned()),
        _ => {}
    }
    add("trainer.plugins.grad_reduce_in_fp32", (job.software.state.reduce == 4).to_string());
    let (full, selective) = (candidate.checkpointing.full, candidate.checkpointing.selective);
    let recompute = |key: &str| format!("model.config.recompute_{key}");
    match (full, selective) {
        (0, 0) => add(&recompute("granularity"), "null".to_owned()),
        (0, _) => add(&recompute("granularity"), "selective".to_owned()),
        (full, _) if full == job.blocks() => {
            add(&recompute("granularity"), "full".to_owned());
            add(&recompute("method"), "uniform".to_owned());
            add(&recompute("num_layers"), "1".to_owned());
        }
        (full, selective) => {
            add(&recompute("granularity"), "full".to_owned());
            add(&recompute("method"), "block".to_owned());
            add(&recompute("num_layers"), full.div_ceil(job.stretches()).to_string());
            if selective > 0 {
                unsaid.push(format!("selective recomputation of the other {selective} blocks"));
            }
        }
    }
    if candidate.offload != Offload::default() {
        unsaid.push("state on the host".to_owned());
    }
    all
}

/// Reads the keys of a command.
pub(super) fn read(text: &str) -> Result<Settings, SettingsError> {
    let mut keys =
        Keys::of_pairs(shell::assignments(text).into_iter().filter(|(_, value)| value != "null" && value != "None"));
    let mut settings = Settings::new(Dialect::Nemo);
    let strategy = |key: &str| format!("trainer.strategy.{key}");
    settings.tp = keys.degree(&strategy("tensor_model_parallel_size"))?.unwrap_or(1);
    settings.pp = keys.degree(&strategy("pipeline_model_parallel_size"))?.unwrap_or(1);
    settings.cp = keys.degree(&strategy("context_parallel_size"))?.unwrap_or(1);
    settings.ep = keys.degree(&strategy("expert_model_parallel_size"))?.unwrap_or(1);
    if let Some(chunks) = keys.degree(&strategy("virtual_pipeline_model_parallel_size"))?.filter(|chunks| *chunks > 1) {
        settings.schedule = PipelineSchedule::Interleaved { chunks };
    }
    match keys.text(&strategy("pipeline_model_parallel_layout")) {
        Some(_) => settings.assumed.push("the layout of layers is taken to give stages equal work".to_owned()),
        None => {
            settings.software.insert("partition".to_owned(), "layers".into());
        }
    }
    let sequence = keys.flag(&strategy("sequence_parallel"))?;
    settings.software.extend(sequence.map(|split| ("sequence_parallel".to_owned(), split.into())));
    let distributed = keys.flag("optim.config.use_distributed_optimizer")?;
    if distributed.is_none() {
        settings.assumed.push("the optimizer is sharded, as in NeMo's recipes".to_owned());
    }
    settings.zero_stage = u8::from(distributed.unwrap_or(true));
    settings.dp_replicate = keys.degree(&strategy("num_distributed_optimizer_instances"))?;
    let overlap = keys.flag(&strategy("ddp.overlap_grad_reduce"))?;
    settings.software.extend(overlap.map(|overlap| ("overlap_reduce".to_owned(), overlap.into())));
    settings.micro_batch = keys.degree("data.micro_batch_size")?;
    settings.global_batch = keys.number("data.global_batch_size")?;
    settings.sequence_length = keys.number("data.seq_length")?;
    let (nodes, each) = (keys.degree("trainer.num_nodes")?, keys.degree("trainer.devices")?);
    settings.devices = nodes.zip(each).map(|(nodes, each)| nodes.saturating_mul(each));
    let fp8 = keys.text("trainer.plugins.fp8");
    settings.format = match (fp8, keys.text("trainer.plugins.precision").as_deref()) {
        (Some(_), _) => Some(Format::Fp8),
        (None, Some("bf16-mixed" | "bf16" | "bf16-true")) => Some(Format::Bf16),
        (None, Some("16-mixed" | "16")) => Some(Format::Fp16),
        (None, Some("32" | "32-true")) => Some(Format::Fp32),
        (None, Some(other)) => return Err(SettingsError(format!("`trainer.plugins.precision` is {other}"))),
        (None, None) => None,
    };
    let fp32 = keys.flag("trainer.plugins.grad_reduce_in_fp32")?;
    if let Some(fp32) = fp32 {
        let bytes = if fp32 { 4 } else { 2 };
        let state = [("parameter", 2), ("master", 4), ("gradient", bytes), ("optimizer", 8), ("reduce", bytes)];
        let state: toml::Table = state.into_iter().map(|(key, n)| (key.to_owned(), toml::Value::Integer(n))).collect();
        settings.software.insert("state".to_owned(), state.into());
    }
    let recompute = |key: &str| format!("model.config.recompute_{key}");
    let (method, layers) = (keys.text(&recompute("method")), keys.degree(&recompute("num_layers"))?);
    settings.recompute = match (keys.text(&recompute("granularity")).as_deref(), method.as_deref()) {
        (None, _) => Recompute::None,
        (Some("selective"), _) => Recompute::Selective,
        (Some("full"), Some("block")) => Recompute::SomeOfStretch(layers.unwrap_or(1)),
        (Some("full"), _) => Recompute::Full,
        (Some(other), _) => return Err(SettingsError(format!("`model.config.recompute_granularity` is {other}"))),
    };
    settings.assumed.push("keys that are not in the command are the recipe's, which was not read".to_owned());
    keys.drop_all(&[
        "log.",
        "optim.config.lr",
        "optim.lr_scheduler",
        "resume.",
        "trainer.max_steps",
        "trainer.val_",
        "trainer.limit_",
        "trainer.log_",
        "trainer.strategy.ddp.overlap_param_gather",
        "trainer.strategy.ddp.check",
        "data.num_workers",
    ]);
    settings.unpriced = keys.rest();
    Ok(settings)
}
