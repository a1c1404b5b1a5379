//! Update rules over a unit's flat buffers.
//!
//! A rule's state is a list of named tensors per unit. Element-wise rules (AdamW, SGD, Lion) run over the longest ranges that
//! share a weight decay, gaps included (they are zero and stay zero), cut to what the rank holds; rules that look at a matrix as a whole
//! (Muon, Adafactor) run parameter by parameter and need all of it. Norms and biases do not decay.

use crate::Result;
use crate::config::{MuonScale, OptimizerName, OptimizerSettings};
use crate::state::{GradientState, Holding, ParameterState, does_not_fit, overlap};
use std::ops::Range;
use trainyard_model::{Model, ParameterKind, ParameterSpec, UnitLayout};
use trainyard_tensor::ops::optim::{
    self, Adafactor, AdamW, Decay, Lion, MuonScale as Scale, OptimizerOperands, Sgd, StepSize,
};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// An optimizer and its state.
pub struct Optimizer {
    /// None for what does not train.
    settings: Option<OptimizerSettings>,
    units: Vec<UnitOptimizer>,
}

/// The factors of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// The learning rate as a share of its peak.
    pub factor: f64,
    /// Multiplies gradients: clipping, and the inverse of the loss scale.
    pub gradient_scale: f32,
    /// Which update this is, from 1; skipped steps do not count.
    pub update: u64,
}

struct UnitOptimizer {
    pieces: Vec<Piece>,
}

/// What a rank holds of one state tensor of one parameter.
pub struct StatePart {
    /// The unit.
    pub unit: usize,
    /// The parameter's index in it.
    pub index: usize,
    /// Named as PyTorch names it.
    pub name: &'static str,
    /// Elements of the whole tensor.
    pub elements: usize,
    /// Which of them are here.
    pub range: Range<usize>,
    /// Their values.
    pub values: Tensor,
}

/// A range of a unit's flat buffers that one kernel call updates.
struct Piece {
    range: Range<usize>,
    decays: bool,
    state: State,
    /// The parameters in it: index and whole range within the unit.
    parameters: Vec<(usize, Range<usize>)>,
}

enum State {
    /// AdamW: first and second moment.
    Moments(Tensor, Tensor),
    /// SGD, Lion: momentum, or nothing.
    Momentum(Option<Tensor>),
    /// Muon: momentum of a matrix [rows, columns].
    Muon(Tensor, [usize; 2]),
    /// Adafactor of a matrix: row and column moment.
    Factored(Tensor, Tensor),
    /// Adafactor of anything else.
    Second(Tensor),
}

impl Optimizer {
    /// A fresh optimizer for `model`, its state zero.
    pub fn new(device: &Device, model: &Model, holding: &Holding, settings: OptimizerSettings) -> Result<Optimizer> {
        let units = (0..model.units().len()).map(|unit| UnitOptimizer::new(device, model, unit, holding, &settings));
        Ok(Optimizer { settings: Some(settings), units: units.collect::<Result<_>>()? })
    }

    /// Nothing to update with, for what does not train.
    pub fn none() -> Optimizer {
        Optimizer { settings: None, units: Vec::new() }
    }

    /// Updates one unit: masters, state and compute copy.
    pub fn update(
        &mut self,
        unit: usize,
        parameters: &ParameterState,
        gradients: &GradientState,
        rates: Rates,
    ) -> Result<()> {
        let settings = self.settings.as_ref().expect("only what trains is updated");
        for piece in &mut self.units[unit].pieces {
            let mut master = parameters.unit(unit).master_range(piece.range.clone())?;
            let mut copy = parameters.unit(unit).copy_range(piece.range.clone())?;
            let gradient = gradients.range(unit, piece.range.clone())?;
            let operands = OptimizerOperands {
                master: &mut master,
                gradient: &gradient,
                gradient_scale: rates.gradient_scale,
                copy: copy.as_mut(),
            };
            piece.update(settings, rates, operands)?;
        }
        Ok(())
    }

    /// What is held of every state tensor, parameter by parameter.
    pub fn state(&self) -> Result<Vec<StatePart>> {
        let mut all = Vec::new();
        for (unit, optimizer) in self.units.iter().enumerate() {
            for piece in &optimizer.pieces {
                for (name, tensor) in piece.state.tensors() {
                    for (index, whole) in &piece.parameters {
                        let (unit, index) = (unit, *index);
                        // Element-wise states cover the piece, so a parameter's part is a view; others are the parameter's own.
                        if tensor.elements() != piece.range.len() {
                            let (elements, values) = (tensor.elements(), tensor.clone());
                            all.push(StatePart { unit, index, name, elements, range: 0..elements, values });
                            continue;
                        }
                        let held = overlap(whole, &piece.range);
                        if !held.is_empty() {
                            let values = tensor.view(held.start - piece.range.start, [held.len()])?;
                            let range = held.start - whole.start..held.end - whole.start;
                            all.push(StatePart { unit, index, name, elements: whole.len(), range, values });
                        }
                    }
                }
            }
        }
        Ok(all)
    }
}

/// How a range is updated, before its state exists.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    Moments,
    Momentum,
    Muon([usize; 2]),
    Factored([usize; 2]),
    Second,
}

impl Rule {
    fn of(name: OptimizerName, spec: &ParameterSpec) -> Rule {
        let matrix = (spec.shape.len() == 2).then(|| [spec.shape[0], spec.shape[1]]);
        match (name, matrix) {
            (OptimizerName::Muon, Some(shape)) if spec.kind == ParameterKind::Matrix => Rule::Muon(shape),
            (OptimizerName::AdamW | OptimizerName::Muon, _) => Rule::Moments,
            (OptimizerName::Sgd | OptimizerName::Lion, _) => Rule::Momentum,
            (OptimizerName::Adafactor, Some(shape)) => Rule::Factored(shape),
            (OptimizerName::Adafactor, None) => Rule::Second,
        }
    }

    fn is_elementwise(self) -> bool {
        matches!(self, Rule::Moments | Rule::Momentum)
    }

    /// Zero state for a range of `elements`.
    fn state(self, device: &Device, elements: usize, settings: &OptimizerSettings) -> Result<State> {
        let zeros = |n: usize| device.zeros([n], DType::F32, Purpose::Optimizer);
        Ok(match self {
            Rule::Moments => State::Moments(zeros(elements)?, zeros(elements)?),
            Rule::Momentum => {
                let wanted = settings.name == OptimizerName::Lion || settings.momentum != 0.0;
                State::Momentum(wanted.then(|| zeros(elements)).transpose()?)
            }
            Rule::Muon(shape) => State::Muon(zeros(elements)?, shape),
            Rule::Factored([rows, columns]) => State::Factored(zeros(rows)?, zeros(columns)?),
            Rule::Second => State::Second(zeros(elements)?),
        })
    }
}

/// A range under one rule.
struct Stretch {
    range: Range<usize>,
    decays: bool,
    rule: Rule,
    parameters: Vec<(usize, Range<usize>)>,
}

fn stretches(specs: &[ParameterSpec], layout: &UnitLayout, name: OptimizerName) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        let exact = layout.range(index);
        let (rule, decays) = (Rule::of(name, spec), spec.kind.decays());
        // An element-wise stretch reaches to the start of the next parameter, so that neighbours join.
        let next = if index + 1 < specs.len() { layout.range(index + 1).start } else { layout.elements() };
        let range = exact.start..if rule.is_elementwise() { next } else { exact.end };
        let joins = |last: &&mut Stretch| {
            rule.is_elementwise() && last.rule == rule && last.decays == decays && last.range.end == range.start
        };
        match stretches.last_mut().filter(joins) {
            Some(last) => {
                last.range.end = range.end;
                last.parameters.push((index, exact));
            }
            None => stretches.push(Stretch { range, decays, rule, parameters: vec![(index, exact)] }),
        }
    }
    stretches
}

impl UnitOptimizer {
    fn new(
        device: &Device,
        model: &Model,
        unit: usize,
        holding: &Holding,
        settings: &OptimizerSettings,
    ) -> Result<UnitOptimizer> {
        let specs = model.units()[unit].parameters();
        let layout = UnitLayout::new(specs, holding.shards);
        let held = holding.range(holding.placement.masters, &layout);
        let mut stretches = stretches(specs, &layout, settings.name);
        for stretch in &mut stretches {
            let range = overlap(&stretch.range, &held);
            if range != stretch.range && !stretch.rule.is_elementwise() {
                return Err(does_not_fit(format!(
                    "optimizer {} looks at whole matrices, and this rank holds only a part of {}",
                    settings.name,
                    model.units()[unit].name()
                )));
            }
            stretch.range = range;
        }
        stretches.retain(|stretch| !stretch.range.is_empty());
        let pieces = stretches.into_iter().map(|stretch| {
            let Stretch { range, decays, rule, parameters } = stretch;
            let state = rule.state(device, range.len(), settings)?;
            Ok(Piece { range, decays, state, parameters })
        });
        Ok(UnitOptimizer { pieces: pieces.collect::<Result<_>>()? })
    }
}

impl State {
    /// Named as PyTorch names them.
    fn tensors(&self) -> Vec<(&'static str, &Tensor)> {
        match self {
            State::Moments(first, second) => vec![("exp_avg", first), ("exp_avg_sq", second)],
            State::Momentum(momentum) => momentum.iter().map(|m| ("momentum_buffer", m)).collect(),
            State::Muon(momentum, _) => vec![("momentum_buffer", momentum)],
            State::Factored(rows, columns) => vec![("exp_avg_sq_row", rows), ("exp_avg_sq_col", columns)],
            State::Second(second) => vec![("exp_avg_sq", second)],
        }
    }
}

impl Piece {
    fn update(&mut self, settings: &OptimizerSettings, rates: Rates, operands: OptimizerOperands<'_>) -> Result<()> {
        let lr = (settings.learning_rate * rates.factor) as f32;
        let weight_decay = if self.decays { settings.weight_decay as f32 } else { 0.0 };
        let (beta1, beta2, eps) = (settings.beta1 as f32, settings.beta2 as f32, settings.eps as f32);
        match &mut self.state {
            State::Moments(first, second) => {
                let hyper = AdamW { lr, beta1, beta2, eps, weight_decay };
                optim::adamw(hyper, rates.update, operands, first, second)?;
            }
            State::Momentum(momentum) if settings.name == OptimizerName::Lion => {
                let momentum = momentum.as_mut().expect("Lion has momentum");
                optim::lion(Lion { lr, beta1, beta2, weight_decay }, operands, momentum)?;
            }
            State::Momentum(momentum) => {
                let (nesterov, decay) = (settings.nesterov, Decay::Decoupled);
                let hyper = Sgd { lr, momentum: settings.momentum as f32, nesterov, weight_decay, decay };
                optim::sgd(hyper, operands, momentum.as_mut())?;
            }
            State::Muon(momentum, shape) => {
                let scale = match settings.muon_scale {
                    MuonScale::Original => Scale::Original,
                    MuonScale::MatchRmsAdamw => Scale::MatchRmsAdamW,
                };
                let hyper = optim::Muon {
                    lr: (settings.matrix_learning_rate * rates.factor) as f32,
                    momentum: settings.momentum as f32,
                    nesterov: settings.nesterov,
                    weight_decay,
                    iterations: settings.newton_schulz_steps as u32,
                    scale,
                };
                optim::muon(hyper, *shape, operands, momentum)?;
            }
            State::Factored(rows, columns) => {
                optim::adafactor_matrix(adafactor(settings, lr, weight_decay), rates.update, operands, rows, columns)?;
            }
            State::Second(second) => {
                optim::adafactor_vector(adafactor(settings, lr, weight_decay), rates.update, operands, second)?;
            }
        }
        Ok(())
    }
}

fn adafactor(settings: &OptimizerSettings, lr: f32, weight_decay: f32) -> Adafactor {
    Adafactor {
        lr,
        beta2_decay: settings.factored_decay as f32,
        eps1: 1e-30,
        eps2: 1e-3,
        clip_threshold: settings.update_clip as f32,
        weight_decay,
        step_size: if settings.relative_step { StepSize::Relative } else { StepSize::Absolute },
    }
}
