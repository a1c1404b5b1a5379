//! `[precision]`: the number formats of products.

use super::section::section;
use super::sections::Compute;
use super::value::choices;

choices! {
    /// The recipe for products with 8-bit operands.
    Fp8Recipe {
        /// No 8-bit operands.
        Off = "off",
        /// Inputs and weights of linear layers as E4M3, gradients of their outputs as E5M2
        /// (Micikevicius et al. 2022).
        Hybrid = "hybrid",
    }
}

choices! {
    /// The recipe for products of 8-bit integers.
    Int8Recipe {
        /// No integers.
        Off = "off",
        /// Inputs, weights and gradients of outputs of linear layers as codes with a scale for each
        /// row; gradients of weights as `compute` (SwitchBack, Wortsman et al. 2023).
        Switchback = "switchback",
    }
}

/// The default of `precision.fp8_amax_history`, in steps.
pub const FP8_AMAX_HISTORY: u64 = 1024;

section! {
    /// The number formats of the arithmetic.
    PrecisionSection = "precision" {
        /// The number format of matrix products.
        #[elsewhere("dtype", "mixed_precision", "mixed_precision_param", "torch_dtype")]
        compute: Compute = Compute::Bf16;
        /// f32 on GPUs: round the operands of products to TF32 (10 bits of fraction), which tensor
        /// cores multiply about ten times as fast.
        #[elsewhere("allow_tf32", "float32_matmul_precision")]
        tf32: bool = false;
        /// On top of bf16: multiply 8-bit operands in the linear layers of the blocks, scaled by
        /// the largest values of earlier steps. GPUs need compute capability 8.9; processors
        /// compute the same numbers in bf16, slower. See docs/gpu.md.
        #[elsewhere("fp8_format", "enable_fp8_linear", "fp8_recipe")]
        fp8: Fp8Recipe = Fp8Recipe::Off;
        /// fp8: number of earlier steps whose largest values decide the scales. Unset: 1024.
        #[elsewhere("amax_history_len", "fp8_amax_history_len")]
        fp8_amax_history: Option<u64> = None;
        /// fp8: powers of two that scales leave as headroom above the largest values of earlier
        /// steps. Unset: 0.
        #[elsewhere("margin")]
        fp8_margin: Option<u64> = None;
        /// Multiply the linear layers of the blocks in 8-bit integers, forward and for the
        /// gradients of their inputs: about twice as fast as bf16 on processors with AVX-512 VNNI.
        /// See docs/training.md.
        #[elsewhere("int8_mixed_precision_training", "switchback", "use_int8")]
        int8: Int8Recipe = Int8Recipe::Off;
        /// f16: the first loss scale, a power of two. Unset: 65536.
        #[elsewhere("initial_scale_power", "init_scale", "initial_loss_scale")]
        loss_scale_initial: Option<f64> = None;
        /// f16: steps without overflow after which the scale doubles. Unset: 1000.
        #[elsewhere("growth_interval")]
        loss_scale_window: Option<u64> = None;
    }
}
