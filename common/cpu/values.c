// Values: zero, fill, copy and cast, add, scale, and the random start values of parameters.
#include "cast.h"
#include "cpu.h"
#include "ops.h"
#include <math.h>
#include <string.h>

void ops_zero(struct tensor y) {
    size_t bytes = dtype_size(y.dtype);
    size_t count = tensor_count(y);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < pieces(count, PIECE_COUNT); i++) {
        char *piece = (char *)y.data + i * PIECE_COUNT * bytes;
        memset(piece, 0, piece_length(count, PIECE_COUNT, i) * bytes);
    }
}

void ops_fill(struct tensor y, float value) {
    float *out = f32(y);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < tensor_count(y); i++) {
        out[i] = value;
    }
}

void ops_add(struct tensor y, struct tensor x) {
    CHECK(tensor_count(y) == tensor_count(x));
    float *out = f32(y);
    const float *in = f32(x);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < tensor_count(y); i++) {
        out[i] += in[i];
    }
}

void ops_scale(struct tensor y, float factor) {
    float *out = f32(y);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < tensor_count(y); i++) {
        out[i] *= factor;
    }
}

// ---- copies ------------------------------------------------------------------------------------

void ops_copy(struct tensor y, struct tensor x) {
    CHECK(tensor_count(y) == tensor_count(x));
    CHECK(y.dtype == x.dtype || y.dtype == DTYPE_F32 || x.dtype == DTYPE_F32);
    size_t count = tensor_count(y);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < pieces(count, PIECE_COUNT); i++) {
        size_t n = piece_length(count, PIECE_COUNT, i);
        char *out = (char *)y.data + i * PIECE_COUNT * dtype_size(y.dtype);
        const char *in = (const char *)x.data + i * PIECE_COUNT * dtype_size(x.dtype);
        if (y.dtype == x.dtype) {
            memcpy(out, in, n * dtype_size(y.dtype));
        } else if (x.dtype == DTYPE_F32) {
            cast_from_f32(out, y.dtype, (const float *)in, n);
        } else {
            cast_to_f32((float *)out, in, x.dtype, n);
        }
    }
}

// ---- random start values -----------------------------------------------------------------------

// Four values from the four words of a block.
typedef void block_values(float value[4], struct random_block words, float scale);

// In double, so that the float does not depend on the last bit of log(), cos() and sin().
// Source: Box & Muller, "A note on the generation of random normal deviates", 1958.
static void normal_values(float value[4], struct random_block words, float std) {
    for (int i = 0; i < 4; i += 2) {
        double uniform = (words.word[i] + 0.5) * 0x1p-32; // in (0, 1)
        double radius = std * sqrt(-2.0 * log(uniform));
        double angle = 2.0 * M_PI * 0x1p-32 * words.word[i + 1];
        value[i] = (float)(radius * cos(angle));
        value[i + 1] = (float)(radius * sin(angle));
    }
}

static void uniform_values(float value[4], struct random_block words, float bound) {
    for (int i = 0; i < 4; i++) {
        float uniform = (float)(words.word[i] >> 8) * 0x1p-24f; // as random_uniform()
        value[i] = (2.0f * uniform - 1.0f) * bound;
    }
}

// y[0 … count-1] = the values of the elements index … index+count-1 of the whole.
static void random_run(float *y, size_t count, struct random_key key, uint64_t index,
                       block_values *values, float scale) {
    for (size_t done = 0; done < count;) {
        float value[4];
        size_t skip = (index + done) % 4;
        size_t n = 4 - skip < count - done ? 4 - skip : count - done;
        values(value, random_philox(key, (index + done) / 4), scale);
        memcpy(y + done, value + skip, n * sizeof *y);
        done += n;
    }
}

// How many of the count elements from `first` on lie below `whole`; the others are padding.
static size_t count_inside(size_t first, size_t count, size_t whole) {
    size_t left = first < whole ? whole - first : 0;
    return count < left ? count : left;
}

// Each row of a tensor is a run of elements of the whole. Whole rows are one run together.
static void random_fill(struct tensor y, struct random_key key, struct place place,
                        block_values *values, float scale) {
    float *out = f32(y);
    size_t rows = y.rows;
    size_t cols = y.cols;
    bool whole_rows = place.first_col == 0 && cols == place.whole_cols;
    if (whole_rows) {
        rows = pieces(y.rows * y.cols, PIECE_COUNT);
        cols = PIECE_COUNT;
    }
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < rows; i++) {
        size_t n = cols;
        size_t inside = 0;
        uint64_t index = 0;
        if (whole_rows) {
            n = piece_length(y.rows * y.cols, cols, i);
            index = (uint64_t)place.first_row * y.cols + i * cols;
            inside = count_inside(index, n, place.whole_rows * y.cols);
        } else if (place.first_row + i < place.whole_rows) {
            index = (uint64_t)(place.first_row + i) * place.whole_cols + place.first_col;
            inside = count_inside(place.first_col, n, place.whole_cols);
        }
        random_run(out + i * cols, inside, key, index, values, scale);
        memset(out + i * cols + inside, 0, (n - inside) * sizeof *out);
    }
}

void ops_random_normal(struct tensor y, struct random_key key, struct place place, float std) {
    random_fill(y, key, place, normal_values, std);
}

void ops_random_uniform(struct tensor y, struct random_key key, struct place place, float bound) {
    random_fill(y, key, place, uniform_values, bound);
}
