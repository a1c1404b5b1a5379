#!/usr/bin/env python3
"""Checks that transformers loads what we export and computes what we compute.

    cargo run --release -p trainyard-model --example export_samples -- /tmp/exports
    .venv-peers/bin/python scripts/golden/check_export.py /tmp/exports      (set up as make_goldens.py says)

Each folder is an export with `ours.json`: tokens, and the logits that we computed from the exported weights. Fails when a
weight is missing, unexpected or misshapen for transformers, or when logits differ by more than 1e-4 of their norm.
"""

import json
import logging
import sys
from pathlib import Path

import torch
import transformers

TOLERANCE = 1e-4


def check(folder):
    ours = json.loads((folder / "ours.json").read_text())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    complaints = {key: value for key, value in info.items() if value}
    assert not complaints, f"{folder.name}: {complaints}"
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, [2, 3]), f"{folder.name}: {generation}"
    tokens = torch.tensor(ours["tokens"]).view(-1, ours["length"])
    expected = torch.tensor(ours["logits"], dtype=torch.float64).view(*tokens.shape, ours["vocab_size"])
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens, use_cache=False).logits.double()
    error = ((logits - expected).norm() / expected.norm()).item()
    assert error <= TOLERANCE, f"{folder.name}: logits differ by {error:.1e}"
    return error


def main():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/ours.json"))
    assert folders, f"no exports in {sys.argv[1]}"
    for folder in folders:
        print(f"{folder.name:45} {check(folder):.1e}")
    print(f"{len(folders)} exports agree; transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
