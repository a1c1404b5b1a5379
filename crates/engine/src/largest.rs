//! Finds the largest model that a machine can train: the most blocks of one shape that fit in its
//! memory.
//!
//! The needs of a step are predicted by executing it on the meta device ([`crate::predict`]), so
//! the search allocates nothing.

use crate::bench::forecast;
use crate::config::Resolved;
use crate::host::{self, ASIDE};
use crate::predict::StepNeeds;
use crate::shape::model_spec;
use crate::{EngineError, Result, room};
use trainyard_model::Model;
use trainyard_tensor::Device;

/// Upper limit for the blocks of a model in the search.
pub const LAYERS_MAX: usize = 4096;

/// One part in this many of the free memory is left for gaps between allocations and, on a GPU, for
/// its libraries.
const SPARE: usize = 32;

/// The memory that a machine has for one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// Bytes of the device.
    pub device: usize,
    /// Bytes of the host beside a GPU.
    pub host: usize,
    /// Bytes of disk, where offloaded state lies.
    pub disk: u64,
}

impl Room {
    /// The memory that `device`, its host and its disk have free now, within `memory.limit`.
    ///
    /// # Errors
    /// A GPU does not report its free memory.
    pub fn of(resolved: &Resolved, device: &Device) -> Result<Room> {
        let but_spare = |bytes: usize| bytes / SPARE * (SPARE - 1);
        let host = host::memory().map_or(usize::MAX, |memory| but_spare(memory.available.saturating_sub(ASIDE)));
        let free = match device.as_cuda() {
            Some(cuda) => but_spare(cuda.memory()?.0),
            None => host,
        };
        let limit = resolved.config.memory.limit.map_or(usize::MAX, |limit| limit.0 as usize);
        let folder = resolved.config.offload.directory.as_deref().unwrap_or(&resolved.config.run.directory);
        Ok(Room { device: free.min(limit), host, disk: room::free(folder).unwrap_or(u64::MAX) })
    }

    /// True if a step with these needs fits.
    pub fn holds(&self, prediction: &StepNeeds) -> bool {
        prediction.memory.peak_total() <= self.device
            && prediction.host_memory.peak_total() <= self.host
            && prediction.disk <= self.disk
    }
}

/// A model that fits.
pub struct Largest {
    /// Number of blocks.
    pub layers: usize,
    /// Number of parameters.
    pub parameters: u64,
    /// Configuration of the model.
    pub resolved: Resolved,
    /// Needs of a step of it.
    pub prediction: StepNeeds,
}

/// The largest model whose step fits in `room`, with up to [`LAYERS_MAX`] blocks. `configure` makes
/// the configuration for a number of blocks. None if a single block does not fit.
///
/// # Errors
/// A configuration cannot be resolved.
pub fn largest<E: From<EngineError>>(
    room: &Room,
    configure: impl Fn(usize) -> std::result::Result<Resolved, E>,
) -> std::result::Result<Option<Largest>, E> {
    let fits = |layers: usize| -> std::result::Result<Option<Largest>, E> {
        let resolved = configure(layers)?;
        let (_, prediction) = forecast(&resolved, 0)?;
        if !room.holds(&prediction) {
            return Ok(None);
        }
        let parameters = parameters(&resolved)?;
        Ok(Some(Largest { layers, parameters, resolved, prediction }))
    };
    let Some(mut best) = fits(1)? else { return Ok(None) };
    // The least number of blocks known not to fit.
    let mut too_many = LAYERS_MAX + 1;
    let mut next = 2;
    while best.layers + 1 < too_many {
        match fits(next)? {
            Some(larger) => best = larger,
            None => too_many = next,
        }
        let doubled = 2 * best.layers;
        next = if doubled < too_many { doubled } else { best.layers.midpoint(too_many) };
    }
    Ok(Some(best))
}

fn parameters(resolved: &Resolved) -> Result<u64> {
    Ok(Model::new(model_spec(resolved)?)?.parameter_count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Inputs};
    use crate::device;
    use trainyard_tensor::Purpose;

    fn layers(layers: usize, sets: &[&str]) -> Result<Resolved> {
        let shape = [
            "model.family='llama'",
            "model.dim=32",
            "model.heads=2",
            "model.max_sequence_length=16",
            "model.vocab_size=64",
            "training.steps=1",
            &format!("model.layers={layers}"),
        ];
        let sets: Vec<String> = shape.iter().chain(sets).map(|set| (*set).to_owned()).collect();
        let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
        Ok(Config::parse("bench".as_ref(), "", &sets)?.resolve(&inputs)?)
    }

    #[test]
    fn one_block_more_would_not_fit() {
        let plenty = Room { device: usize::MAX, host: usize::MAX, disk: u64::MAX };
        let on_disk = ["memory.offload.optimizer='disk'"];
        for (room, sets) in [
            (Room { device: 2 << 20, ..plenty }, &[][..]),
            (Room { device: 5 << 20, ..plenty }, &[]),
            (Room { disk: 4 << 20, ..plenty }, &on_disk),
        ] {
            let found = largest(&room, |n| layers(n, sets)).unwrap().unwrap();
            let more = forecast(&layers(found.layers + 1, sets).unwrap(), 0).unwrap().1;
            assert!(room.holds(&found.prediction) && !room.holds(&more), "{room:?}: {}", found.layers);
            assert!(found.layers > 1 && found.prediction.memory.peak(Purpose::Params) > 0);
        }
        let nothing = largest(&Room { device: 1 << 10, ..plenty }, |n| layers(n, &[])).unwrap();
        assert!(nothing.is_none());
    }

    #[test]
    fn what_there_is_for_a_processor_is_the_limit_or_what_the_host_has() {
        let limited = layers(1, &["memory.limit=64MiB"]).unwrap();
        let device = device::open(&limited, None, None).unwrap();
        let room = Room::of(&limited, &device).unwrap();
        assert_eq!(room.device, 64 << 20);
        let free = layers(1, &[]).unwrap();
        let room = Room::of(&free, &device).unwrap();
        assert!(room.device > 64 << 20 && room.disk > 0 && room.device <= host::memory().unwrap().total);
    }
}
