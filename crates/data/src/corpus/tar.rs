//! Texts of a WebDataset tar: consecutive members with the same name up to the first dot are one
//! sample.
//!
//! The text of a sample is its member `.txt`, `.text` or `.FIELD`, else the field of its member
//! `.json`. Other members, such as images, are passed over.

use std::io::{BufRead, Read};

use super::read::{read_error, unpacked};
use super::records::{Record, Records, SKIP, of_json, too_long, utf8};
use super::{CorpusOptions, SourceFile};
use crate::error::{DataError, Result};

/// Size of a block. Headers take one, and contents are padded to whole ones.
const BLOCK: usize = 512;

/// Longest extension of a header: names are at most some thousand characters.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;

pub(super) struct TarTexts {
    source: SourceFile,
    field: String,
    bytes_max: u64,
    reader: Box<dyn BufRead + Send>,
    /// The sample being read.
    sample: Option<Sample>,
    /// Offset in the unpacked archive, for messages.
    offset: u64,
    number: u64,
    has_ended: bool,
}

/// A sample: the members with a name.
struct Sample {
    key: String,
    text: Option<Result<String>>,
    /// True if the text is from a member of its own, which comes before a field of JSON.
    is_plain: bool,
    /// Extensions of members without text, for messages.
    others: Vec<String>,
}

/// A member's header, with what extensions before it say.
struct Member {
    path: String,
    bytes: u64,
    is_file: bool,
}

impl TarTexts {
    pub(super) fn open(source: &SourceFile, options: &CorpusOptions) -> Result<Self> {
        Ok(Self {
            source: source.clone(),
            field: options.field.clone(),
            bytes_max: options.document_bytes_max,
            reader: unpacked(source)?,
            sample: None,
            offset: 0,
            number: 0,
            has_ended: false,
        })
    }

    fn damaged(&self, what: impl std::fmt::Display) -> DataError {
        let what = format!("is damaged, or not a tar file ({what} at byte {})", self.offset);
        DataError::input(&self.source.path, None, what, "fetch or pack the file again")
    }

    /// Fills `block`; false at the end of the file.
    fn block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool> {
        let mut filled = 0;
        while filled < BLOCK {
            match self.reader.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(self.damaged("it ends inside a block")),
                Ok(bytes) => filled += bytes,
                Err(reason) if reason.kind() == std::io::ErrorKind::Interrupted => {}
                Err(reason) => return Err(read_error(&self.source.path, self.source.compression, reason)),
            }
        }
        self.offset += BLOCK as u64;
        Ok(true)
    }

    /// Reads or passes over the `bytes` of a member, with their padding.
    fn content(&mut self, bytes: u64, keep: Keep) -> Result<Vec<u8>> {
        let padded = bytes.checked_next_multiple_of(BLOCK as u64).ok_or_else(|| self.damaged("a member's size"))?;
        let source = &self.source;
        let failed = |reason| read_error(&source.path, source.compression, reason);
        let mut content = Vec::new();
        let kept = if keep == Keep::Yes { bytes } else { 0 };
        let mut read = self.reader.by_ref().take(kept).read_to_end(&mut content).map_err(failed)? as u64;
        read += std::io::copy(&mut self.reader.by_ref().take(padded - kept), &mut std::io::sink()).map_err(failed)?;
        if read != padded {
            return Err(self.damaged("it ends inside a member"));
        }
        self.offset += padded;
        Ok(content)
    }

    /// Reads the next header, with the extensions of GNU and POSIX that give long names.
    fn member(&mut self) -> Result<Option<Member>> {
        let (mut long_path, mut long_bytes) = (None, None);
        loop {
            let mut block = [0; BLOCK];
            if !self.block(&mut block)? || block.iter().all(|&byte| byte == 0) {
                return Ok(None);
            }
            let header = tar::Header::from_byte_slice(&block);
            let sum: u32 = (0..BLOCK).map(|at| if (148..156).contains(&at) { 32 } else { u32::from(block[at]) }).sum();
            if header.cksum().ok() != Some(sum) {
                return Err(self.damaged("a wrong checksum"));
            }
            let bytes = header.entry_size().map_err(|error| self.damaged(error))?;
            let kind = header.entry_type();
            if kind.is_gnu_longname() || kind.is_pax_local_extensions() {
                if bytes > EXTENSION_BYTES_MAX {
                    return Err(self.damaged("an extension of a header that is too long"));
                }
                let content = self.content(bytes, Keep::Yes)?;
                if kind.is_gnu_longname() {
                    let end = content.iter().position(|&byte| byte == 0).unwrap_or(content.len());
                    long_path = Some(String::from_utf8_lossy(&content[..end]).into_owned());
                    continue;
                }
                for extension in tar::PaxExtensions::new(&content) {
                    let extension = extension.map_err(|error| self.damaged(error))?;
                    match extension.key_bytes() {
                        b"path" => long_path = Some(String::from_utf8_lossy(extension.value_bytes()).into_owned()),
                        b"size" => {
                            let size = extension.value().ok().and_then(|value| value.parse().ok());
                            long_bytes = Some(size.ok_or_else(|| self.damaged("a size that is no number"))?);
                        }
                        _ => {}
                    }
                }
                continue;
            }
            if kind.is_gnu_longlink() || kind.is_pax_global_extensions() {
                self.content(bytes, Keep::No)?;
                continue;
            }
            if kind.is_gnu_sparse() {
                return Err(self.damaged("a sparse member, which is not read,"));
            }
            let path = long_path.unwrap_or_else(|| String::from_utf8_lossy(&header.path_bytes()).into_owned());
            return Ok(Some(Member { path, bytes: long_bytes.unwrap_or(bytes), is_file: kind.is_file() }));
        }
    }

    /// Reads members until a sample is complete.
    fn sample(&mut self) -> Result<Option<Sample>> {
        while !self.has_ended {
            let Some(member) = self.member()? else {
                self.has_ended = true;
                // The checksum of a compressed file is behind the end of the archive.
                let rest = std::io::copy(&mut self.reader, &mut std::io::sink());
                rest.map_err(|reason| read_error(&self.source.path, self.source.compression, reason))?;
                break;
            };
            let Some((key, extension)) = key_of(&member.path).filter(|_| member.is_file) else {
                self.content(member.bytes, Keep::No)?;
                continue;
            };
            let begins = self.sample.as_ref().is_none_or(|sample| sample.key != key);
            let complete = if begins {
                let new = Sample { key: key.into(), text: None, is_plain: false, others: Vec::new() };
                self.sample.replace(new)
            } else {
                None
            };
            let is_plain = extension == "txt" || extension == "text" || extension == self.field;
            let is_json = extension == "json";
            if (is_plain || is_json) && member.bytes > self.bytes_max {
                return Err(too_long(&self.source.path, &member.path, self.bytes_max));
            }
            let keep = if is_plain || is_json { Keep::Yes } else { Keep::No };
            let content = self.content(member.bytes, keep)?;
            let path = &self.source.path;
            let text = match (is_plain, is_json) {
                (true, _) => Some(utf8(path, &member.path, content)),
                (_, true) => Some(of_json(path, &member.path, &content, &self.field)),
                _ => None,
            };
            if let Some(sample) = &mut self.sample {
                match text {
                    Some(text) if is_plain || !sample.is_plain => {
                        (sample.text, sample.is_plain) = (Some(text), is_plain);
                    }
                    Some(_) => {}
                    None => sample.others.push(extension.into()),
                }
            }
            if complete.is_some() {
                return Ok(complete);
            }
        }
        Ok(self.sample.take())
    }
}

impl Records for TarTexts {
    fn next(&mut self) -> Result<Option<Record>> {
        let Some(sample) = self.sample()? else {
            if self.number == 0 && self.source.named {
                return Err(DataError::input(&self.source.path, None, "holds no samples", "give the right file"));
            }
            return Ok(None);
        };
        self.number += 1;
        let text = sample.text.unwrap_or_else(|| {
            let what = format!("sample {} has no text, only .{}", sample.key, sample.others.join(", ."));
            Err(DataError::input(&self.source.path, None, what, SKIP))
        });
        Ok(Some(Record { number: self.number, text }))
    }
}

/// True to hold the content of a member in memory.
#[derive(PartialEq, Eq, Clone, Copy)]
enum Keep {
    Yes,
    No,
}

/// The name of a member's sample and the rest after the first dot of its file name, as WebDataset
/// divides them; `None` for hidden files and names without a dot.
fn key_of(path: &str) -> Option<(&str, &str)> {
    let begin = path.rfind('/').map_or(0, |at| at + 1);
    let dot = path[begin..].find('.').filter(|&dot| dot > 0)?;
    Some((&path[..begin + dot], &path[begin + dot + 1..]))
}
