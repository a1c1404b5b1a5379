//! Plays programs in equal units of time, to show their order where no speeds are known. This is no
//! prediction: nothing has a price.

use crate::simulate::{SimulateError, Span};
use std::collections::HashMap;
use trainyard_program::{Action, BackwardPart, Keep, Lane, Phase, Program};

/// The units of time of an instruction: 1 for a forward and for each half of a backward, 1 more for
/// a backward that repeats its forward, 1/2 for what moves bytes beside them, and nothing for
/// messages between stages and for the rest.
fn units(program: &Program, number: usize, keep: &[Keep]) -> f64 {
    let instruction = &program.instructions[number];
    match instruction.action {
        Action::Forward { .. } => 1.0,
        Action::Backward { unit, part, .. } => {
            let again = part != BackwardPart::Weights && keep[unit as usize] == Keep::InputOnly;
            let halves = if part == BackwardPart::Whole { 2.0 } else { 1.0 };
            halves + if again { 1.0 } else { 0.0 }
        }
        Action::Update { .. } => 0.5,
        Action::Send { .. } | Action::Recv { .. } | Action::Count { .. } | Action::Clip { .. } => 0.0,
        _ if instruction.bytes > 0 => 0.5,
        _ => 0.0,
    }
}

/// The intervals of the instructions of `programs`, one program per pipeline stage, in equal units:
/// a forward of a unit takes 1, and so does each half of its backward. A receive ends with its
/// send, and all stages find the norm together.
///
/// # Errors
///
/// A receive whose send is in none of the programs.
pub fn equal_times(programs: &[Program]) -> Result<Vec<Vec<Span>>, SimulateError> {
    let mut spans: Vec<Vec<Option<Span>>> = programs.iter().map(|p| vec![None; p.instructions.len()]).collect();
    let mut next = vec![[0; Lane::ALL.len()]; programs.len()];
    let lanes: Vec<Vec<Vec<usize>>> =
        programs.iter().map(|program| Lane::ALL.map(|lane| program.on_lane(lane).collect()).to_vec()).collect();
    let keeps: Vec<Vec<Keep>> = programs.iter().map(keep_of_units).collect();
    let mut sent: HashMap<(u32, u32, u32, Phase), f64> = HashMap::new();
    loop {
        let mut moved = false;
        let mut at_clip: Vec<(usize, usize, f64)> = Vec::new();
        for (stage, program) in programs.iter().enumerate() {
            for (lane, numbers) in lanes[stage].iter().enumerate() {
                while let Some(&number) = numbers.get(next[stage][lane]) {
                    let before = next[stage][lane].checked_sub(1).map(|before| numbers[before] as u32);
                    let waits = program.instructions[number].after.iter().copied().chain(before);
                    let ends: Option<Vec<f64>> = waits.map(|on| Some(spans[stage][on as usize]?.end_s)).collect();
                    let Some(start) = ends.map(|ends| ends.into_iter().fold(0.0, f64::max)) else { break };
                    let end = start + units(program, number, &keeps[stage]);
                    let end = match program.instructions[number].action {
                        Action::Recv { unit, micro_batch, phase, .. } => {
                            match sent.get(&(program.stage(), unit, micro_batch, phase)) {
                                Some(sent) => end.max(*sent),
                                None => break,
                            }
                        }
                        Action::Send { to, unit, micro_batch, phase } => {
                            sent.insert((to / program.mesh.stage_ranks(), unit, micro_batch, phase), end);
                            end
                        }
                        Action::Clip { .. } => {
                            at_clip.push((stage, number, start));
                            break;
                        }
                        _ => end,
                    };
                    spans[stage][number] = Some(Span { start_s: start, end_s: end });
                    next[stage][lane] += 1;
                    moved = true;
                }
            }
        }
        if at_clip.len() == programs.len() {
            let start = at_clip.iter().map(|(_, _, start)| *start).fold(0.0, f64::max);
            for (stage, number, _) in at_clip {
                spans[stage][number] = Some(Span { start_s: start, end_s: start });
                next[stage][Lane::Compute as usize] += 1;
            }
        } else if !moved {
            break;
        }
    }
    for (program, spans) in programs.iter().zip(&spans) {
        if let Some(instruction) = spans.iter().position(Option::is_none) {
            let action = program.instructions[instruction].action.name();
            return Err(SimulateError::Stuck { rank: program.rank, instruction, action });
        }
    }
    Ok(spans.into_iter().map(|spans| spans.into_iter().flatten().collect()).collect())
}

/// Per unit, the activations that its forwards keep.
fn keep_of_units(program: &Program) -> Vec<Keep> {
    let mut keeps = vec![Keep::Everything; program.units.len()];
    for instruction in &program.instructions {
        if let Action::Forward { unit, keep, .. } = instruction.action {
            keeps[unit as usize] = keep;
        }
    }
    keeps
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_program::{Mesh, ModelShape, PipelineSchedule, Strategy, UnitShape, lower_stages};

    /// The end of the passes on stages of one unit each.
    fn passes_end(schedule: PipelineSchedule, pp: u32, micro_batches: u32) -> f64 {
        let units = (pp * schedule.facts().chunks) as usize;
        let unit = UnitShape { flat_elements: 10, output_bytes: 4, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit; units], batch_bytes: 4 };
        let strategy =
            Strategy { accumulation_steps: micro_batches, pipeline: schedule.into(), ..Strategy::new(units) };
        let mesh = Mesh { pp, ..Mesh::default() };
        let programs = lower_stages(&model, &mesh, &strategy).unwrap();
        let spans = equal_times(&programs).unwrap();
        let is_pass = |action| matches!(action, Action::Forward { .. } | Action::Backward { .. });
        let ends = programs.iter().zip(&spans).flat_map(|(program, spans)| {
            program.instructions.iter().zip(spans).filter(|(i, _)| is_pass(i.action)).map(|(_, span)| span.end_s)
        });
        ends.fold(0.0, f64::max)
    }

    /// Programs take the time that the tables of their schedules say.
    #[test]
    fn programs_take_the_time_of_their_turns() {
        for schedule in PipelineSchedule::ALL {
            let turns = schedule.table(4, 8).play(trainyard_program::TurnTimes::EQUAL);
            let end = turns.iter().flatten().map(|span| span.end).max().unwrap();
            assert_eq!(passes_end(schedule, 4, 8), end as f64, "{schedule}");
        }
    }

    #[test]
    fn a_message_that_never_comes_is_an_error() {
        let unit = UnitShape { flat_elements: 10, output_bytes: 4, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit; 2], batch_bytes: 4 };
        let mesh = Mesh { pp: 2, ..Mesh::default() };
        let programs = lower_stages(&model, &mesh, &Strategy::new(2)).unwrap();
        assert!(matches!(equal_times(&programs[1..]), Err(SimulateError::Stuck { rank: 1, .. })));
    }
}
