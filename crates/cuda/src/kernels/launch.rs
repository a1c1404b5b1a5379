//! The size of a launch: grid, block, dynamic shared memory, from the sizes of the work.
//!
//! Nothing here asks the device: grids depend on shapes alone, so that sums have the same order on
//! every GPU.

/// The size of a launch. Blocks have one dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory; above 48 KiB the function's limit must be raised first
    /// (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`).
    pub shared: u32,
}

/// The meaning of a kernel's blocks. The comments describe the `sizes` of [`Rule::launch`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// `[elements, 1, 1]`: 8 elements a thread.
    Elements,
    /// `[rows, columns, 1]`: a block a row.
    Rows,
    /// `[rows, columns, 1]`: [`row_blocks`] blocks, each of consecutive rows, with so many f32 of
    /// shared memory a column.
    RowBlocks(u32),
    /// `[rows, columns, 1]`: as `RowBlocks`, but so many f32 a column for each warp where rows are
    /// short.
    NormBackward(u32),
    /// `[elements, 1, 1]`: 32 elements a block.
    Narrow,
    /// `[units, 1, 1]`: a warp a unit.
    Warps,
    /// `[outer, rows, columns]`: for each outer position and band of 256 columns, [`row_blocks`]
    /// blocks of rows.
    Columns,
    /// `[elements, chunk, 1]`: a block a chunk.
    Chunks,
    /// Any sizes: one block.
    One,
    /// `[outer, indices, inner]`: a block for each outer position and index.
    Indices,
    /// `[tokens, heads, head_dim]`: a block for each head and so many rows.
    Tiles {
        /// Rows of a tile.
        rows: u32,
        /// Threads of a block.
        threads: u32,
        /// Bytes of dynamic shared memory.
        shared: u32,
        /// And so many for each column of a head.
        shared_a_column: u32,
    },
    /// `[tokens, heads, head_dim]`: a block for each token and head.
    Queries,
    /// `[rows, columns, 1]`: a block for each tile of 64 by 64.
    Squares,
    /// `[rows, columns, groups]`: a block for each tile of 128 by 128, and one more of rows for
    /// each group, because groups end inside tiles.
    Ragged(u32),
    /// `[rows, columns, weights]`: a block for each tile of 128 by 128 of each weight. Both have so
    /// many bytes of shared memory.
    RaggedSquares(u32),
}

/// Blocks into which `rows` rows are cut where sums over rows are made block by block: the first
/// dimension of their `partials`.
pub fn row_blocks(rows: usize) -> usize {
    rows.div_ceil(rows.div_ceil(512).max(16)).max(1)
}

/// Columns up to which the gradients of norms are made by a warp a row; as in `norm.cu`.
const SHORT_ROW: usize = 1024;
/// Rows and columns of a tile of ragged products; as in `experts.cu`.
const SIDE: usize = 128;
/// Columns of a band.
const BAND: usize = 256;

impl Rule {
    /// The launch for these sizes; None when there is nothing to do, because one of them is 0.
    pub fn launch(self, sizes: [usize; 3]) -> Option<Launch> {
        if sizes.contains(&0) {
            return None;
        }
        let [a, b, c] = sizes;
        let launch = |grid: [usize; 3], block: u32, shared: u32| Launch { grid: grid.map(|n| n as u32), block, shared };
        Some(match self {
            Rule::Elements => launch([a.div_ceil(8 * 256), 1, 1], 256, 0),
            Rule::Rows => launch([a, 1, 1], threads_of_row(b), 0),
            Rule::RowBlocks(floats) => launch([row_blocks(a), 1, 1], 256, 4 * floats * b as u32),
            Rule::NormBackward(floats) => {
                let teams = if b <= SHORT_ROW { 8 } else { 1 };
                launch([row_blocks(a), 1, 1], 256, 4 * floats * (teams * b.next_multiple_of(8)) as u32)
            }
            Rule::Narrow => launch([a.div_ceil(32), 1, 1], 256, 0),
            Rule::Warps => launch([a.div_ceil(4), 1, 1], 128, 0),
            Rule::Columns => launch([a * c.div_ceil(BAND), row_blocks(b), 1], 256, 0),
            Rule::Chunks => launch([a.div_ceil(b), 1, 1], 256, 0),
            Rule::One => launch([1, 1, 1], 256, 0),
            Rule::Indices => launch([a * b, 1, 1], 256, 0),
            Rule::Tiles { rows, threads, shared, shared_a_column } => {
                launch([a.div_ceil(rows as usize), b, 1], threads, shared + shared_a_column * c as u32)
            }
            Rule::Squares => launch([a.div_ceil(64) * b.div_ceil(64), 1, 1], 256, 0),
            Rule::Queries => launch([a, b, 1], 128, 0),
            Rule::Ragged(shared) => launch([a.div_ceil(SIDE) + c, b.div_ceil(SIDE), 1], 256, shared),
            Rule::RaggedSquares(shared) => launch([a.div_ceil(SIDE), b.div_ceil(SIDE), c], 256, shared),
        })
    }
}

/// A thread for eight columns, in whole warps.
fn threads_of_row(columns: usize) -> u32 {
    (columns.div_ceil(8).next_multiple_of(32)).clamp(32, 512) as u32
}
