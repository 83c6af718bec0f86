"""The config of a run: strict, with changes from the command line."""

import pytest

from solver_plugins.errors import OptionError, UnknownNameError
from solver_plugins.train import FinetuneConfig, read_config
from tests.train.runs import options, tiny


def written(tmp_path, text="model: {spec: timm/test_vit}\nsolver: {name: proxsg}\noutput: there\n", name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_changes_reach_sections(tmp_path):
    path = written(tmp_path)
    found = read_config(
        path, ["optimizer.lr=1e-4", "solver.iters=4", "data.text=sentence", "ema.decay=0.5", "model.args.depth=2",
               "schedule=null", "data.train=train[:80%]"],
    )  # fmt: skip
    assert found.optimizer.lr == 1e-4 and found.solver.iters == 4 and found.data.text == "sentence"
    assert found.ema.decay == 0.5 and found.model.args == {"depth": 2} and found.schedule is None
    assert found.data.train == "train[:80%]"
    assert read_config(path, ["solver=null"]).solver is None


def test_ends_of_ranges_are_fine(tmp_path):
    changes = ["augmentation.scale=[0.08, 1]", "augmentation.ratio=[1, 1]", "data.std=[0.1]", "seed=4294901760"]
    found = read_config(written(tmp_path), changes)
    assert found.augmentation.scale == [0.08, 1] and found.augmentation.ratio == [1, 1] and found.seed == 4294901760


def test_written_config_reads_back(tmp_path):
    config = tiny(tmp_path, ema={"decay": 0.5}, refresh=3, trackers=["tensorboard"])
    assert FinetuneConfig.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optimizer.learning_rate=1"], "has no option 'optimizer.learning_rate'"),
        (["epoch=3"], "Did you mean 'epochs'"),
        (["solver.options.lam=0.1"], "under 'args'"),
        (["lr=3"], "part of 'optimizer'"),
        (["epochs=three"], "expected a valid integer"),
        (["epochs=0"], "greater than or equal to 1"),
        (["epochs"], "key=value"),
        (["output.there=1"], "is not a section"),
        (["refresh=0"], "'epoch' or at least one step"),
        (["schedule.warmup_epochs=10"], "below epochs"),
        (["data.text=a", "data.image=b"], "found both"),
        (["data.text=a", "mixup.mixup=0.1"], "is for images"),
        (["mixup.mixup=0.1", "batch_size=9"], "even batch_size"),
        (["calibrate.batches=2"], "has no option 'calibrate'. It is part of 'solver': solver.calibrate=4"),
        (["solver.calibrate=0"], "'solver.calibrate': expected a value greater than or equal to 1"),
        (["solver.lamb=0.1"], "has no option 'solver.lamb'. Did you mean 'lam'"),
        (["solver.args.target=fc"], "has no option 'solver.target'. Did you mean 'targets'"),
        (["solver.lam=-1"], "option 'solver.lam': expected a value greater than or equal to 0, found -1 (int)"),
        (["solver.lam=0.1", "solver.args.lam=0.2"], "option 'solver.lam' is given twice"),
        (["solver.pattern=linear-nrom-act"], "option 'solver.pattern': Unknown pattern 'linear-nrom-act'. Did you"),
        (["solver.p=1.5"], "option 'solver.p': Expected a rate p in [0, 1); found 1.5"),
        (["solver.name=proxgd", "solver.p=0.5"], "option 'solver': A deterministic solver draws nothing"),
        (["model.in_order=true"], "model.weights"),
        (["model.in_order=true", "model.weights=model.safetensors"], "sorts its tensors"),
        (["model.pretrained=true", "model.weights=f"], "found both"),
        (["solver.name=proxprop", "solver.iters=3"], "replace all of it: solver='{name: proxprop"),
        (["precision=fp8"], "'no', 'bf16' or 'fp16'"),
        (["augmentation.scale=[0.5]"], "augmentation.scale': expected a pair [a, b] with 0 < a <= b <= 1; found [0.5]"),
        (["augmentation.scale=[2, 3]"], "0 < a <= b <= 1"),
        (["augmentation.scale=[1.0, 0.08]"], "0 < a <= b <= 1"),
        (["augmentation.ratio=[0, 1]"], "'augmentation.ratio': expected a pair [a, b] with 0 < a <= b; found [0, 1]"),
        (["augmentation.ratio=[1, 2, 3]"], "a pair [a, b]"),
        (["data.std=[0.5, 0, 0.5]"], "'data.std': expected numbers above zero"),
        (["data.std=[]"], "'data.std': expected numbers above zero"),
        (["seed=99999999999999999999"], "less than or equal to 4294901760"),
        (["seed=4294967295"], "'seed': expected a value less than"),
    ],
)
def test_mistakes(tmp_path, changes, message):
    with pytest.raises(OptionError) as error:
        read_config(written(tmp_path), changes)
    assert message in str(error.value)


def test_a_solver_that_does_not_exist(tmp_path):
    """It is told when the file is read, before data are loaded and a model is built."""
    with pytest.raises(UnknownNameError, match=r"Unknown solver 'proxdg'\. Did you mean 'proxsg'"):
        read_config(written(tmp_path), ["solver.name=proxdg"])


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("model: [", "run.yaml", "not valid YAML"),
        ("- 1", "run.yaml", "found list"),
        ("", "run.txt", "ending in .json"),
        ("{}", "run.json", "'model' is required"),
        ("epochs: 1\nepochs: 2\n", "run.yaml", "given twice"),
    ],
)
def test_unreadable_files(tmp_path, text, name, message):
    with pytest.raises(OptionError, match=message):
        read_config(written(tmp_path, text, name))
    with pytest.raises(OptionError, match="No such file"):
        read_config(tmp_path / "none.yaml")


def test_every_option_is_described():
    def check(model):
        for name, field in model.model_fields.items():
            inner = [
                one
                for one in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if hasattr(one, "model_fields")
            ]
            assert field.description or inner, name
            for one in inner:
                check(one)

    check(FinetuneConfig)
    assert FinetuneConfig.parse(options("there"))
