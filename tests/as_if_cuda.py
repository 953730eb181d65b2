"""A pretended GPU for machines without one. A script is loaded with the word cuda replaced by vgpu, a device that
torch holds for real (PrivateUse1); its tensors keep their numbers on the CPU. What a GPU refuses is an error here, and
GPU.waits, GPU.races and GPU.launches tell what it would wait for, what it would get wrong and how much it starts.

Registering the device changes the whole process: use it in a fork, and never beside a real GPU's tests.
"""

import contextlib
import sys
import types
from collections import Counter
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.equal, aten.bincount,
         aten.unique_consecutive, aten._unique2, aten.unique_dim}  # fmt: skip
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.detach, aten.alias,
             aten._unsafe_view, aten.lift_fresh}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}


class OnDevice(torch.Tensor):
    """What torch takes for a tensor on vgpu:0. host has the numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host):
        like = dict(strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype)
        x = torch.Tensor._make_wrapper_subclass(cls, host.shape, **like, device="vgpu:0")
        x.host = host
        return x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return GPU.run(func, args, kwargs or {})

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.detach().cpu().numpy()

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self, **_):
        return f"OnDevice({self.host})"

    def set_data(self, other):
        self.host = other.host
        torch.Tensor.data.__set__(self, other)

    data = property(lambda self: self.detach(), set_data)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = OnDevice(self.host.clone())
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if is_parameter else copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol):  # in a checkpoint; load() reads to the CPU
        return self.host.clone().__reduce_ex__(protocol)


class Gpu(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.start("")

    def start(self, script: str) -> None:
        self.script, self.graph, self.pinned, self.in_flight = script, None, {}, []
        self.waits, self.races, self.frozen = Counter(), Counter(), Counter()
        self.launches = self.replays = 0

    def where(self) -> str:
        """The two innermost lines of the script."""
        frame, lines = sys._getframe(1), []
        while frame:
            if frame.f_code.co_filename == self.script:
                lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        return " < ".join(lines[:2])

    def wait(self, what: str) -> None:
        if self.graph is not None:
            raise RuntimeError(f"{what} is not permitted while a graph is captured: {self.where()}")
        self.waits[f"{what}: {self.where()}"] += 1
        self.races.update(line for host, then, line in self.in_flight if not torch.equal(host, then))
        self.in_flight = []

    def copy_in(self, host, non_blocking) -> None:
        is_pinned = host.untyped_storage().data_ptr() in self.pinned
        if not non_blocking:
            self.wait("copy to the device")
        elif is_pinned:  # the device reads the memory at some time until the next wait
            self.in_flight.append((host, host.clone(), self.where()))
        elif self.graph is not None:
            raise RuntimeError(f"a graph copies from memory that is not pinned: {self.where()}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        if torch.is_inference_mode_enabled() and func._can_decompose():  # elsewhere autograd took it apart
            with self:
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
        op = func.overloadpacket
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        here, host = ([x for x in tensors if isinstance(x, OnDevice) == on] for on in (True, False))
        device = kwargs.get("device") and torch.device(kwargs["device"]).type
        ours = device == "vgpu" or bool(here) and device is None
        if op is aten._pin_memory:
            x = args[0].clone()
            self.pinned[x.untyped_storage().data_ptr()] = x
            return x
        if op is aten.is_pinned:
            return args[0].untyped_storage().data_ptr() in self.pinned
        if op is aten._to_copy:
            if here and not ours:
                self.wait("copy to the host")
            elif ours and host:
                self.copy_in(args[0], kwargs.get("non_blocking"))
        elif op is aten.copy_ and here and host:
            if args[0] is host[0]:
                self.wait("copy to the host")
            else:
                self.copy_in(args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
        elif op in INDEXING and here:
            self.check_index(args[0], args[1], args[2] if len(args) > 2 else None)
        elif here and any(x.dim() for x in host):
            shapes = [tuple(x.shape) for x in host if x.dim()]
            raise RuntimeError(f"{func}: all tensors must be on one device, {shapes} are on the CPU: {self.where()}")
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
        self.launches += ours and not func.is_view and op not in NO_KERNEL
        keep = ours and self.graph is not None
        inner = lambda x: x.host if isinstance(x, OnDevice) else x.clone() if keep else x
        args_, kwargs_ = tree_map_only(torch.Tensor, inner, (args, {**kwargs, "pin_memory": None}))
        kwargs_.pop("pin_memory")
        if device:
            kwargs_["device"] = torch.device("cpu")
        written = [x for x, arg in zip(args, func._schema.arguments) if arg.alias_info and arg.alias_info.is_write]
        if keep:
            self.graph.save(tree_map_only(OnDevice, lambda x: x.host, written))
        with torch.no_grad():
            out = func(*args_, **kwargs_)
        if keep:
            self.graph.tape.append((func, args_, kwargs_, out))
        if not ours:
            return out
        if written and isinstance(out, torch.Tensor):
            return written[0]
        normal = torch.is_inference_mode_enabled() and func.is_view and not here[0].is_inference()
        with torch.inference_mode(False) if normal else contextlib.nullcontext():
            return tree_map_only(torch.Tensor, OnDevice, out)

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


class Graph:
    """A capture runs nothing and keeps the calls with their memory; a replay makes the same calls."""

    def __init__(self):
        self.tape, self.before = [], {}

    def save(self, written) -> None:
        for x in tree_iter(written):
            storage = x.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def replay(self) -> None:
        GPU.launches, GPU.replays = GPU.launches + 1, GPU.replays + 1
        with torch.no_grad(), _disable_current_modes():
            for func, args, kwargs, out in self.tape:
                for old, new in zip(tree_iter(out), tree_iter(func(*args, **kwargs)), strict=True):
                    if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)

    @contextlib.contextmanager
    def capture(self):
        GPU.wait("capture")
        random_state, launches, GPU.graph = torch.get_rng_state(), GPU.launches, self
        try:
            yield
        finally:
            GPU.graph, GPU.launches = None, launches
            torch.set_rng_state(random_state)
            for storage, before in self.before.values():
                storage.copy_(before)


def refuse_capture(optimizer, args, kwargs):
    if GPU.graph is not None and not all(group.get("capturable") for group in optimizer.param_groups):
        raise RuntimeError("a graph captures an optimizer that is not capturable")


class Stream:
    def wait_stream(self, other): ...


yes, nothing = lambda *_: True, lambda *_: None
module = types.SimpleNamespace(  # takes the place of torch.cuda
    is_available=yes, is_initialized=yes, current_device=lambda: 0, device_count=lambda: 1,
    _is_in_bad_fork=lambda: False, manual_seed_all=nothing, get_rng_state=lambda device: torch.get_rng_state(), set_rng_state=nothing, get_device_name=lambda: "pretended",
    mem_get_info=lambda device: (1 << 40, 1 << 40), CUDAGraph=Graph,
    graph=Graph.capture, Stream=Stream, current_stream=Stream, stream=contextlib.nullcontext,
)  # fmt: skip
_setup_privateuseone_for_python_backend("vgpu", backend_module=module)
register_optimizer_step_pre_hook(refuse_capture)
GPU = Gpu()


def load(path: Path):
    """The script as a module, with vgpu for cuda."""
    script = types.ModuleType(path.stem)
    script.__file__ = str(path)
    sys.modules[path.stem] = script
    exec(compile(path.read_text().replace("cuda", "vgpu"), str(path), "exec"), vars(script))
    set_up = script.set_up
    script.set_up = lambda args: torch.device("vgpu:0") if set_up(args).type == "vgpu" else torch.device("cpu")
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
