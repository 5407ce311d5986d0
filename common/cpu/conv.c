// Convolution by GEMM: im2col writes what each output pixel sees, its patch, into a row. For shapes
// that Winograd's algorithm fits, conv_winograd.c does it in less than half the multiplications.
#include "conv.h"
#include "cpu.h"
#include <string.h>

// Weights are (out, in, ky, kx) in tensors, and a matrix (ky, kx, in; out) in here: the channels of
// a pixel lie side by side, so a patch is `kernel` runs of kernel * in_channels elements of the
// image. The last element of a patch is a 1, and the last row of the matrix is the bias.

struct shape {
    size_t out_height;
    size_t out_width;
    size_t pixels; // of the output: out_height * out_width
    size_t run; // kernel * in_channels
    size_t patch; // kernel * run + 1
};

static struct shape conv_shape(struct conv c) {
    CHECK(c.kernel >= 1 && c.height >= c.kernel && c.width >= c.kernel);
    struct shape s = {
        .out_height = c.height - c.kernel + 1,
        .out_width = c.width - c.kernel + 1,
        .run = c.kernel * c.in_channels,
    };
    s.pixels = s.out_height * s.out_width;
    s.patch = c.kernel * s.run + 1;
    return s;
}

static void check_tensors(struct tensor y, struct tensor x, struct tensor w, struct conv c) {
    struct shape s = conv_shape(c);
    CHECK(x.rows == y.rows && x.cols == c.height * c.width * c.in_channels);
    CHECK(y.cols == s.pixels * c.out_channels);
    CHECK(w.rows == c.out_channels && w.cols == s.patch - 1);
}

// Element (o, i, ky, kx) of the weights in the matrix, where tap = ky * kernel + kx.
static size_t matrix_index(size_t o, size_t i, size_t tap, struct conv c) {
    return (tap * c.in_channels + i) * c.out_channels + o;
}

static void weights_to_matrix(float *matrix, const float *w, struct conv c) {
    for (size_t o = 0; o < c.out_channels; o++) {
        for (size_t i = 0; i < c.in_channels; i++) {
            for (size_t tap = 0; tap < c.kernel * c.kernel; tap++) {
                matrix[matrix_index(o, i, tap, c)] = *w++;
            }
        }
    }
}

static void weights_from_matrix(float *w, const float *matrix, struct conv c) {
    for (size_t o = 0; o < c.out_channels; o++) {
        for (size_t i = 0; i < c.in_channels; i++) {
            for (size_t tap = 0; tap < c.kernel * c.kernel; tap++) {
                *w++ = matrix[matrix_index(o, i, tap, c)];
            }
        }
    }
}

struct tensor conv_add_chunks(struct tensor chunks) {
    struct tensor sum = tensor_view(chunks, 0, 1, chunks.cols);
    for (size_t i = 1; i < chunks.rows; i++) {
        ops_add(sum, tensor_view(chunks, i * chunks.cols, 1, chunks.cols));
    }
    return sum;
}

// The run of output pixel p that begins in row ky of its patch.
static size_t run_start(size_t p, size_t ky, struct conv c, struct shape s) {
    return ((p / s.out_width + ky) * c.width + p % s.out_width) * c.in_channels;
}

// patches (pixels, patch) of one image (height, width, in).
static void im2col(float *patches, const float *image, struct conv c, struct shape s) {
    for (size_t p = 0; p < s.pixels; p++) {
        for (size_t ky = 0; ky < c.kernel; ky++) {
            memcpy(patches, image + run_start(p, ky, c, s), s.run * sizeof *patches);
            patches += s.run;
        }
        *patches++ = 1.0f;
    }
}

// The transpose of im2col: each element of an image is the sum of its copies.
static void col2im(float *image, const float *patches, struct conv c, struct shape s) {
    memset(image, 0, c.height * c.width * c.in_channels * sizeof *image);
    for (size_t p = 0; p < s.pixels; p++) {
        for (size_t ky = 0; ky < c.kernel; ky++) {
            float *run = image + run_start(p, ky, c, s);
            for (size_t i = 0; i < s.run; i++) {
                run[i] += patches[i];
            }
            patches += s.run;
        }
        patches++;
    }
}

void ops_conv2d(struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                struct conv conv) {
    check_tensors(y, x, w, conv);
    CHECK(tensor_count(bias) == conv.out_channels);
    if (winograd_fits(conv)) {
        winograd_forward(y, x, w, bias, conv);
        return;
    }
    struct shape s = conv_shape(conv);
    size_t n = conv.out_channels;
    struct tensor matrix = tensor_alloc(s.patch, n, DTYPE_F32, MEM_WORKSPACE);
    weights_to_matrix(f32(matrix), f32(w), conv);
    memcpy(f32(matrix) + (s.patch - 1) * n, f32(bias), n * sizeof(float));
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < x.rows; b++) {
        struct tensor patches = tensor_alloc(s.pixels, s.patch, DTYPE_F32, MEM_WORKSPACE);
        im2col(f32(patches), f32(x) + b * x.cols, conv, s);
        cpu_gemm(false, false, s.pixels, n, s.patch, f32(patches), s.patch, f32(matrix), n,
                 f32(y) + b * y.cols, n, false);
        tensor_free(&patches);
    }
    tensor_free(&matrix);
}

void ops_conv2d_dx(struct tensor dx, struct tensor dy, struct tensor w, struct conv conv) {
    check_tensors(dy, dx, w, conv);
    if (winograd_fits(conv)) {
        winograd_dx(dx, dy, w, conv);
        return;
    }
    struct shape s = conv_shape(conv);
    size_t n = conv.out_channels;
    struct tensor matrix = tensor_alloc(s.patch, n, DTYPE_F32, MEM_WORKSPACE);
    weights_to_matrix(f32(matrix), f32(w), conv);
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < dx.rows; b++) {
        struct tensor patches = tensor_alloc(s.pixels, s.patch, DTYPE_F32, MEM_WORKSPACE);
        cpu_gemm(false, true, s.pixels, s.patch - 1, n, f32(dy) + b * dy.cols, n, f32(matrix), n,
                 f32(patches), s.patch, false);
        col2im(f32(dx) + b * dx.cols, f32(patches), conv, s);
        tensor_free(&patches);
    }
    tensor_free(&matrix);
}

// dmatrix (patch, out): the gradient of the weights, and of the bias in the last row, summed over
// the samples first … first+count-1.
static void chunk_dw(float *dmatrix, struct tensor dy, struct tensor x, size_t first, size_t count,
                     struct conv c, struct shape s) {
    struct tensor patches = tensor_alloc(s.pixels, s.patch, DTYPE_F32, MEM_WORKSPACE);
    for (size_t b = first; b < first + count; b++) {
        im2col(f32(patches), f32(x) + b * x.cols, c, s);
        cpu_gemm(true, false, s.patch, c.out_channels, s.pixels, f32(patches), s.patch,
                 f32(dy) + b * dy.cols, c.out_channels, dmatrix, c.out_channels, b > first);
    }
    tensor_free(&patches);
}

void ops_conv2d_dw(struct tensor dw, struct tensor dbias, struct tensor dy, struct tensor x,
                   struct conv conv) {
    check_tensors(dy, x, dw, conv);
    CHECK(tensor_count(dbias) == conv.out_channels);
    if (x.rows == 0) {
        ops_zero(dw);
        ops_zero(dbias);
        return;
    }
    if (winograd_fits(conv)) {
        winograd_dw(dw, dbias, dy, x, conv);
        return;
    }
    struct shape s = conv_shape(conv);
    size_t chunks = pieces(x.rows, CONV_CHUNK);
    size_t count = s.patch * conv.out_channels;
    struct tensor parts = tensor_alloc(chunks, count, DTYPE_F32, MEM_WORKSPACE);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < chunks; i++) {
        chunk_dw(f32(parts) + i * count, dy, x, i * CONV_CHUNK, piece_length(x.rows, CONV_CHUNK, i),
                 conv, s);
    }
    struct tensor sum = conv_add_chunks(parts);
    weights_from_matrix(f32(dw), f32(sum), conv);
    memcpy(f32(dbias), f32(sum) + count - conv.out_channels, conv.out_channels * sizeof(float));
    tensor_free(&parts);
}
