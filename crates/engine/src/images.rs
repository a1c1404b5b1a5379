//! Opens the images that `[data]` asks for, and evaluates models on held-back ones.

use crate::Result;
use crate::config::{ImagesSection, Resolved, Sources};
use crate::evaluate::{Evaluation, EvaluationProgress, TextLoss, slices};
use crate::rank::Rank;
use crate::state::does_not_fit;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trainyard_data::corpus::{CACHE_BYTES, CacheOptions, OnInvalid};
use trainyard_data::images::Decoded;
use trainyard_data::prepare::VALIDATION_FRACTION;
use trainyard_data::{Augmentation, ImageEvaluation, ImageIndex, ImageSet, ImageSpec, IndexOptions, MicroBatch};
use trainyard_model::units::Hits;
use trainyard_model::{Forward, Output};

/// The images of a run.
pub struct ImageCorpora {
    train: ImageIndex,
    validation: Vec<HeldBack>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// A set of held-back images.
#[derive(Debug)]
pub struct HeldBack {
    /// Its name.
    pub name: String,
    /// Its images.
    pub images: ImageIndex,
    /// The fate of those that cannot be decoded.
    pub on_invalid: OnInvalid,
}

impl HeldBack {
    /// The images of `path`, for a model whose classes have these names.
    ///
    /// # Errors
    /// As [`ImageIndex::open`].
    pub fn open(path: &Path, labels: Option<Vec<String>>, on_invalid: OnInvalid) -> Result<HeldBack> {
        let classes = labels.filter(|labels| !labels.is_empty());
        let images = ImageIndex::open(&[path.to_owned()], &IndexOptions { classes })?;
        Ok(HeldBack { name: name(path), images, on_invalid })
    }
}

impl ImageCorpora {
    /// Lists the images that `resolved` names. `labels` are the classes in their order, if the
    /// model has names for them.
    ///
    /// # Errors
    /// A source has no images or another layout; a class of validation that training does not have.
    pub fn open(resolved: &Resolved, labels: Option<Vec<String>>) -> Result<ImageCorpora> {
        let data = &resolved.config.data;
        let classes = labels.filter(|labels| !labels.is_empty());
        let mut all = ImageIndex::open(&paths(&data.train), &IndexOptions { classes })?;
        let decoded = decoded(&resolved.config.images)?;
        let on_invalid = OnInvalid::skipping(resolved.config.images.skip_invalid);
        if let Some(decoded) = &decoded {
            all = all.keeping(Arc::clone(decoded));
        }
        let classes = all.classes().to_vec();
        let mut notes = Vec::new();
        let (train, validation) = match &data.validation {
            Some(sources) => {
                let set = |path: &PathBuf| -> Result<HeldBack> {
                    let options = IndexOptions { classes: Some(classes.clone()) };
                    let mut images = ImageIndex::open(std::slice::from_ref(path), &options)?;
                    if let Some(decoded) = &decoded {
                        images = images.keeping(Arc::clone(decoded));
                    }
                    Ok(HeldBack { name: name(path), images, on_invalid })
                };
                (all, paths(sources).iter().map(set).collect::<Result<Vec<_>>>()?)
            }
            None => match data.validation_fraction.unwrap_or(VALIDATION_FRACTION) {
                0.0 => (all, Vec::new()),
                fraction => {
                    let (train, images) = all.split(fraction, resolved.config.training.seed)?;
                    let held_back =
                        (!images.is_empty()).then(|| HeldBack { name: "validation".into(), images, on_invalid });
                    (train, held_back.into_iter().collect())
                }
            },
        };
        let held_back: usize = validation.iter().map(|set| set.images.len()).sum();
        notes.push(format!(
            "{} images of {} classes to train on, {held_back} to validate on",
            train.len(),
            train.classes().len()
        ));
        Ok(ImageCorpora { train, validation, notes })
    }

    /// The names of the classes, in order.
    pub fn classes(&self) -> &[String] {
        self.train.classes()
    }

    /// Images in one pass over the training data.
    pub fn images_per_epoch(&self) -> u64 {
        self.train.len() as u64
    }

    /// The training samples, and the held-back sets.
    ///
    /// # Errors
    /// Settings out of their range.
    pub fn into_sets(self, resolved: &Resolved) -> Result<(Arc<ImageSet>, Vec<HeldBack>)> {
        let images = resolved.images.as_ref().ok_or_else(|| does_not_fit("the run has no images"))?;
        let seed = resolved.config.training.seed;
        let on_invalid = OnInvalid::skipping(resolved.config.images.skip_invalid);
        let spec = data_spec(&images.form, images.augmentation.clone(), seed, on_invalid);
        Ok((Arc::new(ImageSet::new(self.train, spec)?), self.validation))
    }
}

/// The cache of decoded images, if there is one.
fn decoded(images: &ImagesSection) -> Result<Option<Arc<Decoded>>> {
    let bytes_max = images.cache_size.map_or(CACHE_BYTES, |size| size.0);
    let cache = images.cache.clone().map(|folder| CacheOptions { folder, bytes_max });
    Ok(cache.map(|cache| Decoded::open(&cache)).transpose()?.map(Arc::new))
}

fn paths(sources: &Sources) -> Vec<PathBuf> {
    sources.0.iter().map(|source| source.path.clone()).collect()
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// The samples of images of this form.
pub fn data_spec(
    form: &trainyard_model::ImageSpec,
    augmentation: Augmentation,
    seed: u64,
    on_invalid: OnInvalid,
) -> ImageSpec {
    let floats = |numbers: &[f64]| numbers.iter().map(|number| *number as f32).collect();
    ImageSpec {
        image_size: form.size,
        patch_size: form.patch,
        mean: floats(&form.mean),
        std: floats(&form.std),
        resize: form.resize,
        augmentation,
        seed,
        on_invalid,
    }
}

/// Evaluates the model on all of `sets`, or on their first images. Data ranks call this together
/// and share the batches, as [`crate::evaluate::evaluate_until`] does. All ranks call `stops` after
/// every round of batches; true on all ends the evaluation, whose result is then None.
///
/// # Errors
/// A model of text; images that cannot be read.
pub fn evaluate_images_until(
    rank: &Rank,
    sets: &[HeldBack],
    rows: usize,
    stops: &mut dyn FnMut(EvaluationProgress) -> Result<bool>,
) -> Result<Option<Evaluation>> {
    let form = rank.model().spec().and_then(|spec| spec.image.clone());
    let form = form.ok_or_else(|| does_not_fit("a model of text cannot be evaluated on images"))?;
    let spec = data_spec(&form, Augmentation::none(), 0, OnInvalid::Fail);
    let (index, ranks) = rank.evaluation_place();
    let all: usize = sets.iter().map(|set| set.images.len()).sum();
    let mut progress = EvaluationProgress { tokens: 0, of: all as u64 };
    // Of each of this rank's batches: the loss, and how many images of it are counted and right.
    let (mut own, mut number) = (Vec::new(), 0);
    // Of each set, one past its last batch.
    let mut ends = Vec::with_capacity(sets.len());
    for set in sets {
        let spec = ImageSpec { on_invalid: set.on_invalid, ..spec.clone() };
        let mut batches = ImageEvaluation::new(&set.images, &spec, rows)?;
        for _ in 0..batches.batches() {
            if number % ranks == index {
                let Some(batch) = batches.next().transpose()? else { break };
                progress.tokens += batch.rows as u64;
                own.extend(sums(rank, &batch)?);
            } else {
                progress.tokens += batches.pass_over() as u64;
            }
            number += 1;
            if number.is_multiple_of(ranks) && stops(progress)? {
                return Ok(None);
            }
        }
        ends.push(number);
    }
    let rounds = number.div_ceil(ranks);
    if own.len() < rounds * SUMS {
        rank.forward_nothing()?;
        own.extend([0.0; SUMS]);
    }
    let all = rank.gather_numbers(&own)?;
    let sum = |batches: std::ops::Range<usize>, which: usize| -> f64 {
        batches.map(|number| all[(number % ranks * rounds + number / ranks) * SUMS + which]).sum()
    };
    let mut total = Evaluation { loss_sum: sum(0..number, 0), ..Evaluation::default() };
    let mut begin = 0;
    for end in ends {
        let targets = sum(begin..end, 1) as u64;
        total.texts.push(TextLoss { loss_sum: sum(begin..end, 0), targets });
        begin = end;
    }
    let [counted, top1, top5] = [1, 2, 3].map(|which| sum(0..number, which) as u64);
    total.targets = counted;
    total.hits = Some(Hits { counted, top1, top5 });
    Ok(Some(total))
}

/// Numbers of a batch: the summed loss, images counted, right at once, right within five.
const SUMS: usize = 4;

fn sums(rank: &Rank, batch: &MicroBatch) -> Result<[f64; SUMS]> {
    let mut tape = rank.inference_tape();
    let batch = rank.inference_model().batch(rank.device(), &slices(batch))?;
    let mut hits = Hits::default();
    let mut cx = Forward { hits: Some(&mut hits), ..Forward::evaluation(&batch, Output::Loss { scale: 1.0 }) };
    let loss = rank.forward(&mut tape, &mut cx)?;
    match loss {
        Some(loss) => {
            let loss = f64::from(loss.tensor().to_scalar()?);
            Ok([loss, hits.counted as f64, hits.top1 as f64, hits.top5 as f64])
        }
        // Another stage of the pipeline has it.
        None => Ok([0.0; SUMS]),
    }
}
