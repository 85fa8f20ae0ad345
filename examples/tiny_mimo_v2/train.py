"""Trains the tiny MiMo-V2 checkpoint (the trunk, then trunk and MTP layers) and writes it.

    python train.py && python evaluate.py     # about 9 minutes on 2 CPU cores

Every MTP layer is trained on the trunk's hidden state (target feed, as the MiMo-V2 family is):
layer m at row j gets h_j and the embedding of t_{j+1+m}, and predicts t_{j+2+m}.
"""

import argparse
import json
import math
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from data import BOS, EOS, PAD, Rows
from evaluate import heldout_batches, layer_accuracy
from model import Config, TinyMiMoV2
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

HERE = Path(__file__).resolve().parent
SPECIAL = {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD}
ROW_LENGTH = 256
DRILL_SHARE = 0.35
PYTHON_SHARE = 0.15
MTP_LOSS_WEIGHT = 0.3


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy averaged by weight. logits: [B, S, V]; targets, weights: [B, S]."""
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum() / weights.sum()


def step_loss(model: TinyMiMoV2, ids: Tensor, weights: Tensor, mtp: bool) -> list[Tensor]:
    """Losses of the trunk and, if `mtp`, of each MTP layer.

    ids: [B, S]; weights: [B, S], of each id as a target
    """
    rows = ids.shape[1] - model.num_mtp_layers - 1
    hidden, logits = model.trunk(ids[:, :rows])
    losses = [weighted_loss(logits, ids[:, 1 : 1 + rows], weights[:, 1 : 1 + rows])]
    for m in range(model.num_mtp_layers if mtp else 0):
        out, _, _ = model.mtp_layer(m, hidden, ids[:, 1 + m : 1 + m + rows])
        span = slice(2 + m, 2 + m + rows)
        losses.append(weighted_loss(model.lm_head(out), ids[:, span], weights[:, span]))
    return losses


def init_weights(model: TinyMiMoV2) -> None:
    """Normal init scaled by fan-in; embeddings 0.5, so that no position starts near rms zero."""
    for name, p in model.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(p, std=0.5)
        elif p.dim() == 2:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
            if "o_proj" in name or "down_proj" in name:
                p.data *= 0.3


def optimizers(model: TinyMiMoV2, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for embedding, head and norms."""
    inner, outer = [], []
    for name, p in model.named_parameters():
        is_inner = p.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name
        (inner if is_inner else outer).append(p)
    return [
        torch.optim.Muon(inner, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(steps: int, batch: int, lr: float, seed: int) -> TinyMiMoV2:
    torch.manual_seed(seed)
    model = TinyMiMoV2(Config())
    init_weights(model)
    # One row more than n + 1 shifted targets need.
    source = Rows(seed, ROW_LENGTH + model.num_mtp_layers + 1, DRILL_SHARE, PYTHON_SHARE)
    opts = optimizers(model, lr)
    heldout = heldout_batches(count=32)["arithmetic"]
    started = time.monotonic()
    for step in range(steps):
        rows = [source.next_row() for _ in range(batch)]
        ids = torch.tensor([r[0] for r in rows])
        weights = torch.tensor([r[1] for r in rows])
        # The MTP layers learn fast and cost almost half of a step: they join in halfway.
        losses = step_loss(model, ids, weights, mtp=step >= steps // 2)
        loss = losses[0] + MTP_LOSS_WEIGHT * sum(losses[1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        warm = min(1.0, (step + 1) / 100)
        scale = warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = lr * scale
            opt.step()
            opt.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == steps - 1:
            shown = " ".join(f"{x.item():.3f}" for x in losses)
            accuracy = layer_accuracy(model, *heldout)
            seconds = time.monotonic() - started
            print(f"step {step} loss {shown} accuracy {accuracy} {seconds:.0f}s", flush=True)
    return model


def write_tokenizer(folder: Path) -> None:
    """Byte-level tokenizer without merges: the id of a byte is its value. Adds BOS."""
    # The byte-level alphabet stands for the bytes in GPT-2's order: printable bytes first map to
    # themselves, the others to code points from 256 up.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    assert all(tokenizer.token_to_id(token) == i for token, i in SPECIAL.items())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": Config.max_position_embeddings,
        },
    )


def write_checkpoint(model: TinyMiMoV2, folder: Path) -> None:
    """Write the folder vLLM loads; weights are rounded to bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    c = model.config
    weights = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(
        folder / "model.safetensors.index.json",
        {
            "metadata": {"total_size": sum(w.numel() * 2 for w in weights.values())},
            "weight_map": dict.fromkeys(sorted(weights), "model.safetensors"),
        },
    )
    write_json(
        folder / "config.json",
        {
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "mimo_v2_flash",
            "torch_dtype": "bfloat16",
            "vocab_size": c.vocab_size,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_hidden_layers": c.num_hidden_layers,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "v_head_dim": c.head_dim,
            "swa_num_attention_heads": c.swa_num_attention_heads,
            "swa_num_key_value_heads": c.swa_num_key_value_heads,
            "swa_head_dim": c.swa_head_dim,
            "swa_v_head_dim": c.swa_head_dim,
            "hybrid_layer_pattern": list(c.hybrid_layer_pattern),
            "layer_types": [
                "sliding_attention" if s else "full_attention" for s in c.hybrid_layer_pattern
            ],
            "moe_layer_freq": [0] * c.num_hidden_layers,
            "mlp_layer_types": ["dense"] * c.num_hidden_layers,
            "sliding_window": c.sliding_window_size,
            "sliding_window_size": c.sliding_window_size,
            "rope_theta": c.rope_theta,
            "swa_rope_theta": c.swa_rope_theta,
            "partial_rotary_factor": c.partial_rotary_factor,
            "attention_value_scale": c.attention_value_scale,
            "attention_bias": False,
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": False,
            "hidden_act": "silu",
            "layernorm_epsilon": c.layernorm_epsilon,
            "rms_norm_eps": c.layernorm_epsilon,
            "max_position_embeddings": c.max_position_embeddings,
            "tie_word_embeddings": False,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
        },
    )
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False},
    )
    write_tokenizer(folder)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.monotonic()
    model = train(args.steps, args.batch, args.lr, args.seed)
    minutes = (time.monotonic() - started) / 60
    write_checkpoint(model, args.out)
    settings = {
        "steps": args.steps,
        "batch": args.batch,
        "lr": args.lr,
        "seed": args.seed,
        "threads": args.threads,
        "row_length": ROW_LENGTH,
        "parameters": sum(p.numel() for p in model.parameters()),
        "minutes": round(minutes, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    write_json(args.out / "metrics.json", {"training": settings})


if __name__ == "__main__":
    main()
