//! The decisions about which hosts take part in a run, as a state machine.
//!
//! Time is the duration since the roster began, given by the caller with every event.

use super::HostCard;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// The time for which a start waits for more hosts, after the last one that came.
const LAST_CALL: Duration = Duration::from_secs(3);
/// The time for which ranks train, at least, before they stop for hosts that have come.
const SETTLE: Duration = Duration::from_secs(3);
/// The number of the keeper's own host, which comes first.
pub(super) const KEEPER: u64 = 0;
/// The exit code of ranks after a failure that a restart may cure.
const FAULT: u8 = 70;
/// The exit code of ranks that were asked to stop.
const INTERRUPTED: u8 = 130;

/// The bounds of a run on hosts that come and go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Fewest hosts; with fewer the run waits.
    pub hosts_min: u32,
    /// Most hosts that train; others wait for a place.
    pub hosts_max: u32,
    /// Most restarts after failures of ranks whose hosts stay. A host that comes, leaves or dies
    /// does not count.
    pub restarts_max: u32,
    /// The time for which the run waits for hosts that are missing.
    pub patience: Duration,
}

/// A host's news about its ranks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Report {
    /// It is there.
    Alive,
    /// The run's folder: the ranks have begun to train.
    Run(String),
    /// All its ranks have ended, with this common exit code.
    Ended(u8),
    /// It wants to leave at the next opportunity.
    Leaving,
}

/// A task for a host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Nothing: the meeting is there.
    Alive,
    /// Nothing yet; the reason, in words.
    Wait(String),
    /// The run's folder.
    Run(String),
    /// Start ranks.
    Start(Start),
    /// Stop the ranks with a checkpoint.
    Stop(String),
    /// Kill the ranks.
    Abort(String),
    /// The host's part is over.
    End(Outcome),
}

/// The end of a host's part in a run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The exit code.
    pub code: u8,
    /// The reason, if the ranks have not said it.
    pub why: Option<String>,
}

/// A host's part in a generation of ranks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Start {
    /// Number of the generation, from 0.
    pub generation: u32,
    /// Number of this host, from 0.
    pub node: u32,
    /// Names of the hosts, in the order of their ranks.
    pub hosts: Vec<String>,
    /// The host's first rank.
    pub first: u32,
    /// Ranks of all hosts.
    pub world: u32,
    /// The port of host 0 at which the ranks meet.
    pub port: u16,
    /// The folder of the run to go on with; None: a new one.
    pub run: Option<String>,
}

/// The hosts of a run.
pub struct Roster {
    limits: Limits,
    /// By the number of their arrival.
    hosts: BTreeMap<u64, Host>,
    phase: Phase,
    /// Number of the next generation.
    generation: u32,
    restarts: u32,
    run: Option<String>,
    /// True if the keeper's own host wants to end the run.
    is_closing: bool,
}

struct Host {
    card: HostCard,
    stage: Stage,
    is_leaving: bool,
    /// True if it was part of an earlier generation that trained.
    is_proven: bool,
    came: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It takes no part yet.
    Waiting,
    Running,
    Ended(u8),
}

#[derive(Clone, Copy)]
enum Phase {
    /// Hosts gather, since `began`. If there are enough, ranks start at `ready`.
    Gathering {
        began: Duration,
        ready: Duration,
    },
    Running {
        /// When the ranks began to train.
        trains: Option<Duration>,
        /// True if they were asked to stop.
        is_stopping: bool,
        /// True if a host died.
        has_lost: bool,
    },
    Over,
}

type Orders = Vec<(u64, Order)>;

impl Roster {
    /// A roster without hosts.
    pub fn new(limits: Limits) -> Roster {
        let phase = Phase::Gathering { began: Duration::ZERO, ready: LAST_CALL };
        Roster { limits, hosts: BTreeMap::new(), phase, generation: 0, restarts: 0, run: None, is_closing: false }
    }

    /// True if the run has ended.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// Host number `id` comes. Numbers ascend from the keeper's, which is 0.
    pub fn join(&mut self, id: u64, card: HostCard, now: Duration) -> Orders {
        if self.is_over() {
            let why = Some("the run has ended".to_owned());
            return vec![(id, Order::End(Outcome { code: 0, why }))];
        }
        let name = card.host.clone();
        // A host that took part under an earlier keeper knows the run.
        self.run = self.run.take().or_else(|| card.run.clone());
        let host = Host { card, stage: Stage::Waiting, is_leaving: false, is_proven: false, came: now };
        self.hosts.insert(id, host);
        let Limits { hosts_min, hosts_max, .. } = self.limits;
        let count = self.hosts.len();
        let text = match &mut self.phase {
            Phase::Gathering { ready, .. } => {
                *ready = now + LAST_CALL;
                let more =
                    if count < hosts_min as usize { "the run waits for more" } else { "the run is about to begin" };
                format!("{name} is host {count} of {hosts_min} to {hosts_max}; {more}")
            }
            _ if count > hosts_max as usize => {
                format!("{hosts_max} hosts train, which is the most; {name} waits for a place")
            }
            _ => format!("{name} has come; the ranks stop with a checkpoint, and go on with this host"),
        };
        vec![(id, Order::Wait(text))]
    }

    /// Host number `id` says something.
    pub fn report(&mut self, id: u64, report: Report, now: Duration) -> Orders {
        let is_keeper = id == KEEPER;
        let Some(host) = self.hosts.get_mut(&id) else { return Vec::new() };
        match report {
            Report::Alive => {}
            // Rank 0 is on the keeper's host.
            Report::Run(folder) if is_keeper => {
                if let Phase::Running { trains, .. } = &mut self.phase {
                    trains.get_or_insert(now);
                }
                self.run = Some(folder.clone());
                return self.hosts.keys().map(|id| (*id, Order::Run(folder.clone()))).collect();
            }
            Report::Ended(code) if host.stage == Stage::Running => host.stage = Stage::Ended(code),
            Report::Run(_) | Report::Ended(_) => {}
            Report::Leaving => {
                host.is_leaving = true;
                self.is_closing |= is_keeper;
                let is_waiting = host.stage == Stage::Waiting;
                let name = host.card.host.clone();
                if is_keeper && matches!(self.phase, Phase::Gathering { .. }) {
                    return self.end(INTERRUPTED, None);
                }
                if is_waiting {
                    self.hosts.remove(&id);
                    return vec![(id, Order::End(Outcome { code: INTERRUPTED, why: None }))];
                }
                let why = if is_keeper { "the run was asked to stop".to_owned() } else { format!("{name} leaves") };
                return self.stop(&why);
            }
        }
        Vec::new()
    }

    /// Host number `id` has died or cannot be reached.
    pub fn lose(&mut self, id: u64, now: Duration) -> Orders {
        let Some(host) = self.hosts.remove(&id) else { return Vec::new() };
        if let Phase::Gathering { ready, .. } = &mut self.phase {
            *ready = (*ready).max(now);
        }
        if !matches!(host.stage, Stage::Running) {
            return Vec::new();
        }
        if let Phase::Running { has_lost, .. } = &mut self.phase {
            *has_lost = true;
        }
        let why = format!("{} is lost", host.card.host);
        let running = self.hosts.iter().filter(|(_, host)| host.stage == Stage::Running);
        running.map(|(id, _)| (*id, Order::Abort(why.clone()))).collect()
    }

    /// Decides what time and events have brought about. `port` gives a free port of the keeper's
    /// host.
    pub fn decide(&mut self, now: Duration, port: &mut dyn FnMut() -> u16) -> Orders {
        let mut orders = Vec::new();
        if let Phase::Running { trains, is_stopping, has_lost } = self.phase {
            if self.hosts.values().all(|host| host.stage != Stage::Running) {
                orders.extend(self.after_generation(has_lost, now));
            } else if !is_stopping && trains.is_some_and(|since| now >= since + SETTLE) && self.has_newcomer(now) {
                let why = "hosts have come";
                orders.extend(self.stop(why));
            }
        }
        if let Phase::Gathering { began, ready } = self.phase {
            let count = self.hosts.len() as u32;
            let Limits { hosts_min, hosts_max, patience, .. } = self.limits;
            let has_keeper = self.hosts.contains_key(&KEEPER);
            if has_keeper && (count >= hosts_max || (count >= hosts_min && now >= ready)) {
                orders.extend(self.start(port()));
            } else if now >= began + patience && count < hosts_min {
                let why = format!(
                    "{count} of at least {hosts_min} hosts are there after {} s of waiting; `launch` again with `train --resume` goes on when there are more",
                    patience.as_secs()
                );
                orders.extend(self.end(FAULT, Some(why)));
            }
        }
        orders
    }

    /// True if a host waits for which there is a place.
    fn has_newcomer(&self, now: Duration) -> bool {
        let running = self.hosts.values().filter(|host| host.stage != Stage::Waiting).count();
        let waits = |host: &Host| host.stage == Stage::Waiting && now >= host.came + SETTLE;
        running < self.limits.hosts_max as usize && self.hosts.values().any(waits)
    }

    /// Asks all ranks to stop with a checkpoint.
    fn stop(&mut self, why: &str) -> Orders {
        let Phase::Running { is_stopping, .. } = &mut self.phase else { return Vec::new() };
        if std::mem::replace(is_stopping, true) {
            return Vec::new();
        }
        let running = self.hosts.iter().filter(|(_, host)| host.stage == Stage::Running);
        running.map(|(id, _)| (*id, Order::Stop(why.to_owned()))).collect()
    }

    /// All ranks have ended: the run is over, or hosts gather for the next generation.
    fn after_generation(&mut self, has_lost: bool, now: Duration) -> Orders {
        let codes: Vec<u8> = self.hosts.values().filter_map(|host| host.code()).collect();
        let error = codes.iter().copied().find(|code| ![0, FAULT, INTERRUPTED].contains(code));
        let mut orders = Vec::new();
        if codes.is_empty() && self.hosts.is_empty() {
            self.phase = Phase::Over;
            return orders;
        }
        if !codes.is_empty() && codes.iter().all(|code| *code == 0) {
            return self.end(0, None);
        }
        if self.is_closing {
            return self.end(error.unwrap_or(INTERRUPTED), None);
        }
        if let Some(code) = error {
            // An error that comes with new hosts is theirs, if the others trained without them.
            let unproven = |host: &Host| host.stage != Stage::Waiting && !host.is_proven;
            let newcomers: Vec<u64> = self.hosts.iter().filter(|(_, host)| unproven(host)).map(|(id, _)| *id).collect();
            if !self.hosts.values().any(|host| host.is_proven) || newcomers.is_empty() {
                return self.end(code, None);
            }
            for id in newcomers {
                self.hosts.remove(&id);
                let why = "the run has an error with this host, and goes on without it".to_owned();
                orders.push((id, Order::End(Outcome { code, why: Some(why) })));
            }
        } else if has_lost {
            // The hosts that stay go on.
        } else if codes.contains(&FAULT) {
            self.restarts += 1;
            let most = self.limits.restarts_max;
            if self.restarts > most {
                let why = format!("a rank failed, and --max-restarts allows {most} restarts");
                return self.end(FAULT, Some(why));
            }
        } else if !matches!(self.phase, Phase::Running { is_stopping: true, .. }) {
            // A rank got a signal from elsewhere, which stops the run.
            return self.end(INTERRUPTED, None);
        }
        let leaving: Vec<u64> = self.hosts.iter().filter(|(_, host)| host.is_leaving).map(|(id, _)| *id).collect();
        for id in leaving {
            self.hosts.remove(&id);
            orders.push((id, Order::End(Outcome { code: INTERRUPTED, why: None })));
        }
        let has_trained = matches!(self.phase, Phase::Running { trains: Some(_), .. });
        for host in self.hosts.values_mut() {
            host.is_proven |= has_trained && error.is_none() && host.stage != Stage::Waiting;
            host.stage = Stage::Waiting;
        }
        self.phase = Phase::Gathering { began: now, ready: now };
        let count = self.hosts.len() as u32;
        if count < self.limits.hosts_min {
            let text = format!("{count} of at least {} hosts are left; the run waits for more", self.limits.hosts_min);
            orders.extend(self.hosts.keys().map(|id| (*id, Order::Wait(text.clone()))));
        }
        orders
    }

    /// Starts a generation on the hosts that came first.
    fn start(&mut self, port: u16) -> Orders {
        let count = self.hosts.len().min(self.limits.hosts_max as usize);
        let names: Vec<String> = self.hosts.values().take(count).map(|host| host.card.host.clone()).collect();
        let world = self.hosts.values().take(count).map(|host| host.card.ranks).sum();
        let mut first = 0;
        let mut orders = Vec::new();
        for (node, (id, host)) in (0..).zip(self.hosts.iter_mut().take(count)) {
            host.stage = Stage::Running;
            let (generation, hosts, run) = (self.generation, names.clone(), self.run.clone());
            orders.push((*id, Order::Start(Start { generation, node, hosts, first, world, port, run })));
            first += host.card.ranks;
        }
        self.generation += 1;
        self.phase = Phase::Running { trains: None, is_stopping: false, has_lost: false };
        orders
    }

    /// Ends the run on all hosts.
    fn end(&mut self, code: u8, why: Option<String>) -> Orders {
        self.phase = Phase::Over;
        let hosts = std::mem::take(&mut self.hosts);
        hosts.into_keys().map(|id| (id, Order::End(Outcome { code, why: why.clone() }))).collect()
    }
}

impl Host {
    fn code(&self) -> Option<u8> {
        match self.stage {
            Stage::Ended(code) => Some(code),
            Stage::Waiting | Stage::Running => None,
        }
    }
}

#[cfg(test)]
#[path = "roster_tests.rs"]
mod tests;
