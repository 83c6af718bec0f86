"""Inputs of transformers' models, made from what a class says: ``main_input_name``, forward's signature, the config.

Nothing of transformers is imported. Every input is made by its name; what one name may look like (an image per text, or
several) is tried in turn. A model that puts images or audio in the place of tokens is asked how many tokens they are.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.surgery.clone import clone, to_meta, to_own

BATCH = 2
LENGTH = 16
"""Tokens of a text: few, but more than any convolution over tokens needs."""
_IMAGE_SIZE = 224
_AUDIO_SAMPLES = 16000
_FRAMES = 4
_CHOICES = 2
Named = dict[str, Tensor]
_MODALITIES = (
    ("image", "pixel_values", ("image_token_id", "image_token_index", "image_patch_id")),
    ("video", "pixel_values_videos", ("video_token_id", "video_token_index")),
    ("audio", "input_features", ("audio_token_id", "audio_token_index")),
    ("audio", "input_values", ("audio_token_id", "audio_token_index")),
)
"""What can stand in a text: the method that encodes it is ``get_..._features``; its input; the token it replaces."""
_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw", "hidden_states": "grid_thw"}


def noise(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns random numbers that leave the global generator as it was."""
    return torch.rand(shape, dtype=dtype, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def as_pair(size: Any) -> tuple[int, int] | None:
    """Returns height and width of a size that is written as one number, two, or a mapping."""
    if isinstance(size, Mapping):
        size = (size.get("height"), size.get("width"))
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0], size[1]
    return None


class NamedInputs:
    """Makes the inputs of one model with a ``config`` and a ``main_input_name``; ``dtype`` is that of floats."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model = model
        self.dtype = dtype
        self.config: Any = model.config
        self.accepted = inspect.signature(model.forward).parameters
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [n for n, p in self.accepted.items() if p.default is p.empty and p.kind not in kinds]
        main: Any = model.main_input_name
        mains = [main] if isinstance(main, str) else list(main)
        towers: list[str] = []
        # A model of two towers that meet behind both needs the inputs of both.
        both = self.has("text_config") and any(map(self.has, ("vision_config", "audio_config", "speech_config")))
        if both or all(map(self.has, ("vocab_size", "image_size", "patch_size"))):
            towers = ["input_ids", "pixel_values", "input_features", "input_values"]
        others = [name for name in (*towers, "decoder_input_ids") if name in self.accepted]
        # A class may say the main input of another one, such as that of the model inside it.
        self.names = list(dict.fromkeys((*(name for name in mains if name in self.accepted), *needed, *others)))

    def candidates(self, last: bool = True) -> Iterator[Named]:
        """Yields inputs by name, the likeliest first.

        With ``last``, a text alone is a last resort for a model that also takes images or sounds. On the meta device
        what is placed among tokens often cannot run, and a text alone would leave half of the model unseen.
        """
        placed = self._placed()
        if placed:
            yield placed
        if not placed or last:
            made: list[Named] = [{}]
            for name in self.names:
                if not any(name in one for one in made):
                    # What cannot be made is left out: forward's own error names it.
                    made = [{**one, **more} for one in made for more in self._variants(name) or [{}]]
            yield from (one for one in made if one)
        if last and "input_ids" in self.names and not self.only_text:
            yield self._text()

    @property
    def only_text(self) -> bool:
        """Whether the model reads nothing but a text."""
        others = {"pixel_values", "pixel_values_videos", "input_features", "input_values"} & self.accepted.keys()
        return not others and {"input_ids", "decoder_input_ids"}.issuperset(self.names)

    def unknown(self) -> list[str]:
        """Returns the names that forward needs and of which no input can be made."""
        return [name for name in self.names if not self._variants(name)]

    def has(self, name: str) -> bool:
        """Whether the config has a setting."""
        return getattr(self.config, name, None) is not None

    def of(self, *names: str, default: Any = None) -> Any:
        """Returns the first of several settings that the config has, or one of the configs inside it."""
        parts, seen = [self.config], {id(self.config)}
        for part in parts:
            for name in names:
                if (value := getattr(part, name, None)) is not None:
                    return value
            inside = [value for value in getattr(part, "__dict__", {}).values() if hasattr(value, "to_dict")]
            parts += [value for value in inside if id(value) not in seen]
            seen |= {id(value) for value in inside}
        return default

    def _number(self, default: int, *names: str) -> int:
        value = self.of(*names)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        return value if isinstance(value, int) and value > 0 else default

    def _variants(self, name: str) -> list[Named]:
        """Returns what may be given under a name, with what must be given beside it."""
        if name == "decoder_input_ids":
            return [{name: self._text()[name]}]
        if name == "input_ids":
            return [self._text()]
        if name in ("pixel_values", "pixel_values_videos", "hidden_states", "image"):
            return self._pixels(name)
        if name in ("input_values", "input_features"):
            return [{name: tensor, **self._masks(name, tensor)} for tensor in self._sounds(name)]
        if name.endswith("mask") or name in ("image_sizes", "spatial_shapes") or name in _GRIDS.values():
            # Made beside what it belongs to, or forward makes it.
            return [{}] if any(part in self.names for part in (*_GRIDS, "input_ids", "image")) else []
        maker = _MAKERS.get(name)
        return [] if maker is None else [maker(self)]

    def _text(self, tokens: Mapping[int, int] | None = None) -> Named:
        """Returns token ids and what belongs to them; ``tokens`` says how often a token stands in each text."""
        special = {name: getattr(part, name, None) for part in self._parts() for name in vars(part) if "token" in name}
        taken = {token for ids in special.values() for token in (ids if isinstance(ids, list) else [ids])}
        vocabulary = self._number(256, "vocab_size", "src_vocab_size")
        filler = next((token for token in range(vocabulary) if token not in taken), 0)
        positions = self.of("max_position_embeddings", "n_positions", "max_seq_len")
        # Some families start to count positions after the padding's id.
        length = min(LENGTH, positions - 2) if isinstance(positions, int) and positions > 4 else LENGTH
        inside = [token for token, count in (tokens or {}).items() for _ in range(count)]
        end = self.of("eos_token_id")
        end = end[0] if isinstance(end, list) else end
        # Classifiers of encoder-decoder models read the sentence at its end token.
        last = end if isinstance(end, int) and 0 <= end < vocabulary else filler
        ids = torch.tensor([[filler, *inside, *[filler] * (length - 2), last]] * BATCH)
        shape = (BATCH, _CHOICES, ids.shape[1]) if type(self.model).__name__.endswith("ForMultipleChoice") else None
        ids = ids if shape is None else ids[:, None].expand(shape).contiguous()
        made = {"input_ids": ids} if "input_ids" in self.accepted else {}
        if "attention_mask" in self.accepted and "input_ids" in made:
            made["attention_mask"] = torch.ones_like(ids)
        if "bbox" in self.accepted and "input_ids" in made:
            # Places on a page are numbers of rows and columns, or shares of it.
            bbox = torch.zeros(*ids.shape, self._number(4, "dim_bbox"))
            made["bbox"] = bbox if self.has("dim_bbox") else bbox.long()
        if "decoder_input_ids" in self.accepted:
            made["decoder_input_ids"] = ids.clone()
        return made

    def _parts(self) -> Iterator[Any]:
        yield self.config
        yield from (value for value in vars(self.config).values() if hasattr(value, "to_dict"))

    def _pixels(self, name: str) -> list[Named]:
        """Returns images and videos: as they are, in a row, as tiles, or cut into patches."""
        size = self.of("image_size", "crop_size", "img_size", "spec_size")
        height, width = as_pair(size) or (_IMAGE_SIZE, _IMAGE_SIZE)
        channels = self._number(3, "num_channels", "in_channels", "in_chans")
        patch = self._number(14, "patch_size", "spatial_patch_size")
        grid = next((word for word in (_GRIDS.get(name, ""), "grid_thw") if word in self.accepted), "")
        if grid:
            side = 2 * self._number(2, "spatial_merge_size", "merge_size")
            numbers = channels * self._number(1, "temporal_patch_size", "patch_temporal") * patch**2
            where = torch.tensor([[1, side, side]] * BATCH)
            beside = {"merge_sizes": torch.tensor([side // 2] * BATCH)} if "merge_sizes" in self.accepted else {}
            return [{name: noise(BATCH * side**2, numbers, dtype=self.dtype), grid: where, **beside}]
        if name == "hidden_states":
            return []
        if "spatial_shapes" in self.accepted:
            patches = noise(BATCH, 4, channels * patch**2, dtype=self.dtype)
            mask = torch.ones(BATCH, 4, dtype=torch.long)
            return [{name: patches, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[2, 2]] * BATCH)}]
        if "aspect_ratio_ids" in self.accepted:
            tiles = self._number(4, "max_num_tiles")
            beside = {"aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long)}
            mask = torch.tensor([1] + [0] * (tiles - 1)).expand(BATCH, 1, tiles).contiguous()
            pixels = noise(BATCH, 1, tiles, channels, height, width, dtype=self.dtype)
            return [{name: pixels, **beside, "aspect_ratio_mask": mask}]
        frames = self._number(_FRAMES, "num_frames", "frames_per_clip")
        rows: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (5,))
        if name == "pixel_values_videos" or self.has("num_frames") or self.has("frames_per_clip"):
            rows = ((frames,), ())
        elif "pixel_attention_mask" in self.accepted:
            rows = ((1,), ())
        elif self.names == [name]:
            rows = ((), (1,), (2,))
        made = [{name: noise(BATCH, *row, channels, height, width, dtype=self.dtype)} for row in rows]
        if "image_sizes" in self.accepted:
            made += [{**one, "image_sizes": torch.tensor([[height, width]] * BATCH)} for one in made]
        return made

    def _sounds(self, name: str) -> list[Tensor]:
        """Returns waveforms, or spectrograms with either axis last."""
        bins = self._number(80, "feature_projection_input_dim", "num_mel_bins", "n_mels", "feature_size", "input_dim")
        if name == "input_values":
            length = self.of("max_length")
            if isinstance(length, int) and self.has("patch_size") and self.has("num_mel_bins"):
                return [noise(BATCH, length, bins, dtype=self.dtype)]
            shapes: list[tuple[int, ...]] = [(_AUDIO_SAMPLES,), (1, _AUDIO_SAMPLES), (2, _AUDIO_SAMPLES)]
        else:
            positions = self.of("max_source_positions")
            bins = self._number(bins, "num_mel_bins")
            shapes = [(bins, 2 * positions)] if isinstance(positions, int) else []
            shapes += [(4 * LENGTH, bins), (bins, 4 * LENGTH)]
            if (side := self.of("spec_size")) is not None:
                shapes.insert(0, (1, side * self._number(1, "freq_ratio"), bins))
        return [noise(BATCH, *shape, dtype=self.dtype) for shape in shapes]

    def _masks(self, name: str, tensor: Tensor) -> Named:
        """Returns masks that say that all of a spectrogram is sound."""
        lengths = tensor.shape[1:] if name == "input_features" and tensor.dim() == 3 else tensor.shape[-1:]
        long = max(lengths)
        words = ("input_features_mask", "feature_attention_mask")
        return {word: torch.ones(BATCH, long, dtype=torch.long) for word in words if word in self.accepted}

    def _placed(self) -> Named:
        """Returns a text with images, videos or audio in the place of its tokens, as far as the model has them."""
        if "input_ids" not in self.names:
            return {}
        made: Named = {}
        tokens: dict[int, int] = {}
        for kind, name, words in _MODALITIES:
            token, encode = self.of(*words), f"get_{kind}_features"
            if name not in self.accepted or not isinstance(token, int) or not hasattr(self.model, encode):
                continue
            # Images say as much of a model as videos do.
            if kind == "video" and "pixel_values" in made:
                continue
            for variant in self._variants(name):
                count = self._tokens_of(encode, variant)
                if count:
                    made |= variant
                    tokens[token] = count
                    break
        if not made:
            return {}
        text = self._text(tokens)
        if "mm_token_type_ids" in self.accepted:
            ids = text["input_ids"]
            made["mm_token_type_ids"] = torch.isin(ids, torch.tensor(list(tokens))).long()
        return {**text, **made}

    def _tokens_of(self, encode: str, variant: Named) -> int:
        """Returns in how many tokens of each text a copy of the model encodes something, or zero if it does not."""
        for replace, device in ((to_meta, "meta"), (to_own, None)):
            with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
                copy, _ = clone(self.model, replace)
                where = device or next(copy.parameters()).device
                method = getattr(copy, encode)
                taken = inspect.signature(method).parameters
                anything = any(p.kind is p.VAR_KEYWORD or p.kind is p.VAR_POSITIONAL for p in taken.values())
                given = {key: tensor.to(where) for key, tensor in variant.items() if key in taken or anything}
                found = method(**given)
                found = getattr(found, "pooler_output", None) if hasattr(found, "last_hidden_state") else found
                parts = _tensors(found)
                count = sum(math.prod(part.shape[:-1]) for part in parts)
                if count:
                    return count // BATCH
        return 0


def _tensors(thing: Any) -> list[Tensor]:
    if isinstance(thing, Tensor):
        return [thing]
    return [tensor for part in thing for tensor in _tensors(part)] if isinstance(thing, list | tuple) else []


def _states(made: NamedInputs) -> Named:
    """Returns what a decision transformer reads: a trajectory."""
    numbers = {"states": made.of("state_dim"), "actions": made.of("act_dim"), "rewards": 1, "returns_to_go": 1}
    steps = torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous()
    floats = {name: noise(BATCH, LENGTH, size or 1, dtype=made.dtype) for name, size in numbers.items()}
    mask = torch.ones(BATCH, LENGTH)
    given = {**floats, "timesteps": steps, "attention_mask": mask}
    return {name: tensor for name, tensor in given.items() if name in made.accepted}


def _series(made: NamedInputs) -> Named:
    """Returns a time series: its past, and where forward asks for it the future and what is known of each time."""
    context = made._number(LENGTH, "context_length")
    channels = made._number(1, "num_input_channels", "input_size")
    if "past_time_features" not in made.accepted:
        shape = (BATCH, context, channels) if made.has("num_input_channels") else (BATCH, context)
        given = {"past_values": noise(*shape, dtype=made.dtype)}
        if "freq" in made.accepted:
            given |= {"past_values_padding": torch.zeros(shape), "freq": torch.zeros(BATCH, 1, dtype=torch.long)}
        return {name: tensor for name, tensor in given.items() if name in made.accepted}
    future = made._number(LENGTH, "prediction_length")
    past = context + max(made.of("lags_sequence", default=[0]))
    tail = () if channels == 1 else (channels,)
    features = made.of("num_time_features", default=0)
    given = {}
    for when, length in (("past", past), ("future", future)):
        given |= {
            f"{when}_values": noise(BATCH, length, *tail, dtype=made.dtype),
            f"{when}_time_features": noise(BATCH, length, features, dtype=made.dtype),
            f"{when}_observed_mask": torch.ones(BATCH, length, *tail),
        }
    return {name: tensor for name, tensor in given.items() if name in made.accepted}


def _flat_patches(made: NamedInputs) -> Named:
    """Returns patches that begin with their row and column."""
    patches = noise(BATCH, LENGTH, 3 * made._number(16, "patch_size") ** 2, dtype=made.dtype)
    where = torch.stack([torch.arange(LENGTH) // 4, torch.arange(LENGTH) % 4], 1).expand(BATCH, LENGTH, 2)
    return {"flattened_patches": torch.cat([where + 1.0, patches], 2), **made._text()}


def _perceived(made: NamedInputs) -> Named:
    """Returns what a Perceiver reads, which its preprocessor tells: tokens or an image."""
    if "Image" in type(made.model).__name__:
        side = made._number(_IMAGE_SIZE, "image_size") if "Learned" in type(made.model).__name__ else _IMAGE_SIZE
        return {"inputs": noise(BATCH, 3, side, side, dtype=made.dtype)}
    if "MaskedLM" in type(made.model).__name__ or "Sequence" in type(made.model).__name__:
        return {"inputs": torch.zeros(BATCH, made._number(LENGTH, "max_position_embeddings"), dtype=torch.long)}
    return {"inputs": noise(BATCH, LENGTH, made._number(64, "d_model"), dtype=made.dtype)}


_MAKERS: dict[str, Callable[[NamedInputs], Named]] = {
    "flattened_patches": _flat_patches,
    "inputs": _perceived,
    "past_values": _series,
    "states": _states,
    "latents": lambda made: {"latents": noise(BATCH, made._number(32, "hidden_size"), LENGTH, dtype=made.dtype)},
    "inputs_embeds": lambda made: {"inputs_embeds": _embedded(made)},
    "query_embeds": lambda made: {"query_embeds": _embedded(made)},
    "qformer_input_ids": lambda made: {"qformer_input_ids": torch.ones(BATCH, LENGTH, dtype=torch.long)},
    "bool_masked_pos": lambda made: {"bool_masked_pos": _hidden_patches(made)},
    "prompt_pixel_values": lambda made: {"prompt_pixel_values": made._pixels("pixel_values")[0]["pixel_values"]},
    "prompt_masks": lambda made: {"prompt_masks": made._pixels("pixel_values")[0]["pixel_values"]},
    "task_inputs": lambda made: {"task_inputs": torch.ones(BATCH, made._number(77, "task_seq_len"), dtype=torch.long)},
}
"""Inputs by their names, beside texts, images and sounds."""


def _hidden_patches(made: NamedInputs) -> Tensor:
    """Returns the same half of the patches of each video as hidden."""
    side = (made._number(_IMAGE_SIZE, "image_size") // made._number(16, "patch_size")) ** 2
    count = side * made._number(_FRAMES, "num_frames") // made._number(2, "tubelet_size")
    return (torch.arange(count) % 2 == 0).expand(BATCH, count).contiguous()


def _embedded(made: NamedInputs) -> Tensor:
    return noise(BATCH, LENGTH, made._number(32, "hidden_size", "d_model"), dtype=made.dtype)
