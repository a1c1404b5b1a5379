//! Prices setups on this machine: each is resolved, lowered and executed without data like a run,
//! and its kernels are priced from the profile by `trainyard calibrate`.

use super::settings::{has_settings, settings};
use crate::commands::config::resolve_for;
use crate::output::chain;
use anyhow::Result;
use trainyard_calibrate::Forecast;
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_plan::Candidate;
use trainyard_plan::here::Room;
use trainyard_plan::levers::{Bench, Edit, Price, Setup, is_exchange, local_steps};
use trainyard_plan::{Breakdown, TimeCategory};
use trainyard_program::{Action, Instruction, Lane, Memory, MemoryKind, Mesh, Program};
use trainyard_sim::MachineProfile;
use trainyard_sim::host::{HostLayout, HostPrices, Priced, play};
use trainyard_tensor::Call;

/// This machine, and a configuration.
pub struct MachineBench<'a> {
    /// Makes the configuration with settings over it.
    pub load: &'a dyn Fn(&[String]) -> Result<Config>,
    /// The profile.
    pub profile: &'a MachineProfile,
    /// The ranks.
    pub inputs: &'a Inputs,
    /// The configuration's own setup.
    pub base: &'a Setup,
    /// The memory that ranks may use.
    pub room: Room,
}

/// A simulated step.
struct Step {
    price: Price,
    programs: Vec<Program>,
    /// Seconds of all reductions of a rank, one after the other.
    reduce_s: f64,
    layout: HostLayout,
}

impl Step {
    /// The most bytes of a kind that a rank holds for the whole step.
    fn resident(&self, kind: MemoryKind) -> f64 {
        let held = |program: &Program| -> i64 {
            program.resident.iter().filter(|effect| effect.kind == kind).map(|effect| effect.bytes).sum()
        };
        self.programs.iter().map(held).max().unwrap_or(0) as f64
    }
}

impl Bench for MachineBench<'_> {
    fn price(&self, setup: &Setup) -> Result<Price, String> {
        self.priced(setup).map_err(|error| chain(&error))
    }

    fn runs(&self, setup: &Setup) -> bool {
        setup.candidate.runnable().is_yes() && self.by_settings(setup).is_ok_and(|(_, rest)| rest.is_empty())
    }
}

impl MachineBench<'_> {
    fn priced(&self, setup: &Setup) -> Result<Price> {
        let mut bare = setup.clone();
        let Some(at) = bare.edits.iter().position(|edit| matches!(edit, Edit::LocalSteps { .. })) else {
            let mut price = self.step(setup, None)?.price;
            if setup.edits.contains(&Edit::Teacher) {
                let teacher = self.step(self.base, None)?;
                let forward_s = teacher.price.breakdown.seconds(TimeCategory::Forward);
                price.step_s += forward_s * setup.tokens() / self.base.tokens();
                price.bytes += teacher.resident(MemoryKind::Parameters) as u64;
            }
            return Ok(price);
        };
        let Edit::LocalSteps { every } = bare.edits.remove(at) else { unreachable!("it was found by its kind") };
        let candidate = bare.candidate;
        let alone = bare.with(Candidate { mesh: Mesh { dp_replicate: 1, ..candidate.mesh }, ..candidate });
        let together = self.step(&bare, None)?;
        // The replicas share the cores as they do together.
        let alone = self.step(&alone, Some(together.layout))?;
        let average_s = (together.reduce_s - alone.reduce_s).max(0.0);
        let moments = together.resident(MemoryKind::Optimizer);
        let memory_bytes_s = self.profile.speeds.copy_bytes_per_s;
        Ok(local_steps(alone.price, every, average_s, moments, memory_bytes_s))
    }

    /// The configuration of `setup`, and the edits that it has no settings for. If the settings of
    /// one are refused, all are left to the program.
    fn by_settings(&self, setup: &Setup) -> Result<(Resolved, Vec<Edit>)> {
        let resolved = |setup: &Setup| resolve_for(&(self.load)(&settings(self.base, setup))?, self.inputs.clone());
        let (set, rest): (Vec<Edit>, _) = setup.edits.iter().partition(|edit| has_settings(edit));
        match resolved(&Setup { edits: set, ..setup.clone() }) {
            Ok(resolved) => Ok((resolved, rest)),
            Err(_) if !setup.edits.contains(&Edit::Integers) => {
                Ok((resolved(&Setup { edits: Vec::new(), ..setup.clone() })?, setup.edits.clone()))
            }
            Err(error) => Err(error),
        }
    }

    /// Simulates `setup`. `layout` overrides the way in which ranks share the cores.
    fn step(&self, setup: &Setup, layout: Option<HostLayout>) -> Result<Step> {
        let (resolved, edits) = self.by_settings(setup)?;
        let Forecast { stages, layout: own } = trainyard_calibrate::forecast(&resolved, &self.profile.machine)?;
        let layout = layout.unwrap_or(own);
        let prices = HostPrices::new(self.profile, layout, self.profile.speeds);
        let (mut programs, mut all, mut bytes, mut remarks) = (Vec::new(), Vec::new(), 0, Vec::new());
        for (before, needs) in stages {
            let mut program = before.clone();
            edits.iter().for_each(|edit| edit.program(&mut program));
            let mut priced = prices.program(&program, &needs.calls);
            for edit in &edits {
                self.change(edit, &before, &needs.calls, &prices, &mut priced);
            }
            let [was, is] = [&before, &program].map(|program| Memory::of(program).peak_bytes as i64);
            bytes = bytes.max((needs.memory.peak_total() as i64 + is - was).max(0) as u64);
            let unpriced: Vec<String> = prices.unpriced(&needs.calls).into_keys().collect();
            if !unpriced.is_empty() {
                remarks = vec![format!("kernels that the profile does not have: {}", unpriced.join(", "))];
            }
            programs.push(program);
            all.push(priced);
        }
        let pairs: Vec<(&Program, &[Priced])> =
            programs.iter().zip(&all).map(|(program, priced)| (program, &priced[..])).collect();
        let simulated = play(&pairs, layout, self.profile);
        let reduce_s = programs.iter().zip(&all).map(|(program, priced)| reductions_s(program, priced));
        let reduce_s = reduce_s.fold(0.0, f64::max);
        let compute = Lane::Compute as usize;
        let longest = (0..programs.len())
            .max_by(|a, b| simulated.ranks[*a].busy_s[compute].total_cmp(&simulated.ranks[*b].busy_s[compute]))
            .unwrap_or(0);
        let price = Price {
            step_s: simulated.step_s,
            bytes,
            bytes_max: self.limit(&resolved),
            breakdown: Breakdown::of(&programs[longest], &simulated.ranks[longest], simulated.step_s),
            remarks,
        };
        Ok(Step { price, programs, reduce_s, layout })
    }

    fn limit(&self, resolved: &Resolved) -> Option<u64> {
        self.room.limit(resolved.parallel.ranks).map(|limit| limit.bytes)
    }

    /// Changes the prices of a program's instructions.
    fn change(&self, edit: &Edit, program: &Program, calls: &[Call], prices: &HostPrices<'_>, priced: &mut [Priced]) {
        let copy_s = |bytes: f64| bytes / self.profile.speeds.copy_bytes_per_s;
        let instructions = || program.instructions.iter().enumerate();
        match *edit {
            Edit::Codec { passes, .. } => {
                for (number, one) in instructions().filter(|(_, one)| matches!(one.action, Action::Reduce { .. })) {
                    priced[number].work_s += copy_s(passes * one.bytes as f64);
                }
            }
            Edit::Adapters { share } => {
                for call in calls {
                    let spared = (1.0 - adapted_share(call.kernel, share)) * prices.call_s(call);
                    if let Some(priced) = priced.get_mut(call.tag as usize) {
                        priced.work_s = (priced.work_s - spared).max(0.0);
                    }
                }
            }
            Edit::Freeze { blocks } => {
                for (number, _) in instructions().filter(|(_, one)| is_frozen(one, blocks)) {
                    priced[number] = Priced::default();
                }
            }
            Edit::FakeQuantisation => {
                let parameters = program.resident.iter().filter(|effect| effect.kind == MemoryKind::Parameters);
                let of_a_unit = parameters.map(|effect| effect.bytes).sum::<i64>() as f64 / program.units.len() as f64;
                for (number, _) in instructions().filter(|(_, one)| matches!(one.action, Action::Forward { .. })) {
                    priced[number].work_s += copy_s(2.0 * of_a_unit);
                }
            }
            Edit::FreeLoading => {
                for (number, _) in instructions().filter(|(_, one)| matches!(one.action, Action::Load { .. })) {
                    priced[number] = Priced::default();
                }
            }
            Edit::FreeExchanges => {
                for (number, _) in instructions().filter(|(_, one)| is_exchange(&one.action)) {
                    priced[number] = Priced { exchange_s: 0.0, ..priced[number] };
                }
            }
            Edit::OptimizerBytes { share } => {
                for (number, _) in instructions().filter(|(_, one)| matches!(one.action, Action::Update { .. })) {
                    // Of the bytes that AdamW moves per parameter, gradient and master of 4 and two
                    // moments that are read and written, 16 are moments.
                    const MOVED: f64 = 4.0 + 2.0 * 4.0 + 16.0;
                    priced[number].work_s *= (MOVED - 16.0 * (1.0 - share)) / MOVED;
                }
            }
            Edit::ParameterBytes { .. } | Edit::LocalSteps { .. } | Edit::Integers | Edit::Pruned | Edit::Teacher => {}
        }
    }
}

/// Seconds of a program's reductions, one after the other.
fn reductions_s(program: &Program, priced: &[Priced]) -> f64 {
    let reductions =
        program.instructions.iter().zip(priced).filter(|(one, _)| matches!(one.action, Action::Reduce { .. }));
    reductions.map(|(_, price)| price.work_s + price.exchange_s).sum()
}

/// The time of a kernel when only adapters train, as a share of its time now. Adapters have the
/// `share` of the parameters.
fn adapted_share(kernel: &str, share: f64) -> f64 {
    match kernel {
        "linear_weight_gradient" | "accumulate" | "sum_of_squares" | "adamw" | "adamw8" | "lion" | "adafactor" => share,
        "embedding_backward" => 0.0,
        // One of three products of the head is its weight gradient.
        "linear_cross_entropy_with_gradients" => 2.0 / 3.0,
        "linear" | "linear_input_gradient" => 1.0 + share,
        _ => 1.0,
    }
}

/// True if nothing of the instruction is left when embedding and the first `blocks` blocks are
/// frozen.
fn is_frozen(instruction: &Instruction, blocks: u32) -> bool {
    let of_frozen = |unit: u32| unit <= blocks;
    match instruction.action {
        Action::Backward { unit, .. }
        | Action::Update { unit, .. }
        | Action::Reduce { unit, .. }
        | Action::Fold { unit, .. } => of_frozen(unit),
        _ => false,
    }
}
