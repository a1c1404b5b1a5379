//! Elastic weight consolidation through the program: estimated, trained with, resumed, handed on.

mod common;

use common::Folder;
use serde_json::Value;
use std::fs;

fn metrics(folder: &Folder, run: &str) -> Vec<Value> {
    let text = fs::read_to_string(folder.join(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_run_goes_on_with_new_text_and_is_held_to_the_old() {
    let folder = Folder::new();
    folder.write("new.txt", "other words are learned here, again and again and again.\n".repeat(300));
    folder.run(&["train", "tiny.toml"]).ok();
    let estimated = folder.run(&["consolidate", "runs/tiny", "--batches", "8"]).ok();
    assert!(estimated.stdout.contains("runs/tiny at step 12: 8 batches, 256 targets"), "{}", estimated.stdout);
    assert!(estimated.stdout.contains("empirical Fisher information of"), "{}", estimated.stdout);
    assert!(folder.join("runs/tiny/consolidation/checkpoints/step-00000012/fisher.safetensors").is_file());
    let json = folder.run(&["consolidate", "runs/tiny", "--batches", "8", "--data", "text.txt", "--json"]).ok();
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert!(json["estimate"]["mean"].as_f64().unwrap() > 0.0, "{json}");
    folder.run(&["export", "runs/tiny", "--out", "old"]).ok();
    let config = "[run]\nname = 'held'\n[model]\npath = 'old'\n[data]\ntrain = 'new.txt'\nvalidation_fraction = 0\n\
                  [training]\nsteps = 8\nmicro_batch_size = 4\nsequence_length = 32\n\
                  [precision]\ncompute = 'f32'\n[consolidation]\nfrom = 'runs/tiny'\nweight = 2\n";
    folder.write("held.toml", config);
    let ran = folder.run(&["train", "held.toml"]).ok();
    let said = ran.stdout + &ran.stderr;
    assert!(said.contains("consolidation: held to runs/tiny at step 12, from 256 targets"), "{said}");
    assert!(said.contains("  penalty 0."), "{said}");
    let steps = metrics(&folder, "runs/held");
    assert_eq!(steps[0]["penalty"], 0.0, "it begins with the weights that are held");
    assert!(steps[7]["penalty"].as_f64().unwrap() > 0.0);
    folder.run(&["train", "--resume", "runs/held", "--set", "training.steps=12", "--set", "parallel.ranks=2"]).ok();
    assert_eq!(metrics(&folder, "runs/held").len(), 12);
    let handed_on = folder.run(&["consolidate", "runs/held", "--batches", "4", "--decay", "0.5"]).ok();
    assert!(handed_on.stdout.contains("with 0.5 times what the run was held to itself"), "{}", handed_on.stdout);

    for (command, words) in [
        (&["consolidate", "old"][..], "is not the folder of a run"),
        (&["consolidate", "nowhere"], "nowhere"),
        (&["consolidate", "runs/tiny", "--decay", "2"], "--decay 2 is not from 0 to 1"),
        (&["consolidate", "runs/tiny", "--length", "64"], "beyond the model's longest sequence of 32"),
        (&["consolidate", "runs/tiny", "--batches", "100000"], "ask for at most so many"),
        (&["consolidate", "runs/tiny", "--batches", "0"], "--batches"),
        (&["consolidate", "runs/tiny", "--data", "none.txt"], "none.txt"),
        (&["train", "held.toml", "--set", "run.name=a", "--set", "consolidation.from=old"], "has no estimate"),
        (&["train", "held.toml", "--set", "run.name=a", "--set", "consolidation.weight=-1"], "out of range"),
    ] {
        let ran = folder.run(command);
        assert!(ran.code != Some(0) && ran.stderr.contains(words), "{command:?}: {}", ran.stderr);
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
    }
}
