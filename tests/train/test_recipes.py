"""Every recipe is read and dry-run, with small data in the place of the real one."""

import shlex
from pathlib import Path

import datasets
import numpy
import pytest
import torch
import transformers
from PIL import Image

read_config = pytest.importorskip("solver_plugins.train.reading").read_config
plan_run = pytest.importorskip("solver_plugins.train.plan").plan_run

FOLDER = Path(__file__).parents[2] / "configs" / "recipes"
CONVERTED = {
    "quickstart": ["fc1", "fc2"],
    "lenet_cifar10_dd": ["fc1", "fc2"],
    "lenet_cifar10_dnd": ["fc1"],
    "lenet_cifar10_ndd": ["fc2"],
    "proxprop_muon_lenet": [],
    "alexnet_cifar10_proxgd": ["conv1"],
    "opteq_cifar10": [],
    "vgg16_cifar100_proxsg": ["head.fc"],
    "timm_resnet50": [f"layer4.{block}.conv{number}" for block in range(3) for number in (1, 2)],
    "timm_vit": ["head"],
    "timm_vit_lora": [f"blocks.{number}.mlp.fc1" for number in range(12)],
    "hf_bert_text": ["classifier"],
    "efficientnet_lite0_cifar10": ["conv_head"],
    "minilm_text": ["classifier"],
}
"""What each recipe turns into solvers."""


def changes(config, folder):
    """Returns what stands for the hub: a few images or sentences with the recipe's columns, and a small BERT."""
    if config.data.name == "digits":
        return []
    label = config.data.label
    classes = [str(number) for number in range(100 if label == "fine_label" else 10)]
    features = {label: datasets.ClassLabel(names=classes)}
    columns = {label: list(range(len(classes)))}
    more = []
    if config.data.text is None:
        features[config.data.image] = datasets.Image()
        noise = numpy.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=numpy.uint8)
        columns[config.data.image] = [Image.fromarray(noise)] * len(classes)
    else:
        features[config.data.text] = datasets.Value("string")
        columns[config.data.text] = ["a good film"] * len(classes)
        more = [f"model.spec=hf/{small_bert(folder / 'bert')}"]
    rows = datasets.Dataset.from_dict(columns, datasets.Features(features))
    split = datasets.DatasetDict({"train": rows, config.data.eval: rows})
    split.save_to_disk(folder / "data")
    small = ["data.train=train", "data.workers=0", "batch_size=10", "model.pretrained=false"]
    if config.model.weights is not None:
        small += ["model.weights=null", "model.in_order=false"]
    return [f"data.name={folder / 'data'}", *small, *more]


def small_bert(folder):
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "film"]))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        architectures=["BertForSequenceClassification"],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_every_recipe_is_tested():
    assert sorted(CONVERTED) == sorted(path.stem for path in FOLDER.glob("*.yaml"))


def plan(name, folder, *more):
    path = FOLDER / f"{name}.yaml"
    return plan_run(read_config(path, [*changes(read_config(path), folder), f"output={folder / 'run'}", *more]))


@pytest.mark.parametrize("name", CONVERTED)
def test_dry_run(name, tmp_path):
    assert read_config(FOLDER / f"{name}.yaml").output == f"runs/{name}"
    blocks = plan(name, tmp_path).blocks
    assert [row.name for row in (blocks.rows if blocks else ()) if row.converted] == CONVERTED[name]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variant", ["D-D", "Prox-GD"])
def test_other_columns_of_table_4(variant, tmp_path):
    """As the comment in the recipe says."""
    text = (FOLDER / "vgg16_cifar100_proxsg.yaml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"#   {variant}:")]
    report = plan("vgg16_cifar100_proxsg", tmp_path, *shlex.split(line.partition(":")[2])).blocks
    assert [row.name for row in report.rows if row.converted] == ["pre_logits.fc2", "head.fc"]


@pytest.mark.parametrize("name", [name for name in CONVERTED if name.startswith(("lenet", "alexnet", "vgg16"))])
def test_hyperparameters_of_the_paper(name):
    """Section 4: optimiser, schedule, lambda, trials, and 90% of the training set."""
    config = read_config(FOLDER / f"{name}.yaml")
    assert (config.optimizer.opt, config.optimizer.momentum, config.optimizer.weight_decay) == ("momentum", 0.9, 5e-4)
    scratch = name.startswith("lenet")
    assert config.optimizer.lr == (1e-2 if scratch else 1e-3)
    assert config.schedule.decay_milestones == ([100, 200] if scratch else [100])
    assert config.schedule.decay_rate == 0.1 and config.refresh == "epoch" and config.data.train == "train[:90%]"
    assert config.solver.args["lam"] == 1e-3
    if config.solver.solver == "proxsg":
        assert config.trials == 20 and config.solver.args["eval_mode"] == "stochastic"
        assert config.model.args["drop_rate"] == 0.5
