//! The progress of a run, read from its folder: the last recorded step, the newest checkpoint, the
//! mean speed since a start, and the exit code that the run has left.
//!
//! The folder's files are read as they are documented; nothing of the engine is linked.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Bytes of the end of `metrics.jsonl` that are read.
const TAIL_BYTES: u64 = 256 << 10;
/// Lines of the end of a log that are searched for an error.
const LOG_LINES: usize = 60;

/// The end of `metrics.jsonl`.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Recorded {
    /// The last recorded step.
    pub step: u64,
    /// Mean steps per second after a given step, without the first one, which prepares things. None
    /// with fewer than [`STEPS_MIN`] of them.
    pub rate: Option<f64>,
}

/// Steps that a mean speed needs.
pub const STEPS_MIN: usize = 3;

/// True if the run in this folder has begun.
pub fn has_begun(run: &Path) -> bool {
    run.join("config.toml").is_file()
}

/// The steps recorded in the run's folder, with the speed of those after step `after`. None before
/// the first one.
pub fn recorded(run: &Path, after: u64) -> Option<Recorded> {
    let text = tail(&run.join("metrics.jsonl"), TAIL_BYTES)?;
    let line = |line: &str| -> Option<(u64, f64)> {
        let value: serde_json::Value = serde_json::from_str(line).ok()?;
        Some((value.get("step")?.as_u64()?, value.get("step_s")?.as_f64()?))
    };
    // The first line of a tail is rarely whole, and the last one may be half written.
    let steps: Vec<(u64, f64)> = text.lines().filter_map(line).collect();
    let (step, _) = *steps.last()?;
    let timed: Vec<f64> = steps.iter().filter(|(step, _)| *step > after + 1).map(|(_, seconds)| *seconds).collect();
    let seconds: f64 = timed.iter().sum();
    let rate = (timed.len() >= STEPS_MIN && seconds > 0.0).then(|| timed.len() as f64 / seconds);
    Some(Recorded { step, rate })
}

/// The step of the run's newest checkpoint, 0 without one.
pub fn checkpoint(run: &Path) -> u64 {
    let entries = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    let step = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok();
    entries.filter_map(step).max().unwrap_or(0)
}

/// The seconds of training in the run's newest checkpoint, 0 without one.
pub fn checkpoint_seconds(run: &Path) -> f64 {
    let manifest = run.join("checkpoints").join(format!("step-{:08}", checkpoint(run))).join("manifest.json");
    let seconds = || -> Option<f64> {
        let value: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(manifest).ok()?).ok()?;
        value.get("state")?.get("seconds")?.as_f64()
    };
    seconds().unwrap_or(0.0)
}

/// The longest of the last recorded steps, in seconds.
pub fn longest_step_s(run: &Path) -> Option<f64> {
    let text = tail(&run.join("metrics.jsonl"), TAIL_BYTES)?;
    let seconds = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?.get("step_s")?.as_f64();
    text.lines().filter_map(seconds).max_by(f64::total_cmp)
}

/// The seconds that the run's last checkpoint took to write.
pub fn checkpoint_write_s(run: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(run.join("last-checkpoint.json")).ok()?;
    serde_json::from_str::<serde_json::Value>(&text).ok()?.get("seconds")?.as_f64()
}

/// The exit code in the file that `train --run-file` writes: its second line.
pub fn exit_code(file: &Path) -> Option<i32> {
    std::fs::read_to_string(file).ok()?.lines().nth(1)?.trim().parse().ok()
}

/// The last error in a log, or its last line.
pub fn last_words(log: &Path) -> Option<String> {
    let text = tail(log, TAIL_BYTES)?;
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let end = &lines[lines.len().saturating_sub(LOG_LINES)..];
    let error = end.iter().rev().find_map(|line| line.strip_prefix("error: "));
    error.or(end.last().copied()).map(str::to_owned)
}

/// The last lines of a log.
pub fn last_lines(log: &Path, count: usize) -> Vec<String> {
    let Some(text) = tail(log, TAIL_BYTES) else { return Vec::new() };
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].iter().map(|line| (*line).to_owned()).collect()
}

/// The last bytes of a file as text. None if it cannot be read.
fn tail(path: &Path, bytes: u64) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(bytes))).ok()?;
    let mut text = Vec::new();
    file.take(bytes).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_read_while_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path();
        assert_eq!((recorded(run, 0), checkpoint(run), has_begun(run)), (None, 0, false));
        let line = |step: u64, seconds: f64| format!("{{\"step\":{step},\"loss\":1.0,\"step_s\":{seconds}}}\n");
        let text: String = (1..=9).map(|step| line(step, if step == 5 { 9.0 } else { 0.5 })).collect();
        std::fs::write(run.join("metrics.jsonl"), format!("{text}{{\"step\":10,\"lo")).unwrap();
        // Step 5 was the first after a start, and is not timed.
        assert_eq!(recorded(run, 4), Some(Recorded { step: 9, rate: Some(2.0) }));
        assert_eq!(recorded(run, 7), Some(Recorded { step: 9, rate: None }));
        assert_eq!((longest_step_s(run), checkpoint_write_s(run)), (Some(9.0), None));
        std::fs::write(run.join("last-checkpoint.json"), "{\"step\":5,\"seconds\":0.25}").unwrap();
        assert_eq!(checkpoint_write_s(run), Some(0.25));
        for step in ["step-00000005", "step-00000010", ".step-00000015.tmp", "best.json"] {
            std::fs::create_dir_all(run.join("checkpoints").join(step)).unwrap();
        }
        assert_eq!((checkpoint(run), checkpoint_seconds(run)), (10, 0.0));
        let manifest = run.join("checkpoints/step-00000010/manifest.json");
        std::fs::write(manifest, "{\"step\": 10, \"state\": {\"seconds\": 12.5}}").unwrap();
        assert_eq!(checkpoint_seconds(run), 12.5);
    }

    #[test]
    fn exit_codes_and_last_words() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run");
        assert_eq!((exit_code(&file), last_words(&file)), (None, None));
        std::fs::write(&file, "runs/a\n").unwrap();
        assert_eq!(exit_code(&file), None);
        std::fs::write(&file, "runs/a\n130\n").unwrap();
        assert_eq!(exit_code(&file), Some(130));
        std::fs::write(&file, "step 1\nerror: the disk is full\nrun ended\n\n").unwrap();
        assert_eq!(last_words(&file).unwrap(), "the disk is full");
        assert_eq!(last_lines(&file, 2), ["run ended", ""]);
    }
}
