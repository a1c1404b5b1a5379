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
pub enum Part {
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

impl Part {
    /// Every part, in the order of displays.
    pub const ALL: [Part; 13] = [
        Part::Forward,
        Part::Backward,
        Part::Update,
        Part::Slowed,
        Part::Gather,
        Part::Reduce,
        Part::Tensor,
        Part::Context,
        Part::Expert,
        Part::Pipeline,
        Part::Data,
        Part::Host,
        Part::Beside,
    ];

    /// In words.
    pub const fn words(self) -> &'static str {
        match self {
            Part::Forward => "forward",
            Part::Backward => "backward",
            Part::Update => "update",
            Part::Slowed => "compute slowed by communication beside it",
            Part::Gather => "waiting for parameters to be gathered",
            Part::Reduce => "waiting for gradients to be summed",
            Part::Tensor => "tensor-parallel exchanges",
            Part::Context => "context-parallel exchanges",
            Part::Expert => "expert-parallel exchanges",
            Part::Pipeline => "waiting for other pipeline stages",
            Part::Data => "waiting for data",
            Part::Host => "waiting for host memory",
            Part::Beside => "starting and ending the step",
        }
    }

    /// Whether the device computes meanwhile.
    pub const fn is_work(self) -> bool {
        matches!(self, Part::Forward | Part::Backward | Part::Update)
    }

    /// What `action` is spent on.
    pub(crate) fn of(action: &Action) -> Part {
        match action {
            Action::Forward { .. } => Part::Forward,
            Action::Backward { .. } => Part::Backward,
            Action::Fold { .. } | Action::Clip | Action::Update { .. } => Part::Update,
            Action::Gather { .. } | Action::Release { .. } => Part::Gather,
            Action::Reduce { .. } | Action::Tie { .. } | Action::Count => Part::Reduce,
            Action::Exchange { axis: Axis::Context, .. } => Part::Context,
            Action::Exchange { axis: Axis::Expert, .. } => Part::Expert,
            Action::Exchange { .. } => Part::Tensor,
            Action::Send { .. } | Action::Recv { .. } => Part::Pipeline,
            Action::Load { .. } => Part::Data,
            Action::Fetch { .. } | Action::Evict { .. } | Action::Snapshot => Part::Host,
        }
    }
}

/// Seconds by part; together they are the step.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Breakdown(pub Vec<(Part, f64)>);

impl Breakdown {
    /// Of one rank, from when each instruction of its program ran, in a step of `step_s`.
    pub fn of(program: &Program, time: &RankTime, step_s: f64) -> Breakdown {
        let (spans, streams) = (&time.spans, Streams::new(program));
        let mut seconds = [0.0; Part::ALL.len()];
        let mut now = 0.0;
        for (number, instruction) in program.instructions.iter().enumerate() {
            if instruction.action.lane() != Lane::Compute {
                continue;
            }
            let Span { start_s: start, end_s: end } = spans[number];
            if start > now {
                let part = last_before(&streams, spans, number)
                    .map_or(Part::Beside, |last| waited_for(program, &streams, spans, last));
                seconds[part as usize] += start - now;
            }
            seconds[Part::of(&instruction.action) as usize] += end - start.max(now);
            now = end.max(now);
        }
        let ended = (0..spans.len()).max_by(|a, b| spans[*a].end_s.total_cmp(&spans[*b].end_s));
        if let Some(ended) = ended.filter(|ended| spans[*ended].end_s > now) {
            seconds[Part::of(&program.instructions[ended].action) as usize] += spans[ended].end_s - now;
            now = spans[ended].end_s;
        }
        seconds[Part::Beside as usize] += (step_s - now).max(0.0);
        let passes = seconds[Part::Forward as usize] + seconds[Part::Backward as usize];
        let slowed = time.interference_s.min(passes);
        if slowed > 0.0 {
            seconds[Part::Forward as usize] *= 1.0 - slowed / passes;
            seconds[Part::Backward as usize] *= 1.0 - slowed / passes;
            seconds[Part::Slowed as usize] = slowed;
        }
        Breakdown(Part::ALL.into_iter().zip(seconds).filter(|(_, seconds)| *seconds > 0.0).collect())
    }

    /// Seconds of one part.
    pub fn seconds(&self, part: Part) -> f64 {
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
fn waited_for(program: &Program, streams: &Streams<'_>, spans: &[Span], number: usize) -> Part {
    let instruction = &program.instructions[number];
    let Span { start_s: start, end_s: end } = spans[number];
    match last_before(streams, spans, number) {
        Some(before)
            if program.instructions[before].action.lane() == Lane::HostIo
                && spans[before].end_s >= start - 1e-12
                && spans[before].end_s - spans[before].start_s > end - start =>
        {
            Part::Host
        }
        _ => Part::of(&instruction.action),
    }
}
