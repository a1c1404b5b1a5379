//! The report about a set of traces: figures per rank, and verdicts.

use super::breakdown::{Breakdown, Communication, Idle, StreamIdle};
use super::kernels::{Kernel, LaunchCost};
use super::steps::StepRow;
use crate::verdict::{Diagnosis, format_seconds};
use serde::Serialize;
use std::fmt::Write as _;

/// The figures of one rank's trace.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RankReport {
    /// The file.
    pub file: String,
    /// The rank, from the trace or from the file's place in the list.
    pub rank: u32,
    /// Number of ranks of the job, if the trace says it.
    pub world_size: Option<u32>,
    /// The devices that the trace lists.
    pub devices: Vec<String>,
    /// Number of events in the file.
    pub events: u64,
    /// The whole steps.
    pub steps: Vec<StepRow>,
    /// The time of the device. None without work of a device, or if too little of it was recorded.
    pub breakdown: Option<Breakdown>,
    /// Idle time of the device by cause.
    pub idle: Option<Idle>,
    /// Idle time of every stream by cause.
    pub idle_by_stream: Vec<StreamIdle>,
    /// Communication kernels, and how far they run under compute.
    pub communication: Option<Communication>,
    /// Kernels, the most expensive first. Operators where there is no device.
    pub kernels: Vec<Kernel>,
    /// The cost of launching.
    pub launches: Option<LaunchCost>,
    /// Remarks on how the file was read.
    pub notes: Vec<String>,
}

/// The figures of all ranks, and verdicts.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// One entry per file.
    pub ranks: Vec<RankReport>,
    /// The verdicts.
    pub diagnosis: Diagnosis,
}

/// Kernels and steps that the text shows; JSON has them all.
const KERNELS_SHOWN: usize = 8;
const STEPS_SHOWN: usize = 8;

impl Report {
    /// Writes the report for people.
    pub fn to_text(&self) -> String {
        let mut text = self.diagnosis.to_text();
        for rank in &self.ranks {
            text.push('\n');
            rank.write(&mut text);
        }
        text
    }
}

impl RankReport {
    /// True if work of a device was measured.
    fn has_device(&self) -> bool {
        self.idle.is_some()
    }

    fn write(&self, text: &mut String) {
        let of = self.world_size.map(|world| format!(" of {world}")).unwrap_or_default();
        let devices = match (self.devices.is_empty(), self.has_device()) {
            (false, _) => self.devices.join(", "),
            (true, true) => "a device without a name".to_owned(),
            (true, false) => "no device".to_owned(),
        };
        line(text, "file", &format!("{}: rank {}{of}, {devices}, {} events", self.file, self.rank, self.events));
        for note in &self.notes {
            line(text, "note", note);
        }
        if let Some(b) = &self.breakdown {
            let part = |seconds: f64| share(seconds, b.total_seconds);
            line(
                text,
                if self.has_device() { "device" } else { "host" },
                &format!(
                    "{}: compute {}, other work {}, idle {}",
                    format_seconds(b.total_seconds),
                    part(b.compute_seconds),
                    part(b.non_compute_seconds),
                    part(b.idle_seconds)
                ),
            );
            if let Some(idle) = &self.idle {
                line(
                    text,
                    "idle",
                    &format!(
                        "waiting for the host {}, between kernels {}, for other streams {}",
                        part(idle.host_wait_seconds),
                        part(idle.kernel_wait_seconds),
                        part(idle.other_seconds)
                    ),
                );
            }
        }
        if let Some(communication) = &self.communication {
            let overlapped = format!("{:.1} %", 100.0 * communication.overlapped);
            let sum = format_seconds(communication.seconds);
            line(text, "communication", &format!("{sum}, {overlapped} of it under compute"));
        }
        if let Some(launches) = &self.launches {
            let latency = launches.latency_seconds.map_or("unknown".to_owned(), format_seconds);
            line(
                text,
                "launches",
                &format!(
                    "{} of {} each, {latency} until the work begins; the device waited for {:.0} % of them",
                    launches.count,
                    format_seconds(launches.call_seconds),
                    100.0 * launches.waited_for
                ),
            );
        }
        self.write_steps(text);
        for (index, kernel) in self.kernels.iter().take(KERNELS_SHOWN).enumerate() {
            let title = if self.has_device() { "top kernels" } else { "top operators" };
            let head = if index == 0 { title } else { "" };
            let row = format!(
                "{:>5.1} % {:>6} x {:>9}  {}",
                100.0 * kernel.share,
                kernel.count,
                format_seconds(kernel.seconds / kernel.count.max(1) as f64),
                kernel.short_name()
            );
            line(text, head, &row);
        }
    }

    fn write_steps(&self, text: &mut String) {
        for (index, step) in self.steps.iter().take(STEPS_SHOWN).enumerate() {
            let head = if index == 0 { "steps" } else { "" };
            let row = format!(
                "{:>6}: {:>9}, input {:>9}, compute {:>9}, exposed communication {}",
                step.number,
                format_seconds(step.seconds),
                format_seconds(step.input_seconds),
                format_seconds(step.compute_seconds),
                format_seconds(step.exposed_communication_seconds)
            );
            line(text, head, &row);
        }
        if self.steps.len() > STEPS_SHOWN {
            line(text, "", &format!("and {} more steps in --json", self.steps.len() - STEPS_SHOWN));
        }
    }
}

fn line(text: &mut String, head: &str, words: &str) {
    let _ = writeln!(text, "{head:<14} {words}");
}

fn share(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.1} %", 100.0 * part / whole) } else { "-".to_owned() }
}
