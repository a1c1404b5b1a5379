//! Models to lower.

use trainyard_program::{ModelShape, UnitShape};

/// An embedding, blocks and a head tied to the embedding.
pub fn model(units: usize) -> ModelShape {
    let unit = |i: usize| UnitShape {
        name: match i {
            0 => "embedding".to_owned(),
            i if i + 1 == units => "head".to_owned(),
            i => format!("block.{}", i - 1),
        },
        flat_elements: 100_000,
        borrows: if i + 1 == units && i > 0 { vec![0] } else { Vec::new() },
        saved_bytes: [300 + i as u64, 200, 10],
        output_bytes: 10,
        ..UnitShape::default()
    };
    ModelShape { units: (0..units).map(unit).collect(), batch_bytes: 64 }
}
