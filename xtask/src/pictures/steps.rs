//! Steps as the simulator sees them, and the plans of a search.

use anyhow::{Context, Result};
use trainyard_plan::canvas::Canvas;
use trainyard_plan::svg::{Better, Mark, Point, Scatter, scatter};
use trainyard_plan::{Budget, Candidate, Facts, Fixed, Limits, Objective, Request, plan, step, timeline};
use trainyard_program::{Mesh, Offload, Tier};
use trainyard_sim::{Cluster, Constants, Format, Profiles, Stack, model};

const KEY: [(&str, &str); 6] = [
    ("forward", "forward"),
    ("backward", "backward"),
    ("update", "update"),
    ("gather", "gather of parameters"),
    ("reduce", "reduce-scatter of gradients"),
    ("host", "data, host"),
];

/// A step of ZeRO-3 on eight GPUs.
pub fn sharded() -> Result<String> {
    let request = request("gpt2-1.5b", "1x8xA100-80GB", 64, 1024)?;
    let candidate = Candidate { zero_stage: 3, ..Candidate::plain(Mesh::data(1, 8), 8, 1, Format::Bf16) };
    timeline_of("A predicted step: GPT-2 1.5B, fully sharded (ZeRO-3) over eight A100", &request, &candidate)
}

/// The same model on one GPU, its optimizer in the host's memory.
pub fn offloaded() -> Result<String> {
    let request = request("gpt2-1.5b", "1x1xA100-80GB", 8, 1024)?;
    let offload = Offload { optimizer: Some(Tier::Host), ..Offload::default() };
    let candidate = Candidate { offload, ..Candidate::plain(Mesh::default(), 8, 1, Format::Bf16) };
    timeline_of("A predicted step: GPT-2 1.5B on one A100, its optimizer in the host's memory", &request, &candidate)
}

/// Every plan that a search simulated.
pub fn plans() -> Result<String> {
    let request = request("llama-70b", "64x8xH100", 1024, 8192)?;
    let answer = plan(&request, &facts()?)?;
    let tokens = request.global_batch as f64 * request.sequence_length as f64;
    let points: Vec<Point> = answer
        .simulated
        .iter()
        .enumerate()
        .map(|(index, outline)| Point {
            x: outline.bytes as f64 / GIB,
            y: tokens / outline.step_s,
            label: outline.candidate.layout().to_string(),
            mark: if index == 0 { Mark::Best } else { Mark::Faint },
            spread: None,
        })
        .collect();
    let plot = scatter(&Scatter {
        title: "Simulated plans for Llama 70B on 512 H100; the large point is the fastest",
        x: "memory of the fullest GPU, GiB",
        y: "tokens per second",
        points: &points,
        limit: Some((answer.bytes_max as f64 / GIB, "limit")),
        better: Better::Higher,
        ideal: None,
        size: (760.0, 360.0),
    });
    let mut canvas = Canvas::new(760.0, 370.0, "");
    canvas.embed(5.0, 360.0, &plot);
    Ok(canvas.finish())
}

const GIB: f64 = (1u64 << 30) as f64;

fn timeline_of(title: &str, request: &Request, candidate: &Candidate) -> Result<String> {
    let (step, memory) = step(request, &facts()?, candidate).context("the candidate has no step")?;
    let drawn = timeline::svg(&step, &memory);
    let (width, height) = size(&drawn).context("a timeline has a size")?;
    let mut canvas = Canvas::new(width, height + 58.0, title);
    canvas.key(44.0, &KEY);
    canvas.embed(52.0, height, &drawn);
    Ok(canvas.finish())
}

/// Width and height of an `<svg>` by its view box.
fn size(svg: &str) -> Option<(f64, f64)> {
    let numbers = svg.split_once("viewBox=\"0 0 ")?.1.split_once('"')?.0;
    let (width, height) = numbers.split_once(' ')?;
    Some((width.parse().ok()?, height.parse().ok()?))
}

fn facts() -> Result<Facts> {
    let stack = Stack::named("trainyard").map_err(anyhow::Error::msg)?;
    Ok(Facts { stack, constants: Constants::builtin() })
}

fn request(name: &str, cluster: &str, global_batch: u32, sequence_length: u32) -> Result<Request> {
    Ok(Request {
        model: model(name).map_err(anyhow::Error::msg)?,
        own: None,
        cluster: Cluster::parse(cluster, &Profiles::builtin()).map_err(anyhow::Error::msg)?,
        global_batch: global_batch.into(),
        sequence_length: sequence_length.into(),
        formats: vec![Format::Bf16],
        limits: Limits::default(),
        fixed: Fixed::default(),
        objective: Objective::Speed,
        shown: 8,
        threads: 2,
        budget: Budget::default(),
    })
}
