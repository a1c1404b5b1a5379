//! Tests of the planner against exhaustive search, of its bounds against the simulation, and of its
//! answers to impossible requests.

mod common;

use common::simulated_above_bounds;
use trainyard_plan::search::Simulated;
use trainyard_plan::space::candidates;
use trainyard_plan::{
    Budget, Candidate, Change, Checkpointing, Facts, Fixed, Limits, Mode, Objective, PlanError, Pricer, Request, plan,
    step, table,
};
use trainyard_program::Mesh;
use trainyard_sim::transformer::Architecture;
use trainyard_sim::{Cluster, Constants, Format, Profiles, Stack};

fn facts() -> Facts {
    Facts { stack: Stack::named("trainyard").unwrap(), constants: Constants::builtin() }
}

/// A model of 0.2 billion parameters, which is quick to simulate.
fn small() -> Architecture {
    Architecture {
        dim: 1024,
        layers: 6,
        encoder_layers: 0,
        divided: false,
        heads: 8,
        kv_heads: 4,
        head_dim: 128,
        ffn: 4096,
        vocab: 32_000,
        gated: true,
        tied: false,
        positions: 0,
        experts: None,
        latent: None,
        patch_len: 0,
        value_residual: false,
    }
}

fn request(model: Architecture, cluster: &str, global_batch: u64, sequence_length: u64) -> Request {
    Request {
        model,
        own: None,
        cluster: Cluster::parse(cluster, &Profiles::builtin()).unwrap(),
        global_batch,
        sequence_length,
        formats: vec![Format::Bf16],
        limits: Limits::default(),
        fixed: Fixed::default(),
        objective: Objective::Speed,
        shown: 4,
        threads: 2,
        budget: Budget::default(),
    }
}

/// Requests whose whole space can be simulated.
fn reduced() -> Vec<(&'static str, Request)> {
    let gib = |n: f64| Some((n * (1u64 << 30) as f64) as u64);
    let small_on = |cluster: &str, memory| Request {
        limits: Limits { memory_bytes: memory, ..Limits::default() },
        ..request(small(), cluster, 16, 2048)
    };
    let mut far_host = small_on("1x2xA100-80GB", gib(2.6));
    far_host.cluster.device.host_gb_s = 0.1;
    vec![
        ("far from the host", far_host),
        ("one device", small_on("1x1xA100-80GB", None)),
        ("a node", small_on("1x4xA100-80GB", None)),
        ("a node, tight", small_on("1x4xA100-80GB", gib(2.6))),
        ("two nodes, tight", small_on("2x2xA100-40GB", gib(3.0))),
        ("slow links", small_on("4x1xL4:ethernet-25g", gib(4.5))),
        ("tied", Request { model: Architecture { tied: true, ..small() }, ..small_on("2x2xH100", gib(2.8)) }),
        ("cost", Request { objective: Objective::Cost, ..small_on("2x2xH100", gib(4.0)) }),
        (
            "no checkpointing",
            Request {
                fixed: Fixed { checkpointing: Some(Mode::None), ..Fixed::default() },
                ..small_on("1x4xA10", gib(5.0))
            },
        ),
    ]
}

fn all_candidates(request: &Request) -> Vec<Candidate> {
    let counts = request.device_counts();
    counts.iter().flat_map(|devices| candidates(&request.extent(*devices), &request.fixed)).collect()
}

#[test]
fn the_best_is_that_of_an_exhaustive_search_and_bounds_are_below_the_simulation() {
    for (name, request) in reduced() {
        let candidates = all_candidates(&request);
        let facts = facts();
        let pricer = Pricer::new(&request, &candidates, &facts.stack, &facts.constants);
        let bounds = pricer.bounds(&candidates);
        let mut best = f64::INFINITY;
        for (candidate, bound) in candidates.iter().zip(&bounds) {
            let Simulated { cost, bytes } = simulated_above_bounds(&pricer, candidate, bound, name);
            if bytes <= request.bytes_max() {
                best = best.min(cost);
            }
        }
        let answer = plan(&request, &facts);
        match &answer {
            Ok(answer) => {
                let first = &answer.plans[0];
                let devices = f64::from(first.candidate.mesh.ranks());
                let cost = first.step_s * if request.objective == Objective::Cost { devices } else { 1.0 };
                assert!(cost <= best * (1.0 + 1e-9), "{name}: found {cost}, there is {best}");
                assert_eq!(answer.search.considered, candidates.len(), "{name}");
                assert!(answer.plans.iter().all(|plan| plan.memory.total <= request.bytes_max()), "{name}");
                assert!(answer.search.simulated < candidates.len() || candidates.len() < 100, "{name}");
            }
            Err(error) => assert_eq!(best, f64::INFINITY, "{name}: {error}"),
        }
    }
}

/// Regression: a selection cost no time on clusters, and with tensor parallelism saved no memory.
#[test]
fn recomputing_nothing_a_selection_and_all_are_in_order() {
    let facts = facts();
    let own = trainyard_model::preset("llama-8b").unwrap();
    let whole = request(Architecture::from(&own), "1x8xH100", 16, 8192);
    for (request, tp) in [(Request { own: Some(own.into()), ..whole.clone() }, 1), (whole.clone(), 1), (whole, 8)] {
        let mesh = Mesh { dp_shard: 8 / tp, tp, ..Mesh::default() };
        let plain = Candidate { zero_stage: 3, ..Candidate::plain(mesh, 1, 2 * tp, Format::Bf16) };
        let priced = |full, selective| {
            let candidate = Candidate { checkpointing: Checkpointing { full, selective }, ..plain };
            Pricer::new(&request, &[candidate], &facts.stack, &facts.constants).simulated(&candidate).unwrap()
        };
        let [nothing, selection, some, all] = [(0, 0), (0, 32), (16, 16), (32, 0)].map(|(f, s)| priced(f, s));
        // Recomputing a block costs a quarter of a step; recomputing norms and gates costs 1 to 5
        // %, and less where tensor parallelism waits.
        let seconds = [nothing, selection, some, all].map(|priced| priced.cost / nothing.cost);
        assert!((1.005..1.05).contains(&seconds[1]) && (1.15..1.4).contains(&seconds[3]), "tp {tp}: {seconds:?}");
        assert!(seconds.is_sorted(), "tp {tp}: {seconds:?}");
        let bytes = [all, some, selection, nothing].map(|priced| priced.bytes);
        assert!(bytes.is_sorted_by(|a, b| a < b), "tp {tp}: {bytes:?}");
    }
}

/// Checks the bounds of about `count` candidates of `request`, spread over its space.
fn check_bounds(request: &Request, stack: &str, count: usize) {
    let all = all_candidates(request);
    // An odd step meets every combination of choices.
    let some: Vec<Candidate> = all.iter().step_by((all.len() / count) | 1).copied().collect();
    let facts = Facts { stack: Stack::named(stack).unwrap(), ..facts() };
    let pricer = Pricer::new(request, &some, &facts.stack, &facts.constants);
    for (candidate, bound) in some.iter().zip(pricer.bounds(&some)) {
        simulated_above_bounds(&pricer, candidate, &bound, stack);
    }
}

#[test]
fn bounds_are_below_the_simulation_on_large_clusters() {
    let model = |name| trainyard_sim::model(name).unwrap();
    for request in [
        request(model("llama-7b"), "4x8xA100-80GB", 128, 4096),
        request(model("llama-70b"), "16x8xH100", 128, 8192),
        request(model("t5-11b"), "8x8xA100-80GB", 256, 512),
        Request { formats: vec![Format::Fp16], ..request(model("gpt3-13b"), "8x8xV100-32GB", 256, 2048) },
    ] {
        check_bounds(&request, "trainyard", 60);
    }
}

/// Mixtures, whose tokens go to experts on other ranks and nodes, and software that sends what is
/// ready together, puts reductions off, gathers tensor by tensor or lets the host wait.
#[test]
fn bounds_are_below_the_simulation_of_mixtures_and_of_other_software() {
    let model = |name| trainyard_sim::model(name).unwrap();
    let experts = |ep| Fixed { ep: Some(ep), ..Fixed::default() };
    let mixture = Request { fixed: experts(8), ..request(model("qwen3-30b-a3b"), "4x8xH100", 64, 4096) };
    let across = Request { fixed: experts(16), ..request(model("qwen3-30b-a3b"), "8x4xA100-80GB", 64, 2048) };
    let dense = request(model("llama-7b"), "4x8xA100-80GB", 64, 4096);
    for stack in ["trainyard", "megatron-bridge-overlap", "nanotron", "megatron-2021", "deepspeed-zero3"] {
        for request in [&mixture, &across, &dense] {
            check_bounds(request, stack, 20);
        }
    }
}

#[test]
fn a_large_cluster_has_many_candidates_and_the_threads_do_not_matter() {
    let request = request(trainyard_sim::model("llama-7b").unwrap(), "4x8xH100", 128, 4096);
    let answer = plan(&request, &facts()).unwrap();
    assert!(answer.search.considered >= 10_000, "{}", answer.search.considered);
    assert_eq!(plan(&Request { threads: 1, ..request.clone() }, &facts()).unwrap(), answer);
    assert!(answer.plans.windows(2).all(|pair| pair[0].step_s <= pair[1].step_s));
    let mut layouts: Vec<&str> = answer.plans.iter().map(|plan| plan.layout.as_str()).collect();
    layouts.dedup();
    assert_eq!(layouts.len(), answer.plans.len());
}

/// With hardly any time something is found all the same, and the answer says how much better a plan
/// could be.
#[test]
fn a_budget_ends_the_search_and_the_gap_is_said() {
    let all = request(trainyard_sim::model("llama-7b").unwrap(), "4x8xH100", 128, 4096);
    let best = plan(&all, &facts()).unwrap();
    assert_eq!(best.gap, 0.0, "the default budget suffices");
    let none = plan(&Request { budget: Budget::Seconds(1e-9), ..all.clone() }, &facts()).unwrap();
    assert!(none.gap > 0.0 && none.search.simulated == 1, "{:?}", none.search);
    for budget in [Budget::Instructions(1), Budget::Instructions(100_000), Budget::Seconds(1e-9)] {
        let hasty = plan(&Request { budget, ..all.clone() }, &facts()).unwrap();
        let (first, proven) = (hasty.plans[0].step_s, best.plans[0].step_s);
        assert!(first * (1.0 - hasty.gap) <= proven * (1.0 + 1e-9), "{first} {proven} {}", hasty.gap);
        assert!(hasty.gap > 0.0 || first == proven, "{budget:?}");
        assert!(hasty.plans[0].memory.total <= hasty.bytes_max);
    }
}

#[test]
fn the_timeline_is_the_step_and_its_memory_has_the_same_peak() {
    let request = request(small(), "1x4xA100-80GB", 16, 2048);
    let facts = facts();
    let answer = plan(&request, &facts).unwrap();
    for found in &answer.plans {
        let (step, memory) = step(&request, &facts, &found.candidate).unwrap();
        for (series, peak) in memory.iter().zip(&step.memory) {
            assert!((series.peak() / peak.peak_bytes - 1.0).abs() < 1e-9);
        }
        assert!((found.breakdown.total() / step.step_s - 1.0).abs() < 1e-9, "{:?}", found.breakdown);
        let trace = trainyard_plan::timeline::trace(&step, &memory);
        let events = trace["traceEvents"].as_array().unwrap();
        let instructions: usize = step.programs.iter().map(|program| program.instructions.len()).sum();
        assert_eq!(events.iter().filter(|event| event["ph"] == "X").count(), instructions);
        assert!(events.iter().any(|event| event["ph"] == "C" && event["args"]["activations"].is_number()));
    }
}

#[test]
fn what_cannot_be_is_answered_with_the_nearest_that_would() {
    let says = |request: &Request, expected: &[&str]| {
        let error = plan(request, &facts()).map(|answer| table::table(request, &answer)).unwrap_err();
        for part in expected {
            assert!(error.to_string().contains(part), "{error} does not say {part}");
        }
        error
    };
    let large = request(trainyard_sim::model("llama2-70b").unwrap(), "1x1xL4", 8, 2048);
    let error = says(&large, &["nothing fits", "per device", "the nearest that would", "x1xL4"]);
    assert!(matches!(error, PlanError::DoesNotFit { .. }));
    let fits = |limits| Request { limits, ..request(small(), "1x4xA100-80GB", 16, 2048) };
    says(&fits(Limits { memory_bytes: Some(1 << 28), ..Limits::default() }), &["256.0 MiB may be used", "a limit of"]);
    // Seven devices divide neither the batch nor the heads nor the blocks.
    let odd = request(small(), "1x7xA100-80GB", 16, 2048);
    says(&odd, &["no mesh of 7 devices", "use 6 devices"]);
    let fix = |fixed| Request { fixed, ..request(small(), "1x4xA100-80GB", 16, 2048) };
    for (fixed, expected) in [
        (Fixed { tp: Some(3), ..Fixed::default() }, ["with tp=3: tp=3 does not divide the heads", "leave tp open"]),
        (Fixed { tp: Some(8), ..Fixed::default() }, ["more than a node's 4 devices", "leave tp open"]),
        (Fixed { tp: Some(4), dp_shard: Some(2), ..Fixed::default() }, ["make 8 devices", "leave dp_shard open"]),
        (Fixed { ep: Some(2), ..Fixed::default() }, ["which this model has none of", "leave ep open"]),
    ] {
        says(&fix(fixed), &expected);
    }
    says(
        &fix(Fixed { micro_batch: Some(3), accumulation: Some(1), ..Fixed::default() }),
        &["does not divide the global batch of 16"],
    );
    says(&fits(Limits { usd_per_hour: Some(0.5), ..Limits::default() }), &["do not pay for one A100-80GB"]);
    says(&request(small(), "1x4xA100-80GB", 0, 2048), &["a step needs sequences"]);
    says(&request(small(), "1x4xV100-32GB", 16, 2048), &["V100-32GB states no peak of products in bf16", "fp32, fp16"]);
}

#[test]
fn budgets_bound_the_devices() {
    let all = request(small(), "2x4xA100-80GB", 16, 2048);
    let devices = |limits| {
        let answer = plan(&Request { limits, ..all.clone() }, &facts()).unwrap();
        answer.plans[0].candidate.mesh.ranks()
    };
    assert_eq!(devices(Limits::default()), 8);
    assert_eq!(devices(Limits { devices: Some(5), ..Limits::default() }), 4);
    let price = all.cluster.device.usd_per_hour;
    assert_eq!(devices(Limits { usd_per_hour: Some(2.5 * price), ..Limits::default() }), 2);
}

#[test]
fn what_ifs_change_the_answer_as_they_should() {
    let before = request(small(), "2x4xA100-80GB:ethernet-25g", 16, 2048);
    let profiles = Profiles::builtin();
    let seconds = |request: &Request| plan(request, &facts()).unwrap().plans[0].step_s;
    let base = seconds(&before);
    let after = |text: &str| seconds(&Change::parse(text).unwrap().apply(&before, &profiles).unwrap());
    for faster in ["interconnect=10x", "network=hdr-8", "compute=2x", "device=H100"] {
        assert!(after(faster) < base, "{faster}");
    }
    for slower in ["interconnect=0.1x", "sequence_length=8192", "global_batch=64"] {
        assert!(after(slower) > base, "{slower}");
    }
    // Over Ethernet four devices of one node may beat eight of two; over NVLink alone half of them
    // take longer.
    let near = request(small(), "1x8xA100-80GB", 16, 2048);
    let half = seconds(&Change::parse("gpus=4").unwrap().apply(&near, &profiles).unwrap());
    assert!(half > seconds(&near), "gpus=4");
}
