"""Writes documents.bin and documents.idx from the documented format alone, without our code.

The format is that of src/indexed/format.rs.

Three documents: [1, 2, 3], then [4, 5] + [6] as two sequences, then [65499].
"""

import pathlib
import struct

sequences = [[1, 2, 3], [4, 5], [6], [65499]]
documents = [0, 1, 3, 4]  # first sequence of each document, then the number of sequences

here = pathlib.Path(__file__).parent
pointers = [2 * sum(map(len, sequences[:i])) for i in range(len(sequences))]
with open(here / "documents.bin", "wb") as bin_file:
    for sequence in sequences:
        bin_file.write(struct.pack(f"<{len(sequence)}H", *sequence))
with open(here / "documents.idx", "wb") as idx_file:
    idx_file.write(b"MMIDIDX\x00\x00")
    idx_file.write(struct.pack("<Q", 1))  # version
    idx_file.write(struct.pack("<B", 8))  # u16
    idx_file.write(struct.pack("<QQ", len(sequences), len(documents)))
    idx_file.write(struct.pack(f"<{len(sequences)}i", *map(len, sequences)))
    idx_file.write(struct.pack(f"<{len(pointers)}q", *pointers))
    idx_file.write(struct.pack(f"<{len(documents)}q", *documents))
