//! The elements of a tensor that a piece of a checkpoint holds: equally long runs at equal
//! distances.
//!
//! One run is a flat range, as a ZeRO shard has it. Many runs are some columns of some rows, as
//! tensor parallelism has them. In a tensor of the shape `[rows, columns]`, the box of the rows
//! `r0..r1` and the columns `c0..c1` has `r1 - r0` runs. The first is `r0 * columns + c0 ..
//! r0 * columns + c1`, and the distance is `columns`. The form does not depend on the number of
//! dimensions, so state that is stored flat is divided like its parameter.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use trainyard_model::patch::rectangles;

/// Equally long runs of a tensor's elements, row-major, at equal distances.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Runs {
    /// The elements of the first run.
    pub first: Range<usize>,
    /// Number of runs.
    pub count: usize,
    /// Elements from the start of one run to the start of the next; without meaning for one run.
    pub stride: usize,
}

/// Runs, and the place of each in a buffer or file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlacedRuns {
    /// The elements of the tensor.
    pub runs: Runs,
    /// The place of the first run's first element.
    pub at: usize,
    /// Elements of the buffer from the start of one run to the start of the next.
    pub stride: usize,
}

impl From<Range<usize>> for Runs {
    fn from(first: Range<usize>) -> Runs {
        Runs { first, count: 1, stride: 0 }
    }
}

impl fmt::Display for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "elements {:?}", self.first)?;
        match self.count {
            1 => Ok(()),
            count => write!(f, " ({count} times, every {})", self.stride),
        }
    }
}

impl Runs {
    /// Number of elements of all runs.
    pub fn elements(&self) -> usize {
        self.first.len() * self.count
    }

    /// True if they are a flat range or a rectangle of a tensor with `elements` elements.
    pub fn are_within(&self, elements: usize) -> bool {
        let Runs { first, count, stride } = self;
        let last = || stride.checked_mul(count - 1).and_then(|moved| moved.checked_add(first.end));
        match count {
            0 => false,
            1 => first.start <= first.end && first.end <= elements,
            _ => {
                let is_rectangle = !first.is_empty() && *stride > 0 && elements.is_multiple_of(*stride);
                is_rectangle
                    && first.start % stride + first.len() <= *stride
                    && last().is_some_and(|last| last <= elements)
            }
        }
    }

    /// The runs, with `place` as the place of the first and the others right behind it.
    pub fn placed_at(self, at: usize) -> PlacedRuns {
        PlacedRuns { at, stride: self.first.len(), runs: self }
    }

    fn run(&self, number: usize) -> Range<usize> {
        let moved = number * self.stride;
        self.first.start + moved..self.first.end + moved
    }

    /// From the first to the last element, elements between the runs included.
    fn span(&self) -> Range<usize> {
        self.first.start..self.run(self.count.saturating_sub(1)).end
    }

    /// The numbers of the runs that have elements of `range`.
    fn meeting(&self, range: &Range<usize>) -> Range<usize> {
        let Range { start, end } = self.first;
        if range.is_empty() || range.end <= start || self.first.is_empty() {
            return 0..0;
        }
        if self.count <= 1 {
            return 0..usize::from(range.start < end).min(self.count);
        }
        let first = if range.start < end { 0 } else { (range.start - end) / self.stride + 1 };
        let last = ((range.end - 1 - start) / self.stride + 1).min(self.count);
        first.min(last)..last
    }

    /// True if both are rectangles of one matrix and have no column in common.
    fn are_beside(&self, other: &Runs) -> bool {
        let columns = |runs: &Runs| {
            let start = runs.first.start % runs.stride;
            start..start + runs.first.len()
        };
        self.count > 1 && other.count > 1 && self.stride == other.stride && {
            let (own, other) = (columns(self), columns(other));
            own.end <= other.start || other.end <= own.start
        }
    }
}

impl PlacedRuns {
    /// The places of the runs, in order; one if they lie one after the other.
    pub fn places(&self) -> impl Iterator<Item = Range<usize>> {
        let (joined, len) = (self.stride == self.runs.first.len(), self.runs.first.len());
        let (count, len) = if joined { (1, len * self.runs.count) } else { (self.runs.count, len) };
        let (at, stride) = (self.at, self.stride);
        (0..count).map(move |number| at + number * stride..at + number * stride + len)
    }

    /// Calls `each` for every stretch of elements that both have: its place in `self`, its place in
    /// `other`, its length. Takes time in proportion to the runs of `self` that lie between the
    /// ends of `other`, and to the stretches.
    pub fn for_common(&self, other: &PlacedRuns, mut each: impl FnMut(usize, usize, usize)) {
        if self.runs.are_beside(&other.runs) {
            return;
        }
        for number in self.runs.meeting(&other.runs.span()) {
            let run = self.runs.run(number);
            for other_number in other.runs.meeting(&run) {
                let other_run = other.runs.run(other_number);
                let start = run.start.max(other_run.start);
                let length = run.end.min(other_run.end) - start;
                let place = self.at + number * self.stride + start - run.start;
                each(place, other.at + other_number * other.stride + start - other_run.start, length);
            }
        }
    }
}

/// Checks that every element of a tensor is in exactly one of `pieces`, which are within it.
///
/// # Errors
/// The first elements that are in no piece or in several, in words.
pub(super) fn check_cover(pieces: &[Runs], elements: usize) -> Result<(), String> {
    let mut strides = pieces.iter().filter(|runs| runs.count > 1).map(|runs| runs.stride);
    let width = strides.next().unwrap_or(elements).max(1);
    if let Some(other) = strides.find(|stride| *stride != width) {
        return Err(format!("its pieces are columns of matrices of {width} and of {other} columns"));
    }
    let missing = |from: usize, to: usize| Err(format!("elements {from} to {to} were written by no rank"));
    let doubled = |from: usize, to: usize| Err(format!("elements {from} to {to} were written twice"));
    let mut rows: BTreeMap<usize, Vec<(usize, Range<usize>)>> = BTreeMap::new();
    for runs in pieces {
        let columns = runs.first.start % width..runs.first.start % width + runs.first.len();
        let all = match runs.count {
            1 => rectangles(runs.first.clone(), width),
            count => vec![(runs.first.start / width..runs.first.start / width + count, columns)],
        };
        for (held, columns) in all {
            rows.entry(held.start).or_default().push((held.end, columns));
            rows.entry(held.end).or_default();
        }
    }
    // From top to bottom. Between two borders the same rectangles are open, by first column.
    let mut open: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    let mut done = 0;
    for (border, begun) in &rows {
        if *border != done && open.is_empty() {
            return missing(done * width, border * width);
        }
        open.retain(|_, (_, bottom)| *bottom > *border);
        for (bottom, columns) in begun {
            if let Some((end, _)) = open.insert(columns.start, (columns.end, *bottom)) {
                return doubled(border * width + columns.start, border * width + columns.end.min(end));
            }
        }
        let mut column = 0;
        for (start, (end, _)) in &open {
            match column.cmp(start) {
                Ordering::Less => return missing(border * width + column, border * width + start),
                Ordering::Greater => return doubled(border * width + start, border * width + column.min(*end)),
                Ordering::Equal => column = *end,
            }
        }
        if column != width && !open.is_empty() {
            return missing(border * width + column, (border + 1) * width);
        }
        done = *border;
    }
    if done * width != elements { missing(done * width, elements) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A flat range or rectangle of a tensor of `rows` x `width` elements.
    fn runs(rows: usize, width: usize) -> impl Strategy<Value = Runs> {
        let pair = |end: usize| [0..=end, 0..=end].prop_map(|[a, b]| a.min(b)..a.max(b));
        let flat = pair(rows * width).prop_map(Runs::from);
        let rectangle = (pair(rows), pair(width)).prop_map(move |(rows, columns)| {
            let first = rows.start * width + columns.start..rows.start * width + columns.end;
            Runs { first, count: rows.len(), stride: width }
        });
        prop_oneof![flat, rectangle].prop_filter("a rectangle", move |runs| runs.are_within(rows * width))
    }

    fn all(runs: &Runs) -> Vec<usize> {
        (0..runs.count).flat_map(|number| runs.run(number)).collect()
    }

    /// The place of every element.
    fn places(placed: &PlacedRuns) -> BTreeMap<usize, usize> {
        let place = |(i, element)| {
            let (number, within) = (i / placed.runs.first.len(), i % placed.runs.first.len());
            (element, placed.at + number * placed.stride + within)
        };
        all(&placed.runs).into_iter().enumerate().map(place).collect()
    }

    proptest! {
        #[test]
        fn common_stretches_are_the_common_elements(
            (a, b) in (1usize..7, 1usize..7).prop_flat_map(|(rows, width)| (runs(rows, width), runs(width, rows))),
            at in 0usize..9, gap in 0usize..5,
        ) {
            let (a, b) = (PlacedRuns { stride: a.first.len() + gap, at, runs: a }, b.placed_at(3));
            let (of_a, of_b) = (places(&a), places(&b));
            let mut got = Vec::new();
            a.for_common(&b, |x, y, n| got.extend((0..n).map(|i| (x + i, y + i))));
            let mut want: Vec<_> = of_a.iter().filter_map(|(e, x)| Some((*x, *of_b.get(e)?))).collect();
            got.sort_unstable();
            want.sort_unstable();
            prop_assert_eq!(got, want);
            let spread: Vec<_> = a.places().flatten().collect();
            prop_assert_eq!(spread, of_a.into_values().collect::<Vec<_>>());
        }

        /// Against counting.
        #[test]
        fn a_cover_has_every_element_once(
            (rows, width, pieces) in (1usize..5, 1usize..5)
                .prop_flat_map(|(r, w)| (Just(r), Just(w), prop::collection::vec(runs(r, w), 0..5))),
        ) {
            let mut times = vec![0; rows * width];
            pieces.iter().flat_map(all).for_each(|element| times[element] += 1);
            let got = check_cover(&pieces, rows * width);
            prop_assert_eq!(got.is_ok(), times.iter().all(|n| *n == 1), "{:?}", got);
        }

        /// Guillotine cuts always cover; without any one piece, or with one of them twice, they do
        /// not.
        #[test]
        fn a_cut_matrix_is_covered_until_a_piece_is_missing(
            rows in 1usize..9, width in 2usize..9, cuts in prop::collection::vec(any::<[prop::sample::Index; 2]>(), 0..6),
            victim in any::<prop::sample::Index>(),
        ) {
            let mut boxes = vec![(0..rows, 0..width)];
            for [which, at] in cuts {
                let (r, c) = boxes.swap_remove(which.index(boxes.len()));
                if r.len() > c.len() {
                    let cut = r.start + 1 + at.index(r.len() - 1);
                    boxes.extend([(r.start..cut, c.clone()), (cut..r.end, c)]);
                } else if c.len() > 1 {
                    let cut = c.start + 1 + at.index(c.len() - 1);
                    boxes.extend([(r.clone(), c.start..cut), (r, cut..c.end)]);
                } else {
                    boxes.push((r, c));
                }
            }
            let runs = |(r, c): &(Range<usize>, Range<usize>)| Runs {
                first: r.start * width + c.start..r.start * width + c.end,
                count: r.len(),
                stride: width,
            };
            let mut pieces: Vec<_> = boxes.iter().map(runs).collect();
            prop_assert_eq!(check_cover(&pieces, rows * width), Ok(()));
            let lost = pieces.swap_remove(victim.index(pieces.len()));
            prop_assert!(check_cover(&pieces, rows * width).is_err());
            pieces.extend([lost.clone(), lost]);
            prop_assert!(check_cover(&pieces, rows * width).is_err());
        }
    }

    #[test]
    fn runs_that_are_no_rectangle_of_the_tensor_are_not_within() {
        let runs = |first, count, stride| Runs { first, count, stride };
        assert!(runs(3..6, 4, 6).are_within(24));
        for wrong in [
            runs(4..7, 3, 6),
            runs(3..6, 5, 6),
            runs(3..6, 4, 7),
            runs(3..6, 0, 6),
            runs(3..3, 2, 6),
            runs(3..6, 2, 0),
            runs(3..6, usize::MAX, 6),
            runs(0..25, 1, 0),
            #[expect(clippy::reversed_empty_ranges, reason = "a lie of a manifest")]
            runs(5..4, 1, 0),
        ] {
            assert!(!wrong.are_within(24), "{wrong}");
        }
        let error = check_cover(&[runs(0..2, 3, 4), runs(2..4, 2, 4)], 12).unwrap_err();
        assert_eq!(error, "elements 10 to 12 were written by no rank");
        let error = check_cover(&[runs(0..2, 3, 4), runs(2..3, 4, 3)], 12).unwrap_err();
        assert_eq!(error, "its pieces are columns of matrices of 4 and of 3 columns");
        assert_eq!(check_cover(&[Runs::from(0..0)], 0), Ok(()));
    }
}
