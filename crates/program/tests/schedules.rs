//! Pipeline schedules: their tables, the programs that follow from them, and the known formulas for
//! bubbles and memory.

mod common;

use common::Dice;
use trainyard_program::{
    Action, BackwardPart, CellFault, CheckError, Lane, Mesh, ModelShape, Phase, PipelineSchedule, Program,
    ReduceSchedule, Schedule, ScheduleTable, Strategy as How, StrategyError, StretchMap, TableError, Turn, TurnTimes,
    check, check_ranks, lower,
};

/// Every schedule on 2 to 8 stages and 4 to 32 micro-batches, where they go together.
fn all() -> impl Iterator<Item = (PipelineSchedule, u32, u32)> {
    let schedules = PipelineSchedule::ALL.into_iter().chain([PipelineSchedule::Interleaved { chunks: 3 }]);
    let with_stages = schedules.flat_map(|schedule| (2..=8).map(move |pp| (schedule, pp)));
    with_stages.flat_map(|(schedule, pp)| {
        let fits = move |micro_batches: &u32| schedule.facts().micro_batches.accept(pp, *micro_batches);
        (4..=32).filter(fits).map(move |micro_batches| (schedule, pp, micro_batches))
    })
}

/// A model with one unit per stretch and one more, and the programs of a pipeline over it.
fn programs(schedule: impl Into<Schedule>, pp: u32, micro_batches: u32) -> Vec<Program> {
    let pipeline = schedule.into();
    let model = common::model(pipeline.stretches(pp) as usize + 1);
    let strategy = How { accumulation_steps: micro_batches, pipeline, ..How::new(model.units.len()) };
    lower(&model, &Mesh { pp, ..Mesh::default() }, &strategy).unwrap()
}

fn is_pass(action: &Action) -> bool {
    matches!(action, Action::Forward { .. } | Action::Backward { .. })
}

/// All programs end though a send waits until it is received, and the messages from one rank to
/// another are sent and received in one order. The tables obey the rules for a user's own.
#[test]
fn every_schedule_comes_to_an_end() {
    let mut count = 0;
    for (schedule, pp, micro_batches) in all() {
        let table = schedule.table(pp, micro_batches);
        let turns = (0..pp).map(|stage| table.turns(stage).to_vec()).collect();
        assert_eq!(ScheduleTable::new(turns).as_ref(), Ok(&table), "{schedule} {pp} {micro_batches}\n{table}");
        assert_eq!(ScheduleTable::parse(&table.to_string()).as_ref(), Ok(&table));
        assert_eq!(check_ranks(&programs(schedule, pp, micro_batches)), Ok(()), "{schedule} {pp} {micro_batches}");
        count += 1;
    }
    assert!(count > 1000, "{count}");
}

/// Any table whose turns can run has programs that come to an end, in whatever order it takes what
/// stages send.
#[test]
fn every_table_that_can_run_comes_to_an_end() {
    let mut dice = Dice(5);
    for _ in 0..trainyard_testing::cases("tables", 600, 6_000) {
        let pp = 2 + dice.below(5) as u32;
        let stretches = pp + dice.below(pp as usize + 1) as u32;
        let micro_batches = 1 + dice.below(6) as u32;
        let table = common::random_table(pp, stretches, micro_batches, |limit| dice.below(limit));
        let text = table.to_string();
        assert_eq!(check_ranks(&programs(table, pp, micro_batches)), Ok(()), "\n{text}");
    }
}

/// Messages have no names, so receives in another order than the sends are noticed.
#[test]
fn receives_keep_the_order_of_sends() {
    let mut swapped = 0;
    for schedule in PipelineSchedule::ALL {
        let programs = programs(schedule, 3, 6);
        for rank in 0..programs.len() {
            let receives: Vec<usize> = programs[rank].on_lane(Lane::Receive).collect();
            let from = |number: usize| match programs[rank].instructions[number].action {
                Action::Recv { from, .. } => from,
                other => panic!("{other:?} on the receive lane"),
            };
            for pair in receives.windows(2).filter(|pair| from(pair[0]) == from(pair[1])) {
                let mut mutated = programs.clone();
                mutated[rank].instructions[pair[0]..=pair[1]].rotate_left(1);
                for on in mutated[rank].instructions.iter_mut().flat_map(|instruction| &mut instruction.after) {
                    match *on as usize {
                        on_first if on_first == pair[0] => *on = pair[1] as u32,
                        on_later if on_later > pair[0] && on_later <= pair[1] => *on -= 1,
                        _ => {}
                    }
                }
                if check(&mutated[rank]) == Ok(()) {
                    let error = check_ranks(&mutated).unwrap_err();
                    assert!(matches!(error, CheckError::Disagree { .. }), "{schedule}: {error}");
                    swapped += 1;
                }
            }
        }
    }
    assert!(swapped > 2, "{swapped} programs are right by themselves");
}

/// Idle time of a stage on turns of equal length, against the papers: p - 1 whole micro-batches of
/// GPipe and 1F1B (Narayanan et al. 2021, section 2.2), of interleaved schedules as many stretches;
/// a third of that in ZB-H1 (Qi et al. 2023, section 2.3: forward + input half - weight half); and
/// in ZB-V and DualPipeV only the forwards until the last stage begins.
#[test]
fn bubbles_are_those_of_the_papers() {
    let mut count = 0;
    let times = [TurnTimes::EQUAL, TurnTimes { forward: 2, input: 3, weights: 2 }];
    for (schedule, pp, micro_batches) in all().filter(|(_, pp, m)| *m >= 2 * pp) {
        for (times, equal) in times.into_iter().zip([true, false]) {
            let TurnTimes { forward, input, weights } = times;
            let chunks = u64::from(schedule.facts().chunks);
            let work = u64::from(micro_batches) * chunks * (forward + input + weights);
            let spans = schedule.table(pp, micro_batches).play(times);
            let end = spans.iter().flatten().map(|span| span.end).max().unwrap();
            let busy = |spans: &Vec<std::ops::Range<u64>>| spans.iter().map(|span| span.end - span.start).sum::<u64>();
            assert!(spans.iter().all(|stage| busy(stage) == work));
            let per_stage = match schedule {
                PipelineSchedule::ZeroBubble => forward + input - weights,
                PipelineSchedule::ZeroBubbleV | PipelineSchedule::DualPipeV if equal => forward,
                PipelineSchedule::ZeroBubbleV | PipelineSchedule::DualPipeV => continue,
                _ => forward + input + weights,
            };
            assert_eq!(end - work, u64::from(pp - 1) * per_stage, "{schedule} {pp} {micro_batches} {times:?}");
            count += 1;
        }
    }
    assert!(count > 1000, "{count}");
}

/// Maximum number of stretches whose activations a stage keeps, from forward to the end of
/// backward. ZB-V keeps no more than the first stage of 1F1B (2 p stretches are p whole stages);
/// DualPipeV one stretch more (DeepSeek-AI 2024, table 2).
#[test]
fn memory_in_flight_is_that_of_the_papers() {
    for (schedule, pp, micro_batches) in all() {
        let table = schedule.table(pp, micro_batches);
        for stage in 0..pp {
            let (mut live, mut most) = (0u32, 0);
            for turn in table.turns(stage) {
                match (turn.phase, turn.part) {
                    (Phase::Forward, _) => live += 1,
                    (_, BackwardPart::Input) => {}
                    (_, BackwardPart::Whole | BackwardPart::Weights) => live -= 1,
                }
                most = most.max(live);
            }
            let wanted = match schedule {
                PipelineSchedule::GPipe => micro_batches,
                PipelineSchedule::OneForwardOneBackward => (pp - stage).min(micro_batches),
                PipelineSchedule::Interleaved { chunks } => {
                    (2 * (pp - stage - 1) + (chunks - 1) * pp + 1).min(micro_batches * chunks)
                }
                PipelineSchedule::ZeroBubble => pp.min(micro_batches),
                PipelineSchedule::ZeroBubbleV if micro_batches < 2 * pp => most.min(2 * pp),
                PipelineSchedule::ZeroBubbleV => 2 * pp,
                PipelineSchedule::DualPipeV => 2 * pp + 1,
            };
            assert_eq!(most, wanted, "{schedule} {pp} {micro_batches}, stage {stage}");
        }
    }
}

/// The loss's forward computes gradients exactly where its backward comes next: not in GPipe, and
/// not in DualPipeV, whose pairs part them.
#[test]
fn the_loss_is_fused_where_its_backward_follows() {
    for (schedule, pp, micro_batches) in all().filter(|(_, _, m)| m % 4 == 0) {
        let parts = matches!(schedule, PipelineSchedule::GPipe | PipelineSchedule::DualPipeV);
        for program in programs(schedule, pp, micro_batches) {
            let fused = program.runs(program.loss_unit()) && !parts;
            assert_eq!(program.fused_loss, fused, "{schedule} {pp} {micro_batches}, rank {}", program.rank);
        }
        let holds_loss = programs(schedule, pp, micro_batches)[0].stage_of(0) == 0;
        assert!(holds_loss, "the embedding is on the first stage");
    }
    let one = |micro_batches| programs(PipelineSchedule::GPipe, 2, micro_batches)[1].fused_loss;
    assert_eq!([one(1), one(2)], [true, false], "on one micro-batch GPipe's backward follows");
    // Sums of single micro-batches cannot begin with a forward if weights come later.
    let strategy = How {
        accumulation_steps: 4,
        pipeline: PipelineSchedule::ZeroBubble.into(),
        reduce_schedule: ReduceSchedule::PerMicroBatch,
        ..How::new(5)
    };
    let programs = lower(&common::model(5), &Mesh { pp: 2, dp_shard: 2, ..Mesh::default() }, &strategy).unwrap();
    assert!(programs.iter().all(|program| !program.fused_loss));
    let mut wrong = programs.clone();
    wrong[0].fused_loss = true;
    assert!(check_ranks(&wrong).is_ok(), "rank 0 has no loss");
    let mut gpipe = self::programs(PipelineSchedule::GPipe, 2, 4);
    gpipe[1].fused_loss = true;
    assert!(check_ranks(&gpipe).unwrap_err().to_string().contains("does not follow"));
}

/// Ranks that disagree on the pipeline are refused, and so are pipelines without a unit or a stage.
#[test]
fn programs_of_one_step_have_one_pipeline() {
    let programs = programs(PipelineSchedule::OneForwardOneBackward, 2, 4);
    let refused = |change: &dyn Fn(&mut Program)| {
        let mut mutated = programs.clone();
        change(&mut mutated[1]);
        check_ranks(&mutated).unwrap_err().to_string()
    };
    assert!(refused(&|program| program.pipeline[1].units.end += 1).contains("does not fit 3 units"));
    assert!(refused(&|program| program.pipeline[1].stage = 0).contains("does not fit 3 units"));
    assert!(refused(&|program| program.pipeline[0].units.end = 0).contains("does not fit 3 units"));
    let mut other = self::programs(PipelineSchedule::OneForwardOneBackward, 2, 4);
    let swapped = How { accumulation_steps: 4, cuts: vec![2], ..How::new(3) };
    other[1] = lower(&common::model(3), &Mesh { pp: 2, ..Mesh::default() }, &swapped).unwrap().remove(1);
    let first = other[0].pipeline[0].units.end;
    assert_eq!(first, 1, "another cut than 2");
    assert_eq!(check_ranks(&other).unwrap_err().to_string(), "rank 1 has another pipeline than rank 0");
}

/// Every batch is given back by the last pass of the rank that reads it.
#[test]
fn batches_are_given_back_at_their_last_use() {
    for (schedule, pp, micro_batches) in all().filter(|(_, _, m)| m % 8 == 0) {
        for program in programs(schedule, pp, micro_batches) {
            let passes = || (0..).zip(&program.instructions).filter(|(_, i)| is_pass(&i.action));
            let mut last = vec![0; micro_batches as usize];
            passes().for_each(|(number, i)| last[i.action.micro_batch().unwrap() as usize] = number);
            for (number, instruction) in passes() {
                let is_last = last[instruction.action.micro_batch().unwrap() as usize] == number;
                assert_eq!(program.frees_batch(number), is_last, "{schedule}, {number}:\n{program}");
            }
        }
    }
}

/// In a V, neighbouring stretches are on one stage at the turn and nothing is sent there; embedding
/// and head are on stage 0, so a tied weight is summed on one rank.
#[test]
fn a_v_turns_on_the_last_stage_and_ends_on_the_first() {
    for schedule in PipelineSchedule::ALL.into_iter().filter(|schedule| schedule.facts().map == StretchMap::V) {
        let programs = programs(schedule, 4, 8);
        let stages: Vec<u32> = programs[0].pipeline.iter().map(|stretch| stretch.stage).collect();
        assert_eq!(stages, [0, 1, 2, 3, 3, 2, 1, 0]);
        let count = |rank: usize, lane| programs[rank].on_lane(lane).count();
        assert_eq!([0, 1, 2, 3].map(|rank| count(rank, Lane::Send)), [16, 32, 32, 16]);
        assert_eq!([0, 1, 2, 3].map(|rank| count(rank, Lane::Receive)), [16, 32, 32, 16]);
        let ties = |program: &Program| program.instructions.iter().any(|i| matches!(i.action, Action::Tie { .. }));
        assert!(!programs.iter().any(ties));
        assert_eq!((programs[2].peer(0), programs[2].peer(8), programs[2].holders(0)), (0, 0, vec![0]));
        let elastic = How { accumulation_steps: 8, pipeline: schedule.into(), elastic: true, ..How::new(9) };
        let refused = lower(&common::model(9), &Mesh { pp: 4, ..Mesh::default() }, &elastic).unwrap_err();
        assert_eq!(refused, StrategyError::MixedGradients { unit: 0 });
        let mut untied: ModelShape = common::model(9);
        untied.units[8].borrows.clear();
        assert_eq!(check_ranks(&lower(&untied, &Mesh { pp: 4, ..Mesh::default() }, &elastic).unwrap()), Ok(()));
    }
}

/// A table from a file gives the programs of the schedule that it was printed from, and may be
/// anything that comes to an end: stretches on any stage, cells that are idle, pairs.
#[test]
fn a_table_of_ones_own_is_a_schedule() {
    for schedule in PipelineSchedule::ALL {
        let own = ScheduleTable::parse(&schedule.table(3, 6).to_string()).unwrap();
        assert_eq!(programs(own, 3, 6), programs(schedule, 3, 6));
    }
    let text = " 0F0,0F1,,2F0, (2F1;2B0)OVERLAP_F_B,\t0I0,2B1,0I1,0W0,0W1\r\n,1F0,1F1,,,1B0,1B1,,\r\n\n";
    let table = ScheduleTable::parse(text).unwrap();
    assert_eq!(table.to_string(), "0F0,0F1,2F0,2F1,2B0,0I0,2B1,0I1,0W0,0W1\n1F0,1F1,1B0,1B1\n");
    assert_eq!((table.stages(), table.micro_batches(), table.stage_of()), (2, 2, &[0, 1, 0][..]));
    assert_eq!(check_ranks(&programs(table.clone(), 2, 2)), Ok(()));
    let strategy = How { accumulation_steps: 2, pipeline: table.into(), ..How::new(4) };
    let again: How = serde_json::from_str(&serde_json::to_string(&strategy).unwrap()).unwrap();
    assert_eq!(again, strategy);
    let known = How { pipeline: PipelineSchedule::Interleaved { chunks: 4 }.into(), ..strategy.clone() };
    assert_eq!(serde_json::from_str::<How>(&serde_json::to_string(&known).unwrap()).unwrap(), known);
    let refused = |pp, strategy: &How| {
        lower(&common::model(4), &Mesh { pp, ..Mesh::default() }, strategy).unwrap_err().to_string()
    };
    let words = "the pipeline's table is for 2 stages and 2 micro-batches, the step has ";
    assert_eq!(refused(3, &strategy), format!("{words}3 and 2"));
    assert_eq!(refused(2, &How { accumulation_steps: 4, ..strategy }), format!("{words}2 and 4"));
}

/// Errors say where a table is wrong, and how.
#[test]
fn tables_that_are_no_schedules_say_where() {
    let says = |text: &str, expected: &str| assert_eq!(ScheduleTable::parse(text).unwrap_err().to_string(), expected);
    says("", "there are no turns: a table has one line per stage, with cells such as 0F0");
    let idle = "line 2 has no turns: every line is a stage, and every stage runs a stretch of units";
    says("0F0,0B0\n\n1F0,1B0", idle);
    let turn = "a turn is a stretch, one of F, B, I and W, and a micro-batch, as in 0F0";
    for cell in ["F0", "0F", "0X0", "0f0", "0F0F", "0", "0F99999999999", "-1F0", "(0F0OVERLAP_F_B"] {
        says(&format!("0F0,,{cell}"), &format!("line 1, cell 3 ({cell}): {turn}"));
    }
    says(
        "0F0,0B0\n1RECV_F0,1F0",
        "line 2, cell 1 (1RECV_F0): RECV_F is no computation: write the table without communication, which follows \
         from it",
    );
    says("0F0,0B0,7F0", "line 1, cell 3 (7F0): the table has 3 turns, too few for this number");
    says("0F0,0B0,0F0", "line 1, cell 3 (0F0): runs again what line 1, cell 1 runs");
    says("0F0,0B0,0W0", "line 1, cell 3 (0W0): runs again what line 1, cell 2 runs");
    says(
        "0F0,0B0\n1F0,,0W0",
        "line 2, cell 3 (0W0): stretch 0 is that of line 1: one stage runs all turns of a stretch",
    );
    says("0I0,0F0,0W0", "line 1, cell 1 (0I0): comes before 0F0 on its line");
    says("0F0,0W0,0I0", "line 1, cell 2 (0W0): comes before 0I0 on its line");
    says("0F0,0I0", "0W0 is missing");
    says("0F0,0B0,0F1,1F0,1B0,1F1,1B1,2F0,2B0,2F1", "0B1 is missing");
    says("0F0,0B0\n2F0,2B0", "1F0 is missing");
    says(
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0",
        "line 1, cell 2 (0B0): waits for 1B0, which waits for a later turn of this line",
    );
    let same = Turn { phase: Phase::Forward, part: BackwardPart::Whole, stretch: 0, micro_batch: 0 };
    let again = CellFault::Again { line: 1, cell: 1 };
    let refused = TableError::Cell { line: 1, cell: 2, text: "0F0".to_owned(), fault: again };
    assert_eq!(ScheduleTable::new(vec![vec![same, same]]), Err(refused));
}

/// Known schedules say which numbers of micro-batches they take.
#[test]
fn schedules_that_do_not_fit_say_what_would() {
    let refused = |pp, accumulation_steps, schedule: PipelineSchedule| {
        let strategy = How { accumulation_steps, pipeline: schedule.into(), ..How::new(9) };
        lower(&common::model(9), &Mesh { pp, ..Mesh::default() }, &strategy).unwrap_err().to_string()
    };
    let words = "DualPipeV on 4 stages needs at least 8 micro-batches, not 7";
    assert_eq!(refused(4, 7, PipelineSchedule::DualPipeV), words);
    let words = "interleaved 2 on 4 stages needs a multiple of 4 micro-batches, not 6";
    assert_eq!(refused(4, 6, PipelineSchedule::Interleaved { chunks: 2 }), words);
    assert!(refused(1, 4, PipelineSchedule::ZeroBubbleV).contains("one stage has no more"));
    assert!(refused(5, 4, PipelineSchedule::ZeroBubbleV).contains("a pipeline of 10 stretches"));
}
