//! Times the choice of the next trial, for each sampler, after as many trials as are given (1,000):
//! `cargo run --release -p trainyard-tune --example sampler_speed [TRIALS]`. Four keys of every
//! kind, successive halving; the least and the median of twenty choices.

use std::time::Instant;
use trainyard_tune::{Event, Next, Sampler, Search, Settings, Space, Study};

const KEYS: [&str; 4] =
    ["a.rate=log:1e-5..1", "a.decay=log:1e-4..1", "a.batch=logint:8..128", "a.kind=cosine|linear|wsd"];
const CHOICES: usize = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let trials: usize = std::env::args().nth(1).map_or(Ok(1000), |text| text.parse())?;
    println!("{:<16} {:>9} {:>9}   ms for a trial after {trials}", "", "least", "median");
    for sampler in [Sampler::Random, Sampler::Sobol, Sampler::Tpe, Sampler::Genetic, Sampler::GaussianProcess] {
        let study = after(trials, sampler)?;
        let mut times_ms: Vec<f64> = (0..CHOICES)
            .map(|_| {
                let began = Instant::now();
                let next = study.next();
                assert!(matches!(next, Next::Train(Event::New { .. })), "a new trial");
                1e3 * began.elapsed().as_secs_f64()
            })
            .collect();
        times_ms.sort_by(f64::total_cmp);
        println!("{:<16} {:>9.3} {:>9.3}", format!("{sampler:?}"), times_ms[0], times_ms[CHOICES / 2]);
    }
    Ok(())
}

/// A study with `trials` trials, of which none is to go on.
fn after(trials: usize, sampler: Sampler) -> Result<Study, Box<dyn std::error::Error>> {
    let space = Space::parse(None, &KEYS.map(str::to_owned))?;
    let (search, rungs) = (Search::Trials(sampler), Settings::halving_rungs(3, 3));
    let mut study = Study::new(space, Settings { search, seed: 1, trials: trials + 1, rungs, reduction: 3 })?;
    for trial in 0..trials {
        // A study takes settings that it did not propose.
        let place: Vec<f64> = (1..=4).map(|key| (trial as f64 * 0.618 * f64::from(key)).fract()).collect();
        let point = study.space.point(&place);
        let loss = 2.0 + place.iter().map(|place| (place - 0.4).powi(2)).sum::<f64>();
        let sets = study.space.sets(&point);
        study.apply(&Event::New { trial, point, parent: None, to: 0, sets })?;
        study.apply(&Event::Reached { trial, loss, seconds: 1.0 })?;
    }
    while let Next::Train(event @ Event::GoOn { trial, .. }) = study.next() {
        study.apply(&event)?;
        study.apply(&Event::Reached { trial, loss: 2.0, seconds: 1.0 })?;
    }
    Ok(study)
}
