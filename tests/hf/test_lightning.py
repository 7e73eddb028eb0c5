"""Lightning's Trainer with strategy="shardwright": fits as in one process, validates, clips, resumes."""

import os
from importlib import import_module
from importlib.util import find_spec

import pytest

if find_spec("lightning") is None:  # imported by nobody here: a rank imports the one package that it is told
    pytest.skip("needs shardwright[lightning] (make test-hf)", allow_module_level=True)

import torch
from torch import nn

from shardwright import FSDPModule, Grouping, fully_shard
from tests.ranks.models import full
from tests.ranks.pool import as_torchrun, run_ranks

ROWS = torch.randn(24, 7, generator=torch.Generator().manual_seed(3))


def module_of(pl, manual=False, nested=False, seed=1):
    """A module whose loss reads a parameter of its own, beside its layers'."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seed)
            self.save_hyperparameters({"width": 9})
            self.layers = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
            self.automatic_optimization, self.norms = not manual, []

        def configure_model(self):
            if nested and not isinstance(self.layers[0], FSDPModule):
                fully_shard(self.layers[0])

        def forward(self, rows):
            return self.layers(rows) * self.scale

        def training_step(self, rows, batch):
            loss = (self(rows) + self.scale).square().mean()
            if manual:
                self.manual_backward(loss)
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

        def on_before_optimizer_step(self, _):
            grads = [full(p.grad) for p in self.parameters()]
            self.norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))

        def validation_step(self, rows, batch):
            self.log("heldout", (self(rows) + self.scale).square().mean(), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 2.0, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Module()


def trainer_of(pl, world, strategy, folder=None, **options):
    plugins = [import_module(f"{pl.__name__}.plugins.environments").LightningEnvironment()]
    if world == 1 and strategy == "auto":
        plugins = []
    values = {
        "accelerator": "cpu", "devices": world, "strategy": strategy, "plugins": plugins, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "max_epochs": 2, "num_sanity_val_steps": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05,
        "default_root_dir": folder, "use_distributed_sampler": False,
    }  # fmt: skip
    return pl.Trainer(**{**values, **options})


def loaders(world):
    """Of six rows, which ranks share."""
    rank = int(os.environ["RANK"]) if world > 1 else 0
    loaders = []
    for rows in (ROWS, ROWS[:12]):
        sampler = torch.utils.data.DistributedSampler(rows, world, rank, shuffle=False)
        loaders.append(torch.utils.data.DataLoader(rows, 6 // world, sampler=sampler))
    return loaders


def fitted(pl, world, strategy, ckpt_path=None, module=None, **options):
    module = module or module_of(pl)
    trainer = trainer_of(pl, world, strategy, **options)
    trainer.fit(module, *loaders(world), ckpt_path=ckpt_path)
    return trainer, module


def figures(trainer, module):
    weights = [full(param).detach() for param in module.parameters()]
    return module.norms, float(trainer.callback_metrics["heldout"]), weights


def alone(rank, world, package, folder):
    pl = import_module(package)
    found = [figures(*fitted(pl, 1, "auto"))]
    found.append(figures(*fitted(pl, 1, "auto", precision="bf16-mixed")))
    found.append(figures(*fitted(pl, 1, "auto", gradient_clip_algorithm="value")))
    fitted(pl, 1, "auto", max_epochs=1)[0].save_checkpoint(folder / "alone.ckpt")
    return found


def goes_on_alone(rank, world, package, folder):
    pl = import_module(package)
    return figures(*fitted(pl, 1, "auto", str(folder / "whole.ckpt"), module_of(pl, seed=9)))


def several(rank, world, package, folder):
    """The same fits on shards; then one of the first epoch alone, which ``resumed`` goes on with."""
    as_torchrun(rank, world, 29999)
    pl = import_module(package)
    ours = import_module("shardwright.lightning").TrainerStrategy
    each = ours(groups=Grouping(classes=(nn.Linear,)))
    trainer, module = fitted(pl, world, each, module=module_of(pl, seed=rank + 1))
    assert isinstance(module, FSDPModule)
    assert all(param.to_local().numel() < param.numel() for param in module.parameters())
    found = [figures(trainer, module)]
    (again,) = trainer.validate(module, loaders(world)[1], verbose=False)
    assert again["heldout"] == pytest.approx(found[0][1], rel=1e-6)
    found.append(figures(*fitted(pl, world, "shardwright", precision="bf16-mixed")))
    found.append(figures(*fitted(pl, world, "shardwright", gradient_clip_algorithm="value")))
    callbacks = import_module(f"{package}.callbacks")
    callback = callbacks.ModelCheckpoint(folder, "best", "heldout", save_last=True)
    options = {"callbacks": [callback], "enable_checkpointing": True, "max_epochs": 1}
    trainer, module = fitted(pl, world, "shardwright", **options)
    trainer.save_checkpoint(folder / "by-hand.ckpt")
    trainer.save_checkpoint(folder / "by-hand.ckpt")  # replaces it
    trainer, module = fitted(pl, world, ours(None, state_dict_type="full"), max_epochs=1)
    trainer.save_checkpoint(folder / "whole.ckpt")
    trainer.save_checkpoint(folder / "whole.ckpt")
    return found


def resumed(rank, world, package, folder):
    as_torchrun(rank, world, 29999)
    pl = import_module(package)
    import_module("shardwright.lightning")
    found = []
    for name in ("last.ckpt", "by-hand.ckpt", "whole.ckpt", "alone.ckpt"):
        module = module_of(pl, nested=True, seed=9)
        trainer, module = fitted(pl, world, "shardwright", str(folder / name), module)
        assert trainer.global_step == 4
        found.append(figures(trainer, module))
    (best,) = trainer.validate(module, loaders(world)[1], ckpt_path=str(folder / "best.ckpt"), verbose=False)
    return found, best["heldout"]


def equal(found, expected, norms=slice(None)):
    assert found[0] == pytest.approx(expected[0][norms], rel=1e-3)
    assert found[1] == pytest.approx(expected[1], rel=1e-3)
    return all(torch.allclose(a, b, atol=1e-3) for a, b in zip(found[2], expected[2], strict=True))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_fit_is_that_of_one_process_and_resumes_at_another_number_of_ranks(package, tmp_path):
    ((whole, halves, by_value),) = run_ranks(1, alone, package, tmp_path)
    assert len(whole[0]) == 4
    assert min(whole[0]) > 0.05  # so each was clipped
    for plain, mixed, clipped in run_ranks(2, several, package, tmp_path):
        assert equal(plain, whole)
        assert equal(clipped, by_value)
        assert mixed[1] == pytest.approx(halves[1], rel=0.02)
    for found, best in run_ranks(3, resumed, package, tmp_path):
        assert all(equal(each, whole, slice(2, None)) for each in found)
        assert best > whole[1]  # of the epoch before
    assert (tmp_path / "whole.ckpt").is_file()
    assert all(equal(each, whole, slice(2, None)) for each in run_ranks(1, goes_on_alone, package, tmp_path))
