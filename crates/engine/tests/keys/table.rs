//! The table of keys: for each, another value and its expected effect.

use Shows::*;

/// The effect of a key's value.
#[derive(Clone, Copy, Debug)]
pub enum Shows {
    /// Other losses or gradients, with the same number of steps.
    Losses,
    /// Another number of steps.
    Steps,
    /// Another loss scale.
    Scales,
    /// Other evaluations: their steps, tokens or losses.
    Evaluations,
    /// Other names of files in the run's folder.
    Files,
    /// Another place of the run's folder.
    Folder,
    /// Other step programs on rank 0.
    Program,
    /// Another predicted memory of a step.
    Memory,
    /// Another description of the model.
    Model,
    /// Another tokenizer.
    Tokenizer,
    /// Another number of threads that make batches.
    DataThreads,
    /// Another deadline of ranks.
    Deadline,
    /// A device that is described with these words.
    Device(&'static str),
    /// A note with these words.
    Note(&'static str),
    /// A file or folder below the test's folder.
    Made(&'static str),
    /// An error with these words.
    Refused(&'static str),
    /// Checked by another test: its file and name.
    Elsewhere(&'static str, &'static str),
}

/// One key and its expected effect.
pub struct Row {
    /// `section.key`.
    pub key: &'static str,
    /// Settings of both runs.
    pub context: &'static [&'static str],
    /// Settings of the changed run: the key, and others that it requires. `{F}` is the test's
    /// folder.
    pub sets: &'static [&'static str],
    /// The expected effect.
    pub shows: Shows,
}

const fn row(key: &'static str, context: &'static [&'static str], sets: &'static [&'static str], shows: Shows) -> Row {
    Row { key, context, sets, shows }
}

const GPT2: &[&str] = &["model.family=gpt2"];
const ENCODER: &[&str] = &["model.family=t5", "model.kv_heads=auto", "model.layers=4"];
const NO_SHAPE: &[&str] =
    &["model.path={F}/hf", "model.dim=auto", "model.layers=auto", "model.heads=auto", "tokenizer.kind=auto"];
const MIXTURE: &[&str] = &["model.family=mixtral"];
const MIXTURE_OF_TWO: &[&str] = &["model.family=mixtral", "parallel.ranks=2"];
const LINEAR: &[&str] = &["model.rope_scaling=linear", "model.rope_factor=2"];
const LLAMA3: &[&str] = &[
    "model.rope_scaling=llama3",
    "model.rope_factor=8",
    "model.rope_original_length=16",
    "model.rope_theta=100",
    "model.rope_low_freq_factor=1",
    "model.rope_high_freq_factor=4",
];
const YARN: &[&str] =
    &["model.rope_scaling=yarn", "model.rope_factor=4", "model.rope_original_length=64", "model.rope_theta=100"];
const TALKS: &[&str] = &["data.train={F}/talks.jsonl", "data.format=chat", "data.chat_template=chatml"];
/// Settings of a run on the images of `{F}/pictures`, and more of them.
macro_rules! images {
    ($($more:literal),*) => {
        &[
            "model.family=vit",
            "data.format=images",
            "data.train={F}/pictures",
            "data.cache=auto",
            "data.validation_fraction=0",
            "tokenizer.kind=auto",
            "training.sequence_length=auto",
            "images.size=8",
            "images.patch_size=4",
            $($more),*
        ]
    };
}
const IMAGES: &[&str] = images!["augmentation.crop=false", "augmentation.flip=0"];
const CROPPED: &[&str] = images![];
const RAND_AUGMENT: &[&str] = images!["augmentation.rand_augment_operations=2"];
const TEACHER: &[&str] = &["distillation.teacher={F}/hf"];
const JENSEN: &[&str] = &["distillation.teacher={F}/hf", "distillation.divergence=jensen_shannon"];
const FROZEN: &[&str] = &["fine_tuning.freeze=['block.*']"];
const LORA: &[&str] = &[
    "model.path={F}/hf",
    "model.dim=auto",
    "model.layers=auto",
    "model.heads=auto",
    "tokenizer.kind=auto",
    "fine_tuning.adapter=lora",
];
const FILE: &[&str] = &["tokenizer.path={F}/tok.json", "tokenizer.kind=auto"];
const LINES: &[&str] = &["data.train={F}/lines.jsonl"];
const MUON: &[&str] = &["optimizer.name=muon"];
const ADAFACTOR: &[&str] = &["optimizer.name=adafactor"];
const SGD: &[&str] = &["optimizer.name=sgd"];
const EMA: &[&str] = &["averaging.kind=ema", "evaluation.interval_steps=1", "data.validation_fraction=0.1"];
const HELD: &[&str] = &["consolidation.from={F}/old/tiny"];
const GRID: &[&str] = &["quantization.aware=4", "quantization.group=0"];
const PRUNED: &[&str] = &["pruning.sparsity=0.5", "pruning.begin=0.25", "pruning.end=1", "pruning.interval_steps=1"];
const WSD: &[&str] = &["schedule.kind=wsd", "schedule.decay_steps=3"];
const FP8: &[&str] = &["precision.compute=bf16", "precision.fp8=hybrid"];
const F16: &[&str] = &["precision.compute=f16"];
const TWO: &[&str] = &["parallel.ranks=2"];
const SHARDED: &[&str] = &["parallel.ranks=2", "parallel.zero_stage=3", "model.layers=3"];
const TWO_OF_TWO: &[&str] = &["parallel.ranks=2", "training.accumulation_steps=2"];
const OVERLAPPED: &[&str] = &["parallel.ranks=2", "update.rule=diloco", "update.every=2", "update.overlap=true"];
const APART: &[&str] = &["parallel.ranks=2", "update.rule=diloco", "update.every=2"];
const SERVER: &[&str] = &["parallel.ranks=2", "update.rule=server"];
const INT8: &[&str] = &["parallel.ranks=2", "compression.gradients=int8"];
const TOP_K: &[&str] = &["parallel.ranks=2", "compression.gradients=top_k"];
const SGD_TOP_K: &[&str] =
    &["parallel.ranks=2", "compression.gradients=top_k", "optimizer.name=sgd", "optimizer.momentum=0"];
const TOP_K_MOMENTUM: &[&str] = &[
    "parallel.ranks=2",
    "compression.gradients=top_k",
    "optimizer.name=sgd",
    "optimizer.momentum=0",
    "compression.top_k_momentum=0.9",
];
const POWER_SGD: &[&str] = &["parallel.ranks=2", "compression.gradients=power_sgd"];
const HYBRID_INT8: &[&str] = &[
    "parallel.ranks=4",
    "parallel.data_parallel_replicate_degree=2",
    "parallel.zero_stage=3",
    "compression.gradients=int8",
];
const STAGES: &[&str] = &["parallel.pipeline_parallel_degree=2", "training.accumulation_steps=4"];
const ON_DISK: &[&str] = &["memory.offload.optimizer=disk"];
const OFTEN: &[&str] = &["checkpoint.interval_steps=1", "checkpoint.keep_last=3"];
const EVALUATED: &[&str] = &["evaluation.interval_steps=1", "data.validation_fraction=0.1"];
const PATIENT: &[&str] =
    &["evaluation.interval_steps=1", "data.validation_fraction=0.1", "evaluation.early_stopping_patience=1"];

/// Every key, in the order of the sections.
pub const ROWS: &[Row] = &[
    row("run.name", &[], &["run.name=other"], Folder),
    row("run.directory", &[], &["run.directory={F}/elsewhere"], Folder),
    row("model.preset", &[], &["model.preset=shakespeare-char"], Model),
    row("model.path", &[], &["model.path={F}/hf"], Refused("beside model.path")),
    row("model.load_weights", NO_SHAPE, &["model.load_weights=false"], Losses),
    row("model.family", &[], &["model.family=gpt2"], Model),
    row("model.dim", &[], &["model.dim=32"], Model),
    row("model.layers", &[], &["model.layers=3"], Program),
    row("model.encoder_layers", ENCODER, &["model.encoder_layers=1"], Model),
    row("model.heads", &[], &["model.heads=4"], Losses),
    row("model.kv_heads", &[], &["model.kv_heads=1"], Model),
    row("model.head_dim", &[], &["model.head_dim=16"], Model),
    row("model.ffn_dim", &[], &["model.ffn_dim=48"], Model),
    row("model.vocab_size", &[], &["model.vocab_size=400"], Memory),
    row("model.vocab_multiple", &[], &["model.vocab_multiple=128"], Memory),
    row("model.max_sequence_length", GPT2, &["model.max_sequence_length=32"], Model),
    row("model.norm_eps", &[], &["model.norm_eps=1e-3"], Losses),
    row("model.rope_theta", &[], &["model.rope_theta=100"], Losses),
    row("model.rope_scaling", &[], LINEAR, Losses),
    row("model.rope_factor", LINEAR, &["model.rope_factor=4"], Losses),
    row("model.rope_original_length", LLAMA3, &["model.rope_original_length=4"], Losses),
    row("model.rope_low_freq_factor", LLAMA3, &["model.rope_low_freq_factor=0.1"], Losses),
    row("model.rope_high_freq_factor", LLAMA3, &["model.rope_high_freq_factor=2"], Losses),
    row("model.rope_beta_fast", YARN, &["model.rope_beta_fast=2"], Losses),
    row("model.rope_beta_slow", YARN, &["model.rope_beta_slow=4"], Losses),
    row("model.tie_embeddings", &[], &["model.tie_embeddings=true"], Model),
    row("model.qkv_bias", &[], &["model.qkv_bias=true"], Model),
    row("model.output_bias", &[], &["model.output_bias=true"], Model),
    row("model.mlp_bias", &[], &["model.mlp_bias=true"], Model),
    row("model.qk_norm", &[], &["model.qk_norm=true"], Model),
    row("model.value_residual", &[], &["model.value_residual=true"], Memory),
    row("model.sliding_window", &[], &["model.sliding_window=4"], Losses),
    row("model.activation", GPT2, &["model.activation=relu"], Losses),
    row("model.activation", GPT2, &["model.activation=relu_squared"], Losses),
    row("model.dropout", &[], &["model.dropout=0.5"], Losses),
    row("model.dropout", NO_SHAPE, &["model.dropout=0.5"], Losses),
    row("model.init_std", &[], &["model.init_std=0.1"], Losses),
    row("model.mup_base_dim", &[], &["model.mup_base_dim=8"], Losses),
    row("fine_tuning.adapter", &[], &["fine_tuning.adapter=lora"], Memory),
    row("fine_tuning.rank", LORA, &["fine_tuning.rank=4"], Memory),
    row("fine_tuning.alpha", LORA, &["fine_tuning.alpha=64"], Losses),
    row("fine_tuning.rank_stabilised", LORA, &["fine_tuning.rank_stabilised=true"], Losses),
    row("fine_tuning.targets", LORA, &["fine_tuning.targets=['q_proj']"], Memory),
    row("fine_tuning.from", LORA, &["fine_tuning.from={F}/hf"], Refused("adapter_config.json")),
    row("fine_tuning.base_dtype", LORA, &["fine_tuning.base_dtype=nf4"], Memory),
    row("fine_tuning.freeze", &[], &["fine_tuning.freeze=['block.*']"], Memory),
    row("fine_tuning.train", FROZEN, &["fine_tuning.train=['*.norm1.weight']"], Memory),
    row("fine_tuning.freeze_schedule", &[], &["fine_tuning.freeze_schedule=[{from_step=2,frozen='block.*'}]"], Losses),
    row("fine_tuning.layer_rate_decay", &[], &["fine_tuning.layer_rate_decay=0.5"], Losses),
    row("distillation.teacher", &[], TEACHER, Losses),
    row("distillation.weight", TEACHER, &["distillation.weight=0.9"], Losses),
    row("distillation.temperature", TEACHER, &["distillation.temperature=3"], Losses),
    row("distillation.divergence", TEACHER, &["distillation.divergence=reverse_kl"], Losses),
    row("distillation.hidden_weight", TEACHER, &["distillation.hidden_weight=0.5"], Losses),
    row("distillation.cache", TEACHER, &["distillation.cache={F}/kept"], Made("kept")),
    row("distillation.beta", JENSEN, &["distillation.beta=0.1"], Losses),
    row("experts.count", MIXTURE, &["experts.count=4"], Model),
    row("experts.top_k", MIXTURE, &["experts.top_k=1"], Losses),
    row("experts.ffn_dim", MIXTURE, &["experts.ffn_dim=48"], Model),
    row("experts.shared_ffn_dim", MIXTURE, &["experts.shared_ffn_dim=48"], Model),
    row("experts.gate", MIXTURE, &["experts.gate=sigmoid"], Losses),
    row("experts.normalise", MIXTURE, &["experts.normalise=false"], Losses),
    row("experts.scale", MIXTURE, &["experts.scale=2"], Losses),
    row("experts.dense_layers", MIXTURE, &["experts.dense_layers=1"], Model),
    row("experts.auxiliary_loss", MIXTURE, &["experts.auxiliary_loss=0.5"], Losses),
    row("experts.z_loss", MIXTURE, &["experts.z_loss=0.5"], Losses),
    row("experts.bias_update_rate", MIXTURE, &["experts.bias_update_rate=0.1"], Losses),
    row("experts.capacity_factor", MIXTURE, &["experts.capacity_factor=0.5"], Losses),
    row("tokenizer.path", &[], &["tokenizer.path={F}/tok.json", "tokenizer.kind=auto"], Tokenizer),
    row("tokenizer.kind", &[], &["tokenizer.kind=characters"], Tokenizer),
    row("tokenizer.add_bos", FILE, &["tokenizer.add_bos=true"], Refused("has no beginning-of-text token")),
    row("tokenizer.vocab_size", &["tokenizer.kind=bpe"], &["tokenizer.vocab_size=260"], Tokenizer),
    row("data.train", &[], &["data.train={F}/other.txt"], Losses),
    row("data.validation", &[], &["data.validation={F}/other.txt"], Evaluations),
    row("data.validation_fraction", &[], &["data.validation_fraction=0.2"], Evaluations),
    row("data.sampling", &[], &["data.sampling=random"], Losses),
    row("data.shuffle", &[], &["data.shuffle=false"], Losses),
    row("data.respect_document_boundaries", LINES, &["data.respect_document_boundaries=false"], Losses),
    row("data.text_field", LINES, &["data.text_field=body"], Losses),
    row("data.format", &[], &["data.format=chat"], Refused("is no JSONL file")),
    row("data.loss_on", TALKS, &["data.loss_on=all"], Losses),
    row("data.chat_template", TALKS, &["data.chat_template={F}/short.jinja"], Losses),
    row("data.workers", &[], &["data.workers=3"], DataThreads),
    row(
        "data.prefetch",
        &[],
        &[],
        Elsewhere("crates/data/src/loader/tests.rs", "prefetch_decides_how_many_batches_are_made_ahead"),
    ),
    row(
        "data.fim_rate",
        &[],
        &["data.fim_rate=0.5"],
        Refused("data.fim_rate = 0.5, and the tokenizer has no tokens for it"),
    ),
    row(
        "data.fim_spm_rate",
        &[],
        &[],
        Elsewhere("crates/data/tests/order.rs", "a_middle_is_filled_in_at_the_rate_that_is_asked_for"),
    ),
    row("data.span_corruption_rate", &[], &["data.span_corruption_rate=0.3"], Losses),
    row("data.span_length", ENCODER, &["data.span_length=1"], Losses),
    row("data.token_noise", &[], &["data.token_noise=0.5"], Losses),
    row("data.curriculum_start", &[], &["data.curriculum_start=8", "data.curriculum_steps=2"], Losses),
    row(
        "data.curriculum_steps",
        &["data.curriculum_start=8", "data.curriculum_steps=2"],
        &["data.curriculum_steps=100"],
        Losses,
    ),
    row("data.warm", &[], &[], Elsewhere("crates/cli/tests/data.rs", "text_is_cleaned_mixed_prepared_and_trained_on")),
    row("data.cache", &[], &["data.cache={F}/another-cache"], Made("another-cache")),
    row("images.size", IMAGES, &["images.size=16"], Model),
    row("images.resize", IMAGES, &["images.resize=12"], Losses),
    row("images.patch_size", IMAGES, &["images.patch_size=2"], Model),
    row("images.mean", IMAGES, &["images.mean=[0.4, 0.5, 0.6]"], Losses),
    row("images.std", IMAGES, &["images.std=0.25"], Losses),
    row(
        "images.skip_invalid",
        IMAGES,
        &[],
        Elsewhere("crates/cli/tests/images.rs", "images_that_cannot_be_decoded_are_skipped_where_the_user_says_so"),
    ),
    row("images.cache", IMAGES, &["images.cache={F}/decoded"], Made("decoded")),
    row("images.cache_size", IMAGES, &["images.cache_size=1GB"], Refused("there is no images.cache")),
    row("augmentation.crop", IMAGES, &["augmentation.crop=true"], Losses),
    row("augmentation.crop_area_min", CROPPED, &["augmentation.crop_area_min=0.9"], Losses),
    row("augmentation.crop_area_max", CROPPED, &["augmentation.crop_area_max=0.2"], Losses),
    row("augmentation.crop_ratio_min", CROPPED, &["augmentation.crop_ratio_min=0.2"], Losses),
    row("augmentation.crop_ratio_max", CROPPED, &["augmentation.crop_ratio_max=5"], Losses),
    row("augmentation.flip", IMAGES, &["augmentation.flip=1"], Losses),
    row("augmentation.brightness", IMAGES, &["augmentation.brightness=0.5"], Losses),
    row("augmentation.contrast", IMAGES, &["augmentation.contrast=0.5"], Losses),
    row("augmentation.saturation", IMAGES, &["augmentation.saturation=0.5"], Losses),
    row("augmentation.hue", IMAGES, &["augmentation.hue=0.3"], Losses),
    row("augmentation.rand_augment_operations", IMAGES, &["augmentation.rand_augment_operations=3"], Losses),
    row("augmentation.rand_augment_magnitude", RAND_AUGMENT, &["augmentation.rand_augment_magnitude=25"], Losses),
    row("augmentation.mixup", IMAGES, &["augmentation.mixup=0.5"], Losses),
    row("augmentation.cutmix", IMAGES, &["augmentation.cutmix=1"], Losses),
    row(
        "data.object_cache",
        &[],
        &[],
        Elsewhere("crates/cli/tests/objects.rs", "a_run_inspect_and_dedup_read_objects"),
    ),
    row("data.object_cache_size", &[], &["data.object_cache_size=1GB"], Refused("there is no data.object_cache")),
    row("training.recipe", &[], &["training.recipe=fast"], Losses),
    row("training.steps", &[], &["training.steps=2"], Steps),
    row("training.epochs", &[], &["training.epochs=0.02"], Steps),
    row("training.tokens", &[], &["training.tokens=64"], Steps),
    row(
        "training.seconds",
        &[],
        &[],
        Elsewhere(
            "crates/cli/tests/odd_input.rs",
            "a_run_of_very_many_steps_begins_at_once_and_ends_by_its_other_limit",
        ),
    ),
    row("training.micro_batch_size", &[], &["training.micro_batch_size=4"], Losses),
    row("training.global_batch_size", &[], &["training.global_batch_size=4"], Losses),
    row("training.accumulation_steps", &[], &["training.accumulation_steps=2"], Program),
    row("training.batch_warmup", &["training.accumulation_steps=2"], &["training.batch_warmup=[[2, 2]]"], Losses),
    row(
        "training.batch_warmup_rate",
        &["training.accumulation_steps=2", "training.batch_warmup=[[2, 2]]"],
        &["training.batch_warmup_rate=constant"],
        Losses,
    ),
    row("training.elastic_bits", &["training.accumulation_steps=4"], &["training.elastic_bits=true"], Program),
    row(
        "training.deterministic",
        &[],
        &["training.deterministic=true"],
        Note("training.deterministic changes nothing"),
    ),
    row("training.cuda_graphs", &[], &["training.cuda_graphs=auto"], Note("no CUDA graph")),
    row("training.sequence_length", &[], &["training.sequence_length=8"], Losses),
    row("training.seed", &[], &["training.seed=1"], Losses),
    row(
        "training.skipped_steps_max",
        &["optimizer.learning_rate=1e30", "optimizer.weight_decay=0", "data.validation_fraction=0"],
        &["training.skipped_steps_max=1"],
        Refused("1 steps in a row had a loss or gradient that is not finite"),
    ),
    row("optimizer.name", &[], &["optimizer.name=lion"], Losses),
    row("optimizer.learning_rate", &[], &["optimizer.learning_rate=2e-2"], Losses),
    row("optimizer.beta1", &[], &["optimizer.beta1=0.5"], Losses),
    row("optimizer.freeze_variance_after", &[], &["optimizer.freeze_variance_after=1"], Losses),
    row("optimizer.beta2", &[], &["optimizer.beta2=0.5"], Losses),
    row("optimizer.eps", &[], &["optimizer.eps=1e-2"], Losses),
    row("optimizer.state_bits", &[], &["optimizer.state_bits=8"], Losses),
    row("optimizer.weight_decay", &[], &["optimizer.weight_decay=0"], Losses),
    row("optimizer.momentum", SGD, &["optimizer.momentum=0.5"], Losses),
    row("optimizer.nesterov", SGD, &["optimizer.nesterov=true"], Losses),
    row("optimizer.clip_norm", &[], &["optimizer.clip_norm=0.01"], Losses),
    row("optimizer.matrix_learning_rate", MUON, &["optimizer.matrix_learning_rate=0.01"], Losses),
    row("optimizer.muon_scale", MUON, &["optimizer.muon_scale=match_rms_adamw"], Losses),
    row("optimizer.newton_schulz_steps", MUON, &["optimizer.newton_schulz_steps=2"], Losses),
    row("optimizer.factored_decay", ADAFACTOR, &["optimizer.factored_decay=-0.5"], Losses),
    row("optimizer.update_clip", ADAFACTOR, &["optimizer.update_clip=0.01"], Losses),
    row("optimizer.relative_step", ADAFACTOR, &["optimizer.relative_step=true"], Losses),
    row("averaging.kind", &[], &["averaging.kind=uniform"], Memory),
    row("averaging.decay", EMA, &["averaging.decay=0.1"], Evaluations),
    row("averaging.decay_warmup", EMA, &["averaging.decay_warmup=false"], Evaluations),
    row("averaging.start_step", EMA, &["averaging.start_step=2"], Evaluations),
    row("averaging.interval_steps", EMA, &["averaging.interval_steps=2"], Evaluations),
    row("averaging.evaluate", EMA, &["averaging.evaluate=false"], Evaluations),
    row("consolidation.from", &[], HELD, Memory),
    row("consolidation.weight", HELD, &["consolidation.weight=100"], Losses),
    row("schedule.kind", &[], &["schedule.kind=linear"], Losses),
    row("schedule.warmup_steps", &[], &["schedule.warmup_steps=2"], Losses),
    row("schedule.decay_steps", &[], &["schedule.decay_steps=2"], Losses),
    row("schedule.decay_shape", WSD, &["schedule.decay_shape=sqrt"], Losses),
    row("schedule.min_ratio", &[], &["schedule.min_ratio=0.9"], Losses),
    row("precision.compute", &[], &["precision.compute=bf16"], Losses),
    row("precision.tf32", &[], &["precision.tf32=true"], Refused("has no TF32")),
    row("precision.fp8", &["precision.compute=bf16"], &["precision.fp8=hybrid"], Losses),
    row("precision.int8", &[], &["precision.int8=switchback"], Losses),
    row("precision.fp8_amax_history", FP8, &["precision.fp8_amax_history=2"], Note("of up to 2 earlier steps")),
    row("precision.fp8_margin", FP8, &["precision.fp8_margin=4"], Losses),
    row("precision.loss_scale_initial", F16, &["precision.loss_scale_initial=2"], Scales),
    row("precision.loss_scale_window", F16, &["precision.loss_scale_window=1"], Scales),
    row("quantization.aware", &[], &["quantization.aware=4", "quantization.group=0"], Losses),
    row("quantization.begin", GRID, &["quantization.begin=0.5"], Losses),
    row("quantization.group", GRID, &["quantization.group=8"], Losses),
    row("pruning.sparsity", &[], &["pruning.sparsity=0.5", "pruning.begin=0", "pruning.end=0"], Losses),
    row("pruning.pattern", &[], &["pruning.pattern='2:4'", "pruning.begin=0", "pruning.end=0"], Losses),
    row("pruning.begin", PRUNED, &["pruning.begin=0"], Losses),
    row("pruning.end", PRUNED, &["pruning.end=0.5"], Losses),
    row("pruning.interval_steps", PRUNED, &["pruning.interval_steps=2"], Losses),
    row("activation_checkpointing.mode", &[], &["activation_checkpointing.mode=full"], Memory),
    row(
        "activation_checkpointing.overrides",
        &[],
        &["activation_checkpointing.overrides=[{ blocks = \"0\", mode = \"full\" }]"],
        Memory,
    ),
    row("compute.device", &[], &["compute.device=cuda:4096"], Refused("cuda")),
    row("compute.isa", &[], &["compute.isa=portable"], Device("portable")),
    row("compute.threads", &[], &["compute.threads=2"], Device("2 threads")),
    row("compute.attention", &[], &["compute.attention=mma"], Refused("chooses among a GPU's kernels")),
    row("parallel.ranks", &[], &["parallel.ranks=2"], Program),
    row(
        "parallel.data_parallel_replicate_degree",
        &["parallel.ranks=4", "parallel.zero_stage=3"],
        &["parallel.data_parallel_replicate_degree=2"],
        Program,
    ),
    row("parallel.data_parallel_shard_degree", TWO, &["parallel.data_parallel_shard_degree=2"], Program),
    row("parallel.zero_stage", TWO, &["parallel.zero_stage=1"], Program),
    row("parallel.reshard_after_forward", SHARDED, &["parallel.reshard_after_forward=false"], Program),
    row("parallel.prefetch", SHARDED, &["parallel.prefetch=2"], Program),
    row("parallel.reduce_schedule", TWO_OF_TWO, &["parallel.reduce_schedule=micro_batch"], Program),
    row("parallel.reduce_dtype", TWO, &["parallel.reduce_dtype=bf16"], Losses),
    row("parallel.collectives", TWO, &["parallel.collectives=nccl"], Refused("exchanges the memory of GPUs")),
    row("parallel.deadline_seconds", &[], &["parallel.deadline_seconds=7"], Deadline),
    row("parallel.verify", &[], &[], Elsewhere("crates/comm/tests/failures.rs", "corruption_is_noticed_and_named")),
    row(
        "parallel.hierarchical_sums",
        &[],
        &[],
        Elsewhere("crates/comm/tests/hierarchy.rs", "sums_by_nodes_have_the_bits_of_one_exchange"),
    ),
    row(
        "parallel.lend_threads",
        &[],
        &[],
        Elsewhere("crates/engine/tests/ranks.rs", "threads_that_are_lent_change_no_bit"),
    ),
    row("parallel.pipeline_parallel_degree", TWO, &["parallel.pipeline_parallel_degree=2"], Program),
    row("parallel.pipeline_schedule", STAGES, &["parallel.pipeline_schedule=gpipe"], Program),
    row("parallel.pipeline_schedule_file", STAGES, &["parallel.pipeline_schedule_file={F}/order.csv"], Program),
    row(
        "parallel.pipeline_chunks",
        &[
            "parallel.pipeline_parallel_degree=2",
            "training.accumulation_steps=4",
            "parallel.pipeline_schedule=interleaved",
            "model.layers=6",
        ],
        &["parallel.pipeline_chunks=3"],
        Program,
    ),
    row("parallel.pipeline_cuts", STAGES, &["parallel.pipeline_cuts=[1]"], Program),
    row("parallel.tensor_parallel_degree", TWO, &["parallel.tensor_parallel_degree=2"], Program),
    row(
        "parallel.sequence_parallel",
        &["parallel.tensor_parallel_degree=2"],
        &["parallel.sequence_parallel=false"],
        Program,
    ),
    row("parallel.expert_parallel_degree", MIXTURE_OF_TWO, &["parallel.expert_parallel_degree=2"], Program),
    row("parallel.context_parallel_degree", TWO, &["parallel.context_parallel_degree=2"], Program),
    row(
        "parallel.context_parallel_load_balance",
        &["parallel.context_parallel_degree=2"],
        &["parallel.context_parallel_load_balance=false"],
        Losses,
    ),
    row(
        "parallel.context_parallel_exchange",
        &["parallel.context_parallel_degree=2"],
        &["parallel.context_parallel_exchange=all_to_all"],
        Program,
    ),
    row("update.rule", TWO, &["update.rule=local"], Program),
    row("update.every", APART, &["update.every=3"], Losses),
    row("update.inner_steps", APART, &["update.inner_steps=[2, 1]"], Losses),
    row("update.outer_learning_rate", APART, &["update.outer_learning_rate=0.5"], Losses),
    row("update.outer_momentum", APART, &["update.outer_momentum=0.5"], Losses),
    row("update.fragments", APART, &["update.fragments=2"], Losses),
    row("update.overlap", APART, &["update.overlap=true"], Program),
    row("update.mixing", OVERLAPPED, &["update.mixing=0.1"], Losses),
    row("update.servers", SERVER, &["update.servers=1"], Memory),
    row("update.staleness", SERVER, &["update.staleness=2"], Memory),
    row("update.backup_workers", SERVER, &["update.backup_workers=1"], Program),
    row("compression.gradients", TWO, &["compression.gradients=int8"], Program),
    row("compression.parameters", SHARDED, &["compression.parameters=int8"], Program),
    row("compression.activations", STAGES, &["compression.activations=int8"], Program),
    row("compression.activation_gradients", STAGES, &["compression.activation_gradients=int8"], Program),
    row("compression.outer", APART, &["compression.outer=int8"], Losses),
    row("compression.over", HYBRID_INT8, &["compression.over=replicas"], Program),
    row("compression.top_k_density", TOP_K, &["compression.top_k_density=0.1"], Program),
    row("compression.top_k_momentum", SGD_TOP_K, &["compression.top_k_momentum=0.9"], Memory),
    row("compression.top_k_momentum_masking", TOP_K_MOMENTUM, &["compression.top_k_momentum_masking=false"], Losses),
    row("compression.rank", POWER_SGD, &["compression.rank=1"], Program),
    row("compression.error_feedback", INT8, &["compression.error_feedback=true"], Memory),
    row("compression.warmup_steps", INT8, &["compression.warmup_steps=1"], Losses),
    row("compression.rounding", INT8, &["compression.rounding=stochastic"], Losses),
    row("memory.limit", &["model.layers=12"], &["memory.limit=1MiB"], Refused("over memory.limit")),
    row("memory.offload.optimizer", &[], &["memory.offload.optimizer=disk"], Program),
    row("memory.offload.parameters", &[], &["memory.offload.parameters=disk"], Program),
    row("memory.offload.activations", &[], &["memory.offload.activations=disk"], Program),
    row("memory.offload.gradients", ON_DISK, &["memory.offload.gradients=disk"], Program),
    row("memory.offload.directory", ON_DISK, &["memory.offload.directory={F}/tier"], Made("tier")),
    row("memory.offload.chunk_elements", ON_DISK, &["memory.offload.chunk_elements=512"], Memory),
    row("checkpoint.interval_steps", &[], &["checkpoint.interval_steps=3"], Files),
    row("checkpoint.interval_seconds", &["training.steps=60"], &["checkpoint.interval_seconds=0.001"], Files),
    row("checkpoint.keep_last", OFTEN, &["checkpoint.keep_last=1"], Files),
    row(
        "checkpoint.keep_best",
        // The loss rises after the first step.
        &[
            "evaluation.interval_steps=1",
            "checkpoint.keep_last=1",
            "schedule.warmup_steps=4",
            "optimizer.learning_rate=1",
        ],
        &["checkpoint.keep_best=false"],
        Files,
    ),
    row("evaluation.interval_steps", &[], &["evaluation.interval_steps=2"], Evaluations),
    row("evaluation.tokens_max", EVALUATED, &["evaluation.tokens_max=9"], Evaluations),
    row(
        "evaluation.early_stopping_patience",
        EVALUATED,
        &["evaluation.early_stopping_patience=1", "evaluation.early_stopping_min_delta=100"],
        Steps,
    ),
    row("evaluation.early_stopping_min_delta", PATIENT, &["evaluation.early_stopping_min_delta=100"], Steps),
    row(
        "health.on_spike",
        &["health.spike_deviations=0.001", "training.steps=60", "optimizer.learning_rate=0.1"],
        &["health.on_spike=skip"],
        Losses,
    ),
    row(
        "health.spike_deviations",
        &["health.on_spike=skip", "training.steps=60", "optimizer.learning_rate=0.1"],
        &["health.spike_deviations=0.001"],
        Losses,
    ),
    row(
        "health.compare_interval_steps",
        &[],
        &[],
        Elsewhere(
            "crates/cli/tests/recovery.rs",
            "a_bit_that_flips_in_the_memory_of_a_rank_ends_the_run_with_its_name",
        ),
    ),
    row(
        "health.dead_units_interval_steps",
        &[],
        &[],
        Elsewhere("crates/cli/tests/recovery.rs", "a_model_with_dead_units_says_so"),
    ),
    row("metrics.jsonl", &[], &["metrics.jsonl=false"], Files),
    row(
        "metrics.interval_steps",
        &[],
        &[],
        Elsewhere(
            "crates/engine/src/metrics/mod.rs",
            "records_of_a_long_run_are_ever_fewer_and_a_resumed_run_has_the_same",
        ),
    ),
    row("metrics.tensorboard", &[], &["metrics.tensorboard=false"], Files),
    row("metrics.record", &[], &["metrics.record=false"], Files),
    row("metrics.profile", &[], &["metrics.profile=true"], Files),
    row(
        "metrics.profile_steps",
        &[],
        &[],
        Elsewhere("crates/engine/src/trace.rs", "a_trace_has_the_first_and_the_last_steps_however_long_a_run_is"),
    ),
];
