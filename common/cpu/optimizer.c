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
    for (size_t i = 0; i < count; i++) {
        double square = (double)x[i] * (double)x[i] * scale;
        double upper = square + round_upper;
        double lower = square - (upper - round_upper) + round_lower;
        upper_sum += bits_of(upper) - bits_of(round_upper);
        lower_sum += bits_of(lower) - bits_of(round_lower);
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
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < tensor_count(param); i++) {
        w[i] -= lr * (scale * dw[i] + decay * w[i]);
    }
}

void ops_adamw(struct tensor param, struct tensor m, struct tensor v, struct tensor grad,
               float scale, struct adamw a) {
    CHECK(tensor_count(grad) == tensor_count(param) && a.step >= 1);
    CHECK(tensor_count(m) == tensor_count(param) && tensor_count(v) == tensor_count(param));
    float *w = f32(param);
    float *m1 = f32(m);
    float *m2 = f32(v);
    const float *dw = f32(grad);
    // As in torch, what does not depend on the element is computed in double.
    float keep = (float)(1.0 - (double)a.lr * a.decay);
    float rate1 = (float)(1.0 - (double)a.beta1);
    float rate2 = (float)(1.0 - (double)a.beta2);
    float step_size = (float)(a.lr / (1.0 - pow(a.beta1, (double)a.step)));
    float correction2 = (float)sqrt(1.0 - pow(a.beta2, (double)a.step));
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < tensor_count(param); i++) {
        float g = scale * dw[i];
        m1[i] += rate1 * (g - m1[i]);
        m2[i] = a.beta2 * m2[i] + rate2 * g * g;
        w[i] = keep * w[i] - step_size * m1[i] / (sqrtf(m2[i]) / correction2 + a.eps);
    }
}

void ops_adadelta(struct tensor param, struct tensor square_avg, struct tensor delta_avg,
                  struct tensor grad, float scale, float lr, float rho, float eps, float decay) {
    CHECK(tensor_count(grad) == tensor_count(param));
    CHECK(tensor_count(square_avg) == tensor_count(param));
    CHECK(tensor_count(delta_avg) == tensor_count(param));
    float *w = f32(param);
    float *square = f32(square_avg);
    float *delta = f32(delta_avg);
    const float *dw = f32(grad);
    float rate = (float)(1.0 - (double)rho);
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < tensor_count(param); i++) {
        float g = scale * dw[i] + decay * w[i];
        square[i] = rho * square[i] + rate * g * g;
        float d = sqrtf(delta[i] + eps) / sqrtf(square[i] + eps) * g;
        delta[i] = rho * delta[i] + rate * d * d;
        w[i] -= lr * d;
    }
}
