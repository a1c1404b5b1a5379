//! Checks layouts: each instruction finds its operands in the layout that it takes, and each sum
//! over ranks is one over the right axis, once.
//!
//! Layouts inside split units are those that their shapes declare. The checker proves four things
//! about them.
//!
//! 1. The declared layouts obey the rules for local compute, and a collective exists for every
//!    border ([`rules`]). Units fit together: one's output has the layout of the next one's input.
//! 2. In the program's own order, a segment finds the values that it takes in their layouts, and a
//!    backward segment the gradients of those that it gives.
//! 3. Each exchange is the collective that its border's layouts ask for, over the group whose
//!    layout
//!    changes there (tensor or context), and takes place once.
//! 4. Gradients, targets and the norm are summed over the axes along which ranks differ, and over
//!    no other. (`gradients` counts the sums.)

use super::CheckError;
use crate::{
    Action, Axes, Axis, BackwardPart, Border, Change, Collective, Layout, Phase, Program, SegmentShape, SplitShape,
};

/// Finds an operand without its layout, or a sum over a wrong axis.
pub fn check(program: &Program) -> Result<(), CheckError> {
    for (unit, split) in program.splits.iter().enumerate() {
        let last = unit + 1 == program.splits.len();
        let after = program.splits.get(unit + 1);
        let fault = rules(program, split, last).or_else(|| after.and_then(|after| fault_between(split, after)));
        if let Some(what) = fault {
            return Err(CheckError::Rule { unit: program.units[unit].clone(), what });
        }
    }
    let mut types = Types::new(program);
    for (number, instruction) in program.instructions.iter().enumerate() {
        let action = instruction.action;
        types.apply(action).map_err(|what| CheckError::Layout { number, action: action.name(), what })?;
    }
    Ok(())
}

/// Describes the first layout of a split unit that breaks a rule. `last` is true for the unit that
/// computes the loss.
fn rules(program: &Program, split: &SplitShape, last: bool) -> Option<String> {
    for (border, Border { from, to }) in (0..).zip(&split.borders) {
        let [from, to] = [from, to].map(|value| &split.values[*value as usize]);
        let axis = split.axis(border);
        for phase in [Phase::Forward, Phase::Backward] {
            let flows = phase == Phase::Forward || split.has_gradient(split.borders[border as usize].to);
            if flows && split.change(border, phase).is_none() {
                let (from, name, to) = (from.over(axis).name(), &from.name, to.over(axis).name());
                return Some(format!("no collective turns {name} from {from} into {to}, or its gradient back"));
            }
        }
    }
    let output = split.output();
    if last && split.values[output as usize].layout != Layout::Invariant {
        return Some("the loss is not invariant: each rank would have another one".to_owned());
    }
    let fault_over = |axis: Axis| {
        split.segments.iter().find_map(|segment| {
            let makes_loss = axis == Axis::Tensor && last && segment.gives.contains(&output);
            let made = segment.gives.iter().filter(|value| !segment.takes.contains(value));
            made.copied().find_map(|value| fault_of_compute(split, axis, segment, value, makes_loss))
        })
    };
    fault_of_context(program, split, last).or_else(|| fault_over(Axis::Tensor)).or_else(|| fault_over(Axis::Context))
}

/// Describes a fault of the layouts over the context axis as a whole. Where the sequence is split,
/// tokens enter split, and the loss is a sum of the ranks' parts; where it is not, ranks have no
/// layout over that axis.
fn fault_of_context(program: &Program, split: &SplitShape, last: bool) -> Option<String> {
    if program.mesh.cp == 1 {
        let value = split.values.iter().find(|value| value.context != Layout::Invariant)?;
        let is = value.context.name();
        return Some(format!("{} is {is} over context, and no ranks divide the sequence", value.name));
    }
    let output = &split.values[split.output() as usize];
    let wanted = if last { Layout::Partial } else { Layout::Split };
    if output.context != wanted {
        let (is, wanted) = (output.context.name(), wanted.name());
        return Some(format!(
            "{} is {is} over context, and each rank has its part of the tokens: {wanted}",
            output.name
        ));
    }
    // What has neither operands nor a backward is made of weights.
    let takes_nothing = |segment: &&SegmentShape| segment.takes.is_empty() && segment.differentiable;
    let from_tokens = split.segments.iter().filter(takes_nothing).flat_map(|segment| &segment.gives);
    let wrong = from_tokens.map(|value| &split.values[*value as usize]).find(|value| value.context != Layout::Split)?;
    Some(format!("{} is made of the rank's tokens, and {} over context", wrong.name, wrong.context.name()))
}

/// Describes an operand from which local compute cannot make `value` in its layout.
///
/// | makes | from operands that are |
/// |---|---|
/// | invariant | invariant |
/// | replicated | replicated |
/// | split, partial | replicated or split |
/// | heads | heads |
///
/// The loss is the exception. It is computed from invariant statistics of all logits; its other
/// operand is replicated, because each rank computes a part of its gradient.
fn fault_of_compute(
    split: &SplitShape,
    axis: Axis,
    segment: &SegmentShape,
    value: u32,
    makes_loss: bool,
) -> Option<String> {
    let layout = |value: &u32| split.values[*value as usize].over(axis);
    let made = layout(&value);
    let has_statistics = segment.takes.iter().any(|value| layout(value) == Layout::Invariant);
    let fits = |operand: &Layout| match (made, operand) {
        (Layout::Invariant, Layout::Invariant)
        | (Layout::Replicated, Layout::Replicated)
        | (Layout::Heads, Layout::Heads) => true,
        (Layout::Invariant, Layout::Replicated) => makes_loss && has_statistics,
        (Layout::Split | Layout::Partial, Layout::Replicated | Layout::Split) => true,
        _ => false,
    };
    let wrong = segment.takes.iter().find(|operand| !fits(&layout(operand)))?;
    let (operand, of) = (&split.values[*wrong as usize], &split.values[value as usize]);
    let [is, makes] = [operand.over(axis).name(), made.name()];
    let over = if axis == Axis::Context { " over context" } else { "" };
    Some(format!(
        "segment {} makes {} {makes}{over}, but takes {}, which is {is}: local compute cannot",
        segment.name, of.name, operand.name
    ))
}

/// Describes the difference between a unit's output and the next unit's input.
fn fault_between(below: &SplitShape, above: &SplitShape) -> Option<String> {
    let output = &below.values[below.output() as usize];
    let Some(input) = above.input.map(|input| &above.values[input as usize]) else {
        return Some("the next unit takes no input".to_owned());
    };
    if (output.layout, output.context, output.bytes) == (input.layout, input.context, input.bytes) {
        return None;
    }
    let [gives, takes] = [output, input].map(|value| {
        let over = if output.context == input.context { "" } else { " over context" };
        let layout = if output.context == input.context { value.layout } else { value.context };
        format!("{}{over} {} of {} bytes", layout.name(), value.name, value.bytes)
    });
    Some(format!("it gives {gives}, and the next unit takes {takes}"))
}

/// The values of a split unit on one micro-batch that exist, in their declared layouts.
#[derive(Clone, Default)]
struct Values {
    there: Vec<bool>,
    /// Per value, true if its gradient is complete; per value, true if a part of it is there.
    gradient: Vec<bool>,
    begun: Vec<bool>,
    /// Number of forward segments that ran, repetitions included.
    ran: usize,
}

struct Types<'p> {
    program: &'p Program,
    /// By unit and micro-batch; empty if no unit is split.
    values: Vec<Values>,
    norm: Axes,
}

type Verdict = Result<(), String>;

fn must(holds: bool, otherwise: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(otherwise()) }
}

impl<'p> Types<'p> {
    fn new(program: &'p Program) -> Types<'p> {
        let of_unit = |split: &SplitShape| {
            let none = vec![false; split.values.len()];
            let values = Values { there: none.clone(), gradient: none.clone(), begun: none, ran: 0 };
            vec![values; program.micro_batches as usize]
        };
        Types { program, values: program.splits.iter().flat_map(of_unit).collect(), norm: program.axes_of_norm() }
    }

    fn apply(&mut self, action: Action) -> Verdict {
        match action {
            Action::Count { axis } => must(axis == self.program.kind.gradient_axis(), || {
                let differ = self.program.kind.gradient_axis().name();
                format!("targets differ over {differ} ranks: their number is no sum over {}", axis.name())
            }),
            Action::Reduce { axis, .. } => must(axis == self.program.kind.gradient_axis(), || {
                let partial = self.program.kind.gradient_axis().name();
                format!("gradients are partial over {partial}, and summed over {}", axis.name())
            }),
            Action::Outer { axis, .. } => must(axis == Axis::Replicate, || {
                format!("replicas train apart, and changes are averaged over {}", axis.name())
            }),
            Action::Tie { unit, axis } => self.tie(unit, axis),
            Action::Clip { axes } => self.norm(axes),
            Action::Exchange { collective, axis, unit, micro_batch, phase, border, times } => {
                match self.program.split_of(unit).filter(|_| axis != Axis::Expert) {
                    Some(split) => {
                        let over = (collective, axis, times);
                        self.exchange(split, unit, micro_batch, phase, border, over)
                    }
                    None => must(fits(collective, axis), || over_wrong(collective, axis)),
                }
            }
            Action::Forward { unit, segment, micro_batch, .. } => match self.program.split_of(unit) {
                Some(split) => self.forward(split, unit, segment, micro_batch),
                None => Ok(()),
            },
            Action::Backward { part: BackwardPart::Weights, .. } => Ok(()),
            Action::Backward { unit, segment, micro_batch, .. } => match self.program.split_of(unit) {
                Some(split) => self.backward(split, unit, segment, micro_batch),
                None => Ok(()),
            },
            Action::Send { unit, micro_batch, phase, .. } if !self.values.is_empty() => {
                let (there, name) = self.crosses(unit, micro_batch, phase);
                must(there, || format!("{name} is not there in the layout that is sent"))
            }
            _ => Ok(()),
        }
    }

    fn at(&self, unit: u32, micro_batch: u32) -> usize {
        (unit * self.program.micro_batches + micro_batch) as usize
    }

    fn tie(&self, unit: u32, axis: Axis) -> Verdict {
        let partial = match axis {
            Axis::Tensor => self.program.is_shared_in_group(unit),
            Axis::Pipeline => self.program.is_shared_between_stages(unit),
            _ => false,
        };
        must(partial, || format!("the gradient of unit {unit} is not partial over {}", axis.name()))
    }

    fn norm(&self, axes: Axes) -> Verdict {
        for axis in Axis::ALL {
            let name = axis.name();
            match (axes.contains(axis), self.norm.contains(axis)) {
                (true, false) => {
                    return Err(format!("ranks along {name} hold the same gradients: they would count twice"));
                }
                (false, true) => {
                    return Err(format!("ranks along {name} hold different gradients: they would not count"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// True if a value that crosses a pipeline's cut is there, and its name.
    fn crosses(&self, unit: u32, micro_batch: u32, phase: Phase) -> (bool, String) {
        let of = |unit: u32| self.program.split_of(unit).map(|split| (split, &self.values[self.at(unit, micro_batch)]));
        let name = &self.program.units[unit as usize];
        match phase {
            Phase::Forward => {
                let there = of(unit).is_some_and(|(split, values)| values.there[split.output() as usize]);
                (there, format!("the output of {name}"))
            }
            Phase::Backward => {
                let there = of(unit + 1)
                    .is_some_and(|(split, values)| split.input.is_some_and(|input| values.gradient[input as usize]));
                (there, format!("the gradient of the output of {name}"))
            }
        }
    }

    /// True if the input of `unit` is there: received, or as the output of the unit below. `step`
    /// checks receives.
    fn has_input(&self, unit: u32, micro_batch: u32) -> bool {
        let below = unit.saturating_sub(1);
        !self.program.runs(below) || self.crosses(below, micro_batch, Phase::Forward).0
    }

    /// True if the gradient of the output of `unit` is there. That of the loss always is.
    fn has_gradient_of_output(&self, unit: u32, micro_batch: u32) -> bool {
        let above = unit + 1;
        unit == self.program.loss_unit()
            || !self.program.runs(above)
            || self.crosses(unit, micro_batch, Phase::Backward).0
    }

    fn forward(&mut self, split: &SplitShape, unit: u32, segment: u32, micro_batch: u32) -> Verdict {
        let at = self.at(unit, micro_batch);
        if self.values[at].ran == split.segments.len() {
            // The forward runs again, for its backward.
            self.values[at].there.fill(false);
        }
        let shape = &split.segments[segment as usize];
        if let Some(input) = split.input {
            let there = self.has_input(unit, micro_batch);
            self.values[at].there[input as usize] |= there;
            if there {
                change_locally(split, &mut self.values[at].there, input, Phase::Forward);
            }
        }
        let values = &mut self.values[at];
        for value in &shape.takes {
            must(values.there[*value as usize], || is_missing(split, &shape.name, *value, ""))?;
        }
        for value in shape.gives.iter().filter(|value| !shape.takes.contains(value)) {
            values.there[*value as usize] = true;
            change_locally(split, &mut values.there, *value, Phase::Forward);
        }
        values.ran += 1;
        Ok(())
    }

    fn backward(&mut self, split: &SplitShape, unit: u32, segment: u32, micro_batch: u32) -> Verdict {
        let at = self.at(unit, micro_batch);
        let output = split.output() as usize;
        if self.has_gradient_of_output(unit, micro_batch) {
            self.values[at].gradient[output] = true;
            self.values[at].begun[output] = true;
            change_locally(split, &mut self.values[at].begun, output as u32, Phase::Backward);
            change_locally(split, &mut self.values[at].gradient, output as u32, Phase::Backward);
        }
        let shape = &split.segments[segment as usize];
        let values = &mut self.values[at];
        for value in shape.gives.iter().filter(|value| split.has_gradient(**value)) {
            must(values.begun[*value as usize], || is_missing(split, &shape.name, *value, "the gradient of "))?;
        }
        for value in shape.takes.iter().filter(|value| split.has_gradient(**value)) {
            values.begun[*value as usize] = true;
            if split.first_user(*value) == Some(segment) {
                values.gradient[*value as usize] = true;
                change_locally(split, &mut values.gradient, *value, Phase::Backward);
                change_locally(split, &mut values.begun, *value, Phase::Backward);
            }
        }
        Ok(())
    }

    fn exchange(
        &mut self,
        split: &SplitShape,
        unit: u32,
        micro_batch: u32,
        phase: Phase,
        border: u32,
        (collective, axis, times): (Collective, Axis, u32),
    ) -> Verdict {
        must(axis == split.axis(border) && times == 1, || over_wrong(collective, axis))?;
        let Border { from, to } = split.borders[border as usize];
        let name = &split.values[from as usize].name;
        let right = split.collective(border, phase);
        must(right == Some(collective), || {
            let right = right.map_or("no collective", Collective::name);
            format!("{name} changes its layout by {right} here, not by {}", collective.name())
        })?;
        let at = self.at(unit, micro_batch);
        if phase == Phase::Forward && split.input == Some(from) {
            self.values[at].there[from as usize] |= self.has_input(unit, micro_batch);
        }
        if phase == Phase::Backward && split.output() == to {
            self.values[at].gradient[to as usize] |= self.has_gradient_of_output(unit, micro_batch);
        }
        let values = &mut self.values[at];
        let (source, made) = match phase {
            Phase::Forward => (values.there[from as usize], &mut values.there[to as usize]),
            Phase::Backward => (values.gradient[to as usize], &mut values.gradient[from as usize]),
        };
        let of = if phase == Phase::Forward { "" } else { "the gradient of " };
        must(source, || format!("{of}{name} is not there yet"))?;
        must(!std::mem::replace(made, true), || format!("{of}{name} has changed its layout already"))?;
        if phase == Phase::Backward {
            values.begun[from as usize] = true;
        }
        Ok(())
    }
}

/// Records the changes of layout that `value`, or its gradient, undergoes on each rank alone.
fn change_locally(split: &SplitShape, there: &mut [bool], value: u32, phase: Phase) {
    for (border, Border { from, to }) in (0..).zip(&split.borders) {
        let (source, made) = if phase == Phase::Forward { (*from, *to) } else { (*to, *from) };
        if source == value && matches!(split.change(border, phase), Some(Change::Nothing | Change::TakePart)) {
            there[made as usize] = true;
        }
    }
}

fn is_missing(split: &SplitShape, segment: &str, value: u32, of: &str) -> String {
    let border = split.borders.iter().position(|border| border.to == value);
    let axis = border.map_or(Axis::Tensor, |border| split.axis(border as u32));
    let value = &split.values[value as usize];
    format!("{segment} needs {of}{}, which is not there as {}", value.name, value.over(axis).name())
}

/// True if the collectives of a kind that stand for those inside a whole unit run along `axis`.
fn fits(collective: Collective, axis: Axis) -> bool {
    match collective {
        Collective::Ring => axis == Axis::Context,
        Collective::AllToAll => axis == Axis::Expert,
        Collective::AllReduce | Collective::GatherScatter => axis == Axis::Tensor,
        Collective::AllGather | Collective::ReduceScatter => false,
    }
}

fn over_wrong(collective: Collective, axis: Axis) -> String {
    format!("{} does not belong over {} here", collective.name(), axis.name())
}
