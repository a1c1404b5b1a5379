//! Checks before the first step that the disk has room for checkpoints, so that a run does not fail
//! after hours.

use crate::Result;
use crate::session::Session;
use crate::snapshot;
use crate::state::does_not_fit;
use std::path::Path;
use trainyard_base::format_bytes;

/// Compares the free space at the run's folder with the size of checkpoints. For rank 0. Returns a
/// warning if not all checkpoints fit that a new run keeps.
///
/// # Errors
/// If not even one checkpoint fits.
pub(crate) fn check(session: &Session) -> Result<Option<String>> {
    let each = snapshot::bytes_of_tensors(&session.rank);
    let Some(free) = free(&session.folder) else { return Ok(None) };
    let kept = session.resolved.config.checkpoint.keep_last as u64;
    judge(each, free, kept, session.state.step == 0, &session.folder)
}

fn judge(each: u64, free: u64, kept: u64, is_new: bool, folder: &Path) -> Result<Option<String>> {
    let (size, left) = (format_bytes(each), format_bytes(free));
    if free < each {
        return Err(does_not_fit(format!(
            "a checkpoint takes {size}, and {left} are free where {} is: free some, or name a folder on another disk with run.directory",
            folder.display()
        )));
    }
    // The oldest checkpoint is removed only after the newest is complete.
    let needed = each.saturating_mul(kept.saturating_add(1));
    Ok((is_new && free < needed).then(|| {
        format!(
            "{} checkpoints of {size} will lie in {}, and {left} are free there: free some, or lower checkpoint.keep_last",
            kept.saturating_add(1),
            folder.display()
        )
    }))
}

/// Free bytes on the disk where `folder` is or will be; None if the system does not say.
pub(crate) fn free(folder: &Path) -> Option<u64> {
    let absolute = std::path::absolute(folder).ok()?;
    let there = absolute.ancestors().find(|folder| folder.exists())?;
    let disk = rustix::fs::statvfs(there).ok().filter(|disk| disk.f_blocks > 0)?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_room_is_told_before_the_first_step() {
        let folder = Path::new("runs/x");
        let judge = |free, is_new| judge(10 << 20, free, 2, is_new, folder);
        let error = judge((10 << 20) - 1, false).unwrap_err().to_string();
        assert!(error.contains("a checkpoint takes 10.0 MiB") && error.contains("run.directory"), "{error}");
        assert!(judge(29 << 20, true).unwrap().unwrap().starts_with("3 checkpoints of 10.0 MiB"));
        assert_eq!(judge(29 << 20, false).unwrap(), None);
        assert_eq!(judge(30 << 20, true).unwrap(), None);
        assert!(free(Path::new(".")).is_some_and(|bytes| bytes > 0));
    }
}
