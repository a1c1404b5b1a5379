//! A cache of keys and values, so that generation computes new tokens only.

use crate::spec::ModelSpec;
use crate::{ModelError, Result};
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// The cache of one sequence: for each layer keys and values, [capacity, h_kv c] each, of which the
/// first [`KvCache::len`] rows are filled.
///
/// Keys are stored rotated. A sliding window masks older rows but does not free them.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<(Tensor, Tensor)>,
    /// For each layer, the keys and values of what an encoder made, [rows, 2 h_kv c].
    remembered: Vec<Option<Tensor>>,
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// An empty cache for `capacity` tokens, in the compute dtype.
    pub fn new(device: &Device, spec: &ModelSpec, capacity: usize, dtype: DType) -> Result<KvCache> {
        KvCache::of_width(device, spec.decoder_layers(), spec.kv_heads * spec.head_dim, capacity, dtype)
    }

    /// The same, of `layers` layers whose keys have `width` columns each, as those of one rank of a
    /// tensor-parallel group.
    pub(crate) fn of_width(
        device: &Device,
        layers: usize,
        width: usize,
        capacity: usize,
        dtype: DType,
    ) -> Result<KvCache> {
        let tensor = || device.zeros([capacity.max(1), width], dtype, Purpose::Activations);
        let remembered = vec![None; layers];
        let layers = (0..layers).map(|_| Ok((tensor()?, tensor()?))).collect::<Result<_>>()?;
        Ok(KvCache { layers, remembered, len: 0, capacity: capacity.max(1) })
    }

    /// The number of tokens in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if it holds nothing yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of tokens that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all but the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Appends the keys and values of `qkv` [n, (h + 2 h_kv) c] to `layer` and attends from its
    /// queries to all that is there: [n, h c].
    pub(crate) fn attend(&mut self, layer: usize, qkv: &Tensor, spec: &AttentionSpec) -> Result<Tensor> {
        self.attend_with(layer, qkv, None, spec)
    }

    /// The same with `bias`, f32 [h, 2 reach - 1], added to scores by distance.
    pub(crate) fn attend_biased(
        &mut self,
        layer: usize,
        qkv: &Tensor,
        bias: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<Tensor> {
        self.attend_with(layer, qkv, Some(bias), spec)
    }

    /// Keeps the keys and values of what an encoder made, for `layer` of its decoder.
    pub(crate) fn remember(&mut self, layer: usize, kv: Tensor) {
        self.remembered[layer] = Some(kv);
    }

    /// The keys and values that were kept for `layer`.
    pub(crate) fn remembered(&self, layer: usize) -> Result<&Tensor> {
        let nothing = || ModelError::Cache("a decoder goes on before its encoder has run".into());
        self.remembered.get(layer).and_then(Option::as_ref).ok_or_else(nothing)
    }

    fn attend_with(
        &mut self,
        layer: usize,
        qkv: &Tensor,
        bias: Option<&Tensor>,
        spec: &AttentionSpec,
    ) -> Result<Tensor> {
        let new = qkv.rows();
        if self.len + new > self.capacity {
            return Err(ModelError::Cache(format!(
                "{new} tokens after {} in a cache made for {}: make it larger, or generate less",
                self.len, self.capacity
            )));
        }
        let layers = self.layers.len();
        let Some((keys, values)) = self.layers.get_mut(layer) else {
            return Err(ModelError::Cache(format!("layer {layer} in a cache made for {layers} layers")));
        };
        Ok(match bias {
            None => ops::attention_decode(qkv, spec, keys, values, self.len)?,
            Some(bias) => ops::attention_decode_biased(qkv, bias, spec, keys, values, self.len)?,
        })
    }

    /// Counts the `new` tokens that all layers have appended.
    /// [`Model::forward`](crate::Model::forward) does it itself; a caller that runs segments does
    /// it once all units have run.
    pub fn advance(&mut self, new: usize) {
        self.len += new;
    }
}
