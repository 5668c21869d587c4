# SPDX-License-Identifier: MIT OR Apache-2.0
"""A second device type without hardware: tensors that say they are on `second`, PyTorch's place for devices that it does not know, and hold one of
the CPU.

As on a device, an operator whose tensors are not all on it is an error, except for copies between the two; and so is every wait of the
host for a value, while `waits` is False.

For processes that a test starts: PyTorch keeps a device type until the process ends, and later tests would take it for the accelerator."""

import contextlib
import multiprocessing

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

assert multiprocessing.parent_process() is not None, "import doubles.device inside a job of processes.run"
_setup_privateuseone_for_python_backend("second")
DEVICE = torch.device("second", 0)
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)


class OnDevice(torch.Tensor):
    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def __repr__(self):
        return f"OnDevice({self.held!r})"


class Device(TorchDispatchMode):
    """Inside, tensors can be made on the device."""

    def __init__(self):
        super().__init__()
        self.waits = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waiting = (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)
        if not self.waits and function in waiting and isinstance(args[0], OnDevice):
            raise AssertionError(f"the host waits for the device: {function}")
        return run(function, args, kwargs or {}, self)

    @contextlib.contextmanager
    def without_waits(self):
        self.waits = False
        try:
            yield
        finally:
            self.waits = True


def run(function, args, kwargs, mode=None):
    tensors = []
    tree_map(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None, (args, kwargs))
    on_device = [isinstance(x, OnDevice) for x in tensors]
    # A number of the CPU may meet any tensor.
    strangers = [x for x in tensors if not isinstance(x, OnDevice) and x.ndim]
    if any(on_device) and strangers and function not in COPIES:
        raise RuntimeError(
            f"{function}: a tensor of the CPU {[tuple(x.shape) for x in strangers]} beside tensors of {DEVICE}"
        )
    asked = kwargs.get("device")
    to_device = any(on_device) if asked is None else torch.device(asked).type == DEVICE.type
    if mode is not None and not mode.waits and function is aten._to_copy.default and any(on_device) != to_device:
        raise AssertionError("a run copies between the CPU and the device")
    kwargs = {name: torch.device("cpu") if name == "device" and x is not None else x for name, x in kwargs.items()}
    args, kwargs = tree_map(lambda x: x.held if isinstance(x, OnDevice) else x, (args, kwargs))
    result = function(*args, **kwargs)
    if function in COPIES[1:] or function._schema.name.endswith("_"):
        return tensors[0]
    return tree_map(lambda x: OnDevice(x) if isinstance(x, torch.Tensor) else x, result) if to_device else result
