//! A stack: facts about the software that runs a step, such as its kernels, the communication that
//! it overlaps, and the tensors that it keeps in memory.
//!
//! Predictions for this project's engine use the stack `trainyard`. Published runs used other
//! software; its facts are in `data/stacks.toml` with their sources. A stack has no efficiency
//! factors.

use crate::constants::AttentionKind;
use serde::Deserialize;
use trainyard_program::StateBytes;

/// The launcher of kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dispatch {
    /// Python, one operation at a time.
    Eager,
    /// A compiled, captured or native program.
    Compiled,
}

/// The functions that selective recomputation repeats.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selective {
    /// Scores, softmax and their product with values (Korthikanti et al. 2022).
    CoreAttention,
    /// Everything but attention and every other product (torchtitan's `op`).
    PerOp,
    /// Norms and gates (this project's `selective`). Without a gate the activation is in a
    /// product's epilogue, and its result is kept.
    NormsAndGates,
    /// The norm before it and the MLP or the experts, whole.
    Mlp,
    /// The products that make queries, keys and values of narrow vectors.
    UpProjections,
}

/// The division of layers among pipeline stages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Partition {
    /// Equal numbers of layers.
    Layers,
    /// Equal operations, the head's included.
    Cost,
    /// Equal numbers of layers, where embedding and head count as one each.
    Units,
}

/// The contents of one collective when parameters are gathered or gradients reduced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bundle {
    /// One tensor, gathered into a list of parts.
    Tensor,
    /// One unit.
    Unit,
    /// Everything that is ready: what waited behind another collective is sent together.
    Queue,
}

/// A software stack, as far as a step's price depends on it.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stack {
    /// Its name.
    pub name: String,
    /// The attention kernel.
    pub attention: AttentionKind,
    /// True if chains of memory-bound operations are one kernel.
    pub fused: bool,
    /// True if norms, rotations and gates are kernels of their own, though other chains are not.
    pub fused_norms: bool,
    /// The launcher of kernels.
    pub dispatch: Dispatch,
    /// True if tensor parallelism also splits the sequence between products.
    pub sequence_parallel: bool,
    /// True if gradients are summed while backward still runs.
    pub overlap_reduce: bool,
    /// Number of units whose parameters are gathered ahead.
    pub prefetch: u32,
    /// Contents of one gather of parameters.
    pub gathers: Bundle,
    /// Contents of one reduction of gradients.
    pub reductions: Bundle,
    /// True if residuals and attention have dropout.
    pub dropout: bool,
    /// The functions that selective recomputation repeats.
    pub selective: Selective,
    /// True if weight gradients are added in the product's epilogue.
    pub fused_accumulation: bool,
    /// The division of layers among stages.
    pub partition: Partition,
    /// True if a pipeline message synchronises host and device.
    pub host_sync: bool,
    /// True if, with a split sequence, inputs of products are kept as gathered as long as that
    /// fits.
    pub keeps_gathered: bool,
    /// True if the ranks of a context group get equal work under a causal mask.
    pub balanced_context: bool,
    /// True if exchanges with experts run beside the compute of another micro-batch.
    pub overlap_experts: bool,
    /// True if the allocator grows its segments.
    pub expandable: bool,
    /// Flat buffers for collectives, 1e9 bytes.
    pub buckets_gb: f64,
    /// Bytes per logit.
    pub logits: LogitBytes,
    /// Bytes per parameter element.
    pub state: StateBytes,
    /// Source of the facts.
    pub source: String,
}

/// Bytes per logit. Each is written once and read once.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogitBytes {
    /// Kept from forward to backward.
    pub kept: f64,
    /// Additional bytes while the loss is computed.
    pub forward: f64,
    /// Additional bytes while its gradient is computed.
    pub backward: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    stack: Vec<Stack>,
}

impl Stack {
    /// All built-in stacks.
    pub fn builtin() -> Vec<Stack> {
        let file: File = toml::from_str(include_str!("../data/stacks.toml")).expect("built-in stacks are tested");
        file.stack
    }

    /// The built-in stack called `name`.
    ///
    /// # Errors
    ///
    /// An unknown name; the error lists the names that exist.
    pub fn named(name: &str) -> Result<Stack, String> {
        let all = Stack::builtin();
        let known = all.iter().map(|stack| stack.name.clone()).collect::<Vec<_>>().join(", ");
        all.into_iter()
            .find(|stack| stack.name == name)
            .ok_or_else(|| format!("no software stack is called `{name}`; known: {known}"))
    }

    /// The built-in stack called `name` with some of its facts replaced: `changes` has the keys of
    /// `data/stacks.toml`.
    ///
    /// # Errors
    ///
    /// An unknown name, an unknown key, or a value that the key does not accept.
    pub fn like(name: &str, changes: &toml::Table) -> Result<Stack, String> {
        Stack::named(name)?;
        let file: toml::Table =
            toml::from_str(include_str!("../data/stacks.toml")).expect("built-in stacks are tested");
        let all = file.get("stack").and_then(toml::Value::as_array).into_iter().flatten();
        let mut facts = all
            .filter_map(toml::Value::as_table)
            .find(|stack| stack.get("name").and_then(toml::Value::as_str) == Some(name))
            .cloned()
            .unwrap_or_default();
        facts.extend(changes.clone());
        facts.try_into().map_err(|error: toml::de::Error| error.message().to_owned())
    }

    /// Launches of memory-bound kernels in a block's forward.
    pub(crate) fn block_launches(&self) -> f64 {
        // Fused: two norms, two residuals, rotation, activation. Eager: casts, transposes, splits
        // and masks are also kernels.
        if self.fused { 6.0 } else { 32.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_parse_and_unknown_ones_are_refused_in_words() {
        assert!(Stack::builtin().iter().all(|stack| !stack.source.is_empty()));
        assert_eq!(Stack::named("trainyard").unwrap().logits.kept, 0.0);
        assert!(Stack::named("caffe").unwrap_err().contains("megatron-2021"));
        let changed = |text: &str| Stack::like("torchtitan", &text.parse().unwrap());
        assert_eq!(changed("").unwrap(), Stack::named("torchtitan").unwrap());
        assert!(!changed("overlap_reduce = false").unwrap().overlap_reduce);
        assert!(changed("overlap = false").unwrap_err().contains("overlap"));
        assert!(Stack::like("caffe", &toml::Table::new()).unwrap_err().contains("torchtitan"));
    }
}
