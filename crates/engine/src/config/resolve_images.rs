//! Resolves `[images]` and `[augmentation]`, and refuses what has no meaning for images.

use super::resolve::{Inputs, Resolver};
use super::resolve_parallel::Parallel;
use super::sections::*;
use super::sections_chat::DataFormat;
use super::sections_images::*;
use super::value::{ByteSize, Channels};
use super::{DeviceKind, Section};
use serde::Serialize;
use trainyard_data::corpus::CACHE_BYTES;
use trainyard_data::images::{Augmentation, RandAugment, RandomCrop, default_workers};
use trainyard_model::ImageSpec;
use trainyard_model::families::{self, Input};

/// The images of a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ImageSettings {
    /// Their form. The names of classes are empty until the data is opened.
    pub form: ImageSpec,
    /// The random changes in training.
    pub augmentation: Augmentation,
}

impl ImageSettings {
    /// Positions of an image: that of the class token, and one for each patch.
    pub fn positions(&self) -> usize {
        self.form.positions()
    }
}

impl Resolver {
    /// The images of the run; None if it trains on text.
    pub(super) fn images(&mut self, inputs: &Inputs) -> Option<ImageSettings> {
        let family = self.config.model.family.unwrap_or(families::LLAMA);
        let of_images = match (&self.config.model.path, &inputs.pretrained) {
            (None, _) => family.form().input == Input::Patches,
            (Some(_), Some(pretrained)) => pretrained.image.is_some(),
            // A folder that cannot be read is reported elsewhere.
            (Some(_), None) => self.config.data.format == DataFormat::Images,
        };
        // Benchmarks make their own batches, and planning needs no data.
        let asked = self.config.data.format == DataFormat::Images || inputs.batches_supplied;
        match (of_images, asked) {
            (true, false) => self.problem(
                "data.format",
                "the model is one of images: set data.format = \"images\", or take another model.family",
            ),
            (false, true) if !inputs.batches_supplied => {
                let message = "data.format = \"images\" needs a model of images: model.preset = \"vit-small\", or \
                               model.family = \"vit\" with model.dim, model.layers and model.heads";
                self.problem("data.format", message);
            }
            _ => {}
        }
        if !of_images {
            let because = "the model is one of text";
            let (images, augmentation) = (self.config.images.clone(), self.config.augmentation.clone());
            let usual = ImagesSection::default();
            for key in images.keys().iter().map(|key| key.name) {
                let changed = images.get(key).filter(|value| usual.get(key).as_ref() != Some(value));
                self.unused(&format!("images.{key}"), &changed, because);
            }
            let usual = AugmentationSection::default();
            for key in augmentation.keys().iter().map(|key| key.name) {
                let changed = augmentation.get(key).filter(|value| usual.get(key).as_ref() != Some(value));
                self.unused(&format!("augmentation.{key}"), &changed, because);
            }
            return None;
        }
        match (self.config.images.cache.clone(), self.config.images.cache_size) {
            (None, size) => self.unused("images.cache_size", &size, "there is no images.cache"),
            (Some(_), size) => {
                self.count("images.cache_size", size.map(|size| size.0), 1 << 20, 1 << 60);
                let because = "the size of caches, unless another is asked for";
                self.settle("images.cache_size", &size, ByteSize(CACHE_BYTES), because);
            }
        }
        let form = self.form_of_images(inputs);
        Some(ImageSettings { form, augmentation: self.augmentation() })
    }

    fn form_of_images(&mut self, inputs: &Inputs) -> ImageSpec {
        let ImagesSection { size, resize, patch_size, mean, std, .. } = self.config.images.clone();
        let labels = inputs.classes.clone().unwrap_or_default();
        if let Some(image) = inputs.pretrained.as_ref().and_then(|pretrained| pretrained.image.clone()) {
            let because = "the files of model.path say it";
            self.unused("images.size", &size, because);
            self.unused("images.resize", &resize, because);
            self.unused("images.patch_size", &patch_size, because);
            self.unused("images.mean", &mean, because);
            self.unused("images.std", &std, because);
            if ![1, 3].contains(&image.channels) {
                let message = format!("model.path has images of {} channels: 1 and 3 are read", image.channels);
                self.problem("model.path", message);
            }
            return image;
        }
        let size = self.settle("images.size", &size, 224, "the usual");
        self.count("images.size", Some(size as u64), 1, 1 << 14);
        let resize = self.settle("images.resize", &resize, size * 256 / 224, "8/7 of images.size");
        self.count("images.resize", Some(resize as u64), 1, 1 << 14);
        let patch = self.settle("images.patch_size", &patch_size, 16, "the usual");
        self.count("images.patch_size", Some(patch as u64), 1, 1 << 14);
        if patch > 0 && !size.is_multiple_of(patch) {
            let message = format!("images.patch_size = {patch} does not divide images.size = {size}");
            self.problem("images.patch_size", message);
        }
        let halves = Channels([0.5; 3]);
        let mean = self.settle("images.mean", &mean, halves, "values from -1 to 1");
        let std = self.settle("images.std", &std, halves, "values from -1 to 1");
        if std.0.iter().any(|std| *std <= 0.0) {
            self.problem("images.std", "images.std has a number that is not above 0");
        }
        ImageSpec { size, resize, patch: patch.max(1), channels: 3, mean: mean.0.into(), std: std.0.into(), labels }
    }

    fn augmentation(&mut self) -> Augmentation {
        let a = self.config.augmentation.clone();
        let usual = RandomCrop::default();
        let mut crop = None;
        let bounds = [
            ("augmentation.crop_area_min", a.crop_area_min, usual.scale.0),
            ("augmentation.crop_area_max", a.crop_area_max, usual.scale.1),
            ("augmentation.crop_ratio_min", a.crop_ratio_min, usual.ratio.0),
            ("augmentation.crop_ratio_max", a.crop_ratio_max, usual.ratio.1),
        ];
        if a.crop {
            let [area_min, area_max, ratio_min, ratio_max] =
                bounds.map(|(key, given, usual)| self.settle(key, &given, usual, "the usual"));
            self.within("augmentation.crop_area_min", area_min, 1e-4, 1.0);
            self.within("augmentation.crop_area_max", area_max, area_min, 1.0);
            self.within("augmentation.crop_ratio_min", ratio_min, 0.01, 100.0);
            self.within("augmentation.crop_ratio_max", ratio_max, ratio_min, 100.0);
            crop = Some(RandomCrop { scale: (area_min, area_max), ratio: (ratio_min, ratio_max) });
        } else {
            for (key, given, _) in bounds {
                self.unused(key, &given, "augmentation.crop is false");
            }
        }
        self.within("augmentation.flip", a.flip, 0.0, 1.0);
        self.within("augmentation.brightness", a.brightness, 0.0, 1.0);
        self.within("augmentation.contrast", a.contrast, 0.0, 1.0);
        self.within("augmentation.saturation", a.saturation, 0.0, 1.0);
        self.within("augmentation.hue", a.hue, 0.0, 0.5);
        self.within("augmentation.mixup", a.mixup, 0.0, 100.0);
        self.within("augmentation.cutmix", a.cutmix, 0.0, 100.0);
        let (operations, magnitude) = ("augmentation.rand_augment_operations", "augmentation.rand_augment_magnitude");
        self.count(operations, Some(a.rand_augment_operations as u64), 0, 14);
        let rand_augment = match a.rand_augment_operations {
            0 => {
                self.unused(magnitude, &a.rand_augment_magnitude, &format!("{operations} is 0"));
                None
            }
            operations => {
                let usual = RandAugment::default().magnitude as usize;
                let strength = self.settle(magnitude, &a.rand_augment_magnitude, usual, "the usual");
                self.count(magnitude, Some(strength as u64), 0, 30);
                Some(RandAugment { operations: operations as u32, magnitude: strength as u32 })
            }
        };
        let AugmentationSection { flip, brightness, contrast, saturation, hue, mixup, cutmix, .. } = a;
        Augmentation { crop, flip, brightness, contrast, saturation, hue, rand_augment, mixup, cutmix }
    }

    /// The value of `key`, which is the number of an image's positions.
    pub(super) fn of_patches(&mut self, key: &str, given: Option<usize>, positions: usize) -> usize {
        if let Some(other) = given.filter(|given| *given != positions) {
            let message =
                format!("{key} = {other}: an image has {positions} positions, the class token's and its patches");
            self.problem(key, message);
        }
        self.settle(key, &given, positions, "the class token's and one for each patch")
    }

    /// The number of classes, once the data is opened.
    pub(super) fn classes(&mut self, given: Option<usize>, inputs: &Inputs) -> Option<usize> {
        let key = "model.vocab_size";
        let Some(classes) = inputs.classes.as_ref().map(Vec::len) else { return given };
        if let Some(other) = given.filter(|given| *given != classes) {
            let message = format!("{key} = {other}, and the images have {classes} classes: leave it out");
            self.problem(key, message);
        }
        Some(self.settle(key, &given, classes, "the classes of the images"))
    }

    /// Reports the keys that have no meaning for images.
    pub(super) fn only_for_text(&mut self) {
        let because = "images have no tokens";
        let tokenizer = self.config.tokenizer.clone();
        for key in tokenizer.keys().iter().map(|key| key.name) {
            self.unused(&format!("tokenizer.{key}"), &tokenizer.get(key), because);
        }
        let (data, usual) = (self.config.data.clone(), DataSection::default());
        for key in [
            "sampling",
            "respect_document_boundaries",
            "text_field",
            "loss_on",
            "chat_template",
            "fim_rate",
            "fim_spm_rate",
            "token_noise",
            "curriculum_start",
            "curriculum_steps",
            "cache",
        ] {
            let changed = data.get(key).filter(|value| usual.get(key).as_ref() != Some(value));
            self.unused(&format!("data.{key}"), &changed, because);
        }
        self.unused("data.shuffle", &data.shuffle.filter(|shuffle| !shuffle), "images are always shuffled");
        self.unused("data.warm", &data.warm.then_some(()), "set images.cache, and run `trainyard data warm`");
        for (key, sources) in [("data.train", Some(&data.train)), ("data.validation", data.validation.as_ref())] {
            if sources.is_some_and(|sources| sources.0.iter().any(|source| source.weight.is_some())) {
                self.problem(key, format!("{key} gives a weight: every image counts alike; give paths alone"));
            }
        }
        let tokens = self.config.training.tokens;
        self.unused("training.tokens", &tokens, "images have no tokens: give training.epochs or training.steps");
        let tokens = self.config.evaluation.tokens_max;
        self.unused("evaluation.tokens_max", &tokens, "images have no tokens");
        let teacher = self.config.distillation.teacher.clone();
        self.unused("distillation.teacher", &teacher, "a teacher has a vocabulary, and images have classes");
    }

    /// The loader's threads: the cores that the training leaves free, or as many as the user says.
    pub(super) fn image_workers(&mut self, inputs: &Inputs, parallel: &Parallel, threads: usize) {
        if self.config.origin("data.workers") != super::Origin::Default {
            return;
        }
        let here = if inputs.processes.is_some() { inputs.sharing } else { parallel.ranks };
        let of_rank = if self.config.compute.device == DeviceKind::Cpu { threads } else { 1 };
        let workers = default_workers(inputs.cores, here, of_rank);
        let because = format!("the cores that {here} x {of_rank} threads of {} leave free, at least 1", inputs.cores);
        self.fill("data.workers", &workers, because);
    }

    /// Rejects divisions that images do not have.
    pub(super) fn image_divisions(&mut self, parallel: &Parallel) {
        for (key, degree) in [
            ("parallel.tensor_parallel_degree", parallel.tensor),
            ("parallel.context_parallel_degree", parallel.context),
        ] {
            if degree > 1 {
                let message = format!(
                    "{key} = {degree}: a model of images is not divided so; use data ranks, parallel.zero_stage or \
                     parallel.pipeline_parallel_degree"
                );
                self.problem(key, message);
            }
        }
    }
}
