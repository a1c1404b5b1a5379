//! Momentum correction of `top_k` (Deep Gradient Compression, Lin et al. 2018, section 3).
//!
//! If a rank sends the largest elements of its gradients and an optimizer adds momentum to their
//! sum, an element that waits for long misses the momentum of the steps that it waited. So each
//! rank applies momentum before it chooses: the velocity `u = m u + g` (equation 5 of the paper)
//! is added to what earlier messages left out, and the largest elements of that are sent.
//!
//! *Momentum factor masking* (section 3.2) clears the velocity of each element that is sent, so
//! that gradients of long ago do not push on.

use super::{Rounding, encode, encoded_bytes};
use half::bf16;
use trainyard_program::BlockCodec;

/// Elements of a block of `top_k`.
const BLOCK: usize = (BlockCodec::TopK { kept: 1 }).block_elements();

/// The momentum that a rank applies to its gradients before it chooses what to send.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Momentum {
    /// The share of a velocity that stays from one step to the next.
    pub factor: f32,
    /// True if the velocity of what is sent becomes zero.
    pub masking: bool,
}

impl Momentum {
    /// Encodes gradients in the form of `top_k` with `kept` elements of a block. `velocity` becomes
    /// that of this step, and `residual` what the message leaves out. Blocks with a velocity or a
    /// sum that is not finite are sent as NaN, and their state stays as it was.
    ///
    /// # Panics
    /// If the buffers are not whole blocks or differ in length.
    pub fn encode(self, kept: u16, values: &[f32], velocity: &mut [f32], residual: &mut [f32], message: &mut [u8]) {
        let codec = BlockCodec::TopK { kept };
        assert_eq!(message.len(), encoded_bytes(codec, values.len()), "bytes of the message");
        assert_eq!([velocity.len(), residual.len()], [values.len(); 2], "elements of the state");
        let state = velocity.as_chunks_mut::<BLOCK>().0.iter_mut().zip(residual.chunks_exact_mut(BLOCK));
        let messages = message.chunks_exact_mut(codec.block_bytes());
        for ((values, (velocity, residual)), message) in values.as_chunks::<BLOCK>().0.iter().zip(state).zip(messages) {
            let mut next = [0.0f32; BLOCK];
            (0..BLOCK).for_each(|i| next[i] = self.factor * velocity[i] + values[i]);
            encode(codec, &next, Some(residual), Rounding::Nearest, message);
            let (places, sent) = message.split_at(2 * usize::from(kept));
            if bf16::from_le_bytes([sent[0], sent[1]]).is_nan() {
                continue;
            }
            *velocity = next;
            if self.masking {
                for place in places.as_chunks::<2>().0 {
                    velocity[usize::from(u16::from_le_bytes(*place))] = 0.0;
                }
            }
        }
    }

    /// The momentum of gradients that travel as they are: `values` become velocities. Where a block
    /// of them is not finite, `velocity` stays as it was.
    ///
    /// # Panics
    /// If the buffers differ in length.
    pub fn apply(self, values: &mut [f32], velocity: &mut [f32]) {
        assert_eq!(velocity.len(), values.len(), "elements of the velocity");
        for (values, velocity) in values.chunks_mut(BLOCK).zip(velocity.chunks_mut(BLOCK)) {
            values.iter_mut().zip(&*velocity).for_each(|(value, before)| *value += self.factor * before);
            if values.iter().all(|value| value.is_finite()) {
                velocity.copy_from_slice(values);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::decode;

    /// Gradients of step `step`; few of them are large.
    fn gradients(step: usize) -> Vec<f32> {
        let of = |place: usize| {
            let mixed = (place * 7919 + step * 104_729) % 1009;
            (mixed as f32 - 504.0) * if mixed < 20 { 0.25 } else { 1e-3 }
        };
        (0..2 * BLOCK).map(of).collect()
    }

    /// The definition, element by element, with the places that were sent taken from the message.
    #[test]
    fn velocities_and_residuals_are_those_of_the_definition() {
        for masking in [false, true] {
            let (momentum, kept) = (Momentum { factor: 0.5, masking }, 41);
            let [mut velocity, mut residual] = [vec![0.0; 2 * BLOCK], vec![0.0; 2 * BLOCK]];
            let [mut u, mut v] = [velocity.clone(), residual.clone()];
            let mut masked = 0;
            for step in 0..5 {
                let (values, mut message) = (gradients(step), vec![0; 2 * 4 * 41]);
                momentum.encode(kept, &values, &mut velocity, &mut residual, &mut message);
                let mut sent = vec![0.0; 2 * BLOCK];
                decode(BlockCodec::TopK { kept }, &message, &mut sent);
                for i in 0..2 * BLOCK {
                    u[i] = 0.5 * u[i] + values[i];
                    v[i] = v[i] + u[i] - sent[i];
                    if masking && sent[i] != 0.0 {
                        u[i] = 0.0;
                        masked += 1;
                    }
                }
                assert!(sent.iter().filter(|sent| **sent != 0.0).count() == 82, "step {step}");
                assert_eq!(velocity, u, "step {step}");
                assert_eq!(residual, v, "step {step}");
            }
            assert_eq!(masked > 0, masking);
        }
    }

    #[test]
    fn a_block_that_is_not_finite_keeps_its_state() {
        let momentum = Momentum { factor: 0.9, masking: true };
        let [mut velocity, mut residual] = [vec![1.0; 2 * BLOCK], vec![2.0; 2 * BLOCK]];
        let (mut values, mut message) = (gradients(1), vec![0; 2 * 4 * 41]);
        values[5] = f32::NAN;
        momentum.encode(41, &values, &mut velocity, &mut residual, &mut message);
        assert!(velocity[..BLOCK].iter().all(|value| *value == 1.0) && velocity[BLOCK..].iter().any(|v| *v != 1.0));
        assert!(residual[..BLOCK].iter().all(|value| *value == 2.0) && residual[BLOCK..].iter().any(|v| *v != 2.0));
        let mut sent = vec![0.0; 2 * BLOCK];
        decode(BlockCodec::TopK { kept: 41 }, &message, &mut sent);
        assert!(sent[..41].iter().all(|sent| sent.is_nan()) && sent[BLOCK..].iter().all(|sent| sent.is_finite()));
        let before = velocity.clone();
        momentum.apply(&mut values, &mut velocity);
        assert!(velocity[..BLOCK] == before[..BLOCK] && velocity[BLOCK..] == values[BLOCK..]);
    }
}
