#!/usr/bin/env python3
"""Writes the golden data of T5: logits, loss and gradients of transformers, in f32.

Rerun as `make_goldens.py`. It writes, replacing what is there:

    crates/model/tests/golden/{t5,t5_gated}/
        config.json, model.safetensors   version 1.0 (ReLU, tied) and 1.1 (gated GELU, a head of its own)
        golden.safetensors   tokens and targets i32 [79]: two pairs of sequences of LENGTHS, one behind the other, with
                             targets -100 in the encoder's; logits f32 [21, 96] of the decoder's tokens; loss f32 [],
                             the mean over targets, with `grad.NAME` for each parameter by its name in files; and
                             greedy i32 [12], what the first pair's encoder makes the model generate after token 0
"""

import json
import math
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parents[2] / "crates/model/tests/golden"
VOCAB, LENGTHS = 96, [(37, 9), (21, 12)]


def initialise(model, seed):
    """Wide, seeded weights, so that no gradient is near to zero."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            draw = torch.randn(p.shape, generator=g)
            if "relative_attention_bias" in name:
                p.copy_(draw)
            elif "shared" in name or "embed_tokens" in name:
                p.copy_(draw * 0.8)
            elif name.endswith(("q.weight", "k.weight")):
                p.copy_(draw * 0.4 / math.sqrt(p.shape[-1]))
            elif p.ndim == 2:
                p.copy_(draw * 1.2 / math.sqrt(p.shape[-1]))
            else:
                p.copy_(1.0 + draw * 0.2)


def write(name, seed, tied, **more):
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=12, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4,
        relative_attention_num_buckets=16, relative_attention_max_distance=20, dropout_rate=0.0,
        tie_word_embeddings=tied, decoder_start_token_id=0, **more)
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager")
    assert model.config.scale_decoder_outputs == tied
    if not tied:
        # transformers 5 makes new models with one table.
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, 32))
    initialise(model, seed)
    model.eval()
    own = {"shared.weight": model.shared.weight}
    own |= {n: p for n, p in model.named_parameters() if "embed_tokens" not in n and (not tied or "lm_head" not in n)}
    save_file({n: p.detach().clone() for n, p in own.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    # As files of transformers 4 say it, which published ones are.
    said = json.loads(config.to_json_string())
    said.pop("scale_decoder_outputs")
    said["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")

    g = torch.Generator().manual_seed(seed + 1)
    tokens, targets, logits, losses = [], [], [], []
    for encoder, decoder in LENGTHS:
        read = torch.randint(1, VOCAB, (encoder,), generator=g)
        said = torch.randint(1, VOCAB, (decoder,), generator=g)
        begun = torch.cat([torch.zeros(1, dtype=torch.long), said[:-1]])
        found = model(input_ids=read[None], decoder_input_ids=begun[None]).logits[0]
        losses.append(F.cross_entropy(found, said, reduction="sum"))
        logits.append(found.detach())
        tokens += [read, begun]
        targets += [torch.full((encoder,), -100), said]
    loss = sum(losses) / sum(decoder for _, decoder in LENGTHS)
    loss.backward()
    grads = {f"grad.{n}": p.grad.clone() for n, p in own.items()}
    quiet = [n for n, grad in grads.items() if grad.norm() < 1e-3]
    assert not quiet, quiet
    greedy, read = [0], tokens[0][None]
    for _ in range(12):
        with torch.no_grad():
            last = model(input_ids=read, decoder_input_ids=torch.tensor([greedy])).logits[0, -1]
        greedy.append(int(last.argmax()))
    save_file(
        {"tokens": torch.cat(tokens).int(), "targets": torch.cat(targets).int(), "logits": torch.cat(logits),
         "loss": loss.detach(), "greedy": torch.tensor(greedy[1:]).int(), **grads},
        folder / "golden.safetensors", metadata={"transformers": transformers.__version__})
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {n.removeprefix("grad.") for n in grads}
    print(f"{name}: {sum(p.numel() for p in own.values())} parameters, loss {loss.item():.6f}, greedy {greedy[1:]}; "
          f"torch {torch.__version__}, transformers {transformers.__version__}")


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    write("t5", 81, True)
    write("t5_gated", 91, False, feed_forward_proj="gated-gelu")


if __name__ == "__main__":
    main()
