//! A model of one's own in under a hundred lines of code. Its blocks run attention and MLP side by
//! side from one norm, as in GPT-J and PaLM, which neither built-in family does. It learns to
//! repeat the token before the current one.
//!
//!     cargo run --release -p trainyard-model --example own_model

use trainyard_autograd::functions::LinearOptions;
use trainyard_autograd::{ParamId, Parameters, Policy, RandomKey, Tape, Var};
use trainyard_model::unit::require_input;
use trainyard_model::{Forward, Init, Model, ParameterKind, ParameterSpec, Result, Unit};
use trainyard_tensor::cpu::{Isa, attention::AttentionSpec, gemm::Activation};
use trainyard_tensor::{Device, Purpose};

const DIM: usize = 32;
const HEADS: usize = 4;
const VOCAB: usize = 16;
const LENGTH: usize = 24;

/// The part of the model that a unit is.
enum Part {
    Embedding,
    ParallelBlock,
    Head,
}

struct OwnUnit {
    name: String,
    index: u32,
    part: Part,
    parameters: Vec<ParameterSpec>,
}

impl OwnUnit {
    fn boxed(index: u32, name: &str, part: Part, shapes: &[(&str, &[usize])]) -> Box<dyn Unit> {
        let parameter = |(name, shape): &(&str, &[usize])| {
            let normal = Init::Normal { std: 0.1 };
            let (kind, init) =
                if shape.len() == 1 { (ParameterKind::Norm, Init::Ones) } else { (ParameterKind::Matrix, normal) };
            ParameterSpec::new(name, shape, init, kind, *name)
        };
        Box::new(OwnUnit { name: name.into(), index, part, parameters: shapes.iter().map(parameter).collect() })
    }
}

impl Unit for OwnUnit {
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var> {
        let p = |index| ParamId::new(self.index, index);
        if let Part::Embedding = self.part {
            return Ok(tape.embedding(&cx.batch.tokens, p(0), Some((&cx.batch.positions, p(1))))?);
        }
        let x = require_input(&self.name, input)?;
        let h = tape.rms_norm(x, p(0), 1e-5)?;
        if let Part::Head = self.part {
            return Ok(tape.linear_cross_entropy(&h, p(1), cx.targets()?, 1.0 / cx.batch.counted as f32)?);
        }
        let plain = LinearOptions::default();
        let qkv = tape.linear(&h, p(1), plain)?;
        let heads = AttentionSpec::causal(HEADS, HEADS, DIM / HEADS);
        let attended = tape.attention(&qkv, heads, &cx.batch.segments)?;
        let wide = tape.linear(&h, p(3), LinearOptions { activation: Activation::Silu, ..plain })?;
        let x = tape.linear(&attended, p(2), LinearOptions { residual: Some(x), ..plain })?;
        Ok(tape.linear(&wide, p(4), LinearOptions { residual: Some(&x), ..plain })?)
    }
}

/// Trains for `steps` steps and gives the loss of each.
pub fn train(steps: usize) -> Result<Vec<f32>> {
    let block: &[(&str, &[usize])] =
        &[("norm", &[DIM]), ("qkv", &[3 * DIM, DIM]), ("out", &[DIM, DIM]), ("up", &[64, DIM]), ("down", &[DIM, 64])];
    let units = vec![
        OwnUnit::boxed(0, "embedding", Part::Embedding, &[("tokens", &[VOCAB, DIM]), ("positions", &[LENGTH, DIM])]),
        OwnUnit::boxed(1, "block.0", Part::ParallelBlock, block),
        OwnUnit::boxed(2, "block.1", Part::ParallelBlock, block),
        OwnUnit::boxed(3, "head", Part::Head, &[("norm", &[DIM]), ("lm", &[VOCAB, DIM])]),
    ];
    let model = Model::from_units(units, VOCAB)?;
    let device = Device::cpu(Isa::detect(), 2, None);
    let mut store = model.initial_store(&device, 1)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let tokens: Vec<i32> = (0..4 * LENGTH).map(|i| ((i * i + 7 * step * (i + 3)) / 5 % VOCAB) as i32).collect();
        let targets: Vec<i32> = (0..tokens.len()).map(|i| if i % LENGTH == 0 { -100 } else { tokens[i - 1] }).collect();
        let batch = model.rows(&device, LENGTH, &tokens, Some(&targets))?;
        let (parameters, mut gradients) = store.split();
        let mut tape = Tape::new(&device, &parameters, Policy::Everything, RandomKey { seed: 1, step: 0, site: 0 });
        let loss = model.forward(&mut tape, &mut Forward::training(&batch, 1.0))?;
        let one = device.tensor([], &[1.0f32], Purpose::Activations)?;
        tape.finish().backward(&[(&loss, one)], &[], &parameters, &mut gradients)?;
        losses.push(loss.tensor().to_scalar()?);
        // Descent by the gradient's sign, with a falling step.
        for (id, _) in model.parameters() {
            let Some(gradient) = store.take_gradient(id) else { continue };
            let mut value = store.parameter(id)?.value;
            for (w, g) in value.data_mut::<f32>()?.iter_mut().zip(gradient.data::<f32>()?) {
                *w -= 0.01 * (1.0 - step as f32 / steps as f32) * g.signum();
            }
        }
    }
    Ok(losses)
}

#[allow(dead_code, reason = "the test that runs this file calls `train`")]
fn main() -> Result<()> {
    let losses = train(200)?;
    for (step, loss) in losses.iter().enumerate().filter(|(step, _)| step % 20 == 19) {
        println!("step {step:3}  loss {loss:.3}");
    }
    Ok(())
}
