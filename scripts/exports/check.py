"""Parses exported settings with the parsers of the trainers that they are for.

Run by `cargo xtask exports`: `python check.py MANIFEST [MEGATRON]`. The manifest is a JSON list of
objects with `file`, `form`, `devices`, `data_parallel` and the expected `micro_batch`,
`accumulation`, `global_batch`. MEGATRON is a checkout of Megatron-LM, whose argument parser is in no
package of PyPI; without one the values are given to the configuration classes of megatron-core.
Prints one line per file: `ok FORM FILE`, or `refused FORM FILE: REASON`.
"""

import argparse
import dataclasses
import json
import os
import shlex
import sys
import typing
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def expect(name, found, wanted):
    if found != wanted:
        raise ValueError(f"{name} is {found}, expected {wanted}")


def unknown_keys(values, config, path=""):
    """Keys of a table that the dataclass `config` does not have."""
    known = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for key, value in values.items():
        if key not in known:
            yield path + key
        elif isinstance(value, dict):
            yield from unknown_keys(value, known[key], f"{path}{key}.")


def torchtitan(entry):
    import tomllib
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    with open(entry["file"], "rb") as file:
        values = tomllib.load(file)
    config = ConfigManager().parse_args([f"--job.config_file={entry['file']}"])
    unknown = list(unknown_keys(values, config))
    if unknown:
        raise ValueError(f"unknown keys {unknown}")
    parallelism = config.parallelism
    dims = ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        world_size=entry["devices"],
    )
    if dims.pp > 1:
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(parallelism.pipeline_parallel_schedule)
        expect("parts", len(parallelism.module_fqns_per_model_part) % dims.pp, 0)
    expect("data-parallel ranks", dims.dp_replicate * dims.dp_shard, entry["data_parallel"])
    per_step = config.training.local_batch_size * entry["data_parallel"]
    expect("global_batch_size", config.training.global_batch_size, entry["global_batch"])
    expect("remainder of the batch", config.training.global_batch_size % per_step, 0)


def deepspeed(entry):
    from deepspeed.runtime.config import DeepSpeedConfig

    class Ranks:
        """What DeepSpeed asks of the model's parallelism."""

        def get_data_parallel_world_size(self):
            return entry["data_parallel"]

    import deepspeed.comm

    deepspeed.comm.get_rank = lambda *_: 0
    config = DeepSpeedConfig(entry["file"], mpu=Ranks())
    expect("train_batch_size", config.train_batch_size, entry["global_batch"])
    expect("micro-batch", config.train_micro_batch_size_per_gpu, entry["micro_batch"])
    expect("accumulation", config.gradient_accumulation_steps, entry["accumulation"])


def accelerate(entry):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    config = load_config_from_file(entry["file"])
    expect("num_processes", config.num_processes, entry["devices"])
    arguments = launch_command_parser().parse_args(["--config_file", entry["file"], "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    known = set(vars(arguments))
    for section in (config.fsdp_config, config.parallelism_config):
        unknown = [key for key in section if key not in known]
        if unknown:
            raise ValueError(f"unknown keys {unknown}")
    if config.fsdp_config:
        os.environ.update(prepare_multi_gpu_env(arguments))
        FullyShardedDataParallelPlugin()
        sizes = ParallelismConfig()
        product = sizes.dp_replicate_size * sizes.dp_shard_size * sizes.tp_size * sizes.cp_size
        expect("product of sizes", product, entry["devices"])


def megatron_arguments(entry):
    """The words of the array PLAN_ARGS."""
    with open(entry["file"]) as file:
        text = file.read()
    inside = text[text.index("PLAN_ARGS=(") + len("PLAN_ARGS=(") : text.rindex(")")]
    return shlex.split(inside, comments=True)


def megatron_checkout(entry):
    from megatron.training import arguments as megatron_training
    from megatron.training.arguments import add_megatron_arguments, validate_args

    import types

    import torch

    # There is no GPU to ask; plans are for Hopper.
    megatron_training.get_device_arch_version = lambda: 9
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0, name="H100")
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "10", "--lr", "1e-4"]
    arguments = parser.parse_args(megatron_arguments(entry) + data)
    arguments.rank, arguments.world_size = 0, entry["devices"]
    if not arguments.use_megatron_fsdp:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    else:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    validate_args(arguments)
    expect("data-parallel ranks", arguments.data_parallel_size, entry["data_parallel"])
    expect("global batch", arguments.global_batch_size, entry["global_batch"])


def megatron_core(entry):
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    words, values, name = megatron_arguments(entry), {}, None
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            values[name] = True
        else:
            values[name] = word
    sizes = {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"}
    sizes |= {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"}
    sizes |= {"expert_model_parallel_size", "expert_tensor_parallel_size", "moe_router_topk", "moe_ffn_hidden_size"}
    sizes |= {"moe_shared_expert_intermediate_size", "recompute_num_layers"}
    words_of = {"recompute_granularity", "recompute_method", "pipeline_model_parallel_layout"}
    given = {key: int(values[key]) for key in sizes if key in values}
    given |= {key: values[key] for key in words_of if key in values}
    given |= {"sequence_parallel": "sequence_parallel" in values, "bf16": "bf16" in values, "fp16": "fp16" in values}
    if "num_experts" in values:
        given["num_moe_experts"] = int(values["num_experts"])
    if "num_virtual_stages_per_pipeline_rank" in values:
        given["virtual_pipeline_model_parallel_size"] = int(values["num_virtual_stages_per_pipeline_rank"])
    if "pipeline_model_parallel_layout" in values:
        stretches = values["pipeline_model_parallel_layout"].count("|") + 1
        chunks = stretches // given["pipeline_model_parallel_size"]
        given["virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None
    if given["pipeline_model_parallel_size"] > 1:
        given["pipeline_dtype"] = torch.bfloat16
    TransformerConfig(add_bias_linear=False, **given)
    flags = {"overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"}
    DistributedDataParallelConfig(
        **{key: key in values for key in flags},
        num_distributed_optimizer_instances=int(values.get("num_distributed_optimizer_instances", 1)),
    )


def main():
    if len(sys.argv) > 2:
        sys.path.insert(0, sys.argv[2])
        if not hasattr(typing, "override"):
            import typing_extensions

            typing.override = typing_extensions.override
    checks = {
        "torchtitan": torchtitan,
        "deepspeed": deepspeed,
        "accelerate": accelerate,
        "megatron": megatron_checkout if len(sys.argv) > 2 else megatron_core,
    }
    with open(sys.argv[1]) as file:
        entries = json.load(file)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for entry in entries:
        before = dict(os.environ)
        try:
            checks[entry["form"]](entry)
            print(f"ok {entry['form']} {entry['file']}", file=out, flush=True)
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"refused {entry['form']} {entry['file']}: {reason}", file=out, flush=True)
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()
