//! Images: transforms and decoding against Pillow and torchvision, samples that no layout changes,
//! and bad input.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use trainyard_data::corpus::CacheOptions;
use trainyard_data::images::rand_augment::Operation;
use trainyard_data::images::transform::{Resizing, Window};
use trainyard_data::images::{Decoded, RandAugment, Rgb, colour, decode};
use trainyard_data::{
    Augmentation, IGNORE, ImageEvaluation, ImageIndex, ImageSet, ImageSpec, IndexOptions, Loader, LoaderConfig,
    MicroBatch, OnInvalid, Position,
};

/// Numbers of `scripts/golden/make_images.py`.
fn golden(section: &str) -> Vec<Value> {
    let golden: Value = serde_json::from_str(include_str!("golden/images.json")).unwrap();
    golden[section].as_array().unwrap().clone()
}

fn bytes(case: &Value, key: &str) -> Vec<u8> {
    let hex = case[key].as_str().unwrap();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn numbers<const N: usize>(case: &Value, key: &str) -> [usize; N] {
    std::array::from_fn(|at| case[key][at].as_u64().unwrap() as usize)
}

/// The image of the script's `picture`.
fn picture(width: usize, height: usize) -> Rgb {
    let mut data = Vec::new();
    for y in 0..height {
        for x in 0..width {
            data.extend((0..3).map(|c| (x * x * 3 + y * 11 + x * y * (c + 1) + c * 70 + 9) as u8));
        }
    }
    Rgb { width, height, data }
}

/// Greatest and mean difference of two images of one size.
fn difference(ours: &[u8], theirs: &[u8]) -> (u8, f64) {
    assert_eq!(ours.len(), theirs.len());
    let differences: Vec<u8> = ours.iter().zip(theirs).map(|(a, b)| a.abs_diff(*b)).collect();
    let sum: f64 = differences.iter().map(|d| f64::from(*d)).sum();
    (differences.iter().copied().max().unwrap(), sum / ours.len() as f64)
}

#[test]
fn operations_give_the_pixels_of_pillow() {
    let cases = golden("operations");
    assert!(cases.len() > 15);
    for case in cases {
        let (name, strength) = (case["name"].as_str().unwrap(), case["strength"].as_f64().unwrap());
        let operation = *Operation::ALL.iter().find(|o| format!("{o:?}") == name).unwrap();
        let [width, height] = numbers(&case, "size");
        let mut image = picture(width, height);
        if matches!(operation, Operation::AutoContrast | Operation::Equalize) {
            colour::brightness(&mut image, 0.5);
        }
        operation.apply(strength, &mut image);
        let (greatest, _) = difference(&image.data, &bytes(&case, "pixels"));
        assert_eq!(greatest, 0, "{name} {strength}");
    }
}

#[test]
fn hues_give_the_pixels_of_torchvision() {
    for case in golden("hues") {
        let mut image = picture(9, 7);
        colour::hue(&mut image, case["turn"].as_f64().unwrap());
        let (greatest, _) = difference(&image.data, &bytes(&case, "pixels"));
        assert_eq!(greatest, 0, "{}", case["turn"]);
    }
}

/// One level of 255 is the rounding of two passes in fixed point.
#[test]
fn crops_and_resizes_are_within_a_level_of_torchvision() {
    let mut resizing = Resizing::default();
    for case in golden("resized") {
        let ([width, height], [left, top, w, h], [to_w, to_h]) =
            (numbers(&case, "size"), numbers(&case, "window"), numbers(&case, "to"));
        let window = Window { left, top, width: w, height: h };
        let ours = resizing.resize(&picture(width, height), window, to_w, to_h);
        let (greatest, _) = difference(&ours.data, &bytes(&case, "pixels"));
        assert!(greatest <= 1, "{greatest} of {width} x {height}, {window:?}");
    }
    for case in golden("evaluated") {
        let [width, height] = numbers(&case, "size");
        let (shorter, square) = (case["shorter"].as_u64().unwrap() as usize, case["square"].as_u64().unwrap() as usize);
        let ours = resizing.for_evaluation(&picture(width, height), shorter, square);
        let (greatest, _) = difference(&ours.data, &bytes(&case, "pixels"));
        assert!(greatest <= 1, "{greatest} of {width} x {height} to {shorter} and {square}");
    }
}

/// PNG and lossless WebP are exact. Decoders of JPEG and WebP differ in rounding and in how they
/// enlarge the planes of colour.
#[test]
fn files_of_every_kind_decode_as_pillow_decodes_them() {
    for case in golden("files") {
        let name = case["name"].as_str().unwrap();
        let ours = decode(&bytes(&case, "bytes")).unwrap_or_else(|what| panic!("{name} {what}"));
        assert_eq!([ours.width, ours.height], numbers(&case, "size"), "{name}");
        let (greatest, mean) = difference(&ours.data, &bytes(&case, "pixels"));
        let is_exact = name.ends_with(".png") || name == "lossless.webp";
        let (greatest_max, mean_max) = if is_exact { (0, 0.0) } else { (6, 1.0) };
        assert!(greatest <= greatest_max && mean <= mean_max, "{name}: at most {greatest}, mean {mean}");
    }
}

fn png_of(image: &Rgb) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, image.width as u32, image.height as u32);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&image.data).unwrap();
    writer.finish().unwrap();
    bytes
}

/// The files of a set: name, class, bytes.
fn pictures(count: usize) -> Vec<(String, &'static str, Vec<u8>)> {
    let class = |i: usize| ["ant", "bee", "cat"][i % 3];
    (0..count).map(|i| (format!("{i:03}.png"), class(i), png_of(&picture(20 + i, 31 - i % 9)))).collect()
}

fn class_folders(root: &Path, count: usize) {
    for (name, class, bytes) in pictures(count) {
        fs::create_dir_all(root.join(class)).unwrap();
        fs::write(root.join(class).join(name), bytes).unwrap();
    }
}

fn append(archive: &mut tar::Builder<fs::File>, name: &str, bytes: &[u8]) {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    archive.append_data(&mut header, name, bytes).unwrap();
}

fn open(source: &Path) -> Result<ImageIndex, String> {
    ImageIndex::open(&[source.to_path_buf()], &IndexOptions::default()).map_err(|error| error.to_string())
}

fn spec(augmentation: Augmentation) -> ImageSpec {
    ImageSpec { augmentation, seed: 5, ..ImageSpec::new(16, 8) }
}

fn everything() -> Augmentation {
    Augmentation {
        brightness: 0.4,
        contrast: 0.4,
        saturation: 0.4,
        hue: 0.1,
        rand_augment: Some(RandAugment::default()),
        mixup: 0.8,
        cutmix: 1.0,
        ..Augmentation::default()
    }
}

/// The rows of a batch: class, other class and weight, and the patches as bits.
fn rows(batch: &MicroBatch) -> Vec<(i32, i32, u32, Vec<u32>)> {
    let pixels = batch.pixels.as_ref().unwrap();
    let of_row = pixels.patches.len() / batch.rows;
    let row = |row: usize| {
        let targets = &batch.targets[row * batch.sequence_length..(row + 1) * batch.sequence_length];
        assert!(targets[1..].iter().all(|target| *target == IGNORE));
        let (second, weight) = match &pixels.mixed {
            Some(mixed) => (mixed.second[row], mixed.weight[row].to_bits()),
            None => (-1, 0),
        };
        let patches = &pixels.patches[row * of_row..(row + 1) * of_row];
        (targets[0], second, weight, patches.iter().map(|value| value.to_bits()).collect())
    };
    (0..batch.rows).map(row).collect()
}

#[test]
fn any_ranks_and_workers_give_out_the_same_samples() {
    let folder = tempfile::tempdir().unwrap();
    class_folders(folder.path(), 13);
    let set = Arc::new(ImageSet::new(open(folder.path()).unwrap(), spec(everything())).unwrap());
    // Steps of 24 samples, so that the second goes over the end of an epoch.
    let step_rows = |world: usize, micro_batch_size: usize, workers: usize| {
        let accumulation_steps = 24 / world / micro_batch_size;
        let mut all = Vec::new();
        for rank in 0..world {
            let base = LoaderConfig::new(micro_batch_size);
            let config = LoaderConfig { rank, world, workers, accumulation_steps, ..base };
            let mut loader = Loader::new(Arc::clone(&set), config, Position { samples: 24 }).unwrap();
            (0..accumulation_steps).for_each(|_| all.extend(rows(&loader.next().unwrap())));
        }
        all
    };
    let expected = step_rows(1, 24, 0);
    assert!(expected.iter().any(|row| row.2 != 1f32.to_bits()), "some images are mixed");
    for (world, micro_batch_size) in [(1, 8), (2, 3), (3, 2), (8, 3), (8, 1)] {
        for workers in [1, 4] {
            let same = step_rows(world, micro_batch_size, workers) == expected;
            assert!(same, "{world} ranks of {micro_batch_size}, {workers} workers");
        }
    }
}

#[test]
fn an_epoch_gives_out_every_image_once_and_the_next_changes_them() {
    let folder = tempfile::tempdir().unwrap();
    class_folders(folder.path(), 12);
    let set = ImageSet::new(open(folder.path()).unwrap(), spec(Augmentation::none())).unwrap();
    let epoch = |number: u64| {
        let mut rows = rows(&set.micro_batch(number * 12, 12).unwrap());
        rows.sort();
        rows
    };
    let plain = epoch(0);
    assert_eq!(plain, epoch(1), "without augmentation");
    let mut different = plain.clone();
    different.dedup();
    assert_eq!(different.len(), 12);
    let set = ImageSet::new(set.index().clone(), spec(Augmentation::default())).unwrap();
    let rows_of = |number: u64| rows(&set.micro_batch(number * 12, 12).unwrap());
    assert_ne!(rows_of(0), rows_of(1));
    assert_eq!(rows_of(1), rows_of(1));
}

#[test]
fn evaluation_gives_every_image_in_order() {
    let folder = tempfile::tempdir().unwrap();
    class_folders(folder.path(), 7);
    let index = open(folder.path()).unwrap();
    let batches: Vec<MicroBatch> =
        ImageEvaluation::new(&index, &spec(everything()), 3).unwrap().map(Result::unwrap).collect();
    assert_eq!(batches.iter().map(|batch| batch.rows).collect::<Vec<_>>(), [3, 3, 1]);
    let classes: Vec<i32> = batches.iter().flat_map(rows).map(|row| row.0).collect();
    assert_eq!(classes, (0..7).map(|i| index.class(i) as i32).collect::<Vec<_>>());
    assert!(batches.iter().all(|batch| batch.pixels.as_ref().unwrap().mixed.is_none()));
}

#[test]
fn shards_give_the_samples_of_the_folders() {
    let folder = tempfile::tempdir().unwrap();
    let (root, shards) = (folder.path().join("folders"), folder.path().join("shards"));
    class_folders(&root, 9);
    fs::create_dir_all(&shards).unwrap();
    // In the order of the classes, as the folders are read, in two shards.
    let mut files = pictures(9);
    files.sort_by_key(|(name, class, _)| (*class, name.clone()));
    for (number, part) in files.chunks(5).enumerate() {
        let path = shards.join(format!("part-{number}.tar"));
        let mut archive = tar::Builder::new(fs::File::create(path).unwrap());
        for (at, (name, class, bytes)) in part.iter().enumerate() {
            // The names of long paths are in a header of their own.
            let key = format!("{}/{}", "long".repeat(40), name.trim_end_matches(".png"));
            append(&mut archive, &format!("{key}.png"), bytes);
            match at % 2 {
                0 => append(&mut archive, &format!("{key}.cls"), class.as_bytes()),
                _ => append(&mut archive, &format!("{key}.json"), format!("{{\"label\": \"{class}\"}}").as_bytes()),
            }
        }
        archive.finish().unwrap();
    }
    let of_folders = ImageSet::new(open(&root).unwrap(), spec(everything())).unwrap();
    for source in [shards.clone(), shards.join("*.tar")] {
        let of_shards = ImageSet::new(open(&source).unwrap(), spec(everything())).unwrap();
        assert_eq!(of_shards.index().classes(), ["ant", "bee", "cat"]);
        assert_eq!(of_shards.index().counts(), [3, 3, 3]);
        let (ours, theirs) = (of_shards.micro_batch(0, 20).unwrap(), of_folders.micro_batch(0, 20).unwrap());
        assert!(rows(&ours) == rows(&theirs));
    }
}

#[test]
fn what_was_decoded_is_read_again_and_gives_the_same_samples() {
    let folder = tempfile::tempdir().unwrap();
    let (root, elsewhere, cache) =
        (folder.path().join("folders"), folder.path().join("elsewhere"), folder.path().join("cache"));
    class_folders(&root, 9);
    let decoded = |bytes_max: u64| {
        let options = CacheOptions { folder: cache.clone(), bytes_max };
        Arc::new(Decoded::open(&options).unwrap().with_pixels_min(0))
    };
    let samples = |source: &Path, decoded: Option<&Arc<Decoded>>| {
        let index = open(source).unwrap();
        let index = if let Some(decoded) = decoded { index.keeping(Arc::clone(decoded)) } else { index };
        rows(&ImageSet::new(index, spec(everything())).unwrap().micro_batch(0, 18).unwrap())
    };
    let expected = samples(&root, None);
    let first = decoded(1 << 30);
    assert!(samples(&root, Some(&first)) == expected);
    assert!(first.found().unwrap() > 0.4, "the second epoch: {:?}", first.found());
    // The same files elsewhere are found by their content, and a damaged entry is decoded again.
    class_folders(&elsewhere, 9);
    let entries: Vec<PathBuf> = fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), 9);
    let mut bytes = fs::read(&entries[3]).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&entries[3], bytes).unwrap();
    let second = decoded(1 << 30);
    assert!(samples(&elsewhere, Some(&second)) == expected);
    let found = second.found().unwrap();
    assert!((0.9..1.0).contains(&found), "all but one of some twenty: {found}");
    let third = decoded(1 << 30);
    assert!(samples(&elsewhere, Some(&third)) == expected);
    assert_eq!((third.found(), third.bytes().1), (Some(1.0), false));
    // Rows of Parquet files have identities of their own.
    let rows = decoded(1 << 30);
    assert!(samples(&parquet("set"), Some(&rows)) == expected);
    assert!(rows.found().unwrap() < 0.6);
    let again = decoded(1 << 30);
    assert!(samples(&parquet("set"), Some(&again)) == expected);
    assert_eq!(again.found(), Some(1.0));
    // A file that is written anew is another.
    let copies = folder.path().join("copies");
    fs::create_dir_all(&copies).unwrap();
    for file in fs::read_dir(parquet("set")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copies.join(file.file_name())).unwrap();
    }
    let copied = decoded(1 << 30);
    assert!(samples(&copies, Some(&copied)) == expected);
    assert!(copied.found().unwrap() < 0.6);
    // A full cache changes no sample either.
    fs::remove_dir_all(&cache).unwrap();
    let small = decoded(8 << 10);
    assert!(samples(&root, Some(&small)) == expected);
    assert!(small.bytes().1 && small.bytes().0 <= 8 << 10);
}

#[test]
fn the_price_of_an_image_is_measured_on_those_that_can_be_decoded() {
    let folder = tempfile::tempdir().unwrap();
    class_folders(folder.path(), 6);
    let price = || {
        let set = ImageSet::new(open(folder.path()).unwrap(), spec(everything())).unwrap();
        set.price(Duration::from_secs(1))
    };
    assert!(price().unwrap() > 0.0);
    for class in ["ant", "bee", "cat"] {
        for file in fs::read_dir(folder.path().join(class)).unwrap() {
            fs::write(file.unwrap().path(), "no image").unwrap();
        }
    }
    assert_eq!(price(), None);
}

fn parquet(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/images").join(name)
}

/// Files of `scripts/golden/make_image_parquet.py`, in several row groups and pages.
#[test]
fn parquet_files_give_the_samples_of_the_folders() {
    let folder = tempfile::tempdir().unwrap();
    class_folders(folder.path(), 9);
    let of_folders = ImageSet::new(open(folder.path()).unwrap(), spec(everything())).unwrap();
    for source in [parquet("set"), parquet("set/*.parquet")] {
        let of_rows = ImageSet::new(open(&source).unwrap(), spec(everything())).unwrap();
        assert_eq!(of_rows.index().classes(), ["ant", "bee", "cat"]);
        assert_eq!(of_rows.index().counts(), [3, 3, 3]);
        let (ours, theirs) = (of_rows.micro_batch(0, 20).unwrap(), of_folders.micro_batch(0, 20).unwrap());
        assert!(rows(&ours) == rows(&theirs));
    }
    let index = open(&parquet("set")).unwrap();
    assert!(index.name(4).ends_with("train-00000-of-00002.parquet/row 5"), "{:?}", index.name(4));
    assert_eq!(index.name(5).file_name().unwrap(), "row 1");
}

#[test]
fn columns_of_parquet_files_are_found() {
    let numbers = open(&parquet("numbers.parquet")).unwrap();
    assert_eq!((numbers.classes().len(), numbers.class(0), numbers.class(1)), (2, 1, 0));
    assert!(numbers.decoded(1).unwrap() == picture(21, 30));
    let names = open(&parquet("names.parquet")).unwrap();
    assert_eq!((names.classes(), names.class(0)), (&["ant".to_owned(), "cat".to_owned()][..], 1));
    assert!(names.decoded(0).unwrap() == picture(9, 7));
    // Two classes of one name stay two.
    assert_eq!(open(&parquet("twice.parquet")).unwrap().classes(), ["0", "1"]);
}

#[test]
fn wrong_parquet_files_are_refused_by_name() {
    for (name, words) in [
        ("test_split.parquet", "row 2 has the class -1, and the file names classes 0 to 2"),
        ("no_class.parquet", "row 2 has no class; write a class number or name"),
        ("no_label.parquet", "has no column of classes (columns: image.bytes, image.path, caption)"),
        ("two_labels.parquet", "has several columns of classes (coarse, fine); keep one of them"),
        ("two_images.parquet", "has several columns of images (image.bytes, mask.bytes); keep one"),
        ("no_image.parquet", "has no column of images (columns: text, label)"),
        ("no_rows.parquet", "holds no images"),
        ("decimals.parquet", "has classes that are neither numbers nor text"),
    ] {
        let error = open(&parquet(name)).unwrap_err();
        assert!(error.contains(words) && error.contains(name), "{name}: {error}");
    }
    let error = open(&parquet("paths.parquet")).unwrap().decoded(1).unwrap_err().to_string();
    assert!(error.contains("row 2 has no bytes of an image; write the data set with its images inside"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.parquet");
    let whole = fs::read(parquet("set/train-00000-of-00002.parquet")).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    assert!(open(&path).unwrap_err().contains("is damaged, or not a Parquet file"));
}

#[test]
fn the_held_back_part_stays_when_the_set_grows() {
    let folder = tempfile::tempdir().unwrap();
    class_folders(folder.path(), 20);
    let names = |index: &ImageIndex| (0..index.len()).map(|i| index.name(i)).collect::<Vec<PathBuf>>();
    let (train, held_back) = open(folder.path()).unwrap().split(0.3, 1).unwrap();
    assert_eq!(train.len() + held_back.len(), 20);
    assert!((2..=12).contains(&held_back.len()), "{}", held_back.len());
    class_folders(folder.path(), 40);
    let (_, of_more) = open(folder.path()).unwrap().split(0.3, 1).unwrap();
    assert!(names(&held_back).iter().all(|name| names(&of_more).contains(name)));
    let whole = open(folder.path()).unwrap();
    assert_eq!(whole.split(1e-9, 1).unwrap().1.len(), 1, "at least one image");
    assert!(whole.split(0.0, 1).unwrap().1.is_empty());
    assert!(whole.split(1.0, 1).is_err());
}

/// Mistakes about files, and words of the message.
#[test]
fn wrong_sources_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let image = png_of(&picture(9, 7));
    let file = |name: &str, bytes: &[u8]| {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    file("loose/one.png", &image);
    file("old/class/one.bmp", &image);
    file("empty/class/readme.txt", b"text");
    file("some.zip", b"PK");
    file("some.tar.gz", b"\x1f\x8b");
    file("noise.tar", &[7; 2048]);
    fs::create_dir(root.join("nothing")).unwrap();
    let shard = |name: &str, members: &[(&str, &[u8])]| {
        let mut archive = tar::Builder::new(fs::File::create(root.join(name)).unwrap());
        members.iter().for_each(|(name, bytes)| append(&mut archive, name, bytes));
        archive.finish().unwrap();
    };
    shard("unlabelled.tar", &[("1.png", &image), ("2.png", &image), ("2.cls", b"0")]);
    shard("negative.tar", &[("1.png", &image), ("1.cls", b"-1")]);
    shard("mixed.tar", &[("1.png", &image), ("1.cls", b"0"), ("2.png", &image), ("2.cls", b"cat")]);
    shard("twice.tar", &[("1.png", &image), ("1.jpg", &image), ("1.cls", b"0")]);
    shard("json.tar", &[("1.png", &image), ("1.json", b"{")]);
    shard("text.tar", &[("1.txt", b"words")]);
    for (name, words) in [
        ("loose", "lies in no folder of a class"),
        ("old", "is a .bmp image, which is not read; convert it"),
        ("empty", "is the folder of a class, and holds no image"),
        ("nothing", "holds no images; give a folder with one sub-folder for each class"),
        ("some.zip", "is neither a folder nor a .tar file"),
        ("some.tar.gz", "unpack the compression"),
        ("noise.tar", "is damaged, or not a tar file"),
        ("unlabelled.tar", "1.png has no label; pack 1.cls or 1.json"),
        ("negative.tar", "1.cls has the class -1"),
        ("mixed.tar", "label all images by names, or all by numbers"),
        ("twice.tar", "sample 1 has two images, 1.png and 1.jpg"),
        ("json.tar", "1.json is no JSON"),
        ("text.tar", "holds no images"),
        ("absent", "cannot open"),
    ] {
        let error = open(&root.join(name)).unwrap_err();
        assert!(error.contains(words), "{name}: {error}");
        assert!(error.contains(name), "{name}: {error}");
    }
    class_folders(&root.join("good"), 3);
    let options = IndexOptions { classes: Some(vec!["ant".into(), "bee".into()]) };
    let error = ImageIndex::open(&[root.join("good")], &options).unwrap_err().to_string();
    assert!(error.contains("the class \"cat\"") && error.contains("not one of the 2 classes"), "{error}");
}

#[test]
fn bad_images_are_refused_by_name_or_skipped() {
    let jpeg = golden("files").iter().find(|case| case["name"] == "baseline.jpg").map(|c| bytes(c, "bytes")).unwrap();
    let webp = golden("files").iter().find(|case| case["name"] == "lossy.webp").map(|c| bytes(c, "bytes")).unwrap();
    let png = png_of(&picture(30, 30));
    let mut bomb = png.clone();
    // The header's width and height, and its checksum.
    bomb[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
    let mut flipped = png.clone();
    let last = flipped.len() - 30;
    flipped[last] ^= 0xff;
    for (bytes, words) in [
        (jpeg[..jpeg.len() - 40].to_vec(), "is truncated"),
        (png[..png.len() / 2].to_vec(), "is truncated"),
        (webp[..webp.len() / 2].to_vec(), "is"),
        (flipped, "is a damaged PNG file"),
        (bomb, "PNG"),
        (b"GIF89a".to_vec(), "is neither JPEG, PNG nor WebP"),
        (Vec::new(), "is empty"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        class_folders(folder.path(), 6);
        fs::write(folder.path().join("bee/bad.jpg"), bytes).unwrap();
        let index = open(folder.path()).unwrap();
        let set = ImageSet::new(index.clone(), spec(Augmentation::default())).unwrap();
        let error = set.micro_batch(0, 7).unwrap_err().to_string();
        assert!(error.contains("bee/bad.jpg") && error.contains(words), "{words}: {error}");
        assert!(error.contains("repair or remove it"), "{error}");
        let skipping = ImageSpec { on_invalid: OnInvalid::Skip, ..spec(Augmentation::default()) };
        let set = ImageSet::new(index.clone(), skipping.clone()).unwrap();
        assert_eq!(rows(&set.micro_batch(0, 7).unwrap()).len(), 7);
        let evaluated: Vec<_> = ImageEvaluation::new(&index, &skipping, 7).unwrap().map(Result::unwrap).collect();
        assert_eq!(evaluated[0].targets_counted(), 6, "the bad image has no target");
    }
}

#[test]
fn an_image_with_another_extension_is_decoded_by_its_content() {
    let folder = tempfile::tempdir().unwrap();
    class_folders(folder.path(), 3);
    fs::rename(folder.path().join("ant/000.png"), folder.path().join("ant/000.jpg")).unwrap();
    let set = ImageSet::new(open(folder.path()).unwrap(), spec(Augmentation::none())).unwrap();
    assert_eq!(set.micro_batch(0, 3).unwrap().rows, 3);
}

#[test]
fn a_header_with_too_many_pixels_is_refused_before_memory_is_taken() {
    // A whole PNG header of 65,535 x 65,535 pixels with its checksum, and no data.
    let mut bytes = Vec::new();
    let writer = {
        let mut encoder = png::Encoder::new(&mut bytes, 65_535, 65_535);
        encoder.set_color(png::ColorType::Rgb);
        encoder.write_header()
    };
    drop(writer);
    let error = decode(&bytes).unwrap_err();
    assert!(error.contains("has 65535 x 65535 pixels, and at most"), "{error}");
}

#[test]
fn settings_out_of_range_are_refused() {
    let base = spec(Augmentation::default());
    let augmented = |change: fn(&mut Augmentation)| {
        let mut augmentation = Augmentation::default();
        change(&mut augmentation);
        ImageSpec { augmentation, ..base.clone() }
    };
    for (spec, words) in [
        (ImageSpec { patch_size: 5, ..base.clone() }, "patch_size: is 5, which does not divide the image size 16"),
        (ImageSpec { image_size: 0, ..base.clone() }, "image_size: is 0"),
        (ImageSpec { std: vec![0.0; 3], ..base.clone() }, "positive deviations"),
        (ImageSpec { mean: vec![0.5; 2], ..base.clone() }, "three of each for RGB, or one"),
        (augmented(|a| a.flip = 1.5), "flip: is 1.5"),
        (augmented(|a| a.hue = 0.6), "hue: is 0.6"),
        (augmented(|a| a.mixup = -1.0), "mixup: is -1"),
        (augmented(|a| a.rand_augment = Some(RandAugment { operations: 2, magnitude: 31 })), "magnitude: is 31"),
        (augmented(|a| a.crop.as_mut().unwrap().scale = (0.5, 0.2)), "crop scale: is (0.5, 0.2)"),
    ] {
        let error = spec.check().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
