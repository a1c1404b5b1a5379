//! Products of `bf16` on AMX tiles, with a loop nest of their own.
//!
//! `tdpbf16ps c, a, b` adds to the 16 x 16 `f32` sums in tile `c` the products of 16 rows of 32 `bf16` in `a` with 16 rows of 16
//! pairs in `b`: 8,192 multiply-adds in 16 cycles, 16 times what a core does in `f32`, while caches and memory stay as fast as they
//! were. What the other rungs can afford costs more than the arithmetic here: sums that go through memory once per block of the
//! shared dimension, and phases in which operands are packed or sums are finished while the tile unit waits. Hence:
//!
//! - *Panels.* Both operands are packed into panels of 32 rows (left) or columns (right). A panel is a sequence of *steps* of 32
//!   shared indices; a step is two tiles, 2 KiB without gaps ([`super::tiles`]). Four accumulators, 32 x 32 sums, make each loaded tile
//!   serve twice; a step is four tile loads and four `tdpbf16ps`.
//! - *Depth.* A block has up to [`DEPTH_MAX`] steps, 1,024 shared indices, so that the sums of most products of a small model never leave
//!   the tiles before they are finished.
//! - *Resident and streamed.* The panels of one operand stay in L2, those of the other pass by. The operand that must be transposed
//!   to be packed is the resident one, because it is packed least often.
//! - *Strips.* The sums of a streamed panel are finished together, so that rows of the result are written in long pieces.
//!
//! ```text
//! for task (rows x columns of the result)                 dealt to the threads
//!     for block of <= 32 steps of the shared dimension
//!         for streamed panel                              packed on arrival
//!             for resident panel                          up to 1 MiB of them, in L2; packed while the first one passes
//!                 tile kernel                             32 x 32 sums in four tiles
//!             last block: epilogue of the strip
//! ```

use super::MatRef;
use super::driver::Operand;
use super::epilogue::Sink;
use super::tiles::{PANEL, Role, STEP, STEP_WORDS, Source};
use super::workspace::{WORKSPACE, Workspace};
use crate::cpu::amx::Tiles;
use crate::cpu::{Cpu, Isa};
use crate::dtype::{DType, Element};
use std::arch::asm;
use std::ops::Range;

/// The most steps of a block: a streamed panel then takes 64 KiB.
const DEPTH_MAX: usize = 32;
/// The most steps of all resident panels together: 1 MiB, half of an L2 cache.
const RESIDENT_STEPS_MAX: usize = 512;
/// The most resident panels: a strip of sums then takes 128 KiB.
const RESIDENT_MAX: usize = 32;
/// The most words of a task's sums where they go through memory: 2 MiB.
const SUMS_MAX: usize = 512 * 1024;
/// Words that keep the rows of a strip out of each other's cache sets.
const STRIP_PAD: usize = 16;

/// An upper bound on the words of scratch that a thread needs.
pub(super) const WORKSPACE_WORDS: usize = (DEPTH_MAX + RESIDENT_STEPS_MAX) * STEP_WORDS + SUMS_MAX;

/// How a product is cut, in panels and steps.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Resident panels of a task, and tasks along them.
    resident: usize,
    resident_tasks: usize,
    /// Streamed panels of a task, and tasks along them.
    streamed: usize,
    streamed_tasks: usize,
    /// Steps of a block.
    depth: usize,
    blocks: usize,
}

impl Cut {
    /// The grid whose slowest thread is done first, by what the parts of a task cost in cycles.
    ///
    /// A block of sums takes some 80 cycles a step; packing a step takes about 100 where it is transposed, else 40; 32 x 32 sums that go
    /// through L3 once more take 1,500; a task takes a few microseconds to start.
    fn new(resident: usize, streamed: usize, steps: usize, threads: usize) -> Cut {
        let blocks = steps.div_ceil(DEPTH_MAX).max(1);
        let depth = steps.div_ceil(blocks).max(1);
        let resident_max = (RESIDENT_STEPS_MAX / depth).min(RESIDENT_MAX).min(resident);
        let finest = 4 * threads;
        let mut best = (f64::INFINITY, 1, 1);
        let resident_min = resident.div_ceil(resident_max);
        for resident_tasks in resident_min..=resident_min.max(finest) {
            let r = resident.div_ceil(resident_tasks);
            let streamed_max = if blocks == 1 { streamed } else { SUMS_MAX / strip_words(r) };
            let streamed_min = streamed.div_ceil(streamed_max);
            for streamed_tasks in streamed_min..=streamed_min.max(finest / resident_tasks) {
                let s = streamed.div_ceil(streamed_tasks);
                let rounds = (resident.div_ceil(r) * streamed.div_ceil(s)).div_ceil(threads);
                let through_memory = (blocks - 1) * r * s * 1500;
                let task = r * s * steps * 80 + (100 * r + 40 * s) * steps + through_memory + r * s * 100 + 10_000;
                let price = task as f64 * (rounds as f64 + 0.1);
                if price < best.0 {
                    best = (price, r, s);
                }
            }
        }
        let (_, r, s) = best;
        let (resident_tasks, streamed_tasks) = (resident.div_ceil(r), streamed.div_ceil(s));
        Cut { resident: r, resident_tasks, streamed: s, streamed_tasks, depth, blocks }
    }
}

/// `sums[i, j] = Σ_k left[i, k] right[j, k]`, handed to `sink`: `m x n` sums of `k` products.
pub(super) fn product<T: Element, S: Sink>(
    cpu: &Cpu,
    (m, n, k): (usize, usize, usize),
    left: Operand<T>,
    right: Operand<T>,
    sink: &S,
) {
    assert!(T::DTYPE == DType::BF16, "tiles multiply bf16, not {}", T::DTYPE);
    let (left, right) = (Source::new(Role::Left, &left, m, k), Source::new(Role::Right, &right, n, k));
    let resident_role = if left.is_transposed() { Role::Left } else { Role::Right };
    let (resident, streamed) = if resident_role == Role::Left { (left, right) } else { (right, left) };
    let cut = Cut::new(resident.panels(), streamed.panels(), k.div_ceil(STEP), cpu.threads.count());
    cpu.threads.for_each(cut.resident_tasks * cut.streamed_tasks, |task| {
        let first = (task / cut.streamed_tasks * cut.resident, task % cut.streamed_tasks * cut.streamed);
        let mut workspace = WORKSPACE.take();
        // SAFETY: the caller chose this rung because the CPU has it; tasks own disjoint parts of the result.
        unsafe {
            let task = Task {
                isa: cpu.isa,
                cut,
                resident: resident.panel_range(first.0, cut.resident),
                streamed: streamed.panel_range(first.1, cut.streamed),
                sink,
            };
            let _tiles = Tiles::configure();
            task.run(&mut workspace);
        }
        WORKSPACE.set(workspace);
    });
}

/// A part of the result.
struct Task<'a, S> {
    isa: Isa,
    cut: Cut,
    resident: Source<'a>,
    streamed: Source<'a>,
    sink: &'a S,
}

impl<S: Sink> Task<'_, S> {
    /// # Safety
    /// The CPU must have AMX bf16, granted by the operating system; no other task may write the same part of the result.
    unsafe fn run(&self, workspace: &mut Workspace) {
        let Cut { depth, blocks, .. } = self.cut;
        let (resident_panels, streamed_panels) = (self.resident.panels(), self.streamed.panels());
        let steps = self.resident.steps();
        // With one block the sums of a strip are finished at once, and the next strip reuses their place.
        let strips = if blocks == 1 { 1 } else { streamed_panels };
        let panel_words = depth * STEP_WORDS;
        let (streamed, resident, sums) =
            workspace.parts(panel_words, resident_panels * panel_words, strips * strip_words(resident_panels));
        for block in 0..blocks {
            let first = block * depth;
            let steps = first..steps.min(first + depth);
            for p in 0..streamed_panels {
                // SAFETY: scratch has room for a streamed and all resident panels and for the strips; the rest by contract.
                unsafe {
                    let strip = self.strip(p, sums.add(p % strips * strip_words(resident_panels)));
                    if block == 0 && self.sink.seeded() {
                        strip.seed(self.sink);
                    }
                    self.streamed.pack(p, steps.clone(), streamed);
                    for q in 0..resident_panels {
                        let resident = resident.add(q * panel_words);
                        if p == 0 {
                            self.resident.pack(q, steps.clone(), resident);
                        }
                        let (a, b, c) = match self.resident.role() {
                            Role::Left => (resident, streamed, strip.sums.add(q * PANEL * strip.stride)),
                            Role::Right => (streamed, resident, strip.sums.add(q * PANEL)),
                        };
                        multiply(a, b, steps.len(), c, strip.stride, block > 0 || self.sink.seeded());
                    }
                    if block + 1 == blocks {
                        strip.finish(self.isa, self.sink);
                    }
                }
            }
        }
    }

    /// The strip where a streamed panel meets all resident ones.
    fn strip(&self, p: usize, sums: *mut f32) -> Strip {
        let (streamed, resident) = (self.streamed.outer_range(p), self.resident.all());
        match self.resident.role() {
            Role::Left => Strip { rows: resident, cols: streamed, stride: PANEL, sums },
            Role::Right => {
                let stride = resident.len().next_multiple_of(PANEL) + STRIP_PAD;
                Strip { rows: streamed, cols: resident, stride, sums }
            }
        }
    }
}

/// The words of a strip's sums.
const fn strip_words(resident_panels: usize) -> usize {
    PANEL * (resident_panels * PANEL + STRIP_PAD)
}

/// A row or a column of blocks of sums.
struct Strip {
    rows: Range<usize>,
    cols: Range<usize>,
    /// Row-major, in whole blocks.
    sums: *mut f32,
    stride: usize,
}

impl Strip {
    /// # Safety
    /// The sums must be valid and the part inside the result.
    unsafe fn seed(&self, sink: &impl Sink) {
        for (i, row) in self.rows.clone().enumerate() {
            // SAFETY: by contract.
            let sums = unsafe { std::slice::from_raw_parts_mut(self.sums.add(i * self.stride), self.cols.len()) };
            sink.seed(row, self.cols.start, sums);
        }
    }

    /// Hands the sums to the sink.
    ///
    /// # Safety
    /// The sums must be valid and the part inside the result, without another that writes it at the same time.
    unsafe fn finish(&self, isa: Isa, sink: &impl Sink) {
        let (rows, cols) = (self.rows.len(), self.cols.len());
        // SAFETY: by contract.
        unsafe {
            let sums = std::slice::from_raw_parts(self.sums, (rows - 1) * self.stride + cols);
            sink.finish(isa, self.rows.start, self.cols.start, MatRef::with_stride(sums, rows, cols, self.stride));
        }
    }
}

/// Adds the products of two panels to 32 x 32 sums, or sets the sums to them.
///
/// Both panels are asked for one step ahead: a tile load waits for its lines.
///
/// # Safety
/// Tiles must be configured; `a` and `b` must hold the steps, and `c` 32 rows of 32 sums, `stride` apart.
unsafe fn multiply(a: *const u32, b: *const u32, steps: usize, c: *mut f32, stride: usize, add: bool) {
    // SAFETY: by contract; prefetches may leave the panels.
    unsafe {
        asm!(
            "test {add}, {add}",
            "jz 3f",
            "tileloadd tmm0, [{c} + {stride}*1]", "tileloadd tmm1, [{c} + {stride}*1 + 64]",
            "tileloadd tmm2, [{d} + {stride}*1]", "tileloadd tmm3, [{d} + {stride}*1 + 64]",
            "jmp 4f",
            "3:",
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "4:",
            "test {steps}, {steps}",
            "jz 5f",
            "2:",
            "tileloadd tmm4, [{a} + {row}*1]",
            "tileloadd tmm6, [{b} + {row}*1]",
            "prefetcht0 [{b} + 2048]", "prefetcht0 [{b} + 2112]",
            "prefetcht0 [{b} + 2176]", "prefetcht0 [{b} + 2240]",
            "prefetcht0 [{b} + 2304]", "prefetcht0 [{b} + 2368]",
            "prefetcht0 [{b} + 2432]", "prefetcht0 [{b} + 2496]",
            "prefetcht0 [{a} + 2048]", "prefetcht0 [{a} + 2112]",
            "prefetcht0 [{a} + 2176]", "prefetcht0 [{a} + 2240]",
            "prefetcht0 [{a} + 2304]", "prefetcht0 [{a} + 2368]",
            "prefetcht0 [{a} + 2432]", "prefetcht0 [{a} + 2496]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {row}*1 + 1024]",
            "prefetcht0 [{b} + 2560]", "prefetcht0 [{b} + 2624]",
            "prefetcht0 [{b} + 2688]", "prefetcht0 [{b} + 2752]",
            "prefetcht0 [{b} + 2816]", "prefetcht0 [{b} + 2880]",
            "prefetcht0 [{b} + 2944]", "prefetcht0 [{b} + 3008]",
            "prefetcht0 [{a} + 2560]", "prefetcht0 [{a} + 2624]",
            "prefetcht0 [{a} + 2688]", "prefetcht0 [{a} + 2752]",
            "prefetcht0 [{a} + 2816]", "prefetcht0 [{a} + 2880]",
            "prefetcht0 [{a} + 2944]", "prefetcht0 [{a} + 3008]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {row}*1 + 1024]",
            "prefetcht0 [{b} + 3072]", "prefetcht0 [{b} + 3136]",
            "prefetcht0 [{b} + 3200]", "prefetcht0 [{b} + 3264]",
            "prefetcht0 [{b} + 3328]", "prefetcht0 [{b} + 3392]",
            "prefetcht0 [{b} + 3456]", "prefetcht0 [{b} + 3520]",
            "prefetcht0 [{a} + 3072]", "prefetcht0 [{a} + 3136]",
            "prefetcht0 [{a} + 3200]", "prefetcht0 [{a} + 3264]",
            "prefetcht0 [{a} + 3328]", "prefetcht0 [{a} + 3392]",
            "prefetcht0 [{a} + 3456]", "prefetcht0 [{a} + 3520]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "prefetcht0 [{b} + 3584]", "prefetcht0 [{b} + 3648]",
            "prefetcht0 [{b} + 3712]", "prefetcht0 [{b} + 3776]",
            "prefetcht0 [{b} + 3840]", "prefetcht0 [{b} + 3904]",
            "prefetcht0 [{b} + 3968]", "prefetcht0 [{b} + 4032]",
            "prefetcht0 [{a} + 3584]", "prefetcht0 [{a} + 3648]",
            "prefetcht0 [{a} + 3712]", "prefetcht0 [{a} + 3776]",
            "prefetcht0 [{a} + 3840]", "prefetcht0 [{a} + 3904]",
            "prefetcht0 [{a} + 3968]", "prefetcht0 [{a} + 4032]",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 2b",
            "5:",
            "tilestored [{c} + {stride}*1], tmm0", "tilestored [{c} + {stride}*1 + 64], tmm1",
            "tilestored [{d} + {stride}*1], tmm2", "tilestored [{d} + {stride}*1 + 64], tmm3",
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            steps = inout(reg) steps => _,
            c = in(reg) c,
            d = in(reg) c.add(16 * stride),
            stride = in(reg) stride * 4,
            add = in(reg) usize::from(add),
            row = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
