"""The registry: names, misses, filters, and solvers that other distributions bring."""

import sys
import textwrap
import warnings

import pytest

from solver_plugins.errors import DuplicateNameError, PluginWarning, RegistrationError, UnknownNameError
from solver_plugins.registry import SOLVERS, Registry, register_solver


class Base:
    """A base that is described."""


class Alpha(Base):
    """The first letter.

    And more about it.
    """


class Beta(Base):
    pass


@pytest.fixture
def letters() -> Registry[type]:
    registry: Registry[type] = Registry("letter")
    registry.register("alpha", Alpha, tags=("greek", "vowel"))
    registry.register("beta", Beta, tags=["greek"])
    registry.register("aleph", Base, description="Another first letter.", tags={"hebrew"})
    return registry


# Names


def test_register_returns_its_target():
    assert Registry("letter").register("alpha", Alpha) is Alpha


def test_info(letters):
    entry = letters.info("alpha")
    assert (entry.name, entry.target, entry.tags) == ("alpha", Alpha, frozenset({"greek", "vowel"}))
    assert entry.source == __name__
    assert letters.get("alpha") is Alpha
    with pytest.raises(AttributeError):
        entry.name = "omega"


def test_descriptions(letters):
    assert letters.info("alpha").description == "The first letter."
    assert letters.info("aleph").description == "Another first letter."
    # Beta has no docstring, and that of its base is not about it.
    assert letters.info("beta").description == ""


def test_description_of_a_docstring_that_starts_on_its_second_line():
    def gamma():
        """
        The third letter.
        """

    registry = Registry("letter")
    registry.register("gamma", gamma)
    assert registry.info("gamma").description == "The third letter."


def test_duplicate_raises_and_names_both(letters):
    with pytest.raises(DuplicateNameError, match=f"letter 'alpha' is registered already, by {__name__}") as caught:
        letters.register("alpha", Beta)
    assert "another name" in str(caught.value)
    assert letters.get("alpha") is Alpha


def test_the_same_object_twice_is_fine(letters):
    assert letters.register("alpha", Alpha) is Alpha
    assert letters.info("alpha").tags == {"greek", "vowel"}
    assert len(letters.names()) == 3


def test_one_object_may_have_two_names(letters):
    letters.register("alfa", Alpha)
    assert letters.get("alfa") is letters.get("alpha")


@pytest.mark.parametrize("name", ["", None, 3, ("a",)])
def test_name_has_to_be_a_string(letters, name):
    with pytest.raises(RegistrationError, match="name of a letter has to be a string"):
        letters.register(name, Beta)


def test_tags_have_to_be_several(letters):
    with pytest.raises(RegistrationError, match="'gamma': tags have to be a list of strings; found 'greek'"):
        letters.register("gamma", Beta, tags="greek")
    assert "gamma" not in letters


def test_miss_lists_near_names_and_all_options(letters):
    with pytest.raises(UnknownNameError) as caught:
        letters.get("alpah")
    assert str(caught.value).startswith("Unknown letter 'alpah'. Did you mean 'alpha'")
    assert str(caught.value).endswith("Options: aleph, alpha, beta.")
    with pytest.raises(LookupError):
        letters.info("zzz")


@pytest.mark.parametrize("name", [None, 3, ["alpha"], {}])
def test_miss_of_something_that_is_no_name(letters, name):
    assert name not in letters
    with pytest.raises(UnknownNameError, match="Unknown letter"):
        letters.get(name)


def test_contains(letters):
    assert "alpha" in letters
    assert "omega" not in letters


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, ["aleph", "alpha", "beta"]),
        ("al*", ["aleph", "alpha"]),
        ("alpha", ["alpha"]),
        ("?eta", ["beta"]),
        ("greek", ["alpha", "beta"]),
        (["hebrew", "b*"], ["aleph", "beta"]),
        (("vowel", "greek", "al*"), ["aleph", "alpha", "beta"]),
        ("AL*", []),
        ("gree*", []),
        ([], []),
        ("", []),
    ],
)
def test_filters(letters, pattern, expected):
    assert letters.names(pattern) == expected


def test_registries_do_not_share(letters):
    assert Registry("letter").names() == []


def test_check_is_called_before_anything_is_registered():
    seen = []

    def check(name, target):
        seen.append((name, target))
        if target is Beta:
            raise RegistrationError("not a vowel")

    registry = Registry("vowel", check=check)
    registry.register("alpha", Alpha)
    with pytest.raises(RegistrationError, match="not a vowel"):
        registry.register("beta", Beta)
    assert seen == [("alpha", Alpha), ("beta", Beta)]
    assert registry.names() == ["alpha"]


# Solvers


def test_register_solver_says_what_is_missing():
    class Nameless:
        Config = dict

    with pytest.raises(RegistrationError, match="Nameless has no 'name' and no 'tags'"):
        register_solver(Nameless)


def test_solvers_are_registered_under_their_own_name():
    class Named:
        name, Config, tags = "test_named", dict, ()

    with pytest.raises(RegistrationError, match=r"Named\.name is 'test_named', but .* as 'test_other'"):
        SOLVERS.register("test_other", Named)
    with pytest.raises(RegistrationError, match="is not a class"):
        SOLVERS.register("test_named", Named())
    assert "test_named" not in SOLVERS


# Entry points, read from metadata that lies on the path


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Puts modules and the metadata of a distribution on the path; returns the group of its entry points."""
    group = "solver_plugins.tests"
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name: str, entry_points: str, **modules: str) -> str:
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{textwrap.dedent(entry_points)}")
        return group

    yield write
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]


def test_entry_points_wait_for_the_first_look_up(distribution):
    group = distribution("plug", "one = plug_lazy:One", plug_lazy="class One:\n    '''The one.'''")
    registry = Registry("number", entry_point_group=group)
    registry.register("two", Alpha)
    assert "plug_lazy" not in sys.modules
    assert registry.names() == ["one", "two"]
    assert "plug_lazy" in sys.modules
    assert registry.info("one").source == "plug_lazy"
    assert registry.info("one").description == "The one."


@pytest.mark.parametrize("look_up", [lambda r: "one" in r, lambda r: r.get("one"), lambda r: r.info("one")])
def test_every_look_up_discovers(distribution, look_up):
    group = distribution("plug", "one = plug_each:One", plug_each="class One: tags = ['odd']")
    assert look_up(Registry("number", entry_point_group=group))


def test_tags_come_from_the_object(distribution):
    group = distribution("plug", "one = plug_tags:One", plug_tags="class One: tags = ['odd']")
    assert Registry("number", entry_point_group=group).names("odd") == ["one"]


BROKEN = {
    "ImportError": "import no_such_module_anywhere",
    "SyntaxError": "def (",
    "RuntimeError": "raise RuntimeError('no GPU')",
    "AttributeError": "",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_reported_and_harms_no_other(distribution, kind):
    distribution("bad", "bad = plug_bad:Bad", plug_bad=BROKEN[kind])
    group = distribution("good", "good = plug_good:Good", plug_good="class Good: pass")
    registry = Registry("number", entry_point_group=group)
    with pytest.warns(PluginWarning, match=r"number plugin 'bad' of 'bad' could not be loaded") as caught:
        assert registry.names() == ["good"]
    assert len(caught) == 1
    with pytest.raises(UnknownNameError, match=r"'bad'\. A plugin offers it but failed to load: "):
        registry.get("bad")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "bad" not in registry
        assert registry.names() == ["good"]


def test_a_broken_plugin_harms_no_other_where_warnings_are_errors(distribution):
    distribution("bad", "a_bad = plug_strict_bad:Bad", plug_strict_bad="1 / 0")
    group = distribution("good", "good = plug_strict_good:Good", plug_strict_good="class Good: pass")
    registry = Registry("number", entry_point_group=group)
    with pytest.raises(PluginWarning, match="a_bad"):
        registry.names()
    assert registry.names() == ["good"]


def test_of_two_plugins_with_one_name_the_first_by_distribution_stays(distribution):
    distribution("zeta", "same = plug_zeta:Same", plug_zeta="class Same: pass")
    group = distribution("eta", "same = plug_eta:Same", plug_eta="class Same: pass")
    registry = Registry("number", entry_point_group=group)
    with pytest.warns(PluginWarning, match="'same' of 'zeta' could not be loaded.*DuplicateNameError.*plug_eta"):
        assert registry.info("same").source == "plug_eta"


def test_a_plugin_does_not_displace_what_is_there(distribution):
    group = distribution("plug", "alpha = plug_alpha:Alpha", plug_alpha="class Alpha: pass")
    registry = Registry("letter", entry_point_group=group)
    registry.register("alpha", Alpha)
    with pytest.warns(PluginWarning, match="'alpha' of 'plug'.*DuplicateNameError: letter 'alpha' is registered"):
        assert registry.get("alpha") is Alpha


def test_check_applies_to_plugins(distribution):
    group = distribution("plug", "one = plug_check:One", plug_check="class One: pass")

    def check(name, target):
        raise RegistrationError(f"{name} is not what it seems")

    registry = Registry("number", entry_point_group=group, check=check)
    with pytest.warns(PluginWarning, match="RegistrationError: one is not what it seems"):
        assert registry.names() == []


# A module as an entry point registers its objects itself. It finds the registry in a module of its own name.
SELF_REGISTERING = """
    from test_registry_host import REGISTRY

    class One:
        pass

    REGISTRY.register("one", One)
"""


@pytest.fixture
def host(distribution, monkeypatch):
    """Makes a registry that plugin modules can import."""

    def make(group: str) -> Registry[type]:
        module = type(sys)("test_registry_host")
        module.REGISTRY = Registry("number", entry_point_group=group)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module.REGISTRY

    return make


def test_a_module_registers_itself(distribution, host):
    registry = host(distribution("plug", "anything = plug_module", plug_module=SELF_REGISTERING))
    assert registry.names() == ["one"]


def test_an_object_that_registered_itself_is_fine(distribution, host):
    registry = host(distribution("plug", "one = plug_self:One", plug_self=SELF_REGISTERING))
    assert registry.names() == ["one"]


def test_a_module_that_registers_nothing_is_reported(distribution, host):
    registry = host(distribution("plug", "one = plug_nothing", plug_nothing=""))
    with pytest.warns(PluginWarning, match="'plug_nothing' registers no number"):
        assert registry.names() == []


def test_half_a_plugin_is_left_out(distribution, host):
    source = textwrap.dedent(SELF_REGISTERING) + "\nraise RuntimeError('too late')\n"
    registry = host(distribution("plug", "one = plug_half", plug_half=source))
    with pytest.warns(PluginWarning, match="too late"):
        assert registry.names() == []


def test_a_plugin_may_look_things_up_while_it_is_imported(distribution, host):
    source = textwrap.dedent(SELF_REGISTERING) + "\nassert REGISTRY.names() == ['alpha', 'one']\n"
    registry = host(distribution("plug", "one = plug_nosy:One", plug_nosy=source))
    registry.register("alpha", Alpha)
    assert registry.names() == ["alpha", "one"]
