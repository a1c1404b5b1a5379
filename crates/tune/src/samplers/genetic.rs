//! A genetic algorithm without generations: each new trial has two parents among the best so far.
//!
//! Parents are the winners of tournaments of three among the best sixteen trials. A number of the
//! child lies on or somewhat beyond the line between its parents' (blend crossover with alpha =
//! 0.3; Eshelman & Schaffer 1993); another value is one parent's. Then each setting is mutated with
//! probability `1 / keys`, and if none was, one of them.

use super::{Observation, Standing, ranked};
use crate::random::Stream;
use crate::{Dimension, Point, Space};

const PURPOSE: u32 = 0x6765_6e65;
/// Trials that can be parents.
const PARENTS: usize = 16;
/// Trials of a tournament.
const TOURNAMENT: usize = 3;
/// Share by which a child may lie beyond its parents.
const BEYOND: f64 = 0.3;
/// Deviation of a mutation, in a unit interval.
const MUTATION: f64 = 0.1;

pub fn propose(space: &Space, seed: u64, trials: &[Observation<'_>]) -> Point {
    let mut parents = ranked(trials);
    parents.retain(|trial| trial.standing != Standing::Failed);
    parents.truncate(PARENTS);
    let mut stream = Stream::new(seed, PURPOSE, trials.len() as u32);
    if parents.is_empty() {
        return space.point(&super::random(space, &mut stream));
    }
    // Parents are ranked, so the least number wins.
    let win = |stream: &mut Stream| (0..TOURNAMENT).map(|_| stream.below(parents.len())).min().unwrap_or(0);
    let (a, b) = (parents[win(&mut stream)].point, parents[win(&mut stream)].point);
    let forced = stream.below(space.len());
    let mut is_mutated = false;
    let mut child: Vec<f64> = Vec::new();
    for (index, dimension) in space.dimensions.iter().enumerate() {
        let (a, b) = (a.0[index], b.0[index]);
        let blended = match dimension.domain.is_ordered() {
            true => a + (b - a) * (stream.uniform() * (1.0 + 2.0 * BEYOND) - BEYOND),
            false => [a, b][stream.below(2)],
        };
        let mutates = stream.uniform() * (space.len() as f64) < 1.0;
        is_mutated |= mutates;
        child.push(if mutates { mutated(dimension, blended, &mut stream) } else { blended });
    }
    if !is_mutated {
        child[forced] = mutated(&space.dimensions[forced], child[forced], &mut stream);
    }
    space.point(&child)
}

fn mutated(dimension: &Dimension, place: f64, stream: &mut Stream) -> f64 {
    match dimension.domain.is_ordered() {
        true => stream.truncated_normal(place.clamp(0.0, 1.0), MUTATION, 0.0, 1.0),
        false => stream.uniform(),
    }
}
