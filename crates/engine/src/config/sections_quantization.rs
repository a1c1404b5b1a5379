//! `[quantization]`: training that knows of the rounding of weights.

use super::section::section;

section! {
    /// Quantisation-aware training (Jacob et al. 2018, Liu et al. 2023): forward and backward read
    /// the matrices of blocks rounded to the grid of `trainyard quantize --method rtn`, and the
    /// gradient goes to the unrounded f32 masters as it is (straight-through, Bengio et al. 2013).
    /// Checkpoints hold the masters. See docs/compression.md.
    QuantizationSection = "quantization" {
        /// Bits of the grid: 2, 3, 4 or 8. Unset: weights are not rounded.
        #[elsewhere("qat", "quantizer_bits", "weight_bits", "w_bits", "wbits", "fake_quant_bits")]
        aware: Option<u8> = None;
        /// Neighbours of a row that share a scale; 0: all of a row. Unset: 128.
        #[elsewhere("groupsize", "group_size", "q_group_size", "quantization_group_size")]
        group: Option<usize> = None;
        /// The share of the steps after which weights are rounded. Unset: 0, from the beginning.
        #[elsewhere("fake_quant_after_n_steps", "qat_begin")]
        begin: Option<f64> = None;
    }
}
