"""Reads a consumer's operations in order, then runs several consumers on the model."""

import itertools
import re
from types import GeneratorType

from common.learn.check.require import reject
from phase5_tuning.checks import on_model
from phase5_tuning.hopper.model import Consumer, Operation, Ring, own_rings, simulate

LONGEST = 4000  # operations: an answer with more of them does not end


def check(answer):
    for tiles in (1, 2, 3, 8):
        for stages in (1, 2, 3):
            _Reading(answer, tiles, stages).check()
    cases = [(d, n, stages, 12) for d in (64, 128) for n in (1, 2, 3) for stages in (2, 3)]
    for head_dim, consumers, stages, tiles in cases:
        actors = own_rings(head_dim, consumers, stages, answer.walk, tiles)
        with on_model(f"head_dim {head_dim}, {consumers} consumers, {stages} stages"):
            simulate(actors)
    said = "in each, P V of the tile before is under way during the exponentials of all tiles but the first"
    return f"{len(cases)} runs on the model; {said}"


class _Reading:
    """One consumer's operations, read one after another without times."""

    def __init__(self, answer, tiles, stages):
        self.tiles, self.stages = tiles, stages
        self.rings = {name: Ring(name, stages, 1) for name in "kv"}
        self.walk = answer.walk(Consumer(*self.rings.values(), 128), tiles)
        self.done = set()  # "S0", "softmax 0", "rescale 0", "PV0", ...: what is done
        self.pending = []  # products under way, the oldest first
        self.there = {name: [-1] * stages for name in "kv"}  # by slot: the last tile that was waited for
        self.gone = {name: [-1] * stages for name in "kv"}  # and the last that was let go
        self.last = ""

    def reject(self, why):
        after = f" after {self.last}" if self.last else ""
        reject(f"walk of {self.tiles} tiles in rings of {self.stages} slots{after}: {why}")

    def check(self):
        if not isinstance(self.walk, GeneratorType):
            self.reject(f"expected a generator of operations, got {self.walk!r}")
        for number, op in enumerate(self.walk):
            if isinstance(op, GeneratorType):
                self.reject("me.softmax(j) has several operations: yield from me.softmax(j)")
            if not isinstance(op, Operation):
                self.reject(f"{op!r} is no operation")
            if number > LONGEST:
                self.reject(f"more than {LONGEST} operations: the walk does not end")
            getattr(self, f"_{op.kind}", self._other)(op)
        for j in range(self.tiles):
            for what in (f"S{j}", f"softmax {j}", f"rescale {j}", f"PV{j}"):
                if what in self.pending:
                    self.reject(f"nobody waits for {what}")
                if what not in self.done:
                    self.reject(f"{what} is missing")
            for name in "kv":
                slot = j % self.stages
                if self.gone[name][slot] < j:
                    self.reject(f"{name.upper()}{j} is never let go: no arrival at me.{name}.empty[{slot}]")

    def _other(self, op):
        self.reject(f"a consumer of this exercise has no operation {op.kind!r}")

    def _which(self, op):
        """(ring, slot, whether the barrier is a full one)"""
        for (name, ring), slot in itertools.product(self.rings.items(), range(self.stages)):
            if op.barrier in (ring.full[slot], ring.empty[slot]):
                return name, slot, op.barrier is ring.full[slot]
        return self.reject(f"{op.barrier} is no barrier of these rings")

    def _wait(self, op):
        name, slot, full = self._which(op)
        if not full:
            self.reject(f"a consumer waits at full barriers, not at me.{name}.empty[{slot}]")
        last = self.there[name][slot]
        coming = last + self.stages if last >= 0 else slot
        held = last > self.gone[name][slot]
        if held and op.parity == self.rings[name].slot(last)[1]:
            return  # once more for the tile that is there
        tile, parity = f"{name.upper()}{coming}", self.rings[name].slot(coming)[1]
        if op.parity != parity:
            asked = f"wait(me.{name}.full[{slot}], {op.parity})"
            self.reject(f"{asked} passes at once, before {tile} is there: its parity is {parity}")
        if coming >= self.tiles:
            self.reject(f"waits for {tile}, which never comes: there are {self.tiles} tiles")
        if held:
            self.reject(f"waits for {tile} in slot {slot}, where {name.upper()}{last} has not been let go")
        after = f"S{coming + 1}"
        if name == "v" and coming + 1 < self.tiles and after not in self.done | set(self.pending):
            self.reject(f"{tile} is waited for before {after} is started, so S waits for a V that it does not need")
        self.there[name][slot] = coming
        self.last = f"the wait for {tile}"

    def _product(self, op):
        found = re.fullmatch(r"(S|PV)(-?\d+)", op.text)
        if not found:
            self.reject("a product of its own: start products with me.s(j) and me.pv(j)")
        kind, j = found.groups()
        j, name, started = int(j), "k" if kind == "S" else "v", self.done | set(self.pending)
        if not 0 <= j < self.tiles:
            self.reject(f"{op.text}: the tiles are 0 to {self.tiles - 1}")
        if op.text in started:
            self.reject(f"{op.text} is computed twice")
        slot = j % self.stages
        if self.there[name][slot] != j or self.gone[name][slot] >= j:
            self.reject(f"{op.text} reads {name.upper()}{j}, which has not been waited for at me.{name}.full[{slot}]")
        if kind == "S" and j > 0 and f"softmax {j - 1}" not in self.done:
            self.reject(f"S{j} is started before the exponentials of tile {j - 1}: there are registers for one S")
        if kind == "PV":
            if f"rescale {j}" not in self.done:
                what = f"PV{j} needs P of tile {j} in 16 bits, and acc at its maxima"
                self.reject(f"{what}: me.rescale({j}) comes before")
            if j > 0 and f"PV{j - 1}" not in started:
                self.reject(f"PV{j - 1} is missing")
        self.pending.append(op.text)
        self.last = f"the start of {op.text}"

    def _wait_products(self, op):
        while len(self.pending) > op.amount:
            self.done.add(self.pending.pop(0))
        self.last = f"wait_products({op.amount:g})"

    def _exponentials(self, op):
        if not re.fullmatch(r"P\d+", op.text) or int(op.text[1:]) >= self.tiles:
            self.reject(f"exponentials {op.text!r}: yield from me.softmax(j), with tiles 0 to {self.tiles - 1}")
        j = int(op.text[1:])
        if f"S{j}" in self.pending:
            older = " Products end in the order in which they were started" if len(self.pending) > 1 else ""
            self.reject(f"the softmax of tile {j} reads S{j}, whose product is still under way.{older}")
        if f"S{j}" not in self.done:
            self.reject(f"the softmax of tile {j} comes before S{j}")
        if f"softmax {j}" in self.done:
            self.reject(f"the softmax of tile {j} is computed twice")
        if j > 0 and f"PV{j - 1}" not in self.pending:
            why = "is done already" if f"PV{j - 1}" in self.done else "has not been started"
            self.reject(f"no product is under way during the exponentials of tile {j}: PV{j - 1} {why}")
        if self.gone["k"][j % self.stages] < j:
            self.reject(f"K{j} is held during the exponentials of tile {j}, although S{j} is done")
        self.done.add(f"softmax {j}")
        self.last = f"the softmax of tile {j}"

    def _work(self, op):
        if not op.text.startswith("rescale"):
            return
        j = int(op.text.split()[1])
        if f"softmax {j}" not in self.done:
            self.reject(f"me.rescale({j}) needs the maxima and P of tile {j}: its softmax comes before")
        if f"rescale {j}" in self.done:
            self.reject(f"acc is rescaled to tile {j} twice")
        if j > 0 and f"PV{j - 1}" not in self.done:
            self.reject(f"me.rescale({j}) touches acc and the P in 16 bits, while PV{j - 1} is still under way")
        if j > 0 and self.gone["v"][(j - 1) % self.stages] < j - 1:
            self.reject(f"V{j - 1} is held during me.rescale({j}), although PV{j - 1} is done")
        self.done.add(op.text)
        self.last = f"me.rescale({j})"

    def _arrive(self, op):
        name, slot, full = self._which(op)
        if full:
            self.reject(f"a consumer arrives at empty barriers, not at me.{name}.full[{slot}]")
        j = self.there[name][slot]
        if j < 0 or self.gone[name][slot] >= j:
            self.reject(f"arrives at me.{name}.empty[{slot}], but there is no tile in this slot to let go")
        what = f"{'S' if name == 'k' else 'PV'}{j}"
        if what not in self.done:
            self.reject(f"{name.upper()}{j} is let go before {what} is done: the next copy may overwrite it")
        self.gone[name][slot] = j
        self.last = f"letting {name.upper()}{j} go"
