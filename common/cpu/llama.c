// The ops of llama besides linear layers, attention and loss: embedding, norm, rotary positions and
// the gated activation. Each is one pass over memory.
#include "cpu.h"
#include "ops.h"
#include "vector.h"
#include <math.h>
#include <string.h>

// ---- embedding ---------------------------------------------------------------------------------

enum { EMBEDDING_COLS = 32 }; // columns of dw that one task adds up

static void check_tokens(struct tensor tokens, size_t rows, size_t vocab) {
    CHECK(tensor_count(tokens) == rows);
    const int32_t *token = i32(tokens);
    for (size_t r = 0; r < rows; r++) {
        CHECK(token[r] >= 0 && (size_t)token[r] < vocab);
    }
}

void ops_embedding(struct tensor y, struct tensor tokens, struct tensor w) {
    CHECK(y.cols == w.cols);
    check_tokens(tokens, y.rows, w.rows);
    size_t C = w.cols;
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(y.rows, PIECE_ROWS); p++) {
        for (size_t r = p * PIECE_ROWS; r < p * PIECE_ROWS + piece_length(y.rows, PIECE_ROWS, p);
             r++) {
            memcpy(f32(y) + r * C, f32(w) + (size_t)i32(tokens)[r] * C, C * sizeof(float));
        }
    }
}

// Columns [first, first + count) of dw; rows of dy in order.
static void embedding_dw_columns(struct tensor dw, struct tensor dy, const int32_t *token,
                                 size_t first, size_t count) {
    size_t C = dw.cols;
    for (size_t v = 0; v < dw.rows; v++) {
        memset(f32(dw) + v * C + first, 0, count * sizeof(float));
    }
    for (size_t r = 0; r < dy.rows; r++) {
        float *out = f32(dw) + (size_t)token[r] * C + first;
        const float *in = f32(dy) + r * C + first;
        for (size_t j = 0; j < count; j++) {
            out[j] += in[j];
        }
    }
}

void ops_embedding_dw(struct tensor dw, struct tensor dy, struct tensor tokens) {
    CHECK(dw.cols == dy.cols);
    check_tokens(tokens, dy.rows, dw.rows);
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(dw.cols, EMBEDDING_COLS); p++) {
        embedding_dw_columns(dw, dy, i32(tokens), p * EMBEDDING_COLS,
                             piece_length(dw.cols, EMBEDDING_COLS, p));
    }
}

// ---- root-mean-square norm ---------------------------------------------------------------------

// 1 / sqrt(mean(x^2) + eps) of one row x (C).
static float inverse_rms(const float *x, size_t C, float eps) {
    return 1.0f / sqrtf(vector_dot(x, x, C) / (float)C + eps);
}

void ops_rmsnorm(struct tensor y, struct tensor x, struct tensor w, float eps) {
    CHECK(y.rows == x.rows && y.cols == x.cols && tensor_count(w) == x.cols);
    size_t R = x.rows, C = x.cols;
    const float *weight = f32(w);
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(R, PIECE_ROWS); p++) {
        for (size_t r = p * PIECE_ROWS; r < p * PIECE_ROWS + piece_length(R, PIECE_ROWS, p); r++) {
            const float *restrict in = f32(x) + r * C;
            float *restrict out = f32(y) + r * C;
            float scale = inverse_rms(in, C, eps);
            for (size_t j = 0; j < C; j++) {
                out[j] = weight[j] * (in[j] * scale);
            }
        }
    }
}

// With s = 1 / sqrt(mean(x^2) + eps) and n = x s, y = w n:
//   dw = sum over rows of dy n
//   dx = s (w dy - n mean(w dy n))
// One row (C); dw is added to.
static void rmsnorm_backward_row(float *restrict dx, float *restrict dw, const float *restrict dy,
                                 const float *restrict x, const float *restrict w, size_t C,
                                 float eps, bool add) {
    float s = inverse_rms(x, C, eps);
    lanes sums = {0};
    float sum = 0;
    size_t j = 0;
    for (; j + LANES <= C; j += LANES) {
        prefetch(dy + j);
        prefetch(x + j);
        lanes product = lanes_load(dy + j) * lanes_load(x + j);
        lanes_store(dw + j, lanes_load(dw + j) + product * s);
        sums += product * lanes_load(w + j);
    }
    for (; j < C; j++) {
        float product = dy[j] * x[j];
        dw[j] += product * s;
        sum += product * w[j];
    }
    sum += lanes_sum(sums);
    float slope = sum / (float)C * s * s * s;
    if (add) {
        for (j = 0; j < C; j++) {
            dx[j] += s * w[j] * dy[j] - slope * x[j];
        }
    } else {
        for (j = 0; j < C; j++) {
            dx[j] = s * w[j] * dy[j] - slope * x[j];
        }
    }
}

// out (cols) = the sum of the rows of parts (rows, cols), in order.
static void add_rows(float *out, const float *parts, size_t rows, size_t cols) {
    memset(out, 0, cols * sizeof *out);
    for (size_t r = 0; r < rows; r++) {
        for (size_t j = 0; j < cols; j++) {
            out[j] += parts[r * cols + j];
        }
    }
}

void ops_rmsnorm_backward(struct tensor dx, struct tensor dw, struct tensor dy, struct tensor x,
                          struct tensor w, float eps, bool add) {
    size_t R = x.rows, C = x.cols, count = pieces(R, PIECE_ROWS);
    CHECK(dx.rows == R && dx.cols == C && dy.rows == R && dy.cols == C);
    CHECK(tensor_count(w) == C && tensor_count(dw) == C);
    struct tensor parts = tensor_alloc(count, C, DTYPE_F32, MEM_WORKSPACE);
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < count; p++) {
        float *part = f32(parts) + p * C;
        memset(part, 0, C * sizeof *part);
        for (size_t r = p * PIECE_ROWS; r < p * PIECE_ROWS + piece_length(R, PIECE_ROWS, p); r++) {
            rmsnorm_backward_row(f32(dx) + r * C, part, f32(dy) + r * C, f32(x) + r * C, f32(w), C,
                                 eps, add);
        }
    }
    add_rows(f32(dw), f32(parts), count, C);
    tensor_free(&parts);
}

// ---- rotary positions --------------------------------------------------------------------------

void ops_rope_table(struct tensor table, double theta) {
    size_t T = table.rows, D = table.cols;
    CHECK(D % 2 == 0);
    for (size_t t = 0; t < T; t++) {
        float *cosine = f32(table) + t * D, *sine = cosine + D / 2;
        for (size_t i = 0; i < D / 2; i++) {
            double angle = (double)t * pow(theta, -2.0 * (double)i / (double)D);
            cosine[i] = (float)cos(angle);
            sine[i] = (float)sin(angle);
        }
    }
}

// One row of heads, each (D): low' = low cos - high sin, high' = high cos + low sin.
static void rotate_row(float *restrict x, const float *restrict angles, size_t heads, size_t D,
                       float sign) {
    size_t half = D / 2;
    for (size_t h = 0; h < heads; h++) {
        float *restrict low = x + h * D;
        float *restrict high = low + half;
        for (size_t i = 0; i < half; i++) {
            float c = angles[i], s = sign * angles[half + i];
            float a = low[i], b = high[i];
            low[i] = a * c - b * s;
            high[i] = b * c + a * s;
        }
    }
}

void ops_rope(struct tensor x, struct tensor table, bool inverse) {
    size_t T = table.rows, D = table.cols, C = x.cols;
    CHECK(D > 0 && D % 2 == 0 && C % D == 0 && (x.rows == 0 || (T > 0 && x.rows % T == 0)));
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(x.rows, PIECE_ROWS); p++) {
        for (size_t r = p * PIECE_ROWS; r < p * PIECE_ROWS + piece_length(x.rows, PIECE_ROWS, p);
             r++) {
            rotate_row(f32(x) + r * C, f32(table) + r % T * D, C / D, D, inverse ? -1.0f : 1.0f);
        }
    }
}

// ---- gated activation --------------------------------------------------------------------------

// 1 / (1 + exp(-a))
static inline lanes sigmoid(lanes a) {
    return 1.0f / (1.0f + lanes_exp(-a));
}

void ops_swiglu(struct tensor y, struct tensor gate, struct tensor up) {
    size_t count = tensor_count(y);
    CHECK(tensor_count(gate) == count && tensor_count(up) == count);
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(count, PIECE_COUNT); p++) {
        size_t end = p * PIECE_COUNT + piece_length(count, PIECE_COUNT, p);
        for (size_t i = p * PIECE_COUNT; i < end; i += LANES) {
            prefetch(f32(gate) + i);
            prefetch(f32(up) + i);
            lanes g = lanes_load_part(f32(gate) + i, end - i);
            lanes u = lanes_load_part(f32(up) + i, end - i);
            lanes_store_part(f32(y) + i, end - i, g * sigmoid(g) * u);
        }
    }
}

// d silu(a) / da = s (1 + a (1 - s)) with s = sigmoid(a).
void ops_swiglu_backward(struct tensor dgate, struct tensor dup, struct tensor dy,
                         struct tensor gate, struct tensor up) {
    size_t count = tensor_count(dy);
    CHECK(tensor_count(gate) == count && tensor_count(up) == count);
    CHECK(tensor_count(dgate) == count && tensor_count(dup) == count);
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(count, PIECE_COUNT); p++) {
        size_t end = p * PIECE_COUNT + piece_length(count, PIECE_COUNT, p);
        for (size_t i = p * PIECE_COUNT; i < end; i += LANES) {
            prefetch(f32(gate) + i);
            prefetch(f32(up) + i);
            prefetch(f32(dy) + i);
            lanes g = lanes_load_part(f32(gate) + i, end - i);
            lanes u = lanes_load_part(f32(up) + i, end - i);
            lanes d = lanes_load_part(f32(dy) + i, end - i), s = sigmoid(g);
            lanes_store_part(f32(dup) + i, end - i, d * g * s);
            lanes_store_part(f32(dgate) + i, end - i, d * u * s * (1.0f + g * (1.0f - s)));
        }
    }
}
