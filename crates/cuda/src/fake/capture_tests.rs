//! Tests: every rule of a capture has a test that breaks it, and graphs repeat the captured work.

use super::tests::{download, region, upload};
use super::{Fake, Options};
use crate::driver::{Address, Driver, Event, Graph, Stream};
use crate::error::Result;
use crate::kernels::{File, Float};

/// A device with a stream, another one, and eight bytes.
fn device(seed: u64) -> (Fake, Stream, Stream, Address) {
    let fake = Fake::new(Options { seed, ..Options::default() });
    let (first, second, memory) = (fake.stream().unwrap(), fake.stream().unwrap(), fake.allocate(8).unwrap());
    (fake, first, second, memory)
}

/// Four bytes from `from` to the four after it, captured on `stream`.
fn captured_copy(fake: &Fake, stream: Stream, from: Address) -> Graph {
    fake.begin_capture(stream).unwrap();
    fake.copy(stream, region(from + 4, 4, true), region(from, 4, false)).unwrap();
    fake.end_capture(stream).unwrap()
}

fn fails<T: std::fmt::Debug>(result: Result<T>, code: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(code), "{error} is not {code}");
}

#[test]
fn what_is_captured_is_done_when_it_is_launched_and_each_time() {
    let (fake, first, _, memory) = device(0);
    upload(&fake, first, memory, &[1, 1, 1, 1, 0, 0, 0, 0]);
    let graph = captured_copy(&fake, first, memory);
    assert_eq!(download(&fake, first, memory + 4, 4), [0; 4], "a capture does nothing");
    fake.take_records();
    for value in [1, 2] {
        upload(&fake, first, memory, &[value; 4]);
        fake.launch_graph(first, graph).unwrap();
        assert_eq!(download(&fake, first, memory + 4, 4), [value; 4]);
    }
    let names: Vec<_> = fake.take_records().iter().map(|record| record.name).collect();
    assert_eq!(names, ["upload", "graph", "download", "upload", "graph", "download"]);
    assert_eq!(fake.problems(), [""; 0]);
    fake.destroy_graph(graph);
    fails(fake.launch_graph(first, graph), "INVALID_HANDLE");
    fake.destroy_graph(graph);
    assert_eq!(fake.problems().len(), 1);
}

#[test]
fn streams_join_by_events_and_their_order_is_kept_at_every_launch() {
    for seed in 0..20 {
        let (fake, first, second, memory) = device(seed);
        upload(&fake, first, memory, &[3, 3, 3, 3, 0, 0, 0, 0]);
        let [fork, join] = [(); 2].map(|()| fake.event().unwrap());
        fake.begin_capture(first).unwrap();
        fake.record(fork, first).unwrap();
        fake.wait(second, fork).unwrap();
        fake.copy(second, region(memory + 4, 4, true), region(memory, 4, false)).unwrap();
        fake.record(join, second).unwrap();
        fake.wait(first, join).unwrap();
        fake.zero(first, region(memory, 4, true)).unwrap();
        let graph = fake.end_capture(first).unwrap();
        // The second stream is its own again, and the graph's work comes after the launching
        // stream's.
        fake.synchronize(second).unwrap();
        for value in [7, 8] {
            upload(&fake, first, memory, &[value; 4]);
            fake.launch_graph(first, graph).unwrap();
            assert_eq!(download(&fake, first, memory, 8), [0, 0, 0, 0, value, value, value, value]);
        }
        assert_eq!(fake.problems(), [""; 0]);
    }
}

#[test]
fn work_of_a_graph_is_checked_against_other_streams() {
    let (fake, first, second, memory) = device(0);
    let graph = captured_copy(&fake, first, memory);
    fake.launch_graph(first, graph).unwrap();
    fake.zero(second, region(memory + 4, 4, true)).unwrap();
    let problems = fake.problems();
    assert!(problems.len() == 1 && problems[0].contains("zero on stream 1: writes"), "{problems:?}");
}

#[test]
fn nobody_waits_on_the_host_for_what_is_captured() {
    type Wait = fn(&Fake, Stream, Event) -> Result<()>;
    let waits: [(Wait, &str); 3] = [
        (|fake, stream, _| fake.synchronize(stream), "STREAM_CAPTURE_UNSUPPORTED"),
        (|fake, _, event| fake.wait_on_host(event), "CAPTURED_EVENT"),
        (|fake, _, event| fake.is_passed(event).map(drop), "CAPTURED_EVENT"),
    ];
    for (wait, code) in waits {
        let (fake, first, _, _) = device(0);
        let event = fake.event().unwrap();
        fake.begin_capture(first).unwrap();
        fake.record(event, first).unwrap();
        fails(wait(&fake, first, event), code);
    }
    // Other streams may be waited for.
    let (fake, first, second, memory) = device(0);
    fake.begin_capture(first).unwrap();
    upload(&fake, second, memory, &[1; 4]);
    fake.synchronize(second).unwrap();
    fake.end_capture(first).unwrap();
}

#[test]
fn a_capture_that_was_broken_stays_broken() {
    let (fake, first, _, memory) = device(0);
    fake.begin_capture(first).unwrap();
    fails(fake.synchronize(first), "STREAM_CAPTURE_UNSUPPORTED");
    fails(fake.zero(first, region(memory, 4, true)), "STREAM_CAPTURE_INVALIDATED by cuStreamSynchronize");
    fails(fake.end_capture(first), "STREAM_CAPTURE_INVALIDATED by cuStreamSynchronize");
    // Then the stream works again.
    upload(&fake, first, memory, &[5; 4]);
    assert_eq!(download(&fake, first, memory, 4), [5; 4]);
}

#[test]
fn nothing_is_allocated_freed_or_loaded_behind_a_capture() {
    type Call = fn(&Fake) -> Result<()>;
    let calls: [(Call, &str); 3] = [
        (|fake| fake.allocate(4).map(drop), "cuMemAlloc"),
        (|fake| fake.allocate_pinned(4).map(drop), "cuMemHostAlloc"),
        (|fake| fake.load(File::Norm, Float::F32).map(drop), "cuModuleLoadData"),
    ];
    for (call, name) in calls {
        let (fake, first, second, _) = device(0);
        fake.begin_capture(first).unwrap();
        // On another thread it is no part of the capture.
        std::thread::scope(|scope| scope.spawn(|| call(&fake)).join().unwrap()).unwrap();
        fails(call(&fake), name);
        fails(fake.end_capture(first), &format!("INVALIDATED by {name}"));
        call(&fake).unwrap();
        fake.synchronize(second).unwrap();
        assert_eq!(fake.problems(), [""; 0]);
    }
    let (fake, first, _, memory) = device(0);
    fake.begin_capture(first).unwrap();
    fake.free(memory);
    assert!(fake.problems()[0].contains("while stream 0 is captured"), "{:?}", fake.problems());
    fails(fake.end_capture(first), "INVALIDATED by free");
}

#[test]
fn memory_of_a_graph_stays_where_it_is() {
    let (fake, first, _, memory) = device(0);
    let graph = captured_copy(&fake, first, memory);
    fake.free(memory);
    // The same address or another: it is not that memory any more.
    fake.allocate(8).unwrap();
    fake.launch_graph(first, graph).unwrap();
    fake.synchronize(first).unwrap();
    let problems = fake.problems();
    assert!(problems.len() == 1 && problems[0].contains("memory that was freed since it was captured"), "{problems:?}");
}

#[test]
fn captured_work_waits_for_nothing_outside() {
    let (fake, first, second, memory) = device(0);
    let event = fake.event().unwrap();
    upload(&fake, second, memory, &[1; 4]);
    fake.record(event, second).unwrap();
    fake.begin_capture(first).unwrap();
    fails(fake.wait(first, event), "STREAM_CAPTURE_ISOLATION");
    fails(fake.end_capture(first), "INVALIDATED by cuStreamWaitEvent");
    // Nor for another capture, nor others for one that is over.
    let third = fake.stream().unwrap();
    fake.begin_capture(first).unwrap();
    fake.begin_capture(second).unwrap();
    fake.record(event, first).unwrap();
    fails(fake.wait(second, event), "STREAM_CAPTURE_MERGE");
    fake.end_capture(first).unwrap();
    fails(fake.wait(third, event), "CAPTURED_EVENT");
    // Recorded anew it is an event like others.
    fake.record(event, first).unwrap();
    fake.wait(third, event).unwrap();
    fake.synchronize(third).unwrap();
}

#[test]
fn host_memory_of_a_capture_is_pinned() {
    let (fake, first, _, memory) = device(0);
    let host = [0u8; 4];
    // SAFETY: the array has four bytes, and nothing is copied.
    let copy = || unsafe { fake.upload(first, region(memory, 4, true), host.as_ptr()) };
    fake.begin_capture(first).unwrap();
    fails(copy(), "STREAM_CAPTURE_UNSUPPORTED");
    fails(fake.end_capture(first), "memory that is not pinned");
    let mut host = [0u8; 4];
    fake.begin_capture(first).unwrap();
    // SAFETY: as above.
    fails(unsafe { fake.download(first, host.as_mut_ptr(), region(memory, 4, false)) }, "STREAM_CAPTURE_UNSUPPORTED");
    fails(fake.end_capture(first), "memory that is not pinned");
    // Pinned memory is read anew at every launch.
    let pinned = fake.allocate_pinned(4).unwrap();
    fake.begin_capture(first).unwrap();
    // SAFETY: four bytes, which the host writes between launches.
    unsafe { fake.upload(first, region(memory, 4, true), pinned) }.unwrap();
    let graph = fake.end_capture(first).unwrap();
    for value in [4, 6] {
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(pinned, value, 4) };
        fake.launch_graph(first, graph).unwrap();
        assert_eq!(download(&fake, first, memory, 4), [value; 4]);
    }
    assert_eq!(fake.problems(), [""; 0]);
}

#[test]
fn a_capture_ends_where_and_by_whom_it_was_begun_with_all_its_streams_back() {
    let (fake, first, second, memory) = device(0);
    fails(fake.end_capture(first), "STREAM_CAPTURE_UNMATCHED");
    fake.begin_capture(first).unwrap();
    fails(fake.begin_capture(first), "ILLEGAL_STATE");
    fails(fake.end_capture(second), "STREAM_CAPTURE_UNMATCHED");
    let by_another = std::thread::scope(|scope| scope.spawn(|| fake.end_capture(first)).join().unwrap());
    fails(by_another, "STREAM_CAPTURE_WRONG_THREAD");
    let fork = fake.event().unwrap();
    fake.record(fork, first).unwrap();
    fake.wait(second, fork).unwrap();
    fake.zero(second, region(memory, 4, true)).unwrap();
    fails(fake.end_capture(first), "STREAM_CAPTURE_UNJOINED");
}

#[test]
fn marks_in_a_graph_are_passed_and_timed_at_every_launch() {
    let (fake, first, second, memory) = device(0);
    let [start, end] = [(); 2].map(|()| fake.event().unwrap());
    fails(fake.record_in_graph(start, first), "ILLEGAL_STATE");
    fake.begin_capture(first).unwrap();
    fake.record_in_graph(start, first).unwrap();
    fake.zero(first, region(memory, 8, true)).unwrap();
    fake.record_in_graph(end, first).unwrap();
    let graph = fake.end_capture(first).unwrap();
    fails(fake.seconds_between(start, end), "NOT_READY");
    for _ in 0..2 {
        fake.launch_graph(first, graph).unwrap();
        assert!(!fake.is_passed(end).unwrap());
        fake.synchronize(first).unwrap();
        assert!(fake.is_passed(end).unwrap());
        assert!((fake.seconds_between(start, end).unwrap() - 1.008e-6).abs() < 1e-15);
    }
    // In a capture they order nothing.
    fake.begin_capture(second).unwrap();
    fails(fake.wait(second, end), "STREAM_CAPTURE_ISOLATION");
}
