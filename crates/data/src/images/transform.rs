//! From an image of any size to a square: the random crop of training and the crop of evaluation.
//!
//! The rules are torchvision's `RandomResizedCrop`, and `Resize` with `CenterCrop`. Resizing is
//! bilinear with antialias, in 8 bits, as Pillow resizes.

use fast_image_resize::images::{TypedCroppedImage, TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};

use super::RandomCrop;
use super::decode::Rgb;
use super::draws::Draws;

/// A rectangle of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// First column.
    pub left: usize,
    /// First row.
    pub top: usize,
    /// Columns.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

impl Window {
    /// The whole of an image.
    pub fn whole(image: &Rgb) -> Self {
        Self { left: 0, top: 0, width: image.width, height: image.height }
    }
}

/// Attempts at a random window before the central one is taken, as in torchvision.
const ATTEMPTS: u32 = 10;

/// A window with a random part of the area, a random ratio of the sides (uniform in its logarithm)
/// and a random place. If no attempt fits, the central window whose ratio comes nearest.
pub(super) fn random_window(crop: &RandomCrop, width: usize, height: usize, draws: &mut Draws) -> Window {
    let area = (width * height) as f64;
    for _ in 0..ATTEMPTS {
        let target = area * draws.between(crop.scale.0, crop.scale.1);
        let ratio = draws.between(crop.ratio.0.ln(), crop.ratio.1.ln()).exp();
        let w = (target * ratio).sqrt().round_ties_even() as usize;
        let h = (target / ratio).sqrt().round_ties_even() as usize;
        if (1..=width).contains(&w) && (1..=height).contains(&h) {
            let top = draws.below((height - h + 1) as u32) as usize;
            let left = draws.below((width - w + 1) as u32) as usize;
            return Window { left, top, width: w, height: h };
        }
    }
    let ratio = width as f64 / height as f64;
    let (w, h) = if ratio < crop.ratio.0 {
        (width, (width as f64 / crop.ratio.0).round_ties_even() as usize)
    } else if ratio > crop.ratio.1 {
        ((height as f64 * crop.ratio.1).round_ties_even() as usize, height)
    } else {
        (width, height)
    };
    let (w, h) = (w.clamp(1, width), h.clamp(1, height));
    Window { left: (width - w) / 2, top: (height - h) / 2, width: w, height: h }
}

/// The buffers of resizing, used again for each image.
#[derive(Default)]
pub struct Resizing {
    resizer: Resizer,
}

impl Resizing {
    /// Resizes a window of `image` to `width` x `height`. Pixels outside the window have no
    /// influence, as if it were cut out first.
    pub fn resize(&mut self, image: &Rgb, window: Window, width: usize, height: usize) -> Rgb {
        let mut data = vec![0; width * height * 3];
        let source = TypedImageRef::<U8x3>::from_buffer(image.width as u32, image.height as u32, &image.data);
        let Window { left, top, width: w, height: h } = window;
        let cropped = source
            .as_ref()
            .ok()
            .and_then(|source| TypedCroppedImage::from_ref(source, left as u32, top as u32, w as u32, h as u32).ok());
        let target = TypedImage::<U8x3>::from_buffer(width as u32, height as u32, &mut data);
        let (Some(cropped), Ok(mut target)) = (cropped, target) else {
            unreachable!("a window lies inside its image, and buffers have their sizes");
        };
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
        let done = self.resizer.resize_typed(&cropped, &mut target, &options);
        assert!(done.is_ok(), "resizing without a crop cannot be refused");
        Rgb { width, height, data }
    }

    /// Resizes the shorter side to `shorter`, and cuts the central square of `size` out. A square
    /// greater than the resized image has black edges.
    pub fn for_evaluation(&mut self, image: &Rgb, shorter: usize, size: usize) -> Rgb {
        let (width, height) = match image.width <= image.height {
            true => (shorter, (shorter * image.height) / image.width),
            false => ((shorter * image.width) / image.height, shorter),
        };
        let resized = match (width, height) == (image.width, image.height) {
            true => image.clone(),
            false => self.resize(image, Window::whole(image), width.max(1), height.max(1)),
        };
        centre(&resized, size)
    }
}

/// The central square of `size`, by the rounding of torchvision's `center_crop`.
fn centre(image: &Rgb, size: usize) -> Rgb {
    let mut data = vec![0; size * size * 3];
    // The first row of the square in the image; negative if the square is greater.
    let offset = |length: usize| match length.checked_sub(size) {
        Some(rest) => (rest as f64 / 2.0).round_ties_even() as isize,
        None => -(((size - length) / 2) as isize),
    };
    let (top, left) = (offset(image.height), offset(image.width));
    let first = (-left).max(0) as usize;
    let from = left.max(0) as usize;
    let count = (size - first).min(image.width - from);
    for y in 0..size {
        let Some(row) = usize::try_from(y as isize + top).ok().filter(|row| *row < image.height) else { continue };
        let source = (row * image.width + from) * 3;
        let target = (y * size + first) * 3;
        data[target..target + count * 3].copy_from_slice(&image.data[source..source + count * 3]);
    }
    Rgb { width: size, height: size, data }
}
