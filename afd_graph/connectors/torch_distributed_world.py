"""The world of the ``torch_distributed`` connector: who is who, and what all ranks must agree on.

One process group holds both roles, attention first::

    rank   0 .. T-1 | T .. 2T-1 | ...        | A .. A+F-1
    role   replica 0  replica 1   attention    ffn 0 .. F-1

``A`` attention ranks are ``A / T`` data-parallel replicas of ``T`` tensor-parallel ranks. ``F``
FFN ranks own equal, contiguous shares of the experts of every layer; how many there are does not
depend on ``A`` or ``T``. The ranks come from ``torchrun`` or from whoever initialised
torch.distributed.

Every rank writes its settings to the process group's store; every rank reads all of them and
compares. So all ranks come to the same answer, and to the same message when they differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from afd_graph import _compat
from afd_graph._version import __version__
from afd_graph.connectors.torch_distributed_meeting import (
    make_group,
    open_store,
    parse_address,
    take_place,
)
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.validation import (
    check_capacity,
    check_expert_partition,
    check_integer,
    check_ranks_agree,
    parse_bool,
)

PROTOCOL = 2
"""Version of the messages; ranks of different versions do not talk."""

_BACKENDS = {"cpu": "gloo", "npu": "cpu:gloo,npu:hccl"}
_POLL_S = 0.05
_READ_S = 5.0  # longest that rank 0 waits for the others to read what it read
_TOLD_S = 1.0  # how long rank 0 stays when it is known that the ranks will not meet
_MAX_ROWS = 1 << 31
LEAST_TIMEOUT_S = 0.5
_OF_ONE_RANK = ("address", "rank", "connect_timeout_s")


@dataclass(frozen=True)
class WorldConfig:
    """What one rank brings to the world.

    Attributes:
        ffn_ranks: number of FFN ranks.
        attention_ranks: number of attention ranks, all replicas together; ``None`` takes the
            ranks of the process group that are left.
        tp_size: attention ranks of one replica. An FFN rank serves a dispatch when all of them
            have sent their part.
        max_tokens: most tokens of one replica's step; a rank dispatches at most its share. An FFN
            rank may give 0 and takes that of the attention ranks.
        dynamic_quant: send int8 rows with one fp32 scale each to the experts.
        credits: un-received dispatches of one attention rank.
        model: fingerprint of the checkpoint (:meth:`afd_graph.checkpoint.Checkpoint.fingerprint`);
            empty when there is none.
        dtype: dtype of the rows, such as ``bfloat16``; empty leaves it to the programs.
        policy: split policy of the attention ranks; an FFN rank may leave it empty.
        device: type of device of rows and weights: ``cpu`` (gloo) or ``npu`` (HCCL, with gloo for
            the headers).
        timeout_s: seconds after which a rank that does not respond is an error.
        connect_timeout_s: seconds that ranks may take to start and to load their weights.
        latency_s: seconds by which every message is delayed; for benchmarks on one machine.
        address: ``HOST:PORT`` where attention rank 0 listens, for ranks without a process group in
            common (:mod:`torch_distributed_meeting`); needs ``attention_ranks`` and ``rank``.
        rank: this rank, with an ``address``.
    """

    ffn_ranks: int
    attention_ranks: int | None = None
    tp_size: int = 1
    max_tokens: int = 8192
    dynamic_quant: bool = False
    credits: int = 2
    model: str = ""
    dtype: str = ""
    policy: str = ""
    device: str = "cpu"
    timeout_s: float = 60.0
    connect_timeout_s: float = 600.0
    latency_s: float = 0.0
    address: str = ""
    rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("ffn_ranks", "tp_size", "credits"):
            check_integer(name, getattr(self, name), least=1)
        check_integer("max_tokens", self.max_tokens, least=0)
        object.__setattr__(self, "dynamic_quant", parse_bool("dynamic_quant", self.dynamic_quant))
        if self.max_tokens:
            check_capacity(
                max_tokens=self.max_tokens,
                tensor_parallel_size=self.tp_size,
                receive_capacity=_MAX_ROWS,
                max_sequence_rows=_MAX_ROWS,
            )
        if self.device not in _BACKENDS:
            raise ConfigError(
                f"device={self.device!r} is not known", remedy=f"use one of {tuple(_BACKENDS)}"
            )
        if self.dtype and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ConfigError(
                f"dtype={self.dtype!r} is not a dtype", remedy="use a name such as 'bfloat16'"
            )
        for name, least in (
            ("timeout_s", LEAST_TIMEOUT_S),
            ("connect_timeout_s", LEAST_TIMEOUT_S),
            ("latency_s", 0.0),
        ):
            if not least <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is too small", remedy=f"use {least:g} or more"
                )
        if self.attention_ranks is not None:
            check_integer("attention_ranks", self.attention_ranks, least=1)
            if self.attention_ranks % self.tp_size:
                raise ConfigError(
                    f"tp_size={self.tp_size} does not divide "
                    f"attention_ranks={self.attention_ranks}",
                    remedy="tp_size is the number of attention ranks of one replica",
                )
        if self.address:
            self._check_address()

    def _check_address(self) -> None:
        parse_address(self.address)
        if self.device != "cpu":
            raise ConfigError(
                f"an address needs device='cpu', and this is {self.device!r}",
                remedy="start the ranks of both roles with torchrun",
            )
        if self.attention_ranks is None or self.rank is None:
            raise ConfigError(
                "an address does not tell how many ranks there are and which one this is",
                remedy="give attention_ranks and rank as well",
            )
        size = self.attention_ranks + self.ffn_ranks
        if not 0 <= self.rank < size:
            raise ConfigError(
                f"rank={self.rank!r} is not in a world of {size} ranks",
                remedy="attention ranks come first, then the FFN ranks",
            )

    @property
    def backend(self) -> str:
        """Backend of torch.distributed."""
        return _BACKENDS[self.device]

    @property
    def rows_per_dispatch(self) -> int:
        """Most tokens that one attention rank dispatches at once."""
        return self.max_tokens // self.tp_size


@dataclass(frozen=True)
class Ranks:
    """Roles of the ranks of a world.

    Attributes:
        attention: number of attention ranks.
        ffn: number of FFN ranks.
        tp: attention ranks of one replica.
    """

    attention: int
    ffn: int
    tp: int

    @property
    def size(self) -> int:
        """Ranks of both roles."""
        return self.attention + self.ffn

    @property
    def ffn_ranks(self) -> range:
        """World ranks of the FFN role."""
        return range(self.attention, self.size)

    def is_ffn(self, rank: int) -> bool:
        """Whether ``rank`` has the FFN role."""
        return rank >= self.attention

    def replica(self, rank: int) -> int:
        """The data-parallel replica of an attention rank."""
        return rank // self.tp

    def replica_ranks(self, replica: int) -> range:
        """World ranks of one replica, in tensor-parallel order."""
        return range(replica * self.tp, (replica + 1) * self.tp)

    def name(self, rank: int) -> str:
        """``rank 6 (ffn 0)``."""
        role = f"ffn {rank - self.attention}" if self.is_ffn(rank) else f"attention {rank}"
        return f"rank {rank} ({role})"

    def expert_range(self, rank: int, num_experts: int) -> tuple[int, int]:
        """First and last expert, exclusive, of an FFN rank.

        Raises:
            ConfigError: the FFN ranks do not divide the experts.
        """
        each = check_expert_partition(num_experts, self.ffn)
        first = (rank - self.attention) * each
        return first, first + each


class World:
    """This process's place in the process group of both roles.

    Attributes:
        config: what this rank brought.
        ranks: roles.
        rank: this rank.
        tp_group: process group of this replica; None for one rank, and on FFN ranks.
        requests: process group of all ranks.
        answers: process group that answers travel in. On a device it is one of its own, because
            a device runs the transfers of a pair of ranks in one group one after the other.
        store_holder: who holds the store, in words.
    """

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        if config.address:
            assert config.rank is not None
            assert config.attention_ranks is not None
            self.rank = config.rank
            size = config.attention_ranks + config.ffn_ranks
            store = open_store(
                config.address, listen=self.rank == 0, timeout_s=config.connect_timeout_s
            )
        else:
            _init_default_group(config)
            size, self.rank = dist.get_world_size(), dist.get_rank()
            store = _compat.default_store()
        self._store: Any = dist.PrefixStore("afd", store)
        attention = config.attention_ranks or size - config.ffn_ranks
        # Before any group is made: a rank with another topology would make other groups, and the
        # ranks would wait for each other.
        topology = {
            "ffn_ranks": config.ffn_ranks,
            "attention_ranks": attention,
            "tp_size": config.tp_size,
            "device": config.device,
        }
        if config.address:
            self._check_topology(topology)
            take_place(self._store, self.rank)
        told = self._exchange("topology", topology, [f"rank {rank}" for rank in range(size)])
        check_ranks_agree(told)
        if attention < 1 or attention + config.ffn_ranks != size or attention % config.tp_size:
            raise ConfigError(
                f"{size} ranks are not {attention} attention ranks (replicas of "
                f"{config.tp_size}) and {config.ffn_ranks} FFN ranks",
                remedy="start attention_ranks + ffn_ranks processes",
            )
        self.ranks = Ranks(attention, config.ffn_ranks, config.tp_size)
        holder = self.ranks.name(0)
        self.store_holder = holder if config.address else f"torchrun, or else in {holder},"
        self.tp_group: dist.ProcessGroup | None = None
        if config.address:
            self.requests = make_group(self._store, self.rank, size, config.connect_timeout_s)
            self.answers = self.requests
            return
        limit = timedelta(seconds=config.timeout_s)
        if config.tp_size > 1:
            # Every rank takes part in making every group.
            for replica in range(attention // config.tp_size):
                members = list(self.ranks.replica_ranks(replica))
                group = dist.new_group(members, timeout=limit)
                if self.rank in members:
                    self.tp_group = group
        self.requests = self.answers = _compat.default_group()
        if config.device != "cpu":
            self.answers = dist.new_group(backend=config.backend)

    @property
    def name(self) -> str:
        """``rank 6 (ffn 0)``: this rank."""
        return self.ranks.name(self.rank)

    @property
    def replica(self) -> int:
        """The data-parallel replica of this attention rank."""
        return self.ranks.replica(self.rank)

    def tp_mesh(self) -> DeviceMesh:
        """The mesh that ``parallelize_module`` takes, of this replica's ranks.

        Raises:
            ConfigError: this rank has no tensor-parallel group.
        """
        if self.tp_group is None:
            raise ConfigError(
                f"{self.name} has no tensor-parallel group",
                remedy="only attention ranks have one, with tp_size of 2 or more",
            )
        return DeviceMesh.from_group(self.tp_group, self.config.device)

    def store(self) -> dist.Store:
        """A client of the store for one thread of its own."""
        own: dist.Store = self._store.clone()
        return own

    def describe(self, model: str, dtype: str) -> None:
        """Add to :attr:`config` what is known once the checkpoint has been opened."""
        self.config = dataclasses.replace(self.config, model=model, dtype=dtype)

    def agree(self, policy: str = "") -> None:
        """Meet all other ranks and compare settings; returns when all agree.

        Args:
            policy: in place of the configuration's.

        Raises:
            ConfigError: the same on all ranks, naming each setting that differs and where.
            ConnectorError: ranks did not come within ``connect_timeout_s``, or one gave up.
        """
        facts = dataclasses.asdict(dataclasses.replace(self.config, policy=policy))
        for known in (*_OF_ONE_RANK, "device", "ffn_ranks", "attention_ranks", "tp_size"):
            del facts[known]
        facts["version"] = f"{__version__} (protocol {PROTOCOL}, torch {torch.__version__})"
        names = [self.ranks.name(rank) for rank in range(self.ranks.size)]
        settings = self._exchange("settings", facts, names)
        stated = settings[names[0]]
        for name in names[self.ranks.attention :]:
            for left in ("policy", "max_tokens"):
                settings[name][left] = settings[name][left] or stated[left]
        check_ranks_agree(settings)
        if not stated["max_tokens"]:
            raise ConfigError(
                f"{names[0]} was given max_tokens=0",
                remedy="only an FFN rank may leave it to the attention ranks",
            )
        self.config = dataclasses.replace(self.config, max_tokens=stated["max_tokens"])

    def _check_topology(self, mine: dict[str, Any]) -> None:
        """Compare with attention rank 0: ranks that count differently could share a number."""
        theirs = self.share("topology", mine if self.rank == 0 else None)
        try:
            check_ranks_agree({"attention rank 0": theirs, "this rank": mine})
        except ConfigError as error:
            self._tell_failure(f"a rank failed before the handshake: {error}")
            raise

    def _exchange(
        self, what: str, facts: dict[str, Any], names: list[str]
    ) -> dict[str, dict[str, Any]]:
        """Give ``facts`` to all ranks, and get those of all ranks by their names."""
        store = self.store()
        keys = [f"{what} {rank}" for rank in range(len(names))]
        store.set(keys[self.rank], json.dumps(facts))
        limit = self.config.connect_timeout_s
        deadline = time.monotonic() + limit
        # Asked again and again, not awaited: Ctrl-C must get through.
        while not self._asked(store.check, keys):
            self._raise_if_given_up(store)
            if time.monotonic() > deadline:
                missing = [
                    name
                    for key, name in zip(keys, names, strict=True)
                    if not self._asked(store.check, [key])
                ]
                if not missing:
                    break  # the last one came since it was asked for
                late = f"did not come to the handshake within {limit:g} s: {', '.join(missing)}"
                self._tell_failure(late)
                raise ConnectorError(
                    late, remedy="see the messages of these ranks, or raise connect_timeout_s"
                )
            time.sleep(_POLL_S)
        texts = store.multi_get(keys)
        store.set(f"{keys[self.rank]} read", "")
        if self.rank == 0:
            # This process may hold the store, and end when the settings differ.
            read = [f"{key} read" for key in keys]
            deadline = time.monotonic() + _READ_S
            while time.monotonic() < deadline and not self._asked(store.check, read):
                time.sleep(_POLL_S)
        return {name: json.loads(text) for name, text in zip(names, texts, strict=True)}

    def share(self, name: str, value: Any = None) -> Any:
        """Give ``value``, as JSON, to all ranks; where it is None, wait for the one who does.

        Raises:
            ConnectorError: a rank gave up before the handshake.
        """
        store = self.store()
        if value is not None:
            store.set(f"shared {name}", json.dumps(value))
            return value
        while not self._asked(store.check, [f"shared {name}"]):
            self._raise_if_given_up(store)
            time.sleep(_POLL_S)
        return json.loads(store.get(f"shared {name}"))

    def give_up(self, error: BaseException) -> None:
        """Tell the ranks that wait in :meth:`agree` that this one will not come."""
        self._tell_failure(f"{self.name} failed before the handshake: {error}")

    def _tell_failure(self, what: str) -> None:
        """Tell all ranks why they will not meet; the first cause is kept."""
        with contextlib.suppress(RuntimeError):  # the store's holder may be gone
            self.store().compare_set("gave up", "", what)
            self._stay()

    def _stay(self) -> None:
        if self.rank == 0:  # this process may hold the store; the others read the cause there
            time.sleep(_TOLD_S)

    def _asked(self, question: Callable[[list[str]], bool], keys: list[str]) -> bool:
        try:
            return question(keys)
        except RuntimeError as error:
            raise ConnectorError(
                "the store of the ranks is gone before the handshake, and with it the process "
                "that holds it: rank 0 (attention 0), or torchrun where that started it",
                remedy="see the messages of that process",
            ) from error

    def _raise_if_given_up(self, store: dist.Store) -> None:
        if store.check(["gave up"]):
            self._stay()
            raise ConnectorError(
                store.get("gave up").decode(), remedy="see the messages of that rank"
            )


def _init_default_group(config: WorldConfig) -> None:
    if dist.is_initialized():
        return
    try:
        dist.init_process_group(config.backend, timeout=timedelta(seconds=config.connect_timeout_s))
    except (RuntimeError, ValueError) as error:
        raise ConnectorError(
            f"the process group was not made: {error}".splitlines()[0],
            remedy="start all ranks with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT",
        ) from error
