//! Copies that leave the caches alone.
//!
//! An ordinary store to memory that is not cached reads the line first, so a copy moves three bytes for each one copied instead of two. Copies of many megabytes evict what
//! they fetch anyway and are made with non-temporal stores, as the C library does for copies larger than its share of the last cache level; ours are
//! cut into parts below that threshold, and so are made here.

/// From here on a destination is not expected to stay in a core's own caches (2 MiB and more on servers).
pub(crate) const STREAM_BYTES: usize = 4 << 20;

/// Copies `bytes`; past the caches if `stream`, and then [`fence`] must follow before anybody is told.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes`, they do not overlap, and nobody else writes them.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize, stream: bool) {
    #[cfg(target_arch = "x86_64")]
    if stream && is_x86_feature_detected!("avx2") {
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
    use std::arch::x86_64::{_mm256_loadu_si256, _mm256_stream_si256};
    const LINE: usize = 64;
    let head = to.align_offset(LINE).min(bytes);
    let body = (bytes - head) / LINE * LINE;
    // SAFETY: head, body and tail lie one after the other inside `bytes`; the body's destination is aligned to a line.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for at in (head..head + body).step_by(LINE) {
            let low = _mm256_loadu_si256(from.add(at).cast());
            let high = _mm256_loadu_si256(from.add(at + 32).cast());
            _mm256_stream_si256(to.add(at).cast(), low);
            _mm256_stream_si256(to.add(at + 32).cast(), high);
        }
        std::ptr::copy_nonoverlapping(from.add(head + body), to.add(head + body), bytes - head - body);
    }
}

/// Orders copies past the caches before whatever tells others that they are done; other stores are ordered by that itself.
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
