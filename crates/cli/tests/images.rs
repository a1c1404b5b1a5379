//! Image classification through the program: training in every layout, resuming, evaluation, export
//! and what is refused.

mod common;

use common::images::{VIT, folder, folder_of, write_png};
use common::{Folder, Ran, losses, record, tensors};
use serde_json::Value;
use std::fs;

fn train(folder: &Folder, name: &str, sets: &[&str]) -> Ran {
    folder.train("vit.toml", name, sets)
}

#[test]
fn a_run_learns_and_reports_accuracy_and_resumes_with_the_same_bits() {
    let folder = folder();
    let long = train(&folder, "one", &["training.steps=60"]).ok();
    for expected in [" images of 3 classes to train on, ", "images/s", "top 1 "] {
        assert!((long.stdout.clone() + &long.stderr).contains(expected), "{expected}: {long:?}");
    }
    assert!(!long.stdout.contains("trainyard generate"), "{}", long.stdout);
    let evaluations = record(&folder, "one", "evaluations.jsonl");
    let last = evaluations.last().unwrap();
    assert_eq!(last["top5"], 1.0, "three classes");
    assert!((6..=20).contains(&last["tokens"].as_u64().unwrap()), "a fifth of 60 images: {last}");
    assert!(last["top1"].as_f64().unwrap() >= 0.75, "{last}");
    let steps = record(&folder, "one", "metrics.jsonl");
    assert_eq!(steps[3]["mem_peak_bytes"], steps[3]["predicted_mem_peak_bytes"]);
    assert!(steps[3]["images_per_s"].as_f64().unwrap() > 0.0);

    train(&folder, "whole", &["augmentation.mixup=0.2", "augmentation.cutmix=1.0"]).ok();
    assert!(losses(&folder, "whole") != losses(&folder, "one")[..12], "mixed images have other losses");
    let mut paused =
        folder.command(&["train", "vit.toml", "--set", "run.name=paused", "--set", "augmentation.mixup=0.2"]);
    paused.args(["--set", "augmentation.cutmix=1.0", "--until", "7"]);
    Ran::new(paused.output().unwrap()).ok();
    folder.run(&["train", "--resume", "runs/paused"]).ok();
    assert_eq!(losses(&folder, "paused"), losses(&folder, "whole"));
    assert_eq!(tensors(&folder.join("runs/paused")), tensors(&folder.join("runs/whole")));
}

#[test]
fn later_epochs_and_runs_read_what_was_decoded() {
    let folder = folder_of(72);
    train(&folder, "plain", &[]).ok();
    // The second run decodes nothing, on other ranks.
    for (name, more) in [("kept", "training.steps=12"), ("again", "parallel.ranks=2")] {
        train(&folder, name, &["images.cache=decoded", more]).ok();
        assert_eq!(losses(&folder, name)[0], losses(&folder, "plain")[0]);
    }
    assert_eq!(losses(&folder, "kept"), losses(&folder, "plain"));
    let bench = ["data", "bench", "--images", "shapes", "--image-size", "32", "--seconds", "0.1", "--json"];
    let figures = |cache: &[&str]| -> Value {
        serde_json::from_str(&folder.run(&[&bench[..], cache].concat()).ok().stdout).unwrap()
    };
    assert_eq!(figures(&["--image-cache", "decoded"])["cached"], 1.0);
    assert_eq!(figures(&[])["cached"], Value::Null);
    let warm = ["data", "warm", "--images", "shapes", "--image-cache"];
    let warmed = folder.run(&[&warm[..], &["warm"]].concat()).ok().stdout;
    assert!(warmed.contains("60 images in ") && warmed.contains(" 0.0 % of them decoded before"), "{warmed}");
    assert_eq!(figures(&["--image-cache", "warm"])["cached"], 1.0);
    let full = folder.run(&[&warm[..], &["small", "--image-cache-size", "200KB"]].concat()).ok().stdout;
    assert!(full.contains("in small, which is full: the other images are decoded every time"), "{full}");
    for (arguments, words) in [
        (&["data", "warm", "--images", "shapes"][..], "--image-cache <DIR>"),
        (&["data", "bench", "shapes", "--image-cache", "decoded"], "--images"),
        (&["data", "warm", "--images", "shapes", "--image-cache", "vit.toml"], "cannot use vit.toml"),
        (&["train", "vit.toml", "--set", "images.cache=vit.toml"], "cannot use vit.toml"),
        (&["train", "vit.toml", "--set", "images.cache_size=1GB"], "there is no images.cache"),
    ] {
        let ran = folder.run(arguments);
        assert!(ran.code != Some(0) && ran.stderr.contains(words), "{arguments:?}: {}", ran.stderr);
    }
}

#[test]
fn images_that_cannot_be_decoded_are_skipped_where_the_user_says_so() {
    let folder = folder();
    for class in ["blue", "green", "red"] {
        folder.write(&format!("shapes/{class}/05.png"), "no image");
    }
    let refused = train(&folder, "refused", &["training.steps=20"]);
    assert!(refused.code != Some(0), "{refused:?}");
    for words in ["/05.png: is neither JPEG, PNG nor WebP", "images.skip_invalid"] {
        assert!(refused.stderr.contains(words), "{}", refused.stderr);
    }
    let trained = train(&folder, "skipped", &["training.steps=20", "images.skip_invalid=true"]).ok();
    assert!(trained.stderr.contains("skipped: shapes/") && trained.stderr.contains("/05.png"), "{}", trained.stderr);
    assert_eq!(losses(&folder, "skipped").len(), 20);
    // All are held back: three of them have no class to find.
    let all = ["images.skip_invalid=true", "data.validation=['shapes']", "data.validation_fraction=auto"];
    train(&folder, "evaluated", &all).ok();
    assert_eq!(record(&folder, "evaluated", "evaluations.jsonl").last().unwrap()["tokens"], 57);
    let eval = ["eval", "runs/evaluated", "--data", "shapes"];
    let refused = folder.run(&eval);
    assert!(refused.code != Some(0) && refused.stderr.contains("05.png"), "{refused:?}");
    let found = folder.run(&[&eval[..], &["--skip-invalid"]].concat()).ok();
    assert!(found.stdout.contains("57 images, without 3 that cannot be decoded"), "{}", found.stdout);
}

#[test]
fn every_layout_gives_the_same_losses() {
    let folder = folder();
    let mixed = "augmentation.mixup=0.4";
    train(&folder, "one", &[mixed]).ok();
    let (two, bits) = ("parallel.ranks=2", "training.elastic_bits=true");
    train(&folder, "bits", &[mixed, bits]).ok();
    for (name, sets) in [
        ("ddp", &[mixed, bits, two][..]),
        ("zero1", &[mixed, bits, two, "parallel.zero_stage=1"]),
        ("zero2", &[mixed, bits, two, "parallel.zero_stage=2"]),
        ("zero3", &[mixed, bits, two, "parallel.zero_stage=3"]),
        ("full", &[mixed, "activation_checkpointing.mode=full"]),
        ("selective", &[mixed, "activation_checkpointing.mode=selective"]),
        ("workers", &[mixed, "data.workers=3"]),
        ("stages", &[mixed, two, "parallel.pipeline_parallel_degree=2"]),
    ] {
        train(&folder, name, sets).ok();
        let like = if sets.contains(&bits) { "bits" } else { "one" };
        let expected = losses(&folder, like);
        assert_eq!((losses(&folder, name), expected.len()), (expected, 12), "{name}");
        let steps = record(&folder, name, "metrics.jsonl");
        assert_eq!(steps[3]["mem_peak_bytes"], steps[3]["predicted_mem_peak_bytes"], "{name}");
        let evaluations = [name, like].map(|run| {
            let last = record(&folder, run, "evaluations.jsonl").pop().unwrap();
            (last["loss"].to_string(), last["top1"].to_string())
        });
        assert_eq!(evaluations[0], evaluations[1], "{name}");
    }
    train(&folder, "bf16", &["precision.compute=bf16"]).ok();
}

#[test]
fn an_export_evaluates_like_its_run_and_trains_on() {
    let folder = folder();
    train(&folder, "one", &[]).ok();
    let eval = |model: &str| -> Value {
        let ran = folder.run(&["eval", model, "--data", "shapes", "--json"]).ok();
        serde_json::from_str(&ran.stdout).unwrap()
    };
    let of_run = eval("runs/one");
    assert_eq!(of_run["images"], 60);
    folder.run(&["export", "runs/one", "--out", "hf", "--dtype", "f32"]).ok();
    for file in ["config.json", "preprocessor_config.json", "model.safetensors"] {
        assert!(folder.join("hf").join(file).is_file(), "{file}");
    }
    for file in ["tokenizer.json", "generation_config.json"] {
        assert!(!folder.join("hf").join(file).exists(), "{file}");
    }
    let of_export = eval("hf");
    for key in ["loss", "top1", "top5", "images"] {
        assert_eq!(of_export[key], of_run[key], "{key}");
    }
    let tuned = VIT.replace("family = 'vit'\ndim = 32\nlayers = 2\nheads = 2", "path = 'hf'");
    let tuned = tuned.replace("[images]\nsize = 8\npatch_size = 4\n", "");
    folder.write("tuned.toml", tuned.replace("'one'", "'tuned'"));
    folder.run(&["train", "tuned.toml"]).ok();
    let [first, last] =
        [&losses(&folder, "tuned")[0], losses(&folder, "one").last().unwrap()].map(|loss| loss.parse::<f64>().unwrap());
    assert!(first < last + 0.5, "{first} after {last}: it begins with the weights");
}

#[test]
fn plans_and_programs_of_images_are_made_without_data() {
    let folder = folder();
    let check = folder.run(&["config", "check", "vit.toml"]).ok();
    assert!(check.stdout.contains("training.sequence_length") && check.stdout.contains('5'), "{}", check.stdout);
    folder.write(
        "preset.toml",
        VIT.replace("family = 'vit'\ndim = 32\nlayers = 2\nheads = 2", "preset = 'vit-tiny'\nvocab_size = 10")
            .replace("[images]\nsize = 8\npatch_size = 4\n", ""),
    );
    let program = folder.run(&["program", "preset.toml"]).ok();
    assert!(program.stdout.contains("Forward") || program.stdout.contains("forward"), "{}", program.stdout);
}

#[test]
fn what_has_no_meaning_for_images_is_refused_before_the_run() {
    let folder = folder();
    for (set, expected) in [
        ("tokenizer.kind=bytes", "tokenizer.kind has no effect: images have no tokens"),
        ("data.fim_rate=0.5", "data.fim_rate has no effect"),
        ("data.sampling=best_fit", "data.sampling has no effect"),
        ("data.text_field=body", "data.text_field has no effect"),
        ("training.tokens=1000", "training.tokens has no effect"),
        ("training.sequence_length=64", "an image has 5 positions"),
        ("model.vocab_size=7", "the images have 3 classes"),
        ("model.sliding_window=4", "model.sliding_window has no effect"),
        ("images.patch_size=3", "does not divide images.size = 8"),
        ("images.std=0", "images.std"),
        ("augmentation.flip=2", "augmentation.flip = 2"),
        ("augmentation.rand_augment_magnitude=5", "augmentation.rand_augment_magnitude has no effect"),
        ("parallel.tensor_parallel_degree=2", "a model of images is not divided so"),
        ("parallel.context_parallel_degree=2", "a model of images is not divided so"),
        ("data.format=text", "set data.format = \"images\""),
    ] {
        let ran = train(&folder, "refused", &[set]);
        assert!(ran.code != Some(0) && ran.stderr.contains(expected), "{set}: {ran:?}");
        assert!(!folder.join("runs/refused").exists(), "{set}: nothing has begun");
    }
    let text = folder.run(&["train", "tiny.toml", "--set", "augmentation.mixup=0.2"]);
    assert!(text.stderr.contains("augmentation.mixup has no effect: the model is one of text"), "{text:?}");
    let text = folder.run(&["train", "tiny.toml", "--set", "data.format=images"]);
    assert!(text.stderr.contains("needs a model of images"), "{text:?}");

    train(&folder, "one", &["training.steps=2"]).ok();
    for arguments in [&["generate", "runs/one", "--prompt", "x"][..], &["quantize", "runs/one", "--out", "q"]] {
        let ran = folder.run(arguments);
        assert!(ran.code != Some(0), "{ran:?}");
        assert!(ran.stderr.contains("model of images"), "{arguments:?}: {}", ran.stderr);
    }
    fs::create_dir_all(folder.join("other/discs")).unwrap();
    write_png(&folder.join("other/discs/0.png"), 12, |_, _| [9; 3]);
    let other = folder.run(&["eval", "runs/one", "--data", "other"]);
    assert!(other.code != Some(0) && other.stderr.contains("discs"), "{other:?}");
}
