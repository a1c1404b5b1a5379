//! The C library's allocator, from which everything outside of the pool comes.
//!
//! It lives here because asking it is `unsafe` and unsafe code stays in this crate. On systems with
//! another C library than glibc nothing is set and nothing is known.

/// Bytes that the program has taken from the allocator and not given back, the pool's small blocks
/// among them; `None` where the allocator does not say.
pub fn live_bytes() -> Option<usize> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: the call takes no arguments, and returns numbers.
        let about = unsafe { libc::mallinfo2() };
        Some(about.uordblks + about.hblkhd)
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    None
}
