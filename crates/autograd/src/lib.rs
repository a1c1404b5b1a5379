//! A define-by-run tape and the one table of differentiable functions.
