"""How the ranks of a job find each other over TCP: each connects to rank 0, and rank 0 sends all their addresses.

Rank 0 listens at MASTER_ADDR and MASTER_PORT, the variables of PyTorch's launchers. torchrun's agent has that port for
a store of its own (TORCHELASTIC_USE_AGENT_STORE); then rank 0 takes the first free one of the ports after it. The other
ranks try these ports. Both sides first prove that they belong to the same job, so that two jobs on a host do not mix.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from hashlib import sha256
from time import monotonic, sleep
from typing import NamedTuple

from adtrain.core.errors import AdtrainError

PORTS = 16
"""How many ports after MASTER_PORT are tried."""
DEFAULT_PORT = "29500"
"""The port if MASTER_PORT is not set, as in PyTorch."""
ANSWER_SECONDS = 2.0
"""How long a listening process may take to identify itself."""
PAUSE_SECONDS = 0.1
"""The time between two attempts to reach rank 0."""
SECRET = "ADTRAIN_JOB"
"""The variable with a random text that only the processes of one `--ranks` job know."""
_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
        "SLURM_STEP_ID", SECRET)  # fmt: skip


class Meeting(NamedTuple):
    """Where the ranks of a job meet.

    Attributes:
        address: of rank 0's host.
        ports: rank 0 listens at the first one that is free.
        job: a text that is the same on all ranks, and another one for another job.
    """

    address: str
    ports: range
    job: str

    def proof(self, side: str) -> str:
        """What one side of a connection presents to the other."""
        return sha256(f"{side} {self.job}".encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.address}:{self.ports[0]}"


def meeting(environment: Mapping[str, str], size: int) -> Meeting | None:
    """Where the ranks meet, from the variables of torchrun or, without them, of a step of Slurm; None without both."""
    job = json.dumps([size, *(environment.get(name) for name in _JOB)])
    if address := environment.get("MASTER_ADDR"):
        text = environment.get("MASTER_PORT", DEFAULT_PORT)
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
            raise AdtrainError(
                f"found MASTER_PORT={text!r} in the environment, expected a port, such as {DEFAULT_PORT}"
            )
        port = int(text)
        taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Meeting(address, range(port + taken, min(port + taken + PORTS, 1 << 16)), job)
    if nodes := environment.get("SLURM_STEP_NODELIST"):
        number = int(environment.get("SLURM_JOB_ID", 0)) * 7 + int(environment.get("SLURM_STEP_ID", 0))
        first = 20000 + number * PORTS % 8000
        return Meeting(first_host(nodes), range(first, first + PORTS), job)
    return None


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: "gpu[03-05,9],login" is gpu03 and others."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\])?([^,]*)", nodes)
    assert match is not None  # the pattern matches the empty text too
    return "".join(part or "" for part in match.groups())


class Peer(NamedTuple):
    """A rank's listener.

    Attributes:
        name: of its host.
        address: of its host, as rank 0 sees it.
    """

    name: str
    address: str
    port: int


def meet(where: Meeting, rank: int, size: int, timeout: float) -> tuple[socket.socket, list[Peer]]:
    """This rank's listener, to which other ranks can connect, and the listeners of all ranks.

    Raises:
        AdtrainError: some ranks do not come within `timeout` seconds.
    """
    deadline = monotonic() + timeout
    if rank == 0:
        return _receive_all(where, size, deadline)
    with closing(_reach(where, rank, deadline)) as connection, connection.makefile("rb") as lines:
        listener = _listen(connection.getsockname()[0], range(1))
        port = listener.getsockname()[1]
        _send(connection, {"proof": where.proof("joins"), "rank": rank, "name": socket.gethostname(), "port": port})
        connection.settimeout(max(1.0, deadline - monotonic()))
        try:
            peers = json.loads(lines.readline())
        except (OSError, ValueError):
            raise AdtrainError(f"rank 0 at {where} has ended before all ranks had come") from None
        first, *others = (Peer(*peer) for peer in peers)
        return listener, [first._replace(address=connection.getpeername()[0]), *others]


def _receive_all(where: Meeting, size: int, deadline: float) -> tuple[socket.socket, list[Peer]]:
    """Rank 0: wait for all others, and send them the list of ranks."""
    try:
        listener = _listen("127.0.0.1" if _is_local(where.address) else "", where.ports)
    except OSError as error:
        raise AdtrainError(
            f"rank 0 cannot listen at {where} or a port up to {where.ports[-1]} ({error.strerror}); set MASTER_PORT"
        ) from None
    port: int = listener.getsockname()[1]
    peers = {0: Peer(socket.gethostname(), "", port)}
    connections: list[socket.socket] = []
    try:
        while len(peers) < size:
            listener.settimeout(max(0.001, deadline - monotonic()))
            connection, (address, *_) = listener.accept()
            if joining := _joining(connection, where):
                rank, name, joining_port = joining
                peers[rank] = Peer(name, address, joining_port)
                connections.append(connection)
            else:
                connection.close()
    except TimeoutError:
        listener.close()
        for connection in connections:
            connection.close()
        missing = ", ".join(str(rank) for rank in range(size) if rank not in peers)
        raise AdtrainError(
            f"rank {missing} did not connect to rank 0 at {where.address}:{port} in time: "
            "start all ranks, and let their hosts reach this port"
        ) from None
    everyone = [peers[rank] for rank in range(size)]
    for connection in connections:
        with closing(connection), suppress(OSError):  # the watchdog says which rank died
            _send(connection, everyone)
    return listener, everyone


def _joining(connection: socket.socket, where: Meeting) -> tuple[int, str, int] | None:
    """The rank, host and port of the process that connected; None if it is no rank of this job."""
    try:
        connection.settimeout(ANSWER_SECONDS)
        _send(connection, {"proof": where.proof("listens")})
        with connection.makefile("rb") as lines:
            message = json.loads(lines.readline())
        return (message["rank"], message["name"], message["port"]) if message["proof"] == where.proof("joins") else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _reach(where: Meeting, rank: int, deadline: float) -> socket.socket:
    """A connection to rank 0."""
    while monotonic() < deadline:
        for port in where.ports:
            try:
                connection = socket.create_connection((where.address, port), timeout=ANSWER_SECONDS)
            except OSError:
                continue
            try:
                with connection.makefile("rb") as lines:
                    if json.loads(lines.readline(256))["proof"] == where.proof("listens"):
                        return connection
            except (OSError, ValueError, KeyError, TypeError):  # something else listens there
                pass
            connection.close()
        sleep(PAUSE_SECONDS)
    raise AdtrainError(
        f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {where} or the ports after it: "
        "start rank 0, and let this host reach its port"
    )


def _listen(address: str, ports: range) -> socket.socket:
    """A listener at the first port that is free."""
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, dualstack_ipv6=both, backlog=1024)
        except OSError as error:
            problem = error
    raise problem


def _is_local(address: str) -> bool:
    try:
        addresses = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(socket_address[0] == "127.0.0.1" for *_, socket_address in addresses)


def _send(connection: socket.socket, message: object) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
