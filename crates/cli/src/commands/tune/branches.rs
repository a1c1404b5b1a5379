//! Branches of a run for `trainyard tune batch --branch`: from one checkpoint, trainings with
//! several batches and learning rates on the same sequences, to see how much a larger batch loses.

use super::copies::Origin;
use super::trials::Folder;
use crate::output::{count, note};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use trainyard_engine::config::OptimizerName;
use trainyard_tune::{Branch, Branches};

/// Steps of the branches of the largest batch around the noise scale.
const STEPS_OF_LARGEST: usize = 32;
/// Most times that a batch's learning rate is halved, or doubled.
const HALVINGS_MAX: i32 = 4;
/// Most times that the largest batch is doubled, while it still pays.
const DOUBLINGS_MAX: usize = 3;

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

/// Trains branches with `batches`, smallest first, and measures the critical batch. Larger ones are
/// added while the largest is better than the smallest on half of the sequences.
pub fn measure(origin: &Origin<'_>, batches: &[usize]) -> Result<Branches> {
    let smallest = batches.first().copied().unwrap_or(1);
    let largest = batches.last().copied().unwrap_or(1);
    let sequences = STEPS_OF_LARGEST * largest;
    note(&format!(
        "training branches from step {}: batches of {smallest} to {largest} on {} sequences, with several learning rates each",
        count(origin.step),
        count(sequences as u64)
    ));
    let half = best(origin, smallest, sequences / 2)?.loss;
    let mut branches = batches.iter().map(|batch| best(origin, *batch, sequences)).collect::<Result<Vec<_>>>()?;
    for doubled in 1..=DOUBLINGS_MAX {
        if branches.last().is_none_or(|last| last.loss.is_nan() || last.loss > half) {
            break;
        }
        branches.push(best(origin, largest << doubled, sequences)?);
    }
    match Branches::measured(half, &branches) {
        Some(found) => Ok(found),
        None => bail!(
            "with {smallest} sequences a step, {} sequences from step {} on gave a loss of {:.4} and half of them {half:.4}, so nothing can \
             be compared: measure at another step (--steps, --run)",
            count(sequences as u64),
            count(origin.step),
            branches[0].loss
        ),
    }
}

/// The best branch of `batch` on so many sequences.
fn best(origin: &Origin<'_>, batch: usize, sequences: usize) -> Result<Branch> {
    let resolved = origin.resolved;
    let usual = rate_of(resolved.optimizer.name, batch, resolved.batch.global);
    let mut branches: Vec<Branch> = Vec::new();
    descend(&mut |factor: f64| {
        let rate = factor * usual;
        let name = format!("branch-{batch}-{sequences}-{factor}");
        let loss = trained(origin, &name, batch, rate, sequences.div_ceil(batch) as u64)?;
        let in_all = count(sequences as u64);
        note(&format!("{batch} sequences a step, {in_all} in all, learning rate x {rate:.3}: loss {loss:.4}"));
        branches.push(Branch { batch, rate, loss });
        Ok(loss)
    })?;
    // A loss that is not a number is the worst.
    let order = |loss: f64| if loss.is_nan() { f64::INFINITY } else { loss };
    let best = branches.into_iter().min_by(|a, b| order(a.loss).total_cmp(&order(b.loss)));
    best.context("no branch was trained")
}

/// Halves or doubles a factor of the learning rate, from 1 on, as long as the loss falls.
fn descend(loss_at: &mut impl FnMut(f64) -> Result<f64>) -> Result<()> {
    let first = loss_at(1.0)?;
    for by in [0.5f64, 2.0] {
        let mut least = first;
        for times in 1..=HALVINGS_MAX {
            let loss = loss_at(by.powi(times))?;
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

/// The loss of a branch of `steps` steps whose learning rate falls from `rate` times the run's to
/// zero, so that branches are compared at rest.
fn trained(origin: &Origin<'_>, name: &str, batch: usize, rate: f64, steps: u64) -> Result<f64> {
    let resolved = origin.resolved;
    let each = batch / resolved.batch.data_parallel_degree;
    let micro = micro(each, resolved.batch.micro);
    let mut sets = origin.rates(rate);
    sets.extend([
        "evaluation.interval_steps=auto".to_owned(),
        "schedule.kind=wsd".to_owned(),
        format!("schedule.decay_steps={steps}"),
        "schedule.min_ratio=0".to_owned(),
        format!("training.steps={}", origin.step + steps),
    ]);
    let (step, loss) = origin.train(name, (micro, each / micro), steps, &sets, Folder::loss)?;
    if step != origin.step + steps {
        bail!("the branch {name} was not evaluated after its last step");
    }
    Ok(loss)
}

/// The losses of the branches and the critical batch, in lines.
pub fn words(found: &Branches, length: usize) -> String {
    let scale = found.scale;
    let many = |n: f64| if n.is_finite() { format!("{n:.1}") } else { "no limit".to_owned() };
    let mut text = "branch  batch   rate     loss\n".to_owned();
    for Branch { batch, rate, loss } in &found.whole {
        text += &format!("      {batch:>7} {rate:>6.2} {loss:>8.4}\n");
    }
    let smallest = found.whole.first().map_or(0, |branch| branch.batch);
    text += &format!("      {smallest:>7}        {:>8.4} on half of the sequences\n", found.half);
    let tokens = match scale.sequences.is_finite() {
        true => format!(" ({} tokens)", count((scale.sequences * length as f64) as u64)),
        false => String::new(),
    };
    text += &format!(
        "critical batch {} sequences{tokens} by these; interval {} to {}\n",
        many(scale.sequences),
        many(scale.low),
        many(scale.high)
    );
    text
}

/// The same, for programs.
pub fn json(found: &Branches) -> Value {
    let finite = |n: f64| n.is_finite().then_some(n);
    let of = |branch: &Branch| json!({"global_batch_size": branch.batch, "rate": branch.rate, "loss": branch.loss});
    json!({
        "batches": found.whole.iter().map(of).collect::<Vec<_>>(),
        "loss_of_half": found.half,
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
        let branch = |batch: usize, rate: f64, loss: f64| Branch { batch, rate, loss };
        let found = Branches { half: 2.6, whole: vec![branch(8, 0.5, 2.5), branch(16, 0.7, 2.55004)], scale };
        let want = [
            "branch  batch   rate     loss",
            "            8   0.50   2.5000",
            "           16   0.70   2.5500",
            "            8          2.6000 on half of the sequences",
            "critical batch 20.0 sequences (1,280 tokens) by these; interval 15.0 to no limit",
        ];
        assert_eq!(words(&found, 64).lines().collect::<Vec<_>>(), want);
        let json = json(&found);
        assert_eq!((&json["batches"][1]["loss"], &json["high"]), (&2.55004.into(), &Value::Null), "{json}");
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
        assert_eq!(tried, 2 + HALVINGS_MAX, "no further than there are halvings");
    }

    #[test]
    fn rates_follow_the_batch() {
        assert_eq!(rate_of(OptimizerName::AdamW, 32, 8), 2.0);
        assert_eq!(rate_of(OptimizerName::Sgd, 32, 8), 4.0);
    }
}
