//! RandAugment (Cubuk et al. 2019): some of fourteen operations, each drawn uniformly, with one
//! strength for all.
//!
//! The operations and the meaning of a magnitude are torchvision's: 31 levels from 0 to 30, shears
//! up to 0.3, shifts up to 150/331 of the side, rotations up to 30 degrees, factors of colours from
//! 0.1 to 1.9. A signed operation takes each sign with equal probability. Pixels are taken from the
//! nearest place, and places outside the image are black.

use super::RandAugment;
use super::colour;
use super::decode::Rgb;
use super::draws::Draws;

/// The greatest magnitude.
pub const MAGNITUDE_MAX: u32 = 30;

/// An operation of RandAugment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// The image as it is.
    Identity,
    /// Shears along the rows.
    ShearX,
    /// Shears along the columns.
    ShearY,
    /// Shifts along the rows.
    TranslateX,
    /// Shifts along the columns.
    TranslateY,
    /// Rotates about the centre.
    Rotate,
    /// [`colour::brightness`].
    Brightness,
    /// [`colour::saturation`].
    Color,
    /// [`colour::contrast`].
    Contrast,
    /// Blends with a smoothed image.
    Sharpness,
    /// Keeps the highest bits.
    Posterize,
    /// Inverts values from a threshold on.
    Solarize,
    /// Stretches each channel to the full range.
    AutoContrast,
    /// Equalizes the histogram of each channel.
    Equalize,
}

impl Operation {
    /// All fourteen, in torchvision's order.
    pub const ALL: [Self; 14] = [
        Self::Identity,
        Self::ShearX,
        Self::ShearY,
        Self::TranslateX,
        Self::TranslateY,
        Self::Rotate,
        Self::Brightness,
        Self::Color,
        Self::Contrast,
        Self::Sharpness,
        Self::Posterize,
        Self::Solarize,
        Self::AutoContrast,
        Self::Equalize,
    ];

    /// The strength of a magnitude for a square of `size` pixels, and whether it takes a sign.
    fn strength(self, magnitude: u32, size: usize) -> (f64, bool) {
        let part = f64::from(magnitude) / f64::from(MAGNITUDE_MAX);
        match self {
            Self::Identity | Self::AutoContrast | Self::Equalize => (0.0, false),
            Self::ShearX | Self::ShearY => (0.3 * part, true),
            Self::TranslateX | Self::TranslateY => (150.0 / 331.0 * size as f64 * part, true),
            Self::Rotate => (30.0 * part, true),
            Self::Brightness | Self::Color | Self::Contrast | Self::Sharpness => (0.9 * part, true),
            // Bits that are kept: 8 - round(level / (30 / 4)).
            Self::Posterize => {
                (8.0 - (f64::from(magnitude) / (f64::from(MAGNITUDE_MAX) / 4.0)).round_ties_even(), false)
            }
            Self::Solarize => (255.0 * (1.0 - part), false),
        }
    }

    /// Applies the operation with a strength in its own unit: a factor of shear, pixels, degrees,
    /// 1 less than a factor of colour, bits, or a threshold.
    pub fn apply(self, strength: f64, image: &mut Rgb) {
        let factor = (1.0 + strength) as f32;
        // Shears keep the upper left corner, as in torchvision.
        match self {
            Self::Identity => {}
            Self::ShearX => affine(image, [1.0, strength, 0.0, 0.0, 1.0, 0.0]),
            Self::ShearY => affine(image, [1.0, 0.0, 0.0, strength, 1.0, 0.0]),
            Self::TranslateX => affine(image, [1.0, 0.0, -strength.trunc(), 0.0, 1.0, 0.0]),
            Self::TranslateY => affine(image, [1.0, 0.0, 0.0, 0.0, 1.0, -strength.trunc()]),
            Self::Rotate => rotate(image, strength),
            Self::Brightness => colour::brightness(image, factor),
            Self::Color => colour::saturation(image, factor),
            Self::Contrast => colour::contrast(image, factor),
            Self::Sharpness => sharpness(image, factor),
            Self::Posterize => {
                let mask = !(0xffu32 >> strength as u32) as u8;
                image.data.iter_mut().for_each(|value| *value &= mask);
            }
            Self::Solarize => image.data.iter_mut().for_each(|value| {
                if f64::from(*value) >= strength {
                    *value = 255 - *value;
                }
            }),
            Self::AutoContrast => by_channel(image, auto_contrast),
            Self::Equalize => by_channel(image, equalize),
        }
    }
}

/// Applies `settings.operations` random operations.
pub(super) fn apply(settings: &RandAugment, image: &mut Rgb, draws: &mut Draws) {
    for _ in 0..settings.operations {
        let operation = Operation::ALL[draws.below(Operation::ALL.len() as u32) as usize];
        let (strength, is_signed) = operation.strength(settings.magnitude, image.width);
        let is_negative = draws.chance(0.5) && is_signed;
        operation.apply(if is_negative { -strength } else { strength }, image);
    }
}

/// Takes the pixel at (x, y) from (a x + b y + c, d x + e y + f), all counted from centres of
/// pixels, at the nearest place.
fn affine(image: &mut Rgb, [a, b, c, d, e, f]: [f64; 6]) {
    let source = image.data.clone();
    let (width, height) = (image.width as f64, image.height as f64);
    for y in 0..image.height {
        for x in 0..image.width {
            let (at_x, at_y) = (x as f64 + 0.5, y as f64 + 0.5);
            let (from_x, from_y) = (a * at_x + b * at_y + c, d * at_x + e * at_y + f);
            let at = (y * image.width + x) * 3;
            let pixel = &mut image.data[at..at + 3];
            if (0.0..width).contains(&from_x) && (0.0..height).contains(&from_y) {
                let from = (from_y as usize * image.width + from_x as usize) * 3;
                pixel.copy_from_slice(&source[from..from + 3]);
            } else {
                pixel.fill(0);
            }
        }
    }
}

/// Rotates counter-clockwise by `degrees`.
fn rotate(image: &mut Rgb, degrees: f64) {
    let (sin, cos) = (-degrees).to_radians().sin_cos();
    let (centre_x, centre_y) = (image.width as f64 / 2.0, image.height as f64 / 2.0);
    let c = centre_x - cos * centre_x - sin * centre_y;
    let f = centre_y + sin * centre_x - cos * centre_y;
    affine(image, [cos, sin, c, -sin, cos, f]);
}

/// Blends with the image under the kernel [1 1 1; 1 5 1; 1 1 1] / 13. Edges are not smoothed.
fn sharpness(image: &mut Rgb, factor: f32) {
    let (width, height) = (image.width, image.height);
    let source = image.data.clone();
    for y in 1..height.saturating_sub(1) {
        for at in (y * width + 1) * 3..(y * width + width - 1) * 3 {
            let row = |at: usize| f32::from(source[at - 3]) + f32::from(source[at]) + f32::from(source[at + 3]);
            let sum = row(at - width * 3) + row(at) + row(at + width * 3) + 4.0 * f32::from(source[at]);
            let smooth = (sum / 13.0 + 0.5) as u8;
            let (value, smooth) = (f32::from(source[at]), f32::from(smooth));
            image.data[at] = (smooth + factor * (value - smooth)) as u8;
        }
    }
}

/// Replaces the values of each channel by a table made of its histogram.
fn by_channel(image: &mut Rgb, table: fn(&[u32; 256]) -> [u8; 256]) {
    for channel in 0..3 {
        let mut histogram = [0u32; 256];
        image.data.iter().skip(channel).step_by(3).for_each(|value| histogram[usize::from(*value)] += 1);
        let table = table(&histogram);
        image.data.iter_mut().skip(channel).step_by(3).for_each(|value| *value = table[usize::from(*value)]);
    }
}

fn auto_contrast(histogram: &[u32; 256]) -> [u8; 256] {
    let low = histogram.iter().position(|&count| count > 0).unwrap_or(0);
    let high = histogram.iter().rposition(|&count| count > 0).unwrap_or(0);
    if high <= low {
        return std::array::from_fn(|value| value as u8);
    }
    let scale = 255.0 / (high - low) as f64;
    let offset = -(low as f64) * scale;
    std::array::from_fn(|value| (value as f64 * scale + offset) as u8)
}

fn equalize(histogram: &[u32; 256]) -> [u8; 256] {
    let last = histogram.iter().rposition(|&count| count > 0).map_or(0, |at| histogram[at]);
    let step = (histogram.iter().sum::<u32>() - last) / 255;
    if step == 0 {
        return std::array::from_fn(|value| value as u8);
    }
    let mut before = step / 2;
    std::array::from_fn(|value| {
        let level = (before / step).min(255) as u8;
        before += histogram[value];
        level
    })
}
