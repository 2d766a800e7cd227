"""Updates parameters by kernels, and copies of them by the eager sweep as a reference."""

from dataclasses import dataclass, field, replace

import torch

from lowmem import rules
from lowmem.tiles.layout import Layout
from lowmem.tiles.rounding import noise_key
from lowmem.tiles.storage import Float, Integer, StoredTensor, Uniform, of_state, of_weight
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Reading, Scalars, Sweep
from lowmem.tiles.tile import GRAD, extent
from lowmem.tiles.traced import Kind, signature, trace_update

MARGIN = 4096  # elements


@dataclass
class Parameter:
    """A parameter with its states, and copies that the eager sweep updates. rounding: or int8, int10 or int12."""

    rule: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    rounding: str = "nearest"
    storage: str = "float32"
    grad: torch.dtype | None = None
    options: dict = field(default_factory=dict)
    skewed: int = 0  # number of elements by which tensors are misaligned
    name: str = "w"

    def __post_init__(self):
        self.by_rule = rules.resolve(self.rule)
        self.hyper = {**self.by_rule.defaults, "rounding": "auto", **self.options}
        self.spec = self.by_rule.spec(self.name, self.shape, self.hyper)
        self.layout = Layout.of(self.shape, self.spec.view)
        self.grad = self.grad or self.dtype
        quantized = self.rounding.startswith("int")
        weight = Integer(int(self.rounding[3:])) if quantized else of_weight(self.rounding, self.dtype)
        self.storages = {"param": weight}
        self.small, self.buffers = {}, []
        for name, state in self.spec.states.items():
            if state.extent == "full":
                dtype = self.dtype if state.dtype == "weight" else state.dtype
                self.storages[name] = of_state(self.storage, state.signed) if dtype is None else Float(dtype)
            else:
                sizes = *extent(state.extent, self.layout.shape), *state.extra
                self.small[state.extent, name] = self.memory(sizes, state.dtype or torch.float32)
        start = torch.randn(self.shape) * 0.02
        self.tensors = {}
        for name, storage in self.storages.items():
            for n, part in enumerate(storage.parts):
                sizes = self.shape if part.group == 1 else (*self.shape[:-1], self.shape[-1] // part.group)
                self.tensors[name, n] = self.memory(sizes, part.dtype)
        encoded = weight.encode(start.to(self.dtype).float(), Uniform.half(start))
        for n, part in enumerate(encoded):
            self.tensors["param", n].copy_(part)
        self.expected = {key: tensor.clone() for key, tensor in self.tensors.items()}
        self.expected_small = {key: tensor.clone() for key, tensor in self.small.items()}

    def memory(self, sizes, dtype):
        """Returns a tensor of zeros between two margins filled with 7."""
        count, before = torch.Size(sizes).numel(), MARGIN + self.skewed
        self.buffers.append(torch.full((before + count + MARGIN,), 7, dtype=dtype))
        return self.buffers[-1][before : before + count].zero_().view(sizes)

    def is_intact(self):
        """Returns whether no kernel has written to the margins."""
        margins = (margin for buffer in self.buffers for margin in (buffer[:MARGIN], buffer[-MARGIN:]))
        return all(bool((margin == 7).all()) for margin in margins)

    @property
    def draws(self):
        return any(storage.draws for storage in self.storages.values())

    def kind(self, reading):
        numbers = Scalars.of(self.numbers(1))
        args = {**self.small, **reading.tensors}
        args["numbers", "single"], args["numbers", "double"] = numbers.single, numbers.double
        if self.draws:
            args["key", ""] = torch.zeros((), dtype=torch.int32)
        return Kind(
            ((GRAD, Float(self.grad)), *self.storages.items()),
            max(storage.group for storage in self.storages.values()),
            signature(args),
            torch.device("cpu"),
            batched=self.layout.shape[0] > 1,
            numbers=numbers.names,
        )

    def traced(self, reading):
        update = lambda sweep, states: self.by_rule.update(sweep, self.spec, states)  # noqa: E731
        return trace_update(self.kind(reading), update, self.spec.alike)

    def gradient(self, step):
        return self.memory(self.shape, self.grad).copy_(torch.randn(self.shape) * 0.01 * step)

    def member(self, group=0, key=0):
        from lowmem.kernels import Member

        return Member(self.layout, self.tensors, self.small, group, key)

    def key(self, step):
        return noise_key(0, step, self.name)

    def numbers(self, step):
        return self.by_rule.scalars(self.hyper, step)

    def expect(self, grad, step, reading):
        stored = {
            name: StoredTensor(s, tuple(self.expected[name, n] for n, _ in enumerate(s.parts)))
            for name, s in self.storages.items()
        }
        weight, small = stored.pop("param"), {name: state for (_, name), state in self.expected_small.items()}
        tiles = StoredTiles(
            self.layout, weight, grad, reading, Scalars.of(self.numbers(step)),
            keys=torch.tensor(self.key(step), dtype=torch.int32),
        )  # fmt: skip
        sweep = Sweep(tiles)
        sizes = self.by_rule.update(sweep, self.spec, stored | small)
        return sweep.square_sums, sizes

    def differences(self):
        """Returns the number of different elements and the largest relative difference of each tensor."""
        differences = {}
        for actual, expected in ((self.tensors, self.expected), (self.small, self.expected_small)):
            for key, tensor in actual.items():
                a, b = tensor.double(), expected[key].double()
                off = (a != b) & ~(a.isnan() & b.isnan())
                size = max(float(b.abs().max()), 1e-300) if b.numel() else 1.0
                differences[key] = int(off.sum()), float((a - b).abs().max()) / size if b.numel() else 0.0
        return differences

    def equalize(self):
        """Copies the reference to the parameter, so that the next step starts from equal tensors."""
        for actual, expected in ((self.tensors, self.expected), (self.small, self.expected_small)):
            for key, tensor in actual.items():
                tensor.copy_(expected[key])


KERNELS = {}  # cache for all tests


def batches_of(parameters, reading, aligned=False, ranks=None):
    """Yields the parameters of each kind with their `Batch`."""
    from lowmem.kernels import Batch, Kernels

    kinds = {}
    for param in parameters:
        spec = param.rule, replace(param.spec, view=None), tuple(param.spec.states.items())
        kinds.setdefault((param.kind(one(reading, 0)), param.layout.shape[1] == 1, spec), []).append(param)
    for kind, params in kinds.items():
        if (kind, aligned) not in KERNELS:
            traced, one_row = params[0].traced(one(reading, 0)), params[0].layout.shape[1] == 1
            KERNELS[kind, aligned] = Kernels(traced, one_row=one_row, aligned=aligned)
            KERNELS[kind, aligned].compile()
        members = [param.member(n * len(param.numbers(1)), n) for n, param in enumerate(params)]
        yield params, Batch(KERNELS[kind, aligned], members, ranks)


def one(reading, n):
    """Returns the `Reading` of parameter `n`."""
    tensors = {name: tensor[n : n + 1] for (_, name), tensor in reading.tensors.items() if tensor.ndim}
    return replace(reading, **tensors)


def run(batch, params, grads, step, reading):
    numbers = [number for param in params for number in param.numbers(step).values()]
    keys = torch.tensor([param.key(step) for param in params], dtype=torch.int32)
    return batch.run(grads, torch.tensor(numbers, dtype=torch.float64), keys, reading)


def update(parameters, steps=2, reading=None, aligned=False, spoil=None):
    """Updates parameters by kernels and by the reference. Each step starts from equal tensors. spoil: name of a
    parameter with an infinite gradient.

    Returns:
        For each tensor, the number of elements that differ, summed over steps, and the largest difference relative to
        the largest element.
    """
    reading, worst = reading or Reading(), {}
    for params, batch in batches_of(parameters, reading, aligned):
        for step in range(1, steps + 1):
            grads = [param.gradient(step) for param in params]
            for param, grad in zip(params, grads, strict=True):
                if param.name == spoil:
                    grad.view(-1)[-1] = torch.inf
            results = run(batch, params, grads, step, reading)
            for n, (param, grad) in enumerate(zip(params, grads, strict=True)):
                square_sums, sizes = param.expect(grad, step, one(reading, n))
                if "square_sums" in results:
                    close(results["square_sums"][n : n + 1], square_sums)
                assert ("sizes" in results) == (sizes is not None)
                if sizes is not None:
                    close(results["sizes"][n : n + 1].float(), sizes)
                for key, (different, relative) in param.differences().items():
                    before = worst.get(key, (0, 0.0))
                    worst[key] = before[0] + different, max(before[1], relative)
                param.equalize()
    return worst


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=0, equal_nan=True)
