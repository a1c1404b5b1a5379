use super::*;
use crate::driver::Activation;
use crate::fp8::Fp8;

pub fn region(address: Address, bytes: usize, written: bool) -> Region {
    Region { address, bytes, written }
}

pub fn upload(fake: &Fake, stream: Stream, to: Address, data: &[u8]) {
    // SAFETY: the slice has as many bytes.
    unsafe { fake.upload(stream, region(to, data.len(), true), data.as_ptr()) }.unwrap();
}

pub fn download(fake: &Fake, stream: Stream, from: Address, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    // SAFETY: as above, and the stream is waited for.
    unsafe { fake.download(stream, data.as_mut_ptr(), region(from, bytes, false)) }.unwrap();
    fake.synchronize(stream).unwrap();
    data
}

#[test]
fn an_event_orders_two_streams_whatever_is_taken_first() {
    for seed in 0..20 {
        let fake = Fake::new(Options { seed, ..Options::default() });
        let (first, second) = (fake.stream().unwrap(), fake.stream().unwrap());
        let memory = fake.allocate(4).unwrap();
        for value in 0..10u8 {
            upload(&fake, first, memory, &[value; 4]);
        }
        let event = fake.event().unwrap();
        fake.record(event, first).unwrap();
        fake.wait(second, event).unwrap();
        assert_eq!(download(&fake, second, memory, 4), [9; 4]);
        assert_eq!(fake.problems(), [""; 0]);
        assert!(fake.take_records().iter().map(|r| r.name).eq([["upload"; 10].as_slice(), &["download"]].concat()));
    }
}

#[test]
fn what_no_event_orders_is_found_and_for_some_seed_goes_wrong() {
    let mut wrong = 0;
    for seed in 0..20 {
        let fake = Fake::new(Options { seed, ..Options::default() });
        let (first, second) = (fake.stream().unwrap(), fake.stream().unwrap());
        let memory = fake.allocate(8).unwrap();
        upload(&fake, first, memory, &[7; 4]);
        wrong += usize::from(download(&fake, second, memory, 4) != [7; 4]);
        let problems = fake.problems();
        assert!(problems.len() == 1 && problems[0].contains("download on stream 1: reads"), "{problems:?}");
        // The other half was not written by anybody else.
        upload(&fake, second, memory + 4, &[1; 4]);
        assert_eq!(fake.problems().len(), 1);
    }
    assert!((1..20).contains(&wrong), "{wrong} of 20");
}

#[test]
fn pinned_memory_is_read_and_written_when_its_turn_comes_and_its_order_is_checked() {
    let fake = Fake::new(Options::default());
    let (first, second) = (fake.stream().unwrap(), fake.stream().unwrap());
    let memory = fake.allocate(8).unwrap();
    let pinned = fake.allocate_pinned(8).unwrap();
    upload(&fake, first, memory, &[5; 4]);
    // SAFETY: the pinned memory has eight bytes, and the host looks at them when the streams are
    // done.
    unsafe {
        fake.download(first, pinned, region(memory, 4, false)).unwrap();
        fake.upload(first, region(memory + 4, 4, true), pinned).unwrap();
    }
    let event = fake.event().unwrap();
    fake.record(event, first).unwrap();
    fake.wait_on_host(event).unwrap();
    assert_eq!(download(&fake, second, memory + 4, 4), [5; 4]);
    assert_eq!(fake.problems(), [""; 0]);
    // SAFETY: as above.
    unsafe {
        fake.download(first, pinned, region(memory, 4, false)).unwrap();
        fake.upload(second, region(memory + 4, 4, true), pinned).unwrap();
    }
    assert!(fake.problems()[0].starts_with("upload on stream 1: reads"), "{:?}", fake.problems());
    // SAFETY: it came from there; that it is still at work is the point.
    unsafe { fake.free_pinned(pinned) };
    assert!(fake.problems()[1].contains("with which a stream is not done"), "{:?}", fake.problems());
}

#[test]
fn the_host_orders_what_it_waits_for() {
    let fake = Fake::new(Options::default());
    let (first, second) = (fake.stream().unwrap(), fake.stream().unwrap());
    let memory = fake.allocate(4).unwrap();
    upload(&fake, first, memory, &[7; 4]);
    fake.synchronize(first).unwrap();
    assert_eq!((download(&fake, second, memory, 4), fake.problems().len()), (vec![7; 4], 0));
    // A later write must wait for the reader too.
    fake.zero(second, region(memory, 4, true)).unwrap();
    fake.zero(first, region(memory, 4, true)).unwrap();
    assert_eq!(fake.problems().len(), 1);
}

#[test]
fn memory_ends_where_it_ends() {
    let fake = Fake::new(Options { memory: 1000, ..Options::default() });
    let stream = fake.stream().unwrap();
    let memory = fake.allocate(600).unwrap();
    let error = fake.allocate(600).unwrap_err().to_string();
    assert!(error.contains("600 bytes left: 400 of 1000"), "{error}");
    fake.zero(stream, region(memory + 1, 600, true)).unwrap();
    assert!(fake.problems()[0].contains("no allocation"));
    let fake = Fake::new(Options { failing: Some("zero"), ..Options::default() });
    let stream = fake.stream().unwrap();
    let memory = fake.allocate(600).unwrap();
    assert!(fake.zero(stream, region(memory, 600, true)).unwrap_err().to_string().contains("asked for by the test"));
    fake.free(memory);
    assert_eq!(fake.used(), (0, 600));
}

#[test]
fn times_are_those_of_the_work_between_two_marks() {
    let fake = Fake::new(Options::default());
    let stream = fake.stream().unwrap();
    let memory = fake.allocate(1000).unwrap();
    let events = [(); 3].map(|()| fake.event().unwrap());
    fake.record(events[0], stream).unwrap();
    for (event, bytes) in [(events[1], 500), (events[2], 1000)] {
        fake.zero(stream, region(memory, bytes, true)).unwrap();
        fake.record(event, stream).unwrap();
    }
    fake.synchronize(stream).unwrap();
    let seconds = |from: usize, to: usize| fake.seconds_between(events[from], events[to]).unwrap();
    assert!((seconds(0, 1) - 1.5e-6).abs() < 1e-15 && (seconds(1, 2) - 2e-6).abs() < 1e-15);
    assert!((seconds(0, 2) - 3.5e-6).abs() < 1e-15);
}

#[test]
fn a_product_has_its_epilogue() {
    let fake = Fake::new(Options::default());
    let stream = fake.stream().unwrap();
    let put = |values: &[f32]| {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let memory = fake.allocate(bytes.len()).unwrap();
        upload(&fake, stream, memory, &bytes);
        region(memory, bytes.len(), false)
    };
    let form = Product {
        m: 2,
        n: 1,
        k: 3,
        a_transposed: false,
        b_transposed: true,
        operands: Float::F32,
        fp8: None,
        result: Float::F32,
        precision: Default::default(),
        bias: true,
        activation: Activation::Relu,
        keeps_argument: true,
        adds: true,
        batch: 1,
        alignment: Product::ALIGNMENT,
    };
    let (a, b, bias, c) =
        (put(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), put(&[1.0, 0.0, -1.0]), put(&[1.0]), put(&[10.0, 20.0]));
    let [d, argument] = [put(&[0.0; 2]), put(&[0.0; 2])].map(|r| Region { written: true, ..r });
    let operands = Operands {
        a,
        b,
        bias,
        c,
        d,
        argument,
        workspace: Region::NONE,
        scales: [Region::NONE; 2],
        scale: 2.0,
        adding: 0.5,
    };
    assert_eq!(operands.alignment(), Product::ALIGNMENT);
    let shifted = Region { address: c.address + 24, ..c };
    assert_eq!(Operands { c: shifted, ..operands }.alignment(), 8);
    // SAFETY: the sizes are those of the form.
    unsafe { fake.product(stream, &form, &operands) }.unwrap();
    let floats = |r: Region| -> Vec<f32> {
        let bytes = download(&fake, stream, r.address, 8);
        bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
    };
    assert_eq!((floats(argument), floats(d)), (vec![-3.0, -3.0], vec![5.0, 10.0]));
    assert_eq!(fake.problems(), [""; 0]);
}

#[test]
fn products_of_eight_bits_are_scaled_and_refused_as_by_the_library() {
    let fake = Fake::new(Options::default());
    let stream = fake.stream().unwrap();
    let put = |bytes: &[u8]| {
        let memory = fake.allocate(bytes.len()).unwrap();
        upload(&fake, stream, memory, bytes);
        region(memory, bytes.len(), false)
    };
    let codes = |format: Fp8, x: f32| put(&[format.encode(x); 256]);
    let form = Product {
        m: 16,
        n: 16,
        k: 16,
        a_transposed: false,
        b_transposed: true,
        operands: Float::Bf16,
        fp8: Some([Fp8::E5M2, Fp8::E4M3]),
        result: Float::F32,
        precision: Default::default(),
        bias: false,
        activation: Activation::None,
        keeps_argument: false,
        adds: true,
        batch: 1,
        alignment: Product::ALIGNMENT,
    };
    let (a, b) = (codes(Fp8::E5M2, -1.5), codes(Fp8::E4M3, 0.25));
    let c = put(&[0; 1024]);
    let scales = [0.5f32, 8.0].map(|scale| put(&scale.to_ne_bytes()));
    let none = Region::NONE;
    let d = Region { written: true, ..c };
    let operands =
        Operands { a, b, bias: none, c, d, argument: none, workspace: none, scales, scale: 1.0, adding: 1.0 };
    // SAFETY: the sizes are those of the form, and of those that are refused nothing is computed.
    let product = |form: &Product| unsafe { fake.product(stream, form, &operands) };
    product(&form).unwrap();
    product(&form).unwrap();
    let sums = download(&fake, stream, c.address, 1024);
    // Twice sixteen products of -1.5 and 0.25, times 4.
    assert!(sums.chunks_exact(4).all(|b| f32::from_ne_bytes(b.try_into().unwrap()) == -48.0));
    for (refused, words) in [
        (Product { a_transposed: true, ..form }, "along what is summed over"),
        (Product { b_transposed: false, ..form }, "along what is summed over"),
        (Product { k: 24, ..form }, "[16, 16, 24] of a product of eight bits are not multiples of 16"),
        (Product { alignment: 8, ..form }, "multiples of 8 bytes"),
        (Product { fp8: Some([Fp8::E5M2; 2]), ..form }, "no product of E5M2 with E5M2"),
        (Product { activation: Activation::Gelu, ..form }, "one at a time"),
        (Product { batch: 2, ..form }, "one at a time"),
        (Product { bias: true, ..form }, "one at a time"),
        (Product { result: Float::F16, ..form }, "one at a time"),
    ] {
        let error = product(&refused).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    // Scales that lie one after the other, as an H100 refused them.
    let next = Region { address: operands.scales[0].address + 4, ..operands.scales[0] };
    let close = Operands { scales: [operands.scales[0], next], ..operands };
    // SAFETY: it is refused before anything is read.
    let error = unsafe { fake.product(stream, &form, &close) }.unwrap_err().to_string();
    assert!(error.contains("needs a multiple of 16 bytes"), "{error}");
    assert!(form.refused((8, 6)).unwrap().contains("8.6 multiplies no operands of eight bits"));
    assert_eq!((form.refused((8, 9)), Product { fp8: None, k: 3, ..form }.refused((8, 0))), (None, None));
    assert_eq!(fake.problems(), [""; 0]);
}

#[test]
fn an_event_that_is_recorded_again_elsewhere_still_passes_where_it_was_first() {
    for seed in 0..10 {
        let fake = Fake::new(Options { seed, ..Options::default() });
        let [first, second, third, last] = [(); 4].map(|()| fake.stream().unwrap());
        let [event, gate] = [(); 2].map(|()| fake.event().unwrap());
        let memory = fake.allocate(4).unwrap();
        // The first record stands behind work of another stream; the second does not.
        upload(&fake, last, memory, &[1; 4]);
        fake.record(gate, last).unwrap();
        fake.wait(first, gate).unwrap();
        fake.record(event, first).unwrap();
        fake.wait(third, event).unwrap();
        fake.record(event, second).unwrap();
        fake.wait(last, event).unwrap();
        assert_eq!(download(&fake, third, memory, 4), [1; 4]);
        fake.synchronize(last).unwrap();
        assert!(fake.is_passed(event).unwrap() && fake.problems().is_empty());
    }
}
