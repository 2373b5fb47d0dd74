#!/usr/bin/env python3
"""Makes tests/golden/foreign/keys.json. It has every key of DeepSpeed's and Accelerate's configuration files and of Transformers' `fsdp_config`.
It also has every key, with its default, of the classes TrainingArguments, Seq2SeqTrainingArguments and SFTConfig.

    pip download --no-deps --no-binary :all: deepspeed==0.19.8 && tar xzf deepspeed-0.19.8.tar.gz
    pip download --no-deps transformers==4.57.6 trl==0.15.2
    unzip -d older transformers-4.57.6-*.whl && unzip -d older trl-0.15.2-*.whl
    python3 scripts/golden/foreign_keys.py deepspeed-0.19.8 older tests/golden/foreign/keys.json

Accelerate 1.15.0, Transformers 5.23.0 and TRL 1.16.0 must be installed. `older` has the versions with older keys. The script imports none of
them. It reads their sources: the fields of the classes for each section, and the names that functions look up in one.
"""
import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path

deepspeed = Path(sys.argv[1])
older = Path(sys.argv[2])
trees = {}


def tree(path):
    if path not in trees:
        trees[path] = ast.parse(path.read_text(encoding="utf-8"))
    return trees[path]


def constants(paths):
    """Names that stand for a text, in any of the files."""
    found = {}
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found[target.id] = node.value.value
    return found


def class_named(path, name):
    return next(node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef) and node.name == name)


def fields(path, name):
    """The annotated fields of a class, an alias beside its name."""
    found = []
    for node in class_named(path, name).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.append(node.target.id)
            if isinstance(node.value, ast.Call):
                found += [word.value.value for word in node.value.keywords if word.arg == "alias"]
    return found


def defaults(path, name):
    """The annotated fields of a dataclass with their defaults; one that is made by a function is null."""
    found = {}
    # `default_optim`, which the class sets before its fields.
    names = {}
    for node in ast.walk(class_named(path, name)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = node.value
    for node in class_named(path, name).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            value = node.value
            if isinstance(value, ast.Call):
                value = next((word.value for word in value.keywords if word.arg == "default"), None)
            value = names.get(value.id) if isinstance(value, ast.Name) else value
            try:
                found[node.target.id] = ast.literal_eval(value) if value is not None else None
            except ValueError:
                found[node.target.id] = value.attr.lower() if isinstance(value, ast.Attribute) else None
    return found


def arguments(path, name):
    """The arguments of a class's constructor that a file may set."""
    init = next(node for node in class_named(path, name).body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    names = [argument.arg for argument in init.args.args + init.args.kwonlyargs]
    return [name for name in names if name not in ("self", "optimizer", "params", "model_params")]


def looked_up(path, function, names):
    """What a function (all of the file without one) looks up: get_…_param(d, NAME, …), d.get(NAME), NAME in d, d[NAME]."""
    root = tree(path)
    if function:
        root = next(node for node in ast.walk(root) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == function)
    keys = []
    for node in ast.walk(root):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called.startswith("get_") and called.endswith("_param") and len(node.args) > 1:
                keys.append(node.args[1])
            elif called == "get" and node.args:
                keys.append(node.args[0])
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            keys.append(node.left)
        elif isinstance(node, ast.Subscript):
            keys.append(node.slice)
    texts = [key.value if isinstance(key, ast.Constant) else names.get(getattr(key, "id", None)) for key in keys]
    return [text for text in texts if isinstance(text, str)]


keys = {"deepspeed": set(), "accelerate": set(), "fsdp": set()}


def add(kind, prefix, names):
    keys[kind].update(f"{prefix}.{name}" if prefix else name for name in names)


def source(path):
    return deepspeed / "deepspeed" / path


config = source("runtime/config.py")
names = constants([source("runtime/constants.py"), source("runtime/data_pipeline/constants.py"), config])
top = [node.name for node in tree(config).body if isinstance(node, ast.FunctionDef) and node.name.startswith("get_")]
inner = {"get_torch_autocast_enabled", "get_torch_autocast_dtype", "get_lower_precision_safe_modules", "get_optimizer_params",
         "get_optimizer_gradient_clipping", "get_optimizer_legacy_fusion", "get_optimizer_name", "get_scheduler_name", "get_scheduler_params",
         "get_checkpoint_tag_validation_mode", "get_checkpoint_parallel_write_pipeline", "get_expert_parallel_config"}
for function in top:
    if function not in inner:
        add("deepspeed", "", looked_up(config, function, names))
init = looked_up(config, "_initialize_params", names)
checkpoint = {"load_universal", "use_node_local_storage"}
data_types = {"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}
add("deepspeed", "checkpoint", [name for name in init if name in checkpoint])
add("deepspeed", "data_types", [name for name in init if name in data_types])
add("deepspeed", "", [name for name in init if name not in checkpoint | data_types])
add("deepspeed", "", ["communication_data_type", "seq_parallel_communication_data_type", "sequence_parallel_size", "optimizer.type", "optimizer.legacy_fusion",
                      "scheduler.type", "checkpoint.tag_validation", "checkpoint.parallel_write.pipeline_stage", "expert_parallel", "aio",
                      "flops_profiler", "autotuning", "activation_checkpointing", "comms_logger", "datastates_ckpt", "data_efficiency", "timers"])
# Keys of older versions, which the newest names to refuse them.
for node in tree(config).body:
    if isinstance(node, ast.Assign) and node.targets[0].id.startswith("_REMOVED_") and isinstance(node.value, ast.Dict):
        prefix = "zero_optimization" if "ZERO" in node.targets[0].id else ""
        add("deepspeed", prefix, [key.value for key in node.value.keys])
for prefix, path, name in [
    ("zero_optimization", "runtime/zero/config.py", "DeepSpeedZeroConfig"),
    ("zero_optimization.offload_param", "runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    ("zero_optimization.offload_optimizer", "runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
    ("zero_optimization.zenflow", "runtime/zenflow/zenflow_config.py", "ZenFlowConfig"),
    ("zero_optimization.leaf_module", "runtime/zero/leaf_module_config.py", "DeepSpeedZeroLeafModuleConfig"),
    ("fp16", "runtime/precision_config.py", "DeepSpeedFP16Config"),
    ("bf16", "runtime/precision_config.py", "DeepSpeedBF16Config"),
    ("bfloat16", "runtime/precision_config.py", "DeepSpeedBF16Config"),
    ("hybrid_engine", "runtime/config.py", "HybridEngineConfig"),
    ("tensor_parallel", "runtime/tensor_parallel/config.py", "TPTrainingConfig"),
    ("tensorboard", "monitor/config.py", "TensorBoardConfig"),
    ("wandb", "monitor/config.py", "WandbConfig"),
    ("csv_monitor", "monitor/config.py", "CSVConfig"),
    ("comet", "monitor/config.py", "CometConfig"),
    ("comms_logger", "comm/config.py", "CommsLoggerConfig"),
    ("compile", "compile/config.py", "CompileConfig"),
    ("timers.throughput", "utils/config.py", "DeepSpeedThroughputTimerConfig"),
    ("weight_quantization", "inference/config.py", "WeightQuantConfig"),
]:
    add("deepspeed", prefix, fields(source(path), name))
for prefix, path, more in [
    ("activation_checkpointing", "runtime/activation_checkpointing/config.py", []),
    ("flops_profiler", "profiling/config.py", ["profiling/constants.py"]),
    ("autotuning", "autotuning/config.py", ["autotuning/constants.py"]),
    ("aio", "runtime/swap_tensor/aio_config.py", ["runtime/swap_tensor/constants.py"]),
    ("expert_parallel", "module_inject/auto_ep_config.py", []),
]:
    found = looked_up(source(path), None, constants([source(path), *map(source, more)]))
    add("deepspeed", prefix, [name for name in found if name != prefix])
writer = constants([source("runtime/model_checkpointing/constants.py")])
writing = source("runtime/model_checkpointing/config.py")
add("deepspeed", "checkpoint.writer", [key for key in looked_up(writing, "get_checkpoint_writer_config", writer) if key != "writer"])
add("deepspeed", "checkpoint", [key for key in looked_up(writing, "get_checkpoint_config", writer) if key != "checkpoint"])
add("deepspeed", "torch_autocast", ["enabled", "dtype", "lower_precision_safe_modules"])
add("deepspeed", "pipeline", ["stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned"])
for name in ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]:
    add("deepspeed", "scheduler.params", arguments(source("runtime/lr_schedules.py"), name))
for path, name in [("ops/adam/fused_adam.py", "FusedAdam"), ("ops/adam/cpu_adam.py", "DeepSpeedCPUAdam"), ("ops/lion/fused_lion.py", "FusedLion")]:
    add("deepspeed", "optimizer.params", arguments(source(path), name))
add("deepspeed", "optimizer.params", ["torch_adam", "adam_w_mode", "max_grad_norm", "momentum", "dampening", "nesterov"])
sections = {key.rsplit(".", 1)[0] for key in keys["deepspeed"] if "." in key}
noise = {"global", "data_parallel_group", "global_rank"}
keys["deepspeed"] = {key for key in keys["deepspeed"] if key not in sections and key not in noise and re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*", key)}


def installed(package, path):
    return Path(importlib.util.find_spec(package).submodule_search_locations[0]) / path


arguments_of = installed("accelerate", "commands/config/config_args.py")
add("accelerate", "", fields(arguments_of, "BaseConfig") + fields(arguments_of, "ClusterConfig"))
# Older files; `process_config` turns them into the newer form.
add("accelerate", "", ["fp16", "dynamo_backend"])
asked = installed("accelerate", "commands/config/cluster.py")
launched = installed("accelerate", "commands/launch.py").read_text(encoding="utf-8")
flags = re.findall(r"add_argument\(\s*\"--([a-z0-9_]+)\"", launched)
deepspeed_flags = [flag for flag in flags if flag.startswith(("deepspeed_", "zero", "offload_", "gradient_"))]
add("accelerate", "deepspeed_config", re.findall(r"deepspeed_config\[\"([a-z0-9_]+)\"\]", asked.read_text(encoding="utf-8")) + deepspeed_flags)
add("accelerate", "fsdp_config", re.findall(r"fsdp_config\[\"([a-z0-9_]+)\"\]", asked.read_text(encoding="utf-8")) + [flag for flag in flags if flag.startswith("fsdp_")])
for section in ["deepspeed_config", "fsdp_config"]:
    keys["accelerate"].discard(section)
add("fsdp", "", fields(installed("accelerate", "utils/dataclasses.py"), "FullyShardedDataParallelPlugin"))
trainer = installed("transformers", "training_args.py").read_text(encoding="utf-8")
add("fsdp", "", re.findall(r"fsdp_config(?:\.get\(|\.setdefault\(|\[)\"([a-z0-9_]+)\"", trainer))
# The plugin's names of what files call otherwise, and what stands within `xla_fsdp_settings`.
keys["fsdp"] -= {"fsdp_version", "transformer_cls_names_to_wrap", "buffer_dtype", "compute_dtype"}

# As Accelerate wrote it up to 0.20.
add("fsdp", "", ["backward_prefetch_policy"])

training = installed("transformers", "training_args.py")
trainer_keys = {
    "training_arguments": defaults(training, "TrainingArguments"),
    "seq2seq_arguments": defaults(installed("transformers", "training_args_seq2seq.py"), "Seq2SeqTrainingArguments"),
    "sft_config": defaults(installed("trl", "trainer/sft_config.py"), "SFTConfig"),
    "older_arguments": defaults(older / "transformers/training_args.py", "TrainingArguments"),
    "older_sft_config": defaults(older / "trl/trainer/sft_config.py", "SFTConfig"),
}

version = re.search(r"^version\s*=\s*\"?([0-9.]+)|^([0-9.]+)$", (deepspeed / "version.txt").read_text(), re.MULTILINE)
out = {"versions": {"deepspeed": version.group(0).strip(), "accelerate": importlib.metadata.version("accelerate"), "transformers": importlib.metadata.version("transformers"), "trl": importlib.metadata.version("trl")}}
out.update({kind: sorted(found) for kind, found in keys.items()})
out.update(trainer_keys)
Path(sys.argv[3]).write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
print({kind: len(found) for kind, found in (keys | trainer_keys).items()})
