// Casts between element types, in host memory.
#ifndef SHARD_CAST_H
#define SHARD_CAST_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * @brief y = x in another type: F64, BF16 or F16.
 *
 * Local. Rounds to nearest, ties to even. NaN stays NaN; in 16 bits it keeps the upper bits of its
 * payload and becomes quiet.
 * @param y (count) of type @p dtype
 * @param x (count)
 */
void cast_from_f32(void *y, enum dtype dtype, const float *x, size_t count);

/**
 * @brief y = x, from F64 (rounded to nearest), BF16, F16 or U8.
 *
 * Local.
 * @param y (count)
 * @param x (count) of type @p dtype
 */
void cast_to_f32(float *y, const void *x, enum dtype dtype, size_t count);

#ifdef __cplusplus
}
#endif
#endif
