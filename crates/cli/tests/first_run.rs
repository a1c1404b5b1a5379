//! The output of a first run: few lines before the first step, all of them with `--verbose`, only
//! the result with `--quiet`.

mod common;

use common::{Folder, Ran};
use std::fs;
use std::io::Read;

/// Lines that may be printed before the line of the first step.
const LINES_MAX: usize = 25;

/// Settings that make the quick start's model tiny.
const TINY: [&str; 10] = [
    "model.dim=32",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn_dim=64",
    "training.steps=3",
    "training.seconds='auto'",
    "tokenizer.vocab_size=280",
    "training.micro_batch_size=2",
    "compute.threads=1",
];

/// The arguments of a tiny quick start on `text.txt`, with `more`.
fn quick_start<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let sets = TINY.into_iter().flat_map(|set| ["--set", set]);
    ["train", "--data", "text.txt"].into_iter().chain(sets).chain(more.iter().copied()).collect()
}

/// Both outputs of a command that succeeds, as a terminal would mix them.
fn mixed(folder: &Folder, arguments: &[&str]) -> String {
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let mut command = folder.command(arguments);
    command.stdout(writer.try_clone().expect("a second handle")).stderr(writer);
    let mut child = command.spawn().expect("the program starts");
    // The command holds the other end of the pipe.
    drop(command);
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("text");
    assert!(child.wait().expect("an end").success(), "{text}");
    text
}

#[test]
fn few_lines_are_printed_before_the_first_step() {
    let folder = Folder::new();
    let two_ranks = ["--set", "parallel.ranks=2", "--set", "parallel.zero_stage=3"];
    let again = ["train", "--resume", "runs/run-001", "--set", "training.steps=5"];
    for arguments in [quick_start(&[]), quick_start(&two_ranks), again.to_vec()] {
        let text = mixed(&folder, &arguments);
        let before: Vec<&str> =
            text.lines().take_while(|line| !line.starts_with("step ") || !line.contains("loss")).collect();
        assert!(before.len() < text.lines().count(), "no step in:\n{text}");
        assert!(before.len() <= LINES_MAX, "{} lines before the first step:\n{text}", before.len());
    }
}

/// Choices are never silent: the short output names the important ones, and the file that has all
/// of them.
#[test]
fn derived_choices_are_named_and_all_stand_in_the_run_folder() {
    let folder = Folder::new();
    let short = folder.run(&quick_start(&[])).ok().stdout;
    for part in [
        "\nlayout       1 rank x 1 thread, micro-batch 2 x 1, recomputation none\n",
        "\ntraining     3 steps; adamw, learning rate 0.002, cosine after ",
        "\nkernels      ",
        " TFLOP in bf16; ",
        "\nmemory       ",
        "\nsettings     in runs/run-001/config.toml, ",
        " derived ones with their reasons; --verbose prints it\n",
    ] {
        assert!(short.contains(part), "no {part:?} in:\n{short}");
    }
    assert!(!short.contains("[optimizer]"), "{short}");
    let config = fs::read_to_string(folder.join("runs/run-001/config.toml")).unwrap();
    assert!(config.contains("# global_batch_size = 2  # "), "{config}");

    let long = folder.run(&quick_start(&["--verbose"])).ok().stdout;
    for part in [config.as_str(), "memory by purpose  measured   predicted\n  params "] {
        assert!(long.replace("run-002", "run-001").contains(part), "no {part:?} in:\n{long}");
    }
    // The same configuration is printed without a run.
    let sets = TINY.into_iter().chain(["data.train=text.txt"]).flat_map(|set| ["--set", set]);
    let printed = folder.run(&["config", "print"].into_iter().chain(sets).collect::<Vec<_>>()).ok().stdout;
    assert!(printed.contains("# global_batch_size = 2  # "), "{printed}");
}

#[test]
fn tables_are_shown_where_something_is_off_only() {
    let folder = Folder::new();
    let ran = folder.run(&["train", "tiny.toml"]).ok().stdout;
    assert!(ran.contains(" ms a step (median); not predicted: no profile of this machine"), "{ran}");
    let memory = ran.lines().find(|line| line.starts_with("memory ") && line.contains("at the peak")).unwrap();
    assert!(memory.ends_with(" predicted (+0.0 %)"), "{memory}");
    assert!(!ran.contains("measured   predicted"), "{ran}");
}

#[test]
fn quiet_runs_print_the_result_alone() {
    let folder = Folder::new();
    let (quiet, launched) = (["--quiet"], ["launch", "--nproc-per-node", "2"]);
    let named = ["train", "tiny.toml", "--quiet", "--set", "run.name=two"];
    for (arguments, run) in [(quick_start(&quiet), "run-001"), ([&launched[..], &named].concat(), "two")] {
        let Ran { stdout, stderr, .. } = folder.run(&arguments).ok();
        assert!(stderr.lines().all(|line| line.starts_with("warning: ")), "{arguments:?}: {stderr}");
        let lines: Vec<&str> = stdout.lines().collect();
        let words: Vec<&str> = lines.iter().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(words, ["done:", "loss", "validation", "run"], "{stdout}");
        assert!(lines[3].contains(&format!("runs/{run} ")), "{stdout}");
    }
    let both = folder.run(&["train", "tiny.toml", "--quiet", "--verbose"]);
    assert_eq!(both.code, Some(2), "{}", both.stderr);
}
