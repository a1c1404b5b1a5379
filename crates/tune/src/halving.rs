//! Asynchronous successive halving (Li et al. 2020, algorithm 2).
//!
//! A trial that reached a rung pauses there with its checkpoint. It goes on if it is among the best
//! `1 / reduction` of all trials that have reached the rung so far. Looking from the highest rung
//! down keeps good trials moving; nothing ever waits for a rung to be full.

use crate::study::{Study, Trial};

/// The trial that goes on to its next rung, if one is among the best of its rung.
pub fn promoted(study: &Study) -> Option<usize> {
    let reduction = study.settings.reduction;
    (0..study.top()).rev().find_map(|rung| {
        let ranked = ranked(study, rung);
        let best = &ranked[..ranked.len() / reduction];
        best.iter().find(|trial| is_paused(trial, rung)).map(|trial| trial.number)
    })
}

/// After the last new trial: the best one of the highest rung goes on to the end, if no trial has
/// reached it.
pub fn last(study: &Study) -> Option<usize> {
    let reached = |rung| !ranked(study, rung).is_empty();
    let rung = (0..=study.top()).rev().find(|rung| reached(*rung)).filter(|rung| *rung < study.top())?;
    ranked(study, rung).into_iter().find(|trial| is_paused(trial, rung)).map(|trial| trial.number)
}

fn is_paused(trial: &Trial, rung: usize) -> bool {
    trial.losses.len() == rung + 1 && trial.training_to.is_none() && trial.end.is_none()
}

/// The trials that reached `rung`, the least loss first, and earlier trials before later ones.
fn ranked(study: &Study, rung: usize) -> Vec<&Trial> {
    let loss = |trial: &Trial| trial.loss_at(rung).unwrap_or(f64::INFINITY);
    let mut ranked: Vec<&Trial> = study.trials().iter().filter(|trial| trial.loss_at(rung).is_some()).collect();
    ranked.sort_by(|a, b| loss(a).total_cmp(&loss(b)));
    ranked
}
