//! Products of `bf16` on AMX tiles, with a loop nest of their own. Codes of eight bits take the
//! same way, two of them in the place of a `bf16`.
//!
//! Tiles multiply 16 times as fast as vectors do in `f32`, while caches and memory are no faster. A
//! core of Emerald Rapids multiplies 2.8 TFLOP/s, reads 120 GB/s from L2 but only 27 from L3, 150
//! ns away, and neither packing nor finishing overlaps with tile instructions by itself. The nest
//! therefore touches little beside its operands, and prefetches those in time
//! ([`super::tile_kernel`]):
//!
//! - The *left* operand is not packed if its rows run along the shared index (forward, input
//!   gradient): a tile is loaded from 16 rows in place. Only if they run across it (weight
//!   gradient) are 32 rows at a time transposed.
//! - The *right* operand is packed into panels of 32 columns, as many as stay in L2
//!   ([`RESIDENT_STEPS`]). The cost is divided by the rows of the task.
//! - *Sums* stay in the tiles until they are finished, up to [`DEPTH_MAX`] steps of the shared
//!   dimension. A block of 32 x 32 is finished from L1, beside the products of the next one. Weight
//!   gradients, whose sums are `f32` in memory, continue there instead: their shared dimension, the
//!   tokens, is cut shorter ([`IN_PLACE_DEPTH_MAX`]) so that more columns fit L2 and fewer
//!   transpositions are needed.
//!
//! ```text
//! for task (rows x columns of the result)       dealt to the threads; an idle one joins a task
//!     for block of the shared dimension         usually one
//!         pack the right columns                up to 0.84 MiB, stay in L2
//!         for panel of 32 rows                  claimed by the threads that share the task
//!             for panel of 32 columns           from L2
//!                 tile kernel                   32 x 32 sums; prefetches result lines and the
//!                                               next rows, finishes the block before
//! ```

use super::claims::Claims;
use super::driver::{Product, threads_each};
use super::epilogue::{Sink, Target};
use super::pack::Factor;
use super::tile_kernel::{Ahead, Left, Pending, Sums, multiply};
use super::tiles::{PANEL, Role, STEP, STEP_BYTES, STEP_WORDS, Source};
use super::workspace::{WORKSPACE, Workspace};
use crate::cpu::Cpu;
use crate::cpu::amx::Tiles;
use crate::dtype::DType;
use std::ops::Range;

/// The most steps of a block of the shared dimension, 3,072 indices: the packed columns of three
/// panels then fill half of L2.
const DEPTH_MAX: usize = 96;
/// The same where sums continue in memory: 512 indices.
const IN_PLACE_DEPTH_MAX: usize = 16;
/// Steps of all packed right panels together: 0.84 MiB of a 2 MiB L2, which also holds two left
/// panels and lines of the result, and may have a neighbour on the core's other hyperthread.
const RESIDENT_STEPS: usize = 432;
/// The most right panels of a task.
const RESIDENT_MAX: usize = 24;
/// Words of a block of sums.
const BLOCK_WORDS: usize = PANEL * PANEL;
/// The most blocks of sums that wait for the rest of the shared dimension: 768 KiB.
const WAITING_MAX: usize = 192;

/// Rows that must be left for a thread to join a task: fewer are done sooner than the columns are
/// packed.
const JOIN_MIN: usize = 8;

/// An upper bound on the words of scratch that a thread needs.
pub(super) const WORKSPACE_WORDS: usize = (DEPTH_MAX + RESIDENT_STEPS) * STEP_WORDS + (WAITING_MAX + 2) * BLOCK_WORDS;

/// The cut of a product, in panels and steps.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Left panels of a task, and tasks along them.
    rows: usize,
    row_tasks: usize,
    /// Right panels of a task, and tasks along them.
    cols: usize,
    col_tasks: usize,
    /// Steps of a block, and blocks.
    depth: usize,
    blocks: usize,
    /// True if threads may share a task's rows. If sums wait for the next block in a thread's
    /// scratch, only that thread may continue them.
    shares: bool,
}

impl Cut {
    /// The grid that is done first, by what the parts of a task cost in cycles (measured on Emerald
    /// Rapids).
    fn new(left: &Source, right: &Source, in_place: bool, threads: usize) -> Cut {
        let (rows, cols, steps) = (left.panels(), right.panels(), left.steps());
        let blocks = steps.div_ceil(if in_place { IN_PLACE_DEPTH_MAX } else { DEPTH_MAX }).max(1);
        let depth = steps.div_ceil(blocks).max(1);
        let blocks = steps.div_ceil(depth).max(1);
        let shares = in_place || blocks == 1;
        let cols_max = (RESIDENT_STEPS / depth).min(RESIDENT_MAX).min(cols);
        let (pack_left, pack_right) =
            (if left.is_transposed() { 700 } else { 60 }, if right.is_transposed() { 300 } else { 200 });
        let finish = if in_place { 500 * blocks } else { 350 * (2 * blocks - 1) };
        let finest = if threads == 1 { 1 } else { 4 * threads };
        let mut best = (f64::INFINITY, 1, 1);
        let cols_min = cols.div_ceil(cols_max);
        for col_tasks in cols_min..=cols_min.max(finest) {
            let c = cols.div_ceil(col_tasks);
            let rows_max = if shares { rows } else { (WAITING_MAX / c).min(rows) };
            let rows_min = rows.div_ceil(rows_max);
            for row_tasks in rows_min..=rows_min.max(finest.div_ceil(col_tasks)) {
                let r = rows.div_ceil(row_tasks);
                let tasks = rows.div_ceil(r) * cols.div_ceil(c);
                let multiply = steps * 85 + finish;
                let task = (r * c * multiply + (pack_left * r + pack_right * c) * steps + 5_000) as f64;
                let price = if shares {
                    // All threads end with the last row, and all but one have joined a task by
                    // then.
                    let joined = ((threads - 1) * pack_right * c * steps) as f64;
                    (task * tasks as f64 + joined) / threads as f64 + (c * multiply) as f64
                } else {
                    task * (tasks.div_ceil(threads) as f64 + 0.1)
                };
                if price < best.0 {
                    best = (price, r, c);
                }
            }
        }
        let (_, r, c) = best;
        Cut { rows: r, row_tasks: rows.div_ceil(r), cols: c, col_tasks: cols.div_ceil(c), depth, blocks, shares }
    }
}

/// `sums[i, j] = Σ_k left[i, k] right[j, k]`, handed to its sink, for each product.
pub(super) fn products<T: Factor, S: Sink>(cpu: &Cpu, products: &[Product<'_, T, &S>]) {
    let multiplies = if S::INTEGER { DType::U8 } else { DType::BF16 };
    assert!(T::DTYPE == multiplies, "tiles multiply {multiplies} for this sink, not {}", T::DTYPE);
    let hands = cpu.threads.hands();
    let present = || products.iter().filter(|product| product.shape.0 > 0 && product.shape.1 > 0);
    let threads = threads_each(cpu, present().count());
    let mut sharing = 1;
    let mut tasks: Vec<Task<'_, S>> = Vec::new();
    for product in present() {
        let (m, n, k) = product.shape;
        let (left, right) =
            (Source::new(Role::Left, &product.left, m, k), Source::new(Role::Right, &product.right, n, k));
        let cut = Cut::new(&left, &right, product.sink.in_place(), threads);
        let hands = if cut.shares { hands } else { 1 };
        sharing = sharing.max(hands);
        for task in 0..cut.row_tasks * cut.col_tasks {
            let left = left.panel_range(task % cut.row_tasks * cut.rows, cut.rows);
            let right = right.panel_range(task / cut.row_tasks * cut.cols, cut.cols);
            let claims = Claims::new(left.panels(), cut.blocks, hands);
            let (depth, blocks, shares) = (cut.depth, cut.blocks, cut.shares);
            tasks.push(Task { depth, blocks, shares, left, right, sink: product.sink, claims });
        }
    }
    let run = |task: &Task<'_, S>| {
        let mut workspace = WORKSPACE.take();
        // SAFETY: the caller chose this rung because the CPU has it; tasks own disjoint parts of
        // the result.
        unsafe {
            let _tiles = Tiles::configure();
            task.run(&mut workspace);
        }
        WORKSPACE.set(workspace);
    };
    // All but the thread with the last task share one when none is left.
    cpu.threads.for_each(tasks.len() + sharing - 1, |index| match tasks.get(index) {
        Some(task) => run(task),
        None => {
            let fullest = || tasks.iter().filter(|task| task.shares).max_by_key(|task| task.claims.unclaimed());
            while let Some(task) = fullest().filter(|task| task.claims.unclaimed() >= JOIN_MIN) {
                run(task);
            }
        }
    });
}

/// A part of the result.
struct Task<'a, S> {
    /// Steps of a block, and blocks.
    depth: usize,
    blocks: usize,
    /// True if threads may share its rows.
    shares: bool,
    left: Source<'a>,
    right: Source<'a>,
    sink: &'a S,
    claims: Claims,
}

/// The data that a thread keeps while it runs a task.
struct Scratch {
    /// A packed panel of rows, and all packed columns of a block.
    left: *mut u32,
    right: *mut u32,
    /// Blocks of sums: two in turn, or all that wait.
    sums: *mut f32,
    turn: usize,
    /// The block whose sums are finished beside the next one's products.
    pending: Option<Pending>,
}

impl<S: Sink> Task<'_, S> {
    /// Does rows of the task until all are claimed. Several threads may run a task whose sums do
    /// not wait in scratch from block to block.
    ///
    /// # Safety
    /// The CPU must have AMX bf16, granted by the operating system; no other task may write the
    /// same part of the result.
    unsafe fn run(&self, workspace: &mut Workspace) {
        let (rows, cols, depth) = (self.left.panels(), self.right.panels(), self.depth);
        let waiting = if self.sums_wait() { rows * cols } else { 0 };
        let (left, right, sums) =
            workspace.parts(depth * STEP_WORDS, cols * depth * STEP_WORDS, (waiting + 2) * BLOCK_WORDS);
        let mut scratch = Scratch { left, right, sums, turn: 0, pending: None };
        for block in 0..self.blocks {
            let mut is_packed = false;
            while let Some(claim) = self.claims.claim(block) {
                if !std::mem::replace(&mut is_packed, true) {
                    // SAFETY: there is room for all columns of a block.
                    unsafe { self.right.pack_all(self.steps(block), right, depth * STEP_WORDS) };
                    if block > 0 {
                        self.claims.wait(block - 1);
                    }
                }
                for p in claim.rows.clone() {
                    // SAFETY: by contract; the columns are packed, and the claimed rows nobody
                    // else's.
                    unsafe { self.panel(p, block, &mut scratch) };
                }
                if let Some(pending) = scratch.pending.take() {
                    // SAFETY: its sums are in a block of scratch.
                    unsafe { pending.finish(self.sink) };
                }
            }
        }
    }

    /// The steps of a block.
    fn steps(&self, block: usize) -> Range<usize> {
        block * self.depth..self.left.steps().min((block + 1) * self.depth)
    }

    /// True if sums wait in scratch for the next block of the shared dimension.
    fn sums_wait(&self) -> bool {
        self.blocks > 1 && !self.sink.in_place()
    }

    /// Multiplies the rows of panel `p` with all columns, over a block of the shared dimension.
    ///
    /// # Safety
    /// As [`Task::run`]; the block's columns must be packed, and no other thread at work on the
    /// panel.
    unsafe fn panel(&self, p: usize, block: usize, scratch: &mut Scratch) {
        let (cols, range) = (self.right.panels(), self.steps(block));
        let (first, last) = (block == 0, block + 1 == self.blocks);
        // SAFETY: there is room for a left panel of a block.
        let left = unsafe { self.left_panel(p, range.clone(), scratch.left) };
        for q in 0..cols {
            let (block_rows, block_cols) = (self.left.outer_range(p), self.right.outer_range(q));
            let whole = block_rows.len() == PANEL && block_cols.len() == PANEL;
            let target = whole.then(|| self.sink.target(block_rows.start, block_cols.start));
            let ahead = self.ahead(p, q, range.clone());
            let in_place = whole && self.sink.in_place();
            let sums = if let (true, Some(target)) = (in_place, &target) {
                let add = !first || self.sink.seeded();
                Sums { at: target.first.cast_mut().cast(), stride: target.stride / 4, add }
            } else {
                scratch.turn = 1 - scratch.turn;
                let at = if self.sums_wait() { p * cols + q } else { scratch.turn };
                let at = scratch.sums.wrapping_add(at * BLOCK_WORDS);
                let seeded = self.sink.in_place() && (!first || self.sink.seeded());
                if seeded {
                    // SAFETY: a block of scratch, whose last content has been finished.
                    unsafe { self.seed(&block_rows, &block_cols, at) };
                }
                Sums { at, stride: PANEL, add: seeded || !first }
            };
            let asked = if in_place { self.next_target(p, q) } else { target.filter(|_| last) };
            // SAFETY: both panels hold the block's steps; sums are a block of scratch, or 32 x 32
            // of the task's own part of the result.
            unsafe {
                let b = scratch.right.add(q * self.depth * STEP_WORDS).cast();
                let beside = scratch.pending.take_if(|pending| pending.cols.len() == PANEL);
                multiply(&left, b, range.len(), &sums, asked.as_ref(), &ahead, beside.as_ref(), self.sink);
            }
            // A narrow one is rare and finished by itself.
            if let Some(narrow) = scratch.pending.take() {
                // SAFETY: its sums are in the other block of scratch.
                unsafe { narrow.finish(self.sink) };
            }
            if !in_place && (last || self.sink.in_place()) {
                scratch.pending = Some(Pending { rows: block_rows, cols: block_cols, sums: sums.at });
            }
        }
    }

    /// The left rows of panel `p`: as they lie where tiles can be loaded from them, else packed
    /// into `a`.
    ///
    /// # Safety
    /// `a` must have room for the steps.
    unsafe fn left_panel(&self, p: usize, steps: Range<usize>, a: *mut u32) -> Left {
        if let Some((rows, stride)) = self.left.direct(p, steps.clone()) {
            return Left { rows, lower: rows.wrapping_add(16 * stride), stride, step: 2 * STEP };
        }
        // SAFETY: by contract.
        unsafe { self.left.pack(p, steps, a) };
        let rows: *const u8 = a.cast();
        Left { rows, lower: rows.wrapping_add(STEP_BYTES / 2), stride: 64, step: STEP_BYTES }
    }

    /// The lines of the left panel after `p` to prefetch while it meets right panel `q`.
    fn ahead(&self, p: usize, q: usize, steps: Range<usize>) -> Ahead {
        let (count, cols) = (steps.len(), self.right.panels());
        // A panel has 32 lines for each step.
        let lines = PANEL.div_ceil(cols).min(8);
        let nothing = Ahead { lines: 0, first: self.left.line(p, steps.clone(), 0).0, apart: 0, step: 0 };
        if p + 1 >= self.left.panels() || q * lines >= PANEL {
            return nothing;
        }
        // Along the shared index a row has a line for each step; across it, each shared index is a
        // line.
        let (apart, step, first) = if self.left.is_transposed() {
            let (first, stride) = self.left.line(p + 1, steps, q * lines * count);
            (stride, lines * stride, first)
        } else {
            let (first, stride) = self.left.line(p + 1, steps, q * lines);
            (stride, 2 * STEP, first)
        };
        Ahead { lines, first, apart, step }
    }

    /// Where the block after this one continues its sums in memory.
    fn next_target(&self, p: usize, q: usize) -> Option<Target> {
        let (p, q) = if q + 1 < self.right.panels() { (p, q + 1) } else { (p + 1, 0) };
        let (rows, cols) = (self.left.outer_range(p), self.right.outer_range(q));
        (p < self.left.panels() && rows.len() == PANEL && cols.len() == PANEL)
            .then(|| self.sink.target(rows.start, cols.start))
    }

    /// # Safety
    /// `sums` must be a block.
    unsafe fn seed(&self, rows: &Range<usize>, cols: &Range<usize>, sums: *mut f32) {
        for (i, row) in rows.clone().enumerate() {
            // SAFETY: by contract.
            self.sink.seed(row, cols.start, unsafe { std::slice::from_raw_parts_mut(sums.add(i * PANEL), cols.len()) });
        }
    }
}
