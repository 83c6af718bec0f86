"""Mistakes on the command line: each is one message on standard error and exit code 2, and leaves nothing behind."""

import numpy
import pytest
from PIL import Image

from solver_plugins.cli import main
from solver_plugins.train import FinetuneConfig
from tests.train.runs import options

CHANGES = {
    "best.metric=f1": "'macro_f1'",
    "best.patience=0": "greater than or equal to 1",
    "best.patience=two": "valid integer",
    "best.metric=top1": "'top5'",
    "train=[]": "not empty",
    "train=[hed]": "Did you mean 'head'",
    "freeze=.*": "at least one layer",
    "freeze=((": "not a regular expression",
    "unfreeze={2: head}": "found neither",
    "freeze=[head] unfreeze={1: head} epochs=3": "from 2 to 3",
    "freeze=[head] unfreeze={9: head} epochs=3": "from 2 to 3",
    "freeze=[head] unfreeze={2: haed} epochs=3": "unfreeze.2: the regular expression 'haed' matches no layer",
    "class_weights=[1,2]": "Expected 10 class_weights",
    "class_weights=even": "'balanced'",
    "class_weights=[0,1,1,1,1,1,1,1,1,1]": "above zero",
    "mixup={} class_weights=balanced": "found both",
    "seeds=[1]": "at least two different seeds",
    "seeds=3": "valid list",
    "seeds=[1,2] seed=4": "found both",
    "data.eval=1.0": "less than 1",
    "data.eval=-0.1": "greater than 0",
    "data.eval=tset": "no split 'tset'",
    "data.check=perhaps": "valid boolean",
    "data.mean=[0.1,0.2]": "data.mean for 1 channels",
    "trackers=[wandbb]": "Did you mean 'wandb'",
    "trackers=wandb": "valid list",
    "compile=maybe": "valid boolean",
    "channels_last=3": "valid boolean",
    "gradient_checkpointing=[]": "valid boolean",
    "model.head_init=zeros": "'reset', 'zero' or 'library'",
    "model.head_init=library model.weights=none.pth": "none.pth",
    "optimizer.opt=adamww": "Did you mean",
    "optimizer.args={betas: 3}": "cannot make the optimizer",
    "batch_size=1000": "at least one batch of 1000",
    "output=/proc/nope/run": "Cannot write to the output folder",
    "model.spec=timm/": "timm/",
    "data.image_size=7": "cannot take images of 1x7x7",
    "data.image_size=7 solver=null": "Expected data.image_size and model.args",
    "model.weights=pyproject.toml": "reading it: Weights only load failed.",
    "model.spec=vgg": "vgg",
    # Adapters.
    "peft={}": "target_modules=all-linear",
    "peft=lora": "peft",
    "lora={r: 8}": "the section 'peft'",
    "peft={name: prompt_tuning}": "'lora', 'loha', 'lokr' or 'ia3'",
    "peft={target_modules: 3}": "target_modules",
    "peft={target_modules: [qkw]}": "Did you mean 'qkv'",
    "peft={target_modules: [qkv], args: {r: 2}, r: 3}": "found both",
    "peft={target_modules: [qkv], args: 3}": "args",
    "peft={target_modules: [qkv], merge: perhaps}": "valid boolean",
    "peft={target_modules: [qkv], modules_to_save: head}": "valid list",
    "peft={target_modules: [qkv], modules_to_save: [haed]}": "Did you mean 'head'",
    "peft={target_modules: [qkv], feedforward_modules: [qkv]}": "no option 'feedforward_modules'",
    "peft={target_modules: [qkv], task_type: SEQ_CLS}": "no option 'task_type'",
    "peft={target_modules: [qkv], lora_dropout: much}": "PEFT cannot put lora",
    "peft={target_modules: [qkv]} head={hidden: 8}": "head does not go with peft",
    "peft={target_modules: [qkv]} regularizer={block_size: 2}": "regularizer does not go with peft",
    "peft={target_modules: [qkv]} proxprop={}": "proxprop does not go with peft",
    "peft={target_modules: [qkv]} train=[head]": "expected train or peft",
    "peft={target_modules: [fc1]}": "peft.merge=false",
    # Labels.
    "problem_type=regression": "It is part of 'data'",
    "data.problem_type=multilabel": "'multi_label_classification'",
    "data.problem_type=regression label_smoothing=0.1": "label_smoothing is about one class of several",
    "data.problem_type=regression mixup={}": "mixup is about",
    "data.problem_type=regression class_weights=balanced": "class_weights is about",
    "data.problem_type=regression best.metric=accuracy": "expected loss, rmse, mae, r2",
    "data.problem_type=multi_label_classification": "Expected lists of labels in 'label'",
    "best.metric=rmse": "not measured for single_label_classification",
    "best.metric=mse": "'rmse'",
    "data.separator=''": "at least one letter",
    "data.separator=, data.label=[label,image]": "for one column whose texts",
    "data.label=[]": "at least one column",
    "data.label=[label,label]": "each of them once",
    "data.label=[label,lable]": "no column 'lable'",
    "data.label=lable": "Did you mean 'label'",
    "data.image=label": "names of their files, in the column 'label'",
    "data.text=image": "needs a model of transformers",
    # Training.
    "accumulation=3": "a multiple of 3",
    "precision=half": "'bf16'",
    "optimizer.lr=-1": "greater than 0",
    "schedule={warmup_epochs: 3} epochs=2": "warmup_epochs below epochs",
    "model.head_init=2": "head_init",
}


def said(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return stopped.value.code, capsys.readouterr().err


@pytest.mark.parametrize("changes", CHANGES)
def test_configs(tmp_path, capsys, changes):
    config = tmp_path / "run.yaml"
    config.write_text(FinetuneConfig.parse(options(tmp_path / "run")).to_yaml())
    words = changes.split(" ") if "{" not in changes else _split(changes)
    code, told = said(capsys, "finetune", str(config), *words)
    assert code == 2 and told.startswith("Error: ") and CHANGES[changes] in told, told
    assert "Traceback" not in told and len(told.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def _split(text):
    """Splits changes at spaces that are not inside of braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == " " and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def test_scripts_and_predictions(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("print('runs')")
    (tmp_path / "list.yaml").write_text("- proxsg\n")
    Image.fromarray(numpy.zeros((4, 4, 3), numpy.uint8)).save(tmp_path / "image.png")
    for arguments, message in (
        (("run", str(tmp_path / "none.py")), "there is no file"),
        (("run", str(script), "--solver-config"), "Expected a file after"),
        (("run", "--solver-config=a", str(script), "--solver-config=b"), "found it twice"),
        (("run", str(script), "--solver-config", str(tmp_path / "list.yaml")), "mapping of options"),
        (("run", str(script), "--solver-config", str(tmp_path / "none.yaml")), "none.yaml"),
        (("predict", str(tmp_path / "none"), str(tmp_path / "image.png")), "none"),
        (("predict", str(tmp_path), str(tmp_path / "image.png")), str(tmp_path)),
    ):
        code, told = said(capsys, *arguments)
        assert code == 2 and message in told and "Traceback" not in told, told
