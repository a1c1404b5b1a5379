#!/usr/bin/env python3
"""Writes GGUF files of tiny models, and what transformers and the package `gguf` make of them.

    .venv-peers/bin/pip install gguf                          (the rest as make_goldens.py says, which runs first)
    .venv-peers/bin/python scripts/golden/make_gguf.py

It writes, replacing what is there, into crates/model/tests/golden/gguf:

    NAME.gguf                  a tiny model of each architecture, laid out as llama.cpp's convert_hf_to_gguf.py does, with
                               names from the tables of `gguf`; matrices in Q8_0, Q4_0 or F16, norms and biases in F32
    NAME.safetensors           input_ids i32 [2, 13] and logits f32 [2, 13, vocab] of transformers with the weights that
                               `gguf` decodes; where transformers reads the architecture's tensors, these are compared
    blocks.gguf                random blocks of every quantisation that is read, and F16 and BF16
    blocks.safetensors         what `gguf` decodes from them
    encoded.safetensors        numbers, and the blocks that `gguf` rounds them to, of every kind that is written
    tokenizer_NAME.gguf        vocabularies without weights, one for each way of building a tokenizer
    tokenizers.json            their tokens for some texts, from transformers
"""

import json
import shutil
import zlib
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from make_goldens import BATCH, DIM, MODELS, SEQ, VOCAB, initialise, llama_like

OUT = MODELS / "gguf"
ARCHITECTURES = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def models():
    """name -> (architecture, config, encoding of matrices, True if transformers reads its tensors)"""
    t = transformers
    # The numbers of published models, so that wavelengths (6, 167, 4443, 118,000) are kept, blended and divided.
    llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {
        "llama": ("llama", t.LlamaConfig(**llama_like(rope_parameters=DEFAULT)), Q.Q8_0, True),
        "llama3_rope": ("llama", t.LlamaConfig(**llama_like(
            attention_bias=True, tie_word_embeddings=True, rope_parameters=llama3)), Q.F16, True),
        "qwen2": ("qwen2", t.Qwen2Config(**llama_like(rope_parameters=DEFAULT)), Q.Q4_0, True),
        "qwen3": ("qwen3", t.Qwen3Config(**llama_like(
            head_dim=16, tie_word_embeddings=True, rope_parameters=DEFAULT)), Q.Q8_0, True),
        "gpt2": ("gpt2", t.GPT2Config(
            vocab_size=VOCAB, n_positions=32, n_embd=DIM, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=2), Q.Q8_0, True),
        # Six layers, of which the last sees everything.
        "gemma3": ("gemma3", t.Gemma3TextConfig(**llama_like(
            num_hidden_layers=6, head_dim=16, query_pre_attn_scalar=16, tie_word_embeddings=True, sliding_window=5,
            pad_token_id=0,
            rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                             "sliding_attention": DEFAULT})), Q.Q8_0, True),
        "olmo2": ("olmo2", t.Olmo2Config(**llama_like(pad_token_id=0, rope_parameters=DEFAULT)), Q.Q8_0, False),
        "phi3": ("phi3", t.Phi3Config(**llama_like(
            pad_token_id=0, sliding_window=5, rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5})), Q.Q8_0, True),
    }


def stored(architecture, config, name, x):
    """A tensor as convert_hf_to_gguf.py stores it."""
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return x + 1
    if architecture == "gpt2" and name.startswith("blk.") and x.ndim == 2:
        return x.T
    return x


def restored(architecture, config, name, x):
    """The inverse of `stored`."""
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return x - 1
    if architecture == "gpt2" and name.startswith("blk.") and x.ndim == 2:
        return x.T
    return x


def describe(writer, architecture, config):
    """The metadata that convert_hf_to_gguf.py writes for these architectures."""
    c = config
    writer.add_name("tiny")
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_head_count(c.num_attention_heads)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * c.n_embd)
        writer.add_layer_norm_eps(c.layer_norm_epsilon)
        return
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture != "gemma3":
        writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    if architecture != "phi3":
        writer.add_key_length(head)
        writer.add_value_length(head)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if getattr(c, "sliding_window", None) and architecture in ("gemma3", "phi3"):
        writer.add_sliding_window(c.sliding_window)


def llama3_factors(config):
    """The tensor of factors that convert_hf_to_gguf.py computes from the rule."""
    rope, head = config.rope_parameters, config.hidden_size // config.num_attention_heads
    factors = []
    for freq in 1.0 / rope["rope_theta"] ** (np.arange(0, head, 2, dtype=np.float32) / head):
        length, old = 2 * np.pi / freq, rope["original_max_position_embeddings"]
        low, high = old / rope["low_freq_factor"], old / rope["high_freq_factor"]
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            smooth = (old / length - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def write_model(name, architecture, config, encoding, read_alike):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    seed = zlib.crc32(f"gguf {name}".encode())
    initialise(model, seed)
    model.tie_weights()
    path = OUT / f"{name}.gguf"
    writer = GGUFWriter(path, architecture)
    describe(writer, architecture, config)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    decoded = {}
    for theirs, parameter in model.named_parameters():
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert ours, theirs
        x = np.ascontiguousarray(stored(architecture, config, ours, parameter.detach().numpy()))
        kind = Q.F32 if x.ndim == 1 else encoding if x.shape[-1] % 32 == 0 else Q.F16
        data = x.astype(np.float16) if kind == Q.F16 else x if kind == Q.F32 else quantize(x, kind)
        writer.add_tensor(ours, data, raw_dtype=None if kind in (Q.F32, Q.F16) else kind)
        back = data.astype(np.float32) if kind in (Q.F32, Q.F16) else dequantize(data, kind)
        decoded[theirs] = torch.from_numpy(np.array(restored(architecture, config, ours, back)))
    if config.model_type == "llama" and config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with torch.no_grad():
        for theirs, parameter in model.named_parameters():
            parameter.copy_(decoded[theirs])
    model.tie_weights()
    model.eval()
    ids = torch.randint(3, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed + 1))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        if read_alike:
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                OUT, gguf_file=path.name, config=config, dtype=torch.float32, attn_implementation="eager").eval()
            error = (theirs(input_ids=ids, use_cache=False).logits - logits).norm() / logits.norm()
            assert error < 1e-6, f"{name}: transformers reads another model: {error}"
    save_file({"input_ids": ids.int(), "logits": logits.contiguous()}, OUT / f"{name}.safetensors")
    print(f"{name}: {path.stat().st_size} bytes")


def write_encoded():
    """Numbers of many sizes; blocks of zeros, of one sign, of equal numbers, and with ties and tiny scales."""
    rng = np.random.default_rng(11)
    x = rng.normal(0, 1, (24, 32)) * 10.0 ** rng.integers(-6, 4, (24, 1))
    x[0], x[1], x[2], x[3] = 0, np.abs(x[1]), -np.abs(x[2]), 0.25
    x[4] = np.arange(32) - 16.0
    x[5] = (np.arange(32) - 16.0) / 2
    x[6], x[6, 5] = 0, -1e-30
    x[7] = np.tile([1.0, -1.0], 16)
    x = x.astype(np.float32)
    tensors = {"x": torch.from_numpy(x)}
    for kind in [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0]:
        tensors[kind.name] = torch.from_numpy(quantize(x, kind).copy())
    save_file(tensors, OUT / "encoded.safetensors")


def write_blocks():
    """Blocks of random bits, with scales that are numbers."""
    rng = np.random.default_rng(20240608)
    scales = {Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2],
              Q.Q6_K: [208]}
    path, decoded = OUT / "blocks.gguf", {}
    writer = GGUFWriter(path, "llama")
    for kind, places in scales.items():
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        rows, blocks = 3, 512 // elements
        data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
        for at in places:
            halves = rng.normal(0, 0.1, (rows, blocks, 1)).astype(np.float16)
            data[:, :, at:at + 2] = halves.view(np.uint8)
        data = data.reshape(rows, blocks * size)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        decoded[kind.name] = torch.from_numpy(dequantize(data, kind).copy())
    x = rng.normal(0, 1, (3, 512)).astype(np.float32)
    writer.add_tensor("F16", x.astype(np.float16))
    decoded["F16"] = torch.from_numpy(x.astype(np.float16).astype(np.float32))
    data = quantize(x, Q.BF16)
    writer.add_tensor("BF16", data, raw_dtype=Q.BF16)
    decoded["BF16"] = torch.from_numpy(dequantize(data, Q.BF16).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file({name: x.contiguous() for name, x in decoded.items()}, OUT / "blocks.safetensors")


TEXTS = ["the theme of these things", " two  spaces   and\n\na line\tand a tab", "caf\u00e9 \u65e5\u672c \U0001f600 na\u00efve",
         "I'll say 12345 they're done.", "<mark>kept whole</mark> and </s> <eos>", ""]


def pieces(space):
    """Tokens of SentencePiece in the order in which they were merged, after the characters."""
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz'.,0123456789") | {space})
    merged = ["th", "he", "the", "in", "an", "re", f"{space}t", f"{space}th", f"{space}the", "ing", f"{space}a",
              f"{space}an", f"{space}and", "es", "ese", "er", "on", "me", f"{space}of", "ll", "of", f"{space}s", "ne"]
    return letters, merged


def write_tokenizers():
    texts = {}

    def write(name, architecture, kind, tokens, types, more):
        path = OUT / f"tokenizer_{name}.gguf"
        writer = GGUFWriter(path, architecture)
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        more(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        read_architecture, described, config = get_gguf_tokenizer(str(path))
        backend, _ = convert_gguf_tokenizer(read_architecture, described)
        ids = [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
        texts[name] = {"texts": TEXTS, "ids": ids, "add_bos": bool(config.get("add_bos_token"))}

    normal, unknown, control, user, byte = 1, 2, 3, 4, 6
    fallback = [f"<0x{b:02X}>" for b in range(256)]
    letters, merged = pieces("\u2581")
    for name, architecture in [("llama", "llama"), ("phi3", "phi3")]:
        tokens = ["<unk>", "<s>", "</s>", "<mark>"] + fallback + merged + letters
        types = [unknown, control, control, user] + [byte] * 256 + [normal] * len(merged + letters)
        scores = [0.0] * 260 + [-float(i) for i in range(len(merged))] + [-1000.0] * len(letters)

        def more(writer):
            writer.add_token_scores(scores)
            writer.add_bos_token_id(1)
            writer.add_eos_token_id(2)
        write(name, architecture, "llama", tokens, types, more)

    # Gemma's scores say nothing; runs of spaces stand there as such.
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mark>", "\n\n", "  ", "   "] + fallback + merged + letters
    types = [control, control, control, unknown, user, user, user, user] + [byte] * 256 + [normal] * len(merged + letters)

    def gemma(writer):
        writer.add_token_scores([-1000.0] * len(tokens))
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)
    write("gemma3", "gemma3", "llama", tokens, types, gemma)

    letters, merged = pieces("\u0120")
    alphabet = sorted(set(transformers.convert_slow_tokenizer.bytes_to_unicode().values()))
    pairs = [("t", "h"), ("h", "e"), ("t", "he"), ("i", "n"), ("a", "n"), ("r", "e"), ("\u0120", "t"),
             ("\u0120t", "he"), ("in", "g"), ("\u0120", "a"), ("\u0120a", "n"), ("1", "2"), ("12", "3"), ("l", "l")]
    byte_tokens = alphabet + [left + right for left, right in pairs] + ["<|endoftext|>", "<mark>"]
    byte_types = [normal] * (len(byte_tokens) - 2) + [control, user]
    for name, architecture, pre in [("gpt2", "gpt2", "gpt-2"), ("llama3", "llama", "llama-bpe"), ("qwen2", "qwen2", "qwen2")]:
        def bpe(writer):
            writer.add_tokenizer_pre(pre)
            writer.add_token_merges([f"{left} {right}" for left, right in pairs])
            writer.add_eos_token_id(len(byte_tokens) - 2)
            writer.add_bos_token_id(len(byte_tokens) - 2)
            if name == "llama3":
                writer.add_add_bos_token(True)
        write(name, architecture, "gpt2", byte_tokens, byte_types, bpe)
    (OUT / "tokenizers.json").write_text(json.dumps(texts, indent=1) + "\n")


def main():
    torch.set_num_threads(1)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    for name, (architecture, config, encoding, read_alike) in models().items():
        write_model(name, architecture, config, encoding, read_alike)
    write_encoded()
    write_blocks()
    write_tokenizers()
    total = sum(path.stat().st_size for path in OUT.iterdir())
    print(f"{total / 1e6:.2f} MB; gguf {version('gguf')}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
