"""Rows of torch: forward and backward pass, and FSDP2 with its fused AdamW, on the same GPT.

Started by `bench_step.py --torch` as its own process, which starts one per GPU. torch.compile
compiles blocks, and they are rematerialized in the backward pass if those of the JAX rows are. The
rows have torch's own floor, and are timed in turn with it.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from step_bench.model import SIZES, Workload

STEPS = 4
VARIANTS = "torch_floor,torch_fsdp2,torch_fsdp2+reshard"
"""The floor first. "symmetric": in symmetric memory of NCCL; "clip": clips the norm."""
MAX_NORM = 0.1  # below any gradient's, as in variants.py


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.scale.shape, self.scale, 1e-5)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        d, self.heads = size.width, size.heads
        self.ln1, self.ln2 = Norm(d), Norm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, size, recomputes):
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.recomputes = Norm(size.width), recomputes
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        x = self.embed(tokens[:, :-1]) + self.positions(at)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits = (self.norm(x) @ self.embed.weight.T).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_model(size, workload, dtype):
    torch.manual_seed(0)
    with torch.device("cuda"):  # draws large models in seconds
        model = GPT(size, workload.recomputes).to(dtype)
    for block in model.blocks:
        block.compile()
    return model


def floor(size, workload, batch):
    model = make_model(size, workload, torch.bfloat16)

    def step():
        model.zero_grad()
        for tokens in batch:
            model(tokens).backward()

    return step


def fsdp2(size, workload, batch, modifiers):
    """Float32 parameters sharded; bfloat16 ones gathered, and kept or not for the backward pass."""
    reshards = "reshard" in modifiers
    model = make_model(size, workload, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=reshards)
        if "symmetric" in modifiers:
            module.set_force_sum_reduction_for_comms(True)  # averages do not go through it
            module.set_symm_mem_for_comm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step():
        for i, tokens in enumerate(batch):
            model.set_requires_gradient_sync(i == len(batch) - 1)
            (model(tokens) / len(batch)).backward()
        if "clip" in modifiers:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step, steps):
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def measure(size, name, variants, rounds):
    """Records of one workload."""
    workload = Workload.parse(name)
    shape = (workload.accumulate_steps, workload.sequences, size.length + 1)
    torch.manual_seed(dist.get_rank())
    batch = torch.randint(0, size.vocabulary, shape, device="cuda")
    steps, peaks = {}, {}
    for variant in variants:
        kind, *modifiers = variant.split("+")
        before = torch.cuda.memory_allocated()
        try:
            if kind == "torch_floor":
                step = floor(size, workload, batch)
            else:
                step = fsdp2(size, workload, batch, modifiers)
            seconds(step, 3)  # compiles
            torch.cuda.reset_peak_memory_stats()
            seconds(step, 1)
            peaks[variant] = torch.cuda.max_memory_allocated() - before
            steps[variant] = step
        except (AttributeError, RuntimeError) as error:  # an older torch; too little memory
            print(f"  FAILED {variant}: {error}", flush=True)
    times = {variant: [] for variant in steps}
    for i in range(rounds):
        for variant in list(steps)[:: (-1) ** i]:
            times[variant].append(1e3 * seconds(steps[variant], STEPS))
    tokens = dist.get_world_size() * workload.accumulate_steps * workload.sequences * size.length
    rows = []
    for variant, found in times.items():
        row = {
            "name": f"{name}/{variant}",
            "ms": statistics.median(found),
            "ms_least": min(found),
            "ms_most": max(found),
            "rounds_ms": found,
            "peak_bytes": peaks[variant],
            "tokens_per_second": tokens / statistics.median(found) * 1e3,
        }
        if floors := times.get("torch_floor"):  # a large model leaves no room for it
            pairs = list(zip(found, floors, strict=True))
            row["ratio_to_floor"] = statistics.median(x / y for x, y in pairs)
            row["above_floor_ms"] = statistics.median(x - y for x, y in pairs)
        rows.append(row)
    return rows


def one_process(rank, count, args):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=count)
    found = []
    for name in args.workloads:
        # torch has no scan over layers
        if name.startswith("unrolled"):
            found += measure(SIZES[args.size], name, args.variants.split(","), args.rounds)
            torch.cuda.empty_cache()
    if rank == 0:
        args.out.write_text(json.dumps(found))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", help="such as unrolled-8")
    parser.add_argument("--size", choices=SIZES, default="gpt-1.3b")
    parser.add_argument("--variants", default=VARIANTS, help="the floor and others, by commas")
    parser.add_argument("--devices", type=int, default=0, help="0: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29531)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    count = args.devices or torch.cuda.device_count()
    torch.multiprocessing.spawn(one_process, (count, args), nprocs=count)


if __name__ == "__main__":
    main()
