"""Two hosts on one machine: network namespaces with names and addresses of their own, joined by a cable."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ranks.slurm import Node


@contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Two of ``nodes``."""
    with nodes(2) as made:
        yield made


@contextmanager
def nodes(count: int) -> Iterator[list[Node]]:
    """Nodes that see each other by name, and nothing else; skips where they can't be made.

    Each has ``wire``, with the address 10.79.0.<number + 1>; of more than two it leads to a bridge.
    """
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("two network namespaces need root, ip and unshare")
    names = [f"shardwright-{os.getpid()}-{number}" for number in range(count)]
    with ExitStack() as stack:
        bridge = f"shardwright-{os.getpid()}-bridge"
        for name in [*names, bridge] if count > 2 else names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("this machine makes no network namespaces")
            stack.callback(_ip, "netns", "del", name)
        if count > 2:
            _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
            _ip("-n", bridge, "link", "set", "bridge", "up")
            for number, name in enumerate(names):
                _ip(*f"-n {name} link add wire type veth peer name port{number} netns {bridge}".split())
                _ip(*f"-n {bridge} link set port{number} master bridge up".split())
        else:
            _ip(*f"-n {names[0]} link add wire type veth peer name wire netns {names[1]}".split())
        for number, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.79.0.{number + 1}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", name, "link", "set", device, "up")
            hosts = hosts_of(name)
            hosts.parent.mkdir(parents=True)
            stack.callback(shutil.rmtree, hosts.parent)
            lines = [f"10.79.0.{other + 1} {names[other]}" for other in range(count)]
            hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        yield [Node(name, _words(name)) for name in names]


def cut(node: Node, on: bool = True) -> None:
    """Take a node of more than two from the bridge (on: False puts it back): it goes dark for the others, and
    they for it, without a word to any of them."""
    prefix, _, number = node.name.rpartition("-")
    _ip(
        "-n",
        f"{prefix}-bridge",
        "link",
        "set",
        f"port{number}",
        *(["nomaster"] if on else ["master", "bridge"]),
    )


def hosts_of(name: str) -> Path:
    """The file that is /etc/hosts on a node, for what is started there from then on."""
    return Path("/etc/netns", name, "hosts")


def _words(name: str) -> tuple[str, ...]:
    rename = f'hostname {name}; exec "$@"'
    return ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename, "sh")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
