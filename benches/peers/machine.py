# SPDX-License-Identifier: MIT OR Apache-2.0
"""What machine this is, what its device can do at most, and what clocks and power were while something ran.

`machine.py facts` and `machine.py ceilings` print one JSON object. Ceilings are a large copy on the device and a large
product of random bf16 matrices through PyTorch: what is measured later is a share of these, not of a data sheet. Nothing
here changes a setting of the device.
"""

import json
import platform
import shutil
import statistics
import subprocess
import sys
import threading

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
ABOUT = ("name", "driver_version", "vbios_version", "memory.total", "clocks.max.sm", "power.limit", "compute_cap")


def said(*command):
    """What a program prints, or None when it is not there or fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def query(fields):
    text = said("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if not text:
        return None
    return dict(zip(fields, (word.strip() for word in text.splitlines()[0].split(","))))


def facts():
    about = {"system": platform.platform(), "python": platform.python_version(), "device": query(ABOUT)}
    lscpu = said("lscpu") or ""
    about["cpu"] = next(
        (line.split(":", 1)[1].strip() for line in lscpu.splitlines() if line.startswith("Model name")), None
    )
    about["tools"] = {tool: shutil.which(tool) for tool in ("ncu", "compute-sanitizer", "nvcc", "cuobjdump")}
    try:
        import torch

        about["torch"] = {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    except ImportError:
        about["torch"] = None
    return about


def event_seconds(torch, call, warmup, repeats):
    for _ in range(warmup):
        call()
    pairs = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in pairs) / 1e3


def ceilings(size=8192, copied=4 << 30):
    """Bytes read and written per second of a copy; operations per second of a product of `size` x `size` matrices."""
    try:
        import torch
    except ImportError:
        return {"failed": "there is no PyTorch in this Python"}
    if not torch.cuda.is_available():
        return {"failed": "PyTorch finds no CUDA device"}
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float32).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    with Gauge() as gauge:
        product = event_seconds(torch, lambda: torch.matmul(a, b, out=out), 5, 30)
    source = torch.randint(0, 255, (copied,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = event_seconds(torch, lambda: target.copy_(source), 3, 20)
    return {
        "matmul_bf16_tflops": 2 * size**3 / product / 1e12,
        "copy_tb_per_s": 2 * copied / copy / 1e12,
        "while_multiplying": gauge.medians(),
    }


class Gauge:
    """Clocks, power and heat of the first device while the `with` lasts, read by nvidia-smi several times a second."""

    def __init__(self, every_ms=200):
        self.every_ms, self.samples, self.process = every_ms, [], None

    def __enter__(self):
        if shutil.which("nvidia-smi"):
            self.process = subprocess.Popen(
                [
                    "nvidia-smi",
                    "-i",
                    "0",
                    f"--query-gpu={','.join(FIELDS)}",
                    "--format=csv,noheader,nounits",
                    "-lms",
                    str(self.every_ms),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self.reader = threading.Thread(target=self.read, daemon=True)
            self.reader.start()
        return self

    def read(self):
        for line in self.process.stdout:
            try:
                self.samples.append([float(word) for word in line.split(",")])
            except ValueError:
                continue  # "[N/A]"

    def __exit__(self, *_):
        if self.process:
            self.process.terminate()
            self.process.wait()
            self.reader.join(5)
            self.process.stdout.close()

    def mark(self):
        """Where samples stand now, for `medians` of what comes later."""
        return len(self.samples)

    def medians(self, since=0):
        """The median of each field from `since` on, or None where nothing was read."""
        seen = [sample for sample in self.samples[since:] if len(sample) == len(FIELDS)]
        if not seen:
            return None
        return {name: statistics.median(column) for name, column in zip(FIELDS, zip(*seen))}


if __name__ == "__main__":
    what = {"facts": facts, "ceilings": ceilings}.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if not what:
        sys.exit("machine.py facts|ceilings")
    found = what()
    print(json.dumps(found))
    sys.exit(1 if "failed" in found else 0)
