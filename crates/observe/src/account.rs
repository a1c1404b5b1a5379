//! The account of a measured step: every second of it by name.
//!
//! The compute lane's instructions and its waits are broken down as a prediction's are
//! ([`trainyard_plan::Breakdown`]), so that the two can stand side by side. Around them a measured
//! step has time of the engine: between instructions, and between steps.

use crate::measured::Measured;
use crate::run::Run;
use serde::Serialize;
use trainyard_plan::{Breakdown, TimeCategory};
use trainyard_program::{Lane, Program};
use trainyard_sim::{RankTime, Span};

/// The seconds of a step of one rank.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Account {
    /// Seconds of the step.
    pub step_s: f64,
    /// Instructions of the compute lane, and its waits by what it waited for.
    pub breakdown: Breakdown,
    /// Seconds in which the ranks agreed on the step.
    pub agree_s: f64,
    /// Seconds between steps that are not agreement: recording, showing, evaluating.
    pub between_s: f64,
    /// Seconds that the engine took between two instructions of the compute lane. The breakdown
    /// counts them with the instruction before.
    pub engine_s: f64,
    /// Seconds that have no name.
    pub unexplained_s: f64,
}

impl Account {
    /// The account of a step of the rank at this place among those recorded.
    pub fn of(measured: &Measured<'_>, rank: usize) -> Account {
        let program = measured.replay.programs()[rank];
        let spans = &measured.spans[rank];
        // The part of a gap in which the lane did not wait for another lane is the engine's.
        let (mut engine_s, mut last_end) = (0.0, 0.0f64);
        for number in program.on_lane(Lane::Compute) {
            let span = spans[number];
            let gap = (span.start_s - last_end).max(0.0);
            engine_s += (gap - measured.waited_s[rank][number]).max(0.0);
            last_end = last_end.max(span.end_s);
        }
        let breakdown = break_down(program, spans.clone(), measured.seconds - measured.before_s);
        let unexplained_s = breakdown.seconds(TimeCategory::Beside);
        Account {
            step_s: measured.seconds,
            breakdown,
            agree_s: measured.agreed_s,
            between_s: measured.before_s - measured.agreed_s,
            engine_s,
            unexplained_s,
        }
    }

    /// The share of the step that instructions and named waits explain.
    pub fn explained(&self) -> f64 {
        1.0 - self.unexplained_s / self.step_s.max(1e-12)
    }

    /// Names and seconds of all parts, in a fixed order. Together they are the step.
    pub fn parts(&self) -> Vec<(&'static str, f64)> {
        let mut parts: Vec<(&'static str, f64)> = self
            .breakdown
            .0
            .iter()
            .filter(|(part, _)| *part != TimeCategory::Beside)
            .map(|(part, seconds)| (part.words(), *seconds))
            .collect();
        parts.push(("ranks agreeing on the next step", self.agree_s));
        parts.push(("recording and showing the step before", self.between_s));
        parts.push(("unexplained", self.unexplained_s));
        parts.retain(|(_, seconds)| *seconds > 0.0);
        parts
    }
}

/// The breakdown of a step of `seconds` in which the instructions of `program` took `spans`.
fn break_down(program: &Program, spans: Vec<Span>, seconds: f64) -> Breakdown {
    let time = RankTime {
        rank: program.rank,
        spans,
        busy_s: [0.0; Lane::ALL.len()],
        waited_s: [0.0; Lane::ALL.len()],
        host_s: 0.0,
        interference_s: 0.0,
    };
    Breakdown::of(program, &time, seconds)
}

/// The breakdown of rank 0's predicted step; None without a prediction.
pub fn predicted(run: &Run) -> Option<Breakdown> {
    let predicted = run.predicted.as_ref()?;
    let program = run.ranks.first()?.programs.priced();
    let spans = predicted.stages.get(program.stage() as usize)?;
    if spans.len() != program.instructions.len() {
        return None;
    }
    let spans = spans.iter().map(|[start_s, end_s]| Span { start_s: *start_s, end_s: *end_s }).collect();
    Some(break_down(program, spans, predicted.step_s))
}

/// The accounts of rank 0, step by step.
pub fn accounts(steps: &[Measured<'_>]) -> Vec<Account> {
    steps.iter().map(|step| Account::of(step, 0)).collect()
}

/// The mean account of several steps of one rank; None without steps.
pub fn mean(accounts: &[Account]) -> Option<Account> {
    let count = accounts.len() as f64;
    let of = |value: fn(&Account) -> f64| accounts.iter().map(value).sum::<f64>() / count;
    let part = |part: TimeCategory| {
        let seconds = accounts.iter().map(|account| account.breakdown.seconds(part)).sum::<f64>() / count;
        (seconds > 0.0).then_some((part, seconds))
    };
    (!accounts.is_empty()).then(|| Account {
        step_s: of(|account| account.step_s),
        breakdown: Breakdown(TimeCategory::ALL.into_iter().filter_map(part).collect()),
        agree_s: of(|account| account.agree_s),
        between_s: of(|account| account.between_s),
        engine_s: of(|account| account.engine_s),
        unexplained_s: of(|account| account.unexplained_s),
    })
}
