"""Examples from every source, and what is said where there are none."""

import datasets
import numpy
import pytest
import torch
from PIL import Image

from solver_plugins.errors import OptionError
from solver_plugins.train import DataError
from solver_plugins.train.config import DataSection
from solver_plugins.train.data import Order, load_splits, make_loaders
from solver_plugins.train.models import build_model
from tests.train.runs import tiny


def picture(number, size=8):
    return Image.fromarray(numpy.full((size, size), number * 20, dtype=numpy.uint8))


def dataset(count, labels=2):
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"img": [picture(number) for number in range(count)], "label": [number % labels for number in range(count)]}
    return datasets.Dataset.from_dict(rows, features=features)


def loaded(**options):
    return load_splits(DataSection.parse(options))


def test_digits_are_embedded():
    found = loaded()
    assert len(found.train) == 1437 and len(found.eval) == 360 and len(found.classes) == 10
    assert found.train[0]["image"].size == (8, 8) and found.train[0]["label"] == 0


def test_save_to_disk(tmp_path):
    datasets.DatasetDict(train=dataset(6), test=dataset(3)).save_to_disk(tmp_path / "both")
    found = loaded(name=str(tmp_path / "both"))
    assert (len(found.train), len(found.eval), found.column, found.classes) == (6, 3, "img", ("0", "1"))
    dataset(6).save_to_disk(tmp_path / "one")
    found = loaded(name=str(tmp_path / "one"), train="train[:4]", eval="train[4:]")
    assert len(found.train) == 4 and len(found.eval) == 2


def test_imagefolder_and_parquet(tmp_path):
    for split, count in (("train", 3), ("test", 1)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                picture(number).save(folder / f"{number}.png")
    found = loaded(name=str(tmp_path / "images"))
    assert len(found.train) == 6 and len(found.eval) == 2 and found.classes == ("cat", "dog")
    (tmp_path / "tables").mkdir()
    dataset(5).to_parquet(tmp_path / "tables" / "train.parquet")
    dataset(2).to_parquet(tmp_path / "tables" / "test.parquet")
    found = loaded(name=str(tmp_path / "tables"))
    assert len(found.train) == 5 and len(found.eval) == 2
    found = loaded(name=str(tmp_path / "tables" / "train.parquet"), eval="train")
    assert len(found.eval) == 5


def photos(place, **counts):
    """Writes so many images into SPLIT/CLASS or CLASS, by their names with __ for /."""
    for name, count in counts.items():
        folder = place.joinpath(*name.split("__"))
        folder.mkdir(parents=True)
        for number in range(count):
            picture(number).save(folder / f"{number}.png")
    return str(place)


@pytest.mark.parametrize("name", ["train", "bullet_train", "test_tube", "val", "dev"])
def test_a_class_may_have_the_name_of_a_split(tmp_path, name):
    """datasets would take SPLIT/train_station/IMAGE for training images, those of the test split included."""
    place = photos(
        tmp_path / "photos [of mine]",
        **{"train__cat": 3, "test__cat": 2, "validation__cat": 1},
        **{f"train__{name}": 4, f"test__{name}": 1, f"validation__{name}": 1},
    )
    found = loaded(name=place)
    assert (len(found.train), len(found.eval)) == (7, 3) and found.classes == tuple(sorted(("cat", name)))
    assert len(loaded(name=place, eval="validation").eval) == 2
    assert len(loaded(name=place, train="train[:4]", eval="train[2:]").eval) == 5


def test_folders_that_are_no_splits(tmp_path):
    flat = photos(tmp_path / "flat", cat=4, train=4)
    with pytest.raises(DataError, match="has no split 'test': its folders are classes"):
        loaded(name=flat)
    with pytest.raises(DataError, match="sorted by class"):
        loaded(name=flat, train="train[:50%]", eval="train[50%:]")
    assert len(loaded(name=flat, eval="train").train) == 8
    with pytest.raises(DataError, match=r"has no split 'test': it has train\. Expected test/CLASS/IMAGE"):
        loaded(name=photos(tmp_path / "half", train__cat=2, train__dog=2))
    assert len(loaded(name=photos(tmp_path / "val", train__a=1, train__b=1, val__a=1), eval="validation").eval) == 1


def test_classes_that_do_not_fit(tmp_path):
    with pytest.raises(DataError, match="found none in dog"):
        loaded(name=photos(tmp_path / "empty", train__cat=2, train__dog=0, test__cat=1))
    with pytest.raises(DataError, match=r"has none of frog\. Add some"):
        loaded(name=photos(tmp_path / "more", train__cat=2, train__dog=2, test__cat=1, test__frog=1))
    # A class that is not evaluated keeps its number.
    found = loaded(name=photos(tmp_path / "less", train__cat=2, train__dog=2, train__frog=2, test__cat=1, test__frog=1))
    assert found.classes == ("cat", "dog", "frog") and found.eval["label"][:] == [0, 2]
    both = datasets.DatasetDict(
        train=dataset(4).cast_column("label", datasets.ClassLabel(names=["cat", "dog"])),
        test=dataset(4).cast_column("label", datasets.ClassLabel(names=["dog", "cat"])),
    )
    both.save_to_disk(tmp_path / "swapped")
    with pytest.raises(DataError, match="number their classes differently"):
        loaded(name=str(tmp_path / "swapped"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "/none/there"}, "There is no data set at"),
        ({"train": "trian"}, "Did you mean 'train'"),
        ({"train": "train[:0]"}, "found none"),
        ({"label": "lable"}, "Did you mean 'label'"),
        ({"image": "picture"}, "has no column 'picture'"),
        ({"text": "sentence"}, "has no column 'sentence'"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(DataError) as error:
        loaded(**options)
    assert message in str(error.value)


def test_missing_hub_data_set_says_where_it_looked(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"(?s)Looked for a folder.*save_to_disk"):
        loaded(name="nobody/nothing-of-this-name")


def test_a_misspelled_folder_is_recognised(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match="Did you mean the folder 'photos'"):
        loaded(name="photoz")


def test_labels_that_do_not_fit(tmp_path):
    datasets.DatasetDict(train=dataset(6, 2), test=dataset(6, 3)).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match="2 classes of the training split; found 2"):
        loaded(name=str(tmp_path / "both"))


def test_corrupt_image_is_named(tmp_path):
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": b"no image", "path": None}] * 4, "label": [0, 1, 0, 1]}
    broken = datasets.Dataset.from_dict(rows, features=features).cast_column("image", datasets.Image())
    datasets.DatasetDict(train=broken, test=broken).save_to_disk(tmp_path / "both")
    config = tiny(tmp_path / "run", data={"name": str(tmp_path / "both")}, batch_size=2)
    splits = load_splits(config.data)
    loaders = make_loaders(config, splits, build_model(config, splits), 1)
    with pytest.raises(DataError, match=r"example 1 of the split 'train'"):
        loaders.train.dataset[(0, 1)]


def test_order_depends_on_seed_and_epoch_alone():
    order = Order(10, 4, seed=3)
    first = list(order)
    assert order.steps == 2 and len(first) == 8 and len(set(first)) == 8
    order.skip = 4
    assert list(order) == first[4:] and len(order) == 4
    order.skip, order.epoch = 0, 1
    assert [number for _, number in order] != [number for _, number in first]


def test_augmentation_depends_on_the_example_not_on_what_was_read_before(tmp_path):
    config = tiny(tmp_path, augmentation={"scale": [0.5, 1.0]})
    splits = load_splits(config.data)
    examples = make_loaders(config, splits, build_model(config, splits), 1).train.dataset
    before = torch.get_rng_state()
    one = examples[(2, 5)]["image"]
    torch.rand(3)
    examples[(2, 6)]
    assert torch.equal(examples[(2, 5)]["image"], one)
    assert not torch.equal(examples[(3, 5)]["image"], one)
    torch.set_rng_state(before)
    examples[(2, 5)]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("policy", ["foo", "rand-q9", "rand-m9x", "augmix-q9"])
def test_policies_that_timm_does_not_know(tmp_path, policy):
    config = tiny(tmp_path, augmentation={"auto_augment": policy})
    splits = load_splits(config.data)
    with pytest.raises(OptionError, match=f"auto_augment to be a policy of timm.*found '{policy}'"):
        make_loaders(config, splits, build_model(config, splits), 1)


def test_batches_that_cannot_be_shared_out(tmp_path):
    config = tiny(tmp_path, accumulation=2)
    splits = load_splits(config.data)
    model = build_model(config, splits)
    with pytest.raises(DataError, match="a multiple of 6; found 16"):
        make_loaders(config, splits, model, 3)
    with pytest.raises(DataError, match="at least one batch of 128"):
        make_loaders(tiny(tmp_path, batch_size=128), splits, model, 1)
