//! Timing of Muon's steps of a block's matrices, checked first.
//!
//! The update of the first matrix is compared with the iteration in `f64`; only then the step is
//! timed. FLOPs are those that symmetric products need, so that half a product is not counted as a
//! whole one.

use super::array::Array;
use crate::cpu::Cpu;
use crate::cpu::muon::{Matrix, Muon, MuonScale, flops, muon, workspace};
use crate::cpu::peak::Peaks;
use crate::dtype::{DType, Element};
use crate::reference::optim::newton_schulz;

/// The matrices of one block.
#[derive(Clone, Debug)]
pub struct Block {
    /// Name of the model.
    pub name: &'static str,
    /// Rows and columns of each matrix.
    pub shapes: Vec<[usize; 2]>,
}

impl Block {
    /// Four square matrices of attention, and those of the perceptron.
    fn new(name: &'static str, width: usize, perceptron: &[[usize; 2]]) -> Block {
        Block { name, shapes: [&[[width; 2]; 4], perceptron].concat() }
    }

    /// The blocks that are measured: the character model, a small Llama, and GPT-2.
    pub fn all() -> Vec<Block> {
        vec![
            Block::new("shakespeare", 384, &[[1536, 384], [384, 1536]]),
            Block::new("llama 256", 256, &[[704, 256], [704, 256], [256, 704]]),
            Block::new("gpt2", 768, &[[3072, 768], [768, 3072]]),
        ]
    }
}

/// A measured block.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Name of the model.
    pub name: &'static str,
    /// Dtype of the iteration.
    pub dtype: DType,
    /// FLOPs of a step of all matrices.
    pub flops: u64,
    /// Median seconds of it.
    pub seconds: f64,
    /// The peak of the dtype in FLOP/s, sampled in turn.
    pub peak: f64,
}

/// An update that is wrong by more than rounding.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "muon of {name} in {dtype}: the update is {error:.2e} from the f64 iteration's in the 2-norm, more than {bound:.2e}: not timed"
)]
pub struct WrongUpdate {
    name: &'static str,
    dtype: DType,
    error: f64,
    bound: f64,
}

/// Times a step of a block, at least three times and for about `seconds`, after checking it.
///
/// # Errors
/// When the kernel is wrong.
pub fn measure<W: Element>(cpu: &Cpu, peaks: &Peaks, block: &Block, seconds: f64) -> Result<Measured, WrongUpdate> {
    let hyper =
        Muon { lr: 1.0, momentum: 0.0, nesterov: false, weight_decay: 0.0, scale: MuonScale::Original, iterations: 5 };
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let lengths = || block.shapes.iter().map(|[rows, columns]| rows * columns);
    let gradients: Vec<_> = lengths().map(|len| Array::from_fn(len, &mut random)).collect();
    let zeros = || lengths().map(Array::<f32>::zeros).collect::<Vec<_>>();
    let (mut params, mut momentum) = (zeros(), zeros());
    let mut copies: Vec<_> = lengths().map(Array::<W>::zeros).collect();
    let scratch = block.shapes.iter().map(|[rows, columns]| Array::<W>::zeros(workspace(*rows, *columns)));
    let mut scratch: Vec<_> = scratch.collect();
    let mut step = |params: &mut [Array<f32>]| {
        let state = params.iter_mut().zip(&gradients).zip(&mut momentum).zip(&mut copies).zip(&mut scratch);
        let mut matrices = Vec::new();
        for (((((params, gradients), momentum), copy), workspace), shape) in state.zip(&block.shapes) {
            let (copy, gradient_scale, shape) = (Some(&mut copy[..]), 1.0, *shape);
            matrices.push(Matrix { hyper, shape, gradient_scale, params, gradients, momentum, copy, workspace });
        }
        muon(cpu, &mut matrices);
    };
    step(&mut params);
    check(block, W::DTYPE, &hyper, &gradients[0], &params[0])?;
    let sample = || peaks.sample(cpu, W::DTYPE);
    let [seconds, peak] = super::gemm::time_in_turn(|| step(&mut params), sample, seconds);
    let flops = block.shapes.iter().map(|shape| flops(*shape, hyper.iterations)).sum();
    Ok(Measured { name: block.name, dtype: W::DTYPE, flops, seconds, peak })
}

/// Compares the first matrix, whose step took it from zero to its update.
fn check(block: &Block, dtype: DType, hyper: &Muon, gradient: &[f32], params: &[f32]) -> Result<(), WrongUpdate> {
    let [rows, columns] = block.shapes[0];
    let gradient: Vec<f64> = gradient.iter().map(|g| f64::from(*g)).collect();
    let wanted = newton_schulz(&gradient, [rows, columns], hyper.iterations);
    let step = f64::from(hyper.lr * hyper.scale.factor(rows, columns));
    let (mut apart, mut length) = (0.0, 0.0);
    for (found, wanted) in params.iter().zip(&wanted) {
        apart += (f64::from(*found) + step * wanted).powi(2);
        length += (step * wanted).powi(2);
    }
    // A step rounds the matrix and its polynomial, which changes singular values near one by no
    // more; smaller ones grow by 3.4445 with their errors, and there are few.
    let bound = if dtype == DType::F32 { 1e-4 } else { 0.05 };
    let error = (apart / length).sqrt();
    if error.is_nan() || error > bound {
        return Err(WrongUpdate { name: block.name, dtype, error, bound });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::UNBEATEN;
    use super::*;
    use crate::cpu::Isa;
    use crate::dtype::bf16;

    fn small() -> Block {
        Block { name: "small", shapes: vec![[40, 33], [24, 70]] }
    }

    #[test]
    fn a_small_block_passes_its_check() {
        let cpu = Cpu::new(Isa::detect(), 2);
        let timed = measure::<bf16>(&cpu, &UNBEATEN, &small(), 0.0).unwrap();
        assert_eq!(timed.flops, 5 * (3 * 33 * 33 * 40 + 33 * 33 * 33 + 3 * 24 * 24 * 70 + 24 * 24 * 24));
        assert!(measure::<f32>(&cpu, &UNBEATEN, &small(), 0.0).unwrap().seconds > 0.0);
    }
}
