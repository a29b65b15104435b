"""Writes tests/golden/*.json: losses, weights and samples that Paceline's tests must reproduce.

usage: python scripts/golden.py          (needs numpy and torch; `make golden`; the tests read the files and need neither)

| file | what |
|---|---|
| random.json | raw draws, initial weights, sampled offsets |
| adamw, sgd, odd, nadam | synchronous training: PyTorch's autograd and PyTorch's optimizer |
| lion, signum, adan | the same with an optimizer that PyTorch lacks, written out from its authors' formula |
| tied | the same with a head that multiplies by the token embedding's table |
| clipped | the same, gradients scaled down by the norm of all of them together |
| async_k1, async_k4, async_sgd | an asynchronous 1F1B pipeline of four stages, emulated event by event |
| async_ef, async_ef_tau, async_nesterov, async_nesterov_stages, async_pipemare, async_pipemare_behind | the same emulator with updates that are corrected for their delay |
| stash_k1, stash_k2 | the same emulator, where the backward pass reads the version that the forward pass read |
| double_buffer_k3, double_buffer_k4 | the same, where both read the version before the one that their update is applied to |
| predict_k1, predict_k4, predict_tau | the same, where the forward pass reads the weights moved on along the last update |
| double_buffer_ef | double_buffer with updates corrected for their delay, and a drain every 4 updates |
| stash_dc, double_buffer_dc | stash and double_buffer with gradients compensated for the weights' way (DC-ASGD) |
| recompute_k1 | the same, where the backward pass runs the forward pass again with the weights as they are |

Every training file holds the parameters of the run, `losses` (f32) and `losses_f64` (the same run in f64). `rounding` is the
largest relative distance between the two, what f32 alone does to the run; `tolerance` is what a test should ask: far above
the rounding, and below what a wrong rule would do. The asynchronous files say how far these would be off: `flush` (all
versions equal), `stashed_weights` and `stashed_gains` (the backward pass reads matrices, or LayerNorm gains, as they were at
the forward pass). Gains move little: only async_sgd, with its large step, tells those apart.
The script checks itself as it goes and writes nothing when a check fails.
"""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import reference as ref

ROOT = Path(__file__).resolve().parent.parent
DATA_FILE = "LICENSE-APACHE"
SEED = 1
UPDATES = 20
# Of the runs that compare optimizers.
LONG = 50

SMALL = ref.Model(layers=4, width=64, heads=4, context=32, vocab=256)
ODD = ref.Model(layers=3, width=45, heads=3, context=19, vocab=256)
ADAMW = {"kind": "adamw", "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1}
SGD = {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "decay": 0.0}
LION = {"kind": "lion", "lr": 3e-4, "beta1": 0.9, "beta2": 0.99, "decay": 0.1}
SIGNUM = {"kind": "signum", "lr": 3e-4, "momentum": 0.9, "decay": 0.1}
NADAM = {**ADAMW, "kind": "nadam", "beta2": 0.999, "momentum_decay": 0.004}
ADAN = {"kind": "adan", "lr": 1e-3, "beta1": 0.98, "beta2": 0.92, "beta3": 0.99, "eps": 1e-8, "decay": 0.1}
FAST_SGD = {**SGD, "lr": 0.2}
COSINE = {**ADAMW, "lr": {"peak": 2e-3, "warmup": 4, "total": 20, "floor": 2e-4}}
# Where a four-stage pipeline cuts SMALL.
FOUR_STAGES = [["embed", 0], [1], [2], [3, "head"]]


# --- Synchronous training by autograd ---------------------------------------------------------------------------------


def train(model, microbatch, accumulate, optimizer, dtype, updates=UPDATES, head_learns=True, counts=lambda name: 1.0):
    """Losses of `updates` updates on one process. `head_learns`: see `ref.loss_autograd`. `counts`: how often a parameter counts in
    the norm of all gradients."""
    data = ref.Data((ROOT / DATA_FILE).read_bytes(), model, microbatch, SEED)
    params = ref.initial_params(model, model.units(), SEED, dtype)
    for p in params.values():
        p.requires_grad_()
    stepper = ref.torch_optimizer(optimizer, params)
    tokens_per_update = accumulate * microbatch * model.context
    losses = []
    for update in range(updates):
        total = 0.0
        for k in range(accumulate):
            loss = ref.loss_autograd(model, params, *data.batch(update * accumulate + k), head_learns)
            (loss / tokens_per_update).backward()
            total += loss.item()
        if clip := optimizer.get("clip"):
            squares = sum(counts(name) * p.grad.double().square().sum() for name, p in params.items())
            factor = min(1.0, clip["global"] / squares.sqrt().item())
            for p in params.values():
                p.grad.mul_(factor)
        for group in stepper.param_groups:
            group["lr"] = ref.learning_rate(optimizer["lr"], update)
        stepper.step()
        stepper.zero_grad()
        losses.append(total / tokens_per_update)
    return losses


# --- Asynchronous training, event by event ----------------------------------------------------------------------------


def rank_order(rank, ranks, microbatches):
    """What a rank of 1F1B does, in order: P-1-s forwards, then one forward and one backward in turn, then the
    backwards that are left."""
    order, forwards, backwards = [], 0, 0
    for _ in range(min(ranks - 1 - rank, microbatches)):
        order.append(("F", forwards))
        forwards += 1
    while backwards < microbatches:
        if forwards < microbatches:
            order.append(("F", forwards))
            forwards += 1
        order.append(("B", backwards))
        backwards += 1
    return order


def event_list(ranks, microbatches, choose):
    """One possible history [(rank, action, micro-batch)] of the pipeline: `choose` picks among the ranks whose next
    action has its input."""
    orders = [rank_order(rank, ranks, microbatches) for rank in range(ranks)]
    position, done, history = [0] * ranks, set(), []
    while len(history) < 2 * ranks * microbatches:
        ready = []
        for rank in range(ranks):
            if position[rank] == len(orders[rank]):
                continue
            action, m = orders[rank][position[rank]]
            source = (rank - 1, "F", m) if action == "F" else (rank + 1, "B", m)
            if not 0 <= source[0] < ranks or source in done:
                ready.append(rank)
        rank = choose(ready)
        event = (rank, *orders[rank][position[rank]])
        position[rank] += 1
        done.add(event)
        history.append(event)
    return history


def emulate(history, partition, model, microbatch, accumulate, optimizer, dtype, stashed="", policy="current", ahead=None):
    """Runs a history with an update on a stage right after its every K-th backward pass.
    -> (losses by update, drift by stage and micro-batch: version at B minus version at F, in updates).

    `policy` says which weights are read. current: as they are. stash: the backward pass reads the version of the forward
    pass. double_buffer: both read version u - 1, u the update of the micro-batch. recompute: as they are, and the backward
    pass first runs the forward pass again. predict: the forward pass reads them less the last update `ahead[stage]` times, the
    backward pass reads them as they are. Every version that a stage has had is kept here.
    `stashed`: under `current` parameters whose names end with it are read as they were at the micro-batch's forward pass;
    no such run is golden, it shows that the golden ones tell the difference."""
    data = ref.Data((ROOT / DATA_FILE).read_bytes(), model, microbatch, SEED)
    stages = [ref.Stage(model, units, SEED, dtype) for units in partition]
    # What reads the version before an update's has one delay everywhere.
    delay = 1 if policy == "double_buffer" else None
    steppers = [ref.Optimizer(optimizer, stage.params, s, len(stages), delay) for s, stage in enumerate(stages)]
    sums = [None] * len(stages)
    tokens_per_update = accumulate * microbatch * model.context
    sent, saved, kept, version_at_f = {}, {}, {}, {}
    copy = lambda stage: {name: p.clone() for name, p in stage.params.items()}
    versions = [[copy(stage)] for stage in stages]
    losses, drift = [0.0] * (1 + max(m for _, _, m in history) // accumulate), [[] for _ in stages]
    last = len(stages) - 1
    for s, action, m in history:
        if action == "F":
            tokens, targets = data.batch(m)
            x = tokens if s == 0 else sent.pop((s, "F", m))
            version = max(0, m // accumulate - 1) if policy == "double_buffer" else steppers[s].updates
            read = versions[s][version]
            if policy == "predict":
                read = {name: p - ahead[s] * steppers[s].taken[name] for name, p in read.items()}
            y, saved[s, m] = stages[s].forward(x, targets if s == last else None, read)
            version_at_f[s, m] = version
            if policy == "recompute":
                saved[s, m] = (x, targets if s == last else None)
            if stashed:
                kept[s, m] = {n: p.clone() for n, p in stages[s].params.items() if n.endswith(stashed)}
            if s == last:
                losses[m // accumulate] += y.item() / tokens_per_update
            else:
                sent[s + 1, "F", m] = y
            continue
        dy = None if s == last else sent.pop((s, "B", m))
        read = version_at_f[s, m] if policy in ("stash", "double_buffer") else steppers[s].updates
        params = versions[s][read] | steppers[s].backward_params() | kept.pop((s, m), {})
        if policy == "recompute":
            _, saved[s, m] = stages[s].forward(*saved[s, m], params)
        dx, grads = stages[s].backward(dy, saved.pop((s, m)), params, 1.0 / tokens_per_update)
        if "dc_asgd" in optimizer:
            grads = steppers[s].compensated(grads, params)
        if s > 0:
            sent[s - 1, "B", m] = dx
        drift[s].append(0 if policy == "recompute" else read - version_at_f[s, m])
        sums[s] = grads if m % accumulate == 0 else {name: sums[s][name] + g for name, g in grads.items()}
        if m % accumulate == accumulate - 1:
            steppers[s].step(sums[s])
            versions[s].append(copy(stages[s]))
    return losses, drift


def asynchronous(accumulate, optimizer, dtype, choose, stashed="", policy="current", updates=UPDATES, boundary=None, ahead=None):
    history = []
    # The pipeline drains after every `boundary` updates.
    for first in range(0, updates, boundary or updates):
        segment = event_list(len(FOUR_STAGES), min(boundary or updates, updates - first) * accumulate, choose)
        history += [(s, action, m + first * accumulate) for s, action, m in segment]
    return emulate(history, FOUR_STAGES, SMALL, 2, accumulate, optimizer, dtype, stashed, policy, ahead)


def lowest_rank(ready):
    return ready[0]


# --- Checks -----------------------------------------------------------------------------------------------------------


def distance(a, b):
    """Largest relative difference of two loss lists."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def check(condition, what):
    if not condition:
        sys.exit(f"golden.py: check failed: {what}")
    print(f"ok: {what}")


def check_normal():
    """The vectorised normal numbers against scalar f64 mathematics, after rounding to f32."""
    name, count = "embed.tok", 4096
    scalar = []
    for e in range(count):
        u1 = 1.0 - int(ref.draw(SEED, name, 2 * e) >> np.uint64(11)) * 2.0**-53
        u2 = int(ref.draw(SEED, name, 2 * e + 1) >> np.uint64(11)) * 2.0**-53
        scalar.append(math.sqrt(-2.0 * math.log(u1)) * math.cos(2.0 * math.pi * u2))
    numbers = ref.normal(SEED, name, count)
    check(np.allclose(numbers, scalar, rtol=1e-12, atol=1e-14), "normal numbers equal scalar f64 mathematics to 1e-12")
    big = ref.normal(SEED, "moments", 200_000)
    check(abs(big.mean()) < 0.01 and abs(big.std() - 1) < 0.01, "normal numbers have mean 0 and deviation 1")
    # SplitMix64 seeded with 0: the first published output; FNV-1a of "a": the published hash.
    check(int(ref.splitmix(np.uint64(0))) == 0xE220A8397B1DCDAF, "splitmix matches its published value")
    check(ref.fnv1a64("a") == 0xAF63DC4C8601EC8C, "fnv1a64 matches its published value")


def check_manual_backward():
    """With one version everywhere, the hand-written backward pass is autograd's, parameter by parameter."""
    for model, microbatch in ((SMALL, 2), (ODD, 3)):
        data = ref.Data((ROOT / DATA_FILE).read_bytes(), model, microbatch, SEED)
        tokens, targets = data.batch(0)
        stage = ref.Stage(model, model.units(), SEED, torch.float64)
        for name, p in stage.params.items():
            # Away from the initial point, where residual branches are small and biases zero.
            p.add_(torch.from_numpy(0.1 * ref.normal(SEED, f"shift {name}", p.numel()).reshape(p.shape)))
        scale = 1.0 / (microbatch * model.context)
        loss, saved = stage.forward(tokens, targets)
        _, grads = stage.backward(None, saved, stage.params, scale)
        params = {name: p.clone().requires_grad_() for name, p in stage.params.items()}
        expected = ref.loss_autograd(model, params, tokens, targets)
        (expected * scale).backward()
        worst = max(float((grads[n] - p.grad).norm() / (p.grad.norm() + 1e-12)) for n, p in params.items())
        check(abs(loss.item() - expected.item()) < 1e-9, f"forward pass equals autograd's, width {model.width}")
        check(worst < 1e-10, f"hand-written backward equals autograd, width {model.width}: {worst:.1e}")


def check_flush(name, accumulate, optimizer, losses_autograd, updates=UPDATES):
    """The emulator run one micro-batch after the other, so that all versions are equal, is synchronous training."""
    stages = len(FOUR_STAGES)
    one_by_one = [
        event
        for m in range(updates * accumulate)
        for event in [(s, "F", m) for s in range(stages)] + [(s, "B", m) for s in reversed(range(stages))]
    ]
    losses, drift = emulate(one_by_one, FOUR_STAGES, SMALL, 2, accumulate, optimizer, torch.float64)
    check(all(d == 0 for stage in drift for d in stage), f"{name}: no drift one by one")
    far = distance(losses, losses_autograd)
    # PyTorch keeps NAdam's product of momenta in f32, whatever the parameters are.
    check(far < (1e-8 if optimizer["kind"] == "nadam" else 1e-10), f"{name}: emulator with equal versions equals autograd: {far:.1e}")


def check_drift(name, drift, accumulate):
    """Counted drift against the closed formula floor(m/K) - floor(max(0, m-w)/K), w = P-1-s."""
    for s, counted in enumerate(drift):
        w = len(drift) - 1 - s
        formula = [m // accumulate - max(0, m - w) // accumulate for m in range(len(counted))]
        check(counted == formula, f"{name}: drift on stage {s} follows the formula, at most {max(counted)}")


# --- Files ------------------------------------------------------------------------------------------------------------


def write(name, content):
    path = ROOT / "tests/golden" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    # One key a line, its value on that line.
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"wrote {path.relative_to(ROOT)}")


def digits(losses):
    """Nine significant digits."""
    return [float(f"{loss:.9g}") for loss in losses]


def rounded(distances):
    return {name: float(f"{d:.2g}") for name, d in distances.items()}


def losses_of(f32, f64, tolerance):
    accuracy = {"tolerance": tolerance} | rounded({"rounding": distance(f32, f64)})
    return accuracy | {"losses": digits(f32), "losses_f64": digits(f64)}


def spec_text(partition):
    """A partition as a .pace file writes it."""
    name = lambda unit: f"block {unit}..{unit + 1}" if isinstance(unit, int) else unit
    return "[" + ", ".join("[" + ", ".join(map(name, units)) + "]" for units in partition) + "]"


def run_parameters(model, microbatch, accumulate, optimizer, updates=UPDATES):
    return {
        "data": DATA_FILE,
        "seed": SEED,
        "updates": updates,
        # What is off is left out.
        "model": {key: value for key, value in vars(model).items() if value is not False},
        "pipeline": {"microbatch": microbatch, "accumulate": accumulate},
        "optimizer": optimizer,
    }


def synchronous_case(name, model, microbatch, accumulate, optimizer, updates=UPDATES, rounding=5e-6):
    run = (model, microbatch, accumulate, optimizer)
    f32, f64 = (train(*run, dtype, updates) for dtype in (torch.float32, torch.float64))
    check(f64[-1] < f64[0] - 0.3, f"{name}: the loss moves, {f64[0]:.4f} -> {f64[-1]:.4f}")
    check(distance(f32, f64) < rounding, f"{name}: f32 stays within {distance(f32, f64):.1e} of f64")
    return run_parameters(*run, updates) | losses_of(f32, f64, 20 * rounding), f64


def tied_case(name, optimizer):
    """A tied head; without its gradient the losses must be clearly others."""
    run = (replace(ODD, tied=True), 3, 3, optimizer)
    content, f64 = synchronous_case(name, *run, LONG)
    apart = distance(train(*run, torch.float64, LONG, head_learns=False), f64)
    check(apart > 3 * content["tolerance"], f"{name}: without the head's gradient it would be off by {apart:.1e}")
    return content | {"off_by": rounded({"embedding_alone": apart})}


def clipped_case(name, optimizer):
    """A tied head, whose table counts once in the norm."""
    run = (replace(ODD, tied=True), 3, 3, optimizer)
    content, f64 = synchronous_case(name, *run, LONG)
    unclipped = {key: value for key, value in optimizer.items() if key != "clip"}
    apart = {
        "unclipped": distance(train(*run[:3], unclipped, torch.float64, LONG), f64),
        "table_counts_twice": distance(
            train(*run, torch.float64, LONG, counts=lambda key: 2.0 if key == "embed.tok" else 1.0), f64
        ),
    }
    for rule, off in apart.items():
        check(off > 3 * content["tolerance"], f"{name}: {rule} would be off by {off:.1e}")
    return content | {"off_by": rounded(apart)}


def asynchronous_case(name, accumulate, optimizer, tolerance, told_apart):
    """`told_apart`: the wrong rules whose losses must be clearly outside the tolerance."""
    f32, drift = asynchronous(accumulate, optimizer, torch.float32, lowest_rank)
    f64, _ = asynchronous(accumulate, optimizer, torch.float64, lowest_rank)
    shuffled, _ = asynchronous(accumulate, optimizer, torch.float32, random.Random(7).choice)
    rounding = distance(f32, f64)
    check(f32 == shuffled, f"{name}: another timing gives the same bits")
    check(rounding < tolerance / 20, f"{name}: f32 stays within {rounding:.1e} of f64")
    check_drift(name, drift, accumulate)
    flush = train(SMALL, 2, accumulate, optimizer, torch.float64)
    check_flush(name, accumulate, optimizer, flush)
    apart = {"flush": distance(flush, f64)}
    for rule, stashed in (("stashed_weights", "weight"), ("stashed_gains", "gain")):
        apart[rule] = distance(asynchronous(accumulate, optimizer, torch.float64, lowest_rank, stashed)[0], f64)
    for rule in told_apart:
        check(apart[rule] > 3 * tolerance, f"{name}: {rule} would be off by {apart[rule]:.1e}")
    content = run_parameters(SMALL, 2, accumulate, optimizer)
    content["pipeline"] |= {"ranks": len(FOUR_STAGES), "partition": spec_text(FOUR_STAGES)}
    content |= {"drift_max": [max(stage) for stage in drift], "off_by": rounded(apart)}
    return content | losses_of(f32, f64, tolerance) | {"losses_flush_f64": digits(flush)}


def policy_case(name, accumulate, policy):
    """Weights read by another policy; with the weights as they are the losses must be clearly others."""
    run = lambda dtype, policy: asynchronous(accumulate, ADAMW, dtype, lowest_rank, policy=policy)
    (f32, drift), (f64, _) = run(torch.float32, policy), run(torch.float64, policy)
    shuffled, _ = asynchronous(accumulate, ADAMW, torch.float32, random.Random(7).choice, policy=policy)
    check(f32 == shuffled, f"{name}: another timing gives the same bits")
    check(distance(f32, f64) < 2e-6, f"{name}: f32 stays within {distance(f32, f64):.1e} of f64")
    check(all(d == 0 for stage in drift for d in stage), f"{name}: no drift")
    apart = distance(run(torch.float64, "current")[0], f64)
    check(apart > 3e-5, f"{name}: with the weights as they are it would be off by {apart:.1e}")
    content = run_parameters(SMALL, 2, accumulate, ADAMW)
    content["pipeline"] |= {"ranks": len(FOUR_STAGES), "partition": spec_text(FOUR_STAGES)}
    content |= {"policy": policy, "drift_max": [0] * len(FOUR_STAGES), "off_by": rounded({"current": apart})}
    return content | losses_of(f32, f64, 1e-5)


def predicted_case(name, accumulate, optimizer, tau=None):
    """Forward passes that read a prediction. It is made over the mean drift of a stage, (P-1-s)/K, or as many updates as `tau` says where there
    is drift."""
    stages = len(FOUR_STAGES)
    ahead = [(stages - 1 - s) / accumulate if tau is None else tau * (s < stages - 1) for s in range(stages)]
    run = lambda dtype, policy: asynchronous(
        accumulate, optimizer, dtype, lowest_rank, policy=policy, updates=LONG, ahead=ahead
    )
    (f32, drift), (f64, _), (plain, _) = run(torch.float32, "predict"), run(torch.float64, "predict"), run(torch.float64, "current")
    apart = distance(plain, f64)
    check(f64[-1] < f64[0] - 0.3, f"{name}: the loss moves, {f64[0]:.4f} -> {f64[-1]:.4f}")
    check(distance(f32, f64) < 2e-6, f"{name}: f32 stays within {distance(f32, f64):.1e} of f64")
    check(apart > 3e-4, f"{name}: without the prediction it would be off by {apart:.1e}")
    content = run_parameters(SMALL, 2, accumulate, optimizer, LONG)
    content["pipeline"] |= {"ranks": stages, "partition": spec_text(FOUR_STAGES)}
    content["weights"] = "predict" if tau is None else f"predict(tau = {tau})"
    content |= {"drift_max": [max(stage) for stage in drift], "off_by": rounded({"current": apart})}
    return content | losses_of(f32, f64, 1e-5)


def drained_feedback_case(name, accumulate, optimizer, boundary):
    """Error feedback for the delay of a double buffer, which drains do not interrupt: only the run's first update has none."""
    corrected = optimizer | {"error_feedback": {"lambda": 1.0}}
    run = lambda optimizer, dtype, every: asynchronous(
        accumulate, optimizer, dtype, lowest_rank, policy="double_buffer", updates=LONG, boundary=every
    )[0]
    f32, f64 = run(corrected, torch.float32, boundary), run(corrected, torch.float64, boundary)
    check(run(corrected, torch.float64, None) == f64, f"{name}: a drain changes no bit")
    apart = distance(run(optimizer, torch.float64, boundary), f64)
    check(distance(f32, f64) < 2e-6, f"{name}: f32 stays within {distance(f32, f64):.1e} of f64")
    check(apart > 3e-4, f"{name}: without the correction it would be off by {apart:.1e}")
    content = run_parameters(SMALL, 2, accumulate, corrected, LONG)
    content["pipeline"] |= {"ranks": len(FOUR_STAGES), "partition": spec_text(FOUR_STAGES), "boundary": boundary}
    content |= {"policy": "double_buffer", "drift_max": [0] * len(FOUR_STAGES), "off_by": rounded({"uncorrected": apart})}
    return content | losses_of(f32, f64, 1e-5)


def compensated_case(name, accumulate, optimizer, strength, policy):
    """Gradients compensated for the way of the weights since the forward pass, whose version `policy` keeps."""
    compensated = optimizer | {"dc_asgd": {"lambda": strength}}
    run = lambda optimizer, dtype: asynchronous(accumulate, optimizer, dtype, lowest_rank, policy=policy, updates=LONG)[0]
    f32, f64, plain = run(compensated, torch.float32), run(compensated, torch.float64), run(optimizer, torch.float64)
    apart = distance(plain, f64)
    check(f64[-1] < f64[0] - 0.3, f"{name}: the loss moves, {f64[0]:.4f} -> {f64[-1]:.4f}")
    check(distance(f32, f64) < 5e-6, f"{name}: f32 stays within {distance(f32, f64):.1e} of f64")
    check(apart > 6e-4, f"{name}: without the correction it would be off by {apart:.1e}")
    content = run_parameters(SMALL, 2, accumulate, compensated, LONG)
    content["pipeline"] |= {"ranks": len(FOUR_STAGES), "partition": spec_text(FOUR_STAGES)}
    content |= {"policy": policy, "drift_max": [0] * len(FOUR_STAGES), "off_by": rounded({"uncorrected": apart})}
    return content | losses_of(f32, f64, 2e-5)


def corrected_case(name, accumulate, optimizer, correction, tolerance=1e-4):
    """Updates corrected for their delay; without the correction the losses must be clearly others."""
    corrected = optimizer | correction
    run = lambda optimizer, dtype: asynchronous(accumulate, optimizer, dtype, lowest_rank, updates=LONG)
    (f32, drift), (f64, _), (plain, _) = run(corrected, torch.float32), run(corrected, torch.float64), run(optimizer, torch.float64)
    apart = distance(plain, f64)
    check(f64[-1] < f64[0] - 0.3, f"{name}: the loss moves, {f64[0]:.4f} -> {f64[-1]:.4f}")
    check(distance(f32, f64) < tolerance / 20, f"{name}: f32 stays within {distance(f32, f64):.1e} of f64")
    check(apart > 3 * tolerance, f"{name}: without the correction it would be off by {apart:.1e}")
    content = run_parameters(SMALL, 2, accumulate, corrected, LONG)
    content["pipeline"] |= {"ranks": len(FOUR_STAGES), "partition": spec_text(FOUR_STAGES)}
    content |= {"drift_max": [max(stage) for stage in drift], "off_by": rounded({"uncorrected": apart})}
    return content | losses_of(f32, f64, tolerance)


def random_case():
    """First values of what is drawn at random, for tests of the generator alone."""
    text = (ROOT / DATA_FILE).read_bytes()
    weights = {}
    for name in ("embed.tok", "block.1.attn.out.weight"):
        value = ref.initial_params(SMALL, SMALL.units(), SEED, torch.float32)[name].flatten()
        weights[name] = {"first": [float(f"{x:.9g}") for x in value[:8]], "last": float(f"{value[-1]:.9g}")}
    return {
        "seed": SEED,
        "draws": {name: [f"{int(ref.draw(SEED, name, i)):016x}" for i in range(4)] for name in ("data", "embed.tok")},
        "model": {key: value for key, value in vars(SMALL).items() if value is not False},
        "weights": weights,
        "data": DATA_FILE,
        "tokens": len(text),
        "offsets": {
            str(model.context): [ref.Data(text, model, 1, SEED).start(q) for q in range(8)] for model in (SMALL, ODD)
        },
    }


def main():
    torch.manual_seed(0)
    check_normal()
    check_manual_backward()
    files = {"random": random_case()}
    files["adamw"], adamw = synchronous_case("adamw", SMALL, 2, 4, ADAMW)
    files["sgd"], sgd = synchronous_case("sgd", SMALL, 2, 4, SGD)
    files["odd"], _ = synchronous_case("odd", ODD, 3, 3, COSINE)
    files["tied"] = tied_case("tied", COSINE)
    files["clipped"] = clipped_case("clipped", {**FAST_SGD, "clip": {"global": 0.25}})
    check_flush("adamw", 4, ADAMW, adamw)
    check_flush("sgd", 4, SGD, sgd)
    for name, optimizer in (("nadam", NADAM), ("lion", LION), ("signum", SIGNUM), ("adan", ADAN)):
        # Rounding turns the sign of an element that is nearly zero, and the step with it.
        rounding = 2e-5 if name in ("lion", "signum") else 5e-6
        files[name], losses = synchronous_case(name, SMALL, 2, 2, optimizer, LONG, rounding)
        check_flush(name, 2, optimizer, losses, LONG)
    coarse = ("flush", "stashed_weights")
    files["async_k1"] = asynchronous_case("async_k1", 1, ADAMW, 1e-4, coarse)
    files["async_k4"] = asynchronous_case("async_k4", 4, ADAMW, 1e-4, coarse)
    files["async_sgd"] = asynchronous_case("async_sgd", 1, FAST_SGD, 1e-5, (*coarse, "stashed_gains"))
    slow, steady = {**ADAMW, "lr": 5e-4}, {**SGD, "momentum": 0.0, "lr": 0.1, "decay": 0.1}
    for name, accumulate, optimizer, correction in (
        ("async_ef", 1, slow, {"error_feedback": {"lambda": 1.0}}),
        ("async_ef_tau", 4, slow, {"error_feedback": {"lambda": 1.0, "tau": 0.5}}),
        ("async_nesterov", 1, steady, {"nesterov": {"momentum": 0.95}}),
        ("async_nesterov_stages", 1, NADAM, {"nesterov": {"momentum": 0.9, "by_stage": True}}),
        ("async_pipemare", 1, ADAMW, {"pipemare": {"anneal": 40}}),
        ("async_pipemare_behind", 1, FAST_SGD, {"pipemare": {"discrepancy": 0.135}}),
    ):
        files[name] = corrected_case(name, accumulate, optimizer, correction)
    for name, accumulate, policy in (
        ("stash_k1", 1, "stash"),
        ("stash_k2", 2, "stash"),
        ("double_buffer_k3", 3, "double_buffer"),
        ("double_buffer_k4", 4, "double_buffer"),
        ("recompute_k1", 1, "recompute"),
    ):
        files[name] = policy_case(name, accumulate, policy)
    files["predict_k1"] = predicted_case("predict_k1", 1, slow)
    files["predict_k4"] = predicted_case("predict_k4", 4, ADAMW)
    files["predict_tau"] = predicted_case("predict_tau", 4, {**ADAN, "lr": 2e-3}, tau=0.5)
    files["stash_dc"] = compensated_case("stash_dc", 1, slow, 20000.0, "stash")
    files["double_buffer_dc"] = compensated_case("double_buffer_dc", 3, ADAMW, 20000.0, "double_buffer")
    files["double_buffer_ef"] = drained_feedback_case("double_buffer_ef", 4, slow, boundary=4)
    for name, content in files.items():
        write(name, content)


if __name__ == "__main__":
    main()
