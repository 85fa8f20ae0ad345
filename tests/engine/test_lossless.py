"""Real vLLM, greedy: with MTP, the text is that without; the drafts are those of dense passes."""

import itertools

import pytest
from harness import LAST, K
from oracle import acceptance, compare

from mtp_kernels import draft_vocab

RUNS = ("mtp", "tight", "preempted")
ALL = [(runner, name) for runner in ("v1", "v2") for name in RUNS]


def _prompts(name: str, workload: dict, arithmetic: list) -> list[list[int]]:
    if name == "chain":
        return arithmetic[:12]
    return workload["prompts"][-LAST:] if name == "preempted" else workload["prompts"]


@pytest.mark.parametrize("runner,name", ALL)
def test_tokens_equal_no_drafts(runs, runner: str, name: str) -> None:
    """64 prompts, more than max_num_seqs, of length 1 and up to max_model_len."""
    plain, drafted = runs[runner]["plain"]["tokens"], runs[runner][name]["tokens"]
    assert len(plain) == 64 and len(drafted) == (LAST if name == "preempted" else 64)
    pairs = zip(plain[-len(drafted) :], drafted, strict=True)
    different = [i for i, (a, b) in enumerate(pairs) if a != b]
    assert not different, f"requests {different} of {len(drafted)} differ from no drafts"


@pytest.mark.parametrize("runner,name", [*ALL, ("v1", "chain"), ("v2", "chain")])
def test_drafts_equal_dense_oracle(
    runs, model, workload, arithmetic, runner: str, name: str
) -> None:
    """Round by round, through rejections of 0..K, chunk ends, prefix hits and preemption."""
    run, feed = runs[runner][name], "chain" if name == "chain" else "target"
    prompts = _prompts(name, workload, arithmetic)
    checked, ties, wrong = 0, 0, []
    for i, (prompt, output) in enumerate(zip(prompts, run["tokens"], strict=True)):
        rounds = [(row, drafts) for request, row, _, drafts in run["rounds"] if request == i]
        assert rounds, f"request {i} was never drafted for"
        result = compare(model, prompt + output, len(prompt), rounds, feed)
        checked, ties = checked + result.checked, ties + result.ties
        wrong += [(i, *entry) for entry in result.wrong]
    assert checked >= 20 * len(prompts)
    assert not wrong, f"{len(wrong)} of {checked} drafts differ from the oracle: {wrong[:8]}"
    assert ties <= checked // 1000, f"{ties} near ties in {checked} drafts"


@pytest.mark.parametrize("runner,name", ALL)
def test_every_layer_runs_its_own_step(runs, runner: str, name: str) -> None:
    assert all(layers == list(range(K)) for _, _, layers, _ in runs[runner][name]["rounds"])


def test_runs_are_what_they_claim(runs) -> None:
    """vLLM's CPU platform overrides some settings silently: read them back."""
    for runner, name in ALL:
        config, metrics = runs[runner][name]["config"], runs[runner][name]["metrics"]
        assert config["dtype"] == "torch.float32"
        assert config["async_scheduling"] is ((runner, name) == ("v2", "tight"))
        per_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
        # Rejections of 0, 1, 2 and 3 drafts all happened.
        counts = [metrics["vllm:spec_decode_num_drafts"], *per_position, 0]
        assert all(a > b for a, b in itertools.pairwise(counts)), counts
        if name != "mtp":
            assert config["max_num_batched_tokens"] == 48 and config["block_size"] == 32
            assert metrics["vllm:prefix_cache_hits"] > 0
        if name == "preempted":
            assert metrics["vllm:num_preemptions"] > 0


def test_engine_process_loads_the_plugin(runs) -> None:
    """In a spawned engine process every part does what it does in this one."""
    here, there = runs["v1"]["alone"], runs["spawned"]["alone"]
    assert here["tokens"] == there["tokens"]
    assert here["metrics"] == there["metrics"]


def _mean_length(run: dict) -> float:
    metrics = run["metrics"]
    rounds = metrics["vllm:spec_decode_num_drafts"]
    return 1 + metrics["vllm:spec_decode_num_accepted_tokens"] / rounds


def test_acceptance_length(runs, model, arithmetic) -> None:
    """At least 95% of the dense oracle's, 0.8 above stock's, and V1 within 0.02 of V2."""
    emitted = rounds = 0
    for prompt, output in zip(arithmetic[:32], runs["v1"]["arithmetic"]["tokens"], strict=True):
        e, r = acceptance(model, prompt + output, len(prompt), K)
        emitted, rounds = emitted + e, rounds + r
    v1, v2 = _mean_length(runs["v1"]["arithmetic"]), _mean_length(runs["v2"]["arithmetic"])
    assert v1 >= 0.95 * emitted / rounds, (v1, emitted / rounds)
    assert abs(v1 - v2) <= 0.02, (v1, v2)
    stock = _mean_length(runs["stock"]["arithmetic"])
    assert 1.5 < stock < v1 - 0.8, (stock, v1)


@pytest.mark.parametrize("runner", ["v1", "v2", "ranks"])
def test_pruned_vocabulary_changes_no_token(runs, pruned_vocab, runner: str) -> None:
    """32 of 320 ids can be drafted: fewer drafts are accepted, and the text is the same."""
    run, full = runs[runner]["pruned"], runs["v1"]["mtp"]
    assert run["tokens"] == full["tokens"][:32]
    kept = set(draft_vocab.read(pruned_vocab, 320))
    drafted = {token for _, _, _, drafts in run["rounds"] for token in drafts}
    assert len(kept) == 32 and (runner == "ranks" or 10 < len(drafted)) and drafted <= kept
    assert 2 < _mean_length(run) < _mean_length(runs["v2"]["arithmetic"]) - 0.1


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_projected_embeddings_change_no_token(runs, runner: str) -> None:
    """And, in bfloat16, where a table is rounded, few drafts; chained in fp32, none."""
    without, table = runs[runner]["arithmetic"], runs[runner]["table"]
    assert table["tokens"] == without["tokens"]
    drafts = [[one[3] for one in run["rounds"]] for run in (without, table)]
    assert drafts[0] != drafts[1]  # it is another sum
    assert abs(_mean_length(table) - _mean_length(without)) < 0.05
    assert runs[runner]["chain table"]["rounds"] == runs[runner]["chain"]["rounds"]


def test_projected_embeddings_of_a_repeated_layer(runs) -> None:
    """K = 5 of 3 layers: the last one runs three times, on its own output, with a table too."""
    deep, table = runs["v1"]["deep"], runs["v1"]["deep table"]
    assert deep["tokens"] == table["tokens"] == [t[:32] for t in runs["v1"]["chain"]["tokens"]]
    assert deep["rounds"] == table["rounds"]
    assert {tuple(layers) for _, _, layers, _ in deep["rounds"]} == {(0, 1, 2, 2, 2)}


def test_two_ranks_equal_one(runs) -> None:
    """32 prompts with the vocabulary, the heads and the layers split over two ranks."""
    one, two = runs["v1"]["mtp"]["tokens"][:32], runs["ranks"]["greedy"]["tokens"]
    assert one == two
    assert _mean_length(runs["ranks"]["greedy"]) > 3.5


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_ranks_never_disagree(runs, name: str) -> None:
    """Case 26: without seeds too, both ranks sample the same tokens and draft the same."""
    first, second = runs["ranks"][name]["ranks"]
    assert len(first) > 10 and first == second


def test_fused_ops_change_no_token(runs) -> None:
    """Fused and unfused entry and head: same tokens, and their switches are obeyed."""
    fused, unfused = runs["v1"]["mtp"]["tokens"][:12], runs["v1"]["unfused"]["tokens"]
    assert fused == [tokens[:24] for tokens in unfused]
