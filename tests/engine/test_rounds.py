"""`verify_v1.Rounds` over batches made by hand: what the engine runs here do not reach."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from mtp_kernels.vllm.verify_v1 import Rounds

VOCAB = 40


class Runner:
    """A V1 runner as `Rounds` sees it, between two steps."""

    device = torch.device("cpu")

    def __init__(self, requests: list[str], **metadata) -> None:
        self.drafter = SimpleNamespace()
        self.positions = torch.arange(100)
        self.set_batch(requests, **metadata)

    def set_batch(self, requests: list[str], **metadata) -> None:
        num = len(requests)
        values = {
            "temperature": torch.full((num,), 0.9),
            "all_greedy": False,
            "all_random": True,
            "top_p": None,
            "top_k": None,
            "generators": {},
            "max_num_logprobs": None,
            "no_penalties": True,
            "prompt_token_ids": None,
            "frequency_penalties": torch.zeros(num),
            "presence_penalties": torch.zeros(num),
            "repetition_penalties": torch.ones(num),
            "output_token_ids": [[] for _ in requests],
            "allowed_token_ids_mask": None,
            "bad_words_token_ids": {},
            "logitsprocs": LogitsProcessors(),
            "spec_token_ids": [[] for _ in requests],
        }
        self.input_batch = SimpleNamespace(
            req_ids=requests,
            req_id_to_index={request: i for i, request in enumerate(requests)},
            presence_penalties_reqs=set(requests[: 0 if metadata.get("no_penalties", True) else 1]),
            frequency_penalties_reqs=set(),
            repetition_penalties_reqs=set(),
            sampling_metadata=SamplingMetadata(**values | metadata),
        )


def judge(
    rounds: Rounds, drafts: list[list[int]], logits: Tensor, q: Tensor | None = None
) -> list[list[int]]:
    sampler = SimpleNamespace(synthetic_conditional_rates=None, is_processed_logprobs_mode=False)
    batch = rounds.runner.input_batch
    metadata = SpecDecodeMetadata.make_dummy(drafts, "cpu")
    out = rounds.verify(sampler, metadata, q, logits, batch.sampling_metadata)
    return [[token for token in row if token >= 0] for row in out.sampled_token_ids.tolist()]


def flat(num_rows: int) -> Tensor:
    return torch.zeros(num_rows, VOCAB, dtype=torch.bfloat16)


class Holder:
    """vLLM's thinking budgets, which force token 5 on rows with drafts and 6 on the last ones."""

    def __init__(self) -> None:
        self.calls: list = []

    def has_tracked_requests(self) -> bool:
        return True

    def update_state(self, outputs, drafts, repeat_indices) -> None:
        self.calls.append("update")

    def apply_to_logits(self, logits: Tensor, is_bonus: bool, drafts) -> Tensor:
        self.calls.append((is_bonus, logits.shape[0]))
        logits[:, 6 if is_bonus else 5] = 1e9
        return logits


def test_thinking_budget_is_vllms_on_a_copy() -> None:
    holder, logits = Holder(), flat(5)
    rounds = Rounds(Runner(["a", "b"], thinking_budget_state_holder=holder), "standard")
    assert judge(rounds, [[5, 5], [9]], logits) == [[5, 5, 6], [5]]
    assert holder.calls == ["update", (True, 2), (False, 3)]
    assert not logits.any()


@pytest.mark.parametrize("has_grammar", [False, True])
def test_min_tokens_row_by_row(has_grammar: bool) -> None:
    """Row 2 is the first that may stop; a grammar that wants the end on row 0 gets it there."""
    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    processor.min_toks = {0: (3, [1], {7}, has_grammar)}
    rounds = Rounds(Runner(["a"], logitsprocs=LogitsProcessors([processor])), "standard")
    logits = flat(3)
    logits[:, 7] = 50
    logits[:, 8] = 40
    assert judge(rounds, [[8, 8]], logits) == [[8, 8, 7]]
    logits[0, torch.arange(VOCAB) != 7] = -torch.inf
    first = judge(rounds, [[7, 8]], logits)[0]
    assert first == ([7, 8, 7] if has_grammar else [0])


def test_penalties_follow_the_output_step_by_step() -> None:
    outputs = [[3, 3]]
    runner = Runner(
        ["a"],
        no_penalties=False,
        prompt_token_ids=torch.tensor([[2, VOCAB]]),  # padded
        frequency_penalties=torch.tensor([10.0]),
        temperature=torch.zeros(1),
        output_token_ids=outputs,
    )
    rounds = Rounds(runner, "standard")
    logits = flat(3)
    logits[:, 3], logits[:, 4], logits[:, 9] = 35, 30, 12
    assert judge(rounds, [[4, 3]], logits) == [[4, 4]]  # 15, 30; then 15, 20
    outputs[0] += [4, 4]
    assert judge(rounds, [[3, 9]], logits) == [[3, 9, 4]]  # 15, 10, 12; then 5, 10, 12; 5, 10, 2


def test_a_request_keeps_its_seed_while_it_stays() -> None:
    runner = Runner(["a", "b"], generators={1: torch.Generator().manual_seed(2**64 - 3)})
    rounds = Rounds(runner, "coupled")

    def seeds(num: int) -> list[int]:
        metadata = runner.input_batch.sampling_metadata
        return rounds._batch_of(metadata, num, VOCAB).filters.seeds.tolist()

    a, b = seeds(2)
    assert b == -3 and seeds(2) == [a, b]
    runner.set_batch(["b", "c", "a"])
    assert seeds(3)[2] == a and len(set(seeds(3))) == 3
    runner.set_batch(["b"])
    runner.set_batch(["a"])
    assert seeds(1) != [b]


def test_warm_up_draws_no_seed() -> None:
    """vLLM tries its samplers out with metadata of its own, maybe on one rank only."""
    runner = Runner(["a"])
    rounds, state = Rounds(runner, "standard"), torch.get_rng_state()
    batch = runner.input_batch
    runner.set_batch(["a"])  # now the metadata of `batch` is nobody's
    rounds._batch_of(batch.sampling_metadata, 1, VOCAB)
    assert torch.equal(state, torch.get_rng_state())


def test_draft_probabilities_of_another_drafter() -> None:
    """A drafter of vLLM's hands over probabilities: q = p accepts every draft."""
    rounds = Rounds(Runner(["a"] * 8), "standard")
    logits = torch.randn(8 * 3, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [row for row in range(24) if row % 3 < 2]
    q = (logits[rows] / 0.9).softmax(-1)
    drafts = q.multinomial(1, generator=torch.Generator().manual_seed(1)).view(8, 2).tolist()
    assert [text[:2] for text in judge(rounds, drafts, logits, q)] == drafts
