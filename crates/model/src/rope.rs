//! Rotary tables, shared by the blocks of a model.

use crate::spec::{RopeScaling, RopeSpec};
use crate::{ModelError, Result};
use std::sync::{Arc, Mutex};
use trainyard_base::lock;
use trainyard_tensor::cpu::rope::{RopeScaling as Scaling, RopeTable};

/// Cosines and sines of a model's rotary embedding, up to the largest position so far.
///
/// A model may allow 131,072 positions and be trained on 2,048 of them. The table starts small and
/// doubles when a batch exceeds it. A position's values do not depend on the table's length.
#[derive(Debug)]
pub struct RopeTables {
    dim: usize,
    theta: f64,
    scaling: Scaling,
    table: Mutex<Option<Arc<RopeTable>>>,
}

impl RopeTables {
    /// The tables of `rope`, for heads of `head_dim`.
    pub fn new(rope: &RopeSpec, head_dim: usize) -> RopeTables {
        let scaling = match rope.scaling {
            None => Scaling::None,
            Some(RopeScaling::Linear { factor }) => Scaling::Linear { factor },
            Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions }) => {
                Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context: original_max_positions }
            }
            Some(RopeScaling::Yarn {
                factor,
                original_max_positions,
                beta_fast,
                beta_slow,
                attention_factor,
                mscale,
                mscale_all_dim,
                truncate,
            }) => Scaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_context: original_max_positions,
                attention_factor,
                mscale,
                mscale_all_dim,
                truncate,
            },
        };
        RopeTables { dim: rope.columns(head_dim), theta: rope.theta, scaling, table: Mutex::new(None) }
    }

    /// A table for the positions before `end`, at least.
    pub fn reaching(&self, end: usize) -> Result<Arc<RopeTable>> {
        let mut table = lock(&self.table);
        if let Some(table) = table.as_ref().filter(|table| table.positions >= end) {
            return Ok(table.clone());
        }
        let positions = end.next_power_of_two().max(64);
        let made = RopeTable::new(self.dim, self.theta, self.scaling, positions)
            .map_err(|error| ModelError::Spec { field: "rope", problem: error.to_string() })?;
        Ok(table.insert(Arc::new(made)).clone())
    }
}
