//! The units of a decoder: [`Embedding`], [`Block`]s, [`Head`]. A model of images has
//! [`PatchEmbedding`] and [`ClassHead`] around its blocks.
//!
//! Families differ in the norm, in the positions and in the MLP
//! ([`Form`](crate::families::Form)). Each of these is one value inside the unit, chosen when it is
//! built.

mod block;
mod class_head;
mod embedding;
mod experts;
mod head;
mod norm;
mod patch_embedding;

pub use block::Block;
pub use class_head::{ClassHead, Hits};
pub use embedding::Embedding;
pub use head::Head;
pub use patch_embedding::PatchEmbedding;
