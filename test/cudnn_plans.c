// kernels/attention.c with cuDNN itself, without a device: cuDNN makes plans for a device that is
// described to it (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, since 9.8), and tells the workspace that
// each plan needs. No plan is run. Built where cuDNN is installed.
#include "test.h"

#include <cudnn.h>

static cudnnBackendDescriptor_t device;
static int64_t spoilt,
    taken; // the engine that is called nondeterministic; the last plan's engine
enum { NO_ENGINE = -1, EVERY_ENGINE = -2 };
static int64_t factor = 1; // multiplies the workspace that a plan says it needs

static int64_t engine_index(cudnnBackendDescriptor_t engine) {
    int64_t count, index = -1;
    cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &count,
                             &index);
    return index;
}

// Where a descriptor takes a handle, which only a device has, it takes the described device
// instead.
static cudnnStatus_t set(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t type, int64_t n, const void *values) {
    if (name == CUDNN_ATTR_OPERATIONGRAPH_HANDLE) { return CUDNN_STATUS_SUCCESS; }
    if (name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE || name == CUDNN_ATTR_ENGINEHEUR_MODE) {
        cudnnStatus_t status = cudnnBackendSetAttribute(d,
                                                        name == CUDNN_ATTR_ENGINEHEUR_MODE
                                                            ? CUDNN_ATTR_ENGINEHEUR_DEVICEPROP
                                                            : CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP,
                                                        CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
        if (name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE || status != CUDNN_STATUS_SUCCESS) {
            return status;
        }
    }
    if (name == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) {
        cudnnBackendDescriptor_t engine;
        int64_t count;
        cudnnBackendCreateDescriptor(CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine);
        cudnnBackendGetAttribute(*(cudnnBackendDescriptor_t const *)values,
                                 CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                 &count, &engine);
        taken = engine_index(engine);
        cudnnBackendDestroyDescriptor(engine);
    }
    return cudnnBackendSetAttribute(d, name, type, n, values);
}

static cudnnStatus_t get(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t type, int64_t n, int64_t *count, void *out) {
    cudnnStatus_t status = cudnnBackendGetAttribute(d, name, type, n, count, out);
    bool spoil = spoilt == EVERY_ENGINE || spoilt == engine_index(d);
    if (name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE && spoil) {
        ((cudnnBackendNumericalNote_t *)out)[(*count)++] = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
    }
    if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) { *(int64_t *)out *= factor; }
    return status;
}

#define cudnnBackendSetAttribute set
#define cudnnBackendGetAttribute get
#include "../kernels/attention.c"
#undef cudnnBackendSetAttribute
#undef cudnnBackendGetAttribute

// Functions that only a pass calls.
void attention_plain_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv) {
    (void)gpu, (void)s, (void)out, (void)lse, (void)qkv;
}
void attention_plain_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                              const Bf16 *out, const float *lse, const Bf16 *qkv) {
    (void)gpu, (void)s, (void)d_qkv, (void)d_out, (void)out, (void)lse, (void)qkv;
}
__typeof__(attention_plain_forward) attention_own_forward
    __attribute__((alias("attention_plain_forward")));
__typeof__(attention_plain_backward) attention_own_backward
    __attribute__((alias("attention_plain_backward")));

static bool own; // whether the kernels for Hopper serve every shape, and their workspace
static size_t own_bytes;
bool attention_own_serves(const Gpu *gpu, AttentionShape s, bool backward) {
    (void)gpu, (void)s, (void)backward;
    return own;
}
size_t attention_own_workspace(AttentionShape s) {
    (void)s;
    return own_bytes;
}

// A device of `sms` multiprocessors, compute capability version / 100, and this much shared memory.
static bool describe_device(int version, int sms, int shared) {
    char json[1024];
    int n = snprintf(
        json, sizeof(json),
        "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],"
        "\"regsPerBlock\":65536,\"multiProcessorCount\":%d,\"warpSize\":32,"
        "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":%d,"
        "\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":24,"
        "\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":1536,\"pciDeviceId\":0,\"isTccDriver\":0,"
        "\"supportCoopLaunch\":1,\"totalGlobalMem\":80000000000,\"smClockRateKHz\":1500000,"
        "\"memClockRateKHz\":1500000,\"l2CacheSize\":41943040,\"cudaDeviceId\":0,"
        "\"deviceVer\":%d,\"driverVer\":13000,\"deviceName\":\"described\"}",
        sms, shared, version);
    cudnnBackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &device);
    cudnnBackendSetAttribute(device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, n,
                             json);
    return cudnnBackendFinalize(device) == CUDNN_STATUS_SUCCESS;
}

SETUP() {
    spoilt = NO_ENGINE;
    if (!describe_device(900, 132, 232448)) {
        test_skip_all("this cuDNN takes no description of a device");
    }
}

// GPT-2's attention, and Llama's with grouped queries; and both with documents.
static const int starts[8 * 1024];
static const AttentionShape shapes[] = {{8, 1024, 12, 12, 64, false, NULL},
                                        {1, 2048, 32, 8, 128, true, NULL},
                                        {8, 1024, 12, 12, 64, false, starts},
                                        {1, 2048, 32, 8, 128, true, starts}};
enum { MOST = 1 << 30, SHAPES = sizeof(shapes) / sizeof(*shapes) };

// The workspace that is planned without a device is enough: no pass takes smaller pieces. (From
// compute capability 12.0 on cuDNN has the plans of 8.0.)
TEST(planned_workspace_is_enough_on_every_device) {
    const int devices[][3] = {{800, 108, 166912}, {900, 132, 232448}, {1000, 148, 232448}};
    for (int i = 0; i < 3 * SHAPES; i++) {
        AttentionShape s = shapes[i % SHAPES];
        const int *d = devices[i / SHAPES];
        if (s.documents != NULL && d[0] != 900) {
            continue;
        } // the plain kernel has documents there
        Gpu gpu = {0};
        describe_device(d[0], d[1], d[2]);
        gpu.attention_bytes = attention_workspace(s, MOST);
        Piece expected = piece_for(&s, gpu.attention_bytes);
        bool well = attention_is_fast(&gpu, s);
        Piece p = backward_piece(&gpu, &s);
        if (!(well && p.sequences == expected.sequences && p.groups == expected.groups)) {
            test_fail(__FILE__, __LINE__, "capability %d, shape %d: %s", d[0], i % SHAPES,
                      error_text());
        }
        attention_close(&gpu);
        cudnnBackendDestroyDescriptor(device);
    }
    describe_device(900, 132, 232448);
}

// Where plans need more workspace, pieces are smaller; where no piece is small enough, cuDNN is not
// used.
TEST(the_plan_itself_is_asked_for_its_workspace) {
    AttentionShape s = shapes[0];
    Gpu gpu = {0};
    s.deterministic = true;
    gpu.attention_bytes = attention_workspace(s, MOST);
    factor = 3;
    CHECK(attention_is_fast(&gpu, s));
    Piece p = backward_piece(&gpu, &s);
    CHECK(p.sequences == 2 && p.groups == 12);
    attention_close(&gpu);
    factor = 1000;
    s.B = s.H = s.G = 1;
    CHECK(!attention_is_fast(&gpu, s));
    CHECK_CONTAINS(error_text(), " bytes of workspace, more than the ");
    attention_close(&gpu);
    factor = 1;
}

TEST(engines_that_do_not_repeat_are_passed_over) {
    const Piece whole = {8, 12};
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        AttentionShape s = shapes[0];
        Gpu gpu = {0};
        s.deterministic = deterministic;
        spoilt = NO_ENGINE;
        CHECK(plan_for(&gpu, s, whole, true)->usable);
        int64_t first = spoilt = taken;
        attention_close(&gpu);
        CHECK(plan_for(&gpu, s, whole, true)->usable);
        CHECK((taken != first) == deterministic);
        attention_close(&gpu);
        spoilt = EVERY_ENGINE;
        const AttentionPlan *none = plan_for(&gpu, s, whole, true);
        CHECK(none->usable == !deterministic);
        if (deterministic) { CHECK_CONTAINS(none->why_not.text, "(--no-deterministic takes"); }
        attention_close(&gpu);
    }
    spoilt = NO_ENGINE;
}

// Where the kernels for Hopper serve a shape, cuDNN makes no plan for it, and need not have
// one. The workspace is enough for both.
TEST(own_kernels_need_no_plan) {
    AttentionShape s = shapes[0];
    size_t cudnn = attention_workspace(s, MOST);
    for (int i = 0; i < 2; i++) {
        Gpu gpu = {0};
        own = i == 1;
        own_bytes = cudnn + 4096;
        gpu.attention_bytes = attention_workspace(s, MOST);
        CHECK(gpu.attention_bytes == own_bytes);
        own_bytes = 1;
        CHECK(attention_workspace(s, MOST) == cudnn);
        CHECK(attention_is_fast(&gpu, s));
        CHECK((gpu.attentions != NULL) == !own);
        attention_close(&gpu);
    }
    own = false;
    own_bytes = 0;
}
