//! Copies that leave the caches alone.
//!
//! An ordinary store to memory that is not cached reads the line first, so a copy moves three bytes
//! for each one copied instead of two. Copies of many megabytes evict what they fetch anyway and
//! are made with non-temporal stores, as the C library does for copies larger than its share of the
//! last cache level; ours are cut into parts below that threshold, and so are made here.

/// From here on a destination is not expected to stay in a core's own caches (2 MiB and more on
/// servers).
pub(crate) const STREAM_BYTES: usize = 4 << 20;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Stores `value(0..count)` from `to` on, past the caches where whole lines are written and the
/// machine can; [`fence`] must follow before anybody is told.
///
/// # Safety
/// `to` is writable for `count` values, and nobody else uses that memory. A line holds a whole
/// number of values.
#[inline(always)]
pub(crate) unsafe fn store<T: Copy + Default>(to: *mut T, count: usize, value: impl Fn(usize) -> T) {
    /// Of the smallest values, which have two bytes.
    const VALUES_MAX: usize = LINE / 2;
    let values = const { LINE / size_of::<T>() };
    let can_stream = cfg!(target_arch = "x86_64") && is_avx2() && to.cast::<u8>().align_offset(LINE) == 0;
    let lines = if can_stream { count / values } else { 0 };
    for line in 0..lines {
        let mut at_once = [T::default(); VALUES_MAX];
        for (i, to) in at_once[..values].iter_mut().enumerate() {
            *to = value(line * values + i);
        }
        // SAFETY: whole lines below `count`, and AVX2 was found.
        unsafe { store_line(at_once.as_ptr().cast(), to.add(line * values).cast()) };
    }
    for i in lines * values..count {
        // SAFETY: below `count`.
        unsafe { to.add(i).write(value(i)) };
    }
}

#[cfg(target_arch = "x86_64")]
fn is_avx2() -> bool {
    is_x86_feature_detected!("avx2")
}

#[cfg(not(target_arch = "x86_64"))]
fn is_avx2() -> bool {
    false
}

/// # Safety
/// Both hold a line, `to` is aligned to one, and the machine has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn store_line(from: *const u8, to: *mut u8) {
    use std::arch::x86_64::{_mm256_loadu_si256, _mm256_stream_si256};
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast()));
        _mm256_stream_si256(to.cast(), low);
        _mm256_stream_si256(to.add(32).cast(), high);
    }
}

/// # Safety
/// Never called.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn store_line(_: *const u8, _: *mut u8) {
    unreachable!("only where AVX2 was found");
}

/// Copies `bytes`; past the caches if `stream`, and then [`fence`] must follow before anybody is
/// told.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes`, they do not overlap, and nobody else writes
/// them.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize, stream: bool) {
    #[cfg(target_arch = "x86_64")]
    if stream && is_avx2() {
        // SAFETY: the caller's promise, and AVX2 was found.
        return unsafe { copy_past_caches(from, to, bytes) };
    }
    let _ = stream;
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
}

/// # Safety
/// As [`copy`], and the machine has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_past_caches(from: *const u8, to: *mut u8, bytes: usize) {
    let head = to.align_offset(LINE).min(bytes);
    let body = (bytes - head) / LINE * LINE;
    // SAFETY: head, body and tail lie one after the other inside `bytes`; the body's destination is
    // aligned to a line.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for at in (head..head + body).step_by(LINE) {
            store_line(from.add(at), to.add(at));
        }
        std::ptr::copy_nonoverlapping(from.add(head + body), to.add(head + body), bytes - head - body);
    }
}

/// Orders copies past the caches before whatever tells others that they are done; other stores are
/// ordered by that itself.
#[inline]
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_alignment_and_length_is_copied_exactly() {
        let from: Vec<u8> = (0..1000u32).map(|i| (i * 7 + i / 256) as u8).collect();
        for offset in 0..70 {
            for bytes in [0, 1, 31, 63, 64, 65, 128, 300, 800] {
                let mut to = vec![0u8; 1000];
                // SAFETY: both ranges lie inside their vectors.
                unsafe { copy(from.as_ptr().add(offset / 2), to.as_mut_ptr().add(offset), bytes, true) };
                fence();
                assert_eq!(to[offset..offset + bytes], from[offset / 2..offset / 2 + bytes]);
                assert!(to[..offset].iter().chain(&to[offset + bytes..]).all(|&byte| byte == 0));
            }
        }
    }
}
