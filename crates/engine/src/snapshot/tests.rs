//! Checkpoints between layouts: what ranks of one layout write, ranks of any other read back.

use super::*;
use crate::checkpoint::{BackgroundWriter, CheckpointStore, Retention, find_latest};
use proptest::prelude::*;
use std::path::Path;
use trainyard_model::{Init, ParameterKind, Piece, Split};

/// Units of a model, each of one parameter.
const UNITS: usize = 4;

/// Numbers that look random.
struct Draw(u64);

impl Draw {
    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    /// Borders of `parts` uneven parts of `range`, some of them perhaps empty.
    fn cuts(&mut self, range: &Range<usize>, parts: usize) -> Vec<usize> {
        let mut cuts: Vec<_> = (1..parts).map(|_| range.start + self.below(range.len() + 1)).collect();
        cuts.extend([range.start, range.end]);
        cuts.sort_unstable();
        cuts
    }
}

/// A parameter as each rank of a tensor-parallel group holds it.
type Parts = Vec<ParameterSpec>;

/// A parameter of `shape` that `ranks` ranks hold whole.
fn whole(shape: &[usize], ranks: usize) -> Parts {
    vec![ParameterSpec::new("w", shape, Init::Zeros, ParameterKind::Matrix, "w"); ranks]
}

/// A parameter of `shape`, split along `dim` over `ranks` ranks. It fuses up to three blocks that
/// are each split by themselves, some of them over fewer ranks than there are: several ranks then
/// hold the same stretch, as with keys and values of few heads.
fn split(shape: &[usize], dim: usize, ranks: usize, draw: &mut Draw) -> Parts {
    let mut parts = whole(shape, ranks);
    let mut pieces = vec![Vec::<Piece>::new(); ranks];
    let count = 1 + draw.below(3);
    for block in draw.cuts(&(0..shape[dim]), count).windows(2) {
        let groups = 1 + draw.below(ranks);
        let cuts = draw.cuts(&(block[0]..block[1]), groups);
        let group = |rank: usize| rank * groups / ranks;
        for (rank, pieces) in pieces.iter_mut().enumerate() {
            let stretch = cuts[group(rank)]..cuts[group(rank) + 1];
            let start = pieces.last().map_or(0, |piece| piece.local.end);
            let holders = (0..ranks).filter(|other| group(*other) == group(rank)).count();
            let owned = rank == 0 || group(rank - 1) != group(rank);
            pieces.push(Piece { local: start..start + stretch.len(), whole: stretch, holders, owned });
        }
    }
    for (part, pieces) in parts.iter_mut().zip(pieces) {
        part.shape[dim] = pieces.iter().map(|piece| piece.local.len()).sum();
        part.split = Some(Split { whole: shape.to_vec(), dim, outer: 0, pieces, shared: Vec::new() });
    }
    parts
}

/// The parameters of a model, one for each unit, in a layout.
struct Layout {
    parameters: Vec<Parts>,
    /// Borders of every rank's shards of its part, by unit and rank of the tensor group.
    shards: Vec<Vec<Vec<usize>>>,
    stages: usize,
    replicas: usize,
}

/// A rank, and the part of every unit that it holds: (unit, parameter, held local elements).
struct Member {
    writes: Writes,
    holds: Vec<(usize, ParameterSpec, Range<usize>)>,
}

impl Layout {
    fn draw(shapes: &[Vec<usize>], draw: &mut Draw) -> Layout {
        let (ranks, zero) = (1 + draw.below(3), 1 + draw.below(3));
        let of = |shape: &Vec<usize>| match draw.below(shape.len() + 1) {
            0 => whole(shape, ranks),
            dim => split(shape, dim - 1, ranks, draw),
        };
        let parameters: Vec<Parts> = shapes.iter().map(of).collect();
        let shards = parameters.iter().map(|parts| {
            let mut of = |part: &ParameterSpec| draw.cuts(&(0..part.elements()), zero);
            match parts[0].split {
                // Ranks that hold the same divide it in the same way.
                None => vec![of(&parts[0]); ranks],
                Some(_) => parts.iter().map(of).collect(),
            }
        });
        let shards = shards.collect();
        Layout { parameters, shards, stages: 1 + draw.below(3), replicas: 1 + draw.below(3) }
    }

    /// Its ranks. The last stage holds unit 0 too, as a tied head does.
    fn members(&self) -> Vec<Member> {
        let zero = self.shards[0][0].len() - 1;
        let mut all = Vec::new();
        for stage in 0..self.stages {
            for replica in 0..self.replicas {
                for shard in 0..zero {
                    for rank in 0..self.parameters[0].len() {
                        let units = (0..self.parameters.len())
                            .filter(|unit| unit % self.stages == stage || (*unit == 0 && stage + 1 == self.stages));
                        let hold = |unit: usize| {
                            let borders = &self.shards[unit][rank];
                            (unit, self.parameters[unit][rank].clone(), borders[shard]..borders[shard + 1])
                        };
                        let writes = Writes {
                            replica,
                            replicas: self.replicas,
                            of_experts: (0, 1),
                            first_of_tensor_group: rank == 0,
                            of_lower_stages: if stage > 0 { BTreeSet::from([0]) } else { BTreeSet::new() },
                        };
                        all.push(Member { writes, holds: units.map(hold).collect() });
                    }
                }
            }
        }
        all
    }
}

fn value(unit: usize, element: usize) -> [u8; 4] {
    ((unit * 1_000_003 + element) as u32).wrapping_mul(2_654_435_769).to_le_bytes()
}

/// The bytes that a rank holds, by the definition of a split.
fn held(unit: usize, spec: &ParameterSpec, range: Range<usize>) -> Vec<u8> {
    let runs = spec.whole_runs(range).into_iter();
    runs.flat_map(|(run, first)| first..first + run.len()).flat_map(|element| value(unit, element)).collect()
}

/// The tensors that a rank writes: the parameters, and state that is stored flat.
fn snapshot_of(member: &Member) -> Snapshot<'static> {
    let part = |name: &str, flat: bool| {
        let of = |(unit, spec, range): &(usize, ParameterSpec, Range<usize>)| {
            let pieces = member.writes.pieces(*unit, spec, range);
            let all = held(*unit, spec, range.clone());
            let places = pieces.iter().flat_map(PlacedRuns::places);
            let bytes: Vec<u8> = places.flat_map(|place| all[4 * place.start..4 * place.end].to_vec()).collect();
            let runs: Vec<_> = pieces.into_iter().map(|placed| placed.runs).collect();
            let shape = spec.whole_shape().to_vec();
            let shape = if flat { vec![shape.iter().product()] } else { shape };
            let region = Region { name: format!("u{unit}"), dtype: DType::F32, shape, runs, bytes: bytes.into() };
            (region.elements() > 0).then_some(region)
        };
        let regions = member.holds.iter().filter_map(of).collect();
        SnapshotPart { name: name.to_owned(), regions, required: (0..UNITS).map(|unit| format!("u{unit}")).collect() }
    };
    let parts = vec![part(MODEL, false), part(OPTIMIZER, true)];
    Snapshot { step: 1, parts, state: serde_json::Value::Null, attachments: Vec::new() }
}

/// Writes a checkpoint on as many threads as there are snapshots. Returns the first error of rank
/// 0.
fn write(run: &Path, snapshots: Vec<Snapshot<'static>>) -> Result<(), CheckpointError> {
    let (store, _) = CheckpointStore::open(run, Retention { keep_last: 1, keep_best: false })?;
    let mut store = Some(store);
    let worlds = trainyard_comm::local::World::new(snapshots.len());
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().zip(snapshots).map(|(world, snapshot)| {
            let store = store.take();
            scope.spawn(move || {
                let mut writer = BackgroundWriter::with_others(run, store, world)?;
                writer.submit(snapshot)?;
                writer.finish().map(drop)
            })
        });
        let ends: Vec<_> = ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect();
        ends.into_iter().next().unwrap()
    })
}

/// Reads what `member` holds and compares every bit.
fn check_reads(checkpoint: &Checkpoint, member: &Member) {
    for (unit, spec, range) in &member.holds {
        let want = held(*unit, spec, range.clone());
        let wanted: Vec<_> = placed(spec, range, range.clone()).into_iter().map(|(placed, _)| placed).collect();
        for part in [MODEL, OPTIMIZER] {
            let mut got = vec![0; want.len()];
            checkpoint.read_runs(part, &format!("u{unit}"), &wanted, &mut got).unwrap();
            assert!(got == want, "{part} {unit} {:?} {range:?} from {:?}", spec.split, checkpoint.manifest().parts);
        }
    }
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn shapes(draw: &mut Draw) -> Vec<Vec<usize>> {
    let shape = |_| match draw.below(4) {
        0 => vec![1 + draw.below(40)],
        1 => vec![1 + draw.below(4), 1 + draw.below(4), 1 + draw.below(5)],
        _ => vec![1 + draw.below(12), 1 + draw.below(12)],
    };
    (0..UNITS).map(shape).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_layout_goes_on_from_any_other(seed in any::<u64>()) {
        let draw = &mut Draw(seed);
        let shapes = shapes(draw);
        let run = scratch();
        let written = Layout::draw(&shapes, draw);
        write(run.path(), written.members().iter().map(snapshot_of).collect()).unwrap();
        let found = find_latest(run.path()).unwrap().unwrap();
        for layout in [&written, &Layout::draw(&shapes, draw), &Layout::draw(&shapes, draw)] {
            layout.members().iter().for_each(|member| check_reads(&found.checkpoint, member));
        }
        // Flat, as exports and tools read.
        for (unit, shape) in shapes.iter().enumerate() {
            let spec = &whole(shape, 1)[0];
            let mut got = vec![0; 4 * spec.elements()];
            found.checkpoint.read(MODEL, &format!("u{unit}"), 0..spec.elements(), &mut got).unwrap();
            prop_assert_eq!(got, held(unit, spec, 0..spec.elements()));
        }
        // Every element is written once, so the files are no larger than that.
        let tensors: usize = shapes.iter().map(|shape| 2 * 4 * shape.iter().product::<usize>()).sum();
        let entries = found.checkpoint.manifest().parts.values().flat_map(|tensors| tensors.values());
        let listed: usize = entries
            .map(|entry| match entry.pieces.as_slice() {
                [] => entry.elements(),
                pieces => pieces.iter().map(|piece| piece.elements().elements()).sum(),
            })
            .sum();
        prop_assert_eq!(4 * listed, tensors);
    }

    /// A piece that no rank writes, or two write, is noticed before there is a checkpoint; a byte
    /// that changes later, or a file that goes, when it is read.
    #[test]
    fn missing_and_damaged_pieces_are_told(seed in any::<u64>(), harm in 0usize..4) {
        let draw = &mut Draw(seed);
        let shapes = shapes(draw);
        let run = scratch();
        let mut snapshots: Vec<_> = Layout::draw(&shapes, draw).members().iter().map(snapshot_of).collect();
        let filled: Vec<_> = (0..snapshots.len()).filter(|rank| !snapshots[*rank].parts[0].regions.is_empty()).collect();
        let victim = filled[draw.below(filled.len())];
        let regions = &mut snapshots[victim].parts[0].regions;
        let lost = regions.swap_remove(draw.below(regions.len()));
        if harm == 0 {
            let error = write(run.path(), snapshots).unwrap_err().to_string();
            prop_assert!(error.contains("written by no rank"), "{}", error);
            return Ok(());
        }
        regions.push(lost.clone());
        if harm == 1 {
            let other = (victim + 1) % snapshots.len();
            let twice = &mut snapshots[other].parts[0].regions;
            prop_assume!(other != victim);
            match twice.iter_mut().find(|region| region.name == lost.name) {
                Some(region) => {
                    let mut bytes = Vec::new();
                    let mut take = |chunk: &[u8]| { bytes.extend_from_slice(chunk); Ok(()) };
                    region.bytes.chunks(64, &mut take).unwrap();
                    lost.bytes.chunks(64, &mut take).unwrap();
                    region.runs.extend(lost.runs);
                    region.bytes = bytes.into();
                }
                None => twice.push(lost),
            }
            let error = write(run.path(), snapshots).unwrap_err().to_string();
            prop_assert!(error.contains("were written twice"), "{}", error);
            return Ok(());
        }
        write(run.path(), snapshots).unwrap();
        let folder = find_latest(run.path()).unwrap().unwrap().checkpoint.path().to_owned();
        let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect();
        files.sort();
        let file = &files[draw.below(files.len())];
        if harm == 2 {
            std::fs::remove_file(file).unwrap();
        } else {
            let mut bytes = std::fs::read(file).unwrap();
            let at = draw.below(bytes.len());
            bytes[at] ^= 1 << draw.below(8);
            std::fs::write(file, bytes).unwrap();
        }
        let error = find_latest(run.path()).unwrap_err().to_string();
        prop_assert!(error.contains(file.file_name().unwrap().to_str().unwrap()), "{}", error);
    }
}

/// The text of the manifest: runs are told only where there are some, and the version is the lowest
/// that has them.
#[test]
fn the_manifest_has_the_lowest_version_that_suffices() {
    let piece = |local: Range<usize>, whole: Range<usize>| Piece { local, whole, holders: 1, owned: true };
    let part = |dim: usize, pieces: Vec<Piece>| {
        let mut spec = whole(&[4, 6], 1).remove(0);
        spec.shape[dim] = pieces.iter().map(|piece| piece.local.len()).sum();
        spec.split = Some(Split { whole: vec![4, 6], dim, outer: 0, pieces, shared: Vec::new() });
        spec
    };
    let manifest = |parts: [(ParameterSpec, Range<usize>); 2]| {
        let run = scratch();
        let members = parts.map(|(spec, held)| Member { writes: Writes::all(), holds: vec![(0, spec, held)] });
        let mut snapshots: Vec<_> = members.iter().map(snapshot_of).collect();
        snapshots[0].parts.iter_mut().for_each(|part| part.required.retain(|name| name == "u0"));
        write(run.path(), snapshots).unwrap();
        let path = run.path().join("checkpoints/step-00000001/manifest.json");
        let manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        (manifest["version"].clone(), manifest["parts"]["model"]["u0"]["pieces"].clone())
    };
    let file = |rank: usize| format!("model.rank-0000{rank}.safetensors");
    use serde_json::json;
    let unsplit = &whole(&[4, 6], 1)[0];
    assert_eq!(
        manifest([(unsplit.clone(), 0..9), (unsplit.clone(), 9..24)]),
        (json!(2), json!([{ "file": file(0), "start": 0, "end": 9 }, { "file": file(1), "start": 9, "end": 24 }]))
    );
    assert_eq!(
        manifest([
            (part(0, vec![piece(0..1, 0..1), piece(1..2, 3..4)]), 0..12),
            (part(0, vec![piece(0..2, 1..3)]), 0..12)
        ]),
        (
            json!(3),
            json!([
                { "file": file(0), "start": 0, "end": 6 },
                { "file": file(1), "start": 6, "end": 18 },
                { "file": file(0), "start": 18, "end": 24, "at": 6 },
            ])
        )
    );
    assert_eq!(
        manifest([(part(1, vec![piece(0..4, 0..4)]), 0..16), (part(1, vec![piece(0..2, 4..6)]), 0..8)]),
        (
            json!(3),
            json!([
                { "file": file(0), "start": 0, "end": 4, "runs": 4, "stride": 6 },
                { "file": file(1), "start": 4, "end": 6, "runs": 4, "stride": 6 },
            ])
        )
    );
}
