//! Tests of steps that are captured once and replayed as a CUDA graph.

use super::*;

const GRAPHS: &str = "training.cuda_graphs=auto";

fn launches(outcomes: &[StepOutcome]) -> Vec<Launches> {
    outcomes.iter().map(|outcome| outcome.launches).collect()
}

/// The notes of all steps, to say why one was launched otherwise than expected.
fn notes(outcomes: &[StepOutcome]) -> Vec<&str> {
    outcomes.iter().filter_map(|outcome| outcome.note.as_deref()).collect()
}

/// Checks that losses, norms and weights have the same bits.
fn assert_same(got: &(Vec<StepOutcome>, Vec<f32>), want: &(Vec<StepOutcome>, Vec<f32>), what: &str) {
    let numbers = |outcomes: &[StepOutcome]| -> Vec<[u64; 2]> {
        outcomes.iter().map(|outcome| [outcome.loss, outcome.gradient_norm].map(f64::to_bits)).collect()
    };
    assert_eq!(numbers(&got.0), numbers(&want.0), "{what}");
    let bits = |weights: &[f32]| weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>();
    assert!(bits(&got.1) == bits(&want.1), "{what}: some weight differs");
}

/// Cases with values that change from step to step (random numbers of dropout, the loss scale of
/// f16) and with folded gradients.
#[test]
fn a_graph_is_captured_once_products_of_eight_bits_have_scales() {
    use Launches::{Captured, OneByOne, Replayed};
    if !has_fp8(&device(0).1) {
        return trainyard_testing::skip("the GPU has no products of eight bits");
    }
    let sets = &["precision.fp8=hybrid", "training.accumulation_steps=2"][..];
    let run = |graphs: bool| {
        let (tested, gpu) = device(1);
        let result = Trial::new(LLAMA, &if graphs { [sets, &[GRAPHS]].concat() } else { sets.to_vec() }).run(&gpu, 5);
        assert_eq!(tested.problems(), [""; 0]);
        result
    };
    let (plain, graphs) = (run(false), run(true));
    assert_same(&graphs, &plain, "fp8");
    let expected = [OneByOne, OneByOne, Captured, Replayed, Replayed];
    assert_eq!(launches(&graphs.0), expected, "{:?}", notes(&graphs.0));
}

#[test]
fn a_replayed_graph_trains_the_same_bits_with_fewer_launches() {
    use Launches::{Captured, OneByOne, Replayed};
    for (number, (model, sets)) in [
        (GPT2, &["precision.compute=bf16", "model.dropout=0.1", "training.accumulation_steps=2"][..]),
        (GPT2, &["precision.compute=f16", "precision.loss_scale_window=1", "precision.loss_scale_initial=1024"]),
        (
            LLAMA,
            &[
                "precision.compute=bf16",
                "training.accumulation_steps=2",
                "training.elastic_bits=true",
                "activation_checkpointing.mode=full",
            ],
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let what = format!("{sets:?}");
        let run = |seed, graphs: bool| {
            let (tested, gpu) = device(seed);
            let trial = Trial::new(model, &if graphs { [sets, &[GRAPHS]].concat() } else { sets.to_vec() });
            let result = trial.run(&gpu, 4);
            assert_eq!(tested.problems(), [""; 0], "{what}");
            result
        };
        let (plain, graphs) = (run(0, false), run(number as u64, true));
        assert_same(&graphs, &plain, &what);
        assert_eq!(launches(&plain.0), [OneByOne; 4], "{what}");
        let expected = [OneByOne, Captured, Replayed, Replayed];
        assert_eq!(launches(&graphs.0), expected, "{what}: {:?}", notes(&graphs.0));
        let note = graphs.0[1].note.as_ref().expect("a capture is said");
        assert!(note.contains("launched as one CUDA graph"), "{note}");
        assert!(graphs.0[2..].iter().chain(&plain.0).all(|outcome| outcome.note.is_none()), "{what}");
        // The time of each instruction is still known.
        assert_eq!(graphs.0[3].spans.len(), plain.0[3].spans.len());
        let trial = Trial::new(model, sets);
        let stretch = stretch(&trial.program, &trial.model()).unwrap();
        let spans = &graphs.0[3].spans[stretch];
        assert!(
            spans.iter().all(|span| span.end > span.start) && spans.is_sorted_by_key(|span| span.start),
            "{spans:?}"
        );
    }
}

#[test]
fn a_replayed_step_is_one_launch_and_takes_the_memory_that_meta_predicts() {
    for (model, sets) in [
        (LLAMA, &["precision.compute=bf16", "training.accumulation_steps=2", GRAPHS][..]),
        (GPT2, &["precision.compute=bf16", "model.dropout=0.1", GRAPHS]),
    ] {
        let trial = Trial::new(model, sets);
        let (fake, device) = fake(Options::default());
        let mut rank = trial.rank(&device);
        let (mut used, mut alone) = (0, 0);
        for step in 0..5 {
            fake.take_records();
            device.pool().reset_peaks();
            let outcome = trial.step(&mut rank, step);
            assert_eq!(fake.problems(), [""; 0], "{sets:?}");
            let records = names(&fake.take_records());
            let graphs = records.iter().filter(|name| **name == "graph").count();
            assert_eq!(graphs, usize::from(outcome.launches != Launches::OneByOne), "{records:?}");
            let settings = RankSettings { computes: Computes::Cuda, ..trial.settings };
            let shape = BatchShape::uniform(ROWS, LENGTH);
            let predicted = predict(trial.model(), &trial.program, &shape, &settings).unwrap().memory;
            let measured = device.pool().usage();
            for purpose in Purpose::ALL {
                let (measured, predicted) = (measured.peak(purpose), predicted.peak(purpose));
                let exact = purpose != Purpose::Data;
                assert!(
                    measured == predicted || !exact && measured < predicted,
                    "{purpose}: {measured} of {predicted}"
                );
            }
            assert!(measured.peak_total() <= predicted.peak_total(), "{sets:?}");
            if outcome.launches == Launches::OneByOne {
                alone = records.len();
            }
            if outcome.launches == Launches::Replayed {
                assert!(3 * records.len() < alone, "{} of {alone}: {records:?}", records.len());
                // Batches come before it, norm and update after.
                let at = records.iter().position(|name| *name == "graph").unwrap();
                assert!(records[..at].iter().all(|name| ["upload", "copy"].contains(name)), "{records:?}");
                assert!(!records[at..].contains(&"embedding") && records[at..].contains(&"adamw"), "{records:?}");
                // The first replay allocates its own batches beside the graph's. Later ones
                // allocate nothing.
                assert!(step == 2 || fake.used().0 == used, "{sets:?}");
            }
            used = fake.used().0;
        }
    }
}

/// Packed documents of these lengths.
fn documents(trial: &Trial, device: &Device, model: &Model, number: usize, lengths: &[usize]) -> Batch {
    let (vocab, mut token) = (trial.spec.vocab_size as i32, number as i32 * 7 + 3);
    let (mut tokens, mut targets, mut positions, mut cu_seqlens) = (Vec::new(), Vec::new(), Vec::new(), vec![0]);
    for length in lengths {
        for position in 0..*length as i32 {
            token = token.rem_euclid(vocab);
            tokens.push(token);
            positions.push(position);
            token = token * 5 + 11;
            targets.push(if position + 1 < *length as i32 { token.rem_euclid(vocab) } else { -100 });
        }
        cu_seqlens.push(tokens.len() as i32);
    }
    let slices = BatchSlices::of_text(&tokens, Some(&targets), &positions, &cu_seqlens);
    model.batch(device, &slices).unwrap()
}

/// A graph is replayed when only the document boundaries and the number of targets change, because
/// these lie in its memory. It is dropped when the number of tokens changes or positions reach
/// further.
#[test]
fn a_step_of_another_shape_gives_the_graph_up_and_says_so() {
    use Launches::{Captured, OneByOne, Replayed};
    let steps: [(&[usize], Launches, &str); 10] = [
        (&[20, 12], OneByOne, ""),
        (&[24, 8], Captured, "launched as one CUDA graph"),
        (&[4, 20, 8], Replayed, ""),
        (&[7, 18, 7], Replayed, ""),
        (&[20, 12, 8], OneByOne, "its micro-batches have [40] tokens, the graph's [32]"),
        (&[20, 12], OneByOne, ""),
        (&[20, 12], Captured, "launched as one CUDA graph"),
        (&[16, 16], OneByOne, "its positions reach up to 16, the graph's to 32"),
        (&[16, 2, 14], Captured, "launched as one CUDA graph"),
        (&[15, 1, 16], Replayed, ""),
    ];
    for (model, precision) in [(LLAMA, "precision.compute=f32"), (GPT2, "precision.compute=bf16")] {
        let run = |sets: &[&str]| {
            let (trial, (tested, gpu)) = (Trial::new(model, sets), device(3));
            let mut rank = trial.rank(&gpu);
            let mut outcomes = Vec::new();
            for (number, (lengths, ..)) in steps.iter().enumerate() {
                let settings = StepSettings { step: number as u64, rate_factor: 1.0, clip_norm: Some(1.0) };
                let load = |device: &Device, model: &Model| Ok(documents(&trial, device, model, number, lengths));
                outcomes.push(rank.execute(&trial.program, settings, load, |_, _| Ok(())).unwrap());
                // Other work on the device between steps does not touch the graph's memory.
                let batch = documents(&trial, &gpu, rank.model(), 1, &[20, 12]);
                let key = RandomKey { seed: 0, step: 0, site: 0 };
                let mut tape = Tape::new(&gpu, &rank.parameters, Policy::Nothing, key);
                rank.forward(&mut tape, &mut Forward::evaluation(&batch, Output::Logits)).unwrap();
            }
            assert_eq!(tested.problems(), [""; 0], "{sets:?}");
            let ids: Vec<_> = rank.model().parameters().map(|(id, _)| id).collect();
            (outcomes, ids.into_iter().flat_map(|id| rank.read_masters(id).unwrap()).collect::<Vec<f32>>())
        };
        let graphs = run(&[precision, GRAPHS]);
        for (outcome, (_, launches, note)) in graphs.0.iter().zip(&steps) {
            let said = outcome.note.as_deref().unwrap_or("");
            assert!(outcome.launches == *launches && said.contains(note), "{:?} {said:?}", outcome.launches);
            assert_eq!(said.is_empty(), note.is_empty(), "{said:?}");
        }
        assert_same(&graphs, &run(&[precision]), precision);
    }
}

/// Each period of a schedule of freezing has a graph of its own, though units that rest in parts
/// have the same instructions.
#[test]
fn a_period_of_a_schedule_of_freezing_is_captured_anew() {
    use Launches::{Captured, OneByOne, Replayed};
    const SCHEDULE: &str =
        "fine_tuning.freeze_schedule=[{from_step=0,frozen='*.norm*'},{from_step=3,frozen='*.attn.*'}]";
    let run = |sets: &[&str]| {
        let (resolved, trial, (tested, gpu)) = (resolved(LLAMA, sets), Trial::new(LLAMA, sets), device(4));
        let model = shape::model_of(&resolved, trial.spec.clone(), 0).unwrap();
        let strategy = shape::strategy(&resolved, model.units().len()).unwrap();
        let lowered = periods::lower(&resolved, &trial.spec, &model, &strategy, 0).unwrap();
        let predicted = lowered.predict(model, &trial.shape, &trial.settings).unwrap().memory;
        let tiers = Tiers::create(lowered.whole(), &gpu, "nowhere".as_ref()).unwrap();
        let model = shape::model_of(&resolved, trial.spec.clone(), 0).unwrap();
        let holding = Holding::of(lowered.whole());
        let mut rank = Rank::with_tiers(&gpu, model, holding, tiers, Links::default(), &trial.settings).unwrap();
        let step = |step: u64| {
            let [program, _] = &lowered.programs[periods::at(&lowered.periods, step)];
            let settings = StepSettings { step, rate_factor: 1.0, clip_norm: Some(1.0) };
            let load = |device: &Device, model: &Model| Ok(trial.batch(device, model, step as usize));
            rank.execute(program, settings, load, |_, _| Ok(())).unwrap()
        };
        let outcomes: Vec<StepOutcome> = (0..6).map(step).collect();
        assert_eq!(tested.problems(), [""; 0], "{sets:?}");
        assert_eq!(gpu.pool().usage().peak(Purpose::Grads), predicted.peak(Purpose::Grads), "{sets:?}");
        (outcomes, Trial::masters(&rank))
    };
    let (plain, graphs) = (run(&[SCHEDULE]), run(&[SCHEDULE, GRAPHS]));
    assert_same(&graphs, &plain, "a schedule");
    let expected = [OneByOne, Captured, Replayed, OneByOne, Captured, Replayed];
    assert_eq!(launches(&graphs.0), expected, "{:?}", notes(&graphs.0));
    assert!(notes(&graphs.0)[1].contains("other parameters are trained"), "{:?}", notes(&graphs.0));
}

#[test]
fn a_step_that_cannot_be_captured_is_launched_as_always_and_says_so() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let run = |sets: &[&str], failing| {
        let kernels = trainyard_tensor::cuda::tested::kernels(&folder).unwrap_or_else(|problem| panic!("{problem}"));
        let (fake, device) = fake(Options { kernels: Some(Box::new(kernels)), failing, ..Options::default() });
        let result = Trial::new(GPT2, sets).run(&device, 4);
        assert_eq!(fake.problems(), [""; 0]);
        result
    };
    let sets = ["precision.compute=bf16", "model.dropout=0.1"];
    let (plain, refused) = (run(&sets, None), run(&[sets[0], sets[1], GRAPHS], Some("capture")));
    assert_same(&refused, &plain, "after a capture that failed");
    assert_eq!(launches(&refused.0), [Launches::OneByOne; 4]);
    let notes: Vec<_> = refused.0.iter().map(|outcome| outcome.note.as_deref().unwrap_or("")).collect();
    assert!(notes[1].contains("not as a CUDA graph") && notes[1].contains("asked for by the test"), "{notes:?}");
    assert_eq!([notes[0], notes[2], notes[3]], [""; 3]);
}

#[test]
fn what_has_other_lanes_between_its_passes_is_no_graph() {
    for set in [ACTIVATIONS, PARAMETERS, OPTIMIZER] {
        let trial = Trial::new(LLAMA, &["device=cuda", GRAPHS, set]);
        let error = stretch(&trial.program, &trial.model()).unwrap_err();
        assert!(error.contains("lane host_io has `"), "{error}");
        let (fake, device) = fake(Options::default());
        let mut rank = trial.rank(&device);
        let outcomes: Vec<_> = (0..3).map(|step| trial.step(&mut rank, step)).collect();
        assert_eq!((launches(&outcomes), fake.problems().len()), (vec![Launches::OneByOne; 3], 0));
    }
    let mixture = Trial::new(MIXTURE, &["device=cuda", GRAPHS]);
    let error = stretch(&mixture.program, &mixture.model()).unwrap_err();
    assert!(error.contains("experts"), "{error}");
    let trial = Trial::new(LLAMA, &[]);
    let dtype = trial.settings.compute;
    let strategy = shape::strategy(&resolved(LLAMA, &[]), trial.model().units().len()).unwrap();
    for (mesh, ranks) in [
        (Mesh { dp_replicate: 2, ..Mesh::default() }, 1),
        (Mesh { pp: 2, ..Mesh::default() }, 1),
        (Mesh { tp: 2, ..Mesh::default() }, 2),
    ] {
        let model = Model::split(trial.spec.clone(), TensorSplit { rank: 0, ranks, sequence: false }).unwrap();
        let shape = shape::model_shape(&model, &BatchShape::uniform(ROWS, LENGTH), dtype).unwrap();
        let error = stretch(&lower_rank(&shape, &mesh, &strategy, 0).unwrap(), &trial.model()).unwrap_err();
        assert!(error.contains("2 ranks exchange between"), "{mesh:?}: {error}");
    }
}
