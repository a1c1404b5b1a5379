//! Tests of whole configurations: good, bad, printed and random ones.

use super::*;
use proptest::prelude::*;
use std::path::Path;

fn inputs() -> Inputs {
    Inputs {
        cores: 2,
        cores_because: "cores that this process may use".to_owned(),
        processes: None,
        sharing: 1,
        sentinels: 0,
        tokenizer_vocabulary: None,
        classes: None,
        pretrained: None,
        sequences_per_epoch: None,
        batches_supplied: false,
    }
}

fn parse(text: &str, sets: &[&str]) -> Result<Config, ConfigError> {
    let sets: Vec<_> = sets.iter().map(|set| set.to_string()).collect();
    Config::parse(Path::new("c.toml"), text, &sets)
}

fn resolve(text: &str, sets: &[&str]) -> Result<Resolved, ConfigError> {
    parse(text, sets)?.resolve(&inputs())
}

/// A complete configuration. Its paths exist when the tests run in the crate's folder.
const GOOD: &str = "\
[model]
dim = 64
layers = 2
heads = 4

[data]
train = 'src/lib.rs'

[training]
steps = 100
sequence_length = 32
";

#[test]
fn layers_win_in_order() {
    let config = parse(GOOD, &["training.steps=7", "training.steps=9", "optimizer.name=lion", "data.train=[\"a=b\"]"]);
    let config = config.unwrap();
    assert_eq!(config.training.steps, Some(9));
    assert_eq!(config.optimizer.name, OptimizerName::Lion);
    assert_eq!(config.data.train.0[0].path, Path::new("a=b"));
    assert_eq!(config.training.seed, 1337, "a default");
    assert_eq!(config.origin("model.dim"), Origin::File { path: "c.toml".into(), line: 2 });
    assert_eq!(config.origin("training.steps"), Origin::Set("training.steps=9".to_owned()));
    assert_eq!(config.origin("training.seed"), Origin::Default);
    assert_eq!(Config::load(None, &[]).unwrap(), Config::default());
}

/// A recipe is below the keys of its own layer and above those of earlier ones.
#[test]
fn a_recipe_sets_keys_of_several_sections() {
    let with = |text: &str, sets: &[&str]| parse(&format!("{GOOD}{text}"), sets);
    let fast = with("recipe = 'fast'\n[optimizer]\nlearning_rate = 0.5\n", &[]).unwrap();
    let of = |config: &Config| (config.optimizer.name, config.optimizer.learning_rate, config.schedule.min_ratio);
    assert_eq!(of(&fast), (OptimizerName::Muon, Some(0.5), Some(0.0)));
    assert_eq!(fast.origin("optimizer.name"), Origin::Preset("fast".to_owned()));
    let over = with("[optimizer]\nname = 'lion'\nlearning_rate = 0.5\n", &["training.recipe=fast"]).unwrap();
    assert_eq!((of(&over).0, of(&over).1 == Some(0.5)), (OptimizerName::Muon, false));
    let beside = with("", &["optimizer.name=sgd", "training.recipe=fast"]).unwrap();
    assert_eq!(of(&beside).0, OptimizerName::Sgd);
    // The printed configuration names the recipe alone, and is the same again.
    let resolved = fast.resolve(&inputs()).unwrap();
    let text = resolved.to_toml();
    assert!(text.contains("recipe = \"fast\"") && text.contains("# name = \"muon\"  # preset fast"), "{text}");
    assert_eq!(resolve(&text, &[]).unwrap().optimizer, resolved.optimizer);
    let error = with("recipe = 'quick'\n", &[]).unwrap_err().to_string();
    assert!(error.contains("training.recipe \"quick\" is unknown; known recipes: fast"), "{error}");
}

#[test]
fn every_derived_value_has_its_derivation() {
    let r = resolve(GOOD, &["training.micro_batch_size=4", "training.global_batch_size=32", "training.steps=1000"])
        .unwrap();
    let because =
        |key: &str| r.derivations.iter().find(|d| d.key == key).map(|d| (d.value.as_str(), d.because.as_str()));
    let accumulation = because("training.accumulation_steps").unwrap();
    assert_eq!(accumulation, ("8", "global_batch_size 32 / (micro_batch_size 4 x data-parallel degree 1)"));
    assert_eq!(because("compute.threads"), Some(("2", "cores that this process may use")));
    assert_eq!(because("model.head_dim"), Some(("16", "dim 64 / heads 4")));
    assert_eq!(because("model.ffn_dim"), Some(("192", "8/3 x dim 64, rounded up to a multiple of 64")));
    assert_eq!(because("model.max_sequence_length"), Some(("32", "training.sequence_length")));
    assert_eq!(because("schedule.warmup_steps"), Some(("20", "2 % of 1000 steps, at most 2000")));
    assert_eq!(because("schedule.decay_steps"), Some(("980", "1000 steps - warmup_steps 20")));
    assert_eq!(because("model.dim"), None, "it was given");
    assert_eq!(r.batch.accumulation, 8);
    assert_eq!(r.tokens_per_step(), 32 * 32);
    assert_eq!(r.threads, 2);
    let ModelSource::Shape(shape) = &r.model else { panic!("a shape") };
    assert_eq!((shape.kv_heads, shape.head_dim, shape.vocab_size), (4, 16, None));
    assert_eq!(r.explain().lines().count(), r.derivations.len());
}

#[test]
fn limits_become_steps() {
    let text = GOOD.replace("steps = 100", "tokens = 1_000_000");
    let r = resolve(&text, &["training.micro_batch_size=4"]).unwrap();
    assert_eq!(r.limits, Limits { steps: Some(7813), seconds: None }, "1000000 / 128, rounded up");
    let r = resolve(&text, &["training.steps=10", "training.seconds=60"]).unwrap();
    assert_eq!(r.limits, Limits { steps: Some(10), seconds: Some(60.0) });
    let r = resolve(&GOOD.replace("steps = 100", "seconds = 60"), &[]).unwrap();
    assert_eq!(r.limits, Limits { steps: None, seconds: Some(60.0) });
    assert_eq!(r.schedule.steps, None);
}

#[test]
fn epochs_become_steps_and_steps_epochs() {
    let of = |text: &str, sets: &[&str]| {
        let inputs = Inputs { sequences_per_epoch: Some(341), ..inputs() };
        let resolved = parse(text, sets).unwrap().resolve(&inputs).unwrap();
        let epochs = |d: &&Derivation| d.key == "training.epochs" || d.key == "training.steps";
        let derived = resolved.derivations.iter().find(epochs).cloned();
        (resolved.limits.steps, derived.map(|d| format!("{} = {} ({})", d.key, d.value, d.because)))
    };
    let says = "training.steps = 86 (2 epochs x 341 sequences of the data / global_batch_size 8, rounded up)";
    let epochs = GOOD.replace("steps = 100", "epochs = 2");
    assert_eq!(of(&epochs, &[]), (Some(86), Some(says.to_owned())));
    let says = "training.epochs = 2.346 (100 steps x global_batch_size 8 / 341 sequences of the data)";
    assert_eq!(of(GOOD, &[]), (Some(100), Some(says.to_owned())));
    assert_eq!(of(&epochs, &["training.steps=50"]), (Some(50), None), "the first limit");
    assert_eq!(of(&epochs, &["training.tokens=256"]).0, Some(1));
    // The data are not opened yet.
    assert_eq!(resolve(&epochs, &[]).unwrap().limits, Limits { steps: None, seconds: None });
}

#[test]
fn the_vocabulary_comes_from_the_tokenizer() {
    let vocabulary = |text: &str, sets: &[&str], known: Option<usize>| {
        let inputs = Inputs { tokenizer_vocabulary: known, ..inputs() };
        let ModelSource::Shape(shape) = parse(text, sets).unwrap().resolve(&inputs).unwrap().model else { panic!() };
        shape.vocab_size
    };
    assert_eq!(vocabulary(GOOD, &[], Some(8001)), Some(8064));
    assert_eq!(vocabulary(GOOD, &["model.vocab_multiple=1"], Some(8001)), Some(8001));
    assert_eq!(vocabulary(GOOD, &["model.vocab_size=9000"], Some(8001)), Some(9000));
    assert_eq!(vocabulary(GOOD, &["tokenizer.vocab_size=1000"], None), Some(1024));
    let preset = "[model]\npreset = 'gpt2-124m'\n[data]\ntrain = 'src'\n[training]\nsteps = 1";
    assert_eq!(vocabulary(preset, &[], None), Some(50257));
    assert_eq!(vocabulary(preset, &[], Some(8001)), Some(8064), "the tokenizer that is used, not the preset's");
}

#[test]
fn presets_are_shapes_that_resolve() {
    for preset in PRESETS {
        let want = trainyard_model::preset(preset).unwrap();
        // The classes of images are those of the data.
        let (format, vocab_size) = match want.image {
            Some(_) => ("images", None),
            None => ("text", Some(want.vocab_size)),
        };
        let data = format!("[data]\nformat = '{format}'\ntrain = 'src'");
        let text = format!("[model]\npreset = '{preset}'\n{data}\n[training]\nsteps = 1");
        let r = resolve(&text, &[]).unwrap_or_else(|error| panic!("{preset}: {error}"));
        assert!(r.sequence_length <= 2048);
        let ModelSource::Shape(shape) = r.model else { panic!("{preset}") };
        let sizes = [shape.dim, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn_dim];
        assert_eq!(sizes, [want.dim, want.layers, want.heads, want.kv_heads, want.head_dim, want.ffn_dim], "{preset}");
        assert_eq!((shape.vocab_size, shape.max_sequence_length), (vocab_size, want.max_positions), "{preset}");
        assert_eq!(
            (shape.norm_eps, shape.init_std, shape.dropout),
            (want.norm_eps, want.init_std, want.dropout),
            "{preset}"
        );
        let flags = [shape.tie_embeddings, shape.qkv_bias, shape.output_bias, shape.mlp_bias, shape.qk_norm];
        let wanted = [want.tie_embeddings, want.qkv_bias, want.o_bias, want.mlp_bias, want.qk_norm];
        assert_eq!((flags, shape.sliding_window), (wanted, want.sliding_window), "{preset}");
        assert_eq!(shape.rope.map(|rope| rope.theta), want.rope.as_ref().map(|rope| rope.theta), "{preset}");
        let scaled = shape.rope.is_some_and(|rope| rope.scaling != RopeScaling::None);
        assert_eq!(scaled, want.rope.is_some_and(|rope| rope.scaling.is_some()), "{preset}");
        assert_eq!(format!("{:?}", shape.activation), format!("{:?}", want.activation), "{preset}");
    }
    let text = "[model]\npreset = 'llama-1b'\nlayers = 2\n[data]\ntrain = 'src'\n[training]\nsteps = 1";
    let config = parse(text, &[]).unwrap();
    assert_eq!((config.model.layers, config.model.dim), (Some(2), Some(2048)), "keys beside a preset change it");
    let config = parse(text, &["model.preset=gpt2-124m", "model.dim=1536"]).unwrap();
    assert_eq!((config.model.layers, config.model.dim), (Some(12), Some(1536)), "a later preset replaces the shape");
}

#[test]
fn overrides_of_checkpointing_are_ranges_and_later_ones_win() {
    let overrides = "[{ blocks = '0-1', mode = 'full' }, { blocks = 1, mode = 'none' }]";
    let text = format!("{GOOD}[activation_checkpointing]\nmode = 'selective'\noverrides = {overrides}\n");
    let r = resolve(&text, &["model.layers=3"]).unwrap();
    let modes: Vec<_> = (0..3).map(|block| r.checkpoint_mode(block).name()).collect();
    assert_eq!(modes, ["full", "none", "selective"]);
}

#[test]
fn a_resolved_configuration_is_a_file_again() {
    let memory = ["memory.limit=1.5GiB", "data.train=[{ path = \"src\", weight = 2 }]", "data.validation=src/lib.rs"];
    let muon = ["optimizer.name=muon", "schedule.kind=wsd", "precision.compute=f16"];
    let ranges = ["activation_checkpointing.overrides=[{ blocks = \"0-1\", mode = \"full\" }]", "training.tokens=1e6"];
    for sets in
        [&[][..], &memory, &muon, &ranges, &["model.preset=gpt2-355m"], &["model.preset=llama-8b", "model.layers=2"]]
    {
        let inputs = Inputs { tokenizer_vocabulary: Some(1000), ..inputs() };
        let first = parse(GOOD, sets).unwrap().resolve(&inputs).unwrap();
        let text = first.to_toml();
        let again = Config::parse(Path::new("again.toml"), &text, &[]).unwrap().resolve(&inputs).unwrap();
        assert_eq!(again, first, "{text}");
        assert_eq!(again.to_toml(), text);
    }
}

#[test]
fn the_documentation_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/config.md");
    let text = documentation();
    if std::env::var_os("TRAINYARD_BLESS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == text, "docs/config.md is stale: run this test with TRAINYARD_BLESS=1 and commit the file");
}

#[test]
fn every_key_is_documented_and_its_default_is_accepted() {
    for section in Config::default().sections() {
        assert!(!section.about().is_empty(), "[{}]", section.name());
        for key in section.keys() {
            assert!(!key.about.is_empty(), "{}.{}", section.name(), key.name);
            if let Some(default) = key.default {
                let mut config = Config::default();
                config.section_mut(section.name()).unwrap().set(key.name, &default).unwrap();
                assert_eq!(config, Config::default(), "{}.{}", section.name(), key.name);
            }
        }
    }
}

/// Settings over the good configuration, and parts of the expected message.
const BAD: &[(&[&str], &[&str])] = &[
    // Names.
    (&["training.stpes=5"], &["--set training.stpes=5: unknown key `training.stpes`; did you mean `training.steps`?"]),
    (&["compression.activation='int8'"], &["did you mean `compression.activations`?"]),
    (&["trainin.steps=5"], &["did you mean `training.steps`?"]),
    (&["optimizer.lr=1e-3"], &["did you mean `optimizer.learning_rate`?"]),
    (&["training.learning_rate=1"], &["did you mean `optimizer.learning_rate`?"]),
    (&["model.hidden_size=64"], &["did you mean `model.dim`?"]),
    (&["training.gradient_accumulation_steps=2"], &["did you mean `training.accumulation_steps`?"]),
    (&["steps=5"], &["unknown key `steps`; did you mean `training.steps`?"]),
    (&["traning={}"], &["unknown section `traning`; did you mean [training]?"]),
    (
        &["metrics.wombat=1"],
        &[
            "unknown key `metrics.wombat`; [metrics] has jsonl, interval_steps, tensorboard, record, profile, profile_steps",
        ],
    ),
    (&["zoo.wombat=1"], &["the sections are run, model"]),
    (&["evaluation.batches_max=4"], &["counted micro-batches", "write evaluation.tokens_max"]),
    (&["training.steps"], &["section.key=value"]),
    (&[".steps=1"], &["section.key=value"]),
    // Types.
    (&["training.steps=many"], &["training.steps takes a whole number, not the string \"many\""]),
    (&["training.steps=1.5"], &["training.steps takes a whole number, not 1.5"]),
    (&["training.steps=-5"], &["training.steps takes a whole number, not -5"]),
    (&["optimizer.learning_rate=nan"], &["optimizer.learning_rate takes a number, not nan"]),
    (&["metrics.jsonl=yes"], &["metrics.jsonl takes true or false, not the string \"yes\""]),
    (&["optimizer.name=adamv"], &["did you mean \"adamw\"?", "one of \"adamw\", \"sgd\""]),
    (&["schedule.kind=cosin"], &["did you mean \"cosine\"?"]),
    (
        &["precision.tf32=true", "precision.compute=f32"],
        &["precision.tf32 has no effect: compute.device is cpu, which has no TF32; remove it"],
    ),
    (&["precision.tf32=true", "device=cuda"], &["TF32 is for products of f32, and precision.compute is bf16"]),
    (&["precision.compute=fp64"], &["one of \"f32\", \"bf16\", \"f16\""]),
    (&["compute.device=cuda:x"], &["compute.device takes \"cpu\", \"cuda\" or \"cuda:N\", not the string \"cuda:x\""]),
    (&["device=gpu"], &["compute.device takes \"cpu\", \"cuda\" or \"cuda:N\", not the string \"gpu\""]),
    (&["memory.limit=2GX"], &["a size such as \"2GiB\""]),
    (&["data.train=[{ pth = 'a' }]"], &["unknown key `pth`; did you mean `path`?"]),
    (&["data.train=[{ weight = 1 }]"], &["without a `path`"]),
    (&["data.train=[3]"], &["data.train takes a path, or a list"]),
    (&["run.directory=''"], &["run.directory is an empty path"]),
    (&["model.preset=gpt2-123m"], &["did you mean \"gpt2-124m\"?"]),
    (&["activation_checkpointing.overrides=[{ blocks = '3-1', mode = 'full' }]"], &["which is empty"]),
    (&["activation_checkpointing.overrides=[{ blocks = '0', mode = 'ful' }]"], &["did you mean \"full\"?"]),
    // Shapes.
    (&["model.heads=5"], &["model.heads = 5 does not divide model.dim = 64"]),
    (&["model.kv_heads=3"], &["model.kv_heads = 3 does not divide model.heads = 4"]),
    (&["model.head_dim=15"], &["rotary positions turn pairs"]),
    (&["model.dim=0"], &["model.dim = 0 is too small"]),
    (&["model.dim=99999999999"], &["model.dim = 99999999999 is too large"]),
    (&["model.layers=auto"], &["model.layers is not set"]),
    (&["model.family=gpt2", "model.kv_heads=2"], &["gpt2 has no grouped-query attention"]),
    (&["model.family=gpt2", "model.rope_theta=5000"], &["learned positions"]),
    (&["model.max_sequence_length=16"], &["training.sequence_length = 32 is longer than the model takes"]),
    (&["model.rope_scaling=llama3"], &["needs model.rope_factor", "needs model.rope_original_length"]),
    (&["model.activation=gelu"], &["the llama family gates with silu"]),
    (&["model.norm_eps=0"], &["model.norm_eps = 0 is out of range"]),
    (&["model.rope_factor=2"], &["model.rope_factor has no effect: model.rope_scaling is none"]),
    (&["model.dropout=1.0"], &["model.dropout = 1 is out of range"]),
    (&["model.path=src", "model.layers=2"], &["--set model.layers=2: model.layers is given beside model.path"]),
    (&["model.path=nowhere/at/all"], &["names nowhere/at/all, which does not exist"]),
    (&["model.preset=gpt2-124m", "model.path=src"], &["model.preset and model.path are both given"]),
    (&["model.load_weights=true"], &["without model.path there is nothing to load"]),
    // Data and tokens.
    (&["data.train=[]"], &["data.train is empty"]),
    (&["data.train=missing.txt"], &["missing.txt, which does not exist: /"]),
    (&["data.train=a.txt,b.txt"], &["a list is written [\"A\", \"B\"]"]),
    (&["training.accumulation_steps=0"], &["--set training.accumulation_steps=0: "]),
    (&["data.train=[{ path = 'src', weight = 1 }, 'src']"], &["weights for some entries only"]),
    (&["data.train=[{ path = 'src', weight = -1 }]"], &["must be above 0"]),
    (&["data.validation=src", "data.validation_fraction=0.1"], &["data.validation_fraction has no effect"]),
    (&["data.validation=[{ path = 'src', weight = 2 }]"], &["data.validation gives a weight, which has no effect"]),
    (&["data.validation_fraction=0.9"], &["must be from 0 to 0.5"]),
    (&["data.sampling=random", "data.shuffle=true"], &["random sampling has no order"]),
    (&["data.workers=0"], &["data.workers = 0 is too small"]),
    (&["tokenizer.path=src", "tokenizer.kind=bytes"], &["tokenizer.kind has no effect"]),
    (&["tokenizer.kind=bytes", "tokenizer.vocab_size=300"], &["only bpe is trained to a size"]),
    (&["tokenizer.vocab_size=100"], &["must be at least 257"]),
    (&["tokenizer.add_bos=true"], &["tokenizer.add_bos has no effect", "made here"]),
    (&["tokenizer.vocab_size=1000", "model.vocab_size=900"], &["no row for some of the tokenizer's 1000 tokens"]),
    // Training.
    (&["training.steps=auto"], &["nothing ends the training"]),
    (&["training.steps=0"], &["training.steps = 0 is too small"]),
    (&["training.seconds=0"], &["training.seconds = 0 is out of range: it must be from 0.001 to 1000000000"]),
    (&["training.seconds=1e300"], &["training.seconds", "is out of range"]),
    (&["parallel.deadline_seconds=1e-320"], &["parallel.deadline_seconds", "it must be from 0.001 to 1000000000"]),
    (&["training.sequence_length=auto"], &["training.sequence_length is not set"]),
    (&["training.micro_batch_size=4", "training.global_batch_size=6"], &["does not divide by 4"]),
    (
        &["training.micro_batch_size=4", "training.global_batch_size=8", "training.accumulation_steps=3"],
        &["is not micro_batch_size 4 x accumulation_steps 3 x data-parallel degree 1 = 12"],
    ),
    (&["training.micro_batch_size=0"], &["training.micro_batch_size is 0"]),
    (&["optimizer.learning_rate=-1"], &["optimizer.learning_rate = -1 must be greater than 0"]),
    (&["optimizer.beta1=1.0"], &["optimizer.beta1 = 1 is out of range: it must be at least 0 and below 1"]),
    (&["optimizer.eps=0"], &["it must be above 0 and at most 1"]),
    (&["optimizer.momentum=0.9"], &["optimizer.momentum has no effect: adamw does not use it"]),
    (&["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"], &["needs a momentum above 0"]),
    (&["optimizer.weight_decay=-0.1"], &["must not be negative"]),
    (&["optimizer.weight_decay=5000"], &["flip the sign"]),
    (&["optimizer.clip_norm=-1"], &["0 turns clipping off"]),
    (&["schedule.warmup_steps=101"], &["schedule.warmup_steps = 101 is more than the 100 steps"]),
    (&["schedule.warmup_steps=60", "schedule.decay_steps=50"], &["do not fit into 100 steps"]),
    (&["schedule.kind=constant", "schedule.min_ratio=0.1"], &["a constant schedule does not decay"]),
    (&["schedule.min_ratio=2"], &["must be from 0 to 1"]),
    (&["schedule.decay_shape=sqrt"], &["only wsd"]),
    (&["precision.compute=f16", "precision.loss_scale_initial=1000"], &["power of two"]),
    (
        &["precision.fp8=hybrid", "precision.compute=f32"],
        &["precision.fp8 = \"hybrid\" is for products of bf16, and precision.compute is f32"],
    ),
    (&["precision.fp8=e4m3"], &["one of \"off\", \"hybrid\""]),
    (&["precision.int8=on"], &["one of \"off\", \"switchback\""]),
    (&["precision.int8=switchback", "precision.fp8=hybrid"], &["both round the operands of the same products"]),
    (&["precision.int8=switchback", "compute.device=cuda"], &["precision.int8 has kernels for processors only"]),
    (
        &["precision.int8=switchback", "parallel.tensor_parallel_degree=2"],
        &["which parallel.tensor_parallel_degree divides"],
    ),
    (&["precision.fp8_margin=1"], &["precision.fp8_margin has no effect: precision.fp8 is off"]),
    (&["precision.fp8_amax_history=16"], &["precision.fp8_amax_history has no effect: precision.fp8 is off"]),
    (&["precision.fp8=hybrid", "precision.fp8_amax_history=0"], &["precision.fp8_amax_history = 0 is too small"]),
    (&["precision.fp8=hybrid", "precision.fp8_margin=9"], &["precision.fp8_margin = 9 is too large"]),
    (&["precision.loss_scale_window=10"], &["only f16 scales its loss"]),
    // The machine and the records.
    (&["compute.isa=avx3"], &["unknown instruction set `avx3`"]),
    (&["compute.threads=100000"], &["must be at most 1024"]),
    (&["memory.limit=17B"], &["memory.limit = 17 is too small"]),
    (
        &["activation_checkpointing.overrides=[{ blocks = '0-2', mode = 'full' }]"],
        &["names block 2, but the last of 2 blocks is 1"],
    ),
    (&["checkpoint.keep_last=0"], &["nothing to resume from"]),
    (&["checkpoint.interval_seconds=-1"], &["it must be from 0.001"]),
    (&["metrics.interval_steps=0"], &["metrics.interval_steps = 0 is too small: it must be at least 1"]),
    (&["metrics.profile_steps=0"], &["metrics.profile_steps = 0 is too small"]),
    (&["training.epochs=0"], &["training.epochs = 0 must be greater than 0"]),
    (
        &["evaluation.early_stopping_patience=3"],
        &["counts evaluations during training: give evaluation.interval_steps"],
    ),
    (&["evaluation.early_stopping_min_delta=0.1"], &["has no effect: evaluation.early_stopping_patience is unset"]),
    (
        &[
            "evaluation.interval_steps=2",
            "evaluation.early_stopping_patience=0",
            "evaluation.early_stopping_min_delta=-1",
        ],
        &["early_stopping_patience = 0 is too small", "early_stopping_min_delta = -1 must not be negative"],
    ),
    (&["checkpoint.keep_best=true", "data.validation_fraction=0"], &["needs validation data"]),
    (&["evaluation.interval_steps=10", "data.validation_fraction=0"], &["needs validation data"]),
    (&["run.name=../up"], &["cannot be a folder"]),
];

#[test]
fn bad_settings_are_explained() {
    for (sets, fragments) in BAD {
        let error = match resolve(GOOD, sets) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{sets:?} was accepted"),
        };
        for fragment in *fragments {
            assert!(error.contains(fragment), "{sets:?} gave\n{error}\nwithout\n{fragment}");
        }
    }
}

#[test]
fn bad_files_are_explained_with_their_line() {
    for (text, fragment) in [
        ("[training]\n\nstpes = 5\n", "c.toml:3: unknown key `training.stpes`; did you mean `training.steps`?"),
        ("steps = 5\n", "c.toml:1: unknown key `steps`; did you mean `training.steps`?"),
        ("\n[trianing]\nsteps = 5\n", "c.toml:3: unknown key `trianing.steps`; did you mean `training.steps`?"),
        ("[training]\nsteps = \n", "c.toml:2: "),
        ("[training]\nsteps = 5\nsteps = 6\n", "c.toml:3: duplicate key"),
        ("[training\n", "c.toml:1: "),
        ("[training]\nsteps = 'x'\n", "c.toml:2: training.steps takes a whole number"),
        ("[training.steps]\nn = 1\n", "c.toml:1: training.steps takes a whole number, not a table"),
        ("training = 5\n", "c.toml:1: `training` is a section"),
        ("[zoo]\n", "c.toml:1: unknown key `zoo`"),
        ("[model]\npreset = 3\n", "c.toml:2: model.preset takes a string, not 3"),
    ] {
        let error = parse(text, &[]).unwrap_err().to_string();
        assert!(error.contains(fragment), "{text:?} gave\n{error}\nwithout\n{fragment}");
    }
    let error = Config::load(Some(Path::new("no/such/file.toml")), &[]).unwrap_err().to_string();
    assert!(error.contains("cannot read no/such/file.toml"), "{error}");
}

#[test]
fn all_problems_are_reported_together() {
    let error = resolve(GOOD, &["model.heads=5", "checkpoint.keep_last=0", "schedule.min_ratio=2"]).unwrap_err();
    assert_eq!(error.problems.len(), 3, "{error}");
    assert!(error.to_string().starts_with("configuration: 3 problems\n"));
    let error = parse("[a]\nb = 1\n[training]\nsteps = 'x'\n", &["c.d=1"]).unwrap_err();
    assert_eq!(error.problems.len(), 3, "{error}");
}

#[test]
fn a_tokenizer_larger_than_a_loaded_model_is_an_error() {
    let pretrained = Pretrained { vocab_size: 1000, max_sequence_length: 128, layers: 2, image: None, paired: false };
    let inputs = Inputs { tokenizer_vocabulary: Some(1001), pretrained: Some(pretrained), ..inputs() };
    let text = "[model]\npath = 'src'\n[data]\ntrain = 'src'\n[training]\nsteps = 1\nsequence_length = 256";
    let error = parse(text, &[]).unwrap().resolve(&inputs).unwrap_err().to_string();
    assert!(error.contains("1001 tokens, but the model in model.path has only 1000"), "{error}");
    assert!(error.contains("config.json's longest is 128"), "{error}");
}

/// Any value that TOML can hold under a key.
fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|n| n.to_string()),
        (-4i64..70).prop_map(|n| n.to_string()),
        any::<f64>().prop_map(|x| format!("{x:?}").replace("NaN", "nan")),
        any::<bool>().prop_map(|b| b.to_string()),
        "[a-z0-9_-]{0,8}".prop_map(|s| format!("'{s}'")),
        Just("[]".to_owned()),
        Just("{ path = 1 }".to_owned()),
        Just("[1, 'a', { blocks = '0-9', mode = 'full' }]".to_owned()),
        Just("1979-05-27".to_owned()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_text_never_panics(text in "\\PC{0,200}", set in "\\PC{0,60}") {
        let _ = Config::parse(Path::new("c.toml"), &text, &[set]);
    }

    /// Known keys with arbitrary values: resolving succeeds or reports problems, and a resolved
    /// configuration prints and reads back.
    #[test]
    fn random_values_of_known_keys_never_panic(choices in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..12)) {
        let keys: Vec<String> = Config::default()
            .sections()
            .iter()
            .flat_map(|section| section.keys().into_iter().map(|key| format!("{}.{}", section.name(), key.name)))
            .collect();
        let sets: Vec<String> = choices.iter().map(|(index, value)| format!("{}={value}", index.get(&keys))).collect();
        for set in &sets {
            let one = std::slice::from_ref(set);
            if let Ok(resolved) = Config::parse(Path::new("c.toml"), GOOD, one).and_then(|config| config.resolve(&inputs())) {
                let again = Config::parse(Path::new("c.toml"), &resolved.to_toml(), &[]).unwrap().resolve(&inputs()).unwrap();
                prop_assert_eq!(again, resolved);
            }
        }
        if let Ok(config) = Config::parse(Path::new("c.toml"), GOOD, &sets) {
            let _ = config.resolve(&inputs());
        }
    }
}

#[test]
fn ranks_and_degrees_complete_each_other() {
    let of = |sets: &[&str]| {
        let r = resolve(GOOD, sets).unwrap_or_else(|error| panic!("{sets:?}: {error}"));
        let p = r.parallel;
        assert_eq!(p.ranks, p.pipeline * p.data_degree() * p.context * p.tensor);
        let degree = p.data_degree();
        assert_eq!((r.batch.data_parallel_degree, r.batch.global), (degree, degree * 8 * r.batch.accumulation));
        (p.replicate, p.shard, p.zero_stage)
    };
    assert_eq!(of(&[]), (1, 1, 0));
    assert_eq!(of(&["parallel.ranks=4"]), (4, 1, 0));
    assert_eq!(of(&["parallel.ranks=4", "parallel.zero_stage=0"]), (4, 1, 0));
    assert_eq!(of(&["parallel.ranks=4", "parallel.zero_stage=1"]), (1, 4, 1));
    assert_eq!(of(&["parallel.ranks=1", "parallel.zero_stage=3"]), (1, 1, 3));
    assert_eq!(of(&["parallel.data_parallel_shard_degree=4"]), (1, 4, 3));
    assert_eq!(of(&["parallel.data_parallel_replicate_degree=2"]), (2, 1, 0));
    assert_eq!(of(&["parallel.data_parallel_replicate_degree=2", "parallel.data_parallel_shard_degree=2"]), (2, 2, 3));
    assert_eq!(of(&["parallel.ranks=6", "parallel.data_parallel_shard_degree=3", "parallel.zero_stage=2"]), (2, 3, 2));
    let (stages, parts) = ("parallel.pipeline_parallel_degree=2", "parallel.tensor_parallel_degree=2");
    assert_eq!(of(&[stages]), (1, 1, 0));
    assert_eq!(of(&[stages, parts]), (1, 1, 0));
    assert_eq!(of(&[stages, parts, "parallel.ranks=8"]), (2, 1, 0));
    assert_eq!(of(&[stages, parts, "parallel.ranks=16", "parallel.data_parallel_shard_degree=2"]), (2, 2, 3));
    assert_eq!(of(&[parts, "parallel.ranks=4", "parallel.zero_stage=1"]), (1, 2, 1));
    let sequence = "parallel.context_parallel_degree=2";
    assert_eq!(of(&[sequence]), (1, 1, 0));
    assert_eq!(of(&[sequence, "parallel.zero_stage=1"]), (1, 1, 1));
    assert_eq!(of(&[sequence, parts, "parallel.ranks=8"]), (2, 1, 0));
    assert_eq!(of(&[sequence, "parallel.data_parallel_shard_degree=2"]), (1, 2, 3));
    let whole = resolve(GOOD, &[stages, parts, "parallel.data_parallel_replicate_degree=3"]).unwrap();
    assert_eq!((whole.parallel.ranks, whole.parallel.sequence), (12, true));
    let threads = resolve(GOOD, &["parallel.ranks=2"]).unwrap();
    assert_eq!(threads.threads, 1, "two cores for two ranks");
    assert!(threads.explain().contains("2 ranks on this host"), "{}", threads.explain());
}

#[test]
fn impossible_ranks_are_refused() {
    for (sets, says) in [
        (&["parallel.ranks=4", "parallel.data_parallel_shard_degree=3"][..], "4 ranks are not"),
        (&["parallel.ranks=0"], "too small"),
        (&["parallel.zero_stage=4"], "at most 3"),
        (&["parallel.zero_stage=0", "parallel.data_parallel_shard_degree=2"], "shards nothing"),
        (&["parallel.ranks=2", "parallel.zero_stage=1", "optimizer.name=muon"], "zero_stage = 0 with it"),
        (&["parallel.ranks=2", "parallel.prefetch=2"], "no effect"),
        (&["parallel.ranks=4", "parallel.zero_stage=3", "parallel.reshard_after_forward=3"], "must divide"),
        (&["parallel.context_parallel_degree=0"], "parallel.context_parallel_degree = 0 is too small"),
        (&["parallel.context_parallel_degree=2", "parallel.ranks=3"], "3 ranks are not a multiple of"),
        (&["parallel.context_parallel_degree=3"], "cuts each sequence into 6 equal parts"),
        (&["parallel.context_parallel_load_balance=true"], "parallel.context_parallel_load_balance has no effect"),
        (&["parallel.context_parallel_exchange=all_to_all"], "parallel.context_parallel_exchange has no effect"),
        (
            &[
                "parallel.context_parallel_degree=2",
                "parallel.context_parallel_exchange=all_to_all",
                "parallel.context_parallel_load_balance=true",
            ],
            "which is equal work",
        ),
        (&["parallel.context_parallel_degree=2", "training.elastic_bits=true"], "whole sequences"),
        (
            &["parallel.context_parallel_degree=2", "parallel.zero_stage=1", "optimizer.name=muon"],
            "zero_stage = 0 with it",
        ),
        (&["parallel.pipeline_parallel_degree=0"], "parallel.pipeline_parallel_degree = 0 is too small"),
        (&["parallel.tensor_parallel_degree=0"], "parallel.tensor_parallel_degree = 0 is too small"),
        (&["parallel.ranks=3", "parallel.pipeline_parallel_degree=2"], "do not divide into parallel.pipeline_parallel"),
        (&["parallel.ranks=3", "parallel.tensor_parallel_degree=2"], "not a multiple of parallel.pipeline_parallel"),
        (
            &["parallel.ranks=4", "parallel.pipeline_parallel_degree=2", "parallel.data_parallel_shard_degree=4"],
            "2 ranks in each of 2 stages are not",
        ),
        (&["parallel.pipeline_schedule=gpipe"], "parallel.pipeline_schedule has no effect"),
        (&["parallel.pipeline_cuts=[1]"], "parallel.pipeline_cuts has no effect"),
        (&["parallel.sequence_parallel=false"], "parallel.sequence_parallel has no effect"),
        (&["parallel.pipeline_parallel_degree=2", "parallel.pipeline_chunks=2"], "pipeline_chunks has no effect"),
        (&["parallel.pipeline_parallel_degree=2", "parallel.pipeline_cuts=[1, 2]"], "2 stages of 1 have 2: give 1"),
        (&["parallel.pipeline_parallel_degree=2", "parallel.pipeline_cuts=[0]"], "units go up from 1"),
        (&["parallel.pipeline_parallel_degree=2", "parallel.pipeline_cuts=[1000]"], "units go up from 1"),
        (
            &[
                "parallel.pipeline_parallel_degree=2",
                "parallel.pipeline_schedule=zero_bubble_v",
                "parallel.pipeline_cuts=[2]",
            ],
            "2 stages of 2 have 4: give 3 units",
        ),
        (&["parallel.tensor_parallel_degree=2", "optimizer.name=muon"], "parallel.tensor_parallel_degree = 2 divides"),
        (&["parallel.ranks=2", "parallel.collectives=nccl"], "exchanges the memory of GPUs"),
        (&["parallel.collectives=ncl"], "did you mean \"nccl\"?"),
        (&["training.cuda_graphs=on"], "captures what a GPU is given"),
        (&["compute.device=cpu", "compute.attention=wgmma"], "chooses among a GPU's kernels"),
        (&["compute.attention=wgma"], "did you mean \"wgmma\"?"),
        (&["memory.offload.gradients=disk"], "gradients lie where the optimizer's state does; set both to \"disk\""),
        (
            &["memory.offload.gradients=disk", "memory.offload.optimizer=host"],
            "memory.offload.gradients = \"disk\" with memory.offload.optimizer = \"host\"",
        ),
        (&["training.cuda_graphs=true"], "takes one of \"off\", \"auto\", \"on\""),
        (&["training.elastic_bits=true", "training.accumulation_steps=3"], "powers of two"),
        (
            &["training.elastic_bits=true", "parallel.reduce_schedule=micro_batch"],
            "set parallel.reduce_schedule = \"step\"",
        ),
        (&["parallel.ranks=2", "training.micro_batch_size=4", "training.global_batch_size=12"], "does not divide by 8"),
    ] {
        let error = resolve(GOOD, sets).unwrap_err().to_string();
        assert!(error.contains(says), "{sets:?}: {error}");
    }
}
