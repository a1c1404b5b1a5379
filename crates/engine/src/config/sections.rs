//! The sections and their keys. This file, and `sections_parallel.rs` for `[parallel]`, alone give
//! each key its name, type, default and documentation; `docs/config.md` is printed from them.
//!
//! A key whose default depends on others is an `Option`. While it is unset,
//! [`Config::resolve`](super::Config::resolve) derives it and states the derivation.

use super::batch_warmup::{BatchWarmup, BatchWarmupRate};
use super::device::DeviceKind;
use super::section::section;
use super::sections_chat::{DataFormat, LossOnPart};
use super::value::{ByteSize, Overrides, Sources, choices};
use std::path::PathBuf;
use trainyard_model::Family;

choices! {
    /// The nonlinearity of the MLP; of a gated MLP, that of the gate.
    Activation {
        /// x sigmoid(x).
        Silu = "silu",
        /// Exact GELU, with erf.
        Gelu = "gelu",
        /// GELU approximated with tanh, as GPT-2 has it (`gelu_new`).
        GeluTanh = "gelu_tanh",
        /// max(x, 0).
        Relu = "relu",
        /// max(x, 0)², as in Primer (So et al. 2021); `relu2` in transformers.
        ReluSquared = "relu_squared",
    }
}

choices! {
    /// The method that stretches rotary frequencies beyond the length of the first training.
    RopeScaling {
        /// No stretching.
        None = "none",
        /// Positions divided by the factor.
        Linear = "linear",
        /// Llama 3.1's rule: long wavelengths divided, short ones kept, a ramp between.
        Llama3 = "llama3",
        /// YaRN (Peng et al. 2023).
        Yarn = "yarn",
    }
}

choices! {
    /// A tokenizer to make when no file is given.
    TokenizerKind {
        /// Byte-level byte-pair encoding, trained on the corpus.
        Bpe = "bpe",
        /// One token a byte.
        Bytes = "bytes",
        /// One token for each character of the corpus.
        Characters = "characters",
    }
}

choices! {
    /// The method by which sequences are cut from the corpus.
    Sampling {
        /// Every token once an epoch: documents packed one after the other, sequences in shuffled
        /// order.
        Packed = "packed",
        /// Windows that begin anywhere, drawn with replacement.
        Random = "random",
        /// Whole documents, each in the fullest sequence that has room; only documents longer than
        /// a sequence are cut. What is left of a sequence is padding.
        BestFit = "best_fit",
    }
}

choices! {
    /// An update rule.
    OptimizerName {
        /// Adam with decoupled weight decay (Loshchilov & Hutter 2019).
        AdamW = "adamw",
        /// Gradient descent with momentum.
        Sgd = "sgd",
        /// Sign of an interpolated momentum (Chen et al. 2023).
        Lion = "lion",
        /// Orthogonalised momentum for matrices (Jordan et al. 2024), AdamW for the rest.
        Muon = "muon",
        /// Factored second moments (Shazeer & Stern 2018).
        Adafactor = "adafactor",
        /// AdamW's update of each matrix, as long as the matrix times the learning rate (You et al.
        /// 2020), for large batches; AdamW for the rest. On CPUs.
        Lamb = "lamb",
    }
}

choices! {
    /// The factor on Muon's orthogonalised update of a matrix.
    MuonScale {
        /// sqrt(max(1, rows / columns)).
        Original = "original",
        /// 0.2 sqrt(max(rows, columns)): updates as large as AdamW's, so that its learning rates
        /// serve.
        MatchRmsAdamw = "match_rms_adamw",
    }
}

choices! {
    /// The learning rate over the steps.
    ScheduleKind {
        /// The peak throughout.
        Constant = "constant",
        /// A line from the peak to the minimum.
        Linear = "linear",
        /// Half a cosine from the peak to the minimum.
        Cosine = "cosine",
        /// Warmup, stable, decay: the peak until the last `decay_steps`.
        Wsd = "wsd",
    }
}

choices! {
    /// The shape of the decay of `wsd`.
    DecayShape {
        /// A line.
        Linear = "linear",
        /// Half a cosine.
        Cosine = "cosine",
        /// One minus the square root of the progress (Hägele et al. 2024).
        Sqrt = "sqrt",
    }
}

choices! {
    /// The number format of matrix products. Masters, gradients, statistics and optimizer state are
    /// always f32.
    Compute {
        /// IEEE binary32.
        F32 = "f32",
        /// bfloat16 operands, f32 accumulation.
        Bf16 = "bf16",
        /// IEEE binary16 operands, f32 accumulation, dynamic loss scaling.
        F16 = "f16",
    }
}

choices! {
    /// The tensors that a block keeps from forward for backward.
    CheckpointMode {
        /// Everything that backward reads.
        None = "none",
        /// Tensors that are expensive to compute for their bytes; the rest is computed again.
        Selective = "selective",
        /// Only the block's input; its forward runs again.
        Full = "full",
    }
}

choices! {
    /// The reaction to a spike of the loss or the gradient norm.
    OnSpike {
        /// Say it, and go on.
        Warn = "warn",
        /// Say it, and leave the step's update out.
        Skip = "skip",
        /// Say it, leave the update out, and go back to the last checkpoint. The run goes on from
        /// there with the samples that follow the spike's.
        RollBack = "roll_back",
        /// Say it, leave the update out, and end the run with a checkpoint.
        Stop = "stop",
    }
}

choices! {
    /// The time at which gradients are summed over ranks.
    ReduceSchedule {
        /// Once, under the backward of the step's last micro-batch.
        Step = "step",
        /// Under the backward of every micro-batch: more traffic, less memory where gradients are
        /// sharded.
        MicroBatch = "micro_batch",
    }
}

choices! {
    /// The type of gradients while ranks exchange them. Sums are in f32 in either case.
    ReduceDtype {
        /// No rounding.
        F32 = "f32",
        /// Half the traffic.
        Bf16 = "bf16",
    }
}

choices! {
    /// The transport of tensors between ranks.
    Collectives {
        /// NCCL where every rank has a GPU of its own and the library is installed, else the host.
        /// The choice and its reason are printed.
        Auto = "auto",
        /// From GPU to GPU by NCCL; an error where NCCL is not possible.
        Nccl = "nccl",
        /// Through host memory, by the communicator of the ranks.
        Host = "host",
    }
}

choices! {
    /// The instructions by which attention multiplies on a GPU's tensor cores.
    AttentionKernels {
        /// `wgmma` on Hopper if it agrees with `mma.sync` on small problems that are tried at
        /// start, else `mma.sync`. The choice and its reason are printed.
        Auto = "auto",
        /// Products of a warp, `mma.sync`.
        Mma = "mma",
        /// Products of a warpgroup, `wgmma`; on Hopper only.
        Wgmma = "wgmma",
    }
}

choices! {
    /// The use of CUDA graphs, which launch a step's kernels as one.
    CudaGraphs {
        /// Never: every kernel is launched by itself.
        Off = "off",
        /// Where possible; otherwise the reason is printed.
        Auto = "auto",
        /// Always: where it is impossible, the run does not start.
        On = "on",
    }
}

choices! {
    /// The place of offloaded state while a step does not use it.
    OffloadTier {
        /// On the device: not offloaded.
        None = "none",
        /// In host memory, for devices with memory of their own.
        Host = "host",
        /// In a file.
        Disk = "disk",
    }
}

section! {
    /// The run and its folder.
    RunSection = "run" {
        /// The run's name; its folder is `DIRECTORY/NAME`. Unset: the first of `run-001`,
        /// `run-002`, … that does not exist yet.
        #[elsewhere("run_name", "job_name", "description")]
        name: Option<String> = None;
        /// The folder of the run folders.
        #[elsewhere("output_dir", "dump_folder", "out_dir")]
        directory: PathBuf = PathBuf::from("runs");
    }
}

section! {
    /// The model: a Hugging Face folder (`path`), a named shape (`preset`), a shape written out, or
    /// a preset with some keys changed.
    ModelSection = "model" {
        /// A named shape; keys written beside it change it. The list is below.
        #[elsewhere("flavor", "model_name", "name")]
        preset: Option<String> = None;
        /// A Hugging Face folder, or a GGUF file: its `config.json` or metadata gives the shape, so
        /// no key of the shape may be given beside it.
        #[elsewhere("hf_assets_path", "model_name_or_path", "pretrained_model_name_or_path")]
        path: Option<PathBuf> = None;
        /// Start from the weights in `path` (fine-tuning) rather than from random ones. Unset:
        /// true.
        load_weights: Option<bool> = None;
        /// The family of a shape that is written out. Unset: llama.
        #[elsewhere("model_type", "architecture")]
        family: Option<Family> = None;
        /// Width of the residual stream.
        #[elsewhere("hidden_size", "n_embd", "d_model", "embed_dim")]
        dim: Option<usize> = None;
        /// Transformer blocks.
        #[elsewhere("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")]
        layers: Option<usize> = None;
        /// Blocks of the encoder, the first of `layers`; the others are the decoder's. Family t5
        /// only. Unset: half.
        #[elsewhere("num_encoder_layers")]
        encoder_layers: Option<usize> = None;
        /// Attention heads.
        #[elsewhere("num_attention_heads", "n_head", "n_heads", "num_heads")]
        heads: Option<usize> = None;
        /// Heads of keys and values (grouped-query attention). Unset: as many as `heads`.
        #[elsewhere("num_key_value_heads", "n_kv_heads", "num_query_groups")]
        kv_heads: Option<usize> = None;
        /// Width of a head. Unset: `dim / heads`.
        #[elsewhere("kv_channels")]
        head_dim: Option<usize> = None;
        /// Width of the MLP. Unset: 4 x `dim` for gpt2 and vit; 8/3 x `dim`, rounded up to a
        /// multiple of 64, for the other families.
        #[elsewhere("intermediate_size", "n_inner", "ffn_hidden_size", "hidden_dim")]
        ffn_dim: Option<usize> = None;
        /// Rows of the embedding. Unset: the tokenizer's vocabulary, rounded up to
        /// `vocab_multiple`; of images, the classes of the data.
        #[elsewhere("padded_vocab_size")]
        vocab_size: Option<usize> = None;
        /// A derived `vocab_size` is rounded up to a multiple of this, so that products with the
        /// embedding fill their tiles. Unset: 64.
        #[elsewhere("make_vocab_size_divisible_by")]
        vocab_multiple: Option<usize> = None;
        /// The longest sequence the model takes. Unset: `training.sequence_length`.
        #[elsewhere("max_position_embeddings", "n_positions", "n_ctx", "block_size", "max_seq_len")]
        max_sequence_length: Option<usize> = None;
        /// Added to the variance inside normalisations. Unset: 1e-5; 1e-6 for gemma3 and
        /// olmo2; 1e-12 for vit.
        #[elsewhere("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")]
        norm_eps: Option<f64> = None;
        /// Base of the rotary frequencies; in gemma3 of the layers without a window, those with one
        /// have 10000. Unset: 10000; 1000000 for gemma3, 500000 for olmo2. Not for gpt2.
        #[elsewhere("rotary_base", "rope_base")]
        rope_theta: Option<f64> = None;
        /// The method that stretches rotary frequencies. Unset: none. Not for gpt2 and phi3.
        #[elsewhere("rope_type", "rope_parameters")]
        rope_scaling: Option<RopeScaling> = None;
        /// The factor of the stretching; needed when `rope_scaling` is not none.
        #[elsewhere("factor", "scaling_factor")]
        rope_factor: Option<f64> = None;
        /// The length that the model was first trained on; needed by llama3 and yarn.
        #[elsewhere("original_max_position_embeddings")]
        rope_original_length: Option<usize> = None;
        /// llama3: wavelengths above `rope_original_length` divided by this are stretched fully.
        /// Unset: 1.
        #[elsewhere("low_freq_factor")]
        rope_low_freq_factor: Option<f64> = None;
        /// llama3: wavelengths below `rope_original_length` divided by this are kept. Unset: 4.
        #[elsewhere("high_freq_factor")]
        rope_high_freq_factor: Option<f64> = None;
        /// yarn: dimensions that turn more often than this over `rope_original_length` are kept.
        /// Unset: 32.
        #[elsewhere("beta_fast")]
        rope_beta_fast: Option<f64> = None;
        /// yarn: dimensions that turn less often than this are stretched fully. Unset: 1.
        #[elsewhere("beta_slow")]
        rope_beta_slow: Option<f64> = None;
        /// Use the embedding, transposed, as the head. Unset: true for gpt2 and gemma3, else false.
        #[elsewhere("tie_word_embeddings", "weight_tying")]
        tie_embeddings: Option<bool> = None;
        /// Biases on queries, keys and values. Unset: true for gpt2 and vit, else false (Qwen2 has
        /// them).
        #[elsewhere("attention_bias", "add_qkv_bias")]
        qkv_bias: Option<bool> = None;
        /// A bias on attention's output. Unset: true for gpt2 and vit, else false.
        output_bias: Option<bool> = None;
        /// Biases in the MLP, in gpt2, vit and llama. Unset: true for gpt2 and vit, else false.
        mlp_bias: Option<bool> = None;
        /// RMSNorm on the queries and keys of each head (Qwen3, Gemma 3) or of all heads together
        /// (OLMo 2). Not for phi3, vit and t5. Files of transformers have none for gpt2, so such a
        /// model is not exported. Unset: true for gemma3 and olmo2, which have no other, else
        /// false.
        #[elsewhere("qk_layernorm", "use_qk_norm")]
        qk_norm: Option<bool> = None;
        /// Attention of every block but the first reads a mixture of its own values and of those of
        /// the first block, with two learned weights each (value residuals, Zhou et al. 2024).
        /// Unset: false. Models with one decoder only; with data, pipeline and expert parallelism.
        value_residual: Option<bool> = None;
        /// Number of tokens that attention looks back, the token itself included; in gemma3 in five
        /// of six layers. Unset: 512 for gemma3, else all.
        #[elsewhere("window_size", "attention_window")]
        sliding_window: Option<usize> = None;
        /// The nonlinearity of the MLP. Unset: gelu_tanh for gpt2 and gemma3, gelu for vit, else
        /// silu. Only gpt2 and vit take another.
        #[elsewhere("hidden_act", "activation_function")]
        activation: Option<Activation> = None;
        /// Probability with which elements of the embeddings, and of the outputs that blocks add to
        /// the residual stream, are dropped.
        #[elsewhere("resid_pdrop", "embd_pdrop", "hidden_dropout")]
        dropout: f64 = 0.0;
        /// Standard deviation of the initial weights; projections into the residual stream get it
        /// divided by sqrt(2 `layers`). Unset: 0.02.
        #[elsewhere("initializer_range", "init_method_std")]
        init_std: Option<f64> = None;
        /// The `dim` for which `init_std` and the learning rate were found; both are scaled from it
        /// to this model's by muP. Unset: no scaling.
        #[elsewhere("mup_base_width", "mup_base_hidden_size")]
        mup_base_dim: Option<usize> = None;
    }
}

section! {
    /// The tokenizer, which turns text into tokens.
    TokenizerSection = "tokenizer" {
        /// A Hugging Face `tokenizer.json`, or a folder that has one. Unset: the tokenizer of
        /// `model.path`; without that, a new one of `kind`, made from the corpus.
        #[elsewhere("tokenizer_path", "tokenizer_name_or_path", "tokenizer_file", "tokenizer_model")]
        path: Option<PathBuf> = None;
        /// The kind of tokenizer to make when there is no `path`. Unset: bpe.
        #[elsewhere("tokenizer_type")]
        kind: Option<TokenizerKind> = None;
        /// Size of the vocabulary to train; bpe only. Unset: 8192.
        vocab_size: Option<usize> = None;
        /// Begin each document, and a prompt, with the tokenizer's beginning-of-text token. Unset:
        /// as the tokenizer asks (its post-processor, or `add_bos_token` beside it).
        #[elsewhere("add_bos_token")]
        add_bos: Option<bool> = None;
    }
}

section! {
    /// Text and token files, and how sequences are cut from them.
    DataSection = "data" {
        /// Corpora to train on: text, JSONL, Parquet, WebDataset tar, MDS, `.zst`, `.gz`,
        /// directories, patterns such as `shards/*.tar`, or tokens: prepared by `data prepare`,
        /// Megatron's or llm.c's; `{ path = "...", weight = 2.0 }` gives a share of the mixture.
        #[elsewhere("dataset", "dataset_path", "data_path", "train_files", "train_file")]
        train: Sources = Sources(vec![]);
        /// Corpora for evaluation only. Of several, each loss is shown beside that of all. Unset:
        /// the part of `train` that is held back.
        #[elsewhere("valid_data_path", "validation_file", "eval_dataset", "val")]
        validation: Option<Sources> = None;
        /// The share of `train` held back for validation when `validation` is unset; 0 for none.
        /// Unset: 0.01 of text. Prepared tokens have the share that `data prepare` held back;
        /// another one is refused.
        #[elsewhere("validation_split_percentage", "split", "val_fraction")]
        validation_fraction: Option<f64> = None;
        /// The method by which sequences are cut from the corpus.
        sampling: Sampling = Sampling::Packed;
        /// Shuffle the sequences, by `training.seed`; packed sampling only. False: the text in its
        /// order, corpora of a mixture in turn by their weights. Unset: true.
        shuffle: Option<bool> = None;
        /// Let tokens attend only within their own document.
        #[elsewhere("reset_attention_mask", "document_masking", "eod_mask_loss")]
        respect_document_boundaries: bool = true;
        /// The field of a JSONL record, or the column of a Parquet or MDS file, that holds the
        /// text.
        #[elsewhere("text_column", "content_field", "json_keys", "text_key")]
        text_field: String = "text".to_owned();
        /// The form of text corpora.
        format: DataFormat = DataFormat::Text;
        /// The part of a conversation that is learned; chat only. Unset: answers.
        #[elsewhere("assistant_only_loss", "train_on_inputs", "completion_only_loss")]
        loss_on: Option<LossOnPart> = None;
        /// A file with a chat template in Jinja, or `chatml`; chat only. Unset: that of the
        /// tokenizer.
        chat_template: Option<PathBuf> = None;
        /// Share of the documents whose middle is moved behind their end, to be filled in (FIM).
        /// The tokenizer must have the tokens for it, such as `<fim_prefix>`.
        #[elsewhere("fim_ratio", "fill_in_the_middle")]
        fim_rate: f64 = 0.0;
        /// Share of these in the order suffix, prefix, middle (SPM); the others are prefix, suffix,
        /// middle (PSM).
        fim_spm_rate: f64 = 0.5;
        /// Probability with which an input token is replaced by a random one; targets stay.
        token_noise: f64 = 0.0;
        /// Share of the tokens that is taken out of the text in spans, to be given back behind it
        /// (T5). Unset: 0.15 for a model with an encoder, none for others.
        #[elsewhere("noise_density", "mlm_probability")]
        span_corruption_rate: Option<f64> = None;
        /// Mean length of these spans, in tokens. Unset: 3.
        #[elsewhere("mean_noise_span_length", "mean_span_length")]
        span_length: Option<f64> = None;
        /// Longest segment at the first step of a length curriculum; rows keep their length. Unset:
        /// no curriculum.
        #[elsewhere("min_difficulty", "seqlen_start")]
        curriculum_start: Option<usize> = None;
        /// Steps until segments have their full length.
        curriculum_steps: Option<u64> = None;
        /// Read all token files into memory before the first step. False: in the background.
        warm: bool = false;
        /// Threads that assemble batches.
        #[elsewhere("num_workers", "dataloader_num_workers")]
        workers: usize = 1;
        /// Batches prepared ahead.
        #[elsewhere("prefetch_factor", "dataloader_prefetch_factor")]
        prefetch: usize = 4;
        /// The folder for token files that are made of text corpora. Unset: `data-cache` inside
        /// `run.directory`.
        #[elsewhere("cache_dir", "data_cache_path")]
        cache: Option<PathBuf> = None;
        /// A folder that keeps what is read of object stores, for the next reading. Unset: nothing
        /// is kept. Runs and commands may share it.
        object_cache: Option<PathBuf> = None;
        /// The most bytes in `object_cache`; entries used least recently go first. Unset: 16 GiB.
        object_cache_size: Option<ByteSize> = None;
    }
}

section! {
    /// The limits of the training, and the batch. One batch is `micro_batch_size` x
    /// `accumulation_steps` x the data-parallel degree = `global_batch_size` sequences: any two
    /// give the third.
    TrainingSection = "training" {
        /// A name that sets keys of several sections, listed below; keys beside it win. Unset:
        /// none.
        recipe: Option<String> = None;
        /// Optimizer steps. With `epochs`, `tokens` and `seconds`, the first limit to be reached
        /// ends the run; at least one is needed.
        #[elsewhere("max_steps", "train_iters", "max_iters", "num_train_steps", "total_steps")]
        steps: Option<u64> = None;
        /// Passes over the training data. In a mixture, one pass is as many tokens as all corpora
        /// hold together.
        #[elsewhere("num_train_epochs", "num_epochs", "max_epochs", "n_epochs")]
        epochs: Option<f64> = None;
        /// Tokens to train on.
        #[elsewhere("max_tokens", "num_tokens", "train_tokens")]
        tokens: Option<u64> = None;
        /// Seconds of training. Without another limit, the number of steps is measured over
        /// the first ones and then fixed.
        #[elsewhere("max_time", "exit_duration", "time_limit", "duration")]
        seconds: Option<f64> = None;
        /// Sequences in one forward and backward on one rank. Unset: from the other two; 8 when
        /// nothing is given.
        #[elsewhere("train_micro_batch_size_per_gpu", "per_device_train_batch_size", "local_batch_size", "batch_size")]
        micro_batch_size: Option<usize> = None;
        /// Sequences in one optimizer step, over all ranks. Unset: from the other two.
        #[elsewhere("train_batch_size", "total_batch_size")]
        global_batch_size: Option<usize> = None;
        /// Micro-batches in one optimizer step, on each rank. Unset: from the other two; 1 when
        /// nothing is given.
        #[elsewhere("gradient_accumulation_steps", "grad_accum_steps")]
        accumulation_steps: Option<usize> = None;
        /// Smaller batches for the first steps, stage by stage: the sequences of a step over all
        /// ranks, and the number of steps that take so many. Then steps take the whole batch. A
        /// stage has whole micro-batches on each rank, or one that is a part of `micro_batch_size`.
        #[elsewhere("rampup_batch_size", "rampup-batch-size")]
        batch_warmup: Option<BatchWarmup> = None;
        /// The factor of the schedule's learning rate in a stage of `batch_warmup`: the root of the
        /// stage's share of the whole batch, the share itself, or 1. Unset: square_root.
        batch_warmup_rate: Option<BatchWarmupRate> = None;
        /// Make the same batch give the same bits on 1, 2, 4, … ranks. Gradients of micro-batches
        /// are then summed along a tree, which takes log2(`accumulation_steps`) more gradient
        /// buffers.
        elastic_bits: bool = false;
        /// Sum over ranks in a fixed order with NCCL too, so that all layouts give the same bits.
        /// NCCL then only moves the parts and each rank adds its own, which takes one more gradient
        /// buffer of a unit. Without NCCL the order is always fixed.
        #[elsewhere("use_deterministic_algorithms", "full_determinism")]
        deterministic: bool = false;
        /// Launch the forwards and backwards of a step on a GPU as one CUDA graph, captured when
        /// two steps in a row have the same shapes. Never tried on a GPU.
        #[elsewhere("enable_cuda_graph", "cudagraphs")]
        cuda_graphs: CudaGraphs = CudaGraphs::Off;
        /// Tokens of a sequence. Unset: the longest that the model takes, at most 2048.
        #[elsewhere("seq_len", "seq_length", "max_seq_length", "context_length", "block_size")]
        sequence_length: Option<usize> = None;
        /// Seed of the initial weights, the order of the data and dropout.
        #[elsewhere("random_seed")]
        seed: u64 = 1337;
        /// Number of steps in a row that may be skipped, because the loss or a gradient is not
        /// finite, before the run stops.
        skipped_steps_max: u64 = 10;
    }
}

section! {
    /// The update rule. Norms and biases are never decayed.
    OptimizerSection = "optimizer" {
        /// The update rule.
        #[elsewhere("optimizer_type", "optim", "type")]
        name: OptimizerName = OptimizerName::AdamW;
        /// The peak learning rate. Unset: 3e-4 for adamw and muon's AdamW part, 1e-4 for lion, 0.1
        /// for sgd, 1e-3 for adafactor, 2e-3 for lamb.
        #[elsewhere("lr", "max_lr")]
        learning_rate: Option<f64> = None;
        /// Decay of the first moment: adamw, lamb, lion, muon's AdamW part. Unset: 0.9.
        #[elsewhere("adam_beta1", "betas")]
        beta1: Option<f64> = None;
        /// Decay of the second moment (lion: of the momentum). Unset: 0.95 for adamw and muon's
        /// AdamW part, 0.99 for lion, 0.999 for lamb.
        #[elsewhere("adam_beta2", "betas")]
        beta2: Option<f64> = None;
        /// Added to the root of the second moment: adamw, muon's AdamW part, lamb. Unset: 1e-8, for
        /// lamb 1e-6.
        #[elsewhere("adam_eps", "adam_epsilon", "epsilon")]
        eps: Option<f64> = None;
        /// AdamW and LAMB: the update after which second moments stay as they are (1-bit Adam, Tang
        /// et al. 2021), for codecs whose errors would enter them. Unset: they never do.
        #[elsewhere("var_freeze_step")]
        freeze_variance_after: Option<u64> = None;
        /// AdamW: bits of an element of either moment, 32 or 8. Codes of 8 bits have a scale for
        /// each 32 elements (Dettmers et al. 2021): 2.25 bytes a parameter instead of 8. On CPUs.
        #[elsewhere("optim_bits", "adamw_8bit", "adamw_bnb_8bit", "AdamW8bit")]
        state_bits: usize = 32;
        /// Decoupled weight decay, multiplied by the learning rate.
        #[elsewhere("wd", "decay")]
        weight_decay: f64 = 0.1;
        /// Momentum: sgd, muon. Unset: 0.9 for sgd, 0.95 for muon.
        #[elsewhere("muon_momentum", "sgd_momentum")]
        momentum: Option<f64> = None;
        /// Nesterov's form of the momentum: sgd, muon. Unset: false for sgd, true for muon.
        nesterov: Option<bool> = None;
        /// The largest global norm of the gradient; longer ones are scaled down to it. 0: no
        /// clipping.
        #[elsewhere("gradient_clipping", "max_grad_norm", "max_norm", "clip_grad", "grad_clip")]
        clip_norm: f64 = 1.0;
        /// Muon: the peak learning rate of matrices; `learning_rate` is for the rest. Unset: 0.02
        /// with `muon_scale = "original"`, else `learning_rate`.
        #[elsewhere("muon_lr", "matrix_lr")]
        matrix_learning_rate: Option<f64> = None;
        /// Muon: the factor on the orthogonalised update. Unset: original.
        #[elsewhere("adjust_lr_fn")]
        muon_scale: Option<MuonScale> = None;
        /// Muon: Newton-Schulz iterations. Unset: 5.
        #[elsewhere("ns_steps")]
        newton_schulz_steps: Option<usize> = None;
        /// Adafactor: the second moment decays by 1 - step^this. Unset: -0.8.
        #[elsewhere("beta2_decay", "decay_rate")]
        factored_decay: Option<f64> = None;
        /// Adafactor: updates with a larger root mean square are scaled down to it. Unset: 1.
        #[elsewhere("clip_threshold")]
        update_clip: Option<f64> = None;
        /// Adafactor: make steps relative to the root mean square of each parameter. Unset: false.
        #[elsewhere("scale_parameter")]
        relative_step: Option<bool> = None;
    }
}

section! {
    /// The learning rate over the steps.
    ScheduleSection = "schedule" {
        /// The shape of the schedule.
        #[elsewhere("lr_scheduler_type", "lr_decay_style", "decay_type", "type")]
        kind: ScheduleKind = ScheduleKind::Cosine;
        /// Steps over which the rate rises to its peak. Unset: 2 % of the steps, at most 2000; 20
        /// when the number of steps is not known.
        #[elsewhere("num_warmup_steps", "warmup_iters", "lr_warmup_iters", "warmup", "warmup_num_steps")]
        warmup_steps: Option<u64> = None;
        /// Steps over which the rate falls. Unset: all after the warmup for linear and cosine, the
        /// last 20 % for wsd.
        #[elsewhere("lr_decay_iters", "wsd_decay_iters", "lr_wsd_decay_iters")]
        decay_steps: Option<u64> = None;
        /// The shape of wsd's decay. Unset: linear.
        #[elsewhere("lr_wsd_decay_style")]
        decay_shape: Option<DecayShape> = None;
        /// The rate at the end of the decay, as a share of the peak. Unset: 0.1.
        #[elsewhere("min_lr_factor", "min_lr_ratio", "lr_min", "min_lr")]
        min_ratio: Option<f64> = None;
    }
}

section! {
    /// Recomputation: the tensors that are kept from forward for backward; the others are computed
    /// again.
    ActivationCheckpointingSection = "activation_checkpointing" {
        /// The mode of every block.
        #[elsewhere("recompute_granularity", "gradient_checkpointing")]
        mode: CheckpointMode = CheckpointMode::None;
        /// Other modes for some blocks: `[{ blocks = "0-5", mode = "full" }]`; later entries win.
        overrides: Overrides = Overrides(vec![]);
    }
}

section! {
    /// The device and its threads.
    ComputeSection = "compute" {
        /// The device: the processor, or a GPU (number N, or the one whose number is the rank's
        /// place on its host). `--set device=...` is short for it.
        device: DeviceKind = DeviceKind::Cpu;
        /// The fastest instruction set that kernels may use: portable, avx2, avx512, avx512-bf16,
        /// amx-bf16. Unset: the best of the machine.
        isa: Option<String> = None;
        /// Kernel threads. Unset: the cores that the process may use.
        #[elsewhere("num_threads", "omp_num_threads")]
        threads: Option<usize> = None;
        /// The instructions by which attention multiplies on a GPU in bf16 and f16, for heads of at
        /// most 128 columns and a multiple of 8. Other heads use multiply-adds.
        #[elsewhere("attn_implementation", "attention_backend")]
        attention: AttentionKernels = AttentionKernels::Auto;
    }
}

section! {
    /// Limits on memory.
    MemorySection = "memory" {
        /// The most bytes that the run's pool may hold: "2GiB" or a number. A checkpoint is written
        /// from a copy of the state only if the copy fits as well. Unset: the memory of the
        /// machine, or the limit of its container or job.
        #[elsewhere("max_memory", "memory_limit")]
        limit: Option<ByteSize> = None;
    }
}

section! {
    /// State that is kept in a lower tier (host or disk) while a step does not use it. Offloading
    /// changes no bit of any loss or weight.
    OffloadSection = "memory.offload" {
        /// Masters and optimizer state, chunk by chunk. From disk they are fetched, updated and
        /// written back; on the host they are updated in place.
        #[elsewhere("offload_optimizer", "offload_optimizer_device", "optimizer_cpu_offload")]
        optimizer: OffloadTier = OffloadTier::None;
        /// The parameters that forward and backward read: fetched unit by unit, `parallel.prefetch`
        /// units ahead.
        #[elsewhere("offload_param", "offload_param_device", "cpu_offload", "enable_cpu_offload")]
        parameters: OffloadTier = OffloadTier::None;
        /// Activations that forward keeps for backward: written after a unit's forward, fetched
        /// ahead of its backward.
        #[elsewhere("activation_offload", "cpu_offloading", "offload_activations")]
        activations: OffloadTier = OffloadTier::None;
        /// Sums of gradients: written when a micro-batch has finished a unit's, fetched for the
        /// next micro-batch and read by the update. The same tier as `optimizer`, or none.
        #[elsewhere("offload_gradients", "offload_grads", "pin_gradients", "cpu_offload_gradients")]
        gradients: OffloadTier = OffloadTier::None;
        /// The folder of the files, one per rank and purpose, while the run lasts. Unset: `offload`
        /// in the run's folder.
        #[elsewhere("nvme_path", "offload_dir", "offload_folder")]
        directory: Option<PathBuf> = None;
        /// The most elements whose optimizer state is moved and updated at a time. Update rules
        /// that need whole matrices move whole units.
        #[elsewhere("buffer_size", "sub_group_size")]
        chunk_elements: usize = 1 << 20;
    }
}

section! {
    /// The times at which checkpoints are written, and the ones that are kept. One is always
    /// written at the end, and before each evaluation that follows new steps.
    CheckpointSection = "checkpoint" {
        /// Steps between checkpoints. Unset: no limit in steps.
        #[elsewhere("interval", "save_interval", "save_steps", "every")]
        interval_steps: Option<u64> = None;
        /// Seconds between checkpoints. Unset: 600 when `interval_steps` is unset too, else no
        /// limit in time.
        interval_seconds: Option<f64> = None;
        /// Number of newest checkpoints that are kept.
        #[elsewhere("keep_latest_k", "save_total_limit", "keep_last_n")]
        keep_last: usize = 2;
        /// Keep the checkpoint with the lowest validation loss as well. Unset: true when there is
        /// validation data.
        #[elsewhere("load_best_model_at_end", "save_best")]
        keep_best: Option<bool> = None;
    }
}

section! {
    /// Loss on held-back text.
    EvaluationSection = "evaluation" {
        /// Steps between evaluations. Unset: only at the end.
        #[elsewhere("eval_interval", "eval_steps", "freq", "interval")]
        interval_steps: Option<u64> = None;
        /// The most tokens that one evaluation predicts, from the beginning of the validation text,
        /// whatever the batch and the ranks. Unset: the whole validation text.
        #[elsewhere("eval_iters", "steps", "max_eval_batches", "eval_tokens")]
        tokens_max: Option<u64> = None;
        /// Training ends after this many evaluations in a row without a lower loss. Unset: it goes
        /// on to its limit.
        #[elsewhere("patience", "early_stopping_rounds")]
        early_stopping_patience: Option<u64> = None;
        /// The least difference by which an evaluation's loss must be lower than that of the last
        /// improvement to count as one. Unset: 0.
        #[elsewhere("min_delta", "early_stopping_threshold")]
        early_stopping_min_delta: Option<f64> = None;
    }
}

section! {
    /// Suspicious losses and gradient norms. They are said when they happen, with step and samples,
    /// and written to `health.jsonl`.
    HealthSection = "health" {
        /// The reaction to a step whose loss or gradient norm is a spike.
        on_spike: OnSpike = OnSpike::Warn;
        /// Deviations above the median of the last 128 steps from which a loss or norm is a spike.
        /// A deviation is 1.4826 times the median absolute deviation, at least 2 % of the median
        /// loss and 10 % of the median norm.
        spike_deviations: f64 = 10.0;
        /// Steps between comparisons of the parameters of ranks that must hold the same ones. A
        /// difference is an error of the memory or the arithmetic of a host: the run ends, and
        /// names the rank that is alone. 0: never. Replicas that train apart (update.rule) are not
        /// compared.
        compare_interval_steps: u64 = 100;
        /// Steps between looks for units of feed-forward layers that have got no gradient for long,
        /// by the optimizer's first moments. 0: never. Optimizers without them are not looked at.
        dead_units_interval_steps: u64 = 100;
    }
}

section! {
    /// Records beside the display.
    MetricsSection = "metrics" {
        /// Write `metrics.jsonl`: one object per step, see `interval_steps`.
        jsonl: bool = true;
        /// Steps between records in `metrics.jsonl` and for TensorBoard. The first, the last and
        /// skipped steps are always recorded. Unset: 1 for the first 10,000 steps, 10 up to
        /// 100,000, 100 up to 1,000,000 and so on.
        interval_steps: Option<u64> = None;
        /// Write TensorBoard event files.
        #[elsewhere("enable_tensorboard", "report_to")]
        tensorboard: bool = true;
        /// Keep a record of the run for `trainyard doctor` and `trainyard trace`: the times of
        /// every instruction of recent steps (`trace/`), and a sample of the machine a second
        /// (`monitor.jsonl`).
        record: bool = true;
        /// Write `trace/rank-0.json`: a timeline, for Perfetto, of the program's instructions in
        /// the first and the last steps since the run was started or resumed.
        #[elsewhere("enable_profiling", "profiling")]
        profile: bool = false;
        /// Steps in the timeline at either end of a run, counted from its start or resumption. The
        /// last ones are written when it ends, so a process that is killed leaves only the first.
        profile_steps: u64 = 200;
    }
}
