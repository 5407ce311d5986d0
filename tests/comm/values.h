// Known values for the tests of collectives: every rank can tell what every other one holds, and so
// what a reduction must give, to the bit.
#ifndef SHARD_TESTS_VALUES_H
#define SHARD_TESTS_VALUES_H

#include "comm.h"
#include "tensor.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    DTYPES = DTYPE_U8 + 1,
    // Values repeat after so many elements: a prime, so that no size of a chunk is a multiple.
    VALUES = 5003,
};

/**
 * @brief The values of one rank, or what a reduction of several ranks' gives: (VALUES) elements.
 *
 * Element i of a tensor with the shift s holds value (s + i) % VALUES.
 *
 * The values of different ranks at the same place are such that the order of addition shows (1e8
 * and -1e8 among numbers near 1; many bits), with subnormal numbers, zeros of both signs, the
 * largest finite numbers, infinities and NaN here and there. Integers are small enough for their
 * sum over 16 ranks.
 */
struct values {
    void *data;
    enum dtype dtype;
    bool is_max; // of ranks whose NaN, or zeros of both signs, nobody has put in an order
};

/** @brief The values of a rank of a job of @p size ranks; the caller frees them with values_free().
 * Local. */
struct values values_of_rank(int rank, int size, enum dtype dtype);

/**
 * @brief What a reduction of the values of some ranks must be; the caller frees it. Local.
 *
 * A sum is made in the order of the list; BF16 and F16 are added as F32 and rounded once, to the
 * nearest, ties to even.
 * @param parts (count)
 */
struct values values_reduced(const struct values *parts, int count, enum comm_op op);

void values_free(struct values *values);

/** @brief Writes the values into @p t, the first one being number @p shift. Local. */
void values_fill(struct tensor t, const struct values *values, size_t shift);

/** @brief Whether two elements are the same: bit by bit, but one NaN is as good as another. Local.
 */
bool values_equal(const struct values *values, const void *found, const void *expected);

/**
 * @brief Compares a tensor with what it should hold. Local.
 * @param wrong the first wrong element, where the answer is false
 * @param text  (text_size) what it is and what was expected
 */
bool values_check(struct tensor t, const struct values *values, size_t shift, size_t *wrong,
                  char *text, size_t text_size);

/** @brief A hash of the bytes of a tensor, added to the hash so far. Local. */
uint64_t values_hash(struct tensor t, uint64_t hash);

/** @brief In how many places the sum in reverse order has other bits. Local. */
size_t values_order_shows(const struct values *parts, int count);

#endif
