#include "muon.h"
#include "../../kernels/cpu.h"
#include "../../kernels/gemm.h"

#include <stdlib.h>

static int64_t elements_of(const ZeroMatrix *m) {
    return (int64_t)m->rows * m->columns;
}

static int64_t square_of(const ZeroMatrix *m) {
    int64_t side = min64(m->rows, m->columns);
    return side * side;
}

// Returns how many of this rank's matrices, from number `first` on, are computed together.
static int batch_from(const Muon *m, int first) {
    const int64_t most_bytes = (int64_t)512 << 20;
    const ZeroMatrix *own = &m->own[first];
    int64_t bytes = 2 * (elements_of(own) + square_of(own)) * (int64_t)sizeof(Bf16), n = 1;
    while (first + n < m->num_own && own[n].rows == own->rows && own[n].columns == own->columns &&
           (n + 1) * bytes <= most_bytes) {
        n++;
    }
    return (int)n;
}

void muon_plan(Muon *m, const Run *run, const ZeroLayout *zero, Plan *plan) {
    int64_t x = 0, square = 0;
    int most = 0;
    *m = (Muon){.zero = zero, .factor = (float)run->options.muon_extra_scale_factor};
    if (!options_train(&run->options)) { return; }
    m->num_matrices = zero_matrices(zero, &m->matrices);
    m->own = calloc_or_die((size_t)m->num_matrices, sizeof(ZeroMatrix));
    for (int i = 0; i < m->num_matrices; i++) {
        if (m->matrices[i].owner == run->group.rank) { m->own[m->num_own++] = m->matrices[i]; }
    }
    for (int i = 0, n; i < m->num_own; i += n) {
        n = batch_from(m, i);
        most = n > most ? n : most;
        x = max64(x, n * elements_of(&m->own[i]));
        square = max64(square, n * square_of(&m->own[i]));
    }
    plan_section(plan, "optimizer", PHASE_ALWAYS);
    PLAN(plan, "offsets of matrices", m->num_own, m->offsets);
    plan_section(plan, "scratch of the optimizer", PHASE_UPDATE);
    PLAN(plan, "matrices in BF16", x, m->x);
    PLAN(plan, "matrices in BF16", x, m->next);
    PLAN(plan, "their squares", square, m->gram);
    PLAN(plan, "their squares", square, m->polynomial);
    PLAN(plan, "parts of their norms", most * MUON_PARTS, m->partials);
}

void muon_start(Muon *m, Gpu *gpu) {
    FREED int64_t *offsets = calloc_or_die((size_t)m->num_own, sizeof(int64_t));
    for (int i = 0; i < m->num_own; i++) { offsets[i] = m->own[i].sharded_offset; }
    if (m->num_own > 0) {
        gpu_send(gpu, m->offsets, offsets, (size_t)m->num_own * sizeof(int64_t));
    }
}

void muon_free_plan(Muon *m) {
    free(m->matrices);
    free(m->own);
}

// Elements begin..end of the sharded layout, which rank `from` sends to rank `to`.
typedef struct {
    int64_t begin, end;
    int from, to;
} Move;

// Returns the move of rank `rank`'s part of a matrix to the owner, or from the owner back. If the
// rank has no part of it, the move's `begin` is not below its `end`.
static Move move_of(const ZeroLayout *z, const ZeroMatrix *matrix, int rank, bool back) {
    const ZeroSegment *s = &z->segments[matrix->segment];
    int64_t begin = s->begin + rank * s->part;
    return (Move){max64(matrix->sharded_offset, begin),
                  min64(matrix->sharded_offset + elements_of(matrix), begin + s->part),
                  back ? matrix->owner : rank, back ? rank : matrix->owner};
}

void muon_print(const Muon *m, GpuType type, FILE *out) {
    double all = 0, most = 0, own = 0;
    int64_t sent = 0;
    char size[32];
    for (int rank = 0; rank < m->zero->ranks; rank++, own = 0) {
        int64_t bytes = 0;
        for (int i = 0; i < m->num_matrices; i++) {
            Move there = move_of(m->zero, &m->matrices[i], rank, false);
            bool moves = there.from != there.to && there.begin < there.end;
            bytes += moves ? (there.end - there.begin) * gpu_type_bytes(type) : 0;
            own += m->matrices[i].owner == rank ? zero_matrix_flops(&m->matrices[i]) : 0;
        }
        sent = max64(sent, bytes);
        all += own;
        most = own > most ? own : most;
    }
    if (m->num_matrices == 0) { return; }
    fprintf(out, "Muon\n  matrices      %d, %.3g TFLOP a step, %.3g on the rank with the most\n",
            m->num_matrices, 1e-12 * all, 1e-12 * most);
    if (m->zero->ranks > 1) {
        fprintf(out,
                "  exchanged     at most %s a rank and step to the matrices' owners, and back\n",
                format_bytes(size, (double)sent));
    }
}

// Sends the parts of all matrices to the matrices' owners, or from the owners back.
static void exchange(const Muon *m, Comm *comm, int slot, char *gradients, GpuType type,
                     bool back) {
    const ZeroLayout *z = m->zero;
    comm_begin(comm);
    for (const ZeroMatrix *matrix = m->matrices; matrix < m->matrices + m->num_matrices; matrix++) {
        const ZeroSegment *s = &z->segments[matrix->segment];
        int rank = (int)((matrix->sharded_offset - s->begin) / s->part);
        for (Move v = move_of(z, matrix, rank, back); rank < z->ranks && v.begin < v.end;
             v = move_of(z, matrix, ++rank, back)) {
            comm_send(comm, gradients + v.begin * gpu_type_bytes(type), (CommType)type,
                      v.end - v.begin, v.from, v.to);
        }
    }
    comm_end(comm, slot);
    comm_wait(comm, slot);
}

// Takes the MUON_STEPS Newton-Schulz steps for the n matrices in m->x, which have one shape.
// Returns where the result is: m->x or m->next.
static Bf16 *newton_schulz(const Muon *m, Gpu *gpu, const ZeroMatrix *shape, int n) {
    bool tall = shape->rows > shape->columns;
    int side = tall ? shape->columns : shape->rows;
    float scale = muon_scale(m->factor, shape->rows, shape->columns);
    Bf16 *x = m->x, *next = m->next;
    for (int step = 0; step < MUON_STEPS; step++) {
        float last = step + 1 < MUON_STEPS ? 1.0f : scale;
        // G = X X' or X' X, the smaller one; P = b G + c G G; X = a X + P X, or a X + X P
        Gemm gram = gemm_plain(side, side, tall ? shape->rows : shape->columns, x, x, m->gram);
        Gemm polynomial = gemm_plain(side, side, side, m->gram, m->gram, m->polynomial);
        Gemm result = gemm_plain(shape->rows, shape->columns, side, tall ? x : m->polynomial,
                                 tall ? m->polynomial : x, next);
        gram.trans_a = tall;
        gram.trans_b = !tall;
        polynomial.alpha = MUON_C;
        polynomial.beta = MUON_B;
        polynomial.c = m->gram;
        result.alpha = last;
        result.beta = last * MUON_A;
        result.c = x;
        gram.family = polynomial.family = result.family = FAMILY_OPTIMIZER;
        gram.batch = polynomial.batch = result.batch = n;
        gemm(gpu, gram);
        gemm(gpu, polynomial);
        gemm(gpu, result);
        Bf16 *before = x;
        x = next;
        next = before;
    }
    return x;
}

void muon_orthogonalize_all(const Muon *m, Gpu *gpu, Comm *comm, int slot, void *gradients,
                            GpuType type) {
    if (m->num_matrices == 0) { return; }
    exchange(m, comm, slot, gradients, type, false);
    for (int i = 0, n; i < m->num_own; i += n) {
        n = batch_from(m, i);
        MuonMatrices matrices = {gradients, type, m->offsets + i, n, elements_of(&m->own[i])};
        gpu_muon_normalize(gpu, m->x, m->partials, matrices);
        gpu_muon_store(gpu, matrices, newton_schulz(m, gpu, &m->own[i], n));
    }
    exchange(m, comm, slot, gradients, type, true);
}
