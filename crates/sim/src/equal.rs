//! Simulates programs with given durations of passes. Equal durations show the order of
//! instructions when no speeds are known. Other durations are for a step whose passes sleep for a
//! given time (`trainyard bench bubbles`). No hardware is modelled.

use crate::simulate::{SimulateError, Span};
use std::collections::HashMap;
use trainyard_program::{Action, BackwardPart, Keep, Lane, Phase, Program, TurnTimes};

/// The durations of a program's instructions.
#[derive(Clone, Copy)]
enum Durations<'a> {
    /// A forward and each half of a backward take 1; a backward that repeats its forward takes 1
    /// more. Instructions that move bytes in parallel with passes take 1/2. Messages between
    /// stages, and all others, take no time.
    Equal,
    /// Those of passes, by unit. Everything else takes no time.
    OfPasses(&'a [TurnTimes]),
}

impl Durations<'_> {
    fn of(self, program: &Program, number: usize, keep: &[Keep]) -> f64 {
        let instruction = &program.instructions[number];
        let times = |unit: u32| match self {
            Durations::Equal => TurnTimes::EQUAL,
            Durations::OfPasses(times) => times.get(unit as usize).copied().unwrap_or_default(),
        };
        let beside = if matches!(self, Durations::Equal) { 0.5 } else { 0.0 };
        let units = match instruction.action {
            Action::Forward { unit, .. } => times(unit).of(Phase::Forward, BackwardPart::Whole),
            Action::Backward { unit, part, .. } => {
                let again = part != BackwardPart::Weights && keep[unit as usize] == Keep::InputOnly;
                times(unit).of(Phase::Backward, part) + if again { times(unit).forward } else { 0 }
            }
            Action::Update { .. } => return beside,
            Action::Send { .. } | Action::Recv { .. } | Action::Count { .. } | Action::Clip { .. } => 0,
            _ if instruction.bytes > 0 => return beside,
            _ => 0,
        };
        units as f64
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
    play(programs, Durations::Equal)
}

/// As [`equal_times`], where the passes of unit `u` take `times[u]`, and nothing else takes any
/// time. The unit of time is that of `times`.
///
/// # Errors
///
/// As [`equal_times`].
pub fn paced_times(programs: &[Program], times: &[TurnTimes]) -> Result<Vec<Vec<Span>>, SimulateError> {
    play(programs, Durations::OfPasses(times))
}

fn play(programs: &[Program], durations: Durations<'_>) -> Result<Vec<Vec<Span>>, SimulateError> {
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
                    let end = start + durations.of(program, number, &keeps[stage]);
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

    /// The end of the passes on stages of one unit each, in equal times and in those of `times`.
    fn passes_end(schedule: PipelineSchedule, pp: u32, micro_batches: u32, times: TurnTimes) -> [f64; 2] {
        let units = (pp * schedule.facts().chunks) as usize;
        let unit = UnitShape { flat_elements: 10, output_bytes: 4, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit; units], batch_bytes: 4 };
        let strategy =
            Strategy { accumulation_steps: micro_batches, pipeline: schedule.into(), ..Strategy::new(units) };
        let mesh = Mesh { pp, ..Mesh::default() };
        let programs = lower_stages(&model, &mesh, &strategy).unwrap();
        let is_pass = |action| matches!(action, Action::Forward { .. } | Action::Backward { .. });
        [equal_times(&programs), paced_times(&programs, &vec![times; units])].map(|spans| {
            let spans = spans.unwrap();
            let ends = programs.iter().zip(&spans).flat_map(|(program, spans)| {
                program.instructions.iter().zip(spans).filter(|(i, _)| is_pass(i.action)).map(|(_, span)| span.end_s)
            });
            ends.fold(0.0, f64::max)
        })
    }

    /// Programs take the time that the tables of their schedules say.
    #[test]
    fn programs_take_the_time_of_their_turns() {
        for schedule in PipelineSchedule::ALL {
            let uneven = TurnTimes { forward: 2, input: 5, weights: 3 };
            let ends = [TurnTimes::EQUAL, uneven].map(|times| {
                let turns = schedule.table(4, 8).play(times);
                turns.iter().flatten().map(|span| span.end).max().unwrap() as f64
            });
            assert_eq!(passes_end(schedule, 4, 8, uneven), ends, "{schedule}");
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
