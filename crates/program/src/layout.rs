//! The layout of a value over the ranks of one mesh axis, and the collectives that change it.
//!
//! A layout is a type: it says how the tensors of the ranks make up one value, and which layout the
//! value's gradient has. Local compute and collectives have rules over these types;
//! `docs/layouts.md` lists them with pictures.
//!
//! | layout | the ranks hold | its gradient is |
//! |---|---|---|
//! | invariant | the same tensor, used for the same compute | invariant |
//! | replicated | the same tensor, used for different parts of the compute | partial |
//! | split | different parts of the value, or of a weight | split |
//! | partial | summands of the value | replicated |
//! | heads | all rows of the value, each rank of its own attention heads | heads |

use crate::Collective;
use serde::{Deserialize, Serialize};

/// The layout of a value over the ranks of one axis.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Every rank holds the value and does the same with it.
    #[default]
    Invariant,
    /// Every rank holds the value and uses it for a part of the compute of its own.
    Replicated,
    /// Every rank holds a part of the value.
    Split,
    /// The value is the sum of what the ranks hold.
    Partial,
    /// Every rank holds all rows of the value, of its own attention heads.
    Heads,
}

impl Layout {
    /// The layout of the gradient of a value with this layout.
    pub const fn of_gradient(self) -> Layout {
        match self {
            Layout::Invariant => Layout::Invariant,
            Layout::Replicated => Layout::Partial,
            Layout::Split => Layout::Split,
            Layout::Partial => Layout::Replicated,
            Layout::Heads => Layout::Heads,
        }
    }

    /// The name in prints.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Invariant => "invariant",
            Layout::Replicated => "replicated",
            Layout::Split => "split",
            Layout::Partial => "partial",
            Layout::Heads => "heads",
        }
    }
}

/// The work of changing a value from one layout to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Nothing: the tensors are the same.
    Nothing,
    /// A collective.
    By(Collective),
    /// Each rank keeps its part of what it holds whole.
    TakePart,
}

impl Change {
    /// The work that turns `from` into `to`; None if no collective does.
    pub const fn between(from: Layout, to: Layout) -> Option<Change> {
        use Layout::{Heads, Invariant, Partial, Replicated, Split};
        Some(match (from, to) {
            (Invariant, Invariant | Replicated)
            | (Replicated, Replicated)
            | (Split, Split)
            | (Partial, Partial)
            | (Heads, Heads) => Change::Nothing,
            (Split, Heads) | (Heads, Split) => Change::By(Collective::AllToAll),
            (Partial, Invariant | Replicated) => Change::By(Collective::AllReduce),
            (Partial, Split) => Change::By(Collective::ReduceScatter),
            (Split, Replicated | Invariant) => Change::By(Collective::AllGather),
            (Invariant | Replicated, Split) => Change::TakePart,
            (Replicated, Invariant) | (Invariant | Replicated | Split, Partial) => return None,
            (Heads, _) | (_, Heads) => return None,
        })
    }

    /// The work that turns the gradient of a value of layout `to` into that of a value of layout
    /// `from`, in the backward of the change from `from` to `to`.
    pub const fn backward(from: Layout, to: Layout) -> Option<Change> {
        Change::between(to.of_gradient(), from.of_gradient())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_and_its_backward_are_those_of_the_literature() {
        use Layout::{Heads, Invariant, Partial, Replicated, Split};
        let (reduce, gather, scatter) = (Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter);
        let all_to_all = Collective::AllToAll;
        for (from, to, forward, backward) in [
            // Shoeybi et al. 2019: f and g.
            (Invariant, Replicated, Change::Nothing, Change::By(reduce)),
            (Partial, Invariant, Change::By(reduce), Change::Nothing),
            // Korthikanti et al. 2022: g and its conjugate.
            (Split, Replicated, Change::By(gather), Change::By(scatter)),
            (Partial, Split, Change::By(scatter), Change::By(gather)),
            (Split, Invariant, Change::By(gather), Change::TakePart),
            (Partial, Replicated, Change::By(reduce), Change::By(reduce)),
            // Jacobs et al. 2023, DeepSpeed-Ulysses: rows for heads, and back.
            (Split, Heads, Change::By(all_to_all), Change::By(all_to_all)),
            (Heads, Split, Change::By(all_to_all), Change::By(all_to_all)),
        ] {
            assert_eq!(Change::between(from, to), Some(forward), "{from:?} to {to:?}");
            assert_eq!(Change::backward(from, to), Some(backward), "backward of {from:?} to {to:?}");
        }
        assert_eq!(Change::between(Split, Partial), None);
        assert_eq!(Change::between(Heads, Replicated), None);
    }
}
