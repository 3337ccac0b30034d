"""Rows of torch: forward and backward pass, and FSDP2 with its fused AdamW, on the same models.

Started by `bench_step.py --torch` as its own process, which starts one per GPU. torch.compile
compiles blocks and the loss; blocks rematerialize what those of the JAX rows do. The rows have
torch's own floor, and are timed in turn with it.
"""

import argparse
import dataclasses
import datetime
import functools
import gc
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
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from step_bench.model import CHECKPOINTS, ROTARY_BASE, SIZES, Workload

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TURN_SECONDS, LEAST_STEPS, MOST_STEPS = 0.7, 3, 200  # as in group.py
VARIANTS = "torch_floor,torch_fsdp2,torch_fsdp2+reshard"
"""The floor first. "pairs": two blocks, instead of one, communicate together; "prefetch": gathers
two units ahead; "reshard": gathers again in the backward pass; "symmetric": communicates in
symmetric memory of NCCL, or before torch had it in NCCL's own memory; "local": clips and updates
shards as plain tensors, which takes less of Python's time than DTensors; "clip": clips the norm."""
MAX_NORM = 0.1  # below any gradient's, as in variants.py


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.scale.shape, self.scale, 1e-5)


def rotated(x):
    """Rotary positions: the two halves of each head, (batch, heads, length, head width)."""
    half = x.shape[-1] // 2
    order = torch.arange(half, device=x.device, dtype=torch.float32)
    at = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)
    angles = at[:, None] * ROTARY_BASE ** (-order / half)
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size, checkpoint_policy):
        super().__init__()
        d, hidden, self.size = size.width, size.hidden or 4 * size.width, size
        self.checkpoint_policy = checkpoint_policy
        self.kv_heads = size.kv_heads or size.heads
        self.ln1, self.ln2 = Norm(d), Norm(d)
        heads = size.heads + 2 * self.kv_heads
        self.qkv = nn.Linear(d, heads * size.head_width, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.up = nn.Linear(d, hidden * (2 if size.is_llama else 1), bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x):
        if self.checkpoint_policy == "none":
            return self.apply_to(x)
        contexts = {}
        if self.checkpoint_policy == "dots":
            contexts["context_fn"] = SAVES_PRODUCTS
        return checkpoint(self.apply_to, x, use_reentrant=False, **contexts)

    def apply_to(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, length, -1, self.size.head_width)
        q, k, v = qkv.transpose(1, 2).split((self.size.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.size.is_llama:
            q, k = rotated(q), rotated(k)
        grouped = self.kv_heads < self.size.heads
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.out(h.transpose(1, 2).reshape(batch, length, width))
        h = self.up(self.ln2(x))
        if self.size.is_llama:
            gate, h = h.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * h)
        return x + self.down(F.gelu(h, approximate="tanh"))


def head_loss(x, scale, output, targets):
    logits = (F.rms_norm(x, scale.shape, scale, 1e-5) @ output.T).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def saves_products(_, op, *args, **kwargs):
    """Keeps matrix products and the results of attention."""
    is_saved = any(word in str(op) for word in ("aten.mm", "aten.addmm", "attention"))
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


SAVES_PRODUCTS = functools.partial(create_selective_checkpoint_contexts, saves_products)


class Model(nn.Module):
    """The GPT or the Llama of step_bench/model.py."""

    def __init__(self, size, checkpoint_policy):
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        if size.is_llama:
            self.output = nn.Linear(size.width, size.vocabulary, bias=False)
        else:
            self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size, checkpoint_policy) for _ in range(size.layers))
        self.norm, self.is_llama = Norm(size.width), size.is_llama
        self.loss = torch.compile(head_loss)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        if not self.is_llama:
            x = x + self.positions(torch.arange(tokens.shape[1] - 1, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        output = self.output.weight if self.is_llama else self.embed.weight
        return self.loss(x, self.norm.scale, output, tokens[:, 1:])


def make_model(size, workload, dtype):
    torch.manual_seed(0)
    with torch.device(DEVICE):  # draws large models in seconds
        model = Model(size, workload.checkpoint).to(dtype)
    for block in model.blocks:
        block.compile()
    return model


def floor(size, workload, batch):
    model = make_model(size, workload, torch.bfloat16)

    def step():
        model.zero_grad()
        for tokens in batch:
            loss = model(tokens)
            loss.backward()
        return loss.detach()

    return step


def fsdp2(size, workload, batch, modifiers):
    """Float32 parameters sharded; bfloat16 ones gathered, and kept or not for the backward pass."""
    reshards = "reshard" in modifiers
    model = make_model(size, workload, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    size_of_unit = 2 if "pairs" in modifiers else 1
    blocks = [*model.blocks]
    units = [blocks[i : i + size_of_unit] for i in range(0, len(blocks), size_of_unit)]
    for unit in (*units, [model]):
        given = unit[0] if len(unit) == 1 else unit
        fully_shard(given, mp_policy=policy, reshard_after_forward=reshards)
    if "prefetch" in modifiers:
        firsts = [unit[0] for unit in units]
        for i, module in enumerate(firsts):
            module.set_modules_to_forward_prefetch(firsts[i + 1 : i + 3])
            module.set_modules_to_backward_prefetch(firsts[max(0, i - 2) : i][::-1])
    for module in (*(unit[0] for unit in units), model):
        if "symmetric" in modifiers:
            module.set_force_sum_reduction_for_comms(True)  # averages do not go through it
            if hasattr(module, "set_symm_mem_for_comm"):
                module.set_symm_mem_for_comm()
            else:  # an older torch: memory that NCCL allocates and registers
                module.set_allocate_memory_from_process_group_for_comm(True)
    params = [*model.parameters()]
    is_local = "local" in modifiers
    updated = [p.detach().to_local() for p in params] if is_local else params  # the same memory
    optimizer = torch.optim.AdamW(updated, lr=1e-5, fused=True)

    def local_grads():
        for p, shard in zip(params, updated, strict=True):
            shard.grad = p.grad.to_local()
        if "clip" in modifiers:
            norm = torch.stack(torch._foreach_norm([x.grad for x in updated])).square().sum()
            dist.all_reduce(norm)
            scale = (MAX_NORM / (norm.sqrt() + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([x.grad for x in updated], scale)

    def step():
        for i, tokens in enumerate(batch):
            model.set_requires_gradient_sync(i == len(batch) - 1)
            loss = model(tokens) / len(batch)
            loss.backward()
        if is_local:
            local_grads()
        elif "clip" in modifiers:
            nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        return loss.detach()

    return step


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(step, steps):
    gc.collect()
    gc.disable()  # one process would wait for the other one's collection
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    gc.enable()
    return (time.perf_counter() - start) / steps


def of_first(count):
    """How many steps the first process takes in a turn."""
    found = torch.tensor([min(max(count, LEAST_STEPS), MOST_STEPS)], device=DEVICE)
    dist.broadcast(found, 0)
    return int(found)


def measure(size, name, args):
    """Records of one workload."""
    workload = Workload.parse(name, args.checkpoint)
    shape = (workload.accumulate_steps, workload.sequences, size.length + 1)
    torch.manual_seed(dist.get_rank())
    batch = torch.randint(0, size.vocabulary, shape, device=DEVICE)
    steps, rows, counts = {}, {}, {}
    for variant in args.variants.split(","):
        kind, *modifiers = variant.split("+")
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if DEVICE == "cuda" else None
        versions = {"torch": torch.__version__, "nccl": nccl}
        rows[variant] = {"name": f"{name}/{variant}"} | versions
        gc.collect()  # the models of other workloads are in cycles
        torch.cuda.empty_cache()
        try:
            before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
            if kind == "torch_floor":
                step = floor(size, workload, batch)
            else:
                step = fsdp2(size, workload, batch, modifiers)
            rows[variant]["losses"] = [float(step()) for _ in range(2)]
            rows[variant]["warm_seconds"] = warm = seconds(step, 4)  # the first steps compile
            counts[variant] = of_first(round(TURN_SECONDS / warm))
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
                seconds(step, 1)
                rows[variant]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            steps[variant] = step
        except (AttributeError, RuntimeError) as error:  # an older torch; too little memory
            rows[variant]["failed"] = f"{type(error).__name__}: {error}"[:2000]
            print(f"  FAILED {variant}: {error}", flush=True)
            step = None
            torch.cuda.empty_cache()
    times = {variant: [] for variant in steps}
    for i in range(args.rounds):
        for variant in list(steps)[:: (-1) ** i]:
            times[variant].append(1e3 * seconds(steps[variant], counts[variant]))
    tokens = dist.get_world_size() * workload.accumulate_steps * workload.sequences * size.length
    for variant, found in times.items():
        row = rows[variant]
        row |= {
            "ms": statistics.median(found),
            "ms_least": min(found),
            "ms_most": max(found),
            "rounds_ms": found,
            "tokens_per_second": tokens / statistics.median(found) * 1e3,
        }
        if floors := times.get("torch_floor"):  # a large model leaves no room for it
            pairs = list(zip(found, floors, strict=True))
            row["ratio_to_floor"] = statistics.median(x / y for x, y in pairs)
            row["above_floor_ms"] = statistics.median(x - y for x, y in pairs)
    return [*rows.values()]


def one_process(rank, count, args):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port)}
    options = {"timeout": datetime.timedelta(seconds=120)}  # if another one fails
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        for backend in ("flash", "mem_efficient", "math"):  # attention by cuDNN
            getattr(torch.backends.cuda, f"enable_{backend}_sdp")(False)
        dist.init_process_group("nccl", rank=rank, world_size=count, **options)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=count, **options)
    size = SIZES[args.size]
    size = dataclasses.replace(size, length=args.length or size.length)
    found = []
    for name in args.workloads:
        # torch has no scan over layers
        if name.startswith("unrolled"):
            found += measure(size, name, args)
            torch.cuda.empty_cache()
            if rank == 0:
                args.out.write_text(json.dumps(found))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", help="such as unrolled-8")
    parser.add_argument("--size", choices=SIZES, default="gpt-1.3b")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="none")
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
