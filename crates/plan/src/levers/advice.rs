//! Prices the table of levers, and combinations of the best.

use super::table::LEVERS;
use super::{Bench, Choice, Lever, Offers, Place, Price, Setup, bottleneck};

/// Everything that is known about the levers of one setup.
pub struct Advice {
    /// The present setup.
    pub setup: Setup,
    /// Its price.
    pub now: Price,
    /// The bottleneck of the present step, in words.
    pub bottleneck: String,
    /// The levers: those that can be run come first, the largest gain first.
    pub rows: Vec<Row>,
    /// The best combinations of levers that can be run.
    pub combinations: Vec<Combination>,
}

/// A lever and its price.
pub struct Row {
    /// The lever.
    pub lever: &'static Lever,
    /// Its price.
    pub outcome: Outcome,
}

/// The price of a lever.
pub enum Outcome {
    /// The lever's best setup was simulated.
    Priced {
        /// The change in words.
        words: String,
        /// The setup.
        setup: Box<Setup>,
        /// Its price.
        price: Price,
        /// Tokens per second, as a factor of those of the present setup.
        speed: f64,
        /// True if the engine runs it.
        runs: bool,
        /// The same factor as measured, if it was tried.
        tried: Option<f64>,
    },
    /// There is nothing to price, and the reason.
    Nothing(String),
}

/// Levers that are used together.
pub struct Combination {
    /// The levers.
    pub levers: Vec<&'static Lever>,
    /// The change in words.
    pub words: String,
    /// The setup.
    pub setup: Setup,
    /// Its price.
    pub price: Price,
    /// Tokens per second, as a factor of those of the present setup.
    pub speed: f64,
}

/// Gains below this are none: the simulation itself is no better.
const GAIN_MIN: f64 = 0.002;
/// Number of levers of which all pairs are tried.
const PAIRED: usize = 9;
/// Number of the best pairs to which a third lever is added.
const EXTENDED: usize = 3;

/// Prices every lever for `setup`.
///
/// # Errors
///
/// The present setup has no price; the error is the bench's.
pub fn advise(setup: &Setup, place: &Place, bench: &dyn Bench) -> Result<Advice, String> {
    let now = bench.price(setup)?;
    let speed_now = setup.tokens() / now.step_s;
    let question = Question { place, bench, now: &now, speed_now };
    let mut rows: Vec<Row> =
        LEVERS.iter().map(|lever| Row { lever, outcome: question.outcome(lever, setup) }).collect();
    rows.sort_by(|a, b| rank(&b.outcome).partial_cmp(&rank(&a.outcome)).unwrap_or(std::cmp::Ordering::Equal));
    let combinations = question.combinations(setup, &rows);
    let bottleneck = bottleneck::words(setup, place, &now);
    Ok(Advice { setup: setup.clone(), now, bottleneck, rows, combinations })
}

/// The key by which rows are sorted: runnable, fits, speed.
fn rank(outcome: &Outcome) -> (bool, bool, f64) {
    match outcome {
        Outcome::Priced { price, speed, runs, .. } => (*runs, price.fits(), *speed),
        Outcome::Nothing(_) => (false, false, f64::NEG_INFINITY),
    }
}

struct Question<'a> {
    place: &'a Place,
    bench: &'a dyn Bench,
    now: &'a Price,
    speed_now: f64,
}

impl Question<'_> {
    fn outcome(&self, lever: &Lever, setup: &Setup) -> Outcome {
        let choices = match (lever.offers)(setup, self.place) {
            Offers::Choices(choices) => choices,
            Offers::InUse(words) => return Outcome::Nothing(format!("in use: {words}")),
            Offers::NoUse(why) => return Outcome::Nothing(format!("no use here: {why}")),
            Offers::NotPriced(why) => return Outcome::Nothing(format!("not priced: {why}")),
        };
        if choices.is_empty() {
            return Outcome::Nothing("no use here: there is nothing to change".to_owned());
        }
        match self.best(choices) {
            Ok((Choice { words, setup }, price, speed)) => Outcome::Priced {
                words,
                price,
                speed,
                runs: self.bench.runs(&setup),
                setup: Box::new(setup),
                tried: None,
            },
            Err(why) => Outcome::Nothing(format!("not possible here: {why}")),
        }
    }

    /// The best choice: the fastest if one gains speed, otherwise the one that saves most memory.
    /// If none fits, the smallest; if none has a price, the reason of the first.
    fn best(&self, choices: Vec<Choice>) -> Result<(Choice, Price, f64), String> {
        let mut why = None;
        let mut priced = Vec::new();
        for choice in choices {
            match self.bench.price(&choice.setup) {
                Ok(price) => {
                    let speed = choice.setup.tokens() / price.step_s / self.speed_now;
                    priced.push((choice, price, speed));
                }
                Err(reason) => why = why.or(Some(reason)),
            }
        }
        let fits = |(_, price, _): &(Choice, Price, f64)| price.fits();
        let some_fit = priced.iter().any(fits);
        if some_fit {
            priced.retain(fits);
        }
        let fastest = priced.iter().map(|(.., speed)| *speed).fold(f64::NEG_INFINITY, f64::max);
        let saves = |price: &Price| price.bytes < self.now.bytes;
        let by_memory =
            !some_fit || self.now.fits() && fastest < 1.0 + GAIN_MIN && priced.iter().any(|(_, price, _)| saves(price));
        let better = |a: &(Choice, Price, f64), b: &(Choice, Price, f64)| {
            if by_memory { b.1.bytes.cmp(&a.1.bytes).then(a.2.total_cmp(&b.2)) } else { a.2.total_cmp(&b.2) }
        };
        priced.into_iter().max_by(better).ok_or_else(|| why.unwrap_or_else(|| "nothing could be priced".to_owned()))
    }

    /// The best pairs or triples of levers that can be run and gain something: of those that leave
    /// the result as it is, and of all. Where the present step does not fit, levers that make it
    /// fit go with levers that gain speed.
    fn combinations(&self, setup: &Setup, rows: &[Row]) -> Vec<Combination> {
        let useful: Vec<&'static Lever> = rows.iter().filter(|row| self.is_useful(row)).map(|row| row.lever).collect();
        let mut best = Vec::new();
        for exact in [true, false] {
            let levers: Vec<&'static Lever> = useful.iter().copied().filter(|lever| lever.is_exact || !exact).collect();
            best.extend(self.best_of(setup, &levers));
        }
        best.dedup_by(|a, b| a.setup == b.setup);
        best
    }

    /// True if the row is one of the first that gain speed, or, if the present step does not fit,
    /// that make it fit.
    fn is_useful(&self, row: &Row) -> bool {
        let Outcome::Priced { price, speed, runs: true, .. } = &row.outcome else { return false };
        let gains = *speed > 1.0 + GAIN_MIN;
        if self.now.fits() { gains && price.fits() } else { gains || price.fits() }
    }

    fn best_of(&self, setup: &Setup, levers: &[&'static Lever]) -> Option<Combination> {
        let levers = &levers[..levers.len().min(PAIRED)];
        let mut pairs: Vec<Combination> = Vec::new();
        // The order counts: the second lever chooses on what the first made.
        for first in levers {
            for second in levers {
                if first.name != second.name {
                    pairs.extend(self.together(setup, &[*first, *second]));
                }
            }
        }
        pairs.sort_by(|a, b| b.speed.total_cmp(&a.speed));
        pairs.dedup_by(|a, b| a.setup == b.setup);
        let mut triples = Vec::new();
        for pair in pairs.iter().take(EXTENDED) {
            for third in levers.iter().filter(|third| pair.levers.iter().all(|lever| lever.name != third.name)) {
                triples.extend(self.together(setup, &[pair.levers[0], pair.levers[1], third]));
            }
        }
        let faster = |a: &Combination, b: &Combination| a.speed.total_cmp(&b.speed);
        let pair = pairs.into_iter().max_by(faster);
        let triple = triples.into_iter().max_by(faster);
        match (pair, triple) {
            (Some(pair), Some(triple)) if triple.speed > pair.speed * (1.0 + GAIN_MIN) => Some(triple),
            (pair, triple) => pair.or(triple),
        }
    }

    /// The levers, one after the other: each chooses its best on what the ones before it made.
    fn together(&self, setup: &Setup, levers: &[&'static Lever]) -> Option<Combination> {
        let (mut setup, mut words, mut last) = (setup.clone(), Vec::new(), None);
        let mut speed_before = 1.0;
        for lever in levers {
            let Offers::Choices(choices) = (lever.offers)(&setup, self.place) else { return None };
            let (choice, price, speed) = self.best(choices).ok()?;
            let gains = !self.now.fits() || price.fits() && speed > speed_before * (1.0 + GAIN_MIN);
            if !self.bench.runs(&choice.setup) || !gains {
                return None;
            }
            words.push(choice.words);
            setup = choice.setup;
            speed_before = speed;
            last = Some((price, speed));
        }
        let (price, speed) = last.filter(|(price, _)| price.fits())?;
        Some(Combination { levers: levers.to_vec(), words: words.join("; "), setup, price, speed })
    }
}
