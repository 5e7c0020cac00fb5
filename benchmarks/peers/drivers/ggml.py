"""llama.cpp's ggml_gated_delta_net, in the ggml of llama-cpp-python's source, which ``make bench-peers`` compiles."""

import ctypes
import sys
from ctypes import POINTER, c_bool, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np

_folder = Path(sys.prefix) / "ggml"
_libraries = [ctypes.CDLL(str(_folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")]

VERSION = (_folder / "VERSION").read_text().strip()
WORK = ["forward", "decoding"]
FLOAT32 = 0


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Plan(ctypes.Structure):
    _fields_ = [
        ("work_size", c_size_t), ("work_data", c_void_p), ("n_threads", c_int), ("threadpool", c_void_p),
        ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("use_ref", c_bool),
    ]  # fmt: skip


def _function(name, result, *arguments):
    for library in _libraries:
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            return function
    raise OSError(f"ggml has no {name}; it needs the version of llama-cpp-python that the Makefile names")


init = _function("ggml_init", c_void_p, InitParams)
free = _function("ggml_free", None, c_void_p)
new_tensor_4d = _function("ggml_new_tensor_4d", c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64)
get_data = _function("ggml_get_data", c_void_p, c_void_p)
new_graph = _function("ggml_new_graph", c_void_p, c_void_p)
build_forward_expand = _function("ggml_build_forward_expand", None, c_void_p, c_void_p)
gated_delta_net = _function("ggml_gated_delta_net", c_void_p, *[c_void_p] * 7, c_int64)
graph_plan = _function("ggml_graph_plan", Plan, c_void_p, c_int, c_void_p)
graph_compute = _function("ggml_graph_compute", c_int, c_void_p, POINTER(Plan))


def prepare(work, arrays, threads):
    B, T, H, D = arrays["q"].shape
    # Its state is [B, H, V, K].
    state = arrays["state"].swapaxes(2, 3) if work == "decoding" else np.zeros((B, H, D, D), np.float32)
    inputs = [arrays["q"], arrays["k"], arrays["v"], arrays["log_gate"][..., None], arrays["beta"][..., None], state]
    size = sum(x.nbytes for x in inputs) + arrays["v"].nbytes + state.nbytes + (8 << 20)
    context = init(InitParams(size, None, False))

    def tensor(x):
        made, dense = new_tensor_4d(context, FLOAT32, *reversed(x.shape)), np.ascontiguousarray(x)
        ctypes.memmove(get_data(made), dense.ctypes.data, dense.nbytes)
        return made

    result = gated_delta_net(context, *(tensor(x) for x in inputs), 1)
    graph = new_graph(context)
    build_forward_expand(graph, result)
    plan = graph_plan(graph, threads, None)
    scratch = ctypes.create_string_buffer(max(plan.work_size, 1))
    plan.work_data = ctypes.cast(scratch, c_void_p)

    def call():
        if graph_compute(graph, ctypes.byref(plan)) != 0:
            raise RuntimeError("ggml_graph_compute failed")
        return scratch

    def read(_):
        count = B * T * H * D + B * H * D * D
        flat = np.ctypeslib.as_array(ctypes.cast(get_data(result), POINTER(ctypes.c_float)), (count,)).copy()
        o, final = flat[: B * T * H * D].reshape(B, T, H, D), flat[B * T * H * D :].reshape(B, H, D, D)
        return {"o": o, **({"state": final.swapaxes(2, 3)} if work == "decoding" else {})}

    return call, read
