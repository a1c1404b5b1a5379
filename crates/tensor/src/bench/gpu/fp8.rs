//! Products of eight bits in the three forms of training, and the rounding of their operands.

use super::products::{DY, W, X, check_elements};
use super::{Result, Sizes, Timing, time, tolerance};
use crate::cpu::gemm::Activation;
use crate::cuda::fp8::{input_gradient, linear, round, weight_gradient};
use crate::cuda::peak::{Peaks, random, random_value};
use crate::cuda::{PRODUCT_WORKSPACE, driver::Product};
use crate::error::{Result as TensorResult, TensorError};
use crate::ops::fp8::{Fp8, Slot};
use crate::{DType, Device, Purpose, Tensor, bf16};

/// An operand in bf16, rounded as it lies and transposed.
struct Operand {
    format: Fp8,
    slot: Slot,
    wide: Tensor,
    rows: Tensor,
    columns: Tensor,
}

/// The factor for numbers below 1.
const fn scale(format: Fp8) -> f32 {
    match format {
        Fp8::E4M3 => 256.0,
        Fp8::E5M2 => 32_768.0,
    }
}

impl Operand {
    fn new(device: &Device, [rows, columns]: [usize; 2], format: Fp8, seed: u64) -> TensorResult<Operand> {
        let number = |x: f32| device.tensor([1], &[x], Purpose::Workspace);
        let codes = |shape: [usize; 2]| device.empty(shape, DType::U8, Purpose::Workspace);
        let scale = scale(format);
        let amax = device.zeros([1], DType::U32, Purpose::Workspace)?;
        let operand = Operand {
            format,
            slot: Slot { scale: number(scale)?, inverse: number(1.0 / scale)?, amax },
            wide: random(device, &[rows, columns], DType::BF16, seed)?,
            rows: codes([rows, columns])?,
            columns: codes([columns, rows])?,
        };
        operand.round()?;
        Ok(operand)
    }

    fn round(&self) -> TensorResult<()> {
        let gpu = self.wide.device().as_cuda().expect("a GPU");
        round(gpu, &self.wide, self.format, &self.slot, Some(&self.rows), Some(&self.columns))
    }

    fn rows(&self) -> (&Tensor, Fp8, &Slot) {
        (&self.rows, self.format, &self.slot)
    }

    fn columns(&self) -> (&Tensor, Fp8, &Slot) {
        (&self.columns, self.format, &self.slot)
    }
}

/// Element `at` of an operand, as its code says.
fn rounded(format: Fp8, seed: u64, at: usize) -> f64 {
    let wide = bf16::from_f32(random_value(seed, at)).to_f32();
    f64::from(format.decode(format.encode(wide * scale(format)))) / f64::from(scale(format))
}

/// Times the three products of every layer with operands of eight bits, and the rounding of its
/// input and of its output's gradient, each for about `seconds`; `peak` is
/// [`crate::cuda::peak::fp8`].
///
/// # Errors
/// A product that is wrong, a GPU without products of eight bits, and those of the device.
pub fn fp8(device: &Device, peaks: &Peaks, peak: f64, sizes: &Sizes, seconds: f64) -> Result<Vec<Timing>> {
    let gpu = device.as_cuda().filter(|gpu| gpu.properties().capability >= Product::FP8_CAPABILITY);
    let gpu = gpu.ok_or(TensorError::NotImplemented { device: device.name(), op: "products of eight bits" })?;
    let workspace = device.empty([PRODUCT_WORKSPACE / 4], DType::F32, Purpose::Workspace)?;
    let mut timings = Vec::new();
    for &[tokens, inputs, outputs] in &sizes.layers {
        let x = Operand::new(device, [tokens, inputs], Fp8::E4M3, X)?;
        let w = Operand::new(device, [outputs, inputs], Fp8::E4M3, W)?;
        let dy = Operand::new(device, [tokens, outputs], Fp8::E5M2, DY)?;
        let empty = |shape: [usize; 2], dtype| device.empty(shape, dtype, Purpose::Workspace);
        let timing = |form: &'static str| Timing {
            name: format!("{tokens} x {inputs} to {outputs}, {form}, fp8"),
            kind: "fp8",
            form,
            dtype: DType::U8,
            sizes: vec![("tokens", tokens), ("inputs", inputs), ("outputs", outputs)],
            flops: 2.0 * (tokens * inputs * outputs) as f64,
            bytes: (tokens * (inputs + outputs) + inputs * outputs) as f64,
            seconds: 0.0,
            peak_share: 0.0,
        };
        let mut timed = |form: &'static str, call: &mut dyn FnMut() -> TensorResult<()>| -> Result<()> {
            let timing = Timing { seconds: time(device, seconds, call)?, ..timing(form) };
            timings.push(Timing { peak_share: timing.flops / timing.seconds / peak, ..timing });
            Ok(())
        };
        let layer = [tokens, inputs, outputs];
        let what = |form: &str| format!("the {form} product of {layer:?} in fp8");

        let y = empty([tokens, outputs], DType::BF16)?;
        timed("forward", &mut || linear(gpu, x.rows(), w.rows(), None, Activation::None, None, None, &y, &workspace))?;
        check_elements(&y, &what("forward"), tolerance(DType::BF16), inputs, |row, column, k| {
            rounded(Fp8::E4M3, X, row * inputs + k) * rounded(Fp8::E4M3, W, column * inputs + k)
        })?;
        drop(y);

        let dx = empty([tokens, inputs], DType::BF16)?;
        timed("input-gradient", &mut || input_gradient(gpu, [dy.rows(), w.columns()], &dx, &workspace))?;
        check_elements(&dx, &what("input-gradient"), tolerance(DType::BF16), outputs, |row, column, k| {
            rounded(Fp8::E5M2, DY, row * outputs + k) * rounded(Fp8::E4M3, W, k * inputs + column)
        })?;
        drop(dx);

        let dw = empty([outputs, inputs], DType::F32)?;
        timed("weight-gradient", &mut || weight_gradient(gpu, [dy.columns(), x.columns()], &dw, true, &workspace))?;
        check_elements(&dw, &what("weight-gradient"), tolerance(DType::BF16), tokens, |row, column, k| {
            rounded(Fp8::E5M2, DY, k * outputs + row) * rounded(Fp8::E4M3, X, k * inputs + column)
        })?;
        for (operand, form) in [(&x, "rounding of the input"), (&dy, "rounding of the gradient")] {
            // Read in bf16, written twice.
            let (bytes, seconds) = (4.0 * operand.rows.elements() as f64, time(device, seconds, || operand.round())?);
            let peak_share = bytes / seconds / peaks.copy_bytes_per_s;
            timings.push(Timing { flops: 0.0, bytes, seconds, peak_share, ..timing(form) });
        }
    }
    Ok(timings)
}
