//! Activations that are offloaded to disk or host memory between a forward and its backward.

use crate::Result;
use crate::state::lock;
use crate::tier::{Lower, Tiers, aligned};
use std::collections::BTreeMap;
use std::sync::Mutex;
use trainyard_tensor::{DType, Device, Purpose, Shape, Tensor};

/// Unit and micro-batch.
type Place = (u32, u32);

/// The offloaded activations of a step, by unit and micro-batch.
#[derive(Default)]
pub(super) struct OffloadedActivations(Mutex<State>);

#[derive(Default)]
struct State {
    kept: BTreeMap<Place, Kept>,
    /// Offset in the store of the next tensor.
    end: u64,
}

/// The offloaded tensors of one forward, each with its offset in the store, shape and dtype.
struct Kept {
    layout: Vec<(u64, Shape, DType)>,
    /// Device tensors to write, until the write is known to be done.
    leaving: Vec<Tensor>,
    /// Device tensors that are read back into.
    coming: Vec<Tensor>,
    /// The tensors on the host, if their tier is host memory. The compute lane allocates and frees
    /// this memory too. It is not overwritten too early: a new owner's copy follows a forward that
    /// follows the backward that waited for these tensors.
    on_host: Vec<Tensor>,
}

impl OffloadedActivations {
    /// Takes over a forward's `tensors`, which will be written to their tier.
    pub fn put(&self, tiers: &Tiers, place: Place, tensors: Vec<Tensor>) -> Result<()> {
        let host = tiers.activations.as_ref().and_then(Lower::host);
        let room = |tensor: &Tensor| {
            host.map(|host| host.empty(*tensor.shape(), tensor.dtype(), Purpose::Activations)).transpose()
        };
        let on_host = tensors.iter().filter_map(|tensor| room(tensor).transpose()).collect::<Result<_, _>>()?;
        let mut state = lock(&self.0);
        let mut layout = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            layout.push((state.end, *tensor.shape(), tensor.dtype()));
            state.end = aligned(state.end + tensor.bytes() as u64);
        }
        state.kept.insert(place, Kept { layout, leaving: tensors, coming: Vec::new(), on_host });
        Ok(())
    }

    /// The tensors that `which` selects with their offsets in the store, and the tensors on the
    /// host.
    fn handles(&self, place: Place, which: fn(&Kept) -> &Vec<Tensor>) -> (Vec<(u64, Tensor)>, Vec<Tensor>) {
        let state = lock(&self.0);
        let kept = &state.kept[&place];
        let offsets = kept.layout.iter().map(|(offset, ..)| *offset);
        (offsets.zip(which(kept).iter().cloned()).collect(), kept.on_host.clone())
    }

    /// Writes a forward's activations to their tier.
    pub fn write(&self, tiers: &Tiers, place: Place) -> Result<()> {
        let (tensors, mut on_host) = self.handles(place, |kept| &kept.leaving);
        match tiers.activations.as_ref().expect("activations lie in a tier") {
            Lower::Disk(store) => {
                for (offset, tensor) in tensors {
                    if !tensor.device().is_meta() {
                        tensor.with_bytes(|bytes| store.write(offset, bytes))??;
                    }
                }
            }
            Lower::Host(_) => {
                for ((_, tensor), on_host) in tensors.iter().zip(&mut on_host) {
                    on_host.transfer_from(tensor)?;
                }
            }
        }
        Ok(())
    }

    /// Frees the device memory of written activations.
    pub fn give_back(&self, place: Place) {
        if let Some(kept) = lock(&self.0).kept.get_mut(&place) {
            kept.leaving.clear();
        }
    }

    /// Allocates device memory to read activations back into.
    pub fn take(&self, device: &Device, place: Place) -> Result<()> {
        let mut state = lock(&self.0);
        let kept = state.kept.get_mut(&place).expect("a program fetches what it evicted");
        let tensor = |(_, shape, dtype): &(u64, Shape, DType)| device.empty(*shape, *dtype, Purpose::Activations);
        kept.coming = kept.layout.iter().map(tensor).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Reads activations back from their tier.
    pub fn read(&self, tiers: &Tiers, place: Place) -> Result<()> {
        let (mut tensors, on_host) = self.handles(place, |kept| &kept.coming);
        match tiers.activations.as_ref().expect("activations lie in a tier") {
            Lower::Disk(store) => {
                for (offset, tensor) in &mut tensors {
                    if !tensor.device().is_meta() {
                        tensor.overwrite_bytes(|bytes| store.read(*offset, bytes))??;
                    }
                }
            }
            Lower::Host(_) => {
                for ((_, tensor), on_host) in tensors.iter_mut().zip(&on_host) {
                    tensor.transfer_from(on_host)?;
                }
            }
        }
        Ok(())
    }

    /// Hands the activations that were read back to a backward. None if none were offloaded.
    pub fn remove(&self, place: Place) -> Option<Vec<Tensor>> {
        lock(&self.0).kept.remove(&place).map(|kept| kept.coming)
    }
}
