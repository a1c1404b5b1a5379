//! Codes of eight bits, one number after another.

/// The scale of `row`, and its codes.
pub fn codes(row: &[f32]) -> (f32, Vec<i8>) {
    let most = row.iter().fold(0f32, |most, x| if x.is_nan() { f32::INFINITY } else { most.max(x.abs()) });
    if most < 2f32.powi(-119) {
        return (0.0, vec![0; row.len()]);
    }
    let inverse = 127.0 / most;
    (most / 127.0, row.iter().map(|x| (x * inverse).round_ties_even() as i8).collect())
}
