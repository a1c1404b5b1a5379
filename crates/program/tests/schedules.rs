//! Pipeline schedules: their tables, the programs that follow from them, and known formulas for
//! bubbles and memory.

mod common;

use trainyard_program::{
    Action, BackwardPart, Mesh, Phase, PipelineSchedule, Schedule, ScheduleTable, Strategy as How, Turn, TurnTimes,
    check_ranks, lower,
};

/// Every schedule with a number of micro-batches, for pipelines of 2 to 8 stages.
fn all() -> Vec<(PipelineSchedule, u32, u32)> {
    let mut all = Vec::new();
    for pp in 2..=8 {
        for micro_batches in [4, 7, 8, 14, 16, 21, 24, 30, 32] {
            let schedules = PipelineSchedule::ALL.into_iter().chain([PipelineSchedule::Interleaved { chunks: 3 }]);
            let fit = schedules.filter(|schedule| schedule.facts().micro_batches.accept(pp, micro_batches));
            all.extend(fit.map(|schedule| (schedule, pp, micro_batches)));
        }
    }
    all
}

#[test]
fn explore() {
    let mut changed = 0;
    let mut total = 0;
    for (schedule, pp, m) in all() {
        let table = schedule.table(pp, m);
        let again = ScheduleTable::new((0..pp).map(|s| table.turns(s).to_vec()).collect())
            .unwrap_or_else(|e| panic!("{schedule} {pp} {m}: {e}\n{table}"));
        assert_eq!(again, table);
        assert_eq!(ScheduleTable::parse(&table.to_string()).unwrap(), table);
        let units = pp as usize * schedule.facts().chunks as usize + 1;
        let strategy = How { accumulation_steps: m, pipeline: schedule.into(), ..How::new(units) };
        let mesh = Mesh { pp, ..Mesh::default() };
        let programs = lower(&common::model(units), &mesh, &strategy).unwrap();
        if let Err(e) = check_ranks(&programs) {
            panic!("{schedule} {pp} {m}: {e}");
        }
        for program in &programs {
            let mut uses = Vec::new();
            for i in &program.instructions {
                match i.action {
                    Action::Forward { unit, micro_batch, .. } if unit > 0 && !program.runs(unit - 1) => {
                        uses.push((unit - 1, micro_batch, Phase::Forward))
                    }
                    Action::Backward { unit, micro_batch, part, .. }
                        if part != BackwardPart::Weights && unit < program.loss_unit() && !program.runs(unit + 1) =>
                    {
                        uses.push((unit, micro_batch, Phase::Backward))
                    }
                    _ => {}
                }
            }
            let got: Vec<_> = program
                .instructions
                .iter()
                .filter_map(|i| match i.action {
                    Action::Recv { unit, micro_batch, phase, .. } => Some((unit, micro_batch, phase)),
                    _ => None,
                })
                .collect();
            total += 1;
            if got != uses {
                changed += 1;
                println!(
                    "{schedule} {pp} {m} rank {}: {}",
                    program.rank,
                    got.iter().zip(&uses).filter(|(a, b)| a != b).count()
                );
            }
        }
        let spans = table.play(TurnTimes::EQUAL);
        let end = spans.iter().flatten().map(|s| s.end).max().unwrap();
        let chunks = u64::from(schedule.facts().chunks);
        let busy = 3 * chunks * u64::from(m);
        let flight: Vec<i64> = (0..pp)
            .map(|s| {
                let mut live = 0i64;
                let mut most = 0;
                for t in table.turns(s) {
                    match (t.phase, t.part) {
                        (Phase::Forward, _) => live += 1,
                        (_, BackwardPart::Input) => {}
                        _ => live -= 1,
                    }
                    most = most.max(live);
                }
                most
            })
            .collect();
        println!(
            "{schedule:?} pp {pp} m {m}: bubble {} of {busy}; flight {flight:?} fused {}",
            end - busy,
            programs.iter().any(|p| p.fused_loss)
        );
    }
    println!("{changed} of {total}");
}
