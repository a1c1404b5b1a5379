//! Tensor, context and expert parallelism.
//!
//! Tensor parallelism (Shoeybi et al. 2019): the units of one rank of a group that computes every
//! unit together. With `sequence`, the rows of the residual stream are divided among the ranks too
//! (Korthikanti et al. 2022).
//!
//! A family's table ([`crate::families`]) says for each parameter how it lies on the axis.
//! Everything else follows here: the heads, the columns of the MLP and the tokens of the vocabulary
//! that a rank has, the shape and the place of its part of each parameter, and the layout of the
//! residual stream.
//!
//! Expert parallelism (Lepikhin et al. 2020) divides the experts of a layer among ranks that have
//! tokens of their own ([`ExpertSplit`]). Everything else of the layer is the same on each of them.
//! With both, a rank has its columns of its experts.
//!
//! Parts may be unequal. Where a dimension allows it, parts of it are multiples of [`QUANTUM`], for
//! the speed of products.

use crate::families::Family;
use crate::parameter::{ParameterSpec, Piece, Split};
use crate::spec::ModelSpec;
use crate::{ModelError, Result};
use std::ops::Range;
use trainyard_program::Layout;
use trainyard_tensor::ops::{HeadLayout, TablePart};

/// The sizes of parts of large dimensions are multiples of this, except for the last one.
pub const QUANTUM: usize = 16;

/// The way in which a parameter lies on the tensor axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// Rows are tokens of the vocabulary, divided.
    VocabularyRows,
    /// Rows are those of query, key and value heads, divided by heads.
    HeadRows,
    /// Columns are those of query heads, divided by heads.
    HeadColumns,
    /// Rows are columns of the MLP, divided.
    FfnRows,
    /// Rows are columns of the MLP for the gate, then as many for the product, each divided.
    GateUpRows,
    /// Columns are columns of the MLP, divided.
    FfnColumns,
    /// Rows are those of each expert in turn: of the gate, then as many for the product, each
    /// divided.
    ExpertsUpRows,
    /// Columns are columns of each expert's MLP, divided.
    ExpertsDownColumns,
    /// As [`Cut::GateUpRows`], of the shared experts.
    SharedUpRows,
    /// As [`Cut::FfnColumns`], of the shared experts.
    SharedDownColumns,
    /// Whole, for compute of which each rank has a summand.
    Router,
    /// Whole, for compute that each rank repeats: choices of experts.
    Choices,
    /// Whole, for compute on the residual stream.
    Residual,
    /// Whole, for compute on each head.
    EachHead,
    /// Whole, for compute on all heads of a token together, which no split has.
    AllHeads,
}

/// The place of a rank in a tensor-parallel group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorSplit {
    /// The rank, from 0.
    pub rank: usize,
    /// The number of ranks in the group; 1 splits nothing.
    pub ranks: usize,
    /// True if the rows of the residual stream are divided among the ranks.
    pub sequence: bool,
}

impl TensorSplit {
    /// The one rank of a group of one.
    pub const WHOLE: TensorSplit = TensorSplit { rank: 0, ranks: 1, sequence: false };

    /// The layout of the residual stream over the group.
    pub fn residual(&self) -> Layout {
        if self.sequence { Layout::Split } else { Layout::Invariant }
    }

    /// This rank's rows of the residual stream of a micro-batch of `tokens` rows.
    ///
    /// # Errors
    /// Rows that are to be divided and cannot be, evenly.
    pub fn rows(&self, tokens: usize) -> Result<Range<usize>> {
        if !self.sequence {
            return Ok(0..tokens);
        }
        if !tokens.is_multiple_of(self.ranks) {
            return Err(ModelError::Split(format!(
                "a micro-batch of {tokens} tokens cannot be divided evenly among {} ranks: \
                 make its tokens a multiple of {}, or turn sequence parallelism off",
                self.ranks, self.ranks
            )));
        }
        let rows = tokens / self.ranks;
        Ok(self.rank * rows..(self.rank + 1) * rows)
    }
}

/// The place of a rank in an expert-parallel group, whose ranks divide the experts of every layer:
/// rank r of R has the r-th of R equal ranges of them. A token's rows go to the ranks of its
/// experts and come back ([`trainyard_autograd::functions::RowExchange`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertSplit {
    /// The rank, from 0.
    pub rank: usize,
    /// The number of ranks in the group; 1 divides nothing.
    pub ranks: usize,
}

impl ExpertSplit {
    /// The one rank of a group of one.
    pub const WHOLE: ExpertSplit = ExpertSplit { rank: 0, ranks: 1 };

    /// Checks that the experts of `spec` can be divided.
    ///
    /// # Errors
    /// A model without experts, or a number of experts that the degree does not divide.
    pub fn check(&self, spec: &ModelSpec) -> Result<()> {
        let ExpertSplit { rank, ranks } = *self;
        if ranks == 1 {
            return Ok(());
        }
        let problem = match &spec.experts {
            _ if rank >= ranks => format!("there is no rank {rank} in a group of {ranks}"),
            None => format!("family {} has no experts that {ranks} ranks could divide", spec.family),
            Some(experts) if ranks == 0 || !experts.experts.is_multiple_of(ranks) => {
                let possible: Vec<usize> =
                    (1..=experts.experts).filter(|n| experts.experts.is_multiple_of(*n)).collect();
                format!("{} experts cannot be divided among {ranks} ranks: use one of {possible:?}", experts.experts)
            }
            Some(_) => return Ok(()),
        };
        Err(ModelError::Split(problem))
    }

    /// Replaces a parameter whose rows are those of all experts in turn, or a tensor-parallel part
    /// of each expert's, by those of the rank's experts.
    pub(crate) fn cut(&self, parameter: &mut ParameterSpec) {
        let each = parameter.shape[0] / self.ranks;
        let rows = self.rank * each..(self.rank + 1) * each;
        let mut split = parameter.split.take().unwrap_or_else(|| {
            let all = Piece { local: 0..parameter.shape[0], whole: 0..parameter.shape[0], holders: 1, owned: true };
            Split { whole: parameter.shape.clone(), dim: 0, outer: 0, pieces: vec![all], shared: Vec::new() }
        });
        if split.dim == 0 {
            split.pieces = split.pieces.iter().filter_map(|piece| piece.within(&rows)).collect();
        } else {
            split.outer = rows.start;
        }
        parameter.shape[0] = each;
        parameter.split = Some(split);
        parameter.of_experts = true;
    }
}

/// The place of a rank in a context-parallel group, whose ranks divide each sequence.
///
/// A sequence of `length` tokens is cut into `2 ranks` chunks, and each rank has two of them. For
/// attention a rank's queries meet the keys of all ranks ([`ContextExchange::Keys`]), or ranks
/// exchange rows for heads ([`ContextExchange::Heads`]). With
/// causal attention a late chunk costs more than an early one. Zigzag gives rank r chunks r and
/// `2 ranks - 1 - r`, so all have the same work (Brandon et al. 2023, "Striped Attention"; the
/// two-chunk form is Megatron-LM's). A rank's rows of a micro-batch are its first chunk of every
/// sequence, then its second of every sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ContextSplit {
    /// The rank, from 0.
    pub rank: usize,
    /// The number of ranks in the group; 1 divides nothing.
    pub ranks: usize,
    /// Tokens of a sequence: of a row of a micro-batch.
    pub length: usize,
    /// The exchange that attention needs.
    pub exchange: ContextExchange,
}

/// The exchange of a context-parallel group for attention, in which each token looks at others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ContextExchange {
    /// Every rank gathers the keys and values of all ranks, for its own queries.
    Keys(Chunks),
    /// The same, and attention to the rank's own keys is computed while the others are on their
    /// way. Layers with a window gather first: what they see lies in few chunks.
    Overlapped(Chunks),
    /// Every rank gets all rows of its part of the heads, and gives back what attention makes of
    /// them (Jacobs et al. 2023, "DeepSpeed Ulysses"). What ranks keep is divided by their number,
    /// and work under a causal mask is equal with chunks in order.
    Heads,
}

impl ContextExchange {
    /// The chunks that ranks have.
    pub fn chunks(self) -> Chunks {
        match self {
            ContextExchange::Keys(chunks) | ContextExchange::Overlapped(chunks) => chunks,
            ContextExchange::Heads => Chunks::Contiguous,
        }
    }
}

/// The chunks of a sequence that a rank of a context-parallel group has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Chunks {
    /// An early and a late one, so that all ranks have equal work under a causal mask.
    #[default]
    Zigzag,
    /// Two neighbours: the last rank has the most work.
    Contiguous,
}

impl ContextSplit {
    /// The one rank of a group of one.
    pub const WHOLE: ContextSplit =
        ContextSplit { rank: 0, ranks: 1, length: 1, exchange: ContextExchange::Keys(Chunks::Zigzag) };

    /// The rows of a micro-batch of `tokens` tokens that rank `rank` has, in its order.
    ///
    /// # Errors
    /// Sequences that cannot be cut into equal chunks.
    pub fn rows_of(&self, rank: usize, tokens: usize) -> Result<Vec<Range<usize>>> {
        let ContextSplit { ranks, length, exchange, .. } = *self;
        if ranks == 1 {
            return Ok(std::iter::once(0..tokens).collect());
        }
        let each = 2 * ranks;
        if length == 0 || !length.is_multiple_of(each) || !tokens.is_multiple_of(length) {
            return Err(ModelError::Split(format!(
                "a micro-batch of {tokens} tokens is not rows of {length} tokens that {ranks} ranks can divide: each \
                 is cut into {each} equal chunks, so make the sequence length a multiple of {each}"
            )));
        }
        let chunk = length / each;
        let own = match exchange.chunks() {
            Chunks::Zigzag => [rank, each - 1 - rank],
            Chunks::Contiguous => [2 * rank, 2 * rank + 1],
        };
        let rows = |chunk_of: usize| {
            (0..tokens / length).map(move |row| row * length + chunk_of * chunk).map(move |start| start..start + chunk)
        };
        Ok(own.into_iter().flat_map(rows).collect())
    }

    /// The rows of a micro-batch in the order in which the ranks' parts are gathered.
    ///
    /// # Errors
    /// As [`ContextSplit::rows_of`].
    pub fn gathered(&self, tokens: usize) -> Result<Vec<Range<usize>>> {
        Ok((0..self.ranks).map(|rank| self.rows_of(rank, tokens)).collect::<Result<Vec<_>>>()?.concat())
    }
}

/// The shares of the ranks of a group in one model, seen from one of them.
#[derive(Clone, Debug)]
pub struct Division {
    split: TensorSplit,
    family: Family,
    /// The query heads of each rank.
    heads: Vec<Range<usize>>,
    head_dim: usize,
    /// Query heads and key/value heads of the whole model.
    whole_heads: [usize; 2],
    ffn: Range<usize>,
    ffn_dim: usize,
    /// Columns of each expert and of the shared experts, with their number in the whole.
    expert_ffn: (Range<usize>, usize),
    shared_ffn: (Range<usize>, usize),
    experts: usize,
    vocabulary: Range<usize>,
    vocab_size: usize,
}

impl Division {
    /// The shares of `split.ranks` ranks in `spec`.
    ///
    /// # Errors
    /// Degrees that leave a rank without a head, a column of the MLP or a token.
    pub fn new(spec: &ModelSpec, split: TensorSplit) -> Result<Division> {
        let TensorSplit { rank, ranks, .. } = split;
        if rank >= ranks {
            return Err(ModelError::Split(format!("there is no rank {rank} in a group of {ranks}")));
        }
        let ModelSpec { heads, kv_heads, head_dim, ffn_dim, vocab_size, .. } = *spec;
        let Some(division) = divide_heads(heads, kv_heads, ranks) else {
            return Err(ModelError::Split(format!(
                "{heads} query heads on {kv_heads} key/value heads cannot be divided among {ranks} ranks: \
                 each rank needs at least one query head, so degrees from 1 to {heads} work"
            )));
        };
        let share = |what: &str, total: usize| {
            let parts = divide(total, ranks);
            let problem = || ModelError::Split(format!("{total} {what} cannot be divided among {ranks} ranks"));
            parts.map(|parts| parts[rank].clone()).ok_or_else(problem)
        };
        let (mut expert_ffn, mut shared_ffn) = ((0..0, 0), (0..0, 0));
        if let Some(experts) = &spec.experts {
            expert_ffn = (share("columns of an expert", experts.ffn_dim)?, experts.ffn_dim);
            if experts.shared_ffn_dim > 0 {
                shared_ffn = (share("columns of the shared experts", experts.shared_ffn_dim)?, experts.shared_ffn_dim);
            }
        }
        Ok(Division {
            split,
            family: spec.family,
            heads: division,
            head_dim,
            whole_heads: [heads, kv_heads],
            ffn: share("columns of the MLP", ffn_dim)?,
            ffn_dim,
            expert_ffn,
            shared_ffn,
            experts: spec.experts.as_ref().map_or(0, |experts| experts.experts),
            vocabulary: share("tokens of the vocabulary", vocab_size)?,
            vocab_size,
        })
    }

    /// The place of the rank in its group.
    pub fn split(&self) -> TensorSplit {
        self.split
    }

    /// The rank's heads.
    pub fn heads(&self) -> HeadLayout {
        let heads = self.heads[self.split.rank].clone();
        HeadLayout { heads: heads.len(), kv_heads: self.kv_heads(&heads).len(), head_dim: self.head_dim }
    }

    /// The rank's rows of tables of the vocabulary.
    pub fn vocabulary(&self) -> TablePart {
        TablePart { first: self.vocabulary.start, whole: self.vocab_size }
    }

    /// The key/value heads that query heads `heads` attend to.
    fn kv_heads(&self, heads: &Range<usize>) -> Range<usize> {
        let group = self.whole_heads[0] / self.whole_heads[1];
        heads.start / group..heads.end.div_ceil(group)
    }

    /// Replaces parameters of a whole unit by the rank's parts.
    ///
    /// # Errors
    /// A parameter that the family's table does not have, or that cannot be split.
    pub fn cut(&self, unit: &str, parameters: &mut [ParameterSpec]) -> Result<()> {
        for parameter in parameters {
            let Some(row) = self.family.row(&parameter.name) else {
                let problem = format!("the table of splits does not say how `{}` is split", parameter.name);
                return Err(ModelError::Unit { unit: unit.into(), problem });
            };
            if row.cut == Cut::AllHeads {
                return Err(ModelError::Split(format!(
                    "`{}` needs all heads of a token on one rank: use pipeline or data parallelism for family {}",
                    parameter.name, self.family
                )));
            }
            self.cut_one(row.cut, parameter);
        }
        Ok(())
    }

    fn cut_one(&self, cut: Cut, parameter: &mut ParameterSpec) {
        let mut shared = Vec::new();
        let (dim, stretches) = match cut {
            Cut::Residual => {
                // Of split rows each rank sees its own.
                parameter.layout = if self.split.sequence { Layout::Replicated } else { Layout::Invariant };
                return;
            }
            Cut::EachHead | Cut::AllHeads | Cut::Router => {
                parameter.layout = Layout::Replicated;
                return;
            }
            Cut::Choices => {
                parameter.layout = Layout::Invariant;
                return;
            }
            Cut::VocabularyRows => (0, vec![Stretch::own(self.vocabulary.clone())]),
            Cut::FfnRows => (0, vec![Stretch::own(self.ffn.clone())]),
            Cut::GateUpRows => {
                let up = self.ffn_dim + self.ffn.start..self.ffn_dim + self.ffn.end;
                (0, vec![Stretch::own(self.ffn.clone()), Stretch::own(up)])
            }
            Cut::SharedUpRows => (0, gate_up(0, &self.shared_ffn)),
            Cut::ExpertsUpRows => {
                let of = |e: usize| gate_up(2 * e * self.expert_ffn.1, &self.expert_ffn);
                (0, (0..self.experts).flat_map(of).collect())
            }
            Cut::ExpertsDownColumns => (1, vec![Stretch::own(self.expert_ffn.0.clone())]),
            Cut::SharedDownColumns => (1, vec![Stretch::own(self.shared_ffn.0.clone())]),
            Cut::FfnColumns => (1, vec![Stretch::own(self.ffn.clone())]),
            Cut::HeadColumns => {
                let heads = &self.heads[self.split.rank];
                (1, vec![Stretch::own(heads.start * self.head_dim..heads.end * self.head_dim)])
            }
            Cut::HeadRows => {
                shared = self.shared_rows();
                (0, self.head_rows())
            }
        };
        let whole = parameter.shape.clone();
        let mut pieces: Vec<Piece> = Vec::new();
        let mut end = 0;
        for Stretch { whole, holders, owned } in stretches {
            let local = end..end + whole.len();
            end = local.end;
            match pieces.last_mut() {
                Some(last) if last.whole.end == whole.start && (last.holders, last.owned) == (holders, owned) => {
                    (last.local.end, last.whole.end) = (local.end, whole.end);
                }
                _ => pieces.push(Piece { local, whole, holders, owned }),
            }
        }
        parameter.shape[dim] = end;
        parameter.split = Some(Split { whole, dim, outer: 0, pieces, shared });
        parameter.layout = Layout::Split;
    }

    /// The rank's rows of a fused query, key and value projection. A key/value head whose query
    /// heads are divided lies on each of their ranks.
    fn head_rows(&self) -> Vec<Stretch> {
        let [heads, kv_heads] = self.whole_heads;
        let own = &self.heads[self.split.rank];
        let rows = |first: usize, count: usize| first * self.head_dim..(first + count) * self.head_dim;
        let mut stretches = vec![Stretch::own(rows(own.start, own.len()))];
        for first in [heads, heads + kv_heads] {
            for head in self.kv_heads(own) {
                let holds = |heads: &Range<usize>| self.kv_heads(heads).contains(&head);
                let holders = self.heads.iter().filter(|heads| holds(heads)).count();
                let owned = self.heads.iter().position(holds) == Some(self.split.rank);
                stretches.push(Stretch { whole: rows(first + head, 1), holders, owned });
            }
        }
        stretches
    }
}

impl Division {
    /// The rows of a fused query, key and value projection that several ranks hold.
    fn shared_rows(&self) -> Vec<Range<usize>> {
        let [heads, kv_heads] = self.whole_heads;
        let holders = |head: usize| self.heads.iter().filter(|own| self.kv_heads(own).contains(&head)).count();
        let shared = (0..kv_heads).filter(|head| holders(*head) > 1);
        let rows = |first: usize| first * self.head_dim..(first + 1) * self.head_dim;
        let of = |first: usize| shared.clone().map(move |head| rows(first + head));
        of(heads).chain(of(heads + kv_heads)).collect()
    }
}

/// A stretch of a dimension of a whole parameter that a rank holds.
struct Stretch {
    whole: Range<usize>,
    holders: usize,
    owned: bool,
}

impl Stretch {
    /// One that no other rank holds.
    fn own(whole: Range<usize>) -> Stretch {
        Stretch { whole, holders: 1, owned: true }
    }
}

/// The rank's rows of a gate and of as many columns of the product, of which the first is `first`.
fn gate_up(first: usize, (own, of): &(Range<usize>, usize)) -> Vec<Stretch> {
    let stretch = |first: usize| Stretch::own(first + own.start..first + own.end);
    vec![stretch(first), stretch(first + of)]
}

/// A dimension in near-equal parts, None if there are fewer positions than ranks.
fn divide(total: usize, ranks: usize) -> Option<Vec<Range<usize>>> {
    let quantum = if total >= QUANTUM * ranks { QUANTUM } else { 1 };
    let bound = |rank: usize| if rank == ranks { total } else { total * rank / ranks / quantum * quantum };
    (total >= ranks).then(|| (0..ranks).map(|rank| bound(rank)..bound(rank + 1)).collect())
}

/// The query heads of each rank: consecutive ranges such that the key/value heads of a range serve
/// equally many of its query heads each, as attention's kernels need it. Among these, a division
/// whose largest range is smallest, then the most even one, then one with the fewest key/value
/// heads in all. None if there are fewer query heads than ranks; else there is one, since a range
/// within the query heads of one key/value head is always allowed.
fn divide_heads(heads: usize, kv_heads: usize, ranks: usize) -> Option<Vec<Range<usize>>> {
    if ranks > heads || !heads.is_multiple_of(kv_heads.max(1)) {
        return None;
    }
    let group = heads / kv_heads.max(1);
    let served = |range: &Range<usize>| range.end.div_ceil(group) - range.start / group;
    let allowed = |range: &Range<usize>| {
        let count = |kv: usize| range.end.min((kv + 1) * group) - range.start.max(kv * group);
        let first = range.start / group;
        (first..first + served(range)).all(|kv| count(kv) == count(first))
    };
    (heads.div_ceil(ranks)..=heads).find_map(|largest| {
        // The best division of the first `end` heads among so many ranks: its cost, and the start
        // of its last range.
        let mut best: Vec<Option<([usize; 2], usize)>> = vec![None; heads + 1];
        best[0] = Some(([0, 0], 0));
        let mut rows = Vec::with_capacity(ranks);
        for _ in 0..ranks {
            let mut next = vec![None; heads + 1];
            for end in 1..=heads {
                let starts = (end.saturating_sub(largest)..end).filter(|start| allowed(&(*start..end)));
                let costs = starts.filter_map(|start| {
                    let ([squares, kv], _) = best[start]?;
                    let length = end - start;
                    Some(([squares + length * length, kv + served(&(start..end))], start))
                });
                next[end] = costs.min();
            }
            rows.push(std::mem::replace(&mut best, next));
        }
        let mut end = heads;
        let mut ranges = Vec::with_capacity(ranks);
        let mut found = best;
        while let Some(before) = rows.pop() {
            let (_, start) = found[end]?;
            ranges.push(start..end);
            (end, found) = (start, before);
        }
        ranges.reverse();
        Some(ranges)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_ranks_are_all_of_every_sequence_and_cost_alike_under_zigzag() {
        for chunks in [Chunks::Zigzag, Chunks::Contiguous] {
            for ranks in [1, 2, 3, 4] {
                let (length, sequences) = (24 * ranks, 3);
                let of = |rank| ContextSplit { rank, ranks, length, exchange: ContextExchange::Keys(chunks) };
                let rows = |rank| of(rank).rows_of(rank, sequences * length).unwrap();
                let mut all: Vec<usize> = (0..ranks).flat_map(rows).flatten().collect();
                // The keys that causal queries see.
                let work = |rank| rows(rank).into_iter().flatten().map(|row| row % length + 1).sum::<usize>();
                let works: Vec<usize> = (0..ranks).map(work).collect();
                let alike = works.iter().all(|work| *work == works[0]);
                assert_eq!(alike, ranks == 1 || chunks == Chunks::Zigzag, "{chunks:?} {ranks}: {works:?}");
                assert_eq!(of(0).gathered(sequences * length).unwrap().into_iter().flatten().count(), all.len());
                all.sort_unstable();
                assert!(all.into_iter().eq(0..sequences * length));
            }
        }
        let split = ContextSplit { rank: 1, ranks: 2, length: 8, ..ContextSplit::WHOLE };
        assert_eq!(split.rows_of(1, 16).unwrap(), [2..4, 10..12, 4..6, 12..14]);
        for (length, tokens) in [(6, 12), (8, 12), (0, 0)] {
            let error = ContextSplit { length, ..split }.rows_of(1, tokens).unwrap_err().to_string();
            assert!(error.contains("make the sequence length a multiple of 4"), "{error}");
        }
    }

    fn sizes(ranges: &[Range<usize>]) -> Vec<usize> {
        ranges.iter().map(Range::len).collect()
    }

    #[test]
    fn dimensions_are_divided_in_multiples_where_they_allow_it() {
        let of = |total, ranks| sizes(&divide(total, ranks).unwrap());
        assert_eq!(of(257, 2), [128, 129]);
        assert_eq!(of(257, 4), [64, 64, 64, 65]);
        assert_eq!(of(1000, 3), [320, 336, 344]);
        assert_eq!(of(50_257, 8)[..3], [6272, 6288, 6272]);
        assert_eq!(of(40, 3), [13, 13, 14]);
        assert_eq!(of(3, 3), [1, 1, 1]);
        assert_eq!(divide(3, 4), None);
    }

    #[test]
    fn each_key_value_head_serves_equally_many_local_query_heads() {
        let of = |heads, kv_heads, ranks| divide_heads(heads, kv_heads, ranks).map(|ranges| sizes(&ranges));
        assert_eq!(of(32, 8, 8), Some(vec![4; 8]));
        assert_eq!(of(32, 8, 16), Some(vec![2; 16]));
        assert_eq!(of(6, 2, 2), Some(vec![3, 3]));
        assert_eq!(of(6, 2, 3), Some(vec![2, 2, 2]));
        assert_eq!(of(12, 12, 5), Some(vec![2, 2, 2, 3, 3]));
        // 4 + 4 + 4 would cut the second group in 1 and 2.
        assert_eq!(of(12, 4, 3), Some(vec![3, 3, 6]));
        assert_eq!(of(6, 2, 7), None);
        for (heads, kv_heads) in [(1, 1), (6, 2), (12, 4), (14, 2), (16, 1), (15, 5)] {
            let group = heads / kv_heads;
            for ranks in 1..=heads {
                let ranges = divide_heads(heads, kv_heads, ranks).unwrap();
                assert!(ranges.len() == ranks && ranges[0].start == 0 && ranges[ranks - 1].end == heads);
                assert!(
                    ranges.windows(2).all(|pair| pair[0].end == pair[1].start) && ranges.iter().all(|r| !r.is_empty())
                );
                for range in ranges {
                    let local = range.end.div_ceil(group) - range.start / group;
                    let each = range.len() / local;
                    // The local query head i attends to the local key/value head i / each.
                    let right =
                        range.clone().enumerate().all(|(i, head)| i / each == head / group - range.start / group);
                    assert!(range.len() == local * each && right, "{heads} on {kv_heads} over {ranks}: {range:?}");
                }
            }
        }
    }
}
