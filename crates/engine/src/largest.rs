//! Finds the largest model that a machine can train, which is the most blocks of one shape that fit
//! in its memory, and the largest micro-batch of a given model.
//!
//! The needs of a step are predicted by executing it on the meta device ([`crate::predict`]), so
//! the search allocates nothing.

use crate::bench::{forecast, forecast_stages};
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

    /// A rank's share, of `ranks` ranks on one host with processors. `memory.limit` is each rank's
    /// own.
    ///
    /// # Errors
    /// As [`Room::of`].
    pub fn of_each(resolved: &Resolved, device: &Device, ranks: usize) -> Result<Room> {
        let all = Room::of(resolved, device)?;
        if device.as_cuda().is_some() || ranks < 2 {
            return Ok(all);
        }
        let limit = resolved.config.memory.limit.map_or(usize::MAX, |limit| limit.0 as usize);
        Ok(Room { device: (all.host / ranks).min(limit), host: all.host / ranks, disk: all.disk / ranks as u64 })
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
    Ok(most(LAYERS_MAX, fits)?.map(|(_, largest)| largest))
}

/// A micro-batch that fits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LargestBatch {
    /// Sequences of one forward and backward on a rank.
    pub rows: usize,
    /// Bytes of the device that a step with them needs, on the rank that needs the most.
    pub bytes: usize,
    /// The same for one sequence more, which does not fit; None at [`ROWS_MAX`].
    pub bytes_of_next: Option<usize>,
}

/// Upper limit for the sequences of a micro-batch in the search.
pub const ROWS_MAX: usize = 65536;

/// The configuration with `rows` sequences in a micro-batch, and everything else as it is.
pub fn with_rows(resolved: &Resolved, rows: usize) -> Resolved {
    let mut changed = resolved.clone();
    changed.batch.micro = rows;
    changed.batch.global = rows * changed.batch.accumulation * changed.batch.data_parallel_degree;
    changed
}

/// The largest micro-batch, of up to [`ROWS_MAX`] sequences, with which every rank's step fits in
/// `room`. None if a single sequence does not fit.
///
/// # Errors
/// The steps of the configuration cannot be lowered.
pub fn largest_batch(room: &Room, resolved: &Resolved) -> Result<Option<LargestBatch>> {
    let needs = |rows: usize| -> Result<Vec<StepNeeds>> {
        let stages = forecast_stages(&with_rows(resolved, rows))?;
        Ok(stages.into_iter().map(|(_, needs)| needs).collect())
    };
    let bytes = |needs: &[StepNeeds]| needs.iter().map(|needs| needs.memory.peak_total()).max().unwrap_or(0);
    let fits = |rows: usize| -> Result<Option<usize>> {
        let needs = needs(rows)?;
        Ok(needs.iter().all(|needs| room.holds(needs)).then(|| bytes(&needs)))
    };
    let Some((rows, found)) = most(ROWS_MAX, fits)? else { return Ok(None) };
    let bytes_of_next = if rows < ROWS_MAX { Some(bytes(&needs(rows + 1)?)) } else { None };
    Ok(Some(LargestBatch { rows, bytes: found, bytes_of_next }))
}

/// The largest number from 1 to `limit` that fits, and what `fits` says of it, if every number
/// below one that fits does too. None if 1 does not.
fn most<T, E>(
    limit: usize,
    fits: impl Fn(usize) -> std::result::Result<Option<T>, E>,
) -> std::result::Result<Option<(usize, T)>, E> {
    let Some(first) = fits(1)? else { return Ok(None) };
    let mut best = (1, first);
    // The least number known not to fit.
    let mut too_many = limit + 1;
    let mut next = 2;
    while best.0 + 1 < too_many {
        match fits(next)? {
            Some(larger) => best = (next, larger),
            None => too_many = next,
        }
        let doubled = 2 * best.0;
        next = if doubled < too_many { doubled } else { best.0.midpoint(too_many) };
    }
    Ok(Some(best))
}

fn parameters(resolved: &Resolved) -> Result<u64> {
    Ok(Model::new(model_spec(resolved)?)?.parameter_count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Stepper;
    use crate::config::{Config, Inputs};
    use crate::{device, limit};
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

    /// Forty configurations: a step with the batch that was found runs within the limit, and one
    /// sequence more is refused.
    #[test]
    fn the_largest_batch_runs_and_the_next_is_refused() {
        let mut tried = 0;
        for layers_of in [1, 3] {
            for recompute in ["none", "selective", "full"] {
                for (compute, offload) in [("f32", "none"), ("bf16", "none"), ("bf16", "disk")] {
                    for limit in ["1MiB", "1500KiB", "3MiB"] {
                        let folder = tempfile::tempdir().unwrap();
                        let sets: [&str; 8] = [
                            &format!("memory.limit={limit}"),
                            &format!("activation_checkpointing.mode={recompute}"),
                            &format!("precision.compute={compute}"),
                            &format!("memory.offload.optimizer={offload}"),
                            &format!("run.directory='{}'", folder.path().display()),
                            "training.micro_batch_size=1",
                            "training.accumulation_steps=2",
                            "compute.threads=1",
                        ];
                        let resolved = layers(layers_of, &sets).unwrap();
                        let device = device::open(&resolved, None, None).unwrap();
                        let room = Room::of(&resolved, &device).unwrap();
                        let refused = |rows: usize| {
                            let more = with_rows(&resolved, rows);
                            let spec = model_spec(&more).unwrap();
                            limit::check(&more, &spec, 0, &forecast(&more, 0).unwrap().1).is_err()
                        };
                        let Some(found) = largest_batch(&room, &resolved).unwrap() else {
                            assert!(refused(1), "{sets:?}");
                            continue;
                        };
                        let mut stepper = Stepper::new(&with_rows(&resolved, found.rows), None).unwrap();
                        stepper.step().unwrap();
                        let peak = stepper.device().pool().usage().peak_total();
                        assert!(peak == found.bytes && peak <= room.device, "{sets:?}: {peak} {found:?}");
                        assert!(found.bytes_of_next.unwrap() > room.device && refused(found.rows + 1), "{found:?}");
                        tried += 1;
                    }
                }
            }
        }
        assert!(tried >= 40, "{tried}");
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
