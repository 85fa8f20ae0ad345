"""MiMo-V2 in plain PyTorch: dense full-sequence trunk and MTP layers, no KV cache.

It is what `train.py` trains and what tests use as the dense oracle. Parameter names are the
checkpoint's names. Conventions follow vLLM's `mimo_v2.py` and `mimo_v2_mtp.py`: RMSNorm in fp32,
NeoX rotary on the first `partial_rotary_factor * head_dim` dims, values scaled before attention,
a window of W sees keys j with 0 <= i - j < W, MTP layers use the sliding-window attention config.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The fields of a MiMo-V2-Flash `config.json` this model reads (names as there)."""

    vocab_size: int = 320
    hidden_size: int = 128
    intermediate_size: int = 320
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    swa_num_attention_heads: int = 4
    swa_num_key_value_heads: int = 2
    swa_head_dim: int = 32
    # 0 = full attention, 1 = sliding window. Three full layers beside one + three (MTP) sliding
    # ones let vLLM put all sliding layers into one KV-cache group, which its proposers require.
    hybrid_layer_pattern: tuple[int, ...] = (0, 1, 0, 0)
    sliding_window_size: int = 64
    rope_theta: float = 500000.0
    swa_rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5
    attention_value_scale: float = 0.707
    layernorm_epsilon: float = 1e-5
    max_position_embeddings: int = 1024


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, computed in fp32, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        xf = x.float()
        xf = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + self.eps)
        return (xf * self.weight.float()).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float, rotary_dim: int) -> Tensor:
    """NeoX rotary embedding of the first `rotary_dim` dims.

    x: [..., S, heads, head_dim]; positions: [S] or [..., S].
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float, device=x.device) / rotary_dim
    angle = positions.float()[..., None] * theta**-exponent  # [..., S, rotary_dim / 2]
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    x1, x2, rest = x.split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], dim=-1)
    x1f, x2f = x1.float(), x2.float()
    turned = torch.cat([x1f * cos - x2f * sin, x2f * cos + x1f * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention, full or sliding-window by `sliding`."""

    def __init__(self, config: Config, sliding: bool) -> None:
        super().__init__()
        c = config
        self.num_heads = c.swa_num_attention_heads if sliding else c.num_attention_heads
        self.num_kv_heads = c.swa_num_key_value_heads if sliding else c.num_key_value_heads
        self.head_dim = c.swa_head_dim if sliding else c.head_dim
        self.theta = c.swa_rope_theta if sliding else c.rope_theta
        self.window = c.sliding_window_size if sliding else None
        self.rotary_dim = int(self.head_dim * c.partial_rotary_factor)
        self.value_scale = c.attention_value_scale
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [..., S, H] -> output [..., S, H], and k, v [..., S, kv_heads, head_dim] as cached."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)) * self.value_scale
        q = rotate(q, positions, self.theta, self.rotary_dim)
        k = rotate(k, positions, self.theta, self.rotary_dim)
        # Order is by row, not by position: the rows are one contiguous span of a sequence.
        rows = torch.arange(x.shape[-2], device=x.device)
        distance = rows[:, None] - rows[None, :]
        mask = distance >= 0
        if self.window is not None:
            mask &= distance < self.window
        repeat = self.num_heads // self.num_kv_heads
        out = F.scaled_dot_product_attention(
            q.transpose(-3, -2),
            k.repeat_interleave(repeat, dim=-2).transpose(-3, -2),
            v.repeat_interleave(repeat, dim=-2).transpose(-3, -2),
            attn_mask=mask,
            scale=self.head_dim**-0.5,
        )
        return self.o_proj(out.transpose(-3, -2).flatten(-2)), k, v


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TrunkLayer(nn.Module):
    def __init__(self, config: Config, sliding: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.self_attn = Attention(config, sliding)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config, sliding=True)
        self.pre_mlp_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)
        self.final_layernorm = RMSNorm(size, eps)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        attn, k, v = self.self_attn(self.input_layernorm(x), positions)
        x = x + attn
        x = x + self.mlp(self.pre_mlp_layernorm(x))
        return self.final_layernorm(x), k, v


class TinyMiMoV2(nn.Module):
    """Trunk, `num_mtp_layers` MTP layers, and the embedding and head they share."""

    def __init__(self, config: Config, num_mtp_layers: int = 3) -> None:
        super().__init__()
        self.config = config
        self.num_mtp_layers = num_mtp_layers
        layers = [TrunkLayer(config, sliding=bool(s)) for s in config.hybrid_layer_pattern]
        mtp = [MtpLayer(config) for _ in range(num_mtp_layers)]
        # Plain containers, so that parameters carry the checkpoint's names.
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.model.mtp = nn.ModuleDict({"layers": nn.ModuleList(mtp)})
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def trunk(self, ids: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids: [..., S] -> hidden after `model.norm` [..., S, H], logits [..., S, V]."""
        if positions is None:
            positions = torch.arange(ids.shape[-1], device=ids.device)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, positions)
        hidden = self.model.norm(x)
        return hidden, self.lm_head(hidden)

    def mtp_layer(
        self, m: int, hidden: Tensor, ids_shifted: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run MTP layer m over all rows.

        hidden: [..., S, H], row j's input hidden (the trunk's h_j under target feed)
        ids_shifted: [..., S], row j holds t_{j+1+m}
        positions: [S] or [..., S] for RoPE, default 0..S-1 (row j at position j)
        returns: hidden after `final_layernorm` [..., S, H] (`lm_head` of it predicts t_{j+2+m}),
        and k (after RoPE), v (scaled), both [..., S, kv_heads, head_dim]
        """
        if positions is None:
            positions = torch.arange(ids_shifted.shape[-1], device=ids_shifted.device)
        embeds = self.model.embed_tokens(ids_shifted)
        return self.model.mtp["layers"][m](embeds, hidden, positions)


def load(checkpoint_dir: str | Path, dtype: torch.dtype = torch.float32) -> TinyMiMoV2:
    """Load a checkpoint folder; the number of MTP layers is counted from its weights."""
    path = Path(checkpoint_dir)
    raw = json.loads((path / "config.json").read_text())
    known = {f.name for f in fields(Config)}
    config = Config(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k in known}
    )
    weights = load_file(path / "model.safetensors")
    num_mtp = len({n.split(".")[3] for n in weights if n.startswith("model.mtp.layers.")})
    model = TinyMiMoV2(config, num_mtp)
    model.load_state_dict(weights)
    return model.to(dtype).eval().requires_grad_(False)
