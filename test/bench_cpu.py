"""GPT-2 124M in PyTorch on the CPU, for `make bench-cpu`: the same step as test/bench_cpu.c times,
in FP32 and without compilation, as a user of PyTorch would write it: fused attention and AdamW."""

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, CHANNELS, HEADS, VOCAB, POSITIONS = 12, 768, 12, 50304, 1024
BATCH, LENGTH = 4, 64
WARM_UP, ROUNDS = 2, 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.qkv, self.out = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.fc1, self.fc2 = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)

    def forward(self, x):
        q, k, v = (
            y.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).split(CHANNELS, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, CHANNELS))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, CHANNELS)
        self.positions = nn.Embedding(POSITIONS, CHANNELS)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions.weight[:LENGTH]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def main():
    torch.manual_seed(1)
    model = Gpt2()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    inputs = torch.randint(257, (BATCH, LENGTH))
    seconds = []
    for i in range(WARM_UP + ROUNDS):
        begin = time.perf_counter()
        model(inputs, inputs.roll(-1, 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        if i >= WARM_UP:
            seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    print(
        f"PyTorch     {1e3 * median:.1f} ms, the median of {ROUNDS} ({1e3 * min(seconds):.1f} to "
        f"{1e3 * max(seconds):.1f}); version {torch.__version__}, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    sys.exit(main())
