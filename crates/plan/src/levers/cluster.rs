//! Prices setups on a cluster: as the planner does, on programs and costs that edits have changed.

use super::edit::{Edit, local_steps};
use super::{Bench, Optimizer, Price, ReduceFormat, Setup};
use crate::planner::breakdown;
use crate::price::Known;
use crate::{Facts, PricedStep, Pricer, Request, TimeCategory};
use trainyard_program::{Action, Keep, MemoryKind, Mesh, Program, lower_stages};
use trainyard_sim::{Cluster, Costs};

/// A cluster, and the model and batch of a request.
pub struct ClusterBench<'a> {
    /// The request. A setup overrides its batch, length and layout.
    pub request: &'a Request,
    /// The facts that prices rest on.
    pub facts: &'a Facts,
    /// The present setup, whose model is a student's teacher.
    pub base: &'a Setup,
    /// True for a setup whose settings the engine knows.
    pub knows: &'a dyn Fn(&Setup) -> bool,
}

impl Bench for ClusterBench<'_> {
    fn price(&self, setup: &Setup) -> Result<Price, String> {
        let mut bare = setup.clone();
        let Some(at) = bare.edits.iter().position(|edit| matches!(edit, Edit::LocalSteps { .. })) else {
            return self.synchronous(setup);
        };
        let Edit::LocalSteps { every } = bare.edits.remove(at) else { unreachable!("it was found by its kind") };
        // A replica by itself is a cluster of its own.
        let candidate = bare.candidate;
        let alone = bare.with(crate::Candidate { mesh: Mesh { dp_replicate: 1, ..candidate.mesh }, ..candidate });
        let island = self.synchronous(&alone)?;
        let (together, alone) = (self.step(&bare)?, self.step(&alone)?);
        let average_s = (together.reduce_s() - alone.reduce_s()).max(0.0);
        let moments = together.resident(MemoryKind::Optimizer);
        let memory_bytes_s = self.request.cluster.device.memory_gb_s * 1e9 * self.facts.constants.memory_share;
        Ok(local_steps(island, every, average_s, moments, memory_bytes_s))
    }

    fn runs(&self, setup: &Setup) -> bool {
        setup.candidate.runnable().is_yes() && (self.knows)(setup)
    }
}

/// A simulated step with the costs that priced it.
struct Step {
    step: PricedStep,
    costs: Costs,
    bytes: u64,
}

impl Step {
    /// Seconds of all reductions of a rank.
    fn reduce_s(&self) -> f64 {
        let seconds = |program: &Program| -> f64 {
            let reductions = program.instructions.iter().filter(|one| matches!(one.action, Action::Reduce { .. }));
            reductions.map(|reduction| self.costs.device_s(program, reduction, Keep::Everything)).sum()
        };
        self.step.programs.iter().map(seconds).fold(0.0, f64::max)
    }

    /// The most bytes of a kind that a rank holds for the whole step.
    fn resident(&self, kind: MemoryKind) -> f64 {
        let held = |program: &Program| -> i64 {
            program.resident.iter().filter(|effect| effect.kind == kind).map(|effect| effect.bytes).sum()
        };
        self.step.programs.iter().map(held).max().unwrap_or(0) as f64
    }
}

impl ClusterBench<'_> {
    fn synchronous(&self, setup: &Setup) -> Result<Price, String> {
        let Step { step, bytes, .. } = self.step(setup)?;
        let mut price = Price {
            step_s: step.step_s,
            bytes,
            bytes_max: Some(self.request.bytes_max()),
            breakdown: breakdown(&step),
            remarks: Vec::new(),
        };
        if setup.edits.contains(&Edit::Teacher) {
            let teacher = self.step(self.base)?;
            let forward_s = breakdown(&teacher.step).seconds(TimeCategory::Forward);
            price.step_s += forward_s * setup.tokens() / self.base.tokens();
            price.bytes += teacher.resident(MemoryKind::Parameters) as u64;
        }
        Ok(price)
    }

    fn step(&self, setup: &Setup) -> Result<Step, String> {
        let request = self.request_of(setup);
        let candidate = setup.candidate;
        let pricer = Pricer::new(&request, &[candidate], &self.facts.stack, &self.facts.constants);
        let Known { shape, costs } = pricer.known(&candidate);
        let mut costs = costs.clone();
        let mut strategy = pricer.strategy(&candidate);
        if setup.reduce == ReduceFormat::Bf16 {
            strategy.bytes.reduce = 2;
        }
        // What software holds beyond AdamW's moments, it holds for every optimizer.
        let spared = Optimizer::AdamW.state_bytes() - setup.optimizer.state_bytes();
        for bytes in [&mut strategy.bytes, &mut costs.stack.state] {
            bytes.optimizer = bytes.optimizer.saturating_sub(spared);
            bytes.optimizer_scales = setup.optimizer.scale_bytes();
        }
        let mut programs = lower_stages(shape, &candidate.mesh, &strategy).map_err(|error| error.to_string())?;
        for edit in &setup.edits {
            programs.iter_mut().for_each(|program| edit.program(program));
            change(edit, &mut costs);
        }
        let step = PricedStep::simulated(programs, &costs).map_err(|error| error.to_string())?;
        let bytes = pricer.with_overhead(step.peak_bytes());
        Ok(Step { step, costs, bytes })
    }

    /// The request with the setup's batch, length and model.
    fn request_of(&self, setup: &Setup) -> Request {
        let mut request = self.request.clone();
        let own = request.own.as_mut();
        if (setup.layers, setup.ffn) != (request.model.layers, request.model.ffn) {
            (request.model.layers, request.model.ffn) = (setup.layers, setup.ffn);
            if let Some(own) = own {
                (own.spec.layers, own.spec.ffn_dim) = (setup.layers as usize, setup.ffn as usize);
                own.spec.sliding_layers = None;
            }
        }
        // A replica by itself has fewer devices than the cluster.
        let ranks = setup.candidate.mesh.ranks();
        if ranks < request.cluster.devices() {
            let devices_per_node = request.cluster.devices_per_node.min(ranks);
            let nodes = ranks.div_ceil(devices_per_node);
            request.cluster = Cluster { devices_per_node, nodes, ..request.cluster };
        }
        Request {
            global_batch: setup.global_batch(),
            sequence_length: setup.sequence_length,
            formats: vec![setup.candidate.format],
            ..request
        }
    }
}

/// Changes the prices of kernels.
fn change(edit: &Edit, costs: &mut Costs) {
    let bytes_s = costs.cluster.device.memory_gb_s * 1e9 * costs.constants.memory_share;
    match *edit {
        Edit::Codec { passes, .. } => {
            // Encoding is a kernel beside the gradient's.
            for unit in &mut costs.kinds {
                unit.backward_weights_s += passes * f64::from(costs.stack.state.gradient) * unit.elements / bytes_s;
            }
        }
        Edit::Adapters { share } => {
            for unit in &mut costs.kinds {
                // The products with adapters do their share of FLOPs more.
                unit.forward_s *= 1.0 + share;
                unit.backward_input_s *= 1.0 + share;
                unit.backward_weights_s *= share;
                unit.elements *= share;
            }
        }
        Edit::Freeze { blocks } => {
            let frozen = costs.kinds.len();
            let Some(kind) = costs.kind_of.get(1).copied() else { return };
            let mut unit = costs.kinds[kind].clone();
            (unit.backward_input_s, unit.backward_weights_s, unit.selective_s) = (0.0, 0.0, 0.0);
            (unit.accumulate_s, unit.elements) = (0.0, 0.0);
            unit.launches[1] = 0.0;
            costs.kinds.push(unit);
            costs.kind_of.iter_mut().skip(1).take(blocks as usize).for_each(|kind| *kind = frozen);
        }
        Edit::OptimizerBytes { share } => {
            let optimizer = &mut costs.stack.state.optimizer;
            *optimizer = (f64::from(*optimizer) * share).round() as u32;
        }
        Edit::FakeQuantisation => {
            let copy = if costs.stack.state.parameter > 0 { f64::from(costs.stack.state.parameter) } else { 4.0 };
            for unit in &mut costs.kinds {
                unit.forward_s += Edit::PASS * copy * unit.elements / bytes_s;
            }
        }
        Edit::ParameterBytes { .. }
        | Edit::LocalSteps { .. }
        | Edit::Integers
        | Edit::Pruned
        | Edit::Teacher
        | Edit::FreeLoading
        | Edit::FreeExchanges => {}
    }
}
