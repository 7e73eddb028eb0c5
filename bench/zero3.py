"""DeepSpeed ZeRO-3, where the package is installed (it is no dependency: ``pip install deepspeed``).

Its first use compiles an extension: it needs a C++ compiler and about a minute, which --limit-s must allow.
Ended meanwhile, it leaves a file ``lock`` under ``~/.cache/torch_extensions`` that later runs wait for.
"""

import os

import deepspeed
import torch.distributed as dist
from torch import Tensor

from bench.model import Transformer
from bench.systems import System


class Zero3(System):
    """ZeRO stage 3 with the engine's own backward and step, driving the same AdamW."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # only its bookkeeping: batches are made by the bench
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        os.environ["LOCAL_RANK"] = str(dist.get_rank())  # it insists on a launcher's variable
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=settings, dist_init_required=False
        )

    def step(self, tokens: Tensor) -> Tensor:
        """One step through the engine."""
        loss: Tensor = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def communication_s(self) -> None:
        """Not known: the engine decides what it gathers as it goes."""
        return


def build(model: Transformer) -> System:
    """The system for a model; every rank calls it."""
    return Zero3(model)
