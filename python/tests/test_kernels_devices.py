# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kernels on other devices: operations of schedules on a second device type, which no code names and on which the host waits for nothing;
PyTorch's kernels of devices by their signatures; and the example of a kernel of one's own."""

import random
import sys
import unittest
from pathlib import Path
from unittest import mock

import torch
from cpattn.errors import Unsupported
from cpattn.torch import Context, kernels
from cpattn.torch.kernels.torch_device import TorchDevice
from doubles import aiter_mha, flash_attn_2, plain
from kernel_problems import drawn_op, expected_backward, expected_forward, problem
from processes import run
from test_kernels import check, close
from test_kernels_rectangles import Plain
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples/python"))


def on_a_second_device(rank, world):
    """In a process of its own, since PyTorch cannot take back a device type, and checkpoints and trainers look for one."""
    from doubles.device import DEVICE, Device, OnDevice

    class Moved(Plain):
        """`Plain` on a device: it brings tensors to the CPU and back, as the device's own memory."""

        def forward(self, q, k, v, call):
            return tuple(OnDevice(x) for x in super().forward(q.held, k.held, v.held, self.on_cpu(call)))

        def backward(self, d_o, q, k, v, o, lse, call, delta=None):
            held = (x.held for x in (d_o, q, k, v, o, lse))
            return tuple(OnDevice(x) for x in super().backward(*held, self.on_cpu(call), delta=delta.held))

        def on_cpu(self, call):
            return kernels.Rectangles(
                **{**vars(call), "cu_seqlens_q": call.cu_seqlens_q.held, "cu_seqlens_k": call.cu_seqlens_k.held}
            )

    test = unittest.TestCase()
    for seed in range(60):
        op = drawn_op(random.Random(seed), stripes=seed % 3 == 0)
        inputs = problem(op, seed=seed)
        with Device() as device:
            for kernel in (kernels.Math(), Moved()):
                work = kernels.Work(kernel, op, DEVICE, torch.float64)
                q, k, v, d_o, lse, delta = (x.to(DEVICE) for x in inputs)
                test.assertIsInstance(q, OnDevice, seed)
                with device.without_waits():
                    found = [*work.forward(q, k, v), *work.backward(d_o, q, k, v, None, lse, delta, lse_gradient=True)]
                test.assertTrue(all(isinstance(x, OnDevice) and x.device.type == "second" for x in found), seed)
                o, _, *gradients = (x.held for x in found)
                rows = work.rows.cpu() if isinstance(work.rows, torch.Tensor) else work.rows
                wanted = (
                    expected_forward(op, *inputs[:3])[0][rows],
                    *expected_backward(op, inputs[3], *inputs[:3], *inputs[4:]),
                )
                for name, mine, want in zip(("o", "dq", "dk", "dv"), (o, *gradients), wanted):
                    close(test, mine, want[rows] if name == "dq" else want, 1e-11, f"{name}, seed {seed}")
    return True


class SecondDeviceTest(unittest.TestCase):
    def test_drawn_operations(self):
        self.assertEqual(run(on_a_second_device, 1), [True])

    def test_no_module_names_a_device(self):
        """Devices are those of tensors: only an adapter's `honours` may name one."""
        folder = ROOT / "python/cpattn/torch/kernels"
        for file in sorted(folder.glob("*.py")):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                self.assertNotIn("cuda", line.lower(), f"{file.name}:{number}")


class SignatureTest(unittest.TestCase):
    """PyTorch checks arguments and shapes of an operator that it cannot run here."""

    def test_operators_of_devices(self):
        for dtype in (torch.bfloat16, torch.float32):
            for window in ((None, None), (None, 0), (5, 2)):
                if dtype == torch.float32 and window[0] is not None:
                    continue
                with self.subTest(dtype=dtype, window=window), FakeTensorMode():
                    q, d_o = (torch.empty(9, 4, 16, dtype=dtype, device="cuda") for _ in range(2))
                    k, v = (torch.empty(12, 4, 16, dtype=dtype, device="cuda") for _ in range(2))
                    cu = [torch.empty(3, dtype=torch.int32, device="cuda") for _ in range(2)]
                    call = kernels.Rectangles(*cu, 5, 8, ((4, 4), (5, 8)), *window, 0.25)
                    kernel = TorchDevice().of(dtype)
                    o, lse = kernel.forward(q, k, v, call)
                    self.assertEqual((o.shape, lse.shape, lse.dtype), (q.shape, (4, 9), torch.float32))
                    if dtype == torch.bfloat16:
                        gradients = kernel.backward(d_o, q, k, v, o, lse, call)
                        self.assertEqual([x.shape for x in gradients], [q.shape, k.shape, v.shape])

    def test_flash_attention_of_devices(self):
        """Its operators take what FlashAttention-2 takes: they are that library."""

        def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, mask, *, scale, **limits):
            return flash_attn_2._flash_attn_varlen_forward(
                q, k, v, cu_q, cu_k, max_q, max_k, dropout, scale, causal, **limits
            )

        def backward(
            d_o,
            q,
            k,
            v,
            o,
            lse,
            cu_q,
            cu_k,
            max_q,
            max_k,
            dropout,
            causal,
            *_,
            scale,
            window_size_left,
            window_size_right,
        ):
            found = tuple(map(torch.empty_like, (q, k, v)))
            lengths = cu_q, cu_k, max_q, max_k, dropout, scale, causal
            flash_attn_2._flash_attn_varlen_backward(
                d_o, q, k, v, o, lse, *found, *lengths, window_size_left, window_size_right, 0.0, None, False
            )
            return found

        with mock.patch.multiple(torch.ops.aten, _flash_attention_forward=forward, _flash_attention_backward=backward):
            kernel = TorchDevice().of(torch.bfloat16)
            for seed in range(60):
                op = drawn_op(random.Random(seed), stripes=seed % 3 == 0)
                with self.subTest(seed=seed):
                    op = type(op)(**{**vars(op), "score": op.score._replace(softcap=0.0)})
                    check(
                        self,
                        kernel,
                        op,
                        seed,
                        dtype=torch.bfloat16,
                        tolerance=1.2e-2,
                        dims=(16, 16),
                        lse_gradient=seed % 4 > 0,
                    )

    def test_cudnn(self):
        """The double has the arguments of PyTorch's operators. It counts causal masks from the top-left corner, as cuDNN does in some
        versions, and needs as many keys as rows there; its lse is [rows, heads, 1]."""
        names = {
            function: [one.name for one in getattr(torch.ops.aten, function).default._schema.arguments]
            for function in ("_cudnn_attention_forward", "_cudnn_attention_backward")
        }
        masks = set()

        def square(call):
            lengths = [call[name].diff().tolist() for name in ("cum_seq_q", "cum_seq_k")]
            self.assertEqual([max(x) for x in lengths], [call["max_q"], call["max_k"]])
            self.assertTrue(not call["is_causal"] or lengths[0] == lengths[1], lengths)
            self.assertEqual((call["dropout_p"], call["attn_bias"]), (0.0, None))
            masks.add((call["is_causal"], lengths[0] == lengths[1]))
            window = (-1, 0 if call["is_causal"] else -1)
            return call["cum_seq_q"], call["cum_seq_k"], call["max_q"], None, call["scale"], *window

        def bound(function, arguments, more):
            return dict(zip(names[function], arguments)) | more

        def forward(*arguments, **more):
            call = bound("_cudnn_attention_forward", arguments, more)
            self.assertIs(call["compute_log_sumexp"], True)
            inputs = [call[name] for name in ("query", "key", "value")]
            self.assertTrue(all(x.is_contiguous() for x in inputs))
            o, lse = plain.forward(*inputs, *square(call))
            return o.to(inputs[0].dtype), lse.t().contiguous().unsqueeze(2), None, None, 0, 0, None, None, None

        def backward(*arguments, **more):
            call = bound("_cudnn_attention_backward", arguments, more)
            d_o, *inputs, o, lse = (call[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp"))
            self.assertEqual(lse.shape, (*d_o.shape[:2], 1))
            found = plain.backward(d_o, *inputs, o, lse.squeeze(2).t(), *square(call))
            return tuple(x.to(d_o.dtype) for x in found)

        with mock.patch.multiple(torch.ops.aten, _cudnn_attention_forward=forward, _cudnn_attention_backward=backward):
            kernel, refused = kernels.find("cudnn", "cpu"), 0
            for seed in range(120):
                op = drawn_op(random.Random(seed), stripes=seed % 3 == 0)
                op = type(op)(**{**vars(op), "score": op.score._replace(softcap=0.0)})
                of = {"dtype": torch.bfloat16, "tolerance": 1.2e-2, "dims": (16, 16), "lse_gradient": seed % 4 > 0}
                with self.subTest(seed=seed):
                    try:
                        check(self, kernel, op, seed, **of)
                    except Unsupported as error:
                        self.assertIn("kernels='cudnn' has no limit on the left", str(error))
                        refused += 1
        self.assertEqual(masks, {(False, False), (False, True), (True, True)})
        self.assertTrue(10 < refused < 90, refused)

    def test_the_backward_whose_shapes_pytorch_cannot_tell(self):
        """Arguments are checked before PyTorch finds that the CPU has no such kernel."""
        q, k, lse = torch.empty(9, 4, 16), torch.empty(12, 4, 16), torch.empty(4, 9)
        cu = [torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 9], [0, 4, 12])]
        call = kernels.Rectangles(*cu, 5, 8, ((4, 4), (5, 8)), None, 0, 0.25)
        with self.assertRaisesRegex(
            NotImplementedError, "aten::_efficient_attention_backward.* with arguments from the 'CPU' backend"
        ):
            TorchDevice().of(torch.float32).backward(q, q, k, k, q, lse, call)
        of_cudnn = kernels.find("cudnn", "cpu")
        for name, run_it in (
            ("forward", lambda: of_cudnn.forward(q, k, k, call)),
            ("backward", lambda: of_cudnn.backward(q, q, k, k, q, lse, call)),
        ):
            with self.assertRaisesRegex(NotImplementedError, f"aten::_cudnn_attention_{name}.* from the 'CPU' backend"):
                run_it()


def example(rank, world):
    import own_kernel

    q, k, v, o = own_kernel.main(aiter_mha, device="cpu")
    mine = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    context = Context(kernels="math", heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    same = context.batch([0, 700, 700, 1500, 2000]).attention(*mine)
    same.sum().backward()
    context.close()
    pairs = zip((o, q.grad, k.grad, v.grad), (same, *(x.grad for x in mine)))
    return [
        ((a.float() - b.float()).square().mean().sqrt() / b.float().square().mean().sqrt()).item() for a, b in pairs
    ]


class ExampleTest(unittest.TestCase):
    def test_a_kernel_with_aiters_signature(self):
        for errors in run(example, 2):
            self.assertLess(max(errors), 1.5e-2, errors)


if __name__ == "__main__":
    unittest.main()
