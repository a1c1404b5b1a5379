//! A study: its settings, the trials so far, and the next action.

use crate::samplers::{Observation, Sampler};
use crate::{Point, Space, halving, population};
use serde::{Deserialize, Serialize};

/// The kind of a search.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Search {
    /// Every trial by itself, chosen by a sampler.
    Trials(Sampler),
    /// Population-based training: trials train side by side, and the worst are replaced by changed
    /// copies of the best.
    Population,
}

/// The settings of a study, fixed from its beginning.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The search.
    pub search: Search,
    /// The seed of all random numbers.
    pub seed: u64,
    /// Number of trials; of members, for a population.
    pub trials: usize,
    /// The shares of a full training at which trials are looked at, ascending; the last is 1. With
    /// a single one trials are not stopped early.
    pub rungs: Vec<f64>,
    /// Successive halving: one of this many trials goes on at each rung.
    pub reduction: usize,
}

/// An impossible combination of settings.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(String);

impl Settings {
    /// Rungs of successive halving: `1 / reduction^k` for k from `rungs - 1` to 0.
    pub fn halving_rungs(rungs: u32, reduction: usize) -> Vec<f64> {
        (0..rungs).rev().map(|k| (reduction as f64).powi(-(k as i32))).collect()
    }

    /// `rungs` equal intervals.
    pub fn equal_rungs(rungs: u32) -> Vec<f64> {
        (1..=rungs).map(|k| f64::from(k) / f64::from(rungs)).collect()
    }

    /// # Errors
    /// No trials; rungs that do not rise to 1; a reduction below 2; a population of fewer than 4.
    pub fn check(&self) -> Result<(), SettingsError> {
        let problem = |text: &str| Err(SettingsError(text.to_owned()));
        let rises = self.rungs.windows(2).all(|pair| pair[0] < pair[1]) && self.rungs.first().is_some_and(|r| *r > 0.0);
        if !rises || self.rungs.last() != Some(&1.0) {
            return problem("rungs are shares of a training that rise to 1");
        }
        if self.trials == 0 {
            return problem("a search without trials finds nothing");
        }
        if self.reduction < 2 {
            return problem("at each rung at most one of 2 trials goes on: the reduction is 2 or more");
        }
        if self.search == Search::Population && (self.trials < 4 || self.rungs.len() < 2) {
            return problem(
                "a population has at least 4 members, so that a quarter can be replaced, and at least 2 intervals",
            );
        }
        Ok(())
    }
}

/// The end of a trial before its last rung.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// It was not started, because it would not fit in memory or is no valid configuration.
    Refused(String),
    /// It failed, or its loss was not finite.
    Failed(String),
    /// A population replaced it.
    Replaced,
}

/// A trial.
#[derive(Clone, PartialEq, Debug)]
pub struct Trial {
    /// Its number, from 0.
    pub number: usize,
    /// Its settings.
    pub point: Point,
    /// The trial whose state it began with, and the rung at which.
    pub parent: Option<(usize, usize)>,
    /// The losses at the rungs it reached; None for rungs that its parent passed.
    pub losses: Vec<Option<f64>>,
    /// The rung to which it is training.
    pub training_to: Option<usize>,
    /// Its end, if it ended before the last rung.
    pub end: Option<End>,
    /// Seconds that it took so far.
    pub seconds: f64,
}

impl Trial {
    /// The highest rung that it reached, and its loss there.
    pub fn last(&self) -> Option<(usize, f64)> {
        let rung = self.losses.len().checked_sub(1)?;
        Some((rung, self.losses[rung]?))
    }

    /// The loss at `rung`.
    pub fn loss_at(&self, rung: usize) -> Option<f64> {
        self.losses.get(rung).copied().flatten()
    }
}

/// An event of a study.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A new trial starts to train to rung `to`.
    New {
        /// Its number.
        trial: usize,
        /// Its settings.
        point: Point,
        /// The trial and rung whose state it starts from.
        parent: Option<(usize, usize)>,
        /// The rung.
        to: usize,
        /// The settings in words; for readers of the journal.
        sets: Vec<String>,
    },
    /// A trial goes on to rung `to`.
    GoOn {
        /// Its number.
        trial: usize,
        /// The rung.
        to: usize,
    },
    /// A trial reached the rung it trained to.
    Reached {
        /// Its number.
        trial: usize,
        /// The loss there.
        loss: f64,
        /// Seconds since it started to train to this rung.
        seconds: f64,
    },
    /// A trial ended before the rung it trained to.
    Ended {
        /// Its number.
        trial: usize,
        /// The way it ended.
        end: End,
        /// Seconds since it started to train to this rung.
        seconds: f64,
    },
    /// The number of trials was raised.
    Trials {
        /// The new number.
        trials: usize,
    },
}

/// The next action.
#[derive(Clone, PartialEq, Debug)]
pub enum Next {
    /// Apply the event, then train: a new trial, or one that goes on.
    Train(Event),
    /// Apply the event: no training is needed.
    Note(Event),
    /// Nothing can start before a running trial ends.
    Wait,
    /// The search is over.
    Over,
}

/// A search with its trials.
#[derive(Clone, PartialEq, Debug)]
pub struct Study {
    /// The keys and their values.
    pub space: Space,
    /// The settings.
    pub settings: Settings,
    trials: Vec<Trial>,
}

impl Study {
    /// A study without trials.
    ///
    /// # Errors
    /// Those of [`Settings::check`].
    pub fn new(space: Space, settings: Settings) -> Result<Study, SettingsError> {
        settings.check()?;
        if let Search::Trials(sampler) = settings.search {
            sampler.check(&space).map_err(SettingsError)?;
        }
        Ok(Study { space, settings, trials: Vec::new() })
    }

    /// The trials, by number.
    pub fn trials(&self) -> &[Trial] {
        &self.trials
    }

    /// The last rung.
    pub fn top(&self) -> usize {
        self.settings.rungs.len() - 1
    }

    /// The trials that are training.
    pub fn running(&self) -> impl Iterator<Item = &Trial> {
        self.trials.iter().filter(|trial| trial.training_to.is_some())
    }

    /// The best trial: the least loss at the highest rung that any has reached.
    pub fn best(&self) -> Option<&Trial> {
        let rung = self.trials.iter().filter_map(|trial| trial.last()).map(|(rung, _)| rung).max()?;
        let loss = |trial: &Trial| trial.loss_at(rung);
        self.trials.iter().filter(|trial| loss(trial).is_some()).min_by(|a, b| {
            let (a, b) = (loss(a).unwrap_or(f64::INFINITY), loss(b).unwrap_or(f64::INFINITY));
            a.total_cmp(&b)
        })
    }

    /// The share of a full training that all trials together have trained.
    pub fn spent(&self) -> f64 {
        let share = |rung: Option<usize>| rung.map_or(0.0, |rung| self.settings.rungs[rung]);
        let of = |trial: &Trial| {
            let reached = share(trial.losses.len().checked_sub(1));
            reached - share(trial.parent.map(|(_, rung)| rung)).min(reached)
        };
        self.trials.iter().map(of).sum()
    }

    /// Takes note of what happened.
    ///
    /// # Errors
    /// An event that cannot follow those before it; the study is then as it was.
    pub fn apply(&mut self, event: &Event) -> Result<(), SettingsError> {
        let top = self.top();
        let problem = |text: String| Err(SettingsError(text));
        match event {
            Event::New { trial, point, parent, to, .. } => {
                if *trial != self.trials.len() {
                    return problem(format!("trial {trial} follows {} trials", self.trials.len()));
                }
                if point.0.len() != self.space.len() || *to > top {
                    return problem(format!("trial {trial} has another search space or other rungs"));
                }
                let losses = match parent {
                    None => Vec::new(),
                    Some((parent, rung)) if *parent < *trial && *rung < *to => vec![None; rung + 1],
                    Some((parent, rung)) => {
                        return problem(format!("trial {trial} cannot begin as trial {parent} was at rung {rung}"));
                    }
                };
                self.trials.push(Trial {
                    number: *trial,
                    point: point.clone(),
                    parent: *parent,
                    losses,
                    training_to: Some(*to),
                    end: None,
                    seconds: 0.0,
                });
            }
            Event::GoOn { trial, to } => {
                let Some(known) = self.trials.get_mut(*trial) else {
                    return problem(format!("there is no trial {trial}"));
                };
                if known.training_to.is_some() || known.end.is_some() || *to != known.losses.len() || *to > top {
                    return problem(format!("trial {trial} cannot go on to rung {to}"));
                }
                known.training_to = Some(*to);
            }
            Event::Reached { trial, loss, seconds } => {
                let known = self.training(*trial)?;
                if !loss.is_finite() {
                    return problem(format!("trial {trial}: the loss of a rung is finite"));
                }
                // A trial may pass rungs that nobody asked for.
                known.losses.resize(known.training_to.take().unwrap_or(0), None);
                known.losses.push(Some(*loss));
                known.seconds += seconds;
            }
            Event::Ended { trial, end, seconds } => {
                let known = match end {
                    End::Replaced => self.trials.get_mut(*trial).filter(|known| known.end.is_none()),
                    _ => Some(self.training(*trial)?),
                };
                let Some(known) = known else { return problem(format!("trial {trial} has ended")) };
                known.training_to = None;
                known.seconds += seconds;
                known.end = Some(end.clone());
            }
            Event::Trials { trials } => self.settings.trials = *trials,
        }
        Ok(())
    }

    fn training(&mut self, trial: usize) -> Result<&mut Trial, SettingsError> {
        let known = self.trials.get_mut(trial).filter(|known| known.training_to.is_some());
        known.ok_or_else(|| SettingsError(format!("trial {trial} is not training")))
    }

    /// The next action: a function of the settings and of what happened so far.
    pub fn next(&self) -> Next {
        match self.settings.search {
            Search::Population => population::next(self),
            Search::Trials(sampler) => {
                if let Some(trial) = halving::promoted(self) {
                    return Next::Train(Event::GoOn { trial, to: self.trials[trial].losses.len() });
                }
                if self.trials.len() < self.settings.trials
                    && let Some(point) = self.propose(sampler)
                {
                    return Next::Train(self.begin(point, None, 0));
                }
                if self.running().next().is_some() {
                    return Next::Wait;
                }
                match halving::last(self) {
                    Some(trial) => Next::Train(Event::GoOn { trial, to: self.trials[trial].losses.len() }),
                    None => Next::Over,
                }
            }
        }
    }

    /// The event of a new trial.
    pub(crate) fn begin(&self, point: Point, parent: Option<(usize, usize)>, to: usize) -> Event {
        Event::New { trial: self.trials.len(), sets: self.space.sets(&point), point, parent, to }
    }

    /// The settings of the next trial; None if every point of the space has been tried.
    fn propose(&self, sampler: Sampler) -> Option<Point> {
        if let Some(count) = self.space.count().filter(|count| *count <= self.trials.len() as u64) {
            let mut tried: Vec<&Point> = Vec::new();
            self.trials.iter().for_each(|trial| {
                if !tried.contains(&&trial.point) {
                    tried.push(&trial.point);
                }
            });
            if count <= tried.len() as u64 {
                return None;
            }
        }
        let observations: Vec<Observation<'_>> = self.trials.iter().map(Observation::of).collect();
        Some(sampler.propose(&self.space, self.settings.seed, &observations))
    }
}
