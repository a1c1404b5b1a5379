#!/usr/bin/env python3
"""Writes the golden data that the tests compare against: what transformers and torch compute.

Rerun (about ten seconds; the output is a function of the seeds and of the two versions, printed at the end):

    python3 -m venv .venv-peers && .venv-peers/bin/pip install torch numpy transformers safetensors
    .venv-peers/bin/python scripts/golden/make_goldens.py [NAME ...]

With names it writes the data of these models alone. It writes, replacing what is there:

    crates/model/tests/golden/NAME/        one tiny randomly initialised model of each family
        config.json, model.safetensors     as `save_pretrained` writes them (f32)
        sharded/                           for one of them: the same weights in several files with an index
        config_v4.json                     where rope is in use: the same config as transformers 4 spelled it
        golden.safetensors                 input_ids i32 [2, 13], labels i32 [2, 13] (already shifted: labels[t] is
                                           the token after input_ids[t]; -100 is ignored), logits f32 [2, 13, vocab],
                                           loss f32 [] (mean over the labels that count) and, for each parameter by
                                           its Hugging Face name, `grad.NAME`: the gradient of that loss
    crates/engine/tests/golden/optimizers.json   ten steps of every optimizer, in f64, and learning-rate schedules
    crates/tensor/tests/golden/rope.json         rotary frequencies of every scaling rule

Weights are drawn much wider than any real initialisation: with the usual 0.02 every gradient of so small a model
is so near to zero that a wrong term could hide below the tolerance.
"""

import json
import math
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "crates/model/tests/golden"
OPTIMIZERS = ROOT / "crates/engine/tests/golden/optimizers.json"
ROPE = ROOT / "crates/tensor/tests/golden/rope.json"

VOCAB, DIM, HEADS, LAYERS, BATCH, SEQ = 97, 32, 4, 2, 2, 13
IGNORED = -100


# ---------------------------------------------------------------------------------------------- models

def llama_like(**more):
    """What the Llama-shaped configs below share: four query heads of width 8 over two key/value heads."""
    return dict(
        vocab_size=VOCAB, hidden_size=DIM, intermediate_size=40, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    ) | more


def models():
    """name -> (config, maximum shard size or None)"""
    t = transformers
    return {
        "gpt2": (t.GPT2Config(
            vocab_size=VOCAB, n_positions=32, n_embd=DIM, n_layer=LAYERS, n_head=HEADS,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2), None),
        "llama": (t.LlamaConfig(**llama_like(
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0})), None),
        # An original context of 64 puts the four wavelengths (6, 63, 628, 6283) into all three of the rule's cases.
        "llama3_rope": (t.LlamaConfig(**llama_like(
            rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64})), None),
        "mistral": (t.MistralConfig(**llama_like(
            sliding_window=5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})), None),
        "qwen2": (t.Qwen2Config(**llama_like(
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})), None),
        "qwen3": (t.Qwen3Config(**llama_like(
            head_dim=12, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})), "24KB"),
        "smollm": (t.LlamaConfig(**llama_like(
            tie_word_embeddings=True, num_attention_heads=4, num_key_value_heads=1, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0})), None),
        # One layer with a window and one without, whose rotations differ; scores are not divided by sqrt(head_dim).
        "gemma3": (t.Gemma3TextConfig(**llama_like(
            head_dim=12, tie_word_embeddings=True, sliding_window=5, query_pre_attn_scalar=10, pad_token_id=0,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})), None),
        "olmo2": (t.Olmo2Config(**llama_like(
            pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})), None),
        # As many key/value heads as query heads: queries and keys are normalised by one kernel.
        "olmo2_all_heads": (t.Olmo2Config(**llama_like(
            pad_token_id=0, num_key_value_heads=HEADS,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0})), None),
        # Half of each head is rotated, as three quarters are in Phi-4-mini.
        "phi3": (t.Phi3Config(**llama_like(
            pad_token_id=0, sliding_window=5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})), None),
        "mixtral": (t.MixtralConfig(**llama_like(
            num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.0,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})), None),
        # One layer, because transformers takes the balance loss over all layers at once, and not for each.
        "mixtral_balanced": (t.MixtralConfig(**llama_like(
            num_hidden_layers=1, num_local_experts=5, num_experts_per_tok=2, router_aux_loss_coef=0.3,
            output_router_logits=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})), None),
        "qwen3_moe": (t.Qwen3MoeConfig(**llama_like(
            head_dim=12, num_hidden_layers=3, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12,
            norm_topk_prob=False, mlp_only_layers=[1], router_aux_loss_coef=0.0,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})), None),
        "dots1": (t.Dots1Config(**llama_like(
            head_dim=12, n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=12,
            first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.7, sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})), None),
    }


def initialise(model, seed):
    """Wide, seeded weights: matrices so that products keep their scale, gains around one, no bias at zero."""
    g = torch.Generator().manual_seed(seed)
    # Gemma's gains are 1 + w.
    norm = 0.0 if model.config.model_type == "gemma3_text" else 1.0
    with torch.no_grad():
        for name, p in model.named_parameters():
            draw = torch.randn(p.shape, generator=g)
            if p.ndim == 2:
                embedding = any(s in name for s in ("wte", "wpe", "embed_tokens"))
                p.copy_(draw * (0.5 if embedding else 1.2 / math.sqrt(DIM)))
            elif p.ndim == 3:
                p.copy_(draw * 1.2 / math.sqrt(p.shape[-1]))
            elif name.endswith("bias"):
                p.copy_(draw * 0.2)
            else:
                p.copy_(norm + draw * 0.2)
        for name, p in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)


def in_files(config, name, values):
    """The tensors of files that a parameter is: experts, which transformers 5 stacks, lie there one by one."""
    mixtral = config.model_type == "mixtral"
    base = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
    if name.endswith("experts.gate_up_proj"):
        gate, up = ("w1", "w3") if mixtral else ("gate_proj", "up_proj")
        for e, both in enumerate(values):
            for part, rows in zip((gate, up), both.chunk(2)):
                yield base.replace("gate_up_proj", f"{e}.{part}.weight"), rows.contiguous()
    elif name.endswith("experts.down_proj"):
        for e, rows in enumerate(values):
            yield base.replace("down_proj", f"{e}.{'w2' if mixtral else 'down_proj'}.weight"), rows.contiguous()
    else:
        yield base, values.contiguous()


def config_as_v4(config):
    """The config as transformers 4 wrote it: `rope_theta` and `rope_scaling` where 5 has `rope_parameters`."""
    old = json.loads(config.to_json_string())
    rope = dict(old.pop("rope_parameters"))
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    old["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"rope_type": kind} | rope
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    old["transformers_version"] = "4.46.0"
    return old


def write_model(name, config, shard):
    folder = MODELS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    seed = zlib.crc32(name.encode())
    initialise(model, seed)
    model.tie_weights()
    model.eval()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if shard:
        model.save_pretrained(folder / "sharded", max_shard_size=shard)
        (folder / "sharded/generation_config.json").unlink(missing_ok=True)
        assert (folder / "sharded/model.safetensors.index.json").exists(), "the shard size is too large to split"
    if hasattr(config, "rope_parameters"):
        (folder / "config_v4.json").write_text(json.dumps(config_as_v4(config), indent=2, sort_keys=True) + "\n")

    g = torch.Generator().manual_seed(seed + 1)
    text = torch.randint(3, VOCAB, (BATCH, SEQ + 1), generator=g)
    ids, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    balanced = getattr(config, "output_router_logits", False)
    if not balanced:
        labels[0, 3] = labels[1, 0] = labels[1, -1] = IGNORED
    result = model(input_ids=ids, use_cache=False)
    logits = result.logits
    loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), ignore_index=IGNORED)
    # The gradients are those of both losses.
    total = loss + config.router_aux_loss_coef * result.aux_loss if balanced else loss
    total.backward()

    out = {"input_ids": ids.int(), "labels": labels.int(), "logits": logits.detach().contiguous(), "loss": loss.detach()}
    quiet = []
    for parameter, p in model.named_parameters():
        out |= {f"grad.{name}": grad for name, grad in in_files(config, parameter, p.grad)}
        if p.grad.norm() < 1e-3:
            quiet.append(parameter)
    assert not quiet, f"{name}: gradients too small to test anything: {quiet}"
    save_file(out, folder / "golden.safetensors", metadata={"transformers": transformers.__version__})

    if getattr(config, "sliding_window", None) and name == "mistral":
        check_window(model, ids, config.sliding_window)
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, loss {loss.item():.6f}")


def check_window(model, ids, window):
    """A window of w means: position t sees t-w+1 ..= t. Holds for one layer; two layers reach 2(w-1) back."""
    base = model(input_ids=ids, use_cache=False).logits
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    differs = (model(input_ids=changed, use_cache=False).logits - base).abs().amax(dim=(0, 2)) > 0
    reach = LAYERS * (window - 1)
    assert differs[reach].item() and not differs[reach + 1:].any(), differs


# ------------------------------------------------------------------------------------------ optimizers

STEPS, ROWS, COLS = 10, 6, 4
FUSED = (8, 4, 4)  # rows of queries, keys and values, one below the other


def rounded(array):
    """Nested lists with 12 significant digits: far below f32's resolution, and half the size of exact."""
    return [rounded(x) for x in array] if np.ndim(array) else float(f"{float(array):.12g}")


def torch_trajectory(make, weight, bias, grads):
    """Steps of a torch optimizer in f64. `bias` is None for optimizers of matrices."""
    params = [torch.tensor(weight, dtype=torch.float64, requires_grad=True)]
    if bias is not None:
        params.append(torch.tensor(bias, dtype=torch.float64, requires_grad=True))
    optimizer = make(params)
    path = [[] for _ in params]
    for step in grads:
        for p, g, out in zip(params, step, path):
            p.grad = torch.tensor(g, dtype=torch.float64)
        optimizer.step()
        for p, out in zip(params, path):
            out.append(p.detach().numpy().copy())
    return path


def numpy_trajectory(update, weight, bias, grads):
    """Steps of `update(state, parameter, gradient, step) -> parameter`, for those that torch does not have in f64."""
    params = [weight] + ([bias] if bias is not None else [])
    states = [{} for _ in params]
    path = [[] for _ in params]
    for number, step in enumerate(grads, 1):
        for i, g in zip(range(len(params)), step):
            params[i] = update(states[i], params[i], g, number)
            path[i].append(params[i].copy())
    return path


def lion(lr, beta1, beta2, decay):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2."""
    def update(s, p, g, _):
        m = s.get("m", np.zeros_like(p))
        direction = np.sign(beta1 * m + (1 - beta1) * g)
        s["m"] = beta2 * m + (1 - beta2) * g
        return p - lr * (direction + decay * p)
    return update


def adafactor(lr, beta2_decay, eps1, eps2, clip, decay, relative):
    """Shazeer & Stern 2018, algorithms 4 and 5, without momentum.

    With `relative` the step is max(eps2, rms(p)) * min(lr, 1/sqrt(t)), as in the paper's section 8 and in torch;
    without it the step is `lr` as the schedule gives it.
    """
    def rms(x):
        return np.sqrt(np.mean(x * x))

    def update(s, p, g, t):
        beta2 = 1 - t ** beta2_decay
        square = g * g + eps1
        if p.ndim == 2:
            s["r"] = beta2 * s.get("r", np.zeros(p.shape[0])) + (1 - beta2) * square.mean(1)
            s["c"] = beta2 * s.get("c", np.zeros(p.shape[1])) + (1 - beta2) * square.mean(0)
            v = np.outer(s["r"], s["c"]) / s["r"].mean()
        else:
            s["v"] = v = beta2 * s.get("v", np.zeros_like(p)) + (1 - beta2) * square
        u = g / np.sqrt(v)
        u /= max(1.0, rms(u) / clip)
        alpha = max(eps2, rms(p)) * min(lr, 1 / math.sqrt(t)) if relative else lr
        return p * (1 - lr * decay) - alpha * u
    return update


def orthogonal(g, steps=5, a=3.4445, b=-4.7750, c=2.0315, eps=1e-7):
    """Newton-Schulz towards the nearest semi-orthogonal matrix (Jordan et al. 2024, "Muon"), here in f64."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / max(np.linalg.norm(x), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def muon(lr, momentum, decay, nesterov, scale):
    """torch.optim.Muon's conventions: the momentum is an average (not a sum); decay is decoupled."""
    def update(s, p, g, _):
        s["m"] = momentum * s.get("m", np.zeros_like(p)) + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * s["m"] if nesterov else s["m"]
        rows, cols = p.shape
        factor = {"original": math.sqrt(max(1.0, rows / cols)),
                  "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols))}[scale]
        return p * (1 - lr * decay) - lr * factor * orthogonal(u)
    return update


def fused(rng):
    """Rules that look at a matrix as a whole, over matrices (and vectors) that lie in one parameter: the references
    are given each by itself, as transformers has them, and the numbers are put below each other."""
    def split(x):
        return np.split(x, np.cumsum(FUSED)[:-1])

    rows = sum(FUSED)
    weight, bias = rng.normal(size=(rows, COLS)), rng.normal(size=rows)
    # The matrices differ in the sizes of their gradients, so that one rule over all of them shows.
    sizes = np.repeat([1.0, 5.0, 0.2], FUSED)
    grads = [(rng.normal(size=(rows, COLS)) * sizes[:, None] + 0.1, rng.normal(size=rows) * sizes) for _ in range(STEPS)]

    def each(part, trajectory, *make):
        parts = [trajectory(*make, start, None, [(split(g[part])[i],) for g in grads])[0]
                 for i, start in enumerate(split((weight, bias)[part]))]
        return [np.concatenate(step) for step in zip(*parts)]

    def case(name, ours, theirs, tolerance, parts, **hyper):
        paths = [each(part, numpy_trajectory, ours) for part in parts]
        for part, path in zip(parts, paths):
            close(path, each(part, torch_trajectory, theirs), tolerance)
        return {"name": name, "hyper": hyper, "weight": [rounded(w.ravel()) for w in paths[0]]} | (
            {"bias": [rounded(b) for b in paths[1]]} if len(paths) > 1 else {})

    o = torch.optim
    cases = [case("muon", muon(0.02, 0.95, 0.1, True, "original"),
                  lambda p: o.Muon(p, lr=0.02, momentum=0.95, weight_decay=0.1, nesterov=True), 5e-3, [0],
                  lr=0.02, momentum=0.95, weight_decay=0.1)]
    cases.append(case("adafactor", adafactor(1e-2, -0.8, 1e-30, 1e-3, 1.0, 0.0, True),
                      lambda p: o.Adafactor(p, lr=1e-2, beta2_decay=-0.8, eps=(1e-15, 1e-3), d=1.0), 1e-12, [0, 1],
                      lr=1e-2, beta2_decay=-0.8, clip_threshold=1.0))
    return {"rows": list(FUSED), "columns": COLS, "weight": rounded(weight.ravel()), "bias": rounded(bias),
            "grads": [{"weight": rounded(w.ravel()), "bias": rounded(b)} for w, b in grads], "cases": cases}


def close(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=tolerance, atol=tolerance)


def write_optimizers():
    rng = np.random.default_rng(20240607)
    weight, bias = rng.normal(size=(ROWS, COLS)), rng.normal(size=5)
    # Gradients with a drift and a changing scale, so that momenta, bias corrections and clipping all show.
    grads = [(rng.normal(size=(ROWS, COLS)) * 0.7 ** (t % 4) + 0.3, rng.normal(size=5) * 1.5 ** (t % 3) - 0.2)
             for t in range(STEPS)]
    cases = []

    def add(name, kind, path, **hyper):
        case = {"name": name, "kind": kind, "hyper": hyper, "weight": [rounded(w.ravel()) for w in path[0]]}
        if len(path) > 1:
            case["bias"] = [rounded(b) for b in path[1]]
        cases.append(case)

    def torch_case(name, kind, make, **hyper):
        add(name, kind, torch_trajectory(make, weight, bias, grads), **hyper)

    o = torch.optim
    torch_case("adamw", "adamw", lambda p: o.AdamW(p, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
               lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
    torch_case("adamw_no_decay", "adamw", lambda p: o.AdamW(p, lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0),
               lr=3e-3, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.0)
    # torch couples SGD's decay into the gradient: g + weight_decay * p. The decoupled form is its own case.
    torch_case("sgd", "sgd", lambda p: o.SGD(p, lr=0.05),
               lr=0.05, momentum=0.0, nesterov=False, weight_decay=0.0)
    torch_case("sgd_momentum", "sgd", lambda p: o.SGD(p, lr=0.05, momentum=0.9),
               lr=0.05, momentum=0.9, nesterov=False, weight_decay=0.0)
    torch_case("sgd_nesterov", "sgd", lambda p: o.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
               lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.0)
    torch_case("sgd_coupled_decay", "sgd", lambda p: o.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
               lr=0.05, momentum=0.9, nesterov=False, weight_decay=0.1, decay="coupled")

    def sgd_decoupled(s, p, g, t):
        s["m"] = 0.9 * s["m"] + g if t > 1 else g
        return p * (1 - 0.05 * 0.1) - 0.05 * s["m"]
    add("sgd_decoupled_decay", "sgd", numpy_trajectory(sgd_decoupled, weight, bias, grads),
        lr=0.05, momentum=0.9, nesterov=False, weight_decay=0.1, decay="decoupled")

    add("lion", "lion", numpy_trajectory(lion(1e-3, 0.9, 0.99, 0.1), weight, bias, grads),
        lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)

    relative = numpy_trajectory(adafactor(1e-2, -0.8, 1e-30, 1e-3, 1.0, 0.01, True), weight, bias, grads)
    # torch clamps the variance at eps1^2 where the paper adds eps1 to the squared gradient: 1e-15 against 1e-30.
    close(relative, torch_trajectory(
        lambda p: o.Adafactor(p, lr=1e-2, beta2_decay=-0.8, eps=(1e-15, 1e-3), d=1.0, weight_decay=0.01),
        weight, bias, grads), 1e-12)
    shared = dict(lr=1e-2, beta2_decay=-0.8, eps1=1e-30, eps2=1e-3, clip_threshold=1.0, weight_decay=0.01)
    add("adafactor_relative", "adafactor", relative, **shared, relative_step=True)
    add("adafactor_absolute", "adafactor",
        numpy_trajectory(adafactor(1e-2, -0.8, 1e-30, 1e-3, 1.0, 0.01, False), weight, bias, grads),
        **shared, relative_step=False)

    for scale in ("original", "match_rms_adamw"):
        path = numpy_trajectory(muon(0.02, 0.95, 0.1, True, scale), weight, None, grads)
        # torch iterates in bf16, whose resolution is 1/256; ten steps of 0.02 stay within this.
        close(path, torch_trajectory(lambda p: o.Muon(
            p, lr=0.02, momentum=0.95, weight_decay=0.1, nesterov=True, adjust_lr_fn=scale), weight, None, grads), 5e-3)
        add(f"muon_{scale}", "muon", path, lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.1, scale=scale,
            ns_steps=5, ns_coefficients=[3.4445, -4.7750, 2.0315], eps=1e-7)

    params = [torch.tensor(g, requires_grad=True) for g in grads[0]]
    for p, g in zip(params, grads[0]):
        p.grad = torch.tensor(g)
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0).item()
    clip = {"max_norm": 1.0, "norm_before": rounded(norm), "weight": rounded(params[0].grad.numpy().ravel()),
            "bias": rounded(params[1].grad.numpy())}

    OPTIMIZERS.parent.mkdir(parents=True, exist_ok=True)
    OPTIMIZERS.write_text(dumps({
        "about": "Weight [6, 4] row-major and bias [5] after each of ten steps with the given gradients; computed in "
                 "f64 with torch " + torch.__version__.split("+")[0] + " or from the papers. "
                 "scripts/golden/make_goldens.py",
        "shape": [ROWS, COLS],
        "weight": rounded(weight.ravel()), "bias": rounded(bias),
        "grads": [{"weight": rounded(w.ravel()), "bias": rounded(b)} for w, b in grads],
        "optimizers": cases, "clip_first_gradient": clip, "schedules": schedules(),
        "fused": fused(np.random.default_rng(20240608)),
    }))
    print(f"optimizers: {', '.join(c['name'] for c in cases)}")


# ------------------------------------------------------------------------------------------- schedules

def schedules():
    """lr(s) for step s = 0 .. total-1 of each schedule: the warmup (s+1)/(warmup+1) reaches the peak at s = warmup,
    where the decay starts; progress p = (s - start) / (total - start) would be one at s = total."""
    peak, low, total, warmup = 1e-3, 1e-4, 50, 8

    def linear(p): return peak + (low - peak) * p
    def cosine(p): return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * p))
    def inverse_sqrt(p): return low + (peak - low) * (1 - math.sqrt(p))

    def values(decay, start=warmup, warmup=warmup):
        out = []
        for s in range(total):
            if s < warmup:
                out.append(peak * (s + 1) / (warmup + 1))
            elif decay is None or s < start:
                out.append(peak)
            else:
                out.append(decay((s - start) / (total - start)))
        return rounded(out)

    shared = {"peak": peak, "min": low, "total": total, "warmup": warmup}
    return {
        "formula": schedules.__doc__,
        "cases": [
            {"name": "constant", **shared, "lr": values(None)},
            {"name": "linear", **shared, "lr": values(linear)},
            {"name": "cosine", **shared, "lr": values(cosine)},
            {"name": "cosine", **shared | {"warmup": 0}, "lr": values(cosine, 0, 0)},
            {"name": "wsd", **shared, "decay": 20, "decay_shape": "linear", "lr": values(linear, total - 20)},
            {"name": "wsd", **shared, "decay": 20, "decay_shape": "cosine", "lr": values(cosine, total - 20)},
            {"name": "wsd", **shared, "decay": 20, "decay_shape": "sqrt", "lr": values(inverse_sqrt, total - 20)},
        ],
    }


# ------------------------------------------------------------------------------------------------ rope

def write_rope():
    """Inverse frequencies and the factor on cos and sin, for rules as real models use them and for tiny heads."""
    cases = []

    def add(name, head_dim, limit, **rope):
        config = transformers.LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
                                          max_position_embeddings=limit, rope_parameters=dict(rope))
        kind = rope["rope_type"]
        if kind == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
            inverse, factor = 1.0 / (rope["rope_theta"] ** exponents), 1.0
        else:
            inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=limit)
        positions = [0, 1, 7, 100, 4095]
        angles = torch.tensor(positions, dtype=torch.float64)[:, None] * inverse.double()[None]
        cases.append({
            "name": name, "head_dim": head_dim, "max_position_embeddings": limit, "rope": rope,
            "attention_factor": rounded(factor), "inv_freq": [float(f"{x:.9g}") for x in inverse.tolist()],
            "positions": positions,
            "cos": rounded((angles.cos() * factor).numpy()), "sin": rounded((angles.sin() * factor).numpy()),
        })

    add("default", 8, 2048, rope_type="default", rope_theta=10000.0)
    add("linear", 16, 8192, rope_type="linear", rope_theta=10000.0, factor=4.0)
    add("llama 3.1 8B", 128, 131072, rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=8192)
    add("llama 3.2 1B", 64, 131072, rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=8192)
    add("llama3 tiny", 8, 128, rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=64)
    add("qwen2.5 yarn", 128, 131072, rope_type="yarn", rope_theta=1000000.0, factor=4.0,
        original_max_position_embeddings=32768)
    add("yarn mscale", 64, 163840, rope_type="yarn", rope_theta=10000.0, factor=40.0, beta_fast=32, beta_slow=1,
        mscale=1.0, mscale_all_dim=0.8, original_max_position_embeddings=4096)
    add("yarn untruncated", 64, 131072, rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0,
        beta_slow=1.0, truncate=False, original_max_position_embeddings=4096)
    add("yarn attention factor", 16, 8192, rope_type="yarn", rope_theta=10000.0, factor=2.0, attention_factor=1.25,
        original_max_position_embeddings=4096)
    ROPE.parent.mkdir(parents=True, exist_ok=True)
    ROPE.write_text(dumps({
        "about": "inv_freq [head_dim / 2] and the factor on cos and sin of each rule, from transformers "
                 + transformers.__version__ + "; cos and sin [position, head_dim / 2] in f64, factor included. "
                 "scripts/golden/make_goldens.py",
        "cases": cases}))
    print(f"rope: {', '.join(c['name'] for c in cases)}")


def dumps(value):
    """JSON with one line for each list of numbers: readable in a diff without a line per number."""
    def flat(v):
        return not isinstance(v, (list, dict)) or isinstance(v, list) and all(not isinstance(x, (list, dict)) for x in v)

    def write(v, indent):
        inner = indent + " "
        if flat(v):
            return json.dumps(v)
        if isinstance(v, list):
            return "[\n" + ",\n".join(inner + write(x, inner) for x in v) + "\n" + indent + "]"
        return "{\n" + ",\n".join(f"{inner}{json.dumps(k)}: {write(x, inner)}" for k, x in v.items()) + "\n" + indent + "}"
    return write(value, "") + "\n"


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    only = sys.argv[1:]
    for name, (config, shard) in models().items():
        if not only or name in only:
            write_model(name, config, shard)
    if only:
        return
    write_optimizers()
    write_rope()
    files = [p for base in (MODELS, OPTIMIZERS, ROPE) for p in ([base] if base.is_file() else base.rglob("*")) if p.is_file()]
    print(f"{len(files)} files, {sum(p.stat().st_size for p in files) / 1e6:.2f} MB; "
          f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
