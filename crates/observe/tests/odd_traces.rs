//! Traces that are odd, broken or none at all: each is read as far as it makes sense, or refused
//! with words that say what to do.

use std::path::Path;
use trainyard_observe::traces::diagnose::{diagnose, examine};
use trainyard_observe::traces::kineto::{ReadError, StepOrigin, Trace, read_bytes};
use trainyard_observe::traces::{Report, kineto};
use trainyard_observe::verdict::{Cause, Severity};

fn read(text: &str) -> Trace {
    read_bytes(text.as_bytes(), Path::new("trace.json")).unwrap()
}

fn report(text: &str) -> Report {
    diagnose(vec![examine(&read(text), 0)])
}

fn event(category: &str, name: &str, start: i64, length: i64, args: &str) -> String {
    let tid = if args.contains("stream") { 7 } else { 1 };
    format!(
        r#"{{"ph":"X","cat":"{category}","name":"{name}","pid":0,"tid":{tid},"ts":{start},"dur":{length},"args":{{{args}}}}}"#
    )
}

fn step(number: u32, start: i64, length: i64) -> String {
    event("user_annotation", &format!("ProfilerStep#{number}"), start, length, "")
}

/// A launch at `start`, and its kernel `latency` later.
fn kernel(correlation: u32, start: i64, latency: i64, length: i64, stream: u32) -> [String; 2] {
    [
        event("cuda_runtime", "cudaLaunchKernel", start, 5, &format!(r#""correlation":{correlation}"#)),
        event("kernel", "gemm", start + latency, length, &format!(r#""stream":{stream},"correlation":{correlation}"#)),
    ]
}

fn trace(events: &[String]) -> String {
    format!(r#"{{"schemaVersion":1,"traceEvents":[{}]}}"#, events.join(",\n"))
}

fn words(error: &ReadError) -> String {
    error.to_string()
}

#[test]
fn what_is_no_trace_is_refused_with_what_to_do() {
    for (text, part) in [
        ("", "the file is empty"),
        ("  \n", "the file is empty"),
        ("hello", "byte 0 is no JSON (`h`)"),
        ("{}", "an empty object"),
        (r#"{"model":{"dim":3},"steps":4}"#, "the keys model, steps"),
        (r#"{"traceEvents":null}"#, "the keys traceEvents"),
        (r#"{"traceEvents":["#, "ends in the middle, after 16 bytes"),
        (r#"{"traceEvents":[{"ph":"X","ts":1,"#, "ends in the middle"),
        (r#"{"traceEvents":[{"ph":"X"}]"#, "ends in the middle"),
        (r#"{"traceEvents":[}"#, "byte 16 is no JSON"),
        (r#"{"a" "b"}"#, "no JSON"),
        ("[model]\npreset = 1\n", "byte 1 is no JSON (`m`)"),
    ] {
        let error = read_bytes(text.as_bytes(), Path::new("x")).expect_err(text);
        assert!(words(&error).contains(part), "{text}: {error}");
    }
}

#[test]
fn compressed_data_that_end_or_are_damaged_are_told_apart() {
    use std::io::Write;
    let mut events = Vec::new();
    for index in 0..2000 {
        events.extend(kernel(index, 7919 * i64::from(index) % 100_003, 10, 20, 7));
    }
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(trace(&events).as_bytes()).unwrap();
    let whole = encoder.finish().unwrap();
    assert_eq!(read_bytes(&whole, Path::new("x")).unwrap().ops.len(), 2000);
    let cut = read_bytes(&whole[..whole.len() / 2], Path::new("x"));
    assert!(matches!(cut, Err(ReadError::Truncated { position }) if position > 1000), "{cut:?}");
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle..middle + 64].fill(0xff);
    assert!(read_bytes(&damaged, Path::new("x")).is_err());
    // Files are inflated by another thread, and say the same.
    let folder = std::env::temp_dir().join(format!("trainyard-odd-traces-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("cut.json.gz");
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let of_file = kineto::read_file(&path);
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(words(&of_file.unwrap_err()), words(&cut.unwrap_err()));
}

#[test]
fn a_trace_without_events_or_without_work_is_incomplete_data() {
    for text in [trace(&[]), "[]".to_owned(), "[".to_owned(), trace(&[step(1, 0, 10), step(2, 10, 10)])] {
        let report = report(&text);
        let verdict = &report.diagnosis.verdicts[0];
        assert_eq!((verdict.cause, verdict.severity), (Cause::IncompleteData, Severity::Warning), "{text}");
        assert_eq!(report.ranks[0].breakdown, None);
    }
}

#[test]
fn launches_without_their_kernels_are_incomplete_data_and_no_idle_device() {
    // Five steps with ten launches each, of which only the first step's kernels were recorded.
    let mut events = Vec::new();
    for number in 0..5 {
        let start = 1000 * i64::from(number);
        events.push(step(number, start, 1000));
        for index in 0..10 {
            let [call, work] = kernel(100 * number + index, start + 90 * i64::from(index), 10, 50, 7);
            events.push(call);
            if number == 0 {
                events.push(work);
            }
        }
    }
    let report = report(&trace(&events));
    assert_eq!(report.diagnosis.verdicts.len(), 1);
    assert_eq!(report.diagnosis.verdicts[0].cause, Cause::IncompleteData);
    assert_eq!(report.ranks[0].breakdown, None);
}

#[test]
fn kernels_without_launches_are_measured_but_not_explained() {
    let work = |at: i64| event("kernel", "gemm", at, 10, r#""stream":7"#);
    let report = report(&trace(&[work(0), work(100), work(200)]));
    assert_eq!(report.ranks[0].breakdown.unwrap().idle_seconds, 180e-6);
    assert!(report.ranks[0].notes.iter().any(|note| note.contains("3 of 3 pieces")));
    let causes: Vec<Cause> = report.diagnosis.verdicts.iter().map(|verdict| verdict.cause).collect();
    assert_eq!(causes, [Cause::IncompleteData]);
}

#[test]
fn steps_may_be_nested_repeated_or_of_several_threads() {
    let mut events = vec![step(1, 0, 100), step(1, 10, 50), step(2, 100, 100), step(3, 200, 100)];
    events.push(events[2].replace(r#""tid":1"#, r#""tid":2"#));
    events.extend(kernel(1, 20, 10, 30, 7));
    events.extend(kernel(2, 120, 10, 30, 7));
    let trace_of = read(&trace(&events));
    let numbers: Vec<u64> = trace_of.steps.iter().map(|step| step.number).collect();
    assert_eq!(numbers, [1, 2, 3]);
    assert_eq!(report(&trace(&events)).ranks[0].steps.len(), 2);
}

#[test]
fn without_profiler_steps_the_optimizer_or_the_whole_recording_counts() {
    let mut events = Vec::new();
    for index in 0..4 {
        events.extend(kernel(index, 100 * i64::from(index), 10, 60, 7));
        events.push(event("user_annotation", "Optimizer.step#AdamW.step", 100 * i64::from(index) + 80, 10, ""));
    }
    let trace_of = read(&trace(&events));
    assert_eq!((trace_of.step_origin, trace_of.steps.len()), (StepOrigin::Optimizer, 3));
    events.retain(|event| !event.contains("Optimizer"));
    let trace_of = read(&trace(&events));
    assert_eq!((trace_of.step_origin, trace_of.steps.len()), (StepOrigin::None, 0));
    let report = report(&trace(&events));
    assert!(report.ranks[0].steps.is_empty() && report.ranks[0].breakdown.is_some());
    let verdict = report.diagnosis.verdict(Cause::HostOverhead).unwrap();
    assert!(verdict.evidence[0].what.contains("recording"), "{:?}", verdict.evidence);
}

#[test]
fn a_region_around_the_training_loop_is_no_wait_for_batches() {
    let mut events = Vec::new();
    for number in 0..4 {
        events.push(step(number, 100 * i64::from(number), 100));
        events.extend(kernel(number, 100 * i64::from(number) + 40, 10, 40, 7));
        events.push(event("user_annotation", "my_dataloader.next", 100 * i64::from(number) + 1, 30, ""));
    }
    let waits = report(&trace(&events));
    assert_eq!(waits.diagnosis.verdicts[0].cause, Cause::InputBound);
    assert_eq!(waits.ranks[0].steps[0].input_seconds, 30e-6);
    events.push(event("user_annotation", "loop over dataloader", 0, 400, ""));
    assert_eq!(report(&trace(&events)).ranks[0].steps, waits.ranks[0].steps);
}

#[test]
fn kernels_of_one_graph_launch_share_a_correlation() {
    let mut events = vec![event("cuda_runtime", "cudaGraphLaunch", 0, 20, r#""correlation":5"#)];
    for index in 0..50 {
        events.push(event("kernel", "node", 30 + 11 * index, 10, r#""stream":7,"correlation":5"#));
    }
    let trace_of = read(&trace(&events));
    assert!(trace_of.ops.iter().all(|op| op.call == Some(0)));
    let report = report(&trace(&events));
    let share = report.ranks[0].idle.unwrap().host_wait_seconds;
    assert_eq!(share, 0.0, "kernels of a graph wait for no launch");
}

#[test]
fn events_that_make_no_sense_are_counted_and_skipped() {
    let mut events = vec![step(1, 0, 1000), step(2, 1000, 1000)];
    events.extend(kernel(1, 10, 10, 500, 7));
    events.push(event("kernel", "negative", 100, -5, r#""stream":7,"correlation":1"#));
    events.push(event("kernel", "late", 100, 5, r#""stream":7"#).replace(r#""ts":100"#, r#""ts":"soon""#));
    events.push("17".to_owned());
    events.push(r#"{"ph":"X","cat":"cpu_op","name":"C:\Users","ts":5,"dur":1}"#.to_owned());
    events.push(r#"{"ph":"X","cat":"cpu_op","name":"nan","ts":NaN,"dur":1}"#.to_owned());
    events.push(event("cpu_op", "huge", 6, 1, &format!(r#""Call stack":"{}""#, "x".repeat(9 << 20))));
    events.push(event("python_function", "f.py(3): f", 6, 1, ""));
    let trace_of = read(&trace(&events));
    let skipped = trace_of.skipped;
    assert_eq!((skipped.unreadable, skipped.without_time, skipped.mended, skipped.python_frames), (2, 3, 2, 1));
    assert_eq!((trace_of.ops.len(), trace_of.operators.len()), (1, 1));
    let notes = report(&trace(&events)).ranks[0].notes.join("\n");
    assert!(
        notes.contains("2 events are no JSON objects") && notes.contains("3 events have no valid begin"),
        "{notes}"
    );
}

#[test]
fn times_may_be_strings_and_streams_threads() {
    let text = r#"[{"ph":"X","cat":"Runtime","name":"cudaLaunchKernel","pid":9,"tid":"9","ts":"100.5","dur":"4",
        "args":{"correlation":"3"}},
        {"ph":"X","cat":"Kernel","name":"k","pid":"0","tid":"stream 7","ts":"110.250","dur":20.5,"args":{"correlation":3}}"#;
    let trace_of = read(text);
    let span = trace_of.op_span(&trace_of.ops[0]);
    assert_eq!((span.start_ns, span.end_ns, trace_of.launch_ns(&trace_of.ops[0])), (110_250, 130_750, Some(100_500)));
    assert_eq!(trace_of.timeline.lanes[span.lane as usize].name, "device 0 stream 7");
}

#[test]
fn a_kernel_that_waits_for_another_stream_is_not_the_hosts_fault() {
    // The second stream's kernels are launched early, and begin when the first stream's end.
    let mut events = Vec::new();
    for number in 0..6 {
        let start = 1000 * i64::from(number);
        events.push(step(number, start, 1000));
        events.extend(kernel(2 * number, start + 10, 10, 900, 7));
        let name = r#""stream":9,"correlation":"#;
        let correlation = 2 * number + 1;
        events.push(event(
            "cuda_runtime",
            "cudaLaunchKernel",
            start + 20,
            5,
            &format!(r#""correlation":{correlation}"#),
        ));
        events.push(event("kernel", "gemm", start + 923, 70, &format!("{name}{correlation}")));
    }
    let report = report(&trace(&events));
    assert!(report.diagnosis.verdict(Cause::ComputeBound).is_some());
    assert_eq!(report.diagnosis.severity(), Some(Severity::Info), "{}", report.to_text());
}

#[test]
fn random_changes_of_a_trace_never_panic() {
    let mut events = Vec::new();
    for number in 0..3 {
        events.push(step(number, 100 * i64::from(number), 100));
        events.extend(kernel(number, 100 * i64::from(number) + 5, 10, 40, 7));
        events.extend(kernel(90 + number, 100 * i64::from(number) + 15, 10, 40, 9).map(|e| e.replace("gemm", "ncclX")));
        events.push(event("cuda_runtime", "cudaDeviceSynchronize", 100 * i64::from(number) + 60, 20, ""));
    }
    let whole = trace(&events).into_bytes();
    let mut state = 7u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let pieces: [&[u8]; 8] = [b"-", b"9999999999", b"\"", b"}", b"null", b"[", b"1e308", b"\\"];
    for _ in 0..3000 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random(4) {
            let at = random(bytes.len());
            let piece = pieces[random(pieces.len())];
            let end = (at + random(6)).min(bytes.len());
            bytes.splice(at..end, piece.iter().copied());
        }
        if let Ok(trace) = read_bytes(&bytes, Path::new("x")) {
            let text = diagnose(vec![examine(&trace, 0), examine(&trace, 1)]).to_text();
            assert!(!text.contains("NaN") && !text.contains("inf "), "{text}");
        }
    }
}
