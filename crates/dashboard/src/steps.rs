//! The positions of records on the horizontal axis. Most records are a fixed number of steps apart,
//! so a piece of equally spaced records is stored as its first position and the distance.

/// Numbers in increasing order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steps {
    pieces: Vec<Piece>,
    len: usize,
}

/// Records at equal distances.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Piece {
    /// The number of the first record.
    record: usize,
    first: f64,
    /// The distance; not known while there is one record.
    distance: Option<f64>,
}

impl Steps {
    /// Appends the place of the next record.
    ///
    /// # Panics
    ///
    /// It is not above the last one. [`Steps::count_below`] says what to remove first.
    pub fn push(&mut self, at: f64) {
        assert!(self.last().is_none_or(|last| last < at), "records are in order");
        let len = self.len;
        self.len += 1;
        if let Some(piece) = self.pieces.last_mut() {
            let number = (len - piece.record) as f64;
            let distance = *piece.distance.get_or_insert(at - piece.first);
            // Places are given back exactly, or they begin a new piece.
            if piece.first + number * distance == at {
                return;
            }
        }
        self.pieces.push(Piece { record: len, first: at, distance: None });
    }

    /// Keeps the first `len` places.
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len {
            return;
        }
        self.len = len;
        self.pieces.truncate(self.pieces.partition_point(|piece| piece.record < len));
        if let Some(piece) = self.pieces.last_mut().filter(|piece| piece.record + 1 == len) {
            piece.distance = None;
        }
    }

    /// The number of places.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The place of a record.
    ///
    /// # Panics
    ///
    /// There is no such record.
    pub fn get(&self, record: usize) -> f64 {
        assert!(record < self.len, "record {record} of {}", self.len);
        self.pieces[self.pieces.partition_point(|piece| piece.record <= record) - 1].place(record)
    }

    /// The last place.
    pub fn last(&self) -> Option<f64> {
        self.len.checked_sub(1).map(|last| self.get(last))
    }

    /// The number of records whose place is below `at`.
    pub fn count_below(&self, at: f64) -> usize {
        let Some(index) = self.pieces.partition_point(|piece| piece.first < at).checked_sub(1) else { return 0 };
        let piece = self.pieces[index];
        let end = self.pieces.get(index + 1).map_or(self.len, |next| next.record);
        let (mut low, mut high) = (piece.record, end);
        while low < high {
            let middle = low.midpoint(high);
            if piece.place(middle) < at { low = middle + 1 } else { high = middle }
        }
        low
    }
}

impl Piece {
    fn place(&self, record: usize) -> f64 {
        self.first + (record - self.record) as f64 * self.distance.unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn places_come_back_exactly(
            distances in prop::collection::vec(prop_oneof![6 => Just(1.0), 2 => Just(10.0), 1 => 0.001f64..3.0], 1..400),
            cut in 0usize..400,
        ) {
            let mut places = Vec::new();
            let mut at = 0.0;
            for distance in distances {
                at += distance;
                places.push(at);
            }
            let mut steps = Steps::default();
            places.iter().for_each(|at| steps.push(*at));
            steps.truncate(cut);
            places.truncate(cut);
            let more = places.last().map_or(0.5, |last| last + 2.5);
            steps.push(more);
            places.push(more);
            prop_assert_eq!((0..steps.len()).map(|n| steps.get(n)).collect::<Vec<_>>(), places.clone());
            for at in places.iter().flat_map(|at| [*at, at + 0.01, at - 0.01]) {
                prop_assert_eq!(steps.count_below(at), places.partition_point(|place| *place < at));
            }
        }
    }

    #[test]
    fn steps_at_equal_intervals_take_no_memory() {
        let mut steps = Steps::default();
        (1..=10_000).chain((10_010..=100_000).step_by(10)).for_each(|step| steps.push(f64::from(step)));
        assert_eq!(steps.pieces.len(), 2);
        assert_eq!((steps.len(), steps.last()), (19_000, Some(100_000.0)));
    }
}
