//! `[experts]`: experts in the place of MLPs, their balance and their capacity.

use super::section::section;
use super::value::choices;

choices! {
    /// The function from a router's logits to scores.
    RouterGate {
        /// Shares of all experts: Mixtral, Qwen3-MoE.
        Softmax = "softmax",
        /// Each expert by itself: DeepSeek-V3, dots.llm1.
        Sigmoid = "sigmoid",
    }
}

section! {
    /// Experts in the place of MLPs, in families that have them: mixtral, qwen3_moe, dots1. Beside
    /// `model.path` only the keys of balance and capacity may be given.
    ExpertsSection = "experts" {
        /// Experts in a layer. Unset: 8; 16 for dots1.
        #[elsewhere("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")]
        count: Option<usize> = None;
        /// Experts that each token goes to. Unset: 2; 3 for dots1.
        #[elsewhere("num_experts_per_tok", "moe_router_topk", "experts_per_token")]
        top_k: Option<usize> = None;
        /// Inner width of an expert. Unset: `model.ffn_dim` for mixtral, half of it for qwen3_moe,
        /// a quarter for dots1.
        #[elsewhere("moe_intermediate_size", "moe_ffn_hidden_size", "moe_inter_dim")]
        ffn_dim: Option<usize> = None;
        /// Inner width of the shared experts together, which see every token; 0 for none. Unset:
        /// that of one expert for dots1, else 0.
        #[elsewhere("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")]
        shared_ffn_dim: Option<usize> = None;
        /// The function from logits to scores. Unset: sigmoid for dots1, else softmax.
        #[elsewhere("scoring_func", "moe_router_score_function", "score_func")]
        gate: Option<RouterGate> = None;
        /// Divide a token's scores by their sum. Unset: true.
        #[elsewhere("norm_topk_prob", "route_norm")]
        normalise: Option<bool> = None;
        /// Factor of all weights. Unset: 1.
        #[elsewhere("routed_scaling_factor", "moe_router_topk_scaling_factor", "route_scale")]
        scale: Option<f64> = None;
        /// Number of first layers that have an MLP instead. Unset: 0.
        #[elsewhere("first_k_dense_replace", "n_dense_layers", "moe_layer_freq")]
        dense_layers: Option<usize> = None;
        /// Factor of the auxiliary loss of each layer, E sum(f P) (Fedus et al. 2021). Unset:
        /// 0.001; 0 for dots1.
        #[elsewhere("router_aux_loss_coef", "moe_aux_loss_coeff", "aux_loss_alpha")]
        auxiliary_loss: Option<f64> = None;
        /// Factor of the router's z-loss of each layer (Zoph et al. 2022). Unset: 0.
        #[elsewhere("moe_z_loss_coeff", "router_z_loss_coef")]
        z_loss: Option<f64> = None;
        /// Step by which the bias of each expert moves in an update, against its load (Wang et al.
        /// 2024): balance without an auxiliary loss. Unset: 0.001 for dots1, else 0, which is
        /// without a bias.
        #[elsewhere("moe_router_bias_update_rate", "bias_update_speed", "load_balance_coeff")]
        bias_update_rate: Option<f64> = None;
        /// The rows of a micro-batch that an expert keeps in training, as a multiple of the mean;
        /// choices beyond are dropped. Unset: none are.
        #[elsewhere("moe_expert_capacity_factor", "expert_capacity")]
        capacity_factor: Option<f64> = None;
    }
}
