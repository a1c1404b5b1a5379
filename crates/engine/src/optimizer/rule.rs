//! The update rule of a parameter, and the sizes and names of its state.

use super::Member;
use crate::config::{OptimizerName, OptimizerSettings};
use std::ops::Range;
use trainyard_model::{ParameterKind, ParameterSpec};

/// The update rule of a range, without its state.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Rule {
    Moments,
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
    pub(super) fn of(name: OptimizerName, spec: &ParameterSpec, rows: &Range<usize>, balance: f32) -> Rule {
        if spec.kind == ParameterKind::Balance {
            return Rule::Balance(balance);
        }
        let matrix = (spec.shape.len() == 2).then(|| [rows.len(), spec.shape[1]]);
        match (name, matrix) {
            (OptimizerName::Muon, Some(shape)) if spec.kind == ParameterKind::Matrix => Rule::Muon(shape),
            (OptimizerName::Lamb, Some(shape)) => Rule::Lamb(shape),
            (OptimizerName::AdamW | OptimizerName::Muon | OptimizerName::Lamb, _) => Rule::Moments,
            (OptimizerName::Sgd | OptimizerName::Lion, _) => Rule::Momentum,
            (OptimizerName::Adafactor, Some(shape)) => Rule::Factored(shape),
            (OptimizerName::Adafactor, None) => Rule::Second,
        }
    }

    pub(super) fn is_elementwise(self) -> bool {
        matches!(self, Rule::Moments | Rule::Momentum | Rule::Balance(_))
    }

    /// Number of elements of each state tensor of a range of `elements` elements.
    pub(super) fn state_elements(self, elements: usize, settings: &OptimizerSettings) -> Vec<usize> {
        match self {
            Rule::Moments | Rule::Lamb(_) => vec![elements; 2],
            Rule::Momentum if settings.name == OptimizerName::Lion || settings.momentum != 0.0 => vec![elements],
            Rule::Momentum | Rule::Balance(_) => Vec::new(),
            Rule::Muon(_) | Rule::Second => vec![elements],
            Rule::Factored([rows, columns]) => vec![rows, columns],
        }
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
            Rule::Moments | Rule::Lamb(_) => &["exp_avg", "exp_avg_sq"],
            Rule::Momentum | Rule::Muon(_) => &["momentum_buffer"],
            Rule::Factored(_) => &["exp_avg_sq_row", "exp_avg_sq_col"],
            Rule::Second => &["exp_avg_sq"],
            Rule::Balance(_) => &[],
        }
    }
}
