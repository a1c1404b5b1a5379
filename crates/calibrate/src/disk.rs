//! Measures the speed of the disk.

use std::fs::{self, File};
use std::io::{Read, Result, Write};
use std::path::Path;
use std::time::Instant;
use trainyard_sim::machine::Disk;

/// Number of bytes written and read.
const BYTES: usize = 64 << 20;

/// Writes a file in `folder` (created if missing), synchronises it to the disk, and reads it back.
pub fn measure(folder: &Path) -> Result<Disk> {
    fs::create_dir_all(folder)?;
    let path = folder.join(format!("disk-{}.tmp", std::process::id()));
    let result = at(&path);
    // The file is removed even after a failure.
    let removed = fs::remove_file(&path);
    let disk = result?;
    removed?;
    Ok(disk)
}

fn at(path: &Path) -> Result<Disk> {
    let block: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let start = Instant::now();
    let mut file = File::create(path)?;
    for _ in 0..BYTES / block.len() {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    let write_bytes_per_s = BYTES as f64 / start.elapsed().as_secs_f64();
    let (mut buffer, mut file) = (vec![0; block.len()], File::open(path)?);
    // The bytes just written lie in the page cache, which offload bypasses.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    let start = Instant::now();
    while file.read(&mut buffer)? > 0 {}
    Ok(Disk { write_bytes_per_s, read_bytes_per_s: BYTES as f64 / start.elapsed().as_secs_f64() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_speeds_and_keeps_no_file() {
        let folder = std::env::temp_dir().join(format!("trainyard-disk-{}", std::process::id()));
        let disk = measure(&folder).unwrap();
        assert!(disk.write_bytes_per_s > 0.0 && disk.read_bytes_per_s > 0.0);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir(&folder).unwrap();
    }
}
