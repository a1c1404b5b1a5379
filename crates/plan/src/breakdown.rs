//! Where a step's time goes: the compute lane's work, and what each of its pauses waited for.
//!
//! The pauses of the compute lane are the exposed part of everything else. A pause before an
//! instruction is put down to the lane whose instruction it waited for and that ended last; what
//! follows the lane's last instruction, to what ended the step.

use serde::Serialize;
use trainyard_program::{Action, Axis, Lane, Program, Streams};
use trainyard_sim::{RankTime, Span};

/// What time is spent on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeCategory {
    /// Forwards.
    Forward,
    /// Backwards, with what they repeat.
    Backward,
    /// Norms, updates, folds.
    Update,
    /// Compute that collectives beside it slowed down.
    Slowed,
    /// Parameters under way.
    Gather,
    /// Gradients being summed.
    Reduce,
    /// Collectives of tensor parallelism.
    Tensor,
    /// Keys and values of context parallelism.
    Context,
    /// Tokens on the way to experts and back.
    Expert,
    /// Other pipeline stages: the bubble, and messages.
    Pipeline,
    /// Batches.
    Data,
    /// State on its way from and to lower tiers.
    Host,
    /// What a step costs beside its instructions.
    Beside,
}

impl TimeCategory {
    /// Every part, in the order of displays.
    pub const ALL: [TimeCategory; 13] = [
        TimeCategory::Forward,
        TimeCategory::Backward,
        TimeCategory::Update,
        TimeCategory::Slowed,
        TimeCategory::Gather,
        TimeCategory::Reduce,
        TimeCategory::Tensor,
        TimeCategory::Context,
        TimeCategory::Expert,
        TimeCategory::Pipeline,
        TimeCategory::Data,
        TimeCategory::Host,
        TimeCategory::Beside,
    ];

    /// In words.
    pub const fn words(self) -> &'static str {
        match self {
            TimeCategory::Forward => "forward",
            TimeCategory::Backward => "backward",
            TimeCategory::Update => "update",
            TimeCategory::Slowed => "compute slowed by communication beside it",
            TimeCategory::Gather => "waiting for parameters to be gathered",
            TimeCategory::Reduce => "waiting for gradients to be summed",
            TimeCategory::Tensor => "tensor-parallel exchanges",
            TimeCategory::Context => "context-parallel exchanges",
            TimeCategory::Expert => "expert-parallel exchanges",
            TimeCategory::Pipeline => "waiting for other pipeline stages",
            TimeCategory::Data => "waiting for data",
            TimeCategory::Host => "waiting for host memory",
            TimeCategory::Beside => "starting and ending the step",
        }
    }

    /// Whether the device computes meanwhile.
    pub const fn is_work(self) -> bool {
        matches!(self, TimeCategory::Forward | TimeCategory::Backward | TimeCategory::Update)
    }

    /// What `action` is spent on.
    pub(crate) fn of(action: &Action) -> TimeCategory {
        match action {
            Action::Forward { .. } => TimeCategory::Forward,
            Action::Backward { .. } => TimeCategory::Backward,
            Action::Fold { .. } | Action::Clip | Action::Update { .. } => TimeCategory::Update,
            Action::Gather { .. } | Action::Release { .. } => TimeCategory::Gather,
            Action::Reduce { .. } | Action::Tie { .. } | Action::Count => TimeCategory::Reduce,
            Action::Exchange { axis: Axis::Context, .. } => TimeCategory::Context,
            Action::Exchange { axis: Axis::Expert, .. } => TimeCategory::Expert,
            Action::Exchange { .. } => TimeCategory::Tensor,
            Action::Send { .. } | Action::Recv { .. } => TimeCategory::Pipeline,
            Action::Load { .. } => TimeCategory::Data,
            Action::Fetch { .. } | Action::Evict { .. } | Action::Snapshot => TimeCategory::Host,
        }
    }
}

/// Seconds by part; together they are the step.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Breakdown(pub Vec<(TimeCategory, f64)>);

impl Breakdown {
    /// Of one rank, from when each instruction of its program ran, in a step of `step_s`.
    pub fn of(program: &Program, time: &RankTime, step_s: f64) -> Breakdown {
        let (spans, streams) = (&time.spans, Streams::new(program));
        let mut seconds = [0.0; TimeCategory::ALL.len()];
        let mut now = 0.0;
        for (number, instruction) in program.instructions.iter().enumerate() {
            if instruction.action.lane() != Lane::Compute {
                continue;
            }
            let Span { start_s: start, end_s: end } = spans[number];
            if start > now {
                let part = last_before(&streams, spans, number)
                    .map_or(TimeCategory::Beside, |last| waited_for(program, &streams, spans, last));
                seconds[part as usize] += start - now;
            }
            seconds[TimeCategory::of(&instruction.action) as usize] += end - start.max(now);
            now = end.max(now);
        }
        let ended = (0..spans.len()).max_by(|a, b| spans[*a].end_s.total_cmp(&spans[*b].end_s));
        if let Some(ended) = ended.filter(|ended| spans[*ended].end_s > now) {
            seconds[TimeCategory::of(&program.instructions[ended].action) as usize] += spans[ended].end_s - now;
            now = spans[ended].end_s;
        }
        seconds[TimeCategory::Beside as usize] += (step_s - now).max(0.0);
        let passes = seconds[TimeCategory::Forward as usize] + seconds[TimeCategory::Backward as usize];
        let slowed = time.interference_s.min(passes);
        if slowed > 0.0 {
            seconds[TimeCategory::Forward as usize] *= 1.0 - slowed / passes;
            seconds[TimeCategory::Backward as usize] *= 1.0 - slowed / passes;
            seconds[TimeCategory::Slowed as usize] = slowed;
        }
        Breakdown(TimeCategory::ALL.into_iter().zip(seconds).filter(|(_, seconds)| *seconds > 0.0).collect())
    }

    /// Seconds of one part.
    pub fn seconds(&self, part: TimeCategory) -> f64 {
        self.0.iter().find(|(p, _)| *p == part).map_or(0.0, |(_, seconds)| *seconds)
    }

    /// Seconds in which the device computes.
    pub fn work(&self) -> f64 {
        self.0.iter().filter(|(part, _)| part.is_work()).map(|(_, seconds)| seconds).sum()
    }

    /// All seconds.
    pub fn total(&self) -> f64 {
        self.0.iter().map(|(_, seconds)| seconds).sum()
    }
}

/// Of what an instruction waits for, what ended last.
fn last_before(streams: &Streams<'_>, spans: &[Span], number: usize) -> Option<usize> {
    let waits = streams.waits(number).map(|before| before as usize);
    waits.max_by(|a, b| spans[*a].end_s.total_cmp(&spans[*b].end_s))
}

/// A collective that began late because of another lane is not to blame itself: a gather that
/// waited for a fetch waited for the host.
fn waited_for(program: &Program, streams: &Streams<'_>, spans: &[Span], number: usize) -> TimeCategory {
    let instruction = &program.instructions[number];
    let Span { start_s: start, end_s: end } = spans[number];
    match last_before(streams, spans, number) {
        Some(before)
            if program.instructions[before].action.lane() == Lane::HostIo
                && spans[before].end_s >= start - 1e-12
                && spans[before].end_s - spans[before].start_s > end - start =>
        {
            TimeCategory::Host
        }
        _ => TimeCategory::of(&instruction.action),
    }
}
