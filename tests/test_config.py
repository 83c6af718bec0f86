"""Strict configs: what is refused, what the refusal says, and what survives a file."""

import copy
import enum
import math
import pickle
from collections.abc import Mapping
from typing import ClassVar, Literal

import hypothesis
import numpy as np
import pydantic
import pytest
import yaml
from hypothesis import strategies as st

from solver_plugins.config import StrictConfig
from solver_plugins.errors import OptionError


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Inner(StrictConfig):
    depth: int = 1
    scale: float = 1.0


class Sample(StrictConfig):
    hints: ClassVar[Mapping[str, str]] = {"dropout": "Set the rate of the layer instead."}

    iters: int = pydantic.Field(10, ge=1, description="How many steps are taken.")
    rate: float = pydantic.Field(0.5, ge=0, lt=1)
    exact: bool = False
    label: str = ""
    mode: Mode = Mode.FAST
    rule: Literal["constant", "exp"] = "constant"
    step: float | Literal["auto"] = "auto"
    limit: int | None = None
    sizes: tuple[int, ...] = ()
    weights: dict[str, float] = pydantic.Field(default_factory=dict)
    inner: Inner = Inner()
    inners: list[Inner] = pydantic.Field(default_factory=list)

    @pydantic.field_validator("sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if list(sizes) != sorted(sizes):
            raise ValueError("sizes have to ascend")
        return sizes

    @pydantic.model_validator(mode="after")
    def _exact_needs_limit(self) -> "Sample":
        if self.exact and self.limit == 0:
            raise ValueError("exact=True needs a limit; found limit=0.")
        return self


class Required(StrictConfig):
    size: int = pydantic.Field(description="How large it is.")


def message(options, model=Sample, **kwargs) -> str:
    with pytest.raises(OptionError) as caught:
        model.parse(options, **kwargs)
    return str(caught.value)


# Unknown options


def test_unknown_option_names_the_nearest():
    text = message({"itres": 3}, owner="solver 'x'")
    assert text.startswith("solver 'x' has no option 'itres'. Did you mean 'iters'")
    assert "Options: exact, inner, inners, iters, label, limit, mode, rate, rule, sizes, step, weights." in text


def test_all_unknown_options_are_named():
    text = message({"itres": 3, "lable": "x"})
    assert "Sample has no option 'itres'" in text
    assert "Sample has no option 'lable'" in text


def test_unknown_nested_option_names_the_nearest_of_its_own_model():
    text = message({"inner": {"deepth": 3}})
    assert text == "Sample has no option 'inner.deepth'. Did you mean 'depth'? Options: depth, scale."
    assert "'inners.1.deepth'. Did you mean 'depth'?" in message({"inners": [{}, {"deepth": 3}]})


def test_unknown_option_with_a_hint():
    assert "no option 'dropout'. Set the rate of the layer instead." in message({"dropout": 0.5})


@pytest.mark.parametrize("options", [None, [], "iters", 3])
def test_options_have_to_be_a_mapping(options):
    assert message(options) == f"Sample takes a mapping of options; found {type(options).__name__}."


def test_key_that_is_no_string():
    assert "has no option '1'" in message({1: 2})


# Values


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"iters": "ten"},
            "option 'iters': expected a valid integer, unable to parse string as an integer, found 'ten'",
        ),
        ({"iters": "10"}, "option 'iters': expected an integer, found '10' (str). How many steps are taken."),
        ({"iters": 10.0}, "option 'iters': expected an integer, found 10.0 (float)"),
        ({"iters": True}, "option 'iters': expected an integer, found True (bool)"),
        ({"iters": 0}, "option 'iters': expected a value greater than or equal to 1, found 0 (int)"),
        ({"rate": "0.5"}, "option 'rate': expected a number, found '0.5' (str)"),
        ({"inner": {"scale": True}}, "option 'inner.scale': expected a number, found True (bool)"),
        ({"rate": 1.0}, "option 'rate': expected a value less than 1, found 1.0 (float)"),
        ({"rate": math.nan}, "option 'rate': expected a finite number, found nan (float)"),
        ({"rate": math.inf}, "option 'rate': expected a finite number, found inf (float)"),
        ({"exact": 1}, "option 'exact': expected True or False, found 1 (int)"),
        ({"exact": "yes"}, "option 'exact': expected True or False, found 'yes' (str)"),
        ({"label": b"x"}, "option 'label': expected a string, found b'x' (bytes)"),
        ({"rule": "exq"}, "option 'rule': expected 'constant' or 'exp', found 'exq' (str)"),
        ({"mode": "medium"}, "option 'mode': expected 'fast' or 'slow', found 'medium' (str)"),
        ({"step": "never"}, "option 'step': expected a valid number"),
        ({"step": "never"}, " or 'auto', found 'never' (str)"),
        ({"step": "0.5"}, "option 'step': expected a number, found '0.5' (str)"),
        ({"limit": "3"}, "option 'limit': expected an integer, found '3' (str)"),
        ({"sizes": ["1"]}, "option 'sizes': expected an integer in each place, found ['1'] (list)"),
        ({"sizes": [1, "x"]}, "option 'sizes.1': expected a valid integer"),
        ({"sizes": [2, 1]}, "option 'sizes': sizes have to ascend; found [2, 1] (list)"),
        ({"weights": {"a": "1"}}, "option 'weights': expected a number in each place"),
        ({"weights": {"a": math.nan}}, "option 'weights': expected a finite number, found nan"),
        ({"inner": {"depth": "2"}}, "option 'inner.depth': expected an integer, found '2' (str)"),
        ({"exact": True, "limit": 0}, "Sample: exact=True needs a limit; found limit=0."),
    ],
)
def test_wrong_value_says_what_was_expected_and_found(options, expected):
    assert expected in message(options)


def test_every_wrong_option_has_its_line():
    lines = message({"iters": 0, "rate": 2.0, "step": "never"}).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "Sample, option 'iters'",
        "Sample, option 'rate'",
        "Sample, option 'step'",
    ]


def test_missing_option():
    assert message({}, Required) == "Required, option 'size' is required. How large it is."


def test_long_values_are_cut_short():
    assert len(message({"rule": "x" * 10_000})) < 300
    assert len(message({"iters": [[0] * 1000] * 1000})) < 300


def test_pydantic_noise_stays_out():
    text = message({"iters": "ten"})
    assert "pydantic" not in text
    assert "http" not in text
    with pytest.raises(OptionError) as caught:
        Sample.parse({"iters": "ten"})
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"rate": 0}, "rate", 0.0),
        ({"rate": np.float32(0.25)}, "rate", 0.25),
        ({"iters": np.int64(3)}, "iters", 3),
        ({"sizes": [1, 2]}, "sizes", (1, 2)),
        ({"mode": "slow"}, "mode", Mode.SLOW),
        ({"step": 2}, "step", 2),
        ({"inner": {"depth": 3}}, "inner", Inner(depth=3)),
        ({"inner": Inner(depth=3)}, "inner", Inner(depth=3)),
        ({"limit": None}, "limit", None),
    ],
)
def test_harmless_conversions_are_made(options, field, value):
    config = Sample.parse(options)
    assert getattr(config, field) == value


def test_the_constructor_is_as_strict():
    for options in ({"iters": "10"}, {"itres": 10}, {"rate": math.nan}):
        with pytest.raises(pydantic.ValidationError):
            Sample(**options)


def test_frozen():
    config = Sample()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.iters = 3  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        del config.iters
    assert config == Sample()


def test_copies_are_equal():
    config = Sample(iters=3, inner=Inner(depth=2))
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_parse_leaves_its_argument_alone():
    options = {"iters": 3, "inner": {"depth": 2}}
    Sample.parse(options)
    assert options == {"iters": 3, "inner": {"depth": 2}}


# Files

finite = st.floats(allow_nan=False, allow_infinity=False)
configs = st.builds(
    Sample,
    iters=st.integers(min_value=1),
    rate=st.floats(0, 1, exclude_max=True),
    exact=st.booleans(),
    label=st.text() | st.from_regex(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", fullmatch=True),
    mode=st.sampled_from(Mode),
    rule=st.sampled_from(["constant", "exp"]),
    step=finite | st.just("auto"),
    limit=st.none() | st.integers(min_value=1),
    sizes=st.lists(st.integers()).map(lambda sizes: tuple(sorted(sizes))),
    weights=st.dictionaries(st.text(), finite),
    inner=st.builds(Inner, depth=st.integers(), scale=finite),
    inners=st.lists(st.builds(Inner, depth=st.integers(), scale=finite), max_size=2),
)


@hypothesis.given(config=configs)
def test_round_trips(config):
    assert Sample.from_json(config.to_json()) == config
    assert Sample.from_yaml(config.to_yaml()) == config
    assert Sample.parse(config.options()) == config


def test_json_is_yaml_too():
    config = Sample(rate=1e-7, sizes=(1, 2))
    assert Sample.from_yaml(config.to_json()) == config


@pytest.mark.parametrize(("number", "value"), [("1e-3", 1e-3), ("1E-3", 1e-3), ("1.e-3", 1e-3), (".1e-2", 1e-3)])
def test_yaml_numbers_need_no_dot(number, value):
    assert Sample.from_yaml(f"rate: {number}").rate == value
    assert Sample.from_yaml(f"label: '{number}'").label == number


def test_yaml_merges_may_be_overridden():
    text = "inner: &base {depth: 2, scale: 3.0}\ninners: [{<<: *base, depth: 4}]"
    assert Sample.from_yaml(text).inners == [Inner(depth=4, scale=3.0)]


@pytest.mark.parametrize("text", ["", "# nothing", "{}", "---"])
def test_empty_yaml_takes_the_defaults(text):
    assert Sample.from_yaml(text) == Sample()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "takes a mapping of options; found list"),
        ("0", "takes a mapping of options; found int"),
        ("false", "takes a mapping of options; found bool"),
        ("iters: [", "not valid YAML"),
        ("iters: 3\niters: 4", "the key 'iters' is given twice"),
        ("inner: {depth: 3, depth: 4}", "the key 'depth' is given twice"),
        ("iters: 2001-99-99", "not valid YAML"),
        ("iters: 1\n---\niters: 2", "not valid YAML"),
        ("rate: .nan", "option 'rate': expected a finite number"),
        ("rate: -.inf", "option 'rate': expected a finite number"),
        ("rate: 'a'", "option 'rate': expected a valid number"),
        ("exact: 1", "option 'exact': expected True or False"),
    ],
)
def test_bad_yaml(text, expected):
    with pytest.raises(OptionError) as caught:
        Sample.from_yaml(text)
    assert str(caught.value).startswith("Sample")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {path}']",
        "!!python/object/new:os.system ['touch {path}']",
        "!!python/name:os.system ''",
        "!!python/module:os ''",
        "!!python/tuple [1, 2]",
    ],
)
def test_yaml_refuses_python_tags(tag, tmp_path):
    marker = tmp_path / "marker"
    with pytest.raises(OptionError, match="not valid YAML"):
        Sample.from_yaml("label: " + tag.format(path=marker))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("null", "takes a mapping of options; found NoneType"),
        ("[1]", "takes a mapping of options; found list"),
        ('{"rate": NaN}', "NaN is not a JSON value"),
        ('{"rate": -Infinity}', "-Infinity is not a JSON value"),
        ('{"rate": 1e999}', "option 'rate': expected a finite number"),
        ('{"iters": 1, "iters": 2}', "the key 'iters' is given twice"),
        ('{"inner": {"depth": 1, "depth": 2}}', "the key 'depth' is given twice"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_json(text, expected):
    with pytest.raises(OptionError) as caught:
        Sample.from_json(text)
    assert str(caught.value).startswith("Sample")
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", ["c.json", "c.yaml", "c.yml", "C.YAML"])
def test_files(name, tmp_path):
    config = Sample(iters=3, label="ü")
    path = tmp_path / name
    path.write_text(config.to_json() if name.endswith("json") else config.to_yaml(), encoding="utf-8")
    assert Sample.from_file(path) == config
    assert Sample.from_file(str(path)) == config


def test_bad_files(tmp_path):
    for name, content, expected in [
        ("c.toml", b"", "Expected a file ending in .json, .yaml, .yml; found 'c.toml'."),
        ("c.yaml", b"itres: 3", "Sample in 'c.yaml' has no option 'itres'"),
        ("c.json", b"{", "Sample in 'c.json': not valid JSON"),
        ("d.yaml", b"label: \xff", "Cannot read 'd.yaml': expected UTF-8 text"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OptionError) as caught:
            Sample.from_file(tmp_path / name)
        assert expected in str(caught.value)
    with pytest.raises(OptionError, match=r"Cannot read 'none.yaml': No such file"):
        Sample.from_file(tmp_path / "none.yaml")
    with pytest.raises(OptionError, match=r"Cannot read 'folder.yaml': Is a directory"):
        (tmp_path / "folder.yaml").mkdir()
        Sample.from_file(tmp_path / "folder.yaml")


def test_the_dumper_leaves_pyyaml_alone():
    assert yaml.safe_load("x: 1e-3") == {"x": "1e-3"}
