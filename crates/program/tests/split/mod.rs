//! The shapes of a small Llama whose units are split over a tensor-parallel group.

use trainyard_program::{Border, Layout, ModelShape, SegmentShape, SplitShape, UnitShape, ValueShape};

const TOKENS: u64 = 24;
const CHANNELS: u64 = 64;
const VOCABULARY: u64 = 257;
/// Bytes of a whole residual stream in 16 bits.
pub const RESIDUAL: u64 = 2 * TOKENS * CHANNELS;

/// The shape of the part that rank `index` of `tp` holds: an embedding, `blocks` blocks and a head.
pub fn llama(blocks: usize, tp: u32, index: u32, sequence_parallel: bool, tied: bool) -> ModelShape {
    let split = Split { tp: u64::from(tp), index: u64::from(index), sequence_parallel };
    let mut units = vec![split.embedding()];
    units.extend((0..blocks).map(|block| split.block(block)));
    units.push(split.head(if tied { vec![0] } else { Vec::new() }));
    ModelShape { units, batch_bytes: 12 * TOKENS }
}

/// The shapes of all ranks of a tensor-parallel group.
pub fn group(blocks: usize, tp: u32, sequence_parallel: bool, tied: bool) -> Vec<ModelShape> {
    (0..tp).map(|index| llama(blocks, tp, index, sequence_parallel, tied)).collect()
}

struct Split {
    tp: u64,
    index: u64,
    sequence_parallel: bool,
}

impl Split {
    /// The layout of the residual stream.
    fn residual(&self) -> Layout {
        if self.sequence_parallel { Layout::Split } else { Layout::Invariant }
    }

    fn value(&self, name: &str, layout: Layout) -> ValueShape {
        let bytes = if layout == Layout::Split { RESIDUAL / self.tp } else { RESIDUAL };
        ValueShape { name: name.to_owned(), layout, bytes }
    }

    /// Rows of the vocabulary: the first ranks have one more.
    fn rows(&self) -> u64 {
        VOCABULARY / self.tp + u64::from(self.index < VOCABULARY % self.tp)
    }

    /// Norms compute on a part of the sequence, so their gradients are partial.
    fn shared(&self, norms: u64) -> u64 {
        if self.sequence_parallel { norms * CHANNELS } else { 0 }
    }

    fn unit(&self, name: String, flat_elements: u64, split: SplitShape) -> UnitShape {
        let saved = |keep: usize| split.segments.iter().map(|segment| segment.saved_bytes[keep]).sum();
        UnitShape {
            name,
            flat_elements,
            saved_bytes: [saved(0), saved(1), saved(2)],
            output_bytes: split.values.last().map_or(0, |output| output.bytes),
            split: Some(split),
            ..UnitShape::default()
        }
    }

    fn embedding(&self) -> UnitShape {
        let values =
            vec![self.value("e", Layout::Partial), self.value("e'", self.residual()), self.value("x", self.residual())];
        let split = SplitShape {
            values,
            input: None,
            segments: vec![segment("lookup", &[], &[0], [60, 60, 0]), segment("positions", &[1], &[2], [5, 5, 0])],
            borders: vec![Border { from: 0, to: 1 }],
            shared_gradient_elements: 0,
        };
        self.unit("embedding".to_owned(), self.rows() * CHANNELS, split)
    }

    fn block(&self, block: usize) -> UnitShape {
        let (residual, whole, partial) = (self.residual(), Layout::Replicated, Layout::Partial);
        let values = vec![
            self.value("x", residual),
            self.value("h", residual),
            self.value("h'", whole),
            self.value("a", partial),
            self.value("a'", residual),
            self.value("x2", residual),
            self.value("h2", residual),
            self.value("h2'", whole),
            self.value("b", partial),
            self.value("b'", residual),
            self.value("y", residual),
        ];
        let split = SplitShape {
            values,
            input: Some(0),
            segments: vec![
                segment("norm", &[0], &[0, 1], [100, 40, 40]),
                segment("attention", &[2], &[3], [500, 300, 0]),
                segment("rejoin", &[0, 4], &[5, 6], [100, 40, 0]),
                segment("mlp", &[7], &[8], [700, 300, 0]),
                segment("output", &[5, 9], &[10], [0, 0, 0]),
            ],
            borders: [(1, 2), (3, 4), (6, 7), (8, 9)].map(|(from, to)| Border { from, to }).into(),
            shared_gradient_elements: self.shared(2),
        };
        self.unit(format!("block.{block}"), 12 * CHANNELS * CHANNELS / self.tp + 2 * CHANNELS, split)
    }

    fn head(&self, borrows: Vec<u32>) -> UnitShape {
        let statistics = 12 * TOKENS;
        let small = |name: &str, layout, bytes| ValueShape { name: name.to_owned(), layout, bytes };
        let values = vec![
            self.value("x", self.residual()),
            self.value("h", self.residual()),
            self.value("h'", Layout::Replicated),
            small("s", Layout::Split, statistics),
            small("s'", Layout::Invariant, self.tp * statistics),
            small("loss", Layout::Invariant, 4),
        ];
        let statistics = SegmentShape { differentiable: false, ..segment("statistics", &[2], &[3], [0; 3]) };
        let split = SplitShape {
            values,
            input: Some(0),
            segments: vec![
                segment("norm", &[0], &[1], [100, 50, 50]),
                statistics,
                segment("loss", &[2, 4], &[5], [400, 400, 0]),
            ],
            borders: [(1, 2), (3, 4)].map(|(from, to)| Border { from, to }).into(),
            shared_gradient_elements: self.shared(1),
        };
        let table = if borrows.is_empty() { self.rows() * CHANNELS } else { 0 };
        UnitShape { borrows, output_bytes: 0, ..self.unit("head".to_owned(), table + CHANNELS, split) }
    }
}

fn segment(name: &str, takes: &[u32], gives: &[u32], saved_bytes: [u64; 3]) -> SegmentShape {
    SegmentShape {
        name: name.to_owned(),
        takes: takes.to_vec(),
        gives: gives.to_vec(),
        differentiable: true,
        saved_bytes,
    }
}
