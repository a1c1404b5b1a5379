//! Tasks, blocks and panels: everything between a product's operands and the register kernels.
//!
//! Both operands are packed into 32-bit *words*: a word is one `f32` of the shared dimension, or
//! two `bf16` that are neighbours in it, which is what `vdpbf16ps` and `tdpbf16ps` consume, or four
//! codes of eight bits, for `vpdpbusd`. All rungs share the layout:
//!
//! - left, a panel of up to `mr` rows: row `i` is `a[i * A_STRIDE..][..kw]`, so that a register
//!   kernel addresses all rows from one pointer with constant offsets;
//! - right, a block of vector-wide panels: word row `k` of panel `p` is
//!   `b[p * panel + k * lanes..][..lanes]`;
//! - sums, `c[i * stride + j]` in `f32`, or in `i32` as the bits of an `f32` ([`super::int8`]).
//!
//! ```text
//! for task (rows x columns of the result)              dealt to the threads
//!     for block of <= 256 words of the shared dimension
//!         pack right block (256 x 768 words, 768 KiB)  stays in L2
//!         for panel of mr rows
//!             pack left panel (mr x 256 words)         stays in L1
//!             for tile of nr columns                   right panel streams from L2
//!                 register kernel
//!             last block: epilogue of the panel's rows
//! ```
//!
//! The cost of packing a word is divided by the up to 1,024 rows (right) or 768 columns (left)
//! that use it. A register kernel does 32 multiply-adds of `f32` a cycle and a packed word takes
//! 0.6, hence some 4 % of a large product, and as much again goes into the sums' way through
//! memory. Keeping weights packed between products would save 2 % at 1,024 rows, at the price of
//! two more copies of all weights (each form reduces over another dimension): they are packed each
//! time.
//!
//! So lines are asked for ahead of use: rows that are packed next ([`Ahead`]), and the sums of the
//! next tile. On Zen 4 either gives 2 to 3 % of products, on Emerald Rapids nothing. Measured worse
//! there: tasks of 512 x 512 (5 % of the peak), which fit L2 together with their sums, but pack
//! more often. Measured equal on Zen 4: blocks of 320 and 384 words, tasks of 512 or 640 columns
//! and of 2,048 rows.

use super::MatRef;
use super::epilogue::{Sink, finish};
use super::pack::{self, Factor};
use super::workspace::{HUGE_PAGE, WORKSPACE, Workspace};
use crate::cpu::isa::{has_amx_int8, has_vnni, pairs_are_fast};
use crate::cpu::threads::inside_region;
use crate::cpu::{Cpu, Isa};
use crate::dtype::DType;
#[cfg(test)]
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

/// Words of the shared dimension in a block.
pub(super) const BLOCK_WORDS: usize = 256;
/// Words from row to row of a packed left panel; off a power of two so that rows fall into
/// different cache sets.
pub(super) const A_STRIDE: usize = BLOCK_WORDS + 16;
/// Rows of the left operand that are packed at once, at most; see [`group_rows`].
const GROUP_ROWS_MAX: usize = 128;
/// The most columns of a task.
const TASK_COLS_MAX: usize = 768;
/// The most rows of a task.
const TASK_ROWS_MAX: usize = 1024;
/// Words from row to row of the sums' scratch, minus the task's columns; see `A_STRIDE`.
const C_PAD: usize = 16;
/// Bytes of a cache line.
const LINE: usize = 64;

/// A register kernel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Rung {
    /// `f32` in plain Rust.
    Portable,
    /// `f32` with AVX2 and FMA.
    Avx2,
    /// Codes of eight bits with AVX2, by `vpmaddubsw`.
    Avx2Int8,
    /// `f32` with AVX-512.
    Avx512,
    /// Codes of eight bits, four at a time, with `vpdpbusd`.
    Avx512Vnni,
    /// `bf16` pairs with `vdpbf16ps`.
    Avx512Bf16,
    /// `bf16` tiles with `tdpbf16ps`.
    AmxBf16,
    /// Tiles of codes of eight bits with `tdpbssd`.
    AmxInt8,
}

impl Rung {
    /// The register kernel that products of `dtype` use when the ladder goes up to `isa`.
    ///
    /// `f16`, and `bf16` below AVX-512 BF16, are widened when packed. So is `bf16` on Intel's CPUs
    /// without usable AMX: there `vdpbf16ps` issues every other cycle (measured: 87 GFLOP/s a core
    /// on Emerald Rapids) while two `f32` multiply-adds issue in each (178 GFLOP/s), so that
    /// widening is twice as fast. On Zen 4 it is the other way round.
    pub fn choose(isa: Isa, dtype: DType) -> Rung {
        match (isa, dtype) {
            // Odd depths take the way of vectors.
            (Isa::AmxBf16, DType::U8) if has_amx_int8() && has_vnni() => Rung::AmxInt8,
            (isa, DType::U8) if isa >= Isa::Avx512 && has_vnni() => Rung::Avx512Vnni,
            (Isa::Avx2, DType::U8) => Rung::Avx2Int8,
            (Isa::AmxBf16, DType::BF16) => Rung::AmxBf16,
            (Isa::Avx512Bf16, DType::BF16) if pairs_are_fast() => Rung::Avx512Bf16,
            (Isa::Portable, _) => Rung::Portable,
            (Isa::Avx2, _) => Rung::Avx2,
            _ => Rung::Avx512,
        }
    }

    /// The instruction that multiplies codes of eight bits, if there is one for them.
    pub fn name_of_codes(self) -> Option<&'static str> {
        match self {
            Rung::Avx2Int8 => Some("vpmaddubsw"),
            Rung::Avx512Vnni => Some("vpdpbusd"),
            Rung::AmxInt8 => Some("tdpbssd"),
            _ => None,
        }
    }

    /// Elements of a word: one that is an `f32`, two `bf16`, or four codes.
    pub(super) fn width(self) -> usize {
        match self {
            Rung::Portable | Rung::Avx2 | Rung::Avx512 => 1,
            Rung::Avx2Int8 | Rung::Avx512Vnni | Rung::AmxInt8 => 4,
            Rung::Avx512Bf16 | Rung::AmxBf16 => 2,
        }
    }

    /// Words of a right panel's row.
    pub(super) fn lanes(self) -> usize {
        if self < Rung::Avx512 { 8 } else { 16 }
    }

    /// Rows and columns of a register kernel's tile.
    pub(super) fn tile(self) -> (usize, usize) {
        match self {
            Rung::Portable => (4, 8),
            Rung::Avx2Int8 => (4, 16),
            Rung::Avx2 => (6, 16),
            Rung::Avx512 | Rung::Avx512Vnni | Rung::Avx512Bf16 => (14, 32),
            Rung::AmxBf16 | Rung::AmxInt8 => unreachable!("tiles have their own loop nest"),
        }
    }
}

/// A product's operand: a matrix of outer (row or column of the result) by shared index.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand<'a, T> {
    data: *const T,
    len: usize,
    pub stride: usize,
    /// True if the shared index is the contiguous one.
    pub along_k: bool,
    _data: PhantomData<&'a [T]>,
}

// SAFETY: a shared slice in other words.
unsafe impl<T: Sync> Sync for Operand<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Send for Operand<'_, T> {}

impl<'a, T> Operand<'a, T> {
    /// Outer index = row, shared index = column.
    pub fn rows(m: MatRef<'a, T>) -> Self {
        Operand { data: m.data.as_ptr(), len: m.data.len(), stride: m.stride, along_k: true, _data: PhantomData }
    }

    /// Outer index = column, shared index = row.
    pub fn cols(m: MatRef<'a, T>) -> Self {
        Operand { along_k: false, ..Self::rows(m) }
    }

    /// The address of an element, or of the end of the data for an empty part behind it.
    pub fn at(&self, outer: usize, k: usize) -> *const T {
        let offset = if self.along_k { outer * self.stride + k } else { k * self.stride + outer };
        // SAFETY: clamped to the slice.
        unsafe { self.data.add(offset.min(self.len)) }
    }
}

#[cfg(test)]
thread_local! {
    /// The register kernel for products that this thread asks for, whatever the instruction set.
    pub(super) static FORCED: Cell<Option<Rung>> = const { Cell::new(None) };
}

/// An upper bound on the scratch that products keep on `threads` threads, in bytes.
pub fn workspace_bytes(threads: usize) -> usize {
    let words = GROUP_ROWS_MAX * A_STRIDE
        + BLOCK_WORDS * TASK_COLS_MAX
        + (TASK_ROWS_MAX + GROUP_ROWS_MAX) * (TASK_COLS_MAX + C_PAD);
    #[cfg(target_arch = "x86_64")]
    let words = words.max(super::amx::WORKSPACE_WORDS);
    threads * (words * 4).next_multiple_of(HUGE_PAGE)
}

/// The cut of a product. All of it follows from the shapes and the number of threads.
#[derive(Clone, Copy, Debug)]
struct Cut {
    task_rows: usize,
    task_cols: usize,
    row_tasks: usize,
    col_tasks: usize,
    block_words: usize,
    blocks: usize,
}

/// The cost of a task's parts, in units of one multiply-add per word of the register kernel.
///
/// Measured on Emerald Rapids at 32 multiply-adds a cycle: packing takes 0.6 cycles a word on
/// either side, a finished sum one cycle, both mostly spent on the way from and to L3. A task takes
/// a microsecond to hand out.
#[derive(Clone, Copy, Debug)]
struct Prices {
    pack: f64,
    finish: f64,
    task: f64,
}

impl Prices {
    const MEASURED: Prices = Prices { pack: 20.0, finish: 32.0, task: 80_000.0 };

    fn task(&self, rows: usize, cols: usize, words: usize) -> f64 {
        let (rows, cols, words) = (rows as f64, cols as f64, words as f64);
        rows * cols * words + self.pack * (rows + cols) * words + self.finish * rows * cols + self.task
    }
}

impl Cut {
    fn new(rung: Rung, (m, n, k): (usize, usize, usize), threads: usize) -> Cut {
        let (mr, nr) = rung.tile();
        let words = k.div_ceil(rung.width());
        let blocks = words.div_ceil(BLOCK_WORDS).max(1);
        let block_words = words.div_ceil(blocks).next_multiple_of(16);
        let blocks = words.div_ceil(block_words.max(1)).max(1);

        // The grid whose slowest thread is done first, by the prices that `Prices` explains.
        let prices = Prices::MEASURED;
        let (rows_min, cols_min) = (m.div_ceil(TASK_ROWS_MAX), n.div_ceil(TASK_COLS_MAX));
        // A serial product gains nothing from more tasks; beyond four a thread, balance gains
        // nothing either.
        let finest = if threads == 1 { 1 } else { 4 * threads };
        let size = |len: usize, tasks: usize, tile: usize| len.div_ceil(tasks).next_multiple_of(tile);
        let mut best = (f64::INFINITY, 0, 0);
        for row_tasks in rows_min..=rows_min.max(finest) {
            for col_tasks in cols_min..=cols_min.max(finest / row_tasks) {
                let (rows, cols) = (size(m, row_tasks, mr), size(n, col_tasks, nr));
                let tasks = m.div_ceil(rows) * n.div_ceil(cols);
                let rounds = tasks.div_ceil(threads) as f64;
                // A thread that is held up delays the end by a part of a task.
                let price = prices.task(rows.min(m), cols, words) * (rounds + 0.1);
                if price < best.0 {
                    best = (price, rows, cols);
                }
            }
        }
        let (_, task_rows, task_cols) = best;
        Cut {
            task_rows,
            task_cols,
            row_tasks: m.div_ceil(task_rows),
            col_tasks: n.div_ceil(task_cols),
            block_words,
            blocks,
        }
    }
}

/// One of several products that run together.
pub(super) struct Product<'a, T, S> {
    /// Rows and columns of the result, and the length of the sums.
    pub shape: (usize, usize, usize),
    pub left: Operand<'a, T>,
    pub right: Operand<'a, T>,
    pub sink: S,
}

/// `sums[i, j] = Σ_k left[i, k] right[j, k]`, handed to `sink`: `m x n` sums of `k` products.
pub(super) fn product<T: Factor, S: Sink>(
    cpu: &Cpu,
    (m, n, k): (usize, usize, usize),
    left: Operand<T>,
    right: Operand<T>,
    sink: &S,
) {
    products(cpu, &[Product { shape: (m, n, k), left, right, sink }]);
}

/// [`product`] for each of `products`, whose results are disjoint. The tasks of all are dealt to
/// the threads together, so that no thread waits at the end of one.
pub(super) fn products<T: Factor, S: Sink>(cpu: &Cpu, products: &[Product<'_, T, &S>]) {
    assert!(cpu.isa <= Isa::detect(), "kernel form `{}` on a CPU that lacks it", cpu.isa);
    run(rung(cpu, T::DTYPE), cpu, products);
}

/// The register kernel of products of `dtype` on `cpu`.
pub(super) fn rung(cpu: &Cpu, dtype: DType) -> Rung {
    let rung = Rung::choose(cpu.isa, dtype);
    #[cfg(test)]
    let rung = FORCED.get().unwrap_or(rung);
    rung
}

/// The threads for which each of `count` products is cut. Many products are balanced by dealing
/// them out whole; inside a region the caller is alone.
pub(super) fn threads_each(cpu: &Cpu, count: usize) -> usize {
    if count < 4 * cpu.threads.hands() && !inside_region() { cpu.threads.hands() } else { 1 }
}

/// [`products`] with a given register kernel.
pub(super) fn run<T: Factor, S: Sink>(rung: Rung, cpu: &Cpu, products: &[Product<'_, T, &S>]) {
    let present = |product: &&Product<'_, T, &S>| product.shape.0 > 0 && product.shape.1 > 0;
    let count = products.iter().filter(present).count();
    if count == 0 {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if matches!(rung, Rung::AmxBf16 | Rung::AmxInt8) {
        return super::amx::products(cpu, products);
    }
    let threads = threads_each(cpu, count);
    let (mut total, mut cuts) = (0, Vec::with_capacity(count));
    for product in products.iter().filter(present) {
        // Tasks of a triangle are of unequal size: twice as many, the longest first, balance.
        let threads = if product.sink.lower() && threads > 1 { 2 * threads } else { threads };
        let cut = Cut::new(rung, product.shape, threads);
        total += cut.row_tasks * cut.col_tasks;
        cuts.push((product, cut, total));
    }
    cpu.threads.for_each(total, |task| {
        let number = cuts.partition_point(|(_, _, end)| *end <= task);
        let (product, cut, end) = &cuts[number];
        let task = task + cut.row_tasks * cut.col_tasks - end;
        let Product { shape: (m, n, k), left, right, sink } = **product;
        let (mut row, col) = (task % cut.row_tasks * cut.task_rows, task / cut.row_tasks * cut.task_cols);
        if sink.lower() {
            row = (cut.row_tasks - 1 - task % cut.row_tasks) * cut.task_rows;
        }
        let rows = cut.task_rows.min(m - row);
        let cols = wanted_columns(sink, row + rows, col, cut.task_cols.min(n - col));
        if cols == 0 {
            return;
        }
        let mut workspace = WORKSPACE.take();
        let part = Part { row, rows, col, cols, k };
        run_task(rung, cpu.isa, cut, part, left, right, sink, &mut workspace);
        WORKSPACE.set(workspace);
    });
}

/// Of `cols` columns from `col` on, those that rows before `end` need.
fn wanted_columns<S: Sink>(sink: &S, end: usize, col: usize, cols: usize) -> usize {
    if sink.lower() { end.saturating_sub(col).min(cols) } else { cols }
}

/// A task's part of the result, and the length of the sums.
#[derive(Clone, Copy)]
struct Part {
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
    k: usize,
}

fn run_task<T: Factor, S: Sink>(
    rung: Rung,
    isa: Isa,
    cut: &Cut,
    part: Part,
    left: Operand<T>,
    right: Operand<T>,
    sink: &S,
    workspace: &mut Workspace,
) {
    let (mr, nr) = rung.tile();
    let lanes = rung.lanes();
    let width = rung.width();
    let padded_cols = part.cols.next_multiple_of(nr);
    let c_stride = padded_cols + C_PAD;
    // With one block the sums of a panel are finished at once, and the next panel reuses their
    // place in L1.
    let c_rows = if cut.blocks == 1 { mr } else { part.rows.next_multiple_of(mr) };
    let group_rows = group_rows(rung, left.along_k);
    let (a, b, c) = workspace.parts(group_rows * A_STRIDE, padded_cols * cut.block_words, c_rows * c_stride);

    for block in 0..cut.blocks {
        // A sum of no products still goes through the kernels, as zero, and through the epilogue.
        let k = block * cut.block_words * width;
        let depth = (cut.block_words * width).min(part.k - k);
        let words = depth.div_ceil(width);
        // Panels are as long as the block's words, rounded up to whole tiles of 16; the rest is
        // zeros.
        let panel = words.next_multiple_of(16) * lanes;
        // SAFETY: `b` has room for `padded_cols` columns of `block_words`; the operand holds the
        // part.
        unsafe { pack::right(rung, &right, part.col, part.cols, padded_cols, k, depth, b) };

        for row in (0..part.rows).step_by(mr) {
            let rows = mr.min(part.rows - row);
            let in_group = row % group_rows;
            if in_group == 0 {
                let rows = group_rows.min(part.rows - row);
                // SAFETY: `a` has room for a group's rows of a block; the operand holds the part.
                unsafe { pack::left(rung, &left, part.row + row, rows, k, depth, a) };
            }
            let cols = wanted_columns(sink, part.row + row + rows, part.col, part.cols);
            if cols == 0 {
                continue;
            }
            // SAFETY: inside `a` and `c` by their sizes.
            let (a, c) =
                unsafe { (a.add(in_group * A_STRIDE), c.add(if cut.blocks == 1 { 0 } else { row * c_stride })) };
            if block == 0 && sink.seeded() {
                for i in 0..rows {
                    // SAFETY: row `i` of the panel's sums.
                    let sums = unsafe { std::slice::from_raw_parts_mut(c.add(i * c_stride), cols) };
                    sink.seed(part.row + row + i, part.col, sums);
                }
            }
            let add = block > 0 || sink.seeded();
            let group = |number: usize| part.row + (row - in_group + number * group_rows).min(part.rows);
            let next = Ahead::part(&left, group(1)..group(2), k..k + depth, in_group / mr, group_rows / mr);
            let tiles = Tiles { words, a, b, panel, c, c_stride, columns: cols.next_multiple_of(nr), add, next };
            // SAFETY: the parts have the sizes that the kernels expect, and `rung` is one of this
            // CPU's.
            unsafe { run_panel(rung, rows, &tiles) };
            if block + 1 == cut.blocks {
                // SAFETY: the panel's sums, and tasks own disjoint parts of the result.
                unsafe {
                    let sums = std::slice::from_raw_parts(c, (rows - 1) * c_stride + cols);
                    let sums = MatRef::with_stride(sums, rows, cols, c_stride);
                    finish(isa, sink, part.row + row, part.col, sums);
                }
            }
        }
    }
}

/// Rows of the left operand that are packed at once.
///
/// Rows along the shared index are packed a panel at a time. Where they run across memory, a panel
/// would read 28 to 64 bytes of each of 256 lines that may all fall into a few cache sets
/// (4,096-byte strides are common) and be gone when the next panel needs their rest; so several
/// panels are packed at once, and the kernels read them from L2.
fn group_rows(rung: Rung, along_k: bool) -> usize {
    let (mr, _) = rung.tile();
    if along_k { mr } else { GROUP_ROWS_MAX / mr * mr }
}

/// Asks for the cache line at `p`, which need not be mapped.
#[inline(always)]
pub(super) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that never faults; SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Asks L2 for the cache line at `p`, which need not be mapped.
#[inline(always)]
fn prefetch_into_l2(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as [`prefetch`].
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Memory that is packed next: it is asked for between the tiles of a panel, and so on its way to
/// L2 while they multiply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    start: *const u8,
    /// Bytes from row to row, rows, and cache lines of a row.
    stride: usize,
    rows: usize,
    lines: usize,
}

impl Ahead {
    /// Of the elements `outer` by `shared` of an operand, the one of `shares` equal parts that is
    /// number `share`.
    fn part<T: Factor>(
        src: &Operand<T>,
        outer: Range<usize>,
        shared: Range<usize>,
        share: usize,
        shares: usize,
    ) -> Ahead {
        let (rows, columns) = if src.along_k { (outer.len(), shared.len()) } else { (shared.len(), outer.len()) };
        let (from, to) = (rows * share / shares, rows * (share + 1) / shares);
        let (outer, k) =
            if src.along_k { (outer.start + from, shared.start) } else { (outer.start, shared.start + from) };
        let (start, stride) = (src.at(outer, k).cast::<u8>(), src.stride * size_of::<T>());
        let reach = if (start.addr() | stride).is_multiple_of(LINE) { 0 } else { LINE - 1 };
        let lines = if columns == 0 { 0 } else { (columns * size_of::<T>() + reach).div_ceil(LINE) };
        Ahead { start, stride, rows: to - from, lines }
    }

    /// Asks for the one of `shares` equal parts that is number `share`.
    #[inline(always)]
    pub fn ask(&self, share: usize, shares: usize) {
        let lines = self.rows * self.lines;
        for line in lines * share / shares..lines * (share + 1) / shares {
            prefetch_into_l2(self.start.wrapping_add(line / self.lines * self.stride + line % self.lines * LINE));
        }
    }
}

/// The parameters with which a register kernel runs along a panel of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    /// Words of the shared dimension.
    pub words: usize,
    /// The packed left panel.
    pub a: *const u32,
    /// The packed right block.
    pub b: *const u32,
    /// Words from one right panel to the next.
    pub panel: usize,
    /// The sums.
    pub c: *mut f32,
    /// Elements from row to row of the sums.
    pub c_stride: usize,
    /// Columns, a multiple of the tile's.
    pub columns: usize,
    /// True if the sums continue from the contents of `c`.
    pub add: bool,
    /// The lines to prefetch for the next panel.
    pub next: Ahead,
}

/// # Safety
/// `tiles` must address packed parts as this module's essay lays them out, and the CPU must have
/// the rung's instructions.
unsafe fn run_panel(rung: Rung, rows: usize, tiles: &Tiles) {
    // SAFETY: by this function's contract.
    unsafe {
        match rung {
            Rung::Portable => super::fma::portable(rows, tiles),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx2 => super::fma::avx2(rows, tiles),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx2Int8 => super::avx2_int8::panel(rows, tiles),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx512 => super::fma::avx512(rows, tiles),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx512Vnni => super::avx512_vnni::panel(rows, tiles),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx512Bf16 => super::avx512_bf16::panel(rows, tiles),
            _ => unreachable!("{rung:?} has its own loop nest, or belongs to another architecture"),
        }
    }
}
