//! Kernels of the plain operations that [`elementwise`](super::elementwise) and
//! [`reduce`](super::reduce) do not have.
//!
//! [`strided`] moves data between any two layouts, and is all that permutation, broadcasting,
//! slicing, concatenation and repetition need; [`index`] reads and adds by indices; [`derivative`]
//! holds the gradients of the elementwise functions; [`row`] what whole rows need: variance, the
//! gradient of a maximum, sums from the end; [`mask`] what goes by masks.
//!
//! They are made so that any model can be written, not so that every model is fast: each is one
//! pass over memory, vectorised where that is simple. A sequence of them that a model spends its
//! time in deserves a fused kernel: `docs/adding-a-kernel.md`.

pub mod derivative;
pub mod index;
pub mod mask;
pub mod row;
pub mod strided;
