//! Operations on tensors: check, allocate, state the cost, launch.
