//! The known pipeline schedules: facts about each, and the turns of its stages.
//!
//! A schedule is a variant of [`PipelineSchedule`], a row in [`PipelineSchedule::facts`] and an
//! order of turns in `stage_turns`. Everything else works on the [`ScheduleTable`] that follows.

use crate::{BackwardPart, Phase, ScheduleTable};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;

/// A known order of forwards and backwards in a pipeline.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PipelineSchedule {
    /// All forwards, then all backwards (Huang et al. 2019).
    GPipe,
    /// One forward, one backward (Narayanan et al. 2019, "PipeDream-Flush").
    #[default]
    OneForwardOneBackward,
    /// One forward, one backward over `chunks` stretches of units per rank (Narayanan et al. 2021).
    Interleaved {
        /// Number of stretches of units per rank.
        chunks: u32,
    },
    /// Backward in two halves. The half for weights runs when the stage would be idle (Qi et al.
    /// 2023, ZB-H1).
    ZeroBubble,
    /// Backward in two halves over two stretches per rank, the second on the way back, so that
    /// embedding and loss are on stage 0 (Qi et al. 2023, ZB-V).
    ZeroBubbleV,
    /// Pairs of a forward and a backward over the same two stretches (DeepSeek-AI 2024, DualPipe
    /// cut in half).
    DualPipeV,
}

/// The assignment of the model's stretches to pipeline stages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StretchMap {
    /// Stage s holds stretches s, s + pp, s + 2 pp, ...
    Loop,
    /// Stage s holds stretches s and 2 pp - 1 - s.
    V,
}

/// The numbers of micro-batches that a schedule accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MicroBatches {
    /// Any number.
    Any,
    /// A multiple of the number of stages.
    MultipleOfStages,
    /// At least so many per stage.
    PerStage(u32),
}

/// The facts about a schedule that hold for any number of stages and micro-batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScheduleFacts {
    /// The usual name.
    pub name: &'static str,
    /// Author, year and name in the source.
    pub source: &'static str,
    /// Number of stretches of units per stage.
    pub chunks: u32,
    /// The assignment of stretches to stages.
    pub map: StretchMap,
    /// The numbers of micro-batches that it accepts.
    pub micro_batches: MicroBatches,
    /// True if some backwards run in two halves.
    pub halves: bool,
}

/// A forward or backward of a whole stretch of units on a micro-batch. A pipeline schedule is an
/// order of turns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Turn {
    /// Forward or backward.
    pub phase: Phase,
    /// The gradients that a backward computes.
    pub part: BackwardPart,
    /// Index of the stretch among the model's.
    pub stretch: u32,
    /// Index of the micro-batch.
    pub micro_batch: u32,
}

impl PipelineSchedule {
    /// One of each kind.
    pub const ALL: [PipelineSchedule; 6] = [
        PipelineSchedule::GPipe,
        PipelineSchedule::OneForwardOneBackward,
        PipelineSchedule::Interleaved { chunks: 2 },
        PipelineSchedule::ZeroBubble,
        PipelineSchedule::ZeroBubbleV,
        PipelineSchedule::DualPipeV,
    ];

    /// The facts about the schedule.
    pub const fn facts(self) -> ScheduleFacts {
        use MicroBatches::{Any, MultipleOfStages, PerStage};
        use StretchMap::{Loop, V};
        let (name, source, chunks, map, micro_batches, halves) = match self {
            PipelineSchedule::GPipe => ("GPipe", "Huang et al. 2019", 1, Loop, Any, false),
            PipelineSchedule::OneForwardOneBackward => ("1F1B", "Narayanan et al. 2019", 1, Loop, Any, false),
            PipelineSchedule::Interleaved { chunks } => {
                ("interleaved", "Narayanan et al. 2021", chunks, Loop, MultipleOfStages, false)
            }
            PipelineSchedule::ZeroBubble => ("ZB-H1", "Qi et al. 2023", 1, Loop, Any, true),
            PipelineSchedule::ZeroBubbleV => ("ZB-V", "Qi et al. 2023", 2, V, Any, true),
            PipelineSchedule::DualPipeV => ("DualPipeV", "DeepSeek-AI 2024", 2, V, PerStage(2), true),
        };
        ScheduleFacts { name, source, chunks, map, micro_batches, halves }
    }

    /// Per stretch of the model, the stage that holds it in a pipeline of `pp` stages. One stage
    /// holds a single stretch.
    pub fn stage_of(self, pp: u32) -> Vec<u32> {
        let ScheduleFacts { chunks, map, .. } = self.facts();
        if pp == 1 {
            return vec![0];
        }
        let mut stages = vec![0; (pp * chunks) as usize];
        for stage in 0..pp {
            (0..chunks).for_each(|chunk| stages[map.stretch(stage, chunk, pp) as usize] = stage);
        }
        stages
    }

    /// The turns of all stages of a pipeline of `pp` stages.
    pub fn table(self, pp: u32, micro_batches: u32) -> ScheduleTable {
        let map = self.facts().map;
        let of_stage = |stage: u32| {
            let mut turns = self.stage_turns(stage, pp, micro_batches);
            turns.iter_mut().for_each(|turn| turn.stretch = map.stretch(stage, turn.stretch, pp));
            turns
        };
        ScheduleTable::of_known((0..pp).map(of_stage).collect(), self.stage_of(pp), micro_batches)
    }

    /// The turns of a stage, in order. Stretches are numbered as those of the stage.
    fn stage_turns(self, stage: u32, pp: u32, micro_batches: u32) -> Vec<Turn> {
        match self {
            _ if pp == 1 => one_after_the_other(micro_batches),
            PipelineSchedule::GPipe => warmed_up(micro_batches, micro_batches, plain),
            PipelineSchedule::OneForwardOneBackward => warmed_up(micro_batches, pp - stage - 1, plain),
            PipelineSchedule::Interleaved { chunks } => {
                let (total, warm_up) = (micro_batches * chunks, 2 * (pp - stage - 1) + (chunks - 1) * pp);
                warmed_up(total, warm_up, |phase, turn| interleaved(phase, turn, pp, chunks))
            }
            PipelineSchedule::ZeroBubble => weights_later(&warmed_up(micro_batches, pp - stage - 1, plain), stage),
            PipelineSchedule::ZeroBubbleV => zero_bubble_v(stage, pp, micro_batches),
            PipelineSchedule::DualPipeV => dual_pipe_v(stage, pp, micro_batches),
        }
    }
}

impl StretchMap {
    /// The number in the model of stretch `chunk` of stage `stage`.
    const fn stretch(self, stage: u32, chunk: u32, pp: u32) -> u32 {
        match self {
            StretchMap::V if chunk == 1 => 2 * pp - 1 - stage,
            _ => chunk * pp + stage,
        }
    }
}

impl MicroBatches {
    /// True if a pipeline of `pp` stages can run `micro_batches`.
    pub const fn accept(self, pp: u32, micro_batches: u32) -> bool {
        match self {
            MicroBatches::Any => true,
            MicroBatches::MultipleOfStages => micro_batches.is_multiple_of(pp),
            MicroBatches::PerStage(each) => micro_batches >= each * pp,
        }
    }

    /// The accepted numbers for `pp` stages, in words.
    pub fn words(self, pp: u32) -> String {
        match self {
            MicroBatches::Any => "any number of micro-batches".to_owned(),
            MicroBatches::MultipleOfStages => format!("a multiple of {pp} micro-batches"),
            MicroBatches::PerStage(each) => format!("at least {} micro-batches", each * pp),
        }
    }
}

impl fmt::Display for PipelineSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.facts().name)?;
        match self {
            PipelineSchedule::Interleaved { chunks } => write!(f, " {chunks}"),
            _ => Ok(()),
        }
    }
}

fn plain(phase: Phase, micro_batch: u32) -> Turn {
    Turn { phase, part: BackwardPart::Whole, stretch: 0, micro_batch }
}

/// Each micro-batch forward and then backward: the order of a rank that holds all units.
fn one_after_the_other(micro_batches: u32) -> Vec<Turn> {
    (0..micro_batches)
        .flat_map(|micro_batch| [Phase::Forward, Phase::Backward].map(|phase| plain(phase, micro_batch)))
        .collect()
}

/// `warm_up` forwards, then alternating forwards and backwards, then the remaining backwards.
fn warmed_up(total: u32, warm_up: u32, turn: impl Fn(Phase, u32) -> Turn) -> Vec<Turn> {
    let warm_up = warm_up.min(total);
    let forwards = 0..warm_up;
    let pairs = (warm_up..total).flat_map(|forward| [(Phase::Forward, forward), (Phase::Backward, forward - warm_up)]);
    let backwards = total - warm_up..total;
    let order = forwards.map(|forward| (Phase::Forward, forward)).chain(pairs);
    order
        .chain(backwards.map(|backward| (Phase::Backward, backward)))
        .map(|(phase, number)| turn(phase, number))
        .collect()
}

/// The `number`-th forward or backward of an interleaved schedule: `stages` micro-batches on one
/// stretch, then the same ones on the next (Narayanan et al. 2021, section 2.2).
fn interleaved(phase: Phase, number: u32, stages: u32, chunks: u32) -> Turn {
    let (round, place) = (number / (stages * chunks), number % (stages * chunks));
    let stretch = match phase {
        Phase::Forward => place / stages,
        Phase::Backward => chunks - 1 - place / stages,
    };
    Turn { phase, part: BackwardPart::Whole, stretch, micro_batch: round * stages + place % stages }
}

/// ZB-H1: gradients of weights come `late` backwards after those of inputs, which fills the stage's
/// bubble (Qi et al. 2023, section 2.1).
fn weights_later(turns: &[Turn], late: u32) -> Vec<Turn> {
    let mut all = Vec::new();
    let mut waiting = VecDeque::new();
    for turn in turns {
        match turn.phase {
            Phase::Forward => all.push(*turn),
            Phase::Backward => {
                all.push(Turn { part: BackwardPart::Input, ..*turn });
                waiting.push_back(Turn { part: BackwardPart::Weights, ..*turn });
                if waiting.len() > late as usize {
                    all.extend(waiting.pop_front());
                }
            }
        }
    }
    all.extend(waiting);
    all
}

/// The turns of a stage that holds the two stretches of a V, under construction. Every stretch
/// takes the micro-batches in order.
#[derive(Default)]
struct TwoStretches {
    turns: Vec<Turn>,
    /// Per phase and stretch, the number of micro-batches so far.
    passed: [[u32; 2]; 2],
    /// Backwards whose half for weights has not run yet, in order.
    waiting: VecDeque<Turn>,
}

impl TwoStretches {
    fn push(&mut self, phase: Phase, part: BackwardPart, stretch: u32) {
        let passed = &mut self.passed[phase as usize][stretch as usize];
        self.turns.push(Turn { phase, part, stretch, micro_batch: *passed });
        *passed += 1;
    }

    fn forward(&mut self, stretch: u32) {
        self.push(Phase::Forward, BackwardPart::Whole, stretch);
    }

    /// A backward, whole, or its half for the input with the other half to come.
    fn backward(&mut self, stretch: u32, part: BackwardPart) {
        self.push(Phase::Backward, part, stretch);
        if part == BackwardPart::Input {
            let turn = self.turns[self.turns.len() - 1];
            self.waiting.push_back(Turn { part: BackwardPart::Weights, ..turn });
        }
    }

    /// The oldest half for weights that waits, of one stretch or of either.
    fn weights(&mut self, stretch: Option<u32>) {
        let of = |turn: &Turn| stretch.is_none_or(|stretch| turn.stretch == stretch);
        let oldest = self.waiting.iter().position(of);
        self.turns.extend(oldest.and_then(|place| self.waiting.remove(place)));
    }
}

/// ZB-V (Qi et al. 2023, section 6). The order is that of enough micro-batches to fill the
/// pipeline; turns on others than the first `micro_batches` are left out.
fn zero_bubble_v(stage: u32, pp: u32, micro_batches: u32) -> Vec<Turn> {
    use BackwardPart::Input;
    let filling = micro_batches.max(2 * pp - 1);
    let mut order = TwoStretches::default();
    // Warm-up: the first micro-batches go down the V and come up again.
    (0..2 * (pp - stage) - 1).for_each(|_| order.forward(0));
    for _ in 0..stage {
        order.forward(1);
        order.forward(0);
    }
    for _ in stage..pp {
        order.forward(1);
        order.backward(1, Input);
        order.weights(Some(1));
    }
    // Steady state: a forward and both halves of a backward on either stretch in turn.
    while order.passed[0][1] < filling {
        if order.passed[0][0] < filling {
            order.forward(0);
        }
        order.backward(0, Input);
        order.weights(Some(0));
        order.forward(1);
        order.backward(1, Input);
        order.weights(Some(1));
    }
    // Cool-down: other stages wait for gradients of inputs; those of weights fill the end.
    for _ in 0..stage {
        order.backward(0, Input);
        order.backward(1, Input);
    }
    for _ in stage..pp {
        order.backward(0, Input);
        order.weights(Some(0));
    }
    (0..filling).for_each(|_| order.weights(Some(1)));
    (0..filling).for_each(|_| order.weights(Some(0)));
    order.turns.retain(|turn| turn.micro_batch < micro_batches);
    order.turns
}

/// DualPipeV (DeepSeek-AI 2024, section 3.2.1; the V cuts DualPipe in half): forwards of one
/// stretch are paired with backwards of the other. `micro_batches` is at least 2 `pp`.
fn dual_pipe_v(stage: u32, pp: u32, micro_batches: u32) -> Vec<Turn> {
    use BackwardPart::{Input, Whole};
    let later = pp - stage - 1;
    let mut order = TwoStretches::default();
    (0..2 * later).for_each(|_| order.forward(0));
    for _ in 0..=stage {
        order.forward(0);
        order.forward(1);
    }
    for _ in 0..later {
        order.backward(1, Input);
        order.weights(None);
        order.forward(1);
    }
    // The pairs.
    for _ in 0..micro_batches + stage + 1 - 2 * pp {
        order.forward(0);
        order.backward(1, Whole);
        order.forward(1);
        order.backward(0, Whole);
    }
    for _ in 0..later {
        order.backward(1, Whole);
        order.forward(1);
        order.backward(0, Whole);
    }
    // From the middle of the last backwards on, their halves for weights wait for the end.
    for number in 0..2 * (stage + 1) {
        order.backward(1 - number % 2, if number > stage { Input } else { Whole });
    }
    for _ in 0..later {
        order.weights(None);
        order.backward(0, Input);
    }
    (0..=stage).for_each(|_| order.weights(None));
    order.turns
}
