"""A pretended GPU for machines without one. A script is loaded with the word cuda replaced by vgpu, a device
that torch takes for real (PrivateUse1) and whose tensors keep their numbers on the CPU.

What a GPU refuses is an error here. What it waits for, launches or gets wrong is counted under the lines of
the script that ask for it: GPU.waits, GPU.launches, GPU.races (the outcome depends on who is faster),
GPU.frozen (a number of the host that a graph keeps from its capture). It knows nothing of a GPU's rounding,
memory and speed.

Registering the device changes the whole process, so it belongs into a fork, and never beside a real GPU.
The ways into torch are private ones of PyTorch 2.13.
"""

import contextlib
import re
import sys
import types
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.equal,
         aten.bincount, aten.unique_consecutive, aten._unique2, aten.unique_dim, aten.multinomial,
         aten.normal}  # fmt: skip
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.detach, aten.alias,
             aten._unsafe_view, aten.lift_fresh}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}


class OnDevice(torch.Tensor):
    """What torch takes for a tensor on vgpu:0 or vgpu:1. host has the numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host, device):
        like = dict(strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype)
        x = torch.Tensor._make_wrapper_subclass(cls, host.shape, **like, device=device)
        x.host = host
        return x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return GPU.run(func, args, kwargs or {})

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.detach().cpu().numpy()

    def set_data(self, other):
        self.host = other.host
        torch.Tensor.data.__set__(self, other)

    data = property(lambda self: self.detach(), set_data)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = OnDevice(self.host.clone(), self.device)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if is_parameter else copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol):  # in a checkpoint, which load() reads to the CPU
        return self.host.clone().__reduce_ex__(protocol)


def change(x, function):
    """x with function applied to all tensors in its lists, tuples and dicts."""
    if isinstance(x, torch.Tensor):
        return function(x)
    if isinstance(x, (list, tuple)):
        return type(x)([change(y, function) for y in x])
    return {name: change(y, function) for name, y in x.items()} if isinstance(x, dict) else x


def tensors(x) -> list[torch.Tensor]:
    """All tensors in it, in order."""
    found = []
    change(x, found.append)
    return found


def memory(x) -> int:
    """The address of what a tensor of either kind keeps its numbers in."""
    return (x.host if isinstance(x, OnDevice) else x).untyped_storage().data_ptr()


class Stream:
    """A queue of work, behind the other streams by what they did since it waited for them."""

    def __init__(self):
        self.device, self.seen = (
            GPU.current,
            {},
        )  # until when the work of each other stream is known to be done

    def wait_stream(self, other):
        for stream, time in {**other.seen, other: GPU.clock}.items():
            self.seen[stream] = max(time, self.seen.get(stream, 0))


class Gpu(TorchDispatchMode):
    def start(self, script: str) -> None:
        self.script, self.graph, self.current, self.clock = script, None, 0, 0
        self.stream = self.main = Stream()
        self.pinned, self.in_flight, self.written = {}, [], {}  # written: memory to (stream, time)
        self.waits, self.launches, self.races, self.frozen = Counter(), Counter(), Counter(), Counter()
        self.replays = 0

    def where(self) -> str:
        """Lines of the script from the innermost function outwards, up to train."""
        frame, lines = sys._getframe(1), []
        while frame and not (lines and lines[-1].startswith("train:")):
            if frame.f_code.co_filename == self.script:
                lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        return " < ".join(lines)

    def wait(self, what: str) -> None:
        """The host goes on when all that it has asked for is done."""
        if self.graph is not None:
            raise RuntimeError(f"{what} is not permitted while a graph is captured: {self.where()}")
        self.waits[f"{what}: {self.where()}"] += 1
        self.races.update(line for host, then, line in self.in_flight if not torch.equal(host, then))
        self.in_flight = []
        self.written = {
            x: (stream, time) for x, (stream, time) in self.written.items() if stream is not self.stream
        }

    def copy_in(self, host, non_blocking) -> None:
        if not non_blocking:
            self.wait("copy to the device")
        elif memory(host) in self.pinned:  # read at some time until the next wait
            self.in_flight.append((host, host.clone(), f"overwritten before it was copied: {self.where()}"))
        elif self.graph is not None:
            raise RuntimeError(f"a graph copies from memory that is not pinned: {self.where()}")

    def copy_out(self, non_blocking) -> None:
        if non_blocking:
            self.races[f"read before it was copied: {self.where()}"] += 1
        self.wait("copy to the host")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        op, given = func.overloadpacket, tensors((args, kwargs))
        here, host = ([x for x in given if isinstance(x, OnDevice) == on] for on in (True, False))
        device = torch.device(kwargs.get("device") or (here[0].device if here else "cpu"))
        ours = device.type == "vgpu"
        if op is aten._pin_memory:
            x = args[0].clone()
            self.pinned[memory(x)] = x
            return x
        if op is aten.is_pinned:
            return memory(args[0]) in self.pinned
        if op is aten._to_copy:
            if here and not ours:
                self.copy_out(kwargs.get("non_blocking"))
            elif ours and host:
                self.copy_in(args[0], kwargs.get("non_blocking"))
        elif op is aten.copy_ and here and host:
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            self.copy_out(non_blocking) if args[0] is host[0] else self.copy_in(args[1], non_blocking)
        elif op in INDEXING and here:
            self.check_index(args[0], args[1], args[2] if len(args) > 2 else None)
        elif here and any(x.dim() for x in host):
            raise RuntimeError(f"{func}: all tensors must be on one device: {self.where()}")
        elif here and host and self.graph is not None:
            self.frozen[f"{func}: {self.where()}"] += 1  # the number that the host had at the capture
        if op in WAITS and here:
            self.wait(op.__name__)
        if kwargs.get("generator") is not None and ours:
            raise RuntimeError(f"a generator of the CPU for a tensor of the device: {self.where()}")
        if op is aten._fused_adam_ and here:
            for p, g in zip(*args[:2], strict=True):
                if any(n > 1 and a != b for n, a, b in zip(p.shape, p.stride(), g.stride(), strict=True)):
                    raise RuntimeError(f"params and grads must have the same layout: {self.where()}")
        if ours:
            device = torch.device("vgpu", self.current if device.index is None else device.index)
            self.check_stream(device, here)
            self.launches[self.where()] += not func.is_view and op not in NO_KERNEL
        kinds = zip(args, func._schema.arguments, strict=False)
        written = [x for x, kind in kinds if kind.alias_info and kind.alias_info.is_write]
        keep = ours and self.graph is not None
        inner = lambda x: x.host if isinstance(x, OnDevice) else x.clone() if keep else x
        args_, kwargs_ = change(args, inner), change(kwargs, inner)
        kwargs_.pop("pin_memory", None)
        if "device" in kwargs_:
            kwargs_["device"] = torch.device("cpu")
        if keep:
            self.graph.save(tensors(written))
        with torch.no_grad():
            out = func(*args_, **kwargs_)
        if not ours:
            return out
        if keep:
            self.graph.tape.append((func, args_, kwargs_, out))
        elif not func.is_view:
            self.clock += 1
            self.written.update({memory(x): (self.stream, self.clock) for x in tensors((out, written))})
        if written and isinstance(out, torch.Tensor):
            return written[0]
        return change(out, lambda x: OnDevice(x, device))

    def check_index(self, x, indices, value) -> None:
        on = lambda y: isinstance(y, OnDevice)
        if not on(x) or value is not None and not on(value) and value.dim():
            raise RuntimeError(f"indexing mixes devices: {self.where()}")
        for index in indices:
            if index is not None and not on(index):
                self.wait("copy of an index to the device")
            one = value is not None and value.numel() == 1
            if index is not None and index.dtype in (torch.bool, torch.uint8) and not one:
                self.wait("count of a mask")

    def check_stream(self, device, here) -> None:
        """Streams and graphs take work of the current device only, and must know what other streams did."""
        if (self.graph or self.stream is not self.main) and device.index != self.stream.device:
            raise RuntimeError(f"work of {device} on a stream of device {self.stream.device}: {self.where()}")
        for x in here:
            stream, time = self.written.get(memory(x), (self.stream, 0))
            if x.device != device:
                raise RuntimeError(f"tensors on {x.device} and {device}: {self.where()}")
            if stream is not self.stream and self.stream.seen.get(stream, 0) < time and self.graph is None:
                self.races[f"a stream does not wait for another: {self.where()}"] += 1


class Graph:
    """A capture runs nothing and keeps the calls with their memory; a replay makes the same calls."""

    def __init__(self):
        self.tape, self.before = [], {}

    def save(self, written) -> None:
        for x in written:
            storage = x.host.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def replay(self) -> None:
        GPU.launches[GPU.where()] += 1
        GPU.replays += 1
        with torch.no_grad(), _disable_current_modes():
            for func, args, kwargs, out in self.tape:
                for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                    if new.data_ptr() != old.data_ptr():
                        old.copy_(new)

    @contextlib.contextmanager
    def capture(self):
        GPU.wait("capture")
        random_state, launches, GPU.graph, GPU.written = torch.get_rng_state(), GPU.launches.copy(), self, {}
        try:
            yield
        finally:
            GPU.graph, GPU.launches = None, launches
            torch.set_rng_state(random_state)
            for storage, before in self.before.values():
                storage.copy_(before)


class Recurrent(torch.autograd.Function):
    """An LSTM or a GRU is one operation, as cuDNN's is: here that of the CPU."""

    @staticmethod
    def forward(ctx, function, sizes, options, parts, grad, *given):
        GPU.launches[GPU.where()] += 1
        with _disable_current_modes(), torch.set_grad_enabled(grad):
            needed = ctx.needs_input_grad[5:]
            ctx.given = [
                x.host.detach().requires_grad_(n and grad) for x, n in zip(given, needed, strict=True)
            ]
            x, *more = ctx.given
            state = tuple(more[:parts]) if parts == 2 else more[0]
            ctx.out = function(x, sizes, state, more[parts:], *options)
            return tuple(OnDevice(y.detach(), given[0].device) for y in ctx.out)

    @staticmethod
    def backward(ctx, *grads):
        needed = [x for x in ctx.given if x.requires_grad]
        with _disable_current_modes():
            found = iter(torch.autograd.grad(ctx.out, needed, [grad.host for grad in grads]))
        back = [OnDevice(next(found), grads[0].device) if x.requires_grad else None for x in ctx.given]
        return None, None, None, None, None, *back


def recurrent(function):
    def call(x, sizes, state, weights, *options):
        if not isinstance(x, OnDevice):
            return function(x, sizes, state, weights, *options)
        states = state if isinstance(state, tuple) else (state,)
        if isinstance(sizes, OnDevice) or not all(part.is_contiguous() for part in states):
            raise RuntimeError(f"cuDNN takes sizes on the host and a contiguous state: {GPU.where()}")
        given = function, sizes, options, len(states), torch.is_grad_enabled()
        return Recurrent.apply(*given, x, *states, *weights)

    return call


@contextlib.contextmanager
def on_stream(stream):
    before, GPU.stream = GPU.stream, stream
    try:
        yield
    finally:
        GPU.stream = before


def check_optimizer(optimizer, args, kwargs) -> None:
    """What Adam says on CUDA."""
    capturable = all(group.get("capturable") for group in optimizer.param_groups)
    if GPU.graph is not None and not capturable:
        raise RuntimeError("a graph captures an optimizer that is not capturable")
    if GPU.graph is None and capturable:
        warnings.warn(
            "This instance was constructed with capturable=True, but nothing captures", stacklevel=2
        )


def set_device(device) -> None:
    GPU.current = GPU.main.device = torch.device(device).index


yes, nothing = lambda *_: True, lambda *_: None
module = types.SimpleNamespace(  # takes the place of torch.cuda
    is_available=yes, is_initialized=yes, device_count=lambda: 2, current_device=lambda: GPU.current,
    set_device=set_device, _is_in_bad_fork=lambda: False, manual_seed_all=nothing,
    get_rng_state=lambda device: torch.get_rng_state(), set_rng_state=nothing,
    get_device_name=lambda: "pretended", mem_get_info=lambda device: (1 << 40, 1 << 40), CUDAGraph=Graph,
    graph=Graph.capture, Stream=Stream, current_stream=lambda: GPU.stream, stream=on_stream,
)  # fmt: skip
_setup_privateuseone_for_python_backend("vgpu", backend_module=module)
register_optimizer_step_pre_hook(check_optimizer)
torch._VF.lstm, torch._VF.gru = recurrent(torch._VF.lstm), recurrent(torch._VF.gru)
GPU = Gpu()
GPU.start("")


def load(path: Path, source: str | None = None):
    """The script, or another text of it, as a module with vgpu for cuda and without inference mode."""
    script = types.ModuleType(path.stem)
    script.__file__ = str(path)
    sys.modules[path.stem] = script
    text = re.sub("cuda(?!_graph)", "vgpu", source or path.read_text())
    text = text.replace("inference_mode()", "no_grad()")
    exec(compile(text, str(path), "exec"), vars(script))
    return script


@contextlib.contextmanager
def as_if_cuda(path: Path):
    GPU.start(str(path))
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(list, device=...): first on the CPU, then a copy
    try:
        with torch.autograd.set_multithreading_enabled(False), GPU:
            yield GPU
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
