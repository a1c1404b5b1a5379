//! Records of a run that the dashboard and the registry show: `environment.json` and
//! `samples.jsonl`.

use serde_json::json;
use std::fs::OpenOptions;
use std::io::{Result, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use trainyard_dashboard::run::files;

/// Writes the environment in which the run in `folder` began, or was last resumed.
pub fn write_environment(folder: &Path, ranks: usize) -> Result<()> {
    let line = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpu = line("/proc/cpuinfo");
    let cpu =
        cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name.to_owned()));
    let environment = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "host": line("/proc/sys/kernel/hostname"),
        "kernel": line("/proc/sys/kernel/osrelease"),
        "cpu": cpu,
        "cores": std::thread::available_parallelism()?.get(),
        "ranks": ranks,
        "process": std::process::id(),
        "started_s": SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    });
    // Readers see the old file or the new one.
    let new = folder.join(files::ENVIRONMENT).with_extension("json.new");
    std::fs::write(&new, format!("{environment:#}\n"))?;
    std::fs::rename(new, folder.join(files::ENVIRONMENT))
}

/// Appends a text that the model wrote after `step`.
pub fn add_sample(folder: &Path, step: u64, text: &str) -> Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(folder.join(files::SAMPLES))?;
    file.write_all(format!("{}\n", json!({"step": step, "text": text})).as_bytes())
}
