//! Every chore of the project: test, bench, tidy.
fn main() {}
