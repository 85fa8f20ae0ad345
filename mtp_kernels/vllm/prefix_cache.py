"""Block hashes that cover what MTP layers read beyond a block.

vLLM shares a KV block between requests that agree on the tokens up to the block's end. MTP layer
m's row j holds KV of token t_{j+1+m}, so a block's last rows depend on up to K tokens after it.
vLLM recomputes the last matching block for that reason, but the blocks before it may come from
different requests: one that stopped, or went on otherwise, within K tokens of a block's end
leaves its own KV there for everyone.

Here a block's hash also covers the K tokens after it, and a block is hashed once these are known.
A request then finds only blocks whose every row is what it would have computed itself.
"""

import functools
from collections.abc import Callable
from typing import Any

from mtp_kernels.vllm.compat import Patch
from mtp_kernels.vllm.settings import draft_spec


class _Behind:
    """A request as the block hasher may see it: without its last `num_drafts` tokens."""

    def __init__(self, request: Any, num_drafts: int) -> None:
        self.request, self.num_drafts = request, num_drafts
        self.num_tokens = request.num_tokens - num_drafts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


class _LateHasher:
    """vLLM's block hasher, `num_drafts` tokens late."""

    def __init__(self, hasher: Callable[[Any], list[Any]], num_drafts: int) -> None:
        self.hasher, self.num_drafts = hasher, num_drafts

    def __call__(self, request: Any) -> list[Any]:
        return self.hasher(_Behind(request, self.num_drafts))


def _hash_late(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before the first request; `EngineCore.__init__` itself loads the plugins."""

    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        hasher, speculative = self.request_block_hasher, self.vllm_config.speculative_config
        is_late = hasher is None or isinstance(hasher, _LateHasher)
        if not is_late and draft_spec(speculative) is not None:
            self.request_block_hasher = _LateHasher(hasher, speculative.num_speculative_tokens)
        return original(self, request)

    return preprocess_add_request


def _add_tokens_behind(original: Callable[..., Any]) -> Callable[..., Any]:
    """Put the tokens after a block among the extra keys of its hash."""

    @functools.wraps(original)
    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
        if isinstance(request, _Behind):
            behind = request.all_token_ids[end_token_idx : end_token_idx + request.num_drafts]
            keys = (*(keys or ()), "mtp_kernels", *behind)
        return keys, mm_idx

    return generate_block_hash_extra_keys


def _find_hashed_only(original: Callable[..., Any]) -> Callable[..., Any]:
    """A request that is not hashed to its end is looked up as far as it is."""

    @functools.wraps(original)
    def find_longest_cache_hit(self: Any, block_hashes: Any, max_cache_hit_length: int) -> Any:
        hashed = len(block_hashes) * self.block_pool.hash_block_size
        return original(self, block_hashes, min(max_cache_hit_length, hashed))

    return find_longest_cache_hit


def _cache_hashed_only(original: Callable[..., Any]) -> Callable[..., Any]:
    """Offer only hashed blocks to others; the rest follow when they are hashed."""

    @functools.wraps(original)
    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> Any:
        if isinstance(request._block_hasher, _LateHasher):
            hashed = len(request.block_hashes) * self.block_pool.hash_block_size
            # The coordinator itself stays this much behind what it is told.
            num_computed_tokens = min(num_computed_tokens, hashed + self.num_reprefillable_tokens)
        return original(self, request, num_computed_tokens)

    return cache_blocks


_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_FIND = ("self", "block_hashes", "max_cache_hit_length")

PATCHES = (
    Patch(
        "prefix",
        "vllm.v1.engine.core",
        "EngineCore.preprocess_add_request",
        ("self", "request"),
        _hash_late,
    ),
    Patch(
        "prefix",
        "vllm.v1.core.kv_cache_utils",
        "generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
        _add_tokens_behind,
    ),
    Patch(
        "prefix",
        _COORDINATOR,
        "UnitaryKVCacheCoordinator.find_longest_cache_hit",
        _FIND,
        _find_hashed_only,
    ),
    Patch(
        "prefix",
        _COORDINATOR,
        "HybridKVCacheCoordinator.find_longest_cache_hit",
        _FIND,
        _find_hashed_only,
    ),
    Patch(
        "prefix",
        _COORDINATOR,
        "KVCacheCoordinator.cache_blocks",
        ("self", "request", "num_computed_tokens"),
        _cache_hashed_only,
    ),
)
