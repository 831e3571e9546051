// What the GPU tests share: device buffers that start poisoned and end in a guard zone, random BF16
// data, and the rule by which a kernel is judged: its error against the FP32 definition may be at
// most k times the error of rounding the definition's result to BF16. And the rows of the table of
// launchers: a row checks at small shapes and times, with the same launches, at those of models.
#pragma once

#include "../base/rng.h"
#include "../kernels/cpu.h"
#include "../kernels/kernels.h"
#include "test.h"

#include <algorithm>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

typedef std::vector<float> Floats;
typedef std::vector<int> Ints;
typedef std::vector<uint8_t> Codes;

static Gpu gpu;

// What the rows of the table do.
typedef enum {
    CHECKING, // compare a launcher with its definition, at small and odd shapes
    TIMING,   // time it at the shapes of models
    IN_PARTS  // more than 2^31 elements: compare the whole with its parts
} Mode;
static Mode mode = CHECKING;

// Whether this runs under compute-sanitizer (LLM8_SANITIZING names the tool). That is slow, so
// larger shapes and the libraries' own kernels are left out.
static inline bool sanitizing(void) {
    return getenv("LLM8_SANITIZING") != NULL;
}

static inline bool sanitizing_by(const char *tool) {
    return sanitizing() && strcmp(getenv("LLM8_SANITIZING"), tool) == 0;
}

// A device buffer, filled with 0xff (NaN as BF16 and as FP32) when it is made, unless initcheck
// looks for what is read before it is written. What follows it must not be written:
// compute-sanitizer does not see that where buffers share an allocation.
template <typename T> struct Buffer {
    enum { GUARD = 4096, GUARD_BYTE = 0xa5 };
    T *data = nullptr;
    size_t count;

    explicit Buffer(size_t n) : count(n) {
        CUDA_CHECK(cudaMalloc((void **)&data, n * sizeof(T) + GUARD));
        CUDA_CHECK(cudaMemsetAsync(data + n, GUARD_BYTE, GUARD, gpu.stream));
        if (!sanitizing_by("initcheck")) { poison(); }
    }
    ~Buffer() {
        std::vector<uint8_t> zone(GUARD);
        gpu_read(&gpu, zone.data(), data + count, GUARD);
        size_t intact = 0;
        while (intact < GUARD && zone[intact] == GUARD_BYTE) { intact++; }
        if (intact < GUARD) {
            test_fail(__FILE__, __LINE__, "byte %zu after a buffer of %zu was written", intact,
                      count * sizeof(T));
        }
        CUDA_CHECK(cudaFree(data));
    }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    void poison() {
        CUDA_CHECK(cudaMemsetAsync(data, 0xff, count * sizeof(T), gpu.stream));
    }
    void put(const T *host) {
        gpu_send(&gpu, data, host, count * sizeof(T));
    }
    std::vector<T> get() const {
        std::vector<T> host(count);
        gpu_read(&gpu, host.data(), data, count * sizeof(T));
        return host;
    }
};

typedef Buffer<Bf16> Bf16Buffer;
typedef Buffer<float> FloatBuffer;

static inline std::vector<Bf16> bf16_codes(const Floats &x) {
    std::vector<Bf16> codes(x.size());
#pragma omp parallel for if (x.size() > 1 << 20)
    for (size_t i = 0; i < x.size(); i++) { codes[i] = bf16_encode(x[i]); }
    return codes;
}

static inline void put_floats(Bf16Buffer &buffer, const Floats &x) {
    buffer.put(bf16_codes(x).data());
}

// n BF16 values from the device.
static inline Floats fetch_floats(const Bf16 *data, size_t n) {
    std::vector<Bf16> codes(n);
    Floats x(n);
    gpu_read(&gpu, codes.data(), data, n * sizeof(Bf16));
    for (size_t i = 0; i < n; i++) { x[i] = bf16_decode(codes[i]); }
    return x;
}

static inline Floats get_floats(const Bf16Buffer &buffer) {
    return fetch_floats(buffer.data, buffer.count);
}

// Floats as values of a type, FP32 or BF16; and back.
static inline std::vector<char> encoded(const Floats &x, GpuType type) {
    std::vector<Bf16> codes = bf16_codes(x);
    const char *begin = type == TYPE_F32 ? (const char *)x.data() : (const char *)codes.data();
    return std::vector<char>(begin, begin + x.size() * (size_t)gpu_type_bytes(type));
}

static inline Floats decoded(const std::vector<char> &bytes, GpuType type) {
    Floats x(bytes.size() / (size_t)gpu_type_bytes(type));
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = type == TYPE_F32 ? ((const float *)bytes.data())[i]
                                : bf16_decode(((const Bf16 *)bytes.data())[i]);
    }
    return x;
}

// Values of a type on the device.
struct Typed : Buffer<char> {
    GpuType type;

    Typed(size_t n, GpuType t) : Buffer<char>(n * (size_t)gpu_type_bytes(t)), type(t) {
    }
    void write(const Floats &x) {
        put(encoded(x, type).data());
    }
    Floats read() const {
        return decoded(get(), type);
    }
};

// A step's input from the host, on the device.
struct InputBuffer : Buffer<StepInput> {
    InputBuffer(double lr, int64_t step) : Buffer<StepInput>(1) {
        StepInput input = {lr, step, 0.0};
        put(&input);
    }
};

// An update by FP32 moments and BF16 gradients; the tests set its other fields.
static inline AdamWUpdate plain_update(Bf16 *gradients) {
    AdamWUpdate u = {};
    u.gradients = gradients;
    u.gradient_type = TYPE_BF16;
    u.beta1 = 0.9f;
    u.beta2 = 0.95f;
    u.eps = 1e-8f;
    return u; // moments: TYPE_F32
}

// The address of element i of an array; NULL where the array is NULL.
static inline void *element_of(void *array, GpuType type, int64_t i) {
    return array != NULL ? (char *)array + i * gpu_type_bytes(type) : NULL;
}

// Where an update's segment has its state, in arrays from index `first` on. scales: of 8-bit
// moments.
static inline void set_state(AdamWSegment &s, const AdamWUpdate &u, int64_t first, float *master,
                             void *exp_avg, void *exp_avg_sq, Bf16 *const scales[2] = NULL) {
    if (u.moment_type == TYPE_MOMENT8) {
        s.exp_avg_scales = scales[0] + first / MOMENT_BLOCK;
        s.exp_avg_sq_scales = scales[1] + first / MOMENT_BLOCK;
    }
    s.master = (float *)element_of(master, TYPE_F32, first);
    s.exp_avg = element_of(exp_avg, u.moment_type, first);
    s.exp_avg_sq = element_of(exp_avg_sq, u.moment_type, first);
}

// An update's segments on the device; their blocks are numbered here.
struct Segments : Buffer<AdamWSegment> {
    Segments(AdamWUpdate &u, std::vector<AdamWSegment> list) : Buffer<AdamWSegment>(list.size()) {
        for (AdamWSegment &s : list) {
            s.first_block = u.segment_blocks;
            u.segment_blocks += gpu_adamw_blocks(s.n);
        }
        put(list.data());
        u.segments = data;
        u.segment_count = (int)count;
    }
};

// Exactly as much scratch as sums over M rows need.
struct SumScratch : FloatBuffer {
    SumScratch(int64_t M, int64_t columns)
        : FloatBuffer(partial_sums_bytes(M, columns) / sizeof(float)) {
    }
    Scratch scratch() const {
        return {data, count * sizeof(float)};
    }
};

// Whether racecheck would report a race where there is none. Once groups of a block's threads have
// used barriers of their own, one group more often than another, racecheck ignores later barriers
// of the block: a kernel of ten lines shows that. The kernels of norm.cu do so where rows do not
// divide evenly over their groups, which are 4, 3, 2 or 1, depending on the width.
static inline bool misleads_racecheck(int M, int C) {
    int even = C <= 1024 ? 4 * 32 : C <= 2048 ? 6 * 32 : 1;
    return sanitizing_by("racecheck") && M % even != 0;
}

// The stand-ins for kernels (test/standin) are slow, too, and refuse nothing.
static inline bool on_stand_ins(void) {
    return strcmp(gpu.name, "stand-in") == 0;
}

static inline bool left_out(int64_t elements) {
    bool slow = sanitizing() ? elements > 1 << 18 : on_stand_ins() && elements > 1 << 16;
    return slow && mode == CHECKING;
}

#define LIBRARY_TEST(name) TEST_HEAD(name, if (!sanitizing()) test_add(#name, name))

// To BF16.
static inline Floats rounded(Floats x) {
    round_to_bf16(x.data(), x.data(), (int64_t)x.size());
    return x;
}

static uint64_t random_key = 1;

// Normally distributed values that BF16 holds exactly; each call gives other values.
static inline Floats random_bf16(size_t n, float scale) {
    Floats x(n);
    random_key++;
#pragma omp parallel for if (n > 1 << 20)
    for (size_t i = 0; i < n; i++) { x[i] = scale * rng_normal(random_key, i); }
    return rounded(x);
}

// Values are not all different where rows are timed or beyond 2^31 elements: these many are
// repeated. A prime: a wrong address, 2^31 or 2^32 elements away, has other values.
enum { PERIOD = 1000003 };
static inline size_t period_of(size_t n) {
    return mode == CHECKING || n < PERIOD ? n : (size_t)PERIOD;
}

template <typename T> static void put_repeated(Buffer<T> &buffer, const std::vector<T> &x) {
    gpu_send(&gpu, buffer.data, x.data(), x.size() * sizeof(T));
    for (size_t at = x.size(); at < buffer.count; at += x.size()) {
        CUDA_CHECK(cudaMemcpyAsync(buffer.data + at, buffer.data,
                                   std::min(x.size(), buffer.count - at) * sizeof(T),
                                   cudaMemcpyDeviceToDevice, gpu.stream));
    }
}

// Random BF16 values on the device, and the same on the host.
struct Input {
    Floats host; // the first PERIOD alone, unless the mode is CHECKING
    Bf16Buffer device;

    Input(size_t n, float scale) : host(random_bf16(period_of(n), scale)), device(n) {
        put_repeated(device, bf16_codes(host));
    }
};

// Random codes: of normal values. (With NaN among them the device would draw less power.)
static inline Codes random_codes(size_t n, uint64_t key, float scale, Fp8Type type) {
    Codes x(period_of(n));
    for (size_t i = 0; i < x.size(); i++) { x[i] = fp8_encode(scale * rng_normal(key, i), type); }
    return x;
}

// factor times the sums over p of a(i, p) b(j, p), in FP64: the expected result.
template <typename A, typename B>
static Floats exact_matmul(int m, int n, int k, double factor, A a, B b) {
    Floats d((size_t)m * n);
#pragma omp parallel for
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int p = 0; p < k; p++) { sum += (double)a(i, p) * b(j, p); }
            d[(size_t)i * n + j] = (float)(factor * sum);
        }
    }
    return d;
}

static inline double bf16_rounding_error(const Floats &x) {
    return test_relative_error(rounded(x).data(), x.data(), (int64_t)x.size());
}

template <typename T> static bool same_bits(const std::vector<T> &a, const std::vector<T> &b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

static inline void check_against(const char *what, const Floats &actual, const Floats &expected,
                                 double k, const char *file, int line) {
    double error = test_relative_error(actual.data(), expected.data(), (int64_t)expected.size());
    double allowed = k * bf16_rounding_error(expected);
    if (!(error <= allowed)) {
        test_fail(file, line, "%s: error %.3g, allowed %.3g", what, error, allowed);
    }
}

// BF16 results against the FP32 definition.
#define CHECK_BF16(actual, expected, k) \
    check_against(#actual, actual, expected, k, __FILE__, __LINE__)

// Checks that a launcher refuses its arguments: it dies before it calls CUDA, with a message that
// contains `part`.
template <typename Call> static void check_dies(const char *part, Call call, int line) {
    int ends[2], status;
    char text[512];
    size_t length = 0;
    if (sanitizing() || on_stand_ins()) { return; }
    fflush(stdout);
    if (pipe(ends) != 0) { die("pipe: no file descriptors"); }
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        dup2(ends[1], STDERR_FILENO);
        call();
        _exit(EXIT_SUCCESS);
    }
    close(ends[1]);
    for (ssize_t n = 1; n > 0 && length + 1 < sizeof(text); length += n > 0 ? (size_t)n : 0) {
        n = read(ends[0], text + length, sizeof(text) - 1 - length);
    }
    text[length] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    if (strstr(text, part) == NULL) {
        test_fail(__FILE__, line, "not refused with \"%s\": \"%s\"", part, text);
    }
}

#define CHECK_DIES(part, call) \
    check_dies(                \
        part, [&] { call; }, __LINE__)

// Milliseconds a call takes, the median of a few, over buffers larger than L2.
template <typename Call> static float time_ms(Call call) {
    std::vector<float> times;
    for (int i = 0; i < 13; i++) {
        GpuTimer timer = gpu_timer_begin(&gpu);
        call();
        float ms = gpu_timer_end(&gpu, timer);
        if (i >= 2) { times.push_back(ms); }
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

// ---- the table of launchers --------------------------------------------------------------------

// ROW(name) { row(function, mode, shapes); ... } is a test of a launcher at the shapes of CHECKING,
// and is timed at those of TIMING by
//   build/plain/PROGRAM --time [part of a line's name]
// which prints beside each time its floor: the bytes that must move at 4.3 TB/s, or the operations
// at 800 TFLOP/s in BF16 and twice that in FP8.
#define ROW(name) TEST_HEAD(name, (rows[row_count++] = {#name, name}))
static struct {
    const char *name;
    void (*run)(void);
} rows[32];
static int row_count;
static const char *wanted = "";
static const double BYTES_PER_S = 4.3e12, FLOPS_PER_S = 800e12;

template <typename... A, size_t... I>
static void at_shape(void (*run)(A...), const int *shape, std::index_sequence<I...>) {
    run((A)shape[I]...);
}

template <typename... A, size_t N>
static void row(void (*run)(A...), Mode when, const int (&shapes)[N][sizeof...(A)]) {
    for (const int *shape : shapes) {
        if (mode == when) { at_shape(run, shape, std::index_sequence_for<A...>()); }
    }
}

static inline bool is_wanted(const std::string &name) {
    return name.find(wanted) != std::string::npos;
}

template <typename Call>
static void timed(const std::string &name, const std::string &shape, double floor_s, Call call) {
    if (mode != TIMING || !is_wanted(name)) { return; }
    float ms = time_ms(call);
    printf("%-26s %-26s %8.3f ms %6.1f%% of the floor\n", name.c_str(), shape.c_str(), ms,
           100 * floor_s / (1e-3 * ms));
    fflush(stdout);
}

// Seconds to move these many BF16 elements.
static inline double moved(double elements) {
    return 2 * elements / BYTES_PER_S;
}

PRINTF_LIKE(1, 2) static inline std::string text(const char *format, ...) {
    char out[64];
    va_list args;
    va_start(args, format);
    vsnprintf(out, sizeof(out), format, args);
    va_end(args);
    return out;
}

static inline void run_rows(Mode how) {
    mode = how;
    for (int i = 0; i < row_count; i++) { rows[i].run(); }
    mode = CHECKING;
}

// The main of a program with rows.
static inline int check_or_time(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--time") == 0) {
        if (argc > 2) { wanted = argv[2]; }
        mode = TIMING;
        test_state.setup();
        run_rows(TIMING);
        return test_state.failing ? EXIT_FAILURE : EXIT_SUCCESS;
    }
    for (int i = 0; i < row_count; i++) { test_add(rows[i].name, rows[i].run); }
    return run_tests();
}

// Opens the GPU with workspaces; where there is none, the program ends as one skipped test.
static inline void open_test_gpu(size_t attention_workspace) {
    if (!gpu_open(&gpu, 0)) { test_skip_all(error_text()); }
    gpu.workspace_bytes = GEMM_WORKSPACE_BYTES;
    gpu.attention_bytes = attention_workspace;
    CUDA_CHECK(cudaMalloc(&gpu.workspace, gpu.workspace_bytes));
    CUDA_CHECK(cudaMalloc(&gpu.attention_workspace, gpu.attention_bytes));
}

// A tensor whose scale is given, fused, without forms.
static inline Operand given_tensor(Fp8Type type, Fp8Scale *scale) {
    Operand t = operand_bf16(NULL);
    t.type = type;
    t.target = fp8_max(type);
    t.fused = t.writes_amax = true;
    t.scale = scale;
    return t;
}

static inline Operand with_forms(Operand t, Bf16 *bf16, uint8_t *fp8, uint8_t *fp8_t) {
    t.bf16 = bf16;
    t.rows.codes = fp8;
    t.columns.codes = fp8_t;
    return t;
}
