//! Collectives in two steps, inside nodes and between them, with the bits of one step.
//!
//! Links inside a node are faster than those between nodes. So sums are scattered inside each node
//! first; between nodes travels only what one rank holds of the node's sum; results are gathered
//! inside again. The bytes between nodes fall by the number of ranks in a node.
//!
//! **Why the bits stay.** Nodes are contiguous spans of `2^k` ranks, so a node's sum is a subtree
//! of the tree over all ranks, and sums of nodes in order continue that tree. Partial sums travel
//! in the type they are added in, so bf16 is still rounded once.

use crate::communicator::Communicator;
use crate::error::Result;
use crate::number::{Number, Scalar};

/// A group seen as nodes; made by [`Communicator::hierarchy`].
pub struct Hierarchy {
    inside: Communicator,
    across: Communicator,
}

impl Communicator {
    /// This group as nodes, by the places of its ranks.
    ///
    /// # Errors
    /// Unless every node holds the same power-of-two number of the group's ranks, one after the
    /// other: other layouts would change the order of sums. All ranks get the same answer.
    pub fn hierarchy(&self) -> Result<Hierarchy> {
        let Some(inside) = self.nodes() else {
            let nodes: Vec<u32> = (0..self.size()).map(|member| self.place(member).node).collect();
            return Err(self.refuse(format!(
                "a hierarchy needs the same power of two of neighbouring ranks on every node, but the nodes of ranks 0 to {} are {nodes:?}: \
                 start the ranks node by node, or use the flat collectives",
                self.size() - 1
            )));
        };
        let (node, index) = (self.rank() / inside, self.rank() % inside);
        Ok(Hierarchy {
            inside: self.split(node as u32, index as u32, format!("{} inside nodes", self.name()))?,
            across: self.split(index as u32, node as u32, format!("{} between nodes", self.name()))?,
        })
    }
}

impl Communicator {
    /// Ranks of this group on each node, if every node holds the same power of two of neighbours.
    pub(crate) fn nodes(&self) -> Option<usize> {
        let nodes: Vec<u32> = (0..self.size()).map(|member| self.place(member).node).collect();
        let inside = nodes.iter().take_while(|&&node| node == nodes[0]).count();
        let spans: Vec<u32> = nodes.chunks(inside).map(|span| span[0]).collect();
        let distinct = (1..spans.len()).all(|i| !spans[..i].contains(&spans[i]));
        let even = nodes.chunks(inside).all(|span| span.len() == inside && span.iter().all(|&node| node == span[0]));
        (even && distinct && inside.is_power_of_two()).then_some(inside)
    }
}

impl Hierarchy {
    /// The communicators of this rank: inside its node, and between nodes.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Communicator> {
        [&self.inside, &self.across].into_iter()
    }

    /// The ranks of this node.
    pub fn inside(&self) -> &Communicator {
        &self.inside
    }

    /// The ranks with the same index in their nodes.
    pub fn across(&self) -> &Communicator {
        &self.across
    }

    /// As [`Communicator::all_reduce`].
    pub fn all_reduce<T: Number>(&self, data: &mut [T]) -> Result<()> {
        let ranks = self.inside.size();
        let whole = data.len() / ranks * ranks;
        let (shared, tail) = data.split_at_mut(whole);
        let mut sums = vec![T::Sum::default(); whole / ranks];
        self.inside.reduce_scatter_sums(shared, &mut sums)?;
        self.across.all_reduce(&mut sums)?;
        let own = self.inside.rank() * sums.len();
        round(&sums, &mut shared[own..own + sums.len()]);
        self.inside.all_gather_in_place(shared)?;
        // The rest that does not divide is less than one element for each rank.
        let mut sums: Vec<T::Sum> = tail.iter().map(|&value| value.widen()).collect();
        self.inside.all_reduce(&mut sums)?;
        self.across.all_reduce(&mut sums)?;
        round(&sums, tail);
        Ok(())
    }

    /// As [`Communicator::all_reduce`], without memory beside `data`, for numbers that are added in
    /// their own type.
    pub(crate) fn all_reduce_in_place<T: Number>(&self, data: &mut [T]) -> Result<()> {
        let part = data.len() / self.inside.size();
        let (shared, tail) = data.split_at_mut(part * self.inside.size());
        self.inside.reduce_scatter_in_place(shared)?;
        let own = self.inside.rank() * part;
        self.across.all_reduce(&mut shared[own..own + part])?;
        self.inside.all_gather_in_place(shared)?;
        if !tail.is_empty() {
            self.inside.all_reduce(tail)?;
            self.across.all_reduce(tail)?;
        }
        Ok(())
    }

    /// As [`Communicator::reduce_scatter`].
    pub fn reduce_scatter<T: Number>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let part = output.len();
        // Parts in the order of (index inside the node, node), so that one scatter inside gives
        // each rank what its peers on other nodes need.
        let order: Vec<T> = self.parts_by_index().flat_map(|at| part_of(input, at, part)).copied().collect();
        let mut node_sums = vec![T::Sum::default(); part * self.across.size()];
        self.inside.reduce_scatter_sums(&order, &mut node_sums)?;
        let mut sums = vec![T::Sum::default(); part];
        self.across.reduce_scatter(&node_sums, &mut sums)?;
        round(&sums, output);
        Ok(())
    }

    /// As [`Communicator::all_gather`].
    pub fn all_gather<T: Scalar>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let part = input.len();
        let mut column = vec![T::zeroed(); part * self.across.size()];
        self.across.all_gather(input, &mut column)?;
        let mut order = vec![T::zeroed(); column.len() * self.inside.size()];
        self.inside.all_gather(&column, &mut order)?;
        for (from, at) in self.parts_by_index().enumerate() {
            output[at * part..(at + 1) * part].copy_from_slice(part_of(&order, from, part));
        }
        Ok(())
    }

    /// As [`Communicator::broadcast`]; `root` is a rank of the whole group.
    pub fn broadcast<T: Scalar>(&self, data: &mut [T], root: usize) -> Result<()> {
        let (node, index) = (root / self.inside.size(), root % self.inside.size());
        if self.inside.rank() == index {
            self.across.broadcast(data, node)?;
        }
        self.inside.broadcast(data, index)
    }

    /// The group's ranks, by index inside the node first and node second.
    fn parts_by_index(&self) -> impl Iterator<Item = usize> + use<> {
        let (inside, nodes) = (self.inside.size(), self.across.size());
        (0..inside).flat_map(move |index| (0..nodes).map(move |node| node * inside + index))
    }
}

fn part_of<T>(data: &[T], index: usize, part: usize) -> &[T] {
    &data[index * part..(index + 1) * part]
}

fn round<T: Number>(sums: &[T::Sum], to: &mut [T]) {
    to.iter_mut().zip(sums).for_each(|(to, &sum)| *to = T::round(sum));
}
