//! Memory of a rank under each stage of ZeRO, by the lowering's own count: the example of the paper
//! (Rajbhandari et al. 2020, figure 1), 7.5 billion parameters on 64 ranks.

use anyhow::Result;
use trainyard_plan::canvas::Canvas;
use trainyard_program::{MemoryKind, Mesh, ModelShape, StateBytes, Strategy, UnitShape, lower_rank};

const RANKS: u32 = 64;
const PARAMETERS: u64 = 7_500_000_000;
const KINDS: [(MemoryKind, &str); 4] = [
    (MemoryKind::Parameters, "parameters"),
    (MemoryKind::Gradients, "gradients"),
    (MemoryKind::Masters, "masters"),
    (MemoryKind::Optimizer, "optimizer"),
];

pub fn picture() -> Result<String> {
    let mut canvas = Canvas::new(760.0, 230.0, "What each of 64 ranks keeps of a model of 7.5 billion parameters");
    canvas.key(
        46.0,
        &[
            ("parameters", "parameters, bf16"),
            ("gradients", "gradients, bf16"),
            ("masters", "masters, f32"),
            ("optimizer", "AdamW's two moments, f32"),
        ],
    );
    let names = ["replicated (DDP)", "zero_stage = 1", "zero_stage = 2", "zero_stage = 3 (FSDP)"];
    for (stage, name) in names.into_iter().enumerate() {
        let y = 64.0 + 40.0 * stage as f64;
        canvas.text(10.0, y + 18.0, "", name);
        let (mut x, mut total) = (165.0, 0.0);
        for (kind, class) in KINDS {
            let bytes = resident(stage as u8, kind)?;
            let width = bytes / 120e9 * 500.0;
            canvas.rect((x, y), (width, 26.0), class);
            (x, total) = (x + width, total + bytes);
        }
        canvas.text(x + 8.0, y + 18.0, "", &format!("{:.1} GB", total / 1e9));
    }
    Ok(canvas.finish())
}

/// Bytes of a kind that a rank holds between steps.
fn resident(zero_stage: u8, kind: MemoryKind) -> Result<f64> {
    let unit = UnitShape { name: "model".to_owned(), flat_elements: PARAMETERS, ..UnitShape::default() };
    let model = ModelShape { units: vec![unit], batch_bytes: 0 };
    let bytes = StateBytes { parameter: 2, master: 4, gradient: 2, optimizer: 8, optimizer_scales: 0, reduce: 2 };
    let strategy = Strategy { zero_stage, bytes, ..Strategy::new(1) };
    let program = lower_rank(&model, &Mesh::data(1, RANKS), &strategy, 0)?;
    Ok(program.resident.iter().filter(|effect| effect.kind == kind).map(|effect| effect.bytes as f64).sum())
}
