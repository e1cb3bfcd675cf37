"""Models without memory: of a configuration of transformers, on the meta device."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# What a configuration may say that would load something: code, kernels, a quantizer,
# or a trained backbone.
_LOADS = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "quantization_config",
    "use_pretrained_backbone",
)


def meta_model(source: Any, dtype: torch.dtype | None) -> nn.Module:
    """The model of a configuration, on the meta device,
    with the class that its `architectures` name.

    Nothing is downloaded, no weights are read, and no code that comes with a model is executed.

    Args:
        source: a configuration of transformers, the path of a config.json,
            or of a folder that has one.
        dtype: of the parameters; None takes the configuration's,
            which is float32 where it has none.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        FileNotFoundError: there is no such file.
        TypeError: `source` is nothing of these.
        ValueError: the file is not a configuration, or transformers does not have its model.
    """
    if isinstance(source, (str, os.PathLike)):
        values = _read(pathlib.Path(source))
        transformers = _transformers()
        with _offline():
            config = _config_of(transformers, values, source)
    else:
        if not hasattr(source, "model_type"):
            raise TypeError(
                "estimate takes a model, a configuration of transformers or the path of one, not "
                f"{type(source).__name__}"
            )
        transformers, config = _transformers(), copy.deepcopy(source)
    options: dict[str, Any] = {"attn_implementation": "eager"}  # others may fetch kernels
    if dtype is not None:
        options["dtype"] = dtype
    named = _architecture(config)
    with _offline(), torch.device("meta"):
        try:
            if named is not None:
                return _class_of(transformers, named)._from_config(config, **options)
            causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
            return auto.from_config(config, trust_remote_code=False, **options)
        except _Unknown:
            raise
        except (
            Exception
        ) as error:  # a model that computes with weights as it is built, or lacks a library
            raise ValueError(
                f"transformers cannot build {named or config.model_type!r} "
                f"on the meta device: {error}"
            ) from error


class _Unknown(ValueError):
    """A model that transformers does not have."""


def _read(path: pathlib.Path) -> dict[str, Any]:
    """The content of a config.json, or of the one in a folder."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; nothing is downloaded, so pass a local folder of transformers "
            "or its config.json"
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ValueError(f"{file} is not a configuration of transformers: it has no model_type")
    return values


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a configuration needs transformers, which is not installed; or pass a model"
        ) from error


def _config_of(transformers: Any, values: dict[str, Any], source: Any) -> Any:
    kind = values["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise _Unknown(
            f"{source} has the model_type {kind!r}, which transformers {transformers.__version__} "
            "does not know; code that comes with a model is not executed"
        )
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(_harmless(values))
    except Exception as error:
        raise ValueError(f"{source} is not a configuration of {kind!r}: {error}") from error


def _harmless(values: Any) -> Any:
    """The values of a configuration without those that would load something."""
    if isinstance(values, dict):
        kept = {k: _harmless(v) for k, v in values.items() if k not in _LOADS}
        return {**kept, **({"use_pretrained_backbone": False} if "backbone" in values else {})}
    return [_harmless(v) for v in values] if isinstance(values, list) else values


def _architecture(config: Any) -> Any:
    """The class that a configuration names, or None: the first of its list, or a name alone."""
    named = getattr(config, "architectures", None)
    if isinstance(named, str):
        return named or None
    if not isinstance(named, (list, tuple, type(None))):
        raise _Unknown(
            f"the configuration has architectures {named!r}; it should be a list of one name"
        )
    return named[0] if named else None


def _class_of(transformers: Any, named: Any) -> Any:
    found = getattr(transformers, named, None) if isinstance(named, str) else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    raise _Unknown(
        f"the configuration names the architecture {named!r}, which transformers "
        f"{transformers.__version__} does not have; code that comes with a model is not executed"
    )


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keeps the hub's client from the network."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
