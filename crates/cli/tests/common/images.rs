//! A folder of images and a small model of them.

use super::Folder;
use std::fs;
use std::path::Path;

/// A Vision Transformer that makes a step in milliseconds.
pub const VIT: &str = "\
[run]
name = 'one'

[model]
family = 'vit'
dim = 32
layers = 2
heads = 2

[data]
format = 'images'
train = ['shapes']
validation_fraction = 0.2

[images]
size = 8
patch_size = 4

[training]
steps = 12
micro_batch_size = 4
global_batch_size = 8

[optimizer]
learning_rate = 3e-3

[precision]
compute = 'f32'

[compute]
threads = 1

[checkpoint]
interval_steps = 5

[evaluation]
interval_steps = 6
";

/// Writes a square RGB image.
pub fn write_png(path: &Path, side: usize, pixel: impl Fn(usize, usize) -> [u8; 3]) {
    let file = fs::File::create(path).unwrap();
    let mut encoder = png::Encoder::new(file, side as u32, side as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let pixels: Vec<u8> = (0..side * side).flat_map(|i| pixel(i % side, i / side)).collect();
    encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
}

/// A folder of three classes, of 20 images each of 12 x 12 pixels.
pub fn folder() -> Folder {
    folder_of(12)
}

/// Stripes of which red, green or blue is the brightest, by class.
pub fn folder_of(side: usize) -> Folder {
    let folder = Folder::new();
    for (class, name) in ["blue", "green", "red"].into_iter().enumerate() {
        let of_class = folder.join("shapes").join(name);
        fs::create_dir_all(&of_class).unwrap();
        for image in 0..20 {
            let light = 90 + (image * 37 % 120) as u8;
            write_png(&of_class.join(format!("{image:02}.png")), side, |x, y| {
                let mut pixel = [light / 3, light / 4, (image * 11 % 40) as u8];
                pixel[2 - class] = if (x + y * (image % 3)) / 2 % 2 == 0 { light } else { light / 2 };
                pixel
            });
        }
    }
    folder.write("vit.toml", VIT);
    folder
}
