//! Runs the commands in the documentation and compares their output with the output shown there.
//!
//! The test reads fenced blocks of README.md and docs/*.md whose info word is `console` or `sh`.
//! Lines that begin with `$ ` are commands (`\` at the end continues one); the lines below a
//! command are its output:
//!
//! - A page's commands run in order in one temporary folder, which holds `text/a.txt`,
//!   `text/b.txt`, `posts.jsonl`, `talks.jsonl` and a folder of classes, `pictures`.
//! - `trainyard` is the program under test; `cargo run --release --` means the same. Small shell
//!   commands may stand beside it.
//! - A command must succeed; one whose shown output ends with a line `error: ...` must fail.
//! - Shown output must be printed. Numbers and the width of white space may differ. `...` stands
//!   for any text inside a line and, alone on a line, for any lines. A command without shown output
//!   is only run.
//! - A block of another kind whose info line has `file=NAME` is a file: it is written before the
//!   commands below it run.
//! - A block that cannot run here (another machine, a download, minutes of training) says so with
//!   the info word `ignore`: "```console ignore". A block that speaks of `trainyard` without `$
//!   ` is refused, so that none is skipped by accident.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for a command of a page, in a development build.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(180);
/// Shell commands that are allowed beside `trainyard`.
const SHELL: [&str; 11] = ["cat", "cp", "cut", "echo", "head", "ls", "mkdir", "printf", "rm", "tail", "wc"];

/// A command of a page.
#[derive(Debug, PartialEq, Eq)]
struct Step {
    /// Line number, from 1.
    line: usize,
    command: String,
    shown: Vec<String>,
}

/// The commands of a page in order, or an error in a block.
fn steps(page: &str) -> Result<Vec<Step>, String> {
    let mut steps: Vec<Step> = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((opening, line)) = lines.next() {
        let Some(info) = line.trim_start().strip_prefix("```") else { continue };
        let words: Vec<&str> = info.split(|c: char| c.is_whitespace() || c == ',').collect();
        if let Some(file) = words.iter().find_map(|word| word.strip_prefix("file=")) {
            let text: String = lines
                .by_ref()
                .map(|(_, line)| line)
                .take_while(|line| line.trim() != "```")
                .map(|line| format!("{line}\n"))
                .collect();
            let command = format!("cat > {file} <<'END'\n{text}END");
            steps.push(Step { line: opening + 1, command, shown: Vec::new() });
            continue;
        }
        let ours = matches!(words[0], "console" | "sh" | "shell" | "bash") && !words.contains(&"ignore");
        let before = steps.len();
        while let Some((number, line)) = lines.next() {
            let line = line.trim_end();
            if line.trim_start() == "```" {
                break;
            }
            if !ours {
                continue;
            }
            if let Some(command) = line.trim_start().strip_prefix("$ ") {
                let mut command = command.to_owned();
                while let Some(shorter) = command.strip_suffix('\\') {
                    let (_, next) = lines.next().ok_or("ends inside a command")?;
                    command = format!("{shorter}{}", next.trim());
                }
                steps.push(Step { line: number + 1, command, shown: Vec::new() });
            } else if let Some(step) = steps[before..].last_mut() {
                step.shown.push(line.to_owned());
            } else if line.contains("trainyard") {
                let (line, opening) = (number + 1, opening + 1);
                return Err(format!("line {line}: write commands as `$ trainyard ...`, or `ignore` in line {opening}"));
            }
        }
    }
    for step in &mut steps {
        while step.shown.last().is_some_and(String::is_empty) {
            step.shown.pop();
        }
    }
    Ok(steps)
}

/// A line with its numbers as `#` and its white space as single blanks.
fn normalised(line: &str) -> String {
    let mut out = String::new();
    let mut chars = line.trim().chars().peekable();
    while let Some(c) = chars.next() {
        if c.is_ascii_digit() {
            // Digits with separators between them. A full stop or comma after the number belongs to
            // the sentence.
            out.push('#');
            while let Some(&next) = chars.peek() {
                let mut ahead = chars.clone();
                ahead.next();
                let separates = matches!(next, '.' | ',' | ':' | '_') && ahead.peek().is_some_and(char::is_ascii_digit);
                if !next.is_ascii_digit() && !separates {
                    break;
                }
                chars.next();
            }
        } else if !c.is_whitespace() {
            out.push(c);
        } else if !out.ends_with(' ') {
            out.push(' ');
        }
    }
    out
}

/// True if `line` matches `pattern`, in which `...` stands for any text. Both are normalised.
fn line_matches(pattern: &str, line: &str) -> bool {
    let Some((before, after)) = pattern.split_once("...") else { return pattern == line };
    let Some(rest) = line.strip_prefix(before) else { return false };
    (0..=rest.len()).filter(|&at| rest.is_char_boundary(at)).any(|at| line_matches(after, &rest[at..]))
}

/// The first difference between the shown and the printed output. Additional printed lines are a
/// difference too.
fn difference(shown: &[String], printed: &[String]) -> Option<String> {
    match (shown, printed) {
        ([], []) => None,
        ([], [line, ..]) => Some(format!("printed but not shown: {line:?}")),
        ([first, rest @ ..], _) if first.trim() == "..." => {
            let attempts: Vec<_> = (0..=printed.len()).map(|skipped| difference(rest, &printed[skipped..])).collect();
            // The first of several differences is the most informative, as it assumes the least.
            if attempts.iter().any(Option::is_none) { None } else { attempts.into_iter().next().flatten() }
        }
        ([first, ..], []) => Some(format!("shown {first:?}, but nothing more was printed")),
        ([first, rest @ ..], [line, others @ ..]) => {
            if line_matches(&normalised(first), &normalised(line)) {
                difference(rest, others)
            } else {
                Some(format!("shown {first:?}, printed {line:?}"))
            }
        }
    }
}

/// Runs `command` in `folder`. Returns true if it succeeded, and the lines of both output streams.
fn shell(command: &str, folder: &Path, programs: &Path) -> Result<(bool, Vec<String>), String> {
    let command = command.replace("cargo run --release -- ", "trainyard ");
    let mut starts = command.split(['|', ';', '&']).filter_map(|part| part.split_whitespace().next());
    if let Some(other) = starts.find(|word| *word != "trainyard" && !SHELL.contains(word)) {
        return Err(format!("`{other}` is not run here: mark the block `ignore`"));
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let mut child = Command::new("sh")
        .args(["-c", &format!("exec 2>&1; {command}")])
        .current_dir(folder)
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot start sh: {error}"))?;
    let mut pipe = child.stdout.take().expect("piped above");
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).map(|_| bytes)
    });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            break status;
        }
        if start.elapsed() > COMMAND_TIME_MAX {
            child.kill().ok();
            return Err(format!("still runs after {} s", COMMAND_TIME_MAX.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let bytes = reader.join().expect("the reader does not panic").map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&bytes);
    // A progress line that is rewritten in place counts as its last state.
    let lines = text.lines().map(|line| line.rsplit('\r').next().unwrap_or_default().trim_end().to_owned());
    let mut lines: Vec<String> = lines.collect();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    Ok((status.success(), lines))
}

/// Runs a page's commands in a folder of its own. Returns all errors.
fn check_page(name: &str, page: &str, programs: &Path) -> Vec<String> {
    let steps = match steps(page) {
        Ok(steps) => steps,
        Err(error) => return vec![format!("{name} {error}")],
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    write_corpora(folder.path());
    let mut complaints = Vec::new();
    for step in &steps {
        let complaint = match shell(&step.command, folder.path(), programs) {
            Err(error) => Some((error, Vec::new())),
            Ok((success, printed)) => {
                let shown_to_fail = step.shown.last().is_some_and(|line| line.starts_with("error: "));
                let what = match (success, shown_to_fail) {
                    (true, true) => Some("succeeds, but is shown to fail".to_owned()),
                    (false, false) => Some("fails".to_owned()),
                    _ if step.shown.is_empty() => None,
                    _ => difference(&step.shown, &printed),
                };
                what.map(|what| (what, printed))
            }
        };
        if let Some((what, printed)) = complaint {
            let printed: String = printed.iter().map(|line| format!("\n  | {line}")).collect();
            complaints.push(format!("{name}:{}: $ {}\n  {what}{printed}", step.line, step.command));
        }
    }
    complaints
}

/// Writes about 60 kB of text with some structure for a tokenizer and a model to learn.
fn write_corpora(folder: &Path) {
    const SUBJECTS: [&str; 6] = ["The engine", "A rank", "The loader", "Every shard", "One unit", "The planner"];
    const VERBS: [&str; 5] = ["gathers", "reduces", "prefetches", "releases", "writes"];
    const OBJECTS: [&str; 7] = [
        "its parameters",
        "the gradients",
        "a batch of tokens",
        "what was saved",
        "the state",
        "half of it",
        "nothing",
    ];
    // Steps that have no common factor with the lengths visit all combinations.
    let sentence =
        |i: usize| format!("{} {} {}.", SUBJECTS[i % 6], VERBS[(i * 7 + i / 6) % 5], OBJECTS[(i * 11 + i / 30) % 7]);
    fs::create_dir(folder.join("text")).expect("a new folder");
    for (name, start) in [("text/a.txt", 0), ("text/b.txt", 700)] {
        let paragraph = |p: usize| (0..10).map(|s| sentence(start + 10 * p + s)).collect::<Vec<_>>().join(" ");
        let text = (0..80).map(paragraph).collect::<Vec<_>>().join("\n\n");
        fs::write(folder.join(name), text + "\n").expect("a new file");
    }
    let records = (0..200).map(|i| format!("{{\"id\": {i}, \"text\": \"{}\"}}\n", sentence(i * 3)));
    fs::write(folder.join("posts.jsonl"), records.collect::<String>()).expect("a new file");
    let turn = |role: &str, text: String| format!("{{\"role\": \"{role}\", \"content\": \"{text}\"}}");
    let talk = |i: usize| {
        format!("{}, {}", turn("user", format!("say {}", OBJECTS[i % 7])), turn("assistant", OBJECTS[i % 7].into()))
    };
    let talks = (0..60).map(|i| format!("{{\"messages\": [{}]}}\n", talk(i)));
    fs::write(folder.join("talks.jsonl"), talks.collect::<String>()).expect("a new file");
    write_pictures(&folder.join("pictures"));
}

/// Writes three classes of eight pictures each, of 24 x 20 pixels: stripes that are mostly red,
/// green or blue.
fn write_pictures(folder: &Path) {
    for (channel, class) in ["red", "green", "blue"].into_iter().enumerate() {
        fs::create_dir_all(folder.join(class)).expect("a new folder");
        for number in 0..8 {
            let file = fs::File::create(folder.join(class).join(format!("{number}.png"))).expect("a new file");
            let mut encoder = png::Encoder::new(file, 24, 20);
            encoder.set_color(png::ColorType::Rgb);
            encoder.set_depth(png::BitDepth::Eight);
            let bright = |x: usize, y: usize| if ((x + y * number) / 3).is_multiple_of(2) { 220 } else { 130 };
            let value = |x, y, c: usize| if c == channel { bright(x, y) } else { 20 + (number * 11 % 60) as u8 };
            let pixels: Vec<u8> = (0..24 * 20 * 3).map(|i| value(i / 3 % 24, i / 72, i % 3)).collect();
            encoder.write_header().expect("a header").write_image_data(&pixels).expect("its pixels");
        }
    }
}

/// The folder in which the program under test is called `trainyard`.
fn programs() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_trainyard")).parent().expect("a folder holds it").to_owned()
}

#[test]
fn the_commands_of_the_documentation_do_what_it_shows() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = fs::read_dir(root.join("docs")).expect("docs is there").map(|entry| entry.expect("listed").path());
    let mut pages: Vec<PathBuf> = docs.filter(|path| path.extension().is_some_and(|e| e == "md")).collect();
    pages.push(root.join("README.md"));
    pages.sort();
    let mut complaints = Vec::new();
    for path in pages.iter().filter(|path| path.exists()) {
        let name = path.strip_prefix(&root).expect("below it").display().to_string();
        complaints.extend(check_page(&name, &fs::read_to_string(path).expect("UTF-8"), &programs()));
    }
    assert!(complaints.is_empty(), "{} differences:\n\n{}\n", complaints.len(), complaints.join("\n\n"));
}

#[test]
fn blocks_are_read() {
    let page = "```console\n$ trainyard a \\\n    b\nout\n\n$ ls\n```\n```sh ignore\n$ trainyard c\n```\n\
                ```rust\nlet trainyard = 1;\n```\n```toml file=c.toml\na = 1\n```\n";
    let expected = [
        Step { line: 2, command: "trainyard a b".into(), shown: vec!["out".into()] },
        Step { line: 6, command: "ls".into(), shown: vec![] },
        Step { line: 14, command: "cat > c.toml <<'END'\na = 1\nEND".into(), shown: vec![] },
    ];
    assert_eq!(steps(page).unwrap(), expected);
    assert!(steps("```sh\ntrainyard train\n```\n").unwrap_err().contains("line 2: write commands as"));
}

#[test]
fn numbers_and_elisions_may_differ() {
    let own = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
    let printed = own(&["step 12  loss 3.25, 1,024 tokens", "", "done in 3 s."]);
    assert_eq!(difference(&own(&["step 1 loss 9.5, 8 tokens", "", "done in 12.5 s."]), &printed), None);
    assert_eq!(difference(&own(&["step ... tokens", "...", "done..."]), &printed), None);
    assert_eq!(difference(&own(&["..."]), &printed), None);
    assert!(difference(&own(&["step 12 loss 3.25, 1,024 words", "..."]), &printed).unwrap().contains("words"));
    assert!(difference(&own(&["step ..."]), &printed).unwrap().contains("not shown"));
    assert!(difference(&own(&["...", "gone"]), &printed).unwrap().contains("gone"));
}

#[test]
fn pages_that_lie_are_found() {
    let check = |page: &str| check_page("page", page, &programs());
    let honest = "```console\n$ ls text\na.txt\nb.txt\n$ head -n 1 posts.jsonl | wc -l\n1\n```\n";
    assert_eq!(check(honest), Vec::<String>::new());
    assert!(check("```console\n$ ls text\na.txt\n```\n")[0].contains("printed but not shown: \"b.txt\""));
    assert!(check("```console\n$ cat gone\n```\n")[0].contains("fails"));
    assert!(check("```console\n$ echo 'error: x'\nerror: x\n```\n")[0].contains("succeeds, but is shown to fail"));
    assert!(check("```console\n$ curl x\n```\n")[0].contains("`curl` is not run here"));
}

/// The code of the blocks of Python in `page` that are to be executed.
fn python_of(page: &str) -> String {
    let blocks = page.split("```python\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_module_of_python_passes_its_tests_and_does_what_its_page_shows() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository");
    let python = |arguments: &[&str]| {
        let mut command = Command::new("python3");
        command.args(arguments).env("PYTHONPATH", root.join("python")).env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("TRAINYARD", env!("CARGO_BIN_EXE_trainyard"));
        command
    };
    let version = python(&["-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).output();
    if !version.is_ok_and(|ran| ran.status.success()) {
        return trainyard_testing::skip("there is no Python 3.11");
    }
    let ok = |command: &mut Command| {
        let ran = command.output().expect("Python starts");
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(ran.status.success(), "{said}");
        said
    };
    let tests = root.join("python/tests");
    let said = ok(python(&["-m", "unittest", "discover", "-v", "-s"]).arg(&tests));
    if said.contains("skipped 'no PyTorch'") {
        trainyard_testing::skip_part("there is no PyTorch for the dataset's samples");
    }
    let page = fs::read_to_string(root.join("docs/python.md")).expect("UTF-8");
    let folder = tempfile::tempdir().expect("a temporary folder");
    ok(python(&["-W", "error", "-c", &python_of(&page)]).current_dir(folder.path()));
}
