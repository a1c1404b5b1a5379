//! Times the search and its parts on the two requests that have a bar, and the simulation of one
//! step: `cargo run --release -p trainyard-plan --example search`.

use std::time::Instant;
use trainyard_plan::space::candidates;
use trainyard_plan::{Budget, Candidate, Facts, Fixed, Limits, Objective, Pricer, Request, plan};
use trainyard_sim::{Cluster, Constants, Format, Profiles, Stack};

fn main() {
    let facts = Facts { stack: Stack::named("trainyard").expect("known"), constants: Constants::builtin() };
    for (model, cluster, global_batch) in [("llama-70b", "64x8xH100", 1024), ("llama-405b", "2048x8xH100", 2048)] {
        println!("{model} on {cluster}, {global_batch} x 8192 tokens");
        measure(
            &Request {
                model: trainyard_sim::model(model).expect("known"),
                own: None,
                cluster: Cluster::parse(cluster, &Profiles::builtin()).expect("known"),
                global_batch,
                sequence_length: 8192,
                formats: vec![Format::Bf16],
                limits: Limits::default(),
                fixed: Fixed::default(),
                objective: Objective::Speed,
                shown: 8,
                threads: 2,
                budget: Budget::default(),
            },
            &facts,
        );
    }
}

fn measure(request: &Request, facts: &Facts) {
    let began = Instant::now();
    let extents = request.device_counts().into_iter().map(|devices| request.extent(devices));
    let all: Vec<Candidate> = extents.flat_map(|extent| candidates(&extent, &request.fixed)).collect();
    lap("candidates", began);
    let began = Instant::now();
    let pricer = Pricer::new(request, &all, &facts.stack, &facts.constants);
    lap("prices of units", began);
    let began = Instant::now();
    let bounds = pricer.bounds(&all);
    lap("bounds", began);
    let began = Instant::now();
    let answer = plan(request, facts).expect("something fits");
    lap("the whole search", began);
    println!("  {:?}; gap {:.1} %", answer.search, 100.0 * answer.gap);
    let best = &answer.plans[0];
    let open = bounds.iter().filter(|bound| bound.bytes <= answer.bytes_max && bound.cost < best.step_s).count();
    println!("  {:.3} s a step: {}; {open} cheap bounds are below that", best.step_s, best.layout);
    let began = Instant::now();
    let step = pricer.step(&best.candidate).expect("it has a step");
    lap("lowering, simulating a step", began);
    let instructions: usize = step.programs.iter().map(|program| program.instructions.len()).sum();
    println!(
        "  {instructions} instructions of {} ranks stand for {}",
        step.programs.len(),
        best.candidate.mesh.ranks()
    );
}

fn lap(what: &str, began: Instant) {
    println!("  {what:<28} {:8.1} ms", 1e3 * began.elapsed().as_secs_f64());
}
