#!/usr/bin/env python3
"""Writes crates/data/tests/golden/images: Parquet files of images, by pyarrow.

They are as Hugging Face's `datasets` writes them.

    pip install pyarrow pillow numpy
    python scripts/golden/make_image_parquet.py

`set/` has nine images of three classes in two files with several row groups and pages; their pixels
are those of `picture` in crates/data/tests/images.rs. The other files are special in one way each.
"""

import io
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

HERE = pathlib.Path(__file__).resolve().parents[2] / "crates/data/tests/golden/images"
CLASSES = ["cat", "ant", "bee"]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(width, height):
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    pixels = (x * x * 3 + y * 11 + x * y * (c + 1) + c * 70 + 9).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def write(name, columns, features=None, **options):
    table = pa.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path = HERE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **{"compression": "snappy", **options})


def images(which):
    return pa.array([{"bytes": png(20 + i, 31 - i % 9), "path": f"{i:03}.png"} for i in which], IMAGE)


def main():
    label = {"names": CLASSES, "_type": "ClassLabel"}
    features = {"image": {"_type": "Image"}, "label": label}
    # In the order of the classes' names, as folders are read: ant, bee, cat.
    order = sorted(range(9), key=lambda i: (["ant", "bee", "cat"][i % 3], i))
    number = [1, 2, 0]
    small = {"data_page_size": 2500, "write_batch_size": 1}
    for part, (which, options) in enumerate(
        [(order[:5], {"row_group_size": 3, **small}), (order[5:], {"compression": "zstd", **small})]
    ):
        labels = pa.array([number[i % 3] for i in which], pa.int64())
        write(f"set/train-{part:05}-of-00002.parquet", {"image": images(which), "label": labels}, features, **options)

    two = images([0, 1])
    write("numbers.parquet", {"img": two, "label": pa.array([1, 0], pa.int32())})
    write("names.parquet", {"png": pa.array([png(9, 7)] * 2, pa.binary()), "cls": pa.array(["cat", "ant"])})
    twice = {**label, "names": ["crane", "crane"]}
    write("twice.parquet", {"image": two, "label": pa.array([0, 1])}, {"label": twice})
    write("test_split.parquet", {"image": two, "label": pa.array([0, -1])}, features)
    write("no_class.parquet", {"image": two, "label": pa.array([0, None], pa.int64())}, features)
    write("no_label.parquet", {"image": two, "caption": pa.array(["a", "b"])})
    write("two_labels.parquet", {"image": two, "fine": pa.array([0, 1]), "coarse": pa.array([0, 0])},
          {"fine": label, "coarse": label})
    write("two_images.parquet", {"image": two, "mask": two, "label": pa.array([0, 1])})
    write("no_image.parquet", {"text": pa.array(["a", "b"]), "label": pa.array([0, 1])})
    write("paths.parquet", {"image": pa.array([{"bytes": None, "path": "a.png"}] * 2, IMAGE), "label": pa.array([0, 1])},
          features)
    write("no_rows.parquet", {"image": images([]), "label": pa.array([], pa.int64())}, features)
    write("decimals.parquet", {"image": two, "label": pa.array([0.5, 1.0])})


if __name__ == "__main__":
    main()
