//! Activations that leave between a forward and its backward.

use crate::Result;
use crate::state::lock;
use crate::tier::{Tiers, aligned};
use std::collections::BTreeMap;
use std::sync::Mutex;
use trainyard_tensor::{DType, Device, Purpose, Shape, Tensor};

/// Unit and micro-batch.
type Place = (u32, u32);

/// What forwards kept and gave up, by unit and micro-batch.
#[derive(Default)]
pub(super) struct Away(Mutex<State>);

#[derive(Default)]
struct State {
    kept: BTreeMap<Place, Kept>,
    /// Where the next goes in the store.
    end: u64,
}

/// The tensors of one forward, each with its place in the store.
struct Kept {
    layout: Vec<(u64, Shape, DType)>,
    /// Those that are to be written, until that is known to be done.
    leaving: Vec<Tensor>,
    /// Those that they are read into.
    coming: Vec<Tensor>,
}

impl Away {
    /// A forward gives up `tensors`, which are to be written.
    pub fn put(&self, place: Place, tensors: Vec<Tensor>) {
        let mut state = lock(&self.0);
        let mut layout = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            layout.push((state.end, *tensor.shape(), tensor.dtype()));
            state.end = aligned(state.end + tensor.bytes() as u64);
        }
        state.kept.insert(place, Kept { layout, leaving: tensors, coming: Vec::new() });
    }

    /// Positions in the store, and tensors.
    fn handles(&self, place: Place, which: fn(&Kept) -> &Vec<Tensor>) -> Vec<(u64, Tensor)> {
        let state = lock(&self.0);
        let kept = &state.kept[&place];
        kept.layout.iter().map(|(offset, ..)| *offset).zip(which(kept).iter().cloned()).collect()
    }

    /// Writes them to the store.
    pub fn write(&self, tiers: &Tiers, place: Place) -> Result<()> {
        let store = tiers.activations.as_ref().expect("activations lie in a tier");
        for (offset, tensor) in self.handles(place, |kept| &kept.leaving) {
            if !tensor.device().is_meta() {
                tensor.with_bytes(|bytes| store.write(offset, bytes))??;
            }
        }
        Ok(())
    }

    /// Gives back their memory.
    pub fn give_back(&self, place: Place) {
        if let Some(kept) = lock(&self.0).kept.get_mut(&place) {
            kept.leaving.clear();
        }
    }

    /// Takes memory for them again.
    pub fn take(&self, device: &Device, place: Place) -> Result<()> {
        let mut state = lock(&self.0);
        let kept = state.kept.get_mut(&place).expect("a program fetches what it evicted");
        let tensor = |(_, shape, dtype): &(u64, Shape, DType)| device.empty(*shape, *dtype, Purpose::Activations);
        kept.coming = kept.layout.iter().map(tensor).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Reads them from the store.
    pub fn read(&self, tiers: &Tiers, place: Place) -> Result<()> {
        let store = tiers.activations.as_ref().expect("activations lie in a tier");
        for (offset, mut tensor) in self.handles(place, |kept| &kept.coming) {
            if !tensor.device().is_meta() {
                tensor.overwrite_bytes(|bytes| store.read(offset, bytes))??;
            }
        }
        Ok(())
    }

    /// A backward takes them over.
    pub fn remove(&self, place: Place) -> Option<Vec<Tensor>> {
        lock(&self.0).kept.remove(&place).map(|kept| kept.coming)
    }
}
