//! Reads a checkpoint's tensors.

use std::collections::BTreeMap;
use trainyard_engine::checkpoint::Checkpoint;

/// All tensors by part and name, as bytes.
pub fn tensors(checkpoint: &Checkpoint) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for part in checkpoint.manifest().parts.keys() {
        for name in checkpoint.names(part) {
            let entry = checkpoint.entry(part, name).unwrap();
            let (elements, each) = (entry.elements(), if entry.dtype == "U8" { 1 } else { 4 });
            let mut bytes = vec![0; each * elements];
            checkpoint.read(part, name, 0..elements, &mut bytes).unwrap();
            all.insert(format!("{part} {name}"), bytes);
        }
    }
    all
}
