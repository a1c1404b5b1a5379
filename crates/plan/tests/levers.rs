//! The table of levers, priced on a small cluster.

use trainyard_plan::levers::table::LEVERS;
use trainyard_plan::levers::{Advice, Bench, ClusterBench, Edit, Outcome, Place, Setup, advise};
use trainyard_plan::{Budget, Candidate, Facts, Fixed, Limits, Objective, Request, price};
use trainyard_program::Mesh;
use trainyard_sim::{Cluster, Constants, Format, Profiles, Stack, model};

fn request(cluster: &str) -> Request {
    Request {
        model: model("gpt2-1.5b").unwrap(),
        own: None,
        cluster: Cluster::parse(cluster, &Profiles::builtin()).unwrap(),
        global_batch: 64,
        sequence_length: 1024,
        formats: vec![Format::Bf16],
        limits: Limits::default(),
        fixed: Fixed::default(),
        objective: Objective::Speed,
        shown: 1,
        threads: 1,
        budget: Budget::default(),
    }
}

fn facts() -> Facts {
    Facts { stack: Stack::named("trainyard").unwrap(), constants: Constants::builtin() }
}

fn sharded(request: &Request) -> Setup {
    let ranks = request.cluster.devices();
    let micro = (request.global_batch / u64::from(ranks) / 2) as u32;
    let candidate = Candidate { zero_stage: 3, ..Candidate::plain(Mesh::data(1, ranks), micro, 2, Format::Bf16) };
    Setup::of(request, &facts().stack, &candidate)
}

fn advice(request: &Request, setup: &Setup) -> Advice {
    let facts = facts();
    // A run that fine-tunes has levers that one from random weights has not.
    let place = Place { pretrained: true, ..Place::of(request) };
    advise(setup, &place, &ClusterBench { request, facts: &facts, base: setup, knows: &|setup| setup.edits.is_empty() })
        .unwrap()
}

fn speed(advice: &Advice, name: &str) -> f64 {
    let row = advice.rows.iter().find(|row| row.lever.name == name).unwrap();
    match &row.outcome {
        Outcome::Priced { speed, .. } => *speed,
        Outcome::Nothing(why) => panic!("{name}: {why}"),
    }
}

#[test]
fn every_lever_has_a_row_a_quality_and_a_source_and_what_can_be_run_comes_first() {
    let request = request("2x8xA100-80GB");
    let setup = sharded(&request);
    let advice = advice(&request, &setup);
    assert_eq!(advice.rows.len(), LEVERS.len());
    let mut names: Vec<&str> = LEVERS.iter().map(|lever| lever.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), LEVERS.len(), "names are different");
    assert!(LEVERS.iter().all(|lever| !lever.quality.is_empty() && !lever.source.is_empty()));
    let ranks: Vec<Option<(bool, bool, f64)>> = advice
        .rows
        .iter()
        .map(|row| match &row.outcome {
            Outcome::Priced { runs, price, speed, .. } => Some((*runs, price.fits(), *speed)),
            Outcome::Nothing(_) => None,
        })
        .collect();
    assert!(ranks.windows(2).all(|pair| pair[0] >= pair[1] || pair[1].is_none()), "{ranks:?}");
    assert!(ranks.iter().flatten().count() >= 24, "{ranks:?}");
}

/// The present step is the one that `plan` shows. Regression: of other software it had this
/// program's bytes of state.
#[test]
fn the_present_step_is_the_planner_s() {
    let request = request("2x8xA100-80GB");
    for name in ["trainyard", "megatron-bridge", "deepspeed-zero3"] {
        let facts = Facts { stack: Stack::named(name).unwrap(), ..facts() };
        let setup = Setup::of(&request, &facts.stack, &sharded(&request).candidate);
        let bench = ClusterBench { request: &request, facts: &facts, base: &setup, knows: &|_| true };
        let now = bench.price(&setup).unwrap();
        let plan = price(&request, &facts, &setup.candidate).unwrap();
        assert_eq!((now.step_s, now.bytes), (plan.step_s, plan.memory.total), "{name}");
    }
}

#[test]
fn no_cure_of_the_network_is_better_than_no_network() {
    // Two nodes on a slow network, and whole replicas: gradients are what it waits for.
    let request = request("2x8xA100-80GB:ethernet-25g");
    let candidate = Candidate::plain(Mesh::data(16, 1), 4, 1, Format::Bf16);
    let advice = advice(&request, &Setup::of(&request, &facts().stack, &candidate));
    assert!(advice.bottleneck.contains("waiting for gradients to be summed"), "{}", advice.bottleneck);
    let bound = speed(&advice, "perfect overlap");
    for cure in ["gradients in bf16", "gradients in int8", "gradients, low rank", "local steps (DiLoCo)"] {
        let speed = speed(&advice, cure);
        assert!(1.05 < speed && speed <= bound * 1.001, "{cure}: {speed} of {bound}");
    }
    // Fewer bytes are faster.
    assert!(speed(&advice, "gradients in int8") > speed(&advice, "gradients in bf16"));
}

#[test]
fn combinations_are_better_than_each_of_their_levers() {
    let request = request("2x8xA100-80GB:ethernet-25g");
    let candidate = Candidate::plain(Mesh::data(16, 1), 1, 4, Format::Bf16);
    let advice = advice(&request, &Setup::of(&request, &facts().stack, &candidate));
    assert!(!advice.combinations.is_empty());
    for combination in &advice.combinations {
        assert!(combination.price.fits() && combination.levers.len() >= 2);
        for lever in &combination.levers {
            let alone = speed(&advice, lever.name);
            assert!(combination.speed > alone * 0.999, "{} alone {alone}, together {}", lever.name, combination.speed);
        }
    }
}

#[test]
fn edits_change_what_they_say() {
    let request = request("1x8xA100-80GB");
    let setup = sharded(&request);
    let facts = facts();
    let bench = ClusterBench { request: &request, facts: &facts, base: &setup, knows: &|setup| setup.edits.is_empty() };
    let now = bench.price(&setup).unwrap();
    let with = |edit| bench.price(&setup.edited(edit).unwrap()).unwrap();
    let adapters = with(Edit::Adapters { share: 0.01 });
    assert!(adapters.step_s < now.step_s && adapters.bytes < now.bytes);
    let frozen = with(Edit::Freeze { blocks: 24 });
    assert!(frozen.step_s < now.step_s);
    let moments = with(Edit::OptimizerBytes { share: 0.25 });
    assert!(moments.bytes < now.bytes && moments.step_s <= now.step_s);
    let rounded = with(Edit::FakeQuantisation);
    assert!(rounded.step_s > now.step_s && rounded.bytes == now.bytes);
    assert!(with(Edit::FreeExchanges).step_s < now.step_s);
    assert!(with(Edit::Teacher).step_s > now.step_s);
    assert_eq!(with(Edit::Pruned).step_s, now.step_s);
}
