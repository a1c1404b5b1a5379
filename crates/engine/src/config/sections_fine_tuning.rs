//! `[fine_tuning]`: the part of a model that is trained, and adapters.

use super::freeze_schedule::FreezeSchedule;
use super::section::section;
use super::value::{Names, choices};
use std::path::PathBuf;

choices! {
    /// A kind of adapter.
    AdapterMethod {
        /// No adapters.
        None = "none",
        /// Two narrow matrices whose product is added to each weight (LoRA, Hu et al. 2021).
        Lora = "lora",
        /// The same, and a trained norm for each row of the sum (DoRA, Liu et al. 2024).
        Dora = "dora",
    }
}

choices! {
    /// The form of frozen matrices in memory.
    BaseDtype {
        /// That in which they are multiplied: `precision.compute`.
        Compute = "compute",
        /// 8-bit integers with a scale per 256 elements.
        Int8 = "int8",
        /// 4-bit codes of the quantiles of a normal distribution with a scale per 64 elements
        /// (QLoRA, Dettmers et al. 2023).
        Nf4 = "nf4",
    }
}

section! {
    /// Fine-tuning: what of the model is trained, and adapters on its linear layers. What is not
    /// trained has no gradient, no f32 master and no optimizer state, and is not in checkpoints.
    FineTuningSection = "fine_tuning" {
        /// Adapters on linear layers. The model itself is then frozen.
        #[elsewhere("peft_type", "use_peft", "finetuning_type", "use_dora")]
        adapter: AdapterMethod = AdapterMethod::None;
        /// Width between an adapter's two matrices. Unset: 16.
        #[elsewhere("lora_rank", "lora_r", "r", "lora_dim")]
        rank: Option<usize> = None;
        /// The output of an adapter is multiplied by alpha / rank. Unset: twice the rank.
        #[elsewhere("lora_alpha")]
        alpha: Option<f64> = None;
        /// True: by alpha / sqrt(rank), which keeps large ranks useful (Kalajdzievski 2023).
        #[elsewhere("use_rslora")]
        rank_stabilised: Option<bool> = None;
        /// The linear layers that have adapters, by the last part of their names in Hugging Face
        /// files: `["q_proj", "v_proj"]`. Unset: all in the blocks.
        #[elsewhere("target_modules", "lora_target", "lora_target_modules")]
        targets: Option<Names> = None;
        /// A folder with a PEFT adapter (`adapter_config.json`, `adapter_model.safetensors`) to
        /// begin with. Rank, alpha and targets must be its own. Unset: adapters that add nothing.
        from: Option<PathBuf> = None;
        /// The form in which the frozen matrices of blocks lie in memory. A block's are decoded
        /// while it runs. Embedding, head, norms and routers stay as they are.
        #[elsewhere("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "quantization_bit")]
        base_dtype: BaseDtype = BaseDtype::Compute;
        /// Patterns of parameters that are not trained: `embedding.*`, `block.*.norm1.weight`. `*`
        /// stands for any characters. A pattern that no parameter matches is an error.
        #[elsewhere("freeze_params", "freeze_layers")]
        freeze: Names = Names(vec![]);
        /// Patterns of parameters that are trained although `freeze` or adapters freeze them.
        #[elsewhere("modules_to_save", "trainable_params")]
        train: Names = Names(vec![]);
        /// Freezing by schedule: entries as `{ from_step = 200, frozen = ["block.0.*"] }`, in
        /// ascending order. From step `from_step` on, counted from 0, the patterns of `frozen` say
        /// what is not trained beside what `freeze` and adapters freeze, until the next entry. They
        /// may name parameters of adapters. Before the first entry nothing more is frozen.
        #[elsewhere("gradual_unfreezing", "unfreeze_schedule", "freeze_epochs")]
        freeze_schedule: FreezeSchedule = FreezeSchedule(vec![]);
        /// Factor from the learning rate of each block to that of the block before it, above 0 and
        /// at most 1; the head trains with the whole rate, the embedding with the least. Unset: 1.
        #[elsewhere("layer_decay", "layerwise_lr_decay", "llrd")]
        layer_rate_decay: Option<f64> = None;
    }
}
