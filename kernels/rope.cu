#include "device.cuh"

// A thread turns 8 elements of a head's first half together with their partners in the second.
__global__ void rope_kernel(Bf16 *qkv, const float *table, int64_t count, int T, int heads, int row,
                            int D, float direction) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) { return; }
    int half = D / 2, per_head = half / VEC;
    int at = (int)(i % per_head) * VEC, head = (int)(i / per_head % heads);
    int64_t token = i / per_head / heads;
    Bf16 *x = qkv + token * row + head * D + at;
    const float *cosine = table + token % T * D + at, *sine = cosine + half;
    Floats8 a = load8(x, 0), b = load8(x + half, 0), c, s;
#pragma unroll
    for (int j = 0; j < VEC; j += 4) {
        *reinterpret_cast<float4 *>(c.v + j) = *reinterpret_cast<const float4 *>(cosine + j);
        *reinterpret_cast<float4 *>(s.v + j) = *reinterpret_cast<const float4 *>(sine + j);
    }
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        float first = a.v[j] * c.v[j] - b.v[j] * direction * s.v[j];
        b.v[j] = b.v[j] * c.v[j] + a.v[j] * direction * s.v[j];
        a.v[j] = first;
    }
    store8(x, 0, a);
    store8(x + half, 0, b);
}

// For head sizes whose half is not a multiple of 8: a thread a pair.
__global__ void rope_narrow_kernel(Bf16 *qkv, const float *table, int64_t count, int T, int heads,
                                   int row, int D, float direction) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) { return; }
    int half = D / 2, at = (int)(i % half), head = (int)(i / half % heads);
    int64_t token = i / half / heads;
    Bf16 *x = qkv + token * row + head * D + at;
    float c = table[token % T * D + at], s = direction * table[token % T * D + half + at];
    float a = to_float(x[0]), b = to_float(x[half]);
    x[0] = to_bf16(a * c - b * s);
    x[half] = to_bf16(b * c + a * s);
}

void gpu_rope_apply(Bf16 *qkv, const float *table, int B, int T, int H, int G, int D, bool inverse,
                    cudaStream_t stream) {
    int heads = H + G, row = (H + 2 * G) * D;
    float direction = inverse ? -1.0f : 1.0f;
    if (D % (2 * VEC) == 0) {
        int64_t count = (int64_t)B * T * heads * (D / 2 / VEC);
        rope_kernel<<<divide_up(count, 256), 256, 0, stream>>>(qkv, table, count, T, heads, row, D,
                                                               direction);
    } else {
        int64_t count = (int64_t)B * T * heads * (D / 2);
        rope_narrow_kernel<<<divide_up(count, 256), 256, 0, stream>>>(qkv, table, count, T, heads,
                                                                      row, D, direction);
    }
    LAUNCH_CHECK();
}
