//! Verdicts: what bounds a step, how much it costs, and what to change.
//!
//! A [`Verdict`] names one cause from a closed list. Its size is a counterfactual: the measured
//! step replayed without the cause. A [`Diagnosis`] holds the verdicts about one recording, gravest
//! first, and gives the exit code of the program.

use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// A cause of lost time or wrong results. The names in JSON are stable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Arithmetic fills the step.
    ComputeBound,
    /// Kernels wait for memory, not for arithmetic.
    MemoryBound,
    /// The step waits for its batch.
    InputBound,
    /// The step waits for collectives or messages.
    CommunicationBound,
    /// Stages of a pipeline wait for each other by construction of the schedule.
    Bubble,
    /// One rank is slower than the others, which wait for it.
    Straggler,
    /// Work is divided unevenly: stages, experts, lengths of sequences.
    Imbalance,
    /// The device waits for the host, which launches or prepares its work.
    HostOverhead,
    /// The step waits for tensors that lie on the host or on disk.
    OffloadBound,
    /// The step waits for a checkpoint.
    CheckpointStall,
    /// Memory is so short that time is lost: paging, repeated allocation.
    MemoryPressure,
    /// The machine gives the process fewer cores than it counts on.
    StolenCores,
    /// Cores or devices run below their clock.
    Throttled,
    /// Another program takes memory bandwidth, disk or network.
    NoisyNeighbour,
    /// Memory grows from step to step.
    Leak,
    /// Numbers that are not finite, or that differ when computed again.
    WrongNumbers,
    /// A rank stopped making progress.
    Hang,
    /// The recording does not hold what a verdict needs.
    IncompleteData,
    /// Time was lost that no other cause explains.
    Unexplained,
}

impl Cause {
    /// Every cause, in the order of the declaration.
    pub const ALL: [Cause; 19] = [
        Cause::ComputeBound,
        Cause::MemoryBound,
        Cause::InputBound,
        Cause::CommunicationBound,
        Cause::Bubble,
        Cause::Straggler,
        Cause::Imbalance,
        Cause::HostOverhead,
        Cause::OffloadBound,
        Cause::CheckpointStall,
        Cause::MemoryPressure,
        Cause::StolenCores,
        Cause::Throttled,
        Cause::NoisyNeighbour,
        Cause::Leak,
        Cause::WrongNumbers,
        Cause::Hang,
        Cause::IncompleteData,
        Cause::Unexplained,
    ];

    /// The stable name: `input_bound`.
    pub fn name(self) -> &'static str {
        match self {
            Cause::ComputeBound => "compute_bound",
            Cause::MemoryBound => "memory_bound",
            Cause::InputBound => "input_bound",
            Cause::CommunicationBound => "communication_bound",
            Cause::Bubble => "bubble",
            Cause::Straggler => "straggler",
            Cause::Imbalance => "imbalance",
            Cause::HostOverhead => "host_overhead",
            Cause::OffloadBound => "offload_bound",
            Cause::CheckpointStall => "checkpoint_stall",
            Cause::MemoryPressure => "memory_pressure",
            Cause::StolenCores => "stolen_cores",
            Cause::Throttled => "throttled",
            Cause::NoisyNeighbour => "noisy_neighbour",
            Cause::Leak => "leak",
            Cause::WrongNumbers => "wrong_numbers",
            Cause::Hang => "hang",
            Cause::IncompleteData => "incomplete_data",
            Cause::Unexplained => "unexplained",
        }
    }

    /// True for causes that make the run wrong or end it. They come before lost time.
    fn comes_first(self) -> bool {
        matches!(self, Cause::Hang | Cause::WrongNumbers | Cause::Leak | Cause::IncompleteData)
    }

    /// The name as prose: `input bound`.
    pub fn in_words(self) -> String {
        self.name().replace('_', " ")
    }
}

/// The weight of a verdict.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A fact to know; nothing is wrong.
    Info,
    /// Worth a change.
    Warning,
    /// Change this first.
    Critical,
}

impl Severity {
    /// A saving of at least this share of the step is a warning.
    pub const WARNING_SHARE: f64 = 0.05;
    /// A saving of at least this share of the step is critical.
    pub const CRITICAL_SHARE: f64 = 0.20;

    /// The severity of a cause whose removal saves this share of the step.
    pub fn of_share(share: f64) -> Severity {
        if share >= Severity::CRITICAL_SHARE {
            Severity::Critical
        } else if share >= Severity::WARNING_SHARE {
            Severity::Warning
        } else {
            Severity::Info
        }
    }

    /// The exit code of a command whose gravest verdict has this severity. Codes 1 and 2 are taken
    /// by errors and wrong usage.
    pub fn exit_code(self) -> u8 {
        match self {
            Severity::Info => 0,
            Severity::Warning => 3,
            Severity::Critical => 4,
        }
    }

    /// The name in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Critical => "critical",
        }
    }
}

/// The unit of a number, which says how it is printed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Seconds; printed in ms or µs where that is shorter.
    Seconds,
    /// A share from 0 to 1; printed in percent.
    Share,
    /// A number of things.
    Count,
    /// Bytes.
    Bytes,
    /// Bytes per second.
    BytesPerSecond,
    /// Floating-point operations per second.
    Flops,
    /// A quotient of two like quantities; printed as `1.25x`.
    Ratio,
}

impl Unit {
    /// Writes `value` in this unit: `12.3 ms`, `45.6 %`.
    pub fn format(self, value: f64) -> String {
        match self {
            Unit::Seconds => format_seconds(value),
            Unit::Share => format!("{:.1} %", 100.0 * value),
            Unit::Count if value.fract() == 0.0 && value >= 0.0 => trainyard_base::format_count(value),
            Unit::Count => format!("{value:.1}"),
            Unit::Bytes => trainyard_base::format_bytes(value.max(0.0) as u64),
            Unit::BytesPerSecond => format!("{:.2} GB/s", value / 1e9),
            Unit::Flops => format!("{:.3} TFLOP/s", value / 1e12),
            Unit::Ratio => format!("{value:.2}x"),
        }
    }
}

/// Writes a time in the largest of s, ms, µs and ns that leaves at least one before the point.
pub fn format_seconds(seconds: f64) -> String {
    let size = seconds.abs();
    if size >= 1.0 {
        format!("{seconds:.2} s")
    } else if size >= 1e-3 {
        format!("{:.2} ms", seconds * 1e3)
    } else if size >= 1e-6 {
        format!("{:.1} µs", seconds * 1e6)
    } else {
        format!("{:.0} ns", seconds * 1e9)
    }
}

/// The place in a recording that evidence refers to. Fields that do not apply are absent.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The lane: a thread, a stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<String>,
    /// The step, by its number in the recording.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// The span, instruction or kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub span: Option<String>,
    /// Begin on the clock of the recording, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_seconds: Option<f64>,
}

impl Place {
    /// The place in words, ` · ` between its parts; empty where nothing is known.
    pub fn in_words(&self) -> String {
        let parts = [
            self.file.clone(),
            self.rank.map(|rank| format!("rank {rank}")),
            self.step.map(|step| format!("step {step}")),
            self.lane.clone(),
            self.span.clone(),
            self.start_seconds.map(|at| format!("at {at:.6} s")),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" · ")
    }
}

/// One number that supports a verdict.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// The quantity: `wait for the next batch, median of 5 steps`.
    pub what: String,
    /// Its value.
    pub value: f64,
    /// The unit of the value.
    pub unit: Unit,
    /// A place where it can be seen.
    #[serde(default)]
    pub place: Place,
}

impl Evidence {
    /// A number without a place.
    pub fn new(what: impl Into<String>, value: f64, unit: Unit) -> Self {
        Evidence { what: what.into(), value, unit, place: Place::default() }
    }

    /// The same number with a place where it can be seen.
    pub fn at(self, place: Place) -> Self {
        Evidence { place, ..self }
    }
}

/// The predicted saving per step of removing a cause, with an interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saving {
    /// The measured step.
    pub step_seconds: f64,
    /// The best estimate.
    pub seconds: f64,
    /// Lower end of the interval.
    pub low_seconds: f64,
    /// Upper end of the interval.
    pub high_seconds: f64,
}

impl Saving {
    /// The saving as a share of the step; 0 for a step without length.
    pub fn share(&self) -> f64 {
        if self.step_seconds > 0.0 { self.seconds / self.step_seconds } else { 0.0 }
    }

    /// The mean saving of replayed steps, with twice its standard error on both sides. None without
    /// steps.
    pub fn mean_of_steps(steps: &[SavedStep]) -> Option<Saving> {
        if steps.is_empty() {
            return None;
        }
        let count = steps.len() as f64;
        let savings = || steps.iter().map(|step| step.measured_seconds - step.replayed_seconds);
        let mean = savings().sum::<f64>() / count;
        let variance = savings().map(|saving| (saving - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
        let error = 2.0 * (variance / count).sqrt();
        Some(Saving {
            step_seconds: steps.iter().map(|step| step.measured_seconds).sum::<f64>() / count,
            seconds: mean,
            low_seconds: mean - error,
            high_seconds: mean + error,
        })
    }

    /// The median saving of replayed steps, from the smallest to the largest of them. None without
    /// steps.
    pub fn median_of_steps(steps: &[SavedStep]) -> Option<Saving> {
        let savings = || steps.iter().map(|step| step.measured_seconds - step.replayed_seconds);
        Some(Saving {
            step_seconds: trainyard_base::median(steps.iter().map(|step| step.measured_seconds))?,
            seconds: trainyard_base::median(savings())?,
            low_seconds: savings().fold(f64::INFINITY, f64::min),
            high_seconds: savings().fold(f64::NEG_INFINITY, f64::max),
        })
    }
}

/// One step, as measured and as replayed without a cause.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SavedStep {
    /// The measured step.
    pub measured_seconds: f64,
    /// The step without the cause.
    pub replayed_seconds: f64,
}

/// A change that would help.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Advice {
    /// The change, as a sentence.
    pub text: String,
    /// The setting that makes it, in the words of the program that was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setting: Option<String>,
}

impl Advice {
    /// Advice without a setting.
    pub fn new(text: impl Into<String>) -> Self {
        Advice { text: text.into(), setting: None }
    }

    /// Advice that one setting follows.
    pub fn set(text: impl Into<String>, setting: impl Into<String>) -> Self {
        Advice { text: text.into(), setting: Some(setting.into()) }
    }
}

/// One cause with its evidence, its size and what to change.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verdict {
    /// The cause.
    pub cause: Cause,
    /// The weight.
    pub severity: Severity,
    /// One sentence that says what was found.
    pub summary: String,
    /// The numbers behind it.
    pub evidence: Vec<Evidence>,
    /// The predicted saving, where a cure exists and its size is known.
    pub saving: Option<Saving>,
    /// Changes that would help, the most promising first.
    pub advice: Vec<Advice>,
}

impl Verdict {
    /// Writes the verdict as text, several lines.
    pub fn to_text(&self) -> String {
        let mut text = format!("{} ({}): {}\n", self.cause.in_words(), self.severity.name(), self.summary);
        for row in &self.evidence {
            let place = row.place.in_words();
            let place = if place.is_empty() { place } else { format!("  [{place}]") };
            let _ = writeln!(text, "    {:>12}  {}{place}", row.unit.format(row.value), row.what);
        }
        if let Some(saving) = &self.saving {
            let _ = writeln!(
                text,
                "    saves {} of {} a step ({:.1} %), between {} and {}",
                format_seconds(saving.seconds),
                format_seconds(saving.step_seconds),
                100.0 * saving.share(),
                format_seconds(saving.low_seconds),
                format_seconds(saving.high_seconds)
            );
        }
        for advice in &self.advice {
            let setting = advice.setting.as_ref().map(|setting| format!(": {setting}")).unwrap_or_default();
            let _ = writeln!(text, "    -> {}{setting}", advice.text);
        }
        text
    }
}

/// The verdicts about one recording.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Diagnosis {
    /// The verdicts, gravest first.
    pub verdicts: Vec<Verdict>,
}

impl Diagnosis {
    /// Orders verdicts by severity, then by saving. Of the same severity, those without which the
    /// run is wrong or ends come first.
    pub fn new(mut verdicts: Vec<Verdict>) -> Self {
        let seconds = |verdict: &Verdict| verdict.saving.map_or(0.0, |saving| saving.seconds);
        let first = |verdict: &Verdict| verdict.cause.comes_first();
        verdicts.sort_by(|a, b| {
            let order = b.severity.cmp(&a.severity).then(first(b).cmp(&first(a)));
            order.then(seconds(b).total_cmp(&seconds(a)))
        });
        Diagnosis { verdicts }
    }

    /// The gravest severity; None without verdicts.
    pub fn severity(&self) -> Option<Severity> {
        self.verdicts.iter().map(|verdict| verdict.severity).max()
    }

    /// The exit code of a command that prints this diagnosis.
    pub fn exit_code(&self) -> u8 {
        self.severity().map_or(0, Severity::exit_code)
    }

    /// The first verdict with this cause.
    pub fn verdict(&self, cause: Cause) -> Option<&Verdict> {
        self.verdicts.iter().find(|verdict| verdict.cause == cause)
    }

    /// Writes all verdicts as text, an empty line between two.
    pub fn to_text(&self) -> String {
        if self.verdicts.is_empty() {
            return "no verdict: nothing stands out\n".to_owned();
        }
        self.verdicts.iter().map(Verdict::to_text).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(cause: Cause, seconds: f64) -> Verdict {
        let saving = Saving { step_seconds: 0.1, seconds, low_seconds: seconds - 0.001, high_seconds: seconds + 0.001 };
        Verdict {
            cause,
            severity: Severity::of_share(saving.share()),
            summary: "The step waits for its batch.".to_owned(),
            evidence: vec![Evidence::new("wait for the next batch", seconds, Unit::Seconds).at(Place {
                rank: Some(0),
                step: Some(3),
                ..Place::default()
            })],
            saving: Some(saving),
            advice: vec![Advice::set("read batches in other processes", "num_workers=4")],
        }
    }

    #[test]
    fn names_are_those_of_json() {
        for cause in Cause::ALL {
            assert_eq!(serde_json::to_value(cause).unwrap(), cause.name());
        }
        for severity in [Severity::Info, Severity::Warning, Severity::Critical] {
            assert_eq!(serde_json::to_value(severity).unwrap(), severity.name());
        }
    }

    #[test]
    fn a_diagnosis_is_ordered_and_gives_the_exit_code_of_its_gravest_verdict() {
        let diagnosis = Diagnosis::new(vec![
            verdict(Cause::ComputeBound, 0.001),
            verdict(Cause::HostOverhead, 0.006),
            verdict(Cause::InputBound, 0.03),
            verdict(Cause::CommunicationBound, 0.008),
        ]);
        let order: Vec<_> = diagnosis.verdicts.iter().map(|verdict| verdict.cause.name()).collect();
        assert_eq!(order, ["input_bound", "communication_bound", "host_overhead", "compute_bound"]);
        assert_eq!(diagnosis.exit_code(), 4);
        assert_eq!(Diagnosis::default().exit_code(), 0);
        let json = serde_json::to_string(&diagnosis).unwrap();
        assert_eq!(serde_json::from_str::<Diagnosis>(&json).unwrap(), diagnosis);
    }

    #[test]
    fn a_verdict_is_printed_with_its_evidence_saving_and_advice() {
        let expected = "\
input bound (critical): The step waits for its batch.
        30.00 ms  wait for the next batch  [rank 0 · step 3]
    saves 30.00 ms of 100.00 ms a step (30.0 %), between 29.00 ms and 31.00 ms
    -> read batches in other processes: num_workers=4
";
        assert_eq!(verdict(Cause::InputBound, 0.03).to_text(), expected);
    }

    #[test]
    fn a_saving_is_the_median_of_steps_between_its_extremes() {
        let step = |measured_seconds, replayed_seconds| SavedStep { measured_seconds, replayed_seconds };
        let saving = Saving::median_of_steps(&[step(0.5, 0.25), step(0.5, 0.5), step(0.75, 0.625)]).unwrap();
        assert_eq!(saving, Saving { step_seconds: 0.5, seconds: 0.125, low_seconds: 0.0, high_seconds: 0.25 });
        assert_eq!(Saving::median_of_steps(&[]), None);
    }
}
