"""Trains bench-gpt with PyTorch on this machine's CPU and prints tokens/s: what `make bench-torch` compares with.

usage: python scripts/torch_pipeline.py single [--threads N]
       python scripts/torch_pipeline.py gpipe|1f1b [--stages P]     (P processes of one thread each, over gloo)

The model is the reference GPT of docs/reference-model.md, in the form a PyTorch user would write (nn.Module, fused
attention, fused AdamW). Tokens are random; time does not depend on them. Prints one line,
`torch_<mode> tokens_per_s=<n>`, over the timed steps after a warm-up.
"""

import argparse
import os
import socket
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def arguments():
    parser = argparse.ArgumentParser(description="PyTorch on the work of examples/bench-gpt.pace")
    parser.add_argument("mode", choices=["single", "gpipe", "1f1b"])
    for name, default, text in [
        ("stages", 2, "pipeline stages, a process each"),
        ("threads", 2, "threads of the single process"),
        ("layers", 8, ""),
        ("width", 256, ""),
        ("heads", 8, ""),
        ("context", 128, "tokens of a sequence"),
        ("vocab", 256, ""),
        ("microbatch", 4, "sequences of a micro-batch"),
        ("accumulate", 8, "micro-batches of an update"),
        ("steps", 8, "timed updates"),
        ("warmup", 2, "updates before the clock starts"),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Part(nn.Module):
    """Stage `index` of `count` equal ones; the whole model is stage 0 of 1."""

    def __init__(self, a, index, count):
        super().__init__()
        self.first, self.last = index == 0, index == count - 1
        if self.first:
            self.token, self.position = nn.Embedding(a.vocab, a.width), nn.Embedding(a.context, a.width)
        self.blocks = nn.Sequential(*(Block(a.width, a.heads) for _ in range(a.layers // count)))
        if self.last:
            self.norm, self.head = nn.LayerNorm(a.width), nn.Linear(a.width, a.vocab, bias=False)

    def forward(self, x):
        if self.first:
            x = self.token(x) + self.position.weight
        x = self.blocks(x)
        return self.head(self.norm(x)) if self.last else x


def optimizer_of(module):
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sample(a, sequences):
    text = torch.randint(a.vocab, (sequences, a.context + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def timed(a, step, barrier=lambda: None):
    """Tokens per second of `step`, an update each."""
    for _ in range(a.warmup):
        step()
    barrier()
    start = time.perf_counter()
    for _ in range(a.steps):
        step()
    barrier()
    return a.steps * a.accumulate * a.microbatch * a.context / (time.perf_counter() - start)


def single(a):
    torch.set_num_threads(a.threads)
    model = Part(a, 0, 1)
    optimizer = optimizer_of(model)

    def step():
        for _ in range(a.accumulate):
            tokens, targets = sample(a, a.microbatch)
            (cross_entropy(model(tokens), targets) / a.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    print(f"torch_single tokens_per_s={timed(a, step):.0f}")


def stage_process(rank, a, port):
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch.distributed.pipelining.stage import _PipelineStageBase

    # PyTorch 2.9's warm-up of neighbours sends 8 bytes and expects 4, which gloo refuses: leave it out.
    _PipelineStageBase._get_init_p2p_neighbors_ops = lambda self: []
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=a.stages)
    module = Part(a, rank, a.stages)
    first, last = rank == 0, rank == a.stages - 1
    hidden = torch.zeros(a.microbatch, a.context, a.width)
    stage = PipelineStage(
        module,
        rank,
        a.stages,
        torch.device("cpu"),
        input_args=(torch.zeros(a.microbatch, a.context, dtype=torch.long) if first else hidden,),
        output_args=torch.zeros(a.microbatch, a.context, a.vocab) if last else hidden,
    )
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[a.mode](stage, a.accumulate, loss_fn=cross_entropy)
    optimizer = optimizer_of(module)

    def step():
        tokens, targets = sample(a, a.microbatch * a.accumulate)
        schedule.step(*([tokens] if first else []), **({"target": targets, "losses": []} if last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    speed = timed(a, step, dist.barrier)
    if last:
        print(f"torch_{a.mode} tokens_per_s={speed:.0f}")
    dist.destroy_process_group()


def main():
    a = arguments()
    if a.mode == "single":
        return single(a)
    if a.layers % a.stages:
        raise SystemExit(f"torch_pipeline.py: {a.layers} layers do not divide into {a.stages} equal stages")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(stage_process, (a, port), nprocs=a.stages)


if __name__ == "__main__":
    main()
