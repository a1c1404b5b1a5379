//! Population-based training (Jaderberg et al. 2017), in step: all members reach an interval's end
//! before any goes on.
//!
//! At the end of an interval the worst quarter is replaced by copies of the best quarter
//! (truncation selection, section 4.1.1). A copy starts from its parent's state with changed
//! settings. Each is redrawn with probability 1/4. Otherwise one on a logarithmic range is
//! multiplied by 0.8 or 1.25, and another one is moved by a tenth of its range.

use crate::random::Stream;
use crate::samplers;
use crate::study::{End, Event, Next, Study, Trial};
use crate::{Domain, Point};

/// Marks the streams of random numbers of this file.
const PURPOSE: u32 = 0x706f_7075;
/// Probability with which a setting is drawn anew.
const REDRAWN: f64 = 0.25;
/// Factors of a change (Jaderberg et al., section 4.1.1).
const FACTORS: [f64; 2] = [0.8, 1.25];

/// The next action.
pub fn next(study: &Study) -> Next {
    let trials = study.trials();
    let members = study.settings.trials;
    if trials.len() < members {
        let place = samplers::spread(&study.space, study.settings.seed, trials.len());
        return Next::Train(study.begin(study.space.point(&place), None, 0));
    }
    for rung in 0..study.top() {
        if trials.iter().any(|trial| trial.training_to == Some(rung)) {
            return Next::Wait;
        }
        match select(study, rung) {
            Some(next) => return next,
            None if trials.iter().all(|trial| trial.loss_at(rung).is_none()) => break,
            None => {}
        }
    }
    if study.running().next().is_some() { Next::Wait } else { Next::Over }
}

/// The next action between `rung`, which all members have reached, and the next one.
fn select(study: &Study, rung: usize) -> Option<Next> {
    let trials = study.trials();
    let loss = |trial: &Trial| trial.loss_at(rung).unwrap_or(f64::INFINITY);
    let mut ranked: Vec<&Trial> = trials.iter().filter(|trial| trial.loss_at(rung).is_some()).collect();
    ranked.sort_by(|a, b| loss(a).total_cmp(&loss(b)));
    if ranked.is_empty() {
        return None;
    }
    let quarter = (ranked.len() / 4).max(1);
    let worst = if ranked.len() > 1 { quarter } else { 0 };
    // Members that failed on their way are replaced as well.
    let replaced = worst + study.settings.trials.saturating_sub(ranked.len());
    let (kept, out) = ranked.split_at(ranked.len() - worst);
    if let Some(trial) = out.iter().find(|trial| trial.end.is_none()) {
        return Some(Next::Note(Event::Ended { trial: trial.number, end: End::Replaced, seconds: 0.0 }));
    }
    // Copies begin before their parents go on and replace their checkpoints.
    let copies = trials.iter().filter(|trial| trial.parent.is_some_and(|(_, at)| at == rung)).count();
    if copies < replaced {
        let mut stream = Stream::new(study.settings.seed, PURPOSE, trials.len() as u32);
        let parent = kept[stream.below(quarter.min(kept.len()))];
        let point = changed(study, &parent.point, &mut stream);
        return Some(Next::Train(study.begin(point, Some((parent.number, rung)), rung + 1)));
    }
    let is_paused =
        |trial: &Trial| trial.losses.len() == rung + 1 && trial.training_to.is_none() && trial.end.is_none();
    let paused = kept.iter().find(|trial| is_paused(trial));
    paused.map(|trial| Next::Train(Event::GoOn { trial: trial.number, to: rung + 1 }))
}

/// Settings near those of `point`.
fn changed(study: &Study, point: &Point, stream: &mut Stream) -> Point {
    let change = |(dimension, place): (&crate::Dimension, &f64), stream: &mut Stream| {
        let (drawn, new, up) = (stream.uniform(), stream.uniform(), stream.below(2));
        if drawn < REDRAWN {
            return new;
        }
        match &dimension.domain {
            Domain::Choice { .. } if !dimension.domain.is_ordered() => *place,
            Domain::Number { low, high, log: true } => place + FACTORS[up].ln() / (high / low).ln(),
            Domain::Whole { low, high, log: true } => {
                place + FACTORS[up].ln() / ((*high as f64 + 1.0) / *low as f64).ln()
            }
            // A tenth of the range.
            _ => place + [-0.1, 0.1][up],
        }
    };
    let places: Vec<f64> =
        study.space.dimensions.iter().zip(&point.0).map(|pair| change(pair, stream).clamp(0.0, 1.0)).collect();
    study.space.point(&places)
}
