#!/usr/bin/env python3
"""Writes the digits of scikit-learn as a folder of classes: 1,797 grey images of 8 x 8 pixels.

    python3 -m venv .venv-peers && .venv-peers/bin/pip install scikit-learn pillow
    .venv-peers/bin/python scripts/peers/digits.py OUT

It writes OUT/train/DIGIT/NUMBER.png and OUT/validation/DIGIT/NUMBER.png; every fifth image is of validation.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def main():
    out = Path(sys.argv[1])
    digits = load_digits()
    for number, (image, digit) in enumerate(zip(digits.images, digits.target)):
        part = "validation" if number % 5 == 4 else "train"
        folder = out / part / str(digit)
        folder.mkdir(parents=True, exist_ok=True)
        # Values are from 0 to 16.
        pixels = np.clip(np.round(image * 255 / 16), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04}.png")
    print(f"{number + 1} images in {out}")


if __name__ == "__main__":
    main()
