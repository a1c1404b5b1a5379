//! The number and the places of weights that become zero.

use std::fmt;
use std::str::FromStr;

/// The most neighbours of a pattern.
pub const NEIGHBOURS_MAX: usize = 64;

/// The number and the places of the weights that become zero.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Pattern {
    /// A share of them, anywhere.
    Share(f64),
    /// All but `kept` of each `of` neighbours in a row.
    Neighbours {
        /// The number that is kept.
        kept: usize,
        /// The number of neighbours.
        of: usize,
    },
}

/// Something that is no pattern, in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoPattern(String);

impl fmt::Display for NoPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoPattern {}

impl Pattern {
    /// A share above 0 and below 1.
    ///
    /// # Errors
    /// Any other number.
    pub fn share(share: f64) -> Result<Pattern, NoPattern> {
        match share > 0.0 && share < 1.0 {
            true => Ok(Pattern::Share(share)),
            false => {
                Err(NoPattern(format!("a sparsity of {share} is not between 0 and 1: 0.5 zeroes half of the weights")))
            }
        }
    }

    /// The number of zeros among `of` weights that are compared.
    pub fn zeros(self, of: usize) -> usize {
        self.zeros_at(1.0, of)
    }

    /// The number of zeros among `of` weights that are compared, when `progress` of the way to all
    /// zeros is done.
    pub fn zeros_at(self, progress: f64, of: usize) -> usize {
        match self {
            Pattern::Share(share) => (progress * share * of as f64) as usize,
            Pattern::Neighbours { kept, of } => (progress * (of - kept) as f64) as usize,
        }
    }
}

impl FromStr for Pattern {
    type Err = NoPattern;

    fn from_str(text: &str) -> Result<Pattern, NoPattern> {
        let numbers = text.split_once(':').and_then(|(kept, of)| Some((kept.parse().ok()?, of.parse().ok()?)));
        match numbers {
            Some((kept, of)) if 0 < kept && kept < of && of <= NEIGHBOURS_MAX => Ok(Pattern::Neighbours { kept, of }),
            _ => Err(NoPattern(format!(
                "`{text}` is no pattern: 2:4 keeps 2 of each 4 neighbours, of at most {NEIGHBOURS_MAX}"
            ))),
        }
    }
}
