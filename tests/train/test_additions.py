"""Implicit steps and the DropBlock regulariser as parts of a config, against loops written out here."""

import pytest
import torch
import transformers
from torch.nn import functional

import solver_plugins
from solver_plugins import ProxProp, StructuredDropoutRegularizer
from solver_plugins.dropblock import BlockSizeError
from solver_plugins.errors import OptionError
from solver_plugins.integrations.heads import head_of
from solver_plugins.surgery import TargetError
from solver_plugins.train.additions import Additions
from solver_plugins.train.arms import make_arm
from solver_plugins.train.config import RegularizerSection
from solver_plugins.train.data import load_splits
from solver_plugins.train.finetune import finetune
from solver_plugins.train.plan import plan_run
from tests.train.runs import VIT, tiny, weights

DOUBLE = {"spec": "timm/test_vit", "args": VIT, "dtype": "float64"}
SGD = {"opt": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "args": {"nesterov": False}}
BLOCKS = {"scheme": "dropblock", "theta": 0.7, "block_size": 4}


def config(output, **changes):
    return tiny(output, **{"model": DOUBLE, "solver": None, "optimizer": SGD, "baseline": True, **changes})


def steps_by_hand(settings, direction=None, penalty=None):
    """One epoch of gradient descent; ``direction`` changes gradients, ``penalty`` is added to the loss."""
    model, loaders = make_arm(settings, load_splits(settings.data), "solver", 1)
    change = direction(model) if direction else None
    added = penalty(model) if penalty else None
    loaders.order.epoch = loaders.order.skip = 0
    model.train()
    for batch in loaders.train:
        loss = functional.cross_entropy(model(batch["image"].double()), batch["labels"])
        (loss if added is None else loss + added()).backward()
        if change is not None:
            change.precondition()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return model.state_dict()


def difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("section", ["solver", "proxprop"])
def test_proxprop(tmp_path, section):
    """In either place of a config; the baseline keeps its plain gradients."""
    options = {"mode": "cg2", "tau_theta": 0.3}
    changes = {"solver": {"name": "proxprop", **options}} if section == "solver" else {"proxprop": options}
    settings = config(tmp_path / "run", **changes)
    finetune(settings)
    by_hand = steps_by_hand(settings, lambda model: ProxProp(model, "cg2", 0.3))
    assert difference(weights(tmp_path / "run"), by_hand) < 1e-12
    assert difference(weights(tmp_path / "run", "baseline"), steps_by_hand(settings)) < 1e-12
    assert difference(by_hand, weights(tmp_path / "run", "baseline")) > 1e-4
    assert "proxprop, cg2" in (tmp_path / "run" / "report.html").read_text()


def test_deterministic_regularizer(tmp_path):
    settings = config(tmp_path / "run", regularizer=BLOCKS)
    finetune(settings)
    by_hand = steps_by_hand(
        settings,
        penalty=lambda model: StructuredDropoutRegularizer(
            model, "dropblock", 0.7, 4, loss="cross_entropy_second_order"
        ),
    )
    assert difference(weights(tmp_path / "run"), by_hand) < 1e-12
    assert difference(by_hand, weights(tmp_path / "run", "baseline")) > 1e-5


def test_sampled_regularizer_is_the_baseline_where_nothing_is_dropped(tmp_path):
    finetune(config(tmp_path / "all", regularizer={**BLOCKS, "how": "sampled", "theta": 1.0}))
    finetune(config(tmp_path / "some", regularizer={**BLOCKS, "how": "sampled"}, baseline=False))
    plain = weights(tmp_path / "all", "baseline")
    assert difference(weights(tmp_path / "all"), plain) == 0
    assert difference(weights(tmp_path / "some"), plain) > 1e-4


def test_all_of_them_with_solver_blocks(tmp_path):
    """Accumulated passes take the step of the whole batch, and the plan says what will happen."""
    more = {"solver": {"name": "proxgd", "iters": 2}, "proxprop": {"mode": "exact"}, "regularizer": BLOCKS}
    more["baseline"] = False
    finetune(config(tmp_path / "once", **more))
    finetune(config(tmp_path / "twice", accumulation=2, **more))
    assert difference(weights(tmp_path / "once"), weights(tmp_path / "twice")) < 1e-10
    lines = "\n".join(plan_run(config(tmp_path / "never", **more)).lines)
    assert "proxprop: exact" in lines and "regularizer: mean effect" in lines and not (tmp_path / "never").exists()
    model = solver_plugins.load(tmp_path / "once" / "solver" / "model")
    assert not model.get_classifier()._forward_hooks


def test_equilibrium_head(tmp_path):
    """By itself, and with solver blocks in front of it; what is loaded computes what was trained."""
    head = {"name": "opteq", "hidden": 6, "layers": 2, "tol": 1e-8, "iters": 100}
    results = finetune(config(tmp_path / "head", head=head, regularizer={**BLOCKS, "block_size": 3}))
    assert results["solver"]["parameters"] != results["baseline"]["parameters"]
    assert "opteq head, 2 layers" in (tmp_path / "head" / "report.html").read_text()
    both = config(tmp_path / "both", head=head, solver={"name": "proxgd", "iters": 2}, baseline=False, precision="bf16")
    finetune(both)
    model = solver_plugins.load(tmp_path / "both" / "solver" / "model")
    assert head_of(model).config.hidden == 6 and len(solver_plugins.solver_report(model).blocks) == 1
    lines = "\n".join(plan_run(config(tmp_path / "never", head=head)).lines)
    assert "head: an equilibrium of 2 layers, solved by anderson" in lines


@pytest.mark.parametrize("side", ["left", "right"])
def test_only_the_last_token_of_a_text_counts(side):
    """GPT-2 classifies every token and keeps the last; the value is that of the kept rows by themselves."""
    torch.manual_seed(0)
    settings = transformers.GPT2Config(
        vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16, num_labels=3, pad_token_id=0,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2ForSequenceClassification(settings).double().train()
    tokens = torch.randint(1, 20, (3, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    if side == "left":
        mask = mask.flip(1)
    tokens = tokens * mask
    additions = Additions(regularizer=RegularizerSection(**BLOCKS))
    additions.attach(model, torch.optim.SGD(model.parameters()))
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([0, 1, 2])}
    logits = model(input_ids=tokens, attention_mask=mask).logits
    value = additions.penalty(batch)
    additions.remove()
    features = model.transformer(input_ids=tokens, attention_mask=mask).last_hidden_state
    last = [4, 2, 1] if side == "right" else [4, 4, 4]
    kept = features[torch.arange(3), last]
    assert torch.allclose(model.score(kept), logits)
    # Second-order term, block by block: (1 - theta)/theta/2 * sum_b tr((diag p - p p^T) (U_b z_b)(U_b z_b)^T).
    parts = torch.einsum("kbj,nbj->nbk", model.score.weight.view(3, 4, 4), kept.view(3, 4, 4))
    p = logits.softmax(-1)[:, None]
    expected = 0.5 * 0.3 / 0.7 * ((p * parts**2).sum(-1) - (p * parts).sum(-1) ** 2).sum(1).mean()
    assert torch.allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"solver": {"name": "proxprop", "mode": "cg0"}}, OptionError, "'cgN' with N >= 1"),
        ({"proxprop": {"targets": ["nothing"]}}, TargetError, "nothing"),
        ({"proxprop": {"targets": "pos_drop"}}, TargetError, "matches no linear layer"),
        ({"regularizer": {"block_size": 5}}, BlockSizeError, "divide"),
        ({"regularizer": {"scheme": "dropblok", "block_size": 4}}, LookupError, "dropblock"),
        ({"regularizer": {}}, OptionError, "block_size"),
        ({"head": {"activation": "gelu"}}, ValueError, "gelu"),
        ({"head": {"solver": "andersn"}}, LookupError, "anderson"),
        ({"regularizer": {"scheme": "dropout", "classifier": "hed"}}, LookupError, "head"),
    ],
)
def test_what_does_not_fit_leaves_nothing_behind(tmp_path, changes, error, message):
    for run in (finetune, plan_run):
        with pytest.raises(error, match=message):
            run(config(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
