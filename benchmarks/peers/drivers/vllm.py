"""vLLM's CPU kernels: refused. They are compiled for AVX-512, and no such CPU has been at hand to write a driver on."""

from pathlib import Path

if "avx512f" not in Path("/proc/cpuinfo").read_text():
    raise RuntimeError("vLLM's CPU kernels need AVX-512, which this CPU does not have")
raise RuntimeError("no driver for vLLM's CPU kernels has been written; this CPU could run them")
