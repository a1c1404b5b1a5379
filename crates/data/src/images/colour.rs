//! Changes of colour, as Pillow's `ImageEnhance` makes them: each blends the image with a
//! degenerate one, in 8 bits.

use super::Augmentation;
use super::decode::Rgb;
use super::draws::Draws;
use super::patches::luma;

/// `other + factor * (value - other)`, clipped and cut to 8 bits as Pillow's `blend` does.
fn blend(value: u8, other: u8, factor: f32) -> u8 {
    let (value, other) = (f32::from(value), f32::from(other));
    // A cast of a float to u8 clips to 0..=255 and cuts the fraction off.
    (other + factor * (value - other)) as u8
}

/// Blends with black: factor 0 is black, 1 the image itself.
pub fn brightness(image: &mut Rgb, factor: f32) {
    let table: [u8; 256] = std::array::from_fn(|value| blend(value as u8, 0, factor));
    image.data.iter_mut().for_each(|value| *value = table[usize::from(*value)]);
}

/// Blends with the mean grey.
pub fn contrast(image: &mut Rgb, factor: f32) {
    let pixels = (image.data.len() / 3).max(1);
    let sum: u64 = image.data.chunks_exact(3).map(|pixel| u64::from(luma(pixel))).sum();
    let mean = (sum as f64 / pixels as f64 + 0.5) as u8;
    let table: [u8; 256] = std::array::from_fn(|value| blend(value as u8, mean, factor));
    image.data.iter_mut().for_each(|value| *value = table[usize::from(*value)]);
}

/// Blends with the greyscale image: factor 0 is grey.
pub fn saturation(image: &mut Rgb, factor: f32) {
    for pixel in image.data.chunks_exact_mut(3) {
        let grey = luma(pixel);
        pixel.iter_mut().for_each(|value| *value = blend(*value, grey, factor));
    }
}

/// Turns the hue by a part of a circle, in 8-bit HSV as torchvision does with Pillow images.
pub fn hue(image: &mut Rgb, turn: f64) {
    let shift = (turn * 255.0) as i32 as u8;
    for pixel in image.data.chunks_exact_mut(3) {
        let [h, s, v] = to_hsv([pixel[0], pixel[1], pixel[2]]);
        pixel.copy_from_slice(&to_rgb([h.wrapping_add(shift), s, v]));
    }
}

/// Pillow's conversion: hue as a part of 255, cut to 8 bits.
fn to_hsv([r, g, b]: [u8; 3]) -> [u8; 3] {
    let (max, min) = (r.max(g).max(b), r.min(g).min(b));
    if max == min {
        return [0, 0, max];
    }
    let range = f32::from(max - min);
    let [rc, gc, bc] = [r, g, b].map(|value| f32::from(max - value) / range);
    let sixths = if r == max {
        f64::from(bc - gc)
    } else if g == max {
        2.0 + f64::from(rc) - f64::from(bc)
    } else {
        4.0 + f64::from(gc) - f64::from(rc)
    } as f32;
    let part = (f64::from(sixths) / 6.0 + 1.0).fract() as f32;
    [(f64::from(part) * 255.0) as u8, (f64::from(range / f32::from(max)) * 255.0) as u8, max]
}

fn to_rgb([h, s, v]: [u8; 3]) -> [u8; 3] {
    if s == 0 {
        return [v; 3];
    }
    let (fs, fv) = (f64::from(f32::from(s) / 255.0), f64::from(v));
    let sixths = (f64::from(h) * 6.0 / 255.0) as f32;
    let sector = sixths.floor();
    let f = f64::from(sixths - sector);
    let round = |value: f64| value.round() as u8;
    let (p, q, t) = (round(fv * (1.0 - fs)), round(fv * (1.0 - fs * f)), round(fv * (1.0 - fs * (1.0 - f))));
    match sector as u32 % 6 {
        0 => [v, t, p],
        1 => [q, v, p],
        2 => [p, v, t],
        3 => [p, q, v],
        4 => [t, p, v],
        _ => [v, p, q],
    }
}

/// Changes brightness, contrast, saturation and hue by random factors, in random order, as
/// torchvision's `ColorJitter`.
pub(super) fn jitter(strengths: &Augmentation, image: &mut Rgb, draws: &mut Draws) {
    let Augmentation { brightness: b, contrast: c, saturation: s, hue: h, .. } = *strengths;
    if [b, c, s, h] == [0.0; 4] {
        return;
    }
    let mut order = [0, 1, 2, 3];
    for last in (1..order.len()).rev() {
        order.swap(last, draws.below(last as u32 + 1) as usize);
    }
    // The factors are drawn in a fixed order, whatever the order of use.
    let factors = [b, c, s].map(|strength| draws.between(1.0 - strength, 1.0 + strength) as f32);
    let turn = draws.between(-h, h);
    for change in order {
        match change {
            0 if b > 0.0 => brightness(image, factors[0]),
            1 if c > 0.0 => contrast(image, factors[1]),
            2 if s > 0.0 => saturation(image, factors[2]),
            3 if h > 0.0 => hue(image, turn),
            _ => {}
        }
    }
}
