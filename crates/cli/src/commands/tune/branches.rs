//! Branches of a run for `trainyard tune batch --branch`: from one checkpoint, trainings with
//! several batches and learning rates, to see which batch reaches a loss with how many sequences.

use super::copies::Origin;
use super::trials::Folder;
use crate::output::{count, note};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs;
use trainyard_engine::config::OptimizerName;
use trainyard_tune::{Branch, Branches};

/// Evaluations of a branch.
const EVALUATIONS: u64 = 8;
/// Steps of the largest batch's branches.
const STEPS_OF_LARGEST: usize = 16;
/// Most times that a batch's learning rate is halved, or doubled.
const HALVINGS_MAX: u32 = 4;
/// A learning rate that changes no weight in f32.
pub const STILL: f64 = 1e-30;

/// The batches of the branches around `center`: powers of two times `degree`, at least one each.
pub fn around(center: usize, degree: usize) -> Vec<usize> {
    let each = (center / degree).max(4);
    [each / 4, each / 2, each, 2 * each, 4 * each].map(|each| each * degree).to_vec()
}

/// A branch's learning rate at `batch`, as a multiple of the run's, which it has at `whole`: with
/// the root of the batch, and under SGD with the batch.
fn rate_of(name: OptimizerName, batch: usize, whole: usize) -> f64 {
    let share = batch as f64 / whole as f64;
    if name == OptimizerName::Sgd { share } else { share.sqrt() }
}

/// The largest part of `rows` of at most `most`.
fn micro(rows: usize, most: usize) -> usize {
    (1..=rows.min(most.max(1))).rev().find(|part| rows.is_multiple_of(*part)).unwrap_or(1)
}

/// Trains branches with `batches` and measures the critical batch.
pub fn measure(origin: &Origin<'_>, batches: &[usize]) -> Result<Branches> {
    let (resolved, step) = (origin.resolved, origin.step);
    let largest = batches.iter().copied().max().unwrap_or(1);
    let sequences = STEPS_OF_LARGEST * largest;
    note(&format!(
        "training branches from step {}: {} batches with several learning rates each, {} sequences",
        count(step),
        batches.len(),
        count(sequences as u64)
    ));
    let before = curve(origin, "still", largest, STILL, 1)?;
    let loss_before = before.first().map(|(_, loss)| *loss).context("no evaluation of the checkpoint")?;
    let mut branches = Vec::new();
    for &batch in batches {
        let usual = rate_of(resolved.optimizer.name, batch, resolved.batch.global);
        let mut train = |factor: f64| -> Result<f64> {
            let (rate, steps) = (factor * usual, sequences.div_ceil(batch) as u64);
            let mut of_branch = vec![(0.0, loss_before)];
            of_branch.extend(curve(origin, &format!("branch-{batch}-{factor}"), batch, rate, steps)?);
            let branch = Branch { batch, rate, curve: of_branch };
            let loss = branch.curve.last().map_or(f64::NAN, |(_, loss)| *loss);
            note(&format!("{batch} sequences a step, learning rate x {rate:.3}: loss {loss:.4}"));
            branches.push(branch);
            Ok(loss)
        };
        descend(&mut train)?;
    }
    match Branches::measured(&branches) {
        Some(found) => Ok(found),
        None => bail!(
            "the loss of {loss_before:.4} at step {} did not fall with every batch: measure at another step (--steps, --run), or set a lower \
             optimizer.learning_rate",
            count(step)
        ),
    }
}

/// Halves or doubles a factor of the learning rate, from 1 on, as long as the loss falls.
fn descend(loss_at: &mut impl FnMut(f64) -> Result<f64>) -> Result<()> {
    let first = loss_at(1.0)?;
    for by in [0.5f64, 2.0] {
        let mut least = first;
        for times in 1..=HALVINGS_MAX {
            let loss = loss_at(by.powi(times as i32))?;
            // Also ends where a loss is not a number.
            if loss.is_nan() || loss >= least {
                break;
            }
            least = loss;
        }
        if least < first {
            break;
        }
    }
    Ok(())
}

/// (sequences, loss) of a branch of `steps` steps at `rate` times the run's learning rate.
fn curve(origin: &Origin<'_>, name: &str, batch: usize, rate: f64, steps: u64) -> Result<Vec<(f64, f64)>> {
    let (resolved, step) = (origin.resolved, origin.step);
    let each = batch / resolved.batch.data_parallel_degree;
    let micro = micro(each, resolved.batch.micro);
    let mut sets = origin.rates(rate);
    sets.push(format!("evaluation.interval_steps={}", (steps / EVALUATIONS).max(1)));
    let found = origin.train(name, (micro, each / micro), steps, &sets, evaluations)?;
    let own = found.into_iter().filter(|(at, _)| *at > step);
    Ok(own.map(|(at, loss)| ((at - step) as f64 * batch as f64, loss)).collect())
}

/// (step, loss) of every evaluation of a run.
fn evaluations(run: &Folder) -> Result<Vec<(u64, f64)>> {
    let path = run.path().join("evaluations.jsonl");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(lines.filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64().unwrap_or(f64::NAN)))).collect())
}

/// What the branches say, in lines.
pub fn words(found: &Branches, length: usize) -> String {
    let scale = found.scale;
    let many = |n: f64| if n.is_finite() { format!("{n:.1}") } else { "no limit".to_owned() };
    let mut text = format!("branch  batch   rate   sequences to loss {:.4}\n", found.target);
    for (batch, rate, sequences) in &found.reached {
        text += &format!("      {batch:>7} {rate:>6.2} {:>10}\n", count(sequences.round() as u64));
    }
    let tokens = match scale.sequences.is_finite() {
        true => format!(" ({} tokens)", count((scale.sequences * length as f64) as u64)),
        false => String::new(),
    };
    text += &format!(
        "critical batch {} sequences{tokens} by these; 95 % interval {} to {}\n",
        many(scale.sequences),
        many(scale.low),
        many(scale.high)
    );
    text
}

/// What the branches say, for programs.
pub fn json(found: &Branches) -> Value {
    let finite = |n: f64| n.is_finite().then_some(n);
    let reached = found
        .reached
        .iter()
        .map(|(batch, rate, sequences)| json!({"global_batch_size": batch, "rate": rate, "sequences": sequences}));
    json!({
        "loss": found.target,
        "batches": reached.collect::<Vec<_>>(),
        "sequences": finite(found.scale.sequences),
        "low": found.scale.low,
        "high": finite(found.scale.high),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_and_their_parts_are_whole() {
        assert_eq!(around(32, 2), [8, 16, 32, 64, 128]);
        assert_eq!(around(1, 1), [1, 2, 4, 8, 16]);
        assert_eq!(around(6, 3), [3, 6, 12, 24, 48]);
        assert_eq!([micro(8, 3), micro(6, 4), micro(1, 8), micro(8, 8)], [2, 3, 1, 8]);
    }

    #[test]
    fn the_critical_batch_is_in_words_and_in_json() {
        let scale = trainyard_tune::NoiseScale { sequences: 20.0, low: 15.0, high: f64::INFINITY };
        let found = Branches { target: 2.5, reached: vec![(8, 0.5, 1400.0), (16, 0.7, 1800.4)], scale };
        let text = words(&found, 64);
        let want = "branch  batch   rate   sequences to loss 2.5000\n            8   0.50      1,400\n           16   0.70      1,800\n\
                    critical batch 20.0 sequences (1,280 tokens) by these; 95 % interval 15.0 to no limit\n";
        assert_eq!(text, want);
        let json = json(&found);
        assert_eq!((&json["batches"][1]["sequences"], &json["high"]), (&1800.4.into(), &Value::Null), "{json}");
    }

    #[test]
    fn rates_are_halved_or_doubled_while_the_loss_falls() {
        for (best, want) in
            [(0.25, &[1.0, 0.5, 0.25, 0.125][..]), (1.0, &[1.0, 0.5, 2.0]), (2.0, &[1.0, 0.5, 2.0, 4.0])]
        {
            let mut tried = Vec::new();
            descend(&mut |factor: f64| {
                tried.push(factor);
                Ok((factor / best).ln().powi(2))
            })
            .unwrap();
            assert_eq!(tried, want, "{best}");
        }
        let mut tried = 0;
        descend(&mut |factor: f64| {
            tried += 1;
            Ok(if factor < 1.0 { f64::NAN } else { -factor })
        })
        .unwrap();
        assert_eq!(tried, 2 + 4, "no further than there are halvings");
    }

    #[test]
    fn rates_follow_the_batch() {
        assert_eq!(rate_of(OptimizerName::AdamW, 32, 8), 2.0);
        assert_eq!(rate_of(OptimizerName::Sgd, 32, 8), 4.0);
    }
}
