//! Tests of replicas that train apart: local steps and DiLoCo.

#[path = "common/train.rs"]
mod common;

use common::*;
use std::collections::BTreeMap;
use trainyard_autograd::ParamId;
use trainyard_comm::local;
use trainyard_engine::rank::Rank;
use trainyard_engine::world::run;
use trainyard_model::Model;
use trainyard_program::Program;
use trainyard_tensor::Device;

const SGD: &[&str] =
    &["optimizer.name='sgd'", "optimizer.momentum=0", "optimizer.clip_norm=0", "precision.compute='f32'"];

fn apart(ends: &[End], others: &[End]) -> f64 {
    let (a, b) = (weights(ends), weights(others));
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| f64::from((f32::from_bits(*a) - f32::from_bits(*b)).abs())).fold(0.0, f64::max)
}

/// One inner step of SGD and a plain mean are data parallelism, to rounding.
#[test]
fn one_local_step_of_sgd_is_data_parallelism_to_rounding() {
    for layout in [
        &["parallel.ranks=2"][..],
        &["parallel.ranks=4", "parallel.data_parallel_replicate_degree=2", "parallel.zero_stage=3"],
        &["parallel.ranks=4", "parallel.data_parallel_replicate_degree=2", "parallel.zero_stage=1"],
    ] {
        let synchronous = train(&[SGD, layout].concat(), 8);
        let start = train(&[SGD, layout].concat(), 1);
        for rule in [
            &["update.rule='local'", "update.every=1"][..],
            &["update.rule='diloco'", "update.every=1", "update.outer_learning_rate=1", "update.outer_momentum=0"],
        ] {
            let local = train(&[SGD, layout, rule].concat(), 8);
            let (error, moved) = (apart(&local, &synchronous), apart(&start, &synchronous));
            assert!(error < 2e-6 && moved > 1e3 * error, "{rule:?} of {layout:?}: {error:e}, moved by {moved:e}");
        }
    }
}

/// The first outer step with Nesterov momentum 0.9 and rate 0.7 goes 0.7 (1 + 0.9) times the mean
/// change (Douillard et al. 2023, Algorithm 1), to which local steps go.
#[test]
fn the_first_outer_step_of_diloco_goes_further_than_the_mean() {
    for layout in [
        &["parallel.ranks=2"][..],
        &["parallel.ranks=4", "parallel.data_parallel_replicate_degree=2", "parallel.zero_stage=3"],
    ] {
        let after = |sets: &[&str]| weights(&train(&[layout, &["update.every=5"], sets].concat(), 5)).concat();
        let first = after(&["update.rule='local'", "optimizer.learning_rate=1e-20"]);
        let (mean, outer) = (after(&["update.rule='local'"]), after(&["update.rule='diloco'"]));
        let (mut error, mut moved) = (0.0f64, 0.0f64);
        for ((first, mean), outer) in first.iter().zip(&mean).zip(&outer) {
            let [first, mean, outer] = [first, mean, outer].map(|bits| f64::from(f32::from_bits(*bits)));
            error = error.max((outer - first - 0.7 * 1.9 * (mean - first)).abs());
            moved = moved.max((mean - first).abs());
        }
        assert!(error < 1e-6 && moved > 1e3 * error, "{layout:?}: {error:e}, moved by {moved:e}");
    }
}

/// Everything that ranks agree on in an outer step ends in the same bits on all replicas, in every
/// layout inside a replica, with the predicted memory.
#[test]
fn replicas_end_alike_and_layouts_inside_them_change_no_bit() {
    let rule = ["update.rule='diloco'", "update.every=3", "parallel.data_parallel_replicate_degree=2"];
    for codec in [
        &[][..],
        &["compression.outer='int8'"],
        &["compression.outer='one_bit'"],
        &["compression.outer='bf16'"],
        &["compression.outer='power_sgd'", "compression.rank=2"],
    ] {
        let mut reference = None;
        for stage in ["parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3"] {
            let sets = [&rule[..], codec, &["parallel.ranks=4", stage]].concat();
            let ends = train(&sets, 7);
            let result = weights(&ends);
            assert!(*reference.get_or_insert_with(|| result.clone()) == result, "{sets:?}");
            ends.iter().for_each(|end| check_memory(end, &sets));
            let drifts: Vec<Option<f64>> = ends[0].outcomes.iter().map(|outcome| outcome.drift).collect();
            let is_there: Vec<bool> = drifts.iter().map(Option::is_some).collect();
            assert_eq!(is_there, [false, false, true, false, false, true, true]);
            assert!(drifts.iter().flatten().all(|drift| *drift > 0.01 && *drift < 10.0), "{drifts:?}");
        }
    }
}

/// The losses of a rule are those that it had before, as a share of those of synchronous steps: the
/// same in every layout inside a replica, and nearly so with a codec. The tokens of all replicas
/// are counted, though the loss is that of the first.
#[test]
fn replicas_apart_learn_about_as_much_as_together() {
    let two = &["parallel.ranks=2", "parallel.data_parallel_replicate_degree=2"][..];
    let together = train(two, 60);
    let local = &["update.rule='local'", "update.every=4"][..];
    let diloco = &["update.rule='diloco'", "update.every=10"][..];
    let stages = &["parallel.pipeline_parallel_degree=2", "parallel.ranks=4", "training.accumulation_steps=2"][..];
    let parts = &["parallel.tensor_parallel_degree=2", "parallel.ranks=4"][..];
    for (rule, more, expected) in [
        (local, &[][..], 0.173),
        (local, stages, 0.173),
        (local, parts, 0.173),
        (diloco, &[], -0.115),
        (diloco, &["compression.outer='int4'"], -0.114),
        (diloco, &["compression.outer='power_sgd'", "compression.rank=8"], 0.142),
        (diloco, &["update.fragments=4", "update.overlap=true"], 0.075),
    ] {
        let ends = train(&[two, rule, more].concat(), 60);
        assert_eq!(ends[0].outcomes[0].tokens, together[0].outcomes[0].tokens, "{rule:?} {more:?}");
        let last = |ends: &[End]| ends[0].outcomes[50..].iter().map(|outcome| outcome.loss).sum::<f64>() / 10.0;
        let worse = last(&ends) / last(&together) - 1.0;
        assert!((worse - expected).abs() < 0.01, "{rule:?} {more:?}: {worse:.4}, expected {expected}");
    }
}

/// The values of every parameter.
type Values = BTreeMap<ParamId, Vec<f32>>;

/// The values after one step of SGD of a replica from `start`, on its rows of step `step`.
fn local_step(start: &Values, step: u64, replica: usize) -> Values {
    let resolved = resolved(&[SGD, &["training.global_batch_size=4"]].concat());
    let world = local::World::new(1).into_iter().next().unwrap();
    let load =
        |device: &Device, model: &Model, _, first, count| Ok(batch(device, model, step, 4 * replica + first, count));
    let set = |rank: &mut Rank, _: &Program| {
        rank.set_masters(|id, range, masters| Ok(masters.write(&start[&id][range])?)).unwrap();
    };
    values(&run(world, |world| train_rank_as(&resolved, world, 1, load, set)).unwrap())
}

fn values(end: &End) -> Values {
    end.parts.iter().map(|(id, runs)| (*id, runs.iter().flat_map(|(_, values)| values.clone()).collect())).collect()
}

/// Streaming DiLoCo as its paper writes it (Douillard et al. 2025, Algorithm 1 and Equation 2),
/// with local steps of single ranks.
#[test]
fn fragments_beside_steps_do_what_the_algorithm_says() {
    const STEPS: u64 = 7;
    const MIXING: f64 = 0.25;
    let rule = ["update.rule='diloco'", "update.every=3", "update.fragments=2", "update.overlap=true"];
    let more = ["update.mixing=0.25", "parallel.ranks=2", "parallel.data_parallel_replicate_degree=2"];
    let streaming = [SGD, &rule, &more].concat();
    let apart = resolved(&streaming).apart.unwrap();
    let start = values(&train(&[SGD, &["optimizer.learning_rate=1e-20"]].concat(), 1)[0]);
    let (mut outer, mut replicas) = (start.clone(), [start.clone(), start.clone()]);
    let mut momentum: BTreeMap<ParamId, Vec<f64>> =
        start.iter().map(|(id, values)| (*id, vec![0.0; values.len()])).collect();
    // The outer update of the parameters of some units, with Nesterov momentum.
    let mut average = |outer: &mut Values, replicas: &[Values; 2], is_due: &dyn Fn(ParamId) -> bool| {
        for (id, values) in outer.iter_mut().filter(|(id, _)| is_due(**id)) {
            let momentum = momentum.get_mut(id).unwrap();
            for (place, value) in values.iter_mut().enumerate() {
                let mean = replicas.iter().map(|replica| f64::from(replica[id][place])).sum::<f64>() / 2.0;
                let gradient = f64::from(*value) - mean;
                momentum[place] = 0.9 * momentum[place] + gradient;
                *value = (f64::from(*value) - 0.7 * (gradient + 0.9 * momentum[place])) as f32;
            }
        }
    };
    let mut turns = Vec::new();
    for step in 1..=STEPS {
        let number = apart.outer_step(step, step == STEPS);
        turns.push(number);
        let fragment = number.and_then(|number| number.checked_sub(1));
        let is_due = |id: ParamId| fragment.is_some_and(|index| id.unit as usize % 2 == index);
        average(&mut outer, &replicas, &is_due);
        for (index, replica) in replicas.iter_mut().enumerate() {
            *replica = local_step(replica, step - 1, index);
            for (id, values) in replica.iter_mut().filter(|(id, _)| is_due(**id)) {
                let mix = |(own, outer): (&mut f32, &f32)| {
                    *own = (MIXING * f64::from(*own) + (1.0 - MIXING) * f64::from(*outer)) as f32;
                };
                values.iter_mut().zip(&outer[id]).for_each(mix);
            }
        }
        if number == Some(0) {
            average(&mut outer, &replicas, &|_| true);
        }
    }
    assert_eq!(turns, [Some(1), None, Some(2), Some(1), None, Some(2), Some(0)]);
    let ends = train(&streaming, STEPS);
    let drifts: Vec<bool> = ends[0].outcomes.iter().map(|outcome| outcome.drift.is_some()).collect();
    assert_eq!(drifts, turns.iter().map(Option::is_some).collect::<Vec<_>>());
    let reached = values(&ends[0]);
    let (error, moved) = (furthest(&reached, &outer), furthest(&reached, &start));
    assert!(error < 2e-6 && moved > 1e3 * error, "{error:e}, moved by {moved:e}");
}

/// The largest distance of two elements in the same place.
fn furthest(a: &Values, b: &Values) -> f32 {
    let pairs = a.iter().flat_map(|(id, values)| values.iter().zip(&b[id]));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max)
}

/// A slower replica makes the first of its steps alone, and its change weighs as much as its steps:
/// the average is `sum(h_r d_r) / sum(h_r)` (McMahan et al. 2017, Algorithm 1). The last round is
/// cut short.
#[test]
fn changes_are_averaged_by_the_steps_that_replicas_made() {
    const STEPS: u64 = 11;
    const EVERY: u64 = 4;
    const INNER: [u64; 2] = [4, 1];
    let layout = ["parallel.ranks=2", "parallel.data_parallel_replicate_degree=2"];
    let rule = ["update.rule='diloco'", "update.every=4", "update.inner_steps=[4, 1]"];
    let start = values(&train(&[SGD, &["optimizer.learning_rate=1e-20"]].concat(), 1)[0]);
    let (mut outer, mut replicas) = (start.clone(), [start.clone(), start.clone()]);
    let mut momentum: BTreeMap<ParamId, Vec<f64>> =
        start.iter().map(|(id, values)| (*id, vec![0.0; values.len()])).collect();
    for step in 0..STEPS {
        let in_round = step % EVERY;
        for (index, replica) in replicas.iter_mut().enumerate().filter(|(index, _)| in_round < INNER[*index]) {
            *replica = local_step(replica, step, index);
        }
        if in_round + 1 < EVERY && step + 1 < STEPS {
            continue;
        }
        let made = INNER.map(|steps| steps.min(in_round + 1) as f64);
        for (id, values) in &mut outer {
            let momentum = momentum.get_mut(id).unwrap();
            for (place, value) in values.iter_mut().enumerate() {
                let change = |index: usize| made[index] * (f64::from(replicas[index][id][place]) - f64::from(*value));
                let gradient = -(change(0) + change(1)) / (made[0] + made[1]);
                momentum[place] = 0.9 * momentum[place] + gradient;
                *value = (f64::from(*value) - 0.7 * (gradient + 0.9 * momentum[place])) as f32;
            }
        }
        replicas = [outer.clone(), outer.clone()];
    }
    let ends = train(&[SGD, &layout, &rule].concat(), STEPS);
    let reached = values(&ends[0]);
    let (error, moved) = (furthest(&reached, &outer), furthest(&reached, &start));
    assert!(error < 2e-6 && moved > 1e3 * error, "{error:e}, moved by {moved:e}");
    // The plain mean is another result.
    let plain = values(&train(&[SGD, &layout, &rule[..2]].concat(), STEPS)[0]);
    assert!(furthest(&reached, &plain) > 1e3 * error);
    let tokens: Vec<u64> = ends[0].outcomes.iter().map(|outcome| outcome.tokens).collect();
    let late: Vec<bool> = ends[1].outcomes.iter().map(|outcome| outcome.late).collect();
    let alone = tokens[1];
    assert_eq!(tokens, [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1].map(|alone_in| alone * (2 - alone_in)));
    assert_eq!(late, [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1].map(|late| late == 1));
    assert_eq!(tokens, ends[1].outcomes.iter().map(|outcome| outcome.tokens).collect::<Vec<_>>());
}

/// Numbers that are equal give the bits of rounds in which all make every step.
#[test]
fn equal_numbers_change_no_bit() {
    for codec in [&[][..], &["compression.outer='int8'"]] {
        let rule = ["update.rule='diloco'", "update.every=3", "parallel.ranks=2"];
        let plain = weights(&train(&[&rule[..], codec].concat(), 7));
        for numbers in ["update.inner_steps=[3, 3]", "update.inner_steps=by_speed"] {
            assert!(weights(&train(&[&rule[..], codec, &[numbers]].concat(), 7)) == plain, "{codec:?} {numbers}");
        }
    }
}

/// Replicas that wait for the others take part in the outer step in every layout, and in no
/// exchange before it; the memory stays as predicted.
#[test]
fn replicas_with_fewer_steps_end_alike_in_every_layout_with_the_predicted_memory() {
    let rule = ["update.rule='diloco'", "update.every=3", "parallel.data_parallel_replicate_degree=2"];
    for numbers in ["update.inner_steps=[3, 1]", "update.inner_steps=[2, 3]"] {
        for codec in [&[][..], &["compression.outer='int4'"], &["compression.outer='power_sgd'"]] {
            let mut reference = None;
            for stage in ["parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3"] {
                let sets = [&rule[..], codec, &[numbers, "parallel.ranks=4", stage]].concat();
                let ends = train(&sets, 7);
                let result = weights(&ends);
                assert!(*reference.get_or_insert_with(|| result.clone()) == result, "{sets:?}");
                ends.iter().for_each(|end| check_memory(end, &sets));
            }
        }
        for layout in [
            &["parallel.pipeline_parallel_degree=2", "training.accumulation_steps=2"][..],
            &["parallel.tensor_parallel_degree=2"],
        ] {
            let sets = [&rule[..], &[numbers, "parallel.ranks=4"], layout].concat();
            train(&sets, 7).iter().for_each(|end| check_memory(end, &sets));
        }
    }
}

/// As [`replicas_end_alike_and_layouts_inside_them_change_no_bit`], for fragments, beside steps and
/// after them.
#[test]
fn fragments_end_alike_in_every_layout_with_the_predicted_memory() {
    for how in [&["update.fragments=3"][..], &["update.overlap=true"], &["update.fragments=3", "update.overlap=true"]] {
        for codec in [&[][..], &["compression.outer='int4'"], &["compression.outer='power_sgd'"]] {
            let mut reference = None;
            for stage in ["parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3"] {
                let rule = ["update.rule='diloco'", "update.every=3", "parallel.data_parallel_replicate_degree=2"];
                let sets = [&rule[..], how, codec, &["parallel.ranks=4", stage]].concat();
                let ends = train(&sets, 8);
                let result = weights(&ends);
                assert!(*reference.get_or_insert_with(|| result.clone()) == result, "{sets:?}");
                ends.iter().for_each(|end| check_memory(end, &sets));
            }
        }
    }
}

#[test]
fn settings_that_do_not_go_with_training_apart_are_refused() {
    let two = "parallel.ranks=2";
    let cases: [(&[&str], &str); 21] = [
        (&[two, "update.overlap=true"], "update.rule is \"synchronous\""),
        (&[two, "update.rule='diloco'", "update.mixing=0.5"], "update.overlap is false"),
        (&[two, "update.rule='diloco'", "update.every=4", "update.fragments=5"], "at most 4"),
        (&["update.rule='local'"], "there is one"),
        (&[two, "update.every=4"], "update.rule is \"synchronous\""),
        (&[two, "update.rule='local'", "update.outer_momentum=0.9"], "whose outer step is the mean"),
        (&[two, "update.rule='diloco'", "update.every=0"], "at least 1"),
        (&[two, "update.rule='diloco'", "precision.compute='f16'"], "f16 and fp8"),
        (&[two, "update.rule='diloco'", "memory.offload.optimizer='disk'"], "leave out memory.offload"),
        (&[two, "update.rule='diloco'", "training.elastic_bits=true"], "elastic_bits"),
        (&[two, "update.rule='diloco'", "compression.gradients='int8'"], "has no effect"),
        (&[two, "update.inner_steps=by_speed"], "update.rule is \"synchronous\""),
        (&[two, "update.rule='server'", "update.inner_steps=[2, 1]"], "update.rule is \"server\""),
        (
            &[two, "update.rule='diloco'", "update.every=1", "update.inner_steps=by_speed"],
            "every replica makes its 1 step",
        ),
        (
            &[two, "update.rule='diloco'", "update.every=4", "update.inner_steps=[4]"],
            "needs one number for each of the 2 replicas",
        ),
        (&[two, "update.rule='diloco'", "update.every=4", "update.inner_steps=[4, 0]"], "at least 1"),
        (
            &[two, "update.rule='diloco'", "update.every=4", "update.inner_steps=[3, 2]"],
            "the largest is update.every = 4",
        ),
        (
            &[two, "update.rule='diloco'", "update.every=4", "update.inner_steps=[5, 4]"],
            "the largest is update.every = 4",
        ),
        (
            &[two, "update.rule='diloco'", "update.inner_steps=by_speed", "update.overlap=true"],
            "leave out update.fragments and update.overlap",
        ),
        (&[two, "update.rule='local'", "update.inner_steps=by_speed", "training.tokens=1e6"], "use training.steps"),
        (
            &[two, "update.rule='local'", "update.inner_steps=fast"],
            "\"equal\", \"by_speed\" or a list of whole numbers",
        ),
    ];
    for (sets, expected) in cases {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let error = resolve(&sets).unwrap_err().to_string();
        assert!(error.contains(expected), "{sets:?}: {error}");
    }
}
