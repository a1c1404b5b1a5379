//! The folder of a run's checkpoints: writes checkpoints, prunes old ones, and finds the newest
//! that is whole.

use super::fault::{Disk, Fault};
use super::group::{Group, Trouble};
use super::read::Checkpoint;
use super::write::{Partial, Sizes, Writer, Written, check, size, write_parts, write_rest};
use super::{CheckpointError, Snapshot};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Name of the file, in the folder of checkpoints, that records the best evaluation.
const BEST: &str = "best.json";
/// Time to wait for the lock of a run: a process that was killed holds it until the system has
/// ended all its threads.
const LOCK_WAIT: Duration = Duration::from_secs(3);
/// Time between two attempts to take the lock.
const LOCK_RETRY: Duration = Duration::from_millis(20);

/// The rule for keeping old checkpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retention {
    /// Number of newest checkpoints that are kept, at least one.
    pub keep_last: usize,
    /// True if the checkpoint with the lowest evaluation loss is kept too.
    pub keep_best: bool,
}

/// The best evaluation so far.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Best {
    /// Completed steps at the evaluation.
    pub step: u64,
    /// Loss of the evaluation.
    pub loss: f64,
}

/// A checkpoint that was passed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// The reason.
    pub reason: String,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was passed over: {}", self.path.display(), self.reason)
    }
}

/// The newest checkpoint that is whole.
#[derive(Debug)]
pub struct Found {
    /// Completed optimizer steps.
    pub step: u64,
    /// The checkpoint, every checksum verified.
    pub checkpoint: Checkpoint,
    /// Newer ones that are not whole, newest first.
    pub skipped: Vec<Skipped>,
}

/// Writes the checkpoints of one run. Opening it takes a lock, so that one process at a time
/// writes; the lock ends with the store or the process.
#[derive(Debug)]
pub struct CheckpointStore {
    folder: PathBuf,
    retention: Retention,
    sizes: Sizes,
    disk: Disk,
    /// The lock; held, never read.
    _lock: File,
}

impl CheckpointStore {
    /// Opens `RUN/checkpoints`, creating it if need be, and clears the remains of a crash. The
    /// second result has a line for each cleanup.
    pub fn open(run: &Path, retention: Retention) -> Result<(CheckpointStore, Vec<String>), CheckpointError> {
        let folder = run.join("checkpoints");
        fs::create_dir_all(&folder).map_err(CheckpointError::io("create", &folder))?;
        let lock_path = folder.join(".lock");
        let lock = File::create(&lock_path).map_err(CheckpointError::io("create", &lock_path))?;
        let begin = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if begin.elapsed() < LOCK_WAIT => thread::sleep(LOCK_RETRY),
                Err(TryLockError::WouldBlock) => return Err(CheckpointError::Locked { path: folder }),
                Err(TryLockError::Error(error)) => return Err(CheckpointError::io("lock", &lock_path)(error)),
            }
        }
        let retention = Retention { keep_last: retention.keep_last.max(1), ..retention };
        let (sizes, disk) = (Sizes::default(), Disk::default());
        let mut store = CheckpointStore { folder, retention, sizes, disk, _lock: lock };
        let notices = store.recover()?;
        Ok((store, notices))
    }

    /// Injects a fault into the changes to the disk, for tests.
    pub fn inject(&mut self, fault: Option<Fault>) {
        self.disk = Disk::with_fault(fault);
    }

    /// Number of changes to the disk since [`CheckpointStore::inject`].
    pub fn changes(&self) -> u64 {
        self.disk.position()
    }

    /// Sets the size at which a part continues in another file (1 GiB unless set), and the bytes of
    /// one write.
    pub fn set_sizes(&mut self, shard_bytes: usize, chunk_bytes: usize) {
        self.sizes = Sizes { shard_bytes, chunk_bytes: chunk_bytes.max(1) };
    }

    /// `RUN/checkpoints`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The newest checkpoint of this run that is whole: see [`find_latest`].
    pub fn find_latest(&self) -> Result<Option<Found>, CheckpointError> {
        latest_in(&self.folder)
    }

    /// Writes a checkpoint, which is durable when this returns, and prunes old ones. A checkpoint
    /// of the same step is replaced.
    ///
    /// # Errors
    ///
    /// Contradictions in the snapshot, and refusals of the operating system. After an error the
    /// checkpoints are as before, except for remains that `recover` clears.
    pub fn write(&mut self, snapshot: &Snapshot<'_>) -> Result<Written, CheckpointError> {
        self.write_with(snapshot, None)
    }

    /// As [`CheckpointStore::write`], for rank 0 of `group`, whose other ranks write their own
    /// parts.
    pub(super) fn write_with(
        &mut self,
        snapshot: &Snapshot<'_>,
        group: Option<&Group>,
    ) -> Result<Written, CheckpointError> {
        let begun = Instant::now();
        let step = snapshot.step;
        let (path, temporary) = (self.path(step), self.hidden(step, "tmp"));
        let bytes = match self.write_and_rename(snapshot, &path, &temporary, group) {
            Ok(bytes) => bytes,
            Err(error) => {
                // Errors are ignored: remains are hidden, and the next opening of the store clears
                // them.
                if temporary.exists() {
                    let _ = self.disk.remove_tree(&temporary);
                }
                return Err(match error {
                    CheckpointError::Io { source, path, .. }
                        if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) =>
                    {
                        CheckpointError::DiskFull { path, needed: size(snapshot) }
                    }
                    other => other,
                });
            }
        };
        let mut written = Written { step, path, bytes, seconds: 0.0, pruned: Vec::new(), notices: Vec::new() };
        match self.prune(step) {
            Ok(pruned) => written.pruned = pruned,
            Err(injected @ CheckpointError::Injected(_)) => return Err(injected),
            Err(error) => written.notices.push(format!("an old checkpoint stays: {error}")),
        }
        written.seconds = begun.elapsed().as_secs_f64();
        Ok(written)
    }

    fn write_and_rename(
        &mut self,
        snapshot: &Snapshot<'_>,
        path: &Path,
        temporary: &Path,
        group: Option<&Group>,
    ) -> Result<u64, CheckpointError> {
        let prepared = self.prepare(snapshot, temporary);
        let Some(group) = group else {
            prepared?;
            let own = write_parts(&mut self.disk, temporary, snapshot, self.sizes, Writer::ALONE)?;
            return self.commit(snapshot, path, temporary, vec![own]);
        };
        let told = group.tell_of(&prepared);
        prepared?;
        told?;
        let own = write_parts(&mut self.disk, temporary, snapshot, self.sizes, group.writer());
        let words = group.collect(&own.as_ref().map_err(|error| Trouble::of(error, 0)).cloned())?;
        let committed = own.and_then(|_| {
            let partials: Result<Vec<_>, Trouble> = words.into_iter().collect();
            self.commit(snapshot, path, temporary, partials.map_err(CheckpointError::Elsewhere)?)
        });
        let told = group.tell_of(&committed);
        let bytes = committed?;
        told.map(|()| bytes)
    }

    fn prepare(&mut self, snapshot: &Snapshot<'_>, temporary: &Path) -> Result<(), CheckpointError> {
        check(snapshot)?;
        if temporary.exists() {
            self.disk.remove_tree(temporary)?;
        }
        self.disk.create_dir(temporary)
    }

    fn commit(
        &mut self,
        snapshot: &Snapshot<'_>,
        path: &Path,
        temporary: &Path,
        partials: Vec<Partial>,
    ) -> Result<u64, CheckpointError> {
        let bytes = write_rest(&mut self.disk, temporary, snapshot, self.sizes, partials)?;
        let old = self.hidden(snapshot.step, "old");
        let replacing = path.exists();
        if replacing {
            // A record of the old checkpoint's evaluation does not hold for the new one.
            if self.best().is_some_and(|best| best.step == snapshot.step) {
                self.forget_best()?;
            }
            // A crash between the two renames leaves the old one hidden and whole; `recover` brings
            // it back.
            self.disk.rename(path, &old)?;
        }
        if let Err(error) = self.disk.rename(temporary, path) {
            if replacing {
                let _ = self.disk.rename(&old, path);
            }
            return Err(error);
        }
        self.disk.sync_dir(&self.folder)?;
        Ok(bytes)
    }

    /// Records an evaluation. Returns true if it is the best so far.
    pub fn record_evaluation(&mut self, step: u64, loss: f64) -> Result<bool, CheckpointError> {
        if !loss.is_finite() || self.best().is_some_and(|best| best.loss <= loss) {
            return Ok(false);
        }
        let text = serde_json::to_vec_pretty(&Best { step, loss })
            .map_err(|error| CheckpointError::Snapshot(format!("its loss is no JSON: {error}")))?;
        let path = self.folder.join(BEST);
        self.disk.replace(&path, &text)?;
        Ok(true)
    }

    /// Forgets the best evaluation if it is of a later step than `step`, from which the run
    /// resumes. Its checkpoint is damaged or belongs to another continuation.
    ///
    /// # Errors
    ///
    /// Refusals of the operating system.
    pub fn forget_best_after(&mut self, step: u64) -> Result<Option<Best>, CheckpointError> {
        let best = self.best().filter(|best| best.step > step);
        if best.is_some() {
            self.forget_best()?;
        }
        Ok(best)
    }

    fn forget_best(&mut self) -> Result<(), CheckpointError> {
        let path = self.folder.join(BEST);
        fs::remove_file(&path).map_err(CheckpointError::io("remove", &path))
    }

    /// The best evaluation whose checkpoint is still there.
    pub fn best(&self) -> Option<Best> {
        // A damaged record counts as none: the next evaluation writes another.
        best_in(&self.folder).unwrap_or_default()
    }

    /// True if there are checkpoints of later steps than `step`, whole or damaged.
    ///
    /// # Errors
    ///
    /// Refusals of the operating system.
    pub fn has_after(&self, step: u64) -> Result<bool, CheckpointError> {
        Ok(steps(&self.folder)?.last().is_some_and(|last| *last > step))
    }

    /// Moves the checkpoints of later steps than `step`, whole or damaged, into `folder`. The
    /// record of the best evaluation moves along if it is of a later step. Returns the moved steps,
    /// newest first.
    ///
    /// # Errors
    ///
    /// Refusals of the operating system. Checkpoints not yet moved then stay in place.
    pub fn move_after(&mut self, step: u64, folder: &Path) -> Result<Vec<u64>, CheckpointError> {
        fs::create_dir_all(folder).map_err(CheckpointError::io("create", folder))?;
        if self.best().is_some_and(|best| best.step > step) {
            let note = self.folder.join(BEST);
            fs::copy(&note, folder.join(BEST)).map_err(CheckpointError::io("copy", &note))?;
        }
        let later: Vec<u64> = steps(&self.folder)?.into_iter().rev().take_while(|later| *later > step).collect();
        for later in &later {
            self.disk.rename(&self.path(*later), &folder_of(folder, *later))?;
        }
        self.disk.sync_dir(folder)?;
        self.disk.sync_dir(&self.folder)?;
        Ok(later)
    }

    fn path(&self, step: u64) -> PathBuf {
        folder_of(&self.folder, step)
    }

    /// The name of a folder that is not, or no longer, a checkpoint.
    fn hidden(&self, step: u64, what: &str) -> PathBuf {
        hidden(&self.folder, step, what)
    }

    /// Removes older checkpoints that neither `keep_last` nor `keep_best` keeps. `newest` is known
    /// to be whole. Later steps are not touched: they are damaged or belong to another
    /// continuation.
    fn prune(&mut self, newest: u64) -> Result<Vec<u64>, CheckpointError> {
        let older: Vec<u64> = steps(&self.folder)?.into_iter().filter(|step| *step < newest).collect();
        let best = self.best().filter(|_| self.retention.keep_best).map(|best| best.step);
        let kept: BTreeSet<u64> = older.iter().rev().take(self.retention.keep_last - 1).copied().chain(best).collect();
        let mut pruned = Vec::new();
        for step in older.into_iter().filter(|step| !kept.contains(step)) {
            let trash = self.hidden(step, "trash");
            self.disk.rename(&self.path(step), &trash)?;
            // Without the sync a power loss could undo the rename after files are deleted.
            self.disk.sync_dir(&self.folder)?;
            self.disk.remove_tree(&trash)?;
            pruned.push(step);
        }
        let old = self.hidden(newest, "old");
        if old.exists() {
            self.disk.remove_tree(&old)?;
        }
        Ok(pruned)
    }

    /// Clears the remains of a crash. Half-written and half-removed folders are deleted; a
    /// checkpoint that was being replaced is restored.
    fn recover(&mut self) -> Result<Vec<String>, CheckpointError> {
        let mut notices = Vec::new();
        for name in names(&self.folder)? {
            let Some((step, what)) = name.strip_prefix(".step-").and_then(|rest| rest.split_once('.')) else {
                continue;
            };
            let Ok(step) = step.parse::<u64>() else { continue };
            let path = self.folder.join(&name);
            match what {
                "old" if !self.path(step).exists() => {
                    self.disk.rename(&path, &self.path(step))?;
                    notices.push(format!("brought back the checkpoint of step {step}, whose replacement was cut off"));
                }
                "tmp" | "trash" | "old" => {
                    self.disk.remove_tree(&path)?;
                    if what == "tmp" {
                        notices.push(format!("removed a half-written checkpoint of step {step}"));
                    }
                }
                _ => {}
            }
        }
        Ok(notices)
    }
}

/// The best evaluation in the folder of checkpoints whose checkpoint is still there.
///
/// # Errors
///
/// A record that cannot be read.
pub(super) fn best_in(checkpoints: &Path) -> Result<Option<Best>, CheckpointError> {
    let path = checkpoints.join(BEST);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(CheckpointError::io("read", &path)(error)),
    };
    let best: Best =
        serde_json::from_slice(&text).map_err(|error| CheckpointError::damaged(&path, error.to_string()))?;
    Ok(folder_of(checkpoints, best.step).is_dir().then_some(best))
}

pub(super) fn folder_of(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!("step-{step:08}"))
}

/// The hidden folder of a checkpoint while it is written (`tmp`), replaced (`old`) or removed
/// (`trash`).
pub(super) fn hidden(checkpoints: &Path, step: u64, what: &str) -> PathBuf {
    checkpoints.join(format!(".step-{step:08}.{what}"))
}

/// Opens the checkpoint of `step` in `RUN/checkpoints` without verifying its contents; the caller
/// knows that they are verified.
pub fn open_step(run: &Path, step: u64) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(&folder_of(&run.join("checkpoints"), step))
}

/// The newest whole checkpoint in `RUN/checkpoints`, with the reasons why newer ones were passed
/// over. `None` if there are no checkpoints. Takes no lock and changes nothing, so it may be used
/// while a training runs.
///
/// # Errors
///
/// There are checkpoints, but none is whole.
pub fn find_latest(run: &Path) -> Result<Option<Found>, CheckpointError> {
    latest_in(&run.join("checkpoints"))
}

/// The result of [`set_aside`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SetAside {
    /// Step of the newest whole checkpoint before the moved ones.
    pub before: Option<u64>,
    /// The moved checkpoints: their steps and new names.
    pub moved: Vec<(u64, String)>,
}

impl fmt::Display for SetAside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(before) = self.before else {
            return f.write_str("There is no checkpoint from before: start a new run, with other settings.");
        };
        write!(f, "The checkpoint of step {before} is from before, and `train --resume` goes on from it.")?;
        for (step, name) in &self.moved {
            write!(f, " That of step {step} has the weights that led here; it is kept as {name}.")?;
        }
        Ok(())
    }
}

/// The steps of a run's checkpoints, ascending, whole or not.
///
/// # Errors
/// A folder that cannot be listed.
pub fn steps_of(run: &Path) -> Result<Vec<u64>, CheckpointError> {
    steps(&run.join("checkpoints"))
}

/// Renames the checkpoints of steps from `from` on, so that a resume ignores them. Does so only if
/// there is a whole checkpoint before them.
///
/// # Errors
///
/// Refusals of the operating system.
pub fn set_aside(run: &Path, from: u64) -> Result<SetAside, CheckpointError> {
    let folder = run.join("checkpoints");
    let (earlier, later): (Vec<u64>, Vec<u64>) = steps(&folder)?.into_iter().partition(|step| *step < from);
    let is_whole =
        |step: &u64| Checkpoint::open(&folder_of(&folder, *step)).and_then(|checkpoint| checkpoint.verify()).is_ok();
    let before = earlier.into_iter().rev().find(is_whole);
    let mut moved = Vec::new();
    for step in later.into_iter().filter(|_| before.is_some()) {
        let name = format!("diverged-step-{step:08}");
        let (path, to) = (folder_of(&folder, step), folder.join(&name));
        if to.exists() {
            // The remains of an earlier attempt that reached the same step.
            fs::remove_dir_all(&to).map_err(CheckpointError::io("remove", &to))?;
        }
        fs::rename(&path, &to).map_err(CheckpointError::io("rename", &path))?;
        moved.push((step, name));
    }
    Ok(SetAside { before, moved })
}

/// Upper limit for the listings of the checkpoints. A new listing is made if a checkpoint was
/// deleted while it was read; each time a running training has written a newer one.
const LISTINGS_MAX: usize = 100;

pub(super) fn latest_in(folder: &Path) -> Result<Option<Found>, CheckpointError> {
    let mut listing = newest_of(folder, &steps(folder)?);
    for _ in 1..LISTINGS_MAX {
        match listing {
            Listing::Complete(found) => return found,
            Listing::Outdated(_) => listing = newest_of(folder, &steps(folder)?),
        }
    }
    let (Listing::Complete(found) | Listing::Outdated(found)) = listing;
    found
}

/// The outcome of a look at a list of checkpoints.
enum Listing {
    /// The newest whole checkpoint of the list.
    Complete(Result<Option<Found>, CheckpointError>),
    /// A checkpoint of the list was deleted meanwhile, because a running training has written a
    /// newer one.
    Outdated(Result<Option<Found>, CheckpointError>),
}

fn newest_of(folder: &Path, steps: &[u64]) -> Listing {
    let (mut skipped, mut outdated) = (Vec::new(), false);
    let mut newest = None;
    for step in steps.iter().rev().copied() {
        let path = folder_of(folder, step);
        // An open checkpoint has its tensors mapped, so they stay readable even if the folder is
        // deleted.
        let verified = Checkpoint::open(&path).and_then(|checkpoint| checkpoint.verify().map(|()| checkpoint));
        let reason = match verified {
            Ok(checkpoint) if checkpoint.step() == step => {
                newest = Some((step, checkpoint));
                break;
            }
            Ok(checkpoint) => format!("its manifest is of step {}", checkpoint.step()),
            Err(CheckpointError::Damaged { reason, .. }) => reason,
            Err(error) => error.to_string(),
        };
        if path.exists() {
            skipped.push(Skipped { path, reason });
        } else {
            outdated = true;
        }
    }
    let found = match newest {
        Some((step, checkpoint)) => Ok(Some(Found { step, checkpoint, skipped })),
        None if skipped.is_empty() => Ok(None),
        None => Err(CheckpointError::NoneGood { path: folder.to_owned(), skipped }),
    };
    if outdated { Listing::Outdated(found) } else { Listing::Complete(found) }
}

/// The steps that have a folder, in ascending order.
pub(super) fn steps(folder: &Path) -> Result<Vec<u64>, CheckpointError> {
    let parse = |name: &String| {
        let step = name.strip_prefix("step-")?.parse().ok()?;
        (*name == format!("step-{step:08}")).then_some(step)
    };
    let mut steps: Vec<u64> = names(folder)?.iter().filter_map(parse).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// The names in a folder, sorted; empty if the folder does not exist.
fn names(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(CheckpointError::io("list", folder)(error)),
    };
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    let mut names: Vec<_> = names.collect::<Result<_, _>>().map_err(CheckpointError::io("list", folder))?;
    names.sort();
    Ok(names)
}
