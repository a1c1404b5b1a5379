//! The inside of a unit that is split over a tensor-parallel or a context-parallel group, or over
//! both: a chain of segments, the values between them, and the borders at which a value changes its
//! layout over one of the two.
//!
//! A segment is local compute. A border whose two layouts differ by a collective is an instruction
//! of its own ([`Action::Exchange`](crate::Action::Exchange)), in forward and in backward, so
//! nothing that ranks exchange hides in an instruction of the compute lane.

use crate::{Axis, Change, Collective, Keep, Layout, Phase};
use serde::{Deserialize, Serialize};

/// The inside of a unit that is split over the ranks of a tensor-parallel group, of a
/// context-parallel group, or of both. Sizes are those of one rank.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SplitShape {
    /// The values that segments take and give. The last one is the unit's output.
    pub values: Vec<ValueShape>,
    /// Index of the value that is the unit's input; None for the first unit of a model.
    pub input: Option<u32>,
    /// The segments, in the order of forward.
    pub segments: Vec<SegmentShape>,
    /// The borders, in the order of forward.
    pub borders: Vec<Border>,
    /// Number of elements of the unit's gradient of which every rank of the tensor-parallel group
    /// computes a part, so that they are summed over the group. It is the same number on every
    /// rank. Norms under sequence parallelism have such gradients, and key and value heads that
    /// ranks share.
    pub shared_gradient_elements: u64,
}

/// A value inside a split unit.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ValueShape {
    /// Name, for prints.
    pub name: String,
    /// Its layout over the ranks of the tensor-parallel group.
    pub layout: Layout,
    /// Its layout over the ranks of the context-parallel group. Split values hold the rank's part
    /// of the sequence.
    #[serde(default)]
    pub context: Layout,
    /// Bytes that one rank holds of it.
    pub bytes: u64,
}

/// A stretch of a unit in which ranks exchange nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SegmentShape {
    /// Name, for prints.
    pub name: String,
    /// The values that it reads.
    pub takes: Vec<u32>,
    /// The values that it makes, and those that it takes and passes on to a later segment.
    pub gives: Vec<u32>,
    /// True if gradients flow through it.
    pub differentiable: bool,
    /// Bytes that its forward keeps, in the order of [`Keep`].
    pub saved_bytes: [u64; 3],
}

/// The place between two segments at which a value changes its layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Border {
    /// Index of the value before.
    pub from: u32,
    /// Index of the same value in its new layout.
    pub to: u32,
}

impl ValueShape {
    /// Its layout over the ranks of an axis inside units: tensor or context.
    pub fn over(&self, axis: Axis) -> Layout {
        if axis == Axis::Context { self.context } else { self.layout }
    }
}

impl SplitShape {
    /// Index of the unit's output.
    pub fn output(&self) -> u32 {
        (self.values.len() as u32).saturating_sub(1)
    }

    /// The segment that makes `value`; None if it is the unit's input or comes from a border.
    pub fn maker(&self, value: u32) -> Option<u32> {
        let makes = |segment: &SegmentShape| segment.gives.contains(&value) && !segment.takes.contains(&value);
        self.segments.iter().position(makes).map(|at| at as u32)
    }

    /// The first segment with a backward that takes `value`. Its backward is the last to add to the
    /// value's gradient.
    pub fn first_user(&self, value: u32) -> Option<u32> {
        let uses = |segment: &SegmentShape| segment.differentiable && segment.takes.contains(&value);
        self.segments.iter().position(uses).map(|at| at as u32)
    }

    /// True if the gradient of `value` is computed: something with a backward uses it, and it comes
    /// from something with a backward.
    pub fn has_gradient(&self, value: u32) -> bool {
        self.is_used(value) && self.is_made_differentiably(value)
    }

    fn is_used(&self, value: u32) -> bool {
        value == self.output()
            || self.first_user(value).is_some()
            || self.borders.iter().any(|border| border.from == value && self.is_used_at(border.to))
    }

    /// As [`SplitShape::is_used`], without the borders: two of them do not follow each other.
    fn is_used_at(&self, value: u32) -> bool {
        value == self.output() || self.first_user(value).is_some()
    }

    fn is_made_differentiably(&self, value: u32) -> bool {
        let made = |value: u32| match self.maker(value) {
            Some(segment) => self.segments[segment as usize].differentiable,
            None => self.input == Some(value),
        };
        match self.borders.iter().find(|border| border.to == value) {
            Some(border) => made(border.from),
            None => made(value),
        }
    }

    /// The axis over which a border changes its value's layout. A border that changes nothing
    /// belongs to the tensor axis.
    pub fn axis(&self, border: u32) -> Axis {
        let Border { from, to } = self.borders[border as usize];
        let [from, to] = [from, to].map(|value| self.values[value as usize].context);
        if from == to { Axis::Tensor } else { Axis::Context }
    }

    /// The layouts over a border's axis of its value before and after.
    pub fn layouts(&self, border: u32) -> [Layout; 2] {
        let (axis, Border { from, to }) = (self.axis(border), self.borders[border as usize]);
        [from, to].map(|value| self.values[value as usize].over(axis))
    }

    /// The work of a border in a phase; None if nothing flows there in backward, or if no
    /// collective makes this change.
    pub fn change(&self, border: u32, phase: Phase) -> Option<Change> {
        let Border { to, .. } = *self.borders.get(border as usize)?;
        let [from_layout, to_layout] = self.layouts(border);
        match phase {
            Phase::Forward => Change::between(from_layout, to_layout),
            Phase::Backward if !self.has_gradient(to) => None,
            Phase::Backward => Change::backward(from_layout, to_layout),
        }
    }

    /// The collective of a border in a phase; None if ranks exchange nothing there.
    pub fn collective(&self, border: u32, phase: Phase) -> Option<Collective> {
        match self.change(border, phase) {
            Some(Change::By(collective)) => Some(collective),
            _ => None,
        }
    }

    /// Bytes of the whole message of a border: of the value where it is not split. They are the
    /// same on every rank, in both phases.
    pub fn border_bytes(&self, border: u32) -> u64 {
        let Border { from, to } = self.borders[border as usize];
        let [from, to] = [from, to].map(|value| &self.values[value as usize]);
        if from.over(self.axis(border)) == Layout::Split { to.bytes } else { from.bytes }
    }

    /// The borders after a segment: those whose first value the segment makes. With None, those
    /// that change the unit's input.
    pub fn borders_after(&self, segment: Option<u32>) -> Vec<u32> {
        let makes = |value: u32| match segment {
            Some(_) => self.maker(value) == segment,
            None => self.input == Some(value),
        };
        (0..).zip(&self.borders).filter(|(_, border)| makes(border.from)).map(|(at, _)| at).collect()
    }

    /// The borders whose collective a segment's backward needs the other ranks for: those that
    /// change a value for which the segment completes the gradient.
    pub fn exchanges_after_backward(&self, segment: u32) -> Vec<u32> {
        let completes = |border: &Border| self.first_user(border.to) == Some(segment);
        let borders = (0..).zip(&self.borders).filter(|(_, border)| completes(border)).map(|(at, _)| at);
        borders.filter(|border| self.collective(*border, Phase::Backward).is_some()).collect()
    }

    /// Bytes that the forwards of all segments keep.
    pub fn saved(&self, keep: Keep) -> u64 {
        self.segments.iter().map(|segment| segment.saved_bytes[keep as usize]).sum()
    }

    /// The segments that have a backward, ascending.
    pub fn differentiable(&self) -> Vec<u32> {
        (0..).zip(&self.segments).filter(|(_, segment)| segment.differentiable).map(|(at, _)| at).collect()
    }

    /// Describes the first fault in the description itself: an index out of range, a value without
    /// an origin or with two, a use before the value is made. Layouts are checked with the program.
    pub(crate) fn fault(&self) -> Option<String> {
        let values = self.values.len() as u32;
        let segments = self.segments.iter().flat_map(|segment| segment.takes.iter().chain(&segment.gives));
        let borders = self.borders.iter().flat_map(|border| [&border.from, &border.to]);
        if values == 0 || self.segments.is_empty() {
            return Some("it has no values or no segments".to_owned());
        }
        if let Some(index) = segments.chain(borders).chain(&self.input).find(|value| **value >= values) {
            return Some(format!("value {index} does not exist: there are {values}"));
        }
        let made = self.values_by_maker();
        for value in 0..values {
            let name = &self.values[value as usize].name;
            let origins = usize::from(self.input == Some(value))
                + made.iter().filter(|made| **made == value).count()
                + self.borders.iter().filter(|border| border.to == value).count();
            if origins != 1 {
                return Some(format!("value {name} has {origins} origins: it comes from one segment or border"));
            }
            let leaving = self.borders.iter().filter(|border| border.from == value).count();
            let taken = self.segments.iter().any(|segment| segment.takes.contains(&value));
            if leaving > 1 || leaving == 1 && taken {
                return Some(format!("value {name} changes its layout, and is used as it was too"));
            }
            let crosses = self.borders.iter().find(|border| {
                let [from, to] = [border.from, border.to].map(|value| &self.values[value as usize]);
                border.to == value && from.layout != to.layout && from.context != to.context
            });
            if crosses.is_some() {
                return Some(format!("value {name} changes its layout over two axes at once"));
            }
            let chained = self.borders.iter().any(|border| border.to == value) && leaving > 0;
            if chained {
                return Some(format!("value {name} changes its layout twice in a row"));
            }
            if let Some(fault) = self.fault_of_users(value) {
                return Some(fault);
            }
        }
        for segment in &self.segments {
            if !segment.differentiable && segment.saved_bytes != [0; 3] {
                return Some(format!("segment {} keeps activations, but has no backward", segment.name));
            }
        }
        let flows = |value| self.has_gradient(value);
        if !flows(self.output()) || self.input.is_some_and(|input| !flows(input)) {
            return Some("no gradient flows from its output to its input".to_owned());
        }
        None
    }

    /// The values that segments make, in order, with repetitions where several make one.
    fn values_by_maker(&self) -> Vec<u32> {
        let makes = |segment: &SegmentShape| {
            segment.gives.iter().copied().filter(|value| !segment.takes.contains(value)).collect::<Vec<_>>()
        };
        self.segments.iter().flat_map(makes).collect()
    }

    /// Checks that every use of `value` comes after it is made, and that a segment that is not the
    /// last to use it passes it on, so that its gradient is summed along one chain.
    fn fault_of_users(&self, value: u32) -> Option<String> {
        let name = &self.values[value as usize].name;
        let origin = match self.borders.iter().find(|border| border.to == value) {
            Some(border) => self.maker(border.from),
            None => self.maker(value),
        };
        let users: Vec<u32> =
            (0..).zip(&self.segments).filter(|(_, segment)| segment.takes.contains(&value)).map(|(at, _)| at).collect();
        if users.iter().any(|user| origin.is_some_and(|origin| origin >= *user)) {
            return Some(format!("value {name} is taken before it is there"));
        }
        let differentiable: Vec<&SegmentShape> =
            users.iter().map(|user| &self.segments[*user as usize]).filter(|segment| segment.differentiable).collect();
        let used_later = value == self.output();
        let passing = differentiable.len().saturating_sub(usize::from(!used_later));
        let ends = differentiable[..passing].iter().find(|segment| !segment.gives.contains(&value))?;
        Some(format!("segment {} does not pass on {name}, which a later one uses", ends.name))
    }
}
