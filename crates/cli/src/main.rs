//! The trainyard program: plans, runs and explains the training of large models.
fn main() {}
