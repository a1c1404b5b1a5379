//! Values that are mixed with those of the first block: composed of plain operations on GPUs.

use super::{LAYOUT, check};
use trainyard_tensor::ops;

#[test]
fn value_residuals_are_those_of_the_cpu() {
    check(&[("value residuals", |o| {
        let (first, own, weights) = (o.floats(2, &[5, 16]), o.floats(3, &[5, 16]), o.floats(4, &[2]));
        let (y, kept) = ops::value_residual(o.floats(1, &[5, 64]), LAYOUT, &first, &weights, true)?;
        let (again, none) = ops::value_residual(o.floats(1, &[5, 64]), LAYOUT, &first, &weights, false)?;
        assert!(none.is_none());
        let (mut sums, mut added) = (o.wide(5, &[2])?, o.wide(5, &[2])?);
        let dy = || o.floats(6, &[5, 64]);
        let backward = ops::value_residual_backward;
        let (dx, dfirst) = backward(dy(), LAYOUT, &own, &first, &weights, Some((&mut sums, true)))?;
        backward(dy(), LAYOUT, &own, &first, &weights, Some((&mut added, false)))?;
        let (frozen, _) = backward(dy(), LAYOUT, &own, &first, &weights, None)?;
        Ok(vec![y, again, kept.unwrap(), dx, dfirst, frozen, sums, added])
    })]);
}
