//! The update rule of a parameter, and the sizes and names of its state.

use super::Member;
use crate::config::{OptimizerName, OptimizerSettings};
use std::ops::Range;
use trainyard_model::{ParameterKind, ParameterSpec, UnitLayout};
use trainyard_program::StateBytes;
use trainyard_tensor::ops::optim::{Moment, moments8};

// Every range that a rule updates begins with a block, in every layout: blocks are the same in all.
const _: () = assert!(UnitLayout::ALIGN.is_multiple_of(moments8::BLOCK));
// Predictions count a scale for as many elements.
const _: () = assert!(moments8::BLOCK == StateBytes::BLOCK as usize);

/// The update rule of a range, without its state.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Rule {
    Moments,
    /// Two moments in codes of eight bits.
    Moments8,
    Momentum,
    Muon([usize; 2]),
    Factored([usize; 2]),
    Second,
    Lamb([usize; 2]),
    /// Steps of this size against the sign of the gradient.
    Balance(f32),
}

impl Rule {
    /// The rule of the rows `rows` of a parameter. `balance`: the steps of a bias that balances
    /// experts.
    pub(super) fn of(settings: &OptimizerSettings, spec: &ParameterSpec, rows: &Range<usize>, balance: f32) -> Rule {
        if spec.kind == ParameterKind::Balance {
            return Rule::Balance(balance);
        }
        let matrix = (spec.shape.len() == 2).then(|| [rows.len(), spec.shape[1]]);
        match (settings.name, matrix) {
            (OptimizerName::AdamW, _) if settings.state_bits == 8 => Rule::Moments8,
            (OptimizerName::Muon, Some(shape)) if spec.kind == ParameterKind::Matrix => Rule::Muon(shape),
            (OptimizerName::Lamb, Some(shape)) => Rule::Lamb(shape),
            (OptimizerName::AdamW | OptimizerName::Muon | OptimizerName::Lamb, _) => Rule::Moments,
            (OptimizerName::Sgd | OptimizerName::Lion, _) => Rule::Momentum,
            (OptimizerName::Adafactor, Some(shape)) => Rule::Factored(shape),
            (OptimizerName::Adafactor, None) => Rule::Second,
        }
    }

    pub(super) fn is_elementwise(self) -> bool {
        matches!(self, Rule::Moments | Rule::Moments8 | Rule::Momentum | Rule::Balance(_))
    }

    /// Number of elements of each state tensor of a range of `elements` elements.
    pub(super) fn state_elements(self, elements: usize, settings: &OptimizerSettings) -> Vec<usize> {
        match self {
            Rule::Moments | Rule::Moments8 | Rule::Lamb(_) => vec![elements; 2],
            Rule::Momentum if settings.name == OptimizerName::Lion || settings.momentum != 0.0 => vec![elements],
            Rule::Momentum | Rule::Balance(_) => Vec::new(),
            Rule::Muon(_) | Rule::Second => vec![elements],
            Rule::Factored([rows, columns]) => vec![rows, columns],
        }
    }

    /// Number of f32 words in which `elements` elements of a state tensor lie.
    pub(super) fn words(self, elements: usize) -> usize {
        if self == Rule::Moments8 { moments8::words(elements) } else { elements }
    }

    /// The code in which the state tensor `slot` lies; None for f32.
    pub(super) fn encoding(self, slot: usize) -> Option<Moment> {
        (self == Rule::Moments8).then_some(if slot == 0 { Moment::First } else { Moment::Second })
    }

    /// Number of elements of the whole parameter's state tensor `slot`, and the range of them that
    /// belongs to `member`.
    pub(super) fn state_of(self, slot: usize, member: &Member) -> (usize, Range<usize>) {
        let of_rows = |width: usize| (member.of_rows * width, member.rows.start * width..member.rows.end * width);
        match (self, slot) {
            (Rule::Factored([_, columns]), 1) => {
                (member.of_members * columns, member.number * columns..(member.number + 1) * columns)
            }
            (Rule::Muon([_, columns]) | Rule::Lamb([_, columns]), _) => of_rows(columns),
            _ => of_rows(1),
        }
    }

    /// Names of the state tensors, as in PyTorch.
    pub(super) fn names(self) -> &'static [&'static str] {
        match self {
            Rule::Moments | Rule::Moments8 | Rule::Lamb(_) => &["exp_avg", "exp_avg_sq"],
            Rule::Momentum | Rule::Muon(_) => &["momentum_buffer"],
            Rule::Factored(_) => &["exp_avg_sq_row", "exp_avg_sq_col"],
            Rule::Second => &["exp_avg_sq"],
            Rule::Balance(_) => &[],
        }
    }
}
