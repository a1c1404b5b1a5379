//! The main path from a question to an answer: make the programs, price their instructions,
//! simulate, add up memory.

use crate::constants::Constants;
use crate::costs::Costs;
use crate::measurement::{Case, MemoryFigure};
use crate::simulate::{MemoryUse, SimulateError, Simulated, memory, simulate};
use crate::stack::Partition;
use crate::transformer::Units;
use trainyard_program::{Program, Strategy, StrategyError, lower_stages};

/// A lowered question. Its programs do not depend on prices.
#[derive(Clone, PartialEq, Debug)]
pub struct Lowered {
    case: Case,
    units: Units,
    /// One program per pipeline stage.
    pub programs: Vec<Program>,
}

/// The prediction of a step.
#[derive(Clone, PartialEq, Debug)]
pub struct Prediction {
    /// The simulation of the programs.
    pub simulated: Simulated,
    /// Memory of each stage.
    pub memory: Vec<MemoryUse>,
    /// Tokens per second and device.
    pub tokens_per_s: f64,
    /// Bytes of the device's memory.
    pub device_bytes: f64,
    /// Bytes of the driver and the communication library.
    context_bytes: f64,
    /// Shares of memory that a caching allocator loses, and that it holds while there is room.
    fragmentation: f64,
    cached: f64,
}

/// The reason why there is no prediction.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum PredictError {
    /// The strategy cannot be lowered.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// The programs do not come to an end.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}

/// Lowers `case`, prices the programs and simulates them. Software that keeps gathered inputs of
/// products gathers them again if keeping them does not fit.
///
/// # Errors
///
/// A strategy that cannot be lowered.
pub fn predict(case: &Case, constants: &Constants) -> Result<Prediction, PredictError> {
    let prediction = Lowered::new(case)?.predict(constants)?;
    if prediction.fits() || !case.stack.keeps_gathered {
        return Ok(prediction);
    }
    let mut again = case.clone();
    again.stack.keeps_gathered = false;
    Ok(Lowered::new(&again)?.predict(constants)?)
}

impl Lowered {
    /// Lowers one rank of each stage.
    ///
    /// # Errors
    ///
    /// A strategy that cannot be lowered.
    pub fn new(case: &Case) -> Result<Lowered, StrategyError> {
        let units = case.model.units(&case.work, &case.stack);
        let shape = units.shape(&case.work, case.model.tied, case.stack.sequence_parallel);
        let strategy = Strategy { cuts: cuts(case), ..case.strategy.clone() };
        let programs = lower_stages(&shape, &case.mesh, &strategy)?;
        Ok(Lowered { case: case.clone(), units, programs })
    }

    fn costs(&self, constants: &Constants) -> Costs {
        let Case { work, cluster, stack, format, .. } = &self.case;
        Costs::new(&self.units, work, cluster, stack, constants, *format)
    }

    /// Predicts the speed of a step without its memory: tokens per second and device.
    ///
    /// # Errors
    ///
    /// Programs that do not come to an end.
    pub fn tokens_per_s(&self, constants: &Constants) -> Result<f64, SimulateError> {
        let simulated = simulate(&self.programs, &self.costs(constants))?;
        Ok(self.case.tokens_per_device() / simulated.step_s)
    }

    /// Prices the programs and simulates them.
    ///
    /// # Errors
    ///
    /// Programs that do not come to an end.
    pub fn predict(&self, constants: &Constants) -> Result<Prediction, SimulateError> {
        let costs = self.costs(constants);
        let simulated = simulate(&self.programs, &costs)?;
        let stages = self.programs.iter().zip(&simulated.ranks);
        let memory = stages.map(|(program, time)| memory(program, time, &costs)).collect();
        let stack = &self.case.stack;
        Ok(Prediction {
            tokens_per_s: self.case.tokens_per_device() / simulated.step_s,
            simulated,
            memory,
            device_bytes: self.case.cluster.device.memory_gb * 1e9,
            context_bytes: (constants.context_gb + stack.buckets_gb) * 1e9,
            fragmentation: if stack.expandable { constants.expandable } else { constants.fragmentation },
            cached: if stack.expandable { constants.expandable } else { constants.cached },
        })
    }
}

/// The first unit of every pipeline stretch but the first, by the stack's division of units among
/// stages.
fn cuts(case: &Case) -> Vec<u32> {
    let stretches = case.strategy.pipeline.stretches(case.mesh.pp);
    let blocks = case.model.layers + case.model.encoder_layers;
    let units = blocks + 2;
    match case.stack.partition {
        _ if stretches == 1 || units < stretches => Vec::new(),
        // The lowering divides layers equally itself. Where that is not possible, embedding and
        // head are counted as layers, as 126 blocks on 16 stages of 8 stretches.
        Partition::Layers if blocks.is_multiple_of(stretches) || !units.is_multiple_of(stretches) => Vec::new(),
        Partition::Layers | Partition::Units => (1..stretches).map(|cut| cut * units / stretches).collect(),
        Partition::Cost => {
            let head = f64::from(case.model.vocab) * f64::from(case.model.dim);
            let block = case.model.block_elements();
            let total = block * f64::from(units - 2) + head;
            // A stage takes the units up to the one nearest to its share of the total. The
            // embedding counts nothing.
            let mut cuts = Vec::new();
            for unit in 1..units {
                let spent = block * f64::from(unit - 1);
                let left_cuts = stretches - 1 - cuts.len() as u32;
                let share = total * (cuts.len() + 1) as f64 / f64::from(stretches);
                if left_cuts > 0 && (spent > share - 0.5 * block || units - unit == left_cuts) {
                    cuts.push(unit);
                }
            }
            cuts
        }
    }
}

impl Prediction {
    /// Bytes of tensors on the fullest stage.
    pub fn held_bytes(&self) -> f64 {
        self.memory.iter().map(|stage| stage.peak_bytes).fold(0.0, f64::max)
    }

    /// Bytes of memory of the fullest stage, as `figure` counts them. The result does not exceed
    /// the device's memory, because an allocator frees its cache near the limit.
    pub fn memory_bytes(&self, figure: MemoryFigure) -> f64 {
        let held = self.held_bytes();
        let most = |bytes: f64| bytes.min(self.device_bytes.max(self.needed_bytes()));
        match figure {
            MemoryFigure::Allocated => held,
            MemoryFigure::Reserved => most(held * (1.0 + self.cached)),
            MemoryFigure::Device => most(held * (1.0 + self.cached) + self.context_bytes),
        }
    }

    /// The share of the step in which compute waits, on the rank that computes longest.
    pub fn waiting(&self) -> f64 {
        self.simulated.waiting()
    }

    /// Bytes of memory that the device must have.
    pub fn needed_bytes(&self) -> f64 {
        self.held_bytes() * (1.0 + self.fragmentation) + self.context_bytes
    }

    /// True if the step fits.
    pub fn fits(&self) -> bool {
        self.needed_bytes() <= self.device_bytes
    }
}
