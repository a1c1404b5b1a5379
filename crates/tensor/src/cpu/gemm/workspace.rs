//! Scratch of one thread: packed operands and unfinished sums.

use std::alloc::Layout;
use std::cell::Cell;

/// Scratch of one thread; it grows to what the largest product needs and is kept.
pub(super) struct Workspace {
    start: *mut u32,
    bytes: usize,
}

/// Scratch is aligned to huge pages, of which it then takes one or two instead of 500 small ones:
/// it shares the TLB with operands whose rows lie pages apart.
pub(super) const HUGE_PAGE: usize = 2 << 20;

impl Workspace {
    const EMPTY: Workspace = Workspace { start: std::ptr::null_mut(), bytes: 0 };

    /// Addresses of `a`, `b` and `c` parts of the given sizes in words, each aligned to cache
    /// lines.
    pub(super) fn parts(&mut self, a: usize, b: usize, c: usize) -> (*mut u32, *mut u32, *mut f32) {
        let (a, b, c) = (a.next_multiple_of(16), b.next_multiple_of(16), c.next_multiple_of(16));
        let bytes = (a + b + c) * 4;
        if self.bytes < bytes {
            *self = Workspace::new(bytes);
        }
        // SAFETY: the three parts lie one after another in the scratch.
        unsafe { (self.start, self.start.add(a), self.start.add(a + b).cast()) }
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, HUGE_PAGE).expect("bounded by `workspace_bytes`")
    }

    fn new(bytes: usize) -> Workspace {
        let bytes = bytes.next_multiple_of(HUGE_PAGE);
        let layout = Workspace::layout(bytes);
        // SAFETY: the layout is not empty. Before its first touch the memory is advised, and then
        // zeroed: kernels may read padding that no packing wrote.
        let start = unsafe {
            let start = std::alloc::alloc(layout);
            if start.is_null() {
                std::alloc::handle_alloc_error(layout);
            }
            #[cfg(target_os = "linux")]
            libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE);
            start.write_bytes(0, bytes);
            start
        };
        Workspace { start: start.cast(), bytes }
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated with this layout.
            unsafe { std::alloc::dealloc(self.start.cast(), Workspace::layout(self.bytes)) };
        }
    }
}

impl Default for Workspace {
    fn default() -> Self {
        Workspace::EMPTY
    }
}

thread_local! {
    pub(super) static WORKSPACE: Cell<Workspace> = const { Cell::new(Workspace::EMPTY) };
}
