//! Unusual but valid input, which must work.

mod common;

use common::Folder;

/// `model.path` once refused every tokenizer but its own, even if it had none.
#[test]
fn a_model_without_a_tokenizer_takes_the_one_that_is_chosen() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml", "--set", "training.steps=1"]).ok();
    folder.run(&["export", "runs/tiny", "--out", "hf"]).ok();
    let config = "[run]\nname = 'tuned'\n[model]\npath = 'hf'\n[data]\ntrain = 'text.txt'\nvalidation_fraction = 0\n\
                  [training]\nsteps = 1\nsequence_length = 16\nmicro_batch_size = 1\nglobal_batch_size = 1\n";
    folder.write("tune.toml", config);
    let bytes = ["train", "tune.toml", "--set", "tokenizer.kind=bytes"];
    let refused = folder.run(&bytes);
    assert!(
        refused.code == Some(1) && refused.stderr.contains("model.path brings its tokenizer"),
        "{}",
        refused.stderr
    );
    std::fs::remove_file(folder.join("hf/tokenizer.json")).unwrap();
    let unset = folder.run(&["train", "tune.toml"]);
    assert!(unset.code == Some(1) && unset.stderr.contains("hf has no tokenizer.json"), "{}", unset.stderr);
    folder.run(&bytes).ok();
}

#[test]
fn a_run_of_very_many_steps_begins_at_once_and_ends_by_its_other_limit() {
    let folder = Folder::new();
    let sets = ["--set", "training.steps=1000000000000", "--set", "training.seconds=1"];
    let ran = folder.run(&[&["train", "tiny.toml"][..], &sets].concat()).ok();
    assert!(ran.stderr.contains("step 1/1000000000000"), "{}", ran.stderr);
}
