// What train/gpu/comm.c must do, over NCCL on GPUs (test_gpu_comm.cu) and over the stand-ins
// (test_comm.c). Every rank makes these calls and counts wrong elements. The values are small whole
// numbers, so that a sum is exact in any order and in BF16.
#pragma once

#include "../train/gpu/comm.h"

#include <stdlib.h>
#include <string.h>

static inline int sample_value(int rank, int64_t i) {
    return (int)((i * 7 + rank * 3) % 4);
}

// The sum over the ranks, or the maximum.
static inline int sample_reduced(int ranks, CommOp op, int64_t i) {
    int all = 0;
    for (int r = 0; r < ranks; r++) {
        int x = sample_value(r, i);
        all = op == COMM_SUM ? all + x : (x > all ? x : all);
    }
    return all;
}

static const int comm_type_bytes[] = {4, 2, 8, 4, 1}; // in the order of CommType

// Stores a small whole number as an element of a type.
static inline void put_element(void *array, CommType type, int64_t i, int value) {
    char *to = (char *)array + i * comm_type_bytes[type];
    float f = (float)value;
    double d = value;
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    uint16_t bf16 = (uint16_t)(bits >> 16);
    uint8_t byte = (uint8_t)value;
    switch (type) {
    case COMM_F32:
    case COMM_U32: memcpy(to, &f, sizeof(f)); break;
    case COMM_F64: memcpy(to, &d, sizeof(d)); break;
    case COMM_BF16: memcpy(to, &bf16, sizeof(bf16)); break;
    case COMM_U8: memcpy(to, &byte, sizeof(byte)); break;
    }
}

typedef struct {
    Comm *comm;
    CommType type;
    int64_t count;
    char *host, *expected, *device; // [count]
    size_t bytes;
} Array;

enum { COMM_CHECK_SLOTS = 4, JOINED };

// This rank's values, and the expected result of their reduction.
static inline Array array_open(Comm *c, CommType type, CommOp op, int64_t count) {
    Array a;
    a.comm = c;
    a.type = type;
    a.count = count;
    a.bytes = (size_t)count * (size_t)comm_type_bytes[type];
    a.host = (char *)malloc(a.bytes);
    a.expected = (char *)malloc(a.bytes);
    for (int64_t i = 0; i < count; i++) {
        put_element(a.host, type, i, sample_value(c->rank, i));
        put_element(a.expected, type, i, sample_reduced(c->ranks, op, i));
    }
    cudaMalloc((void **)&a.device, a.bytes);
    return a;
}

static inline void array_send(Array *a) {
    cudaMemcpyAsync(a->device, a->host, a->bytes, cudaMemcpyHostToDevice, a->comm->gpu->stream);
    cudaStreamSynchronize(a->comm->gpu->stream); // the host memory is reused
}

// Completes what comm_begin has begun, if it has begun anything. Returns whether any of the
// elements begin..end is wrong.
static inline int array_is_wrong(Array *a, int slot, int64_t begin, int64_t end) {
    size_t from = (size_t)(begin * comm_type_bytes[a->type]);
    size_t bytes = (size_t)(end - begin) * (size_t)comm_type_bytes[a->type];
    if (slot != JOINED) {
        comm_end(a->comm, slot);
        comm_wait(a->comm, slot);
    }
    cudaMemcpyAsync(a->host, a->device, a->bytes, cudaMemcpyDeviceToHost, a->comm->gpu->stream);
    cudaStreamSynchronize(a->comm->gpu->stream);
    return memcmp(a->host + from, a->expected + from, bytes) != 0;
}

static inline void array_close(Array *a) {
    free(a->host);
    free(a->expected);
    cudaFree(a->device);
}

static inline int check_all_reduce(Comm *c, CommType type, CommOp op, int64_t count) {
    Array a = array_open(c, type, op, count);
    array_send(&a);
    comm_begin(c);
    comm_all_reduce(c, a.device, type, op, count);
    int wrong = array_is_wrong(&a, 0, 0, count);
    array_close(&a);
    return wrong;
}

// After the reduce-scatter a rank's own part has the sum; after the all-gather every part has it.
static inline int check_scatter_and_gather(Comm *c, CommType type, int64_t part) {
    int64_t count = part * c->ranks, own = part * c->rank;
    Array a = array_open(c, type, COMM_SUM, count);
    array_send(&a);
    comm_begin(c);
    comm_reduce_scatter(c, a.device, type, part);
    int wrong = array_is_wrong(&a, 1, own, own + part);
    comm_begin(c);
    comm_all_gather(c, a.device, type, part);
    wrong += array_is_wrong(&a, 2, 0, count);
    array_close(&a);
    return wrong;
}

// Gathers codes, and other data with them, in one launch.
static inline int check_grouped_gathers(Comm *c, int64_t part) {
    Array codes = array_open(c, COMM_U8, COMM_SUM, part * c->ranks);
    Array copies = array_open(c, COMM_BF16, COMM_SUM, 3 * part * c->ranks);
    for (int64_t i = 0; i < copies.count; i++) {
        bool own = i / (3 * part) == c->rank;
        put_element(copies.expected, COMM_BF16, i, sample_value(1, i));
        put_element(copies.host, COMM_BF16, i, own ? sample_value(1, i) : 99);
    }
    for (int64_t i = 0; i < codes.count; i++) {
        codes.expected[i] = (char)(i * 11);
        codes.host[i] = (char)(i / part == c->rank ? i * 11 : 99);
    }
    array_send(&codes);
    array_send(&copies);
    comm_begin(c);
    comm_all_gather(c, codes.device, COMM_U8, part);
    comm_all_gather(c, copies.device, COMM_BF16, 3 * part);
    comm_end(c, 3);
    comm_join(c);
    int wrong = array_is_wrong(&codes, JOINED, 0, codes.count);
    wrong += array_is_wrong(&copies, JOINED, 0, copies.count);
    array_close(&codes);
    array_close(&copies);
    return wrong;
}

// Every rank sends pieces to the next rank, and one more piece to the last rank, in one launch;
// then they come back. The moved pieces must arrive, and nothing else may change.
static inline int check_moves(Comm *c, CommType type, int64_t piece) {
    int ranks = c->ranks, last = ranks - 1, wrong = 0;
    Array a = array_open(c, type, COMM_SUM, 2 * piece * ranks);
    for (int64_t i = 0; i < a.count; i++) { // of rank i / 2 pieces: a ring's and the last rank's
        int owner = (int)(i / (2 * piece)), next = (owner + 1) % ranks;
        bool ring = i / piece % 2 == 0;
        bool moved = ring ? c->rank == next : c->rank == last;
        put_element(a.host, type, i, sample_value(c->rank, i));
        put_element(a.expected, type, i, sample_value(moved ? owner : c->rank, i));
    }
    for (int back = 0; back < 2; back++) {
        for (int64_t i = 0; i < a.count && back; i++) { // what is gone from here comes back
            bool here = i / piece % 2 == 0 ? ranks == 1 : c->rank == last;
            if (i / (2 * piece) == c->rank && !here) { put_element(a.host, type, i, 99); }
        }
        array_send(&a);
        comm_begin(c);
        for (int r = 0; r < ranks; r++) {
            char *at = a.device + 2 * r * piece * comm_type_bytes[type];
            int next = (r + 1) % ranks;
            comm_send(c, at, type, piece, back ? next : r, back ? r : next);
            comm_send(c, at + piece * comm_type_bytes[type], type, piece, back ? last : r,
                      back ? r : last);
        }
        wrong += array_is_wrong(&a, 0, 0, a.count);
    }
    array_close(&a);
    return wrong;
}

// The maximum by bits: NaN is above infinity, and infinity above all numbers.
static inline int check_amax(Comm *c) {
    static const uint32_t not_a_number = 0x7fc00000, infinite = 0x7f800000;
    Array a = array_open(c, COMM_U32, COMM_MAX, 4);
    uint32_t *host = (uint32_t *)(void *)a.host, *expected = (uint32_t *)(void *)a.expected;
    for (int i = 0; i < 4; i++) { put_element(a.host, COMM_U32, i, c->rank); }
    for (int i = 0; i < 4; i++) { put_element(a.expected, COMM_U32, i, c->ranks - 1); }
    if (c->rank == 0) { host[1] = infinite, host[2] = not_a_number; }
    if (c->rank == c->ranks - 1) { host[2] = c->ranks == 1 ? not_a_number : infinite; }
    expected[1] = infinite, expected[2] = not_a_number;
    array_send(&a);
    comm_begin(c);
    comm_all_reduce(c, a.device, COMM_U32, COMM_MAX, 4);
    int wrong = array_is_wrong(&a, 0, 0, 4);
    array_close(&a);
    return wrong;
}

static inline int check_collectives(Comm *c) {
    static const int64_t counts[] = {1, 64, 100000};
    int wrong = check_amax(c);
    for (int i = 0; i < 3; i++) {
        wrong += check_all_reduce(c, COMM_F32, COMM_SUM, counts[i]);
        wrong += check_all_reduce(c, COMM_F64, COMM_SUM, counts[i]);
        wrong += check_all_reduce(c, COMM_BF16, COMM_SUM, counts[i]);
        wrong += check_all_reduce(c, COMM_U32, COMM_MAX, counts[i]);
        wrong += check_scatter_and_gather(c, COMM_F32, counts[i]);
        wrong += check_scatter_and_gather(c, COMM_BF16, counts[i]);
        wrong += check_grouped_gathers(c, counts[i]);
        wrong += check_moves(c, COMM_BF16, counts[i]);
        wrong += check_moves(c, COMM_F32, counts[i]);
    }
    return wrong;
}
