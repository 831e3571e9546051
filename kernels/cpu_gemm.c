// Blocked matmul for the CPU, in the manner of Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication" (2008): panels of B and blocks of A are packed so that
// the innermost kernel reads both with unit stride and keeps an MR x NR tile of C in registers.
//
// Vectors use GCC's vector extension, so that the same source compiles for AVX-512, AVX2 and other
// instruction sets; only the tile sizes differ.
#include "../base/common.h"
#include "cpu.h"

#include <assert.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { VECTOR = 16, MR = 12, NR = 2 * VECTOR };
#elif defined(__AVX__)
enum { VECTOR = 8, MR = 6, NR = 2 * VECTOR };
#else
enum { VECTOR = 4, MR = 6, NR = 2 * VECTOR };
#endif

// A block of A [MC,KC] fits in L2 cache, a panel of B [KC,NR] in L1, the packed B [KC,NC] in L3.
enum { MC = MR * 20, KC = 256, NC = NR * 24 };

typedef float Vector __attribute__((vector_size(VECTOR * sizeof(float))));
typedef Vector VectorUnaligned __attribute__((aligned(4)));
typedef float Quad __attribute__((vector_size(16), aligned(4)));

// out[c][r] = x[r][c] for r < 4, with rows of x `ld` floats apart and rows of out `width` floats
// apart.
static inline void transpose_4_rows(float *out, int width, const float *x, int ld, int cols) {
    int c = 0;
    for (; c + 4 <= cols; c += 4) {
        Quad r0 = *(const Quad *)(x + c), r1 = *(const Quad *)(x + (size_t)ld + c);
        Quad r2 = *(const Quad *)(x + 2 * (size_t)ld + c),
             r3 = *(const Quad *)(x + 3 * (size_t)ld + c);
        // these become shuffles of two vectors, for which compilers have functions of various names
        Quad t0 = {r0[0], r1[0], r0[1], r1[1]}, t1 = {r2[0], r3[0], r2[1], r3[1]};
        Quad t2 = {r0[2], r1[2], r0[3], r1[3]}, t3 = {r2[2], r3[2], r2[3], r3[3]};
        float *o = out + (size_t)c * width;
        *(Quad *)o = (Quad){t0[0], t0[1], t1[0], t1[1]};
        *(Quad *)(o + width) = (Quad){t0[2], t0[3], t1[2], t1[3]};
        *(Quad *)(o + 2 * width) = (Quad){t2[0], t2[1], t3[0], t3[1]};
        *(Quad *)(o + 3 * width) = (Quad){t2[2], t2[3], t3[2], t3[3]};
    }
    for (; c < cols; c++) {
        for (int r = 0; r < 4; r++) { out[(size_t)c * width + r] = x[(size_t)r * ld + c]; }
    }
}

// Packs rows [row, row+rows) x columns [col, col+cols) of a matrix as panels of `width` rows, each
// stored column by column: out[panel][col][width]. Rows beyond the end are zero. The matrix's
// element (r, c) is x[c * ld + r] if rows_contiguous, else x[r * ld + c].
static void pack(float *out, const float *x, int ld, bool rows_contiguous, int row, int rows,
                 int col, int cols, int width) {
    for (int p = 0; p < rows; p += width, out += (size_t)width * cols) {
        int w = min_int(width, rows - p), r = 0;
        if (rows_contiguous) {
            for (int c = 0; c < cols; c++) {
                const float *src = x + (size_t)(col + c) * ld + row + p;
                for (r = 0; r < w; r++) { out[(size_t)c * width + r] = src[r]; }
                for (; r < width; r++) { out[(size_t)c * width + r] = 0.0f; }
            }
            continue;
        }
        const float *src = x + (size_t)(row + p) * ld + col;
        for (; r + 4 <= w; r += 4) {
            transpose_4_rows(out + r, width, src + (size_t)r * ld, ld, cols);
        }
        for (; r < width; r++) {
            for (int c = 0; c < cols; c++) {
                out[(size_t)c * width + r] = r < w ? src[(size_t)r * ld + c] : 0.0f;
            }
        }
    }
}

// tile[MR,NR] = the sum over k of the outer products of a[k,MR] and b[k,NR]
static inline void multiply_panels(int k, const float *a, const float *b, float *tile) {
    Vector acc[MR][2];
    for (int i = 0; i < MR; i++) { acc[i][0] = acc[i][1] = (Vector){0}; }
    for (int p = 0; p < k; p++, a += MR, b += NR) {
        Vector b0 = *(const VectorUnaligned *)b;
        Vector b1 = *(const VectorUnaligned *)(b + VECTOR);
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++) {
            acc[i][0] += a[i] * b0;
            acc[i][1] += a[i] * b1;
        }
    }
    for (int i = 0; i < MR; i++) {
        *(VectorUnaligned *)(tile + i * NR) = acc[i][0];
        *(VectorUnaligned *)(tile + i * NR + VECTOR) = acc[i][1];
    }
}

// C = alpha * tile (+ addend) (+ bias) for the tile of the first part of k (`first`); for a later
// part of k, C += alpha * tile.
static void store_tile(const CpuGemm *g, const float *tile, int row, int rows, int col, int cols,
                       bool first) {
    for (int i = 0; i < rows; i++) {
        size_t at = (size_t)(row + i) * g->n + col;
        float *c = g->c + at;
        const float *t = tile + i * NR, *base = first ? g->addend : g->c;
        if (base != NULL) {
            base += at;
            for (int j = 0; j < cols; j++) { c[j] = base[j] + g->alpha * t[j]; }
        } else {
            for (int j = 0; j < cols; j++) { c[j] = g->alpha * t[j]; }
        }
        if (first && g->bias != NULL) {
            for (int j = 0; j < cols; j++) { c[j] += g->bias[col + j]; }
        }
    }
}

// Computes one block of C, [rows,cols] at (row, col), over all of k. a_pack and b_pack are buffers
// of this thread.
static void multiply_block(const CpuGemm *g, int row, int rows, int col, int cols, float *a_pack,
                           float *b_pack) {
    _Alignas(64) float tile[MR * NR];
    for (int p = 0; p < g->k; p += KC) {
        int depth = min_int(KC, g->k - p);
        pack(b_pack, g->b, g->trans_b ? g->k : g->n, !g->trans_b, col, cols, p, depth, NR);
        for (int ic = 0; ic < rows; ic += MC) {
            int mc = min_int(MC, rows - ic);
            pack(a_pack, g->a, g->trans_a ? g->m : g->k, g->trans_a, row + ic, mc, p, depth, MR);
            for (int j = 0; j < cols; j += NR) {
                for (int i = 0; i < mc; i += MR) {
                    multiply_panels(depth, a_pack + (size_t)i * depth, b_pack + (size_t)j * depth,
                                    tile);
                    store_tile(g, tile, row + ic + i, min_int(MR, mc - i), col + j,
                               min_int(NR, cols - j), p == 0);
                }
            }
        }
    }
}

static int round_up(int x, int multiple) {
    return (int)round_up64(x, multiple);
}

void cpu_gemm(CpuGemm g) {
    assert(g.m > 0 && g.n > 0 && g.k > 0);
    int row_step = min_int(4 * MC, round_up(g.m, MR)), col_step = min_int(NC, round_up(g.n, NR));
    int row_blocks, col_blocks;
    for (;;) { // makes blocks smaller until there are enough for the threads
        row_blocks = (g.m + row_step - 1) / row_step;
        col_blocks = (g.n + col_step - 1) / col_step;
        if ((long)row_blocks * col_blocks >= 4 * omp_get_max_threads()) { break; }
        if (row_step > 2 * MC || (col_step <= 4 * NR && row_step > 4 * MR)) {
            row_step = round_up(row_step / 2, MR);
        } else if (col_step > 4 * NR) {
            col_step = round_up(col_step / 2, NR);
        } else {
            break;
        }
    }
    // floats of the largest packed blocks of A and of B, rounded up to whole cache lines
    const size_t line = 64 / sizeof(float), depth = (size_t)round_up(min_int(KC, g.k), (int)line);
    const size_t a_size = (size_t)min_int(MC, row_step) * depth, b_size = (size_t)col_step * depth;
#pragma omp parallel
    {
        FREED float *a_pack = aligned_alloc(64, a_size * sizeof(float));
        FREED float *b_pack = aligned_alloc(64, b_size * sizeof(float));
        if (a_pack == NULL || b_pack == NULL) {
            die("out of memory: %zu bytes could not be allocated",
                (a_size + b_size) * sizeof(float));
        }
#pragma omp for schedule(dynamic)
        for (int block = 0; block < row_blocks * col_blocks; block++) {
            int row = block % row_blocks * row_step, col = block / row_blocks * col_step;
            multiply_block(&g, row, min_int(row_step, g.m - row), col, min_int(col_step, g.n - col),
                           a_pack, b_pack);
        }
    }
}
