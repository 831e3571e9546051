"""Computes the floor of a training step: the least time in which a device can do its work, by
kernel family.

A product takes at least its operations over the measured rate of its number format, or the bytes of
its operands and result over the measured bandwidth, whichever is more. Any other kernel takes at
least the bytes that one pass must move, over the measured bandwidth. Families run one after
another, so the floor of a step is their sum; `floor share` is that sum over the measured step.
Recomputation is not counted, so --recompute lowers the share.

Shapes as in train_gpt.cu: B sequences of T tokens, M = B T, C channels, L layers, H heads, G
key/value heads, D head size, N = (H + 2 G) D, F feed-forward, F1 = F or (Llama) 2 F, P padded
vocabulary. An element takes 2 bytes in BF16, and 2 in FP8: a code, and the code in the transposed
copy. With delayed and blockwise scaling the kernel that computes a tensor can write its codes;
blockwise scales, 1/32 of the codes' bytes, are left out.
"""

# The best rates seen on the device. A device that is not in this table has no floor.
RATES = {"NVIDIA H200": {"bf16": 825e12, "fp8": 1530e12, "bytes": 4.3e12,
                         "blocks": 1289e12, "blocks, weight gradient": 1048e12}}
FUSED = ("delayed", "blockwise") # recipes with which the kernel that computes a tensor writes codes


class Shape:
    """The dimensions of a run, from the options that its metrics.jsonl records."""

    def __init__(self, options):
        def number(name):
            return int(options[name])

        self.llama = options["arch"] == "llama"
        self.B, self.T = number("micro-batch-size"), number("seq-length")
        self.M = self.B * self.T
        self.C, self.L = number("hidden-size"), number("num-layers")
        self.H, self.G = number("num-attention-heads"), number("num-query-groups")
        self.D = int(options.get("kv-channels", 0)) or self.C // self.H # older records lack D
        self.qk_norm = options.get("qk-layernorm") == "true"
        self.qkv_bias = options.get("add-qkv-bias") == "true"
        self.N = (self.H + 2 * self.G) * self.D
        self.F = number("ffn-hidden-size")
        self.F1 = 2 * self.F if self.llama else self.F
        divisor = number("make-vocab-size-divisible-by")
        self.P = -(-number("vocab-size") // divisor) * divisor


def product_seconds(rates, kind, m, n, k, extra=0):
    """Returns the least seconds for D[m,n] = A[m,k] B[k,n] with a result in BF16. kind: the name of
    its rate in RATES. extra: how many other BF16 elements are read or written."""
    operands = (2 if kind == "bf16" else 1) * (m * k + n * k)
    moved = operands + 2 * (m * n + extra)
    return max(2 * m * n * k / rates[kind], moved / rates["bytes"])


def linear_seconds(rates, kind, s, outputs, inputs, forward_extra=0, input_extra=0):
    """Returns the least seconds for the three products of a linear layer."""
    wgrad = "blocks, weight gradient" if kind == "blocks" else kind
    return (product_seconds(rates, kind, s.M, outputs, inputs, forward_extra)
            + product_seconds(rates, kind, s.M, inputs, outputs, input_extra)
            + product_seconds(rates, wgrad, outputs, inputs, s.M))


def activation_rides(s, recipe):
    """Whether fc1's forward product can also apply the activation: it can with delayed scaling,
    where it writes codes beside its result, and for GPT-2 in BF16. Then fc2's input-gradient
    product can also apply GELU's derivative: in FP8 it reads fc1's result and writes only codes."""
    return recipe == "delayed" or (recipe == "bf16" and not s.llama)


def rope_rides(s, recipe):
    """Whether Llama's QKV forward product rotates queries and keys: it does in FP8 with one scale
    per tensor, if heads have neither norm nor bias, and a tile of 256 columns contains complete
    heads."""
    return (recipe in ("delayed", "tensorwise") and not s.qk_norm and not s.qkv_bias
            and s.D % 16 == 0 and 256 % s.D == 0)


def products(rates, kind, s, recipe):
    # BF16: the product also stores GELU's input. FP8: that input is its result, and codes are
    # written too
    rides = s.M * s.F if activation_rides(s, recipe) else 0
    residual = s.M * s.C
    return s.L * (linear_seconds(rates, kind, s, s.N, s.C)
                  + linear_seconds(rates, kind, s, s.C, s.H * s.D, forward_extra=residual)
                  + linear_seconds(rates, kind, s, s.F1, s.C, forward_extra=rides)
                  + linear_seconds(rates, kind, s, s.C, s.F, forward_extra=residual,
                                   input_extra=0 if s.llama else rides))


def attention(rates, s):
    """Returns the least seconds of attention. It is causal, so half of each T x T product counts:
    two products in the forward pass, five in the backward pass."""
    forward = 2 * s.B * s.H * s.T * s.T * s.D
    rows = 2 * s.M * s.H * s.D
    packed = 2 * s.M * s.N
    return s.L * (max(forward / rates["bf16"], (packed + rows) / rates["bytes"])
                  + max(2.5 * forward / rates["bf16"], (2 * packed + 2 * rows) / rates["bytes"]))


def activation_bytes(s, recipe):
    """Returns the bytes per token and layer. Llama: SwiGLU (6F forward, 10F backward); RoPE, in the
    forward pass unless the product rotates, and in the backward pass, which with FUSED recipes also
    writes dQKV's codes; and the QK norm's input, which is read again. GPT-2: GELU (4F forward, 6F
    backward), or in BF16 the gradients of biases."""
    heads = (s.H + s.G) * s.D
    if s.llama:
        rope_backward = 4 * s.N if recipe in FUSED else 4 * heads
        swiglu = (10 if activation_rides(s, recipe) else 16) * s.F
        rope_forward = 0 if rope_rides(s, recipe) else 4 * heads
        return swiglu + rope_forward + rope_backward + (2 * heads if s.qk_norm else 0)
    if recipe == "bf16":
        return 2 * (s.F + s.N)
    return 0 if activation_rides(s, recipe) else 10 * s.F


def quantize_bytes(s, recipe):
    """Returns the bytes per token and layer for quantising attention's output and GPT-2's dQKV;
    with tensorwise scaling, the four linear layers' X (C, HD, C, F) and dY (N, C, F1, C)."""
    if recipe == "bf16":
        return 0
    if recipe in FUSED:
        return 4 * s.H * s.D + (0 if s.llama else 4 * s.N)
    return 4 * (4 * s.C + s.H * s.D + s.N + s.F + s.F1)


def muon_seconds(rates, s, gradient, moment):
    """Returns the least seconds that Muon needs for the blocks' matrices, beyond AdamW's time.
    gradient, moment: bytes of an element. A matrix has one moment, of at least two bytes an
    element. Its gradient, which becomes the update in place, is moved three more times. Then come
    five Newton-Schulz steps with three products each, on the square of the smaller side."""
    shapes = [(s.H * s.D, s.C), (s.G * s.D, s.C), (s.G * s.D, s.C), (s.C, s.H * s.D), (s.C, s.F)]
    shapes += [(s.F, s.C)] * (2 if s.llama else 1)
    elements = sum(rows * columns for rows, columns in shapes)
    seconds = elements * (3 * gradient + 2 * max(moment, 2) - 4 * moment) / rates["bytes"]
    for r, c in map(sorted, shapes):
        seconds += 5 * (product_seconds(rates, "bf16", r, r, c)
                        + product_seconds(rates, "bf16", r, r, r)
                        + product_seconds(rates, "bf16", r, c, r))
    return s.L * seconds


def floor_ms(device, options, parameters):
    """Returns the milliseconds of each family in a step of one micro-batch; None if the device is
    not known."""
    if device not in RATES:
        return None
    rates, s = RATES[device], Shape(options)
    fp8 = options["fp8-format"] != "none"
    head_fp8 = fp8 and options["fp8-lm-head"] == "true"
    recipe = options["fp8-recipe"] if fp8 else "bf16"
    layers = s.M * s.L
    # without accumulation the gradients are BF16, unless FP32 is requested
    gradient = 4 if options["grad-accum-dtype"] == "fp32" else 2
    # 8bit: one byte, and a scale of two bytes for 64 elements
    moment = {"bf16": 2, "8bit": 1 + 2 / 64}.get(options["adam-dtype"], 4)

    def moved(count):
        return count / rates["bytes"]

    codes = 4 if recipe in FUSED else 0 # bytes of dY's codes, beside the residual's gradient
    kind = {"bf16": "bf16", "blockwise": "blocks"}.get(recipe, "fp8")
    seconds = {
        "products": products(rates, kind, s, recipe),
        "head products": linear_seconds(rates, kind if head_fp8 else "bf16", s, s.P, s.C),
        "attention": attention(rates, s),
        # two norms in a layer: forward 4C, backward 8C; the last norm has no residual
        "norms": moved(layers * (24 + codes) * s.C + s.M * 10 * s.C),
        "activations": moved(layers * activation_bytes(s, recipe)),
        "loss": moved(s.M * 4 * s.P), # one pass over the logits and their gradient
        "embeddings": moved(s.M * 6 * s.C),
        "quantize": moved(layers * quantize_bytes(s, recipe)
                          + (s.M * 4 * (s.C + s.P) if head_fp8 and recipe == "tensorwise" else 0)),
        # the gradient twice (norm, update), master weights and moments read and written, the new
        # weights in BF16, or as W and W' in FP8
        "optimizer": moved(parameters * (2 * gradient + 2 * 4 + 2 * 2 * moment + 2)),
    }
    if options.get("optimizer") == "muon":
        seconds["optimizer"] += muon_seconds(rates, s, gradient, moment)
    return {family: 1e3 * value for family, value in seconds.items()}
