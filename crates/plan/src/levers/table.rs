//! The table of levers. Another lever is another row, and a function in `options.rs` that offers
//! its setups.

use super::options as offers;
use super::{Lever, Offers, Place, Setup};

type Offer = fn(&Setup, &Place) -> Offers;

/// A lever that leaves the result of training as it is.
const fn exact(name: &'static str, offers: Offer, quality: &'static str, source: &'static str) -> Lever {
    Lever { name, offers, is_exact: true, quality, source }
}

/// A lever that changes what is trained.
const fn changes(name: &'static str, offers: Offer, quality: &'static str, source: &'static str) -> Lever {
    Lever { name, offers, is_exact: false, quality, source }
}

/// Sources that several rows have.
const EQUALITY: &str = "docs/equality.md";
const INVARIANT: &str = "docs/ARCHITECTURE.md, invariant 7";
const BATCH: &str = "McCandlish et al. 2018, arXiv 1812.06162; Merrill et al. 2025, arXiv 2505.23971";
const POWER_SGD: &str = "Vogels et al. 2019, arXiv 1905.13727";

/// Every lever.
pub const LEVERS: &[Lever] = &[
    // Batch.
    exact("micro-batch", offers::micro_batch, "none: sums in another order", EQUALITY),
    exact("accumulation", offers::accumulation, "none: sums in another order", EQUALITY),
    changes("batch size", offers::batch_size, "none below the critical batch; beyond it more tokens", BATCH),
    changes(
        "sequence length",
        offers::sequence_length,
        "shorter context; as a warm-up it steadies training",
        "Li et al. 2022, arXiv 2108.06084",
    ),
    // Precision.
    changes(
        "16-bit precision",
        offers::sixteen_bits,
        "as f32, with the same settings",
        "Kalamkar et al. 2019, arXiv 1905.12322",
    ),
    changes(
        "8-bit precision",
        offers::eight_bits,
        "close to 16 bits; watch the loss",
        "Micikevicius et al. 2022, arXiv 2209.05433",
    ),
    changes(
        "8-bit integers",
        offers::integers,
        "the loss of a small model was 0.2 % higher",
        "Wortsman et al. 2023, arXiv 2304.13013; docs/training.md",
    ),
    // Memory.
    exact("checkpointing", offers::checkpointing, "none: the same bits", INVARIANT),
    exact("offload", offers::offload, "none: the same bits", "docs/offload.md"),
    changes(
        "optimizer",
        offers::optimizer,
        "needs settings of its own; results vary by task",
        "Chen et al. 2023, arXiv 2302.06675; Shazeer and Stern 2018, arXiv 1804.04235",
    ),
    changes(
        "8-bit optimizer state",
        offers::optimizer_bits,
        "as 32-bit state on the published tasks",
        "Dettmers et al. 2021, arXiv 2110.02861",
    ),
    // Ranks.
    exact("data parallelism", offers::data_parallel, "none: sums in another order", EQUALITY),
    exact("ZeRO stage", offers::zero, "none: the same bits at any stage", INVARIANT),
    exact("sharding factor", offers::sharding_factor, "none: the same bits for powers of two", INVARIANT),
    exact("tensor parallelism", offers::tensor_parallel, "none: sums in another order", EQUALITY),
    exact(
        "pipeline parallelism",
        offers::pipeline_parallel,
        "none: the same bits if embeddings are not tied",
        INVARIANT,
    ),
    exact(
        "context parallelism",
        offers::context_parallel,
        "none: sums in another order",
        "Liu et al. 2023, arXiv 2310.01889",
    ),
    exact(
        "expert parallelism",
        offers::expert_parallel,
        "none, if no token is dropped",
        "Gale et al. 2022, arXiv 2211.15841",
    ),
    // Network.
    exact("overlap", offers::prefetch, "none: the same bits", INVARIANT),
    exact("perfect overlap", offers::perfect_overlap, "none", "a bound, not a setting"),
    changes(
        "gradients in bf16",
        offers::gradients_in_bf16,
        "rounds each sum once to 8 bits of mantissa",
        "docs/config.md, parallel.reduce_dtype",
    ),
    changes(
        "gradients in int8",
        offers::gradients_in_int8,
        "small, with error feedback",
        "Dettmers 2015, arXiv 1511.04561; Karimireddy et al. 2019, arXiv 1901.09847",
    ),
    changes(
        "gradients, top-k",
        offers::top_k,
        "small after a warm-up, with momentum correction",
        "Lin et al. 2017, arXiv 1712.01887",
    ),
    changes("gradients, low rank", offers::low_rank, "as plain SGD on the published tasks", POWER_SGD),
    // Update rule.
    changes(
        "local steps (DiLoCo)",
        offers::local_steps,
        "equals synchronous training with 500 local steps, 8 workers",
        "Douillard et al. 2023, arXiv 2311.08105",
    ),
    changes(
        "parameter server",
        offers::parameter_server,
        "stale gradients; bounded staleness converges",
        "Ho et al. 2013, NIPS (stale synchronous parallel)",
    ),
    // Data.
    exact("loading", offers::loading, "none", "docs/data.md"),
    exact("caching", offers::caching, "none", "docs/data.md"),
    exact("packing", offers::packing, "none; best-fit packing truncates less", "Ding et al. 2024, arXiv 2404.10830"),
    // Less work for a model.
    changes(
        "adapters",
        offers::adapters,
        "fine-tuning only: often as good as full fine-tuning",
        "Hu et al. 2021, arXiv 2106.09685",
    ),
    changes(
        "4-bit adapters",
        offers::quantised_adapters,
        "fine-tuning only: as 16-bit adapters",
        "Dettmers et al. 2023, arXiv 2305.14314",
    ),
    changes("freezing", offers::freezing, "fine-tuning only: costs some accuracy", "Lee et al. 2019, arXiv 1911.03090"),
    changes(
        "structured pruning",
        offers::structured_pruning,
        "needs retraining; a pruned, distilled model needs fewer tokens than a new one",
        "Muralidharan et al. 2024, arXiv 2407.14679",
    ),
    changes(
        "2:4 pruning",
        offers::two_of_four,
        "perplexity of Llama 2 7B 5.12 to 11.02 without retraining (Wanda)",
        "Sun et al. 2023, arXiv 2306.11695",
    ),
    changes(
        "quantisation-aware training",
        offers::quantisation_aware,
        "the 4-bit model loses less than one rounded afterwards",
        "torchao, README of quantisation-aware training",
    ),
    changes(
        "distillation",
        offers::distillation,
        "the student is smaller; it needs fewer tokens than alone",
        "Hinton et al. 2015, arXiv 1503.02531; Muralidharan et al. 2024, arXiv 2407.14679",
    ),
    // Runs.
    changes("search", offers::search, "none, if early losses rank the trials", "Li et al. 2018, arXiv 1810.05934"),
    changes(
        "averaging",
        offers::ensembles,
        "often better than the single model",
        "Wortsman et al. 2022, arXiv 2203.05482",
    ),
    exact("scheduling", offers::scheduling, "none", "Hanafy et al. 2023, arXiv 2302.08681"),
];
