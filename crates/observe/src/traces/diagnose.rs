//! From figures to verdicts.

use super::breakdown::{self, Breakdown, Busy, seconds};
use super::host_only::{HostCause, HostTimes};
use super::intervals::Intervals;
use super::kernels::{self, Kernel, LaunchCost};
use super::kineto::{StepOrigin, Trace};
use super::ranks::{self, RankSteps};
use super::replay::{Removed, Replay};
use super::report::{RankReport, Report};
use super::steps::{self, StepRow};
use super::window::Window;
use crate::span::{Kind, Span};
use crate::verdict::{
    Advice, Cause, Diagnosis, Evidence, Place, SavedStep, Saving, Severity, Unit, Verdict, format_seconds,
};
use trainyard_base::median;

/// Causes whose removal saves less than this share of the step are not mentioned.
pub const SHARE_MIN: f64 = 0.02;

/// More launches than this share without work on the device: the recording has holes.
const LOST_SHARE_MAX: f64 = 0.10;

/// A step with at least this share of compute is compute bound.
const COMPUTE_SHARE_MIN: f64 = 0.80;

/// A step this many times longer than the median is told.
const SLOW_STEP_MIN: f64 = 1.2;

/// Idle time for no known reason of at least this share is told.
const UNEXPLAINED_SHARE_MIN: f64 = 0.10;

/// The figures and verdicts of one rank; the trace itself is no longer needed.
pub struct Examined {
    report: RankReport,
    verdicts: Vec<Verdict>,
    steps: RankSteps,
}

/// Measures one trace. `place` is its number among the files, which is its rank where the trace
/// does not say it.
pub fn examine(trace: &Trace, place: u32) -> Examined {
    let rank = if trace.rank_is_known { trace.timeline.rank } else { place };
    let window = Window::of(trace);
    let mut report = RankReport {
        file: trace.path.display().to_string(),
        rank,
        world_size: trace.world_size,
        devices: trace.devices.clone(),
        events: trace.events,
        steps: Vec::new(),
        breakdown: None,
        idle: None,
        idle_by_stream: Vec::new(),
        communication: None,
        kernels: Vec::new(),
        launches: None,
        notes: notes(&window),
    };
    let (verdicts, compute) = match missing(&window, rank) {
        Some(verdict) => (vec![verdict], Intervals::default()),
        None if trace.ops.is_empty() => examine_host(&window, &mut report),
        None => examine_device(&window, &mut report),
    };
    report.notes.extend(slow_step(&report.steps));
    let steps = RankSteps::of(&window, rank, &report.steps, &compute);
    if window.is_whole_recording() {
        report.steps.clear();
    }
    Examined { report, verdicts, steps }
}

/// The report about all ranks. Of a verdict that several ranks have, the gravest is kept.
pub fn diagnose(examined: Vec<Examined>) -> Report {
    let mut verdicts: Vec<(Verdict, usize)> = Vec::new();
    let (mut reports, mut ranks) = (Vec::new(), Vec::new());
    let seconds = |verdict: &Verdict| verdict.saving.map_or(0.0, |saving| saving.seconds);
    for examined in examined {
        for verdict in examined.verdicts {
            match verdicts.iter_mut().find(|(known, _)| known.cause == verdict.cause) {
                Some((known, count)) => {
                    *count += 1;
                    if (verdict.severity, seconds(&verdict)) > (known.severity, seconds(known)) {
                        *known = verdict;
                    }
                }
                None => verdicts.push((verdict, 1)),
            }
        }
        reports.push(examined.report);
        ranks.push(examined.steps);
    }
    let count = reports.len();
    let told = |(mut verdict, ranks): (Verdict, usize)| {
        if count > 1 {
            verdict.evidence.push(Evidence::new(
                format!("ranks of {count} with this verdict"),
                ranks as f64,
                Unit::Count,
            ));
        }
        verdict
    };
    let mut verdicts: Vec<Verdict> = verdicts.into_iter().map(told).collect();
    if let Some(straggler) = ranks::straggler(&ranks) {
        verdicts.retain_mut(|verdict| verdict.cause != Cause::CommunicationBound || beyond(verdict, &straggler));
        verdicts.push(straggler);
    }
    Report { ranks: reports, diagnosis: Diagnosis::new(verdicts) }
}

/// Takes the waiting for a slow rank, which has a verdict of its own, out of the saving of one
/// about communication. False if nothing worth mentioning is left.
fn beyond(verdict: &mut Verdict, straggler: &Verdict) -> bool {
    let (Some(saving), Some(waited)) = (verdict.saving.as_mut(), straggler.saving) else { return true };
    saving.seconds = (saving.seconds - waited.seconds).max(0.0);
    saving.low_seconds = (saving.low_seconds - waited.high_seconds).max(0.0);
    saving.high_seconds = (saving.high_seconds - waited.low_seconds).max(saving.seconds);
    verdict.severity = verdict.severity.min(Severity::of_share(saving.share()));
    let share = saving.share();
    verdict.evidence.push(Evidence::new("waiting for slower ranks, not counted", waited.seconds, Unit::Seconds));
    share >= SHARE_MIN
}

fn notes(window: &Window) -> Vec<String> {
    let trace = window.trace;
    let mut notes = Vec::new();
    match trace.step_origin {
        StepOrigin::Profiler if trace.steps.len() >= 2 => {
            notes.push(format!("{} steps; the last, in which the profiler stopped, is left out", trace.steps.len()));
        }
        StepOrigin::Profiler => notes.push("one step; the profiler may have stopped inside of it".to_owned()),
        StepOrigin::Optimizer => {
            notes.push("no profiler steps: a step is the time between two updates of the optimizer".to_owned());
        }
        StepOrigin::None => notes.push("no steps: times are those of the whole recording".to_owned()),
    }
    let skipped = &trace.skipped;
    for (count, what) in [
        (skipped.unreadable, "events are no JSON objects or too long, and were skipped"),
        (skipped.without_time, "events have no valid begin or length, and were skipped"),
        (skipped.mended, "events are not valid JSON, and were read after mending escapes or numbers"),
        (skipped.python_frames, "frames of Python were skipped; recording them slows the host"),
    ] {
        if count > 0 {
            notes.push(format!("{count} {what}"));
        }
    }
    let unlinked = trace.ops.iter().filter(|op| op.call.is_none()).count();
    if unlinked > 0 {
        notes.push(format!("{unlinked} of {} pieces of device work have no recorded launch", trace.ops.len()));
    }
    notes
}

/// A note if one step is much longer than the others.
fn slow_step(steps: &[StepRow]) -> Option<String> {
    let slowest = steps.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds)).filter(|_| steps.len() >= 3)?;
    let ratio = slowest.seconds / median(steps.iter().map(|step| step.seconds))?;
    let length = format_seconds(slowest.seconds);
    (ratio > SLOW_STEP_MIN).then(|| format!("step {} took {length}, {ratio:.2} times the median", slowest.number))
}

/// A verdict if the recording does not hold what others need.
fn missing(window: &Window, rank: u32) -> Option<Verdict> {
    let trace = window.trace;
    let launches = window.launches();
    let verdict = |summary: &str, evidence: Vec<Evidence>, advice: Vec<Advice>| {
        let at = Place { file: Some(trace.path.display().to_string()), rank: Some(rank), ..Place::default() };
        let evidence = evidence.into_iter().map(|row| row.at(at.clone())).collect();
        let summary = summary.to_owned();
        Some(Verdict {
            cause: Cause::IncompleteData,
            severity: Severity::Warning,
            summary,
            evidence,
            saving: None,
            advice,
        })
    };
    let count = |what: &str, count: usize| Evidence::new(what, count as f64, Unit::Count);
    let record_device =
        Advice::set("record what the device does", "profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])");
    if launches.total > 0 && launches.without_work as f64 > LOST_SHARE_MAX * launches.total as f64 {
        return verdict(
            "Work that the host launched is not in the recording, so times of the device would be wrong.",
            vec![
                count("launches in whole steps", launches.total),
                count("launches without work on the device", launches.without_work),
            ],
            vec![
                record_device,
                Advice::set(
                    "record fewer steps, so that the profiler's buffers suffice",
                    "schedule(wait=1, warmup=1, active=3)",
                ),
            ],
        );
    }
    let in_steps =
        trace.operators.iter().filter(|index| window.step_of(trace.timeline.spans[**index as usize].step).is_some());
    let operators = in_steps.count();
    if window.ops.is_empty() && operators == 0 {
        return verdict(
            "The whole steps hold neither work of a device nor operators of the host.",
            vec![
                count("events in the file", trace.events as usize),
                count("whole steps", trace.steps.len().min(window.steps.len())),
                count("pieces of device work in the file", trace.ops.len()),
                count("operators in the file", trace.operators.len()),
            ],
            vec![record_device, Advice::set("record whole steps", "profiler.step() at the end of each training step")],
        );
    }
    None
}

/// Verdicts about a trace with a device, and the times in which that computed.
fn examine_device(window: &Window, report: &mut RankReport) -> (Vec<Verdict>, Intervals) {
    let busy = Busy::of(window.trace, &window.ops);
    report.breakdown = breakdown::breakdown(&busy);
    report.idle = Some(breakdown::idle(window));
    report.idle_by_stream = breakdown::idle_by_stream(window);
    report.communication = breakdown::communication(&busy);
    report.kernels = kernels::kernels(window);
    report.launches = kernels::launch_cost(window);
    report.steps = steps::steps(window, &busy);
    let replay = Replay::of(window);
    let context = Context { window, report };
    let mut verdicts = Vec::new();
    if report.launches.is_some() {
        // A host that takes no time would hide the wait for batches too, so its own share is what
        // it saves beyond that.
        verdicts.extend(context.input(&replay.beyond(Removed::Nothing, Removed::InputWait)));
        verdicts.extend(context.host(&replay.beyond(Removed::InputWait, Removed::HostTime)));
    } else {
        verdicts.push(context.no_host());
    }
    let summary = format!("The {} waits for communication that no computation hides.", context.step_word());
    match context.communication(summary, &replay.beyond(Removed::Nothing, Removed::Communication)) {
        Some(verdict) => verdicts.push(verdict),
        None => {
            let steps = replay.beyond(Removed::HostTime, Removed::HostTimeAndCommunication);
            verdicts.extend(context.communication_behind_host(&steps));
        }
    }
    verdicts.extend(context.compute());
    verdicts.extend(context.unexplained(&verdicts));
    (verdicts, busy.compute)
}

/// Verdicts about a trace without a device, and the times in which the host computed.
fn examine_host(window: &Window, report: &mut RankReport) -> (Vec<Verdict>, Intervals) {
    let times = HostTimes::of(window);
    report.steps = times.steps(window);
    report.breakdown = Some(times.breakdown(&report.steps));
    report.communication = times.communication();
    report.notes.push("no device: operators of the host count as its work".to_owned());
    let without = |cause, steps: &[StepRow]| times.without(cause, steps);
    report.kernels = times.operators.clone();
    let context = Context { window, report };
    let mut verdicts = Vec::new();
    verdicts.extend(context.input(&without(HostCause::Input, &report.steps)));
    let summary = format!("The {} waits for communication that no computation hides.", context.step_word());
    verdicts.extend(context.communication(summary, &without(HostCause::Communication, &report.steps)));
    verdicts.extend(context.host(&without(HostCause::Overhead, &report.steps)));
    verdicts.extend(context.compute());
    (verdicts, times.compute)
}

/// The material of verdicts about one rank.
struct Context<'a> {
    window: &'a Window<'a>,
    report: &'a RankReport,
}

impl Context<'_> {
    /// The word for what a saving refers to.
    fn step_word(&self) -> &'static str {
        if self.window.is_whole_recording() { "recording" } else { "step" }
    }

    fn place(&self, span: &Span) -> Place {
        let timeline = &self.window.trace.timeline;
        let step = self.window.step_of(span.step).map(|step| self.window.steps[step].number);
        Place {
            rank: Some(self.report.rank),
            lane: Some(timeline.lanes[span.lane as usize].name.clone()),
            step: step.filter(|_| !self.window.is_whole_recording()),
            span: Some(if timeline.lanes[span.lane as usize].on_device {
                super::kineto::short_name(timeline.name(span))
            } else {
                timeline.name(span).to_owned()
            }),
            start_seconds: Some(seconds(span.start_ns - self.window.trace.origin_ns())),
            ..Place::default()
        }
    }

    /// The longest span among some, and where it is.
    fn longest(&self, wanted: impl Fn(&Span) -> bool) -> Option<&Span> {
        let spans = self.window.trace.timeline.spans.iter();
        spans
            .filter(|span| wanted(span) && self.window.step_of(span.step).is_some())
            .max_by_key(|span| span.duration_ns())
    }

    fn median_of(&self, part: fn(&StepRow) -> f64) -> f64 {
        median(self.report.steps.iter().map(part)).unwrap_or(0.0)
    }

    /// Adds what is common to verdicts with a saving; None if the saving is too small to mention.
    fn sized(&self, cause: Cause, summary: String, steps: &[SavedStep]) -> Option<Verdict> {
        let saving = Saving::median_of_steps(steps).filter(|saving| saving.share() >= SHARE_MIN)?;
        // One step alone may be a warm-up.
        let most =
            if steps.len() >= 2 || self.window.is_whole_recording() { Severity::Critical } else { Severity::Warning };
        let severity = Severity::of_share(saving.share()).min(most);
        Some(Verdict { cause, severity, summary, evidence: Vec::new(), saving: Some(saving), advice: Vec::new() })
    }

    fn input(&self, steps: &[SavedStep]) -> Option<Verdict> {
        let word = self.step_word();
        let summary = match self.report.idle {
            Some(_) => format!("The {word} waits for its batch, and the device has nothing to do."),
            None => format!("The {word} waits for its batch."),
        };
        let verdict = self.sized(Cause::InputBound, summary, steps)?;
        let lane = self.window.steps.first()?.lane;
        let longest = self.longest(|span| span.kind == Kind::Input && span.lane == lane)?;
        let name = self.window.trace.timeline.name(longest).to_owned();
        let wait = self.median_of(|step| step.input_seconds);
        let mut evidence = vec![
            Evidence::new("wait for a batch, median of the steps", wait, Unit::Seconds),
            Evidence::new("longest wait for a batch", seconds(longest.duration_ns()), Unit::Seconds)
                .at(self.place(longest)),
        ];
        if let (Some(idle), Some(b)) = (&self.report.idle, &self.report.breakdown) {
            let share = idle.host_wait_seconds / b.total_seconds.max(f64::MIN_POSITIVE);
            evidence.push(Evidence::new("share of time in which the device waits for the host", share, Unit::Share));
        }
        let mut advice = Vec::new();
        if name.contains("SingleProcess") {
            advice.push(Advice::set(
                "read batches in other processes; now the training process reads them",
                "DataLoader(num_workers=4)",
            ));
        } else if name.contains("MultiProcessing") {
            advice.push(Advice::set(
                "use more loader processes, or let them work further ahead",
                "DataLoader(num_workers=..., prefetch_factor=4)",
            ));
        }
        advice.push(Advice::set(
            "keep loader processes between epochs, and copy batches without blocking",
            "DataLoader(persistent_workers=True, pin_memory=True), batch.to(device, non_blocking=True)",
        ));
        advice.push(Advice::new("decode, tokenise and augment beforehand, or on the device"));
        Some(Verdict { evidence, advice, ..verdict })
    }

    fn host(&self, steps: &[SavedStep]) -> Option<Verdict> {
        let summary = match self.report.launches {
            Some(_) => "The device waits for the host, which does not launch its work fast enough.",
            None => "Time passes between the operators of the host: Python and the framework.",
        };
        let verdict = self.sized(Cause::HostOverhead, summary.to_owned(), steps)?;
        let mut evidence = Vec::new();
        let mut advice = vec![Advice::set(
            "compile the model, so that fewer and larger kernels are launched",
            "torch.compile(model)",
        )];
        if let Some(cost) = self.report.launches {
            self.launch_evidence(&cost, &mut evidence);
            advice.insert(
                0,
                Advice::set(
                    "launch a whole step at once as a CUDA graph",
                    "torch.compile(model, mode=\"reduce-overhead\")",
                ),
            );
            advice.push(Advice::set("update all parameters in one kernel", "torch.optim.AdamW(..., fused=True)"));
            if cost.synchronisations > 2 {
                advice
                    .push(Advice::new("avoid what waits for the device in a step: .item(), .cpu(), print of tensors"));
            }
        }
        advice.push(Advice::new("use a larger batch: the same launches then do more work"));
        Some(Verdict { evidence, advice, ..verdict })
    }

    fn launch_evidence(&self, cost: &LaunchCost, evidence: &mut Vec<Evidence>) {
        let steps = self.window.steps.len().max(1) as f64;
        let per_step = cost.count as f64 / steps;
        evidence.push(Evidence::new(format!("launches a {}", self.step_word()), per_step.round(), Unit::Count));
        evidence.push(Evidence::new("share of launches that the device waited for", cost.waited_for, Unit::Share));
        evidence.push(Evidence::new(
            "share of work that is shorter than its launch",
            cost.shorter_than_launch,
            Unit::Share,
        ));
        evidence.push(Evidence::new(
            "calls that wait for the device, a step",
            cost.synchronisations as f64,
            Unit::Count,
        ));
        let trace = self.window.trace;
        let late = self.window.ops.windows(2).filter_map(|pair| {
            let (before, span) = (trace.op_span(&pair[0]), trace.op_span(&pair[1]));
            let launch_ns = trace.launch_ns(&pair[1])?;
            (launch_ns > before.end_ns).then_some((span.start_ns - before.end_ns, span))
        });
        if let Some((gap_ns, span)) = late.max_by_key(|(gap_ns, _)| *gap_ns) {
            let what = "longest time that the device waited for a launch, of";
            evidence.push(Evidence::new(what, seconds(gap_ns), Unit::Seconds).at(self.place(span)));
        }
    }

    /// Communication that is exposed, but that the host is slower than: to know, not to change
    /// first.
    fn communication_behind_host(&self, steps: &[SavedStep]) -> Option<Verdict> {
        let summary = "Communication is exposed, but the host is slower still; it counts once the host is faster.";
        let verdict = self.communication(summary.to_owned(), steps)?;
        Some(Verdict { severity: Severity::Info, ..verdict })
    }

    fn communication(&self, summary: String, steps: &[SavedStep]) -> Option<Verdict> {
        let communication = self.report.communication.as_ref()?;
        let verdict = self.sized(Cause::CommunicationBound, summary, steps)?;
        let exposed = self.median_of(|step| step.exposed_communication_seconds);
        let mut evidence = vec![
            Evidence::new(
                "communication a step, median",
                self.median_of(|step| step.communication_seconds),
                Unit::Seconds,
            ),
            Evidence::new("of it while nothing was computed", exposed, Unit::Seconds),
            Evidence::new("share of communication under compute", communication.overlapped, Unit::Share),
        ];
        if let Some(longest) = self.longest(|span| span.kind == Kind::Communication) {
            let length = seconds(longest.duration_ns());
            evidence.push(Evidence::new("longest message", length, Unit::Seconds).at(self.place(longest)));
        }
        let kernels = || self.report.kernels.iter().filter(|kernel| kernel.kind == Kind::Communication);
        let count: usize = kernels().map(|kernel| kernel.count).sum();
        let per_step = count as f64 / self.window.steps.len().max(1) as f64;
        let mut advice = Vec::new();
        if count > 0 {
            let mean = kernels().map(|kernel| kernel.seconds).sum::<f64>() / count as f64;
            evidence.push(Evidence::new("messages a step", per_step.round(), Unit::Count));
            evidence.push(Evidence::new("their mean length", mean, Unit::Seconds));
            if per_step > 50.0 && mean < 500e-6 {
                advice
                    .push(Advice::set("send fewer and larger messages", "DistributedDataParallel(bucket_cap_mb=100)"));
            }
        }
        if communication.overlapped < 0.5 {
            advice.push(Advice::new("send gradients during the backward pass, as DistributedDataParallel does"));
        }
        advice.push(Advice::set(
            "send less often, or fewer bytes",
            "model.no_sync() for gradient accumulation; ddp_comm_hooks.default_hooks.bf16_compress_hook",
        ));
        Some(Verdict { evidence, advice, ..verdict })
    }

    fn compute(&self) -> Option<Verdict> {
        let b: Breakdown = self.report.breakdown?;
        let share = b.compute_seconds / b.total_seconds.max(f64::MIN_POSITIVE);
        if share < COMPUTE_SHARE_MIN {
            return None;
        }
        let top: Vec<&Kernel> =
            self.report.kernels.iter().filter(|kernel| kernel.kind == Kind::Compute).take(3).collect();
        let mut evidence = vec![Evidence::new("share of time in which something is computed", share, Unit::Share)];
        for kernel in top {
            let row = Evidence::new("share of all kernels' time", kernel.share, Unit::Share);
            evidence.push(row.at(Place { span: Some(kernel.short_name()), ..Place::default() }));
        }
        Some(Verdict {
            cause: Cause::ComputeBound,
            severity: Severity::Info,
            summary: "Computation fills the time; only faster kernels make it shorter.".to_owned(),
            evidence,
            saving: None,
            advice: vec![
                if self.report.idle.is_some() {
                    Advice::set(
                        "compute in bf16, or let f32 products use tensor cores",
                        "torch.autocast(\"cuda\", torch.bfloat16); torch.set_float32_matmul_precision(\"high\")",
                    )
                } else {
                    Advice::set("compute in bf16", "torch.autocast(\"cpu\", torch.bfloat16)")
                },
                Advice::set("fuse elementwise kernels", "torch.compile(model)"),
            ],
        })
    }

    fn no_host(&self) -> Verdict {
        Verdict {
            cause: Cause::IncompleteData,
            severity: Severity::Warning,
            summary: "No launch of the device's work was recorded, so nobody can say what it waited for.".to_owned(),
            evidence: vec![Evidence::new("pieces of device work", self.window.ops.len() as f64, Unit::Count)],
            saving: None,
            advice: vec![Advice::set(
                "record the host too",
                "profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])",
            )],
        }
    }

    /// Idle time that nothing explains; only where no other verdict is grave.
    fn unexplained(&self, verdicts: &[Verdict]) -> Option<Verdict> {
        let (idle, b) = (self.report.idle?, self.report.breakdown?);
        let share = idle.other_seconds / b.total_seconds.max(f64::MIN_POSITIVE);
        let told = verdicts.iter().any(|verdict| verdict.severity > Severity::Info);
        (share >= UNEXPLAINED_SHARE_MIN && !told).then(|| Verdict {
            cause: Cause::Unexplained,
            severity: Severity::Warning,
            summary: "The device is idle though its work was launched, and the trace does not say why.".to_owned(),
            evidence: vec![Evidence::new("share of time", share, Unit::Share)],
            saving: None,
            advice: vec![Advice::new("record all ranks, and pass all their files at once")],
        })
    }
}
