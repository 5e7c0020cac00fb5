"""The two MAD backbones and their scores: mixer, SwiGLU, mixer, SwiGLU under a language-model head or in an auto-encoder.

Shapes: B sequences, L tokens, d = width, V tokens in the vocabulary, n targets.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from efla import rules
from efla.experiments.arms import ARMS
from efla.experiments.mad.config import MadConfig
from efla.experiments.mad.exact import IGNORE
from efla.experiments.mad.tasks import Setting
from efla.layers import LinearAttention, Mamba2, RMSNorm, SoftmaxAttention, SwiGLU
from efla.layers.blocks import swiglu_width
from efla.models.accounting import parameter_count

EPS = 1e-5
TEST_BATCH = 128
ATTENTION_HEAD_WIDTH = 8
MAMBA2_HEAD_WIDTH, MAMBA2_STATE = 32, 16
"""With inner width 2d and N = 16, the state of a Mamba-2 layer has 32 d numbers, as many as H heads of width 32."""


def mixer(arm: str, width: int, heads: int, backend: str = "auto") -> nn.Module:
    """The token mixer of an arm: [B, L, d] -> ([B, L, d], state)."""
    kind = ARMS[arm]
    if kind.mixer == "attention":
        return SoftmaxAttention(width, num_heads=width // ATTENTION_HEAD_WIDTH, bias=True)
    if kind.mixer == "mamba2":
        return Mamba2(width, head_dim=MAMBA2_HEAD_WIDTH, state_size=MAMBA2_STATE, eps=EPS, backend=backend)
    return LinearAttention(
        width, num_heads=heads, head_dim=width // heads, rule=kind.rule, key_norm=kind.l2_keys, eps=EPS, backend=backend
    )


class Residual(nn.Module):
    """x + f(RMSNorm(x))."""

    def __init__(self, f: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width, EPS)
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(self.norm(x))
        return x + (y[0] if isinstance(y, tuple) else y)


class Encoder(nn.Module):
    """Embedding and four layers. The last layer acts on each token alone, so it is applied only where it is read."""

    def __init__(self, arm: str, vocab_size: int, width: int, heads: int, backend: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        inner = swiglu_width(width, 16)
        layers = [mixer(arm, width, heads, backend), SwiGLU(width, inner), mixer(arm, width, heads, backend)]
        self.num_heads = layers[0].num_heads
        self.mixing = nn.ModuleList(Residual(layer, width) for layer in layers)
        self.last = Residual(SwiGLU(width, inner), width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, L] -> [B, L, d], before the last layer."""
        x: Tensor = self.embedding(tokens)
        for layer in self.mixing:
            x = layer(x)
        return x


class LanguageModel(nn.Module):
    """Logits of the positions that have a target: four layers, RMSNorm, linear with bias. [B, L] -> [n, V]."""

    def __init__(self, arm: str, vocab_size: int, width: int, heads: int, backend: str = "auto") -> None:
        super().__init__()
        self.encoder = Encoder(arm, vocab_size, width, heads, backend)
        self.norm = RMSNorm(width, EPS)
        self.head = nn.Linear(width, vocab_size)
        _initialise(self)

    def forward(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        """where: indices [n] of positions in the flattened [B * L] axis; all of them if absent."""
        x = self.encoder(tokens).flatten(0, 1)
        if where is not None:
            x = x.index_select(0, where)
        logits: Tensor = self.head(self.norm(self.encoder.last(x)))
        return logits


class AutoEncoder(nn.Module):
    """Compression: the hidden state at the last position is all the decoder sees. [B, L] -> [B * L, V].

    decoder, for each position j: encoding + sinusoid(j); twice RMSNorm, linear, GELU; RMSNorm, linear with bias.
    """

    sinusoid: Tensor

    def __init__(self, arm: str, vocab_size: int, width: int, heads: int, length: int, backend: str = "auto") -> None:
        super().__init__()
        self.encoder = Encoder(arm, vocab_size, width, heads, backend)
        self.decoder = nn.Sequential(
            RMSNorm(width, EPS), nn.Linear(width, width), nn.GELU(),
            RMSNorm(width, EPS), nn.Linear(width, width), nn.GELU(),
            RMSNorm(width, EPS), nn.Linear(width, vocab_size),
        )  # fmt: skip
        self.register_buffer("sinusoid", sinusoid(length, width), persistent=False)
        _initialise(self, linears=True)

    def forward(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        """where: as in :class:`LanguageModel`."""
        encoding = self.encoder.last(self.encoder(tokens)[:, -1])  # [B, d]
        x = (encoding[:, None] + self.sinusoid[: tokens.shape[1]]).flatten(0, 1)
        logits: Tensor = self.decoder(x if where is None else x.index_select(0, where))
        return logits


PARAMETERS = {LanguageModel: 410_320, AutoEncoder: 443_600}
"""Parameters of every ungated recurrent arm at V = 16, d = 128, H = 4; asserted whenever such a model is built."""


def sinusoid(length: int, width: int) -> Tensor:
    """[L, d]: d/2 sines, then d/2 cosines, of j * 10000^(-i / (d/2 - 1))."""
    half = width // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / (half - 1))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1).float()


def build(config: MadConfig, setting: Setting, arm: str, seed: int) -> LanguageModel | AutoEncoder:
    """The model of an arm for a setting. Its weights depend on the seed only: arms with equal parameters start equal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = (arm, setting.vocab_size, config.width, config.heads)
        model: LanguageModel | AutoEncoder
        if setting.task == "compression":
            model = AutoEncoder(*sizes, setting.length, config.backend)
        else:
            model = LanguageModel(*sizes, config.backend)
    ungated = ARMS[arm].mixer == "linear" and not rules.get(ARMS[arm].rule).needs_gate
    if ungated and (config.width, config.heads) == (128, 4):
        # Embedding and head grow by d + d + 1 with every token beyond 16.
        expected = PARAMETERS[type(model)] + (setting.vocab_size - 16) * (2 * config.width + 1)
        found = parameter_count(model)
        assert found == expected, f"{setting.id}, {arm}: {found:,} parameters, not {expected:,}"
    return model


def targets_of(targets: Tensor) -> tuple[Tensor | None, Tensor]:
    """The positions and values of the targets: (indices [n] into the flattened batch, or ``None`` for all; values [n])."""
    flat = targets.flatten()
    where = (flat != IGNORE).nonzero()[:, 0]
    return (None, flat) if len(where) == len(flat) else (where, flat[where])


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, mean over the targets that count."""
    where, wanted = targets_of(targets)
    logits = model(tokens, where)
    return functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), wanted)


def _initialise(model: nn.Module, *, linears: bool = False) -> None:
    """Draw embeddings and, if asked, linear maps with a standard deviation of 0.02; set biases to 0."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) or (linears and isinstance(module, nn.Linear)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


@dataclass(frozen=True)
class TaskScore:
    """One evaluation of the whole test set.

    reference_accuracy: macro average per batch, mean over batches. token_accuracy: correct targets / targets.
    loss: mean negative log-likelihood of a target. perplexity: exp of each batch's mean, averaged over batches.
    """

    reference_accuracy: float
    token_accuracy: float
    loss: float
    perplexity: float


NO_SCORE = TaskScore(math.nan, math.nan, math.nan, math.nan)


def macro_recall(predicted: Tensor, wanted: Tensor, num_classes: int) -> float:
    """Mean over classes of tp / (tp + fn), over the classes that are predicted or wanted at least once.

    A class that is predicted but never wanted counts as 0. predicted, wanted: [n].
    """
    wanted_count = torch.bincount(wanted, minlength=num_classes)
    predicted_count = torch.bincount(predicted, minlength=num_classes)
    hits = torch.bincount(wanted[predicted == wanted], minlength=num_classes)
    present = (wanted_count + predicted_count) > 0
    recall = hits.double() / wanted_count.clamp(min=1)
    return float(recall[present].mean())


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, *, batch: int = TEST_BATCH) -> TaskScore:
    """Score a model on inputs and targets, each [instances, L], in order; ``NO_SCORE`` if the loss is not a number."""
    accuracy = perplexity = nll = 0.0
    right = count = 0
    for start in range(0, len(inputs), batch):
        part = slice(start, start + batch)
        where, wanted = targets_of(targets[part])
        logits = model(inputs[part], where).float()
        predicted = logits.argmax(1)
        mean = float(functional.cross_entropy(logits.double(), wanted))
        size = len(inputs[part])
        accuracy += size * macro_recall(predicted, wanted, logits.shape[1])
        perplexity += size * (math.exp(mean) if mean < 700 else math.inf)
        nll += mean * len(wanted)
        right += int((predicted == wanted).sum())
        count += len(wanted)
    if math.isnan(nll):
        return NO_SCORE
    return TaskScore(accuracy / len(inputs), right / count, nll / count, perplexity / len(inputs))
