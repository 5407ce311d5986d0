// Linear layers: the matrix products of a model, cut into pieces of fixed size, one library call
// each.
#include "cpu.h"
#include "ops.h"
#include "vector.h"

enum {
    PANEL_COLS = 1024, // columns of w^T that are made at a time
    BIAS_COLS = 64, // columns that one task adds up
    DW_TASKS = 8, // of a dw, at least, if that leaves each of them DW_ROWS_MIN rows
    DW_ROWS_MIN = 32,
    DW_ROWS_MAX = 96,
    DW_ROWS_STEP = 16,
    DW_TERMS = 384, // rows of dy and x that it sums at a time
};

static void check_linear(struct tensor y, struct tensor x, struct tensor w) {
    CHECK(y.rows == x.rows && y.cols == w.rows && x.cols == w.cols);
}

// LANES rows of in^T: out (LANES, rows) from the columns [first, first + LANES) of in.
static void transpose_columns(float *out, const float *in, size_t rows, size_t cols, size_t first) {
    lanes square[LANES];
    size_t count = cols - first < LANES ? cols - first : LANES;
    for (size_t i = 0; i < rows; i += LANES) {
        for (size_t l = 0; l < LANES; l++) {
            bool inside = i + l < rows;
            size_t ahead = i + l + 2 * LANES < rows ? i + l + 2 * LANES : rows - 1;
            __builtin_prefetch(in + ahead * cols + first); // too far apart for the processor's own
            square[l] = inside ? lanes_load_part(in + (i + l) * cols + first, count) : (lanes){0};
        }
        lanes_transpose(square);
        for (size_t l = 0; l < count; l++) {
            lanes_store_part(out + l * rows + i, rows - i, square[l]);
        }
    }
}

// out (cols, rows) = in^T, where in is (rows, cols) and dense.
static void transpose(float *out, const float *in, size_t rows, size_t cols) {
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(cols, LANES); p++) {
        transpose_columns(out + p * LANES * rows, in, rows, cols, p * LANES);
    }
}

// Every row of y (rows, n) = bias (n).
static void repeat_row(float *y, size_t ldy, const float *bias, size_t rows, size_t n) {
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < n; j++) {
            y[i * ldy + j] = bias[j];
        }
    }
}

// The product with w^T asks the library to transpose w in every piece anew. Doing it once, a panel
// at a time, leaves products of plain matrices, which run a tenth faster.
void ops_linear(struct tensor y, struct tensor x, struct tensor w, struct tensor bias) {
    check_linear(y, x, w);
    CHECK(!tensor_exists(bias) || tensor_count(bias) == w.rows);
    size_t N = w.rows, K = w.cols, R = x.rows;
    if (R == 0 || N == 0) {
        return;
    }
    size_t panel = N < PANEL_COLS ? N : PANEL_COLS;
    struct tensor wt = tensor_alloc(K, panel, DTYPE_F32, MEM_WORKSPACE);
    const float *bias_f32 = tensor_exists(bias) ? f32(bias) : NULL;
    for (size_t n0 = 0; n0 < N; n0 += panel) {
        size_t n = piece_length(N, panel, n0 / panel);
        transpose(f32(wt), f32(w) + n0 * K, n, K);
#pragma omp parallel for schedule(static)
        for (size_t p = 0; p < pieces(R, PIECE_ROWS); p++) {
            size_t rows = piece_length(R, PIECE_ROWS, p);
            const float *x_piece = f32(x) + p * PIECE_ROWS * K;
            float *y_piece = f32(y) + p * PIECE_ROWS * N + n0;
            if (bias_f32 != NULL) {
                repeat_row(y_piece, N, bias_f32 + n0, rows, n);
            }
            cpu_gemm(false, false, rows, n, K, x_piece, K, f32(wt), n, y_piece, N,
                     bias_f32 != NULL);
        }
    }
    tensor_free(&wt);
}

void ops_linear_dx(struct tensor dx, struct tensor dy, struct tensor w, bool add) {
    check_linear(dy, dx, w);
    size_t N = w.rows, K = w.cols, R = dy.rows;
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(R, PIECE_ROWS); p++) {
        size_t rows = piece_length(R, PIECE_ROWS, p);
        cpu_gemm(false, false, rows, K, N, f32(dy) + p * PIECE_ROWS * N, N, f32(w), K,
                 f32(dx) + p * PIECE_ROWS * K, K, add);
    }
}

// Rows are added in order, in double.
static void bias_gradient(float *dbias, const float *dy, size_t R, size_t N) {
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(N, BIAS_COLS); p++) {
        size_t cols = piece_length(N, BIAS_COLS, p);
        double sum[BIAS_COLS] = {0};
        for (size_t r = 0; r < R; r++) {
            for (size_t j = 0; j < cols; j++) {
                sum[j] += (double)dy[r * N + p * BIAS_COLS + j];
            }
        }
        for (size_t j = 0; j < cols; j++) {
            dbias[p * BIAS_COLS + j] = (float)sum[j];
        }
    }
}

// How many rows of dw a task makes: few, so that threads get equal shares, but a multiple of what
// the library's kernels make at once.
static size_t dw_piece(size_t N) {
    size_t rows = pieces(pieces(N, DW_TASKS), DW_ROWS_STEP) * DW_ROWS_STEP;
    return rows < DW_ROWS_MIN ? DW_ROWS_MIN : rows > DW_ROWS_MAX ? DW_ROWS_MAX : rows;
}

// All tasks take the same DW_TERMS rows of dy and x before the next ones: these stay in the cache,
// while a task that summed over all rows would read them from memory. Loops with the same static
// schedule give the same piece to the same thread, so that no barrier is needed between them.
void ops_linear_dw(struct tensor dw, struct tensor dbias, struct tensor dy, struct tensor x) {
    check_linear(dy, x, dw);
    CHECK(!tensor_exists(dbias) || tensor_count(dbias) == dw.rows);
    size_t N = dw.rows, K = dw.cols, R = dy.rows;
    size_t piece = dw_piece(N);
    if (R == 0) {
        ops_zero(dw);
    }
#pragma omp parallel
    for (size_t r = 0; r < R; r += DW_TERMS) {
#pragma omp for schedule(static) nowait
        for (size_t p = 0; p < pieces(N, piece); p++) {
            cpu_gemm(true, false, piece_length(N, piece, p), K,
                     piece_length(R, DW_TERMS, r / DW_TERMS), f32(dy) + r * N + p * piece, N,
                     f32(x) + r * K, K, f32(dw) + p * piece * K, K, r > 0);
        }
    }
    if (tensor_exists(dbias)) {
        bias_gradient(f32(dbias), f32(dy), R, N);
    }
}
