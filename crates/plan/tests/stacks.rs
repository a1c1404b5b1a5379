//! The search over what a trainer can express, against an exhaustive one, and its bounds against
//! the simulation of the trainer's software.

mod common;

use common::simulated_above_bounds;
use trainyard_plan::search::Simulated;
use trainyard_plan::space::candidates;
use trainyard_plan::stacks::StackProfile;
use trainyard_plan::{Budget, Facts, Fixed, Limits, Objective, Pricer, Request, best};
use trainyard_sim::transformer::Architecture;
use trainyard_sim::{Cluster, Constants, Format, Profiles, model};

fn request(profile: &StackProfile, memory_gib: f64) -> Request {
    let small = Architecture {
        dim: 1024,
        layers: 6,
        heads: 8,
        kv_heads: 4,
        head_dim: 128,
        ffn: 4096,
        vocab: 32_000,
        ..model("llama-8b").unwrap()
    };
    Request {
        model: small,
        own: None,
        cluster: Cluster::parse("2x2xA100-40GB", &Profiles::builtin()).unwrap(),
        global_batch: 16,
        sequence_length: 2048,
        formats: vec![Format::Bf16],
        limits: Limits { memory_bytes: Some((memory_gib * (1u64 << 30) as f64) as u64), ..Limits::default() },
        fixed: Fixed { rules: Some(profile.rules.clone()), ..Fixed::default() },
        objective: Objective::Speed,
        shown: 1,
        threads: 2,
        budget: Budget::default(),
    }
}

#[test]
fn the_best_of_every_trainer_is_that_of_an_exhaustive_search() {
    for profile in StackProfile::builtin() {
        let name = &profile.name;
        let facts = Facts { stack: profile.software.clone(), constants: Constants::builtin() };
        // DeepSpeed's buckets alone take 2 GB.
        for memory_gib in [5.0, 40.0] {
            let request = request(&profile, memory_gib);
            let all = candidates(&request.extent(4), &request.fixed);
            assert!(all.len() > 10, "{name}: {}", all.len());
            let pricer = Pricer::new(&request, &all, &facts.stack, &facts.constants);
            let mut least = f64::INFINITY;
            for (candidate, bound) in all.iter().zip(pricer.bounds(&all)) {
                let Simulated { cost, bytes } = simulated_above_bounds(&pricer, candidate, &bound, name);
                if bytes <= request.bytes_max() {
                    least = least.min(cost);
                }
            }
            let found = best(&request, &facts).map_or(f64::INFINITY, |plan| plan.step_s);
            assert!(found <= least * (1.0 + 1e-9), "{name}: found {found}, there is {least}");
        }
    }
}

/// A trainer's prices are its own: what it overlaps and keeps shows.
#[test]
fn software_that_does_less_takes_longer() {
    let profile = StackProfile::named("megatron").unwrap();
    let request = request(&profile, 40.0);
    let step_s = |changes: &str| {
        let stack = profile.changed(&changes.parse().unwrap()).unwrap();
        best(&request, &Facts { stack, constants: Constants::builtin() }).unwrap().step_s
    };
    let usual = step_s("");
    for changes in [
        "overlap_reduce = false",
        "dispatch = \"eager\"\nfused = false\nfused_norms = false",
        "attention = \"unfused\"",
    ] {
        assert!(step_s(changes) > usual, "{changes}");
    }
}
