//! Tests of checkpoints under crashes, damage and full disks.

use super::fault::Disk;
use super::manifest::hex;
use super::write::dtype_name;
use super::*;
use proptest::prelude::*;
use serde_json::json;
use std::fs;
use std::io::ErrorKind;
use xxhash_rust::xxh3::xxh3_64;

const KEEP_ALL: Retention = Retention { keep_last: 100, keep_best: false };
const KEEP_ONE: Retention = Retention { keep_last: 1, keep_best: false };

/// Bytes that differ from step to step and from tensor to tensor.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn region(name: &str, dtype: DType, shape: &[usize], seed: u64) -> Region<'static> {
    let elements = shape.iter().product::<usize>();
    let bytes = noise(seed, elements * dtype.size()).into();
    Region { name: name.to_owned(), dtype, shape: shape.to_vec(), runs: vec![Runs::from(0..elements)], bytes }
}

/// A model of two parts in several files, different at every step.
fn snapshot(step: u64) -> Snapshot<'static> {
    let model = vec![
        region("b.half", DType::BF16, &[7], step * 10),
        region("a.weight", DType::F32, &[16, 8], step * 10 + 1),
        region("scalar", DType::F16, &[], step * 10 + 2),
        region("none", DType::F32, &[0, 4], step * 10 + 3),
        region("c.weight", DType::F32, &[5, 5], step * 10 + 4),
    ];
    let optimizer = vec![region("m", DType::F32, &[40], step * 10 + 5), region("t", DType::U32, &[3], step * 10 + 6)];
    Snapshot {
        step,
        parts: vec![
            SnapshotPart { name: "model".to_owned(), regions: model, required: BTreeSet::new() },
            SnapshotPart { name: "optimizer".to_owned(), regions: optimizer, required: BTreeSet::new() },
        ],
        state: json!({ "position": step * 17, "loss": 0.1 + step as f64 / 3.0 }),
        attachments: vec![("config.json".to_owned(), b"{}".to_vec())],
    }
}

fn store(run: &Path, retention: Retention) -> CheckpointStore {
    let (mut store, _) = CheckpointStore::open(run, retention).unwrap();
    // So small that the little model has several files and each file several writes.
    store.set_sizes(256, 200);
    store
}

#[track_caller]
fn assert_holds(checkpoint: &Checkpoint, want: &Snapshot<'_>) {
    assert_tensors(checkpoint, want);
    for (name, bytes) in &want.attachments {
        assert_eq!(&fs::read(checkpoint.path().join(name)).unwrap(), bytes);
    }
}

/// As [`assert_holds`] without the attachments, which cannot be read when the folder is deleted.
#[track_caller]
fn assert_tensors(checkpoint: &Checkpoint, want: &Snapshot<'_>) {
    assert_eq!(checkpoint.step(), want.step);
    assert_eq!(checkpoint.state(), &want.state);
    for part in &want.parts {
        assert_eq!(checkpoint.names(&part.name).count(), part.regions.len());
        for region in &part.regions {
            let got = checkpoint.entry(&part.name, &region.name).unwrap();
            assert_eq!((got.dtype.as_str(), &got.shape), (dtype_name(region.dtype), &region.shape));
            let mut bytes = vec![0; region.bytes.len()];
            checkpoint.read(&part.name, &region.name, 0..got.elements(), &mut bytes).unwrap();
            assert!(bytes == all(&region.bytes), "step {} {} differs", want.step, region.name);
        }
    }
}

fn latest(run: &Path) -> Found {
    find_latest(run).unwrap().unwrap()
}

/// The bytes in memory.
fn all(bytes: &Bytes<'_>) -> Vec<u8> {
    let mut all = Vec::new();
    let take = |chunk: &[u8]| {
        all.extend_from_slice(chunk);
        Ok(())
    };
    bytes.chunks(7, take).unwrap();
    all
}

#[test]
fn what_is_written_is_read_byte_for_byte() {
    let run = tempfile::tempdir().unwrap();
    let written = store(run.path(), KEEP_ALL).write(&snapshot(123)).unwrap();
    assert_eq!(written.path, run.path().join("checkpoints/step-00000123"));
    let found = latest(run.path());
    assert_holds(&found.checkpoint, &snapshot(123));
    assert!(found.skipped.is_empty());
    let files: u64 = fs::read_dir(&written.path).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert_eq!(written.bytes, files);
    let error = found.checkpoint.entry("model", "wombat").unwrap_err().to_string();
    assert!(error.contains("no tensor `wombat` in its part `model`"), "{error}");
}

/// The names and the index that Hugging Face libraries look for, readable by the library itself.
#[test]
fn shards_have_the_names_and_the_index_of_hugging_face() {
    let run = tempfile::tempdir().unwrap();
    let folder = store(run.path(), KEEP_ALL).write(&snapshot(1)).unwrap().path;
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.join("model.safetensors.index.json")).unwrap()).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), 5);
    assert_eq!(index["metadata"]["total_size"], 16 * 8 * 4 + 5 * 5 * 4 + 7 * 2 + 2);
    for (name, file) in map {
        let bytes = fs::read(folder.join(file.as_str().unwrap())).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        let start = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert!(start.is_multiple_of(tensor.dtype().bitsize() / 8), "{name} is aligned inside the file");
    }
    assert!(folder.join("optimizer.safetensors").exists(), "one shard has no number");
    assert!(!folder.join("optimizer.safetensors.index.json").exists());
}

/// A folder in memory where there is one: syncs are simulated in these thousand runs, and real ones
/// would take a minute.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Checks the remains after a write with a fault; None if the fault never struck.
fn after_fault(fault: Fault, replacing: bool) -> Option<()> {
    let run = scratch();
    let mut writer = store(run.path(), KEEP_ONE);
    writer.write(&snapshot(1)).unwrap();
    // A checkpoint of the step may exist already, with other contents: the run went back and
    // reached the step again.
    let before = Snapshot { state: json!("an earlier attempt"), ..snapshot(2) };
    if replacing {
        writer.write(&before).unwrap();
    }
    writer.inject(Some(fault));
    let result = writer.write(&snapshot(2));
    let fired = writer.changes() > fault.at;
    drop(writer);

    let context = format!("{fault:?} replacing {replacing}: {result:?}");
    if let Err(error) = &result
        && !matches!(error, CheckpointError::Injected(_))
    {
        let hidden = |name: &String| name.ends_with(".tmp");
        let names = fs::read_dir(run.path().join("checkpoints")).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert!(!names.iter().any(hidden), "{context}: {names:?}");
        assert!(!error.to_string().is_empty());
    }
    let mut writer = store(run.path(), KEEP_ONE);
    let found = writer.find_latest().unwrap().unwrap_or_else(|| panic!("{context}: nothing is left"));
    let earlier = found.checkpoint.state() == &before.state;
    match (found.step, earlier) {
        (1, _) => assert_holds(&found.checkpoint, &snapshot(1)),
        (_, true) => assert_holds(&found.checkpoint, &before),
        (_, false) => assert_holds(&found.checkpoint, &snapshot(2)),
    }
    assert!(found.skipped.is_empty(), "{context}: {:?}", found.skipped);
    for step in super::store::steps(writer.folder()).unwrap() {
        let folder = writer.folder().join(format!("step-{step:08}"));
        let whole = Checkpoint::open(&folder).and_then(|checkpoint| checkpoint.verify());
        whole.unwrap_or_else(|error| panic!("{context}: {error}"));
    }
    if result.is_ok() {
        assert!(found.step == 2 && !earlier, "{context}: what was acknowledged is there");
    }
    drop(found);

    // And the run goes on.
    writer.write(&snapshot(3)).unwrap();
    drop(writer);
    assert_holds(&latest(run.path()).checkpoint, &snapshot(3));
    let names = fs::read_dir(run.path().join("checkpoints")).unwrap();
    let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, [".lock", "step-00000003"], "{context}");
    fired.then_some(())
}

/// Every change to the disk, each in turn the one that goes wrong.
fn at_every_position(kinds: &[FaultKind], replacing: bool) {
    for kind in kinds {
        let positions = (0..).take_while(|at| after_fault(Fault { at: *at, kind: *kind }, replacing).is_some()).count();
        assert!(positions > 30, "{kind:?}: only {positions} positions");
    }
}

#[test]
fn a_crash_at_any_write_position_loses_nothing() {
    at_every_position(&[FaultKind::Crash], false);
    at_every_position(&[FaultKind::Crash], true);
}

#[test]
fn a_power_loss_at_any_write_position_loses_nothing() {
    let kinds: Vec<_> = (1..4).map(|seed| FaultKind::PowerLoss { seed }).collect();
    at_every_position(&kinds, false);
    at_every_position(&kinds, true);
}

#[test]
fn a_refusal_at_any_write_position_loses_nothing() {
    at_every_position(&[FaultKind::Fail(ErrorKind::StorageFull), FaultKind::Fail(ErrorKind::PermissionDenied)], false);
    at_every_position(&[FaultKind::Fail(ErrorKind::StorageFull)], true);
}

#[test]
fn a_wrong_byte_at_any_write_position_is_caught_by_the_read_back() {
    at_every_position(&[FaultKind::Corrupt], false);
}

#[test]
fn a_full_disk_is_named_and_leaves_no_trace() {
    let run = tempfile::tempdir().unwrap();
    let mut writer = store(run.path(), KEEP_ALL);
    writer.inject(Some(Fault { at: 9, kind: FaultKind::Fail(ErrorKind::StorageFull) }));
    let error = writer.write(&snapshot(1)).unwrap_err();
    assert!(matches!(error, CheckpointError::DiskFull { .. }), "{error}");
    assert!(error.to_string().contains("no space left for a checkpoint of"), "{error}");
    assert_eq!(fs::read_dir(writer.folder()).unwrap().count(), 1, "the lock");
    writer.write(&snapshot(1)).unwrap();
}

#[test]
fn the_newest_and_the_best_are_kept() {
    let run = tempfile::tempdir().unwrap();
    let mut writer = store(run.path(), Retention { keep_last: 2, keep_best: true });
    let mut pruned = Vec::new();
    for (step, loss) in [(10, 3.0), (20, 1.5), (30, 2.0), (40, f64::NAN), (50, 1.5), (60, 1.6)] {
        pruned.extend(writer.write(&snapshot(step)).unwrap().pruned);
        let best = writer.record_evaluation(step, loss).unwrap();
        assert_eq!(best, step <= 20, "the first of equals stays the best, and no number is not the best");
    }
    assert_eq!(pruned, [10, 30, 40]);
    assert_eq!(writer.best(), Some(Best { step: 20, loss: 1.5 }));
    let mut left: Vec<_> = fs::read_dir(writer.folder()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [".lock", "best.json", "step-00000020", "step-00000050", "step-00000060"]);
    // A best evaluation whose checkpoint is deleted does not count.
    fs::remove_dir_all(writer.folder().join("step-00000020")).unwrap();
    assert_eq!(writer.best(), None);
    assert!(writer.record_evaluation(60, 1.6).unwrap());
}

#[test]
fn damaged_ones_are_passed_over_and_said() {
    let run = tempfile::tempdir().unwrap();
    let mut writer = store(run.path(), KEEP_ALL);
    for step in 1..=3 {
        writer.write(&snapshot(step)).unwrap();
    }
    let folder = |step| run.path().join(format!("checkpoints/step-{step:08}"));
    let damage = |step, name: &str, change: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let path = folder(step).join(name);
        fs::write(&path, change(fs::read(&path).unwrap())).unwrap();
    };
    damage(3, "optimizer.safetensors", &|mut bytes| {
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        bytes
    });
    damage(2, "model-00002-of-00002.safetensors", &|bytes| bytes[..bytes.len() - 1].to_vec());
    let found = latest(run.path());
    assert_holds(&found.checkpoint, &snapshot(1));
    let text: Vec<_> = found.skipped.iter().map(Skipped::to_string).collect();
    assert!(text[0].contains("step-00000003 was passed over: optimizer.safetensors has the checksum"), "{text:?}");
    assert!(text[1].contains("step-00000002 was passed over: model-00002-of-00002.safetensors"), "{text:?}");

    // A damaged checkpoint is replaced when the run reaches its step again, and never counts as one
    // to keep.
    drop(writer);
    let mut writer = store(run.path(), KEEP_ONE);
    writer.write(&snapshot(2)).unwrap();
    assert_holds(&latest(run.path()).checkpoint, &snapshot(2));
    writer.write(&snapshot(3)).unwrap();
    assert_holds(&latest(run.path()).checkpoint, &snapshot(3));

    fs::remove_file(folder(3).join("manifest.json")).unwrap();
    let error = find_latest(run.path()).unwrap_err().to_string();
    assert!(error.contains("no checkpoint in") && error.contains("manifest.json is missing"), "{error}");
    assert!(find_latest(&run.path().join("nowhere")).unwrap().is_none());
}

/// Writes a checkpoint, changes it so that all checksums still agree, and gives the reason why it
/// is refused.
fn refusal(change: impl Fn(&mut serde_json::Value, &Path)) -> String {
    let run = tempfile::tempdir().unwrap();
    let folder = store(run.path(), KEEP_ALL).write(&snapshot(1)).unwrap().path;
    let path = folder.join("manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest, &folder);
    for entry in manifest["files"].as_array_mut().unwrap() {
        let Ok(bytes) = fs::read(folder.join(entry["name"].as_str().unwrap())) else { continue };
        entry["bytes"] = json!(bytes.len());
        entry["xxh3"] = json!(hex(xxh3_64(&bytes)));
    }
    let text = serde_json::to_vec(&manifest).unwrap();
    fs::write(&path, &text).unwrap();
    fs::write(folder.join("manifest.xxh3"), hex(xxh3_64(&text))).unwrap();
    let opened = Checkpoint::open(&folder).and_then(|checkpoint| checkpoint.verify());
    opened.err().map(|error| error.to_string()).unwrap_or_default()
}

/// Changes the JSON header of a safetensors file.
fn edit_header(path: &Path, from: &str, to: &str) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap();
    assert!(header.contains(from), "{header}");
    let header = header.replace(from, to);
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(&bytes[8 + length..]);
    fs::write(path, out).unwrap();
}

#[test]
fn lying_headers_and_manifests_are_refused() {
    assert_eq!(refusal(|_, _| {}), "", "the tampering itself is not what is refused");
    let optimizer = |from: &'static str, to: &'static str| {
        refusal(move |_, folder| edit_header(&folder.join("optimizer.safetensors"), from, to))
    };
    let raw =
        |bytes: Vec<u8>| refusal(move |_, folder| fs::write(folder.join("optimizer.safetensors"), &bytes).unwrap());
    let tensor = |key: &'static str, value: serde_json::Value| {
        refusal(move |manifest, _| manifest["parts"]["optimizer"]["m"][key] = value.clone())
    };
    // Two runs in each piece: (start, end, stride, place).
    let runs = |pieces: [(usize, usize, usize, usize); 2]| {
        let file = "optimizer.safetensors";
        let piece = |(start, end, stride, at)| json!({ "file": file, "start": start, "end": end, "runs": 2, "stride": stride, "at": at });
        tensor("pieces", pieces.map(piece).to_vec().into())
    };
    let mut long = u64::MAX.to_le_bytes().to_vec();
    long.extend([0; 64]);
    let mut nonsense = 4u64.to_le_bytes().to_vec();
    nonsense.extend(b"\xff\xfe{}");
    for (got, want) in [
        (optimizer("[0,160]", "[0,164]"), "its header"),
        (optimizer("[160,172]", "[100,172]"), "its header"),
        (optimizer("[160,172]", "[160,999999]"), "its header"),
        (optimizer("[160,172]", "[172,160]"), "its header"),
        (optimizer("[40]", "[41]"), "its header"),
        (optimizer("[40]", "[18446744073709551615,2]"), "its header"),
        (optimizer("\"F32\"", "\"F16\""), "its header"),
        (optimizer("\"F32\"", "\"F99\""), "its header"),
        (optimizer("\"m\"", "\"n\""), "optimizer.safetensors does not have it"),
        (raw(vec![]), "its header"),
        (raw(vec![1, 2, 3]), "its header"),
        (raw(long), "its header"),
        (raw(nonsense), "its header"),
        (tensor("dtype", json!("BF16")), "BF16 [40] is not 160 bytes"),
        (tensor("dtype", json!("F99")), "the type F99 is unknown"),
        (tensor("shape", json!([4, 11])), "F32 [4, 11] is not 160 bytes"),
        (tensor("shape", json!([u64::MAX, 2])), "is not 160 bytes"),
        (tensor("shape", json!([-1])), "cannot be read"),
        (tensor("file", json!("config.json")), "is no safetensors file"),
        (tensor("file", json!("../../x.safetensors")), "which is not listed"),
        (refusal(|manifest, _| manifest["files"][0]["name"] = json!("../../x")), "names a file"),
        (refusal(|manifest, _| manifest["files"][0]["name"] = json!("/etc/passwd")), "names a file"),
        (refusal(|manifest, _| manifest["version"] = json!(4)), "version 4, and this program reads versions 1 to 3"),
        (tensor("pieces", json!([{ "file": "optimizer.safetensors", "start": 0, "end": 39 }])), "not all of it"),
        (tensor("pieces", json!([{ "file": "optimizer.safetensors", "start": 1, "end": 40 }])), "not all of it"),
        (tensor("pieces", json!([{ "file": "nowhere.safetensors", "start": 0, "end": 40 }])), "which is not listed"),
        (runs([(0, 10, 20, 0), (10, 20, 20, 20)]), ""),
        (runs([(0, 10, 20, 0), (10, 20, 20, 21)]), "optimizer.safetensors has a piece at element 21 and none at 20"),
        (runs([(0, 10, 20, 0), (10, 20, 20, 0)]), "has a piece at element 0 and none at 20"),
        (runs([(0, 10, 20, 0), (10, 19, 20, 20)]), "not all of it: elements 19 to 20 were written by no rank"),
        (runs([(0, 11, 20, 0), (10, 20, 20, 20)]), "not all of it: elements 10 to 11 were written twice"),
        (runs([(0, 10, 20, 0), (10, 20, 10, 20)]), "columns of matrices of 20 and of 10 columns"),
        (runs([(0, 10, 20, 0), (15, 25, 20, 20)]), "elements 15..25 (2 times, every 20) are no part of [40]"),
        (runs([(0, 10, 0, 0), (10, 20, 20, 20)]), "are no part of [40]"),
        (runs([(0, 10, usize::MAX, 0), (10, 20, 20, 20)]), "are no part of [40]"),
        (refusal(|manifest, _| *manifest = json!({ "version": 1, "files": [] })), "cannot be read: missing field"),
        (refusal(|_, folder| fs::remove_file(folder.join("config.json")).unwrap()), "config.json is missing"),
    ] {
        assert!(got.contains(want), "{got:?} does not say {want:?}");
    }
}

#[test]
fn snapshots_that_could_not_be_read_are_refused() {
    let run = tempfile::tempdir().unwrap();
    let mut writer = store(run.path(), KEEP_ALL);
    let mut refused = |change: &dyn Fn(&mut Snapshot<'static>)| {
        let mut snapshot = snapshot(1);
        change(&mut snapshot);
        let error = writer.write(&snapshot).unwrap_err();
        assert!(matches!(error, CheckpointError::Snapshot(_)), "{error}");
        error.to_string()
    };
    assert!(
        refused(&|s| s.parts[0].regions[1].shape = vec![16, 7])
            .contains("`a.weight` is f32 [16, 7], elements 0..128, but has 512 bytes")
    );
    assert!(refused(&|s| s.parts[0].regions[1].shape = vec![usize::MAX, 2]).contains("but has 512 bytes"));
    assert!(
        refused(&|s| s.parts[0].regions[1].runs = vec![(0..64).into()]).contains("elements 0..64, but has 512 bytes")
    );
    assert!(refused(&|s| s.parts[0].regions[1].shape = vec![16, 9]).contains("elements 128 to 144 were written by no"));
    assert!(refused(&|s| s.parts[0].regions[1].name = "b.half".to_owned()).contains("used twice"));
    assert!(refused(&|s| s.parts[0].regions[1].name = "__metadata__".to_owned()).contains("reserved"));
    assert!(refused(&|s| s.parts[1].name = "model".to_owned()).contains("used twice"));
    assert!(refused(&|s| s.parts[1].name = "../model".to_owned()).contains("no plain word"));
    for name in ["manifest.json", "model.safetensors", "../x", "a/b", "", ".hidden", "model.safetensors.index.json"] {
        assert!(refused(&|s| s.attachments[0].0 = name.to_owned()).contains("attachment name"), "{name}");
    }
}

/// The elements of `snapshot` that rank `rank` of `ranks` writes.
fn share(mut snapshot: Snapshot<'static>, rank: usize, ranks: usize) -> Snapshot<'static> {
    for part in &mut snapshot.parts {
        for region in &mut part.regions {
            let (elements, size) = (region.elements(), region.dtype.size());
            let range = elements * rank / ranks..elements * (rank + 1) / ranks;
            let bytes = all(&region.bytes)[range.start * size..range.end * size].to_vec();
            region.bytes = bytes.into();
            region.runs = vec![range.into()];
        }
        part.regions.retain(|region| region.elements() > 0);
    }
    snapshot
}

/// Writes steps 1 and 2 on three ranks. Each writes its share, after `change`. Returns the result
/// of each rank's writer.
fn write_on_three_ranks(
    run: &Path,
    change: impl Fn(usize, &mut Snapshot<'static>) + Sync,
) -> Vec<Result<usize, String>> {
    let ends = write_on_three_ranks_with(run, None, change);
    ends.into_iter().map(|end| end.map_err(|error| error.to_string())).collect()
}

/// As [`write_on_three_ranks`], with a fault in the disk of one rank.
fn write_on_three_ranks_with(
    run: &Path,
    fault: Option<(usize, Fault)>,
    change: impl Fn(usize, &mut Snapshot<'static>) + Sync,
) -> Vec<Result<usize, CheckpointError>> {
    let mut store = Some(store(run, KEEP_ALL));
    std::thread::scope(|scope| {
        let ranks = trainyard_comm::local::World::new(3).into_iter().enumerate().map(|(rank, world)| {
            let (mut store, change) = (store.take().filter(|_| rank == 0), &change);
            let fault = fault.filter(|(culprit, _)| *culprit == rank).map(|(_, fault)| fault);
            store.iter_mut().for_each(|store| store.inject(fault));
            scope.spawn(move || {
                let mut writer = BackgroundWriter::with_others_on(run, store, world, Disk::with_fault(fault)).unwrap();
                let mut events = 0;
                for step in [1, 2] {
                    let mut snapshot = snapshot(step);
                    // Empty regions belong to no rank's share.
                    snapshot.parts[0].regions.retain(|region| region.elements() > 0);
                    let mut share = share(snapshot, rank, 3);
                    change(rank, &mut share);
                    events += writer.submit(share)?.len();
                }
                Ok(events + writer.finish()?.len())
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_write_their_parts_of_one_checkpoint() {
    let run = tempfile::tempdir().unwrap();
    // Rank 0 commits, with one event per checkpoint.
    assert_eq!(write_on_three_ranks(run.path(), |_, _| ()), [Ok(2), Ok(0), Ok(0)]);
    let found = latest(run.path());
    let mut want = snapshot(2);
    want.parts[0].regions.retain(|region| region.elements() > 0);
    assert_holds(&found.checkpoint, &want);
    let whole = want.parts[0].regions.iter().find(|region| region.name == "a.weight").unwrap();
    let mut some = vec![0; 4 * 60];
    found.checkpoint.read("model", "a.weight", 30..90, &mut some).unwrap();
    assert_eq!(some, all(&whole.bytes)[4 * 30..4 * 90]);
    assert!(found.checkpoint.read("model", "a.weight", 100..129, &mut [0; 4 * 29]).is_err());
    assert!(found.checkpoint.read("model", "a.weight", 0..2, &mut [0; 4]).is_err());
}

#[test]
fn a_rank_that_cannot_write_its_part_leaves_no_checkpoint_and_is_named_everywhere() {
    let run = tempfile::tempdir().unwrap();
    let said = write_on_three_ranks(run.path(), |rank, share| {
        if rank == 1 && share.step == 2 {
            share.parts[0].regions[0].runs[0].first.end += 1;
        }
    });
    for said in said {
        let error = said.unwrap_err();
        assert!(error.contains("rank 1") || error.contains("but has"), "{error}");
    }
    assert_eq!(latest(run.path()).step, 1);
    // A share that nobody writes is noticed too.
    let run = tempfile::tempdir().unwrap();
    let said = write_on_three_ranks(run.path(), |rank, share| {
        if rank == 2 {
            share.parts.pop();
        }
    });
    assert!(said[0].as_ref().is_err_and(|error| error.contains("were written by no rank")), "{said:?}");
    assert!(find_latest(run.path()).unwrap().is_none());
}

#[test]
fn one_writer_at_a_time_and_readers_beside_it() {
    let run = tempfile::tempdir().unwrap();
    let mut writer = store(run.path(), KEEP_ALL);
    let error = CheckpointStore::open(run.path(), KEEP_ALL).unwrap_err();
    assert!(matches!(error, CheckpointError::Locked { .. }), "{error}");
    writer.write(&snapshot(1)).unwrap();
    assert_holds(&latest(run.path()).checkpoint, &snapshot(1));
    drop(writer);
    CheckpointStore::open(run.path(), KEEP_ALL).unwrap();
}

/// A search that was killed and resumed at once failed a trial whose process had not quite ended.
#[test]
fn a_run_whose_process_is_still_ending_is_waited_for() {
    let run = tempfile::tempdir().unwrap();
    let ending = store(run.path(), KEEP_ALL);
    let end = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(ending);
    });
    CheckpointStore::open(run.path(), KEEP_ALL).unwrap();
    end.join().unwrap();
}

/// With `keep_last = 1` a reader meets checkpoints that are deleted while it reads them.
#[test]
fn a_checkpoint_that_is_rotated_away_while_it_is_read_is_no_error() {
    let run = scratch();
    let mut writer = store(run.path(), KEEP_ONE);
    writer.write(&snapshot(1)).unwrap();
    // An open checkpoint can be read to its end.
    let opened = latest(run.path()).checkpoint;
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut reads = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let found = find_latest(run.path()).unwrap().unwrap();
                found.checkpoint.verify().unwrap();
                assert_tensors(&found.checkpoint, &snapshot(found.step));
                assert_eq!(found.skipped, []);
                reads += 1;
            }
            reads
        });
        (2..=150).for_each(|step| drop(writer.write(&snapshot(step)).unwrap()));
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(reader.join().unwrap() > 0);
    });
    opened.verify().unwrap();
    assert_tensors(&opened, &snapshot(1));
}

/// A rank that is told of another's full disk ends with the same exit code as that one, which uses
/// up no restart.
#[test]
fn a_full_disk_is_told_to_all_ranks_as_one_that_comes_again() {
    for culprit in 0..3 {
        for kind in [ErrorKind::StorageFull, ErrorKind::BrokenPipe] {
            let run = tempfile::tempdir().unwrap();
            let fault = Fault { at: 2, kind: FaultKind::Fail(kind) };
            let ends = write_on_three_ranks_with(run.path(), Some((culprit, fault)), |_, _| ());
            for (rank, end) in ends.into_iter().enumerate() {
                let error = end.unwrap_err();
                assert_eq!(
                    error.comes_again(),
                    kind == ErrorKind::StorageFull,
                    "{culprit} met {kind}: {rank}: {error}"
                );
                assert!(rank == culprit || error.to_string().contains(&format!("rank {culprit}")), "{rank}: {error}");
            }
        }
    }
}

#[test]
fn an_unwritable_place_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    fs::write(&run, "a file where the folder should be").unwrap();
    let error = CheckpointStore::open(&run, KEEP_ALL).unwrap_err().to_string();
    assert!(error.starts_with("cannot create") && error.contains("run/checkpoints"), "{error}");
}

fn steps_of(events: &[Event]) -> Vec<u64> {
    let step = |event: &Event| match event {
        Event::Written(written) => Some(written.step),
        Event::Best { .. } => None,
    };
    events.iter().filter_map(step).collect()
}

#[test]
fn the_background_writer_writes_in_order_and_finishes() {
    let run = tempfile::tempdir().unwrap();
    let mut writer = BackgroundWriter::new(store(run.path(), Retention { keep_last: 1, keep_best: true })).unwrap();
    let mut events = Vec::new();
    for step in 1..=5 {
        events.extend(writer.submit(snapshot(step)).unwrap());
        let written = steps_of(&events);
        assert!(written.len() as u64 >= step - 1, "the one before is on disk when the next is taken");
        events.extend(writer.evaluated(step, (step as f64 - 3.0).abs()).unwrap());
    }
    events.extend(writer.finish().unwrap());
    assert_eq!(steps_of(&events), [1, 2, 3, 4, 5]);
    assert!(events.contains(&Event::Best { step: 3, loss: 0.0 }));
    assert_holds(&latest(run.path()).checkpoint, &snapshot(5));
    assert!(run.path().join("checkpoints/step-00000003").is_dir(), "the best is kept");
    assert!(!run.path().join("checkpoints/step-00000004").exists());

    drop({
        let mut writer = BackgroundWriter::new(store(run.path(), KEEP_ONE)).unwrap();
        writer.submit(snapshot(6)).unwrap();
        writer
    });
    assert_holds(&latest(run.path()).checkpoint, &snapshot(6));
}

#[test]
fn an_error_in_the_background_comes_back_and_the_next_snapshot_is_written() {
    let run = tempfile::tempdir().unwrap();
    let mut store = store(run.path(), KEEP_ALL);
    store.inject(Some(Fault { at: 5, kind: FaultKind::Fail(ErrorKind::StorageFull) }));
    let mut writer = BackgroundWriter::new(store).unwrap();
    writer.submit(snapshot(1)).unwrap();
    let error = writer.submit(snapshot(2)).unwrap_err();
    assert!(matches!(error, CheckpointError::DiskFull { .. }), "{error}");
    assert_eq!(steps_of(&writer.finish().unwrap()), [2]);
    assert_holds(&latest(run.path()).checkpoint, &snapshot(2));

    let (mut store, _) = CheckpointStore::open(run.path(), KEEP_ALL).unwrap();
    store.inject(Some(Fault { at: 0, kind: FaultKind::Crash }));
    let mut writer = BackgroundWriter::new(store).unwrap();
    writer.submit(snapshot(3)).unwrap();
    assert!(matches!(writer.finish(), Err(CheckpointError::Injected(_))), "finishing reports it too");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any state and any tensors are read back unchanged, to the last bit of every number.
    #[test]
    fn numbers_survive(numbers in prop::collection::vec(any::<f64>().prop_filter("JSON has no infinities", |x| x.is_finite()), 0..20),
                       sizes in prop::collection::vec(0usize..200, 0..6), step in any::<u32>()) {
        let run = scratch();
        let regions = sizes.iter().enumerate().map(|(i, n)| region(&format!("tensor {i} \"é\\"), DType::F32, &[*n], i as u64)).collect();
        let want = Snapshot {
            step: u64::from(step),
            parts: vec![SnapshotPart { name: "model".to_owned(), regions, required: BTreeSet::new() }],
            state: json!({ "numbers": numbers, "big": u64::MAX }),
            attachments: vec![],
        };
        store(run.path(), KEEP_ALL).write(&want).unwrap();
        let found = latest(run.path());
        assert_holds(&found.checkpoint, &want);
        let read: Vec<u64> = found.checkpoint.state()["numbers"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap().to_bits()).collect();
        prop_assert_eq!(read, numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    }

    /// Any part overwritten with any bytes: the checkpoint is refused or, if the bytes happen to be
    /// the same, read. It never panics.
    #[test]
    fn damage_never_panics(file in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), junk in prop::collection::vec(any::<u8>(), 0..40), cut in any::<bool>()) {
        let run = scratch();
        let folder = store(run.path(), KEEP_ALL).write(&snapshot(1)).unwrap().path;
        let mut names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        let path = &names[file.index(names.len())];
        let before = fs::read(path).unwrap();
        let mut bytes = before.clone();
        let at = at.index(bytes.len());
        let end = (at + junk.len()).min(bytes.len());
        bytes.splice(at..end, junk);
        if cut {
            bytes.truncate(at);
        }
        fs::write(path, &bytes).unwrap();
        let opened = Checkpoint::open(&folder).and_then(|checkpoint| checkpoint.verify());
        prop_assert!(opened.is_err() || bytes == before || bytes.trim_ascii() == before.trim_ascii());
    }
}
