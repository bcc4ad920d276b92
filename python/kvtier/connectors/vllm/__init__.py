"""The connection to vLLM: `KvtierConnector`, and the plugin that registers its short name.

vLLM is imported at first use of `KvtierConnector`.
"""

from __future__ import annotations

import contextlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kvtier.connectors.vllm.connector import KvtierConnector

__all__ = ["KvtierConnector", "register"]


def register() -> None:
    """Make the short name `KvtierConnector` known to vLLM; called by vLLM through the entry point `kvtier`."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # vLLM loads its plugins more than once in some processes
        KVConnectorFactory.register_connector("KvtierConnector", __name__ + ".connector", "KvtierConnector")


def __getattr__(name: str) -> object:
    if name != "KvtierConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.connectors.vllm.connector import KvtierConnector

    return KvtierConnector
