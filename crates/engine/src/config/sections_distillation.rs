//! `[distillation]`: a teacher whose distribution of the next token the model learns from.

use super::section::section;
use super::value::choices;
use std::path::PathBuf;

choices! {
    /// A measure of how far the student's distribution q is from the teacher's p.
    DivergenceKind {
        /// KL(p | q): the student covers all that the teacher thinks possible.
        ForwardKl = "forward_kl",
        /// KL(q | p): the student keeps to what the teacher thinks likely.
        ReverseKl = "reverse_kl",
        /// Between the two, by `beta` (Agarwal et al. 2024).
        JensenShannon = "jensen_shannon",
    }
}

section! {
    /// Distillation (Hinton et al. 2015): in training, a share of the loss is the divergence
    /// between the model's distribution of each next token and that of a teacher with the same
    /// tokenizer. Validation losses are plain cross-entropy. The teacher's weights lie whole on
    /// every rank that computes the loss.
    DistillationSection = "distillation" {
        /// The teacher: the folder of a run, whose newest checkpoint is used, a Hugging Face folder
        /// or a GGUF file. Unset: none.
        #[elsewhere("teacher_model", "teacher_model_name_or_path", "teacher_model_path", "teacher_checkpoint_path")]
        teacher: Option<PathBuf> = None;
        /// The share of the divergence in the loss, 0 to 1; the rest is cross-entropy with the
        /// data's tokens. Unset: 0.5.
        #[elsewhere("kd_ratio", "kd_alpha", "kd_loss_weight")]
        weight: Option<f64> = None;
        /// The divisor of both models' logits in the divergence. The divergence is multiplied by
        /// its square, which keeps the size of its gradient. Unset: 1.
        #[elsewhere("kd_temperature", "distillation_temperature")]
        temperature: Option<f64> = None;
        /// The measure of how far the student's distribution is from the teacher's. Unset:
        /// `forward_kl`.
        #[elsewhere("kd_loss", "kd_loss_type")]
        divergence: Option<DivergenceKind> = None;
        /// The teacher's share in the mixture that `jensen_shannon` compares both with. Unset: 0.5.
        #[elsewhere("jsd_beta")]
        beta: Option<f64> = None;
        /// Weight of the mean squared difference between the final hidden states of both models,
        /// which is added to the loss. Both must be equally wide, as where blocks were dropped.
        #[elsewhere("hidden_loss_weight", "alpha_mse", "alpha_hidden")]
        hidden_weight: f64 = 0.0;
        /// Folder in which the teacher's final hidden states are kept by sequence, for later
        /// epochs, other students and resumed runs; its logits follow from them exactly. Sequences
        /// that are there need no forward of the teacher. Unset: nothing is kept.
        #[elsewhere("logits_cache", "cached_logits_path")]
        cache: Option<PathBuf> = None;
    }
}
