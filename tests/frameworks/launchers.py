"""What test_launchers.py trains: a small language model of transformers, its data, and the
Trainer's weights that every launcher must reach.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pathlib
import sys
import types

import torch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
# A schedule that does not depend on the number of steps, so that a run that stops half way is the
# beginning of the whole one.
ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "lr_scheduler_type": "constant",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "max_steps": 4,
    "logging_strategy": "no",
    "dataloader_pin_memory": False,
}


def language_model(seed: int = 0):
    """In bfloat16, with matrices that are large enough to be quantized."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=32)).to(torch.bfloat16)


def examples(count: int = 16) -> list[dict[str, list[int]]]:
    ids = torch.randint(3, 64, (count, 12), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: pathlib.Path, **options):
    from transformers import TrainingArguments

    return TrainingArguments(output_dir=str(folder), **{**ARGUMENTS, **options})


def trainer(folder: pathlib.Path, cls=None, **options):
    """Trainer, or a class derived from it."""
    from transformers import Trainer

    args = options.pop("args", None) or arguments(folder)
    return (cls or Trainer)(
        model=options.pop("model", None) or language_model(),
        args=args,
        train_dataset=examples(),
        **options,
    )


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "<eos>": 63}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def digest(model) -> str:
    found = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        found.update(name.encode() + p.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def part_of(package: str, *parents: str, root: pathlib.Path | None = None) -> pathlib.Path:
    """Makes modules of a package importable without running its `__init__`, or that of the packages
    inside it that are named.

    Args:
        root: where the package is, if it is not the installed one.
    """
    if root is None:
        (found,) = importlib.util.find_spec(package).submodule_search_locations
        root = pathlib.Path(found)
    for name in (package, *(f"{package}.{parent}" for parent in parents)):
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    return root


class Forgotten:
    """A context after which modules of some packages are no longer imported."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def __enter__(self) -> None:
        self.before = set(sys.modules)

    def __exit__(self, *_: object) -> None:
        for name in set(sys.modules) - self.before:
            if name.split(".")[0] in self.packages:
                del sys.modules[name]
