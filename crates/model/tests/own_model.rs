//! The example of a user's own model does what it says.

#[path = "../examples/own_model.rs"]
mod own_model;

#[test]
fn the_example_learns() {
    let losses = own_model::train(200).unwrap();
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(first > 2.0 && last < 0.3, "from {first} to {last}");
    let code = include_str!("../examples/own_model.rs");
    let lines = code.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with("//"));
    assert!(lines.count() < 100);
}
