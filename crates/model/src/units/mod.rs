//! The units of a decoder: [`Embedding`], [`Block`]s, [`Head`]. A model of images has
//! [`PatchEmbedding`] and [`ClassHead`] around its blocks, and one with an encoder has
//! [`SideBlock`]s in their place.
//!
//! Families differ in the norm, in the positions and in the MLP
//! ([`Form`](crate::families::Form)). Each of these is one value inside the unit, chosen when it is
//! built.

mod block;
mod class_head;
mod embedding;
mod encoder_decoder;
mod experts;
mod head;
mod norm;
mod patch_embedding;
mod value_residual;

pub use block::Block;
pub use class_head::{ClassHead, Hits};
pub use embedding::Embedding;
pub use encoder_decoder::SideBlock;
pub use head::Head;
pub use patch_embedding::PatchEmbedding;
