// Softmax and cross entropy over the columns of a matrix of logits that may be cut over ranks.
#include "cpu.h"
#include "ops.h"
#include "vector.h"
#include <float.h>
#include <math.h>
#include <string.h>

// How many of this rank's n columns are inside the whole.
static size_t real_columns(size_t n, size_t first_col, size_t whole) {
    size_t left = first_col < whole ? whole - first_col : 0;
    return n < left ? n : left;
}

// The column of row r's target if it is among this rank's, else -1; ignored rows have none.
static ptrdiff_t target_column(const int32_t *targets, size_t r, size_t first_col, size_t cols,
                               size_t whole) {
    CHECK(targets[r] < 0 || (size_t)targets[r] < whole);
    if (targets[r] < 0 || (size_t)targets[r] < first_col ||
        (size_t)targets[r] - first_col >= cols) {
        return -1;
    }
    return targets[r] - (ptrdiff_t)first_col;
}

void ops_row_max(struct tensor max, struct tensor logits, size_t first_col, size_t whole) {
    CHECK(tensor_count(max) == logits.rows);
    size_t R = logits.rows, n = logits.cols, cols = real_columns(n, first_col, whole);
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(R, PIECE_ROWS); p++) {
        for (size_t r = p * PIECE_ROWS; r < p * PIECE_ROWS + piece_length(R, PIECE_ROWS, p); r++) {
            f32(max)[r] = vector_max(f32(logits) + r * n, cols);
        }
    }
}

// sum of exp(x - max) over x (count).
static float exp_sum(const float *x, size_t count, float max) {
    lanes sum = {0};
    for (size_t i = 0; i < count; i += LANES) {
        lanes part = lanes_exp(lanes_load_part(x + i, count - i) - max);
        sum += count - i >= LANES ? part : lanes_select(lanes_below(count - i), part, (lanes){0});
    }
    return lanes_sum(sum);
}

// How many of this rank's columns stand before row r's target.
static size_t columns_before(const int32_t *targets, size_t r, size_t first_col, size_t cols) {
    size_t before = targets[r] > 0 && (size_t)targets[r] > first_col ? targets[r] - first_col : 0;
    return before < cols ? before : cols;
}

void ops_row_exp_sum(struct tensor sum, struct tensor target_logit, struct tensor logits,
                     struct tensor max, struct tensor targets, size_t first_col, size_t whole) {
    size_t R = logits.rows, n = logits.cols, cols = real_columns(n, first_col, whole);
    CHECK(tensor_count(sum) == R && tensor_count(target_logit) == R && tensor_count(max) == R);
    CHECK(tensor_count(targets) == R);
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(R, PIECE_ROWS); p++) {
        for (size_t r = p * PIECE_ROWS; r < p * PIECE_ROWS + piece_length(R, PIECE_ROWS, p); r++) {
            const float *row = f32(logits) + r * n;
            ptrdiff_t t = target_column(i32(targets), r, first_col, cols, whole);
            f32(sum)[r] = exp_sum(row, cols, f32(max)[r]);
            f32(target_logit)[r] = t >= 0 ? row[t] - f32(max)[r] : 0.0f;
            size_t before = columns_before(i32(targets), r, first_col, cols);
            if (f32(target_logit)[r] == 0.0f && vector_max(row, before) == f32(max)[r]) {
                f32(target_logit)[r] = -FLT_MIN;
            }
        }
    }
}

// A row costs too little to be worth a team of threads.
void ops_cross_entropy(struct tensor loss, struct tensor sum, struct tensor target_logit,
                       struct tensor targets) {
    size_t R = tensor_count(targets);
    CHECK(tensor_count(loss) == 2 && tensor_count(sum) == R && tensor_count(target_logit) == R);
    double total = 0, right = 0;
    for (size_t r = 0; r < R; r++) {
        if (i32(targets)[r] >= 0) {
            total += log((double)f32(sum)[r]) - (double)f32(target_logit)[r];
            right += f32(target_logit)[r] == 0.0f ? 1.0 : 0.0;
        }
    }
    f64(loss)[0] = total;
    f64(loss)[1] = right;
}

void ops_cross_entropy_backward(struct tensor logits, struct tensor max, struct tensor sum,
                                struct tensor targets, size_t first_col, size_t whole,
                                float scale) {
    size_t R = logits.rows, n = logits.cols, cols = real_columns(n, first_col, whole);
    CHECK(tensor_count(max) == R && tensor_count(sum) == R && tensor_count(targets) == R);
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(R, PIECE_ROWS); p++) {
        for (size_t r = p * PIECE_ROWS; r < p * PIECE_ROWS + piece_length(R, PIECE_ROWS, p); r++) {
            float *row = f32(logits) + r * n;
            ptrdiff_t t = target_column(i32(targets), r, first_col, cols, whole);
            bool counts = i32(targets)[r] >= 0;
            float row_max = f32(max)[r], factor = scale / f32(sum)[r];
            for (size_t j = 0; counts && j < cols; j += LANES) {
                lanes x = lanes_exp(lanes_load_part(row + j, cols - j) - row_max) * factor;
                lanes_store_part(row + j, cols - j, x);
            }
            size_t first_zero = counts ? cols : 0;
            memset(row + first_zero, 0, (n - first_zero) * sizeof *row);
            if (t >= 0) {
                row[t] -= scale;
            }
        }
    }
}
