"""Two nodes on one machine: each has an address and a torchrun of its own, and can be killed or cut off.

Network namespaces with a cable between them where this process may make some (root, and `ip`): there 127.0.0.1 of one
is not that of the other, as with two machines. Elsewhere two addresses of the loopback interface, whose cable nobody
can cut.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

from shardwise.sharding.testing.environment import get_free_port

LAUNCH = Path(__file__).resolve().parents[3] / "examples" / "launch"
_made = itertools.count()


@cache
def namespaces_can_be_made() -> bool:
    """Whether this process may make network namespaces: it makes one, and removes it."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return False
    name = f"sw{os.getpid()}probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    if tried.returncode:
        return False
    # a pair of devices across namespaces may be forbidden where a namespace is not
    cable = ["ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", "eth1", "netns", name]
    allowed = subprocess.run(cable, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=True)
    return allowed


class TwoNodes:
    """The nodes, while the block runs; all that they started is killed after it, and the namespaces are removed."""

    def __init__(self, folder: Path, *, namespaces: bool) -> None:
        self.namespaces = namespaces
        self.addresses = ["10.77.0.1", "10.77.0.2"] if namespaces else ["127.0.0.1", "127.0.0.2"]
        # a namespace has all ports for itself
        self.port = 29400 if namespaces else get_free_port()
        self._folder = folder
        self._names = [f"sw{os.getpid()}x{next(_made)}" for _ in range(2)] if namespaces else []
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._launches = 0

    def __enter__(self) -> TwoNodes:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.namespaces:
            try:
                self._lay_cable()
            except BaseException:
                self._remove_namespaces()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for node in range(2):
            self.kill(node)
        self._remove_namespaces()

    def _lay_cable(self) -> None:
        first, second = self._names
        for name in self._names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in zip(self._names, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")

    def _remove_namespaces(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    @property
    def interface(self) -> str:
        """What gloo has to be told to use; the name of this machine is that of neither node."""
        return "eth0" if self.namespaces else "lo"

    def environment(self, node: int, more: Mapping[str, str]) -> dict[str, str]:
        """Variables of a node: those of this process without a launcher's, and what is measured here needs."""
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in launcher and not name.startswith(("TORCHELASTIC_", "SLURM_", "JOB_COMPLETION"))
        }
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        # on the loopback interface every address reaches node 0 from node 0's
        own = {} if self.namespaces else {"LOCAL_ADDR": self.addresses[node]}
        return {
            **kept, "PATH": path, "PYTHONPATH": str(LAUNCH.parents[1]), "OMP_NUM_THREADS": "1",
            "PORT": str(self.port), "GLOO_SOCKET_IFNAME": self.interface, **own, **more,
        }  # fmt: skip

    def inside(self, node: int) -> list[str]:
        """What stands before a command that runs on a node."""
        return ["ip", "netns", "exec", self._names[node]] if self.namespaces else []

    def start(
        self, node: int, command: Sequence[str], more: Mapping[str, str] | None = None, *, outside: bool = False
    ) -> Path:
        """Starts a command on a node, or `outside` of it for one that enters nodes by itself; the file of its words."""
        self._launches += 1
        log = self._folder / f"node{node}-{self._launches}.log"
        inside = [] if outside else self.inside(node)
        with log.open("wb") as file:
            self._launchers[node] = subprocess.Popen(
                [*inside, *command],
                stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                env=self.environment(node, more or {}), start_new_session=True, cwd=LAUNCH.parents[1],
            )  # fmt: skip
        return log

    def train(self, node: int, *arguments: str, nodes: str = "2") -> Path:
        """Starts `two_nodes.py` on a node by `torchrun.sh`."""
        program = [str(LAUNCH / "two_nodes.py"), *arguments]
        return self.start(node, [str(LAUNCH / "torchrun.sh"), str(node), nodes, self.addresses[0], *program])

    def kill(self, node: int) -> None:
        """Ends every process of a node at once, as a power cut does."""
        launcher = self._launchers.pop(node, None)
        if launcher is None:
            return
        for pid in self.processes(node, launcher.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()

    def processes(self, node: int, launcher: int) -> list[int]:
        """All processes of a node, those of the launcher first."""
        pids = [launcher, *descendants(launcher)]
        if self.namespaces:
            pids += map(int, ip("netns", "pids", self._names[node]).split())
        return list(dict.fromkeys(pids))

    def cut(self) -> None:
        """Nothing gets through between the nodes from now on, and neither is told."""
        ip("-n", self._names[1], "link", "set", "eth0", "down")

    def mend(self) -> None:
        """The cable is whole again."""
        ip("-n", self._names[1], "link", "set", "eth0", "up")

    def status(self, node: int) -> int | None:
        """The exit status of a node's launcher; None while it runs."""
        return self._launchers[node].poll()

    def wait(self, until: Callable[[], bool], seconds: float, what: str) -> float:
        """How long it took until something is so.

        Raises:
            TimeoutError: it is not after so many seconds; with the ends of what the nodes printed.
        """
        begin = time.monotonic()
        while not until():
            if time.monotonic() - begin > seconds:
                raise TimeoutError(f"{what}: not within {seconds:.0f} s\n{self.printed()}")
            time.sleep(0.1)
        return time.monotonic() - begin

    def ended(self, seconds: float) -> list[int]:
        """The statuses of all launchers, once they ended."""
        nodes = sorted(self._launchers)
        self.wait(lambda: all(self.status(node) is not None for node in nodes), seconds, "an end of the run")
        return [self._launchers[node].wait() for node in nodes]

    def printed_by(self, node: int) -> str:
        """All that the launches of a node printed."""
        logs = sorted(self._folder.glob(f"node{node}-*.log"))
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def printed(self) -> str:
        """The end of what each launch printed."""
        logs = sorted(self._folder.glob("node*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def ip(*arguments: str) -> str:
    """What the command `ip` prints.

    Raises:
        RuntimeError: it fails; with what it says.
    """
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started, as far as their parents live."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # a process may end while it is looked at; the name of its program, in parentheses, may hold anything
        with suppress(FileNotFoundError, ProcessLookupError):
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    all_of, left = [], [pid]
    while left:
        left = [child for parent in left for child in children.get(parent, [])]
        all_of += left
    return all_of
