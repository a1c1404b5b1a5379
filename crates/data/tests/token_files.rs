//! Megatron's `.bin/.idx`: a golden file made without this code, round trips, and every kind of
//! corruption.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use trainyard_data::indexed::{HEADER_BYTES, IdxFault, TokenType, bin_path, idx_path, parse_idx};
use trainyard_data::{DataError, IndexedTokens, IndexedWriter};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/documents")
}

fn write(prefix: &Path, token_type: TokenType, documents: &[Vec<u32>]) {
    let mut writer = IndexedWriter::create(prefix, token_type).unwrap();
    for document in documents {
        writer.push_document(document).unwrap();
    }
    writer.finish().unwrap();
}

fn read(tokens: &IndexedTokens) -> Vec<i32> {
    let mut all = Vec::new();
    tokens.read_into(0..tokens.tokens(), u32::MAX, &mut all).unwrap();
    all
}

#[test]
fn the_golden_file_is_read() {
    let tokens = IndexedTokens::open(&golden()).unwrap();
    assert_eq!((tokens.sequences(), tokens.documents(), tokens.tokens()), (4, 3, 7));
    assert_eq!(tokens.token_type(), TokenType::U16);
    assert_eq!(read(&tokens), [1, 2, 3, 4, 5, 6, 65499]);
    assert_eq!((0..3).map(|d| tokens.document(d)).collect::<Vec<_>>(), [0..3, 3..6, 6..7]);
    assert_eq!((0..7).map(|t| tokens.document_of(t)).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1, 2]);
    assert!(IndexedTokens::open(&golden().with_extension("bin")).is_ok(), "the .bin's own name does as well");
}

#[test]
fn what_we_write_is_the_golden_file() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("new/folder/ours");
    let one_sequence_each = [vec![1, 2, 3], vec![4, 5, 6], vec![65499]];
    write(&prefix, TokenType::U16, &one_sequence_each);
    assert_eq!(fs::read(bin_path(&prefix)).unwrap(), fs::read(bin_path(&golden())).unwrap());
    // The writer makes one sequence per document; the golden file has two in its second.
    let mut expected = fs::read(idx_path(&golden())).unwrap();
    expected[18..26].copy_from_slice(&3u64.to_le_bytes());
    let arrays: Vec<u8> = [3i32, 3, 1]
        .iter()
        .flat_map(|l| l.to_le_bytes())
        .chain([0i64, 6, 12, 0, 1, 2, 3].iter().flat_map(|p| p.to_le_bytes()))
        .collect();
    expected.splice(HEADER_BYTES.., arrays);
    assert_eq!(fs::read(idx_path(&prefix)).unwrap(), expected);
    let names: Vec<_> = fs::read_dir(prefix.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "nothing temporary is left: {names:?}");
}

#[test]
fn every_truncation_and_every_flipped_byte_of_the_header_is_survived() {
    let idx = fs::read(idx_path(&golden())).unwrap();
    assert!(parse_idx(&idx).is_ok());
    for length in 0..idx.len() {
        assert!(parse_idx(&idx[..length]).is_err(), "cut to {length} bytes");
    }
    let original = parse_idx(&idx).unwrap();
    for at in 0..idx.len() {
        for bit in 0..8 {
            let mut lying = idx.clone();
            lying[at] ^= 1 << bit;
            if let Ok(layout) = parse_idx(&lying) {
                // A changed type with consistent pointers, or a moved document border, is a valid
                // file of its own.
                assert!(layout != original || at >= HEADER_BYTES + 12 * 4, "byte {at} bit {bit}");
            }
        }
    }
}

#[test]
fn a_writer_that_does_not_finish_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("tokens");
    write(&prefix, TokenType::U16, &[vec![1, 2]]);
    let before = fs::read(bin_path(&prefix)).unwrap();
    let mut writer = IndexedWriter::create(&prefix, TokenType::U16).unwrap();
    writer.push_document(&[9; 1000]).unwrap();
    drop(writer);
    assert_eq!(fs::read(bin_path(&prefix)).unwrap(), before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn modes_are_accepted_and_ignored() {
    let mut idx = fs::read(idx_path(&golden())).unwrap();
    idx.extend([0u8; 4]);
    let layout = parse_idx(&idx).unwrap();
    assert!(layout.has_modes && layout.tokens == 7);
}

#[test]
fn faults_are_told_apart() {
    let idx = fs::read(idx_path(&golden())).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut lying = idx.clone();
        lying[at..at + bytes.len()].copy_from_slice(bytes);
        parse_idx(&lying).unwrap_err()
    };
    let (pointers, entries) = (HEADER_BYTES + 16, HEADER_BYTES + 48);
    assert_eq!(parse_idx(&idx[..20]), Err(IdxFault::Short { found: 20 }));
    assert_eq!(with(0, b"PK"), IdxFault::Magic);
    assert_eq!(with(9, &2u64.to_le_bytes()), IdxFault::Version(2));
    assert_eq!(with(17, &[7]), IdxFault::TokenType(7));
    assert!(matches!(with(18, &u64::MAX.to_le_bytes()), IdxFault::Overflow { .. }));
    assert!(matches!(with(18, &(u64::MAX / 12).to_le_bytes()), IdxFault::Overflow { .. } | IdxFault::Size { .. }));
    assert!(matches!(with(18, &5u64.to_le_bytes()), IdxFault::Size { .. }));
    assert!(matches!(with(26, &5u64.to_le_bytes()), IdxFault::Size { .. }));
    assert_eq!(with(HEADER_BYTES, &(-1i32).to_le_bytes()), IdxFault::Length { sequence: 0, length: -1 });
    assert_eq!(with(pointers + 8, &4i64.to_le_bytes()), IdxFault::Pointer { sequence: 1, found: 4, expected: 6 });
    assert_eq!(with(pointers, &(-2i64).to_le_bytes()), IdxFault::Pointer { sequence: 0, found: -2, expected: 0 });
    assert!(matches!(with(entries, &1i64.to_le_bytes()), IdxFault::Document { entry: 0, found: 1, .. }));
    assert!(matches!(with(entries + 16, &9i64.to_le_bytes()), IdxFault::Document { entry: 2, found: 9, .. }));
    assert!(matches!(with(entries + 24, &3i64.to_le_bytes()), IdxFault::Document { entry: 3, found: 3, .. }));
    let mut none = idx[..HEADER_BYTES].to_vec();
    none[18..34].fill(0);
    assert_eq!(parse_idx(&none), Err(IdxFault::NoDocuments));
}

proptest! {
    #[test]
    fn documents_come_back(
        documents in proptest::collection::vec(proptest::collection::vec(0u32..120, 1..30), 0..20),
        which in 0usize..6,
    ) {
        use TokenType::*;
        let token_type = [U8, I8, I16, I32, I64, U16][which];
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("with.dots");
        write(&prefix, token_type, &documents);
        let tokens = IndexedTokens::open(&prefix).unwrap();
        prop_assert_eq!(tokens.documents(), documents.len());
        let expected: Vec<i32> = documents.concat().iter().map(|&t| t as i32).collect();
        prop_assert_eq!(read(&tokens), expected);
        for (d, document) in documents.iter().enumerate() {
            let range = tokens.document(d);
            prop_assert_eq!(range.end - range.start, document.len() as u64);
            for token in range {
                prop_assert_eq!(tokens.document_of(token), d);
            }
        }
        tokens.check_tokens(120).unwrap();
        let largest = documents.concat().into_iter().max();
        if let Some(largest) = largest {
            let refused = matches!(tokens.check_tokens(largest), Err(DataError::Vocabulary { .. }));
            prop_assert!(refused || largest == 0 && tokens.check_tokens(0).is_err());
        }
    }

    #[test]
    fn any_bytes_are_an_index_or_a_fault(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_idx(&bytes);
        let mut with_header = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x08".to_vec();
        with_header.extend(&bytes);
        if let Ok(layout) = parse_idx(&with_header) {
            for d in 0..layout.documents {
                let range = layout.document(&with_header, d);
                prop_assert!(range.start <= range.end && range.end <= layout.tokens);
            }
        }
    }
}
