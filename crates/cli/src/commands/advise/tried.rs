//! Tries levers on this machine: the present setup and a few others stand ready in one process and
//! make steps in turn, so that a machine whose speed drifts slows all of them alike.

use crate::commands::config::resolve_for;
use crate::output::note;
use anyhow::{Context, Result};
use std::time::{Duration, Instant};
use trainyard_base::median;
use trainyard_calibrate::Ranks;
use trainyard_engine::config::{Config, Inputs};
use trainyard_plan::levers::{Advice, Outcome, Setup};

/// Number of levers that are tried.
const TRIED: usize = 3;
/// Number of steps of a visit. The first is not timed: it brings the setup back into the caches.
const STEPS: u32 = 3;
/// Number of turns: as many as the time allows, within this range.
const TURNS: std::ops::RangeInclusive<u32> = 3..=40;

/// A setup that stands ready.
struct Contender {
    ranks: Ranks,
    tokens: f64,
    /// Median seconds of a step, per turn.
    turns: Vec<f64>,
}

impl Contender {
    fn new(load: &dyn Fn(&[String]) -> Result<Config>, sets: &[String], inputs: &Inputs) -> Result<Contender> {
        let resolved = resolve_for(&load(sets)?, inputs.clone())?;
        let mut ranks = Ranks::together(&resolved)?;
        // The first step allocates.
        ranks.step()?;
        Ok(Contender { ranks, tokens: resolved.tokens_per_step() as f64, turns: Vec::new() })
    }

    fn visit(&mut self) -> Result<()> {
        let mut timed = Vec::new();
        for step in 0..STEPS {
            let began = Instant::now();
            self.ranks.step()?;
            if step > 0 {
                timed.push(began.elapsed().as_secs_f64());
            }
        }
        self.turns.push(median(timed).context("a visit times steps")?);
        Ok(())
    }
}

/// Runs the first levers of `advice` that can be run, are priced from measured kernels and gain
/// speed, in turn with the present setup for about `seconds`. Writes the measured speeds into it.
pub fn try_out(
    advice: &mut Advice,
    load: &dyn Fn(&[String]) -> Result<Config>,
    sets: &dyn Fn(&Setup) -> Vec<String>,
    inputs: &Inputs,
    seconds: f64,
) -> Result<()> {
    let mut base = Contender::new(load, &[], inputs)?;
    let mut tried: Vec<(usize, Contender)> = Vec::new();
    for (index, row) in advice.rows.iter().enumerate() {
        if let Outcome::Priced { setup, price, speed, runs: true, .. } = &row.outcome
            && *speed > 1.0
            && price.fits()
            && price.remarks.is_empty()
            && tried.len() < TRIED
        {
            note(&format!("trying {}", row.lever.name));
            tried.push((index, Contender::new(load, &sets(setup), inputs)?));
        }
    }
    let (began, budget) = (Instant::now(), Duration::from_secs_f64(seconds));
    for turn in 1..=*TURNS.end() {
        base.visit()?;
        for (_, contender) in &mut tried {
            contender.visit()?;
        }
        if turn >= *TURNS.start() && began.elapsed() > budget {
            break;
        }
    }
    for (index, contender) in tried {
        // The ratio within a turn is steady where times are not.
        let ratios = base.turns.iter().zip(&contender.turns).map(|(base, own)| base / own);
        let speed_of_steps = median(ratios).context("there are turns")?;
        if let Outcome::Priced { tried, .. } = &mut advice.rows[index].outcome {
            *tried = Some(speed_of_steps * contender.tokens / base.tokens);
        }
    }
    Ok(())
}
