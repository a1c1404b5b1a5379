#!/usr/bin/env python3
"""Compares what llama.cpp says of a text with what transformers says, from the same GGUF file.

    .venv-peers/bin/python scripts/golden/check_gguf.py MODEL.gguf TEXT FOLDER     (writes the reference)
    python3 -m venv .venv-llama && .venv-llama/bin/pip install llama-cpp-python    (builds it: needs a C++ compiler)
    .venv-llama/bin/python scripts/golden/check_llama_cpp.py FOLDER [TOLERANCE]

Prints the largest difference of two logits as a share of the largest logit, and both losses; fails above TOLERANCE
(1e-3 unless given). llama.cpp rounds activations to eight bits where weights have blocks, so only files of f32 weights
agree so closely.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama

F32 = 0


def main():
    folder, tolerance = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 1e-3
    reference = json.loads((folder / "reference.json").read_text())
    length, tokens = reference["length"], np.array(reference["tokens"]).reshape(-1, reference["length"])
    logits = np.memmap(folder / "logits.f32", np.float32).reshape(*tokens.shape, -1)
    model = Llama(reference["gguf"], n_ctx=length, n_batch=length, n_ubatch=length, logits_all=True, verbose=False,
                  type_k=F32, type_v=F32, flash_attn=False)
    assert model.n_vocab() == logits.shape[-1], f"{model.n_vocab()} tokens, and {logits.shape[-1]} in the reference"
    worst, agree, losses = 0.0, 0, []
    for ids, want in zip(tokens, logits):
        model.reset()
        model.eval(ids.tolist())
        got = model.scores[:length]
        worst = max(worst, np.abs(got - want).max() / np.abs(want).max())
        agree += (got.argmax(-1) == want.argmax(-1)).sum()
        rows = got[:-1].astype(np.float64)
        top = rows.max(-1, keepdims=True)
        sums = np.log(np.exp(rows - top).sum(-1)) + top[:, 0]
        losses.append((sums - rows[np.arange(length - 1), ids[1:]]).mean())
    loss = float(np.mean(losses))
    print(f"logits differ by {worst:.1e} of the largest; the likeliest token is the same in {agree} of {tokens.size}; "
          f"loss {loss:.6f}, transformers {reference['loss']:.6f}; llama-cpp-python "
          f"{importlib.metadata.version('llama-cpp-python')}")
    sys.exit(0 if worst <= tolerance else f"more than {tolerance:.0e}")


if __name__ == "__main__":
    main()
