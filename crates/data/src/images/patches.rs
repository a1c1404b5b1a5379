//! From a square of RGB to normalised patches.

use super::decode::Rgb;

/// The normalisation of each value of each channel: `(v / 255 - mean) / std`, tabulated.
#[derive(Debug, Clone)]
pub(super) struct Normalisation {
    tables: Vec<[f32; 256]>,
}

impl Normalisation {
    /// One channel of `mean` and `std` is greyscale, three are RGB.
    pub(super) fn new(mean: &[f32], std: &[f32]) -> Self {
        let table = |(mean, std): (&f32, &f32)| std::array::from_fn(|value| (value as f32 / 255.0 - mean) / std);
        Self { tables: mean.iter().zip(std).map(table).collect() }
    }

    /// Writes the patches of a square image, mirrored if asked for. Patches come row by row; a
    /// patch is `[channels, patch, patch]`.
    pub(super) fn patches_into(&self, image: &Rgb, patch: usize, mirror: Mirror, out: &mut Vec<f32>) {
        let size = image.width;
        let grey;
        let data = match self.tables.len() {
            1 => {
                grey = image.data.chunks_exact(3).map(luma).collect::<Vec<u8>>();
                &grey
            }
            _ => &image.data,
        };
        let channels = self.tables.len();
        out.reserve(size * size * channels);
        for top in (0..size).step_by(patch) {
            for left in (0..size).step_by(patch) {
                for (channel, table) in self.tables.iter().enumerate() {
                    for y in top..top + patch {
                        let row = &data[y * size * channels..(y + 1) * size * channels];
                        let value = |pixel: &[u8]| table[usize::from(pixel[channel])];
                        match mirror {
                            Mirror::No => {
                                let pixels = &row[left * channels..(left + patch) * channels];
                                out.extend(pixels.chunks_exact(channels).map(value));
                            }
                            Mirror::Yes => {
                                let pixels = &row[(size - left - patch) * channels..(size - left) * channels];
                                out.extend(pixels.chunks_exact(channels).rev().map(value));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// True to flip left and right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mirror {
    Yes,
    No,
}

/// The brightness of a pixel by ITU-R 601-2 in 16 bits of fraction, Pillow's `convert("L")`.
pub(super) fn luma(pixel: &[u8]) -> u8 {
    let [r, g, b] = [pixel[0], pixel[1], pixel[2]].map(u32::from);
    ((r * 19_595 + g * 38_470 + b * 7_471 + 0x8000) >> 16) as u8
}

/// A box of an image, in pixels, for CutMix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    pub left: usize,
    pub top: usize,
    pub right: usize,
    pub bottom: usize,
}

/// Replaces the pixels of a box by those of `other`; both are patches of one image.
pub(super) fn paste(cut: Cut, size: usize, patch: usize, channels: usize, image: &mut [f32], other: &[f32]) {
    let across = size / patch;
    for channel in 0..channels {
        for y in cut.top..cut.bottom {
            for x in cut.left..cut.right {
                let of = (y / patch) * across + x / patch;
                let at = ((of * channels + channel) * patch + y % patch) * patch + x % patch;
                image[at] = other[at];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, pixel by pixel.
    fn oracle(image: &Rgb, patch: usize, mean: &[f32], std: &[f32], mirror: Mirror) -> Vec<f32> {
        let (size, channels) = (image.width, mean.len());
        let mut out = vec![0.0; size * size * channels];
        for y in 0..size {
            for x in 0..size {
                for c in 0..channels {
                    let from = if mirror == Mirror::Yes { size - 1 - x } else { x };
                    let pixel = &image.data[(y * size + from) * 3..][..3];
                    let value = if channels == 1 { luma(pixel) } else { pixel[c] };
                    let number = (y / patch) * (size / patch) + x / patch;
                    let at = number * channels * patch * patch + c * patch * patch + y % patch * patch + x % patch;
                    out[at] = (f32::from(value) / 255.0 - mean[c]) / std[c];
                }
            }
        }
        out
    }

    fn image(size: usize) -> Rgb {
        let data = (0..size * size * 3).map(|at| (at * at * 7 + at * 13) as u8).collect();
        Rgb { width: size, height: size, data }
    }

    #[test]
    fn patches_are_those_of_the_definition() {
        for (mean, std) in [(vec![0.5, 0.4, 0.3], vec![0.2, 0.3, 0.5]), (vec![0.5], vec![0.25])] {
            for mirror in [Mirror::No, Mirror::Yes] {
                for (size, patch) in [(8, 4), (6, 3), (5, 5), (4, 1)] {
                    let mut patches = Vec::new();
                    Normalisation::new(&mean, &std).patches_into(&image(size), patch, mirror, &mut patches);
                    assert_eq!(patches, oracle(&image(size), patch, &mean, &std, mirror), "{size} {patch} {mirror:?}");
                }
            }
        }
    }

    #[test]
    fn a_box_is_pasted_and_nothing_else() {
        let (size, patch) = (8, 4);
        let (mean, std) = ([0.0; 3], [1.0; 3]);
        let first = image(size);
        let mut second = image(size);
        second.data.iter_mut().for_each(|value| *value = value.wrapping_add(100));
        let cut = Cut { left: 1, top: 3, right: 6, bottom: 8 };
        let mut joined = first.clone();
        for y in cut.top..cut.bottom {
            for at in (y * size + cut.left) * 3..(y * size + cut.right) * 3 {
                joined.data[at] = second.data[at];
            }
        }
        let patches = |image: &Rgb| oracle(image, patch, &mean, &std, Mirror::No);
        let mut pasted = patches(&first);
        paste(cut, size, patch, 3, &mut pasted, &patches(&second));
        assert_eq!(pasted, patches(&joined));
    }
}
