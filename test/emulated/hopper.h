// kernels/hopper.cuh with its instructions in C++, on machine.h. To be included before a kernel's
// source, whose own #include "hopper.cuh" then does nothing.
#pragma once

#include "../../kernels/hopper.cuh"

#define __CUDA_ARCH_FEAT_SM90_ALL 1

// ---- barriers -----------------------------------------------------------------------------------

#define barrier_init(b, arrivals) make_barrier(#b, b, arrivals)
inline void make_barrier(const char *name, Barrier *b, int arrivals) {
    machine.block->barriers[machine.shared_offset(b, 8)] = {name, arrivals, arrivals, 0, 0};
}

inline void barriers_ready(void) {
}

inline void barrier_arrive_at(Block &block, Barrier *b) {
    Mbarrier &m = machine.barrier(block, b);
    m.pending -= machine.plants("two arrivals", m.name) ? 2 : 1;
    machine.settle(m);
    machine.pause();
}

inline void barrier_arrive(Barrier *b, bool arrives) {
    if (arrives) { barrier_arrive_at(*machine.block, b); }
}

inline void barrier_arrive_in(Barrier *b, uint32_t block) {
    barrier_arrive_at(machine.cluster[block], b);
}

inline void cluster_barrier(void) {
    const int threads = (int)machine.cluster.size() * (int)blockDim.x;
    if (machine.plants("left out", "the cluster's barrier")) { return; }
    machine.arrive(machine.whole_cluster, threads, true, "the cluster's barrier", [] {});
}

inline void barrier_expect(Barrier *b, int bytes) {
    Mbarrier &m = machine.barrier(*machine.block, b);
    m.bytes += bytes + (machine.plants("too many bytes", m.name) ? 16 : 0);
    barrier_arrive(b, true);
}

inline void barrier_wait(Barrier *b, uint32_t phase) {
    Mbarrier &m = machine.barrier(*machine.block, b);
    if (machine.plants("no wait", m.name)) { return; }
    while ((m.phases & 1) == (phase & 1)) { machine.wait(m.phases, m.name); }
    const int64_t further = m.phases - (int64_t)phase; // phase 0 or, for what is free at first, 1
    if (further != 1 && further != -1) {
        machine.report("%s is %d phases on", m.name, (int)further);
    }
}

inline void turn_wait(int w) {
    bar(TURN_BARRIERS + w, 2 * GROUP, true);
}

inline void turn_pass(int w) {
    bar(TURN_BARRIERS + 1 - w, 2 * GROUP, false);
}

template <int TO, bool MORE> void set_registers(void) {
    static_assert(TO % 8 == 0 && TO >= 24 && TO <= 256, "setmaxnreg");
    Block &block = *machine.block;
    Warp &warp = machine.warp();
    const int to = TO + (MORE && machine.plants("too many", "registers") ? 8 : 0);
    machine.together("setmaxnreg");
    if (threadIdx.x % LANES == 0) {
        const int more = (to - warp.registers) * LANES;
        if (MORE != (more > 0)) { machine.report("setmaxnreg from %d", warp.registers); }
        while (block.free_registers < more) { machine.wait(block.registers_freed, "setmaxnreg"); }
        block.free_registers -= more;
        block.registers_freed += more < 0;
        warp.registers = to;
    }
    machine.together("setmaxnreg");
}

// ---- TMA ----------------------------------------------------------------------------------------

inline size_t swizzled(size_t at, int row) {
    return at ^ (at >> 7 & (size_t)(row / 16 - 1)) << 4;
}

typedef std::array<int, 5> Coordinates;

// Copies a box to shared memory, or from there. Beyond the tensor all is 0, and nothing is written.
inline void copy_box(Block &block, size_t shared, const CUtensorMap &map, Coordinates first,
                     bool loads) {
    const int64_t row_bytes = map.box[0] * map.bytes;
    const int64_t rows = map.box[1] * (map.rank > 2 ? map.box[2] : 1) *
                         (map.rank > 3 ? map.box[3] : 1) * (map.rank > 4 ? map.box[4] : 1);
    for (int64_t row = 0; row < rows; row++) {
        uint8_t *from = map.data;
        bool inside = true;
        int64_t rest = row;
        for (int i = 1; i < map.rank; i++) {
            const int64_t at = first[i] + rest % map.box[i];
            inside = inside && at >= 0 && at < map.sizes[i];
            from += at * map.strides[i];
            rest /= map.box[i];
        }
        for (int64_t i = 0; i < row_bytes; i += map.bytes) {
            const int64_t at = first[0] + i / map.bytes;
            const size_t offset = shared + (size_t)(row * row_bytes + i);
            uint8_t *element = block.shared(swizzled(offset, map.swizzle));
            if (!inside || at < 0 || at >= map.sizes[0]) {
                if (loads) { memset(element, 0, (size_t)map.bytes); }
            } else if (loads) {
                memcpy(element, from + at * map.bytes, (size_t)map.bytes);
            } else {
                memcpy(from + at * map.bytes, element, (size_t)map.bytes);
            }
        }
    }
}

inline int64_t box_bytes(const CUtensorMap &map) {
    int64_t bytes = map.bytes;
    for (int i = 0; i < map.rank; i++) { bytes *= map.box[i]; }
    return bytes;
}

// Until the load is done, the destination holds NaN.
inline void load_box(Block &block, void *to, const CUtensorMap &map, Barrier *full,
                     Coordinates first) {
    const size_t at = machine.shared_offset(to, 8 * (size_t)map.swizzle);
    Mbarrier &m = machine.barrier(block, full);
    memset(block.shared(at), 0xff, (size_t)box_bytes(map));
    machine.loads.open.push_back([&block, at, map, &m, first] {
        copy_box(block, at, map, first, true);
        m.bytes -= box_bytes(map);
        machine.settle(m);
    });
    machine.loads.commit();
}

inline void store_box(const CUtensorMap &map, const void *from, Coordinates first) {
    Block &block = *machine.block;
    const size_t at = machine.shared_offset(from, 8 * (size_t)map.swizzle);
    machine.thread->stores.open.push_back(
        [&block, at, map, first] { copy_box(block, at, map, first, false); });
}

template <int RANK> Coordinates first_and_last(int first, int last) {
    Coordinates all = {first};
    all[RANK - 1] = last;
    return all;
}

template <int RANK>
void tma_load(void *to, const CUtensorMap &map, Barrier *full, int first, int last) {
    load_box(*machine.block, to, map, full, first_and_last<RANK>(first, last));
}

inline void tma_load_both(void *to, const CUtensorMap &map, Barrier *full, int first, int last) {
    for (Block &block : machine.cluster) {
        load_box(block, to, map, full, first_and_last<5>(first, last));
    }
}

inline void tma_load_at(void *to, const CUtensorMap &map, Barrier *full, int x, int y, int z) {
    load_box(*machine.block, to, map, full, {x, y, z});
}

inline void tma_store_at(const CUtensorMap &map, const void *from, int x, int y, int z) {
    store_box(map, from, {x, y, z});
}

template <int RANK> void tma_store(const CUtensorMap &map, const void *from, int first, int last) {
    store_box(map, from, first_and_last<RANK>(first, last));
}

// A planted fault of a wait: it leaves a group more.
inline size_t leaves_more(const char *what, int left) {
    return machine.plants("leaves one more", (what + std::to_string(left)).c_str()) ? 1 : 0;
}

inline void stores_commit(void) {
    machine.thread->stores.commit();
    machine.pause();
}

template <int LEFT> void stores_wait_read(void) {
    machine.thread->stores.finish(LEFT + leaves_more("stores", LEFT));
}

inline void stores_wait(void) {
    if (!machine.plants("left out", "stores_wait")) { machine.thread->stores.finish(0); }
}

inline void show_to_tma(void) {
    if (machine.plants("left out", "show_to_tma")) { return; }
    for (auto &[at, bytes] : machine.thread->hidden) {
        memcpy(machine.block->shared(at), bytes.data(), bytes.size());
    }
    machine.thread->hidden.clear();
}

// ---- matrices in shared memory ------------------------------------------------------------------

struct MatrixRow {
    size_t at; // offset of the row whose address the lane gives
    uint32_t *units;
};

inline MatrixRow matrix_row(const void *row, uint32_t *units, const char *instruction) {
    const size_t at = machine.shared_offset(row, 16);
    const bool faulty = machine.plants("a wrong bit", instruction);
    return {faulty ? at ^ (at >> 7 & 4) << 4 : at, units};
}

// Until show_to_tma the row holds NaN.
template <bool TRANSPOSED> void store_matrices(void *row, const uint32_t (&units)[4]) {
    uint32_t copy[4] = {units[0], units[1], units[2], units[3]};
    MatrixRow mine = matrix_row(row, copy, "stmatrix");
    machine.together("stmatrix", mine, [](auto lane) {
        auto first = machine.block->threads.begin() + threadIdx.x / LANES * LANES;
        for (int i = 0; i < LANES; i++) {
            std::array<uint8_t, 16> bytes;
            for (int c = 0; c < 8; c++) {
                // element of the matrix
                const int r = i % 8, from = TRANSPOSED ? c * 8 + r : r * 8 + c;
                const uint32_t unit = lane(from / 2).units[i / 8] >> from % 2 * 16;
                memcpy(&bytes[(size_t)c * 2], &unit, 2);
            }
            memset(machine.block->shared(lane(i).at), 0xff, bytes.size());
            first[i]->hidden.push_back({lane(i).at, bytes});
        }
    });
}

inline void load_matrices(uint32_t *units, const void *row) {
    MatrixRow mine = matrix_row(row, units, "ldmatrix");
    machine.together("ldmatrix", mine, [](auto lane) {
        for (int i = 0; i < LANES; i++) {
            const uint8_t *from = machine.block->shared(lane(i).at);
            for (int t = 0; t < 4; t++) {
                memcpy(&lane(i % 8 * 4 + t).units[i / 8], from + t * 4, 4);
            }
        }
    });
}

inline void prefetch(const void *) {
}

// ---- WGMMA --------------------------------------------------------------------------------------

inline uint64_t wgmma_operand(const void *tile) {
    return machine.shared_offset(tile, 1024) / 16;
}

inline uint64_t wgmma_transposed(const void *tile) {
    return wgmma_operand(tile);
}

// A lane's part of an instruction, of which a warp has 16 rows.
struct Matmul {
    float *sums;
    const uint32_t *registers; // A; NULL: it is in shared memory
    uint64_t a, b;
    int columns;
    GpuType type_a, type_b;
    bool transposed_a, transposed_b, adds;
};

// The values of FP8 codes: E4M3's, then E5M2's.
inline const std::array<float, 512> fp8_values = [] {
    std::array<float, 512> all;
    for (size_t i = 0; i < all.size(); i++) {
        all[i] = fp8_decode((uint8_t)i, i < 256 ? FP8_E4M3 : FP8_E5M2);
    }
    return all;
}();

typedef float Rows[32][256]; // [k][row] of an operand

// Rows first, first + 1 ... of an operand in shared memory, of which 16 bytes lie together.
inline void read_operand(Rows &rows, Block &block, uint64_t where, GpuType type, bool transposed,
                         int first, int count) {
    const int bytes = gpu_type_bytes(type), depth = 32 / bytes, unit = 16 / bytes;
    const float *values = &fp8_values[type == TYPE_E5M2 ? 256 : 0];
    for (int i = 0; i < count * depth; i += unit) {
        const int row = transposed ? i % count : i / depth, k = transposed ? i / count : i % depth;
        const int at = transposed ? k * FULL_ROW + (first + row) * bytes
                                  : (first + row) * FULL_ROW + k * bytes;
        const uint8_t *x = block.shared(swizzled(where * 16 + (size_t)at, FULL_ROW));
        float *to = &rows[k][row];
        const size_t step = transposed ? 1 : sizeof(rows[0]) / sizeof(float);
        for (int j = 0; j < unit; j++, x += bytes, to += step) {
            *to = type == TYPE_BF16 ? bf16_decode((uint16_t)(x[0] | x[1] << 8)) : values[*x];
        }
    }
}

// lanes: all of the warp's; first: its rows in A.
inline void multiply_lanes(Block &block, const std::array<Matmul, LANES> &lanes, int first) {
    const Matmul &p = lanes[0];
    const int depth = 32 / gpu_type_bytes(p.type_a);
    float sums[16][256] = {};
    Rows a, b;
    read_operand(b, block, p.b, p.type_b, p.transposed_b, 0, p.columns);
    if (p.registers == NULL) { read_operand(a, block, p.a, p.type_a, p.transposed_a, first, 16); }
    for (int i = 0; i < 16 * depth && p.registers != NULL; i++) {
        // two columns of rows g and g + 8; then 8 columns further
        const int row = i % 16, k = i / 16;
        const uint32_t *from = lanes[(size_t)(row % 8 * 4 + k % 8 / 2)].registers;
        a[k][row] = bf16_decode((uint16_t)(from[row / 8 + k / 8 * 2] >> k % 2 * 16));
    }
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < depth; k++) {
#pragma omp simd
            for (int n = 0; n < p.columns; n++) { sums[row][n] += a[k][row] * b[k][n]; }
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        for (int i = 0; i < p.columns / 2; i++) {
            const float sum = sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
            float &d = lanes[(size_t)lane].sums[i];
            d = p.adds ? d + sum : sum;
        }
    }
}

inline void issue(Matmul matmul) {
    machine.together("WGMMA", matmul, [](auto lane) {
        Warp &warp = machine.warp();
        Block &block = *machine.block;
        const int first = (int)threadIdx.x / LANES % WARPS * 16;
        std::array<Matmul, LANES> lanes;
        for (int i = 0; i < LANES; i++) {
            lanes[(size_t)i] = lane(i);
            const bool same = lane(i).a == lane(0).a && lane(i).b == lane(0).b;
            if (!same || lane(i).adds != lane(0).adds) { machine.report("WGMMA: lanes differ"); }
        }
        if (!warp.fenced) { machine.report("WGMMA without its fence"); }
        warp.matmuls.open.push_back([=, &block] { multiply_lanes(block, lanes, first); });
    });
}

template <Fp8Type TYPE_A> void wgmma(float (&d)[64], uint64_t a, uint64_t b, bool adds) {
    const GpuType type = TYPE_A == FP8_E4M3 ? TYPE_E4M3 : TYPE_E5M2;
    issue({d, NULL, a, b, 128, type, TYPE_E4M3, false, false, adds});
}

inline void wgmma(float (&d)[128], uint64_t a, uint64_t b, bool adds) {
    issue({d, NULL, a, b, 256, TYPE_E4M3, TYPE_E4M3, false, false, adds});
}

template <bool TRANSPOSED_A, bool TRANSPOSED_B>
void wgmma(float (&d)[32], uint64_t a, uint64_t b, bool adds) {
    issue({d, NULL, a, b, 64, TYPE_BF16, TYPE_BF16, TRANSPOSED_A, TRANSPOSED_B, adds});
}

template <bool TRANSPOSED_B> void wgmma(float (&d)[32], const uint32_t *a, uint64_t b, bool adds) {
    issue({d, a, 0, b, 64, TYPE_BF16, TYPE_BF16, false, TRANSPOSED_B, adds});
}

inline void wgmma_fence(void) {
    machine.together("wgmma.fence");
    machine.warp().fenced = machine.warp().fenced || !machine.plants("left out", "wgmma_fence");
}

inline void wgmma_commit(void) {
    machine.together("a commit of WGMMAs");
    if (threadIdx.x % LANES == 0) { machine.warp().matmuls.commit(); }
}

template <int LEFT> void wgmma_wait(void) {
    const size_t left = LEFT + leaves_more("WGMMAs", LEFT);
    machine.together("a wait for WGMMAs");
    machine.warp().matmuls.finish(left);
    machine.warp().fenced = false; // the program may use the registers now
}

// The compiler knows no WGMMA here: what one writes is memory.
template <typename T, int N> void pin(T (&)[N]) {
}
template <int N> void hold(const uint32_t (&)[N]) {
}
