"""Plain modules, and what holds for every folder: written as a whole, read with care."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from solver_plugins import convert_model, load, save
from solver_plugins.integrations import LoadingError, SavingError, folder


def build() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(64, 5)
    )
    return model.eval()


X = torch.randn(2, 3, 6, 6)


def make() -> nn.Module:
    return convert_model(build(), "fista", iters=3, pattern="all", example_inputs=X)


def test_round_trip(tmp_path):
    model = make()
    save(model, tmp_path / "deep" / "saved")
    files = ["LOAD_WITH_solver_plugins.txt", "README.md", "model.safetensors", "solver_plugins.json"]
    assert sorted(os.listdir(tmp_path / "deep" / "saved")) == files
    given = build()
    again = load(tmp_path / "deep" / "saved", model=given)
    assert again is given
    assert torch.equal(again(X), model(X))
    with pytest.raises(LoadingError, match=r"weights of torch.nn.modules.container.Sequential.*model="):
        load(tmp_path / "deep" / "saved")


def test_tied_and_strided_weights(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
        model[2].weight = model[0].weight
        return model.eval()

    model = tied()
    model[0].bias = nn.Parameter(torch.randn(8)[::2])
    x = torch.randn(2, 4)
    convert_model(model, "proxgd", iters=2, targets=["3"], example_inputs=x)
    save(model, tmp_path / "saved")
    again = load(tmp_path / "saved", model=tied())
    assert again[2].weight is again[0].weight
    assert torch.equal(again(x), model(x))


def test_an_existing_folder(tmp_path):
    place = tmp_path / "saved"
    place.mkdir()
    save(make(), place)  # an empty folder is fine
    with pytest.raises(SavingError, match="not empty; pass overwrite=True"):
        save(make(), place)
    model = make()
    save(model, place, overwrite=True)
    assert torch.equal(load(place, model=build())(X), model(X))
    (place / "notes.txt").write_text("mine")
    with pytest.raises(SavingError, match=r"also holds notes.txt"):
        save(make(), place, overwrite=True)
    with pytest.raises(SavingError, match="something else"):
        save(make(), place / "notes.txt", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["saved"]


@pytest.mark.parametrize("step", ["save_weights", "_write_json"])
def test_an_error_while_saving_keeps_the_old_model(step, tmp_path, monkeypatch):
    model = make()
    save(model, tmp_path / "saved")
    monkeypatch.setattr(f"solver_plugins.integrations.saving.{step}", _no_space)
    with pytest.raises(OSError, match="no space"):
        save(make(), tmp_path / "saved", overwrite=True)
    assert os.listdir(tmp_path) == ["saved"]
    assert torch.equal(load(tmp_path / "saved", model=build())(X), model(X))


def test_an_error_between_the_renames_keeps_the_old_model(tmp_path, monkeypatch):
    model = make()
    save(model, tmp_path / "saved")
    calls = []
    rename = os.replace

    def second_fails(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no space")
        rename(source, target)

    monkeypatch.setattr(folder.os, "replace", second_fails)
    with pytest.raises(OSError, match="no space"):
        save(make(), tmp_path / "saved", overwrite=True)
    assert len(calls) == 3
    assert os.listdir(tmp_path) == ["saved"]
    assert torch.equal(load(tmp_path / "saved", model=build())(X), model(X))


def test_a_killed_process_keeps_the_old_model(tmp_path):
    model = make()
    save(model, tmp_path / "saved")
    code = f"""
import os, solver_plugins.integrations.saving as saving
from tests.integrations.test_saving import make
saving.save_weights = lambda model, folder: os._exit(9)
saving.save(make(), {str(tmp_path / "saved")!r}, overwrite=True)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert torch.equal(load(tmp_path / "saved", model=build())(X), model(X))


def _no_space(*arguments):
    raise OSError("no space")


def test_a_given_model_is_as_it_was_after_an_error(tmp_path):
    save(make(), tmp_path / "saved")
    given = build().double().train()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    file = tmp_path / "saved" / "solver_plugins.json"
    data = json.loads(file.read_text())
    data["conversion"]["blocks"][0]["layer"] = "nowhere"
    file.write_text(json.dumps(data))
    with pytest.raises(LoadingError, match="nowhere"):
        load(tmp_path / "saved", model=given)
    assert given.training and all(module.training for module in given.modules())
    after = given.state_dict()
    assert all(torch.equal(value, after[name]) and value.dtype == after[name].dtype for name, value in before.items())


def test_bad_folders(tmp_path):
    with pytest.raises(LoadingError, match="there is none at"):
        load(tmp_path / "nothing")
    (tmp_path / ".nothing.old-x").mkdir()
    with pytest.raises(LoadingError, match=r"interrupted.*\.nothing\.old-x"):
        load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadingError, match=r"neither config.json nor solver_plugins.json"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(LoadingError, match="Cannot read"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(LoadingError, match="neither one of timm nor one of transformers"):
        load(tmp_path / "empty")
    save(make(), tmp_path / "saved")
    with pytest.raises(LoadingError, match=r"has other shapes: 0.weight is \(4, 3, 3, 3\) in the file"):
        load(tmp_path / "saved", model=nn.Sequential(nn.Conv2d(3, 4, 5), *build()[1:]))
    with pytest.raises(LoadingError, match=r"lacks 6.weight"):
        load(tmp_path / "saved", model=nn.Sequential(*build(), nn.Linear(5, 5)))
    (tmp_path / "saved" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(LoadingError, match=r"Cannot read model.safetensors"):
        load(tmp_path / "saved", model=build())


def test_wrapped_models(tmp_path):
    with pytest.raises(SavingError, match=r"save model\._orig_mod"):
        save(torch.compile(make()), tmp_path / "saved")
    with pytest.raises(SavingError, match=r"save model\.module"):
        save(nn.DataParallel(make()), tmp_path / "saved")
    with pytest.raises(SavingError, match=r"Expected a torch.nn.Module"):
        save({}, tmp_path / "saved")
    with pytest.raises(SavingError, match="model_args are for timm"):
        save(make(), tmp_path / "saved", model_args={})
    with pytest.raises(SavingError, match="meta device"):
        save(make().to("meta"), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_place_where_no_folder_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "saved", "/proc/saved"):
        with pytest.raises(SavingError, match=f"Cannot save to '{place}': no folder can be made in") as caught:
            save(make(), place)
        assert ".new-" not in str(caught.value)
