"""Counts what a V2 draft round starts on the device: torch operations and Triton kernels.

Under Triton's interpreter, where both can be seen. An operation that only makes a view, or memory
without contents, starts nothing.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_NOTHING = ("aten.empty", "aten.new_empty", "aten.detach", "aten.lift_fresh", "aten.alias")
_HOST_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class Launches(TorchDispatchMode):
    """Counts by place: "model", "head", "metadata", or "glue", which is all the rest of a round.

    rounds: per round `{"longest": rows of the longest query, place: {operation: count}, ...,
    "host reads": [what read a tensor's contents on the host in the glue or the head]}`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[dict[str, Any]] = []
        self._places = ["glue"]
        self._counts: dict[str, Counter[str]] = {}
        self._host_reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not str(func).startswith(_NOTHING):
            self.count(str(func))
        return func(*args, **(kwargs or {}))

    def count(self, operation: str) -> None:
        self._counts.setdefault(self._places[-1], Counter())[operation] += 1

    def at(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted at `place`, unless it is called from another such place."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._places.append(place if self._places[-1] == "glue" else self._places[-1])
            try:
                return function(*args, **kwargs)
            finally:
                self._places.pop()

        return wrapped

    def round(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(speculator: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return propose(speculator, input_batch, *args, **kwargs)
            self._counts, self._host_reads = {}, []
            with self, self._watched_tensors():
                result = propose(speculator, input_batch, *args, **kwargs)
            self.rounds.append(
                {
                    "longest": int(input_batch.num_scheduled_tokens.max()),
                    "host reads": self._host_reads,
                    **{place: dict(counts) for place, counts in self._counts.items()},
                }
            )
            return result

        return wrapped

    @contextlib.contextmanager
    def _watched_tensors(self) -> Iterator[None]:
        """On CPU these need no synchronisation, but on a GPU they would."""
        originals = {name: getattr(torch.Tensor, name) for name in _HOST_READS}

        def watch(name: str) -> Callable[..., Any]:
            def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if self._places[-1] in ("glue", "head"):
                    self._host_reads.append(name)
                return originals[name](tensor, *args, **kwargs)

            return method

        for name in originals:
            setattr(torch.Tensor, name, watch(name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(torch.Tensor, name, original)


def count_launches(drafting: str) -> Launches:
    """Patch this process. drafting: "ours", or "vllm" for its multi-module speculator."""
    from triton.runtime.interpreter import GridExecutor
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as stock

    from mtp_kernels.vllm import speculator as ours
    from mtp_kernels.vllm.head import DraftHead
    from mtp_kernels.vllm.models import MtpLayer

    launches, execute, copy = Launches(), GridExecutor.__call__, ours.async_tensor_h2d

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launches.count(f"triton {executor.fn.__name__}")
        with _disable_current_modes():
            return execute(executor, *args, **kwargs)

    def counted_copy(*args: Any, **kwargs: Any) -> Any:
        launches.count("copy to the device")
        with _disable_current_modes():
            return copy(*args, **kwargs)

    GridExecutor.__call__ = launch
    ours.async_tensor_h2d = counted_copy
    base = stock.MultiModuleMTPSpeculator
    if drafting == "vllm":
        model_runner.init_speculator = lambda vllm_config, device, _: base(vllm_config, device)
    cls = base if drafting == "vllm" else ours.MtpSpeculator
    cls.propose = launches.round(cls.propose)
    base._run_model = launches.at("model", base._run_model)
    MtpLayer.finish = launches.at("model", MtpLayer.finish)
    base._build_attn_metadata = launches.at("metadata", base._build_attn_metadata)
    base.sample_draft = launches.at("head", base.sample_draft)
    DraftHead.best = launches.at("head", DraftHead.best)
    return launches
