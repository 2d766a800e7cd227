"""Which policy: what a user says of it, what is asked of it, and the cheapest that is exact for that."""

from dataclasses import dataclass
from pathlib import Path

from lowmem.errors import ConfigError, UnsupportedError, did_you_mean
from lowmem.replay import REPLAYS
from lowmem.store import STORES, SUMS

POLICIES = ("immediate", "two_pass", "deferred")


@dataclass(frozen=True)
class PolicySettings:
    """What a user says of policies.

    Raises:
        ConfigError: a value that is not allowed, or that has no effect.
    """

    policy: str = "auto"
    replay: str = "auto"
    store: str | None = None
    store_dir: str | None = None
    sums: str = "float32"

    def __post_init__(self) -> None:
        for option, value, known in (
            ("policy", self.policy, ("auto", *POLICIES)),
            ("replay", self.replay, REPLAYS),
            ("store", self.store, (None, *STORES)),
            ("sums", self.sums, SUMS),
        ):
            if value not in known:
                names = [name for name in known if name is not None]
                hint = did_you_mean(str(value), names)
                raise ConfigError(f"{option} {value!r} is unknown.{hint} Known are {', '.join(names)}")
        if self.store_dir is not None and self.store != "disk":
            raise ConfigError(f"store_dir={self.store_dir!r} has no effect without store='disk'")
        if self.store_dir is not None and not Path(self.store_dir).is_dir():
            raise ConfigError(
                f"store_dir={self.store_dir!r} is no folder; make it, or leave it out for a temporary one"
            )
        if self.policy in ("immediate", "two_pass") and (self.store is not None or self.sums != "float32"):
            raise ConfigError(f"store and sums have no effect under policy {self.policy!r}; they are of 'deferred'")
        if self.policy in ("immediate", "deferred") and self.replay != "auto":
            raise ConfigError(f"replay has no effect under policy {self.policy!r}; it is of 'two_pass'")
        if self.policy == "auto" and self.replay != "auto" and self.store is not None:
            raise ConfigError("replay is of policy 'two_pass' and store of 'deferred'; give one of them")

    def replay_of(self, policy: str, *, graph_stays: bool) -> str | None:
        """How the second pass is had under `policy`, if it has one.

        Raises:
            UnsupportedError: it is to be the graph's, which does not stay.
        """
        if policy != "two_pass":
            return None
        if self.replay == "graph" and not graph_stays:
            raise UnsupportedError(
                "replay='graph': DeepSpeed ZeRO-3 gathers parameters for one backward of each forward, so the graph "
                "cannot be replayed. Use replay='forward' with opt.backward(lambda: loss), or policy='deferred'"
            )
        return ("graph" if graph_stays else "forward") if self.replay == "auto" else self.replay


@dataclass(frozen=True)
class Wish:
    """What is asked of a policy.

    norm: the option that needs the norm over all gradients before the first update.  skips: what needs a step with an
    overflow to be left out as a whole.  prefers_whole: what is exact only if it is.  accumulates: several micro-batches
    are one step.
    """

    norm: str | None = None
    skips: str | None = None
    prefers_whole: str | None = None
    accumulates: bool = False


def choose(wanted: PolicySettings, wish: Wish, *, on_cpu: bool, graph_stays: bool = True) -> tuple[str, str]:
    """The policy asked for, or with `auto` the cheapest that is exact for what was asked; and why.

    With accumulation that is `deferred`; without anything to know beforehand `immediate`. In between it is `deferred`
    on a GPU, whose gradients wait on the host, and where the graph cannot be replayed; else `two_pass` on a CPU, where
    gradients would take as much as the weights.

    Raises:
        UnsupportedError: the policy cannot keep the promise that was asked of it.
    """
    if wanted.policy == "auto":
        return _cheapest(wanted, wish, on_cpu and graph_stays, graph_stays)
    if wanted.policy == "immediate" and wish.norm is not None:
        raise UnsupportedError(
            f"{wish.norm}: policy 'immediate' updates a parameter before the norm over all gradients is known, so it "
            "cannot clip by it. Use policy='two_pass', 'deferred' or 'auto', or leave the option out (in a Hugging "
            "Face trainer: max_grad_norm=0); clip_value and a rule's own update clipping work."
        )
    if wanted.policy == "immediate" and wish.skips is not None:
        raise UnsupportedError(
            f"{wish.skips}: under policy 'immediate' an overflowing update must be left out parameter by parameter, "
            "which that optimizer cannot do. Use policy='two_pass' or 'deferred', a rule of lowmem, or bfloat16 "
            "without a loss scale."
        )
    if wanted.policy != "deferred" and wish.accumulates:
        raise UnsupportedError(
            f"policy {wanted.policy!r} cannot accumulate gradients: it keeps none. Use policy='deferred' (or 'auto'), "
            "which sums them in its store, or one larger batch."
        )
    return wanted.policy, "as asked"


def _cheapest(wanted: PolicySettings, wish: Wish, replays: bool, graph_stays: bool) -> tuple[str, str]:
    whole = wish.norm or wish.skips or wish.prefers_whole
    if wish.accumulates:
        return "deferred", "gradients of several micro-batches have to be summed"
    if wanted.store is not None:
        return "deferred", f"store={wanted.store!r} asks for it"
    if whole is None:
        return "immediate", "nothing asked for needs more than one gradient at a time"
    reason = f"{whole} needs every gradient to be known before the first update"
    if replays or wanted.replay != "auto":
        replayed = wanted.replay_of("two_pass", graph_stays=graph_stays)
        return "two_pass", f"{reason}; they are measured in a backward of their own, and the {replayed} is replayed"
    return "deferred", f"{reason}; they wait in a store"
