//! From a question to an answer: lower, price, simulate, add up memory.

use crate::constants::Constants;
use crate::costs::Costs;
use crate::measurement::{Case, MemoryFigure};
use crate::simulate::{MemoryUse, SimulateError, Simulated, memory, simulate};
use trainyard_program::{Program, StrategyError, lower_rank};

/// What is known of a step before it runs.
#[derive(Clone, PartialEq, Debug)]
pub struct Prediction {
    /// One program per pipeline stage.
    pub programs: Vec<Program>,
    /// How they ran.
    pub simulated: Simulated,
    /// Memory of each stage.
    pub memory: Vec<MemoryUse>,
    /// Tokens per second and device.
    pub tokens_per_s: f64,
    /// What the driver and the communication library hold, bytes.
    pub context_bytes: f64,
    /// Share that a caching allocator holds beyond what is used.
    pub fragmentation: f64,
}

/// A question without an answer.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum PredictError {
    /// No program.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// A program that does not come to an end.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}

/// Lowers `case` for one rank of each stage, prices the programs and plays them.
///
/// # Errors
///
/// A strategy that cannot be lowered.
pub fn predict(case: &Case, constants: &Constants) -> Result<Prediction, PredictError> {
    let units = case.model.units(&case.work, &case.stack);
    let shape = units.shape(&case.work, case.model.tied);
    let costs = Costs::new(&units, &case.work, &case.cluster, &case.stack, constants, case.format);
    let programs = (0..case.mesh.pp)
        .map(|stage| lower_rank(&shape, &case.mesh, &case.strategy, stage * case.mesh.stage_ranks()))
        .collect::<Result<Vec<Program>, StrategyError>>()?;
    let simulated = simulate(&programs, &costs)?;
    let memory = programs.iter().zip(&simulated.ranks).map(|(program, time)| memory(program, time, &costs)).collect();
    Ok(Prediction {
        tokens_per_s: case.tokens_per_device() / simulated.step_s,
        programs,
        simulated,
        memory,
        context_bytes: constants.context_gb * 1e9,
        fragmentation: constants.fragmentation,
    })
}

impl Prediction {
    /// Memory of the fullest stage, bytes, as `figure` counts it.
    pub fn memory_bytes(&self, figure: MemoryFigure) -> f64 {
        let held = self.memory.iter().map(|stage| stage.peak_bytes).fold(0.0, f64::max);
        match figure {
            MemoryFigure::Allocated => held,
            MemoryFigure::Reserved => held * (1.0 + self.fragmentation),
            MemoryFigure::Device => held * (1.0 + self.fragmentation) + self.context_bytes,
        }
    }
}
