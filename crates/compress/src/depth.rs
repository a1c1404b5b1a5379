//! Blocks that change the residual stream least (Men et al. 2024, ShortGPT).
//!
//! The influence of a block is `1 - cos(x, y)` of its input x and its output y, averaged over
//! tokens (section 3.1), which [`crate::survey`] measures. Blocks of the least
//! influence are dropped; the others keep their order.

use crate::Result;
use crate::error::refuse;
use trainyard_model::ModelSpec;

/// The blocks to keep if `count` of them are kept, ascending: those of the most influence. Of equal
/// ones the earlier is kept.
///
/// # Errors
/// More blocks than there are, all of them, or none.
pub fn kept(influences: &[f64], count: usize) -> Result<Vec<usize>> {
    if count == 0 || count >= influences.len() {
        return refuse(format!(
            "--layers {count} of a model with {} blocks: keep at least 1 and drop at least 1",
            influences.len()
        ));
    }
    Ok(highest(influences, count))
}

/// The places of the `count` highest scores, ascending. Of equal ones the earlier is taken.
pub(crate) fn highest(scores: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// The description of a model with the blocks `kept` alone.
///
/// # Errors
/// Blocks that the model does not have.
pub fn shortened(spec: &ModelSpec, kept: &[usize]) -> Result<ModelSpec> {
    if let Some(layer) = kept.iter().find(|layer| **layer >= spec.layers) {
        return refuse(format!("there is no block {layer} in a model of {} blocks", spec.layers));
    }
    let sliding = |layers: &Vec<usize>| -> Vec<usize> {
        kept.iter().enumerate().filter(|(_, old)| layers.contains(old)).map(|(new, _)| new).collect()
    };
    let sliding_layers = spec.sliding_layers.as_ref().map(sliding);
    Ok(ModelSpec { layers: kept.len(), sliding_layers, ..spec.clone() })
}

/// The cosine of the angle between two rows; 0 if one is zero.
pub(crate) fn cosine(x: &[f32], y: &[f32]) -> f64 {
    let (mut product, mut of_x, mut of_y) = (0.0, 0.0, 0.0);
    for (x, y) in x.iter().zip(y).map(|(x, y)| (f64::from(*x), f64::from(*y))) {
        product += x * y;
        of_x += x * x;
        of_y += y * y;
    }
    if of_x == 0.0 || of_y == 0.0 { 0.0 } else { product / (of_x.sqrt() * of_y.sqrt()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_the_most_influence_are_kept_in_their_order() {
        assert_eq!(kept(&[0.5, 0.1, 0.3, 0.1], 3).unwrap(), [0, 1, 2]);
        assert_eq!(kept(&[0.1, 0.1, 0.3], 1).unwrap(), [2]);
        for count in [0, 3, 4] {
            assert!(kept(&[0.1, 0.2, 0.3], count).unwrap_err().to_string().contains("a model with 3 blocks"));
        }
        let spec = ModelSpec {
            sliding_layers: Some(vec![0, 2]),
            sliding_window: Some(4),
            ..ModelSpec::llama(8, 8, 4, 1, 8, 8)
        };
        let short = shortened(&spec, &[1, 2, 3]).unwrap();
        assert_eq!((short.layers, short.sliding_layers), (3, Some(vec![1])));
        assert!(shortened(&spec, &[4]).is_err());
    }

    #[test]
    fn a_block_that_turns_the_stream_has_influence() {
        assert!((1.0 - cosine(&[1.0, 2.0], &[2.0, 4.0])).abs() < 1e-15);
        assert_eq!(1.0 - cosine(&[1.0, 0.0], &[0.0, 3.0]), 1.0);
        assert_eq!(cosine(&[0.0], &[1.0]), 0.0);
    }
}
