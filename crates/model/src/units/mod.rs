//! The units of a decoder: [`Embedding`], [`Block`]s, [`Head`].
//!
//! Families differ in the norm, in the positions and in the MLP
//! ([`Form`](crate::families::Form)). Each of these is one value inside the unit, chosen when it is
//! built.

mod block;
mod embedding;
mod experts;
mod head;
mod norm;

pub use block::Block;
pub use embedding::Embedding;
pub use head::Head;
