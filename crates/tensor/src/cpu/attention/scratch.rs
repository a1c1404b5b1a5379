//! Thread-local workspace: one aligned buffer per thread that grows to the largest need and stays.

use std::cell::RefCell;

/// One cache line, so that vectors and tile rows never straddle two.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line([f32; 16]);

/// Floats of a line.
pub(super) const LINE: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Runs `body` on `floats` floats, 64-byte aligned, with unspecified values left by earlier tasks
/// of this thread.
pub(super) fn with<R>(floats: usize, body: impl FnOnce(&mut [f32]) -> R) -> R {
    SCRATCH.with_borrow_mut(|lines| {
        let need = floats.div_ceil(LINE);
        if lines.len() < need {
            // Not `resize`: what was there is not worth copying.
            *lines = Vec::new();
            *lines = vec![Line([0.0; 16]); need];
        }
        body(&mut bytemuck::cast_slice_mut(lines)[..floats])
    })
}

/// `floats` rounded up to whole lines.
pub(super) const fn lines(floats: usize) -> usize {
    floats.div_ceil(LINE) * LINE
}

/// The sum of `lens`, each rounded up to whole lines: what [`carve`] needs.
pub(super) fn total(lens: &[usize]) -> usize {
    lens.iter().map(|len| lines(*len)).sum()
}

/// Cuts the workspace into aligned parts of the lengths `lens`.
pub(super) fn carve<const N: usize>(mut rest: &mut [f32], lens: [usize; N]) -> [&mut [f32]; N] {
    lens.map(|len| {
        let (part, tail) = std::mem::take(&mut rest).split_at_mut(lines(len));
        rest = tail;
        &mut part[..len]
    })
}
