// Counter-based randomness: a value depends on what it is for and where, never on when or by whom.
#ifndef SHARD_RANDOM_H
#define SHARD_RANDOM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What a random number is for. Numbers of different purposes never meet.
enum random_purpose {
    RANDOM_INIT, // coordinates: parameter, element of the whole parameter
    RANDOM_ORDER, // coordinates: epoch, position
    RANDOM_DROPOUT, // coordinates: unit, sample since the start of training, element of the sample
    RANDOM_SAMPLE, // coordinates: 0, position in the text
};

/** @brief The key of a stream of random numbers. */
struct random_key {
    uint64_t seed;
    enum random_purpose purpose;
    uint32_t id; // which parameter, unit, epoch …
};

/** @brief Four random words. */
struct random_block {
    uint32_t word[4];
};

/**
 * @brief The block @p index of the stream @p key: Philox 4x32-10.
 *
 * Local, pure. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
 * SC 2011. The key is the seed; the counter is (index low, index high, purpose, id).
 */
struct random_block random_philox(struct random_key key, uint64_t index);

/** @brief The word @p index of the stream: word index % 4 of block index / 4. Local, pure. */
uint32_t random_word(struct random_key key, uint64_t index);

/** @brief The number @p index of the stream, uniform in [0, 1), with 24 bits: random_word >> 8,
 * times 2^-24. Local, pure. */
float random_uniform(struct random_key key, uint64_t index);

/**
 * @brief A permutation of 0 … count-1 in order[], the same for every caller with the same key.
 *
 * Local. Fisher-Yates, position i swaps with a word of the stream scaled to [0, i].
 * @param order (count)
 */
void random_permutation(struct random_key key, uint32_t *order, uint32_t count);

#ifdef __cplusplus
}
#endif
#endif
