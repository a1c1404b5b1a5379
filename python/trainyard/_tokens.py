"""Token files: Megatron-LM's `.bin` and `.idx`, as `trainyard data prepare` writes them."""

import mmap
import struct
from pathlib import Path

_MAGIC = b"MMIDIDX\x00\x00"
_FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
"""Struct codes by the numbers that the index has for types of tokens."""


class TokenFile:
    """A token file, mapped into memory: `file[a:b]` are tokens, `file.documents` their ranges."""

    def __init__(self, path):
        prefix = str(path)
        prefix = prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix
        index = Path(prefix + ".idx").read_bytes()
        if len(index) < 34 or index[:9] != _MAGIC or struct.unpack_from("<Q", index, 9)[0] != 1:
            raise ValueError(f"{prefix}.idx is not an index of token files: it does not begin with MMIDIDX, version 1")
        code, count, boundaries = struct.unpack_from("<BQQ", index, 17)
        if code not in _FORMATS:
            raise ValueError(f"{prefix}.idx: tokens of type {code} are unknown; known: {sorted(_FORMATS)}")
        if len(index) != 34 + 12 * count + 8 * boundaries:
            raise ValueError(f"{prefix}.idx has {len(index)} bytes, and its {count} sequences need {34 + 12 * count + 8 * boundaries}")
        self.format = _FORMATS[code]
        lengths = struct.unpack_from(f"<{count}i", index, 34)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        firsts = struct.unpack_from(f"<{boundaries}q", index, 34 + 12 * count)
        self.documents = [range(starts[a], starts[b]) for a, b in zip(firsts, firsts[1:])]
        """The stretch of each document, as a range of positions of tokens."""
        with open(prefix + ".bin", "rb") as file:
            size = file.seek(0, 2)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self._tokens = memoryview(self._map).cast(self.format)
        if len(self._tokens) != starts[-1]:
            raise ValueError(f"{prefix}.bin has {len(self._tokens)} tokens, and its index says {starts[-1]}")

    def __len__(self):
        return len(self._tokens)

    def __getitem__(self, places):
        """One token, or a list of the tokens of a slice."""
        found = self._tokens[places]
        return found.tolist() if isinstance(places, slice) else found

    def tensor(self, start, end):
        """The tokens from `start` to before `end` as an int64 tensor of PyTorch."""
        import torch

        types = {"B": torch.uint8, "b": torch.int8, "h": torch.int16, "H": torch.uint16, "i": torch.int32, "q": torch.int64}
        stretch = bytearray(self._tokens[start:end].cast("B"))
        return torch.frombuffer(stretch, dtype=types[self.format]).to(torch.int64)


class TokenDataset:
    """Token files as a map-style dataset for `torch.utils.data.DataLoader`.

    Sample i is a dictionary of `input_ids`, tokens i n to (i + 1) n of the file for sequences of n
    tokens, and `labels`, the same one token later: int64 tensors [n]. Documents follow one another;
    the rest that fills no sequence is left out.
    """

    def __init__(self, path, sequence_length):
        if sequence_length < 1:
            raise ValueError(f"sequence_length is {sequence_length}: take at least 1")
        self.path, self.sequence_length = path, sequence_length
        self.tokens = TokenFile(path)

    def __len__(self):
        return max(len(self.tokens) - 1, 0) // self.sequence_length

    def __getitem__(self, index):
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index % len(self) * self.sequence_length
        stretch = self.tokens.tensor(start, start + self.sequence_length + 1)
        return {"input_ids": stretch[:-1], "labels": stretch[1:]}

    def __reduce__(self):
        # Workers of a loader open the file themselves.
        return TokenDataset, (self.path, self.sequence_length)
