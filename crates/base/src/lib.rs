//! Small functions that crates on several floors need, once each.
//!
//! A function belongs here if it needs nothing but the standard library, says nothing about
//! training, and would otherwise be written a second time. Everything else has a crate of its own.

mod philox;

pub use philox::philox4x32;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Returns the median of `values`: the middle one, or the mean of the middle two; None if there are
/// none.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let high = *values.get(values.len() / 2)?;
    let low = values[(values.len() - 1) / 2];
    Some((low + high) / 2.0)
}

/// Writes a number of bytes in the largest binary unit that leaves at least one before the point:
/// `79.2 GiB`.
pub fn format_bytes(bytes: u64) -> String {
    let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.into_iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

/// Writes the whole number nearest to `n` (0 or more) in groups of three digits: `1,234,567`. Exact
/// up to 2^53.
pub fn format_count(n: f64) -> String {
    let digits = format!("{n:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Locks `mutex`, also after a thread that held it has panicked.
///
/// Use it where a panic leaves the data whole (values are replaced, never half written), or where a
/// panic ends everything that would read them.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!([0.0, 999.4, 1000.0, 1_234_567.0].map(format_count), ["0", "999", "1,000", "1,234,567"]);
        let bytes = [0, 1023, 2048, 3 << 20, 3 << 29, 5 << 40].map(format_bytes);
        assert_eq!(bytes, ["0 B", "1023 B", "2.0 KiB", "3.0 MiB", "1.5 GiB", "5.0 TiB"]);
    }

    #[test]
    fn a_poisoned_lock_is_locked() {
        let mutex = Mutex::new(1);
        let panicked = std::panic::catch_unwind(|| {
            let _held = lock(&mutex);
            panic!("while it is held");
        });
        assert!(panicked.is_err() && mutex.is_poisoned());
        assert_eq!(*lock(&mutex), 1);
    }
}
