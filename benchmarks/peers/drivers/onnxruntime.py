"""ONNX Runtime's operator LinearAttention, inputs and outputs bound so that a call copies nothing."""

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

VERSION = ort.__version__
WORK = ["forward", "decoding"]


def prepare(work, arrays, threads):
    B, T, H, D = arrays["q"].shape
    flat = (B, T, H * D)
    inputs = {name: arrays[name].reshape(flat) for name in ("q", "k", "v")}
    if work == "decoding":
        inputs["state"] = arrays["state"]
    inputs |= {"decay": arrays["log_gate"], "beta": arrays["beta"]}
    outputs = {"o": np.empty(flat, np.float32), "present": np.empty((B, H, D, D), np.float32)}

    def described(tensors):
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in tensors.items()]

    operator = helper.make_node(
        "LinearAttention", ["q", "k", "v", "state" if "state" in inputs else "", "decay", "beta"], list(outputs),
        domain="com.microsoft", update_rule="gated_delta", q_num_heads=H, kv_num_heads=H, scale=D**-0.5,
    )  # fmt: skip
    model = helper.make_model(
        helper.make_graph([operator], "scan", described(inputs), described(outputs)),
        opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)],
    )
    model.ir_version = min(model.ir_version, 11)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(onnx.ModelProto.SerializeToString(model), options, ["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, x in inputs.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x)))
    for name, x in outputs.items():
        binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(x))

    def call():
        session.run_with_iobinding(binding)
        return binding

    def read(bound):
        o, state = (value.numpy() for value in bound.get_outputs())
        return {"o": o.reshape(B, T, H, D), **({"state": state} if work == "decoding" else {})}

    return call, read
