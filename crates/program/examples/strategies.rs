//! Prints the programs that `docs/programs.md` shows: one section per strategy.

#[allow(dead_code)]
#[path = "../tests/split/mod.rs"]
mod split;

use trainyard_program::{
    Keep, Mesh, ModelShape, Offload, PipelineSchedule, ReduceSchedule, Reshard, StateBytes, Strategy, Tier, UnitShape,
    lower_rank,
};

/// An embedding, two blocks and a head, of a quarter of a MiB in each whole copy at two bytes per
/// element.
fn model() -> ModelShape {
    let unit = |name: &str| UnitShape {
        name: name.to_owned(),
        flat_elements: 1 << 17,
        saved_bytes: [3 << 16, 2 << 16, 1 << 14],
        output_bytes: 1 << 14,
        ..UnitShape::default()
    };
    ModelShape { units: ["embedding", "block.0", "block.1", "head"].map(unit).into(), batch_bytes: 3 << 10 }
}

fn main() {
    print!("{}", sections());
}

/// All sections, as the documentation shows them.
pub fn sections() -> String {
    let plain = Strategy { bytes: StateBytes::MIXED, ..Strategy::new(4) };
    let accumulating = Strategy { accumulation_steps: 2, ..plain.clone() };
    let pipelined = Strategy { accumulation_steps: 4, ..plain.clone() };
    let offloaded = Offload { optimizer: Some(Tier::Disk), ..Offload::default() };
    let pipeline = Mesh { pp: 2, ..Mesh::default() };
    let sections = [
        ("DDP, two micro-batches", Mesh::data(2, 1), accumulating.clone()),
        (
            "DDP, gradients reduced per micro-batch",
            Mesh::data(2, 1),
            Strategy { reduce_schedule: ReduceSchedule::PerMicroBatch, ..accumulating.clone() },
        ),
        ("ZeRO-1", Mesh::data(1, 4), Strategy { zero_stage: 1, ..plain.clone() }),
        ("ZeRO-2", Mesh::data(1, 4), Strategy { zero_stage: 2, ..plain.clone() }),
        ("ZeRO-3", Mesh::data(1, 4), Strategy { zero_stage: 3, ..plain.clone() }),
        (
            "Hybrid sharding, gathered once a step",
            Mesh::data(2, 2),
            Strategy { zero_stage: 3, reshard_after_forward: Reshard::Never, ..plain.clone() },
        ),
        ("Elastic bits on one rank", Mesh::default(), Strategy { elastic: true, ..pipelined.clone() }),
        ("Optimizer on disk", Mesh::default(), Strategy { offload: offloaded, ..plain.clone() }),
        ("1F1B, the first of two stages", pipeline, pipelined.clone()),
        (
            "ZB-H1, the last of two stages",
            pipeline,
            Strategy { pipeline: PipelineSchedule::ZeroBubble.into(), ..pipelined.clone() },
        ),
        (
            "Tensor parallelism with split sequences",
            Mesh { tp: 2, ..Mesh::default() },
            Strategy { sequence_parallel: true, ..plain },
        ),
    ];
    let mut text = String::new();
    for (title, mesh, strategy) in sections {
        let rank = if title.contains("last") { mesh.ranks() - 1 } else { 0 };
        let shape = if mesh.tp > 1 { split::llama(1, mesh.tp, rank, true, false) } else { model() };
        let strategy = Strategy { keep: vec![Keep::Everything; shape.units.len()], ..strategy };
        let program = lower_rank(&shape, &mesh, &strategy, rank).expect("these go together");
        text += &format!("### {title}\n\n```text\n{program}```\n\n");
    }
    text
}
