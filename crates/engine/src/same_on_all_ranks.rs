//! Checks that all processes of a run have the same configuration.
//!
//! Threads of one process share it, but each process reads its own file and arguments. A process
//! with another learning rate or seed would go unnoticed: shapes agree, and every exchange
//! succeeds.

use crate::Result;
use crate::config::Config;
use crate::state::does_not_fit;
use crate::world::from_rank;
use std::collections::BTreeMap;
use trainyard_comm::Communicator;

/// Keys that may differ between hosts: kernels, threads, and the folder of offloaded state.
const OF_A_HOST: [&str; 2] = ["compute.", "memory.offload.directory"];

/// The most differing keys that an error names.
const NAMED_MAX: usize = 4;

/// Compares the configurations of all processes. All ranks call this together, before anything is
/// created.
///
/// # Errors
/// The same on every rank: the first rank that differs from rank 0, and the keys.
pub(crate) fn check(config: &Config, world: &Communicator) -> Result<()> {
    if world.backend() == "local" {
        return Ok(());
    }
    let mine = settings(config);
    let json = |settings: &BTreeMap<String, String>| serde_json::to_vec(settings).expect("plain data is JSON");
    let first = from_rank(world, 0, || Ok(json(&mine)))?;
    let first: BTreeMap<String, String> =
        serde_json::from_slice(&first).map_err(|error| does_not_fit(format!("rank 0's configuration: {error}")))?;
    let mut differ = vec![0u64; world.size()];
    world.all_gather(&[u64::from(first != mine)], &mut differ)?;
    let Some(rank) = differ.iter().position(|differs| *differs != 0) else { return Ok(()) };
    let what = from_rank(world, rank, || Ok(difference(&first, &mine).into_bytes()))?;
    Err(does_not_fit(format!(
        "rank {rank} and rank 0 were given different configurations: {}; start every process with the same file and the same --set",
        String::from_utf8_lossy(&what)
    )))
}

/// Every key that is set or has a default, with its value, except the keys of [`OF_A_HOST`].
fn settings(config: &Config) -> BTreeMap<String, String> {
    let mut settings = BTreeMap::new();
    for section in config.sections() {
        for key in section.keys() {
            let name = format!("{}.{}", section.name(), key.name);
            if !OF_A_HOST.iter().any(|own| name.starts_with(own)) {
                settings.extend(section.get(key.name).map(|value| (name, value.to_string())));
            }
        }
    }
    settings
}

/// The keys in which `mine` differs from `first`, with both values.
fn difference(first: &BTreeMap<String, String>, mine: &BTreeMap<String, String>) -> String {
    let value = |of: &BTreeMap<String, String>, key: &str| of.get(key).cloned().unwrap_or_else(|| "unset".to_owned());
    let mut keys: Vec<&String> =
        first.keys().chain(mine.keys()).filter(|key| first.get(*key) != mine.get(*key)).collect();
    keys.sort();
    keys.dedup();
    let named =
        keys.iter().take(NAMED_MAX).map(|key| format!("{key} is {} and {}", value(mine, key), value(first, key)));
    let mut text = named.collect::<Vec<_>>().join(", ");
    if keys.len() > NAMED_MAX {
        text += &format!(", and {} more keys", keys.len() - NAMED_MAX);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn of(sets: &[&str]) -> BTreeMap<String, String> {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        settings(&Config::parse(Path::new("c.toml"), "", &sets).unwrap())
    }

    #[test]
    fn keys_that_differ_are_named_with_both_values() {
        let first = of(&["training.steps=20", "compute.threads=1"]);
        assert_eq!(difference(&first, &of(&["training.steps=20", "compute.threads=2"])), "");
        let other = of(&["training.steps=30", "optimizer.learning_rate=0.5"]);
        assert_eq!(difference(&first, &other), "optimizer.learning_rate is 0.5 and unset, training.steps is 30 and 20");
    }
}
