//! The times of recent steps: for each rank a file with one short block a step.
//!
//! A block holds, for every instruction, the time that its lane waited before it and the time that
//! it took, in ticks of 256 ns and as variable-length numbers. Starts follow from the end of the
//! instruction before on the same lane. An instruction takes some four bytes.
//!
//! A step's block is written in one piece when the step ends, so a killed run loses none but the
//! last. Two limits keep the file small. Steps are left out while the file has more than
//! [`BYTES_A_STEP`] for each step so far. When a file is full, it replaces the one before it, so
//! that between one and two times [`FILE_BYTES`] of recent steps are on disk.

use crate::{RecordError, trace_folder};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use trainyard_program::{Lane, Program};

/// Mean bytes of a step on disk, over all steps of a sitting.
pub const BYTES_A_STEP: u64 = 3 << 10;
/// Bytes after which a new file is begun.
pub const FILE_BYTES: u64 = 8 << 20;
/// Steps that are written whatever their size, so that short runs can be explained.
const FIRST_STEPS: u64 = 32;

const TICK_NS: u64 = 256;
const FORMAT: &str = "trainyard steps 1";

/// Times of one instruction, counted from the start of its step's execution.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Times {
    /// Time that the lane waited for other lanes, directly before `start`.
    pub waited: Duration,
    /// Start.
    pub start: Duration,
    /// End.
    pub end: Duration,
}

/// The times of one step of one rank.
#[derive(Clone, PartialEq, Debug)]
pub struct Step {
    /// Number of the step, from 1.
    pub step: u64,
    /// The program that it ran, by its place in [`Programs::programs`](crate::programs::Programs).
    pub program: usize,
    /// Start of the execution, since the Unix epoch.
    pub began: Duration,
    /// Time between the end of the step before and the start of the execution: ranks agree on the
    /// next step, and the step before is recorded.
    pub before: Duration,
    /// Time from the start of the execution to its end.
    pub length: Duration,
    /// The part of `before` in which this rank waited for the others to agree.
    pub agreed: Duration,
    /// The times of every instruction of the program.
    pub instructions: Vec<Times>,
}

impl Step {
    /// Seconds of the whole step, as `metrics.jsonl` counts them: from the end of the one before.
    pub fn seconds(&self) -> f64 {
        (self.before + self.length).as_secs_f64()
    }
}

/// The first line of a file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    rank: u32,
    /// Name of the host, whose clock `began` is.
    host: String,
    /// A number that differs between programs with other instructions.
    program: u64,
}

/// Writes `trace/rank-N.spans`.
#[derive(Debug)]
pub struct StepWriter {
    file: File,
    path: PathBuf,
    header: Vec<u8>,
    /// For each program, the lane of each instruction.
    lanes: Vec<Vec<u8>>,
    /// The two clocks, read at the same moment.
    clock: (Instant, Duration),
    written: u64,
    in_file: u64,
    steps: u64,
    block: Vec<u8>,
}

/// The paths of a rank's files, older first.
fn paths(run: &Path, rank: u32) -> [PathBuf; 2] {
    let folder = trace_folder(run);
    [folder.join(format!("rank-{rank}.old.spans")), folder.join(format!("rank-{rank}.spans"))]
}

/// The path of the newest steps of `rank`.
pub fn path(run: &Path, rank: u32) -> PathBuf {
    let [_, new] = paths(run, rank);
    new
}

impl StepWriter {
    /// Begins a file in the folder `run`, for steps of a rank's `programs`, of which there is at
    /// least one. The file of an earlier sitting is kept as the older one if it has the same
    /// programs.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn create(run: &Path, programs: &[Program], host: &str) -> Result<StepWriter, RecordError> {
        let header = Header {
            format: FORMAT.to_owned(),
            rank: programs[0].rank,
            host: host.to_owned(),
            program: fingerprint(programs),
        };
        let folder = trace_folder(run);
        std::fs::create_dir_all(&folder).map_err(RecordError::io("write", &folder))?;
        let [old, new] = paths(run, header.rank);
        match read_header(&new) {
            Ok(Some(before)) if before.program == header.program => {
                std::fs::rename(&new, &old).map_err(RecordError::io("write", &old))?;
            }
            // Steps of another program or another version are of no use beside these.
            _ => remove(&old)?,
        }
        let mut line = serde_json::to_vec(&header).expect("plain data is JSON");
        line.push(b'\n');
        let file = begin(&new, &line)?;
        let clock = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        Ok(StepWriter {
            file,
            path: new,
            header: line,
            lanes: lanes(programs),
            clock,
            written: 0,
            in_file: 0,
            steps: 0,
            block: Vec::new(),
        })
    }

    /// The time of `moment` since the Unix epoch.
    pub fn since_epoch(&self, moment: Instant) -> Duration {
        match moment.checked_duration_since(self.clock.0) {
            Some(later) => self.clock.1 + later,
            None => self.clock.1.saturating_sub(self.clock.0 - moment),
        }
    }

    /// Writes a step, unless the file has its share of the disk already. Returns true if it was
    /// written.
    ///
    /// # Errors
    /// A file that cannot be written.
    ///
    /// # Panics
    /// The step does not have the times of every instruction of its program.
    pub fn write(&mut self, step: &Step) -> Result<bool, RecordError> {
        self.steps += 1;
        if self.steps > FIRST_STEPS && self.written >= BYTES_A_STEP * self.steps {
            return Ok(false);
        }
        encode(step, &self.lanes[step.program], &mut self.block);
        if self.in_file + self.block.len() as u64 > FILE_BYTES {
            let old = self.path.with_extension("old.spans");
            std::fs::rename(&self.path, &old).map_err(RecordError::io("write", &old))?;
            self.file = begin(&self.path, &self.header)?;
            self.in_file = 0;
        }
        self.file.write_all(&self.block).map_err(RecordError::io("write", &self.path))?;
        self.in_file += self.block.len() as u64;
        self.written += self.block.len() as u64;
        Ok(true)
    }
}

fn begin(path: &Path, header: &[u8]) -> Result<File, RecordError> {
    File::create(path)
        .and_then(|mut file| file.write_all(header).map(|()| file))
        .map_err(RecordError::io("write", path))
}

fn remove(path: &Path) -> Result<(), RecordError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(RecordError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// A number that differs between programs with other instructions.
fn fingerprint(programs: &[Program]) -> u64 {
    let text = serde_json::to_vec(programs).expect("plain data is JSON");
    // Fowler, Noll and Vo: FNV-1a.
    text.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// For each program, the lane of each instruction.
fn lanes(programs: &[Program]) -> Vec<Vec<u8>> {
    let lanes = |program: &Program| program.instructions.iter().map(|i| i.action.lane() as u8).collect();
    programs.iter().map(lanes).collect()
}

/// The recorded steps of a rank, oldest first, and the name of its host. A step that was repeated
/// after a resume is there once, as it ran last.
///
/// # Errors
/// A file that cannot be read, or that is something else.
pub fn read(run: &Path, rank: u32, programs: &[Program]) -> Result<(String, Vec<Step>), RecordError> {
    let mut steps: Vec<Step> = Vec::new();
    let mut host = String::new();
    let (program, lanes) = (fingerprint(programs), lanes(programs));
    for path in paths(run, rank) {
        let Some(header) = read_header(&path)?.filter(|header| header.program == program) else { continue };
        host = header.host;
        for step in read_file(&path, &lanes)? {
            // A resumed run repeats steps.
            while steps.last().is_some_and(|last| last.step >= step.step) {
                steps.pop();
            }
            steps.push(step);
        }
    }
    Ok((host, steps))
}

fn read_header(path: &Path) -> Result<Option<Header>, RecordError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(RecordError::io("read", path)(error)),
    };
    let mut line = Vec::new();
    BufReader::new(file).take(1 << 16).read_until(b'\n', &mut line).map_err(RecordError::io("read", path))?;
    let header: Header = serde_json::from_slice(&line).map_err(|error| RecordError::format(path, error))?;
    match header.format == FORMAT {
        true => Ok(Some(header)),
        false => Err(RecordError::format(path, format!("its format is `{}`, not `{FORMAT}`", header.format))),
    }
}

fn read_file(path: &Path, lanes: &[Vec<u8>]) -> Result<Vec<Step>, RecordError> {
    let data = std::fs::read(path).map_err(RecordError::io("read", path))?;
    let begin = data.iter().position(|byte| *byte == b'\n').map_or(data.len(), |end| end + 1);
    let mut rest = &data[begin..];
    let mut steps = Vec::new();
    while !rest.is_empty() {
        let mut head = rest;
        // The last block of a run that was killed, or that goes on, may not be whole yet.
        let Some(length) = take(&mut head) else { break };
        let Some(block) = usize::try_from(length).ok().and_then(|length| head.get(..length)) else { break };
        let step = decode(block, lanes).ok_or_else(|| RecordError::format(path, "a step of it is damaged"))?;
        steps.push(step);
        rest = &head[block.len()..];
    }
    Ok(steps)
}

/// Writes the block of a step, with its length before it, over `block`.
fn encode(step: &Step, lanes: &[u8], block: &mut Vec<u8>) {
    assert_eq!(step.instructions.len(), lanes.len(), "a step has the times of every instruction");
    block.clear();
    let mut body = Vec::with_capacity(5 * lanes.len() + 40);
    put(&mut body, step.step);
    put(&mut body, step.program as u64);
    put(&mut body, step.began.as_nanos() as u64);
    for time in [step.before, step.length, step.agreed] {
        put(&mut body, ticks(time));
    }
    let mut ends = [0; Lane::ALL.len()];
    for (times, lane) in step.instructions.iter().zip(lanes) {
        let end = &mut ends[usize::from(*lane)];
        let start = ticks(times.start).max(*end);
        let waited = ticks(times.waited).min(start - *end);
        let took = ticks(times.end).saturating_sub(start);
        [waited, start - *end - waited, took].into_iter().for_each(|number| put(&mut body, number));
        *end = start + took;
    }
    put(block, body.len() as u64);
    block.append(&mut body);
}

fn decode(mut block: &[u8], lanes: &[Vec<u8>]) -> Option<Step> {
    let rest = &mut block;
    let (step, program, began) = (take(rest)?, take(rest)? as usize, Duration::from_nanos(take(rest)?));
    let lanes = lanes.get(program)?;
    let [before, length, agreed] = [time(take(rest)?), time(take(rest)?), time(take(rest)?)];
    let mut ends = [0u64; Lane::ALL.len()];
    let mut instructions = Vec::with_capacity(lanes.len());
    for lane in lanes {
        let end = &mut ends[usize::from(*lane)];
        let [waited, gap, took] = [take(rest)?, take(rest)?, take(rest)?];
        let start = end.checked_add(waited)?.checked_add(gap)?;
        *end = start.checked_add(took).filter(|end| *end < 1 << 54)?;
        instructions.push(Times { waited: time(waited), start: time(start), end: time(*end) });
    }
    rest.is_empty().then_some(Step { step, program, began, before, length, agreed, instructions })
}

fn ticks(time: Duration) -> u64 {
    (time.as_nanos() as u64 + TICK_NS / 2) / TICK_NS
}

fn time(ticks: u64) -> Duration {
    Duration::from_nanos(ticks.saturating_mul(TICK_NS))
}

/// Appends a number, seven bits a byte, low bits first.
fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn take(data: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = data.split_first()?;
        *data = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use trainyard_program::{Mesh, ModelShape, StepKind, Strategy, UnitShape, lower_rank};

    /// Programs of an inner step without and with a snapshot, and of an outer step.
    fn programs() -> [Program; 3] {
        let unit = |name: &str| UnitShape { name: name.into(), flat_elements: 1, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], ..ModelShape::default() };
        let with = |(kind, snapshot)| Strategy { kind, snapshot, ..Strategy::new(2) };
        let steps = [(StepKind::Inner, false), (StepKind::Inner, true), (StepKind::Outer, false)];
        steps.map(|step| lower_rank(&model, &Mesh::data(2, 1), &with(step), 0).unwrap())
    }

    fn step(number: u64, program: usize, ticks: u64) -> Step {
        let instructions = &programs()[program].instructions;
        let mut ends = [Duration::ZERO; Lane::ALL.len()];
        let one = |(index, instruction): (usize, &trainyard_program::Instruction)| {
            let end = &mut ends[instruction.action.lane() as usize];
            let waited = Duration::from_nanos(TICK_NS * (index as u64 % 3));
            let start = *end + waited + Duration::from_nanos(TICK_NS);
            *end = start + Duration::from_nanos(TICK_NS * ticks);
            Times { waited, start, end: *end }
        };
        Step {
            step: number,
            program,
            began: Duration::from_nanos(1_790_000_000_123_456_789),
            before: Duration::from_nanos(TICK_NS * 7),
            length: Duration::from_nanos(TICK_NS * 100_000),
            agreed: Duration::from_nanos(TICK_NS * 2),
            instructions: instructions.iter().enumerate().map(one).collect(),
        }
    }

    #[test]
    fn steps_are_read_as_they_were_written_also_after_a_kill_and_a_resume() {
        let folder = tempfile::tempdir().unwrap();
        let programs = programs();
        let steps = [step(1, 0, 3), step(2, 1, 40_000), step(3, 2, 1)];
        let mut writer = StepWriter::create(folder.path(), &programs, "here").unwrap();
        for step in &steps {
            assert!(writer.write(step).unwrap());
        }
        assert_eq!(read(folder.path(), 0, &programs).unwrap(), ("here".to_owned(), steps.to_vec()));
        let file = path(folder.path(), 0);
        let whole = std::fs::read(&file).unwrap();
        std::fs::write(&file, &whole[..whole.len() - 3]).unwrap();
        assert_eq!(read(folder.path(), 0, &programs).unwrap().1, steps[..2]);
        // The run goes on from step 1.
        let again = step(2, 0, 9);
        StepWriter::create(folder.path(), &programs, "here").unwrap().write(&again).unwrap();
        assert_eq!(read(folder.path(), 0, &programs).unwrap().1, [steps[0].clone(), again]);
    }

    #[test]
    fn a_file_of_another_program_is_not_mixed_in_and_another_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let programs = programs();
        StepWriter::create(folder.path(), &programs, "").unwrap().write(&step(1, 0, 3)).unwrap();
        let mut others = programs.clone();
        others[2].micro_batches = 7;
        assert!(read(folder.path(), 0, &others).unwrap().1.is_empty());
        StepWriter::create(folder.path(), &others, "").unwrap();
        assert!(read(folder.path(), 0, &programs).unwrap().1.is_empty());
        std::fs::write(path(folder.path(), 0), "{\"something\": 1}\n").unwrap();
        let error = read(folder.path(), 0, &programs).unwrap_err().to_string();
        assert!(error.contains("rank-0.spans is not a record of a run"), "{error}");
    }

    #[test]
    fn the_disk_that_a_long_run_takes_is_limited() {
        let folder = tempfile::tempdir().unwrap();
        let programs = programs();
        let mut writer = StepWriter::create(folder.path(), &programs, "").unwrap();
        // A full file replaces the one before.
        writer.in_file = FILE_BYTES;
        writer.write(&step(1, 0, 3)).unwrap();
        assert!(folder.path().join("trace/rank-0.old.spans").is_file());
        // Steps whose blocks are larger than allowed are written now and then.
        (writer.steps, writer.written) = (FIRST_STEPS, BYTES_A_STEP * (FIRST_STEPS + 2));
        let written: Vec<bool> = (2..6).map(|number| writer.write(&step(number, 0, 3)).unwrap()).collect();
        assert_eq!(written, [false, false, true, true]);
    }

    proptest! {
        #[test]
        fn damaged_blocks_are_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes, &lanes(&programs()));
        }
    }
}
