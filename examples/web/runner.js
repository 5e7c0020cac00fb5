// A model written by `efla export onnx`, on onnxruntime-web. Tokens are bytes; byte 0 starts and ends a text.
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";

ort.env.wasm.wasmPaths = new URL("./node_modules/onnxruntime-web/dist/", import.meta.url).href;
ort.env.wasm.numThreads = 1; // more need the headers of a cross-origin isolated page

/** The output that replaces a state's input in the next call. */
const present = (past) => past.replace("past_key_values", "present").replace("past_", "present_");

export class Runner {
  /** model: a URL, or the bytes of the file. */
  static async load(model) {
    return new Runner(await ort.InferenceSession.create(model, { executionProviders: ["wasm"] }));
  }

  constructor(session) {
    this.session = session;
    this.states = session.inputMetadata.filter(({ name }) => name !== "input_ids");
    const { shape } = session.outputMetadata.find(({ name }) => name === "logits");
    if (shape[2] !== 256) throw new Error(`expected a model over bytes with 256 tokens, got ${shape[2]}; this example has no other tokenizer`);
    this.reset();
  }

  /** Forget everything. */
  reset() {
    const sizes = { batch: 1, past: 0 };
    this.feeds = {};
    for (const { name, shape } of this.states) {
      const dims = shape.map((size) => sizes[size] ?? size);
      this.feeds[name] = new ort.Tensor("float32", new Float32Array(dims.reduce((a, b) => a * b, 1)), dims);
    }
  }

  /** Read tokens and return the logits of the next one. */
  async read(tokens) {
    const ids = new ort.Tensor("int64", BigInt64Array.from(tokens, BigInt), [1, tokens.length]);
    const out = await this.session.run({ input_ids: ids, ...this.feeds });
    for (const { name } of this.states) this.feeds[name] = out[present(name)];
    return out.logits.data.slice(-256);
  }

  /** Yield the bytes that follow a text. temperature 0 takes the most likely one. */
  async *generate(text, { maxNewTokens = 200, temperature = 0.7 } = {}) {
    this.reset();
    let logits = await this.read([0, ...new TextEncoder().encode(text)]);
    for (let i = 0; i < maxNewTokens; i++) {
      const token = sample(logits, temperature);
      if (token === 0) return;
      yield token;
      logits = await this.read([token]);
    }
  }
}

function sample(logits, temperature) {
  const best = logits.reduce((at, value, i) => (value > logits[at] ? i : at), 0);
  if (temperature === 0) return best;
  const weights = Array.from(logits, (value) => Math.exp((value - logits[best]) / temperature));
  let left = Math.random() * weights.reduce((a, b) => a + b);
  const found = weights.findIndex((weight) => (left -= weight) <= 0);
  return found < 0 ? best : found;
}
