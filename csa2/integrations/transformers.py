"""A compressed cache for transformers: CSA2 on a model of yours, without a server.

    from csa2.integrations.transformers import CompressedCache

    cache = CompressedCache(model, ratio="4")
    output = model.generate(**inputs, past_key_values=cache)
    print(cache.compression_ratio, cache.pages)

Keys and values lie in the same pages as in a server, and attention reads them from there. For trying out and measuring: one
batch of sequences of equal length, without padding. On a CPU, or with impl="cuda" on a CUDA device, where nobody has run it
yet.
"""

from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from csa2.attention import make_attention
from csa2.calibrate import artefact
from csa2.capacity import plan_arena
from csa2.codec.assembly import HeadCalibration, codec_and_ladder
from csa2.errors import OptionError, UnsupportedModelError
from csa2.formats import PLAIN
from csa2.impl import resolve_impl
from csa2.integrations.transformers_model import check_model, geometry_of
from csa2.options import CacheOptions
from csa2.sequences import Sequences
from csa2.store import PageStore
from sgl_kernels.page_layout import PageGeometry

ATTENTION = "csa2"
"""Name of the attention in transformers; with any other cache it is SDPA."""
MAX_TOKENS = 32768
"""Length for which memory is set aside where nobody says, if the model takes as much."""
_LAYER = "csa2_layer"
"""Attribute of the keys that a compressed layer gives to the attention."""
_NOT_PLAIN = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments of attention that is more than causal softmax."""


class CompressedCache(Cache):  # type: ignore[misc]
    """A cache of transformers whose keys and values are compressed pages; for `model` alone."""

    def __init__(
        self,
        model: PreTrainedModel,
        ratio: str = "auto",
        *,
        calibration: str | None = None,
        max_tokens: int | None = None,
        **options: Any,
    ) -> None:
        """Make an empty cache, and let `model` compute its attention with it.

        Args:
            ratio: how much smaller than 4-bit pages old ones become: "1", "2", "4", "8"; "auto" follows memory.
            calibration: folder made by `csa2 calibrate`; `csa2.calibrations` has that of the demo model.
            max_tokens: longest sequence; memory is set aside for it as if uncompressed, unless `arena_size` says otherwise
                (an operating system gives it when it is written). Default: that of the model, at most 32768.
            options: other fields of `csa2.options.CacheOptions`, for example hot_tokens=64 or arena_size="512MB".

        Raises:
            UnsupportedModelError: its attention is of a kind that compressed pages cannot serve.
            OptionError: an option out of range, or that only a server can honour.
            CalibrationError: a calibration that is not there or belongs to another model.
        """
        self.options = CacheOptions(ratio=ratio, calibration=calibration, **options)  # type: ignore[arg-type]
        self.options.validate()
        check_model(model, self.options.impl)
        if self.options.documents is not None:
            raise OptionError("documents can be pinned by a server only: leave the option out")
        geometry, rotation = geometry_of(model)
        known = _calibration(model, calibration, geometry)
        self._codec, self.ladder = codec_and_ladder(self.options, geometry, rotation, known)
        self._max_tokens = max_tokens or min(model.config.get_text_config().max_position_embeddings, MAX_TOKENS)
        self._config, self._device = model.config, model.device
        self._sequences: Sequences | None = None
        _register()
        model.set_attn_implementation(ATTENTION)
        super().__init__(layers=[CompressedLayer(self, layer) for layer in range(geometry.num_layers)])

    @property
    def pages(self) -> dict[str, int]:
        """Pages in use by format."""
        counts = [0] * len(self.ladder.names) if self._sequences is None else self._sequences.store.arena.counts
        return dict(zip(self.ladder.names, counts, strict=True))

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that hold tokens."""
        return sum(count * size for count, size in zip(self.pages.values(), self.ladder.page_bytes, strict=True))

    @property
    def compression_ratio(self) -> float:
        """Bytes that these pages would take uncompressed over `used_bytes`; 1 when empty."""
        return sum(self.pages.values()) * self.ladder.page_bytes[PLAIN] / self.used_bytes if self.used_bytes else 1.0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each sequence."""
        return 0 if self._sequences is None else self._sequences.length

    def reset(self) -> None:
        """Forget everything."""
        self._sequences = None

    def sequences(self, batch_size: int) -> Sequences:
        """The sequences in the cache, made on first use.

        Raises:
            OptionError: there are more or fewer already.
        """
        if self._config._attn_implementation != ATTENTION:
            raise OptionError(
                f"the attention of the model was set to {self._config._attn_implementation!r}, which cannot read compressed "
                f"pages: set it to {ATTENTION!r} or make a new CompressedCache"
            )
        if self._sequences is None:
            self._sequences = self._made(batch_size)
        if self._sequences.batch_size != batch_size:
            raise OptionError(
                f"the cache holds {self._sequences.batch_size} sequences and the model is given {batch_size}: use one cache "
                f"for each batch, or call reset()"
            )
        return self._sequences

    def crop(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: tokens of a compressed page cannot be taken back."""
        _refuse("taking tokens back (assisted decoding)")

    def reorder_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: sequences do not share pages."""
        _refuse("beam search")

    def batch_repeat_interleave(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: sequences do not share pages."""
        _refuse("repeating sequences")

    def batch_select_indices(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: sequences do not share pages."""
        _refuse("selecting sequences")

    def _made(self, batch_size: int) -> Sequences:
        sizes = self.ladder.page_bytes
        pages = -(-self._max_tokens // self.ladder.geometry.page_size) * batch_size
        plan = plan_arena(self.options.arena_bytes or pages * sizes[PLAIN], sizes, self.ladder.guard)
        store = PageStore(self.ladder, plan, plan.max_pages + 1, self._codec, str(self._device))
        store.protected_pages = -(-self.options.protect_tokens // store.page_size)
        name = resolve_impl(self.options.impl, self.options.rope).name
        heads = self._config.get_text_config().num_attention_heads
        return Sequences(store, make_attention(store, name, heads), self.options, batch_size)


class CompressedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `CompressedCache`."""

    def __init__(self, cache: CompressedCache, layer: int) -> None:
        super().__init__()
        self._cache, self._layer = cache, layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: pages are made when tokens come."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, G, T, D) of new tokens; the same, marked for `attend`."""
        sequences = self._cache.sequences(key_states.shape[0])
        # Triton launches on the current device, wherever the tensors are.
        with torch.cuda.device_of(key_states):  # type: ignore[no-untyped-call]
            if self._layer == 0:
                sequences.begin(key_states.shape[2])
            sequences.write(_rows(key_states), _rows(value_states), self._layer)
        # A view, so that the mark does not stay on a tensor of the model.
        marked = key_states.view_as(key_states)
        setattr(marked, _LAYER, self)
        return marked, value_states

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """(B, T, H, D) from `query` (B, H, T, D) and what `update` returned."""
        batch, _, new, _ = query.shape
        sequences = self._cache.sequences(batch)
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            out = sequences.attend(_rows(query), _rows(keys), _rows(values), self._layer, scale)
            if self._layer == len(self._cache.layers) - 1:
                sequences.end()
        return out.view(batch, new, *out.shape[1:])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask covers, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of each sequence."""
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        """Unknown: it depends on how far the pages are compressed."""
        return -1


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
    """What transformers calls: compressed attention for keys of a `CompressedLayer`, SDPA for any others."""
    layer = getattr(key, _LAYER, None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    for name in _NOT_PLAIN:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"CompressedCache does not support this model: its attention has {name}")
    if kwargs.get("dropout") or (torch.is_grad_enabled() and query.requires_grad):
        raise OptionError("compressed attention has no gradient: call the model in torch.no_grad() and in eval mode")
    _check_mask(attention_mask, query.shape[2])
    scale = kwargs.get("scaling")
    return layer.attend(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale), None


def _check_mask(mask: Tensor | None, new: int) -> None:
    """Refuse anything but a causal mask.

    Raises:
        OptionError: some tokens are masked, as padding is.
    """
    if mask is None:
        return
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril(mask.shape[-1] - new)
    if bool((mask != causal).any()):
        raise OptionError("CompressedCache has no padding: give sequences of equal length, or one at a time")


def _rows(heads: Tensor) -> Tensor:
    """(B x T, H, D) of (B, H, T, D)."""
    return heads.transpose(1, 2).reshape(-1, heads.shape[1], heads.shape[3])


def _calibration(model: PreTrainedModel, folder: str | None, geometry: PageGeometry) -> HeadCalibration | None:
    if folder is None:
        return None
    calibration = artefact.load(Path(folder))
    if Path(model.name_or_path).is_dir():
        artefact.check_model(calibration, Path(model.name_or_path), source=folder)
    return calibration.of(range(geometry.num_layers), range(geometry.num_kv_heads))


def _refuse(what: str) -> NoReturn:
    raise OptionError(f"CompressedCache does not support {what}: use a cache of transformers itself for it")


def _register() -> None:
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
