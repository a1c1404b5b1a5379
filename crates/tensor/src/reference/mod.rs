//! Naive scalar oracles, one file per kernel family: slow, short and kept for ever.

pub mod attention;
pub mod matmul;
