"""Computes the floor of a training step: the least time in which a device can do its work, by
kernel family.

A matmul takes at least its operations over the measured rate of its number format, or the bytes of
its operands and result over the measured bandwidth, whichever is more. Any other kernel takes at
least the bytes that one pass must move, over the measured bandwidth. What can be part of another
kernel (activations, RoPE, quantizing) takes no time. Families run one after another, so the floor
of a step is their sum; `floor share` is that sum over the measured step. Recomputation is not
counted, so --recompute lowers the share.

Shapes as in train_gpt.cu: B sequences of T tokens, M = B T, C channels, L layers, H heads, G
key/value heads, D head size, N = (H + 2 G) D, F feed-forward, F1 = F or (Llama) 2 F, P padded
vocabulary. An element takes 2 bytes in BF16, as an operand in FP8 one; blockwise scales, 1/32 of
the codes' bytes, are left out.
"""

# The best rates seen on the device. A device that is not in this table has no floor.
RATES = {"NVIDIA H200": {"bf16": 825e12, "fp8": 1530e12, "bytes": 4.3e12,
                         "blocks": 1289e12, "blocks, weight gradient": 1048e12}}


def matmul_seconds(rates, kind, m, n, k):
    """Returns the least seconds for D[m,n] = A[m,k] B[k,n], D in BF16. kind: a name in RATES."""
    moved = (2 if kind == "bf16" else 1) * (m * k + n * k) + 2 * m * n
    return max(2 * m * n * k / rates[kind], moved / rates["bytes"])


def linear_seconds(rates, kind, m, outputs, inputs):
    """Returns the least seconds for the three matmuls of a linear layer on m tokens."""
    wgrad = "blocks, weight gradient" if kind == "blocks" else kind
    return (matmul_seconds(rates, kind, m, outputs, inputs)
            + matmul_seconds(rates, kind, m, inputs, outputs)
            + matmul_seconds(rates, wgrad, outputs, inputs, m))


def muon_seconds(rates, shapes, gradient, moment):
    """Returns the least seconds that Muon needs for matrices of these shapes, beyond AdamW's time.
    gradient, moment: bytes of an element. A matrix has one moment, of at least two bytes an
    element. Its gradient, which becomes the update in place, is moved three more times. Then come
    five Newton-Schulz steps with three matmuls each, on the square of the smaller side."""
    elements = sum(rows * columns for rows, columns in shapes)
    seconds = elements * (3 * gradient + 2 * max(moment, 2) - 4 * moment) / rates["bytes"]
    for r, c in map(sorted, shapes):
        seconds += 5 * (matmul_seconds(rates, "bf16", r, r, c)
                        + matmul_seconds(rates, "bf16", r, r, r)
                        + matmul_seconds(rates, "bf16", r, c, r))
    return seconds


def floor_ms(device, options, parameters):
    """Returns the milliseconds of each family in a step of one micro-batch, by the options that the
    run's metrics.jsonl records; None if the device is not known."""
    if device not in RATES:
        return None
    rates, llama = RATES[device], options["arch"] == "llama"
    B, T, C, L, H, G, F, V, divisor = (int(options[name]) for name in (
        "micro-batch-size", "seq-length", "hidden-size", "num-layers", "num-attention-heads",
        "num-query-groups", "ffn-hidden-size", "vocab-size", "make-vocab-size-divisible-by"))
    D = int(options.get("kv-channels", 0)) or C // H
    M, N, F1, P = B * T, (H + 2 * G) * D, F * (1 + llama), -(-V // divisor) * divisor
    fp8 = options["fp8-format"] != "none"
    kind = ("blocks" if options["fp8-recipe"] == "blockwise" else "fp8") if fp8 else "bf16"
    # without accumulation the gradients are BF16, unless FP32 is requested
    gradient = 4 if options["grad-accum-dtype"] == "fp32" else 2
    # 8bit: one byte, and a scale of two bytes for 64 elements
    moment = {"bf16": 2, "8bit": 1 + 2 / 64}.get(options["adam-dtype"], 4)

    def moved(count):
        return count / rates["bytes"]

    # causal, so half of each T x T matmul counts: two matmuls in the forward pass, five in the
    # backward pass
    scores, heads, packed = 2 * B * H * T * T * D / rates["bf16"], 2 * M * H * D, 2 * M * N
    seconds = {
        "matmuls": L * sum(linear_seconds(rates, kind, M, *shape)
                           for shape in ((N, C), (C, H * D), (F1, C), (C, F))),
        "head matmuls": linear_seconds(rates, kind if options["fp8-lm-head"] == "true" else "bf16",
                                       M, P, C),
        "attention": L * (max(scores, moved(packed + heads)) +
                          max(2.5 * scores, moved(2 * packed + 2 * heads))),
        # two norms in a layer: forward 4C, backward 8C; the last norm has no residual
        "norms": moved(M * (24 * L + 10) * C),
        "loss": moved(4 * M * P), # one pass over the logits and their gradient
        "embeddings": moved(6 * M * C),
        # the gradient twice (norm, update), master weights and moments read and written, the new
        # weights in BF16, or as W and W' in FP8
        "optimizer": moved(parameters * (2 * gradient + 2 * 4 + 2 * 2 * moment + 2)),
    }
    if options.get("optimizer") == "muon":
        matrices = [(H * D, C), (G * D, C), (G * D, C), (C, H * D), (C, F), *[(F, C)] * (1 + llama)]
        seconds["optimizer"] += L * muon_seconds(rates, matrices, gradient, moment)
    return {family: 1e3 * value for family, value in seconds.items()}
