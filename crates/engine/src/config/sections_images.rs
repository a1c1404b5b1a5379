//! `[images]` and `[augmentation]`: the images of a model that classifies them, and their random
//! changes in training.

use super::section::section;
use super::value::{ByteSize, Channels};
use std::path::PathBuf;

section! {
    /// The images of a model of family vit, for `data.format = "images"`. Beside `model.path` its
    /// files say all this.
    ImagesSection = "images" {
        /// Side of the square that an image becomes, in pixels. Unset: 224.
        #[elsewhere("image_size", "img_size", "input_size", "crop_size")]
        size: Option<usize> = None;
        /// Pixels to which the shorter side of an image is resized in evaluation, before its centre
        /// is cut out. Unset: 8/7 of `size`.
        #[elsewhere("resize_size", "val_resize_size")]
        resize: Option<usize> = None;
        /// Side of a patch, in pixels; divides `size`. Unset: 16.
        #[elsewhere("patch")]
        patch_size: Option<usize> = None;
        /// Mean of red, green and blue, of values from 0 to 1, which is subtracted. Unset: 0.5.
        #[elsewhere("image_mean", "normalize_mean")]
        mean: Option<Channels> = None;
        /// Deviation of red, green and blue, by which the difference is divided. Unset: 0.5.
        #[elsewhere("image_std", "normalize_std")]
        std: Option<Channels> = None;
        /// Go on without images that cannot be decoded. In training the next of the epoch takes the
        /// place of one, and evaluation counts without it; each is named in a warning. False: such
        /// an image ends the run.
        skip_invalid: bool = false;
        /// A folder that keeps decoded images, from which later epochs, evaluations and runs read
        /// them. Unset: every epoch decodes.
        cache: Option<PathBuf> = None;
        /// The most bytes in `cache`; images that find no room are decoded every time. Unset: 16
        /// GiB.
        cache_size: Option<ByteSize> = None;
    }
}

section! {
    /// Random changes to the images of a training. Each is a function of seed, epoch and image,
    /// whatever the number of ranks and workers. Evaluation resizes an image and cuts its centre
    /// out.
    AugmentationSection = "augmentation" {
        /// Cut a random part out of each image and resize it (Szegedy et al. 2015).
        #[elsewhere("random_resized_crop")]
        crop: bool = true;
        /// Least part of the area that is cut out. Unset: 0.08.
        #[elsewhere("crop_min", "train_crop_fraction", "scale_min")]
        crop_area_min: Option<f64> = None;
        /// Greatest part of the area that is cut out. Unset: 1.
        #[elsewhere("crop_max", "scale_max")]
        crop_area_max: Option<f64> = None;
        /// Least ratio of width to height of the part. Unset: 0.75.
        #[elsewhere("ratio_min")]
        crop_ratio_min: Option<f64> = None;
        /// Greatest ratio of width to height of the part. Unset: 1.3333.
        #[elsewhere("ratio_max")]
        crop_ratio_max: Option<f64> = None;
        /// Probability that an image is mirrored from left to right.
        #[elsewhere("hflip", "horizontal_flip", "random_flip")]
        flip: f64 = 0.5;
        /// Brightness is multiplied by a factor between 1 - this and 1 + this.
        brightness: f64 = 0.0;
        /// The same for contrast.
        contrast: f64 = 0.0;
        /// The same for saturation.
        saturation: f64 = 0.0;
        /// Hue is turned by at most this part of a circle, up to 0.5.
        hue: f64 = 0.0;
        /// Operations of RandAugment for each image (Cubuk et al. 2019); 0 for none.
        #[elsewhere("randaugment_n", "ra_num_ops", "num_ops")]
        rand_augment_operations: usize = 0;
        /// Strength of the operations, from 0 to 30. Unset: 9.
        #[elsewhere("randaugment_m", "ra_magnitude")]
        rand_augment_magnitude: Option<usize> = None;
        /// Parameter of the Beta distribution by which pairs of images are blended (Zhang et al.
        /// 2018); 0 for none. The loss is that of both classes by their shares.
        #[elsewhere("mixup_alpha")]
        mixup: f64 = 0.0;
        /// Parameter of the Beta distribution for the area of another image that is pasted in (Yun
        /// et al. 2019); 0 for none. With `mixup`, an image gets one of the two.
        #[elsewhere("cutmix_alpha")]
        cutmix: f64 = 0.0;
    }
}
