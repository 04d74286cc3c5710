"""A thousand clients at once, and the order in which they are served."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from soaklib.dialects import NATIVE
from soaklib.ledger import ANSWERED, BUSY, LEFT, Ledger
from soaklib.server import N_SLOTS
from soaklib.visit import Scene, is_busy, json_of
from soaklib.wire import Connection

KIND = "burst"
#: Share of the clients that leave while they wait.
LEAVERS = 0.1
#: Seconds within which all have come.
COMING_S = 2.0


@dataclass(slots=True)
class Turn:
    """When a client had sent its request, and when the first byte of its answer came; monotonic clock."""

    sent: float
    served: float


@dataclass(slots=True)
class Burst:
    """``turns``: of the clients that got an answer."""

    clients: int
    turns: list[Turn] = field(default_factory=list)

    async def run(self, scene: Scene, ledger: Ledger, chance: random.Random, patience: float) -> None:
        """Send them all in; returns when the last one has left."""
        await asyncio.gather(
            *(
                ledger.note(KIND, self._client(scene, random.Random(chance.random()), i), patience)
                for i in range(self.clients)
            )
        )

    async def _client(self, scene: Scene, chance: random.Random, number: int) -> str:
        known = chance.choice([each for each in scene.known if each.dialect is NATIVE])
        leaves = chance.random() < LEAVERS
        await asyncio.sleep(COMING_S * number / self.clients)
        connection = await Connection.open(scene.server.address)
        try:
            await connection.ask("POST", NATIVE.path, known.body(True))
            sent = time.monotonic()
            if leaves:
                await asyncio.sleep(chance.random() * 5.0)
                connection.hang_up()
                return LEFT
            if await connection.head() != 200:
                reply = await connection.rest()
                if is_busy(reply):
                    return BUSY
                json_of(reply)
            self.turns.append(Turn(sent, connection.began))
            text = NATIVE.joined([event async for event in connection.events()])
            await connection.end()
        finally:
            connection.close()
        known.check(text)
        return ANSWERED

    def late(self) -> list[float]:
        """For every turn: by how many seconds the latest comer who was served before it had come after it."""
        out = []
        latest = 0.0
        for turn in sorted(self.turns, key=lambda turn: turn.served):
            out.append(max(0.0, latest - turn.sent))
            latest = max(latest, turn.sent)
        return out

    def overtaken(self) -> int:
        """The most places that a client was served behind its place by arrival."""
        by_arrival = {id(turn): i for i, turn in enumerate(sorted(self.turns, key=lambda turn: turn.sent))}
        by_service = sorted(self.turns, key=lambda turn: turn.served)
        places = [i - by_arrival[id(turn)] for i, turn in enumerate(by_service)]
        return max(0, max(places, default=0) - N_SLOTS)
