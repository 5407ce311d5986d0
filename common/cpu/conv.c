// Convolution by GEMM: im2col writes what each output pixel sees, its patch, into a row. For shapes
// that Winograd's algorithm fits, conv_winograd.c does it in less than half the multiplications.
#include "conv.h"
#include "cpu.h"
#include <string.h>

// Weights lie as (out, in, ky, kx) in tensors, and as (out, ky, kx, in) in here: the channels of a
// pixel lie side by side, so a patch is `kernel` runs of kernel * in_channels elements of the
// image.

struct shape {
    size_t out_height;
    size_t out_width;
    size_t pixels; // of the output: out_height * out_width
    size_t run; // kernel * in_channels
    size_t patch; // kernel * run
};

static struct shape conv_shape(struct tensor y, struct tensor x, struct tensor w, struct conv c) {
    CHECK(c.kernel >= 1 && c.height >= c.kernel && c.width >= c.kernel);
    struct shape s = {
        .out_height = c.height - c.kernel + 1,
        .out_width = c.width - c.kernel + 1,
        .run = c.kernel * c.in_channels,
        .patch = c.kernel * c.kernel * c.in_channels,
    };
    s.pixels = s.out_height * s.out_width;
    CHECK(x.cols == c.height * c.width * c.in_channels && y.cols == s.pixels * c.out_channels);
    CHECK(x.rows == y.rows && w.rows == c.out_channels && w.cols == s.patch);
    return s;
}

// to[o][ky][kx][i] = from[o][i][ky][kx], or back.
static void permute_weights(float *to, const float *from, struct conv c, bool back) {
    size_t taps = c.kernel * c.kernel;
    for (size_t o = 0; o < c.out_channels; o++) {
        for (size_t tap = 0; tap < taps; tap++) {
            for (size_t i = 0; i < c.in_channels; i++) {
                size_t outer = (o * taps + tap) * c.in_channels + i;
                size_t torch = (o * c.in_channels + i) * taps + tap;
                to[back ? torch : outer] = from[back ? outer : torch];
            }
        }
    }
}

static struct tensor permuted_weights(struct tensor w, struct conv c) {
    struct tensor permuted = tensor_alloc(w.rows, w.cols, DTYPE_F32, MEM_WORKSPACE);
    permute_weights(f32(permuted), f32(w), c, false);
    return permuted;
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
    }
}

void ops_conv2d(struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                struct conv conv) {
    struct shape s = conv_shape(y, x, w, conv);
    CHECK(tensor_count(bias) == conv.out_channels);
    if (winograd_fits(conv)) {
        winograd_forward(y, x, w, bias, conv);
        return;
    }
    struct tensor permuted = permuted_weights(w, conv);
    size_t n = conv.out_channels;
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < x.rows; b++) {
        struct tensor patches = tensor_alloc(s.pixels, s.patch, DTYPE_F32, MEM_WORKSPACE);
        float *out = f32(y) + b * y.cols;
        im2col(f32(patches), f32(x) + b * x.cols, conv, s);
        for (size_t p = 0; p < s.pixels; p++) {
            memcpy(out + p * n, f32(bias), n * sizeof *out);
        }
        cpu_gemm(false, true, s.pixels, n, s.patch, f32(patches), s.patch, f32(permuted), s.patch,
                 out, n, true);
        tensor_free(&patches);
    }
    tensor_free(&permuted);
}

void ops_conv2d_dx(struct tensor dx, struct tensor dy, struct tensor w, struct conv conv) {
    struct shape s = conv_shape(dy, dx, w, conv);
    if (winograd_fits(conv)) {
        winograd_dx(dx, dy, w, conv);
        return;
    }
    struct tensor permuted = permuted_weights(w, conv);
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < dx.rows; b++) {
        struct tensor patches = tensor_alloc(s.pixels, s.patch, DTYPE_F32, MEM_WORKSPACE);
        cpu_gemm(false, false, s.pixels, s.patch, conv.out_channels, f32(dy) + b * dy.cols,
                 conv.out_channels, f32(permuted), s.patch, f32(patches), s.patch, false);
        col2im(f32(dx) + b * dx.cols, f32(patches), conv, s);
        tensor_free(&patches);
    }
    tensor_free(&permuted);
}

// dw (out, patch) and dbias (out) of the samples first … first+count-1.
static void chunk_dw(float *dw, float *dbias, struct tensor dy, struct tensor x, size_t first,
                     size_t count, struct conv c, struct shape s) {
    struct tensor patches = tensor_alloc(s.pixels, s.patch, DTYPE_F32, MEM_WORKSPACE);
    size_t n = c.out_channels;
    memset(dbias, 0, n * sizeof *dbias);
    for (size_t b = 0; b < count; b++) {
        const float *g = f32(dy) + (first + b) * dy.cols;
        im2col(f32(patches), f32(x) + (first + b) * x.cols, c, s);
        cpu_gemm(true, false, n, s.patch, s.pixels, g, n, f32(patches), s.patch, dw, s.patch,
                 b > 0);
        for (size_t p = 0; p < s.pixels; p++) {
            for (size_t o = 0; o < n; o++) {
                dbias[o] += g[p * n + o];
            }
        }
    }
    tensor_free(&patches);
}

void ops_conv2d_dw(struct tensor dw, struct tensor dbias, struct tensor dy, struct tensor x,
                   struct conv conv) {
    struct shape s = conv_shape(dy, x, dw, conv);
    CHECK(tensor_count(dbias) == conv.out_channels);
    size_t chunks = pieces(x.rows, CONV_CHUNK);
    if (chunks == 0) {
        ops_zero(dw);
        ops_zero(dbias);
        return;
    }
    if (winograd_fits(conv)) {
        winograd_dw(dw, dbias, dy, x, conv);
        return;
    }
    // A row for each chunk: its dw, then its dbias.
    size_t count = tensor_count(dw);
    struct tensor parts = tensor_alloc(chunks, count + dbias.rows, DTYPE_F32, MEM_WORKSPACE);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < chunks; i++) {
        float *part = f32(parts) + i * parts.cols;
        chunk_dw(part, part + count, dy, x, i * CONV_CHUNK, piece_length(x.rows, CONV_CHUNK, i),
                 conv, s);
    }
    for (size_t i = 1; i < chunks; i++) {
        ops_add(tensor_view(parts, 0, 1, parts.cols),
                tensor_view(parts, i * parts.cols, 1, parts.cols));
    }
    permute_weights(f32(dw), f32(parts), conv, true);
    memcpy(f32(dbias), f32(parts) + count, conv.out_channels * sizeof(float));
    tensor_free(&parts);
}
