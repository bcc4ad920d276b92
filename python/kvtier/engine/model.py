"""The forward pass of a Llama-family model over paged KV memory.

The weights, norms, projections and rotary frequencies are the modules of the transformers library; what is ours is the
way through them: the tokens of all requests go through each projection as one flat batch, and attention reads and
writes blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvtier.engine.memory import KvMemory, Segment
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen3")
# Other kinds of rotary scaling change with the length of the sequence, and with it the keys already in the cache.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Model:
    """A decoder-only model of the Llama family: Llama, Qwen2, Qwen3 (dense).

    Attributes:
        name: Tells one set of weights from another; it becomes part of every block hash.
        vocab_size: Token ids are below this.
        max_tokens: Longest sequence that the model was made for.
        eos_token_ids: Tokens that end an answer.
        tokenizer: The checkpoint's tokenizer, or None.
    """

    def __init__(self, network: PreTrainedModel, name: str, tokenizer: Any = None) -> None:
        """Take over a transformers model.

        Args:
            network: A `...ForCausalLM` of one of the families, on its device.
            name: Tells these weights from others.
            tokenizer: Kept for the caller.

        Raises:
            ConfigError: The model is of another family, or uses something that paged attention here does not do.
        """
        config = network.config
        if config.model_type not in FAMILIES or not hasattr(network, "lm_head"):
            raise ConfigError("model", type(network).__name__, f"a ...ForCausalLM of one of {', '.join(FAMILIES)}")
        if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
            raise ConfigError("model", "sliding-window attention", "only full attention is supported")
        for size in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
            if getattr(config, size) < 1:
                raise ConfigError("model", f"{size} {getattr(config, size)}", "at least 1")
        rope_type = config.rope_parameters["rope_type"]
        if rope_type not in ROPE_TYPES:
            raise ConfigError("model", f"rope_type {rope_type}", f"one of {', '.join(ROPE_TYPES)}")
        self.network: Any = network.eval()
        self.name = name
        self.tokenizer = tokenizer
        self.device = network.device
        self.dtype = network.dtype
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.vocab_size: int = config.vocab_size
        self.max_tokens: int = config.max_position_embeddings
        eos = network.generation_config.eos_token_id if network.generation_config else config.eos_token_id
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())

    def make_memory(self, num_blocks: int, block_size: int) -> KvMemory:
        """KV memory of the right shape, on the model's device.

        Raises:
            ConfigError: The device cannot hold that many blocks.
        """
        return KvMemory(
            num_blocks,
            block_size,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], segments: Sequence[Segment], memory: KvMemory) -> Tensor:
        """Compute the segments' tokens: write their KV, and return the logits after each segment's last token.

        Args:
            token_ids: The tokens of all segments, one after the other.
            segments: Where they belong.
            memory: Where KV is read and written.

        Returns:
            Logits: shape (segments, vocab_size), in the model's dtype and on its device.
        """
        device = self.device
        size = memory.block_size
        ranges = [torch.arange(s.start, s.end, device=device) for s in segments]
        tables = [torch.tensor(s.block_ids[: -(-s.end // size)], device=device) for s in segments]
        masks = [causal_mask(r, s.end) for r, s in zip(ranges, segments, strict=True)]
        sizes = [s.end - s.start for s in segments]
        positions = torch.cat(ranges)
        blocks = torch.cat([table[r // size] for r, table in zip(ranges, tables, strict=True)])
        offsets = positions % size

        body = self.network.model
        hidden = body.embed_tokens(torch.tensor(token_ids, device=device))
        cos, sin = (x[0].unsqueeze(1) for x in body.rotary_emb(hidden, positions.unsqueeze(0)))
        for index, layer in enumerate(body.layers):
            q, k, v = self._project(layer.self_attn, layer.input_layernorm(hidden))
            memory.write(index, blocks, offsets, rotate(k, cos, sin), v)
            attended = [
                attend(part, *memory.read(index, table, s.end), mask)
                for part, table, s, mask in zip(rotate(q, cos, sin).split(sizes), tables, segments, masks, strict=True)
            ]
            hidden = hidden + layer.self_attn.o_proj(torch.cat(attended).flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        last = torch.tensor(sizes, device=device).cumsum(0) - 1
        logits: Tensor = self.network.lm_head(body.norm(hidden[last]))
        return logits

    def _project(self, attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of n tokens: shape (n, heads or kv_heads, head_dim) each."""
        q = attention.q_proj(x).view(-1, self.heads, self.head_dim)
        k = attention.k_proj(x).view(-1, self.kv_heads, self.head_dim)
        v = attention.v_proj(x).view(-1, self.kv_heads, self.head_dim)
        if hasattr(attention, "q_norm"):  # Qwen3
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q, k, v


def causal_mask(positions: Tensor, end: int) -> Tensor | None:
    """Which of the first `end` positions each token may look at: shape (n, end), bool; None: a lone token sees all."""
    if len(positions) == 1:
        return None
    return torch.arange(end, device=positions.device) <= positions.unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: x of shape (n, heads, head_dim); cos and sin of shape (n, 1, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of one request.

    Args:
        q: Queries: shape (n, heads, head_dim).
        k: Keys: shape (kv_heads, end, head_dim).
        v: Values, as `k`.
        mask: From `causal_mask`.

    Returns:
        Shape (n, heads, head_dim).
    """
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)
