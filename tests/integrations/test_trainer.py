"""transformers' Trainer on converted models."""

import pytest
import torch
import transformers

from solver_plugins import conversion_of, load
from solver_plugins.integrations.trainer import CertifySteps
from tests.integrations.cases import converted, hugging_face_inputs, hugging_face_model


class Rows(torch.utils.data.Dataset):
    def __init__(self, name):
        torch.manual_seed(3)
        self.inputs = hugging_face_inputs(name, batch=16)
        self.labels = torch.randint(0, 3, (16,))

    def __len__(self):
        return 16

    def __getitem__(self, row):
        return {**{key: value[row] for key, value in self.inputs.items()}, "labels": self.labels[row]}


def build(name):
    torch.manual_seed(0)
    return converted(hugging_face_model(name), "proxsg", last=False)


def trainer(name, folder, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=6, save_steps=3, learning_rate=0.01,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False, **options,
    )  # fmt: skip
    return transformers.Trainer(
        model=build(name), args=arguments, train_dataset=Rows(name), eval_dataset=Rows(name), callbacks=[CertifySteps()]
    )


RESUMES = {"bert": True, "resnet": True, "vit": False}
"""transformers 5.22 writes a ViT under its old names and resumes under the new ones: a plain ViT starts anew, too."""


@pytest.mark.parametrize("name", RESUMES)
def test_train_resume_save_load(name, tmp_path):
    """A run that is resumed ends where the uninterrupted one ends, to the bit; so does what is loaded."""
    whole = trainer(name, tmp_path / "run")
    before = {key: value.clone() for key, value in whole.model.state_dict().items()}
    whole.train()
    expected = whole.model.state_dict()
    assert any(not torch.equal(expected[key], before[key]) for key in expected)
    if RESUMES[name]:
        resumed = trainer(name, tmp_path / "run")
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
        assert resumed.state.global_step == 6
        found = resumed.model.state_dict()
        assert all(torch.equal(found[key], expected[key]) for key in expected)

    metrics = whole.evaluate()
    whole.save_model(str(tmp_path / "saved"))
    again = load(tmp_path / "saved")
    assert conversion_of(again).to_json() == conversion_of(whole.model).to_json()
    inputs = hugging_face_inputs(name)
    with torch.no_grad():
        assert torch.equal(again(**inputs)[0], whole.model.eval()(**inputs)[0])
    assert metrics["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"])
    # A checkpoint is a saved model, too.
    assert conversion_of(load(tmp_path / "run" / "checkpoint-3")).to_json() == conversion_of(again).to_json()
