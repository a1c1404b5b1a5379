"""Writes small corpora with the Python library of each format: crates/data/tests/golden/sources.

    pip install pyarrow webdataset numpy xxhash zstandard pillow catalogue python-snappy brotli zstd
    pip install --no-deps mosaicml-streaming
    python scripts/golden/make_sources.py

`streaming` imports torch and readers of object stores, which its writer does not use: stand-ins
take their places. The texts are in texts.json, which the test compares with.
"""

import gzip
import importlib.abc
import importlib.machinery
import json
import shutil
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import webdataset as wds
import zstandard

OUT = Path(__file__).resolve().parents[2] / "crates/data/tests/golden/sources"

TEXTS = [
    "A first document.\nIt has two lines.",
    "Zweites: äöü ß, 漢字, emoji 🚂.",
    "tab\tand \"quotes\" and \\ and \u0000 in it",
    "x",
] + [f"Document {i}: " + " ".join(f"word{(i * j) % 17}" for j in range(i)) for i in range(4, 90, 2)]

# Texts in plain.tar, as crates/data/tests/sources.rs has it too.
PLAIN_TEXTS = 7


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that are imported and not used."""

    PACKAGES = ("torch", "torchvision", "transformers", "boto3", "botocore", "azure", "google", "oci", "paramiko",
                "matplotlib", "alipcs_py", "databricks")

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: type(name, (), {}) if name[:1].isupper() else MagicMock()
        return module

    def exec_module(self, module):
        pass


def parquet():
    table = pa.table({
        "id": pa.array(range(len(TEXTS)), pa.int64()),
        "text": pa.array(TEXTS, pa.string()),
        "meta": pa.array([{"lang": "en", "note": t[:5]} for t in TEXTS]),
        "words": pa.array([t.split() for t in TEXTS]),
    })
    for name, options in {
        "snappy": dict(compression="snappy"),
        "zstd": dict(compression="zstd", data_page_version="2.0"),
        "gzip": dict(compression="gzip", use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}),
        "none": dict(compression="none", use_dictionary=False, column_encoding={"text": "DELTA_LENGTH_BYTE_ARRAY"}),
    }.items():
        if "column_encoding" in options:
            table_of = table.select(["id", "text"])
        else:
            table_of = table
        pq.write_table(table_of, OUT / f"{name}.parquet", row_group_size=20, data_page_size=512, **options)
    pq.write_table(table.select(["text"]), OUT / "brotli.parquet", compression="brotli")
    nulls = pa.table({"text": pa.array(["a", None, "b"], pa.string())})
    pq.write_table(nulls, OUT / "nulls.parquet")


def tar():
    # A member takes at least 1 KiB, so the file that is not compressed has the first texts alone.
    for name, texts in {"plain.tar": TEXTS[:PLAIN_TEXTS], "packed.tar.gz": TEXTS}.items():
        with wds.TarWriter(str(OUT / name), mtime=0) as sink:
            for i, text in enumerate(texts):
                sample = {"__key__": f"folder/sample{i:04d}", "jpg": b"\xff\xd8 no picture"}
                # Every third sample has its text in a field, and one name is longer than a header.
                if i % 3 == 0:
                    sample["json"] = {"url": "https://example.org", "text": text}
                else:
                    sample["txt"] = text
                if i == 5:
                    sample["__key__"] = "deep/" * 30 + "sample0005"
                sink.write(sample)
    packed = zstandard.ZstdCompressor().compress(gzip.decompress((OUT / "packed.tar.gz").read_bytes()))
    (OUT / "packed.tar.zst").write_bytes(packed)


def mds():
    sys.meta_path.insert(0, StandIns())
    from streaming.base.format.mds.writer import MDSWriter

    columns = {"id": "int", "source": "str", "text": "str"}
    for name, compression in {"mds": None, "mds_zstd": "zstd:7", "mds_gz": "gz"}.items():
        folder = OUT / name
        shutil.rmtree(folder, ignore_errors=True)
        writer = MDSWriter(out=str(folder), columns=columns, compression=compression, hashes=["sha1", "xxh3_64"],
                           size_limit=6000)
        with writer:
            for i, text in enumerate(TEXTS):
                writer.write({"id": i, "source": f"source {i}", "text": text})


def llm_c():
    # data/llmc/data_common.py: 256 int32 of header, then tokens. A document begins with the
    # end-of-text token.
    def write(name, documents, magic, version, dtype, eot):
        tokens = np.concatenate([np.array([eot] + d, dtype) for d in documents])
        header = np.zeros(256, np.int32)
        header[:3] = magic, version, len(tokens)
        (OUT / name).write_bytes(header.tobytes() + tokens.tobytes())

    documents = [[(i * 31 + j) % 50256 for j in range(3 + i % 5)] for i in range(40)]
    write("gpt2.bin", documents, 20240520, 1, np.uint16, 50256)
    write("llama3.bin", [[t + 60000 for t in d] for d in documents], 20240801, 7, np.uint32, 128000)
    (OUT / "llm_c.json").write_text(json.dumps(documents))


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    (OUT / "texts.json").write_text(json.dumps(TEXTS))
    parquet()
    tar()
    mds()
    llm_c()
    files = sorted(p for p in OUT.rglob("*") if p.is_file())
    print(len(files), "files,", sum(p.stat().st_size for p in files), "bytes")
