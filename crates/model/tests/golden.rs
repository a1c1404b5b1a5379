//! The functions computed are those of transformers: logits and every gradient of tiny models of
//! each family, as `scripts/golden/make_goldens.py` got them from transformers in f32.

mod common;

use common::golden::{check, check_in};
use common::*;
use trainyard_autograd::Policy;
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::{DType, Device};

#[test]
fn logits_and_every_gradient_agree_with_transformers() {
    for name in GOLDENS {
        check(name, &cpu(), Policy::Everything, true);
    }
}

#[test]
fn the_same_with_cheap_results_recomputed_and_the_loss_taken_in_backward() {
    for name in GOLDENS {
        check(name, &cpu(), Policy::Selective, false);
    }
}

#[test]
fn the_same_on_every_rung_of_this_machine() {
    for isa in Isa::available() {
        for name in ["gpt2", "qwen3", "dots1"] {
            check(name, &Device::cpu(isa, 2, None), Policy::Everything, true);
        }
    }
}

/// In 16 bits the same functions, to their resolution: 2^-8 of each value in bf16, 2^-11 in f16,
/// some of it at every layer.
#[test]
fn half_precision_stays_near() {
    for (dtype, tolerance) in [(DType::BF16, 0.03), (DType::F16, 0.004)] {
        for name in dense_goldens() {
            check_in(name, &cpu(), dtype, tolerance);
        }
    }
}
