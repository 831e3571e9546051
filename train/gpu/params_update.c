// The optimizer's step on the device, and what a step says of FP8.
#include "params.h"

AdamWUpdate params_adamw(const Params *p, const StepInput *input) {
    const Options *o = &p->run->options;
    return (AdamWUpdate){
        .master = p->master,
        .exp_avg = p->exp_avg,
        .exp_avg_sq = p->exp_avg_sq,
        .moment_type = p->moment_type,
        .gradients = p->gradients,
        .gradient_type = p->gradient_type,
        .decay = p->decay,
        .segments = p->segments,
        .segment_count = p->segment_count,
        .segment_blocks = p->segment_blocks,
        .input = input,
        .beta1 = (float)o->adam_beta1,
        .beta2 = (float)o->adam_beta2,
        .eps = (float)o->adam_eps,
        .weight_decay = (float)o->weight_decay,
        .seed = (uint64_t)o->seed,
    };
}

// The weights of FP8 layers: in one pass by the scales that were just renewed, or measured in two.
// A tied embedding, the last, has been updated with the copies.
static void update_codes(Params *p, const AdamWUpdate *update) {
    cudaStream_t stream = p->gpu->stream;
    Fp8Weights updated = p->weights, tied = p->weights;
    updated.count = p->tied_weight;
    updated.tiles -= p->tied_tiles;
    tied.tiles = p->tied_tiles;
    if (updated.count > 0) {
        gpu_adamw_update_fp8(updated, p->measuring, update, p->state, stream);
    }
    if (p->measuring) {
        if (tied.tiles > 0) {
            gpu_measure_weights(tied, p->tied_weight, p->master, p->state, stream);
        }
        gpu_quantize_weights(p->weights, 0, true, p->master, p->state, stream);
    } else if (tied.tiles > 0) {
        gpu_quantize_weights(tied, p->tied_weight, false, p->master, p->state, stream);
    }
}

void params_clear_measured(const Params *p) {
    gpu_fp8_clear_measured(&p->scaling, p->gpu->stream);
}

void params_forget_ranges(const Params *p) {
    if (p->delayed) { gpu_fp8_forget_ranges(&p->scaling, p->gpu->stream); }
}

void params_begin_counting(Params *p) {
    size_t bytes = (size_t)p->scaling.count * sizeof(Fp8Counts);
    CUDA_CHECK(cudaMemsetAsync(p->counts, 0, bytes, p->gpu->stream));
    p->counting = true;
    params_send_weights(p);
}

void params_end_counting(Params *p, Fp8Counts *host) {
    p->counting = false;
    params_send_weights(p);
    gpu_fetch(p->gpu, host, p->counts, (size_t)p->scaling.count * sizeof(Fp8Counts));
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    enum { COUNTS = sizeof(Fp8Counts) / sizeof(int64_t) };
    if (p->run->ranks > 1) { params_sum_counts(p, (int64_t *)host, p->scaling.count * COUNTS); }
}

void params_note_step(Params *p, const StepState *state) {
    if (p->delayed) { p->measuring = state->unmeasured > 0; }
}

void params_update(Params *p, const StepInput *input) {
    const Options *o = &p->run->options;
    cudaStream_t stream = p->gpu->stream;
    AdamWUpdate update = params_adamw(p, input);
    gpu_family(p->gpu, FAMILY_OPTIMIZER);
    gpu_sum_of_squares(p->state, p->norm_scratch, p->gradients, p->gradient_type, p->parts,
                       p->num_parts, stream);
    params_agree(p, input);
    gpu_decide_step(p->state, (double)o->global_batch_size * o->seq_length, (float)o->clip_grad,
                    stream);
    if (p->fp8) {
        gpu_fp8_update(&p->scaling, p->state, input, stream);
        if (p->measuring) { gpu_fp8_clear_measured(&p->scaling, stream); }
    }
    if (p->run->ranks > 1) {
        params_update_parts(p, &update);
        return;
    }
    gpu_adamw_update(&update, p->state, stream);
    if (p->fp8) { update_codes(p, &update); }
}
