"""The reference model, its random numbers and its data, in PyTorch: what Paceline's numbers are compared with.

Written from docs/reference-model.md and not from Paceline's code, so that the two can disagree.
Two forms of the same model are here:

* `loss_autograd`: the forward pass only; PyTorch derives the backward pass. The synchronous golden files use it.
* `Stage`: one pipeline stage with a hand-written backward pass that takes the weights as an argument. The forward
  pass saves activations; the backward pass computes input gradients with the weights *it is given* and weight gradients
  with the *saved* activations. That is what an asynchronous pipeline without weight copies does, and what autograd refuses.

Weights are `[in, out]`, y = x W + b. Shapes below: B sequences, T tokens each, D width, H heads, V vocab.
"""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

LN_EPS = 1e-5
GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715


# --- Random numbers: a pure function of (seed, stream name, index) ---------------------------------------------------


def splitmix(z):
    """The SplitMix64 output function on a uint64 array."""
    with np.errstate(over="ignore"):
        z = np.asarray(z, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def fnv1a64(text):
    """FNV-1a, 64 bits, of the text's UTF-8 bytes."""
    hash_ = 0xCBF29CE484222325
    for byte in text.encode():
        hash_ = ((hash_ ^ byte) * 0x100000001B3) % 2**64
    return hash_


def draw(seed, name, index):
    """64 random bits for each entry of `index` in the stream `name`."""
    with np.errstate(over="ignore"):
        key = splitmix(np.uint64(seed ^ fnv1a64(name)))
        return splitmix(key + np.asarray(index, dtype=np.uint64))


def uniform(seed, name, index):
    """Uniform in [0, 1), f64, 53 random bits."""
    return (draw(seed, name, index) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(seed, name, count):
    """`count` standard normal numbers in f64 (Box-Muller, the cosine half)."""
    element = np.arange(count, dtype=np.uint64)
    u1 = 1.0 - uniform(seed, name, 2 * element)
    u2 = uniform(seed, name, 2 * element + np.uint64(1))
    return np.sqrt(-2.0 * np.log(u1)) * np.cos(2.0 * math.pi * u2)


# --- Model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    # The head multiplies by the token embedding's table.
    tied: bool = False

    def units(self):
        """What a partition cuts between, in forward order."""
        return ["embed", *range(self.layers), "head"]

    def params_of(self, unit):
        """(name, shape, init) of a unit's parameters; init is a standard deviation, "ones" or "zeros"."""
        d, std = self.width, 0.02
        if unit == "embed":
            return [("embed.tok", (self.vocab, d), std), ("embed.pos", (self.context, d), std)]
        if unit == "head":
            norm = [("final.ln.gain", (d,), "ones"), ("final.ln.bias", (d,), "zeros")]
            return norm if self.tied else [*norm, ("head.weight", (d, self.vocab), std)]
        residual = std / math.sqrt(2 * self.layers)
        named = [
            ("ln1.gain", (d,), "ones"),
            ("ln1.bias", (d,), "zeros"),
            ("attn.qkv.weight", (d, 3 * d), std),
            ("attn.qkv.bias", (3 * d,), "zeros"),
            ("attn.out.weight", (d, d), residual),
            ("attn.out.bias", (d,), "zeros"),
            ("ln2.gain", (d,), "ones"),
            ("ln2.bias", (d,), "zeros"),
            ("mlp.up.weight", (d, 4 * d), std),
            ("mlp.up.bias", (4 * d,), "zeros"),
            ("mlp.down.weight", (4 * d, d), residual),
            ("mlp.down.bias", (d,), "zeros"),
        ]
        return [(f"block.{unit}.{name}", shape, init) for name, shape, init in named]


def initial_params(model, units, seed, dtype):
    """Name -> tensor for the parameters of `units`. Drawn in f64, rounded to f32, then converted to `dtype`."""
    params = {}
    for unit in units:
        for name, shape, init in model.params_of(unit):
            if init == "ones":
                value = np.ones(shape)
            elif init == "zeros":
                value = np.zeros(shape)
            else:
                value = (normal(seed, name, math.prod(shape)) * init).reshape(shape)
            params[name] = torch.from_numpy(value.astype(np.float32)).to(dtype)
    return params


def loss_autograd(model, params, tokens, targets, head_learns=True):
    """Summed cross-entropy in nats; tokens and targets are [B, T]. A tied table may be told nothing by the head, which is wrong."""
    b, t = tokens.shape
    d, h = model.width, model.heads
    norm = lambda x, name: F.layer_norm(x, (d,), params[f"{name}.gain"], params[f"{name}.bias"], LN_EPS)
    linear = lambda x, name: x @ params[f"{name}.weight"] + params[f"{name}.bias"]
    x = params["embed.tok"][tokens] + params["embed.pos"]
    for layer in range(model.layers):
        p = f"block.{layer}"
        q, k, v = linear(norm(x, f"{p}.ln1"), f"{p}.attn.qkv").view(b, t, 3, h, d // h).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(o.transpose(1, 2).reshape(b, t, d), f"{p}.attn.out")
        up = F.gelu(linear(norm(x, f"{p}.ln2"), f"{p}.mlp.up"), approximate="tanh")
        x = x + linear(up, f"{p}.mlp.down")
    head = params["embed.tok"].T if model.tied else params["head.weight"]
    logits = norm(x, "final.ln") @ (head if head_learns else head.detach())
    return F.cross_entropy(logits.reshape(-1, model.vocab), targets.reshape(-1), reduction="sum")


# --- Hand-written forward and backward passes of a stage --------------------------------------------------------------


def norm_forward(x, gain, bias):
    """LayerNorm over the last axis -> (y, saved)."""
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + LN_EPS)
    return (x - mean) * rstd * gain + bias, (x, mean, rstd)


def norm_backward(dy, saved, gain):
    """(dx with the given gain, dgain, dbias from what was saved)."""
    x, mean, rstd = saved
    normed = (x - mean) * rstd
    dn = dy * gain
    dx = rstd * (dn - dn.mean(-1, keepdim=True) - normed * (dn * normed).mean(-1, keepdim=True))
    return dx, (dy * normed).sum((0, 1)), dy.sum((0, 1))


def weight_gradient(x, dy):
    """dW [in, out] from the layer's saved input and its output gradient."""
    return x.flatten(0, 1).T @ dy.flatten(0, 1)


def split_heads(qkv, heads):
    """[B, T, 3D] -> three [B, H, T, D/H]."""
    b, t, d3 = qkv.shape
    return qkv.view(b, t, 3, heads, d3 // 3 // heads).permute(2, 0, 3, 1, 4)


def attention_forward(qkv, heads):
    """Causal attention -> (o [B, T, D], saved). Saves the log-sum-exp of each row and not the probabilities."""
    q, k, v = split_heads(qkv, heads)
    t = q.shape[2]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    o = torch.exp(scores - lse) @ v
    return o.transpose(1, 2).flatten(2), (qkv, o, lse)


def attention_backward(do, saved, heads):
    """Gradient [B, T, 3D] of qkv; reads no weights."""
    qkv, o, lse = saved
    q, k, v = split_heads(qkv, heads)
    b, _, t, dh = q.shape
    do = do.view(b, t, heads, dh).transpose(1, 2)
    scores = q @ k.transpose(-1, -2) / math.sqrt(dh)
    p = torch.exp(scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf) - lse)
    ds = p * (do @ v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) / math.sqrt(dh)
    dqkv = torch.stack([ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do])
    return dqkv.permute(1, 3, 0, 2, 4).flatten(2)


def gelu_backward(da, u):
    """Gradient of the tanh form of GELU at u."""
    th = torch.tanh(GELU_SCALE * (u + GELU_CUBE * u**3))
    return da * (0.5 * (1 + th) + 0.5 * u * (1 - th**2) * GELU_SCALE * (1 + 3 * GELU_CUBE * u**2))


class Stage:
    """Consecutive units of a model. `params` (name -> tensor) may change between a micro-batch's forward and backward pass."""

    def __init__(self, model, units, seed, dtype):
        self.model, self.units = model, units
        self.params = initial_params(model, units, seed, dtype)

    def forward(self, x, targets=None, params=None):
        """x: tokens [B, T] on the first stage, else activations [B, T, D]. -> (output, saved); the last stage's
        output is the summed cross-entropy of `targets`. Reads `params`, or the stage's own."""
        if params is not None:
            other = copy.copy(self)
            other.params = params
            return other.forward(x, targets)
        saved = {}
        for unit in self.units:
            if unit == "embed":
                saved[unit] = x
                x = self.params["embed.tok"][x] + self.params["embed.pos"]
            elif unit == "head":
                x, saved[unit] = self.head_forward(x, targets)
            else:
                x, saved[unit] = self.block_forward(f"block.{unit}", x)
        return x, saved

    def backward(self, dy, saved, params, loss_scale):
        """dy: output gradient (None on the last stage). -> (input gradient or None, name -> weight gradient).
        Input gradients use `params`, weight gradients what `forward` saved."""
        grads = {}
        for unit in reversed(self.units):
            if unit == "embed":
                self.embed_backward(dy, saved[unit], params, grads)
                dy = None
            elif unit == "head":
                dy = self.head_backward(saved[unit], params, loss_scale, grads)
            else:
                dy = self.block_backward(f"block.{unit}", dy, saved[unit], params, grads)
        return dy, grads

    def linear(self, name, x):
        return x @ self.params[f"{name}.weight"] + self.params[f"{name}.bias"]

    def norm(self, name, x):
        return norm_forward(x, self.params[f"{name}.gain"], self.params[f"{name}.bias"])

    def block_forward(self, p, x):
        y1, norm1 = self.norm(f"{p}.ln1", x)
        o, attention = attention_forward(self.linear(f"{p}.attn.qkv", y1), self.model.heads)
        x = x + self.linear(f"{p}.attn.out", o)
        y2, norm2 = self.norm(f"{p}.ln2", x)
        u = self.linear(f"{p}.mlp.up", y2)
        a = F.gelu(u, approximate="tanh")
        return x + self.linear(f"{p}.mlp.down", a), (norm1, y1, attention, o, norm2, y2, u, a)

    def block_backward(self, p, dy, saved, params, grads):
        norm1, y1, attention, o, norm2, y2, u, a = saved

        def linear(name, dy, x):
            grads[f"{name}.weight"], grads[f"{name}.bias"] = weight_gradient(x, dy), dy.sum((0, 1))
            return dy @ params[f"{name}.weight"].T

        def norm(name, dy, saved):
            dx, grads[f"{name}.gain"], grads[f"{name}.bias"] = norm_backward(dy, saved, params[f"{name}.gain"])
            return dx

        du = gelu_backward(linear(f"{p}.mlp.down", dy, a), u)
        dy = dy + norm(f"{p}.ln2", linear(f"{p}.mlp.up", du, y2), norm2)
        dqkv = attention_backward(linear(f"{p}.attn.out", dy, o), attention, self.model.heads)
        return dy + norm(f"{p}.ln1", linear(f"{p}.attn.qkv", dqkv, y1), norm1)

    def embed_backward(self, dy, tokens, params, grads):
        table = torch.zeros_like(params["embed.tok"])
        grads["embed.tok"] = table.index_add_(0, tokens.flatten(), dy.flatten(0, 1))
        grads["embed.pos"] = dy.sum(0)

    def head_forward(self, x, targets):
        y, norm = self.norm("final.ln", x)
        logits = y @ self.params["head.weight"]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, (norm, y, logits, targets)

    def head_backward(self, saved, params, loss_scale, grads):
        norm, y, logits, targets = saved
        dlogits = (torch.softmax(logits, -1) - F.one_hot(targets, self.model.vocab)) * loss_scale
        grads["head.weight"] = weight_gradient(y, dlogits)
        dx, grads["final.ln.gain"], grads["final.ln.bias"] = norm_backward(
            dlogits @ params["head.weight"].T, norm, params["final.ln.gain"]
        )
        return dx


# --- Data -------------------------------------------------------------------------------------------------------------


class Data:
    """A text's bytes as tokens, sampled by (seed, sequence number)."""

    def __init__(self, data, model, microbatch, seed):
        self.tokens = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).astype(np.int64))
        self.context, self.microbatch, self.seed = model.context, microbatch, seed

    def start(self, sequence):
        """Token at which training sequence number `sequence` starts."""
        return int(draw(self.seed, "data", sequence)) % (len(self.tokens) - self.context)

    def batch(self, index):
        """(tokens, targets), each [microbatch, context], of micro-batch `index`, counted from the run's start."""
        starts = [self.start(index * self.microbatch + row) for row in range(self.microbatch)]
        rows = torch.stack([self.tokens[s : s + self.context + 1] for s in starts])
        return rows[:, :-1], rows[:, 1:]


# --- Optimizers -------------------------------------------------------------------------------------------------------


def learning_rate(rate, update):
    """`rate`: a number, or {peak, warmup, total, floor}; `update` from 0."""
    if not isinstance(rate, dict):
        return rate
    peak, warmup, total, floor = (rate[key] for key in ("peak", "warmup", "total", "floor"))
    if update < warmup:
        return peak * (update + 1) / warmup
    if update >= total:
        return floor
    return floor + (peak - floor) * (1 + math.cos(math.pi * (update - warmup) / (total - warmup))) / 2


class Optimizer:
    """Optimizers written out from their papers and their authors' code. Decay is decoupled and applies to parameters of
    two or more dimensions. `torch_optimizer` below is PyTorch's own, for the synchronous runs."""

    def __init__(self, spec, params, stage=0, stages=1, delay=None):
        self.spec, self.params, self.updates = spec, params, 0
        # P-1-s updates: what a stage of the emulated pipeline has without accumulation.
        self.delay = stages - 1 - stage if delay is None else delay
        if "nesterov" in spec and spec["nesterov"].get("by_stage"):
            mu = spec["nesterov"]["momentum"]
            self.spec = {**spec, "nesterov": {"momentum": mu + self.delay * (0.99 - mu) / stages}}
        if spec["kind"] == "nadam" and "nesterov" in spec:
            self.spec = {**spec, "beta1": self.spec["nesterov"]["momentum"]}
        zeros = lambda: {name: torch.zeros_like(p) for name, p in params.items()}
        self.m, self.v, self.d, self.before = zeros(), zeros(), zeros(), None
        # The last update of each parameter, for error feedback.
        self.last = zeros()
        # The same without any correction, for predictions of weights.
        self.taken = zeros()
        # For PipeMare: the mean change of the weights, and what the backward pass reads.
        self.change, self.moved_back = zeros(), {name: p.clone() for name, p in params.items()}
        # For Nesterov: weights before their look-ahead, now and one update ago.
        self.behind = {name: p.clone() for name, p in params.items()}
        self.behind_before = {name: p.clone() for name, p in params.items()}
        # NAdam's product of all momenta so far.
        self.momenta = 1.0

    @torch.no_grad()
    def step(self, grads):
        lr = learning_rate(self.spec["lr"], self.updates)
        if "anneal" in self.spec.get("pipemare", {}):
            left = 1 - min(self.updates / self.spec["pipemare"]["anneal"], 1)
            lr /= max(1, self.delay) ** left
        self.updates += 1
        if self.spec["kind"] == "nadam":
            self.momenta *= self.nesterov(self.updates)
        for name, w in self.params.items():
            decay = self.spec["decay"] if w.dim() >= 2 else 0.0
            update = lr * getattr(self, self.spec["kind"])(name, grads[name])
            self.taken[name] = update
            if "error_feedback" in self.spec:
                feedback = self.spec["error_feedback"]
                delay = min(feedback.get("tau", self.delay), self.updates - 1)
                corrected = update + feedback["lambda"] * delay * (update - self.last[name])
                self.last[name], update = update, corrected
            if "nesterov" in self.spec and self.spec["kind"] != "nadam":
                self.look_ahead(name, w, update, lr * decay)
                continue
            start = w.clone()
            if self.spec["kind"] == "adan":
                w.sub_(update).div_(1 + lr * decay)
            else:
                w.mul_(1 - lr * decay).sub_(update)
            if "discrepancy" in self.spec.get("pipemare", {}) and self.delay > 0:
                keep = self.spec["pipemare"]["discrepancy"] ** (1 / self.delay)
                self.change[name] = keep * self.change[name] + (1 - keep) * (w - start)
                self.moved_back[name] = w - self.delay * self.change[name]
        self.before = {name: g.clone() for name, g in grads.items()}

    def compensated(self, grads, read):
        """DC-ASGD: gradients made with the weights `read`, moved on to the weights as they are."""
        strength = self.spec["dc_asgd"]["lambda"]
        return {name: g + strength * g * g * (self.params[name] - read[name]) for name, g in grads.items()}

    def backward_params(self):
        """What the backward pass reads in place of the weights, if it does. Drift and delay are one in the emulated pipeline."""
        return self.moved_back if "discrepancy" in self.spec.get("pipemare", {}) and self.delay > 0 else {}

    def look_ahead(self, name, w, update, decay):
        """The parameter w is the point that looks ahead, x + c (x - x before). Its gradient moves x; decay moves all by a share."""
        c = self.spec["nesterov"]["momentum"]
        x, before = self.behind[name], self.behind_before[name]
        ahead = c * (x - before)
        new = x + ahead - (1 - c) * update
        # Decay takes its share of w; the change of x stays as it is.
        decayed = w * (1 - decay) - w
        self.behind_before[name], self.behind[name] = x + decayed, new + decayed
        w.copy_(new + c * (new - x) + decayed)

    # Each takes a parameter's name and gradient, updates its states, and returns the update before the learning rate.

    def sgd(self, name, g):
        return self.m[name].mul_(self.spec["momentum"]).add_(g).clone()

    def lion(self, name, g):
        m, b1, b2 = self.m[name], self.spec["beta1"], self.spec["beta2"]
        update = torch.sign(b1 * m + (1 - b1) * g)
        m.mul_(b2).add_((1 - b2) * g)
        return update

    def signum(self, name, g):
        beta = self.spec["momentum"]
        return torch.sign(self.m[name].mul_(beta).add_((1 - beta) * g))

    def moments(self, name, g):
        """Both moments after g, and what corrects the second."""
        m, v, b1, b2 = self.m[name], self.v[name], self.spec["beta1"], self.spec["beta2"]
        m.mul_(b1).add_((1 - b1) * g)
        v.mul_(b2).add_((1 - b2) * g * g)
        return m, (v / (1 - b2**self.updates)).sqrt() + self.spec["eps"]

    def adamw(self, name, g):
        m, root = self.moments(name, g)
        return m / (1 - self.spec["beta1"] ** self.updates) / root

    def nesterov(self, t):
        return self.spec["beta1"] * (1 - 0.5 * 0.96 ** (t * self.spec["momentum_decay"]))

    def nadam(self, name, g):
        m, root = self.moments(name, g)
        now, ahead = self.nesterov(self.updates), self.nesterov(self.updates + 1)
        return (ahead * m / (1 - self.momenta * ahead) + (1 - now) * g / (1 - self.momenta)) / root

    def adan(self, name, g):
        m, d, v = self.m[name], self.d[name], self.v[name]
        b1, b2, b3 = (self.spec[f"beta{i}"] for i in (1, 2, 3))
        change = torch.zeros_like(g) if self.before is None else g - self.before[name]
        m.mul_(b1).add_((1 - b1) * g)
        d.mul_(b2).add_((1 - b2) * change)
        v.mul_(b3).add_((1 - b3) * (g + b2 * change) ** 2)
        root = (v / (1 - b3**self.updates)).sqrt() + self.spec["eps"]
        return (m / (1 - b1**self.updates) + b2 * d / (1 - b2**self.updates)) / root


class OwnStepper:
    """`Optimizer` with the face of PyTorch's: for those that PyTorch does not have."""

    def __init__(self, spec, params):
        self.params, self.inner, self.param_groups = params, Optimizer(spec, params), []

    def step(self):
        self.inner.step({name: p.grad for name, p in self.params.items()})

    def zero_grad(self):
        for p in self.params.values():
            p.grad = None


def torch_optimizer(spec, params):
    """PyTorch's optimizer for the spec, or ours where it has none. Its SGD adds decay to the gradient, so decay must be
    0 there."""
    groups = [
        {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": spec["decay"]},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if spec["kind"] == "sgd":
        assert spec["decay"] == 0, "PyTorch's SGD couples decay with momentum"
        return torch.optim.SGD(groups, lr=0.0, momentum=spec["momentum"])
    if spec["kind"] not in ("adamw", "nadam"):
        return OwnStepper(spec, params)
    common = {"lr": 0.0, "betas": (spec["beta1"], spec["beta2"]), "eps": spec["eps"]}
    if spec["kind"] == "nadam":
        return torch.optim.NAdam(groups, momentum_decay=spec["momentum_decay"], decoupled_weight_decay=True, **common)
    return torch.optim.AdamW(groups, **common)
