"""OpenVINO's internal operator GatedDeltaNet, which its own passes put in place of a model's loop over tokens."""

import numpy as np
import openvino as ov

VERSION = ov.__version__.split("-")[0]
WORK = ["forward", "decoding"]


def _ports(shapes, first):
    ports = ("".join(f"<dim>{size}</dim>" for size in shape) for shape in shapes)
    return "".join(f'<port id="{first + i}" precision="FP32">{dims}</port>' for i, dims in enumerate(ports))


def _network(shapes, outputs):
    """The operator alone, in OpenVINO's file format: no public function creates it."""
    count, layers, edges = len(shapes), [], []
    for i, shape in enumerate(shapes):
        sizes = ",".join(map(str, shape))
        layers.append(
            f'<layer id="{i}" name="input{i}" type="Parameter" version="opset1">'
            f'<data shape="{sizes}" element_type="f32"/><output>{_ports([shape], 0)}</output></layer>'
        )
        edges.append(f'<edge from-layer="{i}" from-port="0" to-layer="{count}" to-port="{i}"/>')
    layers.append(
        f'<layer id="{count}" name="scan" type="GatedDeltaNet" version="extension">'
        '<data fuse_qk_l2norm="false" q_l2_norm_eps="1e-6" k_l2_norm_eps="1e-6"/>'
        f"<input>{_ports(shapes, 0)}</input><output>{_ports(outputs, count)}</output></layer>"
    )
    for i, shape in enumerate(outputs):
        layers.append(
            f'<layer id="{count + 1 + i}" name="output{i}" type="Result" version="opset1">'
            f"<input>{_ports([shape], 0)}</input></layer>"
        )
        edges.append(f'<edge from-layer="{count}" from-port="{count + i}" to-layer="{count + 1 + i}" to-port="0"/>')
    return f'<net name="scan" version="11"><layers>{"".join(layers)}</layers><edges>{"".join(edges)}</edges></net>'


def prepare(work, arrays, threads):
    B, _, H, D = arrays["q"].shape
    state = arrays["state"] if work == "decoding" else np.zeros((B, H, D, D), np.float32)
    inputs = [arrays["q"], arrays["k"], arrays["v"], state, arrays["log_gate"], arrays["beta"]]
    core = ov.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin, which registers the operator
    network = core.read_model(_network([x.shape for x in inputs], [arrays["v"].shape, state.shape]).encode(), b"")
    model = core.compile_model(
        network, "CPU", {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    )
    request = model.create_infer_request()
    for i, x in enumerate(inputs):
        request.set_input_tensor(i, ov.Tensor(x, shared_memory=True))

    def call(held=inputs):  # the tensors share their memory but do not keep it
        request.infer()
        return request

    def read(done):
        o, final = (done.get_output_tensor(i).data.copy() for i in range(2))
        return {"o": o, **({"state": final} if work == "decoding" else {})}

    return call, read
