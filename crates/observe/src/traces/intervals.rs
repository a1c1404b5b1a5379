//! Sets of times as sorted, disjoint intervals.

/// Disjoint intervals in order of time, in nanoseconds.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Intervals(Vec<(i64, i64)>);

impl Intervals {
    /// The union of intervals in any order.
    pub fn union(intervals: impl IntoIterator<Item = (i64, i64)>) -> Intervals {
        let mut all: Vec<(i64, i64)> = intervals.into_iter().collect();
        all.sort_unstable();
        let mut merged: Vec<(i64, i64)> = Vec::new();
        for (start, end) in all {
            match merged.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => merged.push((start, end)),
            }
        }
        Intervals(merged)
    }

    /// The intervals.
    pub fn iter(&self) -> impl Iterator<Item = (i64, i64)> {
        self.0.iter().copied()
    }

    /// The sum of the lengths.
    pub fn length_ns(&self) -> i64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// From the first begin to the last end.
    pub fn extent(&self) -> Option<(i64, i64)> {
        Some((self.0.first()?.0, self.0.last()?.1))
    }

    /// The times that lie in both sets.
    pub fn and(&self, other: &Intervals) -> Intervals {
        let (mut a, mut b) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut common = Vec::new();
        while let (Some(&&(a_start, a_end)), Some(&&(b_start, b_end))) = (a.peek(), b.peek()) {
            let (start, end) = (a_start.max(b_start), a_end.min(b_end));
            if start < end {
                common.push((start, end));
            }
            if a_end < b_end {
                a.next();
            } else {
                b.next();
            }
        }
        Intervals(common)
    }

    /// The times of this set that do not lie in the other.
    pub fn without(&self, other: &Intervals) -> Intervals {
        let mut rest = Vec::new();
        let mut others = other.0.iter().peekable();
        for (start, end) in self.iter() {
            let mut from = start;
            while others.peek().is_some_and(|other| other.1 <= from) {
                others.next();
            }
            let mut ahead = others.clone();
            while let Some(other) = ahead.next_if(|other| other.0 < end) {
                if from < other.0 {
                    rest.push((from, other.0));
                }
                from = from.max(other.1);
            }
            if from < end {
                rest.push((from, end));
            }
        }
        Intervals(rest)
    }

    /// The times of this set between two times.
    pub fn within(&self, start: i64, end: i64) -> Intervals {
        self.and(&Intervals(vec![(start, end.max(start))]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unions_and_intersections() {
        let a = Intervals::union([(5, 7), (0, 2), (1, 3), (7, 8), (20, 20)]);
        assert_eq!(a.iter().collect::<Vec<_>>(), [(0, 3), (5, 8), (20, 20)]);
        assert_eq!((a.length_ns(), a.extent()), (6, Some((0, 20))));
        let b = Intervals::union([(2, 6), (7, 30)]);
        assert_eq!(a.and(&b).iter().collect::<Vec<_>>(), [(2, 3), (5, 6), (7, 8)]);
        assert_eq!(a.without(&b).iter().collect::<Vec<_>>(), [(0, 2), (6, 7)]);
        assert_eq!(b.without(&a).iter().collect::<Vec<_>>(), [(3, 5), (8, 20), (20, 30)]);
        assert_eq!(a.within(1, 6).length_ns(), 3);
        assert_eq!(Intervals::default().extent(), None);
    }
}
