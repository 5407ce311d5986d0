// Dropout: a mask that is computed where it is needed and never stored.
#include "cpu.h"
#include "ops.h"
#include <math.h>
#include <string.h>

// The same words as random_philox() in random.c, but those of LANES blocks at a time, so that the
// compiler can use vectors. A strip is the words of these blocks, four each.
enum {
    LANES = 32,
    STRIP = 4 * LANES,
};

// The words of blocks first … first+LANES-1. Word w of block l goes to words[4 * l + w].
static void philox_strip(uint32_t words[STRIP], struct random_key key, uint64_t first) {
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
    for (int l = 0; l < LANES; l++) {
        c0[l] = (uint32_t)(first + (uint64_t)l);
        c1[l] = (uint32_t)((first + (uint64_t)l) >> 32);
        c2[l] = (uint32_t)key.purpose;
        c3[l] = key.id;
    }
    uint32_t k0 = (uint32_t)key.seed;
    uint32_t k1 = (uint32_t)(key.seed >> 32);
    for (int round = 0; round < 10; round++) {
        for (int l = 0; l < LANES; l++) {
            uint64_t product0 = (uint64_t)0xD2511F53u * c0[l];
            uint64_t product1 = (uint64_t)0xCD9E8D57u * c2[l];
            c0[l] = (uint32_t)(product1 >> 32) ^ c1[l] ^ k0;
            c2[l] = (uint32_t)(product0 >> 32) ^ c3[l] ^ k1;
            c1[l] = (uint32_t)product1;
            c3[l] = (uint32_t)product0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int l = 0; l < LANES; l++) {
        words[4 * l + 0] = c0[l];
        words[4 * l + 1] = c1[l];
        words[4 * l + 2] = c2[l];
        words[4 * l + 3] = c3[l];
    }
}

// y = x * scale where the word is above `last`, else 0, for `count` elements from `index` on.
static void dropout_run(float *y, const float *x, size_t count, struct random_key key,
                        uint64_t index, uint32_t last, float scale) {
    uint32_t words[STRIP];
    float out[STRIP]; // so that the compiler sees that it is not x, as y may be
    for (size_t done = 0; done < count;) {
        size_t skip = (index + done) % STRIP;
        size_t n = STRIP - skip < count - done ? STRIP - skip : count - done;
        philox_strip(words, key, (index + done) / STRIP * LANES);
        for (size_t i = 0; i < n; i++) {
            float kept = x[done + i] * scale;
            out[i] = words[skip + i] > last ? kept : 0.0f;
        }
        memcpy(y + done, out, n * sizeof *y);
        done += n;
    }
}

void ops_dropout(struct tensor y, struct tensor x, float p, struct random_key key,
                 struct place place) {
    CHECK(y.rows == x.rows && y.cols == x.cols && p >= 0.0f && p <= 1.0f);
    if (p == 0.0f) {
        if (y.data != x.data) {
            ops_copy(y, x);
        }
        return;
    }
    float *out = f32(y);
    const float *in = f32(x);
    uint32_t last = (uint32_t)(ceil(p * 0x1p32) - 1.0); // word < p * 2^32 means word <= last
    float scale = 1.0f / (1.0f - p);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < y.rows; i++) {
        uint64_t index = (uint64_t)(place.first_row + i) * place.whole_cols + place.first_col;
        dropout_run(out + i * y.cols, in + i * y.cols, y.cols, key, index, last, scale);
    }
}
