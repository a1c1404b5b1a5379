//! The breakdown of a step's time: the work of the compute lane, and the cause of each of its
//! pauses.
//!
//! The pauses of the compute lane are the exposed part of everything else. A pause before an
//! instruction counts for the lane of the dependency that ended last. The time after the compute
//! lane's last instruction counts for the instruction that ended the step.

use serde::Serialize;
use trainyard_program::{Action, Axis, Lane, Program, Streams};
use trainyard_sim::{RankTime, Span};

/// A category of a step's time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeCategory {
    /// Forwards.
    Forward,
    /// Backwards, including recomputation.
    Backward,
    /// Norms, updates, folds.
    Update,
    /// Time by which collectives slowed down the compute beside them.
    Slowed,
    /// Waiting for gathered parameters.
    Gather,
    /// Waiting for gradients to be summed.
    Reduce,
    /// Waiting for collectives of tensor parallelism.
    Tensor,
    /// Waiting for keys and values of context parallelism.
    Context,
    /// Waiting for tokens on the way to experts and back.
    Expert,
    /// Waiting for other pipeline stages: the bubble, and messages.
    Pipeline,
    /// Waiting for batches.
    Data,
    /// Waiting for state on its way to or from lower tiers.
    Host,
    /// Costs of a step outside its instructions.
    Beside,
}

impl TimeCategory {
    /// Every category, in display order.
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

    /// The category in words.
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
            TimeCategory::Beside => "fixed costs of a step, and its slowest node",
        }
    }

    /// True if the device computes during this time.
    pub const fn is_work(self) -> bool {
        matches!(self, TimeCategory::Forward | TimeCategory::Backward | TimeCategory::Update)
    }

    /// The category that `action` belongs to.
    pub(crate) fn of(action: &Action) -> TimeCategory {
        match action {
            Action::Forward { .. } => TimeCategory::Forward,
            Action::Backward { .. } => TimeCategory::Backward,
            // The servers' work for a step follows its commits.
            Action::Fold { .. }
            | Action::Clip { .. }
            | Action::Commit
            | Action::Update { .. }
            | Action::Merge { .. } => TimeCategory::Update,
            Action::Gather { .. } | Action::Release { .. } | Action::Pull { .. } => TimeCategory::Gather,
            Action::Reduce { .. }
            | Action::Tie { .. }
            | Action::Count { .. }
            | Action::Push { .. }
            | Action::Outer { .. } => TimeCategory::Reduce,
            Action::Exchange { axis: Axis::Context, .. } => TimeCategory::Context,
            Action::Exchange { axis: Axis::Expert, .. } => TimeCategory::Expert,
            Action::Exchange { .. } => TimeCategory::Tensor,
            Action::Send { .. } | Action::Recv { .. } => TimeCategory::Pipeline,
            Action::Load { .. } => TimeCategory::Data,
            Action::Fetch { .. } | Action::Evict { .. } | Action::Snapshot => TimeCategory::Host,
        }
    }
}

/// Seconds by category. Together they are the step.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Breakdown(pub Vec<(TimeCategory, f64)>);

impl Breakdown {
    /// The breakdown of one rank, from the times at which the instructions of its program ran, in a
    /// step of `step_s` seconds.
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

    /// Seconds of one category.
    pub fn seconds(&self, part: TimeCategory) -> f64 {
        self.0.iter().find(|(p, _)| *p == part).map_or(0.0, |(_, seconds)| *seconds)
    }

    /// Seconds during which the device computes.
    pub fn work(&self) -> f64 {
        self.0.iter().filter(|(part, _)| part.is_work()).map(|(_, seconds)| seconds).sum()
    }

    /// Seconds of the whole step.
    pub fn total(&self) -> f64 {
        self.0.iter().map(|(_, seconds)| seconds).sum()
    }
}

/// The dependency of an instruction that ended last.
fn last_before(streams: &Streams<'_>, spans: &[Span], number: usize) -> Option<usize> {
    let waits = streams.waits(number).map(|before| before as usize);
    waits.max_by(|a, b| spans[*a].end_s.total_cmp(&spans[*b].end_s))
}

/// The category that an instruction waited for. A collective that began late because of another
/// lane is not the cause itself: a gather that waited for a fetch waited for the host, and a count
/// that waited for a load waited for data.
fn waited_for(program: &Program, streams: &Streams<'_>, spans: &[Span], number: usize) -> TimeCategory {
    let instruction = &program.instructions[number];
    let Span { start_s: start, end_s: end } = spans[number];
    let seconds = |number: usize| spans[number].end_s - spans[number].start_s;
    match last_before(streams, spans, number) {
        // In a measured step the lane is woken in between.
        Some(before)
            if matches!(program.instructions[before].action.lane(), Lane::HostIo | Lane::Input)
                && spans[before].end_s >= start - 0.1 * seconds(before) - 1e-12
                && seconds(before) > end - start =>
        {
            TimeCategory::of(&program.instructions[before].action)
        }
        _ => TimeCategory::of(&instruction.action),
    }
}
