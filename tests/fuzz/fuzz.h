// What a fuzz target defines, for libFuzzer or for driver.c.
#ifndef SHARD_TESTS_FUZZ_H
#define SHARD_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/** @brief Feeds one input to the code under test. Returns 0; a fault ends the process. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/** @brief Writes the good input number @p k to out (capacity). Returns its size, or 0 if there are
 * no more. */
size_t fuzz_seed(size_t k, uint8_t *out, size_t capacity);

#endif
