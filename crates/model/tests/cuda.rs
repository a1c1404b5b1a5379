//! The functions computed on CUDA are those of transformers too: the goldens of `golden.rs`, on
//! emulated kernels or on a GPU (`TRAINYARD_TEST_DEVICE`).

mod common;

use common::golden::{check, check_in};
use common::{MIXTURES, cuda, dense_goldens};
use trainyard_autograd::Policy;
use trainyard_tensor::DType;

#[test]
fn logits_and_every_gradient_on_cuda_agree_with_transformers() {
    for name in dense_goldens() {
        let (tested, device) = cuda();
        check(name, &device, Policy::Everything, true);
        assert_eq!(tested.problems(), [""; 0], "{name}");
    }
}

#[test]
fn half_precision_on_cuda_stays_near_transformers() {
    for (dtype, tolerance) in [(DType::BF16, 0.03), (DType::F16, 0.004)] {
        for name in dense_goldens() {
            let (tested, device) = cuda();
            check_in(name, &device, dtype, tolerance);
            assert_eq!(tested.problems(), [""; 0], "{name}");
        }
    }
}

#[test]
fn mixtures_on_cuda_agree_with_transformers() {
    for name in MIXTURES {
        for (policy, eager) in [(Policy::Everything, true), (Policy::Selective, false)] {
            let (tested, device) = cuda();
            check(name, &device, policy, eager);
            assert_eq!(tested.problems(), [""; 0], "{name}");
        }
    }
}
