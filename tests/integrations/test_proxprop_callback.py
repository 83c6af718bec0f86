"""ProxProp in transformers' Trainer: the steps of a loop written out, in all kinds of models, and resumed."""

import pytest
import torch
import transformers

from solver_plugins import ProxProp, ProxPropCallback
from solver_plugins.errors import OptionError
from tests.integrations.cases import hugging_face_model
from tests.integrations.test_trainer import Rows

MODELS = ("bert", "resnet", "vit")


def plain(name):
    torch.manual_seed(0)
    return hugging_face_model(name)


def trainer(model, name, folder, *callbacks, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, learning_rate=0.05, report_to=[], use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
        **{"save_strategy": "no", "logging_strategy": "no", "max_steps": 4, **options},
    )  # fmt: skip
    return transformers.Trainer(model=model, args=arguments, train_dataset=Rows(name), callbacks=list(callbacks))


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.double()


def by_hand(name, batches):
    model = without_dropout(plain(name)).train()
    prox = ProxProp(model, "cg3")
    for batch in batches:
        model(**batch).loss.backward()
        prox.precondition()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
    return model.state_dict()


def kept_batches(model):
    """Returns a list that fills with the batches that a model is given, in float64."""
    batches = []

    def keep(module, args, kwargs):
        tensors = {key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor)}
        batches.append({key: value.double() if value.is_floating_point() else value for key, value in tensors.items()})
        return args, {**kwargs, **batches[-1]}

    model.register_forward_pre_hook(keep, with_kwargs=True)
    return batches


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_a_loop_written_out(name, tmp_path):
    model = without_dropout(plain(name))
    batches = kept_batches(model)
    callback = ProxPropCallback(mode="cg3")
    trainer(model, name, tmp_path, callback).train()
    assert len(batches) == 4 and callback.proxprop.last_step
    expected = by_hand(name, batches)
    assert max(float((value - expected[key]).abs().max()) for key, value in model.state_dict().items()) < 1e-9
    assert not any(module._forward_hooks for module in model.modules())


def test_resumed_run_is_the_same(tmp_path):
    whole = trainer(plain("bert"), "bert", tmp_path, ProxPropCallback(), save_strategy="steps", save_steps=2)
    whole.train()
    again = trainer(plain("bert"), "bert", tmp_path, ProxPropCallback())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in again.model.state_dict().items())


def test_bad_options(tmp_path):
    with pytest.raises(OptionError, match="cgN"):
        trainer(plain("bert"), "bert", tmp_path, ProxPropCallback(mode="cg0")).train()
    with pytest.raises(TypeError, match="taus"):
        trainer(plain("bert"), "bert", tmp_path, ProxPropCallback(taus=1.0)).train()
