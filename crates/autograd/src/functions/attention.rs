//! Attention over a fused qkv matrix, and the rotary embedding that precedes it.

use super::prelude::*;
use std::sync::Arc;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::cpu::rope::{RopeTable, Rotation};
use trainyard_tensor::ops::{HeadLayout, Segments};

/// Flash attention (Dao 2023); its input is qkv.
#[derive(Clone, Debug)]
pub struct Attention {
    spec: AttentionSpec,
    segments: Segments,
}

/// Rotary position embedding (Su et al. 2021) of the query and key columns; its input is qkv.
#[derive(Clone, Debug)]
pub struct Rope {
    layout: HeadLayout,
    table: Arc<RopeTable>,
    positions: Tensor,
}

impl Tape<'_> {
    /// Attention of qkv [m, (h + 2 h_kv) c], each query within its segment: [m, h c].
    pub fn attention(&mut self, qkv: &Var, spec: AttentionSpec, segments: &Segments) -> Result<Var> {
        let (out, lse) = ops::attention(qkv.tensor(), &spec, segments)?;
        let function = Attention { spec, segments: segments.clone() };
        let kept = out.clone();
        self.record_one(function, &[qkv.into()], out, |tape| {
            vec![tape.save(qkv), Saved::Tensor(kept), Saved::Tensor(lse)]
        })
    }

    /// Rotates query and key columns by their positions (i32 [m]). It takes qkv by value and works
    /// in place if nothing else holds the tensor.
    pub fn rope(&mut self, qkv: Var, layout: HeadLayout, table: &Arc<RopeTable>, positions: &Tensor) -> Result<Var> {
        let inputs = [Operand::from(&qkv)];
        let y = ops::rope(qkv.into_tensor(), layout, table, positions, Rotation::Forward)?;
        let function = Rope { layout, table: table.clone(), positions: positions.clone() };
        self.record_one(function, &inputs, y, |_| Vec::new())
    }
}

impl Differentiable for Attention {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dout) = cx.output_gradient(0) else { return Ok(()) };
        let (qkv, out, lse) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?);
        let dqkv = ops::attention_backward(&dout, &qkv, &out, &lse, &self.spec, &self.segments)?;
        cx.add_gradient(0, dqkv)
    }
}

impl Differentiable for Rope {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        // A rotation's transpose is its inverse.
        let dx = ops::rope(dy, self.layout, &self.table, &self.positions, Rotation::Backward)?;
        cx.add_gradient(0, dx)
    }
}
