"""Other libraries' causal attention on a CPU, where they are installed (the extra `peers`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import numpy as np

from experiments._io import cores
from experiments.benchmarks.attention.spellings import Attention, attention_step
from experiments.benchmarks.measure import Compiled, compile_ahead

REMEDY = "pip install '.[peers]'"


@dataclass(frozen=True)
class Peer:
    """A library: the package that provides it, and how its program for a mode and arguments is made.

    `attention()` is its function on jax arrays, None for a library of another framework.
    """

    name: str
    package: str
    compile: Callable[[str, tuple[Any, ...]], Compiled]
    attention: Callable[[], Attention] | None = None

    @property
    def version(self) -> str | None:
        """The installed version; None where the package is not installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


def _tokamax(**options: Any) -> Attention:
    attention = import_module("tokamax").dot_product_attention
    return lambda q, k, v: attention(q, k, v, is_causal=True, **options)


def _tokamax_peer(name: str, **options: Any) -> Peer:
    def compile_peer(mode: str, args: tuple[Any, ...]) -> Compiled:
        return compile_ahead(attention_step(_tokamax(**options), mode), args)

    return Peer(name, "tokamax", compile_peer, lambda: _tokamax(**options))


def torch_program(mode: str, args: tuple[Any, ...]) -> Compiled:
    """PyTorch's `scaled_dot_product_attention(is_causal=True)` on all cores that this process may use.

    Tensors are made once, (B, H, S, D) as it wants them, so no call pays for a conversion: `run` ignores its arguments.
    It returns numpy views (B, S, H, D). `grad` runs its forward and its backward. It tells nothing of its temporaries.
    """
    started = time.perf_counter()
    torch = import_module("torch")
    torch.set_num_threads(cores())
    attend = torch.nn.functional.scaled_dot_product_attention
    tensors = [torch.from_numpy(np.array(arg).transpose(0, 2, 1, 3).copy()) for arg in args]
    inputs, cotangent = tensors[:3], tensors[3]

    def view(tensor: Any) -> np.ndarray:
        return tensor.detach().numpy().transpose(0, 2, 1, 3)

    def forward(*_: Any) -> np.ndarray:
        with torch.no_grad():
            return view(attend(*inputs, is_causal=True))

    def grad(*_: Any) -> tuple[np.ndarray, ...]:
        loss = (attend(*inputs, is_causal=True) * cotangent).sum()
        return tuple(view(gradient) for gradient in torch.autograd.grad(loss, inputs))

    if mode == "grad":
        for tensor in inputs:
            tensor.requires_grad_(True)
    return Compiled(grad if mode == "grad" else forward, "", time.perf_counter() - started, None)


# tokamax chooses "xla" on a CPU, which stores all scores; "xla_chunked" does not.
PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch", "torch", torch_program),
        _tokamax_peer("tokamax"),
        _tokamax_peer("tokamax_chunked", implementation="xla_chunked"),
    )
}


def versions() -> dict[str, str | None]:
    """The installed version of each peer's package, None where it is not installed."""
    return {peer.package: peer.version for peer in PEERS.values()}


def absent() -> list[str]:
    """A line for each package that is not installed: what is not compared, and what to do."""
    return [
        f"{package} is not installed, so it is not compared: {REMEDY}"
        for package, version in versions().items()
        if version is None
    ]
