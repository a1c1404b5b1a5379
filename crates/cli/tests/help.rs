//! Snapshot tests of the help texts. `INSTA_UPDATE=always cargo test -p trainyard --test help`
//! accepts new ones.

mod common;

use common::Folder;

#[test]
fn help_texts_are_as_agreed() {
    let commands: &[&[&str]] = &[
        &[],
        &["train"],
        &["launch"],
        &["supervise"],
        &["eval"],
        &["generate"],
        &["export"],
        &["prune"],
        &["quantize"],
        &["merge"],
        &["tokenizer"],
        &["tokenizer", "train"],
        &["data"],
        &["data", "prepare"],
        &["data", "inspect"],
        &["data", "dedup"],
        &["data", "filter"],
        &["data", "mix"],
        &["data", "bench"],
        &["data", "warm"],
        &["config"],
        &["config", "check"],
        &["config", "print"],
        &["config", "docs"],
        &["config", "presets"],
        &["doctor"],
        &["trace"],
        &["calibrate"],
        &["plan"],
        &["advise"],
        &["tune"],
        &["tune", "batch"],
        &["tune", "transfer"],
        &["program"],
        &["dash"],
        &["top"],
        &["report"],
        &["runs"],
        &["queue"],
        &["queue", "add"],
        &["queue", "list"],
        &["queue", "show"],
        &["queue", "pause"],
        &["queue", "resume"],
        &["queue", "cancel"],
        &["queue", "run"],
        &["submit"],
        &["bench", "train"],
        &["bench", "kernels"],
        &["bench", "memory"],
        &["bench", "largest"],
        &["bench", "collectives"],
        &["bench", "bubbles"],
        &["bench", "layouts"],
        &["bench", "gpu"],
        &["completions"],
        &["man"],
    ];
    let folder = Folder::new();
    let mut text = String::new();
    for command in commands {
        let ran = folder.run(&[*command, &["--help"]].concat()).ok();
        assert_eq!(ran.stderr, "");
        text += &format!("$ trainyard {}\n{}\n", [*command, &["--help"]].concat().join(" "), ran.stdout);
    }
    insta::assert_snapshot!(text);
    let keys = folder.run(&["config", "docs"]).ok().stdout;
    for line in text.lines().chain(keys.lines()) {
        let mut words = line.split(|c: char| !c.is_ascii_alphabetic());
        // Words of this project's jargon, or too vague, that confuse new users.
        let strange = words.find(|word| ["sitting", "way", "ways", "rung", "rungs", "floor", "floors"].contains(word));
        assert_eq!(strange, None, "{line}");
    }
}

/// The commands listed in the top-level help.
fn commands(folder: &Folder) -> Vec<String> {
    let help = folder.run(&["--help"]).ok().stdout;
    let (_, list) = help.split_once("Commands:\n").expect("a list of commands");
    let names = list.lines().take_while(|line| !line.is_empty()).filter_map(|line| line.strip_prefix("  "));
    let names = names.filter(|line| !line.starts_with(' ')).filter_map(|line| line.split_whitespace().next());
    let names: Vec<String> = names.map(str::to_owned).filter(|name| name != "help").collect();
    assert!(names.len() > 10, "{help}");
    names
}

#[test]
fn completions_of_every_shell_know_every_command() {
    let folder = Folder::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = folder.run(&["completions", shell]).ok().stdout;
        for command in commands(&folder) {
            let words = script.split(|c: char| !c.is_alphanumeric() && c != '-');
            assert!(words.into_iter().any(|word| word == command), "{shell} does not know {command}");
        }
        assert!(script.contains("max-restarts"), "{shell} does not know the options");
    }
    let refused = folder.run(&["completions", "tcsh"]);
    assert!(refused.code == Some(2) && refused.stderr.contains("bash"), "{}", refused.stderr);
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = Folder::new();
    folder.run(&["man", "--out", "man/man1"]).ok();
    for command in commands(&folder) {
        let page = std::fs::read_to_string(folder.join(&format!("man/man1/trainyard-{command}.1"))).unwrap();
        assert!(page.contains(".SH SYNOPSIS") && page.contains(&command.replace('-', "\\-")), "{page}");
    }
    let main = std::fs::read_to_string(folder.join("man/man1/trainyard.1")).unwrap();
    assert_eq!(folder.run(&["man"]).ok().stdout, main);
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
