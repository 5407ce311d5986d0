// Convolution with 3x3 kernels by Winograd's algorithm F(2x2, 3x3): 16 multiplications for a tile
// of 2x2 outputs, instead of 36.
//
// A tile of outputs Y comes from a tile d of 4x4 inputs and a kernel g as
//
//     Y = A^T [ (G g G^T) . (B^T d B) ] A           . is element by element
//
//            1  0 -1  0           1    0    0
//     B^T =  0  1  1  0     G =  1/2  1/2  1/2      A^T =  1  1  1  0
//            0 -1  1  0          1/2 -1/2  1/2             0  1 -1 -1
//            0  1  0 -1           0    0    1
//
// With channels, [ ] is summed over the input channels. So it is 16 matrix products, one for each
// element of the 4x4 tiles: (tiles, in) times (in, out). The backward is the transpose of each
// step.
//
// Source: Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks", 2016, section 4. They
// find its rounding errors no larger than those of the plain sum.
#include "conv.h"
#include "cpu.h"
#include "vector.h"
#include <string.h>

enum {
    TAPS = 9, // elements of a kernel
    ELEMENTS = 16, // elements of a transformed tile
    BLOCK = 144, // tiles at a time, so that their transforms stay in the cache
    CHANNELS = 16, // channels must be a multiple of this: of LANES on any machine
};

bool winograd_fits(struct conv c) {
    return c.kernel == 3 && c.in_channels % CHANNELS == 0 && c.out_channels % CHANNELS == 0 &&
           c.in_channels > 0;
}

// ---- transforms --------------------------------------------------------------------------------
// Of LANES channels at a time. A line is a row or a column of a 4x4 tile, `step` apart in v.

static inline void input_line(lanes *v, int step) {
    lanes d0 = v[0], d1 = v[step], d2 = v[2 * step], d3 = v[3 * step];
    v[0] = d0 - d2;
    v[step] = d1 + d2;
    v[2 * step] = d2 - d1;
    v[3 * step] = d1 - d3;
}

static inline void input_line_back(lanes *v, int step) {
    lanes t0 = v[0], t1 = v[step], t2 = v[2 * step], t3 = v[3 * step];
    v[0] = t0;
    v[step] = t1 - t2 + t3;
    v[2 * step] = t1 + t2 - t0;
    v[3 * step] = -t3;
}

// From 4 to 2.
static inline void output_line(lanes *v, int step) {
    lanes m0 = v[0], m1 = v[step], m2 = v[2 * step], m3 = v[3 * step];
    v[0] = m0 + m1 + m2;
    v[step] = m1 - m2 - m3;
}

// From 2 to 4.
static inline void output_line_back(lanes *v, int step) {
    lanes y0 = v[0], y1 = v[step];
    v[step] = y0 + y1;
    v[2 * step] = y0 - y1;
    v[3 * step] = -y1;
}

// ---- weights -----------------------------------------------------------------------------------
// Transformed weights are 16 matrices. Few against the images, so there is no need for vectors.

// u (16, in, out), or (16, out, in) if out_first, from w (out, in*3*3).
static void transform_weights(float *u, const float *w, struct conv c, bool out_first) {
    size_t matrix = c.in_channels * c.out_channels;
#pragma omp parallel for schedule(static)
    for (size_t o = 0; o < c.out_channels; o++) {
        for (size_t i = 0; i < c.in_channels; i++) {
            const float *g = w + (o * c.in_channels + i) * TAPS;
            float *to = u + (out_first ? o * c.in_channels + i : i * c.out_channels + o);
            float t[4][3];
            for (int k = 0; k < 3; k++) {
                t[0][k] = g[k];
                t[1][k] = 0.5f * (g[k] + g[3 + k] + g[6 + k]);
                t[2][k] = 0.5f * (g[k] - g[3 + k] + g[6 + k]);
                t[3][k] = g[6 + k];
            }
            for (size_t r = 0; r < 4; r++) {
                to[(4 * r + 0) * matrix] = t[r][0];
                to[(4 * r + 1) * matrix] = 0.5f * (t[r][0] + t[r][1] + t[r][2]);
                to[(4 * r + 2) * matrix] = 0.5f * (t[r][0] - t[r][1] + t[r][2]);
                to[(4 * r + 3) * matrix] = t[r][2];
            }
        }
    }
}

// w (out, in*3*3) from u (16, out, in).
static void transform_weights_back(float *w, const float *u, struct conv c) {
    size_t matrix = c.in_channels * c.out_channels;
#pragma omp parallel for schedule(static)
    for (size_t j = 0; j < matrix; j++) {
        float t[3][4];
        for (size_t k = 0; k < 4; k++) {
            float u0 = u[k * matrix + j], u1 = u[(4 + k) * matrix + j];
            float u2 = u[(8 + k) * matrix + j], u3 = u[(12 + k) * matrix + j];
            t[0][k] = u0 + 0.5f * (u1 + u2);
            t[1][k] = 0.5f * (u1 - u2);
            t[2][k] = 0.5f * (u1 + u2) + u3;
        }
        float *g = w + j * TAPS;
        for (int r = 0; r < 3; r++) {
            g[3 * r + 0] = t[r][0] + 0.5f * (t[r][1] + t[r][2]);
            g[3 * r + 1] = 0.5f * (t[r][1] - t[r][2]);
            g[3 * r + 2] = 0.5f * (t[r][1] + t[r][2]) + t[r][3];
        }
    }
}

// ---- images ------------------------------------------------------------------------------------

// An image with channels last, and its tiles: `side` pixels wide and high, 2 pixels from one to the
// next. The last ones may reach beyond the image.
struct image {
    size_t height;
    size_t width;
    size_t channels;
    size_t tiles_x;
    size_t side; // 4 for inputs, 2 for outputs
};

// What a thread works in: the transforms of BLOCK tiles, as 16 matrices.
struct block {
    struct tensor memory;
    float *inputs; // 16 times (BLOCK, in), input_plane apart
    float *outputs; // 16 times (BLOCK, out), output_plane apart
    float *zeros; // (in or out, the larger): what is read outside of the image
    float *nowhere; // likewise: where writes outside of it go
    size_t input_plane;
    size_t output_plane;
};

static struct image input_image(struct conv c) {
    return (struct image){c.height, c.width, c.in_channels, (c.width - 1) / 2, 4};
}

static struct image output_image(struct conv c) {
    return (struct image){c.height - 2, c.width - 2, c.out_channels, (c.width - 1) / 2, 2};
}

static size_t tiles_of(struct conv c) {
    return ((c.height - 1) / 2) * ((c.width - 1) / 2);
}

static struct block block_alloc(struct conv c) {
    // A little more than BLOCK tiles: distances that are powers of two fall on the same few lines
    // of the cache.
    struct block b = {
        .input_plane = BLOCK * c.in_channels + CHANNELS,
        .output_plane = BLOCK * c.out_channels + CHANNELS,
    };
    size_t larger = c.in_channels > c.out_channels ? c.in_channels : c.out_channels;
    size_t count = ELEMENTS * (b.input_plane + b.output_plane) + 2 * larger;
    b.memory = tensor_alloc(1, count, DTYPE_F32, MEM_WORKSPACE);
    b.inputs = f32(b.memory);
    b.outputs = b.inputs + ELEMENTS * b.input_plane;
    b.zeros = b.outputs + ELEMENTS * b.output_plane;
    b.nowhere = b.zeros + larger;
    memset(b.zeros, 0, 2 * larger * sizeof *b.zeros);
    return b;
}

static void block_free(struct block *b) {
    tensor_free(&b->memory);
}

// The pixels of a tile, pixel (r, c) at [4 * r + c].
static inline void tile_pixels(float *pixels[16], float *image, struct image s, size_t tile,
                               float *outside) {
    size_t top = 2 * (tile / s.tiles_x), left = 2 * (tile % s.tiles_x);
    for (size_t r = 0; r < s.side; r++) {
        for (size_t c = 0; c < s.side; c++) {
            bool inside = top + r < s.height && left + c < s.width;
            float *pixel = image + ((top + r) * s.width + left + c) * s.channels;
            pixels[4 * r + c] = inside ? pixel : outside;
        }
    }
}

// inputs = B^T d B of `count` tiles from `first` on.
static void transform_inputs(struct block *b, float *x, struct image s, size_t first,
                             size_t count) {
    for (size_t t = 0; t < count; t++) {
        float *pixels[16];
        tile_pixels(pixels, x, s, first + t, b->zeros);
        for (size_t c = 0; c < s.channels; c += LANES) {
            lanes v[16];
            for (int k = 0; k < 16; k++) {
                v[k] = lanes_load(pixels[k] + c);
            }
            for (int k = 0; k < 4; k++) {
                input_line(v + k, 4);
            }
            for (int k = 0; k < 4; k++) {
                input_line(v + 4 * k, 1);
            }
            for (size_t k = 0; k < 16; k++) {
                lanes_store(b->inputs + k * b->input_plane + t * s.channels + c, v[k]);
            }
        }
    }
}

// dx += the transpose of that.
static void transform_inputs_back(float *dx, struct block *b, struct image s, size_t first,
                                  size_t count) {
    for (size_t t = 0; t < count; t++) {
        float *pixels[16];
        tile_pixels(pixels, dx, s, first + t, b->nowhere);
        for (size_t c = 0; c < s.channels; c += LANES) {
            lanes v[16];
            for (size_t k = 0; k < 16; k++) {
                v[k] = lanes_load(b->inputs + k * b->input_plane + t * s.channels + c);
            }
            for (int k = 0; k < 4; k++) {
                input_line_back(v + 4 * k, 1);
            }
            for (int k = 0; k < 4; k++) {
                input_line_back(v + k, 4);
            }
            for (int k = 0; k < 16; k++) {
                lanes_store(pixels[k] + c, lanes_load(pixels[k] + c) + v[k]);
            }
        }
    }
}

// y = A^T m A + bias of `count` tiles from `first` on.
static void transform_outputs(float *y, const float *bias, struct block *b, struct image s,
                              size_t first, size_t count) {
    for (size_t t = 0; t < count; t++) {
        float *pixels[16];
        tile_pixels(pixels, y, s, first + t, b->nowhere);
        for (size_t c = 0; c < s.channels; c += LANES) {
            lanes v[16];
            for (size_t k = 0; k < 16; k++) {
                v[k] = lanes_load(b->outputs + k * b->output_plane + t * s.channels + c);
            }
            for (int k = 0; k < 4; k++) {
                output_line(v + k, 4);
            }
            for (int k = 0; k < 2; k++) {
                output_line(v + 4 * k, 1);
                lanes_store(pixels[4 * k] + c, v[4 * k] + lanes_load(bias + c));
                lanes_store(pixels[4 * k + 1] + c, v[4 * k + 1] + lanes_load(bias + c));
            }
        }
    }
}

// outputs = A dy A^T.
static void transform_outputs_back(struct block *b, float *dy, struct image s, size_t first,
                                   size_t count) {
    for (size_t t = 0; t < count; t++) {
        float *pixels[16];
        tile_pixels(pixels, dy, s, first + t, b->zeros);
        for (size_t c = 0; c < s.channels; c += LANES) {
            lanes v[16];
            for (int k = 0; k < 2; k++) {
                v[4 * k] = lanes_load(pixels[4 * k] + c);
                v[4 * k + 1] = lanes_load(pixels[4 * k + 1] + c);
                output_line_back(v + 4 * k, 1);
            }
            for (int k = 0; k < 4; k++) {
                output_line_back(v + k, 4);
            }
            for (size_t k = 0; k < 16; k++) {
                lanes_store(b->outputs + k * b->output_plane + t * s.channels + c, v[k]);
            }
        }
    }
}

// ---- the three ops -----------------------------------------------------------------------------

static void sample_forward(float *y, float *x, const float *u, const float *bias, struct block *b,
                           struct conv c) {
    size_t in = c.in_channels, out = c.out_channels;
    for (size_t i = 0; i < pieces(tiles_of(c), BLOCK); i++) {
        size_t count = piece_length(tiles_of(c), BLOCK, i);
        transform_inputs(b, x, input_image(c), i * BLOCK, count);
        for (size_t k = 0; k < ELEMENTS; k++) {
            cpu_gemm(false, false, count, out, in, b->inputs + k * b->input_plane, in,
                     u + k * in * out, out, b->outputs + k * b->output_plane, out, false);
        }
        transform_outputs(y, bias, b, output_image(c), i * BLOCK, count);
    }
}

void winograd_forward(struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                      struct conv c) {
    struct tensor u =
        tensor_alloc(ELEMENTS, c.in_channels * c.out_channels, DTYPE_F32, MEM_WORKSPACE);
    transform_weights(f32(u), f32(w), c, false);
#pragma omp parallel
    {
        struct block b = block_alloc(c);
#pragma omp for schedule(static)
        for (size_t i = 0; i < x.rows; i++) {
            sample_forward(f32(y) + i * y.cols, f32(x) + i * x.cols, f32(u), f32(bias), &b, c);
        }
        block_free(&b);
    }
    tensor_free(&u);
}

static void sample_dx(float *dx, float *dy, const float *u, struct block *b, struct conv c) {
    size_t in = c.in_channels, out = c.out_channels;
    memset(dx, 0, c.height * c.width * in * sizeof *dx);
    for (size_t i = 0; i < pieces(tiles_of(c), BLOCK); i++) {
        size_t count = piece_length(tiles_of(c), BLOCK, i);
        transform_outputs_back(b, dy, output_image(c), i * BLOCK, count);
        for (size_t k = 0; k < ELEMENTS; k++) {
            cpu_gemm(false, false, count, in, out, b->outputs + k * b->output_plane, out,
                     u + k * in * out, in, b->inputs + k * b->input_plane, in, false);
        }
        transform_inputs_back(dx, b, input_image(c), i * BLOCK, count);
    }
}

void winograd_dx(struct tensor dx, struct tensor dy, struct tensor w, struct conv c) {
    struct tensor u =
        tensor_alloc(ELEMENTS, c.in_channels * c.out_channels, DTYPE_F32, MEM_WORKSPACE);
    transform_weights(f32(u), f32(w), c, true);
#pragma omp parallel
    {
        struct block b = block_alloc(c);
#pragma omp for schedule(static)
        for (size_t i = 0; i < dx.rows; i++) {
            sample_dx(f32(dx) + i * dx.cols, f32(dy) + i * dy.cols, f32(u), &b, c);
        }
        block_free(&b);
    }
    tensor_free(&u);
}

// sums (16, out, in) = or += a sample's dw, transformed; behind it (out) of dbias.
static void sample_dw(float *sums, float *dy, float *x, struct block *b, struct conv c, bool add) {
    size_t in = c.in_channels, out = c.out_channels;
    float *dbias = sums + ELEMENTS * in * out;
    for (size_t i = 0; i < pieces(tiles_of(c), BLOCK); i++) {
        size_t count = piece_length(tiles_of(c), BLOCK, i);
        transform_inputs(b, x, input_image(c), i * BLOCK, count);
        transform_outputs_back(b, dy, output_image(c), i * BLOCK, count);
        for (size_t k = 0; k < ELEMENTS; k++) {
            cpu_gemm(true, false, out, in, count, b->outputs + k * b->output_plane, out,
                     b->inputs + k * b->input_plane, in, sums + k * in * out, in, add || i > 0);
        }
        // Element (1, 1) of A dy A^T is the sum of a tile.
        for (size_t t = 0; t < count; t++) {
            const float *tile = b->outputs + 5 * b->output_plane + t * out;
            for (size_t o = 0; o < out; o++) {
                dbias[o] = (add || i + t > 0 ? dbias[o] : 0.0f) + tile[o];
            }
        }
    }
}

void winograd_dw(struct tensor dw, struct tensor dbias, struct tensor dy, struct tensor x,
                 struct conv c) {
    size_t chunks = pieces(x.rows, CONV_CHUNK);
    size_t count = ELEMENTS * tensor_count(dw) / TAPS;
    struct tensor sums = tensor_alloc(chunks, count + c.out_channels, DTYPE_F32, MEM_WORKSPACE);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < chunks; i++) {
        struct block b = block_alloc(c);
        for (size_t j = 0; j < piece_length(x.rows, CONV_CHUNK, i); j++) {
            size_t sample = i * CONV_CHUNK + j;
            sample_dw(f32(sums) + i * sums.cols, f32(dy) + sample * dy.cols,
                      f32(x) + sample * x.cols, &b, c, j > 0);
        }
        block_free(&b);
    }
    struct tensor total = conv_add_chunks(sums);
    transform_weights_back(f32(dw), f32(total), c);
    memcpy(f32(dbias), f32(total) + count, c.out_channels * sizeof(float));
    tensor_free(&sums);
}
