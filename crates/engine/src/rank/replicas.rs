//! Comparison of parameters between ranks that must hold the same ones.
//!
//! An error of memory or arithmetic on one machine changes its parameters and nobody else's. Every
//! loss is plausible afterwards, and a checkpoint takes the wrong values over. So the ranks compare
//! hashes of what they hold, which costs one pass over the parameters and a few bytes between
//! ranks.
//!
//! Only what several ranks hold can be compared: everything with replicated parameters, the copies
//! that forward reads if optimizer states alone are sharded, nothing inside of a group that shards
//! parameters. Values that lie in a tier are left out, but for frozen matrices in 4 or 8 bits.

use super::Rank;
use crate::Result;
use std::collections::BTreeMap;
use trainyard_comm::Communicator;
use trainyard_tensor::Tensor;
use xxhash_rust::xxh3::Xxh3;

/// Parameters that differ between ranks that must hold the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// The first unit that differs.
    pub unit: String,
    /// The ranks, grouped by the bits that they hold; the largest group comes first.
    pub groups: Vec<Vec<usize>>,
}

impl Difference {
    /// The ranks that are probably wrong: those outside of the largest group. None if no group is
    /// the largest.
    pub fn suspects(&self) -> Option<Vec<usize>> {
        let [first, second, ..] = &self.groups[..] else { return None };
        (first.len() > second.len()).then(|| self.groups[1..].concat())
    }

    /// In words, e.g. `rank 1 has other bits of block.2 than ranks 0, 2, 3`.
    pub fn in_words(&self) -> String {
        let ranks = |ranks: &[usize]| {
            let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
            format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
        };
        match self.suspects() {
            Some(wrong) => {
                let has = if wrong.len() == 1 { "has" } else { "have" };
                format!("{} {has} other bits of `{}` than {}", ranks(&wrong), self.unit, ranks(&self.groups[0]))
            }
            None => {
                let groups: Vec<String> = self.groups.iter().map(|group| ranks(group)).collect();
                format!("{} have different bits of `{}`", groups.join(" and "), self.unit)
            }
        }
    }
}

/// The part of a unit that a rank holds, and its bits. Both are 0 if the rank holds nothing here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Held {
    /// A hash of which elements of which parameters.
    what: u64,
    /// A hash of their values.
    bits: u64,
}

impl Rank {
    /// Compares the parameters of all ranks; None if they agree. All ranks of `world` call this
    /// together, between steps, and get the same answer.
    pub(crate) fn compare_replicas(&self, world: &Communicator) -> Result<Option<Difference>> {
        let mut own = Vec::new();
        for unit in 0..self.model.units().len() {
            for held in [self.held_copy(unit)?, self.held_packed(unit)?, self.held_masters(unit)?] {
                own.extend([held.what, held.bits]);
            }
        }
        let mut all = vec![0; own.len() * world.size()];
        world.all_gather(&own, &mut all)?;
        let names = self.model.units().iter().map(|unit| unit.name().to_owned());
        let names: Vec<String> = names.flat_map(|name| [name.clone(), name.clone(), name]).collect();
        Ok(first_difference(&names, &all))
    }

    /// The copy that forward reads, frozen parameters included.
    fn held_copy(&self, unit: usize) -> Result<Held> {
        if !self.parameters.holds(unit) || !self.parameters.is_here(unit) {
            return Ok(Held::default());
        }
        let state = self.parameters.unit(unit);
        let (copy, ranges) = state.held_copy()?;
        self.held(unit, "copy", &ranges, &copy)
    }

    /// Frozen parameters as they lie encoded in memory.
    fn held_packed(&self, unit: usize) -> Result<Held> {
        match self.parameters.unit(unit).held_packed() {
            Some((packed, words)) => self.held(unit, "packed", &[words], packed),
            None => Ok(Held::default()),
        }
    }

    /// The f32 masters, if they are separate from the copy and lie on the device.
    fn held_masters(&self, unit: usize) -> Result<Held> {
        let state = self.parameters.unit(unit);
        match state.held_apart() {
            Some((masters, range)) => self.held(unit, "masters", &[range], &masters),
            None => Ok(Held::default()),
        }
    }

    fn held(&self, unit: usize, kind: &str, ranges: &[std::ops::Range<usize>], values: &Tensor) -> Result<Held> {
        // The parts of the parameters say which of several tensor-parallel parts this is.
        let parts = self.model.units()[unit].parameters().iter();
        let parts: Vec<_> = parts.map(|spec| (&spec.name, &spec.shape, &spec.split)).collect();
        let mut what = Xxh3::new();
        what.update(format!("{unit} {kind} {ranges:?} {parts:?}").as_bytes());
        let mut bits = Xxh3::new();
        values.with_bytes(|bytes| bits.update(bytes))?;
        Ok(Held { what: what.digest().max(1), bits: bits.digest() })
    }

    /// Flips a bit of the first parameter that this rank holds here. For tests.
    pub(crate) fn flip_a_bit(&self) -> Result<()> {
        let here = |unit: &usize| self.parameters.holds(*unit) && self.parameters.is_here(*unit);
        let copies =
            (0..self.model.units().len()).filter(here).map(|unit| (unit, self.parameters.unit(unit).held_copy()));
        let Some((unit, copy)) =
            copies.into_iter().find(|(_, copy)| copy.as_ref().is_ok_and(|(copy, _)| copy.elements() > 0))
        else {
            return Ok(());
        };
        let (mut copy, _) = copy?;
        copy.with_bytes_mut(|bytes| bytes[0] ^= 1)?;
        if let Some((mut masters, _)) = self.parameters.unit(unit).held_apart() {
            masters.with_bytes_mut(|bytes| bytes[2] ^= 1)?;
        }
        Ok(())
    }
}

/// The first of the entries `names` in which ranks hold the same elements with different bits.
/// `all` has the pairs of what is held and its bits, by rank and entry.
fn first_difference(names: &[String], all: &[u64]) -> Option<Difference> {
    let ranks: Vec<&[u64]> = all.chunks(2 * names.len().max(1)).collect();
    names.iter().enumerate().find_map(|(entry, name)| {
        let mut held: BTreeMap<u64, BTreeMap<u64, Vec<usize>>> = BTreeMap::new();
        for (rank, words) in ranks.iter().enumerate() {
            let (what, bits) = (words[2 * entry], words[2 * entry + 1]);
            if what != 0 {
                held.entry(what).or_default().entry(bits).or_default().push(rank);
            }
        }
        let differing = held.into_values().find(|by_bits| by_bits.len() > 1)?;
        let mut groups: Vec<Vec<usize>> = differing.into_values().collect();
        groups.sort_by_key(|group| (usize::MAX - group.len(), group[0]));
        Some(Difference { unit: name.clone(), groups })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differing(ranks: &[[u64; 4]]) -> Option<Difference> {
        first_difference(&["embed".to_owned(), "block.0".to_owned()], &ranks.concat())
    }

    #[test]
    fn the_rank_that_is_alone_is_named() {
        assert_eq!(differing(&[[7, 1, 8, 2]; 4]), None);
        let one = differing(&[[7, 1, 8, 2], [7, 1, 8, 3], [7, 1, 8, 2], [7, 1, 8, 2]]).unwrap();
        assert_eq!(one.suspects(), Some(vec![1]));
        assert_eq!(one.in_words(), "rank 1 has other bits of `block.0` than ranks 0, 2, 3");
        let two = differing(&[[7, 1, 8, 2], [7, 4, 8, 2]]).unwrap();
        assert_eq!(two.suspects(), None);
        assert_eq!(two.in_words(), "rank 0 and rank 1 have different bits of `embed`");
    }

    #[test]
    fn ranks_that_hold_other_elements_are_not_compared() {
        assert_eq!(differing(&[[7, 1, 8, 2], [9, 5, 6, 3]]), None);
        assert_eq!(differing(&[[0, 0, 8, 2], [7, 5, 0, 0]]), None);
    }
}
