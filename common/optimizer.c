#include "optimizer.h"
#include "error.h"
#include "ops.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool is(const char *a, const char *b) {
    return strcmp(a, b) == 0;
}

int optimizer_states(const struct options *o) {
    return is(o->optimizer, "sgd") ? 0 : 2;
}

const char *optimizer_state_name(const struct options *o, int state) {
    static const char *const adamw[] = {"exp_avg", "exp_avg_sq"};
    static const char *const adadelta[] = {"square_avg", "acc_delta"};
    return is(o->optimizer, "adamw") ? adamw[state] : adadelta[state];
}

double learning_rate(const struct options *o, int64_t step, int64_t steps,
                     int64_t steps_per_epoch) {
    if (step < o->warmup) {
        return o->lr * (double)(step + 1) / (double)o->warmup;
    }
    if (is(o->schedule, "step")) {
        return o->lr * pow(o->gamma, (double)(step / steps_per_epoch));
    }
    if (is(o->schedule, "cosine") && steps > o->warmup + 1) {
        double done = (double)(step - o->warmup) / (double)(steps - 1 - o->warmup);
        return o->min_lr + 0.5 * (o->lr - o->min_lr) * (1 + cos(M_PI * fmin(done, 1)));
    }
    return o->lr;
}

static void step_piece(const struct options *o, const struct piece *p, double lr, double scale,
                       int64_t step) {
    double decay = p->decay ? o->weight_decay : 0;
    if (is(o->optimizer, "sgd")) {
        ops_sgd(p->param, p->grad, scale, lr, decay);
    } else if (is(o->optimizer, "adadelta")) {
        ops_adadelta(p->param, p->state[0], p->state[1], p->grad, scale, lr, o->rho, o->eps, decay);
    } else {
        struct adamw a = {
            .lr = lr,
            .beta1 = o->beta1,
            .beta2 = o->beta2,
            .eps = o->eps,
            .decay = decay,
            .step = step + 1,
        };
        ops_adamw(p->param, p->state[0], p->state[1], p->grad, scale, a);
    }
}

void optimizer_step(const struct options *o, const struct piece *pieces, size_t count, double lr,
                    double scale, int64_t step) {
    for (size_t i = 0; i < count; i++) {
        step_piece(o, &pieces[i], lr, scale, step);
    }
}

// The gradients that this rank counts in the norm; free() the result.
static struct tensor *counted(const struct piece *pieces, size_t count, size_t *tensors) {
    struct tensor *grads = calloc(count + 1, sizeof *grads);
    CHECK(grads != NULL);
    *tensors = 0;
    for (size_t i = 0; i < count; i++) {
        if (!pieces[i].replica) {
            grads[(*tensors)++] = pieces[i].grad;
        }
    }
    return grads;
}

uint32_t norm_max(const struct piece *pieces, size_t count) {
    size_t tensors;
    struct tensor *grads = counted(pieces, count, &tensors);
    uint32_t max_bits = ops_abs_max(grads, tensors);
    free(grads);
    return max_bits;
}

static float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

unsigned __int128 norm_squares(const struct piece *pieces, size_t count, uint32_t max_bits) {
    if (max_bits == 0 || !isfinite(from_bits(max_bits))) {
        return 0;
    }
    size_t tensors;
    struct tensor *grads = counted(pieces, count, &tensors);
    unsigned __int128 squares = ops_square_sum(grads, tensors, max_bits);
    free(grads);
    return squares;
}

double norm_root(unsigned __int128 squares, uint32_t max_bits) {
    float max = from_bits(max_bits);
    if (max == 0 || !isfinite(max)) {
        return max;
    }
    return ldexp(sqrt(ldexp((double)squares, -60)), ilogbf(max));
}

double clip_scale(double norm, double clip) {
    if (clip == 0) {
        return 1;
    }
    double scale = clip / (norm + 1e-6);
    return scale < 1 ? scale : 1;
}
