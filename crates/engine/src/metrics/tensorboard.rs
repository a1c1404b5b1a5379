//! Writes TensorBoard event files without a protobuf library: the four messages in use have a few
//! fields each.
//!
//! A file is a sequence of TFRecords: u64 length, masked CRC-32C of the length, data, masked
//! CRC-32C of the data, little-endian. The data is an `Event` message
//! (tensorflow/core/util/event.proto):
//!
//! ```text
//! Event       1: double wall_time   2: int64 step   3: string file_version   5: Summary   7: SessionLog
//! Summary     1: repeated Value
//! Value       1: string tag         2: float simple_value
//! SessionLog  1: enum status, START = 1
//! ```
//!
//! A run that resumes writes a new file that begins with a `START` at its first step. TensorBoard
//! then drops that step and later ones from older files.

use super::MetricsError;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// An open event file.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
}

impl EventWriter {
    /// Creates a new event file in `folder`, which is created if need be. `resumed` is the step
    /// that the run resumes from.
    pub fn create(folder: &Path, resumed: u64) -> Result<EventWriter, MetricsError> {
        std::fs::create_dir_all(folder).map_err(MetricsError::io("create", folder))?;
        let now = wall_time();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host: String = host.trim().chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let host = if host.is_empty() { "localhost" } else { &host };
        // TensorBoard reads the files of a run in the order of their names, so the time is first
        // and padded.
        let mut number = 0;
        loop {
            let name = format!("events.out.tfevents.{:010}.{host}.{}.{number}", now as u64, std::process::id());
            let path = folder.join(name);
            match OpenOptions::new().create_new(true).append(true).open(&path) {
                Ok(file) => {
                    let mut writer = EventWriter { path, file };
                    writer.write(&record(&event(now, 0, 3, b"brain.Event:2")))?;
                    let start = int_field(1, 1);
                    writer.write(&record(&event(now, resumed + 1, 7, &start)))?;
                    return Ok(writer);
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists && number < 1000 => number += 1,
                Err(error) => return Err(MetricsError::io("create", &path)(error)),
            }
        }
    }

    /// Writes scalars of one step; they are in the file when this returns.
    pub fn scalars(&mut self, step: u64, scalars: &[(String, f64)]) -> Result<(), MetricsError> {
        self.write(&record(&event(wall_time(), step, 5, &summary(scalars))))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), MetricsError> {
        self.file.write_all(bytes).map_err(MetricsError::io("append to", &self.path))
    }
}

/// Seconds since 1970.
fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// An `Event` whose field `content` is `bytes`.
fn event(wall_time: f64, step: u64, content: u64, bytes: &[u8]) -> Vec<u8> {
    let mut message = key(1, 1);
    message.extend(wall_time.to_le_bytes());
    message.extend(int_field(2, step));
    message.extend(bytes_field(content, bytes));
    message
}

fn summary(scalars: &[(String, f64)]) -> Vec<u8> {
    let mut message = Vec::new();
    for (tag, value) in scalars {
        let mut entry = bytes_field(1, tag.as_bytes());
        entry.extend(key(2, 5));
        entry.extend((*value as f32).to_le_bytes());
        message.extend(bytes_field(1, &entry));
    }
    message
}

/// A field's key: its number and its wire type (0 varint, 1 eight bytes, 2 length and bytes, 5 four
/// bytes).
fn key(field: u64, wire_type: u64) -> Vec<u8> {
    varint(field << 3 | wire_type)
}

fn int_field(field: u64, value: u64) -> Vec<u8> {
    let mut bytes = key(field, 0);
    bytes.extend(varint(value));
    bytes
}

fn bytes_field(field: u64, value: &[u8]) -> Vec<u8> {
    let mut bytes = key(field, 2);
    bytes.extend(varint(value.len() as u64));
    bytes.extend(value);
    bytes
}

/// Seven bits a byte, lowest first; the high bit says that more follow.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A TFRecord.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut bytes = Vec::with_capacity(data.len() + 16);
    bytes.extend(length);
    bytes.extend(masked_crc(&length).to_le_bytes());
    bytes.extend(data);
    bytes.extend(masked_crc(data).to_le_bytes());
    bytes
}

/// Rotated and offset, so that a checksum of data that contains checksums stays a good one
/// (tensorflow/core/lib/hash/crc32c.h).
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data of each record of a file, every checksum checked.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            assert_eq!(bytes[8..12], masked_crc(&bytes[..8]).to_le_bytes());
            let data = &bytes[12..12 + length];
            assert_eq!(bytes[12 + length..16 + length], masked_crc(data).to_le_bytes());
            all.push(data.to_vec());
            bytes = &bytes[16 + length..];
        }
        all
    }

    #[test]
    fn crc32c_has_its_published_check_value() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    }

    /// The bytes that TensorBoard's own writer makes of these events; scripts/golden/make_events.py
    /// prints and reads them.
    #[test]
    fn events_equal_the_golden_bytes() {
        let mut bytes = record(&event(1.5e9, 0, 3, b"brain.Event:2"));
        bytes.extend(record(&event(1.5e9, 301, 7, &int_field(1, 1))));
        let scalars = [("loss_metrics/global_avg_loss".to_owned(), 2.5), ("mfu(%)".to_owned(), 31.25)];
        bytes.extend(record(&event(1.5e9 + 0.25, 301, 5, &summary(&scalars))));
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, include_str!("../../tests/golden/events.hex").trim());
    }

    #[test]
    fn a_file_holds_the_version_the_start_and_each_step() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(&folder.path().join("tensorboard"), 0).unwrap();
        for step in 1..=3 {
            writer.scalars(step, &[("lr".to_owned(), 0.5)]).unwrap();
        }
        let all = records(&std::fs::read(writer.path()).unwrap());
        assert_eq!(all.len(), 5);
        assert!(all[0].ends_with(b"brain.Event:2"));
        assert!(all[4].ends_with(&0.5f32.to_le_bytes()));
        let again = EventWriter::create(&folder.path().join("tensorboard"), 3).unwrap();
        assert_ne!(writer.path(), again.path(), "a resumed run has its own file");
    }

    #[test]
    fn varints_use_seven_bits_a_byte() {
        assert_eq!(varint(0), [0]);
        assert_eq!(varint(300), [0xac, 0x02]);
        assert_eq!(varint(u64::MAX).len(), 10);
    }
}
