//! How often memory is allocated, and when it goes back to the kernel.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Threads that allocate at the same time must not wait for one cache line.
#[repr(align(64))]
struct Stripe(AtomicU64);

static STRIPES: [Stripe; 16] = [const { Stripe(AtomicU64::new(0)) }; 16];
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The stripe of this thread. It has no destructor, so that it can be used as long as the thread
    /// allocates.
    static OWN: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The allocator of the system, which counts. A program that wants to know makes it its own, as
/// `#[global_allocator]`.
#[derive(Debug)]
pub struct Counted;

/// How often this process has allocated memory until now; `None` if its allocator does not count.
#[must_use]
pub fn allocations() -> Option<u64> {
    let all: u64 = STRIPES.iter().map(|stripe| stripe.0.load(Ordering::Relaxed)).sum();
    (all > 0).then_some(all)
}

/// Gives back to the kernel what is free. Otherwise much of what threads have freed that have ended stays with the process.
pub fn trim() {
    // SAFETY: it touches nothing that is allocated, and takes the locks of the allocator.
    unsafe { libc::malloc_trim(0) };
}

fn count() {
    let own = OWN.get().unwrap_or_else(|| {
        let own = THREADS.fetch_add(1, Ordering::Relaxed) % STRIPES.len();
        OWN.set(Some(own));
        own
    });
    STRIPES[own].0.fetch_add(1, Ordering::Relaxed);
}

// SAFETY: all is done by `System`, which keeps the contract of the trait; to count neither
// allocates nor unwinds.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller answers for the layout, as `System` wants it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller answers for all three; `ptr` is from `System`, as all that this
        // allocator hands out.
        unsafe { System.realloc(ptr, layout, size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The memory of this process that is of no file, in KiB.
    fn resident() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        line.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    fn what_is_free_goes_back_to_the_kernel() {
        const COUNT: usize = 64 << 10;
        let used = || (0..COUNT).map(|_| Box::new([1_u8; 1000])).collect::<Vec<_>>();
        // What is allocated last keeps all before it from going back by itself.
        let last = std::thread::spawn(move || used().pop()).join().unwrap();
        let before = resident();
        trim();
        let after = resident();
        assert!(last.is_some() && before > after + 32 * 1024, "{before}, {after} KiB");
    }

    #[test]
    fn allocations_of_all_threads_are_counted() {
        let layout = Layout::new::<u64>();
        let use_it = || {
            // SAFETY: the layout has a size, and what is allocated is freed with the same one.
            unsafe { Counted.dealloc(Counted.alloc(layout), layout) };
        };
        use_it();
        let before = allocations();
        std::thread::scope(|scope| (0..20).for_each(|_| drop(scope.spawn(use_it))));
        // The allocator of the tests themselves does not count.
        assert_eq!(allocations(), before.map(|before| before + 20));
    }
}
