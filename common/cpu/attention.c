// Causal attention in blocks, forward and backward, without ever holding the T x T scores.
//
// For one head, with the queries already divided by sqrt(D):
//   S = Q K^T          scores, only for keys j <= query i
//   P = exp(S - lse)   softmax; lse_i = log sum_j exp(S_ij)
//   Y = P V
//   dV = P^T dY        dP = dY V^T        dS = P * (dP - delta), delta_i = sum_d dY_id Y_id
//   dQ = dS K          dK = dS^T Q
//
// Queries go in blocks of QUERIES, keys in blocks of KEYS, so that a block of S stays in the cache.
// Forward does not know lse in advance: it keeps each row's largest score and sum so far, and
// rescales what it has of Y when a later block of keys raises the largest ("online softmax").
// Backward makes S again from lse, block by block.
//
//        keys 0      KEYS     2 KEYS
//   queries +---------+---------+       A row group is GROUP queries. Columns right of the diagonal
//       0   |x . . . .|         |       are skipped in steps of a vector (LANES), both in making S
//           |x x x . .|         |       and as terms of sums over keys or queries. In the step that
//   QUERIES |x x x x x|x . . . .|       the diagonal cuts, S is -infinity and P is 0.
//           +---------+---------+
//
// All six products run through one register tile: GROUP rows by up to TILE vectors of C, in
// registers over the whole sum. Its right operand has contiguous rows, so K^T and V^T are made once
// for each head; of its left operand only single elements are read, so P^T costs nothing.
//
// A task is one sample's KV head with all query heads that share it: it alone writes its part of
// dK and dV, whatever the number of threads.
// Sources: Dao et al., "FlashAttention", 2022, algorithms 1 and 4; Milakov & Gimelshein, "Online
// normalizer calculation for softmax", 2018.
#include "cpu.h"
#include "ops.h"
#include "vector.h"
#include <math.h>
#include <omp.h>
#include <string.h>

#if defined(__AVX512F__)
enum { GROUP = 8 }; // GROUP * TILE sums fit into the registers, with room for a row of TILE
#else
enum { GROUP = 4 };
#endif

enum {
    TILE = LANES == 8 ? 2 : 3,
    QUERIES = 64,
    KEYS = 256, // these two are multiples of LANES, which is one of GROUP
};

struct shape {
    size_t T; // positions per sample
    size_t D; // head dimension
    size_t heads;
    size_t kv_heads;
    size_t padded_T; // both rounded up to LANES; the padding is 0
    size_t padded_D;
};

static size_t round_up(size_t n, size_t step) {
    return (n + step - 1) / step * step;
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

// ---- the register tile -------------------------------------------------------------------------

// A matrix as the left operand: element (i, k) at data[i * row_step + k * term_step].
struct left {
    const float *data;
    size_t row_step;
    size_t term_step;
};

// Rows of C or of a right operand, contiguous.
struct rows {
    float *data;
    size_t step;
};

// c (GROUP, vectors * LANES) = or += the sum over `terms` of a (GROUP, terms) b (terms, the same).
static inline __attribute__((always_inline)) void tile(struct rows c, struct left a, struct rows b,
                                                       size_t terms, int vectors, bool add) {
    lanes sum[GROUP][TILE];
    UNROLL
    for (int i = 0; i < GROUP; i++) {
        UNROLL
        for (int v = 0; v < vectors; v++) {
            sum[i][v] = add ? lanes_load(c.data + (size_t)i * c.step + v * LANES) : (lanes){0};
        }
    }
    for (size_t k = 0; k < terms; k++) {
        lanes right[TILE];
        UNROLL
        for (int v = 0; v < vectors; v++) {
            right[v] = lanes_load(b.data + k * b.step + v * LANES);
        }
        UNROLL
        for (int i = 0; i < GROUP; i++) {
            lanes one = lanes_all(a.data[(size_t)i * a.row_step + k * a.term_step]);
            UNROLL
            for (int v = 0; v < vectors; v++) {
                sum[i][v] += one * right[v];
            }
        }
    }
    UNROLL
    for (int i = 0; i < GROUP; i++) {
        UNROLL
        for (int v = 0; v < vectors; v++) {
            lanes_store(c.data + (size_t)i * c.step + v * LANES, sum[i][v]);
        }
    }
}

// Sizes that the compiler knows keep the sums in registers.
static inline __attribute__((always_inline)) void
tile_of_width(struct rows c, struct left a, struct rows b, size_t terms, size_t vectors, bool add) {
    if (vectors == 1) {
        tile(c, a, b, terms, 1, add);
    } else if (vectors == 2) {
        tile(c, a, b, terms, 2, add);
    } else if (vectors == 3) {
        tile(c, a, b, terms, TILE, add);
    }
}

static void tile_plain(struct rows c, const float *a, size_t a_step, struct rows b, size_t terms,
                       size_t vectors, bool add) {
    tile_of_width(c, (struct left){a, a_step, 1}, b, terms, vectors, add);
}

static void tile_transposed(struct rows c, const float *a, size_t a_step, struct rows b,
                            size_t terms, size_t vectors, bool add) {
    tile_of_width(c, (struct left){a, 1, a_step}, b, terms, vectors, add);
}

static struct rows at(struct rows r, size_t i, size_t j) {
    return (struct rows){r.data + i * r.step + j, r.step};
}

// ---- products over a block ---------------------------------------------------------------------

// Queries [query, query + queries) against keys [key, key + keys).
struct block {
    size_t query;
    size_t queries;
    size_t key;
    size_t keys;
};

// How many columns of the block's row i are made: those that query i sees, rounded up to LANES. The
// same for all rows of a group.
static size_t width(struct block b, size_t i) {
    size_t seen = b.query + i + 1 > b.key ? b.query + i + 1 - b.key : 0;
    return round_up(smaller(seen, b.keys), LANES);
}

// s (queries, keys) = x (queries, D) yt (D, keys), where the diagonal allows.
static void multiply_scores(struct rows s, struct rows x, struct rows yt, struct block b,
                            size_t D) {
    for (size_t j = 0; j < b.keys; j += TILE * LANES) {
        for (size_t i = 0; i < b.queries; i += GROUP) {
            size_t w = width(b, i);
            if (w > j) {
                tile_plain(at(s, i, j), at(x, i, 0).data, x.step, at(yt, 0, j), D,
                           smaller((w - j) / LANES, TILE), false);
            }
        }
    }
}

// out (queries, padded D) = or += p (queries, keys) x (keys, padded D), over the keys that each
// query sees.
static void multiply_rows(struct rows out, struct rows p, struct rows x, struct block b,
                          size_t padded_D, bool add) {
    for (size_t d = 0; d < padded_D; d += TILE * LANES) {
        size_t vectors = smaller((padded_D - d) / LANES, TILE);
        for (size_t i = 0; i < b.queries; i += GROUP) {
            tile_plain(at(out, i, d), at(p, i, 0).data, p.step, at(x, 0, d),
                       smaller(width(b, i), b.keys), vectors, add);
        }
    }
}

// out (keys, padded D) = or += p^T (keys, queries) x (queries, padded D), over the queries that see
// each key.
static void multiply_columns(struct rows out, struct rows p, struct rows x, struct block b,
                             size_t padded_D, bool add) {
    for (size_t d = 0; d < padded_D; d += TILE * LANES) {
        size_t vectors = smaller((padded_D - d) / LANES, TILE);
        for (size_t j = 0; j < b.keys; j += GROUP) {
            size_t first = b.key + j > b.query ? b.key + j - b.query : 0;
            first = smaller(first, b.queries);
            tile_transposed(at(out, j, d), at(p, first, j).data, p.step, at(x, first, d),
                            b.queries - first, vectors, add);
        }
    }
}

// ---- packing -----------------------------------------------------------------------------------

enum {
    AHEAD = 12, // rows between asking for one and using it
    LINE = 16, // floats in a line of the cache
};

// A head's rows are short and far apart, which the processor's own prefetchers do not follow.
static void prefetch_row(const float *x, size_t D) {
    for (size_t d = 0; d < D; d += LINE) {
        __builtin_prefetch(x + d);
    }
}

static void prefetch_row_to_write(const float *x, size_t D) {
    for (size_t d = 0; d < D; d += LINE) {
        __builtin_prefetch(x + d, 1);
    }
}

// out (count rounded up, padded D) = factor * x; padding 0.
static void pack(struct rows out, const float *x, size_t x_step, size_t count, size_t D,
                 float factor) {
    for (size_t i = 0; i < count; i++) {
        prefetch_row(x + smaller(i + AHEAD, count - 1) * x_step, D);
        for (size_t d = 0; d < D; d += LANES) {
            lanes_store(at(out, i, d).data, lanes_load_part(x + i * x_step + d, D - d) * factor);
        }
    }
    size_t end = round_up(count, LANES);
    memset(at(out, count, 0).data, 0, (end - count) * out.step * sizeof(float));
}

// out (D, count rounded up) = x^T, where x is (count, D); padding 0. Squares of LANES x LANES.
static void pack_transposed(struct rows out, const float *x, size_t x_step, size_t count,
                            size_t D) {
    lanes square[LANES];
    for (size_t i = 0; i < count; i += LANES) {
        for (size_t d = 0; d < D; d += LANES) {
            for (size_t l = 0; l < LANES; l++) {
                bool inside = i + l < count;
                __builtin_prefetch(x + smaller(i + l + LANES, count - 1) * x_step + d);
                square[l] = inside ? lanes_load_part(x + (i + l) * x_step + d, D - d) : (lanes){0};
            }
            lanes_transpose(square);
            for (size_t l = 0; l < smaller(LANES, D - d); l++) {
                lanes_store(at(out, d + l, i).data, square[l]);
            }
        }
    }
}

// x (count, D) = factor * in, and times factors[row] if there are any.
static void unpack(float *x, size_t x_step, struct rows in, size_t count, size_t D, float factor,
                   const float *factors) {
    for (size_t i = 0; i < count; i++) {
        float f = factors != NULL ? factors[i] : factor;
        prefetch_row_to_write(x + smaller(i + AHEAD, count - 1) * x_step, D);
        for (size_t d = 0; d < D; d += LANES) {
            lanes_store_part(x + i * x_step + d, D - d, lanes_load(at(in, i, d).data) * f);
        }
    }
}

// ---- one thread's workspace --------------------------------------------------------------------

struct work {
    struct rows kt; // (D, padded T)
    struct rows vt; // (D, padded T), backward only
    struct rows k; // (padded T, padded D), backward only
    struct rows v; // (padded T, padded D), forward only
    struct rows dk; // (padded T, padded D), backward only
    struct rows dv;
    struct rows q; // (QUERIES, padded D), divided by sqrt(D)
    struct rows dy; // (QUERIES, padded D), backward only
    struct rows out; // (QUERIES, padded D): y or dq
    struct rows p; // (QUERIES, KEYS): scores, then probabilities
    struct rows ds; // (QUERIES, KEYS), backward only
    float *max; // (QUERIES) so far; in backward lse
    float *sum; // (QUERIES) so far; in backward delta
};

// A matrix from the buffer at *next, or only its size if *next is NULL.
static struct rows take(float **next, size_t *count, size_t rows, size_t step) {
    struct rows r = {*next, step};
    *count += rows * step;
    if (*next != NULL) {
        *next += rows * step;
    }
    return r;
}

// Rows that are a power of two apart share few places in the cache: an odd number of lines spreads
// them.
static size_t odd_lines(size_t count) {
    size_t lines = pieces(count, LINE);
    return (lines % 2 == 0 ? lines + 1 : lines) * LINE;
}

// Lays the matrices out from `buffer` on; returns how many floats they take (buffer may be NULL).
static size_t lay_out(struct work *w, float *buffer, struct shape s, bool backward) {
    float *next = buffer;
    size_t count = 0, wide = odd_lines(s.padded_T), block = odd_lines(smaller(KEYS, s.padded_T));
    w->kt = take(&next, &count, s.D, wide);
    if (backward) {
        w->vt = take(&next, &count, s.D, wide);
        w->k = take(&next, &count, s.padded_T, s.padded_D);
        w->dk = take(&next, &count, s.padded_T, s.padded_D);
        w->dv = take(&next, &count, s.padded_T, s.padded_D);
        w->dy = take(&next, &count, QUERIES, s.padded_D);
        w->ds = take(&next, &count, QUERIES, block);
    } else {
        w->v = take(&next, &count, s.padded_T, s.padded_D);
    }
    w->q = take(&next, &count, QUERIES, s.padded_D);
    w->out = take(&next, &count, QUERIES, s.padded_D);
    w->p = take(&next, &count, QUERIES, block);
    w->max = take(&next, &count, QUERIES, 1).data;
    w->sum = take(&next, &count, QUERIES, 1).data;
    return round_up(count, LINE);
}

// ---- forward -----------------------------------------------------------------------------------

// Hides keys in the future from rows [i, i + LANES) of the block: -infinity from the diagonal to
// the end of the last vector, the only one that it cuts. Returns the rows' width.
static size_t mask_scores(struct rows p, struct block b, size_t i) {
    size_t n = width(b, i);
    for (size_t l = 0; l < LANES; l++) {
        size_t seen = smaller(b.query + i + l + 1 - b.key, b.keys);
        float *last = at(p, i + l, n - LANES).data;
        lanes_mask visible = lanes_below(seen - (n - LANES));
        lanes_store(last, lanes_select(visible, lanes_load(last), lanes_all(-INFINITY)));
    }
    return n;
}

// Rows [i, i + LANES) of a block of scores become exp(score - largest so far); what these rows have
// of y is rescaled to that.
static void softmax_rows(struct work *w, struct block b, size_t i, size_t padded_D) {
    size_t n = mask_scores(w->p, b, i);
    lanes part[LANES];
    for (size_t l = 0; l < LANES; l++) {
        const float *p = at(w->p, i + l, 0).data;
        part[l] = lanes_load(p);
        for (size_t j = LANES; j < n; j += LANES) {
            part[l] = lanes_larger(lanes_load(p + j), part[l]);
        }
    }
    lanes before = lanes_load(w->max + i), max = lanes_larger(lanes_max_each(part), before);
    for (size_t l = 0; l < LANES; l++) {
        float *p = at(w->p, i + l, 0).data;
        part[l] = (lanes){0};
        for (size_t j = 0; j < n; j += LANES) {
            lanes probability = lanes_exp(lanes_load(p + j) - max[l]);
            lanes_store(p + j, probability);
            part[l] += probability;
        }
    }
    lanes factor = lanes_exp(before - max);
    lanes_store(w->max + i, max);
    lanes_store(w->sum + i, lanes_load(w->sum + i) * factor + lanes_sum_each(part));
    for (size_t l = 0; l < LANES && b.key > 0; l++) {
        float *out = at(w->out, i + l, 0).data;
        for (size_t d = 0; d < padded_D; d += LANES) {
            lanes_store(out + d, lanes_load(out + d) * factor[l]);
        }
    }
}

// Queries [query, query + count) of one head: q and y point at their first elements.
static void forward_queries(struct work *w, struct shape s, float *y, float *lse, const float *q,
                            size_t query, size_t count) {
    size_t C = s.heads * s.D;
    struct block b = {.query = query, .queries = round_up(count, LANES)};
    pack(w->q, q, C, count, s.D, 1.0f / sqrtf((float)s.D));
    for (size_t i = 0; i < b.queries; i++) {
        w->max[i] = -INFINITY;
        w->sum[i] = 0;
    }
    for (b.key = 0; b.key < query + count; b.key += KEYS) {
        b.keys = smaller(KEYS, query + count - b.key);
        multiply_scores(w->p, w->q, at(w->kt, 0, b.key), b, s.D);
        for (size_t i = 0; i < b.queries; i += LANES) {
            softmax_rows(w, b, i, s.padded_D);
        }
        multiply_rows(w->out, w->p, at(w->v, b.key, 0), b, s.padded_D, b.key > 0);
    }
    for (size_t i = 0; i < count; i++) {
        lse[i * s.heads] = w->max[i] + logf(w->sum[i]);
        w->sum[i] = 1.0f / w->sum[i];
    }
    unpack(y, C, w->out, count, s.D, 1.0f, w->sum);
}

static void check_shape(struct shape s, struct tensor q, struct tensor k, struct tensor v) {
    CHECK(s.D > 0 && q.cols % s.D == 0 && k.cols % s.D == 0 && s.kv_heads > 0);
    CHECK(s.heads % s.kv_heads == 0 && v.rows == k.rows && v.cols == k.cols && k.rows == q.rows);
    CHECK(q.rows == 0 || (s.T > 0 && q.rows % s.T == 0));
}

static struct shape make_shape(struct tensor q, struct tensor k, struct tensor v, size_t T,
                               size_t D) {
    CHECK(D > 0);
    struct shape s = {
        .T = T,
        .D = D,
        .heads = q.cols / D,
        .kv_heads = k.cols / D,
        .padded_T = round_up(T, LANES),
        .padded_D = round_up(D, LANES),
    };
    check_shape(s, q, k, v);
    return s;
}

void ops_attention(struct tensor y, struct tensor lse, struct tensor q, struct tensor k,
                   struct tensor v, size_t T, size_t D) {
    struct shape s = make_shape(q, k, v, T, D);
    CHECK(y.rows == q.rows && y.cols == q.cols && lse.rows == q.rows && lse.cols == s.heads);
    size_t share = s.heads / s.kv_heads, tasks = T > 0 ? q.rows / T * s.kv_heads : 0;
    struct work layout;
    size_t size = lay_out(&layout, NULL, s, false);
    struct tensor space =
        tensor_alloc((size_t)omp_get_max_threads(), size, DTYPE_F32, MEM_WORKSPACE);
#pragma omp parallel for schedule(static)
    for (size_t task = 0; task < tasks; task++) {
        size_t first_row = task / s.kv_heads * T, kv_head = task % s.kv_heads;
        size_t kv_offset = first_row * k.cols + kv_head * D;
        struct work w;
        lay_out(&w, f32(space) + (size_t)omp_get_thread_num() * size, s, false);
        pack_transposed(w.kt, f32(k) + kv_offset, k.cols, T, D);
        pack(w.v, f32(v) + kv_offset, v.cols, T, D, 1.0f);
        for (size_t h = kv_head * share; h < (kv_head + 1) * share; h++) {
            for (size_t t = 0; t < T; t += QUERIES) {
                size_t offset = (first_row + t) * q.cols + h * D;
                forward_queries(&w, s, f32(y) + offset, f32(lse) + (first_row + t) * s.heads + h,
                                f32(q) + offset, t, smaller(QUERIES, T - t));
            }
        }
    }
    tensor_free(&space);
}

// ---- backward ----------------------------------------------------------------------------------

// Rows [i, i + LANES) of w->p, scores, become probabilities, and those of w->ds, dP, become dS.
static void softmax_backward_rows(struct work *w, struct block b, size_t i) {
    size_t n = mask_scores(w->p, b, i);
    for (size_t l = i; l < i + LANES; l++) {
        float *p = at(w->p, l, 0).data, *ds = at(w->ds, l, 0).data;
        float lse = w->max[l], delta = w->sum[l];
        for (size_t j = 0; j < n; j += LANES) {
            lanes probability = lanes_exp(lanes_load(p + j) - lse);
            lanes_store(p + j, probability);
            lanes_store(ds + j, probability * (lanes_load(ds + j) - delta));
        }
    }
}

// One head's tensors from row first_row of its sample on.
struct head {
    float *dq;
    const float *q;
    const float *dy;
    const float *y;
    const float *lse; // every heads-th is this head's
};

// delta of rows [i, i + LANES): sums of dy y.
static void make_delta(struct work *w, const float *y, size_t y_step, size_t i, size_t count,
                       size_t D) {
    lanes part[LANES];
    for (size_t l = 0; l < LANES; l++) {
        part[l] = (lanes){0};
        prefetch_row(y + smaller(i + l + AHEAD, count - 1) * y_step, D);
        for (size_t d = 0; d < D && i + l < count; d += LANES) {
            lanes dy = lanes_load(at(w->dy, i + l, d).data);
            part[l] += dy * lanes_load_part(y + (i + l) * y_step + d, D - d);
        }
    }
    lanes_store(w->sum + i, lanes_sum_each(part));
}

static void load_queries(struct work *w, struct shape s, struct head h, size_t query,
                         size_t count) {
    size_t C = s.heads * s.D, padded = round_up(count, LANES);
    pack(w->q, h.q + query * C, C, count, s.D, 1.0f / sqrtf((float)s.D));
    pack(w->dy, h.dy + query * C, C, count, s.D, 1.0f);
    for (size_t i = 0; i < padded; i += LANES) {
        make_delta(w, h.y + query * C, C, i, count, s.D);
    }
    for (size_t i = 0; i < padded; i++) {
        w->max[i] = i < count ? h.lse[(query + i) * s.heads] : 0.0f;
    }
}

// Queries [query, query + count) of one head: stores their dq, adds to w->dk and w->dv.
static void backward_queries(struct work *w, struct shape s, struct head h, size_t query,
                             size_t count) {
    size_t C = s.heads * s.D;
    struct block b = {.query = query, .queries = round_up(count, LANES)};
    load_queries(w, s, h, query, count);
    for (b.key = 0; b.key < query + count; b.key += KEYS) {
        b.keys = smaller(KEYS, query + count - b.key);
        multiply_scores(w->p, w->q, at(w->kt, 0, b.key), b, s.D);
        multiply_scores(w->ds, w->dy, at(w->vt, 0, b.key), b, s.D);
        for (size_t i = 0; i < b.queries; i += LANES) {
            softmax_backward_rows(w, b, i);
        }
        multiply_columns(at(w->dv, b.key, 0), w->p, w->dy, b, s.padded_D, true);
        multiply_columns(at(w->dk, b.key, 0), w->ds, w->q, b, s.padded_D, true);
        multiply_rows(w->out, w->ds, at(w->k, b.key, 0), b, s.padded_D, b.key > 0);
    }
    unpack(h.dq + query * C, C, w->out, count, s.D, 1.0f / sqrtf((float)s.D), NULL);
}

static void load_keys(struct work *w, struct shape s, const float *k, const float *v) {
    size_t step = s.kv_heads * s.D, bytes = s.padded_T * s.padded_D * sizeof(float);
    pack_transposed(w->kt, k, step, s.T, s.D);
    pack_transposed(w->vt, v, step, s.T, s.D);
    pack(w->k, k, step, s.T, s.D, 1.0f);
    memset(w->dk.data, 0, bytes);
    memset(w->dv.data, 0, bytes);
}

void ops_attention_backward(struct tensor dq, struct tensor dk, struct tensor dv, struct tensor dy,
                            struct tensor y, struct tensor lse, struct tensor q, struct tensor k,
                            struct tensor v, size_t T, size_t D) {
    struct shape s = make_shape(q, k, v, T, D);
    CHECK(dq.rows == q.rows && dq.cols == q.cols && dk.rows == k.rows && dk.cols == k.cols);
    CHECK(dv.rows == k.rows && dv.cols == k.cols && y.rows == q.rows && y.cols == q.cols);
    CHECK(dy.rows == q.rows && dy.cols == q.cols && lse.rows == q.rows && lse.cols == s.heads);
    size_t share = s.heads / s.kv_heads, tasks = T > 0 ? q.rows / T * s.kv_heads : 0;
    struct work layout;
    size_t size = lay_out(&layout, NULL, s, true);
    struct tensor space =
        tensor_alloc((size_t)omp_get_max_threads(), size, DTYPE_F32, MEM_WORKSPACE);
#pragma omp parallel for schedule(static)
    for (size_t task = 0; task < tasks; task++) {
        size_t first_row = task / s.kv_heads * T, kv_head = task % s.kv_heads;
        size_t kv_offset = first_row * k.cols + kv_head * D;
        struct work w;
        lay_out(&w, f32(space) + (size_t)omp_get_thread_num() * size, s, true);
        load_keys(&w, s, f32(k) + kv_offset, f32(v) + kv_offset);
        for (size_t head = kv_head * share; head < (kv_head + 1) * share; head++) {
            size_t offset = first_row * q.cols + head * D;
            struct head h = {
                .dq = f32(dq) + offset,
                .q = f32(q) + offset,
                .dy = f32(dy) + offset,
                .y = f32(y) + offset,
                .lse = f32(lse) + first_row * s.heads + head,
            };
            for (size_t t = 0; t < T; t += QUERIES) {
                backward_queries(&w, s, h, t, smaller(QUERIES, T - t));
            }
        }
        unpack(f32(dk) + kv_offset, k.cols, w.dk, T, D, 1.0f, NULL);
        unpack(f32(dv) + kv_offset, v.cols, w.dv, T, D, 1.0f, NULL);
    }
    tensor_free(&space);
}
