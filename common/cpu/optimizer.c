// Optimizers, and the two reductions that the norm of all gradients is made of.
#include "cpu.h"
#include "ops.h"
#include <math.h>
#include <string.h>

// ---- the norm ----------------------------------------------------------------------------------

static uint32_t piece_abs_max(const float *x, size_t count) {
    uint32_t max = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0x7fffffff;
        max = bits > max ? bits : max;
    }
    return max;
}

uint32_t ops_abs_max(const struct tensor *x, size_t tensors) {
    uint32_t max = 0;
    for (size_t t = 0; t < tensors; t++) {
        const float *in = f32(x[t]);
        size_t count = tensor_count(x[t]);
#pragma omp parallel for schedule(static) reduction(max : max)
        for (size_t i = 0; i < pieces(count, PIECE_COUNT); i++) {
            uint32_t m = piece_abs_max(in + i * PIECE_COUNT, piece_length(count, PIECE_COUNT, i));
            max = m > max ? m : max;
        }
    }
    return max;
}

static int64_t bits_of(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// The sum of llrint(x[i]^2 * scale) for numbers whose scaled squares are below 2^62.
//
// A square of two floats is exact in double. Adding 1.5 * 2^52 to a double d rounds it to a whole
// number, ties to even, which then can be read in the lower bits, if |d| < 2^51. So the upper part,
// in units of 2^31, is split off first, in the same way; what rounds d is the lower part alone.
// Unlike llrint() this takes only additions, which every vector unit has.
static __int128 piece_square_sum(const float *x, size_t count, double scale) {
    const double round_upper = 0x1.8p83; // numbers from 2^83 to 2^84 are 2^31 apart
    const double round_lower = 0x1.8p52;
    int64_t upper_sum = 0;
    int64_t lower_sum = 0;
    for (size_t begin = 0; begin < count; begin += 256) {
        size_t end = begin + 256 < count ? begin + 256 : count;
        for (size_t i = begin; i < end; i += 16) { // apart from the sums: these become vectors
            prefetch(&x[i]);
        }
        for (size_t i = begin; i < end; i++) {
            double square = (double)x[i] * (double)x[i] * scale;
            double upper = square + round_upper;
            double lower = square - (upper - round_upper) + round_lower;
            upper_sum += bits_of(upper) - bits_of(round_upper);
            lower_sum += bits_of(lower) - bits_of(round_lower);
        }
    }
    return ((__int128)upper_sum << 31) + lower_sum;
}

unsigned __int128 ops_square_sum(const struct tensor *x, size_t tensors, uint32_t max_bits) {
    float max;
    memcpy(&max, &max_bits, sizeof max);
    CHECK(max > 0.0f && isfinite(max));
    double scale = ldexp(1.0, 60 - 2 * ilogbf(max));
    unsigned __int128 sum = 0;
    for (size_t t = 0; t < tensors; t++) {
        const float *in = f32(x[t]);
        size_t count = tensor_count(x[t]);
#pragma omp parallel
        {
            __int128 part = 0; // a thread's; the sum is exact, so the order does not matter
#pragma omp for schedule(static) nowait
            for (size_t i = 0; i < pieces(count, PIECE_COUNT); i++) {
                size_t n = piece_length(count, PIECE_COUNT, i);
                part += piece_square_sum(in + i * PIECE_COUNT, n, scale);
            }
#pragma omp critical(square_sum)
            sum += (unsigned __int128)part;
        }
    }
    return sum;
}

// ---- steps -------------------------------------------------------------------------------------
// One element at a time and no sums, so any cut among threads gives the same bits.

void ops_sgd(struct tensor param, struct tensor grad, float scale, float lr, float decay) {
    CHECK(tensor_count(grad) == tensor_count(param));
    float *w = f32(param);
    const float *dw = f32(grad);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < tensor_count(param); i++) {
        w[i] -= lr * (scale * dw[i] + decay * w[i]);
    }
}

// What does not depend on the element; computed in double, as torch does.
struct adamw_rates {
    float keep; // 1 - lr * decay
    float beta2;
    float rate1; // 1 - beta1
    float rate2;
    float step_size; // lr / (1 - beta1^t)
    float correction2; // sqrt(1 - beta2^t)
    float eps;
};

static struct adamw_rates adamw_rates(struct adamw a) {
    return (struct adamw_rates){
        .keep = (float)(1.0 - (double)a.lr * a.decay),
        .beta2 = a.beta2,
        .rate1 = (float)(1.0 - (double)a.beta1),
        .rate2 = (float)(1.0 - (double)a.beta2),
        .step_size = (float)(a.lr / (1.0 - pow(a.beta1, (double)a.step))),
        .correction2 = (float)sqrt(1.0 - pow(a.beta2, (double)a.step)),
        .eps = a.eps,
    };
}

// All (count).
static void adamw_piece(float *restrict w, float *restrict m, float *restrict v,
                        const float *restrict dw, size_t count, float scale, struct adamw_rates r) {
    for (size_t i = 0; i < count; i++) {
        float g = scale * dw[i];
        m[i] += r.rate1 * (g - m[i]);
        v[i] = r.beta2 * v[i] + r.rate2 * g * g;
        w[i] = r.keep * w[i] - r.step_size * m[i] / (sqrtf(v[i]) / r.correction2 + r.eps);
    }
}

void ops_adamw(struct tensor param, struct tensor m, struct tensor v, struct tensor grad,
               float scale, struct adamw a) {
    size_t count = tensor_count(param);
    CHECK(tensor_count(grad) == count && tensor_count(m) == count && tensor_count(v) == count);
    CHECK(a.step >= 1);
    struct adamw_rates rates = adamw_rates(a);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < pieces(count, PIECE_COUNT); i++) {
        size_t at = i * PIECE_COUNT;
        adamw_piece(f32(param) + at, f32(m) + at, f32(v) + at, f32(grad) + at,
                    piece_length(count, PIECE_COUNT, i), scale, rates);
    }
}

struct adadelta_rates {
    float lr;
    float rho;
    float rate; // 1 - rho
    float eps;
    float decay;
};

// All (count).
static void adadelta_piece(float *restrict w, float *restrict square, float *restrict delta,
                           const float *restrict dw, size_t count, float scale,
                           struct adadelta_rates r) {
    for (size_t i = 0; i < count; i++) {
        float g = scale * dw[i] + r.decay * w[i];
        square[i] = r.rho * square[i] + r.rate * g * g;
        float d = sqrtf(delta[i] + r.eps) / sqrtf(square[i] + r.eps) * g;
        delta[i] = r.rho * delta[i] + r.rate * d * d;
        w[i] -= r.lr * d;
    }
}

void ops_adadelta(struct tensor param, struct tensor square_avg, struct tensor delta_avg,
                  struct tensor grad, float scale, float lr, float rho, float eps, float decay) {
    size_t count = tensor_count(param);
    CHECK(tensor_count(grad) == count && tensor_count(square_avg) == count);
    CHECK(tensor_count(delta_avg) == count);
    struct adadelta_rates rates = {lr, rho, (float)(1.0 - (double)rho), eps, decay};
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < pieces(count, PIECE_COUNT); i++) {
        size_t at = i * PIECE_COUNT;
        adadelta_piece(f32(param) + at, f32(square_avg) + at, f32(delta_avg) + at, f32(grad) + at,
                       piece_length(count, PIECE_COUNT, i), scale, rates);
    }
}
