// The table of launchers: each against its definition in cpu.c, or in FP64, at odd and even shapes,
// with random data, poisoned outputs, guard zones, and repeats that must give the same bits. The
// same rows time them at the shapes of models:
//   build/plain/test_gpu_kernels --time [part of a line's name]
// gpu_rows.h has the rows of what writes activations; here are matmuls, attention and the
// optimizer. Then come properties that are no row: special values, refusals, planted faults.
#define TEST_OWN_MAIN
#include "../kernels/gemm.h"
#include "attention_rows.h"

// ---- matmuls -----------------------------------------------------------------------------------

// A matmul of BF16 operands: what is added to it, what it is written as, and how far it may be
// from the FP64 result: in roundings (BF16), or as a relative error (FP32).
typedef struct {
    const char *name;
    bool trans_a, trans_b; // as a step has it; all four are checked
    GpuType type;
    enum { NOTHING, ANOTHER, ITS_OWN } added; // C: none, another buffer, or D
    GemmEpilogue epilogue;
    double allowed;
} Matmul;

static const Matmul matmuls[] = {
    {"forward", false, true, TYPE_BF16, Matmul::NOTHING, EPILOGUE_NONE, 1.05},
    {"forward+bias", false, true, TYPE_BF16, Matmul::NOTHING, EPILOGUE_BIAS, 1.5},
    // the library rounds before it adds
    {"forward+bias+add", false, true, TYPE_BF16, Matmul::ANOTHER, EPILOGUE_BIAS, 1.5},
    {"dX", false, false, TYPE_BF16, Matmul::NOTHING, EPILOGUE_NONE, 1.05},
    {"dX+dgelu", false, false, TYPE_BF16, Matmul::NOTHING, EPILOGUE_DGELU, 1.5},
    {"dW", true, false, TYPE_BF16, Matmul::NOTHING, EPILOGUE_NONE, 1.05},
    {"dW accumulated", true, false, TYPE_BF16, Matmul::ITS_OWN, EPILOGUE_NONE, 1.5},
    {"dW FP32", true, false, TYPE_F32, Matmul::NOTHING, EPILOGUE_NONE, 1e-5},
    {"dW FP32 accumulated", true, false, TYPE_F32, Matmul::ITS_OWN, EPILOGUE_NONE, 1e-5},
};

// D[m,n] of op(A)[m,k] op(B)[k,n].
static void matmul(const Matmul &p, int m, int n, int k, bool trans_a, bool trans_b,
                   const std::string &shape) {
    const size_t size = (size_t)m * n;
    Input a((size_t)m * k, 1), b((size_t)n * k, mode == TIMING ? 0.05f : 1.0f), c(size, 1.5f),
        bias(n, 1);
    Typed d(size, p.type);
    Gemm g = gemm_plain(m, n, k, a.device.data, b.device.data, d.data);
    g.trans_a = trans_a;
    g.trans_b = trans_b;
    g.type_d = p.type;
    g.epilogue = p.epilogue;
    if (p.epilogue == EPILOGUE_BIAS) { g.bias = bias.device.data; }
    if (p.epilogue == EPILOGUE_DGELU) { g.aux = c.device.data; }
    if (p.added != Matmul::NOTHING) {
        g.c = p.added == Matmul::ANOTHER ? (void *)c.device.data : d.data;
        g.beta = 1.0f;
    }
    if (mode == TIMING) {
        timed(std::string("matmul ") + p.name, shape, 2.0 * size * k / FLOPS_PER_S,
              [&] { gemm(&gpu, g); });
        return;
    }
    g.alpha = 0.5f;
    Floats expected = exact_matmul(
        m, n, k, g.alpha,
        [&](int i, int j) { return a.host[trans_a ? (size_t)j * m + i : (size_t)i * k + j]; },
        [&](int i, int j) { return b.host[trans_b ? (size_t)i * k + j : (size_t)j * n + i]; });
    if (p.epilogue == EPILOGUE_DGELU) {
        gelu_backward(expected.data(), expected.data(), c.host.data(), (int64_t)size);
    }
    for (size_t i = 0; i < size; i++) {
        if (p.added != Matmul::NOTHING) { expected[i] += c.host[i]; }
        if (p.epilogue == EPILOGUE_BIAS) { expected[i] += bias.host[i % n]; }
    }
    Floats results[2];
    for (Floats &result : results) {
        d.poison();
        if (p.added == Matmul::ITS_OWN) { d.write(c.host); }
        gemm(&gpu, g);
        result = d.read();
    }
    CHECK(same_bits(results[0], results[1]));
    if (p.type == TYPE_BF16) {
        check_against(p.name, results[0], expected, p.allowed, __FILE__, __LINE__);
    } else {
        CHECK_ERROR(results[0].data(), expected.data(), (int64_t)size, p.allowed);
    }
}

static const char *const layers[] = {"", "qkv", "out", "fc1", "fc2", "head"};

// The matmuls of a layer with outputs [M,N] of inputs [M,K].
static void layer_matmuls(int M, int N, int K, int layer) {
    std::string shape = text("%s %dx%dx%d", layers[layer], M, N, K);
    for (const Matmul &p : matmuls) {
        bool dgelu = p.epilogue == EPILOGUE_DGELU;
        if (mode == TIMING && p.trans_b) { matmul(p, M, N, K, false, true, shape); }
        if (mode == TIMING && p.trans_a) { matmul(p, N, K, M, true, false, shape); }
        if (mode == TIMING && !p.trans_a && !p.trans_b && (!dgelu || layer == 4)) {
            matmul(p, M, K, N, false, false, shape); // GELU's derivative comes after fc2's matmul
        }
        for (int transposed = 0; transposed < 4 && mode == CHECKING; transposed++) {
            bool trans_a = transposed & 1, trans_b = transposed & 2;
            if (M % 8 != 0 && (trans_a || !trans_b)) { continue; }
            if (dgelu && (trans_a || M < 128)) { continue; } // no step has it
            matmul(p, M, N, K, trans_a, trans_b, shape);
        }
    }
}

ROW(bf16_matmuls) {               // M, N, K, layer
    if (sanitizing()) { return; } // the libraries' kernels are not ours
    static const int timed[][4] = {
        {65536, 2304, 768, 1},  {65536, 768, 768, 2},    {65536, 3072, 768, 3},
        {65536, 768, 3072, 4},  {16384, 50304, 768, 5},  {32768, 6400, 1600, 3},
        {32768, 1600, 6400, 4}, {32768, 11008, 2048, 3}, {32768, 2048, 5504, 4}};
    row(layer_matmuls, CHECKING,
        {{128, 256, 64, 0}, {200, 136, 72, 0}, {8, 512, 1600, 0}, {1, 264, 48, 0}});
    row(layer_matmuls, TIMING, timed);
}

// An FP8 operand [rows,k] of a matmul; spread: of its codes, and the inverse of a single scale.
// Scales of blocks differ by up to 1000; i and j: how they change from block to block.
struct Fp8Operand {
    Codes codes;
    Floats scales;
    std::vector<double> values;
    Buffer<uint8_t> device;
    FloatBuffer device_scales;

    Fp8Operand(int rows, int k, Fp8Type type, Scaling kind, float spread, int i, int j)
        : codes(random_codes((size_t)rows * k, ++random_key, spread, type)),
          scales(fp8_scale_count(kind, rows, k), 1 / spread), device((size_t)rows * k),
          device_scales(scales.size()) {
        int height = kind == SCALE_BLOCK_128X128 ? FP8_BLOCK : 1;
        bool blocks = fp8_by_blocks(kind);
        if (blocks && mode == CHECKING) { scales.assign(scales.size(), NAN); }
        for (size_t at = 0; mode == CHECKING && at < codes.size(); at++) {
            int row = (int)(at / k), column = (int)(at % k);
            float &scale = scales[fp8_scale_index(kind, rows, k, row, column)];
            int step = row / height * i + column / FP8_BLOCK * j;
            if (blocks) { scale = (float)exp(-0.1 * (step % 70)); }
            values.push_back((double)fp8_decode(codes[at], type) * scale);
        }
        put_repeated(device, codes);
        device_scales.put(scales.data());
    }
};

// How they are scaled: A and B by one scale each, with fast accumulation or split; or A by blocks
// of 1 x 128 and B by blocks of 128 x 128 or 1 x 128.
enum ScaledBy { FAST, SPLIT, BLOCKS_128X128, BLOCKS_1X128 };

// D = A B' of codes, in BF16 and FP32, overwriting and adding, against the FP64 result of the
// operands' values.
static void fp8_matmul(int m, int n, int k, Fp8Type type_a, Fp8Type type_b, ScaledBy scaling,
                       int which, int layer) {
    const bool blocks = scaling >= BLOCKS_128X128;
    if (gpu.capability < FP8_CAPABILITY || (blocks && gpu.capability != 90)) {
        test_skip(blocks ? "matmuls with block scales need compute capability 9.0"
                         : "FP8 matmuls need compute capability 8.9");
        return;
    }
    Gemm g = gemm_plain(m, n, k, NULL, NULL, NULL);
    g.scaling_a = blocks ? SCALE_BLOCK_1X128 : SCALE_DELAYED;
    g.scaling_b = scaling == BLOCKS_128X128 ? SCALE_BLOCK_128X128 : g.scaling_a;
    Fp8Operand a(m, k, type_a, g.scaling_a, 50, 7, 5), b(n, k, type_b, g.scaling_b, 30, 11, 3);
    const size_t size = (size_t)m * n;
    Bf16Buffer d(size);
    g.a = a.device.data;
    g.b = b.device.data;
    g.d = d.data;
    g.type_a = gpu_fp8_type(type_a);
    g.type_b = gpu_fp8_type(type_b);
    g.trans_b = true;
    g.scale_a = a.device_scales.data;
    g.scale_b = b.device_scales.data;
    g.fast_accumulation = scaling == FAST;
    if (mode == TIMING) {
        static const char *const names[] = {"", "forward", "dX", "dW"}, *const kinds[] = {
                                                                            "fast", "split",
                                                                            "blocks", "blocks"};
        // M x N x K of the layer
        std::string shape = which == 1   ? text("%s %dx%dx%d", layers[layer], m, n, k)
                            : which == 2 ? text("%s %dx%dx%d", layers[layer], m, k, n)
                                         : text("%s %dx%dx%d", layers[layer], k, m, n);
        timed(text("fp8 matmul %s %s", names[which], kinds[scaling]), shape,
              2.0 * size * k / (2 * FLOPS_PER_S), [&] { gemm(&gpu, g); });
        return;
    }
    Floats expected = exact_matmul(
        m, n, k, 1, [&](int i, int p) { return a.values[(size_t)i * k + p]; },
        [&](int j, int p) { return b.values[(size_t)j * k + p]; });
    gemm(&gpu, g);
    // Hopper's FP8 tensor cores keep some 14 bits of the sum between promotions
    CHECK_BF16(get_floats(d), expected, scaling == FAST ? 2.0 : 1.2);
    FloatBuffer wide(size);
    g.d = wide.data;
    g.type_d = TYPE_F32;
    gemm(&gpu, g);
    Floats twice = wide.get();
    CHECK_ERROR(twice.data(), expected.data(), (int64_t)size, scaling == FAST ? 3e-3 : 5e-4);
    gemm(&gpu, g);
    CHECK(same_bits(wide.get(), twice));
    for (float &value : twice) { value *= 2; }
    g.c = wide.data;
    g.beta = 1.0f;
    gemm(&gpu, g);
    CHECK_ERROR(wide.get().data(), twice.data(), (int64_t)size, 1e-6);
}

ROW(fp8_matmuls) { // m, n, k, types of A and B, scaling; timed: which matmul of which layer
    if (sanitizing()) { return; }
    for (int scaling : {FAST, SPLIT}) {
        row(fp8_matmul, CHECKING,
            {{128, 256, 64, FP8_E4M3, FP8_E4M3, scaling, 0, 0},
             {208, 144, 1008, FP8_E5M2, FP8_E4M3, scaling, 0, 0},
             {16, 512, 4096, FP8_E4M3, FP8_E5M2, scaling, 0, 0}});
    }
    for (int scaling : {BLOCKS_128X128, BLOCKS_1X128}) { // the second: incomplete blocks everywhere
        row(fp8_matmul, CHECKING,
            {{128, 256, 384, FP8_E4M3, FP8_E4M3, scaling, 0, 0},
             {208, 144, 1600, FP8_E5M2, FP8_E4M3, scaling, 0, 0},
             {16, 512, 4096, FP8_E4M3, FP8_E4M3, scaling, 0, 0}});
    }
    static const int shapes[][4] = {{65536, 3072, 768, 3},
                                    {65536, 768, 3072, 4},
                                    {32768, 6400, 1600, 3},
                                    {32768, 11008, 2048, 3},
                                    {16384, 50304, 768, 5}};
    for (const int *l : shapes) {
        for (int scaling : {FAST, SPLIT, BLOCKS_128X128}) {
            int M = l[0], N = l[1], K = l[2], dy = scaling == BLOCKS_128X128 ? FP8_E4M3 : FP8_E5M2;
            int dw = scaling == BLOCKS_128X128 ? BLOCKS_1X128 : scaling;
            row(fp8_matmul, TIMING,
                {{M, N, K, FP8_E4M3, FP8_E4M3, scaling, 1, l[3]},
                 {M, K, N, dy, FP8_E4M3, scaling, 2, l[3]},
                 {N, K, M, dy, FP8_E4M3, dw, 3, l[3]}});
        }
    }
}

// ---- attention ---------------------------------------------------------------------------------

static void attention(int B, int T, int H, int G, int D, bool deterministic, int documents,
                      bool plain) {
    AttentionCase c({B, T, H, G, D, deterministic, NULL}, documents);
    AttentionShape s = c.s;
    Bf16Buffer out(c.n), dqkv(c.packed);
    FloatBuffer lse(c.lse.size());
    auto forward = [&] {
        (plain ? attention_plain_forward : attention_forward_gpu)(&gpu, s, out.data, lse.data,
                                                                  c.qkv.device.data);
    };
    auto backward = [&] {
        (plain ? attention_plain_backward : attention_backward_gpu)(
            &gpu, s, dqkv.data, c.dout.device.data, out.data, lse.data, c.qkv.device.data);
    };
    if (mode == TIMING) {
        std::string shape = text("B%d T%d H%d/%d D%d", s.B, s.T, s.H, s.G, s.D);
        if (documents != 0) { shape += text(" documents %d", documents); }
        const double floor = 4.0 * c.pairs * s.H * s.D / FLOPS_PER_S;
        timed("attention forward", shape, floor, forward);
        timed("attention backward", shape, 2.5 * floor, backward);
        const size_t all = gpu.attention_bytes;
        const int capability = gpu.capability;
        const bool own[] = {attention_own_serves(&gpu, s, false),
                            attention_own_serves(&gpu, s, true)};
        gpu.capability = 80; // then cuDNN computes all heads
        if (own[0]) { timed("attention forward cuDNN", shape, floor, forward); }
        if (own[1]) { timed("attention backward cuDNN", shape, 2.5 * floor, backward); }
        s.deterministic = true;
        for (int gib : {0, 1, 4}) { // 0: a half
            gpu.attention_bytes = (size_t)(gib == 0 ? 576 : 1152 * gib) << 20;
            timed("attention backward det " + (gib == 0 ? "512M" : text("%dG", gib)), shape,
                  2.5 * floor, backward);
        }
        gpu.attention_bytes = all;
        gpu.capability = capability;
        return;
    }
    const int capability = gpu.capability;
    gpu.capability = 80; // none of our kernels for Hopper
    if (!plain && !on_stand_ins()) {
        fail("%s", "");
        bool served = attention_is_fast(&gpu, s);
        if (!served) { printf("  measured: by the plain kernel: %s\n", error_text()); }
        CHECK(served || s.T < 64); // the lengths that people train on
    }
    for (int kernels : {80, capability}) { // cuDNN's backward pass follows either forward pass
        gpu.capability = kernels;
        out.poison();
        lse.poison();
        forward();
        // k: one rounding of the output in the plain kernel; the others also round probabilities
        CHECK_BF16(get_floats(out), c.out, plain ? 1.05 : 2.5);
        CHECK_ERROR(lse.get().data(), c.lse.data(), (int64_t)c.lse.size(), 1e-4);
    }
    gpu.capability = 80;
    for (int repeat = 0; repeat < 2; repeat++) {
        Floats first = repeat ? get_floats(dqkv) : Floats();
        dqkv.poison();
        CUDA_CHECK(cudaMemsetAsync(gpu.attention_workspace, 0xff, gpu.attention_bytes, gpu.stream));
        backward();
        CHECK_BF16(get_floats(dqkv), c.dqkv, plain ? 1.5 : 3.0);
        if (repeat && s.deterministic) { CHECK(same_bits(get_floats(dqkv), first)); }
    }
    gpu.capability = capability;
}

ROW(attention_by_library) { // B, T, H, G, D, deterministic, documents, plain
    if (sanitizing()) { return; }
    static const int checked[][8] = {
        {2, 128, 4, 4, 64, 1},     {1, 1, 2, 1, 64, 1},       {3, 17, 25, 25, 64, 1},
        {2, 200, 8, 2, 128, 1},    {1, 1000, 4, 1, 64, 1},    {2, 64, 6, 2, 32, 1},
        {2, 128, 4, 4, 64, 0},     {2, 200, 8, 2, 128, 0},    {1, 2056, 2, 2, 64, 1}, // for cuDNN
        {2, 200, 8, 2, 128, 1, 1}, {3, 251, 8, 2, 128, 0, 1}, {1, 1000, 4, 1, 64, 1, 1},
        {2, 200, 3, 3, 64, 1, 1},  {1, 2056, 2, 2, 64, 1, 1}, {2, 640, 4, 2, 80, 1, 1}};
    row(attention, CHECKING, checked);
    row(attention, TIMING,
        {{64, 1024, 12, 12, 64},
         {16, 2048, 16, 4, 128},
         {16, 2048, 16, 16, 128},
         {2, 8192, 32, 8, 128},
         {16, 2048, 32, 8, 64},
         {2, 8192, 32, 8, 64},
         {64, 1024, 12, 12, 64, 0, 500},
         {16, 2048, 16, 4, 128, 0, 500},
         {16, 2048, 16, 4, 128, 0, 800},
         {2, 8192, 32, 8, 128, 0, 500},
         {2, 8192, 32, 8, 128, 0, 800},
         {2, 8192, 32, 8, 128, 0, -8192}});
}

// size: of queries, keys and values; with 6, a row's weight is mostly on one key.
static void own_attention(int B, int T, int H, int G, int D, int size, int documents) {
    if (left_out((int64_t)B * T * (H + 2 * G) * D)) { return; }
    check_passes(AttentionCase({B, T, H, G, D, true, NULL}, documents, (float)size), 3);
}

// B, T, H, G, D, size, documents: heads fewer than the GPU's blocks, as many as 132 and more; tiles
// of 128 keys and 64 queries, whole and cut. of_forward: cuDNN computes the backward pass.
ROW(own_attention_kernels) {
    if (mode != CHECKING || sanitizing()) { return; }
    if (!attention_own_serves(&gpu, {1, 64, 1, 1, 64, true, NULL}, true)) {
        test_skip("kernels of our own need compute capability 9.0");
        return;
    }
    static const int of_64[][7] = {
        {1, 64, 1, 1, 64, 1},       {1, 100, 1, 1, 64, 1},       {1, 128, 5, 5, 64, 1},
        {3, 192, 5, 5, 64, 1},      {3, 100, 5, 5, 64, 1},       {1, 129, 2, 2, 64, 1},
        {11, 128, 12, 12, 64, 1},   {12, 384, 12, 12, 64, 1},    {6, 200, 25, 25, 64, 1},
        {10, 128, 13, 13, 64, 1},   {3, 1000, 12, 12, 64, 1},    {3, 1024, 12, 12, 64, 1},
        {1, 1024, 25, 25, 64, 1},   {1, 2048, 12, 12, 64, 1},    {3, 2048, 5, 5, 64, 1},
        {1, 1920, 1, 1, 64, 1},     {2, 512, 12, 12, 64, 6},     {1, 17, 3, 3, 64, 1},
        {1, 100, 1, 1, 64, 1, 1},   {3, 192, 5, 5, 64, 1, 1},    {12, 384, 12, 12, 64, 1, 1},
        {6, 200, 25, 25, 64, 1, 1}, {3, 1000, 12, 12, 64, 6, 1}, {7, 1024, 25, 25, 64, 1, 1},
        {3, 2048, 5, 5, 64, 1, 1},  {2, 17, 3, 3, 64, 1, 1}};
    static const int of_128[][7] = {
        {1, 40, 2, 2, 128, 1, -40},   {2, 17, 3, 3, 128, 1, 1},      {1, 64, 4, 1, 128, 1, -64},
        {1, 129, 2, 1, 128, 1, -129}, {3, 192, 8, 1, 128, 1, -63},   {2, 200, 8, 2, 128, 1, 1},
        {3, 251, 6, 3, 128, 6, -65},  {1, 1000, 12, 12, 128, 1, -3}, {2, 1000, 16, 4, 128, 1, 1},
        {1, 2048, 8, 2, 128, 6, 1},   {3, 2048, 4, 1, 128, 1, 300},  {1, 2100, 4, 4, 128, 1, -2100},
        {7, 384, 32, 8, 128, 1, 1},   {1, 8192, 4, 1, 128, 1, 500},  {2, 4100, 2, 1, 128, 1, -4100},
        {1, 32768, 2, 1, 128, 1, 500}};
    static const int of_forward[][7] = {
        {1, 64, 1, 1, 128, 1},     {1, 17, 4, 1, 128, 6},     {3, 200, 5, 5, 128, 1},
        {2, 1000, 16, 4, 128, 1},  {1, 2100, 8, 2, 128, 6},   {7, 384, 32, 8, 128, 1},
        {1, 8192, 2, 2, 128, 1},   {1, 100, 6, 2, 64, 1},     {7, 384, 32, 8, 64, 1},
        {2, 2100, 4, 4, 64, 6},    {1, 8192, 2, 2, 64, 1},    {2, 1000, 8, 2, 64, 1, 1},
        {1, 4100, 2, 2, 64, 1, 1}, {3, 251, 6, 3, 64, 6, -65}};
    row(own_attention, CHECKING, of_64);
    row(own_attention, CHECKING, of_128);
    row(own_attention, CHECKING, of_forward);
}

TEST(own_attention_is_for_some_shapes) {
    static const int documents = 0;
    const AttentionShape good = {2, 128, 4, 4, 64, true},
                         large = {2, 128, 4, 2, 128, true, &documents};
    const bool here = attention_own_serves(&gpu, good, true);
    AttentionShape others[] = {good, good, good, large, good, good, large};
    const int neither = 4; // of the others, our kernels compute only the forward pass
    Gpu old = gpu, newer = gpu, little = gpu;
    auto backward = [](Gpu *on, AttentionShape s) {
        attention_own_backward(on, s, (Bf16 *)4096, (Bf16 *)4096, (Bf16 *)4096, (float *)4096,
                               (Bf16 *)4096);
    };
    auto forward = [](Gpu *on, AttentionShape s) {
        attention_own_forward(on, s, (Bf16 *)4096, (float *)4096, (Bf16 *)4096);
    };
    others[0].D = 72;
    others[1].D = 32;
    others[2].G = 3;
    others[3].T = ATTENTION_MAX_T + 1;
    others[4].G = 2;
    others[5].T = ATTENTION64_MAX_T + 1;
    others[6].documents = NULL;
    for (int i = 0; i < 7; i++) {
        const AttentionShape s = others[i];
        CHECK(!attention_own_serves(&gpu, s, true));
        CHECK(attention_own_serves(&gpu, s, false) == (here && i >= neither));
        if (i < neither) {
            CHECK_DIES("attention: no forward kernel of our own for T ", forward(&gpu, s));
        }
        CHECK_DIES("attention: no backward kernel of our own for T ", backward(&gpu, s));
    }
    old.capability = 80;
    newer.capability = 100;
    CHECK(!attention_own_serves(&old, good, false) && !attention_own_serves(&newer, good, false));
    CHECK_DIES("for T 128, 4/4 heads of 64 on this device", forward(&old, good));
    CHECK_DIES("for T 128, 4/2 heads of 128, documents, on this device", backward(&old, large));
    if (!here) { return; }
    CHECK(attention_own_serves(&gpu, large, true));
    little.attention_bytes = 1 << 20;
    CHECK_DIES("1048576 bytes of workspace, it needs 10485760", backward(&little, good));
}

ROW(attention_plain) {
    static const int checked[][8] = {{1, 1, 2, 1, 64, 1, 0, 1},  {2, 17, 25, 25, 64, 1, 0, 1},
                                     {2, 50, 6, 2, 20, 1, 0, 1}, {1, 33, 4, 1, 256, 1, 0, 1},
                                     {2, 50, 6, 2, 20, 1, 1, 1}, {3, 33, 4, 1, 256, 1, 1, 1}};
    row(attention, CHECKING, checked);
}

// Deterministic backward in many pieces gives what it gives in one. With 251 tokens a piece's rows
// of log-sum-exp begin at no multiple of 16 bytes.
LIBRARY_TEST(attention_in_pieces) {
    fail("%s", ""); // planted: heads are not that large
    CHECK(!attention_is_fast(&gpu, {1, 128, 2, 2, 1000, true}) && error_text()[0] != '\0');
    for (int i = 0; i < 4; i++) {
        AttentionCase c({3, i % 2 ? 251 : 256, 8, 4, 64, true, NULL}, i / 2);
        AttentionShape s = c.s;
        Bf16Buffer out(c.n), whole(c.packed), pieces(c.packed);
        FloatBuffer lse(c.lse.size());
        size_t all = gpu.attention_bytes;
        attention_forward_gpu(&gpu, s, out.data, lse.data, c.qkv.device.data);
        attention_backward_gpu(&gpu, s, whole.data, c.dout.device.data, out.data, lse.data,
                               c.qkv.device.data);
        gpu.attention_bytes = (size_t)(9.2 * (1 << 20)); // memory for one group or two
        attention_backward_gpu(&gpu, s, pieces.data, c.dout.device.data, out.data, lse.data,
                               c.qkv.device.data);
        gpu.attention_bytes = all;
        CHECK(same_bits(get_floats(pieces), get_floats(whole)));
    }
}

// ---- optimizer ---------------------------------------------------------------------------------

// The norm of n gradients, and what a step decides by it.
static void norm_and_decision(int64_t n) {
    const bool timing = mode == TIMING;
    const int count = timing ? 1024 : 3;
    Input g(n, 1e-2f);
    Buffer<StepState> state(1);
    std::vector<GradientPart> pieces = {{0, n / 2}, {n / 2, n / 2}, {64, 64 * 3}}; // some twice
    if (timing) { pieces.clear(); }
    for (int i = 0; timing && i < count; i++) { pieces.push_back({i * (n / count), n / count}); }
    Buffer<GradientPart> parts(count);
    Buffer<double> scratch(count), loss_sum(1);
    Buffer<StepInput> input(1);
    parts.put(pieces.data());
    auto run = [&](const void *gradients, GpuType type) {
        gpu_sum_of_squares(&gpu, state.data, input.data, loss_sum.data, scratch.data, gradients,
                           type, parts.data, count);
    };
    if (timing) {
        timed("gradient norm", text("%dM", (int)(n >> 20)), moved(n),
              [&] { run(g.device.data, TYPE_BF16); });
        return;
    }
    FloatBuffer wide(n);
    wide.put(g.host.data());
    const double sum = 50.0;
    loss_sum.put(&sum);
    StepState start = {.updates = 4};
    for (int pass = 0; pass < 4; pass++) { // 2: 50 / 0 is infinite; 3: a quarter counts
        const double tokens = 10.0, targets[] = {tokens, tokens, 0.0, tokens / 4};
        double factor = pass == 3 ? 4.0 : 1.0;
        StepInput stops = {.stop = 1.0, .targets = targets[pass]};
        input.put(&stops);
        state.put(&start);
        pass == 1 ? run(g.device.data, TYPE_BF16) : run(wide.data, TYPE_F32);
        gpu_decide_step(&gpu, state.data, input.data, tokens, 1.0f);
        StepState s = state.get()[0];
        double expected = sum_of_squares(g.host.data(), n) +
                          sum_of_squares(g.host.data() + 64, 64 * 3);
        CHECK_EQUAL(s.skipped, pass == 2);
        CHECK_EQUAL(s.updates, pass == 2 ? 4 : 5);
        CHECK_CLOSE(s.stop, 1.0, 0.0);
        CHECK_CLOSE(s.loss_sum, 50.0, 0.0);
        CHECK_CLOSE(s.own_loss_sum, 50.0, 0.0);
        if (pass == 2) { continue; }
        expected *= factor * factor;
        CHECK_CLOSE(s.norm_squared, expected, 1e-6 * expected);
        CHECK_CLOSE(s.gradient_scale, factor / sqrt(expected), 1e-6);
    }
}

ROW(norms_and_decisions) { // n
    row(norm_and_decision, CHECKING, {{1000 * 64}});
    row(norm_and_decision, TIMING, {{256 << 20}});
}

// The device's decisions and window are the host's, to a spike and past it.
TEST(spikes_as_on_the_host) {
    Buffer<StepState> state(1);
    Buffer<StepInput> input(1);
    StepState s = {};
    SpikeWindow window = {};
    int skips[SKIP_REQUESTED + 1] = {};
    for (int step = 0; step < 400; step++) {
        double jump = step % 50 == 49 ? 10.0 : 1.0;
        double loss = 5.0 + 0.1 * rng_normal(7, (uint64_t)step) * jump;
        double norm = 1.0 + 0.1 * fabs(rng_normal(8, (uint64_t)step)) * jump;
        StepInput in = {.targets = 2.0, .sigma = 4.0, .skip = step % 90 == 89};
        s.loss_sum = step == 60 ? NAN : 2.0 * loss;
        s.norm_squared = norm * norm;
        state.put(&s);
        input.put(&in);
        gpu_decide_step(&gpu, state.data, input.data, 2.0, 1.0f);
        int expected = step_skip(&window, in.sigma, in.skip, s.loss_sum / 2.0,
                                 sqrt(s.norm_squared));
        s = state.get()[0];
        CHECK_EQUAL(s.skipped, expected);
        CHECK_EQUAL(s.window.count, window.count);
        CHECK(memcmp(&s.window, &window, sizeof(window)) == 0);
        skips[s.skipped]++;
    }
    CHECK_EQUAL(s.updates, skips[SKIP_NONE]);
    CHECK_EQUAL(skips[SKIP_NONFINITE], 1);
    CHECK(skips[SKIP_SPIKE] > 0 && skips[SKIP_REQUESTED] > 2);
}

TEST(hashes_are_those_of_the_host) {
    for (int64_t bytes : {8, 16, 8 * 255, 8 * 256, 8 * 1000003}) {
        Buffer<uint64_t> data((size_t)(bytes / 8)), sum(1);
        std::vector<uint64_t> host((size_t)(bytes / 8));
        for (size_t i = 0; i < host.size(); i++) { host[i] = rng_bits(3, i); }
        data.put(host.data());
        uint64_t start = 5, hash = hash_words(host.data(), bytes, 9);
        for (int twice = 0; twice < 2; twice++) {
            sum.put(&start);
            gpu_hash(&gpu, sum.data, data.data, bytes, 9);
            CHECK(sum.get()[0] == start + hash);
        }
        host[host.size() / 2] ^= 1ull << 63;
        CHECK(hash_words(host.data(), bytes, 9) != hash);
        host[host.size() / 2] ^= 1ull << 63;
        int64_t half = bytes / 16; // the hashes of two parts add up to that of the whole
        sum.put(&start);
        gpu_hash(&gpu, sum.data, data.data, 8 * half, 9);
        gpu_hash(&gpu, sum.data, data.data + half, bytes - 8 * half, 9 + half);
        CHECK(sum.get()[0] == start + hash);
    }
}

TEST(the_device_tells_the_time) {
    Buffer<uint64_t> stamps(2);
    gpu_stamp(&gpu, stamps.data);
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    double begin = wall_seconds();
    while (wall_seconds() < begin + 0.05) {}
    gpu_stamp(&gpu, stamps.data + 1);
    double seconds = 1e-9 * (double)(stamps.get()[1] - stamps.get()[0]);
    CHECK(seconds > 0.049 && seconds < 1);
}

// Bytes a second in each direction, with copies in both directions at once.
static double copy_rate(int64_t bytes) {
    enum { TIMES = 5 };
    void *from = gpu_host_memory(bytes, false), *to = gpu_host_memory(bytes, false);
    Buffer<uint8_t> in(bytes), out(bytes);
    cudaStream_t back;
    double begin = 0;
    CUDA_CHECK(cudaStreamCreateWithFlags(&back, cudaStreamNonBlocking));
    for (int i = 0; i <= TIMES; i++) { // the first is not counted
        if (i == 1) { begin = wall_seconds(); }
        CUDA_CHECK(cudaMemcpyAsync(in.data, from, bytes, cudaMemcpyHostToDevice, gpu.stream));
        CUDA_CHECK(cudaMemcpyAsync(to, out.data, bytes, cudaMemcpyDeviceToHost, back));
        CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
        CUDA_CHECK(cudaStreamSynchronize(back));
    }
    double seconds = (wall_seconds() - begin) / TIMES;
    gpu_host_free(from);
    gpu_host_free(to);
    CUDA_CHECK(cudaStreamDestroy(back));
    return bytes / seconds;
}

// Whether codes and scales are those of x but for a few: the device computes unrounded codes
// by approximate logarithms, and x may differ in its last bits from what it has rounded. Such codes
// are the next ones, one in a thousand at most, and a scale of a hundred may be another one.
static bool near_codes(const void *found, const std::vector<Bf16> &scales, Moment which,
                       const Floats &x, MomentRounding rounding) {
    const uint8_t *codes = static_cast<const uint8_t *>(found);
    std::vector<uint8_t> expected(x.size());
    std::vector<Bf16> expected_scales(scales.size());
    moment_encode(expected.data(), expected_scales.data(), which, x.data(), (int64_t)x.size(),
                  &rounding);
    size_t next = 0, wrong = 0, wrong_scales = 0;
    for (size_t i = 0; i < x.size(); i++) {
        if (scales[i / MOMENT_BLOCK] != expected_scales[i / MOMENT_BLOCK]) {
            wrong_scales += i % MOMENT_BLOCK == 0;
            continue;
        }
        int difference = which == MOMENT_FIRST ? (int8_t)codes[i] - (int8_t)expected[i]
                                               : codes[i] - expected[i];
        next += abs(difference) == 1;
        wrong += abs(difference) > 1;
    }
    return wrong == 0 && next <= x.size() / 1000 && wrong_scales <= scales.size() / 100;
}

// AdamW on n parameters: their state on the device or in host memory, their weights in BF16 or FP8.
static void adamw(int64_t n, GpuType gradient_type, GpuType moment_type, bool fp8, bool offloaded) {
    const bool small = moment_type == TYPE_MOMENT8;
    const std::string name = std::string(fp8 ? "fp8 adamw, " : "adamw, ") +
                             (small                     ? "8-bit moments"
                              : moment_type == TYPE_F32 ? "FP32 moments"
                                                        : "BF16 moments") +
                             (offloaded ? ", offloaded" : "");
    if ((fp8 && !has_fp8()) || (mode == TIMING && !is_wanted(name))) { return; }
    const int64_t moments = n * gpu_type_bytes(moment_type), bytes = 4 * n + 2 * moments;
    Buffer<char> resident(offloaded ? 16 : bytes);
    char *memory = offloaded ? (char *)gpu_host_memory(bytes, true) : resident.data;
    char *exp_avg = memory + 4 * n, *exp_avg_sq = exp_avg + moments;
    const int64_t blocks = small ? n / MOMENT_BLOCK : 8;
    Bf16Buffer m_scales(blocks), v_scales(blocks);
    Bf16 *const scales[] = {m_scales.data, v_scales.data};
    Typed gradients(n, gradient_type);
    Bf16Buffer weights(fp8 ? 8 : n);
    Quantised q(16, fp8 ? (int)(n / 16) : 16, FP8_E4M3, 60.0f);
    Buffer<StepState> state(1);
    Buffer<Fp8Weight> table(1);
    InputBuffer input(0.01, 1);
    Fp8Weight weight = {.rows = q.M, .columns = q.N, .scale = q.slot.data};
    table.put(&weight);
    AdamWUpdate u = plain_update((Bf16 *)gradients.data);
    u.moment_type = moment_type;
    u.gradient_type = gradient_type;
    u.weights = table.data;
    u.weight_count = 1;
    u.input = input.data;
    u.seed = 1;
    u.floor = small ? (float)moment_floor(u.beta1, u.beta2) : 0.0f;
    // the weights of the first and the third segment decay; the second has half the learning rate
    const int64_t ends[] = {0, mode == TIMING ? n : 64 * 5, mode == TIMING ? n : 64 * 700, n};
    std::vector<AdamWSegment> list;
    for (int i = 0; i < 3 && ends[i] < n; i++) {
        AdamWSegment s = {.first = ends[i], .n = ends[i + 1] - ends[i], .gradient = ends[i]};
        set_state(s, u, ends[i], (float *)memory, exp_avg, exp_avg_sq, scales);
        s.bf16 = fp8 ? NULL : weights.data + ends[i];
        s.fp8 = fp8 ? q.fp8.data + ends[i] : NULL;
        s.weight_offset = ends[i];
        s.lr_mult = i == 1 ? 0.5f : 1.0f;
        s.weight_decay = i == 1 ? 0.0f : 0.1f;
        list.push_back(s);
    }
    Segments segments(u, list);
    if (mode == TIMING) {
        double moves = 2.0 * bytes + (fp8 ? 3.0 : 4.0) * n; // the state, gradients, new weights
        double floor_s = offloaded ? bytes / copy_rate(bytes) : moves / BYTES_PER_S;
        StepState step = {.gradient_scale = 1.0f, .updates = 1};
        state.put(&step);
        if (offloaded) { printf("copies both ways: %.1f GB/s each\n", 1e-9 * bytes / floor_s); }
        timed(name, text("%dM", (int)(n >> 20)), floor_s, [&] { gpu_adamw(&gpu, &u, state.data); });
        if (offloaded) { gpu_host_free(memory); }
        return;
    }
    auto write = [&](char *to, const std::vector<char> &values) {
        offloaded ? (void)memcpy(to, values.data(), values.size())
                  : gpu_send(&gpu, to, values.data(), values.size());
    };
    auto read = [&](const char *from, GpuType type) {
        std::vector<char> values(n * gpu_type_bytes(type));
        if (!offloaded) { gpu_fetch(&gpu, values.data(), from, values.size()); }
        CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
        if (offloaded) { memcpy(values.data(), from, values.size()); }
        return values;
    };
    Floats w = random_bf16(n, 1), m(n, 0.0f), v(n, 0.0f);
    write(memory, encoded(w, TYPE_F32));
    write(exp_avg, std::vector<char>(2 * moments, 0)); // the moment 0, with its scale
    m_scales.put(std::vector<Bf16>(blocks, 0).data());
    v_scales.put(std::vector<Bf16>(blocks, 0).data());
    for (int step = 1; step <= 6; step++) {
        Floats g = random_bf16(n, 0.1f);
        bool skipped = step == 6;
        StepState s = {.gradient_scale = 0.5f, .skipped = skipped, .updates = step};
        StepInput in = {0.01, step, 0.0};
        gradients.write(g);
        input.put(&in);
        state.put(&s);
        gpu_adamw(&gpu, &u, state.data);
        AdamW a = {
            .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .gradient_scale = 0.5f, .step = step};
        a.floor = u.floor;
        for (int64_t i = 0; i < n && !skipped; i += 64) {
            bool decays = i < ends[1] || i >= ends[2];
            a.lr = decays ? 0.01f : 0.005f;
            a.weight_decay = decays ? 0.1f : 0.0f;
            adamw_update(&w[i], &m[i], &v[i], &g[i], 64, a);
        }
        for (Moment which : {MOMENT_FIRST, MOMENT_SECOND}) {
            if (!small || skipped) { break; }
            const bool first = which == MOMENT_FIRST;
            Floats &x = first ? m : v;
            std::vector<char> codes = read(first ? exp_avg : exp_avg_sq, moment_type);
            std::vector<Bf16> with = (first ? m_scales : v_scales).get();
            CHECK(near_codes(codes.data(), with, which, x, {0, moment_key(1, step, MOMENT_FIRST)}));
            // each step begins with the device's moments
            moment_decode(x.data(), which, (const uint8_t *)codes.data(), with.data(), 0, n);
        }
    }
    // BF16 moments: their rounding is of relative size 2^-8, and unbiased
    bool wide = moment_type != TYPE_BF16;
    const Floats stored = decoded(read(memory, TYPE_F32), TYPE_F32);
    CHECK_ERROR(stored.data(), w.data(), n, wide ? 1e-6 : 1e-3);
    if (fp8) {
        CHECK_EQUAL(check_codes(q.fp8.get(), rounded(stored), q.scale, q.type, 0), 0);
    } else {
        CHECK(same_bits(get_floats(weights), rounded(stored)));
    }
    if (!wide) {
        double bias = 0, size = 0;
        const Floats found = decoded(read(exp_avg_sq, moment_type), moment_type);
        for (int64_t i = 0; i < n; i++) {
            bias += (double)found[i] - v[i];
            size += v[i];
        }
        CHECK(fabs(bias / size) <= 1e-4); // rounding down would be off by some 2^-9
    }
    if (offloaded) { gpu_host_free(memory); }
}

ROW(optimizers) { // n, types of gradients and moments, FP8, offloaded
    static const int checked[][5] = {
        {64 * 1001, TYPE_F32, TYPE_F32},          {64 * 1001, TYPE_BF16, TYPE_F32},
        {64 * 1001, TYPE_BF16, TYPE_BF16},        {64 * 1001, TYPE_BF16, TYPE_F32, 1},
        {64 * 1001, TYPE_BF16, TYPE_F32, 1, 1},   {64 * 1001, TYPE_BF16, TYPE_BF16, 1, 1},
        {64 * 1001, TYPE_F32, TYPE_MOMENT8},      {64 * 1001, TYPE_BF16, TYPE_MOMENT8, 1},
        {64 * 1001, TYPE_F32, TYPE_MOMENT8, 0, 1}};
    static const int timed[][5] = {{256 << 20, TYPE_BF16, TYPE_F32},
                                   {256 << 20, TYPE_BF16, TYPE_BF16},
                                   {110080 * 2048, TYPE_BF16, TYPE_F32, 1},
                                   {110080 * 2048, TYPE_BF16, TYPE_BF16, 1},
                                   {28672 * 4096, TYPE_BF16, TYPE_F32, 1, 1},
                                   {28672 * 4096, TYPE_BF16, TYPE_BF16, 1, 1},
                                   {256 << 20, TYPE_BF16, TYPE_MOMENT8},
                                   {110080 * 2048, TYPE_BF16, TYPE_MOMENT8, 1},
                                   {28672 * 4096, TYPE_BF16, TYPE_MOMENT8, 1, 1}};
    row(adamw, CHECKING, checked);
    row(adamw, TIMING, timed);
}

// Codes and scales of 8-bit moments are those of moment_encode: without decay the new moments are g
// and g^2, which no rounding makes different. Gradients of many sizes, zeros and
// blocks of zeros; a block's largest on a BF16 number, and above.
TEST(moments_have_the_definitions_codes) {
    const int64_t n = 64 * 4099;
    Floats g = random_bf16(n, 1.0f);
    for (int64_t i = 0; i < n; i++) {
        g[i] = ldexpf(g[i] * 1.0009f, (int)(i / 640 % 40) - 20 - (int)(i * 7 % 23));
        if (i % 31 == 0 || i / 64 % 9 == 4) { g[i] = 0.0f; }
        if (i % 128 == 5) { g[i] = ldexpf(1.0f, (int)(i / 640 % 40) - 19); }
    }
    FloatBuffer gradients(n), master(n);
    Buffer<uint8_t> codes(n), codes_sq(n);
    Bf16Buffer scales(n / MOMENT_BLOCK), scales_sq(n / MOMENT_BLOCK), weights(n);
    Buffer<StepState> state(1);
    InputBuffer input(0.01, 3);
    AdamWUpdate u = plain_update(NULL);
    AdamWSegment s = {.first = 64 * 11, .n = n, .master = master.data, .exp_avg = codes.data};
    StepState step = {.gradient_scale = 1.0f, .updates = 3};
    gradients.put(g.data());
    master.put(Floats(n, 0.0f).data());
    codes.put(std::vector<uint8_t>(n, 0x91).data()); // whatever they were, it is forgotten
    codes_sq.put(std::vector<uint8_t>(n, 0x91).data());
    scales.put(std::vector<Bf16>(n / MOMENT_BLOCK, 0x3f80).data());
    scales_sq.put(std::vector<Bf16>(n / MOMENT_BLOCK, 0x3f80).data());
    state.put(&step);
    s.exp_avg_sq = codes_sq.data;
    s.exp_avg_scales = scales.data;
    s.exp_avg_sq_scales = scales_sq.data;
    s.bf16 = weights.data;
    s.lr_mult = 1.0f;
    Segments segments(u, {s});
    u.moment_type = TYPE_MOMENT8;
    u.gradients = gradients.data;
    u.gradient_type = TYPE_F32;
    u.input = input.data;
    u.seed = 12;
    u.beta1 = u.beta2 = 0.0f;
    gpu_adamw(&gpu, &u, state.data);
    MomentRounding rounding = {s.first, moment_key(u.seed, 3, MOMENT_FIRST)};
    std::vector<uint8_t> found = codes.get();
    CHECK(near_codes(found.data(), scales.get(), MOMENT_FIRST, g, rounding));
    found[found.size() / 2 + 5] += 2; // planted: one code that is not the next one
    CHECK(CAUGHT(CHECK(near_codes(found.data(), scales.get(), MOMENT_FIRST, g, rounding))));
    for (float &x : g) { x *= x; }
    CHECK(near_codes(codes_sq.get().data(), scales_sq.get(), MOMENT_SECOND, g, rounding));
    rounding.key++; // planted: other random numbers
    CHECK(CAUGHT(
        CHECK(near_codes(codes_sq.get().data(), scales_sq.get(), MOMENT_SECOND, g, rounding))));
}

// The update kernel against fp8_scale_update, slot by slot, over many steps, some with bad amaxes.
TEST(scaling_state) {
    enum { SLOTS = 6, LENGTH = 5, STEPS = 17 };
    Buffer<Fp8Scale> slots(SLOTS);
    FloatBuffer history(SLOTS * LENGTH), targets(SLOTS);
    Buffer<uint8_t> kinds(SLOTS);
    Buffer<StepState> state(1);
    std::vector<Fp8Scale> host(SLOTS, {1.0f, 1.0f, 0.0f, 0});
    Floats host_history(SLOTS * LENGTH, 0.0f), host_targets(SLOTS, 448.0f);
    const uint8_t weight = SLOT_UPDATED | SLOT_WEIGHT;
    uint8_t flags[SLOTS] = {SLOT_UPDATED, weight, SLOT_UPDATED, SLOT_UPDATED, weight, 0};
    targets.put(host_targets.data());
    history.put(host_history.data());
    kinds.put(flags);
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < SLOTS; i++) {
            float bad[] = {0.0f, INFINITY, NAN};
            host[i].amax = (step + i) % 4 == 1 ? bad[step % 3] : 1.0f + (step * 7 + i * 3) % 11;
        }
        slots.put(host.data());
        StepState s = {};
        s.skipped = step == 6;
        state.put(&s);
        Fp8Table table = {slots.data, history.data, targets.data, kinds.data, SLOTS, LENGTH};
        gpu_fp8_update(&gpu, &table, state.data);
        for (int i = 0; i < SLOTS; i++) {
            if (!flags[i]) { continue; }
            if (step == 6) {
                if (i % 3 != 1) { host[i].amax = 0.0f; }
            } else {
                fp8_scale_update(&host[i], &host_history[i * LENGTH], LENGTH, 448.0f);
            }
        }
        std::vector<Fp8Scale> result = slots.get();
        CHECK(memcmp(result.data(), host.data(), SLOTS * sizeof(Fp8Scale)) == 0);
        CHECK(same_bits(history.get(), host_history));
    }
}

// ---- properties that are no row ----------------------------------------------------------------

// The table's own comparisons find one wrong bit: in each form of the output, in sums, and in the
// last part of a whole.
TEST(planted_faults) {
    enum { M = 64, N = 32 };
    Input x(M * N, 2), dout(M * N, 1);
    SumScratch scratch(M, N);
    Floats dx(M * N);
    gelu_backward(dx.data(), dout.host.data(), x.host.data(), M * N);
    const Producer p = {"planted", FUSED_UNROUNDED, M, N, FP8_E5M2, 50.0f, &dout, 0, 0, "", 0, {N},
                        1};
    for (Mode how : {CHECKING, IN_PARTS}) {
        for (int fault = 0; fault < 5; fault++) { // 0: none
            auto run = [&](const Launch &l) {
                gpu_gelu_backward(&gpu, l.out, l.sums[0], l.out.bf16, x.device.data + l.first * N,
                                  NULL, scratch.scratch(), l.rows, N);
                bool last = (int)l.first + l.rows == M && (how == CHECKING || l.rows < M);
                void *forms[] = {NULL, l.out.fused ? NULL : l.out.bf16, l.out.rows.codes,
                                 l.out.columns.codes, l.sums[0].data};
                uint8_t *at = (uint8_t *)forms[fault], byte;
                if (at == NULL || !last) { return; }
                at += fault == 4 ? 3 : (size_t)l.rows * N - 1; // an exponent's bit of a sum
                gpu_read(&gpu, &byte, at, 1);
                byte ^= 0x20;
                gpu_send(&gpu, at, &byte, 1);
            };
            mode = how;
            CHECK(CAUGHT(producer(p, dx, run)) ==
                  (fault > 0 && (fault == 1 || fault == 4 || has_fp8())));
            mode = CHECKING;
        }
    }
}

TEST(losses_of_bad_logits_are_not_finite) {
    float bad[] = {NAN, INFINITY};
    for (float value : bad) {
        Input logits(3 * 264, 1);
        logits.host[264 + 17] = value;
        put_floats(logits.device, logits.host);
        Buffer<int> targets(3);
        int host_targets[] = {1, 2, 3};
        targets.put(host_targets);
        FloatBuffer out(3);
        gpu_cross_entropy(&gpu, out.data, operand_bf16(logits.device.data), {}, {}, targets.data, 3,
                          257, 264, {1.0f, 0.0f, 0.0f});
        Floats l = out.get();
        CHECK(isfinite(l[0]) && !isfinite(l[1]) && isfinite(l[2]));
    }
}

// Of a target whose logit lies far below the row's log-sum-exp, which is given.
TEST(losses_far_above_their_log_sum_exp) {
    if (!has_fp8()) {
        test_skip("FP8 needs compute capability 8.9");
        return;
    }
    const int M = 64, V = 60, P = 64;
    Quantised q(M, P, FP8_E4M3, 1.0f);
    Floats logits(M * P), given, expected(M);
    Ints host_targets(M);
    for (int i = 0; i < M; i++) {
        float logit = bf16_decode(bf16_encode(-100.0f * (float)(i + 1)));
        host_targets[i] = i * 7 % V;
        logits[i * P + host_targets[i]] = logit;
        given.insert(given.end(), {0.0f, (float)(V - 1)}); // a row's maximum and sum
        expected[i] = logf((float)(V - 1)) - logit;
    }
    put_floats(q.bf16, logits);
    FloatBuffer losses(M), rows(loss_scratch_floats(M)), max_sums(max_sums_floats(M, P));
    Buffer<int> targets(M);
    targets.put(host_targets.data());
    max_sums.put(given.data());
    gpu_cross_entropy(
        &gpu, losses.data, q.tensor(SCALE_DELAYED, true), {rows.data, rows.count * sizeof(float)},
        {max_sums.data, max_sums.count * sizeof(float)}, targets.data, M, V, P, {1.0f, 0.0f, 0.0f});
    check_losses(losses.get(), expected, logits, host_targets, P, 0.0f, 2e-6);
}

TEST(special_values) {
    float specials[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e30f, -1e30f, 1e-30f};
    Floats x(16 * 16);
    if (!has_fp8()) {
        test_skip("FP8 needs compute capability 8.9");
        return;
    }
    for (size_t i = 0; i < x.size(); i++) { x[i] = specials[i % 8]; }
    x = rounded(x);
    for (int type = 0; type < 2; type++) {
        Quantised q(16, 16, (Fp8Type)type, 2.0f);
        put_floats(q.bf16, x);
        gpu_quantize(&gpu, q.tensor(SCALE_DELAYED, false), {}, {}, 16, 16);
        CHECK_EQUAL(check_codes(q.fp8.get(), x, q.scale, q.type, 0), 0);
        CHECK(isnan(q.slot.get()[0].amax)); // the update will ignore it
        gpu_quantize(&gpu, q.blocks(SCALE_BLOCK_1X128, false), {}, {}, 16, 16);
        check_blocks(q, x, SCALE_BLOCK_1X128, true);
    }
}

TEST(amaxes) {
    Input x(1000 * 8, 1);
    Quantised q(16, 16, FP8_E4M3, 1.0f);
    Operand measured = with_forms(q.tensor(SCALE_CURRENT, false), x.device.data, NULL, NULL);
    float largest = tensor_amax(x.host.data(), 8000), before[] = {0.5f, 1e20f};
    for (float amax : before) {
        q.reset(amax, 0);
        gpu_quantize(&gpu, measured, {}, {}, 1000, 8);
        CHECK_CLOSE(q.slot.get()[0].amax, fmaxf(amax, largest), 0.0);
    }
}

TEST(codes_are_counted) {
    for (int type = 0; type < 2; type++) {
        for (int n : {16, 4096, 123456 * 16}) {
            Codes codes(n);
            for (int i = 0; i < n; i++) { codes[i] = (uint8_t)(rng_bits(type, i) >> 20); }
            Buffer<uint8_t> device(n);
            Buffer<Fp8Counts> counts(1);
            Fp8Counts right = {5, 6, 7, 8};
            device.put(codes.data());
            counts.put(&right);
            gpu_count_codes(&gpu, counts.data, device.data, n, (Fp8Type)type);
            for (uint8_t code : codes) { fp8_count(&right, code, (Fp8Type)type); }
            Fp8Counts found = counts.get()[0];
            CHECK(memcmp(&found, &right, sizeof(right)) == 0);
            found.zero++;
            CHECK(memcmp(&found, &right, sizeof(right)) != 0);
        }
    }
    CHECK_DIES("a multiple of 16", gpu_count_codes(&gpu, NULL, NULL, 24, FP8_E4M3));
}

// Violates each precondition of kernels.h. The pointers are never read.
TEST(refusals) {
    Bf16 *x = (Bf16 *)4096, *odd = (Bf16 *)4098;
    uint8_t *fp8 = (uint8_t *)8192, *odd_fp8 = (uint8_t *)8193;
    float *f = (float *)4096;
    const int *tokens = (const int *)4096;
    Fp8Scale *slot = (Fp8Scale *)4096;
    Operand plain = operand_bf16(x), given = with_forms(given_tensor(FP8_E4M3, slot), x, fp8, fp8);
    given.fused = given.writes_amax = false;
    Operand fused = given, e5m2 = given, waits = given;
    fused.fused = e5m2.fused = waits.fused = true;
    e5m2.type = FP8_E5M2;
    waits.scaling = SCALE_CURRENT;
    Operand measured = with_forms(waits, odd, NULL, NULL);
    measured.fused = false;
    measured.writes_amax = true;
    Gradient sums = {f, TYPE_F32, false};
    Scratch little = {f, 100092}, enough = {f, 1 << 30};
    NormForward norm = {f, f, x, x, NULL, 1e-5f, 64, 64};
    NormBackward back = {sums, {}, {}, x, x, x, NULL, f, enough, 64, 64};
    const LossTerms terms = {1.0f, 0.0f, 0.0f};
    CHECK_DIES("quantize: 100092 bytes of scratch; 100096 are needed",
               gpu_quantize(&gpu, given, sums, little, 50000, 64));
    CHECK_DIES("gelu backward",
               gpu_gelu_backward(&gpu, operand_bf16(x), sums, x, x, NULL, {f, 255}, 8, 64));
    CHECK_DIES("gelu backward", gpu_gelu_backward(&gpu, fused, sums, x, x, NULL, {f, 255}, 16, 64));
    CHECK_DIES("not 16-byte aligned",
               gpu_quantize(&gpu, with_forms(given, odd, fp8, fp8), {}, {}, 64, 64));
    CHECK_DIES("not 16-byte aligned",
               gpu_quantize(&gpu, with_forms(given, x, odd_fp8, fp8), {}, {}, 64, 64));
    CHECK_DIES("not 16-byte aligned", gpu_gelu_forward(&gpu, operand_bf16(x), odd, NULL, 64, 64));
    CHECK_DIES("not 16-byte aligned", gpu_gelu_forward(&gpu, operand_bf16(x), x, odd, 64, 64));
    CHECK_DIES("not 16-byte aligned", gpu_quantize(&gpu, measured, {}, {}, 64, 64));
    CHECK_DIES("a multiple of 8", gpu_to_bf16(&gpu, x, f, 60));
    CHECK_DIES("not 16-byte aligned", gpu_swiglu_forward(&gpu, operand_bf16(x), odd, 64, 64));
    CHECK_DIES("not 16-byte aligned", gpu_swiglu_backward(&gpu, operand_bf16(x), odd, x, 64, 64));
    CHECK_DIES("not 16-byte aligned",
               gpu_embedding_forward(&gpu, x, tokens, NULL, odd, NULL, 1, 8, 64));
    CHECK_DIES("multiples of 8", gpu_gelu_forward(&gpu, operand_bf16(x), x, NULL, 64, 60));
    CHECK_DIES("multiples of 8", gpu_embedding_forward(&gpu, x, tokens, NULL, x, NULL, 1, 8, 60));
    CHECK_DIES("multiples of 8", gpu_position_backward(&gpu, sums, x, 1, 8, 60));
    CHECK_DIES("up to 2^33 values",
               gpu_gelu_forward(&gpu, operand_bf16(x), x, NULL, 1 << 20, 1 << 14));
    CHECK_DIES("multiples of 16", gpu_quantize(&gpu, given, {}, {}, 64, 56));
    CHECK_DIES("multiples of 16", gpu_gelu_forward(&gpu, fused, x, NULL, 56, 64));
    CHECK_DIES("multiples of 16", gpu_transpose_codes(&gpu, fp8, fp8, 16, 24));
    CHECK_DIES("without a scale",
               gpu_quantize(&gpu, with_forms(plain, x, fp8, fp8), {}, {}, 64, 64));
    Operand aimless = with_forms(measured, x, fp8, fp8);
    aimless.target = 0.0f;
    CHECK_DIES("without a target", gpu_quantize(&gpu, aimless, {}, {}, 64, 64));
    CHECK_DIES("without a given scale", gpu_gelu_forward(&gpu, waits, x, NULL, 64, 64));
    CHECK_DIES("no BF16 form",
               gpu_gelu_forward(&gpu, with_forms(given, NULL, fp8, fp8), x, NULL, 64, 64));
    CHECK_DIES("E4M3", gpu_gelu_forward(&gpu, with_forms(e5m2, NULL, fp8, fp8), x, NULL, 64, 64));
    CHECK_DIES("E4M3", gpu_norm_forward(&gpu, with_forms(e5m2, NULL, fp8, fp8), norm));
    CHECK_DIES("no residual gradient",
               gpu_norm_backward(&gpu, with_forms(fused, NULL, fp8, fp8), back));
    back.rstd = NULL;
    CHECK_DIES("no statistics", gpu_norm_backward(&gpu, operand_bf16(x), back));
    norm.C = back.C = 8200;
    CHECK_DIES("8200 channels", gpu_norm_forward(&gpu, operand_bf16(x), norm));
    CHECK_DIES("8200 channels", gpu_norm_backward(&gpu, operand_bf16(x), back));
    CHECK_DIES("cross-entropy",
               gpu_cross_entropy(&gpu, f, operand_bf16(x), {}, {}, tokens, 64, 72, 64, terms));
    CHECK_DIES("cross-entropy: 508 bytes of scratch; 512 are needed",
               gpu_cross_entropy(&gpu, f, fused, {f, 508}, {}, tokens, 64, 60, 64, terms));
    CHECK_DIES("cross-entropy: 508 bytes of scratch; 512 are needed",
               gpu_cross_entropy(&gpu, f, fused, {f, 512}, {f, 508}, tokens, 64, 60, 64, terms));
    CHECK_DIES(
        "no gradient in FP8, or a cap",
        gpu_cross_entropy(&gpu, f, operand_bf16(x), {f, 512}, {f, 512}, tokens, 64, 60, 64, terms));
    CHECK_DIES("heads of 264", attention_plain_forward(&gpu, {1, 8, 1, 1, 264}, x, f, x));
    CHECK_DIES("groups", attention_plain_forward(&gpu, {1, 8, 3, 2, 64}, x, f, x));
    CHECK_DIES("head size must be even",
               gpu_rope_forward(&gpu, (Bf16 *)16, (Bf16 *)16,
                                {(float *)16, NULL, NULL, 0, 1, 1, 1, 1, 7}));
    CHECK_DIES("heads of 264", gpu_rope_forward(&gpu, x, x, {f, x, x, 0, 1, 8, 1, 1, 264}));
    CHECK_DIES("not 16-byte aligned", gpu_rope_forward(&gpu, x, x, {f, x, odd, 0, 1, 8, 1, 1, 64}));
    RotaryBackward rope = {{f, x, x, 0, 1, 64, 1, 1, 64}, NULL, {}, {}, {}, {f, 1 << 20}};
    CHECK_DIES("no BF16 form", gpu_rope_backward(&gpu, operand_bf16(x), rope));
    rope.qkv = x;
    rope.scratch.bytes = 2 * 8 * 64 * 4 - 4;
    CHECK_DIES("4092 bytes of scratch", gpu_rope_backward(&gpu, operand_bf16(x), rope));
}

SETUP() {
    open_test_gpu((size_t)(mode == TIMING ? 4608 : 192) << 20);
}

int main(int argc, char **argv) {
    return check_or_time(argc, argv);
}
