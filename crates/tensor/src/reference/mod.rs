//! Naive scalar oracles, one file per kernel family: slow, short and kept for ever.

pub mod activation;
pub mod attention;
pub mod experts;
pub mod fp8;
pub mod grid;
pub mod int8;
pub mod loss;
pub mod matmul;
pub mod norm;
pub mod optim;
pub mod plain;
pub mod random;
