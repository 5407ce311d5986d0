#include "random.h"

enum { PHILOX_ROUNDS = 10 };

// The constants of Philox 4x32: two multipliers, and the steps of the key (the golden ratio and
// sqrt(3) - 1, as 32-bit fractions).
static const uint32_t PHILOX_M0 = 0xD2511F53;
static const uint32_t PHILOX_M1 = 0xCD9E8D57;
static const uint32_t PHILOX_W0 = 0x9E3779B9;
static const uint32_t PHILOX_W1 = 0xBB67AE85;

struct random_block random_philox(struct random_key key, uint64_t index) {
    uint32_t k0 = (uint32_t)key.seed;
    uint32_t k1 = (uint32_t)(key.seed >> 32);
    uint32_t c0 = (uint32_t)index;
    uint32_t c1 = (uint32_t)(index >> 32);
    uint32_t c2 = (uint32_t)key.purpose;
    uint32_t c3 = key.id;
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t product0 = (uint64_t)PHILOX_M0 * c0;
        uint64_t product1 = (uint64_t)PHILOX_M1 * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)product0;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return (struct random_block){{c0, c1, c2, c3}};
}

uint32_t random_word(struct random_key key, uint64_t index) {
    return random_philox(key, index / 4).word[index % 4];
}

float random_uniform(struct random_key key, uint64_t index) {
    return (float)(random_word(key, index) >> 8) * 0x1p-24f;
}

void random_permutation(struct random_key key, uint32_t *order, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        order[i] = i;
    }
    for (uint32_t i = count; i-- > 1;) {
        uint32_t j = (uint32_t)(((uint64_t)random_word(key, i) * ((uint64_t)i + 1)) >> 32);
        uint32_t swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
    }
}
