"""Models without weights, and the weights one at a time: a checkpoint need not fit into memory twice, nor once."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from export.checkpoint.packed import Packed, Packing
from mtad.errors import InvalidInput, refused_as

log = logging.getLogger(__name__)

Weights = Callable[[str], Tensor]
"""The tensor a model's parameter or stored buffer of this name has, on the CPU, in the dtype it is stored in. A view of
a file where that is possible: nobody may write to it, and nobody should keep it."""

STORED = "model.safetensors"
"""What transformers calls the weights; with several files, `<name>.index.json` says which tensor is where."""


def empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose parameters have shapes and dtypes but no memory; its buffers are real, see `read_buffers`.

    The parameters are fake tensors of one mode, so that `torch.export` can trace the model as it is.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    register = torch.nn.Module.register_parameter

    def register_empty(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            with mode:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            parameter = torch.nn.Parameter(empty, requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_empty  # type: ignore[method-assign,assignment]
    try:
        own = copy.deepcopy(config)  # which a model writes its attention's kind into
        model = AutoModelForCausalLM.from_config(own, dtype=dtype, trust_remote_code=False).eval()
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    exact = empty_model(config, torch.float32).named_buffers() if dtype != torch.float32 else ()
    for name, values in exact:  # GPT-J's angles would be made of frequencies that were rounded first
        model.get_buffer(name).copy_(values)
    return model


def parameter_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """All names of each parameter, by its first; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {several[0]: several for several in names.values()}


def stored_weights(folder: Path, model: PreTrainedModel, packing: Packing | None = None) -> Weights | None:
    """The weights of a checkpoint folder, for `model`; None if its files have to be converted while they are loaded.

    Their names must be the model's own, perhaps without the prefix of its body, as transformers allows.
    """
    files = None if _converted(model) else stored_files(folder)
    if files is None:
        return None
    stored: dict[str, str] = {}
    packed = {} if packing is None else stored_packed(folder, packing)
    body, shapes = model.base_model_prefix + ".", {name: tensor.shape for name, tensor in model.state_dict().items()}
    for names in (*parameter_names(model).values(), *([name] for name in stored_buffers(model))):
        both = dict.fromkeys(n for name in names for n in (name, name.removeprefix(body)))
        found = [name for name in both if name in files or name in packed]
        if not found or (found[0] not in packed and files[found[0]][1] != tuple(shapes[names[0]])):
            return None
        for other in found[1:]:
            if {other, found[0]} & packed.keys() or not torch.equal(_read(files, other), _read(files, found[0])):
                raise ValueError(f"{other} is not {found[0]}; set tie_word_embeddings to false in its config.json")
        stored |= dict.fromkeys(names, found[0])

    def read(name: str) -> Tensor:
        own = stored[name]
        return packed[own]().matrix() if own in packed else _read(files, own)

    return read


def stored_packed(folder: Path, packing: Packing) -> dict[str, Callable[[], Packed]]:
    """The packed matrices of a checkpoint folder, by the name of the parameter that each stands for."""
    files = stored_files(folder) or {}
    if lost := [name for name, (_, shape) in files.items() if name.endswith(".scales") and len(shape) == 1]:
        raise ValueError(f"{packing.method} divides activations by {lost[0]}; give the checkpoint that was packed")

    def read(prefix: str) -> Packed:
        with refused_as("weights", prefix + packing.suffix, f"not as {packing.method} packs a matrix"):
            return packing.read(lambda part: _read(files, prefix + part))

    prefixes = [name.removesuffix(packing.suffix) for name in files if name.endswith(f".{packing.suffix}")]
    return {f"{prefix}weight": partial(read, prefix) for prefix in prefixes}


def _read(files: Mapping[str, tuple[Path, tuple[int, ...]]], name: str) -> Tensor:
    with safe_open(files[name][0], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _converted(model: PreTrainedModel) -> bool:
    """Whether transformers does more with this model's files than to read them."""
    if getattr(model.config, "quantization_config", None) or getattr(model, "_checkpoint_conversion_mapping", None):
        return True
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # transformers 4
        return False
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def stored_files(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]] | None:
    """File and shape of each stored tensor; None if there are no such files, but older ones."""
    index = folder / f"{STORED}.index.json"
    if (folder / STORED).is_file():
        names = [STORED]
    elif index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        return None
    for name in names:
        if Path(name).name != name:
            raise InvalidInput(str(index), name, "not a file of the checkpoint's own folder; download it again")
    return {name: (folder / file, shape) for file in names for name, shape in _shapes(folder / file).items()}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def stored_buffers(model: PreTrainedModel) -> list[str]:
    """Buffers that are part of a checkpoint, such as what a router adds to its scores."""
    return sorted(model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys())


def read_buffers(model: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """Give the stored buffers of an empty model, which has memory for them, their values; returns the model."""
    for name in stored_buffers(model):
        model.get_buffer(name).copy_(weights(name))
    return model


@contextlib.contextmanager
def filled(model: PreTrainedModel, weights: Weights, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """An empty model that reads each module's matrices when the module runs, and forgets them again.

    It has its vectors throughout: they are small, and some models use them where their module does not run.

    Args:
        dtype: what they are converted to, one module's at a time.
    """
    empty = {module: dict(module._parameters) for module in model.modules() if module._parameters}
    paths = {module: f"{name}." if name else "" for name, module in model.named_modules()}

    def fill(module: torch.nn.Module, *_: object, vectors: bool = False) -> None:
        for name, parameter in empty[module].items():
            if parameter is not None and (parameter.dim() < 2) is vectors:
                tensor = weights(paths[module] + name).to(dtype)
                module._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)

    def drain(module: torch.nn.Module, *_: object) -> None:
        matrices = {name: own for name, own in empty[module].items() if own is not None and own.dim() > 1}
        module._parameters.update(matrices)

    with contextlib.ExitStack() as undone:
        for module, own in empty.items():
            fill(module, vectors=True)
            undone.callback(module._parameters.update, own)
            undone.callback(module.register_forward_pre_hook(fill).remove)
            undone.callback(module.register_forward_hook(drain).remove)
        yield model
