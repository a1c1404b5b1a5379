//! The programs shown in the documentation are those that the lowering makes.

use trainyard_program::{PipelineSchedule, ScheduleTable};

#[allow(dead_code)]
#[path = "../examples/strategies.rs"]
mod strategies;

/// The table that the documentation shows is that of 1F1B, with idle cells.
#[test]
fn the_table_in_the_documentation_is_1f1b() {
    let page = include_str!("../../../docs/parallelism.md");
    let (_, text) = page.split_once("file=own.csv\n0F0,").expect("a table");
    let (text, _) = text.split_once("```").expect("its end");
    let table = ScheduleTable::parse(&format!("0F0,{text}")).expect("a schedule");
    assert_eq!(table, PipelineSchedule::OneForwardOneBackward.table(2, 3));
}

#[test]
fn the_programs_in_the_documentation_are_real() {
    let page = include_str!("../../../docs/programs.md");
    let sections = strategies::sections();
    assert!(page.contains(sections.trim_end()), "print them anew: cargo run -p trainyard-program --example strategies");
}
