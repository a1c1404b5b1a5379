//! The timeline of a step over all ranks, from the traces in a run's folder.
//!
//! A trace has one event a line and can be long, so its lines are indexed by step once, and again
//! from where the index ends when the file has grown.

use crate::inside::Inside;
use crate::run::files;
use crate::store::Run;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use trainyard_base::lock;

/// A longer part of a trace is not shown.
const STEP_BYTES_MAX: u64 = 64 << 20;
/// More ranks are not shown.
const RANKS_MAX: usize = 64;

/// The traces that were read.
#[derive(Debug, Default)]
pub struct Timelines {
    traces: Mutex<BTreeMap<PathBuf, Index>>,
}

/// Where the steps of a trace are.
#[derive(Debug, Default)]
struct Index {
    inode: u64,
    read: u64,
    lanes: BTreeMap<u64, String>,
    /// The bytes of each step.
    steps: BTreeMap<u64, (u64, u64)>,
}

/// A step on all ranks.
#[derive(Debug, Serialize)]
pub struct Timeline {
    /// The step.
    pub step: u64,
    /// The ranks.
    pub ranks: Vec<RankTimeline>,
}

/// A step on one rank.
#[derive(Debug, Serialize)]
pub struct RankTimeline {
    /// The rank.
    pub rank: u64,
    /// The names of lanes, by number.
    pub lanes: BTreeMap<u64, String>,
    /// The instructions.
    pub spans: Vec<Span>,
}

/// An instruction. Times are in microseconds from the first one of the rank.
#[derive(Debug, Serialize)]
pub struct Span {
    /// The instruction and its unit.
    pub name: String,
    /// The number of its lane.
    pub lane: u64,
    /// The start.
    pub start: f64,
    /// The duration.
    pub length: f64,
    /// The time that its lane waited before it.
    pub waited: f64,
    /// Bytes that it moved.
    pub bytes: f64,
}

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    name: String,
    #[serde(default)]
    ph: String,
    #[serde(default)]
    tid: u64,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Args,
}

#[derive(Default, Deserialize)]
struct Args {
    #[serde(default)]
    name: String,
    step: Option<u64>,
    #[serde(default)]
    waited_us: f64,
    #[serde(default)]
    bytes: f64,
}

impl Timelines {
    /// The steps that have a timeline.
    ///
    /// # Errors
    ///
    /// A trace cannot be read.
    pub fn steps(&self, inside: &Inside, run: &Run) -> io::Result<Vec<u64>> {
        let mut steps = Vec::new();
        for (_, path) in traces(&run.folder) {
            self.with(inside, &path, |index, _| {
                steps.extend(index.steps.keys());
                Ok(())
            })?;
        }
        steps.sort_unstable();
        steps.dedup();
        Ok(steps)
    }

    /// The timeline of the recorded step nearest to `step`.
    ///
    /// # Errors
    ///
    /// A trace cannot be read.
    pub fn step(&self, inside: &Inside, run: &Run, step: f64) -> io::Result<Option<Timeline>> {
        let steps = self.steps(inside, run)?;
        let distance = |at: u64| (at as f64 - step).abs();
        let Some(step) = steps.into_iter().min_by(|a, b| distance(*a).total_cmp(&distance(*b))) else {
            return Ok(None);
        };
        let mut ranks = Vec::new();
        for (rank, path) in traces(&run.folder) {
            let found = self.with(inside, &path, |index, file| {
                let Some((start, end)) = index.steps.get(&step) else { return Ok(None) };
                let mut bytes = vec![0; (end - start).min(STEP_BYTES_MAX) as usize];
                file.read_exact_at(&mut bytes, *start)?;
                Ok(Some((index.lanes.clone(), bytes)))
            })?;
            let Some(Some((lanes, bytes))) = found else { continue };
            let events = bytes.split(|byte| *byte == b'\n').filter_map(event);
            let events: Vec<Event> = events.filter(|event| event.args.step == Some(step)).collect();
            let origin = events.iter().map(|event| event.ts).fold(f64::INFINITY, f64::min);
            let spans = events.into_iter().map(|event| Span {
                start: event.ts - origin,
                length: event.dur,
                waited: event.args.waited_us,
                bytes: event.args.bytes,
                lane: event.tid,
                name: event.name,
            });
            ranks.push(RankTimeline { rank, lanes, spans: spans.collect() });
        }
        Ok(Some(Timeline { step, ranks }))
    }

    fn with<T>(
        &self,
        inside: &Inside,
        path: &Path,
        look: impl FnOnce(&Index, &std::fs::File) -> io::Result<T>,
    ) -> io::Result<Option<T>> {
        let file = match inside.open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut traces = lock(&self.traces);
        let index = traces.entry(path.to_owned()).or_default();
        index.read_on(&file)?;
        look(index, &file).map(Some)
    }
}

impl Index {
    fn read_on(&mut self, file: &std::fs::File) -> io::Result<()> {
        let about = file.metadata()?;
        if about.ino() != self.inode || about.len() < self.read {
            *self = Index { inode: about.ino(), ..Index::default() };
        }
        if about.len() == self.read {
            return Ok(());
        }
        let mut reader = BufReader::with_capacity(1 << 20, file);
        reader.seek(SeekFrom::Start(self.read))?;
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
            let end = self.read + line.len() as u64;
            if let Some(step) = step_of(&line) {
                let entry = self.steps.entry(step).or_insert((self.read, end));
                entry.1 = end;
            } else if let Some(event) = event(&line).filter(|event| event.name == "thread_name") {
                self.lanes.insert(event.tid, event.args.name);
            }
            self.read = end;
            line.clear();
        }
        Ok(())
    }
}

/// The traces in a run's folder, by rank.
fn traces(folder: &Path) -> Vec<(u64, PathBuf)> {
    let entries = std::fs::read_dir(folder.join(files::TRACE)).into_iter().flatten().flatten();
    let rank = |name: &str| name.strip_prefix("rank-")?.strip_suffix(".json")?.parse().ok();
    let mut found: Vec<(u64, PathBuf)> =
        entries.filter_map(|entry| Some((rank(entry.file_name().to_str()?)?, entry.path()))).collect();
    found.sort();
    found.truncate(RANKS_MAX);
    found
}

/// The step of an event, found without reading all of it.
fn step_of(line: &[u8]) -> Option<u64> {
    const KEY: &[u8] = b"\"step\":";
    let at = line.windows(KEY.len()).rposition(|part| part == KEY)? + KEY.len();
    let digits = line[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&line[at..at + digits]).ok()?.parse().ok()
}

fn event(line: &[u8]) -> Option<Event> {
    let line = line.trim_ascii().strip_suffix(b",").unwrap_or(line.trim_ascii());
    serde_json::from_slice(line).ok().filter(|event: &Event| !event.ph.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;
    use std::io::Write;

    #[test]
    fn steps_are_found_in_traces_that_grow() {
        let root = tempfile::tempdir().unwrap();
        let trace = root.path().join("a/trace");
        std::fs::create_dir_all(&trace).unwrap();
        std::fs::write(root.path().join("a/config.toml"), "").unwrap();
        let store = Store::open(root.path()).unwrap();
        let run = store.run("a").unwrap().unwrap();
        let timelines = Timelines::default();
        assert!(timelines.step(store.inside(), &run, 3.0).unwrap().is_none());

        let mut file = std::fs::File::create(trace.join("rank-1.json")).unwrap();
        let event = |step: u64, ts: f64| {
            format!(
                r#"{{"name":"forward head","ph":"X","ts":{ts},"dur":5.0,"pid":1,"tid":2,"args":{{"step":{step},"waited_us":1.5,"bytes":7}}}},"#
            )
        };
        let lane = r#"{"name":"thread_name","ph":"M","pid":1,"tid":2,"args":{"name":"compute"}},"#;
        writeln!(file, "[\n{lane}\n{}\n{}", event(3, 10.0), event(3, 12.0)).unwrap();
        assert_eq!(timelines.steps(store.inside(), &run).unwrap(), [3]);
        writeln!(file, "{}\n{}", event(4, 20.0), &event(4, 20.0)[..30]).unwrap();
        assert_eq!(timelines.steps(store.inside(), &run).unwrap(), [3, 4]);
        let step = timelines.step(store.inside(), &run, 3.2).unwrap().unwrap();
        let rank = &step.ranks[0];
        assert_eq!((step.step, rank.rank, rank.lanes[&2].as_str(), rank.spans.len()), (3, 1, "compute", 2));
        let span = &rank.spans[1];
        assert_eq!((span.start, span.length, span.waited, span.bytes, span.lane), (2.0, 5.0, 1.5, 7.0, 2));
    }
}
