"""Published weights for vLLM and SGLang, by the calls with which each takes new ones.

    vLLM     LLM(..., worker_extension_cls="shardwright.publishing.engines.VllmExtension")
             llm.collective_rpc("update_weights_from", args=("tcp://trainer:5555",))
    SGLang   update_sglang(engine, shardwright.receive("tcp://trainer:5555"))

Both take whole tensors under the names of the model's files, in any order, and shard them themselves.
"""

from inspect import signature
from typing import Any

import torch

from shardwright.errors import CommError
from shardwright.publishing.receiver import Receiver, receive

BUCKET_NBYTES = 512 << 20


class VllmExtension:
    """What a worker of vLLM has besides, by ``LLM(worker_extension_cls=...)``: every worker receives."""

    model_runner: Any  # the worker's

    def update_weights_from(self, address: str, timeout: float = 60.0) -> int:
        """Load the newest version. Every worker process calls it, by ``LLM.collective_rpc``.

        Args:
            address: as ``receive`` takes it. The connection is kept for the next call.
            timeout: seconds to wait for the first version.

        Returns:
            The version's number.

        Raises:
            CommError: as ``Receiver.wait``.
            InputError: the address is none.
            ConfigError: ``SHARDWRIGHT_SECRET`` is too short.
            MissingExtra: as ``receive``.
        """
        receivers, runner = self.__dict__.setdefault("_shardwright_receivers", {}), self.model_runner
        if address not in receivers:
            receivers[address] = receive(address, timeout=timeout)
        weights, reload = iter(receivers[address]), getattr(runner, "reload_weights", None)
        try:
            # It undoes what kernels have made of the weights, and makes it anew (vLLM 0.32). A version where
            # it takes none, or is missing, has the model's own call.
            if reload is not None and "weights_iterator" in signature(reload).parameters:
                reload(weights_iterator=weights)
            else:
                runner.model.load_weights(weights=weights)
        except BaseException:  # the next call connects anew
            receivers.pop(address).close()
            raise
        return receivers[address].version


def update_sglang(engine: Any, receiver: Receiver, *, bucket_nbytes: int = BUCKET_NBYTES) -> int:
    """Load the newest version into an engine of SGLang. The process that has the engine calls it.

    Args:
        engine: with ``update_weights_from_tensor(named_tensors, load_format=, flush_cache=)``, and of SGLang
            0.5.21 or later ``begin_weight_update()`` and ``end_weight_update()``, which are called around it.
        receiver: of ``receive``.
        bucket_nbytes: bytes of the tensors of one call, if a tensor has no more; memory of the host.

    Returns:
        The version's number.

    Raises:
        CommError: as ``Receiver.wait``, or the engine refuses.
    """
    bucket, nbytes = list[tuple[str, torch.Tensor]](), 0

    def ask(call: str, *args: Any, **options: Any) -> None:
        answer = getattr(engine, call)(*args, **options)
        if isinstance(answer, dict):  # over HTTP
            answer = answer.get("success", True), answer.get("message", "")
        if isinstance(answer, tuple) and not answer[0]:
            raise CommError(f"SGLang has refused version {receiver.version}: {answer[1]}")

    def load(is_last: bool) -> None:
        # What was computed with the old weights goes when the last of the new ones are there.
        ask("update_weights_from_tensor", list(bucket), load_format=None, flush_cache=is_last)
        bucket.clear()

    has_sessions = hasattr(engine, "begin_weight_update")
    if has_sessions:
        ask("begin_weight_update")
    try:
        for name, tensor in receiver:
            if bucket and nbytes + tensor.nbytes > bucket_nbytes:
                load(False)
                nbytes = 0
            bucket.append((name, tensor))
            nbytes += tensor.nbytes
        load(True)
    except BaseException:
        if has_sessions:  # else the next call finds this one open, and is refused
            engine.end_weight_update()
        raise
    if has_sessions:
        ask("end_weight_update")
    return receiver.version
