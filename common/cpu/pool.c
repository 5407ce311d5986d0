// ReLU and max-pooling.
#include "cpu.h"
#include "ops.h"
#include "vector.h"
#include <string.h>

void ops_relu(struct tensor x) {
    float *a = f32(x);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < tensor_count(x); i++) {
        a[i] = 0.0f > a[i] ? 0.0f : a[i]; // a comparison with NaN is false
    }
}

void ops_relu_backward(struct tensor dy, struct tensor y) {
    CHECK(tensor_count(dy) == tensor_count(y));
    float *g = f32(dy);
    const float *a = f32(y);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < tensor_count(y); i++) {
        g[i] = a[i] > 0.0f ? g[i] : 0.0f;
    }
}

// ---- max-pooling -------------------------------------------------------------------------------
// Channels are last in x and first in y: what lies side by side in one lies far apart in the other.
// So LANES windows are pooled with the channels last, in the order of memory, into tiles of LANES
// channels, and the tiles are transposed while they are in the cache. Without them each store would
// open another cache line.

typedef int32_t int_lanes __attribute__((vector_size(VECTOR_BYTES)));

struct tile {
    float value[LANES][LANES]; // (windows, channels)
    int32_t winner[LANES][LANES];
};

enum { TILES = 4 }; // at a time: as many channels of a window are pooled in one go

struct pool {
    size_t channels;
    size_t right; // distance of a pixel of x to the one on its right
    size_t below; // … to the one below
    size_t windows_x; // in a row of y
    size_t windows; // in a channel of y
};

static struct pool pool_shape(size_t channels, size_t height, size_t width) {
    return (struct pool){
        .channels = channels,
        .right = channels,
        .below = width * channels,
        .windows_x = width / 2,
        .windows = (width / 2) * (height / 2),
    };
}

// The first element of window i of a sample.
static size_t window_start(struct pool p, size_t i) {
    return 2 * (i / p.windows_x) * p.below + 2 * (i % p.windows_x) * p.right;
}

static inline lanes choose(int_lanes condition, lanes yes, lanes no) {
    return (lanes)((condition & (int_lanes)yes) | (~condition & (int_lanes)no));
}

// Some channels of a pixel; n is LANES but for the last ones.
static inline lanes load_channels(const float *x, size_t n) {
    lanes v = {0};
    if (n == LANES) {
        return lanes_load(x);
    }
    memcpy(&v, x, n * sizeof *x);
    return v;
}

static inline void store_channels(float *x, lanes v, size_t n) {
    if (n == LANES) {
        lanes_store(x, v);
    } else {
        memcpy(x, &v, n * sizeof *x);
    }
}

// Pools a window, from x on, into row i of the tile. The first of equals wins; a NaN counts as
// larger than any number.
static inline void pool_window(struct tile *t, size_t i, const float *x, struct pool p, size_t n) {
    const float *others[] = {x + p.right, x + p.below, x + p.below + p.right};
    lanes best = load_channels(x, n);
    int_lanes winner = {0};
    for (int32_t k = 0; k < 3; k++) {
        lanes a = load_channels(others[k], n);
        int_lanes larger = (a > best) | ((a != a) & (best == best));
        best = choose(larger, a, best);
        winner = (larger & (k + 1)) | (~larger & winner);
    }
    lanes_store(t->value[i], best);
    memcpy(t->winner[i], &winner, sizeof winner);
}

// y and winner of nw windows and nc channels = the tile, transposed.
static inline void tile_transpose(float *y, uint8_t *winner, const struct tile *t, struct pool p,
                                  size_t nw, size_t nc) {
    for (size_t j = 0; j < nc; j++) {
        for (size_t i = 0; i < nw; i++) {
            y[j * p.windows + i] = t->value[i][j];
            winner[j * p.windows + i] = (uint8_t)t->winner[i][j];
        }
    }
}

// The nw windows from w on, for the nc channels from c on.
static void pool_windows(float *y, uint8_t *winner, const float *x, struct pool p, size_t w,
                         size_t nw, size_t c, size_t nc) {
    struct tile t[TILES];
    for (size_t i = 0; i < nw; i++) {
        const float *pixel = x + window_start(p, w + i) + c;
        for (size_t k = 0; k < pieces(nc, LANES); k++) {
            pool_window(&t[k], i, pixel + k * LANES, p, piece_length(nc, LANES, k));
        }
    }
    for (size_t k = 0; k < pieces(nc, LANES); k++) {
        size_t first = (c + k * LANES) * p.windows + w;
        size_t n = piece_length(nc, LANES, k);
        if (nw == LANES) {
            tile_transpose(y + first, winner + first, &t[k], p, LANES, n); // nw is a constant here
        } else {
            tile_transpose(y + first, winner + first, &t[k], p, nw, n);
        }
    }
}

static void pool_sample(float *y, uint8_t *winner, const float *x, struct pool p) {
    for (size_t w = 0; w < p.windows; w += LANES) {
        size_t nw = piece_length(p.windows, LANES, w / LANES);
        for (size_t c = 0; c < p.channels; c += TILES * LANES) {
            size_t nc = piece_length(p.channels, TILES * LANES, c / (TILES * LANES));
            pool_windows(y, winner, x, p, w, nw, c, nc);
        }
    }
}

void ops_max_pool(struct tensor y, struct tensor winner, struct tensor x, size_t channels,
                  size_t height, size_t width) {
    struct pool p = pool_shape(channels, height, width);
    CHECK(x.cols == height * width * channels && y.cols == p.windows * channels);
    CHECK(y.rows == x.rows && winner.rows == x.rows && winner.cols == y.cols);
    float *out = f32(y);
    uint8_t *out_winner = u8(winner);
    const float *in = f32(x);
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < x.rows; b++) {
        pool_sample(out + b * y.cols, out_winner + b * y.cols, in + b * x.cols, p);
    }
}

// Stores the four pixels of a window.
static inline void unpool_window(const struct tile *t, size_t i, float *dx, struct pool p,
                                 size_t n) {
    float *pixels[] = {dx, dx + p.right, dx + p.below, dx + p.below + p.right};
    lanes value = lanes_load(t->value[i]);
    int_lanes winner;
    memcpy(&winner, t->winner[i], sizeof winner);
    for (int32_t k = 0; k < 4; k++) {
        store_channels(pixels[k], choose(winner == k, value, (lanes){0}), n);
    }
}

static inline void tile_transpose_back(struct tile *t, const float *dy, const uint8_t *winner,
                                       struct pool p, size_t nw, size_t nc) {
    for (size_t j = 0; j < nc; j++) {
        for (size_t i = 0; i < nw; i++) {
            t->value[i][j] = dy[j * p.windows + i];
            t->winner[i][j] = winner[j * p.windows + i];
        }
    }
}

static void unpool_windows(float *dx, const float *dy, const uint8_t *winner, struct pool p,
                           size_t w, size_t nw, size_t c, size_t nc) {
    struct tile t[TILES];
    for (size_t k = 0; k < pieces(nc, LANES); k++) {
        size_t first = (c + k * LANES) * p.windows + w;
        size_t n = piece_length(nc, LANES, k);
        if (nw == LANES) {
            tile_transpose_back(&t[k], dy + first, winner + first, p, LANES, n);
        } else {
            tile_transpose_back(&t[k], dy + first, winner + first, p, nw, n);
        }
    }
    for (size_t i = 0; i < nw; i++) {
        float *pixel = dx + window_start(p, w + i) + c;
        for (size_t k = 0; k < pieces(nc, LANES); k++) {
            unpool_window(&t[k], i, pixel + k * LANES, p, piece_length(nc, LANES, k));
        }
    }
}

static void unpool_sample(float *dx, const float *dy, const uint8_t *winner, struct pool p) {
    for (size_t w = 0; w < p.windows; w += LANES) {
        size_t nw = piece_length(p.windows, LANES, w / LANES);
        for (size_t c = 0; c < p.channels; c += TILES * LANES) {
            size_t nc = piece_length(p.channels, TILES * LANES, c / (TILES * LANES));
            unpool_windows(dx, dy, winner, p, w, nw, c, nc);
        }
    }
}

// An odd height or width leaves a last row or column that is in no window.
static void zero_rest(float *dx, struct pool p, size_t height) {
    for (size_t y = 0; y < height; y++) {
        size_t in_windows = y < height / 2 * 2 ? 2 * p.windows_x * p.right : 0;
        memset(dx + y * p.below + in_windows, 0, (p.below - in_windows) * sizeof *dx);
    }
}

void ops_max_pool_backward(struct tensor dx, struct tensor dy, struct tensor winner,
                           size_t channels, size_t height, size_t width) {
    struct pool p = pool_shape(channels, height, width);
    CHECK(dx.cols == height * width * channels && dy.cols == p.windows * channels);
    CHECK(dy.rows == dx.rows && winner.rows == dx.rows && winner.cols == dy.cols);
    float *out = f32(dx);
    const float *in = f32(dy);
    const uint8_t *in_winner = u8(winner);
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < dx.rows; b++) {
        unpool_sample(out + b * dx.cols, in + b * dy.cols, in_winner + b * dy.cols, p);
        zero_rest(out + b * dx.cols, p, height);
    }
}
