//! A model of one's own, trained by the engine on ranks that share it. Its blocks run attention and
//! MLP side by side from one norm, as in GPT-J and PaLM, which neither built-in family does. It
//! learns to repeat the token before the current one.
//!
//!     cargo run --release -p trainyard-engine --example own_model

use trainyard_autograd::functions::LinearOptions;
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_engine::config::Config;
use trainyard_engine::links::Links;
use trainyard_engine::rank::{Rank, RankSettings, StepSettings};
use trainyard_engine::state::Holding;
use trainyard_engine::{Result, shape, world};
use trainyard_model::unit::require_input;
use trainyard_model::{Batch, BatchShape, Forward, Init, Model, ParameterKind, ParameterSpec, Unit};
use trainyard_program::{Mesh, StateBytes, Strategy};
use trainyard_tensor::Device;
use trainyard_tensor::cpu::{Isa, attention::AttentionSpec, gemm::Activation};

const DIM: usize = 32;
const HEADS: usize = 4;
const VOCAB: usize = 16;
const LENGTH: usize = 24;
/// Micro-batches of a step over all ranks, and the sequences of each.
const MICRO_BATCHES: u32 = 4;
const ROWS: usize = 2;

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

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> trainyard_model::Result<Var> {
        let p = |index| ParamId::new(self.index, index);
        if let Part::Embedding = self.part {
            return Ok(tape.embedding(&cx.batch.tokens, p(0), Some((&cx.batch.positions, p(1))))?);
        }
        let x = require_input(&self.name, input)?;
        let h = tape.rms_norm(x, p(0), 1e-5)?;
        if let Part::Head = self.part {
            return Ok(tape.linear_cross_entropy(&h, p(1), cx.targets()?, cx.loss_scale()?)?);
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

fn units() -> Vec<Box<dyn Unit>> {
    let block: &[(&str, &[usize])] =
        &[("norm", &[DIM]), ("qkv", &[3 * DIM, DIM]), ("out", &[DIM, DIM]), ("up", &[64, DIM]), ("down", &[DIM, 64])];
    vec![
        OwnUnit::boxed(0, "embedding", Part::Embedding, &[("tokens", &[VOCAB, DIM]), ("positions", &[LENGTH, DIM])]),
        OwnUnit::boxed(1, "block.0", Part::ParallelBlock, block),
        OwnUnit::boxed(2, "block.1", Part::ParallelBlock, block),
        OwnUnit::boxed(3, "head", Part::Head, &[("norm", &[DIM]), ("lm", &[VOCAB, DIM])]),
    ]
}

/// Micro-batch `number` of a step: each target is the token before.
fn micro_batch(device: &Device, model: &Model, step: u64, number: usize) -> Result<Batch> {
    let place = number * ROWS * LENGTH..(number + 1) * ROWS * LENGTH;
    let tokens: Vec<i32> = place.map(|i| ((i * i + 7 * step as usize * (i + 3)) / 5 % VOCAB) as i32).collect();
    let targets: Vec<i32> = (0..tokens.len()).map(|i| if i % LENGTH == 0 { -100 } else { tokens[i - 1] }).collect();
    Ok(model.rows(device, LENGTH, &tokens, Some(&targets))?)
}

/// Trains for `steps` steps on the ranks of `mesh`, which divide their state as `zero_stage` says.
/// Gives the loss of each step.
pub fn train(mesh: Mesh, zero_stage: u8, steps: u64) -> Result<Vec<f64>> {
    let mut config = Config::default();
    config.optimizer.learning_rate = Some(0.01);
    let settings = RankSettings::new(config.resolve_optimizer()?, 1);
    world::on_threads(mesh.ranks() as usize, |world| {
        let (device, model) = (Device::cpu(Isa::detect(), 1, None), Model::from_units(units(), VOCAB)?);
        let own = world.rank() as u32;
        let strategy = Strategy {
            accumulation_steps: MICRO_BATCHES / mesh.data_parallel(),
            zero_stage,
            bytes: StateBytes::F32,
            ..Strategy::new(model.units().len())
        };
        let rows = BatchShape::uniform(ROWS, LENGTH);
        let program = shape::program(&model, &rows, settings.compute, &mesh, &strategy, own)?;
        let mut rank = Rank::new(&device, model, Holding::of(&program), Links::new(&world, &program)?, &settings)?;
        let first = mesh.data_rank(own) * strategy.accumulation_steps;
        (0..steps)
            .map(|step| {
                let mut numbers = first as usize..;
                let load = |device: &Device, model: &Model| {
                    micro_batch(device, model, step, numbers.next().unwrap_or_default())
                };
                let rate_factor = 1.0 - step as f64 / steps as f64;
                let settings = StepSettings { step, rate_factor, clip_norm: Some(1.0) };
                Ok(rank.execute(&program, settings, load, |_, _| Ok(()))?.loss)
            })
            .collect()
    })
}

#[allow(dead_code, reason = "the test that runs this file calls `train`")]
fn main() -> Result<()> {
    // Two pipeline stages; `Mesh::data(1, 2)` with stage 3 would shard the parameters instead.
    let losses = train(Mesh { pp: 2, ..Mesh::default() }, 0, 200)?;
    for (step, loss) in losses.iter().enumerate().filter(|(step, _)| step % 20 == 19) {
        println!("step {step:3}  loss {loss:.3}");
    }
    Ok(())
}
