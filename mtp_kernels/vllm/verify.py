"""The verify op in the place of vLLM's rejection samplers, for every speculative method.

What is replaced, in which runner, and by what decision; `verify_v1` and `verify_v2` do it. With
`MTP_KERNELS_METHOD=coupled` the samplers for rounds without drafts are replaced too, as are those
of engines that do not speculate.
"""

import copy
import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtp_kernels.verification import Method
from mtp_kernels.vllm.compat import Patch, warn_once
from mtp_kernels.vllm.settings import METHOD, is_coupled

logger = logging.getLogger("vllm.mtp_kernels")

_LOSSLESS = ("standard", "block")


def method_of(speculative_config: Any) -> Method | None:
    """How drafts are judged, None: by a method of vLLM's that the op does not have.

    Raises:
        ValueError: coupled sampling is asked for together with a method that is not lossless.
    """
    stated = getattr(speculative_config, "rejection_sample_method", "standard")
    if is_coupled():
        if stated not in _LOSSLESS:
            raise ValueError(
                f"{METHOD}: coupled contradicts rejection_sample_method={stated!r}, which is not "
                "lossless; leave one of them out"
            )
        return "coupled"
    return stated if stated in (*_LOSSLESS, "synthetic") else None


def samples_drafts(speculative_config: Any) -> bool:
    """Whether requests that sample get sampled drafts: `coupled` drafts share the noise."""
    return speculative_config.draft_sample_method == "probabilistic" or is_coupled()


def _stated_method(speculative_config: Any) -> str:
    return f"rejection_sample_method={speculative_config.rejection_sample_method!r}"


def is_active() -> bool:
    """Whether vLLM's rejection samplers are replaced in this process."""
    return all(patch.is_applied() for patch in PATCHES)


def log_active(runner: str, method: Method | None, why_stock: str = "") -> None:
    """The line per engine that says who verifies."""
    if method is None:
        warn_once(f"mtp_kernels: {runner} runner verifies as vLLM does: {why_stock}")
    else:
        logger.info("mtp_kernels: %s runner verifies with the verify op, method %s", runner, method)


@functools.cache
def _log_coupled(runner: str) -> None:
    logger.info("mtp_kernels: %s runner samples coupled, with and without drafts", runner)


class StatusCounter:
    """Counts rounds that ended at a row of logits without a distribution, and says so.

    On a GPU the status is copied behind the kernel and read at a later call, when it has arrived:
    nobody waits for it.
    """

    INTERVAL_S = 60.0

    def __init__(self) -> None:
        self.total = 0
        self._arriving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._last_warning = -self.INTERVAL_S

    def add(self, status: Tensor) -> None:
        """status: [B] int32 of a call of the op."""
        if status.device.type == "cpu":
            self._count(status)
            return
        host = torch.empty_like(status, device="cpu", pin_memory=True)
        host.copy_(status, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._arriving.append((host, event))
        while self._arriving and self._arriving[0][1].query():
            self._count(self._arriving.popleft()[0])

    def _count(self, status: Tensor) -> None:
        bad = int(status.count_nonzero())
        self.total += bad
        if bad and time.monotonic() - self._last_warning >= self.INTERVAL_S:
            self._last_warning = time.monotonic()
            logger.warning(
                "mtp_kernels: logits with NaN or +inf, or with no token allowed, decided a token; "
                "it was the best finite one, or token 0. So far: %d times",
                self.total,
            )


STATUS = StatusCounter()
"""This process's."""


# V1. The runner's samplers get to know the runner; without that they are vLLM's own.

_ROUNDS = "_mtp_kernels_rounds"


def _attach_rounds(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, device: Any) -> None:
        original(self, vllm_config, device)
        method = method_of(self.speculative_config)
        samplers = [self.sampler] if method == "coupled" else []
        if hasattr(self, "rejection_sampler"):
            log_active("V1", method, _stated_method(self.speculative_config))
            samplers += [self.rejection_sampler] if method is not None else []
        if method == "coupled":
            _log_coupled("V1")
        if samplers:
            from mtp_kernels.vllm.verify_v1 import Rounds

            rounds = Rounds(self, method)
            for sampler in samplers:
                setattr(sampler, _ROUNDS, rounds)

    return __init__


def rounds_of(sampler: Any) -> Any:
    """The `Rounds` of a V1 sampler, None where it is vLLM's own."""
    return getattr(sampler, _ROUNDS, None)


def _verify_v1(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any
    ) -> Any:
        if (rounds := rounds_of(self)) is None:
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        return rounds.verify(self, metadata, draft_probs, logits, sampling_metadata)

    return forward


def _defer_processors(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What a coupled sampler applies to the logits, the op applies in `sample`."""

    @functools.wraps(original)
    def apply_logits_processors(
        self: Any, logits: Tensor, sampling_metadata: Any, predict_bonus_token: bool
    ) -> Tensor:
        rounds = rounds_of(self)
        if rounds is None or rounds.has_custom_processors(sampling_metadata):
            return original(self, logits, sampling_metadata, predict_bonus_token)
        return logits

    return apply_logits_processors


def _sample_v1(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sample(
        self: Any, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> Any:
        rounds = rounds_of(self)
        if rounds is None or rounds.has_custom_processors(sampling_metadata):
            return original(self, logits, sampling_metadata, logprobs_mode_override)
        return rounds.sample(self, logits, sampling_metadata, logprobs_mode_override)

    return sample


def _keep_processors(original: Callable[..., Any]) -> Callable[..., Any]:
    """min_p and logit_bias for requests with drafts: vLLM leaves their processors out."""

    @functools.wraps(original)
    def build_logitsprocs(
        vllm_config: Any,
        device: Any,
        is_pin_memory: bool,
        is_pooling_model: bool,
        custom_logitsprocs: Any = (),
    ) -> Any:
        config = vllm_config.speculative_config
        if config is None or is_pooling_model or custom_logitsprocs or method_of(config) is None:
            return original(
                vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs
            )
        from vllm.v1.sample import logits_processor

        return logits_processor.LogitsProcessors(
            make(vllm_config, device, is_pin_memory)
            for make in logits_processor.BUILTIN_LOGITS_PROCESSORS
        )

    return build_logitsprocs


# Both runners.


def _allow_min_p_and_bias(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM refuses them with drafts. What else it refuses there stays refused."""

    @functools.wraps(original)
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if method_of(speculative_config) is not None:
            self = copy.copy(self)
            self.min_p, self.logit_bias = 0.0, None
        original(self, speculative_config)

    return _validate_spec_decode


# V2.

_METHOD = "_mtp_kernels_method"


def _note_method(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(
        self: Any, sampler: Any, spec_config: Any, device: Any, *, watermark_key: Any = None
    ) -> None:
        original(self, sampler, spec_config, device, watermark_key=watermark_key)
        from mtp_kernels.vllm import verify_v2

        method, why = method_of(spec_config), ""
        if method is None:
            why = _stated_method(spec_config)
        elif not verify_v2.is_vllms_own(sampler, self):
            method, why = None, "it has a watermarking or custom sampler"
        setattr(self, _METHOD, method)
        log_active("V2", method, why)

    return __init__


def _verify_v2(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _verify(self: Any, *args: Any) -> Any:
        if (method := getattr(self, _METHOD, None)) is None:
            return original(self, *args)
        from mtp_kernels.vllm import verify_v2

        return verify_v2.verify(self, method, *args)

    return _verify


def _verify_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM bounds its fp32 copy of the logits by going through the requests in chunks."""

    @functools.wraps(original)
    def _verify_in_chunks(
        self: Any,
        logits: Tensor,
        input_batch: Any,
        draft_logits: Any,
        draft_sampled: Any,
        pos: Any,
        max_chunk_logits: int,
        max_num_logprobs: int,
        verify_draft_sampled: Any = None,
    ) -> Any:
        if getattr(self, _METHOD, None) is not None:
            from mtp_kernels.vllm import verify_v2

            if not verify_v2.needs_copy(self.sampler, input_batch.idx_mapping_np):
                max_chunk_logits = max(max_chunk_logits, logits.shape[0])
        return original(
            self,
            logits,
            input_batch,
            draft_logits,
            draft_sampled,
            pos,
            max_chunk_logits,
            max_num_logprobs,
            verify_draft_sampled,
        )

    return _verify_in_chunks


def _sample_v2(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_coupled():
            return original(self, *args, **kwargs)
        from mtp_kernels.vllm import verify_v2

        if not verify_v2.is_vllms_own(self):
            warn_once(
                f"mtp_kernels: {type(self).__name__} samples in rounds without drafts, not coupled"
            )
            return original(self, *args, **kwargs)
        _log_coupled("V2")
        return verify_v2.sample(self, *args, **kwargs)

    return sample


_V1_RUNNER, _V1_SAMPLER = "vllm.v1.worker.gpu_model_runner", "vllm.v1.sample.sampler"
_V2_VERIFIER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_BATCH = (
    "expanded_idx_mapping",
    "idx_mapping",
    "idx_mapping_np",
    "pos",
    "input_ids",
    "expanded_local_pos",
    "seq_lens_upper_bound_np",
)

PATCHES = (
    Patch(
        "verify",
        "vllm.sampling_params",
        "SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
        _allow_min_p_and_bias,
    ),
    Patch(
        "verify",
        _V1_RUNNER,
        "GPUModelRunner.__init__",
        ("self", "vllm_config", "device"),
        _attach_rounds,
    ),
    Patch(
        "verify",
        _V1_RUNNER,
        "build_logitsprocs",
        ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
        _keep_processors,
    ),
    Patch(
        "verify",
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
        _verify_v1,
    ),
    Patch(
        "verify",
        _V1_SAMPLER,
        "Sampler.apply_logits_processors",
        ("self", "logits", "sampling_metadata", "predict_bonus_token"),
        _defer_processors,
    ),
    Patch(
        "verify",
        _V1_SAMPLER,
        "Sampler.sample",
        ("self", "logits", "sampling_metadata", "logprobs_mode_override"),
        _sample_v1,
    ),
    Patch(
        "verify",
        _V2_VERIFIER,
        "RejectionSampler.__init__",
        ("self", "sampler", "spec_config", "device", "watermark_key"),
        _note_method,
    ),
    Patch(
        "verify",
        _V2_VERIFIER,
        "RejectionSampler._verify",
        (
            "self",
            "logits",
            "draft_logits",
            "draft_sampled",
            "pos",
            "cu_num_logits",
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "verify_draft_sampled",
        ),
        _verify_v2,
    ),
    Patch(
        "verify",
        _V2_VERIFIER,
        "RejectionSampler._verify_in_chunks",
        (
            "self",
            "logits",
            "input_batch",
            "draft_logits",
            "draft_sampled",
            "pos",
            "max_chunk_logits",
            "max_num_logprobs",
            "verify_draft_sampled",
        ),
        _verify_at_once,
    ),
    Patch(
        "verify",
        "vllm.v1.worker.gpu.sample.sampler",
        "Sampler.sample",
        ("self", "logits", *_BATCH, "return_logprobs"),
        _sample_v2,
    ),
)
