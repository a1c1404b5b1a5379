//! The teacher of a run (`[distillation]`): its description before the run, its weights once the
//! rank is there.

mod kept;

use crate::checkpoint::Choice;
use crate::config::{DistillationSection, DivergenceKind, Resolved};
use crate::corpora::same_words;
use crate::rank::Rank;
use crate::shape::compute_dtype;
use crate::state::{ParameterState, does_not_fit};
use crate::trained::{open_model, open_tokenizer, open_trained_on};
use crate::{EngineError, Result};
use kept::KeptInFiles;
use std::path::Path;
use std::sync::Arc;
use trainyard_autograd::{Parameters, Store};
use trainyard_data::Tokenizer;
use trainyard_model::{Model, Teacher};
use trainyard_tensor::ops::{Distillation, Divergence};
use trainyard_tensor::{Device, Purpose};
use xxhash_rust::xxh3::Xxh3;

/// `model` as the student of the teacher that the configuration names; itself if it names none.
/// Weights are not read.
///
/// # Errors
/// A teacher of another vocabulary, or for shorter sequences; one that cannot be read.
pub(crate) fn taught(model: Model, resolved: &Resolved) -> Result<Model> {
    let Some(folder) = &resolved.config.distillation.teacher else { return Ok(model) };
    let named = |problem: String| does_not_fit(format!("distillation.teacher = {}: {problem}", folder.display()));
    let teacher = open_model(folder).map_err(|error| named(error.to_string()))?;
    let spec = teacher.spec().expect("a trained model is of a built-in family");
    let (positions, length) = (spec.max_positions, resolved.sequence_length);
    if positions < length {
        return Err(named(format!("it takes {positions} tokens: set training.sequence_length = {positions} or less")));
    }
    if spec.vocab_size != model.vocab_size() {
        return Err(named(format!(
            "it has a vocabulary of {} and the student one of {}, and distributions over one vocabulary are compared: set \
             model.vocab_size = {} for a student that begins anew, or name a teacher of the same family",
            spec.vocab_size,
            model.vocab_size(),
            spec.vocab_size
        )));
    }
    let distillation = settings(&resolved.config.distillation);
    let hidden = resolved.config.distillation.hidden_weight as f32;
    let teacher = Teacher::new(teacher, compute_dtype(resolved), distillation)?.with_hidden(hidden);
    model.taught(Arc::new(teacher)).map_err(|error| named(error.to_string()))
}

/// The loss. The section is resolved, so what is unset has no effect.
fn settings(section: &DistillationSection) -> Distillation {
    let number = |value: Option<f64>| value.unwrap_or_default() as f32;
    Distillation {
        weight: number(section.weight),
        temperature: number(section.temperature),
        divergence: match section.divergence {
            None | Some(DivergenceKind::ForwardKl) => Divergence::ForwardKl,
            Some(DivergenceKind::ReverseKl) => Divergence::ReverseKl,
            Some(DivergenceKind::JensenShannon) => Divergence::JensenShannon { beta: number(section.beta) },
        },
    }
}

/// Checks that the teacher in `folder` reads text as the student does.
///
/// # Errors
/// Another tokenizer.
pub(crate) fn check_tokenizer(folder: &Path, own: &Tokenizer) -> Result<()> {
    let other = open_tokenizer(folder)
        .map_err(|error| does_not_fit(format!("distillation.teacher = {}: {error}", folder.display())))?;
    // Files of one tokenizer may differ in their layout.
    let alike = own.vocab_size() == other.vocab_size() && same_words(own, &other);
    if own.fingerprint() != other.fingerprint() && !alike {
        let place = folder.display();
        return Err(does_not_fit(format!(
            "distillation.teacher = {place}: its tokenizer is another one than the student's, so the same number is another \
             token: set tokenizer.path = \"{place}/tokenizer.json\""
        )));
    }
    Ok(())
}

/// Copies the weights of a teacher to `device`, in the dtype of its forward. The f32 masters of
/// `held` stay behind.
fn copied(teacher: &Teacher, device: &Device, held: &ParameterState) -> Result<Store> {
    let mut store = Store::new();
    for (id, _) in teacher.model().parameters() {
        let from = held.parameter(id)?.value;
        let mut to = device.empty(*from.shape(), teacher.dtype(), Purpose::Params)?;
        from.with_bytes(|from| to.overwrite_bytes(|to| to.copy_from_slice(from)))??;
        store.insert(id, to);
    }
    teacher.model().adapters().iter().for_each(|(id, adapter)| store.adapt(*id, adapter.clone()));
    Ok(store)
}

/// Loads the weights of the teacher of `rank`, if this rank computes the loss.
///
/// # Errors
/// Weights that cannot be read or do not fit in memory.
pub(crate) fn load(rank: &Rank, section: &DistillationSection, note: &mut impl FnMut(&str)) -> Result<()> {
    let Some(folder) = &section.teacher else { return Ok(()) };
    let model = rank.model();
    let Some(teacher) = model.teacher().filter(|_| rank.parameters.holding().runs(model.units().len() - 1)) else {
        return Ok(());
    };
    // Its masters lie on a device of their own, for as long as it is loaded.
    let trained = open_trained_on(&rank.device().beside(), folder, Choice::Latest, Some(teacher.dtype()), &mut *note)?;
    let what = match &trained.run {
        Some(run) => format!("the run {} at step {}", folder.display(), run.step),
        None => folder.display().to_string(),
    };
    note(&format!("teacher: {what}, {} parameters", teacher.model().parameter_count()));
    let weights = copied(teacher, rank.device(), &trained.rank.parameters)?;
    if let Some(cache) = &section.cache {
        let folder = cache.join(format!("{:032x}", fingerprint(teacher, &weights)?));
        let kept = KeptInFiles::open(&folder).map_err(|source| EngineError::File {
            what: "cannot keep the teacher's states in",
            path: folder.display().to_string(),
            source,
        })?;
        let (sequences, bytes) = kept.size();
        note(&format!(
            "teacher: its final hidden states are kept in {}: {sequences} sequences, {:.1} MiB so far",
            folder.display(),
            bytes as f64 / f64::from(1 << 20)
        ));
        teacher.keep_states(Box::new(kept));
    }
    teacher.set_weights(Box::new(weights));
    Ok(())
}

/// A hash of everything on which a teacher's hidden states depend beside the text.
fn fingerprint(teacher: &Teacher, weights: &Store) -> Result<u128> {
    let mut hash = Xxh3::new();
    hash.update(format!("{:?} {:?}", teacher.dtype(), teacher.model().spec()).as_bytes());
    for (id, _) in teacher.model().parameters() {
        weights.parameter(id)?.value.with_bytes(|bytes| hash.update(bytes))?;
    }
    Ok(hash.digest128())
}
