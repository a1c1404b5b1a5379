//! The shapes of a small Llama whose units are split over a tensor-parallel group, a
//! context-parallel group, or both.

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

/// The shapes of all ranks of a tensor-parallel group, whose ranks have the sequences of one of
/// `cp`
/// ranks.
pub fn group(blocks: usize, tp: u32, cp: u32, sequence_parallel: bool, tied: bool) -> Vec<ModelShape> {
    let shape = |index| {
        let mut shape = llama(blocks, tp, index, sequence_parallel, tied);
        if cp > 1 {
            shape.units.iter_mut().for_each(|unit| on_rows(unit, tp, u64::from(cp)));
        }
        shape
    };
    (0..tp).map(shape).collect()
}

/// Gives a unit of a tensor-parallel rank the rows of one of `cp` ranks. With `tp` of 1 it is one
/// segment then, or two with the exchange of keys and values between them.
fn on_rows(unit: &mut UnitShape, tp: u32, cp: u64) {
    let split = unit.split.as_mut().unwrap();
    let is_block = split.segments.len() == 5;
    let value = |name: &str, like: &ValueShape| ValueShape { name: name.to_owned(), ..like.clone() };
    if tp == 1 {
        let (first, last) = (split.values[0].clone(), split.values.last().unwrap().clone());
        let invariant = |of: &ValueShape| ValueShape { layout: Layout::Invariant, ..of.clone() };
        let (x, y) = (invariant(&first), invariant(&last));
        let saved = unit.saved_bytes;
        split.borders.clear();
        (split.values, split.segments) = match (split.input, is_block) {
            (None, _) => (vec![y], vec![segment("all", &[], &[0], saved)]),
            (_, false) => (vec![x, y], vec![segment("all", &[0], &[1], saved)]),
            (_, true) => (
                vec![x.clone(), value("q", &x), value("kv", &x), value("kv'", &x), y],
                vec![segment("project", &[0], &[0, 1, 2], saved), segment("attend", &[0, 1, 3], &[4], [30, 20, 0])],
            ),
        };
        if is_block {
            split.borders = vec![Border { from: 2, to: 3 }];
        }
        split.shared_gradient_elements = 0;
    } else if is_block {
        // Attention in two segments: values and borders after them move on by three.
        let later = |index: u32| if index > 2 { index + 3 } else { index };
        for of in split.segments.iter_mut().flat_map(|segment| segment.takes.iter_mut().chain(&mut segment.gives)) {
            *of = later(*of);
        }
        for border in &mut split.borders {
            (border.from, border.to) = (later(border.from), later(border.to));
        }
        let own = ValueShape { layout: Layout::Split, ..split.values[2].clone() };
        for (at, name) in [(3, "q"), (4, "kv"), (5, "kv'")] {
            split.values.insert(at, value(name, &own));
        }
        split.segments[1] = segment("attend", &[3, 5], &[6], [300, 200, 0]);
        split.segments.insert(1, segment("project", &[2], &[3, 4], [200, 100, 0]));
        split.borders.insert(1, Border { from: 4, to: 5 });
    }
    for value in &mut split.values {
        let gathered = value.name == "kv'";
        value.context = if gathered { Layout::Replicated } else { Layout::Split };
        value.bytes = if gathered { value.bytes } else { value.bytes / cp };
    }
    if let Some(loss) = split.values.iter_mut().find(|value| value.name == "loss") {
        (loss.context, loss.bytes) = (Layout::Partial, 4);
    }
    let saved = |keep: usize| split.segments.iter().map(|segment| segment.saved_bytes[keep]).sum();
    unit.saved_bytes = [saved(0), saved(1), saved(2)];
    if unit.output_bytes > 0 {
        unit.output_bytes /= cp;
    }
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
        ValueShape { name: name.to_owned(), layout, bytes, ..ValueShape::default() }
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
        let small =
            |name: &str, layout, bytes| ValueShape { name: name.to_owned(), layout, bytes, ..ValueShape::default() };
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
