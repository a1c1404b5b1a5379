//! The help texts, as they were when they were last agreed to:
//! `INSTA_UPDATE=always cargo test -p trainyard --test help` accepts new ones.

mod common;

use common::Folder;

#[test]
fn help_texts_are_as_agreed() {
    let commands: [&[&str]; 25] = [
        &[],
        &["train"],
        &["launch"],
        &["supervise"],
        &["eval"],
        &["generate"],
        &["export"],
        &["tokenizer"],
        &["tokenizer", "train"],
        &["data"],
        &["data", "prepare"],
        &["config"],
        &["config", "check"],
        &["config", "print"],
        &["config", "docs"],
        &["config", "presets"],
        &["calibrate"],
        &["plan"],
        &["program"],
        &["bench", "train"],
        &["bench", "kernels"],
        &["bench", "memory"],
        &["bench", "largest"],
        &["bench", "collectives"],
        &["bench", "gpu"],
    ];
    let folder = Folder::new();
    let mut text = String::new();
    for command in commands {
        let ran = folder.run(&[command, &["--help"]].concat()).ok();
        assert_eq!(ran.stderr, "");
        text += &format!("$ trainyard {}\n{}\n", [command, &["--help"]].concat().join(" "), ran.stdout);
    }
    insta::assert_snapshot!(text);
    let keys = folder.run(&["config", "docs"]).ok().stdout;
    for line in text.lines().chain(keys.lines()) {
        let mut words = line.split(|c: char| !c.is_ascii_alphabetic());
        // Words of this project's own, or without a meaning of their own, that strangers stumble on.
        let strange = words.find(|word| ["sitting", "way", "ways", "rung", "rungs", "floor", "floors"].contains(word));
        assert_eq!(strange, None, "{line}");
    }
}

#[test]
fn the_documentation_of_the_keys_is_current() {
    let printed = Folder::new().run(&["config", "docs"]).ok().stdout;
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.md");
    assert_eq!(
        printed,
        std::fs::read_to_string(page).unwrap(),
        "print docs/config.md anew with `trainyard config docs`"
    );
}
