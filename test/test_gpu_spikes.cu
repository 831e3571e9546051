// The GPU trainer inside a test program: activations that become a thousand times larger for some
// steps.
#include "../kernels/cpu.h"
#include "gpu_trainer.h"

#include <vector>

static const int LAYER = 1;

static const char model[] =
    "--data spikes.bin --arch llama --num-layers 4 --hidden-size 48 --num-attention-heads 6 "
    "--num-query-groups 2 --ffn-hidden-size 80 --vocab-size 61 --make-vocab-size-divisible-by 16 "
    "--seq-length 16 --micro-batch-size 4 --lr 3e-3 --init-method-std 0.1 --fp8-format hybrid "
    "--embedding-lr-mult 1 --vector-lr-mult 1 --lr-decay-style cosine "
    "--log-interval 1000 --no-cuda-graphs --fp8-recipe";

// Multiplies the weights of a norm by a factor, in FP32 and in the copy that the kernels read.
static void scale_norm(Trainer *t, float factor) {
    const Param *p = param_find(&t->run.layout, TENSOR_NORM2_WEIGHT, LAYER);
    int64_t offset =
        t->params.zero.sharded_offset[p - t->run.layout.params]; // one rank keeps all of it
    size_t n = (size_t)p->rows * p->cols;
    float *master = (float *)t->params.optimizer.arrays[STATE_MASTER].device;
    std::vector<float> weights(n);
    std::vector<Bf16> copies(n);
    gpu_read(&t->gpu, weights.data(), master + offset, n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        weights[i] *= factor;
        copies[i] = bf16_encode(weights[i]);
    }
    gpu_send(&t->gpu, master + offset, weights.data(), n * sizeof(float));
    gpu_send(&t->gpu, (void *)t->net.blocks[LAYER].norm2.forward.weight, copies.data(),
             n * sizeof(Bf16));
}

static double input_scale(Trainer *t) {
    Fp8Scale slot;
    int index = fp8_slot_index(&t->run.config, LINEAR_FC1, LAYER, OPERAND_X);
    gpu_read(&t->gpu, &slot, t->params.fp8.scales + index, sizeof(slot));
    return slot.scale;
}

// Every delayed scale follows from the amaxes of its history, by the target of its operand.
static void check_scales(Trainer *t) {
    const Fp8Table &fp8 = t->params.fp8;
    std::vector<Fp8Scale> scales((size_t)fp8.count);
    std::vector<float> history((size_t)(fp8.count * fp8.length));
    gpu_fetch(&t->gpu, scales.data(), fp8.scales, scales.size() * sizeof(Fp8Scale));
    gpu_read(&t->gpu, history.data(), fp8.history, history.size() * sizeof(float));
    for (int i = 0; i < fp8.count; i++) {
        const float *amaxes = history.data() + i * fp8.length;
        float target = fp8_slot_target(&t->run.precision, i);
        if (scales[(size_t)i].count == 0) { continue; } // of a layer in BF16
        CHECK_CLOSE(scales[(size_t)i].scale * tensor_amax(amaxes, fp8.length), target,
                    1e-3 * target);
    }
}

// The activations saturate, or change the scale. When they are normal again, the scale returns, and
// the run continues as before.
TEST(spikes_pass) {
    static const char *const recipes[] = {"delayed --fp8-amax-history-len 4", "tensorwise"};
    for (int r = 0; r < 2; r++) {
        static Trainer t;
        Options options = options_of(model, recipes[r]);
        open_trainer(&t, &options);
        train(&t, 10);
        double before = t.run.progress.loss, scale = input_scale(&t);
        scale_norm(&t, 1000.0f);
        train(&t, 3);
        CHECK(input_scale(&t) < scale / 100);
        scale_norm(&t, 1 / 1000.0f);
        train(&t, 6);
        if (r == 0) { check_scales(&t); }
        double after = input_scale(&t) / scale;
        CHECK(after > 0.5 && after < 1.5);
        CHECK_EQUAL(t.run.progress.skipped, 0);
        CHECK(t.run.progress.loss < before + 0.2);
        trainer_close(&t);
    }
}

SETUP() {
    need_fp8();
    write_tokens("spikes.bin", 4096, 61, 1);
}
