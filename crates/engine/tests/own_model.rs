//! The example of a user's own model does what it says, on one rank and on ranks that share it.

#[path = "../examples/own_model.rs"]
mod own_model;

use trainyard_program::Mesh;

#[test]
fn the_example_learns_and_two_stages_give_the_bits_of_one_rank() {
    let one = own_model::train(Mesh::default(), 0, 200).unwrap();
    let (first, last) = (one[0], one[one.len() - 1]);
    assert!(first > 2.0 && last < 0.3, "from {first} to {last}");
    let stages = own_model::train(Mesh { pp: 2, ..Mesh::default() }, 0, 200).unwrap();
    assert_eq!(stages, one);
}

#[test]
fn shards_give_the_bits_of_replicas_and_learn_as_one_rank_does() {
    let train = |mesh, stage| own_model::train(mesh, stage, 20).unwrap();
    let replicas = train(Mesh::data(2, 1), 0);
    for stage in 1..=3 {
        assert_eq!(train(Mesh::data(1, 2), stage), replicas, "ZeRO-{stage}");
    }
    let one = train(Mesh::default(), 0);
    for (step, (many, one)) in replicas.iter().zip(&one).enumerate() {
        assert!((many / one - 1.0).abs() < 1e-3, "step {step}: {many} on two ranks, {one} on one");
    }
    let shared = Mesh { pp: 2, ..Mesh::data(1, 2) };
    assert_eq!(train(shared, 3), replicas, "two stages of two shards");
}

#[test]
fn the_example_is_short() {
    let code = include_str!("../examples/own_model.rs");
    let lines = code.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with("//"));
    assert!(lines.count() < 150);
}
