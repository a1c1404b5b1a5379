//! The algorithm of a product: measured once for each form, kept in memory and on disk.

use crate::cache::Cache;
use crate::driver::Product;

/// An algorithm as the library writes it: 64 opaque bytes.
pub type Algorithm = [u64; 8];

/// The key of an algorithm on disk. The library is asked for algorithms that sum in f32; entries
/// from before that was asked have other keys.
fn key(form: &Product, device: &str, version: usize) -> String {
    format!("cublasLt {version} on {device}, sums in f32: {form:?}")
}

/// The algorithm that was the fastest before, if the library and the device are the same.
pub fn known(cache: &Cache, form: &Product, device: &str, version: usize) -> Option<Algorithm> {
    let bytes = cache.get(&key(form, device, version))?;
    let (words, rest) = bytes.as_chunks::<8>();
    let words: Algorithm = words.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<_>>().try_into().ok()?;
    rest.is_empty().then_some(words)
}

/// Keeps it. A folder that cannot be written costs a search each time.
pub fn keep(cache: &Cache, form: &Product, device: &str, version: usize, algorithm: &Algorithm) {
    let bytes: Vec<u8> = algorithm.iter().flat_map(|word| word.to_le_bytes()).collect();
    cache.put(&key(form, device, version), &bytes).ok();
}

/// The index of the fastest: the least of each candidate's times; a candidate that failed has none.
pub fn fastest(times: &[Vec<f64>]) -> Option<usize> {
    let least = |times: &Vec<f64>| times.iter().copied().fold(f64::INFINITY, f64::min);
    (0..times.len()).filter(|at| !times[*at].is_empty()).min_by(|a, b| least(&times[*a]).total_cmp(&least(&times[*b])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_is_that_of_its_form_device_and_library() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let form = super::super::tests::form();
        keep(&cache, &form, "H100", 120_800, &[7; 8]);
        assert_eq!(known(&cache, &form, "H100", 120_800), Some([7; 8]));
        assert_eq!(known(&cache, &Product { adds: true, ..form }, "H100", 120_800), None);
        assert_eq!(known(&cache, &form, "H200", 120_800), None);
        assert_eq!(known(&cache, &form, "H100", 120_900), None);
        assert_eq!(fastest(&[vec![3.0, 2.0], vec![], vec![9.0, 1.0]]), Some(2));
        assert_eq!(fastest(&[vec![], vec![]]), None);
    }
}
