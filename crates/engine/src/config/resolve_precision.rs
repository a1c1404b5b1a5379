//! Resolves `[precision]`.

use super::DeviceKind;
use super::resolve::Resolver;
use super::sections::*;
use super::sections_precision::*;

impl Resolver {
    pub(super) fn precision(&mut self) {
        let PrecisionSection { compute, tf32, loss_scale_initial, loss_scale_window, .. } =
            self.config.precision.clone();
        self.fp8();
        self.int8();
        let device = self.config.compute.device;
        let elsewhere = match (device, compute) {
            (DeviceKind::Cpu, _) => Some("compute.device is cpu, which has no TF32".to_owned()),
            (_, Compute::F32) => None,
            _ => Some(format!("TF32 is for products of f32, and precision.compute is {compute}")),
        };
        if let Some(because) = elsewhere {
            self.unused("precision.tf32", &tf32.then_some(()), &because);
        }
        if compute != Compute::F16 {
            let because = format!("only f16 scales its loss, and precision.compute is {compute}");
            self.unused("precision.loss_scale_initial", &loss_scale_initial, &because);
            return self.unused("precision.loss_scale_window", &loss_scale_window, &because);
        }
        let scale = self.settle("precision.loss_scale_initial", &loss_scale_initial, 65536.0, "2^16, the usual");
        // Scaling by a power of two changes only exponents, so it loses no precision.
        if !(1.0..=16_777_216.0).contains(&scale) || scale.log2().fract() != 0.0 {
            let message = format!("precision.loss_scale_initial = {scale} must be a power of two from 1 to 16777216");
            self.problem("precision.loss_scale_initial", message);
        }
        let window = self.settle("precision.loss_scale_window", &loss_scale_window, 1000, "the usual");
        self.count("precision.loss_scale_window", Some(window), 1, u64::MAX);
    }

    fn fp8(&mut self) {
        let PrecisionSection { compute, fp8, fp8_amax_history, fp8_margin, .. } = self.config.precision.clone();
        if fp8 == Fp8Recipe::Off {
            let because = "precision.fp8 is off";
            self.unused("precision.fp8_amax_history", &fp8_amax_history, because);
            return self.unused("precision.fp8_margin", &fp8_margin, because);
        }
        if compute != Compute::Bf16 {
            let message = format!(
                "precision.fp8 = \"{fp8}\" is for products of bf16, and precision.compute is {compute}: set precision.compute = \"bf16\""
            );
            self.problem("precision.fp8", message);
        }
        let history = self.settle(
            "precision.fp8_amax_history",
            &fp8_amax_history,
            FP8_AMAX_HISTORY,
            "as Transformer Engine has it",
        );
        self.count("precision.fp8_amax_history", Some(history), 1, 65536);
        let margin = self.settle("precision.fp8_margin", &fp8_margin, 0, "as Transformer Engine has it");
        // E4M3 has fifteen powers of two at full precision; a larger margin would leave most of
        // them unused.
        self.count("precision.fp8_margin", Some(margin), 0, 8);
    }

    fn int8(&mut self) {
        if self.config.precision.int8 == Int8Recipe::Off {
            return;
        }
        let key = "precision.int8";
        if self.config.precision.fp8 != Fp8Recipe::Off {
            let message = "precision.int8 and precision.fp8 both round the operands of the same products: set one of them to \"off\"";
            self.problem(key, message);
        }
        if matches!(self.config.compute.device, DeviceKind::Cuda(_)) {
            let message = "precision.int8 has kernels for processors only: set precision.fp8 = \"hybrid\", or compute.device = \"cpu\"";
            self.problem(key, message);
        }
        if self.config.parallel.tensor_parallel_degree > 1 {
            let message = "precision.int8 scales whole rows of operands, which parallel.tensor_parallel_degree divides: set that to 1, or \
                           precision.int8 = \"off\"";
            self.problem(key, message);
        }
    }
}
