"""Small configs of transformers' models: a default config, with every size in it and in its sub-configs made small.

Sizes are told by their names. A config that no longer fits together is repaired by trial: one size after the other gets
its default back, on the meta device, until the model is built.
"""

import copy
import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from transformers import PretrainedConfig

T = TypeVar("T")
WIDTH, HEADS, VOCABULARY = 32, 4, 128
_TOKEN = re.compile(r"token_(id|index)|_(bos|eos|start|end|newline)_id$|(unk|mask)_index$|_pad_id$|im_.*_id$")
_KEEP = re.compile(
    r"kernel|stride|dilation|padding|ratio|window_(size|attention)|scale|factor|temperature|_dropout|cost|loss|period|"
    r"codebook_dim|channel_multiplier|^num_channels|^in_chan|^input_channels|_every|theta|pattern|groups?$|"
    r"downsampl|upsampl_rat|coordinate|_rate|merge_size|_norm|max_depth|min_depth|semantic_loss|type_vocab|"
    r"^langs|^languages|state_size_|conv_L|spec_size|temporal_patch|num_labels|_probs?$|^num_stages|feature_levels|_indices|_indexes"
)
_RULES: tuple[tuple[str, int], ...] = (
    (r"(^|_)layers?$|_layers_|^depth$|_depth$|num_blocks|num_hidden_layers|encoder_blocks$|window_layers", 2),
    (r"first_k_dense", 1),
    (r"experts_per_tok|_topk$|top_k|moe_k$", 2),
    (r"num_.*experts|n_.*experts|experts$|num_multimask|num_adapter_layers", 4),
    (r"(key_value|kv)_heads|key_value_heads", 2),
    (r"heads?$", HEADS),
    (r"vocab|codebook_size|num_codevectors|num_res_types", VOCABULARY),
    (r"num_pos_feats$", WIDTH // 2),
    (r"head_dim|d_kv$|dim_head$|head_size$|d_head$|rotary_dim|rope_head_dim", 8),
    (r"lora_rank|_rank$|embedding_size$|d_state$|state_size$|ssm_state", 16),
    (r"position_embeddings$|n_positions|max_.*positions$|n_ctx|context_length|max_seq_len|max_length|_len$", 64),
    (r"_length$", 8),
    (r"(image|crop|img|pretrain_image|input)_size$", 32),
    (r"^patch_size$", 8),
    (r"queries$|num_latents|query_tokens|num_query|num_denoising|num_proposals|num_points$", 8),
    (r"chunk_size|chunk_length|sliding_window$", 8),
    (r"intermediate|ffn|d_ff$|dff$|dim_ff|d_inner|n_inner|mlp_(dim|hidden)|feedforward_(dim|size|hidden)|_units$", 64),
    (r"hidden|d_model|n_embd|dim$|dims$|_size$|width|channels?$|feat|filters|planes|latents$|(^|_)units$|embed", WIDTH),
)
"""Small values of sizes, the first rule that finds its words in a name decides; what is smaller keeps its value."""
_CHOSEN = {"_out_features": "out_features", "model_args": "model_args"}
"""Where a backbone's config keeps what the config around it chooses, and how that is set."""
PATIENCE = 6.0
"""Seconds of the processor after which no further repair is tried."""
_OTHER = re.compile(
    "ImportError|ModuleNotFoundError|"
    "missing .* required|million parameters|has to be provided|have to specify|must be (given|provided)|"
    "input_ids|"
    "'NoneType' object has no attribute '(shape|size|sum|transpose|to|device|ndim|dim)'"
)
"""Errors that no other size helps against."""
_COMPILED = [(re.compile(words), value) for words, value in _RULES]


def small_value(name: str, value: Any) -> Any:
    """Returns a small value of a setting, or the value itself."""
    if isinstance(value, bool) or _KEEP.search(name):
        return value
    if isinstance(value, int) and value >= 0:
        small = next((small for words, small in _COMPILED if words.search(name)), value)
        return _heads(value) if small == HEADS else min(value, small)
    if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
        # As JSON has them: to some lists others are added.
        return _small_list(name, value)
    return value


def _small_list(name: str, value: Sequence[int]) -> list[int]:
    """Returns the sizes of stages: layers and heads each made small, widths in their old proportion."""
    small = next((small for words, small in _COMPILED if words.search(name)), None)
    if re.search(r"^depths?$|_depths$|num_blocks|numb_of_layers|block_repeats|^layers$|block_sizes", name):
        return [min(item, 1) for item in value]
    if small is None:
        return list(value)
    if small == HEADS:
        return [_heads(item) for item in value]
    if small == 2 or re.search(r"image_size|patch_size|resolution", name):
        return [min(item, small) for item in value]
    scale = max(1, min(value) // 16)
    return [max(8, item // scale // 8 * 8) for item in value]


def _heads(count: int) -> int:
    """Returns how many heads: few, and a number that divides every width."""
    return next(power for power in (HEADS, 2, 1, 0) if power <= count)


class Small:
    """A default config and small values of its settings.

    Args:
        config: The default config.
        overrides: Settings that must have another value, by the model type of the config that they belong to.
    """

    def __init__(self, config: PretrainedConfig, overrides: Mapping[str, Mapping[str, Any]] | None = None):
        self.config = config
        self.tokens: dict[int, int] = {}
        self.values: dict[str, Any] = {}
        self.missing: dict[str, Any] = {}
        self.sections: dict[str, Any] = {}
        for path, name, value in _settings(config):
            if value is None and re.match("(image|video|audio)_token", name):
                self.values[path] = self._token(1 << 20)
            elif value is None:
                self.missing[path] = small_value(name, 1 << 20)
            elif name == "rope_parameters" and isinstance(value, dict):
                # Positions of several axes share the numbers of a head.
                self.sections[path] = {**value, "mrope_section": [2, 1, 1]}
            else:
                made = self._token(value) if _TOKEN.search(name) else small_value(name, value)
                if made != value:
                    self.values[path] = made
        self.missing = {path: value for path, value in self.missing.items() if value != 1 << 20}
        for prefix, part in reversed(list(_parts(config))):
            chosen = {name: vars(part)[own] for own, name in _CHOSEN.items() if prefix and own in vars(part)}
            chosen |= (overrides or {}).get(part.model_type, {})
            self.values |= {prefix + name: value for name, value in chosen.items()}

    def _token(self, value: Any) -> Any:
        """Returns an id within the small vocabulary; equal ids stay equal, in all sub-configs."""
        if isinstance(value, list):
            return [self._token(item) for item in value]
        if isinstance(value, bool) or not isinstance(value, int) or value < VOCABULARY - 28:
            return value
        return self.tokens.setdefault(value, VOCABULARY - 1 - len(self.tokens) % 28)

    def repairs(self, error: str) -> Iterator[dict[str, Any]]:
        """Yields values of settings to try after an error with the small ones, the likeliest first."""
        if "split_sizes" in error or "section" in error:
            yield self.values | self.sections
        # Attention without groups has as many keys as queries.
        yield self.values | {path: HEADS for path in self.values if re.search("(key_value|kv)_heads", path)}
        # A setting without a default must be given; often the error names it.
        named = {path: value for path, value in self.missing.items() if path.rpartition(".")[2] in error}
        yield from (chosen | self.values for chosen in (named, self.missing) if chosen)
        # Settings of one name belong together: the towers of a model often share a width.
        names = dict.fromkeys(path.rpartition(".")[2] for path in self.values)
        groups = [[path for path in self.values if path.rpartition(".")[2] == name] for name in names]
        single = [[path] for path in self.values] if len(groups) < len(self.values) else []
        for group in (*groups, *single):
            yield {path: value for path, value in self.values.items() if path not in group}
        yield from ({path: value} | self.values for path, value in self.missing.items())

    def first(self, works: Callable[[PretrainedConfig], T]) -> T:
        """Returns what ``works`` makes of the first config for which it does not raise."""
        stop = time.process_time() + PATIENCE
        try:
            return works(_made(self.config, "", self.values))
        except Exception as error:
            first = error
        if about_sizes(first):
            for values in self.repairs(str(first)):
                try:
                    return works(_made(self.config, "", values))
                except Exception:
                    if time.process_time() > stop:
                        break
        raise first


def about_sizes(error: BaseException) -> bool:
    """Whether other sizes may help against an error."""
    return not _OTHER.search(f"{type(error).__name__}: {error}")


def _parts(config: PretrainedConfig, prefix: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """Yields a config and those inside it, each with the path in front of its settings."""
    yield prefix, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from _parts(value, f"{prefix}{name}.")


def _settings(config: PretrainedConfig) -> Iterator[tuple[str, str, Any]]:
    """Yields path, name and default of everything that a config and those inside it are made from."""
    for prefix, part in _parts(config):
        for name, parameter in inspect.signature(type(part).__init__).parameters.items():
            default = parameter.default
            # What a config works out by itself, from a default of None, it shall work out again.
            if default is None:
                found = vars(part).get(name)
                yield prefix + name, name, found if isinstance(found, dict) or _TOKEN.search(name) else None
            elif default is not inspect.Parameter.empty:
                yield prefix + name, name, vars(part).get(name, default)


def _made(config: PretrainedConfig, prefix: str, values: Mapping[str, Any]) -> PretrainedConfig:
    own = {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}
    given = {key: copy.deepcopy(value) for key, value in own.items() if "." not in key}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            given[name] = _made(value, f"{prefix}{name}.", values)
    return type(config)(**given)
