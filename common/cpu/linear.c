// Linear layers: the matrix products of a model, cut into pieces of fixed size, one library call
// each.
#include "cpu.h"
#include "ops.h"

enum {
    PANEL_COLS = 1024, // columns of w^T that are made at a time
    TRANSPOSE_TILE = 32,
    BIAS_COLS = 64, // columns that one task adds up
    DW_ROWS = 96, // rows of dw that one task makes
};

static void check_linear(struct tensor y, struct tensor x, struct tensor w) {
    CHECK(y.rows == x.rows && y.cols == w.rows && x.cols == w.cols);
}

// out (cols, rows) = in^T, where in is (rows, cols) and dense.
static void transpose(float *out, const float *in, size_t rows, size_t cols) {
    size_t row_tiles = pieces(rows, TRANSPOSE_TILE), col_tiles = pieces(cols, TRANSPOSE_TILE);
#pragma omp parallel for collapse(2) schedule(static)
    for (size_t ti = 0; ti < row_tiles; ti++) {
        for (size_t tj = 0; tj < col_tiles; tj++) {
            size_t i0 = ti * TRANSPOSE_TILE, ni = piece_length(rows, TRANSPOSE_TILE, ti);
            size_t j0 = tj * TRANSPOSE_TILE, nj = piece_length(cols, TRANSPOSE_TILE, tj);
            for (size_t j = j0; j < j0 + nj; j++) {
                for (size_t i = i0; i < i0 + ni; i++) {
                    out[j * rows + i] = in[i * cols + j];
                }
            }
        }
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

void ops_linear_dw(struct tensor dw, struct tensor dbias, struct tensor dy, struct tensor x) {
    check_linear(dy, x, dw);
    CHECK(!tensor_exists(dbias) || tensor_count(dbias) == dw.rows);
    size_t N = dw.rows, K = dw.cols, R = dy.rows;
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < pieces(N, DW_ROWS); p++) {
        size_t rows = piece_length(N, DW_ROWS, p);
        cpu_gemm(true, false, rows, K, R, f32(dy) + p * DW_ROWS, N, f32(x), K,
                 f32(dw) + p * DW_ROWS * K, K, false);
    }
    if (tensor_exists(dbias)) {
        bias_gradient(f32(dbias), f32(dy), R, N);
    }
}
