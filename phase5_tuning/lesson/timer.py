"""A simulated GPU with its host, and calls whose time on it is known: what does a timer say of them?

def my_timer(gpu, call): ...      # microseconds of a call, by what a Gpu offers
judge(my_timer)                   # beside the time that the GPU needs
"""

from collections.abc import Callable
from dataclasses import dataclass

from common import style
from common.style import COLORS

LAUNCH, COMPILE = 20.0, 1_000_000.0  # microseconds of the host, for a launch and for a kernel that is new
OVERWRITE = 100.0  # microseconds of the GPU, to overwrite the L2 cache


class Gpu:
    """Kernels are queued by the host and run one behind the other. Times are in microseconds.

    The host pays for each launch; it waits for the GPU in `synchronize` alone.
    """

    def __init__(self):
        self._host = self._free = 0.0
        self._known, self._cached = set(), None
        self.done = []  # name, (begin, end) on the host, (begin, end) on the GPU
        self.overwrote = False  # an overwrite of L2 ran between two events that were compared

    def now(self) -> float:
        """The time of the host."""
        return self._host

    def synchronize(self) -> None:
        """The host waits until the GPU has done all that was queued."""
        self._host = max(self._host, self._free)

    def event(self) -> list[float]:
        """Queued like a kernel: the GPU notes its own time when it comes to it. For `elapsed`."""
        self._free = max(self._free, self._host)
        return [self._free]

    def elapsed(self, begin: list[float], end: list[float]) -> float:
        """From one event to another, after the host has waited for both."""
        if self._host < end[0]:
            raise RuntimeError("the second event has not happened yet: synchronize first")
        between = (name for name, _, (start, stop) in self.done if begin[0] <= start and stop <= end[0])
        self.overwrote |= "overwrite" in between
        return end[0] - begin[0]

    def overwrite_l2(self) -> None:
        """Queue a kernel that leaves nothing of earlier inputs in the L2 cache; it takes 100 us of the GPU."""
        self._queue("overwrite", OVERWRITE, 1.0)
        self._cached = None

    def _queue(self, name: str, us: float, warm: float) -> None:
        """warm: the share of the time that remains where the inputs lie in the cache."""
        asked = self._host
        self._host += LAUNCH if name in self._known or name == "overwrite" else COMPILE
        self._known.add(name)
        begin = max(self._free, self._host)
        self._free = begin + us * (warm if self._cached == name else 1.0)
        self._cached = name
        self.done.append((name, (asked, self._host), (begin, self._free)))


STOPPED = "it stopped before the GPU did"


@dataclass(frozen=True)
class Call:
    """Kernels that a call launches, in microseconds of the GPU; with warm inputs they take `warm` of it.

    late: how many times as long the GPU takes in every seventh call.
    less, more: what a timer has met that says too little or too much.
    """

    title: str
    kernels: tuple[float, ...]
    warm: float = 1.0
    late: float = 1.0
    less: str = STOPPED
    more: str = "something else was timed, too"


CALLS = (
    Call("a long kernel", (2000.0,)),
    Call("a kernel whose inputs fit into L2", (60.0,), warm=0.5, less="its inputs lay in L2"),
    Call("twelve short kernels", (5.0,) * 12, more="the GPU waited for the host, or worked on something else"),
    Call("a kernel, and a neighbor now and then", (300.0,), late=3.0, more="the neighbor was timed, too"),
    Call("a kernel, the GPU faster now and then", (300.0,), late=0.9, less="this was one of the faster calls"),
)


def times(timer: Callable[[Gpu, Callable[[], None]], float], call: Call) -> tuple[float, bool]:
    """What a timer says of a call, on a GPU on which nothing has run yet; and if its events enclose an overwrite.

    The odd call may be any of seven: of the seven answers the one that is furthest from the truth.
    """
    answers = [_time(timer, call, first) for first in range(7)]
    return max(answers, key=lambda answer: abs(answer[0] - sum(call.kernels)))


def _time(timer: Callable[[Gpu, Callable[[], None]], float], call: Call, first: int) -> tuple[float, bool]:
    """first: the first call that takes `late` times as long."""
    gpu, made = Gpu(), 0

    def run():
        nonlocal made
        for number, us in enumerate(call.kernels):
            gpu._queue(f"kernel {number}", us * (call.late if made % 7 == first else 1.0), call.warm)
        made += 1

    said = timer(gpu, run)
    return said, gpu.overwrote


def verdicts(timer: Callable[[Gpu, Callable[[], None]], float]) -> list[str]:
    """Of each call "right", or what the timer has met; a timer is right within 2 percent."""
    return [_verdict(call, sum(call.kernels), *times(timer, call)) for call in CALLS]


def _verdict(call: Call, needed: float, said: float, overwrote: bool) -> str:
    if abs(said / needed - 1) < 0.02:
        return "right"
    if said > 50 * needed:
        return "a kernel was compiled"
    if overwrote and said > needed:
        return "the overwrites were timed, too"
    if needed < said <= needed + LAUNCH:
        return "queuing was timed, too"
    if said < 0.98 * min(call.warm, call.late) * needed:
        return STOPPED
    return call.less if said < needed else call.more


def table(timer: Callable[[Gpu, Callable[[], None]], float]) -> str:
    """What a timer says of each call beside what the GPU needs, its inputs being in memory, and why they differ."""
    lines, found = [f"{'':<38}the GPU needs   the timer says"], verdicts(timer)
    for call, verdict in zip(CALLS, found, strict=True):
        needed, (said, _) = sum(call.kernels), times(timer, call)
        lines.append(f"{call.title:<38}{needed:>10.0f} us{said:>14.0f} us   {verdict}")
    return "\n".join([*lines, f"right: {found.count('right')} of {len(CALLS)}"])


def judge(timer: Callable[[Gpu, Callable[[], None]], float]) -> None:
    print(table(timer))


def picture() -> None:
    """The twelve short kernels, on an idle GPU and behind three overwrites: when the host queues, and the GPU works."""
    fig, axes = style.new(8.6, 3.4, rows=2, sharex=True)
    between = []
    for overwrites, ax in zip((0, 3), axes, strict=True):
        gpu = Gpu()
        gpu._known.update(f"kernel {n}" for n in range(12))
        for _ in range(overwrites):
            gpu.overwrite_l2()
        begin = gpu.event()
        for number in range(12):
            gpu._queue(f"kernel {number}", 5.0, 1.0)
        end = gpu.event()
        between.append(end[0] - begin[0])
        for name, host, device in gpu.done:
            color = COLORS["faint"] if name == "overwrite" else COLORS["tiled"]
            for y, (start, stop) in ((1, host), (0, device)):
                ax.barh(y, stop - start, 0.6, left=start, color=color, edgecolor="white", linewidth=0.6)
        for at in (begin[0], end[0]):
            ax.axvline(at, color=COLORS["ink"], linestyle="--", linewidth=1)
        what = f"behind {overwrites} overwrites (grey)" if overwrites else "on an idle GPU"
        ax.set(yticks=(0, 1), yticklabels=("GPU works", "host queues"))
        ax.set_title(f"{what}: {between[-1]:.0f} us between the events (dashed)", fontsize=10)
    axes[-1].set_xlabel("us, simulated")
    style.show(
        fig,
        alt="Twelve kernels of 5 us, each queued by the host in 20 us. On an idle GPU there are gaps between them, and "
        f"{between[0]:.0f} us between the events. Behind three overwrites of the L2 cache all are queued before the "
        f"first begins: {between[1]:.0f} us.",
    )
